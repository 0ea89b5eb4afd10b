"""Opening weights: one function for all formats, and the sources it returns.

A source names its tensors, tells their shapes and dtypes without reading them, and reads them whole or
in part. Reading never removes or changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from rlx_jax.errors import MissingFileError, RlxError, UnsupportedError, WeightError, listing, quote
from rlx_jax.io import limits
from rlx_jax.io.atomic import abandoned_old
from rlx_jax.io.files import Links, list_directory
from rlx_jax.io.folder import Folder, open_folder, refuse_asked
from rlx_jax.io.hub import is_name
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.ir.types import short_name as short_name
from rlx_jax.ir.weight_reads import WeightSource as WeightSource
from rlx_jax.weights import formats
from rlx_jax.weights.directory import bring, headers, refuse_directory, refuse_other_format
from rlx_jax.weights.finite import OnNonfinite
from rlx_jax.weights.format import Format, OpenOptions, stored_spec
from rlx_jax.weights.manifest import Verify
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.orbax_tree import usable_steps
from rlx_jax.weights.views import close


def open_weights(
    weights: str | os.PathLike[str] | Folder | Mapping[str, Any] | WeightSource,
    *,
    strict: bool = True,
    on_nonfinite: OnNonfinite = "error",
    links: Links = "follow",
    max_bytes: int | None = None,
    verify: Verify = "auto",
    subtree: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
) -> WeightSource:
    """A source of weights. Nothing but names, shapes and dtypes is read yet.

    Args:
        weights: a mapping of checkpoint key → array, `jax.Array`, `Packed` or `jax.ShapeDtypeStruct`; the path of a
            `.safetensors` file, of a `*.safetensors.index.json`, or of a directory (`open_directory` tells
            which of its files count); or a source, which is returned as it is. `"org/name"` is a model of the Hub,
            if there is no such path and no directory `org`. A `Folder` is one that is open.
        strict: a directory whose index and shards disagree about `total_size`, or whose shards hold tensors
            that the index does not list, is an error; otherwise a warning, and all tensors are there.
        on_nonfinite: `"error"`: a tensor with NaN is an error when it is read, one with infinity a warning;
            `"warn"`: both are warnings; `"ignore"`: neither is looked for.
        links: `"follow"` links in the directory that stay inside it or inside its Hugging Face cache;
            `"refuse"` symbolic and hard links, for what came out of an archive. A path that you pass is
            followed wherever it leads.
        max_bytes: refuse weights with more bytes than that, all tensors together; those of the Hub by their headers,
            before they are fetched. No limit unless given.
        verify: `"auto"`: what `rlx_jax.save` wrote is compared with its digests when it is read, and an orbax
            checkpoint without them is read with a warning; `"full"`: no digests are an error; `"metadata"`:
            digests are not looked at.
        subtree: of an orbax checkpoint, only the arrays below this dotted path, whose keys lose it: `"params"`.
        revision, token: of a model of the Hub, as `rlx_jax.load` has them.

    Raises:
        MissingFileError: the path, or anything usable in the directory, does not exist.
        UnsupportedError: another format; the message says what to do.
        SafetensorsError, ConfigError, PathEscapeError, CheckpointFormatError: malformed files.
        StorageError: an orbax checkpoint that was never finished; lists those that were.
        IntegrityError: files differ from the manifest beside them, or there is none to verify with.
        WeightError: `weights` is something else, or its values are; or a subclass for contradictory shards.
        LimitError: over `max_bytes` or one of `rlx_jax.io.limits`.

    >>> import numpy as np
    >>> source = open_weights({"w": np.ones((2, 3), np.float32)})
    >>> source.spec("w")
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    options = OpenOptions(strict, on_nonfinite, links, verify, subtree, max_bytes)
    return open_with(weights, options, revision, token)


def open_with(
    weights: Any, options: OpenOptions, revision: str | None = None, token: str | bool | None = None
) -> WeightSource:
    """`open_weights` with its options as one record."""
    options.check_weights()
    if isinstance(weights, WeightSource):
        if options.changed() or (revision, token) != (None, None):
            raise WeightError("these weights are open already; give the options where you open them")
        return weights
    weights = _here(weights, options.max_bytes, revision, token)
    found = next((row for row in formats.FORMATS if row.detect(weights)), None)
    if found is not None:
        return _opened(found, weights, options)
    if isinstance(weights, str):
        _refuse(weights)
    lacks = [name for name in ("keys", "spec", "read", "has", "where") if not callable(getattr(weights, name, None))]
    told = f", which lacks {', '.join(lacks)}" if len(lacks) < 5 else ""
    raise WeightError(
        f"weights: expected a path, a mapping or a WeightSource, got {quote(type(weights).__name__)}{told}"
    )


def _here(weights: Any, max_bytes: int | None, revision: str | None, token: str | bool | None) -> Any:
    """The path on this machine of a path, of a folder, or of a model of the Hub, which is fetched; what is none of them
    as it is.

    Raises:
        WeightError: a revision of what is on this machine, or a token for it.
    """
    if isinstance(weights, str | os.PathLike):
        path = os.fsdecode(weights)
        weights = abandoned_old(path) or path
        if is_name(path) and not (os.path.lexists(weights) or os.path.isdir(os.path.dirname(path))):
            weights, revision, token = open_folder(path, revision, token), None, None
    if isinstance(weights, Folder):
        bring(weights, max_bytes)
        weights = os.fspath(weights.path)
    refuse_asked(revision, token, "these weights are on this machine", WeightError)
    return weights


def _opened(row: Format, weights: Any, options: OpenOptions) -> WeightSource:
    """The source of a format, closed again where it is too large."""
    try:
        source: WeightSource = row.open(weights, options)
    except RlxError as error:
        if isinstance(weights, str) and quote(weights).strip("'") not in str(error):
            error.locate(quote(weights))
        raise
    try:
        if options.max_bytes is not None:
            total = sum(stored_bytes(source.spec(key)) for key in source.keys())
            limits.at_most(total, options.max_bytes, "max_bytes", "the size of all weights in bytes")
    except BaseException:
        close(source)
        raise
    return source


def open_headers(folder: Folder) -> WeightSource:
    """A source that tells names, shapes and dtypes. Of a model of the Hub only headers are fetched: it reads none.

    Raises:
        As `open_weights`.
    """
    if folder.snapshot is None:
        return open_weights(folder)
    specs = {
        key: stored_spec(info.shape, info.dtype)
        for header in headers(folder).values() for key, info in header.items()
    }  # fmt: skip
    return MappingSource(specs, name=f"checkpoint {folder.where('')}")


def _refuse(path: str) -> NoReturn:
    """Say what is wrong with a path that no format takes."""
    if os.path.isdir(path):
        refuse_directory(path, list_directory(path))
    if not os.path.lexists(path):
        hint = "" if path.endswith(".safetensors") else "; a model of the Hub is a string 'org/name'"
        steps = usable_steps(os.path.dirname(path.rstrip(os.sep)) or ".")
        hint = f"; finished steps beside it: {listing(steps[n] for n in sorted(steps))}" if steps else hint
        raise MissingFileError(f"{quote(path)}: no such file or directory{hint}")
    refuse_other_format(path)
    raise UnsupportedError(f"{quote(path)}: expected a directory or a .safetensors file")
