"""Ops on images: patches and position embeddings for vision transformers, resizing, and grid sampling."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import MOVEMENT, TOKENS, Types, first_moved
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static

# Sizes (rows, columns).
Sides = tuple[int, int]


def check_sizes(op: str, name: str, sizes: Sides) -> None:
    """Check that `sizes` are two positive ints; `name` names them in the message.

    Raises:
        ShapeError: they are not.
    """
    if len(sizes) != 2 or not all(type(s) is int and s > 0 for s in sizes):
        raise ShapeError(f"{op}: {name} is two whole numbers over 0, rows and columns; got {sizes!r}")


def patches_of(op: str, images: TensorType, patch: Sides) -> tuple[DimLike, DimLike]:
    """Return the numbers of rows and columns of patches in images `[B, C, H, W]`.

    Raises:
        ShapeError: `patch` is not two positive ints, or the images are smaller than a patch.
    """
    check_sizes(op, "the patch", patch)
    for name, size, side in zip(("height", "width"), images.shape[2:], patch, strict=True):
        if is_static(size) and size < side:
            raise ShapeError(f"{op}: the {name} of {images} is {size}, less than that of a patch, {side}")
    rows, columns = (size // side for size, side in zip(images.shape[2:], patch, strict=True))
    return rows, columns


@dataclass(frozen=True)
class Patches(Mir):
    """Split images into patches, row by row: `[B, C, H, W]` → `[B, (H//P)·(W//Q), C·P·Q]` for a patch `(P, Q)`.

    A linear layer on the patches, with a weight `[out, C, P, Q]` reshaped to `[out, C·P·Q]`, equals a convolution with
    the patch as kernel and stride. As in the convolution, incomplete patches at the right and the bottom are ignored.
    """

    traits = MOVEMENT
    operands = "images[B,C,_,_]"

    patch: Sides

    def check(self, *operands: TensorType) -> None:
        patches_of("patches", operands[0], self.patch)

    def eval(self, images: Array) -> Array:
        (p, q), (b, c, height, width) = self.patch, images.shape
        rows, columns = height // p, width // q
        tiles = images[:, :, : rows * p, : columns * q].reshape(b, c, rows, p, columns, q)
        return tiles.transpose(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, c * p * q)


def cubic(x: Any, a: float, xp: Any = jnp) -> Any:
    """Return Keys' cubic kernel at x: 1 at 0, 0 at other integers and for |x| ≥ 2; `a` is its slope at 1.

    x is an array of NumPy (`xp=np`) or JAX.
    """
    x = abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return xp.where(x <= 1, near, xp.where(x < 2, far, 0.0))


def resampling_matrix(target: DimLike, size: int, antialias: bool) -> Array:
    """Return the f32 matrix `[target, size]` of bicubic resampling along one axis, with pixel centres at halves.

    It matches torch's `interpolate(mode="bicubic", align_corners=False)`. With `antialias` the kernel (a = −½) widens
    by the scale, and pixels outside of the image have no weight. Without it (a = −¾) the kernel reads four pixels, and
    the edge pixel replaces those outside.
    """
    indices, pixels = jnp.arange(target, dtype=jnp.float32), jnp.arange(size, dtype=jnp.float32)
    scale = jnp.float32(size) / jnp.asarray(target, jnp.float32)
    centre = ((indices + 0.5) * scale)[:, None]
    if antialias:
        weights: Array = cubic((pixels[None] + 0.5 - centre) / jnp.maximum(scale, 1.0), -0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    lower = jnp.floor(centre - 0.5)
    fraction = centre - 0.5 - lower
    clipped = (jnp.clip(lower + k, 0, size - 1) for k in (-1, 0, 1, 2))
    taps = [jnp.where(index == pixels[None], cubic(fraction - k, -0.75), 0.0) for k, index in enumerate(clipped, -1)]
    return taps[0] + taps[1] + taps[2] + taps[3]


def _flops(op: GridPositions, operands: Types, results: Types) -> int:
    """Return the FLOPs of the two matrix products of the resampling; 0 for images of the grid's size."""
    table, images = operands
    rows, columns = (int(n) for n in patches_of("grid_positions", images, op.patch))
    height, width = op.grid
    if (rows, columns) == op.grid:
        return 0
    return 2 * int(table.shape[1]) * (rows * height * width + rows * columns * width)


