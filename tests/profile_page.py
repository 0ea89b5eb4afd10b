"""The table of settings in docs/profiles.md, written from the rows of the schema.

python -m tests.profile_page --write
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from rlx_jax.profiles import CompileProfile, Options, Table
from rlx_jax.profiles.check import field_types

PAGE = Path(__file__).parents[1] / "docs" / "profiles.md"
BEGIN, END = "## Settings\n\n", "\n`<name>` is "


def entries(table: type[Table]) -> dict[str, str]:
    """What the docstring of a table says of each setting."""
    found = re.findall(r"^(\w+): (.*(?:\n {4}.*)*)", inspect.cleandoc(table.__doc__ or ""), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def choices(hint: Any) -> list[str]:
    """The values of a type that have a name."""
    if isinstance(hint, type):
        return ["true", "false"] if hint is bool else []
    return [str(c) for c in get_args(hint)] if Literal[""].__class__ is type(hint) else [
        choice for arm in get_args(hint) for choice in choices(arm)
    ]  # fmt: skip


def spelled(value: Any) -> str:
    """A value as the page has it."""
    if isinstance(value, Options):
        return "{}"
    return json.dumps(value) if isinstance(value, tuple | bool) else str(value)


def lines(table: Table, path: str = "") -> Iterator[str]:
    """A line for each setting: key, values with the default first, what it changes."""
    texts, types = entries(type(table)), field_types(type(table))
    for name, hint in types.items():
        value = getattr(table, name)
        if isinstance(value, Table):
            if name not in ("cuda", "rocm", "tpu"):
                yield from lines(value, f"{path}{'<name>' if name == 'cpu' else name}.")
        elif name != "name":
            named = [] if isinstance(value, tuple) else choices(hint)
            values = ", ".join(f"`{v}`" for v in dict.fromkeys([spelled(value), *named]))
            yield f"| `{path}{name}` | {values} | {texts[name]} |\n"


def table() -> str:
    """The whole table."""
    head = "| key | values (the first is the default) | what it changes |\n|---|---|---|\n"
    return head + "".join(lines(CompileProfile()))


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page(), "utf-8")
