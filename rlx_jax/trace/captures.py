"""The boundaries of blocks in a graph, and the values of blocks that edits add to a flow as side outputs.

While the stages of a flow with edits by path run (`Builder.marks_blocks`), nodes in the graph mark the active value
that each stage takes and returns; `edit_blocks` removes the marks. `at(…).capture()` adds outputs of chosen blocks, and
`bisect` all values between blocks.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, MissingWeightError, ShapeError, listing, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Boundary, Builder, Constant, Hir, Leaf, Node, Param, Value
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Unary
from rlx_jax.ir.ops.reduce import Standardize
from rlx_jax.ir.ops.shape import Reshape, SplitLast, split_axis
from rlx_jax.ir.paths import Origin, Path, path_text
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.trace.emit import Emit, FlowState, FlowValue

INPUT, OUTPUT = "input", "output"

# A function that writes a stage for an active value, and returns the next one.
Write = Callable[[FlowValue | None], FlowValue | None]


def run_as_block(emit: Emit, write: Write, value: FlowValue | None) -> FlowValue | None:
    """Run a stage, and mark its input and output if it writes exactly one block and nothing outside of it.

    Args:
        write: the `emit` method of the stage, as a function of the active value.
        value: the active value before the stage.

    Returns:
        The active value after the stage.

    Raises:
        MissingWeightError: the stage reads a weight that no source has, and no edit replaces its block.
    """
    builder = emit.builder
    if not builder.marks_blocks:
        return write(value)
    start, saved_state, in_repeat = len(builder.nodes), _copy_registers(emit.state), emit.in_repeat
    active = None if value is None else emit.wrap(builder.boundary("", emit.unwrap(value)))
    outer, emit.stage_blocks = emit.stage_blocks, (builder.origin.path, {})
    try:
        result = write(active)
    except MissingWeightError as error:
        block = _single_block(emit.stage_blocks[1])
        if emit.placeholder_writer is None or block is None:
            raise
        # Drop the nodes of the failed stage, but keep the mark of its input.
        builder.truncate(start + (value is not None))
        emit.state, emit.in_repeat = saved_state, in_repeat
        with builder.origin_scope(Origin(block)), emit.stage():
            result = emit.placeholder_writer(block, active, error)
        emit.has_placeholders = True
    finally:
        blocks, emit.stage_blocks = emit.stage_blocks[1], outer
    block = _single_block(blocks)
    if block is None or not _is_inside(block, builder.nodes[start:]):
        return result
    if value is not None:
        builder.nodes[start] = replace(builder.nodes[start], op=Boundary(INPUT), origin=Origin(block))
    if result is None:
        return None
    with builder.origin_scope(Origin(block)):
        return emit.wrap(builder.boundary(OUTPUT, emit.unwrap(result)))


def _single_block(blocks: Collection[Path]) -> Path | None:
    """Return the only block, or None."""
    return next(iter(blocks)) if len(blocks) == 1 else None


def _is_inside(block: Path, nodes: Iterable[Node]) -> bool:
    """Return whether all ops among the nodes are part of a block."""
    return all(
        node.origin.path[: len(block)] == block for node in nodes if node.inputs and not isinstance(node.op, Boundary)
    )


def _copy_registers(state: FlowState) -> FlowState:
    """Return a copy of the registers that later writes to `state` do not change."""
    copies: dict[str, Any] = {name: v.copy() for name, v in vars(state).items() if isinstance(v, dict | list)}
    return replace(state, **copies)


@dataclass(frozen=True)
class Ports:
    """The values by which a block is connected to the nodes outside of it.

    Attributes:
        input_mark: the number of the node that marks the input; None without a mark.
        output_mark: the number of the node that marks the output; None without a mark.
        inputs: the input outside of the block, or, without a mark, all values that the block reads from outside,
            except weights and constants.
        outputs: the output, or, without a mark, the values of the block that other nodes read.
        inner_output: the value inside the block that `outputs[0]` marks.
    """

    input_mark: int | None
    output_mark: int | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    inner_output: Value

    @property
    def input(self) -> Value | None:
        """The input outside of the block, or None if there are several."""
        return self.inputs[0] if len(self.inputs) == 1 else None

    @property
    def inner_input(self) -> Value | None:
        """The value that the nodes of the block read as their input: its mark, or the value itself."""
        return self.input if self.input_mark is None else Value(self.input_mark)

    @property
    def captured_outputs(self) -> tuple[Value, ...]:
        """The values of a capture: the output, or, for a stage that returns its input, the values that it registers."""
        return self.outputs[1:] if len(self.outputs) > 1 and self.outputs[0].node == self.output_mark else self.outputs


class BlockIndex:
    """The nodes of a flow by block, and how each block is connected.

    Args:
        nodes: the nodes of the flow.
        last: the last active value of the flow.
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
        """Return the values that connect a block, or None if it has no nodes."""
        numbers = self.numbers.get(block, [])
        if not numbers:
            return None
        block_nodes = set(numbers)
        outputs = [
            value
            for number in numbers
            for value in (Value(number, index) for index in range(len(self.nodes[number].types)))
            if not block_nodes.issuperset(self.readers.get(value, ()))
        ]
        # A stage that continues a block (`Named(again=True)`) marks a value inside the block, which is no input of it.
        input_marks = [i for i in self._marks_of(INPUT, block) if self.nodes[i].inputs[0].node not in block_nodes]
        output_mark = next(reversed(self._marks_of(OUTPUT, block)), None)
        inputs = tuple(self.nodes[i].inputs[0] for i in input_marks) or self._outside_inputs(numbers, block_nodes)
        input_mark = input_marks[0] if input_marks else None
        if output_mark is None:
            outputs = outputs or [Value(numbers[-1])]
            return Ports(input_mark, output_mark, inputs, tuple(outputs), outputs[0])
        result = self.nodes[output_mark].inputs[0]
        output = Value(output_mark)
        registers = [v for v in outputs if v != output and self._unmarked(v) != self._unmarked(output)]
        returns_input = input_mark is not None and self._unmarked(result) == self._unmarked(Value(input_mark))
        return Ports(input_mark, output_mark, inputs, (output, *(registers if returns_input else ())), result)

    def inner_blocks(self, block: Path) -> list[Path]:
        """Return the blocks inside of a block."""
        return [path for path in self.numbers if len(path) > len(block) and path[: len(block)] == block]

    def _marks_of(self, role: str, block: Path) -> list[int]:
        """Return the numbers of the nodes that mark the input or the output of a block."""
        nodes = self.nodes
        return [i for i in self.numbers[block] if nodes[i].op == Boundary(role) and nodes[i].origin.path == block]

    def _outside_inputs(self, numbers: Iterable[int], block_nodes: set[int]) -> tuple[Value, ...]:
        """Return the inputs and computed values that nodes read from outside, without weights and constants."""
        values = (v for number in numbers for v in self.nodes[number].inputs if v.node not in block_nodes)
        return tuple(dict.fromkeys(v for v in values if not isinstance(self.nodes[v.node].op, Param | Constant)))

    def _unmarked(self, value: Value) -> Value:
        """Return the value under a chain of marks."""
        while isinstance(self.nodes[value.node].op, Boundary):
            value = self.nodes[value.node].inputs[0]
        return value


