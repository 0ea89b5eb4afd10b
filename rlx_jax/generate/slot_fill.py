"""`FillSlots` and `MoveRows`: the programs that copy prefilled prompts into slots, and rows to other slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.generate.decode import DecodeLoop, LogProbs, RequestRows, TokenChooser, token_log_probs
from rlx_jax.generate.sampler import SamplerValues
from rlx_jax.generate.token_history import TokenHistory
from rlx_jax.runtime.inputs import KEY_IMPL

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotRows:
    """What the device knows of each slot, apart from the state.

    Attributes:
        rows: as for a request.
        sampler_values: a value for each slot.
        stop_ids: `[S, K]` int32, the ids that end each slot, padded with -1.
    """

    rows: RequestRows
    sampler_values: SamplerValues
    stop_ids: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewJobs:
    """The jobs of a fill, padded to F rows.

    Attributes:
        slots: `[F]` int32, the slot of each job; the number of slots or more for a row that is not copied.
        budgets: `[F]` int32, the most new tokens of each job.
        seeds: `[F, 2]` uint32, the key of each job's seed; `[F, 0]` in greedy decoding.
        draws: `[F]` int32, the number to fold into each key.
        history: the prompts, as their first token is chosen by them.
        sampler_values, stop_ids: as in `SlotRows`.
    """

    slots: Any
    budgets: Any
    seeds: Any
    draws: Any
    history: TokenHistory
    sampler_values: SamplerValues
    stop_ids: Any


@dataclass(frozen=True)
class FillSlots(TokenChooser):
    """Program that chooses the first tokens of prefilled prompts, and copies their rows into slots.

    Attributes:
        num_logprobs: as in `FirstTokens`.
        row_axes: the row axis of each array of the state that has one; the others are the same for all rows.
    """

    num_logprobs: int | None
    row_axes: tuple[tuple[str, int], ...]

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it, as `DecodeLoop` does."""
        return DecodeLoop(self.sampling_steps, "", 1, True, self.num_logprobs, slots=True).arguments()

    def __call__(
        self, state: StateArrays, slots: SlotRows, new_state: StateArrays, logits: Array, jobs: NewJobs
    ) -> tuple[Array, LogProbs | None, SlotRows, StateArrays]:
        """Return the first tokens `[F]`, their log-probabilities, the slots and their state.

        Args:
            state, slots: all slots; the memory of the state is reused.
            new_state, logits: the result of prefill; logits `[F, 1, V]`.
            jobs: the jobs.
        """
        active, zeros = jobs.slots < slots.rows.running.shape[0], jnp.zeros_like(jobs.budgets)
        keys = jobs.seeds
        if self.sampling_steps.do_sample:
            keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(jobs.seeds, impl=KEY_IMPL), jobs.draws)
        rows = RequestRows(zeros, active, jobs.budgets, jobs.history, keys)
        tokens, rows = self.choose_next(logits[:, 0], rows, jobs.sampler_values, jobs.stop_ids, active)
        log_probs = None
        if self.num_logprobs is not None:
            log_probs = token_log_probs(logits[:, 0], rows.ids, self.num_logprobs)

        put = partial(put_rows, jobs.slots)
        slots = jax.tree.map(partial(put, 0), slots, SlotRows(rows, jobs.sampler_values, jobs.stop_ids))
        filled = {name: put(axis, state[name], new_state[name]) for name, axis in self.row_axes}
        return tokens, log_probs, slots, new_state | filled


@dataclass(frozen=True)
class MoveRows:
    """Program that copies rows from the slots of one class to those of another one with a longer cache.

    Attributes:
        row_axes: as in `FillSlots`.
    """

    row_axes: tuple[tuple[str, int], ...]

    def __call__(
        self, state: StateArrays, slots: SlotRows, old_state: StateArrays, old_slots: SlotRows, sources: Array,
        targets: Array, remaining: Array,
    ) -> tuple[SlotRows, StateArrays]:  # fmt: skip
        """Return the slots of the longer class and their state.

        Args:
            state, slots: the slots of the longer class; the memory of the state is reused.
            old_state, old_slots: the slots of the shorter class.
            sources, targets: `[F]`, the slots to copy from and to; targets as `NewJobs.slots`.
            remaining: `[F]`, the number of tokens that each row may still get.
        """

        def move(axis: int, array: Array, old: Array, padding: int = 0) -> Array:
            moved: Array = put_rows(targets, axis, array, jnp.take(old, sources, axis=axis, mode="clip"), padding)
            return moved

        # The history of tokens has the length of the cache, and -1 where there is none yet.
        slots = jax.tree.map(partial(move, 0, padding=-1), slots, old_slots)
        running = put_rows(targets, 0, slots.rows.running, remaining > 0)
        left = put_rows(targets, 0, slots.rows.remaining, remaining)
        moved = {name: move(axis, state[name], old_state[name]) for name, axis in self.row_axes}
        return replace(slots, rows=replace(slots.rows, running=running, remaining=left)), state | moved


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
