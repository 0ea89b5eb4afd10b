"""Several answers to a prompt, and log-probabilities of new tokens, against float64 and against plain requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from tests.oracles import checkpoints, numpy_reference
from tests.oracles.numpy_reference import Weights

TIED = checkpoints.FIXTURES / "llama" / "gqa_tied_llama3_v5"
SAMPLER = rlx.Sampler(0.8, top_k=30, repetition_penalty=1.3, logit_bias={7: 2.0, 9: -np.inf})
PROMPTS = [[5, 6, 7, 8, 9], [11]]


@pytest.fixture(scope="module")
def lm() -> Any:
    """Programs of 2 and of 6 rows, so that few are compiled."""
    buckets = {"batch": [2, 6], "prompt": [16], "context": [64]}
    return rlx.load(TIED, profile=rlx.CompileProfile().replace(buckets=buckets))


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Any], Weights]:
    """The checkpoint for the reference."""
    return numpy_reference.read_config(TIED), numpy_reference.read_weights(TIED)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    x = logits - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check(prompt: Sequence[int], answer: rlx.Completion, k: int, reference: tuple[dict[str, Any], Weights]) -> None:
    """What is told is the log-softmax of the bare logits, in float64."""
    ids = [*prompt, *answer.tokens]
    found = log_softmax(numpy_reference.llama_row(*reference, ids)[1])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(answer.token_logprobs, found[np.arange(len(answer.tokens)), answer.tokens], atol=3e-5)
    assert len(answer.top) == len(answer.tokens) and all(len(pairs) == k for pairs in answer.top)
    best = np.argsort(-found, axis=-1, kind="stable")[:, :k]
    told = np.array([[p for _, p in pairs] for pairs in answer.top]).reshape(len(answer.tokens), k)
    np.testing.assert_allclose(told, np.take_along_axis(found, best, axis=-1), atol=3e-5)
    assert [[i for i, _ in pairs] for pairs in answer.top] == best.tolist()


def test_log_probabilities_are_those_before_the_sampler(lm: Any, reference: Any) -> None:
    """Temperature, filters, penalty and bias change what is chosen, and not what is told of it."""
    answers = lm.generate(PROMPTS, max_new_tokens=9, sampler=SAMPLER, seed=3, n=3, logprobs=3)
    assert [len(of_prompt) for of_prompt in answers] == [3, 3]
    for prompt, of_prompt in zip(PROMPTS, answers, strict=True):
        assert len({answer.tokens for answer in of_prompt}) == 3
        for answer in of_prompt:
            check(prompt, answer, 3, reference)
            assert answer.text is None and 9 not in answer.tokens
    assert any(pairs[0][0] != i for a in answers[0] for i, pairs in zip(a.tokens, a.top, strict=True))


def test_answers_are_rows_and_the_prompt_is_read_once(lm: Any) -> None:
    """n answers are those of n rows with the same prompt; the program that reads one prompt has the fewest rows."""
    answers = lm.generate(PROMPTS[0], max_new_tokens=9, sampler=SAMPLER, seed=3, n=3, logprobs=1)
    read = {k for k in lm.model.programs.executables if k.program == "prefill"}
    assert {dict(k.binding)["batch"] for k in read} == {2}
    rows = lm.generate([PROMPTS[0]] * 3, max_new_tokens=9, sampler=SAMPLER, seed=3, logprobs=1)
    assert [a.tokens for a in answers] == [a.tokens for a in rows]
    np.testing.assert_allclose([a.token_logprobs for a in answers], [a.token_logprobs for a in rows], atol=1e-5)
    ready = len(lm.model.programs.executables)
    lm.generate(PROMPTS, max_new_tokens=4, sampler=rlx.Sampler(1.0, top_p=0.5), n=2, logprobs=5)  # the same programs
    lm.generate([1, 2], max_new_tokens=7, sampler=rlx.Sampler(0.3, top_k=2), n=6, logprobs=8)
    assert len(lm.model.programs.executables) == ready


def test_ends_and_strings(lm: Any) -> None:
    """An end token is the last that is told of; a stop string cuts the text, and the tokens behind those it takes."""
    sampler = rlx.Sampler(1.0, top_k=60)

    def ask(**stop: Any) -> Any:
        return lm.generate("The sky is", max_new_tokens=12, sampler=sampler, seed=1, n=3, logprobs=2, **stop)[0]

    long = ask()
    assert long.text == lm.tokenizer.decode(long.tokens) and len(long.tokens) == len(long.token_logprobs) == 12
    end = next(at for at, i in enumerate(long.tokens) if at > 3 and i not in long.tokens[:at])
    short = ask(stop=long.tokens[end])
    assert short.tokens == long.tokens[: end + 1] and short.token_logprobs == long.token_logprobs[: end + 1]
    word = long.text[4:7]
    cut = ask(stop=word)
    assert cut.text == long.text[: long.text.index(word)]
    assert len(cut.tokens) == len(cut.token_logprobs) == len(cut.top) < 12
    assert cut.tokens == long.tokens[: len(cut.tokens)]
    nothing = lm.generate("The sky is", max_new_tokens=0, sampler=sampler, n=2, logprobs=2)
    assert nothing == [rlx.Completion("", (), (), ())] * 2


@pytest.mark.slow
def test_warm_up() -> None:
    """Then nothing compiles, whatever prompts there are, answers and tokens to tell of; without it the first is one."""
    buckets = {"batch": [1, 4], "prompt": [4], "context": [16], "on_recompile": "error"}
    lm = rlx.load(TIED, profile=rlx.CompileProfile().replace(buckets=buckets))
    sampler = rlx.Sampler(1.0)
    lm.warmup(samplers=sampler)
    with pytest.raises(errors.RequestError):
        lm.generate([5], 4, sampler, logprobs=1)
    lm.warmup(samplers=sampler, n=4, logprobs=8)
    for prompts, n, k in ((1, 4, 8), (2, 2, 1), (1, 1, None), (2, 1, 3)):
        with jax.transfer_guard("disallow"):
            answers = lm.generate([[5, 6, 7]] * prompts, 4, sampler, n=n, logprobs=k)
        assert [len(of_prompt) for of_prompt in answers] == [n] * prompts
    assert lm.report().recompiles == 0
