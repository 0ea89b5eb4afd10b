"""Define the configs and recipes of encoders that differ from BERT in a few layers.

ALBERT (Lan et al. 2019): narrower embeddings and shared layers. ELECTRA, ERNIE, RemBERT, Megatron-BERT, I-BERT,
BigBird, RoFormer, ESM and Alibaba's GTE: what each changes is above its classes.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from rlx_jax import blocks
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import UnsupportedError
from rlx_jax.flow import ModelFlow
from rlx_jax.models.bert import ALL_INPUTS, BertConfig, BertLike, RobertaConfig, RobertaFlow
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.decoder_config import even_head_dim, frequencies_of
from rlx_jax.models.encoder import (
    BERT_HEADS,
    BERT_MASKED,
    HIDDEN_ACT,
    MASKED,
    SEQUENCE,
    TOKEN,
    HeadLayer,
    masked_head,
    token_heads,
)
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.overlay import has_values
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """Sizes of an ALBERT model, with Hugging Face's field names. The layers of a group share their weights."""

    embedding_size: int = 128
    num_hidden_groups: int = 1

    defaults = {"vocab": 30000, "inner": 16384, "hidden": 4096, "heads": 64, "activation": "gelu_new"}
    fields = {"embedding_size": "embedding_size", "num_hidden_groups": "num_hidden_groups"}
    neutral = {**BertConfig.neutral, "inner_group_num": (1,)}


class AlbertFlow(BertLike[AlbertConfig]):
    """The recipe of ALBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "albert"

    heads = {
        SEQUENCE: (HeadLayer("pooler", "tanh", in_encoder=True), HeadLayer("classifier")),
        MASKED: masked_head("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
        **token_heads(),
    }
    embedding_projection = "encoder.embedding_hidden_mapping_in"
    layer_keys = STYLES["albert"]

    def layer_prefix(self, index: int) -> str:
        group = int(index / (self.config.num_hidden_layers / self.config.num_hidden_groups))  # as the reference rounds
        return self.key(f"encoder.albert_layer_groups.{group}.albert_layers.0")


class ElectraConfig(BertConfig):
    """Sizes of an ELECTRA model (Clark et al. 2020), with Hugging Face's field names."""

    defaults = {"vocab": 30522, "inner": 1024, "hidden": 256, "heads": 4}

    @classmethod
    def read(cls, c: Fields) -> Self:
        sizes = super().read(c)
        width = c.integer("embedding_size", 128)
        return replace(sizes, embedding_size=0 if width == sizes.hidden_size else width)


class ElectraFlow(BertLike[ElectraConfig]):
    """The recipe of ELECTRA: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "electra"

    heads = {
        SEQUENCE: (HeadLayer("classifier.dense", "gelu"), HeadLayer("classifier.out_proj")),
        MASKED: masked_head(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", activation="gelu"
        ),
        **token_heads(),
    }
    embedding_projection = "embeddings_project"


TASKS_INPUT = "task_type_ids"


@dataclass(frozen=True)
class ErnieConfig(BertConfig):
    """Sizes of an ERNIE model (Sun et al. 2019); `task_type_vocab_size` is 0 if it does not read tasks."""

    task_type_vocab_size: int = 0

    @classmethod
    def read(cls, c: Fields) -> Self:
        tasks = c.integer("task_type_vocab_size", 3)
        return cls(**cls.common_fields(c), task_type_vocab_size=tasks if c.flag("use_task_id", False) else 0)


class ErnieFlow(BertLike[ErnieConfig]):
    """The recipe of ERNIE: see `EncoderFlow`. Optional inputs are as of `BertFlow`, and `task_type_ids` (default 0)."""

    name = "ernie"

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        flow = super().add_inputs(flow, rows)
        if not self.config.task_type_vocab_size:
            return flow
        return flow.input(TASKS_INPUT, (rows, "seq"), dtype="int32", default=0)

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        *stages, norm = super().embedding_stages()
        sizes = (self.config.task_type_vocab_size, self.config.hidden_size)
        tasks = blocks.GatherAdd(TASKS_INPUT, self.key("embeddings.task_type_embeddings.weight"), sizes)
        return *stages, *([tasks] if sizes[0] else []), norm


class MegatronBertConfig(BertConfig):
    """Sizes of a Megatron-BERT model, which has norms before the halves of a layer."""

    defaults = {"vocab": 29056, "hidden": 1024, "layers": 24, "heads": 16, "inner": 4096}


class MegatronBertFlow(BertLike[MegatronBertConfig]):
    """The recipe of Megatron-BERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "megatron-bert"

    layer_keys = replace(STYLES["bert"], attention_norm="attention.ln", mlp_norm="ln")
    pre_norm = True
    embedding_norm = ""
    final_norm = "encoder.ln"


