"""Every MIR op: its shape rule is its `eval`, and its `eval` is the formula, in NumPy and float64."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir import hir, ops
from rlx_jax.ir.graph import Mir, Op, TypeCache
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, Overwrite, RingStep, RopeOp, RopeTable, SinusoidTable
from rlx_jax.ir.ops.control import CustomVjp, PairBias, Scan, Switch, While
from rlx_jax.ir.ops.conv import Conv, ConvTranspose
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.cut import END, Bound, CutAxis
from rlx_jax.ir.ops.experts import ClampedGate, ExpertFfn
from rlx_jax.ir.ops.fused import (
    ElementwiseRegion,
    FusedMatMulBiasAct,
    FusedResidualLayerNorm,
    FusedResidualRmsNorm,
    FusedSwiGLU,
    Step,
)
from rlx_jax.ir.ops.fused_layers import FusedAttentionBlock, FusedTransformerLayer
from rlx_jax.ir.ops.index import SCATTER, Gather, GatherNd, Iota, Scatter, ScatterNd, Take, TakeAlongAxis, TakeRow
from rlx_jax.ir.ops.linalg import BatchMatMul, Einsum, MatMul
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp, Standardize
from rlx_jax.ir.ops.order import ArgReduce, Sort, TopK
from rlx_jax.ir.ops.pointwise import (
    BINARY,
    COMPARE,
    OF_BITS,
    OF_NUMBERS,
    PARAMETRIC,
    UNARY,
    Binary,
    CastTo,
    Compare,
    FullLike,
    Parametric,
    Unary,
    Where,
)
from rlx_jax.ir.ops.pool import POOLS, Pool
from rlx_jax.ir.ops.quantize import FakeQuantize
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.ops.reduce import REDUCE, Cumsum, Cumulative, LogSoftmax, Reduce, Softmax
from rlx_jax.ir.ops.relative import RelativeBuckets
from rlx_jax.ir.ops.resize import GridSample, Resize
from rlx_jax.ir.ops.sample import Sample as SampleOp
from rlx_jax.ir.ops.shape import (
    AxisOf,
    Concat,
    Expand,
    Narrow,
    Pad,
    RepeatHeads,
    Reshape,
    Shard,
    SizeOf,
    Slice,
    SplitLast,
    Tile,
    Transpose,
)
from rlx_jax.ir.ops.systems import Det, Fft, Solve
from rlx_jax.ir.ops.token_scan import TokenScan
from rlx_jax.ir.ops.vision import GridPositions, Patches
from rlx_jax.ir.ops.windows import TailRows, TokenWindows
from rlx_jax.ir.serial import decode, encode
from rlx_jax.ir.token_step import traced_step
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type
from tests.fuzz import meaning
from tests.oracles import image_formulas as image
from tests.oracles.op_formulas import (
    BINARY_REFERENCE,
    COMPARE_REFERENCE,
    PARAMETRIC_REFERENCE,
    REDUCE_REFERENCE,
    UNARY_REFERENCE,
    attention,
    attention_block,
    cache_fill,
    cache_update,
    cumsum,
    grid_positions,
    layer_norm,
    patches,
    relative_buckets,
    ring_step,
    rms_norm,
    rope,
    rope_table,
    running,
    scatter,
    scatter_nd,
    sinusoids,
    softmax,
    spectrum,
    transformer_layer,
)
from tests.oracles.op_formulas import experts as expert_formula

SIZES = {"batch": 2, "seq": 5, "keys": 7}
F32, BF16, I32 = (as_dtype(name) for name in ("f32", "bf16", "i32"))


# -- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """An op, operand types that fit it (`"f32 batch seq 8"`), and what it means."""

    op: Mir
    operands: tuple[str, ...]
    means: Callable[..., Any]
    positive: bool = False
    below: int = 3  # of integer operands
    tolerance: float = 3e-6
    draw: Callable[[np.ndarray], np.ndarray] | None = None  # of floats, from normal ones

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(operand(text) for text in self.operands)

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Random operands; symbols have the sizes of `SIZES`."""
        rng = np.random.default_rng(seed)
        arrays = [random_array(rng, t.bind(SIZES), self.positive, self.below) for t in self.types]
        draw = self.draw or (lambda x: x)
        return [draw(a.astype(np.float64)).astype(a.dtype) if a.dtype in (F32, BF16) else a for a in arrays]

    def __str__(self) -> str:
        return f"{type(self.op).__name__}-{self.op.text()}-{'-'.join(self.operands)}".replace(" ", ",")


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


def dot(x: np.ndarray, w: np.ndarray, contract: int) -> np.ndarray:
    """x · w over axis `contract` of w."""
    return x @ (w if contract == 0 else w.T)


# Where a function is defined, and away from an infinite slope, which central differences do not show.
DRAWN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "acosh": lambda x: 1.1 + np.abs(x),
    "cbrt": lambda x: np.copysign(0.1 + np.abs(x), x),
}


def unary_samples() -> Iterator[Sample]:
    """Every function of one value."""
    for kind, means in UNARY_REFERENCE.items():
        positive = kind in ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal")
        inside = kind in ("asin", "acos", "atanh")
        draw = (lambda x: 0.9 * np.tanh(x)) if inside else DRAWN.get(kind)
        yield Sample(Unary(kind), ("f32 batch seq 8",), means, positive, draw=draw)
        yield Sample(Unary(kind), ("bf16 3 4",), means, positive, draw=draw)
    for kind in OF_NUMBERS:
        yield Sample(Unary(kind), ("i32 batch 4",), UNARY_REFERENCE[kind])
    for kind, function in PARAMETRIC_REFERENCE.items():
        given = (0.7, 0.3)[: PARAMETRIC[kind][1]]
        yield Sample(Parametric(kind, given), ("f32 batch seq 8",), lambda x, f=function, p=given: f(x, *p))
        yield Sample(Parametric(kind, given), ("bf16 3",), lambda x, f=function, p=given: f(x, *p))


def binary_samples() -> Iterator[Sample]:
    """Every function of two values and every comparison."""
    for kind, means in BINARY_REFERENCE.items():
        if kind in OF_BITS:
            yield Sample(Binary(kind), ("i32 batch seq", "i32"), means, below=20)
            yield Sample(Binary(kind), ("u8 batch 1", "u8 seq"), means, below=8 if "shift" in kind else 200)
            if "shift" not in kind:
                yield Sample(Binary(kind), ("bool batch 1", "bool seq"), means)
            continue
        positive = kind in ("div", "pow")
        if kind in ("floor_div", "trunc_div", "mod", "rem"):  # of numbers whose quotient is far from a whole one
            exact: Any = lambda x: np.round(x * 4) / 4 + 0.125  # noqa: E731
            yield Sample(Binary(kind), ("f32 batch seq 8", "f32 8"), means, draw=exact)
            yield Sample(Binary(kind), ("i32 batch seq", "i32"), means, True)
            continue
        yield Sample(Binary(kind), ("f32 batch seq 8", "f32 batch seq 8"), means, positive)
        yield Sample(Binary(kind), ("f32 batch seq 8", "f32 8"), means, positive)
        yield Sample(Binary(kind), ("bf16 batch 1 4", "bf16 seq 1"), means, positive)
        yield Sample(Binary(kind), ("f32", "f32 2 3"), means, positive)
        if kind not in ("div", "atan2"):
            yield Sample(Binary(kind), ("i32 batch seq", "i32"), means)
    for kind, means in COMPARE_REFERENCE.items():
        yield Sample(Compare(kind), ("f32 batch seq", "f32"), means)
        yield Sample(Compare(kind), ("i32 batch 1", "i32 seq"), means)


def attention_samples() -> Iterator[Sample]:
    """Attention with each of its options."""
    q, k = "batch seq 12", "batch keys"
    options: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({}, ()),
        ({"causal": True}, ()),
        ({"window": 2}, ()),
        ({"causal": True, "window": 3, "scale": 0.7, "softcap": 1.5}, ()),
        ({"extra": ("keep",)}, ("i32 batch keys",)),
        ({"causal": True, "extra": ("keep",)}, ("bool batch keys",)),
        ({"causal": True, "window": 2, "extra": ("keep",)}, ("i32 batch keys",)),
        ({"causal": True, "window": 2, "extra": ("keep", "key_positions")}, ("i32 batch keys", "i32 batch keys")),
        ({"extra": ("bias",)}, ("f32 batch HEADS seq keys",)),
        ({"extra": ("bias",), "softcap": 2.0}, ("f32 1 1 seq keys",)),
        ({"causal": True, "extra": ("keep", "bias")}, ("f32 1 keys", "f32 1 HEADS 1 keys")),
        ({"extra": ("keep",)}, ("bool batch HEADS seq keys",)),
        ({"causal": True, "extra": ("keep", "bias")}, ("i32 1 1 seq keys", "f32 batch 1 seq 1")),
        ({"window": 2, "ahead": 1}, ()),
        ({"window": 1, "ahead": 3, "extra": ("keep",)}, ("bool batch 1 1 keys",)),
    ]
    for heads, kv_heads in ((3, 3), (6, 2), (4, 1)):
        for given, rest in options:
            op = AttentionOp(heads, kv_heads, **given)
            kv = f"{k} {12 // heads * kv_heads}"
            rest = tuple(text.replace("HEADS", str(heads)) for text in rest)

            def means(q: Any, k: Any, v: Any, *rest: Any, op: AttentionOp = op) -> np.ndarray:
                extra = dict(zip(op.extra, rest, strict=True))
                return attention(
                    q, k, v, heads=op.heads, kv_heads=op.kv_heads, causal=op.causal, window=op.window,
                    scale=op.scale, softcap=op.softcap, ahead=op.ahead, **extra,
                )  # fmt: skip

            yield Sample(op, (f"f32 {q}", f"f32 {kv}", f"f32 {kv}", *rest), means, below=2)
            if given.get("causal"):
                wide = f"f32 {k} {5 * kv_heads}"
                yield Sample(op, (f"f32 {q}", f"f32 {kv}", wide, *rest), means, below=2)
    op = AttentionOp(4, 2, causal=True)
    packed = ("bf16 2 5 8", "bf16 2 5 4", "bf16 2 5 4")
    yield Sample(op, packed, lambda q, k, v: attention(q, k, v, heads=4, kv_heads=2, causal=True))
    op = AttentionOp(4, 2, window=3, extra=("positions",))
    grouped = ("f32 batch 2 8", "f32 batch 7 4", "f32 batch 7 4", "i32 batch 2")

    def at_positions(q: Any, k: Any, v: Any, positions: Any) -> np.ndarray:
        return attention(q, k, v, heads=4, kv_heads=2, window=3, positions=positions)

    yield Sample(op, grouped, at_positions, below=7)
    yield Sample(op, (*grouped[:3], "i32 1 2"), at_positions, below=7)


