"""SigLIP 2 with images of any proportions (NaFlex), live against transformers, from pixels."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.blocks import NaflexEmbed
from rlx_jax.encode.naflex import patch_sides
from rlx_jax.text.tokenizer import load_tokenizer
from tests.opening import load

LAYERS = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}
VISION = LAYERS | {"patch_size": 5, "num_patches": 16, "num_channels": 3}
TEXT = LAYERS | {"vocab_size": 83, "max_position_embeddings": 9, "pad_token_id": 1}
SIDES = ((40, 33), (12, 70), (90, 9), (6, 6), (31, 31))
IMAGES = [np.random.default_rng(h).integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIDES]


def test_sides() -> None:
    """Multiples of the patch, at most so many patches, and about the proportions."""
    assert [patch_sides(h, w, 5, 20) for h, w in SIDES] == [(25, 20), (10, 50), (50, 5), (20, 20), (20, 20)]


def test_positions_of_patches() -> None:
    """The grid of positions is resampled for each image as `jax.image.resize` does, with antialias."""
    rng, shapes = np.random.default_rng(0), np.array([[2, 7], [5, 3], [1, 1]], np.int32)
    keys = {"w": (6, 5), "b": (6,), "p": (16, 6)}
    weights = {key: rng.normal(size=shape).astype(np.float32) for key, shape in keys.items()}
    flow = rlx.ModelFlow("patches").input("x", ("batch", "patches", 5)).input("spatial_shapes", ("batch", 2), "int32")
    model = rlx.compile(flow.stage(NaflexEmbed("w", "b", "p", 6, 4)), weights)
    patches = rng.normal(size=(3, 16, 5)).astype(np.float32)
    tokens = np.asarray(model(x=patches, spatial_shapes=shapes))
    for row, patch, (height, width) in zip(tokens, patches, shapes, strict=True):
        grid = jax.image.resize(weights["p"].reshape(4, 4, 6), (height, width, 6), "linear")
        want = patch[: height * width] @ weights["w"].T + weights["b"] + grid.reshape(-1, 6)
        np.testing.assert_allclose(row[: height * width], want, atol=1e-5)


def check_close(actual: Any, expected: Any) -> None:
    reference = expected.detach().numpy()
    np.testing.assert_allclose(actual, reference, atol=3e-5 * np.abs(reference).max(), rtol=0)


def written(directory: Path, kind: str, config: Any, processor: Any) -> Any:
    """A model of random weights, in `directory` too."""
    import torch
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name and "weight" in name))
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return model


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("changes", [{}, {"num_patches": 9, "layer_norm_eps": 1e-2, "hidden_act": "gelu"}], ids=str)
def test_equal_to_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    import torch
    import transformers
    from PIL import Image
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    config = transformers.Siglip2Config(text_config=TEXT, vision_config=VISION | changes)
    processor = Siglip2ImageProcessorPil(patch_size=5, max_num_patches=20)
    inputs = processor([Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    arrays = {name: value.numpy() for name, value in inputs.items()}

    model = written(tmp_path / "vision", "Siglip2VisionModel", config.vision_config, processor)
    encoder, expected = load(tmp_path / "vision"), model(**inputs)
    assert isinstance(encoder, rlx.VisionEncoder)
    for name, value in encoder.processor(IMAGES).items():  # type: ignore[misc]
        check_close(value, inputs[name])
    check_close(encoder.embed(IMAGES), expected.pooler_output)
    check_close(encoder.embed(arrays), expected.pooler_output)
    check_close(encoder.embed(IMAGES[1]), expected.pooler_output[1])
    check_close(encoder.hidden_states(arrays), expected.last_hidden_state)

    model = written(tmp_path / "classifier", "Siglip2ForImageClassification", config, processor)
    classifier: Any = load(tmp_path / "classifier")
    check_close(classifier.logits(IMAGES), model(**inputs).logits)

    model = written(tmp_path / "both", "Siglip2Model", config, processor)
    both: Any = load(tmp_path / "both")
    tokens = np.random.default_rng(5).integers(2, 83, (3, 9))
    check_close(
        both.similarity(tokens.tolist(), IMAGES), model(input_ids=torch.tensor(tokens), **inputs).logits_per_text
    )


def model_of(changes: Any = (), **options: Any) -> rlx.VisionEncoder:
    from rlx_jax.models.siglip import Siglip2VisionFlow

    recipe = Siglip2VisionFlow.for_prefill({"model_type": "siglip2_vision_model"} | VISION | dict(changes))
    return rlx.VisionEncoder(recipe, missing="init", key=0, **options)


@pytest.mark.slow
def test_explain_and_warmup() -> None:
    """Both know how many patches the image processor makes."""
    processor = rlx.ImageProcessor(patch=5, max_patches=20)
    profile = rlx.CompileProfile.preset("auto").replace(buckets={"batch": [2], "on_recompile": "error"})
    encoder = model_of(processor=processor, profile=profile)
    encoder.warmup()
    assert encoder.embed(IMAGES[:2]).shape == (2, 24)
    assert encoder.explain(batch=2, runs=1).sizes == {"batch": 2, "patches": 20}
    assert model_of().explain(batch=2, size=(3, 4), runs=1).sizes == {"batch": 2, "patches": 12}
    with pytest.raises(rlx.errors.RequestError, match="size is None"):
        model_of().explain()


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "lower"),
    [("siglip2", "GemmaTokenizer", True), ("siglip", "Siglip2Tokenizer", True), ("siglip", "GemmaTokenizer", False)],
)
def test_lower_case(model_type: str, tokenizer_class: str, lower: bool, tmp_path: Path) -> None:
    """Checkpoints of SigLIP 2 have Gemma's tokenizer, which transformers reads with a class of its own."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *"▁acAC"])}
    native = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    native.normalizer = normalizers.Replace(" ", "▁")
    native.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    ids: Any = load_tokenizer(tmp_path)
    assert ids.encode("Ac CA") == [6 if lower else 8, 7, 5, *([7, 6] if lower else [9, 8])]
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ids.encode("Ac CA") == reference("Ac CA", add_special_tokens=False)["input_ids"]
