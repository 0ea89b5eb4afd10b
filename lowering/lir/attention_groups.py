"""The pass `group_attention`: it joins the attention of one new token of each row, and the ops around it, to a group.

The ops are the norms and the rotation of each head of the new query and key, and the writes of the cache. A group runs
as one kernel (`decode_attention.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import Graph, Mir, Node, TypeCache, Value
from rlx_jax.ir.kernel_group import AttentionGroup
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.cache import CacheUpdate, RingStep
from rlx_jax.ir.ops.index import TakeRow
from rlx_jax.ir.ops.shape import Reshape, SplitLast
from rlx_jax.ir.queries import find_readers
from rlx_jax.ir.region import Group, group_body, join_nodes
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lir.attention_step import (
    HEADS_OF_MANY_ROWS,
    MAX_STEP_ROWS,
    AttentionKernel,
    HeadRow,
    are_divided,
    divide,
)
from rlx_jax.lowering.lir.decode_attention import decode_attention
from rlx_jax.lowering.lir.head_layouts import HALVES, HEAD_WIDTHS, READ_VECTOR
from rlx_jax.lowering.lir.kernel_trace import KernelTrace
from rlx_jax.lowering.lir.product_groups import is_by_rows, op_refusal, struct
from rlx_jax.lowering.lir.row_products import MAX_ROWS
from rlx_jax.lowering.mir.small import dce


@dataclass(frozen=True)
class HeadSource:
    """Where the heads of a new query, key or value come from.

    Attributes:
        source: a row of them.
        offset: entry of the row where the first head starts.
        ops: numbers of the ops on each head, in order, without the rotation after them.
        rope: number of the rotation; None for none.
        nodes: numbers of all nodes between the row and the heads.
    """

    source: Value
    offset: int
    ops: tuple[int, ...]
    rope: int | None
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class AttentionParts:
    """An attention that the kernel computes.

    Attributes:
        query, key, value: the new token.
        updates: numbers of the nodes that write the key and the value.
        views: numbers of the nodes between the caches and the attention.
        number: number of the attention's node.
    """

    query: HeadSource
    key: HeadSource
    value: HeadSource
    updates: tuple[int, int]
    views: tuple[int, ...]
    number: int

    def members(self) -> list[int]:
        """Return the numbers of all nodes of the group, in order."""
        heads = (number for h in (self.query, self.key, self.value) for number in h.nodes)
        return sorted({*heads, *self.updates, *self.views, self.number})


def group_attention(graph: Graph, types: TypeCache) -> Graph:
    """Return the graph with an `AttentionGroup` for each attention that the kernel computes."""
    return dce(join_nodes(graph, types, find_groups), types)


def find_groups(graph: Graph, types: TypeCache) -> tuple[list[int], dict[int, Group]]:
    """Return the nodes without the writes and views that groups have, and the groups by the attention's number."""
    readers = find_readers(graph)
    parts = (find_parts(graph, i) for i, node in enumerate(graph.nodes) if isinstance(node.op, AttentionOp))
    found = {p.number: p for p in parts if p is not None and can_move_writes(p, readers)}
    moved = {number for p in found.values() for number in (*p.updates, *p.views)}
    groups = {number: group_of(graph, types, p) for number, p in found.items()}
    return [number for number in range(len(graph.nodes)) if number not in moved], groups


def can_move_writes(parts: AttentionParts, readers: Mapping[Value, Sequence[int]]) -> bool:
    """Return whether the group has all nodes that read views of the written caches, or the caches before it."""
    inner = {*parts.views, parts.number}
    early = {r for u in parts.updates for r in readers_of(readers, u) if 0 <= r < parts.number}
    return inner >= early.union(*(readers_of(readers, view) for view in parts.views))


def readers_of(readers: Mapping[Value, Sequence[int]], number: int) -> list[int]:
    """Return the numbers of the nodes that read a result of a node."""
    return [r for i in range(3) for r in readers.get(Value(number, i), ())]


