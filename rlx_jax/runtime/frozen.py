"""`FrozenFlow`: a flow whose programs were exported. It has the types and limits of each program, and no blocks.

Each program is a graph with one op, `ExportedCall`, so that planning, donation, loops around programs and the compile
cache are the same as for a flow of blocks.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax import export
from jax.sharding import Mesh

from rlx_jax import errors
from rlx_jax.compiler.passes import Job
from rlx_jax.compiler.pipeline import Template
from rlx_jax.compiler.settings import lowering_settings
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.device import all_devices
from rlx_jax.errors import listing, quote
from rlx_jax.ir.checkpoint_tensor import Key
from rlx_jax.ir.graph import Builder, Graph, Input, Param, StateRead, TypeCache
from rlx_jax.ir.ops.custom import ExportedCall
from rlx_jax.ir.param import Program, Roles
from rlx_jax.ir.paths import StateLeaf
from rlx_jax.ir.roles import program_roles
from rlx_jax.ir.types import TensorType, as_dim, dim_text
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.fusion import fusion_report
from rlx_jax.lowering.hir.independence import why_rows_mix
from rlx_jax.lowering.hir.rules import find_causal_block
from rlx_jax.lowering.inspect.bounds import Bounds
from rlx_jax.lowering.lir.plan import state_leaves
from rlx_jax.lowering.sharding import ModelSharding
from rlx_jax.lru import LruCache
from rlx_jax.profiles import CompileProfile
from rlx_jax.program import Built, InputDecl, Weights
from rlx_jax.runtime.program_key import ProgramKey

# Returns the bytes of a member of an artifact.
ReadMember = Callable[[str], bytes]
# Programs of an artifact that stay deserialized.
MAX_LOADED = 256


@dataclass(frozen=True)
class ExportedForm:
    """A program as StableHLO for these sizes, and for every size of the other symbols; `member` has its bytes.

    `platforms` are those that it is for; () for all of the artifact.
    """

    member: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    platforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramRecord:
    """The interface of an exported program.

    Attributes:
        program, optional_inputs, only, last_only: as in `ProgramKey`; `only` is its `outputs`.
        declared: the inputs that the flow declares for it, read or not.
        inputs: the inputs that the program reads.
        outputs, state: the types of the outputs and of the state arrays, with symbolic sizes.
        optional: the optional inputs that the derived program adds.
        ids, positions, position_dims, rows: see `Bounds`.
        rings: the window of each ring buffer, by the symbol of its size.
        rows_mix, left_context: see `why_rows_mix` and `find_causal_block`.
        forms: the program for some or all sizes; none if only its inputs are asked for.
        state_roles: the roles of the axes of the state arrays of a sharded model.
    """

    program: str
    declared: tuple[Input, ...]
    inputs: tuple[Input, ...]
    outputs: Mapping[str, TensorType]
    forms: tuple[ExportedForm, ...]
    state: Mapping[str, TensorType] = field(default_factory=dict)
    optional_inputs: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    last_only: bool = False
    optional: tuple[Input, ...] = ()
    ids: Mapping[str, int] = field(default_factory=dict)
    positions: int | None = None
    position_dims: tuple[int | str, ...] = ()
    rows: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    rings: Mapping[str, int] = field(default_factory=dict)
    rows_mix: str = ""
    left_context: str = ""
    state_roles: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    @property
    def key(self) -> ProgramKey:
        """Return the key of the program, without the name of the flow and without sizes."""
        return ProgramKey("", self.program, frozenset(self.optional_inputs), self.only, self.last_only)

    @property
    def bounds(self) -> Bounds:
        """Return the limits of ids and sequence lengths."""
        dims = tuple(as_dim(dim, "position_dims") for dim in self.position_dims)
        rows = {name: tuple(as_dim(dim, "rows") for dim in dims) for name, dims in self.rows.items()}
        return Bounds(self.ids, self.positions, dims, rows)


def record_of(template: Template, key: ProgramKey, forms: tuple[ExportedForm, ...]) -> ProgramRecord:
    """Return the interface of a program of a flow.

    Raises:
        UnsupportedError: a size that is neither a number, a symbol nor a sum of them.
    """
    mir, bounds = template.mir, template.bounds
    return ProgramRecord(
        program=key.program,
        declared=template.built.hir.inputs,
        inputs=mir.inputs,
        outputs=dict(zip(mir.output_names, map(mir.type, mir.outputs), strict=True)),
        forms=forms,
        state=template.state,
        optional_inputs=tuple(sorted(key.optional_inputs)),
        only=key.outputs,
        last_only=key.last_only,
        optional=template.optional,
        ids=bounds.ids,
        positions=bounds.positions,
        position_dims=tuple(map(_dim_text, bounds.position_dims)),
        rows={name: tuple(map(_dim_text, dims)) for name, dims in bounds.rows.items()},
        rings=template.rings,
        # Only requests to `forward` depend on these, and the proof takes time.
        rows_mix=why_rows_mix(template.hir, template.types) if key.program == "forward" else "",
        left_context=find_causal_block(template.hir),
        state_roles={name: _plain_roles(roles) for name, (_, roles) in state_leaves(mir, template.scan).items()},
    )


def _dim_text(dim: Any) -> int | str:
    return dim if isinstance(dim, int) else dim_text(dim)


@dataclass(frozen=True)
class MeshRecord:
    """The mesh of a sharded model.

    Attributes:
        axes: the size of each mesh axis, by name.
        rules: the mesh axes of each role, as in `ModelSharding`.
        roles: the roles of the axes of each parameter.
    """

    axes: Mapping[str, int]
    rules: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, tuple[str | None, ...]]

    @staticmethod
    def of(sharding: ModelSharding, params: Mapping[str, Program]) -> MeshRecord:
        """Return the record of the sharding rules of a model with these parameters."""
        roles = {name: _plain_roles(program_roles(program, sharding.roles)) for name, program in params.items()}
        return MeshRecord(dict(sharding.mesh.shape), dict(sharding.axes), roles)

    def sharding(self, where: str) -> ModelSharding:
        """Return the sharding rules over the devices of this process.

        Raises:
            PlatformMismatchError: there are fewer devices.
        """
        count, devices = math.prod(self.axes.values()), all_devices()
        if len(devices) < count:
            raise errors.PlatformMismatchError(
                f"{where}: the artifact is for a mesh of {count} devices ({listing(self.axes)}), and JAX has "
                f"{len(devices)}: load it where it has {count}, or export the model again without mesh="
            )
        mesh = Mesh(np.array(devices[:count]).reshape(tuple(self.axes.values())), tuple(self.axes))
        return ModelSharding(mesh, self.rules, self.roles)


def _plain_roles(roles: Roles) -> tuple[str | None, ...]:
    """Return the roles of axes without those of packed axes, which are not sharded for storage."""
    return tuple(role if isinstance(role, str) else None for role in roles)


@dataclass(frozen=True)
class FlowRecord:
    """The manifest's description of a model.

    Attributes:
        name, binding: as in a flow.
        inputs: the declared inputs.
        program: the program that calls run.
        params: the types of the parameters by name.
        programs: the exported programs.
        profile: the compile profile, as TOML.
        unread: the inputs that no output of the flow reads, by the optional inputs that are passed.
        mesh: the mesh of a sharded model.
    """

    name: str
    inputs: tuple[InputDecl, ...]
    program: str
    params: Mapping[str, TensorType]
    programs: tuple[ProgramRecord, ...]
    profile: str
    binding: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    mesh: MeshRecord | None = None


@dataclass(frozen=True, eq=False)
class FrozenFlow:
    """A flow with exported programs, which can be compiled like a flow; see `Buildable`.

    Attributes:
        record: its description.
        where: the name of the artifact in messages.
        read: returns the bytes of a member.
    """

    record: FlowRecord
    where: str
    read: ReadMember = field(repr=False)
    _loaded: LruCache[str, export.Exported] = field(default_factory=lambda: LruCache(MAX_LOADED), repr=False)

    @property
    def name(self) -> str:
        """Return the name of the flow."""
        return self.record.name

    @property
    def _inputs(self) -> tuple[InputDecl, ...]:
        return self.record.inputs

    @property
    def _binding(self) -> Mapping[str, int]:
        return self.record.binding

    def build(
        self, weights: Weights = None, given: Iterable[str] = (), captured: CapturedArrays | None = None
    ) -> Built:
        """Return the interface of the program that calls run; with optional inputs, of that with these inputs."""
        names = frozenset(given)
        candidates = [r for r in self.record.programs if r.program == self.record.program] or self.record.programs
        program = next((r for r in candidates if frozenset(r.optional_inputs) == names), candidates[0])
        return self._built(program, weights)

    def template(self, key: ProgramKey, source: WeightSource | None) -> Template:
        """Return the template of an exported program.

        Raises:
            DeriveError: the artifact does not have the program; the message lists those that it has.
        """
        record = next((r for r in self.record.programs if r.key == replace(key.symbolic, flow="")), None)
        if record is None:
            available = listing(dict.fromkeys(describe_key(r.key) for r in self.record.programs if r.forms))
            raise errors.DeriveError(
                f"{self.where}: the artifact has no program {quote(describe_key(key))}; it has {available}: export the "
                "model with what the request needs"
            )
        built = self._built(record, source)
        graph = replace(built.hir, inputs=record.inputs)
        job = Job(lowering_settings(), built.types, record.program, record.last_only, key.optional_inputs, key.outputs)
        fusion = fusion_report(graph, graph, (), ())
        return Template(
            built, graph, graph, record.bounds, False, record.optional, built.types, {}, {}, fusion, job,
        )  # fmt: skip

    def _built(self, record: ProgramRecord, source: WeightSource | None) -> Built:
        types = TypeCache()
        return Built(
            self.name,
            self._graph(record, types),
            source,
            CompileProfile.from_toml_str(self.record.profile),
            types,
            self,
            binding=self.record.binding,
            program=self.record.program if self.record.program == "explicit" else "forward",
        )

    def _graph(self, record: ProgramRecord, types: TypeCache) -> Graph:
        """Return the graph of one program: its leaves, and the call."""
        params, state = self.record.params, record.state
        op = ExportedCall(
            lambda p, s, i, sizes: self._call(record, sizes)(p, s, i),
            tuple(params), tuple(state), tuple(i.input for i in record.inputs),
            (*params.values(), *state.values(), *(i.type for i in record.inputs)),
            (*record.outputs.values(), *state.values()),
            tuple(record.rings.items()), record.rows_mix, record.left_context,
        )  # fmt: skip
        b = Builder(self.name, types)
        b.inputs = list(record.declared)
        leaves = {n: StateLeaf((path,) if path else (), slot) for n in state for path, _, slot in [n.rpartition(".")]}
        values = b.add(
            op,
            *(b.leaf(Param((Key(name, t),), type=t)) for name, t in params.items()),
            *(b.leaf(StateRead(leaves[name], record.state_roles.get(name, ()), type=t)) for name, t in state.items()),
            *(b.leaf(i) for i in record.inputs),
        )
        outputs, new_state = values[: len(record.outputs)], values[len(record.outputs) :]
        b.writes = [(leaves[name], value) for name, value in zip(state, new_state, strict=True)]
        return b.finish(outputs, tuple(record.outputs))

    def _call(self, record: ProgramRecord, sizes: Mapping[str, int]) -> Callable[..., Any]:
        """Return the exported function for these sizes on this platform: the form with most of them fixed."""
        running = export.default_export_platform()
        here = [form for form in record.forms if not form.platforms or running in form.platforms]
        forms = [form for form in here if form.sizes.items() <= sizes.items()]
        if not forms:
            choices = listing((", ".join(f"{n} {size}" for n, size in form.sizes.items()) for form in here), 8)
            raise errors.RequestError(
                f"{self.where}: {describe_key(record.key)} was exported for {choices}, not for "
                f"{', '.join(f'{n} {size}' for n, size in sorted(sizes.items()))}: pass sizes that fit, or export it "
                "with sizes="
            )
        member = max(forms, key=lambda form: len(form.sizes)).member
        return self._loaded(member, lambda: deserialize(self.read(member), f"{self.where}: {quote(member)}")).call


def deserialize(raw: bytes, where: str) -> export.Exported:
    """Return an exported program from verified bytes.

    Raises:
        ArtifactFormatError: jax.export cannot read it.
    """
    try:
        return export.deserialize(bytearray(raw))
    except Exception as cause:
        raise errors.ArtifactFormatError(
            f"{where}: jax.export cannot read it: {type(cause).__name__}: {cause}"
        ) from cause


def require_flatbuffers(operation: str) -> None:
    """Check that the package is installed that `jax.export` needs to read and write programs.

    Raises:
        UnsupportedError: it is not.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise errors.UnsupportedError(
            f"{operation} needs the package flatbuffers: pip install 'rlx-jax[export]', or flatbuffers itself"
        )


def describe_key(key: ProgramKey) -> str:
    """Return the program of a key for messages, such as `extend of the last tokens, with attention_mask`."""
    parts = [key.program + (" of the last tokens" if key.last_only else "")]
    parts += [f"outputs {', '.join(key.outputs)}"] if key.outputs is not None else []
    parts += [f"with {', '.join(sorted(key.optional_inputs))}"] if key.optional_inputs else []
    parts += ["up to the head"] if key.headless or key.hidden else []
    return ", ".join(parts)
