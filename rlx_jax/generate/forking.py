"""Several answers to a prompt: it is read once, and the rows of its state are repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.ir.types import TensorType
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.programs import state_shardings
from rlx_jax.text.requests import Ids


def fork_of(batch: int, answers: int, prompts: int) -> Ids:
    """The prompt of each of `batch` rows; the answers to a prompt stand together, and rows behind have any."""
    return np.minimum(np.arange(batch) // answers, prompts - 1).astype(np.int32)


@dataclass(frozen=True)
class ForkRows:
    """Rows of an array, which are at `axis`, by number: `[…, P, …]`, `[B]` → `[…, B, …]`."""

    axis: int

    def __call__(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.take(array, rows, axis=self.axis, mode="clip")


@dataclass(frozen=True)
class ForkState:
    """`ForkRows` of each array of a state; `axes` has those that have rows."""

    axes: tuple[tuple[str, int], ...]

    def __call__(self, state: StateArrays, rows: jax.Array) -> StateArrays:
        return state | {name: ForkRows(axis)(state[name], rows) for name, axis in self.axes}


def forked_state(decode: BoundProgram, state: StateArrays, answers: int, prompts: int) -> StateArrays:
    """The state of the answers, for `decode`, from that of the prompts."""
    programs, sizes = decode.model.programs, dict(decode.key.binding)
    template = programs.template(decode.key.symbolic)
    axes = [(name, axis) for name, t in template.state.items() if (axis := _axis_of_rows(t)) is not None]
    division = programs.division
    at = None if division is None else state_shardings(template, sizes, division)
    fork = fork_of(sizes["batch"], answers, prompts)
    forked: dict[str, Any] = programs.call(ForkState(tuple(axes)), state, fork, at=at)
    return forked


def _axis_of_rows(array: TensorType) -> int | None:
    return next((i for i, size in enumerate(array.shape) if str(size) == "batch"), None)
