"""Run parameter programs on a weight source, and read them backwards.

Leaves are filled piece by piece: a leaf on its way holds itself and one checkpoint tensor of the host's memory.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import RlxNumericsWarning, WeightDTypeError, WeightShapeError, quote
from rlx_jax.ir.param import Cast, Concat, Key, Program, Stack, Transposed, WeightSource, stored_keys, widens
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.weights.finite import all_finite

HostArray = np.ndarray[Any, Any]
READERS = 4
"""Threads that read leaves: one alone does not fill the bus to an accelerator."""


def load_leaves(
    leaves: Mapping[str, Program],
    source: WeightSource,
    device: Any,
    tell: Callable[[str, int, int], None],
    given_up: threading.Event,
) -> dict[str, jax.Array]:
    """The array of every leaf on `device` (None: the default one), several read at a time.

    Leaves that are on their way take host memory of at most a tenth of the model's bytes and the largest leaf. `tell`
    hears ("load", bytes read, bytes in all) after each, in order. Ends early once it is `given_up`.
    """
    sizes = {name: program.type.nbytes for name, program in leaves.items()}
    needs = {name: bytes_to_fill(program) for name, program in leaves.items()}
    total, done = sum(sizes.values()), 0
    limit = total // 10 + max(needs.values(), default=0)
    arrays: dict[str, jax.Array] = {}
    pending: dict[str, Future[jax.Array]] = {}

    def collect(room: int) -> None:
        """Wait for leaves, in order, until those on their way take no more than `room` bytes."""
        nonlocal done
        while pending and sum(needs[name] for name in pending) > room:
            name = next(iter(pending))
            arrays[name] = pending.pop(name).result()
            tell("load", done := done + sizes[name], total)

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        try:
            for name, program in leaves.items():
                collect(limit - needs[name])
                if given_up.is_set():
                    break
                pending[name] = pool.submit(load_leaf, program, source, device)
            if not given_up.is_set():
                collect(-1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return arrays


def bytes_to_fill(program: Program) -> int:
    """What a leaf needs of the host's memory while it is filled: itself, and the largest tensor it is made of."""
    if isinstance(program, Key):
        return program.type.nbytes
    return program.type.nbytes + max((key.type.nbytes for key in stored_keys(program)), default=0)


def load_leaf(program: Program, source: WeightSource, device: Any = None) -> jax.Array:
    """The leaf's array, there on `device` (None: the default one)."""
    with jax.default_device(device):
        match program:
            case Key():
                leaf = jnp.array(_read(program, source))  # a copy: jnp.asarray may share the caller's memory
            case _:
                out = np.empty(program.type.shape, program.type.dtype)
                fill(out, program, source)
                leaf = jnp.asarray(out)
        return leaf.block_until_ready()


def fill(out: HostArray, program: Program, source: WeightSource) -> None:
    """Write the program's value into `out`, a view of the right shape in the leaf's dtype."""
    match program:
        case Key():
            out[...] = _read(program, source)
        case Transposed(of=of):
            fill(out.T, of, source)
        case Cast(of=Key() as key):
            data = _read(key, source)
            if out.dtype.kind in "iu":
                _check_range(data, out.dtype, key, source)
            out[...] = _narrowed(data, out.dtype, key, source)
        case Cast(of=of):
            inner = np.empty(of.type.shape, of.type.dtype)
            fill(inner, of, source)
            out[...] = inner.astype(out.dtype)
        case Concat(parts=parts, axis=axis):
            start = 0
            for part in parts:
                size = part.type.shape[axis]
                fill(out[(slice(None),) * axis + (slice(start, start + size),)], part, source)
                start += size
        case Stack(parts=parts):
            for i, part in enumerate(parts):
                fill(out[i, ...], part, source)


def _read(key: Key, source: WeightSource) -> HostArray:
    data = source.read(key.key)
    if not isinstance(data, np.ndarray) or data.dtype != key.type.dtype:
        got = data.dtype if isinstance(data, np.ndarray) else type(data).__name__
        raise WeightDTypeError(
            f"weight {key.key!r} ({source.where(key.key)}): read() gives {got}, expected a NumPy array of {key.type}"
        )
    if data.shape != key.type.shape:
        raise WeightShapeError(
            f"weight {key.key!r} ({source.where(key.key)}) was {key.type} when the flow was built, is {data.shape} now"
        )
    return data


def _narrowed(data: HostArray, dtype: np.dtype[Any], key: Key, source: WeightSource) -> HostArray:
    """`data` as `dtype`; numbers that only the wider type can hold become infinite, with a warning."""
    with np.errstate(over="ignore"):
        out = data.astype(dtype)
    if is_float(dtype) and not all_finite(out):
        count = int((np.isinf(out) & np.isfinite(data)).sum())
        if count:
            message = f"weight {quote(key.key)} ({source.where(key.key)}): {count} of {data.size} values are over the"
            warnings.warn(
                f"{message} range of {short_name(dtype)} and become infinite", RlxNumericsWarning, stacklevel=2
            )
    return out


def _check_range(data: HostArray, dtype: np.dtype[Any], key: Key, source: WeightSource) -> None:
    info = np.iinfo(dtype)
    if data.size and (data.min() < info.min or data.max() > info.max):
        raise WeightDTypeError(
            f"weight {key.key!r} ({source.where(key.key)}): values {data.min()} … {data.max()} do not fit {dtype}"
        )


def by_key(leaves: Mapping[Program, jax.Array]) -> dict[str, jax.Array]:
    """Read programs backwards: every checkpoint key with its array, in the stored shape and dtype."""
    found: dict[str, jax.Array] = {}
    for program, array in leaves.items():
        for key, value in pieces(program, array):
            if key.key not in found:
                found[key.key] = _as_stored(value, key.type.dtype)
    return found


def pieces(program: Program, leaf: Any) -> Iterator[tuple[Key, Any]]:
    """A leaf cut into what it holds of each checkpoint key: stored shapes, the leaf's dtype; views where possible.

    `leaf` is an array of NumPy or JAX, and so are the pieces.
    """
    match program:
        case Key():
            yield program, leaf
        case Transposed(of=of):
            yield from pieces(of, leaf.T)
        case Cast(of=of):
            yield from pieces(of, leaf)
        case Concat(parts=parts, axis=axis):
            start = 0
            for part in parts:
                size = part.type.shape[axis]
                yield from pieces(part, leaf[(slice(None),) * axis + (slice(start, start + size),)])
                start += size
        case Stack(parts=parts):
            for i, part in enumerate(parts):
                yield from pieces(part, leaf[i])


def _as_stored(value: Any, dtype: np.dtype[Any]) -> Any:
    if value.dtype == dtype:
        return value
    wide = dtype.itemsize == 8 and not isinstance(value, jax.core.Tracer)
    return (np.asarray(value) if wide else value).astype(dtype)  # JAX has no 64-bit types by default, NumPy does


def narrows(program: Program) -> bool:
    """Whether running `program` may lose bits of a float. (Integers are checked against their range when loaded.)"""
    match program:
        case Key():
            return False
        case Transposed(of=of):
            return narrows(of)
        case Cast(of=of, dtype=dtype):
            return narrows(of) or (is_float(of.type.dtype) and not widens(of.type.dtype, dtype))
        case Concat(parts=parts) | Stack(parts=parts):
            return any(narrows(part) for part in parts)
