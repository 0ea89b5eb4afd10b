"""The sizes that requests are padded to, and warm-up: running every program once that they can need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_jax.buckets import Buckets, smallest
from rlx_jax.errors import ProfileError, RecompileError, RequestError
from rlx_jax.generate.requests import Ids, bucket
from rlx_jax.generate.sampler import Sampler

PROMPT_BUCKET = 16
CONTEXT_BUCKET = 64

KINDS = (
    Sampler(),
    Sampler(temperature=1.0),
    Sampler(repetition_penalty=2.0),
    Sampler(temperature=1.0, top_k=1),
)
"""A sampler for each method that `Method.widened` gives."""


@dataclass(frozen=True)
class Sizes:
    """Rows, tokens of the programs that read the prompts, and slots of the cache."""

    batch: int
    widths: tuple[int, ...]
    slots: int


def check_buckets(buckets: Buckets, max_positions: int | None) -> None:
    """Buckets fit the model and each other.

    Raises:
        ProfileError: names the bucket and the limit.
    """
    for name in ("prompt", "context"):
        sizes = getattr(buckets, name)
        if max_positions is not None and sizes and sizes[-1] > max_positions:
            raise ProfileError(f"buckets.{name}: {sizes[-1]} tokens, and the model knows {max_positions} positions")
    if buckets.context and buckets.prompt and buckets.prompt[0] > buckets.context[-1]:
        raise ProfileError(
            f"buckets.prompt: the smallest, {buckets.prompt[0]}, is over the largest of buckets.context, "
            f"{buckets.context[-1]}"
        )


def largest_chunk(buckets: Buckets) -> int | None:
    """The largest bucket for prompts that a cache holds; None without buckets."""
    return max((p for p in buckets.prompt if not buckets.context or p <= buckets.context[-1]), default=None)


def request_sizes(buckets: Buckets, lengths: Sequence[int], budget: int, max_positions: int | None) -> Sizes:
    """The sizes for prompts of these lengths and `budget` new tokens each: buckets where there are any that hold them,
    else powers of two. A prompt over the largest bucket is read in chunks of it.

    Raises:
        RecompileError: no bucket holds the rows or the cache, and `on_recompile` is `error`.
    """
    longest = max(lengths)
    chunk = largest_chunk(buckets)
    if chunk is None:
        widths: tuple[int, ...] = (bucket(longest, PROMPT_BUCKET, max_positions),)
    else:
        whole = (longest - 1) // chunk
        rest = smallest(buckets.prompt, longest - whole * chunk)
        assert rest is not None  # at most a chunk
        widths = (chunk,) * whole + (rest,)
    batch, needed = smallest(buckets.batch, len(lengths)), max(longest + budget, widths[0])
    slots = smallest(buckets.context, needed)
    if buckets.on_recompile == "error":
        if buckets.batch and batch is None:
            raise RecompileError(
                f"prompts: {len(lengths)} rows, and buckets.batch = {list(buckets.batch)}; send fewer at once, or add "
                "a bucket to the profile"
            )
        if buckets.context and slots is None:
            raise RecompileError(
                f"prompts[{lengths.index(longest)}]: {longest} tokens + {budget} new, and the caches that are compiled "
                f"have {list(buckets.context)} slots; ask for fewer tokens, or add to buckets.context of the profile"
            )
    return Sizes(batch or len(lengths), widths, slots or bucket(needed, CONTEXT_BUCKET, max_positions))


def pad_block(buckets: Buckets, block: Ids, rows: int | None = None, step: bool = True) -> Ids:
    """A block `[B, S]` padded to buckets where they hold it. `rows`: those of the state; `step`: one token a row, as in
    a step of decoding, stays one."""
    batch, seq = block.shape
    rows = rows or smallest(buckets.batch, batch) or batch
    width = seq if seq == 1 and step else smallest(buckets.prompt, seq) or seq
    return np.pad(block, ((0, rows - batch), (0, width - seq)))


def prefill_slots(buckets: Buckets, wanted: int, longest: int, width: int, fixed: bool) -> int:
    """Slots of a cache that `prefill` makes for a block of `width`. Not `fixed`, `wanted` is a wish: `longest` is what
    it must hold."""
    fits = smallest(buckets.context, max(wanted, width))
    if fits is None and not fixed and buckets.context and buckets.context[-1] >= longest:
        return buckets.context[-1]
    return fits or wanted


def warm_contexts(buckets: Buckets, new_tokens: int, max_positions: int | None) -> tuple[int, ...]:
    """The caches of a profile, or those that each prompt bucket with so many new tokens needs."""
    if buckets.context:
        return buckets.context
    limit = max_positions or buckets.prompt[-1] + new_tokens
    return tuple(
        sorted({bucket(min(p + new_tokens, limit), CONTEXT_BUCKET, max_positions) for p in buckets.prompt})
    )  # fmt: skip


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


def check_warmup(buckets: Buckets, samplers: Any) -> tuple[Sampler, ...]:
    """What warm-up needs is there; the samplers to warm up for.

    Raises:
        RequestError: the profile has no buckets to warm up, or `samplers` are none.
    """
    missing = [name for name in ("prompt", "batch") if not getattr(buckets, name)]
    if missing:
        names = " and ".join(f"buckets.{name}" for name in missing)
        raise RequestError(
            f"warmup: the profile has no {names}, so requests come in every size; set them, as in "
            'profile.replace(buckets={"prompt": [128, 512], "batch": [1, 8]})'
        )
    chosen = KINDS if samplers is None else (samplers,) if isinstance(samplers, Sampler) else tuple(samplers)
    if not chosen or not all(isinstance(s, Sampler) for s in chosen):
        raise RequestError("warmup: samplers are what requests will use: a Sampler or several, or None for all kinds")
    return chosen
