"""The value of a graph in NumPy float64: one formula an op, and a loop over the nodes.

Floating values are float64 whatever their dtype, so a graph before and after a pass agrees to the last digits;
integers and bools are themselves. Nothing here calls `eval`, `expand` or the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir import ops as o
from rlx_jax.ir.graph import BodyInput, Constant, Graph, Input, Leaf, Node, Op, Param, StateRead
from rlx_jax.ir.operands import named_operands
from rlx_jax.ir.ops.shape import AxisOf, SizeOf
from rlx_jax.ir.param import Cast, Cut, Dequantized, Key, Program, Sliced, Stack, Transposed, Zeros
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.stored import slices
from rlx_jax.ir.types import TensorType, is_float
from tests.oracles import image_formulas as image
from tests.oracles import op_formulas as formula
from tests.oracles.gated_delta import causal_conv, gated_delta, l2_norm
from tests.oracles.mamba2 import ssd, time_step
from tests.oracles.mtp_head import mtp_head

Array = np.ndarray[Any, Any]
Meaning = Callable[..., Any]
attention: Meaning = formula.attention
rms_norm: Meaning = formula.rms_norm
layer_norm: Meaning = formula.layer_norm


@dataclass
class Feeds:
    """Arrays for the leaves of a graph: inputs by name, weights by key, state by (block path, slot)."""

    inputs: dict[str, Array] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)
    state: dict[str, Array] = field(default_factory=dict)


def wide(array: Array) -> Array:
    """Floats as float64."""
    return array.astype(np.float64) if is_float(array.dtype) else array


def product(x: Array, w: Array, contract: int) -> Array:
    """x · w over axis `contract` of w."""
    return np.tensordot(x, w, axes=(x.ndim - 1, contract))


def activation(kind: str) -> Callable[[Array], Array]:
    """The function of that name; "" is the identity."""
    return formula.UNARY_REFERENCE[kind] if kind else lambda x: x


def reshape(op: o.Reshape, x: Array) -> Array:
    """`AxisOf` entries are sizes of x."""
    return x.reshape([x.shape[t.axis] if isinstance(t, AxisOf) else t for t in op.target])


def cast(op: o.CastTo, x: Array) -> Array:
    """By value: truncated towards zero to an integer, not zero is True."""
    if op.dtype == np.bool_:
        return x != 0
    if is_float(op.dtype):
        return x.astype(np.float64)
    least, most = (np.iinfo(op.dtype).min, np.iinfo(op.dtype).max) if op.saturate else (-np.inf, np.inf)
    return np.clip(np.trunc(x), least, most).astype(op.dtype)


def sliced(op: o.Slice, x: Array) -> Array:
    """`x[key]`"""
    return x[tuple(slice(*k) if isinstance(k, tuple) else k for k in op.key)]


def narrow(op: o.Narrow, x: Array) -> Array:
    """`length` entries from `start`."""
    start = op.start % x.shape[op.axis]
    return np.take(x, range(start, start + op.length), axis=op.axis)


def end_token(op: Any, x: Any, ids: Any) -> Any:
    """The first place of the end in each row, or of its largest id."""
    ends = [ids[b] == (ids[b].max() if op.end_id is None else op.end_id) for b in range(len(ids))]
    return np.stack([x[b, int(np.argmax(end))] for b, end in enumerate(ends)])


def take_row(op: o.TakeRow, x: Array, index: Array) -> Array:
    """One row of each batch entry."""
    return np.stack([x[b % len(x), index[b]] for b in range(len(index))])[:, None]


def cut(op: o.CutAxis, *arrays: Array) -> Array:
    """From one bound of an axis to the other."""
    size = arrays[0].shape[op.axis]
    ends = []
    for bound in (op.start, op.stop):
        distance = bound.offset + sum(sizes(s, arrays) for s in bound.sizes)
        ends.append(size - distance if bound.from_end else distance)
    return np.take(arrays[0], range(*ends), axis=op.axis)


def sizes(target: int | SizeOf, arrays: Sequence[Array]) -> int:
    """One size of an `Expand`."""
    return int(arrays[target.operand].shape[target.axis]) if isinstance(target, SizeOf) else target


def repeat_heads(op: o.RepeatHeads, x: Array) -> Array:
    """Each head `times` times in a row."""
    heads = np.split(x, op.heads, axis=-1)
    return np.concatenate([head for head in heads for _ in range(op.times)], axis=-1)


def attend(op: o.AttentionOp | hir.Attention, q: Array, k: Array, v: Array, *rest: Array) -> Array:
    """One score at a time."""
    names = (*op.extra, *["sinks"] * (isinstance(op, hir.Attention) and op.sinks))
    return attention(
        q, k, v, heads=op.heads, kv_heads=op.kv_heads, causal=op.causal, window=op.window, scale=op.scale,
        softcap=op.softcap, ahead=op.ahead, **dict(zip(names, rest, strict=True)),
    )  # fmt: skip


def running(op: o.Cumulative, x: Array) -> Array:
    """The running product, maximum or minimum."""
    fn, nothing = {"prod": (np.prod, 1), "max": (np.max, -np.inf), "min": (np.min, np.inf)}[op.kind]
    return np.asarray(formula.running(fn, x, op.axis, op.exclusive, op.reverse, nothing))


def search(op: o.ArgReduce, x: Array) -> Array:
    """The first or the last of the largest or smallest."""
    find = np.argmax if op.kind == "argmax" else np.argmin
    at = find(np.flip(x, op.axis) if op.last else x, axis=op.axis, keepdims=op.keepdims)
    return x.shape[op.axis] - 1 - at if op.last else at


def body(graph: Graph, operands: Sequence[Array]) -> tuple[Array, ...]:
    """What the body of a loop or choice gives."""
    return Run(Feeds()).graph(graph, None, [wide(np.asarray(o)) for o in operands])


def pair_bias(op: o.PairBias, rows: Array, slots: Array, *given: Array) -> Array:
    """Row by row of the batch, of the positions of its queries and keys."""
    made = []
    for b in range(max(len(rows), len(slots))):
        (bias,) = body(op.body, (rows[b % len(rows)][:, None], slots[b % len(slots)][None], *given))
        made.append(bias.reshape((1,) * (3 - bias.ndim) + bias.shape))
    return np.stack(made)


def repeated(op: o.While, *operands: Array) -> tuple[Array, ...]:
    """As often as the condition says."""
    carried, rest = operands[: op.carries], operands[op.carries :]
    while body(op.cond, (*carried, *rest))[0]:
        carried = body(op.body, (*carried, *rest))
    return carried


def scanned(op: o.Scan, *operands: Array) -> tuple[Array, ...]:
    """Entry after entry, from the end where it is reversed."""
    carried, cut = operands[: op.carries], operands[op.carries : op.carries + op.slices]
    rest, stacks = operands[op.carries + op.slices :], []
    length = len(cut[0]) if cut else op.length or 0
    for i in range(length)[:: -1 if op.reverse else 1]:
        out = body(op.body, (*carried, *(x[i] for x in cut), *rest))
        carried = out[: op.carries]
        stacks.append(out[op.carries :])
    stacked = [np.stack(column) for column in zip(*stacks[:: -1 if op.reverse else 1], strict=True)]
    return (*carried, *stacked)


def standardized(op: o.Standardize, x: Array) -> Array:
    """A norm without weights."""
    centred = x - x.mean(op.axes, keepdims=True) if op.centre else x
    return np.asarray(centred / np.sqrt((centred**2).mean(op.axes, keepdims=True) + op.eps))


def likeliest(op: o.Sample, logits: Array, seed: Array) -> Array:
    """What is drawn where nothing is left to chance."""
    assert op.temperature == 0 or op.top_k == 1, "a draw has no formula"
    return logits.argmax(-1)


def ordered(op: o.Sort, x: Array) -> Array:
    """Sorted, or where each stood."""
    at = np.argsort(-1.0 * x if op.descending else x, axis=op.axis, kind="stable")
    return at if op.indices else np.take_along_axis(x, at, op.axis)


def largest(op: o.TopK, x: Array) -> tuple[Array, Array]:
    """The first k of the order."""
    at = ordered(o.Sort(op.axis, op.largest, True), x).take(range(op.k), op.axis)
    return np.take_along_axis(x, at, op.axis), at


def swiglu(op: o.FusedSwiGLU, x: Array) -> Array:
    """act(gate) · up, gate the first half or the second."""
    gate, up = np.split(x, 2, axis=-1)[:: 1 if op.gate_first else -1]
    return activation(op.activation)(gate) * up


def normed(op: o.LayerNormOp | hir.LayerNorm, x: Array, *weights: Array) -> Array:
    """With γ and β, or one of them, or none."""
    rest = iter(weights)
    gamma, beta = (next(rest) if there else absent for there, absent in ((op.scaled, 1.0), (op.shifted, 0.0)))
    return layer_norm(x, gamma, beta, eps=op.eps)


def residual(op: o.FusedResidualLayerNorm | o.FusedResidualRmsNorm, x: Array, r: Array, *rest: Array) -> Array:
    """The norm of x + r [+ bias]."""
    bias, weights = (rest[0], rest[1:]) if op.has_bias else (0.0, rest)
    if isinstance(op, o.FusedResidualLayerNorm):
        return layer_norm(x + r + bias, *weights, eps=op.eps)
    return rms_norm(x + r + bias, *weights, eps=op.eps, offset=op.offset)


def region(op: o.ElementwiseRegion, *operands: Array) -> Array:
    """Step after step."""
    values = list(operands)
    for step in op.steps:
        values.append(MIR[type(step.op)](step.op, *(values[i] for i in step.operands)))
    return values[-1]


def sinusoids(op: o.SinusoidTable | hir.Sinusoids, t: Array) -> Array:
    """Waves of a few times."""
    return formula.sinusoids(t, op.channels, op.scale, op.max_period)


def rope_table(op: o.RopeTable | hir.RopeAngles, positions: Array) -> tuple[Array, Array]:
    """cos and sin of position · frequency."""
    return formula.rope_table(positions, op.inv_freq, op.factor, op.axes)


def rotate(op: o.RopeOp | hir.Rope, x: Array, cos: Array, sin: Array) -> Array:
    """Pairs of columns of each head."""
    return formula.rope(x, cos, sin, op.head_dim, op.n_rot, op.style)


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


def decay(h: Any, x: Any, a: Any) -> tuple[Any, Any]:
    """A user's step."""
    return a * h + x, 2 * h - x


