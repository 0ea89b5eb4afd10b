"""`Device`, the facts of an accelerator that compile-time choices read, and checks that arrays fit its memory.

A `Device` comes from the running backend, or from a table by name, and is passed down as a value. No other module
queries JAX for devices, so that a flow planned for an H200 on a laptop compiles to the program that an H200 runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import mmap
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DeviceOutOfMemoryError, ProfileError, did_you_mean, first_line, quote
from rlx_jax.io import limits


@dataclass(frozen=True)
class Cudnn:
    """Limits of cuDNN's attention: short names of dtypes, and head widths up to `width` in steps of `multiple`."""

    dtypes: tuple[str, ...] = ("bf16", "f16")
    width: int = 128
    multiple: int = 8


@dataclass(frozen=True)
class Device:
    """One accelerator, or the host. Unknown facts are None.

    Attributes:
        name: name of the product, such as `h200`; the kind if the product is unknown.
        kind: the platform: `cpu`, `cuda`, `rocm` or `tpu`.
        memory: bytes; for a running device, the bytes that a program may allocate.
        bandwidth: bytes per second of its memory.
        flops: operations per second of dense products in bf16.
        capability: CUDA's compute capability.
        cudnn: limits of its cuDNN, if it has one. jax's CUDA plugin always includes cuDNN.
    """

    name: str
    kind: str
    memory: int | None = None
    bandwidth: float | None = None
    flops: float | None = None
    capability: tuple[int, int] | None = None
    cudnn: Cudnn | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether the kernels of this package were measured on the device."""
        return self.kind == "cuda" and self.capability == HOPPER

    def __str__(self) -> str:
        facts = [self.kind] if self.name != self.kind else []
        facts += [f"{self.memory / 1e9:.0f} GB"] if self.memory else []
        facts += [f"{self.bandwidth / 1e9:,.0f} GB/s"] if self.bandwidth else []
        facts += [f"{self.flops / 1e12:,.0f} TFLOP/s"] if self.flops else []
        return f"{self.name} ({', '.join(facts)})" if facts else self.name


_NO_TRACE = get_opaque_trace_state()
_describing = threading.Lock()
_STARTER = "start of the device"
_ANONYMOUS = re.compile(r"^(\w+)-(\w+) rw-p 0+ 00:00 0 *$", re.MULTILINE)  # lines of memory of no file

# The lowest compute capability with cuDNN's flash attention.
MIN_FLASH_CAPABILITY = (8, 0)


# The compute capability of an H100 and an H200.
HOPPER = (9, 0)


def _cudnn(capability: tuple[int, int] | None) -> Cudnn | None:
    """Return the limits of cuDNN's attention at a compute capability, or None where it has none."""
    if capability is None or capability < MIN_FLASH_CAPABILITY:
        return None
    return Cudnn(width=256) if capability == HOPPER else Cudnn()


# Kinds, and products with the published numbers of their makers, in the variant with the most memory (SXM; the A100
# with 80 GB).
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("cpu", "cpu"),
        Device("cuda", "cuda", cudnn=Cudnn()),  # any that jax still supports and is not too old for it
        Device("rocm", "rocm"),
        Device("tpu", "tpu"),
        Device("a100", "cuda", 80 * 10**9, 2.04e12, 312e12, (8, 0), _cudnn((8, 0))),
        Device("l4", "cuda", 24 * 10**9, 0.30e12, 121e12, (8, 9), _cudnn((8, 9))),
        Device("h100", "cuda", 80 * 10**9, 3.35e12, 989e12, (9, 0), _cudnn((9, 0))),
        Device("h200", "cuda", 141 * 10**9, 4.80e12, 989e12, (9, 0), _cudnn((9, 0))),
        Device("t4", "cuda", 16 * 10**9, 0.32e12, 65e12, (7, 5)),  # its 16-bit dtype is f16
        Device("rtx4090", "cuda", 24 * 10**9, 1.01e12, 165e12, (8, 9), _cudnn((8, 9))),
        Device("b200", "cuda", 180 * 10**9, 8.00e12, 2250e12, (10, 0), _cudnn((10, 0))),
        Device("mi300x", "rocm", 192 * 10**9, 5.30e12, 1307e12),
        Device("tpu_v5e", "tpu", 16 * 10**9, 0.82e12, 197e12),
        Device("tpu_v5p", "tpu", 95 * 10**9, 2.77e12, 459e12),
        Device("tpu_v6e", "tpu", 32 * 10**9, 1.64e12, 918e12),
    )
}

