"""Merge Linears that read the same value into one: q, k, v; gate, up. Then the rotations of what came of one: q, k.

Rewrites of HIR, for anyone's flow: one large kernel costs less than several small ones. Rotations are merged where
tokens come one by one; over a prompt, cutting the result apart again costs more.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Op, Param, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.param import Program, concat, sliced
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.fusion import Fused, Place
from rlx_jax.lowering.mir.small import dce, live

Make = Callable[[Builder, Graph, list[int], tuple[Value, ...]], tuple[Value, ...]]
"""From the numbers of a group's nodes and the inputs of the first: one value for each node."""


ADVICE = "a Linear with the same bias, orientation and no activation"


def merge_linears(graph: Graph, types: TypeCache, division: Division | None = None) -> Fused:
    """linear(x, w₁), linear(x, w₂) → split(linear(x, [w₁ ‖ w₂])).

    Only where biases agree and each weight is used nowhere else in the program: in one place of the layers, beside the
    same weights in each that shares it. So it has a place in one merged leaf, and no copy in another.
    Over a mesh the merged weight has for each device its part of w₁ beside its part of w₂, so that the cut is local;
    those that are divided into different numbers of parts stay apart, and so do those of key heads that every device
    has whole: it cuts what it needs of them.

    Missed: products of one value whose weights nothing else reads, and that could not be one.
    """
    uses = _uses(graph)
    done = _at_once(
        graph, types, "merge_linears", lambda graph: _groups(graph, uses, division), functools.partial(_merge, division)
    )
    places = _merged(done, hir.Linear, "shared_input_matmul", "merge_linears")
    return Fused(done, (*places, *_missed(done, _uses(done))))


def _uses(graph: Graph) -> Counter[Program]:
    """In how many places each parameter is read."""
    reads = [g.nodes[v.node].op for g, n in graph.walk() for v in n.inputs]
    return Counter(program for op in reads if isinstance(op, Param) for program in set(op.programs))


def _alone(op: Op, uses: Counter[Program]) -> bool:
    """Whether a weight is a parameter that is read in one place."""
    return isinstance(op, Param) and all(uses[program] == 1 for program in op.programs)


