"""The directory of one step: an orbax checkpoint of a flat tree, and the manifest that vouches for its files.

12/
  _METADATA, manifest.ocdbt, d/…    what orbax writes; `ocdbt.process_1/…` is by process 1
  commit_success.txt                orbax's mark of a finished checkpoint
  rlx_manifest.json                 the leaves, and a SHA-256 of each file: written last

`StoredLeaf`: the leaves of a state by name: what is stored of each, and how it comes back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import (
    CheckpointFormatError,
    DTypeError,
    IntegrityError,
    RequestError,
    RlxError,
    SaveFailedError,
    ShapeError,
    StorageError,
    UnsupportedError,
    WeightError,
    listing,
    quote,
    shown,
)
from rlx_jax.io import limits
from rlx_jax.io.atomic import sync, sync_tree, write_synced
from rlx_jax.io.files import files_below
from rlx_jax.io.strict_json import is_text
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.weights import manifest
from rlx_jax.weights.manifest import FileEntry, Manifest, WeightEntry, check_lengths, check_weights, read_manifest
from rlx_jax.weights.orbax import OrbaxSource
from rlx_jax.weights.orbax_tree import COMMITTED, read_tree

_ENDING = ".process_"  # orbax: `ocdbt.process_1/` holds what process 1 wrote


def start_writing(directory: str, arrays: dict[str, Any]) -> Callable[[], None]:
    """Copy the arrays to the host and begin to write this process's part of them.

    Returns:
        a function that waits until all of it is written.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    handler = ocp.StandardCheckpointHandler()
    futures = asyncio.run(handler.async_save(epath.Path(directory), args=ocp.args.StandardSave(arrays)))

    def wait() -> None:
        for future in futures or ():
            future.result()

    return wait


def own_files(directory: str, process: int) -> dict[str, dict[str, Any]]:
    """The files that one process alone wrote, which are on disk when the call returns: the fields of their entries."""
    parts = [name for name in os.listdir(directory) if name.endswith(f"{_ENDING}{process}")]
    for part in parts:
        sync_tree(os.path.join(directory, part))
    names = [os.path.join(part, name) for part in parts for name in files_below(os.path.join(directory, part))]
    return {name: asdict(entry) for name, entry in manifest.file_digests(directory, names).items()}


def finish(directory: str, leaves: Sequence[StoredLeaf], written: Iterable[dict[str, dict[str, Any]]]) -> None:
    """Join what the processes wrote, look at it as a reader would, and vouch for it. Process 0 does this.

    Args:
        written: `own_files` of each process.

    Raises:
        SaveFailedError: what was written is not what was to be written.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    ocp.StandardCheckpointHandler().finalize(epath.Path(directory))
    write_synced(os.path.join(directory, COMMITTED), b"rlx_jax")
    known = {name: FileEntry(**entry) for files in written for name, entry in files.items()}
    rest = [name for name in files_below(directory) if name not in known]
    files = known | manifest.file_digests(directory, rest)
    made = Manifest({leaf.name: WeightEntry(leaf.type, None) for leaf in leaves}, files)
    try:
        check_lengths(directory, files)
        _describe(directory, made)
    except RlxError as cause:
        raise SaveFailedError(f"what was written cannot be read back, so it was not kept: {cause}") from cause
    write_synced(os.path.join(directory, manifest.NAME), made.to_json())
    sync(directory)


def read_leaves(directory: str) -> Manifest:
    """The manifest of a step.

    Raises:
        StorageError: it has none. IntegrityError: it is damaged.
    """
    found = read_manifest(directory)
    if found is None:
        raise StorageError(f"{quote(directory)}: no {manifest.NAME}: not a step that was saved whole")
    return found


def check_step(directory: str, found: Manifest, share: Iterable[str]) -> None:
    """Lengths of all files, the digests of those in `share`, and the metadata of all arrays.

    Raises:
        IntegrityError: files differ from the manifest, or arrays do.
        CheckpointFormatError: shapes or chunks contradict each other.
        PathEscapeError: a file leads out of the directory.
    """
    check_lengths(directory, found.files)
    manifest.check_files(directory, {name: found.files[name] for name in share})
    try:
        _describe(directory, found)
    except CheckpointFormatError as cause:  # with the right digests it is a manifest that was changed too
        raise IntegrityError(f"{cause}; use another step") from cause


def _describe(directory: str, found: Manifest) -> None:
    """Names, shapes, dtypes and chunks, before native code may allocate what they say."""
    check_weights(OrbaxSource(read_tree(directory)), found.weights, quote(directory))


def read_arrays(directory: str, like: Sequence[StoredLeaf]) -> list[Any]:
    """The leaves of a step that was checked, each where and as `like` has it."""
    import orbax.checkpoint as ocp
    from etils import epath

    on_host = sum(_host_bytes(leaf) for leaf in like)
    limits.fits_in_memory(on_host, f"{quote(directory)}: what this process restores into its memory")
    target = {leaf.name: _target(leaf.type, leaf.sharding) for leaf in like}
    try:
        found = ocp.StandardCheckpointHandler().restore(epath.Path(directory), args=ocp.args.StandardRestore(target))
    except Exception as cause:
        raise CheckpointFormatError(f"{quote(directory)}: orbax cannot restore it: {quote(cause)}") from cause
    return [leaf.restored(found[leaf.name]) for leaf in like]


def _target(type: TensorType, sharding: jax.sharding.Sharding | None) -> Any:
    """What orbax is asked for: an array in a sharding, or one of NumPy."""
    if sharding is None:
        return np.broadcast_to(np.zeros((), type.dtype), type.shape)  # one element, whatever the shape
    return jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=sharding)


def _host_bytes(leaf: StoredLeaf) -> int:
    """What a leaf takes of this machine's memory in this process, where that is where it stays."""
    if leaf.sharding is None:
        return leaf.type.nbytes
    devices: set[Any] = leaf.sharding.addressable_devices
    here = [device for device in devices if device.platform == "cpu"]
    shard = TensorType(leaf.sharding.shard_shape(leaf.type.shape), leaf.type.dtype)
    return shard.nbytes * len(here)


