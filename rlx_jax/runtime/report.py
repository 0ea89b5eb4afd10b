"""This module builds and formats `model.report()`: the cost of compilation, and the cost of running the programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx_jax.compiler.executable import Executable
from rlx_jax.compiler.pipeline import Template
from rlx_jax.compiler.settings import LoopSettings
from rlx_jax.dataclasses import asdict, dataclass, field, replace
from rlx_jax.device import Device
from rlx_jax.errors import listing
from rlx_jax.ir.ops.custom import is_exported
from rlx_jax.ir.text import TextTable
from rlx_jax.lowering.fusion import FusionReport
from rlx_jax.lowering.inspect.hlo import count_collectives, without_layer_numbers
from rlx_jax.lowering.inspect.outline import compact
from rlx_jax.lowering.lir.plan import Layout
from rlx_jax.lowering.sharding import ModelSharding
from rlx_jax.runtime.block_times import shorten
from rlx_jax.runtime.inputs import check_total_length
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs

# The attributes of `Cost` and `Report` that are numbers, and their units where the names do not have them.
COSTS = ("flops", "bytes", "workspace", "donated_bytes", "peak_bytes", "cache_bytes")
UNITS = {"workspace": " bytes"}
# Steps that are no passes: each always has its own line.
STEPS = ("build", "load", "plan", "trace", "compile", "prove")
# Passes shorter than this number of seconds share one line.
SHORT_SECONDS = 0.002
# The number of programs in the table, and the widths of its columns after the name: 80 characters with the name.
MAX_PROGRAMS = 16
WIDTHS = (7, 7, 7, 8, 6, 6, 7)


@dataclass(frozen=True)
class SpeculativeCounts:
    """Counts of speculative decoding, summed over all rows.

    Attributes:
        drafted: draft tokens that the model verified.
        accepted: draft tokens that it accepted.
        steps: verification steps. Each gives every active row one more token than it accepts.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.accepted:,} of {self.drafted:,} drafts accepted in {self.steps:,} steps"


@dataclass(frozen=True)
class ProgramReport:
    """The cost of compiling one program, and of one run of it; for a loop, of one step. Seconds and bytes.

    Attributes:
        program: the program and its sizes.
        prove: seconds to derive it, with the proof that its stages take tokens one by one, and to prove that the state
            is updated in place.
        lower: seconds to build, lower, specialize and plan it. Programs that differ only in sizes share a template;
            one of them carries its seconds. It is 0 if an earlier load of the config did it.
        trace, compile: seconds in JAX's tracing, and in XLA.
        flops, bytes: operations, and memory traffic, of a run; None for a program of an artifact.
        peak_bytes: arguments, results and temporaries together; a donated state counts once.
        donated_bytes: the part of the arguments that results are written into.
        cache_bytes: the size of the state between calls.
    """

    program: str
    prove: float
    lower: float
    trace: float
    compile: float
    flops: int | None
    bytes: int | None
    peak_bytes: int
    donated_bytes: int
    cache_bytes: int

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps together."""
        return self.prove + self.lower + self.trace + self.compile


@dataclass(frozen=True)
class RequestReport:
    """The size and the speed of the last request. Times are wall-clock seconds.

    For a stream they include the time that the consumer takes between tokens.

    Attributes:
        kind: the kind of `rows` in the request: "prompts", "texts", "images".
        prompt_tokens: tokens of all rows together; 0 for images.
        prompt_seconds: the time of prefill, up to the first new token of each prompt; or of encoding.
        new_tokens: generated tokens of all rows together.
        first_tokens: the part of `new_tokens` that prefill produced.
        answer_seconds: the time of the other new tokens.
        compiled: programs and helper functions that were compiled during the request.
        cached_tokens: the part of `prompt_tokens` that was not processed for this request: a state had them, or
            several prompts share them and one was processed.
        reread: why tokens that a state had were processed again; empty if none were.
        slots: number of slots of continuous batching, where `answer_seconds` is the time of everything; 0 without.
        slot_classes: number and cache length of the slots of each context class.
        positions_read: positions of the caches of slots that all steps of decoding have read together.
    """

    kind: str
    rows: int
    prompt_tokens: int
    prompt_seconds: float
    new_tokens: int = 0
    first_tokens: int = 0
    answer_seconds: float = 0.0
    compiled: int = 0
    cached_tokens: int = 0
    reread: str = ""
    slots: int = 0
    slot_classes: tuple[tuple[int, int], ...] = ()
    positions_read: int = 0

    @property
    def read_tokens(self) -> int:
        """Return the number of prompt tokens that were processed for this request."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_rate(self) -> float:
        """Return the prompt tokens per second; for images, images per second."""
        return per_second(self.read_tokens or self.rows, self.prompt_seconds)

    @property
    def answer_rate(self) -> float:
        """Return the new tokens per second, without those of prefill."""
        return per_second(self.new_tokens - self.first_tokens, self.answer_seconds)

    def __str__(self) -> str:
        tokens = f" of {self.prompt_tokens:,} tokens" if self.prompt_tokens else ""
        tokens += f", {self.read_tokens:,} of them" if self.cached_tokens else ""
        unit = "tokens" if self.prompt_tokens else self.kind
        timing = f"{self.prompt_seconds:.3f} s, {self.prompt_rate:,.0f} {unit}/s"
        text = f"{self.rows:,} {self.kind}{tokens} processed in {timing}"
        if self.slots:
            classes = ", ".join(f"{num:,} × {cache_len:,} tokens" for num, cache_len in self.slot_classes)
            text = f"{self.rows:,} {self.kind}{tokens} processed in {self.slots:,} slots ({classes})"
            rate = f"{self.answer_rate:,.0f} new tokens/s with their prompts"
            text += f"; {self.new_tokens:,} new tokens in {self.answer_seconds:.3f} s, {rate}"
        elif self.answer_seconds:
            rate = f"{self.answer_rate:,.0f} tokens/s"
            text += f"; {self.new_tokens:,} new tokens, in {self.answer_seconds:.3f} s after the first, {rate}"
        text += f"; {self.reread}" if self.reread else ""
        return text + (f"; {self.compiled} programs and functions were compiled during it" if self.compiled else "")


