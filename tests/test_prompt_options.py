"""Many prompts in slots, each with options, drafts and a place in a cache of its own: rows equal the request alone."""

import functools
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.compiler import settings as settings_module
from rlx_jax.generate import slot_plan
from tests import divided
from tests.divided import V
from tests.test_many_prompts import MAX_TOKENS, RECURRENT, SAMPLERS, job_list, lm, same


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen35"])
def test_over_a_mesh(family: str) -> None:
    """Slots over several devices give the tokens of one device."""
    prompts, budgets = job_list(9)
    model = rlx.CausalLM(divided.recipe(family), divided.weights(family), mesh=divided.mesh("data tensor", 4))
    rows = lm(family).generate(prompts, MAX_TOKENS)
    assert model.generate(prompts, budgets, slots=4) == [row[:b] for row, b in zip(rows, budgets, strict=True)]


@pytest.mark.slow
def test_prompts_with_options_of_their_own() -> None:
    """Each equals a call with its options; greedy and sampled ones alternate, and later ones need other slots."""
    model = lm("llama")
    prompts, budgets = job_list(12)
    requests = [
        rlx.PromptRequest(p, max_new_tokens=b, sampler=SAMPLERS[i % 5], seed=i, stop=[*range(i)])
        for i, (p, b) in enumerate(zip(prompts, budgets, strict=True))
    ]
    got = dict(model.generate_iter([[1], *requests, [2]], 3, slots=2, details=True))
    samplers, stops = [SAMPLERS[i % 5] for i in range(12)], [[*range(i)] for i in range(12)]
    for i, ids in enumerate(model.generate(prompts, budgets, samplers, stops, [*range(12)], slots=2), 1):
        stopped = ids[-1] < i - 1
        assert (got[i].tokens, got[i].finish_reason) == (tuple(ids), "stop" if stopped else "length")
        assert got[i].token_logprobs == () and got[i].text is None
    assert [[*got[i].tokens] for i in (0, 13)] == model.generate([[1], [2]], 3)
    drawn = [rlx.PromptRequest(p, sampler=SAMPLERS[1], index=9 - i) for i, p in enumerate(prompts[:4])]
    rows = model.generate([[1]] * 6 + [r.prompt for r in drawn[::-1]], 3, SAMPLERS[1], seed=5)
    assert dict(model.generate_iter(drawn, 3, slots=2, seed=5)) == dict(zip(range(6, 10), rows[6:], strict=True))
    late = {"sampler": rlx.Sampler(min_tokens=3), "max_new_tokens": 2}
    own: list[Any] = [{}, {"messages": []}, {"max_new_tokens": -1}, {"sampler": 3}, {"stop": [V]}, {"seed": -1}, late]
    own += [{"index": index} for index in (-1, 2**31, "7", 1.5)]
    wrong = [rlx.PromptRequest(**({"prompt": [1]} | options if options else {})) for options in own]
    told = ["got none", "got both", "max_new_tokens is -1", "sampler is 3", "stop", "seed", "min_tokens is 3"]
    told += [f"index is {index!r}" for index in (-1, 2**31, "7", 1.5)]
    for (i, error), part in zip(sorted(model.generate_iter(wrong, errors="return")), told, strict=True):
        assert isinstance(error, errors.RequestError) and part in str(error) and error.__notes__ == [f"of prompts[{i}]"]
    eos = rlx.CausalLM(model.model, eos_ids=[model.generate([1], 2)[0]])
    both = [[1], rlx.PromptRequest([1], sampler=rlx.Sampler(ignore_eos=True))]
    assert [len(ids) for _, ids in sorted(eos.generate_iter(both, 2, slots=1))] == [1, 2]


@functools.cache
def repetitive(family: str) -> tuple[list[list[int]], list[int], list[rlx.Sampler]]:
    """Prompts that repeat themselves, so that drafts are accepted, with answers of several classes."""
    rng = np.random.default_rng(5)
    prompts = [(rng.integers(0, V, 1 + i % 4).tolist() * 9)[: 3 + 5 * (i % 5)] for i in range(7)]
    return prompts, [30, 3, 11, 1, 24, 7, 16], [SAMPLERS[(0, 1, 2)[i % 3]] for i in range(7)]


