"""Define the config and recipe of ELECTRA (Clark et al. 2020): BERT with narrower embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.heads import MASKED, SEQUENCE, HeadLayer, masked_head, token_heads


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Sizes of an ELECTRA model, with Hugging Face's field names."""

    defaults = {"vocab": 30522, "inner": 1024, "hidden": 256, "heads": 4}

    @classmethod
    def read(cls, c: Fields) -> Self:
        sizes = super().read(c)
        width = c.integer("embedding_size", 128)
        return replace(sizes, embedding_size=0 if width == sizes.hidden_size else width)


@dataclass(frozen=True)
class ElectraFlow(BertLike[ElectraConfig]):
    """The recipe of ELECTRA: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "electra"

    config_type = ElectraConfig
    heads = {
        SEQUENCE: (HeadLayer("classifier.dense", "gelu"), HeadLayer("classifier.out_proj")),
        MASKED: masked_head(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", activation="gelu"
        ),
        **token_heads(),
    }
    embedding_projection = "embeddings_project"
