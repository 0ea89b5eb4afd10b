"""`DecodeLoop`: a loop on the device that generates several tokens in one program.

A step of decoding depends only on data on the device, so the loop runs there: one dispatch generates `steps` tokens,
and the time of the host is hidden. The loop wraps the derived program `extend` with the same signature, so that
compiling, donation and proofs are the same as without it. Two small functions complete it: `new_rows` makes the rows of
a request, and `FirstTokens` chooses the first token of each row after prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.generate.sampler import SamplerValues, SamplingSteps, choose_tokens, finite_rows
from rlx_jax.generate.token_history import TokenHistory, adjust_logits
from rlx_jax.lowering.inspect.hlo import SAMPLER

Array = jax.Array

# Values in place of a token: the row has ended already; the logits are not finite.
STOPPED, NOT_FINITE = -1, -2


@dataclass(frozen=True)
class Sizes:
    """The padded sizes of a request.

    Attributes:
        batch: number of rows.
        prefill_widths: tokens of each prefill program, one for each chunk of the prompts.
        cache_len: length of the cache.
    """

    batch: int
    prefill_widths: tuple[int, ...]
    cache_len: int

    @property
    def state(self) -> dict[str, int]:
        """Return the sizes of the state by symbol."""
        return {"batch": self.batch, "context": self.cache_len}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestRows:
    """The rows of a request on the device, between two programs.

    Attributes:
        ids: `[B]` int32, the token chosen last.
        running: `[B]` bool, rows that have not ended.
        remaining: `[B]` int32, number of tokens that each row may still get.
        history: the earlier tokens of each row.
        keys: `[B]` random keys, one for each row; token n is sampled with fold_in(key, n). `[B, 0]` in greedy decoding.
    """

    ids: Any
    running: Any
    remaining: Any
    history: TokenHistory
    keys: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of tokens: natural logarithms of the model's probabilities, before the sampler.

    Attributes:
        chosen: `[…]` float32, log-probability of the chosen token.
        ids: `[…, k]` int32, the likeliest tokens, the likeliest first and of equal ones the smallest id.
        likeliest: `[…, k]` float32, log-probabilities of `ids`.
    """

    chosen: Any
    ids: Any
    likeliest: Any


def token_log_probs(logits: Array, chosen: Array, k: int) -> LogProbs:
    """Return the log-probabilities of the chosen tokens `[B]`, and of the k likeliest, from logits `[B, V]`."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    likeliest, ids = lax.top_k(log_probs, k)
    return LogProbs(jnp.take_along_axis(log_probs, chosen[:, None], axis=-1, mode="clip")[:, 0], ids, likeliest)


def zero_log_probs(batch: int, steps: int, k: int) -> LogProbs:
    """Return zeros with the shapes of the log-probabilities of `[B, steps]` tokens, as initial value of a loop."""
    zeros = jnp.zeros((batch, steps, k), jnp.float32)
    return LogProbs(jnp.zeros((batch, steps), jnp.float32), zeros.astype(jnp.int32), zeros)


def new_rows(do_sample: bool, key: Array, running: Array, budget: Array, history: TokenHistory) -> RequestRows:
    """Return the rows of a new request.

    The key of row i is fold_in(key, i), which does not depend on the other rows.

    Args:
        do_sample: whether tokens are sampled.
        key: key of the seed.
        running: `[B]` bool.
        budget: `[]` int32, number of new tokens of each row, at most.
        history: as in `RequestRows`.
    """
    batch = running.shape[0]
    indices = jnp.arange(batch, dtype=jnp.int32)
    no_keys = jnp.zeros((batch, 0), jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices) if do_sample else no_keys
    zeros = jnp.zeros(batch, jnp.int32)
    return RequestRows(ids=zeros, running=running, remaining=zeros + budget, history=history, keys=keys)


def ends_row(stop_mask: Array, ids: Array) -> Array:
    """Return which tokens end their row, of the shape of `ids` `[B, …]`; `stop_mask` as in `choose_next`."""
    if stop_mask.ndim == 1:
        return stop_mask[ids]
    return (stop_mask.reshape(stop_mask.shape[0], *(1,) * (ids.ndim - 1), -1) == ids[..., None]).any(axis=-1)


@dataclass(frozen=True)
class TokenChooser:
    """Base class of the programs that choose tokens."""

    sampling_steps: SamplingSteps

    def is_finite(self, logits: Array, adjusted_logits: Array, chosen: Array) -> Array:
        """Return in which rows logits are finite, `[N]` bool.

        Args:
            logits: `[N, V]`, from the model.
            adjusted_logits: `[N, V]`, the logits after `adjust_logits`.
            chosen: `[N]`, the tokens chosen from `adjusted_logits`.
        """
        is_finite = finite_rows(adjusted_logits, None if self.sampling_steps.do_sample else chosen)
        # Check both: `adjust_logits` clips infinite logits, and a bias may ban all remaining tokens.
        if adjusted_logits is not logits:
            is_finite &= finite_rows(logits)
        return is_finite

    def choose_next(
        self, logits: Array, rows: RequestRows, sampler_values: SamplerValues, stop_mask: Array, active: Array
    ) -> tuple[Array, RequestRows]:
        """Choose a token for some rows: logits `[B, V]` → the tokens `[B]` int32, and the updated rows.

        Args:
            stop_mask: `[V]` bool, ids that end a row; or `[B, K]` int32, the ids that end each row, padded with -1.
            active: `[B]` bool, the rows to choose for; the other rows do not change.
        """
        with jax.named_scope(SAMPLER):
            keys, history = rows.keys, rows.history
            if self.sampling_steps.do_sample:
                keys = jax.vmap(jax.random.fold_in)(keys, history.num_new)
            adjusted_logits = adjust_logits(self.sampling_steps, sampler_values, logits, history, stop_mask)
            chosen = choose_tokens(self.sampling_steps, sampler_values, adjusted_logits, keys)
            is_finite = self.is_finite(logits, adjusted_logits, chosen)
        tokens = jnp.where(active, jnp.where(is_finite, chosen, NOT_FINITE), STOPPED)
        remaining = rows.remaining - active.astype(jnp.int32)
        ended = active & (ends_row(stop_mask, chosen) | (remaining <= 0) | ~is_finite)
        ids = jnp.where(active, chosen, rows.ids)
        return tokens, replace(
            rows, ids=ids, running=rows.running & ~ended, remaining=remaining, history=history.append(chosen, active)
        )


@dataclass(frozen=True)
class FirstTokens(TokenChooser):
    """Program that chooses the first token of rows after prefill; returns (tokens `[B, 1]`, rows, log-probabilities).

    Prompts of different lengths may end in different chunks, so it is called once for each chunk in which one ends. Its
    arguments are `logits` `[B, 1, V]`; `active` `[B]` bool, the rows to choose for; and `first` `[B, 1]` and
    `first_log_probs`, the tokens and log-probabilities of the other rows.

    Attributes:
        num_logprobs: number of likeliest tokens to return with log-probabilities; None to return no log-probabilities.
    """

    num_logprobs: int | None = None

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it; see `rlx_jax.compiler.executable.HasRequestArguments`."""
        return {"samplers": self.sampling_steps.text, "logprobs": str(self.num_logprobs)}

    def __call__(
        self, logits: Array, rows: RequestRows, active: Array, first: Array, sampler_values: SamplerValues,
        stop_mask: Array, first_log_probs: LogProbs | None = None,
    ) -> tuple[Array, RequestRows, LogProbs | None]:  # fmt: skip
        tokens, rows = self.choose_next(logits[:, 0], rows, sampler_values, stop_mask, active)
        first = jnp.where(active[:, None], tokens[:, None], first)
        if self.num_logprobs is None:
            return first, rows, None
        new_log_probs = token_log_probs(logits[:, 0], rows.ids, self.num_logprobs)
        if first_log_probs is None:
            first_log_probs = zero_log_probs(active.shape[0], 1, self.num_logprobs)

        def merge(new: Array, old: Array) -> Array:
            return jnp.where(active.reshape(-1, *(1,) * new.ndim), new[:, None], old)

        return first, rows, jax.tree.map(merge, new_log_probs, first_log_probs)


