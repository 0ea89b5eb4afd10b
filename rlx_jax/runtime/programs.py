"""This module defines `Programs`, the cache of all compiled programs of one model.

Each program is built, lowered and compiled once for each choice of sizes. Nothing outside this module compiles.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from rlx_jax import errors
from rlx_jax.compiler.compile_cache import FirstPrograms, UntracedError
from rlx_jax.compiler.dumps import write_dump
from rlx_jax.compiler.executable import (
    Arrays,
    Executable,
    Function,
    HasCompanions,
    HelperCall,
    Progress,
    Shardings,
    StateArrays,
    has_transfer_guard,
    to_device,
    trace_program,
    uncovered_arguments,
    with_compile_cache,
)
from rlx_jax.compiler.meshes import to_model_devices, use_model_mesh, with_explicit_axes
from rlx_jax.compiler.pipeline import Template, make_function, make_lir, make_template, with_hidden
from rlx_jax.compiler.settings import Settings, choose_settings, with_model_sharding
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import out_of_memory
from rlx_jax.ir.types import DimLike
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.lir.plan import Layout, Lir
from rlx_jax.lowering.mir.small import unread_inputs
from rlx_jax.lru import LruCache
from rlx_jax.profiles import CompileProfile
from rlx_jax.program import MAX_TEMPLATES, Buildable, Built
from rlx_jax.runtime.arguments import check_params
from rlx_jax.runtime.frozen import FrozenFlow
from rlx_jax.runtime.inputs import check_length
from rlx_jax.runtime.program_key import ProgramKey, recompile_reason
from rlx_jax.runtime.sequence_state import EmptyState, empty_state, state_shardings, with_last_token

T = TypeVar("T")


@dataclass(frozen=True)
class SpecializedProgram:
    """A program for one choice of sizes: a pure function `run`, and `jitted`, the same function under `jax.jit`."""

    lir: Lir
    run: Function
    jitted: Function
    seconds: float  # for specialization and planning


@dataclass(frozen=True)
class Companion:
    """Programs of a companion flow, such as a drafter, and the parameters that it does not share with the model."""

    programs: Programs
    params: Mapping[str, Any]


# How many programs compiled after warm-up the report lists; a loop that recompiles must not grow it without bound.
MAX_RECOMPILE_REASONS = 32

# Operands of samplers that are retained; with a bias each takes 5 bytes per word of the vocabulary.
MAX_OPERANDS = 16


class Programs:
    """All programs of the flows of a model, over one Layout. Nothing else compiles.

    Executables, helper functions and the functions that they are compiled from are cached, at most
    `settings.buckets.programs` of each. The least recently used is evicted first, and compiled again on demand.
    """

    def __init__(
        self, flows: Mapping[str, Buildable], source: WeightSource | None, settings: Settings, layout: Layout,
        captured: Mapping[str, CapturedArrays], progress: Progress | None,
    ) -> None:  # fmt: skip
        self.flows, self.source, self.settings, self.layout, self.progress = flows, source, settings, layout, progress
        self.captured = captured
        self.model_sharding = settings.model_sharding  # None on one device, as all shardings are
        self.replicated = None if self.model_sharding is None else self.model_sharding.replicated
        self.initialized_keys: tuple[str, ...] = ()  # keys of weights that were initialized at random
        self.init_key: jax.Array | None = None  # the key that they are initialized with
        self.unread_by_optional: dict[tuple[str, frozenset[str]], frozenset[str]] = {}  # inputs that no output reads
        self.fuses_by_default = False  # whether projections are fused if the profile leaves it open
        self.planned_program = "forward"  # the program that the settings and the layout are chosen for
        # One lock for all caches: making an entry of one makes entries of others, and separate locks could deadlock.
        self.lock, limit = threading.RLock(), settings.buckets.programs
        lock = self.lock
        self.builds: LruCache[tuple[str, frozenset[str]], Built] = LruCache(MAX_TEMPLATES, lock)
        self.templates: LruCache[ProgramKey, Template] = LruCache(MAX_TEMPLATES, lock)
        self.derivation_errors: LruCache[tuple[str, str, frozenset[str]], str] = LruCache(MAX_TEMPLATES, lock)
        self.functions: LruCache[ProgramKey, SpecializedProgram] = LruCache(limit, lock)
        self.executables: LruCache[ProgramKey, Executable] = LruCache(limit, lock)
        self.empty_states: LruCache[Hashable, EmptyState] = LruCache(limit, lock)
        self.helpers: LruCache[Hashable, Callable[..., Any]] = LruCache(limit, lock)
        # The keys of the programs, and the sizes, of each kind of request.
        self.request_keys: LruCache[Hashable, Any] = LruCache(limit, lock)
        self.operands: LruCache[Hashable, Any] = LruCache(MAX_OPERANDS, lock)  # of samplers, on the device
        self.companions: LruCache[Hashable, Companion] = LruCache(MAX_TEMPLATES, lock)
        self.compiling: dict[Hashable, Future[Any]] = {}  # what threads compile ahead; see `prepare_programs`
        self.first: FirstPrograms | None = None  # what threads load while weights are read
        self.donation_warnings: set[tuple[str, str]] = set()  # flow and program: each is warned of once
        self.is_warm = False  # whether warm-up is complete
        self.warmup_keys: set[ProgramKey] | None = None  # the programs that the current warm-up has run
        self.recompiles = 0  # programs and helper functions compiled after warm-up
        self.num_loaded = 0  # programs loaded from the compile cache
        self.num_compiled = 0  # programs and helper functions that were compiled, not loaded
        self.recompile_reasons: deque[str] = deque(maxlen=MAX_RECOMPILE_REASONS)  # those of the latest recompiles

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle or deep-copy any object that contains this one: executables cannot be copied."""
        raise errors.UnsupportedError(
            f"{', '.join(self.flows)}: compiled programs cannot be pickled or deep-copied; write the parameters with "
            "rlx_jax.save(model, directory), and compile the model again with weights=directory, or use rlx_jax.load"
        )

    def template(self, key: ProgramKey) -> Template:
        """Return the program with symbolic sizes, lowered at its first use."""

        def make() -> Template:
            flow = self.flows[key.flow]
            if isinstance(flow, FrozenFlow):  # nothing can be derived from it, and it has its programs
                return flow.template(key, self.source)
            if key.hidden:
                return self.template(replace(self.full_key(key), headless=True))
            if key.headless:
                return self.template(replace(key, headless=False)).headless()
            # Other optional inputs come from the derived program, and the flow is built without them.
            flow_inputs = key.optional_inputs & {i.name for i in flow._inputs}
            options = (key.program, key.last_only, key.optional_inputs, key.outputs)
            return make_template(self.build(key.flow, flow_inputs), self.settings, *options)

        return self.templates(key, make)

    def full_key(self, key: ProgramKey) -> ProgramKey:
        """Return the key of the full program, all rows and no hidden states, that a `hidden` program is split from."""
        return replace(key.symbolic, hidden=False, last_only=False)

    def build(self, flow: str, optional_inputs: frozenset[str]) -> Built:
        """Return the flow built with these optional inputs.

        A flow is built once for all its programs. They share its ops, including user closures, so that a proof about
        one program holds for the others.
        """

        make = partial(self.flows[flow].build, self.source, optional_inputs, self.captured[flow])
        return self.builds((flow, optional_inputs), make)

    def first_input(self, flow: str) -> str:
        """Return the name of the first input of a flow that an output reads; for a text model, its tokens."""
        names, unread = [i.name for i in self.flows[flow]._inputs], self.unread_inputs(flow, frozenset())
        return next((name for name in names if name not in unread), names[0])

    def unread_inputs(self, flow: str, optional_inputs: frozenset[str]) -> frozenset[str]:
        """Return the inputs that no output of a flow reads when these optional inputs are passed."""
        if (flow, optional_inputs) not in self.unread_by_optional:
            built = self.build(flow, optional_inputs)
            self.unread_by_optional[flow, optional_inputs] = built.once(unread_inputs, built.hir)
        return self.unread_by_optional[flow, optional_inputs]

    def any_template(self, key: ProgramKey) -> Template:
        """Return the template of a program, for all tokens or each row's last one, whichever is cached already."""
        sibling = replace(key, last_only=not key.last_only)
        return self.template(sibling if sibling in self.templates and key not in self.templates else key)

    def derivation_error(self, flow: str, program: str, optional_inputs: frozenset[str] = frozenset()) -> str:
        """Return the reason why a program cannot be derived for calls with these inputs; empty if it can."""

        def make() -> str:
            try:
                self.any_template(ProgramKey(flow, program, optional_inputs))
            except (errors.DeriveError, errors.FusionError) as reason:  # FusionError: the profile's fusion.assert_clean
                return str(reason)
            return ""

        return self.derivation_errors((flow, program, optional_inputs), make)

    def function(self, key: ProgramKey) -> SpecializedProgram:
        """Return the pure function for one choice of sizes, created at its first use."""

        def make() -> SpecializedProgram:
            template = self.template(key.symbolic)
            start = time.perf_counter()
            lir = make_lir(template, dict(key.binding), self.settings)
            seconds = time.perf_counter() - start
            ends_at_head = key.headless or key.hidden
            run = make_function(lir, self.layout, self.model_sharding, ends_at_head=ends_at_head)
            write_dump(template, lir)
            if key.hidden:
                head = self.template(self.full_key(key)).head
                run = with_hidden(run, head, self.settings.target, key.last_only)
            if key.last_only and key.program in CACHED_PROGRAMS:
                run = with_last_token(run)
            if key.wrapper is not None:  # the wrapper has other inputs, which the plan knows nothing about
                lir, run = replace(lir, plan=replace(lir.plan, donate_inputs=())), key.wrapper(run)
            traceable = with_explicit_axes(run, template, lir, self.model_sharding)
            return SpecializedProgram(lir, run, jax.jit(traceable), seconds)

        return self.functions(key, make)

    def executable(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Executable:
        """Return the executable for one choice of sizes, compiled at its first use.

        Arguments may be `jax.ShapeDtypeStruct`.
        """
        if self.warmup_keys is not None:
            self.warmup_keys.add(key)

        def make() -> Executable:
            executable: Executable = self.compiled(key, lambda: self.trace_executable(key, params, state, inputs))
            # once for all sizes of a program
            problem = executable.donation.problem() if executable.donation is not None else ""
            if problem and (key.flow, key.program) not in self.donation_warnings:
                self.donation_warnings.add((key.flow, key.program))
                message = f"{executable.lir.graph.name}: {key.text}: {problem}; donation.strict = true in the profile"
                warnings.warn(f"{message} makes this an error", errors.RlxWarning, stacklevel=2)
            self.num_loaded += executable.from_cache
            self.num_compiled += not executable.from_cache
            self.report_progress(f"compile {key.text}", 1, 1)
            return executable

        return self.executables(key, make)

    def trace_executable(
        self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays
    ) -> Callable[[], Executable]:
        """Trace a program, and return a function that compiles it or loads it, which may run in another thread."""
        # Checked before a compile alone: a call of a compiled program looks for a wrong parameter once it has failed.
        check_params(params, self.layout.specs())
        self.check_compiled(key)
        if self.settings.buckets.on_recompile == "warn" and (reason := self.recompile_reason(key)[0]):
            warnings.warn(f"{reason}; compiling it", errors.RlxWarning, stacklevel=2)
        if self.is_warm:
            self.record_recompile(f"{key.text}: {self.recompile_reason(key)[0]}")
        self.report_progress(f"compile {key.text}", 0, 1)
        program = self.function(key)
        with use_model_mesh(self.model_sharding):
            companions = key.wrapper.companions() if isinstance(key.wrapper, HasCompanions) else None
            is_wrapped = key.wrapper is not None or key.hidden
            head = self.template(self.full_key(key)).head if key.hidden else None
            content = key, program.lir, head, self.layout, self.settings, companions
            arguments = (params, state, inputs, self.shardings(key, inputs), companions, key.text, is_wrapped, content)
            take = None if self.first is None else partial(self.first.take, key.symbolic)
            compile_traced = trace_program(program.lir, program.run, *arguments, take)

        def compile_executable() -> Executable:
            with use_model_mesh(self.model_sharding):  # a context of the thread
                executable = compile_traced()
            executable.seconds = {"plan": program.seconds, **executable.seconds}
            return executable

        return compile_executable

    def storage_shardings(self) -> dict[str, NamedSharding] | None:
        """Return the storage sharding of each parameter, None on one device."""
        if self.model_sharding is None:
            return None
        return {name: self.model_sharding.storage_sharding(program) for name, program in self.layout.params.items()}

    def shardings(self, key: ProgramKey, inputs: Arrays) -> Shardings | None:
        """Return the shardings of a program's arguments and results, None on one device.

        Extra inputs of a wrapper (`key.wrapper`) are replicated, and so are its outputs.
        """
        if self.model_sharding is None:
            return None
        template, model_sharding = self.template(key.symbolic), self.model_sharding
        declared = {i.input: i.type for i in template.mir.inputs}
        sizes = dict(key.binding)
        # With several processes each passes the full input, which is sharded inside the program.
        shard_inputs = jax.process_count() == 1
        placements = {
            name: model_sharding.input_sharding(declared[name], declared[name].bind(sizes).shape)
            if name in declared and shard_inputs
            else jax.tree.map(lambda _: model_sharding.replicated, value)
            for name, value in inputs.items()
        }
        outputs = None if set(inputs) <= set(declared) else model_sharding.replicated
        state = state_shardings(template, sizes, model_sharding, of_results=key.wrapper is None)
        nbytes = model_sharding.gathered_bytes(self.layout.params.values())
        if isinstance(key.wrapper, HasCompanions) and (other := key.wrapper.companion_shardings()) is not None:
            placements, state, nbytes = (placements | other.inputs, state | other.state, nbytes + other.gathered_bytes)
        return Shardings(self.storage_shardings() or {}, state, placements, outputs, nbytes)

    def state_shardings(self, key: ProgramKey) -> dict[str, NamedSharding] | None:
        """Return the sharding of each array of the state that a program takes, None on one device."""
        if self.model_sharding is None:
            return None
        return state_shardings(self.template(key.symbolic), dict(key.binding), self.model_sharding)

    def resolve_settings(self, profile: CompileProfile, flow: str) -> Settings:
        """Return the settings of another profile for a flow of this model.

        Raises:
            ProfileError: the profile contradicts itself.
        """
        settings = choose_settings(self.build(flow, frozenset()), profile, self.fuses_by_default, self.planned_program)
        settings = settings if self.model_sharding is None else with_model_sharding(settings, self.model_sharding)
        return replace(settings, max_positions=self.settings.max_positions)

    def ring_sizes(self, template: Template, context: Any, spare: int = 0) -> dict[str, int]:
        """Return the number of slots of each ring buffer in a state of `context` slots.

        `spare` slots are added to the window for tokens that may be rolled back.
        """
        buckets = self.settings.buckets
        return {name: buckets.ring(window, context, spare) for name, window in template.rings.items()}

    def empty_state(self, key: ProgramKey, sizes: Mapping[str, DimLike], spare: int = 0) -> EmptyState:
        """Return the function that creates an empty state of a program.

        There is one for each choice of sizes, optional inputs and outputs: blocks that no output reads have no state.

        Args:
            key: the program, without sizes.
            sizes: `batch`, `context` if the state has slots, and others.
            spare: see `Variant`.

        Raises:
            GraphError: the program has no state, or a size is missing.
            SequenceLengthError: more slots than the model has positions.
            ShapeError, DeviceOutOfMemoryError: the state is too large.
        """

        def make() -> EmptyState:
            template = self.any_template(key)
            if not template.state:
                raise errors.GraphError(f"program {key.program} of {key.flow} has no state")
            binding: dict[str, Any] = {**self.flows[key.flow]._binding, **sizes}
            check_length(binding.get("context", 0), template.bounds, f"{key.flow}: init_state")
            binding |= self.ring_sizes(template, sizes.get("context"), spare)
            shardings = {} if self.model_sharding is None else state_shardings(template, binding, self.model_sharding)
            description = f"{key.flow}: init_state(batch={sizes['batch']}, context={sizes.get('context')})"
            return empty_state(template.state, binding, description, shardings)

        cache_key = replace(key, last_only=False)  # the choice of output rows does not change the state
        return self.empty_states((cache_key, tuple(sorted(sizes.items())), spare), make)

    def report_progress(self, step: str, done: int, total: int) -> None:
        """Report progress to the callback, if there is one."""
        if self.progress is not None:
            self.progress(step, done, total)

    def run_helper(
        self, function: Callable[..., T], *arguments: Any, static: tuple[Any, ...] = (), out_shardings: Any = None,
        donate: tuple[int, ...] = (),
    ) -> T:  # fmt: skip
        """Run a helper function, such as the one that creates an empty state, and return its result.

        It is compiled once for each function (compared by value), choice of static arguments and types of the arrays.

        Args:
            function: called as `function(*static, *arguments)`.
            arguments: arrays, or pytrees of arrays.
            static: hashable arguments that are compiled in.
            out_shardings: the shardings of the result, the same in every call; None leaves them to XLA.
            donate: the arguments that the result may overwrite, the same in every call.
        """
        sharding = self.model_sharding
        with use_model_mesh(sharding):
            if sharding is not None:
                arguments = to_model_devices(arguments, sharding)
            if has_transfer_guard():  # copies from the host, and between devices, have to be explicit
                arguments = to_device(arguments) if sharding is None else jax.device_put(arguments, self.replicated)
            call = HelperCall(function, arguments, static, out_shardings, donate)

            def make() -> Callable[..., Any]:
                run, is_loaded = self.compiled(call.key, lambda: self.trace_helper(call))
                self.num_compiled += not is_loaded
                return out_of_memory(call.name)(run)  # type: ignore[no-any-return]

            return self.helpers(call.key, make)(*arguments)  # type: ignore[no-any-return]

    def trace_helper(self, call: HelperCall) -> Callable[[], tuple[Callable[..., Any], bool]]:
        """Trace a helper function as `trace_executable` does a program; arguments may be `jax.ShapeDtypeStruct`."""
        function, arguments, static = call.function, call.arguments, call.static
        if self.is_warm:
            difference = uncovered_arguments(function, (key[0] for key in self.helpers if isinstance(key, tuple)))
            reason = difference or f"for {', '.join(str(jax.typeof(a)) for a in jax.tree.leaves(arguments))}"
            self.record_recompile(f"{call.name}, a helper function: {reason}")
        # A new function for each entry: jax.jit drops its executable when the entry is evicted.
        run = jax.jit(lambda *a: function(*static, *a), out_shardings=call.out_shardings, donate_argnums=call.donate)
        compile_traced = with_compile_cache(run, arguments, call.out_shardings, (function, static, call.donate))
        return out_of_memory(f"compiling {call.name}")(compile_traced)

    def compiled(self, key: Hashable, trace: Callable[[], Callable[[], Any]]) -> Any:
        """Return a program or helper function: the one that a thread compiles ahead, or else compiled now."""
        job = self.compiling.pop(key, None)
        try:
            if job is not None:
                try:
                    return job.result()
                except UntracedError:
                    pass
                except errors.DeviceOutOfMemoryError:  # tuning several programs at once takes more memory than one
                    wait([*self.compiling.values()])
            return trace()()
        except BaseException:
            self.compiling |= {} if job is None else {key: job}
            self.cancel_compiling()  # the next request compiles its programs anew, as the reason may be gone
            raise
        finally:
            del job  # a cycle: the traceback of its exception has this frame, and those of the request with its arrays

    def cancel_compiling(self) -> None:
        """Drop what threads compile ahead, also after an interrupt; they end with the programs that they are at."""
        jobs, self.compiling = self.compiling, {}
        for job in jobs.values():
            job.cancel()

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """Mark a block of code that runs every program that requests will need.

        Whatever compiles after it counts as a recompile.

        Raises:
            RequestError: the block runs more programs than the cache retains.
        """
        self.is_warm, self.warmup_keys = False, set()
        try:
            with contextlib.ExitStack() as others:
                for other in self.companions.values():
                    others.enter_context(other.programs.warm_up())
                yield
            # A program that warm-up ran and the cache evicted would compile again for a request.
            if self.warmup_keys - set(self.executables):
                raise errors.RequestError(
                    f"warmup: the profile's buckets need {len(self.warmup_keys)} programs, and buckets.programs = "
                    f"{self.executables.limit} are cached; raise it, at some megabytes each, or use fewer buckets"
                )
            self.is_warm = True
        finally:
            self.warmup_keys = None

    def recompile_reason(self, key: ProgramKey) -> tuple[str, str]:
        """Return why this program should not be compiled now, and a remedy; two empty strings if it may be."""
        if key in self.executables or not (self.is_warm or key.size_violations(self.settings.buckets)):
            return "", ""
        compiled, buckets = list(self.executables), self.settings.buckets
        return recompile_reason(key, compiled, buckets, self.is_warm, lambda: self.first_input(key.flow))

    def check_compiled(self, key: ProgramKey) -> None:
        """Check, before anything runs, that the profile allows compiling this program now.

        Raises:
            RequestError: it does not, and `buckets.on_recompile` is `error`.
        """
        if self.settings.buckets.on_recompile == "error":
            reason, remedy = self.recompile_reason(key)
            if reason:
                raise errors.RequestError(f"{reason}; {remedy}, or change the profile's buckets")

    def start_timer(self) -> Callable[[], tuple[float, int]]:
        """Start a timer. Return a function that reads it: the seconds, and the programs and helpers compiled since."""
        start, before = time.perf_counter(), self.num_compiled
        return lambda: (time.perf_counter() - start, self.num_compiled - before)

    def record_recompile(self, reason: str) -> None:
        """Count a compile after warm-up, and record it for the report."""
        self.recompiles += 1
        self.recompile_reasons.append(reason)