# Ends of the keys of integer weights and ranges, which only quantized arithmetic reads.
QUANTIZED = ("scaling_factor", "_integer", ".x_min", ".x_max", "LayerNorm.shift", "layer_norm.shift")


class IBertConfig(RobertaConfig):
    """Sizes of an I-BERT model (Kim et al. 2021): a RoBERTa that may be quantized, here without quantization."""

    defaults = {"vocab": 30522}
    inert = (*RobertaConfig.inert, "force_dequant")
    neutral = {**RobertaConfig.neutral, "quant_mode": (False,)}


class IBertFlow(RobertaFlow):
    """The recipe of I-BERT: see `RobertaFlow`."""

    name = "ibert"

    config_type = IBertConfig

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        return RenamedSource(source, {key: key for key in source.keys() if not key.endswith(QUANTIZED)})


@dataclass(frozen=True)
class BigBirdConfig(BertConfig):
    """Sizes of a BigBird model (Zaheer et al. 2020), for texts whose tokens read all others.

    Attributes:
        full_positions: number of tokens up to which they read all others; with sparse attention longer texts, which
            the reference reads by blocks, are refused.
        rescales: whether embeddings of words are multiplied by the square root of their width.
        qkv_bias: whether q, k and v have biases.
    """

    full_positions: int = 4096
    rescales: bool = False
    qkv_bias: bool = True

    fields = {"rescales": "rescale_embeddings", "qkv_bias": "use_bias"}
    defaults = {"vocab": 50358, "positions": 4096, "activation": "gelu_new"}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        is_sparse = c.choice("attention_type", "block_sparse", {"original_full": "", "block_sparse": "sparse"})
        dense = (5 + 2 * c.integer("num_random_blocks", 3)) * c.integer("block_size", 64)
        positions = common["max_position_embeddings"]
        return cls(**common, full_positions=min(dense, positions) if is_sparse else positions)


class BigBirdFlow(BertLike[BigBirdConfig]):
    """The recipe of BigBird: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "big_bird"

    heads = {
        SEQUENCE: (HeadLayer("classifier.dense", HIDDEN_ACT), HeadLayer("classifier.out_proj")),
        TOKEN: (HeadLayer("classifier"),),
        MASKED: BERT_MASKED,
    }

    @property
    def max_positions(self) -> int:
        return self.config.full_positions

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        embed, *stages = super().embedding_stages()
        return embed, *([blocks.EmbedScale(self.config.hidden_size)] if self.config.rescales else []), *stages

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        return replace(super().spec(index), qkv_bias=self.config.qkv_bias)


@dataclass(frozen=True)
class RemBertConfig(BertConfig):
    """Sizes of a RemBERT model (Chung et al. 2020), with Hugging Face's field names."""

    embedding_size: int = 256
    output_embedding_size: int = 1664

    defaults = {"vocab": 250300, "hidden": 1152, "layers": 32, "heads": 18, "inner": 4608}
    fields = {"embedding_size": "input_embedding_size", "output_embedding_size": "output_embedding_size"}


