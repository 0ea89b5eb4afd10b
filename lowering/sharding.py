"""Sharding of a model over a device mesh: roles of array axes → mesh axes → `NamedSharding`.

Passes, Layout, plan and interpreter get their shardings from here; XLA (GSPMD) propagates them to all other values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx_jax.errors import UnsupportedError, listing
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.attention import RopeTable
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather, TopK
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.ops.shape import Shard
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.param import Program, Role, Roles, Stack, packed_parameter, packing_of, printed_name
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import everywhere, rewrite
from rlx_jax.ir.roles import dim_roles, program_roles
from rlx_jax.ir.types import DimLike, TensorType, is_static


@dataclass(frozen=True)
class ModelSharding:
    """Sharding rules of a model on a mesh.

    Attributes:
        mesh: the device mesh.
        axes: for each role the mesh axes over which it is sharded; only axes of this mesh.
        roles: the roles of the axes of checkpoint weights, by key.
    """

    mesh: Mesh
    axes: Mapping[str, tuple[str, ...]] = field(hash=False)
    roles: Mapping[str, Roles] = field(hash=False)

    # -- numbers -----------------------------------------------------------------------------

    def num_shards(self, role: Role) -> int:
        """Return the number of shards of an axis with that role."""
        return math.prod(self.mesh.shape[name] for name in self._storage_axes(role))

    def num_weight_shards(self, program: Program, axis: int) -> int:
        """Return the number of shards of a parameter's axis in the compute sharding."""
        role = program_roles(program, self.roles)[axis]
        return math.prod(self.mesh.shape[name] for name in self._compute_axes(role))

    def num_batch_shards(self, rows: int) -> int:
        """Return the number of shards of a batch of so many rows."""
        names = self._dividing_axes("batch", rows, self._storage_axes("batch"))
        return math.prod(self.mesh.shape[name] for name in names)

    def is_kv_replicated(self, program: Program, axis: int) -> bool:
        """Return whether an axis of a parameter is key heads with fewer shards than the query heads have."""
        is_replicated = self.num_shards("kv_heads") < self.num_shards("heads")
        return is_replicated and program_roles(program, self.roles)[axis] == "kv_heads"

    # -- shardings ---------------------------------------------------------------------------

    def storage_sharding(self, program: Program) -> NamedSharding:
        """Return the storage sharding of a parameter: sharded over all mesh axes of its roles."""
        return self._sharding(program_roles(program, self.roles), divisible_shape(program), ())

    def compute_sharding(self, program: Program) -> NamedSharding:
        """Return the compute sharding of a parameter.

        It is gathered along the mesh axes that shard the batch. Only experts stay sharded; tokens are sent to them.
        """
        return self._sharding(program_roles(program, self.roles), divisible_shape(program), self._batch_axes)

    def value_sharding(self, roles: Roles, shape: Iterable[DimLike]) -> NamedSharding:
        """Return the sharding of a value or a state leaf.

        The mesh axes of the batch shard only the batch and experts. An axis that does not divide evenly is replicated;
        the batch is sharded over the longest prefix of its mesh axes that divides it.
        """
        return self._sharding(roles, tuple(shape), self._batch_axes)

    def input_sharding(self, t: TensorType, shape: Iterable[DimLike]) -> NamedSharding:
        """Return the sharding of an input with the symbolic type `t` and the static shape `shape`.

        The names of its dims determine their roles.
        """
        return self.value_sharding(dim_roles(t), shape)

    def describe_storage(self, program: Program) -> tuple[str, int]:
        """Return the storage sharding of a parameter as text, `(tensor, -)`, and its bytes per device."""
        sharding = self.storage_sharding(program)
        entries = [*sharding.spec, *[None] * (program.type.rank - len(sharding.spec))]
        names = ("-" if e is None else "+".join(e) if isinstance(e, tuple) else str(e) for e in entries)
        return f"({', '.join(names)})", shard_type(program.type, sharding).nbytes

    def gathered_bytes(self, programs: Iterable[Program]) -> int:
        """Return the bytes per device of all gathered parameters, if all of them are live at once.

        The stored shards come in addition.
        """
        gathered_programs = [p for p in programs if self.compute_sharding(p) != self.storage_sharding(p)]
        return sum(shard_type(p.type, self.compute_sharding(p)).nbytes for p in gathered_programs)

    @property
    def replicated(self) -> NamedSharding:
        """Return the replicated sharding: every device has the full array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """Return the mesh axes of the batch."""
        return self.axes.get("batch", ())

    def _storage_axes(self, role: Role) -> tuple[str, ...]:
        """Return the mesh axes of a role in the storage sharding."""
        # A role that is no string is a packed axis of several parts, which passes separate before they shard them.
        return self.axes.get(role, ()) if isinstance(role, str) else ()

    def _compute_axes(self, role: Role) -> tuple[str, ...]:
        """Return the mesh axes of a role in the compute sharding.

        Tokens are sent to the experts of other devices; all other weights are gathered on the devices with the tokens.
        """
        return tuple(n for n in self._storage_axes(role) if role == "experts" or n not in self._batch_axes)

    def _dividing_axes(self, role: Role, size: DimLike, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the mesh axes that divide a size evenly: all or none of them; for the batch, the longest prefix."""
        while names and not (is_static(size) and int(size) % math.prod(self.mesh.shape[n] for n in names) == 0):
            names = names[:-1] if role == "batch" else ()
        return names

    def _sharding(self, roles: Roles, shape: tuple[DimLike, ...], excluded: tuple[str, ...]) -> NamedSharding:
        """Return the sharding of an array; mesh axes in `excluded` shard only the batch and experts."""
        used_names: set[str] = set()  # a mesh axis may shard only one axis of an array
        entries: list[tuple[str, ...] | None] = []
        for role, size in zip(roles, shape, strict=True):
            role_excluded = excluded if role not in ("batch", "experts") else ()
            names = self._dividing_axes(
                role, size, tuple(n for n in self._storage_axes(role) if n not in used_names and n not in role_excluded)
            )
            entries.append(names or None)
            used_names |= set(names)
        while entries and entries[-1] is None:  # so that equal shardings compare equal
            entries.pop()
        return NamedSharding(self.mesh, PartitionSpec(*(e[0] if e and len(e) == 1 else e for e in entries)))

    # -- reports -----------------------------------------------------------------------------

    def text(self) -> str:
        """Return the mesh axes with their sizes, such as `data 2 × tensor 4`."""
        return " × ".join(f"{name} {size}" for name, size in self.mesh.shape.items())

    def replicated_params(self, programs: Iterable[Program]) -> tuple[str, ...]:
        """Return the names of replicated parameters with at least two axes, not counting the axis of stacked layers."""
        matrices = (p for p in programs if (p.parts[0] if isinstance(p, Stack) else p).type.rank > 1)
        return tuple(printed_name(p) for p in matrices if self.storage_sharding(p).is_fully_replicated)


