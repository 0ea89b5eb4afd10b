"""What another profile would change: the settings that differ, and what becomes of a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rlx_jax.ir.table import TextTable
from rlx_jax.profiles.check import Options, Table, rows


@dataclass(frozen=True)
class Change:
    """Something that two profiles make different: `ours` with the profile that was asked, `theirs` with the other."""

    what: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class ProfileDiff:
    """Two profiles beside each other.

    Attributes:
        ours, theirs: their names.
        fields: settings that differ, by path: `precision.compute`.
        program: what they change in a program: passes that run, its ops and dtypes, fusions, parameters as they are
            stored, how layers and ops run, what is donated, the sizes that requests are padded to. None where no model
            was given.
    """

    ours: str
    theirs: str
    fields: tuple[Change, ...]
    program: tuple[Change, ...] | None = None

    def __bool__(self) -> bool:
        """Whether a setting differs."""
        return bool(self.fields)

    def __str__(self) -> str:
        if not self.fields:
            return f"{self.ours} and {self.theirs} have the same settings"
        lines = [f"{self.ours} → {self.theirs}", *_lines(self.fields)]
        if self.program is not None:
            lines += ["", "in the program" if self.program else "the program is the same", *_lines(self.program)]
        return "\n".join(lines)


class Comparing(Protocol):
    """A model that says what profiles change in its program."""

    def compare(self, ours: Any, theirs: Any) -> tuple[Change, ...]:
        """The changes from the profile `ours` to `theirs`. Nothing is compiled."""


def _lines(changes: tuple[Change, ...]) -> list[str]:
    """A line for each change, broken at 80 columns."""
    width = min(34, max((len(change.what) for change in changes), default=0))
    rows = [(change.what, f"{change.ours} → {change.theirs}") for change in changes]
    return [str(TextTable(rows, widths=(width,), indent="  ", wrap=80))] if rows else []


def field_changes(ours: Table, theirs: Table) -> Iterator[Change]:
    """The settings in which two profiles differ, their names aside."""
    for (place, _, a), (_, _, b) in zip(rows(ours), rows(theirs), strict=True):
        if isinstance(a, Options):
            options = dict(a), dict(b)
            yield from (
                Change(f"{place}.{key}", *(written(option.get(key)) for option in options))
                for key in sorted({*a, *b})
                if options[0].get(key) != options[1].get(key)
            )
        elif a != b and place != "name":
            yield Change(place, written(a), written(b))


def written(value: Any) -> str:
    """A setting as TOML has it; `unset` for an option that is not there."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(written, value))}]" if isinstance(value, tuple) else str(value)
