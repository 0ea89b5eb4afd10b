"""What `model.report()` tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import jax

from rlx_jax.compiler.executable import Arrays
from rlx_jax.compiler.pipeline import Template, make_function
from rlx_jax.compiler.settings import Loop, Settings
from rlx_jax.device import Device
from rlx_jax.errors import GraphError, listing
from rlx_jax.ir.table import TextTable
from rlx_jax.lowering.fusion import FusionReport
from rlx_jax.lowering.inspect.buffers import activation_bytes, dump_lir
from rlx_jax.lowering.inspect.hlo import collectives, together
from rlx_jax.lowering.lir.plan import Layout, Lir
from rlx_jax.lowering.sharding import Division
from rlx_jax.runtime.block_times import shortened
from rlx_jax.runtime.inputs import check_counted
from rlx_jax.runtime.programs import ProgramKey, Programs

# What a program needs: the name of its line, and what stands behind the number.
NEEDS = {
    "flops": ("flops", ""),
    "bytes": ("bytes", ""),
    "workspace": ("workspace", " bytes"),
    "donated_bytes": ("donated_bytes", ""),
    "peak_bytes": ("peak_bytes", ""),
    "cache_bytes": ("cache_bytes", ""),
    "estimated_activation_bytes": ("activations", " bytes, estimated"),
}
# Seconds that are not of a pass, and have a line of their own.
STEPS = ("build", "load", "plan", "trace", "compile", "prove")
# Seconds under which passes share a line.
SHORT = 0.002
# Programs in the table, and the widths of its columns behind the name.
PROGRAMS = 16
WIDTHS = (7, 7, 7, 8, 6, 6, 7)


@dataclass(frozen=True)
class Speculated:
    """What became of drafts: tokens that were `drafted` and read, those of them that were `accepted`, and the `steps`
    that took, of all rows together. Beside the accepted ones each step gives one token to each row that runs."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.accepted:,} of {self.drafted:,} drafts accepted in {self.steps:,} steps"


@dataclass(frozen=True)
class ProgramReport:
    """What one program cost and what a run of it needs; of a loop, one step. Times in seconds, sizes in bytes.

    Attributes:
        prove: to derive it, with the proof that its stages take tokens one by one, and to prove that the state is
            updated in place.
        lower: for its blocks, passes, sizes and plan. Programs that differ in sizes share what is made before there are
            any: one of them has it.
        trace, compile: JAX's tracing, and XLA.
        flops, bytes: see `Report`. donated_bytes: of the arguments, what results are written into. cache_bytes: the
            state that it keeps between calls.
    """

    program: str
    prove: float
    lower: float
    trace: float
    compile: float
    flops: int
    bytes: int
    peak_bytes: int
    donated_bytes: int
    cache_bytes: int

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.prove + self.lower + self.trace + self.compile


