"""Every tensor op and every block with operands that fit it. What each means stands in `tests/fuzz/meaning.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import rlx_jax as rlx
from rlx_jax.ir import hir
from rlx_jax.ir.captured import traced_step
from rlx_jax.ir.graph import Op, constant
from rlx_jax.ir.ops.conv import POOLS
from rlx_jax.ir.ops.experts import ClampedGate
from rlx_jax.ir.ops.fused import Step
from rlx_jax.ir.ops.index import SCATTER
from rlx_jax.ir.ops.pointwise import OF_BITS, OF_NUMBERS, PARAMETRIC
from rlx_jax.ir.ops.shape import END, AxisOf, Bound, SizeOf
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type
from tests.fuzz import meaning
from tests.oracles import op_formulas as formula

o: Any = rlx.ops
SIZES = {"batch": 2, "seq": 5, "keys": 7}
F32, BF16, I32 = (as_dtype(name) for name in ("f32", "bf16", "i32"))


@dataclass(frozen=True)
class Sample:
    """An op, the types of its operands (`"f32 batch seq 8; f32 8"`), and how their numbers are drawn."""

    op: Op
    text: str
    means: Callable[..., Any] | None = None  # where it is not that of the table of meanings
    positive: bool = False
    below: int = 3  # of integer operands
    tolerance: float = 3e-6
    draw: Callable[[np.ndarray], np.ndarray] = lambda x: x  # of floats, from normal ones

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(operand(text) for text in self.text.split(";"))

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Random operands; symbols have the sizes of `SIZES`."""
        rng = np.random.default_rng(seed)
        arrays = [random_array(rng, t.bind(SIZES), self.positive, self.below) for t in self.types]
        return [self.draw(a.astype(np.float64)).astype(a.dtype) if a.dtype in (F32, BF16) else a for a in arrays]

    def want(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """What it gives, in NumPy."""
        means = self.means(*arrays) if self.means else meaning.MEANING[type(self.op)](self.op, *arrays)
        return tuple(np.asarray(y) for y in (means if isinstance(means, tuple) else (means,)))

    def __str__(self) -> str:
        return f"{type(self.op).__name__}-{self.op.text()}-{self.text}".replace(" ", ",")


def operand(text: str) -> TensorType:
    """`"f32 batch seq 8"` as a type."""
    dtype, *dims = text.split()
    return tensor_type(tuple(int(d) if d.isdigit() else d.replace("+", " + ") for d in dims), dtype, text)


def random_array(rng: np.random.Generator, t: TensorType, positive: bool, below: int) -> np.ndarray:
    """Numbers of type `t`."""
    if t.dtype == np.bool_:
        return rng.random(t.shape) < 0.5
    if t.dtype.kind in "iu":
        return rng.integers(int(positive), below, t.shape).astype(t.dtype)
    x = rng.standard_normal(t.shape)
    if t.dtype == np.complex64:
        return (x + 1j * rng.standard_normal(t.shape)).astype(t.dtype)
    return (np.abs(x) + 0.1 if positive else x).astype(t.dtype)


def pointwise() -> Iterator[Sample]:
    """Every function of one value and of two, every comparison, casts and choices."""
    # Where a function is defined, and away from an infinite slope, which central differences do not show.
    drawn = dict.fromkeys(("asin", "acos", "atanh"), lambda x: 0.9 * np.tanh(x))
    drawn |= {"acosh": lambda x: 1.1 + np.abs(x), "cbrt": lambda x: np.copysign(0.1 + np.abs(x), x)}
    for kind in formula.UNARY_REFERENCE:
        positive, draw = kind in ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal"), drawn.get(kind, lambda x: x)
        for x in ("f32 batch seq 8", "bf16 3 4"):
            yield Sample(o.Unary(kind), x, positive=positive, draw=draw)
    for kind in OF_NUMBERS:
        yield Sample(o.Unary(kind), "i32 batch 4")
    for kind in formula.PARAMETRIC_REFERENCE:
        for x in ("f32 batch seq 8", "bf16 3"):
            yield Sample(o.Parametric(kind, (0.7, 0.3)[: PARAMETRIC[kind][1]]), x)
    for kind in formula.BINARY_REFERENCE:
        op = o.Binary(kind)
        if kind in OF_BITS:
            yield Sample(op, "i32 batch seq; i32", below=20)
            yield Sample(op, "u8 batch 1; u8 seq", below=8 if "shift" in kind else 200)
            if "shift" not in kind:
                yield Sample(op, "bool batch 1; bool seq")
        elif kind in ("floor_div", "trunc_div", "mod", "rem"):  # of numbers whose quotient is far from a whole one
            yield Sample(op, "f32 batch seq 8; f32 8", draw=lambda x: np.round(x * 4) / 4 + 0.125)
            yield Sample(op, "i32 batch seq; i32", positive=True)
        else:
            for pair in ("f32 batch seq 8; f32 batch seq 8", "bf16 batch 1 4; bf16 seq 1", "f32; f32 2 3"):
                yield Sample(op, pair, positive=kind in ("div", "pow"))
            if kind not in ("div", "atan2"):
                yield Sample(op, "i32 batch seq; i32")
    for kind in formula.COMPARE_REFERENCE:
        yield Sample(o.Compare(kind), "f32 batch seq; f32")
        yield Sample(o.Compare(kind), "i32 batch 1; i32 seq")
    for triple in ("bool batch seq; f32 batch seq; f32", "i32 seq 1; f32 batch 1 4; f32 4", "f32 2; i32 2; i32"):
        yield Sample(o.Where(), triple)
    for dtype, x in ((I32, "f32 batch seq 8"), (BF16, "i32 batch seq"), (F32, "bool 3")):
        yield Sample(o.CastTo(dtype), x)
    yield Sample(o.CastTo(np.dtype(np.int8), saturate=True), "i32 3 4", below=400)
    yield Sample(o.FullLike(1.5, F32), "i32 batch seq")
    yield Sample(o.FullLike(2.0, I32), "f32 batch seq 8")
    yield Sample(o.JaxFn(lambda x, y: x * y + 1), "f32 batch 8; f32 batch 8", lambda x, y: x * y + 1)
    yield Sample(o.JaxFn(lambda x: (jnp.sin(x), x[:, 0])), "f32 batch 8", lambda x: (np.sin(x), x[:, 0]))
    yield Sample(o.JaxFn(lambda x: jnp.asarray(2.5)), "f32 batch 8", lambda x: np.asarray(2.5))


def attention() -> Iterator[Sample]:
    """Attention with each of its options, rotations, caches and rings."""
    options: list[tuple[dict[str, Any], str]] = [
        ({}, ""), ({"causal": True}, ""), ({"window": 2}, ""), ({"window": 2, "ahead": 1}, ""),
        ({"causal": True, "window": 3, "scale": 0.7, "softcap": 1.5}, ""), ({"extra": ("keep",)}, "; i32 batch keys"),
        ({"causal": True, "extra": ("keep",)}, "; bool batch keys"),
        ({"causal": True, "window": 2, "extra": ("keep", "key_positions")}, "; i32 batch keys; i32 batch keys"),
        ({"extra": ("bias",)}, "; f32 batch HEADS seq keys"),
        ({"extra": ("bias",), "softcap": 2.0}, "; f32 1 1 seq keys"),
        ({"causal": True, "extra": ("keep", "bias")}, "; f32 1 keys; f32 1 HEADS 1 keys"),
        ({"extra": ("keep",)}, "; bool batch HEADS seq keys"),
        ({"causal": True, "extra": ("keep", "bias")}, "; i32 1 1 seq keys; f32 batch 1 seq 1"),
        ({"window": 1, "ahead": 3, "extra": ("keep",)}, "; bool batch 1 1 keys"),
        ({"extra": ("sinks",)}, "; f32 HEADS"),
    ]  # fmt: skip
    for heads, kv in ((6, 2), (3, 3), (4, 1)):
        for given, rest in options if heads == 6 else options[:2]:
            q, k = f"f32 batch seq 12; f32 batch keys {12 // heads * kv}", f"; f32 batch keys {12 // heads * kv}"
            for v in (k, f"; f32 batch keys {5 * kv}")[: 1 + given.get("causal", False)]:
                yield Sample(o.AttentionOp(heads, kv, **given), q + v + rest.replace("HEADS", str(heads)), below=2)
    yield Sample(o.AttentionOp(4, 2, causal=True), "bf16 2 5 8; bf16 2 5 4; bf16 2 5 4")
    for at in ("i32 batch 2", "i32 1 2"):
        op = o.AttentionOp(4, 2, window=3, extra=("positions",))
        yield Sample(op, f"f32 batch 2 8; f32 batch 7 4; f32 batch 7 4; {at}", below=7)
    for n_rot, width in ((8, 4), (8, 8), (4, 2), (4, 4)):
        for rows, style in (("1", "half"), ("batch", "half"), ("batch", "interleaved")):
            table = f"f32 {rows} seq {width}"
            yield Sample(o.RopeOp(8, n_rot, style), f"f32 batch seq 24; {table}; {table}")
    yield Sample(o.RopeOp(4, 4), "bf16 2 3 8; f32 1 3 2; f32 1 3 2")
    for options_, positions in (((), "i32 1 seq"), ((1.2,), "i32 batch seq"), ((1.0, (3, 0, 1)), "i32 batch seq 4"),
                                ((0.7, (1, 0, 1)), "i32 1 seq 2")):  # fmt: skip
        yield Sample(o.RopeTable((1.0, 0.31, 0.01), *options_), positions, below=50, tolerance=1e-5)
    yield Sample(o.SinusoidTable(5, 3.0, 500.0), "f32 batch")
    yield Sample(o.SinusoidTable(4), "i32 batch")
    for fresh in (False, True):
        for row in ("3", "2 3"):
            operands = f"f32 batch keys {row}; f32 batch 4 {row}; i32 batch; i32 batch"
            yield Sample(o.CacheUpdate(fresh), operands, below=5)
    yield Sample(o.CacheUpdate(), "bf16 2 6 4; bf16 2 3 4; i32 2; i32 2", below=4)
    yield Sample(o.Overwrite(), "f32 batch keys 3; f32 batch keys 3")
    yield Sample(o.Overwrite(), "bool 2 3; bool 2 3")
    for ring, row in (("keys 3", "3"), ("2 2 3", "2 3")):
        for block, below in (("seq", 5), ("1", 2)):
            yield Sample(o.RingStep(), f"f32 batch {ring}; f32 batch {block} {row}; i32 batch; i32 batch", below=below)
    for window, slots, in_place in ((3, 5, True), (3, 4, False), (7, 6, True)):  # window + S - 1 slots, one less, all
        means = functools.partial(formula.ring_step, in_place=in_place)
        yield Sample(o.RingStep(window), f"f32 2 {slots} 2 3; f32 2 3 2 3; i32 2; i32 2", means, below=4)


def products() -> Iterator[Sample]:
    """Products, norms, fused ops, halves of an encoder layer, experts."""
    for contract, w in ((0, "8 6"), (1, "6 8")):
        yield Sample(o.MatMul(contract), f"f32 batch seq 8; f32 {w}")
        yield Sample(o.MatMul(contract, "highest"), f"f32 8; f32 {w}")
        for wide in (False, True):
            yield Sample(o.MatMul(contract, f32_result=wide), f"bf16 batch 8; bf16 {w}")
        for act in ("", "gelu", "silu"):
            yield Sample(o.FusedMatMulBiasAct(contract, act), f"f32 batch seq 8; f32 {w}; f32 6")
    for pair in ("f32 batch seq 8; f32 batch 8 seq", "f32 batch 3 seq 8; f32 8 4", "f32 seq 8; f32 batch 8 4",
                 "bf16 batch 1 2 3; bf16 5 3 4", "f32 batch seq 8; f32 8", "f32 8; f32 batch 8 seq"):  # fmt: skip
        yield Sample(o.BatchMatMul(), pair)
    for t in ("f32", "bf16"):
        x, g = f"{t} batch seq 8", f"; {t} 8"
        for op, weights in ((o.RmsNormOp(1e-5), 1), (o.RmsNormOp(0.5), 2), (o.RmsNormOp(1e-5, 1.0), 1),
                            (o.LayerNormOp(1e-5), 2), (o.LayerNormOp(1e-5, shifted=False), 1),
                            (o.LayerNormOp(0.5, scaled=False), 1), (o.LayerNormOp(1e-5, False, False), 0)):  # fmt: skip
            yield Sample(op, x + g * weights)
    yield Sample(o.FusedSwiGLU(), "f32 batch seq 8")
    yield Sample(o.FusedSwiGLU(), "bf16 3 2")
    yield Sample(o.FusedSwiGLU(False), "f32 batch 6")
    yield Sample(o.FusedSwiGLU(True, "gelu_tanh"), "f32 seq 6")
    x, g = "f32 batch seq 8; f32 batch seq 8", "; f32 8"
    for op, weights in (
        (o.FusedResidualLayerNorm(1e-5), 2), (o.FusedResidualLayerNorm(0.5, True), 3),
        (o.FusedResidualRmsNorm(1e-5), 1), (o.FusedResidualRmsNorm(1e-5), 2), (o.FusedResidualRmsNorm(0.5, True), 2),
        (o.FusedResidualRmsNorm(1e-5, offset=1.0), 1),
    ):  # fmt: skip
        yield Sample(op, x + g * weights)
    gated = (Step(o.Unary("tanh"), (0,)), Step(o.Binary("mul"), (3, 1)), Step(o.Binary("add"), (2, 4)))
    yield Sample(o.ElementwiseRegion(3, gated), "f32 batch seq 8; f32 8; f32")
    chosen = (Step(o.Compare("gt"), (0, 1)), Step(o.Where(), (2, 0, 1)))
    yield Sample(o.ElementwiseRegion(2, chosen), "f32 batch 8; f32 8")
    for bias in (False, True):
        for turned in (False, True):
            rest = "; f32 24; f32 6" * bias + "; f32 1 seq 2" * (2 * turned)
            op = o.FusedAttentionBlock(2, 4, bias, turned)
            yield Sample(op, "f32 batch seq 6; f32 6 24; f32 8 6; f32 batch seq" + rest)
    plain = "f32 batch seq 6; f32 6 24; f32 8 6; f32 6; f32 6; f32 6 5; f32 5 6; f32 6; f32 6; f32 batch seq"
    rest = "; f32 6 5; f32 5; f32 5 6; f32 6; f32 6; f32 6"
    biased = "f32 batch seq 6; f32 6 24; f32 24; f32 8 6; f32 6; f32 6; f32 6" + rest
    yield Sample(o.FusedTransformerLayer(2, 4, 5, 1e-3, 1e-2), plain, tolerance=1e-5)
    yield Sample(o.FusedTransformerLayer(2, 4, 5, 1e-3, 1e-2, "relu", True), biased + "; f32 batch seq", tolerance=1e-5)
    out_in, in_out = "TYPE 3 5 8; TYPE 3 5 8; TYPE 3 8 5", "TYPE 3 8 5; TYPE 3 8 5; TYPE 3 5 8"
    clamped = o.ExpertFfn(biased=True, clamp=ClampedGate(0.7, 1.7, 1.0))
    for op, x, experts, choices in (
        (o.ExpertFfn(), "f32 batch seq 8", out_in, "batch seq 2"),
        (o.ExpertFfn("gelu_tanh", 0), "f32 batch 8", in_out, "batch 3"), (o.ExpertFfn(), "f32 8", out_in, "1"),
        (clamped, "f32 batch 8", out_in, "batch 2"), (o.ExpertFfn(), "bf16 seq 8", out_in, "seq 2"),
    ):  # fmt: skip
        operands = f"{x}; {experts.replace('TYPE', x.split()[0])}; f32 {choices}; i32 {choices}"
        yield Sample(op, operands + "; f32 3 5; f32 3 5; f32 3 8" * op.biased, tolerance=1e-5)


def shaping() -> Iterator[Sample]:
    """Ops that move elements."""
    x = "f32 batch seq 8"
    for op in (
        o.Reshape((AxisOf(0), AxisOf(1), 2, 4)), o.Reshape((-1, 8)), o.Reshape((AxisOf(1), AxisOf(0), -1)),
        o.Transpose((2, 0, 1)), o.Shard(("batch", None, "heads")), o.Narrow(2, 3, 4), o.Narrow(1, -1, 1),
        o.Narrow(-1, -3, 2), o.SplitLast((3, 4, 1)), o.Slice((Ellipsis, -1)), o.Slice((None, 0)), o.Iota(1), o.Iota(2),
        o.RepeatHeads(2, 3), o.Slice(((None, None, None), (None, None, -1), (7, 1, -2))), o.RelativeBuckets(1, 8, 4),
        o.RelativeBuckets(2, 4, 3), o.RepeatHeads(4, 1), o.Tile((1, 3, 2)), o.Pad(((0, 0), (2, 1), (1, 3)), value=1.5),
    ):  # fmt: skip
        yield Sample(op, x)
    for op, operands in (
        (o.Reshape((2, -1)), "i32 4 3"), (o.Reshape(()), "f32 1 1"), (o.Transpose(()), "f32"),
        (o.RelativeBuckets(0), "bf16 200"), (o.Slice(((None, None, None), (1, None, None))), "i32 batch 6"),
        (o.Pad(((1, -2), (0, 1))), "i32 4 3"), (o.Pad(((0, 0), (-1, 2)), "edge"), "bf16 2 4"),
        *((o.Pad(((0, 0), (2, 4)), mode), "f32 batch 4") for mode in ("edge", "reflect", "symmetric", "wrap")),
        (o.CutAxis(1, stop=Bound((SizeOf(1, 1),))), "f32 batch seq+keys 8; i32 batch seq"),
        (o.CutAxis(1, Bound((SizeOf(1, 1),))), "f32 batch seq+keys 8; f32 1 seq 2"),
        (o.CutAxis(-2, Bound((SizeOf(1, 0),)), Bound((), 1, True)), "f32 batch seq+keys 8; f32 seq"),
        (o.CutAxis(1, Bound((SizeOf(1, 0),), from_end=True), END), "f32 batch seq+keys 8; f32 keys"),
        (o.CutAxis(0, stop=Bound((SizeOf(0, 1), SizeOf(1, 0)))), "bf16 9 2; f32 4"), (o.Expand((3, 5, 2)), "f32 5 1"),
        (o.Expand((SizeOf(1, 0), SizeOf(0, 0), 2)), "i32 seq 1; bool batch"),
        (o.Concat(2), f"{x}; {x}; f32 batch seq 1"), (o.Concat(1), "bf16 batch 3; bf16 batch 2"),
    ):  # fmt: skip
        yield Sample(op, operands)


def reducing() -> Iterator[Sample]:
    """Reductions, running ones, the largest and where it stands, sorting."""
    x, ids = "f32 batch seq 8", "i32 batch seq"
    for kind in formula.REDUCE_REFERENCE:
        yield Sample(o.Reduce(kind, (1,)), x)
        yield Sample(o.Reduce(kind, (0, 2), keepdims=True), x)
        yield Sample(o.Reduce(kind, (0,)), "bf16 3 4")
    for op, operand_ in (
        (o.Reduce("var", (2, 0), ddof=1), x), (o.Reduce("std", (2, 0), ddof=1), x),
        (o.Reduce("any", (1,)), "bool batch seq"), (o.Reduce("all", (1,)), ids), (o.Reduce("sum", (1,)), ids),
        (o.Softmax(-1), x), (o.Softmax(1), x), (o.Softmax(), "bf16 batch 8"), (o.LogSoftmax(1), x),
        (o.LogSoftmax(), "bf16 batch 8"), (o.TopK(2, largest=False), "u8 3 4"),
        *((o.Cumsum(axis, exclusive, turned), y) for exclusive in (False, True) for axis, turned,
            y in ((-1, False, ids), (1, False, x), (1, True, x))),
        *((o.Cumulative(kind, 1), x) for kind in ("prod", "max", "min")),
        *((o.Cumulative(kind, -1, reverse=True), ids) for kind in ("prod", "max", "min")),
        *((o.ArgReduce(kind, *more), y) for kind in ("argmax", "argmin") for more,
            y in (((1,), x), ((-1, True), ids), ((1, False, True), ids))),
        *((o.Sort(*more), y) for down in (False, True) for more,
            y in (((1, down), x), ((-1, down), ids), ((1, down, True), ids))),
        *((o.TopK(2, axis, largest=down), y) for down in (False, True) for axis, y in ((-1, x), (1, "i32 batch 5 2"))),
    ):  # fmt: skip
        yield Sample(op, operand_)
    for kind, edge in (("prod", 1), ("max", -(2**31)), ("min", 2**31 - 1)):
        fn = {"prod": np.prod, "max": np.max, "min": np.min}[kind]
        means: Any = lambda x, f=fn, e=edge: formula.running(f, x, 0, True, True, e)  # noqa: E731
        yield Sample(o.Cumulative(kind, 0, True, True), ids, means)


def indexing() -> Iterator[Sample]:
    """Reading and writing by index, products by named axes."""
    x = "f32 batch seq 8"
    for table in ("f32 9 4; i32 batch seq", "bf16 9 4 2; u8 seq", "f32 9; i32"):
        yield Sample(o.Gather(), table, below=9)
    for rows in (x, "f32 batch seq"):
        yield Sample(o.TakeRow(), f"{rows}; i32 batch", below=5)
    yield Sample(o.Take(2), f"{x}; i32 3 2")
    yield Sample(o.Take(0, "clip"), "i32 4 2; i32")
    yield Sample(o.Take(1, "wrap"), "bf16 2 3; u8 4", below=9)
    yield Sample(o.TakeAlongAxis(-1), f"{x}; i32 batch seq 3")
    yield Sample(o.TakeAlongAxis(2, "clip"), f"{x}; i32 1 1 3")
    yield Sample(o.GatherNd(), f"{x}; i32 4 2", below=2)
    yield Sample(o.GatherNd(1), f"{x}; i32 batch 3 1")
    for kind in SCATTER:
        length, below, count = (1, 5, 1) if kind == "set" else (3, 3, 4)  # which of two writes stays is not said
        yield Sample(o.Scatter(1, kind), f"f32 2 5 4; i32 2 {length} 3; f32 2 {length} 3", below=below)
        yield Sample(o.ScatterNd(kind), f"{x}; i32 {count} 2; f32 {count} 8", below=2)
    yield Sample(o.Einsum("bsh,hk->bks"), f"{x}; f32 8 3")
    yield Sample(o.Einsum("...ij,...ji->...", "highest"), "f32 batch 3 4; f32 4 3")
    yield Sample(o.Einsum("ij,kj->ik", result=I32), "i8 2 3; i8 4 3", lambda a, b: a.astype(int) @ b.T.astype(int))
    yield Sample(o.Einsum("ii->i"), "f32 4 4")


def windows() -> Iterator[Sample]:
    """Patches, windows that slide, other sizes, norms without weights, few bits, spectra and systems."""
    x, y = "f32 batch 4 6 5", "f32 batch 4 7"
    yield Sample(o.Patches((2, 3)), "f32 batch 3 7 9")
    yield Sample(o.Patches((1, 2)), "bf16 2 1 seq keys")
    for antialias in (False, True):  # of the grid's own size, of others, and of sizes that a call decides
        for images in ("f32 batch 3 6 8", "f32 batch 1 seq keys", "f32 1 1 31 13"):
            yield Sample(o.GridPositions((3, 4), (2, 2), antialias), f"f32 12 5; {images}")
    for op, operands in (
        (o.Conv((1, 1), "VALID", (1, 1)), f"{x}; f32 3 4 3 2"),
        (o.Conv((2, 1), ((1, 0), (0, 2)), (1, 2), 2), f"{x}; f32 6 2 3 2"),
        (o.Conv((1, 2), "SAME", (2, 1), 4, "highest"), f"{x}; f32 4 1 3 3"),
        (o.Conv((2,), "SAME_LOWER", (1,)), f"{y}; f32 2 4 4"),
        (o.Conv((1,), ((2, 0),), (1,)), "bf16 2 2 5; bf16 3 2 3"),
        (o.Conv((1,), "SAME", (1,)), "f32 batch 4 seq; f32 2 4 3"),
        (o.Conv((1, 1, 2), ((1, 1), (0, 0), (1, 0)), (1, 1, 1)), "f32 1 2 3 4 5; f32 2 2 2 2 2"),
        (o.ConvTranspose((1, 1), ((0, 0), (0, 0)), (0, 0), (1, 1)), f"{x}; f32 4 3 3 2"),
        (o.ConvTranspose((2, 3), ((1, 0), (2, 1)), (1, 2), (2, 1), 2), f"{x}; f32 4 3 2 3"),
        (o.ConvTranspose((2,), ((0, 1),), (0,), (1,)), "bf16 2 2 seq; bf16 2 3 2"),
        (o.Pool("argmax", (2, 2), (1, 1), ((1, 1), (0, 0)), (2, 1)), "i32 batch 2 3 3"),
        (o.Pool("max", (2, 2), (1, 1), ((1, 1), (0, 0)), (1, 1)), "i32 batch 2 3 3"),
        (o.Pool("mean", (3,), (2,), ((1, 1),), (1,)), "bf16 2 3 5"), (o.GridSample(), "f32 2 1 3 2 4; f32 2 2 1 3 3"),
        (o.Standardize((-1,), 1e-5), x), (o.Standardize((-1,), 0.5, False), "bf16 3 8"),
        (o.Standardize((1, 2), 0.1), "f32 batch seq 8"), (o.FakeQuantize(8, None), "f32 2 4 5"),
        (o.FakeQuantize(4, 1), "f32 2 4 5"), (o.FakeQuantize(2, -1), "f32 2 4 5"),
        (o.Sample(0.0), "f32 batch seq 8; i32"), (o.Sample(0.7, top_k=1), "f32 batch 8; u32"),
    ):  # fmt: skip
        yield Sample(op, operands)
    yield Sample(o.Sample(2.0, top_p=1e-4), "bf16 3 8; i32", lambda x, s: x.argmax(-1))  # one class is left to draw
    for kind in POOLS:
        for pads, steps, ceil in (("VALID", (1, 1), False), (((1, 0), (1, 1)), (1, 2), True), ("SAME", (1, 1), False)):
            p = 3.0 if kind == "lp" else 2.0
            yield Sample(o.Pool(kind, (3, 2), (2, 2), pads, steps, ceil, kind == "mean", p), x)
        yield Sample(o.Pool(kind, (2,), (2,), ((1, 1),), (1,), True), "f32 2 3 5")
        yield Sample(o.Pool(kind, (3,), (1,), "SAME", (1,)), f"f32 batch 2 {5 if kind == 'argmax' else 'seq'}")
    for size in (
        o.Resize((2, 3), (9, 3), "nearest"), o.Resize((2,), (4,), "nearest", rounding="ceil"),
        o.Resize((-1,), (8,), "nearest", "asymmetric", rounding="floor"), o.Resize((2, 3), (9, 8), "linear"),
        o.Resize((2, 3), (3, 2), "linear", antialias=True, exclude_outside=True),
        o.Resize((3,), (7,), "linear", "align_corners"), o.Resize((2, 3), (4, 7), "cubic", a=-0.75),
        o.Resize((2, 3), (2, 3), "cubic", "half_pixel", antialias=True),
        o.Resize((2,), (5,), "cubic", "asymmetric", (0.9,), exclude_outside=True),
        o.Resize((2,), (4,), "linear", "half_pixel_symmetric", (0.72,)),
        o.Resize((3,), (1,), "linear", "pytorch_half_pixel"),
        o.Resize((2, 3), (4, 3), "linear", "tf_crop_and_resize", roi=((0.2, 0.7), (-0.4, 1.3)), extrapolation=2.0),
        o.Resize((2,), (3,), "nearest", "tf_crop_and_resize", roi=((0.9, 0.1),), rounding="round_prefer_ceil"),
    ):  # fmt: skip
        yield Sample(size, x)
    yield Sample(o.Resize((1,), (3,), "nearest"), "u8 2 5", below=200)
    for method, padding, corners in (("nearest", "border", True), ("linear", "zeros", True),
                                     ("linear", "reflection", False), ("cubic", "reflection", True)):  # fmt: skip
        op = o.GridSample(method, padding, corners)
        yield Sample(op, "f32 batch 2 4 3; f32 batch 3 seq 2", tolerance=1e-5)
    for op, operands in ((o.FakeQuantize(3), "f32 batch 4; f32"), (o.FakeQuantize(4, 1), "f32 batch 4; f32 4"),
                         (o.FakeQuantize(3, 0, "tanh", True), "f32 4 5; f32 4")):  # fmt: skip
        yield Sample(op, operands, positive=True)
    for kind in ("fft", "rfft", "ifft", "irfft"):
        for n, axis, norm in ((None, -1, "backward"), (7, 1, "ortho"), (3, -2, "forward")):
            operands = "f32 batch 6 5" if kind in ("fft", "rfft") else "c64 batch 4 5"
            yield Sample(o.Fft(kind, n, axis, norm), operands)
    for op, operands in ((o.Fft("fft"), "c64 6"), (o.Fft("rfft"), "bf16 3 6"), (o.Fft("ifft", 6), "f32 batch 5")):
        yield Sample(op, operands)
    square = lambda a: a + 3 * np.eye(a.shape[-1]) if a.shape[-1:] == a.shape[-2:-1] else a  # noqa: E731
    for op, operands in ((o.Solve(), "f32 3 3; f32 3"), (o.Solve(), "f32 4 4; f32 4 2"), (o.Det(), "f32 batch 4 4"),
                         (o.Solve(), "f32 batch 3 3; f32 batch 3 5")):  # fmt: skip
        yield Sample(op, operands, draw=square, tolerance=1e-5)


def bodies() -> Iterator[Sample]:
    """Bodies that run once, some times, or not at all, and a bias by positions."""
    m: Any = rlx.Graph.hir("m")
    x, p, i = m.input("x", ("batch", 5)), m.input("p", ()), m.input("i", (), "i32")
    m.switch(i, [m.sin, lambda v: m.mul(v, p), m.square], x)
    m.while_loop(lambda c: m.lt(c[0], 4), lambda c: (m.add(c[0], 1), m.tanh(m.mul(c[1], p))), (i, x))
    m.scan(lambda c, v: (m.add(m.mul(c, p), v), (c, m.argmax(v))), m.zeros(5), x, reverse=True)
    m.fori_loop(0, 3, lambda k, v: m.add(v, m.sin(v)), x)
    m.custom_vjp(m.round, lambda v, out, g: g, x)
    for node in m.builder.nodes:
        if isinstance(node.op, o.Switch | o.While | o.Scan | o.CustomVjp):
            types = "; ".join(str(m.builder.type(v)) for v in node.inputs)
            yield Sample(node.op, types.translate(str.maketrans("[,]", "   ")), tolerance=1e-5)
    m = rlx.Graph.hir("m")
    x, slopes = m.input("x", (1, "seq", 6)), m.input("slopes", (3, 1, 1))
    m.attention(x, x, x, heads=3, bias=lambda q, k: m.mul(slopes, m.cast(m.sub(k, q), "f32")))
    m.attention(x, x, x, heads=3, bias=lambda q, k: m.sin(m.cast(k, "f32")))
    made = [n.op.bias_of for n in m.builder.nodes if isinstance(n.op, hir.Attention)]
    for rows, keys in (("batch", "1"), ("1", "1"), ("batch", "batch")):
        yield Sample(o.PairBias(made[0]), f"i32 {rows} seq; i32 {keys} keys; f32 3 1 1", tolerance=1e-5)
    yield Sample(o.PairBias(made[1]), "i32 batch seq; i32 1 keys", tolerance=1e-5)


def recurring() -> Iterator[Sample]:
    """Steps over tokens and recurrences: from zeros and from a state, ragged, with every state, of one token."""
    step = traced_step("decay", meaning.decay, [operand(text) for text in ("f32 4", "f32 4", "f32")])
    for start in ("f32 batch 4", "f32 4", "f32"):
        yield Sample(o.TokenScan(step, 1, 1), f"{start}; f32 batch seq 4; f32")
    op = o.TokenScan(step, 1, 1, ragged=True, every=True, unroll=2)
    yield Sample(op, "f32 batch 4; bf16 batch seq 4; bf16; i32 batch", below=7)
    yield Sample(o.TokenScan(step, 1, 1, ragged=True), "f32 batch 4; f32 batch 1 4; f32; i32 batch")
    for width, x in ((3, "f32 batch 9 4"), (1, "i32 batch seq"), (2, "bf16 batch 2")):
        yield Sample(o.TokenWindows(width), x)
    yield Sample(o.TailRows(2), "f32 batch 9 4; i32 batch", below=7)
    yield Sample(o.TailRows(3), "i32 batch 4; i32 batch", below=2)
    low: Any = {"draw": lambda x: -np.tanh(np.abs(x))}
    for tokens, held, every, heads in (("seq", False, False, 4), ("seq", True, True, 2), ("1", True, False, 4)):
        state = f"; f32 batch {heads} 3 5" * held
        q, rows = f"f32 batch {tokens} 2 3", f"f32 batch {tokens} {heads}"
        delta = o.GatedDeltaOp(0.3 if every else None, held, every)
        yield Sample(delta, f"{q}; {q}; {rows} 5; {rows}; {rows}{state}", **low)
        for rate in (f"f32 {heads}", f"f32 {heads} 5"):
            group = f"f32 batch {tokens} 2 5"
            operands = f"{rows} 3; {rows}; {rate}; {group}; {group}{state}"
            yield Sample(o.SelectiveScanOp(held, every), operands, **low)
    bf16 = "bf16 2 5 1 4; bf16 2 5 1 4; bf16 2 5 3 4; f32 2 5 3; bf16 2 5 3; f32 2 3 4 4"
    yield Sample(o.GatedDeltaOp(held=True), bf16, **low)
    for bias, tokens in ((False, "seq+3"), (True, "seq+3"), (True, "4")):
        yield Sample(o.CausalConvOp(bias), f"f32 batch {tokens} 6; f32 6 4" + "; f32 6" * bias)


MIR_OPS: dict[Any, list[Sample]] = {}
for rows in (pointwise, attention, products, shaping, reducing, indexing, windows, bodies, recurring):
    for sample in rows():
        MIR_OPS.setdefault(type(sample.op), []).append(sample)

TABLE_ROWS = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2).tobytes()
MTP = ("f32 2 3 6; i32 2 3; f32 2 3 1; f32 2 3 1; i32 2; f32 7 6; f32 6; f32 6; f32 6; f32 6; f32 12 6; f32 6; f32 6; "
       "f32 6 16; f32 6 4; f32 6 4; f32 4; f32 4; f32 4; f32 4; f32 8 6; f32 6; f32 6; f32 6 5; f32 6 5; f32 5 6; "
       "f32 6; f32 6; f32 6 9")  # fmt: skip
