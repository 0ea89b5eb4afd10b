"""Saving when the process dies or the disk fails, and loading what has been damaged since.

Every checkpoint here holds one number in all of its weights, so that a mixture of two is seen.
"""

import errno
import itertools
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import MissingFileError, NoSpaceError, RlxError, SaveFailedError, TargetExistsError
from rlx_jax.io import atomic
from rlx_jax.ir.types import TensorType
from rlx_jax.weights import manifest
from rlx_jax.weights.format import Entry
from rlx_jax.weights.save import write_checkpoint

FORMATS = ["orbax", "safetensors"]
KEYS = ("a.weight", "b.weight", "c.bias")


def entries(number: int, size: int = 16) -> list[Entry]:
    t = TensorType((size, 4), np.dtype(np.float32))
    return [Entry(key, t, lambda: np.full(t.shape, number, t.dtype)) for key in KEYS]


def write(path: Path, number: int, format: str = "safetensors", overwrite: bool = True) -> None:
    write_checkpoint(path, entries(number), format, overwrite)


def number_in(path: Path) -> int | None:
    """The number that a checkpoint holds, verified; None if there is none."""
    try:
        source = rlx.open_weights(path, verify="full")
    except MissingFileError:
        return None
    assert sorted(source.keys()) == sorted(KEYS)
    found = {float(x) for key in KEYS for x in np.unique(source.read(key))}
    assert len(found) == 1, found
    return int(found.pop())


OPERATIONS = ("mkdir", "rename", "fsync", "unlink", "rmdir")


@contextmanager
def before_each_operation(see: Callable[[], object]) -> Iterator[None]:
    """`see` is called before everything that changes a directory or puts a file on disk."""
    busy = False

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal busy
            if not busy:
                busy = True
                try:
                    see()
                finally:
                    busy = False
            return function(*args, **options)

        return wrapped

    with mock.patch.multiple(os, **{name: wrap(getattr(os, name)) for name in OPERATIONS}):
        with mock.patch.object(atomic, "_renameat2", wrap(atomic._renameat2)):
            yield


@pytest.mark.parametrize(
    ("format", "old", "exchange"),
    [("safetensors", 1, True), ("safetensors", 1, False), ("safetensors", None, True), ("orbax", 1, True)],
)
def test_killed_before_any_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, old: int | None, exchange: bool
) -> None:
    """The directory as it is before each operation, which is what a process leaves that is killed there."""
    if not exchange:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    live, snapshots = tmp_path / "live", tmp_path / "snapshots"
    live.mkdir()
    if old is not None:
        write(live / "it", old, format)
    taken = iter(range(10**6))
    with before_each_operation(lambda: shutil.copytree(live, snapshots / f"{next(taken):04}")):
        write(live / "it", 2, format)
    assert number_in(live / "it") == 2 and os.listdir(live) == ["it"]
    found = [number_in(path / "it") for path in sorted(snapshots.iterdir())]
    assert len(found) > 8 and set(found) == {old, 2}
    assert sorted(found, key=lambda n: n == 2) == found, "once it is the new one, it stays"
    for path in sorted(snapshots.iterdir())[:: 3 if format == "safetensors" else 20]:
        write(path / "it", 3, "safetensors")
        assert number_in(path / "it") == 3 and os.listdir(path) == ["it"]


