"""Writing a checkpoint directory: orbax or safetensors, atomic, with a manifest, read back before it counts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np

from rlx_jax.errors import (
    RequestError,
    RlxError,
    SaveFailedError,
    TargetExistsError,
    UnsupportedError,
    WeightError,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.ir.param import WeightSource
from rlx_jax.ir.types import TensorType
from rlx_jax.weights import manifest
from rlx_jax.weights.atomic import replacing, write_synced
from rlx_jax.weights.directory import INDEX_SUFFIX, open_directory
from rlx_jax.weights.manifest import Manifest, VerifiedSource, WeightEntry, digest, manifest_of, read_manifest
from rlx_jax.weights.orbax import OrbaxSource
from rlx_jax.weights.orbax_tree import read_tree
from rlx_jax.weights.safetensors_header import DTYPES
from rlx_jax.weights.source import SafetensorsSource

Format = Literal["orbax", "safetensors"]
SHARD_BYTES = 5_000_000_000
"""A `.safetensors` file gets no second tensor beyond this size, as in Hugging Face checkpoints."""


@dataclass(frozen=True)
class Entry:
    """One weight to write: its key, type, and a function that gives the array, on the host or on devices."""

    key: str
    type: TensorType
    values: Callable[[], Any]


def write_checkpoint(path: str | os.PathLike[str], entries: Sequence[Entry], format: str, overwrite: bool) -> None:
    """Write `entries` to the directory `path`, whole or not at all. Arguments and errors as `rlx_jax.save`."""
    if format not in get_args(Format):
        choices = get_args(Format)
        raise UnsupportedError(
            f"format {quote(format)}: expected {' or '.join(choices)}{did_you_mean(format, choices)}"
        )
    if not isinstance(path, str | bytes | os.PathLike) or "\0" in os.fsdecode(path):
        raise RequestError(f"save: path is {shown(path)}; expected the path of a directory")
    target = os.path.realpath(os.fsdecode(path))
    kept = _files_to_keep(target)
    write = _write_orbax if format == "orbax" else _write_safetensors
    with replacing(target, overwrite, sum(e.type.nbytes for e in entries)) as new:
        weights = write(new, entries)
        found = manifest_of(new, weights, _files_below(new))
        _read_back(new, format, found)
        write_synced(os.path.join(new, manifest.NAME), found.to_json())
        for name in kept:
            os.makedirs(os.path.dirname(os.path.join(new, name)), exist_ok=True)
            shutil.copy2(os.path.join(target, name), os.path.join(new, name), follow_symlinks=False)


def _files_to_keep(target: str) -> list[str]:
    """What others put into a directory that we wrote: config.json, a tokenizer. They stay when it is replaced.

    Raises:
        TargetExistsError: the directory is not ours to replace.
    """
    if not os.path.lexists(target) or (os.path.isdir(target) and not os.listdir(target)):
        return []
    old = read_manifest(target) if os.path.isdir(target) else None
    if old is None:
        found = f"has no {manifest.NAME}" if os.path.isdir(target) else "is a file"
        raise TargetExistsError(
            f"{quote(target)} {found}, so rlx_jax.save did not write it; remove it, or save elsewhere"
        )
    ours = {*old.files, manifest.NAME}
    return [name for name in _files_below(target) if name not in ours]


def _files_below(directory: str) -> list[str]:
    """Files and links below a directory, relative to it."""
    found = []
    for folder, inside, names in os.walk(directory):
        links = [name for name in inside if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), directory) for name in (*names, *links)]
    return sorted(found)


def _read_back(directory: str, format: str, expected: Manifest) -> None:
    """Decode what was written, and compare it with what was to be written.

    Raises:
        SaveFailedError: they differ, or it cannot be read.
    """
    source: WeightSource
    try:
        if format == "orbax":
            source = OrbaxSource(read_tree(directory), on_nonfinite="ignore")
        else:
            files = open_directory(directory, strict=True, links="follow")
            source = SafetensorsSource(files, on_nonfinite="ignore")
        with VerifiedSource(source, expected, directory) as verified:
            for key in verified.keys():
                verified.read(key)
    except RlxError as cause:
        raise SaveFailedError(f"what was written cannot be read back, so it was not kept: {cause}") from cause


def _entry(entry: Entry, values: Any) -> WeightEntry:
    if values.dtype != entry.type.dtype or tuple(values.shape) != entry.type.shape:
        raise WeightError(f"weight {quote(entry.key)}: expected {entry.type}, got {values.dtype} {list(values.shape)}")
    return WeightEntry(entry.type, digest(values))


# -- orbax -------------------------------------------------------------------------------------


def _write_orbax(directory: str, entries: Sequence[Entry]) -> dict[str, WeightEntry]:
    """A flat tree of arrays by key, as `orbax.checkpoint.StandardCheckpointer` writes it."""
    import orbax.checkpoint as ocp

    empty = [e.key for e in entries if 0 in e.type.shape]
    if empty or not entries:
        raise UnsupportedError(f"orbax stores no empty arrays: {listing(empty)}; use format='safetensors'")
    tree = {entry.key: _stored(entry.values()) for entry in entries}
    weights = {entry.key: _entry(entry, tree[entry.key]) for entry in entries}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(directory, args=ocp.args.StandardSave(tree))
    return weights


def _stored(values: Any) -> Any:
    """An array as orbax takes it: a jax.Array as it lies on its devices, or a plain host array."""
    return values if isinstance(values, jax.Array) else np.ascontiguousarray(values).reshape(values.shape)


# -- safetensors -------------------------------------------------------------------------------

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _write_safetensors(directory: str, entries: Sequence[Entry]) -> dict[str, WeightEntry]:
    """`model.safetensors`, or shards and their index."""
    unknown = [e.key for e in entries if e.type.dtype not in _NAMES]
    if unknown:
        raise UnsupportedError(f"safetensors has no dtype for {listing(unknown)}; use format='orbax'")
    os.mkdir(directory)
    shards = _shards(entries)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for i in range(len(shards))
    ]
    weights: dict[str, WeightEntry] = {}
    for name, shard in zip(names, shards, strict=True):
        weights |= _write_shard(os.path.join(directory, name), shard)
    if len(shards) > 1:
        where = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.type.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_synced(os.path.join(directory, "model" + INDEX_SUFFIX), json.dumps(index, indent=1).encode())
    return weights


def _shards(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries in order, cut where a file would exceed `SHARD_BYTES`."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.type.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.type.nbytes
    return shards


def _write_shard(path: str, entries: Sequence[Entry]) -> dict[str, WeightEntry]:
    """One file. Wide dtypes come first, so that every tensor is aligned; one tensor is on the host at a time."""
    ordered = sorted(entries, key=lambda entry: -entry.type.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what Hugging Face's readers ask for
    at = 0
    for entry in ordered:
        offsets = [at, at + entry.type.nbytes]
        header[entry.key] = {
            "dtype": _NAMES[entry.type.dtype], "shape": list(entry.type.shape), "data_offsets": offsets,
        }  # fmt: skip
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    weights = {}
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            values = np.ascontiguousarray(entry.values())  # the bytes of a transposed array are in another order
            weights[entry.key] = _entry(entry, values.reshape(entry.type.shape))
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data)
    return weights
