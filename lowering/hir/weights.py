"""How weights are stored: merged Linears, oriented matrices, a padded vocabulary, projections taken apart.

Linears that read the same value become one: q, k, v; gate, up. Then the rotations of what came of one: q, k. One large
kernel costs less than several small ones. Rotations are merged where tokens come one by one; over a prompt, cutting the
result apart again costs more.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Op, Param, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import CastTo, Unary
from rlx_jax.ir.ops.shape import Narrow, Shard
from rlx_jax.ir.param import Parts, Program, Role, Transposed, concat, keys_of, padded, sliced
from rlx_jax.ir.rewrite import Rewrite, everywhere, rewrite
from rlx_jax.ir.roles import of_dims, of_program
from rlx_jax.lowering.fusion import Fused, Place
from rlx_jax.lowering.lir.plan import tied
from rlx_jax.lowering.mir.small import dce, live
from rlx_jax.lowering.sharding import Division


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
        turned = b.leaf(param_of(map(transposed, weight.programs)))
        return b.add(replace(node.op, contract=contract), inputs[0], turned, *inputs[2:])

    return dce(rewrite(graph, everywhere(fn), types, f"orient_{layout}"), types)


def param_of(programs: Iterable[Program]) -> Param:
    """The parameter that has one of these programs in each layer."""
    first, *others = programs
    return Param((first, *others), type=first.type)


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


# The roles of axes that are padded. Heads and columns of a feed-forward block are not: they are refused.
PADDED = ("vocab", "embedding")


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
        return b.leaf(param_of(padded(p, *found) if (found := wanted(p)) else p for p in param.programs))

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
    if isinstance(node.op, Shard | Unary | CastTo):
        found = columns(b, node.inputs[0], start, stop, place, division)
        if found is None or isinstance(node.op, Shard):
            return found
        with b.at(node.origin):
            return b(node.op, found[0]), found[1]
    if not isinstance(node.op, hir.Linear | hir.CausalConv):
        return None
    params = [op for v in node.inputs[1:] if isinstance(op := b.nodes[v.node].op, Param)]
    if len(params) < len(node.inputs) - 1 or not all(is_packed(p.programs[0], division) for p in params):
        return None
    across = 1 - node.op.contract if isinstance(node.op, hir.Linear) else 0
    axes = [across, *[0] * (len(params) - 1)]
    cuts = ((sliced(p, axis, start, stop) for p in param.programs) for param, axis in zip(params, axes, strict=True))
    parts = [param_of(programs) for programs in cuts]
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


def _read(graph: Graph) -> list[Program]:
    return [program for _, node in graph.walk() if isinstance(node.op, Param) for program in node.op.programs]


# The groups of nodes of a graph that are computed together, by number.
FindGroups = Callable[[Graph], list[list[int]]]
# From the numbers of a group's nodes and the inputs of the first: one value for each node.
Make = Callable[[Builder, Graph, list[int], tuple[Value, ...]], tuple[Value, ...]]


ADVICE = "a Linear with the same bias, orientation and no activation"


def merge_linears(graph: Graph, types: TypeCache, division: Division | None = None) -> Fused:
    """linear(x, w₁), linear(x, w₂) → split(linear(x, [w₁ ‖ w₂])).

    Only where biases agree and each weight is used nowhere else in the program: in one place of the layers, beside the
    same weights in each that shares it. So it has a place in one merged leaf, and no copy in another.
    Over a mesh the merged weight has for each device its part of w₁ beside its part of w₂, so that the cut is local;
    those that are divided into different numbers of parts stay apart, and so do those of key heads that every device
    has whole: it cuts what it needs of them.

    Missed: products of one value whose weights nothing else reads, and that could not be one.
    """
    uses = _uses(graph)
    find = functools.partial(_groups, uses, division)
    done = _at_once(graph, types, "merge_linears", find, functools.partial(_merge, division))
    places = _merged(done, hir.Linear, "shared_input_matmul", "merge_linears")
    return Fused(done, (*places, *_missed(done, _uses(done))))


def _uses(graph: Graph) -> Counter[Program]:
    """In how many places each parameter is read."""
    reads = [g.nodes[v.node].op for g, n in graph.walk() for v in n.inputs]
    return Counter(program for op in reads if isinstance(op, Param) for program in set(op.programs))


def _alone(op: Op, uses: Counter[Program]) -> bool:
    """Whether a weight is a parameter that is read in one place."""
    return isinstance(op, Param) and all(uses[program] == 1 for program in op.programs)


def _missed(graph: Graph, uses: Counter[Program]) -> Iterator[Place]:
    """The first of the products of each value that stayed apart."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number in sorted(live(graph)):
        node = graph.nodes[number]
        for region in node.op.regions():
            yield from _missed(region, uses)
        if isinstance(node.op, hir.Linear | MatMul | FusedMatMulBiasAct):
            if all(_alone(graph.nodes[v.node].op, uses) for v in node.inputs[1:]):
                groups[node.inputs[0], node.op.f32_result].append(number)
    for first, *others in groups.values():
        place = functools.partial(Place.of, "shared_input_matmul", "merge_linears", first, graph.nodes[first])
        if len(others) == 1:
            yield place(reason="NotFused", hint=f"make both {ADVICE}")
        elif others:
            yield place(reason="SharedMatmulCount", detail=f"{{{1 + len(others)}}}", hint=f"make all {ADVICE}")