def find_parts(graph: Graph, number: int) -> AttentionParts | None:
    """Return the parts of an attention that the kernel computes; None if it does not."""
    node = graph.nodes[number]
    op = node.op
    assert isinstance(op, AttentionOp)
    if not has_kernel(op, [graph.type(v) for v in node.inputs]):
        return None
    extras = dict(zip(op.extra, node.inputs[3:], strict=True))
    views: list[int] = []
    updates = [u for value in node.inputs[1:3] if (u := find_update(graph, value, views)) is not None]
    if len(updates) < 2:
        return None
    first, second = (graph.nodes[u] for u in updates)
    if first.op != second.op or first.inputs[2:] != second.inputs[2:]:
        return None
    if isinstance(first.op, RingStep) != (extras.get("key_positions") in [Value(u, 1) for u in updates]):
        return None
    width = int(graph.type(node.inputs[0]).shape[2]) // op.heads
    heads = [find_heads(graph, value, width) for value in (node.inputs[0], first.inputs[1], second.inputs[1])]
    if any(graph.type(h.source).dtype != jnp.bfloat16 for h in heads):
        return None
    return AttentionParts(heads[0], heads[1], heads[2], (updates[0], updates[1]), tuple(views), number)


def has_kernel(op: AttentionOp, types: Sequence[TensorType]) -> bool:
    """Return whether the kernel has an attention with operands of these types: bf16, one new token of up to 64 rows."""
    q, k, v, *extras = types
    if any(t.symbols or t.dtype != jnp.bfloat16 for t in (q, k, v)) or k.shape != v.shape:
        return False
    rows = int(q.shape[0])
    if rows > MAX_STEP_ROWS or q.shape[1] != 1 or k.shape[0] != rows:
        return False
    if rows > MAX_ROWS and op.heads > HEADS_OF_MANY_ROWS * op.kv_heads:
        return False
    width, keys = int(q.shape[2]) // op.heads, int(k.shape[1])
    if width not in HEAD_WIDTHS or not are_divided(rows, width, keys):
        return False
    if op.returns != "context" or not op.causal or op.ahead or op.precision != "default":
        return False
    positions = [t for name, t in zip(op.extra, extras, strict=True) if name == "positions"]
    return set(op.extra) <= set(EXTRAS) and len(positions) == 1 and positions[0].size == rows


# Optional operands of an attention that the kernel has.
EXTRAS = ("sinks", "positions", "key_positions")


def find_update(graph: Graph, value: Value, views: list[int]) -> int | None:
    """Return the node that writes a cache which an attention reads, or None, and add the views between to `views`."""
    while isinstance(graph.nodes[value.node].op, Reshape):
        views.append(value.node)
        (value,) = graph.nodes[value.node].inputs
    op = graph.nodes[value.node].op
    if isinstance(op, CacheUpdate):
        return None if op.fresh else value.node
    slots = graph.type(value).shape[1]
    return value.node if isinstance(op, RingStep) and value.index == 0 and op.in_place(slots, 1) else None


def find_heads(graph: Graph, value: Value, width: int) -> HeadSource:
    """Return where the heads of a value come from: the rows before all ops that the kernel computes."""
    rows = math.prod(map(int, graph.type(value).shape[:2]))
    offset, ops, rope, nodes = 0, list[int](), None, list[int]()
    while True:
        node = graph.nodes[value.node]
        op = node.op
        if isinstance(op, SplitLast) and math.prod(map(int, graph.type(node.inputs[0]).shape[:-1])) == rows:
            offset += sum(op.sizes[: value.index])
        elif rope is None and not ops and can_rotate(graph, node, width):
            rope = value.node
        elif offset % width == 0 and is_head_op(graph, node, width):  # of the heads that are split from its result
            ops.insert(0, value.node)
        elif not isinstance(op, Reshape) and not (
            isinstance(op, TakeRow) and graph.type(value).size == graph.type(node.inputs[0]).size
        ):
            return HeadSource(value, offset, tuple(ops), rope, tuple(nodes))
        nodes.append(value.node)
        value = node.inputs[0]