STEPS: dict[str, Meaning] = {"decay": decay}
"""Steps that `TokenScan` and `Recurrent` hold, by their labels, as functions of rows."""


def token_scan(op: o.TokenScan, *operands: Array) -> tuple[Array, ...]:
    """Token after token of each row; a row that has ended keeps its state."""
    count = len(op.step.given)
    state, xs = list(operands[: op.states]), operands[op.states : op.states + op.tokens]
    params, lengths = operands[op.states + op.tokens : count], operands[count:]
    rows, tokens = xs[0].shape[:2]
    ended = lengths[0] if lengths else np.full(rows, tokens)
    shapes = [t.shape for t in op.step.given[: op.states]]
    state = [s if s.ndim > len(t) else np.broadcast_to(s, (rows, *t)) for s, t in zip(state, shapes, strict=True)]
    ys, every = [], []
    for t in range(tokens):
        made = STEPS[op.step.label](*state, *(x[:, t] for x in xs), *params)
        live = t < ended
        after = [np.where(live.reshape(-1, *[1] * (s.ndim - 1)), a, s) for a, s in zip(made, state, strict=False)]
        state = after
        ys.append(made[op.states :])
        every.append(after)
    columns = [[np.stack(column, 1) for column in zip(*stack, strict=True)] for stack in (ys, every)]
    return (*columns[0], *state, *(columns[1] if op.every else ()))


