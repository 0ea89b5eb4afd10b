"""All programs of one model: what is compiled for it, once for each choice of sizes. The only place that compiles."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from rlx_jax.compiler.compile_cache import from_cache
from rlx_jax.compiler.executable import (
    Around,
    Arrays,
    Executable,
    Function,
    Progress,
    RunsOthers,
    Shardings,
    StateArrays,
    compile_program,
    guarded,
    new_arguments,
    on_device,
)
from rlx_jax.compiler.meshes import at_home, in_any_mesh, own_mesh
from rlx_jax.compiler.pipeline import Template, make_function, make_lir, make_template, with_hidden
from rlx_jax.compiler.settings import Settings, choose_settings, divided
from rlx_jax.errors import (
    DeriveError,
    DonationWarning,
    FusionError,
    GraphError,
    RequestError,
    RlxWarning,
    UnsupportedError,
    listing,
    quote,
)
from rlx_jax.ir.types import DimLike
from rlx_jax.ir.user_functions import Captured
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.lir.plan import Layout, Lir, given_leaves, state_leaves
from rlx_jax.lowering.mir.small import unread_inputs
from rlx_jax.lowering.sharding import Division
from rlx_jax.profiles import CompileProfile
from rlx_jax.program import Buildable, Built
from rlx_jax.runtime.inputs import check_length
from rlx_jax.runtime.lru import Lru
from rlx_jax.runtime.sequence_state import EmptyState, empty_state


@dataclass(frozen=True)
class ProgramKey:
    """What an executable is for: a flow of the model, by name, one of its programs, and sizes.

    The profile and the layout are those of all flows. Without `binding` it is the key of the template, whose sizes are
    symbols.

    Attributes:
        given: the optional inputs that there are.
        outputs: the outputs that are wanted, by name; None for all of them.
        last_only: outputs are those of each row's last token.
        headless: it ends at the head, whose operands are the outputs.
        hidden: outputs are the logits, which alone are of the last token where `last_only`, and what the head reads of
            every token, `[B, S, H]`.
    """

    flow: str
    program: str
    given: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    last_only: bool = False
    headless: bool = False
    hidden: bool = False
    binding: tuple[tuple[str, int], ...] = ()
    around: Around | None = None

    @property
    def symbolic(self) -> ProgramKey:
        """The key of its template."""
        return replace(self, binding=(), around=None)

    @property
    def text(self) -> str:
        """`prefill of batch 1, seq 16`."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.binding)
        return f"{self.program} of {sizes}" if sizes else self.program


@dataclass(frozen=True)
class Variant:
    """Which of a program's forms a caller wants, beside its sizes.

    Attributes:
        last_only, outputs, given, hidden: as `ProgramKey` has them.
        spare: tokens that may be taken back from the state's rings, if those are more than the profile says.
    """

    last_only: bool = True
    outputs: tuple[str, ...] | None = None
    given: frozenset[str] = frozenset()
    spare: int = 0
    hidden: bool = False


# All outputs, of each row's last token.
LAST = Variant()


@dataclass(frozen=True)
class Specialised:
    """A program for one choice of sizes, as a pure function and as the same under `jax.jit`."""

    lir: Lir
    run: Function
    jitted: Function
    seconds: float  # that its sizes and its plan took


@dataclass(frozen=True)
class Beside:
    """Programs of a flow that runs beside those of a model, and the parameters that are its own alone."""

    programs: Programs
    params: Mapping[str, Any]


def state_shardings(
    template: Template, sizes: Mapping[str, int], division: Division, given: bool = False
) -> dict[str, NamedSharding]:
    """Where each array of the state is: of that which a program takes, or `given` of that which it gives."""
    found = (given_leaves if given else state_leaves)(template.mir, template.scan)
    return {name: division.value(roles, t.bind(sizes).shape) for name, (t, roles) in found.items()}


# Programs compiled after warm-up that the report names.
SURPRISES = 32

# Symbolic programs that are kept: a flow has few, by program and by which optional inputs are given.
TEMPLATES = 32


