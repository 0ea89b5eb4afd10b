"""Aliases and small constructors for names that only the specification uses, exported by `rlx_jax.blocks`.

The specification's records of layers are subclasses of `LayerSpec` with other defaults and field names. Its layers are
the stages of `decoder.py` under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ParamSpec

from rlx_jax.blocks.attention import Heads, SelfAttnPrefill, SideOutputs, add_side_outputs, kv_name
from rlx_jax.blocks.control import BlockStage, Custom, DualStream, Named
from rlx_jax.blocks.decoder import DecodeLayer, DecoderLayer, LlamaDecoder, MixerLayer, decoder_layer, norm_beta
from rlx_jax.blocks.ffn import MoeSpec
from rlx_jax.blocks.layer import DecoderKeys, GemmaStyle, HiddenShape, LayerSpec, gemma_layer_spec
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, listing, shown
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = [
    "FlowCtx", "GemmaDecodeLayer", "GemmaDecodeLayerSpec", "GemmaKvTap", "LlamaDecodeLayer", "LlamaDecodeLayerSpec",
    "LlamaDecoderSpec", "LlamaKvTap", "PluginStage", "Qwen3DecodeLayer", "Qwen3DecodeLayerSpec", "Qwen3Decoder",
    "Qwen3DecoderSpec", "SelfAttnPrefillSpec", "dual_stream_stage", "gemma_attn_spec", "gemma_decode_layer",
    "gemma_moe_decode_layer_composed", "gemma_moe_prefill_layer_composed", "gemma_prefill_layer_composed",
    "gemma_prefill_layer_kv", "llama_decode_layer", "llama_prefill_layer_composed", "llama_prefill_layer_fused",
    "plugin", "plugin_named", "qwen3_decode_layer_fused", "qwen3_prefill_layer_composed", "qwen3_prefill_layer_fused",
    "qwen3_prefill_layer_fused_kv",
]  # fmt: skip

StageFunction = Callable[[Emit, Any], FlowValue | None]

FlowCtx = Emit
dual_stream_stage = DualStream


def plugin(fn: StageFunction) -> Custom:
    """Return the stage of a function `(emit, value) → value`."""
    return Custom(fn)


def plugin_named(name: str, fn: StageFunction) -> Custom:
    """Return the stage of a function `(emit, value) → value`, with the segment `name` in the block path."""
    return Custom(fn, name)


class PluginStage:
    """Namespace of the two constructors of a Custom stage."""

    new = staticmethod(plugin)
    named = staticmethod(plugin_named)


# -- records of layers ---------------------------------------------------------------------------


class NamedSpec(LayerSpec):
    """Base of the specification's records: a LayerSpec with other `defaults` and aliases of some fields.

    Subclasses also accept the fields of LayerSpec themselves, so that `dataclasses.replace` works with either name.
    `kv_group_size` is num_heads / num_kv_heads and may be omitted; `batch` and `seq` are the first sizes of
    `hidden_shape`.

    Raises:
        GraphError: two of the options contradict each other.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    field_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, *, kv_group_size: int | None = None, **values: Any) -> None:
        name = type(self).__name__
        values = {**self.defaults, **values}
        sizes = [values.pop(size, None) for size in ("batch", "seq")]
        if sizes != [None, None]:
            values["hidden_shape"] = _merge_shape(values.get("hidden_shape") or (None, None, None), sizes, name)
        for spec_name, fields in self.field_aliases.items():  # one name may set several fields
            if spec_name in values:
                values |= dict.fromkeys(fields, values.pop(spec_name))
        super().__init__(**self.to_layer_fields(values))
        if kv_group_size is not None and kv_group_size * self.num_kv_heads != self.num_heads:
            raise GraphError(
                f"{name}: kv_group_size is {kv_group_size}, but {self.num_heads} query heads over {self.num_kv_heads} "
                f"key heads are {self.num_heads / self.num_kv_heads:g}; leave it out"
            )

    def to_layer_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of LayerSpec for the given `values`; subclasses translate their own fields here."""
        return values

    @property
    def kv_group_size(self) -> int:
        """Number of query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.qkv_bias


