"""The sizes that requests are padded to, and warm-up: running every program once that they can need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx_jax.compiler.buckets import Buckets, smallest
from rlx_jax.errors import RequestError, SequenceLengthError, shown
from rlx_jax.generate.sampler import Sampler
from rlx_jax.text.opening import check_positions
from rlx_jax.text.padding import PROMPT_BUCKET, block_width, bucket, padded_to
from rlx_jax.text.requests import Ids, whole_number

CONTEXT_BUCKET = 64
ROOM = 256  # free slots after a prompt when prefill is not told max_len

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


def largest_chunk(buckets: Buckets) -> int | None:
    """The largest bucket for prompts that a cache holds; None without buckets."""
    return max((p for p in buckets.prompt if not buckets.context or p <= buckets.context[-1]), default=None)


def read_widths(buckets: Buckets, tokens: int, max_positions: int | None) -> tuple[int, ...]:
    """The tokens of the programs that read so many, one after the other: one program of a power of two, or chunks of
    the largest bucket and one that holds the rest."""
    chunk = largest_chunk(buckets)
    if chunk is None:
        return (bucket(tokens, PROMPT_BUCKET, max_positions),)
    whole = (tokens - 1) // chunk
    rest = smallest(buckets.prompt, tokens - whole * chunk)
    assert rest is not None  # at most a chunk
    return (*(chunk,) * whole, rest)


def request_sizes(buckets: Buckets, lengths: Sequence[int], budget: int, max_positions: int | None) -> Sizes:
    """The sizes for prompts of these lengths and `budget` new tokens each: buckets where there are any that hold them,
    else powers of two. A prompt over the largest bucket is read in chunks of it.

    Raises:
        RequestError: no bucket holds the rows or the cache, and `on_recompile` is `error`.
    """
    longest = max(lengths)
    widths = read_widths(buckets, longest, max_positions)
    batch, needed = smallest(buckets.batch, len(lengths)), max(longest + budget, widths[0])
    slots = smallest(buckets.context, needed)
    if buckets.on_recompile == "error":
        if buckets.batch and batch is None:
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


def pad_step(buckets: Buckets, block: Ids, sizes: Mapping[str, int]) -> Ids:
    """A block `[B, S]` to read after a state of these sizes. One token a row, as in a step of decoding, stays one."""
    seq = block.shape[1]
    return padded_to(block, sizes["batch"], seq if seq == 1 else block_width(buckets, seq, sizes["context"], step=1))


def prefill_slots(buckets: Buckets, longest: int, width: int, max_len: int | None, max_positions: int | None) -> int:
    """Slots of the cache that `prefill` makes for a block of `width` whose rows hold at most `longest`: `max_len`, else
    `ROOM` more than the block; in a bucket, or the latter in a power of two."""
    if max_len is not None:
        return smallest(buckets.context, max(max_len, width)) or max_len
    if buckets.context and buckets.context[-1] >= longest:
        return smallest(buckets.context, width + ROOM) or buckets.context[-1]
    slots = bucket(width + ROOM, CONTEXT_BUCKET, None)
    return slots if max_positions is None else max(longest, min(slots, max_positions))


def asked_slots(max_len: Any, longest: int, max_positions: int | None) -> int | None:
    """`max_len` of `prefill`, checked.

    Raises:
        RequestError, SequenceLengthError: no number, over the model's positions, or less than the longest prompt.
    """
    if max_len is None:
        return None
    slots = whole_number("max_len", max_len, 1)
    check_positions(slots, max_positions, "max_len")
    if longest > slots:
        raise SequenceLengthError(f"a prompt of {longest} tokens does not fit max_len={slots}")
    return slots


def last_only(logits: str) -> bool:
    """Whether `logits` of `prefill` and `extend` are those of the last tokens."""
    if logits not in ("all", "last"):
        raise RequestError(f"logits is {shown(logits)}; expected 'all' or 'last'")
    return logits == "last"


def warm_contexts(buckets: Buckets, new_tokens: int, max_positions: int | None) -> tuple[int, ...]:
    """The caches of a profile, or those that each prompt bucket with so many new tokens needs."""
    if buckets.context:
        return buckets.context
    limit = max_positions or buckets.prompt[-1] + new_tokens
    return tuple(
        sorted({bucket(min(p + new_tokens, limit), CONTEXT_BUCKET, max_positions) for p in buckets.prompt})
    )  # fmt: skip


def check_samplers(samplers: Any) -> tuple[Sampler, ...]:
    """The samplers to warm up for; None is every kind.

    Raises:
        RequestError: they are none.
    """
    chosen = KINDS if samplers is None else (samplers,) if isinstance(samplers, Sampler) else tuple(samplers)
    if not chosen or not all(isinstance(s, Sampler) for s in chosen):
        raise RequestError("warmup: samplers are what requests will use: a Sampler or several, or None for all kinds")
    return chosen
