"""How weights are stored: the orientation of matrices, the padding of the vocabulary, and projections taken apart."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.pointwise import CastTo, Unary
from rlx_jax.ir.ops.shape import Narrow, Shard
from rlx_jax.ir.param import Parts, Program, Role, Transposed, keys_of, padded, sliced
from rlx_jax.ir.rewrite import Rewrite, everywhere, rewrite
from rlx_jax.ir.roles import of_dims, of_program
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.lir.plan import tied
from rlx_jax.lowering.mir.small import dce


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
