"""The JSON header of a `.safetensors` file, checked against the bytes that are there.

    {"__metadata__": {str: str}, name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, …}

The outer object is walked member by member, so that memory is bounded by what has been accepted so
far, and a message has the byte. Sizes are Python integers, which do not wrap.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from rlx_jax.errors import (
    DuplicateWeightError,
    LimitError,
    SafetensorsError,
    UnsupportedError,
    did_you_mean,
    quote,
)
from rlx_jax.io import limits
from rlx_jax.io.strict_json import decode_text, is_text, offset, whole_number
from rlx_jax.ir.types import MAX_DIM, MAX_ELEMENTS, MAX_RANK, short_name

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BLANKS = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor: `nbytes` bytes from byte `start` of the file on."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: the tensors in the order of their data, and the file's own notes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def parse_header(raw: bytes, data_bytes: int, where: str) -> Header:
    """The header of a file, if all of it can be trusted.

    Args:
        raw: the JSON, which starts at byte 8 of the file.
        data_bytes: how many bytes follow it.
        where: the file, for messages.

    Raises:
        SafetensorsError, DuplicateWeightError, LimitError, UnsupportedError: as `SafetensorsFile`.
    """
    cursor = _Cursor(decode_text(raw, where, SafetensorsError, start=8), where)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    for name in cursor.members():
        if name in tensors or (name == "__metadata__" and metadata is not None):
            raise DuplicateWeightError(f"{where}: {quote(name)} is given twice, again at byte {cursor.byte}")
        if name == "__metadata__":
            metadata = _metadata(cursor)
        else:
            name_bytes = len(name.encode())
            limits.at_most(name_bytes, limits.MAX_NAME_BYTES, "limits.MAX_NAME_BYTES", f"{where}: the length of a name")
            tensors[name] = _tensor(cursor.entry(name), len(raw) + 8, data_bytes, f"{where}: tensor {quote(name)}")
            limits.at_most(len(tensors), limits.MAX_TENSORS, "limits.MAX_TENSORS", f"{where}: the number of tensors")
    cursor.end()
    return Header(_in_order(tensors, len(raw) + 8, data_bytes, where), metadata or {})


class _Cursor:
    """A place in the header's text."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    @property
    def byte(self) -> int:
        """The place in the file."""
        return 8 + offset(self.text, self.at)

    def fail(self, problem: str) -> NoReturn:
        raise SafetensorsError(f"{self.where}: {problem} at byte {self.byte}")

    def take(self, expected: str) -> str:
        """The next character after blanks, one of `expected`; the cursor moves past it."""
        found = self.peek()
        if not found or found not in expected:
            wanted = " or ".join(map(repr, expected))
            self.fail(f"expected {wanted}, found {quote(found) if found else 'the end'}")
        self.at += 1
        return found

    def peek(self) -> str:
        """The next character after blanks, empty at the end."""
        self.at = _BLANKS.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches anywhere
        return self.text[self.at : self.at + 1]

    def members(self) -> Iterator[str]:
        """The names of an object's members. At each, the caller moves the cursor past the value."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            name = self.string("a name")
            self.take(":")
            self.peek()
            yield name
            if self.take(",}") == "}":
                return

    def string(self, what: str) -> str:
        if self.peek() != '"':
            self.fail(f"expected {what}, a string")
        start = self.at
        length = _STRING.match(self.text, start).end() - start  # type: ignore[union-attr]  # it starts with a quote
        what = f"{self.where}: the length of {what}"
        limits.at_most(length, limits.MAX_STRING_CHARS, "limits.MAX_STRING_CHARS", what)
        try:
            value, self.at = _DECODER.raw_decode(self.text, start)
        except json.JSONDecodeError as cause:
            self.at = cause.pos
            self.fail(f"not JSON: {cause.msg.removesuffix(' at')}")
        if not is_text(value):
            self.at = start
            self.fail("half of a surrogate pair in the string")
        return str(value)

    def entry(self, name: str) -> tuple[tuple[str, Any], ...]:
        """The members of the flat object at the cursor, repeated ones too."""
        if self.peek() != "{":
            self.fail(f"tensor {quote(name)}: expected an object")
        limit = limits.MAX_ENTRY_CHARS
        end = self.text.find("}", self.at, self.at + limit) + 1
        if not end:
            self.fail(
                f"tensor {quote(name)}: expected an object of at most limits.MAX_ENTRY_CHARS = {limit} characters"
            )
        try:
            pairs: tuple[tuple[str, Any], ...] = _DECODER.decode(self.text[self.at : end])
        except json.JSONDecodeError as cause:
            self.at += cause.pos
            self.fail(f"tensor {quote(name)}: not JSON, or not a flat object: {cause.msg.removesuffix(' at')}")
        except (ValueError, RecursionError):
            self.fail(f"tensor {quote(name)}: NaN, Infinity or deep nesting in the entry")
        self.at = end
        return pairs

    def end(self) -> None:
        """Nothing but blanks may follow."""
        if self.peek():
            self.fail(f"expected the end of the header, found {quote(self.text[self.at : self.at + 20])}")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(constant)


# Objects become tuples of pairs: that keeps repeated names, and cannot be taken for an array.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_int=whole_number, parse_constant=_refuse_constant)


def _metadata(cursor: _Cursor) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for name in cursor.members():
        if name in metadata:
            raise DuplicateWeightError(
                f"{cursor.where}: {quote(name)} is given twice in '__metadata__', again at byte {cursor.byte}"
            )
        metadata[name] = cursor.string(f"the value of {quote(name)} in '__metadata__'")
        what = f"{cursor.where}: the number of entries in '__metadata__'"
        limits.at_most(len(metadata), limits.MAX_METADATA_ENTRIES, "limits.MAX_METADATA_ENTRIES", what)
    return metadata


def _tensor(pairs: tuple[tuple[str, Any], ...], data_start: int, data_bytes: int, where: str) -> TensorInfo:
    """Check one entry by itself. `where` names file and tensor."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateWeightError(
            f"{where}: field {quote(next(n for n in names if names.count(n) > 1))} is given twice"
        )
    for field in fields:
        if field not in _FIELDS:
            raise SafetensorsError(f"{where}: unknown field {quote(field)}{did_you_mean(field, _FIELDS)}")
    for field in _FIELDS:
        if field not in fields:
            raise SafetensorsError(f"{where}: field {field!r} is missing")
    shape = _sizes(fields["shape"], f"{where}: shape")
    check_shape(shape, where)
    dtype = _dtype(fields["dtype"], shape, where)
    offsets = _sizes(fields["data_offsets"], f"{where}: data_offsets")
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


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    """A list of whole numbers, none negative."""
    if not isinstance(value, list):
        raise SafetensorsError(f"{where}: expected a list of whole numbers, found {_shown(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item < 2**64:  # bool is an int to isinstance
            raise SafetensorsError(f"{where}: expected whole numbers from 0 to 2**64 - 1, found {_shown(item)}")
    return tuple(value)


def _shown(value: Any) -> str:
    """A JSON value for a message. Printing nested lists recurses, and a file chooses how deep."""
    return type(value).__name__ if isinstance(value, list | tuple) else quote(json.dumps(value))


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Raise `LimitError` for a shape that NumPy or XLA cannot take; XLA aborts the process on some."""
    if len(shape) > MAX_RANK:
        raise LimitError(f"{where}: rank {len(shape)} is over the limit of {MAX_RANK}")
    if max(shape, default=0) > MAX_DIM:
        raise LimitError(f"{where}: dimension {max(shape)} is over the limit of {MAX_DIM}")
    # Without the zeros: NumPy and XLA multiply the other dimensions even if nothing is stored.
    elements = math.prod(dim for dim in shape if dim)
    if elements >= MAX_ELEMENTS:
        raise LimitError(f"{where}: {elements} elements, the limit is fewer than {MAX_ELEMENTS}")


def _dtype(name: Any, shape: tuple[int, ...], where: str) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise SafetensorsError(f"{where}: dtype: expected a string, found {_shown(name)}")
    bits = math.prod(shape) * _SUB_BYTE_BITS.get(name, 8)
    if bits % 8:
        raise SafetensorsError(f"{where}: shape {list(shape)} of {name} takes {bits} bits, which are not whole bytes")
    if name not in DTYPES:
        raise UnsupportedError(f"{where}: dtype {quote(name)} is not supported; these are: {', '.join(DTYPES)}")
    return DTYPES[name]


def _in_order(tensors: dict[str, TensorInfo], data_start: int, data_bytes: int, where: str) -> dict[str, TensorInfo]:
    """The tensors sorted by place, if they fill the data without gap or overlap. Empty ones may share a place."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes))
    at, before = data_start, "the header"
    for name, info in ordered:
        if info.start != at:
            problem = "overlaps" if info.start < at else f"leaves {info.start - at} unused bytes after"
            raise SafetensorsError(
                f"{where}: tensor {quote(name)} {problem} {before}: it begins at {info.start - data_start}, "
                f"expected {at - data_start}"
            )
        at, before = info.start + info.nbytes, quote(name)
    if at != data_start + data_bytes:
        raise SafetensorsError(
            f"{where}: {data_start + data_bytes - at} bytes after the last tensor ({before}) belong to none"
        )
    return dict(ordered)
