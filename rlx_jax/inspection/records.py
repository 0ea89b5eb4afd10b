"""This module defines `Inspection`, the data that `explain`, the page and comparisons show of one program.

A program is a table of blocks. A block has its MIR ops and its XLA kernels; repeated layers are one block. The records
hold plain values only. `rlx_jax/runtime/` creates them from a program, and `to_json` writes them for the page.
`trace_json` writes single executions of kernels for trace viewers.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence

from rlx_jax.dataclasses import asdict, dataclass, field
from rlx_jax.ir.text import TextTable, scaled_text
from rlx_jax.lowering.inspect.outline import compact

# The widths of the columns of the table of blocks: 80 characters with the gaps.
WIDTHS = (30, 10, 6, 8, 7, 6, 7)
HEAD = ("block", "ms", "time", "roofline", "limit", "FLOPs", "bytes")
# The version of the JSON format: it increases when a field is removed or changes its meaning.
JSON_VERSION = 1


@dataclass(frozen=True)
class KernelEntry:
    """An XLA instruction of a block that runs by itself: a fusion, a product, a copy.

    Attributes:
        name: the name of the HLO instruction.
        opcode: its HLO opcode, such as `fusion`, `dot`, `custom-call`.
        primitive: the JAX primitive of its last op; empty if XLA added the instruction.
        seconds: the measured seconds in one run of the program, all its executions together; None if not measured.
        calls: the number of executions in one run; 0 if not measured.
    """

    name: str
    opcode: str
    primitive: str
    seconds: float | None = None
    calls: int = 0


@dataclass(frozen=True)
class OpEntry:
    """A MIR op of a block, in one layer.

    Attributes:
        name: the id of its node in `model.text("mir")`, such as `%12`.
        text: the op with its attributes, such as `matmul(contract=1)`.
        inputs: the ids of its operands; for a parameter its name.
        result: the types of its results.
        dtype: the dtype of the first result.
        flops, bytes: operations and memory traffic of one execution, as if the op ran alone.
        by: the pass that created it; empty for ops that lowering created.
    """

    name: str
    text: str
    inputs: tuple[str, ...]
    result: str
    dtype: str
    flops: int
    bytes: int
    by: str = ""


@dataclass(frozen=True)
class BlockEntry:
    """A block of a program, or the same block of all repeated layers. Sums are over all layers.

    Attributes:
        path: the block path, with `*` for the layer number of repeated layers: `layers.*.mlp`. In parentheses for time
            that belongs to no block: `(not attributed)`, `(helper functions)`, `(no kernel runs)`.
        op: the HIR block as text, such as `linear+bias`; empty if the block has only tensor ops.
        output: the types of its outputs.
        params: the number of parameter elements.
        param_bytes: the bytes that its parameters take, packed if they are packed.
        scheme: the packed scheme of its parameters, such as `q4_k`; else their dtype; empty without parameters.
        dtype: the dtype of its output, in which it computes.
        sharding: the sharding of its parameters on a mesh; empty on one device.
        flops, bytes: the operations and the memory traffic of a run. `bytes` counts parameters once, and the values
            that the block reads and writes as if it were fused: its operands from other blocks and its results.
        seconds: the time in a run of the program: measured, or estimated as by `plan` if `measured` is false.
        measured: whether `seconds` is measured.
        roofline_seconds: the shortest time that the device's rates allow for `flops` and `bytes`.
        limited_by: `memory` or `compute`, the longer part of the roofline; empty for a block without work.
        implementation: the implementation of attention, products, experts or recurrences; empty without a choice.
        reason: why this implementation, and if a faster one exists, why it is not used.
        layers: the number of layers that this entry describes.
        layer_seconds: the measured seconds of each layer in order; empty if the layers are not measured one by one.
        ops: the MIR ops of one layer.
        kernels: the XLA kernels of all layers, slowest first if measured.
        weight_bytes: the part of `bytes` that is parameters; a block that shares a parameter reads it too.
    """

    path: str
    op: str = ""
    output: str = ""
    params: int = 0
    param_bytes: int = 0
    scheme: str = ""
    dtype: str = ""
    sharding: str = ""
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    measured: bool = False
    roofline_seconds: float = 0.0
    limited_by: str = ""
    implementation: str = ""
    reason: str = ""
    layers: int = 1
    layer_seconds: tuple[float, ...] = ()
    ops: tuple[OpEntry, ...] = ()
    kernels: tuple[KernelEntry, ...] = ()
    weight_bytes: int = 0

    @property
    def roofline_share(self) -> float:
        """Return the roofline's time as a share of `seconds`: 1 is the best that the device can do; 0 without time."""
        return self.roofline_seconds / self.seconds if self.seconds else 0.0

    @property
    def label(self) -> str:
        """Return the path, with the number of layers if there are several."""
        return f"{self.path} × {self.layers}" if self.layers > 1 else self.path

    @property
    def lost_seconds(self) -> float:
        """Return the measured time over the roofline's; 0 if the time is an estimate."""
        return max(0.0, self.seconds - self.roofline_seconds) if self.measured else 0.0


