"""What `CausalLM.prefill` returns and `extend` consumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import Arrays, StateArrays
from rlx_jax.errors import RequestError, SessionStateError
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.state import State, check_room
from rlx_jax.text.padding import cropped
from rlx_jax.text.requests import Ids


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
