"""Rules for the programs `packed` and `padded`, which interpret rows `[B, S]` of tokens differently.

In `packed` a row contains several sequences, one after the other, and tokens attend within their own sequence. Two
inputs describe the rows. `segments` `[batch, seq]` int32 numbers the sequences of a row: 1, 2, 3 … for their tokens, 0
for unused positions. `positions` `[batch, seq]` int32 is the index of each token in its own sequence, from 0. Tokens of
a sequence are in order within the row, so causality and windows apply unchanged. With `last_only` outputs are those of
the tokens of each row at `selected` `[batch, selected]` int32: `[batch, selected, …]`.

In `padded` a row may end in padding, which no token reads, whatever the flow does with a mask. The input
`attention_mask` `[batch, seq]` marks it: 1 for a token, less than ½ for padding. It is the flow's own input of that
name, or an additional optional one; without it, every position is a token. Positions count from the beginning of a row,
so padding comes after the tokens. Outputs at padding are meaningless.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import DeriveError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Input, Node, TypeCache, Value, constant
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.index import Iota, TakeAlongAxis
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Where
from rlx_jax.ir.ops.reduce import Cumsum
from rlx_jax.ir.ops.shape import Reshape, Slice
from rlx_jax.ir.types import F32, I32, TensorType, is_float, symbol
from rlx_jax.lowering.hir.independence import prove

PER_TOKEN = TensorType((symbol("batch"), symbol("seq")), I32)
SEGMENTS, POSITIONS = Input("segments", type=PER_TOKEN), Input("positions", type=PER_TOKEN)
SELECTED = Input("selected", type=TensorType((symbol("batch"), symbol("selected")), I32))
FULL = (None, None, None)


def packed_attention(types: TypeCache, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Rewrite attention(q, k, v[, keep]) → attention(q, k, v, keep), masking keys of other sequences.

    Raises:
        DeriveError: attention reads keys of another input, or an operand that has no meaning for packed rows.
    """
    op = node.op
    assert isinstance(op, hir.Attention)
    check_bias(types, op, tuple(map(b.type, inputs)))
    q, k, v, *extra = inputs
    operands, other_operands = dict(zip(op.extra, extra, strict=False)), extra[len(op.extra) :]
    flow_keep, bias = operands.pop("keep", None), operands.pop("bias", None) if op.by_distance else None
    if operands:
        raise DeriveError(
            f"attention reads the operand {op.extra[-1]!r}, which is laid out for rows of one sequence: packed has no "
            "rule for that"
        )
    if op.last or any(b.type(x).shape[1] != symbol("seq") for x in (q, k)):
        raise DeriveError(f"attention reads keys {b.type(k)} of another sequence: there is no packed rule for that")
    segments = b.leaf(SEGMENTS)
    keep = b(Compare("eq"), b(Slice((FULL, None, FULL, None)), segments), b(Slice((FULL, None, None, FULL)), segments))
    if flow_keep is not None:
        keep = combine_masks(b, keep, flow_keep)
    if op.bias_of is not None:
        positions = b.leaf(POSITIONS)
        bias, op = b(PairBias(op.bias_of), positions, positions, *other_operands[op.sinks :]), replace(op, bias_of=None)
    sinks = other_operands[: op.sinks]
    # A bias by distance stays valid: two tokens of one sequence have the same distance in a packed row.
    masks = {"keep": keep} | ({} if bias is None else {"bias": bias})
    return b.add(replace(op, extra=tuple(masks)), q, k, v, *masks.values(), *sinks)


