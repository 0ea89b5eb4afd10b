"""Passes that choose the stored form of weights: orientation, a padded vocabulary, separate or fused projections.

Fusion merges Linears that read the same value (q, k, v; gate, up) into one, and then the rotary embeddings of its
parts (q, k), because one large kernel costs less than several small ones. Rotary embeddings are merged only in programs
that decode one token at a time; over a prompt, splitting the result again costs more than the fusion saves.
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
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.param import Parts, Program, Role, Transposed, concat, keys_of, packing_of, pad_axis, slice_axis
from rlx_jax.ir.region import Rewrite, everywhere, rewrite
from rlx_jax.ir.roles import dim_roles, program_roles
from rlx_jax.lowering.fusion import Fused, FusionSite
from rlx_jax.lowering.lir.plan import tied_groups
from rlx_jax.lowering.mir.small import dce, live_nodes
from rlx_jax.lowering.sharding import ModelSharding


def orient(graph: Graph, layout: str, keep_packed: bool, types: TypeCache) -> Graph:
    """Rewrite linear(x, w) → linear(x, transpose(w)), contracting the other axis, if w is not stored in `layout`.

    A weight that has other readers than Linears of one orientation (a tied embedding) stays as it is, and so do the
    weights that repeated layers stack with it. Otherwise it would be stored twice.

    Args:
        graph: the HIR graph.
        layout: `in_out` or `out_in`.
        keep_packed: whether packed weights stay packed, which have their rows along the inputs.
        types: the cache of inferred types.

    Returns:
        The rewritten graph without unread nodes.
    """
    contract = 0 if layout == "in_out" else 1
    reorientable = _reorientable_programs(graph, contract, keep_packed)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, hir.Linear) or node.op.contract == contract:
            return None
        weight = b.nodes[inputs[1].node].op
        if not isinstance(weight, Param) or not reorientable.issuperset(weight.programs):
            return None
        oriented = b.leaf(make_param(map(transposed, weight.programs)))
        return b.add(replace(node.op, contract=contract), inputs[0], oriented, *inputs[2:])

    return dce(rewrite(graph, everywhere(fn), types, f"orient_{layout}"), types)


def make_param(programs: Iterable[Program]) -> Param:
    """Return the parameter with one of these programs for each layer."""
    head_program, *rest = programs
    return Param((head_program, *rest), type=head_program.type)


def transposed(program: Program) -> Program:
    """Return `program` with its axes swapped; a second swap returns the original."""
    return program.of if isinstance(program, Transposed) else Transposed(program)


def _reorientable_programs(graph: Graph, contract: int, keep_packed: bool) -> set[Program]:
    """Return the programs that only Linears read, as their weight, contracting another axis than `contract`."""
    fixed: set[Program] = set()
    for inner, node in graph.walk():
        for index, value in enumerate(node.inputs):
            op = inner.nodes[value.node].op
            is_reorientable = isinstance(node.op, hir.Linear) and index == 1 and node.op.contract != contract
            is_kept = keep_packed and isinstance(op, Param) and any(map(packing_of, op.programs))
            if isinstance(op, Param) and (is_kept or not is_reorientable):
                fixed.update(op.programs)
    return {program for group in tied_groups(graph.params()) if fixed.isdisjoint(group) for program in group}


# Roles of axes that may be padded. Heads and columns of a feed-forward block are not padded: sizes that the devices do
# not divide are an error.
PADDED_ROLES = ("vocab", "embedding")


def pad_vocabulary(graph: Graph, model_sharding: ModelSharding, types: TypeCache) -> Graph:
    """Rewrite linear(x, w) → narrow(linear(x, w ‖ 0)) if the number of shards does not divide the rows of w.

    An embedding table is padded without a narrow, because no id looks up a row past its end.
    """

    def find_padding(program: Program) -> tuple[int, int] | None:
        """Return the axis to pad and its new size, or None."""
        for axis, role in enumerate(program_roles(program, model_sharding.roles)):
            size, parts = int(program.type.shape[axis]), model_sharding.num_weight_shards(program, axis)
            if role in PADDED_ROLES and size % parts:
                return axis, -(-size // parts) * parts
        return None

    def with_padding(b: Builder, param: Param) -> Value:
        return b.leaf(make_param(pad_axis(p, *padding) if (padding := find_padding(p)) else p for p in param.programs))

    def enter(inner: Graph) -> Rewrite:
        def param(value: Value) -> Param | None:
            op = inner.nodes[value.node].op
            return op if isinstance(op, Param) and find_padding(op.programs[0]) is not None else None

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Param) and (padding := find_padding(node.op.programs[0])) is not None:
                axis, _ = padding
                return (b(Narrow(axis, 0, int(node.op.type.shape[axis])), with_padding(b, node.op)),)
            weights = [param(v) for v in node.inputs]
            if isinstance(node.op, hir.Embed) and weights[0] is not None:
                return (b(node.op, with_padding(b, weights[0]), *inputs[1:]),)
            if isinstance(node.op, hir.Linear) and all(w is not None for w in weights[1:]):
                product = b(node.op, inputs[0], *(with_padding(b, w) for w in weights[1:] if w is not None))
                (logits_type,) = node.types
                # Unshard the vocabulary axis first: its size without padding does not divide into equal shards.
                logits = b(Shard((*dim_roles(logits_type)[:-1], None)), product)
                return (b(Narrow(logits_type.rank - 1, 0, int(logits_type.shape[-1])), logits),)
            return None

        return fn

    return rewrite(graph, enter, types, "pad_vocabulary")


def unpack(graph: Graph, model_sharding: ModelSharding, types: TypeCache) -> Graph:
    """Rewrite split(linear(x, w)) → linear(x, w₀), linear(x, w₁) … if the parts of w are sharded over devices.

    A graph in which another node reads such a product stays as it is, because the weight would be stored twice.
    """

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, hir.Split) or node.op.shards != 1:
            return None
        values: list[Value] = []
        start = 0
        for part_index, size in enumerate(node.op.sizes):
            result = compute_columns(b, inputs[0], start, start + size, part_index, model_sharding)
            if result is None:
                return None
            part, role = result
            # Without a constraint XLA would shard the replicated parts too, and gather them again for the state.
            lead = dim_roles(b.type(part))[:-1]
            values.append(b(Shard((*lead, role)), part) if role is None or isinstance(role, str) else part)
            start += size
        return tuple(values)

    unpacked = dce(rewrite(graph, everywhere(fn), types, "unpack"), types)
    # A checkpoint key in both sets is read packed and in parts.
    packed_keys: set[str] = set()
    separate_keys: set[str] = set()
    for program in (program for param in unpacked.params() for program in param.programs):
        (packed_keys if is_packed(program, model_sharding) else separate_keys).update(keys_of(program))
    return graph if packed_keys & separate_keys else unpacked


def compute_columns(
    b: Builder, value: Value, start: int, stop: int, part_index: int, model_sharding: ModelSharding
) -> tuple[Value, Role] | None:
    """Compute columns `start` to `stop` of a value, its part number `part_index`, separately.

    Returns:
        The part and the role of its axis, or None if the value is not computed from a sharded packed product.
    """
    node = b.nodes[value.node]
    if isinstance(node.op, Shard | Unary | CastTo):
        result = compute_columns(b, node.inputs[0], start, stop, part_index, model_sharding)
        if result is None or isinstance(node.op, Shard):
            return result
        with b.origin_scope(node.origin):
            return b(node.op, result[0]), result[1]
    if not isinstance(node.op, hir.Linear | hir.CausalConv):
        return None
    params = [op for v in node.inputs[1:] if isinstance(op := b.nodes[v.node].op, Param)]
    if len(params) < len(node.inputs) - 1 or not all(is_packed(p.programs[0], model_sharding) for p in params):
        return None
    output_axis = 1 - node.op.contract if isinstance(node.op, hir.Linear) else 0
    axes = [output_axis, *[0] * (len(params) - 1)]
    slices = (
        (slice_axis(p, axis, start, stop) for p in param.programs) for param, axis in zip(params, axes, strict=True)
    )
    parts = [make_param(programs) for programs in slices]
    role = program_roles(parts[0].programs[0], model_sharding.roles)[output_axis]
    if isinstance(node.op, hir.Linear):
        with b.origin_scope(node.origin):
            return b(node.op, node.inputs[0], *map(b.leaf, parts)), role
    result = compute_columns(b, node.inputs[0], start, stop, part_index, model_sharding)
    if result is None or not (role is None or isinstance(role, str)):
        return None
    # A path of its own, so that the state of each part is separate.
    with b.origin_scope(replace(node.origin, path=(*node.origin.path, part_index))):
        return b(replace(node.op, role=role), result[0], *map(b.leaf, parts)), role


def is_packed(program: Program, model_sharding: ModelSharding) -> bool:
    """Return whether an axis of a parameter packs several parts, one of which is sharded over devices."""
    axes = (role for role in program_roles(program, model_sharding.roles) if isinstance(role, Parts))
    return any(model_sharding.num_shards(role) > 1 for axis in axes for _, role in axis.of)


# Returns the groups of nodes of a graph to compute together, by number.
FindGroups = Callable[[Graph], list[list[int]]]
# Maps the node numbers of a group and the inputs of its first node to one value for each node.
MergeGroup = Callable[[Builder, Graph, list[int], tuple[Value, ...]], tuple[Value, ...]]


ADVICE = "a Linear with the same bias, orientation and no activation"


def merge_linears(
    graph: Graph, types: TypeCache, model_sharding: ModelSharding | None = None, keep_packed: bool = False
) -> Fused:
    """Rewrite linear(x, w₁), linear(x, w₂) → split(linear(x, [w₁ ‖ w₂])).

    Linears are fused only if they agree in their biases and nothing else in the program reads their weights. Layers
    that share a weight have to fuse it with the same others. So each weight is part of one fused parameter, and is
    stored once.

    Over a mesh, the fused weight interleaves the shards: each device has its shard of w₁ followed by its shard of w₂,
    so that the split is local. Weights with different numbers of shards stay separate. So do weights of key heads that
    are replicated over devices, as each device slices the heads that it needs, and weights that stay packed on the
    device by different schemes or with inputs in an order of their own.

    Returns:
        The graph with its fusion sites. A site is missed if several products of one value stayed separate although
        nothing else reads their weights.
    """
    uses = _count_reads(graph)
    find = functools.partial(_linear_groups, uses, model_sharding, keep_packed)
    fused = _merge_groups(graph, types, "merge_linears", find, functools.partial(_merge_linear, model_sharding))
    sites = _fused_sites(fused, hir.Linear, "shared_input_matmul", "merge_linears")
    return Fused(fused, (*sites, *_missed_sites(fused, _count_reads(fused))))


def _count_reads(graph: Graph) -> Counter[Program]:
    """Return the number of reads of each parameter."""
    reads = [g.nodes[v.node].op for g, n in graph.walk() for v in n.inputs]
    return Counter(program for op in reads if isinstance(op, Param) for program in set(op.programs))


def _has_one_reader(op: Op, uses: Counter[Program]) -> bool:
    """Return whether a weight is a parameter with one reader."""
    return isinstance(op, Param) and all(uses[program] == 1 for program in op.programs)


def _missed_sites(graph: Graph, uses: Counter[Program]) -> Iterator[FusionSite]:
    """Yield one missed fusion site for each value that has several separate products."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number in sorted(live_nodes(graph)):
        node = graph.nodes[number]
        for region in node.op.regions():
            yield from _missed_sites(region, uses)
        if isinstance(node.op, hir.Linear | MatMul | FusedMatMulBiasAct):
            if all(_has_one_reader(graph.nodes[v.node].op, uses) for v in node.inputs[1:]):
                groups[node.inputs[0], node.op.f32_result].append(number)
    for first, *rest in groups.values():
        make_site = functools.partial(FusionSite.of, "shared_input_matmul", "merge_linears", first, graph.nodes[first])
        if len(rest) == 1:
            yield make_site(reason="NotFused", hint=f"make both {ADVICE}")
        elif rest:
            yield make_site(reason="SharedMatmulCount", detail=f"{{{1 + len(rest)}}}", hint=f"make all {ADVICE}")


