"""This module measures the time that each block of a model takes: `model.profile()`.

It runs a call under `jax.profiler`, maps the kernels of the trace to block paths through the HLO, and formats the
result as a table.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jax

from rlx_jax.compiler.executable import Executable, HasCompanions
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, SaveFailedError, UnsupportedError, first_line, quote
from rlx_jax.inspection.records import Execution, KernelEntry, trace_json
from rlx_jax.ir.text import TextTable
from rlx_jax.lowering.inspect import hlo
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.kernel_order import instructions_of_kernels
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.sequence_state import State

# These replace a block path for: kernels without a block, such as XLA's copies and loop control; kernels outside the
# programs, such as the choice of a first token; time in which the device is idle.
NOT_ATTRIBUTED = "(not attributed)"
HELPERS = "(helper functions)"
IDLE = "(no kernel runs)"

# The default number of blocks per program, and the width of the table in characters.
DEFAULT_ROWS, WIDTH = 20, 80


@dataclass(frozen=True)
class BlockTime:
    """The seconds per run that the kernels of one block take, and the number of calls of the block in a run.

    `path` may be `NOT_ATTRIBUTED`. It is `HELPERS` or `IDLE` if `program` is empty. Kernels are by HLO instruction.
    """

    program: str
    path: str
    seconds: float
    calls: int
    kernels: tuple[KernelEntry, ...] = ()


@dataclass(frozen=True)
class BlockTimes:
    """The time of a run by block.

    Every moment counts once: it is shared equally among the kernels that run at that moment, or counts as `IDLE` if
    none runs. So the seconds of all rows add up to `seconds`. A fusion counts for the block of its last op. Layers
    that run as one loop share the path `layers.*`.

    Attributes:
        seconds: the wall-clock time of a run, the mean over `runs`.
        runs: the number of traced runs.
        device: the name of the device.
        rows: the blocks, slowest first.
        executions: every execution of a kernel in the trace, of all runs.
    """

    seconds: float
    runs: int
    device: str
    rows: tuple[BlockTime, ...]
    executions: tuple[Execution, ...] = field(default=(), repr=False, compare=False)

    def folded(self) -> BlockTimes:
        """Return the times with repeated layers merged into one, `layers.*`."""
        groups: dict[tuple[str, str], list[BlockTime]] = defaultdict(list)
        for row in self.rows:
            groups[row.program, hlo.without_layer_numbers(row.path)].append(row)
        return replace(self, rows=_slowest_first(_merge_rows(p, path, rows) for (p, path), rows in groups.items()))

    @property
    def programs(self) -> tuple[str, ...]:
        """Return the programs that ran, slowest first; "" is time outside of programs."""
        seconds: dict[str, float] = defaultdict(float)
        for row in self.rows:
            seconds[row.program] += row.seconds
        return tuple(sorted(seconds, key=lambda name: -seconds[name]))

    def text(self, rows: int = DEFAULT_ROWS) -> str:
        """Return a table, 80 columns wide, of the `rows` slowest blocks of each program; one line sums up the others.

        Raises:
            RequestError: `rows` is not a positive integer.
        """
        rows = check_integer("rows", rows, 1)
        mean = f", the mean of {self.runs} runs" if self.runs > 1 else ""
        lines, widths = [f"{_ms(self.seconds)} ms a run on {self.device}{mean}"], (WIDTH - 30, 11, 10, 9)
        for program in self.programs:
            blocks = [row for row in self.rows if row.program == program]
            cells = [self._cells(program or "outside of programs", blocks, "calls")]
            cells += [self._cells(f"  {r.path}", [r], f"{r.calls:,}" if r.calls else "") for r in blocks[:rows]]
            if remaining := blocks[rows:]:
                cells.append(self._cells(f"  {len(remaining)} others", remaining, ""))
            lines += ["", str(TextTable(cells, widths=widths, gap=""))]
        return "\n".join(lines)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the executions of kernels in the format of Chrome's trace viewer, which https://ui.perfetto.dev opens.

        There is a row for each stream of a device, or thread of a CPU. Kernels have their program, block path and JAX
        primitive as arguments. A path that ends in `.gz` is compressed. An existing file is overwritten.

        Raises:
            RequestError: the times have no trace. SaveFailedError: the file cannot be written.
        """
        if not self.executions:
            raise RequestError("save_trace: these times have no trace; profile() returns times that do")
        text = trace_json(self.executions, self.device, self.runs).encode()
        try:
            Path(path).write_bytes(gzip.compress(text) if os.fspath(path).endswith(".gz") else text)
        except OSError as error:
            raise SaveFailedError(f"trace {quote(os.fspath(path))}: not written: {error.strerror}") from error

    def _cells(self, name: str, rows: list[BlockTime], calls: str) -> tuple[str, ...]:
        """Return a line of the table that adds up several rows: name, milliseconds, share and calls."""
        seconds = sum(row.seconds for row in rows)
        share = 100 * seconds / self.seconds if self.seconds else 0.0
        return shorten(name, WIDTH - 30), _ms(seconds), f"{share:.1f} %", calls

    def __str__(self) -> str:
        return self.text()


