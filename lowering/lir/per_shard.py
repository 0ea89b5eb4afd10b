"""The program of one device of a mesh, in which each value is the device's shard and sums over devices are ops.

A kernel cannot be divided by XLA. In this program its operands have the sizes of shards, so that the passes and kernels
for one device apply to it; it runs under `jax.shard_map`. A program has it if each op has a rule here: how its result
is divided, given how its operands are. `mesh_axes` of a value are the axes of the mesh that divide each of its axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import UnsupportedError
from rlx_jax.ir.graph import (
    BodyInput,
    Builder,
    Graph,
    Leaf,
    Node,
    Op,
    Param,
    StateRead,
    TypeCache,
    Value,
    constant,
    locate_errors,
)
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.cache import CacheUpdate, RingStep
from rlx_jax.ir.ops.collective import AllGather, AllReduce, ShardIndex
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather, Iota, TakeRow, TopK
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Unary, Where
from rlx_jax.ir.ops.reduce import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.shape import Reshape, Shard, SplitLast
from rlx_jax.ir.param import Program, Roles, packed_arrays, printed_name
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.sharding import ModelSharding, shard_type

# For each axis of a value, the axes of the mesh that divide it.
MeshAxes = tuple[tuple[str, ...], ...]
# The results of a node in the program of one device, and how they are divided.
Divided = tuple[tuple[Value, ...], Sequence[MeshAxes]]


class UndividedError(UnsupportedError):
    """An op has no rule for operands that are divided in this way."""


@dataclass(frozen=True)
class ShardProgram:
    """The program of one device.

    Attributes:
        graph: the program on shards.
        outputs: how each output is divided.
    """

    graph: Graph
    outputs: tuple[PartitionSpec, ...]


def shard_program(graph: Graph, model_sharding: ModelSharding, types: TypeCache) -> ShardProgram:
    """Return the program of one device, for a program with sizes.

    Raises:
        UndividedError: an op has no rule; names it and its block.
    """
    divided, outputs = Divide(model_sharding, types).graph(graph, ())
    return ShardProgram(verify(divided, "mir", "per_shard", types), tuple(map(spec_of, outputs)))


def spec_of(axes: MeshAxes) -> PartitionSpec:
    """Return how an array is divided as JAX names it."""
    return PartitionSpec(*(names or None for names in axes))


def leaf_axes(sharding: NamedSharding, rank: int) -> MeshAxes:
    """Return how an array is divided; axes of the mesh that have one device divide nothing."""
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    names = ((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)
    return tuple(tuple(n for n in axes if sharding.mesh.shape[n] > 1) for axes in names)


@dataclass(frozen=True)
class Divide:
    """The rewrite from a program to the program of one device.

    Attributes:
        model_sharding: the sharding.
        types: infers the types.
    """

    model_sharding: ModelSharding
    types: TypeCache

    def graph(self, graph: Graph, inputs: Sequence[MeshAxes]) -> tuple[Graph, list[MeshAxes]]:
        """Return a graph, or a region with operands divided as `inputs`, on shards, and how its outputs are divided."""
        b, values, axes = Builder(graph.name, self.types), dict[Value, Value](), dict[Value, MeshAxes]()
        b.inputs = list(graph.inputs)
        for number, node in enumerate(graph.nodes):
            with b.origin_scope(node.origin), locate_errors(node.origin):
                site = Site(
                    self, b, node, [graph.type(v) for v in node.inputs], [values[v] for v in node.inputs],
                    [axes[v] for v in node.inputs],
                )  # fmt: skip
                results, divided = self.leaf(b, node.op, inputs) if isinstance(node.op, Leaf) else self.node(site)
                self.check(site, results, divided)
            values.update({Value(number, i): v for i, v in enumerate(results)})
            axes.update({Value(number, i): a for i, a in enumerate(divided)})
        reads = {n.op.leaf: axes[Value(i)] for i, n in enumerate(graph.nodes) if isinstance(n.op, StateRead)}
        for leaf, value in graph.writes:
            if axes[value] != reads.get(leaf):
                raise UndividedError(f"the new {leaf} is not divided as the old one")
            b.writes.append((leaf, values[value]))
        return b.finish([values[v] for v in graph.outputs], graph.output_names), [axes[v] for v in graph.outputs]

    def leaf(self, b: Builder, op: Leaf, inputs: Sequence[MeshAxes]) -> Divided:
        """Append a leaf on shards."""
        axes: MeshAxes = ((),) * op.type.rank
        if isinstance(op, BodyInput):
            axes = inputs[op.index]
        elif isinstance(op, StateRead) and op.roles:
            axes = self.value_axes(op.roles, op.type)
        elif isinstance(op, Param):
            axes, *others = dict.fromkeys(map(self.param_axes, op.programs))
            if others:
                raise UndividedError("weights of layers are divided in different ways")
        return (b.leaf(replace(op, type=self.shard(op.type, axes))),), [axes]

    def param_axes(self, program: Program) -> MeshAxes:
        """Return how a parameter is divided, and the arrays of a packed one in the same way."""
        axes = leaf_axes(self.model_sharding.compute_sharding(program), program.type.rank)
        for array in packed_arrays(program).values():
            of_array = leaf_axes(self.model_sharding.compute_sharding(array), array.type.rank)
            pairs = zip(axes, of_array, array.type.shape, strict=False)
            if len(axes) != len(of_array) or any(a != b and size > 1 for a, b, size in pairs):
                raise UndividedError(f"the arrays of {printed_name(program)} are not divided alike")
        return axes

    def value_axes(self, roles: Roles, t: TensorType) -> MeshAxes:
        """Return how a value with these roles is divided."""
        return leaf_axes(self.model_sharding.value_sharding(roles, t.shape), t.rank)

    def shard(self, t: TensorType, axes: MeshAxes) -> TensorType:
        """Return the type of a shard."""
        return shard_type(t, NamedSharding(self.model_sharding.mesh, spec_of(axes)))

    def count(self, axes: tuple[str, ...]) -> int:
        """Return the number of devices along axes of the mesh."""
        return math.prod(self.model_sharding.mesh.shape[name] for name in axes)

    def check(self, site: Site, results: Sequence[Value], divided: Sequence[MeshAxes]) -> None:
        """Check that results have the sizes of shards, apart from axes of one entry, and no mesh axis divides two axes.

        Raises:
            UndividedError: a rule does not fit these operands.
        """
        for value, t, axes in zip(results, site.node.types, divided, strict=True):
            names = [name for axis in axes for name in axis]
            shard = [int(size) // self.count(axis) for size, axis in zip(t.shape, axes, strict=True)]
            sizes = [int(size) for size in site.b.type(value).shape if size != 1]
            if len(names) != len({*names}) or sizes != [size for size in shard if size != 1]:
                raise UndividedError(f"{site.node.op.text()} has no rule for operands that are divided in this way")

    def node(self, site: Site) -> Divided:
        """Append a node on shards.

        Raises:
            UndividedError: there is no rule.
        """
        op, b, axes = site.node.op, site.b, site.axes
        if isinstance(op, Repeat):
            body, outputs = self.graph(op.body, axes)
            if outputs[: op.carries] != list(axes[: op.carries]):
                raise UndividedError("a layer's result is not divided as its operand")
            sides = [a for a in outputs[op.carries :] for _ in range(op.count)]
            return b.add(replace(op, body=body), *site.operands), [*outputs[: op.carries], *sides]
        if isinstance(op, Shard):
            return self.placed(site, self.value_axes(op.roles, site.types[0]))
        if not any(map(any, axes)) and not op.regions():
            op = replace(op, roles=()) if isinstance(op, TopK) else op
            return b.add(op, *site.operands), [((),) * t.rank for t in site.node.types]
        rule = next((rule for kinds, rule in RULES.items() if isinstance(op, kinds)), None)
        divided = None if rule is None else rule(site)
        if divided is None:
            raise UndividedError(f"{op.text()} of divided operands has no rule")
        return divided

    def placed(self, site: Site, target_axes: MeshAxes) -> Divided:
        """Append a value divided as `target_axes`, gathered along the axes that they do not divide."""
        (value,), (axes,) = site.operands, site.axes
        for axis, (names, new) in enumerate(zip(axes, target_axes, strict=True)):
            if new not in ((), names):
                raise UndividedError(f"{site.node.op.text()} divides a value")
            value = value if names == new else site.b(AllGather(axis, self.count(names), names), value)
        return (value,), [target_axes]


@dataclass(frozen=True)
class Site:
    """A node, and where it is appended.

    Attributes:
        divide: the rewrite.
        b: the builder of the program of one device.
        node: the node in the whole program.
        types: the types of its operands there.
        operands: its operands in the builder.
        axes: how they are divided.
    """

    divide: Divide
    b: Builder
    node: Node
    types: Sequence[TensorType]
    operands: Sequence[Value]
    axes: Sequence[MeshAxes]

    def copy(self, *axes: MeshAxes, op: Op | None = None) -> Divided:
        """Append the node, or another op, with results that are divided as `axes`."""
        return self.b.add(op or self.node.op, *self.operands), axes


# -- rules: each returns the results, or None for operands that it does not have -------------------------------------


def elementwise(site: Site) -> Divided | None:
    """Divide operands alike, other than along axes of one entry."""
    rank = site.node.types[0].rank
    result: list[tuple[str, ...]] = []
    for back in range(rank, 0, -1):
        operands = zip(site.types, site.axes, strict=True)
        choices = {a[-back] for t, a in operands if t.rank >= back and t.shape[-back] != 1}
        if len(choices) > 1:
            return None
        result.append(choices.pop() if choices else ())
    return site.copy(tuple(result))


def product(site: Site) -> Divided | None:
    """Divide the result as the rows of the weight; if its columns are divided, add the results of all devices."""
    b, op, (x, weight, *bias) = site.b, site.node.op, site.axes
    assert isinstance(op, MatMul | FusedMatMulBiasAct)
    contracted, out = weight[op.contract], weight[1 - op.contract]
    if x[-1] != contracted or any(set(out).intersection(a) for a in x[:-1]) or any(a != (out,) for a in bias):
        return None
    result = b(op if isinstance(op, MatMul) else op.product, *site.operands[:2])
    result = b(AllReduce(contracted), result) if contracted else result
    if isinstance(op, FusedMatMulBiasAct):
        result = b(Binary("add"), result, site.operands[2])
        result = b(Unary(op.activation), result) if op.activation else result
    return (result,), [(*x[:-1], out)]


def lookup(site: Site) -> Divided | None:
    """Look up the rows that a device has; the others are zero, and the results of all devices are added."""
    b, (table, ids), ((rows, *columns), id_axes) = site.b, site.operands, site.axes
    if any(columns) or any(id_axes):
        return None
    size, dtype = b.type(table).shape[0], b.type(ids).dtype
    first = b(Binary("mul"), b(CastTo(dtype), b(ShardIndex(rows), ids)), b.leaf(constant(size, dtype)))
    ids = b(Binary("sub"), ids, first)
    bounds = ((kind, b.leaf(constant(bound, dtype))) for kind, bound in (("ge", 0), ("lt", size)))
    is_own = b(Binary("and"), *(b(Compare(kind), ids, bound) for kind, bound in bounds))
    is_own = b(Reshape((*map(int, b.type(ids).shape), *(1 for _ in columns))), is_own)
    rows_read = b(Gather(), table, ids)
    result = b(AllReduce(rows), b(Where(), is_own, rows_read, b.scalar(0, rows_read)))
    return (result,), [((),) * b.type(result).rank]


def normed(site: Site) -> Divided | None:
    """Norms of rows that are whole."""
    x, *weights = site.axes
    return None if x[-1] or any(len(a) > 1 or any(a) for a in weights) else site.copy(x)


def rotation(site: Site) -> Divided | None:
    """Rotate whole heads, by tables that all devices have."""
    assert isinstance(site.node.op, RopeOp)
    x, *tables = site.axes
    is_whole = site.b.type(site.operands[0]).shape[-1] % site.node.op.head_dim == 0
    return site.copy(x) if is_whole and not any(x[:-1]) and not any(map(any, tables)) else None


def attention(site: Site) -> Divided | None:
    """Divide key heads, and with each its query heads and sinks; all devices have the other operands."""
    op, (q, k, v, *extras) = site.node.op, site.axes
    assert isinstance(op, AttentionOp)
    count = site.divide.count(q[-1])
    if not q == k == v or any(q[:-1]) or op.heads % count or op.kv_heads % count or op.returns != "context":
        return None
    for name, t, axes in zip(op.extra, site.types[3:], extras, strict=True):
        is_of_heads = name in ("keep", "bias") and t.rank == 4 and t.shape[1] != 1
        if is_of_heads or axes != ((q[-1],) if name == "sinks" else ((),) * t.rank):
            return None
    return site.copy(q, op=replace(op, heads=op.heads // count, kv_heads=op.kv_heads // count))


def cache_write(site: Site) -> Divided | None:
    """Divide a cache and new rows alike, but not along rows or slots."""
    cache, new, *others = site.axes
    if cache != new or any(cache[:2]) or any(map(any, others)):
        return None
    return site.copy(*(cache if t.rank == len(cache) else ((),) * t.rank for t in site.node.types))


def numbered(site: Site) -> Divided | None:
    """Number an axis that is whole."""
    assert isinstance(site.node.op, Iota)
    return None if site.axes[0][site.node.op.axis] else site.copy(((),))


def row_taken(site: Site) -> Divided | None:
    """Take a token of a row that is divided along other axes."""
    x, index = site.axes
    return None if any(x[:2]) or any(index) else site.copy(x)


def split(site: Site) -> Divided | None:
    """Split an axis that is whole. An axis of one shard before it is left out, so that kernels find the split."""
    ((*lead, last),), (value,) = site.axes, site.operands
    if last:
        return None
    source = site.b.nodes[value.node]
    if isinstance(source.op, Reshape) and site.b.type(source.inputs[0]).shape[-1:] == site.b.type(value).shape[-1:]:
        value = source.inputs[0]
    parts = site.b.add(site.node.op, value)
    return parts, [(*lead, ())] * len(parts)


def reshaped(site: Site) -> Divided | None:
    """Divide the first axis of those that are joined, and the first axis of those that they become."""
    (x,), (value,), result_type = site.axes, site.operands, site.node.types[0]
    result: list[tuple[str, ...]] = [()] * result_type.rank
    for before, after in reshape_groups(site.types[0].shape, result_type.shape):
        if any(x[axis] for axis in before[1:]):
            return None
        if before and x[before[0]]:
            if not after or int(result_type.shape[after[0]]) % site.divide.count(x[before[0]]):
                return None
            result[after[0]] = x[before[0]]
    shape = site.divide.shard(result_type, tuple(result)).shape
    while isinstance(site.b.nodes[value.node].op, Reshape):
        (value,) = site.b.nodes[value.node].inputs
    if site.b.type(value).shape != shape:
        value = site.b(Reshape(tuple(map(int, shape))), value)
    return (value,), [tuple(result)]


def reshape_groups(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Return the axes of two shapes in groups with as many entries each, without axes of one entry."""
    before, after = ([i for i, size in enumerate(shape) if size != 1] for shape in (old, new))
    groups = []
    while before or after:
        left, right = before[:1], after[:1]
        while (size := math.prod(old[i] for i in left)) != (new_size := math.prod(new[i] for i in right)):
            shorter, axes = (left, before) if size < new_size else (right, after)
            shorter.append(axes[len(shorter)])
        groups.append((left, right))
        before, after = before[len(left) :], after[len(right) :]
    return groups


RULES: Mapping[Any, Callable[[Site], Divided | None]] = {
    (Unary, Binary, Compare, Where, CastTo): elementwise, (MatMul, FusedMatMulBiasAct): product,
    Gather: lookup, (RmsNormOp, LayerNormOp): normed, RopeOp: rotation, AttentionOp: attention,
    (CacheUpdate, RingStep): cache_write, Iota: numbered, TakeRow: row_taken, SplitLast: split, Reshape: reshaped,
}  # fmt: skip
