"""Templates and compiled programs by name and key, for hosts that keep tables of their own.

`ModelCompilePipeline` has the three steps of `rlx_jax.compile`, over the same `Programs`: a template is built once,
specialised once for each choice of sizes, and compiled once. `CompileCache` has a model for each key,
`DynamicDimCompileCache` one template with a program for each key, and `BucketedCompileCache` programs for a few sizes
that inputs are padded to. `CausalLM` and `Encoder` do all of it by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.compiler.compile_pipeline import CompileResult
from rlx_jax.compiler.executable import Executable
from rlx_jax.compiler.execution import (
    CompilationMode,
    CompileKeywords,
    ModelComponent,
    ModelExecutionConfig,
    compile_options_for,
)
from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.compiler.manifest import BindingManifest
from rlx_jax.compiler.settings import choose_settings, with_target
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, RequestError, quote
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.profiles import CompileProfile
from rlx_jax.profiles.profile import field_changes
from rlx_jax.program import Buildable
from rlx_jax.runtime.aot_cache import AotCache, source_digest
from rlx_jax.runtime.compile_flow import compile
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_program import argument_specs, key_with_sizes
from rlx_jax.runtime.model_setup import as_flow, make_programs
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.weights.format import OpenOptions

__all__ = [
    "BucketedCompileCache", "CompileCache", "DynamicDimCompileCache", "ModelCompilePipeline", "Qwen35CompileCache",
    "specialize_entry",
]  # fmt: skip

# Makes the flow of a model, or a module, a recipe or a built flow: whatever `rlx_jax.compile` takes.
BuildHir = Callable[[], Any]
KeywordsLike = CompileKeywords | None
DEFAULT_CAPACITY = 8


class KeyedEntries:
    """What is compiled for each key of a caller, at most `capacity`; the first is dropped first, and a hit changes no
    order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = check_integer("capacity", capacity, 1)
        self._entries: dict[int, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    contains = __contains__

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is compiled."""
        return not self._entries

    def _keep(self, key: int, entry: Any) -> None:
        """Keep the entry of a new key."""
        self._entries[key] = entry
        if len(self._entries) > self.capacity:
            del self._entries[next(iter(self._entries))]


class ModelCompilePipeline(KeyedEntries):
    """The compile of one model in three steps, each of which runs once for its arguments.

    Executables are kept by the caller's keys, at most `capacity`, and the first one is dropped first. The first call
    with a `build_hir` decides the model, and the first template the profile: another profile is an error.

    >>> from rlx_jax.compiler.graph_module import GraphModule
    >>> def build():
    ...     return GraphModule.define("m", lambda m: m.relu(m.input("x", ("batch", 8))))
    >>> pipeline = ModelCompilePipeline("cpu")
    >>> executable = pipeline.get_or_compile(1, {"batch": 2}, build)
    >>> len(pipeline), pipeline.has_template
    (1, True)

    Attributes:
        device: the platform or device to compile for; "auto" is the one that JAX runs on.
        capacity: the number of executables to keep.
        aot: the planned programs on disk; None without.
    """

    def __init__(self, device: str = "auto", capacity: int = DEFAULT_CAPACITY) -> None:
        self.device = CompileProfile().replace(fusion={"target": device}).fusion.target
        super().__init__(capacity)  # of the sizes and the profile of an executable, it, and its manifest
        self.aot: AotCache | None = None
        self.template_result: CompileResult | None = None
        self._flow: Buildable | None = None
        self._base: CompileProfile | None = None  # before what a component changes
        self._programs: Programs | None = None

    def with_aot(self, directory: str | os.PathLike[str]) -> ModelCompilePipeline:
        """Keep planned programs in a directory, for components of the mode `AOT`; return the pipeline itself."""
        self.aot = AotCache(directory)
        return self

    # -- the three steps ---------------------------------------------------------------------

    def build_template(self, build_hir: BuildHir, options: KeywordsLike = None) -> CompileResult:
        """Build and lower the model with symbolic sizes; a later call returns the same result and builds nothing.

        Args:
            build_hir: returns a flow, a module, a recipe, or a built flow.
            options: keywords of `rlx_jax.compile`, as `compile_options_for` returns them; by default the profile of
                the flow.

        Raises:
            RequestError: there is a template with another profile. Others as `rlx_jax.compile`.
        """
        profile = self._profile(build_hir, options)
        if self._programs is None or self.template_result is None:
            self._programs = make_programs([self._flow], None, OpenOptions(profile=profile), merge=False)
            (name,) = self._programs.flows
            template = self._programs.template(ProgramKey(name, "forward"))
            self.template_result = CompileResult.of(template, self._programs.settings)
        _check_profile("the template", self._programs.settings.profile, profile)
        return self.template_result

    ensure_template = build_template

    def specialize_template(self, binding: Mapping[str, int]) -> CompileResult:
        """Give each symbol of the template a size and plan the program; once for each choice of sizes.

        Raises:
            GraphError: there is no template yet, or a size is missing or unknown. ShapeError: it is not a number.
        """
        programs, template = self._require_template("specialize_template")
        key = self._key(programs, binding)
        lir = programs.function(key).lir
        return CompileResult(lir, template.fusion, template.template, template.settings, dict(key.binding))

    def compile_lir(self, result: CompileResult) -> Executable:
        """Compile a specialised program with XLA; `executable.run(params, state, inputs)` returns outputs and state.

        Raises:
            GraphError: it has symbolic sizes.
        """
        if result.has_dynamic_dims:
            raise GraphError(
                f"{result.lir.graph.name}: no size of {', '.join(result.dynamic_symbols)}: specialise it first"
            )
        ours, programs = self.template_result, self._programs
        if ours is not None and programs is not None and result.template is ours.template:
            return self._compile(programs, result.binding)
        # planned before, such as by `AotCache`
        programs = make_programs([GraphModule.from_lir(result.lir)], None, OpenOptions(), merge=False)
        return self._compile(programs, {})

    def get_or_compile(
        self, key: int, binding: Mapping[str, int], build_hir: BuildHir, options: KeywordsLike = None
    ) -> Executable:
        """Return the executable of a key; all three steps run for a new one.

        Raises:
            RequestError: the key has an executable for other sizes or another profile. Others as the steps.
        """
        profile = self._profile(build_hir, options)

        def make() -> CompileResult:
            self.build_template(build_hir, options)
            return self.specialize_template(binding)

        return self._entry(key, binding, profile, make)[0]

    # -- components --------------------------------------------------------------------------

    def get_or_compile_component(
        self, component: ModelComponent | ModelExecutionConfig, build_hir: BuildHir, options: KeywordsLike = None
    ) -> tuple[Executable, BindingManifest]:
        """Return the executable of a component and the manifest of its program.

        Without options, a configuration brings the profile of its preset. `quant` and `kernel_dispatch` of the
        component change the profile; a component of the mode `AOT` takes its planned program from disk.

        Raises:
            RequestError: the mode is `AOT`, and the pipeline has no directory. Others as `get_or_compile`.
        """
        if isinstance(component, ModelExecutionConfig):
            options = options or {"profile": component.preset.profile()}
            component = component.component
        if not isinstance(component, ModelComponent):
            raise RequestError(f"component: expected a ModelComponent, got {type(component).__name__}")
        profile = self._profile(build_hir, options, component)
        options = {"profile": profile}
        key, sizes = component.cache_key(), component.dim_binding()

        def make() -> CompileResult:
            if component.compilation_mode != CompilationMode.AOT:
                return self.specialize_template(self.build_template(build_hir, options).known_sizes(sizes))
            if self.aot is None:
                raise RequestError("a component of the mode 'aot' needs a directory: call with_aot(path) first")
            return self.get_or_specialize_aot(self.aot, component.aot_disk_base(), key, sizes, build_hir, options)

        return self._entry(key, sizes, profile, make)

    def get_or_specialize_aot(
        self, aot: AotCache, disk_base: str, key: int, binding: Mapping[str, int], build_hir: BuildHir,
        options: KeywordsLike = None,
    ) -> CompileResult:  # fmt: skip
        """Return the planned program of a component from disk; without an entry the first two steps run, and write it.

        The entry is used only for the same blocks, profile, device, dtype and release, so that no pass runs and
        nothing is planned.

        Args:
            aot: the planned programs on disk.
            disk_base: the name of the entry, as `ModelComponent.aot_disk_base` returns it.
            key: the key of the executable.
            binding: sizes by symbol; symbols that the program does not have are left out.
            build_hir, options: as `build_template`.

        Raises:
            UnsupportedError: the model calls a Python function (`emit.jax`), which is not written to files.
        """
        profile = self._profile(build_hir, options)
        built = self._open(build_hir).build()
        digest = source_digest(built.hir, choose_settings(built, profile, False, "forward"))

        def make() -> Lir:
            template = self.build_template(build_hir, options)
            return self.specialize_template(template.known_sizes(binding)).lir

        return CompileResult.planned(aot.specialize_cached(f"{disk_base}-{key:016x}", binding, digest, make))

    # -- manifests ---------------------------------------------------------------------------

    def template_binding_manifest(self) -> BindingManifest:
        """Return the manifest of the template, in which arrays with symbolic sizes have 0 bytes.

        Raises:
            GraphError: there is no template yet.
        """
        return self._require_template("template_binding_manifest")[1].manifest()

    def binding_manifest_for_binding(self, binding: Mapping[str, int]) -> BindingManifest:
        """Return the manifest of the program with these sizes; raises as `specialize_template`."""
        return self.specialize_template(binding).manifest()

    def binding_manifest_for_component(self, component: ModelComponent) -> BindingManifest:
        """Return the manifest of the program with the sizes of a component; raises as `specialize_template`."""
        template = self._require_template("binding_manifest_for_component")[1]
        return self.binding_manifest_for_binding(template.known_sizes(component.dim_binding()))

    # -- executables -------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        """Return whether the template is built."""
        return self.template_result is not None

    def _open(self, build_hir: BuildHir) -> Buildable:
        """Return the flow of the pipeline; the first call makes it."""
        if self._flow is None:
            if not callable(build_hir):
                raise RequestError(
                    f"build_hir: expected a function that returns a flow or a module, got {type(build_hir).__name__}"
                )
            self._flow = as_flow(build_hir())
        return self._flow

    def _profile(
        self, build_hir: BuildHir, options: KeywordsLike, component: ModelComponent | None = None
    ) -> CompileProfile:
        """Return the profile of a request for the device of the pipeline, with what a component changes.

        Without options it is the profile of the first request, which takes the flow's.

        Raises:
            ProfileError: the profile is for another device. RequestError: there is another option.
        """
        if unknown := [name for name in options or {} if name != "profile"]:
            raise RequestError(f"options: {quote(unknown[0])}: expected profile, as compile_options_for returns it")
        flow = self._open(build_hir)
        profile = CompileProfile.of(options["profile"]) if options else self._base
        if profile is None:
            profile = flow.build().profile or CompileProfile.auto()
        profile = with_target(profile, self.device, "the device of the pipeline")
        self._base = self._base or profile
        return profile if component is None else compile_options_for(profile, component)["profile"]

    def _require_template(self, operation: str) -> tuple[Programs, CompileResult]:
        if self._programs is None or self.template_result is None:
            raise GraphError(f"{operation}: there is no template yet: build_template(build_hir) first")
        return self._programs, self.template_result

    def _key(self, programs: Programs, binding: Mapping[str, int]) -> ProgramKey:
        (name,) = programs.flows
        return key_with_sizes(programs, ProgramKey(name, "forward"), binding)

    def _compile(self, programs: Programs, binding: Mapping[str, int]) -> Executable:
        """Return the compiled program of some sizes."""
        key = self._key(programs, binding)
        return programs.executable(key, *argument_specs(programs, key))

    def _entry(
        self, key: int, binding: Mapping[str, int], profile: CompileProfile, make: Callable[[], CompileResult]
    ) -> tuple[Executable, BindingManifest]:
        """Return the executable of a key, compiled from the planned program that `make` returns if it is new.

        Raises:
            RequestError: the key has an executable for other sizes or another profile.
        """
        if key not in self._entries:
            result = make()
            self._keep(key, (dict(binding), profile, self.compile_lir(result), result.manifest()))
        sizes, compiled_profile, executable, manifest = self._entries[key]
        if sizes != dict(binding):
            raise RequestError(
                f"ModelCompilePipeline: key {key} has an executable for {sizes}, not for {dict(binding)}"
            )
        _check_profile(f"key {key}", compiled_profile, profile)
        return executable, manifest


def _check_profile(where: str, ours: CompileProfile, requested: CompileProfile) -> None:
    """Check that a request has the profile of what was compiled before.

    Raises:
        RequestError: it has another one.
    """
    if changes := [f"{c.name} = {c.theirs}" for c in field_changes(ours, requested)]:
        raise RequestError(
            f"ModelCompilePipeline: {where} has another profile, without {', '.join(changes)}: use a "
            "pipeline for each profile"
        )


def specialize_entry(
    pipeline: ModelCompilePipeline, component: ModelComponent, build_hir: BuildHir, options: KeywordsLike = None
) -> tuple[Executable, BindingManifest]:
    """Return `pipeline.get_or_compile_component(…)`."""
    return pipeline.get_or_compile_component(component, build_hir, options)


class Qwen35CompileCache(ModelCompilePipeline):
    """The pipeline of a Qwen 3.5, with a directory for its planned programs.

    Args:
        directory: for planned programs, once `with_aot()` is called.
        device, capacity: as `ModelCompilePipeline`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], device: str = "auto", capacity: int = DEFAULT_CAPACITY
    ) -> None:
        super().__init__(device, capacity)
        self.directory = directory

    def with_aot(self, directory: str | os.PathLike[str] | None = None) -> ModelCompilePipeline:
        """Keep planned programs in the directory; return the pipeline itself."""
        return super().with_aot(self.directory if directory is None else directory)

    def get_or_compile_component(
        self, component: ModelComponent | ModelExecutionConfig, build_hir: BuildHir, options: KeywordsLike = None
    ) -> tuple[Executable, BindingManifest]:
        """Return the executable and the manifest of a component, compiled in the mode `AOT` after `with_aot()`."""
        if self.aot is not None:
            component = component.with_compilation_mode(CompilationMode.AOT)
        return super().get_or_compile_component(component, build_hir, options)


