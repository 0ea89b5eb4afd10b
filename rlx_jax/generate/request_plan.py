"""`RequestPlan`: the padded sizes and the programs that a request runs, and the iteration over its prefill chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.buckets import Buckets, bucket_size, fit_bucket
from rlx_jax.compiler.executable import StateArrays
from rlx_jax.errors import RequestError
from rlx_jax.generate.decode import DecodeLoop, Sizes
from rlx_jax.generate.request import LanguageModel, Request
from rlx_jax.generate.sampler import Sampler, SamplerValues, SamplingSteps
from rlx_jax.generate.speculative import Drafter, VerifyLoop
from rlx_jax.generate.token_history import check_processors
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.program_key import ProgramKey, Variant
from rlx_jax.text.request_checks import PROMPT_BUCKET, pad_rows

CONTEXT_BUCKET = 64  # the smallest cache length without buckets in the profile
# Programs return 0, 8, 16, 32 … likeliest tokens, so that there are few of them; the host drops the surplus.
LOGPROBS_BUCKET = 8


# The programs of a plan: for prefill of the prompts, and the loop.
PlanKeys = tuple[tuple[ProgramKey, ...], ProgramKey]


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """The sizes and programs of a request.

    Attributes:
        lm: the model.
        request: the request.
        sampling_steps, sampler_values: how tokens are chosen; the values are on the device.
        num_logprobs: number of likeliest tokens that programs return; None for no log-probabilities.
        stop_mask: `[V]` bool on the device, ids that end a row.
        sizes: number of rows, padding included; widths of the prefill programs for full prompts; length of the cache.
        prefill_batch: rows of the prefill programs, fewer than `sizes.batch` where prompts have several answers.
        cut: number of tokens, without those that a state has already, after which a chunk of the prompts ends, to copy
            arrays of the state there; 0 for none.
        prefill_programs, loop: the programs; there is a prefill program for each chunk of the prompts, without tokens
            that a state has already.
    """

    lm: LanguageModel
    request: Request
    sampling_steps: SamplingSteps
    sampler_values: SamplerValues
    num_logprobs: int | None
    stop_mask: jax.Array
    sizes: Sizes
    prefill_batch: int
    cut: int
    prefill_programs: tuple[BoundProgram, ...]
    loop: BoundProgram


def plan_request(lm: LanguageModel, request: Request) -> RequestPlan:
    """Choose the sizes and the programs of a request; nothing has run yet.

    Raises:
        RequestError: one of the programs is not compiled, and the profile makes that an error.
    """
    buckets, n = lm.buckets, request.n or 1
    limits = (lm.max_positions, None if request.drafter is None else request.drafter.max_positions)
    limit = min((n for n in limits if n is not None), default=None)  # model and drafter have caches of one length
    lengths = [len(row) for row in request.rows for _ in range(n)]
    sizes = request_sizes(buckets, lengths, request.budget, limit)
    cache_len = max(request.min_cache_len, request.prefixes[0].cache_len if request.owns_prefix else 0)
    if cache_len > sizes.cache_len:
        sizes = replace(sizes, cache_len=max(sizes.cache_len, fit_bucket(buckets.context, cache_len) or cache_len))
    options = request.options[0]
    sampling_steps, sampler_values, stop_mask = sampler_operands(lm, options.sampler, options.stop_ids)
    if processors := sampling_steps.processors:
        batches = {sizes.batch * width for width in (1, 1 if request.drafter is None else request.drafter.tokens + 1)}
        check_processors(lm.model.programs, processors, batches, lm.vocab_size, sizes.cache_len)
    num_logprobs = request.logprobs and bucket_size(request.logprobs, LOGPROBS_BUCKET, lm.vocab_size)
    prefill_batch = sizes.batch if n == 1 else buckets.rows(len(request.rows))
    prefix_lens = [len(prefix.ids) for prefix in request.prefixes] or [0] * len(request.rows)
    suffix_len = max(len(row) - count for row, count in zip(request.rows, prefix_lens, strict=True))
    point = request.snapshot_point
    cut = 0 if point is None else point.num_tokens - prefix_lens[0]
    widths = chunk_widths(buckets, suffix_len, limit, cut)
    prefill, loop_program = plan_keys(lm, request, sampling_steps, num_logprobs, sizes, prefill_batch, widths)
    runner = lm.model.as_program("extend")
    loop = runner.bind(loop_program)  # first, as only the loop depends on the sampler and the drafts
    return RequestPlan(
        lm, request, sampling_steps, sampler_values, num_logprobs, stop_mask, sizes, prefill_batch, cut,
        tuple(map(runner.bind, prefill)), loop,
    )  # fmt: skip


def sampler_operands(
    lm: LanguageModel, sampler: Sampler, stop_ids: tuple[int, ...]
) -> tuple[SamplingSteps, SamplerValues, jax.Array]:
    """Return the steps of a sampler, and its values and a mask of the ids that end a row, on the device.

    They are cached, as the transfer of a dozen small arrays takes longer than the dispatch of a program.
    """
    buckets, programs = lm.buckets, lm.model.programs

    def make() -> tuple[SamplingSteps, SamplerValues, jax.Array]:
        steps = sampler.sampling_steps(lm.vocab_size)
        # With buckets, warm-up has to cover every sampler, so use few methods.
        steps = steps.widened() if buckets.prompt or buckets.batch else steps
        stop_mask = np.isin(np.arange(lm.vocab_size), stop_ids)
        return steps, *jax.device_put((sampler.values(lm.vocab_size, steps), stop_mask), programs.replicated)

    key = sampler, stop_ids, lm.vocab_size, buckets.prompt, buckets.batch
    operands: tuple[SamplingSteps, SamplerValues, jax.Array] = programs.operands(key, make)
    return operands


def plan_keys(
    lm: LanguageModel, request: Request, sampling_steps: SamplingSteps, num_logprobs: int | None, sizes: Sizes,
    prefill_batch: int, widths: tuple[int, ...],
) -> PlanKeys:  # fmt: skip
    """Return the programs of a request, cached by sizes, method and inputs for requests without drafts.

    Args:
        prefill_batch: number of rows of the prefill programs.
        widths: their widths.
    """
    model, inputs, drafter, loop = lm.model, request.inputs, request.drafter, lm.model.programs.settings.loop
    has_prefix, steps = bool(request.prefixes), loop.steps
    if request.is_stream:  # a GPU may compute one step in less time than the host takes to dispatch it
        steps = 2 if steps >= 16 else 1

    def make_keys() -> PlanKeys:
        variant, state = request_variant(model, drafter, inputs.optional_inputs), {**inputs.sizes, **sizes.state}
        # A loop of one step has no condition, which a GPU would wait for.
        stop_early = loop.stop_early and steps > 1
        joined = 1 if stop_early else math.gcd(steps, loop.joined)
        wrapper = DecodeLoop(sampling_steps, lm.ids_input, steps, stop_early, num_logprobs=num_logprobs, joined=joined)
        prefill = prefill_keys(model, widths, {**state, "batch": prefill_batch}, variant, has_prefix)
        return prefill, loop_key(model, variant, state, drafter, wrapper)

    if drafter is not None:
        return make_keys()
    cache_key = (model.name, sampling_steps, steps, num_logprobs, sizes, prefill_batch, widths, has_prefix)
    inputs_key = (*inputs.sizes.items(),), inputs.optional_inputs
    keys: PlanKeys = model.programs.request_keys((*cache_key, *inputs_key), make_keys)
    return keys


def request_variant(
    model: CompiledModel, drafter: Drafter | None, optional_inputs: frozenset[str] = frozenset()
) -> Variant:
    """Return the options of the programs of a request; `drafter` as in `Request`."""
    variant = Variant(True, model.output_names[:1], optional_inputs)
    return variant if drafter is None else replace(variant, spare=drafter.tokens, hidden=drafter.needs_hidden)


def loop_key(
    model: CompiledModel, variant: Variant, sizes: Mapping[str, int], drafter: Drafter | None, loop: DecodeLoop
) -> ProgramKey:
    """Return the program of a loop, with drafts if there is a drafter.

    Args:
        variant: the result of `request_variant`.
        sizes: sizes of the state.
        drafter: as in `Request`.
        loop: the wrapper without drafts.
    """
    wrapper: DecodeLoop | VerifyLoop = loop
    if drafter is None:
        key = model.as_program("extend").key_for_sizes({**sizes, "seq": 1}, variant)
    else:
        verify = model.as_program("verify")
        rollback_arrays = model.programs.template(verify.key(variant.optional_inputs, variant.outputs)).rollback_arrays
        bound = drafter.bind({name: sizes[name] for name in ("batch", "context")})
        wrapper = VerifyLoop(loop.sampling_steps, loop.ids_input, loop.steps, bound, rollback_arrays, loop.stop_width)
        key = verify.key_for_sizes({**sizes, "seq": drafter.tokens + 1}, replace(variant, last_only=False))
    if loop.sampling_steps.reads_tokens or (drafter is not None and drafter.reads_tokens):
        wrapper = replace(wrapper, max_tokens=sizes["context"])
    return replace(key, wrapper=wrapper)


# -- sizes -------------------------------------------------------------------------------------


def chunk_widths(buckets: Buckets, tokens: int, max_positions: int | None, cut: int = 0) -> tuple[int, ...]:
    """Return the widths of successive prefill programs for so many tokens; one of them ends after `cut` tokens, if any.

    Without buckets it is one program with a power of two as width, or several if the cache rounds. With buckets they
    are programs of the largest bucket that fits a cache, and one of the smallest bucket that fits the rest.
    """
    if 0 < cut < tokens:
        parts = (chunk_widths(buckets, part, max_positions) for part in (cut, tokens - cut))
        return tuple(width for part in parts for width in part)
    chunk = buckets.largest_chunk
    if chunk is None:
        return (bucket_size(tokens, PROMPT_BUCKET, max_positions),)
    full = (tokens - 1) // chunk
    rest = tokens - full * chunk
    return (*(chunk,) * full, fit_bucket(buckets.prompt, rest) or bucket_size(rest, PROMPT_BUCKET, max_positions))


def request_sizes(buckets: Buckets, lengths: Sequence[int], budget: int, max_positions: int | None) -> Sizes:
    """Return the padded sizes for prompts of these lengths and `budget` new tokens each.

    Sizes are buckets where one is large enough, and otherwise powers of two. A prompt over the largest bucket is
    prefilled in chunks.

    Raises:
        RequestError: no bucket is large enough for the rows or the cache, and `on_recompile` is `error`.
    """
    longest = max(lengths)
    widths = chunk_widths(buckets, longest, max_positions)
    min_cache_len = max(longest + budget, widths[0])
    cache_len = fit_bucket(buckets.context, min_cache_len)
    if buckets.on_recompile == "error":
        if buckets.batch and fit_bucket(buckets.batch, len(lengths)) is None:
            raise RequestError(
                f"prompts: {len(lengths)} rows, and buckets.batch = {list(buckets.batch)}; send fewer at once, or add "
                "a bucket to the profile"
            )
        if buckets.context and cache_len is None:
            raise RequestError(
                f"prompts[{lengths.index(longest)}]: {longest} tokens + {budget} new, and the caches that are compiled "
                f"have {list(buckets.context)} slots; ask for fewer tokens, or add to buckets.context of the profile"
            )
    cache_len = cache_len or bucket_size(min_cache_len, CONTEXT_BUCKET, max_positions)
    return Sizes(buckets.rows(len(lengths)), widths, cache_len)


def cache_sizes(buckets: Buckets, batch: int, context: int, max_positions: int | None) -> tuple[int, int]:
    """Return the rows and the cache length of a state for `batch` prompts of `context` tokens each, with the answer."""
    cache_len = fit_bucket(buckets.context, context) or bucket_size(context, CONTEXT_BUCKET, max_positions)
    return buckets.rows(batch), cache_len


# -- prefill programs --------------------------------------------------------------------------


def prefill_keys(
    model: CompiledModel, widths: Sequence[int], sizes: Mapping[str, int], variant: Variant, has_prefix: bool = False
) -> tuple[ProgramKey, ...]:
    """Return the successive prefill programs for chunks of these widths.

    The first one is `prefill`, and the others are `extend`; with a state to continue (`has_prefix`) all are `extend`.
    """
    blocks = [{**sizes, "seq": width} for width in widths]
    prefill = model.as_program("prefill")
    first_keys = [] if has_prefix or not blocks else [prefill.key_for_sizes(blocks.pop(0), variant)]
    extend = model.as_program("extend")
    return (*first_keys, *(extend.key_for_sizes(block, variant) for block in blocks))


def bind_prefill(
    model: CompiledModel, widths: Sequence[int], sizes: Mapping[str, int], variant: Variant
) -> list[BoundProgram]:
    """Return the bound prefill programs for full prompts.

    Raises:
        RequestError: as `plan_request`.
    """
    return list(map(model.as_program("extend").bind, prefill_keys(model, widths, sizes, variant)))


class PromptBlock(NamedTuple):
    """The result of prefilling the prompts up to a chunk.

    Attributes:
        logits: `[B, V]`, logits of the last token of each row so far; `[B, S, V]`, of the chunk, if the program
            returns all of them.
        state: the state after the chunk.
        hidden: `[B, S, H]`, hidden states of the tokens of the chunk, if the program returns them.
        num_tokens: number of tokens prefilled so far, for prompts of that length or more.
    """

    logits: Any
    state: StateArrays
    hidden: jax.Array | None
    num_tokens: int


def prompt_blocks(
    programs: Sequence[BoundProgram], ids_input: str, prompts: Sequence[Sequence[int]], batch: int,
    inputs: Mapping[str, Any] | None = None, state: StateArrays | None = None, cut: int = 0,
) -> Iterator[PromptBlock]:  # fmt: skip
    """Prefill the prompts chunk by chunk, and yield the result of each chunk.

    Args:
        programs: the program of each chunk.
        ids_input: the name of the input of tokens.
        prompts: ids of each row, without tokens that the state has already.
        batch: number of rows, padding included; a padding row has one token, as prefill needs one.
        inputs: the other inputs of the flow.
        state: the state to continue.
        cut: as in `RequestPlan`.
    """
    padded_prompts = [*prompts, *([0] for _ in range(batch - len(prompts)))]
    lengths, state, offset, model = np.array([len(p) for p in padded_prompts]), state or {}, 0, programs[0].model
    logits = None
    for program in programs:
        width = dict(program.key.binding)["seq"]
        count = cut - offset if offset < cut < offset + width else width
        num_new = np.clip(lengths - offset, 0, count).astype(np.int32)
        tokens = pad_rows([p[offset : offset + count] for p in padded_prompts], width)
        (new, *others), state = program({ids_input: tokens, "lengths": num_new, **(inputs or {})}, state)
        if logits is not None and program.key.last_only:
            new = model.programs.run_helper(merge_logits, num_new, new, logits)
        logits, offset = new, offset + count
        yield PromptBlock(logits, state, others[0] if program.key.hidden else None, offset)
        inputs = None  # the state caches what depends on them


def merge_logits(num_new: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the logits `[B, V]` of the last tokens, the old ones in rows that had no new token."""
    return jnp.where(num_new[:, None] > 0, new, old)
