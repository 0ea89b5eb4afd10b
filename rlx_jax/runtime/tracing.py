"""A run under `jax.profiler`: which kernels ran, of which program, and when."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, UnsupportedError, first_line

MARK = "rlx_jax.profile"
"""What stands in the trace around the run."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: when it began and ended, in nanoseconds of the trace; the program it is of, by the number and the
    name that XLA gave that, and its instruction there."""

    start: float
    end: float
    program: int
    module: str
    instruction: str


@dataclass(frozen=True)
class Trace:
    """What ran from `start` to `end`, in nanoseconds; `devices` of them."""

    start: float
    end: float
    devices: int
    kernels: tuple[Kernel, ...]


def trace_of(run: Callable[[], Any]) -> Trace:
    """Run it, and wait for what it returns.

    Raises:
        RequestError: a trace is being taken already. UnsupportedError: this device's traces name no kernels.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a call of every Python function would take longer than most kernels
    with tempfile.TemporaryDirectory(prefix="rlx_jax-profile-") as directory:
        try:
            jax.profiler.start_trace(directory, profiler_options=options)
        except RuntimeError as error:
            raise RequestError(f"profile: {first_line(error)}; one trace at a time") from error
        try:
            with jax.profiler.TraceAnnotation(MARK):
                jax.block_until_ready(run())
        finally:
            jax.profiler.stop_trace()
        (file,) = Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # Types of jaxlib 0.11 warn when Python 3.12 makes them, and where that is an error the process ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            return read_trace(jax.profiler.ProfileData.from_file(str(file)))


def read_trace(data: Any) -> Trace:
    """The kernels of a `jax.profiler.ProfileData` in what is marked."""
    events = list(_events(data))
    start, end = next((e.start_ns, e.start_ns + e.duration_ns) for e, _ in events if e.name == MARK)
    kernels, devices = [], set()
    for event, stats in events:
        first, last = max(event.start_ns, start), min(event.start_ns + event.duration_ns, end)
        if "hlo_op" in stats and first < last:
            number, module = int(stats.get("program_id", 0)), str(stats.get("hlo_module", ""))
            # Of a CUDA graph the trace names the whole, and the event the kernel.
            name = str(stats["hlo_op"])
            name = event.name if name.startswith("command_buffer") else name
            kernels.append(Kernel(first, last, number, module, name))
            devices.add(stats.get("device_ordinal", 0))
    if not kernels:
        raise UnsupportedError(
            f"profile: the trace of {running_device().name} names no kernel of a compiled program; jax.profiler.trace "
            "writes what there is, for xprof"
        )
    return Trace(start, end, len(devices), tuple(kernels))


def _events(data: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                yield event, {name: value for name, value in event.stats if name is not None}
