"""Two processes train and save every step; one is killed at a random instant; the newest whole step has to be right.

    python -m tests.kill_during_save --rounds 50

Each round resumes from the step that the one before left, kills process 0 or 1 with SIGKILL while saves follow each
other, waits for the other to end by itself, and restores the whole steps here, in one process: bit by bit what the two
had at that step. It prints how many were, how many kills fell into a save, and how long a survivor lived.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax

from rlx_jax.train import Checkpoints
from tests.training_process import DEVICES, Group, digest, like


@dataclass
class Counts:
    """What was seen in all rounds."""

    right: int = 0
    mid_save: int = 0
    steps: int = 0
    survivors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


def kill_one(group: Group, rng: random.Random, counts: Counts) -> None:
    """SIGKILL for one of the two after up to half a second of saves, then the other's own end."""
    group.start()
    for _ in range(3):  # the first save imports what it needs, and takes long
        group.listen(0, "step")
    time.sleep(rng.uniform(0, 0.5))
    victim = rng.randrange(2)
    group.processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    group.end(victim)
    status, _ = group.end(1 - victim, timeout_s=60)
    counts.seconds.append(time.monotonic() - killed)
    counts.survivors[f"process {1 - victim} ended with status {status}"] += 1


def check(directory: Path, told: dict[tuple[int, int], str], before: int) -> int:
    """Compare all whole steps, restored, with what both processes said of them; the newest, 0 if there is none."""
    with Checkpoints(directory) as checkpoints:
        newest = checkpoints.newest() or 0
        assert newest >= before, f"{newest} after {before}: a whole step was lost"
        for step in checkpoints.steps():
            state = checkpoints.restore(like(), step)
            for process in range(2):
                mine = jax.devices()[process * DEVICES // 2 : (process + 1) * DEVICES // 2]
                assert state["step"] == step and digest(state, mine) == told[process, step], f"step {step} is not right"
    return newest


def run(rounds: int, seed: int, directory: Path) -> Counts:
    """All rounds; raises at the first step that is not right."""
    rng, counts, newest = random.Random(seed), Counts(), 0
    told: dict[tuple[int, int], str] = {}
    for number in range(rounds):
        group = Group(directory, 10**6, 2)
        try:
            kill_one(group, rng, counts)
        finally:
            group.close()
        for process in range(2):
            for step, (found,) in group.said(process, "restored").items():
                assert step == 0 or found == told[process, step], f"round {number}: restored another step {step}"
            told |= {(process, step): words[1] for step, words in group.said(process, "step").items()}
        counts.mid_save += any(name.startswith(".") for name in os.listdir(directory))
        newest = check(directory, told, newest)
        counts.right += 1
    counts.steps = newest
    return counts


def main() -> None:
    """Print one line for all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"seed {given.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = run(given.rounds, given.seed, Path(folder) / "run")
    lived, seconds = sorted(counts.seconds), time.monotonic() - started
    print(f"{counts.right} of {given.rounds} right, {counts.mid_save} kills in the middle of a save")
    print(f"{counts.steps} steps in {seconds:.0f} s; {dict(counts.survivors)}")
    print(f"a survivor lived {lived[len(lived) // 2]:.1f} s (median), {lived[-1]:.1f} s at most")
    sys.exit(counts.right != given.rounds)


if __name__ == "__main__":
    main()
