"""Define the config and recipe of Mistral (`MistralForCausalLM`): Llama's layers with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import LayerSpec
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder_config import DecoderConfig, layer_of, plain_fields


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """Sizes of a Mistral model. Every layer attends to the last `sliding_window` keys only; None for all."""

    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(
            **plain_fields(c, max_positions=cls.max_position_embeddings, kv_heads=8),
            sliding_window=c.integer_or_null("sliding_window", cls.sliding_window),
        )

    def layer_spec(self, index: int) -> LayerSpec:
        return layer_of(self, window=self.sliding_window)


@dataclass(frozen=True)
class MistralFlow(DecoderFlow[MistralConfig]):
    """The recipe of Mistral: see `DecoderFlow`."""

    name: str = "mistral"

    config_type = MistralConfig
    fused = True
