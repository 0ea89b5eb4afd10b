"""Decoder layers: one from small stages that a record describes, and Llama's as one block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

from rlx_jax.blocks.attention import SelfAttnPrefill, SelfAttnPrefillSpec, mask_operand
from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.control import BlockStage, Named, Sequence, check_hidden
from rlx_jax.blocks.ffn import INTO, OUT_OF, GeGlu, SwiGlu
from rlx_jax.blocks.linear import Linear, ResidualAdd, ResidualSave
from rlx_jax.blocks.moe import MoeFfn, MoeSpec
from rlx_jax.blocks.norm import GemmaRmsNorm, RmsNorm
from rlx_jax.blocks.rope import rope_tables_for
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind, mask_kind
from rlx_jax.ir.roles import roles_of_bias
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.trace.emit import Emit, FlowValue

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ROLES: dict[str, tuple[str, str]] = dict(
    zip(
        (*ATTENTION, *MLP),
        (("heads", "hidden"), *[("kv_heads", "hidden")] * 2, ("hidden", "heads"), *[INTO] * 2, OUT_OF),
        strict=True,
    )
)
"""What the axes of each projection are."""

GATES: dict[str, type[SwiGlu] | type[GeGlu]] = {"silu": SwiGlu, "gelu_tanh": GeGlu}
"""The MLP by the activation of its gate."""

HiddenShape = tuple[int | str | None, ...] | None
"""Of the input `[B, S, H]` of a layer, to be checked; None is any size."""

# -- any layer -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The keys, inside a layer, of the norms around its two halves; None for no norm. The defaults are Llama's."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @staticmethod
    def around_both() -> LayerNorms:
        """One before and one after each half, under Gemma 2's keys."""
        return LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        )


@dataclass(frozen=True)
class CheckHidden:
    """Hold the active value against a `hidden_shape`, as `check_hidden` does, and pass it on."""

    shape: HiddenShape
    stage: str

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, self.stage)
        check_hidden(emit, x, self.shape, self.stage)
        return x


@dataclass(frozen=True)
class LayerWeights:
    """The shapes of the weights of the layer under `prefix`, where no source has them; the value is passed on."""

    prefix: str
    spec: DecoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        if value is not None:
            known = (emit.size_of(f"{self.prefix}.{name}.weight", 0) for name in MLP[:2])
            inner = next((size for size in known if size is not None), 0)
            hidden = value.type.shape[-1]
            emit.suppose(self.spec.shapes(int(hidden) if is_static(hidden) else 0, inner), self.prefix)
        return value


