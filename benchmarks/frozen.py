"""Artifacts of `export`: the same numbers on another machine, and the time until the first answer.

    python benchmarks/frozen.py --export DIR   export four families in f32 `highest` for cpu and cuda, with what they
                                               compute here; random weights, 4 MB together
    python benchmarks/frozen.py DIR            load them, and compare with what they computed there
    python benchmarks/frozen.py                both here, and the time from an artifact to its first logits against
                                               compiling the flow, without and with the compile cache

The machine that loads them needs jax, flatbuffers and this package; `--export` copies flatbuffers next to the files,
for `PYTHONPATH=.:DIR`. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from report import Goals, emit, interleaved, median_ratio, seconds, table

import rlx_jax as rlx

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
FAMILIES = {
    "llama": "llama/gqa_tied_llama3_v5", "gemma3": "gemma3_text/pattern_v4", "qwen3.5": "qwen3_5_text/blocks_v5",
    "encoder": "sentence/base",
}  # fmt: skip
EXACT = rlx.CompileProfile().replace(precision={"matmul": "highest"})
ERROR_GOAL, LOAD_GOAL, CACHED_GOAL = 3e-5, 1.0, 0.3
TOKENS = 64


def answers(model: Any) -> dict[str, Any]:
    """What a model computes of fixed ids: hidden states, or logits and greedy tokens."""
    ids = np.random.default_rng(0).integers(1, model.vocab_size, (2, 9))
    if isinstance(model, rlx.Encoder):
        return {"values": np.asarray(model.hidden_states(ids)), "vectors": model.embed(ids.tolist())}
    count = min(TOKENS, (model.max_positions or TOKENS + 9) - 9)
    return {"values": np.asarray(model.logits(ids)), "tokens": np.array(model.generate(ids.tolist(), count))}


def export_all(folder: Path) -> None:
    """Export every family, with its answers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, checkpoint in FAMILIES.items():
        model = rlx.load(str(FIXTURES / checkpoint), profile=EXACT)
        artifact = model.export(folder / f"{name}.rlxa", platforms=("cpu", "cuda"), overwrite=True)
        np.savez(folder / f"{name}.npz", **answers(model))
        emit(exported=name, bytes=artifact.nbytes, programs=len(artifact.programs), expires=str(artifact.expires))
    spec = importlib.util.find_spec("flatbuffers")
    if spec is not None and spec.origin is not None:
        shutil.copytree(Path(spec.origin).parent, folder / "flatbuffers", dirs_exist_ok=True)


def compare_all(folder: Path, goals: Goals) -> None:
    """Load every artifact, and compare it with what it computed where it was exported."""
    rows = []
    for name in FAMILIES:
        model = rlx.load(folder / f"{name}.rlxa")
        got, want = answers(model), np.load(folder / f"{name}.npz")
        for key in want.files:
            if key == "tokens":
                error, limit = float((got[key] != want[key]).sum()), 0.0
            else:
                error, limit = float(np.abs(got[key] - want[key]).max() / np.abs(want[key]).max()), ERROR_GOAL
            rows.append((name, key, f"{error:.2g}", goals.at_most(f"{name} {key}", error, limit)))
    print(table(("artifact", "of", "error", ""), rows))


def time_loading(folder: Path, goals: Goals, rounds: int) -> None:
    """Time from the files to the first logits: from the checkpoint, and from the artifact; processor time on a CPU."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter  # of a CPU with other work
    ids = np.ones((1, 16), np.int32)

    def first(path: str) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(rlx.load(path).logits(ids))

    rows = []
    for name in (name for name in FAMILIES if name != "encoder"):
        calls = {"checkpoint": first(str(FIXTURES / FAMILIES[name])), "artifact": first(str(folder / f"{name}.rlxa"))}
        rlx.compile_cache("off")
        times = interleaved(calls, rounds, clock=clock)
        ratio = median_ratio(times["artifact"], times["checkpoint"])
        with tempfile.TemporaryDirectory() as cache:
            rlx.compile_cache(cache)
            calls["artifact"]()
            cached = seconds(calls["artifact"], clock) / float(np.median(times["checkpoint"]))
            rlx.compile_cache("off")
        row = (name, f"{np.median(times['checkpoint']):.2f}", f"{np.median(times['artifact']):.2f}", f"{ratio:.2f}")
        rows.append((*row, f"{cached:.2f}", goals.at_most(f"{name}: loading", ratio, LOAD_GOAL),
                     goals.at_most(f"{name}: loading with the cache", cached, CACHED_GOAL)))  # fmt: skip
    print(table(("model", "compile s", "artifact s", "ratio", "cached", "", ""), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="artifacts: the same numbers, and the time until the first answer")
    parser.add_argument("folder", nargs="?", type=Path, help="artifacts of another machine")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="only export, into this folder")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    goals = Goals()
    rlx.compile_cache("off")
    if args.export:
        export_all(args.export)
    elif args.folder:
        compare_all(args.folder, goals)
    else:
        with tempfile.TemporaryDirectory() as name:
            export_all(Path(name))
            compare_all(Path(name), goals)
            time_loading(Path(name), goals, args.rounds)
    emit(device=jax.devices()[0].device_kind, jax=jax.__version__)
    goals.exit()


if __name__ == "__main__":
    main()
