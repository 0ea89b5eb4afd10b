"""Define the recipe of decoders with experts, and read the fields that their configs share."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from rlx_jax.blocks import GPT_OSS_KEYS, MIXTRAL_KEYS, STACKED_KEYS, ClampedGate, ExpertKeys, LayerSpec, MoeSpec
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder import weight_specs as weight_specs
from rlx_jax.models.decoder_config import (
    DecoderConfig,
    Windows,
    common_fields,
    layer_of,
    layer_windows,
    rope_of,
    window_at,
)
from rlx_jax.weights.quantized import with_mxfp4_weights
from rlx_jax.weights.source import WeightSource

C = TypeVar("C", bound=DecoderConfig)


@dataclass(frozen=True)
class MixtureFlow(DecoderFlow[C]):
    """The recipe of a decoder with experts: see `DecoderFlow`.

    `layout`: keys of the experts, if a checkpoint stores them differently from the family's default.
    """

    layout: ExpertKeys | None = None

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe for stacked experts if the checkpoint stores them as transformers 5 has them in memory."""
        layers, source = range(self.config.num_hidden_layers), self.adapt_weights(source)
        stacked = any(source.has(f"model.layers.{i}.{STACKED_KEYS.gate}") for i in layers)
        return replace(self, layout=STACKED_KEYS) if stacked else self

    def spec(self, index: int = 0) -> Any:
        spec = self.config.layer_spec(index)
        if spec.moe is None or self.layout is None:
            return spec
        return replace(spec, moe=replace(spec.moe, keys=self.layout))


def experts_of(c: Fields, *, experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of experts, and the number that each token is routed to.

    The keywords are the family's defaults.

    Raises:
        ConfigError: the numbers contradict each other, or two names of one field differ.
    """
    names = [name for name in ("num_local_experts", "num_experts") if name in c.values]
    counts = {c.integer(name, high=2**16) for name in names} or {experts}
    num_routed = c.integer("num_experts_per_tok", top_k, high=2**16)
    if len(counts) > 1:
        raise ConfigError(f"{c.where}: num_local_experts and num_experts are both given and differ")
    count = counts.pop()
    if num_routed > count:
        raise ConfigError(f"{c.where}: num_experts_per_tok is {num_routed}, and there are {count} experts")
    return count, num_routed


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

    defaults = {"kv_heads": 4}
    fields = ("attention_bias", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")

    @classmethod
    def read(cls, c: Fields) -> Self:
        experts, top_k = experts_of(c, experts=cls.num_experts, top_k=cls.num_experts_per_tok)
        common = cls.common_fields(c)
        count = common["num_hidden_layers"]
        what = f"layers in [0, {count})"
        mlp_layers = c.items("mlp_only_layers", [], what, lambda i: type(i) is int and 0 <= i < count)
        window = c.integer_or_null("sliding_window", 4096)
        c.consumed.add("max_window_layers")  # the reference has one window for all layers
        return cls(
            **common,
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


class Qwen3MoeFlow(MixtureFlow[Qwen3MoeConfig]):
    """The recipe of Qwen 3 with experts: see `DecoderFlow`."""

    name = "qwen3_moe"


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

    defaults = {"kv_heads": 8, "theta": 1e6}

    @classmethod
    def read(cls, c: Fields) -> Self:
        experts, top_k = experts_of(c, experts=cls.num_local_experts, top_k=cls.num_experts_per_tok)
        return cls(
            **cls.common_fields(c),
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


class MixtralFlow(MixtureFlow[MixtralConfig]):
    """The recipe of Mixtral: see `DecoderFlow`."""

    name = "mixtral"


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
        rope, layers = rope_of(c, common, THETA, default=YARN), common["num_hidden_layers"]
        return cls(
            **common,
            **rope._asdict(),
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


class GptOssFlow(DecoderFlow[GptOssConfig]):
    """The recipe of gpt-oss: see `DecoderFlow`."""

    name = "gpt_oss"

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return the weights of a checkpoint, in which MXFP4 experts are packed weights."""
        return super().adapt_weights(with_mxfp4_weights(source))
