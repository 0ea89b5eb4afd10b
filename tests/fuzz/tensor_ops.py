"""What a random MIR graph is grown from: the op table over values that are there or new leaves, and what passes look
for, which is equal nodes, near-misses, constants and regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.errors import RlxError
from rlx_jax.ir import ops as o
from rlx_jax.ir.graph import Builder, Leaf, Op, TypeCache
from rlx_jax.ir.ops.shape import Bound, SizeOf
from rlx_jax.ir.types import TensorType, is_float, is_static
from tests.fuzz.meaning import sine_and_first, twice_plus_one
from tests.fuzz.sketch import BF16, BOOL, F16, F32, I32, MAX_RANK, Case, Known, Sketch, plain
from tests.op_table import MIR_OPS, SIZES, Sample

Grow = Callable[[Sketch], object]
UNARY_GROWN = (
    "gelu", "silu", "relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "neg", "abs", "sin", "round", "square",
)  # fmt: skip
BINARY_GROWN = ("add", "sub", "mul", "div", "max", "min", "pow")
REDUCE_GROWN = ("sum", "mean", "max", "min", "prod")
"""Functions that random graphs have: passes know no function by name, so each of a shape and domain is enough."""
KINDS: dict[type[Op], Sequence[str]] = {o.Unary: UNARY_GROWN, o.Binary: BINARY_GROWN, o.Reduce: REDUCE_GROWN}
NOT_GROWN = (
    o.Parametric, o.Einsum, o.LogSoftmax, o.Cumulative, o.ArgReduce, o.Sort, o.TopK, o.Pad, o.Tile, o.Take,
    o.TakeAlongAxis, o.GatherNd, o.Scatter, o.ScatterNd, o.Conv, o.ConvTranspose, o.Pool, o.Resize, o.GridSample,
    o.Standardize, o.Patches, o.GridPositions, o.Switch, o.While, o.Scan, o.CustomVjp, o.PairBias, o.FakeQuantize,
    o.Fft, o.Solve, o.Det, o.Sample, o.FusedAttentionBlock, o.FusedTransformerLayer, o.SinusoidTable, o.TokenScan,
    o.TokenWindows, o.TailRows, o.GatedDeltaOp, o.SelectiveScanOp, o.CausalConvOp, o.ExpertFfn,
)  # fmt: skip
"""No pass treats them in a way of its own; their numbers and types are held in tests/test_ops.py."""


def grows(sample: Sample) -> bool:
    """Whether random graphs have it: floats of all sizes that a leaf can have, and functions that are grown."""
    kinds = KINDS.get(type(sample.op))
    dims = [d for t in sample.types for d in t.shape]
    return (kinds is None or sample.op.kind in kinds) and all(map(plain, dims)) and sample.means is None  # type: ignore[attr-defined]


SAMPLES = {cls: found for cls in MIR_OPS if cls not in NOT_GROWN and (found := [*filter(grows, MIR_OPS[cls])])}


def of_table(s: Sketch, sample: Sample, types: Sequence[TensorType]) -> tuple[Known, ...]:
    """The op of a sample over values of these types that are there, or leaves drawn as the table says."""
    operands, state = [], isinstance(sample.op, o.CacheUpdate | o.RingStep | o.Overwrite)
    for place, t in enumerate(types):
        fits = s.pick(lambda k, t=t: k.type == t) if is_float(t.dtype) and not s.coin(3) else None  # type: ignore[misc]
        kind = "state" if state and place == 0 else ""
        low, high = (int(sample.positive), min(sample.below, 9)) if not is_float(t.dtype) else (-3, 4)
        operands.append(fits or s.leaf(t.shape, t.dtype, low, high, sample.positive, kind))
    try:
        return s.add(sample.op, *operands)
    except RlxError:  # types that do not go together
        return ()


def drawn(s: Sketch) -> object:
    """An op of the table."""
    sample = s.choice(SAMPLES[s.choice(tuple(SAMPLES))])
    symbols = any(isinstance(d, str) for d in s.palette) and not s.iterations
    return of_table(s, sample, sample.types if symbols else [t.bind(SIZES) for t in sample.types])


def floating(s: Sketch, rank: int = 0, fits: Callable[[Known], bool] = lambda k: True) -> Known:
    """A floating value of at least that rank: one that is there, else a leaf."""
    found = s.pick(lambda k: k.is_float and len(k.shape) >= rank and fits(k)) if not s.coin(6) else None
    return found or s.leaf(s.dims(max(rank, 1 + s.draw(3))), s.choice((F32, F32, F32, F32, F32, BF16, F16)))


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


def unary(s: Sketch) -> object:
    """f(x); neg, abs and relu of integers too."""
    kind = s.choice(UNARY_GROWN)
    x = s.pick(lambda k: k.type.dtype == I32) if kind in ("neg", "abs", "relu") and s.coin(3) else floating(s)
    return s.one(o.Unary(kind), x)


def binary(s: Sketch) -> object:
    """a ∘ b with broadcasting, of floats or of integers."""
    kind = s.choice((*BINARY_GROWN, "sub", "div"))
    if s.coin(5):
        x = s.pick(lambda k: k.type.dtype == I32) or s.leaf(s.dims(2), I32)
        return s.one(o.Binary(s.choice(("add", "sub", "mul", "max", "min"))), x, partner(s, x))
    x = floating(s)
    y = partner(s, x, positive=kind == "div")
    return s.one(o.Binary(kind), *((x, y) if kind in ("div", "pow") or not s.coin(3) else (y, x)))


def where(s: Sketch) -> object:
    """A choice by a comparison, or by a bool, an integer or a float."""
    x = s.pick(lambda k: k.type.dtype != BOOL) or floating(s)
    y = partner(s, x)
    c = s.one(o.Compare(s.choice(("lt", "ge", "eq"))), x, y) if s.coin() else s.leaf((), s.choice((BOOL, I32, F32)))
    return s.one(o.Where(), c, x, y)


def cast(s: Sketch) -> object:
    """Another dtype."""
    x = s.pick(lambda k: True) or floating(s)
    return s.one(o.CastTo(s.choice([d for d in (F32, BF16, F16, I32, BOOL) if d != x.type.dtype])), x)


def product(s: Sketch) -> object:
    """x · w of any value, with a weight of its own or one that another product has."""
    x, contract = floating(s, 1, lambda k: is_static(k.shape[-1])), s.draw(2)
    if not is_static(x.shape[-1]):
        return None
    square = s.pick(lambda k: k.shape == (x.shape[-1],) * 2 and k.type.dtype == x.type.dtype)
    shape = (x.shape[-1], s.dim())[:: 1 if contract == 0 else -1]
    return s.one(o.MatMul(contract), x, square or s.leaf(shape, x.type.dtype, kind="param"))


def reduce(s: Sketch) -> object:
    """Over one axis or several."""
    x = s.pick(lambda k: len(k.shape) > 0 and k.type.dtype != BOOL) or floating(s, 1)
    axes = tuple(i for i in range(len(x.shape)) if s.coin()) or (s.draw(len(x.shape)),)
    kinds = tuple(kind for kind in REDUCE_GROWN if kind != "mean" or x.type.dtype != I32)
    return s.one(o.Reduce(s.choice(kinds), axes, s.coin()), x)


def cut(s: Sketch) -> object:
    """What was joined is taken apart again, by the sizes of the parts, from either end."""
    x = floating(s, 1)
    axis = s.draw(len(x.shape))
    joined = s.one(o.Concat(axis), x, x)
    bound = Bound((SizeOf(1, axis),), 0, s.coin())
    return s.one(o.CutAxis(axis, bound) if s.coin() else o.CutAxis(axis, stop=bound), joined, x)


def jax_fn(s: Sketch) -> object:
    """A user's closure, with one result or two."""
    x = floating(s, 1, lambda k: k.type.dtype == F32)
    return s.add(o.JaxFn(s.choice((twice_plus_one, sine_and_first))), x) if x.type.dtype == F32 else None


