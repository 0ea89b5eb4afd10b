"""Requests behind a state that is there already, and prompts that share their beginning."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from tests import divided

SHARED = [3, 1, 4, 1, 5, 9]
ENDS = [[2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [11]]
PROMPTS = [SHARED + end for end in ENDS]
NEW = 7
DRAWN = rlx.Sampler(0.9, top_k=25, repetition_penalty=1.4)
FAMILIES = ["mistral", pytest.param("qwen35", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request: pytest.FixtureRequest) -> Any:
    """A model of a family, with programs of 6 rows that read up to 4 tokens."""
    profile = rlx.CompileProfile().replace(buckets={"batch": [6], "prompt": [4], "context": [32]})
    return rlx.CausalLM(divided.recipe(request.param), divided.weights(request.param), profile=profile)


def counts(lm: Any) -> tuple[int, int]:
    """Tokens that were read for the last request, and those that were not."""
    report = lm.report().request
    assert report.prompt_tokens == report.read_tokens + report.cached_tokens
    return report.read_tokens, report.cached_tokens


@pytest.mark.slow
def test_behind_a_state(lm: Any) -> None:
    """One row for all prompts, or a row for each, ragged: tokens, draws and answers are those of whole prompts. The
    state is as it was."""
    whole, every = lm.generate(PROMPTS, NEW), sum(map(len, PROMPTS))
    drawn = lm.generate(PROMPTS, NEW, DRAWN, seed=7, n=2)
    _, one = lm.prefill([SHARED])
    block, lengths = np.zeros((3, 4), int), np.array([4, 2, 3])
    for row, count in enumerate(lengths):
        block[row, :count] = SHARED[:count]
    _, many = lm.prefill(block, lengths)
    _, many = lm.extend(many, [[SHARED[n]] for n in lengths])
    rests = [prompt[n + 1 :] for prompt, n in zip(PROMPTS, lengths, strict=True)]
    for state, prompts, held in ((one, ENDS, 3 * len(SHARED)), (many, rests, int(lengths.sum()) + 3)):
        before = state.ids
        assert lm.generate(prompts, NEW, state=state) == whole
        assert counts(lm) == (every - held, held)
        assert lm.generate(prompts, NEW, DRAWN, seed=7, n=2, state=state) == drawn
        if "qwen35" in repr(lm):  # in the slow tests
            assert lm.generate(prompts, NEW, speculative="prompt", draft_tokens=3, state=state) == whole
        assert state.ids == before
    assert many.ids == [SHARED[: n + 1] for n in lengths] and one.copy().ids == [SHARED]
    assert list(lm.stream(ENDS[1], NEW, state=one)) == whole[1]
    logits, _ = lm.extend(one, [ENDS[0]], logits="last")
    assert int(np.argmax(logits[0])) == whole[0][0]
    with pytest.raises(errors.SessionStateError, match="consumed"):
        lm.generate([[1]], NEW, state=one)


def test_a_shared_beginning_is_read_once(lm: Any) -> None:
    """It is repeated for the rows, whatever they go on with; without one nothing changes."""
    every = sum(map(len, PROMPTS))
    drawn = [{"sampler": DRAWN, "seed": 7, "n": 2}] if "qwen35" in repr(lm) else []  # in the slow tests
    for options in ({}, *drawn):
        assert lm.generate(PROMPTS, NEW, share_prefix=True, **options) == lm.generate(PROMPTS, NEW, **options)
        assert counts(lm) == (every, 0)
    lm.generate(PROMPTS, NEW, share_prefix=True)
    assert counts(lm) == (every - 2 * len(SHARED), 2 * len(SHARED))
    alike = [SHARED, SHARED, SHARED[:3]]  # the last token of each is read
    assert lm.generate(alike, NEW, share_prefix=True) == lm.generate(alike, NEW)
    lm.generate(alike, NEW, share_prefix=True)
    assert counts(lm) == (len(SHARED) * 2 + 3 - 4, 4)
    apart = [[1, 2], [2, 2]]
    assert lm.generate(apart, NEW, share_prefix=True) == lm.generate(apart, NEW)
    assert lm.generate([], NEW, share_prefix=True) == []


@pytest.mark.slow
def test_a_cache_that_only_a_side_output_reads() -> None:
    """What no wanted output reads keeps no state, whichever program was made first."""
    rng = np.random.default_rng(0)

    def body(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
        with emit.scope("probe"):
            emit.output("probe", emit.attention(x, x, x, heads=2, causal=True))
        return x + emit.attention(x, x, x, heads=2, causal=True)

    flow = rlx.ModelFlow("f").input("tokens", ("batch", "seq"), "int32").embed("e").custom(body).linear("h")
    weights = {key: rng.normal(size=(32, 8)).astype("f4") for key in "eh"}
    whole = rlx.CausalLM(flow, weights).generate([[4, 5, 6, 1, 2]], 3)
    lm: Any = rlx.CausalLM(flow, weights)
    _, state = lm.prefill([[4, 5, 6]])
    with pytest.raises(errors.TokenIdError):
        lm.generate([[99]], 3, state=state)  # which leaves the state
    assert lm.generate([[1, 2]], 3, state=state) == whole == lm.generate([[4, 5, 6, 1, 2]], 3)
    every = lm.model.as_program("prefill")
    outputs, _ = every(np.array([[4, 5, 6]], np.int32), lengths=np.array([3]), state=every.init_state(1, 8))
    assert sorted(outputs) == sorted(lm.model.output_names)
