"""The pass `group_heads`, for prompts: it joins the rotation of heads, and the ops on each head before it, to a group.

A group runs as one kernel (Mosaic GPU), which reads the heads where a product wrote them. XLA computes their norm in
one kernel and the rotation in another. Measured on one H200, bf16, 8 x 2048 tokens, 32 query heads and 4 key heads of
width 128 with norms, µs: 67 and 12, by XLA 131 and 19; what they read and write takes 79 at 3.8 TB/s.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.graph import Graph, TypeCache, Value
from rlx_jax.ir.kernel_group import HeadGroup
from rlx_jax.ir.ops.attention import RopeOp
from rlx_jax.ir.region import Group, group_body, join_nodes
from rlx_jax.lowering.lir.attention_groups import HeadSource, find_heads, head_row
from rlx_jax.lowering.lir.attention_step import HeadRow
from rlx_jax.lowering.lir.head_layouts import READ_VECTOR, HeadLayouts
from rlx_jax.lowering.lir.mosaic import LANES, WARPS, load, pl, run_kernel, store
from rlx_jax.lowering.mir.small import dce

AnyArray = Any

# Tokens, at least, that a kernel is used for; and sizes of half a head: the layout has 32 and 128 too, not measured.
MIN_TOKENS, HALVES = 1024, (64,)


def group_heads(graph: Graph, types: TypeCache) -> Graph:
    """Return the graph with a `HeadGroup` for each rotation of many tokens that the kernel computes."""
    return dce(join_nodes(graph, types, find_groups), types)


def find_groups(graph: Graph, types: TypeCache) -> tuple[range, dict[int, Group]]:
    """Return the order of the nodes, and the groups by the number of the rotation."""
    rotations = (number for number, node in enumerate(graph.nodes) if isinstance(node.op, RopeOp))
    found = ((number, source_of(graph, number)) for number in rotations)
    groups = {number: group_of(graph, types, heads, number) for number, heads in found if heads is not None}
    return range(len(graph.nodes)), groups


def source_of(graph: Graph, number: int) -> HeadSource | None:
    """Return where the heads of a rotation come from; None if the kernel does not compute it."""
    (x, cos, _), op = map(graph.type, graph.nodes[number].inputs), graph.nodes[number].op
    assert isinstance(op, RopeOp)
    if x.symbols or cos.symbols or x.dtype != jnp.bfloat16 or op.n_rot != op.head_dim or op.n_rot // 2 not in HALVES:
        return None
    batch, tokens, columns = map(int, x.shape)
    at_once = heads_at_once(op.head_dim)
    if batch * tokens < MIN_TOKENS or tokens % WARPS or columns // op.head_dim % at_once:
        return None
    heads = find_heads(graph, Value(number), op.head_dim)
    is_known = heads.rope == number and heads.ops and graph.type(heads.source).dtype == jnp.bfloat16
    sizes = heads.offset, graph.type(heads.source).size // (batch * tokens)
    return heads if is_known and not any(n % op.head_dim for n in sizes) else None


def heads_at_once(width: int) -> int:
    """Return the heads of a token that a warp reads together: a lane has neighbouring columns of both halves."""
    return LANES * READ_VECTOR // (width // 2)


def group_of(graph: Graph, types: TypeCache, heads: HeadSource, number: int) -> Group:
    """Return the group of a rotation."""
    nodes, members, origin = graph.nodes, sorted(heads.nodes), graph.nodes[number].origin
    operands = list(dict.fromkeys([heads.source, *(v for n in members for v in nodes[n].inputs[1:])]))
    results = {Value(number): 0}
    return Group(HeadGroup(group_body(graph, types, members, operands, [*results], origin)), operands, results, origin)


# -- the kernel of a group ---------------------------------------------------------------------


def run_heads(op: HeadGroup, *arrays: AnyArray, interpret: Any = None) -> tuple[AnyArray, ...]:
    """Compute a group by its kernel; `interpret` as in `rotate_heads`."""
    body, (result,) = op.body, op.body.outputs
    rope, operands = body.nodes[result.node].op, list[Value]()
    assert isinstance(rope, RopeOp)
    row = head_row(body, find_heads(body, result, rope.head_dim), operands)
    inputs = [arrays[body.nodes[v.node].op.index] for v in operands]  # type: ignore[attr-defined]
    batch, tokens, columns = map(int, body.type(result).shape)
    out = rotate_heads(row, batch * tokens, columns // rope.head_dim, inputs, interpret)
    return (out.reshape(batch, tokens, columns),)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))  # equal groups of a program are lowered once
def rotate_heads(row: HeadRow, tokens: int, heads: int, operands: list[AnyArray], interpret: Any = None) -> AnyArray:
    """Return rotated heads `[tokens, heads, width]`.

    Args:
        row: where they come from.
        tokens, heads: their numbers.
        operands: what `row` names by index: an array with a row of each token, weights, and tables `[1 | B, S, …]`.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    width, half = row.n_rot, row.n_rot // 2
    at_once, layouts = heads_at_once(width), HeadLayouts.of(half)
    shape, first_head, trace = (WARPS, at_once, width), row.offset // width, row.trace
    assert trace is not None
    x = operands[row.source].reshape(tokens, -1, width)
    tables = [operands[i].reshape(-1, operands[i].shape[-1]) for i in row.tables]

    def body(refs: Any) -> None:
        first = refs.program * WARPS
        own, place = pl.ds(first, WARPS), pl.ds(lax.rem(first, tables[0].shape[0]), WARPS)
        vectors = (load(ref, layouts.columns) for ref in refs.others)
        others = [lax.broadcast_in_dim(a, shape, (2,)) for a in vectors]
        parts = (load(ref.at[place, pl.ds(0, half)], layouts.tile.reduce(1)) for ref in refs.tables)
        cos, sin = (lax.broadcast_in_dim(a, (*shape[:2], half), (0, 2)) for a in parts)
        for head in range(0, heads, at_once):
            y = load(refs.x.at[own, pl.ds(first_head + head, at_once)], layouts.tile)
            y = trace(y, *others, axis=2)[0].astype(jnp.float32)
            a, b = y[:, :, :half], y[:, :, half:]
            target = refs.out.at[own, pl.ds(head, at_once)]
            store(target.at[:, :, :half], (a * cos - b * sin).astype(x.dtype))
            store(target.at[:, :, half:], (b * cos + a * sin).astype(x.dtype))

    out = jax.ShapeDtypeStruct((tokens, heads, width), x.dtype)
    inputs = {"x": x, "others": [operands[i].reshape(width) for i in row.operands], "tables": tables}
    programs = {"program": tokens // WARPS}
    return run_kernel(body, inputs, {"out": out}, {}, programs, interpret=interpret, unsafe_no_auto_barriers=True)[0]
