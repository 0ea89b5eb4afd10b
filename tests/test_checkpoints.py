"""Checkpoints of training: across divisions over devices, in the background, damaged, kept and refused."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.io import atomic
from rlx_jax.io.files import files_below
from rlx_jax.train import Checkpoints, step_files
from rlx_jax.weights import manifest
from rlx_jax.weights.manifest import MANIFEST_NAME
from tests.test_save_faults import before_each_operation


class Moments(NamedTuple):
    count: Any
    mu: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Run:
    step: Any
    params: dict[str, Any]
    optimizer: tuple[Any, ...]


def over(count: int, *spec: str | tuple[str, ...] | None) -> NamedSharding:
    """A sharding over the first devices, in two rows where there are more than one."""
    shape = (2, count // 2) if count > 1 else (1, 1)
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return NamedSharding(jax.sharding.Mesh(devices, ("data", "model")), PartitionSpec(*spec))


def run_on(count: int, seed: int = 0) -> Run:
    """A state of every kind of leaf, divided over `count` devices along two axes."""
    rng = np.random.default_rng(seed)
    w = jax.device_put(rng.normal(size=(16, 8)).astype("f4"), over(count, "data", "model"))
    half = jax.device_put(rng.normal(size=(8, 16)).astype(jnp.bfloat16), over(count, None, ("model", "data")))
    ids = jax.device_put(rng.integers(-9, 9, (4, 24)).astype("i4"), over(count, "model"))
    count_ = jax.device_put(jnp.int32(seed + 7), over(count))
    moments = Moments(count_, {"a.weight": w + 1, "b/weight": half})
    return Run(seed + 3, {"a.weight": w, "b": [half, ids]}, (moments, None, np.arange(5.0) + seed, np.float32(seed)))


def bits(tree: Any) -> list[tuple[str, bytes]]:
    return [(str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def specs_of(tree: Any) -> Any:
    """The same without values."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, tree
    )


def ones(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), step, jnp.float32), "b": jnp.full(3, step, jnp.int32)}


def test_any_division_over_devices(tmp_path: Path) -> None:
    """8 → 4 → 1 → 8 devices: equal to the last bit, and each time where `like` is."""
    with Checkpoints(tmp_path / "run", keep=None) as checkpoints:
        state, expected = run_on(8, 1), bits(run_on(8, 1))
        for step, (count, spec) in enumerate([(4, True), (1, False), (8, True)]):
            checkpoints.save(step, state)
            like = specs_of(run_on(count)) if spec else run_on(count)
            state = checkpoints.restore(like)
            assert bits(state) == expected and str(jax.tree.structure(state)) == str(jax.tree.structure(like))
            for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
                assert type(found) is type(wanted) or isinstance(wanted, jax.ShapeDtypeStruct)
                assert not isinstance(found, jax.Array) or found.sharding == wanted.sharding
        assert state.step == 4 and state.optimizer[3].dtype == np.float32


def test_what_was_put_nowhere_stays_so(tmp_path: Path) -> None:
    """A scalar that jit may move is restored as one; a committed copy on device 0 would not go with sharded ones."""
    state = {"w": jax.device_put(jnp.arange(8.0), over(8, "data")), "scale": jnp.float32(2)}
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(0, state)
        found = checkpoints.restore(state)
    assert not found["scale"].committed and found["w"].committed
    assert bits(jax.jit(lambda s: s["w"] * s["scale"])(found)) == bits(jnp.arange(8.0) * 2)


