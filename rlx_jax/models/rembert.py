"""Define the config and recipe of RemBERT (Chung et al. 2020): BERT with narrower embeddings at its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.heads import BERT_HEADS, MASKED, masked_head


@dataclass(frozen=True)
class RemBertConfig(BertConfig):
    """Sizes of a RemBERT model, with Hugging Face's field names."""

    output_embedding_size: int = 1664

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab": 250300, "hidden": 1152, "layers": 32, "heads": 18, "inner": 4608
    }  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(
            **cls.common_fields(c),
            embedding_size=c.integer("input_embedding_size", 256),
            output_embedding_size=c.integer("output_embedding_size", cls.output_embedding_size),
        )


@dataclass(frozen=True)
class RemBertFlow(BertLike[RemBertConfig]):
    """The recipe of RemBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "rembert"

    config_type = RemBertConfig
    prefixes = ("rembert",)
    head_prefixes = ("cls.", "classifier.", "qa_outputs.")
    heads = {
        **BERT_HEADS,
        MASKED: masked_head("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder"),
    }
    embedding_projection = "encoder.embedding_hidden_mapping_in"
