"""`SlotPlan`: the sizes and the few programs of continuous batching, chosen by the prompts and the device's memory.

Slots have one to three context classes, each with a cache length and a `SlotPlan` of its own. A step of decoding reads
the full cache of every slot, so a class for each range of lengths reads less, and more slots fit the device. But each
class reads all parameters in a step of its own. `choose_classes` compares the sums of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import MAX_CHUNK, Buckets, SlotSizes, bucket_size, fit_bucket
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, quote
from rlx_jax.generate.decode import DecodeLoop, FillSlots
from rlx_jax.generate.drafters import ProgramDrafter
from rlx_jax.generate.prefix_cache import state_bytes
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.request_plan import (
    CONTEXT_BUCKET,
    LOGPROBS_BUCKET,
    chunk_widths,
    loop_key,
    prefill_keys,
    request_variant,
)
from rlx_jax.generate.sampler import SamplingSteps
from rlx_jax.generate.scheduler import SlotJob
from rlx_jax.generate.speculative import DRAFTER_PREFIX, Drafter
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.runtime.estimate import parameter_bytes, workspace_bytes
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.sequence_state import EmptyState
from rlx_jax.text.request_checks import PROMPT_BUCKET

# The most slots by platform, if no number is passed: with more rows a step takes time in proportion to them.
MAX_SLOTS = {"cpu": 32}
MAX_SLOTS_ON_ACCELERATOR = 128
# More slots for many long jobs, as memory allows. One H200, 8B shape in bf16, prompts of 1,000 tokens with 1,000 new
# ones: 768 of them make 8,107 tokens/s in 128 slots and 8,955 in 192, 1,000 of them 8,568 in 128 and 9,360 in 256.
# Otherwise the steps of the longest job decide, which take longer with more rows: 1B shape, 512 prompts with 8 to 512
# new tokens: 33,600 tokens/s in 128 slots, 30,400 in 192.
MORE_SLOTS = (192, 256)
LONG_JOBS_PER_SLOT = 3
# Jobs of a fill per slot: fewer leave fewer slots idle until a group of them is free, and more make prefill efficient.
SLOTS_PER_FILL_ROW = 8
# Prefill programs of different widths, each half of the next one; fewer if there are more classes, whose loops are
# programs too, so that a request without prefixes needs at most 8 programs of the model.
MAX_WIDTHS = 4
MAX_CLASSES = 3
# Another class must make a token cheaper by this factor: it takes programs of its own, and fewer rows share a step.
MIN_CLASS_GAIN = 1.25
# The part of the device's memory that the plan may use: the rest is for what the estimate leaves out.
USABLE_MEMORY = 0.9
STOP_BUCKET = 8


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The sizes and programs of a context class.

    Attributes:
        lm: the model.
        sizes: the sizes.
        suffix_sizes: the same for the rest of prompts after a prefix: with every other width, so that there are few
            programs.
        fill: the program that copies prefilled prompts into slots.
        fill_shardings: the shardings of its results; None on one device.
        stop_width: number of stop ids of a slot, padding included.
        loop: the program that decodes.
        empty_state: the function that creates the state.
        drafter: the source of drafts; None for plain decoding.
        drafter_state: the function that creates the state of its model, if it has one.
    """

    lm: LanguageModel
    sizes: SlotSizes
    suffix_sizes: SlotSizes
    fill: FillSlots
    fill_shardings: Any
    stop_width: int
    loop: BoundProgram
    empty_state: EmptyState
    drafter: Drafter | None = None
    drafter_state: EmptyState | None = None

    @property
    def num_drafts(self) -> int:
        """Return the number of drafts of a step."""
        return 0 if self.drafter is None else self.drafter.tokens


def plan_slots(
    lm: LanguageModel, jobs: Sequence[SlotJob], logprobs: int | None = None, num_slots: int | None = None,
    drafter: Drafter | None = None,
) -> tuple[SlotPlan, ...]:  # fmt: skip
    """Choose the sizes and the programs for jobs; nothing has run yet.

    Args:
        logprobs: as in `Request`.
        num_slots: number of slots; None to choose.
        drafter: as in `Request`.

    Returns:
        The plan of each context class, the shortest cache first; the last one holds every job.

    Raises:
        RequestError: so many slots do not fit the device, or the buckets of the profile.
    """
    if drafter is not None and drafter.max_positions is not None:  # both have caches of one length
        lm = replace(lm, max_positions=min(lm.max_positions or drafter.max_positions, drafter.max_positions))
    steps, lengths = SamplingSteps(), [len(job.ids) for job in jobs]
    for sampler in {job.options.sampler for job in jobs}:
        steps = steps.union(sampler.sampling_steps(lm.vocab_size))
    steps = steps.widened() if lm.buckets.prompt or lm.buckets.batch else steps
    totals = [len(job.ids) + job.options.budget for job in jobs]
    num_logprobs = logprobs and bucket_size(logprobs, LOGPROBS_BUCKET, lm.vocab_size)
    stop_width = bucket_size(max(len(job.options.stop_ids) for job in jobs), STOP_BUCKET, None)
    classes = slot_sizes(lm, lengths, totals, num_slots, drafter)
    widths = classes[0].widths[::2]
    return tuple(plan_class(lm, sizes, widths, steps, num_logprobs, stop_width, drafter) for sizes in classes)


