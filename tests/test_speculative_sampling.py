"""Speculative sampling keeps the target's distribution, whatever the drafts are: χ² tests, by formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.generate.decode import new_rows
from rlx_jax.generate.drafters import PromptLookup
from rlx_jax.generate.speculative import DRAFT_KEY, Drafts, VerifyLoop
from rlx_jax.generate.token_history import initial_history
from tests.divided import RING_VOCAB as VOCAB
from tests.divided import windowed

RNG = np.random.default_rng(5)


def limit(freedom: int, z: float = 3.7) -> float:
    """What χ² stays under but for one time in ten thousand: Wilson and Hilferty's approximation."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + z * np.sqrt(part)) ** 3)


def chi_squared(counts: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """The statistic of counts against probabilities, and its limit; cells that are expected are counted, rare ones as
    one."""
    assert counts[p == 0].sum() == 0
    expected, counts = (counts.sum() * p)[p > 0], counts[p > 0]
    if (rare := expected < 5).any():
        expected, counts = (np.append(x[~rare], x[rare].sum()) for x in (expected, counts))
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum()), limit(len(expected) - 1)


def filtered(logits: np.ndarray, sampler: rlx.Sampler) -> np.ndarray:
    """The probabilities of a sampler with temperature, top_k and top_p, from its definition."""
    z = logits.astype(np.float64) / sampler.temperature
    if sampler.top_k is not None:
        z = np.where(z >= np.sort(z)[-sampler.top_k], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    if sampler.top_p is not None:
        order = np.argsort(-p)
        kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), sampler.top_p)]
        p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    return p / p.sum()


SAMPLERS = [rlx.Sampler(temperature=0.8), rlx.Sampler(temperature=1.3, top_k=5, top_p=0.9)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["temperature", "filters"])
def test_judged_tokens_have_the_targets_distribution(sampler: rlx.Sampler) -> None:
    """Of two drafts a row, at all three places: the first, one behind a draft that was kept, and the one for free."""
    vocab, k, rows = 7, 2, 20_000
    p, q = RNG.normal(0, 1.5, (k + 1, vocab)), RNG.normal(0, 1.5, (k, vocab))
    wanted, drafting = ([filtered(row, sampler) for row in x] for x in (p, q))
    loop = VerifyLoop(sampler.sampling_steps(vocab), "ids", 1, PromptLookup(k))
    history = initial_history(loop.sampling_steps, [()] * rows, vocab, 0)
    state = new_rows(True, jax.random.key(3), jnp.ones(rows, bool), jnp.int32(10), history)

    @jax.jit
    def judged(state: Any) -> Any:
        scaled = jnp.log(jnp.asarray(np.stack(drafting), jnp.float32))
        keys = loop.token_keys(state, k).reshape(rows, k)
        drawn = jax.vmap(
            jax.vmap(lambda key, z: jax.random.categorical(jax.random.fold_in(key, DRAFT_KEY), z), (0, 0)), (0, None)
        )
        ids = drawn(keys, scaled).astype(jnp.int32)
        drafts = Drafts(ids, jnp.full(rows, k, jnp.int32), jnp.broadcast_to(scaled, (rows, k, vocab)))
        logits = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (rows, k + 1, vocab))
        found = loop.verify_drafts(logits, state, drafts, sampler.values(vocab), jnp.zeros(vocab, bool))
        return ids, found.ids, found.is_emitted, found.is_accepted

    ids, chosen, now, kept = map(np.asarray, judged(state))
    assert now[:, 0].all() and (now[:, 1:] == kept[:, :-1]).all()
    for place in range(k + 1):
        counts = np.bincount(chosen[now[:, place], place], minlength=vocab)
        statistic, most = chi_squared(counts, wanted[place])
        assert statistic < most
        if place < k:  # kept as often as can be: 1 less half the distance of the distributions
            often = np.minimum(wanted[place], drafting[place]).sum()
            share = kept[now[:, place], place].mean()
            assert abs(share - often) < 4 * np.sqrt(often * (1 - often) / now[:, place].sum())
            drafted = np.bincount(ids[:, place], minlength=vocab) / rows
            assert abs(drafted - wanted[place]).max() > 0.05  # drafts alone would be found out


@pytest.mark.slow
def test_generated_texts_have_the_targets_distribution() -> None:
    """Texts of three tokens, of which the second is drafted by another model, against the probabilities of the logits.

    About two drafts in three are kept. Were what follows a refused one drawn from the target as it is, χ² would be
    hundreds.
    """
    prompt = [1, 2, 3]
    flow, weights = windowed(3)
    # With few prompt sizes there is little to compute beside the tokens.
    profile = rlx.CompileProfile().replace(buckets={"prompt": [len(prompt)], "context": [16]})
    lm: Any = rlx.CausalLM(flow, weights, profile=profile)
    noise = np.random.default_rng(5)
    other = {k: v + noise.normal(0, 0.05 * (v.ndim > 1), v.shape).astype("f4") for k, v in weights.items()}
    drafts = rlx.CausalLM(replace(flow, name="drafts"), other, profile=profile)
    sampler, rows = rlx.Sampler(temperature=0.9, top_k=3), 5_000
    counts = np.zeros((VOCAB,) * 3)
    got = lm.generate([prompt] * rows, 3, sampler=sampler, seed=0, speculative=drafts, draft_tokens=2)
    np.add.at(counts, tuple(np.array(got).T), 1)
    accepted = lm.report().speculative.accepted
    p = np.zeros(counts.shape)
    first = filtered(np.asarray(lm.logits([prompt]))[0, -1], sampler)
    for a in np.flatnonzero(first):
        second = filtered(np.asarray(lm.logits([[*prompt, a]]))[0, -1], sampler)
        for b in np.flatnonzero(second):
            p[a, b] = first[a] * second[b] * filtered(np.asarray(lm.logits([[*prompt, a, b]]))[0, -1], sampler)
    statistic, most = chi_squared(counts.ravel(), p.ravel())
    assert statistic < most
    assert 0.5 < accepted / rows < 0.8
