"""Compute a digest of the inputs of a trace, so that a later process with the same digest does not trace again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlx_jax.ir.graph import Value

PACKAGE = __name__.partition(".")[0]
# Packages whose classes are identified by name: the cache key also has the version of each package.
VERSIONED_PACKAGES = (PACKAGE, "builtins", "numpy", "ml_dtypes", "jax")
IMPORT_TIME: float = sys.modules[PACKAGE].IMPORT_TIME


def content_digest(value: Any) -> str | None:
    """Return the SHA-256 of plain data and of dataclasses of this package, by value.

    Return None for any other content, such as a function or an op of the user, because user code has no digest.
    """
    try:
        return _digest(value).hex()
    except TypeError:
        return None


@functools.cache
def source_digest() -> str | None:
    """Return the SHA-256 of the source files of this package, because a checkout has many states of one version.

    Return None if the running code is not this source: there are no files, or they changed after the import.
    """
    sha, root = hashlib.sha256(), Path(__file__).parents[1]
    # `Path.rglob` does not follow links, and a checkout links some packages.
    paths = sorted(Path(base, name) for base, _, names in os.walk(root, followlinks=True) for name in names)
    sources = [path for path in paths if path.suffix == ".py"]
    try:
        for path in sources:
            status = path.stat()
            if max(status.st_mtime, status.st_ctime) > IMPORT_TIME:
                return None
            sha.update(hashlib.sha256(str(path.relative_to(root)).encode()).digest())
            sha.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError:  # a dangling link of an editor, or a deleted file
        return None
    return sha.hexdigest() if sources else None


def _digest(value: Any) -> bytes:
    """Return the SHA-256 of a value with its type. Parts have a fixed length, so that different values differ.

    Raises:
        TypeError: the value has no digest.
    """
    kind = type(value)
    # A class of the user may subclass str or tuple.
    if kind.__module__.partition(".")[0] not in VERSIONED_PACKAGES:
        raise TypeError(kind)
    name = f"{kind.__module__}.{kind.__qualname__}".encode()
    return hashlib.sha256(hashlib.sha256(name).digest() + b"".join(_parts(value))).digest()


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the digests of the parts of a value; raise as `_digest`."""
    if value is None or isinstance(value, bool | int | float | complex | str | enum.Enum):
        yield hashlib.sha256(repr(value).encode(errors="surrogatepass")).digest()
    elif isinstance(value, bytes):
        yield hashlib.sha256(value).digest()
    elif isinstance(value, np.dtype):
        yield from map(_digest, (value.name, value.str, value.itemsize))
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield from map(_digest, (value.dtype, value.shape, value.tobytes()))
    elif isinstance(value, Value):  # without its owner, the builder of a complete graph
        yield from map(_digest, (value.node, value.index))
    elif isinstance(value, tuple | list):
        yield from map(_digest, value)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(_digest, value))
    elif isinstance(value, dict | types.MappingProxyType):
        yield from map(_digest, value.items())
    elif isinstance(value, type | types.FunctionType):
        packages = (PACKAGE, "builtins", "numpy") if isinstance(value, type) else (PACKAGE,)
        is_global = getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
        if value.__module__.partition(".")[0] not in packages or not is_global:
            raise TypeError(value)
        yield hashlib.sha256(f"{value.__module__}.{value.__qualname__}".encode()).digest()
    elif jax.export.is_symbolic_dim(value):
        yield hashlib.sha256(str(value).encode()).digest()
    elif dataclasses.is_dataclass(value) and type(value).__module__.partition(".")[0] == PACKAGE:
        yield from (_digest(getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        raise TypeError(type(value))
