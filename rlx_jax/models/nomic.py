"""Define the configs and recipes of Nomic's encoders.

NomicBERT (`NomicBertModel`) has rotary positions, and a gated MLP or experts. Vectors of the vision encoder
(`NomicVisionModel`) are in the same space as nomic-embed-text's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from rlx_jax import blocks
from rlx_jax.blocks.encoder import NOMIC_KEYS
from rlx_jax.blocks.pooling import normalize_rows
from rlx_jax.blocks.vision import NOMIC_KEYS as VISION_KEYS
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import ConfigError, UnsupportedError, shown
from rlx_jax.models.bert import ALL_INPUTS, BertConfig, BertLike
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, Fields, width_and_heads
from rlx_jax.models.decoder_config import even_head_dim, frequencies_of
from rlx_jax.models.encoder import BERT_HEADS, MASKED, masked_head
from rlx_jax.models.vision import VisionConfig, VisionFlow, VisionLayout, image_fields
from rlx_jax.trace.emit import Emit, FlowValue

# Fields of the first implementation that do not change the results. (`max_trained_positions` only matters for a scaled
# rope, which is refused.)
INERT = (
    "add_pooling_layer", "dense_seq_output", "last_layer_subset", "max_trained_positions", "moe_impl",
    "moe_resid_pdrop", "pad_vocab_to_multiple_of", "tie_word_embeddings",
)  # fmt: skip

# Tensors of the experts in a layer: router, up, down, bias.
EXPERT_KEYS = ("mlp.router.layer.weight", "mlp.experts.mlp.w1", "mlp.experts.mlp.w2", "mlp.experts.bias")

# Fields of the first spelling with their supported values. Text encoders of the family have these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """
        causal expert_choice_router moe_normalize_expert_weights parallel_block parallel_block_tied_norm prenorm
        reorder_and_upcast_attn rotary_emb_interleaved scale_attn_by_inverse_layer_idx use_rms_norm
        """.split(),
        (False,),
    ),
    "ffn_div": (1,),
    "moe_every_n_layers": (0,),
    "num_shared_experts": (0,),
    "rotary_emb_fraction": (1, 1.0),
    "scale_attn_weights": (True,),
}


@dataclass(frozen=True)
class NomicConfig(BertConfig):
    """Sizes of a NomicBERT model, with the field names of transformers 5.

    Attributes:
        head_dim: width of a head.
        gated: the MLP has a gate.
        biases: whether the projections of attention have biases, the ones into the MLP, and the one out of it.
        experts: number of experts in each layer i with i % `expert_stride` = 1; 0 without experts.
        top_k: number of experts per token.
    """

    max_position_embeddings: int = 2048
    activation: str = "silu"
    head_dim: int = field(kw_only=True)
    gated: bool = True
    biases: tuple[bool, bool, bool] = (False, False, False)
    experts: int = 0
    expert_stride: int = 1
    top_k: int = 1

    defaults = {"vocab": 30528, "positions": 2048, "activation": "silu"}
    inert: ClassVar[tuple[str, ...]] = INERT
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    @classmethod
    def read(cls, c: Fields) -> Self:
        """Return the config from the spelling of the first checkpoints (`n_embd` …) or of transformers 5."""
        if "n_embd" in c.values:
            return cls._from_original_names(c)
        sizes = {**cls.common_fields(c), "head_dim": c.integer_or_null("head_dim", None, high=2**16)}
        sizes["head_dim"] = even_head_dim(c, sizes)
        rope = frequencies_of(c, c.group("rope_parameters"), None, sizes["head_dim"], default=1000.0)
        return cls(**sizes, inv_freq=rope.inv_freq)

    @classmethod
    def _from_original_names(cls, c: Fields) -> Self:
        """Return the config from the spelling of the first checkpoints, which round the vocabulary up."""
        hidden, heads = width_and_heads(c, names=("n_embd", "n_head"))
        head_dim = even_head_dim(c, {"head_dim": hidden // heads})
        vocabulary, rows = c.integer("vocab_size", high=MAX_VOCABULARY), c.integer("pad_vocab_size_multiple", 1)
        gated = c.choice("activation_function", "swiglu", {"swiglu": "silu", "gelu": "gelu"}) == "silu"
        q, up, down = (c.flag(name, False) for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"))
        return cls(
            vocab_size=-(-vocabulary // rows) * rows,
            hidden_size=hidden,
            intermediate_size=c.integer_or_null("n_inner", None) or 4 * hidden,
            num_hidden_layers=c.integer("n_layer", high=MAX_LAYERS),
            num_attention_heads=heads,
            head_dim=head_dim,
            inv_freq=frequencies_of(c, None, None, head_dim, "rotary_emb_base", None).inv_freq,
            max_position_embeddings=c.integer("n_positions", high=2**31 - 1),
            type_vocab_size=c.integer("type_vocab_size", 2),
            layer_norm_eps=c.real("layer_norm_epsilon"),
            activation="silu" if gated else "gelu",
            gated=gated,
            biases=(q, up, down),
            **_experts(c, gated),
        )


def _experts(c: Fields, gated: bool) -> dict[str, int]:
    """Return the fields of the experts, which a config with `moe_every_n_layers` has.

    Raises:
        UnsupportedError: gated experts. ConfigError: more experts per token than experts.
    """
    stride = c.raw("moe_every_n_layers")
    if not stride:
        c.consumed.update(("num_experts", "moe_top_k"))
        return {}
    if gated:
        raise UnsupportedError(f"{c.where}: moe_every_n_layers is {shown(stride)}: experts with a gate are not built")
    count, top_k = c.integer("num_experts", high=2**16), c.integer("moe_top_k", high=2**16)
    if top_k > count:
        raise ConfigError(f"{c.where}: moe_top_k is {top_k}, and num_experts {count}")
    return {"experts": count, "expert_stride": c.integer("moe_every_n_layers"), "top_k": top_k}


class NomicFlow(BertLike[NomicConfig]):
    """The recipe of NomicBERT: see `EncoderFlow`.

    Optional inputs are `attention_mask`, `token_type_ids` (default 0) and `position_ids` (default 0, 1, 2 …).
    """

    name = "nomic"

    heads = {
        **BERT_HEADS,
        MASKED: masked_head(
            "cls.predictions.transform.dense", "cls.predictions.transform.layer_norm", "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
    }  # fmt: skip
    optional_inputs = ALL_INPUTS
    layer_keys = NOMIC_KEYS
    embedding_norm = "emb_ln"
    layers = "encoder.layers.{}"

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        c, keys, (attention, up, down) = self.config, self.layer_keys, self.config.biases
        has_experts = c.experts and index % c.expert_stride == 1
        return replace(
            super().spec(index), keys=keys if c.gated else replace(keys, up="mlp.fc1", gate=""), qkv_bias=attention,
            out_bias=attention, up_bias=up, down_bias=down,
            experts=blocks.EncoderExperts(c.experts, c.top_k, *EXPERT_KEYS) if has_experts else None,
        )  # fmt: skip


# Epsilon of the norm inside the feed-forward block: PyTorch's default, regardless of the config.
INNER_EPS = 1e-5

# The feed-forward width is rounded up to a multiple of this.
INNER_STEP = 256

LAYOUT = VisionLayout(
    patch="embeddings.proj",
    position="embeddings.pos_embed",
    layers="layers.{}",
    keys=VISION_KEYS,
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
        *INERT, "eva_qkv_bias", "hidden_features_scaling_factor", "layer_scale_init",
        "mask_token", "n_positions", "pad_vocab_size_multiple", "patch_dropout", "reorder_and_upcast_attn",
        "rotary_emb_base", "rotary_emb_interleaved", "type_vocab_size", "vocab_size",
    )  # fmt: skip
    neutral = {
        **NEUTRAL,
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

    def spec(self, index: int) -> blocks.PreNormLayerSpec:
        return replace(super().spec(index), use_rope=self.config.use_rotary, inner_eps=INNER_EPS)

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        c = self.config
        if not c.use_rotary:
            return super().embedding_stages()
        rope = blocks.PatchRope(c.grid, c.hidden_size // c.num_attention_heads, reference=c.reference_grid)
        return *super().embedding_stages(), rope

    def final_stages(self) -> tuple[blocks.BlockStage, ...]:
        c = self.config
        return (
            blocks.NomicSelector(self.key("selector"), c.num_attention_heads, c.layer_norm_eps, c.intermediate_size),
        )

    def pool(self) -> blocks.BlockStage:
        return blocks.Custom(unit_first, "pooled")


def unit_first(emit: Emit, x: FlowValue) -> FlowValue:
    """Return the first token of each row, divided by its length."""
    return normalize_rows(emit, emit.first_token(x))
