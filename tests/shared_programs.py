"""A program that a test compiles is loaded by the tests after it, in all workers, tiers and runs of a checkout.

JAX's own cache does it, in a directory of pytest's: its keys are the program, the version of jaxlib, devices and flags.
`jax_compilation_cache_dir` stays unset, as it would turn this package's cache off.
"""

import contextlib
import os
import platform
import threading
import time
from pathlib import Path

import jax
from jax._src import compilation_cache

from rlx_jax.compiler import compile_cache

DAYS = 7  # a program that no test has used for so long is removed


class Programs:
    """What JAX asks of a cache. Files appear whole, so workers need no lock."""

    def __init__(self, directory: Path) -> None:
        self._path = directory

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-{platform.node()}"  # machine code is for the processor that it was compiled on

    def get(self, key: str) -> bytes | None:
        """Return a program; None too while this package's cache is on, which cannot store programs that were loaded."""
        if compile_cache._choice.get("directory", os.environ.get(compile_cache.VARIABLE)) != "off":
            return None
        try:
            os.utime(self._file(key))
            return self._file(key).read_bytes()
        except OSError:  # not there, or not readable
            return None

    def put(self, key: str, value: bytes) -> None:
        """Write a program, where that is possible."""
        part = self._path / f"{os.getpid()}-{threading.get_ident()}"
        with contextlib.suppress(OSError):
            part.write_bytes(value)
            part.replace(self._file(key))


def share_programs(directory: Path) -> None:
    """Store the programs of this process in `directory`, and load those that are there."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # small ones are most of them
    compilation_cache._cache, compilation_cache._cache_initialized = Programs(directory), True  # type: ignore[assignment]


def remove_unused(directory: Path) -> None:
    """Remove programs that no test has used for some days."""
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run's, which is renamed or removed
            if time.time() - file.stat().st_mtime > DAYS * 86400:
                file.unlink()
