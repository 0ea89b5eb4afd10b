"""Define the config and recipe of DINOv3's vision transformer (Siméoni et al. 2025), with Hugging Face's keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from rlx_jax.blocks import BlockStage, LayerKeys, PreNormLayerSpec
from rlx_jax.blocks.vision import grid_rope_tables
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.models.config import Fields
from rlx_jax.models.vision import VisionConfig, VisionFlow, VisionLayout
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import frequencies

LAYOUT = VisionLayout(
    patch="embeddings.patch_embeddings",
    position="",
    layers="layer.{}",
    keys=LayerKeys(
        "norm1", "norm2", ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj",
        "mlp.up_proj", "mlp.down_proj", "layer_scale1.lambda1", "layer_scale2.lambda1",
        ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj",
    ),
    cls="embeddings.cls_token",
    registers="embeddings.register_tokens",
    after="norm",
    unread_keys=("embeddings.mask_token",),
)  # fmt: skip


@dataclass(frozen=True)
class Dinov3Config(VisionConfig):
    """Sizes of a DINOv3 model; its positions are a rotation with the base `rope_theta`."""

    rope_theta: float = 100.0

    defaults = {"hidden": 384, "heads": 6, "eps": 1e-5}
    fields = {"gated": "use_gated_mlp", "rope_theta": "rope_theta"}
    inert = (
        "apply_layernorm", "layerscale_value", "out_features", "out_indices", "pos_embed_jitter", "pos_embed_rescale",
        "pos_embed_shift", "reshape_hidden_states", "stage_names",
    )  # fmt: skip
    neutral = {"mlp_bias": (True,), "proj_bias": (True,)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        result = cls(
            **cls.common_fields(c),
            qkv_bias=(c.flag("query_bias", True), c.flag("key_bias", False), c.flag("value_bias", True)),
            registers=c.integer("num_register_tokens", 0, low=0, high=2**10),
        )
        if result.hidden_size // result.num_attention_heads % 4:
            raise ConfigError(
                f"{c.where}: hidden_size {result.hidden_size} over num_attention_heads {result.num_attention_heads} is "
                "no multiple of 4, as the rotation by row and column needs"
            )
        if result.gated and result.activation != "silu":
            raise UnsupportedError(
                f"{c.where}: field 'hidden_act' is {quote(c.raw('hidden_act'))}; with use_gated_mlp supported is silu"
            )
        return result


@dataclass(frozen=True)
class GridRope:
    """Write the rope tables of the patches of the input `pixel_values` for the stages that follow.

    The tokens before the patches are not rotated. The active value is unchanged.
    """

    patch: tuple[int, int]
    head_dim: int
    theta: float
    num_prefix_tokens: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        freqs = tuple(2 * math.pi * f for f in frequencies(self.head_dim // 2, self.theta))
        with emit.scope("rope_embeddings"):
            images = emit.flow_input("pixel_values")
            tables = grid_rope_tables(emit, images, self.patch, freqs, self.num_prefix_tokens)
            emit.state.rope_cos, emit.state.rope_sin = tables
        return value


@dataclass(frozen=True)
class Dinov3Flow(VisionFlow[Dinov3Config]):
    """The recipe of DINOv3: see `VisionFlow`. `pooled` is the class token after the last norm."""

    layout: VisionLayout = LAYOUT
    name: str = "dinov3"

    config_type = Dinov3Config
    layouts = (LAYOUT,)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        rope = GridRope(c.patch_size, c.hidden_size // c.num_attention_heads, c.rope_theta, 1 + c.registers)
        return *super().embedding_stages(), rope

    def spec(self, index: int) -> PreNormLayerSpec:
        return replace(super().spec(index), use_rope=True, rope_style="half")
