"""Post-norm encoder layers: BERT's (Devlin et al. 2018), which families share under other names, and NomicBERT's."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.ffn import DOWN_ROLES, UP_ROLES
from rlx_jax.blocks.linear import dense, layer_norm_under
from rlx_jax.blocks.positions import POSITION_BIAS
from rlx_jax.blocks.self_attention import SelfAttention, head_width
from rlx_jax.errors import UnsupportedError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = ["BertEncoderLayer", "BertEncoderLayerSpec", "NomicEncoderLayer", "NomicEncoderLayerSpec"]


# Modules of a layer by style: the projections query, key, value and output, the norm after attention, the projections
# up and down, and the norm after them.
_FFN = ("intermediate.dense", "output.dense", "output.LayerNorm")
_OUTPUT = ("attention.output.dense", "attention.output.LayerNorm")
STYLES = {
    "bert": (*(f"attention.self.{name}" for name in ("query", "key", "value")), *_OUTPUT, *_FFN),
    "mpnet": (*(f"attention.attn.{name}" for name in "qkvo"), "attention.LayerNorm", *_FFN),
    "distilbert": (
        *(f"attention.{name}_lin" for name in ("q", "k", "v", "out")), "sa_layer_norm", "ffn.lin1", "ffn.lin2",
        "output_layer_norm",
    ),
    "albert": (
        *(f"attention.{name}" for name in ("query", "key", "value", "dense", "LayerNorm")), "ffn", "ffn_output",
        "full_layer_layer_norm",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BertEncoderLayerSpec:
    """Keys and sizes of a BERT layer.

    Args:
        attention_mask_input: name of an input with a keep mask `[B, S]`; None for no mask. The input may be absent.
        activation: a name in `UNARY`.
        qkv_style: names of the modules, `bert`, `mpnet`, `distilbert` or `albert`.
        position_bias: name of the registered value of a RelativeBias stage, added to the scores; MPNet has one.
        intermediate_size: width of the feed-forward half, needed only for weights that no source has.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float = 1e-12
    attention_mask_input: str | None = "attention_mask"
    activation: str = "gelu"
    qkv_style: str = "bert"
    position_bias: str | None = None
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "qkv_style", normalize_style(self.qkv_style))

    @staticmethod
    def hf(
        prefix: str,
        hidden_size: int,
        num_heads: int,
        eps: float = 1e-12,
        activation: str = "gelu",
        qkv_style: str = "bert",
        intermediate_size: int | None = None,
    ) -> BertEncoderLayerSpec:
        """Return the spec of a checkpoint in Hugging Face's layout.

        The head width is hidden / heads. The style `mpnet` reads the bias of a RelativeBias stage.
        """
        style, width = normalize_style(qkv_style), head_width(prefix, hidden_size, num_heads)
        return BertEncoderLayerSpec(
            prefix, hidden_size, num_heads, width, eps, activation=activation, qkv_style=style,
            position_bias=POSITION_BIAS if style == "mpnet" else None, intermediate_size=intermediate_size,
        )  # fmt: skip


@dataclass(frozen=True)
class BertEncoderLayer:
    """BERT's layer, `[B,S,H]` → same: `h = ln(attn(x) Wo + bo + x)`, `y = ln(act(h Wi + bi) Wd + bd + h)`.

    Weights under the prefix: `attention.self.{query,key,value}.{weight,bias}`, `attention.output.dense.*`,
    `attention.output.LayerNorm.*`, `intermediate.dense.*`, `output.dense.*`, `output.LayerNorm.*`. Other styles name
    them as `STYLES` has it.
    """

    spec: BertEncoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "BertEncoderLayer")
        s, p = self.spec, self.spec.layer_prefix
        *qkv, out, norm, up, down, last_norm = STYLES[s.qkv_style]
        heads = s.num_heads * s.head_dim
        keep = None if s.attention_mask_input is None else emit.optional_input(s.attention_mask_input)
        bias = None if s.position_bias is None else emit.named(s.position_bias)
        block, output = (name.split(".")[:-1] for name in (qkv[0], out))
        x = emit.block_input(x, "attention")
        attention_input = emit.block_input(x, *block)
        q, k, v = (dense(emit, p, n, attention_input, ("heads", "hidden"), heads) for n in qkv)
        extra = {name: value for name, value in (("keep", keep), ("bias", bias)) if value is not None}
        op = hir.Attention(s.num_heads, s.num_heads, extra=tuple(extra), by_distance=bias is not None)
        with emit.scope(*block):
            context = emit.add_node(op, q, k, v, *extra.values())
        # BERT's output projection has a block, which dumps show; in other styles it belongs to the block of attention.
        context = context if output == block else emit.block_input(context, *output)
        attended = dense(emit, p, out, context, ("hidden", "heads"), s.hidden_size)
        h = add_norm(emit, p, norm, attended, x, s.eps)
        inner = dense(emit, p, up, h, UP_ROLES, s.intermediate_size, s.activation)
        if (down_block := down.split(".")[:-1]) != up.split(".")[:-1]:
            inner = emit.block_input(inner, *down_block)
        ffn_out = dense(emit, p, down, inner, DOWN_ROLES, s.hidden_size)
        return add_norm(emit, p, last_norm, ffn_out, h, s.eps)


