"""Define the config and recipe of DINOv2, with and without registers, with Hugging Face's keys or the authors'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import BlockStage, LayerKeys
from rlx_jax.blocks.vision import DINOV2_KEYS, HF_QKV
from rlx_jax.models.config import Fields, tower_fields
from rlx_jax.models.vision import PatchMean, VisionConfig, VisionFlow, VisionLayout, image_fields
from rlx_jax.models.vit import LAYER, PROJECTIONS

HF_KEYS = LayerKeys(
    "norm1", "norm2", HF_QKV, "attention.output.dense", "mlp.fc1", "mlp.fc2",
    "layer_scale1.lambda1", "layer_scale2.lambda1", "mlp.weights_in", "mlp.weights_out",
)  # fmt: skip
HF = VisionLayout(
    patch="embeddings.patch_embeddings.projection",
    position="embeddings.position_embeddings",
    layers=LAYER,
    keys=HF_KEYS,
    cls="embeddings.cls_token",
    registers="embeddings.register_tokens",
    after="layernorm",
    unread_keys=("embeddings.mask_token",),
    head_prefixes=("classifier.",),
)
ORIGINAL = VisionLayout(
    patch="patch_embed.proj",
    position="pos_embed",
    layers="blocks.{}",
    keys=DINOV2_KEYS,
    cls="cls_token",
    registers="register_tokens",
    after="norm",
    unread_keys=("mask_token",),
    head_prefixes=("head.",),
)


@dataclass(frozen=True)
class Dinov2Config(VisionConfig):
    """Sizes of a DINOv2 model."""

    inert = (
        "apply_layernorm", "intermediate_size", "layerscale_value", "out_features", "out_indices",
        "reshape_hidden_states", "stage_names", "use_mask_token",
    )  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        with_registers = c.text("model_type", "dinov2") == "dinov2_with_registers"
        tower, swiglu = tower_fields(c), c.flag("use_swiglu_ffn", False)
        width = int(tower["hidden_size"] * c.real("mlp_ratio", 4))
        return cls(
            **tower,
            **image_fields(c, patch=16 if with_registers else 14),
            # As in the reference: SwiGLU has two thirds of the width, rounded up to a multiple of 8.
            intermediate_size=(int(width * 2 / 3) + 7) // 8 * 8 if swiglu else width,
            qkv_bias=c.flag("qkv_bias", True),
            gated=swiglu,
            registers=c.integer("num_register_tokens", 4, low=0, high=2**10) if with_registers else 0,
            antialias=with_registers,
        )


@dataclass(frozen=True)
class Dinov2Flow(VisionFlow[Dinov2Config]):
    """The recipe of DINOv2: see `VisionFlow`. `pooled` is the class token after the last norm.

    A head reads the class token and the mean of the patches.
    """

    layout: VisionLayout = HF
    name: str = "dinov2"

    config_type = Dinov2Config
    prefixes = ("", "dinov2.", "dinov2_with_registers.")
    peft_names = (
        *((f"{LAYER}.attention.attention.{name}", f"{LAYER}.attention.{name[0]}_proj") for name in PROJECTIONS),
        (f"{LAYER}.attention.output.dense", f"{LAYER}.attention.o_proj"),
    )
    layouts = (HF, ORIGINAL)

    def head_input(self) -> tuple[BlockStage, int]:
        return PatchMean(1 + self.config.registers, cls=True), 2 * self.config.hidden_size
