"""Quantize weights when they are saved: the blocks of GGML's Q8_0."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_jax.errors import WeightError
from rlx_jax.weights.finite import all_finite

HostArray = np.ndarray[Any, Any]


def quantize_q8_0(values: HostArray, where: str) -> HostArray:
    """Return float32 `[..., k]` as blocks of Q8_0, uint8 `[..., k / 32 · 34]`: bit by bit those of gguf-py.

    Raises:
        WeightError: values that are not finite, or whose scale is over the range of float16; begins with `where`.
    """
    blocks = values.reshape(-1, 32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    stored_scales = _finite(scales, np.dtype("<f2"), where)
    with np.errstate(divide="ignore", over="ignore"):
        inverses = np.float32(1) / scales
    inverses[np.isinf(inverses)] = 0  # scales of 0, and those so small that float16 has 0 for them
    scaled = blocks * inverses
    magnitudes = np.abs(scaled)
    # Halves are rounded away from zero, as by C's roundf; NumPy rounds them to even.
    floors = np.floor(magnitudes)
    codes = np.sign(scaled) * (floors + np.floor(2 * (magnitudes - floors)))
    raw = np.concatenate([stored_scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)
    return raw.reshape(*values.shape[:-1], -1)


def _finite(scales: HostArray, dtype: np.dtype[Any], where: str) -> HostArray:
    """Return scales in a dtype, or raise `WeightError` if one is not finite in it."""
    with np.errstate(over="ignore"):
        cast = scales.astype(dtype)
    if not all_finite(cast):
        raise WeightError(f"{where}: has values that are not finite, or too large to quantize; bf16 represents them")
    return cast
