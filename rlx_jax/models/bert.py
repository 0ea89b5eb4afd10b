"""Define the configs and recipes of BERT (`BertModel`, and the encoders inside task checkpoints) and its nearest kin:
RoBERTa, XLM-RoBERTa-XL, Jina v3, EuroBERT, DistilBERT (Sanh et al. 2019) and MPNet (Song et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

from rlx_jax import blocks
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.blocks.linear import module_keys
from rlx_jax.blocks.positions import POSITION_BIAS
from rlx_jax.blocks.self_attention import head_width
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import ConfigError, UnsupportedError
from rlx_jax.flow import POSITIONS, declared_shapes
from rlx_jax.models import encoder
from rlx_jax.models.config import (
    ACTIVATIONS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    Fields,
    TokenConfig,
    text_fields,
    width_and_heads,
)
from rlx_jax.models.decoder_config import DecoderConfig, even_head_dim, frequencies_of

# The optional inputs of families without default positions, or that derive them from the ids.
ALL_INPUTS = (("attention_mask", None), ("token_type_ids", 0), ("position_ids", None))


@dataclass(frozen=True)
class BertConfig(TokenConfig):
    """Sizes of a BERT model, with Hugging Face's field names.

    Attributes:
        embedding_size: width of the embeddings, which are projected to hidden states; 0 without a projection.
        inv_freq: inverse frequencies of the rope of all layers; empty without one.
        defaults: the family's defaults, keywords of `text_fields`.
        min_types: the smallest number of token types.
        fields: further attributes, and the names of their fields.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    activation: str = "gelu"
    embedding_size: int = 0
    inv_freq: blocks.Frequencies = field(default=(), repr=False)

    defaults: ClassVar[Mapping[str, Any]] = {"vocab": 30522}
    min_types: ClassVar[int] = 1
    fields: ClassVar[Mapping[str, str]] = {}
    inert: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"position_embedding_type": ("absolute",)}

    @classmethod
    def common_fields(cls, c: Fields) -> dict[str, Any]:
        """Return the fields that BERT-like configs share."""
        types = c.integer("type_vocab_size", cls.type_vocab_size, low=cls.min_types)
        return dict(**text_fields(c, **cls.defaults), **c.with_defaults(cls, **cls.fields), type_vocab_size=types)


B = TypeVar("B", bound=BertConfig)


