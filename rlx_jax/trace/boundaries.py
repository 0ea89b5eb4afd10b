"""Where a block begins and ends: the active value that a stage takes and the one that it returns, marked in the graph.

A flow with edits by path marks them while its stages run (`Builder.marks_blocks`); `edit_blocks` removes the marks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rlx_jax.errors import MissingWeightError
from rlx_jax.ir.graph import Boundary, Constant, Node, Param, Value
from rlx_jax.ir.paths import Origin, Path
from rlx_jax.trace.emit import Emit, FlowState, FlowValue

INPUT, OUTPUT = "input", "output"
# The mark of a stage that turned out to be no block.
UNUSED = Boundary("")

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
    values: dict[str, Any] = {field.name: getattr(state, field.name) for field in fields(state)}
    copies = {name: v.copy() for name, v in values.items() if isinstance(v, dict | list)}
    return FlowState(**(values | copies))


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
        self.readers: dict[Value, list[int]] = {Value(last.node, last.index): [len(nodes)]}
        for number, node in enumerate(nodes):
            for value in node.inputs:
                self.readers.setdefault(Value(value.node, value.index), []).append(number)
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
