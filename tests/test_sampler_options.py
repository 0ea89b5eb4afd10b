"""Penalties by count, bans and ends of answers, against plain NumPy in float64 and against transformers."""

from __future__ import annotations

import functools
from typing import Any

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
def lm(family: str = "llama") -> Any:
    return rlx.CausalLM(divided.recipe(family), divided.weights(family), eos_ids=END)


def reference(prompt: list[int], options: dict[str, Any], stop: tuple[int, ...] = ()) -> list[int]:
    """The greedy answer by the definitions, one token after the other: logits of the model, all else in float64."""
    ids = list(prompt)
    ends = {*stop, *([] if options.get("ignore_eos") else [END])}
    while len(ids) < len(prompt) + BUDGET:
        logits = np.asarray(lm().logits([ids]))[0, -1].astype(np.float64)
        count = np.bincount(ids[len(prompt) :], minlength=V)
        logits -= options.get("frequency_penalty", 0) * count + options.get("presence_penalty", 0) * (count > 0)
        if len(ids) - len(prompt) < options.get("min_tokens", 0):
            logits[[*ends]] = -np.inf
        for *before, last in options.get("bad_words") or []:
            if ids[len(ids) - len(before) :] == before:
                logits[last] = -np.inf
        ids.append(int(logits.argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


@functools.cache
def plain() -> list[list[int]]:
    return lm().generate(PROMPTS, BUDGET, ignore_eos=True)


def cases() -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Options of which each changes the answers, and ids of `stop`."""
    rows = plain()
    pairs = [[row[0], row[1]] for row in rows] + [[PROMPTS[0][-1], rows[0][0]]]  # the last one begins in the prompt
    return [
        ({"frequency_penalty": 0.7, "presence_penalty": -0.2}, ()),
        ({"min_tokens": 5}, (rows[0][1], rows[1][2], rows[2][0])),
        ({"ignore_eos": True}, ()),
        ({"bad_words": [*pairs, rows[1][2:6]]}, ()),
        ({"bad_words": [[rows[1][0]], *pairs], "min_tokens": 3, "presence_penalty": 1.5}, (rows[0][2],)),
    ]


def test_answers_are_those_of_the_definitions() -> None:
    """In one batch, alone, in slots with a sampler for each prompt, in a stream, and with drafts."""
    samplers, prompts, stops, want = [], [], [], []
    assert any(END in row for row in plain())  # an end token comes if nothing hinders it
    for options, stop in cases():
        rows = [reference(prompt, options, stop) for prompt in PROMPTS]
        assert rows != [reference(prompt, {}, stop) for prompt in PROMPTS]
        assert lm().generate(PROMPTS, BUDGET, stop=stop, **options) == rows
        samplers += [rlx.Sampler(**options)] * len(PROMPTS)
        prompts += PROMPTS
        stops += [list(stop)] * len(PROMPTS)
        want += rows
    assert lm().generate(PROMPTS[0], BUDGET, stop=stop, **options) == rows[0]
    assert list(lm().stream(PROMPTS[2], BUDGET, stop=stop, **options)) == rows[2]
    assert lm().generate(PROMPTS, BUDGET, stop=stop, speculative="prompt", draft_tokens=3, **options) == rows
    assert dict(lm().generate_iter(PROMPTS, BUDGET, stop=stop, slots=4, **options)) == dict(enumerate(rows))
    assert lm().generate(prompts, BUDGET, samplers, stops, slots=4) == want


def test_drawn_answers() -> None:
    """Several answers, alone, in slots, and with drafts: the same draws."""
    options: Any = {
        "temperature": 0.8,
        "top_k": 20,
        "frequency_penalty": 0.6,
        "min_tokens": 6,
        "bad_words": [[3, 4], [5]],
    }
    want = lm().generate(PROMPTS, BUDGET, seed=3, n=2, **options)
    assert want != lm().generate(PROMPTS, BUDGET, seed=3, n=2, temperature=0.8, top_k=20)
    assert lm().generate(PROMPTS, BUDGET, seed=3, n=2, slots=3, **options) == want


@pytest.mark.slow
def test_drafts_of_a_model() -> None:
    """The draft model chooses by the same options, and the tokens are those without drafts."""
    drafter = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"))
    assert lm().generate(PROMPTS[1], BUDGET, speculative=drafter, **cases()[-1][0]) == reference(
        PROMPTS[1], cases()[-1][0]
    )


def test_neutral_values_are_no_option() -> None:
    """The same program, without arrays for counts and tokens; other values of an option compile nothing."""
    neutral = rlx.Sampler(presence_penalty=0, frequency_penalty=0.0, min_tokens=0, ignore_eos=False, bad_words=[])
    assert neutral.sampling_steps(V) == rlx.Sampler().sampling_steps(V)
    want = lm().generate(PROMPTS, BUDGET)
    lm().generate(PROMPTS, BUDGET, presence_penalty=1.0, bad_words=[[1, 2, 3]])
    compiles = lm().report().compiles
    assert lm().generate(PROMPTS, BUDGET, neutral) == want
    lm().generate(PROMPTS, BUDGET, frequency_penalty=-0.5, bad_words=[[1, 2], [3, 4], [5, 6, 7, 8]])
    assert lm().report().compiles == compiles


def test_strings() -> None:
    """Bad words and stop strings of a checkpoint with a tokenizer; a stop string within `min_tokens` does not count."""
    model = rlx.load(CHAT)
    text = model.generate("the cat", 12, ignore_eos=True)
    word = "w"
    assert word in text.split() and word not in model.generate("the cat", 12, bad_words=[word]).split()
    ids = [tuple(model.tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}")]
    assert [*model._lm.bind_sampler(rlx.Sampler(bad_words=[word])).bad_words] == ids
    stop = text[: len(text) // 3]
    assert model.generate("the cat", 12, stop=[stop], ignore_eos=True) == ""
    for run in (model.generate, lambda *a, **k: "".join(model.stream(*a, **k))):
        assert run("the cat", 12, stop=[stop], ignore_eos=True, min_tokens=11) == text
    assert model.generate(["the cat"], 12, stop=[stop], ignore_eos=True, min_tokens=11, slots=1) == [text]
    chat = model.conversation()
    assert word not in chat.send("the cat", 12, bad_words=[word]).split()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"presence_penalty": "1"}, "presence_penalty is '1'; expected a finite number"),
        ({"frequency_penalty": 1e39}, "frequency_penalty is 1e.39; expected from -3.4e.38 to 3.4e.38"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 20}, "min_tokens is 20, and max_new_tokens is 14"),
        ({"ignore_eos": 1}, "ignore_eos is 1; expected True or False"),
        ({"bad_words": "word"}, "bad_words is 'word'; expected a list"),
        ({"bad_words": [[]]}, r"bad_words\[0\] is \[\]"),
        ({"bad_words": [5]}, r"bad_words\[0\] is 5"),
        ({"bad_words": ["word"]}, "bad_words: strings need a tokenizer"),
        ({"bad_words": [[1, V]]}, r"bad_words\[0\]\[1\]: id 61"),
        ({"bad_words": [[i] for i in range(V)]}, "bad_words bans every token"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(errors.RequestError, match=message):
        lm().generate(PROMPTS, BUDGET, **options)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live_bans_and_ends() -> None:
    """The greedy tokens of `transformers` with `min_new_tokens` and `bad_words_ids`."""
    model, ours = hugging_face.load(PLAIN, "AutoModelForCausalLM"), rlx.load(PLAIN)
    for prompt in PROMPTS:
        first = ours.generate(prompt, BUDGET, ignore_eos=True)
        words = [[first[0]], first[1:3], [prompt[-1], first[0]], first[4:8]]
        ours.eos_ids = first[3]
        for theirs, options in (
            ({"min_new_tokens": 8}, {"min_tokens": 8}), ({"bad_words_ids": words}, {"bad_words": words}),
        ):  # fmt: skip
            want = hugging_face.generate(model, prompt, BUDGET, eos=[first[3]], **theirs)
            assert ours.generate(prompt, BUDGET, **options) == want
