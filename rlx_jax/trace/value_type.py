"""The type of a value as custom stages see it, with symbolic sizes that refuse comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.types import Dim, TensorType, as_dim, as_dtype, is_static


@dataclass(frozen=True)
class ValueType:
    """Shape and dtype of a value as user code sees them: a symbolic size is a `Dim`."""

    type: TensorType

    @property
    def shape(self) -> tuple[int | Dim, ...]:
        """Sizes. A symbolic one is a `Dim`, which refuses comparison with a number."""
        return tuple(d if is_static(d) else Dim(d) for d in self.type.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    @property
    def size(self) -> int | Dim:
        """Number of elements; a `Dim` if a size is symbolic."""
        return math.prod(self.shape)

    rank, dims = ndim, shape

    def dim(self, axis: int) -> int | Dim:
        """Return the size of one axis, which may be negative.

        Raises:
            ShapeError: there is no such axis.
        """
        if not -self.ndim <= axis < self.ndim:
            raise ShapeError(f"{self} has no axis {axis}")
        return self.shape[axis]

    @property
    def is_static(self) -> bool:
        """Whether every size is an int."""
        return self.type.is_static

    @property
    def dynamic_symbols(self) -> tuple[str, ...]:
        """The names of all symbols in the shape, sorted."""
        return tuple(sorted(self.type.symbols))

    @property
    def num_elements(self) -> int | None:
        """Number of elements; None if a size is symbolic."""
        return self.type.size if self.is_static else None

    @property
    def size_bytes(self) -> int | None:
        """Size in bytes; None if a size is symbolic."""
        return self.type.nbytes if self.is_static else None

    def bind(self, binding: Mapping[str, int]) -> ValueType:
        """Return the type with sizes in place of some of its symbols."""
        return ValueType(self.type.bind(binding))

    def with_dim(self, axis: int, size: Any) -> ValueType:
        """Return the type with another size on one axis."""
        self.dim(axis)
        dims = [as_dim(size, "with_dim") if i == axis % self.ndim else d for i, d in enumerate(self.type.shape)]
        return ValueType(TensorType(tuple(dims), self.dtype))

    def with_dtype(self, dtype: Any) -> ValueType:
        """Return the type with another dtype."""
        return ValueType(self.type.with_dtype(dtype))

    def broadcast_with(self, other: ValueType) -> ValueType:
        """Return the result type of an elementwise op on both.

        Raises:
            ShapeError: the sizes of an axis differ and neither is 1.
            DTypeError: the dtypes differ.
        """
        if self.dtype != other.dtype:
            raise DTypeError(f"broadcast_with: {self} and {other}: dtypes differ, cast one")
        try:
            return ValueType(TensorType(jax.lax.broadcast_shapes(self.type.shape, other.type.shape), self.dtype))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"broadcast_with: {self} and {other} do not broadcast") from error

    @staticmethod
    def scalar(dtype: Any = "f32") -> ValueType:
        """Return the type of a scalar."""
        return ValueType(TensorType((), as_dtype(dtype)))

    def __str__(self) -> str:
        return str(self.type)
