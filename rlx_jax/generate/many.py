"""Many prompts: requests that run in slots (`generate`), and prompts from an iterator (`generate_iter`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, Unpack

import numpy as np

from rlx_jax.errors import RequestError, RlxError, listing, shown, suggest_keywords
from rlx_jax.generate import generation
from rlx_jax.generate.request import LanguageModel, Request, check_length, check_sampler, choose_seed, make_options
from rlx_jax.generate.request_plan import chunk_widths
from rlx_jax.generate.row_options import BatchProgress, RowOptions, StopLike, is_by_prompt, split_by_prompt
from rlx_jax.generate.sampler import Sampler, Sampling
from rlx_jax.generate.scheduler import Scheduler, SlotJob
from rlx_jax.generate.slot_plan import max_slots, plan_slots
from rlx_jax.generate.slots import SlotClasses, open_slots
from rlx_jax.runtime.inputs import check_flag, check_integer
from rlx_jax.text.chat import chat_prompt
from rlx_jax.text.request_checks import Prompts, classify_prompts

# Prompts that are prefilled together in a request without slots have at most so many tokens, padding included.
MAX_BATCH_TOKENS = 2**16


def prompt_options(
    lm: LanguageModel, prompts: Prompts, n: Any, max_new_tokens: Any, sampler: Any, stop: Any, seed: Any,
    fields: Mapping[str, Any],
) -> tuple[RowOptions, ...]:  # fmt: skip
    """Return the options of all prompts, or of each prompt if an argument has a value for each.

    Args:
        n: number of answers to each prompt, as in `Request`.
        max_new_tokens, sampler, stop, seed: as in `CausalLM.generate`.
        fields: fields of a sampler.

    Raises:
        RequestError, TokenIdError: as `CausalLM.generate`; or there is not one value for each prompt.
    """
    if prompts.is_single or fields or not isinstance(sampler, list | tuple):
        sampler = check_sampler(lm, sampler, fields)
    answers = 1 if n is None else check_integer("n", n, 1)
    count = len(prompts.texts if prompts.texts is not None else prompts.ids or ())
    stop = list(stop) if isinstance(stop, Iterator) else stop  # each prompt reads it
    arguments = {"max_new_tokens": max_new_tokens, "sampler": sampler, "stop": stop, "seed": seed}
    by_prompt = None if prompts.is_single else split_by_prompt(count, arguments)
    if by_prompt is None:
        options = make_options(lm, max_new_tokens, sampler, stop, 0)
        return (replace(options, seed=choose_seed(seed, sampler)),)
    if not by_prompt:  # no prompts, and no values
        return (RowOptions(0, Sampler(), (), (), 0, 0),)
    samplers = {id(each["sampler"]): each["sampler"] for each in by_prompt}
    samplers = {key: check_sampler(lm, each) for key, each in samplers.items()}
    has_seeds = isinstance(seed, list | tuple | np.ndarray)
    if not has_seeds:
        seed = choose_seed(seed, next((chosen for chosen in samplers.values() if chosen.temperature), Sampler()))
    rows = []
    for i, each in enumerate(by_prompt):
        chosen = samplers[id(each["sampler"])]
        # A prompt with a seed of its own has the draws of a call for it alone.
        row_seed, draw = (choose_seed(each["seed"], chosen), 0) if has_seeds else (seed, i * answers)
        name = f"max_new_tokens[{i}]"
        rows.append(make_options(lm, each["max_new_tokens"], chosen, each["stop"], row_seed, draw, name=name))
    return tuple(rows)


# -- a request in slots ------------------------------------------------------------------------


def run_prompts(lm: LanguageModel, request: Request, new: generation.NewTokens) -> list[Any]:
    """Run a request of `generate`, in slots or in one batch, and return the output for each prompt.

    Raises:
        RequestError: an option needs slots, and another one does not work in slots yet. NumericsError: as
            `make_outputs`.
    """
    if not uses_slots(lm, request):
        for _ in generation.run_blocks(lm, request, new):
            pass
        return generation.make_outputs(lm, request, new)
    n, prefixes = request.n or 1, request.prefixes or (None,) * len(request.rows)
    numbers = range(len(new.rows))
    jobs = (SlotJob(i, request.rows[i // n], request.row_options(i), prefixes[i // n]) for i in numbers)
    for job in run_jobs(lm, request, new, jobs, len(new.rows)):
        new.rows[job.index] = job.new
    return generation.make_outputs(lm, request, new)


def uses_slots(lm: LanguageModel, request: Request) -> bool:
    """Return whether a request runs in slots: too many prompts for one batch, or an option that needs them.

    Raises:
        RequestError: an option needs slots, and another one does not work in slots yet.
    """
    options = {
        "a value for each prompt": len(request.options) > 1, "slots=": request.slots, "progress=": request.progress,
    }  # fmt: skip
    others = {
        "inputs=": request.inputs.arrays,
        "state= with other inputs": request.inputs.optional_inputs or request.inputs.sizes,
    }  # fmt: skip
    names, unsupported = ([name for name, value in table.items() if value] for table in (options, others))
    if names and unsupported:
        raise RequestError(
            f"{names[0]} and {unsupported[0]} do not go together, as the latter needs one batch of all prompts; leave "
            f"{names[0]} out, and pass at most as many prompts at once as fit one batch"
        )
    if names or unsupported:
        return bool(names)
    # A profile that forbids further programs has programs for one batch, unless warm-up ran some for slots.
    num_rows = len(request.rows) * (request.n or 1)
    if (lm.buckets.on_recompile == "error" and not lm.buckets.slots) or num_rows < 2:
        return False
    longest = max(map(len, request.rows))
    num_tokens = sum(chunk_widths(lm.buckets, longest, lm.max_positions)) * len(request.rows)
    return num_rows > max_slots(lm) or (len(request.rows) > 1 and num_tokens > MAX_BATCH_TOKENS)


def read_jobs(jobs: Iterator[Any], waiting: deque[SlotJob], limit: int | None) -> Iterator[Any]:
    """Append jobs to those that wait, up to a number of them, and yield what takes no slot.

    These are prompts that are refused, as errors, and jobs without new tokens, whose prompts are not read.
    """
    while limit is None or len(waiting) < limit:
        if (job := next(jobs, None)) is None:
            return
        if isinstance(job, SlotJob) and job.options.budget:
            waiting.append(job)
        else:
            yield job


def run_jobs(
    lm: LanguageModel, request: Request, new: generation.NewTokens, jobs: Iterator[Any], total: int | None,
    read_ahead: int | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Run the jobs of a call in slots; yield each `SlotJob` as it ends, and items that are no jobs at once.

    Args:
        request: the options of all jobs.
        new: receives the report.
        total: number of answers, if it is known.
        read_ahead: the most jobs that wait for a slot; None to read all of them first.
    """
    programs = lm.model.programs
    clock, share = programs.start_timer(), request.share_prefix
    waiting, planned = deque[SlotJob](), list[SlotJob]()  # later jobs that the slots do not fit are planned for too
    scheduler: Scheduler | None = None
    device: SlotClasses | None = None
    done = num_tokens = num_prompts = prompt_tokens = num_read = 0
    try:
        while True:
            num_submitted = 0 if scheduler is None else scheduler.num_waiting
            num_known, limit = len(waiting), None if read_ahead is None else read_ahead - num_submitted
            for job in read_jobs(jobs, waiting, limit):
                done += isinstance(job, SlotJob)
                yield job
            for job in islice(waiting, num_known, None):
                if job.index % (request.n or 1) == 0:
                    num_prompts, prompt_tokens = num_prompts + 1, prompt_tokens + len(job.ids)
                num_read += len(job.ids)
            is_new = False
            if scheduler is None or scheduler.is_idle:
                if not waiting:
                    return
                # A prompt that the slots do not fit waits until all of them are free, and others are planned.
                if misfits := [job for job in waiting if device is None or not device.fits(job)]:
                    num_read += 0 if device is None else device.num_prefilled
                    scheduler = device = None  # free its memory first
                    # The new slots fit the earlier jobs, too: jobs of both kinds may alternate.
                    planned += misfits
                    is_new = True
                    device = open_slots(plan_slots(lm, planned, request.logprobs, request.slots, request.drafter))
                    scheduler = Scheduler(device, lm.find_end, read_ahead)
            assert device is not None and scheduler is not None
            fitting: list[SlotJob] = []
            while waiting and (is_new or device.fits(waiting[0])):
                fitting.append(waiting.popleft())
            fitting = device.share_prefixes(fitting, share)
            if is_new:
                device.prepare(fitting)
            for job in fitting:
                scheduler.submit(job)
                num_read -= job.num_cached
            for job in scheduler.step():
                done, num_tokens = done + 1, num_tokens + len(job.new.ids)
                seconds, compiled = clock()
                new.speculated = device.speculated
                read = num_prompts, prompt_tokens, num_read
                new.report = device.report(*read, num_tokens, seconds, compiled)
                if request.progress is not None:
                    request.progress(BatchProgress(done, total, num_tokens, seconds))
                yield job
    except BaseException:  # also an interrupt, and the end of a generator
        programs.cancel_compiling()
        raise


