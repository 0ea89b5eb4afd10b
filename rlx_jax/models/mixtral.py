"""Define the config and recipe of Mixtral (`MixtralForCausalLM`).

It has Mistral's layers with experts; router weights are normalised over the chosen experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import MIXTRAL_KEYS, LayerSpec, MoeSpec
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import DecoderConfig, layer_of, plain_fields
from rlx_jax.models.mixture import MixtureFlow, experts_of


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """Sizes of a Mixtral model. `intermediate_size` is the width of an expert.

    Every layer attends to the last `sliding_window` keys only; None for all.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    @classmethod
    def read(cls, c: Fields) -> Self:
        experts, top_k = experts_of(c, experts=cls.num_local_experts, top_k=cls.num_experts_per_tok)
        return cls(
            **plain_fields(c, max_positions=cls.max_position_embeddings, kv_heads=8, eps=cls.rms_norm_eps, theta=1e6),
            sliding_window=c.integer_or_null("sliding_window", cls.sliding_window),
            num_local_experts=experts,
            num_experts_per_tok=top_k,
        )

    def layer_spec(self, index: int) -> LayerSpec:
        experts = MoeSpec(
            num_experts=self.num_local_experts, top_k=self.num_experts_per_tok, inner=self.intermediate_size,
            keys=MIXTRAL_KEYS,
        )  # fmt: skip
        return layer_of(self, window=self.sliding_window, moe=experts)


@dataclass(frozen=True)
class MixtralFlow(MixtureFlow[MixtralConfig]):
    """The recipe of Mixtral: see `DecoderFlow`."""

    name: str = "mixtral"

    config_type = MixtralConfig
