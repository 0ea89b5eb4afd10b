"""The loop that generates: read the prompt and choose a token, then several tokens in one program.

While the tokens of a step depend only on what is on the device, the loop stays there: one dispatch gives `steps`
tokens, and the host's time does not show. Both programs are wrapped around the derived ones, with the same
signature, so that they are compiled, donated and proved in the same place as those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.executable import Function, StateArrays
from rlx_jax.generate.sampler import Knobs, Method, choose, finite_rows
from rlx_jax.inputs import random_key

Array = jax.Array

STOPPED, NOT_FINITE = -1, -2
"""What stands in place of a token: the row had ended before; its logits were not finite."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of a request on the device, between two programs.

    Attributes:
        ids: `[B]` int32, the token chosen last.
        running: `[B]` bool, rows that go on.
        left: `[B]` int32, tokens that each row may still get.
        new: `[]` int32, tokens chosen so far for rows that run.
        seen: `[B, V]` bool, tokens that a row holds; `[B, 0]` where no penalty asks for it.
        keys: `[B]` random keys, one for each row; the draw of token n uses fold_in(key, n).
    """

    ids: Any
    running: Any
    left: Any
    new: Any
    seen: Any
    keys: Any


@dataclass(frozen=True)
class Choosing:
    """What both programs share: how to choose, and the flow's name for its ids."""

    ids_input: str
    method: Method

    def next(self, logits: Array, rows: Rows, knobs: Knobs, ends: Array) -> tuple[Array, Rows]:
        """Choose a token for every running row: logits `[B, V]` → the tokens `[B]` int32, and the rows after it."""
        keys = jax.vmap(jax.random.fold_in, (0, None))(rows.keys, rows.new)
        chosen = choose(self.method, knobs, logits, rows.seen, keys)
        fine = finite_rows(logits)
        shown = jnp.where(rows.running, jnp.where(fine, chosen, NOT_FINITE), STOPPED)
        left = rows.left - rows.running.astype(jnp.int32)
        ended = (chosen[:, None] == ends[None, :]).any(axis=1) | (left <= 0) | ~fine
        seen = rows.seen
        if self.method.penalised:
            seen = seen.at[jnp.arange(seen.shape[0], dtype=jnp.int32), chosen].set(True)
        ids = jnp.where(rows.running, chosen, rows.ids)
        return shown, replace(rows, ids=ids, running=rows.running & ~ended, left=left, new=rows.new + 1, seen=seen)


@dataclass(frozen=True)
class ReadPrompt(Choosing):
    """Around `prefill` with logits of the last token: (tokens `[B, 1]`, rows), state.

    Inputs: `tokens` `[B, S]` and `lengths` `[B]` int32, `rows`, `knobs`, `ends` `[E]` int32 (−1 matches nothing).
    """

    def __call__(self, prefill: Function) -> Function:
        def function(
            params: Mapping[str, Any], state: StateArrays, inputs: Mapping[str, Any]
        ) -> tuple[tuple[Any, ...], StateArrays]:
            tokens, lengths, rows = inputs["tokens"], inputs["lengths"], inputs["rows"]
            outputs, state = prefill(params, state, {self.ids_input: tokens, "lengths": lengths})
            if self.method.penalised:
                rows = replace(rows, seen=_mark(rows.seen, tokens, lengths))
            shown, rows = self.next(outputs[0][:, 0], rows, inputs["knobs"], inputs["ends"])
            return (shown[:, None], rows), state

        return function


@dataclass(frozen=True)
class DecodeLoop(Choosing):
    """Around `extend`: feed the last token, choose the next, `steps` times.

    Inputs: `rows`, `knobs`, `ends`. Outputs: (tokens `[B, steps]`, rows), state.
    With `early` the loop ends when every row has. Without it the number of turns is known beforehand, and a GPU's
    host thread need not wait for the loop: it prepares the next call meanwhile. Rows that have ended change nothing.
    """

    steps: int
    early: bool

    def __call__(self, extend: Function) -> Function:
        def function(
            params: Mapping[str, Any], state: StateArrays, inputs: Mapping[str, Any]
        ) -> tuple[tuple[Any, ...], StateArrays]:
            def step(carry: Any) -> Any:
                i, rows, state, out = carry
                fed = {self.ids_input: rows.ids[:, None], "lengths": rows.running.astype(jnp.int32)}
                outputs, state = extend(params, state, fed)
                shown, rows = self.next(outputs[0][:, 0], rows, inputs["knobs"], inputs["ends"])
                return i + 1, rows, state, lax.dynamic_update_slice(out, shown[:, None], (jnp.int32(0), i))

            rows = inputs["rows"]
            out = jnp.full((rows.ids.shape[0], self.steps), STOPPED, jnp.int32)
            start = (jnp.int32(0), rows, state, out)
            if self.early:
                _, rows, state, out = lax.while_loop(lambda c: (c[0] < self.steps) & c[1].running.any(), step, start)
            else:
                _, rows, state, out = lax.fori_loop(0, self.steps, lambda i, c: step(c), start)
            return (out, rows), state

        return function


def _mark(seen: Array, tokens: Array, lengths: Array) -> Array:
    """`seen` with the valid tokens `[B, S]` of each row."""
    batch, seq = tokens.shape
    valid = jnp.arange(seq, dtype=jnp.int32)[None, :] < lengths[:, None]
    at = jnp.where(valid, tokens, seen.shape[1])
    return seen.at[jnp.arange(batch, dtype=jnp.int32)[:, None], at].set(True, mode="drop")


def start_rows(batch: int, budget: int, method: Method, vocab_size: int, seed: int) -> Rows:
    """The rows of a new request. The key of row i is fold_in(seed, i): it does not depend on the other rows."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(random_key("seed", seed), jnp.arange(batch, dtype=jnp.int32))
    return Rows(
        ids=np.zeros(batch, np.int32),
        running=np.ones(batch, bool),
        left=np.full(batch, budget, np.int32),
        new=np.int32(0),
        seen=np.zeros((batch, vocab_size if method.penalised else 0), bool),
        keys=keys,
    )
