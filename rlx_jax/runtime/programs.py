"""All programs of one model: what is compiled for it, once for each choice of sizes. The only place that compiles."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from rlx_jax.compiler.effects import warn_without_effect
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
    on_device,
)
from rlx_jax.compiler.meshes import divide_model
from rlx_jax.compiler.pipeline import Template, facts_of, make_function, make_lir, make_template
from rlx_jax.compiler.settings import Settings, check_inputs, choose_profile, choose_settings, divided
from rlx_jax.errors import (
    GraphError,
    ProfileError,
    RecompileError,
    RequestError,
    RlxWarning,
    UnexpectedWeightError,
    UnsupportedError,
    listing,
    quote,
    shown,
)
from rlx_jax.ir.captured import Captured
from rlx_jax.ir.reading import WeightSource
from rlx_jax.lowering.division import Division, check_divides
from rlx_jax.lowering.lir.layout import Layout, layout_of
from rlx_jax.lowering.lir.plan import Lir, given_leaves, state_leaves
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.program import Buildable, Built, Weights
from rlx_jax.runtime.drawing import check_missing, draw_lacking, drawing
from rlx_jax.runtime.heads import with_hidden
from rlx_jax.runtime.lru import Lru
from rlx_jax.runtime.placing import at_home, in_any_mesh, own_mesh
from rlx_jax.runtime.state import EmptyState
from rlx_jax.weights.beside import with_drawn


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


SURPRISES = 32
"""Programs compiled after warm-up that the report names."""

TEMPLATES = 32
"""Symbolic programs that are kept: a flow has few, by program and by which optional inputs are given."""


class Programs:
    """All programs of a model: of its flows, over one Layout. The only place that compiles.

    Of compiled programs, of the small functions beside them and of what they are made of, `settings.buckets.programs`
    each are kept; the least recently used goes first, and is compiled again when it is asked for.
    """

    def __init__(
        self,
        flows: Mapping[str, Buildable],
        source: WeightSource | None,
        settings: Settings,
        layout: Layout,
        captured: Mapping[str, Captured],
        progress: Progress | None = None,
    ) -> None:
        self.flows, self.source, self.settings, self.layout, self.progress = flows, source, settings, layout, progress
        self.captured = captured
        self.initialised: tuple[str, ...] = ()  # keys of weights that were drawn
        self.opened = (False, "forward")  # whether for requests, whose weights are merged; and for which program
        making, limit = threading.RLock(), settings.buckets.programs  # one compile at a time, whatever it is of
        self.builds: Lru[tuple[str, frozenset[str]], tuple[Built, float]] = Lru(TEMPLATES, making)
        self.templates: Lru[ProgramKey, Template] = Lru(TEMPLATES, making)
        self.functions: Lru[ProgramKey, Specialised] = Lru(limit, making)
        self.executables: Lru[ProgramKey, Executable] = Lru(limit, making)
        self.empty: Lru[Hashable, EmptyState] = Lru(limit, making)
        self.small: Lru[Hashable, Callable[..., Any]] = Lru(limit, making)
        self.beside: Lru[str, Beside] = Lru(TEMPLATES, making)
        self.warm = False  # warm-up is over
        self.warming: set[ProgramKey] | None = None  # what it has run so far
        self.recompiles = 0  # programs compiled since
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
            own = key.given & {i.name for i in self.flows[key.flow].inputs}  # the others are the program's
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

    def any_template(self, flow: str, program: str) -> Template:
        """A template of the program, one that is made already if there is: they differ in what they return."""
        made = (key for key in self.templates if (key.flow, key.program, key.given) == (flow, program, frozenset()))
        return self.template(next(made, None) or ProgramKey(flow, program))

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
            self.admit(key)
            what = f"compile {key.text}"
            self.tell(what, 0, 1)
            program = self.function(key)
            with own_mesh(self.division):
                beside = key.around.beside() if isinstance(key.around, RunsOthers) else None
                at = self.shardings(key, inputs)
                made = compile_program(program.lir, program.run, params, state, inputs, at, beside)
            made.seconds = {"plan": program.seconds, **made.seconds}
            self.tell(what, 1, 1)
            return made

        if self.warming is not None:
            self.warming.add(key)
        return self.executables(key, make)

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

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell whoever asked for progress."""
        if self.progress is not None:
            self.progress(what, done, total)

    def call(self, function: Callable[..., Any], *arguments: Any, at: Any = None) -> Any:
        """A small function beside the programs, such as one that makes an empty state. It is compared by value, and
        compiled once for each choice of types of its arguments, which are arrays. `at`: shardings of what it returns,
        the same in every call; None leaves them to XLA."""

        def make() -> Callable[..., Any]:
            if self.warm:
                self.surprise(f"{named_function(function)}: a function beside the programs, for arrays of other types")
            # one of its own, that goes with its one program
            return jax.jit(lambda *arrays: function(*arrays), out_shardings=at)

        types = tuple((a.shape, a.dtype) for a in jax.tree.leaves(arguments))
        with own_mesh(self.division):
            moved = on_device(at_home(arguments, self.division))
            if self.division is not None and guarded():  # what is on one device would go to the others unasked
                moved = jax.device_put(moved, self.whole)
            return self.small((function, types), make)(*moved)

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
        first = self.flows[key.flow].inputs[0].name
        reason = (
            f"{key.flow}: input {quote(first)} with {told or 'no size'}: no {key.program} "
            f"program is compiled for that; {buckets.text() or 'warm-up was for other sizes'}"
        )
        return reason, "ask for sizes that fit"

    def check_compiled(self, key: ProgramKey) -> None:
        """Refuse a program that the profile does not want compiled now, before anything runs.

        Raises:
            RecompileError: `buckets.on_recompile` is `error`.
        """
        if self.settings.buckets.on_recompile == "error":
            reason, remedy = self.refusal(key)
            if reason:
                raise RecompileError(f"{reason}; {remedy}, or change the profile's buckets")

    def admit(self, key: ProgramKey) -> None:
        """As `check_compiled`, and count or warn of what is compiled all the same."""
        self.check_compiled(key)
        if self.settings.buckets.on_recompile == "warn" and (reason := self.refusal(key)[0]):
            warnings.warn(f"{reason}; compiling it", RlxWarning, stacklevel=2)
        if self.warm:
            self.surprise(f"{key.text}: {self.refusal(key)[0]}")

    def clock(self) -> Callable[[], tuple[float, int]]:
        """A function that says how many seconds ago this was, and how many programs and small functions were made."""
        start, before = time.perf_counter(), self.executables.made + self.small.made
        return lambda: (time.perf_counter() - start, self.executables.made + self.small.made - before)

    def surprise(self, what: str) -> None:
        """Count what is compiled after warm-up, and keep it for the report."""
        self.recompiles += 1
        self.surprises.append(what)


