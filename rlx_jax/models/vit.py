"""Define the config and recipe of ViT (Dosovitskiy et al. 2020), with Hugging Face's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlx_jax.blocks.vision import VIT_KEYS
from rlx_jax.models.config import Fields, tower_fields
from rlx_jax.models.vision import VisionConfig, VisionFlow, VisionLayout, image_fields

LAYER, PROJECTIONS = "encoder.layer.{}", ("query", "key", "value")
HF = VisionLayout(
    patch="embeddings.patch_embeddings.projection",
    position="embeddings.position_embeddings",
    layers=LAYER,
    keys=VIT_KEYS,
    cls="embeddings.cls_token",
    after="layernorm",
    unread_keys=("embeddings.mask_token", "pooler."),
    head_prefixes=("classifier.", "decoder."),
)


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """Sizes of a ViT. Its tanh pooler is not built."""

    inert: ClassVar[tuple[str, ...]] = ("encoder_stride", "pooler_act", "pooler_output_size")

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(
            **tower_fields(c, eps=1e-12),
            **image_fields(c),
            intermediate_size=c.integer("intermediate_size", 3072),
            qkv_bias=c.flag("qkv_bias", True),
        )


@dataclass(frozen=True)
class ViTFlow(VisionFlow[ViTConfig]):
    """The recipe of ViT: see `VisionFlow`. `pooled` is the class token after the last norm, before any pooler."""

    layout: VisionLayout = HF
    name: str = "vit"

    config_type = ViTConfig
    prefixes = ("", "vit.")
    peft_names = (
        *((f"{LAYER}.attention.attention.{name}", f"layers.{{}}.attention.{name[0]}_proj") for name in PROJECTIONS),
        (f"{LAYER}.attention.output.dense", "layers.{}.attention.o_proj"),
        (f"{LAYER}.intermediate.dense", "layers.{}.mlp.fc1"),
        (f"{LAYER}.output.dense", "layers.{}.mlp.fc2"),
    )
    layouts = (HF,)
