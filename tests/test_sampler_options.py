"""Penalties by count, bans, ends of answers and functions of the user, against NumPy in float64 and transformers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from tests import divided
from tests.divided import V
from tests.oracles import hugging_face
from tests.test_generate import CHAT, PLAIN

PROMPTS = [[7, 3, 9], [5], [4, 8, 15, 16, 23, 42, 5, 5]]
BUDGET, END = 14, 12


@functools.cache
def lm() -> Any:
    return rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"), eos_ids=END)


def no_repeats(logits: Any, tokens: Any) -> Any:
    """Ban every token that the row has."""
    rows = jnp.arange(len(tokens))[:, None]
    return logits.at[rows, jnp.where(tokens < 0, logits.shape[1], tokens)].set(-jnp.inf, mode="drop")


def near_the_last(logits: Any, tokens: Any) -> Any:
    """Prefer ids near the last one of the row."""
    last = jnp.take_along_axis(tokens, (tokens >= 0).sum(axis=1, keepdims=True) - 1, axis=1)
    distance = jnp.abs(jnp.arange(logits.shape[1])[None] - last)
    return logits - 0.2 * distance.astype(jnp.float32)


WIDTH = max(map(len, PROMPTS)) + BUDGET
jitted = functools.cache(jax.jit)


def reference(prompt: list[int], options: dict[str, Any], stop: tuple[int, ...] = ()) -> list[int]:
    """The greedy answer by the definitions, one token after the other: logits of the model, all else in float64."""
    ids = list(prompt)
    ends = {*stop, *([] if options.get("ignore_eos") else [END])}
    while len(ids) < len(prompt) + BUDGET:
        row = np.array([ids + [-1] * (WIDTH - len(ids))], np.int32)  # one size of program
        logits = np.asarray(lm().logits(np.maximum(row, 0), [len(ids)]))[0, len(ids) - 1].astype(np.float64)
        count = np.bincount(ids[len(prompt) :], minlength=V)
        logits -= options.get("frequency_penalty", 0) * count + options.get("presence_penalty", 0) * (count > 0)
        if len(ids) - len(prompt) < options.get("min_tokens", 0):
            logits[[*ends]] = -np.inf
        for *before, last in options.get("bad_words") or []:
            if ids[len(ids) - len(before) :] == before:
                logits[last] = -np.inf
        if processor := options.get("logits_processor"):
            logits = np.asarray(jitted(processor)(logits[None].astype(np.float32), row))[0]
        ids.append(int(logits.argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


def cases() -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Options of which each changes the answers, and ids of `stop`."""
    rows = lm().generate(PROMPTS, BUDGET, ignore_eos=True)
    assert any(END in row for row in rows)
    pairs = [[row[0], row[1]] for row in rows] + [[PROMPTS[0][-1], rows[0][0]]]  # the last one begins in the prompt
    return [
        ({"frequency_penalty": 0.7, "presence_penalty": -0.2}, ()),
        ({"min_tokens": 5}, (rows[0][1], rows[1][2], rows[2][0])),
        ({"ignore_eos": True}, ()),
        ({"bad_words": [*pairs, rows[1][2:6]]}, ()),
        ({"logits_processor": near_the_last}, ()),
        ({"bad_words": [[rows[1][0]], *pairs], "min_tokens": 3, "presence_penalty": 1.5,
          "logits_processor": no_repeats}, (rows[0][2],)),
    ]  # fmt: skip


def test_all_options_at_once() -> None:
    """In one batch; `test_answers_are_those_of_the_definitions` has each option, and the other ways to generate."""
    options, stop = cases()[-1]
    assert lm().generate(PROMPTS, BUDGET, stop=stop, **options) == [reference(p, options, stop) for p in PROMPTS]


@pytest.mark.slow
def test_answers_are_those_of_the_definitions() -> None:
    """In one batch, alone, in slots with a sampler for each prompt, in a stream, and with drafts."""
    samplers, stops, want = [], [], []
    for options, stop in cases():
        rows = [reference(prompt, options, stop) for prompt in PROMPTS]
        assert rows != [reference(prompt, {}, stop) for prompt in PROMPTS]
        assert lm().generate(PROMPTS, BUDGET, stop=stop, **options) == rows
        samplers += [rlx.Sampler(**options)] * len(PROMPTS)
        stops += [list(stop)] * len(PROMPTS)
        want += rows
    assert lm().generate(PROMPTS[0], BUDGET, stop=stop, **options) == rows[0]
    assert list(lm().stream(PROMPTS[2], BUDGET, stop=stop, **options)) == rows[2]
    assert lm().generate(PROMPTS, BUDGET, stop=stop, speculative="prompt", draft_tokens=3, **options) == rows
    assert lm().generate(PROMPTS * len(cases()), BUDGET, samplers, stops, slots=4) == want