# For XLA's id and module name of a program: our name of the program, and its instructions by name.
TracedPrograms = Mapping[tuple[int, str], tuple[str, Mapping[str, hlo.Instruction]]]


def block_times(trace: Trace, programs_by_id: TracedPrograms, runs: int, device: str) -> BlockTimes:
    """Compute the time by block from a trace.

    Args:
        trace: the trace of all runs together.
        programs_by_id: the programs in the trace.
        runs: the number of runs in the trace.
        device: the name of the device.
    """
    parts_of_kernels = [(kernel, _locate(kernel, programs_by_id)) for kernel in trace.kernels]
    seconds = {place: ns / runs / 1e9 for place, ns in part_nanoseconds(trace, parts_of_kernels).items()}
    times: Counter[tuple[str, str, str]] = Counter()
    for kernel, (program, path, *_) in parts_of_kernels:
        times[program, path, kernel.instruction] += 1
    # A block counts as called as often as its most frequent instruction runs.
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for (program, path, _), count in times.items():
        calls[program, path] = max(calls[program, path], round(count / runs / trace.devices))
    parts: dict[tuple[str, str], list[BlockTime]] = defaultdict(list)
    for (program, path, primitive, opcode, instruction), duration in seconds.items():
        count = round(times[program, path, instruction] / runs / trace.devices)
        entry = KernelEntry(instruction or primitive, opcode, primitive, duration, count)
        parts[program, path].append(BlockTime(program, path, duration, 0, (entry,)))
    rows = (replace(_merge_rows(*place, blocks), calls=calls[place]) for place, blocks in parts.items())
    executions = tuple(
        Execution(k.row, k.instruction, (k.start - trace.start) / 1e9, (k.end - k.start) / 1e9, *part[:3])
        for k, part in parts_of_kernels
    )
    return BlockTimes((trace.end - trace.start) / runs / 1e9, runs, device, _slowest_first(rows), executions)


# The program of a kernel, the path of its block, its primitive, its HLO opcode, and its instruction.
TimedPart = tuple[str, str, str, str, str]

IDLE_PART: TimedPart = ("", IDLE, "", "", "")


def _locate(kernel: Kernel, programs_by_id: TracedPrograms) -> TimedPart:
    """Return the program, the block path and the primitive of a kernel."""
    program, instructions_by_name = programs_by_id.get((kernel.program, kernel.module), ("", {}))
    if not program:
        return "", HELPERS, kernel.module, "", kernel.instruction
    instruction = instructions_by_name.get(kernel.instruction, hlo.Instruction("", kernel.instruction))
    path = "" if instruction.opcode in hlo.CONTAINERS else instruction.path
    name = instruction.primitive or instruction.opcode
    return program, path or NOT_ATTRIBUTED, name, instruction.opcode, kernel.instruction


def part_nanoseconds(trace: Trace, where: Sequence[tuple[Kernel, TimedPart]]) -> dict[TimedPart, float]:
    """Return the nanoseconds of each part.

    Every moment is shared equally among the kernels that run at that moment. Containers, such as loops, get it only if
    nothing else runs, and `IDLE_PART` gets it if no kernel runs.
    """
    edges = [(kernel.start, 1, place) for kernel, place in where]
    edges += [(kernel.end, -1, place) for kernel, place in where]
    active: Counter[TimedPart] = Counter()
    nanoseconds: dict[TimedPart, float] = defaultdict(float)
    now = trace.start
    for moment, change, place in [*sorted(edges), (trace.end, 0, IDLE_PART)]:
        if moment > now:
            running = {p: n for p, n in active.items() if n}
            # Containers, by their opcode, run for as long as the kernels inside them, so they count only without any.
            sharing = {p: n for p, n in running.items() if p[3] not in hlo.CONTAINERS} or running
            for p, n in (sharing or {IDLE_PART: 1}).items():
                nanoseconds[p] += (moment - now) * n / max(sum(sharing.values()), 1)
            now = moment
        if change:
            active[place] += change
    return dict(nanoseconds)


def _merge_rows(program: str, path: str, rows: list[BlockTime]) -> BlockTime:
    """Return several rows merged into one, with their kernels, slowest first."""
    merged = (kernel for row in rows for kernel in row.kernels)
    kernels = tuple(sorted(merged, key=lambda k: (-(k.seconds or 0.0), k.primitive, k.name)))
    return BlockTime(program, path, sum(row.seconds for row in rows), sum(row.calls for row in rows), kernels)


