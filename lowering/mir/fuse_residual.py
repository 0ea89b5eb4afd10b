"""A residual sum into the norm after it."""

from __future__ import annotations

from rlx_jax.ir.graph import Builder, Graph, Node, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedResidualLayerNorm, FusedResidualRmsNorm
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.lowering.mir.dce import read_once
from rlx_jax.lowering.places import Fused, Pattern, Place

ADD = Binary("add")


def fuse_residual_layer_norm(graph: Graph, types: TypeCache) -> Fused:
    """layer_norm(add(x, r), γ, β)         → fused_residual_ln(x, r, γ, β)          x and r have one shape
    layer_norm(add(add(x, b), r), γ, β) → fused_residual_bias_ln(x, r, b, γ, β)  b is [H]
    """
    return _fuse_residual(graph, LayerNormOp, types, Pattern("residual_ln", "fuse_residual_layer_norm"))


def fuse_residual_rms_norm(graph: Graph, types: TypeCache) -> Fused:
    """rms_norm(add(x, r), γ[, β])         → fused_residual_rms(x, r, γ[, β])
    rms_norm(add(add(x, b), r), γ[, β]) → fused_residual_bias_rms(x, r, b, γ[, β])
    """
    return _fuse_residual(graph, RmsNormOp, types, Pattern("residual_rms_norm", "fuse_residual_rms_norm"))


Norm = LayerNormOp | RmsNormOp


def _fused(norm: Norm, has_bias: bool) -> FusedResidualLayerNorm | FusedResidualRmsNorm:
    if isinstance(norm, RmsNormOp):
        return FusedResidualRmsNorm(norm.eps, has_bias, norm.offset)
    return FusedResidualLayerNorm(norm.eps, has_bias)


def _fuse_residual(graph: Graph, norm: type[Norm], types: TypeCache, pattern: Pattern) -> Fused:
    """A sum that is read again is none that could be taken in: the residual stream of a pre-norm layer is no miss."""
    places: list[Place] = []

    def enter(graph: Graph) -> Rewrite:
        once = read_once(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if not isinstance(node.op, norm) or node.inputs[0] not in once:
                return None
            if isinstance(node.op, LayerNormOp) and not (node.op.scaled and node.op.shifted):
                return None
            before, total = graph.nodes[node.inputs[0].node], b.nodes[inputs[0].node]
            if total.op != ADD or b.type(total.inputs[0]) != b.type(total.inputs[1]):
                return None
            places.append(pattern.fused(len(b.nodes), node))
            for x, residual in ((0, 1), (1, 0)):
                biased = _biased(b, total.inputs[x]) if before.inputs[x] in once else None
                if biased:
                    return b.add(_fused(node.op, True), biased[0], total.inputs[residual], biased[1], *inputs[1:])
            return b.add(_fused(node.op, False), *total.inputs, *inputs[1:])

        return fn

    return Fused(rewrite(graph, enter, types, pattern.by), tuple(places))


def _biased(b: Builder, value: Value) -> tuple[Value, Value] | None:
    """x and its bias [H], if `value` is their sum."""
    made = b.nodes[value.node]
    if made.op != ADD:
        return None
    for x, bias in (made.inputs, made.inputs[::-1]):
        if b.type(x) == b.type(value) and b.type(bias).shape == b.type(value).shape[-1:]:
            return x, bias
    return None
