"""The pass `group_deltas`: it joins the gated delta rule of a prompt, and the convolution before it, to a `DeltaGroup`.

The group's kernels (`row_kernels.py`, `delta_chunks.py`) read what the projection computed. Otherwise XLA computes the
convolution in one kernel, and q, k and v in one each, which read and write all tokens once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from rlx_jax.ir.graph import Constant, Graph, TypeCache, Value
from rlx_jax.ir.kernel_group import DeltaGroup
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Unary
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp
from rlx_jax.ir.ops.reduce import Standardize
from rlx_jax.ir.ops.shape import Pad, Reshape, SplitLast
from rlx_jax.ir.region import Group, group_body, join_nodes
from rlx_jax.lowering.lir.plan import call_of
from rlx_jax.lowering.lir.recurrent import MAX_TAPS, prompt_refusal
from rlx_jax.lowering.mir.small import dce

# The ops from the rule's operands back to the parts of q, k and v, and from these to what the convolution reads.
UNIT_HEADS = (CastTo, Binary, Standardize, CastTo, Reshape)
CONVOLUTION = (SplitLast, Unary, CausalConvOp, Pad)


def group_deltas(graph: Graph, types: TypeCache) -> Graph:
    """Return the graph with a `DeltaGroup` for each rule of a prompt that the kernels compute with its convolution."""
    if not any(isinstance(node.op, GatedDeltaOp) for _, node in graph.walk()):
        return graph
    return dce(join_nodes(graph, types, find_groups), types)


def find_groups(graph: Graph, types: TypeCache) -> tuple[range, dict[int, Group]]:
    """Return the order of the nodes, and the groups by the number of the rule."""
    numbers = range(len(graph.nodes))
    return numbers, {n: group_of(graph, types, members) for n in numbers if (members := members_of(graph, n))}


def follow(graph: Graph, value: Value, chain: Sequence[type]) -> list[Value]:
    """Return a value and those before it, as long as they are results of the ops of a chain."""
    values = [value]
    for op in chain:
        if not isinstance(graph.nodes[values[-1].node].op, op):
            break
        values.append(graph.nodes[values[-1].node].inputs[0])
    return values


def members_of(graph: Graph, number: int) -> list[int]:
    """Return the nodes of the group of a rule, which is the last; none if they are not what the kernels compute."""
    nodes, node = graph.nodes, graph.nodes[number]
    rule = node.op
    if not isinstance(rule, GatedDeltaOp) or rule.from_state or prompt_refusal(call_of(graph, node)):
        return []
    chains = (UNIT_HEADS, UNIT_HEADS, (Reshape,))
    heads = [follow(graph, v, chain) for v, chain in zip(node.inputs, chains, strict=False)]
    split = heads[2][-1].node
    before = follow(graph, Value(split), CONVOLUTION)
    if [values[-1] for values in heads] != [Value(split, i) for i in range(3)] or len(before) <= len(CONVOLUTION):
        return []
    norms = [nodes[heads[i][2].node].op for i in range(2)]
    scales = [nodes[nodes[heads[i][1].node].inputs[1].node].op for i in range(2)]
    widths = [math.prod(map(int, graph.type(v).shape[2:])) for v in node.inputs[:3]]
    _, activation, convolution, pad = (nodes[v.node] for v in before[:-1])
    taps, unit = int(graph.type(convolution.inputs[1]).shape[1]), int(graph.type(node.inputs[1]).shape[3]) ** -0.5
    is_known = (
        nodes[split].op == SplitLast(tuple(widths))
        and activation.op == Unary("silu") and convolution.op == CausalConvOp()
        and pad.op == Pad(((0, 0), (taps - 1, 0), (0, 0)))
        and all(isinstance(norm, Standardize) and not norm.centre and norm.axes in ((-1,), (3,)) for norm in norms)
        and norms[0] == norms[1] and all(nodes[heads[i][1].node].op == Binary("mul") for i in range(2))
        and all(isinstance(c, Constant) and c.array.size == 1 and math.isclose(c.array.item(), unit, rel_tol=1e-6)
                for c in scales)
        and len({(graph.type(v).dtype, *graph.type(v).shape[:2]) for v in (*node.inputs[:3], before[-1])}) == 1
        and all(graph.type(heads[i][2]).dtype == jnp.float32 for i in range(2))
    )  # fmt: skip
    members = {v.node for values in (*heads, before) for v in values[:-1]} | {number}
    source = before[-1]
    if source.index == 0 and isinstance(nodes[source.node].op, SplitLast):  # its first columns, read where they are
        members.add(source.node)
        source = nodes[source.node].inputs[0]
    columns = int(graph.type(source).shape[2])
    fits = (
        taps <= MAX_TAPS and columns % 8 == 0 and all(int(graph.type(v).shape[3]) % 64 == 0 for v in node.inputs[1:3])
    )
    return sorted(members) if is_known and fits else []


def group_of(graph: Graph, types: TypeCache, members: Sequence[int]) -> Group:
    """Return the group of some nodes, of which the rule is the last."""
    nodes, rule = graph.nodes, graph.nodes[members[-1]]
    (window,) = (nodes[n].inputs[1] for n in members if isinstance(nodes[n].op, CausalConvOp))
    (norm, *_) = (op for n in members if isinstance(op := nodes[n].op, Standardize))
    operands = (nodes[members[0]].inputs[0], window, *rule.inputs[3:])
    results = {Value(members[-1], i): i for i in range(2)}
    heads, keys = map(int, graph.type(rule.inputs[1]).shape[2:])
    width = int(graph.type(rule.inputs[2]).shape[3])
    assert isinstance(rule.op, GatedDeltaOp)
    body = group_body(graph, types, members, operands, [*results], rule.origin)
    return Group(DeltaGroup(body, rule.op, heads, keys, width, norm.eps * keys), operands, results, rule.origin)
