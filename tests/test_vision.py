"""Vision towers and image processors against `transformers`: recorded by default, live under the mark `oracle`.

A new family adds its fixtures (`tests/oracles/vision.py`) and rows here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.encode.images import ImageProcessor, load_processor
from rlx_jax.encode.resample import Resizer, resize
from rlx_jax.io.folder import Folder
from tests.opening import load
from tests.oracles import checkpoints
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record
from tests.oracles.vision import RANDOM, VISION

NAMES = sorted(file.stem for file in VISION.glob("*.npz"))
QUICK = ("dinov2_registers", "dinov3")


@functools.cache
def vision(name: str) -> rlx.VisionEncoder:
    """A recorded checkpoint, loaded once."""
    loaded: rlx.VisionEncoder = load(VISION / name, head=False)
    return loaded


@functools.cache
def record(name: str) -> Mapping[str, npt.NDArray[Any]]:
    """Its numbers."""
    return load_record(VISION / name)


def cases(quick: tuple[str, ...] = QUICK) -> list[Any]:
    """Every recorded checkpoint; those that are not named are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", cases())
def test_hidden_states(name: str) -> None:
    """Of a batch, and its class tokens as vectors."""
    want = record(name)["hidden"]
    assert_close(vision(name).hidden_states(record(name)["pixels"]), want)
    assert_close(vision(name).embed(record(name)["pixels"]), want[:, 0])


@pytest.mark.parametrize("name", [case for case in cases() if "other_pixels" in record(case.values[0])])
def test_images_of_another_size(name: str) -> None:
    """Positions are resampled, as transformers does for square grids alone; what is no whole patch is not read."""
    assert_close(vision(name).hidden_states(record(name)["other_pixels"]), record(name)["other_hidden"])


TO_ORIGINAL = {
    "embeddings.patch_embeddings.projection.": "patch_embed.proj.", "embeddings.position_embeddings": "pos_embed",
    "embeddings.": "", "encoder.layer.": "blocks.", "attention.output.dense": "attn.proj",
    "layer_scale1.lambda1": "ls1.gamma", "layer_scale2.lambda1": "ls2.gamma", "layernorm.": "norm.",
}  # fmt: skip


