"""Damaging inputs, and running many of them: a limit of time and memory, and a place for the inputs that fail.

A failing input is saved in `tests/corpus/<kind>/` and replayed by the default suite from then on.
"""

import contextlib
import copy
import gc
import hashlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
CPU_SECONDS = 1.0
"""More than that on one input is a hang."""
WALL_SECONDS = 20
"""After that a case is broken off."""
GROWTH = 64 * 2**20
"""What a run may add to the resident memory, in bytes."""


def seed_of(name: str) -> int:
    """The seed of a run: `RLX_FUZZ_SEED`, or a new one for `name == "new"`, or a fixed one."""
    given = os.environ.get("RLX_FUZZ_SEED")
    return int(given) if given else random.SystemRandom().randrange(2**32) if name == "new" else 20260101


@contextlib.contextmanager
def case(kind: str, raw: bytes) -> Iterator[None]:
    """One input. What goes wrong inside, or takes too long, saves `raw` in the corpus."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{kind}: still running after {WALL_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    start = time.process_time()
    try:
        yield
        took = time.process_time() - start
        assert took < CPU_SECONDS, f"{kind}: {took:.1f} s on {len(raw)} bytes"
    except BaseException as error:
        error.add_note(f"the input is {save(kind, raw)}")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def save(kind: str, raw: bytes) -> Path:
    """Put an input into the corpus, under the digest of what it holds."""
    path = CORPUS / kind / f"{hashlib.sha256(raw).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def corpus(kind: str) -> list[Path]:
    """The saved inputs."""
    return sorted((CORPUS / kind).glob("*.bin"))


def resident() -> int:
    """Bytes of this process in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What runs inside leaves at most `GROWTH` bytes behind."""
    gc.collect(1)
    gc.freeze()  # what other tests left, millions of objects, is not searched for garbage
    before = resident()
    yield
    growth = resident() - before
    assert growth <= GROWTH, f"{growth / 2**20:.0f} MiB more than before"


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of the values inside `value`; of a long table, some at either end."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    found = [path] if path else []
    for key, item in items[:6] + items[max(6, len(items) - 4) :]:
        found += places(item, (*path, key))
    return found


def at(doc: Any, path: Sequence[Any]) -> Any:
    """The value at a path."""
    for key in path:
        doc = doc[key]
    return doc


def mutated(doc: Any, rng: random.Random, values: Sequence[Any], times: Sequence[int] = (1, 1, 1, 2, 3)) -> Any:
    """A document with some values replaced, changed a little, deleted, doubled or copied from elsewhere in it."""
    doc = copy.deepcopy(doc)
    for _ in range(rng.choice(times)):
        choices = places(doc)
        if not choices:
            break
        *path, key = rng.choice(choices)
        parent, action = at(doc, path), rng.random()
        if action < 0.1 and type(parent[key]) is int:
            parent[key] += rng.choice((-8, -1, 1, 4))
        elif action < 0.55:
            parent[key] = copy.deepcopy(rng.choice(values))
        elif action < 0.75:
            del parent[key]
        elif action < 0.9:
            parent[key] = copy.deepcopy(at(doc, rng.choice(choices)))
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[f"{key}x"] = parent[key]
    return doc


def scrambled(raw: bytes, rng: random.Random, pieces: Sequence[bytes], longest: int = 30) -> bytes:
    """A few changes to bytes: some of them cut, doubled, or replaced by one of `pieces`."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        start, size = rng.randrange(len(raw) + 1), rng.randint(0, longest)
        cut = raw[start : start + size]
        new = rng.choice([b"", cut + cut, rng.choice(pieces), rng.choice(pieces), rng.randbytes(2)])
        raw = raw[:start] + new + raw[start + size * rng.randint(0, 1) :]
    return raw


def run(
    kind: str, count: int, seed: int, make: Callable[[random.Random], bytes], judge: Callable[[bytes], str]
) -> Counter[str]:
    """Judge `count` inputs; the number of each outcome."""
    rng, outcomes = random.Random(seed), Counter[str]()
    print(f"{kind}: {count}, RLX_FUZZ_SEED={seed}")
    with bounded_memory():
        for _ in range(count):
            raw = make(rng)
            with case(kind, raw):
                outcomes[judge(raw)] += 1
    print(dict(outcomes.most_common(12)))
    return outcomes
