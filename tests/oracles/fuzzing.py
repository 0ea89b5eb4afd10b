"""Running many damaged inputs: a limit of time and memory, and a place for the inputs that fail.

A failing input is saved in `tests/corpus/<kind>/` and replayed by the default suite from then on.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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
    before = resident()
    yield
    growth = resident() - before
    assert growth <= GROWTH, f"{growth / 2**20:.0f} MiB more than before"
