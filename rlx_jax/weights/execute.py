"""Run parameter programs on a weight source, and read them backwards.

Leaves are filled piece by piece: what is on its way, a leaf or the box of one that a device holds, takes itself and one
checkpoint tensor, or the part of one that it needs, of the host's memory.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from rlx_jax.device import check_space, freed
from rlx_jax.errors import WeightError, WeightShapeError, quote
from rlx_jax.ir.checkpoint_tensor import Box, side_by_side, slices
from rlx_jax.ir.packed import PackedSpec, decoded
from rlx_jax.ir.param import Cast, Dequantized, Key, Program, Sliced, Strided, Zeros, boxed, stored_keys
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.ir.weight_reads import WeightSource, as_stored
from rlx_jax.weights.finite import narrowed

HostArray = np.ndarray[Any, Any]
# Threads that read leaves: one alone does not fill the bus to an accelerator.
READERS = 4


def load_leaves(
    leaves: Mapping[str, Program],
    source: WeightSource,
    placement: Mapping[str, Sharding] | Any,
    tell: Callable[[str, int, int], None],
    given_up: threading.Event,
) -> dict[str, jax.Array]:
    """The array of every leaf, several read at a time.

    `placement` is where they go: a device (None: the default one), or a mapping with the sharding of each leaf. Of a
    sharded leaf each box that devices of this process hold is read alone, and once: `boxed` says what it is made of.

    What is on its way takes host memory of at most a tenth of the bytes that this process reads and the largest box.
    `tell` hears ("load", bytes read, bytes in all) after each leaf, in order. Ends early once it is `given_up`.

    Raises:
        LimitError, DeviceOutOfMemoryError: there is no room for them; nothing was read.
        WeightShapeError: a sharding does not divide its leaf evenly.
    """
    plan = {name: _plan(name, program, placement) for name, program in leaves.items()}
    needs = {name: max((bytes_to_fill(share.program) for share in p.shares), default=0) for name, p in plan.items()}
    total, done = sum(p.nbytes for p in plan.values()), 0
    limit = total // 10 + max(needs.values(), default=0)
    _check_space(plan.values(), limit)
    arrays: dict[str, jax.Array] = {}
    pending: dict[str, Future[jax.Array]] = {}

    def collect(room: int) -> None:
        """Wait for leaves, in order, until those on their way take no more than `room` bytes."""
        nonlocal done
        while pending and sum(needs[name] for name in pending) > room:
            name = next(iter(pending))
            arrays[name] = pending.pop(name).result()
            tell("load", done := done + plan[name].nbytes, total)

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        try:
            for name, planned in plan.items():
                collect(limit - needs[name])
                if given_up.is_set():
                    break
                pending[name] = pool.submit(planned.load, source)
            if not given_up.is_set():
                collect(-1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return arrays


class Share(NamedTuple):
    """What is read once of a leaf: the program of a box, and the devices that hold it; None: the default one."""

    program: Program
    devices: tuple[Any, ...]


class Filling(NamedTuple):
    """How a leaf is loaded: what of it is read here, and its sharding, if it has one."""

    type: TensorType
    shares: tuple[Share, ...]
    sharding: Sharding | None

    @property
    def nbytes(self) -> int:
        """What is read: replicas share one read."""
        return sum(share.program.type.nbytes for share in self.shares)

    def load(self, source: WeightSource) -> jax.Array:
        """The array. Its shares are read and put in place one after the other."""
        if self.sharding is None:
            ((program, (device,)),) = self.shares
            return load_leaf(program, source, device)
        held: list[jax.Array] = []
        for program, devices in self.shares:
            homes = [SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind) for device in devices]
            values = _value(program, source)
            if isinstance(program, Key | Sliced) and devices[0].platform == "cpu":
                values = values.copy()  # it may be the caller's memory, which JAX would share where it is aligned
            first = jax.device_put(values, homes[0])
            held += [first.block_until_ready(), *(jax.device_put(first, home) for home in homes[1:])]
        shape, dtype = self.type.shape, jax.dtypes.canonicalize_dtype(self.type.dtype)
        leaf: jax.Array = jax.make_array_from_single_device_arrays(shape, self.sharding, held, dtype=dtype)
        return leaf.block_until_ready()


def _plan(name: str, program: Program, placement: Mapping[str, Sharding] | Any) -> Filling:
    """How a leaf is loaded."""
    if not isinstance(placement, Mapping):
        return Filling(program.type, (Share(program, (placement,)),), None)
    sharding, shape = placement[name], program.type.shape
    try:
        sharding.shard_shape(shape)
    except ValueError as cause:
        raise WeightShapeError(
            f"leaf {quote(name)}: {program.type} is not divided evenly by {sharding}; pad it or shard another axis"
        ) from cause
    boxes: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        edges = (part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        boxes.setdefault(tuple(edges), []).append(device)
    shares = (Share(boxed(program, box), tuple(devices)) for box, devices in boxes.items())
    return Filling(program.type, tuple(shares), sharding)


def _check_space(plans: Iterable[Filling], on_host: int) -> None:
    """Whether each device has room for its shares, and the host for what it holds meanwhile."""
    held: Counter[Any] = Counter()
    for plan in plans:
        for share in plan.shares:
            held.update(dict.fromkeys(share.devices, share.program.type.nbytes))
    check_space(max(held.values(), default=0), "the weights", on_host, together=held.total())


def bytes_to_fill(program: Program) -> int:
    """What a leaf needs of the host's memory while it is filled: itself, and the largest of what it is made of.

    Of a packed tensor that is its bytes and, as float32, the numbers that are decoded from them; of a step that cannot
    fill its parts in place, their values.
    """
    return program.type.nbytes + (0 if isinstance(program, Key | Sliced) else _beside(program))


def _beside(program: Program) -> int:
    """The bytes that `fill` takes beside what it fills."""
    if isinstance(program, Key | Sliced):
        return program.type.nbytes
    if program.in_place:
        return max((_beside(part) for part in program.parts), default=0)
    values = {Dequantized: 4 * program.type.size, Cast: program.type.nbytes, Zeros: program.type.nbytes}
    made = sum(_beside(p) + (0 if isinstance(p, Key | Sliced | Dequantized) else p.type.nbytes) for p in program.parts)
    return made + values.get(type(program), 0)


def load_leaf(program: Program, source: WeightSource, device: Any = None) -> jax.Array:
    """The leaf's array, there on `device` (None: the default one)."""
    with jax.default_device(device):
        if isinstance(program, Key | Sliced):
            leaf = jnp.array(_read(program, source))  # a copy: jnp.asarray may share the caller's memory
        else:
            leaf = jnp.asarray(_filled(program, source))
        return leaf.block_until_ready()