# -- what passes look for ----------------------------------------------------------------------


def shared_products(s: Sketch) -> object:
    """Several products of one value, with weights of different widths; at times they are outputs."""
    x, contract = floating(s, 1, lambda k: is_static(k.shape[-1])), s.draw(2)
    if not is_static(x.shape[-1]):
        return None
    for _ in range(2 + s.draw(2)):
        shape = (x.shape[-1], s.dim())[:: 1 if contract == 0 else -1]
        made = s.one(o.MatMul(contract), x, s.leaf(shape, x.type.dtype, kind="param"))
        if made is not None and s.coin(4):
            s.wanted.append(made)
    return None


def constants(s: Sketch) -> object:
    """An expression of constants, in part cast, reduced or reshaped."""
    dtype = s.choice((F32, F32, I32, BF16, F16))
    shape = (2, s.choice((3, 4)))
    a, b = (s.leaf(shape, dtype, kind="constant") for _ in range(2))
    y = s.one(o.Binary(s.choice(("sub", "mul", "add", "max"))), a, b)
    for _ in range(1 + s.draw(2)):
        x = y if y is not None and len(y.shape) == 2 else a
        ops = (
            o.Transpose((1, 0)), o.Reduce("sum", (0,), True), o.CastTo(F32), o.CastTo(BF16), o.CastTo(I32), o.Iota(1),
            o.Reduce("mean" if x.is_float else "max", (1,), True), o.Unary("neg"), o.Narrow(1, 0, 1),
            o.Reshape((1, -1)),
        )  # fmt: skip
        y = s.one(s.choice(ops), x)
    return y


def nodes_of(s: Sketch) -> list[int]:
    """Numbers of the nodes that compute something."""
    return [i for i, node in enumerate(s.b.nodes) if not isinstance(node.op, Leaf) and not node.op.regions()]


