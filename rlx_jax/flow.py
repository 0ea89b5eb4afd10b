"""`ModelFlow`: a model as a list of stages with its inputs, outputs and weight source.

Every method returns a new flow. `build` runs the stages and returns the HIR, which `rlx_jax.compile` lowers.
"""

from __future__ import annotations

import html
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import jax
import numpy as np

from rlx_jax.at import SelectedBlocks
from rlx_jax.blocks.control import BlockStage, check_stages, run_stage
from rlx_jax.compiler.graph_module import BuiltModel
from rlx_jax.compiler.meshes import make_model_sharding
from rlx_jax.compiler.pipeline import make_template
from rlx_jax.compiler.settings import choose_settings
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError, RlxError, ShapeError, UnsupportedError, check_names, quote, shown
from rlx_jax.flow_outputs import FlowOutputs, names_of
from rlx_jax.io.garbage import paused_gc
from rlx_jax.ir.graph import Builder, TypeCache
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.region import bind_params, roll
from rlx_jax.ir.text import summary
from rlx_jax.ir.types import Init, as_dim, as_name, is_float, is_static
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.verify import verify
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.layer_stack import Stages
from rlx_jax.lowering.hir.weights import pad_vocabulary
from rlx_jax.lowering.inspect.outline import Outline
from rlx_jax.lowering.mir.small import unread_inputs
from rlx_jax.plugins import FlowExtensionPlan
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.program import POSITIONS as POSITIONS
from rlx_jax.program import REQUIRED, InputDecl, MtpFactory, Weights
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.editing import BlockEdit, edit_blocks, write_placeholder
from rlx_jax.trace.emit import Emit, FlowValue, input_type
from rlx_jax.trace.parameters import F32, Parameters, WeightDecl, check_declared
from rlx_jax.weights.overlay import combine_sources
from rlx_jax.weights.source import open_weights


class ModelRecipe(Protocol):
    """Anything with a name that assembles a flow."""

    @property
    def name(self) -> str: ...

    def assemble(self) -> ModelFlow: ...