def _missed(graph: Graph, uses: Counter[Program]) -> Iterator[Place]:
    """The first of the products of each value that stayed apart."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number in sorted(live(graph)):
        node = graph.nodes[number]
        for region in node.op.regions():
            yield from _missed(region, uses)
        if isinstance(node.op, hir.Linear | MatMul | FusedMatMulBiasAct):
            if all(_alone(graph.nodes[v.node].op, uses) for v in node.inputs[1:]):
                groups[node.inputs[0], node.op.f32_result].append(number)
    for first, *others in groups.values():
        place = functools.partial(Place.of, "shared_input_matmul", "merge_linears", first, graph.nodes[first])
        if len(others) == 1:
            yield place(reason="NotFused", hint=f"make both {ADVICE}")
        elif others:
            yield place(reason="SharedMatmulCount", detail=f"{{{1 + len(others)}}}", hint=f"make all {ADVICE}")


def _groups(graph: Graph, uses: Counter[Program], division: Division | None) -> list[list[int]]:
    """Node numbers of Linears that can become one, in order."""
    found: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if not isinstance(node.op, hir.Linear) or node.op.activation or node.op.f32_result:
            continue
        operands = [graph.nodes[v.node].op for v in node.inputs[1:]]
        if all(_alone(op, uses) for op in operands):
            iterations = tuple(len(op.programs) for op in operands if isinstance(op, Param))
            weight = operands[0]
            assert isinstance(weight, Param)
            over = tuple(_parts(division, weight.programs[0], axis) for axis in (0, 1))
            if any(int(size) % n for size, n in zip(weight.type.shape, over, strict=True)):
                continue  # refused by name once the layout is known
            if division is not None and division.repeats(weight.programs[0], 1 - node.op.contract):
                continue
            found[(node.inputs[0], node.op, iterations, over)].append(number)
    return [group for group in found.values() if len(group) > 1 and _one_place_each(graph, group)]


def _one_place_each(graph: Graph, group: list[int]) -> bool:
    """Whether each weight stands beside the same others in all layers that share it."""
    for place in range(1, len(graph.nodes[group[0]].inputs)):
        merged = set(zip(*(_param(graph, graph.nodes[n].inputs[place]).programs for n in group), strict=True))
        if len({program for programs in merged for program in programs}) < len(group) * len(merged):
            return False
    return True


def _parts(division: Division | None, program: Program, axis: int) -> int:
    """Into how many pieces a parameter is cut along an axis where it is multiplied."""
    return 1 if division is None else division.weight_parts(program, axis)


def _merge(
    division: Division | None, b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]
) -> tuple[Value, ...]:
    nodes = [graph.nodes[number] for number in group]
    op = nodes[0].op
    assert isinstance(op, hir.Linear)
    axis = 0 if op.contract == 1 else 1
    sizes = tuple(int(graph.type(n.inputs[1]).shape[axis]) for n in nodes)
    shards = _parts(division, _param(graph, nodes[0].inputs[1]).programs[0], axis)
    weights = [_concat([_param(graph, n.inputs[1]) for n in nodes], axis, shards)]
    if op.bias:
        weights.append(_concat([_param(graph, n.inputs[2]) for n in nodes], 0, shards))
    merged = b(replace(op), inputs[0], *(b.leaf(w) for w in weights))
    return b.add(hir.Split(sizes, shards), merged)


def _param(graph: Graph, value: Value) -> Param:
    op = graph.nodes[value.node].op
    assert isinstance(op, Param)
    return op


def _concat(params: list[Param], axis: int, shards: int) -> Param:
    """Side by side; the first part of each, then the second part of each …"""

    def merged(programs: tuple[Program, ...]) -> Program:
        if shards == 1:
            return concat(programs, axis)
        sizes = [int(p.type.shape[axis]) // shards for p in programs]
        pieces = (
            sliced(p, axis, i * n, (i + 1) * n) for i in range(shards) for p, n in zip(programs, sizes, strict=True)
        )
        return concat(tuple(pieces), axis)

    programs = tuple(map(merged, zip(*(p.programs for p in params), strict=True)))
    return Param(programs, type=programs[0].type)


def merge_ropes(graph: Graph, types: TypeCache) -> Fused:
    """rope(split₀(y), t), rope(split₁(y), t) → split(rope(y₀ ‖ y₁, t)), where the parts stand side by side in y."""
    done = _at_once(graph, types, "merge_ropes", _rotations, _rotate)
    return Fused(done, tuple(_merged(done, hir.Rope, "shared_rope", "merge_ropes")))


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
    assert isinstance(split.op, hir.Split)
    sizes, shards = split.op.sizes, split.op.shards
    parts = sizes[first : first + count]
    cuts = tuple(n for n in (sum(sizes[:first]), sum(parts), sum(sizes[first + count :])) if n)
    whole = b.add(hir.Split(cuts, shards), *split.inputs)[1 if first else 0]
    return b.add(hir.Split(parts, shards), b(graph.nodes[group[0]].op, whole, *inputs[1:]))


def _merged(graph: Graph, kind: type[Op], pattern: str, by: str) -> Iterator[Place]:
    """Where one node of that kind was made of several: what it gives is split."""
    for number, node in enumerate(graph.nodes):
        if node.origin.by == by and isinstance(node.op, hir.Split):
            if isinstance(graph.nodes[node.inputs[0].node].op, kind):
                yield Place.of(pattern, by, number, node)
        for region in node.op.regions():
            yield from _merged(region, kind, pattern, by)


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

    # Without dce the unmerged weights would stay in the graph, and so in the layout.
    return dce(rewrite(graph, enter, types, name), types)
