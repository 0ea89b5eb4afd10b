"""Gradients of every stage against finite differences: reverse and forward mode, each leaf and each float input."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import (
    GPT_OSS_KEYS,
    Activation,
    AttnMask,
    BertEncoderLayer,
    BertEncoderLayerSpec,
    BindDecodeInputs,
    BlockAsLayer,
    CausalWindow,
    ClampedGate,
    ClsTokenPool,
    Custom,
    DecodeRopeParams,
    DualStream,
    Embed,
    EmbedScale,
    GatedDeltaNet,
    GatedDeltaSpec,
    GatherAdd,
    GatherFromInput,
    GatherLastToken,
    GdnScan,
    GeluFfn,
    GemmaRmsNorm,
    GemmaStyle,
    LayerNorm,
    Linear,
    LlamaDecodeLayer,
    LlamaDecodeLayerSpec,
    LlamaDecoder,
    LlamaDecoderSpec,
    LlamaKvTap,
    LmHead,
    LoadStream,
    LogitSoftcap,
    Mamba2Mixer,
    Mamba2Spec,
    MaskKind,
    MoeFfn,
    MoeSpec,
    MtpMerge,
    Named,
    Qwen3DecodeLayer,
    Qwen3DecodeLayerSpec,
    Qwen3DecoderSpec,
    Recurrent,
    Repeat,
    ResidualAdd,
    ResidualSave,
    RmsNorm,
    RopeTables,
    SelfAttention,
    SelfAttnDecode,
    SelfAttnPrefill,
    SelfAttnPrefillSpec,
    Sequence,
    SideOutput,
    Similarity,
    StoreStream,
    SwiGlu,
    VitSelfAttn,
    ZeroBeta,
    bind_inputs_to_streams,
    gemma_attn_spec,
    gemma_decode_layer,
    gemma_prefill_layer_composed,
    gemma_prefill_layer_kv,
    llama_prefill_layer_composed,
    nomic_vision_layer_fused,
    qwen3_prefill_layer_composed,
    qwen3_prefill_layer_fused,
)
from rlx_jax.models import dinov2
from rlx_jax.models.nomic_vision import NomicVisionConfig

B, S, H, F, V, D = 2, 4, 8, 12, 9, 4
Arrays = Mapping[str, Any]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, S, H)).astype(np.float32)
IDS = RNG.integers(0, V, (B, S)).astype(np.int32)
KEEP = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], np.int32)  # the second row may read nothing
BIAS = RNG.standard_normal((B, 4, S, S)).astype(np.float32)
BIAS[0, 0, 1] = -np.inf


@dataclass(frozen=True)
class Case:
    """Stages over inputs, with the shapes of their weights. The first input is the active value.

    `units` are of inputs that the model multiplies by much: their leaf is the input divided by its unit, so that a
    step of finite differences is as small for them as for the others.
    """

    inputs: Arrays
    stages: tuple[Any, ...]
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(recipe: Any, units: Mapping[str, float] | None = None, /, **inputs: Any) -> Case:
        """The stages of a whole model, and the weights that they read."""
        flow, shapes = recipe.assemble(), recipe.shapes()
        return Case(inputs, flow._stages, {key: shapes[key].shape for key in flow.build().keys_read}, units or {})

    def flow(self) -> rlx.ModelFlow:
        flow = rlx.ModelFlow("case")
        for name, value in self.inputs.items():
            flow = flow.input(name, value.shape, dtype=value.dtype.name)
        return flow.stage(*self.stages)

    def params(self) -> dict[str, np.ndarray]:
        """Random weights that keep the size of what they multiply; vectors around 1, or around 0 for biases."""
        rng = np.random.default_rng(1)
        drawn = {key: rng.standard_normal(shape) for key, shape in self.weights.items()}
        for key, value in drawn.items():
            centre = 0.0 if np.ndim(value) > 1 or "bias" in key else 1.0
            drawn[key] = centre + value / math.sqrt((np.shape(value) or (1,))[-1])
        return {key: np.asarray(value, np.float32) for key, value in drawn.items()}


def with_biases(shapes: Mapping[str, tuple[int, ...]], names: str = "") -> dict[str, tuple[int, ...]]:
    """`{name}.weight` for every shape; `.bias` for those whose name has a part in `names`."""
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    biased = {f"{n}.bias": s[:1] for n, s in shapes.items() if n.split(".")[-1] in names.split()}
    return weights | biased


def llama_weights(layers: int, kv_heads: int, biased: str = "") -> dict[str, tuple[int, ...]]:
    """Those of Llama layers with 4 heads."""
    q, kv = (4 * D, H), (kv_heads * D, H)
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": (H, 4 * D)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{n}": s for n, s in parts.items()}
    layer |= {"mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
    layer["input_layernorm"] = layer["post_attention_layernorm"] = (H,)
    return with_biases({f"model.layers.{i}.{n}": s for i in range(layers) for n, s in layer.items()}, biased)


def bert_weights(prefix: str) -> dict[str, tuple[int, ...]]:
    """Those of a BERT layer."""
    shapes: dict[str, tuple[int, ...]] = {f"attention.self.{n}": (H, H) for n in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (H, H), "intermediate.dense": (F, H), "output.dense": (H, F)}
    shapes["attention.output.LayerNorm"] = shapes["output.LayerNorm"] = (H,)
    return with_biases({f"{prefix}.{n}": s for n, s in shapes.items()}, "query key value dense LayerNorm")


def llama(kind: MaskKind | str, kv_heads: int = 2, layers: int = 1, biases: bool = False, **inputs: Any) -> Case:
    """Llama layers over x; the input `mask` where the kind takes one."""
    spec = LlamaDecoderSpec(
        num_heads=4, head_dim=D, num_kv_heads=kv_heads, mask=kind, attention_bias=biases, mlp_bias=biases
    )
    name = "mask" if inputs else None
    biased = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj" if biases else ""
    repeat = Repeat(layers, lambda i: LlamaDecoder.layer(i, spec, name))
    return Case({"x": X, **inputs}, (RopeTables.theta(D), repeat), llama_weights(layers, kv_heads, biased))


def qwen3(layer: Any) -> Case:
    """One layer with a norm of each head, biases and a window."""
    spec = Qwen3DecoderSpec(
        num_heads=4, num_kv_heads=2, head_dim=D, attention_bias=True, output_bias=True, mask=MaskKind.sliding_window(2)
    )
    weights = llama_weights(1, 2, "q_proj k_proj v_proj o_proj")
    norms = {f"model.layers.0.self_attn.{n}_norm.weight": (D,) for n in "qk"}
    return Case({"x": X}, (RopeTables.theta(D), layer(0, spec)), weights | norms)


def gemma_weights(style: GemmaStyle) -> dict[str, tuple[int, ...]]:
    """Those of a Gemma layer with 4 heads on 2."""
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (style is not GemmaStyle.GEMMA)
    norms: dict[str, tuple[int, ...]] = dict.fromkeys(names, (H,))
    norms |= {f"self_attn.{n}_norm": (D,) for n in "qk"} if style is GemmaStyle.GEMMA3 else {}
    return llama_weights(1, 2) | {f"model.layers.0.{n}.weight": s for n, s in norms.items()}


def gemma_attention(mask: MaskKind | str) -> blocks.LayerSpec:
    """A softcap that bites."""
    return gemma_attn_spec(0, 4, D, 2, mask, 0.1, 3.0)


GEMMA3_STEP = blocks.gemma_layer_spec(GemmaStyle.GEMMA3, dataclasses.replace(gemma_attention("sliding:3"), eps=1e-3))


def gemma(style: GemmaStyle, mask: MaskKind, layer: Callable[..., Any] = gemma_prefill_layer_composed) -> Case:
    """A layer, without a cache."""
    stages = (RopeTables.theta(D), layer(0, style, gemma_attention(mask), 1e-3))
    return Case({"x": X}, stages, gemma_weights(style))


def attention(mask: MaskKind | str, mask_input: str | None = None) -> SelfAttnPrefill:
    """Grouped heads, softcap and a scale of its own, biases; weights as `ATTENTION`."""
    biases = ("q.bias", "k.bias", "v.bias")
    return SelfAttnPrefill(
        SelfAttnPrefillSpec(
            "q.weight", "k.weight", "v.weight", 4, D, 2, mask, 0.7, 5.0, biases=biases, mask_input=mask_input
        )
    )


def decode(*stages: Any, weights: Mapping[str, tuple[int, ...]], **inputs: Any) -> Case:
    """Stages behind three cached tokens of one layer with two key heads; keys and values are outputs too."""
    past = {f"past_{n}_0": np.random.default_rng(5).standard_normal((B, 3, 2 * D)).astype(np.float32) for n in "kv"}
    return Case({"x": X, **past, **inputs}, stages, weights)


def nomic_vision() -> Case:
    """A layer of Nomic's vision encoder."""
    halves: dict[str, tuple[int, ...]] = {"attn.Wqkv": (3 * H, H), "attn.out_proj": (H, H), "mlp.fc2": (H, F)}
    halves |= {"mlp.fc11": (F, H), "mlp.fc12": (F, H), "mlp.norm": (F,), "norm1": (H,), "norm2": (H,)}
    parts = "Wqkv out_proj fc11 fc12 fc2 norm norm1 norm2"
    weights = with_biases({f"layers.0.{n}": s for n, s in halves.items()}, parts)
    return Case({"x": X}, (nomic_vision_layer_fused(0, H, 2),), weights)


