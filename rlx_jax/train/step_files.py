"""The directory of one step: an orbax checkpoint of a flat tree, and a manifest with digests of its files.

12/
  _METADATA, manifest.ocdbt, d/…    files of orbax; process 1 writes `ocdbt.process_1/…`
  commit_success.txt                orbax's marker of a complete checkpoint
  rlx_manifest.json                 the leaves, and a SHA-256 of each file: written last

`StoredLeaf` is one leaf of a state: it converts the leaf to the stored array and back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax import errors
from rlx_jax.dataclasses import asdict, dataclass
from rlx_jax.errors import listing, quote, shown
from rlx_jax.io import limits
from rlx_jax.io.atomic import sync, sync_tree, write_synced
from rlx_jax.io.files import files_below, is_text
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.weights import manifest
from rlx_jax.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    WeightEntry,
    check_lengths,
    check_weights,
    read_manifest,
)
from rlx_jax.weights.orbax import OrbaxSource
from rlx_jax.weights.orbax_tree import COMMIT_MARKER, read_tree

_PROCESS_SUFFIX = ".process_"  # process 1 writes into orbax's subdirectory `ocdbt.process_1/`


def start_writing(directory: str, arrays: dict[str, Any]) -> Callable[[], None]:
    """Copy the arrays to the host, and start writing this process's shards of them.

    Returns:
        a function that waits until everything is written.
    """
    # Here and below, orbax is imported on first use, as the import is slow.
    import orbax.checkpoint as ocp
    from etils import epath

    handler = ocp.StandardCheckpointHandler()
    futures = asyncio.run(handler.async_save(epath.Path(directory), args=ocp.args.StandardSave(arrays)))

    def wait() -> None:
        for future in futures or ():
            future.result()

    return wait


def sync_own_files(directory: str, process: int) -> dict[str, dict[str, Any]]:
    """Sync the files that one process wrote to disk, and return the fields of their manifest entries, by name."""
    subdirectories = [name for name in os.listdir(directory) if name.endswith(f"{_PROCESS_SUFFIX}{process}")]
    for part in subdirectories:
        sync_tree(os.path.join(directory, part))
    names = [os.path.join(part, name) for part in subdirectories for name in files_below(os.path.join(directory, part))]
    return {name: asdict(entry) for name, entry in manifest.file_digests(directory, names).items()}


def finish_step(directory: str, leaves: Sequence[StoredLeaf], written: Iterable[dict[str, dict[str, Any]]]) -> None:
    """Merge the files of all processes, check them as a reader would, and write the manifest. Process 0 does this.

    Args:
        leaves: the leaves that were saved.
        written: `sync_own_files` of each process.

    Raises:
        SaveFailedError: the files do not contain these leaves.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    ocp.StandardCheckpointHandler().finalize(epath.Path(directory))
    write_synced(os.path.join(directory, COMMIT_MARKER), b"rlx_jax")
    entries = {name: FileEntry(**entry) for files in written for name, entry in files.items()}
    other_names = [name for name in files_below(directory) if name not in entries]
    files = entries | manifest.file_digests(directory, other_names)
    step_manifest = Manifest({leaf.name: WeightEntry(leaf.type, None) for leaf in leaves}, files)
    try:
        check_lengths(directory, files)
        _check_metadata(directory, step_manifest)
    except errors.RlxError as cause:
        raise errors.SaveFailedError(
            f"the written files cannot be read back, so the step is not saved: {cause}"
        ) from cause
    # The manifest is written last, as it marks the step as complete.
    write_synced(os.path.join(directory, MANIFEST_NAME), step_manifest.to_json())
    sync(directory)


def read_step_manifest(directory: str) -> Manifest:
    """Return the manifest of a step.

    Raises:
        StorageError: there is none. IntegrityError: it is damaged.
    """
    step_manifest = read_manifest(directory)
    if step_manifest is None:
        raise errors.StorageError(f"{quote(directory)}: no {MANIFEST_NAME}: not a complete step")
    return step_manifest


def check_step(directory: str, step_manifest: Manifest, share: Iterable[str]) -> None:
    """Check the lengths of all files, the digests of the files in `share`, and the metadata of all arrays.

    Raises:
        IntegrityError: files differ from the manifest, or arrays do.
        CheckpointFormatError: shapes or chunks contradict each other.
        PathEscapeError: a file leads out of the directory.
    """
    check_lengths(directory, step_manifest.files)
    manifest.check_files(directory, {name: step_manifest.files[name] for name in share})
    try:
        _check_metadata(directory, step_manifest)
    except errors.CheckpointFormatError as cause:  # the digests match, so the manifest was changed with the files
        raise errors.IntegrityError(f"{cause}; use another step") from cause


def _check_metadata(directory: str, step_manifest: Manifest) -> None:
    """Check names, shapes, dtypes and chunks of the arrays, before native code allocates memory by them."""
    check_weights(OrbaxSource(read_tree(directory)), step_manifest.weights, quote(directory))


def read_arrays(directory: str, like: Sequence[StoredLeaf]) -> list[Any]:
    """Return the leaves of a checked step, with the sharding and type that each has in `like`."""
    import orbax.checkpoint as ocp
    from etils import epath

    on_host = sum(_host_bytes(leaf) for leaf in like)
    limits.check_memory(on_host, f"{quote(directory)}: the part that this process restores into its memory")
    target = {leaf.name: _target(leaf.type, leaf.sharding) for leaf in like}
    try:
        arrays = ocp.StandardCheckpointHandler().restore(epath.Path(directory), args=ocp.args.StandardRestore(target))
    except Exception as cause:
        raise errors.CheckpointFormatError(f"{quote(directory)}: orbax cannot restore it: {quote(cause)}") from cause
    return [leaf.restore(arrays[leaf.name]) for leaf in like]


