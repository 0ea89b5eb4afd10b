"""Define `DecoderConfig`, the config of a decoder-only model, and readers of fields that several families share.

A family's own file adds its fields to `DecoderConfig`, reads them, and defines how its layers differ from Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rlx_jax import blocks
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import ConfigError, GraphError, UnsupportedError, quote
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, CausalConfig, Fields

# Number of keys that layer i attends to, None for all; an empty tuple for all keys in every layer.
Windows = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a decoder has in addition to its layers; Llama has none of it.

    Args:
        rope: more rope tables than the one of `inv_freq`; layers select one by name (`LayerSpec.rope`).
        embedded: stages after the embedding, such as a scale; `inputs_embeds` do not pass through them.
        logits: stages after the head, such as a softcap.
        unread_keys: keys, or prefixes that end in `.`, that are left unread on purpose.
    """

    rope: tuple[blocks.BlockStage, ...] = ()
    embedded: tuple[blocks.BlockStage, ...] = ()
    logits: tuple[blocks.BlockStage, ...] = ()
    unread_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class DecoderConfig(CausalConfig):
    """Sizes of a decoder, with Hugging Face's field names.

    `inv_freq` are the inverse frequencies of its rope; cos and sin are multiplied by `rope_factor`. With
    `bidirectional` tokens also read later ones, as in models of embeddings. A family's config is a subclass with
    additional fields; its `defaults` are keywords of `plain_fields`. It overrides `read`, and `layer_spec` and `ends`
    where it differs from Llama.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    inv_freq: blocks.Frequencies
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = field(default=False, kw_only=True)
    rope_factor: float = field(default=1.0, kw_only=True)
    bidirectional: bool = field(default=False, kw_only=True)

    neutral = {"is_decoder": (False, True)}  # a decoder either way

    # Further attributes, by the names of their fields.
    fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def common_fields(cls, c: Fields) -> dict[str, Any]:
        """Return the fields of a decoder with SwiGLU and one rope for all layers, and the ones in `fields`."""
        common = plain_fields(c, max_positions=cls.max_position_embeddings, eps=cls.rms_norm_eps, **cls.defaults)
        if isinstance(cls.fields, str):
            raise GraphError(f"{cls.__name__}: fields is {quote(cls.fields)}; expected a tuple of names of fields")
        return {**common, **c.with_defaults(cls, *cls.fields)}

    def layer_spec(self, index: int) -> blocks.LayerSpec:
        """Return the spec of layer `index`: `layer_of(self, …)` with the differences from Llama."""
        return layer_of(self)

    def ends(self) -> Ends:
        """Return the stages outside the layers."""
        return Ends()


def layer_of(config: DecoderConfig, *, window: int | None = None, **differences: Any) -> blocks.LayerSpec:
    """Return the layer spec of a config.

    Args:
        config: the sizes.
        window: number of keys that the layer attends to, up to the query's own; None for all. In a bidirectional model
            the number of keys before the query's own, and after it.
        differences: fields of `LayerSpec` that differ from Llama's.
    """
    # Each frequency rotates two columns of a head; fewer than head_dim / 2 frequencies mean a partial rotation.
    c, rotary_dim = config, 2 * len(config.inv_freq)
    mask = blocks.MaskKind.CAUSAL if window is None else blocks.MaskKind.sliding_window(window)
    if c.bidirectional:
        mask = blocks.MaskKind.NONE if window is None else blocks.MaskKind.local(window + 1)
    return blocks.LayerSpec(
        num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=c.head_dim, eps=c.rms_norm_eps,
        mask=mask,
        intermediate_size=c.intermediate_size,
        **{"n_rot": None if rotary_dim == c.head_dim else rotary_dim} | differences,
    )  # fmt: skip


class ScaledRope(NamedTuple):
    """Inverse frequencies, and the factor of cos and sin."""

    inv_freq: blocks.Frequencies
    rope_factor: float = 1.0


def common_fields(
    c: Fields, *, max_positions: int, kv_heads: int | None = None, head_dim: int | None = None, eps: float = 1e-6,
    tied: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of `DecoderConfig` without the rope.

    The keywords are the family's defaults for fields that a config leaves out. By default there are as many key/value
    heads as heads, and `head_dim` is hidden / heads.

    Raises:
        ConfigError, LimitError: a value is absurd.
    """
    hidden = c.integer("hidden_size")
    heads = c.integer("num_attention_heads", high=2**16)
    if head_dim is None and "head_dim" not in c.values and hidden % heads:
        raise ConfigError(f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if head_dim is not None and c.values.get("head_dim", head_dim) is None:
        raise ConfigError(f"{c.where}: field 'head_dim' is null; expected an integer")
    width = c.integer("head_dim", head_dim or max(hidden // heads, 1), high=2**16)
    even_head_dim(c, {"head_dim": width})
    # Null counts as present: as in the reference it means as many key/value heads as heads, not the default.
    has_kv_heads = "num_key_value_heads" in c.values
    groups = c.integer("num_key_value_heads", heads if has_kv_heads or kv_heads is None else kv_heads, high=2**16)
    if heads % groups:
        raise ConfigError(f"{c.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    return dict(
        vocab_size=c.integer("vocab_size", high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=c.integer("intermediate_size"),
        num_hidden_layers=c.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        rms_norm_eps=c.real("rms_norm_eps", eps),
        max_position_embeddings=c.integer("max_position_embeddings", max_positions, high=2**31 - 1),
        tie_word_embeddings=c.flag("tie_word_embeddings", tied),
    )


def plain_fields(
    c: Fields, *, theta: float = 1e4, partial_rotary: float | None = None, **defaults: Any
) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` for a decoder with SwiGLU and one rope for all layers.

    Args:
        c: the config. Another activation is refused.
        theta, partial_rotary: see `rope_of`.
        defaults: the keywords of `common_fields`.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: names the field.
    """
    common = common_fields(c, **defaults)
    c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    common["bidirectional"] = not c.flag("is_causal", True)
    return {**common, **rope_of(c, common, theta, partial_rotary)._asdict()}


def qwen_windows(c: Fields, layers: int) -> Windows:
    """Return the windows of Qwen 2 and 3.

    If `use_sliding_window` is set, layers from `max_window_layers` on attend to `sliding_window` keys.
    """
    is_used, width = c.flag("use_sliding_window", False), c.integer_or_null("sliding_window", 4096)
    first_layer = c.integer("max_window_layers", 28, low=0)
    window = width if is_used else None
    return layer_windows(c, layers, window, lambda i: window is not None and i >= first_layer)


def layer_windows(c: Fields, layers: int, window: int | None, sliding: Callable[[int], bool]) -> Windows:
    """Return `window` for the layers that slide and None for the others.

    `layer_types` decides which layers slide, or `sliding(i)` if the config leaves it out. A window of w covers w keys,
    including the query's own position.

    Raises:
        ConfigError: another number of layers, or layers that slide without a window. UnsupportedError: another type.
    """
    default_types = ["sliding_attention" if sliding(i) else "full_attention" for i in range(layers)]
    slides = c.kinds("layer_types", default_types, {"full_attention": False, "sliding_attention": True})
    if window is None and any(slides):
        raise ConfigError(f"{c.where}: field 'layer_types' has sliding_attention, and there is no sliding_window")
    return tuple(window if slide else None for slide in slides)


def window_at(windows: Windows, index: int) -> int | None:
    """Return the number of keys that layer `index` attends to; None for all."""
    return windows[index] if windows else None


def rope_of(
    c: Fields, common: Mapping[str, Any], theta: float = 1e4, partial_rotary: float | None = None,
    inert: Iterable[str] = (), default: Mapping[str, Any] | None = None,
) -> ScaledRope:  # fmt: skip
    """Return the rope of `rope_parameters` (transformers 5), or of `rope_theta` and `rope_scaling` (transformers 4).

    Args:
        c: the config.
        common: the fields from `common_fields`.
        theta: the base if the config has none.
        partial_rotary: fraction of each head's columns to rotate if the config leaves out `partial_rotary_factor`; None
            for a family without that field.
        inert: names of rope fields that do not affect the frequencies.
        default: `rope_parameters` of a config without any.

    Raises:
        ConfigError: the number of rotated columns is odd, or out of range.
    """
    rotary_dim = width = common["head_dim"]
    group, scaling = c.group("rope_parameters"), c.group("rope_scaling")
    if group is scaling is None and default is not None:
        group = Fields(default, f"{c.where}, rope_parameters")
    if partial_rotary is not None:
        outer = c.real("partial_rotary_factor", partial_rotary)
        factor = outer if group is None else group.real("partial_rotary_factor", outer)
        inert = (*inert, "partial_rotary_factor")
        rotary_dim = int(width * factor)
        if not 2 <= rotary_dim <= width or rotary_dim % 2:
            raise ConfigError(
                f"{c.where}: partial_rotary_factor {factor} rotates {rotary_dim} columns of {width}; "
                f"expected an even number from 2 to {width}"
            )
    for fields in (group, scaling):
        if fields is not None:
            fields.consumed.update(inert)
    return frequencies_of(c, group, scaling, rotary_dim, default=theta, max_positions=common["max_position_embeddings"])


def even_head_dim(c: Fields, common: Mapping[str, Any]) -> int:
    """Return the width of a head that a rope rotates: `head_dim`, or hidden / heads for fields from `tower_fields`.

    Raises:
        ConfigError: the width is odd.
    """
    width: int = common.get("head_dim") or common["hidden_size"] // common["num_attention_heads"]
    if width % 2:
        raise ConfigError(f"{c.where}: heads are {width} wide (head_dim or hidden_size / heads); expected an even one")
    return width


def frequencies_of(
    c: Fields, group: Fields | None, scaling: Fields | None, head_dim: int, base_field: str = "rope_theta",
    default: float | None = 1e4, max_positions: int | None = None,
) -> ScaledRope:  # fmt: skip
    """Return the scaled inverse frequencies of a rope.

    The supported values of `rope_type` are default, linear, llama3, and yarn for models that pass `max_positions`.

    Args:
        c: the config.
        group: its `rope_parameters` (transformers 5).
        scaling: its `rope_scaling` (transformers 4).
        head_dim: number of rotated columns of a head.
        base_field: field of the base in transformers 4.
        default: the base if the config has none; None: it must have one.
        max_positions: the model's context in tokens.

    Raises:
        UnsupportedError: another type, or a field that is not handled. ConfigError: no float32 frequencies, or both
            groups are present and differ.
    """
    theta = c.real(base_field, default)
    if group is not None:
        if "rope_theta" in group.values:
            group_theta = group.real("rope_theta")
            if base_field in c.values and theta != group_theta:
                raise ConfigError(f"{c.where}: {base_field} is {theta}, and {group_theta} in rope_parameters")
            theta = group_theta
        if scaling is not None and {k: v for k, v in group.values.items() if k != "rope_theta"} != dict(scaling.values):
            raise ConfigError(f"{c.where}: rope_scaling and rope_parameters are both given and differ")
    group = group or scaling
    with np.errstate(over="ignore"):  # an overflow is refused below
        unscaled = blocks.frequencies(head_dim, theta)
    if not all(0 < f < math.inf for f in unscaled):
        where = c.where if group is None else f"{c.where}: rope_parameters"
        raise ConfigError(f"{where}: rope_theta is {theta}; its frequencies over head_dim {head_dim} are not float32")
    if group is None:
        return ScaledRope(unscaled)
    kind = group.text("rope_type", group.text("type", "default"))
    group.consumed.add("type")
    if kind == "default":
        out = ScaledRope(unscaled)
    elif kind == "linear":
        out = ScaledRope(blocks.linear_scaling(unscaled, group.real("factor")))
    elif kind == "llama3":
        out = ScaledRope(_llama3(group, unscaled))
    elif kind == "yarn" and max_positions is not None:
        out = _yarn(group, unscaled, theta, max_positions)
    else:
        names = ["default", "linear", "llama3"] + ["yarn"] * (max_positions is not None)
        raise UnsupportedError(f"{c.where}: rope_parameters: rope type {quote(kind)}; supported are {', '.join(names)}")
    group.finish(neutral={"partial_rotary_factor": (1, 1.0)})
    return out


def _llama3(group: Fields, unscaled: blocks.Frequencies) -> blocks.Frequencies:
    """Return Llama 3's scaling of the frequencies."""
    factor, low, high = (group.real(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = group.integer("original_max_position_embeddings", high=2**31 - 1)
    return blocks.llama3_scaling(unscaled, factor, low, high, context)


def _yarn(group: Fields, unscaled: blocks.Frequencies, theta: float, max_positions: int) -> ScaledRope:
    """Return YaRN's frequencies.

    A `factor` of null means the ratio of the model's context to the original one.

    Raises:
        ConfigError: a base of at most 1, or no factor.
    """
    context = group.integer("original_max_position_embeddings", max_positions, high=2**31 - 1)
    config_factor = group.real_or_null("factor", None) if "factor" in group.values else group.real("factor")
    factor = max_positions / context if config_factor is None else config_factor
    if theta <= 1:
        raise ConfigError(f"{group.where}: rope_theta is {theta}; yarn needs a base over 1")
    inv_freq = blocks.yarn_scaling(
        unscaled, factor, context, theta, beta_fast=group.real_or_null("beta_fast", None) or 32.0,
        beta_slow=group.real_or_null("beta_slow", None) or 1.0, truncate=group.flag("truncate", True),
    )  # fmt: skip
    default_factor = blocks.yarn_factor(
        factor, group.real_or_null("mscale", None), group.real_or_null("mscale_all_dim", None)
    )
    return ScaledRope(inv_freq, group.real_or_null("attention_factor", None) or default_factor)
