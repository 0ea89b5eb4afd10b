"""Time to the first token in a new process, with a warm compile cache and without.

    python benchmarks/first_token.py             the 135M shape in f32 on the CPU, the 1B shape in bf16 on a GPU

Writes a checkpoint with random weights, then starts Python anew for each run: import, `rlx_jax.load`, a prompt of 128
tokens, the first token of `lm.stream`. Time runs from the start of the process until that token is here. All runs share
a compile cache (`RLX_JAX_CACHE`), which is empty for the first; the later ones compile no program.
Exits with 1 if one of the later runs compiles a program, or their median is over 5 s on a GPU.
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
from pathlib import Path

GOAL = 5.0  # seconds, on a GPU
STEPS = ("import", "load", "first token")
CHILD = """
import time
start = time.time()
import json, sys
import rlx_jax
imported = time.time()
lm = rlx_jax.load(sys.argv[1])
loaded = time.time()
stream = lm.stream([i % 97 for i in range(128)], max_new_tokens=64)
token = next(stream)
print(json.dumps([imported - start, loaded - imported, time.time() - loaded]), flush=True)
tokens = [token, *stream]
print(lm.report().compiles)
"""


def write_checkpoint(directory: Path, shape: str) -> None:
    """A Hugging Face directory with random weights; in this process nothing else needs JAX."""
    import jax.numpy as jnp
    import numpy as np
    from decode import SHAPES
    from handwritten_llama import hf_config
    from report import noise
    from safetensors.numpy import save_file

    from rlx_jax.models.llama import LlamaConfig, weight_specs

    chosen = SHAPES[shape]
    config = {**hf_config(chosen.sizes), "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    dtype = np.float32 if chosen.dtype == "f32" else jnp.bfloat16
    numbers = noise(dtype)
    weights = {key: np.resize(numbers, spec.shape) for key, spec in weight_specs(LlamaConfig.from_hf(config)).items()}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def run(directory: Path, cache: Path) -> dict[str, float]:
    """One new process: seconds of its steps, from its start to its first token, and to the end of the 64th."""
    # The first run writes Python's bytecode, which an installed package has.
    options = {"RLX_JAX_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    command = [sys.executable, "-c", CHILD, str(directory)]
    with subprocess.Popen(command, env=os.environ | options, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        here = time.perf_counter() - start
        compiles = int(child.stdout.readline() or 0)
    if child.returncode:
        raise SystemExit(f"the child ended with status {child.returncode}")
    whole = time.perf_counter() - start
    steps = dict(zip(STEPS, json.loads(line), strict=True))
    return steps | {"time to first token": here, "whole process": whole, "programs compiled": compiles}


def main() -> None:
    parser = argparse.ArgumentParser(description="time to the first token in a new process")
    parser.add_argument("--shape", choices=("135m", "1b", "tiny"), help="by default 1b on a GPU, else 135m")
    parser.add_argument("--runs", type=int, default=3, help="runs with a warm cache")
    args = parser.parse_args()
    ask = "import jax; print(jax.default_backend())"
    gpu = subprocess.check_output([sys.executable, "-c", ask], text=True).strip() == "gpu"
    with tempfile.TemporaryDirectory() as work:
        directory, cache = Path(work) / "checkpoint", Path(work) / "cache"
        directory.mkdir()
        # The GPU stays free for the children.
        here = [
            sys.executable,
            "-c",
            "import sys, first_token; first_token.write_checkpoint(first_token.Path(sys.argv[1]), sys.argv[2])",
        ]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        subprocess.run([*here, str(directory), args.shape or ("1b" if gpu else "135m")], env=env, check=True)
        runs = [run(directory, cache) for _ in range(1 + args.runs)]
    from report import Goals, emit, table

    goals = Goals()
    goals.at_most("programs compiled with a warm cache", max(r["programs compiled"] for r in runs[1:]), 0)
    rows = [[name, f"{runs[0][name]:.2f}", f"{statistics.median(r[name] for r in runs[1:]):.2f}"] for name in runs[0]]
    emit(cold=runs[0], warm=runs[1:])
    print(table(["seconds", "empty cache", f"warm cache, median of {args.runs}"], rows))
    if gpu:
        goals.at_most("time to first token, s", statistics.median(r["time to first token"] for r in runs[1:]), GOAL)
    goals.exit()


if __name__ == "__main__":
    main()
