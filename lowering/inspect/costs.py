"""What a program takes, counted on its ops: nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from rlx_jax.ir.graph import Graph, Mir
from rlx_jax.ir.paths import Path
from rlx_jax.lowering.mir.small import live


@dataclass(frozen=True)
class Cost:
    """Of one run of a program, layers as often as they run (XLA counts a scan's body once).

    flops: multiply-adds × 2 of all contractions. bytes: what its ops read and write, each as if it ran alone: a bound
    from above, as XLA fuses. workspace: scratch memory of the op that needs most.
    """

    flops: int = 0
    bytes: int = 0
    workspace: int = 0

    def then(self, other: Cost, times: int = 1) -> Cost:
        """This, and `times` that after it."""
        return Cost(
            self.flops + times * other.flops, self.bytes + times * other.bytes, max(self.workspace, other.workspace)
        )


def costs(graph: Graph, times: int = 1) -> dict[Path, Cost]:
    """The cost of each block of a MIR program of static sizes, as often as it runs: of the nodes that something
    needs."""
    found: dict[Path, Cost] = {}
    for node in (graph.nodes[number] for number in sorted(live(graph))):
        op, operands = node.op, [graph.type(v) for v in node.inputs]
        parts = [part for region in op.regions() for part in costs(region, op.iterations()).items()]
        if isinstance(op, Mir):
            counts = (count(operands, node.types) for count in (op.flops, op.bytes, op.workspace))
            parts.append((node.origin.path, Cost(*counts)))
        for path, each in parts:
            found[path] = found.get(path, Cost()).then(each, times)
    return found


def total(parts: Iterable[Cost]) -> Cost:
    """One after the other."""
    return functools.reduce(Cost.then, parts, Cost())


def cost(graph: Graph) -> Cost:
    """The cost of a MIR program of static sizes."""
    return total(costs(graph).values())
