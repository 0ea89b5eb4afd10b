"""Blocks changed by their paths, when all stages have run: `edit_blocks` writes the flow once more, with the blocks
that a pattern matches handed to a function.

A block is the nodes whose path begins with its own, whatever stages or parts of stages wrote them. It is known by that
path alone, so that an edit holds for layers that become a region and for those that do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import jax

from rlx_jax.errors import GraphError, MissingWeightError, ShapeError, listing, quote, shown
from rlx_jax.ir.graph import Boundary, Builder, Leaf, Node, Value, located
from rlx_jax.ir.hir import Linear
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.paths import Origin, Path, path_text
from rlx_jax.trace.block_selection import BlockPattern, BlockSelector, BlocksReading
from rlx_jax.trace.boundaries import OUTPUT, BlockIndex, HeadsAround, Ports
from rlx_jax.trace.checks import check_takes
from rlx_jax.trace.emit import Emit, FlowState
from rlx_jax.trace.flow_value import FlowValue

# A block as a function: it is written at that place, with this value in the place of what it reads.
Inner = Callable[[FlowValue | None], FlowValue]

# `(emit, x, inner) → y`: x is what a block takes, `inner(x)` what it returns, y what later blocks read instead.
BlockWrapper = Callable[[Emit, Any, Inner], FlowValue]


@runtime_checkable
class ChecksBlock(Protocol):
    """A wrapper that holds what it was given against the block as it was."""

    def check_block(self, around: HeadsAround, read: Value | None, given: Value, where: str) -> None:
        """The value that a block reads, and the one that it gives, among the nodes of before."""


@dataclass(frozen=True)
class BlockEdit:
    """Every block that is selected, changed by `wrapper`; one that takes no input works on blocks without one."""

    blocks: BlockSelector
    wrapper: BlockWrapper
    takes_input: bool = True


@dataclass(frozen=True)
class CapturedBlock:
    """What each block returns becomes a side output under its path, or one of those that are stacked under a name."""

    stacked: str = ""

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        return inner(x)


# What the block of an activation is called.
ACT = "act"


def edit_blocks(
    emit: Emit, value: FlowValue, edits: Sequence[BlockEdit], where: str, elsewhere: Sequence[str] = ()
) -> FlowValue:
    """The flow with all edits, each over what the one before left; its active value. `elsewhere`: the parts of a model
    that other flows hold, for which an edit may be.

    Raises:
        GraphError: a pattern matches no block, or what it matches is not one; a wrapper returns no value.
    """
    if not edits:
        return value
    value = _Rewriting(emit, NOTHING, where).run(value)
    captures: list[tuple[str, Path]] = []
    for edit in edits:
        here = replace(edit, blocks=edit.blocks.beside(elsewhere)) if elsewhere else edit
        if emit.has_stand_ins and isinstance(here.blocks, BlockPattern) and not isinstance(edit.wrapper, CapturedBlock):
            here = replace(here, blocks=replace(here.blocks, may_lack=True))  # of a block that is replaced later
        if isinstance(edit.wrapper, CapturedBlock):
            blocks = _in_order(here.blocks.among(emit.builder.nodes, where), emit.builder.nodes)
            captures += [(edit.wrapper.stacked, block) for block in blocks]
        else:
            value = _Rewriting(emit, here, where).run(value)
    _capture(emit, captures, value, where)
    return _Rewriting(emit, NOTHING, where, marks_blocks=False).run(value)


def run_stand_in(
    emit: Emit, edits: Sequence[BlockEdit], block: Path, x: FlowValue | None, error: MissingWeightError
) -> FlowValue:
    """Write what replaces a block, one of whose weights is missing, so that the stages after it can run.

    The edits are made later, in their order, as if the block itself had run.

    Raises:
        MissingWeightError: no edit replaces the block.
    """

    def inner(value: FlowValue | None) -> FlowValue:
        raise error

    for edit in edits:
        if isinstance(edit.blocks, BlockPattern) and edit.blocks.matches(block):
            with contextlib.suppress(MissingWeightError), emit.users_code():
                return edit.wrapper(emit, x, inner)
    raise error


# The flow is written again as it is: with activations apart, and without the marks that mean nothing.
NOTHING = BlockEdit(BlocksReading(frozenset()), lambda emit, x, inner: inner(x))


def _in_order(blocks: Iterable[Path], nodes: Sequence[Node]) -> list[Path]:
    """Sort blocks by where they end, inner ones first."""
    last = {
        path[:end]: i for i, node in enumerate(nodes) for path in [node.origin.path] for end in range(len(path) + 1)
    }
    return sorted(blocks, key=lambda block: (last[block], -len(block)))


def _capture(emit: Emit, captures: Sequence[tuple[str, Path]], value: FlowValue, where: str) -> None:
    """Make what blocks return side outputs, after all edits: a captured block that is edited later gives what it
    returns then.

    Args:
        captures: for each block the name of the stacked output, or "", and its path.
        value: the last active value of the flow.

    Raises:
        GraphError: a later edit replaced the block, or a stage has a side output of that name.
        ShapeError: blocks that are stacked return values of several types, or one returns several values.
    """
    index, own = BlockIndex(emit.builder.nodes, emit.own(value)), set(emit.state.outputs)
    stacks = dict[str, dict[str, FlowValue]]()
    for stacked, block in captures:
        ports, path = index.ports(block), path_text(block)
        if ports is None:
            raise GraphError(f"{where}: at({path!r}): a later edit replaced the block around it; capture it after that")
        values = [emit.wrap(v) for v in ports.captured]
        if stacked and len(values) > 1:
            raise ShapeError(
                f"{where}: at({stacked!r}): {path} returns {len(values)} values: capture it without stacked"
            )
        name = stacked or path
        if name in own:
            raise GraphError(f"{where}: at({name!r}): the flow has a side output {quote(name)} already")
        if stacked:
            emit.state.outputs[stacked] = values[0]  # keeps its place among the outputs
            stacks.setdefault(stacked, {})[path] = values[0]
        else:
            names = [path] if len(values) == 1 else [f"{path}[{i}]" for i in range(len(values))]
            emit.state.outputs |= dict(zip(names, values, strict=True))
    for stacked, by_path in stacks.items():
        emit.state.outputs[stacked] = _stack(emit, stacked, by_path, where)


def _stack(emit: Emit, name: str, values: Mapping[str, FlowValue], where: str) -> FlowValue:
    (first, known), *others = values.items()
    for path, value in others:
        if value.type != known.type:
            raise ShapeError(
                f"{where}: at({name!r}): stacked blocks give values of one type; {first} gives {known.type}, {path} "
                f"{value.type}: capture them apart"
            )
    with emit.scope("captured"):
        return emit.stack(list(values.values()))


@dataclass
class _Layers:
    """A Repeat: the numbers at which its layers start and the number behind them, before and after."""

    before: list[int]
    after: list[int | None]

    def inside(self, numbers: Sequence[int]) -> bool:
        """Whether all of it is among `numbers`, of which none is missing between the first and the last."""
        return bool(numbers) and numbers[0] <= self.before[0] and self.before[-1] <= numbers[-1] + 1

    def around(self, numbers: Sequence[int]) -> bool:
        """Whether it is around the first of `numbers`."""
        return self.before[0] <= numbers[0] < self.before[-1]

    def reached(self, number: int, written: int) -> None:
        """All that stood before `number` is written."""
        for place, start in enumerate(self.before):
            if start <= number and self.after[place] is None:
                self.after[place] = written


@dataclass
class _Values:
    """What the values of before are now; inside of a block its own, and then those around it."""

    own: dict[Value, Value]
    around: _Values | None = None
    renamed: tuple[Path, Path] = ((), ())

    def find(self, value: Value) -> Value | None:
        found = self.own.get(value)
        return self.around.find(value) if found is None and self.around is not None else found

    def path(self, path: Path) -> Path:
        """A path as it is now: a block that is written twice has a name of its own the second time."""
        before, now = self.renamed
        path = (*now, *path[len(before) :]) if path[: len(before)] == before else path
        return path if self.around is None else self.around.path(path)


class _Rewriting:
    """One edit of one flow."""

    def __init__(self, emit: Emit, edit: BlockEdit, where: str, marks_blocks: bool = True) -> None:
        self.emit, self.edit, self.where = emit, edit, where
        self.old: tuple[Node, ...] = tuple(emit.builder.nodes)
        self.state, self.inputs = emit.state, list(emit.builder.inputs)
        self.new = Builder(emit.builder.name, emit.builder.types)
        self.new.marks_blocks = marks_blocks
        self.resized = ""
        self.solid = [i for i, node in enumerate(self.old) if not isinstance(node.op, Leaf)]
        self.selected = edit.blocks.among(self.old, where)
        self.blocks: dict[Path, list[int]] = {}
        for number in self.solid:
            for block in self._matched(self.old[number].origin.path):
                self.blocks.setdefault(block, []).append(number)
        self.layers = [_Layers(self._starts(bounds), [None] * len(bounds)) for bounds in emit.state.repeats]

    @property
    def _what(self) -> str:
        return f"{self.where}: {self.edit.blocks}"

    def run(self, value: FlowValue) -> FlowValue:
        """Write the flow again; its active value."""
        emit, registers = self.emit, self.state
        self.index = BlockIndex(self.old, value.value)
        emit.builder, self.new.inputs = self.new, self.inputs
        emit.state = FlowState(registers.program, contracts=registers.contracts, left_none=registers.left_none)
        top = _Values({})
        self._write(self.solid, (), top, self.layers)
        emit.state.outputs, made = {}, emit.state.outputs
        self._carry_over(top)
        for name, output in made.items():
            if emit.state.outputs.setdefault(name, output).value != output.value:
                raise GraphError(f"{self._what}: the flow has a side output {quote(name)} already")
        kept = [[n for n in found.after if n is not None] for found in self.layers]
        emit.state.repeats += [new for new, found in zip(kept, self.layers, strict=True) if None not in found.after]
        return emit.wrap(self._now(value.value, top))

    # -- walking -----------------------------------------------------------------------------

    def _write(self, numbers: Sequence[int], around: Path, values: _Values, layers: Sequence[_Layers]) -> None:
        """Write nodes again, those of the blocks among them through the wrapper."""
        done: set[int] = set()
        for number in numbers:
            if number in done:
                continue
            block = next((b for b in self._matched(self.old[number].origin.path) if len(b) > len(around)), None)
            inside = [] if block is None else self.blocks[block]
            layers = [found for found in layers if not found.inside(inside)]
            for found in layers:
                found.reached(number, len(self.new.nodes))
            if block is None:
                self._copy(number, values)
                continue
            left = [n for n in numbers if n not in done]
            before = self._needed(block, inside, [n for n in left if inside[0] < n < inside[-1]])
            if not set(inside) <= set(left):
                raise self._not_one(block)
            self._write(before, around, values, ())
            self._block(block, inside, values)
            done |= {*inside, *before}
        for found in layers if numbers else ():
            found.reached(numbers[-1] + 1, len(self.new.nodes))

    def _needed(self, block: Path, inside: Sequence[int], between: Sequence[int]) -> list[int]:
        """The nodes that stand among those of a block and do not read them, which go before it."""
        mine, behind = set(inside), set(inside)
        for number in between:
            if number in mine:
                late = any(v.node in behind - mine for v in self.old[number].inputs)
                if late:
                    raise self._not_one(block)
            elif any(v.node in behind for v in self.old[number].inputs):
                behind.add(number)
        last = self.old[inside[-1]]
        if any(v.node in behind - mine for v in last.inputs):
            raise self._not_one(block)
        return [n for n in between if n not in behind]

    def _copy(self, number: int, values: _Values) -> None:
        node = self.old[number]
        origin = replace(node.origin, path=values.path(node.origin.path))
        op = node.op
        # An activation in one op with a product is a block of its own for edits: `mlp.c_fc` is the product alone.
        activation = op.activation if isinstance(op, Linear) else ""
        # Marks of a block that this edit changes are inside of new ones.
        if isinstance(op, Boundary) and (not op.role or not self.new.marks_blocks or node.origin.path in self.selected):
            values.own[Value(number)] = self._now(node.inputs[0], values)
            return
        try:
            with self.new.at(origin), located(origin):
                bare = replace(op, activation="") if isinstance(op, Linear) else op
                made = self.new.add(bare, *(self._now(v, values) for v in node.inputs))
            if activation:
                with self.new.at(replace(origin, path=(*origin.path[:-1], ACT))):
                    made = self.new.add(Unary(activation), *made)
        except ShapeError as error:
            if self.resized:
                error.args = (f"{str(error).rstrip('.')}; {self.resized}",)
            raise
        values.own.update({Value(number, i): v for i, v in enumerate(made)})

    def _block(self, block: Path, numbers: Sequence[int], values: _Values) -> None:
        """Let the wrapper write a block."""
        emit, ports = self.emit, self._ports(block)
        read, given = ports.taken, ports.given[0]
        path, written = values.path(block), 0
        inner_values = _Values({}, values)
        covered = [found for found in self.layers if found.inside(numbers)]
        body = [n for n in numbers if n not in (ports.enter, ports.leave)]

        def inner(x: FlowValue | None) -> FlowValue:
            nonlocal written, inner_values
            written += 1
            known = {} if read is None else {read: emit.own(emit.require(x, "inner"))}
            inner_values = _Values(known, values, (block, block if written == 1 else (*block, f"again_{written}")))
            for found in covered:
                found.after = [None] * len(found.before)
            self._write(body, block, inner_values, covered)
            return emit.wrap(self._now(ports.result, inner_values))

        self._carry_over(values)
        emit.state.contracts, promised = [], emit.state.contracts
        # A Repeat that is written here is part of the layer that it stands in.
        emit.repeating = any(found not in covered and found.around(numbers) for found in self.layers)
        with self.new.at(Origin(path)), emit.stage(), emit.users_code():
            x = None if ports.source is None else emit.block_input(emit.wrap(self._now(ports.source, values)))
            check_takes(self.edit.wrapper, ("emit", "x", "inner"), path_text(path))
            if isinstance(self.edit.wrapper, ChecksBlock):
                self.edit.wrapper.check_block(HeadsAround(self.old), read, given, path_text(path))
            made = self.edit.wrapper(emit, x, inner)
            if not isinstance(made, FlowValue):
                raise GraphError(
                    f"{path_text(path)}: what changes a block returns the value that it gives, got {shown(made)}"
                )
            values.own |= {v: now for v, now in inner_values.own.items() if v.node in set(numbers)}
            values.own[given] = self.new.boundary(OUTPUT, emit.own(made))
            before = self.old[given.node].types[given.index]
            if made.type.shape != before.shape:
                self.resized = f"{path_text(path)} gave {before} before it was changed, and {made.type} now"
        emit.repeating = False
        within = f"{path_text(block)}."
        gone = [] if written else [c for c in promised if f"{c.path}.".startswith(within)]
        emit.state.contracts = [c for c in promised if c not in gone] + emit.state.contracts

    # -- values ------------------------------------------------------------------------------

    def _now(self, value: Value, values: _Values) -> Value:
        """What a value of before is now."""
        found = values.find(value)
        if found is not None:
            return found
        node = self.old[value.node]
        if isinstance(node.op, Leaf):
            with self.new.at(node.origin):
                return self.new.leaf(node.op)
        raise GraphError(
            f"{self._what}: the block that was replaced gave a second value, "
            f"{node.types[value.index]} of {path_text(node.origin.path)}, which others read: wrap it, and call inner"
        )

    def _ports(self, block: Path) -> Ports:
        """The values by which a block that is edited is connected.

        Raises:
            GraphError: it has no single active value, or returns several.
        """
        ports = self.index.ports(block)
        assert ports is not None  # a node is part of it
        if len(ports.given) > 1:
            types = ", ".join(str(self.old[v.node].types[v.index]) for v in ports.given)
            raise GraphError(
                f"{self._what}: {path_text(block)} gives {len(ports.given)} values that others "
                f"read ({types}), and an edit is of one: take a block around it or inside of it"
            )
        if len(ports.read) > 1 and self.edit.takes_input:
            raise GraphError(f"{self._what}: {self._no_active_value(block, ports)}")
        return ports

    def _no_active_value(self, block: Path, ports: Ports) -> str:
        """The message for a block that no stage gives one value."""
        types = ", ".join(str(self.old[v.node].types[v.index]) for v in ports.read)
        inner = {path: self.index.ports(path) for path in self.index.inner(block)}
        single = [path for path, p in inner.items() if p is not None and len(p.read) == 1]
        blocks = f"blocks inside it that have one are {listing(map(path_text, single))}; " if single else ""
        return (
            f"{path_text(block)} has no single active value: it reads {len(ports.read)} values from outside ({types}); "
            f"{blocks}a scope names its own with x = emit.block_input(x)"
        )

    def _carry_over(self, values: _Values) -> None:
        """Registers of stages, as far as they are written by now."""
        known, now = self.state, self.emit.state

        def mapped(old: Any) -> Any:
            found = values.find(old.value)
            leaf = isinstance(self.old[old.value.node].op, Leaf)
            return self.emit.wrap(self._now(old.value, values)) if leaf or found is not None else None

        for each in fields(FlowState):
            old = getattr(known, each.name)
            if isinstance(old, FlowValue) and each.name != "residual" and getattr(now, each.name) is None:
                setattr(now, each.name, mapped(old))
        for name in ("inputs", "named", "streams", "outputs"):
            registers = getattr(now, name)
            for key, old in getattr(known, name).items():
                if old is None:
                    registers.setdefault(key, None)
                elif key not in registers and (found := mapped(old)) is not None:
                    registers[key] = found
        for name in ("gdn", "decode"):
            old = getattr(known, name)
            record = jax.tree.map(mapped, old)
            if getattr(now, name) is None and len(jax.tree.leaves(record)) == len(jax.tree.leaves(old)):
                setattr(now, name, record)

    # -- paths -------------------------------------------------------------------------------

    def _matched(self, path: Path) -> Iterator[Path]:
        """The selected blocks around a node, the outermost first."""
        return (path[:end] for end in range(1, len(path) + 1) if path[:end] in self.selected)

    def _starts(self, bounds: Sequence[int]) -> list[int]:
        """Where layers start, and the number behind the last, without the leaves that stand there."""
        starts = [next((n for n in self.solid if n >= bound), len(self.old)) for bound in bounds]
        return [*starts[:-1], max((n + 1 for n in self.solid if n < bounds[-1]), default=0)]

    def _not_one(self, block: Path) -> GraphError:
        return GraphError(
            f"{self._what}: the nodes of {path_text(block)} are not in one piece: others "
            "stand between them that read what it gives and that it reads; take a block around it or inside of it"
        )
