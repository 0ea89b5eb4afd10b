"""Merge Linears that read the same value into one: q, k, v; gate, up. Then the rotations of what came of one: q, k.

Rewrites of HIR, for anyone's flow: one large kernel costs less than several small ones. Rotations are merged where
tokens come one by one; over a prompt, cutting the result apart again costs more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Op, Param, Rewrite, TypeCache, Value, rewrite
from rlx_jax.ir.param import concat

Make = Callable[[Builder, Graph, list[int], tuple[Value, ...]], tuple[Value, ...]]
"""From the numbers of a group's nodes and the inputs of the first: one value for each node."""


def merge_linears(graph: Graph, types: TypeCache) -> Graph:
    """linear(x, w₁), linear(x, w₂) → split(linear(x, [w₁ ‖ w₂])).

    Only where each weight is a parameter used nowhere else in the program and biases agree.
    """
    uses = Counter(
        g.nodes[v.node].op for g, n in graph.walk() for v in n.inputs if isinstance(g.nodes[v.node].op, Param)
    )

    return _at_once(graph, types, "merge_linears", lambda graph: _groups(graph, uses), _merge)


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


def _merge(b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    nodes = [graph.nodes[number] for number in group]
    op = nodes[0].op
    assert isinstance(op, hir.Linear)
    axis = 0 if op.contract == 1 else 1
    sizes = tuple(int(graph.type(n.inputs[1]).shape[axis]) for n in nodes)
    weights = [_concat([_param(graph, n.inputs[1]) for n in nodes], axis)]
    if op.bias:
        weights.append(_concat([_param(graph, n.inputs[2]) for n in nodes], 0))
    merged = b(replace(op), inputs[0], *(b.leaf(w) for w in weights))
    return b.add(hir.Split(sizes), merged)


def _param(graph: Graph, value: Value) -> Param:
    op = graph.nodes[value.node].op
    assert isinstance(op, Param)
    return op


def _concat(params: list[Param], axis: int) -> Param:
    programs = tuple(concat(parts, axis) for parts in zip(*(p.programs for p in params), strict=True))
    return Param(programs, type=programs[0].type)


def merge_ropes(graph: Graph, types: TypeCache) -> Graph:
    """rope(split₀(y), t), rope(split₁(y), t) → split(rope(y₀ ‖ y₁, t)), where the parts stand side by side in y."""
    return _at_once(graph, types, "merge_ropes", _rotations, _rotate)


def _rotations(graph: Graph) -> list[list[int]]:
    """Node numbers of alike Ropes over neighbouring parts of one Split, in the order of the parts."""
    found: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if isinstance(node.op, hir.Rope) and isinstance(graph.nodes[node.inputs[0].node].op, hir.Split):
            found[(node.inputs[0].node, node.op, node.inputs[1:])].append(number)
    groups = [sorted(group, key=lambda n: graph.nodes[n].inputs[0].index) for group in found.values()]
    parts = [[graph.nodes[n].inputs[0].index for n in group] for group in groups]
    # The first to be computed makes all, so it has to be the first of the parts.
    return [g for g, at in zip(groups, parts, strict=True)
            if len(g) > 1 and g == sorted(g) and at == list(range(at[0], at[0] + len(at)))]  # fmt: skip


def _rotate(b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    split, first, count = b.nodes[inputs[0].node], inputs[0].index, len(group)
    sizes = split.op.sizes  # type: ignore[attr-defined]
    parts = sizes[first : first + count]
    cuts = tuple(n for n in (sum(sizes[:first]), sum(parts), sum(sizes[first + count :])) if n)
    whole = b.add(hir.Split(cuts), *split.inputs)[1 if first else 0]
    return b.add(hir.Split(parts), b(graph.nodes[group[0]].op, whole, *inputs[1:]))


def _at_once(
    graph: Graph, types: TypeCache, name: str, groups: Callable[[Graph], list[list[int]]], make: Make
) -> Graph:
    """Compute the nodes of each group together, by `make`, where the first of them stood."""

    def enter(graph: Graph) -> Rewrite:
        member = {number: group for group in groups(graph) for number in group}
        made: dict[int, Value] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if number not in member:
                return None
            group = member[number]
            if number == group[0]:
                made.update(zip(group, make(b, graph, group, inputs), strict=True))
            return (made[number],)

        return fn

    return rewrite(graph, enter, types, name)
