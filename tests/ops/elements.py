"""Functions of elements, products, norms, fused ops, reductions: what each means, and samples."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlx_jax.ir.graph import Op
from rlx_jax.ir.operands import named_operands
from rlx_jax.ir.ops.experts import ClampedGate
from rlx_jax.ir.ops.fused import Step
from rlx_jax.ir.ops.pointwise import BITWISE_BINARY, NUMERIC_UNARY
from rlx_jax.ir.types import is_float
from tests.ops.sample import BF16, F32, I32, MEANING, Array, Meaning, Sample, o
from tests.oracles import op_formulas as formula

rms_norm: Meaning = formula.rms_norm
layer_norm: Meaning = formula.layer_norm


def product(x: Array, w: Array, contract: int) -> Array:
    """x · w over axis `contract` of w."""
    return np.tensordot(x, w, axes=(x.ndim - 1, contract))


def activation(kind: str) -> Callable[[Array], Array]:
    """The function of that name; "" is the identity."""
    return formula.UNARY_REFERENCE[kind] if kind else lambda x: x


def cast(op: Any, x: Array) -> Array:
    """By value: truncated towards zero to an integer, not zero is True."""
    if op.dtype == np.bool_:
        return x != 0
    if is_float(op.dtype):
        return x.astype(np.float64)
    least, most = (np.iinfo(op.dtype).min, np.iinfo(op.dtype).max) if op.saturate else (-np.inf, np.inf)
    return np.clip(np.trunc(x), least, most).astype(op.dtype)


def running(op: Any, x: Array) -> Array:
    """The running product, maximum or minimum."""
    fn, nothing = {"prod": (np.prod, 1), "max": (np.max, -np.inf), "min": (np.min, np.inf)}[op.kind]
    return np.asarray(formula.running(fn, x, op.axis, op.exclusive, op.reverse, nothing))


def search(op: Any, x: Array) -> Array:
    """The first or the last of the largest or smallest."""
    find = np.argmax if op.kind == "argmax" else np.argmin
    at = find(np.flip(x, op.axis) if op.last else x, axis=op.axis, keepdims=op.keepdims)
    return x.shape[op.axis] - 1 - at if op.last else at


def ordered(op: Any, x: Array) -> Array:
    """Sorted, or where each stood."""
    at = np.argsort(-1.0 * x if op.descending else x, axis=op.axis, kind="stable")
    return at if op.indices else np.take_along_axis(x, at, op.axis)


def largest(op: Any, x: Array) -> tuple[Array, Array]:
    """The first k of the order."""
    at = ordered(o.Sort(op.axis, op.largest, True), x).take(range(op.k), op.axis)
    return np.take_along_axis(x, at, op.axis), at


def swiglu(op: Any, x: Array) -> Array:
    """act(gate) · up, gate the first half or the second."""
    gate, up = np.split(x, 2, axis=-1)[:: 1 if op.gate_first else -1]
    return activation(op.activation)(gate) * up


def normed(op: Any, x: Array, *weights: Array) -> Array:
    """With γ and β, or one of them, or none."""
    rest = iter(weights)
    gamma, beta = (next(rest) if there else absent for there, absent in ((op.scaled, 1.0), (op.shifted, 0.0)))
    return layer_norm(x, gamma, beta, eps=op.eps)


def residual(op: Any, x: Array, r: Array, *rest: Array) -> Array:
    """The norm of x + r [+ bias]."""
    bias, weights = (rest[0], rest[1:]) if op.has_bias else (0.0, rest)
    if isinstance(op, o.FusedResidualLayerNorm):
        return layer_norm(x + r + bias, *weights, eps=op.eps)
    return rms_norm(x + r + bias, *weights, eps=op.eps, offset=op.offset)


def region(op: Any, *operands: Array) -> Array:
    """Step after step."""
    values = list(operands)
    for step in op.steps:
        values.append(MEANING[type(step.op)](step.op, *(values[i] for i in step.operands)))
    return values[-1]


def twice_plus_one(x: Any) -> Any:
    """A user's closure."""
    return x * 2 + 1


def sine_and_first(x: Any) -> Any:
    """A user's closure with two results."""
    return jnp.sin(x), x[..., :1]


TWINS: dict[Callable[..., Any], Meaning] = {
    twice_plus_one: lambda x: x * 2 + 1,
    sine_and_first: lambda x: (np.sin(x), x[..., :1]),
}
"""JAX functions that `JaxFn` nodes hold, and the same in NumPy."""


