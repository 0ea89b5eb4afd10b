"""Say where products with weights and looked-up rows are on a mesh. What stands between follows from them."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.attention import RopeTable
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.order import TopK
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.ops.shape import Shard
from rlx_jax.ir.param import Roles
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.roles import of_dims, of_program
from rlx_jax.lowering.division import Division


def divide(graph: Graph, division: Division, types: TypeCache) -> Graph:
    """x · w → shard(x · w), and so experts: rows of the batch, tokens, and what the other axis of w is; the width
    between blocks is whole, so that a sum over divided axes is made where it is."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(node.op, RopeTable):  # every device makes its own
            return b.add(node.op, *(b(Shard((None,) * b.type(v).rank), v) for v in inputs))
        if isinstance(node.op, TopK):  # of each row where it is: XLA would bring all rows together
            roles = list(of_dims(b.type(inputs[0])))
            roles[node.op.axis] = None
            return b.add(replace(node.op, roles=tuple(roles)), *inputs) if any(roles) else None
        if isinstance(node.op, ExpertFfn):  # each token is whole where its row is
            rows = of_dims(b.type(inputs[0]))[:-1]
            return (b(Shard((*rows, None)), b(replace(node.op, roles=rows), *inputs)),)
        weight = 0 if isinstance(node.op, Gather) else 1
        if not isinstance(node.op, MatMul | FusedMatMulBiasAct | Gather) or len(inputs) <= weight:
            return None
        param = _param(b, inputs[weight])
        if param is None:
            return None
        made = b(node.op, *inputs)
        *lead, _ = of_dims(b.type(made))
        return (b(Shard((*lead, _last(node, of_program(param.programs[0], division.roles)))), made),)

    return rewrite(graph, everywhere(fn), types, "divide")


def _last(node: Node, roles: Roles) -> str | None:
    """What the last axis of the result is."""
    role = roles[-1] if isinstance(node.op, Gather) else roles[1 - node.op.contract]  # type: ignore[attr-defined]
    return role if isinstance(role, str) and role != "hidden" else None


def _param(b: Builder, value: Value) -> Param | None:
    """The parameter that a value is, through casts."""
    node = b.nodes[value.node]
    while isinstance(node.op, CastTo):
        node = b.nodes[node.inputs[0].node]
    return node.op if isinstance(node.op, Param) else None


def undivided(graph: Graph, types: TypeCache) -> Graph:
    """shard(x) → x: one device has all of it."""
    if not any(isinstance(node.op, Shard) for _, node in graph.walk()):
        return graph

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return inputs if isinstance(node.op, Shard) else None

    return rewrite(graph, everywhere(fn), types, "undivided")