def can_rotate(graph: Graph, node: Node, width: int) -> bool:
    """Return whether the kernel has the rotation of a node."""
    op = node.op
    tables = [graph.type(v) for v in node.inputs[1:]]
    if not isinstance(op, RopeOp) or any(t.dtype != jnp.float32 or int(t.shape[-1]) % READ_VECTOR for t in tables):
        return False
    return op.head_dim == width and op.style == "half" and op.n_rot // 2 in HALVES


def is_head_op(graph: Graph, node: Node, width: int) -> bool:
    """Return whether a node is an op on each head by itself, with other operands of one head."""
    if not isinstance(node.op, Mir) or len(node.types) != 1 or not node.inputs:
        return False
    x, *others = (graph.type(v) for v in node.inputs)
    if not x.shape or x.symbols or int(x.shape[-1]) != width or node.types[0] != x:
        return False
    if any(t.symbols or t.size != width for t in others):
        return False
    types, count = (one_head(x), *others), math.prod(map(int, x.shape[:-1]))
    return is_by_rows(node.op, (x, *others), types, count) and not op_refusal(node.op, types, width, True)


def one_head(t: TensorType) -> TensorType:
    """Return the type of one head of `[…, heads, width]`."""
    return TensorType((*(1 for _ in t.shape[:-1]), t.shape[-1]), t.dtype)


def group_of(graph: Graph, types: TypeCache, parts: AttentionParts) -> Group:
    """Return the group of an attention."""
    nodes, members = graph.nodes, parts.members()
    caches = [nodes[u].inputs[0] for u in parts.updates]
    reads = list(dict.fromkeys([*caches, *(v for m in members for v in nodes[m].inputs if v.node not in members)]))
    outputs = [Value(parts.number), *(Value(u) for u in parts.updates)]
    results = {v: i for i, v in enumerate(outputs)}
    results |= {Value(v.node, 2): i for v, i in results.items() if i}  # a ring has two results that are the ring
    origin = nodes[parts.number].origin
    return Group(AttentionGroup(group_body(graph, types, members, reads, outputs, origin)), reads, results, origin)


# -- the kernel of a group ---------------------------------------------------------------------


def run_attention(op: AttentionGroup, *arrays: Any, interpret: Any = None) -> tuple[Any, ...]:
    """Compute a group by its kernel; `interpret` as in `decode_attention`."""
    body = op.body
    number = next(i for i, node in enumerate(body.nodes) if isinstance(node.op, AttentionOp))
    parts = find_parts(body, number)
    assert parts is not None
    attention, update = body.nodes[number], body.nodes[parts.updates[0]]
    extras = dict(zip(attention.op.extra, attention.inputs[3:], strict=True))  # type: ignore[attr-defined]
    operands = list[Value]()
    rows = [head_row(body, heads, operands) for heads in (parts.query, parts.key, parts.value)]
    operands += [extras["sinks"]] if "sinks" in extras else []
    spec = spec_of(body, number, update, rows, "sinks" in extras)

    def array(value: Value) -> Any:
        return arrays[body.nodes[value.node].op.index]  # type: ignore[attr-defined]

    keys, values = (array(body.nodes[u].inputs[0]) for u in parts.updates)
    numbers = [array(v).reshape(-1, 1) for v in (*update.inputs[2:4], extras["positions"])]
    flat = [x.reshape(spec.rows, spec.keys, -1) for x in (keys, values)]
    tables = (i for row in rows for i in row.tables if body.type(operands[i]).shape[0] == spec.rows)
    by_row = {*(row.source for row in rows), *tables}  # the other operands are the same for all rows
    inputs = [array(v).reshape(spec.rows if i in by_row else 1, -1) for i, v in enumerate(operands)]
    result, *caches = decode_attention(spec, inputs, numbers, *flat, interpret)
    outputs = zip((result, *caches), body.output_types, strict=True)
    return tuple(array.reshape(tuple(map(int, t.shape))) for array, t in outputs)


