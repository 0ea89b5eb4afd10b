"""What a random HIR graph is grown from: every block, and the groups of them that merging and lowering look for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, TypeCache
from rlx_jax.ir.ops.attention import ROPE_STYLES
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.ops.shape import Narrow
from rlx_jax.ir.types import symbol
from tests.fuzz import patterns, tensor_ops
from tests.fuzz.patterns import nodes_of
from tests.fuzz.sketch import BOOL, F32, I32, Case, Known, Sketch
from tests.fuzz.tensor_ops import EPS, OFFSET, Grow, integers

WIDTH = 4
ACTIVATIONS = ("", "silu", "", "gelu", "relu")


def sequence(s: Sketch, width: int = WIDTH) -> Known:
    """A value `[batch, seq, width]` in f32: one that is there, else a leaf."""
    batch, seq = s.dims(3)[:2]
    shapes = {(batch, seq, width), (symbol("batch"), symbol("seq"), width)}
    found = s.pick(lambda k: k.type.dtype == F32 and k.shape in shapes)
    return found or s.leaf((batch, seq, width), F32, kind="input")


def parameter(s: Sketch, *shape: int) -> Known:
    return s.leaf(shape, F32, kind="param")


def weight(s: Sketch, x: Known, columns: int, contract: int) -> Known:
    """A weight for x's last axis."""
    return parameter(s, *((x.shape[-1], columns) if contract == 0 else (columns, x.shape[-1])))


def linear(s: Sketch) -> object:
    """act(x · w [+ b])"""
    x, contract, columns = sequence(s), s.draw(2), s.choice((4, 2, 8))
    op = hir.Linear(contract, s.coin(), s.choice(ACTIVATIONS), s.coin(6))
    bias = [parameter(s, columns)] if op.bias else []
    return s.one(op, x, weight(s, x, columns, contract), *bias)


def linears(s: Sketch) -> list[Known | None]:
    """Two to four Linears of one value, which merge; now and then one reads a weight that another one reads too, has
    an activation, or is turned the other way."""
    x, contract, biased = sequence(s), s.draw(2), s.coin()
    made: list[Known | None] = []
    last: list[Known] = []
    for _ in range(2 + s.draw(3)):
        turned = 1 - contract if s.coin(8) else contract
        op = hir.Linear(turned, biased, s.choice(ACTIVATIONS) if s.coin(6) else "")
        columns = s.choice((4, 2))
        if turned != contract or not last or not s.coin(8):
            last = [weight(s, x, columns, turned), *([parameter(s, columns)] if biased else [])]
        made.append(s.one(op, x, *last))
        last = last if turned == contract else []
    return made


def named(s: Sketch) -> object:
    """A block that names a group of others."""
    x, way = sequence(s), s.draw(4)
    a, b, c = s.draw(2), s.draw(2), s.draw(2)
    if way == 0:
        return s.one(hir.LinearFused(a, s.choice(ACTIVATIONS)), x, weight(s, x, 2, a), parameter(s, 2))
    if way == 1:
        pair = (weight(s, x, WIDTH, a), weight(s, x, 2, b))
        return [s.one(hir.SharedLinearPair(slot, (a, b)), x, *pair) for slot in (0, 1)]
    if way == 2:
        down = parameter(s, *((6, WIDTH) if c == 0 else (WIDTH, 6)))
        return s.one(hir.SwiGLU((a, b, c)), x, weight(s, x, 6, a), weight(s, x, 6, b), down)
    weights = [parameter(s, WIDTH) for _ in range(1 + a)]
    rest = sequence(s)
    return s.one(hir.ResidualRmsNorm(s.choice(EPS)), x, rest if rest.shape == x.shape else x, *weights)


def gated(s: Sketch) -> object:
    """act(gate) ⊙ up: of two Linears, of the halves of one, or of pieces that are no halves."""
    op, way = hir.GatedFfn(s.choice(("silu", "silu", "gelu_tanh"))), s.draw(4)
    if way == 0:
        x, contract = sequence(s), s.draw(2)
        gate, up = (s.one(hir.Linear(contract), x, weight(s, x, WIDTH, contract)) for _ in range(2))
        return s.one(op, gate, up)
    whole = sequence(s, 2 * WIDTH)
    if way == 1:
        halves = s.add(hir.Split((WIDTH, WIDTH)), whole)
        return s.one(op, *(halves[::-1] if s.coin() else halves)) if halves else None
    starts = s.choice(((0, WIDTH), (WIDTH, 0), (1, 4), (0, 0))) if way == 2 else (0, WIDTH)
    return s.one(op, *(s.one(Narrow(2, start, WIDTH), whole) for start in starts))


def split(s: Sketch) -> object:
    """Unequal pieces."""
    return s.add(hir.Split(s.choice(((1, 3), (2, 2), (1, 2, 1)))), sequence(s))


