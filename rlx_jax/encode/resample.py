"""Resize images exactly as Pillow or torch does, with separable antialiasing filters in integer arithmetic.

Each axis is one pass. Weights are fixed-point numbers with 22 fractional bits for Pillow; for torch the number of bits
is the largest for which the largest weight fits into 16 bits. Each pass rounds to 8-bit levels. So the results
are bit-identical to the libraries'. Images of floats are resized in floats, as torch does, without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from rlx_jax.dataclasses import dataclass

Floats = np.ndarray[Any, np.dtype[np.float64]]
Pixels = np.ndarray[Any, np.dtype[Any]]  # uint8, or float64
# Fractional bits of Pillow's weights.
BITS = 22
# Exclusive upper bound of torch's weights, which are int16.
WORD = 1 << 15

Resizer = Literal["pillow", "torch"]


@dataclass(frozen=True)
class Filter:
    """A kernel that is 0 at distances of `support` pixels or more."""

    name: str
    support: float
    kernel: Callable[[Floats], Floats]


def _triangle(x: Floats) -> Floats:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _cubic(x: Floats) -> Floats:
    """Return Keys' cubic convolution kernel with a = −½."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1.0, ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), np.sinc(x) * np.sinc(x / 3.0), 0.0)


NEAREST = 0
# By Pillow's numbers, which `preprocessor_config.json` uses; 0 is the nearest pixel.
FILTERS: dict[int, Filter] = {
    1: Filter("lanczos", 3.0, _lanczos),
    2: Filter("bilinear", 1.0, _triangle),
    3: Filter("bicubic", 2.0, _cubic),
}


def resize(image: Pixels, height: int, width: int, resample: int, resizer: Resizer = "pillow") -> Pixels:
    """Return an image `[H, W, C]`, uint8 or float64, resized to `[height, width, C]`.

    Args:
        image: the pixels.
        height, width: the new size.
        resample: Pillow's number of the filter.
        resizer: the library to reproduce; `torch` is `torch.nn.functional.interpolate` with `antialias=True`, and
            `nearest-exact`.
    """
    sizes, is_torch = (height, width), resizer == "torch"
    if resample == NEAREST:
        source_pixels = _nearest_exact if is_torch else _nearest
        rows, columns = (source_pixels(old, new) for old, new in zip(image.shape, sizes, strict=False))
        result: Pixels = image[rows][:, columns]
        return result
    rows_last = is_torch or not columns_first(image.shape[0], image.shape[1], height, width)
    for axis in (1, 0) if rows_last else (0, 1):
        image = _resize_axis(image, axis, sizes[axis], FILTERS[resample], is_torch)
    return image


def columns_first(old_height: int, old_width: int, height: int, width: int) -> bool:
    """Return whether Pillow does the vertical pass first.

    It does if that pass removes more than twice as many lines as the horizontal one; this rule is from comparing with
    Pillow 13. Earlier releases begin with rows. The order matters only where a pass clips to black or white.
    """
    return height < old_height and old_height - height > 2 * (old_width - width)


def _nearest(old: int, new: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the source pixel of each new one for Pillow's nearest filter."""
    steps = np.full(new, old / new)
    steps[0] /= 2
    # Pillow accumulates the steps; rounding then puts some positions on the other side of a pixel edge than a product.
    return np.add.accumulate(steps).astype(np.intp)


def _nearest_exact(old: int, new: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the source pixel under the middle of each new one (torch's `nearest-exact`), computed in float32 as torch
    does."""
    centres = np.floor((np.arange(new, dtype=np.float32) + np.float32(0.5)) * np.float32(old / new))
    positions: np.ndarray[Any, np.dtype[np.intp]] = np.minimum(centres.astype(np.intp), old - 1)
    return positions


def _resize_axis(image: Pixels, axis: int, size: int, kernel_filter: Filter, torch_precision: bool) -> Pixels:
    """Return the image after one pass along an axis; unchanged if it already has that size."""
    old_size = image.shape[axis]
    if old_size == size:
        return image
    shape = [1, 1, 1]
    shape[axis] = size
    if image.dtype != np.uint8:
        positions, float_weights = _filter_weights(old_size, size, kernel_filter)
        taps = zip(positions.T, float_weights.T, strict=True)
        values: Floats = np.sum([image.take(source, axis) * weight.reshape(shape) for source, weight in taps], axis=0)
        return values
    positions, weights, bits = filter_taps(old_size, size, kernel_filter, torch_precision)
    # The sum starts at half a unit, so that the shift below rounds to nearest.
    total = np.full((*image.shape[:axis], size, *image.shape[axis + 1 :]), 1 << (bits - 1), np.int32)
    for source, weight in zip(positions.T, weights.T, strict=True):
        if weight.any():
            total += image.take(source, axis) * weight.reshape(shape)
    levels: Pixels = np.clip(total >> bits, 0, 255).astype(np.uint8)
    return levels


def _filter_weights(old: int, new: int, kernel_filter: Filter) -> tuple[np.ndarray[Any, np.dtype[np.intp]], Floats]:
    """Return the source pixels and the weights of each of `new` pixels, both `[new, taps]`; see `filter_taps`."""
    scale = old / new
    # Downscaling widens the filter to cover all source pixels (antialiasing); upscaling does not.
    stretch = max(scale, 1.0)
    support = kernel_filter.support * stretch
    centre = (np.arange(new) + 0.5) * scale
    start = np.maximum((centre - support + 0.5).astype(np.intp), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.intp), old)
    positions = start[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = kernel_filter.kernel((positions - centre[:, None] + 0.5) / stretch) * (positions < stop[:, None])
    sums = weights.sum(axis=1, keepdims=True)
    return np.minimum(positions, old - 1), np.divide(weights, sums, out=weights, where=sums != 0)


def filter_taps(
    old: int, new: int, kernel_filter: Filter, torch_precision: bool = False
) -> tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, Any], int]:
    """Return the source pixels and the fixed-point weights of each of `new` pixels.

    Args:
        old, new: length of the axis before and after.
        kernel_filter: the filter.
        torch_precision: choose torch's number of fractional bits, the largest that keeps all weights below
            `WORD`, and not `BITS`.

    Returns:
        Source positions `[new, taps]`, weights `[new, taps]` int32, and the number of fractional bits of the weights.
    """
    positions, weights = _filter_weights(old, new, kernel_filter)
    bits, top = BITS, float(weights.max())
    if torch_precision:
        bits = next((n for n in range(BITS) if int(0.5 + top * (1 << (n + 1))) >= WORD), BITS)
    weights *= 1 << bits
    return positions, np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32), bits
