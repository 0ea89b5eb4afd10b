"""Learned positions: embeddings of them (BERT, GPT-2, RoBERTa), and a bias of the scores by distance (T5, MPNet)."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.linear import TABLE
from rlx_jax.blocks.rope import given_positions, positions_of
from rlx_jax.ir import hir
from rlx_jax.ir.inits import Init
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True)
class LearnedPositions:
    """`x + E[position]`: x `[B,S,H]` → same. Weight: `weight_key` `[positions, H]`.

    Positions are the input `position_ids` where the flow declares it and it is given, else 0, 1, 2 …, which go on
    behind cached tokens. With `padding`, an id, they are counted over the other ids of the input `ids_input`, from
    `padding` + 1 on (RoBERTa). `shape` is that of the weight and `init` how it is drawn; needed
    only when the flow is compiled without weights.
    """

    weight_key: str
    shape: tuple[int, int] | None = None
    padding: int | None = None
    ids_input: str = "input_ids"
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LearnedPositions")
        with emit.scope("position_embeddings"):
            table = emit.param(self.weight_key, self.shape, TABLE, self.init)
            return x + emit.add_node(hir.Embed(), table, self._positions(emit, x))

    def _positions(self, emit: Emit, x: FlowValue) -> FlowValue:
        if self.padding is None:
            return positions_of(emit, x)
        given = given_positions(emit)
        if given is not None:
            return given
        return emit.add_node(hir.CountedPositions(self.padding), emit.flow_input(self.ids_input))


# The register of the bias that a RelativeBias stage makes.
POSITION_BIAS = "position_bias"


@dataclass(frozen=True)
class RelativeBias:
    """What each head adds to its scores by the distance of query and key, for the layers that follow: the register
    `name` `[1,N,S,S]`. The active value passes on.

    Weight: `weight_key` `[R, N]`, R ≥ `buckets`; see `RelativeBuckets`. `shape` is needed only without weights.
    """

    weight_key: str
    shape: tuple[int, int] | None = None
    buckets: int = 32
    max_distance: int = 128
    name: str = POSITION_BIAS
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "RelativeBias")
        with emit.scope("relative_attention_bias"):
            table = emit.param(self.weight_key, self.shape, (None, "heads"), self.init)
            emit.set_named(self.name, emit.add_node(hir.RelativeBias(self.buckets, self.max_distance), table, x))
        return x
