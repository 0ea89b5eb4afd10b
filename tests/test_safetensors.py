"""The safetensors reader: legal oddities, slices, files that change meanwhile, limits; damaged files are never taken
where the reference refuses, and equal to it where both take them. `RLX_FUZZ_SEED` repeats a run."""

import json
import math
import os
import random
import struct
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_jax.errors import (
    DuplicateWeightError,
    LimitError,
    MissingFileError,
    RlxError,
    SafetensorsError,
    StorageError,
    UnsupportedError,
    WeightShapeError,
)
from rlx_jax.io import limits
from rlx_jax.weights import tensor_file
from rlx_jax.weights.tensor_file import DTYPES, SafetensorsFile, TensorFile
from tests.oracles import fuzzing
from tests.oracles.fuzzing import bounded_memory, case, corpus, mutated, run, scrambled, seed_of
from tests.shards import ENTRY, frame, one, open_raw


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


SLICES = st.builds(
    slice, st.none() | st.integers(-7, 7), st.none() | st.integers(-7, 7), st.none() | st.integers(-3, 3).filter(bool)
)


@pytest.mark.parametrize(("run", "band"), [(2**12, 2**20), (1, 1), (1000, 40), (12, 60)])
@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=4), st.lists(SLICES, max_size=4), st.sampled_from(["F32", "BF16", "U8"]))
def test_slices_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, run: int, band: int, shape: list[int], slices: list[slice], tag: str
) -> None:
    """However much is read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_MIN_RUN_BYTES", run)
        patch.setattr(tensor_file, "_BAND_BYTES", band)
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


def test_truncated_after_opening(tmp_path: Path) -> None:
    array = np.arange(100, dtype=np.float32)
    file = open_raw(tmp_path, safetensors.numpy.save({"a": array}))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 100)
    with pytest.raises(SafetensorsError, match="'a'.*372.*400 bytes"):
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


INTO: dict[str, tuple[Any, tuple[slice, ...] | None, bool]] = {
    "all": (np.empty((4, 6), np.float32), None, True),
    "rows": (np.empty((2, 6), np.float32), (slice(1, 3),), True),
    "columns": (np.empty((4, 2), np.float32), (slice(None), slice(3, 5)), True),
    "another shape": (np.empty((6, 4), np.float32), None, False),
    "another dtype": (np.empty((4, 6), np.int32), None, False),
    "columns of the array": (np.empty((4, 12), np.float32)[:, ::2], None, False),
    "steps": (np.empty((2, 6), np.float32), (slice(0, 4, 2),), False),
}


@pytest.mark.parametrize("name", INTO)
def test_read_into_an_array(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The array is used if it fits; every value that is read is inspected once."""
    out, index, fits = INTO[name]
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    file = open_raw(tmp_path, one(values.tobytes(), shape=[4, 6], data_offsets=[0, 96]))
    monkeypatch.setattr(tensor_file, "_BAND_BYTES", 20)
    inspected: list[Any] = []
    read = file.read("a", index, out, lambda part: inspected.extend(part.tolist()))
    assert (read is out) == fits and not np.may_share_memory(read, values)
    np.testing.assert_array_equal(read, values[index or ()])
    assert set(read.ravel().tolist()) <= set(inspected) and len(set(inspected)) == len(inspected)


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
    with pytest.raises(LimitError, match="100000001.*limits.MAX_HEADER_BYTES"):
        SafetensorsFile(path)


def test_other_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = frame({"a": ENTRY, "b": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}, b"1234")
    monkeypatch.setattr(limits, "MAX_TENSORS", 2)
    assert len(open_raw(tmp_path, raw).tensors) == 2
    monkeypatch.setattr(limits, "MAX_TENSORS", 1)
    with pytest.raises(LimitError, match="limits.MAX_TENSORS"):
        open_raw(tmp_path, raw)
    monkeypatch.setattr("rlx_jax.weights.tensor_file.VALUES_PER_TENSOR", 1000)
    with pytest.raises(LimitError, match="is 2, .*limits.MAX_TENSORS = 1"):
        open_raw(tmp_path, raw)


TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

