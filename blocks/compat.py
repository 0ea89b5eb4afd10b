"""Names that only the specification uses: one table of aliases and small constructors, exported by `rlx_jax.blocks`.

Its records of layers are `LayerSpec` with defaults and field names of their own, and its layers are the stages of
`decoder.py` under these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, ParamSpec

from rlx_jax.blocks.attention import Heads, SelfAttnPrefill, SideOutputs, kv_name, side_outputs
from rlx_jax.blocks.control import BlockStage, Custom, DualStream, Named
from rlx_jax.blocks.decoder import (
    DecodeLayer,
    DecoderLayer,
    LayerAround,
    LlamaDecoder,
    decoder_layer,
    norm_beta,
)
from rlx_jax.blocks.ffn import MoeSpec
from rlx_jax.blocks.layer import DecoderKeys, GemmaStyle, HiddenShape, LayerSpec, gemma_layer_spec
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
    """Return the same with a segment in the block path."""
    return Custom(fn, name)


class PluginStage:
    """The two constructors of a Custom stage."""

    new = staticmethod(plugin)
    named = staticmethod(plugin_named)


# -- records of layers ---------------------------------------------------------------------------


class NamedSpec(LayerSpec):
    """A LayerSpec made by one of the specification's names: with the `names` of some fields, and `defaults`.

    Every name also takes the fields of LayerSpec, so that `dataclasses.replace` takes both. `kv_group_size` is
    num_heads / num_kv_heads and may be left out; `batch` and `seq` are the first sizes of `hidden_shape`.

    Raises:
        GraphError: two of these contradict each other.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, *, kv_group_size: int | None = None, **values: Any) -> None:
        name = type(self).__name__
        values = {**self.defaults, **values}
        sizes = [values.pop(size, None) for size in ("batch", "seq")]
        if sizes != [None, None]:
            values["hidden_shape"] = _merged(values.get("hidden_shape") or (None, None, None), sizes, name)
        for old, fields in self.names.items():
            if old in values:
                values |= dict.fromkeys(fields, values.pop(old))
        super().__init__(**self.read(values))
        if kv_group_size is not None and kv_group_size * self.num_kv_heads != self.num_heads:
            raise GraphError(
                f"{name}: kv_group_size is {kv_group_size}, and {self.num_heads} query heads to {self.num_kv_heads} "
                f"key heads are {self.num_heads / self.num_kv_heads:g}; leave it out"
            )

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of LayerSpec."""
        return values

    @property
    def kv_group_size(self) -> int:
        """Query heads to a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.qkv_bias


def _merged(shape: tuple[int | str | None, ...], sizes: list[Any], name: str) -> HiddenShape:
    """`hidden_shape` with the sizes that `batch` and `seq` say."""
    for what, size, have in zip(("batch", "seq"), sizes, shape, strict=False):
        if None not in (size, have) and size != have:
            raise GraphError(f"{name}: {what} is {size}, and hidden_shape {shape}")
    first = tuple(have if size is None else size for size, have in zip(sizes, shape, strict=False))
    return (*first, *shape[2:])


class LlamaDecoderSpec(NamedSpec):
    """A Llama layer; `attention_bias` gives all four projections of attention a bias."""

    defaults = {"eps": 1e-5}
    names = {"attention_bias": ("qkv_bias", "output_bias")}


class Qwen3DecoderSpec(NamedSpec):
    """A Qwen layer; `attention_bias` gives q, k and v a bias (Qwen 2), and `qk_norm`, True unless given, norms every
    query and key head (Qwen 3)."""

    defaults = {"qk_norm": True}
    names = {"attention_bias": ("qkv_bias",)}

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        return values | {"qk_norm": {True: "heads", False: None}.get(values["qk_norm"], values["qk_norm"])}


class GemmaDecodeLayerSpec(NamedSpec):
    """A Gemma layer of a `style`; `attention_bias` gives all four projections of attention a bias."""

    names = LlamaDecoderSpec.names

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        style = values.pop("style", None)
        return values if style is None else vars(gemma_layer_spec(style, LayerSpec(**values)))


