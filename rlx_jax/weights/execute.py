"""Run parameter programs: from checkpoint tensors to parameters. `inverse` goes back.

A leaf is a parameter of the compiled model. Leaves are loaded one box at a time, a box being the part of a leaf on one
device. A box in transfer takes host memory for itself and for one checkpoint tensor, or the part of it that it needs.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from rlx_jax.device import check_total_memory, is_starting, num_cpus
from rlx_jax.errors import WeightError, WeightShapeError, quote
from rlx_jax.io import limits
from rlx_jax.io.ggml import BLOCKS, BlockArrays
from rlx_jax.ir import param
from rlx_jax.ir.boxes import Box, box_shape
from rlx_jax.ir.checkpoint_tensor import steps
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.packed_values import decode_on_host, decode_packed
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.ir.weight_reads import WeightSource, source_program
from rlx_jax.weights.format import narrow_values
from rlx_jax.weights.views import HostArray, SourceView, index_box, read_into, reads_into

_ALIGNMENT = 64  # XLA on a CPU uses host memory of this alignment without a copy
_LARGE_PAGE = 2**21  # bytes of a page that costs one fault
_PIECE_BYTES = 2**26  # bytes of memory that arrays of packed weights share, fewer if a model has fewer
# Threads that read leaves, and as many that transfer them: a single one does not saturate the bus to an accelerator.
READERS = 4
READ_AHEAD_BYTES = 2**32  # of leaves that are read while a device starts
_thread = threading.local()


def load_leaves(
    leaves: Mapping[str, param.Program], source: WeightSource, placement: Mapping[str, Sharding] | Any,
    report_progress: Callable[[str, int, int], None], cancelled: threading.Event,
) -> dict[str, jax.Array]:  # fmt: skip
    """Load every leaf, several at a time, and return the arrays by name.

    Leaves in transfer take host memory of at most a tenth of the bytes that this process reads, plus the largest box;
    while an accelerator starts, of up to `READ_AHEAD_BYTES`, and at most a quarter of the free memory.

    Args:
        leaves: the program of each leaf.
        source: the checkpoint to read from.
        placement: a device (None: the default one), or a mapping with the sharding of each leaf. Each box of a sharded
            leaf that devices of this process hold is read separately, and once; `select_box` gives its program.
        report_progress: progress callback, called with ("load", bytes read, total bytes) after each leaf, in order.
        cancelled: once set, loading ends early, and the result is incomplete.

    Raises:
        LimitError, DeviceOutOfMemoryError: there is not enough memory; nothing was read.
        WeightShapeError: a sharding does not split its leaf evenly.
    """
    plan = {name: _plan(name, program, placement) for name, program in leaves.items()}
    # The arrays of a packed parameter are read together, as files have them in the same blocks.
    groups: dict[Any, dict[str, LoadPlan]] = {}
    for name, program in leaves.items():
        groups.setdefault(param.packed_parameter(program) or name, {})[name] = plan[name]
    needs = [_host_bytes(group.values()) for group in groups.values()]
    total, done, in_transfer = sum(p.nbytes for p in plan.values()), 0, 0
    limit = total // 10 + max(needs, default=0)
    _check_space(plan.values(), limit)
    moves = not isinstance(placement, Mapping) and not _is_host(placement)
    free = (limits.available_bytes() or 0) * min(25, limits.MAX_MEMORY_PERCENT) // 100
    limit_at_start = max(limit, min(READ_AHEAD_BYTES, free)) if moves else limit
    arrays: dict[str, Any] = {}
    pending: deque[tuple[int, int, Future[dict[str, Any]]]] = deque()

    def collect(max_bytes: int) -> None:
        """Wait for leaves, in order, until the pending ones take at most `max_bytes`."""
        nonlocal done, in_transfer
        while pending and in_transfer > max_bytes:
            need, nbytes, future = pending.popleft()
            arrays.update(future.result())
            in_transfer -= need
            report_progress("load", done := done + nbytes, total)

    threads = min(READERS, num_cpus())
    with ThreadPoolExecutor(threads) as readers, ThreadPoolExecutor(threads) as movers:
        try:
            for need, group in zip(needs, groups.values(), strict=True):
                # Wait first, so that the next leaf fits under the limit as well.
                collect((limit_at_start if is_starting() else limit) - need)
                if cancelled.is_set():
                    break
                nbytes = sum(planned.nbytes for planned in group.values())
                read = readers.submit(_load_group, group, source, min(_PIECE_BYTES, total))
                pending.append((need, nbytes, movers.submit(_move, read, placement) if moves else read))
                in_transfer += need
            if not cancelled.is_set():
                collect(-1)  # below 0, so that empty leaves are awaited too
        finally:
            for pool in (readers, movers):  # without what waits, if loading failed or was cancelled
                pool.shutdown(wait=False, cancel_futures=True)
    if moves or isinstance(placement, Mapping):
        return arrays
    return dict(zip(arrays, _to_device([*arrays.values()], placement), strict=True))  # in one call, which costs less


def _move(read: Future[dict[str, Any]], device: Any) -> dict[str, Any]:
    """Return the arrays of leaves on a device, once they have been read and transferred."""
    arrays = read.result()
    return dict(zip(arrays, _to_device([*arrays.values()], device), strict=True))


def _load_group(group: Mapping[str, LoadPlan], source: WeightSource, piece_bytes: int) -> dict[str, Any]:
    """Return the arrays of leaves that are read together: NumPy's, and of sharded leaves JAX's."""
    device = next(iter(group.values())).device
    if not _is_host(device):
        gc.collect(0)  # JAX frees host memory that has been transferred
    if len(group) == 1:
        return {name: planned.load(source) for name, planned in group.items()}
    views: list[tuple[HostArray, param.Program]] = []
    if all(planned.sharding is None for planned in group.values()):
        # Arrays that are transferred do not share memory: each is freed alone.
        arrays = _new_arrays([planned.type for planned in group.values()], piece_bytes if _is_host(device) else 0)
        outs = dict(zip(group, arrays, strict=True))
        views = [part for name, planned in group.items() for part in _parts(outs[name], planned.program)]
    if not views or not all(isinstance(part, param.BlockArray) for _, part in views):
        source = ReadOnce(source)
        return {name: planned.load(source) for name, planned in group.items()}
    views_by_blocks: dict[param.Key | param.Sliced, list[tuple[HostArray, param.BlockArray]]] = {}
    for view, part in views:
        assert isinstance(part, param.BlockArray)
        views_by_blocks.setdefault(part.of, []).append((view, part))
    for blocks, block_views in views_by_blocks.items():
        _split(blocks, block_views, source)
    return outs


def _parts(out: HostArray, program: param.Program) -> Iterator[tuple[HostArray, param.Program]]:
    """Yield the programs that fill parts of an array in place, and these parts."""
    if isinstance(program, param.Key | param.Sliced | param.Dequantized) or not program.splits_to_views:
        yield out, program
    else:
        for part, view in zip(program.parts, program.split(out), strict=True):
            yield from _parts(view, part)


def _split(
    blocks: param.Key | param.Sliced, arrays: Sequence[tuple[HostArray, param.BlockArray]], source: WeightSource
) -> None:
    """Read blocks of bytes and write the arrays in them, each to its place."""
    target = None
    if all(out.flags.c_contiguous for out, _ in arrays):
        outs = [(array.array, out) for out, array in arrays]
        target = BlockArrays(BLOCKS[arrays[0][1].scheme], blocks.type.shape, outs)
    data = read_into(source, blocks.source_key.key, _index(blocks), target)
    if target is not None and target.filled:
        return
    data = _check_stored(data, blocks, source)
    for out, array in arrays:
        out[...] = array.join(data)


def _host_bytes(plans: Collection[LoadPlan]) -> int:
    """Return the bytes of host memory to load leaves that are read together, one after another."""
    reads = [[host_bytes_to_load(shard_read.program) for shard_read in plan.shard_reads] for plan in plans]
    # What several leaves need is read once and retained.
    retained = sum(map(sum, reads)) if len(plans) > 1 else 0
    return retained + max((max(needs, default=0) for needs in reads), default=0)


class ReadOnce(SourceView):
    """The weights of `source`, each part of which is read once and retained."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._values: dict[tuple[str, str], HostArray] = {}

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        entry = key, repr(index)
        if entry not in self._values:
            self._values[entry] = self.source.read(key, index)
        return self._values[entry]


