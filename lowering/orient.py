"""The orientation that Linear weights are stored in: a rewrite of HIR, and with it of the Layout."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value, everywhere, rewrite
from rlx_jax.ir.param import Program, Transposed


def orient(graph: Graph, layout: str, types: TypeCache) -> Graph:
    """linear(x, w) → linear(x, transpose(w)), contracting the other axis, where w is not stored as `layout` says.

    `layout` is `in_out` or `out_in`. A weight that anything but Linears reads (a tied embedding) stays as it is,
    so that it is stored once.
    """
    contract = 0 if layout == "in_out" else 1
    free = _read_by_linears_alone(graph)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, hir.Linear) or node.op.contract == contract:
            return None
        weight = b.nodes[inputs[1].node].op
        if not isinstance(weight, Param) or not free.issuperset(weight.programs):
            return None
        programs = tuple(transposed(p) for p in weight.programs)
        turned = b.leaf(Param(programs, type=programs[0].type))
        return b.add(replace(node.op, contract=contract), inputs[0], turned, *inputs[2:])

    return rewrite(graph, everywhere(fn), types, f"orient_{layout}")


def transposed(program: Program) -> Program:
    """`program` with its axes swapped; twice is once."""
    return program.of if isinstance(program, Transposed) else Transposed(program)


def _read_by_linears_alone(graph: Graph) -> set[Program]:
    """The programs that every node reads as the weight of a Linear."""
    read: dict[bool, set[Program]] = {True: set(), False: set()}
    for inner, node in graph.walk():
        for place, value in enumerate(node.inputs):
            op = inner.nodes[value.node].op
            if isinstance(op, Param):
                read[isinstance(node.op, hir.Linear) and place == 1].update(op.programs)
    return read[True] - read[False]
