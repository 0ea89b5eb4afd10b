"""Cost of a program, counted on its ops, and the table of its blocks: output, parameters, FLOPs and bytes."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import Graph, Input, Mir, Node
from rlx_jax.ir.paths import LayerIndex, Path, path_text
from rlx_jax.ir.text import Row, TextTable, block_rows
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.mir.small import live_nodes

HEADER = ("block", "output", "params", "FLOPs", "bytes")
# Maximum widths of the columns. With the separators, no line is longer than 80 characters.
WIDTHS = (29, 22, 7, 7, 7)


@dataclass(frozen=True)
class Cost:
    """Cost of one run of a program. Repeated layers count as often as they run (XLA counts a scan's body once).

    Attributes:
        flops: twice the number of multiply-adds of all contractions.
        bytes: the bytes that ops read and write, as if each ran alone: an upper bound, since XLA fuses ops.
        workspace: bytes of scratch memory of the op that needs most.
    """

    flops: int = 0
    bytes: int = 0
    workspace: int = 0

    def then(self, other: Cost, times: int = 1) -> Cost:
        """Return the cost of this followed by `times` runs of `other`."""
        largest = max(self.workspace, other.workspace)
        return Cost(self.flops + times * other.flops, self.bytes + times * other.bytes, largest)


class OpCost(NamedTuple):
    """A node of a graph or of one of its regions, by its number, the cost of one run of it, and how often it runs."""

    graph: Graph
    number: int
    cost: Cost
    times: int

    @property
    def node(self) -> Node:
        """Return the node."""
        return self.graph.nodes[self.number]


def op_costs(graph: Graph, times: int = 1) -> Iterator[OpCost]:
    """Yield the cost of each op of a MIR program with static sizes; dead nodes are left out.

    Args:
        graph: the program or a region.
        times: how often it runs.
    """
    for number in sorted(live_nodes(graph)):
        node = graph.nodes[number]
        op, operands = node.op, [graph.type(v) for v in node.inputs]
        for region in op.regions():
            yield from op_costs(region, times * op.iterations())
        if isinstance(op, Mir):
            counts = (op.traits.flops, op.traits.bytes, op.traits.workspace)
            yield OpCost(graph, number, Cost(*(count(op, operands, node.types) for count in counts)), times)


def costs(graph: Graph) -> dict[Path, Cost]:
    """Return the cost of each block of a MIR program with static sizes."""
    costs_by_path: dict[Path, Cost] = {}
    for entry in op_costs(graph):
        path = entry.node.origin.path
        costs_by_path[path] = costs_by_path.get(path, Cost()).then(entry.cost, entry.times)
    return costs_by_path


def total(parts: Iterable[Cost]) -> Cost:
    """Return the cost of several parts that run one after the other."""
    return functools.reduce(Cost.then, parts, Cost())


def cost(graph: Graph) -> Cost:
    """Return the cost of a MIR program with static sizes."""
    return total(costs(graph).values())


@dataclass(frozen=True)
class OutlineRow:
    """Row of the outline: a block, or a layer with several blocks.

    Attributes:
        path: the block path.
        output: the types of its outputs.
        params: the number of parameters, in a region of all its layers together.
        cost: the cost, in a region of all its layers together; None without static sizes.
        layers: for a repeated layer, the number of layers.
    """

    path: Path
    output: str
    params: int
    cost: Cost | None
    layers: int = 1

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Return the cells for parameters, FLOPs and bytes."""
        flops, bytes_ = ("", "") if self.cost is None else map(compact, (self.cost.flops, self.cost.bytes))
        return compact(self.params), flops, bytes_


@dataclass(frozen=True)
class Outline:
    """Table of the blocks of one program.

    Attributes:
        name: the name of the program.
        inputs: its inputs.
        outputs: types of its outputs by name.
        rows: the rows.
        params: the total number of parameters.
        cost: the total cost; None without static sizes.
        sizes: the sizes of symbolic dims for which the cost is computed.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: Mapping[str, TensorType]
    rows: tuple[OutlineRow, ...]
    params: int
    cost: Cost | None
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        lines = [self.name, *_wrap("  in   ", [f"{i.input} {i.type}" for i in self.inputs])]
        lines += [*_wrap("  out  ", [f"{name} {t}" for name, t in self.outputs.items()]), ""]
        return "\n".join([*map(str.rstrip, lines), str(self._table(self._label)), self._note()])

    def _repr_html_(self) -> str:
        """Return the table as HTML for notebooks, with full block paths."""
        return self._table(lambda row: path_text(row.path)).html(f"{self.name}. {self._note()}")

    def _table(self, label: Callable[[OutlineRow], str]) -> TextTable:
        rows = [(label(row), _shorten(row.output), *row.numbers) for row in self.rows]
        total = ("total", "", *OutlineRow((), "", self.params, self.cost).numbers)
        return TextTable([*rows, total], HEADER, left=2, widths=WIDTHS)

    def _label(self, row: OutlineRow) -> str:
        if row.layers > 1:
            return f"{path_text(row.path)} × {row.layers}"
        layer = _layer(row.path)
        return path_text(row.path) if layer in ((), row.path) else f"  {path_text(row.path[len(layer) :])}"

    def _note(self) -> str:
        if self.cost is None:
            return "FLOPs and bytes are not known without sizes"
        sizes = ", ".join(f"{name} {size}" for name, size in sorted(self.sizes.items()))
        return f"FLOPs and bytes of one call{f' at {sizes}' if sizes else ''}"


def outline(
    name: str, blocks: Graph, mir: Graph | None, sizes: Mapping[str, int], inputs: tuple[Input, ...]
) -> Outline:
    """Return the outline of a program.

    Args:
        name: the name of the program.
        blocks: its HIR.
        mir: its MIR with static sizes; None for an outline without costs.
        sizes: the sizes of symbolic dims in `mir`.
        inputs: the inputs to list.
    """
    blocks_by_path, block_costs = block_rows(blocks), {} if mir is None else costs(mir)
    paths = dict.fromkeys([*blocks_by_path, *block_costs])
    rows: list[OutlineRow] = []
    for layer, layer_paths in _groups(paths):
        members = {p: blocks_by_path.get(p, Row()) for p in layer_paths}
        costs_of = {p: None if mir is None else block_costs.get(p, Cost()) for p in layer_paths}
        parts = [OutlineRow(p, row.output, row.count, costs_of[p]) for p, row in members.items() if p != layer]
        if layer:
            layer_cost = None if mir is None else total(block_costs.get(p, Cost()) for p in layer_paths)
            output = members[layer].output if layer in members else ""
            params, iterations = sum(row.count for row in members.values()), max(r.iterations for r in members.values())
            rows.append(OutlineRow(layer, output, params, layer_cost, iterations))
        rows += parts
    count = sum(row.count for row in blocks_by_path.values())
    outputs = dict(zip(blocks.output_names, blocks.output_types, strict=True))
    total_cost = None if mir is None else total(block_costs.values())
    return Outline(name, inputs, outputs, tuple(rows), count, total_cost, dict(sizes))


def compact(number: int) -> str:
    """Return a number in at most six characters; empty for 0.

    >>> compact(0), compact(9_999), compact(12_345), compact(8_030_261_248)
    ('', '9,999', '12.3K', '8.03G')
    """
    if number < 10_000:
        return f"{number:,}" if number else ""
    scaled, units = float(number), iter("KMGTPE")
    while scaled >= 999.5:  # from here on, rounding to three digits gives 1000
        scaled, unit = scaled / 1000, next(units)
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{unit}"


# -- collecting --------------------------------------------------------------------------------


def _layer(path: Path) -> Path:
    """Return the layer that contains a block: the path up to the layer's number; () if there is none."""
    index = next((i for i, s in enumerate(path) if isinstance(s, int | LayerIndex)), None)
    return () if index is None else path[: index + 1]


def _groups(paths: Iterable[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each layer with its blocks, in the order of first occurrence; a block outside of layers with layer ()."""
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        groups.setdefault(_layer(path) or path, []).append(path)
    for layer, layer_paths in groups.items():
        yield (layer if _layer(layer) else ()), layer_paths


# -- printing ----------------------------------------------------------------------------------


def _shorten(output: str) -> str:
    """Return a block's output types, shortened to the column width.

    Of several values it has the first and the number of others, of many sizes the first and the last.

    >>> _shorten("f32[batch,seq,48], f32[batch,seq,24]"), _shorten("f32[batch,floordiv(height, 5) + 1,18]")
    ('f32[batch,seq,48] + 1', 'f32[batch,…,18]')
    """
    if len(output) <= WIDTHS[1]:
        return output
    shown, *rest = re.split(r"(?<=\]), ", output)
    more = f" + {len(rest)}" if rest else ""
    if len(shown) + len(more) > WIDTHS[1]:
        sizes = re.split(r",(?! )", shown)  # a comma inside a size is followed by a space
        shown = ",".join([sizes[0], "…", sizes[-1]]) if len(sizes) > 2 else shown
    return shown + more


def _wrap(mark: str, items: Sequence[str], width: int = 80) -> list[str]:
    """Return comma-separated items in lines of at most `width`, without a break inside an item; long items are cut."""
    max_item_width = width - len(mark) - 1
    shortened = (item if len(item) <= max_item_width else f"{item[: max_item_width - 1]}…" for item in items)
    text = ", ".join(item.replace(" ", "\0") for item in shortened)  # textwrap breaks at spaces
    lines = textwrap.wrap(text, width, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines or [mark]]