def plan_class(
    lm: LanguageModel, sizes: SlotSizes, suffix_widths: tuple[int, ...], steps: SamplingSteps,
    num_logprobs: int | None, stop_width: int, drafter: Drafter | None,
) -> SlotPlan:  # fmt: skip
    """Return the plan of a context class; arguments as in `SlotPlan`.

    Raises:
        RequestError: as `plan_slots`.
    """
    model, num_drafts = lm.model.as_program("extend"), 0 if drafter is None else drafter.tokens
    num_steps = 2 * model.programs.settings.loop.steps
    wrapper = DecodeLoop(steps, lm.ids_input, num_steps, True, stop_width, num_logprobs=num_logprobs)
    variant = request_variant(model, drafter)
    state_sizes = {"batch": sizes.num_slots, "context": sizes.cache_len}
    key = model.key_for_sizes({**state_sizes, "seq": 1}, variant)
    all_shardings = model.programs.state_shardings(key)
    types, drafter_state = dict(model.programs.template(key.symbolic).state), None
    bound = None if drafter is None else drafter.bind(state_sizes)
    if isinstance(bound, ProgramDrafter):
        symbolic = bound.keys[0].symbolic
        drafter_state = bound.programs.empty_state(symbolic, state_sizes, num_drafts)
        types |= {DRAFTER_PREFIX + name: t for name, t in bound.programs.template(symbolic).state.items()}
        draft_shardings = bound.shardings()
        if all_shardings is not None and draft_shardings is not None:
            all_shardings |= {DRAFTER_PREFIX + name: s for name, s in draft_shardings.state.items()}
    dims = {name: [str(dim) for dim in t.shape] for name, t in types.items()}
    row_axes = tuple((name, shape.index("batch")) for name, shape in dims.items() if "batch" in shape)
    if merged := [name for name, t in types.items() if "batch" in t.symbols and name not in dict(row_axes)]:
        raise RequestError(
            f"slots: {model.name}: the state {quote(merged[0])} is {types[merged[0]]}, without an axis of "
            "rows alone, so that rows cannot be replaced; pass at most as many prompts at once as fit one batch"
        )
    # Chunks end where they do without slots if the cache rounds what later ones read.
    largest = {sizes.widths[-1]} if lm.model.settings.rounds_cache else set()
    suffix_sizes = replace(sizes, widths=tuple(sorted({*suffix_widths} | largest)), extends=True)
    return SlotPlan(
        lm, sizes, suffix_sizes, FillSlots(steps, row_axes, num_logprobs=num_logprobs),
        None if all_shardings is None else (*(model.programs.replicated,) * 3, all_shardings), stop_width,
        model.bind(loop_key(model, variant, state_sizes, drafter, wrapper)),
        model.programs.empty_state(key.symbolic, state_sizes, num_drafts), drafter, drafter_state,
    )  # fmt: skip


def fill_keys(
    lm: LanguageModel, sizes: SlotSizes, widths: Sequence[int], drafter: Drafter | None = None
) -> tuple[ProgramKey, ...]:
    """Return the programs that prefill chunks of these widths; `drafter` as in `Request`."""
    state_sizes = {"batch": sizes.fill_rows, "context": sizes.cache_len}
    return prefill_keys(lm.model, widths, state_sizes, request_variant(lm.model, drafter), sizes.extends)


