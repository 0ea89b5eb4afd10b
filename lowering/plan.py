"""The plan: how a MIR program runs on one target. Together they are the LIR.

Nothing at run time depends on offsets: XLA allocates. `buffers.py` computes liveness for reports and proofs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlx_jax.ir.graph import Graph, StateRead
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.attention import attentions
from rlx_jax.lowering.choices import Call, Choice
from rlx_jax.lowering.passes.dce import live

StateKey = tuple[str, str]


@dataclass(frozen=True)
class Plan:
    """Choices for one program: `scan` the layers or unroll them, donate the state and some inputs, what a gradient
    recomputes of each layer (`remat`: none, layer or dots), the `implementation` of attention that was asked for, how
    attentions and products run (`choices`), options for XLA."""

    target: str
    scan: bool
    donate_state: bool
    donate_inputs: tuple[str, ...] = ()
    remat: str = "none"
    implementation: str = "auto"
    choices: Mapping[Call, Choice] = field(default_factory=dict)
    compiler_options: Mapping[str, str | bool | int | float] = field(default_factory=dict)

    def text(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in sorted(self.compiler_options.items())) or "none"
        return (
            f"plan: target={self.target}, layers={'scan' if self.scan else 'unroll'}, remat={self.remat}, "
            f"donate_state={str(self.donate_state).lower()}, donate_inputs=[{', '.join(self.donate_inputs)}], "
            f"compiler_options={options}"
        )


@dataclass(frozen=True)
class Lir:
    """A specialised MIR program with its plan."""

    graph: Graph
    plan: Plan

    def attention(self) -> tuple[str, ...]:
        """One line for each attention: its block path, the implementation and the reason."""
        choices = self.plan.choices
        return tuple(f"{path}: {choices[call]}" for path, call in attentions(self.graph).items() if call in choices)


def state_types(graph: Graph, stacked: bool) -> dict[StateKey, TensorType]:
    """The arrays of the state: one for each layer, or one for all layers of a scanned region."""
    found: dict[StateKey, TensorType] = {}

    def visit(graph: Graph, iterations: int) -> None:
        for node in graph.nodes:
            for region in node.op.regions():
                visit(region, node.op.iterations())
            if not isinstance(node.op, StateRead):
                continue
            leaf, t = node.op.leaf, node.op.type
            if leaf.key(0) == leaf.key(1):
                found[leaf.key(None)] = t
            elif stacked:
                found[leaf.key(None)] = TensorType((iterations, *t.shape), t.dtype)
            else:
                found.update({leaf.key(i): t for i in range(iterations)})

    visit(graph, 1)
    return found


def flops(graph: Graph) -> int:
    """Multiply-adds × 2 of all contractions that something needs, layers as often as they run (XLA counts a scan
    body once)."""
    total = 0
    for node in (graph.nodes[number] for number in live(graph)):
        operands = [graph.type(v) for v in node.inputs]
        if hasattr(node.op, "flops"):
            total += node.op.flops(operands, node.types)
        total += node.op.iterations() * sum(flops(region) for region in node.op.regions())
    return total
