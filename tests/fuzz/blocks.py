"""What a random HIR graph is grown from: the blocks of the op table, and the groups that merging and lowering look
for."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, TypeCache
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.types import TensorType, symbol
from tests import ops
from tests.fuzz import tensor_ops
from tests.fuzz.sketch import BOOL, F32, I32, Case, Known, Sketch
from tests.fuzz.tensor_ops import Grow, nodes_of, of_table

WIDTH = 8
ACTIVATIONS = ("", "silu", "", "gelu", "relu")
NOT_GROWN = (
    hir.Sinusoids, hir.Recurrent, hir.CausalWindow, hir.Carried, hir.TimeSteps, hir.CausalConv, hir.GatedDelta,
    hir.SelectiveScan, hir.Qwen35MtpHead, hir.Experts, hir.Route,
)  # fmt: skip
"""No pass treats them in a way of its own; their numbers and types are held in tests/test_ops.py."""
SAMPLES: dict[Any, list[ops.Sample]] = {}
for sample in ops.BLOCKS:  # behind a window of a ring padding may have no key, and nothing is promised of it
    if type(sample.op) not in NOT_GROWN and not getattr(sample.op, "ring", False):
        SAMPLES.setdefault(type(sample.op), []).append(sample)


def sequence(s: Sketch) -> Known:
    """A value `[batch, seq, 8]` in f32: one that is there, else a leaf."""
    found = s.pick(lambda k: k.type.dtype == F32 and len(k.shape) == 3 and k.shape[2] == WIDTH)
    return found or s.leaf((*s.dims(3)[:2], WIDTH), F32, kind="input")


def parameter(s: Sketch, *shape: int) -> Known:
    return s.leaf(shape, F32, kind="param")


def weight(s: Sketch, x: Known, columns: int, contract: int) -> Known:
    """A weight for x's last axis."""
    return parameter(s, *((x.shape[-1], columns) if contract == 0 else (columns, x.shape[-1])))


def of_sequences(t: TensorType) -> TensorType:
    """With the symbols of a graph in the place of two rows of three tokens."""
    rows, tokens = symbol("batch"), symbol("seq")
    if t.rank > 1 and t.shape[:2] in ((2, 3), (1, 3)):
        return TensorType((rows if t.shape[0] == 2 else 1, tokens, *t.shape[2:]), t.dtype)
    return TensorType((rows,), t.dtype) if t.shape == (2,) and t.dtype == I32 else t


def drawn(s: Sketch) -> object:
    """A block of the table."""
    sample = s.choice(SAMPLES[s.choice(tuple(SAMPLES))])
    return of_table(s, sample, [of_sequences(t) for t in sample.types] if "batch" in s.palette else sample.types)


def linear(s: Sketch) -> object:
    """act(x · w [+ b])"""
    x, contract, columns = sequence(s), s.draw(2), s.choice((8, 2, 4))
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


def rms_norm(s: Sketch) -> object:
    """With γ and zeros; γ as it is or 1 + γ."""
    op = hir.RmsNorm(s.choice((1e-5, 0.5)), s.choice((0.0, 1.0)))
    return s.one(op, sequence(s), parameter(s, WIDTH), s.constant(np.zeros(WIDTH), F32))


def residual(s: Sketch) -> object:
    """x + y"""
    return s.one(Binary("add"), sequence(s), sequence(s))


def tables(s: Sketch, x: Known, n_rot: int) -> tuple[Known, ...]:
    """cos and sin at positions that are counted or given."""
    rows = s.one(hir.Positions(), x) if s.coin() else s.leaf((s.choice((1, x.shape[0])), x.shape[1]), I32, 0, 6)
    return s.add(hir.RopeAngles((1.0, 0.31)[: n_rot // 2], s.choice((1.0, 1.2))), rows) if rows else ()


def attention(s: Sketch) -> object:
    """q, k and v of one value, maybe rotated, grouped heads, every mask."""
    heads, kv_heads, dim = s.choice(((2, 1, 2), (1, 1, 4), (2, 2, 2), (4, 2, 1), (4, 2, 2)))
    x, contract = sequence(s), s.draw(2)
    columns = (heads * dim, kv_heads * dim, kv_heads * dim)
    q, k, v = (s.one(hir.Linear(contract), x, weight(s, x, n, contract)) for n in columns)
    cos_sin = tables(s, x, dim) if dim > 1 and s.coin() else ()
    if cos_sin and q is not None and k is not None:
        q, k = (s.one(hir.Rope(dim, dim), y, *cos_sin) for y in (q, k))
    kind = s.choice(("causal", "none", "sliding:2", "custom", "keep", "bias"))
    mask, (batch, seq), rest = hir.mask_kind(kind), x.shape[:2], []
    if mask.operand == "keep":
        rest.append(s.leaf((s.choice((batch, 1)), seq), s.choice((BOOL, I32)), 0, 2))
    if mask.operand == "bias":
        rest.append(s.leaf((s.choice((1, batch)), s.choice((heads, 1)), seq, seq), F32))
    op = hir.attention(heads, kv_heads, mask, s.choice((None, 0.7)), s.choice((None, 1.5)))
    sinks = [s.leaf((heads,), F32)] if s.coin(3) else []
    return s.one(replace(op, sinks=bool(sinks)), q, k, v, *rest, *sinks)


BLOCKS: tuple[Grow, ...] = (
    *[drawn] * 14, linear, linear, linears, linears, linears, rms_norm, residual, residual, attention, attention,
    tensor_ops.unary, tensor_ops.again,
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
