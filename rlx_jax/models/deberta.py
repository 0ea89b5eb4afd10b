"""Define the configs and recipes of DeBERTa (He et al. 2021) and DeBERTa v2 and v3: BERT with scores of distances."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from rlx_jax.blocks import BlockStage, DistanceEmbeddings, EncoderLayerSpec, LayerNorm, RelativeKeys
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.blocks.linear import module_keys
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import ACTIVATIONS, Fields
from rlx_jax.models.encoder import BERT_MASKED, MASKED, SEQUENCE, HeadLayer, HeadLayers, masked_head, token_heads
from rlx_jax.trace.emit import Emit, FlowValue

# Name of the registered embeddings of distances.
DISTANCES = "relative_embeddings"


@dataclass(frozen=True)
class DebertaConfig(BertConfig):
    """Sizes of a DeBERTa model.

    Attributes:
        position_biased_input: whether embeddings of positions are added.
        terms: the terms of the scores of distances, `c2p` and `p2c`; empty without any.
        num_terms: number of terms that the scale of scores counts.
        max_distance: distances up to this one have an embedding each, or a bucket.
        buckets: number of buckets for distances on each side; 0 for none.
        norm_embeddings: whether the embeddings of distances have a norm.
        share_keys: whether embeddings of distances are projected as tokens are.
        pooler_activation: activation of the pooler.
        legacy: whether the head of a masked language model has BERT's names.
    """

    type_vocab_size: int = 0
    position_biased_input: bool = True
    terms: tuple[str, ...] = ()
    num_terms: int = 0
    max_distance: int = 512
    buckets: int = 0
    norm_embeddings: bool = False
    share_keys: bool = False
    pooler_activation: str = "gelu"
    legacy: bool = True

    defaults = {"vocab": 50265, "eps": 1e-7}
    min_types = 0
    inert: ClassVar[tuple[str, ...]] = ("padding_idx", "tie_word_embeddings")
    neutral = {"talking_head": (False,)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        hidden = common["hidden_size"]
        for name, size in (
            ("embedding_size", hidden), ("pooler_hidden_size", hidden),
            ("attention_head_size", hidden // common["num_attention_heads"]),
        ):  # fmt: skip
            if (value := c.integer_or_null(name, None)) not in (None, size):
                raise UnsupportedError(f"{c.where}: field {quote(name)} is {value}; supported is {size}")
        is_relative = c.flag("relative_attention", False)
        farthest = c.integer("max_relative_positions", -1, low=-1)
        names = c.raw("pos_att_type", [])
        terms = [name.strip() for name in names.lower().split("|")] if isinstance(names, str) else names
        if not isinstance(terms, list) or any(term not in ("c2p", "p2c") for term in terms):
            raise UnsupportedError(f"{c.where}: field 'pos_att_type' is {quote(names)}; supported are c2p and p2c")
        return cls(
            **common,
            position_biased_input=c.flag("position_biased_input", True),
            terms=tuple(name for name in ("c2p", "p2c") if name in terms and is_relative),
            num_terms=len(terms),
            max_distance=farthest if farthest > 0 else common["max_position_embeddings"],
            pooler_activation=c.choice("pooler_hidden_act", "gelu", ACTIVATIONS),
            legacy=c.flag("legacy", True),
        )


@dataclass(frozen=True)
class DebertaV2Config(DebertaConfig):
    """Sizes of a DeBERTa v2 or v3 model.

    Attributes:
        conv_kernel: width of the convolution over the embeddings in tokens; 0 without one.
        conv_groups, conv_activation: its number of groups of channels, and the function after it.
    """

    conv_kernel: int = 0
    conv_groups: int = 1
    conv_activation: str = "tanh"

    defaults = {"vocab": 128100, "hidden": 1536, "layers": 24, "heads": 24, "inner": 6144, "eps": 1e-7}
    inert = (*DebertaConfig.inert, "conv_act", "conv_groups")
    neutral = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        config, buckets = super().read(c), max(c.integer("position_buckets", -1, low=-1), 0)
        if buckets and (buckets % 2 or buckets // 2 >= config.max_distance - 1):
            limit = 2 * (config.max_distance - 1)
            raise ConfigError(f"{c.where}: position_buckets is {buckets}; expected an even number under {limit}")
        kernel, groups = c.integer("conv_kernel_size", 0, low=0, high=2**10), c.integer("conv_groups", 1)
        if kernel and (kernel % 2 == 0 or config.hidden_size % groups):
            raise ConfigError(
                f"{c.where}: field 'conv_kernel_size' is {kernel}, and 'conv_groups' {groups}; expected an odd number, "
                f"and a divisor of hidden_size {config.hidden_size}"
            )
        if kernel:
            activation = c.choice("conv_act", "tanh", ACTIVATIONS)
            config = replace(config, conv_kernel=kernel, conv_groups=groups, conv_activation=activation)
        norm = c.choice("norm_rel_ebd", "none", {"none": "", "layer_norm": "layer_norm"})
        return replace(config, buckets=buckets, norm_embeddings=bool(norm), share_keys=c.flag("share_att_key", False))


class DebertaFlow(BertLike[DebertaConfig]):
    """The recipe of DeBERTa: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "deberta"

    layer_keys = replace(STYLES["bert"], qkv=("attention.self.in_proj",))
    # The modules that project the embeddings of distances to keys and queries.
    relative_modules: ClassVar[tuple[str, str]] = ("attention.self.pos_proj", "attention.self.pos_q_proj")

    def task_heads(self) -> HeadLayers:
        head = "lm_predictions.lm_head"
        masked = masked_head(f"{head}.dense", f"{head}.LayerNorm", f"{head}.decoder", f"{head}.bias")
        return {
            SEQUENCE: (HeadLayer("pooler.dense", self.config.pooler_activation), HeadLayer("classifier")),
            MASKED: BERT_MASKED if self.config.legacy else masked,
            **token_heads(),
        }

    def positions(self, key: str) -> BlockStage | None:
        return super().positions(key) if self.config.position_biased_input else None

    def unread_keys(self) -> tuple[str, ...]:
        c, keys = self.config, super().unread_keys()
        tables = {
            "embeddings.position_embeddings.weight": c.position_biased_input,
            "encoder.rel_embeddings.weight": c.terms,
            "encoder.LayerNorm.": c.norm_embeddings,
        }
        return *keys, *(self.key(name) for name, is_read in tables.items() if not is_read)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c, p = self.config, self.key("encoder")
        if not c.terms:
            return super().embedding_stages()
        norm = LayerNorm(*module_keys(f"{p}.LayerNorm"), c.layer_norm_eps)
        shape = (2 * (c.buckets or c.max_distance), c.hidden_size)
        key, norm_of_rows = f"{p}.rel_embeddings.weight", norm if c.norm_embeddings else None
        distances = DistanceEmbeddings(DISTANCES, key, shape, norm_of_rows)
        return distances, *super().embedding_stages()

    def spec(self, index: int) -> EncoderLayerSpec:
        c, spec, qkv = self.config, super().spec(index), self.layer_keys.qkv
        by_head = len(qkv) == 1
        keys_module, queries_module = (qkv[1], qkv[0]) if c.share_keys else self.relative_modules
        relative = RelativeKeys(
            embeddings=DISTANCES, keys=keys_module if "c2p" in c.terms else "",
            queries=queries_module if "p2c" in c.terms else "", keys_bias=not by_head, buckets=c.buckets,
            max_distance=c.max_distance,
        )  # fmt: skip
        return replace(
            spec, score_scale=(spec.head_dim * (1 + c.num_terms)) ** -0.5, relative=relative if c.terms else None,
            qkv_by_head=by_head,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerWithConv:
    """Add a convolution of a layer's input to its result: `norm(layer(x) + act(conv(x)))`, `[B,S,H]` → same.

    Weights under the prefix: `conv.weight` `[H, H/groups, kernel]`, `conv.bias`, `LayerNorm.*`.
    """

    layer: BlockStage
    prefix: str
    config: DebertaV2Config

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, c, p = emit.require(value, "LayerWithConv"), self.config, f"{self.prefix}.conv"
        y, mask = self.layer.emit(emit, x), emit.optional_input("attention_mask")
        with emit.scope("conv"):
            x = x if mask is None else emit.where(emit.compare("ne", mask, 0)[..., None], x, 0.0)
            weight = emit.param(f"{p}.weight", (c.hidden_size, c.hidden_size // c.conv_groups, c.conv_kernel))
            bias, ends = emit.param(f"{p}.bias", (c.hidden_size,)), (c.conv_kernel // 2,) * 2
            z = emit.conv(x.transpose(0, 2, 1), weight, padding=[ends], feature_group_count=c.conv_groups)
            total = y + emit.activation(c.conv_activation, z.transpose(0, 2, 1) + bias)
            return emit.layer_norm(total, *module_keys(f"{self.prefix}.LayerNorm"), c.layer_norm_eps)


class DebertaV2Flow(DebertaFlow):
    """The recipe of DeBERTa v2 and v3: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "deberta-v2"

    config_type = DebertaV2Config
    config: DebertaV2Config
    layer_keys = replace(STYLES["bert"], qkv=tuple(f"attention.self.{name}_proj" for name in ("query", "key", "value")))
    relative_modules = ("attention.self.pos_key_proj", "attention.self.pos_query_proj")

    def stage(self, index: int, spec: Any) -> BlockStage:
        layer = super().stage(index, spec)
        has_conv = self.config.conv_kernel and not index
        return LayerWithConv(layer, self.key("encoder.conv"), self.config) if has_conv else layer
