"""`SlotClasses`: the slots in which jobs run, as a `Scheduler` sees them, and the programs that fill and decode them.

The `Slots` of a context class are the rows of a state.
A fill prefills a group of prompts into a small state, as a request of its own would. `FillSlots` chooses their first
tokens and copies their rows into free rows of the large state: full caches, ring buffers and recurrent states alike.
`DecodeLoop` then decodes all rows. Each slot has a sampler, stop ids and a random key of its own on the device, so that
the tokens of a job depend neither on its slot nor on the other jobs. The programs of a fill compute the prefixes of
jobs, too, whose states are copied into its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.buckets import SlotSizes
from rlx_jax.compiler.executable import Arrays, HelperCall, StateArrays
from rlx_jax.device import num_cpus, out_of_memory
from rlx_jax.generate.decode import (
    SLOT_INPUTS,
    STOPPED,
    MoveRows,
    RequestRows,
    RowTokens,
    Sizes,
    initial_history,
    put_carry,
)
from rlx_jax.generate.decode_state import LeafMove, leaf_moves, move_state, resize_state
from rlx_jax.generate.drafters import empty_pairs
from rlx_jax.generate.generation import LoopRun
from rlx_jax.generate.prefix_cache import Prefix, PrefixCache, one_row
from rlx_jax.generate.request_plan import PromptBlock, prompt_blocks
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scheduler import SlotIndex, SlotJob, start_class
from rlx_jax.generate.slot_plan import SlotPlan, fill_keys
from rlx_jax.generate.speculative import DRAFTER_PREFIX
from rlx_jax.generate.token_history import check_processors
from rlx_jax.io.garbage import paused_gc
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.random_keys import KEY_IMPL, key_words
from rlx_jax.runtime.report import RequestReport, SpeculativeCounts
from rlx_jax.runtime.sequence_state import LENGTH

# The job of a slot that has none.
IDLE_JOB = SlotJob(0, (), RowOptions(0, Sampler(), (), (), 0, 0))


@dataclass(eq=False)
class Slots:
    """The slots of a context class.

    Attributes:
        plan: their sizes and programs.
        loop: the loop with the arrays on the device.
        first_tokens: for each fill since the last `start_decode` the `targets` of `FillSlots`, and on the device the
            first tokens and their log-probabilities.
        num_steps: number of steps decoded.
        cache: the prefixes of the model.
        num_prefilled: tokens of prefixes that were prefilled so far.
    """

    plan: SlotPlan
    loop: LoopRun
    cache: PrefixCache
    first_tokens: list[tuple[Any, Any, Any]] = field(default_factory=list)
    num_steps: int = 0
    num_prefilled: int = 0

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return self.plan.sizes.num_slots

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the `SLOT_INPUTS`."""
        return {name: self.loop.inputs[name] for name in SLOT_INPUTS}

    def fill(self, group: Sequence[tuple[int, SlotJob]], source: Slots) -> None:
        """Prefill jobs into free slots, without waiting for the device.

        Args:
            group: slots and jobs.
            source: the class that has the prefill programs, with a cache of this length or a shorter one.
        """
        plan, rows, (slots, jobs) = self.plan, source.plan.sizes.fill_rows, zip(*group, strict=True)
        targets = np.arange(self.num_slots, self.num_slots + rows, dtype=np.int32)
        targets[: len(group)] = slots
        programs, draft_state, prompts = plan.lm.model.programs, {}, [job.ids for job in jobs]
        hidden = []
        for block in source.prefill(prompts, [job.prefix for job in jobs]):
            hidden += [] if block.hidden is None else [block.hidden]
        if plan.drafter is not None:
            sizes = Sizes(rows, source.widths(max(map(len, prompts)), False), source.plan.sizes.cache_len)
            first = np.zeros((rows, 1), np.int32)  # not chosen yet
            carry, arrays = plan.drafter.start(programs, sizes, prompts, first, tuple(hidden))
            if carry is not None:
                self.loop.inputs["drafter_carry"] = programs.run_helper(
                    put_carry, self.loop.inputs["drafter_carry"], carry, targets, out_shardings=programs.replicated
                )
            draft_state = {DRAFTER_PREFIX + name: array for name, array in arrays.items()}
        arguments = self._fill_arguments({**block.state, **draft_state}, block.logits, jobs, targets)
        ids, log_probs, inputs, self.loop.state = programs.run_helper(plan.fill, *arguments, **self._fill_options)
        self.loop.inputs |= inputs
        self.first_tokens.append((targets, ids, log_probs))

    def _fill_arguments(self, new_state: Any, logits: Any, jobs: Sequence[SlotJob], targets: Any) -> tuple[Any, ...]:
        """Return the arguments of `FillSlots`."""
        draws = np.zeros(len(targets), np.int32)
        draws[: len(jobs)] = [job.options.draw for job in jobs]
        new_inputs = slot_inputs(self.plan, jobs, len(targets))
        return self.loop.state, self.inputs, new_state, logits, new_inputs, targets, draws

    @property
    def _fill_options(self) -> dict[str, Any]:
        return {"out_shardings": self.plan.fill_shardings, "donate": (0,)}

    def fill_call(self, job: SlotJob, prefilling: Slots) -> HelperCall:
        """Return the call that fills slots with such jobs, with types in place of what a class's prefill returns."""
        plan, rows, axes = self.plan, prefilling.plan.sizes.fill_rows, dict(self.plan.fill.row_axes)
        new_state = {
            name: jax.ShapeDtypeStruct([rows if i == axes.get(name) else n for i, n in enumerate(a.shape)], a.dtype)
            for name, a in prefilling.loop.state.items()
        }
        logits = jax.ShapeDtypeStruct((rows, plan.lm.vocab_size), np.float32)
        arguments = self._fill_arguments(new_state, logits, [job], np.zeros(rows, np.int32))
        return HelperCall(plan.fill, arguments, **self._fill_options)

    def start_decode(self, min_running: int) -> Any:
        """Decode some steps, until at most `min_running` slots run; return the tokens, without waiting for them."""
        self.loop.inputs["min_running"] = np.int32(min_running)
        tokens, log_probs, *_ = self.loop.advance()
        first, self.first_tokens = self.first_tokens, []
        return tokens, log_probs, self.loop.inputs["rows"].running, first

    def end_decode(self, results: Any) -> dict[int, tuple[RowTokens, bool]]:
        """Return the new tokens by slot, and whether it continues, from the result of `start_decode`."""
        # A program that was dispatched without an error may have none of its results.
        with out_of_memory(f"decoding in {self.num_slots} slots", lambda: "pass fewer slots="):
            tokens, log_probs, running, first = jax.device_get(results)
        self.num_steps += int((tokens != STOPPED).any(axis=0).reshape(-1, self.plan.num_drafts + 1).any(axis=1).sum())
        new = [RowTokens() for _ in running]
        for slots, ids, values in (*first, (range(self.num_slots), tokens, log_probs)):
            for i, slot in enumerate(slots):
                if slot < self.num_slots:
                    new[slot].append(ids, i, values)
        return {slot: (row, bool(running[slot])) for slot, row in enumerate(new)}

    def take(self, old: Slots, moves: Sequence[tuple[int, int, SlotJob]]) -> None:
        """Copy rows of a class with a shorter cache into free slots, without waiting for the device.

        Args:
            old: the other class.
            moves: at most `fill_rows` of them: (from, to, job).
        """
        plan, rows, num_slots = self.plan, self.plan.sizes.fill_rows, self.num_slots
        sources, remaining = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        targets = np.arange(num_slots, num_slots + rows, dtype=np.int32)
        for i, (source, target, job) in enumerate(moves):
            sources[i], targets[i] = source, target
            remaining[i] = row_limit(job, plan.sizes.cache_len) - len(job.new.ids)
        arguments = (self.loop.state, self.inputs, old.loop.state, old.inputs, sources, targets, remaining)
        shardings = None if plan.fill_shardings is None else plan.fill_shardings[2:]
        move, programs = MoveRows(plan.fill.row_axes), plan.lm.model.programs
        inputs, self.loop.state = programs.run_helper(move, *arguments, out_shardings=shardings, donate=(0,))
        self.loop.inputs |= inputs

    # -- prefill, after prefixes -------------------------------------------------------------

    def widths(self, num_tokens: int, has_prefix: bool) -> tuple[int, ...]:
        """Return the widths of the programs that prefill so many tokens."""
        return (self.plan.suffix_sizes if has_prefix else self.plan.sizes).chunk_widths(num_tokens)

    def programs(self, widths: Sequence[int], has_prefix: bool) -> list[BoundProgram]:
        """Return the programs that prefill chunks of these widths."""
        sizes = self.plan.suffix_sizes if has_prefix else self.plan.sizes
        return list(map(self.plan.loop.model.bind, fill_keys(self.plan.lm, sizes, widths, self.plan.drafter)))

    def width(self, num_tokens: int, has_prefix: bool) -> int:
        """Return the padded width of so many tokens, the sum of their chunks."""
        return sum(self.widths(num_tokens, has_prefix))

    def prefill(self, rows: Sequence[Sequence[int]], prefixes: Sequence[Prefix | None]) -> Iterator[PromptBlock]:
        """Prefill rows of tokens, each after its prefix if it has one, and yield the result of each chunk."""
        state, has_prefix = self.start(prefixes), any(prefixes)
        new = [row[0 if p is None else len(p.ids) :] for row, p in zip(rows, prefixes, strict=True)]
        programs = self.programs(self.widths(max(map(len, new)), has_prefix), has_prefix)
        return prompt_blocks(programs, self.plan.lm.ids_input, new, self.plan.sizes.fill_rows, None, state)

    def start(self, prefixes: Sequence[Prefix | None]) -> StateArrays | None:
        """Return the state of a fill in which each row has its prefix; None if the first program creates it."""
        named = [prefix for prefix in prefixes if prefix is not None]
        if not named and not self.plan.sizes.extends:
            return None
        states = dict(zip(named, self._states(named), strict=True))
        sizes = self.plan.suffix_sizes
        (key,) = fill_keys(self.plan.lm, sizes, sizes.widths[:1], self.plan.drafter)
        program = BoundProgram(self.plan.loop.model, key)  # for the shapes of its state alone
        programs, num_rows = program.model.programs, sizes.fill_rows
        shape = {"batch": num_rows, "context": sizes.cache_len}
        state: StateArrays = programs.run_helper(programs.empty_state(key.symbolic, shape, self.plan.num_drafts))
        for arrays in {id(arrays): arrays for arrays in states.values()}.values():
            rows, mask = np.zeros(num_rows, np.int32), np.zeros(num_rows, bool)
            for i, prefix in enumerate(prefixes):
                if prefix is not None and states[prefix] is arrays:
                    rows[i], mask[i] = prefix.row, True
            state = programs.run_helper(
                put_rows, state, arrays, rows, mask, static=(leaf_moves(program),), donate=(0,),
                out_shardings=programs.state_shardings(program.key),
            )  # fmt: skip
        return state

    def _states(self, prefixes: Sequence[Prefix]) -> list[StateArrays]:
        """Return the state of each prefix; the ones that are missing are prefilled."""
        # Held here, as computing one may evict another from the cache.
        states = {prefix: prefix.arrays for prefix in prefixes}
        missing = [prefix for prefix, arrays in states.items() if arrays is None]
        rows, model = self.plan.sizes.fill_rows, self.plan.lm.model
        for begin in range(0, len(missing), rows):
            group = missing[begin : begin + rows]
            *_, last = self.prefill([prefix.ids for prefix in group], [prefix.parent for prefix in group])
            for row, prefix in enumerate(group):
                target = one_row(model, prefix.cache_len)
                states[prefix] = resize_state(target, last.state, np.array([row], np.int32))
                self.cache.store(prefix, states[prefix])
            self.num_prefilled += sum(len(p.ids) - (len(p.parent.ids) if p.parent else 0) for p in group)
        return [states[prefix] for prefix in prefixes]  # type: ignore[misc]


