"""Speculative decoding: the tokens are those of plain decoding, and how many steps it took is counted."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.drafters import LONGEST_NGRAM, find_ngram, make_drafter
from rlx_jax.text.tokenizer import load_tokenizer
from tests import test_cross_attention, test_mesh, test_recurrent
from tests.divided import RING_VOCAB as VOCAB
from tests.divided import windowed
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.recorded import load_case
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
    "sampler",
    [pytest.param(SAMPLERS[0], id="greedy"), pytest.param(SAMPLERS[1], marks=pytest.mark.slow, id="drawn")],
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


def test_what_is_refused() -> None:
    """By name, before anything runs; `stream` likewise."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"speculative": "prompt", "draft_tokens": 0}, "draft_tokens is 0"),
        ({"speculative": "prompt", "draft_tokens": 65}, "at most 64"), ({"draft_tokens": 5}, "without speculative="),
    ]  # fmt: skip
    for options, told in wrong:
        for call in (rings().generate, rings().stream):
            with pytest.raises(errors.RequestError, match=told):
                call(PROMPTS[0], **options)


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
    """Other ids, more than tokens to read, fewer positions than the request has."""
    flow, weights = windowed(WINDOW)
    lm: Any = rlx.CausalLM(flow, weights)
    other = load_case(FIXTURES / "llama" / "gqa_plain_attnbias_v5").lm
    with pytest.raises(errors.RequestError, match=r"cannot draft for windows: it has \d+ tokens, expected 19"):
        lm.generate(PROMPTS[0], speculative=other)
    short = rlx.CausalLM(replace(flow, name="short"), weights, max_positions=12)
    with pytest.raises(errors.SequenceLengthError, match=r"speculative: prompts\[0\].* 73 positions.* has 12"):
        lm.generate(PROMPTS[0], speculative=short)
    buckets = rlx.CompileProfile().replace(buckets={"prompt": [64], "batch": [1]})
    with pytest.raises(errors.RequestError, match="it has 12 positions, and the buckets of windows go up to 64"):
        rlx.CausalLM(flow, weights, profile=buckets).generate(PROMPTS[1], max_new_tokens=2, speculative=short)
    seeing = test_cross_attention.lm()
    with pytest.raises(errors.RequestError, match="cannot draft for reader: it reads 'image', 'keep' in addition"):
        seeing.generate(PROMPTS[1], inputs=ONE, speculative=seeing)


@pytest.mark.slow
def test_a_source_that_knows_fewer_positions() -> None:
    """Its cache is no larger than what it knows, though that of the model alone would be."""
    flow, weights = windowed(WINDOW)
    short = rlx.CausalLM(replace(flow, name="short"), weights, max_positions=40)
    lm: Any = rlx.CausalLM(flow, weights)
    prompt = [3, 1, 4, 1, 5, 9]
    want = lm.generate(prompt, max_new_tokens=30)
    assert lm.generate(prompt, max_new_tokens=30, speculative=short) == want


def test_other_tokenizers_cannot_draft() -> None:
    """Of as many tokens, with other ids."""
    lm = rings()
    own, other = (load_tokenizer(FIXTURES / name) for name in ("llama/gqa_tied_llama3_v5", "sentence/base"))
    ours = replace(lm._lm, tokenizer=own)
    assert make_drafter(ours, 3, ours) is not None
    with pytest.raises(errors.RequestError, match="their tokenizers assign other ids to the same tokens"):
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
    with pytest.raises(errors.RequestError, match="warm-up was with draft_tokens=3, not draft_tokens=4"):
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
    with pytest.raises(errors.UnsupportedError, match="on one device and a mesh of data 2 × tensor 2; load both"):
        make_drafter(one, 3, many)
    with pytest.raises(errors.UnsupportedError, match="on a mesh of data 2 × tensor 2 and one device; load both"):
        make_drafter(many, 3, one)
    assert make_drafter(many, 3, many) is not None


@pytest.mark.slow
def test_rings_of_many_rows() -> None:
    """A chunk may copy a ring that it reads as it was."""
    flow, weights = windowed(3)
    lm: Any = rlx.CausalLM(flow, weights, profile=rlx.CompileProfile().replace(buckets={"prompt": [4]}))
    prompt, rows = [3, 1, 4, 1, 5, 9, 2], 800  # 75 KB of each ring, which are seen
    want = lm.generate([prompt], max_new_tokens=6)
    assert lm.generate([prompt] * rows, max_new_tokens=6) == want * rows


def test_a_ring_has_the_size_of_its_window() -> None:
    """And never more slots than the context."""
    flow, weights = windowed(5)
    extend: Any = rlx.compile(flow, weights, program="extend")
    for context, ring in ((24, 5), (4, 4)):
        shapes = {name: a.shape for name, a in extend.init_state(2, context).leaves.items()}
        assert {s[1] for name, s in shapes.items() if name.startswith("layers.1")} == {context}
        assert {s[1] for name, s in shapes.items() if not name.startswith("layers.1")} == {ring}
