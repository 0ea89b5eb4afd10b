"""Which files of a model directory hold the weights, and whether they agree with each other."""

from __future__ import annotations

import os
import threading
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from rlx_jax.errors import (
    CheckpointFormatError,
    ConfigError,
    DuplicateWeightError,
    IntegrityError,
    MissingFileError,
    MissingWeightError,
    RlxWarning,
    UnexpectedWeightError,
    UnsupportedError,
    listing,
    quote,
)
from rlx_jax.io import limits
from rlx_jax.io.files import Links, check_name, list_directory, read_whole, resolve
from rlx_jax.io.folder import CONFIG, Folder
from rlx_jax.io.hub import run_together
from rlx_jax.io.strict_json import parse_object
from rlx_jax.weights.manifest import NAME
from rlx_jax.weights.safetensors import SafetensorsFile, read_header
from rlx_jax.weights.safetensors_header import Header, TensorInfo

INDEX_SUFFIX = ".safetensors.index.json"
ADAPTER = "adapter_config.json"

_PICKLE = (
    "it is a pickle, which runs code when it is loaded; convert it with `safetensors.torch.save_file`, or, of a model "
    "of the Hub, ask for a pull request that has done so: revision='refs/pr/1'"
)
_OTHER_FORMATS = {
    ".gguf": "GGUF is not read yet; take the model that it was made from, or convert it to safetensors",
    ".bin": _PICKLE,
    ".pt": _PICKLE,
    ".pth": _PICKLE,
    ".ckpt": _PICKLE,
    ".npz": "open it with `numpy.load(path, allow_pickle=False)` and pass the arrays as a mapping",
    ".npy": "open it with `numpy.load(path, allow_pickle=False)` and pass the array in a mapping",
    ".h5": "open it with h5py and pass the arrays as a mapping",
    ".msgpack": "open it with `flax.serialization.msgpack_restore` and pass the arrays as a mapping",
    ".onnx": "convert it to safetensors, or pass a mapping of arrays",
    ".zip": "archives are not opened; unpack it",
    ".tar": "archives are not opened; unpack it",
    ".gz": "archives are not opened; unpack it",
}


def open_directory(directory: str, *, strict: bool, links: Links) -> list[SafetensorsFile]:
    """The `.safetensors` files of a model directory, opened.

    The first of these that is there decides, and the rest is not looked at:

    1. `model.safetensors.index.json` and the shards it names;
    2. `model.safetensors`;
    3. the only `*.safetensors.index.json`;
    4. the only `*.safetensors`.

    Raises:
        MissingFileError: none of them; the message lists what is there.
        UnsupportedError: weights of another format only.
        Others: as `open_index` and `SafetensorsFile`.
    """
    chosen = _choose(directory, list_directory(directory))
    if chosen.endswith(INDEX_SUFFIX):
        return open_index(directory, chosen, strict=strict, links=links)
    return [SafetensorsFile(resolve(directory, chosen, links), name=chosen)]


def bring(folder: Folder, max_bytes: int | None = None) -> None:
    """Fetch what `open_directory` opens of a model of the Hub, and what it is checked with; no other file of weights.

    Raises:
        LimitError: tensors of more than `max_bytes`, by their headers; nothing of them was fetched.
        As `open_directory`, of the names that the Hub lists. HubError and others: as `Snapshot.fetch`.
    """
    if folder.snapshot is None:
        return
    chosen, index = _listed(folder)
    if max_bytes is not None:
        total = sum(info.nbytes for file in headers(folder).values() for info in file.values())
        limits.at_most(total, max_bytes, "max_bytes", "the size of all weights in bytes")
    folder.bring(NAME, bounds={NAME: (limits.MAX_TREE_BYTES, "limits.MAX_TREE_BYTES")})
    folder.bring(*([chosen] if index is None else index.shards))  # what is lacking is named when the index is opened


def headers(folder: Folder) -> dict[str, Header]:
    """The headers of what `open_directory` would open of a model of the Hub, by file: no weights are fetched.

    Raises:
        As `open_directory`, of the names that the Hub lists. HubError and others: as `Snapshot.part`.
    """
    chosen, index = _listed(folder)
    shards = [chosen] if index is None else list(index.shards)
    if index is not None:
        _refuse_missing(index, [shard for shard in shards if folder.listed(shard) is None])
    found: dict[str, Header] = {}

    def read(shard: str, stop: threading.Event) -> None:
        where, listed = folder.where(shard), folder.listed(shard)
        if listed is None or listed.nbytes is None:
            raise IntegrityError(f"{where}: the Hub does not say how long it is, so that its header cannot be trusted")
        found[shard] = read_header(lambda count, start, _: folder.part(shard, start, count), listed.nbytes, where)

    run_together(read, shards)
    if index is not None:
        _compare(index, found, strict=True)
    return {shard: found[shard] for shard in shards}


