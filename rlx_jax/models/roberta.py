"""Define the config and recipe of RoBERTa, XLM-RoBERTa and CamemBERT: BERT's layers, with positions that skip
padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import BlockStage, LearnedPositions
from rlx_jax.errors import ConfigError
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.heads import ROBERTA_HEADS


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Sizes of a RoBERTa model. Positions begin after `pad_token_id`, which reduces their number."""

    pad_token_id: int = 1

    @classmethod
    def read(cls, c: Fields) -> Self:
        common, padding = text_fields(c, 50265), c.integer("pad_token_id", cls.pad_token_id, low=0)
        positions = common["max_position_embeddings"]
        if padding >= min(positions - 1, common["vocab_size"]):
            raise ConfigError(
                f"{c.where}: field 'pad_token_id' is {padding}; expected an id of the vocabulary, with positions "
                f"after it among the {positions}"
            )
        return cls(**common, type_vocab_size=c.integer("type_vocab_size", 2), pad_token_id=padding)


@dataclass(frozen=True)
class RobertaFlow(BertLike[RobertaConfig]):
    """The recipe of RoBERTa: see `EncoderFlow`.

    Optional inputs are `attention_mask`, `token_type_ids` (default 0) and `position_ids`. By default positions count
    the ids that are not padding, from `pad_token_id` + 1 on.
    """

    name: str = "roberta"

    config_type = RobertaConfig
    prefixes = ("roberta",)
    head_prefixes = ("lm_head.", "classifier.", "qa_outputs.")
    heads = ROBERTA_HEADS
    optional_inputs = (("attention_mask", None), ("token_type_ids", 0), ("position_ids", None))

    @property
    def max_positions(self) -> int:
        # The rows of the table up to `pad_token_id` are not used by tokens: their positions start after it.
        return self.config.max_position_embeddings - self.config.pad_token_id - 1

    def positions(self, key: str) -> BlockStage:
        return LearnedPositions(key, self.table, self.config.pad_token_id)
