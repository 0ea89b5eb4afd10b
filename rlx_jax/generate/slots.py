"""`Slots`: the rows of a state in which the jobs of a `Scheduler` run, and the few programs that fill and decode them.

A fill prefills a group of prompts into a small state, as a request of its own would. `FillSlots` chooses their first
tokens and copies their rows into free rows of the large state: full caches, ring buffers and recurrent states alike.
`DecodeLoop` then decodes all rows. Each slot has a sampler, stop ids and a random key of its own on the device, so that
the tokens of a job depend neither on its slot nor on the other jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.generate.decode import (
    NOT_FINITE,
    STOPPED,
    LogProbs,
    RequestRows,
)
from rlx_jax.generate.logits_processor import check_processors
from rlx_jax.generate.request_plan import PromptChunk, prompt_blocks
from rlx_jax.generate.sampler import Sampler, SamplerValues
from rlx_jax.generate.scheduler import SlotJob, SlotTokens
from rlx_jax.generate.slot_fill import NewJobs, SlotRows
from rlx_jax.generate.slot_plan import SlotPlan
from rlx_jax.generate.token_history import initial_history
from rlx_jax.runtime.inputs import KEY_IMPL

Array = jax.Array


@dataclass(frozen=True)
class FillResult:
    """The first tokens of a fill on the device, which the next `decode` returns.

    Attributes:
        slots: `[F]`, on the host; as in `NewJobs`.
        tokens, log_probs: `[F]`, as `FillSlots` returns them.
    """

    slots: np.ndarray[Any, Any]
    tokens: Any
    log_probs: LogProbs | None


@dataclass(eq=False)
class Slots:
    """The slots of a device, as a `Scheduler` runs them.

    Attributes:
        plan: their sizes and programs.
        state, rows: the arrays on the device.
        occupied: slots with a job.
        first_tokens: the first tokens of the fills since the last `decode`.
    """

    plan: SlotPlan
    state: StateArrays
    rows: SlotRows
    occupied: set[int] = field(default_factory=set)
    first_tokens: list[FillResult] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return self.plan.sizes.num_slots

    @property
    def fill_rows(self) -> int:
        """Return the largest number of jobs of one fill."""
        return self.plan.sizes.fill_rows

    def width(self, num_tokens: int) -> int:
        """Return the padded width of a prompt, the sum of its chunks."""
        return sum(self.plan.sizes.chunk_widths(num_tokens))

    def fill(self, group: Sequence[tuple[int, SlotJob]]) -> None:
        """Prefill jobs into free slots, without waiting for the device."""
        plan, rows = self.plan, self.fill_rows
        widths = plan.sizes.chunk_widths(max(len(job.ids) for _, job in group))
        chunks = [PromptChunk(width, width) for width in widths]
        outside = np.arange(self.num_slots, self.num_slots + rows, dtype=np.int32)
        targets = outside.copy()
        targets[: len(group)] = [slot for slot, _ in group]
        jobs = new_jobs(plan, [job for _, job in group])
        programs = plan.lm.model.programs
        for block in prompt_blocks(plan.prefill_programs(widths), chunks, [job.ids for _, job in group], rows, {}):
            if not block.is_end.any():  # no prompt ends in this chunk
                continue
            slots = np.where(block.is_end, targets, outside)
            arguments = (self.state, self.rows, block.state, block.logits, replace(jobs, slots=slots))
            tokens, log_probs, self.rows, self.state = programs.run_helper(
                plan.fill, *arguments, out_shardings=plan.fill_shardings, donate=(0,)
            )
            self.first_tokens.append(FillResult(slots, tokens, log_probs))
        self.occupied.update(slot for slot, _ in group)

    def decode(self, min_running: int) -> dict[int, SlotTokens]:
        """Decode some steps, until at most `min_running` slots run; return the new tokens by slot."""
        operands = {"sampler_values": self.rows.sampler_values, "stop_mask": self.rows.stop_ids}
        inputs = {"rows": self.rows.rows, "min_running": np.int32(min_running), **operands}
        (tokens, rows, *log_probs), self.state = self.plan.loop(inputs, self.state)
        self.rows = replace(self.rows, rows=rows)
        first = [(part.tokens, part.log_probs) for part in self.first_tokens]
        tokens, running, log_probs, first = jax.device_get((tokens, rows.running, log_probs, first))
        # Column 0 is for first tokens.
        tokens = np.pad(tokens, ((0, 0), (1, 0)), constant_values=STOPPED)
        values: LogProbs | None = None
        if log_probs:
            values = jax.tree.map(lambda a: np.pad(a, ((0, 0), (1, 0), (0, 0))[: a.ndim]), log_probs[0])
        for (first_ids, first_log_probs), part in zip(first, self.first_tokens, strict=True):
            is_job = part.slots < self.num_slots
            tokens[part.slots[is_job], 0] = first_ids[is_job]
            if values is not None:
                for array, new in zip(jax.tree.leaves(values), jax.tree.leaves(first_log_probs), strict=True):
                    array[part.slots[is_job], 0] = new[is_job]
        self.first_tokens = []
        result = {slot: slot_tokens(tokens[slot], bool(running[slot]), slot, values) for slot in sorted(self.occupied)}
        self.occupied = {slot for slot in self.occupied if running[slot]}
        return result

    def stop(self, slots: Sequence[int]) -> None:
        """End running slots."""
        running = np.array(jax.device_get(self.rows.rows.running))
        running[list(slots)] = False
        self.rows = replace(self.rows, rows=replace(self.rows.rows, running=running))
        self.occupied.difference_update(slots)


def slot_tokens(tokens: np.ndarray[Any, Any], running: bool, slot: int, log_probs: LogProbs | None) -> SlotTokens:
    """Return the new tokens of a slot from a row of a block."""
    is_token = tokens >= 0
    ids, failed = tokens[is_token].tolist(), bool((tokens == NOT_FINITE).any())
    if log_probs is None:
        return SlotTokens(ids, running, failed)
    pairs = zip(log_probs.ids[slot][is_token].tolist(), log_probs.likeliest[slot][is_token].tolist(), strict=True)
    top = [tuple(zip(top_ids, values, strict=True)) for top_ids, values in pairs]
    return SlotTokens(ids, running, failed, log_probs.chosen[slot][is_token].tolist(), top)


def new_jobs(plan: SlotPlan, jobs: Sequence[SlotJob]) -> NewJobs:
    """Return the operands of a fill; padding rows repeat the options of the first job."""
    steps, vocab_size = plan.fill.sampling_steps, plan.lm.vocab_size
    padded = [*jobs, *(jobs[0] for _ in range(plan.sizes.fill_rows - len(jobs)))]
    options = [job.options for job in padded]
    stop_ids = np.full((len(padded), plan.stop_width), -1, np.int32)
    for row, option in zip(stop_ids, options, strict=True):
        row[: len(option.stop_ids)] = option.stop_ids
    seeds = np.zeros((len(padded), 0), np.uint32)
    if steps.do_sample:
        seeds = np.stack([plan.seed_words(option.seed) for option in options])
    return NewJobs(
        slots=np.zeros(len(padded), np.int32),
        budgets=np.array([option.budget for option in options], np.int32),
        seeds=seeds,
        draws=np.array([option.draw for option in options], np.int32),
        history=initial_history(steps, [job.ids for job in padded], vocab_size, plan.sizes.cache_len),
        sampler_values=stack_values([option.sampler.values(vocab_size, steps) for option in options]),
        stop_ids=stop_ids,
    )


def stack_values(values: Sequence[SamplerValues]) -> SamplerValues:
    """Return the values of several samplers as operands with one row for each: `[B, 1]`, and the bias `[B, V]`."""
    result: SamplerValues = jax.tree.map(lambda *parts: np.stack([np.atleast_1d(part) for part in parts]), *values)
    return result


def open_slots(plan: SlotPlan) -> Slots:
    """Return empty slots."""
    programs, sizes, steps = plan.lm.model.programs, plan.sizes, plan.fill.sampling_steps
    num, vocab_size = sizes.num_slots, plan.lm.vocab_size
    check_processors(programs, steps.processors, {num, sizes.fill_rows}, vocab_size, sizes.cache_len)
    state: StateArrays = programs.run_helper(plan.empty_state)
    zeros = np.zeros(num, np.int32)
    keys: Any = np.zeros((num, 0), np.uint32)
    if steps.do_sample:
        keys = jax.random.wrap_key_data(jax.device_put(np.zeros((num, 2), np.uint32)), impl=KEY_IMPL)
    history = initial_history(steps, [()] * num, vocab_size, sizes.cache_len)
    rows = RequestRows(zeros, np.zeros(num, bool), zeros, history, keys)
    values = stack_values([Sampler().values(vocab_size, steps)] * num)
    stop_ids = np.full((num, plan.stop_width), -1, np.int32)
    return Slots(plan, state, jax.device_put(SlotRows(rows, values, stop_ids), programs.replicated))
