"""`write_checkpoint`: write a checkpoint directory atomically, with a manifest, after reading the weights back.

Formats (`rlx_jax.weights.formats`) write the files of the weights.
"""

from __future__ import annotations

import json
import os
import posixpath
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlx_jax import errors
from rlx_jax.errors import did_you_mean, quote, shown
from rlx_jax.io.atomic import atomic_directory, write_synced
from rlx_jax.io.files import files_below
from rlx_jax.io.folder import CONFIG
from rlx_jax.ir.packed import F32
from rlx_jax.ir.types import as_dtype, is_float, short_name
from rlx_jax.weights import formats, manifest
from rlx_jax.weights.format import DirectoryFormat, Entry, FileFormat, Format, OpenOptions
from rlx_jax.weights.gguf_write import STORAGE, file_type
from rlx_jax.weights.quantize import QUANTIZERS, quantized_entries


def parse_dtype(dtype: Any, format: str | None, where: str) -> tuple[np.dtype[Any] | None, str | None]:
    """Return the dtype of floating weights, None for the checkpoint's, and how matrices are stored, None for that.

    Values for a GGUF file are float32 until they are written, because some tensors stay so. The second result is a name
    in `STORAGE` for a GGUF file, and else one in `QUANTIZERS`.

    Args:
        dtype: `dtype=` of `rlx_jax.save`, or None.
        format: the format to write.
        where: begins the message.

    Raises:
        DTypeError: not a floating dtype, or none that the format has.
    """
    if dtype is None:
        return None, None
    is_gguf = format == "gguf"
    storages = (*STORAGE,) if is_gguf else (*QUANTIZERS,) if format in (None, "safetensors") else ()
    if isinstance(dtype, str) and dtype in storages:
        return F32 if is_gguf else None, dtype
    if isinstance(dtype, str) and dtype in ("q8_0", *QUANTIZERS):
        needed = "gguf" if dtype == "q8_0" else "safetensors"
        raise errors.DTypeError(f"{where}{quote(dtype)}: only written with format={needed!r}, got {quote(format)}")
    names = storages if is_gguf else ("f32", "bf16", "f16", *storages)
    try:
        target = as_dtype(dtype)
        fits = is_float(target) and (not is_gguf or short_name(target) in STORAGE)
    except errors.DTypeError:
        fits = False
    if not fits:
        expected = f"expected one of {', '.join(names)}{did_you_mean(str(dtype), names)}"
        raise errors.DTypeError(f"{where}{quote(dtype)}: {expected}")
    return (F32, short_name(target)) if is_gguf else (target, None)


def write_checkpoint(
    path: str | os.PathLike[str], entries: Sequence[Entry], format: str, overwrite: bool,
    companions: Mapping[str, bytes] | None = None, subfolder: str = "", metadata: Mapping[str, Any] | None = None,
    storage: str | None = None,
) -> Sequence[Entry]:  # fmt: skip
    """Write `entries` to the directory or file `path` atomically, and return them as they are stored.

    Other arguments and errors as `rlx_jax.save`.

    Args:
        companions: companion files of the weights (config, tokenizer) by path, which replace those of an earlier save;
            None: companion files of an earlier save stay. The manifest only has their names, so users may edit them.
        subfolder: a directory in `path` to which the weights are written.
        metadata: the config and the tokenizer, for a format of one file.
        storage: the second result of `parse_dtype`.
    """
    writable = {row.name: row for row in formats.FORMATS if isinstance(row, DirectoryFormat | FileFormat)}
    if not isinstance(format, str) or format not in writable:
        names = sorted(writable)
        raise errors.UnsupportedError(
            f"save: format {quote(format)}: expected {' or '.join(names)}{did_you_mean(str(format), names)}"
        )
    try:
        target = os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError) as cause:  # no path, or one that no file system can have
        raise errors.RequestError(f"save: path is {shown(path)}; expected the path of a directory") from cause
    row = writable[format]
    if isinstance(row, FileFormat):
        entries = [replace(entry, storage=storage) for entry in entries]
        _write_file(target, entries, row, overwrite, {**(metadata or {}), **file_type(storage)})
        return entries
    kept_files, kept_companions = _files_to_keep(target, replace_companions=companions is not None)
    companions = companions or {}
    if storage is not None:
        entries, quantization = quantized_entries(entries, storage)
        companions = _with_quantization(companions, posixpath.join(subfolder, CONFIG), quantization)
    weights: dict[str, manifest.WeightEntry] = {}
    nbytes = sum(e.type.nbytes for e in entries) + sum(map(len, companions.values()))
    with atomic_directory(target, overwrite, nbytes) as new:
        weights_dir = os.path.join(new, subfolder) if subfolder else new
        os.makedirs(os.path.dirname(weights_dir), exist_ok=True)
        recorded = [replace(e, values=partial(_values, e, weights)) for e in entries]
        row.write(weights_dir, recorded)
        new_manifest = manifest.Manifest(
            weights, manifest.file_digests(new, files_below(new)), (*companions, *kept_companions)
        )
        _read_back(weights_dir, row, new_manifest)
        write_synced(os.path.join(new, manifest.MANIFEST_NAME), new_manifest.to_json())
        for name, content in companions.items():
            os.makedirs(os.path.dirname(os.path.join(new, name)), exist_ok=True)
            write_synced(os.path.join(new, name), content)
        for name in (n for n in kept_files if n not in companions):
            os.makedirs(os.path.dirname(os.path.join(new, name)), exist_ok=True)
            shutil.copy2(os.path.join(target, name), os.path.join(new, name), follow_symlinks=False)
    return entries


