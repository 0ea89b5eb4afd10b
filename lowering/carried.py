"""What carries a state: the nodes between the value that a leaf has when a program starts and the one that it gets.

They keep the precision of the leaf, whatever the profile computes in: rounded at every token, a sum would forget what
it is made of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_jax.ir.graph import Builder, Graph, StateRead, TypeCache
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.types import is_float


def carried(graph: Graph) -> dict[int, np.dtype[Any]]:
    """The numbers of those nodes, without the leaves themselves, with the dtype of what they carry.

    A cache that is written in place has one such node. Where one node carries two leaves, it has the wider dtype.
    """
    reads = {node.op.leaf: i for i, node in enumerate(graph.nodes) if isinstance(node.op, StateRead)}
    found: dict[int, np.dtype[Any]] = {}
    for leaf, value in graph.writes:
        first = reads.get(leaf)
        dtype = graph.nodes[first].types[0].dtype if first is not None else None
        if first is None or dtype is None or not is_float(dtype):
            continue
        for number in between(graph, first, value.node) - {first}:
            found[number] = max(found.get(number, dtype), dtype, key=lambda d: d.itemsize)
    return found


def between(graph: Graph, first: int, last: int) -> set[int]:
    """The nodes on the ways from one to another, both included; empty if no way leads there."""
    behind = {first}
    for number in range(first + 1, last + 1):
        if any(v.node in behind for v in graph.nodes[number].inputs):
            behind.add(number)
    found, asked = set(), [last]
    while asked:
        number = asked.pop()
        if number in behind and number not in found:
            found.add(number)
            asked += [v.node for v in graph.nodes[number].inputs]
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
