"""This module defines `CompiledModel`, the result of `rlx_jax.compile`, and `BoundProgram`.

A `CompiledModel` checks the arguments of a call, finds or compiles the program for their sizes, and runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rlx_jax.compiler.executable import Arrays, Results, StateArrays
from rlx_jax.compiler.meshes import to_model_devices, use_model_mesh
from rlx_jax.compiler.pipeline import make_lir, make_template
from rlx_jax.device import check_device_memory, out_of_memory
from rlx_jax.errors import GraphError, MissingWeightError, RequestError, RlxError, check_names, quote
from rlx_jax.inspection.diff import fact_changes, facts_of_program
from rlx_jax.inspection.records import Inspection
from rlx_jax.ir.types import as_dim, as_names, is_static
from rlx_jax.ir.weight_reads import shapes_only
from rlx_jax.lowering.inspect.outline import Outline
from rlx_jax.profiles import Change, CompileProfile
from rlx_jax.runtime.arguments import check_leaves, check_params, is_traced, refuse_consumed, refuse_shared
from rlx_jax.runtime.block_times import BlockTimes, profile_calls
from rlx_jax.runtime.explain import explain_program
from rlx_jax.runtime.explain import show as show_model
from rlx_jax.runtime.export_model import apply_any_size, export_model
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model_program import (
    SYMBOLIC_LEVELS,
    ModelProgram,
    check_text_arguments,
    key_with_sizes,
    level_text,
)
from rlx_jax.runtime.model_setup import init_model_params
from rlx_jax.runtime.program_key import LAST_TOKEN, ProgramKey, Variant
from rlx_jax.runtime.random_keys import random_key
from rlx_jax.runtime.report import Report, report_of
from rlx_jax.runtime.sequence_state import FromEmpty, State, as_state, check_capacity
from rlx_jax.weights.execute import quantization_errors
from rlx_jax.weights.inverse import weights_by_key


@dataclass(eq=False)
class CompiledModel(ModelProgram):
    """A jitted callable: `model(x)` checks inputs, compiles each size once, and runs.

    Attributes:
        programs: the compiled programs, shared by all models that `as_program` and `replace` derive from this one.
        name: the name of the flow.
        program: the program that calls run: `forward`, `train`, `prefill`, `extend`, `verify`, `explicit`, `packed`.
        params: the arrays by parameter name; None without weights: use `init`, `apply` or `lower`.
        load_seconds: the seconds that loading the parameters took.
        traced: whether `params` are tracers of a `jax.grad` or `jax.jit` around the call.
        last_key: the key of the program that ran last, for `report` and `text`.
    """

    params: dict[str, Any] | None = field(default=None, repr=False)
    load_seconds: float = 0.0
    traced: bool = field(default=False, repr=False)
    last_key: ProgramKey | None = field(default=None, repr=False)

    # -- calling -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, state: State | None = None, **named: Any) -> Any:
        """Check the inputs, run the program and return its outputs.

        The dtype and the shape of every input are checked, and ids against the size of their table. Ids in a
        `jax.Array` on an accelerator are checked only if the profile's `checks.ids` is "all", which copies them to the
        host. Do not overwrite a host array before the result is ready: JAX may read it until then.

        `extend` waits for the state's lengths and refuses tokens that do not fit its slots. Under `jax.jit` and in
        `apply` values are not checked, and tokens past the last slot are dropped.

        Args:
            inputs, named: the inputs by position and by name.
            state: the state, of a program that has one. It is donated, so do not use it again.

        Returns:
            An array for one output, a dict by name for several. A program with state returns `(outputs, state)`.
        """
        params = self.require_params("calling the model")
        values, key, arrays = self._bind(inputs, named, state)
        if state is not None and self.program in ("extend", "verify"):
            refuse_consumed({}, values)
            check_capacity(state.length, values["lengths"], dict(key.binding).get("context"))
        return self._result(self.execute(key, params, arrays, values), key)

    def bind_to_sizes(self, sizes: Mapping[str, int], variant: Variant = LAST_TOKEN) -> BoundProgram:
        """Return the program for these sizes.

        Args:
            sizes: the size of each symbolic dimension, such as `batch`, `seq` and `context`.
            variant: the outputs and optional inputs; by default all outputs, at each row's last token.

        Raises:
            RequestError: the program is not compiled, and the profile's `buckets.on_recompile` is `error`.
        """
        return self.bind(self.key_for_sizes(sizes, variant))

    def bind(self, key: ProgramKey) -> BoundProgram:
        """Return the program of a key; raises as `bind_to_sizes` does."""
        self.programs.check_compiled(key)
        return BoundProgram(self, key)

    def key_for_sizes(self, sizes: Mapping[str, int], variant: Variant = LAST_TOKEN) -> ProgramKey:
        """Return the key of the program for these sizes; see `bind_to_sizes`.

        A `prefill` program is called without a state: the wrapper `FromEmpty` creates the empty one inside it.
        """
        key = self.key(variant.optional_inputs, variant.outputs, variant.last_only)
        if self.program == "prefill":
            # The length of the prompt changes no array of the state.
            state_sizes = {name: size for name, size in sizes.items() if name != "seq"}
            key = replace(key, wrapper=FromEmpty(self.programs.empty_state(key, state_sizes, variant.spare)))
        key = replace(key, hidden=variant.hidden)
        template = self.programs.template(key.symbolic)
        slots = self.programs.ring_sizes(template, sizes.get("context"), variant.spare)
        # If every layer has a window, no array has `context` slots, and one program serves every context.
        binding = tuple(sorted((n, size) for n, size in {**sizes, **slots}.items() if n in template.symbols))
        return replace(key, binding=binding)

    def as_program(self, program: str) -> CompiledModel:
        """Return the model that runs another program of the same flow, with the same parameters."""
        return replace(self, program=program, last_key=None)

    def execute(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Run the program of `key`, compiled at its first call; traced arguments are inlined into the caller's trace.

        Returns:
            The outputs in order, and the new state by name.
        """
        if self.traced or is_traced(jax.tree.leaves((state, inputs))):
            refuse_consumed(params, inputs)  # a donated array would fail inside the caller's jax.jit, without its name
            return self.programs.function(key).jitted(params, state, inputs)
        return self.launch(key, params, state, inputs)

    def launch(self, key: ProgramKey, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Run the program of `key` with concrete arguments.

        It skips the search for tracers of `execute`, which takes longer than the rest of the dispatch. Arguments are
        examined only after a failure, to name the faulty one.
        """
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.programs.function(key).run(params, state, inputs)
        self.last_key = key
        executable = self.programs.executable(key, params, state, inputs)
        description = f"{self.name}: {key.program} of {dict(key.binding)}"
        if executable.is_too_large:
            check_device_memory(executable.peak_bytes, description)
        try:
            with out_of_memory(description):
                try:
                    return executable.run(params, state, inputs)
                except ValueError:
                    if executable.accepts(params, state, inputs):
                        raise
                # The arguments are on other devices than those that the executable was compiled for.
                if (shardings := self.programs.shardings(key, inputs)) is not None:
                    placement = (shardings.params, {name: shardings.state[name] for name in state}, shardings.inputs)
                    return executable.run(*jax.device_put((dict(params), state, inputs), placement))
                # Without a mesh there is no required placement: jax.jit compiles once more for each.
                return self.programs.function(key).jitted(params, state, inputs)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            consumed = {f"state {quote(name)}": a for name, a in state.items()}
            consumed |= {f"input {quote(name)}": inputs[name] for name in executable.consumed_inputs}
            self._explain(error, params, inputs, consumed)
            raise

    def apply(self, params: Arrays, *inputs: Any, state: State | None = None, **named: Any) -> Any:
        """Run the program as a pure function of `params`, which `jax.jit`, `grad`, `vmap` and `checkpoint` transform.

        Values of traced inputs are not checked: an id out of range reads the nearest row. Returns as `__call__` does.
        """
        return self._result(*self.trace(params, inputs, named, state))

    def trace(
        self, params: Arrays, inputs: tuple[Any, ...], named: Arrays, state: State | None, headless: bool = False
    ) -> tuple[Results, ProgramKey]:
        """Return the results of `apply` before they are named, and the key of the program.

        With `headless` the program ends before the head, and the operands of the head are its outputs.
        """
        check_params(params, self.param_specs())
        values, key, arrays = self._bind(inputs, named, state, allow_symbolic=not headless)
        if not all(is_static(size) for value in values.values() for size in value.shape):
            return apply_any_size(self.programs, key, dict(params), values), key
        self.last_key = key = replace(key, headless=headless)
        refuse_consumed(params, values)  # a donated array would fail inside the caller's jax.jit, without its name
        arguments = to_model_devices((dict(params), arrays, values), self.programs.model_sharding)
        try:
            with use_model_mesh(self.programs.model_sharding):
                return self.programs.function(key).jitted(*arguments), key
        except (RuntimeError, ValueError) as error:
            self._explain(error, params, values)
            raise

    def _explain(self, error: Exception, params: Arrays, inputs: Arrays, donated: Arrays | None = None) -> None:
        """Raise an error that names the faulty argument of a failed call, if there is one.

        This runs only after a failure: checking every argument takes longer than a call of a small model.

        Raises:
            WeightShapeError: `params` was edited. Others as `refuse_consumed` and `refuse_shared`.
        """
        if not isinstance(error, RlxError):
            check_params(params, self.param_specs())
            refuse_consumed(params, inputs, error)
            refuse_shared(donated or {}, params, inputs, error)

    def lower(self, *inputs: Any, state: State | None = None, **named: Any) -> jax.stages.Lowered:
        """Return the lowered `apply(params, *inputs)`, as `jax.jit(f).lower` does; `jax.ShapeDtypeStruct` will do."""
        values, key, arrays = self._bind(inputs, named, state)
        self.last_key = key
        return self.programs.executable(key, self.param_specs(), arrays, values).lowered

    def _result(self, results: Results, key: ProgramKey) -> Any:
        """Return the results of a program as users get them: an array or a dict, and the state if there is one."""
        outputs, state = results
        names = self._template(key.optional_inputs).mir.output_names
        result = outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))
        return (result, as_state(state)) if state else result

    # -- parameters --------------------------------------------------------------------------

    def require_params(self, operation: str) -> dict[str, Any]:
        """Return `params`.

        Args:
            operation: the operation that needs them, for the message.

        Raises:
            MissingWeightError: there are none; the message explains how to get them.
        """
        if self.params is None:
            raise MissingWeightError(
                f"{self.name}: {operation} needs parameters; pass weights= to compile, "
                "or use model.replace(params=model.init(key))"
            )
        return self.params

    def concrete_params(self, operation: str) -> dict[str, Any]:
        """Return `params` for an operation that reads results on the host, where tracers have no values.

        Raises:
            RequestError: the parameters are traced; the message lists what can be differentiated.
            MissingWeightError: as `require_params`.
        """
        if self.traced:
            raise RequestError(
                f"{self.name}: the parameters are traced by jax.grad or the like, and requests read results on the "
                "host: differentiate logits, hidden_states or model.apply"
            )
        return self.require_params(operation)

    def param_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every parameter, by name."""
        return self.programs.layout.specs()

    def weights(self, params: Arrays | None = None) -> dict[str, jax.Array]:
        """Return the parameters by checkpoint key, in the shapes and dtypes of the checkpoint.

        Args:
            params: parameters by name; None for `self.params`.
        """
        arrays = self.require_params("weights()") if params is None else params
        if params is None:
            check_params(arrays, self.param_specs())
        check_leaves(arrays, self.programs.layout.params)
        refuse_consumed(arrays, {})
        return weights_by_key({program: arrays[name] for name, program in self.programs.layout.params.items()})

    def quantization_errors(self) -> dict[str, float]:
        """Return how much each parameter changed that `precision.weights` of the profile packs, such as by `int8`.

        The checkpoint is read again.

        Returns:
            √Σ(packed − original)² / √Σ original², by the name of the parameter; 0 for a parameter of zeros.

        Raises:
            MissingWeightError: the model was compiled without values of weights.
        """
        source = self.programs.source
        if source is None or shapes_only(source):
            raise MissingWeightError(f"{self.name}: the weights are shapes without values: there is nothing to compare")
        return quantization_errors(self.programs.layout.params.values(), source)

    def replace(self, params: Arrays) -> CompiledModel:
        """Return a model with other parameters and the same executables.

        The parameters may be traced: `jax.grad(lambda p: f(model.replace(p)(x)))`. On a mesh concrete ones are moved to
        their storage sharding.

        Raises:
            WeightShapeError: a parameter is missing, unknown, or has another shape or dtype.
        """
        check_params(params, self.param_specs())
        traced, shardings = is_traced(params.values()), self.programs.storage_shardings()
        params = dict(params) if traced or shardings is None else jax.device_put(dict(params), shardings)
        return replace(self, params=params, traced=traced)

    def init(self, key: jax.Array | int) -> dict[str, jax.Array]:
        """Return random parameters: normal with standard deviation 1/√fan_in, 1 for norms, 0 for biases.

        Args:
            key: a key of `jax.random`, or a seed below 2**64.

        Raises:
            LimitError, DeviceOutOfMemoryError: there is not enough memory for them.
        """
        return init_model_params(self.programs, self._template().built, random_key("init", key), f"{self.name}: init")

    def init_state(self, batch: int, context: int | None = None, *, given: Sequence[str] = (), **sizes: int) -> State:
        """Return an empty state.

        Args:
            batch: the number of rows.
            context: the number of cached tokens per row. A layer with a window of w keys caches min(context, w).
            given: the optional inputs that later calls pass; a mask over keys is part of the state.
            sizes: the sizes of other inputs, such as patches of an image, if the state caches values computed from
                them.

        Raises:
            GraphError: an unknown optional input or size, or a missing size; or the program has no state.
            DeviceOutOfMemoryError: the state does not fit.
        """
        optional, symbols = [d.name for d in self.inputs if d.optional], sorted(self._template().symbols)
        given = as_names(given, "init_state: given")
        check_names(given, optional, f"init_state: given: {self.name} has no optional input", "; it has")
        check_names(sizes, symbols, f"init_state: {self.name} has no size", "; it has")
        dims = {"batch": batch, **({} if context is None else {"context": context}), **sizes}
        dims = {name: as_dim(size, f"init_state: {name}") for name, size in dims.items()}
        empty = self.programs.empty_state(self.key(frozenset(given)), dims)
        return as_state(self.programs.run_helper(empty))

    # -- inspection --------------------------------------------------------------------------

    def text(
        self, level: str, *inputs: Any, after: str = "", diff: bool = False, format: str = "text",
        sizes: Mapping[str, int] | None = None, **named: Any,
    ) -> str:  # fmt: skip
        """Return the dump of the program at a level.

        Args:
            level: "hir", "mir" or "jaxpr", with symbolic sizes unless there are inputs or sizes; "lir", "stablehlo",
                "hlo", or "pipeline" for all levels of this compiler, with those of the last call if there are none.
            inputs, named: inputs as in a call, whose sizes are used; `jax.ShapeDtypeStruct` will do.
            after: the name of a pass; the HIR or MIR program is shown after it.
            diff: show the difference that the pass made; without a pass, that all passes of the level made.
            format: "text"; or at hir, mir and lir "dot" for Graphviz, "mermaid", or "stats" for the counts of ops.
            sizes: the size of each symbolic dimension, such as `{"batch": 1, "seq": 16}`, in place of inputs.

        Raises:
            GraphError: an unknown level, pass or format, one that the level or the program does not have, no sizes for
                a level that needs them, or both inputs and sizes.
        """
        check_text_arguments(level, after, diff, format)
        if sizes is not None and (inputs or named):
            raise GraphError(f"text({level!r}): pass inputs or sizes=, not both")
        if inputs or named:
            key = self.last_key = self._bind(inputs, named, named.pop("state", None))[1]
        elif sizes is not None or level in SYMBOLIC_LEVELS or not self._template().symbols:
            symbolic = level in SYMBOLIC_LEVELS and not sizes
            key = self.key() if symbolic else key_with_sizes(self.programs, self.key(), sizes or {})
        elif self.last_key is None:
            names = ", ".join(f"{name!r}: …" for name in sorted(self._template().symbols))
            raise GraphError(
                f"text({level!r}) needs sizes: call the model first, or pass inputs: text({level!r}, x), or "
                f"sizes={{{names}}}"
            )
        else:
            key = self.last_key
        return level_text(self.programs, key, level, after, diff, format, key is not self.last_key or bool(inputs))

    def outline(self) -> Outline:
        """Return the table of blocks that `print(model)` prints and a notebook displays.

        Its columns are the block path, the output type, parameters, FLOPs and bytes. Sizes come from the last call,
        else the binding of the flow, else 1.
        """
        ran = self.last_key is not None and self.last_key.program == self.program
        last_sizes = dict(self.last_key.binding) if ran and self.last_key else {}
        return self._template().outline({**self.flow._binding, **last_sizes})

    def __str__(self) -> str:
        return str(self.outline())

    def __repr__(self) -> str:
        count = self.programs.layout.num_parameters()
        suffix = "" if self.params is not None or not count else ", none loaded"
        return f"CompiledModel({self.name}: {self.program}, {count:,} parameters{suffix})"

    def _repr_html_(self) -> str:
        return self.outline()._repr_html_()

    def report(self, **sizes: int) -> Report:
        """Return the cost of compilation, and the cost of a run of the last program.

        Args:
            sizes: sizes such as `batch=1, seq=128`. With them nothing is compiled: the report has the FLOPs, bytes and
                scratch memory of the program with these sizes.

        Raises:
            GraphError: a size is missing or unknown. SequenceLengthError: more tokens than the model has positions.
        """
        seconds = {**self._template().seconds, "load": self.load_seconds}
        return report_of(self.programs, self._template(), self.last_key, seconds, sizes)

    def compare(self, ours: CompileProfile, theirs: CompileProfile) -> tuple[Change, ...]:
        """Return the changes in this program from the profile `ours` to `theirs`; see `CompileProfile.diff`.

        Choices that depend on sizes are compared for the sizes of the last call, if there was one.

        Raises:
            ProfileError: one of the profiles does not apply to this program.
        """
        built = self._template().built
        sizes = None if self.last_key is None or self.last_key.program != self.program else dict(self.last_key.binding)
        facts = []
        for profile in (ours, theirs):
            settings = self.programs.resolve_settings(profile, self.name)
            template = make_template(built, settings, self.program)
            lir = None if sizes is None else make_lir(template, sizes, settings)
            serves = self.programs.fuses_by_default
            facts.append(dict(facts_of_program(template, settings, self.program, serves, lir)))
        return fact_changes(*facts)

    def profile(self, *inputs: Any, state: State | None = None, runs: int = 5, **named: Any) -> BlockTimes:
        """Return the time that each block takes, measured by `jax.profiler` over `runs` calls.

        Donated arguments are copied for each call, so the caller's state and inputs stay valid.

        Raises:
            RequestError: another trace is running, or `runs` is not a positive integer.
            UnsupportedError: traces of this device name no kernels.
            Others as a call.
        """
        self.concrete_params("profile")
        _, values = self._named_values(inputs, named)
        return profile_calls(self.programs, self, values, state, check_integer("runs", runs, 1))

    def explain(self, *inputs: Any, state: State | None = None, runs: int = 5, **named: Any) -> Inspection:
        """Explain a call: per block its time, work and share of the roofline; the largest losses with what would reduce
        them; and findings, such as copies. Print the result, or use its fields.

        Args:
            inputs, named, state, runs: as in `profile`. With `jax.ShapeDtypeStruct`, or without parameters, the program
                is compiled and not run, and its times are estimates. So they are without inputs, for the last program.

        Raises:
            GraphError: there are no inputs, and nothing ran yet. Others as `profile`.
        """
        times = None
        if inputs or named:
            values = self._named_values(inputs, named)[1]
            if self.params is None or any(isinstance(value, jax.ShapeDtypeStruct) for value in values.values()):
                self.lower(state=state, **values)
            else:
                times = self.profile(state=state, runs=runs, **values)
        if self.last_key is None:
            raise GraphError(f"{self.name}: explain needs inputs, as nothing ran yet; jax.ShapeDtypeStruct will do")
        return explain_program(self.programs, self.last_key, times)

    show = show_model
    export = export_model


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """The program of a model for one choice of sizes. It does not check its arguments, and it consumes the state."""

    model: CompiledModel
    key: ProgramKey

    @property
    def is_compiled(self) -> bool:
        """Return whether the program is compiled, so that a call starts without delay."""
        return self.key in self.model.programs.executables

    def __call__(self, inputs: Arrays, state: StateArrays) -> Results:
        return self.model.launch(self.key, self.model.concrete_params("generation"), state, inputs)
