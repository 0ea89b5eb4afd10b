"""CLIP and SigLIP against `transformers`: recorded by default, live under the mark `oracle`."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.models.dual import ClipConfig
from rlx_jax.models.siglip import SiglipConfig
from tests.opening import load
from tests.oracles import checkpoints
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record
from tests.oracles.vision import TEXTS, VISION

DUAL = VISION / "dual"
NAMES = sorted(file.stem for file in DUAL.glob("*.npz"))


@functools.cache
def record(name: str) -> Mapping[str, npt.NDArray[Any]]:
    """The numbers of a recorded checkpoint."""
    return load_record(DUAL / name)


@functools.cache
def dual(name: str) -> rlx.DualEncoder:
    """A recorded checkpoint, loaded once."""
    loaded: rlx.DualEncoder = load(DUAL / name)
    return loaded


def pictures(name: str) -> list[npt.NDArray[np.uint8]]:
    """The recorded images."""
    return [record(name)[f"picture.{i}"] for i in range(2)]


def cases(*quick: str) -> list[Any]:
    """Every recorded checkpoint; those that are not named are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", cases("clip"))
def test_vectors_and_similarity(name: str) -> None:
    """Of texts of several lengths, one of which is cut, and of images; alone as in a batch."""
    both, want = dual(name), record(name)
    assert_close(both.embed(list(TEXTS)), want["texts"])
    assert_close(both.embed([row.tolist() for row in want["ids"]]), want["texts"])  # its own ids, padded
    assert_close(both.embed(TEXTS[1]), want["texts"][1])
    assert_close(both.embed_images(pictures(name)), want["images"])
    assert_close(both.embed_images(want["pixels"]), want["images"])
    assert_close(both.similarity(list(TEXTS), pictures(name)), want["logits"])
    assert_close(both.similarity(TEXTS[0], pictures(name)[1]), want["logits"][:1, 1:])
    assert_close(both.images.hidden_states(want["pixels"]), want["hidden"])


def vectors(recipe: Any) -> dict[str, Any]:
    """Of the recorded texts and images, through one flow and through a flow for each tower."""
    pixels, both = record("clip")["pixels"], load(DUAL / "clip", recipe=recipe)
    return whole(recipe) | {
        "text alone": unit(both.embed([row.tolist() for row in record("clip")["ids"]])),
        "vision alone": unit(both.embed_images(pixels)),
    }


def whole(recipe: Any, weights: Any = None) -> dict[str, Any]:
    """Of one flow."""
    out: Any = rlx.compile(recipe, weights)(pixel_values=record("clip")["pixels"], input_ids=record("clip")["ids"])
    return {"text": np.asarray(out["text_embeds"]), "vision": np.asarray(out["image_embeds"])}


def recorded() -> dict[str, Any]:
    """Of the model without a change."""
    return {"text": record("clip")["text_embeds"], "vision": record("clip")["image_embeds"]}