def _slowest_first(rows: Iterable[BlockTime]) -> tuple[BlockTime, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.program, row.path)))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}"


def shorten(text: str, width: int) -> str:
    """Return the text cut to less than `width` characters, with "…" in place of its middle."""
    if len(text) < width:
        return text
    end = width // 2
    return f"{text[: width - end - 2]}…{text[-end:]}"


# The name of the annotation that encloses the timed runs in the trace.
ANNOTATION = "rlx_jax.profile"


@dataclass(frozen=True)
class Kernel:
    """One execution of a kernel in a trace.

    Attributes:
        start, end: nanoseconds in the trace.
        program, module: XLA's id and module name of the program.
        instruction: the name of the HLO instruction.
        row: the names of the device and of its stream, or thread of a CPU, and the number of that stream or thread.
        in_graph: whether it ran in a CUDA graph, where `instruction` is the name of the kernel.
    """

    start: float
    end: float
    program: int
    module: str
    instruction: str
    row: tuple[str, str, int] = ("", "", 0)
    in_graph: bool = False


@dataclass(frozen=True)
class Trace:
    """The kernels that ran on `devices` devices from `start` to `end`, in nanoseconds."""

    start: float
    end: float
    devices: int
    kernels: tuple[Kernel, ...]


def record_trace(warm_up: Callable[[], Any], run: Callable[[], Any]) -> Trace:
    """Run a function under `jax.profiler`, wait for its result, and return the trace; `warm_up` runs first.

    Raises:
        RequestError: another trace is running. UnsupportedError: traces of this device name no kernels.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a call of every Python function would take longer than most kernels
    with tempfile.TemporaryDirectory(prefix="rlx_jax-profile-") as directory:
        try:
            jax.profiler.start_trace(directory, profiler_options=options)
        except RuntimeError as error:
            raise RequestError(f"profile: {first_line(error)}; one trace at a time") from error
        try:
            # The first kernels of a trace start late, as on a GPU the profiler prepares each.
            jax.block_until_ready(warm_up())
            with jax.profiler.TraceAnnotation(ANNOTATION):
                jax.block_until_ready(run())
        finally:
            jax.profiler.stop_trace()
        (file,) = Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # Types of jaxlib 0.11 warn when Python 3.12 creates them; with warnings as errors the process would abort.
            warnings.simplefilter("ignore", DeprecationWarning)
            return read_trace(jax.profiler.ProfileData.from_file(str(file)))


def read_trace(data: Any) -> Trace:
    """Return the kernels of a `jax.profiler.ProfileData` that ran inside the annotation `ANNOTATION`."""
    all_events = (
        (event, (plane.name, line.name, number))
        for plane in data.planes
        for number, line in enumerate(plane.lines)
        for event in line.events
    )
    events = [(event, {name: v for name, v in event.stats if name is not None}, row) for event, row in all_events]
    start, end = next((e.start_ns, e.start_ns + e.duration_ns) for e, _, _ in events if e.name == ANNOTATION)
    kernels, devices = [], set()
    for event, stats, row in events:
        clipped_start, clipped_end = max(event.start_ns, start), min(event.start_ns + event.duration_ns, end)
        if "hlo_op" in stats and clipped_start < clipped_end:
            program_id, module = int(stats.get("program_id", 0)), str(stats.get("hlo_module", ""))
            # For a CUDA graph, `hlo_op` names the graph, and the event names the kernel.
            in_graph = str(stats["hlo_op"]).startswith("command_buffer")
            name = event.name if in_graph else str(stats["hlo_op"])
            kernels.append(Kernel(clipped_start, clipped_end, program_id, module, name, row, in_graph))
            devices.add(stats.get("device_ordinal", 0))
    if not kernels:
        raise UnsupportedError(
            f"profile: the trace of {running_device().name} names no kernel of a compiled program; jax.profiler.trace "
            "writes what there is, for xprof"
        )
    return Trace(start, end, len(devices), tuple(kernels))


def profile_run(models: Sequence[Programs], run: Callable[[], Any], runs: int = 1, queued: bool = False) -> BlockTimes:
    """Return the time by block of a function that runs programs.

    Args:
        models: the programs of the model, and of others that the function runs, such as drafters.
        run: the function. Two runs do not count: one compiles untraced, and one is at the start of the trace.
        runs: the number of traced runs.
        queued: dispatch all runs before waiting, so that the device does not wait for the host between them.

    Raises:
        RequestError: the function returns an empty result. RequestError, UnsupportedError: as `record_trace`. Others as
            `run`.
    """
    result = jax.block_until_ready(run())
    if isinstance(result, Sized) and len(result) == 0:
        raise RequestError("profile: there is nothing to time: pass one prompt, text or image at least")

    def repeated() -> Any:
        for _ in range(runs):
            result = run()
            if not queued:
                jax.block_until_ready(result)
        return result

    trace = record_trace(run, repeated)
    instructions_by_program: dict[tuple[int, str], set[str]] = defaultdict(set)
    for kernel in trace.kernels:
        instructions_by_program[kernel.program, kernel.module].add(kernel.instruction)
    compiled = list(_compiled(models))
    matches = {
        place: (program.text, program.instructions())
        for place, names in instructions_by_program.items() if (program := _match_program(compiled, place, names))
    }  # fmt: skip
    return block_times(with_instructions(trace, matches), matches, runs, running_device().name)


def with_instructions(trace: Trace, programs_by_id: TracedPrograms) -> Trace:
    """Return the trace with the names of instructions for the kernels of CUDA graphs: see `instructions_of_kernels`."""
    streams: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    kernels = list(trace.kernels)
    for number in sorted(range(len(kernels)), key=lambda number: kernels[number].start):
        kernel = kernels[number]
        if kernel.in_graph and (kernel.program, kernel.module) in programs_by_id:
            streams[kernel.row, kernel.program, kernel.module].append(number)
    for (_, program, module), numbers in streams.items():
        instructions = programs_by_id[program, module][1]
        names = instructions_of_kernels([kernels[number].instruction for number in numbers], instructions)
        for number, name in zip(numbers, names, strict=True):
            kernels[number] = replace(kernels[number], instruction=name)
    return replace(trace, kernels=tuple(kernels))


@dataclass(frozen=True)
class _NamedProgram:
    """A compiled program with the names that a trace may use: XLA's id `number` and `module`, and our name `text`."""

    number: int
    module: str
    text: str
    programs: Programs
    key: ProgramKey
    executable: Executable

    def instructions(self) -> dict[str, hlo.Instruction]:
        return program_instructions(self.programs, self.key, self.executable)


