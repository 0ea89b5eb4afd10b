"""This module prints the difference between two graphs, such as a program before and after a pass."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rlx_jax.ir.graph import Graph
from rlx_jax.ir.text import Line, graph_lines


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
    changed = list(_changes(graph_lines(before, levels[0]), graph_lines(after, levels[1])))
    return "\n".join([*lines, "", *changed])


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