class Programs:
    """All programs of a model: of its flows, over one Layout. The only place that compiles.

    Of compiled programs, of the small functions beside them and of what they are made of, `settings.buckets.programs`
    each are kept; the least recently used goes first, and is compiled again when it is asked for.
    """

    def __init__(
        self, flows: Mapping[str, Buildable], source: WeightSource | None, settings: Settings, layout: Layout,
        captured: Mapping[str, Captured], progress: Progress | None,
    ) -> None:  # fmt: skip
        self.flows, self.source, self.settings, self.layout, self.progress = flows, source, settings, layout, progress
        self.captured = captured
        self.initialised: tuple[str, ...] = ()  # keys of weights that were drawn
        self.seed: jax.Array | None = None  # what they are drawn with
        self.idle: dict[tuple[str, frozenset[str]], frozenset[str]] = {}  # inputs that no output reads
        self.opened = (False, "forward")  # whether for requests, whose weights are merged; and for which program
        making, limit = threading.RLock(), settings.buckets.programs  # one compile at a time, whatever it is of
        self.builds: Lru[tuple[str, frozenset[str]], tuple[Built, float]] = Lru(TEMPLATES, making)
        self.templates: Lru[ProgramKey, Template] = Lru(TEMPLATES, making)
        self.reasons: Lru[tuple[str, str, frozenset[str]], str] = Lru(TEMPLATES, making)
        self.functions: Lru[ProgramKey, Specialised] = Lru(limit, making)
        self.executables: Lru[ProgramKey, Executable] = Lru(limit, making)
        self.empty: Lru[Hashable, EmptyState] = Lru(limit, making)
        self.small: Lru[Hashable, Callable[..., Any]] = Lru(limit, making)
        self.plans: Lru[Hashable, Any] = Lru(limit, making)  # the keys of the programs that requests run
        self.beside: Lru[str, Beside] = Lru(TEMPLATES, making)
        self.donation_warnings: set[tuple[str, str]] = set()  # flows and programs with such a warning
        self.warm = False  # warm-up is over
        self.warming: set[ProgramKey] | None = None  # what it has run so far
        self.recompiles = 0  # programs compiled since
        self.loaded = self.loaded_small = 0  # programs and small functions that came from the compile cache
        self.surprises: deque[str] = deque(maxlen=SURPRISES)  # the last of them, and why

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Whatever holds this, a model or a state, is not pickled or copied in depth."""
        raise UnsupportedError(
            f"{', '.join(self.flows)}: compiled programs cannot be pickled or deep-copied; write the parameters with "
            "rlx_jax.save(model, directory), and make the model again with weights=directory, or by rlx_jax.load"
        )

    def template(self, key: ProgramKey) -> Template:
        """The symbolic program; made once."""

        def make() -> Template:
            if key.hidden:
                return self.template(replace(self.whole_of(key), headless=True))
            if key.headless:
                return self.template(replace(key, headless=False)).headless()
            own = key.given & {i.name for i in self.flows[key.flow]._inputs}  # the others are the program's
            return make_template(
                *self.build(key.flow, own), self.settings, key.program, key.last_only, key.given, key.outputs
            )

        return self.templates(key, make)

    def whole_of(self, key: ProgramKey) -> ProgramKey:
        """The key of the program with symbolic sizes that one with hidden states is cut from."""
        return replace(key.symbolic, hidden=False, last_only=False)

    def build(self, flow: str, given: frozenset[str]) -> tuple[Built, float]:
        """A flow with these optional inputs, and the seconds that it took; built once. All programs are made of the
        same ops, closures of the user among them, so that what is proved for one of them holds for the others."""

        def make() -> tuple[Built, float]:
            start = time.perf_counter()
            return self.flows[flow].build(self.source, given, self.captured[flow]), time.perf_counter() - start

        return self.builds((flow, given), make)

    def first_input(self, flow: str) -> str:
        """The name of the first input of a flow that its outputs read: of a model of text, its tokens."""
        names, unread = [i.name for i in self.flows[flow]._inputs], self.unread(flow, frozenset())
        return next((name for name in names if name not in unread), names[0])

    def unread(self, flow: str, given: frozenset[str]) -> frozenset[str]:
        """The inputs, with these optional ones, that no output of a flow reads."""
        if (flow, given) not in self.idle:
            self.idle[flow, given] = unread_inputs(self.build(flow, given)[0].hir)
        return self.idle[flow, given]

    def any_template(self, key: ProgramKey) -> Template:
        """The template of a program, of all rows of its output or of the last ones, whichever is made already."""
        other = replace(key, last_only=not key.last_only)
        return self.template(other if other in self.templates and key not in self.templates else key)

    def why_not(self, flow: str, program: str, given: frozenset[str] = frozenset()) -> str:
        """Why a program cannot be derived for calls that bring these inputs; empty if it can."""

        def make() -> str:
            try:
                self.any_template(ProgramKey(flow, program, given))
            except (DeriveError, FusionError) as reason:  # a profile may want each program to be clean
                return str(reason)
            return ""

        return self.reasons((flow, program, given), make)

    def function(self, key: ProgramKey) -> Specialised:
        """The pure function for one choice of sizes; made once."""

        def make() -> Specialised:
            template = self.template(key.symbolic)
            start = time.perf_counter()
            lir = make_lir(template, dict(key.binding), self.settings)
            seconds = time.perf_counter() - start
            run = make_function(lir, self.layout, self.division)
            if key.hidden:
                run = with_hidden(run, self.template(self.whole_of(key)).head, key.last_only)
            if key.around is not None:  # it has inputs of its own
                lir, run = replace(lir, plan=replace(lir.plan, donate_inputs=())), key.around(run)
            return Specialised(lir, run, jax.jit(in_any_mesh(run, template, lir, self.division)), seconds)

        return self.functions(key, make)

    def executable(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Executable:
        """The compiled program for one choice of sizes; made once. Arguments may be `ShapeDtypeStruct`."""

        def make() -> Executable:
            self.check_compiled(key)
            if self.settings.buckets.on_recompile == "warn" and (reason := self.refusal(key)[0]):
                warnings.warn(f"{reason}; compiling it", RlxWarning, stacklevel=2)
            if self.warm:
                self.surprise(f"{key.text}: {self.refusal(key)[0]}")
            what = f"compile {key.text}"
            self.tell(what, 0, 1)
            program = self.function(key)
            with own_mesh(self.division):
                beside = key.around.beside() if isinstance(key.around, RunsOthers) else None
                at = self.shardings(key, inputs)
                made = compile_program(program.lir, program.run, params, state, inputs, at, beside, key.text)
            self.warn_of_donation(key, made)
            made.seconds = {"plan": program.seconds, **made.seconds}
            self.loaded += made.loaded
            self.tell(what, 1, 1)
            return made

        if self.warming is not None:
            self.warming.add(key)
        return self.executables(key, make)

    def warn_of_donation(self, key: ProgramKey, executable: Executable) -> None:
        """Warn of a program that takes more memory than its plan, once for all sizes of the program."""
        problem = executable.donation.problem() if executable.donation is not None else ""
        if problem and (key.flow, key.program) not in self.donation_warnings:
            self.donation_warnings.add((key.flow, key.program))
            name = executable.lir.graph.name
            message = f"{name}: {key.text}: {problem}; donation.strict = true in the profile makes this an error"
            warnings.warn(message, DonationWarning, stacklevel=2)

    @property
    def division(self) -> Division | None:
        """How the model is divided over devices, if it is."""
        return self.settings.division

    @property
    def whole(self) -> NamedSharding | None:
        """Where every device has all of an array; None on one device."""
        return None if self.division is None else self.division.whole

    def resting(self) -> dict[str, NamedSharding] | None:
        """Where each leaf is kept; None on one device."""
        if self.division is None:
            return None
        return {name: self.division.resting(program) for name, program in self.layout.leaves.items()}

    def shardings(self, key: ProgramKey, inputs: Arrays) -> Shardings | None:
        """Where a program has its arguments; None on one device. What is wrapped around it may have inputs of its own:
        those and its outputs every device has whole."""
        if self.division is None:
            return None
        template, division = self.template(key.symbolic), self.division
        declared = {i.input: i.type for i in template.mir.inputs}
        bound = dict(key.binding)
        parts = jax.process_count() == 1  # of several, each brings the whole input, which is divided where it is used
        given = {
            name: division.of_input(declared[name], declared[name].bind(bound).shape)
            if name in declared and parts
            else jax.tree.map(lambda _: division.whole, value)
            for name, value in inputs.items()
        }
        outputs = None if set(inputs) <= set(declared) else division.whole
        state = state_shardings(template, bound, division, given=key.around is None)
        gathered = division.gathered_bytes(self.layout.leaves.values())
        if isinstance(key.around, RunsOthers) and (other := key.around.divided()) is not None:
            given, state, gathered = given | other.inputs, state | other.state, gathered + other.gathered
        return Shardings(self.resting() or {}, state, given, outputs, gathered)

    def resolved(self, profile: CompileProfile, flow: str) -> Settings:
        """What another profile would mean for a flow of this model.

        Raises:
            ProfileError: it contradicts itself.
        """
        merge, program = self.opened
        settings = choose_settings(self.build(flow, frozenset())[0], profile, merge, program)
        settings = settings if self.division is None else divided(settings, self.division)
        return replace(settings, max_positions=self.settings.max_positions)

    def ring_sizes(self, template: Template, context: Any, spare: int = 0) -> dict[str, int]:
        """The slots of each ring in a state of `context` slots, `spare` of them for tokens that may be taken back."""
        buckets = self.settings.buckets
        return {name: buckets.ring(window, context, spare) for name, window in template.rings.items()}

    def empty_state(self, key: ProgramKey, sizes: Mapping[str, DimLike], spare: int = 0) -> EmptyState:
        """What makes an empty state of a program: one for each choice of sizes, of optional inputs and of outputs, as
        what no output reads keeps nothing.

        `key` is without sizes, and `sizes` has them: `batch`, `context` where there are slots, and others; `spare` as
        `Variant` has it.

        Raises:
            GraphError: the program has no state, or a size is not given. SequenceLengthError: over the model's
                positions. ShapeError, DeviceOutOfMemoryError: it is too large.
        """

        def make() -> EmptyState:
            template = self.any_template(key)
            if not template.state:
                raise GraphError(f"program {key.program} of {key.flow} has no state")
            binding: dict[str, Any] = {**self.flows[key.flow]._binding, **sizes}
            check_length(binding.get("context", 0), template.bounds, f"{key.flow}: init_state")
            binding |= self.ring_sizes(template, sizes.get("context"), spare)
            at = {} if self.division is None else state_shardings(template, binding, self.division)
            where = f"{key.flow}: init_state(batch={sizes['batch']}, context={sizes.get('context')})"
            return empty_state(template.state, binding, where, at)

        same = replace(key, last_only=False)  # which rows of the output are wanted changes no state
        return self.empty((same, tuple(sorted(sizes.items())), spare), make)

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell whoever asked for progress."""
        if self.progress is not None:
            self.progress(what, done, total)

    def call(self, function: Callable[..., Any], *arguments: Any, static: tuple[Any, ...] = (), at: Any = None) -> Any:
        """A small function beside the programs, such as one that makes an empty state. It is compared by value, and
        compiled once for each choice of its first arguments, `static`, and of types of the others, which are arrays.
        `at`: shardings of what it returns, the same in every call; None leaves them to XLA."""

        def make() -> Callable[..., Any]:
            if self.warm:
                lacked = new_arguments(function, (key[0] for key in self.small if isinstance(key, tuple)))
                why = lacked or f"for {', '.join(str(jax.typeof(a)) for a in arguments)}"
                name = getattr(function, "__name__", type(function).__name__)
                self.surprise(f"{name}, a function beside the programs: {why}")
            # one of its own, that goes with its one program
            jitted = jax.jit(lambda *arrays: function(*static, *arrays), out_shardings=at)
            call, loaded = from_cache(jitted, moved, at)
            self.loaded_small += loaded
            return call

        types = tuple((a.shape, a.dtype) for a in jax.tree.leaves(arguments))
        with own_mesh(self.division):
            moved = on_device(at_home(arguments, self.division))
            if self.division is not None and guarded():  # what is on one device would go to the others unasked
                moved = jax.device_put(moved, self.whole)
            return self.small((function, static, types), make)(*moved)

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """Inside, everything is run that requests will need; from then on, what compiles is a surprise.

        Raises:
            RequestError: that is more than are kept.
        """
        self.warm, self.warming = False, set()
        try:
            with contextlib.ExitStack() as others:
                for other in self.beside.values():
                    others.enter_context(other.programs.warm_up())
                yield
            if self.warming - set(self.executables):
                raise RequestError(
                    f"warmup: the profile's buckets need {len(self.warming)} programs, and buckets.programs = "
                    f"{self.executables.limit} are kept; raise it, at some megabytes each, or use fewer buckets"
                )
            self.warm = True
        finally:
            self.warming = None

    @property
    def closed(self) -> bool:
        """Whether warm-up is over and whatever compiles is an error."""
        return self.warm and self.settings.buckets.on_recompile == "error"

    def refusal(self, key: ProgramKey) -> tuple[str, str]:
        """Why this program should not be compiled now, and what to do; empty if it may be."""
        buckets, binding = self.settings.buckets, dict(key.binding)
        sizes = {dim: n for dim, n in binding.items() if (key.program, dim) != ("verify", "seq")}  # drafts, no prompt
        if key in self.executables or not (self.warm or buckets.foreign(sizes)):
            return "", ""
        texts = {"batch": "{} rows", "seq": "length {}", "context": "a cache of {} slots"}
        told = ", ".join(text.format(binding[dim]) for dim, text in texts.items() if dim in binding)
        if not key.last_only and replace(key, last_only=True) in self.executables:
            reason = f'{key.flow}: {told}: warm-up was for logits="last", not for those of every position'
            return reason, 'ask for logits="last"'
        other = next((k.given for k in self.executables if replace(k, given=key.given) == key), None)
        if other is not None:
            now, then = (f"with {listing(sorted(names))}" if names else "without any" for names in (key.given, other))
            return f"{key.flow}: {told}: of the optional inputs, warm-up was {then}, not {now}", f"call it {then}"
        fits = self.warm and not buckets.foreign(sizes)
        if fits and (lacked := new_arguments(key.around, (k.around for k in self.executables))):
            return f"{key.flow}: {told}: {lacked}", "warm up for that too"
        ran = {k.program for k in self.executables if k.flow == key.flow}
        if fits and ran and key.program not in ran:
            asked = ", which `logits` runs" if key.program == "forward" else ""
            reason = f"{key.flow}: {told}: warm-up ran {listing(sorted(ran))}, not {key.program}{asked}"
            return reason, "ask for what it ran"
        first = self.first_input(key.flow)
        reason = (
            f"{key.flow}: input {quote(first)} with {told or 'no size'}: no {key.program} "
            f"program is compiled for that; {buckets.text() or 'warm-up was for other sizes'}"
        )
        return reason, "ask for sizes that fit"

    def check_compiled(self, key: ProgramKey) -> None:
        """Refuse a program that the profile does not want compiled now, before anything runs.

        Raises:
            RequestError: `buckets.on_recompile` is `error`.
        """
        if self.settings.buckets.on_recompile == "error":
            reason, remedy = self.refusal(key)
            if reason:
                raise RequestError(f"{reason}; {remedy}, or change the profile's buckets")

    def clock(self) -> Callable[[], tuple[float, int]]:
        """Return a function that returns the seconds since now, and how many programs and small functions were compiled
        in them."""

        def compiled() -> int:
            return self.executables.made - self.loaded + self.small.made - self.loaded_small

        start, before = time.perf_counter(), compiled()
        return lambda: (time.perf_counter() - start, compiled() - before)

    def surprise(self, what: str) -> None:
        """Count what is compiled after warm-up, and keep it for the report."""
        self.recompiles += 1
        self.surprises.append(what)
