"""Every core name of the stage specification (sections 1 to 8, 10 and 11), called in the form that it gives.

Forms of one row write the same HIR. `docs/stages.md` names the test that compares the numbers of each stage with its
formula; decode forms are compared here with the programs that are derived from the forward flow. Deliberate differences
are listed in `docs/spec-differences.md`.
"""

from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import GemmaStyle, MaskKind, SideOutputs
from tests.test_examples import example

next_inputs = example("explicit_cache").next_inputs
H, F, V, N, K, D, P = 8, 6, 11, 2, 1, 4, 3
EPS = 1e-5
COS, SIN = (fn(np.outer(np.arange(9), 10000.0 ** (-np.arange(D // 2) * 2 / D))).astype("f4") for fn in (np.cos, np.sin))
TABLES = blocks.RopeTables.param(9, D // 2, COS, SIN)
SCAN: Any = {"q": (N, D), "k": (N, D), "v": (N, D), "g": (N,), "beta": (N,)}


def biased(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    """A weight and its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def weight_specs() -> dict[str, jax.ShapeDtypeStruct]:
    """Every weight that a form reads, by its checkpoint key."""
    norms = {f"{n}_layernorm.weight": (H,) for n in ("input", "post_attention", "pre_feedforward", "post_feedforward")}
    decoder = {
        **norms, **biased("self_attn.q_proj", N * D, H), **biased("self_attn.k_proj", K * D, H),
        **biased("self_attn.v_proj", K * D, H), "self_attn.o_proj.weight": (H, N * D),
        "self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,),
        "mlp.gate_proj.weight": (F, H), "mlp.up_proj.weight": (F, H), "mlp.down_proj.weight": (H, F),
    }  # fmt: skip
    bert: dict[str, tuple[int, ...]] = {}
    for name in ("self.query", "self.key", "self.value", "output.dense"):
        bert |= biased(f"attention.{name}", H, H)
    bert |= biased("attention.output.LayerNorm", H) | biased("output.LayerNorm", H)
    bert |= biased("intermediate.dense", F, H) | biased("output.dense", H, F)
    halves = {**biased("norm1", H), **biased("norm2", H), **biased("mlp.fc2", H, F)}
    fused = {**halves, **biased("attn.Wqkv", 3 * H, H), **biased("attn.out_proj", H, H)}
    nomic = {**fused, **biased("mlp.fc11", F, H), **biased("mlp.fc12", F, H), **biased("mlp.norm", F)}
    dino = {**halves, **biased("attn.qkv", 3 * H, H), **biased("attn.proj", H, H), **biased("mlp.fc1", F, H)}
    dino |= {"ls1.gamma": (H,), "ls2.gamma": (H,)}
    siglip = {**biased("layer_norm1", H), **biased("layer_norm2", H), **biased("mlp.fc1", F, H)}
    siglip |= biased("mlp.fc2", H, F)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        siglip |= biased(f"self_attn.{name}", H, H)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H), "model.norm.weight": (H,), "w": (F, H), "n": (H,)
    }  # fmt: skip
    layers = {
        "model.layers.0": decoder, "model.layers.1": decoder, "encoder.layer.0": bert, "encoder.layers.0": nomic,
        "layers.0": nomic, "blocks.0": dino, "vision_model.encoder.layers.0": siglip,
    }  # fmt: skip
    shapes |= {f"{prefix}.{key}": shape for prefix, keys in layers.items() for key, shape in keys.items()}
    return {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}


SPECS = weight_specs()
X = rlx.ModelFlow.new("f").input("x", ("batch", "seq", H))
IDS = rlx.ModelFlow.new("f").input("input_ids", ("batch", "seq"), "int32")
MASKED = X.input("attention_mask", ("batch", "seq"), "int32")
ROPED = X.rope_tables(TABLES)
GDN = rlx.ModelFlow.new("f")
for _name, _shape in SCAN.items():
    GDN = GDN.input(_name, ("batch", "seq", *_shape))
GDN = GDN.plugin(lambda e, x: (x, e.set_gdn(*map(e.flow_input, SCAN)))[0])  # type: ignore[func-returns-value]


def behind(flow: rlx.ModelFlow, layers: int = 1) -> rlx.ModelFlow:
    """The inputs that the spec's decode flows declare."""
    for i in range(layers):
        for kind in "kv":
            flow = flow.input(f"past_{kind}_{i}", ("batch", "past", K * D))
    return flow


HEADS: Any = {"num_heads": N, "head_dim": D, "num_kv_heads": K, "eps": EPS, "hidden_shape": ("batch", "seq", H)}
GROUPED: Any = {**HEADS, "kv_group_size": N // K, "use_custom_mask": False}
LLAMA = blocks.LlamaDecoderSpec(**HEADS, mask=MaskKind.CAUSAL)
LLAMA_STEP = blocks.LlamaDecodeLayerSpec(**GROUPED)
QWEN = blocks.Qwen3DecoderSpec(**HEADS, batch="batch", seq="seq", qk_norm=True, attention_bias=True)
QWEN_STEP = blocks.Qwen3DecodeLayerSpec(**GROUPED, batch="batch", qk_norm=True, attention_bias=True)
GEMMA = blocks.gemma_attn_spec(0, N, D, K, MaskKind.CAUSAL, 0.5, 50.0)
GEMMA_STEP = blocks.GemmaDecodeLayerSpec(
    style=GemmaStyle.GEMMA2, **GROUPED, mask=MaskKind.CAUSAL, score_scale=0.5, attn_logit_softcap=50.0
)
ATTENTION = blocks.SelfAttnPrefillSpec(
    q_key="model.layers.0.self_attn.q_proj.weight", k_key="model.layers.0.self_attn.k_proj.weight",
    v_key="model.layers.0.self_attn.v_proj.weight", num_heads=N, head_dim=D, num_kv_heads=K, mask=MaskKind.CAUSAL,
    score_scale=None, attn_logit_softcap=None,
)  # fmt: skip
BERT = blocks.BertEncoderLayerSpec(
    layer_prefix="encoder.layer.0", qkv_style="Bert", hidden_size=H, num_heads=N, head_dim=D, eps=EPS,
    attention_mask_input="attention_mask",
)  # fmt: skip
NOMIC = blocks.NomicEncoderLayerSpec(
    layer_prefix="encoder.layers.0", hidden_size=H, num_heads=N, head_dim=D, eps=EPS,
    attention_mask_input="attention_mask",
)  # fmt: skip
VIT = blocks.VitSelfAttnSpec(
    qkv_weight="blocks.0.attn.qkv.weight", qkv_bias="blocks.0.attn.qkv.bias", out_weight="blocks.0.attn.proj.weight",
    out_bias="blocks.0.attn.proj.bias", hidden_size=H, num_heads=N, head_dim=D,
)  # fmt: skip
L0 = "model.layers.0"
MLP: Any = [f"{L0}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
PLUS_ONE: Any = lambda emit, x: x + 1.0  # noqa: E731
BOTH: Any = lambda emit, a, b: (b, a)  # noqa: E731
TWO = X.store_stream("img").store_stream("txt")
STEP = behind(X).rope_tables(TABLES).bind_decode_inputs(1, False)
ALL = ["batch", "seq"]
ANY: Any = object()


def swapped(flow: rlx.ModelFlow) -> rlx.ModelFlow:
    """A flow with a DualStream, whose result is one of the streams."""
    return flow.load_stream("img")


def gemma_step(kv_out: SideOutputs) -> rlx.ModelFlow:
    """Gemma's decode layer by its fields."""
    return STEP.stage(blocks.GemmaDecodeLayer(layer_prefix=L0, layer_idx=0, spec=GEMMA_STEP, kv_out=kv_out))


STAGES: dict[str, tuple[list[Any], list[rlx.ModelFlow]]] = {
    "Embed": ([*ALL, H], [
        IDS.stage(blocks.Embed.token("model.embed_tokens.weight")),
        IDS.stage(blocks.Embed(weight_key="model.embed_tokens.weight")),
        IDS.embed("model.embed_tokens.weight"),
        IDS.token_embed(),
    ]),
    "RopeTables": ([*ALL, N * D], [
        X.rope_tables(blocks.RopeTables.param(max_positions=9, half_dim=D // 2, cos=COS,
            sin=SIN)).self_attn_prefill(ATTENTION),
        X.stage(TABLES).self_attn_prefill(ATTENTION),
    ]),
    "ZeroBeta": ([*ALL, H], [X.zero_beta(H).final_norm(EPS), X.zero_beta_named("zero_beta", H).final_norm(EPS)]),
    "BindDecodeInputs": ([*ALL, H], [
        behind(X).rope_tables(TABLES).stage(blocks.BindDecodeInputs(num_layers=1,
            use_custom_mask=False)).llama_decode_layer(0, LLAMA_STEP),
        STEP.llama_decode_layer(0, LLAMA_STEP),
    ]),
    "AttnMask": ([*ALL, H], [
        X.attn_mask_ones("batch", "seq").stage(blocks.VitSelfAttn(VIT)),
        X.stage(blocks.AttnMask.ones("batch", "seq")).stage(blocks.VitSelfAttn(VIT)),
    ]),
    "AttnMask.from_input": ([*ALL, H], [
        MASKED.stage(blocks.AttnMask.from_input("attention_mask", "batch", "seq")).stage(blocks.VitSelfAttn(VIT)),
        MASKED.stage(blocks.AttnMask(batch="batch", seq="seq",
            input_name="attention_mask")).stage(blocks.VitSelfAttn(VIT)),
    ]),
    "LlamaDecodeLayer": ([*ALL, H], [
        STEP.llama_decode_layer(0, LLAMA_STEP, SideOutputs()),
        STEP.stage(blocks.llama_decode_layer(0, LLAMA_STEP, SideOutputs().inner())),
        STEP.named_layer("layer0", blocks.LlamaDecodeLayer(layer_prefix=L0, layer_idx=0, spec=LLAMA_STEP,
            kv_out=SideOutputs())),
    ]),
    "LlamaDecoder": ([*ALL, H], [
        ROPED.named_layer("layer0", blocks.LlamaDecoder.layer(0, LLAMA)),
        ROPED.llama_prefill_layer(0, LLAMA),
        ROPED.llama_decoder_layer(0, LLAMA),
        ROPED.stage(blocks.llama_prefill_layer_fused(0, LLAMA)),
    ]),
    "LlamaKvTap": ([*ALL, H], [
        ROPED.llama_kv_tap(0, D, EPS, SideOutputs()),
        ROPED.stage(blocks.LlamaKvTap(L0, D, EPS, SideOutputs())),
        ROPED.stage(blocks.LlamaKvTap(layer_prefix=L0, head_dim=D, eps=EPS, outputs=SideOutputs())),
    ]),
    "Repeat": ([*ALL, H], [
        X.repeat_layers(2, lambda i: blocks.plugin_named("p", PLUS_ONE)),
        X.stage(blocks.Repeat(count=2, stage_for_index=lambda i: blocks.Custom(name="p", fn=PLUS_ONE))),
    ]),
    "Repeat of none": ([*ALL, H], [X.repeat_layers(0, lambda i: blocks.plugin(PLUS_ONE)), X]),
    "Named": ([*ALL, H], [
        X.named_layer("a", blocks.LayerScale("n")),
        X.stage(blocks.Named(name="a", inner=blocks.LayerScale(gamma_key="n"))),
        X.layer("a", lambda s: s.stage(blocks.LayerScale("n"))),
        X.stage(rlx.LayerStack.named("a").stages([blocks.LayerScale("n")]).build()),
    ]),
    "Sequence": ([*ALL, H], [
        X.sequence([blocks.LayerScale("n")]),
        X.stage(blocks.Sequence([blocks.LayerScale("n")])),
        X.raw_stages([blocks.LayerScale("n")]),
        X.raw_stage(blocks.LayerScale("n")),
        X.stage(rlx.LayerStack.new().stage(blocks.LayerScale("n")).build()),
    ]),
    "RmsNorm": ([*ALL, H], [
        X.final_norm(EPS),
        X.rms_norm("model.norm.weight", EPS),
        X.stage(blocks.RmsNorm(weight_key="model.norm.weight", eps=EPS)),
    ]),
    "GatherLastToken": (["batch", 1, H], [
        X.gather_last_token_dynamic("batch"),
        X.stage(blocks.GatherLastToken.dynamic("batch")),
    ]),
    "GatherLastToken.static_last": (["batch", 1, H], [
        X.gather_last_token_at("batch", "seq"),
        X.stage(blocks.GatherLastToken.static_last("batch", "seq")),
    ]),
    "LmHead": ([*ALL, V], [
        X.lm_head(V, H, False),
        X.stage(blocks.LmHead.separate("lm_head.weight", V, H)).output("logits"),
        X.stage(blocks.LmHead(weight_key="lm_head.weight", tie_word_embeddings=False, vocab_size=V,
            hidden_size=H)).outputs(["logits"]),
    ]),
    "LmHead.tied": ([*ALL, V], [
        IDS.token_embed().lm_head(V, H, True),
        IDS.token_embed().stage(blocks.LmHead.tied(V, H)).output("logits"),
    ]),
    "Linear": ([*ALL, F], [X.linear("w", True), X.stage(blocks.Linear(weight_key="w", transpose=True))]),
    "ResidualSave, ResidualAdd": ([*ALL, H], [
        X.residual_save().plugin_named("p", PLUS_ONE).residual_add(),
        X.stage(blocks.ResidualSave(), blocks.PluginStage.named("p", PLUS_ONE), blocks.ResidualAdd()),
    ]),
    "SwiGlu": ([*ALL, H], [
        X.swiglu(*MLP),
        X.swiglu_hf_mlp(f"{L0}.mlp"),
        X.stage(blocks.SwiGlu(gate_key=MLP[0], up_key=MLP[1], down_key=MLP[2])),
        X.stage(blocks.SwiGlu.hf_mlp(f"{L0}.mlp")),
    ]),
    "SelfAttnPrefill": ([*ALL, N * D], [
        ROPED.self_attn_prefill(ATTENTION),
        ROPED.stage(blocks.SelfAttnPrefill(blocks.SelfAttnPrefillSpec.hf_layer(L0, N, D, K))),
    ]),
    "GdnScan": ([*ALL, N, D], [
        GDN.gdn_scan(blocks.GdnScan.prefill(D, ("batch", "seq", N, D))),
        GDN.stage(blocks.GdnScan(state_size=D, out_shape=(*ALL, N, D), carry_state=False, state_key=None)),
    ]),
    "StoreStream, LoadStream": ([*ALL, H], [
        X.store_stream(blocks.stream_id.MAIN).load_stream("main"),
        X.stage(blocks.StoreStream("main"), blocks.LoadStream("main")),
    ]),
    "DualStream": ([*ALL, H], [
        swapped(TWO.dual_stream("d", blocks.stream_id.IMG, blocks.stream_id.TXT, BOTH)),
        swapped(TWO.stage(blocks.DualStream("d", "img", "txt", BOTH))),
        swapped(TWO.stage(blocks.dual_stream_stage("d", "img", "txt", BOTH))),
    ]),
    "bind_inputs_to_streams": ([*ALL], [
        MASKED.bind_inputs_to_streams([("x", "img"), ("attention_mask", "txt")]).load_stream("txt"),
    ]),
    "Custom": ([*ALL, H], [
        X.custom_named("p", PLUS_ONE),
        X.plugin_named("p", PLUS_ONE),
        X.stage(blocks.Custom(PLUS_ONE, "p")),
        X.stage(blocks.plugin_named("p", PLUS_ONE)),
        X.stage(blocks.PluginStage.named("p", PLUS_ONE)),
    ]),
    "Custom without a name": ([*ALL, H], [
        X.custom(PLUS_ONE),
        X.plugin(PLUS_ONE),
        X.stage(blocks.plugin(PLUS_ONE)),
        X.stage(blocks.PluginStage.new(PLUS_ONE)),
        X.patch(lambda f: f.custom(PLUS_ONE)),
        X.when(True, lambda f: f.custom(PLUS_ONE)).when(False, lambda f: f.custom(PLUS_ONE)),
    ]),
    "BertEncoderLayer": ([*ALL, H], [
        MASKED.bert_encoder_layer(BERT),
        MASKED.stage(blocks.BertEncoderLayer(blocks.BertEncoderLayerSpec.hf("encoder.layer.0", H, N, EPS))),
    ]),
    "repeat_bert_layers": ([*ALL, H], [MASKED.repeat_bert_layers(1, "", "Bert", H, N, EPS)]),
    "NomicEncoderLayer": ([*ALL, H], [MASKED.rope_tables(TABLES).stage(blocks.NomicEncoderLayer(NOMIC))]),
    "repeat_nomic_layers": ([*ALL, H], [MASKED.rope_tables(TABLES).repeat_nomic_layers(1, H, N, D, EPS)]),
    "Qwen3Decoder": ([*ALL, H], [
        ROPED.stage(blocks.qwen3_prefill_layer_fused(0, QWEN)),
        ROPED.named_layer("layer0", blocks.Qwen3Decoder.layer(0, QWEN)),
    ]),
    "Qwen3Decoder.layer_with_kv": ([*ALL, H], [
        ROPED.stage(blocks.qwen3_prefill_layer_fused_kv(0, QWEN, SideOutputs())),
        ROPED.named_layer("layer0", blocks.Qwen3Decoder.layer_with_kv(0, QWEN, SideOutputs())),
        ROPED.named_layer("layer0", blocks.Qwen3Decoder(layer_prefix=L0, spec=QWEN, kv_sink=SideOutputs())),
    ]),
    "Qwen3DecodeLayer": ([*ALL, H], [
        STEP.stage(blocks.qwen3_decode_layer_fused(0, QWEN_STEP, SideOutputs())),
        STEP.named_layer("layer0", blocks.Qwen3DecodeLayer(layer_prefix=L0, layer_idx=0, spec=QWEN_STEP,
            kv_out=SideOutputs())),
    ]),
    "VitSelfAttn": ([*ALL, H], [
        X.stage(blocks.VitSelfAttn.dinov2("blocks.0", H, N)),
        X.stage(blocks.VitSelfAttn(VIT)),
    ]),
    "VitSelfAttn.nomic_vision": ([*ALL, H], [X.stage(blocks.VitSelfAttn.nomic_vision("layers.0", H, N))]),
    "LayerScale": ([*ALL, H], [X.stage(blocks.LayerScale(gamma_key="n"))]),
    "VisionSwiGluFfn": ([*ALL, H], [X.stage(blocks.VisionSwiGluFfn(layer_prefix="layers.0", eps=EPS))]),
    "ClsTokenPool": (["batch", H], [
        X.cls_token_pool("batch", H),
        X.stage(blocks.ClsTokenPool(batch="batch", hidden=H)),
    ]),
    "LayerNorm": ([*ALL, H], [
        X.layer_norm("blocks.0.norm1.weight", "blocks.0.norm1.bias", EPS),
        X.stage(blocks.LayerNorm(gamma_key="blocks.0.norm1.weight", beta_key="blocks.0.norm1.bias", eps=EPS)),
    ]),
    "GeluFfn": ([*ALL, H], [
        X.gelu_ffn("encoder.layer.0"),
        X.stage(blocks.GeluFfn.hf_bert("encoder.layer.0")),
        X.stage(blocks.GeluFfn.new(*(f"encoder.layer.0.{n}.dense.{k}" for n in ("intermediate", "output") for k in
            ("weight", "bias")))),
    ]),
    "GeluFfn.dinov2": ([*ALL, H], [X.stage(blocks.GeluFfn.dinov2("blocks.0"))]),
    "GatherFromInput": ([*ALL, H], [
        MASKED.gather_from_input("attention_mask", "model.embed_tokens.weight"),
        MASKED.stage(blocks.GatherFromInput(input_name="attention_mask", weight_key="model.embed_tokens.weight")),
    ]),
    "GatherAdd": ([*ALL, H], [
        MASKED.gather_add("attention_mask", "model.embed_tokens.weight"),
        MASKED.stage(blocks.GatherAdd(input_name="attention_mask", weight_key="model.embed_tokens.weight")),
    ]),
    "EmbedScale": ([*ALL, H], [X.stage(blocks.EmbedScale(hidden_size=H))]),
    "GemmaRmsNorm": ([*ALL, H], [
        X.stage(blocks.GemmaRmsNorm.hf_layer("model.norm", EPS)),
        X.raw_stage(blocks.GemmaRmsNorm(weight_key="model.norm.weight", eps=EPS)),
    ]),
    "LogitSoftcap": ([*ALL, H], [X.stage(blocks.LogitSoftcap(cap=30.0))]),
    "DecodeRopeParams": (["batch", 1, N * D], [
        rlx.ModelFlow("f").input("x", ("batch", 1, H)).stage(blocks.DecodeRopeParams(cos=COS[P], sin=SIN[P],
            half_dim=D // 2)).self_attn_prefill(ATTENTION),
    ]),
    "GemmaDecodeLayer": ([*ALL, H], [gemma_step(SideOutputs())]),
    "GemmaKvTap": ([*ALL, H], [
        ROPED.stage(blocks.GemmaKvTap(L0, D, EPS, SideOutputs())),
        ROPED.stage(blocks.GemmaKvTap(layer_prefix=L0, head_dim=D, outputs=SideOutputs())),
    ]),
    "GeGlu": ([*ALL, H], [
        X.stage(blocks.GeGlu.hf_mlp(L0)),
        X.stage(blocks.GeGlu(gate_key=MLP[0], up_key=MLP[1], down_key=MLP[2])),
    ]),
    "llama_prefill_layer_composed": ([*ALL, H], [
        ROPED.llama_prefill_layer_composed(0, LLAMA),
        ROPED.stage(blocks.llama_prefill_layer_composed(0, LLAMA)),
    ]),
    "dinov2_layer_fused": ([*ALL, H], [X.stage(blocks.dinov2_layer_fused(0, H, N, EPS))]),
    "repeat_dinov2_layers": ([*ALL, H], [X.repeat_dinov2_layers(1, H, N, EPS)]),
    "nomic_vision_layer_fused": ([*ALL, H], [X.stage(blocks.nomic_vision_layer_fused(0, H, N, EPS))]),
    "repeat_vision_layers": ([*ALL, H], [X.repeat_vision_layers(1, H, N, EPS)]),
    "siglip_layer_fused_with_prefix": ([*ALL, H], [
        X.stage(blocks.siglip_layer_fused_with_prefix("vision_model", 0, H, N, EPS)),
    ]),
    "repeat_siglip_layers": ([*ALL, H], [X.repeat_siglip_layers(1, H, N, EPS)]),
    "gemma_prefill_layer_composed": ([*ALL, H], [
        ROPED.stage(blocks.gemma_prefill_layer_composed(0, GemmaStyle.GEMMA2, GEMMA, EPS)),
    ]),
    "gemma_prefill_layer_composed with a sink": ([*ALL, H], [
        ROPED.stage(blocks.gemma_prefill_layer_composed(0, GemmaStyle.GEMMA2, GEMMA, EPS, SideOutputs())),
    ]),
}  # fmt: skip
"""The output shape of the catalogue, and the forms."""


def hir_text(flow: rlx.ModelFlow) -> str:
    return str(flow.build(SPECS).into_graph_module())


@pytest.mark.parametrize("name", STAGES)
def test_forms_of_a_stage(name: str) -> None:
    shape, flows = STAGES[name]
    assert list(map(str, flows[0].build(SPECS).primary_shape)) == list(map(str, shape))
    assert len({hir_text(flow) for flow in flows}) == 1


def test_the_catalogue_is_complete() -> None:
    """43 stages; every stage of the package is one of the `FlowStage`s."""
    forms = {part.split(".")[0] for row in STAGES for part in row.split(", ")}
    stages = {c.__name__ for c in blocks.FlowStage.__args__}
    assert len(forms & stages) == 43
    exported = [c for c in vars(blocks).values() if isinstance(c, type) and hasattr(c, "emit")]
    assert stages == {c.__name__ for c in exported if not getattr(c, "_is_protocol", False)}


def test_registers() -> None:
    """What stages write into `emit.state`, and the operations of a stage's context."""
    seen: dict[str, Any] = {}

    def look(emit: Any, x: Any) -> Any:
        state = emit.state
        assert (emit.__class__, state.__class__) == (blocks.FlowCtx, blocks.FlowState) and state.hidden_shape is None
        seen["shapes"] = state.residual_shape, x.shape, emit.node_shape(x)
        assert state.residual_skip is state.residual is x and x.hir_id() == x.value
        assert state.zero_beta.shape == (H,) and state.named["zero_beta.head"].shape == (D,)
        w = emit.load_param("w", True)
        assert state.loaded_params["w", True] is w and w.shape == (H, F) and emit.load_param("w", False).shape == (F, H)
        seen["decode"] = state.decode
        state.gdn = blocks.GdnInputSlots(*(emit.synth_zeros(f"z.{n}", 4) for n in "qkvgb"))
        assert state.gdn.beta is emit.named("z.b") and emit.synth_param("s", np.ones(2), (2,)).shape == (2,)
        assert emit.flow_input("x").value == x.value and emit.input("x", ("batch", "seq", H)).value == x.value
        state.streams["main"] = x
        return x

    flow = behind(X, 2).rope_tables(TABLES).bind_decode_inputs(2, False)
    flow = flow.zero_beta(H).zero_beta_named("zero_beta.head", D).residual_save().plugin(look).load_stream("main")
    flow.build_with(SPECS, None)
    assert len({tuple(map(str, shape)) for shape in seen["shapes"]}) == 1
    bound = seen["decode"]
    assert type(bound).__name__ == "DecodeBindings" and bound.mask is None
    assert len(bound.past_k) == len(bound.past_v) == 2 and bound.cos.shape[-1] == bound.sin.shape[-1] == D // 2


def test_a_sink_of_side_outputs() -> None:
    """K before V, layer by layer, whatever is built how often; `drain` empties it."""
    side = SideOutputs()
    flow = behind(X, 2).rope_tables(TABLES).bind_decode_inputs(2, False)
    flow = flow.repeat_layers(2, lambda i: blocks.llama_decode_layer(i, LLAMA_STEP, side))
    assert side.is_empty()
    names = ("kv.0.k", "kv.0.v", "kv.1.k", "kv.1.v")
    for _ in range(2):
        assert flow.build(SPECS).output_names == ("output", *names)
    assert side.drain() == names and side.is_empty() and side.drain() == ()


def test_recipes_profiles_and_plans() -> None:
    """Sections 4.1, 5, 8 and 10: what takes a recipe, a profile and a plan."""
    flow = rlx.ModelFlow.from_recipe(lambda: X.hidden_states())
    assert flow.build(SPECS).output_names == ("hidden",)
    profiles = rlx.CompileProfile
    for name, made in (("llama32_prefill", X.profile_prefill()), ("llama32_decode", X.profile_decode()),
                       ("encoder", X.profile_encoder())):  # fmt: skip
        assert made.profile == getattr(profiles, name)() == X.with_profile(profiles.preset(name)).profile
    assert X.profile_file(None, profiles.llama32_decode).profile == profiles.llama32_decode()
    text = '[fusion]\npolicy = "fusable"\n[precision]\ncompute = "bf16"\n[passes]\ndce = false\n'
    read = profiles.from_toml_str(text)
    assert (read.fusion.policy, read.precision.compute, read.passes.dce) == ("fusable", "bf16", False)
    plan = rlx.FlowExtensionPlan
    assert plan() == plan(enabled=(), apply_all=False) and plan.all().apply_all and plan.only(["a"]).enabled == ("a",)
    assert hir_text(X.with_extensions(plan())) == hir_text(X)
    assert X.plugin(PLUS_ONE).store_stream("s").with_extra_outputs(["s"]).build(SPECS).output_names == ("output", "s")


def test_masks_of_gemma() -> None:
    """Even layers of Gemma 2 read a window; of a stride, every layer but its multiples."""
    window = MaskKind.sliding_window(4)
    assert [blocks.gemma2_layer_mask(i, 4) for i in range(2)] == [window, MaskKind.CAUSAL]
    assert [blocks.gemma_strided_layer_mask(i, 4, 3) for i in range(3)] == [window, window, MaskKind.CAUSAL]
    assert blocks.gemma_strided_layer_mask(0, 4, 1) == window


def test_contracts() -> None:
    """Section 11: what stages say of the cache, of their width and of their epsilon, and a block as a layer."""
    assert isinstance(blocks.SelfAttnPrefill(ATTENTION), blocks.AttentionStage)
    assert isinstance(blocks.SwiGlu(*MLP), blocks.FfnStage) and isinstance(blocks.RmsNorm("n"), blocks.NormStage)
    layer = blocks.BlockAsLayer(blocks.plugin(lambda e, x: e.output("side", x)))
    assert isinstance(layer, blocks.LayerStage) and layer.name == "block"
    seen: dict[str, Any] = {}

    def run(emit: Any, x: Any) -> Any:
        value, seen["artifacts"] = layer.emit_layer(emit, x)
        assert value is x
        _, _, seen["cache"] = blocks.emit_attention(blocks.SelfAttnPrefill(ATTENTION), emit, x)
        seen["inner"] = blocks.SwiGlu(*MLP).intermediate_shape(emit, x.type)
        return x

    ROPED.plugin(run).build(SPECS)
    hidden = seen["artifacts"].hidden
    assert seen["artifacts"] == blocks.StageArtifacts.hidden_only(hidden).with_side("side", hidden)
    assert seen["cache"].k.shape[2] == seen["cache"].v.shape[2] == K * D and seen["inner"][-1] == F
