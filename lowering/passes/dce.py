"""Dead code elimination."""

from __future__ import annotations

from rlx_jax.ir.graph import Builder, Graph, Node, Rewrite, TypeCache, Value, rewrite


def dce(graph: Graph, types: TypeCache) -> Graph:
    """Drop the nodes that no output, state write or region needs. Declared inputs stay in the signature."""

    def enter(graph: Graph) -> Rewrite:
        live = _live(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            return None if number in live else ()

        return fn

    return rewrite(graph, enter, types, "dce")


def _live(graph: Graph) -> set[int]:
    live = {v.node for v in graph.roots()}
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if number in live or any(region.writes for region in node.op.regions()):
            live.add(number)
            live.update(v.node for v in node.inputs)
    return live
