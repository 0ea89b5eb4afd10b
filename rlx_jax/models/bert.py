"""BERT (`BertModel` and the encoders inside task checkpoints): config → flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlx_jax.blocks import BertEncoderLayer, BertEncoderLayerSpec, BlockStage, Embed, GatherAdd, LayerNorm
from rlx_jax.blocks.encoder import bert_layer_prefix
from rlx_jax.errors import ConfigError
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, Fields
from rlx_jax.models.hooks import METHODS, Hooks
from rlx_jax.weights.source import WeightSource

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class BertConfig:
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

    @staticmethod
    def from_hf(config: Fields | Mapping[str, Any]) -> BertConfig:
        """From `config.json`.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = config if isinstance(config, Fields) else Fields(config, "config")
        hidden, heads = c.whole("hidden_size", 768), c.whole("num_attention_heads", 12, high=2**16)
        if hidden % heads:
            raise ConfigError(f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        c.choice("position_embedding_type", "absolute", {"absolute": ""})
        result = BertConfig(
            vocab_size=c.whole("vocab_size", 30522, high=MAX_VOCABULARY),
            hidden_size=hidden,
            intermediate_size=c.whole("intermediate_size", 3072),
            num_hidden_layers=c.whole("num_hidden_layers", 12, high=MAX_LAYERS),
            num_attention_heads=heads,
            max_position_embeddings=c.whole("max_position_embeddings", 512),
            type_vocab_size=c.whole("type_vocab_size", 2),
            layer_norm_eps=c.real("layer_norm_eps", 1e-12),
            activation=c.choice("hidden_act", "gelu", ACTIVATIONS),
        )
        c.finish(inert=("tie_word_embeddings",))
        return result


@dataclass(frozen=True)
class BertFlow:
    """The recipe. Inputs: `input_ids` `[batch, seq]`, and optionally `attention_mask` (1 keeps a key),
    `token_type_ids` (default 0) and `position_ids` (default 0, 1, 2 …). Output: `hidden_states` `[batch, seq, hidden]`.

    Args:
        prefix: `bert` for task checkpoints, empty for bare encoders.
        batch, seq: sizes to compile for ahead of the first call.
        weights: the checkpoint that the flow is bound to; without it the flow knows shapes only.
        hooks: see `rlx_jax.models.hooks`.
    """

    config: BertConfig
    prefix: str = ""
    name: str = "bert"
    batch: int | None = None
    seq: int | None = None
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    layer, before_layers, after_layers, after, patch_flow, profile, profile_near = METHODS

    def spec(self, index: int) -> BertEncoderLayerSpec:
        """The spec of a layer, which holds the layer's keys."""
        c, prefix = self.config, bert_layer_prefix(self.prefix, index)
        return BertEncoderLayerSpec.hf(prefix, c.hidden_size, c.num_attention_heads, c.layer_norm_eps, c.activation)

    def stage(self, index: int, spec: Any) -> BlockStage:
        """The family's own layer."""
        return BertEncoderLayer(spec)

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights; without any, to their shapes."""
        c, positions = self.config, self.config.max_position_embeddings
        p = f"{self.prefix}.embeddings" if self.prefix else "embeddings"
        weights = weight_specs(c, self.prefix) if self.weights is None else self.weights
        ids = ("batch", "seq")
        return (
            ModelFlow(self.name, profile=self.hooks.profile)
            .with_weights(weights, leave=left_keys(self.prefix))
            .input("input_ids", ids, dtype="int32")
            .input("attention_mask", ids, dtype="int32", default=None)
            .input("token_type_ids", ids, dtype="int32", default=0)
            .input("position_ids", ids, dtype="int32", default=POSITIONS)
            .bind(batch=self.batch, seq=self.seq)
            .stage(
                Embed(f"{p}.word_embeddings.weight", (c.vocab_size, c.hidden_size)),
                GatherAdd("token_type_ids", f"{p}.token_type_embeddings.weight", (c.type_vocab_size, c.hidden_size)),
                GatherAdd("position_ids", f"{p}.position_embeddings.weight", (positions, c.hidden_size)),
                LayerNorm(f"{p}.LayerNorm.weight", f"{p}.LayerNorm.bias", c.layer_norm_eps),
            )
            .patch(self.hooks.stack(c.num_hidden_layers, self.spec, self.stage))
            .patch(self.hooks.edit)
            .output("hidden_states")
        )


def weight_specs(config: BertConfig, prefix: str = "", dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    c, h, f = config, config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (c.vocab_size, h),
        "embeddings.token_type_embeddings.weight": (c.type_vocab_size, h),
        "embeddings.position_embeddings.weight": (c.max_position_embeddings, h),
        "embeddings.LayerNorm.weight": (h,),
        "embeddings.LayerNorm.bias": (h,),
    }
    linears = {f"attention.self.{n}": (h, h) for n in ("query", "key", "value")}
    linears |= {"attention.output.dense": (h, h), "intermediate.dense": (f, h), "output.dense": (h, f)}
    for i in range(c.num_hidden_layers):
        for name, shape in linears.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{i}.{name}.weight"] = shapes[f"encoder.layer.{i}.{name}.bias"] = (h,)
    lead = f"{prefix}." if prefix else ""
    return {lead + key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in shapes.items()}


def left_keys(prefix: str) -> tuple[str, ...]:
    """Keys that are left unread on purpose: position ids, the pooler and task heads."""
    lead = f"{prefix}." if prefix else ""
    return (f"{lead}embeddings.position_ids", f"{lead}pooler.", "pooler.", "cls.", "classifier.", "qa_outputs.")
