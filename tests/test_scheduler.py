"""The scheduler of continuous batching with a device that is a model of one: random jobs, slots and cancellations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scheduler import Scheduler, SlotJob, SlotTokens

STEPS = 4
STOP = 7
"""Jobs of an odd index have a text that ends them when they have this many tokens."""


def job(index: int, length: int, budget: int) -> SlotJob:
    return SlotJob(index, [0] * length, RowOptions(budget, Sampler(), (), (), 0, index))


def wanted(index: int, budget: int) -> list[int]:
    """The answer of a job: index, index + 1, …"""
    return [index + i for i in range(min(budget, STOP) if index % 2 else budget)]


@dataclass
class Device:
    """Slots on the host. It checks what a device relies on."""

    num_slots: int
    fill_rows: int
    jobs: dict[int, SlotJob] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    num_idle_steps: int = 0

    def width(self, num_tokens: int) -> int:
        return -(-num_tokens // 4) * 4

    def fill(self, group: Sequence[tuple[int, SlotJob]]) -> None:
        assert 0 < len(group) <= self.fill_rows
        for slot, new in group:
            assert 0 <= slot < self.num_slots and slot not in self.jobs
            self.jobs[slot], self.done[slot] = new, 0

    def decode(self, min_running: int) -> dict[int, SlotTokens]:
        tokens: dict[int, list[int]] = {slot: [] for slot in self.jobs}
        for step in range(STEPS + 1):  # step 0 is the first token
            running = [slot for slot in self.jobs if self.done[slot] < self.jobs[slot].options.budget]
            if step and len(running) <= min_running:
                break
            self.num_idle_steps += self.num_slots - len(running)
            for slot in running if step else [slot for slot in running if not self.done[slot]]:
                tokens[slot].append(self.jobs[slot].index + self.done[slot])
                self.done[slot] += 1
        ends = {slot: self.done[slot] >= self.jobs[slot].options.budget for slot in self.jobs}
        self.jobs = {slot: each for slot, each in self.jobs.items() if not ends[slot]}
        return {slot: SlotTokens(ids, not ends[slot]) for slot, ids in tokens.items()}

    def stop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.jobs[slot]


def find_end(one: SlotJob, ids: list[int], num_new: int) -> int | None:
    return STOP if one.index % 2 and len(ids) >= STOP else None


jobs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=24)


@given(jobs, st.integers(1, 5), st.integers(1, 5), st.none() | st.integers(1, 9), st.data())
def test_every_job_is_answered_once(
    sizes: list[tuple[int, int]], slots: int, rows: int, window: int | None, data: st.DataObject
) -> None:
    """Whatever comes in whatever order, and is cancelled when: each other job gets its tokens, once."""
    device = Device(slots, min(slots, rows))
    scheduler = Scheduler(device, find_end, window)
    waiting = [job(i, *size) for i, size in enumerate(sizes)]
    answers: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    while waiting or not scheduler.is_idle:
        for _ in range(data.draw(st.integers(0, len(waiting))) if scheduler.answers else len(waiting[:3])):
            scheduler.submit(waiting.pop(0))
        if data.draw(st.integers(0, 4)) == 0:
            index = data.draw(st.integers(0, len(sizes) - len(waiting) - 1)) if len(sizes) > len(waiting) else 0
            if index not in answers and len(sizes) > len(waiting):
                scheduler.cancel(index)
                cancelled.add(index)
        for answer in scheduler.step():
            assert answer.job.index not in answers
            answers[answer.job.index] = answer.ids
    want = {i: wanted(i, budget) for i, (_, budget) in enumerate(sizes) if i not in cancelled}
    assert answers == want
    assert not device.jobs and scheduler.num_waiting == 0


def test_long_answers_first_and_few_idle_slots() -> None:
    """Longest first: the steps of idle slots stay below one group of slots and the tail of the last answers."""
    device = Device(8, 2)
    scheduler = Scheduler(device)
    budgets = [1 + 7 * i % 40 for i in range(64)]
    for i, budget in enumerate(budgets):
        scheduler.submit(job(i, 3, budget))
    order: list[int] = []
    while not scheduler.is_idle:
        order += [answer.job.options.budget for answer in scheduler.step()]
    assert order[-1] < 10 and sum(order[:16]) > sum(order[-16:])
    assert device.num_idle_steps < 0.25 * sum(budgets)


def test_a_window_ends_waiting() -> None:
    """An endless sequence of long jobs does not keep a short one waiting."""
    scheduler = Scheduler(Device(1, 1), window=4)
    for i in range(4):
        scheduler.submit(job(i, 2, 12 if i else 1))
    done: list[int] = []
    for i in range(4, 60):
        scheduler.submit(job(i, 2, 12))
        done += [answer.job.index for answer in scheduler.step()]
    assert 0 in done and done.index(0) < 5
