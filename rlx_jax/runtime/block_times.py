"""What `model.profile()` measures and tells: time by block."""

from __future__ import annotations

import html
import os
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from rlx_jax.compiler.executable import Executable, RunsOthers
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, SaveFailedError, UnsupportedError, first_line, quote
from rlx_jax.ir.table import TextTable
from rlx_jax.lowering.inspect.hlo import (
    CONTAINERS,
    DRAFTING,
    Instruction,
    block_paths,
    instructions,
    kernel_name,
    module_id,
    together,
)
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.programs import ProgramKey, Programs
from rlx_jax.runtime.sequence_state import State

# What stands in place of a path: kernels of no block, as XLA's own copies and the control of loops; kernels of no
# program, such as the choice of a first token; time in which the device had nothing to do.
NOT_ATTRIBUTED = "(not attributed)"
SMALL = "(functions beside the programs)"
IDLE = "(no kernel runs)"

ROWS, WIDTH = 20, 80


@dataclass(frozen=True)
class KernelTime:
    """Of a block, the kernels of one JAX primitive: seconds of a run."""

    primitive: str
    seconds: float


@dataclass(frozen=True)
class BlockTime:
    """Of a run, the seconds in which kernels of one block of a program ran, and how often it was called. `path` may be
    `NOT_ATTRIBUTED`, or without a program `SMALL` or `IDLE`."""

    program: str
    path: str
    seconds: float
    calls: int
    kernels: tuple[KernelTime, ...] = ()


@dataclass(frozen=True)
class BlockTimes:
    """Where the time of a run went: `seconds` on the clock, the mean of `runs`, and `rows`, the dearest first.

    Every moment counts once: it is of the kernel that runs then; of several, each has its share; of none, it is `IDLE`.
    So the rows' seconds add up to `seconds`. A fusion is of the block of its last op. Layers that are one loop are
    `layers.*`.
    """

    seconds: float
    runs: int
    device: str
    rows: tuple[BlockTime, ...]

    def folded(self) -> BlockTimes:
        """The same with equal layers together, as `layers.*`."""
        found: dict[tuple[str, str], list[BlockTime]] = defaultdict(list)
        for row in self.rows:
            found[row.program, together(row.path)].append(row)
        return replace(self, rows=_dearest_first(_joined(p, path, rows) for (p, path), rows in found.items()))

    @property
    def programs(self) -> tuple[str, ...]:
        """The programs that ran, the dearest first; "" is what is of none."""
        seconds: dict[str, float] = defaultdict(float)
        for row in self.rows:
            seconds[row.program] += row.seconds
        return tuple(sorted(seconds, key=lambda name: -seconds[name]))

    def text(self, rows: int = ROWS) -> str:
        """A table of at most so many blocks a program, the others in one line; 80 columns wide.

        Raises:
            RequestError: `rows` is no number over 0.
        """
        rows = whole_number("rows", rows, 1)
        mean = f", the mean of {self.runs} runs" if self.runs > 1 else ""
        lines, widths = [f"{_ms(self.seconds)} ms a run on {self.device}{mean}"], (WIDTH - 30, 11, 10, 9)
        for program in self.programs:
            of_it = [row for row in self.rows if row.program == program]
            found = [self._cells(program or "outside of programs", of_it, "calls")]
            found += [self._cells(f"  {r.path}", [r], f"{r.calls:,}" if r.calls else "") for r in of_it[:rows]]
            if others := of_it[rows:]:
                found.append(self._cells(f"  {len(others)} others", others, ""))
            lines += ["", str(TextTable(found, widths=widths, gap=""))]
        return "\n".join(lines)

    def flame_graph(self) -> str:
        """The same as an HTML page, which loads nothing: programs, in them the parts of block paths, in them JAX's
        primitives, each as wide as its part of the run."""
        root = Frame(f"a run of {_ms(self.seconds)} ms on {self.device}")
        for row in self.rows:
            path = (row.path,) if row.path in (NOT_ATTRIBUTED, SMALL, IDLE) else tuple(row.path.split("."))
            for kernel in row.kernels:
                names = (row.program, *path, kernel.primitive)
                root.add(tuple(name for name in names if name), kernel.seconds)
        return page(root)

    def save_flame_graph(self, path: str | os.PathLike[str]) -> None:
        """Write that page to a file, over one that is there.

        Raises:
            SaveFailedError: it cannot be written.
        """
        try:
            Path(path).write_text(self.flame_graph(), encoding="utf-8")
        except OSError as error:
            raise SaveFailedError(f"flame graph {quote(os.fspath(path))}: not written: {error.strerror}") from error

    def _cells(self, name: str, rows: list[BlockTime], calls: str) -> tuple[str, ...]:
        seconds = sum(row.seconds for row in rows)
        share = 100 * seconds / self.seconds if self.seconds else 0.0
        return shortened(name, WIDTH - 30), _ms(seconds), f"{share:.1f} %", calls

    def __str__(self) -> str:
        return self.text()