def divisible_shape(program: Program) -> tuple[DimLike, ...]:
    """Return the shape of a parameter in units that devices may not divide.

    For an array of a packed parameter these are its groups, so that all arrays of the parameter are divided alike, and
    no group lies on two devices.
    """
    parameter = packed_parameter(program)
    scheme = None if parameter is None else packing_of(parameter)
    if parameter is None or scheme is None:
        return program.type.shape
    packing = SCHEMES[scheme]
    shape = list(packing.stored_axes(parameter.type.shape))
    columns = shape[-1] if packing.ordered else packing.elements
    for axis, size in ((-1, columns), (-2, packing.rows)):
        # An axis with incomplete groups, or with one number for all of them, is not divided.
        is_whole = shape[axis] % size or program.type.shape[axis] == 1
        shape[axis] = 1 if is_whole else shape[axis] // size
    return tuple(shape)


def shard_type(t: TensorType, sharding: NamedSharding | None) -> TensorType:
    """Return the type of one device's shard of an array; without a sharding, of the full array."""
    return t if sharding is None else TensorType(sharding.shard_shape(t.spec.shape), t.dtype)


def adapt_to_heads(model_sharding: ModelSharding, graph: Graph) -> ModelSharding:
    """Return the sharding rules adapted to the attention and recurrent heads of a flow.

    Key heads are replicated if their number of shards is a multiple of the number of key heads. Groups shared by heads
    with a state are replicated if they do not divide evenly.

    Args:
        model_sharding: the rules.
        graph: the flow's HIR with composites expanded.

    Raises:
        UnsupportedError: a number of heads does not divide; names the block and possible remedies.
    """
    for _, node in graph.walk():
        where = path_text(node.origin.path)
        if isinstance(node.op, hir.GatedDelta | hir.SelectiveScan):
            count = node.op.value_heads if isinstance(node.op, hir.GatedDelta) else node.op.heads
            if count % (n := model_sharding.num_shards("heads")):
                subject = f"{count} heads with a state"
                raise UnsupportedError(_indivisible_message(model_sharding, where, subject, "heads", n))
            groups = node.op.key_heads if isinstance(node.op, hir.GatedDelta) else node.op.groups
            if groups % model_sharding.num_shards("groups"):
                model_sharding = _replicate_role(model_sharding, "groups")
        if not isinstance(node.op, hir.Attention | hir.GrowingAttention):
            continue
        heads, kv_heads = heads_of(node.op)
        n, kv = model_sharding.num_shards("heads"), model_sharding.num_shards("kv_heads")
        if heads % n:
            raise UnsupportedError(_indivisible_message(model_sharding, where, f"{heads} query heads", "heads", n))
        if kv_heads % kv and (kv % kv_heads or kv != n):
            raise UnsupportedError(_indivisible_message(model_sharding, where, f"{kv_heads} key heads", "kv_heads", kv))
        if kv_heads % kv:
            model_sharding = _replicate_role(model_sharding, "kv_heads")
    return model_sharding