def _listed(folder: Folder) -> tuple[str, _Index | None]:
    """The name of the file of weights in a model of the Hub; or of its index, which is fetched."""
    where, names = folder.where("").strip("'"), folder.names()
    chosen = _choose(where, names)
    if not chosen.endswith(INDEX_SUFFIX):
        return chosen, None
    folder.bring(chosen, bounds={chosen: (limits.MAX_INDEX_BYTES, "limits.MAX_INDEX_BYTES")})
    return chosen, _read_index(resolve(os.fspath(folder.path), chosen), folder.where(chosen))


def refuse_without_config(folder: Folder) -> None:
    """Say what a directory without `config.json` is, where its names tell.

    Raises:
        UnsupportedError: it is an adapter, or has weights of another format; advice.
    """
    names = folder.names()
    if CONFIG in names:
        return
    if ADAPTER in names:
        raise UnsupportedError(
            f"{folder.where('')}: an adapter of PEFT ({ADAPTER}) and no model: load the model that it was trained on, "
            "and give this directory as adapter=: rlx_jax.load(path, adapter=), or rlx_jax.lora(recipe, adapter=)"
        )
    for suffix, advice in _OTHER_FORMATS.items():
        if found := [name for name in names if name.lower().endswith(suffix)]:
            raise UnsupportedError(f"{folder.where('')}: no {CONFIG}; it has {listing(found, 3)}: {advice}")


def holds_safetensors(directory: str) -> bool:
    """Whether `open_directory` would find files, or an index that names them."""
    return any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in list_directory(directory))


def open_index(directory: str, name: str, *, strict: bool, links: Links) -> list[SafetensorsFile]:
    """The shards that the index file `name` in `directory` refers to, opened and checked against it.

    Raises:
        ConfigError: the index is malformed or empty, or names something that is not a file.
        PathEscapeError: it names a file outside the directory, or links are refused.
        MissingWeightError: shards, or tensors in shards, are missing; all are listed.
        DuplicateWeightError: a tensor is in two shards.
        UnexpectedWeightError: a tensor is not in the index; a warning unless `strict`.
        CheckpointFormatError: `total_size` differs; a warning unless `strict`.
    """
    index = _read_index(resolve(directory, name, links), quote(name))
    paths, missing = {}, []
    for shard in index.shards:
        try:
            paths[shard] = resolve(directory, shard, links)
        except MissingFileError:
            missing.append(shard)
    _refuse_missing(index, missing)
    with ExitStack() as opened:
        files = {shard: opened.enter_context(SafetensorsFile(path, name=shard)) for shard, path in paths.items()}
        _compare(index, {shard: file.tensors for shard, file in files.items()}, strict)
        opened.pop_all()
    return list(files.values())


def refuse_other_format(path: str) -> None:
    """Raise `UnsupportedError` with advice if the file name is that of another weight format."""
    if advice := _OTHER_FORMATS.get(os.path.splitext(path)[1].lower()):
        raise UnsupportedError(f"{quote(path)} is not a .safetensors file: {advice}")


def refuse_directory(directory: str, names: list[str]) -> NoReturn:
    """Say that none of `names`, which are in a directory, holds weights that are read.

    Raises:
        UnsupportedError: advice for weights of another format. MissingFileError: there are none; lists what is there.
    """
    for name in names:
        refuse_other_format(os.path.join(directory, name))
    raise MissingFileError(f"{quote(directory)}: no .safetensors file; there is {listing(names) or 'nothing'}")


@dataclass(frozen=True)
class _Index:
    """A checked index file: shard → names of its tensors, and the bytes of all tensors if given."""

    where: str
    shards: Mapping[str, frozenset[str]]
    total_size: int | None


