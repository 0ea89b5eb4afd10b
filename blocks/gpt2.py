"""GPT-2's layer (Radford et al. 2019): norms before each half, projections stored `[in, out]`."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.ffn import INTO, OUT_OF
from rlx_jax.blocks.linear import dense
from rlx_jax.blocks.norm import norm_under
from rlx_jax.blocks.self_attention import SelfAttention
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue


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
