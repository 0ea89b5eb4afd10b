"""The methods that append stages, shared by `ModelFlow` and `LayerStack`, and `LayerStack` itself.

Positional arguments follow the order of the stage's fields, with weight keys and names first; options are keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import rlx_jax.blocks as blocks
from rlx_jax.blocks.control import BlockStage, check_stages
from rlx_jax.blocks.encoder import bert_layer_prefix, normalize_style
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, quote, shown
from rlx_jax.ir.param import Roles
from rlx_jax.ir.types import Init
from rlx_jax.trace.emit import Emit
from rlx_jax.trace.flow_value import FlowValue

# A size that a stage checks: a number, the name of a symbolic size, or None to accept any size.
Size = int | str | None


class Stages:
    """Mixin with one method per stage; a subclass only implements `stage`, which appends stages."""

    def stage(self, *stages: BlockStage) -> Self:
        """Append stages."""
        raise NotImplementedError

    def _where(self) -> str:
        """Return the name for error messages."""
        return getattr(self, "name", None) or type(self).__name__

    def raw_stage(self, *stages: BlockStage) -> Self:
        """Append stages; an alias of `stage`."""
        return self.stage(*stages)

    def raw_stages(self, stages: Iterable[BlockStage]) -> Self:
        """Append several stages."""
        return self.stage(*check_stages(stages, self._where()))

    def sequence(self, stages: Iterable[BlockStage]) -> Self:
        """Append stages as one Sequence."""
        return self.stage(blocks.Sequence(stages))

    def embed(self, key: str, *, shape: tuple[int, int] | None = None, init: Init | None = None) -> Self:
        """Append a token embedding with table `key` `[V, H]`; `shape` and `init` are needed only without weights."""
        return self.stage(blocks.Embed(key, shape, init))

    def token_embed(self, *, shape: tuple[int, int] | None = None, init: Init | None = None) -> Self:
        """Append a token embedding with table `model.embed_tokens.weight`; `shape` and `init` are as in `embed`."""
        return self.stage(blocks.Embed(shape=shape, init=init))

    def gather_from_input(
        self, input_name: str, key: str, *, shape: tuple[int, int] | None = None, init: Init | None = None
    ) -> Self:
        """Replace the active value by `E[input]` with table `key` `[V, H]`; `shape` and `init` are as in `embed`."""
        return self.stage(blocks.GatherFromInput(input_name, key, shape, init))

    def gather_add(
        self, input_name: str, key: str, *, shape: tuple[int, int] | None = None, init: Init | None = None
    ) -> Self:
        """Append `x + E[input]` with table `key` `[V, H]`; `shape` and `init` are as in `embed`."""
        return self.stage(blocks.GatherAdd(input_name, key, shape, init))

    def rope_tables(self, stage: blocks.RopeTables) -> Self:
        """Append the cos and sin tables that later rotary stages read."""
        return self.stage(stage)

    def zero_beta(self, length: int) -> Self:
        """Append zeros `[length]` as the beta of every RMSNorm; norms work without one too."""
        return self.stage(blocks.ZeroBeta(length))

    def zero_beta_named(self, name: str, length: int) -> Self:
        """Append the zeros of `zero_beta`, registered as `name`."""
        return self.stage(blocks.ZeroBeta(length, name))

    def attn_mask_ones(self, batch: Size = None, seq: Size = None) -> Self:
        """Append an attention mask `[batch, seq]` that keeps every key."""
        return self.stage(blocks.AttnMask.ones(batch, seq))

    def repeat_layers(self, count: int, layer: Callable[[int], BlockStage]) -> Self:
        """Append `count` layers, where `layer(i)` returns layer i."""
        return self.stage(blocks.Repeat(count, layer))

    def named_layer(self, name: str, stage: BlockStage) -> Self:
        """Append a stage under a segment `name` of the block path."""
        return self.stage(blocks.Named(name, stage))

    def layer(self, name: str, build: Callable[[LayerStack], LayerStack]) -> Self:
        """Append a named LayerStack, which `build` fills."""
        stack = build(LayerStack.named(name)) if callable(build) else build
        if not callable(build) or not isinstance(stack, LayerStack):
            raise GraphError(
                f"{self._where()}: layer {quote(name)} takes a function LayerStack → LayerStack, got {shown(stack)}"
            )
        return self.stage(stack.build())

    def llama_prefill_layer(self, index: int, spec: blocks.LayerSpec) -> Self:
        """Append Llama's layer `index` as one block."""
        return self.stage(blocks.llama_prefill_layer_fused(index, spec))

    llama_decoder_layer = llama_prefill_layer

    def llama_prefill_layer_composed(self, index: int, spec: blocks.LayerSpec) -> Self:
        """Append Llama's layer `index`, composed of small stages."""
        return self.stage(blocks.llama_prefill_layer_composed(index, spec))

    def bind_decode_inputs(self, num_layers: int, use_custom_mask: bool = False) -> Self:
        """Find the inputs `past_k_{i}`, `past_v_{i}` and `mask` for the decode layers that follow."""
        return self.stage(blocks.BindDecodeInputs(num_layers, use_custom_mask))

    def llama_decode_layer(self, index: int, spec: blocks.LayerSpec, side: blocks.SideOutputs | None = None) -> Self:
        """Append Llama's layer `index` over cached and new tokens, with side outputs `kv.{index}.k` and `kv.{index}.v`;
        `side` collects their names."""
        return self.stage(blocks.llama_decode_layer(index, spec, side))

    def llama_kv_tap(
        self, index: int, head_dim: int, eps: float = 1e-5, side: blocks.SideOutputs | None = None, *,
        attention_bias: bool = False, rope_theta: float = 10000.0,
    ) -> Self:  # fmt: skip
        """Append side outputs `kv.{index}.k` and `kv.{index}.v`, the keys and values of Llama's layer `index`, which
        must be the next stage. `side` collects their names; the other arguments are as in that layer's
        `LlamaDecoderSpec`."""
        prefix = f"model.layers.{index}"
        return self.stage(blocks.LlamaKvTap(prefix, head_dim, eps, side, None, attention_bias, rope_theta))

    def linear(
        self, key: str, transpose: bool = True, *, bias: str | None = None, shape: tuple[int, int] | None = None,
        roles: Roles | None = None, init: Init | None = None,
    ) -> Self:  # fmt: skip
        """Append `x W [+ b]`; the weight under `key` is `[out, in]` with `transpose`, else `[in, out]`.

        Args:
            shape: shape of the weight in the checkpoint; needed only without weights.
            roles: roles of the weight's axes in the checkpoint (`rlx_jax.ir.roles.ROLES`), to shard it over a mesh.
            init: initializer for a missing weight, as in `emit.param`.
        """
        return self.stage(blocks.Linear(key, transpose, bias, shape, roles, init))

    def residual_save(self) -> Self:
        """Save the active value for `residual_add`."""
        return self.stage(blocks.ResidualSave())

    def residual_add(self) -> Self:
        """Add the value that `residual_save` saved."""
        return self.stage(blocks.ResidualAdd())

    def swiglu(self, gate: str, up: str, down: str, *, inner: int | None = None, init: Init | None = None) -> Self:
        """Append `(silu(x Wg) ⊙ (x Wu)) Wd` with weights `[F, H]`, `[F, H]` and `[H, F]`. F, `inner`, and `init` are
        needed only without weights."""
        return self.stage(blocks.SwiGlu(gate, up, down, inner=inner, init=init))

    def swiglu_hf_mlp(self, prefix: str) -> Self:
        """Append SwiGLU with weights `{prefix}.mlp.{gate,up,down}_proj.weight`; the prefix may end in `.mlp`."""
        return self.stage(blocks.SwiGlu.hf_mlp(prefix))

    def self_attn_prefill(self, spec: blocks.LayerSpec) -> Self:
        """Append rotary self-attention: normalized `[B, S, H]` → context `[B, S, N·D]`."""
        return self.stage(blocks.SelfAttnPrefill(spec))

    def layer_norm(
        self, gamma: str | None = None, beta: str | None = None, eps: float = 1e-5, *, init: Init | None = None
    ) -> Self:
        """Append LayerNorm with optional weights `gamma` and `beta` `[H]`; `init` is the initializer of a missing γ."""
        return self.stage(blocks.LayerNorm(gamma, beta, eps, init))

    def rms_norm(self, key: str, eps: float = 1e-5, *, init: Init | None = None) -> Self:
        """Append RMSNorm with weight `key` `[H]`; `init` is its initializer if it is missing."""
        return self.stage(blocks.RmsNorm(key, eps, init))

    def final_norm(self, eps: float = 1e-5) -> Self:
        """Append RMSNorm with weight `model.norm.weight`."""
        return self.stage(blocks.RmsNorm("model.norm.weight", eps))

    def gelu_ffn(self, prefix: str) -> Self:
        """Append `gelu(x W₁ + b₁) W₂ + b₂` with BERT's weight keys under `prefix`."""
        return self.stage(blocks.GeluFfn.hf_bert(prefix))

    def bert_encoder_layer(self, spec: blocks.BertEncoderLayerSpec) -> Self:
        """Append BERT's post-norm layer, `[B, S, H]` → `[B, S, H]`."""
        return self.stage(blocks.BertEncoderLayer(spec))

    def repeat_bert_layers(
        self, count: int, prefix: str, style: str, hidden: int, heads: int, eps: float = 1e-12, activation: str = "gelu"
    ) -> Self:
        """Append BERT layers with weights under `encoder.layer.{i}`, or `{prefix}.encoder.layer.{i}`.

        `style` is `bert` or `mpnet`; layers of `mpnet` read the bias of an earlier `RelativeBias` stage.
        """
        spec = partial(
            blocks.BertEncoderLayerSpec.hf, hidden_size=hidden, num_heads=heads, eps=eps, activation=activation,
            qkv_style=normalize_style(style),
        )  # fmt: skip
        return self.repeat_layers(count, lambda i: blocks.BertEncoderLayer(spec(bert_layer_prefix(prefix, i))))

    def repeat_nomic_layers(self, count: int, hidden: int, heads: int, head_dim: int, eps: float = 1e-12) -> Self:
        """Append NomicBERT layers with weights under `encoder.layers.{i}`."""
        spec = partial(blocks.NomicEncoderLayerSpec, hidden_size=hidden, num_heads=heads, head_dim=head_dim, eps=eps)
        return self.repeat_layers(count, lambda i: blocks.NomicEncoderLayer(spec(f"encoder.layers.{i}")))

    def repeat_dinov2_layers(self, count: int, hidden: int, heads: int, eps: float = 1e-6) -> Self:
        """Append DINOv2's layers with weights under `blocks.{i}`, as in its original checkpoints."""
        return self.repeat_layers(count, lambda i: blocks.dinov2_layer_fused(i, hidden, heads, eps))

    def repeat_vision_layers(self, count: int, hidden: int, heads: int, eps: float = 1e-6) -> Self:
        """Append Nomic's vision layers with weights under `layers.{i}`."""
        return self.repeat_layers(count, lambda i: blocks.nomic_vision_layer_fused(i, hidden, heads, eps))

    def repeat_siglip_layers(
        self, count: int, hidden: int, heads: int, eps: float = 1e-6, prefix: str = "vision_model"
    ) -> Self:
        """Append SigLIP's layers with weights under `{prefix}.encoder.layers.{i}`."""
        return self.repeat_layers(count, lambda i: blocks.siglip_layer_fused_with_prefix(prefix, i, hidden, heads, eps))

    def cls_token_pool(self, batch: Size = None, hidden: int | None = None) -> Self:
        """Select the first token: `[B, S, H]` → `[B, H]`."""
        return self.stage(blocks.ClsTokenPool(batch, hidden))

    def gather_last_token_dynamic(self, batch: Size = None) -> Self:
        """Select row `last_token_idx[b]` of each sequence: `[B, S, H]` → `[B, 1, H]`."""
        return self.stage(blocks.GatherLastToken.dynamic(batch))

    def gather_last_token_at(self, batch: Size = None, seq: Size = None) -> Self:
        """Select the last position: `[B, S, H]` → `[B, 1, H]`."""
        return self.stage(blocks.GatherLastToken.static_last(batch, seq))

    def lm_head(self, vocab_size: int | None = None, hidden_size: int | None = None, tied: bool = False) -> Self:
        """Append the head, which computes logits from the tied embedding or `lm_head.weight`. In a flow it also names
        the output `logits`. The sizes default to the shape of that weight, and are checked against it where given."""
        key = None if tied else "lm_head.weight"
        return self.stage(blocks.LmHead(vocab_size, hidden_size, key, tied))

    def gdn_scan(self, stage: blocks.GdnScan) -> Self:
        """Append the gated delta rule over the values that `emit.set_gdn` registered."""
        return self.stage(stage)

    def custom(self, fn: Callable[[Emit, Any], FlowValue | None], *, token_wise: bool = False) -> Self:
        """Append a custom function `(emit, value) → value`."""
        return self.stage(blocks.Custom(fn, token_wise=token_wise))

    plugin = custom

    def custom_named(self, name: str, fn: Callable[[Emit, Any], FlowValue | None], *, token_wise: bool = False) -> Self:
        """Append a custom function as `custom`, under a segment `name` of the block path."""
        return self.stage(blocks.Custom(fn, name, token_wise))

    plugin_named = custom_named

    def recurrent(self, step: Callable[..., Any], *keys: str, init: Any, unroll: int | None = None) -> Self:
        """Append the recurrence `state, y_t = step(state, x_t, *weights)` over the tokens, from `init`: `[B, S, …]` →
        `[B, S, …]`. `keys` name the weights, which the step gets as in the checkpoint. `emit.recurrent` documents the
        step, and takes more than one value."""
        return self.stage(blocks.Recurrent(step, keys, init=init, unroll=unroll))

    def store_stream(self, name: str) -> Self:
        """Save the active value as stream `name`."""
        return self.stage(blocks.StoreStream(name))

    def load_stream(self, name: str) -> Self:
        """Make stream `name` the active value."""
        return self.stage(blocks.LoadStream(name))

    def bind_inputs_to_streams(self, pairs: Iterable[tuple[str, str]]) -> Self:
        """Save declared inputs as streams, by pairs (input, stream)."""
        return self.stage(blocks.bind_inputs_to_streams(pairs))

    def dual_stream(
        self, name: str, a: str, b: str, fn: Callable[[Emit, Any, Any], tuple[FlowValue, FlowValue]]
    ) -> Self:
        """Append `a, b = fn(emit, a, b)` on two streams."""
        return self.stage(blocks.DualStream(name, a, b, fn))


@dataclass(frozen=True)
class LayerStack(Stages):
    """A sequence of small stages, built into one stage: `LayerStack.named("ffn").rms_norm(key).linear(key).build()`."""

    name: str | None = None
    items: tuple[BlockStage, ...] = ()

    @staticmethod
    def new() -> LayerStack:
        """Return an empty stack without a name."""
        return LayerStack()

    @staticmethod
    def named(name: str) -> LayerStack:
        """Return an empty stack with a segment `name` in its block path."""
        return LayerStack(name)

    def stage(self, *stages: BlockStage) -> LayerStack:
        """Append stages."""
        return replace(self, items=(*self.items, *check_stages(stages, self._where())))

    stages = Stages.raw_stages

    def build(self) -> BlockStage:
        """Return the stack as one stage: a Sequence, inside a Named if the stack has a name."""
        inner = blocks.Sequence(self.items)
        return blocks.Named(self.name, inner) if self.name else inner