def delta(op: o.GatedDeltaOp, *operands: Array) -> tuple[Array, ...]:
    """The transcript; the states after each token are those after so many tokens."""
    tokens, state = operands[2].shape[1], operands[5] if op.held else None

    def run(n: int) -> tuple[Array, Array]:
        q, k, v, g, beta = (x[:, :n] for x in operands[:5])
        return gated_delta(q, k, v, g, beta, state, op.scale)

    return _with_every(op.every, tokens, run)


def selective_scan(op: o.SelectiveScanOp, *operands: Array) -> tuple[Array, ...]:
    """The transcript where A is a number for each head; else each pair of a row and a column of the state alone."""
    x, dt, a, b, c, *start = operands

    def run(n: int) -> tuple[Array, Array]:
        rows, state = [t[:, :n] for t in (x, dt, b, c)], start[0] if start else None
        if a.ndim == 1:
            return ssd(rows[0], rows[1], a, rows[2], rows[3], None, state)
        parts = [
            ssd(rows[0], rows[1], a[:, j], rows[2][..., j : j + 1], rows[3][..., j : j + 1], None,
                None if state is None else state[..., j : j + 1])
            for j in range(a.shape[1])
        ]  # fmt: skip
        return np.sum([y for y, _ in parts], axis=0), np.concatenate([h for _, h in parts], axis=-1)

    return _with_every(op.every, x.shape[1], run)


