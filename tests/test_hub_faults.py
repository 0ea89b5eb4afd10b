"""A hub that lies, stops and refuses, and the cache after it: what is kept is complete, or is not there."""

import errno
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import rlx_jax as rlx
from rlx_jax.errors import (
    HubUnreachableError,
    IntegrityError,
    LimitError,
    NoSpaceError,
    RlxError,
    RlxWarning,
    SafetensorsError,
    WeightError,
)
from rlx_jax.io import limits
from rlx_jax.io.folder import Folder, open_folder
from rlx_jax.weights.source import open_headers
from tests.hub_server import COMMIT, LLAMA, Handler, Hub, refusing

CACHED = "hub/models--org--m"


def weights_of(folder: Folder) -> Path:
    """The file of weights, fetched."""
    folder.fetch("model.safetensors")
    return folder.path / "model.safetensors"


def changed(handler: Handler, content: bytes) -> None:
    """As many bytes, one of them another."""
    handler.send(content[:-1] + bytes([content[-1] ^ 1]), {})


def endless(handler: Handler, content: bytes) -> None:
    """Without a length, for as long as someone listens."""
    handler.begin(200, {"Connection": "close"})
    try:
        for _ in range(2000):
            handler.wfile.write(b"[" * 2**16)
    except OSError:
        pass
    handler.close_connection = True


def listing_with(old: bytes, new: bytes) -> Callable[[Handler, bytes], None]:
    return lambda handler, content: handler.send(content.replace(old, new), {})


