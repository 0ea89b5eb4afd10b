"""Flows that run beside a compiled model: with its settings, over its parameters and others of their own."""

from __future__ import annotations

import threading
from typing import Any

import jax

from rlx_jax.compiler.pipeline import make_template
from rlx_jax.errors import MissingWeightError
from rlx_jax.lowering.lir.layout import layout_of
from rlx_jax.program import MakesMtp
from rlx_jax.runtime.compiling import has_data
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Beside, ProgramKey, Programs
from rlx_jax.weights.execute import load_leaves


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
    loaded = load_leaves(own, base.source, programs.resting() or _device(params), base.tell, threading.Event())
    return Beside(programs, loaded)


def _device(params: dict[str, Any]) -> Any:
    """Where parameters were put; None where that was left to JAX."""
    first = next((a for a in params.values() if isinstance(a, jax.Array)), None)
    return None if first is None or not first.committed else next(iter(first.devices()))
