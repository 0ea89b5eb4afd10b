"""Mistakes that users make, and what they are told: the pages of `tests/golden/mistakes`.

A page begins with code that all its cases share. A case is a heading that says what is wrong, the code with the
mistake as a user would write it (```python, or ```sh for the command), and behind it, as ```text, all that the user is
told: warnings, and the error with its class. `tests/test_mistakes.py` runs every case and compares. After a message was
changed on purpose

    python -m tests.mistakes --write

renews the pages. It refuses a case that rlx_jax answers with no error and no warning of its own. (An unknown keyword
is a TypeError, as of any Python function, with a suggestion.)

A page shows what is said, not that it helps. Who has read a message as its user would, and knows from it alone what is
wrong, where, and what to do, marks it as read: `marks.txt` beside the pages has a line for each case, with the first 8
digits of the SHA-256 of its message.

    python -m tests.mistakes --mark

writes the marks of all messages as the pages have them now. A message that is changed needs a new mark.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from rlx_jax import cli
from rlx_jax.errors import RlxError, RlxNumericsWarning, RlxWarning
from tests.oracles.checkpoints import FIXTURES, copy

PAGES = sorted((Path(__file__).parent / "golden" / "mistakes").glob("*.md"))
MARKS = Path(__file__).parent / "golden" / "mistakes" / "marks.txt"
CASE = re.compile(
    r"^## (?P<name>[^\n]+)\n\n```(?P<kind>python|sh)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<told>.*?)^```\n)?",
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
    """A mistake on a page; `told` is what the page says that the user is told."""

    page: Path
    name: str
    kind: str
    code: str
    told: str


class NotTold(AssertionError):
    """A mistake that rlx_jax does not answer: another error comes, or none."""


@functools.cache
def cases() -> tuple[Case, ...]:
    """Those of all pages, in their order."""
    return tuple(case for page in PAGES for case in cases_of(page))


def cases_of(page: Path) -> Iterator[Case]:
    """Those of one page."""
    for found in CASE.finditer(page.read_text("utf-8")):
        yield Case(page, found["name"], found["kind"], found["code"], found["told"] or "")


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
    with contextlib.redirect_stderr(io.StringIO()) as written, contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main(words)
        except SystemExit as left:
            status = int(left.code or 0)
    assert status, f"{code}: status 0"
    return [*written.getvalue().splitlines(), f"(exit status {status})"]


@contextlib.contextmanager
def beside_checkpoints(code: str) -> Iterator[Path]:
    """In an empty directory, beside copies of the checkpoints that the code names as `path/to/…`."""
    with (
        tempfile.TemporaryDirectory() as made,
        contextlib.chdir(made),
        mock.patch.dict(os.environ, {"HF_HOME": str(Path(made, "home")), "HF_HUB_OFFLINE": "1"}),
    ):
        os.environ.pop("HF_HUB_CACHE", None)
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


def renewed(page: Path, only: str = "") -> str:
    """The text of a page with what the user is told now."""
    text = page.read_text("utf-8")
    for case in cases_of(page):
        if only in case.name:
            try:
                message = told(case)
            except NotTold as error:
                print(error, file=sys.stderr)
                continue
            was = f"```{case.kind}\n{case.code}```\n" + (f"\n```text\n{case.told}```\n" if case.told else "")
            at = text.index(f"## {case.name}\n")
            text = text[:at] + text[at:].replace(was, f"```{case.kind}\n{case.code}```\n\n```text\n{message}```\n", 1)
    return text


def marks() -> str:
    """The lines of `marks.txt` that say that every message as it is now was read."""
    told = {f"{case.page.stem}: {case.name}": hashlib.sha256(case.told.encode()).hexdigest() for case in cases()}
    return "".join(f"{digest[:8]} {name}\n" for name, digest in sorted(told.items()))


def main() -> None:
    """Show what the cases tell; `--write` renews the pages, `--mark` the marks. Other words choose pages."""
    if "--mark" in sys.argv:
        MARKS.write_text(marks(), "utf-8")
        return
    jax.config.update("jax_num_cpu_devices", 8)
    chosen = [word for word in sys.argv[1:] if word != "--write"]
    for page in PAGES:
        if not chosen or page.stem in chosen:
            text = renewed(page)
            if "--write" in sys.argv:
                page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
