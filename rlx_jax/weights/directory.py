"""Choose the safetensors files of a model directory, check that index and shards agree, and open or fetch them."""

from __future__ import annotations

import os
import threading
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import listing, quote
from rlx_jax.io import limits
from rlx_jax.io.files import Links, check_name, list_directory, parse_object, read_small_file, resolve
from rlx_jax.io.folder import CONFIG, Folder
from rlx_jax.io.hub import run_in_parallel
from rlx_jax.weights.manifest import MANIFEST_NAME
from rlx_jax.weights.quantized_config import MODELOPT_CONFIG
from rlx_jax.weights.tensor_file import Header, SafetensorsFile, TensorFile, TensorInfo, read_header

INDEX_SUFFIX = ".safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
# The files that may declare that weights are quantised.
QUANTIZATION_FILES = (CONFIG, MODELOPT_CONFIG)

_PICKLE = (
    "it is a pickle, which runs code when it is loaded; convert it with `safetensors.torch.save_file`; for a model "
    "of the Hub, look for a pull request that has done so: revision='refs/pr/1'"
)
# Advice by the suffix of file names of other formats.
_OTHER_FORMATS = {
    ".gguf": "a GGUF file is a model by itself: pass its path, or name it with file=",
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _PICKLE),
    ".npz": "open it with `numpy.load(path, allow_pickle=False)` and pass the arrays as a mapping",
    ".npy": "open it with `numpy.load(path, allow_pickle=False)` and pass the array in a mapping",
    ".h5": "open it with h5py and pass the arrays as a mapping",
    ".msgpack": "open it with `flax.serialization.msgpack_restore` and pass the arrays as a mapping",
    ".onnx": "convert it to safetensors, or pass a mapping of arrays",
    **dict.fromkeys((".zip", ".tar", ".gz"), "archives are not opened; unpack it"),
}


def open_directory(directory: str, *, strict: bool, links: Links) -> list[TensorFile]:
    """Open and return the `.safetensors` files of a model directory.

    The first of these that exists is used; the others are ignored:

    1. `model.safetensors.index.json` and the shards that it names;
    2. `model.safetensors`;
    3. the only `*.safetensors.index.json`;
    4. the only `*.safetensors`.

    Raises:
        MissingFileError: none of them exists; the message lists the files in the directory.
        UnsupportedError: there are only weights of another format.
        Others: as `open_index` and `SafetensorsFile`.
    """
    file_name = _choose_file(directory, list_directory(directory))
    if file_name.endswith(INDEX_SUFFIX):
        return open_index(directory, file_name, strict=strict, links=links)
    return [SafetensorsFile(resolve(directory, file_name, links), name=file_name)]


def fetch_weight_files(folder: Folder, max_bytes: int | None = None) -> None:
    """Fetch the files of a Hub model that `open_directory` opens, and the manifest; no other weight files.

    Raises:
        LimitError: the headers declare tensors of more than `max_bytes`; no weights were fetched.
        As `open_directory`, applied to the file names on the Hub. HubError and others: as `Snapshot.fetch`.
    """
    if folder.snapshot is None:
        return
    file_name, index = _choose_on_hub(folder)
    if max_bytes is not None:
        total = sum(info.nbytes for file in read_headers(folder).values() for info in file.values())
        limits.check_limit(total, (max_bytes, "max_bytes"), "the size of all weights in bytes")
    folder.fetch(MANIFEST_NAME, bounds={MANIFEST_NAME: limits.bound("MAX_TREE_BYTES")})
    folder.fetch(*QUANTIZATION_FILES, bounds=dict.fromkeys(QUANTIZATION_FILES, limits.bound("MAX_CONFIG_BYTES")))
    folder.fetch(*([file_name] if index is None else index.shards))  # `open_index` reports missing shards


def read_headers(folder: Folder) -> dict[str, Header]:
    """Return the headers of a Hub model's weight files, by file name, without fetching weights.

    Raises:
        As `open_directory`, applied to the file names on the Hub. HubError and others: as `Snapshot.read_range`.
    """
    file_name, index = _choose_on_hub(folder)
    shards = [file_name] if index is None else list(index.shards)
    if index is not None:
        _refuse_missing(index, [shard for shard in shards if folder.hub_file(shard) is None])
    results: dict[str, Header] = {}

    def read(shard: str, stop: threading.Event) -> None:
        """Read the header of a shard from the Hub."""
        where, entry = folder.where(shard), folder.hub_file(shard)
        if entry is None or entry.nbytes is None:
            raise errors.IntegrityError(f"{where}: the Hub does not report its length, so its header cannot be trusted")
        results[shard] = read_header(
            lambda count, start, _: folder.read_range(shard, start, count), entry.nbytes, where
        )

    run_in_parallel(read, shards)
    if index is not None:
        _check_against_index(index, results, strict=True)
    return {shard: results[shard] for shard in shards}


