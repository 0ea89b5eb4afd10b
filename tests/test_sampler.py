"""How tokens are chosen, against plain NumPy in float64 and against transformers."""

import copy
import functools
import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.decode import NOT_FINITE, FirstTokens, initial_history
from rlx_jax.generate.sampler import OPTIONS, SAMPLING, Sampler, Sampling, choose_tokens, keep_likely
from rlx_jax.generate.token_history import adjust_logits
from rlx_jax.runtime.random_keys import key_words, random_key
from tests import divided
from tests.divided import V
from tests.opening import load
from tests.oracles import hugging_face
from tests.test_generate import CHAT, PLAIN

VOCAB = 13
ROWS = 3


keep_jitted = jax.jit(keep_likely, static_argnums=0)


def kept(sampler: Sampler, logits: np.ndarray) -> np.ndarray:
    """Logits after bias-free filters at temperature 1, −inf where dropped."""
    steps, values = sampler.sampling_steps(VOCAB), sampler.values(VOCAB)
    out = np.asarray(keep_jitted(steps, values, logits))
    # A profile with buckets compiles all filters for a sampler that has one.
    np.testing.assert_array_equal(keep_jitted(steps.widened(), values, logits), out)
    return out


def reference(sampler: Sampler, row: np.ndarray) -> set[int]:
    """The ids that stay, one rule after the other."""
    ids = set(range(VOCAB))
    order = sorted(ids, key=lambda i: -row[i])
    if sampler.top_k is not None:
        cut = row[order[min(sampler.top_k, VOCAB) - 1]]
        ids = {i for i in ids if row[i] >= cut}
    if sampler.top_p is not None and sampler.top_p < 1:
        weights = {i: math.exp(row[i] - row[order[0]]) for i in ids}
        total, mass, cut = sum(weights.values()), 0.0, row[order[0]]
        for i in (i for i in order if i in ids):
            if mass / total >= sampler.top_p:
                break
            mass, cut = mass + weights[i], row[i]
        ids = {i for i in ids if row[i] >= cut}
    if sampler.min_p:
        ids = {i for i in ids if math.exp(row[i] - row[order[0]]) >= sampler.min_p}
    return ids


@settings(max_examples=30)
@given(
    top_k=st.none() | st.integers(1, VOCAB + 2),
    top_p=st.none() | st.floats(0.01, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
    seed=st.integers(0, 2**16),
)
def test_filters_keep_what_their_definitions_keep(
    top_k: int | None, top_p: float | None, min_p: float | None, seed: int
) -> None:
    """Multiples of 1/4 as logits, so that ties occur; a limit within rounding of a sum may fall either way."""
    logits = np.round(np.random.default_rng(seed).normal(0, 2, (ROWS, VOCAB)) * 4) / 4
    sampler = Sampler(1.0, top_k, top_p, min_p)
    got = kept(sampler, logits.astype(np.float32))
    for row, out in zip(logits, got, strict=True):
        here = set(np.flatnonzero(np.isfinite(out)).tolist())
        near = [Sampler(1.0, top_k, p, m) for p in around(top_p) for m in around(min_p)]
        assert here in [reference(s, row) for s in near]
        assert here
        np.testing.assert_array_equal(out[sorted(here)], row[sorted(here)])


def around(limit: float | None) -> list[float | None]:
    """A limit, and its neighbours within float32 rounding."""
    return [None] if limit is None else [min(max(limit + e, 1e-9), 1.0) for e in (0.0, 1e-6, -1e-6)]


def test_greedy_takes_the_smaller_id_of_a_tie() -> None:
    """And reads neither keys nor history."""
    logits = jnp.asarray([[0.0, 2.0, 2.0], [3.0, -1.0, 3.0]])
    sampler: Any = Sampler(top_k=1, top_p=0.1)
    got = choose_tokens(sampler.sampling_steps(3), sampler.values(3), logits, jnp.zeros(2, jnp.uint32))
    np.testing.assert_array_equal(got, [1, 0])


def sample(sampler: Sampler, logits: np.ndarray, seeds: Any, seen: Any = None) -> np.ndarray:
    """One token for each row."""
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    prompts = [() if seen is None else np.flatnonzero(seen[row]).tolist() for row in range(len(logits))]
    steps, values = sampler.sampling_steps(VOCAB), sampler.values(VOCAB)
    history = initial_history(steps, prompts, VOCAB, VOCAB)
    adjusted = adjust_logits(steps, values, jnp.asarray(logits), history, jnp.zeros(VOCAB, bool))
    return np.asarray(choose_tokens(steps, values, adjusted, keys))


def test_draws_follow_the_softmax() -> None:
    """4,000 draws at temperature 0.7 against the probabilities: χ² at 0.1 % of its tail."""
    row = np.random.default_rng(0).normal(0, 1, VOCAB).astype(np.float32)
    want = np.exp(row / 0.7) / np.exp(row / 0.7).sum()
    got = np.bincount(sample(Sampler(0.7), np.tile(row, (4000, 1)), np.arange(4000)), minlength=VOCAB)
    assert ((got - 4000 * want) ** 2 / (4000 * want)).sum() < 32.9
    logits = np.random.default_rng(1).normal(0, 30, (8, VOCAB)).astype(np.float32)
    for sampler in (Sampler(float(np.finfo(np.float32).tiny)), Sampler(1e-30, top_p=0.9, min_p=0.1)):
        np.testing.assert_array_equal(sample(sampler, logits, np.arange(8)), logits.argmax(-1))  # no quotient overflows


def test_penalty_and_bias() -> None:
    """Positive logits are divided, negative ones multiplied; a ban is never drawn."""
    logits = np.array([[1.0, 0.9, -0.5, -0.6] + [-9.0] * (VOCAB - 4)], np.float32)
    seen = np.zeros((1, VOCAB), bool)
    seen[0, 0] = True
    assert sample(Sampler(repetition_penalty=1.2), logits, [0], seen)[0] == 1
    assert sample(Sampler(repetition_penalty=1.05), logits, [0], seen)[0] == 0
    assert sample(Sampler(logit_bias={0: -math.inf}), logits, [0])[0] == 1
    banned = Sampler(1.0, logit_bias={i: -math.inf for i in range(1, VOCAB)})
    assert set(sample(banned, np.tile(logits, (50, 1)), range(50))) == {0}


RECOMMENDED: list[tuple[dict[str, Any], Sampler]] = [
    ({}, Sampler()),
    ({"do_sample": False, "top_p": 0.9, "repetition_penalty": 1.1}, Sampler(repetition_penalty=1.1)),
    ({"do_sample": True}, Sampler(1.0, 50)),
    ({"min_new_tokens": 2, "bad_words_ids": [[1], [2, 3]]}, Sampler(min_tokens=2, bad_words=[(1,), (2, 3)])),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "eos_token_id": 3},
     Sampler(0.6, 20, 0.9, 0.1)),
    ({"do_sample": True, "top_k": 0, "top_p": None, "num_beams": 1, "typical_p": 1.0}, Sampler(1.0)),
]  # fmt: skip