def _merge_shape(shape: tuple[int | str | None, ...], sizes: list[Any], name: str) -> HiddenShape:
    """Return `hidden_shape` with its first sizes set to `batch` and `seq`, as far as these are not None.

    Raises:
        GraphError: `hidden_shape` already has another size there.
    """
    for size_name, size, have in zip(("batch", "seq"), sizes, shape, strict=False):
        if None not in (size, have) and size != have:
            raise GraphError(f"{name}: {size_name} is {size}, but hidden_shape is {shape}")
    leading = tuple(have if size is None else size for size, have in zip(sizes, shape, strict=False))
    return (*leading, *shape[2:])


class LlamaDecoderSpec(NamedSpec):
    """A Llama layer; `attention_bias` gives all four projections of attention a bias."""

    defaults = {"eps": 1e-5}
    field_aliases = {"attention_bias": ("qkv_bias", "output_bias")}


class Qwen3DecoderSpec(NamedSpec):
    """A Qwen layer.

    `attention_bias` gives q, k and v a bias (Qwen 2). `qk_norm`, by default True, adds an RMSNorm of every query and
    key head (Qwen 3).
    """

    defaults = {"qk_norm": True}
    field_aliases = {"attention_bias": ("qkv_bias",)}

    def to_layer_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        # The specification has a bool; the names of LayerSpec pass unchanged.
        return values | {"qk_norm": {True: "heads", False: None}.get(values["qk_norm"], values["qk_norm"])}


class GemmaDecodeLayerSpec(NamedSpec):
    """A Gemma layer of a `style`; `attention_bias` gives all four projections of attention a bias."""

    field_aliases = LlamaDecoderSpec.field_aliases

    def to_layer_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        style = values.pop("style", None)
        return values if style is None else vars(gemma_layer_spec(style, LayerSpec(**values)))


