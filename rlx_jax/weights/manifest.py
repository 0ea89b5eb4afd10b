"""`rlx_manifest.json`: what `rlx_jax.save` wrote, with a SHA-256 of every weight and every file.

It finds accidents: flipped bits, files cut short, files of two saves mixed. It does not stop someone who
changes weights and manifest together.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rlx_jax.errors import (
    DTypeError,
    FormatError,
    IntegrityError,
    NonFiniteWeightError,
    StorageError,
    UnsupportedError,
    listing,
    quote,
)
from rlx_jax.io import limits
from rlx_jax.io.files import Links, check_name, read_whole, resolve, storage_error
from rlx_jax.io.strict_json import parse_object
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.ir.types import TensorType, as_dtype, short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.views import SourceView

# Digests are checked where there is a manifest; there must be one; or shapes and dtypes only.
Verify = Literal["auto", "full", "metadata"]

NAME = "rlx_manifest.json"
VERSION = 1

_BAND = 2**28  # bytes of a weight that are read at once for its digest alone
_ADVICE = 'the checkpoint is damaged: use another copy (verify="metadata" loads it unchecked)'


@dataclass(frozen=True)
class WeightEntry:
    """One weight: its type, and the SHA-256 of its bytes in row-major, little-endian order.

    A step of a training run has none: several processes may have written one array, and its files have theirs.
    """

    type: TensorType
    sha256: str | None


@dataclass(frozen=True)
class FileEntry:
    """One file: its length and SHA-256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The weights by checkpoint key, and the files by path within the directory. `beside` are the others that were
    written with them, such as the config: anyone may edit those."""

    weights: Mapping[str, WeightEntry]
    files: Mapping[str, FileEntry]
    beside: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        weights = {
            key: {
                "dtype": short_name(entry.type.dtype),
                "shape": list(entry.type.shape),
                "nbytes": entry.type.nbytes,
                "sha256": entry.sha256,
            }
            for key, entry in self.weights.items()
        }
        files = {name: {"nbytes": e.nbytes, "sha256": e.sha256} for name, e in self.files.items()}
        content = {"format": "rlx_jax checkpoint", "version": VERSION, "weights": weights, "files": files}
        content |= {"beside": list(self.beside)} if self.beside else {}
        return json.dumps(content, indent=1).encode()


def read_manifest(directory: str, links: Links = "follow") -> Manifest | None:
    """The manifest of a directory; None if there is none.

    Raises:
        IntegrityError: it is damaged.
        UnsupportedError: a newer version wrote it.
        PathEscapeError: it is a link that `files.resolve` refuses.
    """
    if not os.path.lexists(os.path.join(directory, NAME)):
        return None
    path, where = resolve(directory, NAME, links), quote(os.path.join(directory, NAME))
    raw = read_whole(path, where, limits.MAX_TREE_BYTES, "limits.MAX_TREE_BYTES", IntegrityError)
    content = parse_object(raw, where, IntegrityError)
    if content.get("version") != VERSION:
        raise UnsupportedError(f"{where}: version {quote(content.get('version'))}; this rlx_jax reads {VERSION}")
    try:
        weights = {
            key: WeightEntry(_type(entry, f"{where}: {quote(key)}"), entry["sha256"])
            for key, entry in content["weights"].items()
        }
        files = {name: FileEntry(int(e["nbytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        beside = tuple(str(name) for name in content.get("beside", ()))
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise IntegrityError(f"{where}: an entry is not what rlx_jax.save writes; {_ADVICE}") from cause
    return Manifest(weights, files, beside)


def _type(entry: Mapping[str, Any], where: str) -> TensorType:
    try:
        found = TensorType(tuple(int(dim) for dim in entry["shape"]), as_dtype(str(entry["dtype"])))
    except DTypeError as cause:
        raise IntegrityError(f"{where}: {cause}") from cause
    if math.prod(found.shape) * found.dtype.itemsize != entry["nbytes"]:
        raise IntegrityError(f"{where}: {found} does not have {quote(entry['nbytes'])} bytes; {_ADVICE}")
    return found


def digest(array: Any) -> str:
    """SHA-256 of an array's values in row-major, little-endian order."""
    return hashlib.sha256(_bytes(array)).hexdigest()


def _bytes(array: Any) -> memoryview:
    """An array's values in row-major, little-endian order."""
    values = np.ascontiguousarray(array)
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return values.reshape(-1).view(np.uint8).data


def file_digest(path: str) -> FileEntry:
    """Length and SHA-256 of a file."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), found)


def file_digests(directory: str, names: Sequence[str]) -> dict[str, FileEntry]:
    """Length and SHA-256 of files by path within a directory; several at a time, as hashing takes a core each."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: file_digest(os.path.join(directory, name)), names)
        return dict(zip(names, found, strict=True))


def check_lengths(directory: str, files: Mapping[str, FileEntry]) -> None:
    """Every file of the manifest is there, with its length.

    Raises:
        IntegrityError: lists those that differ.
    """
    wrong = []
    for name, entry in files.items():
        check_name(name)
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            wrong.append(f"{name}: missing")
        elif (size := os.path.getsize(path)) != entry.nbytes:
            wrong.append(f"{name}: {size} bytes, expected {entry.nbytes}")
    if wrong:
        raise IntegrityError(f"{quote(directory)}: {len(wrong)} files differ from {NAME}: {listing(wrong)}; {_ADVICE}")


