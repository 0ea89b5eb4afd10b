"""Blocks: what each means, in terms of the formulas of ops, and samples."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Op, constant
from rlx_jax.ir.ops.experts import ClampedGate
from rlx_jax.ir.user_functions import trace_step
from tests.ops import sequences
from tests.ops.elements import activation, normed, product, rms_norm
from tests.ops.evaluate import wide
from tests.ops.sample import F32, MEANING, Array, Meaning, Sample, o, operand
from tests.ops.sequences import attend, decay, delta, selective_scan, token_scan
from tests.ops.shapes import split, take_row
from tests.oracles import op_formulas as formula
from tests.oracles.gated_delta import causal_conv, l2_norm
from tests.oracles.mamba2 import time_step
from tests.oracles.mtp_head import mtp_head

attention: Meaning = formula.attention


def linear(op: Any, x: Array, w: Array, b: Array | float = 0.0) -> Array:
    """act(x · w + b)"""
    return activation(op.activation)(product(x, w, op.contract) + b)


def swiglu_ffn(op: Any, x: Array, up: Array, gate: Array, down: Array) -> Array:
    """(silu(x · gate) ⊙ (x · up)) · down"""
    wide, gated = product(x, up, op.contracts[0]), product(x, gate, op.contracts[1])
    return product(activation("silu")(gated) * wide, down, op.contracts[2])


def end_token(op: Any, x: Any, ids: Any) -> Any:
    """The first place of the end in each row, or of its largest id."""
    ends = [ids[b] == (ids[b].max() if op.end_id is None else op.end_id) for b in range(len(ids))]
    return np.stack([x[b, int(np.argmax(end))] for b, end in enumerate(ends)])


def relative_scores(op: Any, q: Array, k: Array, *tables: Array) -> Array:
    """Each query with the row of its distance to each key, and each key with that of its distance from each query."""
    half, middle = op.buckets or op.max_distance, op.buckets // 2

    def row(distance: int) -> int:
        if op.buckets and abs(distance) > middle:
            share = math.log(abs(distance) / middle) / math.log((op.max_distance - 1) / middle)
            distance = int(math.copysign(math.ceil(share * (middle - 1) - 1e-9) + middle, distance))
        return min(max(distance + half, 0), 2 * half - 1)

    size = q.shape[1]
    rows = np.array([[row(s - t) for t in range(size)] for s in range(size)])
    q, k, *embeddings = (x.reshape(*x.shape[:-1], op.heads, -1) for x in (q, k, *tables))
    of_term = dict(zip(op.terms, embeddings, strict=True))
    out = np.zeros((len(q), op.heads, size, size))
    if "keys" in of_term:
        out += np.einsum("bsnd,stnd->bnst", q, of_term["keys"][rows])
    if "queries" in of_term:
        out += np.einsum("btnd,stnd->bnst", k, of_term["queries"][rows])
    return op.scale * out


def rope_rows(op: Any, positions: Array) -> tuple[Array, ...]:
    """Rows of two given tables."""
    return tuple(np.frombuffer(data, np.float32).reshape(-1, op.width)[positions] for data in (op.cos, op.sin))


def cached_attention(op: Any, *operands: Array) -> tuple[Array, ...]:
    """Write the new keys and values, then attend over the cache up to each query's own position."""
    q, k, v, cache_k, cache_v, start, lengths, *rest = operands
    scales, sinks = rest[: 2 * op.quantized], rest[2 * op.quantized :]
    heads = (*k.shape[:2], op.attend.kv_heads, -1)
    new_k, new_v = k.reshape(heads), v.reshape(heads)
    extra: dict[str, Array] = {}
    if op.ring:
        keys, extra["key_positions"], cache_k = formula.ring_step(cache_k, new_k, start, lengths)
        values, _, cache_v = formula.ring_step(cache_v, new_v, start, lengths)
    elif scales:
        codes = [formula.quantize_vectors(x, cache_k.dtype) for x in (new_k, new_v)]
        caches = zip((cache_k, cache_v), scales, strict=True)
        (cache_k, *scale_k), (cache_v, *scale_v) = (
            [formula.cache_update(old, new, start, lengths) for old, new in zip(*pair, strict=True)]
            for pair in zip(caches, codes, strict=True)
        )
        scales = scale_k + scale_v
        keys, values = cache_k * scales[0][..., None], cache_v * scales[1][..., None]
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
    return out, cache_k, cache_v, *scales


def growing_attention(op: Any, *operands: Array) -> tuple[Array, ...]:
    """Join cached and new keys and values; a window counts the keys that the mask keeps."""
    q, k, v, past_k, past_v, *rest = operands
    keep, sinks = rest[: op.keep], rest[op.keep :]
    keys, values = np.concatenate([past_k, k], 1), np.concatenate([past_v, v], 1)
    extra: dict[str, Array] = dict(zip(("keep",), keep, strict=False)) | dict(zip(("sinks",), sinks, strict=False))
    if keep and op.attend.window is not None:
        extra["key_positions"] = np.cumsum(keep[0] >= 0.5, axis=1) - 1
    plain = {name: getattr(op.attend, name) for name in ("heads", "kv_heads", "causal", "window", "scale", "softcap")}
    return attention(q, keys, values, **plain, **extra), keys, values


