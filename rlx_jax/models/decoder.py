"""What the recipes of decoder-only models share: the common fields of a config, the rope, the keys, the flow.

A family's own file holds its config, its layers and what differs; `llama.py` is the plainest. Plain functions: a
recipe calls those that fit it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, TypeVar

import jax
import numpy as np

from rlx_jax.blocks import BindDecodeInputs, BlockStage, LmHead, MaskKind, RmsNorm, RopeTables, decode_form, tapped
from rlx_jax.blocks.rope import Frequencies, frequencies, linear_scaling, llama3_scaling
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.flow import ModelFlow
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, Fields
from rlx_jax.models.hooks import Edit, Hooked, Hooks
from rlx_jax.weights.source import WeightSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

Shapes = dict[str, tuple[int, ...]]
Windows = tuple[int | None, ...]
R = TypeVar("R", bound=Hooked)


class Sizes(TypedDict):
    """The fields that the config of every decoder has, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool


class PlainSizes(Sizes):
    """Those of a decoder with SwiGLU whose layers share one rope."""

    inv_freq: Frequencies


class DecoderConfig(Protocol):
    """A config with those fields that keys and flow depend on; `inv_freq` are the frequencies of the rope."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def inv_freq(self) -> Frequencies: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class Decode:
    """A recipe's flow as explicit decode, behind cached keys and values that are inputs (see `rlx_jax.blocks.decode`).

    `past` is the number of cached tokens to compile for ahead of the first call; with `custom_mask` there is an input
    `mask` `[batch, past + seq]`, int32, 1 for a key that is kept.
    """

    past: int | None = None
    custom_mask: bool = False


class DecoderRecipe(Protocol):
    """A decoder's recipe: its fields, which `Llama32Flow` explains, and the spec of a layer."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def seq(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    @property
    def hidden_only(self) -> bool: ...
    @property
    def last_token_logits(self) -> bool: ...
    @property
    def inputs_embeds(self) -> bool: ...
    @property
    def export_kv(self) -> bool: ...
    @property
    def decode(self) -> Decode | None: ...
    @property
    def weights(self) -> WeightSource | None: ...
    @property
    def hooks(self) -> Hooks: ...
    def spec(self, index: int) -> Any: ...


# -- config ------------------------------------------------------------------------------------


def fields(config: Fields | Mapping[str, Any]) -> Fields:
    """The content of a `config.json`, or one that is being read already."""
    return config if isinstance(config, Fields) else Fields(config, "config")


