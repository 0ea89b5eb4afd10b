"""Define the config and recipe of BigBird (Zaheer et al. 2020): BERT for long texts, built for texts whose tokens read
all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rlx_jax.blocks import BlockStage, EmbedScale, EncoderKeys, EncoderLayerSpec
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.heads import BERT_MASKED, HIDDEN_ACT, MASKED, SEQUENCE, TOKEN, HeadLayer


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
