"""`DecodeLoop`: a loop on the device that generates several tokens in one program.

A step of decoding depends only on data on the device, so the loop runs there: one dispatch generates `steps` tokens,
and the time of the host is hidden. The loop wraps the derived program `extend` with the same signature, so that
compiling, donation and proofs are the same as without it. `FirstTokens` makes the rows of a request, and chooses their
first tokens after prefill. For slots, `FillSlots` copies prefilled
prompts into rows of a state, and `MoveRows` rows to other slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.generate.sampler import SamplerValues, SamplingSteps, choose_tokens, finite_rows
from rlx_jax.generate.token_history import TokenHistory, adjust_logits
from rlx_jax.lowering.inspect.hlo import SAMPLER
from rlx_jax.runtime.random_keys import KEY_IMPL

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


# Log-probabilities of one position: the likeliest ids with their values, the likeliest first.
TopLogProbs = tuple[tuple[int, float], ...]


@dataclass(eq=False)
class RowTokens:
    """New tokens of one row on the host.

    Attributes:
        ids: the tokens.
        log_probs, top_logprobs: their log-probabilities, and the likeliest tokens at each position, if requested.
        failed: whether the logits after the last token were not finite, which ended the row.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogProbs] = field(default_factory=list)
    failed: bool = False

    def append(self, tokens: np.ndarray[Any, Any], row: int, log_probs: LogProbs | None) -> int:
        """Append a row of a block `[B, n]` on the host, with its log-probabilities if there are any.

        Returns:
            the number of new tokens.
        """
        values = tokens[row].tolist()
        new = [value for value in values if value >= 0]
        self.ids += new
        self.failed = self.failed or NOT_FINITE in values
        if log_probs is not None:
            is_token = tokens[row] >= 0
            ids, likeliest = (array[row][is_token].tolist() for array in (log_probs.ids, log_probs.likeliest))
            self.log_probs += log_probs.chosen[row][is_token].tolist()
            self.top_logprobs += [tuple(zip(*pair, strict=True)) for pair in zip(ids, likeliest, strict=True)]
        return len(new)

    def extend(self, new: RowTokens) -> None:
        """Append the next tokens."""
        self.ids += new.ids
        self.log_probs += new.log_probs
        self.top_logprobs += new.top_logprobs
        self.failed = self.failed or new.failed

    def cut(self, count: int) -> None:
        """Drop everything after the first `count` tokens."""
        for values in (self.ids, self.log_probs, self.top_logprobs):
            del values[count:]
        self.failed = False


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


def initial_history(
    steps: SamplingSteps, prompts: Sequence[Sequence[int]], vocab_size: int, max_tokens: int
) -> TokenHistory:
    """Return the history of rows before their first new token, on the host.

    Args:
        prompts: the ids of each row.
        max_tokens: the most tokens of a row, prompt and answer; 0 if the program does not read them.
    """
    batch = len(prompts)
    seen = np.zeros((batch, vocab_size if steps.penalised else 0), bool)
    counts = np.zeros((batch, vocab_size if steps.counted else 0), np.int32)
    tokens = np.full((batch, max_tokens), -1, np.int32)
    for row, ids in enumerate(prompts):
        if steps.penalised:  # the repetition penalty applies to prompt tokens, too
            seen[row, list(ids)] = True
        if max_tokens:
            tokens[row, : len(ids)] = ids
    return TokenHistory(np.zeros(batch, np.int32), seen, counts, tokens)


def ends_row(stop_mask: Array, ids: Array) -> Array:
    """Return which tokens end their row, of the shape of `ids` `[B, …]`; `stop_mask` as in `choose_next`."""
    if stop_mask.ndim == 1:
        return stop_mask[ids]
    return (stop_mask.reshape(stop_mask.shape[0], *(1,) * (ids.ndim - 1), -1) == ids[..., None]).any(axis=-1)


