"""Many prompts in slots: every row equals the same request alone, for any order, number of slots and time of refill."""

import contextlib
import functools
import itertools
import os
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.compiler.executable import HelperCall
from rlx_jax.generate import slot_plan
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.scheduler import Scheduler, SlotJob
from rlx_jax.generate.slots import open_slots, prepare_programs, slot_inputs
from rlx_jax.io.garbage import paused_gc
from rlx_jax.text.request_checks import crop
from tests import divided
from tests.divided import V

RECURRENT = ("qwen35", "mamba2")
ARCHETYPES = ("llama", "gemma2", "qwen35", "mixtral", "edited", "int8")
"""Full caches, rings of 5 tokens with soft caps, recurrent states, experts, an edited model, packed weights."""
BAD = 7
"""The embedding of this id is NaN in `broken` models; no sampler of a test with them chooses it."""
MAX_TOKENS, LOGPROBS = 9, 2
JOB_LISTS = int(os.environ.get("RLX_JOB_LISTS", "5"))
"""Random schedules of each family; `make soak` runs 200."""
SAMPLERS = (
    rlx.Sampler(),
    rlx.Sampler(temperature=1.0),
    rlx.Sampler(temperature=0.7, top_k=5, repetition_penalty=1.5),
    rlx.Sampler(temperature=1.3, top_p=0.9, min_p=0.01, logit_bias={3: 4.0}),
    rlx.Sampler(repetition_penalty=1.7, logit_bias={1: -np.inf}),
)


@functools.cache
def lm(family: str, one_size: bool = False) -> Any:
    """`one_size`: with one size of program for every prompt that is generated from alone."""
    base = family if family in divided.DECODERS else "llama"
    tables: dict[str, Any] = {"precision": {"weights": "int8"}} if family == "int8" else {}
    tables |= {"buckets": {"batch": [1], "prompt": [40], "context": [64]}} if one_size else {}
    profile = rlx.CompileProfile().replace(**tables)
    recipe, weights = divided.recipe(base), divided.weights(base)
    recipe = recipe.at("layers.*.self_attn").scale(0.5) if family == "edited" else recipe
    return rlx.CausalLM(recipe, weights, profile=profile)


@functools.cache
def broken(family: str) -> Any:
    """The model with a NaN in the embedding of BAD, if it is no part of the head and in floating point."""
    model = lm(family).model
    name = next(name for name in model.params if "embed" in name)
    if family == "int8" or not any("head" in name for name in model.params):
        return lm(family)
    return rlx.CausalLM(model.replace({**model.params, name: model.params[name].at[BAD].set(jnp.nan)}))


def same(got: rlx.Completion, want: rlx.Completion) -> None:
    """The same tokens, and log-probabilities up to rounding: of a recurrence 1.2e-5 was seen."""
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.token_logprobs, want.token_logprobs, atol=2e-5)
    assert [len(top) for top in got.top] == [len(top) for top in want.top]


KINDS = tuple(replace(SAMPLERS[i], logit_bias={BAD: -np.inf}) for i in (0, 1, 2))


def options(budget: int, kind: int, seed: int, stop: tuple[int, ...], draw: int = 0) -> RowOptions:
    return RowOptions(budget, KINDS[kind], stop, (), seed, draw)


@functools.cache
def plans(family: str) -> Any:
    """Slots of several classes, which no job changes, so that all examples of a family have the same programs."""
    row = options(24, 2, 0, ())
    model = broken(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_plan, "CONTEXT_BUCKET", 16)
        patch.setattr(slot_plan, "choose_classes", lambda *_: {16: 0.4, 32: 0.4, 64: 0.2})
        return slot_plan.plan_slots(model._lm, [SlotJob(0, [0] * 40, row)] * 9, LOGPROBS, 6)


def test_inputs_of_several_jobs_are_those_of_each() -> None:
    """A fill of three rows has a sampler, a seed, stop ids and a budget for each."""
    jobs = [SlotJob(i, [i + 1], options(5 + i, i, i, (i,))) for i in range(3)]
    every, *each = (slot_inputs(plans("llama")[0], part, len(part)) for part in (jobs, *([job] for job in jobs)))
    jax.tree.map(lambda rows, *row: np.testing.assert_array_equal(rows, np.concatenate(row)), every, *each)


