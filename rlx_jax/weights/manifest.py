"""`rlx_manifest.json`: the list of weights and files that `rlx_jax.save` wrote, with a SHA-256 of each.

It detects accidents: flipped bits, truncated files, a mix of files of two saves. It does not detect an attacker who
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
from typing import Any, Literal

import numpy as np

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import listing, quote
from rlx_jax.io import limits
from rlx_jax.io.files import Links, check_name, parse_object, read_small_file, resolve, storage_error
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.ir.types import TensorType, as_dtype, short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.views import Destination, HostArray, ReadingView, read_into

# "auto": check digests if there is a manifest. "full": a manifest is required. "metadata": check no digests.
Verify = Literal["auto", "full", "metadata"]

MANIFEST_NAME = "rlx_manifest.json"
VERSION = 1

_BAND_BYTES = 2**28  # bytes of a weight that are read at a time to compute its digest
_ADVICE = 'the checkpoint is damaged: use another copy (verify="metadata" loads it unchecked)'


@dataclass(frozen=True)
class WeightEntry:
    """One weight: its type, and the SHA-256 of its bytes in row-major, little-endian order.

    The digest is None in a checkpoint of a training run, where several processes may write one array; the digests of
    its files cover it.
    """

    type: TensorType
    sha256: str | None


@dataclass(frozen=True)
class FileEntry:
    """One file: its length in bytes and its SHA-256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The weights of a checkpoint by key, and its files by path within the directory.

    `companions` lists the names of companion files that were written with them, such as the config. They have no
    digests, so that users may edit them.
    """

    weights: Mapping[str, WeightEntry]
    files: Mapping[str, FileEntry]
    companions: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the content of `rlx_manifest.json`."""
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
        content |= {"beside": list(self.companions)} if self.companions else {}
        return json.dumps(content, indent=1).encode()


