"""Define the config and recipe of Megatron-BERT: BERT with norms before the halves of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlx_jax.blocks.encoder import STYLES
from rlx_jax.models.bert import BertConfig, BertLike


@dataclass(frozen=True)
class MegatronBertConfig(BertConfig):
    """Sizes of a Megatron-BERT model."""

    defaults = {"vocab": 29056, "hidden": 1024, "layers": 24, "heads": 16, "inner": 4096}


@dataclass(frozen=True)
class MegatronBertFlow(BertLike[MegatronBertConfig]):
    """The recipe of Megatron-BERT: see `EncoderFlow`. Optional inputs are as of `BertFlow`."""

    name: str = "megatron-bert"

    config_type = MegatronBertConfig
    layer_keys = replace(STYLES["bert"], attention_norm="attention.ln", mlp_norm="ln")
    pre_norm = True
    embedding_norm = ""
    final_norm = "encoder.ln"
