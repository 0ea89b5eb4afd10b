"""Convolutions: features first, `[N, C, spatial …]`, with one to three spatial axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import Initial, Normal, Types, product_traits
from rlx_jax.ir.types import TensorType, is_static

Array = jax.Array
Pairs = tuple[tuple[int, int], ...]
PADDINGS = ("VALID", "SAME", "SAME_LOWER")
"""No padding; as many results as ⌈size / stride⌉, what is odd in the padding behind or (SAME_LOWER) before."""


def check_counts(op: str, name: str, counts: Sequence[int], rank: int, least: int = 1) -> None:
    """A whole number of at least `least` for each spatial axis."""
    if len(counts) != rank or any(isinstance(c, bool) or not isinstance(c, int) or c < least for c in counts):
        raise ShapeError(f"{op}: {name} is an int of at least {least} for each of {rank} axes, got {list(counts)}")


def check_padding(op: str, padding: str | Pairs, rank: int) -> None:
    """A name, or (before, after) for each spatial axis."""
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise ShapeError(f"{op}: padding is {padding!r}; expected pairs, or one of {', '.join(PADDINGS)}")
    elif len(padding) != rank or any(len(pair) != 2 for pair in padding):
        raise ShapeError(f"{op}: padding is (before, after) for each of {rank} axes, got {list(padding)}")


def _check_images(op: str, x: TensorType, w: TensorType) -> int:
    """The number of spatial axes."""
    if x.rank != w.rank or not 3 <= x.rank <= 5:
        raise ShapeError(f"{op}: x is [N, C, …] and w as long, with 1 to 3 spatial axes; got {x} and {w}")
    if x.dtype != w.dtype:
        raise DTypeError(f"{op}: x is {x}, w is {w}; cast one of them")
    if not all(is_static(d) for d in w.shape):
        raise ShapeError(f"{op}: the sizes of the weight are numbers, got {w}")
    return x.rank - 2


def _check_groups(op: str, groups: int, x: TensorType, w: TensorType, channels: int) -> None:
    if isinstance(groups, bool) or groups < 1 or w.shape[0] % groups or x.shape[1] != channels:
        raise ShapeError(f"{op}: x {x} in {groups} groups does not fit the weight {w}").of(0, 1)


def _flops(op: Any, operands: Types, results: Types) -> int:
    x, w = operands
    if isinstance(op, Conv):
        return 2 * results[0].size * math.prod(w.shape[1:])
    return 2 * x.size * math.prod(w.shape[1:])


@dataclass(frozen=True)
class Conv(Mir):
    """Cross-correlation: x `[N, C, S…]`, w `[O, C/groups, K…]` → `[N, O, S'…]`, as `lax.conv_general_dilated`.

    Output channel o reads the C/groups channels of its group. `padding`: pairs, or a name of `PADDINGS`. `dilation` is
    the step between entries of the window. `precision` as in `MatMul`.
    """

    traits = product_traits(_flops)

    strides: tuple[int, ...]
    padding: str | Pairs
    dilation: tuple[int, ...]
    groups: int = 1
    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        x, w = operands
        rank = _check_images("conv", x, w)
        check_counts("conv", "strides", self.strides, rank)
        check_counts("conv", "dilation", self.dilation, rank)
        check_padding("conv", self.padding, rank)
        _check_groups("conv", self.groups, x, w, w.shape[1] * self.groups)
        if isinstance(self.padding, str):
            return
        for axis, (low, high) in enumerate(self.padding):
            size, reach = x.shape[2 + axis], self.dilation[axis] * (w.shape[2 + axis] - 1) + 1
            if is_static(size) and size + low + high < reach:
                raise ShapeError(
                    f"conv: a window of {reach} does not fit axis {2 + axis} of {x} padded by {low}, {high}"
                )

    def eval(self, x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(
            x, w, self.strides, self.padding, rhs_dilation=self.dilation, feature_group_count=self.groups,
            precision=lax.Precision(self.precision), preferred_element_type=x.dtype,
        )  # fmt: skip

    def initial(self, place: int, weight: TensorType) -> Initial:
        return Normal(math.prod(weight.shape[1:]))


@dataclass(frozen=True)
class ConvTranspose(Mir):
    """The transpose of `Conv` as a linear map: x `[N, C, S…]`, w `[C, O/groups, K…]` → `[N, O, S'…]`.

    `S' = (S − 1) · stride − before − after + dilation · (K − 1) + 1 + output_padding`: torch's and ONNX's formula.
    """

    traits = product_traits(_flops)

    strides: tuple[int, ...]
    padding: Pairs
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        x, w = operands
        rank = _check_images("conv_transpose", x, w)
        check_counts("conv_transpose", "strides", self.strides, rank)
        check_counts("conv_transpose", "dilation", self.dilation, rank)
        check_counts("conv_transpose", "output_padding", self.output_padding, rank, least=0)
        if isinstance(self.padding, str):
            raise ShapeError(f"conv_transpose: padding is (before, after) for each axis, got {self.padding!r}")
        check_padding("conv_transpose", self.padding, rank)
        _check_groups("conv_transpose", self.groups, x, w, w.shape[0])
        for axis, (size, (low, high)) in enumerate(zip(x.shape[2:], self.padding, strict=True)):
            reach = self.dilation[axis] * (w.shape[2 + axis] - 1) + 1 + self.output_padding[axis]
            if is_static(size) and (size - 1) * self.strides[axis] - low - high + reach < 1:
                raise ShapeError(f"conv_transpose: padding {low}, {high} leaves nothing of axis {2 + axis} of {x}")

    def eval(self, x: Array, w: Array) -> Array:
        channels, features, *window = w.shape
        grouped = w.reshape(self.groups, channels // self.groups, features, *window).swapaxes(1, 2)
        turned = jnp.flip(grouped.reshape(self.groups * features, channels // self.groups, *window), range(2, w.ndim))
        reach = [d * (k - 1) for d, k in zip(self.dilation, window, strict=True)]
        pairs = zip(reach, self.padding, self.output_padding, strict=True)
        return lax.conv_general_dilated(
            x, turned, (1,) * len(window), [(r - low, r - high + more) for r, (low, high), more in pairs],
            lhs_dilation=self.strides, rhs_dilation=self.dilation, feature_group_count=self.groups,
            precision=lax.Precision(self.precision), preferred_element_type=x.dtype,
        )  # fmt: skip

    def initial(self, place: int, weight: TensorType) -> Initial:
        return Normal(weight.shape[0] * math.prod(weight.shape[2:]))