VALUES: list[Any] = [0, 1, 2, 3, 7, 8, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, 2**64, 10**39, -1, -8]
VALUES += [
    1.0, -0.0, True, None, [], [1], {}, "", "a", "dtype", "é" * 600, "\udcff", *DTYPES, "F4", "F6_E2M3", "C64", "f32",
]  # fmt: skip
PIECES = [*(bytes([b]) for b in b'{}[],:"\\ 0-\xff\0\x0b\n'), b"\xc0\xaf", b"NaN", b"[" * 2000, b"01", b"1e0", b'"a":']
PIECES += [
    b'"__metadata__":{"k":"v"},', b'"__metadata__":null,', rb"\u0061", rb"\ud800", "\ufeff".encode(), b"9" * 5000,
]  # fmt: skip


def mutant(rng: random.Random) -> bytes:
    """A valid file with changes to its header, to the length of it, to its data, or to its bytes."""
    header, data = dict[str, Any](), b""
    for i, array in enumerate(twin(rng).values()):
        offsets = [len(data), len(data) + array.nbytes]
        header["abcdefgh"[i]] = {"dtype": TAGS[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    raw = frame(
        mutated(header, rng, VALUES, times=(0, 1, 1, 1, 2)), rng.choice([data] * 12 + [data[:-1], data + b"\0"])
    )
    if rng.random() < 0.1:
        length = rng.choice([len(raw) - 9, len(raw) - 8, 0, 1, 100_000_001, 2**63, 2**64 - 8, 2**64 - 1])
        raw = struct.pack("<Q", length % 2**64) + raw[8:]
    return scrambled(raw, rng, PIECES, longest=3) or b"\0" if rng.random() < 0.4 else raw


Values = dict[str, tuple[str, tuple[int, ...], bytes]]


def reference(raw: bytes) -> Values | None:
    """What the reference implementation reads, None if it refuses."""
    try:
        return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(raw)}
    except safetensors.SafetensorError:
        return None


def repeats_a_name(raw: bytes) -> bool:
    """Whether a file that the reference takes names something twice; it then reads the last only."""
    found = []

    def count(pairs: list[tuple[str, object]]) -> None:
        found.append(len({name for name, _ in pairs}) < len(pairs))

    json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")], object_pairs_hook=count)
    return any(found)


def ours(path: Path) -> Values | RlxError:
    try:
        with SafetensorsFile(path) as file:
            arrays = {name: file.read(name) for name in file.tensors}
    except RlxError as error:
        return error
    return {name: (TAGS[a.dtype], a.shape, a.tobytes()) for name, a in arrays.items()}


# Beyond the reference we refuse what the format does not define, what would be ambiguous, and the absurd.
STRICTER_TYPES = (DuplicateWeightError, LimitError, UnsupportedError)
STRICTER_TEXTS = ("unknown field", "BOOL holds", "expected an object", "nested deeper")


def judge_one(raw: bytes, path: Path) -> str:
    """Compare one mutant with the reference; the outcome in words."""
    path.write_bytes(raw)
    theirs, mine = reference(raw), ours(path)
    if isinstance(mine, RlxError):
        message = str(mine)
        assert message.isprintable() and len(message) <= 2048 and path.name in message
        if theirs is None:
            return "both refuse"
        known = isinstance(mine, STRICTER_TYPES) or any(text in message for text in STRICTER_TEXTS)
        assert known or repeats_a_name(raw), message
        return f"only we refuse: {type(mine).__name__}"
    assert theirs is not None, "taken, and the reference refuses"
    assert mine == theirs
    return "both accept"


def judge(count: int, seed: int, path: Path) -> Counter[str]:
    """Compare `count` mutants; the number of each outcome."""
    return run("safetensors", count, seed, mutant, lambda raw: judge_one(raw, path))


@pytest.mark.parametrize("count", [700, pytest.param(20_000, marks=pytest.mark.soak)])
def test_mutants(tmp_path: Path, count: int) -> None:
    outcomes = judge(count, seed_of("fixed" if count == 700 else "new"), tmp_path / "mutant.safetensors")
    assert outcomes["both accept"] > 0.15 * count and outcomes["both refuse"] > 0.25 * count


@pytest.mark.parametrize("saved", corpus("safetensors"), ids=lambda p: p.stem)
def test_the_corpus(saved: Path, tmp_path: Path) -> None:
    """Mutants that failed once, and the smallest of each kind of refusal."""
    judge_one(saved.read_bytes(), tmp_path / "mutant.safetensors")


def test_the_judge_sees_a_wrong_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded faults: the oracle above is worth something, and what it finds is saved."""
    read = TensorFile.read

    def swapped(self: TensorFile, name: str) -> np.ndarray:
        return read(self, name)[::-1] if self.tensors[name].shape else read(self, name)

    monkeypatch.setattr(TensorFile, "read", swapped)
    monkeypatch.setattr(fuzzing, "CORPUS", tmp_path)
    with pytest.raises(AssertionError):
        judge(300, seed_of("fixed"), tmp_path / "mutant.safetensors")
    assert len(fuzzing.corpus("safetensors")) == 1


LETTERS = 'ab.é重😀\x00"\\ \u202e'


def twin(rng: random.Random) -> dict[str, np.ndarray]:
    """Tensors of every dtype, rank 0 to 8, empty ones among them, under odd names."""
    tensors = {}
    for i in range(rng.choice([0, 1, 2, 3, 8])):
        dtype = DTYPES[rng.choice(list(DTYPES))]
        shape = [rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.choice([0, 1, 2, 3, 8]))]
        count = int(np.prod(shape, dtype=int))
        raw = (
            bytes(rng.randrange(2) for _ in range(count))
            if dtype.kind == "b"
            else rng.randbytes(count * dtype.itemsize)
        )
        name = "".join(rng.choices(LETTERS, k=rng.randint(0, 12))) + str(i) * rng.randint(1, 3)
        tensors[name] = np.frombuffer(raw, dtype).reshape(shape)
    return tensors


def odd_file(tensors: dict[str, np.ndarray], rng: random.Random) -> bytes:
    """A legal file that no writer would write: blanks anywhere, any order, needless escapes."""
    data, members = b"", []

    def blank() -> str:
        return "".join(rng.choices(" \t\n\r", k=rng.choice([0, 0, 0, 1, 3])))

    def string(value: str) -> str:
        if rng.random() < 0.5:
            return json.dumps(value, ensure_ascii=rng.random() < 0.5)
        units = np.frombuffer(value.encode("utf-16-le"), "<u2")
        return '"' + "".join(f"\\u{unit:04x}" for unit in units) + '"'

    def join(items: list[str], opening: str, closing: str) -> str:
        return opening + ",".join(f"{blank()}{item}{blank()}" for item in items) + closing

    for name, array in tensors.items():
        fields = {
            "dtype": string(TAGS[array.dtype]),
            "shape": join([str(dim) for dim in array.shape], "[", "]"),
            "data_offsets": join([str(len(data)), str(len(data) + array.nbytes)], "[", "]"),
        }
        data += array.tobytes()
        pairs = [f"{string(field)}{blank()}:{blank()}{value}" for field, value in fields.items()]
        members.append(f"{string(name)}{blank()}:{blank()}{join(rng.sample(pairs, 3), '{', '}')}")
    members.append(f"{string('__metadata__')}:{join([string('k') + ':' + string('v,}')], '{', '}')}")
    rng.shuffle(members)
    return frame(f"{blank()}{join(members, '{', '}')}{blank()}".encode(), data)


def assert_same(file: TensorFile, tensors: dict[str, np.ndarray]) -> None:
    assert set(file.tensors) == set(tensors)
    for name, array in tensors.items():
        got = file.read(name)
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert got.flags.c_contiguous and got.flags.writeable and got.dtype.isnative


def load_twins(count: int, seed: int, path: Path) -> None:
    """`count` valid files, as odd as the format allows, hold what was written."""
    rng = random.Random(seed)
    print(f"safetensors twins: {count}, RLX_FUZZ_SEED={seed}")
    with bounded_memory():
        for _ in range(count):
            tensors = twin(rng)
            odd = rng.random() < 0.8
            raw = odd_file(tensors, rng) if odd else safetensors.numpy.save(tensors)
            with case("safetensors_twins", raw):
                path.write_bytes(raw)
                assert reference(raw) is not None, "the twin is not valid"
                with SafetensorsFile(path) as file:
                    assert_same(file, tensors)


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.soak)])
def test_twins(tmp_path: Path, count: int) -> None:
    load_twins(count, seed_of("fixed" if count == 60 else "new"), tmp_path / "twin.safetensors")
