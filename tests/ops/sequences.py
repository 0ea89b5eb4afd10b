"""Attention, rotations, caches, steps over tokens and recurrences: what each means, and samples."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Op
from rlx_jax.ir.types import as_dtype
from rlx_jax.ir.user_functions import trace_step
from tests.ops.sample import Array, Meaning, Sample, o, operand
from tests.oracles import op_formulas as formula
from tests.oracles.gated_delta import causal_conv, gated_delta
from tests.oracles.mamba2 import ssd


def attend(op: Any, q: Array, k: Array, v: Array, *rest: Array) -> Array:
    """One score at a time."""
    names = (*op.extra, *["sinks"] * (isinstance(op, hir.Attention) and op.sinks))
    return formula.attention(
        q, k, v, heads=op.heads, kv_heads=op.kv_heads, causal=op.causal, window=op.window, scale=op.scale,
        softcap=op.softcap, ahead=op.ahead, **dict(zip(names, rest, strict=True)),
    )  # fmt: skip


def decay(h: Any, x: Any, a: Any) -> tuple[Any, Any]:
    """A user's step."""
    return a * h + x, 2 * h - x


STEPS: dict[str, Meaning] = {"decay": decay}
"""Steps that `TokenScan` and `Recurrent` hold, by their labels, as functions of rows."""


def token_scan(op: Any, *operands: Array) -> tuple[Array, ...]:
    """Token after token of each row; a row that has ended keeps its state."""
    count = len(op.step.operand_types)
    state, xs = list(operands[: op.states]), operands[op.states : op.states + op.tokens]
    params, lengths = operands[op.states + op.tokens : count], operands[count:]
    rows, tokens = xs[0].shape[:2]
    ended = lengths[0] if lengths else np.full(rows, tokens)
    shapes = [t.shape for t in op.step.operand_types[: op.states]]
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


def delta(op: Any, *operands: Array) -> tuple[Array, ...]:
    """The transcript; the states after each token are those after so many tokens."""
    tokens, state = operands[2].shape[1], operands[5] if op.from_state else None

    def run(n: int) -> tuple[Array, Array]:
        q, k, v, g, beta = (x[:, :n] for x in operands[:5])
        return gated_delta(q, k, v, g, beta, state, op.scale)

    return _with_every(op.every, tokens, run)


def selective_scan(op: Any, *operands: Array) -> tuple[Array, ...]:
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


MEANINGS: dict[type[Op], Meaning] = {
    o.AttentionOp: attend,
    o.RopeTable: lambda op, at: formula.rope_table(at, op.inv_freq, op.factor, op.axes),
    o.SinusoidTable: lambda op, t: formula.sinusoids(t, op.channels, op.scale, op.max_period),
    o.RopeOp: lambda op, x, cos, sin: formula.rope(x, cos, sin, op.head_dim, op.n_rot, op.style),
    o.CacheUpdate: lambda op, *arrays: (formula.cache_fill if op.fresh else formula.cache_update)(*arrays),
    o.RingStep: lambda op, *arrays: formula.ring_step(*arrays),
    o.QuantizeVectors: lambda op, x: formula.quantize_vectors(x, op.dtype),
    o.DequantizeVectors: lambda op, codes, scale: codes * scale[..., None],
    o.TokenScan: token_scan,
    o.TokenWindows: lambda op, x: np.stack([x[:, t : t + op.width] for t in range(x.shape[1] - op.width + 1)], 1),
    o.TailRows: lambda op, x, n: np.stack([row[at : at + op.count] for row, at in zip(x, n, strict=True)]),
    o.GatedDeltaOp: delta,
    o.SelectiveScanOp: selective_scan,
    o.CausalConvOp: lambda op, z, w, *bias: causal_conv(z[:, w.shape[1] - 1 :], w, bias[0] if bias else None,
        tail=z[:, : w.shape[1] - 1])[0],
}  # fmt: skip


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
    for dtype, x in itertools.product(("i8", "f8_e4m3"), ("f32 batch seq 2 16", "f32 batch 5", "bf16 3 8")):
        yield Sample(o.QuantizeVectors(as_dtype(dtype)), x)
    yield Sample(o.DequantizeVectors(as_dtype("f32")), "i8 batch seq 2 5; f32 batch seq 2", below=120)
    yield Sample(o.Overwrite(), "f32 batch keys 3; f32 batch keys 3")
    yield Sample(o.Overwrite(), "bool 2 3; bool 2 3")
    yield Sample(o.After(), "f32 batch keys 3; bf16 batch; i32 2")
    for ring, row in (("keys 3", "3"), ("2 2 3", "2 3")):
        for block, below in (("seq", 5), ("1", 2)):
            yield Sample(o.RingStep(), f"f32 batch {ring}; f32 batch {block} {row}; i32 batch; i32 batch", below=below)
    for window, slots, in_place in ((3, 5, True), (3, 4, False), (7, 6, True)):  # window + S - 1 slots, one less, all
        means = functools.partial(formula.ring_step, in_place=in_place)
        yield Sample(o.RingStep(window), f"f32 2 {slots} 2 3; f32 2 3 2 3; i32 2; i32 2", means, below=4)


def recurring() -> Iterator[Sample]:
    """Steps over tokens and recurrences: from zeros and from a state, ragged, with every state, of one token."""
    step = trace_step("decay", decay, [operand(text) for text in ("f32 4", "f32 4", "f32")])
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
    for tokens, from_state, every, heads in (("seq", False, False, 4), ("seq", True, True, 2), ("1", True, False, 4)):
        state = f"; f32 batch {heads} 3 5" * from_state
        q, rows = f"f32 batch {tokens} 2 3", f"f32 batch {tokens} {heads}"
        delta = o.GatedDeltaOp(0.3 if every else None, from_state, every)
        yield Sample(delta, f"{q}; {q}; {rows} 5; {rows}; {rows}{state}", **low)
        for rate in (f"f32 {heads}", f"f32 {heads} 5"):
            group = f"f32 batch {tokens} 2 5"
            operands = f"{rows} 3; {rows}; {rate}; {group}; {group}{state}"
            yield Sample(o.SelectiveScanOp(from_state, every), operands, **low)
    bf16 = "bf16 2 5 1 4; bf16 2 5 1 4; bf16 2 5 3 4; f32 2 5 3; bf16 2 5 3; f32 2 3 4 4"
    yield Sample(o.GatedDeltaOp(from_state=True), bf16, **low)
    for bias, tokens in ((False, "seq+3"), (True, "seq+3"), (True, "4")):
        yield Sample(o.CausalConvOp(bias), f"f32 batch {tokens} 6; f32 6 4" + "; f32 6" * bias)


SAMPLES = (attention, recurring)
