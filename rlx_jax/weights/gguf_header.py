"""`read_gguf_header`: read the metadata and the list of tensors of a GGUF file, and check them against its size.

    "GGUF", u32 version, u64 number of tensors, u64 number of metadata pairs
    metadata: key (string), u32 kind, value; a string is a u64 length and its bytes, an array a u32 kind, a u64 length
    tensors: name (string), u32 rank, u64 dims (innermost first), u32 type, u64 offset from the start of the data
    data, from the next multiple of the alignment on; each offset is a multiple of the alignment

All numbers are little-endian. Every count and length is compared with the bytes left in the file before anything of
that size is read or allocated, as a file may come from anyone.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DuplicateWeightError, GgufError, UnsupportedError, listing, quote
from rlx_jax.io import limits
from rlx_jax.io.ggml import BLOCKS
from rlx_jax.weights.tensor_file import TensorInfo, check_shape, describe_content

# A value of the metadata. Arrays of numbers are NumPy arrays, arrays of strings are tuples.
MetadataValue = bool | int | float | str | np.ndarray[Any, Any] | tuple[str, ...]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # of equal layout on a little-endian machine
MAX_RANK = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
_BOOL, _STRING, _ARRAY = 7, 8, 9
# The struct codes of the numeric kinds, which are NumPy's too.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_CHUNK = 2**18  # bytes that are read at once
# Of these keys, which list pieces of text, some writers do not keep to UTF-8.
_PIECES = "tokenizer.ggml."

# Tensor types by number: plain dtypes, schemes of packing, and types that are not decoded.
DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"), 1: np.dtype("<f2"), 24: np.dtype("i1"), 25: np.dtype("<i2"), 26: np.dtype("<i4"),
    27: np.dtype("<i8"), 28: np.dtype("<f8"), 30: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
PACKED: dict[int, str] = {
    2: "gguf_q4_0", 3: "gguf_q4_1", 6: "gguf_q5_0", 7: "gguf_q5_1", 8: "gguf_q8_0", 10: "gguf_q2k", 11: "gguf_q3k",
    12: "gguf_q4k", 13: "gguf_q5k", 14: "gguf_q6k", 15: "gguf_q8k", 20: "gguf_iq4_nl", 23: "gguf_iq4_xs",
    39: "gguf_mxfp4", 40: "gguf_nvfp4",
}  # fmt: skip
_OTHER_TYPES: dict[int, str] = {
    9: "Q8_1", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The header entry of one tensor.

    Attributes:
        stored: dtype, shape and position of its data; uint8 `[..., bytes of a row]` if the tensor is packed.
        shape: the logical shape, outermost axis first.
        scheme: the scheme of packing; None for a plain tensor.
    """

    stored: TensorInfo
    shape: tuple[int, ...]
    scheme: str | None


@dataclass(frozen=True)
class GgufHeader:
    """The metadata by key, and the tensors by name in the order of the file."""

    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]


def is_equal(value: MetadataValue | None, expected: bool | int | float | str) -> bool:
    """Return whether a value of the metadata is a single one and equal to `expected`; an array is equal to nothing."""
    return not isinstance(value, np.ndarray | tuple) and value == expected