@dataclass(frozen=True)
class BertLike(encoder.EncoderFlow[B]):
    """The recipe of BERT-like families: see `EncoderFlow`.

    A family may define how positions are embedded, the `layer_keys` of a layer, and in `spec` what else differs
    from BERT's.

    Attributes:
        pre_norm: the norms of a layer come before its halves.
        embedding_norm, final_norm: the norms after the embeddings and after the layers; empty for none.
        layers: prefix of a layer, with `{}` for its number.
    """

    heads = encoder.BERT_HEADS
    layer_keys: ClassVar[blocks.EncoderKeys] = STYLES["bert"]
    pre_norm: ClassVar[bool] = False
    embedding_norm: ClassVar[str] = "embeddings.LayerNorm"
    final_norm: ClassVar[str] = ""
    layers: ClassVar[str] = "encoder.layer.{}"
    # Key of the projection from embeddings to hidden states, of a family with narrower embeddings.
    embedding_projection: ClassVar[str] = ""

    def positions(self, key: str) -> blocks.BlockStage | None:
        """Return the stage that adds position embeddings from the table with this key; None if there is no table."""
        return blocks.GatherAdd("position_ids", key, self.table)

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        c, p, width = self.config, self.key("embeddings"), self.config.embedding_size or self.config.hidden_size
        types = blocks.GatherAdd("token_type_ids", f"{p}.token_type_embeddings.weight", (c.type_vocab_size, width))
        weight, bias = module_keys(self.key(self.embedding_projection))
        projection = blocks.Linear(weight, bias_key=bias, shape=(c.hidden_size, width))
        positions = None if c.inv_freq else self.positions(f"{p}.position_embeddings.weight")
        return (
            *([blocks.RopeTables(c.inv_freq)] if c.inv_freq else []),
            blocks.Embed(self.key(self.embedding), (c.vocab_size, width)),
            *([types] if c.type_vocab_size else []),  # MPNet has no token types
            *([] if positions is None else [positions]),
            *self.norm(self.embedding_norm),
            *([projection] if c.embedding_size else []),
        )

    def final_stages(self) -> tuple[blocks.BlockStage, ...]:
        return self.norm(self.final_norm)

    @property
    def table(self) -> tuple[int, int]:
        """Shape of the table of position embeddings."""
        return self.config.max_position_embeddings, self.config.embedding_size or self.config.hidden_size

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the keys of layer `index`."""
        return self.key(self.layers.format(index))

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return head_width(self.name, self.config.hidden_size, self.config.num_attention_heads)

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        c = self.config
        return blocks.EncoderLayerSpec(
            prefix=self.layer_prefix(index), keys=self.layer_keys, hidden_size=c.hidden_size,
            num_heads=c.num_attention_heads, head_dim=self.head_dim, intermediate_size=c.intermediate_size,
            eps=c.layer_norm_eps, pre_norm=self.pre_norm, activation=c.activation, rope="" if c.inv_freq else None,
        )  # fmt: skip


class BertFlow(BertLike[BertConfig]):
    """The recipe of BERT: see `EncoderFlow`.

    Optional inputs are `attention_mask`, `token_type_ids` (default 0) and `position_ids` (default 0, 1, 2 …).
    """

    name = "bert"


def weight_specs(config: BertConfig, prefix: str = "", dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every checkpoint key, to compile or `init` without a checkpoint."""
    return declared_shapes(BertFlow(config, prefix=prefix).assemble(), dtype)


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Sizes of RoBERTa, XLM-RoBERTa, CamemBERT, data2vec, and of RoBERTa-PreLayerNorm and XLM-RoBERTa-XL.

    Positions begin after `pad_token_id`, which reduces their number.
    """

    pad_token_id: int = 1

    defaults = {"vocab": 50265}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common, padding = cls.common_fields(c), c.integer("pad_token_id", cls.pad_token_id, low=0)
        limit = min(common["max_position_embeddings"] - 1, common["vocab_size"])
        if padding >= limit:
            raise ConfigError(f"{c.where}: field 'pad_token_id' is {padding}; expected one under {limit}")
        return cls(**common, pad_token_id=padding)


class RobertaFlow(BertLike[RobertaConfig]):
    """The recipe of RoBERTa: see `EncoderFlow`.

    Optional inputs are `attention_mask`, `token_type_ids` (default 0) and `position_ids`. By default positions count
    the ids that are not padding, from `pad_token_id` + 1 on.
    """

    name = "roberta"

    heads = encoder.ROBERTA_HEADS
    optional_inputs: ClassVar[encoder.OptionalInputs] = ALL_INPUTS

    @property
    def max_positions(self) -> int:
        # The rows of the table up to `pad_token_id` are not used by tokens: their positions start after it.
        return self.config.max_position_embeddings - self.config.pad_token_id - 1

    def positions(self, key: str) -> blocks.BlockStage:
        return blocks.LearnedPositions(key, self.table, self.config.pad_token_id)


class Data2VecTextFlow(RobertaFlow):
    """The recipe of data2vec's text encoder: see `RobertaFlow`."""

    name = "data2vec-text"


class RobertaPreLayerNormFlow(RobertaFlow):
    """The recipe of RoBERTa-PreLayerNorm: see `RobertaFlow`."""

    name = "roberta-prelayernorm"

    layer_keys = replace(STYLES["bert"], attention_norm="attention.LayerNorm", mlp_norm="intermediate.LayerNorm")
    pre_norm = True
    final_norm = "LayerNorm"


