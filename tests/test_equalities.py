"""What must not matter, on five archetypes: who shares the batch, padding, where a prompt is cut, rings or full caches,
scanned or unrolled layers. Every comparison is with the forward program over the whole sequence."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from tests import divided
from tests.divided import V
from tests.oracles.comparing import assert_close

ROWS, WIDTH, CHUNK, SLOTS = 3, 12, 4, 16
ARCHETYPES = {"grouped heads": "llama", "a window and softcaps": "gemma2", "recurrent": "qwen35", "experts": "mixtral"}
OTHERS = {"sinks": "gpt_oss", "learned positions": "gpt2", "a window": "mistral", "a state": "mamba2"}
LARGER = ("recurrent", "experts")
"""Programs that take long to compile: all equalities are in the slow tier."""
REPEATED = ("grouped heads", "experts", "a window", "a state")
"""Some have windows of 5 tokens, so that their rings are shorter than prompts."""
TOLERANCE = 5e-5

row = st.lists(st.integers(0, V - 1), min_size=WIDTH, max_size=WIDTH)
batch = st.tuples(*[row] * ROWS).map(np.array)
counts = st.tuples(*[st.integers(1, WIDTH)] * ROWS).map(np.array)
cuts = st.lists(st.tuples(*[st.integers(0, CHUNK)] * ROWS).map(np.array), min_size=2, max_size=4)


@functools.cache
def lm(kind: str, roll: str = "unroll", prompt: int | None = None) -> Any:
    """`prompt`: the one bucket for prompts."""
    profile = rlx.CompileProfile().replace(layers={"roll": roll}, buckets={"prompt": [prompt] if prompt else []})
    family = (ARCHETYPES | OTHERS)[kind]
    return rlx.CausalLM(divided.recipe(family), divided.weights(family), profile=profile)


def forward(kind: str, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position."""
    return np.asarray(lm(kind).logits(tokens))


def close(got: Any, want: np.ndarray) -> None:
    assert np.abs(np.asarray(got) - want).max(initial=0) <= TOLERANCE * max(1.0, np.abs(want).max(initial=0))


def padding_does_not_matter(kind: str, tokens: np.ndarray, lengths: np.ndarray, noise: np.ndarray) -> None:
    """Alone = in a batch; padded on the left = on the right, with whatever ids."""
    keep = np.arange(WIDTH)[None] < lengths[:, None]
    right = np.where(keep, tokens, noise)
    left = np.stack([np.roll(r, WIDTH - n) for r, n in zip(right, lengths, strict=True)])
    want = forward(kind, right)
    got = np.asarray(lm(kind).logits(left, attention_mask=keep[:, ::-1]))
    for i, n in enumerate(lengths):
        close(got[i, WIDTH - n :], want[i, :n])
        close(forward(kind, tokens[[i] * ROWS])[0, :n], want[i, :n])


def cuts_do_not_matter(kind: str, tokens: np.ndarray, steps: list[np.ndarray], roll: str) -> None:
    """prefill(n) + extend(m) + … = forward(n + m + …), rows cut at places of their own; a row may wait."""
    want, at, state = forward(kind, tokens), np.zeros(ROWS, int), None
    for step in steps:
        new = np.minimum(step, WIDTH - at) if state is not None else np.maximum(step, 1)
        block = np.stack([np.resize(tokens[i, at[i] : at[i] + new[i]] if new[i] else [0], CHUNK) for i in range(ROWS)])
        if state is None:
            logits, state = lm(kind, roll).prefill(block, new, max_len=SLOTS)
        else:
            logits, state = lm(kind, roll).extend(state, block, new)
        for i in range(ROWS):
            close(np.asarray(logits)[i, : new[i]], want[i, at[i] : at[i] + new[i]])
        at = at + new


def greedy_is_the_argmax(kind: str, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Each new token has the largest logit of the forward program over all tokens before it."""
    ends = [WIDTH - 5, *lengths[1:]]  # one size of programs
    prompts = [r[: min(n, WIDTH - 5)].tolist() for r, n in zip(tokens, ends, strict=True)]
    rows = lm(kind).generate(prompts, max_new_tokens=5)
    whole = [p + new for p, new in zip(prompts, rows, strict=True)]
    logits = forward(kind, np.array([r + [0] * (WIDTH - len(r)) for r in whole]))
    for i, prompt in enumerate(prompts):
        for n, token in enumerate(rows[i]):
            now = logits[i, len(prompt) + n - 1]
            assert now[token] >= now.max() - TOLERANCE * np.abs(now).max()


def chunks_do_not_matter(kind: str, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Prompts read in chunks, which are longer than the rings, give the tokens of prompts read at once."""
    prompts = [r[:n].tolist() for r, n in zip(tokens, lengths, strict=True)]
    assert lm(kind, prompt=CHUNK).generate(prompts, max_new_tokens=5) == lm(kind).generate(prompts, max_new_tokens=5)


Case = tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]
case = st.tuples(batch, counts, batch, cuts)
few, many = settings(max_examples=2, deadline=None), settings(max_examples=6, deadline=None)


@pytest.mark.parametrize("kind", [kind for kind in ARCHETYPES if kind not in LARGER])
@few
@given(case=case)
def test_a_decoder(kind: str, case: Case) -> None:
    """One model of each archetype, in few programs."""
    tokens, lengths, noise, steps = case
    padding_does_not_matter(kind, tokens, lengths, noise)
    cuts_do_not_matter(kind, tokens, steps, "unroll")
    greedy_is_the_argmax(kind, tokens, lengths)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHETYPES),
     *(pytest.param(kind, marks=pytest.mark.soak) for kind in OTHERS)],
)  # fmt: skip
@many
@given(case=case)
def test_a_decoder_often(kind: str, case: Case) -> None:
    """With chunks of prompts and, where layers repeat, scanned layers; in a soak four families more."""
    tokens, lengths, noise, steps = case
    cuts_do_not_matter(kind, tokens, steps, "scan" if kind in REPEATED else "unroll")
    if kind in ARCHETYPES:
        padding_does_not_matter(kind, tokens, lengths, noise)
        chunks_do_not_matter(kind, tokens, lengths)
    if kind in LARGER:
        greedy_is_the_argmax(kind, tokens, lengths)


@settings(max_examples=3, deadline=None)
@given(tokens=batch, lengths=counts)
def test_an_encoder(tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Texts alone, together, in another order and in buckets: the same vectors."""
    texts = [r[:n].tolist() for r, n in zip(tokens, lengths, strict=True)]
    want = np.concatenate([encoder().embed([text]) for text in texts])
    for one in (encoder(), encoder(padded=True)):
        assert_close(one.embed(texts), want)
        assert_close(one.embed(texts[::-1])[::-1], want)


@functools.cache
def encoder(padded: bool = False) -> Any:
    buckets = {"prompt": [4, 16], "batch": [4]} if padded else {}
    profile = rlx.CompileProfile().replace(buckets=buckets)
    return rlx.Encoder(divided.recipe("bert"), divided.weights("bert"), profile=profile)
