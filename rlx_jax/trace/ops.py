"""Tensor ops as methods, written once: `Emit` writes with `FlowValue`s, `GraphModule` with `Value`s.

The rules that hold for them, and for the blocks of `rlx_jax.trace.builders`:

- Operands come first, in the order of the op's own formula; what follows the operands that a formula names is
  keyword-only, so that two numbers, or two weights of one shape, cannot change places without a word.
- Beside a value stands a number: `add(x, 1.0)`. It takes the dtype of the value, or is refused where it does not fit.
- Axes may be negative, and `axis` has this name everywhere.
- A name has one spelling. `reshape_`, `transpose_`, `narrow_`, `concat_`, `gather_`, and `sm`, `ln`, `gelu_approx`,
  `attention_kind`, `attention_kind_opts`, `transformer_block` are other names of the same methods.
- A weight is a value, `[in, out]` unless the call says `transpose=True`. In a stage it may also be the key of a weight,
  which is read as the checkpoint stores it, `[out, in]` unless the call says `transpose=False`.

Shapes are inferred; `out_shape` is optional and checked. All methods raise ShapeError, DTypeError or ArityError where
operands do not fit, and LevelError for a block in a module that is not at HIR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from rlx_jax.errors import GraphError, LevelError, RlxError, ShapeError, shown
from rlx_jax.ir.captured import Captured
from rlx_jax.ir.graph import Builder, GraphStage, Hir, Op, Value, located
from rlx_jax.ir.ops.custom import JaxFn, small_constant
from rlx_jax.ir.ops.index import Gather, Iota, TakeRow
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, FullLike, Unary, Where
from rlx_jax.ir.ops.reduce import Cumsum, Reduce, Softmax
from rlx_jax.ir.ops.shape import Concat, Expand, Narrow, RepeatHeads, Shard, SizeOf, Slice, Transpose, reshape_to
from rlx_jax.ir.param import Roles
from rlx_jax.ir.roles import check_roles
from rlx_jax.ir.types import Dim, TensorType, ValueType, as_dim, as_dtype, is_static, path_text
from rlx_jax.trace.checks import check_attributes, items_of

V = TypeVar("V")
Shape = Sequence[Any]
"""Ints, names of symbolic sizes, and sizes of values (`x.shape[0]`)."""
Axes = int | Sequence[int] | None
"""One axis, several, or None for all of them."""


def is_number(value: object) -> bool:
    """Whether an operand is a plain number, to stand beside a value."""
    return isinstance(value, bool | int | float | np.number | np.bool_)


class Ops(Generic[V]):
    """The ops, over the values `V` of whoever writes. See the module for the rules."""

    builder: Builder
    captured: Captured

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

    def weight(self, weight: V | str, roles: Roles | None = None) -> V:
        """A weight operand as a value; a stage takes the key of a weight too, whose axes are `roles`."""
        raise NotImplementedError

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
            LevelError: a HIR block below HIR. ShapeError, DTypeError, ArityError: it does not fit.
        """
        if not isinstance(op, Op):
            raise GraphError(f"{self.path}: expected an op, got {type(op).__name__}")
        if self.level != GraphStage.HIR and isinstance(op, Hir):
            raise LevelError(f"{op.name()} is a HIR block; module {self.builder.name!r} is at {self.level}")
        operands = [self.own(v) for v in values]
        with located(self.builder.here):
            try:
                return tuple(self.wrap(v) for v in self._write(op, *operands))
            except (TypeError, ValueError) as error:
                if not isinstance(error, RlxError):
                    check_attributes(op)
                raise

    def _write(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        return self.builder.add(op, *operands)

    def add_node(self, op: Op, *values: V, out_shape: Shape | None = None) -> V:
        """Append any op with one result; `out_shape` is checked against what is inferred.

        Raises:
            GraphError: the op has several results. LevelError, ShapeError, DTypeError, ArityError: as `add_all`.
        """
        before = len(self.builder.nodes)
        results = self.add_all(op, *values)
        if len(results) != 1:
            del self.builder.nodes[before:]
            raise GraphError(f"{self.path}: {op.text()} has {len(results)} results: add_all gives all of them")
        if out_shape is not None:
            found = self.type_of(results[0])
            where = f"{self.path}: {op.name()}"
            dims = tuple(as_dim(d, where) for d in items_of(out_shape, where, "a list of sizes as out_shape"))
            if dims != found.shape:
                declared = TensorType(dims, found.dtype)
                raise ShapeError(f"{self.path}: {op.name()}: declared {declared}, inferred {found}")
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

    # -- arithmetic: NumPy's broadcasting, one dtype -----------------------------------------

    def binary(self, kind: str, a: V | float, b: V | float, *, out_shape: Shape | None = None) -> V:
        """`add`, `sub`, `mul`, `div`, `max`, `min` or `pow`."""
        return self.add_node(Binary(kind), *self._pair(kind, a, b), out_shape=out_shape)

    def add(self, a: V | float, b: V | float) -> V:
        """a + b."""
        if isinstance(a, Op):
            raise GraphError(f"{self.path}: add(a, b) is the sum of two values; add_node({a.name()}, …) appends an op")
        return self.binary("add", a, b)

    def sub(self, a: V | float, b: V | float) -> V:
        """a − b."""
        return self.binary("sub", a, b)

    def mul(self, a: V | float, b: V | float) -> V:
        """a · b, element by element."""
        return self.binary("mul", a, b)

    def div(self, a: V | float, b: V | float) -> V:
        """a / b."""
        return self.binary("div", a, b)

    def pow(self, a: V | float, b: V | float) -> V:
        """aᵇ."""
        return self.binary("pow", a, b)

    def maximum(self, a: V | float, b: V | float) -> V:
        """The larger of two, element by element."""
        return self.binary("max", a, b)

    def minimum(self, a: V | float, b: V | float) -> V:
        """The smaller of two, element by element."""
        return self.binary("min", a, b)

    def compare(self, kind: str, a: V | float, b: V | float) -> V:
        """`eq`, `ne`, `lt`, `le`, `gt` or `ge`, as bool."""
        return self.add_node(Compare(kind), *self._pair(kind, a, b))

    def eq(self, a: V | float, b: V | float) -> V:
        """a = b, as bool."""
        return self.compare("eq", a, b)

    def ne(self, a: V | float, b: V | float) -> V:
        """a ≠ b, as bool."""
        return self.compare("ne", a, b)

    def lt(self, a: V | float, b: V | float) -> V:
        """a < b, as bool."""
        return self.compare("lt", a, b)

    def le(self, a: V | float, b: V | float) -> V:
        """a ≤ b, as bool."""
        return self.compare("le", a, b)

    def gt(self, a: V | float, b: V | float) -> V:
        """a > b, as bool."""
        return self.compare("gt", a, b)

    def ge(self, a: V | float, b: V | float) -> V:
        """a ≥ b, as bool."""
        return self.compare("ge", a, b)

    def where(self, condition: V, on_true: V | float, on_false: V | float) -> V:
        """`on_true` where `condition` is not zero, else `on_false`; each of these may be a number."""
        if is_number(on_true) and is_number(on_false):
            on_true = self.constant(np.asarray([on_true, on_false])[0])  # the dtype that holds both
        return self.add_node(Where(), condition, *self._pair("where", on_true, on_false))

    # -- functions of one value --------------------------------------------------------------

    def activation(self, kind: str, x: V) -> V:
        """A function of one value, by its name in `UNARY`: each of them is a method too."""
        return self.add_node(Unary(kind), x)

    def sigmoid(self, x: V) -> V:
        """σ(x)."""
        return self.activation("sigmoid", x)

    def silu(self, x: V) -> V:
        """x σ(x)."""
        return self.activation("silu", x)

    def gelu(self, x: V) -> V:
        """½x(1 + erf(x/√2))."""
        return self.activation("gelu", x)

    def gelu_tanh(self, x: V) -> V:
        """½x(1 + tanh(√(2/π)(x + 0.044715x³)))."""
        return self.activation("gelu_tanh", x)

    gelu_approx = gelu_tanh

    def relu(self, x: V) -> V:
        """max(x, 0)."""
        return self.activation("relu", x)

    def softplus(self, x: V) -> V:
        """ln(1 + eˣ)."""
        return self.activation("softplus", x)

    def tanh(self, x: V) -> V:
        """tanh x."""
        return self.activation("tanh", x)

    def exp(self, x: V) -> V:
        """eˣ."""
        return self.activation("exp", x)

    def log(self, x: V) -> V:
        """ln x."""
        return self.activation("log", x)

    def sqrt(self, x: V) -> V:
        """√x."""
        return self.activation("sqrt", x)

    def rsqrt(self, x: V) -> V:
        """1/√x."""
        return self.activation("rsqrt", x)

    def neg(self, x: V) -> V:
        """−x."""
        return self.activation("neg", x)

    def abs(self, x: V) -> V:
        """|x|."""
        return self.activation("abs", x)

    def sin(self, x: V) -> V:
        """sin x."""
        return self.activation("sin", x)

    def cos(self, x: V) -> V:
        """cos x."""
        return self.activation("cos", x)

    def tan(self, x: V) -> V:
        """tan x."""
        return self.activation("tan", x)

    def atan(self, x: V) -> V:
        """arctan x."""
        return self.activation("atan", x)

    def round(self, x: V) -> V:
        """The nearest whole number, halves to the even one."""
        return self.activation("round", x)

    def cast(self, x: V, dtype: Any) -> V:
        """The same values in another dtype."""
        return self.add_node(CastTo(as_dtype(dtype)), x)

    # -- along axes --------------------------------------------------------------------------

    def reduce(self, kind: str, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """`sum`, `mean`, `max`, `min` or `prod` over one axis, several, or all (None). The dtype stays."""
        return self.add_node(Reduce(kind, self._axes(x, axis), keepdims), x)

    def sum(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The sum over `axis`."""
        return self.reduce("sum", x, axis, keepdims=keepdims)

    def mean(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The mean over `axis`."""
        return self.reduce("mean", x, axis, keepdims=keepdims)

    def max(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The largest along `axis`; `maximum` is that of two values."""
        return self.reduce("max", x, axis, keepdims=keepdims)

    def min(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The smallest along `axis`; `minimum` is that of two values."""
        return self.reduce("min", x, axis, keepdims=keepdims)

    def prod(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The product over `axis`."""
        return self.reduce("prod", x, axis, keepdims=keepdims)

    def softmax(self, x: V, axis: int = -1) -> V:
        """Softmax along `axis`."""
        return self.add_node(Softmax(self._axis(x, axis)), x)

    sm = softmax

    def cumsum(self, x: V, axis: int = -1, *, exclusive: bool = False) -> V:
        """The running sum along `axis`; `exclusive` leaves each entry out of its own sum."""
        return self.add_node(Cumsum(self._axis(x, axis), exclusive), x)

    # -- shapes ------------------------------------------------------------------------------

    def reshape(self, x: V, shape: Shape | int) -> V:
        """Reshape to ints, one -1, or symbolic sizes of x; a product of those is -1."""
        wanted = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
        with located(self.builder.here):
            dims = [-1 if not isinstance(d, Dim | str) and d == -1 else as_dim(d, "reshape") for d in wanted]
            op = reshape_to(self.type_of(x), dims)
        return self.add_node(op, x)

    reshape_ = reshape

    def transpose(self, x: V, perm: Sequence[int] | None = None) -> V:
        """Permute the axes; without `perm` reverse them."""
        found = self.type_of(x)
        expected = f"the {found.rank} axes of {found} in their new order, as a list"
        axes = reversed(range(found.rank)) if perm is None else items_of(perm, f"{self.path}: transpose", expected)
        return self.add_node(Transpose(tuple(self._axis(x, axis) for axis in axes)), x)

    transpose_ = transpose

    def slice(self, x: V, key: Any) -> V:
        """`x[key]` for ints, slices of ints, `None` and `...`; `numpy.s_[:, 1:]` spells a key."""
        keys = key if isinstance(key, tuple) else (key,)
        return self.add_node(Slice(tuple(self._index(k) for k in keys)), x)

    def _index(self, key: Any) -> Any:
        if hasattr(key, "indices") and all(p is None or isinstance(p, int) for p in (key.start, key.stop, key.step)):
            return key.start, key.stop, key.step
        if key is None or key is Ellipsis or (isinstance(key, int) and not isinstance(key, bool)):
            return key
        raise GraphError(
            f"{self.path}: a value is indexed with ints, slices of ints, None and ...; got {key!r} "
            "(gather(table, ids) reads rows)"
        )

    def shard(self, x: V, *roles: str | None) -> V:
        """x itself, and what each of its axes is (`rlx_jax.ir.roles.ROLES`; None: nothing said): `shard(x, "batch",
        "sequence", "heads")`. Over a mesh of devices it is divided by them; on one device it is x."""
        return self.add_node(Shard(check_roles(roles, self.type_of(x), f"{self.path}: shard")), x)

    def narrow(self, x: V, axis: int, start: int, length: int) -> V:
        """`length` elements of one axis from `start` on; a negative start counts from the end."""
        return self.add_node(Narrow(self._axis(x, axis), start, length), x)

    narrow_ = narrow

    def concat(self, values: Sequence[V], axis: int = -1) -> V:
        """Join values along `axis`."""
        parts = items_of(values, f"{self.path}: concat", "a list of values, [a, b]")
        if not parts:
            raise GraphError(f"{self.path}: concat of no values")
        return self.add_node(Concat(self._axis(parts[0], axis)), *parts)

    concat_ = concat

    def broadcast_to(self, x: V, shape: Shape) -> V:
        """`x` repeated along axes of 1, and along new axes in front, up to `shape`: ints and symbolic sizes.

        Raises:
            ShapeError: it does not broadcast, or neither x nor an input of the program has a size that is asked for.
        """
        refs: list[Value] = []
        target: list[int | SizeOf] = []
        where = f"{self.path}: broadcast_to"
        for dim in (as_dim(d, where) for d in items_of(shape, where, "a list of sizes")):
            if is_static(dim):
                target.append(dim)
                continue
            value, axis = self._holder(self.own(x), dim)
            if value != self.own(x) and value not in refs:
                refs.append(value)
            target.append(SizeOf(refs.index(value) + 1 if value in refs else 0, axis))
        return self.add_node(Expand(tuple(target)), x, *(self.wrap(r) for r in refs))

    def _holder(self, x: Value, dim: Any) -> tuple[Value, int]:
        """A value with an axis of a symbolic size: x, or an input of the program."""
        for value in (x, *(self.builder.leaf(i) for i in self.builder.inputs)):
            dims = self.builder.type(value).shape
            if dim in dims:
                return value, dims.index(dim)
        raise ShapeError(f"{self.path}: broadcast_to: no input of the program has an axis of size {dim}")

    def gather(self, table: V, ids: V) -> V:
        """`table[ids]`: table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`."""
        return self.add_node(Gather(), table, ids)

    gather_ = gather

    def take_row(self, x: V, index: V) -> V:
        """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]`, index `[B]` integers → `[B, 1, …]`."""
        return self.add_node(TakeRow(), x, index)

    def repeat_heads(self, x: V, *, heads: int, times: int) -> V:
        """Each of `heads` heads `times` times: `[…, K·D]` → `[…, K·times·D]`."""
        return self.add_node(RepeatHeads(heads, times), x)

    def iota(self, x: V, axis: int) -> V:
        """`0, 1, …` along one axis of x: i32 `[size]`."""
        return self.add_node(Iota(self._axis(x, axis)), x)

    def full_like(self, x: V, value: float, dtype: Any = None) -> V:
        """`value` in the shape of x, in its dtype or in `dtype`."""
        chosen = self.type_of(x).dtype if dtype is None else as_dtype(dtype)
        if not is_number(value):
            raise GraphError(f"{self.path}: full_like takes a number, got {shown(value)}")
        with located(self.builder.here):
            small_constant(value, chosen)  # refuses what the dtype cannot hold
        return self.add_node(FullLike(float(value), chosen), x)

    def zeros_like(self, x: V, dtype: Any = None) -> V:
        """0 in the shape of x."""
        return self.full_like(x, 0.0, dtype)

    def ones_like(self, x: V, dtype: Any = None) -> V:
        """1 in the shape of x."""
        return self.full_like(x, 1.0, dtype)

    # -- any JAX function --------------------------------------------------------------------

    def jax(self, fn: Callable[..., Any], *values: V) -> Any:
        """Call any JAX function on values: an array gives a value, a tuple of arrays a tuple of them.

        The function is traced with symbolic sizes, so it may not branch on them. NumPy arrays that it captures are
        copied; over 1 MiB they are an error.
        """
        fn = self.captured.own(fn)
        results = self.add_all(JaxFn(fn), *values)
        if len(results) > 1:
            return results
        out = jax.eval_shape(fn, *(self.type_of(v).spec for v in values))
        return results if isinstance(out, tuple | list) else results[0]
