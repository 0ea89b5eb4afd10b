"""Where JAX's own meshes meet those of a model: programs are traced with axes that XLA divides by itself (`Auto`), and
callers may hold arrays, and trace, on a mesh whose axes are part of types (`Explicit`, what `jax.make_mesh` gives)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.template import Template
from rlx_jax.device import freed
from rlx_jax.ir.roles import of_dims
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.lir.plan import Lir, given_leaves

T = TypeVar("T")


@contextlib.contextmanager
def own_mesh(division: Division | None) -> Iterator[None]:
    """Inside, a mesh that the caller has set (`jax.set_mesh`) is not seen: what is traced is the model's alone."""
    if division is None or jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(division.mesh):
        yield


def at_home(arrays: T, division: Division | None) -> T:
    """The same arrays where a model over devices takes them: those on a mesh with explicit axes on the same devices,
    divided as they are; those that were put on other devices on all of its own."""
    if division is None:
        return arrays
    own = set(division.mesh.devices.flat)

    def home(a: Any) -> Any:
        if not isinstance(a, jax.Array) or isinstance(a, jax.core.Tracer) or not a.committed:
            return a
        if a.sharding.device_set != own:
            return jax.device_put(a, division.whole)
        return freed(a)

    moved: T = jax.tree.map(home, arrays)
    return moved


def in_any_mesh(function: Function, template: Template, lir: Lir, division: Division | None) -> Function:
    """A pure function that may be traced where axes are explicit: inside they are not, and its results have the
    divisions that the roles of their axes say."""
    if division is None:
        return function
    leaves = given_leaves(lir.graph, lir.plan.scan)
    outputs = tuple(
        division.value(of_dims(template.mir.type(symbolic)), lir.graph.type(bound).shape).spec
        for symbolic, bound in zip(template.mir.outputs, lir.graph.outputs, strict=True)
    )
    written = {name: division.value(roles, t.shape).spec for name, (t, roles) in leaves.items()}

    def anywhere(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        tracers = (a for a in jax.tree.leaves((params, state, inputs)) if isinstance(a, jax.core.Tracer))
        meshes = (jax.typeof(a).sharding.mesh for a in tracers)
        explicit: Any = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
        if explicit is None:
            return function(params, state, inputs)
        kept = {name: written[name] for name in (leaves if state else ())}
        with jax.sharding.use_abstract_mesh(explicit):  # that of the arguments, if the caller has set none
            made: Results = jax.sharding.auto_axes(function, out_sharding=(outputs, kept))(params, state, inputs)
        return made

    return anywhere