class ShardRead(NamedTuple):
    """A part of a leaf that is read once: the program of a box, and the devices that hold it (None: the default)."""

    program: param.Program
    devices: tuple[Any, ...]


class LoadPlan(NamedTuple):
    """How a leaf is loaded: its type, the shares that this process reads, and its sharding, if it has one."""

    type: TensorType
    shard_reads: tuple[ShardRead, ...]
    sharding: Sharding | None

    @property
    def program(self) -> param.Program:
        """Return the program that reads the only share."""
        return _as_stored_arrays(self.shard_reads[0].program)

    @property
    def device(self) -> Any:
        """Return the device of the only share."""
        return self.shard_reads[0].devices[0]

    @property
    def nbytes(self) -> int:
        """Return how many bytes are read: replicas share one read."""
        return sum(shard_read.program.type.nbytes for shard_read in self.shard_reads)

    def load(self, source: WeightSource) -> Any:
        """Return the leaf's array: NumPy's without a sharding. Shares are read and transferred one after the other, to
        limit host memory."""
        if self.sharding is None:
            ((program, (device,)),) = self.shard_reads
            return _read_own(program, source, device)
        shards: list[jax.Array] = []
        for program, devices in self.shard_reads:
            shardings = [SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind) for device in devices]
            shard = jax.device_put(_read_own(program, source, devices[0]), shardings[0])
            shards += [shard.block_until_ready(), *(jax.device_put(shard, target) for target in shardings[1:])]
        shape, dtype = self.type.shape, jax.dtypes.canonicalize_dtype(self.type.dtype)
        leaf: jax.Array = jax.make_array_from_single_device_arrays(shape, self.sharding, shards, dtype=dtype)
        return leaf.block_until_ready()