@dataclass(frozen=True)
class XlmRobertaXlConfig(RobertaConfig):
    """Sizes of an XLM-RoBERTa-XL model."""

    type_vocab_size: int = 1

    defaults = {
        "vocab": 250880, "hidden": 2560, "layers": 36, "heads": 32, "inner": 10240, "positions": 514, "eps": 1e-5
    }  # fmt: skip


class XlmRobertaXlFlow(RobertaFlow):
    """The recipe of XLM-RoBERTa-XL: see `RobertaFlow`."""

    name = "xlm-roberta-xl"

    config_type = XlmRobertaXlConfig
    layer_keys = replace(STYLES["bert"], attention_norm="attention.self_attn_layer_norm", mlp_norm="LayerNorm")
    pre_norm = True
    embedding_norm = ""
    final_norm = "encoder.LayerNorm"


@dataclass(frozen=True)
class JinaV3Config(BertConfig):
    """Sizes of a Jina Embeddings v3 model (Sturua et al. 2024), in the layout that transformers saves."""

    type_vocab_size: int = 1

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab": 250002, "hidden": 1024, "layers": 24, "heads": 16, "inner": 4096, "positions": 8194, "eps": 1e-5
    }  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        rope = frequencies_of(c, c.group("rope_parameters"), None, even_head_dim(c, common), default=20000.0)
        return cls(**common, inv_freq=rope.inv_freq)


class JinaV3Flow(BertLike[JinaV3Config]):
    """The recipe of Jina Embeddings v3: see `EncoderFlow`. Optional inputs are as of `NomicFlow`."""

    name = "jina-v3"

    heads = encoder.ROBERTA_HEADS
    optional_inputs = ALL_INPUTS
    layer_keys = blocks.EncoderKeys(("mixer.Wqkv",), "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2", "norm2")
    embedding_norm = "emb_ln"
    layers = "encoder.layers.{}"


KEYS = blocks.EncoderKeys(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", "input_layernorm", "mlp.up_proj",
    "mlp.down_proj", "post_attention_layernorm", gate="mlp.gate_proj",
)  # fmt: skip


@dataclass(frozen=True)
class EuroBertConfig(DecoderConfig):
    """Sizes of a EuroBERT model (Boizard et al. 2025): Llama's layers, in which tokens read all others.

    Attributes:
        attention_bias, mlp_bias: whether the projections have biases; `mlp_bias` is also the one of token ids.
        classifier_pooling: classifiers of texts read the first token (`bos`), the mean of the tokens (`mean`), or give
            the mean of the logits (`late`).
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = field(default="silu", init=False)
    classifier_pooling: str = "late"

    fields = ("attention_bias", "mlp_bias")
    inert = ("bos_token", "eos_token", "mask_token", "pad_token")

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        if c.flag("is_causal", False):
            raise UnsupportedError(f"{c.where}: field 'is_causal' is true; supported is false: tokens read all others")
        name = "clf_pooling" if "clf_pooling" in c.values else "classifier_pooling"  # the authors' code has the first
        pooling = c.choice(name, "late", {pooling: pooling for pooling in ("bos", "mean", "late")})
        return cls(**common, classifier_pooling=pooling)


class EuroBertFlow(encoder.EncoderFlow[EuroBertConfig]):
    """The recipe of EuroBERT: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name = "eurobert"

    embedding = "embed_tokens.weight"
    head_prefixes = ("lm_head.", "dense.", "classifier.")
    optional_inputs = (("attention_mask", None), ("position_ids", None))

    def task_heads(self) -> encoder.HeadLayers:
        return {
            encoder.SEQUENCE: (encoder.HeadLayer("dense", "gelu"), encoder.HeadLayer("classifier")),
            encoder.TOKEN: (encoder.HeadLayer("classifier"),),
            encoder.MASKED: (encoder.HeadLayer("lm_head", bias=self.config.mlp_bias),),
        }

    def head_stages(self, head: encoder.TaskHead) -> tuple[blocks.BlockStage, ...]:
        stages, pooling = super().head_stages(head), self.config.classifier_pooling
        if head.task != encoder.SEQUENCE or pooling == "bos":
            return stages
        return (blocks.MeanOfTokens(), *stages) if pooling == "mean" else (*stages, blocks.MeanOfTokens())

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        c = self.config
        embed = blocks.Embed(self.key(self.embedding), (c.vocab_size, c.hidden_size))
        return blocks.RopeTables(c.inv_freq, factor=c.rope_factor), embed

    def final_stages(self) -> tuple[blocks.BlockStage, ...]:
        return (blocks.RmsNorm(self.key("norm.weight"), self.config.rms_norm_eps),)

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        c = self.config
        return blocks.EncoderLayerSpec(
            prefix=self.key(f"layers.{index}"), keys=KEYS, hidden_size=c.hidden_size, num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads, head_dim=c.head_dim, intermediate_size=c.intermediate_size,
            eps=c.rms_norm_eps, pre_norm=True, rms=True, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
            up_bias=c.mlp_bias, down_bias=c.mlp_bias, activation=c.activation, rope="",
        )  # fmt: skip


