"""Models by name, from a hub on loopback: what is asked for, what is kept, and what a bad server can do."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import (
    HubError,
    HubUnreachableError,
    IntegrityError,
    LimitError,
    MissingFileError,
    MissingWeightError,
    NoSpaceError,
    PathEscapeError,
    RequestError,
    RlxError,
    RlxWarning,
    UnsupportedError,
    WeightError,
)
from rlx_jax.io import files, hub, limits, transfer
from rlx_jax.io.folder import Folder, open_folder
from rlx_jax.text.tokenizer import load_tokenizer
from tests.hub_server import COMMIT, Handler, Hub, serving
from tests.oracles.checkpoints import FIXTURES, sentence_directory

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
TOKEN = "hf_secret"
INDEX = "model.safetensors.index.json"
TEXT_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
CACHED = "hub/models--org--m"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, no token, and no time to wait."""
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for module in (transfer, hub):
        monkeypatch.setattr(module, "WAITS_S", (0, 0))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model `org/m`, a tiny Llama."""
    with serving(Hub()) as started:
        started.add("org/m", LLAMA)
        monkeypatch.setenv("HF_ENDPOINT", started.endpoint)
        yield started
        huggingface_hub.close_session()


def sharded(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint, its weights in two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {key: names[i % 2] for i, key in enumerate(tensors)}
    parts = {n: save({k: tensors[k] for k in where if where[k] == n}, {"format": "pt"}) for n in names}
    rest = {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "model.safetensors" and p.is_file()}
    return rest | parts | {INDEX: json.dumps({"metadata": {}, "weight_map": where}).encode()}


# -- what is asked for -------------------------------------------------------------------------

NOISE = {
    "README.md": b"#", "pytorch_model.bin": b"pickle", "tf_model.h5": b"h5", "flax_model.msgpack": b"m",
    "onnx/model.onnx": b"o", "original/params.json": b"{}", "original/consolidated.safetensors": b"s",
}  # fmt: skip


def sentences(target: Path) -> dict[str, bytes]:
    made = sentence_directory(FIXTURES / "bert" / "bare_v5", target, modes=["mean"], normalise=True)
    return {p.relative_to(made).as_posix(): p.read_bytes() for p in made.rglob("*") if p.is_file()}


def plain(directory: Path) -> Callable[[Path], dict[str, bytes]]:
    return lambda _: {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


KINDS: dict[str, tuple[Callable[[Path], dict[str, bytes]], str, list[str]]] = {
    "one file": (plain(LLAMA), "CausalLM", [*TEXT_FILES, "model.safetensors"]),
    "shards": (
        lambda _: sharded(LLAMA) | {"model.fp16.safetensors": b"another"}, "CausalLM",
        [*TEXT_FILES, INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    ),
    "sentences": (
        sentences, "Encoder",
        ["1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "model.safetensors",
         "modules.json", "sentence_bert_config.json"],
    ),
    "images": (
        plain(FIXTURES / "vision" / "dinov2"), "VisionEncoder",
        ["config.json", "model.safetensors", "preprocessor_config.json"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_family_needs(server: Hub, tmp_path: Path, kind: str) -> None:
    """And nothing else is fetched, once; it loads as the directory itself does. By its commit, nothing is asked."""
    make, name, wanted = KINDS[kind]
    content = make(tmp_path / "made")
    server.files["org/m"] = NOISE | content
    local = tmp_path / "local"
    for path, data in content.items():
        (local / path).parent.mkdir(parents=True, exist_ok=True)
        (local / path).write_bytes(data)
    found, expected = rlx.load("org/m"), rlx.load(local)
    assert type(found).__name__ == name and sorted(server.fetched()) == sorted(wanted)
    jax.tree.map(np.testing.assert_array_equal, found.model.params, expected.model.params)
    asked = len(server.asked)
    rlx.load("org/m")
    assert [path for _, path, _ in server.asked[asked:]] == ["/api/models/org/m/revision/main"]
    rlx.load("org/m", revision=COMMIT)
    assert len(server.asked) == asked + 1


def test_every_opener(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Of flows, recipes, tokenizers, samplers and in the shell; a revision is what is asked for."""
    server.revisions += ("v1.0", "refs/pr/3")
    assert rlx.recipe_for("org/m", revision="v1.0").config.vocab_size == 389
    assert rlx.from_pretrained("org/m", revision="refs/pr/3").name == "llama"
    tokenizer = load_tokenizer("org/m")
    assert tokenizer is not None and tokenizer.special_tokens["eos_token"] == "<|end_of_text|>"
    assert rlx.open_weights("org/m", revision="v1.0").has("model.norm.weight")
    with pytest.raises(WeightError, match="revision='v1.0': these weights are on this machine"):
        rlx.open_weights(LLAMA, revision="v1.0")
    assert isinstance(rlx.Sampler.from_generation_config("org/m"), rlx.Sampler)
    assert cli.main(["inspect", "org/m", "--revision", "v1.0"]) == 0
    assert "Llama32Flow, causal" in capsys.readouterr().out
    assert cli.main(["inspect", "org/m", "--revision", "v2"]) == 1
    assert "no such branch, tag or commit" in capsys.readouterr().err
    asked = [path.partition("/revision/")[2] for _, path, _ in server.asked if path.startswith("/api/")]
    assert asked == ["v1.0", "refs/pr/3", "main", "v1.0", "main", "v1.0", "v2"]