def _plan(name: str, program: param.Program, placement: Mapping[str, Sharding] | Any) -> LoadPlan:
    """Return how a leaf is loaded: one share without a sharding, else one for each distinct box of this process.

    Raises:
        WeightShapeError: the sharding does not split the leaf evenly.
    """
    if not isinstance(placement, Mapping):
        return LoadPlan(program.type, (ShardRead(program, (placement,)),), None)
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
    shard_reads = (ShardRead(param.select_box(program, box), tuple(devices)) for box, devices in boxes.items())
    return LoadPlan(program.type, tuple(shard_reads), sharding)


def _check_space(plans: Iterable[LoadPlan], on_host: int) -> None:
    """Check that each device has memory for its shares, and the host `on_host` bytes for leaves in transfer."""
    device_bytes: Counter[Any] = Counter()
    for plan in plans:
        for shard_read in plan.shard_reads:
            device_bytes.update(dict.fromkeys(shard_read.devices, shard_read.program.type.nbytes))
    check_total_memory(max(device_bytes.values(), default=0), "the weights", on_host, total_nbytes=device_bytes.total())


def host_bytes_to_load(program: param.Program) -> int:
    """Return the bytes of host memory that loading a leaf takes: the leaf, and the largest temporary to fill it.

    For a packed tensor, the temporary is its bytes and its decoded numbers in float32; for an operation that cannot
    fill its parts in place, it is the values of these parts.
    """
    program = _as_stored_arrays(program)
    return program.type.nbytes + (0 if isinstance(program, param.Key | param.Sliced) else _temporary_bytes(program))


def _as_stored_arrays(program: param.Program) -> param.Program:
    """Return a program that reads the stored arrays of packed parameters."""
    if isinstance(program, param.Stack):
        return program.with_parts(*map(_as_stored_arrays, program.parts))
    return program.stored if isinstance(program, param.PackedArray) else program