def check_files(directory: str, files: Mapping[str, FileEntry], links: Links = "follow") -> None:
    """Every file of the manifest has its digest. All of them are read.

    Raises:
        IntegrityError: lists those that differ.
        PathEscapeError: one is a link that `files.resolve` refuses.
        StorageError: the system refuses to read one.
    """
    for name in files:
        resolve(directory, name, links)
    if wrong := _differing(directory, files):
        where = f"{quote(directory)}: {len(wrong)} files differ from their digests in {NAME}"
        raise IntegrityError(f"{where}: {listing(wrong)}; {_ADVICE}")


def _differing(directory: str, files: Mapping[str, FileEntry]) -> list[str]:
    """The files that are not there or differ from their digests; all of them are read."""
    there = [name for name in files if os.path.isfile(os.path.join(directory, name))]
    try:
        found = file_digests(directory, there)
    except OSError as cause:
        raise storage_error(cause, quote(cause.filename)) from cause
    return [name for name, entry in files.items() if found.get(name) != entry]


@contextmanager
def explained(directory: str, manifest: Manifest | None) -> Iterator[None]:
    """A decoder's error becomes an `IntegrityError` if files differ from their digests."""
    try:
        yield
    except IntegrityError:
        raise
    except (FormatError, StorageError, NonFiniteWeightError) as cause:
        wrong = [] if manifest is None else _differing(directory, manifest.files)
        if not wrong:
            raise
        raise IntegrityError(f"{cause}; files that differ from {NAME}: {listing(wrong)}; {_ADVICE}") from cause


def check_weights(source: WeightSource, weights: Mapping[str, WeightEntry], where: str) -> None:
    """Names, shapes and dtypes agree with the manifest.

    Raises:
        IntegrityError: lists what differs on either side.
    """
    keys = source.keys()
    wrong = [f"{key}: not in the manifest" for key in keys if key not in weights]
    wrong += [f"{key}: not in the checkpoint" for key in weights if not source.has(key)]
    for key in keys:
        if key in weights and source.spec(key) != weights[key].type.spec:
            wrong.append(f"{key}: {source.spec(key)}, the manifest says {weights[key].type}")
    if wrong:
        raise IntegrityError(f"{where}: {len(wrong)} weights differ from {NAME}: {listing(wrong)}; {_ADVICE}")


class VerifiedSource(SourceView):
    """A source of which every weight is compared with the manifest's digest before anything of it is given.

    One that has none is vouched for by its files: `check_files` has compared them.
    """

    def __init__(self, source: WeightSource, manifest: Manifest, directory: str) -> None:
        check_weights(source, manifest.weights, quote(directory))
        super().__init__(source)
        self._manifest, self._directory = manifest, directory
        self._compared: set[str] = set()

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """The weight, or a part of it. Digests are those of whole weights: before the first part all of it is read.

        Raises:
            IntegrityError: its bytes are not those that were saved.
            Others: as the source's.
        """
        by_file = self.source.has(key) and self._manifest.weights[key].sha256 is None
        with explained(self._directory, self._manifest):
            if index and not by_file and key not in self._compared:
                self._compare(key, self._digest(key))
            values = self.source.read(key, index)
        if not index and not by_file:
            self._compare(key, digest(values))
        return values

    def _digest(self, key: str) -> str:
        """The digest of a weight that is read some rows at a time: the host may have no room for all of it."""
        spec, found = self.source.spec(key), hashlib.sha256()
        if not spec.shape:
            return digest(self.source.read(key))
        rows = max(1, _BAND // max(1, stored_bytes(spec) // max(1, spec.shape[0])))
        for start in range(0, spec.shape[0], rows):
            found.update(_bytes(self.source.read(key, (slice(start, start + rows),))))
        return found.hexdigest()

    def _compare(self, key: str, found: str) -> None:
        if found != self._manifest.weights[key].sha256:
            where = quote(self._directory)
            raise IntegrityError(f"{where}: weight {quote(key)} differs from its digest in {NAME}; {_ADVICE}")
        self._compared.add(key)


def open_verified(
    directory: str,
    verify: Verify,
    links: Links,
    read: Callable[[], WeightSource],
    key_of: Callable[[str], str | None] = lambda name: name,
) -> WeightSource:
    """What `read` opens of a directory, behind the manifest beside it if there is one and `verify` looks at it.

    `key_of` gives the key of a weight of the manifest, None for one that the source leaves out.

    Raises:
        IntegrityError: files or weights differ from the manifest, or `verify` wants one and there is none.
    """
    manifest = None if verify == "metadata" else read_manifest(directory, links)
    if manifest is not None:
        check_lengths(directory, manifest.files)
        if any(entry.sha256 is None for entry in manifest.weights.values()):
            check_files(directory, manifest.files, links)
    elif verify == "full":
        raise IntegrityError(f'{quote(directory)}: no {NAME} to verify with; verify="auto" loads it as it is')
    with explained(directory, manifest):
        source = read()
    if manifest is None:
        return source
    named = {key_of(name): entry for name, entry in manifest.weights.items()}
    weights = {key: entry for key, entry in named.items() if key is not None}
    return VerifiedSource(source, replace(manifest, weights=weights), directory)
