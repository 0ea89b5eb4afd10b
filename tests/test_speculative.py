"""Speculative decoding: the tokens are those of plain decoding, and how many steps it took is counted."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.decode import initial_history, new_rows
from rlx_jax.generate.drafters import LONGEST_NGRAM, PromptLookup, find_ngram, make_drafter
from rlx_jax.generate.speculative import DRAFT_KEY, Drafts, VerifyLoop
from rlx_jax.text.tokenizer import load_tokenizer
from tests import test_cross_attention, test_mesh, test_recurrent
from tests.divided import RING_VOCAB as VOCAB
from tests.divided import windowed
from tests.oracles.checkpoints import FIXTURES
from tests.test_derive import head, tokens_flow

WINDOW = 5
BUCKETS = {"prompt": [16], "batch": [3], "context": [96]}
RNG = np.random.default_rng(7)
PROMPTS: list[list[int]] = [RNG.integers(0, VOCAB, n).tolist() for n in (9, 3, 14)]


@functools.cache
def rings() -> Any:
    """A layer with a ring and one with a whole cache, in programs of one size."""
    return rlx.CausalLM(*windowed(WINDOW), profile=rlx.CompileProfile().replace(buckets=BUCKETS))


def test_the_place_of_an_end() -> None:
    """Against a search by hand: the longest common end, of several the latest."""
    rng = np.random.default_rng(1)
    texts = rng.integers(0, 3, (40, 24)).astype(np.int32)
    texts[0] = np.arange(24)  # no token comes twice
    last = rng.integers(0, 24, 40).astype(np.int32)
    places, found = find_ngram(jnp.asarray(texts), jnp.asarray(last))
    for text, end, place, any_ in zip(texts, last, np.asarray(places), np.asarray(found), strict=True):
        alike = [(common_end(text[: i + 1], text[: end + 1]), i) for i in range(end)]
        best = max(alike, default=(0, 0))
        assert (best[0] > 0) == any_
        assert place == (best[1] if any_ else 0)


def common_end(one: np.ndarray, other: np.ndarray) -> int:
    """How many last tokens two texts share, as far as is looked."""
    n = 0
    while n < min(len(one), len(other), LONGEST_NGRAM) and one[-1 - n] == other[-1 - n]:
        n += 1
    return n


SAMPLERS = [rlx.Sampler(), rlx.Sampler(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1)]


@pytest.mark.parametrize(
    "sampler", [pytest.param(SAMPLERS[0], id="greedy"), pytest.param(SAMPLERS[1], marks=pytest.mark.slow, id="drawn")]
)
def test_drafts_of_the_prompt_change_no_token(sampler: rlx.Sampler) -> None:
    """A ragged batch over rings and a whole cache; of certain drafts a drawn row has the same draws, too. The stream is
    the same: several ids may come of one step."""
    lm = rings()
    want = lm.generate(PROMPTS, max_new_tokens=50, sampler=sampler, seed=3)
    got = lm.generate(PROMPTS, max_new_tokens=50, sampler=sampler, seed=3, speculative="prompt")
    assert got == want
    counts = lm.report().speculative
    assert 0 < counts.accepted < counts.drafted
    assert counts.steps < 50  # a step gives each row one token at least
    assert "drafts accepted" in str(lm.report())
    one = lm.generate(PROMPTS[0], max_new_tokens=20, sampler=sampler, seed=3)
    assert [*lm.stream(PROMPTS[0], 20, sampler, seed=3, speculative="prompt")] == one


def stacked_means(count: int) -> tuple[rlx.ModelFlow, dict[str, np.ndarray]]:
    """Layers that are alike, each with a state."""
    layers = rlx.blocks.Repeat(count, lambda i: rlx.blocks.Custom(test_recurrent.mean))
    return head(tokens_flow().stage(layers)), test_recurrent.weights_of("mean")


@pytest.mark.parametrize(
    ("flow", "roll"),
    [
        ((test_recurrent.flow_of("fast", "rnn"), test_recurrent.weights_of("fast", "rnn")), "unroll"),
        pytest.param(stacked_means(3), "scan", marks=pytest.mark.slow),
    ],
    ids=["steps", "scan"],
)
def test_states_of_steps_are_taken_back(flow: Any, roll: str) -> None:
    """A state that every token changes is that after the tokens which were taken, whatever was read behind them."""
    lm: Any = rlx.CausalLM(*flow, profile=rlx.CompileProfile().replace(layers={"roll": roll}))
    want = lm.generate([[3, 1, 4, 1, 3, 1], [5, 2]], max_new_tokens=30)
    assert lm.generate([[3, 1, 4, 1, 3, 1], [5, 2]], max_new_tokens=30, speculative="prompt") == want
    assert 0 < lm.report().speculative.accepted < lm.report().speculative.drafted


def test_rows_end_as_in_plain_decoding() -> None:
    """At ids that stop them and at their budget, some within the drafts that a step takes; nothing more is compiled."""
    lm = rings()
    whole = lm.generate(PROMPTS, max_new_tokens=50, speculative="prompt")
    lm.generate(PROMPTS, max_new_tokens=50)
    compiled = lm.report().compiles
    for stop in sorted({*whole[0][10:14], *whole[1][::9]}):
        for budget in (1, 2, 7, 50):
            want = lm.generate(PROMPTS, max_new_tokens=budget, stop=[stop])
            got = lm.generate(PROMPTS, max_new_tokens=budget, stop=[stop], speculative="prompt")
            assert got == want
            assert got == [cut(row[:budget], stop) for row in whole]
    assert lm.report().compiles == compiled


def cut(row: list[int], stop: int) -> list[int]:
    return row[: row.index(stop) + 1] if stop in row else row


@pytest.mark.slow
def test_drafts_of_requests_of_other_sizes() -> None:
    """No array of the state has slots for all tokens, and the text that drafts come of has."""
    lm: Any = rlx.CausalLM(*windowed(3, everywhere=True))
    for count in (20, 60):
        prompt = [[5, 7, 5, 7] * (count // 4)]
        assert lm.generate(prompt, 8, speculative="prompt") == lm.generate(prompt, 8)


@functools.cache
def perturbed(share: float = 0.1) -> Any:
    """The model of `rings` with other weights, which says something else now and then."""
    flow, weights = windowed(WINDOW)
    rng = np.random.default_rng(1)
    noise = {key: v + rng.normal(0, share * (v.ndim > 1), v.shape).astype("f4") for key, v in weights.items()}
    profile = rlx.CompileProfile().replace(buckets=BUCKETS)
    return rlx.CausalLM(replace(flow, name="drafts"), noise, profile=profile)


@pytest.mark.slow
def test_drafts_of_another_model_change_no_token() -> None:
    """Its state is taken back alike, rings too. Drafts of the model itself are all kept."""
    lm = rings()
    want = lm.generate(PROMPTS, max_new_tokens=50)
    assert lm.generate(PROMPTS, max_new_tokens=50, speculative=perturbed()) == want
    counts = lm.report().speculative
    assert 0 < counts.accepted < counts.drafted and counts.steps < 50
    assert lm.generate(PROMPTS, max_new_tokens=50, speculative=lm, draft_tokens=5) == want
    counts = lm.report().speculative
    assert counts.accepted == counts.drafted and counts.steps == 9  # 49 tokens behind the first, 6 a step


def test_models_that_cannot_draft() -> None:
    """More than tokens to read, fewer positions than the request has."""
    flow, weights = windowed(WINDOW)
    lm: Any = rlx.CausalLM(flow, weights)
    short = rlx.CausalLM(replace(flow, name="short"), weights, max_positions=12)
    with pytest.raises(errors.SequenceLengthError, match=r"speculative: prompts\[0\].* 73 .*12"):
        lm.generate(PROMPTS[0], speculative=short)
    buckets = rlx.CompileProfile().replace(buckets={"prompt": [64], "batch": [1]})
    with pytest.raises(errors.RequestError, match="12 positions.*buckets.*64"):
        rlx.CausalLM(flow, weights, profile=buckets).generate(PROMPTS[1], max_new_tokens=2, speculative=short)
    seeing = test_cross_attention.lm()
    with pytest.raises(errors.RequestError, match="'image'.*'keep'"):
        seeing.generate(PROMPTS[1], inputs=ONE, speculative=seeing)


def test_other_tokenizers_cannot_draft() -> None:
    """Of as many tokens, with other ids."""
    lm = rings()
    own, other = (load_tokenizer(FIXTURES / name) for name in ("llama/gqa_tied_llama3_v5", "sentence/base"))
    ours = replace(lm._lm, tokenizer=own)
    assert make_drafter(ours, 3, ours) is not None
    with pytest.raises(errors.RequestError, match="their tokenizers assign other ids"):
        make_drafter(replace(ours, tokenizer=other), 3, ours)


@pytest.mark.slow
def test_the_program_by_itself() -> None:
    """Logits of all tokens; the state's length is what it was, and what is read after it is as if nothing had been."""
    flow, weights = windowed(WINDOW)
    verify: Any = rlx.compile(flow, weights, program="verify")
    state, lengths = verify.init_state(1, 16), np.array([3], np.int32)
    for tokens in ([[3, 1, 4]], [[1, 5, 9]]):
        logits, state = verify(tokens, lengths, state=state)
        np.testing.assert_allclose(logits, rings().logits(tokens), atol=2e-5)
        assert state.length.tolist() == [0]


