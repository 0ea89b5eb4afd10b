"""The decoder layer of Qwen 2 and 3: Llama's, with biases on q, k and v, or a norm of each query and key head."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.attention import SelfAttnPrefill, SideOutputs, kv_name
from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.control import Named
from rlx_jax.blocks.decoder import DecoderLayerSpec, HiddenShape, decoder_layer
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True, kw_only=True)
class Qwen3DecoderSpec:
    """Sizes of a Qwen layer. `num_heads` is a multiple of `num_kv_heads`; `head_dim` need not be hidden / heads.

    `attention_bias` gives q, k and v a bias (Qwen 2), `output_bias` the output projection; `qk_norm` puts an RMSNorm
    on every query and key head before the rotation (Qwen 3). `hidden_shape`, or `batch` and `seq` alone, are checked
    against the input when given. `rope_theta` is the base used when no RopeTables stage ran; `mask` custom or bias
    needs the stage's `mask_input`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    hidden_shape: HiddenShape = None
    batch: int | str | None = None
    seq: int | str | None = None
    qk_norm: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mask: MaskKind | str = hir.MASK_KINDS["causal"]
    rope_theta: float = 10000.0

    @staticmethod
    def of(layer: DecoderLayerSpec) -> Qwen3DecoderSpec:
        """The spec of such a layer.

        Raises:
            GraphError: Qwen's layer has not all that the layer has.
        """
        spec = Qwen3DecoderSpec(
            num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, eps=layer.eps,
            hidden_shape=layer.hidden_shape, qk_norm=layer.qk_norm == "heads", attention_bias=layer.qkv_bias,
            output_bias=layer.output_bias, mask=layer.mask, rope_theta=layer.rope_theta,
        )  # fmt: skip
        layer.held_by(spec.layer(), "Qwen3Decoder")
        return spec

    def layer(self) -> DecoderLayerSpec:
        """The same layer, as every decoder's is described.

        Raises:
            GraphError: `hidden_shape` says another size than `batch` or `seq`.
        """
        return DecoderLayerSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, eps=self.eps,
            mask=self.mask, rope_theta=self.rope_theta, qkv_bias=self.attention_bias, output_bias=self.output_bias,
            qk_norm="heads" if self.qk_norm else None, hidden_shape=self._input(),
        )  # fmt: skip

    def _input(self) -> HiddenShape:
        """`hidden_shape`, or what `batch` and `seq` say of it."""
        if self.hidden_shape is None:
            return None if self.batch is None and self.seq is None else (self.batch, self.seq, None)
        for name, axis in (("batch", 0), ("seq", 1)):
            if getattr(self, name) not in (None, self.hidden_shape[axis]):
                raise GraphError(
                    f"Qwen3DecoderSpec: {name} is {getattr(self, name)}, and hidden_shape {self.hidden_shape}"
                )
        return self.hidden_shape


@dataclass(frozen=True)
class Qwen3Decoder:
    """One Qwen layer: `[B,S,H]` → same. `h = x + attn(rms(x))·Wo`, `y = h + swiglu(rms(h))`.

    Weights under `layer_prefix`: Llama's nine, `self_attn.{q,k,v,o}_proj.bias` where the spec says so, and with
    `qk_norm` `self_attn.{q,k}_norm.weight` `[D]`. `mask_input` names the declared input that a custom or bias mask
    reads. With `kv_name` the keys (rotated) and values, `[B,S,K·D]`, are the side outputs `{kv_name}.k` and `.v`, which
    `kv_sink` collects; with `kv_sink` alone `kv_name` is `kv.{i}`, i the number that the prefix ends in.
    """

    layer_prefix: str
    spec: Qwen3DecoderSpec
    mask_input: str | None = None
    kv_name: str | None = None
    kv_sink: SideOutputs | None = None

    @staticmethod
    def layer(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Qwen3Decoder:
        """Layer `index` under Hugging Face's keys."""
        return Qwen3Decoder(f"model.layers.{index}", spec, mask_input)

    @staticmethod
    def layer_with_kv(
        index: int, spec: Qwen3DecoderSpec, sink: SideOutputs | None = None, mask_input: str | None = None
    ) -> Qwen3Decoder:
        """The same with the side outputs `kv.{index}.k` and `kv.{index}.v`, which `sink` collects."""
        return Qwen3Decoder(f"model.layers.{index}", spec, mask_input, f"kv.{index}", sink)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, layer = emit.require(value, "Qwen3Decoder"), self.spec.layer()
        keys = layer.attention(self.layer_prefix, self.mask_input)
        name = kv_name(self.layer_prefix, None) if self.kv_sink is not None and self.kv_name is None else self.kv_name
        attention = SelfAttnPrefill(keys, name, "Qwen3Decoder", self.kv_sink)
        return layer.whole(emit, x, self.layer_prefix, attention, "Qwen3Decoder")


def qwen3_prefill_layer_fused(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` as one stage."""
    return Named(f"layer{index}", Qwen3Decoder.layer(index, spec, mask_input))


def qwen3_prefill_layer_fused_kv(
    index: int, spec: Qwen3DecoderSpec, sink: SideOutputs | None = None, mask_input: str | None = None
) -> Named:
    """The same with the side outputs `kv.{index}.k` and `kv.{index}.v`, which `sink` collects."""
    return Named(f"layer{index}", Qwen3Decoder.layer_with_kv(index, spec, sink, mask_input))


def qwen3_prefill_layer_composed(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` from small stages; the same program."""
    return decoder_layer(index, spec.layer(), mask_input)
