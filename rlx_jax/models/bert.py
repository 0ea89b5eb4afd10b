"""BERT (`BertModel` and the encoders inside task checkpoints): config → flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import numpy as np

from rlx_jax.blocks import BertEncoderLayer, BertEncoderLayerSpec, BlockStage, Embed, GatherAdd, LayerNorm
from rlx_jax.blocks.encoder import bert_layer_prefix
from rlx_jax.models.config import Fields, ModelConfig, text_fields
from rlx_jax.models.encoder import EMBEDDING, EncoderFlow, StoredShapes


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """Sizes of a BERT model, under the names of Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    activation: str = "gelu"

    inert: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"position_embedding_type": ("absolute",)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(**text_fields(c, 30522), type_vocab_size=c.whole("type_vocab_size", 2))


@dataclass(frozen=True)
class BertFlow(EncoderFlow[BertConfig]):
    """The recipe of BERT: see `EncoderFlow`. Optional are `attention_mask`, `token_type_ids` (default 0) and
    `position_ids` (default 0, 1, 2 …)."""

    name: str = "bert"

    config_type = BertConfig
    prefixes = ("bert",)
    heads = ("cls.", "classifier.", "qa_outputs.")

    def opening(self) -> tuple[BlockStage, ...]:
        c, p = self.config, self.key("embeddings")
        positions = (c.max_position_embeddings, c.hidden_size)
        return (
            Embed(f"{p}.word_embeddings.weight", (c.vocab_size, c.hidden_size)),
            GatherAdd("token_type_ids", f"{p}.token_type_embeddings.weight", (c.type_vocab_size, c.hidden_size)),
            GatherAdd("position_ids", f"{p}.position_embeddings.weight", positions),
            LayerNorm(f"{p}.LayerNorm.weight", f"{p}.LayerNorm.bias", c.layer_norm_eps),
        )

    def spec(self, index: int) -> BertEncoderLayerSpec:
        return layer_spec(self.config, self.prefix, index)

    def stage(self, index: int, spec: BertEncoderLayerSpec) -> BlockStage:
        return BertEncoderLayer(spec)

    def stored(self) -> StoredShapes:
        return stored_shapes(self.config, self.prefix)


def layer_spec(config: BertConfig, prefix: str, index: int) -> BertEncoderLayerSpec:
    """The spec of a layer in a checkpoint whose keys begin with `prefix`."""
    c, p = config, bert_layer_prefix(prefix, index)
    return BertEncoderLayerSpec.hf(p, c.hidden_size, c.num_attention_heads, c.layer_norm_eps, c.activation)


def stored_shapes(config: BertConfig, prefix: str) -> StoredShapes:
    """The shape of every weight, by its key."""
    c, h = config, config.hidden_size
    ends: StoredShapes = {
        EMBEDDING: (c.vocab_size, h),
        "embeddings.token_type_embeddings.weight": (c.type_vocab_size, h),
        "embeddings.position_embeddings.weight": (c.max_position_embeddings, h),
        "embeddings.LayerNorm.weight": (h,),
        "embeddings.LayerNorm.bias": (h,),
    }
    shapes = {f"{prefix}.{name}" if prefix else name: shape for name, shape in ends.items()}
    for i in range(c.num_hidden_layers):
        shapes |= layer_spec(c, prefix, i).shapes(c.intermediate_size)
    return shapes


def weight_specs(config: BertConfig, prefix: str = "", dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    return {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in stored_shapes(config, prefix).items()}
