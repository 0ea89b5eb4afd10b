"""`edit_blocks` changes blocks of a flow by their paths: it rewrites the flow and passes matched blocks to a function.

It runs after all stages. A block consists of the nodes with paths that start with its own path, whatever stages or
parts of stages wrote them. Edits identify it by that path alone, so that they work for repeated layers in a region and
for single layers.
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

# A block as a function: a call writes the block at that point, with the argument in place of its input.
Inner = Callable[[FlowValue | None], FlowValue]

# `(emit, x, inner) → y`: x is the block's input, `inner(x)` its output, and y what later blocks read instead of it.
BlockWrapper = Callable[[Emit, Any, Inner], FlowValue]


@runtime_checkable
class ChecksBlock(Protocol):
    """A wrapper that checks its arguments against the original block."""

    def check_block(self, around: HeadsAround, read: Value | None, given: Value, where: str) -> None:
        """Check the arguments.

        Args:
            around: the original nodes, to count heads with.
            read: the value that the block reads.
            given: the value that the block returns.
            where: path of the block, for messages.
        """


@dataclass(frozen=True)
class BlockEdit:
    """A change of every selected block by `wrapper`; with `takes_input` False, blocks need no single input."""

    blocks: BlockSelector
    wrapper: BlockWrapper
    takes_input: bool = True


@dataclass(frozen=True)
class CapturedBlock:
    """Wrapper that captures a block: its output becomes a side output named by its path, or stacked under `stacked`."""

    stacked: str = ""

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        return inner(x)


# Path segment of an activation that edits separate from its projection.
ACT = "act"


def edit_blocks(
    emit: Emit, value: FlowValue, edits: Sequence[BlockEdit], where: str, elsewhere: Sequence[str] = ()
) -> FlowValue:
    """Apply all edits in order, each to the result of the earlier ones, and return the new active value.

    Args:
        value: the active value after the last stage.
        where: name of the flow, for messages.
        elsewhere: parts of the model in other flows, which an edit may be for.

    Raises:
        GraphError: a pattern matches no block, or nodes that form no block; a wrapper returns no value.
    """
    if not edits:
        return value
    value = _Rewriting(emit, NOTHING, where).run(value)
    captures: list[tuple[str, Path]] = []
    for edit in edits:
        change = replace(edit, blocks=edit.blocks.beside(elsewhere)) if elsewhere else edit
        # The pattern may be for parts of a block without weights, of which only a stand-in was written.
        if (
            emit.has_stand_ins
            and isinstance(change.blocks, BlockPattern)
            and not isinstance(edit.wrapper, CapturedBlock)
        ):
            change = replace(change, blocks=replace(change.blocks, may_lack=True))
        if isinstance(edit.wrapper, CapturedBlock):
            blocks = _in_order(change.blocks.among(emit.builder.nodes, where), emit.builder.nodes)
            captures += [(edit.wrapper.stacked, block) for block in blocks]
        else:
            value = _Rewriting(emit, change, where).run(value)
    # Captures come last, so that they return the outputs of edited blocks.
    _capture(emit, captures, value, where)
    return _Rewriting(emit, NOTHING, where, marks_blocks=False).run(value)


def run_stand_in(
    emit: Emit, edits: Sequence[BlockEdit], block: Path, x: FlowValue | None, error: MissingWeightError
) -> FlowValue:
    """Write the replacement of a block with a missing weight, so that later stages can run.

    `edit_blocks` applies the edits afterwards in their order, as if the block itself had run.

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


# An edit of no block: it only separates activations from projections, and removes marks without a role.
NOTHING = BlockEdit(BlocksReading(frozenset()), lambda emit, x, inner: inner(x))


def _in_order(blocks: Iterable[Path], nodes: Sequence[Node]) -> list[Path]:
    """Sort blocks by the position of their last node, inner blocks first."""
    last_node = {
        path[:end]: i for i, node in enumerate(nodes) for path in [node.origin.path] for end in range(len(path) + 1)
    }
    return sorted(blocks, key=lambda block: (last_node[block], -len(block)))