def _temporary_bytes(program: param.Program) -> int:
    """Return the bytes of temporaries that `fill` takes, in addition to the array that it fills."""
    if isinstance(program, param.Key | param.Sliced):
        return program.type.nbytes
    if program.splits_to_views:
        return max((_temporary_bytes(part) for part in program.parts), default=0)
    if isinstance(program, param.Dequantized):
        blocks = _blocks_of(program)
        arrays = [array for _, array in program.arrays] + ([] if blocks is None else [blocks])
        return 4 * program.type.size + sum(array.type.nbytes for array in arrays)
    own = program.type.nbytes if isinstance(program, param.Cast | param.Zeros) else 0
    return own + sum(
        _temporary_bytes(p) + (0 if isinstance(p, param.Key | param.Sliced | param.Dequantized) else p.type.nbytes)
        for p in program.parts
    )


def _read_own(program: param.Program, source: WeightSource, device: Any) -> HostArray:
    """Return a leaf's value in memory that the device may use."""
    program = _as_stored_arrays(program)
    if _is_host(device) or not isinstance(program, param.Key | param.Sliced) or reads_into(source):
        return _fill_new(program, source)
    return _read_stored(program, source)  # the source may hold the memory too, which is not the device's


def _is_host(device: Any) -> bool:
    """Return whether a device (None: the default one) is a CPU, on which arrays share the memory of NumPy's."""
    return (device.platform if device is not None else jax.default_backend()) == "cpu"


def _to_device(arrays: Sequence[HostArray], device: Any) -> list[jax.Array]:
    """Return arrays on `device`, once the transfer is complete. JAX on a CPU shares their memory."""
    with jax.default_device(device):
        moved: list[jax.Array] = jax.block_until_ready(jax.device_put(list(arrays), may_alias=True))
    return moved


def fill(out: HostArray, program: param.Program, source: WeightSource) -> None:
    """Write the program's value into `out`, an array or a view with the shape and the dtype of the program's type."""
    for view, part in _parts(out, program):
        if isinstance(part, param.Key | param.Sliced | param.Dequantized):
            data = _read_stored(part, source, view)
            if not np.may_share_memory(data, view):  # else the source has read into it
                view[...] = data
        elif isinstance(part, param.Cast):
            _cast(_evaluate(part.of, source), part, view.dtype, source, view)
        else:
            view[...] = part.join(*(_evaluate(of, source) for of in part.parts))


def _evaluate(program: param.Program, source: WeightSource) -> HostArray:
    """Return the program's value: the array that the source returns, or a new one."""
    if isinstance(program, param.Key | param.Sliced | param.Dequantized):
        return _read_stored(program, source)
    if isinstance(program, param.BlockArray):
        array: HostArray = program.join(_read_stored(program.of, source))
        return array
    return _fill_new(program, source)


def _fill_new(program: param.Program, source: WeightSource) -> HostArray:
    """Return the program's value in a new array, which JAX on a CPU can use without a copy."""
    out = _new_bytes(program.type.nbytes).view(program.type.dtype).reshape(program.type.shape)
    fill(out, program, source)
    return out


