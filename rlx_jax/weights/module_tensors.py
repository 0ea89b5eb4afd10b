"""The stored tensors of a quantised module, and functions that read them as the arrays of a packing scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import quote
from rlx_jax.ir.packed import F32, SCHEMES, Codes, Scheme
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.views import HostArray

# (start, stop) of rows or of entries of a row.
Range = tuple[int, int]
# Reads a box of an array: takes a range for each axis.
ReadArray = Callable[..., HostArray]

E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
I8, U8, I32, U32, I64 = (np.dtype(name) for name in ("i1", "u1", "i4", "u4", "i8"))
FLOATS = (F32, BF16, F16)


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised weight, mostly `[out, in]`.

    Attributes:
        shape, dtype: its shape, and the dtype of its numbers.
        scheme: its packing scheme.
        arrays: a function for each array of the scheme that reads a box of it.
    """

    shape: tuple[int, ...]
    scheme: Scheme
    arrays: Mapping[str, ReadArray]
    dtype: np.dtype[Any] = F32


@dataclass(frozen=True)
class ModuleTensors:
    """The stored tensors of a module, by the end of their key, such as `.weight_scale`.

    `weight` is the end of the key of the weight that they store.
    """

    source: WeightSource
    module: str
    weight: str = ".weight"

    @property
    def where(self) -> str:
        """Return the name of the weight for messages."""
        return f"weight {quote(self.module + self.weight)}"

    def has(self, end: str) -> bool:
        return self.source.has(self.module + end)

    def type(self, end: str, *dtypes: np.dtype[Any], rank: int | None = None) -> TensorType:
        """Return the type of a tensor, which is not empty.

        Raises:
            MissingWeightError: there is none. WeightError, WeightShapeError: another dtype or rank.
        """
        key = self.module + end
        if not self.source.has(key):
            raise errors.MissingWeightError(f"{self.where} is quantised, and its tensor {quote(key)} is missing")
        spec = self.source.spec(key)
        tensor = TensorType(tuple(spec.shape), np.dtype(spec.dtype))
        if tensor.dtype not in dtypes:
            expected = " or ".join(map(short_name, dtypes))
            raise errors.WeightError(
                f"{self.where}: {quote(key)} ({self.source.where(key)}): expected {expected}, got {tensor}"
            )
        if (rank is not None and len(tensor.shape) != rank) or 0 in tensor.shape:
            raise self.mismatch(end, "values" if rank is None else f"{rank} axes", tensor)
        return tensor

    def expect(self, end: str, shape: tuple[int, ...], *dtypes: np.dtype[Any]) -> TensorType:
        """Return the type of a tensor that must have this shape. Errors as `type`."""
        tensor = self.type(end, *dtypes)
        if tensor.shape != shape:
            raise self.mismatch(end, f"shape {list(shape)}", tensor)
        return tensor

    def refuse_plain(self) -> None:
        """Raise `DuplicateWeightError` if the module also has a weight that is not quantised."""
        if self.has(self.weight):
            key = self.module + self.weight
            raise errors.DuplicateWeightError(f"{self.where}: it is stored quantised, and as {quote(key)}")

    def mismatch(self, end: str, expected: str, found: TensorType) -> errors.WeightShapeError:
        """Return the error for a tensor of another shape."""
        key = self.module + end
        where = f"{self.where}: {quote(key)} ({self.source.where(key)})"
        return errors.WeightShapeError(f"{where}: expected {expected}, got {found}; check quantization_config")

    def read(self, end: str, *index: slice) -> HostArray:
        """Return a tensor, or a box of it."""
        return self.source.read(self.module + end, index or None)


# -- schemes and arrays ------------------------------------------------------------------------


def declare_scheme(kind: str, bits: int, block: int | None, scale: str, **fields: Any) -> Scheme:
    """Return the scheme of codes with these properties, and add it to `SCHEMES`.

    Its name follows from `kind`, which stands for `bits` and `fields`, and from the other arguments.
    """
    rows = f"{fields['rows']}x" if fields.get("rows", 1) > 1 else ""
    name = f"{kind}_{rows}{'row' if block is None else block}_{scale}"
    return SCHEMES.setdefault(name, Scheme(name, (Codes(bits),), block, scale, **fields))


def float_bits(values: HostArray) -> HostArray:
    """Return the bits of floats as unsigned integers."""
    return np.ascontiguousarray(values).view(np.dtype(f"u{values.dtype.itemsize}"))


def cut(data: HostArray, start: int, columns: Range) -> HostArray:
    """Return columns of an array that begins at column `start`."""
    return data[:, columns[0] - start : columns[1] - start]


def read_whole(values: Callable[[], HostArray]) -> ReadArray:
    """Return a function that reads a box of a small array that is computed as a whole."""
    return lambda rows, columns: values()[slice(*rows), slice(*columns)]


def read_bytes(t: ModuleTensors, end: str, size: int = 1) -> ReadArray:
    """Return a function that reads codes: the bytes of a tensor `[out, n]` with entries of `size` bytes."""

    def read(rows: Range, columns: Range) -> HostArray:
        start = columns[0] // size
        part = t.read(end, slice(*rows), slice(start, -(-columns[1] // size)))
        return cut(np.ascontiguousarray(part).view(U8), start * size, columns)

    return read


def bit_fields_of(words: HostArray, bits: int) -> HostArray:
    """Return the fields of words `[m, n]`, lowest bits first: uint8 `[m, n · 32 / bits]`."""
    return np.asarray(Codes(bits).unpack(np.ascontiguousarray(words).view(U8)))


def read_outer(t: ModuleTensors, end: str, is_divisor: bool = False) -> ReadArray:
    """Return a function that reads a scale of the whole tensor, repeated for each row."""

    def read(rows: Range, columns: Range) -> HostArray:
        (value,) = t.read(end).reshape(-1)
        if is_divisor and value == 0:
            raise errors.NonFiniteWeightError(f"{t.where}: {quote(t.module + end)} is 0, and scales are divided by it")
        return np.full((rows[1] - rows[0], columns[1] - columns[0]), float_bits(np.array([value], F32))[0])

    return read


def expect_one(t: ModuleTensors, end: str, dtype: np.dtype[Any]) -> None:
    """Check that a tensor is one value."""
    if (tensor := t.type(end, dtype)).size != 1:
        raise t.mismatch(end, "one value", tensor)
