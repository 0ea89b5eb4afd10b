"""`FlowValue`: a value of a flow that is being traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Value, located
from rlx_jax.ir.ops import contract, pointwise, shaping
from rlx_jax.ir.types import Dim, TensorType, as_dtype, is_static

if TYPE_CHECKING:
    from rlx_jax.emit import Emit


class FlowValue:
    """A value in a flow that is being traced: `+ - * / ** @`, comparison, slicing, `.reshape`, `.sum` …

    It has a shape and a dtype but no numbers; branching on it is an error.
    """

    __slots__ = ("emit", "value")
    __array_ufunc__ = None  # NumPy arrays leave operators with a FlowValue to it

    def __init__(self, emit: Emit, value: Value) -> None:
        self.emit, self.value = emit, value

    @property
    def type(self) -> TensorType:
        return self.emit.builder.type(self.value)

    @property
    def shape(self) -> tuple[int | Dim, ...]:
        """Sizes; a symbolic one is a `Dim`, which refuses comparison with numbers."""
        return tuple(d if is_static(d) else Dim(d) for d in self.type.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    def __repr__(self) -> str:
        return f"FlowValue({self.type})"

    def _with(self, kind: str, other: Any, swapped: bool = False) -> FlowValue:
        other = self.emit.lift(other, self)
        a, b = (other, self) if swapped else (self, other)
        return self.emit.add(pointwise.Binary(kind), a, b)

    def __add__(self, other: Any) -> FlowValue:
        return self._with("add", other)

    def __sub__(self, other: Any) -> FlowValue:
        return self._with("sub", other)

    def __mul__(self, other: Any) -> FlowValue:
        return self._with("mul", other)

    def __truediv__(self, other: Any) -> FlowValue:
        return self._with("div", other)

    def __pow__(self, other: Any) -> FlowValue:
        return self._with("pow", other)

    def __rpow__(self, other: Any) -> FlowValue:
        return self._with("pow", other, swapped=True)

    def __radd__(self, other: Any) -> FlowValue:
        return self._with("add", other, swapped=True)

    def __rsub__(self, other: Any) -> FlowValue:
        return self._with("sub", other, swapped=True)

    def __rmul__(self, other: Any) -> FlowValue:
        return self._with("mul", other, swapped=True)

    def __rtruediv__(self, other: Any) -> FlowValue:
        return self._with("div", other, swapped=True)

    def __neg__(self) -> FlowValue:
        return self.emit.unary("neg", self)

    def __abs__(self) -> FlowValue:
        return self.emit.unary("abs", self)

    def _compare(self, kind: str, other: Any) -> FlowValue:
        if isinstance(other, Dim):
            raise GraphError(f"{self.emit.path}: a FlowValue is compared with dimension {other}; sizes are not values")
        return self.emit.add(pointwise.Compare(kind), self, self.emit.lift(other, self))

    def __lt__(self, other: Any) -> FlowValue:
        return self._compare("lt", other)

    def __le__(self, other: Any) -> FlowValue:
        return self._compare("le", other)

    def __gt__(self, other: Any) -> FlowValue:
        return self._compare("gt", other)

    def __ge__(self, other: Any) -> FlowValue:
        return self._compare("ge", other)

    def __eq__(self, other: Any) -> FlowValue:  # type: ignore[override]
        return self._compare("eq", other)

    def __ne__(self, other: Any) -> FlowValue:  # type: ignore[override]
        return self._compare("ne", other)

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

    def __matmul__(self, other: FlowValue) -> FlowValue:
        other = self.emit.lift(other, self)
        return self.emit.add(contract.product(self.type, other.type), self, other)

    def __getitem__(self, key: Any) -> FlowValue:
        keys = key if isinstance(key, tuple) else (key,)
        return self.emit.add(shaping.Slice(tuple(self._index(k) for k in keys)), self)

    def _index(self, key: Any) -> Any:
        if isinstance(key, slice):
            parts = (key.start, key.stop, key.step)
            if all(p is None or isinstance(p, int) for p in parts):
                return parts
        elif key is None or key is Ellipsis or (isinstance(key, int) and not isinstance(key, bool)):
            return key
        raise GraphError(
            f"{self.emit.path}: a FlowValue is indexed with ints, slices of ints, None and ...; got {key!r} "
            "(for gathers use emit.jax)"
        )

    def axis(self, axis: int) -> int:
        """A non-negative axis number; negative ones count from the end."""
        if isinstance(axis, bool) or not isinstance(axis, int) or not -self.ndim <= axis < self.ndim:
            raise ShapeError(f"{self.emit.path}: {self.type} has no axis {axis!r}")
        return axis % self.ndim

    def reshape(self, *shape: Any) -> FlowValue:
        """Reshape; sizes are ints, one -1, or dimensions of this value (`x.shape[0]`)."""
        dims = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        sizes = [d.expr if isinstance(d, Dim) else d for d in dims]
        with located(self.emit.builder.origin):
            return self.emit.add(shaping.reshape_to(self.type, sizes), self)

    def transpose(self, *perm: int) -> FlowValue:
        """Permute the axes; without arguments reverse them."""
        axes = perm or tuple(reversed(range(self.ndim)))
        return self.emit.add(shaping.Transpose(tuple(self.axis(a) for a in axes)), self)

    @property
    def T(self) -> FlowValue:
        return self.transpose()

    def astype(self, dtype: Any) -> FlowValue:
        """Cast element by element."""
        return self.emit.add(pointwise.CastTo(as_dtype(dtype)), self)

    def _reduce(self, kind: str, axis: int | tuple[int, ...] | None, keepdims: bool) -> FlowValue:
        axes = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        return self.emit.add(shaping.Reduce(kind, tuple(self.axis(a) for a in axes), keepdims), self)

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> FlowValue:
        """Sum over `axis`."""
        return self._reduce("sum", axis, keepdims)

    def mean(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> FlowValue:
        """Mean over `axis`."""
        return self._reduce("mean", axis, keepdims)

    def max(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> FlowValue:
        """Maximum over `axis`."""
        return self._reduce("max", axis, keepdims)

    def min(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> FlowValue:
        """Minimum over `axis`."""
        return self._reduce("min", axis, keepdims)
