"""How a request runs: its programs, every size chosen, and the programs that read its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.settings import Buckets, bucket, smallest
from rlx_jax.errors import RequestError
from rlx_jax.generate.decode import DecodeLoop, Sizes
from rlx_jax.generate.request import LanguageModel, Mark, Request
from rlx_jax.generate.sampler import Knobs, Method
from rlx_jax.generate.speculative import VerifyLoop
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import ProgramKey, Variant
from rlx_jax.text.padding import PROMPT_BUCKET
from rlx_jax.text.request_checks import pad_rows

CONTEXT_BUCKET = 64
# Programs tell of 0, 8, 16, 32 … likeliest tokens; the host leaves out what was not requested.
TOP = 8


class PromptPart(NamedTuple):
    """Tokens that a program of `width` reads of each row, at most `tokens` of them."""

    width: int
    tokens: int


# The programs of a plan: those that read the prompts, those that read what all begin with, and the loop.
PlanKeys = tuple[tuple[ProgramKey, ...], tuple[ProgramKey, ...], ProgramKey]


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """How a request runs, every size chosen.

    Attributes:
        method, knobs: how to choose tokens.
        top: the likeliest tokens that programs tell of; None for none.
        ends: `[V]` bool, ids that end a row.
        sizes: rows, at least those of the request, the others hold nothing; tokens of the programs that would read full
            prompts; slots of the cache.
        read: rows of the programs that read the prompts, which are fewer where each has several answers.
        parts: what is read of the prompts, one after the other, of those tokens that no state holds.
        shared: the parts that are read of the first prompt alone, as all begin with them, by programs of `alone` rows.
        readers, shared_readers, loop: the programs.
    """

    request: Request
    method: Method
    knobs: Knobs
    top: int | None
    ends: np.ndarray[Any, Any]
    sizes: Sizes
    read: int
    alone: int
    parts: tuple[PromptPart, ...]
    shared: tuple[PromptPart, ...]
    readers: tuple[BoundProgram, ...]
    shared_readers: tuple[BoundProgram, ...]
    loop: BoundProgram


def plan_request(lm: LanguageModel, request: Request) -> RequestPlan:
    """Choose the sizes and the programs of a request; nothing has run yet.

    Raises:
        RequestError: one of the programs is not compiled, and the profile wants that reported.
    """
    buckets, before, n = lm.buckets, request.before, request.n or 1
    limits = (lm.max_positions, None if request.drafter is None else request.drafter.positions)
    limit = min((n for n in limits if n is not None), default=None)  # both have caches of one size
    lengths = [len(row) for row in request.rows for _ in range(n)]
    sizes = request_sizes(buckets, lengths, request.budget, limit)
    room = max(request.room, before.slots if before is not None and before.consumed else 0)
    if room > sizes.slots:
        sizes = replace(sizes, slots=max(sizes.slots, smallest(buckets.context, room) or room))
    method = request.sampler.method(lm.vocab_size)
    method = method.widened() if buckets.prompt or buckets.batch else method
    ends = np.zeros(lm.vocab_size, bool)
    ends[list(request.ends)] = True
    top = request.logprobs and bucket(request.logprobs, TOP, lm.vocab_size)
    read = sizes.batch if n == 1 else buckets.rows(len(request.rows))
    alone = buckets.rows(1) if request.shared else 1
    held = (request.shared,) * len(request.rows) if before is None else before.lengths
    fresh = max(len(row) - count for row, count in zip(request.rows, held, strict=True))
    parts = parts_of(buckets, limit, max(lengths) - fresh, max(lengths), request.mark)
    shared = parts_of(buckets, limit, 0, request.shared) if request.shared else ()
    keys = plan_keys(lm, request, method, top, sizes, (read, alone), (parts, shared))
    runner = lm.model.as_program("extend")
    loop = runner.bind(keys[2])
    readers, shared_readers = (tuple(map(runner.bind, part)) for part in keys[:2])
    return RequestPlan(
        request, method, request.sampler.knobs(lm.vocab_size, method.biased), top, ends, sizes, read, alone, parts,
        shared, readers, shared_readers, loop,
    )  # fmt: skip


def plan_keys(
    lm: LanguageModel, request: Request, method: Method, top: int | None, sizes: Sizes, rows: tuple[int, int],
    parts: tuple[tuple[PromptPart, ...], tuple[PromptPart, ...]],
) -> PlanKeys:  # fmt: skip
    """The programs of a request; found once for each choice of sizes, method and inputs where there are no drafts.

    `rows` are those of the programs that read the prompts, and of those that read what they share.
    """
    model, inputs, drafter, loop = lm.model, request.inputs, request.drafter, lm.model.programs.settings.loop
    behind = request.before is not None or bool(request.shared)
    widths, shared = ([part.width for part in some] for some in parts)

    def find() -> PlanKeys:
        logits = model.output_names[:1]
        state = {**inputs.sizes, **sizes.state}
        variant = Variant(True, logits, inputs.given)
        if drafter is None:
            around: Any = DecodeLoop(method, model.first_input, loop.steps, loop.early, top)
            key = model.as_program("extend").sized({**state, "seq": 1}, variant)
        else:
            verify = model.as_program("verify")
            variant = replace(variant, spare=drafter.tokens, hidden=drafter.hidden)
            back = model.programs.template(verify.key(inputs.given, logits)).taken_back
            around = VerifyLoop(method, model.first_input, loop.steps, drafter.bound(sizes.state), back)
            key = verify.sized({**state, "seq": drafter.tokens + 1}, replace(variant, last_only=False))
        readers = reader_keys(model, widths, {**state, "batch": rows[0]}, variant, behind)
        alone = reader_keys(model, shared, {**state, "batch": rows[1]}, replace(variant, hidden=False))
        return readers, alone, replace(key, around=around)

    if drafter is not None:
        return find()
    choice = (model.name, method, top, sizes, rows, *map(tuple, (widths, shared)), behind)
    known: PlanKeys = model.programs.plans((*choice, tuple(inputs.sizes.items()), inputs.given), find)
    return known


# -- sizes -------------------------------------------------------------------------------------


def read_widths(buckets: Buckets, tokens: int, max_positions: int | None) -> tuple[int, ...]:
    """The tokens of the programs that read so many, one after the other: one program of a power of two, or chunks of
    the largest bucket that a cache holds and one that holds the rest."""
    chunk = buckets.largest_chunk
    if chunk is None:
        return (bucket(tokens, PROMPT_BUCKET, max_positions),)
    full = (tokens - 1) // chunk
    rest = smallest(buckets.prompt, tokens - full * chunk)
    assert rest is not None  # at most a chunk
    return (*(chunk,) * full, rest)


def request_sizes(buckets: Buckets, lengths: Sequence[int], budget: int, max_positions: int | None) -> Sizes:
    """The sizes for prompts of these lengths and `budget` new tokens each: buckets where there are any that hold them,
    else powers of two. A prompt over the largest bucket is read in chunks of it.

    Raises:
        RequestError: no bucket holds the rows or the cache, and `on_recompile` is `error`.
    """
    longest = max(lengths)
    widths = read_widths(buckets, longest, max_positions)
    needed = max(longest + budget, widths[0])
    slots = smallest(buckets.context, needed)
    if buckets.on_recompile == "error":
        if buckets.batch and smallest(buckets.batch, len(lengths)) is None:
            raise RequestError(
                f"prompts: {len(lengths)} rows, and buckets.batch = {list(buckets.batch)}; send fewer at once, or add "
                "a bucket to the profile"
            )
        if buckets.context and slots is None:
            raise RequestError(
                f"prompts[{lengths.index(longest)}]: {longest} tokens + {budget} new, and the caches that are compiled "
                f"have {list(buckets.context)} slots; ask for fewer tokens, or add to buckets.context of the profile"
            )
    return Sizes(buckets.rows(len(lengths)), widths, slots or bucket(needed, CONTEXT_BUCKET, max_positions))


def cache_sizes(buckets: Buckets, batch: int, context: int, max_positions: int | None) -> tuple[int, int]:
    """The rows and slots of the state of so many requests, each of `context` tokens with its answer."""
    slots = smallest(buckets.context, context) or bucket(context, CONTEXT_BUCKET, max_positions)
    return buckets.rows(batch), slots


def parts_of(
    buckets: Buckets, limit: int | None, start: int, end: int, mark: Mark | None = None
) -> tuple[PromptPart, ...]:
    """What is read from token `start` to `end`, with a stop at the mark if that is between them."""
    stops = [start, *([mark.at] if mark is not None and start < mark.at < end else []), end]
    parts = []
    for first, last in zip(stops, stops[1:], strict=False):
        *chunks, rest = read_widths(buckets, last - first, limit)
        parts += [*(PromptPart(width, width) for width in chunks), PromptPart(rest, last - first - sum(chunks))]
    return tuple(parts)


# -- programs that read prompts ----------------------------------------------------------------


def reader_keys(
    model: CompiledModel, widths: Sequence[int], sizes: Mapping[str, int], variant: Variant, behind: bool = False
) -> tuple[ProgramKey, ...]:
    """The programs for so many tokens each, one after the other: `prefill` first, if there is no state `behind` which
    they read."""
    blocks = [{**sizes, "seq": width} for width in widths]
    first = [model.as_program("prefill").sized(blocks.pop(0), variant)] if blocks and not behind else []
    extend = model.as_program("extend")
    return (*first, *(extend.sized(block, variant) for block in blocks))


def bind_readers(
    model: CompiledModel, widths: Sequence[int], sizes: Mapping[str, int], variant: Variant
) -> list[BoundProgram]:
    """The programs that read full prompts.

    Raises:
        RequestError: as `plan_request`.
    """
    return list(map(model.as_program("extend").bind, reader_keys(model, widths, sizes, variant)))


class PromptBlock(NamedTuple):
    """What reading a part of the prompts gives: logits `[B, 1, V]` of the last tokens, the state, and the rows whose
    prompts end there `[B]` bool; hidden states `[B, S, H]` of all tokens, where the program gives them; and how many
    tokens of each prompt were read by then, at most."""

    logits: Any
    state: StateArrays
    now: np.ndarray[Any, Any]
    hidden: jax.Array | None
    read: int


def prompt_blocks(
    readers: Sequence[BoundProgram], parts: Sequence[PromptPart], prompts: Sequence[Sequence[int]], batch: int,
    inputs: Mapping[str, Any], state: StateArrays | None = None,
) -> Iterator[PromptBlock]:  # fmt: skip
    """Read the prompts, part by part, behind the `state`. `inputs` are what comes with the tokens. A row that holds
    nothing reads one."""
    filled = [*prompts, *([0] for _ in range(batch - len(prompts)))]
    lengths, live = np.array([len(p) for p in filled]), np.arange(batch) < len(prompts)
    state, at, first_input = state or {}, 0, readers[0].model.first_input
    for reader, (width, count) in zip(readers, parts, strict=True):
        new = np.clip(lengths - at, 0, count)
        tokens = pad_rows([p[at : at + count] for p in filled], width)
        (logits, *others), state = reader({first_input: tokens, "lengths": new.astype(np.int32), **inputs}, state)
        hidden = others[0] if reader.key.hidden else None
        at += count
        yield PromptBlock(logits, state, live & (at - count < lengths) & (lengths <= at), hidden, at)
        inputs = {}  # from now on it is in the state
