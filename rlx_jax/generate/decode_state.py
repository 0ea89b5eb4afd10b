"""What `CausalLM.prefill` returns and `extend` consumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import SessionStateError
from rlx_jax.state import State


@dataclass(eq=False)
class DecodeState:
    """The cache of a batch: what `prefill` returns and `extend` consumes.

    `lengths` are the tokens each row holds, int64 `[B]` on the host; `capacity` is how many it may hold. `sizes` are
    `batch` and `context` of the arrays: padded to a bucket, they have rows and slots behind those, which hold nothing.
    """

    state: State | None
    lengths: np.ndarray[Any, Any]
    capacity: int
    sizes: Mapping[str, int]
    owner: object

    @property
    def length(self) -> Any:
        """Tokens in each row, int32 `[B]` on the device."""
        return cropped(self.take(self.owner, peek=True).length, len(self.lengths))

    def take(self, owner: object, peek: bool = False) -> State:
        """The state, once."""
        if owner is not self.owner:
            raise SessionStateError("this state belongs to another model; call prefill of the model you extend with")
        if self.state is None or self.state.length.is_deleted():  # a copy of this object may have consumed it
            raise SessionStateError("this state was consumed by an earlier call; go on with the state that it returned")
        state = self.state
        if not peek:
            self.state = None
        return state


def cropped(array: jax.Array, *sizes: int) -> jax.Array:
    """The first entries of each axis, without a copy where that is all of them."""
    if array.shape[: len(sizes)] == sizes:
        return array
    return array[tuple(slice(size) for size in sizes)]