WORDS = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": F}
WORDS |= {"vocab_size": V, "max_position_embeddings": 8}
GPT2 = {"vocab_size": V, "n_embd": H, "n_inner": F, "n_layer": 2, "n_head": 2, "n_positions": 8}
TOWER = {"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 6, "patch_size": 3}
TOWER |= {"num_channels": 2}
NOMIC: dict[str, Any] = {
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 1,
    "n_inner": 1,
    "img_size": 6,
    "patch_size": 3,
    "num_channels": 2,
}
NOMIC |= {"layer_norm_epsilon": 1e-6, "use_rotary_pos_emb": True}
PIXELS = RNG.standard_normal((B, 2, 7, 9)).astype(np.float32)
"""Two rows of three patches, where the table of positions is of two by two."""
REGISTERS = {"model_type": "dinov2_with_registers", "num_register_tokens": 2, "use_swiglu_ffn": True}
TOWERS = {
    "vision_config": TOWER | {"intermediate_size": F},
    "text_config": WORDS | {"num_hidden_layers": 1, "eos_token_id": 7},
}
TEXTS = {"input_ids": np.array([[3, 7, 1, 7], [1, 2, 7, 5], [4, 4, 4, 0]], np.int32)}
TEXTS |= {"attention_mask": np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]], np.int32)}
TEXTS |= {"position_ids": np.array([[0, 1, 2, 3], [3, 2, 5, 0], [1, 1, 1, 1]], np.int32)}
"""Texts with an end, two ends and none."""
FLUX2 = {
    "in_channels": 5, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2,
    "joint_attention_dim": 3, "timestep_guidance_channels": 6, "mlp_ratio": 1.5, "axes_dims_rope": [2, 2],
}  # fmt: skip
PLACES = {"img_ids": np.array([[[0, 0], [1, 2], [3, 1]]], np.int32), "txt_ids": np.array([[[0, 1], [0, 2]]], np.int32)}
MOMENTS = {"timestep": np.array([0.0004, 0.0017], np.float32), "guidance": np.array([0.0012, 0.0007], np.float32)}
"""The model multiplies both by 1000."""

