"""Tiny random vision checkpoints made by `transformers`, what it computes from them, and the record of that.

Run by hand, with the `oracle` extra and Pillow installed, from the root of the repository:

    python -m tests.oracles.vision [name …]

It writes `tests/fixtures/vision/<name>/`, a checkpoint directory as Hugging Face lays it out, and `<name>.npz`, the
numbers. torch and transformers are imported when a function needs them.
"""

import functools
import importlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles import checkpoints, hugging_face
from tests.oracles.hugging_face import Checkpoint

VISION = checkpoints.FIXTURES / "vision"
Floats = npt.NDArray[np.float32]


def sizes(hidden: int, heads: int, layers: int, image: int | list[int], patch: int) -> dict[str, Any]:
    """Sizes under the names of Hugging Face's configs."""
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "image_size", "patch_size")
    return dict(zip(names, (hidden, heads, layers, image, patch), strict=True))


CHECKPOINTS: dict[str, Checkpoint] = {
    # a position for each patch of 6 × 6, layer scale, an eps that shows
    "dinov2": Checkpoint("Dinov2Model", sizes(18, 3, 2, 30, 5) | {"layer_norm_eps": 1e-3, "mlp_ratio": 3}, seed=1),
    # SwiGLU, no biases of queries, keys and values
    "dinov2_swiglu": Checkpoint(
        "Dinov2Model", sizes(20, 5, 2, 12, 4) | {"use_swiglu_ffn": True, "qkv_bias": False}, seed=2, dtype="bfloat16"
    ),
    "dinov2_registers": Checkpoint(
        "Dinov2WithRegistersModel", sizes(18, 2, 2, 21, 3) | {"num_register_tokens": 3}, seed=3
    ),
    # rotation by row and column, a gated feed-forward part
    "dinov3": Checkpoint(
        "DINOv3ViTModel",
        sizes(16, 2, 2, 15, 5)
        | {"intermediate_size": 21, "num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"},
        seed=9,
    ),
    # images that are no squares, a prefix and a head
    "vit_classifier": Checkpoint(
        "ViTForImageClassification", sizes(18, 2, 2, [20, 30], 5) | {"intermediate_size": 31, "num_labels": 3}, seed=4
    ),
    "vit": Checkpoint("ViTModel", sizes(18, 6, 2, 20, 5) | {"intermediate_size": 29, "qkv_bias": False}, seed=5),
}


def towers(projection: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Both configs of a dual model; its tokenizer has ids up to 60."""
    texts = sizes(16, 2, 2, 0, 0) | {"vocab_size": 61, "intermediate_size": 27, "max_position_embeddings": 12}
    texts = {k: v for k, v in texts.items() if v} | {"bos_token_id": 1, "eos_token_id": 60, "pad_token_id": 0} | text
    images = sizes(18, 3, 2, 16, 4) | {"intermediate_size": 25} | vision
    return {"text_config": texts, "vision_config": images, **projection}


DUAL: dict[str, Checkpoint] = {
    "clip": Checkpoint("CLIPModel", towers({"projection_dim": 14}, {}, {"layer_norm_eps": 1e-3}), seed=6),
    # a config that says nothing ends a text, as the first ones did
    "clip_oldest": Checkpoint("CLIPModel", towers({"projection_dim": 9}, {"eos_token_id": 2}, {}), seed=7),
    "siglip": Checkpoint("SiglipModel", towers({}, {"projection_size": 18}, {}), seed=8),
}
TEXTS = ("w3 w17 w5", "w44", "w9 w9 w30 w12 w21 w2 w8", "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14")
"""The last one is longer than the models read."""


def write_tokenizer(directory: Path, name: str) -> None:
    """Words `w0` to `w56`, an id each. CLIP's texts stand between two ids of their own, SigLIP's have one behind."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(57)} | {"<eos>": 60}
    end = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    begin = [] if name == "siglip" else [{"SpecialToken": {"id": "<bos>", "type_id": 0}}]
    ids = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in ("<bos>", "<eos>")}
    file = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
        "added_tokens": [
            {"id": vocabulary[t], "content": t, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for t in ("<pad>", "<bos>", "<unk>", "<eos>")
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [*begin, {"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": ids,
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 12, "pad_token": "<pad>",
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>",
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(file) + "\n", "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


PROCESSORS: dict[str, dict[str, Any]] = {
    "dinov2": {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 34},
        "crop_size": {"height": 30, "width": 30},
        "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3,
        "rescale_factor": 0.00392156862745098,
    },
    "dinov2_registers": {
        "image_processor_type": "BitImageProcessorFast", "size": {"shortest_edge": 19}, "crop_size": 21,
    },
    "vit": {
        "feature_extractor_type": "ViTFeatureExtractor", "size": 20, "do_normalize": True, "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
    },
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16},
    "clip_oldest": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 18, "crop_size": 16, "resample": 3},
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}},
}  # fmt: skip
"""`preprocessor_config.json` as transformers 4 wrote it, in the new spelling and in the oldest."""


