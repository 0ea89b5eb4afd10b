"""MPNet (Song et al. 2020): BERT's layers with a bias by distance, shared by all of them, and no token types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rlx_jax.blocks import BlockStage, LearnedPositions, RelativeBias
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields, text_fields

# The id that positions are not counted over; the reference asks no config for it.
PADDING = 1

# Of the distances between tokens. The reference has a table of `relative_attention_num_buckets` and uses so many.
BUCKETS = 32


@dataclass(frozen=True)
class MPNetConfig(BertConfig):
    """Sizes of an MPNet model, under the names of Hugging Face's config."""

    type_vocab_size: int = 0
    relative_attention_num_buckets: int = BUCKETS

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        rows = c.whole("relative_attention_num_buckets", BUCKETS)
        if rows < BUCKETS:
            raise UnsupportedError(
                f"{c.where}: field 'relative_attention_num_buckets' is {rows}; the reference reads {BUCKETS} rows of "
                "the table whatever it says, expected as many or more"
            )
        return cls(**text_fields(c, 30527), relative_attention_num_buckets=rows)


@dataclass(frozen=True)
class MPNetFlow(BertLike[MPNetConfig]):
    """The recipe of MPNet: see `EncoderFlow`. Optional are `attention_mask` and `position_ids`; by default they are
    counted over the ids that are no padding, from 2 on."""

    name: str = "mpnet"

    config_type = MPNetConfig
    prefixes = ("mpnet",)
    heads = ("lm_head.", "classifier.", "qa_outputs.")
    optional = (("attention_mask", None), ("position_ids", None))
    style = "mpnet"

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings - PADDING - 1

    def positions(self, key: str) -> BlockStage:
        return LearnedPositions(key, self.table, PADDING)

    def opening(self) -> tuple[BlockStage, ...]:
        c = self.config
        table = (c.relative_attention_num_buckets, c.num_attention_heads)
        bias = RelativeBias(self.key("encoder.relative_attention_bias.weight"), table, BUCKETS)
        return *super().opening(), bias
