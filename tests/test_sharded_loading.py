"""Leaves that lie on several devices: each box is read alone, of any source; the whole is that of one device."""

import itertools
import re
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rlx_jax as rlx
from rlx_jax.errors import LimitError, WeightError, WeightShapeError
from rlx_jax.io import limits
from rlx_jax.ir.boxes import Box, axis_box, box_index, box_shape
from rlx_jax.ir.packed import Packed
from rlx_jax.ir.param import (
    Joined,
    Key,
    Program,
    Stack,
    Strided,
    Transposed,
    cast,
    pad_axis,
    printed_name,
    select_box,
    slice_axis,
)
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.ir.weight_reads import with_source
from rlx_jax.weights import execute
from rlx_jax.weights import orbax as orbax_format
from rlx_jax.weights.execute import fill, host_bytes_to_load, load_leaves
from rlx_jax.weights.inverse import weights_by_key
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.safetensors_format import SafetensorsSource
from rlx_jax.weights.tensor_file import SafetensorsFile
from rlx_jax.weights.views import RenamedSource
from tests.opening import load_leaf
from tests.oracles.packed import meaning, packed
from tests.shards import write_shards

RNG = np.random.default_rng(0)
BF16 = as_dtype("bf16")
VALUES: dict[str, Any] = {
    "q": RNG.normal(size=(16, 8)).astype(np.float32), "k": RNG.normal(size=(8, 8)).astype(np.float32),
    "h": RNG.normal(size=(16, 8)).astype(BF16), "ids": RNG.integers(-99, 99, (4, 6, 8)).astype(np.int32),
    "q8": packed("gguf_q8_0", (4, 128), 1), "q4": packed("gguf_q4_0", (4, 128), 2),
}  # fmt: skip


class Counting(MappingSource):
    """Counts what is read."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.reads: Counter[str] = Counter()
        self.bytes = 0

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        found = super().read(key, index)
        self.reads[key] += 1
        self.bytes += found.nbytes
        return found


def key(name: str, dtype: str | None = None) -> Program:
    """What is stored under a name, in a dtype of the model's."""
    spec = MappingSource(VALUES).spec(name)
    return with_source(Key(name, tensor_type(spec.shape, dtype or spec.dtype, name)), MappingSource(VALUES))


def value(program: Program) -> np.ndarray[Any, Any]:
    out = np.empty(program.type.shape, program.type.dtype)
    fill(out, program, MappingSource(VALUES))
    return out


