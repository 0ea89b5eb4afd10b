"""Ops between images and the tokens that a vision transformer reads."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import MOVEMENT, Types, first_moved
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static

# Of rows and of columns.
Sides = tuple[int, int]


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
    operands = "images[B,C,_,_]"

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
    clipped = (jnp.clip(first + k, 0, size - 1) for k in (-1, 0, 1, 2))
    taps = [jnp.where(place == pixels[None], cubic(rest - k, -0.75), 0.0) for k, place in enumerate(clipped, -1)]
    return taps[0] + taps[1] + taps[2] + taps[3]


def _of_table(op: GridPositions, operands: Types, results: Types) -> int:
    table, images = operands
    rows, columns = (int(n) for n in patches_of("grid_positions", images, op.patch))
    height, width = op.grid
    if (rows, columns) == op.grid:
        return 0
    return 2 * int(table.shape[1]) * (rows * height * width + rows * columns * width)


@dataclass(frozen=True)
class GridPositions(Mir):
    """Position embeddings of a `grid` of patches, for the patches that images have: table `[G·K, H]` and images
    `[B, C, h, w]` → `[1, (h//P)·(w//Q), H]`.

    Images of the grid's own size read the table as it is; for others it is resampled, bicubic, by one small matrix for
    rows and one for columns. See `resampling`. The arithmetic is f32.
    """

    traits = replace(MOVEMENT, narrows=0, widens=False, flops=_of_table, bytes=first_moved)
    operands = "table:float[_,H] images[B,C,_,_]"

    grid: Sides
    patch: Sides
    antialias: bool = False

    def check(self, *operands: TensorType) -> None:
        table, images = operands
        check_sizes("grid_positions", "the grid", self.grid)
        patches_of("grid_positions", images, self.patch)
        if table.shape[0] != self.grid[0] * self.grid[1]:
            raise ShapeError(
                f"grid_positions: the table has {self.grid[0] * self.grid[1]} rows, a grid of "
                f"{self.grid[0]} × {self.grid[1]}, got {table}"
            ).of(0)

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


# -- images in other sizes, and images read at places between their entries --------------------

Doubles = np.ndarray[Any, np.dtype[np.float64]]

METHODS = ("nearest", "linear", "cubic")
COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
)  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def _cubic(d: Any, a: float, xp: Any = np) -> Any:
    """Keys' cubic kernel with slope `a` at 1."""
    d = abs(d)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return xp.where(d <= 1, near, xp.where(d < 2, far, 0 * d))