def slot_inputs(plan: SlotPlan, jobs: Sequence[SlotJob], count: int) -> dict[str, Any]:
    """Return the `SLOT_INPUTS` of jobs and of idle rows, `count` rows on the host; the keys belong to the seeds."""
    steps, vocab_size = plan.fill.sampling_steps, plan.lm.vocab_size
    # Idle rows repeat the options of the first job.
    padded = [*jobs, *[jobs[0] if jobs else IDLE_JOB] * (count - len(jobs))]
    options = [job.options for job in padded]
    stop_ids = np.full((count, plan.stop_width), -1, np.int32)
    for row, option in zip(stop_ids, options, strict=True):
        row[: len(option.stop_ids)] = option.stop_ids
    keys = np.zeros((count, 0), np.uint32)
    if steps.do_sample:
        # Most jobs have one seed.
        seeds = {id(option.seed): key_words("seed", option.seed) for option in options}
        words = jax.device_get(seeds)
        keys = np.stack([words[id(option.seed)] for option in options])
    budgets = np.array([row_limit(job, plan.sizes.cache_len) for job in padded], np.int32)
    loop: Any = plan.loop.key.wrapper
    history = initial_history(steps, [job.ids for job in padded], vocab_size, loop.max_tokens)
    rows = RequestRows(np.zeros(count, np.int32), np.arange(count) < len(jobs), budgets, history, keys)
    values = [option.sampler.values(vocab_size, steps) for option in options]
    stacked = jax.tree.map(lambda *parts: np.stack([np.atleast_1d(part) for part in parts]), *values)
    return dict(zip(SLOT_INPUTS, (rows, stacked, stop_ids), strict=True))


