"""Which directory of an orbax checkpoint holds the array tree, and which arrays it names.

    root/                    a CheckpointManager's: one directory for each step
      12/                    a checkpoint: `_CHECKPOINT_METADATA`, `commit_success.txt`
        default/             an item: `_METADATA` names the leaves of its tree

A checkpoint without a manager is a step by itself, and may be its own only item. Only names, shapes
and dtypes are taken from these files: handlers that `_CHECKPOINT_METADATA` names are not imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from rlx_jax.errors import (
    CheckpointFormatError,
    DuplicateWeightError,
    MissingWeightError,
    RlxError,
    StorageError,
    UnsupportedError,
    did_you_mean,
    listing,
    quote,
)
from rlx_jax.io import limits
from rlx_jax.io.files import list_directory, read_whole
from rlx_jax.io.strict_json import parse_object

TREE = "_METADATA"
CHECKPOINT = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})")
_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
_NO_ARRAYS = {"string", "None", "Dict", "List", "Tuple", "NamedTuple"}


@dataclass(frozen=True)
class ArrayTree:
    """One item of a checkpoint. `arrays` maps checkpoint keys to the names that the item stores them under."""

    directory: str
    arrays: dict[str, str]
    ocdbt: bool
    zarr3: bool
    all_chunks: bool
    """Whether every chunk is stored; otherwise a missing one stands for zeros."""


def is_orbax(directory: str) -> bool:
    """Whether a directory looks like something that orbax wrote or began to write."""
    names = list_directory(directory)
    if not names:
        return bool(usable_steps(os.path.dirname(os.path.realpath(directory))))
    if any(TEMPORARY in name for name in (*names, os.path.basename(os.path.realpath(directory)))):
        return True
    if {TREE, CHECKPOINT, COMMITTED, "manifest.ocdbt"} & set(names) or _is_old(directory):
        return True
    markers = (TREE, CHECKPOINT, COMMITTED)
    return any(os.path.isfile(os.path.join(directory, name, marker)) for name in names for marker in markers)


def _is_old(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, "checkpoint"))


def read_tree(directory: str, subtree: str = "") -> ArrayTree:
    """The arrays below `subtree` of the item `directory`. Their keys are their dotted paths, without `subtree`.

    Raises:
        CheckpointFormatError: `_METADATA` is malformed.
        DuplicateWeightError: two leaves have one key.
        MissingWeightError: nothing below `subtree`.
        UnsupportedError: a leaf is neither an array nor empty nor text.
    """
    where = quote(os.path.join(directory, TREE))
    raw = read_whole(os.path.join(directory, TREE), where, limits.MAX_TREE_BYTES, "limits.MAX_TREE_BYTES", _Error)
    content = parse_object(raw, where, _Error)
    leaves = content.get("tree_metadata")
    if not isinstance(leaves, dict):
        raise _Error(f"{where}: tree_metadata: expected an object, found {quote(leaves)}")
    limits.at_most(len(leaves), limits.MAX_TENSORS, "limits.MAX_TENSORS", f"{where}: the number of leaves")
    flags = [_flag(content, name, default, where) for name, default in _FLAGS.items()]
    return ArrayTree(directory, _array_names(leaves, subtree, where), *flags)


_Error = CheckpointFormatError
_FLAGS = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": False}


def _flag(content: dict[str, Any], name: str, default: bool, where: str) -> bool:
    value = content.get(name, default)
    if not isinstance(value, bool):
        raise _Error(f"{where}: {name}: expected true or false, found {quote(value)}")
    return value


def _array_names(leaves: dict[str, Any], subtree: str, where: str) -> dict[str, str]:
    """Keys of the arrays below `subtree`, with their stored names."""
    found: dict[str, str] = {}
    for label, leaf in leaves.items():
        name, kind = _leaf(leaf, f"{where}: {quote(label)}")
        key = below(name, subtree)
        if key is None or kind in _NO_ARRAYS:
            continue
        if kind not in _ARRAYS:
            raise UnsupportedError(
                f"{where}: {quote(name)} is a {quote(kind)}, not an array; name the part to read with subtree="
            )
        if key in found:
            raise DuplicateWeightError(f"{where}: two leaves have the key {quote(key)} when their paths are dotted")
        found[key] = name
    if subtree and not found:
        tops = {_leaf(leaf, where)[0].partition(".")[0] for leaf in leaves.values()}
        hint = did_you_mean(subtree, tops)
        raise MissingWeightError(
            f"{where}: no arrays below {quote(subtree)}; the tree has {listing(sorted(tops))}{hint}"
        )
    return found


def below(name: str, subtree: str) -> str | None:
    """The key that a stored name has below `subtree`; None if it stands elsewhere.

    >>> below("params.w", "params"), below("step", "params"), below("step", "")
    ('w', None, 'step')
    """
    if not subtree:
        return name
    return name[len(subtree) + 1 :] if name.startswith(f"{subtree}.") else None


def _leaf(leaf: Any, where: str) -> tuple[str, str]:
    """Dotted path and kind of one entry of `tree_metadata`; the kind is "None" where nothing is stored."""
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
    limits.at_most(len(name.encode()), limits.MAX_NAME_BYTES, "limits.MAX_NAME_BYTES", f"{where}: bytes of the name")
    return name, kind


# -- directories -------------------------------------------------------------------------------


def find_item(directory: str, subtree: str) -> tuple[str, str]:
    """The item of a checkpoint that holds the arrays, and where in its tree to look.

    Args:
        directory: an item, a checkpoint, or a manager's root, of which the latest finished step counts.
        subtree: a dotted path. It may begin with the name of an item, and must if several items hold arrays.

    Raises:
        StorageError: the checkpoint was never finished; lists the steps that are.
        CheckpointFormatError: several items hold arrays, and `subtree` names none.
        UnsupportedError: a format of before 2023.
    """
    names = list_directory(directory)
    if TEMPORARY in os.path.basename(os.path.realpath(directory)):
        raise _incomplete(directory, "a temporary directory of a save that did not finish")
    if TREE in names:
        if not _is_committed(directory) and not _is_committed(os.path.dirname(os.path.realpath(directory))):
            raise _incomplete(directory, _NO_MARKER)
        return directory, subtree
    items, steps = _items(directory), usable_steps(directory)
    if items and _is_committed(directory):
        return _choose_item(directory, items, subtree)
    if items and not steps:  # a step that is its own only item is no item of the run
        raise _incomplete(directory, _NO_MARKER)
    if _is_old(directory):
        raise UnsupportedError(f"{quote(directory)}: a checkpoint of before 2023; save it again with a newer orbax")
    if not steps:
        raise _incomplete(directory, "no finished checkpoint in it")
    return find_item(os.path.join(directory, steps[max(steps)]), subtree)


_NO_MARKER = f"neither {CHECKPOINT} nor {COMMITTED} says that it was finished"


def _choose_item(directory: str, items: list[str], subtree: str) -> tuple[str, str]:
    first, _, rest = subtree.partition(".")
    if first in items:
        return os.path.join(directory, first), rest
    if len(items) > 1:
        found = f"{quote(directory)}: {len(items)} items hold arrays: {listing(items)}"
        raise _Error(f"{found}; name one with subtree={did_you_mean(first, items)}")
    return os.path.join(directory, items[0]), subtree


def _items(directory: str) -> list[str]:
    return sorted(n for n in list_directory(directory) if os.path.isfile(os.path.join(directory, n, TREE)))


def _is_committed(directory: str) -> bool:
    """Whether a checkpoint says that it was finished."""
    if os.path.isfile(os.path.join(directory, COMMITTED)):
        return True
    path = os.path.join(directory, CHECKPOINT)
    if not os.path.isfile(path):
        return False
    raw = read_whole(path, quote(path), limits.MAX_CONFIG_BYTES, "limits.MAX_CONFIG_BYTES", _Error)
    return isinstance(parse_object(raw, quote(path), _Error).get("commit_timestamp_nsecs"), int)


def usable_steps(root: str) -> dict[int, str]:
    """The finished steps of a manager's directory: number → name."""
    steps: dict[int, str] = {}
    try:
        names = list_directory(root)
    except StorageError:
        return {}
    for name in names:
        number, path = _STEP.fullmatch(name), os.path.join(root, name)
        if number is None or not os.path.isdir(path):
            continue
        try:
            usable = _is_committed(path) and (bool(_items(path)) or os.path.isfile(os.path.join(path, TREE)))
        except RlxError:
            usable = False
        if usable:
            steps[int(number[1])] = name
    return steps


def _incomplete(directory: str, problem: str) -> StorageError:
    """The error for an unfinished checkpoint, with the steps beside and below it that can be used."""
    below, parent = usable_steps(directory), os.path.dirname(os.path.realpath(directory))
    beside = {} if below else usable_steps(parent)
    usable = [name for _, name in sorted((below or beside).items())]
    where = quote(directory if below else parent)
    hint = f"; finished steps in {where}: {listing(usable)}" if usable else "; there are no finished steps beside it"
    return StorageError(f"{quote(directory)}: {problem}{hint}")
