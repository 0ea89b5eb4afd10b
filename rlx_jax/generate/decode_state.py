"""`DecodeState`: the cache of a batch, which `CausalLM.prefill` returns and `extend` consumes.

The module also has the functions that copy a state to other rows and cache lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import Arrays, StateArrays
from rlx_jax.errors import RequestError, SessionStateError
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.sequence_state import LENGTH, State, check_capacity
from rlx_jax.text.request_checks import Ids, crop, crop_to


@dataclass(eq=False)
class DecodeState:
    """The cache of a batch, which `prefill` returns and `extend` consumes.

    Attributes:
        state: the arrays on the device; None when the state was consumed.
        lengths: int64 `[B]` on the host, number of tokens in each row.
        capacity: the most tokens of a row.
        sizes: sizes of the arrays by symbol, such as `batch` and `context`; as they are padded to a bucket, there may
            be more rows and slots than in use.
        owner: `LanguageModel.owner` of the model that the state belongs to.
        optional_inputs: names of the optional inputs that the prompt was prefilled with.
        text: `[B, n]` int32, the tokens on the host. Entries past `lengths` are undefined. Successive states share the
            array.
    """

    state: State | None
    lengths: np.ndarray[Any, Any]
    capacity: int
    sizes: Mapping[str, int]
    owner: object
    optional_inputs: frozenset[str] = frozenset()
    text: Ids = field(kw_only=True, repr=False)

    @property
    def ids(self) -> list[list[int]]:
        """Return the tokens of each row."""
        return [row[:count].tolist() for row, count in zip(self.text, self.lengths, strict=True)]

    def append_tokens(self, block: Ids, valid: np.ndarray[Any, Any]) -> None:
        """Append the first `valid` `[B]` tokens of each row of a block `[B, S]` to `text`."""
        end = int((self.lengths + valid).max())
        if end > self.text.shape[1]:  # at least double the width, so that appending takes amortized constant time
            self.text = np.pad(self.text, ((0, 0), (0, max(end, 2 * self.text.shape[1]) - self.text.shape[1])))
        for row, new_tokens, length, count in zip(self.text, block, self.lengths, valid, strict=True):
            row[length : length + count] = new_tokens[:count]

    @property
    def length(self) -> Any:
        """Return the number of tokens in each row, int32 `[B]` on the device."""
        self.take(self.owner, peek=True)
        return jax.device_put(self.lengths.astype(np.int32))

    def copy(self) -> DecodeState:
        """Return a copy with new arrays; `extend` may continue both.

        Raises:
            SessionStateError: an earlier call consumed this state.
        """
        state = self.take(self.owner, peek=True).copy()
        return replace(self, state=state, lengths=self.lengths.copy(), text=self.text.copy())

    def check_capacity(self, valid: np.ndarray[Any, Any]) -> None:
        """Check that `valid` `[B]` more tokens fit into each row.

        Raises:
            SequenceLengthError: they do not; names the row.
        """
        check_capacity(self.lengths, valid, self.capacity, "prefill with a larger max_len")

    def take(self, owner: object, peek: bool = False) -> State:
        """Return the arrays and mark this state as consumed.

        Args:
            owner: the model that continues the state.
            peek: do not mark it.

        Raises:
            SessionStateError: the state belongs to another model, or was consumed already.
        """
        if owner != self.owner:
            raise SessionStateError("this state belongs to another model; call prefill of the model you extend with")
        if self.state is None or self.state.length.is_deleted():  # a copy of this object may have consumed it
            raise SessionStateError("this state was consumed by an earlier call; use the state that it returned")
        state = self.state
        if not peek:
            self.state = None
        return state


def check_is_state(state: Any, where: str) -> DecodeState:
    """Check that an argument is a state, and return it.

    Args:
        where: the argument, for the error message.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(state, DecodeState):
        return state
    pair = "; prefill returns logits and the state" if isinstance(state, tuple) else ""
    raise RequestError(f"{where}: expected the state that prefill returned, got {type(state).__name__}{pair}")


def run_padded(
    program: BoundProgram, state: StateArrays, padded: Any, valid: Any, seq: int, other_inputs: Arrays | None = None,
    names: Sequence[str] = (),
) -> tuple[jax.Array, StateArrays, dict[str, jax.Array]]:  # fmt: skip
    """Run a prefill or extend program on padded tokens, and return its logits without padding, the new state, and the
    other outputs by name.

    Args:
        padded: tokens, with padding.
        valid: number of tokens in each row of the request.
        seq: width of the tokens without padding.
        other_inputs: the other inputs of the flow.
        names: the names of the outputs after the logits, which keep their padding.
    """
    programs, ids = program.model.programs, program.model.first_input
    # Prefill needs at least one token in every row, also in padding.
    idle = np.full(len(padded) - len(valid), int(program.key.program == "prefill"))
    lengths = np.concatenate([valid, idle]).astype(np.int32)
    (logits, *values), new_state = program({ids: padded, "lengths": lengths, **(other_inputs or {})}, state)
    others = dict(zip(names, values, strict=False))
    rows = len(valid)
    if not program.key.last_only:
        logits = crop_to(programs, logits, rows, seq)
    elif rows < len(logits):  # warm-up covers each number of rows
        logits = programs.run_helper(crop, logits, static=((rows,),))
    return logits, new_state, others