def fill(out: HostArray, program: Program, source: WeightSource) -> None:
    """Write the program's value into `out`, a view of the right shape in the leaf's dtype."""
    if isinstance(program, Key | Sliced | Dequantized):
        out[...] = _read(program, source)
    elif isinstance(program, Cast):
        out[...] = _rounded(_value(program.of, source), program, out.dtype, source)
    elif program.in_place:
        for part, view in zip(program.parts, program.cut(out), strict=True):
            fill(view, part, source)
    else:
        out[...] = program.join(*(_value(part, source) for part in program.parts))


def _value(program: Program, source: WeightSource) -> HostArray:
    """The program's value: what the source gives, or a new array."""
    return _read(program, source) if isinstance(program, Key | Sliced | Dequantized) else _filled(program, source)


def _filled(program: Program, source: WeightSource) -> HostArray:
    out = np.empty(program.type.shape, program.type.dtype)
    fill(out, program, source)
    return out


def read_numbers(key: str, source: WeightSource) -> HostArray:
    """The tensor under a key; of a packed one the numbers."""
    spec = source.spec(key)
    if not isinstance(spec, PackedSpec):
        return source.read(key)
    return _read(as_stored(key, spec, f"weight {quote(key)} ({source.where(key)})"), source)


def _read(stored: Key | Sliced | Dequantized, source: WeightSource) -> HostArray:
    """What is stored, decoded if it is packed."""
    if isinstance(stored, Dequantized):
        numbers: HostArray = decoded(_read(stored.of, source), stored.scheme)
        return numbers if numbers.dtype == stored.dtype else _rounded(numbers, stored, stored.dtype, source)
    key = stored.stored
    data = source.read(key.key, _index(stored))
    if not isinstance(data, np.ndarray) or data.dtype != key.type.dtype:
        got = data.dtype if isinstance(data, np.ndarray) else type(data).__name__
        raise WeightError(
            f"weight {key.key!r} ({source.where(key.key)}): read() gives {got}, expected a NumPy array of {key.type}"
        )
    if data.shape != stored.type.shape:
        raise WeightShapeError(
            f"weight {key.key!r} ({source.where(key.key)}) was {stored.type} when the flow was built, is {data.shape} "
            "now"
        )
    return data


def _index(stored: Key | Sliced) -> tuple[slice, ...] | None:
    """Where it stands in its tensor, as `WeightSource.read` takes it: None for all, no axes behind the last one cut."""
    edges = zip(stored.place, stored.stored.type.shape, strict=True)
    index = [slice(None) if edge == (0, size) else slice(*edge) for edge, size in edges]
    while index and index[-1] == slice(None):
        index.pop()
    return tuple(index) or None


