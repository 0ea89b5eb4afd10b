"""Sums over products, spectra, linear systems, and numbers in few bits, as methods; `mm` and `linear` are blocks."""

from __future__ import annotations

import string
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, shown
from rlx_jax.ir.operands import check_operands
from rlx_jax.ir.ops.linalg import MATRICES, Det, Einsum, Fft, Solve, product
from rlx_jax.ir.ops.pointwise import FakeQuantize
from rlx_jax.ir.types import as_dtype, is_float, is_static, short_name
from rlx_jax.trace.checks import of_kind
from rlx_jax.trace.shapes import Shapes
from rlx_jax.trace.writer import Shape, V, is_number


class Products(Shapes[V]):
    """Products by named axes, and of whole numbers."""

    def einsum(self, subscripts: str, *operands: V, preferred_element_type: Any = None) -> V:
        """`jax.numpy.einsum`: sums over products by named axes. Operands have one dtype, which the result has too.

        `preferred_element_type` is another dtype for the sums and the result.
        """
        result = None if preferred_element_type is None else as_dtype(preferred_element_type)
        return self.add_node(Einsum(subscripts, result=result), *operands)

    def dot_general(self, lhs: V, rhs: V, dimension_numbers: Any, *, preferred_element_type: Any = None) -> V:
        """`lax.dot_general`: `dimension_numbers` are ((contracted of lhs, of rhs), (batch of lhs, of rhs)).

        The axes of the result are the batch, the others of lhs, the others of rhs.
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
        left = [next(letters) for _ in self.type_of(lhs).shape]
        right = [next(letters) for _ in self.type_of(rhs).shape]
        for a, b in (*sums, *batch):
            right[b] = left[a]
        gone, front = {left[a] for a, _ in sums}, [left[a] for a, _ in batch]
        rest = [c for c in (*left, *right) if c not in gone and c not in front]
        out = "".join([*front, *rest])
        terms = f"{''.join(left)},{''.join(right)}->{out}"
        return self.einsum(terms, lhs, rhs, preferred_element_type=preferred_element_type)

    def outer(self, a: V, b: V) -> V:
        """`a[i] · b[j]` of two vectors."""
        if self.type_of(a).rank != 1 or self.type_of(b).rank != 1:
            raise ShapeError(f"{self.path}: outer: two vectors, got {self.type_of(a)} and {self.type_of(b)}")
        return self.einsum("i,j->ij", a, b)

    def integer_matmul(self, a: V, b: V, a_zero_point: V | None = None, b_zero_point: V | None = None) -> V:
        """`(a − a_zero_point) @ (b − b_zero_point)` of 8-bit numbers, in i32; the zero points broadcast."""
        left, right = self._shifted(a, a_zero_point), self._shifted(b, b_zero_point)
        return self.add_node(product(self.type_of(left), self.type_of(right)), left, right)

    def _shifted(self, x: V, zero_point: V | None) -> V:
        wide = self.cast(x, "i32")
        return wide if zero_point is None else self.sub(wide, self.cast(zero_point, "i32"))

    def lora_matmul(self, x: V, w: V, a: V, b: V, *, scale: float) -> V:
        """`x · w + scale · (x · a) · b`: w `[in, out]`, a `[in, rank]`, b `[rank, out]`."""
        low = self.add_node(product(self.type_of(x), self.type_of(a)), x, a)
        change = self.add_node(product(self.type_of(low), self.type_of(b)), low, b)
        whole = self.add_node(product(self.type_of(x), self.type_of(w)), x, w)
        return self.add(whole, self.mul(change, scale))

    # -- spectra and systems: `jax.numpy.fft`, `jax.numpy.linalg` ----------------------------

    def _transform(self, kind: str, x: V, n: int | None = None, axis: int = -1, norm: str = "backward") -> V:
        return self.add_node(Fft(kind, n, self._axis(x, axis), norm), x)

    fft = of_kind(_transform, "fft", "The discrete Fourier transform along `axis`, c64, of floats or c64; see `Fft`.")
    ifft = of_kind(_transform, "ifft", "The inverse of `fft`, c64.")
    rfft = of_kind(_transform, "rfft", "The first ⌊n/2⌋ + 1 entries of `fft` of floats, c64: the others mirror them.")
    irfft = of_kind(_transform, "irfft", "The inverse of `rfft`: n floats, 2(m − 1) of m entries unless given.")

    def solve(self, a: V, b: V) -> V:
        """The x with `a x = b`: a `[..., n, n]`, b `[..., n, k]`, or `[n]` beside one matrix."""
        return self.add_node(Solve(), a, b)

    def inv(self, a: V) -> V:
        """The inverse of each matrix `[..., n, n]`; what it is multiplied with is better given to `solve`."""
        found = self.type_of(a)
        check_operands(self, "inv", MATRICES, [found])
        one = self.constant(np.eye(int(str(found.shape[-1]))), found.dtype)
        return self.solve(a, one if found.rank == 2 else self.broadcast_to(one, found.shape))

    def det(self, a: V) -> V:
        """The determinant of each matrix: `[..., n, n]` → `[...]`."""
        return self.add_node(Det(), a)

    # -- numbers in few bits: quantisation by a scale and a zero point -------------------------

    def _along(self, x: V, weight: V | float, axis: int | None, dtype: Any, block: int | None = None) -> V | float:
        """A scale or zero point beside x: one number, one for each entry of `axis`, or one for each block of it."""
        if block is not None:
            return self._by_block(x, weight, axis, dtype, block)
        if isinstance(weight, int | float):
            return weight
        rank, found = self.type_of(x).rank, self.type_of(weight)
        if found.rank != (axis is not None):
            raise ShapeError(f"{self.path}: a scale of {self.type_of(x)} has rank {int(axis is not None)}, got {found}")
        value = weight if found.dtype == dtype else self.cast(weight, dtype)
        at = None if axis is None else self._axis(x, axis)
        return value if at is None else self.expand_dims(value, [i for i in range(rank) if i != at])

    def _by_block(self, x: V, weight: V | float, axis: int | None, dtype: Any, block: int) -> V:
        """One number for each block of `axis`, as many times as it has entries; the last block may be smaller."""
        held = self.type_of(x)
        counts = isinstance(block, int) and not isinstance(block, bool) and block > 0
        if isinstance(weight, int | float) or axis is None or not counts:
            raise ShapeError(f"{self.path}: blocks of at least 1 entry need an axis, and scales as values; "
                             f"got block={shown(block)}, axis={axis}, {shown(weight)}")  # fmt: skip
        at = self._axis(x, axis)
        if not is_static(size := held.shape[at]):
            raise ShapeError(f"{self.path}: the axis of blocks has a size that is a number, got axis {at} of {held}")
        count = -(-int(str(size)) // block)
        if (found := self.type_of(weight)).shape != (*held.shape[:at], count, *held.shape[at + 1 :]):
            raise ShapeError(f"{self.path}: scales of {held} by blocks of {block} have {count} entries on axis {at} "
                             f"and its other sizes, got {found}")  # fmt: skip
        value = weight if found.dtype == dtype else self.cast(weight, dtype)
        many = self.repeat(value, block, at)
        return many if count * block == size else self.narrow(many, at, 0, int(str(size)))

    def quantize(
        self,
        x: V,
        scale: V | float,
        zero_point: V | float | None = None,
        *,
        axis: int | None = None,
        block: int | None = None,
        dtype: Any = "i8",
    ) -> V:
        """`saturate(round(x / scale) + zero_point)` in `dtype`, halves to even: whole numbers, or a float of 8 bits.

        `scale` and `zero_point` are numbers or of rank 0, or with an `axis` `[size of it]`. With a `block` there is one
        for each so many entries of `axis`: they have the sizes of x, but ⌈size / block⌉ on that axis.
        """
        target = as_dtype(dtype)
        whole = jnp.issubdtype(target, jnp.integer)
        if not is_float(self.type_of(x).dtype) or not (whole or target.itemsize == 1):
            raise DTypeError(
                f"{self.path}: quantize: floats to whole numbers or 8 bits, got {self.type_of(x)} to "
                f"{short_name(target)}"
            )
        held = self.type_of(x).dtype
        y = self.div(x, self._along(x, scale, axis, held, block))
        y = self.round(y) if whole else y
        if zero_point is not None:
            y = self.add(y, self._along(x, zero_point, axis, held, block))
        return self.cast(y, target, saturate=True)

    quantize_per_channel = quantize

    def dequantize(
        self,
        x: V,
        scale: V | float,
        zero_point: V | float | None = None,
        *,
        axis: int | None = None,
        block: int | None = None,
        dtype: Any = "f32",
    ) -> V:
        """`(x − zero_point) · scale` in the floating `dtype`; see `quantize`."""
        held = as_dtype(dtype)
        if not is_float(held):
            raise DTypeError(f"{self.path}: dequantize: to floats, got {short_name(held)}")
        y = self.cast(x, held)
        if zero_point is not None:
            y = self.sub(y, self._along(x, zero_point, axis, held, block))
        return self.mul(y, self._along(x, scale, axis, held, block))

    dequantize_per_channel = dequantize

    def quantized_matmul(
        self, x: V, w: V, scale: V | float, zero_point: V | float | None = None, *, block: int | None = None
    ) -> V:
        """`x @ ((w − zero_point) · scale)`, in the dtype of x: w whole numbers `[in, out]`.

        Scales are one number, `[out]`, or with a `block` `[⌈in / block⌉, out]`, one for each so many rows of a column.
        """
        plain = isinstance(scale, int | float) or not self.type_of(scale).rank
        axis = None if plain else 1 if block is None else 0
        wide = self.dequantize(w, scale, zero_point, axis=axis, block=block, dtype=self.type_of(x).dtype)
        return self.add_node(product(self.type_of(x), self.type_of(wide)), x, wide)

    def unpack_nibbles(self, x: V, shape: Shape) -> V:
        """Numbers of 4 bits out of bytes u8, two in each, the lower half first: u8 of 0 to 15 in a `shape` twice as
        large."""
        if self.type_of(x).dtype != np.uint8:
            raise DTypeError(f"{self.path}: unpack_nibbles: bytes, got {self.type_of(x)}")
        halves = self.stack([self.bitwise_and(x, 15), self.right_shift(x, 4)], -1)
        return self.reshape(halves, shape)

    def fake_quantize(
        self,
        x: V,
        scale: V | None = None,
        *,
        bits: int = 8,
        axis: int | None = None,
        ste: str = "identity",
        learned: bool = False,
    ) -> V:
        """x rounded to signed numbers of `bits` bits and back, with a gradient that goes through; see `FakeQuantize`.

        The scale is max |x| / (2^(bits − 1) − 1) unless it is given; with an `axis` there is one for each entry of it.
        A scale that is `learned` gets a gradient too.
        """
        at = None if axis is None else self._axis(x, axis)
        return self.add_node(FakeQuantize(bits, at, ste, learned), *([x] if scale is None else [x, scale]))

    def moving_scale(self, x: V, scale: V, *, decay: float, bits: int = 8, axis: int | None = None) -> V:
        """The scale of `fake_quantize` as an average that moves: `decay · scale + (1 − decay) · max |x| / q`, f32.

        q = 2^(bits − 1) − 1. A scale of 0 has seen nothing yet, and becomes that of x; none is under 1e-12. Rank 0, or
        with an `axis` one for each entry of it. No gradient goes through.
        """
        if not is_number(decay) or not 0 <= decay < 1:
            raise GraphError(f"{self.path}: moving_scale: decay is from 0 to under 1, got {shown(decay)}")
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
            raise GraphError(f"{self.path}: moving_scale: bits are 2 to 16, got {shown(bits)}")
        at = None if axis is None else self._axis(x, axis)
        rest = None if at is None else tuple(i for i in range(self.type_of(x).rank) if i != at)
        most = self.max(self.abs(self.cast(x, "f32")), rest)
        now = self.mul(most, 1 / (2.0 ** (bits - 1) - 1))
        before = self.cast(scale, "f32")
        moved = self.add(self.mul(before, decay), self.mul(now, 1 - decay))
        return self.activation("stop_gradient", self.maximum(self.where(self.eq(before, 0), now, moved), 1e-12))
