"""`rlx-jax bench`: measure the speed of a checkpoint on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import rlx_jax as rlx
from rlx_jax.cli.command import (
    Command,
    Session,
    add_compute,
    add_json,
    add_model,
    json_line,
    kind_with_article,
    load_model,
    peak_memory,
    table,
)
from rlx_jax.errors import RequestError, quote
from rlx_jax.runtime.inputs import check_integer


def bench(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Measure a checkpoint on random tokens: for a language model, tokens per second of prefill and of generation; for
    an encoder, texts and tokens per second. Programs are compiled first; the fastest of several runs counts."""
    names = ("batch", "prompt_tokens", "new_tokens", "runs")
    batch, prompt, new, runs = (check_integer(f"--{n.replace('_', '-')}", getattr(args, n), 1) for n in names)
    model = load_model(args, session)
    if isinstance(model, rlx.CausalLM):
        figures = bench_language_model(model, batch, prompt, new, runs)
    elif isinstance(model, rlx.Encoder):
        figures = bench_encoder(model, batch, prompt, runs)
    else:
        raise RequestError(
            f"{quote(args.directory)} is {kind_with_article(model)}; bench takes language models and text encoders"
        )
    session.status.clear()
    result = {"model": model.model.name, "device": str(model.model.settings.device), "batch": batch, **figures}
    result["peak_bytes"] = peak_memory()
    yield from [json_line(result)] if args.json else table(result)


def best_seconds(call: Callable[[], Any], runs: int) -> float:
    """Return the shortest time of several calls in seconds, after one call that compiles."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def random_ids(vocab_size: int, batch: int, tokens: int) -> list[list[int]]:
    """Return random token ids `[batch, tokens]`, the same in every call."""
    ids: list[list[int]] = np.random.default_rng(0).integers(0, vocab_size, (batch, tokens)).tolist()
    return ids


def bench_language_model(lm: rlx.CausalLM, batch: int, prompt: int, new: int, runs: int) -> dict[str, Any]:
    """Measure prefill up to the first new token, and the time of each of `new` tokens after it."""
    ids, ends = random_ids(lm.vocab_size, batch, prompt), lm.eos_ids
    lm.eos_ids = ()  # so that no row ends early
    try:
        prefill_seconds = best_seconds(lambda: lm.generate(ids, max_new_tokens=1), runs)
        total_seconds = best_seconds(lambda: lm.generate(ids, max_new_tokens=new + 1), runs)
    finally:
        lm.eos_ids = ends
    step_seconds = max(total_seconds - prefill_seconds, 0.0) / new
    return {
        "prompt_tokens": prompt,
        "new_tokens": new,
        "seconds_to_first_token": round(prefill_seconds, 5),
        "prompt_tokens_per_second": round(batch * prompt / prefill_seconds, 1),
        "seconds_per_token": round(step_seconds, 6),
        "new_tokens_per_second": round(batch / step_seconds, 1) if step_seconds else None,
    }


def bench_encoder(encoder: rlx.Encoder, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    """Measure embedding `batch` texts of `tokens` tokens each."""
    ids = random_ids(encoder.vocab_size, batch, tokens)
    seconds = best_seconds(lambda: encoder.embed(ids), runs)
    return {
        "prompt_tokens": tokens,
        "seconds": round(seconds, 5),
        "texts_per_second": round(batch / seconds, 1),
        "tokens_per_second": round(batch * tokens / seconds, 1),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    add = parser.add_argument
    add("--batch", type=int, default=1, metavar="N", help="prompts or texts at a time (%(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="length of each in tokens (%(default)s)")
    add("--new-tokens", type=int, default=32, metavar="N", help="to generate after the first (%(default)s)")
    add("--runs", type=int, default=3, metavar="N", help="number of runs; the fastest counts (%(default)s)")


BENCH = Command("bench", "how fast a checkpoint runs here", (options, add_compute, add_json, add_model), bench)
