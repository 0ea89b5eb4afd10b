"""A request: what a caller asked for, checked, and run until its tokens are there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.buckets import smallest
from rlx_jax.errors import RequestError, SequenceLengthError, number, shown
from rlx_jax.generate.generation import Generation, NewTokens, generate
from rlx_jax.generate.plan import Before, DraftPlan, Mark, PromptPart, Request, RequestPlan
from rlx_jax.generate.prompts import as_parts
from rlx_jax.generate.reading import behind, common_prefix
from rlx_jax.generate.request_inputs import NONE, request_inputs
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.serving import Sizes, read_widths, request_sizes
from rlx_jax.generate.speaker import Speaker
from rlx_jax.generate.stopping import settled, stopped_at
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.report import RequestReport
from rlx_jax.text.opening import check_positions
from rlx_jax.text.requests import Prompts, whole_number

MAX_SLOTS = 2**30  # of a cache; the next power of two is no dimension of XLA


def check_request(
    speaker: Speaker, asked: Prompts, max_new_tokens: int, sampler: Sampler, stop: Any, seed: Any, inputs: Any,
    drafts: DraftPlan | None, state: Any = None, share_prefix: Any = False,
) -> Request:  # fmt: skip
    """What was asked for, checked; nothing has run yet. Arguments as those of `CausalLM.generate`.

    Raises:
        RequestError: see `rlx_jax.errors`.
    """
    budget = whole_number("max_new_tokens", max_new_tokens, 0)
    before: Before | None = None
    if state is None:
        rows, beside = speaker.rows(asked), NONE
    else:
        rows, before, beside = behind(speaker, asked, state)
    words, ends = speaker.stops(stop)
    sampler.knobs(speaker.vocab_size)
    seed = new_seed(sampler) if seed is None else seed
    if isinstance(random_key("seed", seed), jax.core.Tracer):
        raise RequestError("generate runs on the host, which reads its tokens: call it outside jax.jit and the like")
    for i, row in enumerate(rows):
        what = f"prompts[{i}]: {len(row)} tokens + {number(budget)} new"
        check_positions(len(row) + budget, speaker.max_positions, what, len(row))
        if drafts is not None:
            check_positions(len(row) + budget, drafts.positions, f"speculative: {what}", len(row))
        if len(row) + budget > MAX_SLOTS:
            raise SequenceLengthError(f"{what}: over the limit of {MAX_SLOTS} positions; ask for fewer new tokens")
    if rows and before is None:
        beside = request_inputs(speaker.model, inputs, len(rows))
    check_together(state is not None, share_prefix, inputs, drafts)
    return Request(
        tuple(map(tuple, rows)), budget, sampler, tuple(sorted(ends)), words, seed, beside, drafts, before=before,
        shared=common_prefix(rows) if share_prefix else 0,
    )  # fmt: skip


def check_together(state: bool, share_prefix: Any, inputs: Any, drafts: DraftPlan | None) -> None:
    """A state and a shared beginning go together with the rest of a request.

    Raises:
        RequestError: names what does not.
    """
    if not isinstance(share_prefix, bool):
        raise RequestError(f"share_prefix is {shown(share_prefix)}; expected True or False")
    held = "state=" if state else "share_prefix=True" if share_prefix else ""
    if state and share_prefix:
        raise RequestError(
            "state= and share_prefix=True do not go together: extend the state of one row by what prompts share, and "
            "pass them the state"
        )
    if held and inputs is not None:
        why = "the state has them" if state else "prompts that bring others share no state"
        raise RequestError(f"{held} and inputs= do not go together: {why}; leave one of them out")
    if held and drafts is not None and drafts.hidden:
        raise RequestError(
            f"{held} and speculative='mtp' do not go together: the module reads hidden states of whole prompts; use "
            "speculative='prompt'"
        )


def new_seed(sampler: Sampler) -> int:
    """A seed for a request that brings none: another one each time; 0 where nothing is drawn.

    Raises:
        RequestError: several processes, each of which would draw its own.
    """
    if not sampler.temperature:
        return 0
    if jax.process_count() > 1:
        raise RequestError("seed: give one, the same in every process, where several run a model together")
    return secrets.randbits(32)  # of 64 bits the upper half takes a program more


def blocks(speaker: Speaker, request: Request, new: NewTokens) -> Iterator[None]:
    """Generate: the new tokens of each row are appended to `new`, block by block."""
    if not (request.rows and request.budget):
        return
    lengths = [len(row) for row in request.rows for _ in range(request.answers)]
    most = known_to_both(speaker.max_positions, request.drafts)
    sizes = request_sizes(speaker.buckets, lengths, request.budget, most)
    clock = speaker.model.programs.clock()
    generation = begin(speaker, request, sizes)
    if request.ended is not None:
        generation.blocks = []
    try:
        for block in generation:
            new.append(block, generation.log_probs)
            new.speculated = generation.speculated
            counts = {i: stopped_at(speaker.decode, new.rows[i], n, request.words) for i, n in new.grown.items()}
            done = {i: count for i, count in counts.items() if count is not None}
            for i, count in done.items():
                new.end(i, count)
            if done:
                generation.stop(done)
            new.report = told(new, request, *clock())
            yield
    finally:
        if request.ended is not None:
            request.ended(generation)


def told(new: NewTokens, request: Request, seconds: float, compiled: int) -> RequestReport:
    """The report on a request so far, `seconds` after it began."""
    before, count = new.report, sum(map(len, new.rows))
    if before is None:
        prompts = sum(map(len, request.rows))
        return RequestReport(
            "prompts", len(request.rows), prompts, seconds, count, count, compiled=compiled,
            cached_tokens=sum(request.held), reread=request.reread,
        )  # fmt: skip
    return replace(before, new_tokens=count, answer_seconds=seconds - before.prompt_seconds, compiled=compiled)


def known_to_both(max_positions: int | None, drafts: DraftPlan | None) -> int | None:
    """The longest sequence that the model and where drafts come from know: both have caches of one size."""
    others = None if drafts is None else drafts.positions
    return min((n for n in (max_positions, others) if n is not None), default=None)


def begin(speaker: Speaker, request: Request, sizes: Sizes) -> Generation:
    """The request begins to run: prompts are read, and the first token of each row is chosen."""
    method = request.sampler.method(speaker.vocab_size)
    method = method.widened() if speaker.buckets.prompt or speaker.buckets.batch else method
    ends = np.zeros(speaker.vocab_size, bool)
    ends[list(request.ends)] = True
    knobs = request.sampler.knobs(speaker.vocab_size, method.biased)
    before, longest = request.before, max(map(len, request.rows))
    room = max(request.room, before.slots if before is not None and before.consumed else 0)
    slots = max(sizes.slots, smallest(speaker.buckets.context, room) or room)
    held = request.held if before is not None else (request.shared,) * len(request.rows)
    fresh = max(len(row) - count for row, count in zip(request.rows, held, strict=True))
    parts = parts_of(speaker, longest - fresh, longest, request.mark) if any(held) or request.mark else None
    plan = RequestPlan(
        method, knobs, ends, request.seed, sizes.batch, sizes.widths, slots, request.budget,
        speaker.model.settings.loop, request.inputs, request.drafts, request.answers, request.top,
        read=speaker.buckets.rows(len(request.rows)), before=before, mark=request.mark,
        parts=as_parts(sizes.widths) if parts is None else parts,
        shared=parts_of(speaker, 0, request.shared) if request.shared else (), alone=speaker.buckets.rows(1),
    )  # fmt: skip
    return generate(speaker.model, request.rows, plan)


def parts_of(speaker: Speaker, start: int, end: int, mark: Mark | None = None) -> tuple[PromptPart, ...]:
    """What is read from token `start` to `end`, with a stop at the mark if that is between them."""
    stops = [start, *([mark.at] if mark is not None and start < mark.at < end else []), end]
    parts = []
    for first, last in zip(stops, stops[1:], strict=False):
        *chunks, rest = read_widths(speaker.buckets, last - first, speaker.max_positions)
        parts += [*as_parts(chunks), PromptPart(rest, last - first - sum(chunks))]
    return tuple(parts)


def pieces(speaker: Speaker, request: Request, new: NewTokens, text: bool) -> Iterator[Any]:
    """The new text of a request of one row as it comes, or its ids; joined together they are what `generate` gives."""
    (ids,), sent = new.rows, 0
    for _ in blocks(speaker, request, new):
        if not text:
            yield from ids[sent:]
            sent = len(ids)
            continue
        known = settled(speaker.decode(ids), request.words)
        if len(known) > sent:
            yield known[sent:]
            sent = len(known)
    whole = speaker.text(ids, request.words) if text else ids
    if text and whole[sent:]:
        yield whole[sent:]
    new.check([whole])