@pytest.mark.parametrize(
    "family, drafts",
    [*(pytest.param(f, d, marks=pytest.mark.slow) for f, d in (
        ("gemma2", "prompt"), ("qwen35", "prompt"),
    )), *(pytest.param(f, d, marks=pytest.mark.soak) for f, d in (
        ("llama", "prompt"), ("int8", "prompt"), ("mamba2", "prompt"), ("llama", "gpt2"), ("gemma2", "llama"),
        ("llama", "gemma2"), ("qwen35", "mamba2"), ("mixtral", "qwen35"),
    ))],
)  # fmt: skip
def test_drafts_in_slots(family: str, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows accept different numbers of drafts, and equal the request alone with the same drafts."""
    monkeypatch.setattr(slot_plan, "CONTEXT_BUCKET", 16)
    monkeypatch.setattr(slot_plan, "choose_classes", lambda _lm, caches, *_: dict.fromkeys(caches, 0.3))
    prompts, budgets, samplers = repetitive(family)
    model, source = lm(family), "prompt" if drafts == "prompt" else lm(drafts)
    options: Any = {"speculative": source, "draft_tokens": 3}
    got = model.generate(prompts, budgets, samplers, seed=[*range(7)], stop=[5], slots=4, **options)
    report = model.report()
    assert report.request.slots == 4 and len(report.request.slot_classes) == (3 if drafts == "prompt" else 1)
    counts, each = report.speculative, zip(prompts, budgets, samplers, strict=True)
    assert counts is not None and counts.drafted > counts.accepted and (counts.accepted > 0 or family in RECURRENT)
    single = model if source != "prompt" else lm(family, one_size=True)
    want = [single.generate([p], b, s, seed=i, stop=[5], **options)[0] for i, (p, b, s) in enumerate(each)]
    assert got == want


@pytest.mark.slow
def test_earlier_tokens_in_several_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of a row has the length of its cache: of rows that start in each class, and that move."""
    monkeypatch.setattr(slot_plan, "CONTEXT_BUCKET", 16)
    monkeypatch.setattr(slot_plan, "choose_classes", lambda _lm, caches, *_: dict.fromkeys(caches, 0.3))
    model, sizes = lm("llama"), [(40, 20), (3, 40), (12, 9), (20, 30)]
    prompts = [np.random.default_rng(i).integers(0, V, length).tolist() for i, (length, _) in enumerate(sizes)]
    options: Any = {"bad_words": [[3], [5, 6]], "repetition_penalty": 1.3}
    got = model.generate(prompts, [budget for _, budget in sizes], rlx.Sampler(**options), slots=3)
    assert len(model.report().request.slot_classes) == 3
    assert got == [model.generate([p], size[1], **options)[0] for p, size in zip(prompts, sizes, strict=True)]


BUCKETS: dict[str, Any] = {"prompt": [16, 64], "context": [40, 100], "batch": [1, 2]}
ROUNDED: dict[str, tuple[dict[str, Any], tuple[int, ...], int | list[int], int | None]] = {
    "chunks": ({}, (50, 16, 33, 7), 6, 3), "classes": ({}, (5, 20, 40), 6, 3), "later prompts": ({}, (5, 7, 40), 8, 2),
    "widths": (BUCKETS, (35, 30), [3, 50], None), "widths of one class": (BUCKETS, (35, 30), [3, 4], None),
}  # fmt: skip
"""Buckets, lengths of prompts, numbers of new tokens and slots. A short cache that would prefill in two chunks what is
one chunk without slots is no class; a prompt wider than the prefill of the slots waits for other ones."""


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED)
def test_a_cache_that_rounds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What later tokens read is rounded: chunks end at the same tokens in slots and alone, behind a prefix too."""
    buckets, lengths, budgets, slots = ROUNDED[case]
    monkeypatch.setattr(slot_plan, "choose_classes", lambda _lm, caches, *_: dict.fromkeys(caches, 0.3))
    if not buckets:
        monkeypatch.setattr(slot_plan, "CONTEXT_BUCKET", 16)
    if case == "chunks":
        for module in (settings_module, slot_plan):
            monkeypatch.setattr(module, "MAX_CHUNK", 16)
    profile = rlx.CompileProfile().replace(precision={"kv": "int8" if case == "chunks" else "fp8"}, buckets=buckets)
    model: Any = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"), profile=profile)
    prompts = [np.random.default_rng(n).integers(0, V, n).tolist() for n in lengths]
    each = budgets if isinstance(budgets, list) else [budgets] * len(prompts)
    want = [model.generate([prompt], n, logprobs=1)[0] for prompt, n in zip(prompts, each, strict=True)]
    got = dict(model.generate_iter(prompts, max(each), logprobs=1, slots=slots or 1)) if case == "later prompts" else {}
    for i, one in enumerate(model.generate(prompts, budgets, logprobs=1, slots=slots)):
        same(one, want[i])
        same(got.get(i, one), want[i])
    assert slots is None or len(model.report().request.slot_classes) > 1
    if case == "chunks":
        after = model.generate([p[8:] for p in prompts[:3]], 6, logprobs=1, slots=2, state=model.prefix([1] * 8))
        for prompt, one in zip(prompts, after, strict=False):
            same(one, model.generate([prompt[8:]], 6, logprobs=1, state=model.prefix([1] * 8))[0])
    if case == "classes":
        drafts = model.generate([p * 2 for p in prompts], 30, slots=3, speculative="prompt")
        assert drafts == [model.generate([p * 2], 30, speculative="prompt")[0] for p in prompts]
        _, state = model.prefill([[1] * 17])
        shared = model.generate([[1] * 17 + p for p in prompts], 6, logprobs=1, slots=3, share_prefix=True)
        for prompt, one in zip(prompts, shared, strict=True):
            same(one, model.generate([prompt], 6, logprobs=1, state=state)[0])
