"""A checkpoint's folder is read once: every file opened once, whoever asks for it, and shared by all."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rlx_jax as rlx
from rlx_jax.errors import ConfigError, MissingFileError, PathEscapeError
from rlx_jax.io import folder
from rlx_jax.io.folder import Folder
from rlx_jax.io.strict_json import parse_object
from tests.oracles.checkpoints import FIXTURES, edited

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
CHECKPOINTS = {"a decoder": LLAMA, "an encoder": FIXTURES / "bert" / "bare_v5"}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """How often each file is opened, and each JSON object is parsed, by its name in messages."""
    counts: dict[str, Counter[str]] = {"opened": Counter(), "parsed": Counter()}
    real_open, real_parse = os.open, parse_object

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        counts["opened"][os.path.basename(os.fspath(path))] += 1
        return real_open(path, *arguments, **options)

    def parsed(raw: bytes, where: str, *arguments: Any) -> dict[str, Any]:
        counts["parsed"][os.path.basename(where.strip("'"))] += 1
        return real_parse(raw, where, *arguments)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr("rlx_jax.io.folder.parse_object", parsed)
    return counts


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_load_reads_each_file_once(seen: dict[str, Counter[str]], kind: str) -> None:
    """config.json is what the family, the tokenizer and generation all look into."""
    directory = CHECKPOINTS[kind]
    rlx.load(directory)
    assert seen["opened"]["config.json"] == seen["parsed"]["config.json"] == 1
    inside = {name: count for name, count in seen["opened"].items() if (directory / name).exists()}
    assert inside and set(inside.values()) == {1}, inside


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")


def test_what_is_read_is_kept(tmp_path: Path) -> None:
    """By the record and by those below it; a new record reads again."""
    write(tmp_path / "a.json", {"a": 1})
    write(tmp_path / "sub" / "b.json", {"b": 2})
    first = Folder.at(tmp_path)
    assert first.json("a.json") == {"a": 1} and first.below("sub").json("b.json") == {"b": 2}
    write(tmp_path / "a.json", {"a": 3})
    (tmp_path / "sub" / "b.json").unlink()
    assert first.json("a.json") == first.below("").needed("a.json") == {"a": 1}
    assert first.json("sub/b.json") == {"b": 2}
    assert Folder.at(tmp_path).json("a.json") == {"a": 3} and Folder.at(first) is first


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """Are empty objects where they may be missing, and errors where they may not."""
    here = Folder(tmp_path)
    assert here.json("a.json") == {} and here.read("a.json", 1, "one", ConfigError) is None
    with pytest.raises(MissingFileError, match="a.json'?: no such file"):
        here.needed("a.json")
    with pytest.raises(MissingFileError, match="no such directory.*a model of the Hub is a string"):
        folder.open_folder(tmp_path / "b")
    (tmp_path / "out.json").symlink_to(LLAMA / "config.json")
    with pytest.raises(PathEscapeError, match="outside its directory"):
        here.json("out.json")


@pytest.mark.parametrize(("field", "tokenizer"), [("eos_token_id", True), ("bos_token_id", False)])
def test_special_ids_are_of_the_vocabulary(tmp_path: Path, field: str, tokenizer: bool) -> None:
    """Whether the tokenizer says which they are or, without one, the files do."""
    directory = edited(LLAMA, tmp_path / "m", {field: 389})
    (directory / "generation_config.json").unlink(missing_ok=True)
    if not tokenizer:
        (directory / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=rf"{field} is \[389\]; expected ids in \[0, 389\)"):
        rlx.load(directory)
