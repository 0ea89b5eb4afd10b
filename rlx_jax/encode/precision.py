"""Quantize vectors for a search index, as sentence-transformers does: one byte or one bit for each number."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.encode.pooled import Vectors
from rlx_jax.errors import RequestError, RlxWarning, shown
from rlx_jax.runtime.inputs import check_flag, check_integer

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
# Number of vectors from which their own ranges are stable enough not to warn.
MIN_CALIBRATION_VECTORS = 100


def check_precision(precision: Any, ranges: Any, width: int | None = None) -> Vectors | None:
    """Return the ranges as float32 `[2, width]`, or None, after checking both arguments.

    Raises:
        RequestError: no name in `PRECISIONS`; ranges of another shape, or for a precision without ranges.
    """
    if precision not in PRECISIONS:
        raise RequestError(f"precision is {shown(precision)}; expected one of {', '.join(PRECISIONS)}")
    if ranges is None:
        return None
    if not precision.endswith("int8"):
        raise RequestError(f"ranges are for precision int8 and uint8, and precision is {shown(precision)}")
    array = np.asarray(ranges)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or len(array) != 2 or width not in (None, array.shape[1]):
        raise RequestError(f"ranges is {shown(ranges)}; expected numbers [2, {width or 'width'}]: minimum and maximum")
    return array.astype(np.float32)


def vector_ranges(vectors: Vectors) -> Vectors:
    """Return the smallest and the largest value of each column of vectors `[n, width]`, as `[2, width]`."""
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def quantize_vectors(vectors: Vectors, precision: str, ranges: Any = None) -> np.ndarray[Any, Any]:
    """Return vectors `[n, width]` in a precision for a search index.

    Args:
        vectors: float32.
        precision: "int8" and "uint8" divide the range of each column into 255 steps, `[n, width]`; "binary" (int8) and
            "ubinary" (uint8) keep whether a number is positive, eight to a byte, `[n, ⌈width / 8⌉]`.
        ranges: `vector_ranges` of representative vectors, for "int8" and "uint8". Without them it is the range of these
            vectors, so that the result for one depends on the others.

    Raises:
        RequestError: see `check_precision`; or a single vector without ranges.

    Warns:
        RlxWarning: the ranges are of few vectors.
    """
    limits = check_precision(precision, ranges, vectors.shape[1])
    if precision == "float32":
        return vectors
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if limits is None and len(vectors):
        if len(vectors) == 1:
            raise RequestError(f"precision={precision!r} of one vector: pass ranges=, vector_ranges of many vectors")
        if len(vectors) < MIN_CALIBRATION_VECTORS:
            message = f"the ranges for precision={precision!r} are of {len(vectors)} vectors; pass ranges= of more"
            warnings.warn(message, RlxWarning, stacklevel=3)
        limits = vector_ranges(vectors)
    if limits is None:
        return np.zeros(vectors.shape, precision)
    steps = (limits[1] - limits[0]) / np.float32(255)
    steps = np.where(steps == 0, np.float32(1), steps)
    levels = np.clip(np.floor((vectors - limits[0]) / steps), 0, 255)
    quantized: np.ndarray[Any, Any] = (levels if precision == "uint8" else levels - 128).astype(precision)
    return quantized


@dataclass(frozen=True)
class OutputFormat:
    """The form in which `Encoder.embed` returns vectors.

    Attributes:
        truncate_dim: number of columns to return; None for all.
        normalize: divide by the Euclidean length, after truncation.
        precision, ranges: see `quantize_vectors`.
    """

    truncate_dim: int | None = None
    normalize: bool = False
    precision: str = "float32"
    ranges: Vectors | None = None

    @staticmethod
    def checked(encoder: Any, truncate_dim: Any, normalize: Any, precision: Any, ranges: Any) -> OutputFormat:
        """Return the format for the vectors of an `Encoder`, after checking its arguments.

        Raises:
            RequestError: names the argument.
        """
        width, columns = encoder.output_width, encoder.pipeline.truncate_dim
        if truncate_dim is not None and (columns := check_integer("truncate_dim", truncate_dim, 1)) > width:
            raise RequestError(f"truncate_dim is {columns}, and the vectors have {width} numbers")
        check_flag("normalize", normalize)
        ranges = check_precision(precision, ranges, min(columns or width, width))
        return OutputFormat(columns, normalize, precision, ranges)

    def __call__(self, vectors: Vectors) -> np.ndarray[Any, Any]:
        """Return vectors `[n, width]` in this format."""
        vectors = vectors[:, : self.truncate_dim]
        if self.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return quantize_vectors(vectors, self.precision, self.ranges)
