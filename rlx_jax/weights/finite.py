"""`check_finite`: find NaN and infinity in weights when a tensor is read, at memory bandwidth."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import ml_dtypes
import numpy as np

from rlx_jax.errors import NonFiniteWeightError, RlxNumericsWarning, quote
from rlx_jax.ir.types import is_float, short_name

# "error": NaN is an error and infinity a warning. "warn": both are warnings. "ignore": no check.
OnNonfinite = Literal["error", "warn", "ignore"]

_CHUNK = 2**18  # elements per step, so that temporaries stay in cache

# For small float types: an unsigned type of their size, a mask without the sign bit, and the first bit pattern that
# is infinite or NaN. NumPy's isfinite converts each of these elements, which is eight times slower.
_PATTERNS: dict[np.dtype[Any], tuple[type[np.unsignedinteger[Any]], int, int]] = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7FFF, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7FFF, 0x7C00),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, 0x7F, 0x7C),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 0x7F, 0x7F),
}


def check_finite(values: np.ndarray[Any, Any], key: str, where: str, on_nonfinite: OnNonfinite) -> None:
    """Check a tensor, or a part of one, that has just been read for NaN and infinity.

    Infinity alone is never an error: mask buffers hold -inf.

    Raises:
        NonFiniteWeightError: NaN under `"error"`. The message has the count.

    Warns:
        RlxNumericsWarning: infinity; NaN under `"warn"`.
    """
    if on_nonfinite == "ignore" or not (is_float(values.dtype) or values.dtype.kind == "c") or all_finite(values):
        return
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaN
        nans, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    counts = " and ".join(f"{count} {name}" for count, name in ((nans, "NaN"), (infinite, "infinite")) if count)
    message = f"weight {quote(key)} ({where}): {counts} of {values.size} values read"
    if nans and on_nonfinite == "error":
        raise NonFiniteWeightError(f'{message}; the checkpoint is damaged, or pass on_nonfinite="warn" or "ignore"')
    warnings.warn(message, RlxNumericsWarning, stacklevel=3)


def narrow_values(values: np.ndarray[Any, Any], dtype: np.dtype[Any], where: str) -> np.ndarray[Any, Any]:
    """Return a tensor cast to `dtype`. Messages begin with `where`.

    Warns:
        RlxNumericsWarning: finite values are over the range of `dtype`, and become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    if is_float(dtype) and not all_finite(cast):
        excess = int(np.isinf(cast).sum() - np.isinf(values).sum())
        if excess:
            message = (
                f"{where}: {excess} of {values.size} values are over the range of {short_name(dtype)}, now infinite"
            )
            warnings.warn(message, RlxNumericsWarning, stacklevel=2)
    return cast


def all_finite(values: np.ndarray[Any, Any]) -> bool:
    """Whether a float array holds neither NaN nor infinity.

    >>> all_finite(np.array([1.0, np.inf]))
    False
    """
    flat = values.ravel(order="K")
    if flat.dtype in _PATTERNS:
        unsigned, mask, limit = _PATTERNS[flat.dtype]
        bits = flat.view(unsigned)
        return all(int((bits[i : i + _CHUNK] & unsigned(mask)).max()) < limit for i in range(0, bits.size, _CHUNK))
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, flat.size, _CHUNK))