def spread(spec: PartitionSpec, kind: AxisType = AxisType.Auto) -> NamedSharding:
    """Over eight devices, two by four."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:8])
    return NamedSharding(mesh, spec)


def load(program: Program, source: Any, placement: Any) -> jax.Array:
    given = {"leaf": placement} if isinstance(placement, NamedSharding) else placement
    return load_leaves({"leaf": program}, source, given, lambda *_: None, threading.Event())["leaf"]


Q, K, H, IDS = (key(name) for name in ("q", "k", "h", "ids"))
BY_DEVICE = Joined(tuple(slice_axis(p, 0, i * n, (i + 1) * n) for i in range(4) for p, n in ((Q, 4), (K, 2))), 0)
P = PartitionSpec
# A program, how it is divided, how often each key is read, and the bytes that are read in all: those that are stored.
DIVIDED: list[tuple[Program, PartitionSpec, dict[str, int], int]] = [
    (Q, P(), {"q": 1}, 512),
    (Q, P("model"), {"q": 4}, 512),
    (Q, P("model", "data"), {"q": 8}, 512),
    (Transposed(Q), P("model"), {"q": 4}, 512),
    (cast(Q, BF16), P("model"), {"q": 4}, 512),
    (Transposed(key("h", "f32")), P(None, "model"), {"h": 4}, 256),
    (Joined((Q, K), 0), P("data"), {"q": 2, "k": 1}, 768),  # 24 rows: the half of q is 12 of 16
    (BY_DEVICE, P("model"), {"q": 4, "k": 4}, 768),
    (Transposed(BY_DEVICE), P("data", "model"), {"q": 8, "k": 8}, 768),
    (Stack((K, K)), P(None, "model"), {"k": 8}, 512),
    (Joined((Strided(Q, 1, 1, 2), Strided(Q, 1, 0, 2)), 1), P("model", "data"), {"q": 8}, 1024),  # each with the others
    (Stack((cast(Strided(Q, 0, 1, 2), BF16), cast(Strided(Q, 0, 0, 2), BF16))), P(None, "model"), {"q": 8}, 1024),
    (IDS, P("model", None, "data"), {"ids": 8}, 768),
    (pad_axis(K, 0, 12), P("model"), {"k": 3}, 256),  # the last device holds padding alone
    (Transposed(pad_axis(K, 0, 20)), P(None, "model"), {"k": 2}, 256),
    (key("q8"), P("model"), {"q8": 4}, 4 * 136),
    (key("q4"), P(None, "model"), {"q4": 4}, 4 * 72),
    (Transposed(key("q4", "bf16")), P("model"), {"q4": 4}, 4 * 72),
    (key("q8"), P(None, ("data", "model")), {"q8": 8}, 2 * 4 * 136),  # half blocks: each is read for both devices
    (pad_axis(key("q8"), 1, 256), P("data", "model"), {"q8": 4}, 4 * 136),
]


@pytest.mark.parametrize(("program", "spec", "reads", "nbytes"), DIVIDED, ids=[f"{p}-{s}" for p, s, *_ in DIVIDED])
def test_each_device_reads_its_box(program: Program, spec: PartitionSpec, reads: dict[str, int], nbytes: int) -> None:
    """And replicas share one read; the array is the one that a single device would hold."""
    source = Counting(VALUES)
    found = load(program, source, spread(spec))
    assert found.sharding.is_equivalent_to(spread(spec), found.ndim) and found.committed
    np.testing.assert_array_equal(np.asarray(found), np.asarray(load(program, MappingSource(VALUES), None)))
    assert (found.dtype, dict(source.reads), source.bytes) == (program.type.dtype, reads, nbytes)


@pytest.mark.parametrize("starts", [True, False])
def test_leaves_are_read_ahead_only_while_a_device_starts(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    """Of 20 leaves of 512 bytes, transfers may hold a tenth and one more: 3."""
    source, ready, seen = Counting(VALUES), threading.Event(), []

    def to_device(arrays: list[Any], device: Any) -> list[jax.Array]:
        ready.wait(1)
        seen.append(source.reads["q"])
        ready.set()
        return [jax.device_put(array) for array in arrays]

    monkeypatch.setattr(execute, "_to_device", to_device)
    monkeypatch.setattr(execute, "_is_host", lambda _: False)
    monkeypatch.setattr(execute, "is_starting", lambda: starts and not ready.is_set())
    leaves = {f"leaf{i}": Q for i in range(20)}
    found = load_leaves(leaves, source, None, lambda *_: None, threading.Event())
    assert seen[0] == (20 if starts else 3) and list(found) == list(leaves)
    np.testing.assert_array_equal(np.asarray(found["leaf19"]), VALUES["q"])


def test_cancelled_loading_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten leaves that are to be read ahead, those are read that threads had begun."""
    cancelled, reads, calls = threading.Event(), list[str](), itertools.count(1)

    def load_group(group: dict[str, Any], *_: Any) -> dict[str, Any]:
        reads.extend(group)
        cancelled.wait(5)
        time.sleep(0.2)
        return {}

    def is_starting() -> bool:
        if next(calls) > 10:
            cancelled.set()
        return True

    monkeypatch.setattr(execute, "_load_group", load_group)
    monkeypatch.setattr(execute, "_is_host", lambda _: False)
    monkeypatch.setattr(execute, "_to_device", lambda arrays, device: [])
    monkeypatch.setattr(execute, "is_starting", is_starting)
    load_leaves({f"leaf{i}": Q for i in range(20)}, MappingSource(VALUES), None, lambda *_: None, cancelled)
    assert len(reads) <= execute.READERS


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A few steps over one of the keys."""
    name = draw(st.sampled_from(list(VALUES)))
    program = key(name, draw(st.sampled_from(["f32", "bf16"])) if name != "ids" else None)
    for _ in range(draw(st.integers(0, 4))):
        program = draw(st.sampled_from(STEPS))(program, draw)
    return program


def part(program: Program, draw: st.DrawFn) -> Program:
    axis = draw(st.integers(0, program.type.rank - 1))
    start, stop = draw(edges(program.type.shape[axis]))
    try:
        return slice_axis(program, axis, start, stop)
    except WeightShapeError as refused:  # it cuts what stays together
        assert "cuts" in str(refused)
        return program


def edges(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(lambda e: (min(e), max(e)))


def joined(program: Program, draw: st.DrawFn) -> Program:
    return Joined((program, program), draw(st.integers(0, program.type.rank - 1)))


def padded_somewhere(program: Program, draw: st.DrawFn) -> Program:
    axis = draw(st.integers(0, program.type.rank - 1))
    return pad_axis(program, axis, program.type.shape[axis] + draw(st.integers(1, 5)))


STEPS: list[Any] = [
    lambda p, draw: Transposed(p) if p.type.rank == 2 else p,
    lambda p, draw: cast(p, np.dtype(np.float16)) if p.type.dtype.kind != "i" else cast(p, np.dtype(np.int16)),
    lambda p, draw: Stack((p, p)),
    *(joined, padded_somewhere, part),
]


# A box of packed weights may have small values only.
@pytest.mark.filterwarnings("ignore:.*all values are below .*, where f16 has fewer digits")
@given(programs(), st.data())
@settings(max_examples=25)
def test_a_box_of_any_program(program: Program, data: st.DataObject) -> None:
    """Has its shape and the numbers of the whole; it needs no more memory than the whole, and is a box of one again."""
    box: Box = tuple(data.draw(edges(size)) for size in program.type.shape)
    found = select_box(program, box)
    assert (found.type.shape, found.type.dtype) == (box_shape(box), program.type.dtype)
    np.testing.assert_array_equal(value(found), value(program)[box_index(box)])
    inner: Box = tuple(data.draw(edges(size)) for size in box_shape(box))
    np.testing.assert_array_equal(value(select_box(found, inner)), value(program)[box_index(box)][box_index(inner)])


@given(st.data(), st.sampled_from([("q", "h"), ("k",), ("q8", "q4")]), st.integers(0, 1))
def test_merges_in_any_order_read_backwards(data: st.DataObject, names: tuple[str, ...], axis: int) -> None:
    """Are whole tensors again, however they were cut, turned, cast and padded."""
    unit = 32 if axis and "q8" in names else 1
    parts: list[Program] = []
    for name in names:
        program = Transposed(key(name, "f32"))
        ends = [unit * n for n in range(1, program.type.shape[1 - axis] // unit)]
        cuts = sorted({0, program.type.shape[1 - axis], *data.draw(st.lists(st.sampled_from(ends), max_size=5))})
        parts += [slice_axis(program, 1 - axis, start, stop) for start, stop in itertools.pairwise(cuts)]
    merged = Joined(tuple(data.draw(st.permutations(parts))), 1 - axis)
    assert sorted(re.findall("q8|q4|q|k|h", printed_name(merged))) == sorted(names), (
        "and the name is that of a plain merge"
    )
    leaf: Program = pad_axis(Transposed(merged), 1, merged.type.shape[0] + 3)
    held: Any = value(leaf)  # of NumPy, which compiles nothing
    for stored, found in weights_by_key({leaf: held}).items():
        whole = VALUES[stored]
        np.testing.assert_array_equal(found, meaning(whole) if isinstance(whole, Packed) else whole)


def test_the_host_holds_a_box(tmp_path: Path) -> None:
    """And what it is made of, not the leaf: what `host_bytes_to_load` says, and a mebibyte to read columns through."""
    names, t = ("q", "k"), tensor_type((2048, 1024), "f32", "w")
    safetensors.numpy.save_file({n: np.ones(t.shape, np.float32) for n in names}, tmp_path / "m.safetensors")
    q, k = (Key(name, t) for name in names)
    by_device = Joined(tuple(slice_axis(p, 0, i, i + 256) for i in range(0, 2048, 256) for p in (q, k)), 0)
    programs: list[Program] = [q, Transposed(q), cast(q, BF16), by_device, Joined((q, k), 1)]
    with SafetensorsFile(tmp_path / "m.safetensors") as file:
        source = SafetensorsSource([file])
        for program in programs:
            for axis in (0, program.type.rank - 1):
                shape = program.type.shape
                part = select_box(program, axis_box(shape, axis, shape[axis] // 8, shape[axis] // 4))
                tracemalloc.start()
                load_leaf(part, source)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < host_bytes_to_load(part) + 1.25 * 2**20 < program.type.nbytes, str(part)


def test_a_sharding_that_does_not_divide() -> None:
    with pytest.raises(WeightShapeError, match=r"'leaf'.*f32\[16,8\]"):
        load(Q, MappingSource(VALUES), NamedSharding(jax.make_mesh((3,), ("x",), devices=jax.devices()[:3]), P("x")))


def test_room_is_asked_for_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has to hold a box, not a leaf; and on CPU what all devices hold, a replica for each."""
    monkeypatch.setattr(limits, "_MIN_CHECKED_BYTES", 0)
    leaf = Stack((Q,) * 64)
    box = host_bytes_to_load(select_box(leaf, ((0, 64), (0, 4), (0, 8))))
    assert box == 64 * 128 + 128
    for spec, held in ((P(None, "model"), 2 * leaf.type.nbytes), (P(), 8 * leaf.type.nbytes)):
        on_host = leaf.type.nbytes // 10 + (box if held < 3 * leaf.type.nbytes else host_bytes_to_load(leaf))
        for free, fits in ((held + on_host, True), (held + on_host - 1, False)):
            monkeypatch.setattr(limits, "available_bytes", lambda free=free: -(-free * 100 // 80))
            if fits:
                load(leaf, MappingSource(VALUES), spread(spec))
            else:
                with pytest.raises(LimitError, match=f"the weights takes {held + on_host:,} bytes"):
                    load(leaf, MappingSource(VALUES), spread(spec))


def test_a_box_is_checked_as_the_whole(recwarn: pytest.WarningsRecorder) -> None:
    """Integers against the range of a narrower dtype, also behind other steps."""
    large = MappingSource({"ids": np.full((4, 2), 300, np.int32)})
    program = cast(Transposed(Key("ids", tensor_type((4, 2), "i32", "ids"))), np.dtype(np.int8))
    with pytest.raises(WeightError, match="'ids'.*300.*i8"):
        load(program, large, spread(P(None, "model")))


def test_arrays_are_copies() -> None:
    """What a source gives is the caller's memory, and may change; replicas are arrays of their own."""
    memory = np.zeros(2**16 + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][: 2**16]  # as JAX shares it
    given = aligned.view(np.float32).reshape(16, 1024)
    found = load(Key("w", tensor_type(given.shape, "f32", "w")), MappingSource({"w": given}), spread(P("model")))
    given[:] = 1
    assert not np.asarray(found).any()
    pointers = {shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards}
    assert len(pointers) == 8


ARRAYS = {name: RNG.normal(size=(64, 96)).astype(np.float32) for name in ("a", "b")}


def mapped(path: Path) -> Any:
    return rlx.open_weights({name: jax.device_put(array, spread(P("data"))) for name, array in ARRAYS.items()})


def sharded_files(path: Path) -> Any:
    write_shards(path, {f"{name}.safetensors": {name: array} for name, array in ARRAYS.items()})
    return RenamedSource(rlx.open_weights(path), {name: name for name in ARRAYS})


def orbax(path: Path) -> Any:
    """In the chunks of a mesh that it was saved from."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "m", {n: jax.device_put(a, spread(P(None, "data"))) for n, a in ARRAYS.items()})
    return rlx.open_weights(path / "m", verify="metadata")


def verified(path: Path) -> Any:
    rlx.save(model_of(ARRAYS), path / "m", "safetensors")
    return rlx.open_weights(path / "m", verify="full")


def model_of(arrays: Mapping[str, Any]) -> rlx.CompiledModel:
    """y = x aᵀ b."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 96)).linear("a").linear("b", transpose=False)
    return rlx.compile(flow, arrays)


SOURCES: list[Callable[[Path], Any]] = [mapped, sharded_files, orbax, verified]


@pytest.mark.parametrize("make", SOURCES)
def test_leaves_from_any_source(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    source = make(tmp_path)
    keys = {name: Key(name, tensor_type((64, 96), "f32", name)) for name in ARRAYS}
    leaves: dict[str, Program] = {"a": keys["a"], "b": Transposed(keys["b"])}
    for spec in (P(None, "model"), P("model", "data")):
        found = load_leaves(leaves, source, dict.fromkeys(leaves, spread(spec)), lambda *_: None, threading.Event())
        np.testing.assert_array_equal(np.asarray(found["a"]), ARRAYS["a"])
        np.testing.assert_array_equal(np.asarray(found["b"]), ARRAYS["b"].T)


def test_orbax_arrays_are_saved_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most so many bytes: a part of an array does not cost the decoding of all of it."""
    monkeypatch.setattr(orbax_format, "_CHUNK", 2**13)
    rlx.save(model_of(ARRAYS), tmp_path / "m", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        storage = checkpointer.metadata(tmp_path / "m").item_metadata["a"].storage
    assert 2**11 <= np.prod(storage.chunk_shape) * 4 <= 2**13


@pytest.mark.parametrize(("kind", "format"), [(AxisType.Auto, "orbax"), (AxisType.Explicit, "safetensors")])
def test_sharded_parameters_are_saved(tmp_path: Path, format: str, kind: AxisType) -> None:
    """And given by key, wherever they lie."""
    model = model_of(ARRAYS)
    assert model.params is not None
    specs = {"a": P("model"), "b": P("data", "model")}
    params = {name: jax.device_put(2 * leaf, spread(specs[name], kind)) for name, leaf in model.params.items()}
    moved = model.replace(params)
    for name, array in moved.weights().items():
        np.testing.assert_array_equal(np.asarray(array), 2 * ARRAYS[name])
    rlx.save(moved, tmp_path / "m", format)
    source = rlx.open_weights(tmp_path / "m", verify="full")
    for name in ARRAYS:
        np.testing.assert_array_equal(source.read(name), 2 * ARRAYS[name])


@pytest.mark.parametrize(("limit", "free"), [(1000, 700), (450, 150), (200, 0), ("max", None)])
def test_the_memory_of_a_container_is_asked_for(
    limit: object, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 400 bytes in use, 100 are of files: the kernel frees these when memory is asked for."""
    monkeypatch.setattr(limits, "CONTAINER_MEMORY", ())
    of_host = limits.available_bytes()
    monkeypatch.setattr(limits, "CONTAINER_MEMORY", (("no", "such", "folder"), (tmp_path, "limit", "used")))
    for name, text in {
        "limit": limit,
        "used": 400,
        "memory.stat": "anon 300\nactive_file 60\ninactive_file 40",
    }.items():
        (tmp_path / name).write_text(f"{text}\n")
    got = limits.available_bytes()
    assert got == free if free is not None else got is not None and of_host is not None and got > of_host // 2
