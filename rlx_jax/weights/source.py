"""Opening weights: one function for all formats, and the sources it returns.

A source names its tensors, tells their shapes and dtypes without reading them, and reads them whole or
in part. Reading never removes or changes anything.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

import jax
import numpy as np

from rlx_jax.errors import (
    DuplicateWeightError,
    IntegrityError,
    MissingFileError,
    MissingWeightError,
    RlxWarning,
    UnsupportedError,
    WeightDTypeError,
    WeightError,
    WeightShapeError,
    did_you_mean,
    listing,
    quote,
)
from rlx_jax.ir.param import WeightSource as WeightSource
from rlx_jax.ir.types import TensorType
from rlx_jax.weights import limits
from rlx_jax.weights.atomic import abandoned_old
from rlx_jax.weights.directory import (
    INDEX_SUFFIX,
    holds_safetensors,
    open_directory,
    open_index,
    refuse_other_format,
)
from rlx_jax.weights.files import Links, resolve
from rlx_jax.weights.finite import OnNonfinite, check_finite
from rlx_jax.weights.manifest import (
    NAME,
    Manifest,
    VerifiedSource,
    Verify,
    check_lengths,
    close,
    explained,
    read_manifest,
)
from rlx_jax.weights.orbax import OrbaxSource
from rlx_jax.weights.orbax_tree import below, find_item, is_orbax, read_tree, usable_steps
from rlx_jax.weights.safetensors import SafetensorsFile, check_index, close_names
from rlx_jax.weights.safetensors_header import check_shape

Array = np.ndarray[Any, Any]


def open_weights(
    weights: str | os.PathLike[str] | Mapping[str, Any] | WeightSource,
    *,
    strict: bool = True,
    on_nonfinite: OnNonfinite = "error",
    links: Links = "follow",
    max_bytes: int | None = None,
    verify: Verify = "auto",
    subtree: str = "",
) -> WeightSource:
    """A source of weights. Nothing but names, shapes and dtypes is read yet.

    Args:
        weights: a mapping of checkpoint key → array, `jax.Array` or `jax.ShapeDtypeStruct`; the path of a
            `.safetensors` file, of a `*.safetensors.index.json`, or of a directory (`open_directory` tells
            which of its files count); or a source, which is returned as it is.
        strict: a directory whose index and shards disagree about `total_size`, or whose shards hold tensors
            that the index does not list, is an error; otherwise a warning, and all tensors are there.
        on_nonfinite: `"error"`: a tensor with NaN is an error when it is read, one with infinity a warning;
            `"warn"`: both are warnings; `"ignore"`: neither is looked for.
        links: `"follow"` links in the directory that stay inside it or inside its Hugging Face cache;
            `"refuse"` symbolic and hard links, for what came out of an archive. A path that you pass is
            followed wherever it leads.
        max_bytes: refuse weights with more bytes than that, all tensors together. No limit unless given.
        verify: `"auto"`: what `rlx_jax.save` wrote is compared with its digests when it is read, and an orbax
            checkpoint without them is read with a warning; `"full"`: no digests are an error; `"metadata"`:
            digests are not looked at.
        subtree: of an orbax checkpoint, only the arrays below this dotted path, whose keys lose it: `"params"`.

    Raises:
        MissingFileError: the path, or anything usable in the directory, does not exist.
        UnsupportedError: another format; the message says what to do.
        SafetensorsError, ConfigError, PathEscapeError, CheckpointFormatError: malformed files.
        CheckpointIncompleteError: an orbax checkpoint that was never finished; lists those that were.
        IntegrityError: files differ from the manifest beside them, or there is none to verify with.
        WeightError: `weights` is something else, or its values are; or a subclass for contradictory shards.
        LimitError: over `max_bytes` or one of `rlx_jax.weights.limits`.

    >>> source = open_weights({"w": np.ones((2, 3), np.float32)})
    >>> source.spec("w")
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    if not isinstance(strict, bool):
        raise WeightError(f"strict: expected True or False, got {quote(strict)}")
    _check_option("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
    _check_option("links", links, get_args(Links))
    _check_option("verify", verify, get_args(Verify))
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
        raise WeightError(f"max_bytes: expected a number of bytes, got {quote(max_bytes)}")
    if not isinstance(subtree, str) or (subtree and not all(subtree.split("."))):
        raise WeightError(f"subtree: expected a dotted path such as 'params', got {quote(subtree)}")
    if isinstance(weights, str | os.PathLike):
        path = os.fsdecode(weights)
        path = abandoned_old(path) or path
        options = _Options(strict, on_nonfinite, links, verify, subtree)
        source = _open_directory(path, options) if os.path.isdir(path) else _open_file(path, options)
        try:
            _check_total(source, max_bytes)
        except BaseException:
            close(source)
            raise
        return source
    if isinstance(weights, WeightSource):
        if (strict, on_nonfinite, links, max_bytes, verify, subtree) != (True, "error", "follow", None, "auto", ""):
            raise WeightError("these weights are open already; give the options where you open them")
        return weights
    if isinstance(weights, Mapping):
        arrays = MappingSource(weights, on_nonfinite=on_nonfinite)
        _check_total(arrays, max_bytes)
        return arrays
    lacks = [name for name in ("keys", "spec", "read", "has", "where") if not callable(getattr(weights, name, None))]
    told = f", which lacks {', '.join(lacks)}" if len(lacks) < 5 else ""
    raise WeightError(
        f"weights: expected a path, a mapping or a WeightSource, got {quote(type(weights).__name__)}{told}"
    )


@dataclass(frozen=True)
class _Options:
    """Arguments of `open_weights` that matter for paths."""

    strict: bool
    on_nonfinite: OnNonfinite
    links: Links
    verify: Verify
    subtree: str


class MappingSource:
    """Weights from a mapping: arrays of NumPy or JAX, or `jax.ShapeDtypeStruct` for shapes only.

    The arrays are neither copied nor checked before they are read; the mapping itself is copied.

    Raises:
        WeightError: a key is not a string.
        WeightDTypeError: a value is not an array of numbers.
        WeightShapeError, LimitError: a symbolic shape, or one too large.
    """

    def __init__(self, arrays: Mapping[str, Any], *, on_nonfinite: OnNonfinite = "error") -> None:
        self._arrays = dict(arrays)
        self._on_nonfinite = on_nonfinite
        for key, value in self._arrays.items():
            _check_value(key, value)

    @property
    def shapes_only(self) -> bool:
        """Whether every entry is a `jax.ShapeDtypeStruct`: enough to compile, not to run."""
        values = self._arrays.values()
        return bool(values) and all(isinstance(v, jax.ShapeDtypeStruct) for v in values)

    def keys(self) -> tuple[str, ...]:
        """The keys, in the mapping's order."""
        return tuple(self._arrays)

    def has(self, key: str) -> bool:
        """Whether there is a tensor under `key`."""
        return key in self._arrays

    def where(self, key: str) -> str:
        """`"mapping"`.

        Raises:
            MissingWeightError: no such key.
        """
        self._value(key)
        return "mapping"

    def spec(self, key: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype under `key`.

        Raises:
            MissingWeightError: no such key.
        """
        value = self._value(key)
        return _spec(value.shape, value.dtype)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> Array:
        """The array under `key`, or the part that `index` selects as in NumPy; read-only, a view where possible.

        Raises:
            MissingWeightError: no such key.
            WeightShapeError: `index` does not fit the shape.
            WeightError: there is a shape only, or the JAX array is deleted, traced or on other hosts.
            NonFiniteWeightError: NaN in what was read, unless `on_nonfinite` says otherwise.
        """
        value = self._value(key)
        slices = check_index(index, value.shape, key)
        if isinstance(value, jax.ShapeDtypeStruct):
            raise WeightError(f"weight {quote(key)} has a shape only, no values: it was given as a ShapeDtypeStruct")
        if isinstance(value, jax.core.Tracer):
            raise WeightError(f"weight {quote(key)} is traced by a JAX transformation; open weights outside of it")
        if isinstance(value, jax.Array) and value.is_deleted():
            raise WeightError(f"weight {quote(key)} is deleted: a jitted call that donates it has consumed it")
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise WeightError(f"weight {quote(key)} lies on devices of other processes, so it cannot be read here")
        # A JAX array is cut where it lives, and only the part comes to the host.
        part = np.asarray(value[slices] if slices else value)
        part = part.astype(part.dtype.newbyteorder("="), copy=False).view()
        part.flags.writeable = False
        check_finite(part, key, "mapping", self._on_nonfinite)
        return part

    def _value(self, key: str) -> Any:
        if key not in self._arrays:
            missing = _missing(key, self._arrays, "the mapping")
            if any("{" in known for known in self._arrays):
                raise MissingWeightError(f"{missing}; leaves of rolled layers: model.weights(params) gives them by key")
            raise missing
        return self._arrays[key]


class SafetensorsSource:
    """Weights from one `.safetensors` file or from the shards of one checkpoint.

    A context manager; the files are closed at the latest when the source goes. Several threads may read.

    Raises:
        DuplicateWeightError: two files hold a tensor of the same name.
        LimitError: more than `limits.MAX_TENSORS` tensors.
    """

    def __init__(self, files: Sequence[SafetensorsFile], *, on_nonfinite: OnNonfinite = "error") -> None:
        self.files = tuple(files)
        self._on_nonfinite = on_nonfinite
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self.files:
            for key in file.tensors:
                if key in self._file_of:
                    raise DuplicateWeightError(
                        f"{quote(key)} is in {quote(self._file_of[key].name)} and in {quote(file.name)}"
                    )
                self._file_of[key] = file
        limits.at_most(len(self._file_of), limits.MAX_TENSORS, "limits.MAX_TENSORS", "the number of tensors")

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far; headers do not count."""
        return sum(file.bytes_read for file in self.files)

    def keys(self) -> tuple[str, ...]:
        """The tensor names, in the order of the data, shard by shard."""
        return tuple(self._file_of)

    def has(self, key: str) -> bool:
        """Whether there is a tensor `key`."""
        return key in self._file_of

    def where(self, key: str) -> str:
        """The file that holds `key`: its name in the directory, or the path that was opened.

        Raises:
            MissingWeightError: no such tensor.
        """
        return self._file(key).name

    def spec(self, key: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a tensor, from the header.

        Raises:
            MissingWeightError: no such tensor.
        """
        info = self._file(key).tensors[key]
        return _spec(info.shape, info.dtype)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> Array:
        """A tensor, or the part that `index` selects as in NumPy; a new array.

        Raises:
            NonFiniteWeightError: NaN in what was read, unless `on_nonfinite` says otherwise.
            Others: as `SafetensorsFile.read`.
        """
        file = self._file(key)
        values = file.read(key, index)
        check_finite(values, key, quote(file.name), self._on_nonfinite)
        return values

    def close(self) -> None:
        """Close the files. Reading is an error then; names and shapes stay."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, key: str) -> SafetensorsFile:
        if key not in self._file_of:
            raise _missing(key, self._file_of, f"{listing((f.name for f in self.files), 2)}, a checkpoint")
        return self._file_of[key]


def _open_directory(path: str, options: _Options) -> WeightSource:
    """The weights of a directory: safetensors if there are such files, else orbax."""
    if holds_safetensors(path) or not is_orbax(path):
        manifest = _manifest(path, options)
        with explained(path, manifest):
            source: WeightSource = _open_files(path, options)
    else:
        path, subtree = find_item(path, options.subtree)
        manifest = _manifest(path, options)
        if manifest is None and options.verify == "auto":
            message = f"{quote(path)}: an orbax checkpoint without {NAME}: bits are not verified"
            warnings.warn(f'{message}; verify="metadata" says that this is meant', RlxWarning, stacklevel=3)
        with explained(path, manifest):
            tree = read_tree(path, subtree)
            source = OrbaxSource(tree, on_nonfinite=options.on_nonfinite, links=options.links)
        if manifest is not None:
            named = {below(name, subtree): entry for name, entry in manifest.weights.items()}
            manifest = replace(manifest, weights={key: entry for key, entry in named.items() if key is not None})
    return source if manifest is None else VerifiedSource(source, manifest, path)


def _manifest(directory: str, options: _Options) -> Manifest | None:
    """The manifest to check weights with, after the lengths of files agreed with it."""
    if options.verify == "metadata":
        return None
    manifest = read_manifest(directory, options.links)
    if manifest is not None:
        check_lengths(directory, manifest.files)
    elif options.verify == "full":
        raise IntegrityError(f'{quote(directory)}: no {NAME} to verify with; verify="auto" loads it as it is')
    return manifest


def _open_file(path: str, options: _Options) -> WeightSource:
    if options.verify == "full" and os.path.lexists(path):
        raise IntegrityError(f"{quote(path)}: a single file has no {NAME}; open the directory that holds it")
    return _open_files(path, options)


def _open_files(path: str, options: _Options) -> SafetensorsSource:
    """One file, an index with its shards, or the files of a directory."""
    if options.subtree:
        raise WeightError(f"{quote(path)}: subtree= is for orbax checkpoints; safetensors files hold no tree")
    files = _safetensors_files(path, options.strict, options.links)
    try:
        source = SafetensorsSource(files, on_nonfinite=options.on_nonfinite)
    except BaseException:
        for file in files:
            file.close()
        raise
    return source


def _safetensors_files(path: str, strict: bool, links: Links) -> list[SafetensorsFile]:
    if os.path.isdir(path):
        return open_directory(path, strict=strict, links=links)
    if not os.path.lexists(path):
        hint = "; nothing is downloaded: `huggingface_hub.snapshot_download` fetches a checkpoint"
        steps = usable_steps(os.path.dirname(path.rstrip(os.sep)) or ".")
        hint = f"; finished steps beside it: {listing(steps[n] for n in sorted(steps))}" if steps else hint
        raise MissingFileError(f"{quote(path)}: no such file or directory{hint}")
    directory, name = os.path.split(path)
    if name.endswith(INDEX_SUFFIX):
        return open_index(directory or ".", name, strict=strict, links=links)
    refuse_other_format(path)
    if not name.endswith(".safetensors"):
        raise UnsupportedError(f"{quote(path)}: expected a directory or a .safetensors file")
    if links == "refuse":
        resolve(directory or ".", name, links)
    return [SafetensorsFile(path)]


def _check_option(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise WeightError(
            f"{name}: expected one of {', '.join(choices)}, got {quote(value)}{did_you_mean(str(value), choices)}"
        )


def _check_total(source: WeightSource, max_bytes: int | None) -> None:
    if max_bytes is None:
        return
    specs = map(source.spec, source.keys())
    total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    limits.at_most(total, max_bytes, "max_bytes", "the size of all weights in bytes")


def _check_value(key: object, value: Any) -> None:
    if not isinstance(key, str):
        raise WeightError(f"weights: expected strings as keys, got {quote(key)} of type {type(key).__name__}")
    if not isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct) or isinstance(value, np.ma.MaskedArray):
        hint = "; flatten nested mappings to dotted keys" if isinstance(value, Mapping) else "; numpy.asarray makes one"
        raise WeightDTypeError(f"weight {quote(key)}: expected an array, got {quote(type(value).__name__)}{hint}")
    dtype = value.dtype
    if not (jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise WeightDTypeError(f"weight {quote(key)}: expected an array of numbers or bools, got dtype {quote(dtype)}")
    if not all(isinstance(dim, int) for dim in value.shape):
        raise WeightShapeError(f"weight {quote(key)}: expected whole numbers as shape, got {quote(value.shape)}")
    check_shape(value.shape, f"weight {quote(key)}")


def _missing(key: str, known: Mapping[str, Any], what: str) -> MissingWeightError:
    return MissingWeightError(f"no weight {quote(key)} in {what} of {len(known)}{close_names(key, known)}")


def _spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return TensorType(shape, np.dtype(dtype).newbyteorder("=")).spec