def _target(type: TensorType, sharding: jax.sharding.Sharding | None) -> Any:
    """Return the restore target for orbax: a `jax.Array` with a sharding, or a NumPy array."""
    if sharding is None:
        return np.broadcast_to(np.zeros((), type.dtype), type.shape)  # takes the memory of one element
    return jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=sharding)


def _host_bytes(leaf: StoredLeaf) -> int:
    """Return the bytes of host memory that a restored leaf takes in this process; 0 on an accelerator."""
    if leaf.sharding is None:
        return leaf.type.nbytes
    devices: set[Any] = leaf.sharding.addressable_devices
    cpu_devices = [device for device in devices if device.platform == "cpu"]
    shard = TensorType(leaf.sharding.shard_shape(leaf.type.shape), leaf.type.dtype)
    return shard.nbytes * len(cpu_devices)


Numbers = bool | int | float | complex
# The name of the leaf of a state that is a single array or number.
ROOT_LEAF = "state"


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of a state: an array, a number of Python or NumPy, or a `jax.ShapeDtypeStruct`."""

    name: str
    value: Any
    type: TensorType

    def snapshot(self) -> Any:
        """Return the array to store: an array on devices itself, and anything else as a copy on the host.

        With several processes, an array local to this one is assumed to be the same in all; it is copied to the host,
        and process 0 stores it.

        Raises:
            RequestError: the leaf is a shape without values.
        """
        if isinstance(self.value, jax.ShapeDtypeStruct):
            raise errors.RequestError(f"leaf {quote(self.name)} has no values, it is {shown(self.value)}; save arrays")
        if isinstance(self.value, jax.Array) and (jax.process_count() == 1 or not self.value.is_fully_addressable):
            return self.value
        return np.array(self.value, self.type.dtype)

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """Return the sharding of the leaf; None on the host, and for an uncommitted array."""
        placed = isinstance(self.value, jax.ShapeDtypeStruct) or (
            isinstance(self.value, jax.Array) and self.value.committed
        )
        sharding: jax.sharding.Sharding | None = self.value.sharding if placed else None
        return sharding

    def restore(self, stored: Any) -> Any:
        """Return the stored value as the type of this leaf: an array on its devices, or a number of its class."""
        if self.sharding is not None:
            return stored
        if isinstance(self.value, jax.Array | jax.ShapeDtypeStruct):
            return jnp.asarray(stored)
        if isinstance(self.value, np.generic):
            return stored[()]
        return type(self.value)(stored.item()) if isinstance(self.value, Numbers) else stored


def named_leaves(tree: Any, subject: str) -> tuple[StoredLeaf, ...]:
    """Return the leaves of a pytree, in its order, named by their dotted paths: `params.embed.weight`, `opt.0.count`.

    Args:
        subject: the tree, for error messages.

    Raises:
        RequestError: there are no leaves; a leaf is no array or number, is traced, or was donated; or two leaves have
            the same name. UnsupportedError: a leaf is a random key or an empty array, or has a dtype, shape or name
            that cannot be stored.
    """
    leaves_by_name: dict[str, StoredLeaf] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or ROOT_LEAF
        where = f"{subject}: leaf {quote(name)}"
        if name in leaves_by_name:
            raise errors.RequestError(f"{where}: two leaves have this name when their paths are dotted; rename one")
        if not is_text(name) or len(name.encode()) > limits.MAX_NAME_BYTES:
            raise errors.UnsupportedError(f"{where}: a name is text of at most {limits.MAX_NAME_BYTES} bytes in UTF-8")
        leaves_by_name[name] = StoredLeaf(name, value, _leaf_type(value, where))
    if not leaves_by_name:
        raise errors.RequestError(f"{subject}: a pytree without leaves: {shown(tree)}; expected arrays or numbers")
    count = len(leaves_by_name)
    limits.check_limit(count, limits.bound("MAX_TENSORS"), f"{subject}: the number of leaves")
    return tuple(leaves_by_name.values())


def _leaf_type(value: Any, where: str) -> TensorType:
    if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and value.is_deleted()):
        raise errors.RequestError(f"{where} has no values: traced, or donated to a jitted call")
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise errors.UnsupportedError(
            f"{where} is a random key; store jax.random.key_data(key), and wrap_key_data it again"
        )
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | Numbers):
        model = "; rlx_jax.save keeps a model" if callable(getattr(value, "param_specs", None)) else ""
        raise errors.RequestError(f"{where}: expected an array or a number, got {shown(value)}{model}")
    array = np.asarray(value) if isinstance(value, Numbers) else value
    try:
        tensor_type = TensorType(tuple(array.shape), as_dtype(array.dtype).newbyteorder("="))
    except (errors.DTypeError, errors.ShapeError) as cause:
        raise errors.UnsupportedError(f"{where} cannot be stored: {cause}") from cause
    if 0 in tensor_type.shape:
        raise errors.UnsupportedError(
            f"{where} has shape {list(tensor_type.shape)}, and orbax stores no empty arrays; leave it out"
        )
    return tensor_type


def check_same_leaves(stored: Mapping[str, TensorType], like: tuple[StoredLeaf, ...], where: str) -> None:
    """Check that a step and `like` have the same names, shapes and dtypes.

    Raises:
        WeightError: lists every leaf that differs.
    """
    expected = {leaf.name: leaf.type for leaf in like}
    if differences := manifest.describe_differences(stored, expected, "the step", "`like`"):
        raise errors.WeightError(f"{where}: {len(differences)} leaves differ from `like`: {listing(differences)}")