@dataclass(frozen=True)
class TokenChooser:
    """Base class of the programs that choose tokens.

    Attributes:
        sampling_steps: how they are chosen.
        num_logprobs: number of likeliest tokens to return with log-probabilities; None to return no log-probabilities.
    """

    sampling_steps: SamplingSteps
    num_logprobs: int | None = field(default=None, kw_only=True)

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it; see `rlx_jax.compiler.executable.HasRequestArguments`."""
        return {"samplers": self.sampling_steps.text, "logprobs": str(self.num_logprobs)}

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
        ids = jnp.where(active & is_finite, chosen, rows.ids)  # as `running`, it reads the logits: one kernel of XLA
        running, history = rows.running & ~ended, history.append(chosen, active)
        return tokens, replace(rows, ids=ids, running=running, remaining=remaining, history=history)

    def choose_first(
        self, logits: Array, rows: RequestRows, sampler_values: SamplerValues, stop_mask: Array
    ) -> tuple[Array, RequestRows, LogProbs | None]:
        """Choose the first tokens `[B, 1]` of running rows, by the logits of prefill `[B, V]`; return them, the
        updated rows, and the log-probabilities of the tokens if requested."""
        tokens, rows = self.choose_next(logits, rows, sampler_values, stop_mask, rows.running)
        if self.num_logprobs is None:
            return tokens[:, None], rows, None
        log_probs = token_log_probs(logits, rows.ids, self.num_logprobs)
        return tokens[:, None], rows, jax.tree.map(lambda a: a[:, None], log_probs)


@dataclass(frozen=True)
class FirstTokens(TokenChooser):
    """Program that chooses the first tokens of a request; returns (tokens `[B, 1]`, rows, log-probabilities).

    Its arguments are the logits of prefill `[B, V]`, the words of the key, the other arguments of `new_rows`,
    `sampler_values` and `stop_mask`.
    """

    def __call__(
        self, logits: Array, words: Array, running: Array, budget: Array, history: TokenHistory,
        sampler_values: SamplerValues, stop_mask: Array,
    ) -> tuple[Array, RequestRows, LogProbs | None]:  # fmt: skip
        key = jax.random.wrap_key_data(words, impl=KEY_IMPL)
        rows = new_rows(self.sampling_steps.do_sample, key, running, budget, history)
        return self.choose_first(logits, rows, sampler_values, stop_mask)


def with_new(rows: RequestRows, num_new: Any) -> RequestRows:
    """Return rows with another number of chosen tokens."""
    return replace(rows, history=replace(rows.history, num_new=num_new))


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
        stop_width: number of stop ids of each slot, padding included, as the operands of the programs differ; 0 if the
            rows are not slots.
        max_tokens: tokens of the history of a row if the program reads them; no array of the state may have so many.
        joined: steps of an iteration of the loop, of which `steps` is a multiple; 1 with `early_exit`.
    """

    ids_input: str
    steps: int
    early_exit: bool
    stop_width: int = 0
    max_tokens: int = 0
    joined: int = 1

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it, as the other programs do."""
        return {**super().arguments(), "slots": "True"} if self.stop_width else super().arguments()

    def __call__(self, extend: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            values, stop_mask, k = inputs["sampler_values"], inputs["stop_mask"], self.num_logprobs

            def step(carry: Any) -> Any:
                lengths, rows, state = carry
                rows = with_new(rows, total - rows.remaining)
                extend_inputs = {self.ids_input: rows.ids[:, None], "lengths": lengths}
                (logits, *_), state = extend(params, state, extend_inputs)
                new_ids, rows = self.choose_next(logits, rows, values, stop_mask, rows.running)
                step_out = (new_ids, *([] if k is None else [token_log_probs(logits, rows.ids, k)]))
                # Lengths are carried: a kernel that converts them would start each step, and every layer wait for it.
                return (rows.running.astype(jnp.int32), with_new(rows, None), state), step_out

            def steps(i: Any, loop: Any) -> Any:
                carry, out = loop
                outs = list[Any]()
                for _ in range(self.joined):
                    carry, step_out = step(carry)
                    outs.append(step_out)
                new = jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *outs)
                place = partial(lax.dynamic_update_slice_in_dim, start_index=i * self.joined, axis=1)
                return carry, jax.tree.map(place, out, new)

            rows = inputs["rows"]
            total = rows.history.num_new + rows.remaining  # in the loop, it saves a kernel
            batch = rows.ids.shape[0]
            tokens = jnp.full((batch, self.steps), STOPPED, jnp.int32)
            out: Any = (tokens, *([] if k is None else [zero_log_probs(batch, self.steps, k)]))
            start = (rows.running.astype(jnp.int32), with_new(rows, None), state), out

            def continues(loop: Any) -> Array:
                running: Array = loop[1][0][1].running
                has_work = running.sum() > inputs["min_running"] if self.stop_width else running.any()
                return jnp.logical_and(loop[0] < self.steps, has_work)

            if self.early_exit:
                _, end = lax.while_loop(continues, lambda loop: (loop[0] + 1, steps(*loop)), (jnp.int32(0), start))
            else:
                end = lax.fori_loop(0, self.steps // self.joined, steps, start)
            (_, rows, state), out = end
            return (out[0], with_new(rows, total - rows.remaining), *out[1:]), state

        return function


# The inputs of a loop with a row for each slot: as for a request, but with the values of a sampler for each slot, and
# with `stop_mask` `[S, K]` int32, the ids that end each slot, padded with -1.
SLOT_INPUTS = ("rows", "sampler_values", "stop_mask")


@dataclass(frozen=True)
class FillSlots(TokenChooser):
    """Program that chooses the first tokens of prefilled prompts, and copies their rows into slots.

    Attributes:
        row_axes: the row axis of each array of the state that has one; the others are the same for all rows.
    """

    row_axes: tuple[tuple[str, int], ...]

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it, as `DecodeLoop` does."""
        return {**super().arguments(), "slots": "True"}

    def __call__(
        self, state: StateArrays, slots: Arrays, new_state: StateArrays, logits: Array, jobs: Arrays, targets: Array,
        draws: Array,
    ) -> tuple[Array, LogProbs | None, Arrays, StateArrays]:  # fmt: skip
        """Return the first tokens `[F, 1]`, their log-probabilities, the slots and their state.

        Args:
            state, slots: state and `SLOT_INPUTS` of all slots; the memory of the state is reused.
            new_state, logits: the result of prefill; logits `[F, V]`.
            jobs: the `SLOT_INPUTS` of the jobs; the keys of rows are the ones of their seeds, `[F, 2]` uint32.
            targets: `[F]` int32, the slot of each job; the number of slots or more for a row that is not copied.
            draws: `[F]` int32, the number to fold into each key.
        """
        rows = jobs["rows"]
        if self.sampling_steps.do_sample:
            keys = jax.random.wrap_key_data(rows.keys, impl=KEY_IMPL)
            rows = replace(rows, keys=jax.vmap(jax.random.fold_in)(keys, draws))
        tokens, rows, log_probs = self.choose_first(logits, rows, jobs["sampler_values"], jobs["stop_mask"])
        put = partial(put_rows, targets)
        slots = jax.tree.map(partial(put, 0), slots, {**jobs, "rows": rows})
        filled = {name: put(axis, state[name], new_state[name]) for name, axis in self.row_axes}
        return tokens, log_probs, slots, new_state | filled