class RemBertFlow(BertLike[RemBertConfig]):
    """The recipe of RemBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name = "rembert"

    heads = {
        **BERT_HEADS,
        MASKED: masked_head("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder"),
    }
    embedding_projection = "encoder.embedding_hidden_mapping_in"


POSITIONS = "encoder.embed_positions.weight"


class RoFormerConfig(BertConfig):
    """Sizes of a RoFormer model (Su et al. 2021), BERT with rotary positions, with Hugging Face's field names."""

    defaults = {"vocab": 50000, "positions": 1536}
    neutral = {"rotary_value": (False,)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        width = c.integer_or_null("embedding_size", None) or common["hidden_size"]
        rope = blocks.frequencies(even_head_dim(c, common), 10000.0)
        return cls(**common, embedding_size=0 if width == common["hidden_size"] else width, inv_freq=rope)


class RoFormerFlow(BertLike[RoFormerConfig]):
    """The recipe of RoFormer: see `EncoderFlow`. Optional inputs are `attention_mask` and `token_type_ids`."""

    name = "roformer"

    heads = {**BERT_HEADS, SEQUENCE: (HeadLayer("classifier.dense", HIDDEN_ACT), HeadLayer("classifier.out_proj"))}
    optional_inputs = (("attention_mask", None), ("token_type_ids", 0))
    embedding_projection = "embeddings_project"

    def unread_keys(self) -> tuple[str, ...]:
        return (*super().unread_keys(), self.key(POSITIONS))  # cos and sin are computed

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return the weights, after comparing a stored table of positions with what is computed.

        Raises:
            UnsupportedError: they differ.
        """
        key = self.key(POSITIONS)
        if source.has(key) and has_values(source, key):
            table, width = read_numbers(key, source), 2 * len(self.config.inv_freq)
            angles = np.arange(len(table))[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
            expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
            tolerance = 1e-5 if table.dtype == np.float32 else 1e-2  # float16 and bfloat16 are rounded
            if table.shape != expected.shape or not np.abs(table.astype(np.float32) - expected).max() <= tolerance:
                raise UnsupportedError(
                    f"{source.where(key)}: {key} is not the table of sines and cosines of width {width} with base "
                    "10000, which is computed; other tables are not read"
                )
        return super().adapt_weights(source)

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        return replace(super().spec(index), rope_style="interleaved")


# Share of tokens that training masked with the mask token; the reference hard-codes it.
MASKED_IN_TRAINING = 0.15 * 0.8


@dataclass(frozen=True)
class EsmConfig(RobertaConfig):
    """Sizes of an ESM model, an encoder of proteins (Rives et al. 2021; ESM-2: Lin et al. 2023).

    Attributes:
        mask_token_id: the mask token, if its embedding is replaced by zeros and the others are scaled; else None.
        norm_before: whether the embeddings have a norm.
    """

    type_vocab_size: int = 0
    mask_token_id: int | None = None
    norm_before: bool = False

    inert = ("tie_word_embeddings", "vocab_list", "esmfold_config")
    # Checkpoints also store the rope's frequencies, which the reference prefers to another base in the config.
    neutral = {"is_folding_model": (False,), "rope_theta": (10000, 10000.0)}

    @classmethod
    def common_fields(cls, c: Fields) -> dict[str, Any]:
        c.choice("hidden_act", "gelu", {"gelu": "gelu"})  # the reference computes gelu whatever the config says
        return text_fields(c, None, 1026)

    @classmethod
    def read(cls, c: Fields) -> Self:
        config = super().read(c)
        kind = c.choice("position_embedding_type", "absolute", {"absolute": "", "rotary": "rotary"})
        drops = c.raw("token_dropout") is not None and c.flag("token_dropout", False)
        head_dim = even_head_dim(c, vars(config)) if kind else 0
        return replace(
            config, inv_freq=blocks.frequencies(head_dim, 10000.0) if kind else (),
            mask_token_id=c.integer("mask_token_id", low=0) if drops else None,
            norm_before=c.raw("emb_layer_norm_before") is not None and c.flag("emb_layer_norm_before", False),
        )  # fmt: skip


@dataclass(frozen=True)
class TokenDropout:
    """Replace the embeddings of mask tokens by zeros, and scale the others for their share of the text's tokens."""

    mask_token_id: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "TokenDropout")
        with emit.scope("token_dropout"):
            is_mask = emit.compare("eq", emit.flow_input("input_ids"), self.mask_token_id)[..., None]
            share = blocks.MeanOfTokens().emit(emit, emit.where(is_mask, emit.ones_like(x[..., :1]), 0.0))
            return emit.where(is_mask, 0.0, x * (1 - MASKED_IN_TRAINING) / (1.0 - share))