def as_original(tensors: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Hugging Face's tensors under the names of DINOv2's authors, queries, keys and values in one."""
    found = {}
    for key, tensor in tensors.items():
        if ".attention.attention." in key:
            if ".query." in key:
                parts = [tensors[key.replace("query", part)] for part in ("query", "key", "value")]
                found[key.replace("attention.attention.query", "attn.qkv")] = np.concatenate(parts)
        else:
            found[key] = tensor
    for old, new in TO_ORIGINAL.items():
        found = {key.replace(old, new): tensor for key, tensor in found.items()}
    return found


@pytest.mark.slow
def test_the_layout_of_its_authors(tmp_path: Path) -> None:
    """Weights are read and written under their own keys, whole."""
    directory = checkpoints.copy(VISION / "dinov2", tmp_path / "dinov2")
    checkpoints.edit_tensors(directory, as_original)
    loaded = load(directory)
    assert_close(loaded.hidden_states(record("dinov2")["pixels"]), record("dinov2")["hidden"])
    keys = set(loaded.model.weights())
    assert {"blocks.1.attn.qkv.weight", "norm.bias", "pos_embed"} <= keys and not any("query" in key for key in keys)


PICTURES = ("dinov2", "dinov2_registers", "vit")


def pictures(name: str) -> list[npt.NDArray[np.uint8]]:
    """The recorded images."""
    return [record(name)[f"picture.{i}"] for i in range(3)]


@pytest.mark.parametrize("name", PICTURES)
def test_image_processors(name: str) -> None:
    """As transformers': to the last bit of the resized image, so to rounding of what follows; with torch by the name
    of a fast one. The other resizer gives another image."""
    processor = load_processor(Folder(VISION / name), "ViT" if name == "vit" else "Bit")
    keys = {"pillow": "pillow", "torch": "processed"}
    own: Resizer
    swapped: Resizer
    own, swapped = ("torch", "pillow") if name == "dinov2_registers" else ("pillow", "torch")
    assert processor is not None and processor.resizer == own
    other = dataclasses.replace(processor, resizer=swapped)
    together = processor(pictures(name))
    for i, picture in enumerate(pictures(name)):
        np.testing.assert_allclose(together[i], record(name)[f"{keys[own]}.{i}"], atol=2e-6)
        np.testing.assert_array_equal(processor(picture)[0], together[i])
        np.testing.assert_allclose(other(picture)[0], record(name)[f"{keys[swapped]}.{i}"], atol=2e-6)
    assert np.abs(other(pictures(name)) - together).max() > 1e-3


def test_embed_images() -> None:
    """Arrays in a list, one alone, a block of equal ones, more than go through at once: one vector each."""
    encoder = vision("dinov2")
    assert encoder.processor is not None
    want = np.asarray(encoder.hidden_states(encoder.processor(pictures("dinov2"))))[:, 0]
    got = encoder.embed(pictures("dinov2"))
    assert_close(got, want)
    one = encoder.embed(pictures("dinov2")[1])
    assert one.shape == (18,)
    assert_close(one, want[1], tolerance=1e-5)
    many = encoder.embed(pictures("dinov2") * 12)
    assert_close(many, np.concatenate([want] * 12), tolerance=1e-5)
    two = [pictures("dinov2")[0]] * 2
    np.testing.assert_array_equal(encoder.embed(np.stack(two)), encoder.embed(two))


class Picture:
    """What this package sees of one of Pillow's images, whose levels go from `low` to `high`."""

    def __init__(self, pixels: npt.NDArray[np.uint8], mode: str, low: float = 0, high: float = 255) -> None:
        self.pixels, self.mode, self.extrema, self.size = pixels, mode, (low, high), pixels.shape[1::-1]
        self.info = dict[str, str]()

    def getbands(self) -> tuple[str, ...]:
        return (self.mode,) if self.pixels.shape[-1] == 1 or self.mode[0] in "IF" else tuple(self.mode)

    def getextrema(self) -> tuple[float, float]:
        if self.mode not in ("I", "F", "I;16"):
            raise ValueError("image has wrong mode")  # as Pillow does
        return self.extrema

    def convert(self, mode: str) -> Picture:
        wide = (*self.pixels.shape[:2], 3)
        return Picture(np.broadcast_to(self.pixels[..., :1], wide).copy(), mode, *self.extrema)

    def __array__(self, *args: Any, **kwargs: Any) -> npt.NDArray[np.uint8]:
        return self.pixels


def test_colours() -> None:
    """Grey images have three channels, what is transparent stands on white, a picture is converted by itself."""
    rng, processor = np.random.default_rng(0), ImageProcessor(rescale=None)
    grey, clear = rng.integers(0, 256, (5, 4), dtype=np.uint8), rng.integers(0, 256, (5, 4, 4), dtype=np.uint8)
    for image in (grey, grey[..., None], Picture(grey[..., None], "L")):
        np.testing.assert_array_equal(processor(image)[0], np.stack([grey] * 3).astype(np.float32))
    alpha = clear[..., 3:] / 255
    want = np.round(clear[..., :3] * alpha + 255 * (1 - alpha)).transpose(2, 0, 1)
    np.testing.assert_array_equal(processor(clear)[0], want.astype(np.float32))
    with pytest.raises(errors.RequestError, match="images: 4 channels, expected 3"):
        ImageProcessor(convert_rgb=False)(clear)


PLAIN = np.zeros((6, 5, 3), np.uint8)


def test_pixel_values_of_no_picture() -> None:
    """What the image processor makes and what is constant has no warning; of no image there is no vector."""
    encoder = vision("dinov2")
    levels = np.tile(PLAIN.transpose(2, 0, 1)[None].astype(np.float32), (1, 1, 5, 6))
    levels[0, 0, 0, :2] = 0, 255
    with pytest.warns(errors.RlxNumericsWarning, match="pixel_values: 0 to 1.*uint8"):
        encoder.embed(levels / 255)
    assert encoder.processor is not None and encoder.processor.range == pytest.approx((-2.1179, 2.64), abs=1e-4)
    mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (encoder.processor.mean, encoder.processor.std))
    for pixels in ((levels / 255 - mean) / std, np.ones_like(levels)):
        encoder.embed(pixels.astype(np.float32))
    assert encoder.embed(np.zeros((0, 3, 30, 30), np.float32)).shape == (0, 18)
    assert encoder.embed([Picture(PLAIN, "I", 0, 255)]).shape == (1, 18)