def block_times(trace: Trace, found: Mapping[tuple[int, str], tuple[str, Mapping[str, Instruction]]], runs: int,
    device: str) -> BlockTimes:  # fmt: skip
    """Time by block of a trace of `runs` runs. `found`: by XLA's number and name of a program, what we call it and its
    instructions."""
    where = [(kernel, _where(kernel, found)) for kernel in trace.kernels]
    seconds = {place: ns / runs / 1e9 for place, ns in shares(trace, where).items()}
    times: Counter[tuple[str, str, str]] = Counter()
    for kernel, (program, path, _, _) in where:
        times[program, path, kernel.instruction] += 1
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for (program, path, _), count in times.items():
        calls[program, path] = max(calls[program, path], round(count / runs / trace.devices))
    parts: dict[tuple[str, str], list[BlockTime]] = defaultdict(list)
    for (program, path, primitive, _), took in seconds.items():
        parts[program, path].append(BlockTime(program, path, took, 0, (KernelTime(primitive, took),)))
    rows = (replace(_joined(*place, of_it), calls=calls[place]) for place, of_it in parts.items())
    return BlockTimes((trace.end - trace.start) / runs / 1e9, runs, device, _dearest_first(rows))


# The program of a kernel, the path of its block, its primitive, and whether it runs others.
TimedPart = tuple[str, str, str, bool]

NOWHERE: TimedPart = ("", IDLE, "", False)


def _where(kernel: Kernel, found: Mapping[tuple[int, str], tuple[str, Mapping[str, Instruction]]]) -> TimedPart:
    program, known = found.get((kernel.program, kernel.module), ("", {}))
    if not program:
        return "", SMALL, kernel.module, False
    instruction = known.get(kernel.instruction, Instruction("", kernel.instruction))
    runs_others = instruction.opcode in CONTAINERS
    path = "" if runs_others else instruction.path
    return program, path or NOT_ATTRIBUTED, instruction.primitive or instruction.opcode, runs_others


def shares(trace: Trace, where: Sequence[tuple[Kernel, TimedPart]]) -> dict[TimedPart, float]:
    """The nanoseconds of each place: every moment goes to the kernels that run then, in equal shares; where only such
    as run others do, to these; where none does, to nothing that ran."""
    edges = [(kernel.start, 1, place) for kernel, place in where]
    edges += [(kernel.end, -1, place) for kernel, place in where]
    running: Counter[TimedPart] = Counter()
    taken: dict[TimedPart, float] = defaultdict(float)
    at = trace.start
    for moment, change, place in [*sorted(edges), (trace.end, 0, NOWHERE)]:
        if moment > at:
            busy = {p: n for p, n in running.items() if n and not p[3]} or {p: n for p, n in running.items() if n}
            for p, n in (busy or {NOWHERE: 1}).items():
                taken[p] += (moment - at) * n / max(sum(busy.values()), 1)
            at = moment
        if change:
            running[place] += change
    return dict(taken)


def _joined(program: str, path: str, rows: list[BlockTime]) -> BlockTime:
    """Several rows as one: of their kernels, those of one primitive together."""
    seconds: dict[str, float] = defaultdict(float)
    for kernel in (k for row in rows for k in row.kernels):
        seconds[kernel.primitive] += kernel.seconds
    kernels = tuple(KernelTime(name, seconds[name]) for name in sorted(seconds, key=lambda n: (-seconds[n], n)))
    return BlockTime(program, path, sum(row.seconds for row in rows), sum(row.calls for row in rows), kernels)


def _dearest_first(rows: Iterable[BlockTime]) -> tuple[BlockTime, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.program, row.path)))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}"


def shortened(text: str, width: int) -> str:
    """A text that fits: without its middle, if it is longer."""
    if len(text) < width:
        return text
    end = width // 2
    return f"{text[: width - end - 2]}…{text[-end:]}"


# What stands in the trace around the run.
MARK = "rlx_jax.profile"


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
    every = (event for plane in data.planes for line in plane.lines for event in line.events)
    events = [(event, {name: value for name, value in event.stats if name is not None}) for event in every]
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


# The least part of the whole that is drawn.
SMALLEST = 0.0005


@dataclass
class Frame:
    """A part of what took time, and the parts inside of it, by name."""

    name: str
    seconds: float = 0.0
    inside: dict[str, Frame] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], seconds: float) -> None:
        """Seconds of the part that these names lead to."""
        self.seconds += seconds
        if names:
            self.inside.setdefault(names[0], Frame(names[0])).add(names[1:], seconds)


def page(root: Frame) -> str:
    """A page of a whole. What is wider took longer; what stands below is a part of what is above."""
    return _PAGE.replace("TITLE", html.escape(root.name)).replace("FRAMES", _drawn(root, root.seconds, root.seconds))


