"""Writing a checkpoint directory: atomic, with a manifest, read back before it counts. The formats write the files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlx_jax.errors import (
    RequestError,
    RlxError,
    SaveFailedError,
    TargetExistsError,
    UnsupportedError,
    WeightError,
    did_you_mean,
    quote,
    shown,
)
from rlx_jax.io.atomic import replacing, write_synced
from rlx_jax.io.files import files_below
from rlx_jax.ir.types import short_name
from rlx_jax.weights import formats, manifest
from rlx_jax.weights.format import Entry, Format, OpenOptions
from rlx_jax.weights.manifest import Manifest, VerifiedSource, WeightEntry, digest, file_digests, read_manifest


def write_checkpoint(
    path: str | os.PathLike[str],
    entries: Sequence[Entry],
    format: str,
    overwrite: bool,
    beside: Mapping[str, bytes] | None = None,
    inside: str = "",
) -> None:
    """Write `entries` to the directory `path`, whole or not at all. Arguments and errors as `rlx_jax.save`.

    Args:
        beside: the other files of a whole checkpoint, by path, in the place of those that an earlier save wrote; of
            None those stay. The manifest has their names alone: who edits them need not delete it.
        inside: the directory in `path` that the weights go to.
    """
    known = {row.name: row for row in formats.FORMATS if row.writes}
    if not isinstance(format, str) or format not in known:
        names = sorted(known)
        raise UnsupportedError(
            f"save: format {quote(format)}: expected {' or '.join(names)}{did_you_mean(str(format), names)}"
        )
    try:
        target = os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError) as cause:  # no path, or one that no file system can have
        raise RequestError(f"save: path is {shown(path)}; expected the path of a directory") from cause
    kept, ours = _files_to_keep(target, whole=beside is not None)
    beside = beside or {}
    weights: dict[str, WeightEntry] = {}
    nbytes = sum(e.type.nbytes for e in entries) + sum(map(len, beside.values()))
    with replacing(target, overwrite, nbytes) as new:
        there = os.path.join(new, inside) if inside else new
        os.makedirs(os.path.dirname(there), exist_ok=True)
        known[format].write(there, [replace(e, values=partial(_values, e, weights)) for e in entries])
        found = Manifest(weights, file_digests(new, files_below(new)), (*beside, *ours))
        _read_back(there, known[format], found)
        write_synced(os.path.join(new, manifest.NAME), found.to_json())
        for name, content in beside.items():
            os.makedirs(os.path.dirname(os.path.join(new, name)), exist_ok=True)
            write_synced(os.path.join(new, name), content)
        for name in (n for n in kept if n not in beside):
            os.makedirs(os.path.dirname(os.path.join(new, name)), exist_ok=True)
            shutil.copy2(os.path.join(target, name), os.path.join(new, name), follow_symlinks=False)


def _files_to_keep(target: str, whole: bool) -> tuple[list[str], list[str]]:
    """The files that stay when a directory that we wrote is replaced: what others put there, and unless a `whole`
    checkpoint comes, what an earlier save wrote beside the weights; and which of them are of such a save.

    Raises:
        TargetExistsError: the directory is not ours to replace.
    """
    if not os.path.lexists(target) or (os.path.isdir(target) and not os.listdir(target)):
        return [], []
    old = read_manifest(target) if os.path.isdir(target) else None
    if old is None:
        found = f"has no {manifest.NAME}" if os.path.isdir(target) else "is a file"
        raise TargetExistsError(
            f"{quote(target)} {found}, so rlx_jax.save did not write it; remove it, or save elsewhere"
        )
    gone = {*old.files, manifest.NAME, *(old.beside if whole else ())}
    kept = [name for name in files_below(target) if name not in gone]
    return kept, [name for name in kept if name in old.beside]


def _read_back(directory: str, format: Format, expected: Manifest) -> None:
    """Decode what was written, and compare it with what was to be written.

    Raises:
        SaveFailedError: they differ, or it cannot be read.
    """
    try:
        source = format.open(directory, OpenOptions(on_nonfinite="ignore", verify="metadata"))
        with VerifiedSource(source, expected, directory) as verified:
            for key in verified.keys():
                verified.read(key)
    except RlxError as cause:
        raise SaveFailedError(f"what was written cannot be read back, so it was not kept: {cause}") from cause


def _values(entry: Entry, weights: dict[str, WeightEntry]) -> Any:
    """The array of an entry, whose type and digest are kept in `weights`."""
    values = entry.values()
    if values.dtype != entry.type.dtype or tuple(values.shape) != entry.type.shape:
        raise WeightError(
            f"weight {quote(entry.key)}: expected {entry.type}, got {short_name(values.dtype)} {list(values.shape)}"
        )
    weights[entry.key] = WeightEntry(entry.type, digest(values))
    return values
