"""`rlx-jax bench`: how fast a checkpoint runs here."""

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
    a_kind,
    add_compute,
    add_json,
    add_model,
    as_line,
    open_model,
    peak_memory,
    table,
)
from rlx_jax.errors import RequestError, quote
from rlx_jax.runtime.inputs import whole_number


def bench(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Measure a checkpoint on random tokens: of a language model, tokens read and generated a second, of an encoder,
    texts and tokens a second. Programs are compiled before; of several runs the fastest counts."""
    names = ("batch", "prompt_tokens", "new_tokens", "runs")
    batch, prompt, new, runs = (whole_number(f"--{n.replace('_', '-')}", getattr(args, n), 1) for n in names)
    model = open_model(args, session)
    if isinstance(model, rlx.CausalLM):
        found = bench_language_model(model, batch, prompt, new, runs)
    elif isinstance(model, rlx.Encoder):
        found = bench_encoder(model, batch, prompt, runs)
    else:
        raise RequestError(f"{quote(args.directory)} is {a_kind(model)}; bench takes language models and text encoders")
    session.status.clear()
    result = {"model": model.model.name, "device": str(model.model.settings.device), "batch": batch, **found}
    result["peak_bytes"] = peak_memory()
    yield from [as_line(result)] if args.json else table(result)


def best(call: Callable[[], Any], runs: int) -> float:
    """The shortest time of so many calls, after one that compiles."""
    call()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def random_ids(vocab_size: int, batch: int, tokens: int) -> list[list[int]]:
    """Token ids `[batch, tokens]`, the same each time."""
    found: list[list[int]] = np.random.default_rng(0).integers(0, vocab_size, (batch, tokens)).tolist()
    return found


def bench_language_model(lm: rlx.CausalLM, batch: int, prompt: int, new: int, runs: int) -> dict[str, Any]:
    """Prompts read, up to the first new token; and the time of each of `new` tokens behind it."""
    ids, ends = random_ids(lm.vocab_size, batch, prompt), lm.eos_ids
    lm.eos_ids = ()  # every row is to be as long as asked for
    try:
        reading = best(lambda: lm.generate(ids, max_new_tokens=1), runs)
        whole = best(lambda: lm.generate(ids, max_new_tokens=new + 1), runs)
    finally:
        lm.eos_ids = ends
    step = max(whole - reading, 0.0) / new
    return {
        "prompt_tokens": prompt,
        "new_tokens": new,
        "seconds_to_first_token": round(reading, 5),
        "prompt_tokens_per_second": round(batch * prompt / reading, 1),
        "seconds_per_token": round(step, 6),
        "new_tokens_per_second": round(batch / step, 1) if step else None,
    }


def bench_encoder(encoder: rlx.Encoder, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    """So many texts of so many tokens, embedded."""
    ids = random_ids(encoder.vocab_size, batch, tokens)
    seconds = best(lambda: encoder.embed(ids), runs)
    return {
        "prompt_tokens": tokens,
        "seconds": round(seconds, 5),
        "texts_per_second": round(batch / seconds, 1),
        "tokens_per_second": round(batch * tokens / seconds, 1),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Of `bench`."""
    add = parser.add_argument
    add("--batch", type=int, default=1, metavar="N", help="prompts or texts at a time (%(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="tokens of each (%(default)s)")
    add("--new-tokens", type=int, default=32, metavar="N", help="to generate behind the first (%(default)s)")
    add("--runs", type=int, default=3, metavar="N", help="of which the fastest counts (%(default)s)")


BENCH = Command("bench", "how fast a checkpoint runs here", (options, add_compute, add_json, add_model), bench)
