"""Where a block begins and ends, what it is connected to, and how many heads a value has.

The active value that a stage takes and the one that it returns are marked in the graph: a flow with edits by path marks
them while its stages run (`Builder.marks_blocks`), and `edit_blocks` removes the marks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlx_jax.errors import MissingWeightError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Boundary, Constant, Hir, Leaf, Node, Param, Value
from rlx_jax.ir.ops.norm import Standardize
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Unary
from rlx_jax.ir.ops.shape import Reshape, SplitLast
from rlx_jax.ir.paths import Origin, Path
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.trace.emit import Emit, FlowState, FlowValue

INPUT, OUTPUT = "input", "output"

# Writes a stage for an active value.
Write = Callable[[FlowValue | None], FlowValue | None]


def run_as_block(emit: Emit, write: Write, value: FlowValue | None) -> FlowValue | None:
    """Run a stage, and mark what it takes and returns where it writes one block and nothing outside of it.

    Args:
        write: the stage's `emit`, for the active value.
        value: the active value before the stage.

    Returns:
        The active value after the stage.

    Raises:
        MissingWeightError: the stage reads a weight that no source has, and no edit replaces its block.
    """
    builder = emit.builder
    if not builder.marks_blocks:
        return write(value)
    start, before, repeating = len(builder.nodes), _copy_registers(emit.state), emit.repeating
    active = None if value is None else emit.wrap(builder.boundary("", emit.own(value)))
    outer, emit.opened = emit.opened, (builder.origin.path, {})
    try:
        out = write(active)
    except MissingWeightError as error:
        block = _single(emit.opened[1])
        if emit.stand_in is None or block is None:
            raise
        builder.cut(start + (value is not None))
        emit.state, emit.repeating = before, repeating
        with builder.at(Origin(block)), emit.stage():
            out = emit.stand_in(block, active, error)
        emit.has_stand_ins = True
    finally:
        blocks, emit.opened = emit.opened[1], outer
    block = _single(blocks)
    if block is None or not _is_inside(block, builder.nodes[start:]):
        return out
    if value is not None:
        builder.nodes[start] = replace(builder.nodes[start], op=Boundary(INPUT), origin=Origin(block))
    if out is None:
        return None
    with builder.at(Origin(block)):
        return emit.wrap(builder.boundary(OUTPUT, emit.own(out)))


def _single(blocks: Collection[Path]) -> Path | None:
    """Return the only block, or None."""
    return next(iter(blocks)) if len(blocks) == 1 else None


def _is_inside(block: Path, nodes: Iterable[Node]) -> bool:
    """Return whether all ops among the nodes are part of a block."""
    return all(
        node.origin.path[: len(block)] == block for node in nodes if node.inputs and not isinstance(node.op, Boundary)
    )


def _copy_registers(state: FlowState) -> FlowState:
    """Return the registers as they are now, which later writes to `state` do not change."""
    copies: dict[str, Any] = {name: v.copy() for name, v in vars(state).items() if isinstance(v, dict | list)}
    return replace(state, **copies)


# -- reading the marks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Ports:
    """The values by which a block is connected to the nodes outside of it.

    Attributes:
        enter: the number of the node that marks the active value; None where no stage says it.
        leave: the number of the node that marks what the block returns, likewise.
        read: the active value outside of the block, or, where nothing marks it, all values that the block reads from
            outside, weights and constants aside.
        given: what the block returns, or, where nothing marks it, its values that others read.
        result: the value inside of the block that `given[0]` is.
    """

    enter: int | None
    leave: int | None
    read: tuple[Value, ...]
    given: tuple[Value, ...]
    result: Value

    @property
    def source(self) -> Value | None:
        """The active value outside of the block, if there is a single one."""
        return self.read[0] if len(self.read) == 1 else None

    @property
    def taken(self) -> Value | None:
        """The value that the nodes of the block read as the active one."""
        return self.source if self.enter is None else Value(self.enter)

    @property
    def captured(self) -> tuple[Value, ...]:
        """What a capture of the block gives: a stage that passes its active value on gives what it registers."""
        return self.given[1:] if len(self.given) > 1 and self.given[0].node == self.leave else self.given


class BlockIndex:
    """The nodes of a flow by block, and how each block is connected.

    Args:
        nodes: of the flow. last: its last active value.
    """

    def __init__(self, nodes: Sequence[Node], last: Value) -> None:
        self.nodes = nodes
        self.numbers: dict[Path, list[int]] = {}
        self.readers: dict[Value, list[int]] = {last: [len(nodes)]}
        for number, node in enumerate(nodes):
            for value in node.inputs:
                self.readers.setdefault(value, []).append(number)
            path = node.origin.path if node.inputs else ()
            for end in range(1, len(path) + 1):
                self.numbers.setdefault(path[:end], []).append(number)

    def ports(self, block: Path) -> Ports | None:
        """Return how a block is connected, or None where no node is part of it."""
        numbers = self.numbers.get(block, [])
        if not numbers:
            return None
        inside = set(numbers)
        given = [
            value
            for number in numbers
            for value in (Value(number, index) for index in range(len(self.nodes[number].types)))
            if not inside.issuperset(self.readers.get(value, ()))
        ]
        # A stage that continues a block (`Named(again=True)`) takes what the block has: a mark inside of it.
        enters = [i for i in self._marks(INPUT, block) if self.nodes[i].inputs[0].node not in inside]
        leave = next(reversed(self._marks(OUTPUT, block)), None)
        read = tuple(self.nodes[i].inputs[0] for i in enters) or self._read(numbers, inside)
        enter = enters[0] if enters else None
        if leave is None:
            given = given or [Value(numbers[-1])]
            return Ports(enter, leave, read, tuple(given), given[0])
        result = self.nodes[leave].inputs[0]
        registered = [v for v in given if v.node != leave and self._unmarked(v) != self._unmarked(Value(leave))]
        passed_on = enter is not None and self._unmarked(result) == self._unmarked(Value(enter))
        return Ports(enter, leave, read, (Value(leave), *(registered if passed_on else ())), result)

    def inner(self, block: Path) -> list[Path]:
        """Return the blocks inside of a block."""
        return [path for path in self.numbers if len(path) > len(block) and path[: len(block)] == block]

    def _marks(self, role: str, block: Path) -> list[int]:
        nodes = self.nodes
        return [i for i in self.numbers[block] if nodes[i].op == Boundary(role) and nodes[i].origin.path == block]

    def _read(self, numbers: Iterable[int], inside: set[int]) -> tuple[Value, ...]:
        """Return the inputs and computed values that nodes read from outside, without weights and constants."""
        values = (v for number in numbers for v in self.nodes[number].inputs if v.node not in inside)
        return tuple(dict.fromkeys(v for v in values if not isinstance(self.nodes[v.node].op, Param | Constant)))

    def _unmarked(self, value: Value) -> Value:
        """Return the value that a chain of marks is of."""
        while isinstance(self.nodes[value.node].op, Boundary):
            value = self.nodes[value.node].inputs[0]
        return value


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