@dataclass(frozen=True)
class DecodeLoop(TokenChooser):
    """Wrapper of the program `extend`: feed the last token and choose the next one, `steps` times.

    Inputs: `rows`, `sampler_values`, `stop_mask`. Outputs: (tokens `[B, steps]`, rows), state. With `num_logprobs` the
    `LogProbs` of the tokens follow the rows. Rows that have ended do not change. Rows that are slots have operands of
    their own, and the loop ends when at most `min_running` (`[]` int32, one more input) of them run.

    Attributes:
        ids_input: name of the token input of `extend`.
        steps: number of tokens per row.
        early_exit: end the loop when every row has ended. Otherwise the number of steps is fixed, and the host thread
            of a GPU prepares the next call instead of waiting for the loop's condition.
        num_logprobs: as in `FirstTokens`.
        slots: whether the rows are slots.
        stop_width: number of stop ids of each slot, padding included; the programs differ, as their operands do.
        max_tokens: tokens of the history of a row if the program reads them; no array of the state may have so many.
    """

    ids_input: str
    steps: int
    early_exit: bool
    num_logprobs: int | None = None
    slots: bool = False
    stop_width: int = 0
    max_tokens: int = 0

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it, as `FirstTokens` does."""
        first = FirstTokens(self.sampling_steps, self.num_logprobs).arguments()
        return {**first, "slots": "True"} if self.slots else first

    def __call__(self, extend: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            def step(carry: Any) -> Any:
                i, rows, state, out = carry
                extend_inputs = {self.ids_input: rows.ids[:, None], "lengths": rows.running.astype(jnp.int32)}
                outputs, state = extend(params, state, extend_inputs)
                logits = outputs[0][:, 0]
                new_ids, rows = self.choose_next(
                    logits, rows, inputs["sampler_values"], inputs["stop_mask"], rows.running
                )
                k = self.num_logprobs
                step_out = (new_ids, *([] if k is None else [token_log_probs(logits, rows.ids, k)]))
                out = jax.tree.map(lambda a, new: lax.dynamic_update_slice_in_dim(a, new[:, None], i, 1), out, step_out)
                return i + 1, rows, state, out

            rows = inputs["rows"]
            batch = rows.ids.shape[0]
            tokens = jnp.full((batch, self.steps), STOPPED, jnp.int32)
            k = self.num_logprobs
            out: Any = (tokens, *([] if k is None else [zero_log_probs(batch, self.steps, k)]))
            start = (jnp.int32(0), rows, state, out)

            def continues(carry: Any) -> Array:
                running: Array = carry[1].running
                has_work = running.sum() > inputs["min_running"] if self.slots else running.any()
                return jnp.logical_and(carry[0] < self.steps, has_work)

            if self.early_exit:
                _, rows, state, out = lax.while_loop(continues, step, start)
            else:
                _, rows, state, out = lax.fori_loop(0, self.steps, lambda i, c: step(c), start)
            return (out[0], rows, *out[1:]), state

        return function
