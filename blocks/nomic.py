"""NomicBERT's encoder layer (Nussbaum et al. 2024): rotary attention and a gated MLP, norms behind each half."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.encoder import add_norm, attend, dense
from rlx_jax.blocks.ffn import INTO, OUT_OF
from rlx_jax.blocks.rope import rope_tables_for
from rlx_jax.ir import hir
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True)
class NomicEncoderLayerSpec:
    """Keys and sizes of a NomicBERT layer; the mask input may be absent. `activation` is that of the gate.

    `rope_theta` is the base used when no RopeTables stage ran.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float = 1e-12
    attention_mask_input: str | None = "attention_mask"
    activation: str = "silu"
    rope_theta: float = 1000.0

    def shapes(self, inner: int) -> dict[str, tuple[int, ...]]:
        """Every weight of the layer by its key, for an MLP `inner` wide."""
        h, packed = self.hidden_size, self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn.Wqkv.weight": (3 * packed, h),
            "attn.out_proj.weight": (h, packed),
            "mlp.fc11.weight": (inner, h),
            "mlp.fc12.weight": (inner, h),
            "mlp.fc2.weight": (h, inner),
        }
        shapes |= {f"{norm}.{kind}": (h,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        return {f"{self.layer_prefix}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True)
class NomicEncoderLayer:
    """`h = ln(attn(x) Wo + x)`, `y = ln((h W₁₁ ⊙ silu(h W₁₂)) W₂ + h)`: `[B,S,H]` → same; queries and keys rotated.

    Weights under the prefix: `attn.Wqkv.weight` (q, k and v one above the other, `[3·N·D, H]`), `attn.out_proj.weight`,
    `norm1.*`, `mlp.fc11.weight`, `mlp.fc12.weight` (the gate), `mlp.fc2.weight`, `norm2.*`.
    """

    spec: NomicEncoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "NomicEncoderLayer")
        s, p = self.spec, self.spec.layer_prefix
        keep = None if s.attention_mask_input is None else emit.optional_input(s.attention_mask_input)
        cos, sin = rope_tables_for(emit, x, s.head_dim, s.rope_theta)
        packed = dense(emit, p, "attn.Wqkv", x, ("heads", "hidden"), bias=False)
        with emit.scope("attn"):
            q, k, v = emit.split(packed, [s.num_heads * s.head_dim] * 3)
            rope = hir.Rope(s.head_dim, s.head_dim)
            q, k = (emit.add_node(rope, t, cos, sin) for t in (q, k))
            context = attend(emit, s.num_heads, q, k, v, keep)
        output = dense(emit, p, "attn.out_proj", context, ("hidden", "heads"), bias=False)
        h = add_norm(emit, p, "norm1", output, x, s.eps)
        up, gate = (dense(emit, p, f"mlp.{name}", h, INTO, bias=False) for name in ("fc11", "fc12"))
        with emit.scope("mlp"):
            inner = emit.add_node(hir.GatedFfn(s.activation), gate, up)
        return add_norm(emit, p, "norm2", dense(emit, p, "mlp.fc2", inner, OUT_OF, bias=False), h, s.eps)