@dataclass(frozen=True, kw_only=True)
class DecoderLayerSpec:
    """A decoder layer: its sizes, and how it differs from Llama's, whose values are the defaults.

        h = x + after(attention(before(x)) Wo)        y = h + after(mlp(before(h)))

    `num_heads` is a multiple of `num_kv_heads`; `head_dim` need not be hidden / heads.

    Args:
        eps: of every norm.
        mask: causal, or a sliding window of the last keys.
        rope: the name of the RopeTables to read, where a flow has several.
        rope_theta: the base of the rotation when no RopeTables stage ran.
        n_rot: columns of each head that are rotated; None is all, 0 is none (NoPE).
        gated: a sigmoid gate of each head of the context, beside its query in q's weight `[N·2D, H]`.
        sinks: a score of each head in the softmax of its attention, `self_attn.sinks` `[N]`; see `emit.attention`.
        score_scale: what q kᵀ is multiplied with; None is D^(−1/2).
        attn_logit_softcap: c tanh(scores / c).
        qkv_bias, output_bias, mlp_bias: biases of the projections.
        qk_norm: an RMSNorm of every query and key head before the rotation, or none.
        norms: which norms there are, and their keys.
        zero_centred: norms multiply with 1 + w, those of heads too.
        activation: of the gate, `silu` or `gelu_tanh`.
        moe: experts in the place of the MLP.
        hidden_shape: what the input is held against, if given.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    mask: MaskKind | str = hir.MASK_KINDS["causal"]
    rope: str = ""
    rope_theta: float = 10000.0
    n_rot: int | None = None
    gated: bool = False
    sinks: bool = False
    score_scale: float | None = None
    attn_logit_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["heads"] | None = None
    norms: LayerNorms = LayerNorms()
    zero_centred: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    mlp_bias: bool = False
    moe: MoeSpec | None = None
    hidden_shape: HiddenShape = None

    def __post_init__(self) -> None:
        if self.moe is not None and self.mlp_bias:
            raise GraphError(
                "DecoderLayerSpec: mlp_bias is of an MLP, and moe has experts in its place; give one of them"
            )
        for name, known in (("activation", tuple(GATES)), ("qk_norm", (None, "heads"))):
            if getattr(self, name) not in known:
                said = " or ".join(map(repr, known))
                raise GraphError(f"DecoderLayerSpec: {name} is {getattr(self, name)!r}; expected {said}")

    def attention(self, prefix: str, mask_input: str | None = None) -> SelfAttnPrefillSpec:
        """The attention of the layer under `prefix`."""
        heads = (self.num_heads, self.head_dim, self.num_kv_heads)
        keys = SelfAttnPrefillSpec.hf_layer(prefix, *heads, bias=self.qkv_bias, qk_norm=self.qk_norm == "heads")
        return replace(
            keys, mask=self.mask, mask_input=mask_input, rope=self.rope, rope_theta=self.rope_theta,
            score_scale=self.score_scale, attn_logit_softcap=self.attn_logit_softcap,
            qk_norm_eps=self.eps, qk_norm_offset=float(self.zero_centred), n_rot=self.n_rot, gated=self.gated,
            sinks_key=f"{prefix}.self_attn.sinks" if self.sinks else None,
        )  # fmt: skip

    def around(self, prefix: str, attention: BlockStage, stage: str = "decoder_layer") -> Sequence:
        """The layer under `prefix` from small stages; `stage` is its name in errors.

        `attention` turns the normalised `[B,S,H]` into the context `[B,S,N·D]`, before its output projection.
        """
        o_proj = f"{prefix}.self_attn.o_proj"
        bias = f"{o_proj}.bias" if self.output_bias else None
        output = Linear(f"{o_proj}.weight", bias_key=bias, roles=("hidden", "heads"))
        return self.with_mixer(prefix, [attention, Named("self_attn", output, again=True)], stage)

    def with_mixer(self, prefix: str, mixer: Iterable[BlockStage], stage: str) -> Sequence:
        """The layer under `prefix` from small stages: `mixer` turns the normalised `[B,S,H]` into what is added."""
        n = self.norms
        return Sequence(
            (
                *([] if self.hidden_shape is None else [CheckHidden(self.hidden_shape, stage)]),
                LayerWeights(prefix, self),
                *self._added(prefix, n.before_attention, mixer, n.after_attention),
                *self._added(prefix, n.before_mlp, [self.mlp(prefix)], n.after_mlp),
            )
        )

    def mlp(self, prefix: str) -> SwiGlu | GeGlu | MoeFfn:
        """The MLP of the layer under `prefix`, or its experts."""
        if self.moe is not None:
            return MoeFfn(prefix, self.moe, self.activation)
        return GATES[self.activation].hf_mlp(prefix, self.mlp_bias)

    def whole(self, emit: Emit, x: FlowValue, prefix: str, attention: BlockStage, stage: str) -> FlowValue:
        """The layer as the work of one stage: its own sums leave the register of ResidualSave as it was."""
        outer, emit.state.residual = emit.state.residual, None
        out = self.around(prefix, attention, stage).emit(emit, x)
        emit.state.residual = outer
        return emit.require(out, stage)

    def _added(
        self, prefix: str, before: str | None, half: Iterable[BlockStage], after: str | None
    ) -> Iterable[BlockStage]:
        """`x + after(half(before(x)))`."""
        first, last = ([] if name is None else [self.norm(f"{prefix}.{name}")] for name in (before, after))
        return (ResidualSave(), *first, *half, *last, ResidualAdd())

    def norm(self, name: str) -> RmsNorm | GemmaRmsNorm:
        """A norm as those of the layer, with the weight `{name}.weight`."""
        return (GemmaRmsNorm if self.zero_centred else RmsNorm)(f"{name}.weight", self.eps)

    def shapes(self, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
        """Every weight of the layer by its key inside it, for values `[B,S,hidden]` and an MLP `inner` wide; experts
        know their own width."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        names = (getattr(self.norms, f.name) for f in fields(self.norms))
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in names if name is not None}
        query = q * (2 if self.gated else 1)
        attention = dict(zip(ATTENTION, [(query, hidden), (kv, hidden), (kv, hidden), (hidden, q)], strict=True))
        dense = dict(zip(MLP, [(inner, hidden), (inner, hidden), (hidden, inner)], strict=True))
        mlp = {} if self.moe is not None else dense
        biased = ATTENTION[:3] * self.qkv_bias + ATTENTION[3:] * self.output_bias + MLP * self.mlp_bias
        for name, shape in (attention | mlp).items():
            shapes[f"{name}.weight"] = shape
            if name in biased:
                shapes[f"{name}.bias"] = shape[:1]
        if self.moe is not None:
            shapes |= self.moe.shapes(hidden)
        if self.qk_norm is not None:
            shapes |= {f"self_attn.{n}_norm.weight": (self.head_dim,) for n in "qk"}
        return shapes | ({"self_attn.sinks": (self.num_heads,)} if self.sinks else {})

    def held_by(self, other: DecoderLayerSpec, stage: str) -> None:
        """Refuse what a stage with a narrower spec would drop; `other` is that spec's own layer.

        Raises:
            GraphError: names the fields.
        """
        lost = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        if lost:
            values = ", ".join(f"{name} {getattr(self, name)}" for name in lost)
            raise GraphError(f"{stage} has no {values}: make the layer with decoder_layer")