# Words in JAX's `device_kind`, by product. The first product with all words in it wins, so "tpu v5 lite" precedes "tpu
# v5".
DEVICE_KIND_WORDS = {
    **{name: (name,) for name in ("l4", "h200", "b200", "mi300x")},
    "t4": ("tesla", "t4"),
    "rtx4090": ("rtx", "4090"),
    "h100": ("h100", "hbm3"),
    "a100": ("a100", "80gb"),
    "tpu_v5e": ("tpu", "v5", "lite"),
    "tpu_v5p": ("tpu", "v5"),
    "tpu_v6e": ("tpu", "v6", "lite"),
}


def named_device(name: str) -> Device:
    """Return a device by its name in `DEVICES`.

    Raises:
        ProfileError: there is no such device; the message has a suggestion.
    """
    if name in DEVICES:
        return DEVICES[name]
    raise ProfileError(f"there is no device {quote(name)}; there are {', '.join(DEVICES)}{did_you_mean(name, DEVICES)}")


def running_device() -> Device:
    """Return the device that JAX computes on: `jax.default_device` if set, else the first of the default backend."""
    with _describing:
        return _running(default_device())


def default_device() -> Any:
    """Return the device of `jax.default_device`, of a platform's name its first; None if it is not set."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def start_device() -> None:
    """Start the device in a thread: JAX reserves the memory of a GPU at the first copy, and fills a table of it on the
    host, which takes 1 to 2 s, in which the caller can import, plan the program and read weights."""
    device = default_device()

    def copy() -> None:
        with contextlib.suppress(Exception):  # the caller's first use of the device fails as well, and reports it
            with _describing:  # before the copy, during which a device reports nothing
                described = _running(device)
            if described.kind == "cuda" and described.memory:
                size = described.memory // 32
                threading.Thread(target=_ask_for_large_pages, args=(size, _parts_of_memory(size))).start()
            jax.device_put(np.zeros(1, np.float32), device)

    threading.Thread(target=copy, name=_STARTER).start()


def _parts_of_memory(num_bytes: int) -> set[tuple[int, int]]:
    """Return start and size of each part of this process's memory, of no file, with so many bytes; none if unknown."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        places = ([int(place, 16) for place in bounds] for bounds in _ANONYMOUS.findall(file.read()))
        return {(start, end - start) for start, end in places if end - start >= num_bytes}
    return set()


def _ask_for_large_pages(num_bytes: int, others: set[tuple[int, int]]) -> None:
    """Ask Linux for large pages of the table that JAX fills while a GPU starts: 8 bytes for each 256 of its memory.

    Of 3.5 GB that an H200 needs, small pages cost 850,000 faults, two thirds of the time that filling them takes.

    Args:
        num_bytes: its size, or less.
        others: parts of memory that were there before it.
    """
    while is_starting():
        for start, size in _parts_of_memory(num_bytes) - others:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
            return
        time.sleep(0.005)


def is_starting() -> bool:
    """Return whether a device that `start_device` starts is not ready, and has not failed."""
    return any(thread.name == _STARTER for thread in threading.enumerate())


def num_cpus() -> int:
    """Return how many processors this process may run on; without an affinity, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def all_devices() -> list[Any]:
    """Return the devices of the default backend, over all processes."""
    return jax.devices()


@functools.cache
def _running(chosen: Any) -> Device:
    return describe_device(jax.local_devices()[0] if chosen is None else chosen)


_CPU_FIELDS = re.compile(
    r"(?:vendor_id|cpu family|model|stepping|flags|Features|isa|CPU (?:implementer|architecture|variant|part))\s*:.*"
)
_CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def fingerprint() -> str:
    """Return a text of all facts of the backend, its devices and the host that a compiled program depends on."""
    devices = jax.devices()
    backend = f"{devices[0].platform} {devices[0].client.platform_version}"
    cudnn = "" if devices[0].platform == "cpu" else _cudnn_versions()
    return f"{backend}, {sorted({device.device_kind for device in devices})}, {cudnn}, {_processor()}"


def jax_settings() -> tuple[str, ...]:
    """Return every setting of JAX as text. What is traced may depend on some, and releases add more."""
    return tuple(f"{name}={getattr(jax.config, name, None)!r}" for name in sorted(jax.config.values))


def is_tracing() -> bool:
    """Return whether the caller runs in `jax.jit` or another transformation."""
    return bool(get_opaque_trace_state() != _NO_TRACE)


def devices_of(kind: str, ids: list[int]) -> list[Any]:
    """Return the running devices of a platform with these ids, in their order.

    Raises:
        KeyError: no device has such an id.
    """
    by_id = {device.id: device for device in jax.devices(kind)}
    return [by_id[i] for i in ids]


@functools.cache
def _processor() -> str:
    """Return the host's processor, as far as machine code depends on it."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # not Linux
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            facts += _CPU_FIELDS.findall(file.read().partition("\n\n")[0])
    return "\n".join(facts)