def test_a_checkpoint_recommends_a_sampler(tmp_path: Path) -> None:
    """The file as transformers reads it."""
    for config, want in RECOMMENDED:
        assert Sampler.from_generation_config(config) == want
        (tmp_path / "generation_config.json").write_text(json.dumps(config), "utf-8")
        assert Sampler.from_generation_config(tmp_path) == want


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("config", [config for config, _ in RECOMMENDED])
def test_recommended_as_in_transformers(config: dict[str, Any]) -> None:
    import transformers

    theirs: Any = transformers.GenerationConfig(**config)
    theirs.update(**theirs._get_default_generation_params(), defaults_only=True, allow_custom_entries=True)
    ours = Sampler.from_generation_config(config)
    assert (ours.repetition_penalty or 1.0) == (theirs.repetition_penalty or 1.0)
    assert (ours.temperature > 0) == bool(theirs.do_sample)
    if theirs.do_sample:
        want = (theirs.temperature, theirs.top_k or None, theirs.top_p, theirs.min_p)
        assert (ours.temperature, ours.top_k, ours.top_p or 1.0, ours.min_p) == want


def test_a_sampler_keeps_its_bias() -> None:
    """A copy that does not change; equal samplers have one hash; NumPy's numbers are numbers."""
    bias: dict[Any, Any] = {3: 1.5, np.int64(4): np.float32(-np.inf)}
    sampler = Sampler(logit_bias=bias)
    bias[3] = 9.0
    assert sampler == Sampler(logit_bias={4: -np.inf, 3: 1.5}) and sampler.logit_bias == {3: 1.5, 4: -np.inf}
    assert {sampler: 1}[Sampler(logit_bias={4: -np.inf, 3: 1.5})] == 1
    for other in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler), replace(sampler)):
        assert other == sampler and repr(other) == repr(sampler)
    assert sampler.values(VOCAB).bias[[3, 4]].tolist() == [1.5, -np.inf]


