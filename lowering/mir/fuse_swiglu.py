"""A gate over the two halves of one value."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx_jax.ir.graph import Builder, Graph, Node, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct, FusedSwiGLU
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.shape import Narrow, Slice, SplitLast
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.lowering.mir.dce import live, read_once
from rlx_jax.lowering.places import Fused, Pattern, Place

MUL = Binary("mul")
GATES = ("silu", "gelu", "gelu_tanh", "sigmoid", "relu")
"""SwiGLU, GeGLU (exact and tanh), GLU, ReGLU (Shazeer 2020)."""


PATTERN = Pattern(
    "swiglu",
    "fuse_swiglu",
    (
        ("MultiConsumer", "use each half and the gate once"),
        (
            "SwigluNotMerged",
            "make gate and up a Linear without activation, both with a bias or both without",
        ),
    ),
)


def fuse_swiglu(graph: Graph, types: TypeCache, merged: bool = False) -> Fused:
    """mul(act(y[…, :F]), y[…, F:]) → fused_swiglu(y, gate_first=true)   y is […, 2F]
    mul(act(y[…, F:]), y[…, :F]) → fused_swiglu(y, gate_first=false)

    The factors may stand in either order. Where gate and up projections were merged, y is their one product.
    Missed: halves that something else reads too; where products of one value are `merged`, gate and up that were not.
    """
    places: dict[Place, None] = {}

    def enter(graph: Graph) -> Rewrite:
        once, needed = read_once(graph), live(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if node.op != MUL:
                return None
            for gate, up in ((0, 1), (1, 0)):
                found = gated_halves(b, inputs[gate], inputs[up])
                inner = graph.nodes[node.inputs[gate].node].inputs
                if found and once.issuperset(node.inputs) and inner[0] in once:
                    places[PATTERN.fused(len(b.nodes), node)] = None
                    return b.add(*found)
                if number in needed and (reason := _missed(b, inputs[gate], inputs[up], merged)):
                    places[PATTERN.missed(len(b.nodes), node, reason)] = None
            return None

        return fn

    return Fused(rewrite(graph, enter, types, PATTERN.by), tuple(places))


def _missed(b: Builder, gate: Value, up: Value, merged: bool) -> str:
    """Why the product of these two is not fused, if it is a gate over halves or over two products of one value."""
    if gated_halves(b, gate, up):
        return "MultiConsumer"
    same = merged and _same_input(_gate_product(b, gate), _product(b.nodes[up.node]))
    return "SwigluNotMerged" if same else ""


def _product(node: Node, activation: Collection[str] = ("",)) -> Node | None:
    """A product, with its bias perhaps."""
    fused = isinstance(node.op, FusedMatMulBiasAct) and node.op.activation in activation
    return node if fused or isinstance(node.op, MatMul) else None


def _gate_product(b: Builder, gate: Value) -> Node | None:
    """The product of which `gate` is the activation."""
    node = b.nodes[gate.node]
    if isinstance(node.op, Unary) and node.op.kind in GATES:
        return _product(b.nodes[node.inputs[0].node])
    return node if isinstance(node.op, FusedMatMulBiasAct) and node.op.activation in GATES else None


def _same_input(a: Node | None, b: Node | None) -> bool:
    return a is not None and b is not None and a.inputs[0] == b.inputs[0]


def gated_halves(graph: Builder, gate: Value, up: Value) -> tuple[FusedSwiGLU, Value] | None:
    """The fused op and its operand, if `gate` is an activation of one half of a value and `up` is the other half."""
    act = graph.nodes[gate.node]
    if not isinstance(act.op, Unary) or act.op.kind not in GATES:
        return None
    low, high = graph.nodes[act.inputs[0].node], graph.nodes[up.node]
    if not isinstance(low.op, Narrow | Slice | SplitLast) or low.inputs != high.inputs:
        return None
    whole = graph.type(low.inputs[0])
    halves = (half_of(low, whole, act.inputs[0].index), half_of(high, whole, up.index))
    return (FusedSwiGLU(halves == (0, 1), act.op.kind), low.inputs[0]) if set(halves) == {0, 1} else None


def half_of(node: Node, whole: TensorType, index: int) -> int | None:
    """Which half of the last axis of `whole` result `index` of a node is: 0, 1, or None if it is something else."""
    size = whole.shape[-1] if whole.rank else 0
    if not is_static(size) or size % 2 or not size:
        return None
    match node.op:
        case Narrow(axis=axis, start=start, length=length) if axis % whole.rank == whole.rank - 1:
            start = start if start >= 0 else size + start
        case Slice(key=(*rest, (first, stop, step))) if _whole_axes(rest, whole.rank):
            start, end, stride = slice(first, stop, step).indices(size)
            length = end - start if stride == 1 else -1
        case SplitLast(sizes=sizes):
            start, length = sum(sizes[:index]), sizes[index]
        case _:
            return None
    return start // (size // 2) if length == size // 2 and start in (0, size // 2) else None


def _whole_axes(key: Sequence[object], rank: int) -> bool:
    """Whether these entries of a slice's key keep all axes but the last."""
    return list(key) == [Ellipsis] or (len(key) == rank - 1 and all(k in (Ellipsis, (None, None, None)) for k in key))