class EsmFlow(RobertaFlow):
    """The recipe of ESM: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`.

    By default the positions of models without a rope count the ids that are not padding, from `pad_token_id` + 1 on.
    """

    name = "esm"

    config_type = EsmConfig
    config: EsmConfig
    optional_inputs = (("attention_mask", None), ("position_ids", None))
    layer_keys = replace(STYLES["bert"], attention_norm="attention.LayerNorm", mlp_norm="LayerNorm")
    pre_norm = True
    embedding_norm = "embeddings.layer_norm"
    final_norm = "encoder.emb_layer_norm_after"

    def unread_keys(self) -> tuple[str, ...]:
        rope = "attention.self.rotary_embeddings.inv_freq"
        layers = (*range(self.config.num_hidden_layers), "*")  # transformers 5 saves one buffer for all, as layer *
        table = ["embeddings.position_embeddings.weight"] if self.config.inv_freq else []
        unread = (*table, "contact_head.", "rotary_embeddings.", *(f"encoder.layer.{i}.{rope}" for i in layers))
        return (*super().unread_keys(), *map(self.key, unread))

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        *stages, norm = super().embedding_stages()
        mask = self.config.mask_token_id
        at = 1 + bool(self.config.inv_freq)  # after the embedding, which follows the rope tables
        return (
            *stages[:at], *([] if mask is None else [TokenDropout(mask)]), *stages[at:],
            *([norm] if self.config.norm_before else []),
        )  # fmt: skip


@dataclass(frozen=True)
class GteConfig(BertConfig):
    """Sizes of a GTE encoder, from a config of `model_type` `gte`, or `new`, as the authors' checkpoints have it."""

    type_vocab_size: int = 1

    defaults = {"vocab": 250048, "positions": 8192}
    min_types = 0
    inert = ("tie_word_embeddings", "unpad_inputs", "logn_attention_clip1")
    neutral = {
        "layer_norm_type": ("layer_norm",), "logn_attention_scale": (False,), "pack_qkv": (True,),
        "position_embedding_type": ("rope",),
    }  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        return cls(**common, inv_freq=_rope(c, even_head_dim(c, common)))


def _rope(c: Fields, head_dim: int) -> blocks.Frequencies:
    """Return the inverse frequencies of the config's rope.

    The authors' type `ntk` scales the base by a factor f, and the frequencies by f^(−2/D) in addition.
    """
    scaling, default = c.group("rope_scaling"), 10000.0 if c.values.get("model_type") == "new" else 160000.0
    if scaling is None or scaling.text("type", "") != "ntk":
        return frequencies_of(c, c.group("rope_parameters"), scaling, head_dim, default=default).inv_freq
    base, factor = c.real("rope_theta", default), scaling.real("factor")
    scaling.finish()
    if factor <= 1:
        return blocks.frequencies(head_dim, base)
    return blocks.linear_scaling(blocks.frequencies(head_dim, base * factor), factor ** (2 / head_dim))


class GteFlow(BertLike[GteConfig]):
    """The recipe of GTE: see `EncoderFlow`. Optional inputs are as of `NomicFlow`."""

    name = "gte"

    heads = {**BERT_HEADS, MASKED: masked_head("lm_head.dense", "lm_head.norm", "lm_head.decoder", activation="gelu")}
    optional_inputs = ALL_INPUTS
    layer_keys = blocks.EncoderKeys(
        ("attention.qkv_proj",), "attention.o_proj", "attn_ln", "mlp.up_gate_proj", "mlp.down_proj", "mlp_ln",
        gate="mlp.up_gate_proj", up_first=True,
    )  # fmt: skip

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        return replace(super().spec(index), up_bias=False)