def test_a_bias_that_bans_what_the_model_leaves() -> None:
    """No token is made up where none is left; the other row is as it was."""
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[:, 3], logits[1, 5] = 1.0, 0.0
    sampler = Sampler(logit_bias={3: -math.inf})
    start, live = FirstTokens(sampler.sampling_steps(VOCAB)), jnp.ones(2, bool)
    history = initial_history(start.sampling_steps, [()] * 2, VOCAB, 0)
    rows = key_words("seed", 0), live, jnp.int32(4), history
    first, after, _ = start(jnp.asarray(logits), *rows, sampler.values(VOCAB), jnp.zeros(VOCAB, bool))
    assert first.tolist() == [[NOT_FINITE], [5]] and after.running.tolist() == [False, True]


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("top_p", [None, 0.4, 0.95])
@pytest.mark.parametrize("min_p", [None, 0.2])
def test_filters_are_those_of_transformers(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """The same logits stay, in the same order of filters."""
    import torch
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (20, VOCAB)).astype(np.float32)
    ids = rng.integers(0, VOCAB, (20, 4))
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(ids), torch.tensor(logits))
    for warper in (
        TemperatureLogitsWarper(0.8),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ):
        want = warper(torch.tensor(ids), want)
    seen = np.zeros((20, VOCAB), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    penalised = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)
    got = kept(Sampler(0.8, top_k, top_p, min_p), (penalised / np.float32(0.8)).astype(np.float32))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


def test_fields_are_arguments() -> None:
    """What `generate` takes as keywords, and the command line, is what a sampler has."""
    assert tuple(Sampling.__annotations__) == SAMPLING
    assert set(SAMPLING) - set(OPTIONS) == {"logit_bias", "bad_words", "logits_processor"}
    page = (Path(__file__).parents[1] / "docs" / "generation.md").read_text("utf-8")
    table = page.partition("| field | default | effect |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert [name for cell in cells for name in re.findall(r"\w+", cell)] == [*SAMPLING]


def test_every_bit_of_a_seed_counts() -> None:
    """Seeds of 32 bits are those of JAX; a key stays as it is."""
    keys = [random_key("seed", seed) for seed in (0, 7, 2**32, 2**32 + 7, 2**63, 2**64 - 1)]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == len(keys)
    for seed in (0, 2**32 - 1, 2**32, jax.random.key(3), jax.random.key(3, impl="rbg")):
        np.testing.assert_array_equal(key_words("seed", seed), jax.random.key_data(random_key("seed", seed)))
    assert (keys[1] == jax.random.key(7)) and random_key("init", keys[2]) is keys[2]


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


def by_definition(prompt: list[int], options: dict[str, Any], stop: tuple[int, ...] = ()) -> list[int]:
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
    assert lm().generate(PROMPTS, BUDGET, stop=stop, **options) == [by_definition(p, options, stop) for p in PROMPTS]


@pytest.mark.slow
def test_answers_are_those_of_the_definitions() -> None:
    """In one batch, alone, in slots with a sampler for each prompt, in a stream, and with drafts."""
    samplers, stops, want = [], [], []
    for options, stop in cases():
        rows = [by_definition(prompt, options, stop) for prompt in PROMPTS]
        assert rows != [by_definition(prompt, {}, stop) for prompt in PROMPTS]
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
    assert lm().generate(PROMPTS[1], BUDGET, speculative=drafter, **options) == by_definition(PROMPTS[1], options)
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
    model, word = load(CHAT), "w"
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
    with pytest.raises(errors.RequestError, match="logits_processor processor: .*bias, scale"):
        lm().generate(PROMPTS, BUDGET, logits_processor=processor)
    assert lm().generate([1], 3, logits_processor=lambda x, t: processor(x, t)) == [11] * 3
    bias[11], scale = 0.0, -1.0
    with pytest.raises(errors.RequestError, match="has changed"):
        lm().generate(PROMPTS, BUDGET, logits_processor=processor)


@pytest.mark.oracle
def test_live_options() -> None:
    """The greedy tokens of `transformers` with `min_new_tokens`, `bad_words_ids` and a processor of one's own."""
    import torch

    def banned(ids: Any, scores: Any) -> Any:
        return scores.scatter(1, ids, -torch.inf)

    model, ours = hugging_face.load(PLAIN, "AutoModelForCausalLM"), load(PLAIN)
    for prompt in PROMPTS:
        first = ours.generate(prompt, BUDGET, ignore_eos=True)
        words = [[first[0]], first[1:3], [prompt[-1], first[0]], first[4:8]]
        ours.eos_ids = first[3]
        theirs: Any = {"min_new_tokens": 8, "bad_words_ids": words, "logits_processor": [banned]}
        options: Any = {"min_tokens": 8, "bad_words": words, "logits_processor": no_repeats}
        for (their_name, value), (name, our_value) in zip(theirs.items(), options.items(), strict=True):
            want = hugging_face.generate(model, prompt, BUDGET, eos=[first[3]], **{their_name: value})
            assert ours.generate(prompt, BUDGET, **{name: our_value}) == want
