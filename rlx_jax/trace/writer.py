"""How a method writes an op: what all topics of methods share. `Emit` writes with `FlowValue`s, `GraphModule` with
`Value`s.

The methods are one class, cut into files by topic, each of which extends the one before it: `writer` (appending,
constants, any JAX function) → `arithmetic` (elements, reductions) → `shapes` → `products` → `images` → `control`, which
are the tensor ops and recurrences; → `attention` → `builders` (blocks) → `compat`, names of the specification. So a
topic calls the earlier ones on `self`, whatever the values are, mypy holds it to their types, and an editor offers all
of them after `emit.`. Those that are one method for one of its kinds, such as `add` and
`max`, are `of_kind(method, kind, doc)`, which keeps their signatures. Nothing is overridden but what this file leaves
open, and `add_all` and `_write`, by `Emit`.

The rules that hold for all tensor ops, and for the blocks of `rlx_jax.trace.builders`:

- Operands come first, in the order of the op's own formula; what follows the operands that a formula names is
  keyword-only, so that two numbers, or two weights of one shape, cannot change places without a word. Where the
  specification gives these by position, `rlx_jax.trace.checks` takes them so too; other calls are a GraphError.
- Beside a value stands a number: `add(x, 1.0)`. It takes the dtype of the value, or is refused where it does not fit.
- Axes may be negative, and `axis` has this name everywhere.
- A name has one spelling. Those that only the specification has, `reshape_` and its like, are in
  `rlx_jax.trace.compat`.
- A weight is a value, `[in, out]` unless the call says `transpose=True`. In a stage it may also be the key of a weight,
  which is read as the checkpoint stores it, `[out, in]` unless the call says `transpose=False`.

Shapes are inferred; `out_shape` is optional and checked, of every method: of several results it has a shape for each,
or one for all. All methods raise ShapeError, DTypeError or GraphError where
operands do not fit, and GraphError for a block in a module that is not at HIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from rlx_jax.errors import GraphError, RlxError, ShapeError, named_kind
from rlx_jax.ir.graph import BodyInput, Builder, GraphStage, Hir, Op, Value, located
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.ops.custom import JaxFn, small_constant
from rlx_jax.ir.param import Roles
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import Dim, DimLike, TensorType, ValueType, is_static
from rlx_jax.ir.user_functions import Captured
from rlx_jax.trace.checks import check_attributes, check_calls, of_shape
from rlx_jax.trace.checks import is_number as is_number
from rlx_jax.trace.parameters import WeightKey, WeightStack

V = TypeVar("V")
# Ints, names of symbolic sizes, and sizes of values (`x.shape[0]`).
Shape = Sequence[Any]
# One axis, several, or None for all of them.
Axes = int | Sequence[int] | None


@dataclass(eq=False)
class Body:
    """A body of a loop or choice that is being written, `builder` inside of `outer`.

    Its first `given` inputs are what it is called with; behind them stand values of the program around it, which become
    operands: `captures` has the number of each. Where that is None, there may be none.
    """

    builder: Builder
    outer: Builder
    given: int
    captures: dict[Value, int] | None
    what: str

    def number(self, value: Value) -> int:
        """The number of the input that a value of `outer` is."""
        if self.captures is None:
            raise GraphError(
                f"{self.what}: a body reads only what it is given, and this one reads another value or weight"
            )
        return self.captures.setdefault(value, self.given + len(self.captures))

    def take(self, value: Value) -> Value:
        """A value of `outer` as the body has it."""
        return self.builder.leaf(BodyInput(self.number(value), type=self.outer.type(value)))


class Writer(Generic[V]):
    """What every topic of ops is written with, over the values `V` of whoever writes."""

    builder: Builder
    captured: Captured
    _bodies: tuple[Body, ...] = ()

    def __init_subclass__(cls) -> None:
        """Check how the methods of every topic are called, as `rlx_jax.trace.checks` describes."""
        super().__init_subclass__()
        check_calls(cls)

    @property
    def level(self) -> GraphStage:
        """Where the program stands."""
        raise NotImplementedError

    # -- what a writer defines ---------------------------------------------------------------

    def own(self, value: V) -> Value:
        """The graph value behind one of ours; anything else is a GraphError."""
        raise NotImplementedError

    def wrap(self, value: Value) -> V:
        """A graph value as users get it."""
        raise NotImplementedError

    def weight(
        self,
        weight: V | WeightKey | WeightStack,
        roles: Roles | None = None,
        *,
        shape: Sequence[DimLike | None] | None = None,
        init: Init | None = None,
    ) -> V:
        """A weight operand as a value; a stage takes the key of a weight too, with what `Emit.param` takes."""
        raise NotImplementedError

    def inside(self, value: Value) -> Value:
        """A value as the body that is being written has it; one of the program around it becomes an operand."""
        found = Value(value.node, value.index)
        if value.owner is self.builder or (value.owner is None and not self._bodies):
            return found
        around = [body.outer for body in self._bodies]
        if value.owner not in around:
            raise GraphError(
                f"{self.path}: a value of the body of a loop or choice is used outside of it; let it return it"
            )
        for body in self._bodies[around.index(value.owner) :]:
            found = body.take(found)
        return found

    # -- appending ---------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The current block path, `layers.3.self_attn`; the name of the program outside of all blocks."""
        return path_text(self.builder.here.path)

    def type_of(self, value: V) -> TensorType:
        """The type of a value as the IR holds it."""
        return self.builder.type(self.own(value))

    def shape(self, value: V) -> ValueType:
        """The shape and dtype of a value. A symbolic size refuses comparison with a number."""
        return ValueType(self.type_of(value))

    def add_all(self, op: Op, *values: V) -> tuple[V, ...]:
        """Append any op; all of its results.

        Raises:
            GraphError: a HIR block below HIR. ShapeError, DTypeError, GraphError: it does not fit.
        """
        if not isinstance(op, Op):
            raise GraphError(f"{self.path}: expected an op, got {type(op).__name__}")
        if self.level != GraphStage.HIR and isinstance(op, Hir):
            raise GraphError(f"{op.name()} is a HIR block; module {self.builder.name!r} is at {self.level}")
        operands, before = [self.own(v) for v in values], len(self.builder.nodes)
        with located(self.builder.here):
            try:
                results = self._write(op, *operands)
                self._check_elements(op, results, before)
                return tuple(self.wrap(v) for v in results)
            except (TypeError, ValueError) as error:
                if not isinstance(error, RlxError):
                    check_attributes(op)
                raise

    def _check_elements(self, op: Op, results: tuple[Value, ...], before: int) -> None:
        """Nothing that is written is empty at every size; a slice of a symbolic axis may be, at some."""
        for found in map(self.builder.type, results):
            if any(is_static(d) and d == 0 for d in found.shape):
                del self.builder.nodes[before:]
                raise ShapeError(f"{op.text()} gives {found}, which has no elements: every dimension is at least 1")

    def _write(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        return self.builder.add(op, *operands)

    def add_node(self, op: Op, *values: V, out_shape: Shape | None = None) -> V:
        """Append any op with one result; `out_shape` is checked against what is inferred.

        Raises:
            GraphError: the op has several results. GraphError, ShapeError, DTypeError: as `add_all`.
        """
        before = len(self.builder.nodes)
        results = self.add_all(op, *values)
        if len(results) != 1:
            del self.builder.nodes[before:]
            raise GraphError(f"{self.path}: {op.text()} has {len(results)} results: add_all gives all of them")
        of_shape(self, op.name(), results[0], out_shape)
        return results[0]

    def constant(self, value: Any, dtype: Any = None) -> V:
        """A small array of the program (not a weight): at most 1 MiB, in its own dtype or in `dtype`.

        64-bit numbers become 32-bit ones, as in inputs; whole Python numbers are i32, others f32.

        Raises:
            DTypeError: `dtype` cannot hold a value. GraphError: over 1 MiB.
        """
        with located(self.builder.here):
            return self.wrap(self.builder.leaf(small_constant(value, dtype)))

    def lift(self, value: Any, like: V) -> V:
        """A number as a scalar constant in the dtype of `like`; a value as it is."""
        if isinstance(value, Dim):
            raise GraphError(f"{self.path}: an op on values gets dimension {value}; sizes are not values")
        return self.constant(value, self.type_of(like).dtype) if is_number(value) else value

    def _pair(self, op: str, a: V | float, b: V | float) -> tuple[V, V]:
        """Two operands, one of which may be a number."""
        like: Any = b if is_number(a) else a
        if is_number(like):
            raise GraphError(f"{self.path}: {op} of {a!r} and {b!r}: one of them must be a value")
        return self.lift(a, like), self.lift(b, like)

    def _axis(self, value: V, axis: int) -> int:
        """A non-negative axis number; negative ones count from the end."""
        found = self.type_of(value)
        if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -found.rank <= axis < found.rank:
            raise ShapeError(f"{self.path}: {found} has no axis {axis!r}")
        return int(axis) % found.rank

    def _axes(self, value: V, axes: Axes) -> tuple[int, ...]:
        chosen = range(self.type_of(value).rank) if axes is None else axes if isinstance(axes, Iterable) else (axes,)
        return tuple(self._axis(value, axis) for axis in chosen)

    # -- any JAX function --------------------------------------------------------------------

    def jax(self, fn: Callable[..., Any], *values: V) -> Any:
        """Call any JAX function on values: an array gives a value, a tuple of arrays a tuple of them.

        The function is traced with symbolic sizes, so it may not branch on them, and once more for each program. What
        it captures may not change meanwhile, and is at most 1 MiB: an error else.
        """
        if not callable(fn):
            raise GraphError(f"{self.path}: jax: expected a function and then values, got {named_kind(fn)}")
        op = JaxFn(fn)
        results = self.add_all(op, *values)
        operands = tuple(self.type_of(v) for v in values)
        out = op.remember(operands)
        self.captured.record(f"{self.path}: {op.text()}", operands, op.first[0][1], fn)
        return results if isinstance(out, tuple | list) else results[0]


check_calls(Writer)
