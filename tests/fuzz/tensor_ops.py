"""What a random MIR graph is grown from: every tensor op, over values that are there or new leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx_jax.ir import ops as o
from rlx_jax.ir.ops.attention import ROPE_STYLES
from rlx_jax.ir.ops.fused import Step
from rlx_jax.ir.ops.pointwise import COMPARE
from rlx_jax.ir.ops.shape import AxisOf, Bound, SizeOf
from rlx_jax.ir.types import is_static
from tests.fuzz.meaning import sine_and_first, twice_plus_one
from tests.fuzz.sketch import BF16, BOOL, F16, F32, I32, MAX_RANK, Known, Sketch, plain, size

Grow = Callable[[Sketch], object]
UNARY_GROWN = (
    "gelu", "gelu_tanh", "silu", "relu", "sigmoid", "softplus", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "abs",
    "sin", "cos", "tan", "atan", "round", "square", "erf", "asinh", "mish", "log_sigmoid", "soft_sign", "selu",
)  # fmt: skip
BINARY_GROWN = ("add", "sub", "mul", "div", "max", "min", "pow")
REDUCE_GROWN = ("sum", "mean", "max", "min", "prod")
"""Functions that random graphs have: passes know no function by name, so each of a shape and domain is enough."""
EPS = (1e-5, 0.5, 1e-6, 0.05)
OFFSET = (0.0, 0.0, 1.0)
FLOATS = (F32, F32, F32, F32, F32, BF16, F16)


def floating(s: Sketch, rank: int = 0, fits: Callable[[Known], bool] = lambda k: True) -> Known:
    """A floating value of at least that rank: one that is there, else a leaf."""
    found = s.pick(lambda k: k.is_float and len(k.shape) >= rank and fits(k)) if not s.coin(6) else None
    return found or s.leaf(s.dims(max(rank, 1 + s.draw(3))), s.choice(FLOATS))


def features(s: Sketch, even: bool = False) -> Known:
    """A floating value whose last axis is static, even if asked for."""

    def fits(k: Known) -> bool:
        return len(k.shape) > 0 and is_static(k.shape[-1]) and not (even and k.shape[-1] % 2)

    found = s.pick(lambda k: k.is_float and fits(k)) if not s.coin(6) else None
    return found or s.leaf((*s.dims(2 + s.draw(2))[:-1], s.choice((4, 2))), s.choice(FLOATS))


def partner(s: Sketch, x: Known, positive: bool = False) -> Known:
    """A value of x's dtype that broadcasts with it."""
    if not positive and not s.coin(3):
        found = s.pick(lambda k: k.type.dtype == x.type.dtype and broadcasts(x.shape, k.shape))
        if found is not None:
            return found
    rank = s.draw(len(x.shape) + 1)
    shape = [d if plain(d) and not s.coin(4) else 1 for d in x.shape[len(x.shape) - rank :]]
    if rank == len(x.shape) < MAX_RANK - 1 and s.coin(6):
        shape = [2, *shape]
    return s.leaf(tuple(shape), x.type.dtype, positive=positive)