@pytest.mark.parametrize("format", FORMATS)
def test_all_is_on_disk_before_the_rename(tmp_path: Path, format: str) -> None:
    """What a power failure may undo: nothing that the rename makes visible, and after the save not the rename."""
    write(tmp_path / "it", 1, format)
    synced: list[str] = []
    real_sync, real_rename = os.fsync, atomic._renameat2

    def fsync(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(source: str, target: str, flags: int) -> bool:
        below = [path for path in Path(source).rglob("*") if path.is_file() or path.is_dir()]
        assert {source, *map(str, below)} <= set(synced) and len(below) > 1
        synced.clear()
        return real_rename(source, target, flags)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(atomic, "_renameat2", rename):
        write(tmp_path / "it", 2, format)
    assert synced[-1] == str(tmp_path)


def test_two_saves_to_one_place(tmp_path: Path) -> None:
    """The second to finish fails if it may not overwrite; else it wins."""
    path, first = tmp_path / "it", entries(1)

    def another_save() -> np.ndarray:
        write(path, 2)
        return np.zeros((16, 4), np.float32)

    slow = [*first, Entry("z", first[0].type, another_save)]
    with pytest.raises(TargetExistsError, match="exists"):
        write_checkpoint(path, slow, "safetensors", False)
    assert number_in(path) == 2
    write_checkpoint(path, slow, "safetensors", True)
    assert set(rlx.open_weights(path, verify="full").keys()) == {*KEYS, "z"}
    assert os.listdir(tmp_path) == ["it"]


FAILURES: list[tuple[BaseException, type[BaseException], str]] = [
    (OSError(errno.EDQUOT, "Disk quota exceeded"), NoSpaceError, "Disk quota exceeded"),
    (OSError(errno.EIO, "Input/output error"), SaveFailedError, "Input/output error"),
    (KeyboardInterrupt(), KeyboardInterrupt, ""),
]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize(("cause", "expected", "message"), FAILURES, ids=lambda value: type(value).__name__)
def test_the_disk_refuses(
    tmp_path: Path, cause: Any, expected: Any, message: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at the n-th sync, for every n, or Ctrl-C there: the old or the new content, and nothing beside it."""
    if not exchange:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    write(tmp_path / "it", 1)
    real, found = os.fsync, []
    for count in itertools.count(1):
        calls = itertools.count(1)

        def fsync(descriptor: int, calls: Any = calls, count: int = count) -> None:
            if next(calls) == count:
                raise cause
            real(descriptor)

        with mock.patch.object(os, "fsync", fsync):
            try:
                write(tmp_path / "it", 2)
                break
            except expected as error:
                found.append(number_in(tmp_path / "it"))
                place = {1: "as it was", 2: "the new content is there"}[found[-1] or 0]
                assert not message or place in str(error) and message in str(error)
        assert os.listdir(tmp_path) == ["it"]
    assert len(found) > 3 and set(found) == {1, 2} and number_in(tmp_path / "it") == 2


def test_space_is_estimated_first(tmp_path: Path) -> None:
    write(tmp_path / "it", 1)
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=800)):
        with pytest.raises(NoSpaceError, match="768.*800"):
            write(tmp_path / "it", 2)
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=900)):
        write(tmp_path / "it", 3)


def test_what_cannot_be_read_back_is_not_kept(tmp_path: Path) -> None:
    """A disk that takes what it is given and keeps something else."""
    write(tmp_path / "it", 1)
    digest, change = manifest.digest, iter([1])  # of what is written, and not of what is read back
    with mock.patch.object(manifest, "digest", lambda values: digest(np.asarray(values) + next(change, 0))):
        with pytest.raises(SaveFailedError, match="removed: .*digest"):
            write(tmp_path / "it", 2)
    assert number_in(tmp_path / "it") == 1 and os.listdir(tmp_path) == ["it"]


def damage(path: Path, rng: random.Random) -> str:
    """One fault in one file of a checkpoint; what it was."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    file, other = rng.choices(files, k=2)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) or 1)
    kind = rng.choice(["flip"] * 6 + ["cut", "delete", "zero", "swap", "append"]) if data else "delete"
    match kind:
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "cut":
            del data[at:]
        case "zero":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case "append":
            data += b"\0"
        case "swap":
            data, mine = bytearray(other.read_bytes()), data
            other.write_bytes(mine)
    file.write_bytes(data)
    if kind == "delete":
        file.unlink()
    return f"{kind} {file.relative_to(path)}"


@pytest.mark.parametrize("faults", [50, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("format", FORMATS)
def test_no_fault_gives_wrong_weights(tmp_path: Path, format: str, faults: int) -> None:
    """Single faults are detected, or change nothing."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, detected, values = random.Random(seed), 0, np.random.default_rng(0)
    weights = {f"layers.{i}.weight": values.normal(size=(40, 40)).astype(np.float32) for i in range(3)}
    written = [Entry(k, TensorType(v.shape, v.dtype), lambda v=v: v) for k, v in weights.items()]  # type: ignore[misc]
    write_checkpoint(tmp_path / "good", written, format, False)
    for number in range(faults):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        fault = f"seed {seed}, number {number}: {damage(tmp_path / 'bad', rng)}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = rlx.open_weights(tmp_path / "bad")
                found = {key: source.read(key) for key in source.keys()}
        except RlxError:
            detected += 1
            continue
        assert sorted(found) == sorted(weights), fault
        for key, value in weights.items():
            assert found[key].tobytes() == value.tobytes(), f"{fault}: wrong {key}"
    assert detected > faults // 5