class SelfAttnPrefillSpec(NamedSpec):
    """Record of attention alone, with custom keys: `q_key` `[N·D, H]`, `k_key` and `v_key` `[K·D, H]`.

    `q_norm_key` and `k_norm_key`, weights `[D]`, add an RMSNorm of each head of queries or keys. `sinks_key` is a
    weight `[N]`. The key of a bias ends in `.bias` where the key of its weight ends in `.weight`.
    """

    order: ClassVar[tuple[str, ...]] = (
        "q_key", "k_key", "v_key", "num_heads", "head_dim", "num_kv_heads", "mask", "score_scale", "attn_logit_softcap",
    )  # fmt: skip
    """Fields that may be passed by position."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(**dict(zip(self.order[: len(args)], args, strict=True)), **values)

    @staticmethod
    def hf_layer(
        prefix: str, num_heads: int, head_dim: int, num_kv_heads: int, bias: bool = False, qk_norm: bool = False
    ) -> SelfAttnPrefillSpec:
        """Return the record with Hugging Face's keys.

        They are `{prefix}.self_attn.{q,k,v}_proj.{weight,bias}` and `{prefix}.self_attn.{q,k}_norm.weight`.
        """
        return SelfAttnPrefillSpec(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, qkv_bias=bias,
            keys=DecoderKeys().under(prefix),
            **{f"{n}_norm_key": f"{prefix}.self_attn.{n}_norm.weight" for n in "qk" if qk_norm},
        )  # fmt: skip

    def to_layer_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        keys_by_field = {name: values.pop(f"{name}_key") for name in "qkv" if f"{name}_key" in values}
        norms = {f"{n}_norm": values.pop(f"{n}_norm_key") for n in "qk" if f"{n}_norm_key" in values}
        if any(norms.values()):
            keys_by_field |= {"q_norm": None, "k_norm": None} | norms
            # In the specification these norms do not follow the layer's eps and offset, as LayerSpec's do by default.
            norm_defaults = {"qk_norm_eps": 1e-6, "qk_norm_offset": 0.0}
            values |= {"qk_norm": "heads"} | {name: values.get(name) or value for name, value in norm_defaults.items()}
        if sinks := values.pop("sinks_key", None):
            values["sinks"], keys_by_field["sinks"] = True, sinks
        values["keys"] = keys = replace(values.get("keys", DecoderKeys()), **keys_by_field)
        if biases := values.pop("biases", None):
            values["qkv_bias"] = True
            expected = tuple(f"{key.removesuffix('.weight')}.bias" for key in (keys.q, keys.k, keys.v))
            if tuple(biases) != expected:
                raise GraphError(f"SelfAttnPrefillSpec: biases are {shown(biases)}; expected {listing(expected)}")
        return values


LlamaDecodeLayerSpec, Qwen3DecodeLayerSpec = LlamaDecoderSpec, Qwen3DecoderSpec


def gemma_attn_spec(
    index: int, num_heads: int, head_dim: int, num_kv_heads: int, mask: MaskKind | str, scale: float | None = None,
    softcap: float | None = None, bias: bool = False,
) -> LayerSpec:  # fmt: skip
    """Return the record of the attention of layer `index`, with Hugging Face's keys.

    Scores are `scale · q kᵀ`; the default scale is D^(−1/2).
    """
    spec = SelfAttnPrefillSpec.hf_layer(f"model.layers.{index}", num_heads, head_dim, num_kv_heads, bias)
    return replace(spec, mask=mask, score_scale=scale, attn_logit_softcap=softcap)


# -- layers by their number ----------------------------------------------------------------------


class Qwen3Decoder(DecoderLayer):
    """One Qwen layer from small stages: `[B,S,H]` → same."""


class LlamaDecodeLayer(DecodeLayer):
    """One Llama layer over cached and new tokens: `[B,S,H]` → same."""


class Qwen3DecodeLayer(DecodeLayer):
    """One Qwen layer over cached and new tokens: `[B,S,H]` → same."""


class GemmaDecodeLayer(DecodeLayer):
    """One Gemma layer over cached and new tokens: `[B,S,H]` → same."""


P = ParamSpec("P")


def named_by_index(layer: Callable[P, BlockStage]) -> Callable[P, Named]:
    """Return a factory like `layer` with the result named `layer{index}` in the block path.

    Args:
        layer: a factory of stages with `index` as its first parameter.
    """

    def make(*args: P.args, **options: P.kwargs) -> Named:
        return Named(f"layer{args[0] if args else options['index']}", layer(*args, **options))

    return make


llama_prefill_layer_fused = named_by_index(LlamaDecoder.layer)
qwen3_prefill_layer_fused = named_by_index(Qwen3Decoder.layer)
qwen3_prefill_layer_fused_kv = named_by_index(Qwen3Decoder.layer_with_kv)
llama_prefill_layer_composed = qwen3_prefill_layer_composed = decoder_layer
llama_decode_layer = named_by_index(LlamaDecodeLayer.layer)
qwen3_decode_layer_fused = named_by_index(Qwen3DecodeLayer.layer)
gemma_decode_layer = named_by_index(GemmaDecodeLayer.layer)


# -- layers of Gemma -------------------------------------------------------------------------------


def gemma_prefill_layer_composed(
    index: int, style: GemmaStyle, attention: LayerSpec, eps: float = 1e-6, kv_sink: SideOutputs | None = None,
    moe: MoeSpec | None = None,
) -> Named:  # fmt: skip
    """Return Gemma's layer `index` around an attention.

    Args:
        index: number of the layer.
        style: version of Gemma.
        attention: record of the attention, as from `gemma_attn_spec`.
        eps: epsilon of the norms.
        kv_sink: with it keys and values are the side outputs `kv.{index}.k` and `kv.{index}.v`; it collects the names.
        moe: experts in place of the MLP, with the same GELU gate.

    Raises:
        UnsupportedError: Gemma 4.
    """
    spec, name = _gemma_spec(style, attention, eps, moe), None if kv_sink is None else f"kv.{index}"
    return Named(f"layer{index}", DecoderLayer(f"model.layers.{index}", spec, kv_name=name, kv_sink=kv_sink))


def gemma_moe_prefill_layer_composed(
    index: int, style: GemmaStyle, attention: LayerSpec, moe: MoeSpec, eps: float = 1e-6
) -> Named:
    """Return `gemma_prefill_layer_composed` with experts in place of the MLP."""
    return gemma_prefill_layer_composed(index, style, attention, eps, moe=moe)


def gemma_prefill_layer_kv(index: int, style: GemmaStyle, attention: LayerSpec, eps: float = 1e-6) -> Named:
    """Return `gemma_prefill_layer_composed` with a GemmaKvTap: side outputs `kv.{index}.k` and `kv.{index}.v`."""
    prefix, spec = f"model.layers.{index}", _gemma_spec(style, attention, eps)
    tap, attend = GemmaKvTap.layer(index, style, attention, eps), SelfAttnPrefill(spec.under(prefix))
    return Named(f"layer{index}", MixerLayer(prefix, spec, (tap, attend), output=True))


def _gemma_spec(style: GemmaStyle, attention: LayerSpec, eps: float, moe: MoeSpec | None = None) -> LayerSpec:
    """Return the record of Gemma's layer around an attention.

    Raises:
        UnsupportedError: Gemma 4.
    """
    # The record of attention alone has biases of q, k and v only; Gemma's output projection has one with them.
    has_bias = attention.qkv_bias or attention.output_bias
    return gemma_layer_spec(style, replace(attention, eps=eps, output_bias=has_bias, moe=moe or attention.moe))


def gemma_moe_decode_layer_composed(index: int, spec: LayerSpec, moe: MoeSpec) -> Named:
    """Return `gemma_decode_layer` with experts in place of the MLP."""
    return gemma_decode_layer(index, replace(spec, moe=moe))


# -- taps of keys and values ---------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaKvTap:
    """Output the keys and values of the Llama layer that follows, and return x unchanged.

    The side outputs are `kv.{i}.k` and `kv.{i}.v`, `[B,S,K·D]`; i is `layer_idx`, or the number at the end of the
    prefix. `outputs` collects their names. The tap normalises and projects x as the layer does; the compiler computes
    common subexpressions once. K is `num_kv_heads`, or follows from the weights.
    """

    layer_prefix: str
    head_dim: int
    eps: float = 1e-5
    outputs: SideOutputs | None = None
    layer_idx: int | None = None
    attention_bias: bool = False
    rope_theta: float = 10000.0
    num_kv_heads: int | None = None

    @staticmethod
    def layer(index: int, spec: LayerSpec) -> LlamaKvTap:
        """Return the tap of layer `index`, with Hugging Face's keys."""
        return LlamaKvTap(
            f"model.layers.{index}", spec.head_dim, spec.eps, None, index, spec.qkv_bias, spec.rope_theta,
            spec.num_kv_heads,
        )  # fmt: skip

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LlamaKvTap")
        heads = self.num_kv_heads or 1
        spec = LayerSpec(
            num_heads=heads, head_dim=self.head_dim, num_kv_heads=heads, qkv_bias=self.attention_bias,
            rope_theta=self.rope_theta,
        )  # fmt: skip
        with emit.scope("input_layernorm"):
            gamma = emit.weight(f"{self.layer_prefix}.input_layernorm.weight", shape=x.type.shape[-1:])
            normed = emit.add_node(hir.RmsNorm(self.eps), x, gamma, norm_beta(emit, x))
        _emit_tap(self, emit, normed, spec, any_heads=self.num_kv_heads is None)
        return x


