"""Checkpoints of several processes: real ones in the slow tier, and what they say to each other."""

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlx_jax.errors import NoSpaceError, RlxError, SaveFailedError, StorageError, TargetExistsError
from rlx_jax.train import Checkpoints, processes
from rlx_jax.train.processes import Processes
from tests.training_process import Group, digest, like, start, steps_of


@pytest.mark.slow
def test_a_run_of_two_processes(tmp_path: Path) -> None:
    """A full disk in one process fails that step in both, and no other. SIGKILL for one ends both, and two that resume
    go on from a step that both had. SIGTERM for one: both save the same step and end. What they wrote, one process of
    eight devices reads and one device too; their losses are those of one process that was never stopped."""
    run, first = tmp_path / "run", Group(tmp_path / "run", 10**6, 2, full=2)
    try:
        first.start()
        for index in range(2):
            first.listen(index, "failed")
        kill_one(first, random.Random(0))
    finally:
        first.close()
    for heard in first.heard:
        failed = [" ".join(line) for line in heard if line[0] == "failed"]
        assert failed and failed[0].startswith("failed 2 "), heard
        assert "the newest complete step is 1: 'No space left on device'" in failed[0]
    group = Group(run, 10**6, 2)
    try:
        group.start()
        for _ in range(3):
            group.listen(1, "step")
        group.processes[1].send_signal(signal.SIGTERM)
        ends = [group.end(index) for index in range(2)]
    finally:
        group.close()
    assert [status for status, _ in ends] == [0, 0], ends
    for index in range(2):
        ((step, (found,)),) = group.said(index, "restored").items()
        assert step > 0 and found == first.said(index, "step")[step][1]
    with Checkpoints(run) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None and newest >= step + 3
        state = checkpoints.restore(like())
        alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        one = {
            n: x if n == "step" else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone) for n, x in like().items()
        }
        for name, array in checkpoints.restore(one).items():
            assert np.asarray(array).tobytes() == np.asarray(state[name]).tobytes()
    assert {line[1] for heard in group.heard for line in heard if line[0] == "ended"} == {str(newest)}
    halves = [digest(state, jax.devices()[4 * index : 4 * index + 4]) for index in range(2)]
    assert halves == [group.said(index, "step")[newest][1] for index in range(2)]
    told = [{n: float.fromhex(words[0]) for n, words in g.said(0, "step").items()} for g in (first, group)]
    assert told[0] | told[1] == told[1] | told[0], "steps that were taken twice"
    want = {number: loss for number, loss, _ in steps_of(start(), newest)}
    assert told[0] | told[1] == pytest.approx(want, rel=1e-4)


def kill_one(group: Group, rng: random.Random) -> None:
    """SIGKILL for one of the two after up to half a second of saves, then the other's own end."""
    time.sleep(rng.uniform(0, 0.5))
    victim = rng.randrange(2)
    group.processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    group.end(victim)
    status, _ = group.end(1 - victim, timeout_s=60)
    print(f"process {1 - victim} ended with status {status}, {time.monotonic() - killed:.1f} s behind the other")
    assert time.monotonic() - killed < 30


@pytest.mark.soak
def test_killed_during_a_save(tmp_path: Path, rounds: int = 50) -> None:
    """Each round resumes from the step that the one before left, kills one process while saves follow each other, and
    restores the whole steps here, in one process: bit by bit what the two had at that step."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, newest, told = random.Random(seed), 0, dict[tuple[int, int], str]()
    for number in range(rounds):
        group = Group(tmp_path / "run", 10**6, 2)
        try:
            group.start()
            for _ in range(3):  # the first save imports what it needs, and takes long
                group.listen(0, "step")
            kill_one(group, rng)
        finally:
            group.close()
        for process in range(2):
            for step, (found,) in group.said(process, "restored").items():
                assert step == 0 or found == told[process, step], f"round {number}: restored another step {step}"
            told |= {(process, step): words[1] for step, words in group.said(process, "step").items()}
        with Checkpoints(tmp_path / "run") as checkpoints:
            assert (checkpoints.newest() or 0) >= newest, "a whole step was lost"
            newest = checkpoints.newest() or 0
            for step in checkpoints.steps():
                state = checkpoints.restore(like(), step)
                for process in range(2):
                    half = digest(state, jax.devices()[4 * process : 4 * process + 4])
                    assert state["step"] == step and half == told[process, step], f"step {step} is not right"
    assert newest >= rounds  # a step starts when the save before the last one is whole


class Store:
    """A key-value store of one process, with the methods of that of `jax.distributed`."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise TimeoutError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            del self.values[key]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Callable[[Callable[[Processes, int], Any]], list[Any]]]:
    """A store, and a function that runs another in two threads as two processes: what each gave or raised."""
    store, here = Store(), threading.local()
    monkeypatch.setattr(processes, "_key_value_store", lambda: store)
    monkeypatch.setattr(Processes, "index", property(lambda _: here.index))
    monkeypatch.setattr(Processes, "count", property(lambda _: 2))

    def both(run: Callable[[Processes, int], Any]) -> list[Any]:
        found: list[Any] = [None, None]
        monkeypatch.setattr(processes, "_PREFIX_COUNTER", iter([7, 7]))

        def one(index: int) -> None:
            here.index = index
            try:
                found[index] = run(Processes(0.5), index)
            except BaseException as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return store, both


def fail(error: BaseException) -> str:
    raise error


@pytest.mark.parametrize(("error", "there"), [
    (NoSpaceError("full"), NoSpaceError),
    (TargetExistsError("exists"), TargetExistsError),
    (ValueError("bad"), StorageError),
    (KeyboardInterrupt(), StorageError),
])  # fmt: skip
@pytest.mark.parametrize("at", [0, 1])
def test_one_failure_fails_all(two: Any, error: BaseException, there: type[RlxError], at: int) -> None:
    """The process itself raises what it was; the other an error of that class, at once."""
    _, both = two
    started = time.monotonic()
    found = both(lambda group, index: group.run_all("it", lambda: fail(error) if index == at else "done"))
    assert found[at] is error and type(found[1 - at]) is there
    assert str(found[1 - at]).startswith(f"in process {at}: ") and time.monotonic() - started < 0.4


def test_who_does_not_answer_is_not_waited_for_for_ever(two: Any) -> None:
    _, both = two
    found = both(lambda group, index: group.run_all("save-3/written", lambda: "done") if index == 0 else None)
    assert isinstance(found[0], SaveFailedError) and found[1] is None
    assert "process 1 of 2 did not answer within 0.5 s to 'save-3/written'" in str(found[0])