LIES: dict[str, tuple[str, Callable[[Handler, bytes], None], type[RlxError], str]] = {
    "other bytes of a large file": ("model.safetensors", changed, IntegrityError, "has the digest .* nothing was kept"),

    "more bytes": ("model.safetensors", lambda h, c: h.send(c + b"!", {}), IntegrityError, "more bytes than"),
    "fewer bytes": ("model.safetensors", lambda h, c: h.send(c[:-1], {}), IntegrityError, "nothing is kept: try again"),
    "cut every time": (
        "model.safetensors", lambda h, _: h.connection.shutdown(2), HubUnreachableError, "cannot be reached",
    ),
    "an endless file": ("config.json", endless, IntegrityError, "more bytes than its listed size"),

    "a list that is none": (
        "revision/main", lambda h, _: h.send(b"<html>", {}), IntegrityError, "not a list of a commit's files",
    ),
    "a commit that leads out": (
        "revision/main", listing_with(COMMIT.encode(), b"../../x"), IntegrityError, "is this a Hub",
    ),
    "another commit": (
        f"revision/{COMMIT}", listing_with(COMMIT.encode(), b"f" * 40), IntegrityError, "gives the commit ffff",
    ),
    "a digest that leads out": (
        "revision/main", listing_with(b'"sha256": "', b'"sha256": "../../../'), IntegrityError, "digest is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_lies(server: Hub, hub_home: Path, case: str) -> None:
    """End in finite time, by their names; and nothing of them is there for the next, who finds a good server."""
    ending, fault, error, message = LIES[case]
    server.faults[ending] = fault
    with pytest.raises(error, match=message):
        rlx.recipe_for("org/m", revision=COMMIT if COMMIT in ending else None)
    left = [p for p in hub_home.rglob("*") if p.name.endswith((".incomplete", ".tmp"))]
    assert left == [] and not (hub_home / CACHED / "snapshots" / COMMIT / ending).exists()
    server.faults.clear()
    assert rlx.recipe_for("org/m").config.vocab_size == 389


def another_part(handler: Handler, content: bytes) -> None:
    handler.begin(206, {"Content-Length": "8", "Content-Range": f"bytes 8-15/{len(content)}"})
    handler.wfile.write(content[8:16])


PARTS: dict[str, tuple[Callable[[Handler, bytes], None], tuple[type[RlxError], str] | None]] = {
    "no ranges": (lambda h, c: h.send(c, {}), None),
    "another part": (another_part, (IntegrityError, "requested the bytes from 0 on, got 'bytes 8-15/")),
    "fewer bytes": (lambda h, c: h.send(c[:4], {}), (HubUnreachableError, "ended after 4 of 8 bytes")),
    "a header of another length": (
        lambda h, c: h.send(b"\xff" * len(c), {}), (SafetensorsError, r"header length is 18446744073709551615 bytes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_go_wrong(server: Hub, hub_home: Path, case: str) -> None:
    """Headers are those of the file, or there are none; nothing of them is in the cache, config.json may be."""
    fault, wrong = PARTS[case]
    server.faults["model.safetensors"] = fault
    if wrong is None:
        source = open_headers(open_folder("org/m"))
        want = rlx.open_weights(LLAMA)
        assert {key: source.spec(key) for key in source.keys()} == {key: want.spec(key) for key in want.keys()}
        with pytest.raises(WeightError, match="'model.norm.weight' has a shape only"):
            source.read("model.norm.weight")
    else:
        with pytest.raises(wrong[0], match=wrong[1]):
            open_headers(open_folder("org/m"))
    cached = [p for p in hub_home.rglob("*") if "safetensors" in p.name or p.parent.name == "blobs"]
    assert [p for p in cached if p.read_bytes() != (LLAMA / "config.json").read_bytes()] == []


def test_sizes_are_looked_at_before_anything_comes(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limits of files that are read whole, and the room on the disk. Without a length, as it comes."""
    monkeypatch.setattr(limits, "MAX_CONFIG_BYTES", 100)
    with pytest.raises(LimitError, match=r"'org/m/config.json': the size in bytes is \d+, over .*MAX_CONFIG_BYTES"):
        rlx.load("org/m")
    assert server.fetched() == []
    folder = open_folder("org/m")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(NoSpaceError, match=r"bytes to fetch, 0 are free in"):
        folder.fetch("model.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    bare = json.dumps({"id": "org/m", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}).encode()
    server.faults["revision/main"] = lambda handler, _: handler.send(bare, {})
    with pytest.raises(LimitError, match="MAX_CONFIG_BYTES"):
        rlx.load("org/m")


def test_weights_over_max_bytes_are_not_fetched(server: Hub) -> None:
    """By the headers: exactly the bytes of the tensors are let in, and of more nothing comes."""
    total = sum(a.nbytes for a in load_file(LLAMA / "model.safetensors").values())
    for call in (rlx.load, rlx.recipe_for, rlx.open_weights):
        with pytest.raises(LimitError, match=f"{total}.*max_bytes"):
            call("org/m", max_bytes=total - 1)
    assert all(part.startswith("bytes=") for part in server.ranges["model.safetensors"])
    assert rlx.load("org/m", max_bytes=total).vocab_size == 389


def test_what_the_system_refuses(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name: a full disk while bytes come, and a server that is not there, without the user in its address."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", full)
        with pytest.raises(NoSpaceError, match="'org/m/config.json'.*No space left"):
            rlx.load("org/m")
    monkeypatch.setenv("HF_ENDPOINT", "http://somebody:secret@127.0.0.1:9/below")
    with pytest.raises(HubUnreachableError, match="http://127.0.0.1:9/below cannot be reached") as found:
        rlx.load("org/name")
    assert "secret" not in str(found.value)


def test_without_a_connection(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache opens: told to be offline without a word, else with a warning."""
    expected = rlx.load("org/m").model.params
    asked = len(server.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    jax.tree.map(np.testing.assert_array_equal, rlx.load("org/m").model.params, expected)
    has = "load it once without, .*; the cache has "
    for name, revision, told in (
        ("org/n", None, "the cache has no revision of it"), ("org/m", "v1", has + "'main' of it"),
        ("org/m", "Main", "did you mean 'main'?"), ("org/m", COMMIT[:7], f"'main' of it; '{COMMIT}' starts with it"),
        ("org/m", "f" * 40, has + "'main' of it"),
    ):  # fmt: skip
        message = (
            f"'{name}': no such directory here, and revision .* not in the cache .*HF_HUB_OFFLINE is set: .*{told}"
        )
        with pytest.raises(HubUnreachableError, match=message):
            rlx.load(name, revision=revision)
    assert len(server.asked) == asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.faults["revision/main"] = refusing(503)
    with pytest.warns(RlxWarning, match=f"503.*{COMMIT}"):
        assert rlx.load("org/m").vocab_size == 389


def test_what_was_interrupted_is_not_whole(server: Hub, hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between files, or within one: offline the file that is missing is named, online it is fetched."""

    def stop(what: str, done: int, total: int) -> None:
        if what == "download 3 files":  # the tokenizer's
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rlx.load("org/m", progress=stop)
    assert list(hub_home.rglob("*.incomplete")) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubUnreachableError, match=r"'org/m/tokenizer.json' is not in the cache"):
        rlx.load("org/m")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    blob = (hub_home / CACHED / "snapshots" / COMMIT / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert rlx.load("org/m").tokenizer is not None and server.fetched().count("model.safetensors") == 2


def test_many_at_once(server: Hub) -> None:
    """Fetch the same file side by side; each has it whole."""
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: weights_of(open_folder("org/m")), range(8)))
    assert {path.read_bytes() for path in paths} == {(LLAMA / "model.safetensors").read_bytes()}
