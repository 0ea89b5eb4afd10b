"""What programs make of blocks that know the sequence where rows `[B, S]` are laid out otherwise.

In `packed` they hold several sequences, one after the other, and none sees another. Two inputs say where they are.
`segments` `[batch, seq]` int32: 1, 2, 3 … for the tokens of each sequence of a row, 0 where there is none. `positions`
`[batch, seq]` int32: the place of each token in its own sequence, from 0. An order inside a row is that of its
sequence, so causality and windows hold as they are.

In `padded` they may be padded, and no token reads padding, whatever the flow does with a mask. The input
`attention_mask` `[batch, seq]` says where: 1 for a token, less than ½ for padding. It is the flow's own, or one more
that is optional; without it nothing is padding. Positions count from the beginning of a row, so that padding stands
behind the tokens. What stands at padding in an output means nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from rlx_jax.errors import DeriveError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Input, Node, TypeCache, Value, constant
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.index import Iota, TakeAlongAxis
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Where
from rlx_jax.ir.ops.reduce import Cumsum
from rlx_jax.ir.ops.shape import Reshape, Slice
from rlx_jax.ir.types import TensorType, is_float, symbol
from rlx_jax.lowering.hir.independence import prove

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
EACH = TensorType((symbol("batch"), symbol("seq")), I32)
SEGMENTS, POSITIONS = Input("segments", type=EACH), Input("positions", type=EACH)
ALL = (None, None, None)


def packed_attention(types: TypeCache, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """attention(q, k, v[, keep]) → attention(q, k, v, keep), which keeps keys of the query's own sequence alone"""
    op = node.op
    assert isinstance(op, hir.Attention)
    check_bias(types, op, tuple(map(b.type, inputs)))
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
    # Tokens of one sequence are as far from each other in a row that others share.
    masks = {"keep": keep} | ({} if bias is None else {"bias": bias})
    return b.add(replace(op, extra=tuple(masks)), q, k, v, *masks.values(), *sinks)


def check_bias(types: TypeCache, op: hir.Attention, operands: tuple[TensorType, ...]) -> None:
    """A bias by positions is proved to be one of each query and each key alone: there are other keys in a cache.
    `operands` are those of the attention.

    Raises:
        DeriveError: it is not.
    """
    if op.bias_of is None:
        return
    pairs = PairBias(op.bias_of)
    places = tuple(TensorType((1, symbol(name)), I32) for name in ("queries", "keys"))
    read = operands[3 + len(op.extra) + op.sinks :]
    for name in ("queries", "keys"):
        verdict = types.ask(prove, pairs, (*places, *read), name)
        if not verdict.token_wise:
            raise DeriveError(f"attention's bias is not proved to treat each of the {name} alone: {verdict.reason}")


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


MASK = "attention_mask"
# The input where the flow declares none.
ADDED = Input(MASK, type=EACH)


@dataclass(frozen=True)
class TokenMask:
    """The mask of one program while it is derived; None where nothing is padding.

    `same` are the nodes that hold that mask, by number, of each graph and region.
    """

    mask: Input | None = None
    same: dict[int, set[int]] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, given: Collection[str]) -> TokenMask:
        """That of a flow, whose calls supply the optional inputs `given`.

        Raises:
            DeriveError: its input is no mask over tokens.
        """
        own = next((i for i in graph.inputs if i.input == MASK), None)
        if own is None:
            return TokenMask(ADDED if MASK in given else None)
        if own.type.shape != EACH.shape:
            raise DeriveError(f"input {quote(MASK)} is {own.type}; padded masks tokens by it, [batch, seq]")
        same: dict[int, set[int]] = {}
        _find(graph, own, frozenset(), same)
        return TokenMask(own, same)

    def finish(self, graph: Graph) -> Graph:
        """The program with its input."""
        return replace(graph, inputs=(*graph.inputs, ADDED)) if self.mask is ADDED else graph

    def _is_mask(self, graph: Graph, keep: Value) -> bool:
        """Whether attention is given the mask already, over its keys."""
        batch, *between, keys = graph.type(keep).shape
        over_keys = (batch, keys) == EACH.shape and all(size == 1 for size in between)
        return over_keys and keep.node in self.same.get(id(graph), ())

    def attention(self, b: Builder, graph: Graph, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """attention(q, k, v[, keep]) → the same over those keys that are tokens; None where it is so already"""
        op = node.op
        assert isinstance(op, hir.Attention)
        check_keys(op, *(b.type(x) for x in inputs[:2]))
        given = dict(zip(op.extra, range(3, len(inputs)), strict=False))
        at = given.get("keep")
        if self.mask is None or at is not None and self._is_mask(graph, node.inputs[at]):
            return None
        mask = b.leaf(self.mask)
        if at is None:
            return b.add(replace(op, extra=("keep", *op.extra)), *inputs[:3], mask, *inputs[3:])
        return b.add(op, *inputs[:at], kept_by_both(b, mask, inputs[at]), *inputs[at + 1 :])

    def end_token(self, b: Builder, op: hir.EndToken, x: Value, ids: Value) -> Value:
        """end_token(x, ids) → end_token(x, the ids of tokens), whatever stands behind them"""
        if self.mask is None:
            return b(op, x, ids)
        return b(op, x, b(Where(), kept(b, b.leaf(self.mask)), ids, b.scalar(-1, ids)))


def check_keys(op: hir.Attention, q: TensorType, k: TensorType) -> None:
    """Keys are the tokens, and queries too where the distance of both has a say.

    Raises:
        DeriveError: they are not.
    """
    seq = symbol("seq")
    if k.shape[1] != seq:
        raise DeriveError(f"attention reads keys {k} that are not the tokens alone: padded has no rule for that")
    if (op.causal or op.window is not None) and q.shape[1] != seq:
        raise DeriveError(
            f"attention of queries {q}, which are not the tokens, is causal or in a window: the keys that they read "
            "would hang on how long the row is; use a mask"
        )


def optional_inputs(graph: Graph) -> tuple[Input, ...]:
    """The optional input that the program adds to those of the flow."""
    return () if any(i.input == MASK for i in graph.inputs) else (ADDED,)


def _find(graph: Graph, mask: Input, given: Collection[int], same: dict[int, set[int]]) -> None:
    """The nodes of a graph and its regions that hold `mask`: itself, cast, or with axes of 1 between. `given` are the
    operands of the graph that hold it."""
    found = same[id(graph)] = set()
    for number, node in enumerate(graph.nodes):
        op = node.op
        if isinstance(op, BodyInput):
            holds = op.index in given
        elif isinstance(op, CastTo | Slice):
            holds = node.inputs[0].node in found and _is_whole(op, graph.type(node.inputs[0]))
        else:
            holds = op == mask
        if holds:
            found.add(number)
        shared = [i for i, v in enumerate(node.inputs) if v.node in found and i >= op.carried()]
        for region in op.regions():
            _find(region, mask, shared, same)


def _is_whole(op: CastTo | Slice, x: TensorType) -> bool:
    """Whether it keeps what a mask says: of floats a cast may not, which would round them."""
    if isinstance(op, CastTo):
        return not is_float(x.dtype)
    return all(k is None or k is Ellipsis or k == (None, None, None) for k in op.key)