def row_limit(job: SlotJob, cache_len: int) -> int:
    """Return the number of new tokens of a job that fit a cache, at most its budget."""
    return min(job.options.budget, cache_len - len(job.ids))


def open_class(plan: SlotPlan, cache: PrefixCache) -> Slots:
    """Return the empty slots of a class; arguments as in `Slots`."""
    programs, sizes, steps = plan.lm.model.programs, plan.sizes, plan.fill.sampling_steps
    num, vocab_size = sizes.num_slots, plan.lm.vocab_size
    batches = {num, sizes.fill_rows, num * (plan.num_drafts + 1)}
    check_processors(programs, steps.processors, batches, vocab_size, sizes.cache_len)
    with out_of_memory(f"{num} slots with caches of {sizes.cache_len:,} tokens", lambda: "pass fewer slots="):
        state: StateArrays = jax.block_until_ready(programs.run_helper(plan.empty_state))
    if plan.drafter_state is not None:
        state |= {DRAFTER_PREFIX + n: a for n, a in programs.run_helper(plan.drafter_state).items()}
    inputs = slot_inputs(plan, (), num)
    if steps.do_sample:
        keys = jax.random.wrap_key_data(jax.device_put(inputs["rows"].keys), impl=KEY_IMPL)
        inputs["rows"] = replace(inputs["rows"], keys=keys)
    if plan.drafter is not None:
        inputs |= {"drafter_carry": empty_pairs(plan.drafter, num), "counts": np.zeros(3, np.int32)}
    inputs = jax.device_put(inputs, programs.replicated) | {"min_running": np.int32(0)}
    inputs |= {} if plan.drafter is None else {"params": plan.drafter.params()}
    return Slots(plan, LoopRun(plan.loop, inputs, state), cache)