DECODER = ("f32 2 3 8; f32 8; f32 8; f32 8 8; f32 4 8; f32 4 8; f32 8 8; f32 8; f32 8; f32 6 8; f32 6 8; f32 8 6; "
           "f32 1 3 2; f32 1 3 2")  # fmt: skip
STEP = traced_step("decay", meaning.decay, [operand(text) for text in ("f32 4", "f32 4", "f32")])
SLOT, START = operand("f32 4"), constant(np.linspace(-0.5, 0.5, 4), F32)
Q, V = "f32 3 5 6; f32 3 5 6", "f32 3 5 4; f32 3 5 4"
STATES = (
    (hir.Recurrent(STEP, (hir.StateSlot("h", SLOT),), 1), "f32 3 5 4; f32; f32 3 4"),
    (hir.Recurrent(STEP, (hir.StateSlot("h", SLOT, initial=START),), 1), "f32 3 5 4; f32; f32 3 4"),
    (hir.Recurrent(STEP, (hir.StateSlot("h", SLOT, initial=2),), 1), "f32 3 5 4; f32; f32 4; f32 3 4"),
    (hir.CausalWindow(3), "f32 3 5 4; f32 3 2 4"), (hir.CausalConv(), "f32 3 5 4; f32 4 1 3; f32 3 2 4"),
    (hir.CausalConv(bias=True), "f32 3 5 4; f32 4 3; f32 4; f32 3 2 4"),
    (hir.GatedDelta(2, 4, unit=1e-6), f"{Q}; f32 3 5 20; {V}; f32 3 4 3 5"),
    (hir.SelectiveScan(4, 2), "f32 3 5 12; f32 3 5 4; f32 4; f32 3 5 10; f32 3 5 10; f32 3 4 3 5"),
)  # fmt: skip
"""Blocks with a state, and their operands with a leaf of it."""
BLOCKS: list[Sample] = [
    *(Sample(hir.Carried(block, 1, fresh=fresh, every=True), f"{operands}; i32 3; i32 3", positive=True, below=6,
             draw=lambda x: -np.tanh(np.abs(x))) for block, operands in STATES for fresh in (False, True)),
    Sample(hir.Linear(1, bias=True, activation="gelu"), "f32 2 3 8; f32 5 8; f32 5"),
    Sample(hir.LinearFused(1, "gelu"), "f32 2 3 8; f32 5 8; f32 5"),
    *(Sample(hir.SharedLinearPair(slot, (0, 1)), "f32 2 3 8; f32 8 4; f32 5 8") for slot in (0, 1)),
    Sample(hir.SwiGLU((0, 1, 0)), "f32 2 3 8; f32 8 5; f32 5 8; f32 5 8"),
    Sample(hir.ResidualRmsNorm(1e-6), "f32 2 3 8; f32 2 3 8; f32 8; f32 8"), Sample(hir.Split((3, 5)), "f32 2 8"),
    Sample(hir.GatedFfn("gelu_tanh"), "f32 2 8; f32 2 8"), Sample(hir.RmsNorm(1e-6), "f32 2 8; f32 8; f32 8"),
    Sample(hir.RmsNorm(1e-6, 1.0), "f32 2 8; f32 8"), Sample(hir.LayerNorm(1e-6, shifted=False), "f32 2 3 8; f32 8"),
    Sample(hir.LayerNorm(1e-12), "f32 2 8; f32 8; f32 8"), Sample(hir.Embed(), "f32 7 8; i32 2 3"),
    Sample(hir.Positions(), "f32 2 3 8"), Sample(hir.RopeAngles((1.0, 0.1), 1.25), "i32 1 3"),
    Sample(hir.RopeAngles((1.0, 0.1), axes=(1, 0)), "i32 1 3 2"),
    Sample(hir.RopeRows(2, TABLE_ROWS, TABLE_ROWS), "i32 1 3"),
    Sample(hir.Sinusoids(5, 1000.0, 500.0), "f32 3", tolerance=1e-3),
    *(Sample(hir.Rope(4, 4, style), "f32 2 3 8; f32 1 3 2; f32 1 3 2") for style in ("half", "interleaved")),
    Sample(hir.Attention(4, 2, True, 2, 0.3, 5.0, ("keep",)), "f32 2 3 8; f32 2 3 4; f32 2 3 4; f32 2 3"),
    Sample(hir.Attention(4, 2, sinks=True, extra=("keep",)), "f32 2 3 8; f32 2 3 4; f32 2 3 4; f32 2 3; f32 4"),
    Sample(hir.Attention(4, 2, window=3, ahead=2), "f32 2 3 8; f32 2 3 4; f32 2 3 6"),
    Sample(hir.CachedAttention(hir.Attention(4, 2, causal=True, last=True)),
        "f32 2 1 8; f32 2 3 4; f32 2 3 4; f32 2 6 2 2; f32 2 6 2 2; i32 2; i32 2"),
    Sample(hir.CachedAttention(hir.Attention(4, 2, causal=True, softcap=1.5)),
        "f32 2 3 8; f32 2 3 4; f32 2 3 4; f32 2 6 2 2; f32 2 6 2 2; i32 2; i32 2"),
    Sample(hir.CachedAttention(hir.Attention(4, 2, causal=True, window=2), ring=True),
        "f32 2 3 8; f32 2 3 4; f32 2 3 4; f32 2 4 2 2; f32 2 4 2 2; i32 2; i32 2"),
    Sample(hir.CachedAttention(hir.Attention(2, 2, causal=True), block_only=True),
        "f32 2 3 4; f32 2 3 4; f32 2 3 4; f32 2 6 2 2; f32 2 6 2 2; i32 2; i32 2", below=1),
    Sample(hir.GrowingAttention(hir.Attention(4, 2, causal=True, window=2), keep=True),
        "f32 2 3 8; f32 2 3 4; f32 2 3 4; f32 2 5 4; f32 2 5 4; i32 2 8"),
    Sample(hir.LastToken(), "f32 2 3 8; i32 2"), Sample(hir.FirstToken(), "f32 2 3 8"),
    Sample(hir.EndToken(2), "f32 2 3 8; i32 2 3"), Sample(hir.CausalWindow(3), "f32 2 4 5"),
    Sample(hir.Carried(hir.CausalWindow(3), 1, every=True), "f32 2 4 5; f32 2 2 5; i32 2; i32 2"),
    Sample(hir.TimeSteps(0.25, 0.5), "f32 2 3 4; f32 4; f32 4"), Sample(hir.CausalConv(), "f32 2 4 6; f32 6 1 3"),
    Sample(hir.CausalConv(bias=True), "f32 2 4 6; f32 6 1; f32 6"),
    Sample(hir.GatedDelta(2, 4, 0.5, 1e-6), "f32 2 3 6; f32 2 3 6; f32 2 3 20; f32 2 3 4; f32 2 3 4",
        draw=lambda x: -np.tanh(np.abs(x))),
    Sample(hir.SelectiveScan(4, 2), "f32 2 3 12; f32 2 3 4; f32 4; f32 2 3 10; f32 2 3 10",
        draw=lambda x: -np.tanh(np.abs(x))),
    Sample(hir.Qwen35MtpHead(2, 1, 4, 2, 6, 5, 9, 1e-5), MTP, tolerance=1e-5),
    Sample(hir.CountedPositions(1), "i32 2 3"),
    Sample(hir.Route(2, "sigmoid", False, 1.5, biased=True), "f32 2 3 4; f32 4"), Sample(hir.Route(2), "f32 2 3 4"),
    Sample(hir.Route(3, "chosen"), "f32 3 4"),
    Sample(hir.Experts("gelu_tanh", 0), "f32 2 3 8; f32 4 8 5; f32 4 8 5; f32 4 5 8; f32 2 3 2; i32 2 3 2",
        tolerance=1e-5),
    Sample(hir.Experts(biased=True, clamp=ClampedGate(7.0, 1.702, 1.0)),
        "f32 2 8; f32 4 5 8; f32 4 5 8; f32 4 8 5; f32 2 2; i32 2 2; f32 4 5; f32 4 5; f32 4 8", tolerance=1e-5),
    Sample(hir.RelativeBias(8, 16), "f32 9 2; f32 2 3 8"),
    Sample(hir.LlamaDecoderBlock(2, 4, 1, 1e-5, hir.MaskKind.sliding_window(2), 1), DECODER, tolerance=1e-5),
    Sample(hir.LlamaDecoderBlock(2, 4, 1, 1e-5, hir.MaskKind.CAUSAL, 1, ("k_bias", "down_bias")),
           DECODER + "; f32 4; f32 8", tolerance=1e-5),
]  # fmt: skip
