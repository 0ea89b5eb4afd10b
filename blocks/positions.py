"""Positions: tables of rotations, embeddings (BERT, GPT-2, RoBERTa), a bias of the scores by distance (T5, MPNet)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx_jax.blocks.linear import TABLE
from rlx_jax.errors import RlxWarning, ShapeError, UnboundInputError
from rlx_jax.ir import hir
from rlx_jax.ir.initializers import Init
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import Frequencies, frequencies

__all__ = ["LearnedPositions", "RelativeBias", "RopeTables"]

MAX_TABLE = 2**20  # bytes: tables are constants of the program


@dataclass(frozen=True, eq=False)
class RopeTables:
    """cos and sin at the positions of the active value, for every rotary stage that follows.

    Either `inv_freq` (the program computes the tables) or data `[max_positions, half_dim]`, whose row t is
    position t. Positions are the input `position_ids` where the flow declares it and it is given, else 0, 1, 2 …
    Tables with a `name` are read only by the stages that ask for it (`SelfAttnPrefillSpec.rope`): several kinds of
    layers may so have frequencies of their own. `factor` multiplies cos and sin that the program computes (YaRN's).
    """

    inv_freq: Frequencies = ()
    max_positions: int | None = None
    cos_data: Any = field(default=None, repr=False)
    sin_data: Any = field(default=None, repr=False)
    name: str = ""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.factor != 1.0 and not self.inv_freq:
            raise ShapeError("RopeTables: factor multiplies tables of inv_freq; given tables have theirs")

    @staticmethod
    def theta(head_dim: int, theta: float = 10000.0, name: str = "") -> RopeTables:
        """Unscaled frequencies of base `theta` over the full head width."""
        return RopeTables(frequencies(head_dim, theta), name=name)

    @staticmethod
    def param(max_positions: int, half_dim: int, cos: Any, sin: Any) -> RopeTables:
        """Tables given as data `[max_positions, half_dim]`."""
        cos, sin = (np.asarray(t, np.float32) for t in (cos, sin))
        for name, table in (("cos", cos), ("sin", sin)):
            if table.nbytes > MAX_TABLE:
                raise ShapeError(
                    f"RopeTables: {name} has {table.nbytes} bytes, the limit is {MAX_TABLE}; use RopeTables.theta"
                )
            if table.size != max_positions * half_dim:
                raise ShapeError(f"RopeTables: {name} has shape {table.shape}, expected [{max_positions}, {half_dim}]")
        return RopeTables((), max_positions, cos.reshape(-1, half_dim), sin.reshape(-1, half_dim))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope("rotary_emb"):
            positions = positions_of(emit, emit.require(value, "RopeTables"))
            if self.inv_freq:
                cos, sin = emit.add_all(hir.RopeAngles(self.inv_freq, self.factor), positions)
            else:
                width = self.cos_data.shape[1]
                cos, sin = emit.add_all(
                    hir.RopeRows(width, self.cos_data.tobytes(), self.sin_data.tobytes()), positions
                )
            if self.name:
                for register, table in zip(registers(self.name), (cos, sin), strict=True):
                    emit.set_named(register, table)
            else:
                if emit.state.rope_by_itself and emit.state.rope_cos is None:
                    warnings.warn(
                        f"{emit.path}: these tables are for the stages behind them; {emit.state.rope_by_itself} stands "
                        "before them and made its own",
                        RlxWarning,
                        stacklevel=2,
                    )
                emit.state.rope_cos, emit.state.rope_sin = cos, sin
        return value


def registers(name: str) -> tuple[str, str]:
    """Where the tables called `name` stand among the named values."""
    return f"rope.{name}.cos", f"rope.{name}.sin"


def given_positions(emit: Emit) -> FlowValue | None:
    """The input `position_ids`, where the flow declares it and it is given."""
    return emit.optional_input("position_ids") if "position_ids" in emit.state.inputs else None


def positions_of(emit: Emit, value: FlowValue) -> FlowValue:
    """The position of each token of `value` `[B, S, …]`: the input `position_ids` if given, else int32 `[1, S]`."""
    given = given_positions(emit)
    if given is not None:
        return given
    if value.ndim < 2:
        raise ShapeError(f"{emit.path}: positions need [batch, seq, …], got {value.type}")
    return emit.positions(value)


def check_tables(emit: Emit, cos: FlowValue, head_dim: int) -> None:
    """The tables of a RopeTables stage are of heads that are no wider than these.

    Raises:
        ShapeError: they are of wider ones, whose frequencies are others.
    """
    made = emit.builder.nodes[cos.value.node].op
    if isinstance(made, hir.RopeAngles) and 2 * len(made.inv_freq) > head_dim:
        raise ShapeError(
            f"{emit.path}: the tables of the stage RopeTables are of heads of width {2 * len(made.inv_freq)}, and "
            f"these heads have width {head_dim}"
        )


def rope_tables_for(
    emit: Emit, x: FlowValue, n_rot: int, theta: float, name: str = "", head_dim: int | None = None
) -> tuple[FlowValue, FlowValue]:
    """cos and sin of the last RopeTables stage, else unscaled ones of base `theta` at the positions of `x`, of `n_rot`
    columns. With a `name`, those of the RopeTables stage of that name. `head_dim`: of which `n_rot` columns turn.

    The latter are not registered: each layer writes the same ops, so that layers stay alike and fold into one.
    """
    if name:
        cos_at, sin_at = registers(name)
        return emit.named(cos_at), emit.named(sin_at)
    cos, sin = emit.state.rope_cos, emit.state.rope_sin
    if cos is not None and sin is not None:
        cos, sin = (table[None] if table.ndim == 2 else table for table in (cos, sin))  # a custom stage's [S, D/2]
        check_tables(emit, cos, n_rot if head_dim is None else head_dim)
        return cos, sin
    if emit.state.decode is not None:
        raise UnboundInputError(
            f"{emit.path}: no input 'rope_cos' is declared and no stage made rope tables: put RopeTables or "
            "DecodeRopeParams before the layers, or declare the inputs 'rope_cos' and 'rope_sin' [S, D/2]"
        )
    emit.state.rope_by_itself = emit.state.rope_by_itself or emit.path
    with emit.scope("rotary_emb"):
        cos, sin = emit.add_all(hir.RopeAngles(frequencies(n_rot, theta)), positions_of(emit, x))
    return cos, sin


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
        if self.padding is None or given_positions(emit) is not None:
            return positions_of(emit, x)
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
