"""Buckets, warm-up, long prompts, padding on the left, rows that fail, and interrupts."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.compiler.buckets import Buckets
from rlx_jax.compiler.executable import Executable
from rlx_jax.generate import slot_plan
from rlx_jax.generate.decode import Sizes
from rlx_jax.generate.request_plan import request_sizes
from rlx_jax.generate.warm_up import warm_contexts, warm_requests
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.text.request_checks import check_buckets
from tests.small import compiles_of

VOCAB = 41
CONFIG = LlamaConfig.from_hf(
    {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "hidden_act": "silu",
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }
)  # fmt: skip
BUCKETS = {"prompt": [4, 8], "batch": [4], "context": [32]}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5]]
SAMPLERS = [
    rlx.Sampler(),
    rlx.Sampler(temperature=0.7),
    rlx.Sampler(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    rlx.Sampler(temperature=0.9, top_p=0.8),
    rlx.Sampler(repetition_penalty=1.5),
    rlx.Sampler(logit_bias={3: -np.inf, 7: 1.5}),
]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters, norms around 1."""
    rng = np.random.default_rng(seed)
    shapes = {k: s.shape for k, s in weight_specs(CONFIG).items()}
    return {k: (rng.normal(0, 0.3, s) + (len(s) == 1)).astype(np.float32) for k, s in shapes.items()}


def model(**buckets: Any) -> Any:
    """A tiny Llama with these buckets, and no programs yet."""
    profile = rlx.CompileProfile().replace(buckets=buckets)
    return rlx.CausalLM(Llama32Flow(CONFIG), weights(), profile=profile, max_positions=128)


@pytest.fixture(scope="module")
def plain() -> Any:
    """Without buckets."""
    return model()


@pytest.fixture(scope="module")
def warm() -> Any:
    """With buckets, warmed up: from here on a compile is an error."""
    lm = model(**BUCKETS, on_recompile="error")
    lm.warmup(samplers=SAMPLERS[0])
    return lm


def test_after_warm_up_no_request_compiles(plain: Any, warm: Any) -> None:
    """Lengths, rows, end tokens; the tokens are those of a model without buckets."""
    before, ends = warm.report().compiles, list(range(12))
    want = plain.generate(PROMPTS, max_new_tokens=9)

    def requests() -> None:
        assert [warm.generate([p], max_new_tokens=9) for p in PROMPTS] == [[row] for row in want]
        together = warm.generate(PROMPTS, max_new_tokens=9, stop=ends)
        assert together == [row[: 1 + next((i for i, t in enumerate(row) if t in ends), 9)] for row in want]
        assert list(warm.stream(PROMPTS[1], max_new_tokens=5)) == want[1][:5]
        begun = [[1, 2, i] for i in range(3)]
        assert warm.generate(begun, 5, share_prefix=True) == plain.generate(begun, 5)

    assert compiles_of(requests)[1] == []
    assert warm.report().compiles == before and warm.report().recompiles == 0


