"""`TensorFile`: read tensors from a file that has a header and contiguous tensors, row-major and little-endian.

Each format has a subclass that reads its header. Data is read, not memory-mapped: a
mapped file that shrinks kills the process. Reading a part of a tensor costs the bytes of that part.
The header of a `.safetensors` file is JSON, and is checked against the size of the file:

    {"__metadata__": {str: str}, name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, …}

Sizes are Python integers, which do not overflow.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from rlx_jax.errors import (
    DuplicateWeightError,
    FormatError,
    LimitError,
    SafetensorsError,
    StorageError,
    UnsupportedError,
    did_you_mean,
    quote,
)
from rlx_jax.io import limits
from rlx_jax.io.files import open_regular, parse, read_at
from rlx_jax.io.ggml import BlockArrays
from rlx_jax.ir.boxes import box_shape
from rlx_jax.ir.types import MAX_DIM, MAX_ELEMENTS, MAX_RANK, short_name
from rlx_jax.weights.views import Closeable, Destination, HostArray, ReadingSource, find_tensor, index_box

# NumPy names integers and floats by a letter and a number of bytes, safetensors by bits: `U16` is `u2`.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for size in (1, 2, 4, 8) for kind in "UI"},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_FIELDS = ("dtype", "shape", "data_offsets")
# JSON values allowed in a header per tensor of `limits.MAX_TENSORS`; a matrix takes eight.
VALUES_PER_TENSOR = 10


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header entry of one tensor. Its data are `nbytes` bytes from byte `start` of the file on."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    nbytes: int


# The tensors of a file by name, in the order of their data.
Header = dict[str, TensorInfo]


def parse_header(raw: bytes, data_bytes: int, where: str) -> Header:
    """Return the tensors of a file, after checking all of its header.

    Args:
        raw: the JSON, which starts at byte 8 of the file.
        data_bytes: the number of bytes after it.
        where: the file, for messages.

    Raises:
        SafetensorsError, DuplicateWeightError, LimitError, UnsupportedError: as `SafetensorsFile`.
    """
    max_values = VALUES_PER_TENSOR * limits.MAX_TENSORS, f"{VALUES_PER_TENSOR} limits.MAX_TENSORS"
    content = parse(raw, where, SafetensorsError, max_values, repeated_error=DuplicateWeightError, start=8)
    if not isinstance(content, dict):
        raise SafetensorsError(f"{where}: header: expected a JSON object, found {type(content).__name__}")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SafetensorsError(f"{where}: '__metadata__': expected an object of strings")
    limits.check_limit(len(content), limits.bound("MAX_TENSORS"), f"{where}: the number of tensors")
    longest = max((len(name.encode()) for name in content), default=0)
    limits.check_limit(longest, limits.bound("MAX_NAME_BYTES"), f"{where}: the length of a name")
    start = len(raw) + 8
    tensors = {
        name: _tensor(fields, start, data_bytes, f"{where}: tensor {quote(name)}") for name, fields in content.items()
    }
    return _sort_by_offset(tensors, start, data_bytes, where)


def _tensor(fields: Any, data_start: int, data_bytes: int, where: str) -> TensorInfo:
    """Return one checked entry, without comparing it with others. `where` names file and tensor."""
    if not isinstance(fields, dict):
        raise SafetensorsError(f"{where}: expected an object, found {_describe_json(fields)}")
    for field in fields:
        if field not in _FIELDS:
            raise SafetensorsError(f"{where}: unknown field {quote(field)}{did_you_mean(field, _FIELDS)}")
    for field in _FIELDS:
        if field not in fields:
            raise SafetensorsError(f"{where}: field {field!r} is missing")
    shape = parse_sizes(fields["shape"], f"{where}: shape")
    check_shape(shape, where)
    dtype = _dtype(fields["dtype"], shape, where)
    offsets = parse_sizes(fields["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2:
        raise SafetensorsError(f"{where}: data_offsets: expected [begin, end], found {len(offsets)} numbers")
    begin, end = offsets
    if begin > end:
        raise SafetensorsError(f"{where}: data_offsets: begin {begin} is after end {end}")
    if end > data_bytes:
        raise SafetensorsError(
            f"{where}: data_offsets: ends at {end}, but the file has {data_bytes} bytes of data; "
            "a download that was cut short looks like this"
        )
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise SafetensorsError(
            f"{where}: shape {list(shape)} of {short_name(dtype)} takes {needed} bytes, data_offsets give {end - begin}"
        )
    return TensorInfo(dtype, shape, data_start + begin, needed)


def parse_sizes(value: Any, where: str) -> tuple[int, ...]:
    """Return a JSON list of non-negative whole numbers as a tuple."""
    if not isinstance(value, list):
        raise SafetensorsError(f"{where}: expected a list of whole numbers, found {_describe_json(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item < 2**64:  # `isinstance` would accept a bool
            raise SafetensorsError(f"{where}: expected whole numbers from 0 to 2**64 - 1, found {_describe_json(item)}")
    return tuple(value)


def _describe_json(value: Any) -> str:
    """Return a JSON value for a message."""
    return type(value).__name__ if isinstance(value, list | dict) else quote(json.dumps(value))


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Raise `LimitError` for a shape that NumPy or XLA cannot take; XLA aborts the process on some."""
    if len(shape) > MAX_RANK:
        raise LimitError(f"{where}: rank {len(shape)} is over the limit of {MAX_RANK}")
    if max(shape, default=0) > MAX_DIM:
        raise LimitError(f"{where}: dimension {max(shape)} is over the limit of {MAX_DIM}")
    # Zero dimensions are left out, as NumPy and XLA multiply the others even if the array is empty.
    elements = math.prod(dim for dim in shape if dim)
    if elements >= MAX_ELEMENTS:
        raise LimitError(f"{where}: {elements} elements, the limit is fewer than {MAX_ELEMENTS}")