def _with_every(every: bool, tokens: int, run: Callable[[int], tuple[Array, Array]]) -> tuple[Array, ...]:
    """Results and the state after all tokens; with `every` the states after 1, 2 … tokens."""
    return (*run(tokens), *([np.stack([run(n)[1] for n in range(1, tokens + 1)], axis=1)] if every else []))


MIR: dict[type[Op], Meaning] = {
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
    o.ElementwiseRegion: region,
    o.FusedAttentionBlock: lambda op, *arrays: formula.attention_block(op, **named_operands(op, arrays)),
    o.FusedTransformerLayer: lambda op, *arrays: formula.transformer_layer(op, **named_operands(op, arrays)),
    o.RmsNormOp: lambda op, *arrays: rms_norm(*arrays, eps=op.eps, offset=op.offset),
    o.LayerNormOp: normed,
    o.Reshape: reshape,
    o.Transpose: lambda op, x: np.transpose(x, op.perm),
    o.Narrow: narrow,
    o.SplitLast: lambda op, x: split(op, x),
    o.Shard: lambda op, x: x,
    o.Slice: sliced,
    o.CutAxis: cut,
    o.Concat: lambda op, *arrays: np.concatenate(arrays, axis=op.axis),
    o.Gather: lambda op, table, ids: table[np.clip(ids, 0, len(table) - 1)],
    o.TakeRow: take_row,
    o.Expand: lambda op, *arrays: np.broadcast_to(arrays[0], [sizes(t, arrays) for t in op.target]),
    o.Iota: lambda op, x: np.arange(x.shape[op.axis]),
    o.RelativeBuckets: lambda op, x: formula.relative_buckets(x.shape[op.axis], op.buckets, op.max_distance),
    o.Reduce: lambda op, x: formula.REDUCE_REFERENCE[op.kind](x, axis=op.axes, keepdims=op.keepdims,
        **({"ddof": op.ddof} if op.ddof else {})),
    o.Softmax: lambda op, x: formula.softmax(x, op.axis),
    o.Cumsum: lambda op, x: formula.cumsum(x, op.axis, op.exclusive, op.reverse),
    o.Parametric: lambda op, x: formula.PARAMETRIC_REFERENCE[op.kind](x, *op.parameters),
    o.Einsum: lambda op, *arrays: np.einsum(op.subscripts, *arrays),
    o.LogSoftmax: lambda op, x: np.log(formula.softmax(x, op.axis)),
    o.Cumulative: running,
    o.ArgReduce: search,
    o.Sort: ordered,
    o.TopK: largest,
    o.Pad: lambda op, x: formula.pad(x, op.widths, op.mode, op.value),
    o.Tile: lambda op, x: np.tile(x, op.reps),
    o.Take: lambda op, x, i: formula.take(x, i, op.axis, op.mode),
    o.TakeAlongAxis: lambda op, x, i: np.take_along_axis(x, i, op.axis),
    o.GatherNd: lambda op, x, i: formula.gather_nd(x, i, op.batch_dims),
    o.Scatter: lambda op, x, i, u: formula.scatter(x, i, u, op.axis, op.kind),
    o.Conv: lambda op, x, w: image.conv(x, w, op.strides, op.padding, op.dilation, op.groups),
    o.ConvTranspose: lambda op, x, w: image.conv_transpose(x, w, op.strides, op.padding, op.output_padding, op.dilation,
        op.groups),
    o.Pool: lambda op, x: image.pool(x, op.kind, op.window, op.strides, op.padding, op.dilation, op.ceil,
        op.count_include_pad, op.p),
    o.Resize: lambda op, x: image.resize(x, op),
    o.GridSample: lambda op, x, g: image.grid_sample(x, g, op.method, op.padding, op.align_corners),
    o.Standardize: standardized,
    o.Switch: lambda op, index, *given: body(op.branches[min(max(int(index), 0), len(op.branches) - 1)], given),
    o.While: repeated,
    o.Scan: scanned,
    o.CustomVjp: lambda op, *operands: body(op.forward, operands),
    o.PairBias: pair_bias,
    o.TokenScan: token_scan,
    o.TokenWindows: lambda op, x: np.stack([x[:, t : t + op.width] for t in range(x.shape[1] - op.width + 1)], 1),
    o.TailRows: lambda op, x, n: np.stack([row[at : at + op.count] for row, at in zip(x, n, strict=True)]),
    o.GatedDeltaOp: delta,
    o.SelectiveScanOp: selective_scan,
    o.CausalConvOp: lambda op, z, w, *bias: causal_conv(z[:, w.shape[1] - 1 :], w, bias[0] if bias else None,
        tail=z[:, : w.shape[1] - 1])[0],
    o.Patches: lambda op, x: formula.patches(x, *op.patch),
    o.GridPositions: lambda op, table, x: formula.grid_positions(table, x, grid=op.grid, patch=op.patch,
        antialias=op.antialias),
    o.FakeQuantize: lambda op, x, s=None: image.fake_quantize(x, s, op.bits, op.axis),
    o.Fft: lambda op, x: formula.spectrum(op.kind, x, op.n, op.axis, op.norm),
    o.Solve: lambda op, a, b: np.linalg.solve(a, b),
    o.Det: lambda op, a: np.linalg.det(a),
    o.Sample: likeliest,
    o.ScatterNd: lambda op, x, i, u: formula.scatter_nd(x, i, u, op.kind),
    o.RepeatHeads: repeat_heads,
    o.AttentionOp: attend,
    o.RopeTable: rope_table,
    o.SinusoidTable: sinusoids,
    o.ExpertFfn: formula.experts,
    o.RopeOp: rotate,
    o.CacheUpdate: lambda op, *arrays: (formula.cache_fill if op.fresh else formula.cache_update)(*arrays),
    o.RingStep: lambda op, *arrays: formula.ring_step(*arrays),
    o.Overwrite: lambda op, old, new: new,
}  # fmt: skip
"""What each tensor op means."""


