"""`SlotPlan`: the sizes and the few programs of continuous batching, chosen by the prompts and the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.settings import Buckets, bucket_size, fit_bucket
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, quote
from rlx_jax.generate.decode import DecodeLoop
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.request_plan import CONTEXT_BUCKET, LOGPROBS_BUCKET, prefill_keys
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import SamplingSteps
from rlx_jax.generate.slot_fill import FillSlots
from rlx_jax.lowering.inspect.buffers import fused_activation_bytes
from rlx_jax.runtime.estimate import parameter_bytes, state_bytes_by_kind, workspace_bytes
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.program_key import ProgramKey, Variant
from rlx_jax.runtime.programs import state_shardings
from rlx_jax.runtime.sequence_state import EmptyState
from rlx_jax.text.padding import PROMPT_BUCKET

# The most slots by platform, if no number is passed: with more rows a step takes time in proportion to them.
MAX_SLOTS = {"cpu": 32}
MAX_SLOTS_ON_ACCELERATOR = 128
# Jobs of a fill per slot: fewer leave fewer slots idle until a group of them is free, and more make prefill efficient.
SLOTS_PER_FILL_ROW = 8
# Longer prompts are prefilled in chunks of so many tokens.
MAX_CHUNK = 1024
# Prefill programs of different widths, each half of the next one.
MAX_WIDTHS = 4
# The part of the device's memory that the plan may use: the rest is for what the estimate leaves out.
USABLE_MEMORY = 0.9
STOP_BUCKET = 8


@dataclass(frozen=True)
class SlotSizes:
    """The sizes of continuous batching.

    Attributes:
        num_slots: rows of the state.
        fill_rows: rows of a fill.
        widths: widths of the prefill programs, ascending.
        cache_len: length of the cache.
    """

    num_slots: int
    fill_rows: int
    widths: tuple[int, ...]
    cache_len: int

    def chunk_widths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the widths of the programs that prefill a prompt: the smallest that fits, or chunks of the largest."""
        width = fit_bucket(self.widths, num_tokens)
        return (width,) if width is not None else (self.widths[-1],) * -(-num_tokens // self.widths[-1])


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The sizes and programs of continuous batching.

    Attributes:
        lm: the model.
        sizes: the sizes.
        fill: the program that copies prefilled prompts into slots.
        fill_shardings: the shardings of its results; None on one device.
        stop_width: number of stop ids of a slot, padding included.
        loop: the program that decodes.
        empty_state: the function that creates the state.
    """

    lm: LanguageModel
    sizes: SlotSizes
    fill: FillSlots
    fill_shardings: Any
    stop_width: int
    loop: BoundProgram
    empty_state: EmptyState
    _seed_words: dict[Any, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False)

    def prefill_programs(self, widths: Sequence[int]) -> list[BoundProgram]:
        """Return the programs that prefill chunks of these widths."""
        return list(map(self.loop.model.bind, fill_keys(self.lm, self.sizes, widths)))

    def seed_words(self, seed: Any) -> np.ndarray[Any, Any]:
        """Return the words of the key of a seed, `[2]` uint32 on the host."""
        if isinstance(seed, jax.Array):
            return np.asarray(jax.device_get(jax.random.key_data(random_key("seed", seed))))
        if seed not in self._seed_words:
            self._seed_words.clear()  # most requests have one seed, and an iterator may have any number
            self._seed_words[seed] = np.asarray(jax.device_get(jax.random.key_data(random_key("seed", seed))))
        return self._seed_words[seed]


def plan_slots(
    lm: LanguageModel, options: Sequence[RowOptions], lengths: Sequence[int], logprobs: int | None,
    num_slots: int | None,
) -> SlotPlan:  # fmt: skip
    """Choose the sizes and the programs for jobs; nothing has run yet.

    Args:
        options, lengths: the options of each job, and the length of its prompt.
        logprobs: as in `Request`.
        num_slots: number of slots; None to choose.

    Raises:
        RequestError: so many slots do not fit the device, or the buckets of the profile.
    """
    model = lm.model.as_program("extend")
    steps = SamplingSteps()
    for sampler in {option.sampler for option in options}:
        steps = steps.union(sampler.sampling_steps(lm.vocab_size))
    steps = steps.widened() if lm.buckets.prompt or lm.buckets.batch else steps
    needed = max(length + option.budget for length, option in zip(lengths, options, strict=True))
    sizes = slot_sizes(lm, max(lengths), needed, len(lengths), num_slots)
    num_logprobs = logprobs and bucket_size(logprobs, LOGPROBS_BUCKET, lm.vocab_size)
    loop_settings = model.programs.settings.loop
    wrapper = DecodeLoop(steps, model.first_input, 2 * loop_settings.steps, True, num_logprobs, slots=True)
    variant = Variant(True, model.output_names[:1])
    state_sizes = {"batch": sizes.num_slots, "context": sizes.cache_len}
    key = model.key_for_sizes({**state_sizes, "seq": 1}, variant)
    template, sharding = model.programs.template(key.symbolic), model.programs.model_sharding
    shardings = None
    if sharding is not None:
        replicated = model.programs.replicated
        shardings = (replicated, replicated, replicated, state_shardings(template, dict(key.binding), sharding))
    dims = {name: [str(dim) for dim in t.shape] for name, t in template.state.items()}
    row_axes = tuple((name, shape.index("batch")) for name, shape in dims.items() if "batch" in shape)
    if merged := [name for name, t in template.state.items() if "batch" in t.symbols and name not in dict(row_axes)]:
        raise RequestError(
            f"slots: {model.name}: the state {quote(merged[0])} is {template.state[merged[0]]}, without an axis of "
            "rows alone, so that rows cannot be replaced; pass at most as many prompts at once as fit one batch"
        )
    stop_width = bucket_size(max(len(option.stop_ids) for option in options), STOP_BUCKET, None)
    return SlotPlan(
        lm, sizes, FillSlots(steps, num_logprobs, row_axes), shardings, stop_width,
        model.bind(replace(key, wrapper=wrapper)), model.programs.empty_state(key.symbolic, state_sizes),
    )  # fmt: skip


def fill_keys(lm: LanguageModel, sizes: SlotSizes, widths: Sequence[int]) -> tuple[ProgramKey, ...]:
    """Return the programs that prefill chunks of these widths."""
    state_sizes = {"batch": sizes.fill_rows, "context": sizes.cache_len}
    return prefill_keys(lm.model, widths, state_sizes, Variant(True, lm.model.output_names[:1]))


# -- sizes -------------------------------------------------------------------------------------


def slot_sizes(lm: LanguageModel, longest: int, context: int, count: int, num_slots: int | None) -> SlotSizes:
    """Return the sizes for `count` jobs.

    Args:
        longest: number of tokens of the longest prompt.
        context: the most tokens of a job, prompt and answer.
        num_slots: number of slots; None for as many as are useful and fit the device.

    Raises:
        RequestError: as `plan_slots`.
    """
    buckets = lm.buckets
    widths = prompt_widths(buckets, longest, lm.max_positions)
    context = max(context, widths[0])
    cache_len = fit_bucket(buckets.context, context) or bucket_size(context, CONTEXT_BUCKET, lm.max_positions)
    widths = tuple(width for width in widths if width <= cache_len)

    def sizes_of(slots: int) -> SlotSizes:
        rows = buckets.rows(slots)
        return SlotSizes(rows, min(rows, buckets.rows(-(-rows // SLOTS_PER_FILL_ROW))), widths, cache_len)

    if num_slots is not None:
        sizes = sizes_of(num_slots)
        if not fits_device(lm, sizes):
            powers = (1 << i for i in reversed(range(num_slots.bit_length())))
            fitting = next((slots for slots in powers if fits_device(lm, sizes_of(slots))), 0)
            advice = f"{fitting} slots would fit" if fitting else "not even one would fit"
            raise RequestError(
                f"slots is {num_slots}: caches of {cache_len:,} tokens each do not fit the device's memory next to the "
                f"parameters; {advice}"
            )
        return sizes
    limit = max_slots(lm)
    sizes = sizes_of(bucket_size(min(count, limit), 1, limit))
    while sizes.num_slots > buckets.rows(1) and not fits_device(lm, sizes):
        sizes = sizes_of(sizes.num_slots // 2)
    return sizes


def max_slots(lm: LanguageModel) -> int:
    """Return the most slots that are chosen without `slots=`."""
    if lm.buckets.batch:
        return lm.buckets.batch[-1]
    return MAX_SLOTS.get(lm.model.programs.settings.target, MAX_SLOTS_ON_ACCELERATOR)


def prompt_widths(buckets: Buckets, longest: int, max_positions: int | None) -> tuple[int, ...]:
    """Return the widths of the prefill programs for prompts of up to `longest` tokens, ascending."""
    if buckets.prompt:
        return buckets.prompt
    largest = bucket_size(min(longest, MAX_CHUNK), PROMPT_BUCKET, max_positions)
    widths = {max(largest >> i, min(PROMPT_BUCKET, largest)) for i in range(MAX_WIDTHS)}
    return tuple(sorted(widths))


def fits_device(lm: LanguageModel, sizes: SlotSizes) -> bool:
    """Return whether the slots and the largest fill fit the memory of a device, by an estimate."""
    memory = running_device().memory
    if memory is None:
        return True
    free = USABLE_MEMORY * memory - sum(parameter_bytes(lm.model.programs).values()) - slots_bytes(lm, sizes)
    return free >= 0 and fill_bytes(lm, sizes) <= free


def slots_bytes(lm: LanguageModel, sizes: SlotSizes) -> int:
    """Return the bytes of the state of all slots and of a fill on one device, and an estimate of a step's logits."""
    programs, model = lm.model.programs, lm.model.as_program("extend")
    template = programs.template(model.key(frozenset(), model.output_names[:1], True))
    # Without donation a program writes a new state while the old one exists.
    copies = 1 if programs.settings.plan.donate_state else 2
    ring_sizes = programs.ring_sizes(template, sizes.cache_len)

    def state_bytes(rows: int) -> int:
        state_sizes = {**lm.model.flow._binding, **ring_sizes, "batch": rows, "context": sizes.cache_len}
        return sum(state_bytes_by_kind(programs, template, state_sizes).values())

    # Logits in float32, with what sampling sorts.
    logits = 4 * 4 * sizes.num_slots * lm.vocab_size
    return copies * state_bytes(sizes.num_slots) + state_bytes(sizes.fill_rows) + logits


def fill_bytes(lm: LanguageModel, sizes: SlotSizes) -> int:
    """Return an estimate of the bytes of activations while the widest fill is prefilled, on one device."""
    programs = lm.model.programs
    (key,) = fill_keys(lm, sizes, sizes.widths[-1:])

    def measure() -> int:
        lir = programs.function(key).lir
        return fused_activation_bytes(lir.graph, partial(workspace_bytes, lir), True, lir.plan.scan)

    result: int = programs.request_keys(("fill bytes", key), measure)
    return result
