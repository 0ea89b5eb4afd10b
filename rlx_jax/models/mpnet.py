"""Define the config and recipe of MPNet (Song et al. 2020).

It has BERT's layers, a relative-position bias that all layers share, and no token types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rlx_jax.blocks import BlockStage, LearnedPositions, RelativeBias
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.heads import ROBERTA_HEADS

# The id of padding, which gets no position of its own; the reference hard-codes it.
PADDING = 1

# Number of buckets of relative positions. The reference's table has `relative_attention_num_buckets` rows, but it uses
# only this many.
BUCKETS = 32


@dataclass(frozen=True)
class MPNetConfig(BertConfig):
    """Sizes of an MPNet model, with Hugging Face's field names."""

    type_vocab_size: int = 0
    relative_attention_num_buckets: int = BUCKETS

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        rows = c.integer("relative_attention_num_buckets", BUCKETS)
        if rows < BUCKETS:
            raise UnsupportedError(
                f"{c.where}: field 'relative_attention_num_buckets' is {rows}; expected at least {BUCKETS}: the "
                "reference always reads that many rows of the table"
            )
        return cls(**text_fields(c, 30527), relative_attention_num_buckets=rows)


@dataclass(frozen=True)
class MPNetFlow(BertLike[MPNetConfig]):
    """The recipe of MPNet: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`.

    By default positions count the ids that are not padding, from 2 on.
    """

    name: str = "mpnet"

    config_type = MPNetConfig
    heads = ROBERTA_HEADS
    optional_inputs = (("attention_mask", None), ("position_ids", None))
    style = "mpnet"

    @property
    def max_positions(self) -> int:
        # Positions start after the padding id, so the first rows of the table are not used by tokens.
        return self.config.max_position_embeddings - PADDING - 1

    def positions(self, key: str) -> BlockStage:
        return LearnedPositions(key, self.table, PADDING)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        table = (c.relative_attention_num_buckets, c.num_attention_heads)
        bias = RelativeBias(self.key("encoder.relative_attention_bias.weight"), table, BUCKETS)
        return *super().embedding_stages(), bias
