"""Results for tokens of texts, where a task reads each token, or each mask, in place of one vector for a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.pipeline import apply_tail, head_operands, head_product
from rlx_jax.compiler.settings import bucket_size
from rlx_jax.lowering.mir.head import Head
from rlx_jax.text.request_checks import Ids

# Name of the input with the positions of the selected tokens, `[batch, number]`.
SELECTED = "selected"


@dataclass(frozen=True)
class TokenSelection:
    """The tokens that a request returns results of.

    Attributes:
        token_id: those with this id, such as a mask; None: all.
    """

    token_id: int | None = None

    def count(self, ids: Ids) -> int:
        """Return the number of results of a text."""
        return len(ids) if self.token_id is None else int((ids == self.token_id).sum())

    def positions(self, rows: Sequence[Ids], num_rows: int, slots: int) -> Ids:
        """Return the positions of the selected tokens in each row, `[num_rows, number]` int32, filled up with 0.

        The number is `slots` if that is enough, else a power of two, so that few programs are compiled.
        """
        found = [np.flatnonzero(row == self.token_id) for row in rows]
        number = bucket_size(max(map(len, found), default=0), slots, None)
        out = np.zeros((num_rows, number), np.int32)
        for row, positions in zip(out, found, strict=False):
            row[: len(positions)] = positions
        return out


def take_tokens(outputs: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the outputs `[B, S, D]` of tokens at `positions` `[B, N]`: `[B, N, D]`."""
    return jnp.take_along_axis(outputs, positions[..., None], axis=1)


@dataclass(frozen=True)
class SelectedTokens:
    """Wrap a program so that it returns the output of the tokens at `SELECTED`, `[B, N, D]`.

    Attributes:
        head: the head of the program, which then ends before it and applies it to those tokens only; None: it selects
            from the outputs of all tokens.
        target: the platform that the program runs on.
    """

    head: Head | None
    target: str

    def __call__(self, run: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            model_inputs = {name: value for name, value in inputs.items() if name != SELECTED}
            (values, *weights), state = run(params, state, model_inputs)
            values = take_tokens(values, inputs[SELECTED])
            if self.head is not None:
                operands = head_operands(self.head, *weights)
                values = apply_tail(self.head, head_product(self.head, self.target, values, operands))
            return (values.astype(jnp.float32),), state

        return function
