"""The loop that generates: read the prompt and choose a token, then several tokens in one program.

While the tokens of a step depend only on what is on the device, the loop stays there: one dispatch gives `steps`
tokens, and the host's time does not show. The loop is wrapped around the derived program, with the same signature, so
that it is compiled, donated and proved in the same place. Around it are two small functions: one makes the rows of a
request, one chooses the first token of each row after its prompt has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.generate.sampler import Knobs, Method, adjusted, choose, finite_rows
from rlx_jax.lowering.inspect.hlo import SAMPLER

Array = jax.Array

# What stands in place of a token: the row had ended before; its logits were not finite.
STOPPED, NOT_FINITE = -1, -2


@dataclass(frozen=True)
class Sizes:
    """What a request is padded to: rows, tokens of the programs that read full prompts, and slots of the cache."""

    batch: int
    widths: tuple[int, ...]
    slots: int

    @property
    def state(self) -> dict[str, int]:
        """The sizes of the state."""
        return {"batch": self.batch, "context": self.slots}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of a request on the device, between two programs.

    Attributes:
        ids: `[B]` int32, the token chosen last.
        running: `[B]` bool, rows that go on.
        left: `[B]` int32, tokens that each row may still get.
        new: `[B]` int32, tokens chosen so far.
        seen: `[B, V]` bool, tokens that a row holds; `[B, 0]` where no penalty asks for it.
        keys: `[B]` random keys, one for each row; the draw of token n uses fold_in(key, n). `[B, 0]` without draws.
    """

    ids: Any
    running: Any
    left: Any
    new: Any
    seen: Any
    keys: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogProbs:
    """What the model says of tokens, in natural logarithms, before a sampler changes it.

    Attributes:
        chosen: `[…]` float32, of the token that was chosen.
        ids: `[…, k]` int32, the likeliest tokens, the likeliest first and of equal ones the smallest id.
        likeliest: `[…, k]` float32, of these.
    """

    chosen: Any
    ids: Any
    likeliest: Any


def log_probs_of(logits: Array, chosen: Array, k: int) -> LogProbs:
    """Of logits `[B, V]` and the tokens chosen `[B]`."""
    found = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    most, ids = lax.top_k(found, k)
    return LogProbs(jnp.take_along_axis(found, chosen[:, None], axis=-1, mode="clip")[:, 0], ids, most)


def no_log_probs(batch: int, steps: int, k: int) -> LogProbs:
    """Room for those of `[B, steps]` tokens."""
    wide = jnp.zeros((batch, steps, k), jnp.float32)
    return LogProbs(jnp.zeros((batch, steps), jnp.float32), wide.astype(jnp.int32), wide)


def new_rows(draws: bool, key: Array, running: Array, budget: Array, seen: Array) -> Rows:
    """The rows of a new request; `draws`: whether tokens are drawn. The key of row i is fold_in(seed, i): it does not
    depend on the other rows. `key` is that of the seed; `running` `[B]` bool; `budget` `[]` int32; `seen` as in `Rows`.
    """
    batch = running.shape[0]
    numbers = jnp.arange(batch, dtype=jnp.int32)
    none = jnp.zeros((batch, 0), jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers) if draws else none
    zeros = jnp.zeros(batch, jnp.int32)
    return Rows(ids=zeros, running=running, left=zeros + budget, new=zeros, seen=seen, keys=keys)


@dataclass(frozen=True)
class Choosing:
    """How to choose a token, wherever that is done."""

    method: Method

    def finite(self, logits: Array, ready: Array, chosen: Array) -> Array:
        """Whether the logits `[N, V]` are, which `adjusted` made `ready`, from which `chosen` `[N]` was chosen."""
        fine = finite_rows(ready, None if self.method.draws else chosen)
        if ready is not logits:  # a bias may ban the last tokens that the model does not
            fine &= finite_rows(logits)
        return fine

    def next(self, logits: Array, rows: Rows, knobs: Knobs, ends: Array, now: Array) -> tuple[Array, Rows]:
        """Choose a token for the rows `now` `[B]` bool: logits `[B, V]` → the tokens `[B]` int32, and the rows after.

        `ends` `[V]` bool: ids that end a row.
        """
        with jax.named_scope(SAMPLER):
            keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.new) if self.method.draws else rows.keys
            ready = adjusted(self.method, knobs, logits, rows.seen)
            chosen = choose(self.method, knobs, ready, keys)
            fine = self.finite(logits, ready, chosen)
        shown = jnp.where(now, jnp.where(fine, chosen, NOT_FINITE), STOPPED)
        one = now.astype(jnp.int32)
        left = rows.left - one
        ended = now & (ends[chosen] | (left <= 0) | ~fine)
        seen = rows.seen
        if self.method.penalised:
            seen = seen.at[jnp.arange(seen.shape[0], dtype=jnp.int32), chosen].max(now)
        ids = jnp.where(now, chosen, rows.ids)
        return shown, replace(rows, ids=ids, running=rows.running & ~ended, left=left, new=rows.new + one, seen=seen)