def open_programs(
    flows: Sequence[Any],
    weights: Weights,
    profile: ProfileLike | None,
    strict: bool,
    merge: bool,
    program: str = "forward",
    progress: Progress | None = None,
    max_positions: int | None = None,
    serves: tuple[str, ...] = (),
    mesh: Any = None,
    missing: str = "error",
    key: Any = None,
) -> Programs:
    """Build each flow once, resolve the profile and choose one layout for all. Reads shapes, no data.

    `program` decides how layers run and are stored; every program of the model shares it, and takes no more than
    `max_positions` tokens. `serves`: the programs of a model that takes requests of every size; else calls run
    `program` alone. `mesh`: the devices that it is divided over, see `divide_model`. `missing`, `key`: see `compile`.

    Raises:
        GraphError: two flows of one name, or no flow at all, or flows that read their weights from different places.
        ProfileError: the flows' own profiles say different things.
    """
    profile = None if profile is None else CompileProfile.of(profile)
    if not isinstance(strict, bool):
        raise RequestError(f"strict is {shown(strict)}; expected True or False")
    if progress is not None and not callable(progress):
        raise RequestError(f"progress is {shown(progress)}; expected a function of (what, done, total)")
    seed = check_missing(missing, key)
    named = by_name([as_flow(flow) if seed is None else drawing(as_flow(flow)) for flow in flows])
    builds: dict[str, tuple[Built, float]] = {}
    for name, flow in named.items():
        start = time.perf_counter()
        with paused_gc():
            built = flow.build(weights)
        builds[name] = built, time.perf_counter() - start
        weights = built.source if weights is not None else None  # opened once
    fresh: dict[str, jax.Array] = {}
    if seed is not None and (fresh := draw_lacking([built for built, _ in builds.values()], seed)):
        drawn = with_drawn(next(built.source for built, _ in builds.values()), fresh)
        builds = {name: (flow.build(drawn), builds[name][1]) for name, flow in named.items()}
    source = check_sources([built for built, _ in builds.values()], strict)
    settings = one_settings({name: choose_settings(b, profile, merge, program) for name, (b, _) in builds.items()})
    division = divide_model(mesh, [built for built, _ in builds.values()], settings, program, serves)
    settings = replace(settings if division is None else divided(settings, division), max_positions=max_positions)
    first = program if program in ("train", "explicit") else "forward"
    templates = {name: make_template(*build, settings, first, False) for name, build in builds.items()}
    layout = layout_of([t.hir for t in templates.values()], settings.scan)
    if len(named) > 1 and settings.merge and layout.repeated():
        # Merged in one flow and not in another, a weight would be stored twice.
        settings = replace(settings, merge=False)
        templates = {name: make_template(*build, settings, first, False) for name, build in builds.items()}
        layout = layout_of([t.hir for t in templates.values()], settings.scan)
    if division is not None:
        check_divides(division, layout.leaves.values())
    captured = {name: built.captured for name, (built, _) in builds.items()}
    programs = Programs(named, source, settings, layout, captured, progress)
    programs.opened = merge, program
    programs.initialised = tuple(fresh)
    warn_without_effect(
        [
            facts_of(t, choose_profile(t.built, profile), settings, serves or (program,), bool(serves))
            for t in templates.values()
            if t.built.plan is None
        ]
    )
    for name, flow in named.items():
        check_inputs(settings.donate_inputs, flow)
        programs.builds.put((name, frozenset()), builds[name])
        programs.templates.put(ProgramKey(name, first), templates[name])
    return programs


