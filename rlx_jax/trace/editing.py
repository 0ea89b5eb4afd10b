"""`edit_blocks` changes blocks of a flow by their paths: it rewrites the flow and passes matched blocks to a function.

It runs after all stages. A block consists of the nodes with paths that start with its own path, whatever stages or
parts of stages wrote them. Edits identify it by that path alone, so that they work for repeated layers in a region and
for single layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from rlx_jax.dataclasses import dataclass, fields, replace
from rlx_jax.errors import GraphError, MissingWeightError, ShapeError, listing, quote, shown
from rlx_jax.ir.graph import Boundary, Builder, Leaf, Node, Value, locate_errors
from rlx_jax.ir.hir import Attention, Linear
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.paths import Origin, Path, path_text
from rlx_jax.trace.block_selection import BlockPattern, BlocksByWeight, BlockSelector
from rlx_jax.trace.captures import (
    OUTPUT,
    BlockIndex,
    Capture,
    CapturedBlock,
    HeadCounter,
    Ports,
    Taps,
    add_outputs,
    capture_reads,
    find_attention,
    sort_blocks,
    write_tap,
)
from rlx_jax.trace.checks import check_signature
from rlx_jax.trace.emit import Emit, FlowState
from rlx_jax.trace.flow_value import FlowValue

# A block as a function: a call writes the block at that point, with the argument in place of its input.
Inner = Callable[[FlowValue | None], FlowValue]

# `(emit, x, inner) → y`: x is the block's input, `inner(x)` its output, and y what later blocks read instead of it.
BlockWrapper = Callable[[Emit, Any, Inner], FlowValue]


@dataclass(frozen=True)
class BlockEdit:
    """A change of every selected block by `wrapper`; with `requires_input` False, blocks need no single input."""

    blocks: BlockSelector
    wrapper: BlockWrapper
    requires_input: bool = True


# Path segment of an activation that edits separate from its projection.
ACT = "act"


def edit_blocks(
    emit: Emit, value: FlowValue, edits: Sequence[BlockEdit], where: str, other_parts: Sequence[str] = ()
) -> FlowValue:
    """Apply all edits in order, each to the result of the earlier ones, and return the new active value.

    Args:
        value: the active value after the last stage.
        where: name of the flow, for messages.
        other_parts: parts of the model in other flows, to which an edit may apply.

    Raises:
        GraphError: a pattern matches no block, or nodes that form no block; a wrapper returns no value.
    """
    if not edits:
        return value
    value = _Rewriter(emit, NO_EDIT, where).run(value)
    captures: list[Capture] = []
    for edit in edits:
        change = replace(edit, blocks=edit.blocks.relax(other_parts)) if other_parts else edit
        if isinstance(edit.wrapper, CapturedBlock):
            blocks = sort_blocks(change.blocks.select(emit.builder.nodes, where), emit.builder.nodes)
            captures += [Capture(edit.wrapper, block) for block in blocks]
            continue
        # The pattern may be for parts of a block without weights, which was written only as a placeholder.
        if emit.has_placeholders and isinstance(change.blocks, BlockPattern):
            change = replace(change, blocks=replace(change.blocks, optional=True))
        value = _Rewriter(emit, change, where).run(value)
    # Captures come last, so that they return the outputs of edited blocks.
    captures = find_attention(captures, emit.builder.nodes, where)
    taps: Taps = {}
    if inner := [capture for capture in captures if capture.is_inner]:
        # Written beside the attention, so that repeated layers stay one region.
        rewriter = _Rewriter(emit, NO_EDIT, where)
        for capture in inner:
            rewriter.taps.setdefault(capture.attention, {})[capture.wrapper.value] = None
        value = rewriter.run(value)
        taps = rewriter.tapped
    add_outputs(emit, captures, taps, value, where)
    value = _Rewriter(emit, NO_EDIT, where, marks_blocks=False).run(value)
    if any(isinstance(edit.wrapper, CapturedBlock) and edit.wrapper.reads for edit in edits):
        capture_reads(emit, where)
    return value


def write_placeholder(
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
            with contextlib.suppress(MissingWeightError), emit.user_code():
                return edit.wrapper(emit, x, inner)
    raise error


# An edit of no block: it only separates activations from projections, and removes marks without a role.
NO_EDIT = BlockEdit(BlocksByWeight(frozenset()), lambda emit, x, inner: inner(x))


@dataclass
class _RepeatBounds:
    """The node numbers at which the layers of a Repeat start, and the end of the last, before and after the rewrite."""

    old_bounds: list[int]
    new_bounds: list[int | None]

    def is_within(self, numbers: Sequence[int]) -> bool:
        """Return whether all layers lie within the contiguous node numbers `numbers`."""
        return bool(numbers) and numbers[0] <= self.old_bounds[0] and self.old_bounds[-1] <= numbers[-1] + 1

    def contains_start(self, numbers: Sequence[int]) -> bool:
        """Return whether the first of `numbers` is in one of the layers."""
        return self.old_bounds[0] <= numbers[0] < self.old_bounds[-1]

    def record_bound(self, number: int, new_bound: int) -> None:
        """Record `new_bound` for all old boundaries up to node `number`."""
        for index, start in enumerate(self.old_bounds):
            if start <= number and self.new_bounds[index] is None:
                self.new_bounds[index] = new_bound


@dataclass
class _ValueScope:
    """The map from old values to new ones, in nested scopes: inside a block first its own map, then the outer ones.

    Attributes:
        mapping: new values by old values of this scope.
        outer: the enclosing scope.
        path_rename: an old path prefix, and the prefix that replaces it.
    """

    mapping: dict[Value, Value]
    outer: _ValueScope | None = None
    path_rename: tuple[Path, Path] = ((), ())

    def find(self, value: Value) -> Value | None:
        """Return the new value of an old one, or None if it is not written yet."""
        new_value = self.mapping.get(value)
        return self.outer.find(value) if new_value is None and self.outer is not None else new_value

    def new_path(self, path: Path) -> Path:
        """Return the new path of an old one: a block that is written twice gets another name the second time."""
        old_prefix, new_prefix = self.path_rename
        path = (*new_prefix, *path[len(old_prefix) :]) if path[: len(old_prefix)] == old_prefix else path
        return path if self.outer is None else self.outer.new_path(path)


class _Rewriter:
    """The rewrite of one flow by one edit.

    Attributes:
        nodes: the nodes before the edit.
        builder: the builder that the flow is rewritten into.
        op_numbers: numbers of the old nodes that are no leaves.
        blocks: numbers of the nodes of each selected block.
        resize_note: message about the last block with another shape than before, for later shape errors.
        taps: by the number of an attention's node, the values inside it to write; `tapped` has them once written.
    """

    def __init__(self, emit: Emit, edit: BlockEdit, where: str, marks_blocks: bool = True) -> None:
        self.emit, self.edit, self.where = emit, edit, where
        self.nodes: tuple[Node, ...] = tuple(emit.builder.nodes)
        self.state, self.inputs = emit.state, list(emit.builder.inputs)
        self.builder = Builder(emit.builder.name, emit.builder.types)
        self.builder.marks_blocks = marks_blocks
        self.resize_note = ""
        self.taps: dict[int, dict[str, None]] = {}
        self.tapped: Taps = {}
        self.op_numbers = [i for i, node in enumerate(self.nodes) if not isinstance(node.op, Leaf)]
        self.selected = edit.blocks.select(self.nodes, where)
        self.blocks: dict[Path, list[int]] = {}
        for number in self.op_numbers:
            for block in self._selected_blocks(self.nodes[number].origin.path):
                self.blocks.setdefault(block, []).append(number)
        self.layers = [_RepeatBounds(self._layer_starts(bounds), [None] * len(bounds)) for bounds in emit.state.repeats]

    @property
    def _label(self) -> str:
        return f"{self.where}: {self.edit.blocks}"

    def run(self, value: FlowValue) -> FlowValue:
        """Rewrite the flow into a new builder, and return its active value."""
        emit, old = self.emit, self.state
        self.index = BlockIndex(self.nodes, value.value)
        emit.builder, self.builder.inputs = self.builder, self.inputs
        emit.state = FlowState(old.program, contracts=old.contracts, last_none_stage=old.last_none_stage)
        top = _ValueScope({})
        self._write(self.op_numbers, (), top, self.layers)
        emit.state.outputs, wrapper_outputs = {}, emit.state.outputs
        self._map_registers(top)
        for name, output in wrapper_outputs.items():
            if emit.state.outputs.setdefault(name, output).value != output.value:
                raise GraphError(f"{self._label}: the flow has a side output {quote(name)} already")
        bounds = [[n for n in repeat.new_bounds if n is not None] for repeat in self.layers]
        emit.state.repeats += [
            new for new, repeat in zip(bounds, self.layers, strict=True) if None not in repeat.new_bounds
        ]
        return emit.wrap(self._new_value(value.value, top))

    # -- walking -----------------------------------------------------------------------------

    def _write(self, numbers: Sequence[int], outer: Path, values: _ValueScope, layers: Sequence[_RepeatBounds]) -> None:
        """Copy nodes to the new builder, and pass selected blocks among them to the wrapper.

        Args:
            numbers: numbers of the old nodes to write.
            outer: path of the block that is being written.
            layers: the Repeats to update the boundaries of.
        """
        written: set[int] = set()
        for number in numbers:
            if number in written:
                continue
            path = self.nodes[number].origin.path
            block = next((b for b in self._selected_blocks(path) if len(b) > len(outer)), None)
            block_nodes = [] if block is None else self.blocks[block]
            layers = [repeat for repeat in layers if not repeat.is_within(block_nodes)]
            for repeat in layers:
                repeat.record_bound(number, len(self.builder.nodes))
            if block is None:
                self._copy(number, values)
                continue
            remaining = [n for n in numbers if n not in written]
            between = [n for n in remaining if block_nodes[0] < n < block_nodes[-1]]
            independent = self._independent_nodes(block, block_nodes, between)
            if not set(block_nodes) <= set(remaining):
                raise self._interleaved_error(block)
            self._write(independent, outer, values, ())
            self._write_block(block, block_nodes, values)
            written |= {*block_nodes, *independent}
        for repeat in layers if numbers else ():
            repeat.record_bound(numbers[-1] + 1, len(self.builder.nodes))

    def _independent_nodes(self, block: Path, block_nodes: Sequence[int], between: Sequence[int]) -> list[int]:
        """Return the nodes in between a block's nodes that do not depend on it, and can be written before it.

        Raises:
            GraphError: the block reads one of the nodes that depend on it.
        """
        inside, dependents = set(block_nodes), set(block_nodes)
        for number in between:
            if number in inside:
                reads_dependent = any(v.node in dependents - inside for v in self.nodes[number].inputs)
                if reads_dependent:
                    raise self._interleaved_error(block)
            elif any(v.node in dependents for v in self.nodes[number].inputs):
                dependents.add(number)
        last_node = self.nodes[block_nodes[-1]]
        if any(v.node in dependents - inside for v in last_node.inputs):
            raise self._interleaved_error(block)
        return [n for n in between if n not in dependents]

    def _copy(self, number: int, values: _ValueScope) -> None:
        """Copy one node to the new builder, with its operands and path replaced."""
        node = self.nodes[number]
        origin = replace(node.origin, path=values.new_path(node.origin.path))
        op = node.op
        # An activation fused into a projection becomes a separate block, so that an edit of `mlp.c_fc` is of the
        # projection alone.
        activation = op.activation if isinstance(op, Linear) else ""
        # `_write_block` writes new marks for a block that this edit changes.
        if isinstance(op, Boundary) and (
            not op.role or not self.builder.marks_blocks or node.origin.path in self.selected
        ):
            values.mapping[Value(number)] = self._new_value(node.inputs[0], values)
            return
        try:
            with self.builder.origin_scope(origin), locate_errors(origin):
                copied_op = replace(op, activation="") if isinstance(op, Linear) else op
                results = self.builder.add(copied_op, *(self._new_value(v, values) for v in node.inputs))
            if activation:
                with self.builder.origin_scope(replace(origin, path=(*origin.path[:-1], ACT))):
                    results = self.builder.add(Unary(activation), *results)
        except ShapeError as error:
            if self.resize_note:
                error.args = (f"{str(error).rstrip('.')}; {self.resize_note}",)
            raise
        values.mapping.update({Value(number, i): v for i, v in enumerate(results)})
        if number in self.taps and isinstance(op, Attention):
            operands = [self._new_value(v, values) for v in node.inputs]
            with self.builder.origin_scope(origin), locate_errors(origin):
                written = {(number, name): write_tap(self.builder, op, operands, name) for name in self.taps[number]}
            self.tapped |= written

    def _write_block(self, block: Path, numbers: Sequence[int], values: _ValueScope) -> None:
        """Write one block through the wrapper of the edit."""
        emit, ports = self.emit, self._edit_ports(block)
        read, output = ports.inner_input, ports.outputs[0]
        path, written = values.new_path(block), 0
        inner_values = _ValueScope({}, values)
        inner_repeats = [repeat for repeat in self.layers if repeat.is_within(numbers)]
        body = [n for n in numbers if n not in (ports.input_mark, ports.output_mark)]

        def inner(x: FlowValue | None) -> FlowValue:
            nonlocal written, inner_values
            written += 1
            replaced = {} if read is None else {read: emit.unwrap(emit.require(x, "inner"))}
            new_block = block if written == 1 else (*block, f"again_{written}")
            inner_values = _ValueScope(replaced, values, (block, new_block))
            for repeat in inner_repeats:
                repeat.new_bounds = [None] * len(repeat.old_bounds)
            self._write(body, block, inner_values, inner_repeats)
            return emit.wrap(self._new_value(ports.inner_output, inner_values))

        self._map_registers(values)
        emit.state.contracts, contracts = [], emit.state.contracts
        # A Repeat inside a layer of another Repeat belongs to that layer, and becomes no region itself.
        emit.in_repeat = any(repeat not in inner_repeats and repeat.contains_start(numbers) for repeat in self.layers)
        with self.builder.origin_scope(Origin(path)), emit.stage(), emit.user_code():
            x = None if ports.input is None else emit.block_input(emit.wrap(self._new_value(ports.input, values)))
            check_signature(self.edit.wrapper, ("emit", "x", "inner"), path_text(path))
            if hasattr(self.edit.wrapper, "check_block"):  # `Scaled` checks its number of heads
                self.edit.wrapper.check_block(HeadCounter(self.nodes), read, output, path_text(path))
            result = self.edit.wrapper(emit, x, inner)
            if not isinstance(result, FlowValue):
                raise GraphError(
                    f"{path_text(path)}: the function that changes a block returns a FlowValue, got {shown(result)}"
                )
            values.mapping |= {v: new_value for v, new_value in inner_values.mapping.items() if v.node in set(numbers)}
            values.mapping[output] = self.builder.boundary(OUTPUT, emit.unwrap(result))
            old_type = self.nodes[output.node].types[output.index]
            if result.type.shape != old_type.shape:
                self.resize_note = f"{path_text(path)} returned {old_type} before the edit, and {result.type} after it"
        emit.in_repeat = False
        within = f"{path_text(block)}."
        dropped = [] if written else [c for c in contracts if f"{c.path}.".startswith(within)]
        emit.state.contracts = [c for c in contracts if c not in dropped] + emit.state.contracts

    # -- values ------------------------------------------------------------------------------

    def _new_value(self, value: Value, values: _ValueScope) -> Value:
        """Return the new value of an old one; leaves are written when first read.

        Raises:
            GraphError: a replaced block computed the value.
        """
        new_value = values.find(value)
        if new_value is not None:
            return new_value
        node = self.nodes[value.node]
        if isinstance(node.op, Leaf):
            with self.builder.origin_scope(node.origin):
                return self.builder.leaf(node.op)
        raise GraphError(
            f"{self._label}: a replaced block returned a second value, {node.types[value.index]} of "
            f"{path_text(node.origin.path)}, which other blocks read: wrap the block, and call inner"
        )

    def _edit_ports(self, block: Path) -> Ports:
        """Return the input and output values of an edited block.

        Raises:
            GraphError: the block has no single input, or several outputs.
        """
        ports = self.index.ports(block)
        assert ports is not None  # selected blocks have nodes
        if len(ports.outputs) > 1:
            types = ", ".join(str(self.nodes[v.node].types[v.index]) for v in ports.outputs)
            raise GraphError(
                f"{self._label}: {path_text(block)} returns {len(ports.outputs)} values that other "
                f"blocks read ({types}), and an edit changes one: take a block around it or inside of it"
            )
        if len(ports.inputs) > 1 and self.edit.requires_input:
            raise GraphError(f"{self._label}: {self._several_inputs_text(block, ports)}")
        return ports

    def _several_inputs_text(self, block: Path, ports: Ports) -> str:
        """Return the message about a block without a single input, which suggests inner blocks that have one."""
        types = ", ".join(str(self.nodes[v.node].types[v.index]) for v in ports.inputs)
        inner = {path: self.index.ports(path) for path in self.index.inner_blocks(block)}
        single = [path for path, p in inner.items() if p is not None and len(p.inputs) == 1]
        blocks = f"blocks inside it that have one are {listing(map(path_text, single))}; " if single else ""
        return (
            f"{path_text(block)} has no single active value: it reads {len(ports.inputs)} values from outside "
            f"({types}); {blocks}a scope declares its input with x = emit.block_input(x)"
        )

    def _map_registers(self, values: _ValueScope) -> None:
        """Copy the registers of stages to the new state, as far as their values are already rewritten."""
        old_state, new_state = self.state, self.emit.state

        def mapped(old: Any) -> Any:
            new_value = values.find(old.value)
            leaf = isinstance(self.nodes[old.value.node].op, Leaf)
            return self.emit.wrap(self._new_value(old.value, values)) if leaf or new_value is not None else None

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

    def _selected_blocks(self, path: Path) -> Iterator[Path]:
        """Return the selected blocks that contain a path, the outermost first."""
        return (path[:end] for end in range(1, len(path) + 1) if path[:end] in self.selected)

    def _layer_starts(self, bounds: Sequence[int]) -> list[int]:
        """Return the first nodes of layers and the end of the last one, both without adjacent leaves."""
        starts = [next((n for n in self.op_numbers if n >= bound), len(self.nodes)) for bound in bounds]
        return [*starts[:-1], max((n + 1 for n in self.op_numbers if n < bounds[-1]), default=0)]

    def _interleaved_error(self, block: Path) -> GraphError:
        """Return the error of a block that depends on nodes outside which in turn depend on it."""
        return GraphError(
            f"{self._label}: the nodes of {path_text(block)} are not contiguous: nodes "
            "between them read its values and compute values for it; take a block around it or inside of it"
        )