ONE = {name: array[:1] for name, array in test_cross_attention.BESIDE.items()}


@pytest.mark.slow
def test_beside_what_a_request_brings() -> None:
    """What was computed of an image alone is read from the state, drafts or not."""
    lm = test_cross_attention.lm()
    want = lm.generate([[3, 1, 3, 1]], max_new_tokens=16, inputs=ONE)
    assert lm.generate([[3, 1, 3, 1]], max_new_tokens=16, inputs=ONE, speculative="prompt") == want


@pytest.mark.slow
def test_warmed_up() -> None:
    """Behind it nothing compiles and nothing goes to the device unasked."""
    flow, weights = windowed(WINDOW)
    tables = {"prompt": [16], "batch": [3], "context": [64], "on_recompile": "error"}
    lm = rlx.CausalLM(flow, weights, profile=rlx.CompileProfile().replace(buckets=tables))
    lm.warmup(samplers=rlx.Sampler(), speculative="prompt", draft_tokens=3)
    want = rings().generate(PROMPTS, max_new_tokens=40)
    compiled = lm.report().compiles
    with jax.transfer_guard("disallow"):
        assert lm.generate(PROMPTS, max_new_tokens=40, speculative="prompt", draft_tokens=3) == want
        assert lm.generate(PROMPTS[:2], max_new_tokens=40) == want[:2]
    assert (lm.report().compiles, lm.report().recompiles) == (compiled, 0)
    with pytest.raises(errors.RequestError, match="draft_tokens=3.*draft_tokens=4"):
        lm.generate(PROMPTS, max_new_tokens=40, speculative="prompt", draft_tokens=4)