def _with_quantization(files: Mapping[str, bytes], name: str, quantization: dict[str, Any]) -> dict[str, bytes]:
    """Return companion files in which the config `name` declares how weights are quantized.

    Raises:
        UnsupportedError: it declares that already, for weights that are copied.
    """
    config = json.loads(files[name])
    if config.get("quantization_config") is not None:
        raise errors.UnsupportedError(
            f"save: {name} declares weights that are quantized already; convert them to bf16 first"
        )
    return {**files, name: json.dumps(config | {"quantization_config": quantization}, indent=2).encode() + b"\n"}


def _write_file(
    target: str, entries: Sequence[Entry], row: FileFormat, overwrite: bool, metadata: Mapping[str, Any]
) -> None:
    """Write a checkpoint of one file atomically.

    Raises:
        RequestError: the name does not have the suffix of the format. TargetExistsError: `target` is something else.
    """
    if not target.lower().endswith(row.suffix):
        raise errors.RequestError(
            f"save: path is {quote(target)}; expected the name of a {row.suffix} file for {row.name!r}"
        )
    if os.path.lexists(target) and not row.detect(target):
        raise errors.TargetExistsError(f"{quote(target)} is not a {row.suffix} file; remove it, or save elsewhere")
    with atomic_directory(target, overwrite, sum(e.nbytes for e in entries)) as new:
        row.write_file(new, entries, metadata)


def _files_to_keep(target: str, replace_companions: bool) -> tuple[list[str], list[str]]:
    """Return the files that stay when an existing checkpoint is replaced, and which of them an earlier save wrote.

    Files that `rlx_jax.save` did not write stay. Unless `replace_companions`, companion files
    of an earlier save stay too.

    Raises:
        TargetExistsError: `rlx_jax.save` did not write the directory.
    """
    if not os.path.lexists(target) or (os.path.isdir(target) and not os.listdir(target)):
        return [], []
    old = manifest.read_manifest(target) if os.path.isdir(target) else None
    if old is None:
        problem = f"has no {manifest.MANIFEST_NAME}" if os.path.isdir(target) else "is a file"
        raise errors.TargetExistsError(
            f"{quote(target)} {problem}, so rlx_jax.save did not write it; remove it, or save elsewhere"
        )
    replaced = {*old.files, manifest.MANIFEST_NAME, *(old.companions if replace_companions else ())}
    kept_files = [name for name in files_below(target) if name not in replaced]
    return kept_files, [name for name in kept_files if name in old.companions]


def _read_back(directory: str, format: Format, expected: manifest.Manifest) -> None:
    """Decode the written weights and compare them with the digests of the originals.

    Raises:
        SaveFailedError: they differ, or cannot be read.
    """
    try:
        source = format.open(directory, OpenOptions(on_nonfinite="ignore", verify="metadata"))
        with manifest.VerifiedSource(source, expected, directory) as verified:
            for key in verified.keys():
                verified.read(key)
    except errors.RlxError as cause:
        raise errors.SaveFailedError(
            f"the written checkpoint cannot be read back, so it was removed: {cause}"
        ) from cause


def _values(entry: Entry, weights: dict[str, manifest.WeightEntry]) -> Any:
    """Return the array of an entry, and record its type and digest in `weights`."""
    values = entry.values()
    if values.dtype != entry.type.dtype or tuple(values.shape) != entry.type.shape:
        raise errors.WeightError(
            f"weight {quote(entry.key)}: expected {entry.type}, got {short_name(values.dtype)} {list(values.shape)}"
        )
    weights[entry.key] = manifest.WeightEntry(entry.type, manifest.digest(values))
    return values
