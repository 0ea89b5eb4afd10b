"""A request: what a caller asked for, checked, and run until its tokens are there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.errors import RequestError, SequenceLengthError, number
from rlx_jax.generate.generation import DraftPlan, Generation, NewTokens, Request, RequestPlan, generate
from rlx_jax.generate.request_inputs import NONE, request_inputs
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.serving import Sizes, request_sizes
from rlx_jax.generate.stopping import cut, settled, split_stops, stopped_at
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.report import RequestReport
from rlx_jax.text.opening import check_positions
from rlx_jax.text.requests import Prompts, id_list, whole_number
from rlx_jax.text.tokenizer import Tokenizer

MAX_SLOTS = 2**30  # of a cache; the next power of two is no dimension of XLA


@dataclass(frozen=True)
class Speaker:
    """A model that generates, with what a request needs to know of it; fields as in `CausalLM`."""

    model: CompiledModel
    vocab_size: int
    tokenizer: Tokenizer | None
    max_positions: int | None
    buckets: Buckets
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def needed(self, what: str = "strings need") -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(f"{what} a tokenizer: there is no tokenizer.json; pass token ids")
        return self.tokenizer

    def decode(self, ids: list[int]) -> str:
        """The text of new tokens."""
        return self.needed().decode(ids)

    def text(self, ids: list[int], words: tuple[str, ...]) -> str:
        """The text up to the first stop string."""
        return cut(self.decode(ids), words)

    def rows(self, asked: Prompts) -> list[list[int]]:
        """Prompts as ids, each with at least one.

        Raises:
            RequestError, TokenIdError: an empty one, and there is no begin token; ids that the model does not have.
        """
        given = asked.ids or [] if asked.texts is None else self.needed().encode_batch(asked.texts)
        rows = [id_list(row, self.vocab_size, f"prompts[{i}]") for i, row in enumerate(given)]
        for i, row in enumerate(rows):
            if not row and self.bos_id is None:
                raise RequestError(f"prompts[{i}] is empty, and the model has no begin token to start from")
        return [row or [self.bos_id] for row in rows]  # type: ignore[list-item]

    def stops(self, stop: Any) -> tuple[tuple[str, ...], set[int]]:
        """Strings and ids that end a row, end tokens among them."""
        words, others = split_stops(stop)
        if words:
            self.needed()
        return words, {*id_list(others, self.vocab_size, "stop"), *self.eos_ids}


def check_request(
    speaker: Speaker, asked: Prompts, max_new_tokens: int, sampler: Sampler, stop: Any, seed: Any, inputs: Any,
    drafts: DraftPlan | None,
) -> Request:  # fmt: skip
    """What was asked for, checked; nothing has run yet. Arguments as those of `CausalLM.generate`.

    Raises:
        RequestError: see `rlx_jax.errors`.
    """
    budget = whole_number("max_new_tokens", max_new_tokens, 0)
    rows = speaker.rows(asked)
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
    beside = request_inputs(speaker.model, inputs, len(rows)) if rows else NONE
    return Request(tuple(map(tuple, rows)), budget, sampler, tuple(sorted(ends)), words, seed, beside, drafts)


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


def told(new: NewTokens, request: Request, seconds: float, compiled: int) -> RequestReport:
    """The report on a request so far, `seconds` after it began."""
    before, count = new.report, sum(map(len, new.rows))
    if before is None:
        read = sum(map(len, request.rows))
        return RequestReport("prompts", len(request.rows), read, seconds, count, count, compiled=compiled)
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
    plan = RequestPlan(
        method, knobs, ends, request.seed, sizes.batch, sizes.widths, sizes.slots, request.budget,
        speaker.model.settings.loop, request.inputs, request.drafts, request.answers, request.top,
        read=speaker.buckets.rows(len(request.rows)),
    )  # fmt: skip
    return generate(speaker.model, request.rows, plan)


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
