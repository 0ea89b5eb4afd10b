"""Tiny classifiers of images, and what transformers computes from them.

`python -m tests.oracles.image_classifiers` writes tests/fixtures/image_classifiers.zip: for each of `RECORDED` a
checkpoint with an image processor, and `recorded.json` with the logits of `PIXELS` and of the pictures of
`vision.images(4, …)`. torch and transformers are imported when needed.
"""

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, hugging_face, vision

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "image_classifiers.zip"
PIXELS = vision.pixel_values(0, 3, 3, 12, 12)
PICTURES = ((37, 53), (18, 25))

TOWER: dict[str, Any] = vision.sizes(18, 3, 2, 12, 4) | {"intermediate_size": 25}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "vocab_size": 61}
BOTH = {"vision_config": TOWER, "text_config": TEXT}
MULTI = {"problem_type": "multi_label_classification"}
NAMES = {"id2label": {0: "cat", 1: "dog", 2: "owl"}}
DINOV2 = {k: v for k, v in TOWER.items() if k != "intermediate_size"} | {"mlp_ratio": 2}

BEIT_SHARED = {
    "use_shared_relative_position_bias": True, "use_absolute_position_embeddings": True, "use_mean_pooling": False,
    "layer_scale_init_value": 0.0,
}  # fmt: skip

CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "vit": ("ViTForImageClassification", TOWER | NAMES | {"qkv_bias": False}),
    "dinov2": ("Dinov2ForImageClassification", DINOV2 | MULTI | {"num_labels": 4}),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", DINOV2 | {"num_register_tokens": 2}),
    "deit": ("DeiTForImageClassification", TOWER | {"num_labels": 3}),
    "deit_teacher": ("DeiTForImageClassificationWithTeacher", TOWER | {"num_labels": 3, "image_size": [12, 12]}),
    "ijepa": ("IJepaForImageClassification", TOWER | {"num_labels": 3}),
    "vit_msn": ("ViTMSNForImageClassification", TOWER),
    "beit": ("BeitForImageClassification", TOWER | {"use_relative_position_bias": True}),
    "beit_shared": ("BeitForImageClassification", TOWER | BEIT_SHARED),
    "data2vec": ("Data2VecVisionForImageClassification", TOWER | {"use_relative_position_bias": True, "num_labels": 3}),
    "metaclip_2": ("MetaClip2ForImageClassification", BOTH | {"num_labels": 3}),
    "clip": ("CLIPForImageClassification", BOTH | {"num_labels": 5}),
    "siglip": ("SiglipForImageClassification", BOTH | {"num_labels": 1, "problem_type": "regression"}),
}
"""A tiny config for each class of transformers that classifies images and is built."""

ENCODERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "dinov3": ("DINOv3ViTModel", TOWER | {"hidden_size": 24, "num_register_tokens": 2}),
    "dinov3_gated": ("DINOv3ViTModel", TOWER | {"hidden_size": 24, "use_gated_mlp": True, "hidden_act": "silu"}),
}
"""Encoders without a class that classifies."""

PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}}
}
RECORDED = ("vit", "dinov2", "deit_teacher", "beit")


def write(name: str, directory: Path) -> Any:
    """Write a checkpoint of `CASES` or `ENCODERS`, with an image processor if it has one; its model."""
    architecture, fields = (CASES | ENCODERS)[name]
    checkpoint = hugging_face.Checkpoint(architecture, dict(fields), seed=5)
    vision.write(checkpoint, directory, PROCESSORS.get(name))
    return load(directory)


def load(directory: Path) -> Any:
    """The model of a directory."""
    transformers = importlib.import_module("transformers")
    (architecture,) = json.loads((directory / "config.json").read_text("utf-8"))["architectures"]
    return getattr(transformers, architecture).from_pretrained(directory).eval()


def logits(model: Any, pixels: np.ndarray[Any, Any], **options: Any) -> np.ndarray[Any, Any]:
    """The logits of pixel values; of an encoder its hidden states."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        out = model(torch.from_numpy(pixels), **options)
    found: np.ndarray[Any, Any] = (out.logits if "logits" in out else out.last_hidden_state).numpy()
    return found


def main() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as root:
        for name in RECORDED:
            model, record = write(name, Path(root, name)), {}
            record["pixels"] = logits(model, PIXELS).tolist()
            if name in PROCESSORS:
                processed = vision.processed(Path(root, name), vision.images(4, *PICTURES))
                record["pictures"] = logits(model, np.stack(processed)).tolist()
            Path(root, name, "recorded.json").write_text(json.dumps(record), "utf-8")
        checkpoints.write_archive(ARCHIVE, Path(root))


if __name__ == "__main__":
    main()
