"""Dead code elimination."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from rlx_jax.ir.graph import Builder, Graph, Input, Node, StateRead, TypeCache, Value
from rlx_jax.ir.rewrite import Rewrite, rewrite


def dce(graph: Graph, types: TypeCache) -> Graph:
    """Drop the nodes that no output, state write or region needs. Declared inputs stay in the signature."""

    def enter(graph: Graph) -> Rewrite:
        needed = live(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            return None if number in needed else ()

        return fn

    return rewrite(graph, enter, types, "dce")


def unread_inputs(graph: Graph) -> frozenset[str]:
    """Names of the declared inputs that no output, state write or region needs."""
    return frozenset(i.input for i in graph.inputs) - set(_read_inputs(graph))


def _read_inputs(graph: Graph) -> Iterator[str]:
    for number in live(graph):
        op = graph.nodes[number].op
        if isinstance(op, Input):
            yield op.input
        for region in op.regions():
            yield from _read_inputs(region)


def without_inputs(graph: Graph, names: Collection[str], types: TypeCache) -> Graph:
    """The program without those of these inputs that it does not read, and without what is computed of them."""
    left = unread_inputs(graph).intersection(names)
    return replace(dce(graph, types), inputs=tuple(i for i in graph.inputs if i.input not in left)) if left else graph


def live(graph: Graph) -> set[int]:
    """Numbers of the nodes that an output, a state write or a region with writes needs."""
    needed = {v.node for v in graph.roots()}
    # A state leaf that is written is also read, though nothing needs what it held: its type says what is kept.
    written = {leaf for leaf, _ in graph.writes}
    needed |= {i for i, n in enumerate(graph.nodes) if isinstance(n.op, StateRead) and n.op.leaf in written}
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if number in needed or any(region.writes for region in node.op.regions()):
            needed.add(number)
            needed.update(v.node for v in node.inputs)
    return needed
