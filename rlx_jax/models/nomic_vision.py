"""Define the config and recipe of Nomic's vision encoder (`NomicVisionModel`).

Its vectors are in the same space as nomic-embed-text's.
"""

from __future__ import annotations

from typing import Self

from rlx_jax.blocks import BlockStage, Custom, NomicSelector, PatchRope, PreNormLayerSpec
from rlx_jax.blocks.pooling import normalize_rows
from rlx_jax.blocks.vision import NOMIC_KEYS
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError
from rlx_jax.models import nomic
from rlx_jax.models.config import MAX_LAYERS, Fields, width_and_heads
from rlx_jax.models.vision import VisionConfig, VisionFlow, VisionLayout, image_fields
from rlx_jax.trace.emit import Emit, FlowValue

# Epsilon of the norm inside the feed-forward block: PyTorch's default, regardless of the config.
INNER_EPS = 1e-5

# The feed-forward width is rounded up to a multiple of this.
INNER_STEP = 256

LAYOUT = VisionLayout(
    patch="embeddings.proj",
    position="embeddings.pos_embed",
    layers="layers.{}",
    keys=NOMIC_KEYS,
    cls="embeddings.cls_token",
    flat_patch=True,
)


@dataclass(frozen=True)
class NomicVisionConfig(VisionConfig):
    """Sizes of Nomic's vision encoder.

    Attributes:
        use_rotary: rotate queries and keys by the row and column of their patch.
        reference_grid: rows and columns of the grid that patch positions are scaled to for the rotation, or None.
    """

    use_rotary: bool = True
    reference_grid: tuple[int, int] | None = None

    inert = (
        *nomic.INERT, "eva_qkv_bias", "hidden_features_scaling_factor", "layer_scale_init",
        "mask_token", "n_positions", "pad_vocab_size_multiple", "patch_dropout", "reorder_and_upcast_attn",
        "rotary_emb_base", "rotary_emb_interleaved", "type_vocab_size", "vocab_size",
    )  # fmt: skip
    neutral = {
        **nomic.NEUTRAL,
        **dict.fromkeys(
            """
            layer_scale learned_pos_embedding no_cls_token no_embed_class prepre_layernom sinusoidal_pos_embedding
            """.split(),
            (False,),
        ),
        **dict.fromkeys(
            """
            mlp_fc1_bias mlp_fc2_bias no_last_ln norm_mlp patch_embed_bias prenorm qkv_proj_bias use_pos_embed
            """.split(),
            (True,),
        ),
        "activation_function": ("swiglu",),
        "register_tokens": (0,),
        "rotary_emb_fraction": (0, 0.0),
    }

    @classmethod
    def read(cls, c: Fields) -> Self:
        hidden, heads = width_and_heads(c, names=("n_embd", "n_head"))
        is_rotary = c.flag("use_rotary_pos_emb", False)
        if is_rotary and hidden // heads % 4:
            raise ConfigError(
                f"{c.where}: n_embd {hidden} over n_head {heads} is {hidden // heads}; rotation by row and "
                "column needs a multiple of 4"
            )
        return cls(
            hidden_size=hidden,
            intermediate_size=-(-int(c.real("n_inner")) // INNER_STEP) * INNER_STEP,
            num_hidden_layers=c.integer("n_layer", 12, high=MAX_LAYERS),
            num_attention_heads=heads,
            layer_norm_eps=c.real("layer_norm_epsilon"),
            activation="silu",
            **image_fields(c, name="img_size"),
            use_rotary=is_rotary,
            reference_grid=None if c.raw("ref_feat_shape") is None else c.pair("ref_feat_shape"),
        )


@dataclass(frozen=True)
class NomicVisionFlow(VisionFlow[NomicVisionConfig]):
    """The recipe of Nomic's vision encoder: see `VisionFlow`. `pooled` is the first token, with unit length.

    Images have the size in the config: the reference supports no other.
    """

    layout: VisionLayout = LAYOUT
    name = "nomic_vision"

    @property
    def sides(self) -> tuple[int | str, int | str]:
        return self.config.image_size

    def spec(self, index: int) -> PreNormLayerSpec:
        return replace(super().spec(index), use_rope=self.config.use_rotary, inner_eps=INNER_EPS)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        if not c.use_rotary:
            return super().embedding_stages()
        rope = PatchRope(c.grid, c.hidden_size // c.num_attention_heads, reference=c.reference_grid)
        return *super().embedding_stages(), rope

    def final_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        return (NomicSelector(self.key("selector"), c.num_attention_heads, c.layer_norm_eps, c.intermediate_size),)

    def pool(self) -> BlockStage:
        return Custom(unit_first, "pooled")


def unit_first(emit: Emit, x: FlowValue) -> FlowValue:
    """Return the first token of each row, divided by its length."""
    return normalize_rows(emit, emit.first_token(x))
