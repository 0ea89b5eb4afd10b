"""Define the config and recipes of Qwen 3.5 (`Qwen3_5ForCausalLM`), text only.

One layer in four has gated attention, the others Gated DeltaNet. A second recipe is its multi-token-prediction module
for drafts.
"""

from __future__ import annotations

from functools import partial
from typing import Self

import jax

from rlx_jax import blocks
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import ConfigError, MissingWeightError, UnsupportedError, quote
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import MAX_LAYERS, Fields
from rlx_jax.models.decoder import EMBEDDING, HEAD, DecoderFlow
from rlx_jax.models.decoder_config import DecoderConfig, Ends, common_fields, layer_of, rope_of
from rlx_jax.models.hooks import check_recipe_weights
from rlx_jax.models.vision import TextPart
from rlx_jax.weights.source import WeightSource

# Fields that are accepted although nothing may read them: one that `layer_types` replaces, one for training only, and
# the dtype of the state, which is float32 here too.
INERT = ("full_attention_interval", "mamba_ssm_dtype", "mtp_loss_scaling_factor")

# How the columns of a head are split over time, height and width. For text all three are the token's position.
MROPE = ("mrope_section", "mrope_interleaved")

TEXT = TextPart(
    outer_type="qwen3_5",
    text_type="qwen3_5_text",
    keys={"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."},
    defaults={
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    unread_fields=("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    default_tied=False,
)  # fmt: skip


@dataclass(frozen=True)
class Qwen35Config(DecoderConfig):
    """Sizes of a Qwen 3.5 text model.

    Attributes:
        attends: for each layer, whether it has attention and not Gated DeltaNet.
        delta: the spec of the Gated DeltaNet layers.
        mtp_num_hidden_layers, mtp_use_dedicated_embeddings: fields of the draft module; see `Qwen35MtpFlow`.
        inv_freq: inverse frequencies; they rotate the first 2 · len(inv_freq) columns of each head.
    """

    max_position_embeddings: int = 32768
    attention_bias: bool = False
    attends: tuple[bool, ...] = ()
    mtp_num_hidden_layers: int = 1
    mtp_use_dedicated_embeddings: bool = False
    delta: blocks.GatedDeltaSpec = field(kw_only=True)

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = common_fields(c, max_positions=cls.max_position_embeddings, kv_heads=4, head_dim=256)
        c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        if not c.flag("attn_output_gate", True):
            raise UnsupportedError(f"{c.where}: field 'attn_output_gate' is false; the reference always has the gate")
        if c.raw("mlp_only_layers", []):
            raise UnsupportedError(f"{c.where}: field 'mlp_only_layers' is {quote(c.raw('mlp_only_layers'))}")
        attends = _attention_layers(c, common["num_hidden_layers"])
        rope = rope_of(c, common, partial_rotary=0.25, inert=MROPE)
        c.consumed.update(INERT)
        return cls(
            **common,
            **rope._asdict(),
            **c.with_defaults(cls, "attention_bias", "mtp_use_dedicated_embeddings"),
            attends=attends,
            mtp_num_hidden_layers=c.integer("mtp_num_hidden_layers", 1, low=0, high=MAX_LAYERS),
            delta=_delta(c, common["rms_norm_eps"]),
        )

    def layer_spec(self, index: int) -> blocks.LayerSpec:
        """Return gated attention with a norm of each query and key head and a partial rotation.

        All norms are zero-centred.
        """
        bias = self.attention_bias
        return layer_of(self, qkv_bias=bias, output_bias=bias, qk_norm="heads", zero_centred=True, gated=True)

    def ends(self) -> Ends:
        return Ends(unread_keys=("mtp.",))


class Qwen35Flow(DecoderFlow[Qwen35Config]):
    """The recipe of Qwen 3.5: see `DecoderFlow`. The spec of a layer is a `GatedDeltaSpec` or a `LayerSpec`."""

    name = "qwen35"

    def spec(self, index: int = 0) -> blocks.GatedDeltaSpec | blocks.LayerSpec:
        c = self.config
        return c.layer_spec(index) if c.attends[index] else c.delta

    def stage(self, index: int, spec: blocks.GatedDeltaSpec | blocks.LayerSpec) -> blocks.BlockStage:
        if isinstance(spec, blocks.GatedDeltaSpec):
            return blocks.gated_delta_layer(index, self.config.layer_spec(index), spec)
        return blocks.decoder_layer(index, spec)

    def assemble(self) -> ModelFlow:
        return super().assemble().with_mtp(lambda source: Qwen35MtpFlow(self.config, source).assemble())


@dataclass(frozen=True)
class Qwen35MtpFlow:
    """The recipe of Qwen 3.5's multi-token-prediction module for drafts: one attention layer over the model's hidden
    states.

    Inputs: `input_ids` `[batch, seq]`, the next token of each position; `hidden` `[batch, seq, hidden]` float32, the
    hidden state of each position after the model's final norm, which is the input of its head. Outputs: `logits`
    float32 `[batch, seq, vocab]` for the token after `input_ids`, and `hidden`, the input of its own head: passed in
    place of the model's hidden state, it drafts one more token.

        c = [rms(embed(ids)) ‖ rms(hidden)] Wᵀ;  c ← layer(c);  hidden = rms(c);  logits = hidden headᵀ

    Weights: `mtp.*`, and the embedding and the head of the model. The pair at position i has rope position i. This and
    the norms follow vLLM's `qwen3_5_mtp.py`; transformers has no such module.

    Raises:
        UnsupportedError: the config has no such module, or another one. MissingWeightError, WeightShapeError: weights
            are missing or do not match.
    """

    config: Qwen35Config
    weights: WeightSource | None = None
    name = "qwen35_mtp"

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of every weight."""
        return declared_shapes(replace(self, weights=None).assemble())

    def assemble(self) -> ModelFlow:
        """Return the flow, bound to its weights if there are any."""
        self._check()
        c, spec = self.config, self.config.layer_spec(0)
        tied = c.tie_word_embeddings
        head = blocks.LmHead.tied if tied else partial(blocks.LmHead.separate, HEAD)
        flow = (
            ModelFlow(self.name)
            .with_weights(self.weights, leave=("model.", HEAD, "mtp."))
            .input("input_ids", ("batch", "seq"), dtype="int32")
            .input("hidden", ("batch", "seq", c.hidden_size))
            .rope_tables(blocks.RopeTables(c.inv_freq, factor=c.rope_factor))
            .stage(
                blocks.Embed(EMBEDDING, (c.vocab_size, c.hidden_size)),
                blocks.MtpMerge(
                    spec.norm("mtp.pre_fc_norm_embedding"), spec.norm("mtp.pre_fc_norm_hidden"), "mtp.fc.weight"
                ),
                blocks.decoder_layer(0, spec, prefix="mtp.layers"),
                spec.norm("mtp.norm"),
            )
            .store_stream("hidden")
            .stage(head(c.vocab_size, c.hidden_size))
            .outputs(["logits", "hidden"])
        )
        return flow if self.weights is None else check_recipe_weights(flow, self)

    def _check(self) -> None:
        """Check that the config and the weights have the supported module."""
        c, advice = self.config, "speculative='prompt' or another CausalLM can draft"
        if c.mtp_num_hidden_layers != 1:
            raise UnsupportedError(
                f"config.json: mtp_num_hidden_layers is {c.mtp_num_hidden_layers}; expected 1, a draft module of "
                f"one layer: {advice}"
            )
        if c.mtp_use_dedicated_embeddings:
            raise UnsupportedError(
                "config.json: mtp_use_dedicated_embeddings is true, and the keys of a draft module's own embedding are "
                f"not known: {advice}"
            )
        if self.weights is not None and not any(key.startswith("mtp.") for key in self.weights.keys()):
            raise MissingWeightError(f"the checkpoint has no mtp.* weights, so no draft module: {advice}")


def _attention_layers(c: Fields, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has attention: by `layer_types`, or else every `full_attention_interval`-th layer."""
    interval = c.integer("full_attention_interval", 4)
    default_types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return c.kinds("layer_types", default_types, {"full_attention": True, "linear_attention": False})


def _delta(c: Fields, eps: float) -> blocks.GatedDeltaSpec:
    """Return the spec of the Gated DeltaNet layers."""
    heads = c.integer("linear_num_key_heads", 16, high=2**16), c.integer("linear_num_value_heads", 32, high=2**16)
    if heads[1] % heads[0]:
        raise ConfigError(f"{c.where}: linear_num_value_heads {heads[1]} is no multiple of {heads[0]} key heads")
    return blocks.GatedDeltaSpec(
        key_heads=heads[0], value_heads=heads[1], key_dim=c.integer("linear_key_head_dim", 128, high=2**16),
        value_dim=c.integer("linear_value_head_dim", 128, high=2**16),
        kernel=c.integer("linear_conv_kernel_dim", 4, high=2**10), eps=eps,
    )  # fmt: skip
