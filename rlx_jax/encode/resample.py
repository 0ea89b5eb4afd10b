"""Images resized as Pillow or torch resizes them: separable filters as wide as the pixels they stand for, in whole
numbers.

Each axis is one pass. Weights are rounded to bits behind the point, 22 in Pillow, in torch as many as leave the largest
one 16, and what a pass gives to a grey level, so that the numbers are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
# Behind the point of Pillow's weights.
BITS = 22
# What torch's weights stay below.
WORD = 1 << 15

Resizer = Literal["pillow", "torch"]


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
# By Pillow's numbers, which `preprocessor_config.json` holds; 0 is the nearest pixel.
FILTERS: dict[int, Filter] = {
    1: Filter("lanczos", 3.0, _lanczos),
    2: Filter("bilinear", 1.0, _triangle),
    3: Filter("bicubic", 2.0, _cubic),
    4: Filter("box", 0.5, _box),
    5: Filter("hamming", 1.0, _hamming),
}


# The filters that torch has.
TORCH = (NEAREST, 1, 2, 3)


def resize(image: Pixels, height: int, width: int, resample: int, resizer: Resizer = "pillow") -> Pixels:
    """An image `[H, W, C]` uint8 → `[height, width, C]`, by the filter that Pillow numbers `resample`, as `resizer`
    computes it. torch's are `torch.nn.functional.interpolate` of uint8 with `antialias=True`, and `nearest-exact`."""
    sizes, fixed = (height, width), resizer == "torch"
    if resample == NEAREST:
        places = _middle if fixed else _nearest
        rows, columns = (places(old, new) for old, new in zip(image.shape, sizes, strict=False))
        picked: Pixels = image[rows][:, columns]
        return picked
    rows_last = fixed or not columns_first(image.shape[0], image.shape[1], height, width)
    for axis in (1, 0) if rows_last else (0, 1):
        image = _passed(image, axis, sizes[axis], FILTERS[resample], fixed)
    return image


def columns_first(old_height: int, old_width: int, height: int, width: int) -> bool:
    """Whether the pass along columns comes first: where it takes off over twice as many lines as the other, as found by
    comparing with Pillow 13. Earlier releases begin with rows; the two differ where a pass meets black or white."""
    return height < old_height and old_height - height > 2 * (old_width - width)


def _nearest(old: int, new: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    steps = np.full(new, old / new)
    steps[0] /= 2
    return np.add.accumulate(steps).astype(np.intp)  # summed as Pillow does, whose places fall just beside some edges


def _middle(old: int, new: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The pixel under the middle of each new one."""
    found = np.floor((np.arange(new, dtype=np.float32) + np.float32(0.5)) * np.float32(old / new))
    places: np.ndarray[Any, np.dtype[np.intp]] = np.minimum(found.astype(np.intp), old - 1)
    return places


def _passed(image: Pixels, axis: int, size: int, chosen: Filter, fixed: bool) -> Pixels:
    """One pass along an axis; nothing where it has that size."""
    old = image.shape[axis]
    if old == size:
        return image
    places, weights, bits = taps(old, size, chosen, fixed)
    shape = [1, 1, 1]
    shape[axis] = size
    total = np.full((*image.shape[:axis], size, *image.shape[axis + 1 :]), 1 << (bits - 1), np.int32)
    for at, weight in zip(places.T, weights.T, strict=True):
        if weight.any():
            total += image.take(at, axis) * weight.reshape(shape)
    made: Pixels = np.clip(total >> bits, 0, 255).astype(np.uint8)
    return made


def taps(
    old: int, new: int, chosen: Filter, fixed: bool = False
) -> tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, Any], int]:
    """For each of `new` pixels the places that it reads of `old`, and their weights, int32, two `[new, taps]`; and how
    many bits of these stand behind the point: `BITS`, or where they are `fixed` the most that leave them below `WORD`.
    """
    scale = old / new
    wide = max(scale, 1.0)
    support = chosen.support * wide
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.intp), 0)
    last = np.minimum((centre + support + 0.5).astype(np.intp), old)
    places = first[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = chosen.kernel((places - centre[:, None] + 0.5) / wide) * (places < last[:, None])
    sums = weights.sum(axis=1, keepdims=True)
    weights = np.divide(weights, sums, out=weights, where=sums != 0)
    bits, top = BITS, float(weights.max())
    if fixed:
        bits = next((n for n in range(BITS) if int(0.5 + top * (1 << (n + 1))) >= WORD), BITS)
    weights *= 1 << bits
    return np.minimum(places, old - 1), np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32), bits
