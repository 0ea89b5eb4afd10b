"""This module makes the page of a model from its inspections: `model.show()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlx_jax.compiler.dumps import pass_diffs
from rlx_jax.compiler.pipeline import Template
from rlx_jax.errors import RequestError, shown
from rlx_jax.inspection.page import Page, make_page
from rlx_jax.inspection.records import Inspection

# The levels whose text is on the page: those with the names of the page.
LEVELS = ("hir", "mir")


class HasPrograms(Protocol):
    """A `CompiledModel`."""

    def as_program(self, program: str) -> HasPrograms: ...

    def template(self) -> Template: ...

    def explain(self, *inputs: Any, **named: Any) -> Inspection: ...

    def text(self, level: str) -> str: ...


def show(self: HasPrograms, *inputs: Any, compare: Sequence[Inspection] = (), **named: Any) -> Page:
    """Return the page of what `explain(*inputs, **named)` returns. A notebook displays it, and `save` writes it.

    Args:
        inputs, named: the arguments of `explain`.
        compare: what `explain` returned for other models or profiles, to compare with.

    Raises:
        RequestError: `compare` is something else. Others as `explain`.
    """
    check_compared(compare)
    return model_page(self, [self.explain(*inputs, **named)], compare)


def check_compared(compare: Any) -> None:
    """Check, before anything runs, that `compare` has what `explain` returned.

    Raises:
        RequestError: it has something else.
    """
    if not isinstance(compare, Sequence) or not all(isinstance(other, Inspection) for other in compare):
        raise RequestError(f"compare is {shown(compare)}; expected a list of what explain returned")


def model_page(model: HasPrograms, inspections: Sequence[Inspection], compare: Sequence[Inspection] = ()) -> Page:
    """Return the page of programs of a model.

    Args:
        model: the model.
        inspections: its programs, with their text and the differences that passes made on the page.
        compare: other inspections, which have no text on the page.
    """
    texts, with_diffs = [], []
    for inspection in inspections:
        program = model.as_program(inspection.program)
        diffs = pass_diffs(program.template())
        passes = tuple(replace(step, diff=diffs.get(step.name, "")) for step in inspection.passes)
        with_diffs.append(replace(inspection, passes=passes))
        texts.append({level: program.text(level) for level in LEVELS})
    return make_page([*with_diffs, *compare], texts)
