"""Define the config and recipe of RoFormer (Su et al. 2021): BERT with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from rlx_jax.blocks import EncoderKeys, EncoderLayerSpec, frequencies
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import even_head_dim
from rlx_jax.models.heads import BERT_HEADS, HIDDEN_ACT, SEQUENCE, HeadLayer, HeadLayers


@dataclass(frozen=True)
class RoFormerConfig(BertConfig):
    """Sizes of a RoFormer model, with Hugging Face's field names."""

    defaults: ClassVar[Mapping[str, Any]] = {"vocab": 50000, "positions": 1536}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rotary_value": (False,)}

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
    prefixes = ("roformer",)
    head_prefixes = ("cls.", "classifier.", "qa_outputs.")
    heads: ClassVar[HeadLayers] = {
        **BERT_HEADS,
        SEQUENCE: (HeadLayer("classifier.dense", HIDDEN_ACT), HeadLayer("classifier.out_proj")),
    }
    optional_inputs = (("attention_mask", None), ("token_type_ids", 0))
    layer_keys: ClassVar[EncoderKeys | None] = STYLES["bert"]
    embedding_projection = "embeddings_project"

    def unread_keys(self) -> tuple[str, ...]:
        return (*super().unread_keys(), self.key("encoder.embed_positions.weight"))  # cos and sin are computed

    def layer_spec(self, index: int, keys: EncoderKeys) -> EncoderLayerSpec:
        return replace(super().layer_spec(index, keys), rope_style="interleaved")
