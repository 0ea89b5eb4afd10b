"""Define the config and recipe of BERT (`BertModel`, and the encoders inside task checkpoints)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

from rlx_jax.blocks import BertEncoderLayer, BertEncoderLayerSpec, BlockStage, Embed, GatherAdd, LayerNorm, Linear
from rlx_jax.blocks.encoder import bert_layer_prefix
from rlx_jax.flow import declared_shapes
from rlx_jax.models.config import Fields, TokenConfig, text_fields
from rlx_jax.models.encoder import EncoderFlow
from rlx_jax.models.heads import BERT_HEADS


@dataclass(frozen=True)
class BertConfig(TokenConfig):
    """Sizes of a BERT model, with Hugging Face's field names.

    `embedding_size`: width of the embeddings, which are projected to hidden states; 0 without a projection.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    activation: str = "gelu"
    embedding_size: int = 0

    inert: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"position_embedding_type": ("absolute",)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(**text_fields(c, 30522), type_vocab_size=c.integer("type_vocab_size", 2))


B = TypeVar("B", bound=BertConfig)


@dataclass(frozen=True)
class BertLike(EncoderFlow[B]):
    """The recipe of BERT-like families: see `EncoderFlow`.

    A family may define how positions are embedded, and its style of keys.
    """

    style: ClassVar[str] = "bert"
    # Key of the projection from embeddings to hidden states, of a family with narrower embeddings.
    embedding_projection: ClassVar[str] = ""

    def positions(self, key: str) -> BlockStage:
        """Return the stage that adds position embeddings from the table with this key."""
        return GatherAdd("position_ids", key, self.table)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c, p, width = self.config, self.key("embeddings"), self.config.embedding_size or self.config.hidden_size
        types = GatherAdd("token_type_ids", f"{p}.token_type_embeddings.weight", (c.type_vocab_size, width))
        projection = self.key(self.embedding_projection)
        return (
            Embed(f"{p}.word_embeddings.weight", (c.vocab_size, width)),
            *([types] if c.type_vocab_size else []),  # MPNet has no token types
            self.positions(f"{p}.position_embeddings.weight"),
            LayerNorm(f"{p}.LayerNorm.weight", f"{p}.LayerNorm.bias", c.layer_norm_eps),
            *([_linear(projection, (c.hidden_size, width))] if c.embedding_size else []),
        )

    @property
    def table(self) -> tuple[int, int]:
        """Shape of the table of position embeddings."""
        return self.config.max_position_embeddings, self.config.embedding_size or self.config.hidden_size

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the keys of layer `index`."""
        return bert_layer_prefix(self.prefix, index)

    def spec(self, index: int) -> BertEncoderLayerSpec:
        c = self.config
        return BertEncoderLayerSpec.hf(
            self.layer_prefix(index), c.hidden_size, c.num_attention_heads, c.layer_norm_eps,
            c.activation, self.style, c.intermediate_size,
        )  # fmt: skip

    def stage(self, index: int, spec: BertEncoderLayerSpec) -> BlockStage:
        return BertEncoderLayer(spec)


@dataclass(frozen=True)
class BertFlow(BertLike[BertConfig]):
    """The recipe of BERT: see `EncoderFlow`.

    Optional inputs are `attention_mask`, `token_type_ids` (default 0) and `position_ids` (default 0, 1, 2 …).
    """

    name: str = "bert"

    config_type = BertConfig
    prefixes = ("bert",)
    head_prefixes = ("cls.", "classifier.", "qa_outputs.")
    heads = BERT_HEADS


def _linear(key: str, shape: tuple[int, int]) -> Linear:
    return Linear(f"{key}.weight", bias_key=f"{key}.bias", shape=shape)


def weight_specs(config: BertConfig, prefix: str = "", dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every checkpoint key, to compile or `init` without a checkpoint."""
    return declared_shapes(BertFlow(config, prefix=prefix).assemble(), dtype)