@dataclass(frozen=True)
class Resize(Mir):
    """Some axes of x in other sizes: each new entry is a weighted sum of old ones, axis by axis, in f32.

    Entry i of an axis that goes from n to m entries reads the place c(i), in old entries. The scale s is m/n or that of
    `scales`. By `coordinates` c is `half_pixel` (i + ½)/s − ½; `half_pixel_symmetric` the same around the middle;
    `pytorch_half_pixel` the same but 0 where m = 1; `align_corners` i(n − 1)/(m − 1); `asymmetric` i/s;
    `tf_crop_and_resize` start(n − 1) + i(end − start)(n − 1)/(m − 1) of the axis' (start, end) in `roi`, and
    `extrapolation` where that is outside.

    `nearest` reads the entry that c rounds to by `rounding`; `linear` the two around c; `cubic` four, by Keys' kernel
    with slope `a`. `antialias` widens the kernel by 1/s where s < 1. Entries outside count as the one at the edge, or
    not at all with `exclude_outside`. `jax.image.resize`: half_pixel, a = −½, outside excluded.
    """

    traits = replace(MOVEMENT, widens=False)
    choices = {"method": METHODS, "coordinates": COORDINATES, "rounding": ROUNDINGS}
    operands = "x@axes"

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    method: str
    coordinates: str = "half_pixel"
    scales: tuple[float, ...] | None = None
    antialias: bool = False
    a: float = -0.5
    exclude_outside: bool = False
    rounding: str = "round_prefer_floor"
    roi: tuple[tuple[float, float], ...] | None = None
    extrapolation: float = 0.0

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        for axis in self.axes:
            if not is_static(x.shape[axis]):
                raise ShapeError(f"resize: axis {axis} of {x} is a symbol; sizes that are resized are numbers")
        for name, given in (("sizes", self.sizes), ("scales", self.scales), ("roi", self.roi)):
            if given is not None and len(given) != len(self.axes):
                raise ShapeError(f"resize: {name} of {len(self.axes)} axes, got {list(given)}")
        if min(self.sizes, default=1) < 1 or min(self.scales or (1,)) <= 0:
            raise ShapeError(f"resize: sizes are at least 1 and scales over 0, got {self.sizes} and {self.scales}")
        if (self.roi is not None) != (self.coordinates == "tf_crop_and_resize"):
            raise GraphError("resize: roi and tf_crop_and_resize go together")
        if self.method != "nearest" and not is_float(x.dtype):
            raise DTypeError(f"resize: {self.method} needs floats, got {x}; cast it")

    def _places(self, at: int, n: int) -> tuple[Doubles, float]:
        """Where the entries of an axis read, in old entries, and the scale."""
        m = self.sizes[at]
        i, s = np.arange(m, dtype=np.float64), m / n if self.scales is None else self.scales[at]
        half = (i + 0.5) / s - 0.5
        match self.coordinates:
            case "align_corners":
                return i * (n - 1) / max(m - 1, 1), s
            case "asymmetric":
                return i / s, s
            case "pytorch_half_pixel":
                return half if m > 1 else 0 * half, s
            case "half_pixel_symmetric":
                return n / 2 * (1 - m / (s * n)) + half, s
            case "tf_crop_and_resize":
                assert self.roi is not None
                start, end = self.roi[at]
                if m == 1:
                    return i + (start + end) / 2 * (n - 1), s
                return start * (n - 1) + i * (end - start) * (n - 1) / (m - 1), s
        return half, s

    def _nearest(self, c: Doubles, n: int) -> np.ndarray[Any, Any]:
        rounded = {
            "round_prefer_floor": np.ceil(c - 0.5), "round_prefer_ceil": np.floor(c + 0.5), "floor": np.floor(c),
            "ceil": np.ceil(c),
        }[self.rounding]  # fmt: skip
        return np.clip(rounded, 0, n - 1).astype(np.int32)

    def _weights(self, c: Doubles, s: float, n: int) -> Doubles:
        """What each new entry takes of each old one: `[m, n]`."""
        narrow = min(s, 1.0) if self.antialias else 1.0
        reach = math.ceil((1 if self.method == "linear" else 2) / narrow)
        out = np.zeros((len(c), n))
        base = np.floor(c).astype(int)
        for offset in range(-reach, reach + 2):
            k = base + offset
            d = (k - c) * narrow
            w = np.maximum(1 - np.abs(d), 0) if self.method == "linear" else _cubic(d, self.a)
            inside = (k >= 0) & (k < n)
            w = w * inside if self.exclude_outside else w
            np.add.at(out, (np.arange(len(c)), np.clip(k, 0, n - 1)), w)
        return np.asarray(out / out.sum(1, keepdims=True))

    def eval(self, x: Array) -> Array:
        y = x if self.method == "nearest" else x.astype(jnp.float32)
        for at, axis in enumerate(self.axes):
            n = x.shape[axis]
            c, s = self._places(at, n)
            if self.method == "nearest":
                y = jnp.take(y, self._nearest(c, n), axis=axis)
            else:
                weights = jnp.asarray(self._weights(c, s, n), jnp.float32)
                moved = jnp.tensordot(y, weights, axes=((axis,), (1,)), precision="highest")
                y = jnp.moveaxis(moved, -1, axis)
            outside = (c < 0) | (c > n - 1)
            if self.roi is not None and outside.any():
                shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
                y = jnp.where(outside.reshape(shape), jnp.full((), self.extrapolation, y.dtype), y)
        return y.astype(x.dtype)


