"""The empty states of a model's programs: which arrays one has, and how many slots each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx_jax.compiler.pipeline import Template
from rlx_jax.errors import GraphError
from rlx_jax.ir.types import DimLike
from rlx_jax.runtime.inputs import check_length
from rlx_jax.runtime.programs import ProgramKey, Programs, state_shardings
from rlx_jax.runtime.state import EmptyState, empty_state


def ring_sizes(programs: Programs, template: Template, context: Any, spare: int = 0) -> dict[str, int]:
    """The slots of each ring in a state of `context` slots, `spare` of them for tokens that may be taken back."""
    buckets = programs.settings.buckets
    return {name: buckets.ring(window, context, spare) for name, window in template.rings.items()}


def empty_of(
    programs: Programs,
    flow: str,
    program: str,
    batch: DimLike,
    context: DimLike | None,
    more: Mapping[str, DimLike],
    given: frozenset[str] = frozenset(),
    spare: int = 0,
) -> EmptyState:
    """What makes an empty state of a flow's program: one for each choice of sizes and of optional inputs.

    `more` are sizes beside the rows and the slots; `given` and `spare` as `Variant` has them.

    Raises:
        GraphError: the program has no state, or a size is not given. SequenceLengthError: over the model's positions.
        ShapeError, DeviceOutOfMemoryError: it is too large.
    """

    def make() -> EmptyState:
        template = (
            programs.template(ProgramKey(flow, program, given)) if given else programs.any_template(flow, program)
        )
        if not template.state:
            raise GraphError(f"program {program} of {flow} has no state")
        binding: dict[str, Any] = {**programs.flows[flow].binding, **more, "batch": batch}
        binding |= {} if context is None else {"context": context}
        check_length(binding.get("context", 0), template.bounds, f"{flow}: init_state")
        binding |= ring_sizes(programs, template, context, spare)
        division = programs.division
        at = {} if division is None else state_shardings(template, binding, division)
        return empty_state(template.state, binding, f"{flow}: init_state(batch={batch}, context={context})", at)

    return programs.empty((flow, program, batch, context, tuple(sorted(more.items())), given, spare), make)