@dataclass(frozen=True)
class GemmaKvTap:
    """Output the keys and values of a Gemma attention, and return x unchanged.

    The side outputs are `kv.{i}.k` and `kv.{i}.v`, `[B,S,K·D]`; i and `outputs` are as in LlamaKvTap. The stage runs
    after the input norm, so that x is the input of the attention and `eps` has no effect. `attention` defaults to heads
    of width `head_dim` with Hugging Face's keys, as many as the weights have.
    """

    layer_prefix: str
    head_dim: int
    eps: float | None = None
    outputs: SideOutputs | None = None
    layer_idx: int | None = None
    attention: LayerSpec | None = None

    @staticmethod
    def layer(index: int, style: GemmaStyle, attention: LayerSpec, eps: float = 1e-6) -> GemmaKvTap:
        """Return the tap of layer `index` around `attention`, as `gemma_prefill_layer_composed` takes them."""
        return GemmaKvTap(f"model.layers.{index}", attention.head_dim, attention=_gemma_spec(style, attention, eps))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GemmaKvTap")
        spec = self.attention or LayerSpec(num_heads=1, head_dim=self.head_dim, num_kv_heads=1)
        _emit_tap(self, emit, x, spec, any_heads=self.attention is None)
        return x


def _emit_tap(tap: LlamaKvTap | GemmaKvTap, emit: Emit, x: FlowValue, spec: LayerSpec, any_heads: bool) -> None:
    """Write the keys and values of an attention of a normalised `x` as side outputs.

    With `any_heads` the weights determine the number of heads.
    """
    name, heads = kv_name(tap.layer_prefix, tap.layer_idx), Heads(emit, spec.under(tap.layer_prefix), x, any_heads)
    with emit.scope("self_attn"):
        kv = heads.rotate({name: heads.project(name, x) for name in "kv"})
        add_side_outputs(emit, name, kv["k"], kv["v"], tap.outputs)
