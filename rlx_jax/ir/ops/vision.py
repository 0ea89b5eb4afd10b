"""Ops between images and the tokens that a vision transformer reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import MOVEMENT, Types
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static

Array = jax.Array
Sides = tuple[int, int]
"""Of rows and of columns."""


def check_sizes(op: str, what: str, sizes: Sides) -> None:
    """Two whole numbers over 0."""
    if len(sizes) != 2 or not all(type(s) is int and s > 0 for s in sizes):
        raise ShapeError(f"{op}: {what} is two whole numbers over 0, rows and columns; got {sizes!r}")


def patches_of(op: str, images: TensorType, patch: Sides) -> tuple[DimLike, DimLike]:
    """Rows and columns of patches that images `[B, C, H, W]` have.

    Raises:
        ShapeError: another rank, or an image smaller than a patch.
    """
    check_sizes(op, "the patch", patch)
    if images.rank != 4:
        raise ShapeError(f"{op}: images are [B, C, H, W], got {images}")
    for name, size, side in zip(("height", "width"), images.shape[2:], patch, strict=True):
        if is_static(size) and size < side:
            raise ShapeError(f"{op}: the {name} of {images} is {size}, less than that of a patch, {side}")
    rows, columns = (size // side for size, side in zip(images.shape[2:], patch, strict=True))
    return rows, columns


@dataclass(frozen=True)
class Patches(Mir):
    """Images cut into patches, row by row: `[B, C, H, W]` → `[B, (H//P)·(W//Q), C·P·Q]` for a patch `(P, Q)`.

    A linear layer behind it, its weight `[out, C, P, Q]` reshaped to `[out, C·P·Q]`, is a convolution whose stride is
    the patch. What is left over at the right and at the bottom is not read, as there.
    """

    traits = MOVEMENT

    patch: Sides

    def check(self, *operands: TensorType) -> None:
        patches_of("patches", operands[0], self.patch)

    def eval(self, images: Array) -> Array:
        (p, q), (b, c, height, width) = self.patch, images.shape
        rows, columns = height // p, width // q
        cut = images[:, :, : rows * p, : columns * q].reshape(b, c, rows, p, columns, q)
        return cut.transpose(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, c * p * q)


def cubic(x: Array, a: float) -> Array:
    """Keys' cubic convolution kernel: 1 at 0, 0 at the other whole numbers and beyond 2; `a` is its slope at 1."""
    x = jnp.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0.0))


def resampling(target: DimLike, size: int, antialias: bool) -> Array:
    """The matrix f32 `[target, size]` of a bicubic resampling along one axis, pixel centres at halves, edges kept.

    As torch's `interpolate(mode="bicubic", align_corners=False)`: with `antialias` the kernel (a = −½) is as wide as
    the pixels that it stands for, and what lies outside is left out; without it (a = −¾) four pixels are read, and the
    last one stands for those outside.
    """
    at, pixels = jnp.arange(target, dtype=jnp.float32), jnp.arange(size, dtype=jnp.float32)
    scale = jnp.float32(size) / jnp.asarray(target, jnp.float32)
    centre = ((at + 0.5) * scale)[:, None]
    if antialias:
        weights = cubic((pixels[None] + 0.5 - centre) / jnp.maximum(scale, 1.0), -0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    first = jnp.floor(centre - 0.5)
    rest = centre - 0.5 - first
    taps = [
        jnp.where(jnp.clip(first + k, 0, size - 1) == pixels[None], cubic(rest - k, -0.75), 0.0) for k in (-1, 0, 1, 2)
    ]
    return taps[0] + taps[1] + taps[2] + taps[3]


def _of_table(op: GridPositions, operands: Types, results: Types) -> int:
    table, images = operands
    rows, columns = (int(n) for n in patches_of("grid_positions", images, op.patch))
    height, width = op.grid
    if (rows, columns) == op.grid:
        return 0
    return 2 * int(table.shape[1]) * (rows * height * width + rows * columns * width)


def _table_read(op: Any, operands: Types, results: Types) -> int:
    """The images lend their sizes alone."""
    return operands[0].nbytes + results[0].nbytes


@dataclass(frozen=True)
class GridPositions(Mir):
    """Position embeddings of a `grid` of patches, for the patches that images have: table `[G·K, H]` and images
    `[B, C, h, w]` → `[1, (h//P)·(w//Q), H]`.

    Images of the grid's own size read the table as it is; for others it is resampled, bicubic, by one small matrix for
    rows and one for columns. See `resampling`. The arithmetic is f32.
    """

    traits = replace(MOVEMENT, narrows=0, widens=False, flops=_of_table, bytes=_table_read)

    grid: Sides
    patch: Sides
    antialias: bool = False

    def check(self, *operands: TensorType) -> None:
        table, images = operands
        check_sizes("grid_positions", "the grid", self.grid)
        patches_of("grid_positions", images, self.patch)
        if table.rank != 2 or table.shape[0] != self.grid[0] * self.grid[1]:
            raise ShapeError(
                f"grid_positions: the table has {self.grid[0] * self.grid[1]} rows, a grid of "
                f"{self.grid[0]} × {self.grid[1]}, got {table}"
            ).of(0)
        if not is_float(table.dtype):
            raise DTypeError(f"grid_positions: the table holds floats, got {table}")

    def eval(self, table: Array, images: Array) -> Array:
        (height, width), hidden = self.grid, table.shape[1]
        rows, columns = images.shape[2] // self.patch[0], images.shape[3] // self.patch[1]
        if is_static(rows) and is_static(columns) and (rows, columns) == self.grid:
            return table[None]
        down, across = resampling(rows, height, self.antialias), resampling(columns, width, self.antialias)
        exact: dict[str, Any] = {"precision": lax.Precision.HIGHEST}
        found = jnp.einsum("rg,gkh->rkh", down, table.astype(jnp.float32).reshape(height, width, hidden), **exact)
        found = jnp.einsum("ck,rkh->rch", across, found, **exact)
        return found.reshape(1, rows * columns, hidden).astype(table.dtype)
