"""This module defines `Bisection`, the result of `rlx_jax.bisect`: errors by block as a table and as a picture."""

from __future__ import annotations

import html
import math

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import listing
from rlx_jax.ir.text import TextTable

# The range of errors that bars show, on a logarithmic scale.
LOWEST, HIGHEST, BAR = 1e-9, 1.0, 24
# More rows than this are printed only near the blocks that introduce an error; `table` has all of them.
MAX_ROWS = 60


@dataclass(frozen=True)
class ComparedValue:
    """A value between blocks, compared with the reference.

    Attributes:
        name: the path of the block that returns the value; with `→`, the block that computes it and the first block
            that reads it; with `[i]`, one of several values.
        block: the innermost block with all ops between this value and the compared values that it is computed from.
        error: the largest absolute difference, divided by the largest absolute value of the reference. For integers the
            share of entries that differ; infinite for another shape, or if only one side is finite.
        tolerance: the largest error that counts as agreement.
        growth: the error divided by the largest error among the values that this one is computed from; at least that
            dtype's precision.
        introduced: whether the error is over the tolerance, and the errors of those values are not.
        note: another shape, or the reason why a difference does not count; else empty.
    """

    name: str
    block: str
    error: float
    tolerance: float
    growth: float
    introduced: bool = False
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Return whether the value is within tolerance, or does not count."""
        return self.error <= self.tolerance or self.note.startswith(OTHER_QUANTITY)


# The note of a value that the reference has under this name, but in another form, such as before a scale.
OTHER_QUANTITY = "another quantity"
# The note of a value with entries that are equal on both sides, but infinite or NaN.
NOT_COMPARED = "entries not finite on both sides"


@dataclass(frozen=True)
class Bisection:
    """A model compared with a reference, block by block. `print` shows it, and so does a notebook.

    Attributes:
        model, reference: names of the two.
        program: the program of the model that was compared.
        values: the compared values in the order of the program, inner blocks first.
        not_in_reference: names of values that only the model has.
        not_in_model: names of values that only the reference has.
    """

    model: str
    reference: str
    program: str
    values: tuple[ComparedValue, ...]
    not_in_reference: tuple[str, ...] = ()
    not_in_model: tuple[str, ...] = ()

    @property
    def first(self) -> str | None:
        """Return the path of the first block with an output outside of tolerance; None if all agree."""
        return next((value.block for value in self.values if not value.agrees), None)

    @property
    def introduced(self) -> tuple[str, ...]:
        """Return the blocks with inputs that agree and an output that does not: each has a fault of its own."""
        return tuple(dict.fromkeys(value.block for value in self.values if value.introduced))

    @property
    def table(self) -> TextTable:
        """Return the table of all values."""
        return _table(self.values)

    @property
    def summary(self) -> str:
        """Return the result as a sentence or two."""
        head = f"{self.model} ({self.program}) against {self.reference}"
        value = next((value for value in self.values if not value.agrees), None)
        if value is None:
            worst = max(self.values, key=lambda v: 0.0 if v.note else v.error / v.tolerance)
            lost = [v for v in self.values if v.note.startswith(NOT_COMPARED)]
            excluded = [v.name for v in self.values if v.error > v.tolerance]
            count = (
                f"{len(self.values) - len(excluded)} of {len(self.values)}" if excluded else f"all {len(self.values)}"
            )
            text = f"{head}: {count} values agree; the largest error is {worst.error:.1e}, {worst.name}"
            text += f". From {lost[0].name} on, {lost[0].note}, cannot be compared" if lost else ""
            return f"{text}. The others are {OTHER_QUANTITY} there: {listing(excluded, 4)}" if excluded else text
        growth = f", {text} that of its inputs" if (text := _growth(value)) else ""
        text = f"{head}: {value.block} is the first block outside of tolerance. The error of {value.name} is "
        text += f"{_number(value.error)}{growth}, and the tolerance {value.tolerance:.1e}."
        text += f" It is {value.note}." if value.note else ""
        others = ", ".join(block for block in self.introduced if block != value.block)
        return f"{text} Other blocks with inputs that agree and an output that does not: {others}." if others else text

    def __str__(self) -> str:
        return "\n".join([self.summary, "", str(_table(self._main_values(), bars=True)), *self._missing()])

    def _main_values(self) -> tuple[ComparedValue, ...]:
        """Return the values to print: all, or those of blocks around the layers, and of layers with a fault."""
        layers = tuple(".".join(block.split(".")[:2]) for block in self.introduced)
        is_short = len(self.values) <= MAX_ROWS
        return tuple(v for v in self.values if is_short or v.name.count(".") < 2 or v.name.startswith(layers))

    def _missing(self) -> list[str]:
        """Return a line for the values that only one side has."""
        sides = {"model": self.not_in_reference, "reference": self.not_in_model}
        return [f"only in the {side}: {listing(names, 8)}" for side, names in sides.items() if names]

    def _repr_html_(self) -> str:
        step, bars = max(2.0, min(14.0, 900 / len(self.values))), []
        for i, value in enumerate(self.values):
            color = "#c0392b" if value.introduced else "#7f8c8d" if value.agrees else "#e67e22"
            size, limit = (_share(x) * 100 for x in (value.error, value.tolerance))
            title = html.escape(f"{value.name}: {_number(value.error)}, tolerance {value.tolerance:.1e}")
            place = f'x="{i * step:.1f}" width="{step * 0.8:.1f}"'
            bar = f'<rect {place} y="{100 - size:.1f}" height="{size:.1f}" fill="{color}"/>'
            bars.append(f'<g><title>{title}</title>{bar}<rect {place} y="{100 - limit:.1f}" height="1"/></g>')
        label = "error of each value, logarithmic from 1e-9 to 1; the lines are the tolerances"
        svg = f'<svg role="img" aria-label="{label}" width="{step * len(self.values):.0f}" height="100">'
        table = f"<details><summary>table</summary>{self.table.html(label)}</details>"
        texts = "".join(f"<p>{html.escape(text)}</p>" for text in self._missing())
        return f"<p>{html.escape(self.summary)}</p>{svg}{''.join(bars)}</svg>{table}{texts}"


def _table(values: tuple[ComparedValue, ...], bars: bool = False) -> TextTable:
    """Return a table of values, with bars of their errors for a terminal."""
    head = ("value", "error", "tolerance", "growth", *(["1e-9 … 1"] if bars else []), "")
    rows = [
        (
            value.name, _number(value.error), f"{value.tolerance:.1e}", _growth(value),
            *([f"{'█' * round(_share(value.error) * BAR):·<{BAR}}"] if bars else []), _remark(value),
        )
        for value in values
    ]  # fmt: skip
    return TextTable(rows, head)


def _remark(value: ComparedValue) -> str:
    """Return the last cell of a row."""
    remarks = [f"introduced in {value.block}" if value.introduced else "" if value.agrees else "outside", value.note]
    return "; ".join(filter(None, remarks))


def _growth(value: ComparedValue) -> str:
    if not math.isfinite(value.growth):
        return ""
    return f"{value.growth:.1f} ×" if value.growth < 1000 else f"{value.growth:.1e} ×"


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "infinite"


def _share(error: float) -> float:
    """Return the length of a bar, from 0 to 1."""
    return min(1.0, max(0.0, math.log10(max(error, LOWEST) / LOWEST) / math.log10(HIGHEST / LOWEST)))