EXPERTS = MoeSpec(
    num_experts=3, top_k=3, inner=F, scores="sigmoid", scale=1.5, keys=GPT_OSS_KEYS, clamp=ClampedGate(50.0, 1.7, 0.5)
)
"""All are chosen: where the choice changes there is a step."""
ATTENTION = with_biases({"q": (4 * D, H), "k": (2 * D, H), "v": (2 * D, H)}, "q k v")
ROPE = {"rope_cos": np.cos(X[0, :, :2]), "rope_sin": np.sin(X[0, :, :2])}
MLP = with_biases({"l.mlp.gate_proj": (F, H), "l.mlp.up_proj": (F, H), "l.mlp.down_proj": (H, F)})
MIXED = (
    StoreStream("a"),
    Linear("w.weight", bias_key="w.bias"),
    StoreStream("b"),
    DualStream("mix", "a", "b", lambda emit, a, b: (a * emit.sigmoid(b), b + emit.jax(jnp.tanh, a))),
    Custom(lambda emit, x: emit.stream("b") - x, "difference"),
    Named("again", Sequence([LoadStream("a"), Linear("t.weight", transpose=False)])),
)


def step(h: Any, x: Any, w: Any) -> tuple[Any, Any]:
    """Elman's cell."""
    h = jnp.tanh(x + w @ h)
    return h, h