def _capture(emit: Emit, captures: Sequence[tuple[str, Path]], value: FlowValue, where: str) -> None:
    """Add the outputs of blocks as side outputs, after all edits: of an edited block, the output after the edits.

    Args:
        captures: for each block, the name of the stacked output, or "", and its path.
        value: the last active value of the flow.

    Raises:
        GraphError: a later edit replaced the block, or a stage has a side output of that name.
        ShapeError: blocks that are stacked return values of several types, or one returns several values.
    """
    index, stage_outputs = BlockIndex(emit.builder.nodes, emit.own(value)), set(emit.state.outputs)
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
        if name in stage_outputs:
            raise GraphError(f"{where}: at({name!r}): the flow has a side output {quote(name)} already")
        if stacked:
            emit.state.outputs[stacked] = values[0]  # reserves the position among the outputs
            stacks.setdefault(stacked, {})[path] = values[0]
        else:
            names = [path] if len(values) == 1 else [f"{path}[{i}]" for i in range(len(values))]
            emit.state.outputs |= dict(zip(names, values, strict=True))
    for stacked, by_path in stacks.items():
        emit.state.outputs[stacked] = _stack(emit, stacked, by_path, where)


def _stack(emit: Emit, name: str, values: Mapping[str, FlowValue], where: str) -> FlowValue:
    """Return captured values of one type, by block path, stacked along a new first axis."""
    (ref_path, ref), *others = values.items()
    for path, value in others:
        if value.type != ref.type:
            raise ShapeError(
                f"{where}: at({name!r}): stacked blocks give values of one type; {ref_path} gives {ref.type}, {path} "
                f"{value.type}: capture them apart"
            )
    with emit.scope("captured"):
        return emit.stack(list(values.values()))


@dataclass
class _Layers:
    """The node numbers at which the layers of a Repeat start, and the end of the last, before and after the rewrite."""

    before: list[int]
    after: list[int | None]

    def inside(self, numbers: Sequence[int]) -> bool:
        """Return whether all layers lie within the contiguous node numbers `numbers`."""
        return bool(numbers) and numbers[0] <= self.before[0] and self.before[-1] <= numbers[-1] + 1

    def around(self, numbers: Sequence[int]) -> bool:
        """Return whether the first of `numbers` is in one of the layers."""
        return self.before[0] <= numbers[0] < self.before[-1]

    def reached(self, number: int, written: int) -> None:
        """Record the new boundary `written` for all old boundaries up to node `number`."""
        for index, start in enumerate(self.before):
            if start <= number and self.after[index] is None:
                self.after[index] = written


@dataclass
class _Values:
    """The map from old values to new ones, in nested scopes: inside a block first its own map, then the outer ones.

    Attributes:
        own: new values by old values of this scope.
        around: the enclosing scope.
        renamed: an old path prefix, and the prefix that replaces it.
    """

    own: dict[Value, Value]
    around: _Values | None = None
    renamed: tuple[Path, Path] = ((), ())

    def find(self, value: Value) -> Value | None:
        """Return the new value of an old one, or None if it is not written yet."""
        new_value = self.own.get(value)
        return self.around.find(value) if new_value is None and self.around is not None else new_value

    def path(self, path: Path) -> Path:
        """Return the new path of an old one: a block that is written twice gets another name the second time."""
        old_prefix, new_prefix = self.renamed
        path = (*new_prefix, *path[len(old_prefix) :]) if path[: len(old_prefix)] == old_prefix else path
        return path if self.around is None else self.around.path(path)


