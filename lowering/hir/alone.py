"""Whether a node treats tokens, or rows of the batch, alone: by the proof of `tokenwise`, or by slices."""

from __future__ import annotations

from collections.abc import Callable

from rlx_jax.ir.graph import Graph, Leaf, Node, Op, TypeCache
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.hir.slices import differing, dims_of, tried, try_together
from rlx_jax.lowering.hir.tokenwise import Verdict, token_wise
from rlx_jax.lowering.lower import as_function


def why_not_alone(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> str:
    """Why a node may not treat every entry along `dim` alone; empty if it does. Found out once for all programs."""
    verdict = types.ask(prove, node.op, operands, dim)
    if not (verdict.token_wise or node.origin.token_wise):
        return verdict.reason
    return types.ask(differing, node.op, operands).get(dim, "") if asks_slices(types, node, operands, dim) else ""


def why_rows_mix(graph: Graph, types: TypeCache) -> str:
    """Which stage may mix rows of the batch, and why; empty if every one is proved to treat them alone."""
    for inner, node in graph.walk():
        operands = tuple(inner.type(v) for v in node.inputs)
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        if any("batch" in t.symbols for t in (*operands, *node.types)):
            if reason := why_not_alone(types, node, operands, "batch"):
                return f"{path_text(node.origin.path)}: {node.op.text()} is not proved to treat rows alone: {reason}"
    return ""


def prove(types: TypeCache, op: Op, operands: tuple[TensorType, ...], dim: str) -> Verdict:
    """The verdict on one op."""
    return token_wise(as_function(op, operands, types), [t.spec for t in operands], dim)


def asks_slices(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> bool:
    """Whether slices along `dim` have a say: for a claim that is not proved, and for a closure, which may branch on a
    size of 1, which a symbol hides from the proof."""
    proved = types.ask(prove, node.op, operands, dim).token_wise
    return isinstance(node.op, JaxFn) if proved else node.origin.token_wise


def try_slices(graph: Graph, types: TypeCache, ruled: Callable[[Op], object]) -> None:
    """Try together all nodes of a graph that slices will be asked of: those without a rule."""

    def wanted(node: Node, operands: tuple[TensorType, ...]) -> bool:
        if isinstance(node.op, Leaf) or node.op.regions() or ruled(node.op):
            return False
        return any(asks_slices(types, node, operands, dim) for dim in dims_of(operands))

    try_together(graph, types, differing, tried, wanted)
