"""Convolutions and pooling over `[N, C, spatial …]`, channels first, with one to three spatial axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import REDUCTION, Initial, Normal, Types, product_traits
from rlx_jax.ir.types import TensorType, is_float, is_static

# (before, after) for each spatial axis.
Pairs = tuple[tuple[int, int], ...]
# VALID has no padding. SAME gives ⌈size / stride⌉ results; an odd entry of padding is added after the axis, or before
# it with SAME_LOWER.
PADDINGS = ("VALID", "SAME", "SAME_LOWER")


def check_counts(op: str, rank: int, least: int = 1, **counts: Sequence[int]) -> None:
    """Check that each of `counts` has an int of at least `least` for each of `rank` spatial axes.

    Raises:
        ShapeError: one has not; the message names it.
    """
    for name, values in counts.items():
        if len(values) != rank or any(isinstance(c, bool) or not isinstance(c, int) or c < least for c in values):
            raise ShapeError(f"{op}: {name} is an int of at least {least} for each of {rank} axes, got {list(values)}")


def check_padding(op: str, padding: str | Pairs, rank: int) -> None:
    """Check that `padding` is a name of `PADDINGS`, or has (before, after) for each of `rank` spatial axes.

    Raises:
        ShapeError: it is neither.
    """
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise ShapeError(f"{op}: padding is {padding!r}; expected pairs, or one of {', '.join(PADDINGS)}")
    elif len(padding) != rank or any(len(pair) != 2 for pair in padding):
        raise ShapeError(f"{op}: padding is (before, after) for each of {rank} axes, got {list(padding)}")


def check_windows(op: str, x: TensorType, window: Sequence[int], dilation: Sequence[int], padding: Pairs) -> None:
    """Check that a window, with its dilation, fits each spatial axis of x with its padding.

    Raises:
        ShapeError: it is larger than a padded axis.
    """
    for axis, (k, step, (low, high)) in enumerate(zip(window, dilation, padding, strict=True), 2):
        size, reach = x.shape[axis], step * (k - 1) + 1
        if is_static(size) and size + low + high < reach:
            raise ShapeError(f"{op}: a window of {reach} does not fit axis {axis} of {x} padded by {low}, {high}")


def _check_images(op: str, x: TensorType, w: TensorType) -> int:
    """Return the number of spatial axes of x and of the weight w.

    Raises:
        ShapeError: x and w differ in rank, or have no or more than 3 spatial axes.
    """
    if x.rank != w.rank or not 3 <= x.rank <= 5:
        raise ShapeError(f"{op}: x is [N, C, …] and w has the same rank, with 1 to 3 spatial axes; got {x} and {w}")
    return x.rank - 2


def _check_groups(op: str, groups: int, x: TensorType, w: TensorType, channels: int) -> None:
    """Check that x has `channels` channels and that `groups` divides the first axis of w.

    Raises:
        ShapeError: one of them does not hold.
    """
    if isinstance(groups, bool) or groups < 1 or w.shape[0] % groups or x.shape[1] != channels:
        raise ShapeError(f"{op}: x {x} in {groups} groups does not fit the weight {w}").at_operands(0, 1)


def _flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs: one window of w for each result of a convolution, or for each operand entry of a transpose."""
    x, w = operands
    return 2 * (results[0] if isinstance(op, Conv) else x).size * math.prod(w.shape[1:])


