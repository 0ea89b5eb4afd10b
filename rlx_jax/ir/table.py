"""`TextTable`: rows of cells as text for a terminal, and as HTML for a page."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """Rows of cells under a head.

    Attributes:
        rows: the cells, as many in each row.
        head: the names of the columns; () for none.
        left: how many columns are aligned to the left; the others are aligned to the right.
        widths: of the columns, in characters; by default each is as wide as its longest cell.
        gap: what stands between two columns. indent: what stands before the first.
        wrap: the last column is broken at this width of the whole table; 0 cuts what is longer than its column.
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
        cut = [c if len(c) <= w else f"{c[: w - 1]}…" for c, w in zip(row, widths, strict=True)]
        fitted = zip(cut, widths, strict=True)
        aligned = (c.ljust(w) if i < self.left else c.rjust(w) for i, (c, w) in enumerate(fitted))
        return f"{self.indent}{self.gap.join(aligned)}".rstrip()

    def _wrapped(self, row: Sequence[str], widths: Sequence[int]) -> str:
        first = [f"{cell:<{width}}{self.gap}" for cell, width in zip(row[:-1], widths, strict=False)]
        behind = len(self.indent) + sum(width + len(self.gap) for width in widths[: len(row) - 1])
        return textwrap.fill(
            row[-1], self.wrap, initial_indent=self.indent + "".join(first), subsequent_indent=" " * behind,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    def html(self, caption: str) -> str:
        """The table as HTML, its cells escaped and uncut."""
        head = f"<caption>{html.escape(caption)}</caption><thead>{self._html_row('th', self.head)}</thead>"
        return f"<table>{head}<tbody>{''.join(self._html_row('td', row) for row in self.rows)}</tbody></table>"

    def _html_row(self, tag: str, row: Sequence[object]) -> str:
        sides = ["left" if i < self.left else "right" for i in range(len(row))]
        cells = zip(sides, row, strict=True)
        inside = "".join(f'<{tag} style="text-align:{side}">{html.escape(str(cell))}</{tag}>' for side, cell in cells)
        return f"<tr>{inside}</tr>"
