"""The methods that append stages, written once for `ModelFlow` and `LayerStack`; and `LayerStack` itself.

What a stage is named by stands first, in the order of the stage's own fields; options are keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from rlx_jax import blocks
from rlx_jax.blocks.control import BlockStage, check_stages
from rlx_jax.blocks.encoder import bert_layer_prefix, known_style
from rlx_jax.errors import GraphError, quote, shown
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.param import Roles
from rlx_jax.trace.emit import Emit
from rlx_jax.trace.flow_value import FlowValue

# A size that a stage checks: a number, the name of a symbolic size, or None for whatever the value has.
Size = int | str | None


class Stages:
    """Every stage as a method. Whoever appends stages with `stage` gets them all."""

    def stage(self, *stages: BlockStage) -> Self:
        """Append stages."""
        raise NotImplementedError

    def _where(self) -> str:
        """What errors call it."""
        return getattr(self, "name", None) or type(self).__name__

    def raw_stage(self, *stages: BlockStage) -> Self:
        """`stage`."""
        return self.stage(*stages)

    def raw_stages(self, stages: Iterable[BlockStage]) -> Self:
        """Append several stages."""
        return self.stage(*check_stages(stages, self._where()))

    def sequence(self, stages: Iterable[BlockStage]) -> Self:
        """Append stages as one Sequence."""
        return self.stage(blocks.Sequence(stages))

    def embed(self, key: str, *, shape: tuple[int, int] | None = None, init: Init | None = None) -> Self:
        """Token embedding under `key` `[V, H]`; `shape` is needed only without weights, `init` draws it then."""
        return self.stage(blocks.Embed(key, shape, init))

    def token_embed(self, *, shape: tuple[int, int] | None = None, init: Init | None = None) -> Self:
        """Token embedding under `model.embed_tokens.weight`; `shape` and `init` as in `embed`."""
        return self.stage(blocks.Embed(shape=shape, init=init))

    def gather_from_input(
        self, input_name: str, key: str, *, shape: tuple[int, int] | None = None, init: Init | None = None
    ) -> Self:
        """`E[input]` in place of the active value; the table is under `key` `[V, H]`; `shape`, `init` as in `embed`."""
        return self.stage(blocks.GatherFromInput(input_name, key, shape, init))

    def gather_add(
        self, input_name: str, key: str, *, shape: tuple[int, int] | None = None, init: Init | None = None
    ) -> Self:
        """`x + E[input]`; the table is under `key` `[V, H]`; `shape` and `init` as in `embed`."""
        return self.stage(blocks.GatherAdd(input_name, key, shape, init))

    def rope_tables(self, stage: blocks.RopeTables) -> Self:
        """cos and sin for the rotary stages that follow."""
        return self.stage(stage)

    def zero_beta(self, length: int) -> Self:
        """Zeros `[length]` as the beta of every RMSNorm; norms need none."""
        return self.stage(blocks.ZeroBeta(length))

    def zero_beta_named(self, name: str, length: int) -> Self:
        """As `zero_beta`, registered as `name`."""
        return self.stage(blocks.ZeroBeta(length, name))

    def attn_mask_ones(self, batch: Size = None, seq: Size = None) -> Self:
        """A keep mask `[batch, seq]` that keeps every key."""
        return self.stage(blocks.AttnMask.ones(batch, seq))

    def repeat_layers(self, count: int, layer: Callable[[int], BlockStage]) -> Self:
        """`count` layers, layer i made by `layer(i)`."""
        return self.stage(blocks.Repeat(count, layer))

    def named_layer(self, name: str, stage: BlockStage) -> Self:
        """A stage under a segment `name` of the block path."""
        return self.stage(blocks.Named(name, stage))

    def layer(self, name: str, build: Callable[[LayerStack], LayerStack]) -> Self:
        """A named LayerStack."""
        stack = build(LayerStack.named(name)) if callable(build) else build
        if not callable(build) or not isinstance(stack, LayerStack):
            raise GraphError(
                f"{self._where()}: layer {quote(name)} takes a function LayerStack → LayerStack, got {shown(stack)}"
            )
        return self.stage(stack.build())

    def llama_prefill_layer(self, index: int, spec: blocks.LayerSpec) -> Self:
        """Llama's layer `index`, as one block."""
        return self.stage(blocks.llama_prefill_layer_fused(index, spec))

    llama_decoder_layer = llama_prefill_layer

    def llama_prefill_layer_composed(self, index: int, spec: blocks.LayerSpec) -> Self:
        """The same layer from small stages."""
        return self.stage(blocks.llama_prefill_layer_composed(index, spec))

    def bind_decode_inputs(self, num_layers: int, use_custom_mask: bool = False) -> Self:
        """Find the inputs `past_k_{i}`, `past_v_{i}` and `mask` for the decode layers that follow."""
        return self.stage(blocks.BindDecodeInputs(num_layers, use_custom_mask))

    def llama_decode_layer(self, index: int, spec: blocks.LayerSpec, side: blocks.SideOutputs | None = None) -> Self:
        """Llama's layer `index` over cached and new tokens; side outputs `kv.{index}.k` and `kv.{index}.v`, which
        `side` collects."""
        return self.stage(blocks.llama_decode_layer(index, spec, side))

    def llama_kv_tap(
        self,
        index: int,
        head_dim: int,
        eps: float = 1e-5,
        side: blocks.SideOutputs | None = None,
        *,
        attention_bias: bool = False,
        rope_theta: float = 10000.0,
    ) -> Self:
        """The keys and values of Llama's layer `index`, which follows, as side outputs `kv.{index}.k` and
        `kv.{index}.v`, which `side` collects. The rest is as in the `LlamaDecoderSpec` of that layer."""
        prefix = f"model.layers.{index}"
        return self.stage(blocks.LlamaKvTap(prefix, head_dim, eps, side, None, attention_bias, rope_theta))

    def linear(
        self,
        key: str,
        transpose: bool = True,
        *,
        bias: str | None = None,
        shape: tuple[int, int] | None = None,
        roles: Roles | None = None,
        init: Init | None = None,
    ) -> Self:
        """`x W [+ b]`: the weight under `key` is `[out, in]` with `transpose`, else `[in, out]`.

        `shape` is that of the weight as stored; needed only without weights. `roles` are what its axes are
        (`rlx_jax.ir.roles.ROLES`), as stored, for a mesh of devices. `init`: how it is drawn where there is none, as
        `emit.param` takes it.
        """
        return self.stage(blocks.Linear(key, transpose, bias, shape, roles, init))

    def residual_save(self) -> Self:
        """Remember the active value for `residual_add`."""
        return self.stage(blocks.ResidualSave())

    def residual_add(self) -> Self:
        """Add the value that `residual_save` remembered."""
        return self.stage(blocks.ResidualAdd())

    def swiglu(self, gate: str, up: str, down: str, *, inner: int | None = None, init: Init | None = None) -> Self:
        """`(silu(x Wg) ⊙ (x Wu)) Wd`; weights `[F, H]`, `[F, H]`, `[H, F]`; F, `inner`, is needed only without weights,
        `init` draws them then."""
        return self.stage(blocks.SwiGlu(gate, up, down, inner=inner, init=init))

    def swiglu_hf_mlp(self, prefix: str) -> Self:
        """SwiGLU under `{prefix}.mlp.{gate,up,down}_proj.weight`; the prefix may end in `.mlp`."""
        return self.stage(blocks.SwiGlu.hf_mlp(prefix))

    def self_attn_prefill(self, spec: blocks.LayerSpec) -> Self:
        """Rotary self-attention: normalised `[B, S, H]` → context `[B, S, N·D]`."""
        return self.stage(blocks.SelfAttnPrefill(spec))

    def layer_norm(
        self, gamma: str | None = None, beta: str | None = None, eps: float = 1e-5, *, init: Init | None = None
    ) -> Self:
        """LayerNorm; weights under `gamma` and `beta`, `[H]`, either of which may be missing. `init` draws γ where no
        source has it."""
        return self.stage(blocks.LayerNorm(gamma, beta, eps, init))

    def rms_norm(self, key: str, eps: float = 1e-5, *, init: Init | None = None) -> Self:
        """RMSNorm; its weight under `key`, `[H]`; `init` draws it where no source has it."""
        return self.stage(blocks.RmsNorm(key, eps, init))

    def final_norm(self, eps: float = 1e-5) -> Self:
        """RMSNorm under `model.norm.weight`."""
        return self.stage(blocks.RmsNorm("model.norm.weight", eps))

    def gelu_ffn(self, prefix: str) -> Self:
        """`gelu(x W₁ + b₁) W₂ + b₂` under BERT's keys."""
        return self.stage(blocks.GeluFfn.hf_bert(prefix))

    def bert_encoder_layer(self, spec: blocks.BertEncoderLayerSpec) -> Self:
        """BERT's post-norm layer: `[B, S, H]` → same."""
        return self.stage(blocks.BertEncoderLayer(spec))

    def repeat_bert_layers(
        self, count: int, prefix: str, style: str, hidden: int, heads: int, eps: float = 1e-12, activation: str = "gelu"
    ) -> Self:
        """BERT layers under `encoder.layer.{i}`, or `{prefix}.encoder.layer.{i}`.

        `style` is `bert`, or `mpnet`, whose layers read the bias of a `RelativeBias` stage before them.
        """
        spec = partial(
            blocks.BertEncoderLayerSpec.hf, hidden_size=hidden, num_heads=heads, eps=eps, activation=activation,
            qkv_style=known_style(style),
        )  # fmt: skip
        return self.repeat_layers(count, lambda i: blocks.BertEncoderLayer(spec(bert_layer_prefix(prefix, i))))

    def repeat_nomic_layers(self, count: int, hidden: int, heads: int, head_dim: int, eps: float = 1e-12) -> Self:
        """NomicBERT layers under `encoder.layers.{i}`."""
        spec = partial(blocks.NomicEncoderLayerSpec, hidden_size=hidden, num_heads=heads, head_dim=head_dim, eps=eps)
        return self.repeat_layers(count, lambda i: blocks.NomicEncoderLayer(spec(f"encoder.layers.{i}")))

    def repeat_dinov2_layers(self, count: int, hidden: int, heads: int, eps: float = 1e-6) -> Self:
        """DINOv2's layers under `blocks.{i}`, as its authors store them."""
        return self.repeat_layers(count, lambda i: blocks.dinov2_layer_fused(i, hidden, heads, eps))

    def repeat_vision_layers(self, count: int, hidden: int, heads: int, eps: float = 1e-6) -> Self:
        """Nomic's vision layers under `layers.{i}`."""
        return self.repeat_layers(count, lambda i: blocks.nomic_vision_layer_fused(i, hidden, heads, eps))

    def repeat_siglip_layers(
        self, count: int, hidden: int, heads: int, eps: float = 1e-6, prefix: str = "vision_model"
    ) -> Self:
        """SigLIP's layers under `{prefix}.encoder.layers.{i}`."""
        return self.repeat_layers(count, lambda i: blocks.siglip_layer_fused_with_prefix(prefix, i, hidden, heads, eps))

    def cls_token_pool(self, batch: Size = None, hidden: int | None = None) -> Self:
        """The first token: `[B, S, H]` → `[B, H]`."""
        return self.stage(blocks.ClsTokenPool(batch, hidden))

    def gather_last_token_dynamic(self, batch: Size = None) -> Self:
        """Row `last_token_idx[b]` of each sequence: `[B, S, H]` → `[B, 1, H]`."""
        return self.stage(blocks.GatherLastToken.dynamic(batch))

    def gather_last_token_at(self, batch: Size = None, seq: Size = None) -> Self:
        """The last position: `[B, S, H]` → `[B, 1, H]`."""
        return self.stage(blocks.GatherLastToken.static_last(batch, seq))

    def lm_head(self, vocab_size: int | None = None, hidden_size: int | None = None, tied: bool = False) -> Self:
        """Logits, from the tied embedding or `lm_head.weight`. In a flow it names the output `logits`. The sizes follow
        from the embedding or the weight, and are held against it where they are given."""
        key = None if tied else "lm_head.weight"
        return self.stage(blocks.LmHead(vocab_size, hidden_size, key, tied))

    def gdn_scan(self, stage: blocks.GdnScan) -> Self:
        """The gated delta rule over what `emit.set_gdn` registered."""
        return self.stage(stage)

    def custom(self, fn: Callable[[Emit, Any], FlowValue | None], *, token_wise: bool = False) -> Self:
        """Any function `(emit, value) → value`."""
        return self.stage(blocks.Custom(fn, token_wise=token_wise))

    plugin = custom

    def custom_named(self, name: str, fn: Callable[[Emit, Any], FlowValue | None], *, token_wise: bool = False) -> Self:
        """As `custom`, with a segment in the block path."""
        return self.stage(blocks.Custom(fn, name, token_wise))

    plugin_named = custom_named

    def recurrent(self, step: Callable[..., Any], *keys: str, init: Any, unroll: int | None = None) -> Self:
        """`state, y_t = step(state, x_t, *weights)` along the tokens, from `init`: `[B, S, …]` → `[B, S, …]`. `keys`
        name the weights, each given as stored. `emit.recurrent` says what a step is, and takes more than one value."""
        return self.stage(blocks.Recurrent(step, keys, init=init, unroll=unroll))

    def store_stream(self, name: str) -> Self:
        """Keep the active value as stream `name`."""
        return self.stage(blocks.StoreStream(name))

    def load_stream(self, name: str) -> Self:
        """Make stream `name` the active value."""
        return self.stage(blocks.LoadStream(name))

    def bind_inputs_to_streams(self, pairs: Iterable[tuple[str, str]]) -> Self:
        """Keep declared inputs as streams: pairs (input, stream)."""
        return self.stage(blocks.bind_inputs_to_streams(pairs))

    def dual_stream(
        self, name: str, a: str, b: str, fn: Callable[[Emit, Any, Any], tuple[FlowValue, FlowValue]]
    ) -> Self:
        """`a, b = fn(emit, a, b)` on two streams."""
        return self.stage(blocks.DualStream(name, a, b, fn))


@dataclass(frozen=True)
class LayerStack(Stages):
    """Small stages in a row, built into one stage: `LayerStack.named("ffn").rms_norm(key).linear(key).build()`."""

    name: str | None = None
    items: tuple[BlockStage, ...] = ()

    @staticmethod
    def new() -> LayerStack:
        """A stack without a name."""
        return LayerStack()

    @staticmethod
    def named(name: str) -> LayerStack:
        """A stack whose block path has a segment `name`."""
        return LayerStack(name)

    def stage(self, *stages: BlockStage) -> LayerStack:
        """Append stages."""
        return replace(self, items=(*self.items, *check_stages(stages, self._where())))

    stages = Stages.raw_stages

    def build(self) -> BlockStage:
        """Named{Sequence} if named, else Sequence."""
        inner = blocks.Sequence(self.items)
        return blocks.Named(self.name, inner) if self.name else inner
