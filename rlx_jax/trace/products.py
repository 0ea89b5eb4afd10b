"""The methods for products, FFTs, linear systems and quantization. `linear` is in `builders`."""

from __future__ import annotations

import string
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, shown
from rlx_jax.ir.ops.linalg import Einsum, Fft, Solve, product
from rlx_jax.ir.ops.pointwise import FakeQuantize
from rlx_jax.ir.types import as_dtype, is_float, is_static, short_name
from rlx_jax.trace.checks import bind_kind
from rlx_jax.trace.shapes import Shapes
from rlx_jax.trace.writer import Shape, V, is_integer, is_number


class Products(Shapes[V]):
    """Products, transforms, linear systems and quantization."""

    def mm(self, a: V, b: V) -> V:
        """Return the matrix product `a @ b`: `[…, M, K] × […, K, N]`."""
        return self.add_node(product(self.type_of(a), self.type_of(b)), a, b)

    def einsum(self, subscripts: str, *operands: V, preferred_element_type: Any = None) -> V:
        """Return the `jax.numpy.einsum` of operands of one dtype, in that dtype.

        `preferred_element_type` is another dtype for the accumulation and the result.
        """
        result = None if preferred_element_type is None else as_dtype(preferred_element_type)
        return self.add_node(Einsum(subscripts, result=result), *operands)

    def dot_general(self, lhs: V, rhs: V, dimension_numbers: Any, *, preferred_element_type: Any = None) -> V:
        """Return `lax.dot_general`: `dimension_numbers` are ((contracted of lhs, of rhs), (batch of lhs, of rhs)).

        The axes of the result are the batch axes, the remaining axes of lhs, and the remaining axes of rhs.
        """
        try:
            (sum_l, sum_r), (batch_l, batch_r) = dimension_numbers
            sums = list(zip(self._axes(lhs, tuple(sum_l)), self._axes(rhs, tuple(sum_r)), strict=True))
            batch = list(zip(self._axes(lhs, tuple(batch_l)), self._axes(rhs, tuple(batch_r)), strict=True))
        except (TypeError, ValueError) as error:
            expected = "((contracted of lhs, of rhs), (batch of lhs, of rhs))"
            raise ShapeError(
                f"{self.path}: dot_general: expected {expected}, got {shown(dimension_numbers)}"
            ) from error
        letters = iter(string.ascii_letters)
        lhs_letters = [next(letters) for _ in self.type_of(lhs).shape]
        rhs_letters = [next(letters) for _ in self.type_of(rhs).shape]
        # Axes that are contracted or batched together share a letter.
        for a, b in (*sums, *batch):
            rhs_letters[b] = lhs_letters[a]
        contracted, batch_letters = {lhs_letters[a] for a, _ in sums}, [lhs_letters[a] for a, _ in batch]
        other_letters = [c for c in (*lhs_letters, *rhs_letters) if c not in contracted and c not in batch_letters]
        out = "".join([*batch_letters, *other_letters])
        terms = f"{''.join(lhs_letters)},{''.join(rhs_letters)}->{out}"
        return self.einsum(terms, lhs, rhs, preferred_element_type=preferred_element_type)

    def outer(self, a: V, b: V) -> V:
        """Return the outer product `a[i] · b[j]` of two vectors."""
        if self.type_of(a).rank != 1 or self.type_of(b).rank != 1:
            raise ShapeError(f"{self.path}: outer: two vectors, got {self.type_of(a)} and {self.type_of(b)}")
        return self.einsum("i,j->ij", a, b)

    def integer_matmul(self, a: V, b: V, a_zero_point: V | int | None = None, b_zero_point: V | int | None = None) -> V:
        """Return `(a − a_zero_point) @ (b − b_zero_point)` of 8-bit integers in i32; the zero points broadcast."""
        return self.mm(self._subtract_zero_point(a, a_zero_point), self._subtract_zero_point(b, b_zero_point))

    def _subtract_zero_point(self, x: V, zero_point: V | int | None) -> V:
        """Return x minus its zero point, in i32."""
        integers = self.cast(x, "i32")
        if zero_point is None:
            return integers
        return self.sub(integers, zero_point if isinstance(zero_point, int) else self.cast(zero_point, "i32"))

    def lora_matmul(self, x: V, w: V, a: V, b: V, *, scale: float) -> V:
        """Return `x · w + scale · (x · a) · b`: w `[in, out]`, a `[in, rank]`, b `[rank, out]`."""
        # (x · a) · b instead of x · (a · b), because the rank is small.
        change = self.mm(self.mm(x, a), b)
        return self.add(self.mm(x, w), self.mul(change, scale))

    # -- spectra and systems: `jax.numpy.fft`, `jax.numpy.linalg` ----------------------------

    def _transform(self, kind: str, x: V, n: int | None = None, axis: int = -1, norm: str = "backward") -> V:
        return self.add_node(Fft(kind, n, self._axis(x, axis), norm), x)

    fft = bind_kind(_transform, "fft", "The discrete Fourier transform along `axis`, c64, of floats or c64; see `Fft`.")
    ifft = bind_kind(_transform, "ifft", "The inverse of `fft`, c64.")
    rfft = bind_kind(_transform, "rfft", "The first ⌊n/2⌋ + 1 entries of `fft` of floats, c64: the others mirror them.")
    irfft = bind_kind(_transform, "irfft", "The inverse of `rfft`: n floats, 2(m − 1) of m entries unless given.")

    def solve(self, a: V, b: V) -> V:
        """Return the x with `a x = b`: a `[..., n, n]`, b `[..., n, k]`, or b `[n]` with a single matrix."""
        return self.add_node(Solve(), a, b)

    # -- quantization by a scale and a zero point ----------------------------------------------

    def _broadcast_scale(
        self, x: V, scale: V | float, axis: int | None, dtype: Any, block: int | None = None
    ) -> V | float:
        """Return a scale or zero point that broadcasts with x: one number, or one per entry or per block of `axis`."""
        if block is not None:
            return self._repeat_by_block(x, scale, axis, dtype, block)
        if isinstance(scale, int | float):
            return scale
        rank, scale_type = self.type_of(x).rank, self.type_of(scale)
        if scale_type.rank != (axis is not None):
            raise ShapeError(
                f"{self.path}: a scale of {self.type_of(x)} has rank {int(axis is not None)}, got {scale_type}"
            )
        value = scale if scale_type.dtype == dtype else self.cast(scale, dtype)
        number = None if axis is None else self._axis(x, axis)
        return value if number is None else self.expand_dims(value, [i for i in range(rank) if i != number])

    def _repeat_by_block(self, x: V, scale: V | float, axis: int | None, dtype: Any, block: int) -> V:
        """Return one number per block of `axis`, repeated for each entry; the last block may be smaller."""
        x_type = self.type_of(x)
        if isinstance(scale, int | float) or axis is None or not is_integer(block) or block < 1:
            raise ShapeError(f"{self.path}: blocks of at least 1 entry need an axis, and scales as values; "
                             f"got block={shown(block)}, axis={axis}, {shown(scale)}")  # fmt: skip
        dim = self._axis(x, axis)
        if not is_static(size := x_type.shape[dim]):
            raise ShapeError(f"{self.path}: the axis of blocks has a size that is a number, got axis {dim} of {x_type}")
        count = -(-int(str(size)) // block)  # rounded up: the last block may be partial
        if (scale_type := self.type_of(scale)).shape != (*x_type.shape[:dim], count, *x_type.shape[dim + 1 :]):
            raise ShapeError(f"{self.path}: scales of {x_type} by blocks of {block} have {count} entries on axis {dim} "
                             f"and its other sizes, got {scale_type}")  # fmt: skip
        value = scale if scale_type.dtype == dtype else self.cast(scale, dtype)
        repeated = self.repeat(value, int(block), dim)
        return repeated if count * block == size else self.narrow(repeated, dim, 0, int(str(size)))

    def quantize(
        self, x: V, scale: V | float, zero_point: V | float | None = None, *, axis: int | None = None,
        block: int | None = None, dtype: Any = "i8",
    ) -> V:  # fmt: skip
        """Return `saturate(round(x / scale) + zero_point)`, halves to even, in an integer or 8-bit floating `dtype`.

        `scale` and `zero_point` are numbers or have rank 0, or with an `axis` `[size]`. With a `block` there is one for
        each group of `block` entries along `axis`: they have the shape of x, but ⌈size / block⌉ on that axis.
        """
        target = as_dtype(dtype)
        is_integer = jnp.issubdtype(target, jnp.integer)
        if not is_float(self.type_of(x).dtype) or not (is_integer or target.itemsize == 1):
            raise DTypeError(
                f"{self.path}: quantize: floats to whole numbers or 8 bits, got {self.type_of(x)} to "
                f"{short_name(target)}"
            )
        x_dtype = self.type_of(x).dtype
        y = self.div(x, self._broadcast_scale(x, scale, axis, x_dtype, block))
        y = self.round(y) if is_integer else y  # the cast to an 8-bit float rounds by itself
        if zero_point is not None:
            y = self.add(y, self._broadcast_scale(x, zero_point, axis, x_dtype, block))
        return self.cast(y, target, saturate=True)

    def dequantize(
        self, x: V, scale: V | float, zero_point: V | float | None = None, *, axis: int | None = None,
        block: int | None = None, dtype: Any = "f32",
    ) -> V:  # fmt: skip
        """Return `(x − zero_point) · scale` in the floating `dtype`; see `quantize`."""
        target = as_dtype(dtype)
        if not is_float(target):
            raise DTypeError(f"{self.path}: dequantize: to floats, got {short_name(target)}")
        y = self.cast(x, target)
        if zero_point is not None:
            y = self.sub(y, self._broadcast_scale(x, zero_point, axis, target, block))
        return self.mul(y, self._broadcast_scale(x, scale, axis, target, block))

    def quantized_matmul(
        self, x: V, w: V, scale: V | float, zero_point: V | float | None = None, *, block: int | None = None
    ) -> V:
        """Return `x @ ((w − zero_point) · scale)` in the dtype of x, for integers w `[in, out]`.

        Scales are one number, `[out]`, or with a `block` `[⌈in / block⌉, out]`: one per `block` rows of each column.
        """
        is_scalar = isinstance(scale, int | float) or not self.type_of(scale).rank
        axis = None if is_scalar else 1 if block is None else 0
        weights = self.dequantize(w, scale, zero_point, axis=axis, block=block, dtype=self.type_of(x).dtype)
        return self.mm(x, weights)

    def unpack_nibbles(self, x: V, shape: Shape) -> V:
        """Return the 4-bit numbers in u8 bytes as u8 of 0 to 15.

        Each byte has two of them, the lower half first, so that `shape` has twice the elements of x.
        """
        if self.type_of(x).dtype != np.uint8:
            raise DTypeError(f"{self.path}: unpack_nibbles: bytes, got {self.type_of(x)}")
        halves = self.stack([self.bitwise_and(x, 15), self.right_shift(x, 4)], -1)
        return self.reshape(halves, shape)

    def fake_quantize(
        self, x: V, scale: V | None = None, *, bits: int = 8, axis: int | None = None, ste: str = "identity",
        learned: bool = False,
    ) -> V:  # fmt: skip
        """Return x quantized to signed integers of `bits` bits and back, with a straight-through gradient.

        The scale is by default max |x| / (2^(bits − 1) − 1), with an `axis` one for each entry of it. A `learned` scale
        gets a gradient too. See `FakeQuantize`, also for the choices of `ste`.
        """
        axis_number = None if axis is None else self._axis(x, axis)
        return self.add_node(FakeQuantize(bits, axis_number, ste, learned), *([x] if scale is None else [x, scale]))

    def moving_scale(self, x: V, scale: V, *, decay: float, bits: int = 8, axis: int | None = None) -> V:
        """Return the scale of `fake_quantize` as a moving average: `decay · scale + (1 − decay) · max |x| / q`, f32.

        q = 2^(bits − 1) − 1. A scale of 0 means no data yet, and becomes the scale of x. The result is at least 1e-12,
        of rank 0, or with an `axis` `[size]`, and has no gradient.
        """
        if not is_number(decay) or not 0 <= decay < 1:
            raise GraphError(f"{self.path}: moving_scale: decay is from 0 to under 1, got {shown(decay)}")
        if not is_integer(bits) or not 2 <= bits <= 16:
            raise GraphError(f"{self.path}: moving_scale: bits are 2 to 16, got {shown(bits)}")
        axis_number = None if axis is None else self._axis(x, axis)
        other_axes = None if axis_number is None else tuple(i for i in range(self.type_of(x).rank) if i != axis_number)
        max_abs = self.max(self.abs(self.cast(x, "f32")), other_axes)
        current = self.mul(max_abs, 1 / (2.0 ** (bits - 1) - 1))
        previous = self.cast(scale, "f32")
        average = self.add(self.mul(previous, decay), self.mul(current, 1 - decay))
        return self.activation("stop_gradient", self.maximum(self.where(self.eq(previous, 0), current, average), 1e-12))