def contraction_samples() -> Iterator[Sample]:
    """Products and norms."""
    for contract, w in ((0, "f32 8 6"), (1, "f32 6 8")):
        yield Sample(MatMul(contract), ("f32 batch seq 8", w), lambda x, w, c=contract: dot(x, w, c))
        yield Sample(MatMul(contract, "highest"), ("f32 8", w), lambda x, w, c=contract: dot(x, w, c))
        b16 = w.replace("f32", "bf16")
        yield Sample(MatMul(contract), ("bf16 batch 8", b16), lambda x, w, c=contract: dot(x, w, c))
        yield Sample(MatMul(contract, f32_result=True), ("bf16 batch 8", b16), lambda x, w, c=contract: dot(x, w, c))
        for act in ("", "gelu", "silu"):
            f = UNARY_REFERENCE.get(act, lambda y: y)
            yield Sample(
                FusedMatMulBiasAct(contract, act),
                ("f32 batch seq 8", w, "f32 6"),
                lambda x, w, b, c=contract, f=f: f(dot(x, w, c) + b),
            )
    for a, b in (
        ("f32 batch seq 8", "f32 batch 8 seq"),
        ("f32 batch 3 seq 8", "f32 8 4"),
        ("f32 seq 8", "f32 batch 8 4"),
        ("bf16 batch 1 2 3", "bf16 5 3 4"),
        ("f32 batch seq 8", "f32 8"),
        ("f32 8", "f32 batch 8 seq"),
    ):
        yield Sample(BatchMatMul(), (a, b), np.matmul)
    yield from fused_samples()
    for dtype in ("f32", "bf16"):
        x, g = f"{dtype} batch seq 8", f"{dtype} 8"
        yield Sample(RmsNormOp(1e-5), (x, g), rms_norm)
        yield Sample(RmsNormOp(1e-5), (x, g, g), rms_norm)
        yield Sample(LayerNormOp(1e-5), (x, g, g), layer_norm)
        yield Sample(LayerNormOp(1e-5, shifted=False), (x, g), lambda x, g: layer_norm(x, g, 0.0))
        yield Sample(LayerNormOp(1e-5, scaled=False), (x, g), lambda x, b: layer_norm(x, 1.0, b))
        yield Sample(LayerNormOp(1e-5, False, False), (x,), lambda x: layer_norm(x, 1.0, 0.0))
        yield Sample(RmsNormOp(1e-5, 1.0), (x, g), lambda x, g: rms_norm(x, g, offset=1.0))
    yield Sample(RmsNormOp(0.5), ("f32 8", "f32 8"), lambda x, g: rms_norm(x, g, eps=0.5))
    yield Sample(LayerNormOp(0.5), ("f32 3 8", "f32 8", "f32 8"), lambda x, g, b: layer_norm(x, g, b, eps=0.5))


def fused_samples() -> Iterator[Sample]:
    """Fused ops, but for the biased product."""
    silu, gelu = UNARY_REFERENCE["silu"], UNARY_REFERENCE["gelu_tanh"]
    yield Sample(FusedSwiGLU(), ("f32 batch seq 8",), lambda x: silu(x[..., :4]) * x[..., 4:])
    yield Sample(FusedSwiGLU(), ("bf16 3 2",), lambda x: silu(x[..., :1]) * x[..., 1:])
    yield Sample(FusedSwiGLU(False), ("f32 batch 6",), lambda x: x[..., :3] * silu(x[..., 3:]))
    yield Sample(FusedSwiGLU(True, "gelu_tanh"), ("f32 seq 6",), lambda x: gelu(x[..., :3]) * x[..., 3:])
    x, g = "f32 batch seq 8", "f32 8"
    yield Sample(FusedResidualLayerNorm(1e-5), (x, x, g, g), lambda x, r, g, b: layer_norm(x + r, g, b))
    yield Sample(FusedResidualRmsNorm(1e-5), (x, x, g), lambda x, r, g: rms_norm(x + r, g))
    yield Sample(FusedResidualRmsNorm(1e-5), (x, x, g, g), lambda x, r, g, b: rms_norm(x + r, g, b))
    yield Sample(
        FusedResidualLayerNorm(0.5, True), (x, x, g, g, g), lambda x, r, c, g, b: layer_norm(x + c + r, g, b, 0.5)
    )
    yield Sample(FusedResidualRmsNorm(0.5, True), (x, x, g, g), lambda x, r, c, g: rms_norm(x + c + r, g, eps=0.5))
    yield Sample(FusedResidualRmsNorm(1e-5, offset=1.0), (x, x, g), lambda x, r, g: rms_norm(x + r, g, offset=1.0))
    add, mul, tanh = Binary("add"), Binary("mul"), Unary("tanh")
    gated = ElementwiseRegion(3, (Step(tanh, (0,)), Step(mul, (3, 1)), Step(add, (2, 4))))
    yield Sample(gated, (x, g, "f32"), lambda x, g, c: c + np.tanh(x) * g)
    chosen = ElementwiseRegion(2, (Step(Compare("gt"), (0, 1)), Step(Where(), (2, 0, 1))))
    yield Sample(chosen, ("f32 batch 8", "f32 8"), np.maximum)


def layer_samples() -> Iterator[Sample]:
    """Halves of an encoder layer as one op: 2 heads of width 4 over hidden 6."""
    plain = ("f32 batch seq 6", "f32 6 24", "f32 8 6", "f32 batch seq")
    for bias, turned in ((False, False), (True, False), (False, True), (True, True)):
        op = FusedAttentionBlock(2, 4, bias, turned)
        rest = ("f32 24", "f32 6") * bias + ("f32 1 seq 2",) * (2 * turned)
        means = functools.partial(lambda op, *arrays: attention_block(op, **op.names(arrays)), op)
        yield Sample(op, (*plain, *rest), means)
    g, whole = ("f32 6",) * 2, ("f32 6 5", "f32 5 6")
    for layer, operands in (
        (FusedTransformerLayer(2, 4, 5, 1e-3, 1e-2), (*plain[:3], *g, *whole, *g, plain[3])),
        (
            FusedTransformerLayer(2, 4, 5, 1e-3, 1e-2, "relu", True),
            (plain[0], plain[1], "f32 24", plain[2], "f32 6", *g, whole[0], "f32 5", whole[1], "f32 6", *g, plain[3]),
        ),
    ):
        means = functools.partial(lambda op, *arrays: transformer_layer(op, **op.names(arrays)), layer)
        yield Sample(layer, operands, means, tolerance=1e-5)


def sequence_samples() -> Iterator[Sample]:
    """Rotary embeddings and the cache."""
    for n_rot, width in ((8, 4), (8, 8), (4, 2), (4, 4)):
        for rows, style in (("1", "half"), ("batch", "half"), ("batch", "interleaved")):
            yield Sample(
                RopeOp(8, n_rot, style),
                ("f32 batch seq 24", f"f32 {rows} seq {width}", f"f32 {rows} seq {width}"),
                lambda x, c, s, r=n_rot, style=style: rope(x, c, s, 8, r, style),
            )
    yield Sample(RopeOp(4, 4), ("bf16 2 3 8", "f32 1 3 2", "f32 1 3 2"), lambda x, c, s: rope(x, c, s, 4, 4))
    freqs = (1.0, 0.31, 0.01)

    for op, positions in (
        (RopeTable(freqs), "i32 1 seq"),
        (RopeTable(freqs, 1.2), "i32 batch seq"),
        (RopeTable(freqs, axes=(3, 0, 1)), "i32 batch seq 4"),
        (RopeTable(freqs, 0.7, (1, 0, 1)), "i32 1 seq 2"),
    ):
        yield Sample(op, (positions,), lambda p, o=op: rope_table(p, o.inv_freq, o.factor, o.axes), below=50,
                     tolerance=1e-5)  # fmt: skip
    for table, times in ((SinusoidTable(5, 3.0, 500.0), "f32 batch"), (SinusoidTable(4), "i32 batch")):
        yield Sample(table, (times,), lambda t, o=table: sinusoids(t, o.channels, o.scale, o.max_period))
    for cache in ("f32 batch keys 3", "f32 batch keys 2 3"):
        new = cache.replace("keys", "4")
        yield Sample(CacheUpdate(), (cache, new, "i32 batch", "i32 batch"), cache_update, below=5)
        yield Sample(CacheUpdate(fresh=True), (cache, new, "i32 batch", "i32 batch"), cache_fill, below=5)
    yield Sample(CacheUpdate(), ("bf16 2 6 4", "bf16 2 3 4", "i32 2", "i32 2"), cache_update, below=4)
    yield Sample(Overwrite(), ("f32 batch keys 3", "f32 batch keys 3"), lambda old, new: new)
    yield Sample(Overwrite(), ("bool 2 3", "bool 2 3"), lambda old, new: new)
    for ring in ("f32 batch keys 3", "f32 batch 2 2 3"):
        for block in ("seq", "1"):
            new = " ".join(["f32 batch", block, *ring.split()[3:]])
            below = 2 if block == "1" else 5
            yield Sample(RingStep(), (ring, new, "i32 batch", "i32 batch"), ring_step, below=below)
    for window, slots, in_place in ((3, 5, True), (3, 4, False), (7, 6, True)):  # window + S - 1 slots, one less, all
        arrays = (f"f32 2 {slots} 2 3", "f32 2 3 2 3", "i32 2", "i32 2")
        yield Sample(RingStep(window), arrays, functools.partial(ring_step, in_place=in_place), below=4)


