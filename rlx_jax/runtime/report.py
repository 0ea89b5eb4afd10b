"""What `model.report()` tells."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlx_jax.compiler.settings import Loop
from rlx_jax.device import Device
from rlx_jax.errors import listing
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.inspect.fusion_report import FusionReport
from rlx_jax.lowering.inspect.scopes import together
from rlx_jax.lowering.lir.layout import Layout
from rlx_jax.runtime.block_times import shortened

NEEDS = {
    "flops": ("flops", ""),
    "bytes": ("bytes", ""),
    "workspace": ("workspace", " bytes"),
    "donated_bytes": ("donated_bytes", ""),
    "peak_bytes": ("peak_bytes", ""),
    "cache_bytes": ("cache_bytes", ""),
    "estimated_activation_bytes": ("activations", " bytes, estimated"),
}
"""What a program needs: the name of its line, and what stands behind the number."""
STEPS = ("build", "load", "plan", "trace", "compile", "prove")
"""Seconds that are not of a pass, and have a line of their own."""
SHORT = 0.002
"""Seconds under which passes share a line."""
PROGRAMS = 16
WIDTHS = (7, 7, 7, 8, 6, 6, 7)
"""Programs in the table, and the widths of its columns behind the name."""


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
        told = (
            f"{self.rows:,} {self.kind}{tokens} read in {self.prompt_seconds:.3f} s, {self.prompt_rate:,.0f} {unit}/s"
        )
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
        rows = [
            *self._seconds(),
            _row("parameters", f"{self.parameter_bytes:,} bytes"),
            _row("compiles", self.compiles),
        ]
        rows += [_row("loaded", f"{self.loaded} from the compile cache")] if self.loaded else []
        rows += [_row("evicted", self.evicted)] if self.evicted else []
        rows += [_row("recompiles", self.recompiles)] if self.recompiles else []
        rows += [_row("compiled late", told) for told in self.recompiled]
        rows += [_row("program", self.program)] if self.program else []
        for name, (label, unit) in NEEDS.items():
            if (value := getattr(self, name)) is not None:
                rows.append(_row(label, f"{value:,}{unit}"))
        rows.append(_row("nodes", ", ".join(f"{name} {count}" for name, count in self.nodes.items())))
        rows += [_row("fusion", self.fusion.summary), *(_row("not fused:", m) for m in self.fusion.missed)]
        rows.append(_row("planned for", self.device))
        for name, told in (("attention", self.attention), ("products", self.products), ("experts", self.experts)):
            rows += [_row(name, each) for each in layers_once(told)]
        rows += [_row("recurrence", r) for r in self.recurrences]
        for name, found in (
            ("generating loop", self.loop),
            ("embedding", self.embedding),
            ("request", self.request),
            ("speculative", self.speculative),
        ):
            rows += [_row(name, found)] if found else []
        rows += [_row("seed", self.seed)] if self.seed is not None else []
        if self.initialised:
            rows.append(_row("initialised", f"{len(self.initialised)} weights: {listing(self.initialised, 8)}"))
        rows += [_row("ignored fields", listing(self.ignored_fields, 8))] if self.ignored_fields else []
        rows += self._on_mesh() if self.mesh else []
        rows += [_row("not rolled:", r) for r in self.refusals]
        return "\n".join([*rows, *self._programs()])

    def _seconds(self) -> list[str]:
        """A line for each step that took a while, and one for all others."""
        short = {name for name, took in self.seconds.items() if took < SHORT and name not in STEPS}
        rows = [f"{name:<26} {took:8.3f} s" for name, took in self.seconds.items() if name not in short]
        if short:
            rows.append(f"{f'{len(short)} passes':<26} {sum(self.seconds[name] for name in short):8.3f} s")
        return rows

    def _programs(self) -> list[str]:
        """A table of the programs, whose columns are seconds, operations and bytes."""
        if not self.programs:
            return []
        heads = ("prove", "lower", "trace", "compile", "FLOPs", "peak", "cache")
        rows = ["", f"{'programs':<32}{''.join(f'{head:>{w}}' for head, w in zip(heads, WIDTHS, strict=True))}"]
        for r in self.programs[:PROGRAMS]:
            seconds = [f"{took:.3f}" for took in (r.prove, r.lower, r.trace, r.compile)]
            cells = [*seconds, *(in_short(n) for n in (r.flops, r.peak_bytes, r.cache_bytes))]
            name = shortened(r.program.replace(" of ", " ").replace(",", ""), 32)
            rows.append(f"{name:<32}{''.join(f'{cell:>{w}}' for cell, w in zip(cells, WIDTHS, strict=True))}")
        if others := self.programs[PROGRAMS:]:
            rows.append(f"{len(others)} others, {sum(r.seconds for r in others):.3f} s")
        return rows

    def _on_mesh(self) -> list[str]:
        found = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        return [
            _row("mesh", self.mesh),
            _row("of one device", f"{self.leaf_bytes:,} bytes of parameters"),
            *(_row("divided", f"{count} leaves as {spec}") for spec, count in self.shardings.items()),
            *([_row("collectives", found or "none")] if self.program else []),
            *(_row("whole on each device:", name) for name in self.whole),
        ]


def _row(name: str, told: object) -> str:
    """A line, broken at 80 columns."""
    begin = f"{name:<18} "
    return textwrap.fill(
        str(told), 80, initial_indent=begin, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False
    )


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
