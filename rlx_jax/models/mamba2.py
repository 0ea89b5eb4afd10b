"""Define the config and recipe of Mamba-2 (`Mamba2ForCausalLM`): layers with a fixed-size state instead of
attention."""

from __future__ import annotations

import math
from typing import Any, Self

from rlx_jax.blocks import BlockStage, Mamba2Spec, RmsNorm, mamba2_layer
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ConfigError, quote
from rlx_jax.flow import ModelFlow
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, CausalConfig, Fields
from rlx_jax.models.decoder import CausalFlow, decoder_flow

# Fields about the chunks of a prompt, the initialization of weights, and residual sums, which have the dtype of the
# program here. `rms_norm` and `norm_before_gate` are from the first implementation; transformers does not read them.
INERT = (
    "chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min",
    "time_step_rank", "use_associative_scan", "norm_before_gate", "rms_norm", "fuse_norm",
)  # fmt: skip

# How files write infinity, which JSON does not have.
INFINITE = ("Infinity", "inf")


@dataclass(frozen=True)
class Mamba2Config(CausalConfig):
    """Sizes of a Mamba-2 model, with Hugging Face's field names. Its number of positions is unlimited."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mixer: Mamba2Spec
    max_position_embeddings: int = 2**31 - 1
    tie_word_embeddings: bool = False

    inert = INERT

    @classmethod
    def read(cls, c: Fields) -> Self:
        hidden = c.integer("hidden_size", 4096)
        return cls(
            vocab_size=c.integer("vocab_size", 32768, high=MAX_VOCABULARY),
            hidden_size=hidden,
            num_hidden_layers=c.integer("num_hidden_layers", 64, high=MAX_LAYERS),
            mixer=_mixer(c, hidden),
            tie_word_embeddings=c.flag("tie_word_embeddings", False),
        )


class Mamba2Flow(CausalFlow[Mamba2Config]):
    """The recipe of Mamba-2: see `CausalFlow`. The spec of every layer is a `Mamba2Spec`."""

    name = "mamba2"

    heads = {}

    @property
    def embedding(self) -> str:
        return "backbone.embeddings.weight"

    def spec(self, index: int = 0) -> Mamba2Spec:
        return self.config.mixer

    def stage(self, index: int, spec: Mamba2Spec) -> BlockStage:
        return mamba2_layer(index, spec)

    def assemble(self) -> ModelFlow:
        norm = RmsNorm("backbone.norm_f.weight", self.config.mixer.eps)
        return decoder_flow(self, self.stage, norm=norm)


def _mixer(c: Fields, hidden: int) -> Mamba2Spec:
    """Return the spec of the layers."""
    heads, width = c.integer("num_heads", 128, high=2**16), c.integer("head_dim", 64, high=2**16)
    expand = c.real("expand", 2)
    if int(hidden * expand) != heads * width:
        raise ConfigError(f"{c.where}: hidden_size {hidden} × expand {expand:g} is not {heads} heads × {width}")
    groups = c.integer("n_groups", 8, high=2**16)
    if heads % groups:
        raise ConfigError(f"{c.where}: num_heads {heads} is not a multiple of n_groups {groups}")
    return Mamba2Spec(
        heads=heads, head_dim=width, state_size=c.integer("state_size", 128, high=2**16), groups=groups,
        kernel=c.integer("conv_kernel", 4, high=2**10), bias=c.flag("use_bias", False),
        conv_bias=c.flag("use_conv_bias", True), eps=c.real("layer_norm_epsilon", 1e-5),
        time_step_limit=_time_step_limit(c),
        activation=c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu", "gelu": "gelu"}),
    )  # fmt: skip


def _time_step_limit(c: Fields) -> tuple[float, float | None]:
    """Return the minimum and maximum of a time step; the maximum is None for infinity."""
    values = c.items("time_step_limit", [0.0, math.inf], "numbers", lambda value: True, 2)
    low, high = (_number(c, value) for value in values)
    if not 0 <= low <= high or math.isinf(low):
        raise c.invalid("time_step_limit", "0 ≤ minimum ≤ maximum", values)
    return low, None if math.isinf(high) else high


def _number(c: Fields, value: Any) -> float:
    """Return a number of `time_step_limit`, which may be a string or an object for infinity."""
    if isinstance(value, dict) and list(value) == ["__float__"]:  # as transformers 5 writes it
        value = value["__float__"]
    if value in INFINITE:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(f"{c.where}: field 'time_step_limit' has {quote(value)}; expected a number")
    return float(value)
