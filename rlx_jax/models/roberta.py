"""Define the configs and recipes of RoBERTa, XLM-RoBERTa, CamemBERT and data2vec: BERT's layers, with positions that
skip padding; and of RoBERTa-PreLayerNorm and XLM-RoBERTa-XL, with norms before the halves of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rlx_jax.blocks import BlockStage, LearnedPositions
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.errors import ConfigError
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.encoder import OptionalInput
from rlx_jax.models.heads import ROBERTA_HEADS


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Sizes of a RoBERTa model. Positions begin after `pad_token_id`, which reduces their number."""

    pad_token_id: int = 1

    defaults = {"vocab": 50265}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common, padding = cls.common_fields(c), c.integer("pad_token_id", cls.pad_token_id, low=0)
        positions = common["max_position_embeddings"]
        if padding >= min(positions - 1, common["vocab_size"]):
            raise ConfigError(
                f"{c.where}: field 'pad_token_id' is {padding}; expected an id of the vocabulary, with positions "
                f"after it among the {positions}"
            )
        return cls(**common, pad_token_id=padding)


@dataclass(frozen=True)
class RobertaFlow(BertLike[RobertaConfig]):
    """The recipe of RoBERTa: see `EncoderFlow`.

    Optional inputs are `attention_mask`, `token_type_ids` (default 0) and `position_ids`. By default positions count
    the ids that are not padding, from `pad_token_id` + 1 on.
    """

    name: str = "roberta"

    config_type = RobertaConfig
    heads = ROBERTA_HEADS
    optional_inputs: ClassVar[tuple[OptionalInput, ...]] = (
        ("attention_mask", None), ("token_type_ids", 0), ("position_ids", None),
    )  # fmt: skip

    @property
    def max_positions(self) -> int:
        # The rows of the table up to `pad_token_id` are not used by tokens: their positions start after it.
        return self.config.max_position_embeddings - self.config.pad_token_id - 1

    def positions(self, key: str) -> BlockStage:
        return LearnedPositions(key, self.table, self.config.pad_token_id)


@dataclass(frozen=True)
class Data2VecTextFlow(RobertaFlow):
    """The recipe of data2vec's text encoder: see `RobertaFlow`."""

    name: str = "data2vec-text"


@dataclass(frozen=True)
class RobertaPreLayerNormFlow(RobertaFlow):
    """The recipe of RoBERTa-PreLayerNorm: see `RobertaFlow`."""

    name: str = "roberta-prelayernorm"

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


@dataclass(frozen=True)
class XlmRobertaXlFlow(RobertaFlow):
    """The recipe of XLM-RoBERTa-XL: see `RobertaFlow`."""

    name: str = "xlm-roberta-xl"

    config_type = XlmRobertaXlConfig
    layer_keys = replace(STYLES["bert"], attention_norm="attention.self_attn_layer_norm", mlp_norm="LayerNorm")
    pre_norm = True
    embedding_norm = ""
    final_norm = "encoder.LayerNorm"
