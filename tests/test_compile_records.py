"""The names of STAGES 12 and IR 10.1: manifests, reflections, the steps and options of a pipeline."""

import pytest

import rlx_jax as rlx
from rlx_jax import compile_steps as steps
from rlx_jax import plugins
from rlx_jax.errors import GraphError, UnsupportedError
from rlx_jax.lowering.inspect.buffers import dump_lir
from tests.test_compile_steps import llama, module


def test_manifests() -> None:
    lir = module().into_lir(batch=2)
    manifest = rlx.BindingManifest.from_lir(lir)
    assert (manifest.graph_name, manifest.alignment) == ("two", 64) and manifest == steps.layout_from_lir(lir)
    assert manifest.input_names == ("x",) and manifest.param_names == ("layers.0.w", "layers.1.w")
    assert manifest.param_byte_size("layers.0.w") == 256 and manifest.total_param_bytes == 512
    (output,) = manifest.outputs
    assert (output.name, output.dtype, output.shape, output.elem_count) == ("output", "f32", (2, 8), 16)
    assert output.arena_offset is not None and output.arena_size == 64 and not output.is_view
    assert rlx.BindingManifest.from_lir(lir, alignment=256).arena_size > manifest.arena_size
    with pytest.raises(GraphError, match=r"layers\.0\.w"):
        manifest.param_byte_size("layers.0.v")
    view = rlx.GraphModule.define("v", lambda m: m.reshape(m.relu(m.input("x", (2, 8))), (16,)))
    (reshaped,) = rlx.BindingManifest.from_lir(view.into_lir()).outputs
    assert reshaped.is_view and reshaped.arena_offset == 0


