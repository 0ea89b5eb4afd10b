"""The decoder layer of Qwen 2 and 3: Llama's, with biases on q, k and v, or a norm of each query and key head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlx_jax.blocks.attention import SelfAttnPrefill, SelfAttnPrefillSpec, self_attention, side_outputs
from rlx_jax.blocks.contracts import KvCacheContract, Shape, kv_cache
from rlx_jax.blocks.control import Named
from rlx_jax.blocks.decoder import check_hidden, pre_norm_layer
from rlx_jax.blocks.ffn import SwiGlu
from rlx_jax.emit import Emit, FlowValue
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind


@dataclass(frozen=True)
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
    hidden_shape: tuple[int | str, ...] | None = None
    batch: int | str | None = None
    seq: int | str | None = None
    qk_norm: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mask: MaskKind | str = hir.MASK_KINDS["causal"]
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class Qwen3Decoder:
    """One Qwen layer: `[B,S,H]` → same. `h = x + attn(rms(x))·Wo`, `y = h + swiglu(rms(h))`.

    Weights under `layer_prefix`: Llama's nine, `self_attn.{q,k,v,o}_proj.bias` where the spec says so, and with
    `qk_norm` `self_attn.{q,k}_norm.weight` `[D]`. `mask_input` names the declared input that a custom or bias mask
    reads. With `kv_name` the keys (rotated) and values, `[B,S,K·D]`, are the side outputs `{kv_name}.k` and `.v`.
    """

    layer_prefix: str
    spec: Qwen3DecoderSpec
    mask_input: str | None = None
    kv_name: str | None = None

    @staticmethod
    def layer(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Qwen3Decoder:
        """Layer `index` under Hugging Face's keys."""
        return Qwen3Decoder(f"model.layers.{index}", spec, mask_input)

    @staticmethod
    def layer_with_kv(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Qwen3Decoder:
        """The same with the side outputs `kv.{index}.k` and `kv.{index}.v`."""
        return Qwen3Decoder(f"model.layers.{index}", spec, mask_input, f"kv.{index}")

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Qwen3Decoder")
        s, p = self.spec, self.layer_prefix
        check_hidden(emit, x, s.hidden_shape, "Qwen3Decoder")
        check_hidden(emit, x, (s.batch, s.seq, None), "Qwen3Decoder")
        with emit.scope("input_layernorm"):
            a = emit.rms_norm(x, f"{p}.input_layernorm.weight", s.eps)
        context, k, v = self_attention(emit, a, attention_of(p, s, self.mask_input), "Qwen3Decoder")
        if self.kv_name is not None:
            side_outputs(emit, self.kv_name, k, v)
        o_proj = f"{p}.self_attn.o_proj"
        with emit.scope("self_attn", "o_proj"):
            h = x + emit.linear(context, f"{o_proj}.weight", f"{o_proj}.bias" if s.output_bias else None)
        with emit.scope("post_attention_layernorm"):
            m = emit.rms_norm(h, f"{p}.post_attention_layernorm.weight", s.eps)
        return h + SwiGlu.hf_mlp(p).emit(emit, m)

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """Keys and values `[B, T, K·D]` of an input `[B, S, H]`."""
        return kv_cache(hidden, self.spec.num_kv_heads, self.spec.head_dim, self.spec.mask)


def attention_of(prefix: str, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> SelfAttnPrefillSpec:
    """The attention of a layer, under Hugging Face's keys."""
    s = spec
    keys = SelfAttnPrefillSpec.hf_layer(
        prefix, s.num_heads, s.head_dim, s.num_kv_heads, bias=s.attention_bias, qk_norm=s.qk_norm
    )
    return replace(keys, mask=s.mask, mask_input=mask_input, rope_theta=s.rope_theta, qk_norm_eps=s.eps)


def qwen3_prefill_layer_fused(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` as one stage."""
    return Named(f"layer{index}", Qwen3Decoder.layer(index, spec, mask_input))


def qwen3_prefill_layer_fused_kv(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Named:
    """The same with the side outputs `kv.{index}.k` and `kv.{index}.v`."""
    return Named(f"layer{index}", Qwen3Decoder.layer_with_kv(index, spec, mask_input))


def qwen3_prefill_layer_composed(index: int, spec: Qwen3DecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` from small stages; the same numbers from the same checkpoint."""
    p = f"model.layers.{index}"
    attention = SelfAttnPrefill(attention_of(p, spec, mask_input))
    return Named(f"layer{index}", pre_norm_layer(p, spec.eps, attention, spec.output_bias))
