"""What users get wrong, and how it is refused: the pages of `tests/golden/refusals`, one table for all areas.

A page begins with code that its cases share. A case is a heading that names the mistake, the code as a user would write
it (```python, or ```sh for the command), and what the user gets, one line for each warning and the error:

- ```expect: `Class | fragment | fragment`. The class, and what the message has to contain; its wording may change.
- ```text: the message word by word, for the sample of cases that shows the style.

    python -m tests.refusals --write

`rows.md` has the mistakes that are one expression, three lines each: name, expression, expected class and fragments.
`--write` renews the sample and the table "What is refused" of docs/errors.md.
"""

import contextlib
import functools
import io
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from rlx_jax import cli
from rlx_jax.errors import RlxError, RlxNumericsWarning, RlxWarning
from tests.oracles.checkpoints import FIXTURES, copy

ROWS_PAGE = Path(__file__).parent / "golden" / "refusals" / "rows.md"
PAGES = sorted(page for page in ROWS_PAGE.parent.glob("*.md") if page != ROWS_PAGE)
SHOWN = 6  # mistakes of a class on the page
ERRORS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
TABLE = re.compile(r"(?<=^## What is refused\n\n).+?(?=^## )", re.DOTALL | re.MULTILINE)
CASE = re.compile(
    r"^## (?P<name>[^\n]+)\n\n```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
    r"\n```(?P<form>text|expect)\n(?P<told>.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)
SHARED = re.compile(r"\A# [^\n]+\n\n```python\n(?P<code>.*?)^```\n", re.S | re.M)
CHECKPOINTS = {
    "llama": "llama/gqa_tied_llama3_v5", "bf16": "llama/bf16_gqa_tied_v5", "untied": "llama/mqa_llama3_v4",
    "bert": "bert/bare_v5", "sharded": "bert/masked_lm_v4", "sentence": "sentence/base", "dinov2": "vision/dinov2",
    "clip": "vision/dual/clip", "mixtral": "mixtral/window_v5", "gpt2": "gpt2/bare_v4", "adapter": "lora/llama_mixed",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A mistake on a page. `told` is the expected message if `exact`, else the class and fragments of each line."""

    page: Path
    name: str
    kind: str
    code: str
    told: str
    exact: bool

    def fits(self, message: str) -> bool:
        """Return whether a message is the expected one."""
        if self.exact:
            return message == self.told
        rows, lines = self.told.splitlines(), [line for line in message.splitlines() if line.strip()]
        return len(rows) == len(lines) and all(map(row_fits, rows, lines))


@dataclass(frozen=True)
class Row:
    """A mistake that is one expression; `expected` is `Class | fragment | fragment`."""

    title: str
    name: str
    code: str
    expected: str


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return the rows of `rows.md`."""
    sections = re.findall(r"^## (\w+)\n\n```rows\n(.*?)^```", ROWS_PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return tuple(
        Row(title, *fields)
        for title, lines in sections
        for fields in re.findall(r"^(\S.*)\n    (.*)\n    (.*)\n", lines, re.MULTILINE)
    )


def row_fits(row: str, line: str) -> bool:
    """Return whether a line of a message has the class and all fragments of `Class | fragment | fragment`."""
    first, *fragments = row.split(" | ")
    named = re.fullmatch(r"\w+(Error|Warning)", first)
    return (line.startswith(f"{first}: ") if named else first in line) and all(part in line for part in fragments)


class NotTold(AssertionError):
    """A mistake that rlx_jax does not answer: another error comes, or none."""


@functools.cache
def cases() -> tuple[Case, ...]:
    """Those of all pages, in their order."""
    return tuple(case for page in PAGES for case in cases_of(page))


def cases_of(page: Path) -> Iterator[Case]:
    """Those of one page."""
    for found in CASE.finditer(page.read_text("utf-8")):
        yield Case(page, found["name"], found["kind"], found["code"], found["told"], found["form"] == "text")


@functools.cache
def shared(page: Path) -> dict[str, Any]:
    """The names that the code at the top of a page makes."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = SHARED.search(page.read_text("utf-8"))
    assert code, f"{page.name}: a page begins with a title and a block of Python"
    with beside_checkpoints(code["code"]), as_users_run():
        exec(compile(code["code"], str(page), "exec", dont_inherit=True), names)
    return names


def told(case: Case) -> str:
    """What a user is told by the code of a case, one line for each warning and the error.

    Raises:
        NotTold: an error that is not rlx_jax's own, or nothing.
    """
    names = dict(shared(case.page)) if case.kind == "python" else {}
    with beside_checkpoints(case.code) as here, as_users_run() as warned:
        end = in_a_shell(case.code) if case.kind == "sh" else in_python(case, names)
        own = [w for w in warned if isinstance(w.message, RlxWarning | RlxNumericsWarning)]
        lines = [f"{type(w.message).__name__}: {w.message}" for w in own] + end
    if not lines:
        raise NotTold(f"{case.page.stem}: {case.name}: no error, and no warning")
    text = "\n".join(lines).replace(str(here), "…").replace(os.path.realpath(here), "…")
    return re.sub(r"0x[0-9a-fA-F]{6,}", "0x…", text) + "\n"


def in_python(case: Case, names: dict[str, Any]) -> list[str]:
    """Run Python; the error with its class."""
    try:
        exec(compile(case.code, case.name, "exec", dont_inherit=True), names)
    except RlxError as error:
        return [f"{type(error).__name__}: {error}"]
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise NotTold(f"{case.page.stem}: {case.name}: {type(error).__name__}: {error}") from error
        return [f"TypeError: {error}"]
    except Exception as error:
        raise NotTold(f"{case.page.stem}: {case.name}: {type(error).__name__}: {error}") from error
    return []


def in_a_shell(code: str) -> list[str]:
    """Run the command; what it writes to stderr, and its status."""
    _, *words = shlex.split(code)
    with contextlib.redirect_stderr(io.StringIO()) as written, contextlib.redirect_stdout(io.StringIO()) as results:
        try:
            status = cli.main(words)
        except SystemExit as left:
            status = int(left.code or 0)
    assert status and not results.getvalue(), f"{code}: status {status}"
    return [*written.getvalue().splitlines(), f"(exit status {status})"]


@contextlib.contextmanager
def beside_checkpoints(code: str) -> Iterator[Path]:
    """In an empty directory, beside copies of the checkpoints that the code names as `path/to/…`."""
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made), pytest.MonkeyPatch.context() as patch:
        # One variable each: `mock.patch.dict` clears the environment, which threads of XLA read meanwhile.
        patch.setenv("HF_HOME", str(Path(made, "home")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("HF_HUB_CACHE", raising=False)
        for name in re.findall(r"path/to/(\w+)", code):
            if name in CHECKPOINTS and not Path("path", "to", name).exists():
                copy(FIXTURES / CHECKPOINTS[name], Path("path", "to", name))
        yield Path(made)


@contextlib.contextmanager
def as_users_run() -> Iterator[list[warnings.WarningMessage]]:
    """JAX as it is set by itself; the warnings that are given."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        yield warned


def renewed(page: Path) -> str:
    """Return the text of a page with the messages of its exact cases as they are now."""
    text = page.read_text("utf-8")
    for case in cases_of(page):
        if case.exact:
            at = text.index(f"## {case.name}\n")
            text = text[:at] + text[at:].replace(f"```text\n{case.told}```", f"```text\n{told(case)}```", 1)
    return text


def errors_page() -> str:
    """Return docs/errors.md with its table of mistakes by class, made of the pages: a few of each class."""
    mistakes: dict[str, list[str]] = {}
    for case in cases():
        for line in case.told.splitlines():
            if named := re.match(r"(\w+(?:Error|Warning))(?: \||:|$)", line):
                mistakes.setdefault(named[1], []).append(case.name.replace("|", "or"))
    for row in rows():
        mistakes.setdefault(row.expected.partition(" | ")[0], []).append(f"{row.title}: {row.name.replace('|', 'or')}")
    lines = []
    for name, titles in sorted((name, list(dict.fromkeys(names))) for name, names in mistakes.items()):
        few = titles[:: -(-len(titles) // SHOWN)]
        lines.append(f"| `{name}` | {len(titles)} | {'; '.join(few)} |\n")
    head = "| class | mistakes that tests make | some of them |\n|---|---|---|\n"
    return TABLE.sub(lambda _: head + "".join(lines) + "\n", ERRORS_PAGE.read_text("utf-8"))


def main() -> None:
    """Renew the exact messages and docs/errors.md."""
    jax.config.update("jax_num_cpu_devices", 8)
    for page in PAGES:
        page.write_text(renewed(page), "utf-8")
    ERRORS_PAGE.write_text(errors_page(), "utf-8")


if __name__ == "__main__":
    main()
