"""Bias and activation into the product before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlx_jax.ir.graph import Builder, Constant, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.types import is_static
from rlx_jax.lowering.mir.dce import live, read_once
from rlx_jax.lowering.places import Fused, Pattern, Place

PATTERN = Pattern(
    "matmul_bias_act",
    "fuse_matmul_bias_act",
    (
        ("MultiConsumer", "use the product once: what else reads it can read the biased value"),
        ("BiasRankTooHigh", "store the bias as [N]"),
    ),
)


def fuse_matmul_bias_act(graph: Graph, types: TypeCache) -> Fused:
    """add(matmul(x, w), b)          → fused_mm_bias(x, w, b)      b is [N], on either side
    act(fused_mm_bias(x, w, b))   → fused_mm_bias_act(x, w, b)  any function of one value

    Missed: a bias of a product that something else reads too, or a bias `[1, N]`.
    """
    places: dict[Place, None] = {}

    def enter(graph: Graph) -> Rewrite:
        once, needed = read_once(graph), live(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Unary) and node.inputs[0] in once:
                return _with_activation(b, node.op.kind, inputs[0])
            if node.op == Binary("add"):
                for product, bias in ((0, 1), (1, 0)):
                    if node.inputs[product] in once and (done := _with_bias(b, inputs[product], inputs[bias])):
                        places[PATTERN.fused(done[0].node, b.nodes[done[0].node])] = None
                        return done
                if number in needed:
                    places.update(dict.fromkeys(_missed(b, inputs)))
            return None

        return fn

    return Fused(rewrite(graph, enter, types, PATTERN.by), tuple(places))


def _missed(b: Builder, operands: tuple[Value, ...]) -> Iterator[Place]:
    """A bias is added to a product, which stays one of its own."""
    for product, bias in (operands, operands[::-1]):
        made = b.nodes[product.node]
        if not isinstance(made.op, MatMul):
            continue
        width, shape = b.type(product).shape[-1:], b.type(bias).shape
        if shape == width:
            yield PATTERN.missed(product.node, made, "MultiConsumer")
        elif _is_row(shape, width) and isinstance(b.nodes[bias.node].op, Param | Constant):
            yield PATTERN.missed(product.node, made, "BiasRankTooHigh", f"{{{len(shape)}}}")


def _is_row(shape: tuple[object, ...], width: tuple[object, ...]) -> bool:
    return shape[-1:] == width and all(is_static(d) and d == 1 for d in shape[:-1])


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
