"""`Generation`: prefill the prompts of a request, then fetch its new tokens from the device block by block.

The module also turns new tokens into answers: lists, streams, and `Completion`s with log-probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.device import out_of_memory
from rlx_jax.errors import NumericsError
from rlx_jax.generate.decode import FirstTokens, LogProbs, RowTokens, initial_history
from rlx_jax.generate.decode_state import fits, gather_rows, prompt_indices, resize_state
from rlx_jax.generate.prefix_cache import Prefix, PrefixCache
from rlx_jax.generate.request import LanguageModel, Request, common_prefix_len
from rlx_jax.generate.request_plan import RequestPlan, plan_request, prompt_blocks
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.speculative import DRAFTER_PREFIX
from rlx_jax.generate.stop_strings import GrowingText, min_length, stable_prefix
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.random_keys import key_words
from rlx_jax.runtime.report import Report, RequestReport, SpeculativeCounts
from rlx_jax.runtime.sequence_state import LENGTH, as_state

AnyArray = Any
# A block of new tokens on the device: `[B, n]`, their log-probabilities, if any, and of drafts the counts and the rows
# that run.
DeviceBlock = tuple[Any, ...]


@dataclass(frozen=True)
class Completion:
    """One answer with log-probabilities: natural logarithms of the model's probabilities, before the sampler.

    Attributes:
        text: the text up to the first stop string; None where the prompt was ids.
        tokens: all new ids.
        token_logprobs: the log-probability of each of them.
        top: for each of them the likeliest ids at its position with their log-probabilities, the likeliest first.
        finish_reason: "stop" after an end token, a stop id or a stop string, or "length" after `max_new_tokens`.
    """

    text: str | None
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: Literal["stop", "length"] = "length"


@dataclass
class NewTokens:
    """The new tokens of each row that the host has so far.

    Attributes:
        rows: the tokens of each row.
        ended_rows: rows that the host ended, which grow no more.
        speculated: counts of speculative decoding.
        report: report of the request so far.
    """

    rows: list[RowTokens]
    ended_rows: set[int] = field(default_factory=set)
    speculated: SpeculativeCounts | None = None
    report: RequestReport | None = None

    def append(self, block: np.ndarray[Any, Any], log_probs: LogProbs | None) -> dict[int, int]:
        """Append a block of tokens, and their log-probabilities; return the number of new tokens of rows with some."""
        num_added: dict[int, int] = {}
        # The device computed the block ahead, before the host ended some rows.
        for i in {*range(len(self.rows))} - self.ended_rows:
            if count := self.rows[i].append(block, i, log_probs):
                num_added[i] = count
        return num_added

    def end(self, row: int, count: int) -> None:
        """End a row after its first `count` tokens, and drop the others."""
        self.rows[row].cut(count)
        self.ended_rows.add(row)

    @property
    def failed(self) -> dict[int, int]:
        """Return the number of tokens before the logits of a row were not finite, by row."""
        return {i: len(row.ids) for i, row in enumerate(self.rows) if row.failed}


def not_finite_error(failed: Mapping[int, int], outputs: Sequence[Any], n: int | None = None) -> NumericsError:
    """Return the error for rows that failed.

    Args:
        failed: number of tokens before the logits of a row were not finite, by row.
        outputs: the outputs of all rows so far.
        n: number of answers to each prompt, as in `Request`.
    """
    answers = n or 1
    names = [f"prompts[{i // answers}]{'' if n is None else f' (answer {i % n})'}" for i in failed]
    suffix = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return NumericsError(
        f"the logits, after logit_bias if any, are not finite for {', '.join(names[:8])}{suffix}, first after "
        f"{min(failed.values())} new tokens; `outputs` of this error has the tokens before, and the other "
        "answers in full",
        failed,
        outputs,
    )


@dataclass(eq=False)
class LoopRun:
    """A loop of decoding, with its inputs and its state on the device.

    Attributes:
        program: the program of the loop.
        inputs: its inputs, updated by every call.
        state: its state.
    """

    program: BoundProgram
    inputs: dict[str, Any]
    state: StateArrays

    def advance(self) -> DeviceBlock:
        """Dispatch the program, without waiting for it, and return its new tokens, which are copied to the host."""
        (tokens, rows, *extras), self.state = self.program(self.inputs, self.state)
        self.inputs["rows"] = rows
        block: DeviceBlock = tokens, next(iter(extras), None)
        if "counts" in self.inputs:  # of drafts, which exclude log-probabilities
            self.inputs["drafter_carry"], self.inputs["counts"] = extras
            block = tokens, None, extras[1], rows.running
        with jax.transfer_guard_device_to_host("allow"):  # explicit, as `device_get` is
            for array in jax.tree.leaves(block):
                array.copy_to_host_async()  # once the block is computed, and not only when the host waits for it
        return block

    def stop(self, rows: Iterable[int]) -> None:
        """End rows early, as for a stop string; a block that was computed ahead may still have tokens of them."""
        running = np.array(jax.device_get(self.inputs["rows"].running))
        running[list(rows)] = False
        self.inputs["rows"] = replace(self.inputs["rows"], running=running)


@dataclass(eq=False)
class Generation:
    """Iterator over the new tokens of a request in blocks `[count, n]` int32 on the host, with their log-probabilities,
    and the counts of `VerifyLoop` so far.

    `STOPPED` is padding of a row that has ended. `NOT_FINITE` replaces a token if its logits were not finite, and ends
    its row. The device computes the next block while the host processes the current one. Only the first block, which
    has one token per row, is returned before the loop is compiled.

    Attributes:
        loop: the loop.
        count: number of rows; the others are padding.
        budget: the most tokens of a row.
        steps: steps of the loop per block after the first, which is of one step; each gives at least one token to every
            running row.
        block: the latest block on the device.
        cache_len: length of the cache.
        stop_ids: ids that end a row.
        snapshot: copies of state arrays at the request's snapshot point.
    """

    loop: LoopRun
    count: int
    budget: int
    steps: int
    block: DeviceBlock
    cache_len: int
    stop_ids: frozenset[int]
    snapshot: StateArrays | None = None

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, Any], LogProbs | None, Any]]:
        for done in itertools.count(1, self.steps):
            on_device = self.block
            is_last, can_run_ahead = done >= self.budget, self.loop.program.is_compiled
            # Dispatch the next block before waiting for this one, unless that would compile first.
            if can_run_ahead and not is_last:
                self.block = self.loop.advance()
            reading = jax.transfer_guard_device_to_host("allow")  # `device_get` would start the copies once more
            with out_of_memory(f"decoding of {self.count} rows", lambda: "pass fewer prompts, or slots="), reading:
                block, log_probs, *drafted = jax.tree.map(np.asarray, on_device)
            yield block[: self.count], log_probs, drafted[0] if drafted else None
            # Without drafts, a row that runs has a token in the last column.
            last = block[:, -1].tolist()
            runs = drafted[1].any() if drafted else any(token >= 0 and token not in self.stop_ids for token in last)
            if is_last or not runs:
                return
            if not can_run_ahead:
                self.block = self.loop.advance()


class GeneratesText(Protocol):
    """A `CausalLM`, as the functions see it that are its methods."""

    _prefixes: PrefixCache

    @property
    def _lm(self) -> LanguageModel: ...

    @property
    def generate(self) -> Callable[..., Any]: ...

    @property
    def _make_request(self) -> Callable[..., tuple[Request, NewTokens]]: ...


# -- from a request to its answers -------------------------------------------------------------


def run_blocks(lm: LanguageModel, request: Request, new: NewTokens) -> Iterator[None]:
    """Run a request, and yield after every block, when its tokens have been appended to `new`."""
    if not (request.rows and request.budget):
        return
    clock, options = lm.model.programs.start_timer(), request.options[0]
    first_token: tuple[float, int] | None = None
    shared = share_prefix(lm, request) if request.share_prefix and len(request.rows) > 1 else request
    plan = plan_request(lm, shared)
    # The first prompt reads what all of them share.
    cached_tokens = sum(len(prefix.ids) for prefix in plan.request.prefixes[0 if request.prefixes else 1 :])
    generation = start_generation(plan)
    del plan  # with the state of what they share
    try:
        for block, log_probs, counts in generation:
            added = new.append(block, log_probs)
            new.speculated = None if counts is None else SpeculativeCounts(*counts.tolist())
            if options.stop_strings:
                ends = {i: lm.find_end(options, new.rows[i].ids, count) for i, count in added.items()}
                stops = {i: length for i, length in ends.items() if length is not None}
                for i, length in stops.items():
                    new.end(i, length)
                if stops and len(new.ended_rows) < len(new.rows):
                    generation.loop.stop(stops)
            seconds, compiled = clock()
            tokens = sum(len(row.ids) for row in new.rows)
            first_token = first_token or (seconds, tokens)
            new.report = RequestReport(
                "prompts", len(request.rows), sum(map(len, request.rows)), first_token[0], tokens, first_token[1],
                seconds - first_token[0], compiled, cached_tokens, request.reread,
            )  # fmt: skip
            yield
            if len(new.ended_rows) == len(new.rows):  # what was computed ahead is dropped
                return
    finally:
        if request.on_end is not None:
            request.on_end(generation)


def make_outputs(lm: LanguageModel, request: Request, new: NewTokens) -> list[Any]:
    """Return the output for each prompt of a request that has run.

    Raises:
        NumericsError: logits of a row were not finite; `outputs` of the error has the tokens so far.
    """
    n, options = request.n, request.options
    by_row = (options[i // (n or 1) if len(options) > 1 else 0] for i in range(len(new.rows)))
    rows = [make_output(lm, request, each, row, request.as_text) for each, row in zip(by_row, new.rows, strict=True)]
    outputs = rows if n is None else [rows[at : at + n] for at in range(0, len(rows), n)]
    if failed := new.failed:
        raise not_finite_error(failed, outputs, n)
    return outputs


def make_output(
    lm: LanguageModel, request: Request, options: RowOptions, tokens: RowTokens, as_text: bool, details: bool = False,
) -> Any:  # fmt: skip
    """Return the output for one row: text, ids, or a `Completion`.

    Args:
        options: the options of the row.
        tokens: its new ids, their log-probabilities, and the likeliest tokens at each position.
        as_text: whether text is returned, not ids.
        details: whether a `Completion` is returned also without log-probabilities.
    """
    ids, min_tokens = tokens.ids, options.sampler.min_tokens
    text = lm.answer_text(ids, options.stop_strings, min_tokens) if as_text else None
    if request.logprobs is None and not details:
        return ids if text is None else text
    has_ended = bool(ids) and ids[-1] in options.stop_ids
    if not has_ended:
        has_ended = lm.find_end(options, ids, len(ids)) is not None
    likeliest = tuple(pairs[: request.logprobs] for pairs in tokens.top_logprobs)
    return Completion(text, tuple(ids), tuple(tokens.log_probs), likeliest, "stop" if has_ended else "length")


def stream_request(lm: LanguageModel, request: Request, new: NewTokens) -> Iterator[Any]:
    """Run a request of one row, and yield its new text, or its ids, as they come; joined, they are the output of
    `generate`.

    A dispatch is one or two steps (see `Request.num_steps`), so that a token is returned while the device computes the
    next ones.
    """
    request = replace(request, is_stream=True)
    ids, sent, options = new.rows[0].ids, 0, request.options[0]
    stop_strings, min_tokens = options.stop_strings, options.sampler.min_tokens
    text = GrowingText(lm.decode)
    for _ in run_blocks(lm, request, new):
        stable: Any = ids
        if request.as_text:
            start = min_length(lm.decode, ids, min_tokens) if stop_strings else 0
            stable = stable_prefix(text.update(ids), stop_strings, start)
        if piece := stable[sent:]:
            yield from [piece] if request.as_text else piece
            sent = len(stable)
    answer = lm.answer_text(ids, stop_strings, min_tokens) if request.as_text else ids
    # What was withheld as the beginning of a stop string is part of the answer if none followed.
    if request.as_text and answer[sent:]:
        yield answer[sent:]
    if failed := new.failed:
        raise not_finite_error(failed, [answer])


def report_of_requests(
    model: CompiledModel,
    last_speculative: NewTokens | None,
    last_call: tuple[Request, NewTokens] | RequestReport | None,
) -> Report:
    """Return the report of the program that requests ran last, and of the last request; see `CausalLM.report`."""
    programs = ("forward", *CACHED_PROGRAMS)  # a compiled model passed by the user may have run other programs
    keys = [k for k in model.programs.executables if k.flow == model.name and k.program in programs]
    model = replace(model, program=keys[-1].program, last_key=keys[-1]) if keys else model
    speculated, seed = None if last_speculative is None else last_speculative.speculated, None
    if isinstance(last_call, tuple):
        seed, last_call = last_call[0].sampling_seed, last_call[1].report
    return replace(model.report(), speculative=speculated, seed=seed, request=last_call)


# -- prefill -----------------------------------------------------------------------------------


def start_generation(plan: RequestPlan) -> Generation:
    """Prefill the prompts, and choose the first new token of each row; the loop has not run yet."""
    request, sizes, loop, ids_input = plan.request, plan.sizes, plan.loop, plan.lm.ids_input
    programs, n = loop.model.programs, request.n or 1
    state: StateArrays = {}
    if request.prefixes:
        state = prepare_prefix_state(plan.prefill_programs[0], request.prefixes, request.owns_prefix)
    logits: AnyArray = None
    snapshot, hidden = None, []
    prefix_lens = [len(prefix.ids) for prefix in request.prefixes] or [0] * len(request.rows)
    suffixes = [prompt[count:] for prompt, count in zip(request.rows, prefix_lens, strict=True)]
    inputs = request.inputs.padded(plan.prefill_batch) if request.inputs.arrays else {}
    for block in prompt_blocks(plan.prefill_programs, ids_input, suffixes, plan.prefill_batch, inputs, state, plan.cut):
        state, logits = block.state, block.logits
        hidden += [] if block.hidden is None else [block.hidden]
        if request.snapshot_point is not None and block.num_tokens == plan.cut:
            snapshot = {name: jnp.copy(state[name]) for name in request.snapshot_point.array_names}
    if n > 1:
        prompt_of_row = prompt_indices(sizes.batch, n, len(request.rows))
        logits = programs.run_helper(gather_rows, logits, prompt_of_row, static=(0,), out_shardings=programs.replicated)
        state = resize_state(loop, state, prompt_of_row)
    live = np.arange(sizes.batch) < len(request.rows) * n
    prompts = [request.rows[row // n] if is_row else () for row, is_row in enumerate(live)]
    wrapper: Any = loop.key.wrapper
    history = initial_history(plan.sampling_steps, prompts, len(plan.stop_mask), wrapper.max_tokens)
    key = key_words("seed", request.options[0].seed) if plan.sampling_steps.do_sample else np.zeros(2, np.uint32)
    new_rows = key, live, np.int32(request.budget), history
    choose = FirstTokens(plan.sampling_steps, num_logprobs=plan.num_logprobs)
    arguments = (logits, *new_rows, plan.sampler_values, plan.stop_mask)
    first_ids, rows, log_probs = programs.run_helper(choose, *arguments, out_shardings=programs.replicated)
    first_block: DeviceBlock = first_ids, log_probs
    operands = {"rows": rows, "sampler_values": plan.sampler_values, "stop_mask": plan.stop_mask}
    if (drafter := request.drafter) is not None:
        drafter_arrays, draft_state = drafter.start(programs, sizes, request.rows, first_ids, tuple(hidden))
        state |= {DRAFTER_PREFIX + name: array for name, array in draft_state.items()}
        counts = np.zeros(3, np.int32)
        operands |= {"params": drafter.params(), "drafter_carry": drafter_arrays, "counts": counts}
        first_block = first_ids, log_probs, counts, rows.running
    return Generation(
        LoopRun(loop, operands, state), len(request.rows) * n, request.budget, wrapper.steps, first_block,
        sizes.cache_len, frozenset(request.options[0].stop_ids), snapshot,
    )  # fmt: skip


def share_prefix(lm: LanguageModel, request: Request) -> Request:
    """Prefill the common prefix of all prompts once, if they share it, and return the request that continues it."""
    # Each prompt keeps at least one token after the prefix: its last token gives the logits of the first new one.
    length = common_prefix_len(*request.rows, limit=min(map(len, request.rows)) - 1)
    if not length:
        return request
    # For a cache of the same length.
    options = replace(request.options[0], budget=request.budget + max(map(len, request.rows)) - length)
    plan = plan_request(lm, replace(request, rows=(request.rows[0][:length],), options=(options,), n=None))
    *_, last_block = prompt_blocks(plan.prefill_programs, lm.ids_input, plan.request.rows, plan.prefill_batch)
    prefix = Prefix(plan.request.rows[0], 0, plan.sizes.cache_len, arrays=last_block.state)
    return replace(request, prefixes=(prefix,) * len(request.rows))


def prepare_prefix_state(program: BoundProgram, prefixes: Sequence[Prefix], is_owned: bool = False) -> StateArrays:
    """Return the state for the prefill programs of the rest of the prompts; padding rows are empty.

    Args:
        program: the first of these programs.
        prefixes, is_owned: as in `Request`.

    Raises:
        SessionStateError: the state was consumed after the request was checked.
    """
    arrays: Any = prefixes[0].arrays
    as_state(arrays).check_alive()
    sizes, model = dict(program.key.binding), program.model
    rows, lengths = (np.zeros(sizes["batch"], np.int32) for _ in range(2))
    rows[: len(prefixes)], lengths[: len(prefixes)] = zip(*((p.row, len(p.ids)) for p in prefixes), strict=True)
    # A state that the request owns, of the right sizes, is used without a copy.
    if not is_owned or not fits(program, arrays):
        return resize_state(program, arrays, rows, lengths)
    shardings = model.programs.state_shardings(program.key) or {}
    return {**arrays, LENGTH: jax.device_put(lengths, shardings.get(LENGTH))}