@dataclass(frozen=True)
class GridSample(Mir):
    """x `[N, C, S…]` read at the places of `grid` `[N, O…, d]` → `[N, C, O…]`, for d spatial axes; in f32.

    The last axis of the grid names the last spatial axis first, from −1 to 1: the middles of the first and last entry
    with `align_corners`, else their outer edges. Outside are `zeros`, the entry at the `border`, or the `reflection` of
    the inside. `linear` reads 2ᵈ entries, `cubic` 4ᵈ (slope −¾), `nearest` one (half to even).
    """

    traits = replace(MOVEMENT, widens=False)
    choices = {"method": METHODS, "padding": ("zeros", "border", "reflection")}
    operands = "x:float[N,C,…!] grid:x[N,…,_]"

    method: str = "linear"
    padding: str = "zeros"
    align_corners: bool = False

    def check(self, *operands: TensorType) -> None:
        x, grid = operands
        spatial = x.rank - 2
        if not 1 <= spatial <= 3 or grid.rank != x.rank or grid.shape[-1] != spatial:
            raise ShapeError(f"grid_sample: x is [N, C, S…] and grid [N, O…, d] with d of 1 to 3; got {x} and {grid}")

    def eval(self, x: Array, grid: Array) -> Array:
        wide, at = x.astype(jnp.float32), grid.astype(jnp.float32)
        sizes = x.shape[2:]
        places = [self._unscaled(at[..., len(sizes) - 1 - i], n) for i, n in enumerate(sizes)]
        if self.method != "cubic":
            places = [self._folded(p, n) for p, n in zip(places, sizes, strict=True)]
        total: Any = 0.0
        for corner in itertools.product(*(self._corners(p) for p in places)):
            weight = math.prod(w for _, w in corner)
            total = total + self._read(wide, [k for k, _ in corner], sizes) * jnp.expand_dims(weight, 1)
        return jnp.asarray(total, jnp.float32).astype(x.dtype)

    def _unscaled(self, g: Array, n: int) -> Array:
        return (g + 1) / 2 * (n - 1) if self.align_corners else ((g + 1) * n - 1) / 2

    def _folded(self, p: Array, n: int) -> Array:
        """A place as the padding has it."""
        if self.padding == "border":
            return jnp.clip(p, 0, n - 1)
        if self.padding == "reflection":
            low, span = (0.0, float(n - 1)) if self.align_corners else (-0.5, float(n))
            if span == 0:
                return jnp.zeros_like(p)
            around = jnp.abs(p - low) % (2 * span)
            return jnp.clip(low + jnp.minimum(around, 2 * span - around), 0, n - 1)
        return p

    def _corners(self, p: Array) -> list[tuple[Array, Array]]:
        """The whole places around one, with their weights."""
        if self.method == "nearest":
            return [(jnp.round(p), jnp.ones_like(p))]
        base = jnp.floor(p)
        t = p - base
        if self.method == "linear":
            return [(base, 1 - t), (base + 1, t)]
        return [(base + k, _cubic(t - k, -0.75, jnp)) for k in (-1, 0, 1, 2)]

    def _read(self, x: Array, at: list[Array], sizes: tuple[int, ...]) -> Array:
        """x at whole places, 0 where they are outside: `[N, C, O…]`."""
        if self.method == "cubic":
            at = [self._folded(k, n) for k, n in zip(at, sizes, strict=True)]
        inside = [(k >= 0) & (k <= n - 1) for k, n in zip(at, sizes, strict=True)]
        index = [jnp.clip(k, 0, n - 1).astype(jnp.int32) for k, n in zip(at, sizes, strict=True)]
        found = jax.vmap(lambda image, *k: image[(slice(None), *k)])(x, *index)
        kept = jnp.expand_dims(math.prod(i.astype(jnp.float32) for i in inside), 1)
        return jnp.where(kept > 0, found, jnp.zeros_like(found))
