"""Lower HIR to MIR: expand composites into blocks, then lower each block by a `direct` rule or its own expansion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Hir, Mir, Node, Op, TypeCache, Value, as_values
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.reduce import RmsNormOp
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.queries import is_builtin
from rlx_jax.ir.region import everywhere, rewrite
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.plugins import direct_rule

LowerRule = Callable[[Any, Builder, tuple[Value, ...]], tuple[Value, ...] | None]


def expand_composites(graph: Graph, types: TypeCache) -> Graph:
    """Replace composites such as `LlamaDecoderBlock` by the HIR blocks of their expansion."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, Hir) or not node.op.traits.composite:
            return None
        with b.origin_scope(labelled_origin(node)):
            return as_values(node.op.expand(b, *inputs))

    return rewrite(graph, everywhere(fn), types, "expand")


def labelled_origin(node: Node) -> Origin:
    """Return the origin of the nodes that replace a block: its path, and its label or else the name of its op."""
    return replace(node.origin, label=node.origin.label or node.op.name())


def lower(graph: Graph, policy: str, types: TypeCache) -> Graph:
    """Lower HIR to MIR.

    Args:
        graph: the HIR graph without composites.
        policy: `direct` uses a rule of `DIRECT` or of a plugin if one applies, and the expansion otherwise; `fusable`
            always uses the expansion.
        types: the cache of inferred types.
    """

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, Hir):
            return None
        with b.origin_scope(labelled_origin(node)):
            return _lower(node.op, b, inputs, policy)

    return rewrite(graph, everywhere(fn), types, f"lower_{policy}")


def _lower(op: Hir, b: Builder, inputs: tuple[Value, ...], policy: str) -> tuple[Value, ...]:
    """Add the MIR of one block to the builder and return its results."""
    rule = DIRECT.get(type(op)) if policy == "direct" else None
    if policy == "direct" and not is_builtin(type(op)):
        rule = direct_rule(type(op))
    results = rule(op, b, inputs) if rule else None
    if results is not None:
        return results
    start = len(b.nodes)
    out = as_values(op.expand(b, *inputs))
    if not any(isinstance(n.op, Hir) for n in b.nodes[start:]):
        return out
    return _lower_expansion(b, start, out, policy)


def _lower_expansion(b: Builder, start: int, out: tuple[Value, ...], policy: str) -> tuple[Value, ...]:
    """Lower the HIR blocks that an expansion wrote: remove its nodes from the builder and lower them one by one."""
    tail, b.nodes[start:] = b.nodes[start:], []
    mapped: dict[Value, Value] = {}
    for number, node in enumerate(tail, start):
        inputs = tuple(mapped.get(v, v) for v in node.inputs)
        with b.origin_scope(node.origin):
            new = _lower(node.op, b, inputs, policy) if isinstance(node.op, Hir) else b.add(node.op, *inputs)
        mapped.update({Value(number, i): v for i, v in enumerate(new)})
    return tuple(mapped.get(v, v) for v in out)


# -- direct rules: each must compute the same as `expand` --------------------------------------


def linear(op: hir.Linear, b: Builder, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Lower linear(x, w, b) → fused_mm_bias_act(x, w, b); None without a bias."""
    fused = FusedMatMulBiasAct(op.contract, op.activation, f32_result=op.f32_result)
    return b.add(fused, *inputs) if op.bias else None


def attention(op: hir.Attention, b: Builder, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Lower attention(q, k, v) → the grouped op, without repeating key and value heads."""
    return (op.expand_repeated(b, 1, *inputs),)


def rms_norm(op: hir.RmsNorm, b: Builder, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Lower rms_norm(x, γ, zeros) → rms_norm(x, γ); None if the bias is not all zeros."""
    if len(inputs) == 3:
        beta = b.nodes[inputs[2].node].op
        if isinstance(beta, Constant) and not np.any(beta.array):
            return b.add(RmsNormOp(op.eps, op.offset), *inputs[:2])
    return None


# Faster lowerings than `expand`, by block. Plugins register more for their own blocks.
DIRECT: dict[type[Hir], LowerRule] = {
    hir.Linear: linear,
    hir.Attention: attention,
    hir.CachedAttention: lambda op, b, inputs: op.expand_repeated(b, 1, *inputs),
    hir.RmsNorm: rms_norm,
    # One op, so that an implementation may compute only the experts that the router chose.
    hir.Experts: lambda op, b, inputs: b.add(
        ExpertFfn(op.activation, op.contract, biased=op.biased, clamp=op.clamp), *inputs
    ),
}


# -- an op as a plain function -----------------------------------------------------------------


def as_graph(op: Op, operands: tuple[TensorType, ...], types: TypeCache) -> Graph:
    """Return the computation of one op as a graph of tensor ops, with the operands as body inputs."""
    b = Builder("function", types)
    inputs = tuple(b.leaf(BodyInput(i, type=t)) for i, t in enumerate(operands))
    out = _lower(op, b, inputs, "fusable") if isinstance(op, Hir) else b.add(op, *inputs)
    return b.finish(out)


def as_function(op: Op, operands: tuple[TensorType, ...], types: TypeCache) -> Callable[..., Any]:
    """Return the computation of one op as a JAX function of its operands."""
    if isinstance(op, Mir):
        return op.eval
    graph = as_graph(op, operands, types)
    return lambda *arrays: interpret(graph, Env({}, {}, {}, operands=arrays))
