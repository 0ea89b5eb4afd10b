"""A user's function of one token, on pytrees, as a function of their leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, RlxError, first_line, shown
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class UsersStep:
    """A user's `fn(state, x_t, *params) -> (state, y_t)` on pytrees, as a function of their leaves.

    Attributes:
        names: of the leaves of the state.
        tokens: how many leaves x has.
        given: types of all leaves.
        state, x, params: their forms.
    """

    fn: Callable[..., Any]
    label: str
    names: tuple[str, ...]
    tokens: int
    given: tuple[TensorType, ...]
    state: Any
    x: Any
    params: Any

    def __call__(self, *arrays: Any) -> tuple[list[Any], Any]:
        n, m = len(self.names), len(self.names) + self.tokens
        leaves = (arrays[:n], arrays[n:m], arrays[m:])
        forms = (self.state, self.x, self.params)
        state, x, params = (jax.tree.unflatten(form, part) for form, part in zip(forms, leaves, strict=True))
        try:
            made = self.fn(state, x, *params)
        except RlxError as error:
            raise GraphError(
                f"recurrent({self.label}) reads a value or a weight of the flow: give it as one of the parameters "
                f"({first_line(error)})"
            ) from error
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise GraphError(
                f"recurrent({self.label}): expected the step to return a pair, (state, y_t), got {shown(made)}"
            )
        if not jax.tree.leaves(made[1]):
            raise GraphError(f"recurrent({self.label}) gives no y; it returns (state, y_t)")
        return self._kept(made[0]), made[1]

    def _kept(self, after: Any) -> list[Any]:
        """The leaves of the next state, which are what they were."""
        form = jax.tree.structure(after)
        if form != self.state:
            raise GraphError(f"recurrent({self.label}): the state enters as {self.state} and leaves as {form}")
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(after)]
        for name, want, leaf in zip(self.names, self.given, leaves, strict=False):
            found = TensorType(tuple(leaf.shape), np.dtype(leaf.dtype))
            if found != want:
                which = "the state" if name == "state" else f"leaf {name} of the state"
                raise GraphError(
                    f"recurrent({self.label}): {which} enters as {want} and leaves as {found}: a state keeps its type; "
                    "cast it, or begin with an init of that type"
                )
        return leaves