def shaping_samples() -> Iterator[Sample]:
    """Ops that move elements, reductions, selection and casts."""
    x = "f32 batch seq 8"
    yield Sample(Reshape((AxisOf(0), AxisOf(1), 2, 4)), (x,), lambda x: x.reshape(2, 5, 2, 4))
    yield Sample(Reshape((-1, 8)), (x,), lambda x: x.reshape(-1, 8))
    yield Sample(Reshape((AxisOf(1), AxisOf(0), -1)), (x,), lambda x: x.reshape(5, 2, 8))
    yield Sample(Reshape((2, -1)), ("i32 4 3",), lambda x: x.reshape(2, 6))
    yield Sample(Reshape(()), ("f32 1 1",), lambda x: x.reshape(()))
    yield Sample(Transpose((2, 0, 1)), (x,), lambda x: x.transpose(2, 0, 1))
    yield Sample(Transpose(()), ("f32",), lambda x: x)
    yield Sample(Shard(("batch", None, "heads")), (x,), lambda x: x)
    yield Sample(Narrow(2, 3, 4), (x,), lambda x: x[:, :, 3:7])
    yield Sample(Narrow(1, -1, 1), (x,), lambda x: x[:, -1:])
    yield Sample(Narrow(-1, -3, 2), (x,), lambda x: x[..., 5:7])
    yield Sample(SplitLast((3, 4, 1)), (x,), lambda x: (x[..., :3], x[..., 3:7], x[..., 7:]))
    yield Sample(Slice(((None, None, None), (1, None, None))), ("i32 batch 6",), lambda x: x[:, 1:])
    yield Sample(Slice((Ellipsis, -1)), (x,), lambda x: x[..., -1])
    joint, txt = "f32 batch seq+keys 8", Bound((SizeOf(1, 1),))
    yield Sample(CutAxis(1, stop=txt), (joint, "i32 batch seq"), lambda x, _: x[:, :5])
    yield Sample(CutAxis(1, txt), (joint, "f32 1 seq 2"), lambda x, _: x[:, 5:])
    yield Sample(CutAxis(-2, Bound((SizeOf(1, 0),)), Bound((), 1, True)), (joint, "f32 seq"), lambda x, _: x[:, 5:-1])
    yield Sample(CutAxis(1, Bound((SizeOf(1, 0),), from_end=True), END), (joint, "f32 keys"), lambda x, _: x[:, 5:])
    yield Sample(CutAxis(0, stop=Bound((SizeOf(0, 1), SizeOf(1, 0)))), ("bf16 9 2", "f32 4"), lambda x, _: x[:6])
    yield Sample(Expand((3, 5, 2)), ("f32 5 1",), lambda x: np.broadcast_to(x, (3, 5, 2)))
    yield Sample(Expand((SizeOf(1, 0), SizeOf(0, 0), 2)), ("i32 seq 1", "bool batch"),
                 lambda x, _: np.broadcast_to(x, (2, 5, 2)))  # fmt: skip
    yield Sample(Slice((None, 0)), (x,), lambda x: x[None, 0])
    yield Sample(Slice(((None, None, None), (None, None, -1), (7, 1, -2))), (x,), lambda x: x[:, ::-1, 7:1:-2])
    yield Sample(Concat(2), (x, x, "f32 batch seq 1"), lambda *a: np.concatenate(a, 2))
    yield Sample(Concat(1), ("bf16 batch 3", "bf16 batch 2"), lambda *a: np.concatenate(a, 1))
    yield Sample(Gather(), ("f32 9 4", "i32 batch seq"), lambda t, i: t[i], below=9)
    yield Sample(Gather(), ("bf16 9 4 2", "u8 seq"), lambda t, i: t[i], below=9)
    yield Sample(Gather(), ("f32 9", "i32"), lambda t, i: t[i], below=9)
    yield Sample(TakeRow(), (x, "i32 batch"), lambda x, i: x[np.arange(2), i][:, None], below=5)
    yield Sample(TakeRow(), ("f32 batch seq", "i32 batch"), lambda x, i: x[np.arange(2), i][:, None], below=5)
    yield Sample(Iota(1), (x,), lambda x: np.arange(5))
    yield Sample(Iota(2), (x,), lambda x: np.arange(8))
    yield Sample(RelativeBuckets(1, 8, 4), (x,), lambda x: relative_buckets(5, 8, 4))
    yield Sample(RelativeBuckets(2, 4, 3), (x,), lambda x: relative_buckets(8, 4, 3))
    yield Sample(RelativeBuckets(0), ("bf16 200",), lambda x: relative_buckets(200, 32, 128))
    for kind, means in REDUCE_REFERENCE.items():
        yield Sample(Reduce(kind, (1,)), (x,), lambda x, f=means: f(x, axis=1))
        yield Sample(Reduce(kind, (0, 2), keepdims=True), (x,), lambda x, f=means: f(x, axis=(0, 2), keepdims=True))
        yield Sample(Reduce(kind, (0,)), ("bf16 3 4",), lambda x, f=means: f(x, axis=0))
    for kind in ("var", "std"):
        means = REDUCE_REFERENCE[kind]
        yield Sample(Reduce(kind, (2, 0), ddof=1), (x,), lambda x, f=means: f(x, axis=(0, 2), ddof=1))
    yield Sample(Reduce("any", (1,)), ("bool batch seq",), lambda x: x.any(1))
    yield Sample(Reduce("all", (1,)), ("i32 batch seq",), lambda x: (x != 0).all(1))
    yield Sample(Reduce("sum", (1,)), ("i32 batch seq",), lambda x: x.sum(1))
    for axis in (-1, 1):
        yield Sample(Softmax(axis), (x,), lambda x, a=axis: softmax(x, a))
    yield Sample(Softmax(), ("bf16 batch 8",), softmax)
    for exclusive in (False, True):
        yield Sample(Cumsum(-1, exclusive), ("i32 batch seq",), lambda x, e=exclusive: cumsum(x, 1, e))
        yield Sample(Cumsum(1, exclusive), (x,), lambda x, e=exclusive: cumsum(x, 1, e))
        yield Sample(Cumsum(1, exclusive, True), (x,), lambda x, e=exclusive: cumsum(x, 1, e, True))
    yield from order_samples()
    yield from index_samples()
    yield Sample(RepeatHeads(2, 3), (x,), lambda x: np.concatenate([x[..., :4]] * 3 + [x[..., 4:]] * 3, -1))
    yield Sample(RepeatHeads(4, 1), (x,), lambda x: x)
    yield Sample(Where(), ("bool batch seq", "f32 batch seq", "f32"), np.where)
    yield Sample(Where(), ("i32 seq 1", "f32 batch 1 4", "f32 4"), lambda c, a, b: np.where(c != 0, a, b))
    yield Sample(Where(), ("f32 batch", "i32 batch", "i32"), lambda c, a, b: np.where(c != 0, a, b))
    yield Sample(CastTo(I32), (x,), np.trunc)
    yield Sample(CastTo(BF16), ("i32 batch seq",), lambda x: x)
    yield Sample(CastTo(F32), ("bool 3",), lambda x: x)
    yield Sample(CastTo(np.dtype(np.int8), saturate=True), ("i32 3 4",), lambda x: np.minimum(x, 127), below=400)
    yield Sample(FullLike(1.5, F32), ("i32 batch seq",), lambda x: np.full(x.shape, 1.5))
    yield Sample(FullLike(2.0, I32), (x,), lambda x: np.full(x.shape, 2))
    yield Sample(JaxFn(lambda x, y: x * y + 1), (x, x), lambda x, y: x * y + 1)
    yield Sample(JaxFn(lambda x: (jnp.sin(x), x[:, :, 0])), (x,), lambda x: (np.sin(x), x[:, :, 0]))
    yield Sample(JaxFn(lambda x: jnp.asarray(2.5)), (x,), lambda x: np.asarray(2.5))


def order_samples() -> Iterator[Sample]:
    """Running reductions, the largest and where it stands, sorting."""
    x, ids = "f32 batch seq 8", "i32 batch seq"
    yield Sample(LogSoftmax(1), (x,), lambda x: np.log(softmax(x, 1)))
    yield Sample(LogSoftmax(), ("bf16 batch 8",), lambda x: np.log(softmax(x)))
    for kind, fn in (("prod", np.prod), ("max", np.max), ("min", np.min)):
        yield Sample(Cumulative(kind, 1), (x,), lambda x, f=fn: running(f, x, 1))
        yield Sample(Cumulative(kind, -1, reverse=True), (ids,), lambda x, f=fn: running(f, x, 1, reverse=True))
        edge = {"prod": 1, "max": -(2**31), "min": 2**31 - 1}[kind]
        yield Sample(Cumulative(kind, 0, True, True), (ids,), lambda x, f=fn, e=edge: running(f, x, 0, True, True, e))
    for kind, search in (("argmax", np.argmax), ("argmin", np.argmin)):
        yield Sample(ArgReduce(kind, 1), (x,), lambda x, f=search: f(x, axis=1))
        yield Sample(ArgReduce(kind, -1, True), (ids,), lambda x, f=search: f(x, axis=1, keepdims=True))
        yield Sample(ArgReduce(kind, 1, last=True), (ids,), lambda x, f=search: 4 - f(x[:, ::-1], axis=1))
    for down in (False, True):
        signed: Any = lambda x, down=down: -x.astype(np.float64) if down else x  # noqa: E731
        yield Sample(Sort(1, down), (x,), lambda x, s=signed: s(np.sort(s(x), axis=1)))
        yield Sample(Sort(-1, down), (ids,), lambda x, s=signed: s(np.sort(s(x), axis=1)))
        yield Sample(Sort(1, down, True), (ids,), lambda x, s=signed: np.argsort(s(x), axis=1, kind="stable"))

        def top(x: np.ndarray, axis: int = -1, signed: Any = signed) -> tuple[np.ndarray, np.ndarray]:
            at = np.argsort(signed(x), axis=axis, kind="stable").take(range(2), axis)
            return np.take_along_axis(x, at, axis), at

        yield Sample(TopK(2, -1, largest=down), (x,), top)
        yield Sample(TopK(2, 1, largest=down), ("i32 batch 5 2",), lambda x, t=top: t(x, 1))
    yield Sample(
        TopK(2, largest=False), ("u8 3 4",), lambda x: (np.sort(x)[:, :2], np.argsort(x, kind="stable")[:, :2])
    )