def decoder_block(op: Any, *operands: Array) -> Array:
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
    op: Any, *operands: Array, start: Sequence[Array] = (), lengths: Any = None, every: bool = False
) -> tuple[Array, ...]:
    """From the initial values, or from `start`."""
    given = operands[: len(op.step.operand_types) - len(op.state)]
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
    op: Any, x: Array, start: Sequence[Array] = (), lengths: Any = None, every: bool = False
) -> tuple[Array, ...]:
    """Zeros, or the tokens before, then those of the call."""
    past = op.width - 1
    tokens = np.concatenate([start[0] if start else np.zeros((len(x), past, *x.shape[2:])), x], 1)
    windows = MEANING[o.TokenWindows](o.TokenWindows(op.width), tokens)
    if lengths is None:
        return (windows,)
    return (windows, MEANING[o.TailRows](o.TailRows(past), tokens, lengths), *([windows[:, :, 1:]] if every else []))


def time_steps(op: Any, t: Array, bias: Array, a_log: Array) -> tuple[Array, Array]:
    """Steps between the limits, and rates."""
    return time_step(t, bias, (op.low, np.inf if op.high is None else op.high)), -np.exp(a_log)


def causal_conv_block(
    op: Any, x: Array, w: Array, *bias: Array, start: Sequence[Array] = (), lengths: Any = None,
    every: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Behind zeros, or the rows before."""
    flat = w.reshape(len(w), -1)
    past = flat.shape[1] - 1
    rows = np.concatenate([start[0] if start else np.zeros((len(x), past, x.shape[2])), x], 1)
    out = causal_conv(x, flat, bias[0] if bias else None, tail=rows[:, :past])[0]
    if lengths is None:
        return (out,)
    each = [MEANING[o.TokenWindows](o.TokenWindows(past + 1), rows)[:, :, 1:]] if every else []
    return (out, MEANING[o.TailRows](o.TailRows(past), rows, lengths), *each)


def packed_state(
    op: Any, *operands: Array, start: Sequence[Array] = (), lengths: Any = None,
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


def carried(op: Any, *operands: Array) -> tuple[Array, ...]:
    """A row that has read nothing starts from the initial value."""
    own = len(operands) - op.states - 2
    given, leaves, (length, lengths) = operands[:own], operands[own:-2], operands[-2:]
    block: Any = op.block
    slots = [initial(slot, given) for slot in block.state] if isinstance(block, hir.Recurrent) else [np.zeros(1)]
    fresh = np.ones(len(length), bool) if op.fresh else length == 0
    start = [np.where(fresh.reshape(-1, *[1] * (v.ndim - 1)), i, v) for i, v in zip(slots, leaves, strict=True)]
    return MEANING[type(block)](block, *given, start=start, lengths=lengths, every=op.every)


MEANINGS: dict[type[Op], Meaning] = {
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
    hir.RelativeScores: relative_scores,
    hir.RopeAngles: sequences.MEANINGS[o.RopeTable],
    hir.RopeRows: rope_rows,
    hir.Sinusoids: sequences.MEANINGS[o.SinusoidTable],
    hir.Rope: sequences.MEANINGS[o.RopeOp],
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


TABLE_ROWS = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2).tobytes()


MTP = ("f32 2 3 6; i32 2 3; f32 2 3 1; f32 2 3 1; i32 2; f32 7 6; f32 6; f32 6; f32 6; f32 6; f32 12 6; f32 6; f32 6; "
       "f32 6 16; f32 6 4; f32 6 4; f32 4; f32 4; f32 4; f32 4; f32 8 6; f32 6; f32 6; f32 6 5; f32 6 5; f32 5 6; "
       "f32 6; f32 6; f32 6 9")  # fmt: skip


DECODER = ("f32 2 3 8; f32 8; f32 8; f32 8 8; f32 4 8; f32 4 8; f32 8 8; f32 8; f32 8; f32 6 8; f32 6 8; f32 8 6; "
           "f32 1 3 2; f32 1 3 2")  # fmt: skip


STEP = trace_step("decay", decay, [operand(text) for text in ("f32 4", "f32 4", "f32")])


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
    Sample(hir.CachedAttention(hir.Attention(4, 2, causal=True), quantized=True),
        "f32 2 3 8; f32 2 3 4; f32 2 3 4; i8 2 6 2 2; i8 2 6 2 2; i32 2; i32 2; f32 2 6 2; f32 2 6 2"),
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
    Sample(hir.RelativeScores(2, 0.5, 4, 9), "f32 2 12 8; f32 2 12 8; f32 8 8; f32 8 8"),
    Sample(hir.RelativeScores(2, 0.5, 0, 3, ("queries",)), "f32 2 5 8; f32 2 5 8; f32 6 8"),
    Sample(hir.LlamaDecoderBlock(2, 4, 1, 1e-5, hir.MaskKind.sliding_window(2), 1), DECODER, tolerance=1e-5),
    Sample(hir.LlamaDecoderBlock(2, 4, 1, 1e-5, hir.MaskKind.CAUSAL, 1, ("k_bias", "down_bias")),
           DECODER + "; f32 4; f32 8", tolerance=1e-5),
]  # fmt: skip