class SelfAttnPrefillSpec(NamedSpec):
    """What attention alone reads of a layer, under keys of one's own: weights `[N·D, H]`, `[K·D, H]`, `[K·D, H]`.

    With `q_norm_key` or `k_norm_key`, weights `[D]`, queries or keys go through an RMSNorm of each head; `sinks_key` is
    a weight `[N]`. Biases stand under the keys with `.bias` for `.weight`.
    """

    order: ClassVar[tuple[str, ...]] = (
        "q_key", "k_key", "v_key", "num_heads", "head_dim", "num_kv_heads", "mask", "score_scale", "attn_logit_softcap",
    )  # fmt: skip
    """The fields by position."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(**dict(zip(self.order[: len(args)], args, strict=True)), **values)

    @staticmethod
    def hf_layer(
        prefix: str, num_heads: int, head_dim: int, num_kv_heads: int, bias: bool = False, qk_norm: bool = False
    ) -> SelfAttnPrefillSpec:
        """`{prefix}.self_attn.{q,k,v}_proj.weight`, and their biases; `{prefix}.self_attn.{q,k}_norm.weight`."""
        return SelfAttnPrefillSpec(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, qkv_bias=bias,
            keys=DecoderKeys().under(prefix),
            **{f"{n}_norm_key": f"{prefix}.self_attn.{n}_norm.weight" for n in "qk" if qk_norm},
        )  # fmt: skip

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        given = {name: values.pop(f"{name}_key") for name in "qkv" if f"{name}_key" in values}
        norms = {f"{n}_norm": values.pop(f"{n}_norm_key") for n in "qk" if f"{n}_norm_key" in values}
        if any(norms.values()):
            given |= {"q_norm": None, "k_norm": None} | norms
            own = {"qk_norm_eps": 1e-6, "qk_norm_offset": 0.0}
            values |= {"qk_norm": "heads"} | {name: values.get(name) or value for name, value in own.items()}
        if sinks := values.pop("sinks_key", None):
            values["sinks"], given["sinks"] = True, sinks
        values["keys"] = keys = replace(values.get("keys", DecoderKeys()), **given)
        if biases := values.pop("biases", None):
            values["qkv_bias"] = True
            expected = tuple(f"{key.removesuffix('.weight')}.bias" for key in (keys.q, keys.k, keys.v))
            if tuple(biases) != expected:
                raise GraphError(
                    f"SelfAttnPrefillSpec: biases are {shown(biases)}; they stand under {listing(expected)}"
                )
        return values


LlamaDecodeLayerSpec, Qwen3DecodeLayerSpec = LlamaDecoderSpec, Qwen3DecoderSpec


def gemma_attn_spec(
    index: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    mask: MaskKind | str,
    scale: float | None = None,
    softcap: float | None = None,
    bias: bool = False,
) -> LayerSpec:
    """Return attention of layer `index` under Hugging Face's keys. Scores are `scale · q kᵀ`, D^(−1/2) unless given."""
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


def numbered(layer: Callable[P, BlockStage]) -> Callable[P, Named]:
    """Return the function that makes layer `index` by `layer` and names it `layer{index}` in the block path."""

    def make(*args: P.args, **options: P.kwargs) -> Named:
        return Named(f"layer{args[0] if args else options['index']}", layer(*args, **options))

    return make


llama_prefill_layer_fused = numbered(LlamaDecoder.layer)
qwen3_prefill_layer_fused = numbered(Qwen3Decoder.layer)
qwen3_prefill_layer_fused_kv = numbered(Qwen3Decoder.layer_with_kv)
llama_prefill_layer_composed = qwen3_prefill_layer_composed = decoder_layer
llama_decode_layer = numbered(LlamaDecodeLayer.layer)
qwen3_decode_layer_fused = numbered(Qwen3DecodeLayer.layer)
gemma_decode_layer = numbered(GemmaDecodeLayer.layer)


# -- Gemma's ---------------------------------------------------------------------------------------


