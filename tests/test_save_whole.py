"""`rlx_jax.save` of what `rlx_jax.load` opened: a directory that it, and transformers, open as the one before."""

import errno
import importlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax.errors import ConfigError, NoSpaceError, RlxWarning, TargetExistsError, UnsupportedError
from rlx_jax.io import atomic
from rlx_jax.weights import safetensors_format
from rlx_jax.weights import save as weights_save
from tests.hub_server import LLAMA, Hub
from tests.opening import load
from tests.oracles import hugging_face
from tests.oracles.checkpoints import FIXTURES, copy, edit_json, sentence_directory

BERT = FIXTURES / "bert" / "bare_v5"
GEMMA = FIXTURES / "gemma3_text" / "pattern_v4"
IDS = np.array([[1, 2, 3, 4]], np.int32)


def paths(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def beside(directory: Path) -> set[str]:
    """The files that are no weights."""
    return {name for name in paths(directory) if ".safetensors" not in name}


def tensors(directory: Path) -> dict[str, Any]:
    """All weights, of whatever files."""
    files = [load_file(directory / name) for name in paths(directory) if name.endswith(".safetensors")]
    return {key: value for file in files for key, value in file.items()}


def assert_same(saved: Path, source: Path) -> None:
    """The files of `source` and a manifest; every one but the weights to the byte, every weight to the bit."""
    assert beside(saved) == beside(source) | {"rlx_manifest.json"}
    for name in beside(source):
        assert (saved / name).read_bytes() == (source / name).read_bytes(), name
    have, want = tensors(saved), tensors(source)
    assert sorted(have) == sorted(want)
    for key, value in want.items():
        assert have[key].dtype == value.dtype and have[key].tobytes() == value.tobytes(), key


# A tied head; shards with the head of a task, a pooler and buffers that nobody reads; two towers; and so on.
SAVED = ["llama/gqa_tied_llama3_v5", "bert/masked_lm_v4"]
SAVED_SLOW = ["vision/dual/clip", "qwen3_moe/mixed_v5", "nomic_bert/first_v1", "qwen3_5_text/tied_v5"]


@pytest.mark.filterwarnings("ignore:.*auto_map is ignored")
@pytest.mark.parametrize("name", [*SAVED, *(pytest.param(name, marks=pytest.mark.slow) for name in SAVED_SLOW)])
def test_what_was_loaded_is_saved(tmp_path: Path, name: str) -> None:
    """All of it, and it loads with equal parameters."""
    model = load(FIXTURES / name)
    rlx.save(model, tmp_path / "it")
    assert_same(tmp_path / "it", FIXTURES / name)
    again = load(tmp_path / "it", verify="full")
    assert type(again) is type(model)
    jax.tree.map(np.testing.assert_array_equal, again.model.params, model.model.params)


@pytest.fixture(scope="module")
def lm() -> rlx.CausalLM:
    """A tiny Llama."""
    opened: rlx.CausalLM = load(LLAMA)
    return opened


def test_shards_and_what_else_is_there(lm: rlx.CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a size, shards with an index. A later save keeps what others put there; who edits a config may."""
    monkeypatch.setattr(safetensors_format, "SHARD_BYTES", 60_000)
    target = tmp_path / "it"
    rlx.save(lm, target)
    names = {name for name in os.listdir(target) if ".safetensors" in name}
    assert len(names) > 2 and "model.safetensors.index.json" in names
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors(LLAMA).values())
    assert all(key in load_file(target / name) for key, name in index["weight_map"].items())
    edit_json(target / "config.json", {"use_cache": False})
    (target / "notes.txt").write_text("mine")
    jax.tree.map(np.testing.assert_array_equal, load(target).model.params, lm.model.params)
    monkeypatch.undo()
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        rlx.save(lm, target)
    rlx.save(lm, target, overwrite=True)
    assert paths(target) == paths(LLAMA) | {"rlx_manifest.json", "notes.txt"}
    assert (target / "config.json").read_bytes() == (LLAMA / "config.json").read_bytes()


def test_another_dtype(tmp_path: Path) -> None:
    """Is that of all floating weights, also of those that the model does not hold, and the config says so."""
    encoder = load(FIXTURES / "bert" / "masked_lm_v4")
    rlx.save(encoder, tmp_path / "it", dtype="bf16")
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} == {"bfloat16", None}
    have, want = tensors(tmp_path / "it"), tensors(FIXTURES / "bert" / "masked_lm_v4")
    for key, value in want.items():
        floating = np.issubdtype(value.dtype, np.floating)
        expected = value.astype(ml_dtypes.bfloat16) if floating else value
        assert have[key].dtype == expected.dtype and have[key].tobytes() == expected.tobytes(), key


def test_sentence_transformers(tmp_path: Path) -> None:
    """Modules too, and weights that stand in a module's own directory."""
    source, below = sentence_directory(BERT, tmp_path / "m", modes=["mean"], normalise=True), "0_Transformer"
    (source / below).mkdir()
    for name in ("config.json", "model.safetensors", "sentence_bert_config.json"):
        shutil.move(source / name, source / below / name)
    modules = json.loads((source / "modules.json").read_text())
    modules[0]["path"] = below
    (source / "modules.json").write_text(json.dumps(modules))
    encoder = load(source)
    rlx.save(encoder, tmp_path / "it")
    assert_same(tmp_path / "it", source)
    again = load(tmp_path / "it")
    assert again.pipeline == encoder.pipeline
    jax.tree.map(np.testing.assert_array_equal, again.model.params, encoder.model.params)


@pytest.mark.filterwarnings("ignore:.*weights of other parts are not read")
def test_the_tower_that_is_not_built(tmp_path: Path) -> None:
    """Is copied, and the text model's weights have the names of the whole again."""
    source = tmp_path / "m"
    source.mkdir()
    text = json.loads((GEMMA / "config.json").read_text())
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps(config | {"vision_config": {"model_type": "siglip_vision_model"}}))
    text_weights = {f"language_model.{key}": value for key, value in tensors(GEMMA).items()}
    save_file(text_weights | {"vision_tower.a.weight": np.ones(3, np.float32)}, source / "model.safetensors")
    rlx.save(load(source), tmp_path / "it")
    assert_same(tmp_path / "it", source)


def test_nothing_of_the_checkpoint_before_stays(tmp_path: Path, lm: rlx.CausalLM) -> None:
    """Pooling, tokenizer and settings of another model would be read as this one's; what others put there stays."""
    target, plain = tmp_path / "it", load(BERT)
    rlx.save(load(sentence_directory(BERT, tmp_path / "s", modes=["mean"], normalise=True)), target)
    (target / "notes.txt").write_text("mine")
    assert "modules.json" in paths(target)
    rlx.save(plain, target, overwrite=True)
    assert beside(target) == beside(BERT) | {"rlx_manifest.json", "notes.txt"}

    for _ in range(2):  # beside weights alone they stay
        rlx.save(plain.model, target, format="safetensors", overwrite=True)
        assert beside(target) == beside(BERT) | {"rlx_manifest.json", "notes.txt"}
    rlx.save(lm, target, overwrite=True)
    assert beside(target) == beside(LLAMA) | {"rlx_manifest.json", "notes.txt"}


def test_a_model_of_the_hub(server: Hub, hub_home: Path, tmp_path: Path) -> None:
    """Is saved with what belongs to it, and its cache may go then."""
    server.files["org/m"] |= {"README.md": b"#", "vocab.json": b"{}"}
    rlx.save(load("org/m"), tmp_path / "it")
    shutil.rmtree(hub_home)
    assert paths(tmp_path / "it") == paths(LLAMA) | {"rlx_manifest.json", "vocab.json"}
    assert not any(p.is_symlink() for p in (tmp_path / "it").iterdir())
    assert load(tmp_path / "it").tokenizer is not None


def test_an_edited_recipe(tmp_path: Path) -> None:
    """Is no model of the config any more; its weights are saved alone. The checkpoint's own recipe is as none."""
    recipe = rlx.recipe_for(LLAMA)
    edited = load(LLAMA, recipe=recipe.after_layers([rlx.blocks.Custom(lambda emit, x: x * 1.01)]))
    with pytest.raises(UnsupportedError, match=r"rlx_jax.save\(model.model, path\)"):
        rlx.save(edited, tmp_path / "it")
    assert not (tmp_path / "it").exists()
    rlx.save(edited.model, tmp_path / "it", "safetensors")
    assert paths(tmp_path / "it") == {"model.safetensors", "rlx_manifest.json"}
    rlx.save(load(LLAMA, recipe=rlx.recipe_for(LLAMA)), tmp_path / "own")
    assert_same(tmp_path / "own", LLAMA)


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "with adapters": (lambda recipe: rlx.lora(recipe, "layers.*.mlp.up_proj", rank=2), "layers.0"),
    "of another epsilon": (lambda recipe: type(recipe)(replace(recipe.config, rms_norm_eps=0.1)), "layers.0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_recipe(name: str, tmp_path: Path) -> None:
    """In the place of the one that was opened: no config describes it, and it is not saved as if one did."""
    make, where = OTHERS[name]
    whole = load(LLAMA)
    whole.model = rlx.init(make(rlx.recipe_for(LLAMA)), 0)
    with pytest.raises(UnsupportedError, match=f"config.json.*'{where}"):
        rlx.save(whole, tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_a_model_that_load_did_not_open(lm: rlx.CausalLM, tmp_path: Path) -> None:
    """Knows no config; its numbers, of other weights or drawn, are saved by one that was opened."""
    recipe = rlx.recipe_for(LLAMA)
    mine = rlx.CausalLM(recipe, {key: value * 0.5 for key, value in lm.model.weights().items()})
    drawn = rlx.compile(rlx.Llama32Flow(recipe.config), missing="init", key=0)
    whole = load(LLAMA)
    for model in (mine.model, drawn):
        whole.model = model
        rlx.save(whole, tmp_path / "it", overwrite=True)
        assert beside(tmp_path / "it") == beside(LLAMA) | {"rlx_manifest.json"}
        again = load(tmp_path / "it")
        for key, value in model.weights().items():
            np.testing.assert_array_equal(again.model.weights()[key], value)
    rlx.save(mine.model, tmp_path / "alone", "safetensors")
    assert paths(tmp_path / "alone") == {"model.safetensors", "rlx_manifest.json"}


def test_a_file_that_has_gone(tmp_path: Path) -> None:
    source = copy(LLAMA, tmp_path / "m")
    opened = load(source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer.json"):
        rlx.save(opened, tmp_path / "it")
    assert os.listdir(tmp_path) == ["m"]


def test_a_file_that_nothing_here_reads(tmp_path: Path) -> None:
    """Is no reason to lose a save: a warning names it."""
    source = copy(LLAMA, tmp_path / "m")
    (tmp_path / "vocab.json").write_text("{}")
    (source / "vocab.json").symlink_to(tmp_path / "vocab.json")
    with pytest.warns(RlxWarning, match="not saved.*'vocab.json'"):
        rlx.save(load(source), tmp_path / "it")
    assert_same(tmp_path / "it", LLAMA)


def test_all_or_nothing(lm: rlx.CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk fills up between the weights and the last file, what was there is there."""
    rlx.save(lm, tmp_path / "it")
    before = {name: (tmp_path / "it" / name).read_bytes() for name in paths(tmp_path / "it")}
    real = atomic.write_synced

    def full(path: str, content: bytes) -> None:
        if path.endswith("tokenizer_config.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(weights_save, "write_synced", full)
    with pytest.raises(NoSpaceError, match="is as it was"):
        rlx.save(lm, tmp_path / "it", dtype="bf16", overwrite=True)
    assert {name: (tmp_path / "it" / name).read_bytes() for name in paths(tmp_path / "it")} == before
    assert os.listdir(tmp_path) == ["it"]


OPENED = {
    "llama/gqa_tied_llama3_v5": "AutoModelForCausalLM", "qwen3/tied_v4": "AutoModelForCausalLM",
    "gemma3_text/deep_v5": "AutoModelForCausalLM", "gpt2/bare_v4": "AutoModelForCausalLM",
    "qwen3_moe/mixed_v5": "AutoModelForCausalLM", "bert/bare_v5": "AutoModel", "nomic_bert/bare_v5": "AutoModel",
    "vision/dual/clip": "AutoModel",
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", OPENED)
def test_live_transformers_opens_what_is_saved(tmp_path: Path, name: str) -> None:
    """Every parameter is that of the checkpoint; logits are those that it has of the checkpoint itself; none is new."""
    torch = importlib.import_module("torch")
    opened = load(FIXTURES / name)
    rlx.save(opened, tmp_path / "it")
    have, want = (hugging_face.load(directory, OPENED[name]) for directory in (tmp_path / "it", FIXTURES / name))
    states = have.state_dict(), want.state_dict()
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], v) for k, v in states[1].items())
    if isinstance(opened, rlx.CausalLM):
        with torch.no_grad():
            logits = have(torch.from_numpy(IDS.astype(np.int64))).logits.numpy()
        np.testing.assert_allclose(opened.logits(IDS), logits, rtol=0, atol=3e-5 * np.abs(logits).max())


@pytest.mark.oracle
def test_live_transformers_reads_the_dtype_and_the_tokenizer(lm: rlx.CausalLM, tmp_path: Path) -> None:
    transformers, torch = (importlib.import_module(name) for name in ("transformers", "torch"))
    rlx.save(lm, tmp_path / "it", dtype="bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype="auto")
    assert model.dtype is torch.bfloat16
    tokenizers = [transformers.AutoTokenizer.from_pretrained(d) for d in (tmp_path / "it", LLAMA)]
    have, want = (tokenizer("the sky is, 1 2") for tokenizer in tokenizers)
    assert have.input_ids == want.input_ids and tokenizers[0].eos_token == tokenizers[1].eos_token


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["vision/dual/clip", "vision/dual/siglip"])
def test_live_vectors_of_towers_that_are_saved(tmp_path: Path, name: str) -> None:
    """With parameters that are not the checkpoint's: transformers makes the same vectors of texts and of images."""
    torch = importlib.import_module("torch")
    both: rlx.DualEncoder = load(FIXTURES / name)
    both.model = both.model.replace({key: value * 1.05 for key, value in (both.model.params or {}).items()})
    rlx.save(both, tmp_path / "it")
    model = hugging_face.load(tmp_path / "it", "AutoModel")
    picture = np.random.default_rng(0).integers(0, 256, (2, 40, 30, 3), dtype=np.uint8)
    assert both.images.processor is not None
    pixels = both.images.processor(picture)
    width, fill = both.texts.padding or (5, 0)
    ids = np.array([[1, 6, 20, 9, 60] + [fill] * (width - 5), [1, 47, 60] + [fill] * (width - 3)])
    mask = {} if both.texts.padding else {"attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(ids), pixel_values=torch.from_numpy(pixels), **mask)
    texts = [ids[0][:5], ids[1][:3]]
    for have, want in ((both.embed(texts), found.text_embeds), (both.embed_images(picture), found.image_embeds)):
        units = have / np.linalg.norm(have, axis=1, keepdims=True)
        np.testing.assert_allclose(units, want.numpy(), rtol=0, atol=3e-5)
    scores = both.similarity(texts, picture)
    np.testing.assert_allclose(scores, found.logits_per_text.numpy(), rtol=0, atol=3e-5 * np.abs(scores).max())


@pytest.mark.oracle
def test_live_vectors_of_sentences_that_are_saved(tmp_path: Path) -> None:
    """With parameters that are not the checkpoint's: sentence-transformers makes the same vectors."""
    library = importlib.import_module("sentence_transformers")
    source = sentence_directory(FIXTURES / "bert" / "bare_v5", tmp_path / "source", modes=["mean"], normalise=True)
    for path in (FIXTURES / "sentence" / "base").glob("tokenizer*"):
        (source / path.name).write_bytes(path.read_bytes())
    encoder: rlx.Encoder = load(source)
    encoder.model = encoder.model.replace({key: value * 1.05 for key, value in (encoder.model.params or {}).items()})
    rlx.save(encoder, tmp_path / "it")
    texts = ["a b", "hello world, this is it"]
    want = library.SentenceTransformer(os.fspath(tmp_path / "it"), device="cpu").encode(texts)
    np.testing.assert_allclose(encoder.embed(texts), want, rtol=0, atol=3e-5)