def _choose_on_hub(folder: Folder) -> tuple[str, _Index | None]:
    """Return the name of a Hub model's weight file and None, or the name of its index and the index, fetched."""
    where, names = folder.where("").strip("'"), folder.names()
    file_name = _choose_file(where, names)
    if not file_name.endswith(INDEX_SUFFIX):
        return file_name, None
    folder.fetch(file_name, bounds={file_name: (limits.bound("MAX_INDEX_BYTES"))})
    return file_name, _read_index(resolve(os.fspath(folder.path), file_name), folder.where(file_name))


def refuse_without_config(folder: Folder) -> None:
    """Raise an error with advice if a directory without `config.json` has files of a known other kind.

    Raises:
        UnsupportedError: it is an adapter, or has weights of another format.
    """
    names = folder.names()
    if CONFIG in names:
        return
    if ADAPTER_CONFIG in names:
        raise errors.UnsupportedError(
            f"{folder.where('')}: an adapter of PEFT ({ADAPTER_CONFIG}) and no model: load its base model and pass "
            "this directory as adapter=: rlx_jax.load(path, adapter=), or rlx_jax.lora(recipe, adapter=)"
        )
    for suffix, advice in _OTHER_FORMATS.items():
        if matches := [name for name in names if name.lower().endswith(suffix)]:
            raise errors.UnsupportedError(f"{folder.where('')}: no {CONFIG}; it has {listing(matches, 3)}: {advice}")


def open_index(directory: str, name: str, *, strict: bool, links: Links) -> list[TensorFile]:
    """Open and return the shards that the index file `name` in `directory` refers to, checked against it.

    Raises:
        ConfigError: the index is malformed or empty, or names something that is not a file.
        PathEscapeError: it names a file outside the directory, or a link while links are refused.
        MissingWeightError: shards, or tensors in shards, are missing; the message lists them.
        DuplicateWeightError: a tensor is in two shards.
        UnexpectedWeightError: a tensor is not in the index; a warning unless `strict`.
        CheckpointFormatError: `total_size` differs; a warning unless `strict`.
    """
    index = _read_index(resolve(directory, name, links), quote(name))
    paths, missing_shards = {}, []
    for shard in index.shards:
        try:
            paths[shard] = resolve(directory, shard, links)
        except errors.MissingFileError:
            missing_shards.append(shard)
    _refuse_missing(index, missing_shards)
    with ExitStack() as stack:  # closes the files that are open if one of them, or the comparison, fails
        files = {shard: stack.enter_context(SafetensorsFile(path, name=shard)) for shard, path in paths.items()}
        _check_against_index(index, {shard: file.tensors for shard, file in files.items()}, strict)
        stack.pop_all()
    return list(files.values())


def refuse_other_format(path: str) -> None:
    """Raise `UnsupportedError` with advice if a file name has the suffix of another weight format."""
    if advice := _OTHER_FORMATS.get(os.path.splitext(path)[1].lower()):
        raise errors.UnsupportedError(f"{quote(path)} is not a .safetensors file: {advice}")


def refuse_directory(directory: str, names: list[str]) -> NoReturn:
    """Raise the error for a directory with the entries `names`, none of which holds readable weights.

    Raises:
        UnsupportedError: there are weights of another format; the message has advice.
        MissingFileError: there are none; the message lists the entries.
    """
    for name in names:
        refuse_other_format(os.path.join(directory, name))
    raise errors.MissingFileError(f"{quote(directory)}: no .safetensors file; there is {listing(names) or 'nothing'}")


@dataclass(frozen=True)
class _Index:
    """A checked index file: shard → names of its tensors, and the bytes of all tensors if the file has them."""

    where: str
    shards: Mapping[str, frozenset[str]]
    total_size: int | None


def _choose_file(directory: str, names: list[str]) -> str:
    """Return the name of the index or of the file to open, in the order of `open_directory`."""
    for name in ("model" + INDEX_SUFFIX, "model.safetensors"):
        if name in names:
            return name
    where = quote(directory)
    for suffix in (INDEX_SUFFIX, ".safetensors"):
        candidates = [name for name in names if name.endswith(suffix)]
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            shards = all("-of-" in name for name in candidates)
            advice = "they are shards, and model.safetensors.index.json maps tensors to shards: copy it too"
            raise errors.MissingFileError(
                f"{where}: no model{suffix}, and {len(candidates)} others: {listing(candidates)}; "
                f"{advice if shards else 'name the one you mean'}"
            )
    refuse_directory(directory, names)


