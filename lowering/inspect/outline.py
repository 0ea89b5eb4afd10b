"""What a program takes, counted on its ops, and the table of its blocks: output, parameters, FLOPs and bytes."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlx_jax.ir.graph import Graph, Input, Mir
from rlx_jax.ir.paths import LayerIndex, Path, path_text
from rlx_jax.ir.table import TextTable
from rlx_jax.ir.text import block_rows
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.mir.small import live

HEAD = ("block", "output", "params", "FLOPs", "bytes")
# Of the columns; with what stands between them no line is longer than 80 characters.
WIDTHS = (29, 22, 7, 7, 7)


@dataclass(frozen=True)
class Cost:
    """Of one run of a program, layers as often as they run (XLA counts a scan's body once).

    flops: multiply-adds × 2 of all contractions. bytes: what its ops read and write, each as if it ran alone: a bound
    from above, as XLA fuses. workspace: scratch memory of the op that needs most.
    """

    flops: int = 0
    bytes: int = 0
    workspace: int = 0

    def then(self, other: Cost, times: int = 1) -> Cost:
        """This, and `times` that after it."""
        largest = max(self.workspace, other.workspace)
        return Cost(self.flops + times * other.flops, self.bytes + times * other.bytes, largest)


def costs(graph: Graph, times: int = 1) -> dict[Path, Cost]:
    """The cost of each block of a MIR program of static sizes, as often as it runs: of the nodes that something
    needs."""
    found: dict[Path, Cost] = {}
    for node in (graph.nodes[number] for number in sorted(live(graph))):
        op, operands = node.op, [graph.type(v) for v in node.inputs]
        parts = [part for region in op.regions() for part in costs(region, op.iterations()).items()]
        if isinstance(op, Mir):
            counts = (op.traits.flops, op.traits.bytes, op.traits.workspace)
            parts.append((node.origin.path, Cost(*(count(op, operands, node.types) for count in counts))))
        for path, each in parts:
            found[path] = found.get(path, Cost()).then(each, times)
    return found


def total(parts: Iterable[Cost]) -> Cost:
    """One after the other."""
    return functools.reduce(Cost.then, parts, Cost())


def cost(graph: Graph) -> Cost:
    """The cost of a MIR program of static sizes."""
    return total(costs(graph).values())


@dataclass(frozen=True)
class OutlineRow:
    """A block, or a layer around several: numbers are those of all layers together, where it is in a region."""

    path: Path
    output: str
    params: int
    cost: Cost | None
    layers: int = 1  # over 0 where it is a layer, of which there are so many

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Parameters, FLOPs, bytes."""
        flops, bytes_ = ("", "") if self.cost is None else map(compact, (self.cost.flops, self.cost.bytes))
        return compact(self.params), flops, bytes_


@dataclass(frozen=True)
class Outline:
    """The table of one program. `sizes` are those that FLOPs and bytes are of."""

    name: str
    inputs: tuple[Input, ...]
    outputs: Mapping[str, TensorType]
    rows: tuple[OutlineRow, ...]
    params: int
    cost: Cost | None
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        lines = [self.name, *_wrapped("  in   ", [f"{i.input} {i.type}" for i in self.inputs])]
        lines += [*_wrapped("  out  ", [f"{name} {t}" for name, t in self.outputs.items()]), ""]
        return "\n".join([*map(str.rstrip, lines), str(self._table(self._label)), self._note()])

    def _repr_html_(self) -> str:
        """The same for notebooks, with whole block paths."""
        return self._table(lambda row: path_text(row.path)).html(f"{self.name}. {self._note()}")

    def _table(self, label: Callable[[OutlineRow], str]) -> TextTable:
        rows = [(label(row), _fitting(row.output), *row.numbers) for row in self.rows]
        total = ("total", "", *OutlineRow((), "", self.params, self.cost).numbers)
        return TextTable([*rows, total], HEAD, left=2, widths=WIDTHS)

    def _label(self, row: OutlineRow) -> str:
        if row.layers > 1:
            return f"{path_text(row.path)} × {row.layers}"
        around = _layer(row.path)
        return path_text(row.path) if around in ((), row.path) else f"  {path_text(row.path[len(around) :])}"

    def _note(self) -> str:
        if self.cost is None:
            return "FLOPs and bytes are not known without sizes"
        at = ", ".join(f"{name} {size}" for name, size in sorted(self.sizes.items()))
        return f"FLOPs and bytes of one call{f' at {at}' if at else ''}"


def outline(
    name: str, blocks: Graph, mir: Graph | None, sizes: Mapping[str, int], inputs: tuple[Input, ...]
) -> Outline:
    """The outline of a program with these inputs: `blocks` is its HIR, `mir` the same with sizes, without which there
    are no FLOPs."""
    found = {path: (row.output, row.count) for path, row in block_rows(blocks).items()}
    count = sum(count for _, count in found.values())
    of_blocks = {} if mir is None else costs(mir)
    iterations = _iterations(blocks)
    paths = list(dict.fromkeys([*found, *(path for path in of_blocks if path not in found)]))
    rows: list[OutlineRow] = []
    for around, inside in _groups(paths):
        costs_of = {p: None if mir is None else of_blocks.get(p, Cost()) for p in inside}
        parts = [OutlineRow(p, *found.get(p, ("", 0)), each) for p, each in costs_of.items()]
        if around:
            of_layer = None if mir is None else total(of_blocks.get(p, Cost()) for p in inside)
            output = next((part.output for part in reversed(parts) if part.path == around), "")
            parts = [part for part in parts if part.path != around]
            params = sum(found.get(p, ("", 0))[1] for p in inside)
            rows.append(OutlineRow(around, output, params, of_layer, iterations.get(around, 1)))
        rows += parts
    outputs = dict(zip(blocks.output_names, (blocks.type(v) for v in blocks.outputs), strict=True))
    whole = None if mir is None else total(of_blocks.values())
    return Outline(name, inputs, outputs, tuple(rows), count, whole, dict(sizes))


def compact(number: int) -> str:
    """At most six characters.

    >>> compact(0), compact(9_999), compact(12_345), compact(8_030_261_248)
    ('', '9,999', '12.3K', '8.03G')
    """
    if number < 10_000:
        return f"{number:,}" if number else ""
    scaled, units = float(number), iter("KMGTPE")
    while scaled >= 999.5:
        scaled, unit = scaled / 1000, next(units)
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{unit}"


# -- collecting --------------------------------------------------------------------------------


def _iterations(graph: Graph) -> dict[Path, int]:
    """How often each layer of a region runs."""
    found: dict[Path, int] = {}
    for node in graph.nodes:
        for region in node.op.regions():
            found |= {_layer(n.origin.path): node.op.iterations() for n in region.nodes if _layer(n.origin.path)}
    return found


def _layer(path: Path) -> Path:
    """The layer around a block: the path up to its number; () where it is in none."""
    at = next((i for i, s in enumerate(path) if isinstance(s, int | LayerIndex)), None)
    return () if at is None else path[: at + 1]


def _groups(paths: Sequence[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Blocks by the layer around them, in the order of the first; each that is in none by itself."""
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        groups.setdefault(_layer(path) or path, []).append(path)
    for around, inside in groups.items():
        yield (around if _layer(around) else ()), inside


# -- printing ----------------------------------------------------------------------------------


def _fitting(output: str) -> str:
    """What leaves a block, as much of it as the column takes: of several values the first and how many more, of many
    sizes the first and the last.

    >>> _fitting("f32[batch,seq,48], f32[batch,seq,24]"), _fitting("f32[batch,floordiv(height, 5) + 1,18]")
    ('f32[batch,seq,48] + 1', 'f32[batch,…,18]')
    """
    if len(output) <= WIDTHS[1]:
        return output
    first, *others = re.split(r"(?<=\]), ", output)
    more = f" + {len(others)}" if others else ""
    if len(first) + len(more) > WIDTHS[1]:
        sizes = re.split(r",(?! )", first)  # within a size there is a space behind a comma
        first = ",".join([sizes[0], "…", sizes[-1]]) if len(sizes) > 2 else first
    return first + more


def _wrapped(mark: str, items: Sequence[str], width: int = 80) -> list[str]:
    """Items with commas between them, in lines of at most `width`; none is broken, and one that is too long cut."""
    room = width - len(mark) - 1
    short = (item if len(item) <= room else f"{item[: room - 1]}…" for item in items)
    text = ", ".join(item.replace(" ", "\0") for item in short)
    lines = textwrap.wrap(text, width, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines or [mark]]
