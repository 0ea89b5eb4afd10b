"""Warm-up: run every program once that requests within the buckets of the profile can need.

Programs are compiled by running small requests, one for each combination of sizes and sampler methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import Buckets, SlotSizes, bucket_size
from rlx_jax.errors import RequestError, listing, shown
from rlx_jax.generate.decode import RowTokens
from rlx_jax.generate.decode_state import DecodeState, resize_state
from rlx_jax.generate.generation import prepare_prefix_state, start_generation
from rlx_jax.generate.prefill import extend, prefill
from rlx_jax.generate.prefix_cache import PREFIX_BUCKET, Prefix, one_row
from rlx_jax.generate.request import LanguageModel, Request, check_answers
from rlx_jax.generate.request_plan import CONTEXT_BUCKET, plan_request
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scheduler import SlotJob
from rlx_jax.generate.scoring import warm_scores
from rlx_jax.generate.slot_plan import plan_slots, slot_sizes
from rlx_jax.generate.slots import SlotClasses, Slots, open_slots
from rlx_jax.generate.speculative import Drafter
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.program_key import Variant
from rlx_jax.text.request_checks import Ids, check_has_buckets

# A sampler for each value that `SamplingSteps.widened` can return.
ALL_SAMPLERS = (Sampler(), Sampler(temperature=1.0), Sampler(repetition_penalty=2.0), Sampler(temperature=1.0, top_k=1))
# A seed of more than 32 bits, since the key of a large seed needs one more program.
LARGE_SEED = 2**32


def warm_all(
    lm: LanguageModel, max_new_tokens: Any, samplers: Any, drafter: Drafter | None, scoring: bool, n: Any,
    logprobs: Any, slots: Any = None,
) -> Buckets:  # fmt: skip
    """Run every program that `CausalLM.warmup` covers; arguments as there.

    Returns:
        the buckets of the profile for later requests, with cache lengths added if it has none, and the sizes of slots.

    Raises:
        RequestError: as there.
    """
    buckets = lm.model.settings.buckets
    budget = check_integer("max_new_tokens", max_new_tokens, 1)
    if lm.required_inputs:
        raise RequestError(f"warmup: requests need {listing(lm.required_inputs)}; warmup does not know their sizes")
    check_has_buckets(buckets)
    kinds = ALL_SAMPLERS if samplers is None else (samplers,) if isinstance(samplers, Sampler) else tuple(samplers)
    if not kinds or not all(isinstance(s, Sampler) for s in kinds):
        raise RequestError(f"warmup: samplers is {shown(samplers)}; expected a Sampler, several, or None for all kinds")
    kinds = tuple(map(lm.bind_sampler, kinds))
    check_answers(lm, n, logprobs)
    lm = replace(lm, buckets=replace(buckets, context=warm_contexts(buckets, budget, lm.max_positions)))
    sizes: tuple[SlotSizes, ...] = ()
    if slots is not None:
        # The longest cache is the largest bucket, and each width of a prompt is as frequent as any other.
        contexts, num_slots = lm.buckets.context, check_integer("slots", slots, 1)
        lengths = [min(width, contexts[-1] - 1) for width in buckets.prompt]
        totals = [min(length + budget, contexts[-1]) for length in lengths]
        sizes = slot_sizes(lm, [*lengths, lengths[-1]], [*totals, contexts[-1]], num_slots, None)
        lm = replace(lm, buckets=replace(lm.buckets, num_slots=num_slots, slots=sizes))
    with lm.model.programs.warm_up():
        warm_generation(lm, kinds, drafter, logprobs)
        warm_answers(lm, kinds[0], n or 1)
        warm_prefill(lm)
        requests: list[tuple[int | None, Drafter | None]] = [(each, None) for each in {None, logprobs}]
        requests += [] if drafter is None else [(None, drafter)]
        for sampler, (num_logprobs, source) in product(kinds if sizes else (), requests):
            options = RowOptions(1, sampler, (), (), LARGE_SEED, 0)
            device = open_slots(plan_slots(lm, [SlotJob(0, (0,), options)], num_logprobs, None, source))
            warm_slots(device, options)
            for part in device.parts if sampler is kinds[0] else ():
                warm_prefixes(part)
        if scoring:
            warm_scores(lm.model, buckets, lm.max_positions)
    return lm.buckets


def warm_generation(
    lm: LanguageModel, samplers: Sequence[Sampler], drafter: Drafter | None = None, logprobs: int | None = None
) -> None:
    """Run the programs of `generate` with each of the samplers, also with drafts and with log-probabilities if they are
    given. The buckets of `lm` have cache lengths."""
    kinds: list[dict[str, Any]] = [{}]
    kinds += [{"drafter": drafter}] if drafter is not None else []
    streams = [{**kind, "is_stream": True} for kind in kinds]
    kinds += [{"logprobs": logprobs}] if logprobs is not None else []
    requests = warm_requests(lm.buckets, samplers)
    for (rows, length, cache_len, sampler), request_options in product(requests, kinds + streams):
        if "is_stream" in request_options and rows > lm.buckets.rows(1):  # a stream has one row
            continue
        options = RowOptions(cache_len - length, sampler, (), (), LARGE_SEED, 0)
        request = Request(((0,) * length,) * rows, (options,), **request_options)
        for step, _ in enumerate(start_generation(plan_request(lm, request))):
            if step == 1:  # block 0 is the first token, and block 1 has run the loop
                break


def warm_answers(lm: LanguageModel, sampler: Sampler, max_answers: int) -> None:
    """Run the programs that repeat rows of a state, for up to `max_answers` answers to a prompt."""
    buckets = lm.buckets
    pairs_by_rows: dict[tuple[int, int], tuple[int, int]] = {}
    for prompts, answers in product(range(1, buckets.batch[-1] + 1), range(2, max_answers + 1)):
        if prompts * answers <= buckets.batch[-1]:
            pairs_by_rows.setdefault((buckets.rows(prompts), buckets.rows(prompts * answers)), (prompts, answers))
    for (prompts, answers), cache_len in product(pairs_by_rows.values(), buckets.context):
        if cache_len > 1:  # room for a prompt of one token and a new token
            options = RowOptions(cache_len - 1, sampler, (), (), LARGE_SEED, 0)
            request = Request(((0,),) * prompts, (options,), n=answers)
            start_generation(plan_request(lm, request))


def warm_slots(device: SlotClasses, options: RowOptions) -> None:
    """Run every program of empty slots: each width and chunk of prefill, fills, moves to longer caches, decoding."""
    sizes = device.classes

    def run(index: int, num_tokens: int) -> SlotJob:
        job = SlotJob(0, (0,) * num_tokens, options)
        device.fill(index, [(0, job)])
        device.decode([0] * len(sizes))
        return job

    shorter = 0  # the longest prompt that classes of shorter caches prefill
    for i, each in enumerate(sizes):
        # Prompts of each width, and one of a chunk and a token, as later chunks are another program.
        lengths = {min(width, each.cache_len - 1) for width in (*each.widths, each.widths[-1] + 1)}
        lengths = {max(length, shorter + 1) for length in lengths}
        for length in sorted(lengths) if shorter + 1 < each.cache_len else ():
            job = run(i, length)
        for j in range(i + 1, len(sizes)):
            if shorter + 1 < each.cache_len:
                run(j, shorter + 1)
            device.move(i, j, [(0, 0, replace(job, options=replace(options, budget=2), new=RowTokens([0])))])
            device.decode([0] * len(sizes))
        shorter = each.cache_len


def warm_prefixes(part: Slots) -> None:
    """Run what prompts need that continue a state or share a prefix: the functions that copy states of all sizes into
    the rows of a fill, and a prefix out of it, and each width of prefill after one."""
    model, lm, sizes = part.plan.loop.model, part.plan.lm, part.plan.suffix_sizes

    def prefix(state: Any, cache_len: int) -> Prefix:
        return Prefix((0,), 0, cache_len, arrays=state)

    for rows, cache_len in product(lm.buckets.batch, lm.buckets.context):
        state: Any = part.start([prefix(model.init_state(rows, cache_len).arrays(), cache_len)])
    for cache_len in {bucket_size(n, PREFIX_BUCKET, lm.max_positions) for n in range(1, sizes.cache_len)}:
        new = prefix(resize_state(one_row(model, cache_len), state, np.zeros(1, np.int32)), cache_len)
        part.start([new])
    for width in sizes.widths if sizes.cache_len > 1 else ():
        list(part.prefill([(0,) * min(1 + width, sizes.cache_len)], [new]))


def warm_prefill(lm: LanguageModel) -> None:
    """Run the programs of `CausalLM.prefill` and `extend` with the logits of the last tokens, and the programs that
    copy a state of one row: of a conversation to a longer cache, and of a prefix to each number of rows."""
    buckets = lm.buckets

    def run_prefill(block: Ids, lengths: Any, cache_len: int) -> DecodeState:
        return prefill(lm, block, lengths, cache_len, "last", None, None)[1]

    for rows, cache_len, width in product(buckets.batch, buckets.context, buckets.prompt):
        if width > cache_len:
            continue
        block = np.zeros((rows, width), np.int32)
        state = run_prefill(block, np.ones(rows, int), cache_len)
        for more in (block, block[:, :1]):
            _, state = extend(lm, state, more, np.zeros(rows, int), "last")
    for rows in range(1, buckets.batch[-1]):  # slicing off padding rows takes a program for each number of rows
        run_prefill(np.zeros((rows, 1), np.int32), None, buckets.context[0])
    variant = Variant(outputs=lm.model.output_names[:1])
    for cache_len, longer in combinations_with_replacement(buckets.context, 2):
        arrays = run_prefill(np.zeros((1, 1), np.int32), None, cache_len).take(lm.owner).arrays()
        for rows in buckets.batch if longer == cache_len else (buckets.rows(1),):
            sizes = {"batch": rows, "context": longer, "seq": 1}
            program = lm.model.as_program("extend").bind_to_sizes(sizes, variant=variant)
            prepare_prefix_state(program, [Prefix((0,), 0, cache_len, arrays=arrays)])


def warm_requests(buckets: Buckets, samplers: Sequence[Sampler]) -> Iterator[tuple[int, int, int, Sampler]]:
    """Yield requests that together need every prefill, extend and decoding program of requests without drafts.

    `warm_generation` adds drafts and log-probabilities.

    A request is (rows, tokens of a prompt, cache length, sampler).

    Prefill programs do not depend on the sampler, so only the first sampler is combined with all prompt lengths.
    """
    chunk = buckets.largest_chunk
    for rows in buckets.batch:
        for cache_len in (size for size in buckets.context if size > 1):
            # A prompt of one token runs the decoding loop, a prompt of each bucket's width runs `prefill`, and a prompt
            # of one full chunk and a remainder of each width runs `extend`.
            lengths = {1, *(min(p, cache_len - 1) for p in buckets.prompt if p <= cache_len)}
            if chunk is not None and chunk + 1 < cache_len:
                lengths |= {min(chunk + p, cache_len - 1) for p in buckets.prompt}
            for index, sampler in enumerate(samplers):
                for length in sorted(lengths) if index == 0 else (1,):
                    yield rows, length, cache_len, sampler


def warm_contexts(buckets: Buckets, new_tokens: int, max_positions: int | None) -> tuple[int, ...]:
    """Return the cache lengths of a profile, or else the lengths that each prompt bucket with new tokens needs."""
    if buckets.context:
        return buckets.context
    limit = max_positions or buckets.prompt[-1] + new_tokens
    cache_len = {bucket_size(min(p + new_tokens, limit), CONTEXT_BUCKET, max_positions) for p in buckets.prompt}
    return tuple(sorted(cache_len))
