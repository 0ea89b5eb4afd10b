"""The orientation that Linear weights are stored in: a rewrite of HIR, and with it of the Layout."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.param import Program, Transposed
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.lowering.lir.layout import tied
from rlx_jax.lowering.mir.dce import dce


def orient(graph: Graph, layout: str, types: TypeCache) -> Graph:
    """linear(x, w) → linear(x, transpose(w)), contracting the other axis, where w is not stored as `layout` says.

    `layout` is `in_out` or `out_in`. A weight that anything but Linears of one orientation reads (a tied embedding)
    stays as it is, so that it is stored once, and with it all that layers share it with.
    """
    contract = 0 if layout == "in_out" else 1
    free = _to_turn(graph, contract)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, hir.Linear) or node.op.contract == contract:
            return None
        weight = b.nodes[inputs[1].node].op
        if not isinstance(weight, Param) or not free.issuperset(weight.programs):
            return None
        programs = tuple(transposed(p) for p in weight.programs)
        turned = b.leaf(Param(programs, type=programs[0].type))
        return b.add(replace(node.op, contract=contract), inputs[0], turned, *inputs[2:])

    return dce(rewrite(graph, everywhere(fn), types, f"orient_{layout}"), types)


def transposed(program: Program) -> Program:
    """`program` with its axes swapped; twice is once."""
    return program.of if isinstance(program, Transposed) else Transposed(program)


def _to_turn(graph: Graph, contract: int) -> set[Program]:
    """The programs that every node reads as the weight of a Linear which contracts another axis than `contract`."""
    fixed: set[Program] = set()
    for inner, node in graph.walk():
        for place, value in enumerate(node.inputs):
            op = inner.nodes[value.node].op
            turns = isinstance(node.op, hir.Linear) and place == 1 and node.op.contract != contract
            if isinstance(op, Param) and not turns:
                fixed.update(op.programs)
    return {program for group in tied(graph.params()) if fixed.isdisjoint(group) for program in group}