DELTA = GatedDeltaSpec(key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=2, eps=1e-2)
SSM = Mamba2Spec(heads=2, head_dim=3, state_size=4, kernel=2, bias=True, eps=1e-2)
GDN = np.random.default_rng(8).standard_normal((3, B, S, 2, 3)).astype(np.float32)


def registered(emit: Any, x: Any) -> Any:
    """What a GdnScan reads."""
    emit.set_gdn(*(emit.flow_input(name) for name in ("q", "k", "v", "g", "beta")))
    return x


CASES = {
    "tokens": Case(
        {"ids": IDS, "kinds": IDS % 3, "last_token_idx": np.array([2, 0], np.int32)},
        (Embed("e"), GatherAdd("kinds", "k"), GatherLastToken.dynamic(), LmHead.tied(V, H)),
        {"e": (V, H), "k": (3, H)},
    ),
    "another input's table": Case(
        {"x": X, "ids": IDS},
        (GatherFromInput("ids", "e"), LmHead.separate("head", V, H)),
        {"e": (V, H), "head": (V, H)},
    ),
    "tokens beside hidden states": Case(
        {"x": X, "hidden": 0.7 - X[:, ::-1]},
        (MtpMerge(RmsNorm("e"), GemmaRmsNorm("h"), "fc"),),
        {"e": (H,), "h": (H,), "fc": (H, 2 * H)},
    ),
    "a step along the tokens": Case(
        {"x": X},
        (
            CausalWindow(2),
            Custom(lambda emit, x: x.mean(2)),
            Recurrent(step, ("w",), init=np.full(H, 0.3, "f4")),
            Custom(lambda emit, x: emit.recurrent(step, x, "w", init=emit.param("start"))),
        ),
        {"w": (H, H), "start": (H,)},
    ),
    "states of fixed size": Case(
        {"x": X},
        (GatedDeltaNet("delta", DELTA), ResidualSave(), Mamba2Mixer("ssm", SSM), ResidualAdd()),
        {f"delta.{key}": shape for key, shape in DELTA.shapes(H).items()}
        | {f"ssm.{key}": shape for key, shape in SSM.shapes(H).items()},
    ),
    "a gated delta rule": Case(
        {"x": X, "q": GDN[0], "k": GDN[1], "v": GDN[2], "g": -np.abs(GDN[0, ..., 0]), "beta": GDN[1, ..., 0]},
        (Custom(registered), GdnScan(3)),
    ),
    "residuals and norms": Case(
        {"x": X},
        (
            ZeroBeta(H),
            ResidualSave(),
            RmsNorm("rms"),
            EmbedScale(H),
            Linear("w"),
            ResidualAdd(),
            LogitSoftcap(3.0),
            LayerNorm("ln", "ln.bias"),
        ),
        {"rms": (H,), "w": (H, H), "ln": (H,), "ln.bias": (H,)},
    ),
    "streams": Case({"x": X}, MIXED, with_biases({"w": (H, H), "t": (H, F)}, "w")),
    "gated ffn": Case({"x": X}, (SwiGlu.hf_mlp("l", bias=False),), MLP),
    "experts": Case({"x": X}, (MoeFfn("l", EXPERTS),), {f"l.{key}": shape for key, shape in EXPERTS.shapes(H).items()}),
    "gelu ffn": Case(
        {"x": X},
        (GeluFfn.hf_bert("l"), ClsTokenPool()),
        with_biases({"l.intermediate.dense": (F, H), "l.output.dense": (H, F)}, "dense"),
    ),
    "attention, causal": Case({"x": X}, (attention("causal"),), ATTENTION),
    "attention, rows that read nothing": Case(
        {"x": X, "keep": KEEP},
        (RopeTables.theta(D), AttnMask.from_input("keep"), attention(MaskKind.CUSTOM)),
        ATTENTION,
    ),
    "attention, ones mask": Case({"x": X}, (AttnMask.ones(), attention(MaskKind.CUSTOM)), ATTENTION),
    "llama": llama("causal", layers=2, biases=True),
    "llama, window mask": llama(MaskKind.sliding_window(2), kv_heads=1),
    "llama, keep mask": llama(MaskKind.CUSTOM, mask=KEEP),
    "llama, bias mask": llama(MaskKind.BIAS, mask=BIAS),
    "llama, no mask": llama(MaskKind.NONE, kv_heads=4),
    "llama, composed": Case(
        {"x": X},
        (
            llama_prefill_layer_composed(
                0, LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2, hidden_shape=(B, S, H))
            ),
        ),
        llama_weights(1, 2),
    ),
    "qwen3": qwen3(qwen3_prefill_layer_fused),
    "qwen3, composed": qwen3(qwen3_prefill_layer_composed),
    "gemma": gemma(GemmaStyle.GEMMA, MaskKind.CAUSAL),
    "gemma 3": gemma(GemmaStyle.GEMMA3, MaskKind.sliding_window(2)),
    "gemma, tap": gemma(GemmaStyle.GEMMA3, MaskKind.CAUSAL, gemma_prefill_layer_kv),
    "gemma, decode": decode(
        RopeTables.theta(D),
        BindDecodeInputs(1),
        gemma_decode_layer(0, GEMMA3_STEP),
        weights=gemma_weights(GemmaStyle.GEMMA3),
    ),
    "llama, tap": Case(
        {"x": X},
        (
            RopeTables.theta(D),
            LlamaKvTap.layer(0, LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2)),
            LlamaDecoder.layer(0, LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2)),
        ),
        llama_weights(1, 2),
    ),
    "llama, decode": decode(
        RopeTables.theta(D),
        BindDecodeInputs(1, use_custom_mask=True),
        LlamaDecodeLayer.layer(0, LlamaDecodeLayerSpec(num_heads=4, head_dim=D, num_kv_heads=2, use_custom_mask=True)),
        weights=llama_weights(1, 2),
        mask=np.concatenate([KEEP[:, :3], KEEP], axis=1),
    ),
    "qwen, decode": decode(
        DecodeRopeParams(np.cos(X[0, :, :2]), np.sin(X[0, :, :2]), 2),
        BindDecodeInputs(1),
        Qwen3DecodeLayer.layer(
            0, Qwen3DecodeLayerSpec(num_heads=4, num_kv_heads=2, head_dim=D, attention_bias=True, mask="sliding:3")
        ),
        weights=llama_weights(1, 2, "q_proj k_proj v_proj")
        | {f"model.layers.0.self_attn.{n}_norm.weight": (D,) for n in "qk"},
    ),
    "attention, decode": decode(
        BindDecodeInputs(1), SelfAttnDecode(attention("causal").spec, 0), weights=ATTENTION, **ROPE
    ),
    "bert": Case(
        {"x": X, "attention_mask": KEEP}, (BertEncoderLayer(BertEncoderLayerSpec.hf("l", H, 2)),), bert_weights("l")
    ),
    "vision attention alone": Case(
        {"x": X},
        (VitSelfAttn.dinov2("p", H, 2),),
        with_biases({"p.attn.qkv": (3 * H, H), "p.attn.proj": (H, H)}, "qkv proj"),
    ),
    "a block as a layer": Case(
        {"x": X},
        (BlockAsLayer(Linear("w")), SideOutput("side", Linear("t")), Activation("silu")),
        {"w": (F, H), "t": (D, F)},
    ),
    "self-attention": Case(
        {"x": X, "keep": KEEP},
        (
            SelfAttention(
                ("q.weight", "k.weight", "v.weight"),
                "o.weight",
                4,
                2,
                D,
                ("q.bias", "k.bias", "v.bias"),
                "o.bias",
                window=(2, 1),
                mask_input="keep",
                scale=0.7,
                softcap=5.0,
                rope_theta=30.0,
                n_rot=2,
                rope_style="interleaved",
                sinks="sinks",
            ),
        ),
        ATTENTION | with_biases({"o": (H, 4 * D)}, "o") | {"sinks": (4,)},
    ),
    "gpt-2": Case.of(rlx.Gpt2Flow.for_prefill(GPT2 | {"scale_attn_by_inverse_layer_idx": True}), input_ids=IDS),
    "nomic": Case.of(
        rlx.NomicFlow.for_prefill(WORDS),
        input_ids=IDS,
        attention_mask=KEEP,
        token_type_ids=IDS % 2,
        position_ids=IDS[::-1],
    ),
    "mpnet": Case.of(rlx.MPNetFlow.for_prefill(WORDS), input_ids=IDS, attention_mask=KEEP),
    "dinov2": Case.of(rlx.Dinov2Flow.for_prefill(TOWER | {"mlp_ratio": 2}), pixel_values=PIXELS),
    "dinov2, gated": Case.of(
        dataclasses.replace(rlx.Dinov2Flow.for_prefill(TOWER | REGISTERS), layout=dinov2.ORIGINAL),
        pixel_values=PIXELS,
    ),
    "nomic vision": nomic_vision(),
    "nomic vision, turned": Case.of(
        rlx.NomicVisionFlow.for_prefill(dataclasses.replace(NomicVisionConfig.from_hf(NOMIC), intermediate_size=F)),
        pixel_values=PIXELS[:, :, :6, :6],
    ),
    "clip": Case.of(rlx.ClipFlow.for_prefill(TOWERS | {"projection_dim": 6}), pixel_values=PIXELS, **TEXTS),
    "siglip": Case.of(rlx.SiglipFlow.for_prefill(TOWERS), pixel_values=PIXELS, **TEXTS),
    "similarity": Case(
        {"texts": X[0], "images": X[1, :3]},
        (bind_inputs_to_streams([("images", "images")]), Linear("w"), Similarity("scale", "bias")),
        {"w": (H, H), "scale": (), "bias": (1,)},
    ),
    "flux 2": Case.of(
        rlx.Flux2Flow.for_config(FLUX2),
        {"timestep": 0.001, "guidance": 0.001},
        hidden_states=RNG.standard_normal((B, 3, 5)).astype(np.float32),
        encoder_hidden_states=RNG.standard_normal((B, 2, 3)).astype(np.float32),
        **MOMENTS,
        **PLACES,
    ),
}
SLOW_CASES = (
    "llama",  # the default suite has it in QUICK_PLANS
    "attention, ones mask",
    "gemma, decode",
    "llama, window mask",
    "llama, keep mask",
    "llama, no mask",
    "llama, composed",
    "qwen3, composed",
    "gemma",
    "gemma 3",
    "llama, tap",
    "qwen, decode",
    "attention, decode",
    "gemma, tap",
    "self-attention",
    "gpt-2",
    "nomic",
    "mpnet",
    "dinov2",
    "dinov2, gated",
    "nomic vision",
    "nomic vision, turned",
    "clip",
    "siglip",
    "flux 2",
)
PLANS = [f"{roll} {remat}" for roll in ("scan", "unroll") for remat in ("none", "layer", "dots")]
QUICK_PLANS = ("scan layer", "unroll dots")


