"""What a request brings beside its tokens: the flow's other inputs, such as an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import RequestError, did_you_mean, listing, quote, shown
from rlx_jax.program import InputDecl
from rlx_jax.runtime.inputs import bind_sizes, host_value
from rlx_jax.runtime.model import CompiledModel


@dataclass(frozen=True, eq=False)
class RequestInputs:
    """Checked arrays by name, with the sizes that they give to symbols other than `batch`; `given` are those that the
    flow can do without."""

    arrays: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    rows: Mapping[str, int] = field(default_factory=dict)  # the axis that has the batch

    def padded(self, batch: int) -> dict[str, Any]:
        """The arrays with `batch` rows; those behind the request's are zeros."""
        arrays = dict(self.arrays)
        for name, axis in self.rows.items():
            more = [(0, (batch - size) * (i == axis)) for i, size in enumerate(arrays[name].shape)]
            if any(n for _, n in more):
                arrays[name] = (jnp if isinstance(arrays[name], jax.Array) else np).pad(arrays[name], more)
        return arrays

    def of_row(self, row: int) -> dict[str, Any]:
        """The arrays with this row of the batch alone."""
        return {
            name: a[(slice(None),) * self.rows[name] + (slice(row, row + 1),)] if name in self.rows else a
            for name, a in self.arrays.items()
        }


NONE = RequestInputs()


def declared(model: CompiledModel) -> dict[str, InputDecl]:
    """The inputs that a request brings beside its tokens, by name: those without the dimension `seq` that an output
    reads."""
    idle = unread(model) | {model.first_input}
    return {d.name: d for d in model.flow._inputs if d.name not in idle and "seq" not in d.type.symbols}


def unread(model: CompiledModel) -> frozenset[str]:
    """The inputs that no output reads, whatever optional ones there are."""
    optional = frozenset(d.name for d in model.flow._inputs if d.optional)
    idle = model.programs.unread(model.name, frozenset()) - optional
    return idle & model.programs.unread(model.name, optional) if idle and optional else idle


def request_inputs(
    model: CompiledModel, inputs: Mapping[str, Any] | None, rows: int, known: Mapping[str, InputDecl]
) -> RequestInputs:
    """`inputs=` of a request of so many rows, checked; `known` are those that are `declared`.

    Raises:
        RequestError: one is missing, or the flow has none of that name, or reads it with the tokens.
        ShapeError, DTypeError, TokenIdError: it does not fit. RequestError: it has other rows than the prompts.
    """
    if inputs is not None and not isinstance(inputs, Mapping):
        raise RequestError(f"inputs is {shown(inputs)}; expected a mapping of input names to arrays")
    brought = {name: value for name, value in (inputs or {}).items() if value is not None}
    for name in brought:
        if name not in known:
            with_tokens = name in (d.name for d in model.flow._inputs)
            why = "it belongs to the tokens, which a request brings itself" if with_tokens else "the flow has none"
            why = "none of the outputs reads it" if name in unread(model) else why
            raise RequestError(
                f"inputs: {quote(name)}: {why}; a request may bring {listing(known) or 'nothing beside tokens'}"
                f"{did_you_mean(str(name), known)}"
            )
    missing = [name for name, d in known.items() if not d.optional and name not in brought]
    if missing:
        raise RequestError(f"{model.name}: the flow reads {listing(missing)}: pass inputs={{{missing[0]!r}: …}}")
    if not brought:
        return NONE
    types = {name: known[name].type for name in brought}
    given = frozenset(name for name in brought if known[name].optional)
    ids = model.programs.template(model.key(given)).bounds.ids
    arrays = {
        name: host_value(name, value, types[name], ids.get(name), model.settings.check_ids)
        for name, value in brought.items()
    }
    axes = {name: t.shape.index(d) for name, t in types.items() for d in t.shape if str(d) == "batch"}
    for name, axis in axes.items():
        if arrays[name].ndim > axis and arrays[name].shape[axis] != rows:
            raise RequestError(f"input {name} has {arrays[name].shape[axis]} rows, the request {rows}")
    sizes = bind_sizes(types, arrays, model.name)
    return RequestInputs(arrays, {n: size for n, size in sizes.items() if n != "batch"}, given, axes)
