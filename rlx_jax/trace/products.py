"""Sums over products, spectra and linear systems, as methods; `mm` and `linear` stand with the blocks."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from rlx_jax.errors import ShapeError, shown
from rlx_jax.ir.operands import check_operands
from rlx_jax.ir.ops.linalg import MATRICES, Det, Einsum, Fft, Solve, product
from rlx_jax.ir.types import as_dtype
from rlx_jax.trace.indexing import Indexing
from rlx_jax.trace.spec_calls import of_kind
from rlx_jax.trace.writer import V


class Products(Indexing[V]):
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
