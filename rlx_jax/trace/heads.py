"""How many heads stand side by side on the last axis of a value, as the ops around it say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Boundary, Hir, Leaf, Node, Value
from rlx_jax.ir.ops.norm import Standardize
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Unary
from rlx_jax.ir.ops.shape import Reshape, SplitLast
from rlx_jax.ir.types import TensorType, is_static

# What leaves columns where they are.
KEEPS = (Boundary, Unary, Binary, CastTo, Standardize, hir.Rope, hir.RmsNorm, hir.LayerNorm, hir.GatedFfn)
# Behind and before these a column is another one, or nothing reads it as one of a head.
ENDS = (Leaf, hir.Linear, hir.Embed, hir.FirstToken, hir.LastToken, hir.EndToken)


@dataclass(frozen=True)
class HeadCounts:
    """What is said of a value: the numbers of heads by blocks that have heads, those that a reshape cuts it into, and
    whether an op was met that may know and cannot be asked."""

    said: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()
    unread: bool = False

    @property
    def known(self) -> frozenset[int]:
        """The numbers that it may be: a norm of groups cuts too, so that a block's word counts first."""
        return self.said or self.cut

    def __or__(self, other: HeadCounts) -> HeadCounts:
        return HeadCounts(self.said | other.said, self.cut | other.cut, self.unread or other.unread)


UNREAD = HeadCounts(unread=True)


class HeadsAround:
    """The nodes of a flow, asked for the heads of their values."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.readers: dict[Value, list[tuple[int, int]]] = {}
        for number, node in enumerate(nodes):
            for place, value in enumerate(node.inputs):
                self.readers.setdefault(value, []).append((number, place))

    def of(self, value: Value) -> HeadCounts:
        """What is said of a value by what reads it and by what it was made of, as far as columns stay in place."""
        return self._behind(value) | self._before(value)

    def type(self, value: Value) -> TensorType:
        """The type of a value."""
        return self.nodes[value.node].types[value.index]

    def _behind(self, value: Value) -> HeadCounts:
        found, todo, seen = HeadCounts(), [value], {value}
        while todo:
            for number, place in self.readers.get(todo.pop(), ()):
                op, made = self.nodes[number].op, Value(number)
                if isinstance(op, hir.Split | SplitLast):
                    found |= self._parts(number)
                    continue
                found |= self._said(number, place)
                if isinstance(op, KEEPS + (Reshape,)) and made not in seen:
                    todo.append(made)
                    seen.add(made)
        return found

    def _before(self, value: Value) -> HeadCounts:
        found, todo, seen = HeadCounts(), [value], {value}
        while todo:
            at = todo.pop()
            found |= self._said(at.node, None)
            node = self.nodes[at.node]
            if isinstance(node.op, KEEPS + (Reshape,)):
                like = isinstance(node.op, Reshape)
                more = {v for v in node.inputs if like or self.type(v).shape == self.type(at).shape} - seen
                todo += more
                seen |= more
        return found

    def _said(self, number: int, place: int | None) -> HeadCounts:
        """By one node of its operand, or of its result."""
        node = self.nodes[number]
        packed = node.op.packed(place) if isinstance(node.op, Hir) else None
        if packed is not None:
            return HeadCounts(frozenset({packed}))
        if isinstance(node.op, Reshape):
            cut = _heads_cut(self.type(node.inputs[0]), node.types[0])
            return UNREAD if cut is None else HeadCounts(cut=frozenset({cut}))
        return HeadCounts() if isinstance(node.op, KEEPS + ENDS) else UNREAD

    def _parts(self, number: int) -> HeadCounts:
        """Of queries, keys and values side by side: as many as all of them have, where all heads are equally wide."""
        parts = [Value(number, index) for index in range(len(self.nodes[number].types))]
        counts, wide = [self._behind(part).said for part in parts], [self.type(part).shape[-1] for part in parts]
        if any(len(said) != 1 for said in counts) or not all(map(is_static, wide)):
            return UNREAD
        heads = [min(said) for said in counts]
        even = all(int(w) * heads[0] == int(wide[0]) * n for w, n in zip(wide, heads, strict=True))
        return HeadCounts(frozenset({sum(heads)})) if even else UNREAD


def _heads_cut(before: TensorType, after: TensorType) -> int | None:
    """N, of `[…, N·D]` as `[…, N, D]` or back."""
    packed, apart = (before, after) if before.rank < after.rank else (after, before)
    fits = apart.rank == packed.rank + 1 and apart.shape[:-2] == packed.shape[:-1] and is_static(apart.shape[-2])
    return int(apart.shape[-2]) if fits else None
