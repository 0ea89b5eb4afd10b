"""What the benchmarks share: goals, tables, interleaved timing."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax


def noise(dtype: Any) -> np.ndarray[Any, Any]:
    """Return normal numbers of deviation 0.02. Their count is a prime, so that a matrix that repeats them has no two
    equal rows."""
    values = np.random.default_rng(0).standard_normal(16_777_213, np.float32) * np.float32(0.02)
    return values.astype(dtype)


class RandomSource:
    """A weight source of random numbers: those of each key begin at another index of `noise`."""

    def __init__(self, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self.specs = specs
        self.noise = np.tile(noise(next(iter(specs.values())).dtype), 2)

    def keys(self) -> tuple[str, ...]:
        return tuple(self.specs)

    def spec(self, key: str) -> jax.ShapeDtypeStruct:
        return self.specs[key]

    def has(self, key: str) -> bool:
        return key in self.specs

    def where(self, key: str) -> str:
        return "random numbers"

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        shape, dtype = self.specs[key].shape, self.specs[key].dtype
        if len(shape) < 2:
            array = np.ones(shape, dtype)
        else:
            size, period = int(np.prod(shape)), self.noise.size // 2
            start = zlib.crc32(key.encode()) % period
            array = np.resize(self.noise[start : start + min(size, period)], size).reshape(shape)
        return array if index is None else array[index]


class Goals:
    """Figures held against their goals; `exit` ends the process with 1 if one was missed."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def at_most(self, name: str, value: float, limit: float) -> str:
        """Note the figure and return "ok" or "MISSED", for a table."""
        if value <= limit:  # false for NaN
            return "ok"
        self.missed.append(f"{name}: {value:.4g}, the goal is at most {limit:.4g}")
        return "MISSED"

    def exit(self) -> None:
        """End the process: 0 if every goal was met."""
        for line in self.missed:
            print(f"missed: {line}", file=sys.stderr)
        sys.exit(1 if self.missed else 0)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in cells]  # fmt: skip
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def emit(**figures: Any) -> None:
    """One JSON line."""
    print(json.dumps(figures), flush=True)


def seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long one call takes; it must wait for its own result."""
    start = clock()
    call()
    return clock() - start


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    budget: float = float("inf"),
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times in seconds by name: every round runs each call once, in a random order, so that noise hits all alike.

    Stops after `rounds`, or when `budget` seconds are spent and three rounds are done.
    """
    shuffle = random.Random(seed).shuffle
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > budget:
            break
        shuffle(names)
        for name in names:
            times[name].append(seconds(calls[name], clock))
    return times


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over pairs of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
