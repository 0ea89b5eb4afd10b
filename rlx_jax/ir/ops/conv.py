"""Convolutions: features first, `[N, C, spatial …]`, with one to three spatial axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import REDUCTION, Initial, Normal, Types, product_traits
from rlx_jax.ir.types import TensorType, is_float, is_static

Pairs = tuple[tuple[int, int], ...]
# No padding; as many results as ⌈size / stride⌉, what is odd in the padding behind or (SAME_LOWER) before.
PADDINGS = ("VALID", "SAME", "SAME_LOWER")


def check_counts(op: str, rank: int, least: int = 1, **counts: Sequence[int]) -> None:
    """Check that each of `counts` is a whole number of at least `least` for each spatial axis."""
    for name, given in counts.items():
        if len(given) != rank or any(isinstance(c, bool) or not isinstance(c, int) or c < least for c in given):
            raise ShapeError(f"{op}: {name} is an int of at least {least} for each of {rank} axes, got {list(given)}")


def check_padding(op: str, padding: str | Pairs, rank: int) -> None:
    """A name, or (before, after) for each spatial axis."""
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise ShapeError(f"{op}: padding is {padding!r}; expected pairs, or one of {', '.join(PADDINGS)}")
    elif len(padding) != rank or any(len(pair) != 2 for pair in padding):
        raise ShapeError(f"{op}: padding is (before, after) for each of {rank} axes, got {list(padding)}")


def check_windows(op: str, x: TensorType, window: Sequence[int], dilation: Sequence[int], padding: Pairs) -> None:
    """Check that a window fits each spatial axis of x with its padding."""
    for axis, (k, step, (low, high)) in enumerate(zip(window, dilation, padding, strict=True), 2):
        size, reach = x.shape[axis], step * (k - 1) + 1
        if is_static(size) and size + low + high < reach:
            raise ShapeError(f"{op}: a window of {reach} does not fit axis {axis} of {x} padded by {low}, {high}")


def _check_images(op: str, x: TensorType, w: TensorType) -> int:
    """The number of spatial axes."""
    if x.rank != w.rank or not 3 <= x.rank <= 5:
        raise ShapeError(f"{op}: x is [N, C, …] and w as long, with 1 to 3 spatial axes; got {x} and {w}")
    return x.rank - 2


def _check_groups(op: str, groups: int, x: TensorType, w: TensorType, channels: int) -> None:
    if isinstance(groups, bool) or groups < 1 or w.shape[0] % groups or x.shape[1] != channels:
        raise ShapeError(f"{op}: x {x} in {groups} groups does not fit the weight {w}").of(0, 1)


def _flops(op: Any, operands: Types, results: Types) -> int:
    x, w = operands
    return 2 * (results[0] if isinstance(op, Conv) else x).size * math.prod(w.shape[1:])


@dataclass(frozen=True)
class Conv(Mir):
    """Cross-correlation: x `[N, C, S…]`, w `[O, C/groups, K…]` → `[N, O, S'…]`, as `lax.conv_general_dilated`.

    Output channel o reads the C/groups channels of its group. `padding`: pairs, or a name of `PADDINGS`. `dilation` is
    the step between entries of the window. `precision` as in `MatMul`.
    """

    traits = product_traits(_flops)
    operands = "x w:x[…!]"

    strides: tuple[int, ...]
    padding: str | Pairs
    dilation: tuple[int, ...]
    groups: int = 1
    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        x, w = operands
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

    def initial(self, place: int, weight: TensorType) -> Initial:
        return Normal(math.prod(weight.shape[1:]))


@dataclass(frozen=True)
class ConvTranspose(Mir):
    """The transpose of `Conv` as a linear map: x `[N, C, S…]`, w `[C, O/groups, K…]` → `[N, O, S'…]`.

    `S' = (S − 1) · stride − before − after + dilation · (K − 1) + 1 + output_padding`: torch's and ONNX's formula.
    """

    traits = product_traits(_flops)
    operands = "x w:x[…!]"

    strides: tuple[int, ...]
    padding: Pairs
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        x, w = operands
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


# -- pooling -----------------------------------------------------------------------------------

POOLS = ("max", "mean", "sum", "lp", "argmax")


@dataclass(frozen=True)
class Pool(Mir):
    """`max`, `mean`, `sum` or `lp` ((Σ|x|ᵖ)^(1/p)) over windows: x `[N, C, S…]` → `[N, C, S'…]`, sums in f32.

    `argmax` is where the largest stands, the first of equal ones: an int32 into the flat spatial axes, as torch's.

    `padding`: pairs, or a name of `PADDINGS`; what is padded is not read. A mean counts the entries that it reads, or
    with `count_include_pad` the padding too. `ceil`: `S' = ⌈(S + padding − reach) / stride⌉ + 1` in place of ⌊…⌋, but
    for a last window that would begin behind the input and its padding before.
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
    p: float = 2.0

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        rank = x.rank - 2
        op = f"{self.kind}_pool"
        if not 1 <= rank <= 3:
            raise ShapeError(f"{op}: x is [N, C, …] with 1 to 3 spatial axes, got {x}")
        check_counts(op, rank, window=self.window, strides=self.strides, dilation=self.dilation)
        check_padding(op, self.padding, rank)
        if self.kind in ("mean", "lp") and not is_float(x.dtype):
            raise DTypeError(f"{op}: needs floats, got {x}; cast it")
        if (self.ceil or self.kind == "argmax") and not all(map(is_static, x.shape[2:])):
            raise ShapeError(f"{op}: {'ceil' if self.ceil else 'places'} needs spatial sizes that are numbers, got {x}")
        if self.kind == "lp" and not self.p >= 1:
            raise GraphError(f"lp_pool: p is at least 1, got {self.p:g}")
        if self.ceil and isinstance(self.padding, str):
            raise ShapeError(f"{op}: ceil needs padding as pairs, got {self.padding!r}")
        if not isinstance(self.padding, str):
            for k, step, pair in zip(self.window, self.dilation, self.padding, strict=True):
                if not 0 <= min(pair) <= max(pair) <= step * (k - 1):
                    reach = step * (k - 1) + 1
                    raise ShapeError(f"{op}: padding is at least 0 and less than the window's {reach}, got {pair}")
            check_windows(op, x, self.window, self.dilation, self.padding)

    def _pairs(self, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """(before, after) of each axis, with what `ceil` adds behind."""
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.window, strict=True)]
        if isinstance(self.padding, str):
            return [(int(a), int(b)) if is_static(a) and is_static(b) else (a, b)
                    for a, b in lax.padtype_to_pads(sizes, reach, self.strides, self.padding)]  # fmt: skip
        if not self.ceil:
            return list(self.padding)
        pairs = []
        for size, r, stride, (low, high) in zip(sizes, reach, self.strides, self.padding, strict=True):
            count = -(-(size + low + high - r) // stride) + 1
            count -= (count - 1) * stride >= size + low
            pairs.append((low, max(high, (count - 1) * stride + r - size - low)))
        return pairs

    def _over(self, x: Any, start: Any, fn: Callable[..., Any], pairs: list[tuple[int, int]]) -> Array:
        window, strides, dilation = ((1, 1, *sizes) for sizes in (self.window, self.strides, self.dilation))
        padding = [(0, 0), (0, 0), *pairs]
        found: Array = lax.reduce_window(x, start, fn, window, strides, padding, window_dilation=dilation)
        return found

    def _of_shifted(self, x: Array, least: Any, pairs: list[tuple[int, int]]) -> Array:
        """The largest of one slice for each place in the window: JAX has no gradient of windows with gaps."""
        wide = lax.pad(x, least, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in pairs)])
        found = None
        for place in itertools.product(*map(range, self.window)):
            cut = wide
            for axis, (k, d, window, stride) in enumerate(
                zip(place, self.dilation, self.window, self.strides, strict=True), 2
            ):
                span = wide.shape[axis] - d * (window - 1)  # where a first entry of a window may stand
                cut = lax.slice_in_dim(cut, k * d, k * d + span, stride, axis)
            found = cut if found is None else jnp.maximum(found, cut)
        assert found is not None
        return found

    def eval(self, x: Array) -> Array:
        pairs = self._pairs(x.shape[2:])
        least = np.asarray(-np.inf if is_float(x.dtype) else jnp.iinfo(x.dtype).min, x.dtype)
        if self.kind == "max":
            apart = any(d > 1 for d in self.dilation)
            return self._of_shifted(x, least, pairs) if apart else self._over(x, least, lax.max, pairs)
        if self.kind == "argmax":
            return self._places(x, least, pairs)
        wide, none = (x.astype(jnp.float32), 0.0) if is_float(x.dtype) else (x, np.zeros((), x.dtype))
        if self.kind == "lp":
            total = self._over(jnp.abs(wide) ** self.p, 0.0, lax.add, pairs)
            return (total ** (1 / self.p)).astype(x.dtype)
        total = self._over(wide, none, lax.add, pairs)
        return (total / self._counts(x, pairs) if self.kind == "mean" else total).astype(x.dtype)

    def _places(self, x: Array, least: Any, pairs: list[tuple[int, int]]) -> Array:
        """Where the largest of each window stands. Padding is behind every place, and as small as a number can be."""
        sizes = x.shape[2:]
        at = jnp.broadcast_to(jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(1, 1, *sizes), x.shape)

        def better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
            first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
            return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

        found: Array
        _, found = self._over((lax.stop_gradient(x), at), (least, np.int32(2**31 - 1)), better, pairs)
        return found

    def _counts(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        """How many entries each window has."""
        ones = jnp.ones((1, 1, *x.shape[2:]), jnp.float32)
        if self.count_include_pad:  # what `ceil` adds does not count
            own = pairs if isinstance(self.padding, str) else self.padding
            ones = jnp.pad(ones, [(0, 0), (0, 0), *own], constant_values=1)
            pairs = [(0, high - mine) for (_, high), (_, mine) in zip(pairs, own, strict=True)]
        return self._over(ones, 0.0, lax.add, pairs)
