"""Llama's decoder layer, fused (one HIR block) and composed (small stages)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlx_jax.blocks.attention import SelfAttnPrefill, SelfAttnPrefillSpec, mask_operand
from rlx_jax.blocks.contracts import KvCacheContract, Shape, kv_cache
from rlx_jax.blocks.control import BlockStage, Named, Sequence
from rlx_jax.blocks.ffn import SwiGlu
from rlx_jax.blocks.linear import Linear, ResidualAdd, ResidualSave
from rlx_jax.blocks.norm import RmsNorm
from rlx_jax.blocks.rope import rope_tables_for
from rlx_jax.emit import Emit, FlowValue
from rlx_jax.errors import ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind, mask_kind
from rlx_jax.ir.types import tensor_type


@dataclass(frozen=True)
class LlamaDecoderSpec:
    """Sizes of a Llama layer. `num_heads` is a multiple of `num_kv_heads`; `head_dim` need not be hidden / heads.

    `hidden_shape` is checked against the input when given. `rope_theta` is the base used when no RopeTables
    stage ran (10000, the reference's default); `mask` custom or bias needs the stage's `mask_input`.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int
    eps: float = 1e-5
    mask: MaskKind | str = hir.MASK_KINDS["causal"]
    hidden_shape: tuple[int | str, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class LlamaDecoder:
    """One Llama layer as the HIR block `llama_decoder_block`: `[B,S,H]` → same.

    Weights under `layer_prefix`: `input_layernorm.weight`, `self_attn.{q,k,v,o}_proj.weight`,
    `post_attention_layernorm.weight`, `mlp.{gate,up,down}_proj.weight`, all `[out, in]`, and their `.bias` where
    the spec says so. `mask_input` names the declared input that a custom or bias mask reads.
    """

    layer_prefix: str
    spec: LlamaDecoderSpec
    mask_input: str | None = None

    @staticmethod
    def layer(index: int, spec: LlamaDecoderSpec, mask_input: str | None = None) -> LlamaDecoder:
        """Layer `index` under Hugging Face's keys."""
        return LlamaDecoder(f"model.layers.{index}", spec, mask_input)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LlamaDecoder")
        s, p = self.spec, self.layer_prefix
        mask = mask_kind(s.mask)
        check_hidden(emit, x, s.hidden_shape, "LlamaDecoder")
        cos, sin = rope_tables_for(emit, x, s.head_dim, s.rope_theta)
        zero = norm_beta(emit, x)

        def weight(name: str) -> FlowValue:
            return emit.param(f"{p}.{name}.weight")

        attn = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        biased = (attn if s.attention_bias else []) + (mlp if s.mlp_bias else [])
        block = hir.LlamaDecoderBlock(
            s.num_heads, s.head_dim, s.num_kv_heads, s.eps, mask, contract=1,
            biases=tuple(f"{name.split('.')[1].removesuffix('_proj')}_bias" for name in biased),
        )  # fmt: skip
        return emit.add(
            block, x,
            weight("input_layernorm"), zero, *(weight(name) for name in attn),
            weight("post_attention_layernorm"), zero, *(weight(name) for name in mlp),
            cos, sin, *mask_operand(emit, mask, self.mask_input, "LlamaDecoder"),
            *(emit.param(f"{p}.{name}.bias") for name in biased),
        )  # fmt: skip

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """Keys and values `[B, T, K·D]` of an input `[B, S, H]`."""
        return kv_cache(hidden, self.spec.num_kv_heads, self.spec.head_dim, self.spec.mask)


def llama_prefill_layer_fused(index: int, spec: LlamaDecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` as one block."""
    return Named(f"layer{index}", LlamaDecoder.layer(index, spec, mask_input))


def llama_prefill_layer_composed(index: int, spec: LlamaDecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` from small stages; the same numbers as the fused form from the same checkpoint."""
    p = f"model.layers.{index}"
    attention = SelfAttnPrefill(attention_spec(p, spec, mask_input))
    return Named(f"layer{index}", pre_norm_layer(p, spec.eps, attention, spec.attention_bias, spec.mlp_bias))


def attention_spec(prefix: str, spec: LlamaDecoderSpec, mask_input: str | None = None) -> SelfAttnPrefillSpec:
    """The attention of the layer under `prefix`."""
    keys = SelfAttnPrefillSpec.hf_layer(prefix, spec.num_heads, spec.head_dim, spec.num_kv_heads, spec.attention_bias)
    return replace(keys, mask=spec.mask, mask_input=mask_input, rope_theta=spec.rope_theta)


def pre_norm_layer(
    prefix: str, eps: float, attention: BlockStage, o_bias: bool = False, mlp_bias: bool = False
) -> Sequence:
    """`h = x + attention(rms(x))·Wo`, `y = h + swiglu(rms(h))` from small stages, under Llama's keys.

    `attention` turns the normalised `[B,S,H]` into the context `[B,S,N·D]`: SelfAttnPrefill or SelfAttnDecode.
    """
    o_proj = f"{prefix}.self_attn.o_proj"
    stages = (
        ResidualSave(),
        RmsNorm(f"{prefix}.input_layernorm.weight", eps),
        attention,
        Linear(f"{o_proj}.weight", bias_key=f"{o_proj}.bias" if o_bias else None),
        ResidualAdd(),
        ResidualSave(),
        RmsNorm(f"{prefix}.post_attention_layernorm.weight", eps),
        SwiGlu.hf_mlp(prefix, mlp_bias),
        ResidualAdd(),
    )
    return Sequence(stages)


def norm_beta(emit: Emit, x: FlowValue) -> FlowValue:
    """The beta `[H]` of a fused layer's norms: zeros, those of a ZeroBeta stage if they fit."""
    zero = emit.state.zero_beta
    return zero if zero is not None and zero.type.shape == x.type.shape[-1:] else emit.zeros(x.type.shape[-1])


def check_hidden(emit: Emit, x: FlowValue, shape: tuple[int | str | None, ...] | None, stage: str) -> None:
    """Hold the input of a layer against the `hidden_shape` of its spec; None is any size.

    Raises:
        ShapeError: block path, stage, both types.
    """
    if shape is None:
        return
    known = x.type.shape if len(shape) == x.ndim else shape
    sizes = [have if size is None else size for size, have in zip(shape, known, strict=True)]
    want = tensor_type(sizes, x.dtype, "hidden_shape")
    if want.shape != x.type.shape:
        raise ShapeError(f"{emit.path}: {stage}: the input is {x.type}, its spec says {want}")