def index_samples() -> Iterator[Sample]:
    """Reading and writing by index on any axis, padding, tiling, products by named axes."""
    x, ids = "f32 batch seq 8", "i32 3 2"
    yield Sample(Take(2), (x, ids), lambda x, i: np.take(x, i, 2))
    yield Sample(Take(0, "clip"), ("i32 4 2", "i32"), lambda x, i: x[i])
    yield Sample(Take(1, "wrap"), ("bf16 2 3", "u8 4"), lambda x, i: np.take(x, i % 3, 1), below=9)
    along = lambda x, i: np.take_along_axis(x, i, 2)  # noqa: E731
    yield Sample(TakeAlongAxis(-1), (x, "i32 batch seq 3"), along)
    yield Sample(TakeAlongAxis(2, "clip"), (x, "i32 1 1 3"), lambda x, i: along(x, np.broadcast_to(i, (2, 5, 3))))
    yield Sample(GatherNd(), (x, "i32 4 2"), lambda x, i: x[i[:, 0], i[:, 1]], below=2)
    rows = lambda x, i: np.stack([r[j[:, 0]] for r, j in zip(x, i, strict=True)])  # noqa: E731
    yield Sample(GatherNd(1), (x, "i32 batch 3 1"), rows)
    for kind in SCATTER:
        along_axis: Any = lambda x, i, u, k=kind: scatter(x, i, u, 1, k)  # noqa: E731
        at_places: Any = lambda x, i, u, k=kind: scatter_nd(x, i, u, k)  # noqa: E731
        length = 1 if kind == "set" else 3  # which of two writes stays is not said
        below = 5 if kind == "set" else 3
        yield Sample(Scatter(1, kind), ("f32 2 5 4", f"i32 2 {length} 3", f"f32 2 {length} 3"), along_axis, below=below)
        count = 1 if kind == "set" else 4
        yield Sample(ScatterNd(kind), (x, f"i32 {count} 2", f"f32 {count} 8"), at_places, below=2)
    widths = ((0, 0), (2, 1), (1, 3))
    yield Sample(Pad(widths, value=1.5), (x,), lambda x: np.pad(x, widths, constant_values=1.5))
    yield Sample(Pad(((1, -2), (0, 1))), ("i32 4 3",), lambda x: np.pad(x, ((1, 0), (0, 1)))[:-2])
    for mode in ("edge", "reflect", "symmetric", "wrap"):
        given: Any = mode
        yield Sample(Pad(((0, 0), (2, 4)), mode), ("f32 batch 4",), lambda x, m=given: np.pad(x, ((0, 0), (2, 4)), m))
    yield Sample(Pad(((0, 0), (-1, 2)), "edge"), ("bf16 2 4",), lambda x: np.pad(x[:, 1:], ((0, 0), (0, 2)), "edge"))
    yield Sample(Tile((1, 3, 2)), (x,), lambda x: np.tile(x, (1, 3, 2)))
    yield Sample(Einsum("bsh,hk->bks"), (x, "f32 8 3"), lambda x, w: np.einsum("bsh,hk->bks", x, w))
    yield Sample(
        Einsum("...ij,...ji->...", "highest"),
        ("f32 batch 3 4", "f32 4 3"),
        lambda a, b: np.einsum("...ij,...ji->...", a, b),
    )
    yield Sample(Einsum("ij,kj->ik", result=I32), ("i8 2 3", "i8 4 3"), lambda a, b: a.astype(int) @ b.T.astype(int))
    yield Sample(Einsum("ii->i"), ("f32 4 4",), np.diagonal)


def image_samples() -> Iterator[Sample]:
    """Patches, and positions for them: of the grid's own size, of others, and of sizes that a call decides."""
    yield Sample(Patches((2, 3)), ("f32 batch 3 7 9",), lambda x: patches(x, 2, 3))
    yield Sample(Patches((1, 2)), ("bf16 2 1 seq keys",), lambda x: patches(x, 1, 2))
    for antialias in (False, True):
        for images in ("f32 batch 3 6 8", "f32 batch 1 seq keys", "f32 1 1 31 13"):
            op = GridPositions((3, 4), (2, 2), antialias)
            yield Sample(
                op,
                ("f32 12 5", images),
                functools.partial(grid_positions, grid=(3, 4), patch=(2, 2), antialias=antialias),
            )


def control_samples() -> Iterator[Sample]:
    """Bodies that run once, some times, or not at all."""
    m = rlx.Graph.hir("m")
    x, p, i = m.input("x", ("batch", 5)), m.input("p", ()), m.input("i", (), "i32")
    m.switch(i, [m.sin, lambda v: m.mul(v, p), m.square], x)
    m.while_loop(lambda c: m.lt(c[0], 4), lambda c: (m.add(c[0], 1), m.tanh(m.mul(c[1], p))), (i, x))
    m.scan(lambda c, v: (m.add(m.mul(c, p), v), (c, m.argmax(v))), m.zeros(5), x, reverse=True)
    m.fori_loop(0, 3, lambda k, v: m.add(v, m.sin(v)), x)
    m.custom_vjp(m.round, lambda v, out, g: g, x)
    yield from pair_samples()
    for node in m.builder.nodes:
        if isinstance(node.op, Switch | While | Scan | CustomVjp):
            operands = tuple(str(m.builder.type(v)).replace("[", " ").replace(",", " ").strip("]") for v in node.inputs)
            yield Sample(node.op, operands, functools.partial(meaning.MIR[type(node.op)], node.op), tolerance=1e-5)


def pair_samples() -> Iterator[Sample]:
    """A bias by positions: of weights and distances, of keys alone; positions of each row, or the same for all."""
    m = rlx.Graph.hir("m")
    x, slopes = m.input("x", (1, "seq", 6)), m.input("slopes", (3, 1, 1))
    m.attention(x, x, x, heads=3, bias=lambda q, k: m.mul(slopes, m.cast(m.sub(k, q), "f32")))
    m.attention(x, x, x, heads=3, bias=lambda q, k: m.sin(m.cast(k, "f32")))
    bodies = [n.op.bias_of for n in m.builder.nodes if isinstance(n.op, hir.Attention)]
    of_weights, of_keys = (PairBias(body) for body in bodies if body is not None)
    rows, keys, weights = "i32 batch seq", "i32 1 keys", "f32 3 1 1"
    for op, operands in (
        (of_weights, (rows, keys, weights)), (of_weights, ("i32 1 seq", keys, weights)),
        (of_weights, (rows, "i32 batch keys", weights)), (of_keys, (rows, keys)),
    ):  # fmt: skip
        yield Sample(op, operands, functools.partial(meaning.MIR[PairBias], op), tolerance=1e-5)


