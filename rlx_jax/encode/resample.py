"""Images resized as Pillow resizes them: separable filters as wide as the pixels they stand for, in whole numbers.

Each axis is one pass. Weights are rounded to 22 bits behind the point, and what a pass gives to a grey level, so that
the numbers are Pillow's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
BITS = 22


@dataclass(frozen=True)
class Filter:
    """A kernel that is 0 from `support` pixels on."""

    name: str
    support: float
    kernel: Callable[[Floats], Floats]


def _box(x: Floats) -> Floats:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _triangle(x: Floats) -> Floats:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _hamming(x: Floats) -> Floats:
    return np.where(np.abs(x) < 1.0, np.sinc(x) * (0.54 + 0.46 * np.cos(math.pi * x)), 0.0)


def _cubic(x: Floats) -> Floats:
    """Keys' kernel with a = −½."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1.0, ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), np.sinc(x) * np.sinc(x / 3.0), 0.0)


NEAREST = 0
FILTERS: dict[int, Filter] = {
    1: Filter("lanczos", 3.0, _lanczos),
    2: Filter("bilinear", 1.0, _triangle),
    3: Filter("bicubic", 2.0, _cubic),
    4: Filter("box", 0.5, _box),
    5: Filter("hamming", 1.0, _hamming),
}
"""By Pillow's numbers, which `preprocessor_config.json` holds; 0 is the nearest pixel."""


def resize(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """An image `[H, W, C]` uint8 → `[height, width, C]`, by the filter that Pillow numbers `resample`."""
    if resample == NEAREST:
        rows, columns = (_nearest(old, new) for old, new in zip(image.shape, (height, width), strict=False))
        picked: Pixels = image[rows][:, columns]
        return picked
    sizes = (height, width)
    for axis in (0, 1) if columns_first(image.shape[0], image.shape[1], height, width) else (1, 0):
        image = _passed(image, axis, sizes[axis], FILTERS[resample])
    return image


def columns_first(old_height: int, old_width: int, height: int, width: int) -> bool:
    """Whether the pass along columns comes first: where it takes off over twice as many lines as the other, as found by
    comparing with Pillow 13. Earlier releases begin with rows; the two differ where a pass meets black or white."""
    return height < old_height and old_height - height > 2 * (old_width - width)


def _nearest(old: int, new: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    steps = np.full(new, old / new)
    steps[0] /= 2
    return np.add.accumulate(steps).astype(np.intp)  # summed as Pillow does, whose places fall just beside some edges


def _passed(image: Pixels, axis: int, size: int, chosen: Filter) -> Pixels:
    """One pass along an axis; nothing where it has that size."""
    old = image.shape[axis]
    if old == size:
        return image
    places, weights = taps(old, size, chosen)
    shape = [1, 1, 1]
    shape[axis] = size
    total = np.full((*image.shape[:axis], size, *image.shape[axis + 1 :]), 1 << (BITS - 1), np.int32)
    for at, weight in zip(places.T, weights.T, strict=True):
        if weight.any():
            total += image.take(at, axis) * weight.reshape(shape)
    made: Pixels = np.clip(total >> BITS, 0, 255).astype(np.uint8)
    return made


def taps(old: int, new: int, chosen: Filter) -> tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, Any]]:
    """For each of `new` pixels the places that it reads of `old`, and their weights, int32: two `[new, taps]`."""
    scale = old / new
    wide = max(scale, 1.0)
    support = chosen.support * wide
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.intp), 0)
    last = np.minimum((centre + support + 0.5).astype(np.intp), old)
    places = first[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = chosen.kernel((places - centre[:, None] + 0.5) / wide) * (places < last[:, None])
    sums = weights.sum(axis=1, keepdims=True)
    weights = np.divide(weights, sums, out=weights, where=sums != 0) * (1 << BITS)
    return np.minimum(places, old - 1), np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32)
