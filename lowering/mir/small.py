"""Small MIR passes: dead code, common subexpressions, constant folding, inputs and outputs, sizes, unrolled steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import jax
import numpy as np

from rlx_jax.errors import GraphError, check_names
from rlx_jax.ir.graph import (
    Builder,
    Constant,
    Graph,
    Input,
    Leaf,
    Mir,
    Node,
    Param,
    StateRead,
    TypeCache,
    Value,
    constant,
)
from rlx_jax.ir.ops.index import TakeRow
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import TokenScan
from rlx_jax.ir.ops.shape import Narrow, Shard, SplitLast
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.queries import bind_leaves, find_readers
from rlx_jax.ir.region import Rewrite, drop_unread_sides, everywhere, replace_ops, rewrite


def dce(graph: Graph, types: TypeCache) -> Graph:
    """Drop the nodes that no output, state write or region needs. Declared inputs stay in the signature."""

    def enter(graph: Graph) -> Rewrite:
        needed = live_nodes(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            return None if number in needed else ()

        return fn

    return rewrite(graph, enter, types, "dce")


def unread_inputs(graph: Graph) -> frozenset[str]:
    """Return the names of the declared inputs that no output, state write or region needs."""
    return frozenset(i.input for i in graph.inputs) - set(_read_inputs(graph))


def _read_inputs(graph: Graph) -> Iterator[str]:
    for number in live_nodes(graph):
        op = graph.nodes[number].op
        if isinstance(op, Input):
            yield op.input
        for region in op.regions():
            yield from _read_inputs(region)


def remove_unread_inputs(graph: Graph, names: Collection[str], types: TypeCache) -> Graph:
    """Return the program without the named inputs that it does not need, and without the dead nodes that read them."""
    dropped = unread_inputs(graph).intersection(names)
    if not dropped:
        return graph
    return replace(dce(graph, types), inputs=tuple(i for i in graph.inputs if i.input not in dropped))


def live_nodes(graph: Graph) -> set[int]:
    """Return the numbers of the nodes that an output, a state write or a region with writes needs."""
    needed = {v.node for v in graph.roots()}
    # Reads of a written state leaf stay even if their value is unused, because they have the type of the leaf.
    written_leaves = {leaf for leaf, _ in graph.writes}
    needed |= {i for i, n in enumerate(graph.nodes) if isinstance(n.op, StateRead) and n.op.leaf in written_leaves}
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if number in needed or any(region.writes for region in node.op.regions()):
            needed.add(number)
            needed.update(v.node for v in node.inputs)
    return needed


def cse(graph: Graph, types: TypeCache) -> Graph:
    """Merge equal ops on equal operands into one node. Leaves are shared already; regions are never merged."""

    def enter(graph: Graph) -> Rewrite:
        nodes: dict[tuple[object, tuple[Value, ...]], tuple[Value, ...]] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Leaf) or node.op.regions():
                return None
            key = (node.op, inputs)
            if key not in nodes:
                nodes[key] = b.add(node.op, *inputs)
            return nodes[key]

        return fn

    return rewrite(graph, enter, types, "cse")


MAX_FOLDED_BYTES = 4096  # a larger constant costs more to store in the program than to compute


def constant_folding(graph: Graph, types: TypeCache) -> Graph:
    """Evaluate ops with constant operands only, by the same `eval` that runs the program."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        operands = [b.nodes[v.node].op for v in inputs]
        if not inputs or not isinstance(node.op, Mir) or not all(isinstance(op, Constant) for op in operands):
            return None
        if not all(t.is_static and t.nbytes <= MAX_FOLDED_BYTES for t in node.types):
            return None
        with jax.ensure_compile_time_eval():
            values = node.op.eval(*(np.asarray(op.array) for op in operands if isinstance(op, Constant)))
        results = values if isinstance(values, tuple) else (values,)
        return tuple(b.leaf(constant(np.asarray(r), r.dtype)) for r in results)

    return rewrite(graph, everywhere(fn), types, "constant_folding")


def select_outputs(graph: Graph, names: tuple[str, ...], types: TypeCache) -> Graph:
    """Return the program with the named outputs, in this order.

    Raises:
        GraphError: the program has no output of a name.
    """
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    check_names(names, outputs, f"{graph.name}: no output", "; it has")
    graph = dce(replace(graph, outputs=tuple(outputs[name] for name in names), output_names=names), types)
    return dce(drop_unread_sides(graph, types), types)