@dataclass(frozen=True)
class GridPositions(Mir):
    """Resample position embeddings of a `grid` of G×K patches to the patches of images.

    Operands: table `[G·K, H]`, and images `[B, C, h, w]` of which only the size is read. Result:
    `[1, (h//P)·(w//Q), H]`. Images with exactly the grid's patches get the table unchanged. Otherwise one small matrix
    for rows and one for columns resample it, bicubic in f32; see `resampling_matrix`.
    """

    traits = replace(MOVEMENT, narrows=0, widens=False, flops=_flops, bytes=first_moved)
    operands = "table:float[_,H] images[B,C,_,_]"

    grid: Sides
    patch: Sides
    antialias: bool = False

    def check(self, table: TensorType, images: TensorType) -> None:
        check_sizes("grid_positions", "the grid", self.grid)
        patches_of("grid_positions", images, self.patch)
        if table.shape[0] != self.grid[0] * self.grid[1]:
            raise ShapeError(
                f"grid_positions: the table has {self.grid[0] * self.grid[1]} rows, a grid of "
                f"{self.grid[0]} × {self.grid[1]}, got {table}"
            ).at_operands(0)

    def eval(self, table: Array, images: Array) -> Array:
        (height, width), hidden = self.grid, table.shape[1]
        rows, columns = images.shape[2] // self.patch[0], images.shape[3] // self.patch[1]
        # The general case would give the same numbers, up to rounding: the matrices are identities.
        if is_static(rows) and is_static(columns) and (rows, columns) == self.grid:
            return table[None]
        # Devices may otherwise use a faster product with fewer bits.
        exact = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        cells = table.astype(jnp.float32).reshape(height, width, hidden)
        resampled = exact("rg,gkh->rkh", resampling_matrix(rows, height, self.antialias), cells)
        resampled = exact("ck,rkh->rch", resampling_matrix(columns, width, self.antialias), resampled)
        return resampled.reshape(1, rows * columns, hidden).astype(table.dtype)