@dataclass(frozen=True)
class Conv(Mir):
    """Convolution (cross-correlation): x `[N, C, S…]`, w `[O, C/groups, K…]` → `[N, O, S'…]`.

    It is `lax.conv_general_dilated`. Output channel o reads the C/groups channels of its group. `padding` has pairs, or
    is a name of `PADDINGS`; `dilation` is the step between entries of the window; `precision` is as in `MatMul`.
    """

    traits = product_traits(_flops)
    operands = "x w:x[…!]"

    strides: tuple[int, ...]
    padding: str | Pairs
    dilation: tuple[int, ...]
    groups: int = 1
    precision: str = "default"

    def check(self, x: TensorType, w: TensorType) -> None:
        rank = _check_images("conv", x, w)
        check_counts("conv", rank, strides=self.strides, dilation=self.dilation)
        check_padding("conv", self.padding, rank)
        _check_groups("conv", self.groups, x, w, w.shape[1] * self.groups)
        if not isinstance(self.padding, str):
            check_windows("conv", x, w.shape[2:], self.dilation, self.padding)

    def eval(self, x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(
            x, w, self.strides, self.padding, rhs_dilation=self.dilation, feature_group_count=self.groups,
            precision=lax.Precision(self.precision), preferred_element_type=x.dtype,
        )  # fmt: skip

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        return Normal(math.prod(weight.shape[1:]))


@dataclass(frozen=True)
class ConvTranspose(Mir):
    """Transposed convolution: x `[N, C, S…]`, w `[C, O/groups, K…]` → `[N, O, S'…]`.

    It is the transpose of `Conv` as a linear map. As in torch and ONNX,
    `S' = (S − 1) · stride − before − after + dilation · (K − 1) + 1 + output_padding`.
    """

    traits = product_traits(_flops)
    operands = "x w:x[…!]"

    strides: tuple[int, ...]
    padding: Pairs
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    precision: str = "default"

    def check(self, x: TensorType, w: TensorType) -> None:
        rank = _check_images("conv_transpose", x, w)
        check_counts("conv_transpose", rank, strides=self.strides, dilation=self.dilation)
        check_counts("conv_transpose", rank, 0, output_padding=self.output_padding)
        if isinstance(self.padding, str):
            raise ShapeError(f"conv_transpose: padding is (before, after) for each axis, got {self.padding!r}")
        check_padding("conv_transpose", self.padding, rank)
        _check_groups("conv_transpose", self.groups, x, w, w.shape[0])
        for axis, (size, (low, high)) in enumerate(zip(x.shape[2:], self.padding, strict=True)):
            reach = self.dilation[axis] * (w.shape[2 + axis] - 1) + 1 + self.output_padding[axis]
            if is_static(size) and (size - 1) * self.strides[axis] - low - high + reach < 1:
                raise ShapeError(f"conv_transpose: padding {low}, {high} leaves no entries on axis {2 + axis} of {x}")

    def eval(self, x: Array, w: Array) -> Array:
        # A convolution of x, dilated by the strides, with the flipped window and input and output channels swapped.
        channels, features, *window = w.shape
        grouped = w.reshape(self.groups, channels // self.groups, features, *window).swapaxes(1, 2)
        kernel = jnp.flip(grouped.reshape(self.groups * features, channels // self.groups, *window), range(2, w.ndim))
        reach = [d * (k - 1) for d, k in zip(self.dilation, window, strict=True)]
        pairs = zip(reach, self.padding, self.output_padding, strict=True)
        return lax.conv_general_dilated(
            x, kernel, (1,) * len(window), [(r - low, r - high + extra) for r, (low, high), extra in pairs],
            lhs_dilation=self.strides, rhs_dilation=self.dilation, feature_group_count=self.groups,
            precision=lax.Precision(self.precision), preferred_element_type=x.dtype,
        )  # fmt: skip

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        return Normal(weight.shape[0] * math.prod(weight.shape[2:]))


POOLS = ("max", "mean")


@dataclass(frozen=True)
class Pool(Mir):
    """Pool windows of x: `[N, C, S…]` → `[N, C, S'…]`, with sums in f32.

    Args:
        kind: `max` or `mean`.
        padding: pairs, or a name of `PADDINGS`. Padded entries do not contribute.
        ceil: `S' = ⌈(S + padding − reach) / stride⌉ + 1` instead of ⌊…⌋, without a last window that would start after
            the input and the padding before it.
        count_include_pad: a mean divides by the number of entries including the padding.
    """

    traits = REDUCTION
    choices = {"kind": POOLS}
    operands = "x:num[N,C,…]"

    kind: str
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | Pairs
    dilation: tuple[int, ...]
    ceil: bool = False
    count_include_pad: bool = False

    def check(self, x: TensorType) -> None:
        rank = x.rank - 2
        op = f"{self.kind}_pool"
        if not 1 <= rank <= 3:
            raise ShapeError(f"{op}: x is [N, C, …] with 1 to 3 spatial axes, got {x}")
        check_counts(op, rank, window=self.window, strides=self.strides, dilation=self.dilation)
        check_padding(op, self.padding, rank)
        if self.kind == "mean" and not is_float(x.dtype):
            raise DTypeError(f"{op}: needs floats, got {x}; cast it")
        if self.ceil and not all(map(is_static, x.shape[2:])):
            raise ShapeError(f"{op}: ceil needs static spatial sizes, got {x}")
        if self.ceil and isinstance(self.padding, str):
            raise ShapeError(f"{op}: ceil needs padding as pairs, got {self.padding!r}")
        if not isinstance(self.padding, str):
            for k, step, pair in zip(self.window, self.dilation, self.padding, strict=True):
                if not 0 <= min(pair) <= max(pair) <= step * (k - 1):
                    reach = step * (k - 1) + 1
                    raise ShapeError(f"{op}: padding is at least 0 and less than the window's {reach}, got {pair}")
            check_windows(op, x, self.window, self.dilation, self.padding)

    def _pairs(self, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the padding (before, after) of each axis, including the entries that `ceil` adds after it."""
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.window, strict=True)]
        if isinstance(self.padding, str):
            return [(int(a), int(b)) if is_static(a) and is_static(b) else (a, b)
                    for a, b in lax.padtype_to_pads(sizes, reach, self.strides, self.padding)]  # fmt: skip
        if not self.ceil:
            return list(self.padding)
        pairs = []
        for size, r, stride, (low, high) in zip(sizes, reach, self.strides, self.padding, strict=True):
            count = -(-(size + low + high - r) // stride) + 1
            count -= (count - 1) * stride >= size + low  # a last window in the padding after the axis is dropped
            pairs.append((low, max(high, (count - 1) * stride + r - size - low)))
        return pairs

    def _reduce_windows(self, x: Any, start: Any, fn: Callable[..., Any], pairs: list[tuple[int, int]]) -> Array:
        """Return the reduction of every window by `fn` from `start`, with the padding `pairs`."""
        window, strides, dilation = ((1, 1, *sizes) for sizes in (self.window, self.strides, self.dilation))
        padding = [(0, 0), (0, 0), *pairs]
        reduced: Array = lax.reduce_window(x, start, fn, window, strides, padding, window_dilation=dilation)
        return reduced

    def _max_of_shifted(self, x: Array, lowest: Any, pairs: list[tuple[int, int]]) -> Array:
        """Return the maximum of dilated windows, as the maximum of one shifted slice for each entry of the window.

        JAX has no gradient of `lax.reduce_window` with dilated windows.
        """
        padded = lax.pad(x, lowest, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in pairs)])
        largest = None
        for offsets in itertools.product(*map(range, self.window)):
            shifted = padded
            for axis, (k, d, window, stride) in enumerate(
                zip(offsets, self.dilation, self.window, self.strides, strict=True), 2
            ):
                span = padded.shape[axis] - d * (window - 1)  # number of positions of a window's first entry
                shifted = lax.slice_in_dim(shifted, k * d, k * d + span, stride, axis)
            largest = shifted if largest is None else jnp.maximum(largest, shifted)
        assert largest is not None
        return largest

    def eval(self, x: Array) -> Array:
        pairs = self._pairs(x.shape[2:])
        lowest = np.asarray(-np.inf if is_float(x.dtype) else jnp.iinfo(x.dtype).min, x.dtype)
        if self.kind == "max" and any(d > 1 for d in self.dilation):
            return self._max_of_shifted(x, lowest, pairs)
        if self.kind == "max":
            return self._reduce_windows(x, lowest, lax.max, pairs)
        total = self._reduce_windows(x.astype(jnp.float32), 0.0, lax.add, pairs)
        return (total / self._counts(x, pairs)).astype(x.dtype)

    def _counts(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        """Return the number of entries of each window, `[1, 1, S'…]`."""
        ones = jnp.ones((1, 1, *x.shape[2:]), jnp.float32)
        if self.count_include_pad:  # the declared padding counts, the entries that `ceil` adds do not
            declared = pairs if isinstance(self.padding, str) else self.padding
            ones = jnp.pad(ones, [(0, 0), (0, 0), *declared], constant_values=1)
            pairs = [(0, high - declared_high) for (_, high), (_, declared_high) in zip(pairs, declared, strict=True)]
        return self._reduce_windows(ones, 0.0, lax.add, pairs)