@dataclass(frozen=True)
class RequestReport:
    """What became of the last request, and how fast. Seconds on the clock, in which `compiled` programs and functions
    were compiled; those of a stream have in them what its reader took.

    Attributes:
        kind: what the request holds `rows` of: "prompts", "texts", "images".
        prompt_tokens: tokens of them all; 0 for images. `cached_tokens` of them were not read for this request: a state
            held them, or prompts share them and one was read. `reread` says why others were that a state held, if any.
        prompt_seconds: until they were read; of prompts, until the first new token of each was there.
        new_tokens: of the answers, all together; `first_tokens` of them came with the reading of the prompts.
        answer_seconds: for the others.
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

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompts that were read for this request."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_rate(self) -> float:
        """Tokens read a second; of images, images."""
        return per_second(self.read_tokens or self.rows, self.prompt_seconds)

    @property
    def answer_rate(self) -> float:
        """New tokens a second, but for the first ones."""
        return per_second(self.new_tokens - self.first_tokens, self.answer_seconds)

    def __str__(self) -> str:
        tokens = f" of {self.prompt_tokens:,} tokens" if self.prompt_tokens else ""
        tokens += f", {self.read_tokens:,} of them" if self.cached_tokens else ""
        unit = "tokens" if self.prompt_tokens else self.kind
        took = f"{self.prompt_seconds:.3f} s, {self.prompt_rate:,.0f} {unit}/s"
        told = f"{self.rows:,} {self.kind}{tokens} read in {took}"
        if self.answer_seconds:
            rate = f"{self.answer_rate:,.0f} tokens/s"
            told += f"; {self.new_tokens:,} new tokens, in {self.answer_seconds:.3f} s behind the first, {rate}"
        told += f"; {self.reread}" if self.reread else ""
        return told + (f"; {self.compiled} programs and functions were compiled in it" if self.compiled else "")


def per_second(count: int, seconds: float) -> float:
    """How many a second; 0 where no time was measured."""
    return count / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Report:
    """What compiling cost and what the program needs. Times in seconds, sizes in bytes.

    `program` is the one that ran last, with its sizes; what depends on sizes is of it, `cache_bytes` what its state
    takes. `programs` are all that are kept. `compiles` counts programs that XLA compiled, `loaded` those that came from
    the compile cache (`rlx_jax.compile_cache`) instead, `evicted` those of both that are not kept any more
    (`buckets.programs`), `recompiles` those made after warm-up, small functions beside them included; `recompiled`
    names the last of these, and why. `embedding`: how an encoder lays texts out, or why not otherwise.
    `request`: how fast the last one was. `speculative`: of the last request that drafted, so far. `seed`: that the last
    request drew its tokens from, its own or one made for it; None where it drew none, or from a key. `initialised`: the
    keys of the weights that were drawn, as no source had them (`missing="init"`). `ignored_fields`: the fields of
    the config that may change the computation and that the caller ignored (`ignore_fields=`).

    Over a mesh: `mesh` are its axes, `leaf_bytes` what one device has of the parameters, `shardings` how leaves are
    divided and how many are, `whole` the leaves of more than one axis that every device has whole, `collectives` what
    the program sends between devices, by kind. Bytes of programs are those of one device.
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
    loop: Loop | None = None
    attention: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    recurrences: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None
    workspace: int | None = None
    donated_bytes: int | None = None
    peak_bytes: int | None = None
    estimated_activation_bytes: int | None = None
    mesh: str = ""
    leaf_bytes: int | None = None
    shardings: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    collectives: Mapping[str, int] = field(default_factory=dict)
    embedding: str = ""
    speculative: Speculated | None = None
    seed: int | None = None
    initialised: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    programs: tuple[ProgramReport, ...] = ()
    cache_bytes: int | None = None
    request: RequestReport | None = None
    recompiled: tuple[str, ...] = ()
    loaded: int = 0

    def __str__(self) -> str:
        rows: list[tuple[str, object]] = [
            ("parameters", f"{self.parameter_bytes:,} bytes"),
            ("compiles", str(self.compiles)),
            ("loaded", self.loaded and f"{self.loaded} from the compile cache"),
            ("evicted", self.evicted),
            ("recompiles", self.recompiles),
            *(("compiled late", told) for told in self.recompiled),
            ("program", self.program),
        ]
        for name, (label, unit) in NEEDS.items():
            if (value := getattr(self, name)) is not None:
                rows.append((label, f"{value:,}{unit}"))
        rows.append(("nodes", ", ".join(f"{name} {count}" for name, count in self.nodes.items())))
        rows += [("fusion", self.fusion.summary), *(("not fused:", m) for m in self.fusion.missed)]
        rows.append(("planned for", self.device))
        for name in ("attention", "products", "experts"):
            rows += [(name, each) for each in layers_once(getattr(self, name))]
        rows += [("recurrence", r) for r in self.recurrences]
        rows += [("generating loop", self.loop), ("embedding", self.embedding), ("request", self.request)]
        rows += [("speculative", self.speculative), ("seed", "" if self.seed is None else str(self.seed))]
        if self.initialised:
            rows.append(("initialised", f"{len(self.initialised)} weights: {listing(self.initialised, 8)}"))
        rows.append(("ignored fields", self.ignored_fields and listing(self.ignored_fields, 8)))
        rows += self._on_mesh() if self.mesh else []
        rows += [("not rolled:", r) for r in self.refusals]
        lines = (str(TextTable([row], widths=(18,), gap=" ", wrap=80)) for row in rows if row[1])
        return "\n".join([*self._seconds(), *lines, *self._programs()])

    def _seconds(self) -> list[str]:
        """A line for each step that took a while, and one for all others."""
        short = {name for name, took in self.seconds.items() if took < SHORT and name not in STEPS}
        rows = [(name, f"{took:.3f} s") for name, took in self.seconds.items() if name not in short]
        if short:
            rows.append((f"{len(short)} passes", f"{sum(self.seconds[name] for name in short):.3f} s"))
        return [str(TextTable(rows, widths=(26, 10), gap=" "))] if rows else []

    def _programs(self) -> list[str]:
        """A table of the programs, whose columns are seconds, operations and bytes."""
        if not self.programs:
            return []
        heads = ("prove", "lower", "trace", "compile", "FLOPs", "peak", "cache")
        rows = []
        for r in self.programs[:PROGRAMS]:
            seconds = [f"{took:.3f}" for took in (r.prove, r.lower, r.trace, r.compile)]
            name = shortened(r.program.replace(" of ", " ").replace(",", ""), 32)
            rows.append((name, *seconds, *map(in_short, (r.flops, r.peak_bytes, r.cache_bytes))))
        lines = ["", str(TextTable(rows, ("programs", *heads), widths=(32, *WIDTHS), gap=""))]
        if others := self.programs[PROGRAMS:]:
            lines.append(f"{len(others)} others, {sum(r.seconds for r in others):.3f} s")
        return lines

    def _on_mesh(self) -> list[tuple[str, object]]:
        found = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        return [
            ("mesh", self.mesh),
            ("of one device", f"{self.leaf_bytes:,} bytes of parameters"),
            *(("divided", f"{count} leaves as {spec}") for spec, count in self.shardings.items()),
            ("collectives", self.program and (found or "none")),
            *(("whole on each device:", name) for name in self.whole),
        ]


