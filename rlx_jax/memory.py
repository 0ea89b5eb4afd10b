"""Running out of memory, told before it happens where sizes are known, and in our words where they are not."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import jax

from rlx_jax.errors import DeviceOutOfMemoryError


def device_bytes() -> int | None:
    """The memory of the device that JAX computes on, in bytes; None if it is not known."""
    return _device_bytes(jax.config.jax_default_device)  # type: ignore[attr-defined]


@functools.cache
def _device_bytes(chosen: Any) -> int | None:
    device = chosen if chosen is not None else jax.local_devices()[0]
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else host_bytes()


def host_bytes() -> int | None:
    """The memory of this machine, in bytes; None if it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return None


def check_fits(nbytes: int, what: str) -> None:
    """Refuse what cannot fit. XLA:CPU would hand out a broken buffer, and abort the process when it is read.

    Raises:
        DeviceOutOfMemoryError: names both numbers.
    """
    limit = device_bytes()
    if limit is not None and nbytes > limit:
        raise DeviceOutOfMemoryError(f"{what} needs {nbytes:,} bytes, the device has {limit:,}; use smaller sizes")


@contextlib.contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """JAX's own error of a full device as a `DeviceOutOfMemoryError` that says what was being done."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DeviceOutOfMemoryError(f"{what}: {str(error).splitlines()[0]}") from error