class CompileCache(KeyedEntries):
    """Compiled models by key, at most `capacity`; the first one is dropped first, and a hit changes no order."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity)

    def get_or_compile(self, key: int, build_hir: BuildHir, **options: Any) -> CompiledModel:
        """Return the model of a key; a new one is `rlx_jax.compile(build_hir(), **options)`."""
        if key not in self._entries:
            self._keep(key, compile(build_hir(), **options))
        model: CompiledModel = self._entries[key]
        return model


class DynamicDimCompileCache(ModelCompilePipeline):
    """A pipeline with its model: one template with symbolic sizes, and an executable for each key.

    Args:
        build_hir, options: as `ModelCompilePipeline.build_template`.
        device, capacity: as `ModelCompilePipeline`.
    """

    def __init__(
        self, build_hir: BuildHir, options: KeywordsLike = None, device: str = "auto", capacity: int = DEFAULT_CAPACITY
    ) -> None:
        super().__init__(device, capacity)
        self._arguments = build_hir, options

    def get_or_specialize(self, key: int, binding: Mapping[str, int]) -> Executable:
        """Return the executable of a key; raises as `ModelCompilePipeline.get_or_compile`."""
        return self.get_or_compile(key, binding, *self._arguments)


@dataclass(frozen=True)
class BucketedCompileCache:
    """The sizes that inputs are padded to, in ascending order, and a function that returns the program of a size.

    Attributes:
        extents: the upper bounds of the buckets.
        program: returns, for an extent, a function from inputs by name to a sequence of outputs.
    """

    extents: tuple[int, ...]
    program: Callable[[int], Callable[[Mapping[str, Any]], Sequence[Any]]]

    def __post_init__(self) -> None:
        sizes = [check_integer("extents", extent, 1) for extent in self.extents]
        if not sizes or sizes != sorted(set(sizes)):
            raise RequestError(f"extents: expected sizes in ascending order, got {quote(self.extents)}")

    @staticmethod
    def power_of_two_ladder(low: int, high: int) -> tuple[int, ...]:
        """Return the powers of two from `low`, rounded up, to the first that is at least `high`.

        >>> BucketedCompileCache.power_of_two_ladder(3, 20)
        (4, 8, 16, 32)
        """
        low, high = check_integer("low", low, 1), check_integer("high", high, 1)
        first, last = (low - 1).bit_length(), (high - 1).bit_length()
        return tuple(1 << n for n in range(first, max(first, last) + 1))

    def bucket(self, extent: int) -> int | None:
        """Return the smallest bucket for an extent; None if it is larger than all."""
        extent = check_integer("extent", extent, 1)
        return next((size for size in self.extents if size >= extent), None)

    def run_padded(
        self, extent: int, inputs: Mapping[str, Any], padded: Sequence[str], sliced: Sequence[int] = ()
    ) -> tuple[Any, ...] | None:
        """Run the program of the bucket, and return its outputs; None if the extent is larger than all buckets.

        Args:
            extent: the number of rows of the inputs.
            inputs: arrays by name.
            padded: the names of the inputs to which rows of zeros are added.
            sliced: the numbers of the outputs of which only the first `extent` rows are returned.

        Raises:
            RequestError: a padded input is missing or has another number of rows, there is no output of a number in
                `sliced`, or it does not have the rows of the bucket.
        """
        size = self.bucket(extent)
        if size is None:
            return None
        arrays = dict(inputs)
        for name in padded:
            rows = np.shape(arrays[name])[:1] if name in arrays else None
            if rows != (extent,):
                raise RequestError(f"run_padded: input {quote(name)}: expected {extent} rows, got {rows and rows[0]}")
            widths = [(0, size - extent)] + [(0, 0)] * (np.ndim(arrays[name]) - 1)
            arrays[name] = np.pad(np.asarray(arrays[name]), widths)
        outputs = tuple(self.program(size)(arrays))
        if wrong := [number for number in sliced if number not in range(len(outputs))]:
            raise RequestError(f"run_padded: there is no output {wrong[0]}; the program has {len(outputs)}")
        for number in sliced:
            if (shape := np.shape(outputs[number]))[:1] != (size,):
                raise RequestError(f"run_padded: output {number} has shape {shape}, not the {size} rows of the bucket")
        return tuple(output[:extent] if number in sliced else output for number, output in enumerate(outputs))
