"""Warm-up: every program that requests within the buckets can need is run once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.errors import RequestError, listing
from rlx_jax.generate.answers import check_answers
from rlx_jax.generate.asking import begin
from rlx_jax.generate.decode_state import DecodeState
from rlx_jax.generate.plan import Before, DraftPlan, Request
from rlx_jax.generate.prompts import state_behind
from rlx_jax.generate.reading import extend, prefill
from rlx_jax.generate.request_inputs import declared
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scoring import warm_scores
from rlx_jax.generate.serving import Sizes, check_samplers, largest_chunk, request_sizes, warm_contexts
from rlx_jax.generate.speaker import Speaker
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.text.padding import check_sizes
from rlx_jax.text.requests import Ids, whole_number


def refuse_inputs(model: CompiledModel) -> None:
    """Requests bring tokens alone.

    Raises:
        RequestError: the flow needs more.
    """
    if required := [name for name, d in declared(model).items() if not d.optional]:
        raise RequestError(f"warmup: requests bring {listing(required)}, of sizes that are not known before they come")


def warm_all(
    speaker: Speaker, max_new_tokens: Any, samplers: Any, drafts: DraftPlan | None, scoring: bool, n: Any, logprobs: Any
) -> Buckets:
    """Run what `CausalLM.warmup` covers; arguments as there. The buckets that requests are padded to from now on.

    Raises:
        RequestError: as there.
    """
    given = speaker.model.settings.buckets
    budget = whole_number("max_new_tokens", max_new_tokens, 1)
    refuse_inputs(speaker.model)
    check_sizes(given)
    chosen = check_samplers(samplers)
    answers, top = check_answers(n, logprobs, None, False, speaker.vocab_size)
    speaker = replace(speaker, buckets=replace(given, context=warm_contexts(given, budget, speaker.max_positions)))
    with speaker.model.programs.warm_up():
        warm_generation(speaker, chosen, drafts, top)
        warm_answers(speaker, chosen[0], answers)
        warm_reading(speaker)
        warm_longer(speaker)
        if scoring:
            warm_scores(speaker.model, given, speaker.max_positions)
    return speaker.buckets


def warm_generation(
    speaker: Speaker, samplers: Sequence[Sampler], drafts: DraftPlan | None = None, top: int | None = None
) -> None:
    """The programs of `generate`, with each of the samplers, also with drafts and with so many log-probabilities where
    these are given; the buckets have contexts."""
    buckets = speaker.buckets
    kinds: list[tuple[DraftPlan | None, int | None]] = [(None, None), (drafts, None), (None, top)]
    kinds = [kind for at, kind in enumerate(kinds) if kind not in kinds[:at]]
    for (rows, length, slots, sampler), (source, likely) in product(warm_requests(buckets, samplers), kinds):
        request = Request(((0,) * length,) * rows, slots - length, sampler, (), (), 2**32, drafts=source, top=likely)
        for step, _ in enumerate(begin(speaker, request, _sizes(speaker, length, rows, slots))):
            if step == 1:  # the first token, and a block of the loop
                break


def warm_answers(speaker: Speaker, sampler: Sampler, most: int) -> None:
    """What repeats the rows of states for up to `most` answers to a prompt."""
    buckets = speaker.buckets
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for prompts, answers in product(range(1, buckets.batch[-1] + 1), range(2, most + 1)):
        if prompts * answers <= buckets.batch[-1]:
            pairs.setdefault((buckets.rows(prompts), buckets.rows(prompts * answers)), (prompts, answers))
    for (prompts, answers), slots in product(pairs.values(), buckets.context):
        if slots > 1:
            request = Request(((0,),) * prompts, slots - 1, sampler, (), (), 2**32, answers=answers)
            begin(speaker, request, _sizes(speaker, 1, prompts * answers, slots))


def _sizes(speaker: Speaker, length: int, rows: int, slots: int) -> Sizes:
    return replace(request_sizes(speaker.buckets, [length] * rows, 1, speaker.max_positions), slots=slots)


def warm_reading(speaker: Speaker) -> None:
    """The programs of `CausalLM.prefill` and `extend` with the logits of the last tokens."""
    buckets = speaker.buckets

    def read(block: Ids, lengths: Any, slots: int) -> DecodeState:
        return prefill(speaker, block, lengths, slots, "last", None, None)[1]

    for rows, width, slots in warm_blocks(buckets):
        block = np.zeros((rows, width), np.int32)
        state = read(block, np.ones(rows, int), slots)
        for more in (block, block[:, :1]):
            _, state = extend(speaker, state, more, np.zeros(rows, int), "last")
    for rows in range(1, buckets.batch[-1]):  # how many rows there are decides how an answer is cut
        read(np.zeros((rows, 1), np.int32), None, buckets.context[0])


def warm_longer(speaker: Speaker) -> None:
    """What moves the state of a conversation, which is one row, to a larger cache."""
    rows, contexts = speaker.buckets.rows(1), speaker.buckets.context
    for small, large in combinations(contexts, 2):
        state = prefill(speaker, np.zeros((1, 1), np.int32), None, small, "last", None, None)[1]
        extend = speaker.model.as_program("extend").bound(
            {"batch": rows, "context": large, "seq": 1}, variant=Variant(outputs=speaker.model.output_names[:1])
        )
        state_behind(extend, Before(state.take(speaker.owner).arrays(), (0,), (1,), small))


def warm_requests(buckets: Buckets, samplers: Sequence[Sampler]) -> Iterator[tuple[int, int, int, Sampler]]:
    """Requests that need every program between them: (rows, tokens of a prompt, slots, sampler).

    Programs that read prompts do not depend on the sampler, so that the first one reads all lengths.
    """
    chunk = largest_chunk(buckets)
    for rows in buckets.batch:
        for slots in (size for size in buckets.context if size > 1):
            # A short prompt leaves room for the loop; then one of each width, and behind a whole chunk a rest of each.
            lengths = {1, *(min(p, slots - 1) for p in buckets.prompt if p <= slots)}
            if chunk is not None and chunk + 1 < slots:
                lengths |= {min(chunk + p, slots - 1) for p in buckets.prompt}
            for n, sampler in enumerate(samplers):
                for length in sorted(lengths) if n == 0 else (1,):
                    yield rows, length, slots, sampler


def warm_blocks(buckets: Buckets) -> Iterator[tuple[int, int, int]]:
    """What `prefill` and `extend` are given directly: (rows, tokens, slots)."""
    for rows in buckets.batch:
        for slots in buckets.context:
            yield from ((rows, width, slots) for width in buckets.prompt if width <= slots)
