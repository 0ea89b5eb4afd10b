"""The scheduler of continuous batching with a device that is a model of one: random jobs, slots and cancellations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlx_jax.compiler.buckets import SlotSizes
from rlx_jax.generate.decode import RowTokens
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scheduler import Scheduler, SlotIndex, SlotJob

STEPS = 4
STOP = 7
"""Jobs of an odd index have a text that ends them when they have this many tokens."""


def job(index: int, length: int, budget: int) -> SlotJob:
    return SlotJob(index, [0] * length, RowOptions(budget, Sampler(), (), (), 0, index))


def wanted(index: int, budget: int) -> list[int]:
    """The answer of a job: index, index + 1, …"""
    return [index + i for i in range(min(budget, STOP) if index % 2 else budget)]


def slot_class(num_slots: int, fill_rows: int, cache_len: int = 40) -> SlotSizes:
    return SlotSizes(num_slots, fill_rows, (), cache_len)


@dataclass
class Device:
    """Slots on the host. It checks what a device relies on, and counts the positions of caches that steps read."""

    classes: tuple[SlotSizes, ...]
    jobs: dict[SlotIndex, SlotJob] = field(default_factory=dict)
    full: dict[SlotIndex, SlotJob] = field(default_factory=dict)
    done: dict[SlotIndex, int] = field(default_factory=dict)
    num_idle_steps: int = 0
    positions_read: int = 0

    def width(self, job: SlotJob) -> int:
        return -(-len(job.ids) // 4) * 4

    def place(self, slot: SlotIndex, new: SlotJob, done: int) -> None:
        index, row = slot
        assert 0 <= row < self.classes[index].num_slots and slot not in self.jobs
        assert len(new.ids) + done < self.classes[index].cache_len
        self.jobs[slot], self.done[slot] = new, done

    def fill(self, index: int, group: Sequence[tuple[int, SlotJob]]) -> None:
        assert 0 < len(group) <= self.classes[index].fill_rows
        for row, new in group:
            self.place((index, row), new, 0)

    def move(self, source: int, target: int, rows: Sequence[tuple[int, int, SlotJob]]) -> None:
        assert source < target and 0 < len(rows) <= self.classes[target].fill_rows
        for old, new, moved in rows:
            assert self.full.pop((source, old)) is moved and len(moved.new.ids) == self.done[source, old]
            self.place((target, new), moved, len(moved.new.ids))

    def limit(self, slot: SlotIndex) -> int:
        return min(self.jobs[slot].options.budget, self.classes[slot[0]].cache_len - len(self.jobs[slot].ids))

    def decode(self, min_running: Sequence[int | None]) -> dict[SlotIndex, tuple[RowTokens, bool]]:
        result: dict[SlotIndex, tuple[RowTokens, bool]] = {}
        for index, least in enumerate(min_running):
            slots = [slot for slot in self.jobs if slot[0] == index and self.done[slot] < self.limit(slot)]
            assert bool(slots) == (least is not None)
            for slot in slots if least is not None else ():
                result[slot] = RowTokens(), True
            for step in range(STEPS + 1):  # step 0 is the first token
                running = [slot for slot in slots if self.done[slot] < self.limit(slot)]
                if step and len(running) <= (least or 0):
                    break
                self.num_idle_steps += self.classes[index].num_slots - len(running)
                self.positions_read += self.classes[index].num_slots * self.classes[index].cache_len * bool(step)
                for slot in running if step else [slot for slot in running if not self.done[slot]]:
                    result[slot][0].ids.append(self.jobs[slot].index + self.done[slot])
                    self.done[slot] += 1
        for slot, (new, _) in result.items():
            if self.done[slot] >= self.limit(slot):
                result[slot] = new, False
                self.full[slot] = self.jobs.pop(slot)
        return result

    def stop(self, slots: Sequence[SlotIndex]) -> None:
        for slot in slots:
            self.jobs.pop(slot, None)


def find_end(one: RowOptions, ids: list[int], num_new: int) -> int | None:
    return STOP if one.draw % 2 and len(ids) >= STOP else None


def never_ends(one: RowOptions, ids: list[int], num_new: int) -> None:
    return None


jobs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=24)
one_class = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 39))
some_classes = st.lists(one_class, max_size=2, unique_by=lambda each: each[2])


@given(jobs, some_classes, st.integers(1, 5), st.integers(1, 5), st.none() | st.integers(1, 9), st.data())
def test_every_job_is_answered_once(
    sizes: list[tuple[int, int]], shorter: list[Any], slots: int, rows: int, window: int | None, data: st.DataObject
) -> None:
    """Whatever comes in whatever order, and is cancelled when: each other job gets its tokens, once."""
    shorter = sorted(shorter, key=lambda each: each[2])
    device = Device((*(slot_class(*each) for each in shorter), slot_class(slots, rows)))
    scheduler = Scheduler(device, find_end, window)
    waiting = [job(i, *size) for i, size in enumerate(sizes)]
    answers: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    while waiting or not scheduler.is_idle:
        for _ in range(data.draw(st.integers(0, len(waiting))) if scheduler.running else len(waiting[:3])):
            scheduler.submit(waiting.pop(0))
        if data.draw(st.integers(0, 4)) == 0:
            index = data.draw(st.integers(0, len(sizes) - len(waiting) - 1)) if len(sizes) > len(waiting) else 0
            if index not in answers and len(sizes) > len(waiting):
                scheduler.cancel(index)
                cancelled.add(index)
        for answer in scheduler.step():
            assert answer.index not in answers
            answers[answer.index] = answer.new.ids
    want = {i: wanted(i, budget) for i, (_, budget) in enumerate(sizes) if i not in cancelled}
    assert answers == want
    assert not device.jobs and scheduler.num_waiting == 0


def test_long_answers_first_and_few_idle_slots() -> None:
    """Longest first: the steps of idle slots stay below one group of slots and the tail of the last answers."""
    device = Device((slot_class(8, 2, 50),))
    scheduler = Scheduler(device, never_ends)
    budgets = [1 + 7 * i % 40 for i in range(64)]
    for i, budget in enumerate(budgets):
        scheduler.submit(job(i, 3, budget))
    order: list[int] = []
    while not scheduler.is_idle:
        order += [answer.options.budget for answer in scheduler.step()]
    assert order[-1] < 10 and sum(order[:16]) > sum(order[-16:])
    assert device.num_idle_steps < 0.25 * sum(budgets)


def test_a_window_ends_waiting() -> None:
    """An endless sequence of long jobs does not keep a short one waiting."""
    scheduler = Scheduler(Device((slot_class(1, 1),)), never_ends, window=4)
    for i in range(4):
        scheduler.submit(job(i, 2, 12 if i else 1))
    done: list[int] = []
    for i in range(4, 60):
        scheduler.submit(job(i, 2, 12))
        done += [answer.index for answer in scheduler.step()]
    assert 0 in done and done.index(0) < 5


def test_classes_read_less() -> None:
    """Short jobs and a few long ones: with a class of short caches fewer positions are read, in fewer steps of it."""
    read = []
    for classes in ((slot_class(8, 2, 400),), (slot_class(7, 2, 40), slot_class(1, 1, 400))):
        device = Device(classes)
        scheduler = Scheduler(device, never_ends)
        for i in range(60):
            scheduler.submit(job(2 * i, 5, 200 if i < 3 else 20))
        done = []
        while not scheduler.is_idle:
            done += [answer.index for answer in scheduler.step()]
        assert sorted(done) == [*range(0, 120, 2)]
        read.append(device.positions_read)
    assert read[1] < 0.6 * read[0]