@dataclass(frozen=True)
class DistilBertConfig(BertConfig):
    """Sizes of a DistilBERT model."""

    type_vocab_size: int = 0

    # How the position table was initialised; the checkpoint has its values.
    inert = ("tie_word_embeddings", "tie_weights_", "sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout")
    neutral = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        width, heads = width_and_heads(c, names=("dim", "n_heads"))
        return cls(
            vocab_size=c.integer("vocab_size", 30522, high=MAX_VOCABULARY),
            hidden_size=width,
            intermediate_size=c.integer("hidden_dim", 3072),
            num_hidden_layers=c.integer("n_layers", 6, high=MAX_LAYERS),
            num_attention_heads=heads,
            max_position_embeddings=c.integer("max_position_embeddings", 512),
            activation=c.choice("activation", "gelu", ACTIVATIONS),
        )


class DistilBertFlow(BertLike[DistilBertConfig]):
    """The recipe of DistilBERT: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name = "distilbert"

    heads = {
        encoder.SEQUENCE: (encoder.HeadLayer("pre_classifier", "relu"), encoder.HeadLayer("classifier")),
        encoder.MASKED: encoder.masked_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        **encoder.token_heads(),
    }
    optional_inputs = (("attention_mask", None), ("position_ids", POSITIONS))
    layer_keys = STYLES["distilbert"]
    layers = "transformer.layer.{}"


# Number of buckets of relative positions. The reference's table has `relative_attention_num_buckets` rows, but it uses
# only this many.
BUCKETS = 32


@dataclass(frozen=True)
class MPNetConfig(RobertaConfig):
    """Sizes of an MPNet model, with Hugging Face's field names.

    Its `pad_token_id` is 1 whatever the config has: the reference hard-codes the id that gets no position.
    """

    type_vocab_size: int = 0
    relative_attention_num_buckets: int = BUCKETS

    neutral = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        rows = c.integer("relative_attention_num_buckets", BUCKETS)
        if rows < BUCKETS:
            raise UnsupportedError(
                f"{c.where}: field 'relative_attention_num_buckets' is {rows}; expected at least {BUCKETS}: the "
                "reference always reads that many rows of the table"
            )
        return cls(**text_fields(c, 30527), relative_attention_num_buckets=rows)


class MPNetFlow(RobertaFlow):
    """The recipe of MPNet: see `RobertaFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name = "mpnet"

    config_type = MPNetConfig
    config: MPNetConfig
    optional_inputs = (("attention_mask", None), ("position_ids", None))
    layer_keys = STYLES["mpnet"]

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        c = self.config
        table = (c.relative_attention_num_buckets, c.num_attention_heads)
        bias = blocks.RelativeBias(self.key("encoder.relative_attention_bias.weight"), table, BUCKETS)
        return *super().embedding_stages(), bias

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        return replace(super().spec(index), position_bias=POSITION_BIAS)
