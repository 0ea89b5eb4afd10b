"""`open_weights`: open weights of any format as a `WeightSource`.

A source lists its tensors, gives their shapes and dtypes without reading them, and reads all or a part of a tensor.
It never changes the stored weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

from rlx_jax.errors import MissingFileError, RlxError, UnsupportedError, WeightError, listing, quote
from rlx_jax.io import limits
from rlx_jax.io.atomic import find_old_content
from rlx_jax.io.files import Links, list_directory
from rlx_jax.io.folder import Folder, is_model_name, open_folder, refuse_hub_options
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.ir.types import short_name as short_name
from rlx_jax.ir.weight_reads import WeightSource as WeightSource
from rlx_jax.weights import formats
from rlx_jax.weights.directory import fetch_weight_files, read_headers, refuse_directory, refuse_other_format
from rlx_jax.weights.format import Format, OnNonfinite, OpenOptions, stored_spec
from rlx_jax.weights.manifest import Verify
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.orbax_tree import finished_steps
from rlx_jax.weights.quantized import QuantizedSource
from rlx_jax.weights.quantized_config import quantization_of
from rlx_jax.weights.quantized_layouts import LAYOUTS
from rlx_jax.weights.safetensors_format import Safetensors
from rlx_jax.weights.tree import Names, TreeSource, flatten_tree, match_names
from rlx_jax.weights.views import close


def open_weights(
    weights: Any, *, names: Names | None = None, strict: bool = True, on_nonfinite: OnNonfinite = "error",
    links: Links = "follow", max_bytes: int | None = None, verify: Verify = "auto", subtree: str = "",
    revision: str | None = None, token: str | bool | None = None,
) -> WeightSource:  # fmt: skip
    """Return a source of weights. At this point only names, shapes and dtypes are read.

    Args:
        weights: a mapping of checkpoint key → array, `jax.Array`, `Packed` or `jax.ShapeDtypeStruct`; the path of a
            `.safetensors` or `.gguf` file, of a `*.safetensors.index.json`, or of a directory (`open_directory`
            documents which of its files are used); or a source, which is returned unchanged. `"org/name"` is a model of
            the Hub, if there is no such path and no directory `org`. A `Folder` is an open model directory. With
            `names` also any pytree of arrays, such as the parameters of flax.
        names: checkpoint keys for the paths of a tree, which are dotted: a mapping of regular expression → key,
            `rlx_jax.TreeWeight` or None, which leaves a leaf out. The result is a `TreeSource`, whose `to_tree` returns
            the weights of a model as such a tree.
        strict: if the index and the shards of a directory disagree about `total_size`, or the shards hold tensors
            that the index does not list, raise an error; otherwise warn, and include all tensors.
        on_nonfinite: `"error"`: reading a tensor with NaN is an error, one with infinity a warning;
            `"warn"`: both are warnings; `"ignore"`: values are not checked.
        links: `"follow"`: follow links in the directory that stay inside it or inside its Hugging Face cache;
            `"refuse"`: refuse symbolic and hard links, for directories from an archive. The path that you pass is
            followed wherever it leads.
        max_bytes: refuse weights with more bytes than that, all tensors together. The headers decide, so weights of
            the Hub are refused before they are fetched. No limit by default.
        verify: `"auto"`: compare weights that `rlx_jax.save` wrote with their digests when they are read, and warn
            about an Orbax checkpoint without digests; `"full"`: missing digests are an error; `"metadata"`: ignore
            digests.
        subtree: read only the arrays of an Orbax checkpoint below this dotted path (`"params"`), which is removed
            from their keys.
        revision, token: for a model of the Hub; see `rlx_jax.load`.

    Raises:
        MissingFileError: the path does not exist, or the directory has no usable file.
        UnsupportedError: another format; the message has advice.
        SafetensorsError, ConfigError, PathEscapeError, CheckpointFormatError: malformed files.
        StorageError: an Orbax checkpoint that was never finished; the message lists finished ones.
        IntegrityError: files differ from their manifest, or `verify="full"` and there is no manifest.
        WeightError: `weights` or one of its values has another type; or a subclass for contradictory shards, or for
            `names`, as `match_names` and `TreeSource`.
        LimitError: over `max_bytes` or one of `rlx_jax.io.limits`.

    >>> import numpy as np
    >>> source = open_weights({"w": np.ones((2, 3), np.float32)})
    >>> source.spec("w")
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    options = OpenOptions(strict, on_nonfinite, links, verify, subtree, max_bytes)
    if names is None:
        return open_with(weights, options, revision, token)
    if isinstance(weights, str | os.PathLike | Folder | WeightSource):
        source = open_with(weights, options, revision, token)
        return TreeSource(source, match_names(source.keys(), names), dict)
    leaves, unflatten = flatten_tree(weights)
    rules = match_names(leaves, names)
    source = open_with({path: leaves[path] for path in rules}, options, revision, token)
    return TreeSource(source, rules, unflatten)