def program_instructions(programs: Programs, key: ProgramKey, executable: Executable) -> dict[str, hlo.Instruction]:
    """Return the HLO instructions of a compiled program by name, each with its block."""
    companions = key.wrapper.companions().values() if isinstance(key.wrapper, HasCompanions) else ()
    paths = frozenset().union(*(hlo.block_paths(lir.graph) for lir in (executable.lir, *companions)))
    return hlo.parse_instructions(executable.call.as_text() or "", paths, programs.layout.readers(executable.lir))


def _compiled(models: Sequence[Programs]) -> Iterator[_NamedProgram]:
    """List the compiled programs of models and of their companions, which draft."""
    companions = [companion.programs for model in models for companion in model.companions.values()]
    for position, programs in enumerate(dict.fromkeys((*models, *companions))):
        for key, executable in programs.executables.items():
            for module in executable.call.runtime_executable().hlo_modules():  # type: ignore[union-attr]
                number = hlo.module_id(module.as_serialized_hlo_module_proto())
                yield _NamedProgram(
                    number, module.name, f"{hlo.DRAFTING}: " * (position > 0) + key.text, programs, key, executable
                )


def _match_program(
    compiled: Sequence[_NamedProgram], program_id: tuple[int, str], names: set[str]
) -> _NamedProgram | None:
    """Return the program that a trace identifies by id and module name; None if there is none.

    A trace of a GPU has its own ids, so that the name decides there. Several programs may share a name, such as a
    model's and its drafter's: the one with the most instructions among `names` is chosen.

    Args:
        compiled: the candidates.
        program_id: the id and the module name.
        names: the instructions that ran.
    """
    same_name = [one for one in compiled if one.module == program_id[1]]
    candidates = [one for one in same_name if one.number == program_id[0]] or same_name
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    # In a CUDA graph a trace has the name of the kernel in place of the instruction.
    used = {hlo.kernel_name(name) for name in names}
    return max(candidates, key=lambda one: len(used & set(map(hlo.kernel_name, one.instructions()))))


def profile_calls(
    programs: Programs, call: Callable[..., Any], arguments: Mapping[str, Any], state: State | None, runs: int
) -> BlockTimes:
    """Return the time by block of `call(**given)`, with `state=` if there is a state.

    Each call gets its own copies of the arguments that it consumes.

    Raises:
        RequestError, UnsupportedError: as `record_trace`. Others as a call.
    """
    consumed = programs.settings.plan.donate_inputs

    def fresh(name: str, value: Any) -> Any:
        return jax.numpy.copy(value) if name in consumed and isinstance(value, jax.Array) else value

    # Two more than `runs`, for those that do not count; copied ahead, so that the trace has no copies in it.
    copies = [
        {name: fresh(name, value) for name, value in arguments.items()}
        | ({} if state is None else {"state": state.copy()})
        for _ in range(runs + 2)
    ]
    return profile_run([programs], lambda: call(**copies.pop()), runs)
