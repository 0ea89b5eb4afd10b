"""`Scheduler`: continuous batching without I/O. It decides which job runs in which slot, and when slots are filled.

A slot is a row of the state. A device (`SlotRunner`) prefills jobs into free slots and decodes all slots; a job that
ends frees its slot for the next one. The scheduler makes no arrays, so that tests run it with a device of their own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlx_jax.generate.row_options import RowOptions

# Log-probabilities of one position: the likeliest ids with their values, the likeliest first.
TopLogProbs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class SlotJob:
    """One answer to generate.

    Attributes:
        index: its number, chosen by the caller.
        ids: the prompt.
        options: how its tokens are chosen, and what ends it.
    """

    index: int
    ids: Sequence[int]
    options: RowOptions


@dataclass(eq=False)
class JobAnswer:
    """The new tokens of a job so far.

    Attributes:
        job: the job.
        ids: the new tokens.
        log_probs, top_logprobs: their log-probabilities, and the likeliest tokens at each position, if requested.
        failed: whether the logits after the last token were not finite, which ended the job.
    """

    job: SlotJob
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogProbs] = field(default_factory=list)
    failed: bool = False

    def cut(self, count: int) -> None:
        """Drop everything after the first `count` tokens."""
        for values in (self.ids, self.log_probs, self.top_logprobs):
            del values[count:]
        self.failed = False


@dataclass(frozen=True)
class SlotTokens:
    """The new tokens of one slot after a step.

    Attributes:
        ids: the tokens.
        running: whether the slot continues.
        failed: whether the logits after the last token were not finite.
        log_probs, top_logprobs: as in `JobAnswer`.
    """

    ids: Sequence[int]
    running: bool
    failed: bool = False
    log_probs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogProbs] = ()


class SlotRunner(Protocol):
    """A device with slots."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        ...

    @property
    def fill_rows(self) -> int:
        """Return the largest number of jobs of one fill."""
        ...

    def width(self, num_tokens: int) -> int:
        """Return the padded width of a prompt; prompts of one width are prefilled together."""
        ...

    def fill(self, group: Sequence[tuple[int, SlotJob]]) -> None:
        """Prefill jobs into free slots; the next `decode` returns their first tokens, too."""
        ...

    def decode(self, min_running: int) -> Mapping[int, SlotTokens]:
        """Decode some steps, until at most `min_running` slots run; return the new tokens by slot."""
        ...

    def stop(self, slots: Sequence[int]) -> None:
        """End running slots."""
        ...


# The function that finds the end of an answer by its text: (job, ids, number of new ids) → length, or None.
FindEnd = Callable[[SlotJob, list[int], int], int | None]


def never_ends(job: SlotJob, ids: list[int], num_new: int) -> int | None:
    """Return None: no text ends the answer."""
    return None


class Scheduler:
    """Run jobs in the slots of a device: `submit` and `cancel` jobs, and `step` until `is_idle`.

    Waiting jobs with the largest budgets start first, as a long answer that starts last would run alone at the end.
    Prompts of one width are prefilled together. Slots are filled as soon as a full group of them is free.

    Args:
        device: the device.
        find_end: finds the end of an answer by its text.
        window: number of jobs that may overtake each other; without a limit an endless sequence of long jobs would
            keep a short one waiting forever. None for jobs that are all submitted first.
    """

    def __init__(self, device: SlotRunner, find_end: FindEnd = never_ends, window: int | None = None) -> None:
        self.device, self.find_end, self.window = device, find_end, window
        self.answers: dict[int, JobAnswer] = {}  # by slot, of running jobs
        self.num_waiting = 0
        self._free = list(range(device.num_slots))
        # By width a heap of (window, −budget, order, job): the order of submission decides between equal budgets.
        self._waiting: dict[int, list[tuple[int, int, int, SlotJob]]] = defaultdict(list)
        self._num_submitted = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no job waits or runs."""
        return not self.num_waiting and not self.answers

    def submit(self, job: SlotJob) -> None:
        """Add a job, with a budget of at least one token."""
        order = self._num_submitted
        epoch = 0 if self.window is None else order // self.window
        heapq.heappush(self._waiting[self.device.width(len(job.ids))], (epoch, -job.options.budget, order, job))
        self._num_submitted, self.num_waiting = order + 1, self.num_waiting + 1

    def cancel(self, index: int) -> None:
        """Drop a job that has not ended; it gets no answer."""
        for slot, answer in [*self.answers.items()]:
            if answer.job.index == index:
                self.device.stop([slot])
                self._release(slot)
                return
        for heap in self._waiting.values():
            heap[:] = [entry for entry in heap if entry[3].index != index]
            heapq.heapify(heap)
        self.num_waiting = sum(map(len, self._waiting.values()))

    def step(self) -> list[JobAnswer]:
        """Fill free slots, decode some steps, and return the answers that ended."""
        while self.num_waiting and len(self._free) >= self._group_size:
            self._fill()
        if not self.answers:
            return []
        # With jobs waiting, return as soon as a group of slots is free.
        min_running = self.device.num_slots - self._group_size if self.num_waiting else 0
        ended, stops = [], []
        for slot, new in self.device.decode(min_running).items():
            answer = self.answers.get(slot)
            if answer is None or not self._append(answer, new):  # None: a slot that `cancel` stopped
                continue
            if new.running:
                stops.append(slot)
            ended.append(answer)
            self._release(slot)
        if stops:
            self.device.stop(stops)
        return ended

    @property
    def _group_size(self) -> int:
        """Return the number of jobs of the next fill."""
        return min(self.device.fill_rows, self.num_waiting)

    def _fill(self) -> None:
        """Prefill the next group of waiting jobs: the first one, and others of its width."""
        count = self._group_size
        width = min((w for w, heap in self._waiting.items() if heap), key=lambda w: self._waiting[w][0][:3])
        jobs: list[SlotJob] = []
        # Few jobs of that width are left: narrower prompts fit into the program, too.
        for narrower in sorted((w for w in self._waiting if w <= width), reverse=True):
            heap = self._waiting[narrower]
            while heap and len(jobs) < count:
                jobs.append(heapq.heappop(heap)[3])
        group = [(self._free.pop(), job) for job in jobs]
        self.num_waiting -= len(group)
        self.device.fill(group)
        self.answers |= {slot: JobAnswer(job) for slot, job in group}

    def _append(self, answer: JobAnswer, new: SlotTokens) -> bool:
        """Append new tokens to an answer, and return whether it ended."""
        answer.ids.extend(new.ids)
        answer.log_probs.extend(new.log_probs)
        answer.top_logprobs.extend(new.top_logprobs)
        answer.failed = new.failed
        end = self.find_end(answer.job, answer.ids, len(new.ids)) if new.ids else None
        if end is not None:
            answer.cut(end)
        return end is not None or not new.running

    def _release(self, slot: int) -> None:
        """Free a slot."""
        del self.answers[slot]
        self._free.append(slot)
