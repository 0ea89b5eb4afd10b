"""`FlowValue`, a value of a flow that is being traced, and `FlowState`, the registers that stages share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Value
from rlx_jax.ir.types import Dim, TensorType, is_static
from rlx_jax.trace.builders import Builders
from rlx_jax.trace.value_type import ValueType
from rlx_jax.trace.writer import Axes


def _operator(name: str, *, reflected: bool = False) -> Callable[[Any, Any], FlowValue]:
    """Return the operator method for the builder `name`; with `reflected`, the value is the second operand."""

    def write(value: Any, other: Any) -> FlowValue:
        operands = (other, value) if reflected else (value, other)
        result: FlowValue = getattr(value.emit, name)(*operands)
        return result

    return write


class FlowValue:
    """A value in a flow that is being traced: `+ - * / ** @`, comparison, slicing, `.reshape`, `.sum` …

    It has a shape and a dtype but no numbers; branching on it is an error.
    """

    __slots__ = ("emit", "value")
    __array_ufunc__ = None  # `array + value` then calls the operator of FlowValue

    def __init__(self, emit: Builders[FlowValue], value: Value) -> None:
        self.emit, self.value = emit, value

    @property
    def type(self) -> TensorType:
        return self.emit.type_of(self)

    @property
    def shape(self) -> tuple[int | Dim, ...]:
        """The sizes; a symbolic size is a `Dim`, and comparing it with a number is an error."""
        return ValueType(self.type).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    def hir_id(self) -> Value:
        """Return the graph value: the number of its node, and the index of the result."""
        return self.value

    def __repr__(self) -> str:
        return f"FlowValue({self.type})"

    __add__ = _operator("add")
    __radd__ = _operator("add", reflected=True)
    __sub__ = _operator("sub")
    __rsub__ = _operator("sub", reflected=True)
    __mul__ = _operator("mul")
    __rmul__ = _operator("mul", reflected=True)
    __truediv__ = _operator("div")
    __rtruediv__ = _operator("div", reflected=True)
    __pow__ = _operator("pow")
    __rpow__ = _operator("pow", reflected=True)
    __matmul__ = _operator("mm")
    __lt__ = _operator("lt")
    __le__ = _operator("le")
    __gt__ = _operator("gt")
    __ge__ = _operator("ge")
    __eq__ = _operator("eq")  # type: ignore[assignment]
    __ne__ = _operator("ne")  # type: ignore[assignment]

    def __neg__(self) -> FlowValue:
        return self.emit.neg(self)

    def __abs__(self) -> FlowValue:
        return self.emit.abs(self)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise GraphError(
            f"{self.emit.path}: a FlowValue ({self.type}) has no truth value while the flow is traced; "
            "use emit.where, or emit.jax with lax.cond"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(
            f"{self.emit.path}: a FlowValue holds no numbers; call JAX functions through emit.jax(fn, value)"
        )

    __float__ = __int__ = __index__ = __complex__ = __array__

    def __iter__(self) -> Iterator[FlowValue]:
        size = self.type.shape[0] if self.ndim else 0
        if not self.ndim or not is_static(size):
            raise GraphError(f"{self.emit.path}: cannot iterate over {self.type}")
        return iter([self[i] for i in range(size)])

    def __getitem__(self, key: Any) -> FlowValue:
        return self.emit.slice(self, key)

    def reshape(self, *shape: Any) -> FlowValue:
        """Reshape the value; sizes are ints, one -1, names of symbolic sizes, or sizes of it (`x.shape[0]`)."""
        return self.emit.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)

    def transpose(self, *perm: int) -> FlowValue:
        """Permute the axes; without arguments reverse them."""
        return self.emit.transpose(self, perm or None)

    @property
    def T(self) -> FlowValue:
        return self.transpose()

    def astype(self, dtype: Any) -> FlowValue:
        """Cast element by element."""
        return self.emit.cast(self, dtype)

    def sum(self, axis: Axes = None, keepdims: bool = False) -> FlowValue:
        """Return the sum over `axis`."""
        return self.emit.sum(self, axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> FlowValue:
        """Return the mean over `axis`."""
        return self.emit.mean(self, axis, keepdims=keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> FlowValue:
        """Return the maximum over `axis`."""
        return self.emit.max(self, axis, keepdims=keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> FlowValue:
        """Return the minimum over `axis`."""
        return self.emit.min(self, axis, keepdims=keepdims)


class GdnInputSlots(NamedTuple):
    """The inputs of a GdnScan: q, k, v `[B,S,heads,n]`, g and beta `[B,S,heads]`."""

    q: FlowValue
    k: FlowValue
    v: FlowValue
    g: FlowValue
    beta: FlowValue


class DecodeBindings(NamedTuple):
    """The inputs of explicit decode: rope rows of the new tokens, a keep mask `[B, P+S]`, and the cached keys and
    values `[B, P, K·D]` of each layer. cos and sin are None if a later RopeTables stage computes them."""

    cos: FlowValue | None
    sin: FlowValue | None
    mask: FlowValue | None
    past_k: tuple[FlowValue, ...]
    past_v: tuple[FlowValue, ...]


@dataclass
class FlowState:
    """Registers that one stage writes and a later one reads.

    Attributes:
        program: the program that the flow compiles to by default.
        hidden_shape: not used by stages of this package.
        loaded_params: the results of `emit.load_param`, by key and whether it is transposed.
    """

    program: str = "forward"

    rope_cos: FlowValue | None = None
    rope_sin: FlowValue | None = None
    implicit_rope_stage: str = ""  # the first stage that computed its tables itself, for lack of any
    zero_beta: FlowValue | None = None
    embed_weight: FlowValue | None = None
    hidden_shape: tuple[int | Dim, ...] | None = None
    decode: DecodeBindings | None = None
    residual: FlowValue | None = None
    gdn: GdnInputSlots | None = None
    inputs: dict[str, FlowValue | None] = field(default_factory=dict)
    named: dict[str, FlowValue] = field(default_factory=dict)
    streams: dict[str, FlowValue] = field(default_factory=dict)
    outputs: dict[str, FlowValue] = field(default_factory=dict)
    loaded_params: dict[tuple[str, bool], FlowValue] = field(default_factory=dict)
    repeats: list[list[int]] = field(default_factory=list)
    contracts: list[Any] = field(default_factory=list)  # one `StageContract` per stage that declares one
    last_none_stage: str = ""

    @property
    def residual_skip(self) -> FlowValue | None:
        """The value that ResidualSave saved: `residual`."""
        return self.residual

    @property
    def residual_shape(self) -> tuple[int | Dim, ...] | None:
        """The shape of the value that ResidualSave saved."""
        return None if self.residual is None else self.residual.shape
