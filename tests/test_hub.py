"""Models by name, from a hub on loopback: what is asked for, what is kept, and what a bad server can do."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import (
    HubError,
    HubUnreachableError,
    MissingFileError,
    PathEscapeError,
    RequestError,
    RlxError,
    UnsupportedError,
)
from rlx_jax.io import hub
from rlx_jax.io.folder import open_folder
from rlx_jax.text.tokenizer import load_tokenizer
from tests.hub_server import COMMIT, INDEX, LLAMA, Handler, Hub, refusing, serving, sharded
from tests.oracles.checkpoints import FIXTURES, sentence_directory

TOKEN = "hf_secret"
TEXT_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


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


def header_of(content: bytes) -> int:
    """The bytes of a safetensors file before its data."""
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("shards", [False, True])
def test_inspect_reads_headers(server: Hub, capsys: pytest.CaptureFixture[str], shards: bool) -> None:
    """Of each file of weights eight bytes and the header; and it says of a model of the Hub what it says of a copy."""
    if shards:
        server.files["org/m"] = sharded(LLAMA)
    files = {name: data for name, data in server.files["org/m"].items() if name.endswith(".safetensors")}
    assert cli.main(["inspect", "org/m", "--json"]) == 0
    told = capsys.readouterr().out
    for name, content in files.items():
        end = header_of(content)
        assert server.ranges[name] == ["bytes=0-7", f"bytes=8-{end - 1}"] and server.sent[name] == end < len(content)
    whole = set(server.fetched()) - set(files)
    assert whole == {*TEXT_FILES, *([INDEX] if shards else [])}
    assert cli.main(["inspect", str(LLAMA), "--json"]) == 0
    assert capsys.readouterr().out == told
    open_folder("org/m").fetch(*files)
    asked = len(server.asked)
    assert cli.main(["inspect", "org/m", "--json"]) == 0  # what is in the cache is read there
    assert capsys.readouterr().out == told and len(server.asked) == asked + 1


def test_plan_reads_headers(server: Hub) -> None:
    """No weights: of the file of weights eight bytes and the header, and the plan is that of a copy."""
    (name,) = (name for name in server.files["org/m"] if name.endswith(".safetensors"))
    plan, content = rlx.plan("org/m", device="h200", batch=2), server.files["org/m"][name]
    assert server.ranges[name] == ["bytes=0-7", f"bytes=8-{header_of(content) - 1}"]
    assert plan == rlx.plan(LLAMA, device="h200", batch=2)


def test_every_opener(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Of flows, recipes, tokenizers, samplers and in the shell; a revision is what is asked for."""
    server.revisions += ("v1.0", "refs/pr/3")
    assert rlx.from_pretrained("org/m", revision="refs/pr/3").name == "llama"
    tokenizer = load_tokenizer("org/m")
    assert tokenizer is not None and tokenizer.special_tokens["eos_token"] == "<|end_of_text|>"
    assert rlx.open_weights("org/m", revision="v1.0").has("model.norm.weight")
    assert isinstance(rlx.Sampler.from_generation_config("org/m"), rlx.Sampler)
    assert cli.main(["inspect", "org/m", "--revision", "v1.0"]) == 0
    assert "Llama32Flow, causal" in capsys.readouterr().out
    assert cli.main(["convert", "org/m", "copy", "--revision", "v1.0"]) == 0
    assert "20 tensors" in capsys.readouterr().out and rlx.open_weights("copy").has("model.norm.weight")
    assert cli.main(["inspect", "org/m", "--revision", "v2"]) == 1
    assert "no such branch, tag or commit" in capsys.readouterr().err
    asked = [path.partition("/revision/")[2] for _, path, _ in server.asked if path.startswith("/api/")]
    assert asked == ["refs/pr/3", "main", "v1.0", "main", "v1.0", "v1.0", "v2"]


def test_a_model_inside_a_pipeline(server: Hub) -> None:
    """Is named by its directory, as those are that a pipeline of diffusers has."""
    files = {f"transformer/{p.name}": p.read_bytes() for p in (FIXTURES / "flux2" / "sharded_bf16").iterdir()}
    server.files["org/m"] = {"model_index.json": b"{}", "vae/diffusion_pytorch_model.safetensors": b"v"} | files
    with pytest.raises(MissingFileError, match="'org/m/config.json'.*'transformer/config.json'"):
        rlx.from_pretrained("org/m")
    recipe = rlx.recipe_for("org/m", subfolder="transformer")
    assert type(recipe).__name__ == "Flux2Flow" and sorted(set(server.fetched())) == sorted(files)
    cases: list[tuple[Any, type[RlxError]]] = [("../m", PathEscapeError), (3, RequestError), ("vae", MissingFileError)]
    for wrong, error in cases:
        with pytest.raises(error):
            rlx.load("org/m", subfolder=wrong)
    assert rlx.load(LLAMA.parent, subfolder=LLAMA.name).vocab_size == 389


