"""The compiler on one page.

    flow ── build ──▶ HIR ── expand, precision, merge, derive ──▶ HIR of one program
         ── lower ──▶ MIR template ── passes ──▶ MIR ── specialise, plan ──▶ LIR ── interpret, jit ──▶ executable

Each arrow is one function; the verifier runs after every one of them. A profile is read in `settings_for`
(`rlx_jax/settings.py`) and nowhere else: passes, layout and plan get values.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rlx_jax.built import Buildable, BuiltModel, Weights
from rlx_jax.errors import (
    FusionError,
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
from rlx_jax.executable import Around, Arrays, Executable, Function, Progress, StateArrays, compile_program
from rlx_jax.inputs import Bounds, bounds_of
from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.ir.param import WeightSource
from rlx_jax.ir.region import peel_last
from rlx_jax.ir.types import DimLike, TensorType
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.derive import derive, ring_sizes
from rlx_jax.lowering.donation import reusable_inputs
from rlx_jax.lowering.fusion_report import FusionReport, fusion_report
from rlx_jax.lowering.implementations import choose_all
from rlx_jax.lowering.interpret import Env, interpret
from rlx_jax.lowering.layout import Layout, layout_of
from rlx_jax.lowering.lower import expand_composites, lower
from rlx_jax.lowering.merge import merge_linears, merge_ropes
from rlx_jax.lowering.mixed import mixed
from rlx_jax.lowering.orient import orient
from rlx_jax.lowering.passes import PASSES
from rlx_jax.lowering.passes.dce import dce
from rlx_jax.lowering.plan import Lir, Plan, state_types
from rlx_jax.lowering.precision import compute_in, pin_matmul, store_in
from rlx_jax.lowering.specialise import specialise
from rlx_jax.profiles import CompileProfile
from rlx_jax.settings import Settings, check_inputs, choose_settings, warn_without_effect
from rlx_jax.state import EmptyState

# -- the pipeline ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramKey:
    """What an executable is for. Flow, profile and layout belong to the model that keeps the cache."""

    program: str
    given: frozenset[str]
    last_only: bool
    binding: tuple[tuple[str, int], ...]
    around: Around | None = None


@dataclass(frozen=True)
class Template:
    """One program with symbolic sizes, at every level."""

    built: BuiltModel
    hir: Graph
    mir: Graph
    bounds: Bounds
    state: Mapping[tuple[str, str], TensorType]
    rings: Mapping[str, int]
    types: TypeCache
    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    fusion: FusionReport

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Names of the sizes that its state and inputs have."""
        types = (*self.state.values(), *(i.type for i in self.mir.inputs))
        return frozenset().union(*(t.symbols for t in types))


def program_hir(built: BuiltModel, settings: Settings, program: str, last_only: bool) -> Graph:
    """HIR of one program: composites as blocks, the compute dtype, how weights are stored, derived from the forward."""
    types = built.types
    hir = verify(expand_composites(built.hir, types), "hir", "expand", types)
    hir = verify(compute_in(hir, settings.compute, types), "hir", "precision", types)
    if settings.merge:
        # Without dce the unmerged weights would stay in the graph, and so in the layout.
        hir = verify(dce(merge_linears(hir, types), types), "hir", "merge_linears", types)
    if settings.merge and program == "extend":  # a token's kernels are as short as their launch; a prompt's are not
        hir = verify(dce(merge_ropes(hir, types), types), "hir", "merge_ropes", types)
    if settings.weight_layout != "auto":
        hir = verify(dce(orient(hir, settings.weight_layout, types), types), "hir", "orient", types)
    if settings.stored is not None:
        hir = verify(dce(store_in(hir, settings.stored, types), types), "hir", "store", types)
    if last_only and not settings.scan:  # of the last layer, only the last row goes on
        hir = verify(peel_last(hir, types), "hir", "peel_last", types)
    return verify(derive(hir, program, types, last_only, settings.kv), "hir", program, types)


def make_template(built: BuiltModel, settings: Settings, program: str, last_only: bool, build_s: float) -> Template:
    """HIR → MIR: lower by the policy, then the passes."""
    seconds, nodes, types = {"build": build_s}, {}, built.types

    def step(name: str, fn: Callable[[], Graph], level: str) -> Graph:
        start = time.perf_counter()
        graph = verify(fn(), level, name, types)
        seconds[name], nodes[name] = time.perf_counter() - start, sum(1 for _ in graph.walk())
        if settings.verbose:
            print(f"{built.name} {program}: {name}: {nodes[name]} nodes, {seconds[name]:.3f} s", file=sys.stderr)
        return graph

    hir = step("derive", lambda: program_hir(built, settings, program, last_only), "hir")
    lowered = step("lower", lambda: pin_matmul(lower(hir, settings.policy, types), settings.matmul, types), "mir")
    if settings.mixed != "none":
        lowered = step("mixed", lambda mir=lowered: mixed(mir, settings.mixed, types), "mir")  # type: ignore[misc]
    mir = lowered
    for name in settings.passes:
        mir = step(name, lambda name=name, mir=mir: PASSES[name](mir, types), "mir")  # type: ignore[misc]
    fusion = fusion_report(lowered, mir, settings.passes, settings.merge, types)
    if settings.assert_clean and not fusion.clean:
        raise FusionError(f"{built.name}: fusion contract violated: {len(fusion.missed)} missed\n{fusion}", fusion)
    state = state_types(mir, settings.scan)
    return Template(built, hir, mir, bounds_of(built.hir), state, ring_sizes(hir), types, seconds, nodes, fusion)


