"""Define the config and recipe of Llama 2 and 3.x (`LlamaForCausalLM`), from which the other decoders differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from rlx_jax.blocks import LayerSpec
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.config import Fields, architecture
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder import weight_specs as weight_specs
from rlx_jax.models.decoder_config import DecoderConfig, Windows, layer_of, qwen_windows, window_at
from rlx_jax.models.encoder import DECODER_HEADS, SEQUENCE


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama model; `attention_bias` adds a bias to all four projections."""

    attention_bias: bool = False
    mlp_bias: bool = False

    fields = ("attention_bias", "mlp_bias")

    def layer_spec(self, index: int) -> LayerSpec:
        return layer_of(self, qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias)


class Llama32Flow(DecoderFlow[LlamaConfig]):
    """The recipe of Llama: see `DecoderFlow`."""

    name = "llama"

    fused = True


class LlamaBidirectionalConfig(LlamaConfig):
    """Sizes of NVIDIA's `llama_bidirec`: a Llama in which tokens also read later ones.

    A classifier pools by the mean; the encoder leaves pooling to the modules of sentence-transformers.
    """

    neutral = {**LlamaConfig.neutral, "pooling": ("avg",)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        if architecture(c)[1].endswith("Model"):  # the temperature divides the logits of a classifier
            c.consumed.add("temperature")
        elif (temperature := c.real("temperature", 1.0)) != 1:
            raise UnsupportedError(f"{c.where}: field 'temperature' is {temperature}; supported is 1.0")
        return replace(super().read(c), bidirectional=True)


class LlamaBidirectionalFlow(Llama32Flow):
    """The recipe of `llama_bidirec`: see `DecoderFlow`."""

    name = "llama-bidirectional"

    config_type = LlamaBidirectionalConfig
    heads = {SEQUENCE: DECODER_HEADS[SEQUENCE]}
    head_token = ("mean", None)


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """Sizes of a Mistral model. Every layer attends to the last `sliding_window` keys only; None for all."""

    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    defaults = {"kv_heads": 8}

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(**cls.common_fields(c), sliding_window=c.integer_or_null("sliding_window", cls.sliding_window))

    def layer_spec(self, index: int) -> LayerSpec:
        return layer_of(self, window=self.sliding_window)


class MistralFlow(DecoderFlow[MistralConfig]):
    """The recipe of Mistral: see `DecoderFlow`."""

    name = "mistral"

    fused = True


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """Sizes of a Qwen 2 model.

    `windows[i]` is the number of keys that layer i attends to, None for all; empty for no windows.
    """

    max_position_embeddings: int = 32768
    windows: Windows = ()

    defaults: ClassVar[Mapping[str, Any]] = {"kv_heads": 32}

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        return cls(**common, windows=qwen_windows(c, common["num_hidden_layers"]))

    def layer_spec(self, index: int) -> LayerSpec:
        return layer_of(self, window=window_at(self.windows, index), qkv_bias=True)


class Qwen2Flow(DecoderFlow[Qwen2Config]):
    """The recipe of Qwen 2: see `DecoderFlow`."""

    name = "qwen2"


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Sizes of a Qwen 3 model: see `Qwen2Config`."""

    attention_bias: bool = False

    defaults = {"kv_heads": 32, "head_dim": 128}
    fields = ("attention_bias",)

    def layer_spec(self, index: int) -> LayerSpec:
        bias = self.attention_bias
        return layer_of(self, window=window_at(self.windows, index), qkv_bias=bias, output_bias=bias, qk_norm="heads")


class Qwen3Flow(DecoderFlow[Qwen3Config]):
    """The recipe of Qwen 3: see `DecoderFlow`."""

    name = "qwen3"