@pytest.mark.slow
def test_drafts_over_a_mesh() -> None:
    """The tokens of one device, rings too."""
    ours: Any = test_mesh.lm("mistral", "data tensor", 4)
    assert ours.generate(test_mesh.PROMPTS[:3], 12, speculative="prompt") == test_mesh.greedy("mistral")
    assert ours.report().speculative.drafted > 0


def test_models_on_other_devices_cannot_draft() -> None:
    """One on one device and one over several; the error says where each is."""
    one, many = (test_mesh.lm("llama", *place)._lm for place in ((), ("data tensor", 4)))
    with pytest.raises(errors.UnsupportedError, match="one device and a mesh of data 2 × tensor 2"):
        make_drafter(one, 3, many)
    with pytest.raises(errors.UnsupportedError, match="a mesh of data 2 × tensor 2 and one device"):
        make_drafter(many, 3, one)
    assert make_drafter(many, 3, many) is not None


def test_a_ring_has_the_size_of_its_window() -> None:
    """And never more slots than the context."""
    flow, weights = windowed(5)
    extend: Any = rlx.compile(flow, weights, program="extend")
    for context, ring in ((24, 5), (4, 4)):
        shapes = {name: a.shape for name, a in extend.init_state(2, context).leaves.items()}
        assert {s[1] for name, s in shapes.items() if name.startswith("layers.1")} == {context}
        assert {s[1] for name, s in shapes.items() if not name.startswith("layers.1")} == {ring}


LOGITS_RNG = np.random.default_rng(5)


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


JUDGED = [rlx.Sampler(temperature=0.8), rlx.Sampler(temperature=1.3, top_k=5, top_p=0.9)]


@pytest.mark.parametrize(
    "sampler",
    [pytest.param(JUDGED[0], marks=pytest.mark.slow, id="temperature"), pytest.param(JUDGED[1], id="filters")],
)
def test_judged_tokens_have_the_targets_distribution(sampler: rlx.Sampler) -> None:
    """Of two drafts a row, at all three places: the first, one behind a draft that was kept, and the one for free."""
    vocab, k, rows = 7, 2, 20_000
    p, q = LOGITS_RNG.normal(0, 1.5, (k + 1, vocab)), LOGITS_RNG.normal(0, 1.5, (k, vocab))
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