def _rounded(data: HostArray, program: Program, dtype: np.dtype[Any], source: WeightSource) -> HostArray:
    """A value of stored numbers as `dtype`; floats that only the wider type can hold become infinite, with a warning.

    Raises:
        WeightError: integers that the narrower type cannot hold.
    """
    key = next(stored_keys(program), None)
    if key is None:  # a device's part of a padded leaf may be padding alone
        return data.astype(dtype)
    where = f"weight {quote(key.key)} ({source.where(key.key)})"
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if data.size and (data.min() < info.min or data.max() > info.max):
            raise WeightError(f"{where}: values {data.min()} … {data.max()} do not fit {short_name(dtype)}")
    return narrowed(data, dtype, where)


def by_key(leaves: Mapping[Program, jax.Array]) -> dict[str, jax.Array]:
    """Read programs backwards: every checkpoint key with its array, in the stored shape and dtype.

    Of a packed tensor these are the logical ones.

    Raises:
        WeightError: the leaves hold a part of a key alone.
    """
    found: dict[str, list[Piece]] = {}
    for program, array in leaves.items():
        for piece in pieces(program, freed(array)):
            found.setdefault(piece.key.key, []).append(piece)
    return {name: _as_stored(whole(held), held[0].key.type.dtype) for name, held in found.items()}


class Piece(NamedTuple):
    """What a leaf holds of a checkpoint key: all of it, or the part that `sliced` says; in the leaf's dtype."""

    key: Key
    values: Any
    sliced: Sliced | Strided | None = None

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it stands in the stored tensor, as an index of NumPy."""
        if isinstance(self.sliced, Strided):
            return self.sliced.index
        return () if self.sliced is None else slices(self.sliced.place)


def pieces(program: Program, leaf: Any) -> Iterator[Piece]:
    """A leaf cut into what it holds of each checkpoint key: stored shapes, the leaf's dtype; views where possible.

    `leaf` is an array of NumPy or JAX, and so are the pieces.
    """
    if isinstance(program, Key):
        yield Piece(program, leaf)
    elif isinstance(program, Dequantized):
        yield from pieces(program.logical, leaf)  # numbers, which are not packed again
    elif isinstance(program, Sliced):
        yield Piece(program.stored, leaf, program)
    elif isinstance(program, Strided):
        (key,) = set(stored_keys(program))
        yield Piece(key, leaf, program)
    else:
        for part, piece in zip(program.parts, program.cut(leaf), strict=True):
            yield from pieces(part, piece)


def whole(held: Sequence[Piece]) -> Any:
    """The values of one key, of which each piece holds all or a part.

    Raises:
        WeightError: something is in no piece; names the key and what there is.
    """
    for piece in held:
        if piece.sliced is None:
            return piece.values
    if all(isinstance(piece.sliced, Strided) for piece in held):
        return _interleaved(held)
    parts = {p.sliced.place: p for p in reversed(held) if isinstance(p.sliced, Sliced)}
    key, ordered = held[0].key, [parts[place] for place in sorted(parts)]
    axis = side_by_side(key.type.shape, list(parts))
    if axis is None:
        raise _not_all(key, held)
    values = [part.values for part in ordered]
    join = np.concatenate if all(isinstance(v, np.ndarray) for v in values) else jnp.concatenate
    return join(values, axis)


def _interleaved(held: Sequence[Piece]) -> Any:
    """`whole` of parts that stand between each other."""
    found = [(piece.sliced, piece) for piece in reversed(held) if isinstance(piece.sliced, Strided)]
    parts = {(part.axis, part.step, part.start): piece for part, piece in found}
    key, ((axis, step, _), *_) = held[0].key, parts
    if set(parts) != {(axis, step, start) for start in range(step)}:
        raise _not_all(key, held)
    values = [parts[axis, step, start].values for start in range(step)]
    stack = np.stack if all(isinstance(v, np.ndarray) for v in values) else jnp.stack
    return stack(values, axis + 1).reshape(key.type.shape)


def _not_all(key: Key, held: Sequence[Piece]) -> WeightError:
    there = ", ".join(sorted({str(part.sliced) for part in held}))
    return WeightError(f"weight {quote(key.key)} is {key.type}, and the model's parts are not all of it: {there}")


def _as_stored(value: Any, dtype: np.dtype[Any]) -> Any:
    if value.dtype == dtype:
        return value
    wide = dtype.itemsize == 8 and not isinstance(value, jax.core.Tracer)
    return (np.asarray(value) if wide else value).astype(dtype)  # JAX has no 64-bit types by default, NumPy does
