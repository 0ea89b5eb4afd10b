"""`check_finite`: find NaN and infinity in weights when a tensor is read, at memory bandwidth."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from rlx_jax.errors import NonFiniteWeightError, RlxNumericsWarning, quote
from rlx_jax.ir.types import is_float, is_lossless_cast, short_name

# "error": NaN is an error and infinity a warning. "warn": both are warnings. "ignore": no check.
OnNonfinite = Literal["error", "warn", "ignore"]

_CHUNK = 2**18  # elements per step, so that temporaries stay in cache

# For float types: integers of their size, and the first bit pattern without a sign that is infinite or NaN. NumPy's
# isfinite converts each element of small types, which is eight times slower, and needs memory for its result.
_PATTERNS: dict[np.dtype[Any], tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F800000),
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00),
    np.dtype(ml_dtypes.float8_e5m2): (np.int8, np.uint8, 0x7C),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.int8, np.uint8, 0x7F),
}


def check_finite(values: np.ndarray[Any, Any], key: str, where: str, on_nonfinite: OnNonfinite) -> None:
    """Check a tensor, or a part of one, that has just been read for NaN and infinity.

    Infinity alone is never an error: mask buffers hold -inf.

    Raises:
        NonFiniteWeightError: NaN under `"error"`. The message has the count.

    Warns:
        RlxNumericsWarning: infinity; NaN under `"warn"`.
    """
    if on_nonfinite == "ignore" or not _is_checked(values.dtype) or all_finite(values):
        return
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaN
        nans, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    counts = " and ".join(f"{count} {name}" for count, name in ((nans, "NaN"), (infinite, "infinite")) if count)
    message = f"weight {quote(key)} ({where}): {counts} of {values.size} values read"
    if nans and on_nonfinite == "error":
        raise NonFiniteWeightError(f'{message}; the checkpoint is damaged, or pass on_nonfinite="warn" or "ignore"')
    warnings.warn(message, RlxNumericsWarning, stacklevel=3)


@dataclass
class FiniteCheck:
    """Is called with each part of a tensor; `all_finite` then tells whether no part has NaN or infinity."""

    all_finite: bool = True

    def __call__(self, values: np.ndarray[Any, Any]) -> None:
        self.all_finite = self.all_finite and (not _is_checked(values.dtype) or all_finite(values))


def _is_checked(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype has NaN."""
    return is_float(dtype) or dtype.kind == "c"


def narrow_values(
    values: np.ndarray[Any, Any], dtype: np.dtype[Any], where: str, out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Return a tensor cast to `dtype`, in `out` if given. Messages begin with `where`.

    Warns:
        RlxNumericsWarning: finite values are over the range of `dtype`, and become infinite.
    """
    cast = np.empty(values.shape, dtype) if out is None else out
    excess, can_exceed = 0, is_float(dtype) and not is_lossless_cast(values.dtype, dtype)
    is_flat = values.flags.c_contiguous and cast.flags.c_contiguous
    pair = (values.reshape(-1), cast.reshape(-1)) if is_flat else (values[None], cast[None])
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(pair[0]), _CHUNK):
            part, result = (array[start : start + _CHUNK] for array in pair)
            result[...] = part
            if can_exceed and not all_finite(result):
                excess += int(np.isinf(result).sum() - np.isinf(part).sum())
    if excess:
        message = f"{where}: {excess} of {values.size} values are over the range of {short_name(dtype)}, now infinite"
        warnings.warn(message, RlxNumericsWarning, stacklevel=2)
    return cast


def all_finite(values: np.ndarray[Any, Any]) -> bool:
    """Whether a float array holds neither NaN nor infinity.

    >>> all_finite(np.array([1.0, np.inf]))
    False
    """
    flat = values.ravel(order="K")
    if flat.dtype in _PATTERNS:
        signed, unsigned, limit = _PATTERNS[flat.dtype]
        sign = 1 << 8 * flat.dtype.itemsize - 1
        # The largest signed integer has the pattern of a positive float, the largest unsigned one of a negative float.
        return all(
            int(part.view(signed).max()) < limit and int(part.view(unsigned).max()) < limit + sign
            for part in (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
        )
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, flat.size, _CHUNK))