def last_tokens(logits: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the logits `[B, V]` of the last token of each row, from those of all tokens `[B, S, V]`."""
    return jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1, mode="clip")[:, 0]


def shift_rows(array: jax.Array, starts: jax.Array) -> jax.Array:
    """Shift row i of `[B, S, …]` right by `starts[i]` columns, back to the left-padded columns of the caller."""
    source = (jnp.arange(array.shape[1], dtype=jnp.int32)[None] - starts[:, None]) % array.shape[1]
    return jnp.take_along_axis(array, source.reshape(*source.shape, *(1,) * (array.ndim - 2)), axis=1)


def prompt_indices(batch: int, answers: int, prompts: int) -> Ids:
    """Return the index of the prompt of each of `batch` rows, `[batch]` int32.

    The answers to a prompt are adjacent rows. Padding rows have any valid prompt.
    """
    return np.minimum(np.arange(batch) // answers, prompts - 1).astype(np.int32)


def gather_rows(axis: int, array: jax.Array, rows: jax.Array) -> jax.Array:
    """Gather rows of an array along `axis`: `[…, P, …]` and indices `[B]` → `[…, B, …]`."""
    return jnp.take(array, rows, axis=axis, mode="clip")


class LeafMove(NamedTuple):
    """A description of how one array of a state is copied to other rows and another cache length.

    Attributes:
        name: the array.
        row_axis: its row axis.
        shape: its new shape.
    """

    name: str
    row_axis: int
    shape: tuple[int, ...]


def move_state(
    leaves: tuple[LeafMove, ...], state: StateArrays, rows: jax.Array, lengths: jax.Array | None = None
) -> StateArrays:
    """Return a state with other rows and other numbers of slots.

    Args:
        leaves: the arrays to change.
        rows: `[B]`, indices of the rows to gather.
        lengths: `[B]`, new lengths, to truncate the state; by default they stay.
    """
    length = gather_rows(0, state[LENGTH], rows)
    moved = {leaf.name: move_leaf(leaf, state[leaf.name], rows, length) for leaf in leaves}
    return state | moved | {LENGTH: length if lengths is None else lengths}


def move_leaf(leaf: LeafMove, array: jax.Array, rows: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return an array with other rows and slots.

    The token at position p is in slot p mod T, both in a full cache and in a ring buffer of the last T tokens.
    """
    array = gather_rows(leaf.row_axis, array, rows)
    sizes = enumerate(zip(array.shape, leaf.shape, strict=True))
    slot_axis = next((axis for axis, (old, new) in sizes if axis != leaf.row_axis and old != new), None)
    if slot_axis is None:
        return array
    last_position, old_slots, num_slots = lengths[:, None] - 1, array.shape[slot_axis], leaf.shape[slot_axis]
    # The latest position in each new slot, and whether the old array still has its token.
    slots = jnp.arange(num_slots, dtype=jnp.int32)[None]
    position = last_position - jnp.remainder(last_position - slots, num_slots)
    is_cached = position >= jnp.maximum(last_position + 1 - old_slots, 0)
    shape = [1] * array.ndim
    shape[leaf.row_axis], shape[slot_axis] = position.shape
    slot = jnp.where(is_cached, jnp.remainder(position, old_slots), 0).reshape(shape)
    moved = jnp.take_along_axis(array, slot, axis=slot_axis, mode="clip")
    return jnp.where(is_cached.reshape(shape), moved, jnp.zeros_like(moved))


def resize_state(program: BoundProgram, state: StateArrays, rows: Ids, lengths: Ids | None = None) -> StateArrays:
    """Copy rows of a state of the same flow to the sizes of `program`, in new arrays; see `move_state`."""
    programs, moves = program.model.programs, leaf_moves(program)
    arguments = (state, rows) if lengths is None else (state, rows, lengths)
    shardings = programs.state_shardings(program.key)
    return programs.run_helper(move_state, *arguments, static=(moves,), out_shardings=shardings)


def leaf_moves(program: BoundProgram) -> tuple[LeafMove, ...]:
    """Return how to copy the arrays of a state to the sizes of `program`; those without rows, common to all, are left
    out."""
    sizes, template = dict(program.key.binding), program.model.programs.template(program.key.symbolic)
    axes = {name: [str(size) for size in t.shape] for name, t in template.state.items() if name != LENGTH}
    return tuple(
        LeafMove(name, dims.index("batch"), tuple(map(int, template.state[name].bind(sizes).shape)))
        for name, dims in axes.items()
        if "batch" in dims
    )


def fits(program: BoundProgram, state: StateArrays) -> bool:
    """Return whether a state has the shapes that a program expects."""
    sizes, types = dict(program.key.binding), program.model.programs.template(program.key.symbolic).state
    return all(tuple(state[name].shape) == t.bind(sizes).shape for name, t in types.items())
