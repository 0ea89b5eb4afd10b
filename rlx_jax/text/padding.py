"""Sizes that blocks of tokens are padded to, so that few programs serve all of them, and how their answers are cut."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.settings import Buckets, bucket, smallest
from rlx_jax.errors import ProfileError, RequestError
from rlx_jax.runtime.programs import Programs
from rlx_jax.text.request_checks import Ids

PROMPT_BUCKET = 16


def block_width(buckets: Buckets, seq: int, limit: int | None, step: int = PROMPT_BUCKET) -> int:
    """Tokens of the program that reads `seq` of each row: the bucket that holds them, else a power of two from `step`
    on, of at most `limit`. Where a size outside of the buckets is an error, it is left for the error to name."""
    if buckets.prompt and buckets.on_recompile == "error":
        return smallest(buckets.prompt, seq) or seq
    return smallest(buckets.prompt, seq) or bucket(seq, step, limit)


def pad_block(buckets: Buckets, block: Ids, limit: int | None) -> Ids:
    """A block `[B, S]` of prompts padded to the sizes of its program."""
    batch, seq = block.shape
    return padded_to(block, buckets.rows(batch), block_width(buckets, seq, limit))


def padded_to(block: np.ndarray[Any, Any], rows: int, width: int) -> np.ndarray[Any, Any]:
    """A block `[B, S]` with zeros behind it: `[rows, width]`."""
    return np.pad(block, ((0, rows - block.shape[0]), (0, width - block.shape[1])))


def cut(sizes: tuple[int, ...], array: Any) -> Any:
    """The first `sizes` entries of an array's first axes; compiled, as an eager slice would send its indices."""
    return array[tuple(slice(size) for size in sizes)]


def cropped(programs: Programs, array: jax.Array, *sizes: int) -> jax.Array:
    """The first `sizes` entries of an array's first axes, without a copy where that is all of them.

    Each choice of sizes is a small function to compile; where nothing is to be compiled any more, the host cuts.
    """
    if array.shape[: len(sizes)] == sizes:
        return array
    if programs.closed and not isinstance(array, jax.core.Tracer):
        there = programs.whole or (array.sharding if array.committed else None)
        result: jax.Array = jax.device_put(cut(sizes, jax.device_get(array)), there)
    else:
        result = programs.call(cut, array, static=(sizes,))
    return result


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


def check_sizes(buckets: Buckets, names: tuple[str, ...] = ("prompt", "batch")) -> None:
    """There is something to warm up for.

    Raises:
        RequestError: the profile has no buckets for lengths and rows, or for those of them that are named.
    """
    missing = [name for name in names if not getattr(buckets, name)]
    if missing:
        joined = " and ".join(f"buckets.{name}" for name in missing)
        raise RequestError(
            f"warmup: the profile has no {joined}, so requests come in every size; set them, as in "
            'profile.replace(buckets={"prompt": [128, 512], "batch": [1, 8]})'
        )
