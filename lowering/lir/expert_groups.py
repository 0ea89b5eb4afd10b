"""The pass `group_experts`: it joins the experts of one token and their selection to an `ExpertGroup`, of two kernels.

The first kernel selects an expert in each program, reads its gate and up where they are and computes the activation;
the second one reads its down and adds the weighted results, and a residual. Both are the kernel of `matvec.py` with
other tiles. Otherwise XLA runs a sort, two products with gathered weights, and small kernels between them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.dataclasses import replace
from rlx_jax.ir.graph import Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.kernel_group import ExpertGroup, run_nodes
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.pointwise import Binary, CastTo
from rlx_jax.ir.ops.reduce import Reduce, Softmax
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.queries import find_readers
from rlx_jax.ir.region import Group, group_body, join_nodes
from rlx_jax.lowering.lir.kernel_trace import KernelTrace, trace, unsupported_primitive
from rlx_jax.lowering.lir.matvec import (
    SLOTS,
    Matvec,
    Tiling,
    WeightTiles,
    find_tiling,
    run_program,
    run_tiles,
    scratch_of,
)
from rlx_jax.lowering.lir.mosaic import LANES, WARPS, copies, flipped, load, pl, plgpu, tiled
from rlx_jax.lowering.lir.product_groups import GroupKey, is_constant, results_of, struct
from rlx_jax.lowering.mir.small import dce

AnyArray = Any

# Experts that a program compares, at most: each lane has all logits in registers.
MAX_COMPARED = 256


def group_experts(graph: Graph, types: TypeCache) -> Graph:
    """Return the graph with an `ExpertGroup` for each mixture of one token that the kernels compute."""
    if not any(isinstance(node.op, ExpertFfn) for _, node in graph.walk()):
        return graph
    return dce(join_nodes(graph, types, find_groups), types)


def find_groups(graph: Graph, types: TypeCache) -> tuple[range, dict[int, Group]]:
    """Return the nodes of a graph, and by the number of their last node the groups."""
    numbers, readers = range(len(graph.nodes)), find_readers(graph)
    groups = {m[-1]: group_of(graph, m, types) for n in numbers if (m := members_of(graph, n, readers))}
    return numbers, {number: group for number, group in groups.items() if group is not None}


def members_of(graph: Graph, number: int, readers: Mapping[Value, Sequence[int]]) -> list[int]:
    """Return the nodes of the group of a mixture; none if the kernels do not compute it."""
    nodes, node = graph.nodes, graph.nodes[number]
    if not isinstance(op := node.op, ExpertFfn) or op.biased or not op.contract or op.precision != "default":
        return []
    x, *experts, weights, ids = node.inputs
    top, count, leaves = nodes[ids.node], graph.type(ids).size, [nodes[v.node].op for v in experts]
    if not isinstance(top.op, TopK) or ids.index != 1 or graph.type(ids).symbols or count != top.op.k:
        return []
    logits = graph.type(top.inputs[0])
    is_known = (
        top.op.largest and top.op.axis in (-1, logits.rank - 1) and logits.dtype == jnp.float32
        and int(logits.shape[-1]) == int(graph.type(experts[0]).shape[0])
        and logits.size % (LANES * WARPS) == 0 and logits.size <= MAX_COMPARED
        and all(isinstance(leaf, Param) and not any(map(packing_of, leaf.programs)) for leaf in leaves)
        and all(graph.type(v).dtype == jnp.bfloat16 for v in (x, *experts))
        and find_tilings(count, *map(int, graph.type(experts[0]).shape[1:])) is not None
        and not unsupported_primitive(trace(op.gated, 2, jnp.bfloat16).jaxpr.jaxpr, 1, False)
    )  # fmt: skip
    members, pending = {number, ids.node}, [weights.node]
    while is_known and pending:
        member = pending.pop()
        if member not in members:
            is_known = isinstance(nodes[member].op, (Binary, CastTo, Reduce, Softmax))
            members.add(member)
            pending += [v.node for v in nodes[member].inputs if not is_constant(graph, v)]
    if not is_known or results_of(graph, sorted(members), readers) != [Value(number)]:
        return []
    first = readers[Value(number)][0]
    is_residual = len(readers[Value(number)]) == 1 and first >= 0 and nodes[first].op == Binary("add")
    is_residual = is_residual and all(graph.type(v) == node.types[0] for v in nodes[first].inputs)
    return [*sorted(members), first] if is_residual else sorted(members)


def group_of(graph: Graph, members: Sequence[int], types: TypeCache) -> Group | None:
    """Return the group of some nodes, None if its weights do not run in the kernel."""
    nodes, last = graph.nodes, members[-1]
    (mixture,) = (nodes[number] for number in members if isinstance(nodes[number].op, ExpertFfn))
    residual = [v for v in nodes[last].inputs if nodes[last] is not mixture and v.node not in members]
    operands = (nodes[mixture.inputs[5].node].inputs[0], *mixture.inputs[:4], *residual)
    group = ExpertGroup(group_body(graph, types, members, operands, [Value(last)], mixture.origin))
    shares = traces_of(key_of(group))[1].jaxpr.jaxpr
    if unsupported_primitive(shares, shares.invars[0].aval.size, reductions=True):
        return None
    return Group(group, operands, {Value(last): 0}, mixture.origin)


def key_of(group: ExpertGroup) -> GroupKey:
    """Return what a group computes."""
    return GroupKey(tuple((n.op, n.inputs, n.types) for n in group.body.nodes), group.body.outputs, 0)


def find_tilings(count: int, inner: int, hidden: int) -> tuple[Tiling, Tiling] | None:
    """Return how gate and up, and down, of `count` experts are divided, or None if their sizes do not divide.

    Each program of the first kernel has rows of one expert. Tiles of the second one are of one expert each, one expert
    after another.
    """
    up, down = find_tiling(2 * inner, hidden, 2), find_tiling(hidden, inner, 1)
    if up is None or down is None or not down.is_even:
        return None
    # Tiles of one expert alone may be read further ahead than shared memory has room for here.
    up, down = (replace(t, slots=SLOTS) for t in (up, down))
    tiles = inner // up.tile_rows
    programs = next((n for n in range(max(1, up.at_once // count), 0, -1) if tiles % n == 0), 1)
    down = replace(down, lines=count * down.lines)
    down_tiles = hidden // down.tile_rows
    used = -(-down_tiles // -(-down_tiles // down.at_once))
    return replace(up, rows=count * inner, programs=count * programs), replace(down, programs=used)


def run_experts(op: ExpertGroup, *arrays: AnyArray, interpret: Any = None) -> tuple[AnyArray, ...]:
    """Compute a group by its kernels; `interpret` as in `matvec`."""
    logits, x, *weights = arrays
    rows = [a.reshape(-1) for a in (logits, x, *weights[3:])]
    return (stream_experts(key_of(op), rows, weights[:3], interpret).reshape(x.shape),)


@functools.partial(jax.jit, static_argnums=(0, 3))  # equal groups of a program are lowered once
def stream_experts(
    key: GroupKey, rows: Sequence[AnyArray], weights: Sequence[AnyArray], interpret: Any = None
) -> AnyArray:
    """Compute the mixture of one token.

    Args:
        key: what it computes.
        rows: the logits from which it selects experts, the token, and the residual if there is one.
        weights: gate, up and down of all experts.
        interpret: as in `matvec`.
    """
    (logits, x, *residual), (mixture, shares) = rows, traces_of(key)
    (count,), (_, inner, hidden) = shares.jaxpr.in_avals[0].shape[-1:], weights[0].shape
    tilings = find_tilings(count, inner, hidden)
    assert tilings is not None
    row, ids, values = multiply_selected(tilings[0], mixture, logits, x, weights[:2], interpret)
    return add_selected(tilings[1], shares, row, ids, values, weights[2], residual, interpret)


def multiply_selected(
    t: Tiling, mixture: ExpertFfn, logits: AnyArray, x: AnyArray, weights: Sequence[AnyArray], interpret: Any
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Select experts, and return the activation of the gate and up of each, their numbers, and their logits."""
    inner, bf16 = weights[0].shape[1], x.dtype

    def select(refs: Any) -> None:
        choice = refs.first * t.tile_rows // inner
        expert = find_expert(refs.logits, choice)

        @pl.when(refs.first * t.tile_rows == choice * inner)
        def _() -> None:
            refs.ids[choice] = expert
            refs.values[choice] = refs.logits[0][expert]

        def source(part: int, row: AnyArray, line: AnyArray) -> Any:
            rows = pl.ds((expert - choice) * inner + row, t.tile_rows)
            return refs.weights[part].at[rows, pl.ds(line, t.tile_lines)]

        spec = Matvec(t, trace(lambda x: x, 1, bf16), trace(mixture.gated, 2, bf16))
        run_program(spec, refs, WeightTiles(t, source, refs))

    count, views = t.rows // inner, [w.reshape(-1, t.lines, t.width) for w in weights]
    chosen = {"ids": jax.ShapeDtypeStruct((count,), jnp.int32), "values": jax.ShapeDtypeStruct((count,), logits.dtype)}
    inputs = {"logits": [logits, logits], "rows": [x.reshape(t.x_shape)], "weights": views, "entries": []}
    outputs = {"results": [jax.ShapeDtypeStruct((t.rows,), bf16)], **chosen, "kept": []}
    row, ids, values = run_tiles(t, select, inputs, outputs, scratch_of(t, bf16, bf16), interpret)
    return row, ids, values


