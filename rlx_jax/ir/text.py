"""Text dumps of graphs, and summaries by block. All levels share one format, and the text is the same in every run."""

from __future__ import annotations

import difflib
import html
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.ir.graph import Graph, Hir, Input, Leaf, Node, Op, Param, Value
from rlx_jax.ir.param import Program, Stack, packed_arrays, packing_of, printed_name, size_without_padding
from rlx_jax.ir.paths import Path, path_text

# `TextTable` formats rows of cells as text for a terminal, or as HTML for a page.


@dataclass(frozen=True)
class TextTable:
    """A table of text cells with an optional header.

    Attributes:
        rows: the cells; all rows have the same length.
        head: the names of the columns; () for no header.
        left: the number of leading columns that are left-aligned; the others are right-aligned.
        widths: the widths of the columns in characters; by default each is as wide as its longest cell.
        gap: the text between two columns.
        indent: the text before the first column.
        wrap: the width of the table at which the last column wraps; with 0 no column wraps, and cells longer than their
            column are truncated.
    """

    rows: Sequence[Sequence[object]]
    head: Sequence[str] = ()
    left: int = 1
    widths: Sequence[int] = ()
    gap: str = "  "
    indent: str = ""
    wrap: int = 0

    def __str__(self) -> str:
        cells = [[str(cell) for cell in row] for row in ([self.head] if self.head else []) + [*self.rows]]
        widths = self.widths or [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(self._wrapped(row, widths) if self.wrap else self._line(row, widths) for row in cells)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        truncated = [c if len(c) <= w else f"{c[: w - 1]}…" for c, w in zip(row, widths, strict=True)]
        fitted = zip(truncated, widths, strict=True)
        aligned = (c.ljust(w) if i < self.left else c.rjust(w) for i, (c, w) in enumerate(fitted))
        return f"{self.indent}{self.gap.join(aligned)}".rstrip()

    def _wrapped(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = [f"{cell:<{width}}{self.gap}" for cell, width in zip(row[:-1], widths, strict=False)]
        indent = len(self.indent) + sum(width + len(self.gap) for width in widths[: len(row) - 1])
        return textwrap.fill(
            row[-1], self.wrap, initial_indent=self.indent + "".join(cells), subsequent_indent=" " * indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    def html(self, caption: str) -> str:
        """Return the table as HTML. Cells are escaped and not truncated."""
        head = f"<caption>{html.escape(caption)}</caption><thead>{self._html_row('th', self.head)}</thead>"
        return f"<table>{head}<tbody>{''.join(self._html_row('td', row) for row in self.rows)}</tbody></table>"

    def _html_row(self, tag: str, row: Sequence[object]) -> str:
        sides = ["left" if i < self.left else "right" for i in range(len(row))]
        pairs = zip(sides, row, strict=True)
        row_html = "".join(f'<{tag} style="text-align:{side}">{html.escape(str(cell))}</{tag}>' for side, cell in pairs)
        return f"<tr>{row_html}</tr>"


def dump(graph: Graph, level: str, note: str = "") -> str:
    """Return the text of a HIR or MIR graph.

    hir @name (n nodes, m outputs, …)
      block ops: Kind=count, …

      h0 [input "x"] = input("x") : f32[batch,8]
      …
      return h7

    A MIR dump has the same lines inside `mir @name { graph @name … }`, with kinds sorted by count and values %0, %1 …
    """
    return dump_graph(graph, level, note) if level == "hir" else f"mir @{graph.name} {{\n{dump_graph(graph)}\n}}"


def dump_graph(graph: Graph, level: str = "mir", note: str = "") -> str:
    """Return the text of a graph. The "arena" of MIR is the total size of all values without any reuse of memory."""
    return "\n".join([stats(graph, level, note), "", *(line.text for line in graph_lines(graph, level))])


def stats(graph: Graph, level: str, note: str = "") -> str:
    """Return the head of a dump: the numbers of nodes and outputs, and the number of ops of each kind."""
    if level == "hir":
        kinds_text = ", ".join(f"{kind}={count}" for kind, count in sorted(_kinds(graph).items()))
        head = f"hir @{graph.name} ({len(graph.nodes)} nodes, {len(graph.outputs)} outputs{note})"
        return f"{head}\n  block ops: {kinds_text}"
    kinds = sorted(_kinds(graph).items(), key=lambda item: (-item[1], item[0]))
    sizes = [t.nbytes for n in graph.nodes for t in n.types if t.is_static]
    symbolic = any(not t.is_static for n in graph.nodes for t in n.types)
    arena = f"{format_bytes(sum(sizes))} arena{' and symbolic sizes' if symbolic else ''}"
    head = f"graph @{graph.name} ({len(graph.nodes)} nodes, {len(graph.outputs)} outputs, {arena})"
    return f"{head}\n  op kinds: {', '.join(f'{kind}={count}' for kind, count in kinds)}"


def format_bytes(count: int) -> str:
    """Return a number of bytes as text with a decimal unit.

    >>> format_bytes(999), format_bytes(2_471_645_608)
    ('999 B', '2.47 GB')
    """
    return scaled_text(count, "B") if count >= 1000 else f"{count} B"


def scaled_text(value: float, unit: str) -> str:
    """Return a positive number of a unit as text, with the prefix by which it is at least 1.

    >>> scaled_text(4.2e-6, "s"), scaled_text(2.5e12, "FLOP")
    ('4.20 µs', '2,500.00 GFLOP')
    """
    prefixes = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
    scale, prefix = next((pair for pair in prefixes if value >= pair[0]), prefixes[-1])
    return f"{value / scale:,.2f} {prefix}{unit}"


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers.

    >>> number_runs([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    groups = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in group] for _, group in groups)
    return [(run[0], run[-1]) for run in runs]


def _kinds(graph: Graph) -> Counter[str]:
    return Counter(type(n.op).__name__.removesuffix("Op") for n in graph.nodes)


@dataclass(frozen=True)
class Line:
    """A line of a dump.

    Attributes:
        text: the line.
        content: the part of the program that the line is about, without numbers of values.
        key: the part of the content by which the lines of two programs are matched. For an op with regions it is the
            name alone, because the attributes change with the region.
        reads: the operands, each as the position of its line in the list of lines and the number of the result.
        op: the op, whose text may leave out attributes; None for an op with regions, which have their own lines.
    """

    text: str
    content: str
    key: str
    reads: tuple[tuple[int, int], ...] = ()
    op: Op | None = None


def graph_lines(graph: Graph, level: str) -> list[Line]:
    """Return the lines of a dump after its head: all nodes, with regions, the state writes and `return`."""
    return _lines(graph, MARKS[level], "  ", "return", 0)


# The first character of the ids of values.
MARKS = {"hir": "h", "mir": "%"}


def _lines(graph: Graph, mark: str, indent: str, last: str, start: int) -> list[Line]:
    """Return the lines of all nodes, their regions, the state writes, and the outputs, in a line that begins `last`.

    Ids begin with `mark`. `start` is the position of the first line in the list of all lines.
    """
    lines: list[Line] = []
    positions: list[int] = []  # of the line of each node
    outputs = {v.node for v in graph.outputs}
    tags = [_tag(n, i, mark) for i, n in enumerate(graph.nodes)]
    width = max(map(len, tags), default=0)

    def add(line: str, content: str, values: Iterable[Value] = (), key: str = "", op: Op | None = None) -> None:
        reads = tuple((positions[v.node], v.index) for v in values)
        lines.append(Line(indent + line, indent + content, indent + (key or content), reads, op))

    for number, (node, tag) in enumerate(zip(graph.nodes, tags, strict=True)):
        text = node.op.text()
        # HIR may contain tensor ops of MIR; the prefix shows that a line is not a block.
        if mark == "h" and not isinstance(node.op, Leaf | Hir) and not node.op.regions():
            text = f"mir({text})"
        operands = f"({', '.join(_ref(graph, v, mark) for v in node.inputs)})" if node.inputs else ""
        types = ", ".join(map(str, node.types))
        origin = "" if isinstance(node.op, Leaf) else f"  // {node.origin}"
        output = "  ← output" if number in outputs else ""
        # The pass that created a node is not part of the program.
        content = f"{text} : {types} {path_text(node.origin.path) if origin else ''}{output}"
        line = f"{tag:<{width}} = {text}{operands} : {types}{origin}{output}"
        has_regions = bool(node.op.regions())
        add(line, content, node.inputs, node.op.name() if has_regions else "", None if has_regions else node.op)
        positions.append(start + len(lines) - 1)
        for region in node.op.regions():
            add("{", "{")
            lines += _lines(region, mark, indent + "    ", "yield", start + len(lines))
            add("}", "}")
    for leaf, value in graph.writes:
        write = f'write state("{path_text(leaf.path)}", {leaf})'
        add(f"{write} := {_ref(graph, value, mark)}", write, (value,))
    add(f"{last} {', '.join(_ref(graph, v, mark) for v in graph.outputs)}", last, graph.outputs)
    return lines


def _tag(node: Node, number: int, mark: str) -> str:
    """Return a node's id, with the name if it is an input or a parameter."""
    match node.op:
        case Input(input=name):
            return f'{mark}{number} [input "{name}"]'
        case Param(programs=programs):
            return f'{mark}{number} [param "{printed_name(programs[0])}"]'
    return f"{mark}{number}"


def _ref(graph: Graph, value: Value, mark: str) -> str:
    has_several = len(graph.nodes[value.node].types) > 1
    return f"{mark}{value.node}" + (f".{value.index}" if has_several else "")


def block_paths(graph: Graph) -> set[Path]:
    """Return the paths of all blocks, including enclosing blocks without nodes of their own."""
    paths = {node.origin.path for _, node in graph.walk()}
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


def summary(
    graph: Graph, device_shard: Callable[[Program], tuple[str, int]] | None = None, unread: Collection[str] = ()
) -> str:
    """Return a table with one row for each block path: its output, its number of parameters, and the weights it reads.

    Args:
        graph: the HIR.
        device_shard: returns the sharding of a weight as text, and its bytes on one device; the table then has both.
        unread: the inputs that the first line omits.
    """
    rows = block_rows(graph)
    head = ["block", "output", "parameters", *([] if device_shard is None else ["bytes of one device"]), "weights"]
    table, total, device_bytes = list[list[str]](), 0, 0
    for path, row in rows.items():
        total += row.count
        weights, bytes_cell = [_packed_name(name, programs) for name, programs in row.weights.items()], ""
        if device_shard is not None:
            weights = [f"{name} {device_shard(programs[0])[0]}" for name, programs in row.weights.items()]
            block_bytes = sum(device_shard(program)[1] for program in row.new)
            device_bytes, bytes_cell = device_bytes + block_bytes, f"{block_bytes:,}" if block_bytes else ""
        count = f"{row.count:,}" if row.count else ""
        table.append(
            [path_text(path), row.shape, count, *([] if device_shard is None else [bytes_cell]), ", ".join(weights)]
        )
    signature = f"{graph.name}: {', '.join(f'{i.input} {i.type}' for i in graph.inputs if i.input not in unread)}"
    device_note = "" if device_shard is None else f", {device_bytes:,} bytes of them on one device"
    text_table = TextTable(table, head, left=len(head), indent="  ")
    return f"{signature}\n{text_table}\n  {total:,} parameters{device_note}"


def _packed_name(name: str, programs: tuple[Program, ...]) -> str:
    """Return the name of a weight; if it is packed in the checkpoint, with its scheme and its bytes on a device."""
    schemes = {packing_of(program): None for program in programs}
    if None in schemes or not schemes:
        return name
    nbytes = sum(array.type.nbytes for program in programs for array in packed_arrays(program).values())
    return f"{name} ({'/'.join(filter(None, schemes))}, {nbytes:,} bytes)"


@dataclass
class Row:
    """One row of a summary.

    Attributes:
        output: the types of the values that leave the block.
        iterations: the number of layers, if the block is in a region.
        weights: the programs of each weight, by name.
        new: the weights that no earlier row has.
        count: the number of elements of these.
    """

    output: str = ""
    iterations: int = 1
    weights: dict[str, tuple[Program, ...]] = field(default_factory=dict)
    new: list[Program] = field(default_factory=list)
    count: int = 0

    @property
    def shape(self) -> str:
        """The output of the block, with the number of layers if there are several."""
        return f"{self.output} × {self.iterations}" if self.iterations > 1 else self.output


# A function that returns the parameter that a value of a graph is; None for other values.
ParamOf = Callable[[Graph, Value], Param | None]


def _leaf_param(graph: Graph, value: Value) -> Param | None:
    op = graph.nodes[value.node].op
    return op if isinstance(op, Param) else None


def block_rows(graph: Graph, param_of: ParamOf = _leaf_param) -> dict[Path, Row]:
    """Return the output of each block and the weights that it reads. A shared weight counts in the first block only."""
    rows: dict[Path, Row] = {}
    _collect(graph, rows, set(), 1, param_of)
    return rows


def _collect(
    graph: Graph, rows: dict[Path, Row], counted: set[Program], iterations: int, param_of: ParamOf
) -> None:  # fmt: skip
    """Add the nodes of a graph, which runs `iterations` times, to `rows`, and their weights to `counted`."""
    for node in graph.nodes:
        for region in node.op.regions():
            _collect(region, rows, counted, iterations * node.op.iterations(), param_of)
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        row = rows.setdefault(node.origin.path, Row())
        row.output, row.iterations = ", ".join(map(str, node.types)), iterations
        for op in (param_of(graph, value) for value in node.inputs):
            if op is None:
                continue
            programs = tuple(dict.fromkeys(op.programs))  # several layers may share a program
            if (name := printed_name(Stack(programs))) not in row.weights:
                row.weights[name] = programs
                unseen = [program for program in programs if program not in counted]
                row.new += unseen
                row.count += sum(map(size_without_padding, unseen))
                counted.update(programs)


# This module prints the difference between two graphs, such as a program before and after a pass.


def diff_text(before: Graph, after: Graph, levels: tuple[str, str], note: str = "") -> str:
    """Return the difference between two graphs.

    diff @name (level, note)
      diff: 12 → 10 nodes (1 → 1 outputs)
      op delta: Linear-2, Narrow+3

    - h4 = linear(h1, h2) : …
    + h6 = linear(h1, h5) : …
      … 7 equal

    Counts include regions. A line is equal if its op, types, origin and operands are; the numbers of its values may
    differ.

    Args:
        before, after: the graphs.
        levels: their levels, "hir" or "mir".
        note: more for the first line.
    """
    counts = [Counter(type(node.op).__name__.removesuffix("Op") for _, node in g.walk()) for g in (before, after)]
    names = sorted(counts[0] | counts[1])
    deltas = {name: counts[1][name] - counts[0][name] for name in names}
    lines = [
        f"diff @{after.name} ({levels[1]}{note})",
        f"  diff: {counts[0].total()} → {counts[1].total()} nodes "
        f"({len(before.outputs)} → {len(after.outputs)} outputs)",
        f"  op delta: {', '.join(f'{name}{delta:+}' for name, delta in deltas.items() if delta) or 'none'}",
    ]
    changes = list(_changes(graph_lines(before, levels[0]), graph_lines(after, levels[1])))
    return "\n".join([*lines, "", *changes])


def _changes(before: Sequence[Line], after: Sequence[Line]) -> Iterator[str]:
    """Yield the lines that differ, marked `-` and `+`, and the number of equal lines between them."""
    matcher = difflib.SequenceMatcher(None, [b.key for b in before], [a.key for a in after], autojunk=False)
    blocks = matcher.get_matching_blocks()  # the last is empty, at both ends
    matches = {block.b + i: block.a + i for block in blocks for i in range(block.size)}

    def is_equal(number: int) -> bool:
        old, new = before[matches[number]], after[number]
        # Operands are equal if the lines that compute them match, whatever their numbers are.
        same_op = old.content == new.content and old.op == new.op
        return same_op and old.reads == tuple((matches.get(line), i) for line, i in new.reads)

    entries: list[tuple[str, Line]] = []
    next_before = next_after = 0
    for block in blocks:
        entries += [("-", line) for line in before[next_before : block.a]]
        entries += [("+", line) for line in after[next_after : block.b]]
        next_before, next_after = block.a + block.size, block.b + block.size
        for number in range(block.b, next_after):
            new = after[number]
            entries += [(" ", new)] if is_equal(number) else [("-", before[matches[number]]), ("+", new)]
    for sign, run in itertools.groupby(entries, key=lambda entry: entry[0]):
        lines = [line for _, line in run]
        yield from [f"  … {len(lines)} equal"] if sign == " " else (_marked(sign, line) for line in lines)


def _marked(sign: str, line: Line) -> str:
    return sign + re.sub(r" {2,}= ", " = ", line.text[1:], count=1)  # without the padding of the id