@pytest.mark.slow
def test_drawn_answers() -> None:
    """Several answers, and in slots: the same draws. A draft model of the same weights changes no greedy token."""
    options: Any = {"frequency_penalty": 0.6, "min_tokens": 6, "bad_words": [[3, 4], [5]]}
    want = lm().generate(PROMPTS, BUDGET, seed=3, n=2, temperature=0.8, **options)
    assert want != lm().generate(PROMPTS, BUDGET, seed=3, n=2, temperature=0.8)
    assert lm().generate(PROMPTS, BUDGET, seed=3, n=2, slots=3, temperature=0.8, **options) == want
    drawn = rlx.Sampler(temperature=0.8, **options)
    each = [lm().generate([prompt], BUDGET, drawn, seed=i, n=2)[0] for i, prompt in enumerate(PROMPTS)]
    assert lm().generate(PROMPTS, BUDGET, drawn, seed=[0, 1, 2], n=2) == each
    drafter = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"))
    assert lm().generate(PROMPTS[1], BUDGET, speculative=drafter, **options) == reference(PROMPTS[1], options)
    counts = lm().report().speculative
    assert counts.accepted == counts.drafted  # its drafts follow the same options


def test_neutral_values_are_no_option() -> None:
    """The same program, without arrays for counts and tokens; other values of an option compile nothing."""
    neutral = rlx.Sampler(presence_penalty=0, frequency_penalty=0.0, min_tokens=0, ignore_eos=False, bad_words=[])
    assert neutral.sampling_steps(V) == rlx.Sampler().sampling_steps(V)
    lm().generate(PROMPTS, BUDGET, presence_penalty=1.0, bad_words=[[1, 2, 3]])
    compiles = lm().report().compiles
    lm().generate(PROMPTS, BUDGET, frequency_penalty=-0.5, bad_words=[[1, 2], [3, 4], [5, 6, 7, 8]])
    assert lm().report().compiles == compiles


@pytest.mark.slow
def test_strings() -> None:
    """Bad words and stop strings of a checkpoint with a tokenizer; a stop string within `min_tokens` does not count."""
    model, word = rlx.load(CHAT), "w"
    text = model.generate("the cat", 12, ignore_eos=True)
    assert word in text.split() and word not in model.generate("the cat", 12, bad_words=[word]).split()
    ids = [tuple(model.tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}")]
    assert [*model._lm.bind_sampler(rlx.Sampler(bad_words=[word])).bad_words] == ids
    options: Any = {"stop": [text[: len(text) // 3]], "ignore_eos": True}
    assert model.generate("the cat", 12, **options) == ""
    assert model.generate("the cat", 12, min_tokens=11, **options) == text
    assert "".join(model.stream("the cat", 12, min_tokens=11, **options)) == text
    assert model.generate(["the cat"], 12, min_tokens=11, slots=1, **options) == [text]
    template = {"chat_template": "{{ messages[0].content }}"}
    reply = model.conversation(**template).send("the cat", 12, bad_words=[word])
    assert reply == model.chat("the cat", 12, bad_words=[word], **template) and word not in reply.split()


def test_a_changed_capture_is_an_error() -> None:
    """A number that is bound anew, and an array that is changed in place; a new function has the new values."""
    scale, bias = 1.0, np.zeros(V, np.float32)

    def processor(logits: Any, tokens: Any) -> Any:
        return logits * scale + jnp.asarray(bias)[None]

    want = lm().generate(PROMPTS, BUDGET)
    assert lm().generate(PROMPTS, BUDGET, logits_processor=processor) == want
    assert lm().generate(PROMPTS, BUDGET, logits_processor=processor) == want
    bias[11] = 40.0
    with pytest.raises(errors.RequestError, match=r"logits_processor processor: .*\(it reads bias, scale\) has"):
        lm().generate(PROMPTS, BUDGET, logits_processor=processor)
    assert lm().generate([1], 3, logits_processor=lambda x, t: processor(x, t)) == [11] * 3
    bias[11], scale = 0.0, -1.0
    with pytest.raises(errors.RequestError, match="has changed since"):
        lm().generate(PROMPTS, BUDGET, logits_processor=processor)


@pytest.mark.oracle
def test_live_options() -> None:
    """The greedy tokens of `transformers` with `min_new_tokens`, `bad_words_ids` and a processor of one's own."""
    import torch

    def banned(ids: Any, scores: Any) -> Any:
        return scores.scatter(1, ids, -torch.inf)

    model, ours = hugging_face.load(PLAIN, "AutoModelForCausalLM"), rlx.load(PLAIN)
    for prompt in PROMPTS:
        first = ours.generate(prompt, BUDGET, ignore_eos=True)
        words = [[first[0]], first[1:3], [prompt[-1], first[0]], first[4:8]]
        ours.eos_ids = first[3]
        theirs: Any = {"min_new_tokens": 8, "bad_words_ids": words, "logits_processor": [banned]}
        options: Any = {"min_tokens": 8, "bad_words": words, "logits_processor": no_repeats}
        for (their_name, value), (name, our_value) in zip(theirs.items(), options.items(), strict=True):
            want = hugging_face.generate(model, prompt, BUDGET, eos=[first[3]], **{their_name: value})
            assert ours.generate(prompt, BUDGET, **{name: our_value}) == want
