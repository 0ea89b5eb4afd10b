"""Stages for positions: rope tables, learned embeddings (BERT, GPT-2, RoBERTa), relative position bias (T5, MPNet)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rlx_jax.blocks.linear import TABLE_ROLES
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import RlxWarning, ShapeError, UnboundInputError
from rlx_jax.ir import hir
from rlx_jax.ir.types import Init
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import Frequencies, frequencies

__all__ = ["LearnedPositions", "RelativeBias", "RopeTables"]

MAX_TABLE_BYTES = 2**20  # bytes; tables given as data become constants of the compiled program


@dataclass(frozen=True, eq=False)
class RopeTables:
    """Write cos and sin at the positions of the active value, for every rotary stage that follows.

    Positions come from the input `position_ids` if the flow declares it and the caller passes it, else they are
    0, 1, 2, …

    Args:
        inv_freq: inverse frequencies, from which the program computes the tables.
        max_positions, cos_data, sin_data: tables as data instead, `[max_positions, half_dim]`; row t is position t.
        name: only stages that name these tables read them (`LayerSpec.rope`), so that several kinds of layers can have
            different frequencies. Without a name every rotary stage reads them by default.
        factor: multiplies the computed cos and sin (YaRN's attention factor).
    """

    inv_freq: Frequencies = ()
    max_positions: int | None = None
    cos_data: Any = field(default=None, repr=False)
    sin_data: Any = field(default=None, repr=False)
    name: str = ""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.factor != 1.0 and not self.inv_freq:
            raise ShapeError("RopeTables: factor applies only to tables computed from inv_freq")

    @staticmethod
    def theta(head_dim: int, theta: float = 10000.0, name: str = "") -> RopeTables:
        """Return tables with unscaled frequencies of base `theta` over the full width of a head."""
        return RopeTables(frequencies(head_dim, theta), name=name)

    @staticmethod
    def param(max_positions: int, half_dim: int, cos: Any, sin: Any) -> RopeTables:
        """Return tables given as data, `cos` and `sin` `[max_positions, half_dim]`.

        Raises:
            ShapeError: a table has another size, or more than `MAX_TABLE_BYTES` bytes.
        """
        cos, sin = (np.asarray(t, np.float32) for t in (cos, sin))
        for name, table in (("cos", cos), ("sin", sin)):
            if table.nbytes > MAX_TABLE_BYTES:
                raise ShapeError(f"RopeTables: {name} has {table.nbytes} bytes, over {MAX_TABLE_BYTES}; use .theta")
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
                rows = hir.RopeRows(width, self.cos_data.tobytes(), self.sin_data.tobytes())
                cos, sin = emit.add_all(rows, positions)
            if self.name:
                for register, table in zip(register_names(self.name), (cos, sin), strict=True):
                    emit.set_named(register, table)
            else:
                # An earlier layer had no tables and computed its own, so the user probably misplaced this stage.
                if emit.state.implicit_rope_stage and emit.state.rope_cos is None:
                    warnings.warn(
                        f"{emit.path}: these tables apply to later stages; the earlier stage "
                        f"{emit.state.implicit_rope_stage} computed tables without them",
                        RlxWarning,
                        stacklevel=2,
                    )
                emit.state.rope_cos, emit.state.rope_sin = cos, sin
        return value


def register_names(name: str) -> tuple[str, str]:
    """Return the names of the registered cos and sin values of the tables `name`."""
    return f"rope.{name}.cos", f"rope.{name}.sin"


def position_ids_input(emit: Emit) -> FlowValue | None:
    """Return the input `position_ids`, or None if the flow does not declare it or the caller does not pass it."""
    return emit.optional_input("position_ids") if "position_ids" in emit.state.inputs else None


def positions_of(emit: Emit, value: FlowValue) -> FlowValue:
    """Return the position of each token of `value` `[B, S, …]`.

    Returns:
        The input `position_ids` if it is passed, else int32 `[1, S]`; with a cache, counted from the cached tokens on.
    """
    position_ids = position_ids_input(emit)
    if position_ids is not None:
        return position_ids
    if value.ndim < 2:
        raise ShapeError(f"{emit.path}: positions need [batch, seq, …], got {value.type}")
    return emit.positions(value)


def check_tables(emit: Emit, cos: FlowValue, head_dim: int) -> None:
    """Check that computed rope tables do not belong to wider heads than `head_dim`.

    Tables of wider heads would have enough columns, but other frequencies.

    Raises:
        ShapeError: the tables belong to wider heads.
    """
    table_op = emit.builder.nodes[cos.value.node].op
    if isinstance(table_op, hir.RopeAngles) and 2 * len(table_op.inv_freq) > head_dim:
        raise ShapeError(
            f"{emit.path}: the tables of the stage RopeTables are for heads of width {2 * len(table_op.inv_freq)}, but "
            f"these heads have width {head_dim}"
        )


def rope_tables_for(
    emit: Emit, x: FlowValue, n_rot: int, theta: float, name: str = "", head_dim: int | None = None
) -> tuple[FlowValue, FlowValue]:
    """Return the rope tables of a layer: cos and sin, from a RopeTables stage or computed here.

    Computed tables are unscaled. They are not registered: every layer writes the same ops, so that the layers remain
    identical and the compiler can fold them into one loop body.

    Args:
        x: the layer's input `[B, S, …]`; computed tables are at its positions.
        n_rot: number of rotated columns of a head.
        theta: base of computed tables.
        name: name of a RopeTables stage; "" for the last stage without a name, or computed tables if there is none.
        head_dim: full width of a head, if it exceeds `n_rot`.

    Raises:
        UnboundInputError: the flow is an explicit decode flow, and it has neither tables nor inputs for them.
    """
    if name:
        cos_name, sin_name = register_names(name)
        return emit.named(cos_name), emit.named(sin_name)
    cos, sin = emit.state.rope_cos, emit.state.rope_sin
    if cos is not None and sin is not None:
        cos, sin = (table[None] if table.ndim == 2 else table for table in (cos, sin))  # custom stages: [S, D/2]
        check_tables(emit, cos, n_rot if head_dim is None else head_dim)
        return cos, sin
    if emit.state.decode is not None:
        raise UnboundInputError(
            f"{emit.path}: no input 'rope_cos' is declared and no stage made rope tables: put RopeTables or "
            "DecodeRopeParams before the layers, or declare the inputs 'rope_cos' and 'rope_sin' [S, D/2]"
        )
    emit.state.implicit_rope_stage = emit.state.implicit_rope_stage or emit.path
    with emit.scope("rotary_emb"):
        cos, sin = emit.add_all(hir.RopeAngles(frequencies(n_rot, theta)), positions_of(emit, x))
    return cos, sin


@dataclass(frozen=True)
class LearnedPositions:
    """Add learned position embeddings: `x + E[position]`, `[B,S,H]` → same.

    Positions come from the input `position_ids` if the flow declares it and the caller passes it, else they are
    0, 1, 2, …, and continue after cached tokens.

    Args:
        weight_key: the table E, `[positions, H]`.
        padding: id of the padding token. Positions then count the other ids of the input `ids_input`, starting at
            `padding` + 1 (RoBERTa).
        shape, init: shape and initializer of the table, needed only when the flow is compiled without weights.
    """

    weight_key: str
    shape: tuple[int, int] | None = None
    padding: int | None = None
    ids_input: str = "input_ids"
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LearnedPositions")
        with emit.scope("position_embeddings"):
            table = emit.param(self.weight_key, self.shape, TABLE_ROLES, self.init)
            return x + emit.add_node(hir.Embed(), table, self._positions(emit, x))

    def _positions(self, emit: Emit, x: FlowValue) -> FlowValue:
        """Return the row of the table for each token; passed `position_ids` take precedence over counted ones."""
        if self.padding is None or position_ids_input(emit) is not None:
            return positions_of(emit, x)
        return emit.add_node(hir.CountedPositions(self.padding), emit.flow_input(self.ids_input))


POSITION_BIAS = "position_bias"


@dataclass(frozen=True)
class RelativeBias:
    """Register a bias of attention scores by the distance of query and key, `[1,N,S,S]`, as the value `name`.

    The layers that follow add it to their scores; the active value is unchanged. Weight: `weight_key` `[R, N]`, R ≥
    `buckets`; see `RelativeBuckets` for buckets and `max_distance`. `shape` is needed only without weights.
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