def layers_once(told: Sequence[str]) -> list[str]:
    """Lines `block: choice`, those that say the same of layers once: `layers.*.self_attn: xla (2 of them)`."""
    counts = Counter(": ".join((together(path), *rest)) for path, *rest in (line.split(": ", 1) for line in told))
    return [line if count == 1 else f"{line} ({count} of them)" for line, count in counts.items()]


def in_short(number: int) -> str:
    """At most five characters: `812`, `1.2k`, `34M`."""
    value = float(number)
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if value >= 9.95 or not unit else f"{value:.1f}{unit}"


def over_mesh(report: Report, division: Division, layout: Layout) -> Report:
    """A report with what depends on the mesh that the model lies over."""
    placed = [division.placed(program) for program in layout.leaves.values()]
    return replace(
        report,
        mesh=division.text(),
        leaf_bytes=sum(nbytes for _, nbytes in placed),
        shardings=dict(Counter(spec for spec, _ in placed if set(spec) - set("(-, )"))),
        whole=division.whole_leaves(layout.leaves.values()),
    )


def text_of(programs: Programs, key: ProgramKey, level: str) -> str:
    """A program with its sizes at "lir", "stablehlo" or "hlo".

    Raises:
        GraphError: it was not compiled, or is not kept any more.
    """
    if level == "lir":
        return dump_lir(programs.function(key).lir)
    executable = programs.executables.get(key)
    if executable is None:
        raise GraphError(
            f"text({level!r}): this size was only traced through apply, or its program is not kept any more; give "
            f"inputs: text({level!r}, x)"
        )
    return str(executable.lowered.as_text()) if level == "stablehlo" else str(executable.call.as_text())


def jaxpr_of(programs: Programs, template: Template, params: Arrays) -> Any:
    """A program with symbolic sizes as JAX traces it; `params` are shapes."""
    mir = template.mir
    lir = Lir(mir, programs.settings.plan)
    state = {name: t.spec for name, t in template.state.items()}
    inputs = {i.input: i.type.spec for i in mir.inputs}
    return jax.make_jaxpr(make_function(lir, programs.layout))(params, state, inputs)