@functools.cache
def _cudnn_versions() -> str:
    """Return the installed versions of cuDNN, which the runtime's own version does not show."""
    versions = []
    for name in _CUDNN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(versions)


def describe_device(device: Any) -> Device:
    """Return the `Device` of a `jax.Device`: the facts of its product, with the memory that the runtime reports."""
    kind = str(device.platform)
    if kind == "gpu":
        kind = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    words = device.device_kind.lower().replace("-", " ").split()
    product = next(
        (name for name, product_words in DEVICE_KIND_WORDS.items() if set(product_words) <= set(words)), kind
    )
    result = DEVICES[product] if product in DEVICES and DEVICES[product].kind == kind else Device(kind, kind)
    if kind == "cuda" and result.name == kind:
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
        result = replace(result, capability=capability, cudnn=_cudnn(capability))
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    return replace(
        result, memory=int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else limits.host_bytes()
    )


def to_auto_axes(mesh: Any) -> Any:
    """Return the mesh with axes of type Auto, along which XLA chooses shardings by itself."""
    if isinstance(mesh, AbstractMesh):  # in a plan
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def with_auto_axes(array: Any) -> Any:
    """Return the array with its sharding on Auto mesh axes, so that XLA may choose shardings for its consumers.

    Outside of `jax.jit`, JAX does not slice an array along an axis that is sharded over an Explicit mesh axis.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return array
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    auto = NamedSharding(to_auto_axes(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)
    return jax.device_put(array, auto)


# -- memory checks -----------------------------------------------------------------------------


def check_device_memory(
    nbytes: int, operation: str, advice: Callable[[int], str] = lambda limit: "use smaller sizes"
) -> None:
    """Refuse an allocation larger than the device. XLA:CPU would return an invalid buffer and abort when it is read.

    Args:
        nbytes: bytes to allocate.
        operation: the operation that needs them, for the message.
        advice: function from the device's bytes to the last part of the message.

    Raises:
        DeviceOutOfMemoryError: `nbytes` is larger; the message has both numbers.
    """
    limit = running_device().memory
    if limit is not None and nbytes > limit:
        raise DeviceOutOfMemoryError(f"{operation} needs {nbytes:,} bytes, the device has {limit:,}; {advice(limit)}")


def check_total_memory(nbytes: int, operation: str, on_host: int = 0, total_nbytes: int = 0) -> None:
    """Refuse new arrays that do not fit into the memory of the device and of the host.

    Args:
        nbytes: bytes on the device; on the fullest one, of several.
        operation: the operation that needs them, for the message.
        on_host: bytes of host memory needed to create the arrays.
        total_nbytes: bytes on all devices in total.

    Raises:
        DeviceOutOfMemoryError: the device is smaller. LimitError: over `limits.MAX_MEMORY_PERCENT` of the host's.
    """
    # CPU devices share the host's memory.
    host_bytes = max(nbytes, total_nbytes) if running_device().kind == "cpu" else 0
    limits.check_memory(host_bytes + on_host, operation)
    check_device_memory(nbytes, operation)


@contextlib.contextmanager
def out_of_memory(operation: str, advice: Callable[[], str] = lambda: "use smaller sizes") -> Iterator[None]:
    """Convert JAX's out-of-memory error into a `DeviceOutOfMemoryError` with the operation and advice.

    XLA:GPU also runs out of memory while it compares kernels during compilation, which it reports as `NOT_FOUND`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        size = re.search(r"allocat\w* ([\d.,]+ ?(?:[KMGT]i?B|bytes))", text)
        cause = f"an allocation of {size[1]} failed" if size else first_line(error)
        memory = running_device().memory
        limit = f"; the device has {memory / 2**30:.1f} GiB" if memory else ""
        raise DeviceOutOfMemoryError(f"{operation}: out of memory: {cause}{limit}; {advice()}") from error