def gemma_prefill_layer_composed(
    index: int,
    style: GemmaStyle,
    attention: LayerSpec,
    eps: float = 1e-6,
    kv_sink: SideOutputs | None = None,
    moe: MoeSpec | None = None,
) -> Named:
    """Return layer `index` around an attention. With `kv_sink` keys and values are the side outputs `kv.{index}.k` and
    `kv.{index}.v`, which it collects. `moe`: experts in the place of the MLP, gated by GELU as that is.

    Raises:
        UnsupportedError: Gemma 4.
    """
    spec, name = _gemma(style, attention, eps, moe), None if kv_sink is None else f"kv.{index}"
    return Named(f"layer{index}", DecoderLayer(f"model.layers.{index}", spec, kv_name=name, kv_sink=kv_sink))


def gemma_moe_prefill_layer_composed(
    index: int, style: GemmaStyle, attention: LayerSpec, moe: MoeSpec, eps: float = 1e-6
) -> Named:
    """Return the same with experts."""
    return gemma_prefill_layer_composed(index, style, attention, eps, moe=moe)


def gemma_prefill_layer_kv(index: int, style: GemmaStyle, attention: LayerSpec, eps: float = 1e-6) -> Named:
    """Return `gemma_prefill_layer_composed` with a GemmaKvTap: side outputs `kv.{index}.k` and `kv.{index}.v`."""
    prefix, spec = f"model.layers.{index}", _gemma(style, attention, eps)
    tap, attend = GemmaKvTap.layer(index, style, attention, eps), SelfAttnPrefill(spec.under(prefix))
    return Named(f"layer{index}", LayerAround(prefix, spec, (tap, attend), output=True))


def _gemma(style: GemmaStyle, attention: LayerSpec, eps: float, moe: MoeSpec | None = None) -> LayerSpec:
    """The layer around an attention."""
    bias = attention.qkv_bias or attention.output_bias
    return gemma_layer_spec(style, replace(attention, eps=eps, output_bias=bias, moe=moe or attention.moe))


def gemma_moe_decode_layer_composed(index: int, spec: LayerSpec, moe: MoeSpec) -> Named:
    """Return `gemma_decode_layer` with experts in the place of the MLP."""
    return gemma_decode_layer(index, replace(spec, moe=moe))


# -- taps of keys and values ---------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaKvTap:
    """Give the keys and values of the Llama layer that follows as `kv.{i}.k` and `kv.{i}.v` `[B,S,K·D]`; x passes on.

    It norms and projects x as that layer does; common subexpressions are computed once. i is `layer_idx`, or the number
    that the prefix ends in; `outputs` collects the names. K is `num_kv_heads`, or that of the weights.
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
        """Return the tap of layer `index` under Hugging Face's keys."""
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
        _tap(self, emit, normed, spec, any_heads=self.num_kv_heads is None)
        return x


@dataclass(frozen=True)
class GemmaKvTap:
    """Give the keys and values of a Gemma attention as `kv.{i}.k` and `kv.{i}.v` `[B,S,K·D]`; x passes on.

    It follows the input norm: x is what the attention reads. `attention` is one head of width `head_dim` under Hugging
    Face's keys unless given; `eps` is of no use, because the input is normalized; i and `outputs` as in LlamaKvTap.
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
        return GemmaKvTap(f"model.layers.{index}", attention.head_dim, attention=_gemma(style, attention, eps))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GemmaKvTap")
        spec = self.attention or LayerSpec(num_heads=1, head_dim=self.head_dim, num_kv_heads=1)
        _tap(self, emit, x, spec, any_heads=self.attention is None)
        return x


def _tap(tap: LlamaKvTap | GemmaKvTap, emit: Emit, x: FlowValue, spec: LayerSpec, any_heads: bool) -> None:
    """Write the keys and values of the attention `spec` of a normalized `x` as side outputs."""
    name, heads = kv_name(tap.layer_prefix, tap.layer_idx), Heads(emit, spec.under(tap.layer_prefix), x, any_heads)
    with emit.scope("self_attn"):
        made = heads.rotated({name: heads.project(name, x) for name in "kv"})
        side_outputs(emit, name, made["k"], made["v"], tap.outputs)
