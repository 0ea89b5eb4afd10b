"""`Format`, the protocol of weight formats (registered in `rlx_jax.weights.formats.FORMATS`), and `OpenOptions`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, cast, get_args, runtime_checkable

import jax
import ml_dtypes
import numpy as np

from rlx_jax.dataclasses import dataclass, fields
from rlx_jax.errors import NonFiniteWeightError, RlxNumericsWarning, WeightError, did_you_mean, quote
from rlx_jax.io.files import Links
from rlx_jax.ir.types import TensorType, is_float, is_lossless_cast, short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.manifest import Verify

# `check_finite`: find NaN and infinity in weights when a tensor is read, at memory bandwidth.


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
        RlxNumericsWarning: finite values are over the range of `dtype`, and become infinite; or all of them are below
            its normal numbers, and lose digits or become 0.
    """
    cast = np.empty(values.shape, dtype) if out is None else out
    excess, can_exceed = 0, is_float(dtype) and not is_lossless_cast(values.dtype, dtype)
    all_small, normal = can_exceed, ml_dtypes.finfo(dtype).smallest_normal if can_exceed else 0
    is_flat = values.flags.c_contiguous and cast.flags.c_contiguous
    pair = (values.reshape(-1), cast.reshape(-1)) if is_flat else (values[None], cast[None])
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(pair[0]), _CHUNK):
            part, result = (array[start : start + _CHUNK] for array in pair)
            result[...] = part
            if can_exceed and not all_finite(result):
                excess += int(np.isinf(result).sum() - np.isinf(part).sum())
            all_small = all_small and not (np.abs(result) >= normal).any()  # mostly false in the first part
    if all_small and values.any():
        message = f"{where}: all values are below {normal:.1e}, where {short_name(dtype)} has fewer digits, or 0"
        warnings.warn(message, RlxNumericsWarning, stacklevel=2)
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
        return bool(flat.view(signed).max(initial=0) < limit and flat.view(unsigned).max(initial=0) < limit + sign)
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, flat.size, _CHUNK))


class CompileOptions(TypedDict, total=False):
    """Model options that the constructors of `CausalLM`, `Encoder` and similar classes take too.

    See `rlx_jax.compile`.
    """

    profile: Any
    mesh: Any
    strict: bool
    missing: Literal["error", "init"]
    key: Any
    progress: Any


@dataclass(frozen=True)
class OpenOptions:
    """All options of loading a checkpoint in one record, which `load` passes to the formats and to the model class.

    Attributes:
        strict, on_nonfinite, links, verify, subtree, max_bytes: see `rlx_jax.open_weights`.
        profile, mesh, missing, key: see `rlx_jax.compile`. progress: see `rlx_jax.load`.
    """

    strict: bool = True
    on_nonfinite: OnNonfinite = "error"
    links: Links = "follow"
    verify: Verify = "auto"
    subtree: str = ""
    max_bytes: int | None = None
    profile: Any = None
    mesh: Any = None
    missing: Literal["error", "init"] = "error"
    key: Any = None
    progress: Any = None

    def compile_options(self) -> CompileOptions:
        """Return the options that the constructors of `CausalLM`, `Encoder` and similar classes take, by name."""
        return cast(CompileOptions, {name: getattr(self, name) for name in CompileOptions.__annotations__})

    def changed_names(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        values = [(f.name, f.default, getattr(self, f.name)) for f in fields(self)]
        # Compared by identity, except strings: `key` may be an array, for which `==` is not a bool.
        return [name for name, default, v in values if v is not default and not (isinstance(v, str) and v == default)]

    def check_weights(self) -> None:
        """Check the types and values of the options for reading weights.

        Raises:
            WeightError: one is invalid; the message names it.
        """
        if not isinstance(self.strict, bool):
            raise WeightError(f"strict: expected True or False, got {quote(self.strict)}")
        for name, choices in (("on_nonfinite", OnNonfinite), ("links", Links), ("verify", Verify)):
            value, values = getattr(self, name), get_args(choices)
            if value not in values:
                raise WeightError(
                    f"{name}: expected one of {', '.join(values)}, got {quote(value)}{did_you_mean(str(value), values)}"
                )
        max_bytes = self.max_bytes
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
            raise WeightError(f"max_bytes: expected a number of bytes, got {quote(max_bytes)}")
        if not isinstance(self.subtree, str) or (self.subtree and not all(self.subtree.split("."))):
            raise WeightError(f"subtree: expected a dotted path such as 'params', got {quote(self.subtree)}")


# Bytes of a value of a matrix, by `Entry.storage`.
_STORED_SIZES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}


@dataclass(frozen=True)
class Entry:
    """One weight to write.

    Attributes:
        key: its checkpoint key.
        type: its type.
        values: returns the array, on the host or on devices.
        storage: how a GGUF file stores it if it is a matrix: a name in `gguf_write.STORAGE`; None: in its dtype.
    """

    key: str
    type: TensorType
    values: Callable[[], Any]
    storage: str | None = None

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that it takes where it is stored."""
        stored_size = _STORED_SIZES.get(self.storage or "")
        return self.type.nbytes if stored_size is None else int(math.prod(self.type.shape) * stored_size)

    @staticmethod
    def from_array(key: str, array: np.ndarray[Any, Any]) -> Entry:
        """Return the entry of an array in host memory."""
        return Entry(key, TensorType(array.shape, array.dtype), lambda: array)


class Format(Protocol):
    """A storage format of weights: in files, or as Python objects."""

    @property
    def name(self) -> str:
        """Return the name for users: `format=` of `rlx_jax.save`."""

    def detect(self, weights: Any) -> bool:
        """Whether `weights`, a path or an object, are in this format. Only names of files are inspected, no content."""

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        """Open weights that `detect` accepts, reading only names, shapes and dtypes.

        A format raises an error for options that it does not support.
        """


@runtime_checkable
class DirectoryFormat(Format, Protocol):
    """A format in which a checkpoint is the files of a directory."""

    def write(self, directory: str, entries: Sequence[Entry]) -> None:
        """Create the directory and write the files of a checkpoint to it, calling `values` of each entry once.

        Raises:
            UnsupportedError: the format does not support a dtype or a shape.
        """


@runtime_checkable
class FileFormat(Format, Protocol):
    """A format in which a checkpoint is one file, with its config and tokenizer as metadata."""

    @property
    def suffix(self) -> str:
        """Return the suffix of the files."""

    def write_file(self, path: str, entries: Sequence[Entry], metadata: Mapping[str, Any]) -> None:
        """Create the file, and compare what it holds with what was written. Errors as `DirectoryFormat.write`."""


def stored_spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a stored tensor, in the byte order of this machine."""
    return TensorType(shape, np.dtype(dtype).newbyteorder("=")).spec
