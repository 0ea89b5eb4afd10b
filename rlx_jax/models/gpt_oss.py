"""Define the config and recipe of gpt-oss (`GptOssForCausalLM`).

It has attention with sinks, a window in every second layer, and experts with biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rlx_jax.blocks import GPT_OSS_KEYS, ClampedGate, LayerSpec, MoeSpec
from rlx_jax.errors import UnsupportedError, quote
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder_config import (
    DecoderConfig,
    ScaledRope,
    Windows,
    common_fields,
    frequencies_of,
    layer_of,
    layer_windows,
    window_at,
)
from rlx_jax.models.mixture import experts_of
from rlx_jax.weights.mxfp4 import with_mxfp4_weights
from rlx_jax.weights.source import WeightSource

# The rope of a config without rope fields, as in the reference.
THETA = 150000.0
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """Sizes of a gpt-oss model.

    Attributes:
        intermediate_size: width of an expert.
        windows: number of keys that each layer attends to; None for all.
        swiglu_limit, swiglu_alpha: parameters of the gate, see `ClampedGate`.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    attention_bias: bool = True
    windows: Windows = ()
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    inert = ("experts_per_token", "initial_context_length")

    @classmethod
    def read(cls, c: Fields) -> Self:
        experts, top_k = experts_of(c, experts=cls.num_local_experts, top_k=cls.num_experts_per_tok)
        positions, eps = cls.max_position_embeddings, cls.rms_norm_eps
        common = common_fields(c, max_positions=positions, kv_heads=8, head_dim=64, eps=eps)
        c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        check_packing(c)
        rope, layers = _rope(c, common), common["num_hidden_layers"]
        return cls(
            **common,
            inv_freq=rope.inv_freq,
            rope_factor=rope.factor,
            windows=layer_windows(c, layers, c.integer_or_null("sliding_window", 128), lambda i: i % 2 == 0),
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            **c.with_defaults(cls, "attention_bias", "swiglu_limit", "swiglu_alpha"),
        )

    def layer_spec(self, index: int) -> LayerSpec:
        bias = self.attention_bias
        experts = MoeSpec(
            num_experts=self.num_local_experts, top_k=self.num_experts_per_tok, inner=self.intermediate_size,
            scores="chosen", normalise=False, keys=GPT_OSS_KEYS,
            clamp=ClampedGate(self.swiglu_limit, self.swiglu_alpha, offset=1.0),
        )  # fmt: skip
        window = window_at(self.windows, index)
        return layer_of(self, window=window, qkv_bias=bias, output_bias=bias, sinks=True, moe=experts)


@dataclass(frozen=True)
class GptOssFlow(DecoderFlow[GptOssConfig]):
    """The recipe of gpt-oss: see `DecoderFlow`."""

    name: str = "gpt_oss"

    config_type = GptOssConfig

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return the weights of a checkpoint, in which MXFP4 experts are packed weights."""
        return super().adapt_weights(with_mxfp4_weights(source))


def check_packing(c: Fields) -> None:
    """Check that `quantization_config` is MXFP4; its weights are recognized by their keys.

    Raises:
        UnsupportedError: another quantization method.
    """
    group = c.group("quantization_config")
    if group is None:
        return
    method = group.text("quant_method", "")
    if method != "mxfp4":
        raise UnsupportedError(f"{group.where}: field 'quant_method' is {quote(method)}; supported is mxfp4")
    group.finish(("modules_to_not_convert", "dequantize"))


def _rope(c: Fields, common: Mapping[str, Any]) -> ScaledRope:
    """Return the rope of a config; a config without rope fields has the default `YARN`."""
    group, scaling = c.group("rope_parameters"), c.group("rope_scaling")
    if group is None and scaling is None:
        group = Fields(YARN, f"{c.where}, rope_parameters")
    positions = common["max_position_embeddings"]
    return frequencies_of(c, group, scaling, common["head_dim"], default=THETA, max_positions=positions)
