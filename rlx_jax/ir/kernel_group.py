"""Fused ops around a matrix product, an attention or a recurrence, for kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.ir.graph import BodyInput, Constant, Graph, Mir, Node, Op, TypeCache, Value
from rlx_jax.ir.operands import ELEMENTWISE, zero
from rlx_jax.ir.ops.control import run_body
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.ir.types import TensorType


def op_name(op: Op) -> str:
    """Return the name of an op in dumps, without what it is made with."""
    return op.text().partition("(")[0]


class BodyOp:
    """Methods of a fused op: the inputs and outputs of its region `body` are its operands and results."""

    body: Graph

    def regions(self) -> tuple[Graph, ...]:
        return (self.body,)

    def with_regions(self: Any, regions: tuple[Graph, ...]) -> Any:
        return replace(self, body=regions[0])

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the types of the body's outputs."""
        return self.body.output_types

    def eval(self, *arrays: Array) -> tuple[Array, ...]:
        """Run the ops one after the other."""
        return run_body(self.body, arrays)

    def text(self: Any) -> str:
        return f"{self.name()}({', '.join(n.op.name() for n in self.body.nodes if isinstance(n.op, Mir))})"


@dataclass(frozen=True)
class KernelGroup(BodyOp, Mir):
    """A matrix product of up to 8 rows with a weight, fused with its prologue and its epilogue.

    Operands: the inputs of the prologue, the weight `[N, K]`, the inputs of the epilogue.

    Attributes:
        body: the fused ops. Its outputs are the result of the epilogue, then values of the prologue that other nodes
            read.
        num_rows: number of operands before the weight.
        limits: why the op before it is not part of it, and the op after it; "" for none.
    """

    traits = replace(ELEMENTWISE, numeric="compute", widens=False, bytes=zero, stored=False)  # the body's ops count

    body: Graph
    num_rows: int
    limits: tuple[str, str] = field(default=("", ""), compare=False)

    def reason(self) -> str:
        """Return what one kernel computes, and why not the op before it and the op after it."""
        names = ", ".join(op_name(n.op) for n in self.body.nodes if isinstance(n.op, Mir))
        return "; ".join([f"one kernel of {names}", *filter(None, self.limits)])

    @property
    def product(self) -> int:
        """Return the index of the product's node."""
        return next(i for i, node in enumerate(self.body.nodes) if isinstance(node.op, MatMul))


@dataclass(frozen=True)
class AttentionGroup(BodyOp, Mir):
    """Attention of one new token of each of up to 64 rows, fused with the ops on its heads and the cache updates.

    Operands: the cached keys and values, then the other inputs of the ops. Results: the context, and both caches.
    """

    traits = replace(KernelGroup.traits, writes=((1, 0), (2, 1)))

    body: Graph


@dataclass(frozen=True)
class HeadGroup(BodyOp, Mir):
    """The rotation of the heads of a prompt, fused with the ops on each head before it.

    Operands: an array `[B,S,M]` that has the heads, the weights of the ops, cos and sin.
    """

    traits = KernelGroup.traits

    body: Graph


@dataclass(frozen=True)
class ExpertGroup(BodyOp, Mir):
    """The experts of one token, fused with their selection and a residual sum.

    Operands: logits, x, gate, up, down, the residual if there is one.
    """

    traits = KernelGroup.traits

    body: Graph


@dataclass(frozen=True)
class DeltaGroup(BodyOp, Mir):
    """The gated delta rule of a prompt, fused with what computes q, k and v: silu of a convolution, and two norms.

    Operands: an array `[B,S,M]` whose first columns are those before the convolution of all heads of q, of k and of v;
    its weights `[C,J]`; g and beta `[B,S,H]`. Results: of the rule.

    Attributes:
        body: the fused ops.
        rule: the rule.
        key_heads, keys, values: heads of q and k, the width of each, and of a head of v.
        unit: what is added to the sum of squares of a query or key before its root.
    """

    traits = KernelGroup.traits

    body: Graph
    rule: GatedDeltaOp
    key_heads: int
    keys: int
    values: int
    unit: float


def body_inputs(body: Graph) -> list[Value]:
    """Return the values of the operands in a body, in order."""
    indices = {node.op.index: Value(i) for i, node in enumerate(body.nodes) if isinstance(node.op, BodyInput)}
    return [indices[i] for i in sorted(indices)]


def run_nodes(nodes: tuple[Node, ...], values: dict[Value, Array], start: int = 0) -> None:
    """Run the ops among `nodes`, numbered from `start`, whose results are not in `values` yet, and add the results."""
    for number, node in enumerate(nodes, start):
        if isinstance(node.op, Constant):
            values[Value(number)] = jnp.asarray(node.op.array)
        elif isinstance(node.op, Mir) and Value(number) not in values:
            results = node.op.eval(*(values[v] for v in node.inputs))
            results = results if isinstance(results, tuple) else (results,)
            values.update({Value(number, i): result for i, result in enumerate(results)})