def test_a_long_prompt_is_read_in_chunks(plain: Any, warm: Any) -> None:
    """Rows that end in the first chunk, in the second, on an edge, and one whose first token ends it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (16, 3, 23)]
    got, compiled = compiles_of(lambda: warm.generate(prompts, max_new_tokens=7))
    assert got == plain.generate(prompts, max_new_tokens=7) and not compiled
    assert warm.generate(prompts, max_new_tokens=7, stop=[got[1][0]])[1] == got[1][:1]
    assert list(warm.stream(prompts[2], max_new_tokens=7)) == got[2]


@pytest.mark.slow
def test_warm_up_for_every_sampler(plain: Any) -> None:
    """Without a word about samplers."""
    lm = model(prompt=[4], batch=[4], context=[32], on_recompile="error")
    lm.warmup()
    rng = np.random.default_rng(0)
    for n, sampler in enumerate(SAMPLERS):
        prompts = [rng.integers(0, VOCAB, k).tolist() for k in rng.integers(1, 25, 3)]
        got, compiled = compiles_of(lambda: lm.generate(prompts, 6, sampler=sampler, seed=2**40 + n))  # noqa: B023
        assert not compiled
        assert got == plain.generate(prompts, 6, sampler=sampler, seed=2**40 + n)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda lm: lm.generate([[1]] * 5, 2), r"prompts: 5 rows, and buckets.batch = \[4\]"),
        (lambda lm: lm.generate([[1], [2] * 30], 3), r"prompts\[1\]: 30 tokens \+ 3 new, .* \[32\] slots"),
        (lambda lm: lm.logits([[1] * 9]), r"input 'input_ids' with 4 rows, length 9: no forward program .* \[4, 8\]"),
        (lambda lm: lm.prefill([[1] * 9]), r"input 'input_ids' with 4 rows, length 9, a cache of 32 slots"),
        (lambda lm: lm.prefill([[1]], max_len=100, logits="last"), "a cache of 100 slots: no prefill program"),
        (lambda lm: lm.logits([[1] * 3]), "warm-up ran .*, not forward, which `logits` runs"),
    ],
)
def test_a_surprise_is_an_error(warm: Any, request_: Any, message: str) -> None:
    """It names the input, the length and the buckets; nothing is compiled, and the model goes on."""
    before = warm.report()
    with pytest.raises(errors.RequestError, match=message):
        request_(warm)
    after = warm.report()
    assert (after.compiles, after.recompiles) == (before.compiles, before.recompiles)
    assert len(warm.generate([[1]], 2)[0]) == 2


def test_a_surprise_consumes_no_state(warm: Any) -> None:
    """`extend` with logits of all positions was not warmed up; `prefill` and `extend` with those of the last one were,
    one token included."""
    before = warm.report().compiles
    _, state = warm.prefill([[1, 2, 3], [4, 5, 6]], max_len=32, logits="last")
    for more in (1, 3, 8):
        _, state = warm.extend(state, np.ones((2, more), int), logits="last")
    assert warm.report().compiles == before and warm.report().recompiles == 0
    _, state = warm.prefill([[1, 2, 3]], logits="last")
    with pytest.raises(errors.RequestError, match='length 1, .*logits="last"'):
        warm.extend(state, [[4]])
    twin = copy.copy(state)
    logits, after = warm.extend(state, [[4, 5]], logits="last")
    assert logits.shape == (1, VOCAB) and after.lengths.tolist() == [5] and after.length.tolist() == [5]
    for used in (state, twin):
        with pytest.raises(errors.SessionStateError):
            warm.extend(used, [[4]])


def programs(sizes: Sizes, budget: int) -> set[tuple[str, int, int, int]]:
    """What a request runs: a program for each chunk of its prompt, and the loop where there is more than one token."""
    first, *rest = sizes.prefill_widths
    found = {("prefill", sizes.batch, first, sizes.cache_len)}
    found |= {("extend", sizes.batch, width, sizes.cache_len) for width in rest}
    return found | ({("loop", sizes.batch, 1, sizes.cache_len)} if budget > 1 else set())


sizes_of = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@settings(max_examples=100)
@given(sizes_of, sizes_of, st.one_of(st.just([]), sizes_of), st.integers(1, 20), st.data())
def test_warm_up_runs_what_any_request_needs(
    prompt: list[int], batch: list[int], context: list[int], new: int, data: st.DataObject
) -> None:
    """Whatever the buckets; requests that no cache of theirs holds are refused, all others find their programs."""
    sorted_sizes = [tuple(sorted({*sizes})) for sizes in (prompt, batch, context)]
    buckets = Buckets(sorted_sizes[0], sorted_sizes[1], sorted_sizes[2], "error")
    try:
        check_buckets(buckets, 64)
    except errors.ProfileError:
        return
    buckets = dataclasses.replace(buckets, context=warm_contexts(buckets, new, 64))
    run: set[tuple[str, int, int, int]] = set()
    for rows, length, slots, _ in warm_requests(buckets, SAMPLERS[:1]):
        run |= programs(request_sizes(buckets, [length] * rows, slots - length, 64), slots - length)
    for _ in range(10):
        rows = data.draw(st.integers(1, buckets.batch[-1]))
        longest = data.draw(st.integers(1, 60))
        budget = data.draw(st.integers(1, 64 - longest))
        try:
            sizes = request_sizes(buckets, [longest] * rows, budget, 64)
        except errors.RequestError as error:
            assert longest + budget > buckets.context[-1] and f"{longest} tokens + {budget} new" in str(error)
            continue
        assert sum(sizes.prefill_widths) >= longest and sizes.cache_len >= longest + budget and sizes.batch >= rows
        assert programs(sizes, budget) <= run


@pytest.mark.slow
def test_warm_up_covers_slots(plain: Any) -> None:
    """Of two classes: prompts of each width and of two chunks, rows that move, with log-probabilities and without."""
    lm = model(prompt=[4, 16], batch=[1, 2], context=[16, 64], on_recompile="error")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_plan, "choose_classes", lambda *_: {16: 0.5, 64: 0.5})
        lm.warmup(samplers=rlx.Sampler(), slots=4, logprobs=2)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 14, 16, 1, 23, 40, 9, 2)]
    budgets = [30, 12, 5, 2, 9, 20, 1, 60]
    want = [plain.generate(p, b, logprobs=2).tokens for p, b in zip(prompts, budgets, strict=True)]
    got, compiled = compiles_of(lambda: lm.generate([prompts[0], prompts[4]], 5, logprobs=2))  # they end in two chunks
    assert [row.tokens for row in got] == [want[0][:5], want[4][:5]] and not compiled
    got, compiled = compiles_of(lambda: lm.generate(prompts, budgets, slots=4))
    assert [*map(tuple, got)] == want and not compiled and lm.report().request.slot_classes == ((2, 16), (2, 64))
    got, compiled = compiles_of(lambda: lm.generate(prompts[::-1], budgets[::-1], logprobs=2, slots=4))
    assert [row.tokens for row in got] == want[::-1] and not compiled and lm.report().recompiles == 0
    for length in (1, 3, 14):
        rows, first = [[2] * length + prompt for prompt in prompts], lm.prefill([[2] * length], logits="last")[1]
        want = [plain.generate(row, 4) for row in rows]
        assert compiles_of(lambda: lm.generate(rows, 4, slots=4, share_prefix=True)) == (want, [])  # noqa: B023
        assert compiles_of(lambda: lm.generate(prompts, 4, slots=4, state=first)) == (want, [])  # noqa: B023
    assert lm.report().request.cached_tokens and lm.report().recompiles == 0


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["prompt", "model"])
def test_warm_up_covers_drafts_in_slots(plain: Any, drafts: str) -> None:
    """With a draft model there is one class."""
    lm = model(prompt=[4], batch=[2], context=[16, 64], on_recompile="error")
    options: Any = {"speculative": plain if drafts == "model" else drafts, "draft_tokens": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_plan, "choose_classes", lambda *_: {16: 0.5, 64: 0.5})
        lm.warmup(samplers=rlx.Sampler(), slots=2, **options)
    prompts = [[1, 2, 3] * 4, [5], [7, 8] * 12]
    want = [plain.generate(prompt, 9) for prompt in prompts]
    got, compiled = compiles_of(lambda: lm.generate(prompts, 9, slots=2, **options))
    assert got == want and not compiled and len(lm.report().request.slot_classes) == 1 + (drafts == "prompt")


@pytest.mark.slow
def test_what_compiles_after_warm_up_is_counted() -> None:
    """Without buckets for the context, the caches are those of the warm-up."""
    allowed = model(prompt=[4], batch=[1])
    allowed.warmup(max_new_tokens=4, samplers=rlx.Sampler())
    compiles = allowed.report().compiles
    assert len(allowed.generate([1, 2], 60)) == 60 and allowed.report().recompiles == 0
    assert allowed.report().compiles == compiles
    allowed.logits([[1]])  # a program, and the function that cuts its answer
    assert allowed.report().recompiles == 2 and "recompiles" in str(allowed.report())
    late = allowed.report().recompiled
    assert len(late) == 2 and "warm-up ran 'extend', 'prefill', not forward, which `logits` runs" in late[0]
    assert "a helper function: for float32[" in late[1]
    assert late[0] in " ".join(str(allowed.report()).split())
    allowed.warmup(max_new_tokens=100, samplers=rlx.Sampler())  # again, for longer answers
    assert len(allowed.generate([1, 2], 100)) == 100 and allowed.report().recompiles == 2


LATE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda lm: lm.generate([1], 3, temperature=1.0), "samplers=greedy ones, not samplers=random ones"),
    (lambda lm: lm.generate([1], 3, repetition_penalty=1.5), "not samplers=greedy ones with repetition_penalty"),
    (lambda lm: lm.generate([1], 3, logprobs=2), "warm-up was with logprobs=None, not logprobs=8"),
    (lambda lm: lm.generate([1], 3, speculative="prompt"), "warm-up was without speculative='prompt', draft_toke"),
    (lambda lm: lm.score([1, 2]), "length 4: warm-up was without scoring=True; warm up for that too"),
    (lambda lm: lm.logits([[1]]), "warm-up ran 'extend', 'prefill', not forward, which `logits` runs"),
]


@pytest.mark.slow
def test_what_warm_up_lacked_is_said() -> None:
    """By the argument of `warmup` that covers it, before anything is compiled; and once it is, nothing is refused."""
    closed = model(prompt=[4], batch=[1], context=[8], on_recompile="error")
    closed.warmup(samplers=rlx.Sampler())
    compiles = closed.report().compiles
    for call, message in LATE:
        with pytest.raises(errors.RequestError, match=re.escape(message)):
            call(closed)
    assert closed.report().compiles == compiles


@pytest.mark.slow
def test_every_kind_of_key_is_a_seed(plain: Any) -> None:
    """Whichever came first; whatever kind of key JAX makes by default, and with 64 bits."""
    sampler, seeds = SAMPLERS[1], [jax.random.PRNGKey(3), 3, jax.random.key(3)]
    want, *others = [plain.generate(PROMPTS, 5, sampler, seed=seed) for seed in seeds]
    with jax.enable_x64(True):  # programs that were compiled without them still serve
        others += [plain.generate(PROMPTS, 5, sampler, seed=3)]
    with jax.default_prng_impl("rbg"):
        others += [plain.generate(PROMPTS, 5, sampler, seed=3)]
        words = jax.random.PRNGKey(3)
    assert others == [want] * 4
    rbg = [plain.generate(PROMPTS, 5, sampler, seed=seed) for seed in (words, jax.random.key(3, impl="rbg"))]
    assert rbg[0] == rbg[1] != want


def test_what_stands_at_padding_is_not_read(plain: Any) -> None:
    """Whatever a tokenizer or a loss puts there."""
    left, mask = np.array([[-100, -1, 3, 1], [2**40, 5, 9, 2]]), np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    clean, lengths = left * mask, [2, 3]
    want = plain.logits(clean, attention_mask=mask)
    np.testing.assert_array_equal(plain.logits(left, attention_mask=mask), want)
    assert plain.generate(left, 4, attention_mask=mask) == plain.generate([[3, 1], [5, 9, 2]], 4)
    right = np.array([[3, 1, -100, VOCAB], [5, 9, 2, -1]])
    np.testing.assert_array_equal(plain.logits(right, lengths)[0, :2], want[0, 2:])
    _, state = plain.prefill(right, lengths, max_len=16)
    _, state = plain.extend(state, [[-1, -1], [4, -100]], [0, 1])
    assert state.lengths.tolist() == [2, 4]


def test_a_row_that_fails_leaves_the_others_alone(plain: Any) -> None:
    """The error names rows and steps, and has what there is; the model goes on."""
    want = plain.generate(PROMPTS, max_new_tokens=12)
    bad = next(t for t in want[0][2:11] if t not in want[1] + want[2] + PROMPTS[1] + PROMPTS[2])
    at = want[0].index(bad) + 1  # the logits behind it
    lm = copy.copy(plain)
    table = lm.model.params["model.embed_tokens.weight"].at[bad].set(np.nan)
    lm.model = lm.model.replace(params={**lm.model.params, "model.embed_tokens.weight": table})
    with pytest.raises(errors.NumericsError, match=rf"prompts\[0\], first after {at} new tokens;") as caught:
        lm.generate(PROMPTS, max_new_tokens=12)
    assert caught.value.rows == {0: at}
    assert caught.value.outputs == [want[0][:at], want[1], want[2]]
    pieces, stream = [], lm.stream(PROMPTS[0], max_new_tokens=12)
    with pytest.raises(errors.NumericsError, match=rf"prompts\[0\], first after {at} new tokens;") as caught:
        for piece in stream:
            pieces.append(piece)
    assert caught.value.outputs == [want[0][:at]] == [pieces]
    assert lm.generate(PROMPTS[1], max_new_tokens=12) == want[1]
    with pytest.raises(errors.NumericsError) as caught:
        lm.generate([PROMPTS[1], [bad], PROMPTS[2]], max_new_tokens=3)
    assert caught.value.rows == {1: 0} and caught.value.outputs == [want[1][:3], [], want[2][:3]]


def interrupt(patch: pytest.MonkeyPatch, at: int, call: Callable[[], Any], first: bool = True) -> None:
    """Interrupt a call before (`first`) or behind its program number `at`."""
    run, calls = Executable.run, iter(range(100))

    def interrupted(self: Executable, *arguments: Any) -> Any:
        now = next(calls) == at
        if now and first:
            raise KeyboardInterrupt
        found = run(self, *arguments)
        if now:
            raise KeyboardInterrupt
        return found

    with patch.context() as inner:
        inner.setattr(Executable, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_an_interrupt_leaves_the_model_as_it_was(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the prompt is read or a block is computed; the next request is right. Before `extend` began, the state is
    as it was; after, it is gone, and says so."""
    want = plain.generate(PROMPTS, max_new_tokens=14)
    for at in (0, 2):
        interrupt(monkeypatch, at, lambda: plain.generate(PROMPTS, max_new_tokens=14))
        assert plain.generate(PROMPTS, max_new_tokens=14) == want
    _, state = plain.prefill([[1, 2]], max_len=8)
    logits = np.asarray(plain.extend(plain.prefill([[1, 2]], max_len=8)[1], [[3]])[0])
    interrupt(monkeypatch, 0, lambda: plain.extend(state, [[3]]))
    np.testing.assert_array_equal(plain.extend(state, [[3]])[0], logits)
    _, other = plain.prefill([[1, 2]], max_len=8)
    interrupt(monkeypatch, 0, lambda: plain.extend(other, [[3]]), first=False)
    with pytest.raises(errors.SessionStateError):
        plain.extend(other, [[3]])
