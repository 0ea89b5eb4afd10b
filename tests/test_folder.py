"""A checkpoint's folder: every file is opened once, whoever asks for it; JSON is read as it is."""

import json
import math
import os
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax.errors import ConfigError, LimitError, MissingFileError, PathEscapeError, RlxError
from rlx_jax.io import folder, limits
from rlx_jax.io.files import parse_object
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import read_config
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
    first = Folder.from_path(tmp_path)
    assert first.json("a.json") == {"a": 1} and first.subfolder("sub").json("b.json") == {"b": 2}
    write(tmp_path / "a.json", {"a": 3})
    (tmp_path / "sub" / "b.json").unlink()
    assert first.json("a.json") == first.subfolder("").required_json("a.json") == {"a": 1}
    assert first.json("sub/b.json") == {"b": 2}
    assert Folder.from_path(tmp_path).json("a.json") == {"a": 3} and Folder.from_path(first) is first


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """Are empty objects where they may be missing, and errors where they may not."""
    here = Folder(tmp_path)
    assert here.json("a.json") == {} and here.read("a.json", (1, "one"), ConfigError) is None
    with pytest.raises(MissingFileError, match="a.json'?: no such file"):
        here.required_json("a.json")
    with pytest.raises(MissingFileError, match="no such directory"):
        folder.open_folder(tmp_path / "b")
    with pytest.raises(MissingFileError, match="m.gguf': no such file"):
        folder.open_folder(tmp_path / "m.gguf")
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
    with pytest.raises(ConfigError, match=rf"{field} is \[389\]"):
        rlx.load(directory)


TEXT = st.text(st.characters(codec="utf-8"), max_size=9)
NUMBERS = st.integers(-(10**99), 10**99) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=9,
)


def config_of(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    return path


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a file of a folder, which is there."""
    return Folder(Path(path).parent).required_json(Path(path).name)


@settings(max_examples=20)
@given(st.dictionaries(TEXT, JSON, max_size=3), st.booleans())
def test_any_object_comes_back(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any], ascii_only: bool
) -> None:
    path = config_of(tmp_path_factory.getbasetemp(), json.dumps(value, ensure_ascii=ascii_only).encode())
    assert read_json(path) == value


def test_infinity_is_a_number_in_config_json_alone(tmp_path: Path) -> None:
    """Python's json writes it, and Mamba-2's `time_step_limit` has it; the fields that may be so large say so."""
    raw = b'{"time_step_limit": [0.0, Infinity], "hidden_size": Infinity}'
    assert read_json(config_of(tmp_path, raw))["time_step_limit"] == [0.0, math.inf]
    with pytest.raises(ConfigError, match="'hidden_size'.*'inf'"):
        read_config(Folder(tmp_path)).integer("hidden_size")
    (tmp_path / "generation_config.json").write_bytes(b'{"temperature": Infinity}')
    with pytest.raises(ConfigError, match="Infinity is not a JSON number"):
        read_json(tmp_path / "generation_config.json")


def test_strings_hide_nothing(tmp_path: Path) -> None:
    value = {"a": '[[[["NaN', "b\\": "\\", 'c"': "{" * 100 + "9" * 5000, "d": "\\ud800 spelt out"}
    assert read_json(config_of(tmp_path, json.dumps(value).encode())) == value


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_of(tmp_path, b'{"a": 1}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_CONFIG_BYTES", 8)
        assert read_json(path) == {"a": 1}
        patch.setattr(limits, "MAX_CONFIG_BYTES", 7)
        with pytest.raises(LimitError, match="is 8, .*limits.MAX_CONFIG_BYTES = 7"):
            read_json(path)
    os.truncate(path, limits.MAX_CONFIG_BYTES + 1)
    with pytest.raises(LimitError, match="limits.MAX_CONFIG_BYTES = 4194304"):
        read_json(path)
    config_of(tmp_path, b'{"a": [' + b"0," * limits.MAX_JSON_VALUES + b"0]}")
    with pytest.raises(LimitError, match="limits.MAX_JSON_VALUES"):
        read_json(path)
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", 2 * limits.MAX_JSON_VALUES)
    assert len(read_json(path)["a"]) == limits.MAX_JSON_VALUES // 2 + 1


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """At most 64 MiB and eight times the file, on the densest text that is let through."""
    pairs = b",".join(b'"%x":{}' % i for i in range(limits.MAX_JSON_VALUES // 2 - 2))
    for raw in (b"{" + pairs + b"}", b'{"a":"' + b'\\"' * 500_000 + b'"}'):
        path = config_of(tmp_path, raw)
        tracemalloc.start()
        try:
            read_json(path)
        except RlxError:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 64 * 2**20 + 8 * len(raw)
