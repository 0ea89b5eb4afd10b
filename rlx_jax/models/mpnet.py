"""MPNet (Song et al. 2020): BERT's layers with a bias by distance, shared by all of them, and no token types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlx_jax.blocks import (
    BertEncoderLayer,
    BertEncoderLayerSpec,
    BlockStage,
    Embed,
    LayerNorm,
    LearnedPositions,
    RelativeBias,
)
from rlx_jax.blocks.encoder import bert_layer_prefix
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.config import Fields, ModelConfig, text_fields
from rlx_jax.models.encoder import EMBEDDING, EncoderFlow, StoredShapes

PADDING = 1
"""The id that positions are not counted over; the reference asks no config for it."""

BUCKETS = 32
"""Of the distances between tokens. The reference has a table of `relative_attention_num_buckets` and uses so many."""


@dataclass(frozen=True)
class MPNetConfig(ModelConfig):
    """Sizes of an MPNet model, under the names of Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 512
    layer_norm_eps: float = 1e-12
    activation: str = "gelu"
    relative_attention_num_buckets: int = BUCKETS

    inert: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)

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
class MPNetFlow(EncoderFlow[MPNetConfig]):
    """The recipe of MPNet: see `EncoderFlow`. Optional are `attention_mask` and `position_ids`; by default they are
    counted over the ids that are no padding, from 2 on."""

    name: str = "mpnet"

    config_type = MPNetConfig
    prefixes = ("mpnet",)
    heads = ("lm_head.", "classifier.", "qa_outputs.")
    optional = (("attention_mask", None), ("position_ids", None))

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings - PADDING - 1

    def opening(self) -> tuple[BlockStage, ...]:
        c, p = self.config, self.key("embeddings")
        positions = (c.max_position_embeddings, c.hidden_size)
        table = (c.relative_attention_num_buckets, c.num_attention_heads)
        return (
            Embed(f"{p}.word_embeddings.weight", (c.vocab_size, c.hidden_size)),
            LearnedPositions(f"{p}.position_embeddings.weight", positions, PADDING),
            LayerNorm(f"{p}.LayerNorm.weight", f"{p}.LayerNorm.bias", c.layer_norm_eps),
            RelativeBias(self.key("encoder.relative_attention_bias.weight"), table, BUCKETS),
        )

    def spec(self, index: int) -> BertEncoderLayerSpec:
        c, p = self.config, bert_layer_prefix(self.prefix, index)
        return BertEncoderLayerSpec.hf(p, c.hidden_size, c.num_attention_heads, c.layer_norm_eps, c.activation, "mpnet")

    def stage(self, index: int, spec: BertEncoderLayerSpec) -> BlockStage:
        return BertEncoderLayer(spec)

    def stored(self) -> StoredShapes:
        c, h = self.config, self.config.hidden_size
        shapes: StoredShapes = {
            self.key(EMBEDDING): (c.vocab_size, h),
            self.key("embeddings.position_embeddings.weight"): (c.max_position_embeddings, h),
            self.key("embeddings.LayerNorm.weight"): (h,),
            self.key("embeddings.LayerNorm.bias"): (h,),
            self.key("encoder.relative_attention_bias.weight"): (
                c.relative_attention_num_buckets,
                c.num_attention_heads,
            ),
        }
        for i in range(c.num_hidden_layers):
            shapes |= self.spec(i).shapes(c.intermediate_size)
        return shapes
