"""Define the config and recipe of I-BERT (Kim et al. 2021), a RoBERTa that may be quantized, without quantization."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.models.roberta import RobertaConfig, RobertaFlow
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource

# Ends of the keys of integer weights and ranges, which only quantized arithmetic reads.
QUANTIZED = ("scaling_factor", "_integer", ".x_min", ".x_max", "LayerNorm.shift", "layer_norm.shift")


@dataclass(frozen=True)
class IBertConfig(RobertaConfig):
    """Sizes of an I-BERT model."""

    defaults = {"vocab": 30522}
    inert = (*RobertaConfig.inert, "force_dequant")
    neutral = {**RobertaConfig.neutral, "quant_mode": (False,)}


@dataclass(frozen=True)
class IBertFlow(RobertaFlow):
    """The recipe of I-BERT: see `RobertaFlow`."""

    name: str = "ibert"

    config_type = IBertConfig

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        return RenamedSource(source, {key: key for key in source.keys() if not key.endswith(QUANTIZED)})
