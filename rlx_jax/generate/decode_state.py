"""The state of a batch: what `CausalLM.prefill` returns and `extend` consumes; the same for other rows and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import Arrays, StateArrays
from rlx_jax.errors import RequestError, SessionStateError
from rlx_jax.ir.types import TensorType
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.programs import state_shardings
from rlx_jax.runtime.sequence_state import LENGTH, State, check_room
from rlx_jax.text.padding import cropped
from rlx_jax.text.request_checks import Ids


@dataclass(eq=False)
class DecodeState:
    """The cache of a batch: what `prefill` returns and `extend` consumes.

    `lengths` are the tokens each row holds, int64 `[B]` on the host; `capacity` is how many it may hold. `sizes` are
    `batch`, `context` and the like of the arrays: padded to a bucket, they have rows and slots behind those, which hold
    nothing. `given` are the optional inputs that the prompt came with. `text` `[B, n]` int32 has the tokens on the
    host, written as the cache is: what stands behind `lengths` means nothing, and states of a line of calls share it.
    """

    state: State | None
    lengths: np.ndarray[Any, Any]
    capacity: int
    sizes: Mapping[str, int]
    owner: object
    given: frozenset[str] = frozenset()
    text: Ids = field(kw_only=True, repr=False)

    @property
    def ids(self) -> list[list[int]]:
        """The tokens that each row holds."""
        return [row[:count].tolist() for row, count in zip(self.text, self.lengths, strict=True)]

    def note(self, block: Ids, valid: np.ndarray[Any, Any]) -> None:
        """So many tokens of each row of a block `[B, S]` come behind those that are held."""
        end = int((self.lengths + valid).max())
        if end > self.text.shape[1]:
            self.text = np.pad(self.text, ((0, 0), (0, max(end, 2 * self.text.shape[1]) - self.text.shape[1])))
        for row, new, at, count in zip(self.text, block, self.lengths, valid, strict=True):
            row[at : at + count] = new[:count]

    @property
    def length(self) -> Any:
        """Tokens in each row, int32 `[B]` on the device."""
        self.take(self.owner, peek=True)
        return jax.device_put(self.lengths.astype(np.int32))

    def copy(self) -> DecodeState:
        """The same in arrays of its own: `extend` may go on from both.

        Raises:
            SessionStateError: an earlier call consumed this state.
        """
        state = self.take(self.owner, peek=True).copy()
        return replace(self, state=state, lengths=self.lengths.copy(), text=self.text.copy())

    def check_room(self, valid: np.ndarray[Any, Any]) -> None:
        """So many more tokens of each row fit.

        Raises:
            SequenceLengthError: names the row.
        """
        check_room(self.lengths, valid, self.capacity, "prefill with a larger max_len")

    def take(self, owner: object, peek: bool = False) -> State:
        """The state, once."""
        if owner != self.owner:
            raise SessionStateError("this state belongs to another model; call prefill of the model you extend with")
        if self.state is None or self.state.length.is_deleted():  # a copy of this object may have consumed it
            raise SessionStateError("this state was consumed by an earlier call; go on with the state that it returned")
        state = self.state
        if not peek:
            self.state = None
        return state


def check_is_state(state: Any, where: str) -> DecodeState:
    """Raises:
    RequestError: it is something else.
    """
    if isinstance(state, DecodeState):
        return state
    pair = "; prefill returns logits and the state" if isinstance(state, tuple) else ""
    raise RequestError(f"{where}: expected the state that prefill returned, got {type(state).__name__}{pair}")


def run_padded(
    reader: BoundProgram, state: StateArrays, padded: Any, valid: Any, seq: int, beside: Arrays | None = None
) -> tuple[jax.Array, StateArrays]:
    """Run a cached program on checked tokens. Rows behind `valid` and positions from `seq` on are padding, and prefill
    wants one token of such a row."""
    programs, ids = reader.model.programs, reader.model.first_input
    idle = np.full(len(padded) - len(valid), int(reader.key.program == "prefill"))
    lengths = np.concatenate([valid, idle]).astype(np.int32)
    (out, *_), after = reader({ids: padded, "lengths": lengths, **(beside or {})}, state)
    if reader.key.last_only:
        return programs.call(last_rows, out, static=(len(valid),)), after
    return cropped(programs, out, len(valid), seq), after


# -- what is cut from the outputs of padded programs; compiled: the indices of an eager slice would be transfers -------


def last_rows(rows: int, logits: jax.Array) -> jax.Array:
    """Logits of the last tokens `[B, 1, V]` → those of the first rows `[rows, V]`."""
    return logits[:rows, 0]


def moved_back(array: jax.Array, starts: jax.Array) -> jax.Array:
    """`[B, S, …]` with each row where it began: `starts` `[B]` int32."""
    at = (jnp.arange(array.shape[1], dtype=jnp.int32)[None] - starts[:, None]) % array.shape[1]
    return jnp.take_along_axis(array, at.reshape(*at.shape, *(1,) * (array.ndim - 2)), axis=1)


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
