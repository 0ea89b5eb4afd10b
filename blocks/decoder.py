"""Decoder layers: the stages that write the layer of a `LayerSpec`, small ones or Llama's block; and GPT-2's layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from rlx_jax.blocks.attention import SelfAttnDecode, SelfAttnPrefill, SideOutputs, check_cached, kv_name, mask_operand
from rlx_jax.blocks.control import BlockStage, KvCacheContract, Named, check_hidden, run_stage
from rlx_jax.blocks.ffn import INTO, OUT_OF
from rlx_jax.blocks.layer import MLP, LayerSpec
from rlx_jax.blocks.linear import GemmaRmsNorm, Linear, RmsNorm, block_of, dense, norm_under
from rlx_jax.blocks.positions import rope_tables_for
from rlx_jax.blocks.self_attention import SelfAttention
from rlx_jax.errors import ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import mask_kind
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.roles import roles_of_bias
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey

__all__ = ["Gpt2Layer", "Gpt2LayerSpec", "LlamaDecoder", "MtpMerge", "decoder_layer"]

# What `LlamaDecoderBlock` has of a layer, and what only its stages read.
IN_BLOCK = frozenset(
    "num_heads num_kv_heads head_dim eps mask mask_input rope_theta qkv_bias output_bias mlp_bias hidden_shape "
    "use_custom_mask intermediate_size".split()
)

# -- from small stages ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerAround:
    """The layer under `prefix` around `mixer`, stages that turn the normalised `[B,S,H]` into what is added, with
    `output` through the output projection of attention. Errors name `stage`."""

    prefix: str
    spec: LayerSpec
    mixer: tuple[BlockStage, ...]
    stage: str = "decoder_layer"
    output: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, self.stage), self.spec
        check_hidden(emit, x, s.hidden_shape, self.stage)
        here = s.under(self.prefix)
        projection = Linear(
            here.weight("o"), bias_key=here.bias("o"), shape=here.sizes("o", x.type.shape[-1]), roles=here.roles("o")
        )
        output = (Named("self_attn", projection, again=True),) if self.output else ()

        def run(stage: BlockStage, x: FlowValue) -> FlowValue:
            return emit.require(run_stage(stage, emit, x), self.stage)

        def norm(name: str, x: FlowValue) -> FlowValue:
            key = getattr(s.norms, name)
            return x if key is None else run(s.norm(f"{self.prefix}.{key}"), x)

        def mixer(x: FlowValue) -> FlowValue:
            for stage in (*self.mixer, *output):
                x = run(stage, x)
            return x

        def add(x: FlowValue, change: FlowValue) -> FlowValue:
            change = change if s.residual_multiplier == 1 else change * s.residual_multiplier
            return emit.add_node(Binary("add"), x, change)

        x = add(x, norm("after_attention", mixer(norm("before_attention", x))))
        return add(x, norm("after_mlp", run(s.mlp(self.prefix), norm("before_mlp", x))))


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer: `[B,S,H]` → same. Weights: those of the spec's keys, with `layer_prefix` for `{}`.

    `mask_input` names the declared input that a custom or bias mask reads. With `kv_name` the keys (rotated) and
    values, `[B,S,K·D]`, are the side outputs `{kv_name}.k` and `.v`, which `kv_sink` collects; with `kv_sink` alone
    `kv_name` is `kv.{i}`, i the number that the prefix ends in.
    """

    layer_prefix: str
    spec: LayerSpec
    mask_input: str | None = None
    kv_name: str | None = None
    kv_sink: SideOutputs | None = None

    @classmethod
    def layer(cls, index: int, spec: LayerSpec, mask_input: str | None = None) -> Self:
        """Layer `index` under Hugging Face's keys."""
        return cls(f"model.layers.{index}", spec, mask_input)

    @classmethod
    def layer_with_kv(
        cls, index: int, spec: LayerSpec, sink: SideOutputs | None = None, mask_input: str | None = None
    ) -> Self:
        """The same with the side outputs `kv.{index}.k` and `kv.{index}.v`, which `sink` collects."""
        return cls(f"model.layers.{index}", spec, mask_input, f"kv.{index}", sink)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        stage, spec, p = type(self).__name__, self.spec, self.layer_prefix
        name = kv_name(p, None) if self.kv_sink is not None and self.kv_name is None else self.kv_name
        attention = SelfAttnPrefill(spec.under(p, self.mask_input), name, stage, self.kv_sink)
        return LayerAround(p, spec, (attention,), stage, output=True).emit(emit, value)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)