@dataclass(frozen=True)
class Finding:
    """A fact about a program that costs time or memory, and what would change it.

    Attributes:
        kind: a short name, the same for all findings of this sort, such as `f32`, `copied cache`, `padding`.
        path: the block path; empty for the full program.
        text: the fact, as a sentence.
        advice: what would change it, as a sentence.
        seconds: the time that it costs in a run of the program; None if it is not a time or is unknown.
    """

    kind: str
    path: str
    text: str
    advice: str
    seconds: float | None = None

    @property
    def sentence(self) -> str:
        """Return path, text and advice as one text."""
        advice = self.advice[:1].upper() + self.advice[1:]
        return f"{f'{self.path}: ' if self.path else ''}{self.text}. {advice}."


@dataclass(frozen=True)
class PassStep:
    """A pass of the compiler: its name, the nodes of the program before and after it, and its seconds.

    `diff` is the difference that it made, as `model.text(level, after=name, diff=True)`; empty if it made none, or if
    it was not computed.
    """

    name: str
    nodes_before: int
    nodes_after: int
    seconds: float
    diff: str = ""


@dataclass(frozen=True)
class Inspection:
    """All that is shown of one program with sizes.

    Attributes:
        name: the name of the flow.
        program: the program, such as `forward`, `prefill`, `extend`.
        sizes: the sizes of symbolic dimensions, such as `batch`, `seq` and `context`.
        device: the name of the device that it ran on, or that the time is estimated for.
        seconds: the time of one run: wall-clock, or the sum of the blocks' estimates if `measured` is false.
        measured: whether the times are measured.
        roofline_seconds: the sum of the blocks' shortest times.
        flops, bytes: the sums over the blocks.
        param_bytes, cache_bytes: the bytes of all parameters and of the state.
        peak_bytes: arguments, results and temporaries together; None if the program was not compiled.
        blocks: the blocks in the order of the program. Their `seconds` add up to `seconds`.
        losses: the largest differences between measured time and roofline, largest first.
        findings: what a reader should look at, by kind.
        passes: the passes of the compiler in order.
    """

    name: str
    program: str
    sizes: Mapping[str, int]
    device: str
    seconds: float
    measured: bool
    roofline_seconds: float
    flops: int
    bytes: int
    param_bytes: int
    cache_bytes: int
    peak_bytes: int | None
    blocks: tuple[BlockEntry, ...]
    losses: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    passes: tuple[PassStep, ...] = field(default=(), repr=False)

    def to_json(self) -> str:
        """Return the inspection as one JSON object with the fields above, `version`, and each block's shares."""
        result = {"version": JSON_VERSION, **asdict(self)}
        for block, entry in zip(self.blocks, result["blocks"], strict=True):
            entry |= {"roofline_share": block.roofline_share, "lost_seconds": block.lost_seconds}
        return json.dumps(result, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    @property
    def title(self) -> str:
        """Return the program with its sizes, its time and its device in one line."""
        sizes = ", ".join(f"{name} {size}" for name, size in sorted(self.sizes.items()))
        time = f"{1000 * self.seconds:,.2f} ms on {self.device}, {'measured' if self.measured else 'estimated'}"
        return f"{self.name}: {self.program}{f' of {sizes}' if sizes else ''}: {time}"

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the table of blocks, the implementations, the losses and the findings, 80 columns wide."""
        choices = [(f"  {b.path}", f"{b.implementation}: {b.reason}") for b in self.blocks if b.implementation]
        losses = [(f"  {scaled_text(loss.seconds or 0, 's')}", loss.sentence) for loss in self.losses]
        findings = [(f"  {finding.kind}", finding.sentence) for finding in self.findings]
        table = TextTable([*map(self._row, self.blocks)], HEAD, widths=WIDTHS, gap=" ")
        lines = [*textwrap.wrap(self.title, 80), *textwrap.wrap(self._summary(), 80), "", str(table)]
        for name, rows in (("implementations", choices), ("largest losses", losses), ("findings", findings)):
            if rows:
                width = min(30, max(len(label) for label, _ in rows))
                lines += ["", name, *(str(TextTable([row], widths=(width,), wrap=80)) for row in rows)]
        return "\n".join(lines)

    def _summary(self) -> str:
        """Return the totals, and the share of the roofline."""
        totals = f"{compact(self.flops) or 0} FLOPs; {compact(self.bytes) or 0} bytes moved"
        totals += f"; bytes: {compact(self.param_bytes) or 0} of parameters"
        totals += f", {compact(self.cache_bytes)} of cache" if self.cache_bytes else ""
        totals += f", {compact(self.peak_bytes)} at the peak" if self.peak_bytes else ""
        if not self.roofline_seconds:
            return f"{totals}; the limits of this device are not known"
        share = f", {100 * self.roofline_seconds / self.seconds:.0f} % of it reached" if self.measured else ""
        return f"{totals}; roofline {scaled_text(self.roofline_seconds, 's')}{share}"

    def _row(self, block: BlockEntry) -> tuple[str, ...]:
        share = f"{100 * block.seconds / self.seconds:.1f}%" if self.seconds else ""
        of_limit = f"{100 * block.roofline_share:.0f}%" if block.measured and block.limited_by else ""
        counts = compact(block.flops), compact(block.bytes)
        return block.label, f"{1000 * block.seconds:,.3f}", share, of_limit, block.limited_by, *counts


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
