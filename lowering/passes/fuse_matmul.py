"""Bias and activation into the product before them."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir.graph import Builder, Graph, Node, Rewrite, TypeCache, Value, rewrite
from rlx_jax.ir.ops.contract import MatMul
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.lowering.passes.dce import read_once


def fuse_matmul_bias_act(graph: Graph, types: TypeCache) -> Graph:
    """add(matmul(x, w), b)          → fused_mm_bias(x, w, b)      b is [N], on either side
    act(fused_mm_bias(x, w, b))   → fused_mm_bias_act(x, w, b)  any function of one value
    """

    def enter(graph: Graph) -> Rewrite:
        once = read_once(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Unary) and node.inputs[0] in once:
                return _with_activation(b, node.op.kind, inputs[0])
            if node.op == Binary("add"):
                for product, bias in ((0, 1), (1, 0)):
                    if node.inputs[product] in once and (done := _with_bias(b, inputs[product], inputs[bias])):
                        return done
            return None

        return fn

    return rewrite(graph, enter, types, "fuse_matmul_bias_act")


def _with_bias(b: Builder, product: Value, bias: Value) -> tuple[Value, ...] | None:
    made = b.nodes[product.node]
    if not isinstance(made.op, MatMul) or b.type(bias).shape != b.type(product).shape[-1:]:
        return None
    op = FusedMatMulBiasAct(made.op.contract, "", made.op.precision, made.op.f32_result)
    with b.at(made.origin):
        return b.add(op, *made.inputs, bias)


def _with_activation(b: Builder, kind: str, value: Value) -> tuple[Value, ...] | None:
    made = b.nodes[value.node]
    if not isinstance(made.op, FusedMatMulBiasAct) or made.op.activation:
        return None
    with b.at(made.origin):
        return b.add(replace(made.op, activation=kind), *made.inputs)
