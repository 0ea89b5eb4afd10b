"""Bind the symbolic dimensions of a template: leaves get sizes, everything else is inferred again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Leaf, Node, TypeCache, Value
from rlx_jax.ir.rewrite import everywhere, rewrite


def specialise(graph: Graph, binding: Mapping[str, int], types: TypeCache) -> Graph:
    """The program for one choice of sizes.

    Raises:
        GraphError: a symbol of the program is not bound.
    """
    missing = sorted({s for i in graph.inputs for s in i.type.symbols} - set(binding))
    if missing:
        raise GraphError(f"dimensions {', '.join(missing)} are not bound; bound are {dict(binding)}")

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if isinstance(op, Leaf) and not isinstance(op, BodyInput) and not op.type.is_static:
            return (b.leaf(replace(op, type=op.type.bind(binding))),)
        return None

    out = rewrite(graph, everywhere(fn), types, "")
    return replace(out, inputs=tuple(replace(i, type=i.type.bind(binding)) for i in graph.inputs))