@functools.cache
def alone_without(
    family: str, ids: tuple[int, ...], budget: int, kind: int, seed: int, stop: tuple[int, ...],
    bias: tuple[tuple[int, float], ...] = (),
) -> Any:  # fmt: skip
    """The answer to a prompt of a call for it alone, by a model whose weights are all finite; `bias` is added."""
    sampler = replace(KINDS[kind], logit_bias={BAD: -np.inf, **dict(bias)})
    return lm(family, one_size=True).generate([list(ids)], budget, sampler, list(stop), seed, logprobs=LOGPROBS)[0]


@functools.cache
def rounded_otherwise(family: str, seed: int) -> Any:
    """The model with weights that differ by half of their last bit, or not."""
    rng, model = np.random.default_rng(seed), lm(family).model
    factors = {k: 1 + 2.0**-24 * rng.integers(-1, 2, v.shape) for k, v in model.params.items() if v.dtype.kind == "f"}
    changed = {k: np.asarray(np.asarray(model.params[k]) * f, np.float32) for k, f in factors.items()}
    return rlx.CausalLM(model.replace({**model.params, **changed}))


def rounding(family: str, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return by how much the last bit of the weights changes log-probabilities after each token, `[S, V]`."""
    padded = [ids + [0] * (64 - len(ids))]
    models = [lm(family), *(rounded_otherwise(family, seed) for seed in range(4))]
    logits = np.stack([np.asarray(model.logits(padded)[0], np.float64) for model in models])[:, : len(ids)]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.abs(log_probs[1:] - log_probs[0]).max(0)


def check_answer(family: str, job: Any, ids: list[int], log_probs: list[float]) -> None:
    """An answer in slots is that of the request alone, up to rounding.

    Log-probabilities differ by 1e-5, or by twice what the last bit of the weights changes: what is read of a recurrent
    state may nearly cancel before it is normalised. A tie, two tokens that are nearer than that, may go either way: the
    tokens are then those of the request alone with a logit bias of so much.
    """
    prompt, want = [*job[0]], alone_without(family, *job)
    if tuple(ids) != want.tokens:
        at = next((i for i, (one, other) in enumerate(zip(ids, want.tokens, strict=False)) if one != other), None)
        assert at is not None, "an answer begins with the other one"
        limits = 1e-5 + 2 * rounding(family, prompt + ids[:at])[-1]
        chosen, other = ids[at], want.tokens[at]
        want = alone_without(family, *job, ((chosen, float(limits[chosen])), (other, -float(limits[other]))))
    assert tuple(ids) == want.tokens
    differences = np.abs(np.subtract(log_probs, want.token_logprobs))
    if differences.max() > 1e-5:
        limits = rounding(family, prompt + ids)[len(prompt) - 1 :][np.arange(len(ids)), ids]
        np.testing.assert_array_less(differences, 1e-5 + 2 * limits)


@pytest.mark.slow
def test_answers_differ_by_rounding_alone() -> None:
    """`check_answer` accepts neither another token, a missing one, nor a log-probability that is off by 3e-5."""
    job = ((1, 2, 3), 6, 0, 0, ())
    want = alone_without("llama", *job)
    ids, log_probs = [*want.tokens], [*want.token_logprobs]
    check_answer("llama", job, ids, log_probs)
    wrong = ([*ids[:3], want.top[3][1][0], *ids[4:]], log_probs), (ids[:5], log_probs[:5])
    for each in (*wrong, (ids, [log_probs[0] + 3e-5, *log_probs[1:]])):
        with pytest.raises(AssertionError):
            check_answer("llama", job, *each)


long_prompt = st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(0, V - 1), min_size=n, max_size=n)).map(tuple)
long_job = st.tuples(
    long_prompt, st.integers(1, 24), st.integers(0, 2), st.integers(0, 3),
    st.lists(st.integers(0, V - 1), max_size=2).map(tuple),
)  # fmt: skip


def check_schedule(family: str, jobs: list[Any], times: list[tuple[int, int]]) -> int:
    """Job i is submitted before step `times[i][0]`, and cancelled so many steps later; later than 9 is never.

    Jobs with BAD fail, if the model is broken, and change nothing for the others. Returns how often rows moved.
    """
    device = open_slots(plans(family))
    scheduler, answers, moves = Scheduler(device, lambda *_: None), dict[int, Any](), 0
    for step in itertools.count():
        for i, (ids, *rest) in enumerate(jobs):
            if times[i][0] == step:
                scheduler.submit(SlotJob(i, ids, options(*rest)))
            if i not in answers and times[i][1] <= 9 and sum(times[i]) == step:
                scheduler.cancel(i)
                answers[i] = None
        before = {id(a): slot for slot, a in scheduler.running.items()}
        ended = scheduler.step()
        moves += sum(before.get(id(a), slot) != slot for slot, a in scheduler.running.items())
        answers |= {job.index: job for job in ended}
        if len(answers) == len(jobs):
            break
    for i, answer in ((i, answer) for i, answer in answers.items() if answer is not None):
        if broken(family) is not lm(family) and BAD in jobs[i][0]:
            assert answer.new.failed and not answer.new.ids
            continue
        assert not answer.new.failed
        check_answer(family, jobs[i], answer.new.ids, answer.new.log_probs)
    return moves


@pytest.mark.slow
def test_rows_move_to_longer_caches() -> None:
    """Jobs in an order of their own, with rows that outgrow two caches, one cancelled, and one that fails."""
    rng = np.random.default_rng(0)
    sizes = [(3, 24), (12, 24), (5, 2), (40, 20), (1, 24), (14, 9), (30, 24), (9, 1), (2, 5), (20, 24)]
    jobs = [(tuple(rng.integers(8, V, n).tolist()), budget, i % 3, i, ()) for i, (n, budget) in enumerate(sizes)]
    jobs[8] = ((BAD, 3), *jobs[8][1:])
    times = [(i // 3, 1 if i == 6 else 99) for i in range(len(jobs))]
    assert check_schedule("llama", jobs, times) >= 3
    compiled = broken("llama").report().compiles
    assert check_schedule("llama", jobs[::-1], times) >= 1
    assert broken("llama").report().compiles == compiled


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.soak, *([pytest.mark.slow] if f in ("llama", "qwen35") else [])])
        for f in (*ARCHETYPES, "mamba2")
    ],
)
@settings(max_examples=JOB_LISTS, deadline=None)
@given(jobs=st.lists(long_job, min_size=10, max_size=20), data=st.data())
def test_rows_of_any_schedule_equal_requests_alone(family: str, jobs: list[Any], data: st.DataObject) -> None:
    times = st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 3, *[99] * 9]))
    check_schedule(family, jobs, data.draw(st.lists(times, min_size=len(jobs), max_size=len(jobs))))


def job_list(count: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, V, n).tolist() for n in rng.integers(1, 17, count)]
    return prompts, rng.integers(1, MAX_TOKENS + 1, count).tolist()


def test_order_progress_and_compiles() -> None:
    """Order does not matter, nothing compiles the second time, and the callback gets every answer."""
    prompts, budgets = job_list(7)
    model = lm("llama")
    calls: list[Any] = []
    want = [model.generate([p], b)[0] for p, b in zip(prompts, budgets, strict=True)]
    assert model.generate(prompts, budgets, slots=2) == want
    compiled = model.report().compiles
    assert model.generate(prompts[::-1], budgets[::-1], slots=2, progress=calls.append) == want[::-1]
    report = model.report()
    assert report.compiles == compiled and report.request.compiled == 0
    assert report.request.slots == 2 and report.request.new_tokens == sum(budgets)
    assert calls[-1].done == calls[-1].total == 7 and calls[-1].new_tokens == sum(budgets)
    assert "7 of 7 answers" in str(calls[-1]) and calls[-1].seconds_left == 0


@pytest.mark.parametrize(
    "family, options",
    [("llama", {"logprobs": 2}), pytest.param("qwen35", {"sampler": SAMPLERS[2]}, marks=pytest.mark.slow)],
)
def test_fills_compile_nothing(family: str, options: dict[str, Any]) -> None:
    """What a fill runs was compiled with the programs of the model."""
    model, chosen = lm(family), options.get("sampler", rlx.Sampler())
    jobs = [SlotJob(i, [1] * n, RowOptions(3, chosen, (), (), 5, i)) for i, n in enumerate((3, 7, 7))]
    plans = slot_plan.plan_slots(model._lm, jobs, options.get("logprobs"), 3)
    device, programs = open_slots(plans), model.model.programs
    programs.cancel_compiling()  # what requests of other tests prepared and did not need
    device.prepare(jobs)
    count = programs.helpers.num_inserted + programs.executables.num_inserted + len(programs.compiling)
    device.fill(0, [*enumerate(jobs[:1])])
    device.decode([0])
    assert not programs.compiling
    assert programs.helpers.num_inserted + programs.executables.num_inserted == count


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_failures_of_threads_end_with_their_request(error: type[BaseException]) -> None:
    """What threads have not begun is dropped, and the next request compiles its programs."""
    programs = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama")).model.programs
    failed, queued = Future[Any](), Future[Any]()
    programs.compiling = {"a": failed, "b": queued}
    failed.set_exception(error())
    with pytest.raises(error):
        programs.compiled("a", lambda: lambda: 1)
    assert queued.cancelled() and not programs.compiling
    programs.compiling["a"] = failed
    prepare_programs(programs, [], [])
    assert programs.compiled("a", lambda: lambda: 1) == 1


@pytest.mark.parametrize("error", [MemoryError, errors.DeviceOutOfMemoryError])
def test_a_failure_frees_its_request(error: type[BaseException]) -> None:
    """At once, not with the next garbage collection: the next call may need the memory."""
    programs = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama")).model.programs
    held = weakref.WeakSet[Any]()

    def request() -> None:
        arrays = Future[Any]()
        held.add(arrays)
        programs.compiling["a"] = Future()
        programs.compiling["a"].set_exception(error())
        programs.compiled("a", lambda: {"a": list}["b"])

    with paused_gc(), contextlib.suppress(MemoryError, KeyError):
        request()
    assert not held


@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_while_programs_compile(at: int) -> None:
    """While one is traced, or taken from its thread: none is left, and the next request is right."""
    calls: list[Any] = []

    def progress(step: str, done: int, total: int) -> None:
        if step.startswith("compile"):
            calls.append(threading.current_thread())
            if done == at and model.model.programs.compiling:
                raise KeyboardInterrupt

    model = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"), progress=progress)
    prompts = job_list(5)[0]
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts, 4, slots=2)
    assert not model.model.programs.compiling
    model.model.programs.progress = None
    assert model.generate(prompts, 4, slots=2) == lm("llama").generate(prompts, 4)
    assert {*calls} == {threading.main_thread()}


def test_programs_that_do_not_fit_together_compile_alone() -> None:
    """XLA needs memory of the device to choose kernels: one program may fit where several at once do not."""
    programs, failed = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama")).model.programs, Future[Any]()
    programs.compiling["a"] = failed
    failed.set_exception(errors.DeviceOutOfMemoryError("compiling a"))
    assert programs.compiled("a", lambda: lambda: 1) == 1


def test_helpers_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper function without memory fails as a program does, with its name."""
    programs = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama")).model.programs
    call = HelperCall(crop, (jnp.ones((2, 3)),), ((1,),))

    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes")

    monkeypatch.setattr(programs, "trace_helper", lambda _: lambda: (fail, False))
    with pytest.raises(errors.DeviceOutOfMemoryError, match="^crop: out of memory"):
        programs.run_helper(call.function, *call.arguments, static=call.static)


@pytest.mark.parametrize(
    "budgets, num_fitting, want",
    [
        ([9] * 3, 999, 4), ([9] * 575, 999, 128), ([9] * 576, 999, 192), ([9] * 768, 999, 256), ([9] * 768, 200, 192),
        ([9] * 768, 191, 128), ([9] * 768, 100, 64), ([99] + [1] * 999, 999, 128),
    ],
)  # fmt: skip
def test_slots_of_an_accelerator(
    budgets: list[int], num_fitting: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many long jobs have more slots, as many as fit the memory."""
    model, lengths, totals = lm("llama")._lm, [5] * len(budgets), [5 + budget for budget in budgets]
    assert slot_plan.default_slots(model, budgets) <= slot_plan.MAX_SLOTS["cpu"]
    monkeypatch.setattr(slot_plan, "MAX_SLOTS", {})
    monkeypatch.setattr(
        slot_plan, "fits_device", lambda _lm, sizes, *_: sum(each.num_slots for each in sizes) <= num_fitting
    )
    assert sum(each.num_slots for each in slot_plan.slot_sizes(model, lengths, totals, None, None)) == want


def test_an_iterator_that_does_not_end() -> None:
    """Answers come while prompts are still read, greedy ones and drawn ones."""
    model = lm("llama")
    prompts = job_list(5)[0]
    want = model.generate(prompts, 4)
    stream = model.generate_iter(itertools.cycle(prompts), 4, slots=2)
    got = dict(itertools.islice(stream, 12))
    stream.close()
    assert all(answer == want[i % 5] for i, answer in got.items()) and max(got) < 20
    drawn: Any = {"temperature": 1.0, "seed": 3, "slots": 2}
    assert dict(model.generate_iter(prompts, 4, **drawn)) == dict(enumerate(model.generate(prompts, 4, **drawn)))


@pytest.mark.slow
def test_a_longer_prompt_makes_the_cache_of_an_iterator_grow() -> None:
    model, prompts = lm("llama"), [*job_list(5)[0], [5] * 70]
    assert dict(model.generate_iter(prompts, 4, slots=2)) == dict(enumerate(model.generate(prompts, 4)))


def test_values_at_the_edge() -> None:
    """No prompts, no new tokens, an empty prompt, and stop ids from an iterator, which every prompt reads."""
    model = lm("llama")
    assert model.generate([], [], [], seed=[]) == []
    assert list(model.generate_iter([[1], [2], [3]], 0, slots=2)) == [(0, []), (1, []), (2, [])]
    one = rlx.PromptRequest([4, 5, 6], max_new_tokens=0)
    for run in (lambda: model.generate([[1], [4, 5, 6]], [4, 0], slots=2), lambda: [*model.generate_iter([one, [1]])]):
        run()
        report = model.report().request  # a prompt without new tokens is not read
        assert (report.rows, report.prompt_tokens, report.cached_tokens) == (1, 1, 0)
    begins = rlx.CausalLM(model.model, bos_id=1)
    assert list(begins.generate_iter([[]], 4, slots=2)) == [(0, begins.generate([[1]], 4)[0])]
    prompts = [[1], [2, 3]]
    stops = [row[0] for row in model.generate(prompts, 4)]
    assert model.generate(prompts, [4, 4], stop=iter(stops), slots=2) == [[stop] for stop in stops]


def test_errors_of_prompts_leave_the_others() -> None:
    """A prompt that can never fit, and one that is no prompt, are named; the others go on."""
    model = lm("llama")
    prompts: list[Any] = [[1], [2] * 256, [3, V], [4, 5]]
    got = dict(model.generate_iter(prompts, 8, slots=2, errors="return"))
    assert isinstance(got[1], errors.SequenceLengthError) and "prompts[1]" in str(got[1])
    assert "cut the prompt to 248 tokens" in str(got[1])
    assert isinstance(got[2], errors.TokenIdError) and "prompts[2][1]" in str(got[2])
    assert [got[0], got[3]] == model.generate([[1], [4, 5]], 8)
    late = dict(model.generate_iter([[V], [V], [V], [1]], 8, slots=2, errors="return"))
    assert late[3] == got[0] and len(late) == 4
    with pytest.raises(errors.SequenceLengthError, match=r"prompts\[1\]"):
        list(model.generate_iter(prompts, 8, slots=2))
    with pytest.raises(errors.SequenceLengthError, match=r"prompts\[1\]"):
        model.generate(prompts[:2], 8, slots=2)


def test_a_row_that_is_not_finite() -> None:
    """The embedding of one id is NaN: its prompt fails, and the others have their answers."""
    model, prompts = broken("llama"), [[1, 2], [BAD], [3], [4, 5], [6]]
    with pytest.raises(errors.NumericsError, match=r"prompts\[1\]") as failure:
        model.generate(prompts, [2, 3, 2, 2, 2], slots=2)
    assert failure.value.outputs[1] == []
    for i in (0, 2, 3, 4):
        assert failure.value.outputs[i] == model.generate([prompts[i]], 2)[0]
