"""The values of blocks that edits add to a flow as side outputs: by `at(…).capture()`, or all values between blocks."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, ShapeError, listing, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Leaf, Node, Value
from rlx_jax.ir.ops.shape import split_axis
from rlx_jax.ir.paths import Path, path_text
from rlx_jax.trace.boundaries import BlockIndex
from rlx_jax.trace.emit import Emit, FlowValue

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
