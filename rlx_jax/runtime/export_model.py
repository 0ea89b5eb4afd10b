"""Export a compiled model to an artifact, one file with StableHLO, parameters and settings."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax import export

from rlx_jax.compiler.buckets import DIMENSIONS
from rlx_jax.compiler.executable import Function, sharding_options, with_split_inputs
from rlx_jax.compiler.meshes import use_model_mesh
from rlx_jax.compiler.pipeline import make_function
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.device import named_device
from rlx_jax.errors import (
    RequestError,
    RlxError,
    SequenceLengthError,
    UnsupportedError,
    check_names,
    first_line,
    listing,
    quote,
    shown,
)
from rlx_jax.io.archive import SUFFIX, Content, write_archive
from rlx_jax.io.atomic import atomic_directory, write_synced
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.queries import bind_leaves
from rlx_jax.ir.serial import encode
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.lir.implementations import choose_implementations
from rlx_jax.lowering.lir.plan import Call, Choice, Lir, call_of
from rlx_jax.runtime import frozen
from rlx_jax.runtime.arguments import check_params
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model_program import argument_specs
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.weights.format import Entry
from rlx_jax.weights.safetensors_format import write_tensors
from rlx_jax.weights.tensor_file import DTYPES

# The sizes of a request that implementations are chosen for in programs with symbolic sizes.
USUAL_SIZES = {"batch": 1, "seq": 512, "context": 1024}
PARAMS, STABLEHLO = "params.safetensors", "stablehlo"
FORMATS = ("rlxa", STABLEHLO)
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
SOURCE_PATHS = "jax_hlo_source_file_canonicalization_regex"
SizeMap = Mapping[str, int]


@dataclass(frozen=True)
class ArtifactPlan:
    """What an artifact has in addition to the parameters.

    Attributes:
        kind: the class that `rlx_jax.load` returns.
        keys: the programs, without sizes.
        interfaces: programs that only their inputs are asked of.
        settings: the arguments of the class, plain JSON.
        files: other files by name, such as tokenizer.json.
    """

    kind: str
    keys: tuple[ProgramKey, ...]
    interfaces: tuple[ProgramKey, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """An exported model.

    Attributes:
        path: the file, or the directory of `format="stablehlo"`.
        sha256: the digest for `rlx_jax.load(path, expect_sha256=)`; empty for a directory.
        nbytes: bytes of the file, or of the programs in the directory.
        platforms: the platforms that it runs on.
        created, expires: the day of the export, and the day until which later versions of JAX can load it.
        programs: the exported programs, each with its sizes if it was not exported for all of them.
    """

    path: str
    sha256: str
    nbytes: int
    platforms: tuple[str, ...]
    created: datetime.date
    expires: datetime.date
    programs: tuple[str, ...]

    def __str__(self) -> str:
        digest = self.sha256 and f"\nsha256 {self.sha256}"
        return (
            f"{self.path}: {len(self.programs)} programs, {self.nbytes:,} bytes, for {', '.join(self.platforms)}\n"
            f"made by jax {jax.__version__}; later versions load it until {self.expires.isoformat()}{digest}"
        )


def export_model(
    model: Any, path: str | os.PathLike[str], *, platforms: Sequence[str] | None = None,
    programs: Sequence[str] | None = None, given: Iterable[str] = (), sizes: Sequence[SizeMap] | None = None,
    format: str = "rlxa", overwrite: bool = False,
) -> Artifact:  # fmt: skip
    """Export the model to one file, which `rlx_jax.load` reads without its flow, plugins and checkpoint.

    Programs have symbolic sizes, so that they serve every batch, sequence and cache. They use XLA's implementations
    only, no custom kernels. The programs of a model on a mesh are for this number of devices; with symbolic sizes their
    rows are replicated, with `sizes` they are sharded.

    Args:
        path: a new `.rlxa` file, or for `format="stablehlo"` a new directory.
        platforms: "cpu", "cuda", "rocm", "tpu"; by default the one that JAX runs on.
        programs: the programs to export; by default the one that calls run, and with a cache `prefill` and `extend`.
        given: names of optional inputs; each program is also exported with all of them.
        sizes: choices of sizes, such as `{"batch": 1, "seq": 128}`, to export programs for in place of symbolic ones.
            A program without these symbols ignores the others. It is needed if a program depends on a size.
        format: "rlxa", or "stablehlo" for other runtimes: StableHLO as text and as `jax.export` reads it, and the
            parameters as safetensors.
        overwrite: replace an earlier artifact at `path`.

    Returns:
        The artifact, which prints its digest and expiry.

    Raises:
        MissingWeightError: the model has no parameters. UnsupportedError: there are several processes; the model is
            loaded from an artifact; a program trains, or cannot be exported with symbolic sizes; a dtype that
            safetensors lacks; no flatbuffers.
        RequestError, GraphError: an argument is not valid; `sizes` has more tokens than the model has positions.
        TargetExistsError, NoSpaceError, SaveFailedError: as `rlx_jax.save`.
    """
    names = programs
    if names is None:
        names = ("prefill", "extend") if model.program in CACHED_PROGRAMS else (model.program,)
    if isinstance(names, str) or not names:
        raise RequestError(f"export: programs is {shown(programs)}; expected a list of names, such as ['forward']")
    if "train" in names:
        raise UnsupportedError(
            f"{model.name}: export: programs has 'train', and an artifact does not train; export 'forward', or the "
            'model compiled with program="forward"'
        )
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"export: given is {shown(given)}; expected a list of names of optional inputs")
    given, optional = list(given), [d.name for d in model.programs.flows[model.name]._inputs if d.optional]
    check_names(given, optional, f"export: given: {model.name} has no optional input", "; it has", RequestError)
    sets = dict.fromkeys((frozenset[str](), frozenset(given)))
    keys = tuple(ProgramKey(model.name, name, inputs) for name in names for inputs in sets)
    plan = ArtifactPlan("model", keys)
    return write_artifact(model, path, plan, platforms, sizes, format, overwrite)


def write_artifact(
    model: Any, path: str | os.PathLike[str], plan: ArtifactPlan, platforms: Sequence[str] | None = None,
    sizes: Sequence[SizeMap] | None = None, format: str = "rlxa", overwrite: bool = False,
) -> Artifact:  # fmt: skip
    """Write an artifact; see `export_model`."""
    if not isinstance(path, str | os.PathLike):
        raise RequestError(f"export: path is {shown(path)}; expected a file name that ends in {SUFFIX}")
    programs, target = model.programs, os.fsdecode(path)
    entries = _param_entries(model)
    platform_names = _check_platforms(platforms)
    check_names([format], FORMATS, "export: there is no format", "; there are", RequestError)
    if format == "rlxa" and not target.endswith(SUFFIX):
        raise RequestError(f"export: path is {shown(target)}; expected a file name that ends in {SUFFIX}")
    size_choices = _check_sizes(sizes)
    symbols = {*DIMENSIONS.values(), *(name for key in plan.keys for name in programs.template(key).symbols)}
    for choice in size_choices:
        check_names(choice, sorted(symbols), "export: sizes: no program has", "; there are", RequestError)
        for key in plan.keys:
            limit = programs.template(key).bounds.positions
            if limit is not None and choice.get("seq", 1) > limit:
                raise SequenceLengthError(f"export: sizes: seq is {choice['seq']}, and the model has {limit} positions")
    frozen.require_flatbuffers("export")
    records: list[frozen.ProgramRecord] = []
    modules: dict[str, export.Exported] = {}
    for key in plan.keys:
        forms = []
        for form_sizes, form_platforms, exported in _export_forms(programs, key, platform_names, size_choices):
            forms.append(frozen.ExportedForm(f"program-{len(modules)}", form_sizes, form_platforms))
            modules[forms[-1].member] = exported
        records.append(frozen.record_of(programs.template(key), key, tuple(forms)))
    records += [frozen.record_of(programs.template(key), key, ()) for key in plan.interfaces]
    created = datetime.date.today()
    expires = created + datetime.timedelta(days=180)  # `jax.export` promises six months
    content: dict[str, Any] = {
        "kind": plan.kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "calling_convention":
                     max(m.calling_convention_version for m in modules.values())},
        "created": created.isoformat(),
        "expires": expires.isoformat(),
        "platforms": list(platform_names),
        "flow": encode(_flow_record(model, plan, tuple(records))),
        "settings": dict(plan.settings),
        "files": sorted(plan.files),
    }  # fmt: skip
    blobs = {name: bytes(exported.serialize()) for name, exported in modules.items()}
    nbytes = sum(map(len, (*blobs.values(), *plan.files.values()))) + sum(e.nbytes for e in entries)
    if format == STABLEHLO:
        sha256, size = "", _write_directory(target, modules, blobs, entries, content, nbytes, overwrite)
    else:
        members: dict[str, Content] = {**blobs, **{f"files/{name}": raw for name, raw in plan.files.items()}}
        members[PARAMS] = lambda write: write_tensors(write, entries)
        sha256, size = write_archive(target, members, content, nbytes, overwrite)
    described = tuple(
        frozen.describe_key(key) + (f" of {', '.join(f'{n} {s}' for n, s in form.sizes.items())}" if form.sizes else "")
        + (f" on {', '.join(form.platforms)}" if form.platforms else "")
        for key, record in zip(plan.keys, records, strict=False) for form in record.forms
    )  # fmt: skip
    return Artifact(target, sha256, size, platform_names, created, expires, described)


def _param_entries(model: Any) -> list[Entry]:
    """Return the parameters to write, after checking that the model can be exported."""
    programs = model.programs
    params = model.concrete_params("export")
    check_params(params, model.param_specs())
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"{model.name}: export: the model runs in {jax.process_count()} processes, and one process has to write "
            "all parameters: load and export it in a single process"
        )
    if isinstance(programs.flows[model.name], frozen.FrozenFlow):
        raise UnsupportedError(f"{model.name}: export: the model was loaded from an artifact: copy the file")
    types = programs.layout.types()
    if unknown := [name for name, t in types.items() if t.dtype not in DTYPES.values()]:
        raise UnsupportedError(
            f"{model.name}: export: parameter {quote(unknown[0])} is {short_name(types[unknown[0]].dtype)}, which "
            "safetensors cannot store; precision.weights = 'bf16' in the profile stores it as floats"
        )
    return [Entry(name, t, lambda name=name: np.asarray(jax.device_get(params[name]))) for name, t in types.items()]  # type: ignore[misc]


def _check_platforms(platforms: Sequence[str] | None) -> tuple[str, ...]:
    """Return the platforms of an export, checked."""
    if platforms is None:
        return (export.default_export_platform(),)
    if isinstance(platforms, str) or not platforms:
        raise RequestError(f"export: platforms is {shown(platforms)}; expected a list of {listing(PLATFORMS)}")
    check_names(platforms, PLATFORMS, "export: there is no platform", "; there are", RequestError)
    return tuple(dict.fromkeys(platforms))


def _check_sizes(sizes: Sequence[SizeMap] | None) -> list[dict[str, int]]:
    """Return the choices of sizes, checked; none for symbolic sizes."""
    if sizes is None:
        return []
    if not isinstance(sizes, list | tuple) or not sizes or not all(isinstance(choice, Mapping) for choice in sizes):
        raise RequestError(f'export: sizes is {shown(sizes)}; expected a list such as [{{"batch": 1, "seq": 128}}]')
    return [{str(n): check_integer(f"sizes: {n}", size, 1) for n, size in choice.items()} for choice in sizes]


def _export_forms(
    programs: Programs, key: ProgramKey, platforms: tuple[str, ...], choices: Sequence[dict[str, int]]
) -> list[tuple[dict[str, int], tuple[str, ...], export.Exported]]:
    """Return a program as StableHLO: with symbolic sizes, or else for each choice of sizes; with what is fixed.

    Raises:
        UnsupportedError: the program cannot be exported with symbolic sizes, and neither the caller nor the profile
            has sizes; or one of them is missing.
    """
    template = programs.template(key)
    label = f"{key.flow}: export: {frozen.describe_key(key)}"
    if not choices:
        try:
            forms = _symbolic_forms(programs, key)
            return [each for form in forms for each in _export_program(programs, key, form, platforms)]
        except Exception as cause:  # JAX has no class for what a symbolic size does not allow
            if isinstance(cause, RlxError) and not isinstance(cause, UnsupportedError):
                raise
            choices = _bucket_sizes(programs, key)
            if not choices:
                raise UnsupportedError(
                    f"{label} cannot have symbolic sizes ({first_line(cause)}): pass sizes=[{{…}}] with a number for "
                    f"each of {listing(sorted(template.symbols))}"
                ) from cause
    bound: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for choice in choices:
        choice = {**programs.ring_sizes(template, choice.get("context")), **choice}
        if missing := sorted(template.symbols.difference(choice)):
            raise UnsupportedError(f"{label}: sizes has no number for {listing(missing)}: {choice}")
        form = {name: choice[name] for name in sorted(template.symbols)}
        bound[tuple(form.items())] = form
    return [each for form in bound.values() for each in _export_program(programs, key, form, platforms)]


def _symbolic_forms(programs: Programs, key: ProgramKey) -> list[dict[str, int]]:
    """Return the sizes that are fixed in each form of a program; the others are symbols.

    A decoding step has forms of its own: with one token there is no chunk to pad, and with the slots of a window a ring
    buffer is read in place.
    """
    template = programs.template(key)
    forms: list[dict[str, int]] = [{}]
    if key.program == "extend" and "seq" in template.symbols:
        forms.append({"seq": 1})
        if rings := programs.ring_sizes(template, None):
            forms.append({"seq": 1, **rings})
    return forms


def _bucket_sizes(programs: Programs, key: ProgramKey) -> list[dict[str, int]]:
    """Return the sizes of a program within the buckets of the profile; none if a list of buckets is missing."""
    symbols = programs.template(key).symbols
    lists = {dim: getattr(programs.settings.buckets, name) for name, dim in DIMENSIONS.items() if dim in symbols}
    if key.program == "extend" and lists.get("seq"):
        lists["seq"] = (1, *lists["seq"])
    return [dict(zip(lists, numbers, strict=True)) for numbers in itertools.product(*lists.values())] if lists else []


def _export_program(
    programs: Programs, key: ProgramKey, sizes: dict[str, int], platforms: tuple[str, ...]
) -> Iterator[tuple[dict[str, int], tuple[str, ...], export.Exported]]:
    """Yield a program as StableHLO, with these sizes fixed, for each group of platforms with the same implementations.

    A group is () if it has all platforms. A single program that chooses at run time would have all implementations,
    which loading reads and XLA has to remove.
    """
    for group, run in _platform_functions(programs, key, sizes, platforms).items():
        yield sizes, () if group == platforms else group, _exported(programs, key, sizes, run, group)


def apply_any_size(programs: Programs, key: ProgramKey, params: Any, inputs: Any) -> Any:
    """Run a program without a state on inputs with symbolic sizes, as `jax.export` traces them.

    The implementations are those that XLA has for the platform that JAX runs on.
    """
    ((_, run),) = _platform_functions(programs, key, {}, (export.default_export_platform(),)).items()
    return _exported(programs, key, {}, run, PLATFORMS).call(params, {}, inputs)


def _exported(
    programs: Programs, key: ProgramKey, sizes: SizeMap, run: Function, platforms: tuple[str, ...]
) -> export.Exported:
    """Return a function of a program as StableHLO, with these sizes fixed."""
    bound = replace(key, binding=tuple(sorted(sizes.items())))
    params, state, inputs = argument_specs(programs, bound)
    donated = (1,) if programs.settings.plan.donate_state and state else ()
    placements = sharding_options(programs.shardings(bound, inputs), state, ())
    jitted = jax.jit(with_split_inputs(run, key.program), donate_argnums=donated, **placements)
    with contextlib.ExitStack() as stack, use_model_mesh(programs.model_sharding):
        # Programs have no paths of source files on this machine.
        stack.callback(jax.config.update, SOURCE_PATHS, getattr(jax.config, SOURCE_PATHS))
        jax.config.update(SOURCE_PATHS, ".*")
        return export.export(jitted, platforms=platforms)(params, state, inputs)


def _platform_functions(
    programs: Programs, key: ProgramKey, sizes: SizeMap, platforms: tuple[str, ...]
) -> dict[tuple[str, ...], Function]:
    """Return a program with the implementations that XLA has for each platform, by platforms with the same ones.

    The choices depend on sizes. Symbols count as the sizes of a usual request. With symbolic sizes mixtures of experts
    have none, as their implementations count tokens while they are traced.
    """
    template = programs.template(key)
    graph = bind_leaves(template.mir, sizes, TypeCache()) if sizes else template.mir
    has_symbols = not template.symbols <= sizes.keys()
    usual = {**dict.fromkeys(template.symbols, 1), **USUAL_SIZES, **programs.ring_sizes(template, None), **sizes}
    static = bind_leaves(graph, usual, TypeCache())
    plan = replace(programs.settings.plan, target="cpu", implementation="auto", kernels=False, donate_inputs=())
    groups: dict[frozenset[tuple[Call, Choice]], list[str]] = {}
    for platform in platforms:
        device = replace(named_device(platform), cudnn=None)
        static_choices = choose_implementations(static, device, replace(plan, products="xla", packed=False))
        # Both graphs have the same nodes, and differ in the sizes alone.
        choices = {
            call_of(inner, node): static_choices[call]
            for (inner, node), (static_inner, static_node) in zip(graph.walk(), static.walk(), strict=True)
            if isinstance(node.op, Mir)
            and (call := call_of(static_inner, static_node)) in static_choices
            and not (has_symbols and isinstance(node.op, ExpertFfn))
        }
        groups.setdefault(frozenset(choices.items()), []).append(platform)
    plans = {tuple(names): replace(plan, choices=dict(chosen)) for chosen, names in groups.items()}
    return {
        names: make_function(Lir(graph, chosen), programs.layout, programs.model_sharding)
        for names, chosen in plans.items()
    }


def _flow_record(model: Any, plan: ArtifactPlan, records: tuple[frozen.ProgramRecord, ...]) -> frozen.FlowRecord:
    """Return the description of a model in the manifest."""
    programs, flow = model.programs, model.programs.flows[model.name]
    sharding = programs.model_sharding
    every = frozenset(d.name for d in flow._inputs if d.optional)
    optional_sets = dict.fromkeys((frozenset[str](), every, *(key.optional_inputs & every for key in plan.keys)))
    return frozen.FlowRecord(
        name=model.name,
        inputs=flow._inputs,
        program=model.program,
        params=programs.layout.types(),
        programs=records,
        mesh=None if sharding is None else frozen.MeshRecord.of(sharding, programs.layout.params),
        profile=programs.settings.profile.replace(fusion={"target": "auto"}).to_toml(),
        binding=dict(flow._binding),
        unread={tuple(sorted(s)): tuple(sorted(programs.unread_inputs(model.name, s))) for s in optional_sets},
    )


def _write_directory(
    target: str, modules: Mapping[str, export.Exported], blobs: Mapping[str, bytes], entries: Sequence[Entry],
    content: Mapping[str, Any], nbytes: int, overwrite: bool,
) -> int:  # fmt: skip
    """Write a directory for other runtimes, and return the bytes of its programs."""
    if overwrite:
        raise RequestError("export: overwrite=True is for a file; remove the directory, or export to another one")
    with atomic_directory(os.path.realpath(target), False, nbytes) as new:
        os.mkdir(new)
        for name, exported in modules.items():
            write_synced(os.path.join(new, f"{name}.bin"), blobs[name])
            write_synced(os.path.join(new, f"{name}.mlir"), exported.mlir_module().encode())
        write_synced(os.path.join(new, "manifest.json"), json.dumps(content, indent=1).encode())
        with open(os.path.join(new, PARAMS), "xb") as file:
            write_tensors(file.write, entries)
    return sum(map(len, blobs.values()))
