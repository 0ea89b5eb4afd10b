"""Define the config and recipe of ALBERT (Lan et al. 2019): BERT with narrower embeddings and shared layers."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.heads import MASKED, SEQUENCE, HeadLayer, masked_head, token_heads


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """Sizes of an ALBERT model, with Hugging Face's field names. The layers of a group share their weights."""

    embedding_size: int = 128
    num_hidden_groups: int = 1

    defaults = {"vocab": 30000, "inner": 16384, "hidden": 4096, "heads": 64, "activation": "gelu_new"}
    fields = {"embedding_size": "embedding_size", "num_hidden_groups": "num_hidden_groups"}
    neutral = {**BertConfig.neutral, "inner_group_num": (1,)}


@dataclass(frozen=True)
class AlbertFlow(BertLike[AlbertConfig]):
    """The recipe of ALBERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "albert"

    config_type = AlbertConfig
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