def sizes(
    c: Fields, *, max_positions: int, kv_heads: int | None = None, head_dim: int | None = None, tied: bool = False
) -> Sizes:
    """The common fields. The keywords are the family's defaults for what a config leaves out.

    Without them there are as many key/value heads as heads, and `head_dim` is hidden / heads.

    Raises:
        ConfigError, LimitError: a value is absurd.
    """
    hidden = c.whole("hidden_size")
    heads = c.whole("num_attention_heads", high=2**16)
    if head_dim is None and "head_dim" not in c.values and hidden % heads:
        raise ConfigError(f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if head_dim is not None and c.values.get("head_dim", head_dim) is None:
        raise ConfigError(f"{c.where}: field 'head_dim' is null; expected an integer")
    width = c.whole("head_dim", head_dim or max(hidden // heads, 1), high=2**16)
    if width % 2:
        raise ConfigError(f"{c.where}: head_dim is {width}; rotary embeddings need an even one")
    given = "num_key_value_heads" in c.values  # null counts: there are as many as heads
    groups = c.whole("num_key_value_heads", heads if given or kv_heads is None else kv_heads, high=2**16)
    if heads % groups:
        raise ConfigError(f"{c.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    return Sizes(
        vocab_size=c.whole("vocab_size", high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=c.whole("intermediate_size"),
        num_hidden_layers=c.whole("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        rms_norm_eps=c.real("rms_norm_eps", 1e-6),
        max_position_embeddings=c.whole("max_position_embeddings", max_positions, high=2**31 - 1),
        tie_word_embeddings=c.flag("tie_word_embeddings", tied),
    )


def plain_sizes(
    c: Fields, *, max_positions: int, kv_heads: int | None = None, head_dim: int | None = None
) -> PlainSizes:
    """The common fields and the frequencies. Another activation than SwiGLU's is refused.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: names the field.
    """
    common = sizes(c, max_positions=max_positions, kv_heads=kv_heads, head_dim=head_dim)
    c.choice("hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    return PlainSizes(**common, inv_freq=rope_frequencies(c, common["head_dim"]))


def qwen_windows(c: Fields, layers: int) -> Windows:
    """The windows of Qwen 2 and 3: `sliding_window` keys if `use_sliding_window`, from layer `max_window_layers` on."""
    used, width = c.flag("use_sliding_window", False), c.whole_or_null("sliding_window", 4096)
    first = c.whole("max_window_layers", 28, low=0)
    window = width if used else None
    return layer_windows(c, layers, window, lambda i: window is not None and i >= first)


def layer_windows(c: Fields, layers: int, window: int | None, sliding: Callable[[int], bool]) -> Windows:
    """`window` for the layers that slide and None for the others: by `layer_types`, or without it by `sliding(i)`.

    A window of w keeps w keys, the query's own included.

    Raises:
        ConfigError: another number of layers, or layers that slide without a window. UnsupportedError: another type.
    """
    kinds = c.raw("layer_types", ["sliding_attention" if sliding(i) else "full_attention" for i in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"{c.where}: field 'layer_types' is {quote(kinds)}; expected a list of {layers}, one a layer")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"{c.where}: field 'layer_types' has {quote(kind)}; supported are full_attention, sliding_attention"
            )
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(f"{c.where}: field 'layer_types' has sliding_attention, and there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def mask_of(window: int | None) -> MaskKind:
    """Causal, within `window` keys if there is one."""
    return MaskKind.CAUSAL if window is None else MaskKind.sliding_window(window)


def rope_frequencies(c: Fields, head_dim: int) -> Frequencies:
    """Inverse frequencies from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    return frequencies_of(c, c.group("rope_parameters"), c.group("rope_scaling"), head_dim)


def frequencies_of(
    c: Fields, group: Fields | None, old: Fields | None, head_dim: int, base: str = "rope_theta", default: float = 1e4
) -> Frequencies:
    """Those of the parameters in `group` (transformers 5), or of the field `base` and the scaling in `old` (4).

    Raises:
        ConfigError: both are given and differ.
    """
    theta = c.real(base, default)
    if group is not None:
        if "rope_theta" in group.values:
            inner = group.real("rope_theta")
            if base in c.values and theta != inner:
                raise ConfigError(f"{c.where}: {base} is {theta}, and {inner} in rope_parameters")
            theta = inner
        if old is not None and {k: v for k, v in group.values.items() if k != "rope_theta"} != dict(old.values):
            raise ConfigError(f"{c.where}: rope_scaling and rope_parameters are both given and differ")
    return scaled_frequencies(c, group or old, theta, head_dim)


def scaled_frequencies(c: Fields, group: Fields | None, theta: float, head_dim: int) -> Frequencies:
    """Inverse frequencies of base `theta`, scaled as `group` says: `rope_type` default, linear or llama3.

    Raises:
        UnsupportedError: another type, or a field that is not handled. ConfigError: no float32 frequencies.
    """
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


# -- keys --------------------------------------------------------------------------------------


def layer_shapes(config: DecoderConfig, biased: Collection[str] = ()) -> Shapes:
    """Shapes of the weights of a layer, by their keys inside it; projections in `biased` have a bias too."""
    c = config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    hidden, ffn = c.hidden_size, c.intermediate_size
    projections = dict(zip(ATTENTION, [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)], strict=True))
    projections |= dict(zip(MLP, [(ffn, hidden), (ffn, hidden), (hidden, ffn)], strict=True))
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, shape in projections.items():
        shapes[f"{name}.weight"] = shape
        if name in biased:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def model_specs(
    config: DecoderConfig, layer: Mapping[str, tuple[int, ...]], dtype: Any = np.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: the embedding, `layer` for each layer, the final norm, the head."""
    c = config
    shapes: Shapes = {EMBEDDING: (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{key}": shape for key, shape in layer.items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes[HEAD] = (c.vocab_size, c.hidden_size)
    return {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in shapes.items()}


def left_keys(config: DecoderConfig) -> tuple[str, ...]:
    """Keys of old checkpoints that are left unread on purpose."""
    layers = range(config.num_hidden_layers)
    return tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers)


# -- flow --------------------------------------------------------------------------------------


def _layers(recipe: DecoderRecipe, layer: Callable[[int, Any], BlockStage]) -> Edit:
    """The stack of layers: in decode form or with side outputs where the recipe asks for it."""

    def stock(index: int, spec: Any) -> BlockStage:
        stage = layer(index, spec)
        if recipe.decode:
            return decode_form(stage, index, recipe.decode.custom_mask)
        return tapped(stage, index) if recipe.export_kv else stage

    return recipe.hooks.stack(recipe.config.num_hidden_layers, recipe.spec, stock)


def as_decode(recipe: R, past: int | None = None, custom_mask: bool = False) -> R:
    """New tokens behind `past` cached ones, which are inputs and outputs: see `rlx_jax.blocks.decode`.

    Inputs: `input_ids` `[batch, seq]`, with `custom_mask` `mask` `[batch, past + seq]`, then `past_k_{i}` and
    `past_v_{i}` `[batch, past, K·D]` of each layer, and optionally `position_ids` `[batch, seq]`. Outputs: `logits`,
    then `kv.0.k`, `kv.0.v`, `kv.1.k` … `[batch, past + seq, K·D]`. With sizes it is compiled ahead for one new token.
    """
    return replace(recipe, seq=1, decode=Decode(past, custom_mask))


def decoder_flow(
    recipe: DecoderRecipe,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    layer: Callable[[int, Any], BlockStage],
    *,
    norm: BlockStage | None = None,
    rope: Iterable[BlockStage] = (),
    embedded: Iterable[BlockStage] = (),
    logits: Iterable[BlockStage] = (),
) -> ModelFlow:
    """The flow of a recipe, bound to its weights; without any, to `specs`.

    Args:
        layer: makes layer i as `layer(i, recipe.spec(i))`.
        norm: the final norm, unless it is an `RmsNorm`.
        rope: further stages before the embedding, behind the tables of `config.inv_freq`.
        embedded: stages between the embedding and the layers, such as a scale; `inputs_embeds` passes them too.
        logits: stages behind the head, such as a softcap.
    """
    c = recipe.config
    unread = [EMBEDDING] * recipe.inputs_embeds + [HEAD] * recipe.hidden_only
    return (
        ModelFlow(recipe.name, profile=recipe.hooks.profile)
        .with_weights(specs if recipe.weights is None else recipe.weights, leave=(*left_keys(c), *unread))
        .patch(_opened(recipe, [RopeTables(c.inv_freq), *rope]))
        .raw_stages(embedded)
        .bind(batch=recipe.batch, seq=recipe.seq, past=recipe.decode.past if recipe.decode else None)
        .patch(_layers(recipe, layer))
        .when(recipe.last_token_logits, ModelFlow.gather_last_token_at)
        .stage(norm or RmsNorm("model.norm.weight", c.rms_norm_eps))
        .patch(recipe.hooks.edit)
        .patch(_closed(recipe, logits))
    )


def _opened(recipe: DecoderRecipe, rope: Iterable[BlockStage]) -> Callable[[ModelFlow], ModelFlow]:
    """The inputs, the rope and the embedding."""

    def edit(flow: ModelFlow) -> ModelFlow:
        if recipe.inputs_embeds:
            flow = flow.input("inputs_embeds", ("batch", "seq", recipe.config.hidden_size))
        else:
            flow = flow.input("input_ids", ("batch", "seq"), dtype="int32")
        cache = recipe.decode
        flow = flow.patch(_behind_cache(recipe.config, cache, rope)) if cache else flow.raw_stages(rope)
        return flow if recipe.inputs_embeds else flow.token_embed()

    return edit


def _behind_cache(
    config: DecoderConfig, decode: Decode, rope: Iterable[BlockStage]
) -> Callable[[ModelFlow], ModelFlow]:
    """The inputs `mask`, `past_k_0`, `past_v_0`, `past_k_1` … and `position_ids`, and the rope behind the cache."""
    layers, width = config.num_hidden_layers, config.num_key_value_heads * config.head_dim

    def edit(flow: ModelFlow) -> ModelFlow:
        if decode.custom_mask:
            flow = flow.input("mask", ("batch", "past + seq"), dtype="int32")
        for i in range(layers):
            for name in (f"past_k_{i}", f"past_v_{i}"):
                flow = flow.input(name, ("batch", "past", width))
        flow = flow.input("position_ids", ("batch", "seq"), dtype="int32", default=None)
        return flow.raw_stages([*rope, BindDecodeInputs(layers, decode.custom_mask)])

    return edit


def _closed(recipe: DecoderRecipe, logits: Iterable[BlockStage]) -> Callable[[ModelFlow], ModelFlow]:
    """The head, and what follows it."""

    def edit(flow: ModelFlow) -> ModelFlow:
        c = recipe.config
        if recipe.hidden_only:
            return flow.hidden_states()
        if recipe.inputs_embeds and c.tie_word_embeddings:  # no Embed stage to be tied to
            flow = flow.stage(LmHead.separate(EMBEDDING, c.vocab_size, c.hidden_size)).output("logits")
        else:
            flow = flow.lm_head(c.vocab_size, c.hidden_size, tied=c.tie_word_embeddings)
        return flow.raw_stages(logits)

    return edit