def _drawn(frame: Frame, around: float, whole: float) -> str:
    """A frame and what is inside of it, as wide as its part of what is `around` it."""
    if not whole or frame.seconds < SMALLEST * whole:
        return ""
    told = f"{frame.name}: {1000 * frame.seconds:,.3f} ms, {100 * frame.seconds / whole:.1f} %"
    width, color = 100 * frame.seconds / around, 20 + sum(frame.name.encode()) % 35
    parts = sorted(frame.inside.values(), key=lambda part: -part.seconds)
    return (
        f'<div class="frame" style="width:{width:.3f}%"><p style="background:hsl({color} 80% 70%)" '
        f'title="{html.escape(told)}">{html.escape(frame.name)}</p>'
        f"{''.join(_drawn(part, frame.seconds, whole) for part in parts)}</div>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
body { font: 13px sans-serif; margin: 1em; }
.frame { float: left; box-sizing: border-box; min-width: 0; }
.frame > p { margin: 0 1px 1px 0; padding: 2px 3px; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
</style></head><body>
<p>Wider is longer; below is what it consists of. The pointer shows the milliseconds.</p>
FRAMES
</body></html>
"""


def profile_run(models: Sequence[Programs], run: Callable[[], Any], runs: int = 1) -> BlockTimes:
    """Time by block of `run`, which runs once before, so that everything is compiled, and then `runs` times traced.
    `models`: the one that is asked, and others whose programs it runs: those that draft.

    Raises:
        RequestError: nothing was asked of `run`. RequestError, UnsupportedError: as `trace_of`. Others as `run`.
    """
    made = jax.block_until_ready(run())
    if isinstance(made, Sized) and len(made) == 0:
        raise RequestError("profile: there is nothing to time: pass one prompt, text or image at least")

    def repeated() -> None:
        for _ in range(runs):
            jax.block_until_ready(run())

    trace = trace_of(repeated)
    ran: dict[tuple[int, str], set[str]] = defaultdict(set)
    for kernel in trace.kernels:
        ran[kernel.program, kernel.module].add(kernel.instruction)
    compiled = list(_compiled(models))
    found = {
        place: (one.text, one.instructions())
        for place, names in ran.items() if (one := _which(compiled, place, names))
    }  # fmt: skip
    return block_times(trace, found, runs, running_device().name)


@dataclass(frozen=True)
class _Compiled:
    """A program as a trace may name it: XLA's number and name of it, and what we call it."""

    number: int
    module: str
    text: str
    key: ProgramKey
    executable: Executable

    def instructions(self) -> dict[str, Instruction]:
        """Its instructions, under the names of their kernels too."""
        others = self.key.around.beside().values() if isinstance(self.key.around, RunsOthers) else ()
        paths = frozenset().union(*(block_paths(lir.graph) for lir in (self.executable.lir, *others)))
        made = instructions(self.executable.call.as_text() or "", paths)
        return {kernel_name(name): instruction for name, instruction in made.items()} | made


def _compiled(models: Sequence[Programs]) -> Iterator[_Compiled]:
    """The programs of models: of the one that is asked, and of those that draft."""
    beside = [found.programs for model in models for found in model.beside.values()]
    for place, programs in enumerate(dict.fromkeys((*models, *beside))):
        for key, executable in programs.executables.items():
            for module in executable.call.runtime_executable().hlo_modules():  # type: ignore[union-attr]
                number = module_id(module.as_serialized_hlo_module_proto())
                yield _Compiled(number, module.name, f"{DRAFTING}: " * (place > 0) + key.text, key, executable)


def _which(compiled: Sequence[_Compiled], place: tuple[int, str], names: set[str]) -> _Compiled | None:
    """The program of a trace's number and name, whose kernels are `names`. A GPU's trace has numbers of its own: there
    it is the one of that name; of several, such as that of a model and of one that drafts, whose kernels they are."""
    of_name = [one for one in compiled if one.module == place[1]]
    fitting = [one for one in of_name if one.number == place[0]] or of_name
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return max(fitting, key=lambda one: len(names & one.instructions().keys()))


def profile_calls(
    programs: Programs, call: Callable[..., Any], given: Mapping[str, Any], state: State | None, runs: int
) -> BlockTimes:
    """Time by block of `call(**given)`, with `state=` where there is one. Each of the calls gets copies of its own of
    what it consumes.

    Raises:
        RequestError, UnsupportedError: as `trace_of`. Others as a call.
    """
    consumed = programs.settings.plan.donate_inputs

    def fresh(name: str, value: Any) -> Any:
        return jax.numpy.copy(value) if name in consumed and isinstance(value, jax.Array) else value

    copies = [
        {name: fresh(name, value) for name, value in given.items()} | ({} if state is None else {"state": state.copy()})
        for _ in range(runs + 1)
    ]
    return profile_run([programs], lambda: call(**copies.pop()), runs)