def test_what_is_here_wins(server: Hub, tmp_path: Path) -> None:
    """A directory of that name is opened, and what cannot be a name is not sent away."""
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m").symlink_to(LLAMA)
    assert rlx.load("org/m").vocab_size == 389
    with pytest.raises(RequestError, match="revision=.*'v1'.*'org/m'"):
        rlx.load("org/m", revision="v1")
    for path in ("a/b/c", "./org/n", Path("org/n"), "org/m.git", "../m"):
        with pytest.raises(MissingFileError, match="no such directory.*'org/name'"):
            rlx.load(path)
    assert server.asked == []
    with pytest.raises(MissingFileError, match="'org/mm'.*'m'"):
        rlx.load("org/mm")
    asked = len(server.asked)
    with pytest.raises(MissingFileError, match="no such file or directory"):
        rlx.open_weights("org/x")  # as a step of a run would be: org is a directory here
    assert len(server.asked) == asked


def test_shards_come_together(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at a time, and no more than `MAX_PARALLEL_DOWNLOADS`; progress is one line for all of them."""
    names = [f"model-{i}.safetensors" for i in range(5)]
    server.files["org/m"] = {name: bytes([i]) * 100_000 for i, name in enumerate(names)}
    running, most, lock = [0], [0], threading.Lock()
    meeting = threading.Barrier(2, timeout=20)

    def slow(handler: Handler, content: bytes) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if handler.path.endswith(("model-0.safetensors", "model-1.safetensors")):
            meeting.wait()  # one after the other they would wait for ever
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        handler.send(content, {})

    monkeypatch.setattr(hub, "MAX_PARALLEL_DOWNLOADS", 3)
    server.faults[".safetensors"] = slow
    told: list[tuple[str, int, int]] = []
    folder = open_folder("org/m", progress=lambda what, done, total: told.append((what, done, total)))
    folder.fetch(*names, "no.safetensors")
    assert 2 <= most[0] <= 3 and sorted(server.fetched()) == names
    assert {what for what, _, _ in told} == {"download 5 files"} and {total for *_, total in told} == {500_000}
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told}) and told[-1][1] == 500_000
    assert all((folder.path / name).read_bytes() == server.files["org/m"][name] for name in names)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[RlxError], list[str]]] = {
    "not found": ({}, {"name": "org/none"}, MissingFileError, ["no such public model", "token="]),
    "not found with a token": (
        {"faults": {"main": refusing(404, "RepoNotFound")}}, {"token": TOKEN}, MissingFileError,
        ["no such model (404)"],
    ),

    "a short commit": ({}, {"revision": COMMIT[:7]}, MissingFileError, ["write a commit with all 40 digits"]),
    "private": ({"token": TOKEN}, {}, MissingFileError, ["if it is private, pass token=, or set HF_TOKEN"]),
    "another token": ({"token": "other"}, {"token": TOKEN}, HubError, ["refuses it to this token (401)"]),
    "gated": (
        {"faults": {"config.json": refusing(403, "GatedRepo")}}, {}, HubError,
        ["config.json", "request access on the model page"],
    ),
    "listed and gone": (
        {"faults": {"config.json": refusing(404, "EntryNotFound")}}, {}, MissingFileError, ["lists the file"],
    ),
    "in trouble": ({"faults": {"main": refusing(503)}}, {}, HubUnreachableError, ["answers 503"]),
    "no token of a header": ({}, {"token": TOKEN + "\n"}, RequestError, ["token: expected printable ASCII"]),
    "no token stored": ({}, {"token": True}, HubError, ["token=True, and no token is stored"]),
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


FORMS: dict[str, tuple[list[str], str]] = {
    "an unknown family": (["config.json"], r"model_type 'bart' is not built"),
    "GGUF": (
        ["README.md", "m.Q4_K_M.gguf", "m.Q8_0.gguf"],
        r"'org/m': no config.json; it has 'm.Q4_K_M.gguf', 'm.Q8_0.gguf': a GGUF file is a model by itself",
    ),

    "an adapter": (
        ["adapter_config.json", "adapter_model.safetensors"], r"'org/m': an adapter of PEFT .*lora\(recipe, adapter=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_model(server: Hub, tmp_path: Path, form: str) -> None:
    """Is named for what it is, here as on the Hub, and not fetched."""
    names, message = FORMS[form]
    server.files["org/m"] = dict.fromkeys(names, b'{"model_type": "bart"}')
    with pytest.raises(UnsupportedError, match=message):
        rlx.load("org/m")
    assert server.fetched() == [name for name in names if name == "config.json"]
    (tmp_path / "here").mkdir()
    for name in names:
        (tmp_path / "here" / name).write_bytes(b'{"model_type": "bart"}')
    with pytest.raises(UnsupportedError, match=message.replace("org/m", str(tmp_path / "here"), 1)):
        rlx.load(tmp_path / "here")


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