def per_second(count: int, seconds: float) -> float:
    """Return `count / seconds`, or 0 if no time was measured."""
    return count / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Report:
    """The cost of compilation, and the cost of running the last program. Times in seconds, sizes in bytes.

    Attributes:
        seconds: the time of each step and pass.
        nodes: the number of nodes after each pass.
        parameter_bytes: all parameters, summed over all devices.
        packed: the scheme and the bytes of each parameter that is packed on the device, by name.
        decoded: parameters that are packed in the checkpoint and could not stay packed, such as layers of several
            schemes that are stacked.
        compiles: programs that XLA compiled.
        evicted: programs that the cache does not retain any more (`buckets.programs`).
        recompiles: programs and helper functions compiled after warm-up.
        refusals: why layers that look equal do not run as one loop.
        fusion: the fused and the missed patterns.
        device: the device that the program is planned for.
        program: the program that ran last, with its sizes. Attributes that depend on sizes describe this program.
        loop: the settings of the generation loop.
        attention, products, experts, recurrences: the implementations that were chosen, as lines `block: choice`.
        flops, bytes, workspace: operations, memory traffic and scratch memory of a run.
        donated_bytes: the part of the arguments that results are written into.
        peak_bytes: arguments, results and temporaries together; a donated state counts once.
        mesh: the axes of the mesh. On a mesh, bytes of programs count one device.
        leaf_bytes: the bytes of parameters on one device.
        shardings: the number of parameters with each sharding.
        replicated: parameters with more than one axis that are replicated.
        collectives: the number of collective operations in the program, by kind.
        embedding: how an encoder lays out a batch of texts, or why it cannot pack them.
        speculative: the counts of the last request with drafts, so far.
        seed: the seed of the last request that sampled, the caller's or a generated one; None if the request did not
            sample, or passed a key.
        initialised: the keys of weights that were initialized because no source has them (`missing="init"`).
        ignored_fields: the config fields that may change the computation and that the caller ignored
            (`ignore_fields=`).
        programs: all programs in the cache.
        cache_bytes: the size of the state.
        request: the speed of the last request.
        recompiled: the latest recompiles, and the reason for each.
        loaded: programs that were loaded from the compile cache (`rlx_jax.compile_cache`).
    """

    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    parameter_bytes: int
    compiles: int
    evicted: int
    recompiles: int
    refusals: tuple[str, ...]
    fusion: FusionReport
    device: Device
    program: str = ""
    loop: LoopSettings | None = None
    attention: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    recurrences: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None
    workspace: int | None = None
    donated_bytes: int | None = None
    peak_bytes: int | None = None
    mesh: str = ""
    leaf_bytes: int | None = None
    shardings: Mapping[str, int] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    collectives: Mapping[str, int] = field(default_factory=dict)
    embedding: str = ""
    speculative: SpeculativeCounts | None = None
    seed: int | None = None
    initialised: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    programs: tuple[ProgramReport, ...] = ()
    cache_bytes: int | None = None
    request: RequestReport | None = None
    recompiled: tuple[str, ...] = ()
    loaded: int = 0
    packed: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    decoded: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, object]] = [
            ("parameters", f"{self.parameter_bytes:,} bytes"),
            *(("packed", line) for line in self._packed_lines()),
            ("decoded", self.decoded and listing(self.decoded, 8)),
            ("compiles", str(self.compiles)),
            ("loaded", self.loaded and f"{self.loaded} from the compile cache"),
            ("evicted", self.evicted),
            ("recompiles", self.recompiles),
            *(("recompiled", reason) for reason in self.recompiled),
            ("program", self.program),
        ]
        values = [(name, getattr(self, name)) for name in COSTS]
        rows += [(name, f"{value:,}{UNITS.get(name, '')}") for name, value in values if value is not None]
        rows.append(("nodes", ", ".join(f"{name} {count}" for name, count in self.nodes.items())))
        rows += [("fusion", self.fusion.summary), *(("not fused:", m) for m in self.fusion.missed)]
        rows.append(("planned for", self.device))
        for name in ("attention", "products", "experts"):
            rows += [(name, each) for each in merge_equal_layers(getattr(self, name))]
        rows += [("recurrence", r) for r in self.recurrences]
        rows += [("generation loop", self.loop), ("embedding", self.embedding), ("request", self.request)]
        rows += [("speculative", self.speculative), ("seed", "" if self.seed is None else str(self.seed))]
        if self.initialised:
            rows.append(("initialised", f"{len(self.initialised)} weights: {listing(self.initialised, 8)}"))
        rows.append(("ignored fields", self.ignored_fields and listing(self.ignored_fields, 8)))
        rows += self._on_mesh() if self.mesh else []
        rows += [("not rolled:", r) for r in self.refusals]
        lines = (str(TextTable([row], widths=(18,), gap=" ", wrap=80)) for row in rows if row[1])
        return "\n".join([*self._seconds(), *lines, *self._programs()])

    def _packed_lines(self) -> Iterator[str]:
        """Yield a line for each scheme of packed parameters."""
        for scheme in dict.fromkeys(scheme for scheme, _ in self.packed.values()):
            sizes = [nbytes for name, nbytes in self.packed.values() if name == scheme]
            yield f"{len(sizes)} parameters as {scheme}, {sum(sizes):,} bytes"

    def _seconds(self) -> list[str]:
        """Return a table with a line for each step or slow pass, and one line for all other passes."""
        short = {name for name, duration in self.seconds.items() if duration < SHORT_SECONDS and name not in STEPS}
        rows = [(name, f"{duration:.3f} s") for name, duration in self.seconds.items() if name not in short]
        if short:
            rows.append((f"{len(short)} passes", f"{sum(self.seconds[name] for name in short):.3f} s"))
        return [str(TextTable(rows, widths=(26, 10), gap=" "))] if rows else []

    def _programs(self) -> list[str]:
        """Return the table of the programs, slowest to compile first; its columns are seconds, FLOPs and bytes."""
        if not self.programs:
            return []
        heads = ("prove", "lower", "trace", "compile", "FLOPs", "peak", "cache")
        rows = []
        for r in self.programs[:MAX_PROGRAMS]:
            seconds = [f"{duration:.3f}" for duration in (r.prove, r.lower, r.trace, r.compile)]
            name = shorten(r.program.replace(" of ", " ").replace(",", ""), 32)
            numbers = ("-" if n is None else compact(n) or "0" for n in (r.flops, r.peak_bytes, r.cache_bytes))
            rows.append((name, *seconds, *numbers))
        lines = ["", str(TextTable(rows, ("programs", *heads), widths=(32, *WIDTHS), gap=""))]
        if remaining := self.programs[MAX_PROGRAMS:]:
            lines.append(f"{len(remaining)} others, {sum(r.seconds for r in remaining):.3f} s")
        return lines

    def _on_mesh(self) -> list[tuple[str, object]]:
        """Return the labelled lines about the mesh."""
        counts = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        return [
            ("mesh", self.mesh),
            ("per device", f"{self.leaf_bytes:,} bytes of parameters"),
            *(("sharded", f"{count} parameters as {spec}") for spec, count in self.shardings.items()),
            ("collectives", self.program and (counts or "none")),
            *(("replicated:", name) for name in self.replicated),
        ]