# -- prompts from an iterator ------------------------------------------------------------------


@suggest_keywords(*Sampling.__annotations__)
def generate_iter(
    self: generation.GeneratesText, prompts: Iterable[Any], max_new_tokens: int = 64, sampler: Sampler | None = None,
    stop: StopLike = (), seed: Any = None, *, logprobs: int | None = None, slots: int | None = None,
    progress: Callable[[BatchProgress], None] | None = None, errors: Literal["raise", "return"] = "raise",
    details: bool = False, **sampling: Unpack[Sampling],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Continue prompts from any iterable, and yield `(index, answer)` as each answer ends, not in order.

    Prompts are read as slots become free, at most a few ahead, so that the iterable may be endless. Answers are those
    of `generate` for the list of all prompts.

    Args:
        prompts: strings or id lists, or a `PromptRequest` for a prompt with options of its own.
        max_new_tokens, sampler, stop, seed, logprobs, slots, progress: as in `generate`, one value for all prompts that
            have none of their own.
        errors: "return" yields `(index, error)` for a prompt that is refused, or fails with a `NumericsError`, and the
            others go on; "raise" raises the error.
        details: yield a `Completion` for each answer also without `logprobs`, which tells why the answer ended.
        sampling: fields of a sampler.

    Raises:
        RequestError: as `generate`; options are checked at once, and each prompt when it is read.
    """
    if errors not in ("raise", "return"):
        raise RequestError(f"errors is {shown(errors)}; expected 'raise' or 'return'")
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(f"generate_iter: prompts is {shown(prompts)}; expected an iterable of strings or id lists")
    for name, value in {"max_new_tokens": max_new_tokens, "sampler": sampler, "stop": stop, "seed": seed}.items():
        if is_by_prompt(name, value):
            raise RequestError(f"generate_iter: {name} is {shown(value)}; expected one value for all prompts")
    if required := self._lm.required_inputs:
        raise RequestError(f"generate_iter: the flow reads {listing(required)}; use generate, which takes inputs=")
    check_flag("details", details)
    stop = list(stop) if isinstance(stop, Iterator) else stop
    options: Any = {"logprobs": logprobs, "slots": slots, "progress": progress, **sampling}
    request, new = self._make_request(Prompts(None, [], False), max_new_tokens, sampler, stop, seed, **options)
    total = len(prompts) if isinstance(prompts, Sized) else None
    options_of_all = request.options[0]
    shared_seed = options_of_all.seed if seed is not None or options_of_all.sampler.temperature else None
    stream = PromptStream(self._lm, request, details, stop, shared_seed)
    run = run_jobs(self._lm, request, new, stream.jobs(prompts), total, request.slots or max_slots(self._lm))
    return stream.outputs(run, errors == "raise")


@dataclass(eq=False)
class PromptStream:
    """The prompts and outputs of one call of `generate_iter`.

    Attributes:
        lm: the model.
        request: the options of all prompts; it has no rows.
        details: whether a `Completion` is yielded for each answer.
        stop: the argument of the call.
        seed: the seed of prompts without one; None until the first of them is sampled.
    """

    lm: LanguageModel
    request: Request
    details: bool
    stop: Any
    seed: Any

    def jobs(self, prompts: Iterable[Any]) -> Iterator[SlotJob | tuple[int, RlxError]]:
        """Yield the job of each prompt, or its index and what is wrong with it."""
        for index, prompt in enumerate(prompts):
            request = prompt if isinstance(prompt, PromptRequest) else PromptRequest(prompt)
            job: SlotJob | RlxError
            try:
                index = request.checked_index(index)
                job = self.make_job(index, request)
            except RlxError as error:
                error.add_note(f"of prompts[{index}]")
                job = error
            yield (index, job) if isinstance(job, RlxError) else job

    def make_job(self, index: int, prompt: PromptRequest) -> SlotJob:
        """Return the job of a prompt.

        Raises:
            RequestError, TokenIdError, SequenceLengthError: as `generate`.
        """
        name = f"prompts[{index}]"
        prompts = prompt.read(self.lm, name)
        shared = self.request.options[0]
        sampler = shared.sampler if prompt.sampler is None else check_sampler(self.lm, prompt.sampler)
        budget = shared.budget if prompt.max_new_tokens is None else prompt.max_new_tokens
        stop = self.stop if prompt.stop is None else prompt.stop
        if prompt.seed is None and sampler.temperature:
            self.seed = choose_seed(self.seed, sampler)
        seed, draw = (self.seed, index) if prompt.seed is None else (choose_seed(prompt.seed, sampler), 0)
        options = make_options(self.lm, budget, sampler, stop, 0 if seed is None else seed, draw, f"{name}: ")
        (ids,) = self.lm.encode_prompts(prompts, index)
        check_length(self.lm, len(ids), options.budget, name, None)
        return SlotJob(index, ids, options, as_text=prompts.texts is not None or prompt.messages is not None)

    def outputs(self, run: Iterable[SlotJob | tuple[int, RlxError]], raises: bool) -> Iterator[tuple[int, Any]]:
        """Yield what `generate_iter` does for jobs that ended, and for prompts that are refused.

        Raises:
            RlxError: the error of a prompt, if `raises`.
        """
        for job in run:
            index, output = job if isinstance(job, tuple) else (job.index, None)
            if isinstance(job, SlotJob):
                output = generation.make_output(self.lm, self.request, job.options, job.new, job.as_text, self.details)
                output = generation.not_finite_error({index: len(job.new.ids)}, [output]) if job.new.failed else output
            if raises and isinstance(output, RlxError):
                raise output
            yield index, output


# -- a prompt with options of its own ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """A prompt for `CausalLM.generate_iter` with options of its own; None means the option of the call.

    Attributes:
        prompt: a string or an id list.
        messages: in place of a prompt, messages that the chat template renders; the answer is text.
        max_new_tokens, sampler, stop, seed: as in `CausalLM.generate`. With a seed of its own the prompt has the random
            draws of a call for it alone.
        index: the number that its answer is yielded with, that errors name, and that its random draws depend on; by
            default its position in the iterable.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    max_new_tokens: int | None = None
    sampler: Sampler | None = None
    stop: StopLike | None = None
    seed: Any = None
    index: int | None = None

    def checked_index(self, position: int) -> int:
        """Return `index`, or the position of the prompt in the iterable without one.

        Raises:
            RequestError: it is no integer in [0, 2**31).
        """
        index = position if self.index is None else check_integer(f"prompts[{position}]: index", self.index, 0)
        if index >= 2**31:  # random draws take it as int32
            raise RequestError(f"prompts[{position}]: index is {index}; expected an integer below 2**31")
        return index

    def read(self, lm: LanguageModel, name: str) -> Prompts:
        """Return the prompt, rendered by the chat template if it is messages.

        Args:
            lm: the model.
            name: the prompt, for messages.

        Raises:
            RequestError: neither or both of `prompt` and `messages`, or not one prompt. Others as
                `CausalLM.apply_chat_template`.
        """
        if (self.prompt is None) == (self.messages is None):
            count = "none" if self.prompt is None else "both"
            raise RequestError(f"{name}: expected a prompt or messages, got {count}")
        if self.messages is not None:
            tokenizer = lm.require_tokenizer("chat needs", "generate from token ids")
            return Prompts(None, [chat_prompt(tokenizer, self.messages, variables={})], True)
        # An empty list has no tokens; it would be classified as a list without prompts.
        is_empty = isinstance(self.prompt, list | tuple) and not self.prompt
        prompts = Prompts(None, [[]], True) if is_empty else classify_prompts(self.prompt, name)
        if not prompts.is_single:
            raise RequestError(f"{name} is {shown(self.prompt)}; expected a string or a list of token ids")
        return prompts
