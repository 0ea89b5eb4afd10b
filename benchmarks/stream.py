"""`lm.stream` beside `lm.generate` for one prompt: tokens a second, and the times between two tokens of the stream.

    PYTHONPATH=. python benchmarks/stream.py          a GPU: the 1B Llama shape with random weights in bf16
                                                      a CPU: the 135M shape in f32
    PYTHONPATH=. python benchmarks/stream.py --tiny   checks the script

A stream dispatches one step at a time, or two on a GPU, and `generate` several, so the two rates show what a dispatch
costs. The gaps are times between two tokens as the caller gets them; in a burst of k tokens, all but one in k would be
about 0.
Prints the best of the rounds after the first one, which compiles.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import numpy as np
from many_prompts import SHAPE_1B, SHAPE_135M, SHAPE_TINY

import rlx_jax as rlx

PROMPT_TOKENS = 128


def time_generate(lm: Any, prompt: list[int], count: int) -> float:
    """Return the seconds of one answer."""
    start = time.perf_counter()
    assert len(lm.generate(prompt, max_new_tokens=count)) == count
    return time.perf_counter() - start


def stream_times(lm: Any, prompt: list[int], count: int) -> np.ndarray[Any, Any]:
    """Return the time of each token of a stream, in seconds after the call."""
    start = time.perf_counter()
    times = [time.perf_counter() - start for _ in lm.stream(prompt, max_new_tokens=count)]
    assert len(times) == count
    return np.array(times)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    on_gpu = jax.default_backend() != "cpu"
    shape = SHAPE_TINY if args.tiny else SHAPE_1B if on_gpu else SHAPE_135M
    precision = {"compute": "bf16", "weights": "bf16"} if on_gpu else {}
    profile = rlx.CompileProfile().replace(precision=precision)
    lm = rlx.CausalLM(
        rlx.Llama32Flow.for_prefill(shape), {}, missing="init", key=0, profile=profile, max_positions=2048
    )
    prompt = np.random.default_rng(0).integers(0, shape["vocab_size"], PROMPT_TOKENS).tolist()
    rounds = range(1 + args.rounds)
    blocks = min([time_generate(lm, prompt, args.tokens) for _ in rounds][1:])
    times = min([stream_times(lm, prompt, args.tokens) for _ in rounds][1:], key=lambda each: float(each[-1]))
    gaps = 1e3 * np.diff(times)
    row = {
        "steps of a dispatch of generate": lm.model.settings.loop.steps,
        "generate, tokens/s": round(args.tokens / blocks, 1),
        "stream, tokens/s": round(args.tokens / times[-1], 1),
        "first token, ms": round(1e3 * times[0], 2),
    }
    row |= {f"gap p{q}, ms": round(float(np.percentile(gaps, q)), 3) for q in (1, 50, 99)}
    print(json.dumps(row | {"device": jax.devices()[0].device_kind}))


if __name__ == "__main__":
    main()