def _new_arrays(types: Iterable[TensorType], piece_bytes: int) -> list[HostArray]:
    """Return arrays, not initialized, which share memory with others of this thread so that no page is a small one."""
    arrays = []
    for array_type in types:
        size = -(-array_type.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not hasattr(_thread, "piece") or _thread.piece.size < size:
            _thread.piece = _new_bytes(max(piece_bytes, size))
        raw, _thread.piece = _thread.piece[: array_type.nbytes], _thread.piece[size:]
        arrays.append(raw.view(array_type.dtype).reshape(array_type.shape))
    return arrays


def _new_bytes(count: int) -> HostArray:
    """Return bytes, not initialized, that begin at a boundary of pages if they have several large ones."""
    alignment = _LARGE_PAGE if count >= 2 * _LARGE_PAGE else _ALIGNMENT
    raw = np.empty(count + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


def read_numbers(key: str, source: WeightSource, index: tuple[slice, ...] | None = None) -> HostArray:
    """Return the tensor under a key, or the part that `index` selects as in NumPy; a packed one is decoded."""
    spec = source.spec(key)
    if not isinstance(spec, PackedSpec):
        return source.read(key, index)
    program = source_program(key, spec, f"weight {quote(key)} ({source.where(key)})")
    box, rest = index_box(index, spec.shape, key)
    if 0 in box_shape(box):
        return np.empty(box_shape(box), spec.dtype)[rest]
    part = param.select_box(program, box)
    limits.check_memory(2 * part.type.nbytes, f"the values of weight {quote(key)}")
    return np.ascontiguousarray(_evaluate(part, source)[rest])


def _read_stored(
    stored: param.Key | param.Sliced | param.Dequantized, source: WeightSource, out: HostArray | None = None
) -> HostArray:
    """Return a tensor of the checkpoint or a slice of one, decoded if it is packed; in `out` if the source does that.

    Raises:
        WeightError, WeightShapeError: `read` of the source returns another type than its `spec` declared.
    """
    if isinstance(stored, param.Dequantized):
        blocks = _blocks_of(stored)
        if blocks is not None:
            numbers = decode_packed(_read_stored(blocks, source), stored.scheme)
        else:
            numbers = decode_on_host({name: _evaluate(array, source) for name, array in stored.arrays}, stored.scheme)
        dtype = stored.type.dtype
        return numbers if numbers.dtype == dtype else _cast(numbers, stored, dtype, source)
    return _check_stored(read_into(source, stored.source_key.key, _index(stored), out), stored, source)


def _check_stored(data: HostArray, stored: param.Key | param.Sliced, source: WeightSource) -> HostArray:
    """Return what the source has read, after checking its type. Errors as `_read_stored`."""
    key = stored.source_key
    if not isinstance(data, np.ndarray) or data.dtype != key.type.dtype:
        got = data.dtype if isinstance(data, np.ndarray) else type(data).__name__
        raise WeightError(
            f"weight {key.key!r} ({source.where(key.key)}): read() returns {got}, expected a NumPy array of {key.type}"
        )
    if data.shape != stored.type.shape:
        raise WeightShapeError(
            f"weight {key.key!r} ({source.where(key.key)}) was {stored.type} when the flow was built, is {data.shape} "
            "now"
        )
    return data


def _blocks_of(program: param.Dequantized) -> param.Key | param.Sliced | None:
    """Return the blocks of bytes that contain all arrays of a packed tensor; None if the arrays are stored as such."""
    blocks = {array.of if isinstance(array, param.BlockArray) else None for _, array in program.arrays}
    return blocks.pop() if len(blocks) == 1 else None


def _index(stored: param.Key | param.Sliced) -> tuple[slice, ...] | None:
    """Return the index argument of `WeightSource.read` for a tensor or a slice of one.

    None selects all of the tensor. Axes after the last sliced one are left out.
    """
    edges = zip(stored.source_box, stored.source_key.type.shape, strict=True)
    index = [slice(None) if edge == (0, size) else slice(*edge) for edge, size in edges]
    while index and index[-1] == slice(None):
        index.pop()
    return tuple(index) or None


def _cast(
    data: HostArray, program: param.Program, dtype: np.dtype[Any], source: WeightSource, out: HostArray | None = None
) -> HostArray:
    """Return stored values cast to `dtype`, in `out` if given; floats over its range become infinite, with a warning.

    Raises:
        WeightError: integers that the narrower type cannot hold.
    """
    key = next(param.stored_keys(program), None)
    if key is None:  # a device's box of a padded leaf may be all padding
        return narrow_values(data, dtype, str(program), out)
    where = f"weight {quote(key.key)} ({source.where(key.key)})"
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if data.size and (data.min() < info.min or data.max() > info.max):
            raise WeightError(f"{where}: values {data.min()} … {data.max()} do not fit {short_name(dtype)}")
    return narrow_values(data, dtype, where, out)


def quantization_errors(leaves: Iterable[param.Program], source: WeightSource) -> dict[str, float]:
    """Return the relative error, in the root mean square, of each parameter that is packed while it is loaded."""
    parameters = dict.fromkeys(parameter for leaf in leaves if (parameter := param.packed_parameter(leaf)) is not None)
    errors: dict[str, float] = {}
    for program in parameters:
        for step in steps(program):
            if isinstance(step, param.Quantized):
                original = _evaluate(step.of, source).astype(np.float32)
                change = step.join(original) - original
                size = float(np.linalg.norm(original))
                errors[param.printed_name(step)] = float(np.linalg.norm(change)) / size if size else 0.0
    return errors
