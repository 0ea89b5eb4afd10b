"""What a program takes, counted on its ops: nothing is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.ir.graph import Graph, Mir
from rlx_jax.lowering.mir.dce import live


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


def cost(graph: Graph) -> Cost:
    """The cost of a MIR program of static sizes: of the nodes that something needs."""
    total = Cost()
    for node in (graph.nodes[number] for number in sorted(live(graph))):
        op, operands = node.op, [graph.type(v) for v in node.inputs]
        if isinstance(op, Mir):
            total = total.then(
                Cost(op.flops(operands, node.types), op.bytes(operands, node.types), op.workspace(operands, node.types))
            )
        for region in op.regions():
            total = total.then(cost(region), op.iterations())
    return total