@dataclass(frozen=True)
class MoveRows:
    """Program that copies rows from the slots of one class to the slots of another class with a longer cache.

    Attributes:
        row_axes: as in `FillSlots`.
    """

    row_axes: tuple[tuple[str, int], ...]

    def __call__(
        self, state: StateArrays, slots: Arrays, old_state: StateArrays, old_slots: Arrays, sources: Array,
        targets: Array, remaining: Array,
    ) -> tuple[Arrays, StateArrays]:  # fmt: skip
        """Return the slots of the longer class and their state.

        Args:
            state, slots: as in `FillSlots`, of the longer class; the memory of the state is reused.
            old_state, old_slots: the slots of the shorter class.
            sources, targets: `[F]`, the slots to copy from and to; targets as in `FillSlots`.
            remaining: `[F]`, the number of tokens that each row may still get.
        """

        def move(axis: int, array: Array, old: Array, padding: int = 0) -> Array:
            moved: Array = put_rows(targets, axis, array, jnp.take(old, sources, axis=axis, mode="clip"), padding)
            return moved

        # The history of tokens has the length of the cache, and -1 where there is none yet.
        slots = jax.tree.map(partial(move, 0, padding=-1), slots, old_slots)
        running = put_rows(targets, 0, slots["rows"].running, remaining > 0)
        left = put_rows(targets, 0, slots["rows"].remaining, remaining)
        moved = {name: move(axis, state[name], old_state[name]) for name, axis in self.row_axes}
        return {**slots, "rows": replace(slots["rows"], running=running, remaining=left)}, state | moved


@partial(jax.jit, static_argnames=("axis", "padding"))  # traced once for all layers
def put_rows(slots: Array, axis: int, array: Array, rows: Array, padding: int = 0) -> Array:
    """Return an array with other rows in some slots.

    A row of a shorter cache is padded: no ring buffer has more slots in a longer cache unless it is as long
    as the cache, so that position p is in slot p of both.

    Args:
        slots: `[F]`, the slots; rows of others than these stay, and so does a slot past the last one.
        axis: the row axis.
        array: all rows.
        rows: the new rows.
        padding: the value to pad them with.
    """
    sizes = enumerate(zip(rows.shape, array.shape, strict=True))
    widths = [(0, 0 if i == axis else size - old_size) for i, (old_size, size) in sizes]
    rows = jnp.pad(rows, widths, constant_values=padding) if any(after for _, after in widths) else rows
    # Indices past the last slot are dropped. They are unique too, so that XLA needs no order of writes.
    at = (*(slice(None),) * axis, slots)
    return array.at[at].set(rows, mode="drop", unique_indices=True)


def put_carry(carry: Any, new: Any, slots: Array) -> Any:
    """Return the `DrafterState.carry` of all slots with the one of new jobs."""
    return jax.tree.map(partial(put_rows, slots, 0), carry, new)
