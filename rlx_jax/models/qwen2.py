"""Define the config and recipe of Qwen 2 and 2.5 (`Qwen2ForCausalLM`).

They have biases on q, k and v, and optional windows on the later layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import LayerSpec
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder_config import DecoderConfig, Windows, layer_of, plain_fields, qwen_windows, window_at


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """Sizes of a Qwen 2 model.

    `windows[i]` is the number of keys that layer i attends to, None for all; empty for no windows.
    """

    max_position_embeddings: int = 32768
    windows: Windows = ()

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = plain_fields(c, max_positions=cls.max_position_embeddings, kv_heads=32)
        return cls(**common, windows=qwen_windows(c, common["num_hidden_layers"]))

    def layer_spec(self, index: int) -> LayerSpec:
        return layer_of(self, window=window_at(self.windows, index), qkv_bias=True)


@dataclass(frozen=True)
class Qwen2Flow(DecoderFlow[Qwen2Config]):
    """The recipe of Qwen 2: see `DecoderFlow`."""

    name: str = "qwen2"

    config_type = Qwen2Config
