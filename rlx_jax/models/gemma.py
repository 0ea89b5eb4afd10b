"""Define the configs and recipe of Gemma 1, Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rlx_jax.blocks import EmbedScale, Frequencies, GemmaStyle, LayerSpec, LogitSoftcap, RopeTables, gemma_layer_spec
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.models import decoder_config
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder import weight_specs as weight_specs
from rlx_jax.models.vision import TextPart

STYLES = {"gemma": GemmaStyle.GEMMA, "gemma2": GemmaStyle.GEMMA2, "gemma3_text": GemmaStyle.GEMMA3}

# Defaults for fields that a config leaves out, as in the reference.
KV_HEADS = {GemmaStyle.GEMMA: 16, GemmaStyle.GEMMA2: 4, GemmaStyle.GEMMA3: 4}
MAX_POSITIONS = {GemmaStyle.GEMMA: 8192, GemmaStyle.GEMMA2: 8192, GemmaStyle.GEMMA3: 131072}
# Default softcaps of the attention scores and of the logits, for configs that leave them out.
SOFTCAPS = {GemmaStyle.GEMMA2: (50.0, 30.0)}

# Name of the rope tables of Gemma 3's sliding-window layers.
LOCAL = "local"

TEXT = TextPart(
    outer_type="gemma3",
    text_type="gemma3_text",
    keys={"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."},
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    unread_fields=(
        "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
        "boi_token_id", "eoi_token_id", "image_token_id",
    ),
    default_tied=True,
)  # fmt: skip


@dataclass(frozen=True)
class GemmaConfig(decoder_config.DecoderConfig):
    """Sizes of a Gemma model, with Hugging Face's field names.

    Attributes:
        windows: number of keys that each layer attends to, None for all; empty if no layer has a window.
        inv_freq: inverse frequencies of all layers; in Gemma 3, of the layers without a window.
        local_inv_freq: inverse frequencies of the sliding-window layers of Gemma 3; empty for other styles.
    """

    style: GemmaStyle = field(kw_only=True)
    max_position_embeddings: int = 8192
    local_inv_freq: Frequencies = ()
    local_rope_factor: float = 1.0
    windows: decoder_config.Windows = ()
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = field(default=True, kw_only=True)

    inert = ("_sliding_window_pattern",)

    @classmethod
    def read(cls, c: Fields) -> Self:
        """Return the config from its fields; `model_type` defines the generation of Gemma."""
        kind = c.text("model_type", "gemma")
        if kind not in STYLES:
            raise UnsupportedError(f"{c.where}: model_type {quote(kind)} is not a Gemma; known are {', '.join(STYLES)}")
        style = STYLES[kind]
        common = decoder_config.common_fields(
            c, max_positions=MAX_POSITIONS[style], kv_heads=KV_HEADS[style], head_dim=256, tied=True
        )
        _only_gelu_tanh(c, style)
        full, local = _ropes(c, style, common)
        attention, final = SOFTCAPS.get(style, (None, None))
        is_newer = style is not GemmaStyle.GEMMA
        has_field = style is GemmaStyle.GEMMA3 and c.raw("use_bidirectional_attention") is not None
        bidirectional = has_field and c.flag("use_bidirectional_attention", False)
        result = cls(
            style=style,
            **common,
            **full._asdict(),
            local_inv_freq=local.inv_freq,
            local_rope_factor=local.rope_factor,
            windows=_windows(c, style, common["num_hidden_layers"], bidirectional) if is_newer else (),
            bidirectional=bidirectional,
            query_pre_attn_scalar=c.real("query_pre_attn_scalar", 256.0) if is_newer else None,
            attn_logit_softcapping=c.real_or_null("attn_logit_softcapping", attention) if is_newer else None,
            final_logit_softcapping=c.real_or_null("final_logit_softcapping", final) if is_newer else None,
            attention_bias=c.flag("attention_bias", False),
        )
        if style is GemmaStyle.GEMMA3 and result.attn_logit_softcapping is not None:
            raise UnsupportedError(
                f"{c.where}: field 'attn_logit_softcapping' is {result.attn_logit_softcapping}; Gemma 3 has none: "
                "the reference reads the field and does not apply it"
            )
        return result

    def layer_spec(self, index: int) -> LayerSpec:
        window, scalar = decoder_config.window_at(self.windows, index), self.query_pre_attn_scalar
        layer = decoder_config.layer_of(
            self,
            window=window,
            rope=LOCAL if self.local_inv_freq and window is not None else "",
            score_scale=None if scalar is None else scalar**-0.5,
            attn_logit_softcap=self.attn_logit_softcapping,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
        )
        return gemma_layer_spec(self.style, layer)

    def ends(self) -> decoder_config.Ends:
        cap, local = self.final_logit_softcapping, self.local_inv_freq
        return decoder_config.Ends(
            rope=(RopeTables(local, name=LOCAL, factor=self.local_rope_factor),) if local else (),
            embedded=(EmbedScale(self.hidden_size),),
            logits=() if cap is None else (LogitSoftcap(cap),),
        )


class GemmaFlow(DecoderFlow[GemmaConfig]):
    """The recipe of Gemma: see `DecoderFlow`. `inputs_embeds` are not scaled, as in the reference."""

    name = "gemma"

    head_token = ("lasttoken", 0)


def _only_gelu_tanh(c: Fields, style: GemmaStyle) -> None:
    """Refuse any activation other than GELU with tanh.

    Old files of Gemma 1 name it `gelu`, but mean the variant with tanh, as the reference does.
    """
    tanh = {"gelu_pytorch_tanh": "gelu_tanh"}
    c.choice("hidden_act", "gelu_pytorch_tanh", tanh | ({"gelu": "gelu_tanh"} if style is GemmaStyle.GEMMA else {}))
    if c.raw("hidden_activation") is not None:
        c.choice("hidden_activation", "gelu_pytorch_tanh", tanh)


def _windows(c: Fields, style: GemmaStyle, layers: int, bidirectional: bool) -> decoder_config.Windows:
    """Return the windows by `layer_types`, or in a pattern with a full-attention layer at its end.

    The pattern is 2 layers long in Gemma 2, 6 by default in Gemma 3. In a bidirectional model (EmbeddingGemma)
    `sliding_window` counts the keys of both sides.
    """
    pattern = 2 if style is GemmaStyle.GEMMA2 else c.integer("sliding_window_pattern", 6)
    window = c.integer_or_null("sliding_window", 4096)
    duplicate = c.integer_or_null("sliding_window_size", window)  # the first files of Gemma 2 have both
    if duplicate != window:
        raise ConfigError(f"{c.where}: sliding_window is {window}, and sliding_window_size {duplicate}")
    window = window // 2 if bidirectional and window is not None else window
    return decoder_config.layer_windows(c, layers, window, lambda i: (i + 1) % pattern > 0)


def _ropes(
    c: Fields, style: GemmaStyle, common: Mapping[str, Any]
) -> tuple[decoder_config.ScaledRope, decoder_config.ScaledRope]:
    """Return the rope of the full-attention layers, and the one of the sliding-window layers in Gemma 3."""
    if style is not GemmaStyle.GEMMA3:
        return decoder_config.rope_of(c, common), decoder_config.ScaledRope(())
    parameters, scaling = c.group("rope_parameters"), c.group("rope_scaling")
    full, local = (parameters.group(f"{kind}_attention") if parameters else None for kind in ("full", "sliding"))
    if parameters is not None:
        parameters.finish()
    for group in (full, local, scaling):
        if group is not None and not group.flag("truncate", True):
            raise UnsupportedError(f"{group.where}: field 'truncate' is false; the reference does not read it here")
    head_dim, positions = common["head_dim"], common["max_position_embeddings"]
    return (
        decoder_config.frequencies_of(c, full, scaling, head_dim, "rope_theta", 1e6, positions),
        decoder_config.frequencies_of(c, local, None, head_dim, "rope_local_base_freq", 1e4, positions),
    )
