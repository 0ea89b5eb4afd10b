"""A second load of a config takes the graph of the first one, and never anything that has changed."""

import copy
import dataclasses
import gc
import json
import pickle
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import plugins
from rlx_jax.models import families
from rlx_jax.weights import execute

LLAMA = Path(__file__).parent / "fixtures" / "llama" / "gqa_tied_llama3_v5"
TOKENS = np.arange(1, 9)[None]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    families._opened._entries.clear()
    yield Path(shutil.copytree(LLAMA, tmp_path / "model"))
    families._opened._entries.clear()


def facts(lm: rlx.CausalLM) -> dict[str, Any]:
    """What a user sees of a model."""
    params = lm.model.params
    assert params is not None and lm.tokenizer is not None
    return {
        "program": lm.model.text("mir"), "settings": lm.model.settings, "passes": list(lm.model.template().seconds),
        "params": {name: (np.asarray(a).tobytes(), a.shape, a.dtype, a.sharding) for name, a in params.items()},
        "eos": lm.eos_ids, "bos": lm.bos_id, "tokens": lm.tokenizer.encode("Hello, world"),
        "templates": dict(lm.tokenizer.chat_templates), "edited": getattr(lm.loaded_from, "mismatch", None),
        "ignored": lm.model.report().ignored_fields, "positions": lm.max_positions,
    }  # fmt: skip


def edit(name: str, **values: Any) -> Callable[[Path], dict[str, Any]]:
    """Return a change of fields of a JSON file."""

    def change(model: Path) -> dict[str, Any]:
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(content | values))
        return {}

    return change


def new_weights(model: Path) -> dict[str, Any]:
    weights = load_file(model / "model.safetensors")
    save_file({key: 1.5 * value for key, value in weights.items()}, model / "model.safetensors")
    return {}


def other_dtype(model: Path) -> dict[str, Any]:
    weights = load_file(model / "model.safetensors")
    save_file({key: value.astype(np.float16) for key, value in weights.items()}, model / "model.safetensors")
    return {}


def new_tokenizer(model: Path) -> dict[str, Any]:
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    return {}


