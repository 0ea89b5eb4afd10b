"""How an op runs where its `eval` is not the fastest way: the name of an implementation, and why it was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.ir.graph import Graph, Mir, Node
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, RingStep
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.types import TensorType

PRODUCTS = (MatMul, FusedMatMulBiasAct)
RECURRENCES = (GatedDeltaOp, SelectiveScanOp)
CACHE_WRITES = (CacheUpdate, RingStep)
CHOSEN = (AttentionOp, ExpertFfn, *PRODUCTS, *RECURRENCES, *CACHE_WRITES)
"""The ops that may have a choice."""


@dataclass(frozen=True)
class Choice:
    """An implementation by its name in `IMPLEMENTATIONS`; `xla` is the op's own `eval`."""

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation} ({self.reason})"


XLA = Choice("xla", "as any other")
"""What is not chosen for a node of its own."""

Call = tuple[Mir, tuple[TensorType, ...]]
"""A node as the choice sees it: the op and the types of its operands."""


def call_of(graph: Graph, node: Node) -> Call:
    """The key of a node's choice."""
    assert isinstance(node.op, Mir)
    return node.op, tuple(graph.type(v) for v in node.inputs)