def read_manifest(directory: str, links: Links = "follow") -> Manifest | None:
    """Return the manifest of a directory; None if there is none.

    Raises:
        IntegrityError: it is damaged.
        UnsupportedError: it has another version than this package reads.
        PathEscapeError: it is a link that `files.resolve` refuses.
    """
    if not os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        return None
    path, where = resolve(directory, MANIFEST_NAME, links), quote(os.path.join(directory, MANIFEST_NAME))
    raw = read_small_file(path, where, limits.bound("MAX_TREE_BYTES"), errors.IntegrityError)
    content = parse_object(raw, where, errors.IntegrityError)
    if content.get("version") != VERSION:
        raise errors.UnsupportedError(f"{where}: version {quote(content.get('version'))}; this rlx_jax reads {VERSION}")
    try:
        weights = {
            key: WeightEntry(_type(entry, f"{where}: {quote(key)}"), entry["sha256"])
            for key, entry in content["weights"].items()
        }
        files = {name: FileEntry(int(e["nbytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        companions = tuple(str(name) for name in content.get("beside", ()))
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise errors.IntegrityError(f"{where}: an entry is not what rlx_jax.save writes; {_ADVICE}") from cause
    return Manifest(weights, files, companions)


def _type(entry: Mapping[str, Any], where: str) -> TensorType:
    """Return the type in an entry, after checking that it agrees with the length in the entry."""
    try:
        tensor_type = TensorType(tuple(int(dim) for dim in entry["shape"]), as_dtype(str(entry["dtype"])))
    except errors.DTypeError as cause:
        raise errors.IntegrityError(f"{where}: {cause}") from cause
    if math.prod(tensor_type.shape) * tensor_type.dtype.itemsize != entry["nbytes"]:
        raise errors.IntegrityError(f"{where}: {tensor_type} does not have {quote(entry['nbytes'])} bytes; {_ADVICE}")
    return tensor_type


def digest(array: Any) -> str:
    """Return the SHA-256 of an array's values in row-major, little-endian order."""
    return hashlib.sha256(_bytes(array)).hexdigest()


def _bytes(array: Any) -> memoryview:
    """Return an array's values as bytes in row-major, little-endian order; without a copy if they already are."""
    values = np.ascontiguousarray(array)
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return values.reshape(-1).view(np.uint8).data


def file_digest(path: str) -> FileEntry:
    """Return the length and the SHA-256 of a file."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), sha256)


def file_digests(directory: str, names: Sequence[str]) -> dict[str, FileEntry]:
    """Return length and SHA-256 of files by path within a directory; in parallel, as one hash uses a single core."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        entries = pool.map(lambda name: file_digest(os.path.join(directory, name)), names)
        return dict(zip(names, entries, strict=True))


def check_lengths(directory: str, files: Mapping[str, FileEntry]) -> None:
    """Check that every file of the manifest exists and has its length.

    Raises:
        IntegrityError: some do not; the message lists them.
    """
    problems = []
    for name, entry in files.items():
        check_name(name)
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            problems.append(f"{name}: missing")
        elif (size := os.path.getsize(path)) != entry.nbytes:
            problems.append(f"{name}: {size} bytes, expected {entry.nbytes}")
    if problems:
        raise errors.IntegrityError(
            f"{quote(directory)}: {len(problems)} files differ from {MANIFEST_NAME}: {listing(problems)}; {_ADVICE}"
        )


def check_files(directory: str, files: Mapping[str, FileEntry], links: Links = "follow") -> None:
    """Check that every file of the manifest has its digest. All of them are read.

    Raises:
        IntegrityError: some do not; the message lists them.
        PathEscapeError: one is a link that `files.resolve` refuses.
        StorageError: the system refuses to read one.
    """
    for name in files:
        resolve(directory, name, links)
    if differences := _find_differing_files(directory, files):
        where = f"{quote(directory)}: {len(differences)} files differ from their digests in {MANIFEST_NAME}"
        raise errors.IntegrityError(f"{where}: {listing(differences)}; {_ADVICE}")


def _find_differing_files(directory: str, files: Mapping[str, FileEntry]) -> list[str]:
    """Return the names of files that are missing or differ from their digests. All of them are read."""
    existing = [name for name in files if os.path.isfile(os.path.join(directory, name))]
    try:
        entries = file_digests(directory, existing)
    except OSError as cause:
        raise storage_error(cause, quote(cause.filename)) from cause
    return [name for name, entry in files.items() if entries.get(name) != entry]


@contextmanager
def explain_damage(directory: str, manifest: Manifest) -> Iterator[None]:
    """Convert an error of a decoder to an `IntegrityError` if files differ from their digests."""
    try:
        yield
    except errors.IntegrityError:
        raise
    except (errors.FormatError, errors.StorageError, errors.NonFiniteWeightError) as cause:
        differences = _find_differing_files(directory, manifest.files)
        if not differences:
            raise
        raise errors.IntegrityError(
            f"{cause}; files that differ from {MANIFEST_NAME}: {listing(differences)}; {_ADVICE}"
        ) from cause


def describe_differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], our_name: str, their_name: str
) -> list[str]:
    """Return a text for each name that only one of two tables has, or that has another type in each."""
    return [
        *(f"{key}: {t} in {our_name}, not in {their_name}" for key, t in ours.items() if key not in theirs),
        *(f"{key}: {t} in {their_name}, not in {our_name}" for key, t in theirs.items() if key not in ours),
        *(
            f"{key}: {t} in {our_name}, {theirs[key]} in {their_name}"
            for key, t in ours.items() if key in theirs and t != theirs[key]
        ),
    ]  # fmt: skip


def check_weights(source: WeightSource, weights: Mapping[str, WeightEntry], where: str) -> None:
    """Check that the names, shapes and dtypes of a source agree with the manifest.

    Raises:
        IntegrityError: they do not; the message lists weights that are missing in either, or have another type.
    """
    stored = {key: source.spec(key) for key in source.keys()}
    declared = {key: entry.type.spec for key, entry in weights.items()}
    if problems := describe_differences(stored, declared, "the checkpoint", "the manifest"):
        raise errors.IntegrityError(
            f"{where}: {len(problems)} weights differ from {MANIFEST_NAME}: {listing(problems)}; {_ADVICE}"
        )


class VerifiedSource(ReadingView):
    """A source that compares every weight with its digest in the manifest before `read` returns any part of it.

    A weight without a digest is not compared: `check_files` has compared its files instead.
    """

    def __init__(self, source: WeightSource, manifest: Manifest, directory: str) -> None:
        check_weights(source, manifest.weights, quote(directory))
        super().__init__(source)
        self._manifest, self._directory = manifest, directory
        self._compared: set[str] = set()

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        """Return a weight or a part of it. A digest covers a full weight, so the first read of a part reads it all.

        Raises:
            IntegrityError: the bytes differ from the saved ones.
            Others: as `read` of the source.
        """
        by_file = self.source.has(key) and self._manifest.weights[key].sha256 is None
        with explain_damage(self._directory, self._manifest):
            if index and not by_file and key not in self._compared:
                self._compare(key, self._digest(key))
            # Bytes that are compared below are read as an array.
            values = read_into(self.source, key, index, out if by_file or isinstance(out, np.ndarray) else None)
        if not index and not by_file:
            self._compare(key, digest(values))
        return values

    def _digest(self, key: str) -> str:
        """Return the digest of a weight, read in bands of rows, as host memory may be too small for all of it."""
        spec, sha256 = self.source.spec(key), hashlib.sha256()
        if not spec.shape:
            return digest(self.source.read(key))
        rows = max(1, _BAND_BYTES // max(1, stored_bytes(spec) // max(1, spec.shape[0])))
        for start in range(0, spec.shape[0], rows):
            sha256.update(_bytes(self.source.read(key, (slice(start, start + rows),))))
        return sha256.hexdigest()

    def _compare(self, key: str, sha256: str) -> None:
        """Compare the digest of a weight with its digest in the manifest."""
        if sha256 != self._manifest.weights[key].sha256:
            where = quote(self._directory)
            raise errors.IntegrityError(
                f"{where}: weight {quote(key)} differs from its digest in {MANIFEST_NAME}; {_ADVICE}"
            )
        self._compared.add(key)


def open_verified(
    directory: str, verify: Verify, links: Links, read: Callable[[], WeightSource],
    to_key: Callable[[str], str | None] = lambda name: name,
) -> WeightSource:  # fmt: skip
    """Return the source that `read` opens for a directory, verified against the directory's manifest if it has one.

    Args:
        verify: `"metadata"` ignores the manifest, `"full"` requires one.
        links: links in the directory that are allowed.
        read: opens the source.
        to_key: returns the source's key for a weight of the manifest, None for one that the source leaves out.

    Raises:
        IntegrityError: files or weights differ from the manifest, or it is required and missing.
    """
    manifest = None if verify == "metadata" else read_manifest(directory, links)
    if manifest is None and verify == "full":
        raise errors.IntegrityError(
            f'{quote(directory)}: no {MANIFEST_NAME} to verify with; verify="auto" loads it as it is'
        )
    if manifest is None:
        return read()
    check_lengths(directory, manifest.files)
    if any(entry.sha256 is None for entry in manifest.weights.values()):
        check_files(directory, manifest.files, links)
    with explain_damage(directory, manifest):
        source = read()
    entries_by_key = {to_key(name): entry for name, entry in manifest.weights.items()}
    weights = {key: entry for key, entry in entries_by_key.items() if key is not None}
    return VerifiedSource(source, replace(manifest, weights=weights), directory)
