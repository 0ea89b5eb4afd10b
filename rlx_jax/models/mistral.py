"""Mistral (`MistralForCausalLM`): Llama's layers with a window of the last keys."""

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
class MistralConfig:
    """Sizes of a Mistral model, under the names of Hugging Face's config.

    Every layer reads the last `sliding_window` keys only; None reads all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    inv_freq: Frequencies
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    tie_word_embeddings: bool = False

    @staticmethod
    def from_hf(config: Fields | Mapping[str, Any]) -> MistralConfig:
        """From `config.json`, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = decoder.fields(config)
        sizes = decoder.plain_sizes(c, max_positions=131072, kv_heads=8)
        result = MistralConfig(
            **sizes,
            sliding_window=c.whole_or_null("sliding_window", 4096),
        )
        c.finish()
        return result


@dataclass(frozen=True)
class MistralFlow:
    """The recipe. Inputs: `input_ids` `[batch, seq]`. Output: `logits` `[batch, seq, vocab]`, float32.

    The fields are those of `Llama32Flow`.
    """

    config: MistralConfig
    batch: int | None = None
    seq: int | None = None
    composed: bool = False
    name: str = "mistral"
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
        config: MistralConfig | Mapping[str, Any], batch: int | None = None, seq: int | None = None
    ) -> MistralFlow:
        """The forward program, bound to sizes where they are given; `config` may be the content of `config.json`."""
        return MistralFlow(config if isinstance(config, MistralConfig) else MistralConfig.from_hf(config), batch, seq)

    @staticmethod
    def for_decode(
        config: MistralConfig | Mapping[str, Any],
        batch: int | None = None,
        past: int | None = None,
        custom_mask: bool = False,
    ) -> MistralFlow:
        """Explicit decode: see `rlx_jax.models.decoder.as_decode`."""
        return decoder.as_decode(MistralFlow.for_prefill(config, batch), past, custom_mask)

    def spec(self, index: int = 0) -> LlamaDecoderSpec:
        """The spec of a layer: they are all alike."""
        c = self.config
        mask = decoder.mask_of(c.sliding_window)
        return LlamaDecoderSpec(c.num_attention_heads, c.head_dim, c.num_key_value_heads, c.rms_norm_eps, mask)

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights; without any, to their shapes."""
        layer = llama_prefill_layer_composed if self.composed else llama_prefill_layer_fused
        return decoder.decoder_flow(self, weight_specs(self.config), layer)


def weight_specs(config: MistralConfig, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    return decoder.model_specs(config, decoder.layer_shapes(config), dtype)
