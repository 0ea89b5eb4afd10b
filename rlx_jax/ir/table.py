"""`TextTable` formats rows of cells as text for a terminal, or as HTML for a page."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


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
