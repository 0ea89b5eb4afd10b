"""`rlx_jax.compile`: what is opened, compiled ahead, and given its parameters."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Unpack

import jax

from rlx_jax.compiler.pipeline import make_template
from rlx_jax.device import running_device
from rlx_jax.errors import DeriveError, MissingWeightError, RequestError, RlxWarning, listing, suggests
from rlx_jax.ir.weight_reads import shapes_only
from rlx_jax.lowering.hir.derive import PROGRAMS, unknown_program
from rlx_jax.lowering.lir.plan import layout_of
from rlx_jax.profiles import ProfileLike
from rlx_jax.program import MakesMtp, Weights
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import open_programs
from rlx_jax.runtime.programs import Beside, ProgramKey, Programs
from rlx_jax.weights.execute import load_leaves
from rlx_jax.weights.format import CompileOptions, OpenOptions


@suggests()
def compile(
    flow: Any, weights: Weights = None, *, profile: ProfileLike | None = None, mesh: Any = None,
    program: str = "forward", strict: bool = True, missing: Literal["error", "init"] = "error",
    key: jax.Array | int | None = None,
) -> CompiledModel:  # fmt: skip
    """Compile a flow: build, lower and plan it now, and each size when it is first called.

    Args:
        flow: a `ModelFlow`, a recipe, a zero-argument function returning one, or a `BuiltModel`.
        weights: a mapping, a WeightSource or a path; a mapping of `jax.ShapeDtypeStruct` compiles without data.
        profile: a `CompileProfile`, the name of a preset or the path of a `*.rlx.toml`; else the flow's own, else
            `auto`.
        mesh: devices to divide the model over: a `jax.sharding.Mesh` with axes called data, fsdp, tensor, expert or
            context (or what the profile's `sharding` says), a number of devices, or "auto", all of them.
        program: `forward`, `train` (the forward program to differentiate: layers scanned, and recomputed as the
            profile's `layers.remat` says), `prefill`, `extend`, `verify` (`extend` that leaves the state's length as it
            was: whoever judges the logits adds the tokens that are kept), `explicit` (cached keys and values come in
            as `past_k_0`, `past_v_0` … and go out, longer, as `kv.0.k`, `kv.0.v` …), or `packed` (rows hold several
            sequences each; `segments` and `positions` say which token is of which, and where in it).
        strict: weights that nothing reads are an error.
        missing: a weight that the source has not is an `"error"`, or `"init"`: it is drawn, as its stage says (`init=`)
            or as `CompiledModel.init` does, and `report().initialised` names it. Its shape has to be known: that of a
            norm or a bias is, and so are those of whole layers but for the width of their MLP; `flow.param(key,
            shape=…)` says others. Without any weights all are drawn.
        key: what they are drawn with: a seed, or a key of `jax.random`.

    Raises:
        GraphError, WeightError, ProfileError: see `rlx_jax.errors`.
    """
    options = OpenOptions(strict=strict, profile=profile, mesh=mesh, missing=missing, key=key)
    (model,) = open_together([flow], weights, options, program).values()
    return model


@suggests("profile", "mesh", "program")
def init(recipe: Any, key: jax.Array | int, **options: Any) -> CompiledModel:
    """A config as a random model: `compile` of a recipe, or of a flow that knows its shapes, with every weight drawn.

    Each is drawn as its stage says (`init=`), else as `CompiledModel.init` does; `report().initialised` names them.
    What the recipe is bound to is not read: of a checkpoint's recipe this is the model before it was trained. Weights
    that were added to it, such as an adapter's files, stay.

    Args:
        recipe: what `compile` takes.
        key: a seed, or a key of `jax.random`. The same one gives the same numbers, in every program.
        options: `profile`, `mesh` and `program`, as `compile` has them.

    Raises:
        RequestError: no key. MissingWeightError: a shape that nobody says. Others as `compile`.
    """
    if key is None:
        raise RequestError("init: key is None; expected a seed, an integer, or a key of jax.random")
    return compile(recipe, {}, missing="init", key=key, **options)


@suggests(*CompileOptions.__annotations__)
def compile_together(
    flows: Sequence[Any], weights: Weights = None, *, program: str = "forward", **options: Unpack[CompileOptions]
) -> dict[str, CompiledModel]:
    """Compile several flows over one set of parameters: the models by flow name, all with the same `programs`.

    What two flows read is stored once; keys that none of them reads are an error where `strict`. Arguments as those of
    `compile`.

    Raises:
        GraphError: two flows of one name, or weights from different places. ProfileError: profiles that differ.
    """
    return open_together(flows, weights, OpenOptions(**options), program)


def open_together(
    flows: Sequence[Any], weights: Weights, options: OpenOptions, program: str
) -> dict[str, CompiledModel]:
    """As `compile_together`.

    Raises:
        DeriveError: there is no such program.
    """
    if program not in PROGRAMS:
        raise DeriveError(unknown_program(program))
    return finish_models(open_programs(flows, weights, options, merge=False, program=program), program)


def open_model(
    flow: Any, weights: Weights, options: OpenOptions, serves: tuple[str, ...], max_positions: int | None = None
) -> CompiledModel:
    """The model of a flow that answers requests by the programs `serves`, its projections merged. One that is compiled
    already stays as it is, with all its programs.

    Raises:
        RequestError: an argument that such a model was compiled with.
    """
    if not isinstance(flow, CompiledModel):
        programs = open_programs([flow], weights, options, merge=True, max_positions=max_positions, serves=serves)
        (model,) = finish_models(programs).values()
        return model
    others = {"weights": weights, "max_positions": max_positions}
    if given := [*(name for name, value in others.items() if value is not None), *options.changed()]:
        raise RequestError(f"{flow.name} is compiled already: leave out {listing(given)}, or give the flow itself")
    return flow


def finish_models(programs: Programs, program: str = "forward") -> dict[str, CompiledModel]:
    """A model for each flow, their parameters streamed in while XLA compiles what is known already."""
    models = {name: CompiledModel(programs, name, program) for name in programs.flows}
    if not programs.layout.leaves:
        return {name: model.replace(params={}) for name, model in models.items()}
    if not has_data(programs):
        if programs.seed is None:
            return models
        (model,) = models.values()  # of several flows each was drawn before
        programs.initialised = tuple(model.template().built.params)
        return {model.name: model.replace(params=model.init(programs.seed))}  # drawn where they are to lie
    chosen, here = programs.settings.device.name, running_device()
    if chosen not in (here.name, here.kind):
        message = f"fusion.target is {chosen!r}, and JAX runs on {here.name!r}: chosen for the one, run on the other"
        warnings.warn(f"{', '.join(models)}: {message}", RlxWarning, stacklevel=3)
    # A context of the caller's thread, which the loader does not see.
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_params, programs, device, given_up)
        try:
            for model in models.values():
                model.warm()
            params, seconds = loading.result()
        except BaseException:  # Ctrl-C, too: whoever it reaches should not wait for the rest of the weights
            given_up.set()
            raise
    return {name: replace(model, load_seconds=seconds).replace(params) for name, model in models.items()}


def has_data(programs: Programs) -> bool:
    """Whether the source holds numbers, not only shapes."""
    source = programs.source
    return source is not None and not shapes_only(source)


def load_params(programs: Programs, device: Any, given_up: threading.Event) -> tuple[dict[str, jax.Array], float]:
    """The arrays of the layout's leaves on `device`, or divided over the model's mesh, and the seconds that took."""
    assert programs.source is not None
    start = time.perf_counter()
    placement = programs.resting() or device
    params = load_leaves(programs.layout.leaves, programs.source, placement, programs.tell, given_up)
    return params, time.perf_counter() - start


def model_beside(model: CompiledModel, make: MakesMtp) -> CompiledModel:
    """The flow that `make` gives of the model's weights, opened once: leaves that the model has are the model's own
    arrays, the others are read now.

    Raises:
        MissingWeightError: there are no weights to read. Others as `make` and as `rlx_jax.compile`.
    """
    model.refuse_traced()
    params = model.require_params("drafting")
    found = model.programs.beside(model.name, lambda: _opened(model, params, make))
    known = model.programs.layout.by_program()
    shared = {name: params[known[p]] for name, p in found.programs.layout.leaves.items() if p in known}
    (name,) = found.programs.flows
    return CompiledModel(found.programs, name, params={**found.params, **shared})


def _opened(model: CompiledModel, params: dict[str, Any], make: MakesMtp) -> Beside:
    base = model.programs
    if not has_data(base):
        raise MissingWeightError(
            f"{model.name}: its weights are shapes alone, and those of what drafts cannot be read: pass weights="
        )
    flow = make(base.source)
    built = flow.build(base.source)
    template = make_template(built, 0.0, base.settings, "forward")
    layout = layout_of([template.hir], base.settings.plan.scan)
    programs = Programs(
        {flow.name: flow}, base.source, base.settings, layout, {flow.name: built.captured}, base.progress
    )
    programs.builds.put((flow.name, frozenset()), (built, 0.0))
    programs.templates.put(ProgramKey(flow.name, "forward"), template)
    programs.warm = base.warm
    known = base.layout.by_program()
    own = {name: program for name, program in layout.leaves.items() if program not in known}
    assert base.source is not None  # it has data
    # Where the model's parameters were put; None where that was left to JAX.
    here = next((next(iter(a.devices())) for a in params.values() if isinstance(a, jax.Array) and a.committed), None)
    loaded = load_leaves(own, base.source, programs.resting() or here, base.tell, threading.Event())
    return Beside(programs, loaded)
