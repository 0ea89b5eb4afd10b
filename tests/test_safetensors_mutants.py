"""Damaged safetensors files: never taken where the reference refuses, and equal to it where both take them.

`RLX_FUZZ_SEED` repeats a run.
"""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from rlx_jax.errors import DuplicateWeightError, LimitError, RlxError, UnsupportedError
from rlx_jax.weights.safetensors import SafetensorsFile
from rlx_jax.weights.safetensors_header import DTYPES
from tests.oracles import fuzzing
from tests.oracles.fuzzing import bounded_memory, case, corpus, mutated, run, scrambled, seed_of
from tests.safetensors_bytes import frame

TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

VALUES: list[Any] = [0, 1, 2, 3, 7, 8, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, 2**64, 10**39, -1, -8]
VALUES += [
    1.0,
    -0.0,
    True,
    None,
    [],
    [1],
    {},
    "",
    "a",
    "dtype",
    "é" * 600,
    "\udcff",
    *DTYPES,
    "F4",
    "F6_E2M3",
    "C64",
    "f32",
]
PIECES = [*(bytes([b]) for b in b'{}[],:"\\ 0-\xff\0\x0b\n'), b"\xc0\xaf", b"NaN", b"[" * 2000, b"01", b"1e0", b'"a":']
PIECES += [
    b'"__metadata__":{"k":"v"},',
    b'"__metadata__":null,',
    rb"\u0061",
    rb"\ud800",
    "\ufeff".encode(),
    b"9" * 5000,
]


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
    read = SafetensorsFile.read

    def swapped(self: SafetensorsFile, name: str) -> np.ndarray:
        return read(self, name)[::-1] if self.tensors[name].shape else read(self, name)

    monkeypatch.setattr(SafetensorsFile, "read", swapped)
    monkeypatch.setattr(fuzzing, "CORPUS", tmp_path)
    with pytest.raises(AssertionError):
        judge(300, seed_of("fixed"), tmp_path / "mutant.safetensors")
    assert len(fuzzing.corpus("safetensors")) == 1


# -- valid twins -------------------------------------------------------------------------------

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


def assert_same(file: SafetensorsFile, tensors: dict[str, np.ndarray]) -> None:
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
                    assert file.metadata == ({"k": "v,}"} if odd else {})


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.soak)])
def test_twins(tmp_path: Path, count: int) -> None:
    load_twins(count, seed_of("fixed" if count == 60 else "new"), tmp_path / "twin.safetensors")
