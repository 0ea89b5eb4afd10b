"""Prefixes that prompts share, prefilled once within a budget, and given states: rows equal the same prompt alone."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.prefix_cache import Prefix, PrefixCache, shared_prefixes
from rlx_jax.weights.tensor_file import SafetensorsFile
from tests import divided
from tests.divided import V
from tests.small import profile

RNG = np.random.default_rng(3)
SYSTEM, EXAMPLES, OTHER = (tuple(RNG.integers(0, V, n).tolist()) for n in (80, 70, 90))
TAILS = [tuple(RNG.integers(0, V, n).tolist()) for n in (1, 9, 4, 12, 7, 2, 5, 3)]
PROMPTS = [list((SYSTEM, SYSTEM + EXAMPLES, (), SYSTEM)[i % 4] + tail) for i, tail in enumerate(TAILS)]
NEW, SIZE = 5, 2**22
MORE = [pytest.param(f, marks=pytest.mark.soak) for f in ("mixtral", "mistral", "gpt_oss", "mamba2", "gpt2")]
LLAMA, RINGS, RECURRENT = (pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "gemma2", "qwen35"))
FEW = [LLAMA, RECURRENT, pytest.param("gemma2", marks=pytest.mark.soak), *MORE]
"""What is checked of rings too by `test_prefixes_are_prefilled_once`, here not."""
OPTIONS: dict[str, Any] = {
    "": {}, "int8 cache": {"precision": {"kv": "int8"}}, "packed": {"precision": {"weights": "int8"}},
}  # fmt: skip


@functools.cache
def compiled(family: str) -> Any:
    """The model whose programs all requests of a family share."""
    return rlx.CausalLM(divided.recipe(family), divided.weights(family)).model


def make(family: str, size: Any = SIZE, options: str = "", **changes: Any) -> Any:
    if not (options or changes):
        return rlx.CausalLM(compiled(family), prefix_cache=size)
    made = profile(**OPTIONS[options]) if options else None
    arguments = {"weights": divided.weights(family), "prefix_cache": size, "profile": made} | changes
    return rlx.CausalLM(divided.recipe(family), **arguments)


lm = functools.cache(make)


@functools.cache
def one_size(family: str, options: str) -> Any:
    """The model without prefixes, whose programs have one size for every prompt alone."""
    buckets = {"batch": [1], "prompt": [192], "context": [224]}
    return make(family, 0, profile=profile(buckets=buckets, **OPTIONS[options]))


@functools.cache
def alone(family: str, options: str, prompt: tuple[int, ...], seed: int = 0) -> Any:
    """The answer of a call for a prompt alone."""
    return one_size(family, options).generate([list(prompt)], NEW, seed=seed, temperature=0.8 * seed, logprobs=1)[0]


def check(family: str, options: str, prompts: list[Any], slots: int, model: Any = None) -> Any:
    """Generate in slots, compare with each prompt alone, and return the report."""
    model = lm(family, SIZE, options) if model is None else model
    seeds = [i % 2 for i in range(len(prompts))]
    samplers = [rlx.Sampler(temperature=0.8 * seed) for seed in seeds]
    rows = model.generate([list(p) for p in prompts], NEW, samplers, seed=seeds, logprobs=1, slots=slots)
    report = model.report().request
    # Of qwen35 3.2e-5 was seen, and 1.5e-5 between score and generate.
    limit = 5e-5 if family in ("qwen35", "mamba2") else 2e-5
    for row, prompt, seed in zip(rows, prompts, seeds, strict=True):
        want = alone(family, options, tuple(prompt), seed)
        assert row.tokens == want.tokens
        np.testing.assert_allclose(row.token_logprobs, want.token_logprobs, atol=limit)
    return report


def check_twice(family: str, options: str = "") -> None:
    """The first call prefills each prefix once, and the second one none of them; nothing compiles then."""
    model, total = lm(family, SIZE, options), sum(map(len, PROMPTS))
    model._prefixes.clear()
    first, second = (check(family, options, PROMPTS, 3) for _ in range(2))
    assert first.read_tokens == second.read_tokens + len(SYSTEM + EXAMPLES) and second.compiled == 0
    assert second.cached_tokens == 4 * len(SYSTEM) + 2 * len(SYSTEM + EXAMPLES) and second.prompt_tokens == total
    assert model._prefixes.nbytes <= SIZE


@pytest.mark.parametrize("family", ["llama", RINGS, RECURRENT, *MORE])
def test_prefixes_are_prefilled_once(family: str) -> None:
    check_twice(family)


@pytest.mark.soak
def test_prefixes_over_packed_weights() -> None:
    check_twice("llama", "packed")


@pytest.mark.slow
def test_a_cache_that_rounds_shares_no_prefix() -> None:
    """The rest of a prompt would read rounded keys, and the prompt alone unrounded ones."""
    assert check("llama", "int8 cache", PROMPTS, 3).read_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("family", FEW)
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([(), SYSTEM, SYSTEM + EXAMPLES, OTHER]), st.sampled_from(TAILS)), min_size=2,
             max_size=8),
    st.integers(1, 4), st.sampled_from([0, 2**17, SIZE]),
)  # fmt: skip
def test_rows_equal_prompts_alone(family: str, parts: list[Any], slots: int, size: int) -> None:
    """For any prompts, numbers of slots and budgets, with prefixes of earlier calls."""
    lm(family, SIZE, "").prefix_cache = size
    check(family, "", [start + tail for start, tail in parts], slots)
    assert lm(family, SIZE, "")._prefixes.nbytes <= size


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.soak), pytest.param("qwen35", marks=pytest.mark.slow)]
)
def test_over_a_mesh(family: str) -> None:
    model = make(family, mesh=divided.mesh("data tensor", 4))
    assert check(family, "", PROMPTS, 4, model).cached_tokens > 0


@pytest.mark.slow
def test_the_size_decides() -> None:
    """0 shares none, None drops prefixes at the end of a call, and a budget drops the one that was used first."""
    model, calls = lm("llama"), []
    groups = [[list(start + tail) for tail in TAILS[:3]] for start in (SYSTEM, OTHER)]
    want = [model.generate(group, NEW, share_prefix=False, slots=3) for group in groups]
    assert model.report().request.cached_tokens == 0
    model.prefix_cache = SIZE
    model.generate(groups[0], NEW, slots=3)
    ((ids, prefix),) = model._prefixes.entries.items()
    assert ids == SYSTEM
    for size in (0, None, prefix.nbytes, "1MiB"):
        model.prefix_cache = size
        for i in (0, 1, 0):
            assert model.generate(groups[i], NEW, slots=3) == want[i]
            calls.append(model.report().request.cached_tokens // len(SYSTEM))
    assert calls == [0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    assert model.prefix_cache == 2**20
    short = [[1, 2, 3, tail] for tail in range(3)]
    rows = model.generate(short, NEW, slots=2)
    assert model.report().request.cached_tokens == 0
    assert model.generate(short, NEW, slots=2, share_prefix=True) == rows
    assert model.report().request.cached_tokens == 6


@pytest.mark.slow
def test_an_iterator_shares_prefixes() -> None:
    model = lm("llama")
    model.prefix_cache = SIZE
    got = dict(model.generate_iter(PROMPTS, NEW, slots=3))
    assert [got[i] for i in range(len(got))] == [list(alone("llama", "", tuple(p)).tokens) for p in PROMPTS]
    assert model.report().request.cached_tokens > 0


@pytest.mark.slow
def test_other_parameters() -> None:
    """A prefix of other parameters is neither used nor accepted."""
    model = make("llama")
    model.generate(PROMPTS, NEW, slots=3)
    named = model.prefix(SYSTEM)
    changed = make("llama").model.replace({name: 1.1 * array for name, array in model.model.params.items()})
    want = rlx.CausalLM(changed).generate(PROMPTS, NEW)
    model.model = model.model.replace(changed.params)
    assert model.generate(PROMPTS, NEW, slots=3) == want
    assert model.report().request.read_tokens > sum(map(len, TAILS)) + len(SYSTEM)
    with pytest.raises(errors.SessionStateError, match="or other parameters"):
        model.generate([[1]], NEW, state=named)


def test_named_prefixes(tmp_path: Path) -> None:
    """Used as a state and by full prompts, from a file, until it is released; of another model it is refused."""
    model = make("llama", None)
    prompts = [[*SYSTEM, *tail] for tail in TAILS]
    want, file = [list(alone("llama", "", tuple(p)).tokens) for p in prompts], tmp_path / "system.safetensors"
    named = model.prefix(list(SYSTEM))
    assert model.prefix(SYSTEM) is named and "80 tokens" in repr(named)
    model.save_prefix(named, file)  # before anything else ran, as what ran does not matter to the model that loads it
    assert model.generate([*map(list, TAILS)], NEW, state=named, slots=3) == want
    assert model.report().request.cached_tokens == len(SYSTEM) * len(TAILS)
    assert model.generate(prompts[:3], NEW, slots=3) == want[:3]
    assert model.report().request.cached_tokens == 3 * len(SYSTEM)
    with SafetensorsFile(file) as tensors:
        assert {"ids", "identity"} < tensors.tensors.keys()
    named.release()
    with pytest.raises(errors.SessionStateError, match="no state any more"):
        model.generate([[1]], NEW, state=named)
    other = make("llama", named.nbytes)
    loaded = other.load_prefix(file)
    assert rlx.CausalLM(divided.recipe("llama"), divided.weights("llama")).load_prefix(file).ids == loaded.ids
    assert other.generate([*map(list, TAILS)], NEW, state=loaded, slots=3) == want
    with pytest.raises(errors.RequestError, match="does not fit prefix_cache"):
        other.prefix(OTHER)
    weights = {name: array * 2 for name, array in divided.weights("llama").items()}
    # An array of an even number of values, so that a sum over its bits would be the same.
    name = next(name for name, array in weights.items() if "down_proj" in name)
    negative = divided.weights("llama") | {name: -divided.weights("llama")[name]}
    for field, changes in (
        ("dtype", {"profile": profile(precision={"kv": "int8"})}),
        ("max_positions", {"max_positions": 200}),
        ("profile", {"profile": profile(layers={"roll": "scan"})}),
        ("weights", {"weights": weights}),
        ("weights", {"weights": negative}),
    ):
        wrong = make("llama", **changes)
        with pytest.raises(errors.VersionMismatchError, match=f"another {field}"):
            wrong.load_prefix(file)
    wrong = rlx.CausalLM(divided.recipe("llama", rms_norm_eps=0.5), divided.weights("llama"))
    with pytest.raises(errors.VersionMismatchError, match="another model"):
        wrong.load_prefix(file)


@pytest.mark.parametrize("family", FEW)
def test_scores_after_a_prefix(family: str) -> None:
    """Contexts that begin with a named prefix are scored as whole texts are; shorter ones and other texts are, too."""
    model, plain = make(family, None), lm(family)
    plain.prefix_cache = None
    tails = [*TAILS, TAILS[0], TAILS[1]]
    texts: list[Any] = [((*SYSTEM, *tail), tails[i - 1]) for i, tail in enumerate(tails)]
    texts += [((*SYSTEM, *TAILS[1]), (last,)) for last in (1, 2, 1)]  # the same text but for its last token
    texts += [(SYSTEM, TAILS[1]), (OTHER, TAILS[2]), [*SYSTEM, *TAILS[3]], (SYSTEM[:-1], SYSTEM[-1:])]
    want = plain.score(texts)
    named = model.prefix(SYSTEM)
    got = model.score(texts)
    assert [(s.tokens, s.greedy) for s in got] == [(s.tokens, s.greedy) for s in want]
    for one, other in zip(got, want, strict=True):
        # A recurrent state rounds otherwise in other chunks.
        atol = 2e-4 if family in ("qwen35", "mamba2") else 1e-5
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=atol)
    report = model.report().request
    assert report.cached_tokens == plain.report().request.cached_tokens + 9 * len(SYSTEM)
    named.release()
    model.score(texts)
    assert model.report().request.cached_tokens == plain.report().request.cached_tokens


def test_scores_within_buckets() -> None:
    """A named prefix changes nothing where other programs than those of the buckets are errors."""
    buckets = {"prompt": [128], "batch": [1], "context": [128], "on_recompile": "error"}
    model, text = make("llama", profile=profile(buckets=buckets)), ((*SYSTEM, *TAILS[1]), TAILS[2])
    want = model.score(text)
    model.prefix(SYSTEM)
    assert model.score(text) == want


def test_a_named_prefix_is_not_replaced() -> None:
    """By a prefix of the same tokens that a request began to prefill before."""
    model = make("llama")
    named = model.prefix(SYSTEM)
    late = Prefix(SYSTEM, named.nbytes, named.cache_len, named.params)
    assert model._prefixes.store(late, dict(named.arrays)) and late.arrays is named.arrays
    assert model._prefixes.longest(SYSTEM) is named
    assert model.generate([[1]], 2, state=named) == model.generate([[*SYSTEM, 1]], 2)


ids = st.lists(st.integers(0, 2), max_size=6).map(tuple)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), ids, st.integers(0, 6), st.booleans()),
        st.tuples(st.sampled_from(["longest", "remove"]), ids, st.just(0), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(steps, st.integers(0, 12))
def test_values_equal_a_dictionary(steps: list[tuple[str, tuple[int, ...], int, bool]], budget: int) -> None:
    """A dictionary from sequences to prefixes, the least recently used first; evicted ones have no state."""
    cache = PrefixCache(budget)
    entries: dict[tuple[int, ...], Prefix] = {}
    for step, key, nbytes, named in steps:
        if step == "store":
            prefix = Prefix(key, nbytes, 64, cache=cache if named else None)
            old, others = entries.get(key), [entry for k, entry in entries.items() if k != key]
            if old is not None and old.is_named:
                continue  # `prefix` returns the old one
            fits = nbytes + sum(entry.nbytes for entry in others if entry.is_named) <= budget
            assert cache.store(prefix, {}) == fits
            if fits:
                gone = [] if old is None else [old]
                for entry in [entry for entry in others if not entry.is_named]:
                    if nbytes + sum(entry.nbytes for entry in others) <= budget:
                        break
                    others.remove(entry)
                    gone.append(entry)
                assert all(entry.arrays is None for entry in gone)
                entries = {entry.ids: entry for entry in (*others, prefix)}
        elif step == "longest":
            best = max((k for k in entries if key[: len(k)] == k), key=len, default=None)
            if best is not None:
                entries[best] = entries.pop(best)
            assert cache.longest(key) is (None if best is None else entries[best])
        elif key in entries:
            cache.remove(entries.pop(key))
        assert [*cache.entries.items()] == [*entries.items()]
        assert all(entry.arrays is not None for entry in entries.values())
        assert cache.nbytes == sum(entry.nbytes for entry in entries.values()) <= budget
        assert cache.named_bytes == sum(entry.nbytes for entry in entries.values() if entry.is_named)


@given(st.lists(ids, max_size=12), st.integers(0, 4))
def test_shared_prefixes_equal_all_pairs(rows: list[tuple[int, ...]], min_len: int) -> None:
    """The longest common prefix of every two rows, and the rows that begin with it."""
    lengths = {(i, j): naive_length(rows[i], rows[j]) for i in range(len(rows)) for j in range(i)}
    want = {rows[i][:n] for (i, _), n in lengths.items() if n >= max(min_len, 1)}
    got = {rows[numbers[0]][:length]: sorted(numbers) for length, numbers in shared_prefixes(rows, min_len)}
    assert got == {prefix: [i for i, row in enumerate(rows) if row[: len(prefix)] == prefix] for prefix in want}


def naive_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


SHARED = [3, 1, 4, 1, 5, 9]
ENDS = [[2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [11]]
SHARING = [SHARED + end for end in ENDS]
NEW_TOKENS = 7
DRAWN = rlx.Sampler(0.9, top_k=25, repetition_penalty=1.4)
FAMILIES = ["mistral", pytest.param("qwen35", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FAMILIES)
def resumable(request: pytest.FixtureRequest) -> Any:
    """A model of a family, with programs of 6 rows that read up to 4 tokens."""
    profile = rlx.CompileProfile().replace(buckets={"batch": [6], "prompt": [4], "context": [32]})
    return rlx.CausalLM(divided.recipe(request.param), divided.weights(request.param), profile=profile)


def counts(resumable: Any) -> tuple[int, int]:
    """Tokens that were read for the last request, and those that were not."""
    report = resumable.report().request
    assert report.prompt_tokens == report.read_tokens + report.cached_tokens
    return report.read_tokens, report.cached_tokens


@pytest.mark.slow
def test_behind_a_state(resumable: Any) -> None:
    """One row for all prompts, or a row for each, ragged: tokens, draws and answers are those of whole prompts. The
    state is as it was."""
    whole, every = resumable.generate(SHARING, NEW_TOKENS), sum(map(len, SHARING))
    drawn = resumable.generate(SHARING, NEW_TOKENS, DRAWN, seed=7, n=2)
    _, one = resumable.prefill([SHARED])
    block, lengths = np.zeros((3, 4), int), np.array([4, 2, 3])
    for row, count in enumerate(lengths):
        block[row, :count] = SHARED[:count]
    _, many = resumable.prefill(block, lengths)
    _, many = resumable.extend(many, [[SHARED[n]] for n in lengths])
    rests = [prompt[n + 1 :] for prompt, n in zip(SHARING, lengths, strict=True)]
    for state, prompts, held in ((one, ENDS, 3 * len(SHARED)), (many, rests, int(lengths.sum()) + 3)):
        before = state.ids
        assert resumable.generate(prompts, NEW_TOKENS, state=state) == whole
        assert counts(resumable) == (every - held, held)
        assert resumable.generate(prompts, NEW_TOKENS, DRAWN, seed=7, n=2, state=state) == drawn
        if "qwen35" in repr(resumable):  # in the slow tests
            assert resumable.generate(prompts, NEW_TOKENS, speculative="prompt", draft_tokens=3, state=state) == whole
        assert state.ids == before
    assert many.ids == [SHARED[: n + 1] for n in lengths] and one.copy().ids == [SHARED]
    assert list(resumable.stream(ENDS[1], NEW_TOKENS, state=one)) == whole[1]
    logits, _ = resumable.extend(one, [ENDS[0]], logits="last")
    assert int(np.argmax(logits[0])) == whole[0][0]
    with pytest.raises(errors.SessionStateError, match="consumed"):
        resumable.generate([[1]], NEW_TOKENS, state=one)


def test_a_shared_beginning_is_read_once(resumable: Any) -> None:
    """It is repeated for the rows, whatever they go on with; without one nothing changes."""
    every = sum(map(len, SHARING))
    drawn = [{"sampler": DRAWN, "seed": 7, "n": 2}] if "qwen35" in repr(resumable) else []  # in the slow tests
    for options in ({}, *drawn):
        assert resumable.generate(SHARING, NEW_TOKENS, share_prefix=True, **options) == resumable.generate(
            SHARING, NEW_TOKENS, **options
        )
        assert counts(resumable) == (every, 0)
    resumable.generate(SHARING, NEW_TOKENS, share_prefix=True)
    assert counts(resumable) == (every - 2 * len(SHARED), 2 * len(SHARED))
    alike = [SHARED, SHARED, SHARED[:3]]  # the last token of each is read
    assert resumable.generate(alike, NEW_TOKENS, share_prefix=True) == resumable.generate(alike, NEW_TOKENS)
    resumable.generate(alike, NEW_TOKENS, share_prefix=True)
    assert counts(resumable) == (len(SHARED) * 2 + 3 - 4, 4)
    apart = [[1, 2], [2, 2]]
    assert resumable.generate(apart, NEW_TOKENS, share_prefix=True) == resumable.generate(apart, NEW_TOKENS)
    assert resumable.generate([], NEW_TOKENS, share_prefix=True) == []


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
    resumable: Any = rlx.CausalLM(flow, weights)
    _, state = resumable.prefill([[4, 5, 6]])
    with pytest.raises(errors.TokenIdError):
        resumable.generate([[99]], 3, state=state)  # which leaves the state
    assert resumable.generate([[1, 2]], 3, state=state) == whole == resumable.generate([[4, 5, 6, 1, 2]], 3)
    every = resumable.model.as_program("prefill")
    outputs, _ = every(np.array([[4, 5, 6]], np.int32), lengths=np.array([3]), state=every.init_state(1, 8))
    assert sorted(outputs) == sorted(resumable.model.output_names)
