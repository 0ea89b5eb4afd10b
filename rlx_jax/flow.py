"""`ModelFlow`: a model as a list of stages, its inputs, and where its weights come from.

Every method returns a new flow. `build` runs the stages and gives the HIR; `rlx_jax.compile` does the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlx_jax import blocks
from rlx_jax.blocks.control import BlockStage, check_stages
from rlx_jax.blocks.encoder import bert_layer_prefix, check_style
from rlx_jax.built import POSITIONS as POSITIONS
from rlx_jax.built import REQUIRED, InputDecl, Weights
from rlx_jax.built import BuiltModel as BuiltModel
from rlx_jax.emit import F32, Emit, FlowValue, input_type
from rlx_jax.errors import (
    GraphError,
    NameCollisionError,
    ProfileError,
    ShapeError,
    UnboundStreamError,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Origin, TypeCache
from rlx_jax.ir.ops.pointwise import CastTo, FullLike
from rlx_jax.ir.param import WeightSource
from rlx_jax.ir.region import roll
from rlx_jax.ir.text import summary
from rlx_jax.ir.types import as_dim, as_name, as_names, is_float
from rlx_jax.ir.verify import verify
from rlx_jax.layer_stack import LayerStack
from rlx_jax.profiles import CompileProfile
from rlx_jax.weights.source import open_weights


class ModelRecipe(Protocol):
    """Anything with a name that assembles a flow."""

    @property
    def name(self) -> str: ...

    def assemble(self) -> ModelFlow: ...


@dataclass(frozen=True)
class ModelFlow:
    """A model: inputs, stages, outputs, profile, weights. The first input is the first active value."""

    name: str
    inputs: tuple[InputDecl, ...] = ()
    stages: tuple[BlockStage, ...] = ()
    output_name: str = "output"
    side_names: tuple[str, ...] | None = None
    profile: CompileProfile | None = None
    weights: WeightSource | None = None
    left_keys: tuple[str, ...] = ()
    binding: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        as_name(self.name, "a flow")

    # -- declaring ---------------------------------------------------------------------------

    def input(
        self, name: str, shape: Sequence[int | str], dtype: Any = "float32", default: float | str | None = REQUIRED
    ) -> ModelFlow:
        """Declare an input; strings in the shape are symbolic dimensions (`batch` and `seq` have meaning).

        `default` makes it optional: a number, "positions", or None (the stages that read it do without).
        """
        declared = input_type(name, shape, dtype)
        if any(i.name == name for i in self.inputs):
            raise NameCollisionError(f"{self.name}: input {quote(name)} is declared twice")
        number = isinstance(default, int | float) and not isinstance(default, bool) and math.isfinite(default)
        if not (number or default in (REQUIRED, POSITIONS, None)):
            raise GraphError(f"input {name}: default is {default!r}; expected a number, 'positions' or None")
        return replace(self, inputs=(*self.inputs, InputDecl(name, declared, default)))

    def with_profile(self, profile: CompileProfile) -> ModelFlow:
        """Use `profile` unless `compile` gets another."""
        if not isinstance(profile, CompileProfile):
            raise ProfileError(
                f"{self.name}: profile is {shown(profile)}; expected a CompileProfile, such as "
                "CompileProfile.preset('auto')"
            )
        return replace(self, profile=profile)

    def profile_file(
        self, path: str | os.PathLike[str] | None, default: CompileProfile | Callable[[], CompileProfile] | None = None
    ) -> ModelFlow:
        """The profile in a `*.rlx.toml`. `default` (or what it returns; else `auto`) is used only for path None.

        Raises:
            MissingFileError: no such file. ProfileError: as `CompileProfile.from_toml`.
        """
        if path is not None:
            return self.with_profile(CompileProfile.from_toml(path))
        chosen = default() if callable(default) else default
        return self.with_profile(chosen or CompileProfile.auto())

    def profile_near(
        self, weights: str | os.PathLike[str], family: str, default: CompileProfile | str = "auto"
    ) -> ModelFlow:
        """`<family>.rlx.toml` beside the weights, else `default`: see `CompileProfile.near`."""
        return self.with_profile(CompileProfile.near(weights, family, default))

    def profile_prefill(self) -> ModelFlow:
        """The preset `llama32_prefill`."""
        return self.with_profile(CompileProfile.preset("llama32_prefill"))

    def profile_decode(self) -> ModelFlow:
        """The preset `llama32_decode`."""
        return self.with_profile(CompileProfile.preset("llama32_decode"))

    def profile_encoder(self) -> ModelFlow:
        """The preset `encoder`."""
        return self.with_profile(CompileProfile.preset("encoder"))

    def with_weights(self, weights: Weights, leave: Iterable[str] = ()) -> ModelFlow:
        """Bind the flow to its weights. `leave`: keys (or prefixes ending in `.`) that are left unread on purpose."""
        source = None if weights is None else open_weights(weights)
        return replace(self, weights=source, left_keys=(*self.left_keys, *leave))

    def bind(self, **sizes: int | None) -> ModelFlow:
        """Sizes of symbolic dimensions to compile for ahead of the first call; None leaves one open."""
        known = {s for i in self.inputs for s in i.type.symbols}
        given = {name: size for name, size in sizes.items() if size is not None}
        for name, size in given.items():
            if name not in known:
                raise GraphError(
                    f"{self.name}: bind: no input has a dimension {quote(name)}{did_you_mean(name, known)}"
                )
            as_dim(size, f"{self.name}: bind: {name}")
        return replace(self, binding={**self.binding, **given})

    def stage(self, *stages: BlockStage) -> ModelFlow:
        """Append stages."""
        return replace(self, stages=(*self.stages, *check_stages(stages, self.name)))

    raw_stage = stage

    def raw_stages(self, stages: Iterable[BlockStage]) -> ModelFlow:
        """Append several stages."""
        return self.stage(*check_stages(stages, self.name))

    def sequence(self, stages: Iterable[BlockStage]) -> ModelFlow:
        """Append stages as one Sequence."""
        return self.stage(blocks.Sequence(stages))

    def output(self, name: str) -> ModelFlow:
        """Name the primary output."""
        return replace(self, output_name=as_name(name, f"{self.name}: output"))

    def outputs(self, names: Iterable[str]) -> ModelFlow:
        """Name the primary output, and choose the side outputs: no others are computed. See `with_extra_outputs`."""
        found = _names(names, f"{self.name}: outputs")
        if not found:
            raise GraphError(f"{self.name}: outputs needs a name for the primary output")
        return self.output(found[0]).with_extra_outputs(found[1:])

    def with_extra_outputs(self, names: Iterable[str]) -> ModelFlow:
        """The side outputs, by name, in this order: what a stage gave to `emit.output`, a stream, or a register.

        Without this call the side outputs are all that stages give to `emit.output`.
        """
        return replace(self, side_names=_names(names, f"{self.name}: with_extra_outputs"))

    def hidden_states(self) -> ModelFlow:
        """Name the primary output `hidden`."""
        return self.output("hidden")

    # -- stages ------------------------------------------------------------------------------

    def embed(self, key: str) -> ModelFlow:
        """Token embedding under `key`."""
        return self.stage(blocks.Embed(key))

    def token_embed(self) -> ModelFlow:
        """Token embedding under `model.embed_tokens.weight`."""
        return self.stage(blocks.Embed())

    def gather_from_input(self, input_name: str, key: str) -> ModelFlow:
        """`E[input]` in place of the active value; the table is under `key` `[V, H]`."""
        return self.stage(blocks.GatherFromInput(input_name, key))

    def gather_add(self, input_name: str, key: str) -> ModelFlow:
        """`x + E[input]`; the table is under `key` `[V, H]`."""
        return self.stage(blocks.GatherAdd(input_name, key))

    def rope_tables(self, stage: blocks.RopeTables) -> ModelFlow:
        """cos and sin for the rotary stages that follow."""
        return self.stage(stage)

    def zero_beta(self, length: int) -> ModelFlow:
        """Zeros `[length]` as the beta of every RMSNorm; norms need none."""
        return self.stage(blocks.ZeroBeta(length))

    def zero_beta_named(self, name: str, length: int) -> ModelFlow:
        """As `zero_beta`, registered as `name`."""
        return self.stage(blocks.ZeroBeta(length, name))

    def attn_mask_ones(self, batch: int | str = "batch", seq: int | str = "seq") -> ModelFlow:
        """A keep mask `[batch, seq]` that keeps every key."""
        return self.stage(blocks.AttnMask.ones(batch, seq))

    def repeat_layers(self, count: int, layer: Callable[[int], BlockStage]) -> ModelFlow:
        """`count` layers, layer i made by `layer(i)`."""
        return self.stage(blocks.Repeat(count, layer))

    def named_layer(self, name: str, stage: BlockStage) -> ModelFlow:
        """A stage under a segment `name` of the block path."""
        return self.stage(blocks.Named(name, stage))

    def layer(self, name: str, build: Callable[[LayerStack], LayerStack]) -> ModelFlow:
        """A named LayerStack."""
        stack = build(LayerStack.named(name)) if callable(build) else build
        if not callable(build) or not isinstance(stack, LayerStack):
            raise GraphError(
                f"{self.name}: layer {quote(name)} takes a function LayerStack → LayerStack, got {shown(stack)}"
            )
        return self.stage(stack.build())

    def llama_prefill_layer(self, index: int, spec: blocks.LlamaDecoderSpec) -> ModelFlow:
        """Llama's layer `index`, as one block."""
        return self.stage(blocks.llama_prefill_layer_fused(index, spec))

    llama_decoder_layer = llama_prefill_layer

    def llama_prefill_layer_composed(self, index: int, spec: blocks.LlamaDecoderSpec) -> ModelFlow:
        """The same layer from small stages."""
        return self.stage(blocks.llama_prefill_layer_composed(index, spec))

    def bind_decode_inputs(self, num_layers: int, use_custom_mask: bool = False) -> ModelFlow:
        """Find the inputs `past_k_{i}`, `past_v_{i}` and `mask` for the decode layers that follow."""
        return self.stage(blocks.BindDecodeInputs(num_layers, use_custom_mask))

    def llama_decode_layer(self, index: int, spec: blocks.LlamaDecodeLayerSpec) -> ModelFlow:
        """Llama's layer `index` over cached and new tokens; side outputs `kv.{index}.k` and `kv.{index}.v`."""
        return self.stage(blocks.llama_decode_layer(index, spec))

    def qwen3_decode_layer_fused(self, index: int, spec: blocks.Qwen3DecodeLayerSpec) -> ModelFlow:
        """Qwen's layer `index` over cached and new tokens; side outputs as `llama_decode_layer`."""
        return self.stage(blocks.qwen3_decode_layer_fused(index, spec))

    def llama_kv_tap(self, index: int, head_dim: int, eps: float = 1e-5) -> ModelFlow:
        """The keys and values of Llama's layer `index` as side outputs `kv.{index}.k` and `kv.{index}.v`."""
        return self.stage(blocks.LlamaKvTap(f"model.layers.{index}", index, head_dim, eps))

    def linear(
        self, key: str, transpose: bool = True, bias: str | None = None, shape: tuple[int, int] | None = None
    ) -> ModelFlow:
        """`x W`: the weight under `key` is `[out, in]` with `transpose`, else `[in, out]`."""
        return self.stage(blocks.Linear(key, transpose, bias, shape))

    def residual_save(self) -> ModelFlow:
        """Remember the active value for `residual_add`."""
        return self.stage(blocks.ResidualSave())

    def residual_add(self) -> ModelFlow:
        """Add the value that `residual_save` remembered."""
        return self.stage(blocks.ResidualAdd())

    def swiglu(self, gate: str, up: str, down: str) -> ModelFlow:
        """`(silu(x Wg) ⊙ (x Wu)) Wd`; weights `[F, H]`, `[F, H]`, `[H, F]`."""
        return self.stage(blocks.SwiGlu(gate, up, down))

    def swiglu_hf_mlp(self, prefix: str) -> ModelFlow:
        """SwiGLU under `{prefix}.mlp.{gate,up,down}_proj.weight`; the prefix may end in `.mlp`."""
        return self.stage(blocks.SwiGlu.hf_mlp(prefix))

    def self_attn_prefill(self, spec: blocks.SelfAttnPrefillSpec) -> ModelFlow:
        """Rotary self-attention: normalised `[B, S, H]` → context `[B, S, N·D]`."""
        return self.stage(blocks.SelfAttnPrefill(spec))

    def layer_norm(self, gamma: str, beta: str, eps: float = 1e-5) -> ModelFlow:
        """LayerNorm; weights under `gamma` and `beta`, `[H]`."""
        return self.stage(blocks.LayerNorm(gamma, beta, eps))

    def rms_norm(self, key: str, eps: float = 1e-5) -> ModelFlow:
        """RMSNorm; its weight under `key`, `[H]`."""
        return self.stage(blocks.RmsNorm(key, eps))

    def final_norm(self, eps: float = 1e-5) -> ModelFlow:
        """RMSNorm under `model.norm.weight`."""
        return self.stage(blocks.RmsNorm("model.norm.weight", eps))

    def gelu_ffn(self, prefix: str) -> ModelFlow:
        """`gelu(x W₁ + b₁) W₂ + b₂` under BERT's keys."""
        return self.stage(blocks.GeluFfn.hf_bert(prefix))

    def bert_encoder_layer(self, spec: blocks.BertEncoderLayerSpec) -> ModelFlow:
        """BERT's post-norm layer: `[B, S, H]` → same."""
        return self.stage(blocks.BertEncoderLayer(spec))

    def repeat_bert_layers(
        self, count: int, prefix: str, style: str, hidden: int, heads: int, eps: float = 1e-12, activation: str = "gelu"
    ) -> ModelFlow:
        """BERT layers under `encoder.layer.{i}`, or `{prefix}.encoder.layer.{i}`."""
        check_style(style)

        def layer(i: int) -> BlockStage:
            p = bert_layer_prefix(prefix, i)
            return blocks.BertEncoderLayer(blocks.BertEncoderLayerSpec.hf(p, hidden, heads, eps, activation))

        return self.repeat_layers(count, layer)

    def cls_token_pool(self, batch: int | str = "batch", hidden: int | None = None) -> ModelFlow:
        """The first token: `[B, S, H]` → `[B, H]`."""
        return self.stage(blocks.ClsTokenPool(batch, hidden))

    def gather_last_token_dynamic(self, batch: int | str = "batch") -> ModelFlow:
        """Row `last_token_idx[b]` of each sequence: `[B, S, H]` → `[B, 1, H]`."""
        return self.stage(blocks.GatherLastToken.dynamic(batch))

    def gather_last_token_at(self, batch: int | str = "batch", seq: int | str = "seq") -> ModelFlow:
        """The last position: `[B, S, H]` → `[B, 1, H]`."""
        return self.stage(blocks.GatherLastToken.static_last(batch, seq))

    def lm_head(self, vocab_size: int, hidden_size: int, tied: bool = False) -> ModelFlow:
        """Logits, from the tied embedding or `lm_head.weight`; names the output `logits`."""
        head = blocks.LmHead.tied if tied else lambda v, h: blocks.LmHead.separate("lm_head.weight", v, h)
        return self.stage(head(vocab_size, hidden_size)).output("logits")

    def custom(self, fn: Callable[[Emit, Any], FlowValue | None], token_wise: bool = False) -> ModelFlow:
        """Any function `(emit, value) → value`."""
        return self.stage(blocks.Custom(fn, token_wise=token_wise))

    plugin = custom

    def custom_named(
        self, name: str, fn: Callable[[Emit, Any], FlowValue | None], token_wise: bool = False
    ) -> ModelFlow:
        """As `custom`, with a segment in the block path."""
        return self.stage(blocks.Custom(fn, name, token_wise))

    plugin_named = custom_named

    def store_stream(self, name: str) -> ModelFlow:
        """Keep the active value as stream `name`."""
        return self.stage(blocks.StoreStream(name))

    def load_stream(self, name: str) -> ModelFlow:
        """Make stream `name` the active value."""
        return self.stage(blocks.LoadStream(name))

    def bind_inputs_to_streams(self, pairs: Iterable[tuple[str, str]]) -> ModelFlow:
        """Keep declared inputs as streams: pairs (input, stream)."""
        return self.stage(blocks.bind_inputs_to_streams(pairs))

    def dual_stream(
        self, name: str, a: str, b: str, fn: Callable[[Emit, Any, Any], tuple[FlowValue, FlowValue]]
    ) -> ModelFlow:
        """`a, b = fn(emit, a, b)` on two streams."""
        return self.stage(blocks.DualStream(name, a, b, fn))

    def when(self, condition: bool, edit: Callable[[ModelFlow], ModelFlow]) -> ModelFlow:
        """`edit(flow)` if the condition holds."""
        return self.patch(edit) if condition else self

    def patch(self, edit: Callable[[ModelFlow], ModelFlow]) -> ModelFlow:
        """`edit(flow)`."""
        return _flow(edit(self), f"{self.name}: patch")

    @staticmethod
    def from_recipe(recipe: ModelRecipe | Callable[[], ModelFlow]) -> ModelFlow:
        """`recipe.assemble()`; a function without arguments that returns a flow is a recipe too."""
        return _flow(recipe() if callable(recipe) else recipe.assemble(), "from_recipe")

    # -- building ----------------------------------------------------------------------------

    def build(self, weights: Weights = None, given: Iterable[str] = ()) -> BuiltModel:
        """Run the stages: the HIR of the forward program. Shapes are read, data is not.

        `given` names the optional inputs that calls will supply.

        Raises:
            GraphError: a stage does not fit the value it gets; the message starts with its block path.
            MissingWeightError: a weight is not in the source.
        """
        if not self.inputs:
            raise GraphError(f"{self.name}: a flow needs at least one input: .input(name, shape)")
        source = self.weights if weights is None else open_weights(weights)
        types = TypeCache()
        builder = Builder(self.name, types)
        emit = Emit(builder, source)
        value: FlowValue | None = self._declare(emit, set(given))
        for stage in self.stages:
            value = stage.emit(emit, value)
        if value is None:
            raise GraphError(f"{self.name}: the last stage leaves no active value")
        side = self._side_outputs(emit)
        if self.output_name in side:
            raise NameCollisionError(f"{self.name}: the output and a side output are both {quote(self.output_name)}")
        outputs = {self.output_name: value.value} | {n: v.value for n, v in side.items()}
        rolled = roll(builder.finish(list(outputs.values()), list(outputs)), emit.state.repeats, types)
        verify(rolled.graph, "hir", "build", types)
        return BuiltModel(
            self.name, rolled.graph, source, self.profile, types, self, tuple(emit.keys_read), self.left_keys,
            rolled.refusals, self.binding,
        )  # fmt: skip

    def _side_outputs(self, emit: Emit) -> dict[str, FlowValue]:
        """Those that stages emitted, or those that the flow names."""
        state = emit.state
        if self.side_names is None:
            return state.outputs
        known = {**state.streams, **state.named, **state.outputs}
        for name in self.side_names:
            if name not in known:
                raise UnboundStreamError(
                    f"{self.name}: output {quote(name)} is no side output, register or stream; "
                    f"known are {listing(known) or 'none'}{did_you_mean(name, known)}"
                )
        return {name: known[name] for name in self.side_names}

    def _declare(self, emit: Emit, given: set[str]) -> FlowValue:
        """Declare the inputs, or put the defaults of absent ones in their place; returns the first."""
        unknown = given - {i.name for i in self.inputs}
        if unknown:
            raise GraphError(f"{self.name}: no inputs are called {sorted(unknown)}")
        for decl in self.inputs:
            if not decl.optional or decl.name in given:
                value = emit.wrap(emit.builder.input(decl.name, decl.type))
                if is_float(decl.type.dtype) and decl.type.dtype != F32:
                    value = emit.add(CastTo(F32), value)
                emit.state.inputs[decl.name] = value
            else:
                with emit.builder.at(Origin((decl.name,))):
                    emit.state.inputs[decl.name] = self._default(emit, decl)
        first = emit.state.inputs[self.inputs[0].name]
        return emit.require(first, "the first input")

    def _default(self, emit: Emit, decl: InputDecl) -> FlowValue | None:
        if decl.default is None:
            return None
        shape = decl.type.shape
        like = next((i for i in self.inputs if not i.optional and i.type.shape[: len(shape)] == shape), None)
        if like is None:
            raise ShapeError(f"{self.name}: the default of {quote(decl.name)} needs a required input of its shape")
        value = emit.flow_input(like.name)
        while value.ndim > len(shape):
            value = value[..., 0]
        if decl.default == POSITIONS:
            return emit.add(hir.Positions(), value)
        return emit.add(FullLike(float(decl.default), decl.type.dtype), value)

    def summary(self, weights: Weights = None) -> str:
        """A table of block path, shape and weights, one row for each part of the model."""
        return summary(self.build(weights).hir)


def _flow(made: object, where: str) -> ModelFlow:
    """What a function of the user returned, if it is a flow."""
    if not isinstance(made, ModelFlow):
        raise GraphError(f"{where}: the function returns a ModelFlow, got {type(made).__name__}")
    return made


def _names(names: str | Iterable[str], where: str) -> tuple[str, ...]:
    """Names of outputs; one may stand alone."""
    return as_names((names,) if isinstance(names, str) else names, where)