def _choose(directory: str, names: list[str]) -> str:
    """The name of the index or the file to open."""
    for name in ("model" + INDEX_SUFFIX, "model.safetensors"):
        if name in names:
            return name
    where = quote(directory)
    for suffix in (INDEX_SUFFIX, ".safetensors"):
        fitting = [name for name in names if name.endswith(suffix)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            shards = all("-of-" in name for name in fitting)
            advice = "they are shards, and model.safetensors.index.json says what is in which: copy it too"
            raise MissingFileError(
                f"{where}: no model{suffix}, and {len(fitting)} others: {listing(fitting)}; "
                f"{advice if shards else 'name the one you mean'}"
            )
    refuse_directory(directory, names)


def _read_index(path: str, where: str) -> _Index:
    raw = read_whole(path, where, limits.MAX_INDEX_BYTES, "limits.MAX_INDEX_BYTES", ConfigError)
    content = parse_object(raw, where, ConfigError)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"{where}: weight_map: expected an object of tensor name → file name, found {quote(weight_map)}"
        )
    limits.at_most(len(weight_map), limits.MAX_TENSORS, "limits.MAX_TENSORS", f"{where}: the number of tensors")
    shards: dict[str, list[str]] = defaultdict(list)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ConfigError(f"{where}: weight_map: {quote(tensor)}: expected a file name, found {quote(shard)}")
        shards[shard].append(tensor)
    _check_shard_names(shards, where)
    return _Index(where, {shard: frozenset(tensors) for shard, tensors in shards.items()}, _total_size(content, where))


def _check_shard_names(shards: Mapping[str, list[str]], where: str) -> None:
    seen: dict[str, str] = {}
    for shard in shards:
        check_name(shard)
        if not shard.endswith(".safetensors"):
            refuse_other_format(shard)
            raise ConfigError(f"{where}: {quote(shard)}: expected the name of a .safetensors file")
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", shard).casefold())
        if folded in seen:
            raise ConfigError(
                f"{where}: {quote(seen[folded])} and {quote(shard)} differ in case or composed letters only, "
                "which makes them one file on some systems"
            )
        seen[folded] = shard


def _total_size(content: dict[str, Any], where: str) -> int | None:
    """`metadata.total_size` in bytes. Some writers make it a float."""
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ConfigError(f"{where}: metadata: expected an object, found {quote(metadata)}")
    size = metadata.get("total_size")
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | float) or size != int(size) or size < 0:
        raise ConfigError(f"{where}: metadata.total_size: expected a number of bytes, found {quote(size)}")
    return int(size)


def _refuse_missing(index: _Index, missing: list[str]) -> None:
    """Shards of an index that are not there, with what they hold."""
    if missing:
        count, total = sum(len(index.shards[shard]) for shard in missing), len(index.shards)
        raise MissingWeightError(
            f"{index.where}: {len(missing)} of {total} shards are missing, with {count} tensors: {listing(missing)}"
        )


def _compare(index: _Index, headers: Mapping[str, Mapping[str, TensorInfo]], strict: bool) -> None:
    """Check the shards' own headers against the index."""
    holders: dict[str, list[str]] = defaultdict(list)
    for shard, tensors in headers.items():
        for tensor in tensors:
            holders[tensor].append(shard)
    missing = [
        f"{tensor} of {shard}"
        for shard, tensors in index.shards.items()
        for tensor in sorted(tensors)
        if shard not in holders[tensor]
    ]
    if missing:
        raise MissingWeightError(f"{index.where}: the shards lack {len(missing)} of its tensors: {listing(missing)}")
    twice = [f"{tensor} in {' and '.join(shards)}" for tensor, shards in holders.items() if len(shards) > 1]
    if twice:
        raise DuplicateWeightError(f"{index.where}: {len(twice)} tensors are in two shards: {listing(twice)}")
    listed = frozenset().union(*index.shards.values())
    extra = [f"{tensor} in {shards[0]}" for tensor, shards in holders.items() if tensor not in listed]
    if extra:
        problem = f"{index.where}: the shards hold {len(extra)} tensors that it does not list: {listing(extra)}"
        _complain(UnexpectedWeightError, problem, strict)
    limits.at_most(len(holders), limits.MAX_TENSORS, "limits.MAX_TENSORS", "the number of tensors")
    total = sum(info.nbytes for tensors in headers.values() for info in tensors.values())
    if index.total_size not in (None, total):
        problem = f"{index.where}: metadata.total_size is {index.total_size}, the tensors have {total} bytes"
        _complain(CheckpointFormatError, problem, strict)


def _complain(error: type[UnexpectedWeightError] | type[CheckpointFormatError], problem: str, strict: bool) -> None:
    if strict:
        raise error(f"{problem}; pass strict=False to load what the shards hold")
    warnings.warn(problem, RlxWarning, stacklevel=2)