def spec_of(body: Graph, number: int, update: Node, rows: Sequence[HeadRow], has_sinks: bool) -> AttentionKernel:
    """Return the shapes of the kernel of an attention."""
    op = body.nodes[number].op
    assert isinstance(op, AttentionOp)
    q, k = (body.type(v) for v in body.nodes[number].inputs[:2])
    batch, width, keys = int(q.shape[0]), int(q.shape[2]) // op.heads, int(k.shape[1])
    scale = width**-0.5 if op.scale is None else op.scale
    query, key, value = rows
    heads_at_once, splits, groups = divide(batch, op.heads, op.kv_heads, width, keys)
    return AttentionKernel(
        batch, op.heads, op.kv_heads, width, keys, isinstance(update.op, RingStep), op.window, scale, op.softcap,
        has_sinks, query, key, value, heads_at_once, splits, groups,
    )  # fmt: skip


def head_row(body: Graph, heads: HeadSource, operands: list[Value]) -> HeadRow:
    """Return the row of some heads, and add what it reads to `operands`."""

    def index_of(value: Value) -> int:
        if value not in operands:
            operands.append(value)
        return operands.index(value)

    source = index_of(heads.source)
    others = [v for number in heads.ops for v in body.nodes[number].inputs[1:]]
    trace = trace_ops(tuple((body.nodes[i].op, head_types(body, i)) for i in heads.ops)) if heads.ops else None
    rope = None if heads.rope is None else body.nodes[heads.rope]
    n_rot = rope.op.n_rot if rope is not None and isinstance(rope.op, RopeOp) else 0
    tables = () if rope is None else tuple(index_of(v) for v in rope.inputs[1:])
    return HeadRow(source, heads.offset, trace, tuple(map(index_of, others)), n_rot, tables)


def head_types(body: Graph, number: int) -> tuple[TensorType, ...]:
    """Return the types of the operands of an op for one head."""
    x, *others = (body.type(v) for v in body.nodes[number].inputs)
    return one_head(x), *others


@functools.lru_cache(maxsize=256)
def trace_ops(ops: tuple[tuple[Any, tuple[TensorType, ...]], ...]) -> KernelTrace:
    """Return the ops of one head, one after the other, as equations."""
    counts = [len(types) - 1 for _, types in ops]

    def run(x: Any, *others: Any) -> Any:
        start = 0
        for (op, types), count in zip(ops, counts, strict=True):
            x = op.eval(x.reshape(types[0].shape), *others[start : start + count])
            start += count
        return x

    operands = (ops[0][1][0], *(t for _, types in ops for t in types[1:]))
    return KernelTrace(jax.make_jaxpr(run)(*map(struct, operands)))


def attention_refusal(graph: Graph, node: Node) -> str:
    """Return why an attention of a step, which is in no group, has no kernel."""
    (q, k), op = map(graph.type, node.inputs[:2]), node.op
    assert isinstance(op, AttentionOp)
    rows, tokens, width = map(int, q.shape)
    if tokens > 1:
        return f"{tokens} new tokens of a row"
    if rows > MAX_STEP_ROWS:
        return f"{rows} rows, more than {MAX_STEP_ROWS}"
    if rows > MAX_ROWS and op.heads > HEADS_OF_MANY_ROWS * op.kv_heads:
        return f"{rows} rows with {op.heads // op.kv_heads} query heads of a key head, more than {HEADS_OF_MANY_ROWS}"
    size = f"{rows} x {int(k.shape[1]):,} cached tokens"
    return f"{size}, or its operands" if width // op.heads in HEAD_WIDTHS else f"heads of {width // op.heads}"
