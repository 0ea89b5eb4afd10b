"""Take projections apart that a checkpoint stores as one, where a mesh divides them: q, k and v of a block with a
state; gate, values and steps. As one axis they have no equal parts for devices; each alone has.

The cut goes up through what treats every column alone, to the product: the convolution behind it becomes one for each
part, with a state of its own.
"""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.pointwise import CastTo, Unary
from rlx_jax.ir.ops.shape import Shard
from rlx_jax.ir.param import Parts, Program, Role, sliced
from rlx_jax.ir.param_keys import keys_of
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.roles import of_dims, of_program
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.mir.dce import dce


def unpack(graph: Graph, division: Division, types: TypeCache) -> Graph:
    """split(linear(x, w)) → linear(x, w₀), linear(x, w₁) … where the parts of w are divided over devices.

    A graph in which something else reads such a product stays as it is: a weight would be stored twice.
    """

    def enter(inner: Graph) -> Rewrite:
        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if not isinstance(node.op, hir.Split) or node.op.shards != 1:
                return None
            made: list[Value] = []
            at = 0
            for place, size in enumerate(node.op.sizes):
                found = columns(b, inputs[0], at, at + size, place, division)
                if found is None:
                    return None
                part, role = found
                # Said, as XLA would divide what is whole, and bring it together for the state.
                lead = of_dims(b.type(part))[:-1]
                made.append(b(Shard((*lead, role)), part) if role is None or isinstance(role, str) else part)
                at += size
            return tuple(made)

        return fn

    done = dce(rewrite(graph, enter, types, "unpack"), types)
    whole = {key for program in _read(done) if is_packed(program, division) for key in keys_of(program)}
    cut = {key for program in _read(done) if not is_packed(program, division) for key in keys_of(program)}
    return graph if whole & cut else done


def columns(
    b: Builder, value: Value, start: int, stop: int, place: int, division: Division
) -> tuple[Value, Role] | None:
    """Columns `start` to `stop` of a value, part `place` of it, computed alone, and what they are; None where they are
    no part of a packed product that is divided."""
    node = b.nodes[value.node]
    if isinstance(node.op, Shard):
        return columns(b, node.inputs[0], start, stop, place, division)
    if isinstance(node.op, Unary | CastTo):
        found = columns(b, node.inputs[0], start, stop, place, division)
        if found is None:
            return None
        with b.at(node.origin):
            return b(node.op, found[0]), found[1]
    if not isinstance(node.op, hir.Linear | hir.CausalConv):
        return None
    params = [op for v in node.inputs[1:] if isinstance(op := b.nodes[v.node].op, Param)]
    if len(params) < len(node.inputs) - 1 or not all(is_packed(p.programs[0], division) for p in params):
        return None
    across = 1 - node.op.contract if isinstance(node.op, hir.Linear) else 0
    parts = [_part(p, 0 if number else across, start, stop) for number, p in enumerate(params)]
    role = of_program(parts[0].programs[0], division.roles)[across]
    if isinstance(node.op, hir.Linear):
        with b.at(node.origin):
            return b(node.op, node.inputs[0], *map(b.leaf, parts)), role
    found = columns(b, node.inputs[0], start, stop, place, division)
    if found is None or not (role is None or isinstance(role, str)):
        return None
    with b.at(replace(node.origin, path=(*node.origin.path, place))):  # a state of its own
        return b(replace(node.op, role=role), found[0], *map(b.leaf, parts)), role


def is_packed(program: Program, division: Division) -> bool:
    """Whether an axis of a parameter is several parts, of which devices divide one."""
    axes = (role for role in of_program(program, division.roles) if isinstance(role, Parts))
    return any(division.parts(role) > 1 for axis in axes for _, role in axis.of)


def _part(param: Param, axis: int, start: int, stop: int) -> Param:
    programs = tuple(sliced(program, axis, start, stop) for program in param.programs)
    return Param(programs, type=programs[0].type)


def _read(graph: Graph) -> list[Program]:
    return [program for _, node in graph.walk() if isinstance(node.op, Param) for program in node.op.programs]
