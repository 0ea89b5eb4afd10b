"""This module turns the `mesh=` argument of a model into a `ModelSharding`, the sharding rules of its values.

It also adapts arrays and functions to meshes that the caller uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.pipeline import Template
from rlx_jax.compiler.settings import Settings
from rlx_jax.dataclasses import dataclass
from rlx_jax.device import all_devices, is_tracing, running_device, to_auto_axes, with_auto_axes
from rlx_jax.errors import GraphError, ProfileError, RequestError, UnsupportedError, listing, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, GraphStage
from rlx_jax.ir.param import Conflict, Roles
from rlx_jax.ir.roles import dim_roles, merge_roles
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.lir.plan import Lir, returned_leaves
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.lowering.sharding import ModelSharding, adapt_to_heads, heads_of
from rlx_jax.program import Built


@dataclass(frozen=True)
class PlannedDevices:
    """A number of devices that need not be here, as the `mesh` of a model that is planned and never run."""

    count: int


def make_model_sharding(
    mesh: Any, builds: Sequence[Built], settings: Settings, program: str, serves: tuple[str, ...]
) -> ModelSharding:
    """Return the sharding rules of the flows of a model.

    For a number of devices the axes are chosen here. In training, all devices shard the parameters and the batch
    (`fsdp`). For a model that generates, as many devices as its key heads and feed-forward blocks allow shard these
    (`tensor`), and the others shard rows (`data`). For any other model, all devices shard rows.

    Args:
        mesh: a `jax.sharding.Mesh`, a number of devices, or "auto" for all devices. For a model that never runs
            also an `AbstractMesh` or `PlannedDevices`.
        builds: the built flows.
        settings: the resolved profile, with the mesh axes of each role.
        program: the program that the model is compiled for.
        serves: the programs that requests run.

    Raises:
        RequestError: `mesh` is something else, or more devices than there are.
        ProfileError: a mesh axis shards nothing.
        UnsupportedError: heads that cannot be sharded evenly; a module at LIR.
    """
    for built in builds:
        if built.stage == GraphStage.LIR:
            raise UnsupportedError(f"{built.name}: a module at lir is planned for one device; compile its into_mir()")
    graphs = [expand_composites(built.hir, built.types) for built in builds if built.stage == GraphStage.HIR]
    if not isinstance(mesh, Mesh | AbstractMesh):
        generates = not {program, *serves}.isdisjoint(CACHED_PROGRAMS)
        sizes = [*evenly_sharded_sizes(builds, graphs)] if generates else []
        if isinstance(mesh, PlannedDevices):
            axes = mesh_axes(mesh.count, sizes, program)
            mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
        else:
            mesh = build_mesh(select_devices(mesh), sizes, program)
    role_axes = {role: tuple(n for n in names if mesh.shape.get(n, 1) > 1) for role, names in settings.sharding.items()}
    check_axes(mesh, role_axes)
    # The caller's mesh may have explicit axes; inside the program XLA propagates the shardings of the roles.
    model_sharding = ModelSharding(
        to_auto_axes(mesh), {role: names for role, names in role_axes.items() if names}, weight_roles(builds)
    )
    check_conflicts(model_sharding, builds[0].name)
    for graph in graphs:
        model_sharding = adapt_to_heads(model_sharding, graph)
    return model_sharding


def select_devices(mesh: Any, label: str = "mesh=") -> list[Any]:
    """Return the devices for `mesh`, a number of devices or "auto"; `label` precedes the number in messages.

    Raises:
        RequestError: it is neither, or there are fewer devices.
    """
    devices = all_devices()
    if isinstance(mesh, str) and mesh == "auto":
        return devices
    if isinstance(mesh, bool) or not isinstance(mesh, int | np.integer):
        raise RequestError(f"mesh is {shown(mesh)}; expected a jax.sharding.Mesh, a number of devices, or 'auto'")
    if not 1 <= mesh <= len(devices):
        available = f"{len(devices)}, the devices that JAX has ({running_device().kind})"
        raise RequestError(f"{label}{mesh}: expected 1 to {available}")
    return devices[: int(mesh)]


def build_mesh(devices: list[Any], sizes: Sequence[int], program: str) -> Mesh:
    """Return the mesh for a number of devices, with the axes of `mesh_axes`."""
    axes = mesh_axes(len(devices), sizes, program)
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def mesh_axes(count: int, sizes: Sequence[int], program: str) -> dict[str, int]:
    """Return the axes of the mesh for a number of devices, each with its size.

    Args:
        count: the number of devices.
        sizes: the dimensions that an axis `tensor` has to divide evenly; empty for no such axis.
        program: the program that the model is compiled for.
    """
    if program == "train" or not sizes:
        return {"fsdp" if program == "train" else "data": count}
    # `tensor` is as large as possible: it reduces the bytes of weights that each step reads on a device.
    tensor = max(t for t in range(1, count + 1) if count % t == 0 and not any(size % t for size in sizes))
    return {"data": count // tensor, "tensor": tensor}


def evenly_sharded_sizes(builds: Sequence[Built], graphs: Iterable[Graph]) -> Iterator[int]:
    """List the dimensions that can only be sharded evenly: numbers of heads, and widths of feed-forward blocks."""
    for graph in graphs:
        for _, node in graph.walk():
            if isinstance(node.op, hir.Attention):
                yield from heads_of(node.op)
    for built in builds:
        for key, roles in built.roles.items():
            yield from (built.params[key].shape[axis] for axis, role in enumerate(roles) if role == "ffn")


def check_axes(mesh: Mesh, axes: Mapping[str, tuple[str, ...]]) -> None:
    """Check that every axis of the mesh shards something, and that no role has an axis twice.

    Raises:
        ProfileError: the message has the unused axes, or the role.
    """
    for role, names in axes.items():
        if len(set(names)) < len(names):
            raise ProfileError(f"sharding.{role} = {listing(names)}: a mesh axis appears twice; list each once")
    in_use = {name for names in axes.values() for name in names}
    unused = [str(name) for name, size in mesh.shape.items() if size > 1 and name not in in_use]
    if unused:
        raise ProfileError(
            f"mesh: no role is sharded over axis {listing(unused)}; by convention axes are data, "
            'fsdp, tensor, expert and context, and sharding = {heads = ["' + unused[0] + '"], …} in the profile maps '
            "roles to others"
        )


def weight_roles(builds: Sequence[Built]) -> dict[str, Roles]:
    """Return the roles of the axes of all weights, by key, agreed among the flows."""
    roles_by_key: dict[str, Roles] = {}
    for built in builds:
        for key, roles in built.roles.items():
            roles_by_key[key] = merge_roles(roles_by_key.get(key, roles), roles)
    return roles_by_key


def check_conflicts(model_sharding: ModelSharding, name: str) -> None:
    """Check that no axis of a weight is sharded by a role that only some uses of the weight give it.

    Raises:
        GraphError: one is; the message has the weight, the roles and the axes of the mesh.
    """
    for key, roles in model_sharding.roles.items():
        for role in (r for r in roles if isinstance(r, Conflict)):
            if sharded_roles := [r for r in role.names if model_sharding.num_shards(r) > 1]:
                raise GraphError(
                    f"{name}: weight {quote(key)}: an axis is {role}, and the mesh {model_sharding.text()} shards "
                    f"{listing(sharded_roles)}; use a mesh that does not, or sharding = {{{sharded_roles[0]} = []}} "
                    "in the profile"
                )


T = TypeVar("T")


@contextlib.contextmanager
def use_model_mesh(model_sharding: ModelSharding | None) -> Iterator[None]:
    """Replace a mesh that the caller has set (`jax.set_mesh`) by the model's, so that it does not affect tracing.

    On one device it is replaced by none: XLA would compile for all devices of the caller's mesh.
    """
    if jax.sharding.get_abstract_mesh().empty or is_tracing():  # in a trace the caller's mesh applies
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), object), ()) if model_sharding is None else model_sharding.mesh):
        yield


def to_model_devices(arrays: T, model_sharding: ModelSharding | None) -> T:
    """Return the arrays in a form that a sharded model accepts.

    Arrays on the devices of the model keep their sharding, with explicit mesh axes converted. Arrays that were put on
    other devices are replicated over the model's. Tracers and uncommitted arrays are returned unchanged.
    """
    if model_sharding is None:
        return arrays
    model_devices = set(model_sharding.mesh.devices.flat)

    def home(a: Any) -> Any:
        if not isinstance(a, jax.Array) or isinstance(a, jax.core.Tracer) or not a.committed:
            return a
        if a.sharding.device_set != model_devices:
            return jax.device_put(a, model_sharding.replicated)
        return with_auto_axes(a)

    adapted: T = jax.tree.map(home, arrays)
    return adapted


def with_explicit_axes(
    function: Function, template: Template, lir: Lir, model_sharding: ModelSharding | None
) -> Function:
    """Return a pure function that can also be traced under a mesh with explicit axes.

    Inside the function the axes are automatic; its results have the shardings of the roles of their axes.
    """
    if model_sharding is None:
        return function
    leaves = returned_leaves(lir.graph, lir.plan.scan)
    outputs = tuple(
        model_sharding.value_sharding(dim_roles(template.mir.type(symbolic)), lir.graph.type(bound).shape).spec
        for symbolic, bound in zip(template.mir.outputs, lir.graph.outputs, strict=True)
    )
    written = {name: model_sharding.value_sharding(roles, t.shape).spec for name, (t, roles) in leaves.items()}

    def anywhere(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        tracers = (a for a in jax.tree.leaves((params, state, inputs)) if isinstance(a, jax.core.Tracer))
        meshes = (jax.typeof(a).sharding.mesh for a in tracers)
        explicit: Any = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
        if explicit is None:
            return function(params, state, inputs)
        specs = {name: written[name] for name in (leaves if state else ())}
        with jax.sharding.use_abstract_mesh(explicit):  # auto_axes needs a mesh, even if the caller has set none
            results: Results = jax.sharding.auto_axes(function, out_sharding=(outputs, specs))(params, state, inputs)
        return results

    return anywhere