def test_orbax_and_open_weights_read_a_step(tmp_path: Path) -> None:
    """It is an orbax checkpoint of a flat tree, and its params are weights."""
    import orbax.checkpoint as ocp

    state = run_on(8)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(12, state)
    with ocp.StandardCheckpointer() as checkpointer:
        names = set(checkpointer.metadata(tmp_path / "run" / "12").item_metadata)
    assert {"step", "params.a.weight", "params.b.0", "optimizer.0.mu.b/weight", "optimizer.0.count"} <= names
    source = rlx.open_weights(tmp_path / "run", subtree="params", verify="full")  # the newest step of a run
    assert source.keys() == ("a.weight", "b.0", "b.1") and bits(source.read("a.weight")) == bits(
        state.params["a.weight"]
    )
    file = max((tmp_path / "run" / "12").rglob("d/*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(errors.IntegrityError, match="digest"):
        rlx.open_weights(tmp_path / "run", subtree="params")


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    """The arrays are donated and the host's changed while the writing has not begun."""
    from orbax.checkpoint._src.serialization import serialization

    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    rng = np.random.default_rng(0)
    on_devices = {
        f"{n}": jax.device_put(rng.normal(size=(64, 64)).astype("f4"), over(8, *spec))
        for n, spec in enumerate([("data", "model"), (), ("model",)])
    } | {"one": jnp.asarray(rng.normal(size=(512, 512)).astype("f4"))}
    host = np.arange(6)
    expected = bits((on_devices, host))
    like, gate = specs_of((on_devices, np.zeros(6, int))), threading.Event()
    begun = threading.Event()
    real = serialization.async_serialize_from_host

    async def late(*args: Any, **options: Any) -> Any:
        begun.set()
        assert await asyncio.to_thread(gate.wait, 60)
        return await real(*args, **options)

    with Checkpoints(tmp_path / "run") as checkpoints, mock.patch.object(serialization, real.__name__, late):
        checkpoints.save(0, (on_devices, host))
        assert begun.wait(60) and checkpoints.steps() == ()  # not before it is whole
        host[:] = -1
        for _ in range(3):
            on_devices = step(on_devices)
        jax.block_until_ready(on_devices)
        gate.set()
        checkpoints.wait()
        assert checkpoints.steps() == (0,) and bits(checkpoints.restore(like)) == expected


ASKED: dict[str, Callable[[Checkpoints], Any]] = {
    "wait": lambda c: c.wait(),
    "save": lambda c: c.save(3, ones(3)),
    "restore": lambda c: c.restore(ones(0)),
    "close": lambda c: c.close(),
}


@pytest.mark.parametrize("how", ASKED)
def test_a_failure_in_the_background_is_told_once(tmp_path: Path, how: str) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, ones(1))
    checkpoints.wait()
    with mock.patch.object(step_files, "sync_own_files", side_effect=OSError(28, "No space left on device")):
        checkpoints.save(2, ones(2))
        with pytest.raises(errors.NoSpaceError, match="2' failed.*1: 'No space left"):
            ASKED[how](checkpoints)
    assert os.listdir(tmp_path / "run") == ["1"]
    if how != "close":
        checkpoints.save(2, ones(2))
        checkpoints.close()
        assert os.listdir(tmp_path / "run") in (["1", "2"], ["2", "1"])


@pytest.mark.slow
def test_a_program_that_ends_without_close(tmp_path: Path) -> None:
    """The step is whole, or it is absent and stderr says so: Python starts no threads any more at its end."""
    code = "import sys, jax.numpy as jnp; from rlx_jax.train import Checkpoints; checkpoints = Checkpoints(sys.argv[1])"
    code += "\ncheckpoints.save(1, {'w': jnp.zeros((512, 512))})"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    whole, told = os.listdir(tmp_path / "run") == ["1"], "a save in the background failed" in done.stderr
    assert done.returncode == 0 and whole != told, done.stderr


def edit_manifest(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = place / MANIFEST_NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def largest(place: Path) -> Path:
    return max(place.rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def lie(place: Path, shape: list[int], dtype: str) -> None:
    """The array `w` is of another type, in what orbax says and in a manifest with the digests of that."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{place}/"}).result()
    array = json.loads(store["w/.zarray"])
    store["w/.zarray"] = json.dumps(array | {"shape": shape, "dtype": dtype}).encode()
    files = {name: manifest.file_digest(str(place / name)) for name in files_below(str(place)) if name != MANIFEST_NAME}
    told = {name: {"nbytes": e.nbytes, "sha256": e.sha256} for name, e in files.items()}
    edit_manifest(place, lambda content: content.update(files=told))


def link_out(place: Path) -> None:
    file = largest(place)
    shutil.move(file, place.parent / "elsewhere")
    file.symlink_to(place.parent / "elsewhere")


def empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], type[errors.RlxError], str]] = {
    "a flipped byte": (lambda p: flip(largest(p), 40), errors.IntegrityError, "1 files differ from their digests"),
    "a flipped byte of the manifest": (lambda p: flip(p / MANIFEST_NAME, 2), errors.IntegrityError, MANIFEST_NAME),
    "a file cut short": (lambda p: largest(p).write_bytes(b""), errors.IntegrityError, "0 bytes, expected"),
    "a missing file": (lambda p: (p / "manifest.ocdbt").unlink(), errors.IntegrityError, "manifest.ocdbt: missing"),
    "no manifest": (lambda p: (p / MANIFEST_NAME).unlink(), errors.StorageError, "2'.*; complete steps are '1'"),
    "an empty directory": (empty, errors.StorageError, "complete steps are '1'"),
    "a link out of it": (link_out, errors.PathEscapeError, "outside its directory"),
    "a lying shape": (lambda p: lie(p, [2**20, 4], "<f4"), errors.IntegrityError, "w: .*1048576"),
    "a lying dtype": (lambda p: lie(p, [4, 4], "<i4"), errors.IntegrityError, "w: .*int32"),
    "a manifest of another shape": (lambda p: edit_manifest(p, lambda m: m["weights"]["w"].update(shape=[2, 8])),
        errors.WeightError, r"w: f32\[2,8\] in the step, f32\[4,4\] in `like`"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_step(saved: Path, tmp_path: Path, case: str) -> None:
    """It is named as what it is, and no other step is taken in its place when it was asked for."""
    damage, error, message = DAMAGE[case]
    shutil.copytree(saved, tmp_path / "run")
    damage(tmp_path / "run" / "2")
    with Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(error, match=message):
            checkpoints.restore(ones(0), 2)
        assert bits(checkpoints.restore(ones(0), 1)) == bits(ones(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps."""
    path = tmp_path_factory.mktemp("checkpoints") / "run"
    with Checkpoints(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, ones(step))
    return path


def test_old_steps_go_after_a_new_one_is_whole(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        for step in (1, 5, 3):
            checkpoints.save(step, ones(step))
        checkpoints.wait()
        assert checkpoints.steps() == (3, 5)  # the one just saved, and the highest of the others
        with mock.patch.object(atomic, "_commit", side_effect=OSError(28, "No space left on device")):
            checkpoints.save(6, ones(6))
            with pytest.raises(errors.NoSpaceError, match="the newest complete step is 5"):
                checkpoints.wait()
        assert checkpoints.steps() == (3, 5)
        checkpoints.save(6, ones(6))
        checkpoints.wait()
        assert checkpoints.steps() == (5, 6) and checkpoints.newest() == 6
        assert sorted(os.listdir(tmp_path / "run")) == ["5", "6"]
        assert bits(checkpoints.restore(ones(0))) == bits(ones(6))


def test_a_step_is_not_replaced_by_chance(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, ones(1))
        with pytest.raises(errors.TargetExistsError, match="overwrite=True"):
            checkpoints.save(1, ones(2))
        checkpoints.save(1, ones(2), overwrite=True)
        assert bits(checkpoints.restore(ones(0))) == bits(ones(2))
        (tmp_path / "run" / "7").mkdir()
        with pytest.raises(errors.TargetExistsError, match="7' is no step that was saved here"):
            checkpoints.save(7, ones(7), overwrite=True)


def test_what_dead_saves_left_goes_and_nothing_else(tmp_path: Path) -> None:
    """Of any step, where its process is gone. Other names are not steps."""
    root = tmp_path / "run"
    dead = [".3.rlx-save-1-00000000", ".9.rlx-save-1-00000000"]
    others = [".notes.rlx-save-1-00000000", "007", "-1", "latest", "11"]
    for name in (*dead, *others):
        (root / name / "new").mkdir(parents=True)
    (root / "12").symlink_to(root / "11")
    (root / "11" / MANIFEST_NAME).write_text("{}")
    with atomic._work_directory(str(root / "4")) as alive, Checkpoints(root) as checkpoints:
        assert checkpoints.steps() == (11,) and len(os.listdir(root)) == 9  # a reader removes nothing
        checkpoints.save(13, ones(13))
        checkpoints.wait()
        assert set(os.listdir(root)) == {*others, "12", "13", os.path.basename(alive)}


def test_killed_before_any_operation(tmp_path: Path) -> None:
    """The directory as it is before each operation of a save that keeps one step: what a kill leaves there."""
    live, snapshots, taken = tmp_path / "live", tmp_path / "snapshots", iter(range(10**6))

    def look() -> None:
        with suppress(shutil.Error):  # in the work directory native threads move files meanwhile
            shutil.copytree(live, snapshots / f"{next(taken):04}")

    with Checkpoints(live, keep=1) as checkpoints:
        checkpoints.save(1, ones(1))
        checkpoints.wait()
        with before_each_operation(look):
            checkpoints.save(2, ones(2))
            checkpoints.wait()
    assert os.listdir(live) == ["2"]
    newer = []
    for path in sorted(snapshots.iterdir()):
        with Checkpoints(path, keep=1) as found:
            newest = bits(found.restore(ones(0)))
            assert newest == bits(ones(found.newest() or 0))
            newer.append(newest == bits(ones(2)))
    assert len(newer) > 20 and {*newer} == {True, False} and sorted(newer) == newer
    for path in sorted(snapshots.iterdir())[::10]:
        with Checkpoints(path, keep=1) as found:
            found.save(3, ones(3))
        assert os.listdir(path) == ["3"]


def test_killed_while_it_replaced_a_step(tmp_path: Path) -> None:
    """Where two directories cannot be exchanged, the old one stands aside for a moment: it is found, and put back."""
    root = tmp_path / "run"
    with Checkpoints(root) as checkpoints:
        checkpoints.save(1, ones(1))
        checkpoints.wait()
        (root / ".1.rlx-save-1-00000000").mkdir()
        (root / "1").rename(root / ".1.rlx-save-1-00000000" / "old")
        assert checkpoints.steps() == (1,) and bits(checkpoints.restore(ones(0))) == bits(ones(1))
        checkpoints.save(2, ones(2))
        checkpoints.wait()
        assert sorted(os.listdir(root)) == ["1", "2"]


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(np.int32(0), ones(0))  # type: ignore[arg-type]