def open_with(
    weights: Any, options: OpenOptions, revision: str | None = None, token: str | bool | None = None
) -> WeightSource:
    """Return a source of weights, as `open_weights` does, with its options as one record."""
    options.check_weights()
    if isinstance(weights, WeightSource):
        if options.changed_names() or (revision, token) != (None, None):
            raise WeightError("these weights are already open; pass the options where you open them")
        return weights
    weights, folder = _to_local_path(weights, options.max_bytes, revision, token)
    weight_format = next((weight_format for weight_format in formats.FORMATS if weight_format.detect(weights)), None)
    if weight_format is not None:
        return _open_format(weight_format, weights, options, folder)
    if isinstance(weights, str):
        _refuse(weights)
    missing = [name for name in ("keys", "spec", "read", "has", "where") if not callable(getattr(weights, name, None))]
    details = f" without {', '.join(missing)}" if len(missing) < 5 else ""
    raise WeightError(
        f"weights: expected a path, a mapping or a WeightSource, got {quote(type(weights).__name__)}{details}"
    )


def _to_local_path(
    weights: Any, max_bytes: int | None, revision: str | None, token: str | bool | None
) -> tuple[Any, Folder | None]:
    """Return the local path of a path, a folder, or a model of the Hub, which is fetched; other values unchanged.

    The second result is the folder, if it is open.

    Raises:
        WeightError: a revision or a token for local weights.
    """
    if isinstance(weights, str | os.PathLike):
        path = os.fsdecode(weights)
        weights = find_old_content(path) or path  # an interrupted save may have moved the directory
        if is_model_name(path) and not (os.path.lexists(weights) or os.path.isdir(os.path.dirname(path))):
            weights, revision, token = open_folder(path, revision, token), None, None
    folder = weights if isinstance(weights, Folder) else None
    if folder is not None:
        fetch_weight_files(folder, max_bytes)
        weights = os.fspath(folder.path)
    refuse_hub_options(revision, token, "these weights are on this machine", WeightError)
    return weights, folder


def _open_format(weight_format: Format, weights: Any, options: OpenOptions, folder: Folder | None) -> WeightSource:
    """Open weights in a format and return the source; it is closed if the weights are over `max_bytes`.

    `folder` is the directory of the weights, if it is open: its config.json says how they are quantised.
    """
    if options.subtree and weight_format.name != "orbax":
        where = quote(weights) if isinstance(weights, str) else "weights"
        raise WeightError(f"{where}: subtree= is for orbax checkpoints, not for {weight_format.name}")
    try:
        source: WeightSource = weight_format.open(weights, options)
        if isinstance(weight_format, Safetensors) and os.path.isdir(weights):
            source = with_quantized_weights(source, folder or Folder(Path(weights)))
    except RlxError as error:
        if isinstance(weights, str) and quote(weights).strip("'") not in str(error):
            error.locate(quote(weights))
        raise
    try:
        if options.max_bytes is not None:
            total = sum(stored_bytes(source.spec(key)) for key in source.keys())
            limits.check_limit(total, (options.max_bytes, "max_bytes"), "the size of all weights in bytes")
    except BaseException:
        close(source)
        raise
    return source


def with_quantized_weights(source: WeightSource, folder: Folder) -> WeightSource:
    """Return a view of the weights of a directory in which quantised ones are packed weights; `source` if none are.

    Raises:
        ConfigError, UnsupportedError: as `quantization_of`; `source` is closed.
    """
    try:
        quantization = quantization_of(folder)
        layout = None if quantization is None else LAYOUTS.get(quantization.method)
        return source if quantization is None or layout is None else QuantizedSource(source, quantization, layout)
    except BaseException:
        close(source)
        raise


def open_headers(folder: Folder) -> WeightSource:
    """Return a source for names, shapes and dtypes. Only headers of a Hub model are fetched, so it cannot read weights.

    Raises:
        As `open_weights`.
    """
    if folder.snapshot is None:
        return open_weights(folder)
    specs = {
        key: stored_spec(info.shape, info.dtype)
        for header in read_headers(folder).values() for key, info in header.items()
    }  # fmt: skip
    return with_quantized_weights(MappingSource(specs, name=f"checkpoint {folder.where('')}"), folder)


def _refuse(path: str) -> NoReturn:
    """Raise the error that explains why no format accepts a path."""
    if os.path.isdir(path):
        refuse_directory(path, list_directory(path))
    if not os.path.lexists(path):
        hint = "" if path.endswith(".safetensors") else "; a model of the Hub is a string 'org/name'"
        steps = finished_steps(os.path.dirname(path.rstrip(os.sep)) or ".")
        hint = f"; finished steps next to it: {listing(steps[n] for n in sorted(steps))}" if steps else hint
        raise MissingFileError(f"{quote(path)}: no such file or directory{hint}")
    refuse_other_format(path)
    raise UnsupportedError(f"{quote(path)}: expected a directory or a .safetensors file")
