"""Random weights: those that no source has, drawn before a model is compiled, and all of a model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from rlx_jax.device import check_space, out_of_memory
from rlx_jax.errors import GraphError, RequestError, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.ir.reading import shapes_only
from rlx_jax.lowering.division import on_one
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.program import Buildable, Built
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.programs import Programs
from rlx_jax.weights.beside import has_numbers
from rlx_jax.weights.initial import initial_params, initial_weights


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