@dataclass(frozen=True)
class ModelFlow(Stages):
    """A model: inputs, stages, outputs, profile, weights. The first input is the first active value.

    Flows are immutable: each method returns a copy with one of these fields replaced, and documents that field.
    """

    name: str
    _inputs: tuple[InputDecl, ...] = ()
    _stages: tuple[BlockStage, ...] = ()
    _outputs: FlowOutputs = FlowOutputs()
    profile: CompileProfile | None = None
    _weights: WeightSource | None = None
    _ignored_keys: tuple[str, ...] = ()
    _binding: Mapping[str, int] = field(default_factory=dict, hash=False)
    _program: str = "forward"
    _extensions: FlowExtensionPlan = FlowExtensionPlan()
    _block_edits: tuple[BlockEdit, ...] = ()
    _declared: tuple[WeightDecl, ...] = ()
    _added_weights: WeightSource | None = None
    _missing: Literal["error", "init"] = "error"
    # Applied to every source that the flow is bound to or compiled with, and to its own result, which stays as it is.
    _adapt_weights: Callable[[WeightSource], WeightSource] | None = None
    _max_positions: int | None = None  # tokens of the longest sequence; a table of positions may allow fewer
    _no_training: str = ""  # the reason why the model cannot be trained as published; empty if it can
    _other_parts: tuple[str, ...] = ()  # parts of the model in other flows, by the first segment of their block paths
    _ignored_fields: tuple[str, ...] = field(default=(), compare=False)  # config fields to ignore, as requested
    _make_mtp: MtpFactory | None = field(default=None, repr=False, compare=False)
    _checked: BuiltModel | None = field(default=None, init=False, repr=False, compare=False)  # see `_check_weights`

    def __post_init__(self) -> None:
        as_name(self.name, "a flow")
        if self._max_positions is not None:
            where = f"{self.name}: max_positions"
            if not is_static(as_dim(self._max_positions, where)):
                raise ShapeError(f"{where} is {shown(self._max_positions)}; expected a number of tokens")

    @staticmethod
    def new(name: str, *, max_positions: int | None = None) -> ModelFlow:
        """Return a flow without inputs or stages; programs refuse sequences of more than `max_positions` tokens."""
        return ModelFlow(name, _max_positions=max_positions)

    def input(
        self, name: str, shape: Sequence[int | str], dtype: Any = "float32", default: float | str | None = REQUIRED, *,
        rows_optional: bool = False,
    ) -> ModelFlow:  # fmt: skip
        """Declare an input; strings in the shape are symbolic dimensions (`batch` and `seq` have meaning).

        Args:
            default: makes the input optional: a number, "positions", or None (its stages then run without it).
            rows_optional: a call may omit the first axis of the shape; the array is then a single row.
        """
        declared = input_type(name, shape, dtype)
        if any(i.name == name for i in self._inputs):
            raise GraphError(f"{self.name}: input {quote(name)} is declared twice")
        return replace(self, _inputs=(*self._inputs, InputDecl(name, declared, default, bool(rows_optional))))

    def with_profile(self, profile: ProfileLike) -> ModelFlow:
        """Use `profile` (a CompileProfile, the name of a preset, or a path) unless `compile` gets another."""
        return replace(self, profile=CompileProfile.of(profile, f"{self.name}: "))

    def profile_file(
        self, path: str | os.PathLike[str] | None, default: CompileProfile | Callable[[], CompileProfile] | None = None
    ) -> ModelFlow:
        """Use the profile in a `*.rlx.toml`.

        Args:
            path: the file, or None to use `default`.
            default: a profile, or a function that returns one; None is `CompileProfile.auto()`.

        Raises:
            MissingFileError: no such file. ProfileError: as `CompileProfile.from_toml`.
        """
        if path is not None:
            return self.with_profile(CompileProfile.from_toml(path))
        chosen = default() if callable(default) else default
        return self.with_profile(chosen or CompileProfile.auto())

    def profile_prefill(self) -> ModelFlow:
        """Use the preset `llama32_prefill`."""
        return self.with_profile(CompileProfile.preset("llama32_prefill"))

    def profile_decode(self) -> ModelFlow:
        """Use the preset `llama32_decode`."""
        return self.with_profile(CompileProfile.preset("llama32_decode"))

    def profile_encoder(self) -> ModelFlow:
        """Use the preset `encoder`."""
        return self.with_profile(CompileProfile.preset("encoder"))

    def with_weights(self, weights: Weights, leave: Iterable[str] = (), *, add: bool = False) -> ModelFlow:
        """Bind the flow to its weights.

        Args:
            weights: a mapping of arrays, a WeightSource, or a path.
            leave: keys (or prefixes that end in `.`) that are left unread on purpose.
            add: add the weights to the ones that the flow is bound to, or will be compiled with, such as an adapter
                or a vector that a custom stage reads. No key may be in both.
        """
        if add:
            if leave:
                raise GraphError(f"{self.name}: with_weights: leave is for the weights of the model, without add")
            return replace(self, _added_weights=combine_sources(open_weights(weights), self._added_weights))
        opened = None if weights is None else open_weights(weights)
        return replace(self, _weights=opened, _ignored_keys=(*self._ignored_keys, *leave))

    def with_mtp(self, make: MtpFactory) -> ModelFlow:
        """Set the multi-token-prediction (MTP) module that `speculative="mtp"` drafts with.

        Args:
            make: `make(weights)` returns the flow of the module at its first use, or raises. The inputs of that flow
                are ids `[batch, seq]` and `hidden` `[batch, seq, H]`: at each position the hidden state that this
                model's head reads for a token, and the id of the token after it. Its outputs are `logits`, and
                `hidden` to draft the next token with.
        """
        if not callable(make):
            raise GraphError(f"{self.name}: with_mtp takes a function from weights to a flow, got {shown(make)}")
        return replace(self, _make_mtp=make)

    def bind(self, **sizes: int | None) -> ModelFlow:
        """Set sizes of symbolic dimensions to compile for ahead of the first call; None leaves a dimension open."""
        dim_names = {s for i in self._inputs for s in i.type.symbols}
        # An explicit program gets its cache inputs during compilation, so no declared input has this dimension.
        dim_names |= {"past"} if self._program == "explicit" else set()
        bound_sizes = {name: size for name, size in sizes.items() if size is not None}
        check_names(bound_sizes, sorted(dim_names), f"{self.name}: bind: no input has a dimension", "; there are")
        for name, size in bound_sizes.items():
            if isinstance(size, str):
                raise ShapeError(f"{self.name}: bind: {name}: expected a number, got {quote(size)}")
            as_dim(size, f"{self.name}: bind: {name}")
        return replace(self, _binding={**self._binding, **bound_sizes})

    def stage(self, *stages: BlockStage) -> ModelFlow:
        """Append stages."""
        return replace(self, _stages=(*self._stages, *check_stages(stages, self._where())))

    def lm_head(self, vocab_size: int | None = None, hidden_size: int | None = None, tied: bool = False) -> ModelFlow:
        """Append the head, which computes logits from the tied embedding or `lm_head.weight`, and name the output
        `logits`. The sizes default to the shape of that weight, and are checked against it where they are given."""
        return super().lm_head(vocab_size, hidden_size, tied).output("logits")

    def output(self, name: str) -> ModelFlow:
        """Name the primary output, which is the last active value."""
        return self._with_outputs(primary=as_name(name, f"{self.name}: output"), chooses_primary=False)

    def _with_outputs(self, **fields: Any) -> ModelFlow:
        return replace(self, _outputs=replace(self._outputs, **fields))

    def outputs(self, names: Iterable[str]) -> ModelFlow:
        """Choose the outputs by name: no others are computed, and inputs that none of them reads are not required.

        The first name is the primary output: the side output, stream or register of that name, or, if there is none,
        the last active value under that name. The other names are as in `with_extra_outputs`.
        """
        output_names = names_of(names, f"{self.name}: outputs")
        if not output_names:
            raise GraphError(f"{self.name}: outputs needs a name for the primary output")
        return self._with_outputs(primary=output_names[0], chooses_primary=True, side=output_names[1:])

    def with_extra_outputs(self, names: Iterable[str]) -> ModelFlow:
        """Choose the side outputs by name, in this order: each is a value of `emit.output`, a stream, or a register.

        Without this call, every value that a stage passes to `emit.output` is a side output. The outputs of `export_kv`
        come last, unless some of them are named here.
        """
        return self._with_outputs(side=names_of(names, f"{self.name}: with_extra_outputs"))

    def export_kv(self) -> ModelFlow:
        """Add the keys and values of every causal attention, and every recurrent state, as side outputs.

        Attention i, in the order of the flow and whatever stage writes it, adds `kv.{i}.k` (rotated) and `kv.{i}.v`
        `[batch, seq, K·D]`. A block with a state, such as a causal convolution, adds `state.{i}.{slot}` `[batch, …]`:
        its state after the last token.
        """
        return self._with_outputs(taps_caches=True)

    def explicit(self, past: int | None = None, custom_mask: bool = False) -> ModelFlow:
        """Compile to the program `explicit`: the tokens follow cached ones, and the cache is an input and an output.

        After the flow's own inputs come `past_k_{i}` and `past_v_{i}` `[batch, past, K·D]` of every causal attention,
        and optionally `position_ids` `[batch, seq]` and `mask` `[batch, past + seq]`, 1 for a key to attend to. After
        its own outputs come `kv.{i}.k` and `kv.{i}.v` `[batch, past + seq, K·D]`. A block with a state reads the input
        `state_{slot}_{i}` `[batch, …]` and returns the output `state.{i}.{slot}`; it allows no mask.

        Args:
            past: cached tokens to compile for ahead of the first call.
            custom_mask: the mask is required; it is an int32 input after the ones declared so far.
        """
        flow = replace(self, _program="explicit").bind(past=past)
        return flow.input("mask", ("batch", "past + seq"), dtype="int32") if custom_mask else flow

    def at(self, pattern: str) -> SelectedBlocks[ModelFlow]:
        """Select the blocks with paths that match a glob, such as `layers.*.self_attn.{q,v}_proj`, to wrap, replace,
        capture or scale them: see `SelectedBlocks`."""
        return SelectedBlocks(
            BlockPattern(pattern), lambda edit: replace(self, _block_edits=(*self._block_edits, edit))
        )

    def param(self, pattern: str, *, shape: Sequence[int] | None = None, init: Init | None = None) -> ModelFlow:
        """Declare the shape or init of weights that no source has, where their stages do not.

        The last call that matches a weight wins, and its init wins over the one of the stage. Where a source has the
        weight, the shape is checked against it.

        Args:
            pattern: a glob over checkpoint keys, such as `layers.*.mlp.{gate,up}_proj.weight`.
            shape: the shape as in the checkpoint, as `emit.param` takes it.
            init: the initializer, as `emit.param` takes it.

        Raises:
            GraphError: invalid shape or init; from `build`, a pattern that matches no weight.
        """
        return replace(self, _declared=(*self._declared, WeightDecl.of(pattern, shape, init)))

    def with_extensions(self, plan: FlowExtensionPlan) -> ModelFlow:
        """Run these rewrites from plugins over the HIR at the end of `build`; see `FlowExtensionPlan`."""
        if not isinstance(plan, FlowExtensionPlan):
            raise GraphError(f"{self.name}: with_extensions takes a FlowExtensionPlan, got {shown(plan)}")
        return replace(self, _extensions=plan)

    def hidden_states(self) -> ModelFlow:
        """Name the primary output `hidden`."""
        return self.output("hidden")

    def when(self, condition: bool, edit: Callable[[ModelFlow], ModelFlow]) -> ModelFlow:
        """Return `edit(flow)` if the condition holds, else the flow as it is."""
        return self.patch(edit) if condition else self

    def patch(self, edit: Callable[[ModelFlow], ModelFlow]) -> ModelFlow:
        """Return `edit(flow)`, to apply a function within a chain of methods."""
        return _check_flow(edit(self), f"{self.name}: patch")

    @staticmethod
    def from_recipe(recipe: ModelRecipe | Callable[[], ModelFlow]) -> ModelFlow:
        """Return `recipe.assemble()`; a function without arguments that returns a flow is a recipe too."""
        if isinstance(recipe, type) and hasattr(recipe, "assemble"):
            raise GraphError(f"{recipe.__name__} is a class, not a recipe: use recipe_for(path) or for_prefill(config)")
        if not callable(recipe) and not hasattr(recipe, "assemble"):
            raise GraphError(f"expected a recipe, from recipe_for(path) or for_prefill(config), got {shown(recipe)}")
        return _check_flow(recipe() if callable(recipe) else recipe.assemble(), "from_recipe")

    def build(
        self, weights: Weights = None, given: Iterable[str] = (), captured: CapturedArrays | None = None
    ) -> BuiltModel:
        """Run the stages and return the HIR of the forward program. Reads shapes of weights, never their data.

        Args:
            weights: a source to build with, in place of the one that the flow is bound to.
            given: names of the optional inputs that calls will supply.
            captured: arrays that functions in `emit.jax` captured in an earlier build of the same model.

        Raises:
            GraphError: a stage does not fit the value it gets; the message starts with its block path.
            MissingWeightError: a weight is not in the source.
        """
        if not self._inputs:
            raise GraphError(f"{self.name}: a flow needs at least one input: .input(name, shape)")
        source = self._weights if weights is None else open_weights(weights)
        if self._checked is not None and source is self._weights and not given and captured is None:
            return self._checked
        parameters = Parameters(self._all_weights(source), self._declared)
        parameters.initializes_missing = self._missing == "init"
        return self._build(parameters, given, captured)

    def _all_weights(self, source: WeightSource | None) -> WeightSource | None:
        """Return the weights of a source as the stages read them, and the added ones."""
        if source is not None and self._adapt_weights is not None:
            source = self._adapt_weights(source)
        return combine_sources(source, self._added_weights)

    def _check_weights(self, parameters: Parameters) -> None:
        """Build the flow with `parameters` that check its weights, and keep the result for `build`."""
        parameters.declared = self._declared
        built = self._build(parameters)
        if not built.missing_keys and self._all_weights(built.source) is built.source:
            object.__setattr__(self, "_checked", built)

    @paused_gc()
    def _build(
        self, parameters: Parameters, given: Iterable[str] = (), captured: CapturedArrays | None = None
    ) -> BuiltModel:
        """Return the HIR of the forward program over the weights of `parameters`; other arguments as in `build`."""
        start, source, types = time.perf_counter(), parameters.source, TypeCache()
        emit = Emit(Builder(self.name, types), parameters, captured, self._binding, self.profile)
        emit.expands_composites = self._outputs.taps_caches or bool(self._block_edits)
        emit.state.program = self._program
        if self._block_edits:  # edits need marked block boundaries; other flows keep the graph free of marks
            emit.builder.marks_blocks, emit.parameters.defers_missing = True, source is not None
            emit.placeholder_writer = partial(write_placeholder, emit, self._block_edits)
        value = self._run_stages(emit, given)
        stage_outputs = set(emit.state.outputs)
        # A missing weight of a stage is deferred, because an edit may replace that stage. Edits have no such escape.
        emit.parameters.defers_missing = False
        value = edit_blocks(emit, value, self._block_edits, self.name, self._other_parts)
        if emit.parameters.deferred:
            emit.parameters.raise_deferred(emit.hir_and_params()[1])
        captured_blocks = tuple(name for name in emit.state.outputs if name not in stage_outputs)
        values = self._outputs.values(emit, value, captured_blocks, self.name)
        outputs = {name: emit.unwrap(output) for name, output in values.items()}
        emit.captured.closed = True
        rolled, refusals = roll(emit.builder.finish(list(outputs.values()), list(outputs)), emit.state.repeats, types)
        verify(rolled, "hir", "build", types)
        graph, read = self._extensions.apply(rolled, types), emit.parameters.read_keys
        if graph is not rolled:  # an extension may read weights that no stage reads
            graph = graph if source is None else bind_params(graph, source, types)
            read |= dict.fromkeys(k for leaf in graph.params() for p in leaf.programs for k in keys_of(p))
        check_declared(self._declared, read, self.name)
        return BuiltModel(
            self.name, graph, source, self.profile, types, self, tuple(read), self._ignored_keys, refusals,
            self._binding, program=emit.state.program, captured=emit.captured, roles=emit.parameters.roles,
            inits=emit.parameters.inits, missing_keys=tuple(emit.parameters.fresh),
            contracts=tuple(emit.state.contracts), max_positions=self._max_positions, captures=captured_blocks,
            seconds=time.perf_counter() - start,
        )  # fmt: skip

    def _run_stages(self, emit: Emit, given: Iterable[str] = ()) -> FlowValue:
        """Write the inputs and the stages to `emit`, and return the last active value."""
        value: FlowValue | None = self._declare(emit, set(given))
        try:
            for stage in self._stages:
                with emit.user_code():
                    value = run_stage(stage, emit, value)
        except RecursionError as error:
            raise GraphError(
                f"{self.name}: nested stages exceed Python's recursion limit, {sys.getrecursionlimit()}; "
                "list them in a Sequence or Repeat instead"
            ) from error
        if value is None:
            raise GraphError(f"{self.name}: the last stage returns no active value")
        return value

    def build_with(self, weights: Weights = None, packed: None = None) -> BuiltModel:
        """Return `build(weights)`; packed weights are part of the source.

        Raises:
            UnsupportedError: `packed` is given.
        """
        if packed is not None:
            expected = "pass a source that contains them, such as a mapping with rlx_jax.Packed"
            raise UnsupportedError(f"{self.name}: build_with takes no packed weights: {expected}")
        return self.build(weights)

    def _declare(self, emit: Emit, given: set[str]) -> FlowValue:
        """Declare the inputs, or write the defaults of absent ones, and return the first input."""
        check_names(sorted(given), [i.name for i in self._inputs], f"{self.name}: no input is called", "; there are")
        for decl in self._inputs:
            if not decl.optional or decl.name in given:
                value = emit.wrap(emit.builder.input(decl.name, decl.type))
                if is_float(decl.type.dtype) and decl.type.dtype != F32:
                    value = emit.cast(value, F32)
                emit.state.inputs[decl.name] = value
            else:
                with emit.builder.origin_scope(Origin((decl.name,))):
                    emit.state.inputs[decl.name] = self._default(emit, decl)
        first_input = emit.state.inputs[self._inputs[0].name]
        return emit.require(first_input, "the first input")

    def _default(self, emit: Emit, decl: InputDecl) -> FlowValue | None:
        """Return the default value of an absent input, or None if its stages run without it."""
        if decl.default is None:
            return None
        shape = decl.type.shape
        # A default gets its symbolic sizes from a required input of the same leading axes.
        reference = next((i for i in self._inputs if not i.optional and i.type.shape[: len(shape)] == shape), None)
        if reference is None:
            raise ShapeError(f"{self.name}: the default of {quote(decl.name)} needs a required input of its shape")
        value = emit.flow_input(reference.name)
        while value.ndim > len(shape):
            value = value[..., 0]
        if decl.default == POSITIONS:
            return emit.positions(value)
        return emit.full_like(value, float(decl.default), decl.type.dtype)

    def summary(self, weights: Weights = None, mesh: Any = None, program: str = "forward") -> str:
        """Return a table of block path, shape and weights, one row for each part of the model.

        With `mesh` and `program`, as in `rlx_jax.compile`, it also shows the sharding of each weight, `(tensor, -)`,
        and its bytes on one device. Communication between devices is up to XLA: `model.report()` counts it.
        """
        built = self.build(weights)
        if mesh is None:
            return summary(built.hir, unread=unread_inputs(built.hir))
        settings = choose_settings(built, None, merge=False, program=program)
        sharding = make_model_sharding(mesh, [built], settings, program, ())
        padded = pad_vocabulary(built.hir, sharding, built.types)
        return summary(padded, sharding.describe_storage, unread_inputs(built.hir))

    def _outline(self) -> Outline:
        """Return the table of blocks that `print(flow)` prints and a notebook shows: path, output, parameters, FLOPs
        and bytes. Symbolic dimensions have the sizes of `bind`, else 1.

        Raises:
            RlxError: as `build`.
        """
        built = self.build()
        settings = choose_settings(built, None, merge=False, program="forward")
        return make_template(built, settings, self._program).outline(self._binding)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{i.name} {i.type}" for i in self._inputs)
        return f"ModelFlow({self.name}: {inputs or 'no inputs'}; {len(self._stages)} stages)"

    def __str__(self) -> str:
        """Return the outline, or, if the flow cannot be built yet, its stages and the error."""
        try:
            return str(self._outline())
        except RlxError as error:
            rows = [f"  {i}  {type(stage).__name__}" for i, stage in enumerate(self._stages)]
            return "\n".join([repr(self), *rows, *textwrap.wrap(f"not built: {error}", 80)])

    def _repr_html_(self) -> str:
        try:
            return self._outline()._repr_html_()
        except RlxError:
            return f"<pre>{html.escape(str(self))}</pre>"


def declared_shapes(flow: ModelFlow, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the declared shape of every weight that the stages of a flow read, by checkpoint key. They run without a
    weight source.

    Raises:
        MissingWeightError: a stage declares no size for an axis, and no `flow.param` does.
    """
    parameters = Parameters(None, flow._declared)
    flow._run_stages(Emit(Builder(flow.name, TypeCache()), parameters, None, flow._binding))
    return {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in parameters.declared_shapes().items()}


def _check_flow(result: object, where: str) -> ModelFlow:
    """Return the result of a user's function after checking that it is a flow."""
    if not isinstance(result, ModelFlow):
        raise GraphError(f"{where}: the function returns a ModelFlow, got {type(result).__name__}")
    return result
