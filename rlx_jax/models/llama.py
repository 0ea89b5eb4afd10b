"""Llama 2 and 3.x (`LlamaForCausalLM`): config → flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlx_jax.blocks import LlamaDecoderSpec, llama_prefill_layer_composed, llama_prefill_layer_fused
from rlx_jax.blocks.rope import Frequencies
from rlx_jax.flow import ModelFlow
from rlx_jax.models import decoder
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import Decode
from rlx_jax.models.hooks import METHODS, Hooks
from rlx_jax.weights.source import WeightSource


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model, under the names of Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    inv_freq: Frequencies
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @staticmethod
    def from_hf(config: Fields | Mapping[str, Any]) -> LlamaConfig:
        """From `config.json`, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = decoder.fields(config)
        sizes = decoder.plain_sizes(c, max_positions=2048)
        result = LlamaConfig(
            **sizes,
            attention_bias=c.flag("attention_bias", False),
            mlp_bias=c.flag("mlp_bias", False),
        )
        c.finish()
        return result


@dataclass(frozen=True)
class Llama32Flow:
    """The recipe. Inputs: `input_ids` `[batch, seq]`. Output: `logits` `[batch, seq, vocab]`, float32.

    Args:
        batch, seq: sizes to compile for ahead of the first call.
        composed: build the layers from small stages instead of one block; the numbers are the same.
        hidden_only: no head. Output: `hidden`, the normalised `[batch, seq, hidden]`.
        last_token_logits: the head of each row's last token only: `[batch, 1, vocab]`.
        inputs_embeds: the input is `inputs_embeds` `[batch, seq, hidden]` float32 instead of ids.
        export_kv: side outputs `kv.{i}.k` and `kv.{i}.v` `[batch, seq, K·D]` of every layer, the keys rotated.
        decode: explicit decode; see `rlx_jax.models.decoder.as_decode`.
        weights: the checkpoint that the flow is bound to; without it the flow knows shapes only.
        hooks: see `rlx_jax.models.hooks`.
    """

    config: LlamaConfig
    batch: int | None = None
    seq: int | None = None
    composed: bool = False
    name: str = "llama"
    hidden_only: bool = False
    last_token_logits: bool = False
    inputs_embeds: bool = False
    export_kv: bool = False
    decode: Decode | None = None
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    layer, before_layers, after_layers, after, patch_flow, profile, profile_near = METHODS

    @staticmethod
    def for_prefill(
        config: LlamaConfig | Mapping[str, Any], batch: int | None = None, seq: int | None = None
    ) -> Llama32Flow:
        """The forward program, bound to sizes where they are given; `config` may be the content of `config.json`."""
        return Llama32Flow(config if isinstance(config, LlamaConfig) else LlamaConfig.from_hf(config), batch, seq)

    @staticmethod
    def for_decode(
        config: LlamaConfig | Mapping[str, Any],
        batch: int | None = None,
        past: int | None = None,
        custom_mask: bool = False,
    ) -> Llama32Flow:
        """Explicit decode: see `rlx_jax.models.decoder.as_decode`."""
        return decoder.as_decode(Llama32Flow.for_prefill(config, batch), past, custom_mask)

    def spec(self, index: int = 0) -> LlamaDecoderSpec:
        """The spec of a layer: they are all alike."""
        c = self.config
        return LlamaDecoderSpec(
            c.num_attention_heads,
            c.head_dim,
            c.num_key_value_heads,
            c.rms_norm_eps,
            attention_bias=c.attention_bias,
            mlp_bias=c.mlp_bias,
        )

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights; without any, to their shapes."""
        layer = llama_prefill_layer_composed if self.composed else llama_prefill_layer_fused
        return decoder.decoder_flow(self, weight_specs(self.config), layer)


def weight_specs(config: LlamaConfig, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    biased = decoder.ATTENTION * config.attention_bias + decoder.MLP * config.mlp_bias
    return decoder.model_specs(config, decoder.layer_shapes(config, biased), dtype)