def programs_of(programs: Programs) -> tuple[ProgramReport, ...]:
    """Every program that is kept, of flows beside the model's too, what took longest to compile first."""
    every = [(programs, len(programs.flows) > 1), *((other.programs, True) for other in programs.beside.values())]
    found = (report for one, named in every for report in _own_programs(one, named))
    return tuple(sorted(found, key=lambda r: (-r.seconds, r.program)))


def _own_programs(programs: Programs, named: bool) -> Iterator[ProgramReport]:
    """Those of its own flows, with the flow's name where they are `named`."""
    counted: set[ProgramKey] = set()  # programs of other sizes share what is made before there are sizes
    for key, made in programs.executables.items():
        template, seconds = programs.template(key.symbolic), made.seconds
        shared = {} if key.symbolic in counted else template.seconds
        counted.add(key.symbolic)
        needs, memory = made.needs, cast(Any, made.call.memory_analysis())
        yield ProgramReport(
            f"{key.flow}: {key.text}" if named else key.text,
            prove=shared.get("derive", 0.0) + seconds["prove"],
            lower=sum(s for name, s in shared.items() if name != "derive") + seconds["plan"],
            trace=seconds["trace"],
            compile=seconds["compile"],
            flops=needs.flops,
            bytes=needs.bytes,
            peak_bytes=made.peak_bytes,
            donated_bytes=memory.alias_size_in_bytes,
            cache_bytes=state_bytes(template, key),
        )


def state_bytes(template: Template, key: ProgramKey | None) -> int:
    """What the state of a program takes, of all devices together; 0 without one."""
    sizes = dict(key.binding) if key else {}
    return sum(t.bind(sizes).nbytes for t in template.state.values())


def report_of(
    programs: Programs, template: Template, last: ProgramKey | None, seconds: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Report:  # fmt: skip
    """The report on `template`, and on the program that ran `last`, or with `sizes` on that of those."""
    settings = programs.settings
    found = model_report(programs, template, settings, seconds)
    if sizes:
        cost = template.cost(sizes)
        check_counted(sizes, template.bounds, template.built.name)
        return replace(found, **asdict(cost))
    executable = programs.executables.get(last) if last else None
    if executable is None:
        return found
    lir, memory = executable.lir, cast(Any, executable.call.memory_analysis())
    return replace(
        found,
        seconds={**seconds, **executable.seconds},
        program=last.text if last else "",
        attention=lir.attention(),
        products=lir.products(),
        experts=lir.experts(),
        recurrences=lir.recurrences(),
        **asdict(executable.needs),
        collectives={} if settings.division is None else collectives(executable.call.as_text() or ""),
        donated_bytes=memory.alias_size_in_bytes,
        cache_bytes=state_bytes(template, last),
        peak_bytes=executable.peak_bytes,
        estimated_activation_bytes=activation_bytes(lir.graph, lir.plan.donate_state, lir.plan.scan),
    )


def model_report(programs: Programs, template: Template, settings: Settings, seconds: Mapping[str, float]) -> Report:
    """What the report says that depends on no sizes."""
    every = [programs, *(other.programs for other in programs.beside.values())]
    found = Report(
        seconds,
        nodes=template.nodes,
        parameter_bytes=sum(t.nbytes for t in programs.layout.types().values()),
        compiles=sum(one.executables.made - one.loaded for one in every),
        loaded=sum(one.loaded for one in every),
        evicted=sum(one.executables.evicted for one in every),
        recompiles=sum(one.recompiles for one in every),
        initialised=programs.initialised,
        ignored_fields=tuple(
            dict.fromkeys(name for flow in programs.flows.values() for name in getattr(flow, "_ignored_fields", ()))
        ),
        recompiled=tuple(programs.surprises),
        programs=programs_of(programs),
        refusals=template.built.refusals,
        fusion=template.fusion,
        device=settings.device,
        loop=settings.loop if any(key.program == "extend" for key in programs.templates) else None,
    )
    return found if settings.division is None else over_mesh(found, settings.division, programs.layout)
