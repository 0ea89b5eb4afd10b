"""`Safetensors`, the weight format of Hugging Face: one file, an index with shards, or a directory with either."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import IntegrityError, UnsupportedError, listing, quote
from rlx_jax.io.atomic import write_synced
from rlx_jax.io.files import list_directory, resolve
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.directory import INDEX_SUFFIX, open_directory, open_index
from rlx_jax.weights.format import Entry, FiniteCheck, OnNonfinite, OpenOptions, check_finite, stored_spec
from rlx_jax.weights.manifest import MANIFEST_NAME, open_verified
from rlx_jax.weights.tensor_file import DTYPES, FilesSource, SafetensorsFile, TensorFile
from rlx_jax.weights.views import Destination, HostArray, NamedTensors

# Maximum bytes of tensors in one `.safetensors` file, unless a single tensor has more, as in Hugging Face checkpoints.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Safetensors:
    """The safetensors format; see `rlx_jax.weights.format.Format`."""

    name: str = "safetensors"

    def detect(self, weights: Any) -> bool:
        """Whether `weights` is a directory with safetensors files, or the path of a file or an index."""
        if not isinstance(weights, str) or not os.path.lexists(weights):
            return False
        names = list_directory(weights) if os.path.isdir(weights) else [weights]
        return any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names)

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        """Open a file, an index or a directory; only a directory can have a manifest to verify with."""
        if os.path.isdir(weights):
            return open_verified(weights, options.verify, options.links, lambda: _open_source(weights, options))
        if options.verify == "full":
            raise IntegrityError(
                f"{quote(weights)}: a single file has no {MANIFEST_NAME}; open the directory that holds it"
            )
        return _open_source(weights, options)

    def write(self, directory: str, entries: Sequence[Entry]) -> None:
        """Write `model.safetensors`, or several shards and their index.

        Raises:
            UnsupportedError: safetensors has no such dtype.
        """
        unknown = [e.key for e in entries if e.type.dtype not in _DTYPE_NAMES]
        if unknown:
            raise UnsupportedError(f"safetensors has no dtype for {listing(unknown)}; use format='orbax'")
        os.mkdir(directory)
        shards = _split_shards(entries)
        names = [
            "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            for i in range(len(shards))
        ]
        for name, shard in zip(names, shards, strict=True):
            write_file(os.path.join(directory, name), shard)
        if len(shards) > 1:
            where = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
            total = sum(entry.type.nbytes for entry in entries)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_synced(os.path.join(directory, "model" + INDEX_SUFFIX), json.dumps(index, indent=1).encode())


class SafetensorsSource(NamedTensors[TensorFile], FilesSource):
    """Weights from one `.safetensors` file or from the shards of one checkpoint.

    A context manager; the files are closed at the latest when the source is garbage-collected. Several threads may
    read. `open_index` has checked that no two files hold a tensor of the same name.
    """

    def __init__(
        self, files: Sequence[TensorFile], *, on_nonfinite: OnNonfinite = "error", directory: str = ""
    ) -> None:
        self.files = tuple(files)
        self.directory = directory  # the directory that was opened; "" if the path was a file
        self._on_nonfinite = on_nonfinite
        self._tensors = {key: file for file in self.files for key in file.tensors}
        self._label = f"{listing((file.name for file in self.files), 2)}, a checkpoint"

    def where(self, key: str) -> str:
        """Return the file that holds `key`: its name in the directory, or the path that was opened.

        Raises:
            MissingWeightError: no such tensor.
        """
        return self._find(key).name

    def spec(self, key: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a tensor, from the header.

        Raises:
            MissingWeightError: no such tensor.
        """
        info = self._find(key).tensors[key]
        return stored_spec(info.shape, info.dtype)

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        """Return a tensor, or the part that `index` selects as in NumPy; see `rlx_jax.weights.views.ReadingSource`.

        Raises:
            NonFiniteWeightError: NaN in the values, unless `on_nonfinite` allows them.
            Others: as `TensorFile.read`.
        """
        file, check = self._find(key), FiniteCheck()
        values = file.read(key, index, out, None if self._on_nonfinite == "ignore" else check)
        if not check.all_finite:
            check_finite(values, key, quote(file.name), self._on_nonfinite)
        return values


def _open_source(path: str, options: OpenOptions) -> SafetensorsSource:
    """Return the source of the files at `path`."""
    strict, links, is_directory = options.strict, options.links, os.path.isdir(path)
    directory, name = os.path.split(path)
    if is_directory:
        files = open_directory(path, strict=strict, links=links)
    elif name.endswith(INDEX_SUFFIX):
        files = open_index(directory or ".", name, strict=strict, links=links)
    else:
        if links == "refuse":
            resolve(directory or ".", name, links)
        files = [SafetensorsFile(path)]
    return SafetensorsSource(files, on_nonfinite=options.on_nonfinite, directory=path if is_directory else "")


# -- writing -----------------------------------------------------------------------------------

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _split_shards(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Split entries, in order, into shards of at most `SHARD_BYTES` (more only for a single large tensor)."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.type.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.type.nbytes
    return shards


def write_file(path: str, entries: Sequence[Entry]) -> None:
    """Write one file; see `write_tensors`."""
    with open(path, "xb") as file:
        write_tensors(file.write, entries)


def write_tensors(write: Callable[[Any], object], entries: Sequence[Entry]) -> None:
    """Write the content of a file, part by part. Wide dtypes come first, so that every tensor is aligned; one tensor is
    on the host at a time."""
    ordered = sorted(entries, key=lambda entry: -entry.type.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by the readers of Hugging Face
    offset = 0
    for entry in ordered:
        offsets = [offset, offset + entry.type.nbytes]
        header[entry.key] = {
            "dtype": _DTYPE_NAMES[entry.type.dtype], "shape": list(entry.type.shape), "data_offsets": offsets,
        }  # fmt: skip
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    write(len(text).to_bytes(8, "little") + text)
    for entry in ordered:
        values = np.ascontiguousarray(entry.values())  # the bytes of a transposed array are in another order
        write(values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data)
