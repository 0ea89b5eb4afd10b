"""Decoder layers: stages that write the layer of a `LayerSpec`, GPT-2's layer, and the merge of an MTP head.

`DecoderLayer` composes small stages, `LlamaDecoder` writes one HIR block where it can, and `DecodeLayer` runs over
explicit cached keys and values.
"""

from __future__ import annotations

from typing import Self

from rlx_jax.blocks.attention import SelfAttnDecode, SelfAttnPrefill, SideOutputs, check_cached, kv_name, mask_operand
from rlx_jax.blocks.control import BlockStage, KvCacheContract, Named, check_hidden, run_stage
from rlx_jax.blocks.ffn import DOWN_ROLES, UP_ROLES
from rlx_jax.blocks.layer import MLP, LayerSpec
from rlx_jax.blocks.linear import GemmaRmsNorm, Linear, RmsNorm, block_of, dense, layer_norm_under
from rlx_jax.blocks.positions import rope_tables_for
from rlx_jax.blocks.self_attention import SelfAttention
from rlx_jax.dataclasses import dataclass, fields, replace
from rlx_jax.errors import ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import mask_kind
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.roles import roles_of_bias
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey

__all__ = ["Gpt2Layer", "Gpt2LayerSpec", "LlamaDecoder", "MtpMerge", "decoder_layer"]

# Fields of LayerSpec that `LlamaDecoderBlock`, or the stage that writes it, supports. A spec with any other field
# changed is written from small stages.
FUSED_BLOCK_FIELDS = frozenset(
    "num_heads num_kv_heads head_dim eps mask mask_input rope_theta qkv_bias output_bias mlp_bias hidden_shape "
    "use_custom_mask intermediate_size".split()
)

# -- layers from small stages --------------------------------------------------------------------


