"""This module writes the kernels of a trace in the Trace Event Format of Chrome, which Perfetto reads."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlx_jax.dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """One execution of a kernel.

    Attributes:
        row: the names of the device and of its stream, or thread of a CPU, and the number of that stream or thread:
            several threads may have the same name.
        name: the name of the HLO instruction.
        start, seconds: seconds since the start of the trace, and how long it ran.
        program, path, primitive: its program, the path of its block, and its JAX primitive, as in `BlockTimes`.
    """

    row: tuple[str, str, int]
    name: str
    start: float
    seconds: float
    program: str
    path: str
    primitive: str


def trace_json(executions: Sequence[Execution], device: str, runs: int) -> str:
    """Return executions as a JSON object: complete events ("X") in microseconds, one process for each device and one
    thread for each of its streams, which metadata events ("M") name."""
    rows = sorted({execution.row for execution in executions})
    processes = {name: number for number, name in enumerate(dict.fromkeys(name for name, _, _ in rows), 1)}
    threads = {row: number for number, row in enumerate(rows, 1)}
    names = [("process_name", pid, 0, name or device) for name, pid in processes.items()]
    names += [("thread_name", processes[row[0]], tid, row[1] or "kernels") for row, tid in threads.items()]
    events: list[dict[str, object]] = [
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}} for kind, pid, tid, name in names
    ]
    events += [
        {
            "ph": "X", "name": each.name, "cat": each.program or each.path, "pid": processes[each.row[0]],
            "tid": threads[each.row], "ts": 1e6 * each.start, "dur": 1e6 * each.seconds,
            "args": {"program": each.program, "block": each.path, "primitive": each.primitive},
        }
        for each in executions
    ]  # fmt: skip
    data = {"displayTimeUnit": "ns", "otherData": {"device": device, "runs": runs}, "traceEvents": events}
    return json.dumps(data, ensure_ascii=False, allow_nan=False)
