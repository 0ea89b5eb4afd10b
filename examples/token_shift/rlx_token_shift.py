"""A plugin of rlx_jax, as in `docs/adding-a-block.md` and `docs/plugins.md`: blocks, a rule, a stage, a family.

Each feed-forward block mixes a token with the previous one (the token shift of RWKV, Peng et al. 2023) and has a
squared ReLU activation (So et al. 2021). With the package installed, `rlx_jax.load` opens checkpoints of
`shifted_llama`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import DeriveError, ShapeError
from rlx_jax.ir.graph import Builder, Graph, Hir, Mir, Node, TypeCache, Value
from rlx_jax.ir.operands import BLOCK, ELEMENTWISE
from rlx_jax.ir.ops.index import TakeRow
from rlx_jax.ir.ops.pointwise import Binary, FullLike, Unary
from rlx_jax.ir.ops.shape import Concat, Narrow, Slice
from rlx_jax.ir.region import everywhere, rewrite
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.hir.derive import LENGTHS, Derivation
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder_config import DecoderConfig
from rlx_jax.models.families import Family

# -- blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SquaredRelu(Hir):
    """`relu(x)²`, elementwise."""

    traits = BLOCK

    def expand(self, b: Builder, *operands: Value) -> Value:
        y = b(Unary("relu"), *operands)
        return b(Binary("mul"), y, y)


@dataclass(frozen=True)
class SquaredReluOp(Mir):
    """`relu(x)²` as one op."""

    traits = ELEMENTWISE

    def eval(self, x: jax.Array) -> jax.Array:
        return jnp.square(jnp.maximum(x, 0))


def lower_squared_relu(op: SquaredRelu, b: Builder, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """squared_relu(x) → squared_relu_op(x)"""
    return b.add(SquaredReluOp(), *inputs)


@dataclass(frozen=True)
class TokenShift(Hir):
    """`y[:, t] = x[:, t − 1]`, zeros at the first token: x `[B, S, H]` → same."""

    traits = BLOCK

    def check(self, *operands: TensorType) -> None:
        if operands[0].rank != 3:
            raise ShapeError(f"token_shift: x is [B, S, H], got {operands[0]}")

    def expand(self, b: Builder, *operands: Value) -> Value:
        (x,) = operands
        first = b(FullLike(0.0, b.type(x).dtype), b(Narrow(1, 0, 1), x))
        return self.shift_after(b, first, x)

    def shift_after(self, b: Builder, previous: Value, x: Value) -> Value:
        """Shift `x` by one token, with the token `previous` `[B, 1, H]` in front."""
        everything, rows = (None, None, None), (None, -1, None)
        return b(Slice((everything, rows, everything)), b(Concat(1), previous, x))


def derive_token_shift(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """token_shift(x) → [state.last ‖ x] without its last row; state.last := row `lengths` of [state.last ‖ x]

    A row without new tokens keeps its state, which is row 0.
    """
    if d.program == "explicit":
        raise DeriveError("token_shift keeps its last token in the state: it has no explicit program")
    (x,) = inputs
    t = b.type(x)
    state_type = TensorType((t.shape[0], 1, t.shape[2]), t.dtype)
    leaf, previous = d.state(b, node.origin.path, "last", state_type, ("batch", None, None))
    b.writes.append((leaf, b(TakeRow(), b(Concat(1), previous, x), b.leaf(LENGTHS))))
    return (node.op.shift_after(b, previous, x),)  # type: ignore[attr-defined]


# -- a stage -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShiftedFfn:
    """`m = x + μ ⊙ (shift(x) − x)`, `y = relu(m Wᵤ)² W_d`.

    Weights: `{prefix}.mix` `[H]`, `{prefix}.up_proj.weight` `[F, H]`, `{prefix}.down_proj.weight` `[H, F]`. `inner`, F,
    is only needed without a weight source.
    """

    prefix: str
    inner: int | None = None

    def emit(self, emit: rlx.Emit, value: rlx.FlowValue | None) -> rlx.FlowValue:
        x = emit.require(value, "ShiftedFfn")
        with emit.scope("mlp"):
            previous = emit.add_node(TokenShift(), x)
            hidden = x.type.shape[-1]
            mixed = x + emit.param(f"{self.prefix}.mix", (hidden,), ("channel",)) * (previous - x)
            inner = emit.linear(mixed, f"{self.prefix}.up_proj.weight", roles=("ffn", "hidden"), columns=self.inner)
            inner = emit.add_node(SquaredRelu(), inner)
            return emit.linear(inner, f"{self.prefix}.down_proj.weight", roles=("hidden", "ffn"), columns=hidden)

    def intermediate_shape(self, emit: rlx.Emit, hidden: TensorType) -> tuple[Any, ...]:
        """`[B, S, F]`."""
        return (*hidden.shape[:-1], emit.param(f"{self.prefix}.up_proj.weight").type.shape[0])


# -- a family ------------------------------------------------------------------------------------


class ShiftedLlamaFlow(DecoderFlow[DecoderConfig]):
    """Llama with `ShiftedFfn` in place of its MLP: see `DecoderFlow`."""

    name = "shifted_llama"

    def stage(self, index: int, spec: blocks.LayerSpec) -> blocks.BlockStage:
        p, hidden = f"model.layers.{index}", self.config.hidden_size
        return blocks.Sequence(
            [
                blocks.ResidualSave(),
                spec.norm(f"{p}.input_layernorm"),
                blocks.SelfAttnPrefill(spec.attention(p)),
                blocks.Linear(f"{p}.self_attn.o_proj.weight", shape=(hidden, None), roles=("hidden", "heads")),
                blocks.ResidualAdd(),
                blocks.ResidualSave(),
                spec.norm(f"{p}.post_attention_layernorm"),
                ShiftedFfn(f"{p}.mlp", self.config.intermediate_size),
                blocks.ResidualAdd(),
            ]
        )


# -- a rewrite of HIR ----------------------------------------------------------------------------


def without_shift(graph: Graph, types: TypeCache) -> Graph:
    """token_shift(x) → x: the model without access to the previous token."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return inputs if isinstance(node.op, TokenShift) else None

    return rewrite(graph, everywhere(fn), types, "without_shift")


PLUGIN = rlx.Plugin(
    "token_shift",
    stages={"token_shift.ffn": ShiftedFfn},
    families={"shifted_llama": Family.decoder(ShiftedLlamaFlow, "ShiftedLlamaForCausalLM")},
    ops=(SquaredReluOp,),
    derive={TokenShift: derive_token_shift},
    direct={SquaredRelu: lower_squared_relu},
    extensions={"token_shift.off": without_shift},
)
