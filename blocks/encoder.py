"""BERT's post-norm encoder layer (Devlin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.ffn import INTO, OUT_OF
from rlx_jax.errors import GraphError, UnsupportedError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.param import Roles
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True)
class BertEncoderLayerSpec:
    """Keys and sizes of a BERT layer. `activation` is a name in `UNARY`; the mask input may be absent."""

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float = 1e-12
    attention_mask_input: str | None = "attention_mask"
    activation: str = "gelu"

    @staticmethod
    def hf(
        prefix: str, hidden_size: int, num_heads: int, eps: float = 1e-12, activation: str = "gelu"
    ) -> BertEncoderLayerSpec:
        """Head width hidden / heads."""
        if num_heads < 1 or hidden_size % num_heads:
            raise GraphError(f"{prefix}: hidden size {hidden_size} is not a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
        return BertEncoderLayerSpec(prefix, hidden_size, num_heads, head_dim, eps, activation=activation)


@dataclass(frozen=True)
class BertEncoderLayer:
    """`h = ln(attn(x) Wo + bo + x)`, `y = ln(gelu(h Wi + bi) Wd + bd + h)`: `[B,S,H]` → same.

    Weights under the prefix: `attention.self.{query,key,value}.{weight,bias}`, `attention.output.dense.*`,
    `attention.output.LayerNorm.*`, `intermediate.dense.*`, `output.dense.*`, `output.LayerNorm.*`.
    """

    spec: BertEncoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "BertEncoderLayer")
        s = self.spec
        keep = emit.optional_input(s.attention_mask_input) if s.attention_mask_input else None
        mask = MaskKind.KEEP if keep is not None else MaskKind.NONE

        def linear(name: str, x: FlowValue, roles: Roles, activation: str = "") -> FlowValue:
            with emit.scope(*name.split(".")):
                p = f"{s.layer_prefix}.{name}"
                return emit.linear(x, f"{p}.weight", f"{p}.bias", activation=activation, roles=roles)

        def add_norm(name: str, x: FlowValue, residual: FlowValue) -> FlowValue:
            with emit.scope(*name.split(".")):
                total = emit.add_node(Binary("add"), x, residual)
                return emit.layer_norm(total, f"{s.layer_prefix}.{name}.weight", f"{s.layer_prefix}.{name}.bias", s.eps)

        q, k, v = (linear(f"attention.self.{n}", x, ("heads", "hidden")) for n in ("query", "key", "value"))
        with emit.scope("attention", "self"):
            context = emit.add_node(
                hir.attention(s.num_heads, s.num_heads, mask), q, k, v, *([keep] if keep is not None else [])
            )
        h = add_norm("attention.output.LayerNorm", linear("attention.output.dense", context, ("hidden", "heads")), x)
        inner = linear("intermediate.dense", h, INTO, s.activation)
        return add_norm("output.LayerNorm", linear("output.dense", inner, OUT_OF), h)


def bert_layer_prefix(prefix: str, index: int) -> str:
    """`encoder.layer.{i}`, or `{prefix}.encoder.layer.{i}` for task checkpoints."""
    return f"{prefix}.encoder.layer.{index}" if prefix else f"encoder.layer.{index}"


def check_style(style: str) -> None:
    """Only BERT's own key names; MPNet is a family of its own."""
    if style.lower() != "bert":
        raise UnsupportedError(f"BertEncoderLayer: style {style!r} is not built; only 'bert' is")
