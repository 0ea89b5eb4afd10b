"""Pad the vocabulary to what a mesh divides. Nothing beside the stored leaf has the padding."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.shape import Narrow, Shard
from rlx_jax.ir.param import Program, padded
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.roles import of_dims, of_program
from rlx_jax.lowering.division import Division

PADDED = ("vocab", "embedding")
"""The roles of axes that are padded. Heads and columns of a feed-forward block are not: they are refused."""


def pad_vocabulary(graph: Graph, division: Division, types: TypeCache) -> Graph:
    """linear(x, w) → narrow(linear(x, w ‖ 0)) where the devices do not divide the rows of w; a table that ids look up
    is padded alone, as no id reads behind its end."""

    def wanted(program: Program) -> tuple[int, int] | None:
        """The axis to pad, and its new size."""
        for axis, role in enumerate(of_program(program, division.roles)):
            size, parts = int(program.type.shape[axis]), division.weight_parts(program, axis)
            if role in PADDED and size % parts:
                return axis, -(-size // parts) * parts
        return None

    def with_padding(b: Builder, param: Param) -> Value:
        programs = []
        for program in param.programs:
            found = wanted(program)
            programs.append(program if found is None else padded(program, *found))
        return b.leaf(Param(tuple(programs), type=programs[0].type))

    def enter(inner: Graph) -> Rewrite:
        def param(value: Value) -> Param | None:
            op = inner.nodes[value.node].op
            return op if isinstance(op, Param) and wanted(op.programs[0]) is not None else None

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Param) and (found := wanted(node.op.programs[0])) is not None:
                axis, _ = found
                return (b(Narrow(axis, 0, int(node.op.type.shape[axis])), with_padding(b, node.op)),)
            weights = [param(v) for v in node.inputs]
            if isinstance(node.op, hir.Embed) and weights[0] is not None:
                return (b(node.op, with_padding(b, weights[0]), *inputs[1:]),)
            if isinstance(node.op, hir.Linear) and all(w is not None for w in weights[1:]):
                product = b(replace(node.op), inputs[0], *(with_padding(b, w) for w in weights[1:] if w is not None))
                (made,) = node.types
                whole = b(Shard((*of_dims(made)[:-1], None)), product)
                return (b(Narrow(made.rank - 1, 0, int(made.shape[-1])), whole),)
            return None

        return fn

    return rewrite(graph, enter, types, "pad_vocabulary")