def _groups(uses: Counter[Program], division: Division | None, graph: Graph) -> list[list[int]]:
    """Node numbers of Linears that can become one, in order."""
    found: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if not isinstance(node.op, hir.Linear) or node.op.activation or node.op.f32_result:
            continue
        operands = [graph.nodes[v.node].op for v in node.inputs[1:]]
        if all(_alone(op, uses) for op in operands):
            iterations = tuple(len(op.programs) for op in operands if isinstance(op, Param))
            weight = operands[0]
            assert isinstance(weight, Param)
            over = tuple(_parts(division, weight.programs[0], axis) for axis in (0, 1))
            if any(int(size) % n for size, n in zip(weight.type.shape, over, strict=True)):
                continue  # refused by name once the layout is known
            if division is not None and division.repeats(weight.programs[0], 1 - node.op.contract):
                continue
            found[(node.inputs[0], node.op, iterations, over)].append(number)
    return [group for group in found.values() if len(group) > 1 and _one_place_each(graph, group)]


def _one_place_each(graph: Graph, group: list[int]) -> bool:
    """Whether each weight stands beside the same others in all layers that share it."""
    for place in range(1, len(graph.nodes[group[0]].inputs)):
        merged = set(zip(*(_param(graph, graph.nodes[n].inputs[place]).programs for n in group), strict=True))
        if len({program for programs in merged for program in programs}) < len(group) * len(merged):
            return False
    return True


def _parts(division: Division | None, program: Program, axis: int) -> int:
    """Into how many pieces a parameter is cut along an axis where it is multiplied."""
    return 1 if division is None else division.weight_parts(program, axis)


def _merge(
    division: Division | None, b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]
) -> tuple[Value, ...]:
    nodes = [graph.nodes[number] for number in group]
    op = nodes[0].op
    assert isinstance(op, hir.Linear)
    axis = 0 if op.contract == 1 else 1
    sizes = tuple(int(graph.type(n.inputs[1]).shape[axis]) for n in nodes)
    shards = _parts(division, _param(graph, nodes[0].inputs[1]).programs[0], axis)
    weights = [_concat([_param(graph, n.inputs[1]) for n in nodes], axis, shards)]
    if op.bias:
        weights.append(_concat([_param(graph, n.inputs[2]) for n in nodes], 0, shards))
    merged = b(replace(op), inputs[0], *(b.leaf(w) for w in weights))
    return b.add(hir.Split(sizes, shards), merged)


def _param(graph: Graph, value: Value) -> Param:
    op = graph.nodes[value.node].op
    assert isinstance(op, Param)
    return op


def _concat(params: list[Param], axis: int, shards: int) -> Param:
    """Side by side; the first part of each, then the second part of each …"""

    def merged(programs: tuple[Program, ...]) -> Program:
        if shards == 1:
            return concat(programs, axis)
        sizes = [(p, int(p.type.shape[axis]) // shards) for p in programs]
        pieces = (sliced(p, axis, i * n, (i + 1) * n) for i in range(shards) for p, n in sizes)
        return concat(tuple(pieces), axis)

    return param_of(map(merged, zip(*(p.programs for p in params), strict=True)))


def merge_ropes(graph: Graph, types: TypeCache) -> Fused:
    """rope(split₀(y), t), rope(split₁(y), t) → split(rope(y₀ ‖ y₁, t)), where the parts stand side by side in y."""
    done = _at_once(graph, types, "merge_ropes", _rotations, _rotate)
    return Fused(done, tuple(_merged(done, hir.Rope, "shared_rope", "merge_ropes")))


def _rotations(graph: Graph) -> list[list[int]]:
    """Node numbers of alike Ropes over neighbouring parts of one Split, in the order of the parts."""
    found: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if isinstance(node.op, hir.Rope) and isinstance(graph.nodes[node.inputs[0].node].op, hir.Split):
            found[(node.inputs[0].node, node.op, node.inputs[1:])].append(number)
    groups = [sorted(group, key=lambda n: graph.nodes[n].inputs[0].index) for group in found.values()]
    parts = [[graph.nodes[n].inputs[0].index for n in group] for group in groups]
    # The first to be computed makes all, so it has to be the first of the parts.
    return [g for g, at in zip(groups, parts, strict=True)
            if len(g) > 1 and g == sorted(g) and at == list(range(at[0], at[0] + len(at)))]  # fmt: skip


def _rotate(b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    split, first, count = b.nodes[inputs[0].node], inputs[0].index, len(group)
    assert isinstance(split.op, hir.Split)
    sizes, shards = split.op.sizes, split.op.shards
    parts = sizes[first : first + count]
    cuts = tuple(n for n in (sum(sizes[:first]), sum(parts), sum(sizes[first + count :])) if n)
    whole = b.add(hir.Split(cuts, shards), *split.inputs)[1 if first else 0]
    return b.add(hir.Split(parts, shards), b(graph.nodes[group[0]].op, whole, *inputs[1:]))


def _merged(graph: Graph, kind: type[Op], pattern: str, by: str) -> Iterator[Place]:
    """Where one node of that kind was made of several: what it gives is split."""
    for number, node in enumerate(graph.nodes):
        if node.origin.by == by and isinstance(node.op, hir.Split):
            if isinstance(graph.nodes[node.inputs[0].node].op, kind):
                yield Place.of(pattern, by, number, node)
        for region in node.op.regions():
            yield from _merged(region, kind, pattern, by)


def _at_once(graph: Graph, types: TypeCache, name: str, groups: FindGroups, make: Make) -> Graph:
    """Compute the nodes of each group together, by `make`, where the first of them stood."""

    def enter(graph: Graph) -> Rewrite:
        member = {number: group for group in groups(graph) for number in group}
        made: dict[int, Value] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if number not in member:
                return None
            group = member[number]
            if number == group[0]:
                made.update(zip(group, make(b, graph, group, inputs), strict=True))
            return (made[number],)

        return fn

    # Without dce the unmerged weights would stay in the graph, and so in the layout.
    return dce(rewrite(graph, enter, types, name), types)
