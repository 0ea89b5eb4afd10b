"""This module defines `rlx_jax.compile` and its variants.

They build flows into programs, compile what has known sizes, and load the parameters while XLA compiles.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Unpack

import jax

from rlx_jax import errors
from rlx_jax.compiler.compile_cache import MAX_FIRST_PROGRAMS, FirstPrograms
from rlx_jax.compiler.pipeline import make_template
from rlx_jax.device import default_device, running_device
from rlx_jax.errors import listing, suggest_keywords
from rlx_jax.ir.param import packed_parameter
from rlx_jax.ir.weight_reads import WeightSource, has_any_values
from rlx_jax.lowering.hir.derive import PROGRAMS, unknown_program
from rlx_jax.lowering.lir.plan import layout_of
from rlx_jax.profiles import ProfileLike
from rlx_jax.program import Buildable, MtpFactory, Weights
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import flow_weights, make_programs
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Companion, Programs
from rlx_jax.weights.execute import load_leaves
from rlx_jax.weights.format import CompileOptions, OpenOptions
from rlx_jax.weights.overlay import with_initialized


@suggest_keywords()
def compile(
    flow: Any, weights: Weights = None, *, profile: ProfileLike | None = None, mesh: Any = None,
    program: str = "forward", strict: bool = True, missing: Literal["error", "init"] = "error",
    key: jax.Array | int | None = None,
) -> CompiledModel:  # fmt: skip
    """Compile a flow: build, lower and plan it now, and compile each choice of sizes at its first call.

    Args:
        flow: a `ModelFlow`, a recipe, a zero-argument function returning one, or a `BuiltModel`.
        weights: a mapping, a WeightSource or a path; a mapping of `jax.ShapeDtypeStruct` compiles without data.
        profile: a `CompileProfile`, the name of a preset or the path of a `*.rlx.toml`; by default the profile of the
            flow, else `auto`.
        mesh: the devices to shard the model over: a `jax.sharding.Mesh` with axes called data, fsdp, tensor, expert or
            context (or as the profile's `sharding` maps them), a number of devices, or "auto" for all devices.
        program: one of
            `forward`;
            `train`, the forward program to differentiate: layers run and are recomputed by `layers.roll` and
            `layers.remat` of the profile;
            `prefill` and `extend`, with a state;
            `verify`, an `extend` that does not advance the length of the state: the caller, who judges the logits, adds
            the number of accepted tokens;
            `explicit`, with cached keys and values as inputs `past_k_0`, `past_v_0` … and, longer, as outputs `kv.0.k`,
            `kv.0.v` …;
            `packed`, with several sequences in a row: `segments` gives the sequence of each token, and `positions` its
            place in that sequence.
        strict: raise an error for weights that nothing reads.
        missing: `"error"` refuses a weight that the source does not have; `"init"` initializes it, by the `init=` of
            its stage or else as `CompiledModel.init` does, and lists it in `report().initialised`. Its shape has to be
            known. The shapes of norms and biases are, and the shapes of repeated layers except for the width of their
            MLP; `flow.param(key, shape=…)` declares others. Without any weights all are initialized.
        key: the seed, or key of `jax.random`, for `missing="init"`.

    Returns:
        The compiled model.

    Raises:
        GraphError, WeightError, ProfileError: see `rlx_jax.errors`.
    """
    options = OpenOptions(strict=strict, profile=profile, mesh=mesh, missing=missing, key=key)
    (model,) = compile_flows([flow], weights, options, program).values()
    return model


@suggest_keywords("profile", "mesh", "program")
def init(recipe: Any, key: jax.Array | int, **options: Any) -> CompiledModel:
    """Compile a recipe, or a flow with known shapes, with every weight initialized at random.

    Each weight is initialized by the `init=` of its stage, or else as `CompiledModel.init` does; `report().initialised`
    lists them. The checkpoint that a recipe is bound to is not read, so that the result is the untrained model. Weights
    added to the recipe, such as the files of an adapter, are still loaded.

    Args:
        recipe: as `flow` of `compile`.
        key: a seed, or a key of `jax.random`. The same key gives the same values in every program.
        options: `profile`, `mesh` and `program` of `compile`.

    Returns:
        The compiled model.

    Raises:
        RequestError: no key. MissingWeightError: a shape that nothing declares. Others as `compile`.
    """
    if key is None:
        raise errors.RequestError("init: key is None; expected a seed, an integer, or a key of jax.random")
    return compile(recipe, {}, missing="init", key=key, **options)


@suggest_keywords(*CompileOptions.__annotations__)
def compile_together(
    flows: Sequence[Any], weights: Weights = None, *, program: str = "forward", **options: Unpack[CompileOptions]
) -> dict[str, CompiledModel]:
    """Compile several flows over one set of parameters.

    A weight that two flows read is loaded once. With `strict`, keys that no flow reads are an error. The arguments are
    as in `compile`.

    Returns:
        The compiled models by flow name. They share one `programs`.

    Raises:
        GraphError: two flows have the same name, or weights from different sources. ProfileError: their profiles
            differ.
    """
    return compile_flows(flows, weights, OpenOptions(**options), program)


def compile_flows(
    flows: Sequence[Any], weights: Weights, options: OpenOptions, program: str
) -> dict[str, CompiledModel]:
    """Return compiled models of several flows over one set of parameters; see `compile_together`.

    Raises:
        DeriveError: there is no such program.
    """
    if program not in PROGRAMS:
        raise errors.DeriveError(unknown_program(program))
    return finish_models(make_programs(flows, weights, options, merge=False, program=program), program)


def open_model(
    flow: Any, weights: Weights, options: OpenOptions, serves: tuple[str, ...], max_positions: int | None = None
) -> CompiledModel:
    """Return the compiled model of a flow that serves requests, with fused projections.

    A model that is compiled already is returned as it is, with all its programs.

    Args:
        flow: a flow, or a `CompiledModel`.
        weights, options: see `compile`.
        serves: the programs that requests run.
        max_positions: the limit of tokens in a sequence; None for the limit of the flow.

    Raises:
        RequestError: an argument that applies to compiling, with a model that is compiled already.
    """
    if not isinstance(flow, CompiledModel):
        programs = make_programs([flow], weights, options, merge=True, max_positions=max_positions, serves=serves)
        (model,) = finish_models(programs).values()
        return model
    arguments = {"weights": weights, "max_positions": max_positions}
    if surplus := [*(name for name, value in arguments.items() if value is not None), *options.changed_names()]:
        raise errors.RequestError(
            f"{flow.name} is compiled already: leave out {listing(surplus)}, or pass the flow itself"
        )
    return flow


def finish_models(programs: Programs, program: str = "forward") -> dict[str, CompiledModel]:
    """Return a model for each flow, and load their parameters while XLA compiles the programs with known sizes."""
    models = {name: CompiledModel(programs, name, program) for name in programs.flows}
    if not programs.layout.params:
        return {name: model.replace(params={}) for name, model in models.items()}
    source = programs.source
    if not has_any_values(source):
        if programs.init_key is None:
            return models
        (model,) = models.values()  # weights of several flows were initialized before, by `build_with_missing`
        built = model.template().built
        programs.initialized_keys = tuple(built.params)
        if not any(map(packed_parameter, programs.layout.params.values())):
            # Initialized under their storage sharding, so that no device has to hold all of them.
            return {model.name: model.replace(params=model.init(programs.init_key))}
        # Packed from their values as those of a checkpoint are, which are not needed after that.
        source = with_initialized(source, flow_weights(built, built.params, programs.init_key))
    assert source is not None
    target, runs = programs.settings.device.name, running_device()
    if target not in (runs.name, runs.kind):
        message = f"fusion.target is {target!r}, but JAX runs on {runs.name!r}: the plan is for another device"
        warnings.warn(f"{', '.join(models)}: {message}", errors.RlxWarning, stacklevel=3)
    # `jax.default_device` is a context of the caller's thread, which the loading thread does not see.
    device = default_device()
    cancelled = threading.Event()
    # Reading weights and XLA's compiler both release the GIL, so that loading and compiling overlap.
    with ThreadPoolExecutor(1 + MAX_FIRST_PROGRAMS) as pool:
        loading = pool.submit(load_params, programs, source, device, cancelled)
        try:
            load_ahead(programs, pool)
            for model in models.values():
                compile_if_static(model)
            params, seconds = loading.result()
        except BaseException:  # Ctrl-C too: leaving the pool waits for the loader, which should stop early
            cancelled.set()
            raise
    return {name: replace(model, load_seconds=seconds, params=params) for name, model in models.items()}


def load_ahead(programs: Programs, pool: Executor) -> None:
    """Load the programs that the last process with this model ran first, and lower their templates meanwhile.

    A CPU would read the weights later by as much.
    """
    if programs.model_sharding is None and running_device().kind != "cpu":
        content = programs.layout, programs.settings, [template.hir for template in programs.templates.values()]
        programs.first = FirstPrograms(content, pool)
        for key in programs.first.templates:
            programs.template(key)


def compile_if_static(model: CompiledModel) -> None:
    """Compile the program now if every size is known: the flow is static, or has a binding for its symbols."""
    inputs, sizes = model.template().mir.inputs, model.flow._binding
    if model.program in ("forward", "explicit") and all(i.type.symbols <= sizes.keys() for i in inputs):
        model.lower(**{i.input: i.type.bind(sizes).spec for i in inputs})  # type: ignore[arg-type]


def load_params(
    programs: Programs, source: WeightSource, device: Any, cancelled: threading.Event
) -> tuple[dict[str, jax.Array], float]:
    """Load the parameters from `source` onto `device`, or sharded over the model's mesh.

    Returns:
        The arrays by parameter name, and the seconds that loading took.
    """
    start = time.perf_counter()
    placement = programs.storage_shardings() or device
    params = load_leaves(programs.layout.params, source, placement, programs.report_progress, cancelled)
    return params, time.perf_counter() - start


def companion_model(
    model: CompiledModel, make: MtpFactory, key: Hashable = None, shares_all: bool = False
) -> CompiledModel:
    """Return a companion model, such as a drafter, that shares the weights of `model`.

    It is compiled once for each model and key. Parameters that the model has are shared; the others are loaded now.

    Args:
        model: the model with the weights.
        make: a function from the weights to the companion flow.
        key: tells several companions of a model apart; None for the drafter.
        shares_all: load no parameters, as they may have changed since `model` was loaded.

    Raises:
        MissingWeightError: there are no weights to read. Others as `make` and as `rlx_jax.compile`.
        UnsupportedError: with `shares_all`, the companion has a parameter that the model does not have.
    """
    params = model.concrete_params("drafting")
    companion = model.programs.companions((model.name, key), lambda: _make_companion(model, params, make, shares_all))
    names_by_program = model.programs.layout.by_program()
    shared_params = {
        name: params[names_by_program[p]]
        for name, p in companion.programs.layout.params.items()
        if p in names_by_program
    }
    (name,) = companion.programs.flows
    return CompiledModel(companion.programs, name, params={**companion.params, **shared_params})


def companion_programs(base: Programs, flow: Buildable) -> Programs:
    """Return the programs of a companion flow, with the weights, the settings and the devices of `base`."""
    built = flow.build(base.source)
    template = make_template(built, base.settings, "forward")
    layout = layout_of([template.hir], base.settings.plan.scan, base.settings.plan.packed)
    programs = Programs(
        {flow.name: flow}, base.source, base.settings, layout, {flow.name: built.captured}, base.progress
    )
    programs.builds.insert((flow.name, frozenset()), built)
    programs.templates.insert(ProgramKey(flow.name, "forward"), template)
    return programs


def _make_companion(model: CompiledModel, params: dict[str, Any], make: MtpFactory, shares_all: bool) -> Companion:
    """Build and lower the companion flow of a model, and load the parameters that the model does not have.

    Returns:
        The programs of the companion, and the loaded parameters.
    """
    base = model.programs
    if not shares_all and not has_any_values(base.source):
        raise errors.MissingWeightError(
            f"{model.name}: the weights are shapes without values, so the drafter's cannot be loaded: pass weights="
        )
    programs = companion_programs(base, make(base.source))
    programs.is_warm, layout = base.is_warm, programs.layout
    names_by_program = base.layout.by_program()
    missing = {name: program for name, program in layout.params.items() if program not in names_by_program}
    if shares_all and missing:
        raise errors.UnsupportedError(
            f"{model.name}: the edited flow reads {listing(missing)} by itself, and the model stores it fused with "
            "others: edit a block around it, or load the model with fusion.disable = ['merge_linears']"
        )
    if not missing:
        return Companion(programs, {})
    assert base.source is not None  # it has data
    # The device of the model's parameters; None if its choice was left to JAX.
    target = next((next(iter(a.devices())) for a in params.values() if isinstance(a, jax.Array) and a.committed), None)
    new_params = load_leaves(
        missing, base.source, programs.storage_shardings() or target, base.report_progress, threading.Event()
    )
    return Companion(programs, new_params)