@dataclass(frozen=True)
class MixerLayer:
    """Decoder layer with a custom mixer: norms, residual additions and the MLP around `mixer`; `[B,S,H]` → same.

    Args:
        prefix: prefix of the layer's parameters.
        spec: the layer.
        mixer: stages that map the normalised `[B,S,H]` to the change of the residual stream.
        stage: name for error messages.
        output: apply the output projection of attention after the mixer.
    """

    prefix: str
    spec: LayerSpec
    mixer: tuple[BlockStage, ...]
    stage: str = "decoder_layer"
    output: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, self.stage), self.spec
        check_hidden(emit, x, s.hidden_shape, self.stage)
        spec = s.under(self.prefix)
        projection = Linear(
            spec.weight("o"), bias_key=spec.bias("o"), shape=spec.sizes("o", x.type.shape[-1]), roles=spec.roles("o")
        )
        output = (Named("self_attn", projection, again=True),) if self.output else ()

        def run(stage: BlockStage, x: FlowValue) -> FlowValue:
            """Run a stage with the checks of its contract."""
            return emit.require(run_stage(stage, emit, x), self.stage)

        def norm(name: str, x: FlowValue) -> FlowValue:
            """Write the norm `name` of the spec, or return x where the spec has none."""
            key = getattr(s.norms, name)
            return x if key is None else run(s.norm(f"{self.prefix}.{key}"), x)

        def mixer(x: FlowValue) -> FlowValue:
            for stage in (*self.mixer, *output):
                x = run(stage, x)
            return x

        def add(x: FlowValue, change: FlowValue) -> FlowValue:
            """Add a change to the residual stream x."""
            change = change if s.residual_multiplier == 1 else change * s.residual_multiplier
            return emit.add_node(Binary("add"), x, change)

        x = add(x, norm("after_attention", mixer(norm("before_attention", x))))
        return add(x, norm("after_mlp", run(s.mlp(self.prefix), norm("before_mlp", x))))


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer: `[B,S,H]` → same.

    Args:
        layer_prefix: replaces `{}` in the spec's keys.
        spec: the layer.
        mask_input: name of the declared input that a custom or bias mask reads.
        kv_name: the rotated keys and the values, `[B,S,K·D]`, become the side outputs `{kv_name}.k` and `.v`. With
            `kv_sink` the default is `kv.{i}`, with the number i at the end of the prefix.
        kv_sink: collects the names of the side outputs.
    """

    layer_prefix: str
    spec: LayerSpec
    mask_input: str | None = None
    kv_name: str | None = None
    kv_sink: SideOutputs | None = None

    @classmethod
    def layer(cls, index: int, spec: LayerSpec, mask_input: str | None = None) -> Self:
        """Return layer `index`, with Hugging Face's keys."""
        return cls(f"model.layers.{index}", spec, mask_input)

    @classmethod
    def layer_with_kv(
        cls, index: int, spec: LayerSpec, sink: SideOutputs | None = None, mask_input: str | None = None
    ) -> Self:
        """Return layer `index` with the side outputs `kv.{index}.k` and `kv.{index}.v`; `sink` collects the names."""
        return cls(f"model.layers.{index}", spec, mask_input, f"kv.{index}", sink)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        stage, spec, p = type(self).__name__, self.spec, self.layer_prefix
        name = kv_name(p, None) if self.kv_sink is not None and self.kv_name is None else self.kv_name
        attention = SelfAttnPrefill(spec.under(p, self.mask_input), name, stage, self.kv_sink)
        return MixerLayer(p, spec, (attention,), stage, output=True).emit(emit, value)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the types of keys and values, `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)


def decoder_layer(index: int, spec: LayerSpec, mask_input: str | None = None, prefix: str = "model.layers") -> Named:
    """Return layer `index` from small stages, with Hugging Face's keys under `{prefix}.{index}`."""
    return Named(f"layer{index}", DecoderLayer(f"{prefix}.{index}", spec, mask_input))


# -- the layer as one HIR block ------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaDecoder(DecoderLayer):
    """One Llama layer as the HIR block `llama_decoder_block`: `[B,S,H]` → same.

    A layer with options that the block does not support, or with keys and values as side outputs, is written from
    small stages instead. Weights under `layer_prefix`: `input_layernorm.weight`, `self_attn.{q,k,v,o}_proj.weight`,
    `post_attention_layernorm.weight`, `mlp.{gate,up,down}_proj.weight`, all `[out, in]`, and a `.bias` for each
    projection that has one in the spec.
    """

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        s, p = self.spec, self.layer_prefix
        # A spec with the same supported fields and defaults elsewhere: any difference is an unsupported option.
        plain = LayerSpec(**{name: getattr(s, name) for name in FUSED_BLOCK_FIELDS})
        if any(getattr(s, f.name) != getattr(plain, f.name) for f in fields(plain)) or self.kv_name or self.kv_sink:
            return super().emit(emit, value)
        x, mask, layer = emit.require(value, "LlamaDecoder"), mask_kind(s.mask), s.under(p, self.mask_input)
        check_hidden(emit, x, s.hidden_shape, "LlamaDecoder")
        cos, sin = rope_tables_for(emit, x, s.head_dim, s.rope_theta)
        beta = norm_beta(emit, x)
        hidden = x.type.shape[-1]
        biases = {name: key for name in hir.PROJECTIONS if (key := layer.bias(name)) is not None}
        block = hir.LlamaDecoderBlock(
            s.num_heads, s.head_dim, s.num_kv_heads, s.eps, mask, contract=1,
            biases=tuple(f"{name}_bias" for name in biases),
        )  # fmt: skip

        def weight(name: str) -> FlowValue:
            """Add the weight of projection `name`. The gate comes first: up and down have its intermediate size."""
            nonlocal layer
            value = emit.param(layer.weight(name), layer.sizes(name, hidden), layer.roles(name))
            if name == "gate":
                layer = replace(layer, intermediate_size=int(value.type.shape[0]))
            return value

        def gamma(name: str | None) -> FlowValue:
            return emit.param(f"{p}.{name}.weight", (hidden,))

        def bias(name: str, key: WeightKey) -> FlowValue:
            return emit.param(key, layer.sizes(name, hidden)[:1], roles_of_bias(layer.roles(name)[0]))

        return emit.add_node(
            block, x,
            gamma(s.norms.before_attention), beta, *map(weight, "qkvo"),
            gamma(s.norms.before_mlp), beta, *map(weight, MLP),
            cos, sin, *mask_operand(emit, mask, layer.mask_input, "LlamaDecoder"),
            *(bias(name, key) for name, key in biases.items()),
        )  # fmt: skip


def norm_beta(emit: Emit, x: FlowValue) -> FlowValue:
    """Return the beta `[H]` of a fused layer's norms: the zeros of a ZeroBeta stage if they fit, else new zeros."""
    zeros = emit.state.zero_beta
    return zeros if zeros is not None and zeros.type.shape == x.type.shape[-1:] else emit.zeros(x.type.shape[-1])


# -- layers over cached and new tokens -----------------------------------------------------------


@dataclass(frozen=True)
class DecodeLayer:
    """One decoder layer over cached and new tokens: `[B,S,H]` → same; see SelfAttnDecode.

    `kv_out` collects the names of the layer's side outputs. Recipes do not need this stage, because the compiler
    derives the program `explicit` from any causal flow.
    """

    layer_prefix: str
    layer_idx: int
    spec: LayerSpec
    kv_out: SideOutputs | None = None

    @classmethod
    def layer(cls, index: int, spec: LayerSpec, kv_out: SideOutputs | None = None) -> Self:
        """Return layer `index`, with Hugging Face's keys."""
        return cls(f"model.layers.{index}", index, spec, kv_out)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        stage, p = type(self).__name__, self.layer_prefix
        check_cached(emit, self.layer_idx, stage)
        return MixerLayer(p, self.spec, (self.attention(),), stage, output=True).emit(emit, value)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the cache contract of the layer's attention."""
        return self.attention().cache_contract(emit, hidden)

    def attention(self) -> SelfAttnDecode:
        """Return the attention stage of the layer."""
        spec = self.spec.under(self.layer_prefix)
        return SelfAttnDecode(spec, self.layer_idx, spec.use_custom_mask, self.kv_out)


@dataclass(frozen=True)
class Gpt2LayerSpec:
    """Keys and sizes of a GPT-2 layer. `activation` is a name in `UNARY`.

    `score_scale` is the factor of q kᵀ; None is D^(−1/2). `intermediate_size`, the width of the MLP, is needed only
    for weights that no source has.
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
    """GPT-2's causal layer, `[B,S,H]` → same: `h = x + attn(ln(x)) Wo + bo`, `y = h + act(ln(h) Wi + bi) Wd + bd`.

    Weights under the prefix, stored as `[in, out]`: `ln_1.*`, `attn.c_attn.{weight,bias}` (columns of q, then k, then
    v, `[H, 3H]`), `attn.c_proj.*`, `ln_2.*`, `mlp.c_fc.*`, `mlp.c_proj.*`.
    """

    spec: Gpt2LayerSpec

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the types of keys and values, `[B, S, H]`: GPT-2 has as many key heads as query heads."""
        return KvCacheContract.packed(hidden, self.spec.hidden_size)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, "Gpt2Layer"), self.spec
        p = s.layer_prefix
        attention = SelfAttention(
            f"{p}.attn.c_attn.weight", f"{p}.attn.c_proj.weight", s.num_heads, qkv_bias=f"{p}.attn.c_attn.bias",
            out_bias=f"{p}.attn.c_proj.bias", transpose=False, causal=True, scale=s.score_scale, name="attn",
        )  # fmt: skip
        h = emit.add_node(Binary("add"), x, attention.emit(emit, layer_norm_under(emit, p, "ln_1", x, s.eps)))
        normed = layer_norm_under(emit, p, "ln_2", h, s.eps)
        inner = dense(
            emit, p, "mlp.c_fc", normed, UP_ROLES[::-1], s.intermediate_size, s.activation, transpose=False
        )  # fmt: skip
        ffn_out = dense(emit, p, "mlp.c_proj", inner, DOWN_ROLES[::-1], s.hidden_size, transpose=False)
        return emit.add_node(Binary("add"), h, ffn_out)


@dataclass(frozen=True)
class MtpMerge:
    """Merge embeddings and hidden states at the input of a multi-token-prediction head: `[norm_e(x) ‖ norm_h(h)] Wᵀ`.

    x is the active value, embeddings `[B,S,H]`; h is the input `hidden_input` `[B,S,H]`; the result is `[B,S,H]`.
    `weight_key` is `[H, 2H]`; its first H columns multiply the embedding, the order in Qwen 3.5's `mtp.fc.weight`. The
    weights of the norms are `[H]`. Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
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
            merged = emit.concat([self.embedding_norm.emit(emit, x), self.hidden_norm.emit(emit, h)])
            hidden = x.type.shape[-1]
            with emit.scope(block_of(self.weight_key)):
                return emit.linear(merged, self.weight_key, roles=("hidden", None), columns=hidden)
