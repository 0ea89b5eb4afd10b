"""Rewrites of graphs: `rewrite` rebuilds a graph node by node, including regions, with a function for each node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Leaf, Node, Param, TypeCache, Value, locate_errors
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.weight_reads import WeightSource, with_source

# A function of the builder, a node's number, the node and its already rewritten operands. It returns the values that
# replace the node's results, None to keep the node, or () to drop a node that nothing reads.
Rewrite = Callable[[Builder, int, Node, tuple[Value, ...]], tuple[Value, ...] | None]


def rewrite(
    graph: Graph, enter: Callable[[Graph], Rewrite], types: TypeCache, by: str = "",
    input_types: tuple[TensorType, ...] = (),
) -> Graph:  # fmt: skip
    """Return `graph` rebuilt node by node, regions first.

    All types are inferred again, so that a new type of a leaf propagates through the program.

    Args:
        graph: a program or a region.
        enter: called for the graph and every region; returns the rewrite of its nodes.
        types: infers the types.
        by: the name of the pass, recorded on new nodes.
        input_types: the operand types of the region, if the graph is one.
    """
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)  # inputs remain in the signature even if nothing reads them
    fn = enter(graph)
    value_map: dict[Value, Value] = {}
    for number, node in enumerate(graph.nodes):
        inputs = tuple(value_map[v] for v in node.inputs if v in value_map)
        op = node.op
        if isinstance(op, BodyInput) and input_types:
            op = BodyInput(op.index, type=input_types[op.index])
        # If an operand was dropped, `fn` drops this node too.
        if op.regions() and len(inputs) == len(node.inputs):
            operand_types = tuple(b.type(v) for v in inputs)
            op = op.with_regions(tuple(rewrite(r, enter, types, by, operand_types) for r in op.regions()))
        start = len(b.nodes)
        with b.origin_scope(node.origin), locate_errors(node.origin):
            results = fn(b, number, replace(node, op=op), inputs)
            if results is None:
                results = b.append(op, *inputs)
        _stamp(b, start, node, by)
        if results and len(results) != len(node.types):
            raise GraphError(f"{by or 'rewrite'}: {node.op.text()} has {len(node.types)} results, got {len(results)}")
        value_map.update({Value(number, i): v for i, v in enumerate(results)})
    b.writes.extend((leaf, value_map[v]) for leaf, v in graph.writes)
    return b.finish([value_map[v] for v in graph.outputs], graph.output_names)


def everywhere(fn: Rewrite) -> Callable[[Graph], Rewrite]:
    """Return an `enter` function for `rewrite` that applies `fn` in the graph and in every region."""
    return lambda graph: fn


def _stamp(b: Builder, start: int, node: Node, by: str) -> None:
    """Record the pass `by` on the nodes from `start` on that differ from `node`."""
    for i in range(start, len(b.nodes)):
        new_node = b.nodes[i]
        if new_node.op != node.op and by and not isinstance(new_node.op, Leaf):
            b.nodes[i] = replace(new_node, origin=replace(new_node.origin, by=by))


def bind_params(graph: Graph, source: WeightSource, types: TypeCache) -> Graph:
    """Return the graph with parameters that read the tensors of `source`, cast to their declared dtypes."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, Param):
            return None
        return (b.leaf(Param(tuple(with_source(p, source) for p in node.op.programs), type=node.op.type)),)

    return rewrite(graph, everywhere(fn), types)
