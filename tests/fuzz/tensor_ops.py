"""What a random MIR graph is grown from: the op table over values that are there or new leaves, and what passes look
for, which is equal nodes, near-misses, constants and regions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.ir import ops as o
from rlx_jax.ir.graph import Builder, Leaf, Op, TypeCache
from rlx_jax.ir.types import TensorType, is_float, is_static
from tests.fuzz.sketch import BF16, BOOL, F16, F32, I32, MAX_RANK, Case, Known, Sketch, plain
from tests.ops import MIR_OPS, SIZES, Sample

Grow = Callable[[Sketch], object]
UNARY_GROWN = (
    "gelu", "silu", "relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "neg", "abs", "sin", "round", "square",
)  # fmt: skip
BINARY_GROWN = ("add", "sub", "mul", "div", "max", "min", "pow")
REDUCE_GROWN = ("sum", "mean", "max", "min", "prod")
"""Functions that random graphs have: passes know no function by name, so each of a shape and domain is enough."""
KINDS: dict[type[Op], Sequence[str]] = {o.Unary: UNARY_GROWN, o.Binary: BINARY_GROWN, o.Reduce: REDUCE_GROWN}
GROWN: tuple[Any, ...] = (
    o.Unary, o.Binary, o.Compare, o.Where, o.CastTo, o.FullLike, o.JaxFn, o.AttentionOp, o.RopeOp, o.RopeTable,
    o.CacheUpdate, o.Overwrite, o.RingStep, o.MatMul, o.FusedMatMulBiasAct, o.BatchMatMul, o.RmsNormOp, o.LayerNormOp,
    o.FusedSwiGLU, o.FusedResidualLayerNorm, o.FusedResidualRmsNorm, o.ElementwiseRegion, o.Reshape, o.Transpose,
    o.Shard, o.Narrow, o.SplitLast, o.Slice, o.Iota, o.RepeatHeads, o.RelativeBuckets, o.CutAxis, o.Expand, o.Concat,
    o.Reduce, o.Softmax, o.Cumsum, o.Gather, o.TakeRow,
)  # fmt: skip
"""The ops that passes treat in ways of their own, or that are like those. Of the others tests/test_ops.py holds the
numbers and types."""


def grows(sample: Sample) -> bool:
    """Whether random graphs have it: floats of all sizes that a leaf can have, and functions that are grown."""
    kinds = KINDS.get(type(sample.op))
    dims = [d for t in sample.types for d in t.shape]
    return (kinds is None or sample.op.kind in kinds) and all(map(plain, dims)) and sample.means is None  # type: ignore[attr-defined]


SAMPLES = {cls: [*filter(grows, MIR_OPS[cls])] for cls in GROWN}


def of_table(s: Sketch, sample: Sample, types: Sequence[TensorType]) -> tuple[Known, ...]:
    """The op of a sample over values of these types that are there, or leaves drawn as the table says."""
    operands, state = [], isinstance(sample.op, o.CacheUpdate | o.RingStep | o.Overwrite)
    for place, t in enumerate(types):
        fits = s.pick(lambda k, t=t: k.type == t) if is_float(t.dtype) and not s.coin(3) else None  # type: ignore[misc]
        kind = "state" if state and place == 0 else ""
        low, high = (int(sample.positive), min(sample.below, 9)) if not is_float(t.dtype) else (-3, 4)
        operands.append(fits or s.leaf(t.shape, t.dtype, low, high, sample.positive, kind))
    return s.add(sample.op, *operands)


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


def reduce(s: Sketch) -> object:
    """Over one axis or several."""
    x = s.pick(lambda k: len(k.shape) > 0 and k.type.dtype != BOOL) or floating(s, 1)
    axes = tuple(i for i in range(len(x.shape)) if s.coin()) or (s.draw(len(x.shape)),)
    kinds = tuple(kind for kind in REDUCE_GROWN if kind != "mean" or x.is_float)
    return s.one(o.Reduce(s.choice(kinds), axes, s.coin()), x)


def constants(s: Sketch) -> object:
    """An expression of constants, in part cast, reduced or reshaped."""
    dtype = s.choice((F32, F32, I32))
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
    match op:
        case o.Reduce(keepdims=keepdims):
            return replace(op, keepdims=not keepdims) if s.coin() else replace(op, kind=s.choice(("min", "max", "sum")))
        case o.RmsNormOp() | o.LayerNormOp():
            return replace(op, eps=s.choice((0.5, 1e-5, 2.0)))
        case o.Transpose(perm=perm):
            return o.Transpose(perm[::-1])
        case o.Cumsum(exclusive=exclusive):
            return replace(op, exclusive=not exclusive)
        case o.Unary() if operands[0].is_float:
            return o.Unary(s.choice(("tanh", "silu", "sigmoid", "gelu")))
        case o.FullLike(value=value):
            return replace(op, value=value + 1)
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
    *[drawn] * 18, unary, unary, unary, binary, binary, binary, reduce, constants, again, again, again,
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
