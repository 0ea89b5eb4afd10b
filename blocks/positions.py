"""Learned position embeddings (Vaswani et al. 2017, section 3.5; BERT, GPT-2)."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.linear import TABLE
from rlx_jax.blocks.rope import positions_of
from rlx_jax.ir import hir
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True)
class LearnedPositions:
    """`x + E[position]`: x `[B,S,H]` → same. Weight: `weight_key` `[positions, H]`.

    Positions are the input `position_ids` where the flow declares it and it is given, else 0, 1, 2 …, which go on
    behind cached tokens. `shape` is that of the weight; needed only when the flow is compiled without weights.
    """

    weight_key: str
    shape: tuple[int, int] | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LearnedPositions")
        with emit.scope("position_embeddings"):
            table = emit.param(self.weight_key, self.shape, TABLE)
            return x + emit.add_node(hir.Embed(), table, positions_of(emit, x))