def decoder_layer(
    index: int, spec: DecoderLayerSpec, mask_input: str | None = None, prefix: str = "model.layers"
) -> Named:
    """Layer `index` from small stages, under Hugging Face's keys."""
    p = f"{prefix}.{index}"
    return Named(f"layer{index}", spec.around(p, SelfAttnPrefill(spec.attention(p, mask_input))))


# -- Llama's -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
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
    hidden_shape: HiddenShape = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0

    @staticmethod
    def of(layer: DecoderLayerSpec) -> LlamaDecoderSpec:
        """The spec of such a layer.

        Raises:
            GraphError: Llama's block has not all that the layer has.
        """
        spec = LlamaDecoderSpec(
            num_heads=layer.num_heads, head_dim=layer.head_dim, num_kv_heads=layer.num_kv_heads, eps=layer.eps,
            mask=layer.mask, attention_bias=layer.qkv_bias, mlp_bias=layer.mlp_bias, rope_theta=layer.rope_theta,
            hidden_shape=layer.hidden_shape,
        )  # fmt: skip
        layer.held_by(spec.layer(), "LlamaDecoder")
        return spec

    def layer(self) -> DecoderLayerSpec:
        """The same layer from small stages."""
        return DecoderLayerSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, eps=self.eps,
            mask=self.mask, rope_theta=self.rope_theta, qkv_bias=self.attention_bias,
            output_bias=self.attention_bias, mlp_bias=self.mlp_bias, hidden_shape=self.hidden_shape,
        )  # fmt: skip


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

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LlamaDecoder")
        s, p = self.spec, self.layer_prefix
        mask = mask_kind(s.mask)
        check_hidden(emit, x, s.hidden_shape, "LlamaDecoder")
        cos, sin = rope_tables_for(emit, x, s.head_dim, s.rope_theta)
        zero = norm_beta(emit, x)
        LayerWeights(p, s.layer()).emit(emit, x)

        def weight(name: str) -> FlowValue:
            return emit.param(f"{p}.{name}.weight", roles=ROLES.get(name))

        biased = ATTENTION * s.attention_bias + MLP * s.mlp_bias
        block = hir.LlamaDecoderBlock(
            s.num_heads, s.head_dim, s.num_kv_heads, s.eps, mask, contract=1,
            biases=tuple(f"{name.split('.')[1].removesuffix('_proj')}_bias" for name in biased),
        )  # fmt: skip
        return emit.add_node(
            block, x,
            weight("input_layernorm"), zero, *(weight(name) for name in ATTENTION),
            weight("post_attention_layernorm"), zero, *(weight(name) for name in MLP),
            cos, sin, *mask_operand(emit, mask, self.mask_input, "LlamaDecoder"),
            *(emit.param(f"{p}.{name}.bias", roles=roles_of_bias(ROLES[name][0])) for name in biased),
        )  # fmt: skip


def llama_prefill_layer_fused(index: int, spec: LlamaDecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` as one block."""
    return Named(f"layer{index}", LlamaDecoder.layer(index, spec, mask_input))


def llama_prefill_layer_composed(index: int, spec: LlamaDecoderSpec, mask_input: str | None = None) -> Named:
    """Layer `index` from small stages; the same numbers as the fused form from the same checkpoint."""
    return decoder_layer(index, spec.layer(), mask_input)


def norm_beta(emit: Emit, x: FlowValue) -> FlowValue:
    """The beta `[H]` of a fused layer's norms: zeros, those of a ZeroBeta stage if they fit."""
    zero = emit.state.zero_beta
    return zero if zero is not None and zero.type.shape == x.type.shape[-1:] else emit.zeros(x.type.shape[-1])
