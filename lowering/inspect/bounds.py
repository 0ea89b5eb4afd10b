"""Limits of a program's tables: the valid ids of each input, and the number of positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlx_jax.dataclasses import dataclass, field, replace
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
    """Limits of a program's tables.

    Attributes:
        ids: for each input of ids the number of rows of its table, the smallest if there are several.
        positions: the number of positions; None for no limit.
        position_dims: the dimensions that add up to a call's number of positions: `seq`, or `seq` and `past`.
        rows: for each input that indexes an axis of symbolic size, such as the tokens of a sequence, these sizes.
    """

    ids: Mapping[str, int]
    positions: int | None
    position_dims: tuple[DimLike, ...] = ()
    rows: Mapping[str, tuple[DimLike, ...]] = field(default_factory=dict)


def bounds_of(graph: Graph, max_positions: int | None = None) -> Bounds:
    """Find the tables that inputs index, directly or through casts and reshapes.

    Args:
        graph: the HIR of the program.
        max_positions: the number of positions unless a table has fewer rows. A flow without positions counts the tokens
            of its first input.

    Raises:
        TokenIdError: a constant of the program has an id outside of its table.
    """
    ids: dict[str, int] = {}
    open_rows: dict[str, tuple[DimLike, ...]] = {}
    positions = max_positions
    position_dims: tuple[DimLike, ...] = graph.inputs[0].type.shape[1:2] if graph.inputs else ()
    for inner, node in graph.walk():
        if node.op.ids is not None and node.op.ids[0] < len(node.inputs):
            operand, table, axis = node.op.ids
            rows, source = inner.type(node.inputs[table]).shape[axis], _source(inner, node.inputs[operand])
            _check_constant(inner, node, node.inputs[operand], rows)
        elif isinstance(node.op, hir.RopeRows | hir.RopeAngles):  # RopeAngles has no table, and computes any position
            rows = node.op.rows if isinstance(node.op, hir.RopeRows) else max_positions or MAX_DIM
            source = _source(inner, node.inputs[0])
        else:
            continue
        if isinstance(source.op, Input) and not is_static(rows):
            open_rows[source.op.input] = (*open_rows.get(source.op.input, ()), rows)
        elif isinstance(source.op, Input):
            ids[source.op.input] = min(rows, ids.get(source.op.input, rows))
        elif isinstance(source.op, hir.CountedPositions):  # positions begin after the row of the padding id
            num_positions = rows if not is_static(rows) else int(rows) - source.op.padding - 1
            positions = num_positions if positions is None else min(num_positions, positions)
            position_dims = tuple(inner.type(v).shape[1] for v in source.inputs)
        elif isinstance(source.op, hir.Positions):
            if not isinstance(node.op, hir.RopeAngles):
                positions = rows if positions is None else min(rows, positions)
            position_dims = tuple(inner.type(v).shape[1] for v in source.inputs)
    return Bounds(ids, positions, position_dims, open_rows)


def with_past_tokens(bounds: Bounds, optional_inputs: Collection[str]) -> Bounds:
    """Return the limits of the program `explicit`: past tokens count too, unless calls supply positions.

    Args:
        bounds: the limits of the forward program.
        optional_inputs: names of the optional inputs that calls will supply.
    """
    if POSITION_IDS in optional_inputs and POSITION_IDS not in bounds.ids:
        return Bounds({**bounds.ids, POSITION_IDS: bounds.positions or MAX_DIM}, None)
    return replace(bounds, position_dims=(*bounds.position_dims, symbol("past")))


def packed_bounds(bounds: Bounds) -> Bounds:
    """Return the limits of the program `packed`: they apply to its input `positions`, as rows may be longer."""
    return Bounds({**bounds.ids, POSITIONS.input: bounds.positions or MAX_DIM}, None, rows=bounds.rows)


def _source(graph: Graph, value: Value) -> Node:
    """Return the node that computes ids, skipping ops that move ids without changing them."""
    node = graph.nodes[value.node]
    while isinstance(node.op, Reshape | Slice | Narrow | Transpose | CastTo | hir.CausalWindow):
        if is_float(graph.type(node.inputs[0]).dtype):
            return node  # a cast from floats: no ids yet
        node = graph.nodes[node.inputs[0].node]
    return node


def _check_constant(graph: Graph, node: Node, ids: Value, rows: DimLike) -> None:
    """Check that ids, if they are a constant, are in a table of `rows` rows."""
    op = graph.nodes[ids.node].op
    if isinstance(op, Constant) and is_static(rows):
        wrong = op.array[(op.array < 0) | (op.array >= rows)]
        if wrong.size:
            where = path_text(node.origin.path)
            raise TokenIdError(f"{where}: {node.op.text()}: id {wrong.flat[0]} of a constant is not in [0, {rows})")