def window_samples() -> Iterator[Sample]:
    """TokenWindows that slide, other sizes, norms without weights, few bits."""
    x, y = "f32 batch 4 6 5", "f32 batch 4 7"

    def pooled(op: Pool) -> Callable[..., Any]:
        return lambda x: image.pool(
            x, op.kind, op.window, op.strides, op.padding, op.dilation, op.ceil, op.count_include_pad, op.p
        )

    for conv, operands in (
        (Conv((1, 1), "VALID", (1, 1)), (x, "f32 3 4 3 2")),
        (Conv((2, 1), ((1, 0), (0, 2)), (1, 2), 2), (x, "f32 6 2 3 2")),
        (Conv((1, 2), "SAME", (2, 1), 4, "highest"), (x, "f32 4 1 3 3")),
        (Conv((2,), "SAME_LOWER", (1,)), (y, "f32 2 4 4")), (Conv((1,), ((2, 0),), (1,)), ("bf16 2 2 5", "bf16 3 2 3")),
        (Conv((1,), "SAME", (1,)), ("f32 batch 4 seq", "f32 2 4 3")),
        (Conv((1, 1, 2), ((1, 1), (0, 0), (1, 0)), (1, 1, 1)), ("f32 1 2 3 4 5", "f32 2 2 2 2 2")),
    ):  # fmt: skip
        means = lambda x, w, op=conv: image.conv(x, w, op.strides, op.padding, op.dilation, op.groups)  # noqa: E731
        yield Sample(conv, operands, means)
    for turned, operands in (
        (ConvTranspose((1, 1), ((0, 0), (0, 0)), (0, 0), (1, 1)), (x, "f32 4 3 3 2")),
        (ConvTranspose((2, 3), ((1, 0), (2, 1)), (1, 2), (2, 1), 2), (x, "f32 4 3 2 3")),
        (ConvTranspose((2,), ((0, 1),), (0,), (1,)), ("bf16 2 2 seq", "bf16 2 3 2")),
    ):
        yield Sample(turned, operands, lambda x, w, op=turned: image.conv_transpose(
            x, w, op.strides, op.padding, op.output_padding, op.dilation, op.groups))  # fmt: skip
    for kind in POOLS:
        for pads, steps, ceil in (("VALID", (1, 1), False), (((1, 0), (1, 1)), (1, 2), True), ("SAME", (1, 1), False)):
            p = 3.0 if kind == "lp" else 2.0
            pool = Pool(kind, (3, 2), (2, 2), pads, steps, ceil, kind == "mean", p)
            yield Sample(pool, (x,), pooled(pool))
        yield Sample(op := Pool(kind, (2,), (2,), ((1, 1),), (1,), True), ("f32 2 3 5",), pooled(op))
        length = "5" if kind == "argmax" else "seq"
        yield Sample(op := Pool(kind, (3,), (1,), "SAME", (1,)), (f"f32 batch 2 {length}",), pooled(op))
    yield Sample(op := Pool("argmax", (2, 2), (1, 1), ((1, 1), (0, 0)), (2, 1)), ("i32 batch 2 3 3",), pooled(op))
    yield Sample(op := Pool("max", (2, 2), (1, 1), ((1, 1), (0, 0)), (1, 1)), ("i32 batch 2 3 3",), pooled(op))
    yield Sample(op := Pool("mean", (3,), (2,), ((1, 1),), (1,)), ("bf16 2 3 5",), pooled(op))
    for size in (
        Resize((2, 3), (9, 3), "nearest"), Resize((2,), (4,), "nearest", rounding="ceil"),
        Resize((-1,), (8,), "nearest", "asymmetric", rounding="floor"), Resize((2, 3), (9, 8), "linear"),
        Resize((2, 3), (3, 2), "linear", antialias=True, exclude_outside=True),
        Resize((3,), (7,), "linear", "align_corners"),
        Resize((2, 3), (4, 7), "cubic", a=-0.75), Resize((2, 3), (2, 3), "cubic", "half_pixel", antialias=True),
        Resize((2,), (5,), "cubic", "asymmetric", (0.9,), exclude_outside=True),
        Resize((2,), (4,), "linear", "half_pixel_symmetric", (0.72,)),
        Resize((3,), (1,), "linear", "pytorch_half_pixel"),
        Resize((2, 3), (4, 3), "linear", "tf_crop_and_resize", roi=((0.2, 0.7), (-0.4, 1.3)), extrapolation=2.0),
        Resize((2,), (3,), "nearest", "tf_crop_and_resize", roi=((0.9, 0.1),), rounding="round_prefer_ceil"),
    ):  # fmt: skip
        yield Sample(size, (x,), lambda x, op=size: image.resize(x, op))
    yield Sample(Resize((1,), (3,), "nearest"), ("u8 2 5",), lambda x: x[:, [0, 2, 4]], below=200)
    for method in ("nearest", "linear", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (False, True):
                read = GridSample(method, padding, corners)
                means = lambda x, g, o=read: image.grid_sample(x, g, o.method, o.padding, o.align_corners)  # noqa: E731
                yield Sample(read, ("f32 batch 2 4 3", "f32 batch 3 seq 2"), means, tolerance=1e-5)
    volume = lambda x, g: image.grid_sample(x, g, "linear", "zeros", False)  # noqa: E731
    yield Sample(GridSample(), ("f32 2 1 3 2 4", "f32 2 2 1 3 3"), volume)
    yield Sample(Standardize((-1,), 1e-5), (x,), lambda x: layer_norm(x, np.ones(5), np.zeros(5)))
    yield Sample(Standardize((-1,), 0.5, False), ("bf16 3 8",), lambda x: rms_norm(x, np.ones(8), eps=0.5))
    both = lambda x: (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 0.1)  # noqa: E731
    yield Sample(Standardize((1, 2), 0.1), ("f32 batch seq 8",), both)
    for bits, axis in ((8, None), (4, 1), (2, -1)):
        yield Sample(
            FakeQuantize(bits, axis), ("f32 2 4 5",), lambda x, b=bits, a=axis: image.fake_quantize(x, None, b, a)
        )
    yield Sample(FakeQuantize(3), ("f32 batch 4", "f32"), lambda x, s: image.fake_quantize(x, s, 3, None), True)
    yield Sample(FakeQuantize(4, 1), ("f32 batch 4", "f32 4"), lambda x, s: image.fake_quantize(x, s, 4, 1), True)
    yield Sample(
        FakeQuantize(3, 0, "tanh", True), ("f32 4 5", "f32 4"), lambda x, s: image.fake_quantize(x, s, 3, 0), True
    )
    # of one class left there is nothing to draw
    yield Sample(SampleOp(0.0), ("f32 batch seq 8", "i32"), lambda x, s: x.argmax(-1))
    yield Sample(SampleOp(0.7, top_k=1), ("f32 batch 8", "u32"), lambda x, s: x.argmax(-1))
    yield Sample(SampleOp(2.0, top_p=1e-4), ("bf16 3 8", "i32"), lambda x, s: x.argmax(-1))


def system_samples() -> Iterator[Sample]:
    """Spectra by the matrix of the transform, systems by NumPy's float64."""
    for kind in ("fft", "rfft", "ifft", "irfft"):
        for n, axis, norm in ((None, -1, "backward"), (7, 1, "ortho"), (3, -2, "forward")):
            real = kind in ("fft", "rfft")
            means = lambda x, k=kind, n=n, a=axis, o=norm: spectrum(k, x, n, a, o)  # noqa: E731
            yield Sample(Fft(kind, n, axis, norm), ("f32 batch 6 5" if real else "c64 batch 4 5",), means)
    yield Sample(Fft("fft"), ("c64 6",), lambda x: spectrum("fft", x, None, -1, "backward"))
    yield Sample(Fft("rfft"), ("bf16 3 6",), lambda x: spectrum("rfft", x, None, -1, "backward"))
    yield Sample(Fft("ifft", 6), ("f32 batch 5",), lambda x: spectrum("ifft", x, 6, -1, "backward"))
    square = lambda a: a + 3 * np.eye(a.shape[-1]) if a.shape[-1:] == a.shape[-2:-1] else a  # noqa: E731
    for operands in (("f32 3 3", "f32 3"), ("f32 4 4", "f32 4 2"), ("f32 batch 3 3", "f32 batch 3 5")):
        yield Sample(Solve(), operands, np.linalg.solve, draw=square, tolerance=1e-5)
    yield Sample(Det(), ("f32 batch 4 4",), np.linalg.det, draw=square, tolerance=1e-5)


def token_samples() -> Iterator[Sample]:
    """A step over tokens: from rows' own states, from one for all, ragged, with every state, of one token."""
    step = traced_step("decay", meaning.decay, [operand(text) for text in ("f32 4", "f32 4", "f32")])
    for start in ("f32 batch 4", "f32 4", "f32"):
        op = TokenScan(step, 1, 1)
        yield Sample(op, (start, "f32 batch seq 4", "f32"), functools.partial(meaning.token_scan, op))
    op = TokenScan(step, 1, 1, ragged=True, every=True, unroll=2)
    yield Sample(
        op, ("f32 batch 4", "bf16 batch seq 4", "bf16", "i32 batch"), functools.partial(meaning.token_scan, op), below=7
    )
    for window, x in (
        (TokenWindows(3), "f32 batch 9 4"),
        (TokenWindows(1), "i32 batch seq"),
        (TokenWindows(2), "bf16 batch 2"),
    ):
        yield Sample(window, (x,), functools.partial(meaning.MIR[TokenWindows], window))
    for tail, operands in ((TailRows(2), ("f32 batch 9 4", "i32 batch")), (TailRows(3), ("i32 batch 4", "i32 batch"))):
        below = 7 if operands[0] == "f32 batch 9 4" else 2
        yield Sample(tail, operands, functools.partial(meaning.MIR[TailRows], tail), below=below)
    op = TokenScan(step, 1, 1, ragged=True)
    yield Sample(op, ("f32 batch 4", "f32 batch 1 4", "f32", "i32 batch"), functools.partial(meaning.token_scan, op))


def recurrent_samples() -> Iterator[Sample]:
    """Recurrences from zeros and from a state, with the states after every token, of one token, in groups."""

    def means(op: Mir) -> Callable[..., Any]:
        return functools.partial(meaning.MIR[type(op)], op)

    for tokens, held, every, heads in (("seq", False, False, 4), ("seq", True, True, 2), ("1", True, False, 4)):
        delta = GatedDeltaOp(0.3 if every else None, held, every)
        operands = [f"f32 batch {tokens} {h}" for h in ("2 3", "2 3", f"{heads} 5", heads, heads)]
        start = [f"f32 batch {heads} 3 5"] * held
        yield Sample(delta, (*operands, *start), means(delta), draw=lambda x: -np.tanh(np.abs(x)))
        for rate in (f"f32 {heads}", f"f32 {heads} 5"):
            scan = SelectiveScanOp(held, every)
            group = f"f32 batch {tokens} 2 5"
            given = (f"f32 batch {tokens} {heads} 3", f"f32 batch {tokens} {heads}", rate, group, group)
            yield Sample(
                scan, (*given, *[f"f32 batch {heads} 3 5"] * held), means(scan), draw=lambda x: -np.tanh(np.abs(x))
            )
    low = GatedDeltaOp(held=True)
    bf16 = ("bf16 2 5 1 4", "bf16 2 5 1 4", "bf16 2 5 3 4", "f32 2 5 3", "bf16 2 5 3", "f32 2 3 4 4")
    yield Sample(low, bf16, means(low), draw=lambda x: -np.tanh(np.abs(x)))
    for bias, tokens in ((False, "seq+3"), (True, "seq+3"), (True, "4")):
        conv = CausalConvOp(bias)
        yield Sample(conv, (f"f32 batch {tokens} 6", "f32 6 4", *["f32 6"] * bias), means(conv))


def expert_samples() -> Iterator[Sample]:
    """Experts for rows of tokens, for tokens and for one alone, in both orientations, two choices being one expert."""
    out_in, in_out = ("f32 3 5 8", "f32 3 5 8", "f32 3 8 5"), ("f32 3 8 5", "f32 3 8 5", "f32 3 5 8")
    for op, x, experts, choices in (
        (ExpertFfn(), "f32 batch seq 8", out_in, "batch seq 2"),
        (ExpertFfn("gelu_tanh", 0), "f32 batch 8", in_out, "batch 3"),
        (ExpertFfn(), "f32 8", out_in, "1"),
        (ExpertFfn(biased=True, clamp=ClampedGate(0.7, 1.7, 1.0)), "f32 batch 8", out_in, "batch 2"),
        (ExpertFfn(), "bf16 seq 8", tuple(t.replace("f32", "bf16") for t in out_in), "seq 2"),
    ):
        biases = ("f32 3 5", "f32 3 5", "f32 3 8") if op.biased else ()
        operands = (x, *experts, f"f32 {choices}", f"i32 {choices}", *biases)
        yield Sample(op, operands, lambda *arrays, op=op: expert_formula(op, *arrays), tolerance=1e-5)


SAMPLES = [
    *unary_samples(), *binary_samples(), *attention_samples(), *contraction_samples(), *sequence_samples(),
    *system_samples(), *shaping_samples(), *layer_samples(), *image_samples(), *window_samples(),
    *control_samples(), *token_samples(), *recurrent_samples(), *expert_samples(),
]  # fmt: skip
BY_CLASS = {cls: [s for s in SAMPLES if type(s.op) is cls] for cls in dict.fromkeys(type(s.op) for s in SAMPLES)}


def all_ops() -> set[type[Mir]]:
    """Every MIR op class of the package."""
    for module in pkgutil.iter_modules(ops.__path__, ops.__name__ + "."):
        importlib.import_module(module.name)

    def below(cls: type[Mir]) -> Iterator[type[Mir]]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    return {cls for cls in below(Mir) if cls.__module__.startswith("rlx_jax.")}


def test_every_op_has_a_sample() -> None:
    """A new op is tested from its first day."""
    assert {cls.__name__ for cls in all_ops()} == {cls.__name__ for cls in BY_CLASS}, (
        "a sample of each stands in this file"
    )
    assert set(UNARY) == set(UNARY_REFERENCE)
    assert set(BINARY) == set(BINARY_REFERENCE)
    assert set(COMPARE) == set(COMPARE_REFERENCE)
    assert set(PARAMETRIC) == set(PARAMETRIC_REFERENCE)
    assert set(REDUCE) == set(REDUCE_REFERENCE)


def test_every_op_has_its_formula_as_docstring() -> None:
    """Frozen dataclasses that say what they mean."""
    for cls in all_ops():
        assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), cls
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]


# -- the law: infer = eval_shape(eval) ---------------------------------------------------------


