"""Numbers in few bits, as methods."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.ops.quantize import FakeQuantize
from rlx_jax.ir.types import as_dtype, is_float
from rlx_jax.trace.images import Images
from rlx_jax.trace.writer import V


class Rounding(Images[V]):
    """Quantisation by a scale and a zero point."""

    def _along(self, x: V, weight: V | float, axis: int | None, dtype: Any) -> V | float:
        """A scale or zero point beside x: one number, or one for each entry of `axis`."""
        if isinstance(weight, int | float):
            return weight
        rank, found = self.type_of(x).rank, self.type_of(weight)
        if found.rank != (axis is not None):
            raise ShapeError(f"{self.path}: a scale of {self.type_of(x)} has rank {int(axis is not None)}, got {found}")
        value = weight if found.dtype == dtype else self.cast(weight, dtype)
        at = None if axis is None else self._axis(x, axis)
        return value if at is None else self.expand_dims(value, [i for i in range(rank) if i != at])

    def quantize(
        self, x: V, scale: V | float, zero_point: V | float | None = None, *, axis: int | None = None, dtype: Any = "i8"
    ) -> V:
        """`saturate(round(x / scale) + zero_point)` in `dtype`, halves to even: whole numbers, or a float of 8 bits.

        `scale` and `zero_point` are numbers or of rank 0, or with an `axis` `[size of it]`.
        """
        target = as_dtype(dtype)
        whole = jnp.issubdtype(target, jnp.integer)
        if not is_float(self.type_of(x).dtype) or not (whole or target.itemsize == 1):
            raise DTypeError(
                f"{self.path}: quantize: floats to whole numbers or 8 bits, got {self.type_of(x)} to {dtype}"
            )
        held = self.type_of(x).dtype
        y = self.div(x, self._along(x, scale, axis, held))
        y = self.round(y) if whole else y
        if zero_point is not None:
            y = self.add(y, self._along(x, zero_point, axis, held))
        return self.cast(y, target, saturate=True)

    quantize_per_channel = quantize

    def dequantize(
        self,
        x: V,
        scale: V | float,
        zero_point: V | float | None = None,
        *,
        axis: int | None = None,
        dtype: Any = "f32",
    ) -> V:
        """`(x − zero_point) · scale` in the floating `dtype`; see `quantize`."""
        held = as_dtype(dtype)
        if not is_float(held):
            raise DTypeError(f"{self.path}: dequantize: to floats, got {dtype}")
        y = self.cast(x, held)
        if zero_point is not None:
            y = self.sub(y, self._along(x, zero_point, axis, held))
        return self.mul(y, self._along(x, scale, axis, held))

    dequantize_per_channel = dequantize

    def fake_quantize(
        self, x: V, scale: V | None = None, *, bits: int = 8, axis: int | None = None, ste: str = "identity"
    ) -> V:
        """x rounded to signed numbers of `bits` bits and back, with a gradient that goes through; see `FakeQuantize`.

        The scale is max |x| / (2^(bits − 1) − 1) unless it is given; with an `axis` there is one for each entry of it.
        """
        at = None if axis is None else self._axis(x, axis)
        return self.add_node(FakeQuantize(bits, at, ste), *([x] if scale is None else [x, scale]))