def test_every_setting_shows(tmp_path: Path) -> None:
    """Each that is read changes the pixels; `processor_config.json` holds the same where the other file is not."""
    (picture,) = pictures("dinov2")[:1]
    file = tmp_path / "preprocessor_config.json"
    plain = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 12}, "crop_size": 8}

    def made(changes: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        file.write_text(json.dumps({**plain, **changes}), "utf-8")
        processor = load_processor(Folder(tmp_path), "Bit")
        assert processor is not None
        return processor(picture)[0]

    first = made({})
    changes: list[dict[str, Any]] = [
        {"do_resize": False}, {"size": {"height": 9, "width": 8}}, {"size": 13}, {"resample": 0}, {"resample": 1},
        {"resample": 2}, {"do_center_crop": False}, {"crop_size": {"height": 8, "width": 7}}, {"do_rescale": False},
        {"rescale_factor": 0.01}, {"do_normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}, {"image_std": 0.3},
        {"image_processor_type": "DINOv3ViTImageProcessor"},
    ]  # fmt: skip
    found = [made(change) for change in changes]
    for i, a in enumerate(found):
        assert a.shape != first.shape or np.abs(a - first).max() > 1e-3, changes[i]
        assert not any(a.shape == b.shape and np.array_equal(a, b) for b in found[:i]), changes[i]
    file.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": plain}), "utf-8")
    joint = load_processor(Folder(tmp_path), "Bit")
    assert joint is not None
    np.testing.assert_array_equal(joint(picture)[0], first)
    assert load_processor(Folder(VISION / "vit_classifier"), "ViT") is None


def test_flow_of_your_own() -> None:
    """A flow with an output `pooled` embeds."""

    def pooled(emit: Any, x: Any) -> Any:
        emit.output("pooled", x.mean(axis=1))
        return x

    rng = np.random.default_rng(0)
    weights = {"p.weight": rng.normal(size=(4, 3, 2, 2)).astype("f4"), "pos": rng.normal(size=(6, 4)).astype("f4")}
    flow = rlx.ModelFlow("own").input("pixels", ("batch", 3, "height", "width"))
    flow = flow.stage(blocks.VisionEmbed("p.weight", None, "pos", 4, (2, 2), (2, 3)))
    processor = ImageProcessor(size=(4, 6), rescale=1 / 100)
    encoder: Any = rlx.VisionEncoder(flow.custom(pooled), weights, processor=processor)
    picture = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    cut = picture.reshape(2, 2, 3, 2, 3).transpose(0, 2, 4, 1, 3).reshape(6, 12) / 100
    want = cut @ weights["p.weight"].reshape(4, 12).T + weights["pos"]
    assert_close(encoder.embed([picture])[0], want.mean(0).astype(np.float32))
    assert_close(encoder.hidden_states(encoder.processor([picture]))[0], want.astype(np.float32))


def test_few_programs() -> None:
    """Rows are padded to powers of two, or to the profile's buckets; `warmup` runs them all."""
    profile = rlx.CompileProfile().replace(buckets={"batch": [2], "on_recompile": "error"})
    encoder = load(VISION / "dinov2", profile=profile)
    encoder.warmup()
    assert_close(encoder.embed(pictures("dinov2")), np.asarray(vision("dinov2").embed(pictures("dinov2"))))
    assert encoder.report().recompiles == 0
    with pytest.raises(errors.RequestError, match="set buckets.batch in the profile"):
        vision("dinov2").warmup()


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("architecture", RANDOM)
def test_random_configurations(architecture: str, seed: int, tmp_path: Path) -> None:
    """Of the trained size and of another that is no square."""
    from tests.oracles import vision as oracle

    checkpoint = RANDOM[architecture](seed)
    oracle.write(checkpoint, tmp_path)
    model, encoder = oracle.load(tmp_path, checkpoint), load(tmp_path, head=False)
    side, patch, channels = (checkpoint.config[name] for name in ("image_size", "patch_size", "num_channels"))
    for height, width in ((side, side), (side + patch + 1, max(side - 2, patch))):
        pixels = oracle.pixel_values(seed, 2, channels, height, width)
        want = oracle.hidden_states(model, pixels, resample=height != side)
        assert_close(encoder.hidden_states(pixels), want)


LIVE: dict[str, dict[str, Any]] = {
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": 32},
    "clip oldest": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 24, "crop_size": 20, "resample": 3},
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 30, "width": 21}},
    "siglip fast": {
        "image_processor_type": "SiglipImageProcessorFast", "size": {"height": 30, "width": 21}, "resample": 2,
    },
    "vit": {"image_processor_type": "ViTImageProcessor", "size": 24, "resample": 1},
    "vit unscaled": {"image_processor_type": "ViTImageProcessorFast", "size": 24, "do_normalize": False},
    "bit padded": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 17}, "crop_size": 20},
    "deit": {"image_processor_type": "DeiTImageProcessor", "size": 24, "crop_size": 20},
    "beit": {"image_processor_type": "BeitImageProcessor", "size": {"height": 30, "width": 21}, "resample": 2},
    "nearest": {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 17}, "crop_size": 17, "resample": 0,
    },
}  # fmt: skip


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("ending", ["", "Fast", "Pil"])
@pytest.mark.parametrize("name", LIVE)
def test_live_image_processors(name: str, ending: str, tmp_path: Path) -> None:
    """As transformers has it, to rounding: by the name with Pillow, or with torch."""
    from tests.oracles import vision as oracle

    settings = dict(LIVE[name])
    if ending:
        kind = settings.pop("feature_extractor_type", "") or settings.pop("image_processor_type")
        kind = kind.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast") + ending
        settings["image_processor_type"] = kind
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")
    processor = load_processor(Folder(tmp_path), "ViT")
    fast = settings.get("image_processor_type", "").endswith("Fast")
    assert processor is not None and processor.resizer == ("torch" if fast else "pillow")
    found = [*oracle.images(5, (40, 61), (90, 23), (19, 19), (224, 150)), np.zeros((20, 31, 4), np.uint8)[..., :3]]
    for picture, want in zip(found, oracle.processed(tmp_path, found), strict=True):
        np.testing.assert_allclose(processor(picture)[0], want, atol=3e-6)


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("resample", [0, 2, 3])
def test_images_that_are_rescaled_first(resample: int, tmp_path: Path) -> None:
    """As DINOv3's: rescaled, resized by torch in floats, then normalised. transformers needs torchvision for it."""
    import torch

    from tests.oracles import vision as oracle

    settings = {"image_processor_type": "DINOv3ViTImageProcessorFast", "resample": resample, "size": 24}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")
    processor = load_processor(Folder(tmp_path), "DINOv3ViT")
    assert processor is not None
    mode = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}[resample]
    for picture in oracle.images(5, (40, 61), (19, 19), (224, 150)):
        pixels = torch.from_numpy(picture).permute(2, 0, 1)[None] * (1 / 255)
        resized = torch.nn.functional.interpolate(pixels, (24, 24), mode=mode, antialias=bool(resample))
        mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        np.testing.assert_allclose(processor(picture), ((resized - mean) / std).numpy(), atol=1e-5)


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("resample", [0, 1, 2, 3])
def test_torch_resizes_so(resample: int) -> None:
    """To the last grey level, noise too; Pillow is within two or three where a picture grows."""
    from tests.oracles import vision as oracle

    noise = np.random.default_rng(7).integers(0, 256, (31, 77, 3), dtype=np.uint8)
    for picture in (*oracle.images(6, (40, 61), (224, 150), (300, 480)), noise):
        for height, width in ((24, 37), (224, 224), (64, 20), (31, 90)):
            want = oracle.resized(picture, height, width, resample)
            np.testing.assert_array_equal(resize(picture, height, width, resample, "torch"), want)
