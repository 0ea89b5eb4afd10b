"""The empty states of a model's programs: which arrays one has, and how many slots each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlx_jax.compiler.template import Template
from rlx_jax.errors import GraphError
from rlx_jax.ir.types import DimLike
from rlx_jax.runtime.inputs import check_length
from rlx_jax.runtime.programs import ProgramKey, Programs, state_shardings
from rlx_jax.runtime.state import EmptyState, empty_state


def ring_sizes(programs: Programs, template: Template, context: Any, spare: int = 0) -> dict[str, int]:
    """The slots of each ring in a state of `context` slots, `spare` of them for tokens that may be taken back."""
    buckets = programs.settings.buckets
    return {name: buckets.ring(window, context, spare) for name, window in template.rings.items()}


def empty_of(programs: Programs, key: ProgramKey, sizes: Mapping[str, DimLike], spare: int = 0) -> EmptyState:
    """What makes an empty state of a program: one for each choice of sizes, of optional inputs and of outputs, as what
    no output reads keeps nothing.

    `key` is without sizes, and `sizes` has them: `batch`, `context` where there are slots, and others; `spare` as
    `Variant` has it.

    Raises:
        GraphError: the program has no state, or a size is not given. SequenceLengthError: over the model's positions.
        ShapeError, DeviceOutOfMemoryError: it is too large.
    """

    def make() -> EmptyState:
        template = programs.any_template(key)
        if not template.state:
            raise GraphError(f"program {key.program} of {key.flow} has no state")
        binding: dict[str, Any] = {**programs.flows[key.flow]._binding, **sizes}
        check_length(binding.get("context", 0), template.bounds, f"{key.flow}: init_state")
        binding |= ring_sizes(programs, template, sizes.get("context"), spare)
        division = programs.division
        at = {} if division is None else state_shardings(template, binding, division)
        where = f"{key.flow}: init_state(batch={sizes['batch']}, context={sizes.get('context')})"
        return empty_state(template.state, binding, where, at)

    same = replace(key, last_only=False)  # which rows of the output are wanted changes no state
    return programs.empty((same, tuple(sorted(sizes.items())), spare), make)
