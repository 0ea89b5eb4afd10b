"""Make patches of images that keep their proportions, as SigLIP 2 reads them (NaFlex, Tschannen et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import RequestError, listing
from rlx_jax.ir.types import is_float
from rlx_jax.runtime.inputs import as_host_array

# The inputs of a flow that reads patches: `[B, N, P·P·C]` floats, `[B, N]`, 1 for patches of the image, and `[B, 2]`,
# rows and columns of patches.
PATCH_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
PatchArrays = dict[str, np.ndarray[Any, Any]]

# The search for the scale of an image ends at this width, and begins below this factor, as in the reference.
EPSILON, LARGEST_SCALE = 1e-5, 100.0


def patch_sides(height: int, width: int, patch: int, max_patches: int) -> tuple[int, int]:
    """Return the height and width, multiples of `patch`, that an image is resized to: the largest of about its
    proportions with at most `max_patches` patches."""

    def scaled(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in (height, width))
        return rows, columns

    low, high = EPSILON / 10, LARGEST_SCALE
    while high - low >= EPSILON:
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(scaled(middle)) <= max_patches else (low, middle)
    rows, columns = scaled(low)
    return rows * patch, columns * patch


def stack_patches(images: Sequence[np.ndarray[Any, Any]], patch: int, max_patches: int) -> PatchArrays:
    """Return the `PATCH_INPUTS` of processed images `[C, H, W]`, padded to `max_patches` patches."""
    shapes = np.array([[side // patch for side in image.shape[1:]] for image in images], np.int32)
    values = np.zeros((len(images), max_patches, patch * patch * images[0].shape[0]), np.float32)
    for row, image, (rows, columns) in zip(values, images, shapes, strict=True):
        tiles = image.reshape(-1, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
        row[: rows * columns] = tiles.reshape(rows * columns, -1)
    mask = (np.arange(max_patches) < shapes.prod(axis=1, keepdims=True)).astype(np.int32)
    return dict(zip(PATCH_INPUTS, (values, mask, shapes), strict=True))


def patch_inputs(values: np.ndarray[Any, Any], rows: int, columns: int) -> PatchArrays:
    """Return the `PATCH_INPUTS` of patches `[B, rows·columns, P·P·C]` without padding."""
    shapes = np.tile(np.array([[rows, columns]], np.int32), (len(values), 1))
    return dict(zip(PATCH_INPUTS, (values, np.ones(values.shape[:2], np.int32), shapes), strict=True))


def check_patches(inputs: Any, width: int) -> PatchArrays:
    """Return the arrays of a request of patches, of `width` values each.

    Raises:
        RequestError: not the `PATCH_INPUTS`, or shapes that do not fit together.
    """
    if not isinstance(inputs, Mapping) or sorted(inputs) != sorted(PATCH_INPUTS):
        raise RequestError(
            "pixel_values: this model reads patches: expected images (uint8), or a dict with "
            f"{listing(PATCH_INPUTS)}, as processor(images) makes it"
        )
    values, mask, shapes = (as_host_array(name, inputs[name]) for name in PATCH_INPUTS)
    rows, patches = values.shape[:2] if values.ndim == 3 else (0, 0)
    if values.ndim != 3 or values.shape[2] != width or not is_float(values.dtype):
        raise RequestError(f"pixel_values: expected floats [batch, patches, {width}], got {list(values.shape)}")
    for name, array, shape in ((PATCH_INPUTS[1], mask, (rows, patches)), (PATCH_INPUTS[2], shapes, (rows, 2))):
        if array.shape != shape or array.dtype.kind not in "iub":
            raise RequestError(f"{name}: expected integers {list(shape)}, got {array.dtype} {list(array.shape)}")
    if rows and (shapes.min() < 1 or shapes.max() > patches or shapes.prod(axis=1).max() > patches):
        raise RequestError(f"spatial_shapes: expected 1 to {patches} patches in each image, got {shapes.tolist()}")
    return dict(zip(PATCH_INPUTS, (values, mask.astype(np.int32), shapes.astype(np.int32)), strict=True))
