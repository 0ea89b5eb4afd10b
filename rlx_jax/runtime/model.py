"""`CompiledModel`: what `rlx_jax.compile` returns. It checks a call, finds the program for its sizes, and runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rlx_jax.compiler.compare import program_changes
from rlx_jax.compiler.executable import Around, Arrays, Executable, Results, StateArrays
from rlx_jax.compiler.meshes import at_home, own_mesh
from rlx_jax.compiler.pipeline import Template, derived_program, text_after
from rlx_jax.compiler.settings import Settings
from rlx_jax.device import check_fits, out_of_memory
from rlx_jax.errors import GraphError, MissingWeightError, RequestError, RlxError, did_you_mean, listing, quote, shown
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import as_dim
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.inspect.outline import Outline
from rlx_jax.profiles import Change, CompileProfile
from rlx_jax.program import Buildable, Built, InputDecl
from rlx_jax.runtime.arguments import check_leaves, check_params, is_traced, refuse_consumed, refuse_shared
from rlx_jax.runtime.block_times import BlockTimes, profile_calls
from rlx_jax.runtime.inputs import (
    as_row,
    bind_names,
    bind_sizes,
    check_all_given,
    check_counted,
    check_new_tokens,
    check_rows,
    random_key,
    refuse_unread,
    value_or_spec,
    whole_number,
)
from rlx_jax.runtime.model_setup import drawn_params
from rlx_jax.runtime.programs import LAST, ProgramKey, Programs, Variant
from rlx_jax.runtime.report import Report, jaxpr_of, report_of, text_of
from rlx_jax.runtime.sequence_state import FromEmpty, State, as_state, check_room, given_state
from rlx_jax.weights.execute import by_key

LEVELS = ("hir", "mir", "lir", "jaxpr", "stablehlo", "hlo")


@dataclass(eq=False)
class CompiledModel:
    """A jitted callable: `model(x)` checks inputs, compiles each size once, and runs.

    `params` maps leaf names to arrays (None without weights: use `init`, `.apply`, `.lower`).
    """

    programs: Programs = field(repr=False)
    name: str
    program: str = "forward"
    params: dict[str, Any] | None = field(default=None, repr=False)
    load_seconds: float = 0.0
    traced: bool = field(default=False, repr=False)  # `params` are of a jax.grad or jax.jit around the call
    last: ProgramKey | None = field(default=None, repr=False)

    # -- calling -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, state: State | None = None, **named: Any) -> Any:
        """Run the program. One output is returned as an array, several as a dict by name.

        Inputs are checked: dtype, shape, ids against their tables. Of `jax.Array`s on an accelerator ids are read only
        where the profile's `checks.ids` is "all", which copies them to the host. An array of the host is not to be
        overwritten before the result is here: JAX may read it until then. A program with state takes `state=` (donated:
        not to be used again) and returns `(outputs, state)`. `extend` waits for the state's lengths and refuses tokens
        that do not fit its slots; under `jax.jit` and in `apply` nothing is checked, and tokens past the last slot are
        dropped.
        """
        params = self.require_params("calling the model")
        values, key, arrays = self._bind(inputs, named, state)
        if state is not None and self.program in ("extend", "verify"):
            refuse_consumed({}, values)
            check_room(state.length, values["lengths"], dict(key.binding).get("context"))
        return self._result(self.execute(key, params, arrays, values), key)

    def bound(self, sizes: Mapping[str, int], around: Around | None = None, variant: Variant = LAST) -> BoundProgram:
        """The program for these sizes, by default with outputs of the last token; wrapped in `around` as one program.

        Raises:
            RequestError: it is not compiled, and the profile's `buckets.on_recompile` is `error`.
        """
        key = self.sized(sizes, variant)
        return self.bind(replace(key, around=around or key.around))

    def bind(self, key: ProgramKey) -> BoundProgram:
        """The program of a key; see `bound` for what it raises."""
        self.programs.check_compiled(key)
        return BoundProgram(self, key)

    def sized(self, sizes: Mapping[str, int], variant: Variant = LAST) -> ProgramKey:
        """The key of the program for these sizes; see `bound`. Of `prefill` it is called without a state, and makes the
        empty one itself."""
        key = self.key(variant.given, variant.outputs, variant.last_only)
        if self.program == "prefill":
            held = {name: size for name, size in sizes.items() if name != "seq"}
            key = replace(key, around=FromEmpty(self.programs.empty_state(key, held, variant.spare)))
        key = replace(key, hidden=variant.hidden)
        template = self.programs.template(key.symbolic)
        slots = self.programs.ring_sizes(template, sizes.get("context"), variant.spare)
        # Where every layer has a window, no array has `context` slots, and the program is the same for all.
        binding = tuple(sorted((n, size) for n, size in {**sizes, **slots}.items() if n in template.symbols))
        return replace(key, binding=binding)

    def as_program(self, program: str) -> CompiledModel:
        """Another program of the same flow."""
        return replace(self, program=program, last=None)

    def execute(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Call the executable of `key`, made if this is its first call."""
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.programs.function(key).run(params, state, inputs)
        if self.traced or is_traced(jax.tree.leaves((state, inputs))):
            refuse_consumed(params, inputs)  # jax.jit would find out behind our back
            return self.programs.function(key).jitted(params, state, inputs)
        return self.launch(key, params, state, inputs)

    def launch(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """`execute` where no argument is traced, which to look for takes longer than all the rest."""
        executable = self._executable(key, params, state, inputs)
        what = f"{self.name}: {key.program} of {dict(key.binding)}"
        check_fits(executable.peak_bytes, what)
        try:
            with out_of_memory(what):
                try:
                    return executable.run(params, state, inputs)
                except ValueError:
                    if executable.fits(params, state, inputs):
                        raise
                if (at := self.programs.shardings(key, inputs)) is not None:
                    places = (at.params, {name: at.state[name] for name in state}, at.inputs)
                    return executable.run(*jax.device_put((dict(params), state, inputs), places))
                # On other devices than those of the first call: jax.jit compiles again, for each placement.
                return self.programs.function(key).jitted(params, state, inputs)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            consumed = {f"state {quote(name)}": a for name, a in state.items()}
            consumed |= {f"input {quote(name)}": inputs[name] for name in executable.consumed}
            self._explain(error, params, inputs, consumed)
            raise

    def apply(self, params: Arrays, *inputs: Any, state: State | None = None, **named: Any) -> Any:
        """The same as a pure function of `params`: `jax.jit`, `grad`, `vmap` and `checkpoint` go through.

        Traced inputs cannot be checked: an id out of range reads the nearest row.
        """
        return self._result(*self.trace(params, inputs, named, state))

    def trace(
        self, params: Arrays, inputs: tuple[Any, ...], named: Arrays, state: State | None, headless: bool = False
    ) -> tuple[Results, ProgramKey]:
        """What `apply` runs, and its key; where `headless`, up to the head, whose operands are the outputs."""
        check_params(params, self.param_specs())
        values, key, arrays = self._bind(inputs, named, state)
        self.last = key = replace(key, headless=headless)
        refuse_consumed(params, values)  # where this is traced, jax.jit would find out behind our back
        arguments = at_home((dict(params), arrays, values), self.programs.division)
        traced = is_traced(jax.tree.leaves(arguments))
        try:
            with contextlib.nullcontext() if traced else own_mesh(self.programs.division):
                return self.programs.function(key).jitted(*arguments), key
        except (RuntimeError, ValueError) as error:
            self._explain(error, params, values)
            raise

    def _explain(self, error: Exception, params: Arrays, inputs: Arrays, donated: Arrays | None = None) -> None:
        """Say which argument of a failed call it was. Before a call nobody looks: it takes longer than a small model.

        Raises:
            WeightShapeError: `params` was edited. Others as `refuse_consumed` and `refuse_shared`.
        """
        if not isinstance(error, RlxError):
            check_params(params, self.param_specs())
            refuse_consumed(params, inputs, error)
            refuse_shared(donated or {}, params, inputs, error)

    def lower(self, *inputs: Any, state: State | None = None, **named: Any) -> jax.stages.Lowered:
        """Lower `apply(params, *inputs)` like `jax.jit(f).lower`. Inputs may be `ShapeDtypeStruct`."""
        values, key, arrays = self._bind(inputs, named, state)
        return self._executable(key, self.param_specs(), arrays, values).lowered

    def _executable(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Executable:
        self.last = key
        if key not in self.programs.executables:
            check_params(params, self.param_specs())
        return self.programs.executable(key, params, state, inputs)

    def _result(self, results: Results, key: ProgramKey) -> Any:
        outputs, state = results
        names = self._template(key.given).mir.output_names
        result = outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))
        return (result, as_state(state)) if state else result

    def _bind(
        self, args: tuple[Any, ...], named: Mapping[str, Any], state: State | None
    ) -> tuple[dict[str, Any], ProgramKey, StateArrays]:
        """Normalise the inputs and find the program they ask for."""
        flow, known, given = self.flow, *self._given(args, named)
        optional = frozenset(d.name for d in known if d.optional and d.name in given)
        template = self._template(optional)
        refuse_unread(optional, self._unread(optional), flow.name)
        declared = {i.input: i.type for i in template.mir.inputs}
        check_all_given(declared, given, flow.name)
        bounds = template.bounds
        devices = self.settings.check_ids
        one_row = {d.name for d in known if d.rows_optional}
        # A first input that no output reads may be given: it is checked like the others, and left out.
        unread = {d.name: d.type for d in flow._inputs[:1] if d.name in given and d.name not in declared}
        both = {**declared, **unread}
        values = {n: value_or_spec(n, given[n], t, bounds.ids.get(n), devices) for n, t in both.items()}
        values |= {n: as_row(v) for n, v in values.items() if n in one_row and v.ndim == both[n].rank - 1}
        sizes = bind_sizes(both, values, flow.name)
        if unread:
            symbols = {symbol for t in declared.values() for symbol in t.symbols}
            sizes = {symbol: size for symbol, size in sizes.items() if symbol in symbols}
        values = at_home({n: values[n] for n in declared}, self.programs.division)
        check_counted(sizes, bounds, flow.name)
        check_rows(values, bounds, sizes, devices)
        arrays = given_state(self.program, template.state, state, sizes)
        if self.program in CACHED_PROGRAMS:
            low = 1 if self.program == "prefill" else 0
            check_new_tokens(values["lengths"], sizes["seq"], low, sizes.get("context"))
        key = ProgramKey(self.name, self.program, optional, binding=tuple(sorted(sizes.items())))
        return values, key, arrays

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """The inputs of the program: the flow's, then those that stages or `derive` added (`lengths`, a cache).

        Of the required ones those are left out that no output reads, or whose values the program has in its state.
        """
        return self._inputs(frozenset())

    def _given(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[InputDecl, ...], dict[str, Any]]:
        """The inputs that a call may have, and what it gives of them; which are read depends on the optional ones."""
        known = self.inputs
        if optional := frozenset(d.name for d in known if d.optional and named.get(d.name) is not None):
            known = self._inputs(optional)
        unread = self._unread(optional)
        first = next((d.name for d in self.flow._inputs[:1] if d.name in unread and not d.optional), "")
        return known, bind_names(known, args, named, self.flow.name, unread, first)

    def _inputs(self, given: frozenset[str]) -> tuple[InputDecl, ...]:
        template = self._template(given)
        read = {i.input for i in template.mir.inputs}
        known = tuple(d for d in self.flow._inputs if d.optional or d.name in read)
        names = {d.name for d in known}
        added = (i for i in template.mir.inputs if i.input not in names)
        optional = (InputDecl(i.input, i.type, None) for i in template.optional if i.input not in names)
        return (*known, *(InputDecl(i.input, i.type) for i in added), *optional)

    @property
    def first_input(self) -> str:
        """The name of the first input that the outputs read: of a model of text, its tokens."""
        return self.programs.first_input(self.name)

    @property
    def flow(self) -> Buildable:
        """What was compiled."""
        return self.programs.flows[self.name]

    @property
    def built(self) -> Built:
        """What its flow became when it was built, without optional inputs."""
        return self.programs.build(self.name, frozenset())[0]

    @property
    def settings(self) -> Settings:
        """The profile as it was resolved for this model."""
        return self.programs.settings

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, the primary one first."""
        names: tuple[str, ...] = self._template().mir.output_names
        return names

    def template(self, program: str | None = None, *, last_only: bool = False) -> Template:
        """A program with symbolic sizes, by default this one."""
        return self.programs.template(ProgramKey(self.name, program or self.program, last_only=last_only))

    def _template(self, given: frozenset[str] = frozenset()) -> Template:
        return self.programs.template(self.key(given))

    def _unread(self, given: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """The inputs that no output reads, of the programs that users call with all of them."""
        return self._template(given).unread if self.program in ("forward", "train", "explicit") else ()

    def key(
        self, given: frozenset[str] = frozenset(), outputs: tuple[str, ...] | None = None, last_only: bool = False
    ) -> ProgramKey:
        """The key of this program with these optional inputs and outputs, without sizes."""
        wanted = None if outputs is None or outputs == self.output_names else outputs
        return ProgramKey(self.name, self.program, given, outputs=wanted, last_only=last_only)

    def warm(self) -> None:
        """Compile now if every size is known: a static flow, or one with a binding."""
        flow = self.flow
        template = self._template()
        declared = {i.input: i.type.bind(flow._binding) for i in template.mir.inputs}
        if self.program in ("forward", "explicit") and all(t.is_static for t in declared.values()):
            specs: dict[str, Any] = {name: t.spec for name, t in declared.items()}
            self.lower(**specs)

    # -- parameters --------------------------------------------------------------------------

    def require_params(self, doing: str) -> dict[str, Any]:
        """`params`, or an error that says how to get them.

        Raises:
            MissingWeightError: there are none; `doing` needs them.
        """
        if self.params is None:
            raise MissingWeightError(
                f"{self.name}: {doing} needs parameters; pass weights= to compile, "
                "or use model.replace(params=model.init(key))"
            )
        return self.params

    def refuse_traced(self) -> None:
        """Requests read what comes out, and traced parameters give nothing to read.

        Raises:
            RequestError: says what can be differentiated.
        """
        if self.traced:
            raise RequestError(
                f"{self.name}: the parameters are traced by jax.grad or the like, and requests read results on the "
                "host: differentiate logits, hidden_states or model.apply"
            )

    def param_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every leaf."""
        return {name: t.spec for name, t in self.programs.layout.types().items()}

    def weights(self, params: Arrays | None = None) -> dict[str, jax.Array]:
        """Parameters by checkpoint key, in the checkpoint's shapes and dtypes."""
        arrays = self.require_params("weights()") if params is None else params
        if params is None:
            check_params(arrays, self.param_specs())
        check_leaves(arrays, self.programs.layout.leaves)
        refuse_consumed(arrays, {})
        return by_key({program: arrays[name] for name, program in self.programs.layout.leaves.items()})

    def replace(self, params: Arrays) -> CompiledModel:
        """The same executables with other numbers, which may be traced: `jax.grad(lambda p: f(model.replace(p)(x)))`.
        Over a mesh they are moved to where the model keeps them.

        Raises:
            WeightShapeError: a leaf is missing, unknown, or has another shape or dtype.
        """
        check_params(params, self.param_specs())
        traced, resting = is_traced(params.values()), self.programs.resting()
        placed = dict(params) if traced or resting is None else jax.device_put(dict(params), resting)
        return replace(self, params=placed, traced=traced)

    def init(self, key: jax.Array | int) -> dict[str, jax.Array]:
        """Random parameters: normal with deviation 1/√fan_in, norms 1, biases 0. `key` may be a seed below 2**64.

        Raises:
            LimitError, DeviceOutOfMemoryError: there is no room for them.
        """
        return drawn_params(self.programs, self._template().built, random_key("init", key), f"{self.name}: init")

    def init_state(self, batch: int, context: int | None = None, *, given: Sequence[str] = (), **sizes: int) -> State:
        """An empty state for `batch` rows and `context` cached tokens.

        A layer that attends in a window of w keys holds min(context, w) of them. `given` are the optional inputs that
        calls will bring: a mask over keys is kept in the state. `sizes` are those of other inputs, such as patches of
        an image, where the state keeps what is computed of them.
        """
        optional = [d.name for d in self.inputs if d.optional]
        if isinstance(given, str) or (others := [name for name in given if name not in optional]):
            what = shown(given) if isinstance(given, str) else listing(others)
            raise GraphError(f"init_state: given is {what}; expected names of optional inputs: {listing(optional)}")
        if unknown := [name for name in sizes if name not in self._template().symbols]:
            raise GraphError(f"init_state: {self.name} has no size {listing(unknown)}")
        held = {"batch": batch, **({} if context is None else {"context": context}), **sizes}
        held = {name: as_dim(size, f"init_state: {name}") for name, size in held.items()}
        empty = self.programs.empty_state(self.key(frozenset(given)), held)
        with out_of_memory(f"{self.name}: init_state(batch={batch}, context={context})"):
            return as_state(self.programs.call(empty))

    # -- looking -----------------------------------------------------------------------------

    def text(self, level: str, *inputs: Any, after: str = "", **named: Any) -> str:
        """The program at a level: "hir", "mir", "jaxpr" (symbolic), "lir", "stablehlo", "hlo" (for sizes).

        Sizes are those of the given inputs, else of the last call. With `after`, a HIR or MIR program is shown as the
        pass of that name leaves it.

        Raises:
            GraphError: an unknown level or pass, a pass that is not part of this program, or a level without sizes.
        """
        if level not in LEVELS:
            raise GraphError(f"text: levels are {', '.join(LEVELS)}; got {level!r}{did_you_mean(str(level), LEVELS)}")
        template = self._template()
        if after:
            return text_after(template.built, self.settings, self.program, level, after)
        if level == "hir":
            as_built = derived_program(template.built, self.program) in ("forward", "train")
            found = template.built.hir if as_built else template.hir
            return dump(found, "hir", f", fusion={self.settings.profile.fusion.policy}")
        if level == "mir":
            return dump(template.mir, "mir")
        if level == "lir" and (inputs or named):  # a plan can be looked at where it cannot run
            self.last = self._bind(inputs, named, named.pop("state", None))[1]
        elif inputs or named:
            self.lower(*inputs, **named)
        if level == "jaxpr":
            return str(jaxpr_of(self.programs, template, self.param_specs()))
        if self.last is None:
            raise GraphError(f"text({level!r}) needs sizes: call the model first, or give inputs: text({level!r}, x)")
        return text_of(self.programs, self.last, level)

    def outline(self) -> Outline:
        """The table of its blocks, which `print(model)` prints and a notebook shows: path, what leaves it, parameters,
        FLOPs and bytes. Sizes are those of the last call, else those that the flow is bound to, else 1."""
        last = dict(self.last.binding) if self.last is not None and self.last.program == self.program else {}
        return self._template().outline({**self.flow._binding, **last})

    def __str__(self) -> str:
        return str(self.outline())

    def __repr__(self) -> str:
        count = sum(t.size for t in self.programs.layout.types().values())
        there = "" if self.params is not None or not count else ", no numbers yet"
        return f"CompiledModel({self.name}: {self.program}, {count:,} parameters{there})"

    def _repr_html_(self) -> str:
        return self.outline()._repr_html_()

    def report(self, **sizes: int) -> Report:
        """What compiling cost, and what the program of the last call needs.

        With `sizes` (`batch=1, seq=128`) nothing is compiled: FLOPs, bytes and scratch memory of the program of those.

        Raises:
            GraphError: a size of the program is missing, or is none of it. SequenceLengthError: over the positions.
        """
        seconds = {**self._template().seconds, "load": self.load_seconds}
        return report_of(self.programs, self._template(), self.last, seconds, sizes)

    def compare(self, ours: CompileProfile, theirs: CompileProfile) -> tuple[Change, ...]:
        """What a profile changes in this program in place of another; see `CompileProfile.diff`. Choices that depend on
        sizes are those of the last call, if there was one.

        Raises:
            ProfileError: one of them asks for what this program cannot be.
        """
        built = self._template().built
        sizes = None if self.last is None or self.last.program != self.program else dict(self.last.binding)
        found = [self.programs.resolved(profile, self.name) for profile in (ours, theirs)]
        return program_changes(built, found[0], found[1], self.program, self.programs.opened[0], sizes)

    def profile(self, *inputs: Any, state: State | None = None, runs: int = 5, **named: Any) -> BlockTimes:
        """Time by block of a call, of `runs` under `jax.profiler`. What a call consumes is copied for each: the state
        and the inputs that are given are as they were.

        Raises:
            RequestError: a trace is being taken already, or `runs` is no number over 0. UnsupportedError: this device's
            traces name no kernels. Others as a call.
        """
        self.refuse_traced()
        _, given = self._given(inputs, named)
        return profile_calls(self.programs, self, given, state, whole_number("runs", runs, 1))


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program for one choice of sizes. Whoever calls it has checked the arguments; the state is consumed."""

    model: CompiledModel
    key: ProgramKey

    @property
    def is_compiled(self) -> bool:
        """Whether a call runs at once."""
        return self.key in self.model.programs.executables

    def __call__(self, inputs: Arrays, state: StateArrays) -> Results:
        self.model.refuse_traced()
        run = self.model.execute if jax.config.jax_disable_jit else self.model.launch  # type: ignore[attr-defined]
        return run(self.key, self.model.require_params("generation"), state, inputs)