def specialise(graph: Graph, binding: Mapping[str, int], types: TypeCache) -> Graph:
    """Return the program with sizes for all its symbolic dims.

    Raises:
        GraphError: a symbol of the program has no size.
    """
    missing = sorted({s for i in graph.inputs for s in i.type.symbols} - set(binding))
    if missing:
        raise GraphError(f"dimensions {', '.join(missing)} are not bound; bound are {dict(binding)}")
    return bind_leaves(graph, binding, types)


MIN_DIVIDED_TOKENS = 2048  # below, a product takes about as long as a copy of its weight's rows


def divide_last(graph: Graph, types: TypeCache) -> Graph:
    """Compute the first part of a joined product for one token of each row alone, if only these tokens of it are read.

    In the last layer of a prompt these are the queries, while keys and values have all tokens.
    """
    readers, products = find_readers(graph), dict[int, tuple[MatMul, Value, Value]]()

    def is_divided(number: int) -> bool:
        (product,), first = graph.nodes[number].inputs, readers[Value(number)]
        node, reads = graph.nodes[product.node], [graph.nodes[i].op for i in first if i >= 0]
        if not isinstance(node.op, MatMul) or graph.type(product).rank != 3 or len(readers[product]) > 1:
            return False
        leaf, tokens = graph.nodes[node.inputs[1].node].op, graph.type(product).size // graph.type(product).shape[-1]
        is_taken = len(first) == len(reads) == 1 and isinstance(reads[0], TakeRow)
        is_plain = isinstance(leaf, Param) and not any(map(packing_of, leaf.programs))
        return is_taken and is_plain and tokens >= MIN_DIVIDED_TOKENS

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(node.op, SplitLast) and is_divided(number):
            product, (size, *others) = b.nodes[inputs[0].node], node.op.sizes
            assert isinstance(op := product.op, MatMul)
            x, w = product.inputs
            products[number] = op, x, w
            rest = b(op, x, b(Narrow(1 - op.contract, size, sum(others)), w))
            return (inputs[0], *b.add(SplitLast(tuple(others)), rest))  # no reads of the former stay
        if isinstance(node.op, TakeRow) and node.inputs[0].node in products and node.inputs[0].index == 0:
            op, x, w = products[node.inputs[0].node]
            size = int(node.types[0].shape[-1])
            return (b(Narrow(2, 0, size), b(op, b(TakeRow(), x, inputs[1]), w)),)
        return None

    divided = rewrite(graph, lambda inner: fn if inner is graph else lambda *_: None, types, "divide_last")
    return dce(divided, types) if products else graph


MAX_UNROLLED_EQUATIONS = 64  # maximum number of equations of a step that is unrolled
# Tokens per loop iteration. A GPU launches the kernels of each iteration separately. One H200, 8 rows of 512 tokens, 1
# and 8 tokens per iteration: an Elman cell of width 1024 4.1 and 2.8 ms, a mean 5.2 and 1.7 ms, fast weights of
# 128 × 128 10.4 and 1.9 ms. On a CPU there is no gain: 12.0 and 11.8, 0.4 and 1.0, 1.2 and 1.4 ms for smaller ones.
UNROLL = 8


def unroll_steps(graph: Graph, types: TypeCache) -> Graph:
    """Rewrite token_scan(…) → token_scan(…, unroll=8), for user-defined steps of few equations."""

    def unrolled(op: TokenScan) -> TokenScan:
        is_small = op.unroll is None and len(op.step.jaxpr.eqns) <= MAX_UNROLLED_EQUATIONS
        return replace(op, unroll=UNROLL) if is_small else op

    return replace_ops(graph, TokenScan, unrolled, types, "unroll_steps")


def remove_sharding_constraints(graph: Graph, types: TypeCache) -> Graph:
    """Rewrite shard(x) → x, for a program on one device."""
    if not any(isinstance(node.op, Shard) for _, node in graph.walk()):
        return graph

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return inputs if isinstance(node.op, Shard) else None

    return rewrite(graph, everywhere(fn), types, "undivided")
