"""Define the config and recipe of Llama 2 and 3.x (`LlamaForCausalLM`), from which the other decoders differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import LayerSpec
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder import weight_specs as weight_specs
from rlx_jax.models.decoder_config import DecoderConfig, layer_of, plain_fields


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama model; `attention_bias` adds a bias to all four projections."""

    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(
            **plain_fields(c, max_positions=cls.max_position_embeddings),
            **c.with_defaults(cls, "attention_bias", "mlp_bias"),
        )

    def layer_spec(self, index: int) -> LayerSpec:
        return layer_of(self, qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias)


@dataclass(frozen=True)
class Llama32Flow(DecoderFlow[LlamaConfig]):
    """The recipe of Llama: see `DecoderFlow`."""

    name: str = "llama"

    config_type = LlamaConfig
    fused = True