@dataclass(frozen=True)
class FirstTokens(Choosing):
    """The first token of rows whose prompts have been read: (tokens `[B, 1]`, rows, their log-probabilities).

    `logits` `[B, 1, V]`; `now` `[B]` bool, the rows to choose for; `first` `[B, 1]` and `told`, what other rows have.
    Prompts of different lengths may end in different chunks, so this is called once for each chunk in which one does.
    `top`: how many of the likeliest tokens are told; None tells nothing, and `told` is None.
    """

    top: int | None = None

    def arguments(self) -> Mapping[str, str]:
        """See `rlx_jax.compiler.executable.SaysArguments`."""
        return {"samplers": self.method.text, "logprobs": str(self.top)}

    def __call__(
        self, logits: Array, rows: Rows, now: Array, first: Array, knobs: Knobs, ends: Array,
        told: LogProbs | None = None,
    ) -> tuple[Array, Rows, LogProbs | None]:  # fmt: skip
        shown, rows = self.next(logits[:, 0], rows, knobs, ends, now)
        first = jnp.where(now[:, None], shown[:, None], first)
        if self.top is None:
            return first, rows, None
        here = log_probs_of(logits[:, 0], rows.ids, self.top)
        if told is None:
            told = no_log_probs(now.shape[0], 1, self.top)

        def merge(new: Array, old: Array) -> Array:
            return jnp.where(now.reshape(-1, *(1,) * new.ndim), new[:, None], old)

        return first, rows, jax.tree.map(merge, here, told)


@dataclass(frozen=True)
class DecodeLoop(Choosing):
    """Around `extend`: feed the last token, choose the next, `steps` times.

    Inputs: `rows`, `knobs`, `ends`. Outputs: (tokens `[B, steps]`, rows), state; with `top` the `LogProbs` of the
    tokens and of so many likeliest ones behind the rows.
    With `early` the loop ends when every row has. Without it the number of turns is known beforehand, and a GPU's
    host thread need not wait for the loop: it prepares the next call meanwhile. Rows that have ended change nothing.
    """

    ids_input: str
    steps: int
    early: bool
    top: int | None = None
    arguments = FirstTokens.arguments

    def __call__(self, extend: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            def step(carry: Any) -> Any:
                i, rows, state, out = carry
                fed = {self.ids_input: rows.ids[:, None], "lengths": rows.running.astype(jnp.int32)}
                outputs, state = extend(params, state, fed)
                logits = outputs[0][:, 0]
                shown, rows = self.next(logits, rows, inputs["knobs"], inputs["ends"], rows.running)
                made = (shown,) if self.top is None else (shown, log_probs_of(logits, rows.ids, self.top))
                out = jax.tree.map(lambda a, new: lax.dynamic_update_slice_in_dim(a, new[:, None], i, 1), out, made)
                return i + 1, rows, state, out

            rows = inputs["rows"]
            batch = rows.ids.shape[0]
            tokens = jnp.full((batch, self.steps), STOPPED, jnp.int32)
            out: Any = (tokens,) if self.top is None else (tokens, no_log_probs(batch, self.steps, self.top))
            start = (jnp.int32(0), rows, state, out)
            if self.early:
                _, rows, state, out = lax.while_loop(lambda c: (c[0] < self.steps) & c[1].running.any(), step, start)
            else:
                _, rows, state, out = lax.fori_loop(0, self.steps, lambda i, c: step(c), start)
            return (out[0], rows, *out[1:]), state

        return function
