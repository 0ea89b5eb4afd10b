"""Llama 2 and 3.x (`LlamaForCausalLM`): config → flow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlx_jax.blocks import (
    LlamaDecoderSpec,
    LmHead,
    RopeTables,
    llama_prefill_layer_composed,
    llama_prefill_layer_fused,
)
from rlx_jax.blocks.rope import Frequencies, frequencies, linear_scaling, llama3_scaling
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.flow import ModelFlow
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, Fields
from rlx_jax.models.hooks import Hooks, add_after, add_before, add_patch, on_layer, set_profile, set_profile_near
from rlx_jax.weights.source import WeightSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model, under the names of Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    inv_freq: Frequencies
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @staticmethod
    def from_hf(config: Fields | Mapping[str, Any]) -> LlamaConfig:
        """From `config.json`, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = config if isinstance(config, Fields) else Fields(config, "config")
        hidden = c.whole("hidden_size")
        heads = c.whole("num_attention_heads", high=2**16)
        if "head_dim" not in c.values and hidden % heads:
            raise ConfigError(f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = c.whole("head_dim", max(hidden // heads, 1), high=2**16)
        if head_dim % 2:
            raise ConfigError(f"{c.where}: head_dim is {head_dim}; rotary embeddings need an even one")
        kv_heads = c.whole("num_key_value_heads", heads, high=2**16)
        if heads % kv_heads:
            raise ConfigError(
                f"{c.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        result = LlamaConfig(
            vocab_size=c.whole("vocab_size", high=MAX_VOCABULARY),
            hidden_size=hidden,
            intermediate_size=c.whole("intermediate_size"),
            num_hidden_layers=c.whole("num_hidden_layers", high=MAX_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            inv_freq=rope_frequencies(c, head_dim),
            rms_norm_eps=c.real("rms_norm_eps", 1e-6),
            max_position_embeddings=c.whole("max_position_embeddings", 2048, high=2**31 - 1),
            attention_bias=c.flag("attention_bias", False),
            mlp_bias=c.flag("mlp_bias", False),
            tie_word_embeddings=c.flag("tie_word_embeddings", False),
        )
        c.finish()
        return result


def rope_frequencies(c: Fields, head_dim: int) -> Frequencies:
    """Inverse frequencies from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    group, old = c.group("rope_parameters"), c.group("rope_scaling")
    theta = c.real("rope_theta", 10000.0)
    if group is not None:
        if "rope_theta" in group.values:
            inner = group.real("rope_theta")
            if "rope_theta" in c.values and theta != inner:
                raise ConfigError(f"{c.where}: rope_theta is {theta}, and {inner} in rope_parameters")
            theta = inner
        if old is not None and {k: v for k, v in group.values.items() if k != "rope_theta"} != dict(old.values):
            raise ConfigError(f"{c.where}: rope_scaling and rope_parameters are both given and differ")
    group = group or old
    with np.errstate(over="ignore"):  # refused in the next line
        plain = frequencies(head_dim, theta)
    if not all(0 < f < math.inf for f in plain):
        where = c.where if group is None else f"{c.where}: rope_parameters"
        raise ConfigError(f"{where}: rope_theta is {theta}; its frequencies over head_dim {head_dim} are not float32")
    if group is None:
        return plain
    kind = group.text("rope_type", group.text("type", "default"))
    group.seen.add("type")
    if kind == "default":
        out = plain
    elif kind == "linear":
        out = linear_scaling(plain, group.real("factor"))
    elif kind == "llama3":
        out = llama3_scaling(
            plain,
            group.real("factor"),
            group.real("low_freq_factor"),
            group.real("high_freq_factor"),
            group.whole("original_max_position_embeddings", high=2**31 - 1),
        )
    else:
        raise UnsupportedError(
            f"{c.where}: rope_parameters: rope type {quote(kind)}; supported are default, linear, llama3"
        )
    group.finish()
    return out


@dataclass(frozen=True)
class Llama32Flow:
    """The recipe. Inputs: `input_ids` `[batch, seq]`. Output: `logits` `[batch, seq, vocab]`, float32.

    Args:
        batch, seq: sizes to compile for ahead of the first call.
        composed: build the layers from small stages instead of one block; the numbers are the same.
        hidden_only: no head. Output: `hidden`, the normalised `[batch, seq, hidden]`.
        last_token_logits: the head of each row's last token only: `[batch, 1, vocab]`.
        inputs_embeds: the input is `inputs_embeds` `[batch, seq, hidden]` float32 instead of ids.
        weights: the checkpoint that the flow is bound to; without it the flow knows shapes only.
        hooks: see `rlx_jax.models.hooks`.
    """

    config: LlamaConfig
    batch: int | None = None
    seq: int | None = None
    composed: bool = False
    name: str = "llama"
    hidden_only: bool = False
    last_token_logits: bool = False
    inputs_embeds: bool = False
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    layer = on_layer
    before_layers = add_before
    after_layers = after = add_after
    patch_flow = add_patch
    profile = set_profile
    profile_near = set_profile_near

    @staticmethod
    def for_prefill(
        config: LlamaConfig | Mapping[str, Any], batch: int | None = None, seq: int | None = None
    ) -> Llama32Flow:
        """The forward program, bound to sizes where they are given; `config` may be the content of `config.json`."""
        return Llama32Flow(config if isinstance(config, LlamaConfig) else LlamaConfig.from_hf(config), batch, seq)

    def spec(self, index: int = 0) -> LlamaDecoderSpec:
        """The spec of a layer: they are all alike."""
        c = self.config
        return LlamaDecoderSpec(
            c.num_attention_heads,
            c.head_dim,
            c.num_key_value_heads,
            c.rms_norm_eps,
            attention_bias=c.attention_bias,
            mlp_bias=c.mlp_bias,
        )

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights; without any, to their shapes."""
        c, layer = self.config, llama_prefill_layer_composed if self.composed else llama_prefill_layer_fused
        weights = weight_specs(c) if self.weights is None else self.weights
        unread = [EMBEDDING] * self.inputs_embeds + [HEAD] * self.hidden_only
        return (
            ModelFlow(self.name, profile=self.hooks.profile)
            .with_weights(weights, leave=(*left_keys(c), *unread))
            .patch(self._open)
            .bind(batch=self.batch, seq=self.seq)
            .patch(self.hooks.stack(c.num_hidden_layers, self.spec, layer))
            .when(self.last_token_logits, ModelFlow.gather_last_token_at)
            .final_norm(c.rms_norm_eps)
            .patch(self.hooks.edit)
            .patch(self._close)
        )

    def _open(self, flow: ModelFlow) -> ModelFlow:
        """The input and its embedding."""
        rope = RopeTables(self.config.inv_freq)
        if self.inputs_embeds:
            return flow.input("inputs_embeds", ("batch", "seq", self.config.hidden_size)).rope_tables(rope)
        return flow.input("input_ids", ("batch", "seq"), dtype="int32").rope_tables(rope).token_embed()

    def _close(self, flow: ModelFlow) -> ModelFlow:
        """The head."""
        c = self.config
        if self.hidden_only:
            return flow.hidden_states()
        if self.inputs_embeds and c.tie_word_embeddings:  # no Embed stage to be tied to
            return flow.stage(LmHead.separate(EMBEDDING, c.vocab_size, c.hidden_size)).output("logits")
        return flow.lm_head(c.vocab_size, c.hidden_size, tied=c.tie_word_embeddings)


def weight_specs(config: LlamaConfig, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    c = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attn = {"q": (q, c.hidden_size), "k": (kv, c.hidden_size), "v": (kv, c.hidden_size), "o": (c.hidden_size, q)}
    mlp = {"gate": (c.intermediate_size, c.hidden_size), "up": (c.intermediate_size, c.hidden_size)}
    mlp["down"] = (c.hidden_size, c.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}"
        shapes[f"{p}.input_layernorm.weight"] = shapes[f"{p}.post_attention_layernorm.weight"] = (c.hidden_size,)
        for part, weights, bias in (("self_attn", attn, c.attention_bias), ("mlp", mlp, c.mlp_bias)):
            for name, shape in weights.items():
                shapes[f"{p}.{part}.{name}_proj.weight"] = shape
                if bias:
                    shapes[f"{p}.{part}.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes[HEAD] = (c.vocab_size, c.hidden_size)
    return {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in shapes.items()}


def left_keys(config: LlamaConfig) -> tuple[str, ...]:
    """Keys of Llama checkpoints that are left unread on purpose."""
    layers = range(config.num_hidden_layers)
    return tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers)