@dataclass(frozen=True)
class GridAngles(Mir):
    """Compute cos and sin of angles by the row and column of patches: two f32 `[1, tokens + N, 2F]`.

    Operand: images `[B, C, h, w]`, of which only the size is read, N patches `(P, Q)` row by row. A patch's coordinates
    are those of its centre, from −1 to 1 across the image. The first F angles are the row times each of the
    `frequencies`, the others the column times each. The angles of the first `tokens` tokens are 0.
    """

    traits = TOKENS
    operands = "images[B,C,_,_]"

    patch: Sides
    frequencies: tuple[float, ...]
    tokens: int = 0

    def check(self, *operands: TensorType) -> None:
        patches_of("grid_angles", operands[0], self.patch)

    def eval(self, images: Array) -> tuple[Array, Array]:
        counts = [size // side for size, side in zip(images.shape[2:], self.patch, strict=True)]
        centres = ((2 * jnp.arange(n, dtype=jnp.float32) + 1) / jnp.asarray(n, jnp.float32) - 1 for n in counts)
        coordinates = jnp.stack(jnp.meshgrid(*centres, indexing="ij"), axis=-1).reshape(counts[0] * counts[1], 2, 1)
        angles = coordinates * jnp.asarray(self.frequencies, jnp.float32)[None, None]
        angles = jnp.pad(angles.reshape(1, counts[0] * counts[1], -1), ((0, 0), (self.tokens, 0), (0, 0)))
        return jnp.cos(angles), jnp.sin(angles)

    def text(self) -> str:
        return f"grid_angles(patch={self.patch}, n_rot={4 * len(self.frequencies)}, tokens={self.tokens})"


Doubles = np.ndarray[Any, np.dtype[np.float64]]

METHODS = ("nearest", "linear", "cubic")
COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
)  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class Resize(Mir):
    """Resize some axes of x, axis by axis: each new entry is a weighted sum of old entries, computed in f32.

    On an axis that changes from n to m entries, the new entry i samples the old coordinate c(i). The scale s is m/n,
    or the axis' entry of `scales`. The options follow ONNX's Resize.

    Args:
        axes, sizes: the axes to resize and their new sizes m.
        method: `nearest` reads the entry to which c rounds, by `rounding`; `linear` the two entries around c; `cubic`
            four entries, by Keys' kernel with slope `a`.
        coordinates: the function c. `half_pixel`: (i + ½)/s − ½. `half_pixel_symmetric`: the same, centred on the
            middle of the axis. `pytorch_half_pixel`: the same as `half_pixel`, but 0 for m = 1. `align_corners`:
            i(n − 1)/(m − 1). `asymmetric`: i/s. `tf_crop_and_resize`: start(n − 1) + i(end − start)(n − 1)/(m − 1),
            with the axis' (start, end) in `roi`; `extrapolation` is the value where c is outside.
        antialias: widen the kernel by 1/s where s < 1.
        exclude_outside: entries outside of the axis have no weight; by default the edge entry replaces them.

    `jax.image.resize` corresponds to half_pixel, a = −½ and exclude_outside.
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

    def check(self, x: TensorType) -> None:
        for axis in self.axes:
            if not is_static(x.shape[axis]):
                raise ShapeError(f"resize: axis {axis} of {x} is symbolic; resized axes need static sizes")
        for name, values in (("sizes", self.sizes), ("scales", self.scales), ("roi", self.roi)):
            if values is not None and len(values) != len(self.axes):
                raise ShapeError(f"resize: {name} of {len(self.axes)} axes, got {list(values)}")
        if min(self.sizes, default=1) < 1 or min(self.scales or (1,)) <= 0:
            raise ShapeError(f"resize: sizes are at least 1 and scales over 0, got {self.sizes} and {self.scales}")
        if (self.roi is not None) != (self.coordinates == "tf_crop_and_resize"):
            raise GraphError("resize: roi and tf_crop_and_resize go together")
        if self.method != "nearest" and not is_float(x.dtype):
            raise DTypeError(f"resize: {self.method} needs floats, got {x}; cast it")

    def _source_coordinates(self, index: int, n: int) -> tuple[Doubles, float]:
        """Return the old coordinate c of each new entry, `[m]`, and the scale s of the axis.

        Args:
            index: index of the axis in `axes`.
            n: old size of the axis.
        """
        m = self.sizes[index]
        i, s = np.arange(m, dtype=np.float64), m / n if self.scales is None else self.scales[index]
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
                start, end = self.roi[index]
                if m == 1:
                    return i + (start + end) / 2 * (n - 1), s
                return start * (n - 1) + i * (end - start) * (n - 1) / (m - 1), s
        return half, s

    def _nearest(self, c: Doubles, n: int) -> np.ndarray[Any, Any]:
        """Return the index of the old entry nearest to each coordinate, by `rounding`."""
        rounded = {
            "round_prefer_floor": np.ceil(c - 0.5), "round_prefer_ceil": np.floor(c + 0.5), "floor": np.floor(c),
            "ceil": np.ceil(c),
        }[self.rounding]  # fmt: skip
        return np.clip(rounded, 0, n - 1).astype(np.int32)

    def _weights(self, c: Doubles, s: float, n: int) -> Doubles:
        """Return the weight of each old entry in each new entry, `[m, n]`; rows add up to 1."""
        kernel_scale = min(s, 1.0) if self.antialias else 1.0
        reach = math.ceil((1 if self.method == "linear" else 2) / kernel_scale)
        out = np.zeros((len(c), n))
        base = np.floor(c).astype(int)
        for offset in range(-reach, reach + 2):
            k = base + offset
            d = (k - c) * kernel_scale
            w = np.maximum(1 - np.abs(d), 0) if self.method == "linear" else cubic(d, self.a, np)
            is_inside = (k >= 0) & (k < n)
            w = w * is_inside if self.exclude_outside else w
            # Not `out[…] += w`: several offsets clip to the same edge entry, and their weights add up.
            np.add.at(out, (np.arange(len(c)), np.clip(k, 0, n - 1)), w)
        return np.asarray(out / out.sum(1, keepdims=True))

    def eval(self, x: Array) -> Array:
        y = x if self.method == "nearest" else x.astype(jnp.float32)
        for position, axis in enumerate(self.axes):
            n = x.shape[axis]
            c, s = self._source_coordinates(position, n)
            if self.method == "nearest":
                y = jnp.take(y, self._nearest(c, n), axis=axis)
            else:
                weights = jnp.asarray(self._weights(c, s, n), jnp.float32)
                moved = jnp.tensordot(y, weights, axes=((axis,), (1,)), precision="highest")
                y = jnp.moveaxis(moved, -1, axis)
            is_outside = (c < 0) | (c > n - 1)
            if self.roi is not None and is_outside.any():
                shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
                y = jnp.where(is_outside.reshape(shape), jnp.full((), self.extrapolation, y.dtype), y)
        return y.astype(x.dtype)


@dataclass(frozen=True)
class GridSample(Mir):
    """Sample x `[N, C, S…]` at the coordinates of `grid` `[N, O…, d]` → `[N, C, O…]`, for d spatial axes, in f32.

    The last axis of the grid has the coordinates in reverse order, last spatial axis first (as in torch's
    `grid_sample`). Coordinates −1 and 1 are the centres of the first and last entry with `align_corners`, else their
    outer edges. By `padding`, coordinates outside read `zeros`, the entry at the `border`, or the `reflection` of the
    inside. `linear` reads 2ᵈ entries, `cubic` 4ᵈ (slope −¾), `nearest` one (half to even).
    """

    traits = replace(MOVEMENT, widens=False)
    choices = {"method": METHODS, "padding": ("zeros", "border", "reflection")}
    operands = "x:float[N,C,…!] grid:x[N,…,_]"

    method: str = "linear"
    padding: str = "zeros"
    align_corners: bool = False

    def check(self, x: TensorType, grid: TensorType) -> None:
        spatial = x.rank - 2
        if not 1 <= spatial <= 3 or grid.rank != x.rank or grid.shape[-1] != spatial:
            raise ShapeError(f"grid_sample: x is [N, C, S…] and grid [N, O…, d] with d of 1 to 3; got {x} and {grid}")

    def eval(self, x: Array, grid: Array) -> Array:
        x_f32, coordinates = x.astype(jnp.float32), grid.astype(jnp.float32)
        sizes = x.shape[2:]
        pixels = [self._to_pixels(coordinates[..., len(sizes) - 1 - i], n) for i, n in enumerate(sizes)]
        if self.method != "cubic":  # cubic pads each of its taps separately, in `_read`
            pixels = [self._pad_coordinates(p, n) for p, n in zip(pixels, sizes, strict=True)]
        total: Any = 0.0
        for corner in itertools.product(*(self._corner_weights(p) for p in pixels)):
            weight = math.prod(w for _, w in corner)
            total = total + self._read(x_f32, [k for k, _ in corner], sizes) * jnp.expand_dims(weight, 1)
        return jnp.asarray(total, jnp.float32).astype(x.dtype)

    def _to_pixels(self, g: Array, n: int) -> Array:
        """Return grid coordinates in −1 … 1 as coordinates in entries of an axis of size n."""
        return (g + 1) / 2 * (n - 1) if self.align_corners else ((g + 1) * n - 1) / 2

    def _pad_coordinates(self, p: Array, n: int) -> Array:
        """Return coordinates on an axis of size n, moved inside as the padding requires."""
        if self.padding == "border":
            return jnp.clip(p, 0, n - 1)
        if self.padding == "reflection":
            low, span = (0.0, float(n - 1)) if self.align_corners else (-0.5, float(n))
            if span == 0:
                return jnp.zeros_like(p)
            around = jnp.abs(p - low) % (2 * span)  # reflection has the period 2 · span
            return jnp.clip(low + jnp.minimum(around, 2 * span - around), 0, n - 1)
        return p

    def _corner_weights(self, p: Array) -> list[tuple[Array, Array]]:
        """Return pairs of (integer coordinates, weights): the entries that contribute to each coordinate."""
        if self.method == "nearest":
            return [(jnp.round(p), jnp.ones_like(p))]
        base = jnp.floor(p)
        t = p - base
        if self.method == "linear":
            return [(base, 1 - t), (base + 1, t)]
        return [(base + k, cubic(t - k, -0.75)) for k in (-1, 0, 1, 2)]

    def _read(self, x: Array, at: list[Array], sizes: tuple[int, ...]) -> Array:
        """Return x at integer coordinates `at`, one array for each spatial axis; 0 outside: `[N, C, O…]`."""
        if self.method == "cubic":
            at = [self._pad_coordinates(k, n) for k, n in zip(at, sizes, strict=True)]
        is_inside = [(k >= 0) & (k <= n - 1) for k, n in zip(at, sizes, strict=True)]
        index = [jnp.clip(k, 0, n - 1).astype(jnp.int32) for k, n in zip(at, sizes, strict=True)]
        entries = jax.vmap(lambda image, *k: image[(slice(None), *k)])(x, *index)
        inside_mask = jnp.expand_dims(math.prod(i.astype(jnp.float32) for i in is_inside), 1)
        return jnp.where(inside_mask > 0, entries, jnp.zeros_like(entries))
