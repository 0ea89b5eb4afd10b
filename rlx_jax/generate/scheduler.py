"""`Scheduler`: continuous batching without I/O. It decides which job runs in which slot, and when slots are filled.

A slot is a row of the state. A device (`SlotRunner`) prefills jobs into free slots and decodes all slots; a job that
ends frees its slot for the next one. Slots have context classes: a job starts in a short cache, and moves to a longer
one when it is full. The scheduler makes no arrays, so that tests run it with a device of their own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlx_jax.compiler.buckets import SlotSizes
from rlx_jax.generate.decode import RowTokens
from rlx_jax.generate.prefix_cache import Prefix
from rlx_jax.generate.row_options import RowOptions

# A slot: the index of its class, and of its row in the class.
SlotIndex = tuple[int, int]
# A job starts in the smallest class that holds its prompt and one part in so many of its budget.
START_ROOM = 8


@dataclass(frozen=True, eq=False)
class SlotJob:
    """One answer to generate.

    Attributes:
        index: its number, chosen by the caller.
        ids: the prompt.
        options: how its tokens are chosen, and what ends it.
        prefix: the beginning of the prompt whose state is copied, not prefilled with it.
        as_text: whether text is returned, not ids.
        new: its new tokens so far.
    """

    index: int
    ids: Sequence[int]
    options: RowOptions
    prefix: Prefix | None = None
    as_text: bool = False
    new: RowTokens = field(default_factory=RowTokens)

    @property
    def num_cached(self) -> int:
        """Return the number of tokens of its prefix."""
        return 0 if self.prefix is None else len(self.prefix.ids)


class SlotRunner(Protocol):
    """A device with slots."""

    @property
    def classes(self) -> Sequence[SlotSizes]:
        """Return the context classes, the shortest cache first; the last one holds every job."""
        ...

    def width(self, job: SlotJob) -> int:
        """Return the padded width to prefill of a prompt; prompts of one width are prefilled together."""
        ...

    def fill(self, index: int, group: Sequence[tuple[int, SlotJob]]) -> None:
        """Prefill jobs into free rows of a class; the next `decode` returns their first tokens, too."""
        ...

    def move(self, source: int, target: int, rows: Sequence[tuple[int, int, SlotJob]]) -> None:
        """Move jobs with a full cache from rows of one class to free rows of another: (from, to, job)."""
        ...

    def decode(self, min_running: Sequence[int | None]) -> Mapping[SlotIndex, tuple[RowTokens, bool]]:
        """Decode some steps of each class, until at most `min_running` of its slots run; None leaves a class out.

        A slot whose cache is full stops running, too. Return for each slot of these classes its
        new tokens, and whether it continues.
        """
        ...

    def stop(self, slots: Sequence[SlotIndex]) -> None:
        """End running slots."""
        ...


# The function that finds the end of an answer by its text: (options, ids, number of new ids) → length, or None.
FindEnd = Callable[[RowOptions, list[int], int], int | None]


def start_class(classes: Sequence[SlotSizes], job: SlotJob) -> int:
    """Return the index of the class that a job starts in."""
    needed = len(job.ids) + max(1, job.options.budget // START_ROOM)
    return next(i for i, each in enumerate(classes) if each.cache_len >= needed)


class Scheduler:
    """Run jobs in the slots of a device: `submit` and `cancel` jobs, and `step` until `is_idle`.

    Waiting jobs with the largest budgets start first, as a long answer that starts last would run alone at the end.
    Prompts of one width are prefilled together. Slots are filled as soon as a full group of them is free. Jobs with a
    full cache take slots of longer classes before new jobs do.

    Args:
        device: the device.
        find_end: finds the end of an answer by its text.
        window: number of jobs that may overtake each other; without a limit an endless sequence of long jobs would
            keep a short one waiting forever. None for jobs that are all submitted first.
    """

    def __init__(self, device: SlotRunner, find_end: FindEnd, window: int | None = None) -> None:
        self.device, self.find_end, self.window = device, find_end, window
        self.running: dict[SlotIndex, SlotJob] = {}
        self.num_waiting = 0
        self._free = [list(range(each.num_slots)) for each in device.classes]
        self._full: list[SlotIndex] = []  # jobs that wait for a longer cache, in order
        # By class to start in and width a heap of (window, −budget, order, job): the order of submission decides
        # between equal budgets.
        self._waiting: dict[tuple[int, int], list[tuple[int, int, int, SlotJob]]] = defaultdict(list)
        self._num_submitted = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no job waits or runs."""
        return not self.num_waiting and not self.running

    def submit(self, job: SlotJob) -> None:
        """Add a job, with a budget of at least one token."""
        order, start = self._num_submitted, start_class(self.device.classes, job)
        epoch = 0 if self.window is None else order // self.window
        heap = self._waiting[start, self.device.width(job)]
        heapq.heappush(heap, (epoch, -job.options.budget, order, job))
        self._num_submitted, self.num_waiting = order + 1, self.num_waiting + 1

    def cancel(self, index: int) -> None:
        """Drop a job that has not ended; it gets no answer."""
        for slot, job in [*self.running.items()]:
            if job.index == index:
                self.device.stop([slot])
                self._release(slot)
                return
        for heap in self._waiting.values():
            heap[:] = [entry for entry in heap if entry[3].index != index]
            heapq.heapify(heap)
        self.num_waiting = sum(map(len, self._waiting.values()))

    def step(self) -> list[SlotJob]:
        """Move and fill slots, decode some steps, and return the jobs that ended."""
        self._move()
        for index in range(len(self._free)):
            while (count := self._group_size(index)) and len(self._free[index]) >= count:
                self._fill(index, count)
        if not self.running:
            return []
        ended, stops = [], []
        for slot, (new, runs) in self.device.decode(self._min_running()).items():
            job = self.running.get(slot)
            if job is None or slot in self._full:  # it is free, or waits
                continue
            if not self._append(job, new, runs):
                self._full += [] if runs else [slot]
                continue
            if runs:
                stops.append(slot)
            ended.append(job)
            self._release(slot)
        if stops:
            self.device.stop(stops)
        return ended

    def _min_running(self) -> list[int | None]:
        """Return for each class how many slots may still run when `decode` returns; None for a class without jobs."""
        counts = Counter(index for index, _ in self.running.keys() - set(self._full))
        result: list[int | None] = []
        for index, each in enumerate(self.device.classes):
            demand = self._group_size(index) + sum(source < index for source, _ in self._full)
            # With jobs for the class, return as soon as a group of slots is free, and with one slot less than now.
            num_full = sum(source == index for source, _ in self._full)
            least = min(each.num_slots - num_full - min(each.fill_rows, demand), counts[index] - 1) if demand else 0
            result.append(max(0, least) if counts[index] else None)
        return result

    def _candidates(self, index: int) -> list[tuple[int, int]]:
        """Return the keys of the waiting jobs that may start in a class now.

        Jobs that fit a shorter cache start in a longer one only as a full group, as each class takes steps of its own.
        """
        keys = [key for key, heap in self._waiting.items() if heap and key[0] <= index]
        num_shorter = sum(len(self._waiting[key]) for key in keys if key[0] < index)
        return [key for key in keys if key[0] == index or num_shorter >= self.device.classes[index].fill_rows]

    def _group_size(self, index: int) -> int:
        """Return the number of jobs of the next fill of a class."""
        each = self.device.classes[index]
        return min(each.fill_rows, each.num_slots, sum(len(self._waiting[key]) for key in self._candidates(index)))

    def _fill(self, index: int, count: int) -> None:
        """Prefill the next group of waiting jobs into a class: the first one, and others of its width."""
        keys = self._candidates(index)
        width = min(keys, key=lambda key: self._waiting[key][0][:3])[1]
        jobs: list[SlotJob] = []
        # Few jobs of that width are left: narrower prompts fit into the program, too.
        for key in sorted((key for key in keys if key[1] <= width), key=lambda key: (-key[1], -key[0])):
            heap = self._waiting[key]
            while heap and len(jobs) < count:
                jobs.append(heapq.heappop(heap)[3])
        group = [(self._free[index].pop(), job) for job in jobs]
        self.num_waiting -= len(group)
        self.device.fill(index, group)
        self.running |= {(index, row): job for row, job in group}

    def _move(self) -> None:
        """Move jobs with a full cache to free slots of longer classes."""
        groups: dict[tuple[int, int], list[tuple[int, int, SlotJob]]] = defaultdict(list)
        for slot in self._full:
            target = next((i for i in range(slot[0] + 1, len(self._free)) if self._free[i]), None)
            if target is not None:
                groups[slot[0], target].append((slot[1], self._free[target].pop(), self.running[slot]))
        for (source, target), rows in groups.items():
            step = self.device.classes[target].fill_rows
            for i in range(0, len(rows), step):
                self.device.move(source, target, rows[i : i + step])
        # Freed last: a row is copied from its slot before another job is copied into it.
        for (source, target), rows in groups.items():
            for old, new, job in rows:
                self._release((source, old))
                self.running[target, new] = job

    def _append(self, job: SlotJob, new: RowTokens, runs: bool) -> bool:
        """Append new tokens to an answer, and return whether it ended; a job with a full cache has not."""
        job.new.extend(new)
        ids, options = job.new.ids, job.options
        if new.ids and (end := self.find_end(options, ids, len(new.ids))) is not None:
            job.new.cut(end)
            return True
        # A slot that stops has a full cache unless its answer ended, perhaps with the last token that fits.
        is_stop = bool(ids) and ids[-1] in options.stop_ids
        return not runs and (job.new.failed or is_stop or len(ids) >= options.budget)

    def _release(self, slot: SlotIndex) -> None:
        """Free a slot."""
        del self.running[slot]
        self._full = [each for each in self._full if each != slot]
        self._free[slot[0]].append(slot[1])
