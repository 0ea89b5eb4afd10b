"""Merge Linears that read the same value into one: q, k, v; gate, up. A rewrite of HIR, for anyone's flow."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Op, Param, Rewrite, TypeCache, Value, rewrite
from rlx_jax.ir.param import concat


def merge_linears(graph: Graph, types: TypeCache) -> Graph:
    """linear(x, w₁), linear(x, w₂) → split(linear(x, [w₁ ‖ w₂])).

    Only where each weight is a parameter used nowhere else in the program and biases agree.
    """
    uses = Counter(
        g.nodes[v.node].op for g, n in graph.walk() for v in n.inputs if isinstance(g.nodes[v.node].op, Param)
    )

    def enter(graph: Graph) -> Rewrite:
        groups = _groups(graph, uses)
        member = {number: group for group in groups for number in group}
        made: dict[int, Value] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if number not in member:
                return None
            group = member[number]
            if number == group[0]:
                made.update(zip(group, _merge(b, graph, group, inputs[0]), strict=True))
            return (made[number],)

        return fn

    return rewrite(graph, enter, types, "merge_linears")


def _groups(graph: Graph, uses: Counter[Op]) -> list[list[int]]:
    """Node numbers of Linears that can become one, in order."""
    found: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if not isinstance(node.op, hir.Linear) or node.op.activation or node.op.f32_result:
            continue
        operands = [graph.nodes[v.node].op for v in node.inputs[1:]]
        if all(isinstance(op, Param) and uses[op] == 1 for op in operands):
            iterations = {len(op.programs) for op in operands if isinstance(op, Param)}
            found[(node.inputs[0], node.op, tuple(iterations))].append(number)
    return [group for group in found.values() if len(group) > 1]


def _merge(b: Builder, graph: Graph, group: list[int], x: Value) -> tuple[Value, ...]:
    nodes = [graph.nodes[number] for number in group]
    op = nodes[0].op
    assert isinstance(op, hir.Linear)
    axis = 0 if op.contract == 1 else 1
    sizes = tuple(int(graph.type(n.inputs[1]).shape[axis]) for n in nodes)
    weights = [_concat([_param(graph, n.inputs[1]) for n in nodes], axis)]
    if op.bias:
        weights.append(_concat([_param(graph, n.inputs[2]) for n in nodes], 0))
    merged = b(replace(op), x, *(b.leaf(w) for w in weights))
    return b.add(hir.Split(sizes), merged)


def _param(graph: Graph, value: Value) -> Param:
    op = graph.nodes[value.node].op
    assert isinstance(op, Param)
    return op


def _concat(params: list[Param], axis: int) -> Param:
    programs = tuple(concat(parts, axis) for parts in zip(*(p.programs for p in params), strict=True))
    return Param(programs, type=programs[0].type)