def rms_norm(s: Sketch) -> object:
    """With γ, with γ and β, with γ and zeros; γ as it is or 1 + γ."""
    x, eps = sequence(s), s.choice(EPS)
    rest = [parameter(s, WIDTH)]
    way = s.draw(3)
    if way == 1:
        rest.append(parameter(s, WIDTH))
    elif way == 2:
        rest.append(s.constant(np.zeros(WIDTH), F32))
    return s.one(hir.RmsNorm(eps, s.choice(OFFSET)), x, *rest)


def layer_norm(s: Sketch) -> object:
    return s.one(hir.LayerNorm(s.choice(EPS)), sequence(s), parameter(s, WIDTH), parameter(s, WIDTH))


def embed(s: Sketch) -> object:
    """Rows of a table."""
    return s.one(hir.Embed(), parameter(s, s.choice((5, 8)), WIDTH), integers(s, s.dims(3)[:2], 5))


def residual(s: Sketch) -> object:
    """x + y"""
    return s.one(Binary("add"), sequence(s), sequence(s))


def tables(s: Sketch, x: Known, n_rot: int) -> tuple[Known, ...]:
    """cos and sin at positions that are counted or given, computed or read from a table."""
    rows = s.one(hir.Positions(), x) if s.coin() else integers(s, (s.choice((1, x.shape[0])), x.shape[1]), 6)
    if rows is None:
        return ()
    if s.coin():
        return s.add(hir.RopeAngles((1.0, 0.31)[: n_rot // 2], s.choice((1.0, 1.2))), rows)
    angles = np.arange(6)[:, None] * np.array((1.0, 0.31)[: n_rot // 2])
    cos, sin = (f(angles).astype(np.float32).tobytes() for f in (np.cos, np.sin))
    return s.add(hir.RopeRows(n_rot // 2, cos, sin), rows)


def rope(s: Sketch) -> object:
    """Whole heads or parts of them."""
    head_dim, n_rot = s.choice(((4, 4), (2, 2), (4, 2)))
    x = sequence(s, 4 * (1 + s.draw(2)))
    cos_sin = tables(s, x, n_rot)
    return s.one(hir.Rope(head_dim, n_rot, s.choice(ROPE_STYLES)), x, *cos_sin) if cos_sin else None


HEADS = ((2, 1, 2), (1, 1, 4), (2, 2, 2), (4, 2, 1), (4, 2, 2))
"""Query heads, key heads and their width."""


def attention(s: Sketch) -> object:
    """q, k and v of one value, maybe rotated, grouped heads, every mask."""
    heads, kv_heads, dim = s.choice(HEADS)
    x, contract = sequence(s), s.draw(2)
    columns = (heads * dim, kv_heads * dim, kv_heads * dim)
    q, k, v = (s.one(hir.Linear(contract), x, weight(s, x, n, contract)) for n in columns)
    cos_sin = tables(s, x, dim) if dim > 1 and s.coin() else ()
    if cos_sin and q is not None and k is not None:
        q, k = (s.one(hir.Rope(dim, dim), y, *cos_sin) for y in (q, k))
    kind = s.choice(("causal", "none", "sliding:2", "custom", "keep", "bias"))
    mask = hir.mask_kind(kind)
    batch, seq = x.shape[:2]
    rest = []
    if mask.operand == "keep":
        rest.append(s.leaf((s.choice((batch, 1)), seq), s.choice((BOOL, I32)), 0, 2))
    if mask.operand == "bias":
        rest.append(s.leaf((s.choice((1, batch)), s.choice((heads, 1)), seq, seq), F32))
    op = hir.attention(heads, kv_heads, mask, s.choice((None, 0.7)), s.choice((None, 1.5)))
    if kind == "none" and s.coin():
        op = replace(op, window=2, ahead=1)
    sinks = sinks_of(s, heads)
    return s.one(replace(op, sinks=bool(sinks)), q, k, v, *rest, *sinks)


def sinks_of(s: Sketch, heads: int) -> list[Known]:
    """Sometimes a score for each head."""
    return [s.leaf((heads,), F32)] if s.coin(3) else []


def cached_attention(s: Sketch) -> object:
    """Attention over a cache, inside the block only, or over a ring."""
    heads, kv_heads, dim = s.choice(HEADS)
    batch, seq, last = s.dims(3)[0], s.choice((2, 1, 3)), s.coin(3)
    queries = 1 if last else seq
    q, k, v = (s.leaf((batch, n, h * dim), F32) for n, h in ((queries, heads), (seq, kv_heads), (seq, kv_heads)))
    window = s.choice((None, 2))
    ring = window is not None and s.coin()
    slots = 2 + s.draw(2) if ring else 6
    caches = [s.leaf((batch, slots, kv_heads, dim), F32, kind="state") for _ in range(2)]
    block_only = s.coin(3)
    start = s.leaf((batch,), I32, 0, 1 if block_only else 4)
    attend = hir.Attention(heads, kv_heads, True, window, softcap=s.choice((None, 1.5)), last=last)
    # Of padding nothing is promised: behind a window it may have no key.
    lengths = s.leaf((batch,), I32, seq if window and not block_only else 0, seq + 1)
    sinks = sinks_of(s, heads)
    op = hir.CachedAttention(replace(attend, sinks=bool(sinks)), block_only, ring)
    return s.add(op, q, k, v, *caches, start, lengths, *sinks)


def growing_attention(s: Sketch) -> object:
    """Attention behind cached keys, all of them or those that a mask keeps."""
    heads, kv_heads, dim = s.choice(HEADS)
    batch, new, past = s.dims(3)[0], 1 + s.draw(3), 1 + s.draw(3)
    q, k, v = (s.leaf((batch, new, h * dim), F32) for h in (heads, kv_heads, kv_heads))
    caches = [s.leaf((batch, past, kv_heads * dim), F32) for _ in range(2)]
    keep = [s.leaf((batch, past + new), s.choice((BOOL, I32)), 0, 2)] if s.coin() else []
    attend = hir.Attention(heads, kv_heads, True, s.choice((None, 2)), softcap=s.choice((None, 1.5)))
    sinks = sinks_of(s, heads)
    return s.add(hir.GrowingAttention(replace(attend, sinks=bool(sinks)), bool(keep)), q, k, v, *caches, *keep, *sinks)


def last_token(s: Sketch) -> object:
    """The last, or one for each row."""
    x = sequence(s)
    index = [integers(s, (x.shape[0],), x.array.shape[1])] if s.coin() else []
    return s.one(hir.LastToken(), x, *index)


def counted_positions(s: Sketch) -> object:
    """Over ids of which some are padding."""
    return s.one(hir.CountedPositions(s.draw(3)), integers(s, s.dims(3)[:2], 3))


def relative_bias(s: Sketch) -> object:
    """Of one head or two; the table may have rows that no bucket reads."""
    return s.one(hir.RelativeBias(8, s.choice((3, 5))), parameter(s, s.choice((8, 9)), s.choice((1, 2))), sequence(s))


def first_token(s: Sketch) -> object:
    return s.one(hir.FirstToken(), sequence(s))


def end_token(s: Sketch) -> object:
    """Of texts that hold the id, once or more, or do not."""
    x = sequence(s)
    return s.one(hir.EndToken(s.choice((None, 1))), x, integers(s, x.shape[:2], 3))


def decoder(s: Sketch) -> object:
    """A whole Llama layer."""
    x, contract = sequence(s), s.draw(2)
    heads, kv_heads, dim = s.choice(((2, 1, 2), (1, 1, 4), (2, 2, 2)))
    mask = hir.mask_kind(s.choice(("causal", "custom", "sliding:2", "none")))
    shapes: dict[str, tuple[int, int]] = {"q": (WIDTH, heads * dim), "o": (heads * dim, WIDTH), "down": (6, WIDTH)}
    shapes |= dict.fromkeys(("k", "v"), (WIDTH, kv_heads * dim)) | dict.fromkeys(("gate", "up"), (WIDTH, 6))
    cos_sin = tables(s, x, dim)
    if not cos_sin:
        return None
    given: dict[str, Known] = dict(zip(("cos", "sin"), cos_sin, strict=True)) | {"x": x}
    for name in hir.DECODER_OPERANDS[1:-2]:
        shape = shapes.get(name, (WIDTH,))
        given[name] = parameter(s, *(shape if contract == 0 else shape[::-1]))
    rest = [s.leaf((x.shape[0], x.shape[1]), I32, 0, 2)] if mask.operand else []
    biases = tuple(n for n in ("q_bias", "v_bias", "up_bias") if s.coin(4))
    rest += [parameter(s, shapes[n.removesuffix("_bias")][1]) for n in biases]
    block = hir.LlamaDecoderBlock(heads, dim, kv_heads, s.choice(EPS), mask, contract, biases)
    return s.one(block, *(given[name] for name in hir.DECODER_OPERANDS), *rest)


BLOCKS: tuple[Grow, ...] = (
    linear, linear, linears, linears, named, named, named, gated, gated, split, rms_norm, layer_norm, embed, residual,
    residual, rope, attention, attention, cached_attention, growing_attention, last_token, first_token, decoder,
    end_token, counted_positions, relative_bias, tensor_ops.unary, tensor_ops.narrow, patterns.again,
    patterns.swiglu_halves,
)  # fmt: skip
PALETTES: tuple[tuple[Any, ...], ...] = ((2, 3, WIDTH), ("batch", "seq", WIDTH))


def hir_case(seed: int, blocks: int, types: TypeCache) -> Case:
    """A random HIR graph of about so many blocks. Fewer blocks of the same seed are a prefix."""
    s = Sketch(np.random.default_rng(seed), Builder("fuzz", types))
    s.palette = s.choice(PALETTES)
    sequence(s)
    for _ in range(2 * blocks):
        if len(nodes_of(s)) >= blocks:
            break
        s.choice(BLOCKS)(s)
    return s.finish()
