"""Find the directory of an Orbax checkpoint that holds the array tree, and read the names of its arrays.

    root/                    of a CheckpointManager: one directory for each step
      12/                    a checkpoint: `_CHECKPOINT_METADATA`, `commit_success.txt`
        default/             an item: `_METADATA` names the leaves of its tree

A checkpoint without a manager is a single step, and may itself be its only item. Only names, shapes and dtypes are
read from these files: handlers that `_CHECKPOINT_METADATA` names are not imported.
"""

from __future__ import annotations

import os
import re
from typing import Any

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import did_you_mean, listing, quote
from rlx_jax.io import limits
from rlx_jax.io.files import list_directory, parse_object, read_small_file

TREE_METADATA = "_METADATA"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
COMMIT_MARKER = "commit_success.txt"
TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})")
_ARRAY_KINDS = {"jax.Array", "np.ndarray", "scalar"}
_NON_ARRAY_KINDS = {"string", "None", "Dict", "List", "Tuple", "NamedTuple"}


@dataclass(frozen=True)
class ArrayTree:
    """One item of a checkpoint. `arrays` maps checkpoint keys to the names of the arrays in the item.

    `ocdbt` and `zarr3` give the storage format.
    """

    directory: str
    arrays: dict[str, str]
    ocdbt: bool
    zarr3: bool
    stores_all_chunks: bool
    """Whether every chunk is stored; otherwise a missing chunk is all zeros."""


def is_orbax(directory: str) -> bool:
    """Whether a directory looks like one that Orbax wrote or began to write."""
    names = list_directory(directory)
    if not names:  # next to finished steps, an empty directory is an unfinished save
        return bool(finished_steps(os.path.dirname(os.path.realpath(directory))))
    if any(TEMPORARY in name for name in (*names, os.path.basename(os.path.realpath(directory)))):
        return True
    if {TREE_METADATA, CHECKPOINT_METADATA, COMMIT_MARKER, "manifest.ocdbt"} & set(names) or _is_old(directory):
        return True
    markers = (TREE_METADATA, CHECKPOINT_METADATA, COMMIT_MARKER)
    return any(os.path.isfile(os.path.join(directory, name, marker)) for name in names for marker in markers)


def _is_old(directory: str) -> bool:
    """Whether a directory has the file of checkpoints from before 2023."""
    return os.path.isfile(os.path.join(directory, "checkpoint"))


def read_tree(directory: str, subtree: str = "") -> ArrayTree:
    """Return the arrays below `subtree` in the item `directory`. Their keys are their dotted paths, without `subtree`.

    Raises:
        CheckpointFormatError: `_METADATA` is malformed.
        DuplicateWeightError: two leaves have the same key.
        MissingWeightError: there is nothing below `subtree`.
        UnsupportedError: a leaf is not an array, empty or text.
    """
    where = quote(os.path.join(directory, TREE_METADATA))
    raw = read_small_file(os.path.join(directory, TREE_METADATA), where, limits.bound("MAX_TREE_BYTES"), _Error)
    content = parse_object(raw, where, _Error)
    leaves = content.get("tree_metadata")
    if not isinstance(leaves, dict):
        raise _Error(f"{where}: tree_metadata: expected an object, found {quote(leaves)}")
    limits.check_limit(len(leaves), limits.bound("MAX_TENSORS"), f"{where}: the number of leaves")
    flags = [_flag(content, name, default, where) for name, default in _FLAGS.items()]
    return ArrayTree(directory, _array_names(leaves, subtree, where), *flags)


_Error = errors.CheckpointFormatError
# Flags of `_METADATA` with their defaults, in the order of the fields of `ArrayTree`.
_FLAGS = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": False}


def _flag(content: dict[str, Any], name: str, default: bool, where: str) -> bool:
    """Return a flag of `_METADATA`."""
    value = content.get(name, default)
    if not isinstance(value, bool):
        raise _Error(f"{where}: {name}: expected true or false, found {quote(value)}")
    return value


def _array_names(leaves: dict[str, Any], subtree: str, where: str) -> dict[str, str]:
    """Return the stored names of the arrays below `subtree`, by key. Errors as `read_tree`."""
    names_by_key: dict[str, str] = {}
    for label, leaf in leaves.items():
        name, kind = _leaf(leaf, f"{where}: {quote(label)}")
        key = key_below(name, subtree)
        if key is None or kind in _NON_ARRAY_KINDS:
            continue
        if kind not in _ARRAY_KINDS:
            raise errors.UnsupportedError(
                f"{where}: {quote(name)} is a {quote(kind)}, not an array; name the part to read with subtree="
            )
        if key in names_by_key:
            raise errors.DuplicateWeightError(
                f"{where}: two leaves have the key {quote(key)} when their paths are dotted"
            )
        names_by_key[key] = name
    if subtree and not names_by_key:
        tops = {_leaf(leaf, where)[0].partition(".")[0] for leaf in leaves.values()}
        hint = did_you_mean(subtree, tops)
        raise errors.MissingWeightError(
            f"{where}: no arrays below {quote(subtree)}; the tree has {listing(sorted(tops))}{hint}"
        )
    return names_by_key


def key_below(name: str, subtree: str) -> str | None:
    """Return the key of a stored name relative to `subtree`; None if the name is not below it.

    >>> key_below("params.w", "params"), key_below("step", "params"), key_below("step", "")
    ('w', None, 'step')
    """
    if not subtree:
        return name
    return name[len(subtree) + 1 :] if name.startswith(f"{subtree}.") else None


