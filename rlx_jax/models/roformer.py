"""Define the config and recipe of RoFormer (Su et al. 2021): BERT with rotary positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rlx_jax.blocks import EncoderKeys, EncoderLayerSpec, frequencies
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import even_head_dim
from rlx_jax.models.heads import BERT_HEADS, HIDDEN_ACT, SEQUENCE, HeadLayer
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.overlay import has_values
from rlx_jax.weights.source import WeightSource

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