def model_of(case: Case, **tables: Any) -> Any:
    return rlx.compile(
        case.flow(), case.params(), profile=rlx.CompileProfile().replace(**tables) if tables else None, program="train"
    )


def differentiable(case: Case, model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """`f(leaves) → output` and its point: the parameters and the float inputs by name."""
    read = {d.name: case.inputs[d.name] for d in model.inputs if d.name in case.inputs}
    units = {n: np.float32(case.units.get(n, 1)) for n, v in read.items() if v.dtype == np.float32}
    floats = {f"input {n}": read[n] / unit for n, unit in units.items()}

    def f(leaves: Arrays) -> Any:
        params = {n: leaves[n] for n in model.params}
        moved = {n: leaves[f"input {n}"] * unit for n, unit in units.items()}
        outputs = model.apply(params, **{**read, **moved})
        return jnp.concatenate([v.ravel() for v in outputs.values()]) if isinstance(outputs, dict) else outputs

    return jax.jit(f), {n: np.asarray(v) for n, v in model.params.items()} | floats


def slope(f: Any, point: Arrays, name: str, along: np.ndarray, weights: np.ndarray) -> float:
    """d/dt of ⟨weights, f(point + t·along on one leaf)⟩ at 0, by central differences of fourth order."""

    def at(t: float) -> float:
        moved = {**point, name: point[name] + np.float32(t) * along}
        return float((np.asarray(f(moved), np.float64) * weights).sum())

    t = 0.005
    return (8 * (at(t) - at(-t)) - (at(2 * t) - at(-2 * t))) / (12 * t)


def check_gradients(case: Case, **tables: Any) -> None:
    """Vector-Jacobian and Jacobian-vector products on every leaf, against `slope` in a random direction."""
    f, point = differentiable(case, model_of(case, **tables))
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(jax.eval_shape(f, point).shape).astype(np.float32)
    along = {name: rng.standard_normal(v.shape).astype(np.float32) for name, v in point.items()}

    @jax.jit
    def both(point: Any, along: Any) -> Any:
        (gradient,) = jax.vjp(f, point)[1](weights)
        return gradient, (jax.jvp(f, (point,), (along,))[1] * weights).sum()

    gradient, forward = jax.tree.map(np.asarray, both(point, along))
    size = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    assert 0 < size < np.inf
    total = 0.0
    for name, g in gradient.items():
        assert g.shape == point[name].shape and g.dtype == point[name].dtype
        want = slope(f, point, name, along[name], weights)
        total += want
        assert abs(float((g * along[name]).sum()) - want) <= 1e-3 * np.linalg.norm(g) + 2e-5 * size, name
    assert abs(float(forward) - total) <= 1e-3 * size


def slow_unless(quick: bool, value: Any) -> Any:
    """A parameter that only the slow tier runs, unless `quick`."""
    return pytest.param(value, id=str(value), marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [slow_unless(name not in SLOW_CASES, name) for name in CASES])
def test_gradients(name: str) -> None:
    """The `train` program as it is by default."""
    check_gradients(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("plan", [slow_unless(plan in QUICK_PLANS, plan) for plan in PLANS])
def test_rolled_and_recomputed(plan: str) -> None:
    """Two layers in every way that the profile can run them."""
    roll, remat = plan.split()
    check_gradients(CASES["llama"], layers={"roll": roll, "remat": remat})


@pytest.mark.parametrize("name", [slow_unless("rows" in name, name) for name in CASES])
def test_the_other_policy(name: str) -> None:
    """`fusable` differentiates other ops than `direct`."""
    check_gradients(CASES[name], fusion={"policy": "fusable"})


@pytest.mark.parametrize("name", [slow_unless(name == "tokens", name) for name in ("tokens", "llama", "bert")])
def test_bf16(name: str) -> None:
    """With bf16 compute the gradient is finite, has the leaf's dtype, and points where the f32 one does."""
    gradients = []
    for compute in ("f32", "bf16"):
        f, point = differentiable(CASES[name], model_of(CASES[name], precision={"compute": compute}))
        gradient = jax.jit(jax.grad(lambda p, f=f: jnp.square(f(p).astype(jnp.float32)).mean()))(point)
        assert {n: g.dtype for n, g in gradient.items()} == {n: v.dtype for n, v in point.items()}
        gradients.append(np.concatenate([np.ravel(g).astype(np.float32) for g in gradient.values()]))
    exact, rounded = gradients
    assert np.isfinite(rounded).all()
    assert exact @ rounded >= 0.99 * np.linalg.norm(exact) * np.linalg.norm(rounded)


# -- no stage is forgotten ---------------------------------------------------------------------


def stages_in(stage: Any) -> Iterator[type]:
    """The stage's class and those of the stages inside it."""
    yield type(stage)
    inner = {Named: lambda s: [s.inner], Sequence: lambda s: s.stages, Repeat: lambda s: [s.stage_for_index(0)]}
    inner |= {SideOutput: lambda s: [s.inner], BlockAsLayer: lambda s: [s.block]}
    for part in inner.get(type(stage), lambda s: [])(stage):
        yield from stages_in(part)


def all_stages() -> set[type]:
    """Every dataclass with `emit` in the modules of `rlx_jax.blocks`, but for those that stages are made from."""
    found = set()
    for info in pkgutil.iter_modules(blocks.__path__):
        module = importlib.import_module(f"rlx_jax.blocks.{info.name}")
        found |= {c for c in vars(module).values() if isinstance(c, type) and dataclasses.is_dataclass(c)}
    return {c for c in found if hasattr(c, "emit") and not c.__subclasses__()}


def test_every_stage_has_a_case() -> None:
    """A new stage fails here until a case has it."""
    covered = {c for case in CASES.values() for stage in case.stages for c in stages_in(stage)}
    assert {c.__name__ for c in all_stages() - covered} == set()
    assert Embed in all_stages() and LlamaDecoder in all_stages(), "the search finds stages"


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison fails for a function whose derivative is not its own."""

    @jax.custom_jvp
    def wrong(x: Any) -> Any:
        return x**3

    @wrong.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return wrong(primals[0]), 2.9 * primals[0] ** 2 * tangents[0]

    with pytest.raises(AssertionError):
        check_gradients(Case({"x": X}, (Custom(lambda emit, x: emit.jax(wrong, x)),)))