def _dtype(name: Any, shape: tuple[int, ...], where: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
        SafetensorsError: `name` is not a string, or the shape takes a fraction of a byte.
        UnsupportedError: the dtype is unknown, or has fewer than 8 bits.
    """
    if not isinstance(name, str):
        raise SafetensorsError(f"{where}: dtype: expected a string, found {_describe_json(name)}")
    bits = math.prod(shape) * _SUB_BYTE_BITS.get(name, 8)
    if bits % 8:
        raise SafetensorsError(f"{where}: shape {list(shape)} of {name} takes {bits} bits, which are not whole bytes")
    if name not in DTYPES:
        raise UnsupportedError(f"{where}: dtype {quote(name)} is not supported; these are: {', '.join(DTYPES)}")
    return DTYPES[name]


def _sort_by_offset(
    tensors: dict[str, TensorInfo], data_start: int, data_bytes: int, where: str
) -> dict[str, TensorInfo]:
    """Return the tensors sorted by offset, after checking that they fill the data without gaps or overlaps.

    Empty tensors may share an offset.
    """
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes))
    position, preceding = data_start, "the header"
    for name, info in ordered:
        if info.start != position:
            problem = "overlaps" if info.start < position else f"leaves {info.start - position} unused bytes after"
            raise SafetensorsError(
                f"{where}: tensor {quote(name)} {problem} {preceding}: it begins at {info.start - data_start}, "
                f"expected {position - data_start}"
            )
        position, preceding = info.start + info.nbytes, quote(name)
    if position != data_start + data_bytes:
        raise SafetensorsError(
            f"{where}: {data_start + data_bytes - position} bytes after the last tensor ({preceding}) belong to none"
        )
    return dict(ordered)


# Reads `count` bytes from `start` on; the third argument names the file in messages.
ReadBytes = Callable[[int, int, str], bytes]
# Is called with each part of a tensor once it is read, while it is in the CPU's cache.
Inspect = Callable[[HostArray], None]

_MIN_RUN_BYTES = 2**12  # bytes of a run that is worth a system call: a page, the least that a disk reads
_BAND_BYTES = 2**20  # bytes that are read at once where runs are shorter: small enough that the buffer stays in cache
# Bytes that are read between two inspections. After each a thread waits for one that runs Python, 5 ms: with 1 MiB two
# threads read 0.48 GB/s beside one, with 4 MiB 1.53; alone 3.7 and 4.2.
_INSPECTED_BYTES = 2**22
_thread = threading.local()


def file_identity(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change if a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class TensorFile(Closeable):
    """One open file. Opening reads only the header.

    A context manager; the file is closed at the latest when the object is garbage-collected. A copy opens it again.

    Args:
        path: the path of the file.
        name: the name of the file in its directory; the path by default.

    Attributes:
        error: the class of errors for malformed files of the format.
        name: see above.
        tensors: the result of `_read_header`.
        bytes_read: how many bytes of tensors have been read so far.
        identity: see `file_identity`.

    Raises:
        error: not a regular file. MissingFileError, StorageError: it does not exist, or cannot be read.
        Others: as `_read_header`.
    """

    error: ClassVar[type[FormatError]]

    def __init__(self, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        self.name = os.fsdecode(path) if name is None else name
        self._path, self._where = os.path.abspath(os.fsdecode(path)), quote(self.name)
        self._descriptor = open_regular(os.fsdecode(path), self._where, self.error)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            status = os.fstat(self._descriptor)
            self.identity = file_identity(status)
            self.tensors = MappingProxyType(self._read_header(status.st_size))
        except BaseException:
            self._close()
            raise
        self._count_lock = threading.Lock()
        self.bytes_read = 0

    def read(
        self, name: str, index: tuple[slice, ...] | None = None, out: Destination = None,
        inspect: Inspect | None = None,
    ) -> HostArray:  # fmt: skip
        """Return a tensor, or the part that `index` selects as in NumPy, as a C-contiguous array.

        It is `out` if that is a C-contiguous array of the same shape and dtype and `index` has no steps, else a new
        one. `inspect` is called with each part that has been read, as an array of one axis. `BlockArrays` are filled if
        they have the shape and the part is contiguous in the file; the result is then a part of its bytes.

        Only the box that `index` spans is read if its contiguous runs have a page or more. With shorter runs, the bytes
        between them are read as well, a mebibyte at a time. Steps of slices are applied in memory.

        Raises:
            MissingWeightError: no such tensor.
            WeightShapeError: `index` does not fit the shape.
            FormatError: the file has shrunk or changed since it was opened, or a BOOL is neither 0 nor 1.
            StorageError: the file is closed, or cannot be read.
        """
        info = find_tensor(self.tensors, name, f"{self._where}, a file")
        box, rest = index_box(index, info.shape, name)
        has_steps = any(part.step not in (None, 1) for part in rest)
        starts = [start for start, _ in box]
        values = self._read_box(name, starts, box_shape(box), None if has_steps else out, inspect)
        return np.ascontiguousarray(values[rest]) if has_steps else values

    def close(self) -> None:
        """Close the file. Reading from it is an error afterwards."""
        self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy opens the file again.
        return functools.partial(type(self), name=self.name), (self._path,)

    def _read_header(self, size: int) -> Mapping[str, TensorInfo]:
        """Return the tensors of the open file of `size` bytes, in the order of the data."""
        raise NotImplementedError

    def _read_bytes(self, count: int, start: int, where: str) -> bytes:
        """Return `count` bytes of the file from `start` on."""
        buffer = bytearray(count)
        if read_at(self._descriptor, memoryview(buffer), start, where) < count:
            raise self.error(f"{where}: the file was truncated while its header was read")
        return bytes(buffer)

    def _read_box(
        self, name: str, starts: Sequence[int], shape: tuple[int, ...], out: Destination, inspect: Inspect | None
    ) -> HostArray:
        """Return the box of `shape` in a tensor that starts at the indices `starts`; in `out` if it fits.

        Raises:
            As `read`.
        """
        if not self._close.alive:
            raise StorageError(f"{self._where}: the file is closed")
        info = self.tensors[name]
        if isinstance(out, BlockArrays) and shape[1:] == info.shape[1:] and shape in (out.shape, (1, *out.shape)):
            values = self._fill_blocks(name, starts[0], shape[0], out)
        elif isinstance(out, np.ndarray) and out.shape == shape and out.dtype == info.dtype and out.flags.c_contiguous:
            values = out
        else:
            limits.check_memory(math.prod(shape) * info.dtype.itemsize, f"{self._where}: tensor {quote(name)}")
            values = np.empty(shape, info.dtype)
        if values.size and not (isinstance(out, BlockArrays) and out.filled):
            self._fill(name, starts, values, inspect)
        # Checked after reading, so that a change during the read is noticed too.
        if file_identity(os.fstat(self._descriptor)) != self.identity:
            raise self.error(f"{self._where}: the file has been written to since it was opened; open it again")
        if info.dtype == np.bool_ and (largest := values.view(np.uint8).max(initial=0)) > 1:
            raise self.error(f"{self._where}: tensor {quote(name)}: BOOL holds {largest}, expected 0 or 1")
        return values

    def _fill(self, name: str, starts: Sequence[int], values: HostArray, inspect: Inspect | None) -> None:
        """Read the box of a tensor that starts at the indices `starts` into `values`.

        A run is a contiguous part of the box in the file; runs start `stride` bytes apart. Long runs are read one by
        one. Short runs are read in bands together with the bytes between them, as calls would cost more than bytes.
        """
        info = self.tensors[name]
        # Axes after the last one that the box cuts are contiguous in the file.
        cut_axes = [axis for axis, dim in enumerate(info.shape) if values.shape[axis] < dim]
        axis = cut_axes[-1] if cut_axes else 0
        strides = [math.prod(info.shape[i + 1 :]) * info.dtype.itemsize for i in range(len(info.shape))]
        start = info.start + sum(begin * step for begin, step in zip(starts, strides, strict=True))
        raw = values.reshape(-1).view(np.uint8)
        if axis == 0:
            step = raw.nbytes if inspect is None else _INSPECTED_BYTES
            for at in range(0, raw.nbytes, step):
                self._read_into(name, raw[at : at + step], start + at)
                if inspect is not None:
                    inspect(raw[at : at + step].view(info.dtype))
            return
        stride, count = strides[axis - 1], values.shape[axis - 1]
        outer = values.shape[: axis - 1]
        runs = raw.reshape(*outer, count, -1)
        length = runs.shape[-1]
        step = 1 if length >= _MIN_RUN_BYTES else max(1, _BAND_BYTES // stride)
        band = np.empty(step * stride, np.uint8)
        for outer_index in np.ndindex(outer):
            begin = start + sum(i * axis_stride for i, axis_stride in zip(outer_index, strides, strict=False))
            for row in range(0, count, step):
                band_runs = runs[(*outer_index, slice(row, row + step))]
                if len(band_runs) == 1:
                    self._read_into(name, band_runs[0], begin + row * stride)
                else:
                    self._read_into(name, band[: (len(band_runs) - 1) * stride + length], begin + row * stride)
                    band_runs[...] = band[: len(band_runs) * stride].reshape(len(band_runs), stride)[:, :length]
        if inspect is not None:
            inspect(values.reshape(-1))

    def _fill_blocks(self, name: str, first: int, count: int, out: BlockArrays) -> HostArray:
        """Read rows of blocks, from the row `first` on, and write their parts to `out`; return the last bytes read."""
        info, unit = self.tensors[name], out.layout.bytes
        row_bytes = math.prod(info.shape[1:])
        num_bytes, start = count * row_bytes, info.start + first * row_bytes
        step = max(1, 2 * _BAND_BYTES // unit) * unit
        if not hasattr(_thread, "buffer") or _thread.buffer.size < step:
            # This thread uses it again, so that it remains in the CPU's cache.
            _thread.buffer = np.empty(step, np.uint8)
        band: HostArray = _thread.buffer[:0]
        for at in range(0, num_bytes, step):
            band = _thread.buffer[: min(step, num_bytes - at)]
            self._read_into(name, band, start + at)
            out.write(at // unit, band)
        out.filled = True
        return band

    def _read_into(self, name: str, raw: HostArray, start: int) -> None:
        """Fill a contiguous array with the bytes of the file from `start` on."""
        num_bytes = read_at(self._descriptor, raw.data, start, self._where)
        with self._count_lock:
            self.bytes_read += num_bytes
        if num_bytes < raw.nbytes:
            raise self.error(
                f"{self._where}: tensor {quote(name)}: the file ends at byte {start + num_bytes}, expected "
                f"{raw.nbytes} bytes from byte {start} on; it was truncated after it was opened"
            )


class FilesSource(ReadingSource):
    """A source whose weights are in `files`."""

    files: tuple[TensorFile, ...]

    def close(self) -> None:
        """Close the files. Reading is an error afterwards; names and shapes remain available."""
        for file in self.files:
            file.close()


class SafetensorsFile(TensorFile):
    """An open `.safetensors` file: a length of eight bytes, a JSON header, contiguous tensors.

    Raises:
        SafetensorsError: the file is malformed, or not a regular file.
        DuplicateWeightError: a name occurs twice.
        LimitError: over one of `rlx_jax.io.limits`.
        UnsupportedError: a dtype that is not in `DTYPES`.
        MissingFileError, StorageError: it does not exist, or cannot be read.
    """

    error = SafetensorsError

    def _read_header(self, size: int) -> Header:
        return read_header(self._read_bytes, size, self._where)


def read_header(read: ReadBytes, size: int, where: str) -> Header:
    """Return the header of a file of `size` bytes; `read(count, start, where)` returns its bytes.

    Raises:
        As `SafetensorsFile`.
    """
    if size < 8:
        raise SafetensorsError(f"{where}: the file has {size} bytes, expected 8 bytes of header length first")
    length = int.from_bytes(read(8, 0, where), "little")
    if length > size - 8:
        description = describe_content(read(min(size, 64), 0, where), "a safetensors file")
        raise SafetensorsError(
            f"{where}: {description or f'the header length is {length} bytes, the file has {size - 8} after it'}"
        )
    limits.check_limit(length, limits.bound("MAX_HEADER_BYTES"), f"{where}: the header's length in bytes")
    return parse_header(read(length, 8, where), size - 8 - length, where)


def describe_content(head: bytes, expected: str) -> str:
    """Describe a file that is not `expected` by its first bytes; return an empty string if they are unknown."""
    if head.startswith(b"version https://git-lfs"):
        return "this is a pointer of git-lfs, not the weights: `git lfs pull` fetches them"
    if head.startswith(b"PK\x03\x04"):
        return "this is a zip archive, as torch.save writes, under another name: convert it to safetensors"
    if head.startswith(b"GGUF"):
        return "this is a GGUF file under another name: rename it to .gguf"
    text = head.split(b"\n")[0].decode("ascii", "replace")
    is_printable = len(text) > 8 and text.isascii() and text.isprintable()
    return f"this is not {expected} but a text that begins with {quote(text)}" if is_printable else ""