def test_a_model_inside_a_pipeline(server: Hub) -> None:
    """Is named by its directory, as those are that a pipeline of diffusers has."""
    files = {f"transformer/{p.name}": p.read_bytes() for p in (FIXTURES / "flux2" / "sharded_bf16").iterdir()}
    server.files["org/m"] = {"model_index.json": b"{}", "vae/diffusion_pytorch_model.safetensors": b"v"} | files
    with pytest.raises(
        MissingFileError, match=r"'org/m/config.json': no such file; there is 'transformer/config.json'"
    ):
        rlx.from_pretrained("org/m")
    recipe = rlx.recipe_for("org/m", subfolder="transformer")
    assert type(recipe).__name__ == "Flux2Flow" and sorted(set(server.fetched())) == sorted(files)
    for wrong, error in (("../m", PathEscapeError), (3, RequestError), ("vae", MissingFileError)):
        with pytest.raises(error):
            rlx.load("org/m", subfolder=wrong)
    assert rlx.load(LLAMA.parent, subfolder=LLAMA.name).vocab_size == 389


def test_an_unknown_family_costs_its_config(server: Hub) -> None:
    """Weights are not fetched for what is not built."""
    server.files["org/m"]["config.json"] = b'{"model_type": "bart"}'
    with pytest.raises(UnsupportedError, match="model_type 'bart' is not built"):
        rlx.load("org/m")
    assert server.fetched() == ["config.json"]


def test_what_is_here_wins(server: Hub, tmp_path: Path) -> None:
    """A directory of that name is opened, and what cannot be a name is not sent away."""
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m").symlink_to(LLAMA)
    assert rlx.load("org/m").vocab_size == 389
    with pytest.raises(RequestError, match="revision='v1': 'org/m' is a path on this machine"):
        rlx.load("org/m", revision="v1")
    for path in ("nothing", "a/b/c", "./org/n", Path("org/n"), "org/m.git", "~/m", "../m"):
        with pytest.raises(MissingFileError, match="no such directory.*a model of the Hub is a string 'org/name'"):
            rlx.load(path)
    assert server.asked == []
    (tmp_path / "org" / "mistral-7b").mkdir()
    for name, near in (("mistral-8b", "did you mean 'mistral-7b'?"), ("x", "there is 'm', 'mistral-7b'")):
        with pytest.raises(MissingFileError, match=re.escape(f"'org/{name}': no such directory here ({near}), and ")):
            rlx.load(f"org/{name}")
    asked = len(server.asked)
    with pytest.raises(MissingFileError, match="no such file or directory"):
        rlx.open_weights("org/x")  # as a step of a run would be: org is a directory here
    assert len(server.asked) == asked