def make_lir(template: Template, binding: Mapping[str, int], settings: Settings) -> Lir:
    """MIR template → MIR with sizes → LIR."""
    graph = verify(specialise(template.mir, binding, template.types), "mir", "specialise", template.types)
    plan = replace(
        make_plan(settings),
        donate_inputs=reusable_inputs(graph, settings.donate_inputs),
        choices=choose_all(graph, settings.target, settings.attention, differentiable=not template.state),
    )
    return Lir(graph, plan)


def make_plan(settings: Settings) -> Plan:
    """What the plan takes from the settings alone."""
    options = dict(settings.compiler_options)
    return Plan(
        settings.target,
        settings.scan,
        settings.donate_state,
        remat=settings.remat,
        implementation=settings.attention,
        compiler_options=options,
    )


def lir_of(built: BuiltModel, profile: CompileProfile | None, sizes: Mapping[str, int]) -> Lir:
    """The forward program of `built` for one choice of sizes."""
    settings = choose_settings(built, profile, merge=False, program="forward")
    return make_lir(make_template(built, settings, "forward", False, 0.0), sizes, settings)


def make_function(lir: Lir, layout: Layout) -> Function:
    """LIR → a pure JAX function `(params, state, inputs) → (outputs, state)`."""
    names = layout.by_program()
    layout.check(lir.graph, lir.plan.scan)

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> tuple[tuple[Any, ...], StateArrays]:
        leaves = {program: params[name] for program, name in names.items()}
        env = Env(leaves, inputs, dict(state), lir.plan.scan, lir.plan.remat, lir.plan.choices)
        outputs = interpret(lir.graph, env)
        return outputs, env.state

    return function


@dataclass(frozen=True)
class Specialised:
    """A program for one choice of sizes, as a pure function and as the same under `jax.jit`."""

    lir: Lir
    run: Function
    jitted: Function


# -- one model, all of its programs ------------------------------------------------------------


