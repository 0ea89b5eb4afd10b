"""What the tables of a program allow: the ids that index them, and the positions that they know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rlx_jax.errors import TokenIdError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Constant, Graph, Input, Node, Value
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.ops.shape import Narrow, Reshape, Slice, Transpose
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import MAX_DIM, DimLike, is_float, is_static, symbol
from rlx_jax.lowering.hir.explicit import POSITION_IDS
from rlx_jax.lowering.hir.row_layouts import POSITIONS


@dataclass(frozen=True)
class Bounds:
    """What the program's tables allow: rows behind each id input, and positions that tables know.

    `counted` are the dimensions whose sum is the number of positions, `seq` or `past` and `seq`. `rows` are those of
    inputs that number entries of an axis whose size a call decides, such as the tokens of a sequence.
    """

    ids: Mapping[str, int]
    positions: int | None
    counted: tuple[DimLike, ...] = ()
    rows: Mapping[str, tuple[DimLike, ...]] = field(default_factory=dict)


def bounds_of(graph: Graph, max_positions: int | None = None) -> Bounds:
    """Find the tables that inputs index, directly or through casts and reshapes. Positions are at least 0.

    Where no table ends before, there are `max_positions`; a flow without positions has as many as tokens in its first
    input.

    Raises:
        TokenIdError: a constant of the program has ids that its table does not.
    """
    ids: dict[str, int] = {}
    open_rows: dict[str, tuple[DimLike, ...]] = {}
    positions = max_positions
    counted: tuple[DimLike, ...] = graph.inputs[0].type.shape[1:2] if graph.inputs else ()
    for inner, node in graph.walk():
        if node.op.ids is not None and node.op.ids[0] < len(node.inputs):
            operand, table, axis = node.op.ids
            rows, source = inner.type(node.inputs[table]).shape[axis], _source(inner, node.inputs[operand])
            _check_constant(inner, node, node.inputs[operand], rows)
        elif isinstance(node.op, hir.RopeRows | hir.RopeAngles):  # the latter are computed for any position
            rows = node.op.rows if isinstance(node.op, hir.RopeRows) else max_positions or MAX_DIM
            source = _source(inner, node.inputs[0])
        else:
            continue
        if isinstance(source.op, Input) and not is_static(rows):
            open_rows[source.op.input] = (*open_rows.get(source.op.input, ()), rows)
        elif isinstance(source.op, Input):
            ids[source.op.input] = min(rows, ids.get(source.op.input, rows))
        elif isinstance(source.op, hir.CountedPositions):  # the first stands behind the padding's own row
            known = rows if not is_static(rows) else int(rows) - source.op.padding - 1
            positions = known if positions is None else min(known, positions)
            counted = tuple(inner.type(v).shape[1] for v in source.inputs)
        elif isinstance(source.op, hir.Positions):
            if not isinstance(node.op, hir.RopeAngles):
                positions = rows if positions is None else min(rows, positions)
            counted = tuple(inner.type(v).shape[1] for v in source.inputs)
    return Bounds(ids, positions, counted, open_rows)


def behind_cache(bounds: Bounds, given: Collection[str]) -> Bounds:
    """Those of the program `explicit`: the cached tokens count too, unless positions are given."""
    if POSITION_IDS in given and POSITION_IDS not in bounds.ids:
        return Bounds({**bounds.ids, POSITION_IDS: bounds.positions or MAX_DIM}, None)
    return replace(bounds, counted=(*bounds.counted, symbol("past")))


def packed_rows(bounds: Bounds) -> Bounds:
    """Those of the program `packed`: a row may be longer than the sequences in it."""
    return Bounds({**bounds.ids, POSITIONS.input: bounds.positions or MAX_DIM}, None, rows=bounds.rows)


def _source(graph: Graph, value: Value) -> Node:
    """Where ids come from, behind ops that move them and change none."""
    node = graph.nodes[value.node]
    while isinstance(node.op, Reshape | Slice | Narrow | Transpose | CastTo | hir.CausalWindow):
        if is_float(graph.type(node.inputs[0]).dtype):
            return node  # a cast from floats: no ids yet
        node = graph.nodes[node.inputs[0].node]
    return node


def _check_constant(graph: Graph, node: Node, ids: Value, rows: DimLike) -> None:
    op = graph.nodes[ids.node].op
    if isinstance(op, Constant) and is_static(rows):
        wrong = op.array[(op.array < 0) | (op.array >= rows)]
        if wrong.size:
            where = path_text(node.origin.path)
            raise TokenIdError(f"{where}: {node.op.text()}: id {wrong.flat[0]} of a constant is not in [0, {rows})")
