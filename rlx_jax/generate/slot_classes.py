"""`SlotClasses`: the slots of all context classes of a device, as a `Scheduler` runs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.executable import Arrays, StateArrays
from rlx_jax.compiler.settings import SlotSizes
from rlx_jax.generate.decode import RowTokens
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scheduler import SlotIndex, SlotJob, start_class
from rlx_jax.generate.slot_plan import SlotPlan
from rlx_jax.generate.slots import Slots, open_class
from rlx_jax.runtime.program_key import HelperCall, ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.report import RequestReport, SpeculativeCounts


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
        return SpeculativeCounts(
            *np.sum(jax.device_get([part.loop.inputs["counts"] for part in self.parts]), 0).tolist()
        )

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
        shapes = {model.first_input: (rows, width), "lengths": (rows,)}
        calls.append((key, state, {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}))
    return calls


def warm_slots(device: SlotClasses, sampler: Sampler, seed: int) -> None:
    """Run every program of empty slots: each width and chunk of prefill, fills, moves to longer caches, decoding."""
    sizes = device.classes

    def run(index: int, num_tokens: int) -> SlotJob:
        job = SlotJob(0, (0,) * num_tokens, RowOptions(1, sampler, (), (), seed, 0))
        device.fill(index, [(0, job)])
        device.decode([0] * len(sizes))
        return job

    shorter = 0  # the longest prompt that classes of shorter caches prefill
    for i, each in enumerate(sizes):
        # Prompts of each width, and one of a chunk and a token, as later chunks are another program.
        lengths = {min(width, each.cache_len - 1) for width in (*each.widths, each.widths[-1] + 1)}
        lengths = {max(length, shorter + 1) for length in lengths}
        for length in sorted(lengths) if shorter + 1 < each.cache_len else ():
            job = run(i, length)
        for j in range(i + 1, len(sizes)):
            if shorter + 1 < each.cache_len:
                run(j, shorter + 1)
            device.move(i, j, [(0, 0, replace(job, options=replace(job.options, budget=2), new=RowTokens([0])))])
            device.decode([0] * len(sizes))
        shorter = each.cache_len


def open_slots(plans: Sequence[SlotPlan]) -> SlotClasses:
    """Return the empty slots of all classes."""
    cache, widths, parts = plans[0].lm.prefixes.for_call(), {*plans[0].sizes.widths[::2]}, []
    for plan in plans:
        # Chunks end where they do without slots if the cache rounds what later ones read.
        largest = {plan.sizes.widths[-1]} if plan.lm.model.settings.rounds_cache else set()
        parts.append(open_class(plan, cache, tuple(sorted(widths | largest))))
    return SlotClasses(tuple(parts))


# Programs that compile at the same time; XLA itself uses several threads for one.
COMPILE_THREADS = 8


def prepare_programs(
    programs: Programs, calls: Sequence[tuple[ProgramKey, Arrays, StateArrays, Arrays]], helpers: Sequence[HelperCall]
) -> None:
    """Trace programs; threads compile or load them, and whoever runs one waits for it.

    Args:
        programs: the programs of the model.
        calls: the key of each program and its arguments, as in `Programs.executable`, the first to run first.
        helpers: calls of helper functions.
    """
    pool = ThreadPoolExecutor(COMPILE_THREADS)
    with programs.lock:
        jobs = programs.compiling.items()
        programs.compiling = {key: job for key, job in jobs if not (job.done() and job.exception())}
        for call in calls:
            if call[0] not in programs.executables and call[0] not in programs.compiling:
                programs.compiling[call[0]] = pool.submit(programs.trace_executable(*call))
        for helper in helpers:
            if helper.key not in programs.helpers and helper.key not in programs.compiling:
                programs.compiling[helper.key] = pool.submit(programs.trace_helper(helper))
    pool.shutdown(wait=False)