def _leaf(leaf: Any, where: str) -> tuple[str, str]:
    """Return the dotted path and the kind of one entry of `tree_metadata`; the kind is "None" if nothing is stored."""
    path = leaf.get("key_metadata") if isinstance(leaf, dict) else None
    value = leaf.get("value_metadata") if isinstance(leaf, dict) else None
    parts = [part.get("key") if isinstance(part, dict) else None for part in path] if isinstance(path, list) else []
    segments = [part for part in parts if isinstance(part, str) and part]
    value = value if isinstance(value, dict) else {}
    kind = value.get("value_type")
    if not segments or len(segments) < len(parts) or not isinstance(kind, str):
        raise _Error(f"{where}: expected key_metadata with names and value_metadata with a value_type")
    name = ".".join(segments)
    kind = "None" if value.get("skip_deserialize") is True else kind
    limits.check_limit(len(name.encode()), limits.bound("MAX_NAME_BYTES"), f"{where}: bytes of the name")
    return name, kind


# -- directories -------------------------------------------------------------------------------


def find_item(directory: str, subtree: str) -> tuple[str, str]:
    """Return the directory of the item that holds the arrays of a checkpoint, and the subtree to read in it.

    Args:
        directory: an item, a checkpoint, or the root of a CheckpointManager, whose latest finished step is used.
        subtree: a dotted path. It may start with the name of an item, and must if several items hold arrays.

    Raises:
        StorageError: the checkpoint was never finished; the message lists finished steps.
        CheckpointFormatError: several items hold arrays, and `subtree` names none.
        UnsupportedError: a format from before 2023.
    """
    names = list_directory(directory)
    if TEMPORARY in os.path.basename(os.path.realpath(directory)):
        raise _incomplete(directory, "a temporary directory of a save that did not finish")
    if TREE_METADATA in names:
        if not _is_committed(directory) and not _is_committed(os.path.dirname(os.path.realpath(directory))):
            raise _incomplete(directory, _NO_MARKER)
        return directory, subtree
    items, steps = _items(directory), finished_steps(directory)
    if items and _is_committed(directory):
        return _choose_item(directory, items, subtree)
    if items and not steps:  # a finished step without items looks like an item of the directory, but is not
        raise _incomplete(directory, _NO_MARKER)
    if _is_old(directory):
        raise errors.UnsupportedError(
            f"{quote(directory)}: a checkpoint from before 2023; save it again with a newer orbax"
        )
    if not steps:
        raise _incomplete(directory, "no finished checkpoint in it")
    return find_item(os.path.join(directory, steps[max(steps)]), subtree)


_NO_MARKER = f"neither {CHECKPOINT_METADATA} nor {COMMIT_MARKER} marks it as finished"


def _choose_item(directory: str, items: list[str], subtree: str) -> tuple[str, str]:
    """Return the item that `subtree` names, or the only one, and the rest of `subtree`."""
    item, _, rest = subtree.partition(".")
    if item in items:
        return os.path.join(directory, item), rest
    if len(items) > 1:
        problem = f"{quote(directory)}: {len(items)} items hold arrays: {listing(items)}"
        raise _Error(f"{problem}; name one with subtree={did_you_mean(item, items)}")
    return os.path.join(directory, items[0]), subtree


def _items(directory: str) -> list[str]:
    """Return the names of the items in a checkpoint, sorted."""
    return sorted(n for n in list_directory(directory) if os.path.isfile(os.path.join(directory, n, TREE_METADATA)))


def _is_committed(directory: str) -> bool:
    """Whether a checkpoint is marked as finished: by a marker file, or by a commit time in its metadata."""
    if os.path.isfile(os.path.join(directory, COMMIT_MARKER)):
        return True
    path = os.path.join(directory, CHECKPOINT_METADATA)
    if not os.path.isfile(path):
        return False
    raw = read_small_file(path, quote(path), limits.bound("MAX_CONFIG_BYTES"), _Error)
    return isinstance(parse_object(raw, quote(path), _Error).get("commit_timestamp_nsecs"), int)


def finished_steps(root: str) -> dict[int, str]:
    """Return the finished steps in the root of a CheckpointManager: number → name of the directory."""
    steps: dict[int, str] = {}
    try:
        names = list_directory(root)
    except errors.StorageError:
        return {}
    for name in names:
        number, path = _STEP.fullmatch(name), os.path.join(root, name)
        if number is None or not os.path.isdir(path):
            continue
        try:
            usable = _is_committed(path) and (bool(_items(path)) or os.path.isfile(os.path.join(path, TREE_METADATA)))
        except errors.RlxError:
            usable = False
        if usable:
            steps[int(number[1])] = name
    return steps


def _incomplete(directory: str, problem: str) -> errors.StorageError:
    """Return the error for an unfinished checkpoint, with the finished steps in it, or else next to it."""
    steps, parent = finished_steps(directory), os.path.dirname(os.path.realpath(directory))
    sibling_steps = {} if steps else finished_steps(parent)
    names = [name for _, name in sorted((steps or sibling_steps).items())]
    where = quote(directory if steps else parent)
    hint = f"; finished steps in {where}: {listing(names)}" if names else "; there are no finished steps next to it"
    return errors.StorageError(f"{quote(directory)}: {problem}{hint}")