def linear(op: hir.Linear | hir.LinearFused, x: Array, w: Array, b: Array | float = 0.0) -> Array:
    """act(x · w + b)"""
    return activation(op.activation)(product(x, w, op.contract) + b)


def swiglu_ffn(op: hir.SwiGLU, x: Array, up: Array, gate: Array, down: Array) -> Array:
    """(silu(x · gate) ⊙ (x · up)) · down"""
    wide, gated = product(x, up, op.contracts[0]), product(x, gate, op.contracts[1])
    return product(activation("silu")(gated) * wide, down, op.contracts[2])


def split(op: hir.Split | o.SplitLast, x: Array) -> tuple[Array, ...]:
    """Consecutive pieces of the last axis."""
    return tuple(np.split(x, np.cumsum(op.sizes)[:-1], axis=-1))


def rope_rows(op: hir.RopeRows, positions: Array) -> tuple[Array, ...]:
    """Rows of two given tables."""
    return tuple(np.frombuffer(data, np.float32).reshape(-1, op.width)[positions] for data in (op.cos, op.sin))


def cached_attention(op: hir.CachedAttention, *operands: Array) -> tuple[Array, ...]:
    """Write the new keys and values, then attend over the cache up to each query's own position."""
    q, k, v, cache_k, cache_v, start, lengths, *sinks = operands
    heads = (*k.shape[:2], op.attend.kv_heads, -1)
    new_k, new_v = k.reshape(heads), v.reshape(heads)
    extra: dict[str, Array] = {}
    if op.ring:
        keys, extra["key_positions"], cache_k = formula.ring_step(cache_k, new_k, start, lengths)
        values, _, cache_v = formula.ring_step(cache_v, new_v, start, lengths)
    else:
        write = formula.cache_fill if op.block_only else formula.cache_update
        keys = cache_k = write(cache_k, new_k, start, lengths)
        values = cache_v = write(cache_v, new_v, start, lengths)
    extra["positions"] = start[:, None] + np.arange(k.shape[1])
    if op.block_only:
        keys, values, extra = new_k, new_v, {"positions": np.tile(np.arange(k.shape[1]), (len(k), 1))}
    if op.attend.last:
        behind = np.maximum(lengths - 1, 0)[:, None]
        extra["positions"] = np.take_along_axis(extra["positions"], behind, axis=1)
    extra |= dict(zip(["sinks"], sinks, strict=False))
    flat = (*keys.shape[:2], -1)
    out = attention(
        q, keys.reshape(flat), values.reshape(flat), heads=op.attend.heads, kv_heads=op.attend.kv_heads,
        causal=op.attend.causal, window=op.attend.window, scale=op.attend.scale, softcap=op.attend.softcap, **extra,
    )  # fmt: skip
    return out, cache_k, cache_v