def _read_index(path: str, where: str) -> _Index:
    """Return the index in a file, with the names of its shards checked.

    Raises:
        ConfigError, PathEscapeError, LimitError: the index is malformed, names other files, or is too large.
    """
    raw = read_small_file(path, where, limits.bound("MAX_INDEX_BYTES"), errors.ConfigError)
    content = parse_object(raw, where, errors.ConfigError)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise errors.ConfigError(
            f"{where}: weight_map: expected an object of tensor name → file name, found {quote(weight_map)}"
        )
    limits.check_limit(len(weight_map), limits.bound("MAX_TENSORS"), f"{where}: the number of tensors")
    shards: dict[str, list[str]] = defaultdict(list)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise errors.ConfigError(
                f"{where}: weight_map: {quote(tensor)}: expected a file name, found {quote(shard)}"
            )
        shards[shard].append(tensor)
    _check_shard_names(shards, where)
    return _Index(where, {shard: frozenset(tensors) for shard, tensors in shards.items()}, _total_size(content, where))


def _check_shard_names(shards: Mapping[str, list[str]], where: str) -> None:
    """Check that shards are plain names of `.safetensors` files that differ on every file system."""
    originals: dict[str, str] = {}
    for shard in shards:
        check_name(shard)
        if not shard.endswith(".safetensors"):
            refuse_other_format(shard)
            raise errors.ConfigError(f"{where}: {quote(shard)}: expected the name of a .safetensors file")
        # Case folding may decompose letters, so the name is normalized again.
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", shard).casefold())
        if folded in originals:
            raise errors.ConfigError(
                f"{where}: {quote(originals[folded])} and {quote(shard)} differ in case or composed letters only, "
                "which makes them one file on some systems"
            )
        originals[folded] = shard


def _total_size(content: dict[str, Any], where: str) -> int | None:
    """Return `metadata.total_size` in bytes, None if it or `metadata` is missing or null; a whole float is accepted.

    Args:
        content: the parsed index.
        where: the index file, for messages.

    Raises:
        ConfigError: `metadata` is no object, or the size is not a number of bytes.
    """
    metadata = content.get("metadata")
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise errors.ConfigError(f"{where}: metadata: expected an object, found {quote(metadata)}")
    size = metadata.get("total_size")
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | float) or size != int(size) or size < 0:
        raise errors.ConfigError(f"{where}: metadata.total_size: expected a number of bytes, found {quote(size)}")
    return int(size)


def _refuse_missing(index: _Index, missing: list[str]) -> None:
    """Raise `MissingWeightError` if shards are missing, with the number of their tensors."""
    if missing:
        count, total = sum(len(index.shards[shard]) for shard in missing), len(index.shards)
        raise errors.MissingWeightError(
            f"{index.where}: {len(missing)} of {total} shards are missing, with {count} tensors: {listing(missing)}"
        )


def _check_against_index(index: _Index, headers: Mapping[str, Mapping[str, TensorInfo]], strict: bool) -> None:
    """Check the headers of all shards against the index. Errors are documented in `open_index`."""
    owners: dict[str, list[str]] = defaultdict(list)
    for shard, tensors in headers.items():
        for tensor in tensors:
            owners[tensor].append(shard)
    missing = [
        f"{tensor} of {shard}"
        for shard, tensors in index.shards.items()
        for tensor in sorted(tensors)
        if shard not in owners[tensor]
    ]
    if missing:
        raise errors.MissingWeightError(
            f"{index.where}: {len(missing)} of its tensors are missing from the shards: {listing(missing)}"
        )
    duplicates = [f"{tensor} in {' and '.join(shards)}" for tensor, shards in owners.items() if len(shards) > 1]
    if duplicates:
        raise errors.DuplicateWeightError(
            f"{index.where}: {len(duplicates)} tensors are in two shards: {listing(duplicates)}"
        )
    index_tensors = frozenset().union(*index.shards.values())
    extra = [f"{tensor} in {shards[0]}" for tensor, shards in owners.items() if tensor not in index_tensors]
    if extra:
        problem = f"{index.where}: the shards hold {len(extra)} tensors that it does not list: {listing(extra)}"
        _raise_or_warn(errors.UnexpectedWeightError, problem, strict)
    limits.check_limit(len(owners), limits.bound("MAX_TENSORS"), "the number of tensors")
    total = sum(info.nbytes for tensors in headers.values() for info in tensors.values())
    if index.total_size not in (None, total):
        problem = f"{index.where}: metadata.total_size is {index.total_size}, the tensors have {total} bytes"
        _raise_or_warn(errors.CheckpointFormatError, problem, strict)


def _raise_or_warn(
    error: type[errors.UnexpectedWeightError] | type[errors.CheckpointFormatError], problem: str, strict: bool
) -> None:
    """Raise an error if `strict`, else warn."""
    if strict:
        raise error(f"{problem}; pass strict=False to load what the shards hold")
    warnings.warn(problem, errors.RlxWarning, stacklevel=2)