def broadcasts(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether NumPy's rule joins two shapes, symbols included."""
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


def at_least(s: Sketch, x: Known, number: float) -> Known | None:
    """x where it is at least `number`, else |x| + number."""
    if x.array.min(initial=math.inf) >= number:
        return x
    return s.one(o.Binary("add"), s.one(o.Unary("abs"), x), s.scalar(number, x.type.dtype))


def integers(s: Sketch, shape: tuple[Any, ...], below: int) -> Known:
    """int32 in [0, below)."""
    return s.leaf(shape, I32, 0, below)


def unary(s: Sketch) -> object:
    """f(x), in f's domain; neg, abs and relu of integers too."""
    kind = s.choice(UNARY_GROWN)
    if kind in ("neg", "abs", "relu") and s.coin(3):
        x = s.pick(lambda k: k.type.dtype == I32)
        return s.one(o.Unary(kind), x)
    x = floating(s)
    return s.one(o.Unary(kind), at_least(s, x, 0.5) if kind in ("log", "sqrt", "rsqrt") else x)


def binary(s: Sketch) -> object:
    """a ∘ b with broadcasting."""
    kind = s.choice((*BINARY_GROWN, "sub", "div"))
    if s.coin(5):
        x = s.pick(lambda k: k.type.dtype == I32) or s.leaf(s.dims(2), I32)
        kind = s.choice(("add", "sub", "mul", "max", "min"))
        return s.one(o.Binary(kind), x, partner(s, x))
    x = floating(s)
    if kind == "pow":
        return s.one(o.Binary(kind), at_least(s, x, 0.5), partner(s, x))
    y = partner(s, x, positive=kind == "div")
    return s.one(o.Binary(kind), *((x, y) if kind == "div" or not s.coin(3) else (y, x)))


def compare(s: Sketch) -> object:
    """a ∘ b as bool."""
    x = s.pick(lambda k: k.type.dtype != BOOL) or floating(s)
    return s.one(o.Compare(s.choice(tuple(COMPARE))), x, partner(s, x))


def where(s: Sketch) -> object:
    """A choice by a bool, an integer or a float."""
    x = s.pick(lambda k: True) or floating(s)
    y = partner(s, x)
    dtype = s.choice((BOOL, BOOL, I32, F32))
    c = s.pick(lambda k: k.type.dtype == dtype and broadcasts(x.shape, k.shape) and broadcasts(y.shape, k.shape))
    return s.one(o.Where(), c or s.leaf((), dtype), x, y)


def cast(s: Sketch) -> object:
    """Another dtype."""
    x = s.pick(lambda k: True) or floating(s)
    return s.one(o.CastTo(s.choice([d for d in (F32, BF16, F16, I32, BOOL) if d != x.type.dtype])), x)


def full_like(s: Sketch) -> object:
    """A number in a shape."""
    return s.one(o.FullLike(s.choice((2.0, 0.0, -1.0, 3.0)), s.choice((F32, I32, BF16, F16))), floating(s))


def jax_fn(s: Sketch) -> object:
    """A user's closure, with one result or two."""
    x = floating(s, 1, lambda k: k.type.dtype == F32)
    fn = s.choice((twice_plus_one, sine_and_first))
    return s.add(o.JaxFn(fn), x) if x.type.dtype == F32 else None


def weight_of(s: Sketch, x: Known, contract: int, columns: int = 0) -> Known:
    """A weight for x's last axis."""
    shape = (x.shape[-1], columns or s.dim())
    return s.leaf(shape[:: 1 if contract == 0 else -1], x.type.dtype, kind="param")


def product(s: Sketch, x: Known, columns: int = 0) -> Known | None:
    """x · w in either orientation."""
    contract = s.draw(2)
    return s.one(o.MatMul(contract), x, weight_of(s, x, contract, columns))


def matmul(s: Sketch) -> object:
    """x · w, at times in a pinned precision or with an f32 result."""
    x, contract = features(s), s.draw(2)
    op = o.MatMul(contract, s.choice(("default", "highest")), s.coin(3))
    square = s.pick(lambda k: k.shape == (x.shape[-1],) * 2 and k.type.dtype == x.type.dtype)
    return s.one(op, x, square or weight_of(s, x, contract))


def batch_matmul(s: Sketch) -> object:
    """a @ b with batches that broadcast."""
    a = floating(s, 1, lambda k: plain(k.shape[-1]))
    if not plain(a.shape[-1]):
        return None
    if s.coin(5):
        return s.one(o.BatchMatMul(), a, s.leaf((a.shape[-1],), a.type.dtype))
    batch = [d if plain(d) and not s.coin(3) else 1 for d in a.shape[:-2]][s.draw(max(len(a.shape) - 1, 1)) :]
    return s.one(o.BatchMatMul(), a, s.leaf((*batch, a.shape[-1], s.dim()), a.type.dtype))


def fused_product(s: Sketch) -> object:
    """act(x · w + b) as one op."""
    x, contract, columns = features(s), s.draw(2), s.choice((4, 2))
    op = o.FusedMatMulBiasAct(contract, s.choice(("", "gelu", "silu", "relu")), f32_result=s.coin(4))
    dtype = F32 if op.f32_result else x.type.dtype
    return s.one(op, x, weight_of(s, x, contract, columns), s.leaf((columns,), dtype))


def fused_swiglu(s: Sketch) -> object:
    """act(gate) ⊙ up of one operand, the gate first or second."""
    x = features(s, even=True)
    op = o.FusedSwiGLU(s.coin(), s.choice(("silu", "gelu")))
    return s.one(op, x) if x.shape[-1] % 2 == 0 else None


def fused_residual(s: Sketch) -> object:
    """norm(x + residual [+ bias]) as one op."""
    x, biased = features(s), s.coin()
    residual = s.pick(lambda k: k.type == x.type) or x
    count = biased + 1 + s.draw(2)
    weights = [s.leaf((x.shape[-1],), x.type.dtype, kind="param") for _ in range(count)]
    if count == biased + 2 and s.coin():
        return s.one(o.FusedResidualLayerNorm(s.choice(EPS), biased), x, residual, *weights)
    return s.one(o.FusedResidualRmsNorm(s.choice(EPS), biased, s.choice(OFFSET)), x, residual, *weights)


def region(s: Sketch) -> object:
    """A few pointwise ops as one, the later ones over the earlier."""
    x = floating(s, 1)
    y = partner(s, x)
    second = s.choice(("sub", "add", "mul"))
    steps = (Step(o.Binary(second), (0, 1)), Step(o.Unary(s.choice(("tanh", "abs", "silu"))), (2,)))
    return s.one(o.ElementwiseRegion(2, (*steps, Step(o.Binary(s.choice(("sub", "mul"))), (3, s.draw(4))))), x, y)


def norm_of(s: Sketch, x: Known) -> Known | None:
    """An RMS or layer norm of x."""
    gamma, beta = (s.leaf((x.shape[-1],), x.type.dtype, kind=s.choice(("param", "constant"))) for _ in range(2))
    eps = s.choice(EPS)
    if s.coin():
        there = (not s.coin(6), not s.coin(6))
        weights = [w for w, kept in zip((gamma, beta), there, strict=True) if kept]
        return s.one(o.LayerNormOp(eps, *there), x, *weights)
    op = o.RmsNormOp(eps, s.choice(OFFSET))
    return s.one(op, x, gamma, beta) if s.coin() else s.one(op, x, gamma)


def norm(s: Sketch) -> object:
    return norm_of(s, features(s))


def reshape(s: Sketch) -> object:
    """Axes merged, split, or dropped and added."""
    x = floating(s, 1)
    rank, axis = len(x.shape), s.draw(len(x.shape))
    here: list[Any] = [AxisOf(i) for i in range(rank)]
    way = s.draw(4)
    if way == 0 and rank > 1:
        axis = s.draw(rank - 1)
        return s.one(o.Reshape((*here[:axis], -1, *here[axis + 2 :])), x)
    if way == 1 and is_static(x.shape[axis]) and x.shape[axis] % 2 == 0:
        return s.one(o.Reshape((*here[:axis], 2, -1, *here[axis + 1 :])), x)
    if way == 2 and all(map(is_static, x.shape)):
        return s.one(o.Reshape(tuple(reversed(x.shape))), x)
    return s.one(o.Reshape((*here[:axis], 1, *here[axis:])), x)


def transpose(s: Sketch) -> object:
    """Any permutation."""
    x = s.pick(lambda k: len(k.shape) > 1) or floating(s, 2)
    axes, perm = list(range(len(x.shape))), []
    while axes:
        perm.append(axes.pop(s.draw(len(axes)) if len(axes) > 2 else len(axes) - 1))
    return s.one(o.Transpose(tuple(perm)), x)


def narrow(s: Sketch) -> object:
    """Some entries of one axis; of a symbolic one the first or the last."""
    x = s.pick(lambda k: len(k.shape) > 0) or floating(s, 1)
    axis = s.draw(len(x.shape))
    if not is_static(x.shape[axis]):
        return s.one(o.Narrow(axis, s.choice((-1, 0)), 1), x)
    start = s.draw(x.shape[axis])
    length = 1 + s.draw(x.shape[axis] - start)
    return s.one(o.Narrow(axis, start - (x.shape[axis] if s.coin(3) else 0), length), x)


def split_last(s: Sketch) -> object:
    """The last axis in two parts, or in one. None is empty: there is no maximum of nothing."""
    x = s.pick(lambda k: len(k.shape) > 0 and is_static(k.shape[-1])) or floating(s, 1)
    size = x.shape[-1]
    first = 1 + s.draw(size - 1) if size > 1 else size
    return s.add(o.SplitLast((first, size - first) if first < size and s.coin(3) else (size,)), x)


def shard(s: Sketch) -> object:
    """What the axes of a value are."""
    x = s.pick(lambda k: len(k.shape) > 0) or floating(s, 1)
    return s.one(o.Shard(tuple("batch" if axis == 0 else None for axis in range(len(x.shape)))), x)


def slices(s: Sketch) -> object:
    """x[key] with an index, a step, a new axis or an ellipsis."""
    x = s.pick(lambda k: len(k.shape) > 0) or floating(s, 1)
    key = s.choice(
        ((Ellipsis, -1), (0,), (None, 0), ((None, None, -1),), (Ellipsis, (None, None, 2)), (Ellipsis, None))
    )
    return s.one(o.Slice(key), x)


def concat(s: Sketch) -> object:
    """Two or three values along an axis."""
    x = s.pick(lambda k: len(k.shape) > 0) or floating(s, 1)
    axis = s.draw(len(x.shape))
    rest = [*x.shape[:axis], *x.shape[axis + 1 :]]

    def joins(k: Known) -> bool:
        alike = k.type.dtype == x.type.dtype and len(k.shape) == len(x.shape)
        return alike and [*k.shape[:axis], *k.shape[axis + 1 :]] == rest

    return s.one(o.Concat(axis), x, *(s.pick(joins) for _ in range(1 + s.draw(2))))


def gather(s: Sketch) -> object:
    """Rows of a table by integer ids, some out of range."""
    table = s.pick(lambda k: 1 < len(k.shape) < 4 and is_static(k.shape[0]) and k.array.size <= 64)
    table = table or s.leaf((s.choice((4, 6, 3)), s.dim()), s.choice(FLOATS))
    ids = s.pick(lambda k: k.type.dtype == I32 and len(k.shape) < 3 and k.array.size <= 12)
    return s.one(o.Gather(), table, ids or integers(s, s.dims(s.draw(3)), len(table.array)))


def take_row(s: Sketch) -> object:
    """One row of each batch entry."""
    x = floating(s, 2, lambda k: plain(k.shape[0]))
    if not plain(x.shape[0]):
        return None
    return s.one(o.TakeRow(), x, integers(s, (x.shape[0],), x.array.shape[1]))


def expand(s: Sketch) -> object:
    """New axes in front, axes of 1 repeated, sizes that are numbers or those of another value."""
    x = floating(s, 1)
    lender = s.pick(lambda k: len(k.shape) > 0) or x
    front = [SizeOf(1, s.draw(len(lender.shape)))] if len(x.shape) < MAX_RANK and s.coin() else []
    kept = [3 if is_static(d) and d == 1 else SizeOf(0, i) for i, d in enumerate(x.shape)]
    return s.one(o.Expand((*front, *kept)), x, *([lender] if front else []))


def iota(s: Sketch) -> object:
    """0, 1, … along an axis, also of a product that nothing else needs."""
    x = floating(s, 1)
    return s.one(o.Iota(s.draw(len(x.shape))), x)


def cut(s: Sketch) -> object:
    """What was joined is taken apart again, by the sizes of the parts, from either end."""
    x = floating(s, 1)
    axis = s.draw(len(x.shape))
    joined = s.one(o.Concat(axis), x, x) if len(x.array) else None
    if joined is None:
        return None
    bound = Bound((SizeOf(1, axis),), 0, s.coin())
    return s.one(o.CutAxis(axis, bound) if s.coin() else o.CutAxis(axis, stop=bound), joined, x)


def reduce(s: Sketch) -> object:
    """Over one axis or several."""
    x = s.pick(lambda k: len(k.shape) > 0 and k.type.dtype != BOOL) or floating(s, 1)
    axes = tuple(i for i in range(len(x.shape)) if s.coin()) or (s.draw(len(x.shape)),)
    kinds = tuple(kind for kind in REDUCE_GROWN if kind != "mean" or x.type.dtype != I32)
    return s.one(o.Reduce(s.choice(kinds), axes, s.coin()), x)


def cumsum(s: Sketch) -> object:
    """Along any axis."""
    x = s.pick(lambda k: len(k.shape) > 0 and k.type.dtype != BOOL) or floating(s, 1)
    return s.one(o.Cumsum(s.draw(len(x.shape)), s.coin()), x)


def softmax(s: Sketch) -> object:
    """Along any axis."""
    x = floating(s, 1)
    return s.one(o.Softmax(s.draw(len(x.shape)) - (len(x.shape) if s.coin() else 0)), x)


def repeat_heads(s: Sketch) -> object:
    """Each head several times."""
    x = features(s, even=True)
    return s.one(o.RepeatHeads(2 if x.shape[-1] % 2 == 0 else 1, 1 + s.draw(3)), x)


def packed(s: Sketch, batch: Any, length: Any, width: int, dtype: Any) -> Known:
    """`[batch, length, width]` of a dtype, one that is there if possible."""
    found = s.pick(lambda k: k.type.dtype == dtype and k.shape == (batch, length, width))
    return found or s.leaf((batch, length, width), dtype)


def attention(s: Sketch) -> object:
    """Grouped heads, every mask, scale and softcap."""
    batch, queries, keys = s.dims(3)
    keys = keys if s.coin() else queries
    kv_heads, groups, dim = s.choice(((1, 1, 2), (2, 2, 1), (1, 3, 2), (2, 1, 2), (2, 2, 2)))
    dtype, heads = s.choice(FLOATS), kv_heads * groups
    q = packed(s, batch, queries, heads * dim, dtype)
    k, v = (s.leaf((batch, keys, kv_heads * width), dtype) for width in (dim, s.choice((dim, dim, 3))))
    extra, rest = [], []
    if s.coin(3):
        extra.append("keep")
        each = (s.choice((batch, 1)), s.choice((heads, 1)), s.choice((queries, 1)), keys)
        shape = each if s.coin(3) else (each[0], keys)
        rest.append(s.leaf(shape, s.choice((BOOL, I32)), 0, 2))
    if s.coin(4):
        extra.append("bias")
        rest.append(s.leaf((s.choice((1, batch)), s.choice((heads, 1)), queries, keys), dtype))
    if s.coin(4):
        extra.append("sinks")
        rest.append(s.leaf((heads,), s.choice((dtype, F32))))
    if s.coin(4):
        extra.append("positions")
        rest.append(integers(s, (s.choice((1, batch)), queries), size(keys)))
        if not s.iterations and s.coin():
            extra.append("key_positions")
            at = s.leaf((batch, keys), I32, -1, size(keys), kind="input")
            at.array[:, 0] = 0  # every query has a key
            rest.append(at)
    window = s.choice((None, None, 2, 1)) if "key_positions" not in extra else None
    causal = s.coin()
    op = o.AttentionOp(
        heads,
        kv_heads,
        causal,
        window,
        s.choice((None, 0.7)),
        s.choice((None, 1.5)),
        tuple(extra),
        ahead=0 if causal or window is None else s.draw(3),
    )
    return s.one(op, q, k, v, *rest)


def rope_table(s: Sketch) -> object:
    """cos and sin of positions."""
    freqs = s.choice(((1.0, 0.31), (0.5,), (1.0, 0.2, 0.04)))
    axes = (1, 0, 1)[: len(freqs)] if s.coin(4) else ()
    positions = integers(s, (*s.dims(2), 2) if axes else s.dims(2), 9)
    return s.add(o.RopeTable(freqs, s.choice((1.0, 1.2)), axes), positions)


def rope(s: Sketch) -> object:
    """Rotary embedding by a table in whole or in part of a head."""
    batch, length = s.dims(2)
    dim, n_rot = s.choice(((4, 4), (4, 2), (2, 2), (6, 4)))
    x = packed(s, batch, length, dim * (1 + s.draw(2)), s.choice(FLOATS))
    rows = s.choice((1, batch))
    freqs = (1.0, 0.31, 0.1)[: n_rot // 2]
    tables = s.add(o.RopeTable(freqs), integers(s, (rows, length), 9))
    return s.one(o.RopeOp(dim, n_rot, s.choice(ROPE_STYLES)), x, *tables) if tables else None


def overwrite(s: Sketch) -> object:
    """All of an array of the state."""
    new = floating(s, 1)
    old = s.leaf(new.shape, new.type.dtype, kind="state")
    return s.one(o.Overwrite(), old, new)


def cache_update(s: Sketch) -> object:
    """New rows in a cache at each row's own slot."""
    batch, new, width = s.dims(1)[0], s.dim(), s.dim()
    dtype = s.choice(FLOATS)
    cache = s.leaf((batch, s.choice((4, 6, 3)), width), dtype, kind="state")
    rows = packed(s, batch, new, width, dtype)
    return s.one(o.CacheUpdate(s.coin()), cache, rows, integers(s, (batch,), 5), integers(s, (batch,), new + 1))


def ring_step(s: Sketch) -> object:
    """A ring of the last tokens, read and written."""
    batch, new = s.dims(1)[0], s.choice((1, 2, 3))
    dtype = s.choice(FLOATS)
    ring = s.leaf((batch, s.choice((4, 3, 2)), 1, 2), dtype, kind="state")
    rows = s.leaf((batch, new, 1, 2), dtype)
    return s.add(o.RingStep(), ring, rows, integers(s, (batch,), 7), integers(s, (batch,), new + 1))


def relative_buckets(s: Sketch) -> object:
    """Of the distances along an axis, to the last bucket."""
    x = floating(s, 1)
    return s.one(o.RelativeBuckets(s.draw(len(x.shape)), s.choice((4, 8)), s.choice((3, 4))), x)


OPS: tuple[Grow, ...] = (
    unary, unary, unary, binary, binary, binary, compare, where, cast, cast, full_like, jax_fn, matmul,
    batch_matmul, fused_product, fused_swiglu, norm, reshape, reshape, transpose, narrow, split_last, slices,
    concat, cut, gather, take_row, iota, relative_buckets, expand, reduce, reduce, softmax, cumsum, repeat_heads, shard,
    attention, rope_table, rope, cache_update, ring_step, overwrite, fused_residual, fused_residual, region,
)  # fmt: skip
