"""Define the config and recipe of MPNet (Song et al. 2020).

It has RoBERTa's layers and positions, a relative-position bias that all layers share, and no token types.
"""

from __future__ import annotations

from typing import Self

from rlx_jax.blocks import BlockStage, EncoderLayerSpec, RelativeBias
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.blocks.positions import POSITION_BIAS
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.bert import RobertaConfig, RobertaFlow
from rlx_jax.models.config import Fields, text_fields

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

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        table = (c.relative_attention_num_buckets, c.num_attention_heads)
        bias = RelativeBias(self.key("encoder.relative_attention_bias.weight"), table, BUCKETS)
        return *super().embedding_stages(), bias

    def spec(self, index: int) -> EncoderLayerSpec:
        return replace(super().spec(index), position_bias=POSITION_BIAS)