def add_selected(
    t: Tiling, shares: KernelTrace, row: AnyArray, ids: AnyArray, values: AnyArray, weight: AnyArray,
    residual: Sequence[AnyArray], interpret: Any,
) -> AnyArray:  # fmt: skip
    """Return the sum of the results of the selected experts, weighted by `shares` of their logits, and of a residual.

    Other arguments are results of `multiply_selected`, and down of all experts.
    """
    (_, hidden, inner), bf16 = weight.shape, row.dtype
    lines = inner // t.width

    def add(refs: Any) -> None:
        def source(_: int, row: AnyArray, line: AnyArray) -> Any:
            choice = line // lines
            rows = pl.ds(refs.ids[choice] * hidden + row, t.tile_rows)
            return refs.weight.at[rows, pl.ds(line - choice * lines, t.tile_lines)]

        def prologue(x: AnyArray, axis: int | None) -> list[AnyArray]:
            (share,) = shares(load(refs.values, each_layout()), axis=0)
            refs.shares[...] = share.astype(jnp.float32)
            return [x]

        def factor(chunk: AnyArray) -> AnyArray:
            return refs.shares[chunk // (lines // t.tile_lines)]

        epilogue = trace(lambda y, *residual: sum(residual, y), 1 + len(refs.entries), bf16)
        run_program(Matvec(t, prologue, epilogue), refs, WeightTiles(t, source, refs, factor))

    rows, view = [row.reshape(t.x_shape)], weight.reshape(-1, lines, t.width)
    inputs = {"ids": ids, "values": values, "rows": rows, "weight": view, "entries": residual}
    outputs = {"results": [jax.ShapeDtypeStruct((hidden,), bf16)], "kept": []}
    scratch = {**scratch_of(t, bf16, bf16), "shares": plgpu.SMEM((len(ids),), jnp.float32)}
    return run_tiles(t, add, inputs, outputs, scratch, interpret)[0]


@functools.lru_cache(maxsize=256)
def traces_of(key: GroupKey) -> tuple[ExpertFfn, KernelTrace]:
    """Return the mixture of a group, and its weights as a function of the selected logits."""
    nodes = tuple(Node(op, inputs, types) for op, inputs, types in key.nodes)
    (top,) = (i for i, node in enumerate(nodes) if isinstance(node.op, TopK))
    end = next(i for i, node in enumerate(nodes) if isinstance(node.op, ExpertFfn))
    mixture = nodes[end]
    assert isinstance(mixture.op, ExpertFfn)

    def shares(selected: AnyArray) -> tuple[AnyArray, ...]:
        values = {Value(top): selected, Value(top, 1): None}
        run_nodes(nodes[top + 1 : end], values, top + 1)
        return (values[mixture.inputs[4]],)

    return mixture.op, KernelTrace(jax.make_jaxpr(shares)(struct(nodes[top].types[0])))


def find_expert(logits: Sequence[Any], choice: AnyArray) -> AnyArray:
    """Return the expert of a choice: as many others have larger logits, or equal ones and a lower number.

    They are in the order of `TopK`: NaN by its sign, and +0 above −0.

    Args:
        logits: the logits in float32, twice: Mosaic finds no layouts for two loads of one reference.
        choice: the number of the choice.
    """
    count = logits[0].shape[0]
    layout = tiled(((LANES * WARPS, 4), (LANES, 4)), (-4,), (-2,))
    square = (count, count)
    loaded = (load(ref, layout.reduce(1 - axis)) for axis, ref in enumerate(logits))
    rows = (flipped(lax.bitcast_convert_type(a, jnp.int32)) for a in loaded)
    own, other = (plgpu.layout_cast(lax.broadcast_in_dim(a, square, (i,)), layout) for i, a in enumerate(rows))
    number, other_number = (plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, square, i), layout) for i in (0, 1))
    larger, as_large = (plgpu.layout_cast(jnp.where(a, 1.0, 0.0), layout) for a in (other > own, other >= own))
    rank = jnp.where(other_number < number, as_large, larger).sum(axis=1)
    numbers = plgpu.layout_cast(lax.iota(jnp.int32, count), layout.reduce(1))
    return jnp.where(rank == choice.astype(jnp.float32), numbers, 0).sum(axis=0)


def each_layout() -> Any:
    """Return a layout in which every thread has all entries of a vector."""
    return tiled(((1,),), copies(WARPS), copies(LANES))
