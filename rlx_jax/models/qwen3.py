"""Define the config and recipe of Qwen 3 (`Qwen3ForCausalLM`).

It has a norm of every query and key head, and optional windows on the later layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import LayerSpec
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder import weight_specs as weight_specs
from rlx_jax.models.decoder_config import DecoderConfig, Windows, layer_of, plain_fields, qwen_windows, window_at


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a Qwen 3 model.

    `windows[i]` is the number of keys that layer i attends to, None for all; empty for no windows.
    """

    max_position_embeddings: int = 32768
    attention_bias: bool = False
    windows: Windows = ()

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = plain_fields(c, max_positions=cls.max_position_embeddings, kv_heads=32, head_dim=128)
        return cls(
            **common,
            attention_bias=c.flag("attention_bias", cls.attention_bias),
            windows=qwen_windows(c, common["num_hidden_layers"]),
        )

    def layer_spec(self, index: int) -> LayerSpec:
        bias = self.attention_bias
        return layer_of(self, window=window_at(self.windows, index), qkv_bias=bias, output_bias=bias, qk_norm="heads")


@dataclass(frozen=True)
class Qwen3Flow(DecoderFlow[Qwen3Config]):
    """The recipe of Qwen 3: see `DecoderFlow`."""

    name: str = "qwen3"

    config_type = Qwen3Config
