"""`Orbax` and `OrbaxSource`: Orbax checkpoints, read with tensorstore, one array at a time, into host memory.

Orbax itself restores onto the devices that the checkpoint was saved from, and trusts the shapes and chunks in the
files, where a wrong one can abort the process. This module checks the zarr metadata of every array before tensorstore
allocates anything of that size, and uses no devices.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import listing, quote
from rlx_jax.io import limits
from rlx_jax.io.files import Links, check_name, is_text, parse_object, resolve
from rlx_jax.ir.boxes import Box, box_index
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.format import Entry, OnNonfinite, OpenOptions, check_finite
from rlx_jax.weights.manifest import MANIFEST_NAME, open_verified
from rlx_jax.weights.orbax_tree import ArrayTree, find_item, is_orbax, key_below, read_tree
from rlx_jax.weights.tensor_file import check_shape, parse_sizes
from rlx_jax.weights.views import HostArray, NamedTensors, index_box

_Error = errors.CheckpointFormatError
_CHUNK = 2**24  # bytes of a written chunk; small, as reading a part of an array decodes every chunk it overlaps
_NUMPY = re.compile(r"[<|>]?[biufc][0-9]{1,2}")


@dataclass(frozen=True)
class Orbax:
    """The Orbax format: a directory that is an item, a checkpoint, or the root of a CheckpointManager."""

    name: str = "orbax"

    def detect(self, weights: Any) -> bool:
        """Whether `weights` is a directory that Orbax wrote."""
        return isinstance(weights, str) and os.path.isdir(weights) and is_orbax(weights)

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        """Open the arrays of a checkpoint, or of `options.subtree`; warn under `verify="auto"` without a manifest."""
        path, subtree = find_item(weights, options.subtree)

        def read() -> OrbaxSource:
            tree = read_tree(path, subtree)
            return OrbaxSource(tree, on_nonfinite=options.on_nonfinite, links=options.links)

        source = open_verified(path, options.verify, options.links, read, lambda name: key_below(name, subtree))
        if options.verify == "auto" and isinstance(source, OrbaxSource):
            message = f"{quote(path)}: an orbax checkpoint without {MANIFEST_NAME}: bits are not verified"
            warnings.warn(f'{message}; verify="metadata" silences this warning', errors.RlxWarning, stacklevel=3)
        return source

    def write(self, directory: str, entries: Sequence[Entry]) -> None:
        """Write a flat tree of arrays by key, as `orbax.checkpoint.StandardCheckpointer` does.

        Raises:
            UnsupportedError: an empty array, no array at all, or a path that is not UTF-8.
        """
        import orbax.checkpoint as ocp

        if not is_text(directory):
            raise errors.UnsupportedError(
                f"{quote(directory)}: orbax supports only UTF-8 paths; use format='safetensors'"
            )
        empty = [e.key for e in entries if 0 in e.type.shape]
        if empty or not entries:
            raise errors.UnsupportedError(f"orbax stores no empty arrays: {listing(empty)}; use format='safetensors'")
        tree = {entry.key: _to_orbax_array(entry.values()) for entry in entries}
        chunks = dict.fromkeys(tree, ocp.SaveArgs(chunk_byte_size=_CHUNK))
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(directory, args=ocp.args.StandardSave(tree, save_args=chunks))


class OrbaxSource(NamedTensors[TensorType]):
    """Weights of one Orbax checkpoint. Opening reads names, shapes and dtypes only.

    Raises:
        CheckpointFormatError: shapes, dtypes or chunks that contradict each other or the stored files.
        LimitError, PathEscapeError: see `rlx_jax.io.limits` and `files.resolve`.
    """

    def __init__(self, tree: ArrayTree, *, on_nonfinite: OnNonfinite = "error", links: Links = "follow") -> None:
        self._tree, self._on_nonfinite, self._links = tree, on_nonfinite, links
        _check_links(tree.directory, links)
        if not tree.ocdbt:  # without OCDBT, the names of arrays are paths of directories
            for name in tree.arrays.values():
                check_name(name)
        self._label = f"{self._where()}, a checkpoint"
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._driver, self._metadata = ("zarr3", "zarr.json") if tree.zarr3 else ("zarr", ".zarray")
        with _convert_errors(self._where()):
            import tensorstore

            self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2**24}})
        self._tensors = self._describe()

    def where(self, key: str) -> str:
        """Return the directory of the tree, which is the same for every array.

        Raises:
            MissingWeightError: no such array.
        """
        self._find(key)
        return self._tree.directory

    def spec(self, key: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of an array, from the metadata.

        Raises:
            MissingWeightError: no such array.
        """
        return self._find(key).spec

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return an array, or the part that `index` selects as in NumPy, as a new C-contiguous array on the host.

        Raises:
            MissingWeightError: no such array.
            WeightShapeError: `index` does not fit the shape.
            CheckpointFormatError: the data cannot be decoded, or changed since the checkpoint was opened.
            LimitError: it does not fit in memory.
            NonFiniteWeightError: NaN in the values, unless `on_nonfinite` allows them.
        """
        spec = self._find(key).spec
        box, rest = index_box(index, spec.shape, key)
        values = np.asarray(self._read(self._tree.arrays[key], spec, box)[rest], order="C")
        check_finite(values, key, self._where(), self._on_nonfinite)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        tree = replace(self._tree, directory=os.path.abspath(self._tree.directory))
        return partial(OrbaxSource, on_nonfinite=self._on_nonfinite, links=self._links), (tree,)

    def _where(self) -> str:
        return quote(self._tree.directory)

    # -- tensorstore ---------------------------------------------------------------------------

    def _kvstore_spec(self, name: str) -> dict[str, Any]:
        """Return the tensorstore spec of the key-value store below `name`."""
        root = os.path.join(os.path.realpath(self._tree.directory), "")
        if self._tree.ocdbt:
            return {"driver": "ocdbt", "base": {"driver": "file", "path": root}, "path": name}
        return {"driver": "file", "path": root + name}

    def _describe(self) -> dict[str, TensorType]:
        """Return the type of every array, after comparing its metadata with the stored chunks."""
        import tensorstore

        with _convert_errors(self._where()):
            store = tensorstore.KvStore.open(self._kvstore_spec(""), context=self._context).result()
            stored_names = sorted(os.fsdecode(name) for name in store.list().result())
            # All reads start before the first is awaited, so that they overlap.
            futures = {key: store.read(f"{name}/{self._metadata}") for key, name in self._tree.arrays.items()}
            replies = {key: future.result() for key, future in futures.items()}
        types = {}
        for key, name in self._tree.arrays.items():
            where = f"{self._where()}: array {quote(key)}"
            if replies[key].state != "value":
                raise _Error(f"{where}: no metadata: {quote(f'{name}/{self._metadata}')} is missing")
            grid = _parse_zarr(bytes(replies[key].value), self._tree.zarr3, where)
            self._check_chunks(grid, _strip_prefix(stored_names, f"{name}/"), where)
            self._chunks[name] = grid.chunks
            types[key] = grid.type
        return types

    def _read(self, name: str, spec: jax.ShapeDtypeStruct, box: Box) -> HostArray:
        """Return a box of an array. Every chunk that it overlaps is read and fully decoded."""
        import tensorstore

        where = f"{self._where()}: array {quote(name)}"
        cells = zip(box, self._chunks[name], strict=True)
        decoded = math.prod((-(-stop // chunk) - start // chunk) * chunk for (start, stop), chunk in cells)
        limits.check_memory(decoded * spec.dtype.itemsize, where)  # native code would abort
        with _convert_errors(where):
            array = tensorstore.open(
                {"driver": self._driver, "kvstore": self._kvstore_spec(f"{name}/")},
                open=True, read=True, context=self._context,
            ).result()  # fmt: skip
            if tuple(array.shape) != spec.shape or array.dtype.numpy_dtype != spec.dtype:
                raise _Error(f"{where}: was {spec.dtype.name}{list(spec.shape)} when it was opened, is {array.spec()}")
            values: HostArray = (array[box_index(box)] if box else array).read().result()
        return values

    def _check_chunks(self, grid: _Grid, stored: list[str], where: str) -> None:
        """Check that the number of stored chunks agrees with the shape.

        Raises:
            CheckpointFormatError: it does not. LimitError: too many chunks.
        """
        num_stored = sum(grid.names.fullmatch(name) is not None for name in stored)
        count = math.prod(-(-dim // chunk) for dim, chunk in zip(grid.type.shape, grid.chunks, strict=True))
        if num_stored > count or (self._tree.stores_all_chunks and num_stored < count):
            raise _Error(
                f"{where}: shape {list(grid.type.shape)} in chunks {list(grid.chunks)} takes {count} chunks, "
                f"{num_stored} are stored"
            )
        limits.check_limit(count, limits.bound("MAX_CHUNKS"), f"{where}: the number of chunks")


@contextmanager
def _convert_errors(where: str) -> Iterator[None]:
    """Convert exceptions of native code to exceptions of this package."""
    try:
        yield
    except errors.RlxError:
        raise
    except MemoryError as cause:
        raise errors.LimitError(f"{where}: does not fit in memory") from cause
    except Exception as cause:
        raise _Error(f"{where}: cannot be decoded; the checkpoint is damaged: {quote(cause)}") from cause


def _strip_prefix(names: list[str], prefix: str) -> list[str]:
    """Return the names that have the prefix, with it removed. `names` is sorted."""
    start = bisect_left(names, prefix)
    stop = bisect_left(names, prefix + "\U0010ffff")
    return [name[len(prefix) :] for name in names[start:stop]]


def _check_links(directory: str, links: Links) -> None:
    """Check that no file below `directory` leads out of it, and under `links="refuse"` that none is a link."""
    for folder, subdirectories, files in os.walk(directory):
        for name in (*subdirectories, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path) or links == "refuse":
                relative = os.path.relpath(path, directory)
                if not os.path.isdir(path) or os.path.islink(path):
                    resolve(directory, relative, links)


# -- zarr metadata -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """The type of an array, the shape of its chunks, and a pattern that matches the names of its chunks."""

    type: TensorType
    chunks: tuple[int, ...]
    names: re.Pattern[str]


def _parse_zarr(raw: bytes, zarr3: bool, where: str) -> _Grid:
    """Return the shape, dtype and chunks of one array, from the content of its `.zarray` or `zarr.json`.

    Raises:
        CheckpointFormatError, LimitError: the metadata is malformed, contradicts itself, or is over a limit.
    """
    limits.check_limit(len(raw), limits.bound("MAX_ARRAY_METADATA_BYTES"), f"{where}: bytes of metadata")
    content = parse_object(raw, where, _Error)
    version = content.get("zarr_format")
    if version != (3 if zarr3 else 2) or (zarr3 and content.get("node_type") != "array"):
        raise _Error(f"{where}: expected an array in zarr {3 if zarr3 else 2}, found {quote(version)}")
    shape = parse_sizes(content.get("shape"), f"{where}: shape", _Error)
    chunks = parse_sizes(_chunk_shape(content) if zarr3 else content.get("chunks"), f"{where}: chunks", _Error)
    check_shape(shape, where)
    if len(chunks) != len(shape) or not all(
        1 <= chunk <= max(dim, 1) for dim, chunk in zip(shape, chunks, strict=True)
    ):
        raise _Error(f"{where}: chunks {list(chunks)} do not fit shape {list(shape)}")
    dtype = _dtype(content.get("data_type" if zarr3 else "dtype"), where)
    separator = content.get("dimension_separator", ".") if not zarr3 else "/"
    digits = [r"\d+"] * len(shape)
    names = re.escape(str(separator)).join(["c", *digits] if zarr3 else digits or ["0"])
    return _Grid(TensorType(shape, dtype), chunks, re.compile(names))


def _chunk_shape(content: Mapping[str, Any]) -> Any:
    """Return the chunk shape in the metadata of a zarr 3 array, unchecked; None if it is missing."""
    grid = content.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    return configuration.get("chunk_shape") if isinstance(configuration, dict) else None


def _dtype(name: Any, where: str) -> np.dtype[Any]:
    """Return the dtype named in zarr metadata, in native byte order; zarr 2 uses NumPy names such as `<f4`."""
    try:
        if not isinstance(name, str):
            raise TypeError(name)
        return as_dtype(np.dtype(name).newbyteorder("=") if _NUMPY.fullmatch(name) else name)
    except (errors.DTypeError, TypeError) as cause:
        raise _Error(f"{where}: dtype {quote(name)} is not supported for weights") from cause


# -- writing -----------------------------------------------------------------------------------


def _to_orbax_array(values: Any) -> Any:
    """Return an array in a form that Orbax accepts: a `jax.Array` on its devices, or a contiguous host array."""
    # `ascontiguousarray` makes a scalar an array of rank 1, hence the reshape.
    return values if isinstance(values, jax.Array) else np.ascontiguousarray(values).reshape(values.shape)
