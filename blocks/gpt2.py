"""GPT-2's layer (Radford et al. 2019): norms before each half, projections stored `[in, out]`."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.self_attention import SelfAttention, three_parts
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue

LINEARS: dict[str, tuple[str, str]] = {
    "mlp.c_fc": ("hidden", "ffn"),
    "mlp.c_proj": ("ffn", "hidden"),
}
"""What the axes of the projections behind attention are, as stored: `[in, out]`."""


@dataclass(frozen=True)
class Gpt2LayerSpec:
    """Keys and sizes of a GPT-2 layer. `activation` is a name in `UNARY`.

    `score_scale` is what q kᵀ is multiplied with; None is D^(−1/2).
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    score_scale: float | None = None

    def shapes(self, inner: int) -> dict[str, tuple[int, ...]]:
        """Every weight of the layer by its key, for an MLP `inner` wide."""
        h = self.hidden_size
        sizes = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "mlp.c_fc": (h, inner), "mlp.c_proj": (inner, h)}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"{name}.bias": size[1:] for name, size in sizes.items()}
        shapes |= {f"{norm}.{kind}": (h,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        return {f"{self.layer_prefix}.{name}": shape for name, shape in shapes.items()}


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
        x = emit.require(value, "Gpt2Layer")
        s = self.spec
        emit.suppose(s.shapes(emit.size_of(f"{s.layer_prefix}.mlp.c_fc.weight", 1) or 0))

        def linear(name: str, x: FlowValue, activation: str = "") -> FlowValue:
            p, roles = f"{s.layer_prefix}.{name}", LINEARS[name]
            with emit.scope(*name.split(".")):
                return emit.linear(x, f"{p}.weight", f"{p}.bias", transpose=False, activation=activation, roles=roles)

        def norm(name: str, x: FlowValue) -> FlowValue:
            p = f"{s.layer_prefix}.{name}"
            with emit.scope(name):
                return emit.layer_norm(x, f"{p}.weight", f"{p}.bias", s.eps)

        p = f"{s.layer_prefix}.attn"
        attention = SelfAttention(
            three_parts(f"{p}.c_attn.weight", axis=1), f"{p}.c_proj.weight", s.num_heads,
            qkv_bias=three_parts(f"{p}.c_attn.bias"), out_bias=f"{p}.c_proj.bias", transpose=False, causal=True,
            scale=s.score_scale, name="attn",
        )  # fmt: skip
        h = emit.add_node(Binary("add"), x, attention.emit(emit, norm("ln_1", x)))
        inner = linear("mlp.c_fc", norm("ln_2", h), s.activation)
        return emit.add_node(Binary("add"), h, linear("mlp.c_proj", inner))
