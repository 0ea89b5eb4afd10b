"""What must not matter: who shares the batch, padding, where a prompt is cut, rings or full caches, scanned or unrolled
layers. Every comparison is with the forward program, over the whole sequence and under the window's mask."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from tests.test_ring import VOCAB, windowed

ROWS, WIDTH, CHUNK, SLOTS = 3, 12, 4, 16
WINDOW = 3  # of two layers, so that their rings are shorter than a chunk
TOLERANCE = 2e-5

row = st.lists(st.integers(0, VOCAB - 1), min_size=WIDTH, max_size=WIDTH)
batch = st.tuples(*[row] * ROWS).map(np.array)
counts = st.tuples(*[st.integers(1, WIDTH)] * ROWS).map(np.array)
cuts = st.lists(st.tuples(*[st.integers(0, CHUNK)] * ROWS).map(np.array), min_size=2, max_size=4)


@functools.cache
def lm(roll: str = "unroll", prompt: int | None = None) -> Any:
    """Two layers in a window and one that sees all. `prompt`: the one bucket for prompts."""
    flow, weights = windowed(WINDOW)
    profile = rlx.CompileProfile().replace(layers={"roll": roll}, buckets={"prompt": [prompt] if prompt else []})
    return rlx.CausalLM(flow, weights, profile=profile)


def forward(tokens: np.ndarray) -> np.ndarray:
    """Logits of every position."""
    return np.asarray(lm().logits(tokens))


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


# -- the equalities ----------------------------------------------------------------------------


def padding_does_not_matter(tokens: np.ndarray, lengths: np.ndarray, noise: np.ndarray) -> None:
    """Alone = in a batch; padded on the left = on the right, with whatever ids."""
    keep = np.arange(WIDTH)[None] < lengths[:, None]
    right = np.where(keep, tokens, noise)
    left = np.stack([np.roll(r, WIDTH - n) for r, n in zip(right, lengths, strict=True)])
    want = forward(right)
    got = np.asarray(lm().logits(left, attention_mask=keep[:, ::-1]))
    for i, n in enumerate(lengths):
        close(got[i, WIDTH - n :], want[i, :n])
        close(forward(tokens[[i] * ROWS])[0, :n], want[i, :n])


def cuts_do_not_matter(tokens: np.ndarray, steps: list[np.ndarray], roll: str) -> None:
    """prefill(n) + extend(m) + … = forward(n + m + …), rows cut at places of their own; a row may wait."""
    want, at, state = forward(tokens), np.zeros(ROWS, int), None
    for step in steps:
        new = np.minimum(step, WIDTH - at) if state is not None else np.maximum(step, 1)
        block = np.stack([np.resize(tokens[i, at[i] : at[i] + new[i]] if new[i] else [0], CHUNK) for i in range(ROWS)])
        if state is None:
            logits, state = lm(roll).prefill(block, new, max_len=SLOTS)
        else:
            logits, state = lm(roll).extend(state, block, new)
        for i in range(ROWS):
            close(np.asarray(logits)[i, : new[i]], want[i, at[i] : at[i] + new[i]])
        at = at + new


def greedy_is_the_argmax(tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Each new token has the largest logit of the forward program over all tokens before it."""
    prompts = [r[: min(n, WIDTH - 5)].tolist() for r, n in zip(tokens, lengths, strict=True)]
    rows = lm().generate(prompts, max_new_tokens=5)
    whole = [p + new for p, new in zip(prompts, rows, strict=True)]
    logits = forward(np.array([r + [0] * (WIDTH - len(r)) for r in whole]))
    for i, prompt in enumerate(prompts):
        for n, token in enumerate(rows[i]):
            now = logits[i, len(prompt) + n - 1]
            assert now[token] >= now.max() - TOLERANCE
    assert lm().generate([prompts[0]] * ROWS, max_new_tokens=5) == [rows[0]] * ROWS


def chunks_do_not_matter(tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Prompts read in chunks, which are longer than the rings, give the tokens of prompts read at once."""
    prompts = [r[:n].tolist() for r, n in zip(tokens, lengths, strict=True)]
    assert lm(prompt=CHUNK).generate(prompts, max_new_tokens=5) == lm().generate(prompts, max_new_tokens=5)


# -- a few examples, and many ------------------------------------------------------------------

few, many = settings(max_examples=4), settings(max_examples=40)
padded, cut, greedy = given(batch, counts, batch), given(batch, cuts, st.just("unroll")), given(batch, counts)

test_padding = few(padded(padding_does_not_matter))
test_cuts = few(cut(cuts_do_not_matter))
test_greedy = few(greedy(greedy_is_the_argmax))


test_padding_often = pytest.mark.slow(many(padded(padding_does_not_matter)))
test_cuts_often = pytest.mark.slow(many(cut(cuts_do_not_matter)))
test_greedy_often = pytest.mark.slow(many(greedy(greedy_is_the_argmax)))


test_chunks = pytest.mark.slow(many(greedy(chunks_do_not_matter)))
test_scanned = pytest.mark.slow(many(given(batch, cuts, st.just("scan"))(cuts_do_not_matter)))
