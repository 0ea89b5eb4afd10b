"""`rlx_jax.compile` and what it returns."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rlx_jax.built import InputDecl, Weights
from rlx_jax.compile import (
    Compiler,
    ProgramKey,
    make_function,
    make_plan,
    open_compiler,
)
from rlx_jax.errors import (
    DTypeError,
    GraphError,
    MissingWeightError,
    RlxError,
    RlxWarning,
    SessionStateError,
    UnsupportedError,
    WeightError,
    WeightShapeError,
    did_you_mean,
    listing,
    quote,
)
from rlx_jax.executable import Around, Arrays, Executable, StateArrays
from rlx_jax.inputs import Bounds, bind_names, bind_sizes, check_length, check_new_tokens, host_value, random_key
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import DimLike, TensorType, as_dim, bound
from rlx_jax.lowering.buffers import activation_bytes
from rlx_jax.lowering.derive import CACHED_PROGRAMS
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.lowering.plan import Lir, flops
from rlx_jax.lowering.text import dump_lir
from rlx_jax.memory import check_fits, out_of_memory
from rlx_jax.profiles import CompileProfile
from rlx_jax.report import Report
from rlx_jax.settings import default_target
from rlx_jax.state import EmptyState, FromEmpty, State, as_state, check_empty, check_room, check_state, empty_state
from rlx_jax.weights.execute import by_key, load_leaves
from rlx_jax.weights.initial import initial_params
from rlx_jax.weights.source import MappingSource

LEVELS = ("hir", "mir", "lir", "jaxpr", "stablehlo", "hlo")


def compile(
    flow: Any,
    weights: Weights = None,
    *,
    profile: CompileProfile | None = None,
    mesh: Any = None,
    program: str = "forward",
    strict: bool = True,
) -> CompiledModel:
    """Compile a flow: build, lower and plan it now, and each size when it is first called.

    Args:
        flow: a `ModelFlow`, a recipe, a zero-argument function returning one, or a `BuiltModel`.
        weights: a mapping, a WeightSource or a path; a mapping of `jax.ShapeDtypeStruct` compiles without data.
        profile: else the flow's own, else `auto`.
        program: `forward`, `train` (the forward program to differentiate: layers scanned, and recomputed as the
            profile's `layers.remat` says), `prefill` or `extend`.
        strict: weights that nothing reads are an error.

    Raises:
        GraphError, WeightError, ProfileError: see `rlx_jax.errors`.
    """
    if mesh is not None:
        raise UnsupportedError("compile(mesh=…) is not built yet; leave it out to run on one device")
    compiler = open_compiler(flow, weights, profile, strict, merge=False, program=program)
    return finish_model(compiler, program)


def finish_model(compiler: Compiler, program: str = "forward") -> CompiledModel:
    """The model, its parameters streamed in while XLA compiles what is known already."""
    model = CompiledModel(compiler, program)
    if not compiler.layout.leaves:
        return model.replace(params={})
    if not has_data(compiler):
        return model
    target, platform = compiler.settings.target, default_target()
    if target != platform:
        message = f"fusion.target is {target!r}, and JAX runs on {platform!r}: chosen for the one, run on the other"
        warnings.warn(f"{compiler.flow.name}: {message}", RlxWarning, stacklevel=3)
    # A context of the caller's thread, which the loader does not see.
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_params, compiler, device, given_up)
        try:
            model.warm()
            params, seconds = loading.result()
        except BaseException:  # Ctrl-C, too: whoever it reaches should not wait for the rest of the weights
            given_up.set()
            raise
    model.load_seconds = seconds
    return model.replace(params=params)


def has_data(compiler: Compiler) -> bool:
    """Whether the source holds numbers, not only shapes."""
    source = compiler.source
    return source is not None and not (isinstance(source, MappingSource) and source.shapes_only)


def load_params(compiler: Compiler, device: Any, given_up: threading.Event) -> tuple[dict[str, jax.Array], float]:
    """The arrays of the layout's leaves on `device`, and the seconds it took to read them."""
    assert compiler.source is not None
    start = time.perf_counter()
    params = load_leaves(compiler.layout.leaves, compiler.source, device, compiler.tell, given_up)
    return params, time.perf_counter() - start


@dataclass(eq=False)
class CompiledModel:
    """A jitted callable: `model(x)` checks inputs, compiles each size once, and runs.

    `params` maps leaf names to arrays (None without weights: use `init`, `.apply`, `.lower`).
    """

    compiler: Compiler = field(repr=False)
    program: str = "forward"
    params: dict[str, Any] | None = field(default=None, repr=False)
    load_seconds: float = 0.0
    last: ProgramKey | None = field(default=None, repr=False)

    # -- calling -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, state: State | None = None, **named: Any) -> Any:
        """Run the program. One output is returned as an array, several as a dict by name.

        Host inputs are checked (dtype, shape, ids against their tables); jax.Arrays are not, as that would wait
        for the device. A program with state takes `state=` (donated: not to be used again) and returns
        `(outputs, state)`. `extend` waits for the state's lengths and refuses tokens that do not fit its slots; under
        `jax.jit` and in `apply` nothing is checked, and tokens past the last slot are dropped.
        """
        params = self.require_params("calling the model")
        values, key, arrays = self._bind(inputs, named, state)
        if state is not None and self.program == "extend":
            check_room(state.length, values["lengths"], dict(key.binding).get("context"))
        return self._result(self.execute(key, params, arrays, values), key)

    def bound(self, sizes: Mapping[str, int], around: Around | None = None, last_only: bool = True) -> BoundProgram:
        """The program for these sizes, by default with outputs of the last token; wrapped in `around` as one program.

        Raises:
            RecompileError: it is not compiled, and the profile's `buckets.on_recompile` is `error`.
        """
        template = self._template(last_only=last_only)
        slots = {name: min(sizes["context"], window) for name, window in template.rings.items()}
        # Where every layer has a window, no array has `context` slots, and the program is the same for all.
        binding = tuple(sorted((n, size) for n, size in {**sizes, **slots}.items() if n in template.symbols))
        key = ProgramKey(self.program, frozenset(), last_only, binding, around)
        self.compiler.check_compiled(key)
        return BoundProgram(self, key)

    def reader(self, sizes: Mapping[str, int], last_only: bool = True) -> BoundProgram:
        """`prefill` for these sizes, as `bound`; called without a state, it starts from an empty one."""
        return self.bound(sizes, FromEmpty(self._empty_state(sizes["batch"], sizes["context"])), last_only)

    def execute(
        self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays
    ) -> tuple[tuple[Any, ...], StateArrays]:
        """Call the executable of `key`, made if this is its first call."""
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.compiler.function(key).run(params, state, inputs)
        leaves = jax.tree.leaves((state, inputs))
        if any(isinstance(v, jax.core.Tracer) for v in leaves):
            return self.compiler.function(key).jitted(params, state, inputs)
        return self.launch(key, params, state, inputs)

    def launch(
        self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays
    ) -> tuple[tuple[Any, ...], StateArrays]:
        """`execute` where no argument is traced, which to look for takes longer than all the rest."""
        executable = self._executable(key, params, state, inputs)
        what = f"{self.compiler.flow.name}: {self.program} of {dict(key.binding)}"
        check_fits(executable.peak_bytes, what)
        try:
            with out_of_memory(what):
                results = executable.run(params, state, inputs)
        except (RuntimeError, ValueError) as error:
            if not isinstance(error, RlxError):
                refuse_consumed(params, inputs, error)
            if not isinstance(error, ValueError) or "sharding" not in str(error):
                raise
            # Parameters or inputs on other devices than those of the first call: jax.jit compiles for each placement.
            results = self.compiler.function(key).jitted(params, state, inputs)
        return results

    def apply(self, params: Arrays, *inputs: Any, state: State | None = None, **named: Any) -> Any:
        """The same as a pure function of `params`: `jax.jit`, `grad`, `vmap` and `checkpoint` go through.

        Traced inputs cannot be checked: an id out of range reads the nearest row.
        """
        check_params(params, self.param_specs())
        values, key, arrays = self._bind(inputs, named, state)
        self.last = key
        return self._result(self.compiler.function(key).jitted(dict(params), arrays, values), key)

    def lower(self, *inputs: Any, state: State | None = None, **named: Any) -> jax.stages.Lowered:
        """Lower `apply(params, *inputs)` like `jax.jit(f).lower`. Inputs may be `ShapeDtypeStruct`."""
        values, key, arrays = self._bind(inputs, named, state)
        return self._executable(key, self.param_specs(), arrays, values).lowered

    def _executable(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Executable:
        self.last = key
        return self.compiler.executable(key, params, state, inputs)

    def _result(self, results: tuple[tuple[Any, ...], StateArrays], key: ProgramKey) -> Any:
        outputs, state = results
        names = self._template(key.given).mir.output_names
        result = outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))
        return (result, as_state(state)) if state else result

    def _bind(
        self, args: tuple[Any, ...], named: Mapping[str, Any], state: State | None
    ) -> tuple[dict[str, Any], ProgramKey, StateArrays]:
        """Normalise the inputs and find the program they ask for."""
        flow = self.compiler.flow
        given = bind_names(self.inputs, args, named, flow.name)
        optional = frozenset(d.name for d in flow.inputs if d.optional and d.name in given)
        template = self._template(optional)
        declared = {i.input: i.type for i in template.mir.inputs}
        bounds = template.bounds
        values = {n: _value(n, given[n], t, bounds) for n, t in declared.items()}
        sizes = bind_sizes(declared, values, flow.name)
        check_length(sum(bound(d, sizes) for d in bounds.counted), bounds, flow.name)
        arrays = self._state_arrays(template.state, state, sizes)
        if self.program in CACHED_PROGRAMS:
            low = 1 if self.program == "prefill" else 0
            check_new_tokens(values["lengths"], sizes["seq"], low, sizes.get("context"))
        key = ProgramKey(self.program, optional, False, tuple(sorted(sizes.items())))
        return values, key, arrays

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """The inputs of the program: the flow's, then those that stages or `derive` added (`lengths`)."""
        known = self.compiler.flow.inputs
        names = {d.name for d in known}
        added = (i for i in self._template().mir.inputs if i.input not in names)
        return (*known, *(InputDecl(i.input, i.type) for i in added))

    def _state_arrays(
        self, types: Mapping[tuple[str, str], TensorType], state: State | None, sizes: dict[str, int]
    ) -> StateArrays:
        """The state's arrays, checked against the program; their sizes are added to the binding."""
        if bool(types) != (state is not None):
            raise GraphError(f"program {self.program} {'needs' if types else 'takes no'} state=; see init_state")
        if state is None:
            return {}
        if not isinstance(state, State):
            raise GraphError(f"state= is what init_state or an earlier call returned, got {type(state).__name__}")
        arrays = state.arrays()
        if any(
            isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) and a.is_deleted() for a in arrays.values()
        ):
            raise SessionStateError("this state was consumed by an earlier call; go on with the state that it returned")
        check_state(arrays, types, sizes)
        if self.program == "prefill":
            check_empty(state.length)
        return arrays

    def _template(self, given: frozenset[str] = frozenset(), last_only: bool = False) -> Any:
        return self.compiler.template(self.program, given, last_only)

    def warm(self) -> None:
        """Compile now if every size is known: a static flow, or one with a binding."""
        flow = self.compiler.flow
        template = self._template()
        declared = {i.input: i.type.bind(flow.binding) for i in template.mir.inputs}
        if self.program == "forward" and all(t.is_static for t in declared.values()):
            self.lower(**{name: t.spec for name, t in declared.items()})

    # -- parameters --------------------------------------------------------------------------

    def require_params(self, doing: str) -> dict[str, Any]:
        """`params`, or an error that says how to get them.

        Raises:
            MissingWeightError: there are none; `doing` needs them.
        """
        if self.params is None:
            raise MissingWeightError(
                f"{self.compiler.flow.name}: {doing} needs parameters; pass weights= to compile, "
                "or use model.replace(params=model.init(key))"
            )
        return self.params

    def param_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every leaf."""
        return {name: t.spec for name, t in self.compiler.layout.types().items()}

    def weights(self, params: Arrays | None = None) -> dict[str, jax.Array]:
        """Parameters by checkpoint key, in the checkpoint's shapes and dtypes."""
        arrays = self.require_params("weights()") if params is None else params
        check_leaves(arrays, self.compiler.layout.leaves)
        return by_key({program: arrays[name] for name, program in self.compiler.layout.leaves.items()})

    def replace(self, params: Arrays) -> CompiledModel:
        """The same executables with other numbers.

        Raises:
            WeightShapeError: a leaf is missing, unknown, or has another shape or dtype.
        """
        check_params(params, self.param_specs())
        return replace(self, params=dict(params))

    def init(self, key: jax.Array | int) -> dict[str, jax.Array]:
        """Random parameters: normal with deviation 1/√fan_in, norms 1, biases 0. `key` may be a seed below 2**64."""
        key = random_key("init", key)
        built = self._template().built
        return initial_params(expand_composites(built.hir, built.types), self.compiler.layout.leaves, key)

    def init_state(self, batch: int, context: int | None = None) -> State:
        """An empty state for `batch` rows and `context` cached tokens.

        A layer that attends in a window of w keys holds min(context, w) of them.
        """
        batch = as_dim(batch, "init_state: batch")
        context = None if context is None else as_dim(context, "init_state: context")
        empty = self._empty_state(batch, context)
        with out_of_memory(f"{self.compiler.flow.name}: init_state(batch={batch}, context={context})"):
            return as_state(self.compiler.call(empty))

    def _empty_state(self, batch: DimLike, context: DimLike | None) -> EmptyState:
        """What makes it; one for each choice of sizes."""
        key = (self.program, batch, context)
        if key in self.compiler.empty:
            return self.compiler.empty[key]
        template, name = self.compiler.any_template(self.program), self.compiler.flow.name
        if not template.state:
            raise GraphError(f"program {self.program} of {name} has no state")
        binding: dict[str, Any] = {**self.compiler.flow.binding, "batch": batch}
        binding |= {} if context is None else {"context": context}
        check_length(binding.get("context", 0), template.bounds, f"{name}: init_state")
        binding |= {dim: min(context or window, window) for dim, window in template.rings.items()}
        what = f"{name}: init_state(batch={batch}, context={context})"
        return self.compiler.empty.setdefault(key, empty_state(template.state, binding, what))

    # -- looking -----------------------------------------------------------------------------

    def text(self, level: str, *inputs: Any, **named: Any) -> str:
        """The program at a level: "hir", "mir", "jaxpr" (symbolic), "lir", "stablehlo", "hlo" (for sizes).

        Sizes are those of the given inputs, else of the last call.
        """
        if level not in LEVELS:
            raise GraphError(f"text: levels are {', '.join(LEVELS)}; got {level!r}{did_you_mean(str(level), LEVELS)}")
        template = self._template()
        if level == "hir":
            return dump(template.built.hir, "hir", f", fusion={self.compiler.settings.policy}")
        if level == "mir":
            return dump(template.mir, "mir")
        if inputs or named:
            self.lower(*inputs, **named)
        if level == "jaxpr":
            return str(self._jaxpr())
        if self.last is None:
            raise GraphError(f"text({level!r}) needs sizes: call the model first, or give inputs: text({level!r}, x)")
        lir = self.compiler.function(self.last).lir
        if level == "lir":
            return dump_lir(lir)
        executable = self.compiler.executables.get(self.last)
        if executable is None:
            raise GraphError(
                f"text({level!r}): this size was only traced through apply; give inputs: text({level!r}, x)"
            )
        return str(executable.lowered.as_text()) if level == "stablehlo" else str(executable.call.as_text())

    def _jaxpr(self) -> Any:
        mir = self._template().mir
        lir = Lir(mir, make_plan(self.compiler.settings))
        state = {k: t.spec for k, t in self._template().state.items()}
        inputs = {i.input: i.type.spec for i in mir.inputs}
        return jax.make_jaxpr(make_function(lir, self.compiler.layout))(self.param_specs(), state, inputs)

    def report(self) -> Report:
        """What compiling cost, and what the program of the last call needs."""
        template = self._template()
        seconds = {**template.seconds, "load": self.load_seconds}
        executable = self.compiler.executables.get(self.last) if self.last else None
        common: dict[str, Any] = {
            "nodes": template.nodes,
            "parameter_bytes": sum(t.nbytes for t in self.compiler.layout.types().values()),
            "compiles": len(self.compiler.executables),
            "recompiles": self.compiler.recompiles,
            "refusals": template.built.refusals,
            "fusion": template.fusion,
        }
        if executable is None:
            return Report(seconds, **common)
        memory: Any = executable.call.memory_analysis()
        graph, plan = executable.lir.graph, executable.lir.plan
        return Report(
            {**seconds, **executable.seconds},
            **common,
            attention=executable.lir.attention(),
            flops=flops(graph),
            donated_bytes=memory.alias_size_in_bytes,
            peak_bytes=executable.peak_bytes,
            estimated_activation_bytes=activation_bytes(graph, plan.donate_state, plan.scan),
        )


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program for one choice of sizes. Whoever calls it has checked the arguments; the state is consumed."""

    model: CompiledModel
    key: ProgramKey

    @property
    def is_compiled(self) -> bool:
        """Whether a call runs at once."""
        return self.key in self.model.compiler.executables

    def __call__(self, inputs: Arrays, state: StateArrays) -> tuple[tuple[Any, ...], StateArrays]:
        run = self.model.execute if jax.config.jax_disable_jit else self.model.launch  # type: ignore[attr-defined]
        return run(self.key, self.model.require_params("generation"), state, inputs)


def _value(name: str, value: Any, declared: TensorType, bounds: Bounds) -> Any:
    """A host value checked; tracers and shapes as they are."""
    if isinstance(value, jax.ShapeDtypeStruct):
        if value.dtype != declared.dtype:
            raise DTypeError(f"input {name}: expected {declared}, got {value.dtype}")
        return value
    return host_value(name, value, declared, bounds.ids.get(name))


def refuse_consumed(params: Arrays, inputs: Arrays, cause: Exception) -> None:
    """Say which argument of a failed call has no values any more.

    Raises:
        WeightError, SessionStateError: a parameter or an input was donated to an earlier call.
    """
    kinds: tuple[tuple[str, Arrays, type[RlxError]], ...]
    kinds = (("params: leaf", params, WeightError), ("input", inputs, SessionStateError))
    for what, arrays, kind in kinds:
        for name, array in arrays.items():
            if isinstance(array, jax.Array) and array.is_deleted():
                raise kind(
                    f"{what} {quote(name)} has no values any more: an earlier call that donates it consumed it; "
                    "pass an array that is still there"
                ) from cause


def check_leaves(params: Any, leaves: Mapping[str, Any]) -> None:
    """Parameters are the Layout's leaves by name.

    Raises:
        WeightShapeError: names those that are missing or unknown.
    """
    if not isinstance(params, Mapping):
        raise WeightShapeError(f"params: expected a mapping of leaves, got {type(params).__name__}")
    missing, extra = [n for n in leaves if n not in params], [n for n in params if n not in leaves]
    if missing or extra:
        parts = {"missing": missing, "unknown": extra}.items()
        close = did_you_mean(str(extra[0]), missing) if extra else ""
        found = "; ".join(f"{what} leaves {listing(n, 8)}" for what, n in parts if n)
        raise WeightShapeError(f"params: {found}{close}")


def check_params(params: Any, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Parameters are the Layout's leaves: every name, with its shape and dtype.

    Raises:
        WeightShapeError: names what differs.
    """
    check_leaves(params, specs)
    for name, spec in specs.items():
        got = params[name]
        shape, dtype = getattr(got, "shape", None), getattr(got, "dtype", type(got).__name__)
        if shape != spec.shape or dtype != spec.dtype:
            raise WeightShapeError(f"params: leaf {name!r} is {spec.dtype}{list(spec.shape)}, got {dtype} {shape}")