def again(s: Sketch) -> object:
    """A node once more: exactly, with its operands swapped, or with another attribute."""
    known = {k.value: k for k in s.values}
    numbers = [i for i in nodes_of(s) if all(v in known for v in s.b.nodes[i].inputs)]
    if not numbers:
        return None
    node = s.b.nodes[s.choice(numbers[::-1])]
    operands, op = [known[v] for v in node.inputs], node.op
    if s.coin():
        op = variation(s, node.op, operands)
        swaps = isinstance(op, o.Binary | o.Compare | o.Concat) and op == node.op
        operands = operands[::-1] if swaps else operands
    return s.add(op, *operands)


def variation(s: Sketch, op: Op, operands: list[Known]) -> Op:
    """The same op with another attribute that fits the same operands."""
    x = operands[0]
    match op:
        case o.Reduce(keepdims=keepdims):
            return replace(op, keepdims=not keepdims) if s.coin() else replace(op, kind=s.choice(("min", "max", "sum")))
        case o.RmsNormOp() | o.LayerNormOp():
            return replace(op, eps=s.choice((0.5, 1e-5, 2.0)))
        case o.Transpose(perm=perm):
            return o.Transpose(perm[::-1])
        case o.Softmax(axis=axis):
            return o.Softmax((axis + 1) % len(x.shape))
        case o.Cumsum(exclusive=exclusive):
            return replace(op, exclusive=not exclusive)
        case o.Unary():
            return o.Unary(s.choice(("tanh", "silu", "sigmoid", "gelu"))) if x.is_float else op
        case o.FullLike(value=value):
            return replace(op, value=value + 1)
        case o.Iota(axis=axis):
            return o.Iota((axis + 1) % len(x.shape))
        case o.Narrow(axis=axis, start=start) if is_static(x.shape[axis]) and x.shape[axis] > 1:
            return replace(op, start=max(start - 1, 0) if start else 0, length=1)
        case o.AttentionOp(causal=causal, window=window, ahead=0):
            if "key_positions" in op.extra or s.coin():  # a window could leave a query without a key
                return replace(op, causal=not causal)
            return replace(op, window=None if window else 1)
        case o.FusedMatMulBiasAct(activation=activation):
            return replace(op, activation="gelu" if activation != "gelu" else "")
    return op


def repeat(s: Sketch) -> object:
    """Layers that repeat: one or two carries (of one type, often), shared operands, parameters and state of each
    iteration, side outputs."""
    if s.iterations:
        return None
    first = floating(s, 1, lambda k: k.array.size <= 24)
    carried = [first]
    if s.coin():
        second = s.pick(lambda k: k.type == first.type and k != first)
        carried.append(second or (s.leaf(first.shape, first.type.dtype) if all(map(plain, first.shape)) else first))
    shared = [floating(s, 1)] if s.coin() else []
    operands = [*carried, *shared]
    inner = s.body(operands, 2 + s.draw(2))
    before = list(inner.values)
    for _ in range(1 + s.draw(4)):
        inner.choice(BODY)(inner)
    outputs = []
    for k in before[: len(carried)]:
        made = inner.pick(lambda v, k=k: v.type == k.type and v not in before)  # type: ignore[misc]
        layer = inner.leaf((k.shape[-1] if is_static(k.shape[-1]) else 1,), k.type.dtype, kind="param")
        step = inner.one(o.Binary(inner.choice(("sub", "add"))), made or k, layer)
        outputs.append((inner.one(o.Unary(inner.choice(("tanh", "sin"))), step) if step else None) or k)
    if inner.coin():
        outputs = outputs[::-1] if len({k.type for k in outputs}) == 1 else outputs
    for _ in range(s.draw(3)):
        side = inner.pick(lambda v: v not in before)
        outputs += [side] if side else []
    s.repeat(inner, operands, len(carried), outputs)
    return None


BODY: tuple[Grow, ...] = (
    *[drawn] * 12, unary, unary, unary, binary, binary, binary, where, cast, product, product, reduce, cut, jax_fn,
    shared_products, constants, again, again, again,
)  # fmt: skip
ALL: tuple[Grow, ...] = (*BODY, repeat, repeat)
PALETTES = ((2, 3, 4), (3, 4, 2), ("batch", "seq", 4), (2, 4, 4), (1, 3, 6), ("batch", 3, 4))
"""Dimensions of the values of one graph."""


def mir_case(seed: int, ops: int, types: TypeCache) -> Case:
    """A random MIR graph of about so many ops. Fewer ops of the same seed are a prefix, so a failure shrinks."""
    s = Sketch(np.random.default_rng(seed), Builder("fuzz", types))
    s.palette = s.choice(PALETTES)
    s.leaf(s.dims(1 + s.draw(3)), F32, kind="input")
    for _ in range(2 * ops):
        if len(nodes_of(s)) >= ops:
            break
        s.choice(ALL)(s)
    return s.finish()