def decoder_layer(index: int, spec: LayerSpec, mask_input: str | None = None, prefix: str = "model.layers") -> Named:
    """Layer `index` from small stages, under Hugging Face's keys."""
    return Named(f"layer{index}", DecoderLayer(f"{prefix}.{index}", spec, mask_input))


# -- as one block --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaDecoder(DecoderLayer):
    """One Llama layer as the HIR block `llama_decoder_block`: `[B,S,H]` → same; a layer that the block does not
    describe, or whose keys and values are side outputs, from small stages.

    Weights under `layer_prefix`: `input_layernorm.weight`, `self_attn.{q,k,v,o}_proj.weight`,
    `post_attention_layernorm.weight`, `mlp.{gate,up,down}_proj.weight`, all `[out, in]`, and their `.bias` where
    the spec says so.
    """

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        s, p = self.spec, self.layer_prefix
        plain = LayerSpec(**{name: getattr(s, name) for name in IN_BLOCK})
        if any(getattr(s, f.name) != getattr(plain, f.name) for f in fields(plain)) or self.kv_name or self.kv_sink:
            return super().emit(emit, value)
        x, mask, here = emit.require(value, "LlamaDecoder"), mask_kind(s.mask), s.under(p, self.mask_input)
        check_hidden(emit, x, s.hidden_shape, "LlamaDecoder")
        cos, sin = rope_tables_for(emit, x, s.head_dim, s.rope_theta)
        zero = norm_beta(emit, x)
        hidden = x.type.shape[-1]
        biases = {name: key for name in hir.PROJECTIONS if (key := here.bias(name)) is not None}
        block = hir.LlamaDecoderBlock(
            s.num_heads, s.head_dim, s.num_kv_heads, s.eps, mask, contract=1,
            biases=tuple(f"{name}_bias" for name in biases),
        )  # fmt: skip

        def weight(name: str) -> FlowValue:
            nonlocal here
            value = emit.param(here.weight(name), here.sizes(name, hidden), here.roles(name))
            if name == "gate":  # the others are as wide
                here = replace(here, intermediate_size=int(value.type.shape[0]))
            return value

        def gamma(name: str | None) -> FlowValue:
            return emit.param(f"{p}.{name}.weight", (hidden,))

        def bias(name: str, key: WeightKey) -> FlowValue:
            return emit.param(key, here.sizes(name, hidden)[:1], roles_of_bias(here.roles(name)[0]))

        return emit.add_node(
            block, x,
            gamma(s.norms.before_attention), zero, *map(weight, "qkvo"),
            gamma(s.norms.before_mlp), zero, *map(weight, MLP),
            cos, sin, *mask_operand(emit, mask, here.mask_input, "LlamaDecoder"),
            *(bias(name, key) for name, key in biases.items()),
        )  # fmt: skip


def norm_beta(emit: Emit, x: FlowValue) -> FlowValue:
    """The beta `[H]` of a fused layer's norms: zeros, those of a ZeroBeta stage if they fit."""
    zero = emit.state.zero_beta
    return zero if zero is not None and zero.type.shape == x.type.shape[-1:] else emit.zeros(x.type.shape[-1])