def check_bias(types: TypeCache, op: hir.Attention, operands: tuple[TensorType, ...]) -> None:
    """Check that an attention bias by positions is computed for each pair of a query and a key independently.

    Otherwise it would change with the other keys, such as those in a cache.

    Args:
        types: the cache that also remembers proofs.
        op: the attention.
        operands: the types of its operands.

    Raises:
        DeriveError: there is no proof.
    """
    if op.bias_of is None:
        return
    pairs = PairBias(op.bias_of)
    positions = tuple(TensorType((1, symbol(name)), I32) for name in ("queries", "keys"))
    bias_operands = operands[3 + len(op.extra) + op.sinks :]
    for name in ("queries", "keys"):
        verdict = types.cached(prove, pairs, (*positions, *bias_operands), name)
        if not verdict.token_wise:
            raise DeriveError(f"attention's bias is not proved to treat {name} independently: {verdict.reason}")


def combine_masks(b: Builder, one: Value, other: Value) -> Value:
    """Return the conjunction of two keep masks, each `[B|1, T]` or `[B|1, N|1, S|1, T]`."""
    if b.type(one).rank != b.type(other).rank:
        one, other = (x if b.type(x).rank == 4 else b(Slice((FULL, None, None, FULL)), x) for x in (one, other))
    return b(Where(), to_bool_mask(b, one), b(CastTo(F32), other), b.leaf(constant(0.0, F32)))


def to_bool_mask(b: Builder, mask: Value) -> Value:
    """Return a keep mask as bools: numbers of at least ½ are True."""
    if b.type(mask).dtype == np.bool_:
        return mask
    wide = b(CastTo(F32), mask)  # the threshold ½ needs a float, and masks may be integers
    return b(Compare("ge"), wide, b.scalar(0.5, wide))


def counted_positions(b: Builder, op: hir.CountedPositions, ids: Value) -> tuple[Value, ...]:
    """Rewrite counted_positions(ids) so that counting starts over in each sequence of a row.

    Returns:
        The positions of the row's tokens, less the count up to the beginning of the token's own sequence.
    """
    counts = b(CastTo(I32), b(Compare("ne"), ids, b.scalar(op.padding, ids)))
    sequence_start = b(Binary("sub"), b(Reshape((1, -1)), b(Iota(1), ids)), b.leaf(POSITIONS))
    preceding_count = b(TakeAlongAxis(1, "clip"), b(Cumsum(1, exclusive=True), counts), sequence_start)
    position = b(Binary("mul"), b(Binary("sub"), b(Cumsum(1), counts), preceding_count), counts)
    return (b(Binary("add"), position, b.scalar(op.padding, position)),)


MASK = "attention_mask"
# The input that is added to a flow without one of that name.
ADDED_MASK = Input(MASK, type=PER_TOKEN)


