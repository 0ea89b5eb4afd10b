"""This module sets up the programs of a model: it builds the flows once, and chooses one profile and one layout.

It also initializes random weights, either those that the source does not have, before the model is compiled, or all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from rlx_jax import errors
from rlx_jax.compiler.meshes import make_model_sharding
from rlx_jax.compiler.pipeline import Template, facts_of, make_template
from rlx_jax.compiler.settings import (
    Settings,
    check_inputs,
    choose_profile,
    choose_settings,
    differences,
    with_model_sharding,
)
from rlx_jax.device import check_total_memory, out_of_memory
from rlx_jax.errors import listing, quote, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.ir.checkpoint_tensor import steps
from rlx_jax.ir.graph import Graph, Param
from rlx_jax.ir.param import Quantized, packed_parameter
from rlx_jax.ir.paths import Path, bind_path, path_text
from rlx_jax.ir.types import is_float
from rlx_jax.ir.weight_reads import WeightSource, has_any_values
from rlx_jax.lowering.inspect.hlo import without_layer_numbers
from rlx_jax.lowering.lir.plan import Layout, layout_of
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.lowering.sharding import check_divisible, shard_type
from rlx_jax.profiles import CompileProfile
from rlx_jax.profiles.effects import warn_without_effect
from rlx_jax.program import Buildable, Built, Weights
from rlx_jax.runtime.inputs import check_flag
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.random_keys import random_key
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.initial import initial_params, initial_weights
from rlx_jax.weights.overlay import has_values, with_initialized
from rlx_jax.weights.source import open_weights


def make_programs(
    flows: Sequence[Any], weights: Weights, options: OpenOptions, merge: bool, program: str = "forward",
    max_positions: int | None = None, serves: tuple[str, ...] = (),
) -> Programs:  # fmt: skip
    """Build each flow once, resolve the profile and choose one layout for all. Only shapes of weights are read.

    Args:
        flows: flows, recipes or functions, one for each model.
        weights, options: see `rlx_jax.compile`.
        merge: whether projections are fused if the profile leaves it open.
        program: the program that decides how layers run and are stored; all programs of the model follow it.
        max_positions: the limit of tokens in a sequence; None for the limit of the flow.
        serves: the programs of a model that serves requests of every size; if empty, calls run `program` alone.

    Returns:
        The programs of the model, with its first template of each flow.

    Raises:
        GraphError: two flows have the same name, there is no flow, or flows read weights from different sources.
        ProfileError: the profiles of the flows differ.
    """
    profile = None if options.profile is None else CompileProfile.of(options.profile)
    init_key = check_options(options)
    if weights is not None and any(hasattr(flow, "adapt_to") for flow in flows):  # recipes inspect the keys
        weights = open_weights(weights)
    flow_list = [as_flow(flow, weights) for flow in flows]
    if program == "train":
        for flow in flow_list:
            refuse_untrainable(flow)
    flows_by_name = {flow.name: flow if init_key is None else with_missing_declared(flow) for flow in flow_list}
    if not flows_by_name or len(flows_by_name) < len(flow_list):
        raise errors.GraphError(f"flows of one model have distinct names; got {listing([f.name for f in flow_list])}")
    builds = build_flows(flows_by_name, weights)
    builds, initialized = (builds, ()) if init_key is None else build_with_missing(flows_by_name, builds, init_key)
    builts = [*builds.values()]
    source = check_sources(builts, options.strict)
    settings = shared_settings({name: choose_settings(b, profile, merge, program) for name, b in builds.items()})
    if options.mesh is not None:
        settings = with_model_sharding(settings, make_model_sharding(options.mesh, builts, settings, program, serves))
    settings = replace(settings, max_positions=max_positions)
    # The cached programs are derived later, from the same parameters as `forward`.
    first = program if program in ("train", "explicit") else "forward"
    settings, layout, templates = plan_layout(builds, settings, first)
    if settings.model_sharding is not None:
        check_divisible(settings.model_sharding, layout.params.values())
    captured = {name: built.captured for name, built in builds.items()}
    programs = Programs(flows_by_name, source, settings, layout, captured, options.progress)
    programs.fuses_by_default, programs.planned_program = merge, program
    programs.initialized_keys, programs.init_key = initialized, init_key
    profiles = [(t, choose_profile(t.built, profile)) for t in templates.values() if t.built.plan is None]
    if any(used != CompileProfile.auto() for _, used in profiles):
        run = serves or (program,)
        warn_without_effect([facts_of(t, used, settings, run, bool(serves)) for t, used in profiles], 3)
    for name, flow in flows_by_name.items():
        check_inputs(settings.plan.donate_inputs, flow)
        programs.builds.insert((name, frozenset()), builds[name])
        programs.templates.insert(ProgramKey(name, first), templates[name])
    return programs


def check_quantized_blocks(settings: Settings, graphs: Sequence[Graph]) -> None:
    """Check that each glob of `precision.weights` selects a block with weights that are packed.

    Raises:
        ProfileError: one selects none; the message has a suggestion.
    """
    patterns = [pattern for pattern, scheme in settings.quantized if pattern.text != "**" and scheme != "keep"]
    paths: set[Path] = set()
    for graph in graphs if patterns else ():
        for inner, node in graph.walk():
            params = [op for v in node.inputs if isinstance(op := inner.nodes[v.node].op, Param)]
            paths.update(
                bind_path(node.origin.path, layer)
                for param in params
                for layer, program in enumerate(param.programs)
                if any(isinstance(step, Quantized) for step in steps(program))
            )
    for pattern in patterns:
        if not any(map(pattern.matches, paths)):
            names = sorted({without_layer_numbers(path_text(path)) for path in paths})
            choices = f"blocks are {listing(names, 8)}" if names else "this model has none"
            raise errors.ProfileError(
                f"precision.weights: {quote(pattern.text)} selects no block with a matrix of complete groups of 32 or "
                f"128 inputs; {choices}"
            )


def build_flows(flows: Mapping[str, Buildable], weights: Weights) -> Mapping[str, Built]:
    """Return each flow built. The weights are opened once.

    Flows that are bound to one source share the source of the first built flow, with its adapter.
    """
    builds: dict[str, Built] = {}
    sources = [getattr(flow, "_weights", None) for flow in flows.values()]
    one_source = sources[0] is not None and all(source is sources[0] for source in sources)
    for name, flow in flows.items():
        builds[name] = flow.build(weights)
        weights = builds[name].source if weights is not None or one_source else None
    return builds


def build_with_missing(
    flows: Mapping[str, Buildable], builds: Mapping[str, Built], init_key: jax.Array
) -> tuple[Mapping[str, Built], tuple[str, ...]]:
    """Initialize missing weights, and build the flows again over a source that includes them.

    Args:
        flows: the flows by name.
        builds: the built flows by name.
        init_key: the random key.

    Returns:
        The built flows, and the keys of the initialized weights. If none are missing, the flows are as before.
    """
    initialized = init_missing_weights([*builds.values()], init_key)
    if not initialized:
        return builds, ()
    source = with_initialized(next(iter(builds.values())).source, initialized)
    return {name: flow.build(source) for name, flow in flows.items()}, tuple(initialized)


def plan_layout(
    builds: Mapping[str, Built], settings: Settings, first: str
) -> tuple[Settings, Layout, dict[str, Template]]:
    """Choose one layout for all flows.

    Projections stay separate if fusing them would store them twice: if one flow fuses them and another does not, or if
    an optional input comes between products and the value that they share without it.

    Args:
        builds: the built flows by name.
        settings: the resolved profile.
        first: the program that the layout is planned for.

    Returns:
        The settings, with `merge` off if projections stay separate; the layout; and the template of each flow.
    """
    graphs = tuple(built.hir for built in builds.values())
    settings, layout = next(iter(builds.values())).once(_plan_layout, builds, settings, first, graphs)
    return settings, layout, {name: make_template(built, settings, first) for name, built in builds.items()}


def _plan_layout(
    builds: Mapping[str, Built], settings: Settings, first: str, graphs: tuple[Graph, ...]
) -> tuple[Settings, Layout]:
    """Return the settings and the layout; `graphs` are those of the builds, and the other arguments as above."""
    programs = [make_template(built, settings, first).hir for built in builds.values()]
    layout = layout_of(programs, settings.plan.scan, settings.plan.packed)
    twice = len(builds) > 1 and layout.duplicated_keys()
    if settings.merge and (
        twice or any(needs_other_params(built, layout, settings, first) for built in builds.values())
    ):
        return _plan_layout(builds, replace(settings, merge=False), first, graphs)
    check_quantized_blocks(settings, programs)
    return settings, layout


def needs_other_params(built: Built, layout: Layout, settings: Settings, first: str) -> bool:
    """Return whether a flow needs other parameters with its optional inputs than without them.

    This is possible only if an input may come between products: if it has floating values, so that it is no ids, mask
    or positions, or if blocks of the flow were edited by path.

    Args:
        built: the built flow.
        layout: the layout of the program without optional inputs.
        settings: the resolved profile.
        first: the program that the layout is planned for.
    """
    flow = built.flow
    optional_decls = [decl for decl in flow._inputs if decl.optional]
    may_differ = getattr(flow, "_block_edits", ()) or any(is_float(decl.type.dtype) for decl in optional_decls)
    if not optional_decls or not may_differ:
        return False
    optional = frozenset(decl.name for decl in optional_decls)
    try:
        complete = make_template(flow.build(built.source, optional, built.captured), settings, first, False, optional)
    except errors.RlxError:  # the optional inputs exclude each other, so that no call passes all of them
        return False
    return not layout.has_all_params(complete.hir, settings.plan.scan)


def shared_settings(settings_by_flow: Mapping[str, Settings]) -> Settings:
    """Return the settings that all flows share. Weights stay packed for training if one of the flows has adapters.

    Raises:
        ProfileError: the settings differ; the message lists the fields.
    """
    packed = any(settings.plan.packed for settings in settings_by_flow.values())
    (name, common), *rest = ((n, replace(s, plan=replace(s.plan, packed=packed))) for n, s in settings_by_flow.items())
    for other, settings in rest:
        if differ := differences(common, settings):
            raise errors.ProfileError(
                f"flows of one model share one profile, and {name!r} and {other!r} differ in {listing(differ)}; pass "
                "profile="
            )
    return common


def refuse_untrainable(flow: Buildable) -> None:
    """Refuse to train a flow with features that are not implemented for training, such as dropout.

    Raises:
        UnsupportedError: the flow has such a feature; the message explains which.
    """
    if isinstance(flow, ModelFlow) and flow._no_training:
        raise errors.UnsupportedError(f"{flow.name}: training: {flow._no_training}")


def as_flow(flow: Any, weights: Weights = None) -> Buildable:
    """Return the flow to build, from a ModelFlow, a GraphModule, a recipe, a zero-argument function or a Built.

    A recipe is adapted to the keys of `weights`, such as a common prefix or a head that is not tied to the embedding.

    Raises:
        GraphError: the value is no flow, or is compiled already.
    """
    if isinstance(flow, Buildable):
        return flow
    if isinstance(getattr(flow, "programs", None), Programs):
        raise errors.GraphError(
            "this model is compiled already: call it, replace its parameters with .replace(params=…), or compile its "
            "flow again for another mesh or profile"
        )
    if isinstance(getattr(getattr(flow, "model", None), "programs", None), Programs):
        raise errors.GraphError(f"this {type(flow).__name__} is compiled already: pass its .model to another one")
    if isinstance(flow, type) and hasattr(flow, "assemble"):
        raise errors.GraphError(
            f"{flow.__name__} is a class, no recipe: make one with recipe_for(path) or for_prefill(config)"
        )
    if callable(getattr(flow, "assemble", None)):
        source = None if weights is None else open_weights(weights)
        # An empty source has no keys to adapt the recipe to.
        fits = source is not None and callable(getattr(flow, "adapt_to", None)) and any(True for _ in source.keys())
        return as_flow((flow.adapt_to(source) if fits else flow).assemble())
    if callable(flow):
        return as_flow(flow())
    raise errors.GraphError(
        f"flow: expected a ModelFlow, a recipe, a Built or a GraphModule, got {type(flow).__name__}{_flow_hint(flow)}"
    )


def _flow_hint(flow: object) -> str:
    """Return the advice for a value that is no flow, by what it is; empty if there is none."""
    if isinstance(flow, str | os.PathLike):
        return "; rlx_jax.load(path) opens a checkpoint, and recipe_for(path) is its recipe"
    if hasattr(flow, "pattern") and hasattr(flow, "capture"):
        return ": at(…) selects blocks; add an edit, .capture(), .wrap(fn), .replace(stage) or .scale(by)"
    return "; the flow comes first: compile(flow, weights)" if isinstance(flow, Mapping) else ""


def check_sources(builts: Sequence[Built], strict: bool) -> WeightSource | None:
    """Return the source of weights that all flows share, checked for keys that no flow reads.

    A flow may declare keys that it leaves unread on purpose; a declared key that ends in "." is a prefix.

    Raises:
        GraphError: the flows have different sources.
        UnexpectedWeightError: a key is unread, and `strict`; otherwise it is a warning. The message lists the keys.
    """
    name, source = ", ".join(b.name for b in builts), builts[0].source
    if any(b.source is not source for b in builts):
        raise errors.GraphError(f"{name}: flows of one model read the same weights; pass weights=")
    if source is None:
        return None
    read_keys = {key for b in builts for key in b.keys_read}
    unused_keys = [key for b in builts for key in b.unused_keys]
    unread_keys = [
        key for key in source.keys()
        if key not in read_keys and not any(key == k or (k.endswith(".") and key.startswith(k)) for k in unused_keys)
    ]  # fmt: skip
    if unread_keys:
        message = f"{name}: {len(unread_keys)} weights are in the source and nothing reads them: {listing(unread_keys)}"
        if strict:
            raise errors.UnexpectedWeightError(f"{message}; check the flow, or its config.json, or pass strict=False")
        warnings.warn(message, errors.RlxWarning, stacklevel=2)
    return source


def init_model_params(programs: Programs, built: Built, key: jax.Array, label: str) -> dict[str, jax.Array]:
    """Return random values for all parameters of a model, under their storage sharding; see `CompiledModel.init`.

    Args:
        programs: the programs of the model.
        built: the built flow.
        key: the random key, which may be traced.
        label: the operation, which begins the message of an error.

    Raises:
        LimitError, DeviceOutOfMemoryError: there is not enough memory for them.
    """
    leaves, storage_shardings = programs.layout.params, programs.storage_shardings()
    if packed_names := [name for name, program in leaves.items() if packed_parameter(program)]:
        raise errors.UnsupportedError(
            f"{label}: {quote(packed_names[0])} stays packed on the device, and packed weights are not initialized; "
            "with precision.weights = 'f32' in the profile they are floats"
        )
    shardings = storage_shardings or {}
    sizes = [shard_type(t, shardings.get(name)).nbytes for name, t in programs.layout.types().items()]
    if not isinstance(key, jax.core.Tracer):
        # Values are sampled in f32 and then scaled, which takes a temporary array.
        check_total_memory(sum(sizes) + max(sizes, default=0), label)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return initial_params(expand_composites(built.hir, built.types), leaves, key, built.inits)

    with out_of_memory(label):
        return init(key) if storage_shardings is None else jax.jit(init, out_shardings=storage_shardings)(key)


def check_options(options: OpenOptions) -> jax.Array | None:
    """Check `strict`, `progress`, `missing` and `key`, and return the random key of missing weights, if there is one.

    Raises:
        RequestError: one of them is not valid, or only one of `missing="init"` and `key` is passed.
    """
    check_flag("strict", options.strict)
    if options.progress is not None and not callable(options.progress):
        raise errors.RequestError(f"progress is {shown(options.progress)}; expected a function of (step, done, total)")
    missing, key = options.missing, options.key
    if missing not in ("error", "init"):
        raise errors.RequestError(f"missing is {shown(missing)}; expected 'error' or 'init'")
    if (missing == "init") != (key is not None):
        raise errors.RequestError(
            "missing='init' initializes weights with key=, a seed or a jax.random key: pass both, or neither"
        )
    return None if key is None else random_key("compile", key)


def with_missing_declared(flow: Buildable) -> Buildable:
    """Return the flow with its missing weights declared as to be initialized.

    Raises:
        GraphError: the flow is no `ModelFlow`.
    """
    if not isinstance(flow, ModelFlow):
        raise errors.GraphError(
            f"{flow.name}: missing='init' is for a ModelFlow or a recipe, got {type(flow).__name__}"
        )
    return replace(flow, _missing="init")


def init_missing_weights(builts: Sequence[Built], key: jax.Array) -> dict[str, jax.Array]:
    """Return random values, by key, for the weights that the source has no values of.

    A single flow without a source, or with shapes alone, gets none: all its parameters are initialized later, under
    their storage sharding (see `init_model_params`).
    """
    values: dict[str, jax.Array] = {}
    several = len(builts) > 1
    for number, built in enumerate(builts):
        missing = {name for name in built.params if not has_values(built.source, name)} - set(values)
        if missing and (several or has_any_values(built.source)):
            # With one key, weights of two flows with the same shape would be equal.
            values |= flow_weights(built, missing, jax.random.fold_in(key, number) if number else key)
    return values


def flow_weights(built: Built, weight_keys: Collection[str], key: jax.Array) -> dict[str, jax.Array]:
    """Return random values of the weights of a flow with these keys."""
    return initial_weights(expand_composites(built.hir, built.types), weight_keys, key, built.inits)