def merge_equal_layers(lines: Sequence[str]) -> list[str]:
    """Return lines `block: choice`, with equal layers merged into one: `layers.*.self_attn: xla (2 of them)`."""
    parts = (line.split(": ", 1) for line in lines)
    counts = Counter(": ".join((without_layer_numbers(path), *rest)) for path, *rest in parts)
    return [line if count == 1 else f"{line} ({count} of them)" for line, count in counts.items()]


def with_mesh(report: Report, model_sharding: ModelSharding, layout: Layout) -> Report:
    """Return the report with the attributes that describe the mesh."""
    specs = [model_sharding.describe_storage(program) for program in layout.params.values()]
    return replace(
        report,
        mesh=model_sharding.text(),
        leaf_bytes=sum(nbytes for _, nbytes in specs),
        # A spec such as "(-, -)" names no axis of the mesh: that parameter is replicated.
        shardings=dict(Counter(spec for spec, _ in specs if set(spec) - set("(-, )"))),
        replicated=model_sharding.replicated_params(layout.params.values()),
    )


def program_reports(programs: Programs) -> tuple[ProgramReport, ...]:
    """Return a report on every program in the cache, slowest to compile first, including programs of companions."""
    caches = [(programs, len(programs.flows) > 1), *((other.programs, True) for other in programs.companions.values())]
    reports = []
    for member, is_named in caches:
        counted: set[ProgramKey] = set()  # templates that are charged to a program already: sizes share a template
        for key, executable in member.executables.items():
            template, seconds = member.template(key.symbolic), executable.seconds
            template_seconds = {} if key.symbolic in counted else {**template.seconds}
            counted.add(key.symbolic)
            costs, derive_seconds = step_cost(executable), template_seconds.pop("derive", 0.0)
            report = ProgramReport(
                f"{key.flow}: {key.text}" if is_named else key.text, derive_seconds + seconds["prove"],
                sum(template_seconds.values()) + seconds["plan"], seconds["trace"], seconds["compile"],
                costs.get("flops"), costs.get("bytes"), executable.peak_bytes, executable.memory.alias_size_in_bytes,
                state_bytes(template, key),
            )  # fmt: skip
            reports.append(report)
    return tuple(sorted(reports, key=lambda r: (-r.seconds, r.program)))