def images(seed: int, *shapes: tuple[int, int]) -> list[npt.NDArray[np.uint8]]:
    """Pictures with slopes, edges and noise."""
    rng, made = np.random.default_rng(seed), []
    for height, width in shapes:
        y, x = np.mgrid[:height, :width]
        waves = [np.sin(x / (3 + c) + y / (7 - c)) * 90 + 128 + (x > width // 2) * 40 for c in range(3)]
        noisy = np.stack(waves, axis=-1) + rng.normal(0, 20, (height, width, 3))
        made.append(np.clip(noisy, 0, 255).astype(np.uint8))
    return made


def write(checkpoint: Checkpoint, directory: Path, processor: dict[str, Any] | None = None) -> None:
    """A random model of this description, with an image processor."""
    hugging_face.write(checkpoint, directory)
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", "utf-8")


def pixel_values(seed: int, *shape: int) -> Floats:
    """Random ones."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def load(directory: Path, checkpoint: Checkpoint) -> Any:
    """The model without its head, as transformers reads it: float32, eager attention."""
    torch, transformers = hugging_face.modules()
    cls = getattr(transformers, checkpoint.architecture)
    model = cls.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    return getattr(model, "vit", getattr(model, "dinov2", model))


def hidden_states(model: Any, pixels: Floats, resample: bool = False) -> Floats:
    """The last hidden states. With `resample` images are not of the model's size, which DINOv2 need not be told."""
    torch, _ = hugging_face.modules()
    told = {"interpolate_pos_encoding": True} if resample and "DINO" not in type(model).__name__.upper() else {}
    with torch.no_grad():
        out = model(torch.from_numpy(pixels), **told)
    found: Floats = out.last_hidden_state.numpy()
    return found


def processed(directory: Path, pictures: list[Any], pillow: bool | None = None) -> list[Floats]:
    """What transformers' image processor makes of pictures: with Pillow, or, as it does where torchvision is installed,
    with torch's resampling, and a crop that stands between zeros as torchvision's does. None: torch's where the name of
    the processor ends in Fast."""
    _, transformers = hugging_face.modules()
    if pillow is None:
        about = json.loads((directory / "preprocessor_config.json").read_text("utf-8"))
        pillow = not about.get("image_processor_type", "").endswith("Fast")
    utils = importlib.import_module("transformers.image_processing_backends")
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")

    def resize(image: Any, size: Any, resample: int, **_: Any) -> Any:
        sides = (size.height, size.width)
        if size.shortest_edge:
            first = utils.ChannelDimension.FIRST
            sides = utils.get_resize_output_image_size(
                image, size=size.shortest_edge, default_to_square=False, input_data_format=first
            )
        return resized(image.transpose(1, 2, 0), *sides, resample).transpose(2, 0, 1)

    def crop(image: Any, size: Any, **_: Any) -> Any:
        lacks = [max(new - old, 0) for old, new in zip(image.shape[1:], (size.height, size.width), strict=True)]
        image = np.pad(image, ((0, 0), *((n // 2, (n + 1) // 2) for n in lacks)))
        top, left = (int((old - new) / 2) for old, new in zip(image.shape[1:], (size.height, size.width), strict=True))
        return image[:, top : top + size.height, left : left + size.width]

    if not pillow:
        processor.resize, processor.center_crop = resize, crop
    return [np.asarray(processor(picture, return_tensors="np")["pixel_values"][0]) for picture in pictures]


def resized(picture: npt.NDArray[np.uint8], height: int, width: int, resample: int) -> npt.NDArray[np.uint8]:
    """What torchvision makes of a picture: torch's own resampling of uint8."""
    torch, _ = hugging_face.modules()
    mode = {0: "nearest-exact", 1: "lanczos", 2: "bilinear", 3: "bicubic"}[resample]
    pixels = torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1)))[None]
    out = torch.nn.functional.interpolate(pixels, (height, width), mode=mode, antialias=bool(resample))
    found: npt.NDArray[np.uint8] = out[0].permute(1, 2, 0).numpy()
    return found


def record(name: str) -> None:
    """Write one checkpoint and its numbers."""
    checkpoint, directory = CHECKPOINTS[name], VISION / name
    shutil.rmtree(directory, ignore_errors=True)
    write(checkpoint, directory, PROCESSORS.get(name))
    model, side = load(directory, checkpoint), checkpoint.config["image_size"]
    height, width = side if isinstance(side, list) else (side, side)
    found: dict[str, Any] = {"pixels": pixel_values(1, 2, 3, height, width)}
    if height == width:  # transformers takes every grid for a square where it interpolates
        found["other_pixels"] = pixel_values(2, 2, 3, height + 7, width // 2 + 3)
        found["other_hidden"] = hidden_states(model, found["other_pixels"], resample=True)
    found["hidden"] = hidden_states(model, found["pixels"])
    if name in PROCESSORS:
        pictures = images(3, (37, 53), (64, 41), (18, 25))
        found |= {f"picture.{i}": picture for i, picture in enumerate(pictures)}
        found |= {f"processed.{i}": p for i, p in enumerate(processed(directory, pictures, pillow=False))}
        found |= {f"pillow.{i}": p for i, p in enumerate(processed(directory, pictures, pillow=True))}
    np.savez_compressed(VISION / f"{name}.npz", **found)


def record_dual(name: str) -> None:
    """Write one model of two towers and its numbers."""
    checkpoint, directory = DUAL[name], VISION / "dual" / name
    shutil.rmtree(directory, ignore_errors=True)
    write(checkpoint, directory, PROCESSORS[name])
    write_tokenizer(directory, name)
    pictures = images(4, (21, 30), (40, 17))
    found: dict[str, Any] = {f"picture.{i}": picture for i, picture in enumerate(pictures)}
    found |= compared(directory, checkpoint, list(TEXTS), pictures)
    np.savez_compressed(directory.with_suffix(".npz"), **found)


def tower_and_ids(directory: Path, checkpoint: Checkpoint, texts: list[str]) -> tuple[Any, dict[str, Any]]:
    """A model that reads texts, and what its tokenizer makes of them: of SigLIP ids that are padded to the end."""
    torch, transformers = hugging_face.modules()
    cls = getattr(transformers, checkpoint.architecture)
    model = cls.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    fixed = checkpoint.architecture.startswith("Siglip")
    asked = tokenizer(texts, return_tensors="pt", padding="max_length" if fixed else True, truncation=True)
    return model, {k: v for k, v in asked.items() if k == "input_ids" or (k == "attention_mask" and not fixed)}


def embedded(directory: Path, checkpoint: Checkpoint, texts: list[str]) -> dict[str, Floats]:
    """Vectors and hidden states of a text tower alone, its ids and its mask."""
    torch, _ = hugging_face.modules()
    model, asked = tower_and_ids(directory, checkpoint, texts)
    with torch.no_grad():
        out = model(**asked)
    words = out.text_embeds if hasattr(out, "text_embeds") else out.pooler_output
    found = {"texts": words, "hidden": out.last_hidden_state, "ids": asked["input_ids"]}
    found |= {"mask": asked["attention_mask"]} if "attention_mask" in asked else {}
    return {name: value.numpy() for name, value in found.items()}


def compared(directory: Path, checkpoint: Checkpoint, texts: list[str], pictures: list[Any]) -> dict[str, Floats]:
    """Vectors before they are divided by their lengths, hidden states of both towers, and logits of each text."""
    torch, _ = hugging_face.modules()
    model, asked = tower_and_ids(directory, checkpoint, texts)
    pixels = torch.from_numpy(np.stack(processed(directory, pictures)))
    with torch.no_grad():
        out = model(pixel_values=pixels, **asked)
        words = model.get_text_features(**asked).pooler_output
        seen = model.get_image_features(pixel_values=pixels).pooler_output
    found = {
        "pixels": pixels, "ids": asked["input_ids"], "texts": words, "images": seen, "logits": out.logits_per_text,
        "text_embeds": out.text_embeds, "image_embeds": out.image_embeds,
        "hidden": out.vision_model_output.last_hidden_state,
    }  # fmt: skip
    return {name: value.numpy() for name, value in found.items()}


def random_vision(architecture: str, seed: int) -> Checkpoint:
    """A configuration drawn from `seed`."""
    draw = random.Random(seed)
    heads, patch = draw.choice([1, 2, 3, 5]), draw.randint(2, 6)
    config = sizes(heads * draw.randint(3, 9), heads, draw.randint(1, 3), patch * draw.randint(2, 5), patch)
    config |= {"layer_norm_eps": draw.choice([1e-6, 1e-3]), "qkv_bias": draw.random() < 0.7}
    config |= {"hidden_act": draw.choice(["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"])}
    config["num_channels"] = draw.choice([1, 3, 4])
    if architecture.startswith("DINOv3"):
        config["hidden_size"] = heads * draw.choice([4, 8, 12])
        config |= {"num_register_tokens": draw.randint(0, 5), "intermediate_size": draw.randint(10, 60)}
        config |= {"rope_theta": draw.choice([30.0, 100.0]), "key_bias": draw.random() < 0.5}
        config |= {"use_gated_mlp": True, "hidden_act": "silu"} if draw.random() < 0.5 else {}
        config.pop("qkv_bias")
    elif architecture.startswith("Dinov2"):
        config |= {"mlp_ratio": draw.randint(1, 4), "use_swiglu_ffn": draw.random() < 0.5}
    else:
        config |= {"intermediate_size": draw.randint(10, 60)}
    if "Registers" in architecture:
        config |= {"num_register_tokens": draw.randint(0, 5)}
    storage = hugging_face.random_storage(draw)
    return replace(Checkpoint(architecture, config, seed=seed, **storage), spelling="v5")


def random_tower(draw: random.Random) -> dict[str, Any]:
    """The sizes of a tower."""
    heads = draw.choice([1, 2, 3])
    config: dict[str, Any] = {"hidden_size": heads * draw.randint(4, 9), "num_attention_heads": heads}
    config |= {"num_hidden_layers": draw.randint(1, 3), "intermediate_size": draw.randint(10, 40)}
    config |= {"layer_norm_eps": draw.choice([1e-6, 1e-3])}
    return config | {"hidden_act": draw.choice(["quick_gelu", "gelu", "gelu_pytorch_tanh"])}


def random_text(architecture: str, seed: int) -> Checkpoint:
    """A text tower drawn from `seed`."""
    draw = random.Random(seed)
    config = towers({}, random_tower(draw), {})["text_config"]
    siglip = architecture.startswith("Siglip")
    width = {"projection_size" if siglip else "projection_dim": draw.randint(5, 20)}
    config |= width | ({} if siglip else {"eos_token_id": draw.choice([2, 60])})
    return Checkpoint(architecture, config, seed=seed, dtype=draw.choice(["float32", "bfloat16"]))


def random_dual(architecture: str, seed: int) -> Checkpoint:
    """A model of two towers drawn from `seed`."""
    draw = random.Random(seed)
    patch = draw.randint(2, 5)
    vision = random_tower(draw) | {"image_size": patch * draw.randint(2, 4), "patch_size": patch}
    siglip = architecture == "SiglipModel"
    text = {"projection_size": vision["hidden_size"]} if siglip else {"eos_token_id": draw.choice([2, 60])}
    config = towers({} if siglip else {"projection_dim": draw.randint(5, 20)}, random_tower(draw) | text, vision)
    return Checkpoint(architecture, config, seed=seed, dtype=draw.choice(["float32", "bfloat16"]))


RANDOM: dict[str, Callable[[int], Checkpoint]] = {
    name: functools.partial(random_vision, name)
    for name in (
        "ViTModel", "ViTForImageClassification", "Dinov2Model", "Dinov2ForImageClassification",
        "Dinov2WithRegistersModel", "DeiTModel", "IJepaModel", "ViTMSNModel", "DINOv3ViTModel",
    )
}  # fmt: skip
"""Configurations by architecture."""


if __name__ == "__main__":
    (VISION / "dual").mkdir(parents=True, exist_ok=True)
    for chosen in sys.argv[1:] or [*CHECKPOINTS, *DUAL]:
        (record if chosen in CHECKPOINTS else record_dual)(chosen)