def adapter(model: Path) -> dict[str, Any]:
    adapted = rlx.init(rlx.lora(rlx.recipe_for(model), "layers.*.self_attn.q_proj", rank=2), 1)
    assert adapted.params is not None
    params = {name: value + 0.1 for name, value in adapted.params.items()}
    rlx.save_lora(adapted.replace(params), model.parent / "adapter")
    return {"adapter": model.parent / "adapter"}


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "weights": new_weights, "dtype of the weights": other_dtype, "tokenizer": new_tokenizer, "adapter": adapter,
    "config": edit("config.json", rms_norm_eps=0.5), "positions": edit("config.json", max_position_embeddings=64),
    "generation_config": edit("generation_config.json", eos_token_id=[3, 4]),
    "tokenizer_config": edit("tokenizer_config.json", chat_template="{{ messages }}"),
    "ignored field": lambda model: edit("config.json", router_scale=2)(model) or {"ignore_fields": ["router_scale"]},
    "dtype": lambda _: {"dtype": "bf16"}, "mesh": lambda _: {"mesh": 2},
    "profile": lambda _: {"profile": rlx.CompileProfile().replace(passes={"cse": False})},
    "quantization": lambda _: {"profile": rlx.CompileProfile().replace(precision={"weights": "int8"})},
    "recipe": lambda model: {"recipe": rlx.recipe_for(model).at("layers.0.mlp").scale(2.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_missed(name: str, model: Path) -> None:
    before = facts(rlx.load(model))
    options = CHANGES[name](model)
    again = facts(rlx.load(model, **options))
    families._opened._entries.clear()
    fresh = facts(rlx.load(model, **options))
    assert again == fresh
    assert again != before


def test_what_does_not_fit_any_more_is_refused(model: Path) -> None:
    rlx.load(model)
    weights = load_file(model / "model.safetensors")
    key = "model.norm.weight"
    for changed, error in (
        ({k: v for k, v in weights.items() if k != key}, rlx.errors.MissingWeightError),
        ({**weights, key: weights[key][:-1]}, rlx.errors.WeightShapeError),
        ({**weights, "other": weights[key]}, rlx.errors.UnexpectedWeightError),
        ({**weights, key: weights[key].astype(np.int32)}, rlx.errors.WeightError),
        ({**weights, key: weights[key] * np.nan}, rlx.errors.NonFiniteWeightError),
    ):
        save_file(changed, model / "model.safetensors")
        with pytest.raises(error):
            rlx.load(model)
    save_file(weights, model / "model.safetensors")
    edit("config.json", router_scale=2)(model)
    with pytest.raises(rlx.errors.UnsupportedError, match="router_scale"):
        rlx.load(model)


def test_the_graph_and_its_programs_are_taken(model: Path, tmp_path: Path) -> None:
    first, moved = rlx.load(model), Path(shutil.copytree(model, tmp_path / "moved"))
    second = rlx.load(moved)
    assert second.model.built.hir is first.model.built.hir
    assert second.model.template("prefill").mir is first.model.template("prefill").mir
    assert second.model.built.source is not first.model.built.source
    assert second.loaded_from is not None and second.loaded_from.folder.path == moved
    times = [list(m.model.template().seconds.values()) for m in (first, second)]
    assert min(times[0]) > 0 and set(times[1]) == {0.0}
    assert (np.asarray(second.logits(TOKENS)) == np.asarray(first.logits(TOKENS))).all()
    bert = LLAMA.parents[1] / "bert" / "bare_v5"
    hir = [rlx.load(bert, expect=rlx.Encoder).model.built.hir for _ in range(2)]
    assert hir[0] is hir[1] is not rlx.load(model).model.built.hir


@pytest.mark.parametrize("name", ["special_tokens", "added_tokens", "chat_templates"])
def test_models_that_share_a_tokenizer_cannot_edit_it(name: str, model: Path) -> None:
    first, second = rlx.load(model), rlx.load(model)
    assert first.tokenizer is not None and first.tokenizer is second.tokenizer
    table: Any = getattr(first.tokenizer, name)
    before = dict(table)
    for edit_of in (
        lambda: table.__setitem__("default", "edited"), lambda: table.update(default="edited"), table.clear,
        lambda: table.setdefault("default", "edited"), lambda: table.pop("default", None), table.popitem,
        lambda: table.__delitem__("default"), lambda: table.__ior__({"default": "edited"}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} is read-only: .*replace"):
            edit_of()
    assert table == before == pickle.loads(pickle.dumps(table)) == copy.deepcopy(table)
    tables: Any = {name: {"default": "edited"}}
    first.tokenizer = dataclasses.replace(first.tokenizer, **tables)
    assert getattr(first.tokenizer, name) == {"default": "edited"} and getattr(second.tokenizer, name) == before


def test_surroundings(model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices, plugins, settings of JAX and the environment."""
    first = rlx.load(model).model
    with jax.default_device(jax.devices()[1]):
        second = rlx.load(model).model
    assert first.params is not None and second.params is not None
    assert [next(iter(p.values())).devices() for p in (first.params, second.params)] == [{d} for d in jax.devices()[:2]]
    with jax.default_device("cpu"):  # a platform in place of a device
        assert rlx.load(model).model.params is not None
    with plugins.using(rlx.Plugin("other")):
        assert rlx.load(model).model.template().mir is not first.template().mir
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        assert rlx.load(model).model.built.hir is not first.built.hir
    finally:
        jax.config.update("jax_numpy_rank_promotion", "allow")
    monkeypatch.setenv("RLX_FUSION_REPORT", "1")
    for _ in range(2):
        rlx.load(model)
        assert "llama" in capfd.readouterr().err
    family = families.FAMILIES["llama"]
    monkeypatch.setitem(families.FAMILIES, "llama", families.Family.decoder(rlx.Qwen2Flow, *family.architectures[:2]))
    with pytest.raises(rlx.errors.MissingWeightError, match="q_proj.bias"):  # biases that Qwen2 has
        rlx.load(model)


def test_warnings_come_each_time(model: Path) -> None:
    edit("config.json", auto_map={"AutoModel": "x.Y"})(model)
    for _ in range(2):
        with pytest.warns(rlx.errors.RlxWarning, match="auto_map is ignored"):
            rlx.load(model)


def test_nothing_retains_weights(model: Path) -> None:
    lm = rlx.load(model)
    lm.logits(TOKENS)
    held: list[Any] = [lm.model.built.source, lm.model.programs, lm.model.flow]
    kept = [*map(weakref.ref, held)]
    del lm, held
    gc.collect()
    assert not any(ref() for ref in kept) and len(families._opened) == 1
    for number in range(families.MAX_OPENED + 2):
        edit("config.json", rms_norm_eps=0.1 + number / 100)(model)
        rlx.recipe_for(model)
    assert len(families._opened) == families.MAX_OPENED


def test_another_class_is_refused_before_weights_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_load_group", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(rlx.errors.RequestError, match="is of class CausalLM; expected Encoder"):
        rlx.load(model, expect=rlx.Encoder)
