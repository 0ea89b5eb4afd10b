"""A gate over the two halves of one value."""

from __future__ import annotations

from collections.abc import Sequence

from rlx_jax.ir.graph import Builder, Graph, Node, Rewrite, TypeCache, Value, rewrite
from rlx_jax.ir.ops.fused import FusedSwiGLU
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.shaping import Narrow, Slice
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.lowering.passes.dce import read_once

MUL = Binary("mul")
GATES = ("silu", "gelu", "gelu_tanh", "sigmoid", "relu")
"""SwiGLU, GeGLU (exact and tanh), GLU, ReGLU (Shazeer 2020)."""


def fuse_swiglu(graph: Graph, types: TypeCache) -> Graph:
    """mul(act(y[…, :F]), y[…, F:]) → fused_swiglu(y, gate_first=true)   y is […, 2F]
    mul(act(y[…, F:]), y[…, :F]) → fused_swiglu(y, gate_first=false)

    The factors may stand in either order. Where gate and up projections were merged, y is their one product.
    """

    def enter(graph: Graph) -> Rewrite:
        once = read_once(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if node.op != MUL or not once.issuperset(node.inputs):
                return None
            for gate, up in ((0, 1), (1, 0)):
                inner = graph.nodes[node.inputs[gate].node].inputs
                found = gated_halves(b, inputs[gate], inputs[up])
                if found and inner[0] in once:
                    return b.add(*found)
            return None

        return fn

    return rewrite(graph, enter, types, "fuse_swiglu")


def gated_halves(graph: Builder | Graph, gate: Value, up: Value) -> tuple[FusedSwiGLU, Value] | None:
    """The fused op and its operand, if `gate` is an activation of one half of a value and `up` is the other half."""
    act = graph.nodes[gate.node]
    if not isinstance(act.op, Unary) or act.op.kind not in GATES:
        return None
    low, high = graph.nodes[act.inputs[0].node], graph.nodes[up.node]
    if not isinstance(low.op, Narrow | Slice) or low.inputs != high.inputs:
        return None
    halves = (half_of(low, graph.type(low.inputs[0])), half_of(high, graph.type(low.inputs[0])))
    return (FusedSwiGLU(halves == (0, 1), act.op.kind), low.inputs[0]) if set(halves) == {0, 1} else None


def half_of(node: Node, whole: TensorType) -> int | None:
    """Which half of the last axis of `whole` a node takes: 0, 1, or None if it does something else."""
    size = whole.shape[-1] if whole.rank else 0
    if not is_static(size) or size % 2 or not size:
        return None
    match node.op:
        case Narrow(axis=axis, start=start, length=length) if axis % whole.rank == whole.rank - 1:
            start = start if start >= 0 else size + start
        case Slice(key=(*rest, (first, stop, step))) if _whole_axes(rest, whole.rank):
            start, end, stride = slice(first, stop, step).indices(size)
            length = end - start if stride == 1 else -1
        case _:
            return None
    return start // (size // 2) if length == size // 2 and start in (0, size // 2) else None


def _whole_axes(key: Sequence[object], rank: int) -> bool:
    """Whether these entries of a slice's key keep all axes but the last."""
    return list(key) == [Ellipsis] or (len(key) == rank - 1 and all(k in (Ellipsis, (None, None, None)) for k in key))
