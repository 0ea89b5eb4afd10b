"""`Orbax` and `OrbaxSource`: Orbax checkpoints, read with tensorstore, one array at a time, into host memory.

Orbax itself restores onto the devices that the checkpoint was saved from, and trusts the shapes and chunks in the
files, where a wrong one can abort the process. This module checks the shape and chunks of every array before
tensorstore allocates anything of that size, and uses no devices.
"""

from __future__ import annotations

import math
import os
import re
import warnings
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
from rlx_jax.weights.tensor_file import check_shape
from rlx_jax.weights.views import HostArray, NamedTensors, index_box

_Error = errors.CheckpointFormatError
_CHUNK = 2**24  # bytes of a written chunk; small, as reading a part of an array decodes every chunk it overlaps


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
        _check_files(tree.directory, links)
        if not tree.ocdbt:  # without OCDBT, the names of arrays are paths of directories
            for name in tree.arrays.values():
                check_name(name)
        self._label = f"{self._where()}, a checkpoint"
        self._stores = self._open_arrays()
        self._tensors = {key: self._describe(key, store) for key, store in self._stores.items()}

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
        values = np.asarray(self._read(key, spec, box)[rest], order="C")
        check_finite(values, key, self._where(), self._on_nonfinite)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        tree = replace(self._tree, directory=os.path.abspath(self._tree.directory))
        return partial(OrbaxSource, on_nonfinite=self._on_nonfinite, links=self._links), (tree,)

    def _where(self) -> str:
        return quote(self._tree.directory)

    # -- tensorstore ---------------------------------------------------------------------------

    def _open_arrays(self) -> dict[str, Any]:
        """Return the tensorstore of every array, of which only the metadata is read."""
        root = os.path.join(os.path.realpath(self._tree.directory), "")
        files, ocdbt, zarr3 = {"driver": "file", "path": root}, self._tree.ocdbt, self._tree.zarr3
        with _convert_errors(self._where()):
            import tensorstore

            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2**24}})
            store = {"driver": "ocdbt", "base": files} if ocdbt else files
            kvstore = tensorstore.KvStore.open(store, context=context).result()

        def read(name: str) -> Any:
            return kvstore.read(f"{name}/zarr.json" if zarr3 else f"{name}/.zarray")

        def start(name: str) -> Any:
            store = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
            return tensorstore.open({
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": store if ocdbt else {**files, "path": f"{root}{name}/"},
                "fill_missing_data_reads": not self._tree.stores_all_chunks,
            }, open=True, read=True, context=context)  # fmt: skip

        # Before native code parses it, which deep nesting would end with a segmentation fault.
        for key, reply in {key: read(name) for key, name in self._tree.arrays.items()}.items():
            where = self._where_array(key)
            with _convert_errors(where):
                raw = bytes(reply.result().value)  # empty if it is missing, which `start` reports
            limits.check_limit(len(raw), limits.bound("MAX_ARRAY_METADATA_BYTES"), f"{where}: bytes of metadata")
            parse_object(raw or b"{}", where, _Error)
        # All reads start before the first is awaited, so that they overlap.
        futures = {key: start(name) for key, name in self._tree.arrays.items()}
        stores = {}
        for key, future in futures.items():
            with _convert_errors(self._where_array(key)):
                stores[key] = future.result()
        with _convert_errors(self._where()):
            names = [os.fsdecode(name) for name in kvstore.list().result()]
        self._check_chunks(names, stores)
        return stores

    def _check_chunks(self, names: Sequence[str], stores: Mapping[str, Any]) -> None:
        """Check that every chunk in the list of stored `names` is a part of the shape of its array.

        Raises:
            CheckpointFormatError: one is not, as in an array that the metadata makes smaller than it was.
        """
        arrays = {name: key for key, name in self._tree.arrays.items()}
        outer, inner = ("/c/", "/") if self._tree.zarr3 else ("/", ".")
        for name in names:
            array, _, chunk = name.rpartition(outer)
            if array not in arrays or not re.fullmatch(rf"\d+(\{inner}\d+)*", chunk, re.ASCII):
                continue
            key = arrays[array]
            shape, sizes = stores[key].shape, stores[key].chunk_layout.write_chunk.shape or ()
            if any(int(i) * size >= dim for i, size, dim in zip(chunk.split(inner), sizes, shape, strict=False)):
                raise _Error(
                    f"{self._where_array(key)}: chunk {quote(chunk)} is outside of shape {list(shape)}; the checkpoint "
                    "is damaged"
                )

    def _where_array(self, key: str) -> str:
        """Return the name of an array in messages."""
        return f"{self._where()}: array {quote(key)}"

    def _describe(self, key: str, store: Any) -> TensorType:
        """Return the type of an array, after checking its shape, its chunks and its dtype.

        Raises:
            CheckpointFormatError, LimitError: they do not fit each other, or are over a limit.
        """
        where, shape, chunks = self._where_array(key), tuple(store.shape), _chunk_shape(store)
        check_shape(shape, where)
        if not all(1 <= chunk <= max(dim, 1) for dim, chunk in zip(shape, chunks, strict=True)):
            raise _Error(f"{where}: chunks {list(chunks)} do not fit shape {list(shape)}")
        count = math.prod(-(-dim // chunk) for dim, chunk in zip(shape, chunks, strict=True))
        limits.check_limit(count, limits.bound("MAX_CHUNKS"), f"{where}: the number of chunks")
        try:
            return TensorType(shape, as_dtype(store.dtype.numpy_dtype))
        except errors.DTypeError as cause:
            raise _Error(f"{where}: dtype {quote(store.dtype.name)} is not supported for weights") from cause

    def _read(self, key: str, spec: jax.ShapeDtypeStruct, box: Box) -> HostArray:
        """Return a box of an array. Every chunk that it overlaps is read and fully decoded."""
        array, where = self._stores[key], self._where_array(key)
        cells = zip(box, _chunk_shape(array), strict=True)
        decoded = math.prod((-(-stop // chunk) - start // chunk) * chunk for (start, stop), chunk in cells)
        limits.check_memory(decoded * spec.dtype.itemsize, where)  # native code would abort
        with _convert_errors(where):
            values: HostArray = (array[box_index(box)] if box else array).read().result()
        return values


def _chunk_shape(store: Any) -> tuple[int, ...]:
    """Return the shape of an array's chunks."""
    return tuple(store.chunk_layout.read_chunk.shape or ())


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
        reason = ": ".join(str(cause).partition(" [")[0].split(": ")[-2:])  # without paths and places in the source
        raise _Error(f"{where}: cannot be decoded; the checkpoint is damaged: {quote(reason)}") from cause


def _check_files(directory: str, links: Links) -> None:
    """Check that every file below `directory` is regular and inside it, and under `links="refuse"` no link."""
    for folder, subdirectories, files in os.walk(directory):
        for path in (os.path.join(folder, name) for name in (*subdirectories, *files)):
            plain = os.path.isdir(path) or os.path.isfile(path) and links != "refuse"  # reading a FIFO never ends
            if os.path.islink(path) or not plain:
                resolve(directory, os.path.relpath(path, directory), links)


# -- writing -----------------------------------------------------------------------------------


def _to_orbax_array(values: Any) -> Any:
    """Return an array in a form that Orbax accepts: a `jax.Array` on its devices, or a contiguous host array."""
    # `ascontiguousarray` makes a scalar an array of rank 1, hence the reshape.
    return values if isinstance(values, jax.Array) else np.ascontiguousarray(values).reshape(values.shape)
