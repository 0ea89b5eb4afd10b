"""How a model is divided over a mesh of devices: roles of axes → axes of the mesh → shardings.

Passes, Layout, plan and interpreter ask here; XLA (GSPMD) does what follows from it for everything in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx_jax.errors import UnsupportedError, listing
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.attention import RopeTable
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.order import TopK
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.ops.shape import Shard
from rlx_jax.ir.param import Program, Role, Roles, Stack, leaf_name
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.roles import of_dims, of_program
from rlx_jax.ir.types import DimLike, TensorType, is_static


@dataclass(frozen=True, eq=False)
class Division:
    """A mesh, the mesh axes that each role is divided over (those that the mesh has), and what the axes of stored
    weights are, by key."""

    mesh: Mesh
    axes: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, Roles]

    # -- numbers -----------------------------------------------------------------------------

    def parts(self, role: Role) -> int:
        """How many pieces an axis of that role is cut into."""
        return math.prod(self.mesh.shape[name] for name in self._over(role))

    def weight_parts(self, program: Program, axis: int) -> int:
        """How many pieces an axis of a parameter is cut into where it is multiplied."""
        role = of_program(program, self.roles)[axis]
        return math.prod(self.mesh.shape[name] for name in self._used_over(role))

    def row_parts(self, rows: int) -> int:
        """How many pieces so many rows are cut into."""
        return math.prod(self.mesh.shape[name] for name in self._fitting("batch", rows, self._over("batch")))

    def repeats(self, program: Program, axis: int) -> bool:
        """Whether an axis of a parameter is key heads that every device has, while query heads are divided."""
        whole = self.parts("kv_heads") < self.parts("heads")
        return whole and of_program(program, self.roles)[axis] == "kv_heads"

    # -- shardings ---------------------------------------------------------------------------

    def resting(self, program: Program) -> NamedSharding:
        """Where a parameter is kept: divided over all axes that its roles have."""
        return self._sharding(of_program(program, self.roles), program.type.shape, ())

    def used(self, program: Program) -> NamedSharding:
        """Where it is when it is used: gathered along the mesh axes that divide the batch, but for experts, to which
        rows are brought."""
        return self._sharding(of_program(program, self.roles), program.type.shape, self._rows)

    def value(self, roles: Roles, shape: Iterable[DimLike]) -> NamedSharding:
        """Of a value or a state. The mesh axes that divide the batch divide nothing else of it but experts, and an axis
        that they do not divide evenly stays whole; rows are divided along the first of theirs, as far as that goes."""
        return self._sharding(roles, tuple(shape), self._rows)

    def of_input(self, t: TensorType, shape: Iterable[DimLike]) -> NamedSharding:
        """Of an input, whose dims have meaning: `t` has them by name, `shape` by number."""
        return self.value(of_dims(t), shape)

    def placed(self, program: Program) -> tuple[str, int]:
        """How a parameter is kept, as `(tensor, -)`, and the bytes of it that one device has."""
        sharding = self.resting(program)
        entries = [*sharding.spec, *[None] * (program.type.rank - len(sharding.spec))]
        names = ("-" if e is None else "+".join(e) if isinstance(e, tuple) else str(e) for e in entries)
        return f"({', '.join(names)})", on_one(program.type, sharding).nbytes

    def gathered_bytes(self, programs: Iterable[Program]) -> int:
        """What the parameters that are gathered to be used take of one device beside the parts that it keeps, if all
        of them are there at once."""
        gathered = [p for p in programs if self.used(p) != self.resting(p)]
        return sum(on_one(p.type, self.used(p)).nbytes for p in gathered)

    @property
    def whole(self) -> NamedSharding:
        """On every device, all of it."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def _rows(self) -> tuple[str, ...]:
        return self.axes.get("batch", ())

    def _over(self, role: Role) -> tuple[str, ...]:
        return self.axes.get(role, ()) if isinstance(role, str) else ()  # parts side by side are divided each alone

    def _used_over(self, role: Role) -> tuple[str, ...]:
        """Where it is used: rows go to the experts of other devices, and all other weights to the rows."""
        return tuple(n for n in self._over(role) if role == "experts" or n not in self._rows)

    def _fitting(self, role: Role, size: DimLike, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those mesh axes that divide so much evenly: all of them or none, and of rows the first ones."""
        while names and not (is_static(size) and int(size) % math.prod(self.mesh.shape[n] for n in names) == 0):
            names = names[:-1] if role == "batch" else ()
        return names

    def _sharding(self, roles: Roles, shape: tuple[DimLike, ...], without: tuple[str, ...]) -> NamedSharding:
        taken: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for role, size in zip(roles, shape, strict=True):
            free = without if role not in ("batch", "experts") else ()
            names = self._fitting(role, size, tuple(n for n in self._over(role) if n not in taken and n not in free))
            entries.append(names or None)
            taken |= set(names)
        while entries and entries[-1] is None:
            entries.pop()
        return NamedSharding(self.mesh, PartitionSpec(*(e[0] if e and len(e) == 1 else e for e in entries)))

    # -- what does not divide ----------------------------------------------------------------

    def text(self) -> str:
        """`data 2 × tensor 4`."""
        return " × ".join(f"{name} {size}" for name, size in self.mesh.shape.items())

    def whole_leaves(self, programs: Iterable[Program]) -> tuple[str, ...]:
        """Leaves of more than one axis, beside that of stacked layers, that every device has whole: by name."""
        named = ((p, p.parts[0] if isinstance(p, Stack) else p) for p in programs)
        return tuple(leaf_name(p) for p, one in named if one.type.rank > 1 and self.resting(p).is_fully_replicated)


def on_one(t: TensorType, sharding: NamedSharding | None) -> TensorType:
    """What one device has of an array; all of it without a sharding."""
    return t if sharding is None else TensorType(sharding.shard_shape(t.spec.shape), t.dtype)


def with_groups(division: Division, graph: Graph) -> Division:
    """The division for the attention of a flow, whose composites are expanded. Where the devices are more than the key
    heads, and a multiple of them, keys and values are whole on each; so is what heads with a state share, where they do
    not divide it.

    Raises:
        UnsupportedError: heads that do not divide; names the block and what would.
    """
    for _, node in graph.walk():
        where = path_text(node.origin.path)
        if isinstance(node.op, hir.GatedDelta | hir.SelectiveScan):
            count = node.op.value_heads if isinstance(node.op, hir.GatedDelta) else node.op.heads
            if count % division.parts("heads"):
                what = f"{count} heads with a state"
                raise UnsupportedError(_refusal(division, where, what, "heads", division.parts("heads")))
            groups = node.op.key_heads if isinstance(node.op, hir.GatedDelta) else node.op.groups
            if groups % division.parts("groups"):
                division = _without(division, "groups")
        if not isinstance(node.op, hir.Attention | hir.GrowingAttention):
            continue
        heads, kv_heads = heads_of(node.op)
        n, kv = division.parts("heads"), division.parts("kv_heads")
        if heads % n:
            raise UnsupportedError(_refusal(division, where, f"{heads} query heads", "heads", n))
        if kv_heads % kv and (kv % kv_heads or kv != n):
            raise UnsupportedError(_refusal(division, where, f"{kv_heads} key heads", "kv_heads", kv))
        if kv_heads % kv:
            division = _without(division, "kv_heads")
    return division


def _without(division: Division, role: str) -> Division:
    """The division in which axes of that role are whole."""
    return replace(division, axes={name: over for name, over in division.axes.items() if name != role})


def heads_of(op: hir.Attention | hir.GrowingAttention) -> tuple[int, int]:
    """Query heads and key heads."""
    attend = op if isinstance(op, hir.Attention) else op.attend
    return attend.heads, attend.kv_heads


def _refusal(division: Division, where: str, what: str, role: str, parts: int) -> str:
    axes = listing(division.axes[role])
    return (
        f"{where}: {what} cannot be divided over {parts} devices ({role} over mesh axis {axes}); use a mesh in which "
        f"that divides them, or sharding = {{{role} = []}} in the profile"
    )


def check_divides(division: Division, programs: Iterable[Program]) -> None:
    """Every axis that a product is divided along has equal pieces. (What is only kept in pieces stays whole where it
    has none; the report says so.)

    Raises:
        UnsupportedError: names the leaf.
    """
    for program in programs:
        for axis, role in enumerate(of_program(program, division.roles)):
            parts = division.weight_parts(program, axis)
            if int(program.type.shape[axis]) % parts:
                assert isinstance(role, str)
                what = f"{program.type}, {program.type.shape[axis]} along axis {axis},"
                raise UnsupportedError(_refusal(division, leaf_name(program), what, role, parts))


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
