"""Common subexpression elimination."""

from __future__ import annotations

from rlx_jax.ir.graph import Builder, Graph, Leaf, Node, TypeCache, Value
from rlx_jax.ir.rewrite import Rewrite, rewrite


def cse(graph: Graph, types: TypeCache) -> Graph:
    """One node for equal ops on equal operands. Leaves are shared already; regions are never merged."""

    def enter(graph: Graph) -> Rewrite:
        known: dict[tuple[object, tuple[Value, ...]], tuple[Value, ...]] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Leaf) or node.op.regions():
                return None
            key = (node.op, inputs)
            if key not in known:
                known[key] = b.add(node.op, *inputs)
            return known[key]

        return fn

    return rewrite(graph, enter, types, "cse")
