"""Define the config and recipe of Qwen 3 with experts (`Qwen3MoeForCausalLM`).

It has Qwen 3's attention, and experts in some layers or in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import LayerSpec, MoeSpec
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import weight_specs as weight_specs
from rlx_jax.models.decoder_config import DecoderConfig, layer_of, plain_fields
from rlx_jax.models.mixture import MixtureFlow, experts_of


@dataclass(frozen=True)
class Qwen3MoeConfig(DecoderConfig):
    """Sizes of a Qwen 3 model with experts.

    Each expert is `moe_intermediate_size` wide; a token is routed to `num_experts_per_tok` of them. Every
    `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`; the others have an MLP that is
    `intermediate_size` wide. Every layer attends to the last `sliding_window` keys only; None for all.
    """

    max_position_embeddings: int = 32768
    attention_bias: bool = False
    sliding_window: int | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, c: Fields) -> Self:
        experts, top_k = experts_of(c, experts=cls.num_experts, top_k=cls.num_experts_per_tok)
        common = plain_fields(c, max_positions=cls.max_position_embeddings, kv_heads=4)
        count = common["num_hidden_layers"]
        mlp_layers = c.items(
            "mlp_only_layers", [], f"layers in [0, {count})", lambda i: type(i) is int and 0 <= i < count
        )
        window = c.integer_or_null("sliding_window", 4096)
        c.consumed.add("max_window_layers")  # the reference has one window for all layers
        return cls(
            **common,
            **c.with_defaults(cls, "attention_bias", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
            sliding_window=window if c.flag("use_sliding_window", False) else None,
            num_experts=experts,
            num_experts_per_tok=top_k,
            mlp_only_layers=tuple(sorted(set(mlp_layers))),
        )

    def layer_spec(self, index: int) -> LayerSpec:
        bias, moe = self.attention_bias, None
        if index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0:
            moe = MoeSpec(
                num_experts=self.num_experts, top_k=self.num_experts_per_tok, inner=self.moe_intermediate_size,
                normalise=self.norm_topk_prob,
            )  # fmt: skip
        return layer_of(self, window=self.sliding_window, qkv_bias=bias, output_bias=bias, qk_norm="heads", moe=moe)


@dataclass(frozen=True)
class Qwen3MoeFlow(MixtureFlow[Qwen3MoeConfig]):
    """The recipe of Qwen 3 with experts: see `DecoderFlow`."""

    name: str = "qwen3_moe"

    config_type = Qwen3MoeConfig