def unit(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of length 1."""
    return np.asarray(rows) / np.linalg.norm(rows, axis=-1, keepdims=True)


@pytest.mark.slow
def test_an_edit_of_a_tower() -> None:
    """Is made once, in the tower that its path names, on either road: as if its weights were others."""
    recipe = rlx.recipe_for(DUAL / "clip")
    edited = recipe.at("vision.layers.0.mlp").scale(0.3)
    assert len(edited.assemble()._block_edits) == 1
    weights = {key: np.array(a) for key, a in rlx.compile(recipe).weights().items()}
    for part in ("weight", "bias"):
        weights[f"vision_model.encoder.layers.0.mlp.fc2.{part}"] *= np.float32(0.3)
    found, want = vectors(edited), whole(recipe, weights)
    for name, value in want.items():
        assert_close(found[name], value)
        assert_close(found[f"{name} alone"], value)
        change = np.abs(found[name] - recorded()[name]).max()
        assert change > 1e-4 if name == "vision" else change < 1e-5


@pytest.mark.slow
def test_adapters_of_towers(tmp_path: Path) -> None:
    """New ones and those of files, in one flow and in one for each tower: merged the same model."""
    recipe, pattern = rlx.recipe_for(DUAL / "clip"), "*.layers.*.attn.q_proj"
    model = rlx.compile(rlx.lora(recipe, pattern, rank=2), missing="init", key=0)
    model = model.replace({key: a + 0.2 if "lora" in key else a for key, a in (model.params or {}).items()})
    rlx.save_lora(model, tmp_path / "adapter")
    adapted = rlx.lora(recipe, adapter=tmp_path / "adapter")
    found, merged = vectors(adapted), rlx.merge_lora(model)
    for key, value in rlx.merge_lora(load(DUAL / "clip", recipe=adapted)).items():
        np.testing.assert_array_equal(value, merged[key])
    for name, value in whole(recipe, merged).items():
        assert_close(found[name], value)
        assert_close(found[f"{name} alone"], value)
    drawn = load(DUAL / "clip", recipe=rlx.lora(recipe, pattern, rank=2), missing="init", key=0)
    assert {key for key in drawn.model.weights() if "lora" in key} == {key for key in model.weights() if "lora" in key}
    assert np.abs(found["text"] - recorded()["text"]).max() > 1e-3


def test_none_and_iterators() -> None:
    """No text and no image is no vector; iterators are read as they go, more than one call of them."""
    both, want = dual("clip"), record("clip")
    for vectors in (both.embed([]), both.embed(iter([])), both.embed_images([]), both.embed_images(iter([]))):
        assert vectors.shape == (0, 14) and vectors.dtype == np.float32
    assert both.similarity([], pictures("clip")).shape == (0, 2)
    many = both.embed((TEXTS[i % 4] for i in range(70)), max_tokens=64)
    assert_close(many, want["texts"][np.arange(70) % 4])
    seen = both.embed_images(pictures("clip")[i % 2] for i in range(70))
    assert_close(seen, want["images"][np.arange(70) % 2])
    with pytest.raises(errors.RequestError, match=r"images\[40\]: expected u8, got f64"):
        both.embed_images(pictures("clip")[0] if i < 40 else np.zeros((4, 4, 3)) for i in range(50))


@pytest.mark.parametrize("name", cases("clip_oldest"))
def test_one_program_of_both(name: str) -> None:
    """The recipe as it is: logits and vectors of unit length, as the model's forward. Hooks see the layers of both."""
    seen, want = set[str](), record(name)

    def look(ctx: Any) -> Any:
        seen.add(ctx.spec.prefix.partition(".")[0])
        return ctx.default_stage()

    model = rlx.compile(rlx.recipe_for(DUAL / name).layer(look))
    assert seen == {"text_model", "vision_model"} and model.report().refusals == ()
    out: Any = model(want["pixels"], want["ids"])
    assert_close(out["logits_per_text"], want["logits"])
    assert_close(out["text_embeds"], want["text_embeds"])
    assert_close(out["image_embeds"], want["image_embeds"])


ALONE = {
    "clip vision": ("clip", "clip_vision_model", "CLIPVisionModelWithProjection", ("vision_model.", "visual_")),
    "clip text": ("clip", "clip_text_model", "CLIPTextModelWithProjection", ("text_model.", "text_projection")),
    "siglip vision": ("siglip", "siglip_vision_model", "SiglipVisionModel", ("vision_model.",)),
    "siglip text": ("siglip", "siglip_text_model", "SiglipTextModel", ("text_model.",)),
}


def alone(which: str, directory: Path) -> str:
    """Make the checkpoint of one tower; the name of both."""
    name, kind, architecture, prefixes = ALONE[which]
    checkpoints.copy(DUAL / name, directory)
    config = {"model_type": kind, "architectures": [architecture]}
    config |= towers_config(directory)[f"{which.split()[1]}_config"] | (
        {"projection_dim": 14} if name == "clip" else {}
    )
    (directory / "config.json").write_text("{}", "utf-8")
    checkpoints.edit_json(directory / "config.json", config)
    checkpoints.edit_tensors(directory, lambda tensors: {k: v for k, v in tensors.items() if k.startswith(prefixes)})
    return name


@pytest.mark.parametrize("which", [name for name in ALONE if "vision" in name])
def test_vision_tower_alone(which: str, tmp_path: Path) -> None:
    """Its own config; SigLIP's without a head has hidden states and no vectors."""
    name = alone(which, tmp_path / "tower")
    vision = load(tmp_path / "tower")
    assert isinstance(vision, rlx.VisionEncoder)
    assert_close(vision.embed(pictures(name)), record(name)["images"])
    if name == "clip":
        return
    checkpoints.edit_json(tmp_path / "tower" / "config.json", {"vision_use_head": False})
    checkpoints.edit_tensors(
        tmp_path / "tower", lambda tensors: {k: v for k, v in tensors.items() if ".head." not in k}
    )
    headless = load(tmp_path / "tower")
    assert_close(headless.hidden_states(record(name)["pixels"]), record(name)["hidden"])


@pytest.mark.parametrize("which", ["clip text", pytest.param("siglip text", marks=pytest.mark.slow)])
def test_text_tower_alone(which: str, tmp_path: Path) -> None:
    """Vectors as beside the other tower; a pipeline pools hidden states in their place. SigLIP's padding is read."""
    name = alone(which, tmp_path / "tower")
    text = load(tmp_path / "tower")
    assert isinstance(text, rlx.Encoder) and "'pooled' is one vector for a row" in text.report().embedding
    assert text.own_lengths == "" or "siglip" in which  # rows of CLIP's are padded, and no token reads padding
    assert_close(text.embed(list(TEXTS)), record(name)["texts"])
    assert_close(text.embed(TEXTS[1]), record(name)["texts"][1])
    ids = record(name)["ids"]
    assert text.hidden_states(ids).shape == (*ids.shape, 16)
    own = rlx.Encoder(text.model, pipeline=SentencePipeline())
    first = ids[:1, :5]
    assert_close(own.embed(first), np.asarray(own.hidden_states(first)).mean(axis=1), tolerance=1e-5)


def test_rows_of_few_sizes(tmp_path: Path) -> None:
    """Texts whose padding is read are as long as they are padded to, whatever the profile's buckets; warm-up knows."""
    alone("siglip text", tmp_path / "tower")
    profile = rlx.CompileProfile().replace(buckets={"batch": [2], "on_recompile": "error"})
    text = load(tmp_path / "tower", profile=profile)
    text.warmup()
    assert_close(text.embed(list(TEXTS)), record("siglip")["texts"])
    assert text.report().recompiles == 0


def towers_config(directory: Path) -> Any:
    """What `config.json` says."""
    return json.loads((directory / "config.json").read_text("utf-8"))


def test_one_set_of_parameters(tmp_path: Path) -> None:
    """New ones reach both towers and the scale; those of one tower alone are not saved, as they would be lost."""
    both, ids, key = dual("clip"), [[1, 47, 60]], "visual_projection.weight"
    before, score, old = both.embed_images(pictures("clip")), both.similarity(ids, pictures("clip")), both.model.params
    assert old is not None
    params = {name: value * 2 if name in (key, "logit_scale") else value for name, value in old.items()}
    try:
        both.images.model = both.images.model.replace(params)
        with pytest.raises(errors.RequestError, match="both.model.*both.texts.model.replace"):
            rlx.save(both, tmp_path / "it")
        with pytest.raises(errors.RequestError, match="got a separately compiled clip"):
            both.model = rlx.compile(both.texts.model.flow, both.texts.model.weights(old))
        both.model = both.texts.model.replace(params)
        np.testing.assert_allclose(both.embed_images(pictures("clip")), 2 * before, rtol=1e-5)
        assert np.abs(both.similarity(ids, pictures("clip")) / score - 1).max() > 0.1
        rlx.save(both, tmp_path / "it")
        np.testing.assert_array_equal(load_file(tmp_path / "it" / "model.safetensors")[key], params[key])
    finally:
        both.model = both.texts.model.replace(old)


def test_towers_of_your_own() -> None:
    """Flows with outputs `pooled`; without a flow for it, the similarity is the cosine; what is missing is named."""
    rng = np.random.default_rng(0)
    weights = {"e": rng.normal(size=(9, 4)).astype("f4"), "p": rng.normal(size=(3, 4)).astype("f4")}

    def words(emit: Any, x: Any) -> Any:
        emit.output("pooled", x.mean(axis=1))
        return x

    def shades(emit: Any, x: Any) -> Any:
        emit.output("pooled", x.mean(axis=(2, 3)) @ emit.param("p"))
        return x

    texts = rlx.ModelFlow("words").input("ids", ("batch", "seq"), dtype="int32").embed("e").custom(words)
    images = rlx.ModelFlow("shades").input("pixels", ("batch", 3, "height", "width")).custom(shades)
    processor = rlx.ImageProcessor(size=(2, 2))
    both = rlx.DualEncoder(texts, images, weights, processor=processor, padding=(3, 8))
    picture = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    t, i = weights["e"][[2, 5, 8]].mean(0), (picture / 255).mean((0, 1)) @ weights["p"]
    assert_close(both.embed([[2, 5]])[0], t)
    want = np.array([[t @ i / np.linalg.norm(t) / np.linalg.norm(i)]], np.float32)
    assert_close(both.similarity([[2, 5]], picture), want, tolerance=1e-5)
    plain = rlx.DualEncoder(texts, images, weights).embed([[2, 5], [8], [3]])
    assert_close(plain[:2], np.stack([weights["e"][[2, 5]].mean(0), weights["e"][8]]))
    bare = rlx.ModelFlow("plain").input("ids", ("batch", "seq"), dtype="int32").embed("e")
    with pytest.raises(errors.GraphError, match="embed needs an output 'pooled'"):
        rlx.DualEncoder(bare, images, weights, padding=(3, 8))
    for padding, match in (((3,), "expected .tokens, id."), ((0, 1), "at least 1"), ((3, 9), "id 9 is not in")):
        with pytest.raises(errors.RequestError, match=match):
            rlx.DualEncoder(texts, images, weights, padding=padding)  # type: ignore[arg-type]


PLAIN: dict[str, Any] = {"text_config": {}, "vision_config": {}}


def test_defaults_and_old_spellings() -> None:
    """What is left out is OpenAI's base model, and Google's; the towers' second configs count where there are any."""
    clip, siglip = ClipConfig.from_hf({}), SiglipConfig.from_hf(PLAIN)
    sizes = clip.text.hidden_size, clip.vision.patch_size, clip.vision.width, clip.text.end_id
    assert sizes == (512, (32, 32), 512, 49407)
    assert (siglip.text.hidden_size, siglip.vision.patch_size, siglip.text.activation) == (768, (16, 16), "gelu_tanh")
    old = ClipConfig.from_hf(
        {"text_config": {"hidden_size": 64}, "text_config_dict": {"hidden_size": 32, "eos_token_id": 2, "num_beams": 1}}
    )
    assert (old.text.hidden_size, old.text.end_id) == (32, None)


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("architecture", ["CLIPModel", "SiglipModel"])
def test_random_configurations(architecture: str, seed: int, tmp_path: Path) -> None:
    """Vectors, logits and hidden states of two towers."""
    from tests.oracles import vision as oracle

    checkpoint = oracle.random_dual(architecture, seed)
    side = checkpoint.config["vision_config"]["image_size"]
    family = "siglip" if architecture == "SiglipModel" else "clip"
    processor = oracle.PROCESSORS[family] | {"size": {"height": side, "width": side}, "crop_size": side}
    oracle.write(checkpoint, tmp_path, processor)
    oracle.write_tokenizer(tmp_path, family)
    found = oracle.images(seed, (side + 5, side + 9), (2 * side, side))
    want = oracle.compared(tmp_path, checkpoint, list(TEXTS), found)
    both = load(tmp_path)
    assert_close(both.embed(list(TEXTS)), want["texts"])
    assert_close(both.embed_images(found), want["images"])
    assert_close(both.similarity(list(TEXTS), found), want["logits"])
    assert_close(both.images.hidden_states(want["pixels"]), want["hidden"])


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("architecture", ["CLIPTextModel", "CLIPTextModelWithProjection", "SiglipTextModel"])
def test_random_text_towers(architecture: str, seed: int, tmp_path: Path) -> None:
    """Vectors and hidden states of a text tower alone, as transformers saves it."""
    from tests.oracles import vision as oracle

    checkpoint = oracle.random_text(architecture, seed)
    oracle.write(checkpoint, tmp_path)
    oracle.write_tokenizer(tmp_path, "siglip" if "Siglip" in architecture else "clip")
    want = oracle.embedded(tmp_path, checkpoint, list(TEXTS))
    text = load(tmp_path)
    assert_close(text.embed(list(TEXTS)), want["texts"])
    assert_close(text.hidden_states(want["ids"], attention_mask=want.get("mask")), want["hidden"])
