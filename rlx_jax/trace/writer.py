"""`Writer`, the base class of all methods that write ops. `Emit` writes with `FlowValue`s, `GraphModule` with `Value`s.

The methods form one class, split into files by topic, where each class extends the previous one: `writer` (appending,
constants, any JAX function) → `arithmetic` (elementwise, reductions) → `shapes` → `products` → `image_ops` → `control`,
which are the tensor ops and recurrences; → `attention` → `builders` (blocks) → `compat`, the names of the
specification. So a topic calls earlier ones on `self` for any type of values, mypy checks the calls, and an editor
completes all of them after `emit.`. A method that is one kind of a general one, such as `add` and `max`, is
`bind_kind(method, kind, doc)`, which keeps the signature. Subclasses override only the abstract methods of this file,
and `Emit` also `add_all` and `_write`.

The rules for all tensor ops, and for the blocks of `rlx_jax.trace.builders`:

- Operands come first, in the order of the op's formula. All other arguments are keyword-only, so that two numbers, or
  two weights of one shape, cannot be confused unnoticed. Where the specification passes them by position,
  `rlx_jax.trace.checks` accepts that form too; other calls are a GraphError.
- A number may replace one of two operands: `add(x, 1.0)`. It gets the dtype of the other one, or is refused if it does
  not fit.
- Axes may be negative, and the argument is always called `axis`.
- A method has one spelling. Names that only the specification has, such as `reshape_`, are in `rlx_jax.trace.compat`.
- A weight is a value, `[in, out]` unless the call has `transpose=True`. In a stage it may also be the key of a weight,
  which is laid out as in the checkpoint, `[out, in]` unless the call has `transpose=False`.

Shapes are inferred. Every method takes an optional `out_shape`, which is checked: one shape for all results, or one for
each. All methods raise ShapeError, DTypeError or GraphError if operands do not fit, and GraphError for a block in a
module that is not at HIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlx_jax.errors import GraphError, RlxError, ShapeError, describe_type
from rlx_jax.ir.graph import BodyInput, Builder, GraphStage, Hir, Op, Value, locate_errors
from rlx_jax.ir.ops.custom import JaxFn, small_constant
from rlx_jax.ir.param import Roles
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import Dim, DimLike, Init, TensorType, is_static
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.trace.checks import check_attributes, check_calls, check_out_shape
from rlx_jax.trace.checks import is_integer as is_integer
from rlx_jax.trace.checks import is_number as is_number
from rlx_jax.trace.parameters import WeightKey, WeightStack
from rlx_jax.trace.value_type import ValueType

V = TypeVar("V")
# Ints, names of symbolic sizes, and sizes of values (`x.shape[0]`).
Shape = Sequence[Any]
# One axis, several, or None for all of them.
Axes = int | Sequence[int] | None


@dataclass(eq=False)
class Body:
    """The body of a loop or branch that is being written with `builder`, inside the program of `outer`.

    Attributes:
        num_args: number of inputs that are the arguments of the body. Later inputs are captured values of the outer
            program, which become operands of the op.
        captures: the input number of each captured value; None if the body must not capture any.
        op_name: name of the op, for messages.
    """

    builder: Builder
    outer: Builder
    num_args: int
    captures: dict[Value, int] | None
    op_name: str

    def capture_number(self, value: Value) -> int:
        """Return the number of the input for a captured value of `outer`.

        Raises:
            GraphError: the body must not capture values.
        """
        if self.captures is None:
            raise GraphError(
                f"{self.op_name}: a body reads only its arguments, but this one reads another value or weight"
            )
        return self.captures.setdefault(value, self.num_args + len(self.captures))

    def capture(self, value: Value) -> Value:
        """Return the value inside the body for a captured value of `outer`."""
        return self.builder.leaf(BodyInput(self.capture_number(value), type=self.outer.type(value)))


class Writer(Generic[V]):
    """Base class of the builders of ops, generic in the type of their values `V`."""

    builder: Builder
    captured: CapturedArrays
    _bodies: tuple[Body, ...] = ()

    def __init_subclass__(cls) -> None:
        """Wrap the methods of every subclass in the call checks of `rlx_jax.trace.checks`."""
        super().__init_subclass__()
        check_calls(cls)

    @property
    def level(self) -> GraphStage:
        """The stage of the program, such as HIR."""
        raise NotImplementedError

    # -- abstract methods --------------------------------------------------------------------

    def unwrap(self, value: V) -> Value:
        """Return the graph value of a writer's value; anything else is a GraphError."""
        raise NotImplementedError

    def wrap(self, value: Value) -> V:
        """Return a graph value as a value of the writer."""
        raise NotImplementedError

    def weight(
        self, weight: V | WeightKey | WeightStack, roles: Roles | None = None, *,
        shape: Sequence[DimLike | None] | None = None, init: Init | None = None,
    ) -> V:  # fmt: skip
        """Return a weight operand as a value; `Emit` also takes a key, with the options of `Emit.param`."""
        raise NotImplementedError

    def to_current_body(self, value: Value) -> Value:
        """Return a value for use in the current body; a value of an enclosing program is captured as an operand.

        Raises:
            GraphError: the value belongs to the body of another loop or branch.
        """
        inner_value = Value(value.node, value.index)
        if value.owner is self.builder or (value.owner is None and not self._bodies):
            return inner_value
        outer_builders = [body.outer for body in self._bodies]
        if value.owner not in outer_builders:
            raise GraphError(
                f"{self.path}: a value of the body of a loop or branch is used outside; return it from the body"
            )
        for body in self._bodies[outer_builders.index(value.owner) :]:
            inner_value = body.capture(inner_value)
        return inner_value

    # -- appending ---------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The current block path, such as `layers.3.self_attn`, or the name of the program outside of all blocks."""
        return path_text(self.builder.current_origin.path)

    def type_of(self, value: V) -> TensorType:
        """Return the IR type of a value."""
        return self.builder.type(self.unwrap(value))

    def shape(self, value: V) -> ValueType:
        """Return the shape and dtype of a value. Comparing a symbolic size with a number is an error."""
        return ValueType(self.type_of(value))

    def add_all(self, op: Op, *values: V) -> tuple[V, ...]:
        """Append any op and return all of its results.

        Raises:
            GraphError: a HIR block below HIR. ShapeError, DTypeError, GraphError: the operands do not fit.
        """
        if not isinstance(op, Op):
            raise GraphError(f"{self.path}: expected an op, got {type(op).__name__}")
        if self.level != GraphStage.HIR and isinstance(op, Hir):
            raise GraphError(f"{op.name()} is a HIR block; module {self.builder.name!r} is at {self.level}")
        operands, num_nodes = [self.unwrap(v) for v in values], len(self.builder.nodes)
        with locate_errors(self.builder.current_origin):
            try:
                results = self._write(op, *operands)
                self._check_elements(op, results, num_nodes)
                return tuple(self.wrap(v) for v in results)
            except (TypeError, ValueError) as error:
                # A built-in error, also of the op's own evaluation, may come from an attribute of a wrong type.
                if error.__cause__ is not None or not isinstance(error, RlxError):
                    check_attributes(op)
                raise

    def _check_elements(self, op: Op, results: tuple[Value, ...], num_nodes: int) -> None:
        """Refuse results with a static size of 0, and remove their nodes.

        A slice of a symbolic axis may still be empty at some sizes.
        """
        for output in map(self.builder.type, results):
            if any(is_static(d) and d == 0 for d in output.shape):
                del self.builder.nodes[num_nodes:]  # a refused op leaves no node
                raise ShapeError(f"{op.text()} returns {output}, which has no elements: every dimension is at least 1")

    def _write(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        return self.builder.add(op, *operands)

    def add_node(self, op: Op, *values: V, out_shape: Shape | None = None) -> V:
        """Append any op with one result and return it; `out_shape` is checked against the inferred shape.

        Raises:
            GraphError: the op has several results. GraphError, ShapeError, DTypeError: as `add_all`.
        """
        num_nodes = len(self.builder.nodes)
        results = self.add_all(op, *values)
        if len(results) != 1:
            del self.builder.nodes[num_nodes:]
            raise GraphError(f"{self.path}: {op.text()} has {len(results)} results: add_all returns all of them")
        check_out_shape(self, op.name(), results[0], out_shape)
        return results[0]

    def constant(self, value: Any, dtype: Any = None) -> V:
        """Return a small array as a constant of the program, not a weight: at most 1 MiB, in its own dtype or in
        `dtype`.

        64-bit numbers become 32-bit ones, as in inputs; Python ints are i32, floats f32.

        Raises:
            DTypeError: `dtype` cannot hold a value. GraphError: over 1 MiB.
        """
        with locate_errors(self.builder.current_origin):
            return self.wrap(self.builder.leaf(small_constant(value, dtype)))

    def lift(self, value: Any, like: V) -> V:
        """Return a number as a scalar constant in the dtype of `like`, or a value as it is."""
        if isinstance(value, Dim):
            raise GraphError(f"{self.path}: an op on values got the dimension {value}; sizes are not values")
        return self.constant(value, self.type_of(like).dtype) if is_number(value) else value

    def _pair(self, op: str, a: V | float, b: V | float) -> tuple[V, V]:
        """Return two operands as values; one of them may be a number."""
        reference: Any = b if is_number(a) else a
        if is_number(reference):
            raise GraphError(f"{self.path}: {op} of {a!r} and {b!r}: one of them must be a value")
        return self.lift(a, reference), self.lift(b, reference)

    def _axis(self, value: V, axis: int) -> int:
        """Return an axis as a non-negative number; negative ones count from the end."""
        t = self.type_of(value)
        if not is_integer(axis) or not -t.rank <= axis < t.rank:
            raise ShapeError(f"{self.path}: {t} has no axis {axis!r}")
        return int(axis) % t.rank

    def _axes(self, value: V, axes: Axes) -> tuple[int, ...]:
        selection = range(self.type_of(value).rank) if axes is None else axes if isinstance(axes, Iterable) else (axes,)
        return tuple(self._axis(value, axis) for axis in selection)

    # -- any JAX function --------------------------------------------------------------------

    def jax(self, fn: Callable[..., Any], *values: V) -> Any:
        """Call any JAX function on values, and return a value for an array, or a tuple for a tuple of arrays.

        The function is traced with symbolic sizes, so it may not branch on them, and again for each program. Captured
        arrays must not change in between, and are at most 1 MiB; otherwise the call is an error.
        """
        if not callable(fn):
            raise GraphError(f"{self.path}: jax: expected a function and then values, got {describe_type(fn)}")
        op = JaxFn(fn)
        results = self.add_all(op, *values)
        operands = tuple(self.type_of(v) for v in values)
        out = op.record_trace(operands)
        # Later builds compare with this record, because every program has to capture the same arrays.
        self.captured.record(f"{self.path}: {op.text()}", operands, op.recorded[0][1], fn)
        return results if isinstance(out, tuple | list) else results[0]


check_calls(Writer)