def _linear_groups(
    uses: Counter[Program], model_sharding: ModelSharding | None, keep_packed: bool, graph: Graph
) -> list[list[int]]:
    """Return the node numbers of Linears that can be fused, in order."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if not isinstance(node.op, hir.Linear) or node.op.activation or node.op.f32_result:
            continue
        operands = [graph.nodes[v.node].op for v in node.inputs[1:]]
        if all(_has_one_reader(op, uses) for op in operands):
            iterations = tuple(len(op.programs) for op in operands if isinstance(op, Param))
            weight = operands[0]
            assert isinstance(weight, Param)
            shards = tuple(_num_shards(model_sharding, weight.programs[0], axis) for axis in (0, 1))
            if any(int(size) % n for size, n in zip(weight.type.shape, shards, strict=True)):
                continue  # `check_divisible` reports it with the parameter's name
            if model_sharding is not None and model_sharding.is_kv_replicated(weight.programs[0], 1 - node.op.contract):
                continue
            schemes = tuple(map(packing_of, weight.programs)) if keep_packed else ()
            if any(scheme is not None and SCHEMES[scheme].ordered for scheme in schemes):
                continue  # each weight has its own order of inputs
            groups[(node.inputs[0], node.op, iterations, shards, schemes)].append(number)
    return [group for group in groups.values() if len(group) > 1 and _has_consistent_partners(graph, group)]


def _has_consistent_partners(graph: Graph, group: list[int]) -> bool:
    """Return whether every layer that shares a weight fuses it with the same other weights."""
    for index in range(1, len(graph.nodes[group[0]].inputs)):
        merged = set(zip(*(_param(graph, graph.nodes[n].inputs[index]).programs for n in group), strict=True))
        if len({program for programs in merged for program in programs}) < len(group) * len(merged):
            return False
    return True


def _num_shards(model_sharding: ModelSharding | None, program: Program, axis: int) -> int:
    """Return the number of shards of a parameter along an axis in its products."""
    return 1 if model_sharding is None else model_sharding.num_weight_shards(program, axis)


def _merge_linear(
    model_sharding: ModelSharding | None, b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]
) -> tuple[Value, ...]:
    """Return the results of a group of Linears of the same input, split from one product.

    Their weights are concatenated along the output axis. Over devices they are interleaved shard by shard, so that each
    device splits its own part.
    """
    nodes = [graph.nodes[number] for number in group]
    op = nodes[0].op
    assert isinstance(op, hir.Linear)
    axis = 0 if op.contract == 1 else 1
    sizes = tuple(int(graph.type(n.inputs[1]).shape[axis]) for n in nodes)
    shards = _num_shards(model_sharding, _param(graph, nodes[0].inputs[1]).programs[0], axis)
    weights = [_concat_params([_param(graph, n.inputs[1]) for n in nodes], axis, shards)]
    if op.bias:
        weights.append(_concat_params([_param(graph, n.inputs[2]) for n in nodes], 0, shards))
    merged = b(op, inputs[0], *(b.leaf(w) for w in weights))
    return b.add(hir.Split(sizes, shards), merged)


def _param(graph: Graph, value: Value) -> Param:
    op = graph.nodes[value.node].op
    assert isinstance(op, Param)
    return op


def _concat_params(params: list[Param], axis: int, shards: int) -> Param:
    """Concatenate parameters along an axis: the first shard of each, then the second shard of each, and so on."""

    def concat_shards(programs: tuple[Program, ...]) -> Program:
        if shards == 1:
            return concat(programs, axis)
        sizes = [(p, int(p.type.shape[axis]) // shards) for p in programs]
        shard_programs = (slice_axis(p, axis, i * n, (i + 1) * n) for i in range(shards) for p, n in sizes)
        return concat(tuple(shard_programs), axis)

    return make_param(map(concat_shards, zip(*(p.programs for p in params), strict=True)))


def merge_ropes(graph: Graph, types: TypeCache) -> Fused:
    """Rewrite rope(split₀(y), t), rope(split₁(y), t) → split(rope(y₀ ‖ y₁, t)), if the parts are adjacent in y."""
    fused = _merge_groups(graph, types, "merge_ropes", _rope_groups, _merge_rope)
    return Fused(fused, tuple(_fused_sites(fused, hir.Rope, "shared_rope", "merge_ropes")))


def _rope_groups(graph: Graph) -> list[list[int]]:
    """Return the node numbers of equal Ropes over adjacent parts of one Split, in the order of the parts."""
    groups_by_split: dict[object, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        if isinstance(node.op, hir.Rope) and isinstance(graph.nodes[node.inputs[0].node].op, hir.Split):
            groups_by_split[(node.inputs[0].node, node.op, node.inputs[1:])].append(number)
    groups = [sorted(group, key=lambda n: graph.nodes[n].inputs[0].index) for group in groups_by_split.values()]
    part_indices = [[graph.nodes[n].inputs[0].index for n in group] for group in groups]
    # The first node of a group computes all of it, so the first part has to come first in the graph.
    return [g for g, order in zip(groups, part_indices, strict=True)
            if len(g) > 1 and g == sorted(g) and order == list(range(order[0], order[0] + len(order)))]  # fmt: skip


def _merge_rope(b: Builder, graph: Graph, group: list[int], inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the results of a group of Ropes, split from one Rope over their adjacent parts."""
    split, start, count = b.nodes[inputs[0].node], inputs[0].index, len(group)
    assert isinstance(split.op, hir.Split)
    sizes, shards = split.op.sizes, split.op.shards
    parts = sizes[start : start + count]
    cut_sizes = tuple(n for n in (sum(sizes[:start]), sum(parts), sum(sizes[start + count :])) if n)
    operand = b.add(hir.Split(cut_sizes, shards), *split.inputs)[1 if start else 0]
    return b.add(hir.Split(parts, shards), b(graph.nodes[group[0]].op, operand, *inputs[1:]))


def _fused_sites(graph: Graph, op_type: type[Op], pattern: str, by: str) -> Iterator[FusionSite]:
    """Yield the fusion sites of a pass: each Split of a node of that kind that the pass wrote."""
    for number, node in enumerate(graph.nodes):
        if node.origin.by == by and isinstance(node.op, hir.Split):
            if isinstance(graph.nodes[node.inputs[0].node].op, op_type):
                yield FusionSite.of(pattern, by, number, node)
        for region in node.op.regions():
            yield from _fused_sites(region, op_type, pattern, by)


def _merge_groups(graph: Graph, types: TypeCache, name: str, find_groups: FindGroups, merge_group: MergeGroup) -> Graph:
    """Compute the nodes of each group together, by `merge_group`, at the position of the first."""

    def enter(graph: Graph) -> Rewrite:
        member = {number: group for group in find_groups(graph) for number in group}
        results: dict[int, Value] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if number not in member:
                return None
            group = member[number]
            if number == group[0]:
                results.update(zip(group, merge_group(b, graph, group, inputs), strict=True))
            return (results[number],)

        return fn

    # Without dce the unmerged weights would stay in the graph, and so in the layout.
    return dce(rewrite(graph, enter, types, name), types)