def growing_attention(op: hir.GrowingAttention, *operands: Array) -> tuple[Array, ...]:
    """Join cached and new keys and values; a window counts the keys that the mask keeps."""
    q, k, v, past_k, past_v, *rest = operands
    keep, sinks = rest[: op.keep], rest[op.keep :]
    keys, values = np.concatenate([past_k, k], 1), np.concatenate([past_v, v], 1)
    extra: dict[str, Array] = dict(zip(("keep",), keep, strict=False)) | dict(zip(("sinks",), sinks, strict=False))
    if keep and op.attend.window is not None:
        extra["key_positions"] = np.cumsum(keep[0] >= 0.5, axis=1) - 1
    plain = {name: getattr(op.attend, name) for name in ("heads", "kv_heads", "causal", "window", "scale", "softcap")}
    return attention(q, keys, values, **plain, **extra), keys, values


def decoder_block(op: hir.LlamaDecoderBlock, *operands: Array) -> Array:
    """h = x + attn(rms(x))·Wo, y = h + swiglu(rms(h))"""
    names = (*hir.DECODER_OPERANDS, *([op.mask.operand] if op.mask.operand else []), *op.biases)
    t = dict(zip(names, operands, strict=True))

    def dense(name: str, x: Array) -> Array:
        return product(x, t[name], op.contract) + t.get(f"{name}_bias", 0.0)

    a = rms_norm(t["x"], t["ln1_g"], t["ln1_b"], op.eps)
    q, k = (formula.rope(dense(n, a), t["cos"], t["sin"], op.head_dim, op.head_dim) for n in "qk")
    causal = op.mask.kind in ("causal", "sliding_window", "custom")
    masks = {name: t[name] for name in ("keep", "bias") if name in t}
    context = attention(
        q, k, dense("v", a), heads=op.heads, kv_heads=op.kv_heads, causal=causal, window=op.mask.window, **masks
    )
    h = t["x"] + dense("o", context)
    m = rms_norm(h, t["ln2_g"], t["ln2_b"], op.eps)
    return h + dense("down", activation("silu")(dense("gate", m)) * dense("up", m))


def recurrent(
    op: hir.Recurrent, *operands: Array, start: Sequence[Array] = (), lengths: Any = None, every: bool = False
) -> tuple[Array, ...]:
    """From the initial values, or from `start`."""
    given = operands[: len(op.step.given) - len(op.state)]
    begin = start or [initial(slot, operands) for slot in op.state]
    more = () if lengths is None else (lengths,)
    n = len(op.state)
    made = token_scan(o.TokenScan(op.step, n, op.tokens, lengths is not None, every), *begin, *given, *more)
    return made if start or lengths is not None else made[: len(op.step.results) - n]


def initial(slot: hir.StateSlot, operands: Sequence[Array]) -> Array:
    """Before the first token."""
    if isinstance(slot.initial, int):
        return operands[slot.initial]
    return np.zeros(slot.type.shape) if slot.initial is None else wide(slot.initial.array)


def causal_window(
    op: hir.CausalWindow, x: Array, start: Sequence[Array] = (), lengths: Any = None, every: bool = False
) -> tuple[Array, ...]:
    """Zeros, or the tokens before, then those of the call."""
    past = op.width - 1
    tokens = np.concatenate([start[0] if start else np.zeros((len(x), past, *x.shape[2:])), x], 1)
    windows = MIR[o.TokenWindows](o.TokenWindows(op.width), tokens)
    if lengths is None:
        return (windows,)
    return (windows, MIR[o.TailRows](o.TailRows(past), tokens, lengths), *([windows[:, :, 1:]] if every else []))


def time_steps(op: hir.TimeSteps, t: Array, bias: Array, a_log: Array) -> tuple[Array, Array]:
    """Steps between the limits, and rates."""
    return time_step(t, bias, (op.low, np.inf if op.high is None else op.high)), -np.exp(a_log)


