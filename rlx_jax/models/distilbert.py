"""Define the config and recipe of DistilBERT (Sanh et al. 2019): BERT without token types, under other names."""

from __future__ import annotations

from typing import Self

from rlx_jax.blocks.encoder import STYLES
from rlx_jax.dataclasses import dataclass
from rlx_jax.flow import POSITIONS
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import ACTIVATIONS, MAX_LAYERS, MAX_VOCABULARY, Fields, width_and_heads
from rlx_jax.models.encoder import MASKED, SEQUENCE, HeadLayer, masked_head, token_heads


@dataclass(frozen=True)
class DistilBertConfig(BertConfig):
    """Sizes of a DistilBERT model."""

    type_vocab_size: int = 0

    # How the position table was initialised; the checkpoint has its values.
    inert = ("tie_word_embeddings", "tie_weights_", "sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout")
    neutral = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        width, heads = width_and_heads(c, names=("dim", "n_heads"))
        return cls(
            vocab_size=c.integer("vocab_size", 30522, high=MAX_VOCABULARY),
            hidden_size=width,
            intermediate_size=c.integer("hidden_dim", 3072),
            num_hidden_layers=c.integer("n_layers", 6, high=MAX_LAYERS),
            num_attention_heads=heads,
            max_position_embeddings=c.integer("max_position_embeddings", 512),
            activation=c.choice("activation", "gelu", ACTIVATIONS),
        )


class DistilBertFlow(BertLike[DistilBertConfig]):
    """The recipe of DistilBERT: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name = "distilbert"

    heads = {
        SEQUENCE: (HeadLayer("pre_classifier", "relu"), HeadLayer("classifier")),
        MASKED: masked_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        **token_heads(),
    }
    optional_inputs = (("attention_mask", None), ("position_ids", POSITIONS))
    layer_keys = STYLES["distilbert"]
    layers = "transformer.layer.{}"