def _replicate_role(model_sharding: ModelSharding, role: str) -> ModelSharding:
    """Return the sharding rules with axes of that role replicated."""
    return replace(model_sharding, axes={name: over for name, over in model_sharding.axes.items() if name != role})


def heads_of(op: hir.Attention | hir.GrowingAttention) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads."""
    attend = op if isinstance(op, hir.Attention) else op.attend
    return attend.heads, attend.kv_heads


def _indivisible_message(model_sharding: ModelSharding, where: str, subject: str, role: str, num_shards: int) -> str:
    """Return the message of an error about a size that does not divide."""
    axes = listing(model_sharding.axes[role])
    return (
        f"{where}: {subject} cannot be divided over {num_shards} devices ({role} over mesh axis {axes}); use a mesh in "
        f"which that divides them, or sharding = {{{role} = []}} in the profile"
    )


def check_divisible(model_sharding: ModelSharding, programs: Iterable[Program]) -> None:
    """Check that every sharded axis of the compute shardings divides evenly.

    (An axis that is sharded in storage only is replicated instead, and so are arrays of packed parameters whose groups
    do not divide; the report lists such parameters.)

    Raises:
        UnsupportedError: an axis does not divide; names the parameter.
    """
    for program in programs:
        if packed_parameter(program) is not None:
            continue
        for axis, role in enumerate(program_roles(program, model_sharding.roles)):
            parts = model_sharding.num_weight_shards(program, axis)
            if int(program.type.shape[axis]) % parts:
                assert isinstance(role, str)
                subject = f"{program.type}, {program.type.shape[axis]} along axis {axis},"
                raise UnsupportedError(
                    _indivisible_message(model_sharding, printed_name(program), subject, role, parts)
                )


def add_sharding_constraints(graph: Graph, model_sharding: ModelSharding, types: TypeCache) -> Graph:
    """Rewrite x · w → shard(x · w), and likewise embeddings and experts: add sharding constraints to results.

    The last axis of the result has the role of the output axis of w. The hidden width between blocks is replicated, so
    that a sum over a sharded axis is reduced right after its product.
    """

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(node.op, RopeTable):  # replicated: every device computes its own table
            return b.add(node.op, *(b(Shard((None,) * b.type(v).rank), v) for v in inputs))
        if isinstance(node.op, TopK):  # per row, on the device of the row: XLA would gather all rows
            roles = list(dim_roles(b.type(inputs[0])))
            roles[node.op.axis] = None
            return b.add(replace(node.op, roles=tuple(roles)), *inputs) if any(roles) else None
        if isinstance(node.op, ExpertFfn):  # results are sharded over rows only, as the tokens are
            rows = dim_roles(b.type(inputs[0]))[:-1]
            return (b(Shard((*rows, None)), b(replace(node.op, roles=rows), *inputs)),)
        weight = 0 if isinstance(node.op, Gather) else 1
        if not isinstance(node.op, MatMul | FusedMatMulBiasAct | Gather) or len(inputs) <= weight:
            return None
        param = _find_param(b, inputs[weight])
        if param is None:
            return None
        product = b(node.op, *inputs)
        *lead, _ = dim_roles(b.type(product))
        role = _last_axis_role(node, program_roles(param.programs[0], model_sharding.roles))
        return (b(Shard((*lead, role)), product),)

    return rewrite(graph, everywhere(fn), types, "divide")


def _last_axis_role(node: Node, roles: Roles) -> str | None:
    """Return the role of the result's last axis; None for the hidden width and packed axes, which are replicated."""
    role = roles[-1] if isinstance(node.op, Gather) else roles[1 - node.op.contract]  # type: ignore[attr-defined]
    return role if isinstance(role, str) and role != "hidden" else None


def _find_param(b: Builder, value: Value) -> Param | None:
    """Return the parameter that a value is, after removing casts; None if it is something else."""
    node = b.nodes[value.node]
    while isinstance(node.op, CastTo):
        node = b.nodes[node.inputs[0].node]
    return node.op if isinstance(node.op, Param) else None