def test_progress(server: Hub) -> None:
    """Bytes of each file as they come, with their sum."""
    told: dict[str, list[tuple[int, int]]] = {}
    rlx.load("org/m", progress=lambda what, done, total: told.setdefault(what, []).append((done, total)))
    size = (LLAMA / "model.safetensors").stat().st_size
    assert told["download model.safetensors"][-1] == (size, size)
    assert {f"download {name}" for name in TEXT_FILES} < set(told) and "load" in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(server: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing where none looks."""
    assert open_folder("org/m").bring("tokenizer.json")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", seen := Terminal())
    assert open_folder("org/m").bring("model.safetensors")
    assert "model.safetensors: 100%" in seen.getvalue()


# -- what is refused ---------------------------------------------------------------------------


def refusing(status: int, code: str = "") -> Callable[[Handler, bytes], None]:
    return lambda handler, _: handler.refuse(status, code)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[RlxError], list[str]]] = {
    "not found": ({}, {"name": "org/none"}, MissingFileError, ["no such model for all to see", "token="]),
    "not found with a token": (
        {"faults": {"main": refusing(404, "RepoNotFound")}}, {"token": TOKEN}, MissingFileError,
        ["no such model (404)"],
    ),
    "another revision": ({}, {"revision": "v9"}, MissingFileError, ["revision 'v9'", "no such branch, tag or commit"]),
    "no revision": ({}, {"revision": "../x"}, RequestError, ["revision", "got '../x'"]),
    "private": ({"token": TOKEN}, {}, MissingFileError, ["if it is private, pass token=, or set HF_TOKEN"]),
    "another token": ({"token": "other"}, {"token": TOKEN}, HubError, ["refuses it to this token (401)"]),
    "gated": (
        {"faults": {"config.json": refusing(403, "GatedRepo")}}, {}, HubError, ["config.json", "ask on its page"],
    ),
    "forbidden": ({"faults": {"main": refusing(403)}}, {}, HubError, ["refuses it (403)"]),
    "listed and gone": (
        {"faults": {"config.json": refusing(404, "EntryNotFound")}}, {}, MissingFileError, ["lists the file"],
    ),
    "in trouble": ({"faults": {"main": refusing(503)}}, {}, HubUnreachableError, ["answers 503"]),
    "a teapot": ({"faults": {"main": refusing(418)}}, {}, HubError, ["answers 418"]),
    "no token of a header": ({}, {"token": TOKEN + "\n"}, RequestError, ["token: expected printable ASCII"]),
    "no token stored": ({}, {"token": True}, HubError, ["token=True, and none is stored"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(server: Hub, case: str) -> None:
    """Each says what it was, that nothing is here either, and what to do; none says the token."""
    settings, asked, error, parts = REFUSALS[case]
    for name, value in settings.items():
        setattr(server, name, value)
    asked = {"name": "org/m"} | asked
    with pytest.raises(error) as caught:
        rlx.load(asked.pop("name"), **asked)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert error is RequestError or "'org/" in message
    assert TOKEN not in repr(caught.value) + repr(caught.value.__cause__) and "Traceback" not in message


def test_no_connection(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens."""
    with serving(Hub()) as closed:
        monkeypatch.setenv("HF_ENDPOINT", closed.endpoint)
    with pytest.raises(HubUnreachableError, match=r"'org/m': no such directory here, and .* cannot be reached"):
        rlx.load("org/m")


def test_no_weights_that_are_read(server: Hub) -> None:
    """Pickles are named, not fetched."""
    server.files["org/m"]["pytorch_model.bin"] = server.files["org/m"].pop("model.safetensors")
    with pytest.raises(UnsupportedError, match=r"'org/m/pytorch_model.bin'.*pickle"):
        rlx.load("org/m")
    assert server.fetched() == ["config.json"]


@pytest.mark.parametrize("how", ["token", "HF_TOKEN"])
def test_a_token_is_shown_to_the_hub(server: Hub, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """And to nobody else: not in a repr, and not to a host that a file is redirected to."""
    server.token = TOKEN
    if how == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(Hub(files={"org/m": {"model.safetensors": server.files["org/m"]["model.safetensors"]}})) as other:
        server.faults["model.safetensors"] = elsewhere(other)
        folder = open_folder("org/m", token=TOKEN if how == "token" else None)
        recipe = rlx.recipe_for("org/m", token=TOKEN if how == "token" else None)
    assert {token for _, _, token in server.asked} == {f"Bearer {TOKEN}"}
    assert [token for _, _, token in other.asked] == [None]
    assert TOKEN not in repr(folder) + repr(folder.snapshot) + repr(recipe)
    with pytest.raises(MissingFileError):
        rlx.load("org/m", token=False)


def elsewhere(other: Hub) -> Callable[[Handler, bytes], None]:
    """Sent to the same path of another hub."""
    return lambda handler, _: handler.send(b"", {"Location": other.endpoint + handler.path}, 302)


# -- a server that misbehaves ------------------------------------------------------------------


def cut(handler: Handler, content: bytes, times: list[int]) -> None:
    """Half of what is left, as if it were all, then the line is dead; the whole once `times` is used up."""
    start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
    if not times:
        return handler.send(content, {})
    times.pop()
    rest = content[start:]
    handler.begin(206 if start else 200, {"Content-Length": str(len(rest)), "Connection": "close"})
    handler.wfile.write(rest[: len(rest) // 2])
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(2)


def without_ranges(handler: Handler, content: bytes, times: list[int]) -> None:
    """As `cut`, of a server that always begins again."""
    del handler.headers["Range"]
    cut(handler, content, times)


def troubled(handler: Handler, content: bytes, times: list[int]) -> None:
    """An error of the server, then the whole."""
    if times:
        times.pop()
        return handler.send(b"", {"Retry-After": "0"}, 500)
    handler.send(content, {})


@pytest.mark.parametrize("fault", [cut, without_ranges, troubled])
def test_what_stops_goes_on(server: Hub, fault: Callable[..., None]) -> None:
    """A few times, from where it was."""
    server.faults["model.safetensors"] = partial(fault, times=[0, 0])
    path = weights_of(open_folder("org/m"))
    assert path.read_bytes() == (LLAMA / "model.safetensors").read_bytes()
    assert server.fetched() == ["model.safetensors"] * 3


def weights_of(folder: Folder) -> Path:
    """The file of weights, fetched."""
    assert folder.bring("model.safetensors")
    return folder.path / "model.safetensors"


def changed(handler: Handler, content: bytes) -> None:
    """As many bytes, one of them another."""
    handler.send(content[:-1] + bytes([content[-1] ^ 1]), {})


def longer(handler: Handler, content: bytes) -> None:
    handler.send(content + b"!", {})


def shorter(handler: Handler, content: bytes) -> None:
    handler.send(content[:-1], {})


def silent(handler: Handler, content: bytes) -> None:
    time.sleep(1.5)


def endless(handler: Handler, content: bytes) -> None:
    """Without a length, for as long as someone listens."""
    handler.begin(200, {"Connection": "close"})
    try:
        for _ in range(2000):
            handler.wfile.write(b"[" * 2**16)
    except OSError:
        pass
    handler.close_connection = True


def drop_by_drop(handler: Handler, content: bytes) -> None:
    """All of it, a byte at a time."""
    handler.begin(200, {"Content-Length": str(len(content)), "Connection": "close"})
    try:
        for i in range(200):
            handler.wfile.write(content[i : i + 1])
            handler.wfile.flush()
            time.sleep(0.01)
    except OSError:
        pass
    handler.close_connection = True


def patient(handler: Handler, content: bytes) -> None:
    handler.send(b"", {"Retry-After": "999999999"}, 429)


LIES: dict[str, tuple[str, Callable[[Handler, bytes], None], type[RlxError], str]] = {
    "other bytes of a large file": ("model.safetensors", changed, IntegrityError, "has the digest .* nothing was kept"),
    "other bytes of a small file": ("config.json", changed, IntegrityError, "has the digest .* nothing was kept"),
    "more bytes": ("model.safetensors", longer, IntegrityError, "more came than the"),
    "fewer bytes": ("model.safetensors", shorter, HubUnreachableError, "bytes came, and nothing is kept"),
    "cut every time": (
        "model.safetensors", partial(cut, times=[0] * 99), HubUnreachableError, "bytes came, and nothing is kept",
    ),
    "an endless file": ("config.json", endless, IntegrityError, "more came than the"),
    "an endless list": ("revision/main", endless, LimitError, "limits.MAX_LISTING_BYTES"),
    "a list that is none": (
        "revision/main", lambda h, _: h.send(b"<html>", {}), IntegrityError, "the list of files: not JSON",
    ),
    "a commit that leads out": (
        "revision/main", lambda h, _: h.send(b'{"sha": "../../x", "siblings": []}', {}), IntegrityError,
        "is this a Hub",
    ),
    "a digest that leads out": (
        "revision/main",
        lambda h, c: h.send(c.replace(b'"sha256": "', b'"sha256": "../../../'), {}), IntegrityError, "digest is",
    ),
    "no answer": ("config.json", silent, HubUnreachableError, r"no answer for 1 s \(HF_HUB_DOWNLOAD_TIMEOUT\)"),
    "drop by drop": ("model.safetensors", drop_by_drop, HubUnreachableError, "bytes came in 0.2 s; given up"),
    "a wait of years": ("config.json", patient, HubUnreachableError, "answers 429"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_lies(server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """End in finite time, by their names; and nothing of them is there for the next, who finds a good server."""
    ending, fault, error, message = LIES[case]
    monkeypatch.setattr(limits, "MAX_LISTING_BYTES", 2**20)
    if case == "drop by drop":
        monkeypatch.setattr(transfer, "SLOW_S", 0.2)
    if case == "no answer":
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
        monkeypatch.setattr(transfer, "WAITS_S", ())
    server.faults[ending] = fault
    with pytest.raises(error, match=message):
        rlx.recipe_for("org/m")
    left = [p for p in home.rglob("*") if p.name.endswith((".incomplete", ".tmp"))]
    assert left == [] and not (home / CACHED / "snapshots" / COMMIT / ending).exists()
    server.faults.clear()
    monkeypatch.delenv("HF_HUB_DOWNLOAD_TIMEOUT", raising=False)
    assert rlx.recipe_for("org/m").config.vocab_size == 389


def test_sizes_are_looked_at_before_anything_comes(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limits of files that are read whole, and the room on the disk. Without a length, as it comes."""
    monkeypatch.setattr(limits, "MAX_CONFIG_BYTES", 100)
    with pytest.raises(LimitError, match=r"'org/m/config.json': the size in bytes is \d+, over .*MAX_CONFIG_BYTES"):
        rlx.load("org/m")
    assert server.fetched() == []
    folder = open_folder("org/m")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(0))
    with pytest.raises(NoSpaceError, match=r"bytes to fetch, 0 are free in"):
        folder.bring("model.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(2**40))
    bare = json.dumps({"sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}).encode()
    server.faults["revision/main"] = lambda handler, _: handler.send(bare, {})
    with pytest.raises(LimitError, match="MAX_CONFIG_BYTES"):
        rlx.load("org/m")


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    "shard, error", [("../out.safetensors", PathEscapeError), ("no.safetensors", MissingWeightError)]
)
def test_shards_are_files_of_the_commit(server: Hub, shard: str, error: type[RlxError]) -> None:
    server.files["org/m"] = sharded(LLAMA)
    index = json.loads(server.files["org/m"][INDEX])
    index["weight_map"]["model.norm.weight"] = shard
    server.files["org/m"][INDEX] = json.dumps(index).encode()
    with pytest.raises(error, match=shard.rpartition("/")[2]):
        rlx.load("org/m")
    assert shard not in server.fetched()


# -- the cache ---------------------------------------------------------------------------------


def test_without_a_connection(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache opens: told to be offline without a word, else with a warning."""
    expected = rlx.load("org/m").model.params
    asked = len(server.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    jax.tree.map(np.testing.assert_array_equal, rlx.load("org/m").model.params, expected)
    for name, revision in (("org/n", None), ("org/m", "v1"), ("org/m", "f" * 40)):
        with pytest.raises(HubUnreachableError, match=f"'{name}': no such directory here, .*HF_HUB_OFFLINE is set"):
            rlx.load(name, revision=revision)
    assert len(server.asked) == asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.faults["revision/main"] = refusing(503)
    with pytest.warns(RlxWarning, match=f"answers 503.*opening what the cache has, commit {COMMIT}"):
        assert rlx.load("org/m").vocab_size == 389


def test_what_was_interrupted_is_not_whole(server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between files, or within one: offline the file that is missing is named, online it is fetched."""

    def stop(what: str, done: int, total: int) -> None:
        if what == "download tokenizer.json":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rlx.load("org/m", progress=stop)
    assert list(home.rglob("*.incomplete")) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubUnreachableError, match=r"'org/m/tokenizer.json' is not in the cache"):
        rlx.load("org/m")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    (home / CACHED / "blobs" / "abc.incomplete").write_bytes(b"of a process that was killed")
    blob = (home / CACHED / "snapshots" / COMMIT / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert rlx.load("org/m").tokenizer is not None and server.fetched().count("model.safetensors") == 2


def test_the_cache_is_that_of_huggingface_hub(server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either finds what the other has fetched, and sees nothing that it does not know."""
    cache, endpoint = home / "hub", server.endpoint
    server.add("org/theirs", LLAMA)
    for name in server.files["org/theirs"]:
        huggingface_hub.hf_hub_download("org/theirs", name, cache_dir=cache, endpoint=endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(server.asked)
    assert rlx.load("org/theirs").tokenizer is not None and len(server.asked) == asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    rlx.load("org/m")
    theirs = partial(huggingface_hub.hf_hub_download, "org/m", cache_dir=cache, local_files_only=True)
    assert Path(theirs("model.safetensors")).read_bytes() == (LLAMA / "model.safetensors").read_bytes()
    seen = huggingface_hub.scan_cache_dir(cache)
    assert sorted(found.repo_id for found in seen.repos) == ["org/m", "org/theirs"] and seen.warnings == []


def test_links_of_the_cache(tmp_path: Path) -> None:
    """Lead to the blobs of the model, and to those that all models share where the cache says that it has such."""
    cache = tmp_path / "hub"
    snapshot, blobs, shared = (
        cache / "models--o--m" / "snapshots" / "a",
        cache / "models--o--m" / "blobs",
        cache / "blobs",
    )
    for folder in (snapshot, blobs, shared / "ab"):
        folder.mkdir(parents=True)
    (shared / "ab" / "x").write_text("{}")
    (blobs / "y").symlink_to("../../blobs/ab/x")
    (snapshot / "config.json").symlink_to("../../blobs/y")
    with pytest.raises(PathEscapeError):
        files.resolve(str(snapshot), "config.json")
    (shared / ".huggingface-shared-blobs").write_text("1\n")
    assert files.resolve(str(snapshot), "config.json") == str(shared / "ab" / "x")
    (snapshot / "out.json").symlink_to("../../../models--o--n/blobs/z")
    with pytest.raises(PathEscapeError):
        files.resolve(str(snapshot), "out.json")