def put_rows(
    leaves: tuple[LeafMove, ...], state: StateArrays, source: StateArrays, rows: jax.Array, mask: jax.Array
) -> StateArrays:
    """Return a state with rows of another state where `mask` `[B]` is true; `rows` `[B]` are their indices there."""
    moved = move_state(leaves, source, rows)

    def choose(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
        shape = [1] * new.ndim
        shape[axis] = -1
        return jnp.where(mask.reshape(shape), new, old)

    axes = {LENGTH: 0, **{leaf.name: leaf.row_axis for leaf in leaves}}
    return moved | {name: choose(axis, state[name], moved[name]) for name, axis in axes.items()}


# -- all classes -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SlotClasses:
    """The slots of all classes.

    Attributes:
        parts: the slots of each class, the shortest cache first.
    """

    parts: tuple[Slots, ...]

    @property
    def classes(self) -> tuple[SlotSizes, ...]:
        """Return the sizes of each class."""
        return tuple(part.plan.sizes for part in self.parts)

    @property
    def num_prefilled(self) -> int:
        """Return the number of tokens of prefixes that were prefilled."""
        return sum(part.num_prefilled for part in self.parts)

    @property
    def speculated(self) -> SpeculativeCounts | None:
        """Return the counts of speculative decoding; None without drafts."""
        if self.parts[0].plan.drafter is None:
            return None
        counts = jax.device_get([part.loop.inputs["counts"] for part in self.parts])
        return SpeculativeCounts(*np.sum(counts, 0).tolist())

    def report(
        self, num_prompts: int, prompt_tokens: int, num_read: int, new_tokens: int, seconds: float, compiled: int
    ) -> RequestReport:
        """Return the report of prompts. Their prefill and decoding alternate, and share one time.

        Args:
            num_read: number of tokens of prompts that were prefilled, without prefixes; a prompt with several answers
                may be prefilled several times.
        """
        pairs = ((part.num_steps, part.plan.sizes) for part in self.parts)
        return RequestReport(
            "prompts", num_prompts, prompt_tokens, 0.0, new_tokens, answer_seconds=seconds, compiled=compiled,
            cached_tokens=max(0, prompt_tokens - num_read - self.num_prefilled),
            positions_read=sum(steps * sizes.num_slots * sizes.cache_len for steps, sizes in pairs),
            slots=sum(each.num_slots for each in self.classes),
            slot_classes=tuple((each.num_slots, each.cache_len) for each in self.classes),
        )  # fmt: skip

    def width(self, job: SlotJob) -> int:
        """Return the padded width of a prompt after its prefix, the sum of its chunks."""
        return self.prefill_class(len(job.ids)).width(len(job.ids) - job.num_cached, job.prefix is not None)

    def prefill_class(self, num_tokens: int) -> Slots:
        """Return the class that prefills a prompt: the one with the shortest cache that holds it."""
        return next(part for part in self.parts if part.plan.sizes.cache_len >= num_tokens)

    def fits(self, job: SlotJob) -> bool:
        """Return whether the slots fit a job: their longest cache, the ids that end it, and the steps of its sampler;
        and the width of their prefill if the cache rounds, as later chunks read rounded keys."""
        plan, options, num_tokens = self.parts[-1].plan, job.options, len(job.ids)
        steps, lm = plan.fill.sampling_steps, plan.lm
        if num_tokens + options.budget > plan.sizes.cache_len:
            return False
        width = self.prefill_class(num_tokens).plan.sizes.widths[-1]
        return (
            (not lm.model.settings.rounds_cache or width in (max(width, num_tokens), lm.buckets.largest_chunk))
            and len(options.stop_ids) <= plan.stop_width
            and steps.union(options.sampler.sampling_steps(lm.vocab_size)) == steps
        )

    def share_prefixes(self, jobs: Sequence[SlotJob], share_prefix: bool | None) -> list[SlotJob]:
        """Return jobs with the prefixes that they share, or that are cached; jobs that continue a state as they are."""
        first, rows = self.parts[0], [job.ids for job in jobs]
        # Prefixes need programs that warm-up did not run.
        is_off = first.plan.lm.model.programs.is_warm and share_prefix is None
        # A module that drafts reads the hidden states of whole prompts.
        is_off |= first.plan.drafter is not None and first.plan.drafter.needs_hidden
        if is_off or any(job.prefix for job in jobs):
            return [*jobs]
        prefixes = first.cache.assign(first.plan.lm.model, rows, first.width, share_prefix, first.plan.lm.max_positions)
        return [replace(job, prefix=prefix) for job, prefix in zip(jobs, prefixes, strict=True)]

    def prepare(self, jobs: Sequence[SlotJob]) -> None:
        """Compile the programs of the model that jobs need, or load them, several at a time."""
        prefills = set()
        for job in jobs:
            part, tokens, prefix = self.prefill_class(len(job.ids)), len(job.ids), job.prefix
            while prefix is not None and prefix.arrays is None:  # it is prefilled too, from its parent on
                prefills.add((part, tokens - len(prefix.ids), True))
                tokens, prefix = len(prefix.ids), prefix.parent
            prefills.add((part, tokens - (0 if prefix is None else len(prefix.ids)), prefix is not None))
        chunks = {(part, part.widths(tokens, has_prefix), has_prefix) for part, tokens, has_prefix in prefills}
        calls = [call for part, widths, has_prefix in chunks for call in prefill_calls(part, widths, has_prefix)]
        calls += [(part.plan.loop.key, part.loop.state, part.loop.inputs) for part in self.parts]
        model = self.parts[0].plan.loop.model
        params = model.require_params("generation")
        pairs = {(start_class(self.classes, job), self.prefill_class(len(job.ids))): job for job in jobs}
        # On a mesh the types of what prefill returns have no shardings to compile for.
        on_mesh = model.programs.model_sharding is not None
        helpers = [] if on_mesh else [self.parts[i].fill_call(job, part) for (i, part), job in pairs.items()]
        prepare_programs(model.programs, [(key, params, state, inputs) for key, state, inputs in calls], helpers)

    def fill(self, index: int, group: Sequence[tuple[int, SlotJob]]) -> None:
        """Prefill jobs into free rows of a class, without waiting for the device."""
        self.parts[index].fill(group, self.prefill_class(max(len(job.ids) for _, job in group)))

    def move(self, source: int, target: int, rows: Sequence[tuple[int, int, SlotJob]]) -> None:
        """Move jobs with a full cache to free rows of a class with a longer one."""
        self.parts[target].take(self.parts[source], rows)

    def decode(self, min_running: Sequence[int | None]) -> dict[SlotIndex, tuple[RowTokens, bool]]:
        """Decode some steps of each class; the classes run one after another, and the host waits for all of them."""
        pairs = zip(self.parts, min_running, strict=True)
        results_of_parts = [None if least is None else part.start_decode(least) for part, least in pairs]
        return {
            (index, row): new
            for index, (part, results) in enumerate(zip(self.parts, results_of_parts, strict=True))
            if results is not None
            for row, new in part.end_decode(results).items()
        }

    def stop(self, slots: Sequence[SlotIndex]) -> None:
        """End running slots."""
        rows: dict[int, list[int]] = defaultdict(list)
        for index, row in slots:
            rows[index].append(row)
        for index, rows_of_part in rows.items():
            self.parts[index].loop.stop(rows_of_part)


def prefill_calls(
    part: Slots, widths: Sequence[int], has_prefix: bool
) -> list[tuple[ProgramKey, StateArrays, dict[str, Any]]]:
    """Return the programs that prefill chunks of these widths, with the types of their states and inputs."""
    model, rows = part.plan.loop.model, part.plan.sizes.fill_rows
    calls = []
    for program, width in zip(part.programs(widths, has_prefix), widths, strict=True):
        key = program.key
        types = model.programs.template(key.symbolic).state if key.program == "extend" else {}
        bound = {name: t.bind(dict(key.binding)) for name, t in types.items()}
        state = {name: jax.ShapeDtypeStruct(t.shape, t.dtype) for name, t in bound.items()}
        shapes = {part.plan.lm.ids_input: (rows, width), "lengths": (rows,)}
        calls.append((key, state, {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}))
    return calls


def open_slots(plans: Sequence[SlotPlan]) -> SlotClasses:
    """Return the empty slots of all classes."""
    cache = plans[0].lm.prefixes.for_call()
    return SlotClasses(tuple(open_class(plan, cache) for plan in plans))


# The most programs that compile at the same time. A process that ends waits for them, as XLA cannot be interrupted.
MAX_COMPILE_THREADS = 8


def prepare_programs(
    programs: Programs, calls: Sequence[tuple[ProgramKey, Arrays, StateArrays, Arrays]], helpers: Sequence[HelperCall]
) -> None:
    """Trace programs; threads compile or load them, and whoever runs one waits for it.

    Args:
        programs: the programs of the model.
        calls: the key of each program and its arguments, as in `Programs.executable`, the first to run first.
        helpers: calls of helper functions.
    """
    pool = ThreadPoolExecutor(min(MAX_COMPILE_THREADS, num_cpus()))
    try:
        with paused_gc(), programs.lock:
            jobs = programs.compiling.items()
            programs.compiling = {key: job for key, job in jobs if not (job.done() and job.exception())}
            for call in calls:
                if call[0] not in programs.executables and call[0] not in programs.compiling:
                    programs.compiling[call[0]] = pool.submit(programs.trace_executable(*call))
            for helper in helpers:
                if helper.key not in programs.helpers and helper.key not in programs.compiling:
                    programs.compiling[helper.key] = pool.submit(programs.trace_helper(helper))
    finally:
        pool.shutdown(wait=False)