class _Cursor:
    """Reads a file from its start, never past its end."""

    def __init__(self, read: Callable[[int, int, str], bytes], size: int, where: str) -> None:
        self._read, self.size, self.where = read, size, where
        self.position = 0
        self._chunk, self._chunk_start = b"", 0

    def take(self, count: int, subject: str) -> bytes:
        """Return the next `count` bytes; `subject` names them in the message if the file ends before."""
        if count > self.size - self.position:
            raise GgufError(
                f"{self.where}: {subject} at byte {self.position}: expected {count} bytes, the file has "
                f"{self.size - self.position} left; a download that was cut short looks like this"
            )
        offset = self.position - self._chunk_start
        if offset + count > len(self._chunk):
            length = min(max(count, _CHUNK), self.size - self.position)
            self._chunk, self._chunk_start, offset = self._read(length, self.position, self.where), self.position, 0
        self.position += count
        return self._chunk[offset : offset + count]

    def number(self, code: str, subject: str) -> Any:
        """Return the next number, of a struct code."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), subject))[0]

    def string(self, limit: limits.SizeLimit, subject: str, errors: str = "strict") -> str:
        """Return the next string of at most `limit` bytes.

        Raises:
            GgufError: the file ends before its end, or it is not UTF-8. LimitError: it is longer.
        """
        length, start = self.number("Q", subject), self.position
        if length <= self.size - start:
            limits.check_limit(length, limit, f"{self.where}: {subject}: the length in bytes")
        raw = self.take(length, subject)
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise GgufError(f"{self.where}: {subject}: not UTF-8 at byte {start + error.start}") from None

    def strings(self, count: int, subject: str, errors: str) -> tuple[str, ...]:
        """Return the next strings. A vocabulary has hundreds of thousands: those in the chunk are read in one loop."""
        texts: list[str] = []
        unpack_length = struct.Struct("<Q").unpack_from
        while len(texts) < count:
            texts.append(self.string(limits.bound("MAX_STRING_BYTES"), subject, errors))
            chunk, start = self._chunk, self.position - self._chunk_start
            while len(texts) < count and start + 8 <= len(chunk):
                end = start + 8 + unpack_length(chunk, start)[0]
                if end > len(chunk):
                    break
                try:
                    texts.append(chunk[start + 8 : end].decode("utf-8", errors))
                except UnicodeDecodeError:
                    break  # `string` raises the error
                start = end
            self.position = self._chunk_start + start
        return tuple(texts)

    def count(self, smallest: int, subject: str) -> int:
        """Return the next number of items, each of which takes at least `smallest` bytes."""
        position, count = self.position, int(self.number("Q", subject))
        if count * smallest > self.size - self.position:
            raise GgufError(
                f"{self.where}: {subject} at byte {position}: {count} take at least {count * smallest} bytes, the file "
                f"has {self.size - self.position} left"
            )
        return count


def read_gguf_header(read: Callable[[int, int, str], bytes], size: int, where: str) -> GgufHeader:
    """Return the header of a file of `size` bytes; `read(count, start, where)` returns its bytes.

    Raises:
        GgufError: the header is malformed, or contradicts itself or the size of the file.
        DuplicateWeightError: a tensor is listed twice.
        UnsupportedError: a big-endian file, another version, or a type of tensors that is not decoded.
        LimitError: over one of `rlx_jax.io.limits`.
    """
    cursor = _Cursor(read, size, where)
    if (magic := cursor.take(min(4, size), "the magic")) != MAGIC:
        description = describe_content(read(min(size, 64), 0, where), "a GGUF file")
        unknown = f"the file begins with {magic!r}, expected {MAGIC!r}: it is not a GGUF file"
        raise GgufError(f"{where}: {description or unknown}")
    _check_version(cursor.number("I", "the version"), where)
    # A tensor takes at least 8 + 4 + 8 + 4 + 8 bytes and its name, a pair 8 + 4 + 1 and its key.
    num_tensors = cursor.count(33, "the number of tensors")
    num_pairs = cursor.count(14, "the number of metadata pairs")
    limits.check_limit(num_tensors, limits.bound("MAX_TENSORS"), f"{where}: the number of tensors")
    limits.check_limit(num_pairs, limits.bound("MAX_METADATA"), f"{where}: the number of metadata pairs")
    metadata = _metadata(cursor, num_pairs)
    alignment = _alignment(metadata, where)
    entries = [_entry(cursor, alignment) for _ in range(num_tensors)]
    if repeated := [name for name, count in Counter(name for name, _ in entries).items() if count > 1]:
        raise DuplicateWeightError(f"{where}: {len(repeated)} tensors are listed twice: {listing(repeated)}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {  # with positions from the start of the file
        name: replace(tensor, stored=replace(tensor.stored, start=data_start + tensor.stored.start))
        for name, tensor in entries
    }
    _check_data(tensors, size, where)
    return GgufHeader(metadata, tensors)


def _check_version(version: int, where: str) -> None:
    """Raise an error unless the version is known.

    Raises:
        UnsupportedError: the file is big-endian, or of version 1. GgufError: there is no such version.
    """
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise UnsupportedError(f"{where}: a big-endian GGUF file; only little-endian ones are read")
    if version == 1:
        raise UnsupportedError(f"{where}: GGUF version 1, of 2023, is not read; convert the model again")
    raise GgufError(f"{where}: GGUF version {version}; expected {' or '.join(map(str, VERSIONS))}")


def _metadata(cursor: _Cursor, count: int) -> dict[str, MetadataValue]:
    """Return the metadata pairs."""
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        start = cursor.position
        key = cursor.string(limits.bound("MAX_KEY_BYTES"), "a metadata key")
        if not key or not key.isascii():
            raise GgufError(f"{cursor.where}: metadata key at byte {start}: expected ASCII text, got {quote(key)}")
        if key in metadata:
            raise GgufError(f"{cursor.where}: metadata key {quote(key)} at byte {start} occurs twice")
        metadata[key] = _value(cursor, cursor.number("I", f"the kind of {quote(key)}"), key)
    return metadata


def _value(cursor: _Cursor, kind: int, key: str) -> MetadataValue:
    """Return a value of a kind; `key` is its key."""
    subject = f"metadata {quote(key)}"
    errors = "surrogateescape" if key.startswith(_PIECES) else "strict"
    if kind == _STRING:
        return cursor.string(limits.bound("MAX_STRING_BYTES"), subject, errors)
    if kind != _ARRAY:
        number: bool | int | float = _numbers(cursor, kind, subject, 1)[0].item()
        return number
    kind = cursor.number("I", subject)
    if kind == _ARRAY:
        raise GgufError(f"{cursor.where}: {subject}: an array of arrays, which GGUF readers refuse")
    if kind == _STRING:
        return cursor.strings(cursor.count(8, subject), subject, errors)
    return _numbers(cursor, kind, subject)


def _numbers(cursor: _Cursor, kind: int, subject: str, count: int | None = None) -> np.ndarray[Any, Any]:
    """Return numbers of a kind, as many as the file has them without `count`."""
    if kind not in _NUMBERS:
        raise GgufError(f"{cursor.where}: {subject}: there is no kind {kind} of values, expected 0 to 12")
    dtype = np.dtype("<" + _NUMBERS[kind])
    count = cursor.count(dtype.itemsize, subject) if count is None else count
    values = np.frombuffer(cursor.take(count * dtype.itemsize, subject), dtype)
    if kind == _BOOL and (largest := values.max(initial=0)) > 1:
        raise GgufError(f"{cursor.where}: {subject}: a bool is {largest}, expected 0 or 1")
    return values.astype(np.bool_) if kind == _BOOL else values


def _alignment(metadata: Mapping[str, MetadataValue], where: str) -> int:
    """Return the alignment of the data in bytes, a multiple of 8."""
    value = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= 2**20 or value % 8:
        raise GgufError(f"{where}: {ALIGNMENT} is {quote(str(value))}, expected a multiple of 8 up to {2**20}")
    return value


def _entry(cursor: _Cursor, alignment: int) -> tuple[str, GgufTensor]:
    """Return the name of the next tensor and its entry, with a position from the start of the data."""
    start = cursor.position
    name = cursor.string(limits.bound("MAX_GGUF_NAME_BYTES"), "the name of a tensor")
    where = f"{cursor.where}: tensor {quote(name)}"
    if not name:
        raise GgufError(f"{cursor.where}: the tensor listed at byte {start} has no name")
    rank = cursor.number("I", f"the rank of {quote(name)}")
    if not 1 <= rank <= MAX_RANK:
        raise GgufError(f"{where}: rank {rank}, expected 1 to {MAX_RANK}")
    shape = tuple(cursor.number("Q", f"the shape of {quote(name)}") for _ in range(rank))[::-1]
    if min(shape) == 0:
        raise GgufError(f"{where}: shape {list(shape)} has an axis of size 0")
    check_shape(shape, where)
    kind, offset = cursor.number("I", f"the type of {quote(name)}"), cursor.number("Q", f"the offset of {quote(name)}")
    if offset % alignment:
        raise GgufError(f"{where}: offset {offset} is not a multiple of the alignment, {alignment}")
    return name, _typed(shape, kind, offset, where)


def _typed(shape: tuple[int, ...], kind: int, offset: int, where: str) -> GgufTensor:
    """Return the entry of a tensor of a type number.

    Raises:
        UnsupportedError: the type is not decoded. GgufError: there is no such type, or rows are not whole blocks.
    """
    if kind in DTYPES:
        dtype = DTYPES[kind]
        return GgufTensor(TensorInfo(dtype, shape, offset, math.prod(shape) * dtype.itemsize), shape, None)
    if kind not in PACKED:
        name = _OTHER_TYPES.get(kind)
        if name is None and not 0 <= kind <= max(_OTHER_TYPES):
            raise GgufError(f"{where}: there is no tensor type {kind}")
        supported = ", ".join(["f32", "f16", "bf16", *(s.removeprefix("gguf_") for s in PACKED.values())])
        raise UnsupportedError(
            f"{where}: type {name or f'{kind}, which GGML removed,'} is not decoded; {supported} are"
        )
    scheme = PACKED[kind]
    layout = BLOCKS[scheme]
    *rows, row_size = shape
    if row_size % layout.elements:
        raise GgufError(f"{where}: {scheme} has blocks of {layout.elements}, which rows of {row_size} do not fill")
    stored_shape = (*rows, row_size // layout.elements * layout.bytes)
    return GgufTensor(TensorInfo(np.dtype(np.uint8), stored_shape, offset, math.prod(stored_shape)), shape, scheme)


def _check_data(tensors: Mapping[str, GgufTensor], size: int, where: str) -> None:
    """Check that the data of all tensors are in the file and do not overlap."""
    end, preceding = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].stored.start):
        info = tensor.stored
        if info.start < end:
            raise GgufError(f"{where}: tensor {quote(name)} overlaps {quote(preceding)}: it begins before byte {end}")
        end, preceding = info.start + info.nbytes, name
        if end > size:
            raise GgufError(
                f"{where}: tensor {quote(name)} ends at byte {end}, the file has {size}; a download that was cut short "
                "looks like this"
            )
