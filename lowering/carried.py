"""What carries a state: the nodes between the value that a leaf has when a program starts and the one that it gets.

They keep the precision of the leaf, whatever the profile computes in: rounded at every token, a sum would forget what
it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from rlx_jax.ir.graph import Builder, Graph, StateLeaf, StateRead, TypeCache
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.types import is_float


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
    behind = {leaf: descendants(graph, floats[leaf]) for leaf in writes}
    reached = {leaf: {other for other, number in writes.items() if number in behind[leaf]} for leaf in writes}
    found: dict[int, np.dtype[Any]] = {}
    for leaf, others in reached.items():
        for other in others:
            if leaf not in closure(reached, other):
                continue
            dtype = graph.nodes[floats[other]].types[0].dtype
            for number in ancestors(graph, writes[other]) & behind[leaf] - {floats[leaf]}:
                found[number] = max(found.get(number, dtype), dtype, key=lambda d: d.itemsize)
    return found


def closure(reached: Mapping[StateLeaf, Set[StateLeaf]], leaf: StateLeaf) -> set[StateLeaf]:
    """All leaves that one reaches at last, in one step or several."""
    found: set[StateLeaf] = set()
    asked = [leaf]
    while asked:
        new = reached[asked.pop()] - found
        found |= new
        asked += new
    return found


def descendants(graph: Graph, first: int) -> set[int]:
    """A node and all that is computed from it."""
    found = {first}
    for number in range(first + 1, len(graph.nodes)):
        if any(v.node in found for v in graph.nodes[number].inputs):
            found.add(number)
    return found


def ancestors(graph: Graph, last: int) -> set[int]:
    """A node and all that it is computed from."""
    found: set[int] = set()
    asked = [last]
    while asked:
        number = asked.pop()
        if number not in found:
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