Numbers = bool | int | float | complex
# The name of a state that is one leaf by itself.
WHOLE = "state"


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of a state: an array, a number of Python or NumPy, or a `jax.ShapeDtypeStruct`."""

    name: str
    value: Any
    type: TensorType

    def snapshot(self) -> Any:
        """What is to be stored: an array on devices as it is, anything else as a copy on the host.

        With several processes an array that lies in this one alone is taken for the same in all: process 0 stores it.

        Raises:
            RequestError: it is a shape without values.
        """
        if isinstance(self.value, jax.ShapeDtypeStruct):
            raise RequestError(f"leaf {quote(self.name)} has no values, it is {shown(self.value)}; save arrays")
        if isinstance(self.value, jax.Array) and (jax.process_count() == 1 or not self.value.is_fully_addressable):
            return self.value
        return np.array(self.value, self.type.dtype)

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """Where the leaf lies, or is to lie; None on the host, and for an array that was put nowhere on purpose."""
        placed = isinstance(self.value, jax.ShapeDtypeStruct) or (
            isinstance(self.value, jax.Array) and self.value.committed
        )
        found: jax.sharding.Sharding | None = self.value.sharding if placed else None
        return found

    def restored(self, stored: Any) -> Any:
        """`stored` as the leaf of `like` is: on its devices, or of its class."""
        if self.sharding is not None:
            return stored
        if isinstance(self.value, jax.Array | jax.ShapeDtypeStruct):
            return jnp.asarray(stored)
        if isinstance(self.value, np.generic):
            return stored[()]
        return type(self.value)(stored.item()) if isinstance(self.value, Numbers) else stored


def named_leaves(tree: Any, what: str) -> tuple[StoredLeaf, ...]:
    """The leaves of a pytree, in its order. The name of one is its path, dotted: `params.embed.weight`, `opt.0.count`.

    Args:
        what: the tree, for messages.

    Raises:
        RequestError: no leaves; one that is no array; one that is traced or was donated; two of one name.
        UnsupportedError: a random key, an empty array, a dtype or a shape that cannot be stored.
    """
    found: dict[str, StoredLeaf] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or WHOLE
        where = f"{what}: leaf {quote(name)}"
        if name in found:
            raise RequestError(f"{where}: two leaves have this name when their paths are dotted; rename one")
        if not is_text(name) or len(name.encode()) > limits.MAX_NAME_BYTES:
            raise UnsupportedError(f"{where}: a name is text of at most {limits.MAX_NAME_BYTES} bytes in UTF-8")
        found[name] = StoredLeaf(name, value, _type(value, where))
    if not found:
        raise RequestError(f"{what}: a pytree without leaves: {shown(tree)}; expected arrays or numbers")
    limits.at_most(len(found), limits.MAX_TENSORS, "limits.MAX_TENSORS", f"{what}: the number of leaves")
    return tuple(found.values())


def _type(value: Any, where: str) -> TensorType:
    if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and value.is_deleted()):
        raise RequestError(f"{where} has no values: traced, or donated to a jitted call")
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise UnsupportedError(f"{where} is a random key; store jax.random.key_data(key), and wrap_key_data it again")
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | Numbers):
        model = "; rlx_jax.save keeps a model" if callable(getattr(value, "param_specs", None)) else ""
        raise RequestError(f"{where}: expected an array or a number, got {shown(value)}{model}")
    array = np.asarray(value) if isinstance(value, Numbers) else value
    try:
        found = TensorType(tuple(array.shape), as_dtype(array.dtype).newbyteorder("="))
    except (DTypeError, ShapeError) as cause:
        raise UnsupportedError(f"{where} cannot be stored: {cause}") from cause
    if 0 in found.shape:
        raise UnsupportedError(f"{where} has shape {list(found.shape)}, and orbax stores no empty arrays; leave it out")
    return found


def check_same(stored: Mapping[str, TensorType], like: tuple[StoredLeaf, ...], where: str) -> None:
    """Names, shapes and dtypes are the same on both sides.

    Raises:
        WeightError: lists every leaf that differs.
    """
    wanted = {leaf.name: leaf.type for leaf in like}
    wrong = [f"{name}: {found} in the step, not in `like`" for name, found in stored.items() if name not in wanted]
    wrong += [f"{name}: {asked} in `like`, not in the step" for name, asked in wanted.items() if name not in stored]
    differ = ((name, stored[name], asked) for name, asked in wanted.items() if stored.get(name, asked) != asked)
    wrong += [f"{name}: {found} in the step, {asked} in `like`" for name, found, asked in differ]
    if wrong:
        raise WeightError(f"{where}: {len(wrong)} leaves are not those of `like`: {listing(wrong)}")
