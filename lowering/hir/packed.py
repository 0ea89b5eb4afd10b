"""What the program `packed` makes of blocks that know the sequence: rows `[B, S]` hold several sequences, one after
the other, and none sees another.

Two inputs say where they are. `segments` `[batch, seq]` int32: 1, 2, 3 … for the tokens of each sequence of a row, 0
where there is none. `positions` `[batch, seq]` int32: the place of each token in its own sequence, from 0. An order
inside a row is that of its sequence, so causality and windows hold as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlx_jax.errors import DeriveError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Input, Node, Value, constant
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.index import Iota, TakeAlongAxis
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Where
from rlx_jax.ir.ops.reduce import Cumsum
from rlx_jax.ir.ops.shape import Reshape, Slice
from rlx_jax.ir.types import TensorType, symbol

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
EACH = TensorType((symbol("batch"), symbol("seq")), I32)
SEGMENTS, POSITIONS = Input("segments", type=EACH), Input("positions", type=EACH)
ALL = (None, None, None)


def attention(b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """attention(q, k, v[, keep]) → attention(q, k, v, keep), which keeps keys of the query's own sequence alone"""
    op = node.op
    assert isinstance(op, hir.Attention)
    q, k, v, *extra = inputs
    given, read = dict(zip(op.extra, extra, strict=False)), extra[len(op.extra) :]
    keeps, bias = given.pop("keep", None), given.pop("bias", None) if op.by_distance else None
    if given:
        raise DeriveError(
            f"attention reads the operand {op.extra[-1]!r}, which is laid out for rows of one sequence: packed has no "
            "rule for that"
        )
    if op.last or any(b.type(x).shape[1] != symbol("seq") for x in (q, k)):
        raise DeriveError(f"attention reads keys {b.type(k)} of another sequence: there is no packed rule for that")
    segments = b.leaf(SEGMENTS)
    keep = b(Compare("eq"), b(Slice((ALL, None, ALL, None)), segments), b(Slice((ALL, None, None, ALL)), segments))
    if keeps is not None:
        keep = kept_by_both(b, keep, keeps)
    if op.bias_of is not None:
        places = b.leaf(POSITIONS)
        bias, op = b(PairBias(op.bias_of), places, places, *read[op.sinks :]), replace(op, bias_of=None)
    sinks = read[: op.sinks]
    if bias is not None:  # tokens of one sequence are as far from each other in a row that others share
        return b.add(replace(op, extra=("keep", "bias")), q, k, v, keep, bias, *sinks)
    return b.add(replace(op, extra=("keep",)), q, k, v, keep, *sinks)


def kept_by_both(b: Builder, one: Value, other: Value) -> Value:
    """The keys that two masks keep, each `[B|1, T]` or `[B|1, N|1, S|1, T]`."""
    if b.type(one).rank != b.type(other).rank:
        one, other = (x if b.type(x).rank == 4 else b(Slice((ALL, None, None, ALL)), x) for x in (one, other))
    return b(Where(), kept(b, one), b(CastTo(F32), other), b.leaf(constant(0.0, F32)))


def kept(b: Builder, mask: Value) -> Value:
    """What a mask keeps, as bools."""
    if b.type(mask).dtype == np.bool_:
        return mask
    wide = b(CastTo(F32), mask)
    return b(Compare("ge"), wide, b.scalar(0.5, wide))


def counted_positions(b: Builder, op: hir.CountedPositions, ids: Value) -> tuple[Value, ...]:
    """counted_positions(ids) → the same without what was counted before the token's own sequence"""
    counts = b(CastTo(I32), b(Compare("ne"), ids, b.scalar(op.padding, ids)))
    first = b(Binary("sub"), b(Reshape((1, -1)), b(Iota(1), ids)), b.leaf(POSITIONS))
    before = b(TakeAlongAxis(1, "clip"), b(Cumsum(1, exclusive=True), counts), first)
    place = b(Binary("mul"), b(Binary("sub"), b(Cumsum(1), counts), before), counts)
    return (b(Binary("add"), place, b.scalar(op.padding, place)),)