MEANINGS: dict[type[Op], Meaning] = {
    o.Unary: lambda op, x: formula.UNARY_REFERENCE[op.kind](x),
    o.Binary: lambda op, a, b: formula.BINARY_REFERENCE[op.kind](a, b),
    o.Compare: lambda op, a, b: formula.COMPARE_REFERENCE[op.kind](a, b),
    o.Where: lambda op, c, a, b: np.where(c != 0, a, b),
    o.CastTo: cast,
    o.FullLike: lambda op, x: np.full(x.shape, op.value),
    o.JaxFn: lambda op, *arrays: TWINS[op.fn](*arrays),
    o.MatMul: lambda op, x, w: product(x, w, op.contract),
    o.BatchMatMul: lambda op, a, b: np.matmul(a, b),
    o.FusedMatMulBiasAct: lambda op, x, w, b: activation(op.activation)(product(x, w, op.contract) + b),
    o.FusedSwiGLU: swiglu,
    o.FusedResidualLayerNorm: residual,
    o.FusedResidualRmsNorm: residual,
    o.FusedRmsNormReshape: lambda op, x, *weights: rms_norm(x, *weights, eps=op.eps, offset=op.offset).reshape(
        -1, x.shape[-1]),
    o.ElementwiseRegion: region,
    o.FusedAttentionBlock: lambda op, *arrays: formula.attention_block(op, **named_operands(op, arrays)),
    o.FusedTransformerLayer: lambda op, *arrays: formula.transformer_layer(op, **named_operands(op, arrays)),
    o.RmsNormOp: lambda op, *arrays: rms_norm(*arrays, eps=op.eps, offset=op.offset),
    o.LayerNormOp: normed,
    o.Reduce: lambda op, x: formula.REDUCE_REFERENCE[op.kind](x, axis=op.axes, keepdims=op.keepdims,
        **({"ddof": op.ddof} if op.ddof else {})),
    o.Softmax: lambda op, x: formula.softmax(x, op.axis),
    o.Cumsum: lambda op, x: formula.cumsum(x, op.axis, op.exclusive, op.reverse),
    o.Einsum: lambda op, *arrays: np.einsum(op.subscripts, *arrays),
    o.LogSoftmax: lambda op, x: np.log(formula.softmax(x, op.axis)),
    o.Cumulative: running,
    o.ArgReduce: search,
    o.Sort: ordered,
    o.TopK: largest,
    o.ExpertFfn: formula.experts,
    o.GroupedMatMul: lambda op, x, w, ids: np.stack([product(a, w[i], op.contract) for a, i in zip(x, ids,
        strict=True)]),
}  # fmt: skip


def pointwise() -> Iterator[Sample]:
    """Every function of one value and of two, every comparison, casts and choices."""
    # Where a function is defined, and away from an infinite slope, which central differences do not show.
    drawn = dict.fromkeys(("asin", "acos", "atanh"), lambda x: 0.9 * np.tanh(x))
    drawn |= {"acosh": lambda x: 1.1 + np.abs(x), "cbrt": lambda x: np.copysign(0.1 + np.abs(x), x)}
    for kind in formula.UNARY_REFERENCE:
        positive, draw = kind in ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal"), drawn.get(kind, lambda x: x)
        for x in ("f32 batch seq 8", "bf16 3 4")[: 1 + (kind in ("gelu", "log", "round", "erf", "selu"))]:
            yield Sample(o.Unary(kind), x, positive=positive, draw=draw)
    for kind in NUMERIC_UNARY:
        yield Sample(o.Unary(kind), "i32 batch 4")
    for kind in formula.BINARY_REFERENCE:
        op = o.Binary(kind)
        if kind in BITWISE_BINARY:
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
    yield Sample(o.JaxFn(twice_plus_one), "f32 batch seq 8")
    yield Sample(o.JaxFn(sine_and_first), "f32 batch 8")
    yield Sample(o.JaxFn(lambda x: jnp.asarray(2.5)), "f32 batch 8", lambda x: np.asarray(2.5))


def products() -> Iterator[Sample]:
    """Products, norms, fused ops, halves of an encoder layer, experts."""
    for contract, w in ((0, "8 6"), (1, "6 8")):
        yield Sample(o.MatMul(contract), f"f32 batch seq 8; f32 {w}")
        yield Sample(o.MatMul(contract), "f32 batch 4; f32 4 4")
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
    for op, text in (
        (o.FusedRmsNormReshape(1e-5), x[:15] + g),
        (o.FusedRmsNormReshape(0.5, 1.0), "f32 3 batch seq 8" + 2 * g),
    ):
        yield Sample(op, text)
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
    for rows in ("batch", "4", "3", "1"):
        yield Sample(o.GroupedMatMul(), f"f32 {rows} 8; f32 3 8 5; i32 {rows}")
        yield Sample(o.GroupedMatMul(1), f"bf16 {rows} 8; bf16 3 5 8; i32 {rows}")
    out_in, in_out = "TYPE 3 5 8; TYPE 3 5 8; TYPE 3 8 5", "TYPE 3 8 5; TYPE 3 8 5; TYPE 3 5 8"
    clamped = o.ExpertFfn(biased=True, clamp=ClampedGate(0.7, 1.7, 1.0))
    for op, x, experts, choices in (
        (o.ExpertFfn(), "f32 batch seq 8", out_in, "batch seq 2"),
        (o.ExpertFfn("gelu_tanh", 0), "f32 batch 8", in_out, "batch 3"), (o.ExpertFfn(), "f32 8", out_in, "1"),
        (clamped, "f32 batch 8", out_in, "batch 2"), (o.ExpertFfn(), "bf16 seq 8", out_in, "seq 2"),
    ):  # fmt: skip
        operands = f"{x}; {experts.replace('TYPE', x.split()[0])}; f32 {choices}; i32 {choices}"
        yield Sample(op, operands + "; f32 3 5; f32 3 5; f32 3 8" * op.biased, tolerance=1e-5)


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


SAMPLES = (pointwise, products, reducing)