# Ops that keep the columns of the last axis in place.
COLUMN_PRESERVING = (Boundary, Unary, Binary, CastTo, Standardize, hir.Rope, hir.RmsNorm, hir.LayerNorm, hir.GatedFfn)
# Ops that end the search for heads, because columns of their operands and results do not correspond.
SEARCH_ENDS = (Leaf, hir.Linear, hir.Embed, hir.FirstToken, hir.LastToken, hir.EndToken)
KEEPS_HEADS = (*COLUMN_PRESERVING, Reshape)

# How an op tells the number of heads of a value, and that number.
Evidence = tuple[str, int]
UNKNOWN, NOTHING = ("unknown", 0), ("nothing", 0)


class HeadCounter:
    """Search for the number of heads of values, over the nodes of a flow."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.readers: dict[Value, list[tuple[int, int]]] = {}
        for number, node in enumerate(nodes):
            for position, value in enumerate(node.inputs):
                self.readers.setdefault(value, []).append((number, position))

    def count(self, value: Value) -> tuple[set[int], bool]:
        """Return the possible numbers of heads of a value, and whether the search met an op that it cannot interpret.

        The evidence comes from consumers and producers, through ops that keep columns. Declarations of blocks that have
        heads come before reshapes, because a group norm reshapes too.
        """
        evidence = {*self._from_consumers(value), *self._from_producers(value)}
        declared, reshaped = ({heads for each, heads in evidence if each == kind} for kind in ("declared", "reshaped"))
        return declared or reshaped, UNKNOWN in evidence

    def type(self, value: Value) -> TensorType:
        """Return the type of a value."""
        return self.nodes[value.node].types[value.index]

    def _from_consumers(self, value: Value) -> Iterator[Evidence]:
        """Yield the evidence of the ops that read a value, directly or through ops that keep columns."""

        def results(current: Value) -> list[Value]:
            readers = (number for number, _ in self.readers.get(current, ()))
            return [Value(number) for number in readers if isinstance(self.nodes[number].op, KEEPS_HEADS)]

        for reached in _reach(value, results):
            for number, position in self.readers.get(reached, ()):
                yield self._evidence_of(number, position)

    def _from_producers(self, value: Value) -> Iterator[Evidence]:
        """Yield the evidence of the ops that compute a value, directly or through ops that keep columns."""

        def operands(current: Value) -> list[Value]:
            node, shape = self.nodes[current.node], self.type(current).shape
            is_reshape = isinstance(node.op, Reshape)
            inputs = node.inputs if isinstance(node.op, KEEPS_HEADS) else ()
            return [v for v in inputs if is_reshape or self.type(v).shape == shape]

        for reached in _reach(value, operands):
            yield self._evidence_of(reached.node, None)

    def _evidence_of(self, number: int, operand: int | None) -> Evidence:
        """Return the evidence of one node for operand number `operand`, or for its result if `operand` is None."""
        node = self.nodes[number]
        if isinstance(node.op, hir.Split | SplitLast) and operand is not None:
            return self._split_heads(number)
        packed = node.op.packed_heads(operand) if isinstance(node.op, Hir) else None
        if packed is not None:
            return "declared", packed
        if isinstance(node.op, Reshape):
            heads = _reshaped_heads(self.type(node.inputs[0]), node.types[0])
            return UNKNOWN if heads is None else ("reshaped", heads)
        return NOTHING if isinstance(node.op, COLUMN_PRESERVING + SEARCH_ENDS) else UNKNOWN

    def _split_heads(self, number: int) -> Evidence:
        """Return the heads of packed queries, keys and values: the sum of the parts, if all heads are equally wide."""
        heads, widths = list[int](), list[int]()
        for index, part in enumerate(self.nodes[number].types):
            declared = {n for kind, n in self._from_consumers(Value(number, index)) if kind == "declared"}
            if len(declared) != 1 or not is_static(part.shape[-1]):
                return UNKNOWN
            heads += declared
            widths.append(int(part.shape[-1]))
        equal_widths = all(w * heads[0] == widths[0] * n for w, n in zip(widths, heads, strict=True))
        return ("declared", sum(heads)) if equal_widths else UNKNOWN


def _reach(value: Value, following: Callable[[Value], list[Value]]) -> list[Value]:
    """Return a value, and all values that a function from a value to others leads to."""
    reached = [value]
    for current in reached:
        reached += [v for v in following(current) if v not in reached]
    return reached


def _reshaped_heads(before: TensorType, after: TensorType) -> int | None:
    """Return N of a reshape from `[…, N·D]` to `[…, N, D]` or back, or None for another reshape."""
    packed, split = (before, after) if before.rank < after.rank else (after, before)
    fits = split.rank == packed.rank + 1 and split.shape[:-2] == packed.shape[:-1] and is_static(split.shape[-2])
    return int(split.shape[-2]) if fits else None


# The values inside attention, which are computed where they are captured.
ATTENTION_VALUES = ("probs", "scores", "q", "k", "v")
CAPTURES = ("output", "input", *ATTENTION_VALUES)

# Separates the block that computes a value from the block that reads it: `layers.0.self_attn→o_proj`.
READS = "→"

# Captured values inside attention, by the number of the attention's node and the name of the value.
Taps = dict[tuple[int, str], Value]


@dataclass(frozen=True)
class CapturedBlock:
    """Wrapper that captures a value of a block as a side output, named by the block's path or stacked under one name.

    Attributes:
        stack_name: the pattern under which the values are stacked; "" for an output of each block.
        value: one of `CAPTURES`.
        reads: values that any block reads and no block returns are side outputs too: see `capture_reads`.
    """

    stack_name: str = ""
    value: str = "output"
    reads: bool = False

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Callable[[FlowValue | None], FlowValue]) -> FlowValue:
        return inner(x)


@dataclass(frozen=True)
class Capture:
    """One captured value: of a block, or of the attention in it, whose node has number `attention`."""

    wrapper: CapturedBlock
    block: Path
    attention: int = -1

    @property
    def name(self) -> str:
        """The name of the output."""
        value = self.wrapper.value
        return (self.wrapper.stack_name or path_text(self.block)) + ("" if value == "output" else f".{value}")

    @property
    def is_inner(self) -> bool:
        """Whether it is a value inside attention."""
        return self.wrapper.value in ATTENTION_VALUES


def sort_blocks(blocks: Iterable[Path], nodes: Sequence[Node]) -> list[Path]:
    """Sort blocks by the position of their last node, inner blocks first."""
    last_node = {
        path[:end]: i for i, node in enumerate(nodes) for path in [node.origin.path] for end in range(len(path) + 1)
    }
    return sorted(blocks, key=lambda block: (last_node[block], -len(block)))


def find_attention(captures: Sequence[Capture], nodes: Sequence[Node], where: str) -> list[Capture]:
    """Return the captures with the attention of each block of which a value inside attention is captured.

    Raises:
        GraphError: the block has no attention, or several.
    """
    if not any(capture.is_inner for capture in captures):
        return list(captures)
    attention = {number: node.origin.path for number, node in enumerate(nodes) if isinstance(node.op, hir.Attention)}
    results = []
    for capture in captures:
        inside = [n for n, path in attention.items() if path[: len(capture.block)] == capture.block]
        if capture.is_inner and len(inside) != 1:
            paths = listing(dict.fromkeys(map(path_text, attention.values())), 6) or "in no block"
            count = f"has {len(inside)} attentions" if inside else "has no attention"
            raise GraphError(
                f"{where}: at({path_text(capture.block)!r}).capture({capture.wrapper.value!r}): the block {count}; "
                f"attention is in {paths}"
            )
        results.append(replace(capture, attention=inside[0]) if capture.is_inner else capture)
    return results


def write_tap(b: Builder, op: hir.Attention, operands: Sequence[Value], name: str) -> Value:
    """Write a value inside attention: q, k or v as `[B, S, N, D]`, or its weights `[B, N, S, T]`."""
    if name in ("probs", "scores"):
        return b(replace(op, returns=name), *operands)
    heads = op.heads if name == "q" else op.kv_heads
    return b(split_axis(3, 2, (heads, -1)), operands["qkv".index(name)])


def add_outputs(emit: Emit, captures: Sequence[Capture], taps: Taps, value: FlowValue, where: str) -> None:
    """Add captured values as side outputs, after all edits: of an edited block, the output after the edits.

    Args:
        taps: the values inside attention.
        value: the last active value of the flow.

    Raises:
        GraphError: a later edit replaced the block, or a stage has a side output of that name.
        ShapeError: blocks that are stacked return values of several types, or one returns several values.
    """
    index, stage_outputs = BlockIndex(emit.builder.nodes, emit.unwrap(value)), set(emit.state.outputs)
    stacks = dict[str, dict[str, FlowValue]]()
    for capture in captures:
        stacked, path, name = capture.wrapper.stack_name, path_text(capture.block), capture.name
        values = [emit.wrap(v) for v in _captured_values(index, capture, taps, where)]
        if stacked and len(values) > 1:
            raise ShapeError(
                f"{where}: at({stacked!r}): {path} returns {len(values)} values: capture it without stacked"
            )
        if name in stage_outputs:
            raise GraphError(f"{where}: at({name!r}): the flow has a side output {quote(name)} already")
        if stacked:
            emit.state.outputs[name] = values[0]  # reserves the position among the outputs
            stacks.setdefault(name, {})[path] = values[0]
        else:
            names = [name] if len(values) == 1 else [f"{name}[{i}]" for i in range(len(values))]
            emit.state.outputs |= dict(zip(names, values, strict=True))
    for stacked, by_path in stacks.items():
        emit.state.outputs[stacked] = _stack(emit, stacked, by_path, where)


def _captured_values(index: BlockIndex, capture: Capture, taps: Taps, where: str) -> Sequence[Value]:
    """Return the values of a capture; several if its block returns several.

    Raises:
        GraphError: a later edit replaced the block, or it has no single input and that is captured.
    """
    if capture.is_inner:
        return [taps[capture.attention, capture.wrapper.value]]
    ports, path = index.ports(capture.block), path_text(capture.block)
    if ports is None:
        raise GraphError(f"{where}: at({path!r}): a later edit replaced the block around it; capture it after that")
    if capture.wrapper.value == "output":
        return ports.captured_outputs
    if ports.input is None:
        raise GraphError(
            f"{where}: at({path!r}).capture('input'): the block reads {len(ports.inputs)} values from outside, and "
            "declares none as its input: capture a block around it or inside of it"
        )
    return [ports.input]


def _stack(emit: Emit, name: str, values: Mapping[str, FlowValue], where: str) -> FlowValue:
    """Return captured values of one type, by block path, stacked along a new first axis."""
    (ref_path, ref), *others = values.items()
    for path, value in others:
        if value.type != ref.type:
            raise ShapeError(
                f"{where}: at({name!r}): stacked blocks return values of one type; {ref_path} returns {ref.type}, "
                f"{path} {value.type}: capture them separately"
            )
    with emit.scope("captured"):
        return emit.stack(list(values.values()))


def capture_reads(emit: Emit, where: str) -> None:
    """Make each value that a block reads from outside a side output, unless it is one, an input, weight or constant.

    Together with captures of all blocks they are all values between blocks: for example the heads that `o_proj` reads,
    which ops of `self_attn` itself compute.

    Args:
        emit: a flow after all edits, without marks of blocks.
        where: the name of the flow, which is the path of nodes outside of all blocks.
    """
    nodes, outputs = emit.builder.nodes, emit.state.outputs
    captured = {emit.unwrap(output) for output in outputs.values()}
    for reader in nodes:
        for value in reader.inputs:
            source, path = nodes[value.node], reader.origin.path
            # A block reads the value if the path of the value is outside of the block.
            is_read = path not in ((where,), source.origin.path[: len(path)])
            if is_read and value not in captured and not isinstance(source.op, Leaf):
                captured.add(value)
                name = _read_name(source.origin.path, path)
                outputs[name if name not in outputs else f"{name}[{value.node}]"] = emit.wrap(value)


def _read_name(source: Path, reader: Path) -> str:
    """Return the name of a value by the paths of the block that computes it and of the block that reads it."""
    shared = len(os.path.commonprefix([[*map(str, path)] for path in (source, reader)]))
    return f"{path_text(source)}{READS}{path_text(reader[shared:])}"
