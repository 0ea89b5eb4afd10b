"""A state for other rows and other sizes: several answers to a prompt, several prompts behind a text, a longer text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.ir.types import TensorType
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.programs import state_shardings
from rlx_jax.runtime.state import LENGTH
from rlx_jax.text.requests import Ids


def fork_of(batch: int, answers: int, prompts: int) -> Ids:
    """The prompt of each of `batch` rows; the answers to a prompt stand together, and rows behind have any."""
    return np.minimum(np.arange(batch) // answers, prompts - 1).astype(np.int32)


def fork_rows(axis: int, array: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of an array, which are at `axis`, by number: `[…, P, …]`, `[B]` → `[…, B, …]`."""
    return jnp.take(array, rows, axis=axis, mode="clip")


@dataclass(frozen=True)
class LeafMove:
    """What becomes of an array of a state: the axis of its `rows`; the axis of its `slots` and how `many` there will
    be, where that are others than there are."""

    name: str
    rows: int
    slots: int | None = None
    many: int = 0


def move_state(
    leaves: tuple[LeafMove, ...], state: StateArrays, rows: jax.Array, lengths: jax.Array | None = None
) -> StateArrays:
    """A state of other rows, given by number `[B]`, and of other slots. Where `lengths` `[B]` are given they take the
    place of its own."""
    held = fork_rows(0, state[LENGTH], rows)
    moved = {leaf.name: move_leaf(leaf, state[leaf.name], rows, held) for leaf in leaves}
    return state | moved | {LENGTH: held if lengths is None else lengths}


def move_leaf(leaf: LeafMove, array: jax.Array, rows: jax.Array, held: jax.Array) -> jax.Array:
    """The array of other rows and slots. The token at position p stands in slot p mod T, of a cache that holds them all
    and of a ring that holds the last T."""
    array = fork_rows(leaf.rows, array, rows)
    if leaf.slots is None:
        return array
    last, before = held[:, None] - 1, array.shape[leaf.slots]
    position = last - jnp.remainder(last - jnp.arange(leaf.many, dtype=jnp.int32)[None], leaf.many)
    there = position >= jnp.maximum(last + 1 - before, 0)
    shape = [1] * array.ndim
    shape[leaf.rows], shape[leaf.slots] = position.shape
    slot = jnp.where(there, jnp.remainder(position, before), 0).reshape(shape)
    found = jnp.take_along_axis(array, slot, axis=leaf.slots, mode="clip")
    return jnp.where(there.reshape(shape), found, jnp.zeros_like(found))


def moved_state(program: BoundProgram, state: StateArrays, rows: Ids, lengths: Ids | None = None) -> StateArrays:
    """The state for `program`, of these rows of another of its flow's, in arrays of its own; see `move_state`."""
    programs, sizes = program.model.programs, dict(program.key.binding)
    template, division = programs.template(program.key.symbolic), programs.division
    types = {name: t for name, t in template.state.items() if name != LENGTH}
    moves = tuple(m for name, t in types.items() if (m := _move(name, t, sizes, state[name].shape)) is not None)
    at = None if division is None else state_shardings(template, sizes, division)
    arguments = (state, rows) if lengths is None else (state, rows, lengths)
    moved: dict[str, Any] = programs.call(move_state, *arguments, static=(moves,), at=at)
    return moved


def fits(program: BoundProgram, state: StateArrays) -> bool:
    """Whether a state has the shapes that a program wants."""
    sizes, types = dict(program.key.binding), program.model.programs.template(program.key.symbolic).state
    return all(tuple(state[name].shape) == t.bind(sizes).shape for name, t in types.items())


def _move(name: str, t: TensorType, sizes: Mapping[str, int], shape: Sequence[int]) -> LeafMove | None:
    """What becomes of an array of this shape; None where it has no rows, and is the same for all."""
    axes = {str(size): axis for axis, size in enumerate(t.shape)}
    if "batch" not in axes:
        return None
    wanted = t.bind(sizes).shape
    slots = next((i for i, size in enumerate(wanted) if i != axes["batch"] and size != shape[i]), None)
    return LeafMove(name, axes["batch"]) if slots is None else LeafMove(name, axes["batch"], slots, int(wanted[slots]))
