"""Every source gives the box of a tensor, and reads no more of it than its format asks for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rlx_jax as rlx
from rlx_jax.errors import IntegrityError, NonFiniteWeightError
from rlx_jax.ir.param import Key, Program, Transposed
from rlx_jax.ir.types import tensor_type
from rlx_jax.weights import orbax as orbax_format
from rlx_jax.weights.execute import load_leaves
from rlx_jax.weights.views import RenamedSource

RNG = np.random.default_rng(0)
ARRAYS = {name: RNG.normal(size=(64, 96)).astype(np.float32) for name in ("a", "b")}


def spread(spec: P, kind: AxisType = AxisType.Auto) -> NamedSharding:
    """Over eight devices, two by four."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:8])
    return NamedSharding(mesh, spec)


def mapped(path: Path) -> Any:
    return rlx.open_weights({name: jax.device_put(array, spread(P("data"))) for name, array in ARRAYS.items()})


def one_file(path: Path) -> Any:
    safetensors.numpy.save_file(ARRAYS, path / "model.safetensors")
    return rlx.open_weights(path / "model.safetensors")


def sharded_files(path: Path) -> Any:
    for name, array in ARRAYS.items():
        safetensors.numpy.save_file({name: array}, path / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in ARRAYS}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
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


SOURCES: list[Callable[[Path], Any]] = [mapped, one_file, sharded_files, orbax, verified]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("spec", [P(None, "model"), P("model", "data"), P()])
def test_leaves_from_any_source(tmp_path: Path, make: Callable[[Path], Any], spec: P) -> None:
    source = make(tmp_path)
    keys = {name: Key(name, tensor_type((64, 96), "f32", name)) for name in ARRAYS}
    leaves: dict[str, Program] = {"a": keys["a"], "b": Transposed(keys["b"])}
    found = load_leaves(leaves, source, dict.fromkeys(leaves, spread(spec)), lambda *_: None, threading.Event())
    np.testing.assert_array_equal(np.asarray(found["a"]), ARRAYS["a"])
    np.testing.assert_array_equal(np.asarray(found["b"]), ARRAYS["b"].T)


def test_what_is_wrong_with_a_tensor_is_wrong_with_its_box(tmp_path: Path) -> None:
    """A digest is that of all of it; NaN is looked for in what is read."""
    damaged = {**ARRAYS, "a": np.where(np.arange(96) == 95, np.nan, ARRAYS["a"]).astype(np.float32)}
    safetensors.numpy.save_file(damaged, tmp_path / "model.safetensors")
    source = rlx.open_weights(tmp_path / "model.safetensors")
    assert np.isfinite(source.read("a", (slice(0, 64), slice(0, 48)))).all()
    with pytest.raises(NonFiniteWeightError, match="weight 'a' .*: 64 NaN of 3072 values read"):
        source.read("a", (slice(0, 64), slice(48, 96)))

    saved = verified(tmp_path)
    with open(tmp_path / "m" / "model.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    fresh = rlx.open_weights(tmp_path / "m")
    with pytest.raises(IntegrityError, match="differs from its digest"):
        fresh.read("b", (slice(0, 1),))
    assert saved.has("b")


def test_orbax_arrays_are_saved_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most so many bytes: a part of an array does not cost the decoding of all of it."""
    monkeypatch.setattr(orbax_format, "_CHUNK", 2**13)
    rlx.save(model_of(ARRAYS), tmp_path / "m", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        storage = checkpointer.metadata(tmp_path / "m").item_metadata["a"].storage
    assert 2**11 <= np.prod(storage.chunk_shape) * 4 <= 2**13


# -- back again --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
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


# -- several processes -------------------------------------------------------------------------
