"""Qwen 3 (`Qwen3ForCausalLM`): a norm of every query and key head; windows on the later layers if the config asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlx_jax.blocks import Qwen3DecoderSpec, qwen3_prefill_layer_composed, qwen3_prefill_layer_fused
from rlx_jax.blocks.rope import Frequencies
from rlx_jax.flow import ModelFlow
from rlx_jax.models import decoder
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import Decode
from rlx_jax.models.hooks import METHODS, Hooks
from rlx_jax.weights.source import WeightSource


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen 3 model, under the names of Hugging Face's config.

    `windows[i]` is how many keys layer i reads, None for all; empty for none in any layer.
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
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    windows: decoder.Windows = ()
    tie_word_embeddings: bool = False

    @staticmethod
    def from_hf(config: Fields | Mapping[str, Any]) -> Qwen3Config:
        """From `config.json`, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = decoder.fields(config)
        sizes = decoder.plain_sizes(c, max_positions=32768, kv_heads=32, head_dim=128)
        result = Qwen3Config(
            **sizes,
            attention_bias=c.flag("attention_bias", False),
            windows=decoder.qwen_windows(c, sizes["num_hidden_layers"]),
        )
        c.finish()
        return result


@dataclass(frozen=True)
class Qwen3Flow:
    """The recipe. Inputs: `input_ids` `[batch, seq]`. Output: `logits` `[batch, seq, vocab]`, float32.

    The fields are those of `Llama32Flow`.
    """

    config: Qwen3Config
    batch: int | None = None
    seq: int | None = None
    composed: bool = False
    name: str = "qwen3"
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
        config: Qwen3Config | Mapping[str, Any], batch: int | None = None, seq: int | None = None
    ) -> Qwen3Flow:
        """The forward program, bound to sizes where they are given; `config` may be the content of `config.json`."""
        return Qwen3Flow(config if isinstance(config, Qwen3Config) else Qwen3Config.from_hf(config), batch, seq)

    @staticmethod
    def for_decode(
        config: Qwen3Config | Mapping[str, Any],
        batch: int | None = None,
        past: int | None = None,
        custom_mask: bool = False,
    ) -> Qwen3Flow:
        """Explicit decode: see `rlx_jax.models.decoder.as_decode`."""
        return decoder.as_decode(Qwen3Flow.for_prefill(config, batch), past, custom_mask)

    def spec(self, index: int = 0) -> Qwen3DecoderSpec:
        """The spec of layer `index`: they differ in their windows."""
        c = self.config
        return Qwen3DecoderSpec(
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rms_norm_eps,
            attention_bias=c.attention_bias,
            output_bias=c.attention_bias,
            mask=decoder.mask_of(c.windows[index] if c.windows else None),
        )

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights; without any, to their shapes."""
        layer = qwen3_prefill_layer_composed if self.composed else qwen3_prefill_layer_fused
        return decoder.decoder_flow(self, weight_specs(self.config), layer)


def weight_specs(config: Qwen3Config, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    layer = decoder.layer_shapes(config, decoder.ATTENTION * config.attention_bias)
    norms = {f"self_attn.{n}_norm.weight": (config.head_dim,) for n in "qk"}
    return decoder.model_specs(config, layer | norms, dtype)
