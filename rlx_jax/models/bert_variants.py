"""Define the configs and recipes of encoders that differ from BERT in a few layers.

ALBERT (Lan et al. 2019): narrower embeddings and shared layers. ELECTRA, ERNIE, RemBERT, Megatron-BERT, I-BERT,
BigBird, RoFormer: what each changes is above its classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rlx_jax.blocks import BlockStage, EmbedScale, EncoderKeys, EncoderLayerSpec, GatherAdd, frequencies
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.errors import UnsupportedError
from rlx_jax.flow import ModelFlow
from rlx_jax.models.bert import BertConfig, BertLike, RobertaConfig, RobertaFlow
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import even_head_dim
from rlx_jax.models.heads import (
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


@dataclass(frozen=True)
class AlbertFlow(BertLike[AlbertConfig]):
    """The recipe of ALBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "albert"

    config_type = AlbertConfig
    heads = {
        SEQUENCE: (HeadLayer("pooler", "tanh", in_encoder=True), HeadLayer("classifier")),
        MASKED: masked_head("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
        **token_heads(),
    }
    embedding_projection = "encoder.embedding_hidden_mapping_in"
    style = "albert"

    def layer_prefix(self, index: int) -> str:
        group = int(index / (self.config.num_hidden_layers / self.config.num_hidden_groups))  # as the reference rounds
        return self.key(f"encoder.albert_layer_groups.{group}.albert_layers.0")


# Define the config and recipe of ELECTRA (Clark et al. 2020): BERT with narrower embeddings.


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Sizes of an ELECTRA model, with Hugging Face's field names."""

    defaults = {"vocab": 30522, "inner": 1024, "hidden": 256, "heads": 4}

    @classmethod
    def read(cls, c: Fields) -> Self:
        sizes = super().read(c)
        width = c.integer("embedding_size", 128)
        return replace(sizes, embedding_size=0 if width == sizes.hidden_size else width)


@dataclass(frozen=True)
class ElectraFlow(BertLike[ElectraConfig]):
    """The recipe of ELECTRA: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "electra"

    config_type = ElectraConfig
    heads = {
        SEQUENCE: (HeadLayer("classifier.dense", "gelu"), HeadLayer("classifier.out_proj")),
        MASKED: masked_head(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", activation="gelu"
        ),
        **token_heads(),
    }
    embedding_projection = "embeddings_project"


# Define the config and recipe of ERNIE (Sun et al. 2019): BERT, in later versions with embeddings of tasks.


TASKS_INPUT = "task_type_ids"


@dataclass(frozen=True)
class ErnieConfig(BertConfig):
    """Sizes of an ERNIE model; `task_type_vocab_size` is 0 if it does not read tasks."""

    task_type_vocab_size: int = 0

    @classmethod
    def read(cls, c: Fields) -> Self:
        tasks = c.integer("task_type_vocab_size", 3)
        return cls(**cls.common_fields(c), task_type_vocab_size=tasks if c.flag("use_task_id", False) else 0)


@dataclass(frozen=True)
class ErnieFlow(BertLike[ErnieConfig]):
    """The recipe of ERNIE: see `EncoderFlow`. Optional inputs are as of `BertFlow`, and `task_type_ids` (default 0)."""

    name: str = "ernie"

    config_type = ErnieConfig

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        flow = super().add_inputs(flow, rows)
        if not self.config.task_type_vocab_size:
            return flow
        return flow.input(TASKS_INPUT, (rows, "seq"), dtype="int32", default=0)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        *stages, norm = super().embedding_stages()
        sizes = (self.config.task_type_vocab_size, self.config.hidden_size)
        tasks = GatherAdd(TASKS_INPUT, self.key("embeddings.task_type_embeddings.weight"), sizes)
        return *stages, *([tasks] if sizes[0] else []), norm


# Define the config and recipe of Megatron-BERT: BERT with norms before the halves of a layer.


@dataclass(frozen=True)
class MegatronBertConfig(BertConfig):
    """Sizes of a Megatron-BERT model."""

    defaults = {"vocab": 29056, "hidden": 1024, "layers": 24, "heads": 16, "inner": 4096}


@dataclass(frozen=True)
class MegatronBertFlow(BertLike[MegatronBertConfig]):
    """The recipe of Megatron-BERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "megatron-bert"

    config_type = MegatronBertConfig
    layer_keys = replace(STYLES["bert"], attention_norm="attention.ln", mlp_norm="ln")
    pre_norm = True
    embedding_norm = ""
    final_norm = "encoder.ln"


# Define the config and recipe of I-BERT (Kim et al. 2021), a RoBERTa that may be quantized, without quantization.


# Ends of the keys of integer weights and ranges, which only quantized arithmetic reads.
QUANTIZED = ("scaling_factor", "_integer", ".x_min", ".x_max", "LayerNorm.shift", "layer_norm.shift")


@dataclass(frozen=True)
class IBertConfig(RobertaConfig):
    """Sizes of an I-BERT model."""

    defaults = {"vocab": 30522}
    inert = (*RobertaConfig.inert, "force_dequant")
    neutral = {**RobertaConfig.neutral, "quant_mode": (False,)}


@dataclass(frozen=True)
class IBertFlow(RobertaFlow):
    """The recipe of I-BERT: see `RobertaFlow`."""

    name: str = "ibert"

    config_type = IBertConfig

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        return RenamedSource(source, {key: key for key in source.keys() if not key.endswith(QUANTIZED)})


# Define the config and recipe of BigBird (Zaheer et al. 2020): BERT for long texts, built for texts whose tokens
# read all others.


@dataclass(frozen=True)
class BigBirdConfig(BertConfig):
    """Sizes of a BigBird model.

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


@dataclass(frozen=True)
class BigBirdFlow(BertLike[BigBirdConfig]):
    """The recipe of BigBird: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "big_bird"

    config_type = BigBirdConfig
    heads = {
        SEQUENCE: (HeadLayer("classifier.dense", HIDDEN_ACT), HeadLayer("classifier.out_proj")),
        TOKEN: (HeadLayer("classifier"),),
        MASKED: BERT_MASKED,
    }
    layer_keys = STYLES["bert"]

    @property
    def max_positions(self) -> int:
        return self.config.full_positions

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        embed, *stages = super().embedding_stages()
        return embed, *([EmbedScale(self.config.hidden_size)] if self.config.rescales else []), *stages

    def layer_spec(self, index: int, keys: EncoderKeys) -> EncoderLayerSpec:
        return replace(super().layer_spec(index, keys), qkv_bias=self.config.qkv_bias)


# Define the config and recipe of RemBERT (Chung et al. 2020): BERT with narrower embeddings at its input.


@dataclass(frozen=True)
class RemBertConfig(BertConfig):
    """Sizes of a RemBERT model, with Hugging Face's field names."""

    embedding_size: int = 256
    output_embedding_size: int = 1664

    defaults = {"vocab": 250300, "hidden": 1152, "layers": 32, "heads": 18, "inner": 4608}
    fields = {"embedding_size": "input_embedding_size", "output_embedding_size": "output_embedding_size"}


@dataclass(frozen=True)
class RemBertFlow(BertLike[RemBertConfig]):
    """The recipe of RemBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "rembert"

    config_type = RemBertConfig
    heads = {
        **BERT_HEADS,
        MASKED: masked_head("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder"),
    }
    embedding_projection = "encoder.embedding_hidden_mapping_in"


# Define the config and recipe of RoFormer (Su et al. 2021): BERT with rotary positions.


POSITIONS = "encoder.embed_positions.weight"


@dataclass(frozen=True)
class RoFormerConfig(BertConfig):
    """Sizes of a RoFormer model, with Hugging Face's field names."""

    defaults = {"vocab": 50000, "positions": 1536}
    neutral = {"rotary_value": (False,)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        width = c.integer_or_null("embedding_size", None) or common["hidden_size"]
        return cls(
            **common,
            embedding_size=0 if width == common["hidden_size"] else width,
            inv_freq=frequencies(even_head_dim(c, common), 10000.0),
        )


@dataclass(frozen=True)
class RoFormerFlow(BertLike[RoFormerConfig]):
    """The recipe of RoFormer: see `EncoderFlow`. Optional inputs are `attention_mask` and `token_type_ids`."""

    name: str = "roformer"

    config_type = RoFormerConfig
    heads = {
        **BERT_HEADS,
        SEQUENCE: (HeadLayer("classifier.dense", HIDDEN_ACT), HeadLayer("classifier.out_proj")),
    }
    optional_inputs = (("attention_mask", None), ("token_type_ids", 0))
    layer_keys = STYLES["bert"]
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

    def layer_spec(self, index: int, keys: EncoderKeys) -> EncoderLayerSpec:
        return replace(super().layer_spec(index, keys), rope_style="interleaved")
