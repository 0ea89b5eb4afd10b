"""A hundred thousand decoding steps: nothing compiles, memory is flat, and the last tokens are right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from tests.test_serving import VOCAB as SERVED
from tests.test_serving import compiled, model

STEPS = 100_000
GROWTH = 16 * 2**20  # bytes that the process may grow by: the host allocator's noise


def resident() -> int:
    """Bytes of memory that the process holds."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def on_device() -> int:
    """Bytes of all live arrays."""
    return sum(a.nbytes for a in jax.live_arrays())


@pytest.mark.soak
def test_many_requests() -> None:
    """Sessions of all lengths, batches and samplers, some dropped on the way; each again and again with one answer."""
    lm = model(prompt=[4, 8], batch=[1, 4], context=[64], on_recompile="error")
    samplers = (rlx.Sampler(), rlx.Sampler(temperature=1.0, top_k=7, repetition_penalty=1.1))
    lm.warmup(samplers=samplers)
    rng = np.random.default_rng(0)
    requests = []
    for n in range(12):
        prompts = [rng.integers(0, SERVED, k).tolist() for k in rng.integers(1, 12, 1 + n % 4)]
        requests.append((prompts, int(rng.integers(20, 50)), samplers[n % 2], n))
    answers = [lm.generate(*request[:3], seed=request[3]) for request in requests]
    steps, seen, held = 0, resident(), on_device()
    with compiled() as events:
        while steps < STEPS:
            n = int(rng.integers(len(requests)))
            prompts, count, sampler, seed = requests[n]
            if steps % 7 == 0:
                dropped = lm.stream(prompts[0], count, sampler, seed=seed)
                assert next(dropped) == answers[n][0][0]
                dropped.close()
            assert lm.generate(prompts, count, sampler, seed=seed) == answers[n]
            steps += count
    assert not events and lm.report().recompiles == 0
    assert on_device() == held and resident() - seen < GROWTH
    for (prompts, _, sampler, _), rows in zip(requests, answers, strict=True):
        if sampler == samplers[0]:
            check_greedy(model_logits(lm), prompts, rows)


def model_logits(lm: Any) -> Any:
    """The forward program, which warm-up does not cover, without the profile's word on compiling."""
    fresh = model()
    return lambda row: np.asarray(fresh.logits([row + [0] * (64 - len(row))]))[0, : len(row)]


def check_greedy(forward: Any, prompts: list[list[int]], rows: list[list[int]]) -> None:
    """Every new token has the largest logit of the forward program, as near as rounding tells."""
    for prompt, new in zip(prompts, rows, strict=True):
        logits = forward(prompt + new)[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(new)[:, None], axis=1)[:, 0]
        assert (chosen >= logits.max(axis=1) - 1e-4).all()