def causal_conv_block(
    op: hir.CausalConv, x: Array, w: Array, *bias: Array, start: Sequence[Array] = (), lengths: Any = None,
    every: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Behind zeros, or the rows before."""
    flat = w.reshape(len(w), -1)
    past = flat.shape[1] - 1
    rows = np.concatenate([start[0] if start else np.zeros((len(x), past, x.shape[2])), x], 1)
    out = causal_conv(x, flat, bias[0] if bias else None, tail=rows[:, :past])[0]
    if lengths is None:
        return (out,)
    each = [MIR[o.TokenWindows](o.TokenWindows(past + 1), rows)[:, :, 1:]] if every else []
    return (out, MIR[o.TailRows](o.TailRows(past), rows, lengths), *each)


def packed_state(
    op: hir.GatedDelta | hir.SelectiveScan, *operands: Array, start: Sequence[Array] = (), lengths: Any = None,
    every: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Heads apart; tokens behind the end of a row change nothing."""
    given = list(operands)
    tokens = given[0].shape[1]
    live = np.ones(given[0].shape[:2]) if lengths is None else np.arange(tokens)[None] < lengths[:, None]
    heads = lambda x, n: x.reshape(*x.shape[:2], n, -1)  # noqa: E731
    if isinstance(op, hir.GatedDelta):
        q, k = (heads(x, op.key_heads) for x in given[:2])
        q, k = (q, k) if op.unit is None else (l2_norm(q, op.unit), l2_norm(k, op.unit))
        given = [q, k, heads(given[2], op.value_heads), *(x * live[:, :, None] for x in given[3:])]
        out, *states = delta(o.GatedDeltaOp(op.scale, bool(start), every), *given, *start)
    else:
        x, dt, a, *gates = given
        given = [heads(x, op.heads), dt * live[:, :, None], a, *(heads(t, op.groups) for t in gates)]
        out, *states = selective_scan(o.SelectiveScanOp(bool(start), every), *given, *start)
    out = out.reshape(*out.shape[:2], -1)
    return (out,) if lengths is None else (out, *states)


def carried(op: hir.Carried, *operands: Array) -> tuple[Array, ...]:
    """A row that has read nothing starts from the initial value."""
    own = len(operands) - op.states - 2
    given, leaves, (length, lengths) = operands[:own], operands[own:-2], operands[-2:]
    block: Any = op.block
    slots = [initial(slot, given) for slot in block.state] if isinstance(block, hir.Recurrent) else [np.zeros(1)]
    fresh = np.ones(len(length), bool) if op.fresh else length == 0
    start = [np.where(fresh.reshape(-1, *[1] * (v.ndim - 1)), i, v) for i, v in zip(slots, leaves, strict=True)]
    return MEANING[type(block)](block, *given, start=start, lengths=lengths, every=op.every)


HIR: dict[type[Op], Meaning] = {
    hir.Linear: linear,
    hir.LinearFused: linear,
    hir.SharedLinearPair: lambda op, x, *w: product(x, w[op.slot], op.contracts[op.slot]),
    hir.SwiGLU: swiglu_ffn,
    hir.ResidualRmsNorm: lambda op, x, r, *arrays: rms_norm(x + r, *arrays, eps=op.eps),
    hir.Split: split,
    hir.GatedFfn: lambda op, gate, up: activation(op.activation)(gate) * up,
    hir.RmsNorm: lambda op, *arrays: rms_norm(*arrays, eps=op.eps, offset=op.offset),
    hir.LayerNorm: normed,
    hir.Embed: lambda op, table, ids: table[np.clip(ids, 0, len(table) - 1)],
    hir.Positions: lambda op, x: np.arange(x.shape[1])[None],
    hir.CountedPositions: lambda op, ids: formula.counted_positions(ids, op.padding),
    hir.RelativeBias: lambda op, table, x: table[formula.relative_buckets(x.shape[1], op.buckets,
        op.max_distance)].transpose(2, 0, 1)[None],
    hir.RopeAngles: rope_table,
    hir.RopeRows: rope_rows,
    hir.Sinusoids: sinusoids,
    hir.Rope: rotate,
    hir.Attention: attend,
    hir.CachedAttention: cached_attention,
    hir.GrowingAttention: growing_attention,
    hir.LastToken: lambda op, x, *index: take_row(o.TakeRow(), x, *index) if index else x[:, -1:],
    hir.FirstToken: lambda op, x: x[:, 0],
    hir.EndToken: end_token,
    hir.LlamaDecoderBlock: decoder_block,
    hir.Recurrent: recurrent,
    hir.Carried: carried,
    hir.CausalWindow: causal_window,
    hir.TimeSteps: time_steps,
    hir.Qwen35MtpHead: lambda op, *operands: mtp_head(*operands, heads=op.heads, kv_heads=op.kv_heads,
        head_dim=op.head_dim, n_rot=op.n_rot, eps=op.eps),
    hir.CausalConv: causal_conv_block,
    hir.GatedDelta: packed_state,
    hir.SelectiveScan: packed_state,
    hir.Route: formula.route,
    hir.Experts: formula.experts,
}  # fmt: skip
"""What each block means."""

MEANING: dict[type[Op], Meaning] = {**MIR, **HIR}


def apply(op: Op, types: Sequence[TensorType], *operands: Array) -> tuple[Array, ...]:
    """The results of one op, in the dtypes it declares."""
    out = MEANING[type(op)](op, *operands)
    results = out if isinstance(out, tuple) else (out,)
    pairs = zip(results, types, strict=True)
    return tuple(np.asarray(r, np.float64 if is_float(t.dtype) else t.dtype) for r, t in pairs)


def weight(program: Program, weights: dict[str, Array]) -> Array:
    """The array that a parameter program makes of the weights."""
    match program:
        case Key(key=key):
            return weights[key]
        case Transposed(of=of):
            return weight(of, weights).T
        case Cast(of=of, dtype=dtype):
            return weight(of, weights).astype(dtype)
        case Sliced():
            return weight(program.of, weights)[program.index]
        case Dequantized():
            return weight(program.logical, weights)
        case Stack(parts=parts):
            return np.stack([weight(p, weights) for p in parts])
        case Zeros(type=t):
            return np.zeros(t.shape, t.dtype)
        case Cut(inside=inside):
            (part,) = program.parts
            return weight(part, weights)[slices(inside)]
    return np.concatenate([weight(p, weights) for p in program.parts], axis=program.axis)  # zeros, too: Padded


@dataclass
class Run:
    """One evaluation: the leaves, and the state as it is written. `rounded` rounds every result to its dtype."""

    feeds: Feeds
    rounded: bool = False
    written: dict[str, Array] = field(default_factory=dict)

    def leaf(self, op: Leaf, iteration: int | None, operands: Sequence[Array]) -> Array:
        match op:
            case Input(input=name):
                return wide(self.feeds.inputs[name])
            case Param(programs=programs):
                return wide(weight(programs[(iteration or 0) % len(programs)], self.feeds.weights))
            case Constant(data=data):
                return wide(np.frombuffer(data, op.type.dtype).reshape(op.type.shape))
            case StateRead(leaf=leaf):
                return wide(self.feeds.state[leaf.key(iteration)])
            case BodyInput(index=index):
                return operands[index]
        raise TypeError(op)

    def graph(self, graph: Graph, iteration: int | None, operands: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs of a graph or of one iteration of a region."""
        values: list[tuple[Array, ...]] = []
        for node in graph.nodes:
            values.append(self.node(node, iteration, operands, [values[v.node][v.index] for v in node.inputs]))
        self.written.update({leaf.key(iteration): values[v.node][v.index] for leaf, v in graph.writes})
        return tuple(values[v.node][v.index] for v in graph.outputs)

    def node(
        self, node: Node, iteration: int | None, operands: Sequence[Array], inputs: list[Array]
    ) -> tuple[Array, ...]:
        if isinstance(node.op, Leaf):
            return (self.leaf(node.op, iteration, operands),)
        if isinstance(node.op, Repeat):
            return self.repeat(node.op, inputs)
        results = apply(node.op, node.types, *inputs)
        return (
            tuple(wide(r.astype(t.dtype)) for r, t in zip(results, node.types, strict=True))
            if self.rounded
            else results
        )

    def repeat(self, op: Repeat, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The final carries, then side output by side output, each of all iterations."""
        carried, shared = tuple(inputs[: op.carries]), tuple(inputs[op.carries :])
        sides = []
        for i in range(op.count):
            out = self.graph(op.body, i, (*carried, *shared))
            carried, side = out[: op.carries], out[op.carries :]
            sides.append(side)
        return (*carried, *(step[i] for i in range(len(sides[0])) for step in sides))


def evaluate(graph: Graph, feeds: Feeds) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """Outputs and written state of a graph."""
    run = Run(feeds)
    with np.errstate(all="ignore"):
        return run.graph(graph, None, ()), run.written
