"""Damaged safetensors files: never taken where the reference refuses, and equal to it where both take them.

`RLX_FUZZ_SEED` repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors

from rlx_jax.errors import DuplicateWeightError, LimitError, RlxError, UnsupportedError
from rlx_jax.weights.safetensors import SafetensorsFile
from rlx_jax.weights.safetensors_header import DTYPES

SEED = int(os.environ.get("RLX_FUZZ_SEED", "20260101"))
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

NUMBERS = [
    *(
        str(n)
        for n in (0, 1, 2, 3, 7, 8, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
    ),
    *(
        "-1",
        "-0",
        "-8",
        "1.0",
        "1e0",
        "1e999",
        "01",
        "true",
        "null",
        '"1"',
        "NaN",
        "[1]",
        "{}",
        "",
        "9" * 40,
        "9" * 5000,
    ),
]
VALUES: list[list[str] | str] = ['"F32"', ["1"], "{}", *NUMBERS]
FIELDS = ["dtype", "shape", "data_offsets", "dtpye", "", r"d\u0074ype", "stride"]
DTYPE_TEXTS = [
    *(f'"{tag}"' for tag in DTYPES),
    '"F4"',
    '"F6_E2M3"',
    '"C64"',
    '"F8_E8M0"',
    '"f32"',
    '""',
    "null",
    "3",
    r'"F\u00332"',
]
NAMES = [
    '"a"',
    '"b"',
    r'"\u0061"',
    '"__metadata__"',
    '""',
    '"é"',
    r'"\ud83d\ude00"',
    r'"\ud800"',
    '"' + "n" * 1025 + '"',
    "a",
]
BLANKS = [" ", "\n", "\t ", "\r\n", "\x0b", "\u00a0", "\ufeff", "\0"]
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b" ",
    b"0",
    b"-",
    b"\xff",
    b"\xc0\xaf",
    b"\0",
    b"NaN",
    b"[" * 2000,
]


@dataclass
class Entry:
    """One tensor of a header, each part as JSON text."""

    name: str
    fields: list[tuple[str, list[str] | str]]

    def numbers(self) -> list[list[str]]:
        return [value for _, value in self.fields if isinstance(value, list)]

    def text(self) -> str:
        parts = [f'"{n}":' + (f"[{','.join(v)}]" if isinstance(v, list) else v) for n, v in self.fields]
        return self.name + ":{" + ",".join(parts) + "}"


@dataclass
class Draft:
    """A file before it is written, so that damage can aim."""

    entries: list[Entry]
    data: bytes
    extra: list[str] = field(default_factory=list)
    blanks: tuple[str, str] = ("", "")

    def raw(self) -> bytes:
        header = "{" + ",".join([*self.extra, *(entry.text() for entry in self.entries)]) + "}"
        encoded = (self.blanks[0] + header + self.blanks[1]).encode()
        return struct.pack("<Q", len(encoded)) + encoded + self.data


def valid(rng: random.Random) -> Draft:
    entries, data = [], b""
    for i in range(rng.randint(1, 4)):
        tag = rng.choice(list(DTYPES))
        shape = [rng.choice([0, 1, 2, 3]) for _ in range(rng.randint(0, 3))]
        nbytes = int(np.prod(shape, dtype=int)) * DTYPES[tag].itemsize
        offsets = [str(len(data)), str(len(data) + nbytes)]
        data += bytes(rng.randrange(2) for _ in range(nbytes)) if tag == "BOOL" else rng.randbytes(nbytes)
        fields: list[tuple[str, list[str] | str]] = [
            ("dtype", f'"{tag}"'),
            ("shape", [str(dim) for dim in shape]),
            ("data_offsets", offsets),
        ]
        entries.append(Entry(f'"{"abcd"[i]}"', fields))
    return Draft(entries, data)


def damage(draft: Draft, rng: random.Random) -> None:
    """One change to the structure; some of them leave the file valid."""
    entry = rng.choice(draft.entries)
    numbers = rng.choice(entry.numbers() or [[]])
    match rng.randrange(15):
        case 0 if numbers:
            numbers[rng.randrange(len(numbers))] = rng.choice(NUMBERS)
        case 1 if numbers:
            at = rng.randrange(len(numbers))
            if numbers[at].isdigit() and len(numbers[at]) < 50:
                numbers[at] = str(int(numbers[at]) + rng.choice([-8, -4, -2, -1, 1, 2, 4, 8, 2**32, 2**64]))
        case 2:
            numbers.insert(rng.randint(0, len(numbers)), rng.choice(["1", "1", "0", *NUMBERS]))
        case 3 if numbers:
            numbers.pop(rng.randrange(len(numbers)))
        case 4:
            rng.shuffle(numbers)
        case 5:
            entry.fields[0] = ("dtype", rng.choice(DTYPE_TEXTS))
        case 6:
            entry.fields.append((rng.choice(FIELDS), rng.choice(VALUES)))
        case 7:
            entry.fields.pop(rng.randrange(len(entry.fields)))
            entry.fields = entry.fields or [("dtype", '"F32"')]
        case 8:
            rng.shuffle(entry.fields)
        case 9:
            entry.name = rng.choice(NAMES)
        case 10:
            copy = Entry(
                rng.choice([entry.name, '"copy"']), [(n, [*v] if isinstance(v, list) else v) for n, v in entry.fields]
            )
            draft.entries.insert(rng.randint(0, len(draft.entries)), copy)
        case 11:
            rng.shuffle(draft.entries)
        case 12:
            value = rng.choice(["{}", '{"k":"v"}', '{"k":1}', "null", "[]", '{"k":"v","k":"v"}', r'{"k":"\udc00"}'])
            draft.extra.append('"__metadata__":' + value)
        case 13:
            draft.blanks = (rng.choice(BLANKS), rng.choice(BLANKS) * rng.randint(0, 9))
        case _:
            draft.data = rng.choice([draft.data[:-1], draft.data + b"\0", draft.data + draft.data, b""])


def scramble(raw: bytes, other: bytes, rng: random.Random) -> bytes:
    """One change to the bytes."""
    at, size = rng.randrange(len(raw)), rng.randint(0, 3)
    match rng.randrange(6):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        case 2:
            return raw[:at] + rng.choice(TOKENS) + raw[at + size :]
        case 3:
            return raw[:at] + other[rng.randrange(len(other)) :]
        case 4:
            length = int.from_bytes(raw[:8].ljust(8, b"\0"), "little")
            new = rng.choice([length - 1, length + 1, 0, 1, len(raw), 100_000_001, 2**63, 2**64 - 8, 2**64 - 1])
            return struct.pack("<Q", new % 2**64) + raw[8:]
        case _:
            return raw[:at] + raw[at + size + 1 :]


def mutant(rng: random.Random) -> bytes:
    draft = valid(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        damage(draft, rng)
    raw = draft.raw()
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        raw = scramble(raw, valid(rng).raw(), rng) or b"\0"
    return raw


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
STRICTER_TEXTS = ("unknown field", "BOOL holds", "'{', found 'n'", "limits.MAX_ENTRY_CHARS", "not a flat object")


def judge(count: int, seed: int, path: Path) -> Counter[str]:
    """Compare `count` mutants; the number of each outcome."""
    rng, outcomes = random.Random(seed), Counter[str]()
    for case in range(count):
        raw = mutant(rng)
        path.write_bytes(raw)
        theirs, mine = reference(raw), ours(path)
        label = (seed, case, raw)
        if isinstance(mine, RlxError):
            message = str(mine)
            assert message.isprintable() and len(message) <= 2048 and "mutant.safetensors'" in message, label
            if theirs is not None:
                known = isinstance(mine, STRICTER_TYPES) or any(text in message for text in STRICTER_TEXTS)
                assert known or repeats_a_name(raw), (label, message)
            outcomes["both refuse" if theirs is None else f"only we refuse: {type(mine).__name__}"] += 1
        else:
            assert theirs is not None, ("taken, and the reference refuses", label)
            assert mine == theirs, label
            outcomes["both accept"] += 1
    print(f"safetensors mutants: {count}, seed {seed}: {dict(sorted(outcomes.items()))}")
    return outcomes


def test_mutants(tmp_path: Path) -> None:
    outcomes = judge(4000, SEED, tmp_path / "mutant.safetensors")
    assert outcomes["both accept"] > 600 and outcomes["both refuse"] > 1000


@pytest.mark.slow
def test_many_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        outcomes = judge(100_000, random.SystemRandom().randrange(2**32), tmp_path / "mutant.safetensors")
    assert outcomes["both accept"] > 15_000


def test_the_judge_sees_a_wrong_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded faults: the oracle above is worth something."""
    read = SafetensorsFile.read

    def swapped(self: SafetensorsFile, name: str) -> np.ndarray:
        return read(self, name)[::-1] if self.tensors[name].shape else read(self, name)

    monkeypatch.setattr(SafetensorsFile, "read", swapped)
    with pytest.raises(AssertionError):
        judge(300, SEED, tmp_path / "mutant.safetensors")