@dataclass
class Compiler:
    """Everything that one model has compiled. The only place that compiles."""

    flow: Buildable
    source: WeightSource | None
    settings: Settings
    layout: Layout
    templates: dict[tuple[str, frozenset[str], bool], Template] = field(default_factory=dict)
    functions: dict[ProgramKey, Specialised] = field(default_factory=dict)
    executables: dict[ProgramKey, Executable] = field(default_factory=dict)
    progress: Progress | None = field(default=None, repr=False)
    empty: dict[tuple[str, DimLike, DimLike | None], EmptyState] = field(default_factory=dict)
    small: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)  # small functions with the types they were called with
    warm: bool = False  # warm-up is over
    recompiles: int = 0  # programs compiled since
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # one compile for each size

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Whatever holds this, a model or a state, is not pickled or copied in depth."""
        raise UnsupportedError(
            f"{self.flow.name}: compiled programs cannot be pickled or deep-copied; write the parameters with "
            "rlx_jax.save(model, directory), and make the model again with weights=directory, or by rlx_jax.load"
        )

    def template(self, program: str, given: frozenset[str] = frozenset(), last_only: bool = False) -> Template:
        """The symbolic program; made once."""
        key = (program, given, last_only)
        with self.lock:
            if key not in self.templates:
                start = time.perf_counter()
                built = self.flow.build(self.source, given)
                build_s = time.perf_counter() - start
                self.templates[key] = make_template(built, self.settings, program, last_only, build_s)
            return self.templates[key]

    def any_template(self, program: str) -> Template:
        """A template of the program, one that is made already if there is: they differ in what they return."""
        with self.lock:
            made = (t for (name, given, _), t in self.templates.items() if name == program and not given)
            return next(made, None) or self.template(program)

    def function(self, key: ProgramKey) -> Specialised:
        """The pure function for one choice of sizes; made once."""
        with self.lock:
            if key not in self.functions:
                template = self.template(key.program, key.given, key.last_only)
                lir = make_lir(template, dict(key.binding), self.settings)
                run = make_function(lir, self.layout)
                if key.around is not None:  # it has inputs of its own
                    lir, run = replace(lir, plan=replace(lir.plan, donate_inputs=())), key.around(run)
                self.functions[key] = Specialised(lir, run, jax.jit(run))
            return self.functions[key]

    def executable(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Executable:
        """The compiled program for one choice of sizes; made once. Arguments may be `ShapeDtypeStruct`."""
        with self.lock:
            if key not in self.executables:
                self.admit(key)
                what = f"compile {key.program} of {', '.join(f'{name} {size}' for name, size in key.binding)}"
                self.tell(what, 0, 1)
                program = self.function(key)
                self.executables[key] = compile_program(program.lir, program.run, params, state, inputs)
                self.tell(what, 1, 1)
            return self.executables[key]

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell whoever asked for progress."""
        if self.progress is not None:
            self.progress(what, done, total)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A small function beside the programs, such as one that makes an empty state. It is compared by value, and
        compiled once for each choice of types of its arguments, which are arrays."""
        with self.lock:
            key = (function, *((a.shape, a.dtype) for a in jax.tree.leaves(arguments)))
            if key not in self.seen:
                self.seen.add(key)
                self.recompiles += self.warm
            if function not in self.small:
                self.small[function] = jax.jit(function)
        return self.small[function](*arguments)

    def refusal(self, key: ProgramKey) -> str:
        """Why this program should not be compiled now; empty if it may be."""
        buckets, binding = self.settings.buckets, dict(key.binding)
        if key in self.executables or not (self.warm or buckets.foreign(binding)):
            return ""
        sizes = {"batch": "{} rows", "seq": "length {}", "context": "a cache of {} slots"}
        told = ", ".join(text.format(binding[dim]) for dim, text in sizes.items() if dim in binding)
        if not key.last_only and replace(key, last_only=True) in self.executables:
            return f'{self.flow.name}: {told}: warm-up was for logits="last", not for those of every position'
        return (
            f"{self.flow.name}: input {quote(self.flow.inputs[0].name)} with {told or 'no size'}: no {key.program} "
            f"program is compiled for that; {buckets.text() or 'warm-up was for other sizes'}"
        )

    def check_compiled(self, key: ProgramKey) -> None:
        """Refuse a program that the profile does not want compiled now, before anything runs.

        Raises:
            RecompileError: `buckets.on_recompile` is `error`.
        """
        if self.settings.buckets.on_recompile == "error" and (refusal := self.refusal(key)):
            raise RecompileError(f"{refusal}; ask for sizes that fit, or change the profile's buckets")

    def admit(self, key: ProgramKey) -> None:
        """As `check_compiled`, and count or warn of what is compiled all the same."""
        self.check_compiled(key)
        if self.settings.buckets.on_recompile == "warn" and (refusal := self.refusal(key)):
            warnings.warn(f"{refusal}; compiling it", RlxWarning, stacklevel=2)
        self.recompiles += self.warm


def open_compiler(
    flow: Any,
    weights: Weights,
    profile: CompileProfile | None,
    strict: bool,
    merge: bool,
    program: str = "forward",
    progress: Progress | None = None,
) -> Compiler:
    """Build the flow once, resolve its profile and choose its layout. Reads shapes, no data.

    `program` decides how layers run and are stored; every program of the model shares it.
    """
    if profile is not None and not isinstance(profile, CompileProfile):
        raise ProfileError(f"profile is {profile!r}; expected a CompileProfile, such as CompileProfile.preset('auto')")
    if not isinstance(strict, bool):
        raise RequestError(f"strict is {shown(strict)}; expected True or False")
    if progress is not None and not callable(progress):
        raise RequestError(f"progress is {shown(progress)}; expected a function of (what, done, total)")
    start = time.perf_counter()
    flow = as_flow(flow)
    with paused_gc():
        built = flow.build(weights)
    build_s = time.perf_counter() - start
    check_unread(built, strict)
    settings = choose_settings(built, profile, merge, program)
    check_inputs(settings.donate_inputs, flow)
    first = "train" if program == "train" else "forward"
    template = make_template(built, settings, first, False, build_s)
    warn_without_effect(settings, flow.name, template.mir)
    compiler = Compiler(flow, built.source, settings, layout_of(template.hir, settings.scan), progress=progress)
    compiler.templates[(first, frozenset(), False)] = template
    return compiler


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
    """What to build, from a ModelFlow, a GraphModule, a recipe, a zero-argument function or a BuiltModel."""
    if isinstance(flow, Buildable):
        return flow
    if isinstance(getattr(flow, "compiler", None), Compiler):
        raise GraphError("this model is compiled already: call it, or give it other numbers with .replace(params=…)")
    if callable(getattr(flow, "assemble", None)):
        return as_flow(flow.assemble())
    if callable(flow):
        return as_flow(flow())
    raise GraphError(f"compile takes a ModelFlow, a recipe, a BuiltModel or a GraphModule, got {type(flow).__name__}")


def check_unread(built: BuiltModel, strict: bool) -> None:
    """Every key of the source is read, or left on purpose.

    Raises:
        UnexpectedWeightError: lists the others; a warning if not `strict`.
    """
    if built.source is None:
        return
    read = set(built.keys_read)
    left = built.left_keys
    unread = [
        key for key in built.source.keys()
        if key not in read and not any(key == k or (k.endswith(".") and key.startswith(k)) for k in left)
    ]  # fmt: skip
    if not unread:
        return
    message = f"{built.name}: {len(unread)} weights are in the source and nothing reads them: {listing(unread)}"
    if strict:
        raise UnexpectedWeightError(f"{message}; check the flow, or pass strict=False")
    warnings.warn(message, RlxWarning, stacklevel=2)