def slot_sizes(
    lm: LanguageModel, lengths: Sequence[int], totals: Sequence[int], num_slots: int | None, drafter: Drafter | None
) -> tuple[SlotSizes, ...]:
    """Return the sizes of each context class, the shortest cache first.

    Args:
        lengths: number of tokens of the prompt of each job.
        totals: the most tokens of each job, prompt and answer.
        num_slots: number of slots of all classes; None for as many as are useful and fit the device.
        drafter: as in `Request`. With a model that drafts there is one class: sampled drafts depend on the room left.
            So there is if the cache rounds: tokens that are verified together read each other's keys unrounded.

    Raises:
        RequestError: as `plan_slots`.
    """
    buckets, longest = lm.buckets, max(lengths)
    draft_model, rounds = drafter.model if isinstance(drafter, ProgramDrafter) else None, lm.model.settings.rounds_cache
    one_class = draft_model is not None or (drafter is not None and rounds)
    if buckets.slots and max(totals) <= buckets.slots[-1].cache_len and num_slots in (None, buckets.num_slots):
        one: dict[int, float] = {buckets.slots[-1].cache_len: 1}
        return divide_slots(lm, one, buckets.num_slots, longest) if one_class else buckets.slots
    widths = prompt_widths(buckets, longest, lm.max_positions)
    # If the cache rounds, every class has the widths with which a prompt is prefilled without slots.
    has_sizes = buckets.prompt or buckets.context
    least = chunk_widths(buckets, longest, lm.max_positions)[0] if rounds and has_sizes else widths[0]
    context = max(*totals, least)
    cache_len = fit_bucket(buckets.context, context) or bucket_size(context, CONTEXT_BUCKET, lm.max_positions)
    shorter = buckets.context or [CONTEXT_BUCKET << i for i in range(cache_len.bit_length())]
    shorter = () if one_class else shorter
    caches = (*(size for size in shorter if least <= size < cache_len), cache_len)
    rows = num_slots or default_slots(lm, [total - length for total, length in zip(totals, lengths, strict=True)])
    # If the cache rounds, chunks of a prompt take `prefill` and `extend` in each class.
    most = MAX_CLASSES - (rounds and longest > widths[-1])
    shares = choose_classes(lm, caches, steps_by_cache(caches, lengths, totals), min(most, rows), rows)

    def sizes_of(rows: int) -> tuple[SlotSizes, ...]:
        return divide_slots(lm, {cache: shares[cache] for cache in [*shares][-rows:]}, rows, longest)

    sizes = sizes_of(rows)
    if num_slots is None:
        while rows > 1 and not fits_device(lm, sizes, draft_model):
            rows = rows // 2 if rows <= MAX_SLOTS_ON_ACCELERATOR else rows - 64
            sizes = sizes_of(rows)
    elif not fits_device(lm, sizes, draft_model):
        powers = (1 << i for i in reversed(range(num_slots.bit_length())))
        fitting = next((slots for slots in powers if fits_device(lm, sizes_of(slots), draft_model)), 0)
        advice = f"{fitting} slots would fit" if fitting else "not even one would fit"
        raise RequestError(
            f"slots is {num_slots}: caches of up to {cache_len:,} tokens each do not fit the device's memory next to "
            f"the parameters; {advice}"
        )
    return sizes


def steps_by_cache(caches: Sequence[int], lengths: Sequence[int], totals: Sequence[int]) -> list[int]:
    """Return the steps of all jobs that need a cache of each length, but none of a shorter one."""
    starts, ends = np.array(lengths, np.int64), np.array(totals, np.int64)
    steps = (np.minimum(ends, top) - np.maximum(starts, bottom) for bottom, top in pairwise((0, *caches)))
    return [int(np.maximum(count, 0).sum()) for count in steps]


def choose_classes(
    lm: LanguageModel, caches: Sequence[int], steps: Sequence[int], most: int, rows: int
) -> dict[int, float]:
    """Choose the cache length of each class, for the fewest bytes read for a token.

    Args:
        caches: the lengths to choose from, ascending; the last one is always chosen.
        steps: the steps of all jobs with each length; see `steps_by_cache`.
        most: the most classes.
        rows: number of slots of all classes.

    Returns:
        The part of all slots that each class has, in proportion to its steps.
    """
    row_bytes = [state_bytes(lm.model, rows, cache) / rows for cache in caches]
    # cuDNN's attention reads the keys that a row has, whatever the length of its cache: there, short caches save memory
    # alone. One H200, 1B shape, 128 slots of 2,048 positions: 35,200 tokens/s, and 18,600 with 100 of them of 512.
    reads_whole_caches = lm.model.programs.settings.target != "cuda"
    weights, memory = sum(parameter_bytes(lm.model.programs).values()), running_device().memory
    free = np.inf if memory is None else max(USABLE_MEMORY * memory - weights, 1)
    best: tuple[float, dict[int, float]] | None = None
    for count in range(1, min(most, len(caches)) + 1):
        for lower in combinations(range(len(caches) - 1), count - 1):
            ends = (*lower, len(caches) - 1)
            parts = [sum(steps[i + 1 : j + 1]) / sum(steps) for i, j in pairwise((-1, *ends))]
            mean = sum(part * row_bytes[end] for part, end in zip(parts, ends, strict=True))
            # Each class reads the parameters for its own rows, of which there are as many as fit.
            token_bytes = count * weights / min(rows, free / mean) + mean * reads_whole_caches
            if best is None or token_bytes * MIN_CLASS_GAIN ** (count - 1) < best[0]:
                shares = {caches[end]: part for part, end in zip(parts, ends, strict=True)}
                best = token_bytes * MIN_CLASS_GAIN ** (count - 1), shares
    assert best is not None
    return best[1]


