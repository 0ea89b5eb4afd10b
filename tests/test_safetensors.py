"""The safetensors reader: each fault by name, legal oddities, slices, files that change meanwhile, and limits."""

from __future__ import annotations

import math
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_jax.errors import (
    LimitError,
    MissingFileError,
    RlxError,
    SafetensorsError,
    StorageError,
    WeightShapeError,
)
from rlx_jax.io import limits
from rlx_jax.weights import safetensors as safetensors_reader
from rlx_jax.weights.safetensors import SafetensorsFile
from rlx_jax.weights.safetensors_header import DTYPES
from tests.safetensors_bytes import ENTRY, frame, one, open_raw


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LEGAL: dict[str, tuple[bytes, dict[str, tuple[int, ...]]]] = {
    "empty with sizes": (one(b"", shape=[2**31 - 1, 0, 5], data_offsets=[0, 0]), {"a": (2**31 - 1, 0, 5)}),
    "unsorted": (
        frame({"b": entry("U8", [2], 4, 6), "c": entry("U8", [1], 6, 7), "a": entry("U8", [4], 0, 4)}, b"1234567"),
        {"a": (4,), "b": (2,), "c": (1,)},
    ),
    "name of 1,024 bytes": (frame({"é" * 512: ENTRY}, b"1234"), {"é" * 512: (1,)}),
    "metadata": (frame({"__metadata__": {"format": "pt", "": '{"a": [1]}'}, "a": ENTRY}, b"1234"), {"a": (1,)}),
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


# -- reading -------------------------------------------------------------------------------------


SLICES = st.builds(
    slice, st.none() | st.integers(-7, 7), st.none() | st.integers(-7, 7), st.none() | st.integers(-3, 3).filter(bool)
)


@pytest.mark.parametrize(("run", "band"), [(2**12, 2**20), (1, 1), (1000, 40), (12, 60)])
@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=4), st.lists(SLICES, max_size=4), st.sampled_from(["F32", "BF16", "U8"]))
def test_slices_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, run: int, band: int, shape: list[int], slices: list[slice], tag: str
) -> None:
    """However much is read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader, "_RUN", run)
        patch.setattr(safetensors_reader, "_BAND", band)
        _compare_slices(tmp_path_factory, shape, slices, tag, run == 1)


def _compare_slices(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], slices: list[slice], tag: str, exact: bool
) -> None:
    index = tuple(slices[: len(shape)])
    array = np.arange(math.prod(shape)).astype(DTYPES[tag]).reshape(shape)
    with open_raw(
        tmp_path_factory.getbasetemp(), safetensors.numpy.save({"pad": np.ones(3, np.uint8), "a": array})
    ) as file:
        part = file.read("a", index)
        np.testing.assert_array_equal(part, array[index])
        assert part.dtype == array.dtype and part.flags.c_contiguous
        assert file.bytes_read <= array.nbytes
        spans = [range(dim)[s] for s, dim in zip(index, shape, strict=False)]
        spanned = [abs(places[-1] - places[0]) + 1 if places else 0 for places in spans]
        nbytes = math.prod([*spanned, *shape[len(spans) :]]) * array.itemsize
        if exact or not spans[1:]:
            assert file.bytes_read == nbytes
        elif spanned[0] and nbytes:
            assert nbytes <= file.bytes_read <= spanned[0] * array.nbytes // shape[0]


@pytest.mark.parametrize(
    "index", [(slice(None),) * 3, (0,), (..., slice(1)), slice(1), (slice(0.5),), (slice(0, 2, 0),)]
)
def test_index_that_does_not_fit(tmp_path: Path, index: Any) -> None:
    file = open_raw(tmp_path, safetensors.numpy.save({"a": np.ones((2, 2))}))
    with pytest.raises(WeightShapeError, match="'a'"):
        file.read("a", index)


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    before, kept = len(os.listdir("/dev/fd")), []
    for raw in (one(dtype="X"), b"", one(shape=[2])):
        with pytest.raises(RlxError) as caught:
            open_raw(tmp_path, raw)
        kept.append(caught)  # its traceback holds the file object
    open_raw(tmp_path, one())
    assert len(os.listdir("/dev/fd")) == before


# -- files that change or fail -----------------------------------------------------------------


def test_truncated_after_opening(tmp_path: Path) -> None:
    array = np.arange(100, dtype=np.float32)
    file = open_raw(tmp_path, safetensors.numpy.save({"a": array}))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 100)
    with pytest.raises(
        SafetensorsError, match=r"tensor 'a': the file ends at byte 372, expected 400 bytes .*; it has been cut"
    ):
        file.read("a")


def test_rewritten_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file = open_raw(tmp_path, one())
    with path.open("r+b") as other:
        other.seek(-1, os.SEEK_END)
        other.write(b"!")
    os.utime(path, ns=(0, 0))  # clocks of file systems are coarse
    with pytest.raises(SafetensorsError, match="written to since it was opened"):
        file.read("a")


def test_replaced_after_opening(tmp_path: Path) -> None:
    """A rename leaves the file that is open as it was."""
    file = open_raw(tmp_path, one())
    (tmp_path / "new").write_bytes(one(b"4321"))
    os.replace(tmp_path / "new", tmp_path / "model.safetensors")
    assert file.read("a").tobytes() == b"1234"


def test_short_reads_and_errors_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, preadv = open_raw(tmp_path, one(b"12345678", shape=[2], data_offsets=[0, 8])), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:3]], at))
    assert file.read("a").tobytes() == b"12345678"

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="model.safetensors': Input/output error"):
        file.read("a")
    with pytest.raises(StorageError, match="Input/output error"):
        open_raw(tmp_path, one())


def test_not_a_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    monkeypatch.setattr(os, "open", None)  # opening a device can act on it, so nothing is opened
    cases: list[tuple[str | Path, type[RlxError], str]] = [
        (tmp_path / "fifo.safetensors", SafetensorsError, "expected a regular file, found a FIFO"),
        (tmp_path, SafetensorsError, "found a directory"),
        ("/dev/zero", SafetensorsError, "found a device"),
        (tmp_path / "absent.safetensors", MissingFileError, "no such file"),
        ("nul\0", MissingFileError, "no such file"),
    ]
    for path, error, message in cases:
        with pytest.raises(error, match=message):
            SafetensorsFile(path)


# -- limits ------------------------------------------------------------------------------------


def test_lying_lengths_cost_no_memory(tmp_path: Path) -> None:
    lies = [
        struct.pack("<Q", 99_999_999) + b"{}",
        struct.pack("<Q", 2**62) + b"{}",
        one(b"", shape=[2**30], data_offsets=[0, 2**32]),
        one(b"", shape=[2**31 - 1, 500], data_offsets=[0, 4 * 500 * (2**31 - 1)]),
    ]
    for raw in lies:
        (tmp_path / "model.safetensors").write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(SafetensorsError):
            SafetensorsFile(tmp_path / "model.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


def test_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", limits.MAX_HEADER_BYTES + 1))
    os.truncate(path, limits.MAX_HEADER_BYTES + 100)  # sparse
    with pytest.raises(
        LimitError, match="header's length in bytes is 100000001, over the limit limits.MAX_HEADER_BYTES"
    ):
        SafetensorsFile(path)


def test_other_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = frame({"a": ENTRY, "b": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}, b"1234")
    monkeypatch.setattr(limits, "MAX_TENSORS", 2)
    assert len(open_raw(tmp_path, raw).tensors) == 2
    monkeypatch.setattr(limits, "MAX_TENSORS", 1)
    with pytest.raises(LimitError, match="limits.MAX_TENSORS"):
        open_raw(tmp_path, raw)
    monkeypatch.setattr("rlx_jax.weights.safetensors_header.VALUES_PER_TENSOR", 1000)
    with pytest.raises(LimitError, match="the number of tensors is 2, over the limit limits.MAX_TENSORS = 1"):
        open_raw(tmp_path, raw)