@dataclass(frozen=True)
class TokenMask:
    """The token mask of a `padded` program while it is derived.

    Attributes:
        mask: the mask input; None if there is no padding.
        nodes_by_graph: the numbers of the nodes that are equal to the mask, by the id of their graph or region.
    """

    mask: Input | None = None
    nodes_by_graph: dict[int, set[int]] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, supplied: Collection[str]) -> TokenMask:
        """Return the token mask of a flow.

        Args:
            graph: the flow's HIR.
            supplied: names of the optional inputs that calls will supply.

        Raises:
            DeriveError: the flow's input of that name is not of shape `[batch, seq]`.
        """
        mask_input = next((i for i in graph.inputs if i.input == MASK), None)
        if mask_input is None:
            return TokenMask(ADDED_MASK if MASK in supplied else None)
        if mask_input.type.shape != PER_TOKEN.shape:
            raise DeriveError(f"input {quote(MASK)} is {mask_input.type}; padded expects the token mask, [batch, seq]")
        nodes_by_graph: dict[int, set[int]] = {}
        _find_mask_nodes(graph, mask_input, frozenset(), nodes_by_graph)
        return TokenMask(mask_input, nodes_by_graph)

    def finish(self, graph: Graph) -> Graph:
        """Return the program with the mask added to its inputs, if the flow has none."""
        return replace(graph, inputs=(*graph.inputs, ADDED_MASK)) if self.mask is ADDED_MASK else graph

    def _is_mask(self, graph: Graph, keep: Value) -> bool:
        """Return whether `keep`, an operand of attention, already is the token mask over its keys."""
        batch, *between, keys = graph.type(keep).shape
        over_keys = (batch, keys) == PER_TOKEN.shape and all(size == 1 for size in between)
        return over_keys and keep.node in self.nodes_by_graph.get(id(graph), ())

    def attention(self, b: Builder, graph: Graph, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """Rewrite attention(q, k, v[, keep]) so that it reads no padding; None if it does not anyway."""
        op = node.op
        assert isinstance(op, hir.Attention)
        check_keys(op, *(b.type(x) for x in inputs[:2]))
        operand_index = dict(zip(op.extra, range(3, len(inputs)), strict=False))
        keep_index = operand_index.get("keep")
        if self.mask is None or keep_index is not None and self._is_mask(graph, node.inputs[keep_index]):
            return None
        mask = b.leaf(self.mask)
        if keep_index is None:
            return b.add(replace(op, extra=("keep", *op.extra)), *inputs[:3], mask, *inputs[3:])
        return b.add(op, *inputs[:keep_index], combine_masks(b, mask, inputs[keep_index]), *inputs[keep_index + 1 :])

    def end_token(self, b: Builder, op: hir.EndToken, x: Value, ids: Value) -> Value:
        """Rewrite end_token(x, ids) so that ids at padding never match: they are replaced by −1."""
        if self.mask is None:
            return b(op, x, ids)
        return b(op, x, b(Where(), to_bool_mask(b, b.leaf(self.mask)), ids, b.scalar(-1, ids)))


def check_keys(op: hir.Attention, q: TensorType, k: TensorType) -> None:
    """Check that the keys are the tokens, and so are the queries of causal or windowed attention.

    Raises:
        DeriveError: they have another size.
    """
    seq = symbol("seq")
    if k.shape[1] != seq:
        raise DeriveError(f"attention reads keys {k} that are not only the tokens: padded has no rule for that")
    if (op.causal or op.window is not None) and q.shape[1] != seq:
        raise DeriveError(
            f"attention of queries {q}, which are not the tokens, is causal or has a window: the keys that they read "
            "would depend on the length of the row; use a mask"
        )


def optional_inputs(graph: Graph) -> tuple[Input, ...]:
    """Return the optional input that the program adds to the flow's inputs, if any."""
    return () if any(i.input == MASK for i in graph.inputs) else (ADDED_MASK,)


def _find_mask_nodes(
    graph: Graph, mask: Input, equal_operands: Collection[int], nodes_by_graph: dict[int, set[int]]
) -> None:
    """Find the nodes of a graph and its regions that are equal to a mask: itself, cast, or with axes of size 1 added.

    Args:
        graph: the graph or region.
        mask: the mask input.
        equal_operands: indices of the region's operands that are equal to the mask.
        nodes_by_graph: the result by graph id, extended in place.
    """
    mask_nodes = nodes_by_graph[id(graph)] = set()
    for number, node in enumerate(graph.nodes):
        op = node.op
        if isinstance(op, BodyInput):
            is_equal = op.index in equal_operands
        elif isinstance(op, CastTo | Slice):
            is_equal = node.inputs[0].node in mask_nodes and _keeps_all_values(op, graph.type(node.inputs[0]))
        else:
            is_equal = op == mask
        if is_equal:
            mask_nodes.add(number)
        # Operands that a region carries change from step to step.
        shared = [i for i, v in enumerate(node.inputs) if v.node in mask_nodes and i >= op.num_carries()]
        for region in op.regions():
            _find_mask_nodes(region, mask, shared, nodes_by_graph)


def _keeps_all_values(op: CastTo | Slice, x: TensorType) -> bool:
    """Return whether the op keeps all values of a mask: a cast of floats does not, as it may round them."""
    if isinstance(op, CastTo):
        return not is_float(x.dtype)
    return all(k is None or k is Ellipsis or k == (None, None, None) for k in op.key)
