"""What a model's programs are opened with: its flows built once, one profile, one layout of the weights.

Random weights too: those that no source has, drawn before a model is compiled, and all of a model's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from rlx_jax.compiler.meshes import divide_model
from rlx_jax.compiler.pipeline import Template, facts_of, make_template
from rlx_jax.compiler.settings import Settings, check_inputs, choose_profile, choose_settings, differences, divided
from rlx_jax.device import check_space, out_of_memory
from rlx_jax.errors import (
    GraphError,
    ProfileError,
    RequestError,
    RlxError,
    RlxWarning,
    UnexpectedWeightError,
    UnsupportedError,
    listing,
    shown,
)
from rlx_jax.flow import ModelFlow
from rlx_jax.ir.types import is_float
from rlx_jax.ir.weight_reads import WeightSource, shapes_only
from rlx_jax.lowering.lir.plan import Layout, layout_of
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.lowering.sharding import check_divides, on_one
from rlx_jax.profiles import CompileProfile
from rlx_jax.profiles.effects import warn_of_idle
from rlx_jax.program import Buildable, Built, Weights
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.programs import ProgramKey, Programs
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.initial import initial_params, initial_weights
from rlx_jax.weights.overlay import has_numbers, with_drawn
from rlx_jax.weights.source import open_weights

# Each flow by its name, built, and the seconds that it took.
Builds = Mapping[str, tuple[Built, float]]


def open_programs(
    flows: Sequence[Any], weights: Weights, options: OpenOptions, merge: bool, program: str = "forward",
    max_positions: int | None = None, serves: tuple[str, ...] = (),
) -> Programs:  # fmt: skip
    """Build each flow once, resolve the profile and choose one layout for all. Reads shapes, no data.

    `program` decides how layers run and are stored; every program of the model shares it, and takes no more than
    `max_positions` tokens. `serves`: the programs of a model that takes requests of every size; else calls run
    `program` alone.

    Raises:
        GraphError: two flows of one name, or no flow at all, or flows that read their weights from different places.
        ProfileError: the flows' own profiles say different things.
    """
    profile = None if options.profile is None else CompileProfile.of(options.profile)
    if not isinstance(options.strict, bool):
        raise RequestError(f"strict is {shown(options.strict)}; expected True or False")
    if options.progress is not None and not callable(options.progress):
        raise RequestError(f"progress is {shown(options.progress)}; expected a function of (what, done, total)")
    seed = check_missing(options.missing, options.key)
    if weights is not None and any(hasattr(flow, "stored_in") for flow in flows):  # recipes, which look at them
        weights = open_weights(weights)
    made = [as_flow(flow, weights) for flow in flows]
    if program == "train":
        for flow in made:
            refuse_untrained(flow)
    named = {flow.name: flow if seed is None else drawing(flow) for flow in made}
    if not named or len(named) < len(made):
        raise GraphError(f"flows of one model have names of their own; got {listing([f.name for f in made])}")
    builds, fresh = with_lacking(named, build_flows(named, weights), seed)
    builts = [built for built, _ in builds.values()]
    source = check_sources(builts, options.strict)
    settings = one_settings({name: choose_settings(b, profile, merge, program) for name, (b, _) in builds.items()})
    division = divide_model(options.mesh, builts, settings, program, serves)
    settings = replace(settings if division is None else divided(settings, division), max_positions=max_positions)
    first = program if program in ("train", "explicit") else "forward"
    settings, layout, templates = plan_layout(builds, settings, first)
    if division is not None:
        check_divides(division, layout.leaves.values())
    captured = {name: built.captured for name, (built, _) in builds.items()}
    programs = Programs(named, source, settings, layout, captured, options.progress)
    programs.opened = merge, program
    programs.initialised, programs.seed = fresh, seed
    chosen = [(t, choose_profile(t.built, profile)) for t in templates.values() if t.built.plan is None]
    if any(used != CompileProfile.auto() for _, used in chosen):
        programs_run = serves or (program,)
        warn_of_idle([facts_of(t, used, settings, programs_run, bool(serves)) for t, used in chosen], 3)
    for name, flow in named.items():
        check_inputs(settings.plan.donate_inputs, flow)
        programs.builds.put((name, frozenset()), builds[name])
        programs.templates.put(ProgramKey(name, first), templates[name])
    return programs


def build_flows(named: Mapping[str, Buildable], weights: Weights) -> Builds:
    """Each flow built, with the seconds that it took; the weights are opened once. Flows that are bound to one source,
    beside which each puts the same adapter, share what the first makes of both."""
    builds: dict[str, tuple[Built, float]] = {}
    bound = [getattr(flow, "_weights", None) for flow in named.values()]
    shared = bound[0] is not None and all(source is bound[0] for source in bound)
    for name, flow in named.items():
        start = time.perf_counter()
        with paused_gc():
            built = flow.build(weights)
        builds[name] = built, time.perf_counter() - start
        weights = built.source if weights is not None or shared else None
    return builds


def with_lacking(
    named: Mapping[str, Buildable], builds: Builds, seed: jax.Array | None
) -> tuple[Builds, tuple[str, ...]]:
    """The flows built over a source that has the weights which none had before, drawn from `seed`; and their keys.
    Without a seed, or where nothing lacks, the flows as they are."""
    fresh = {} if seed is None else draw_lacking([built for built, _ in builds.values()], seed)
    if not fresh:
        return builds, ()
    drawn = with_drawn(next(built.source for built, _ in builds.values()), fresh)
    return {name: (flow.build(drawn), builds[name][1]) for name, flow in named.items()}, tuple(fresh)


def plan_layout(builds: Builds, settings: Settings, first: str) -> tuple[Settings, Layout, dict[str, Template]]:
    """One layout for all flows, with the settings that it goes by and each flow's program `first`. What is merged in
    one flow and not in another would be stored twice, and is not; nor is what an optional input parts, which comes
    between products and the value that they share without it."""
    templates = {name: make_template(*build, settings, first, False) for name, build in builds.items()}
    layout = layout_of([t.hir for t in templates.values()], settings.plan.scan)
    twice = len(builds) > 1 and layout.repeated()
    if settings.merge and (twice or any(parted(built, layout, settings, first) for built, _ in builds.values())):
        return plan_layout(builds, replace(settings, merge=False), first)
    return settings, layout, templates


def parted(built: Built, layout: Layout, settings: Settings, first: str) -> bool:
    """Whether a flow reads other weights with its optional inputs than without: `layout` is that of the program without
    them. Asked where an input may come between products: of numbers that are no ids, masks or positions, or of a flow
    that was changed by its paths."""
    flow = built.flow
    found = [decl for decl in flow._inputs if decl.optional]
    changed = getattr(flow, "_block_edits", ()) or any(is_float(decl.type.dtype) for decl in found)
    if not found or not changed:
        return False
    optional = frozenset(decl.name for decl in found)
    try:
        whole = make_template(flow.build(built.source, optional, built.captured), 0.0, settings, first, False, optional)
    except RlxError:  # no call gives all of them
        return False
    return not layout.has(whole.hir, settings.plan.scan)


def one_settings(found: Mapping[str, Settings]) -> Settings:
    """The settings of all flows.

    Raises:
        ProfileError: they differ; the fields are named.
    """
    (name, first), *others = found.items()
    for other, settings in others:
        if differ := differences(first, settings):
            raise ProfileError(
                f"flows of one model share one profile, and {name!r} and {other!r} differ in {listing(differ)}; pass "
                "profile="
            )
    return first


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection inside: a build allocates thousands of small objects that all live on, and looking
    at them again and again takes a third of the time of a deep model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def refuse_untrained(flow: Buildable) -> None:
    """A flow is not trained where its training has something that there is not, such as dropout.

    Raises:
        UnsupportedError: why.
    """
    if isinstance(flow, ModelFlow) and flow._no_training:
        raise UnsupportedError(f"{flow.name}: training: {flow._no_training}")


def as_flow(flow: Any, weights: Weights = None) -> Buildable:
    """What to build, from a ModelFlow, a GraphModule, a recipe, a zero-argument function or a Built. A recipe is that
    for how `weights` are stored, where it is compiled with some: under a prefix, with a head beside its embedding."""
    if isinstance(flow, Buildable):
        return flow
    if isinstance(getattr(flow, "programs", None), Programs):
        raise GraphError(
            "this model is compiled already: call it, give it other numbers with .replace(params=…), or compile its "
            "flow again for another mesh or profile"
        )
    if isinstance(getattr(getattr(flow, "model", None), "programs", None), Programs):
        raise GraphError(f"this {type(flow).__name__} is compiled already: pass its .model to another one")
    if isinstance(flow, type) and hasattr(flow, "assemble"):
        raise GraphError(f"{flow.__name__} is a class, no recipe: make one by recipe_for(path) or for_prefill(config)")
    if callable(getattr(flow, "assemble", None)):
        source = None if weights is None else open_weights(weights)
        # Where there are no weights at all, none is missing on purpose.
        fits = source is not None and callable(getattr(flow, "stored_in", None)) and any(True for _ in source.keys())
        return as_flow((flow.stored_in(source) if fits else flow).assemble())
    if callable(flow):
        return as_flow(flow())
    raise GraphError(
        f"flow: expected a ModelFlow, a recipe, a Built or a GraphModule, got {type(flow).__name__}{_instead_of(flow)}"
    )


def _instead_of(flow: object) -> str:
    """What was meant by something that is no flow."""
    if isinstance(flow, str | os.PathLike):
        return "; rlx_jax.load(path) opens a checkpoint, and recipe_for(path) is its recipe"
    if hasattr(flow, "pattern") and hasattr(flow, "capture"):
        return ": at(…) selects blocks; say what becomes of them, .capture(), .wrap(fn), .replace(stage) or .scale(by)"
    return "; the flow comes first: compile(flow, weights)" if isinstance(flow, Mapping) else ""


def check_sources(builts: Sequence[Built], strict: bool) -> WeightSource | None:
    """Where all flows read their weights. Every key of it is read by one of them, or left on purpose.

    Raises:
        GraphError: more than one place.
        UnexpectedWeightError: lists keys that nothing reads; a warning if not `strict`.
    """
    name, source = ", ".join(b.name for b in builts), builts[0].source
    if any(b.source is not source for b in builts):
        raise GraphError(f"{name}: flows of one model read the same weights; pass weights=")
    if source is None:
        return None
    read = {key for b in builts for key in b.keys_read}
    left = [key for b in builts for key in b.left_keys]
    unread = [
        key for key in source.keys()
        if key not in read and not any(key == k or (k.endswith(".") and key.startswith(k)) for k in left)
    ]  # fmt: skip
    if unread:
        message = f"{name}: {len(unread)} weights are in the source and nothing reads them: {listing(unread)}"
        if strict:
            raise UnexpectedWeightError(f"{message}; check the flow, or its config.json, or pass strict=False")
        warnings.warn(message, RlxWarning, stacklevel=2)
    return source


def drawn_params(programs: Programs, built: Built, key: jax.Array, what: str) -> dict[str, jax.Array]:
    """Every leaf of a model, on the devices that keep it; `model.init`.

    Raises:
        LimitError, DeviceOutOfMemoryError: there is no room for them; the message begins with `what`.
    """
    leaves, resting = programs.layout.leaves, programs.resting()
    at = resting or {}
    sizes = [on_one(t, at.get(name)).nbytes for name, t in programs.layout.types().items()]
    if not isinstance(key, jax.core.Tracer):
        check_space(sum(sizes) + max(sizes, default=0), what)  # numbers are drawn in f32, and then scaled

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        return initial_params(expand_composites(built.hir, built.types), leaves, key, built.inits)

    with out_of_memory(what):
        return draw(key) if resting is None else jax.jit(draw, out_shardings=resting)(key)


# -- `missing="init"` of `rlx_jax.compile` -----------------------------------------------------


def check_missing(missing: str, key: Any) -> jax.Array | None:
    """The key that weights are drawn with; None where what is missing is an error.

    Raises:
        RequestError: `missing` is another word, or one of the two is there without the other.
    """
    if missing not in ("error", "init"):
        raise RequestError(f"missing is {shown(missing)}; expected 'error' or 'init'")
    if (missing == "init") != (key is not None):
        raise RequestError("missing='init' draws weights with key=, a seed or a jax.random key: give both, or neither")
    return None if key is None else random_key("compile", key)


def drawing(flow: Buildable) -> Buildable:
    """The flow, whose missing weights are drawn."""
    if not isinstance(flow, ModelFlow):
        raise GraphError(f"{flow.name}: missing='init' is for a ModelFlow or a recipe, got {type(flow).__name__}")
    return replace(flow, _missing="init")


def draw_lacking(builts: Sequence[Built], key: jax.Array) -> dict[str, jax.Array]:
    """The weights that a source has no numbers of, by key; none where there is one flow and no source, or one of shapes
    alone: those of the whole model are drawn where they are to lie."""
    found: dict[str, jax.Array] = {}
    several = len(builts) > 1
    for built in builts:
        lacking = {name for name in built.params if not has_numbers(built.source, name)} - set(found)
        if lacking and (several or not (built.source is None or shapes_only(built.source))):
            graph = expand_composites(built.hir, built.types)
            found |= initial_weights(graph, lacking, key, built.inits)
    return found