def divide_slots(lm: LanguageModel, shares: dict[int, float], rows: int, longest: int) -> tuple[SlotSizes, ...]:
    """Return the sizes of the classes: `rows` slots divided by their shares, at least one for each.

    Args:
        shares: the part of the slots by cache length, ascending.
        rows: number of slots.
        longest: number of tokens of the longest prompt.
    """
    buckets, caches = lm.buckets, [*shares]
    scale = (rows - len(caches)) / sum(shares.values()) if sum(shares.values()) else 0
    counts = [1 + int(scale * part) for part in shares.values()]
    counts[-1] += rows - sum(counts)
    counts = [buckets.rows(count) for count in counts]
    sizes = []
    for i, (cache_len, count) in enumerate(zip(caches, counts, strict=True)):
        widths = prompt_widths(buckets, min(longest, cache_len), lm.max_positions)
        widths = tuple(width for width in widths if width <= cache_len)
        widths = widths[-1:] if i else widths if buckets.prompt else widths[-(MAX_WIDTHS + 1 - len(caches)) :]
        # A class also prefills jobs for classes of longer caches.
        fill_rows = buckets.rows(-(-max(counts[i:]) // SLOTS_PER_FILL_ROW))
        # If the cache rounds, `extend` reads rounded keys of the prompt itself, which `prefill` does not.
        extends = i > 0 and not lm.model.settings.rounds_cache
        sizes.append(SlotSizes(count, min(max(counts[i:]), fill_rows), widths, cache_len, extends))
    return tuple(sizes)


def default_slots(lm: LanguageModel, budgets: Sequence[int]) -> int:
    """Return the useful number of slots for jobs with these numbers of new tokens, if the device's memory allows."""
    limit = max_slots(lm)
    rows = bucket_size(min(len(budgets), limit), 1, limit)
    if limit < MAX_SLOTS_ON_ACCELERATOR or lm.buckets.batch:
        return rows
    long_jobs = sum(budgets) // max(*budgets, 1)
    return max(rows, *(more for more in MORE_SLOTS if more * LONG_JOBS_PER_SLOT <= long_jobs), 1)


def max_slots(lm: LanguageModel) -> int:
    """Return the most slots that are chosen without `slots=`."""
    if lm.buckets.batch:
        return lm.buckets.num_slots or lm.buckets.batch[-1]
    return MAX_SLOTS.get(lm.model.programs.settings.target, MAX_SLOTS_ON_ACCELERATOR)


def prompt_widths(buckets: Buckets, longest: int, max_positions: int | None) -> tuple[int, ...]:
    """Return the widths of the prefill programs for prompts of up to `longest` tokens, ascending."""
    if buckets.prompt:
        return buckets.prompt
    largest = bucket_size(min(longest, MAX_CHUNK), PROMPT_BUCKET, max_positions)
    widths = {max(largest >> i, min(PROMPT_BUCKET, largest)) for i in range(MAX_WIDTHS)}
    return tuple(sorted(widths))


def fits_device(lm: LanguageModel, classes: Sequence[SlotSizes], draft_model: CompiledModel | None = None) -> bool:
    """Return whether the slots and the largest fill fit the memory of a device, by an estimate."""
    memory = running_device().memory
    if memory is None:
        return True
    models = [lm.model, *([] if draft_model is None else [draft_model])]
    free = USABLE_MEMORY * memory - sum(sum(parameter_bytes(model.programs).values()) for model in models)
    free -= sum(slots_bytes(lm, models, sizes) for sizes in classes) + (lm.prefixes.size or 0)
    return free >= 0 and all(fill_bytes(lm, sizes) <= free for sizes in classes)


def slots_bytes(lm: LanguageModel, models: Sequence[CompiledModel], sizes: SlotSizes) -> int:
    """Return the bytes of the states of a class and of a fill on one device, and an estimate of a step's logits."""
    # Without donation a program writes a new state while the old one exists.
    copies = 1 if lm.model.programs.settings.plan.donate_state else 2
    # Logits in float32, with what sampling sorts.
    logits = 4 * 4 * sizes.num_slots * lm.vocab_size
    rows = ((sizes.num_slots, copies), (sizes.fill_rows, 1))
    return logits + sum(times * state_bytes(model, n, sizes.cache_len) for model in models for n, times in rows)


def fill_bytes(lm: LanguageModel, sizes: SlotSizes) -> int:
    """Return an estimate of the bytes of activations while the widest fill is prefilled, on one device."""
    programs = lm.model.programs
    (key,) = fill_keys(lm, sizes, sizes.widths[-1:])

    def measure() -> int:
        lir = programs.function(key).lir
        return activation_bytes(lir.graph, True, lir.plan.scan, partial(workspace_bytes, lir))

    result: int = programs.request_keys(("fill bytes", key), measure)
    return result
