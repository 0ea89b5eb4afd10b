"""Define the config and recipe of ALBERT (Lan et al. 2019): BERT with narrower embeddings and shared layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.errors import UnsupportedError
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.heads import MASKED, SEQUENCE, HeadLayer, masked_head, token_heads


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """Sizes of an ALBERT model, with Hugging Face's field names. The layers of a group share their weights."""

    num_hidden_groups: int = 1

    @classmethod
    def read(cls, c: Fields) -> Self:
        if (inner := c.integer("inner_group_num", 1)) != 1:
            raise UnsupportedError(f"{c.where}: field 'inner_group_num' is {inner}; supported is 1")
        return cls(
            **text_fields(c, 30000, inner=16384, hidden=4096, heads=64, activation="gelu_new"),
            type_vocab_size=c.integer("type_vocab_size", 2),
            embedding_size=c.integer("embedding_size", 128),
            num_hidden_groups=c.integer("num_hidden_groups", 1),
        )


@dataclass(frozen=True)
class AlbertFlow(BertLike[AlbertConfig]):
    """The recipe of ALBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "albert"

    config_type = AlbertConfig
    prefixes = ("albert",)
    head_prefixes = ("predictions.", "sop_classifier.", "classifier.", "qa_outputs.")
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
