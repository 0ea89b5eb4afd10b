"""The safetensors reader: each fault by name, legal oddities, and mutants judged by the reference implementation."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.numpy

from rlx_jax.errors import DuplicateWeightError, LimitError, RlxError, SafetensorsError, UnsupportedError
from tests.safetensors_bytes import ENTRY, frame, one, open_raw


def text(entry: str, data: bytes = b"1234") -> bytes:
    """The same with the entry spelt out."""
    return frame(b'{"a": ' + entry.encode() + b"}", data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_entry(**fields: str) -> str:
    """An entry whose fields are JSON text."""
    given_fields = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0, 4]", **fields}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in given_fields.items()) + "}"


FAULTS: dict[str, tuple[bytes, type[RlxError], str]] = {
    # the length
    "empty file": (b"", SafetensorsError, "the file has 0 bytes, expected 8"),
    "header over file by one": (struct.pack("<Q", 3) + b"{}", SafetensorsError, "header says 3 bytes, file has 2"),
    "header over file": (struct.pack("<Q", 200) + one()[8:], SafetensorsError, "header says 200 bytes, file has 65"),
    # the text
    "not UTF-8": (frame(b'{"\xff": 1}'), SafetensorsError, "not UTF-8 at byte 10"),
    "not JSON": (frame(b"{'a': 1}"), SafetensorsError, "at byte 9"),
    "depth bomb": (frame(b"[" * 200_000), SafetensorsError, "nested deeper"),
    "trailing text": (frame(b"{} x"), SafetensorsError, "not JSON: Extra data at byte 11"),
    # names
    "duplicate tensor": (
        frame(b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), b"1234"),
        DuplicateWeightError,
        "'a' is given twice",
    ),
    "duplicate field": (text(raw_entry()[:-1] + ', "dtype": "F32"}'), DuplicateWeightError, "'dtype' is given twice"),
    "duplicate in metadata": (
        frame(b'{"__metadata__": {"k": "", "k": ""}}'),
        DuplicateWeightError,
        "'k' is given twice",
    ),
    "long name": (frame({"a" * 1025: ENTRY}, b"1234"), LimitError, "limits.MAX_NAME_BYTES = 1024"),
    # metadata
    "metadata null": (frame({"__metadata__": None}), SafetensorsError, "expected an object of strings"),
    "metadata with number": (frame({"__metadata__": {"k": 1}}), SafetensorsError, "expected an object of strings"),
    # fields
    "entry a list": (text('["F32", [1], [0, 4]]'), SafetensorsError, "tensor 'a': expected an object"),
    "missing shape": (text('{"dtype": "F32", "data_offsets": [0, 4]}'), SafetensorsError, "field 'shape' is missing"),
    "unknown field": (one(stride=[1]), SafetensorsError, "tensor 'a': unknown field 'stride'"),
    "misspelt field": (one(dtpye="F32"), SafetensorsError, "unknown field 'dtpye'; did you mean 'dtype'?"),
    "dtype a number": (one(dtype=3), SafetensorsError, "dtype: expected a string, found '3'"),
    "dtype unknown": (one(dtype="F33"), UnsupportedError, "dtype 'F33' is not supported; these are: BOOL"),
    "dtype 4 bits": (one(dtype="F4", shape=[8]), UnsupportedError, "dtype 'F4'"),
    "dtype 4 bits, odd": (one(dtype="F4", shape=[7]), SafetensorsError, "takes 28 bits, which are not whole bytes"),
    # numbers
    "size true": (
        one(shape=[True]),
        SafetensorsError,
        "shape: expected whole numbers from 0 to 2**64 - 1, found 'true'",
    ),
    "size negative": (one(shape=[-1]), SafetensorsError, "found '-1'"),
    "size -0": (text(raw_entry(shape="[-0]", data_offsets="[0, 0]"), b""), SafetensorsError, "found '-0.0'"),
    "shape a number": (one(shape=1), SafetensorsError, "shape: expected a list of whole numbers, found '1'"),
    "offset 2^64": (one(data_offsets=[0, 2**64]), SafetensorsError, "found '18446744073709551616'"),
    "one offset": (one(data_offsets=[4]), SafetensorsError, "expected [begin, end], found 1 numbers"),
    "out of bounds": (one(data_offsets=[0, 5]), SafetensorsError, "ends at 5, but the file has 4 bytes of data"),
    "cut short": (one(b"123"), SafetensorsError, "ends at 4, but the file has 3 bytes of data; a download"),
    # sizes against offsets
    "too small": (one(shape=[2]), SafetensorsError, "shape [2] of f32 takes 8 bytes, data_offsets give 4"),
    "wraps to 0": (one(b"", shape=[2**31 - 1] * 3, data_offsets=[0, 0]), LimitError, "elements, the limit is fewer"),
    "dimension 2^31": (one(shape=[2**31]), LimitError, "dimension 2147483648 is over the limit of 2147483647"),
    "elements 2^40": (one(shape=[2**20, 2**20]), LimitError, "1099511627776 elements"),
    "elements beside a zero": (
        one(b"", shape=[0, 2**20, 2**20], data_offsets=[0, 0]),
        LimitError,
        "1099511627776 elements",
    ),
    "rank 9": (one(shape=[1] * 9), LimitError, "rank 9 is over the limit of 8"),
    # tensors against each other
    "overlap": (
        frame({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"123456"),
        SafetensorsError,
        "tensor 'b' overlaps 'a': it begins at 2, expected 4",
    ),
    "empty inside": (
        frame({"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 2, 2)}, b"1234"),
        SafetensorsError,
        "tensor 'b' overlaps 'a'",
    ),
    "hole": (
        frame({"b": entry("U8", [2], 4, 6), "a": entry("U8", [2], 0, 2)}, b"123456"),
        SafetensorsError,
        "tensor 'b' leaves 2 unused bytes after 'a'",
    ),
    "trailing bytes": (one(b"1234" + b"0"), SafetensorsError, "1 bytes after the last tensor ('a') belong to none"),
    "data without tensors": (frame({}, b"1"), SafetensorsError, "1 bytes after the last tensor (the header)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(tmp_path: Path, name: str) -> None:
    raw, error, message = FAULTS[name]
    with pytest.raises(error) as caught:
        open_raw(tmp_path, raw)
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert "model.safetensors'" in str(caught.value) and str(caught.value).isprintable()


STRICTER = {
    "duplicate tensor",
    "duplicate in metadata",
    "metadata null",
    "unknown field",
    "misspelt field",
    "entry a list",
    "long name",
    "rank 9",
    "elements beside a zero",
    "dtype 4 bits",
}


def test_only_these_are_stricter_than_the_reference() -> None:
    accepted = set()
    for name, (raw, _, _) in FAULTS.items():
        try:
            safetensors.deserialize(raw)
            accepted.add(name)
        except safetensors.SafetensorError:
            pass
    assert accepted == STRICTER


LEGAL: dict[str, tuple[bytes, dict[str, tuple[int, ...]]]] = {
    "nothing": (frame({}), {}),
    "rank 0": (one(shape=[]), {"a": ()}),
    "rank 8": (one(shape=[1] * 8), {"a": (1,) * 8}),
    "empty": (one(b"", shape=[0], data_offsets=[0, 0]), {"a": (0,)}),
    "empty with sizes": (one(b"", shape=[2**31 - 1, 0, 5], data_offsets=[0, 0]), {"a": (2**31 - 1, 0, 5)}),
    "padded with spaces": (frame(json.dumps({"a": ENTRY}).encode() + b" " * 100, b"1234"), {"a": (1,)}),
    "padded with newlines": (
        frame(b"\n\t\r " + json.dumps({"a": ENTRY}, indent=4).encode() + b"\n", b"1234"),
        {"a": (1,)},
    ),
    "empty ones share a place": (
        frame(
            {"z": entry("U8", [0], 4, 4), "a": ENTRY, "y": entry("F64", [3, 0], 4, 4), "x": entry("U8", [0], 0, 0)},
            b"1234",
        ),
        {"x": (0,), "a": (1,), "z": (0,), "y": (3, 0)},
    ),
    "unsorted": (
        frame({"b": entry("U8", [2], 4, 6), "c": entry("U8", [1], 6, 7), "a": entry("U8", [4], 0, 4)}, b"1234567"),
        {"a": (4,), "b": (2,), "c": (1,)},
    ),
    "fields in any order": (text('{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}'), {"a": (1,)}),
    "escaped fields": (text(r'{"d\u0074ype": "\u004632", "shape": [1], "data_offsets": [0, 4]}'), {"a": (1,)}),
    "unicode names": (
        frame({"é": entry("U8", [1], 0, 1), "重み😀": entry("U8", [1], 1, 2)}, b"12"),
        {"é": (1,), "重み😀": (1,)},
    ),
    "escaped names": (frame({'a\n\t"\\/\x00\x7f': ENTRY}, b"1234"), {'a\n\t"\\/\x00\x7f': (1,)}),
    "surrogate pair": (frame(rb'{"\ud83d\ude00": %s}' % json.dumps(ENTRY).encode(), b"1234"), {"😀": (1,)}),
    "empty name": (frame({"": ENTRY}, b"1234"), {"": (1,)}),
    "name of 1,024 bytes": (frame({"é" * 512: ENTRY}, b"1234"), {"é" * 512: (1,)}),
    "metadata": (frame({"__metadata__": {"format": "pt", "": '{"a": [1]}'}, "a": ENTRY}, b"1234"), {"a": (1,)}),
    "metadata last": (frame({"a": ENTRY, "__metadata__": {}}, b"1234"), {"a": (1,)}),
    "braces in metadata": (frame({"__metadata__": {"}": "}}{{["}, "a": ENTRY}, b"1234"), {"a": (1,)}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_oddity(tmp_path: Path, name: str) -> None:
    raw, shapes = LEGAL[name]
    reference = {key: bytes(tensor["data"]) for key, tensor in safetensors.deserialize(raw)}
    with open_raw(tmp_path, raw) as file:
        assert {key: info.shape for key, info in file.tensors.items()} == shapes
        assert name != "unsorted" or list(file.tensors) == list(shapes), "in the order of the data"
        assert {key: file.read(key).tobytes() for key in file.tensors} == reference
        assert all(file.read(key).shape == shape for key, shape in shapes.items())
        assert file.metadata.get("format") == ("pt" if name == "metadata" else None)


# -- what writers write ------------------------------------------------------------------------