@pytest.mark.parametrize("roll", ["scan", "unroll"])
def test_weight_blocks_are_layers(roll: str) -> None:
    """Q27: blocks are layers, whether they run in a loop or not."""
    model = rlx.compile(llama(), profile=rlx.CompileProfile().replace(layers={"roll": roll}))
    manifest = model.manifest(batch=1, seq=4)
    blocks = {block.prefix: block for block in manifest.weight_blocks()}
    assert list(blocks) == ["lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert len(blocks["model.layers.0"].params) == 9
    assert sum(block.byte_size for block in blocks.values()) == manifest.total_param_bytes
    assert model.manifest().outputs[0].byte_size == 0 and "logits" in str(manifest)
    with pytest.raises(GraphError, match="seq"):
        model.manifest(batch=1)


def test_reflections() -> None:
    built = llama().assemble().build().into_graph_module()
    found = rlx.HirReflection.from_hir(built)
    assert (
        found.node_count == len(built) and found.fusion_policy == "direct" and found.outputs == (("batch", "seq", 48),)
    )
    assert ("input_ids", ("batch", "seq")) in found.inputs and ("model.norm.weight", (32,)) in found.params
    assert "LlamaDecoderBlock" in found.composites or "Attention" in found.composites
    assert rlx.ModelReflection.from_hir(built).template is None
    empty = rlx.ModelReflection.from_hir(built)
    component = rlx.ModelComponent(rlx.ModelVariant.prefill(1, 4))
    assert (empty.has_template, empty.mir_summary(), empty.layout_for_component(component)) == (False, None, None)
    loaded = rlx.ModelReflection.load_hir_template("cpu", built)
    summary, layout = loaded.mir_summary(), loaded.layout_for_component(component)
    assert loaded.has_template and summary is not None and layout is not None
    assert summary.op_kinds == tuple(sorted(summary.op_kinds)) and dict(summary.op_kinds)["MatMul"] >= 1
    difference = loaded.manifest_diff_for_component(component)
    assert difference is not None and difference.template_arena < difference.specialised_arena
    assert not difference.only_in_template and not difference.only_in_specialised
    with pytest.raises(GraphError, match="hir"):
        rlx.HirReflection.from_hir(built.lower())


def test_a_reflection_with_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are registered have run; parameters of one side alone are a difference."""
    monkeypatch.setattr(plugins, "_registered", {})
    one = rlx.GraphModule.define("one", lambda m: m.linear(m.input("x", ("batch", 8)), m.param("only", (8, 8))))
    plugins.register_hir_extension("one", lambda graph: one.into_hir())
    plain = rlx.ModelReflection.load_hir_template("cpu", module()).template_layout()
    extended = rlx.ModelReflection.load_hir_template_with_extensions("cpu", module()).template_layout()
    assert plain is not None and extended is not None
    difference = rlx.ManifestDiff.compare(plain, extended)
    assert difference.only_in_template == ("layers.0.w", "layers.1.w") and difference.only_in_specialised == ("only",)


def test_probe_changes_nothing() -> None:
    m = rlx.GraphModule.hir("m")
    x = m.input("x", (2, 8))
    up, gate, down = (m.param(name, (8, 8)) for name in ("up", "gate", "down"))
    m.set_outputs([m.swiglu_ffn(x, up=up, gate=gate, down=down)])
    before = m.to_json()
    ((node, kind, choice),) = rlx.probe_block_specialization(m, "unfused_primitives")
    assert (kind, choice) == ("SwiGLU", steps.BlockSpecialization.UNFUSED_PRIMITIVES) and m.to_json() == before
    assert node < len(m) and steps.symbolic_layout_hint({"seq": 2, "batch": 1}) == "batch=1, seq=2"


def test_pipeline_steps() -> None:
    pipeline = rlx.CompilePipeline()
    assert (pipeline.target, pipeline.arena_alignment, pipeline.supported_ops) == ("cpu", 64, None)
    lowered = pipeline.lower_hir(module())
    assert lowered.stage == "mir" and len(pipeline.preprocess_mir(lowered)) == len(lowered)
    assert rlx.CompilePipeline(assert_fusion_clean=True).compile_module(lowered).fusion.clean
    optimised, report = pipeline.optimize_with_report(lowered)
    assert optimised.stage == "mir" and report.matmul_after == 2
    assert dump_lir(pipeline.plan_lir(lowered.bind(batch=2))) == dump_lir(module().into_lir(batch=2))
    template = pipeline.compile_hir(module().into_hir())
    assert template.has_dynamic_dims and template.dynamic_symbols == ("batch",)
    planned = pipeline.specialize_lir(template, {"batch": 2})
    assert dump_lir(planned) == dump_lir(template.specialize({"batch": 2}).lir)
    passed = pipeline.compile_module(rlx.GraphModule.from_lir(planned))
    assert dump_lir(passed.lir) == dump_lir(planned) and passed.fusion.clean and not passed.fusion.sites
    assert not pipeline.compile_mir(lowered.bind(batch=2).graph).has_dynamic_dims
    with pytest.raises(GraphError, match="template"):
        passed.specialize({"batch": 2})
    with pytest.raises(GraphError, match="mir"):
        pipeline.preprocess_mir(module())


def test_pipeline_options() -> None:
    static = module().bind(batch=2)
    assert rlx.CompilePipeline(target="h200").compile_module(static).lir.plan.target == "cuda"
    wide = rlx.CompilePipeline(arena_alignment=4096)
    assert wide.manifest(wide.compile_module(static)).arena_size > 4096
    with pytest.raises(UnsupportedError, match="MatMul"):
        rlx.CompilePipeline(supported_ops=["Unary"]).compile_module(static)
    assert rlx.CompilePipeline(supported_ops=["MatMul", "Unary"]).compile_module(static)
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    assert "bf16" in dump_lir(rlx.CompilePipeline(profile=profile).compile_module(static).lir)
    with pytest.raises(GraphError, match="lir"):
        rlx.CompilePipeline(profile=profile).compile_module(rlx.GraphModule.from_lir(static.into_lir()))
