"""Limits for the size of checkpoints and their companion files, and for the use of memory.

Each limit is far above known checkpoints and far below the capacity of a machine. An error names the limit that was
exceeded, such as `limits.MAX_TENSORS`. Limits are looked up when they are applied: to raise one, set it in this module
before opening the file. Rank, dimensions and elements are limited by `rlx_jax.ir.types`.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlx_jax.errors import LimitError

# Bytes of the JSON header of one `.safetensors` file, as in the reference implementation.
MAX_HEADER_BYTES = 100_000_000
# Number of tensors in one checkpoint, all shards together.
MAX_TENSORS = 200_000
# Bytes of one tensor name in UTF-8.
MAX_NAME_BYTES = 1_024
# Number of metadata pairs of a GGUF file.
MAX_METADATA = 65_536
# Bytes of a metadata key and of a tensor's name in a GGUF file, as its specification has them.
MAX_KEY_BYTES = 65_535
MAX_GGUF_NAME_BYTES = 64
# Bytes of one string in the metadata of a GGUF file.
MAX_STRING_BYTES = 64 * 2**20
# Bytes of `model.safetensors.index.json`.
MAX_INDEX_BYTES = 64 * 2**20
# Bytes of the cached file list of a commit of a model on the Hub.
MAX_LISTING_BYTES = 32 * 2**20
# Bytes of `_METADATA` of an Orbax checkpoint, or of `rlx_manifest.json`.
MAX_TREE_BYTES = 64 * 2**20
# Bytes of the manifest of an exported artifact.
MAX_ARTIFACT_MANIFEST_BYTES = 16 * 2**20
# Bytes of the zarr metadata of one array of an Orbax checkpoint.
MAX_ARRAY_METADATA_BYTES = 64 * 2**10
# Number of chunks of one array of an Orbax checkpoint, which has at least one for each device that it was saved from.
MAX_CHUNKS = 2**20
# Bytes of `config.json` and similar files.
MAX_CONFIG_BYTES = 4 * 2**20
# Bytes of one line of a JSON Lines file of prompts or texts.
MAX_LINE_BYTES = 64 * 2**20
# Number of values in one JSON file; a Python object takes twenty times the bytes of its text.
MAX_JSON_VALUES = 2**18
# Nesting depth of objects and arrays in one JSON file.
MAX_JSON_DEPTH = 64
# Digits of a whole number in JSON. (`model_max_length` has 31 in many tokenizer_config.json files.)
MAX_JSON_DIGITS = 100
# Pixels of one input image.
MAX_IMAGE_PIXELS = 2**28
# Pixels of one image after resizing.
MAX_RESIZED_PIXELS = 2**24

# Percentage of the free memory of this machine that a tensor, a model or a request may take.
MAX_MEMORY_PERCENT = 80
_MIN_CHECKED_BYTES = 2**26  # bytes up to which memory is not checked, so that small reads need not open /proc/meminfo


# The maximum of a number, and the name of this limit for users.
SizeLimit = tuple[int, str]


def bound(name: str) -> SizeLimit:
    """Return a limit of this module as it is set now."""
    return globals()[name], f"limits.{name}"


def check_limit(value: int, limit: SizeLimit, subject: str) -> None:
    """Raise `LimitError` if `value` is over a limit."""
    maximum, name = limit
    if value > maximum:
        raise LimitError(f"{subject} is {value}, over the limit {name} = {maximum}")


def check_memory(nbytes: int, subject: str) -> None:
    """Check that `nbytes` are at most `MAX_MEMORY_PERCENT` of the free memory, before they are allocated.

    Raises:
        LimitError: they are more; the message has both numbers.
    """
    free = available_bytes() if nbytes > _MIN_CHECKED_BYTES else None
    if free is not None and nbytes > free * MAX_MEMORY_PERCENT // 100:
        raise LimitError(
            f"{subject} takes {nbytes:,} bytes of memory, and {free:,} are free: over limits.MAX_MEMORY_PERCENT = "
            f"{MAX_MEMORY_PERCENT}"
        )


def available_bytes() -> int | None:
    """Return the memory that is available without swapping, in bytes; None if it is unknown.

    In a container that is at most what its limit leaves, where the cache of files counts as free.
    """
    try:
        with open("/proc/meminfo", "rb") as file:
            free = int(next(line for line in file if line.startswith(b"MemAvailable:")).split()[1]) * 1024
    except (OSError, ValueError, StopIteration):  # not Linux
        return None
    for folder, limit, used in CONTAINER_MEMORY:
        try:
            maximum, in_use = (int(Path(folder, name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            free = min(free, max(maximum - in_use + int(stat["active_file"]) + int(stat["inactive_file"]), 0))
        except (OSError, ValueError, KeyError):  # not a container of this kind, or "max": without a limit
            continue
    return free


# Where Linux shows the memory of a container, by the versions of cgroups: folder, file of the limit, file of the use.
CONTAINER_MEMORY = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def host_bytes() -> int | None:
    """Return the memory of this machine, in bytes; None if it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return None