def step_cost(executable: Executable) -> dict[str, Any]:
    """Return the attributes of the cost of a run by name; none for a program of an artifact, which has no ops."""
    return {} if is_exported(executable.lir.graph) else asdict(executable.step_cost)


def state_bytes(template: Template, key: ProgramKey | None) -> int:
    """Return the bytes of the state of a program, summed over all devices; 0 without a state."""
    sizes = dict(key.binding) if key else {}
    return sum(t.bind(sizes).nbytes for t in template.state.values())


def report_of(
    programs: Programs, template: Template, last: ProgramKey | None, seconds: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Report:  # fmt: skip
    """Return the report on a template and on one program with sizes.

    Args:
        programs: the programs of the model.
        template: the template of the model's program.
        last: the key of the program that ran last, which the report describes.
        seconds: the time of each step so far.
        sizes: sizes to estimate the cost for, without compiling; empty for the last program.
    """
    settings = programs.settings
    report = model_report(programs, template, seconds)
    if sizes:
        cost = template.cost(sizes)
        check_total_length(sizes, template.bounds, template.built.name)
        return replace(report, **asdict(cost))
    executable = programs.executables.get(last) if last else None
    if executable is None:  # nothing ran yet, or its program was evicted
        return report
    lir, memory = executable.lir, executable.memory
    return replace(
        report,
        seconds={**seconds, **executable.seconds},
        program=last.text if last else "",
        attention=lir.attention(),
        products=lir.products(),
        experts=lir.experts(),
        recurrences=lir.recurrences(),
        **step_cost(executable),
        collectives={} if settings.model_sharding is None else count_collectives(executable.call.as_text() or ""),
        donated_bytes=memory.alias_size_in_bytes,
        cache_bytes=state_bytes(template, last),
        peak_bytes=executable.peak_bytes,
    )


def model_report(programs: Programs, template: Template, seconds: Mapping[str, float]) -> Report:
    """Return the part of the report that does not depend on sizes."""
    settings, caches = programs.settings, [programs, *(other.programs for other in programs.companions.values())]
    report = Report(
        seconds,
        nodes=template.nodes,
        parameter_bytes=sum(t.nbytes for t in programs.layout.types().values()),
        packed=programs.layout.packed(),
        decoded=programs.layout.decoded(programs.source) if settings.plan.packed else (),
        compiles=sum(member.executables.num_inserted - member.num_loaded for member in caches),
        loaded=sum(member.num_loaded for member in caches),
        evicted=sum(member.executables.num_evicted for member in caches),
        recompiles=sum(member.recompiles for member in caches),
        initialised=programs.initialized_keys,
        ignored_fields=tuple(
            dict.fromkeys(name for flow in programs.flows.values() for name in getattr(flow, "_ignored_fields", ()))
        ),
        recompiled=tuple(programs.recompile_reasons),
        programs=program_reports(programs),
        refusals=template.built.refusals,
        fusion=template.fusion,
        device=settings.device,
        loop=settings.loop if any(key.program == "extend" for key in programs.templates) else None,
    )
    return report if settings.model_sharding is None else with_mesh(report, settings.model_sharding, programs.layout)