def traced(op: Mir, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """The types of `eval`, traced abstractly; none is weak."""
    leaves = jax.tree.leaves(jax.eval_shape(op.eval, *(t.spec for t in types)))
    assert not any(leaf.weak_type for leaf in leaves if not isinstance(op, JaxFn)), "weakly typed result"
    return tuple(TensorType(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_infer_is_eval_shape_of_eval(sample: Sample) -> None:
    """With symbolic sizes, and with numbers."""
    for types in (sample.types, tuple(t.bind(SIZES) for t in sample.types)):
        assert TypeCache().infer(sample.op, types) == traced(sample.op, types)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op.traits.stored], ids=str)
def test_an_op_survives_json(sample: Sample) -> None:
    """Every attribute comes back as it was; a body of a loop, which is no value, is written alike."""
    again = decode(Op, json.loads(json.dumps(encode(sample.op))), "op")
    assert encode(again) == encode(sample.op)
    assert again == sample.op or isinstance(sample.op, Switch | While | Scan | CustomVjp | PairBias)


def damaged(types: tuple[TensorType, ...]) -> Iterator[tuple[str, tuple[TensorType, ...]]]:
    """Operand lists near `types`: one too few or too many, another dtype, rank or size."""
    yield "one operand too few", types[:-1]
    yield "one operand too many", (*types, types[-1])
    for i, t in enumerate(types):

        def swapped(new: TensorType, i: int = i) -> tuple[TensorType, ...]:
            return (*types[:i], new, *types[i + 1 :])

        for dtype in (F32, BF16, I32, np.dtype(bool)):
            yield f"operand {i} as {dtype}", swapped(TensorType(t.shape, dtype))
        yield f"operand {i} with an axis more", swapped(TensorType((3, *t.shape), t.dtype))
        if t.rank:
            yield f"operand {i} with an axis less", swapped(TensorType(t.shape[1:], t.dtype))
            yield f"operand {i} as a scalar", swapped(TensorType((), t.dtype))
        for axis, size in enumerate(t.shape):
            longer = (*t.shape[:axis], size + 1, *t.shape[axis + 1 :])
            yield f"operand {i} longer on axis {axis}", swapped(TensorType(longer, t.dtype))


@pytest.mark.parametrize("cls", list(BY_CLASS), ids=lambda c: c.__name__)
def test_infer_refuses_what_eval_cannot_do(cls: type[Mir]) -> None:
    """Where tracing `eval` fails or gives other types, `infer` raises an RlxError, and so does the verifier."""
    passed: list[str] = []
    for sample in BY_CLASS[cls][:12]:
        for what, types in damaged(tuple(t.bind(SIZES) for t in sample.types)):
            try:
                got = TypeCache().infer(sample.op, types)
            except rlx.RlxError:
                continue
            try:
                want: Any = traced(sample.op, types)
            except Exception as error:
                want = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            if got != want:
                passed.append(f"{sample}: {what}: infer says {', '.join(map(str, got))}, eval {want}")
    assert not passed, f"{len(passed)} wrong calls pass:\n" + "\n".join(passed[:20])


WRONG: list[tuple[str, Mir, tuple[str, ...], type[rlx.RlxError]]] = [
    ("unknown function", Unary("gelluu"), ("f32 2",), GraphError),
    ("unknown binary", Binary("plus"), ("f32 2", "f32 2"), GraphError),
    ("unknown comparison", Compare("="), ("f32 2", "f32 2"), GraphError),
    ("unknown reduction", Reduce("median", (0,)), ("f32 2",), GraphError),
    ("mixed dtypes", Binary("add"), ("f32 2", "bf16 2"), DTypeError),
    ("mixed dtypes of a comparison", Compare("lt"), ("f32 2", "i32 2"), DTypeError),
    ("mixed dtypes of a product", MatMul(), ("f32 2 3", "bf16 3 2"), DTypeError),
    ("mixed dtypes of branches", Where(), ("bool 2", "f32 2", "i32 2"), DTypeError),
    ("mixed dtypes of a concat", Concat(0), ("f32 2", "i32 2"), DTypeError),
    ("integers in a float function", Unary("exp"), ("i32 2",), DTypeError),
    ("shapes that do not broadcast", Binary("add"), ("f32 2 3", "f32 2"), ShapeError),
    ("symbols that do not broadcast", Binary("add"), ("f32 batch", "f32 seq"), ShapeError),
    ("inner sizes", MatMul(), ("f32 2 3", "f32 4 2"), ShapeError),
    ("inner sizes, transposed", MatMul(1), ("f32 2 3", "f32 3 2"), ShapeError),
    ("rank of a weight", MatMul(), ("f32 2 3", "f32 1 3 2"), ShapeError),
    ("inner sizes of a batch product", BatchMatMul(), ("f32 2 3", "f32 2 3"), ShapeError),
    ("a bias that does not fit", FusedMatMulBiasAct(), ("f32 2 3", "f32 3 4", "f32 3"), ShapeError),
    ("a norm of another width", RmsNormOp(1e-5), ("f32 2 3", "f32 2"), ShapeError),
    ("a layer norm of another width", LayerNormOp(1e-5), ("f32 2 3", "f32 3", "f32 2"), ShapeError),
    ("an odd SwiGLU", FusedSwiGLU(), ("f32 2 3",), ShapeError),
    ("an unknown gate", FusedSwiGLU(True, "sillu"), ("f32 2 4",), GraphError),
    ("an unknown activation", FusedMatMulBiasAct(0, "gelluu"), ("f32 2 3", "f32 3 4", "f32 4"), GraphError),
    ("a residual that broadcasts", FusedResidualLayerNorm(1.0), ("f32 2 3", "f32 1 3", "f32 3", "f32 3"), ShapeError),
    ("a residual of another dtype", FusedResidualRmsNorm(1.0), ("f32 2 3", "bf16 2 3", "f32 3"), ShapeError),
    (
        "a residual norm without its bias",
        FusedResidualLayerNorm(1.0, True),
        ("f32 2 3",) * 2 + ("f32 3",) * 2,
        GraphError,
    ),
    ("a region step that does not fit", ElementwiseRegion(1, (Step(Unary("exp"), (0,)),)), ("i32 2",), DTypeError),
    ("heads that do not divide", AttentionOp(4, 3), ("f32 1 2 8", "f32 1 2 6", "f32 1 2 6"), GraphError),
    ("a width that heads do not divide", AttentionOp(3, 3), ("f32 1 2 8", "f32 1 2 8", "f32 1 2 8"), ShapeError),
    ("k and v that differ", AttentionOp(2, 2), ("f32 1 2 8", "f32 1 3 8", "f32 1 2 8"), ShapeError),
    ("rank of q", AttentionOp(2, 2), ("f32 2 8", "f32 2 8", "f32 2 8"), ShapeError),
    ("a missing mask", AttentionOp(2, 2, extra=("keep",)), ("f32 1 2 8",) * 3, GraphError),
    ("a mask of another length", AttentionOp(2, 2, extra=("keep",)), ("f32 1 2 8",) * 3 + ("i32 1 3",), ShapeError),
    ("a mask of rank 3", AttentionOp(2, 2, extra=("keep",)), ("f32 1 2 8",) * 3 + ("i32 1 2 2",), ShapeError),
    ("a mask of other heads", AttentionOp(2, 2, extra=("keep",)), ("f32 1 2 8",) * 3 + ("i32 1 3 2 2",), ShapeError),
    ("values of odd width", AttentionOp(2, 2), ("f32 1 2 8", "f32 1 2 8", "f32 1 2 7"), ShapeError),
    ("a window behind a causal one", AttentionOp(2, 2, True, 2, ahead=1), ("f32 1 2 8",) * 3, GraphError),
    ("ahead without a window", AttentionOp(2, 2, ahead=1), ("f32 1 2 8",) * 3, GraphError),
    ("an empty window", AttentionOp(2, 2, window=0), ("f32 1 2 8",) * 3, GraphError),
    ("a bias of rank 3", AttentionOp(2, 2, extra=("bias",)), ("f32 1 2 8",) * 3 + ("f32 2 2 2",), ShapeError),
    ("batches that differ", AttentionOp(2, 2), ("f32 1 2 8", "f32 3 2 8", "f32 3 2 8"), ShapeError),
    ("float positions", RopeTable((1.0,)), ("f32 1 4",), GraphError),
    ("times of rows", SinusoidTable(4), ("f32 1 4",), ShapeError),
    ("one channel", SinusoidTable(1), ("f32 4",), GraphError),
    ("rows of coordinates for one", RopeTable((1.0,)), ("i32 1 4 2",), ShapeError),
    ("one position for several coordinates", RopeTable((1.0,), axes=(0,)), ("i32 1 4",), ShapeError),
    ("a coordinate too far", RopeTable((1.0,), axes=(2,)), ("i32 1 4 2",), ShapeError),
    ("an axis for one of two frequencies", RopeTable((1.0, 0.1), axes=(1,)), ("i32 1 4 2",), ShapeError),
    ("another place in the state", Overwrite(), ("f32 2 3", "f32 2 4"), ShapeError),
    ("an unknown style", RopeOp(8, 8, "neox"), ("f32 1 2 8", "f32 1 2 4", "f32 1 2 4"), GraphError),
    ("rank 4 to rotate", RopeOp(8, 8), ("f32 1 2 1 8", "f32 1 2 4", "f32 1 2 4"), ShapeError),
    ("odd n_rot", RopeOp(8, 3), ("f32 1 2 8", "f32 1 2 4", "f32 1 2 4"), ShapeError),
    ("n_rot over head_dim", RopeOp(4, 8), ("f32 1 2 8", "f32 1 2 4", "f32 1 2 4"), ShapeError),
    ("tables of another length", RopeOp(8, 8), ("f32 1 2 8", "f32 1 3 4", "f32 1 3 4"), ShapeError),
    ("narrow tables", RopeOp(8, 8), ("f32 1 2 8", "f32 1 2 3", "f32 1 2 3"), ShapeError),
    ("rows of another dtype", CacheUpdate(), ("f32 2 4 3", "bf16 2 1 3", "i32 2", "i32 2"), GraphError),
    ("rows of a ring of another width", RingStep(), ("f32 2 4 3", "f32 2 1 2", "i32 2", "i32 2"), ShapeError),
    ("heads that do not divide", GatedDeltaOp(), (*["f32 2 3 2 4"] * 2, "f32 2 3 3 5", *["f32 2 3 3"] * 2), ShapeError),
    (
        "keys of another width",
        GatedDeltaOp(),
        ("f32 2 3 1 4", "f32 2 3 1 5", "f32 2 3 2 5", *["f32 2 3 2"] * 2),
        ShapeError,
    ),
    (
        "a state in bf16",
        GatedDeltaOp(held=True),
        (*["f32 2 3 1 4"] * 2, "f32 2 3 2 5", *["f32 2 3 2"] * 2, "bf16 2 2 4 5"),
        DTypeError,
    ),
    (
        "no state where one is held",
        GatedDeltaOp(held=True),
        (*["f32 2 3 1 4"] * 2, "f32 2 3 2 5", *["f32 2 3 2"] * 2),
        GraphError,
    ),
    (
        "rates of another width",
        SelectiveScanOp(),
        ("f32 2 3 2 4", "f32 2 3 2", "f32 2 6", *["f32 2 3 1 5"] * 2),
        ShapeError,
    ),
    (
        "groups that do not divide",
        SelectiveScanOp(),
        ("f32 2 3 2 4", "f32 2 3 2", "f32 2", *["f32 2 3 3 5"] * 2),
        ShapeError,
    ),
    ("a window of other channels", CausalConvOp(), ("f32 2 3 4", "f32 5 2"), ShapeError),
    ("too few rows for a window", CausalConvOp(), ("f32 2 3 4", "f32 4 4"), ShapeError),
    ("float ids", Gather(), ("f32 4 2", "f32 3"), DTypeError),
    ("a float row index", TakeRow(), ("f32 2 4 3", "f32 2"), GraphError),
    ("images of rank 3", Patches((2, 2)), ("f32 3 8 8",), ShapeError),
    ("images smaller than a patch", Patches((4, 9)), ("f32 1 3 8 8",), ShapeError),
    ("a patch without pixels", Patches((0, 2)), ("f32 1 3 8 8",), ShapeError),
    ("positions of another grid", GridPositions((2, 3), (2, 2)), ("f32 7 4", "f32 1 3 8 8"), ShapeError),
    ("positions that are ids", GridPositions((2, 3), (2, 2)), ("i32 6 4", "f32 1 3 8 8"), DTypeError),
    ("another element count", Reshape((3, 2)), ("f32 2 4",), ShapeError),
    ("another symbolic element count", Reshape((AxisOf(0), 7)), ("f32 batch 8",), ShapeError),
    ("a symbol lost", Reshape((AxisOf(0), 8)), ("f32 batch seq 8",), ShapeError),
    ("two holes", Reshape((-1, -1)), ("f32 2 4",), ShapeError),
    ("a hole that does not fit", Reshape((-1, 3)), ("f32 2 4",), ShapeError),
    ("no permutation", Transpose((0, 0)), ("f32 2 4",), ShapeError),
    ("a slice past the end", Narrow(0, 2, 3), ("f32 4",), ShapeError),
    ("parts that are too few", SplitLast((3, 1)), ("f32 2 5",), ShapeError),
    ("parts of a symbolic axis", SplitLast((3, 1)), ("f32 2 seq",), ShapeError),
    ("a start past the end", Narrow(0, 5, 1), ("f32 3",), ShapeError),
    ("a start before the beginning", Narrow(0, -4, 1), ("f32 3",), ShapeError),
    ("an axis that is not there", Softmax(3), ("f32 2 4",), ShapeError),
    ("a running sum of bools", Cumsum(), ("bool 2 4",), GraphError),
    ("a reduced axis that is not there", Reduce("sum", (2,)), ("f32 2 4",), ShapeError),
    ("a cut past the end", CutAxis(0, stop=Bound((SizeOf(0, 0),), 1)), ("f32 seq",), ShapeError),
    ("a cut of a number past the end", CutAxis(0, stop=Bound((SizeOf(1, 0),))), ("f32 3", "f32 4"), ShapeError),
    ("a cut before the front", CutAxis(0, Bound((SizeOf(0, 0),), 1, True)), ("f32 seq",), ShapeError),
    ("an empty cut", CutAxis(0, Bound((SizeOf(0, 0),))), ("f32 seq",), ShapeError),
    ("a cut without its lender", CutAxis(0, Bound((SizeOf(1, 0),))), ("f32 seq",), ShapeError),
    ("a cut along no axis", CutAxis(1), ("f32 seq",), ShapeError),
    ("a size that is none", Expand((3, 4)), ("f32 2 4",), ShapeError),
    ("fewer axes", Expand((4,)), ("f32 1 4",), ShapeError),
    ("two symbols", Expand((SizeOf(1, 0),)), ("f32 seq", "f32 batch"), ShapeError),
    ("no such lender", Expand((SizeOf(1, 0),)), ("f32 seq",), ShapeError),
    ("a lender without the axis", Expand((SizeOf(0, 1),)), ("f32 seq",), ShapeError),
    ("an axis of distances that is not there", RelativeBuckets(2), ("f32 2 4",), ShapeError),
    ("buckets without quarters", RelativeBuckets(0, 6), ("f32 2 4",), GraphError),
    ("as many distances as have buckets of their own", RelativeBuckets(0, 32, 8), ("f32 2 4",), GraphError),
    ("an axis to count that is not there", Iota(2), ("f32 2 4",), ShapeError),
    ("sides that differ", Concat(0), ("f32 2 3", "f32 2 4"), ShapeError),
    ("roles of other axes", Shard(("batch",)), ("f32 2 8",), ShapeError),
    ("heads that do not divide the width", RepeatHeads(3, 2), ("f32 2 8",), ShapeError),
    ("too many indices", Slice((0, 0)), ("f32 4",), ShapeError),
    ("an index out of range", Slice((7,)), ("f32 4",), ShapeError),
]


@pytest.mark.parametrize(("op", "operands", "error"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_operands_are_named(op: Mir, operands: tuple[str, ...], error: type[rlx.RlxError]) -> None:
    """The error is of the tree, its type says what is wrong, and its message has something to read."""
    with pytest.raises(error) as caught:
        TypeCache().infer(op, tuple(operand(text) for text in operands))
    assert len(str(caught.value)) > 15


def test_an_arity_error_says_op_expected_got() -> None:
    """In the message."""
    with pytest.raises(GraphError) as caught:
        TypeCache().infer(AttentionOp(2, 2, extra=("keep",)), (operand("f32 1 2 8"),) * 3)
    assert "attention: expected 4 operands, got 3" in str(caught.value)


# -- the meaning -------------------------------------------------------------------------------


@functools.cache
def evaluated(cls: Any) -> list[Any]:
    """What the ops of one class give for their samples; compiled together, which takes a tenth of the time."""
    samples = BY_CLASS[cls]
    return list(jax.jit(lambda many: [s.op.eval(*a) for s, a in zip(samples, many, strict=True)])(
        [s.arrays() for s in samples]
    ))  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_eval_is_the_formula(sample: Sample) -> None:
    """Against NumPy in float64; bf16 within its rounding, integers and bools exactly."""
    arrays = sample.arrays()
    cls: Any = type(sample.op)
    out = jax.tree.leaves(evaluated(cls)[BY_CLASS[cls].index(sample)])
    wide = [a.astype(np.float64) if a.dtype in (F32, BF16) else a for a in arrays]
    want = sample.means(*wide)
    for got, expected in zip(out, want if isinstance(want, tuple) else (want,), strict=True):
        exact = got.dtype not in (F32, BF16, np.complex64)
        bound = 0.0 if exact else 0.03 if BF16 in [a.dtype for a in arrays] else sample.tolerance
        wide_as = np.complex128 if got.dtype == np.complex64 else np.float64
        expected = np.asarray(expected).astype(wide_as)
        assert got.shape == expected.shape
        worst = np.abs(np.asarray(got).astype(wide_as) - expected).max(initial=0.0)
        assert worst <= bound * max(1.0, np.abs(expected).max(initial=0.0)), worst


# -- gradients -----------------------------------------------------------------------------------

NO_SLOPE = {
    "FakeQuantize": "its gradient is a rule of its own: see test_images.py",
    "CustomVjp": "its gradient is what the caller says: see test_control.py",
    "While": "how often it runs is known when it runs",
    "JaxFn": "it is what the caller says",
    "Sample": "a draw",
}
"""Ops that finite differences do not speak of, and why."""
NO_SLOPE_KINDS = {
    ("Unary", "stop_gradient"): "that is what it is for",
    **dict.fromkeys([("Binary", kind) for kind in ("floor_div", "trunc_div", "mod", "rem")], "steps"),
    ("Scatter", "mul"): "JAX has none where indices may repeat, and says so",
    ("ScatterNd", "mul"): "as Scatter",
}
"""Kinds of the others."""


def steep(sample: Sample) -> bool:
    """Whether the sample has a slope: it takes f32, nothing narrower, and gives f32 or c64."""
    if (type(sample.op).__name__, getattr(sample.op, "kind", "")) in NO_SLOPE_KINDS:
        return False
    out = sample.op.infer(TypeCache(), *sample.types)
    taken = {t.dtype for t in sample.types}
    return F32 in taken and BF16 not in taken and any(t.dtype in (F32, np.complex64) for t in out)


@functools.cache
def slopes(cls: Any) -> list[tuple[Sample, Any, Any]]:
    """Of each such sample of a class: the derivative along a direction, and what the transpose says of it."""
    rng = np.random.default_rng(7)
    samples = [s for s in BY_CLASS[cls] if steep(s)]
    points = [s.arrays() for s in samples]
    ways = [[rng.standard_normal(a.shape).astype(np.float32) if a.dtype == F32 else None for a in p] for p in points]

    def both(op: Mir, point: list[Any], way: list[Any]) -> tuple[Any, Any]:
        moved = [i for i, w in enumerate(way) if w is not None]

        def f(*floats: Any) -> list[Any]:
            full = list(point)
            for i, x in zip(moved, floats, strict=True):
                full[i] = x
            return [y for y in jax.tree.leaves(op.eval(*full)) if y.dtype in (F32, np.complex64)]

        primals, tangents = [point[i] for i in moved], [way[i] for i in moved]
        _, forward = jax.jvp(f, primals, tangents)
        _, back = jax.vjp(f, *primals)
        weights = [jnp.cos(jnp.arange(y.size, dtype=F32)).reshape(y.shape).astype(y.dtype) for y in forward]
        there = sum(jnp.sum(w * y).real for w, y in zip(weights, forward, strict=True))
        again = sum(jnp.sum(g * t) for g, t in zip(back(weights), tangents, strict=True))
        return forward, (there, again)

    found = jax.jit(lambda p, w: [both(s.op, *at) for s, *at in zip(samples, p, w, strict=True)])(points, ways)
    return [(s, w, f) for s, w, f in zip(samples, ways, found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [c for c in BY_CLASS if c.__name__ not in NO_SLOPE], ids=lambda c: c.__name__)
def test_gradients_are_those_of_the_formula(cls: Any) -> None:
    """Forward mode against central differences of the float64 formula; reverse mode is its transpose."""
    for sample, way, (forward, (there, again)) in slopes(cls):
        wide = [a.astype(np.float64) if a.dtype in (F32, BF16) else a for a in sample.arrays()]

        def moved(sign: float, wide: Any = wide, way: Any = way, sample: Sample = sample) -> list[np.ndarray]:
            at = [a if w is None else a + sign * w for a, w in zip(wide, way, strict=True)]
            want = sample.means(*at)
            return [np.asarray(y) for y in (want if isinstance(want, tuple) else (want,))]

        want = [(a - b) / 2e-5 for a, b in zip(moved(1e-5), moved(-1e-5), strict=True) if a.dtype.kind in "fc"]
        assert len(want) == len(forward), sample
        for got, expected in zip(forward, want, strict=True):
            worst = np.abs(np.asarray(got) - expected).max(initial=0.0)
            assert worst <= 1e-3 * max(1.0, np.abs(expected).max(initial=0.0)), (str(sample), worst)
        assert abs(there - again) <= 1e-3 * max(1.0, abs(there)), (str(sample), there, again)


def test_round_is_half_to_even() -> None:
    """As IEEE 754 and NumPy have it."""
    got = Unary("round").eval(jnp.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4]))
    np.testing.assert_array_equal(got, [0.0, 2.0, 2.0, -0.0, -2.0, 2.0])


def test_norms_take_their_statistics_in_f32() -> None:
    """A bf16 sum of squares of 1,024 numbers would stop growing at 256, and a one-pass variance would cancel."""
    x = jnp.full((1, 1024), 3, jnp.bfloat16)
    ones, zeros = jnp.ones(1024, jnp.bfloat16), jnp.zeros(1024, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(RmsNormOp(1e-6).eval(x, ones), np.float32), 1.0, rtol=1e-2)
    far = jnp.asarray(1000 + np.tile([1.0, -1.0], 512)[None], jnp.float32)
    got = LayerNormOp(1e-6).eval(far, ones.astype(jnp.float32), zeros.astype(jnp.float32))
    np.testing.assert_allclose(got, np.tile([1.0, -1.0], 512)[None], atol=1e-3)


def test_rms_norm_rounds_before_gamma() -> None:
    """As in Hugging Face's Llama: the normalised value has x's dtype before γ multiplies it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    gamma = (1 + rng.standard_normal(64) / 8).astype(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    normed = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-5))).astype(ml_dtypes.bfloat16)
    want = normed.astype(np.float32) * gamma.astype(np.float32)
    got = np.asarray(RmsNormOp(1e-5).eval(jnp.asarray(x), jnp.asarray(gamma)))
    np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))


def test_rms_norm_with_an_offset_rounds_once() -> None:
    """As in Hugging Face's Gemma: x and 1 + w meet in f32. 1 + w itself is no bf16 number."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    w = (rng.standard_normal(64) / 64).astype(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-5))
    want = (normed * (1 + w.astype(np.float32))).astype(ml_dtypes.bfloat16)
    got = np.asarray(RmsNormOp(1e-5, 1.0).eval(jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_array_equal(got, want)
    folded = (1 + w.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert (np.asarray(RmsNormOp(1e-5).eval(jnp.asarray(x), jnp.asarray(folded))) != want).mean() > 0.1


def test_gather_reads_the_nearest_row_out_of_range() -> None:
    """Documented; ids are checked on the host before they come here."""
    table = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(Gather().eval(table, jnp.array([-5, 99])), [[0.0, 1.0], [6.0, 7.0]])


# -- attention ---------------------------------------------------------------------------------


def packed(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random f32 operands, as float64 numbers."""
    return rng.standard_normal(shape).astype(np.float32).astype(np.float64)


@functools.cache
def jitted(op: Mir) -> Callable[..., Any]:
    """The op, compiled once for each choice of shapes."""
    return jax.jit(op.eval)


def run_attention(op: AttentionOp, *arrays: np.ndarray) -> np.ndarray:
    """The op on f32 operands; integers stay."""
    return np.asarray(jitted(op)(*(a.astype(np.float32) if a.dtype == np.float64 else a for a in arrays)))


def test_a_keep_mask_is_and_ed_with_causality() -> None:
    """Not in its place; and ½ keeps, less drops."""
    rng = np.random.default_rng(3)
    q, k, v = (packed(rng, 2, 4, 8) for _ in "qkv")
    keep = np.array([[1.0, 0.49, 0.5, 1.0], [1.0, 1.0, 1.0, 0.0]])
    got = run_attention(AttentionOp(2, 2, causal=True, extra=("keep",)), q, k, v, keep)
    want = attention(q, k, v, heads=2, kv_heads=2, causal=True, keep=keep)
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("extra", ["keep", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_keys_gives_zeros(extra: str, causal: bool) -> None:
    """Whether a mask or −inf drops them all; other rows are not touched, and gradients are finite."""
    rng = np.random.default_rng(4)
    q, k, v = (packed(rng, 2, 3, 8) for _ in "qkv")
    keep = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    bias = np.where(keep[:, None, None] > 0, 0.3, -np.inf) * np.ones((2, 2, 3, 3))
    op = AttentionOp(2, 2, causal=causal, extra=(extra,))
    given: Any = {"keep": keep, "bias": bias}[extra]
    got = run_attention(op, q, k, v, given)
    assert not got[0].any()
    assert np.array_equal(got[1, 0], np.zeros(8)) == causal  # its first key is dropped
    options: dict[str, Any] = {extra: given}
    want = attention(q, k, v, heads=2, kv_heads=2, causal=causal, **options)
    np.testing.assert_allclose(got, want, atol=3e-6)
    mask = jnp.asarray(given, jnp.float32)
    grads = jax.jit(jax.grad(lambda *a: op.eval(*a, mask).sum(), (0, 1, 2)))(*(x.astype(np.float32) for x in (q, k, v)))
    assert all(np.isfinite(g).all() for g in grads)


def test_queries_before_the_first_key_give_zeros() -> None:
    """More queries than keys: the first ones stand before all keys. Nothing else is said about rows without keys."""
    rng = np.random.default_rng(5)
    q, k, v = packed(rng, 1, 4, 4), packed(rng, 1, 2, 4), packed(rng, 1, 2, 4)
    got = run_attention(AttentionOp(1, 1, causal=True), q, k, v)
    np.testing.assert_allclose(got, attention(q, k, v, heads=1, kv_heads=1, causal=True), atol=3e-6)


def test_huge_scores_stay_finite() -> None:
    """The softmax subtracts the largest score."""
    q = jnp.full((1, 2, 4), 1e4)
    for op in (AttentionOp(1, 1, causal=True), AttentionOp(1, 1, extra=("keep",))):
        rest = [jnp.ones((1, 2))] if op.extra else []
        assert np.isfinite(jitted(op)(q, q, jnp.ones((1, 2, 4)), *rest)).all()


# -- the cache ---------------------------------------------------------------------------------


def test_writes_past_the_capacity_are_dropped_not_clamped() -> None:
    """A clamped write would overwrite the newest rows of the cache."""
    cache = np.zeros((4, 3, 2), np.float32)
    new = np.arange(1, 17, dtype=np.float32).reshape(4, 2, 2)
    start, lengths = np.array([1, 2, 3, 2**30], np.int32), np.array([2, 2, 2, 1], np.int32)
    got = np.asarray(jitted(CacheUpdate())(cache, new, start, lengths))
    np.testing.assert_array_equal(got, cache_update(cache, new, start, lengths))
    np.testing.assert_array_equal(got[1, 2], new[1, 0])
    assert not got[2:].any() and not got[1, :2].any()


def test_padding_is_not_written() -> None:
    """Rows at `lengths` and after keep what the cache had, a length of 0 writes nothing."""
    cache, new = np.full((3, 5, 1), 9.0, np.float32), np.ones((3, 3, 1), np.float32)
    got = jitted(CacheUpdate())(cache, new, np.zeros(3, np.int32), np.array([0, 2, 3], np.int32))
    np.testing.assert_array_equal(np.asarray(got)[..., 0] == 1.0, np.arange(5)[None] < np.array([[0], [2], [3]]))


# -- gradients ---------------------------------------------------------------------------------


# -- costs -------------------------------------------------------------------------------------


def test_contractions_count_their_flops() -> None:
    """Multiply-adds times two; other ops count nothing."""

    def flops(op: Mir, *operands: str) -> int:
        types = tuple(operand(text) for text in operands)
        return op.flops(types, TypeCache().infer(op, types))

    assert flops(MatMul(), "f32 3 5 8", "f32 8 6") == 2 * 3 * 5 * 8 * 6
    assert flops(MatMul(1), "f32 5 8", "f32 6 8") == 2 * 5 * 8 * 6
    assert flops(FusedMatMulBiasAct(1, "silu"), "f32 5 8", "f32 6 8", "f32 6") == 2 * 5 * 8 * 6
    assert flops(BatchMatMul(), "f32 3 5 8", "f32 3 8 6") == 2 * 3 * 5 * 8 * 6
    assert flops(AttentionOp(4, 2), "f32 3 5 16", "f32 3 7 8", "f32 3 7 8") == 4 * 3 * 5 * 7 * 16
    assert flops(Binary("add"), "f32 3", "f32 3") == 0


# -- user functions ----------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_large_captured_constants_are_refused(nested: bool) -> None:
    """Over 1 MiB in a jaxpr, those of nested jits included."""
    table = jnp.ones(2**18 + 1, jnp.float32)

    def fn(x: Any) -> Any:
        return x + table.sum()

    with pytest.raises(GraphError, match=r"captures \d+ bytes.*emit\.param"):
        TypeCache().infer(JaxFn(jax.jit(fn) if nested else fn), (operand("f32 3"),))


def test_small_captured_constants_are_fine() -> None:
    """Up to 1 MiB."""
    table = jnp.ones(2**10, jnp.float32)
    assert TypeCache().infer(JaxFn(lambda x: x + table.sum()), (operand("f32 3"),)) == (operand("f32 3"),)
