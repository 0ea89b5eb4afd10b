"""What carries a state: the nodes between the value that a leaf has when a program starts and the one that it gets.

They keep the precision of the leaf, whatever the profile computes in: rounded at every token, a sum would forget what
it is made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from rlx_jax.ir.graph import Builder, Graph, StateRead, TypeCache
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.types import is_float

T = TypeVar("T")


def carried(graph: Graph) -> dict[int, np.dtype[Any]]:
    """The numbers of those nodes, without the leaves themselves, with the dtype of what they carry.

    A leaf carries on itself, or leaves carry on each other: from one of them to the next, and around. Of layers that
    stand on each other, what an earlier one keeps reaches a later one and never comes back, so that a cache that is
    written in place has one such node. Where one node carries several leaves, it has the widest dtype.
    """
    floats = {
        node.op.leaf: number
        for number, node in enumerate(graph.nodes)
        if isinstance(node.op, StateRead) and is_float(node.op.type.dtype)
    }
    writes = {leaf: value.node for leaf, value in graph.writes if leaf in floats}
    readers: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        for value in node.inputs:
            readers[value.node].append(number)
    behind = {leaf: reachable([floats[leaf]], readers.__getitem__) for leaf in writes}
    reached = {leaf: {other for other, number in writes.items() if number in behind[leaf]} for leaf in writes}
    found: dict[int, np.dtype[Any]] = {}
    for leaf, others in reached.items():
        for other in others:
            if leaf not in reachable(reached[other], reached.__getitem__):
                continue
            dtype = graph.nodes[floats[other]].types[0].dtype
            before = reachable([writes[other]], lambda number: [v.node for v in graph.nodes[number].inputs])
            for number in before & behind[leaf] - {floats[leaf]}:
                found[number] = max(found.get(number, dtype), dtype, key=lambda d: d.itemsize)
    return found


def reachable(first: Iterable[T], step: Callable[[T], Iterable[T]]) -> set[T]:
    """All that some reach in any number of steps, themselves included."""
    found: set[T] = set()
    asked = list(first)
    while asked:
        one = asked.pop()
        if one not in found:
            found.add(one)
            asked += step(one)
    return found


def written_as_read(graph: Graph, types: TypeCache) -> Graph:
    """A floating leaf gets the dtype back that it was read in."""
    read = {node.op.leaf: node.types[0] for node in graph.nodes if isinstance(node.op, StateRead)}
    b = Builder.resume(graph, types)
    b.writes = [
        (leaf, b(CastTo(read[leaf].dtype), value))
        if leaf in read and graph.type(value).dtype != read[leaf].dtype and is_float(graph.type(value).dtype)
        else (leaf, value)
        for leaf, value in graph.writes
    ]
    return b.finish(graph.outputs, graph.output_names)
