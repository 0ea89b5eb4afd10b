"""Rewrites of a graph: what becomes of each node, regions included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Leaf, Node, Param, TypeCache, Value, located
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.weight_reads import WeightSource, read_from

# Given the builder, a node's number, the node and its already rewritten operands: the values that replace its
# results, None to keep the node, or () to drop a node that nothing reads.
Rewrite = Callable[[Builder, int, Node, tuple[Value, ...]], tuple[Value, ...] | None]


def rewrite(
    graph: Graph, enter: Callable[[Graph], Rewrite], types: TypeCache, by: str = "",
    given: tuple[TensorType, ...] = (),
) -> Graph:  # fmt: skip
    """Rebuild `graph` node by node, regions first. `enter(graph)` is called for the graph and every region.

    All types are inferred again, so a change of a leaf's type flows through the whole program.
    """
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)  # the signature stays, used or not
    fn = enter(graph)
    mapped: dict[Value, Value] = {}
    for number, node in enumerate(graph.nodes):
        inputs = tuple(mapped[v] for v in node.inputs if v in mapped)
        op = node.op
        if isinstance(op, BodyInput) and given:
            op = BodyInput(op.index, type=given[op.index])
        if op.regions() and len(inputs) == len(node.inputs):  # else an operand was dropped, and this node will be
            operand_types = tuple(b.type(v) for v in inputs)
            op = op.with_regions(tuple(rewrite(r, enter, types, by, operand_types) for r in op.regions()))
        start = len(b.nodes)
        with b.at(node.origin), located(node.origin):
            new = fn(b, number, replace(node, op=op), inputs)
            if new is None:
                new = b.append(op, *inputs)
        _stamp(b, start, node, by)
        if new and len(new) != len(node.types):
            raise GraphError(f"{by or 'rewrite'}: {node.op.text()} has {len(node.types)} results, got {len(new)}")
        mapped.update({Value(number, i): v for i, v in enumerate(new)})
    b.writes.extend((leaf, mapped[v]) for leaf, v in graph.writes)
    return b.finish([mapped[v] for v in graph.outputs], graph.output_names)


def everywhere(fn: Rewrite) -> Callable[[Graph], Rewrite]:
    """The same rewrite in the graph and in every region."""
    return lambda graph: fn


def _stamp(b: Builder, start: int, node: Node, by: str) -> None:
    """Name the pass on nodes that are new."""
    for i in range(start, len(b.nodes)):
        made = b.nodes[i]
        if made.op != node.op and by and not isinstance(made.op, Leaf):
            b.nodes[i] = replace(made, origin=replace(made.origin, by=by))


def bind_params(graph: Graph, source: WeightSource, types: TypeCache) -> Graph:
    """Point parameters at what the source stores, cast to the declared dtype."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, Param):
            return None
        return (b.leaf(Param(tuple(read_from(p, source) for p in node.op.programs), type=node.op.type)),)

    return rewrite(graph, everywhere(fn), types)