def named_function(function: Callable[..., Any]) -> str:
    """The name of a function, or of what is called as one."""
    return str(getattr(function, "__name__", type(function).__name__))


def by_name(flows: Sequence[Buildable]) -> dict[str, Buildable]:
    """Flows by name.

    Raises:
        GraphError: none, or two of one name.
    """
    named = {flow.name: flow for flow in flows}
    if not named or len(named) < len(flows):
        raise GraphError(f"flows of one model have names of their own; got {listing([f.name for f in flows])}")
    return named


def one_settings(found: Mapping[str, Settings]) -> Settings:
    """The settings of all flows.

    Raises:
        ProfileError: they differ; the fields are named.
    """
    (name, first), *others = found.items()
    for other, settings in others:
        differ = [f.name for f in fields(Settings) if getattr(settings, f.name) != getattr(first, f.name)]
        if differ:
            raise ProfileError(
                f"flows of one model share one profile, and {name!r} and {other!r} differ in {listing(differ)}; pass "
                "profile="
            )
    return first


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection inside: a build allocates thousands of small objects that all live on, and looking
    at them again and again takes a third of the time of a deep model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def as_flow(flow: Any) -> Buildable:
    """What to build, from a ModelFlow, a GraphModule, a recipe, a zero-argument function or a Built."""
    if isinstance(flow, Buildable):
        return flow
    if isinstance(getattr(flow, "programs", None), Programs):
        raise GraphError("this model is compiled already: call it, or give it other numbers with .replace(params=…)")
    if isinstance(getattr(getattr(flow, "model", None), "programs", None), Programs):
        raise GraphError(f"this {type(flow).__name__} is compiled already: pass its .model to another one")
    if callable(getattr(flow, "assemble", None)):
        return as_flow(flow.assemble())
    if callable(flow):
        return as_flow(flow())
    raise GraphError(f"compile takes a ModelFlow, a recipe, a Built or a GraphModule, got {type(flow).__name__}")


def check_sources(builts: Sequence[Built], strict: bool) -> WeightSource | None:
    """Where all flows read their weights. Every key of it is read by one of them, or left on purpose.

    Raises:
        GraphError: more than one place.
        UnexpectedWeightError: lists keys that nothing reads; a warning if not `strict`.
    """
    name, source = ", ".join(b.name for b in builts), builts[0].source
    if any(b.source is not source for b in builts):
        raise GraphError(f"{name}: flows of one model read the same weights; pass weights=")
    if source is None:
        return None
    read = {key for b in builts for key in b.keys_read}
    left = [key for b in builts for key in b.left_keys]
    unread = [
        key for key in source.keys()
        if key not in read and not any(key == k or (k.endswith(".") and key.startswith(k)) for k in left)
    ]  # fmt: skip
    if unread:
        message = f"{name}: {len(unread)} weights are in the source and nothing reads them: {listing(unread)}"
        if strict:
            raise UnexpectedWeightError(f"{message}; check the flow, or pass strict=False")
        warnings.warn(message, RlxWarning, stacklevel=2)
    return source
