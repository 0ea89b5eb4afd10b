"""One flipped bit in each file of a saved training step: what `Checkpoints` and orbax's CheckpointManager make of it.

python benchmarks/checkpoint_damage.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from report import table

from rlx_jax.train import Checkpoints

STATE = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)),
    "b": jnp.arange(100.0),
}


def by_orbax(directory: Path, save: bool) -> Any:
    """Save the state as step 1, or restore it."""
    with ocp.CheckpointManager(directory) as manager:
        if save:
            return manager.save(1, args=ocp.args.StandardSave(STATE))
        return manager.restore(1, args=ocp.args.StandardRestore(STATE))


def by_checkpoints(directory: Path, save: bool) -> Any:
    """The same with this package."""
    with Checkpoints(directory) as checkpoints:
        return checkpoints.save(1, STATE) if save else checkpoints.restore(STATE, 1)


def restore_outcome(restore: Callable[[], Any]) -> str:
    """What became of a step with a flipped bit."""
    try:
        found = restore()
    except Exception:
        return "refused"
    same = all(np.array_equal(np.asarray(found[name]), np.asarray(value)) for name, value in STATE.items())
    return "restored as saved" if same else "other numbers in silence"


def count_outcomes(run: Callable[[Path, bool], Any]) -> Counter[str]:
    """The outcomes of one flip at the beginning, the end and two places between them, in every file."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve() / "run"
        run(directory, True)
        for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size):
            data = path.read_bytes()
            for at in sorted({0, len(data) // 3, len(data) // 2, len(data) - 1}):
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                found[restore_outcome(lambda: run(directory, False))] += 1
            path.write_bytes(data)
    return found


if __name__ == "__main__":
    kinds = ("refused", "restored as saved", "other numbers in silence")
    counts = {"Checkpoints": count_outcomes(by_checkpoints), f"orbax {ocp.__version__}": count_outcomes(by_orbax)}
    print(table(("", *kinds), [(name, *(found[kind] for kind in kinds)) for name, found in counts.items()]))
