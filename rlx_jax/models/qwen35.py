"""Qwen 3.5 (`Qwen3_5ForCausalLM`): three layers of Gated DeltaNet to one of gated attention. Text alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np

from rlx_jax.blocks import BlockStage, DecoderLayerSpec, GatedDeltaSpec, decoder_layer, gated_delta_layer
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow, weight_specs
from rlx_jax.models.decoder_config import DecoderConfig, Ends, common_fields, frequencies_of, layer_of
from rlx_jax.models.text_part import TextPart

INERT = (
    "full_attention_interval", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "mtp_loss_scaling_factor",
)  # fmt: skip
"""Fields that `layer_types` or the head for drafts read, and the dtype of the state, which is f32 here too."""

MROPE = ("mrope_section", "mrope_interleaved")
"""How columns of a head are shared by time, height and width: of text all three are the token's position."""

TEXT = TextPart(
    outer="qwen3_5",
    inner="qwen3_5_text",
    keys={"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."},
    defaults={
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    others=(
        "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    ),
    tied=False,
)  # fmt: skip


@dataclass(frozen=True)
class Qwen35Config(DecoderConfig):
    """Sizes of a Qwen 3.5 text model; `attends[i]` is whether layer i has attention, and not Gated DeltaNet.

    `inv_freq` turn the first 2 · len(inv_freq) columns of each head.
    """

    max_position_embeddings: int = 32768
    attention_bias: bool = False
    attends: tuple[bool, ...] = ()
    delta: GatedDeltaSpec = field(kw_only=True)

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = common_fields(c, max_positions=cls.max_position_embeddings, kv_heads=4, head_dim=256)
        c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        if not c.flag("attn_output_gate", True):
            raise UnsupportedError(f"{c.where}: field 'attn_output_gate' is false; the reference always has the gate")
        if c.raw("mlp_only_layers", []):
            raise UnsupportedError(f"{c.where}: field 'mlp_only_layers' is {quote(c.raw('mlp_only_layers'))}")
        attends = _attends(c, common["num_hidden_layers"])
        c.seen.update(INERT)
        return cls(
            **common,
            inv_freq=_frequencies(c, common["head_dim"]),
            attention_bias=c.flag("attention_bias", False),
            attends=attends,
            delta=_delta(c, common["rms_norm_eps"]),
        )

    def layer_spec(self, index: int) -> DecoderLayerSpec:
        """Attention with a norm of each query and key head, part of whose columns turn, and a gate; norms are
        zero-centred."""
        bias = self.attention_bias
        return layer_of(
            self, qkv_bias=bias, output_bias=bias, qk_norm="heads", zero_centred=True, gated=True,
            n_rot=2 * len(self.inv_freq),
        )  # fmt: skip

    def ends(self) -> Ends:
        return Ends(left=("mtp.",))


@dataclass(frozen=True)
class Qwen35Flow(DecoderFlow[Qwen35Config]):
    """The recipe of Qwen 3.5: see `DecoderFlow`. The spec of a layer is a `GatedDeltaSpec` or a `DecoderLayerSpec`."""

    name: str = "qwen35"

    config_type = Qwen35Config

    def spec(self, index: int = 0) -> GatedDeltaSpec | DecoderLayerSpec:
        c = self.config
        return c.layer_spec(index) if c.attends[index] else c.delta

    def stage(self, index: int, spec: GatedDeltaSpec | DecoderLayerSpec) -> BlockStage:
        if isinstance(spec, GatedDeltaSpec):
            return gated_delta_layer(index, self.config.layer_spec(index), spec)
        return decoder_layer(index, spec)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        c, found = self.config, weight_specs(self.config)
        for i in (i for i, attends in enumerate(c.attends) if not attends):
            layer = f"model.layers.{i}"
            found = {key: spec for key, spec in found.items() if not key.startswith(f"{layer}.self_attn.")}
            for key, shape in c.delta.shapes(c.hidden_size).items():
                found[f"{layer}.linear_attn.{key}"] = jax.ShapeDtypeStruct(shape, np.float32)
        return found


# -- fields ------------------------------------------------------------------------------------


def _attends(c: Fields, layers: int) -> tuple[bool, ...]:
    """By `layer_types`, or without it every `full_attention_interval`-th layer."""
    interval = c.whole("full_attention_interval", 4)
    known = {"full_attention": True, "linear_attention": False}
    usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    kinds = c.raw("layer_types", usual)
    kinds = usual if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"{c.where}: field 'layer_types' is {quote(kinds)}; expected a list of {layers}, one a layer")
    for kind in kinds:
        if kind not in known:
            raise UnsupportedError(
                f"{c.where}: field 'layer_types' has {quote(kind)}; supported are {', '.join(known)}"
            )
    return tuple(known[kind] for kind in kinds)


def _frequencies(c: Fields, head_dim: int) -> Any:
    """Of the part of each head that turns."""
    group, old = c.group("rope_parameters"), c.group("rope_scaling")
    outer = c.real("partial_rotary_factor", 0.25)
    factor = outer if group is None else group.real("partial_rotary_factor", outer)
    for fields in (group, old):
        if fields is not None:
            fields.seen.update((*MROPE, "partial_rotary_factor"))
    turned = int(head_dim * factor)
    if not 2 <= turned <= head_dim or turned % 2:
        raise ConfigError(f"{c.where}: partial_rotary_factor {factor} of head_dim {head_dim} turns {turned} columns")
    return frequencies_of(c, group, old, turned)


def _delta(c: Fields, eps: float) -> GatedDeltaSpec:
    heads = c.whole("linear_num_key_heads", 16, high=2**16), c.whole("linear_num_value_heads", 32, high=2**16)
    if heads[1] % heads[0]:
        raise ConfigError(
            f"{c.where}: linear_num_value_heads {heads[1]} is not a multiple of linear_num_key_heads {heads[0]}"
        )
    return GatedDeltaSpec(
        key_heads=heads[0], value_heads=heads[1], key_dim=c.whole("linear_key_head_dim", 128, high=2**16),
        value_dim=c.whole("linear_value_head_dim", 128, high=2**16),
        kernel=c.whole("linear_conv_kernel_dim", 4, high=2**10), eps=eps,
    )  # fmt: skip