# -- over cached and new tokens ------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeLayer:
    """One decoder layer over cached and new tokens: `[B,S,H]` → same; see SelfAttnDecode.

    `kv_out` collects the names of its side outputs. A recipe needs no such stage: `explicit` is derived from any causal
    flow.
    """

    layer_prefix: str
    layer_idx: int
    spec: LayerSpec
    kv_out: SideOutputs | None = None

    @classmethod
    def layer(cls, index: int, spec: LayerSpec, kv_out: SideOutputs | None = None) -> Self:
        """Layer `index` under Hugging Face's keys."""
        return cls(f"model.layers.{index}", index, spec, kv_out)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        stage, p = type(self).__name__, self.layer_prefix
        check_cached(emit, self.layer_idx, stage)
        return LayerAround(p, self.spec, (self.attention(),), stage, output=True).emit(emit, value)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """That of the attention in the middle."""
        return self.attention().cache_contract(emit, hidden)

    def attention(self) -> SelfAttnDecode:
        """The stage in the middle."""
        spec = self.spec.under(self.layer_prefix)
        return SelfAttnDecode(spec, self.layer_idx, spec.use_custom_mask, self.kv_out)


@dataclass(frozen=True)
class Gpt2LayerSpec:
    """Keys and sizes of a GPT-2 layer. `activation` is a name in `UNARY`.

    `score_scale` is what q kᵀ is multiplied with; None is D^(−1/2). `intermediate_size`, the width of the MLP, is
    needed only for weights that no source has.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    score_scale: float | None = None
    intermediate_size: int | None = None


@dataclass(frozen=True)
class Gpt2Layer:
    """`h = x + attn(ln(x)) Wo + bo`, `y = h + act(ln(h) Wi + bi) Wd + bd`: `[B,S,H]` → same, causal.

    Weights under the prefix: `ln_1.*`, `attn.c_attn.{weight,bias}` (q, k and v side by side, `[H, 3H]`),
    `attn.c_proj.*`, `ln_2.*`, `mlp.c_fc.*`, `mlp.c_proj.*`.
    """

    spec: Gpt2LayerSpec

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values of every head."""
        return KvCacheContract.packed(hidden, self.spec.hidden_size)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, "Gpt2Layer"), self.spec
        p = s.layer_prefix
        attention = SelfAttention(
            f"{p}.attn.c_attn.weight", f"{p}.attn.c_proj.weight", s.num_heads, qkv_bias=f"{p}.attn.c_attn.bias",
            out_bias=f"{p}.attn.c_proj.bias", transpose=False, causal=True, scale=s.score_scale, name="attn",
        )  # fmt: skip
        h = emit.add_node(Binary("add"), x, attention.emit(emit, norm_under(emit, p, "ln_1", x, s.eps)))
        normed = norm_under(emit, p, "ln_2", h, s.eps)
        wide = dense(
            emit, p, "mlp.c_fc", normed, INTO[::-1], s.intermediate_size, s.activation, transpose=False
        )  # fmt: skip
        fed = dense(emit, p, "mlp.c_proj", wide, OUT_OF[::-1], s.hidden_size, transpose=False)
        return emit.add_node(Binary("add"), h, fed)


@dataclass(frozen=True)
class MtpMerge:
    """`[norm_e(x) ‖ norm_h(h)] Wᵀ`: embeddings `[B,S,H]` → same, h the input `hidden_input` `[B,S,H]`.

    Weight: `weight_key` `[H, 2H]`, whose first H columns meet the embedding; those of the norms `[H]`. Source:
    DeepSeek-V3, arXiv:2412.19437, section 2.2; the order of the halves is that of Qwen 3.5's `mtp.fc.weight`.
    """

    embedding_norm: RmsNorm | GemmaRmsNorm
    hidden_norm: RmsNorm | GemmaRmsNorm
    weight_key: str
    hidden_input: str = "hidden"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, h = emit.require(value, "MtpMerge"), emit.flow_input(self.hidden_input)
        if x.type.shape != h.type.shape:
            raise ShapeError(
                f"{emit.path}: MtpMerge: embeddings are {x.type}, the input {self.hidden_input!r} {h.type}"
            )
        with emit.scope("merge"):
            both = emit.concat([self.embedding_norm.emit(emit, x), self.hidden_norm.emit(emit, h)])
            hidden = x.type.shape[-1]
            with emit.scope(block_of(self.weight_key)):
                return emit.linear(both, self.weight_key, roles=("hidden", None), columns=hidden)