class _Rewriting:
    """The rewrite of one flow by one edit.

    Attributes:
        old: the nodes before the edit.
        new: the builder that the flow is rewritten into.
        solid: numbers of the old nodes that are no leaves.
        blocks: numbers of the nodes of each selected block.
        resized: message about the last block with another shape than before, for later shape errors.
    """

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
        """Rewrite the flow into a new builder, and return its active value."""
        emit, registers = self.emit, self.state
        self.index = BlockIndex(self.old, value.value)
        emit.builder, self.new.inputs = self.new, self.inputs
        emit.state = FlowState(registers.program, contracts=registers.contracts, left_none=registers.left_none)
        top = _Values({})
        self._write(self.solid, (), top, self.layers)
        emit.state.outputs, wrapper_outputs = {}, emit.state.outputs
        self._carry_over(top)
        for name, output in wrapper_outputs.items():
            if emit.state.outputs.setdefault(name, output).value != output.value:
                raise GraphError(f"{self._what}: the flow has a side output {quote(name)} already")
        bounds = [[n for n in repeat.after if n is not None] for repeat in self.layers]
        emit.state.repeats += [new for new, repeat in zip(bounds, self.layers, strict=True) if None not in repeat.after]
        return emit.wrap(self._now(value.value, top))

    # -- walking -----------------------------------------------------------------------------

    def _write(self, numbers: Sequence[int], around: Path, values: _Values, layers: Sequence[_Layers]) -> None:
        """Copy nodes to the new builder, and pass selected blocks among them to the wrapper.

        Args:
            numbers: numbers of the old nodes to write.
            around: path of the block that is being written.
            layers: the Repeats to update the boundaries of.
        """
        written: set[int] = set()
        for number in numbers:
            if number in written:
                continue
            block = next((b for b in self._matched(self.old[number].origin.path) if len(b) > len(around)), None)
            inside = [] if block is None else self.blocks[block]
            layers = [repeat for repeat in layers if not repeat.inside(inside)]
            for repeat in layers:
                repeat.reached(number, len(self.new.nodes))
            if block is None:
                self._copy(number, values)
                continue
            remaining = [n for n in numbers if n not in written]
            independent = self._needed(block, inside, [n for n in remaining if inside[0] < n < inside[-1]])
            if not set(inside) <= set(remaining):
                raise self._not_one(block)
            self._write(independent, around, values, ())
            self._block(block, inside, values)
            written |= {*inside, *independent}
        for repeat in layers if numbers else ():
            repeat.reached(numbers[-1] + 1, len(self.new.nodes))

    def _needed(self, block: Path, inside: Sequence[int], between: Sequence[int]) -> list[int]:
        """Return the nodes in between a block's nodes that do not depend on it, and can be written before it.

        Raises:
            GraphError: the block reads one of the nodes that depend on it.
        """
        block_nodes, dependents = set(inside), set(inside)
        for number in between:
            if number in block_nodes:
                reads_dependent = any(v.node in dependents - block_nodes for v in self.old[number].inputs)
                if reads_dependent:
                    raise self._not_one(block)
            elif any(v.node in dependents for v in self.old[number].inputs):
                dependents.add(number)
        last_node = self.old[inside[-1]]
        if any(v.node in dependents - block_nodes for v in last_node.inputs):
            raise self._not_one(block)
        return [n for n in between if n not in dependents]

    def _copy(self, number: int, values: _Values) -> None:
        """Copy one node to the new builder, with its operands and path replaced."""
        node = self.old[number]
        origin = replace(node.origin, path=values.path(node.origin.path))
        op = node.op
        # An activation fused into a projection becomes a separate block, so that an edit of `mlp.c_fc` is of the
        # projection alone.
        activation = op.activation if isinstance(op, Linear) else ""
        # `_block` writes new marks for a block that this edit changes.
        if isinstance(op, Boundary) and (not op.role or not self.new.marks_blocks or node.origin.path in self.selected):
            values.own[Value(number)] = self._now(node.inputs[0], values)
            return
        try:
            with self.new.at(origin), located(origin):
                copied_op = replace(op, activation="") if isinstance(op, Linear) else op
                results = self.new.add(copied_op, *(self._now(v, values) for v in node.inputs))
            if activation:
                with self.new.at(replace(origin, path=(*origin.path[:-1], ACT))):
                    results = self.new.add(Unary(activation), *results)
        except ShapeError as error:
            if self.resized:
                error.args = (f"{str(error).rstrip('.')}; {self.resized}",)
            raise
        values.own.update({Value(number, i): v for i, v in enumerate(results)})

    def _block(self, block: Path, numbers: Sequence[int], values: _Values) -> None:
        """Write one block through the wrapper of the edit."""
        emit, ports = self.emit, self._ports(block)
        read, output = ports.taken, ports.given[0]
        path, written = values.path(block), 0
        inner_values = _Values({}, values)
        inner_repeats = [repeat for repeat in self.layers if repeat.inside(numbers)]
        body = [n for n in numbers if n not in (ports.enter, ports.leave)]

        def inner(x: FlowValue | None) -> FlowValue:
            nonlocal written, inner_values
            written += 1
            replaced = {} if read is None else {read: emit.own(emit.require(x, "inner"))}
            inner_values = _Values(replaced, values, (block, block if written == 1 else (*block, f"again_{written}")))
            for repeat in inner_repeats:
                repeat.after = [None] * len(repeat.before)
            self._write(body, block, inner_values, inner_repeats)
            return emit.wrap(self._now(ports.result, inner_values))

        self._carry_over(values)
        emit.state.contracts, contracts = [], emit.state.contracts
        # A Repeat inside a layer of another Repeat belongs to that layer, and becomes no region itself.
        emit.repeating = any(repeat not in inner_repeats and repeat.around(numbers) for repeat in self.layers)
        with self.new.at(Origin(path)), emit.stage(), emit.users_code():
            x = None if ports.source is None else emit.block_input(emit.wrap(self._now(ports.source, values)))
            check_takes(self.edit.wrapper, ("emit", "x", "inner"), path_text(path))
            if isinstance(self.edit.wrapper, ChecksBlock):
                self.edit.wrapper.check_block(HeadsAround(self.old), read, output, path_text(path))
            result = self.edit.wrapper(emit, x, inner)
            if not isinstance(result, FlowValue):
                raise GraphError(
                    f"{path_text(path)}: what changes a block returns the value that it gives, got {shown(result)}"
                )
            values.own |= {v: new_value for v, new_value in inner_values.own.items() if v.node in set(numbers)}
            values.own[output] = self.new.boundary(OUTPUT, emit.own(result))
            old_type = self.old[output.node].types[output.index]
            if result.type.shape != old_type.shape:
                self.resized = f"{path_text(path)} gave {old_type} before it was changed, and {result.type} now"
        emit.repeating = False
        within = f"{path_text(block)}."
        dropped = [] if written else [c for c in contracts if f"{c.path}.".startswith(within)]
        emit.state.contracts = [c for c in contracts if c not in dropped] + emit.state.contracts

    # -- values ------------------------------------------------------------------------------

    def _now(self, value: Value, values: _Values) -> Value:
        """Return the new value of an old one; leaves are written when first read.

        Raises:
            GraphError: a replaced block computed the value.
        """
        new_value = values.find(value)
        if new_value is not None:
            return new_value
        node = self.old[value.node]
        if isinstance(node.op, Leaf):
            with self.new.at(node.origin):
                return self.new.leaf(node.op)
        raise GraphError(
            f"{self._what}: the block that was replaced gave a second value, "
            f"{node.types[value.index]} of {path_text(node.origin.path)}, which others read: wrap it, and call inner"
        )

    def _ports(self, block: Path) -> Ports:
        """Return the input and output values of an edited block.

        Raises:
            GraphError: the block has no single input, or several outputs.
        """
        ports = self.index.ports(block)
        assert ports is not None  # selected blocks have nodes
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
        """Return the message about a block without a single input, which suggests inner blocks that have one."""
        types = ", ".join(str(self.old[v.node].types[v.index]) for v in ports.read)
        inner = {path: self.index.ports(path) for path in self.index.inner(block)}
        single = [path for path, p in inner.items() if p is not None and len(p.read) == 1]
        blocks = f"blocks inside it that have one are {listing(map(path_text, single))}; " if single else ""
        return (
            f"{path_text(block)} has no single active value: it reads {len(ports.read)} values from outside ({types}); "
            f"{blocks}a scope names its own with x = emit.block_input(x)"
        )

    def _carry_over(self, values: _Values) -> None:
        """Copy the registers of stages to the new state, as far as their values are already rewritten."""
        old_state, new_state = self.state, self.emit.state

        def mapped(old: Any) -> Any:
            new_value = values.find(old.value)
            leaf = isinstance(self.old[old.value.node].op, Leaf)
            return self.emit.wrap(self._now(old.value, values)) if leaf or new_value is not None else None

        for register in fields(FlowState):
            old = getattr(old_state, register.name)
            if isinstance(old, FlowValue) and register.name != "residual" and getattr(new_state, register.name) is None:
                setattr(new_state, register.name, mapped(old))
        for name in ("inputs", "named", "streams", "outputs"):
            registers = getattr(new_state, name)
            for key, old in getattr(old_state, name).items():
                if old is None:
                    registers.setdefault(key, None)
                elif key not in registers and (new_value := mapped(old)) is not None:
                    registers[key] = new_value
        for name in ("gdn", "decode"):
            old = getattr(old_state, name)
            record = jax.tree.map(mapped, old)
            if getattr(new_state, name) is None and len(jax.tree.leaves(record)) == len(jax.tree.leaves(old)):
                setattr(new_state, name, record)

    # -- paths -------------------------------------------------------------------------------

    def _matched(self, path: Path) -> Iterator[Path]:
        """Return the selected blocks that contain a path, the outermost first."""
        return (path[:end] for end in range(1, len(path) + 1) if path[:end] in self.selected)

    def _starts(self, bounds: Sequence[int]) -> list[int]:
        """Return the first nodes of layers and the end of the last one, both without adjacent leaves."""
        starts = [next((n for n in self.solid if n >= bound), len(self.old)) for bound in bounds]
        return [*starts[:-1], max((n + 1 for n in self.solid if n < bounds[-1]), default=0)]

    def _not_one(self, block: Path) -> GraphError:
        """Return the error of a block that depends on nodes outside which in turn depend on it."""
        return GraphError(
            f"{self._what}: the nodes of {path_text(block)} are not in one piece: others "
            "stand between them that read what it gives and that it reads; take a block around it or inside of it"
        )