# -- helpers of encoder layers -------------------------------------------------------------------


def add_norm(emit: Emit, prefix: str, name: str, x: FlowValue, residual: FlowValue, eps: float) -> FlowValue:
    """Write `ln(x + residual)` with the norm `{prefix}.{name}`; the sum is in the block that contains the norm."""
    with emit.scope(*name.split(".")[:-1]):
        total = emit.add_node(Binary("add"), x, residual)
    return layer_norm_under(emit, prefix, name, total, eps)


def bert_layer_prefix(prefix: str, index: int) -> str:
    """Return the prefix of layer `index`: `encoder.layer.{i}`, or `{prefix}.encoder.layer.{i}` in task checkpoints."""
    return f"{prefix}.encoder.layer.{index}" if prefix else f"encoder.layer.{index}"


def normalize_style(style: str) -> str:
    """Return a name of `STYLES` in lower case.

    Raises:
        UnsupportedError: `style` is none of `STYLES`.
    """
    if style.lower() not in STYLES:
        raise UnsupportedError(f"BertEncoderLayer: unknown style {style!r}; styles are {', '.join(STYLES)}")
    return style.lower()


@dataclass(frozen=True)
class NomicEncoderLayerSpec:
    """Keys and sizes of a NomicBERT layer.

    Args:
        attention_mask_input: name of an input with a keep mask `[B, S]`; None for no mask. The input may be absent.
        activation: activation of the gate, a name in `UNARY`.
        rope_theta: base of the rotation, used when no RopeTables stage ran.
        intermediate_size: width of the MLP, needed only for weights that no source has.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float = 1e-12
    attention_mask_input: str | None = "attention_mask"
    activation: str = "silu"
    rope_theta: float = 1000.0
    intermediate_size: int | None = None


@dataclass(frozen=True)
class NomicEncoderLayer:
    """NomicBERT's layer, `[B,S,H]` → same: `h = ln(attn(x) Wo + x)`, `y = ln((h W₁₁ ⊙ act(h W₁₂)) W₂ + h)`.

    Queries and keys are rotated. Weights under the prefix: `attn.Wqkv.weight` (rows of q, then k, then v,
    `[3·N·D, H]`), `attn.out_proj.weight`, `norm1.*`, `mlp.fc11.weight`, `mlp.fc12.weight` (the gate),
    `mlp.fc2.weight`, `norm2.*`.
    """

    spec: NomicEncoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "NomicEncoderLayer")
        s, p = self.spec, self.spec.layer_prefix
        hidden, computes_tables = s.hidden_size, emit.state.rope_cos is None
        attention = SelfAttention(
            f"{p}.attn.Wqkv.weight", f"{p}.attn.out_proj.weight", s.num_heads, head_dim=s.head_dim,
            mask_input=s.attention_mask_input, name="attn", rope=None if computes_tables else "",
            rope_theta=s.rope_theta if computes_tables else None,
        )  # fmt: skip
        output = attention.emit(emit, x)
        h = add_norm(emit, p, "norm1", output, x, s.eps)
        up = dense(emit, p, "mlp.fc11", h, UP_ROLES, s.intermediate_size, bias=False)
        gate = dense(emit, p, "mlp.fc12", h, UP_ROLES, int(up.type.shape[-1]), bias=False)
        with emit.scope("mlp"):
            inner = emit.add_node(hir.GatedFfn(s.activation), gate, up)
        return add_norm(emit, p, "norm2", dense(emit, p, "mlp.fc2", inner, DOWN_ROLES, hidden, bias=False), h, s.eps)
