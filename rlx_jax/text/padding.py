"""Pad blocks of tokens to few sizes, so that few programs are compiled, and crop the outputs to the original sizes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.settings import Buckets, bucket_size, fit_bucket
from rlx_jax.errors import ProfileError, RequestError
from rlx_jax.runtime.programs import Programs
from rlx_jax.text.request_checks import Ids

# Smallest padded prompt length where the profile has no buckets for prompts.
PROMPT_BUCKET = 16


def block_width(buckets: Buckets, seq: int, limit: int | None, step: int = PROMPT_BUCKET) -> int:
    """Return the sequence length of the program for `seq` tokens in each row.

    It is the smallest bucket of at least `seq`, else a power of two from `step` on, of at most `limit`. If sizes
    outside of the buckets are an error, it is `seq`, so that the error has the actual size.
    """
    if buckets.prompt and buckets.on_recompile == "error":
        return fit_bucket(buckets.prompt, seq) or seq
    return fit_bucket(buckets.prompt, seq) or bucket_size(seq, step, limit)


def pad_block(buckets: Buckets, block: Ids, limit: int | None) -> Ids:
    """Return a block `[B, S]` of prompts, padded to the sizes of its program."""
    batch, seq = block.shape
    return pad_to(block, buckets.rows(batch), block_width(buckets, seq, limit))


def pad_to(block: np.ndarray[Any, Any], rows: int, width: int) -> np.ndarray[Any, Any]:
    """Return a block `[B, S]` padded with zeros at the end of each axis to `[rows, width]`."""
    return np.pad(block, ((0, rows - block.shape[0]), (0, width - block.shape[1])))


def crop(sizes: tuple[int, ...], array: Any) -> Any:
    """Return the first `sizes` entries of an array's first axes.

    Callers compile it, as an eager slice would transfer its indices to the device.
    """
    return array[tuple(slice(size) for size in sizes)]


def crop_to(programs: Programs, array: jax.Array, *sizes: int) -> jax.Array:
    """Return the first `sizes` entries of an array's first axes; the array itself if these are all.

    Every combination of sizes compiles a small program. Once compilation is closed, the host slices instead.
    """
    if array.shape[: len(sizes)] == sizes:
        return array
    is_closed = programs.is_warm and programs.settings.buckets.on_recompile == "error"
    if is_closed and not isinstance(array, jax.core.Tracer):
        target = programs.replicated or (array.sharding if array.committed else None)
        result: jax.Array = jax.device_put(crop(sizes, jax.device_get(array)), target)
    else:
        result = programs.run_helper(crop, array, static=(sizes,))
    return result


def check_buckets(buckets: Buckets, max_positions: int | None) -> None:
    """Check that the buckets fit the model and each other.

    Raises:
        ProfileError: they do not; the message names the bucket and the limit.
    """
    for name in ("prompt", "context"):
        sizes = getattr(buckets, name)
        if max_positions is not None and sizes and sizes[-1] > max_positions:
            raise ProfileError(f"buckets.{name}: {sizes[-1]} tokens, and the model has {max_positions} positions")
    if buckets.context and buckets.prompt and buckets.prompt[0] > buckets.context[-1]:
        raise ProfileError(
            f"buckets.prompt: the smallest, {buckets.prompt[0]}, is over the largest of buckets.context, "
            f"{buckets.context[-1]}"
        )


def check_has_buckets(buckets: Buckets, names: tuple[str, ...] = ("prompt", "batch")) -> None:
    """Check that the profile has buckets, without which a warm-up has no sizes to compile.

    Raises:
        RequestError: one of the bucket lists in `names` is empty.
    """
    empty_names = [name for name in names if not getattr(buckets, name)]
    if empty_names:
        joined = " and ".join(f"buckets.{name}" for name in empty_names)
        raise RequestError(
            f"warmup: the profile has no {joined}, so requests can have any size; set them, as in "
            'profile.replace(buckets={"prompt": [128, 512], "batch": [1, 8]})'
        )
