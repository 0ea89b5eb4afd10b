"""`RequestInputs`: the inputs of a request other than its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import RequestError, did_you_mean, listing, quote, shown
from rlx_jax.program import InputDecl
from rlx_jax.runtime.inputs import bind_sizes, host_value
from rlx_jax.runtime.model import CompiledModel

Inputs = Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class RequestInputs:
    """Checked input arrays of a request, other than its tokens.

    Attributes:
        arrays: by name.
        sizes: sizes that the arrays bind to symbols other than `batch`.
        optional_inputs: the names of optional inputs that the request passes; each set of them has programs of its own.
        batch_axes: the batch axis of each array that has one.
    """

    arrays: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    optional_inputs: frozenset[str] = frozenset()
    batch_axes: Mapping[str, int] = field(default_factory=dict)

    def padded(self, batch: int) -> dict[str, Any]:
        """Return the arrays padded with zeros to `batch` rows."""
        arrays = dict(self.arrays)
        for name, axis in self.batch_axes.items():
            pad_widths = [(0, (batch - size) * (i == axis)) for i, size in enumerate(arrays[name].shape)]
            if any(n for _, n in pad_widths):
                # NumPy arrays stay on the host; the call of the program transfers them.
                arrays[name] = (jnp if isinstance(arrays[name], jax.Array) else np).pad(arrays[name], pad_widths)
        return arrays

    def select_row(self, row: int) -> dict[str, Any]:
        """Return the arrays reduced to one row of the batch, with the batch axis kept."""
        return {
            name: a[(slice(None),) * self.batch_axes[name] + (slice(row, row + 1),)] if name in self.batch_axes else a
            for name, a in self.arrays.items()
        }

    def repeated(self, times: int) -> RequestInputs:
        """Return the inputs with each row repeated, for several answers to each prompt."""
        repeated = {name: np.repeat(self.arrays[name], times, axis) for name, axis in self.batch_axes.items()}
        return replace(self, arrays={**self.arrays, **repeated}) if times > 1 else self


NO_INPUTS = RequestInputs()


def check_inputs(
    model: CompiledModel, inputs: Mapping[str, Any] | None, rows: int, declarations: Mapping[str, InputDecl]
) -> RequestInputs:
    """Check `inputs=` of a request and return its arrays.

    Args:
        rows: number of prompts, which every array with a batch axis must have.
        declarations: the model's `request_inputs`.

    Raises:
        RequestError: an input is missing, the flow has none of that name or reads it with the tokens, or the number of
            rows is not the number of prompts. ShapeError, DTypeError, TokenIdError: an array does not fit its type.
    """
    if inputs is not None and not isinstance(inputs, Mapping):
        raise RequestError(f"inputs is {shown(inputs)}; expected a mapping of input names to arrays")
    passed = {name: value for name, value in (inputs or {}).items() if value is not None}
    for name in passed:
        if name not in declarations:
            with_tokens = name in (d.name for d in model.flow._inputs)
            reason = "it belongs to the tokens, and the request computes it" if with_tokens else "the flow has none"
            reason = "none of the outputs reads it" if name in model.unread_inputs else reason
            raise RequestError(
                f"inputs: {quote(name)}: {reason}; a request may pass {listing(declarations) or 'nothing but tokens'}"
                f"{did_you_mean(str(name), declarations)}"
            )
    missing = [name for name, d in declarations.items() if not d.optional and name not in passed]
    if missing:
        raise RequestError(f"{model.name}: the flow reads {listing(missing)}: pass inputs={{{missing[0]!r}: …}}")
    if not passed:
        return NO_INPUTS
    types = {name: declarations[name].type for name in passed}
    optional_names = frozenset(name for name in passed if declarations[name].optional)
    ids = model.programs.template(model.key(optional_names)).bounds.ids
    check = model.settings.check_ids
    arrays = {name: host_value(name, value, types[name], ids.get(name), check) for name, value in passed.items()}
    axes = {name: t.shape.index(d) for name, t in types.items() for d in t.shape if str(d) == "batch"}
    for name, axis in axes.items():
        if arrays[name].ndim > axis and arrays[name].shape[axis] != rows:
            raise RequestError(f"input {name} has {arrays[name].shape[axis]} rows, the request {rows}")
    sizes = bind_sizes(types, arrays, model.name)
    return RequestInputs(arrays, {n: size for n, size in sizes.items() if n != "batch"}, optional_names, axes)
