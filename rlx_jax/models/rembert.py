"""Define the config and recipe of RemBERT (Chung et al. 2020): BERT with narrower embeddings at its input."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.heads import BERT_HEADS, MASKED, masked_head


@dataclass(frozen=True)
class RemBertConfig(BertConfig):
    """Sizes of a RemBERT model, with Hugging Face's field names."""

    embedding_size: int = 256
    output_embedding_size: int = 1664

    defaults = {"vocab": 250300, "hidden": 1152, "layers": 32, "heads": 18, "inner": 4608}
    fields = {"embedding_size": "input_embedding_size", "output_embedding_size": "output_embedding_size"}


@dataclass(frozen=True)
class RemBertFlow(BertLike[RemBertConfig]):
    """The recipe of RemBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "rembert"

    config_type = RemBertConfig
    heads = {
        **BERT_HEADS,
        MASKED: masked_head("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder"),
    }
    embedding_projection = "encoder.embedding_hidden_mapping_in"
