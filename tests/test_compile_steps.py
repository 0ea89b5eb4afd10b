"""The names of STAGES 9, 12 and 13 and IR 10.1: a row of the specification each, over small modules and recipes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import compile_steps as steps
from rlx_jax import plugins
from rlx_jax.blocks import Homogeneous
from rlx_jax.compiler import pipeline as compiler
from rlx_jax.compiler.settings import choose_settings
from rlx_jax.device import named_device
from rlx_jax.errors import (
    GraphError,
    LimitError,
    ProfileError,
    RequestError,
    RlxCacheWarning,
    UnsupportedError,
)
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.runtime import programs as program_cache
from rlx_jax.runtime.aot_cache import source_digest

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def module() -> rlx.GraphModule:
    """A product of two layers with a symbolic number of rows."""

    def build(m: rlx.GraphModule) -> Any:
        x = m.relu(m.linear(m.input("x", ("batch", 8)), m.param("layers.0.w", (8, 8))))
        return m.linear(x, m.param("layers.1.w", (8, 8)))

    return rlx.GraphModule.define("two", build)


def llama() -> Any:
    return rlx.Llama32Flow.for_prefill(LLAMA)


def run(executable: Any, x: np.ndarray) -> np.ndarray:
    outputs, _ = executable.run({"layers.0.w": W, "layers.1.w": W}, {}, {"x": x})
    return np.asarray(outputs[0])


def expected(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(x.astype(np.float64) @ W, 0) @ W)


def test_variants() -> None:
    assert steps.ModelVariant.prefill(2, 16).dim_binding() == {"batch": 2, "seq": 16, "rows": 32}
    assert steps.ModelVariant.prefill(1, 16).dim_binding() == {"batch": 1, "seq": 16}
    assert steps.ModelVariant.decode(2, 7).dim_binding() == {"batch": 2, "seq": 1, "past": 7}
    assert steps.ModelVariant.decode(2, 7, 3).seq == 3 and steps.ModelVariant.encoder(1, 4).phase == "encoder"
    extra = steps.ModelVariant.encoder(1, 4).with_extra("images", 3).with_extra("heads", 2)
    assert extra.dim_binding() == {"batch": 1, "seq": 4, "images": 3, "heads": 2}
    other = replace(extra, extra=extra.extra[::-1])
    keys = {v.cache_key() for v in (extra, other, steps.ModelVariant.encoder(1, 4), steps.ModelVariant.prefill(1, 4))}
    assert len(keys) == 4
    with pytest.raises(GraphError, match="seq"):
        steps.ModelVariant.prefill(1, 0)


CHANGES: dict[str, Callable[[steps.ModelComponent], steps.ModelComponent]] = {
    "variant": lambda c: replace(c, variant=steps.ModelVariant.prefill(2, 8)),
    "dispatch": lambda c: c.with_kernel_dispatch("common"),
    "mode": lambda c: c.with_compilation_mode("lazy"),
    "profile": lambda c: c.with_profile_key(steps.ExecutionPreset.ENCODER.profile_key()),
    "quant": lambda c: c.with_quant("int8"),
    "composition": lambda c: c.with_layer_composition(Homogeneous("layer", 2)),
}


def test_every_field_of_a_component_is_part_of_its_key() -> None:
    component = steps.ModelComponent(steps.ModelVariant.prefill(1, 8))
    changed = {name: change(component) for name, change in CHANGES.items()}
    assert len({component.cache_key(), *(c.cache_key() for c in changed.values())}) == 1 + len(CHANGES)
    assert component.aot_disk_base() == f"rlx_{component.cache_key():016x}"
    assert component.cache_key() == 0x4877E5FD1B8C6649  # the same in every process


def test_configurations() -> None:
    config = rlx.ModelExecutionConfig.prefill(1, 16)
    assert config.preset == "llama32_prefill" and config.dim_binding() == {"batch": 1, "seq": 16}
    assert config.component.profile_key == config.preset.profile_key() != 0
    assert rlx.ModelExecutionConfig.decode(1, 8, 2).variant == steps.ModelVariant.decode(1, 8, 2)
    assert rlx.ModelExecutionConfig.qwen35_prefill(1, 4).compile_profile().name == "qwen35_prefill"
    assert rlx.ModelExecutionConfig.qwen35_decode(1, 4).variant.seq == 1
    assert rlx.ModelExecutionConfig.from_component(config.component, config.preset) == config
    changed = config.with_preset("encoder").with_quant("int4").with_kernel_dispatch("common")
    changed = changed.with_compilation_mode("aot").with_layer_composition(Homogeneous("l", 1))
    assert changed.compile_profile() == rlx.CompileProfile.preset("encoder").replace(precision={"weights": "int4"})
    assert changed.cache_key() == changed.component.cache_key() != config.cache_key()


def test_compile_options_are_keywords_of_compile() -> None:
    options = rlx.compile_options_for("auto", rlx.ModelExecutionConfig.prefill(1, 16).with_quant("int8"))
    model = rlx.compile(llama(), **options)
    assert model.settings.profile.precision.weights == "int8"
    cuda = rlx.CompileProfile().replace(fusion={"target": "h200"})
    common = rlx.compile_options_for(cuda, steps.ModelComponent(steps.ModelVariant.prefill(1, 8), "common"))["profile"]  # type: ignore[arg-type]
    assert (common.backend.cuda.kernels, common.attention.implementation) == ("off", "xla")
    native = rlx.compile_options_for(cuda, steps.ModelComponent(steps.ModelVariant.prefill(1, 8), "native"))["profile"]  # type: ignore[arg-type]
    assert native == cuda


def test_dispatch_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_KERNEL_DISPATCH", "common")
    assert steps.ModelComponent(steps.ModelVariant.prefill(1, 8)).kernel_dispatch == "common"
    monkeypatch.setenv("RLX_KERNEL_DISPATCH", "commno")
    with pytest.raises(ProfileError, match="common"):
        steps.ModelComponent(steps.ModelVariant.prefill(1, 8))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often passes run on a program, a program is planned with sizes, and XLA compiles."""
    counted = dict.fromkeys(("run_passes", "make_lir", "trace_program"), 0)

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(compiler, "run_passes")
    count(program_cache, "make_lir")
    count(program_cache, "trace_program")
    return counted


def test_each_step_runs_once(counts: dict[str, int]) -> None:
    pipeline, built = rlx.ModelCompilePipeline("cpu"), []

    def build() -> rlx.GraphModule:
        built.append(1)
        return module()

    assert pipeline.is_empty and not pipeline.has_template and pipeline.template_result is None
    template = pipeline.build_template(build)
    assert pipeline.ensure_template(build) is template and template.dynamic_symbols == ("batch",)
    for rows in (2, 3, 2, 3):
        executable = pipeline.get_or_compile(rows, {"batch": rows}, build)
        x = np.ones((rows, 8), np.float32)
        np.testing.assert_allclose(run(executable, x), expected(x), rtol=1e-5)
    assert built == [1] and counts == {"run_passes": 1, "make_lir": 2, "trace_program": 2}
    assert len(pipeline) == 2 and 2 in pipeline and pipeline.contains(3) and not pipeline.is_empty
    with pytest.raises(RequestError, match="key 2"):
        pipeline.get_or_compile(2, {"batch": 3}, build)


def test_steps_by_hand_are_those_of_compile() -> None:
    pipeline = rlx.ModelCompilePipeline("cpu")
    with pytest.raises(GraphError, match="build_template"):
        pipeline.specialize_template({"batch": 2})
    with pytest.raises(GraphError, match="batch"):
        pipeline.compile_lir(pipeline.build_template(module))
    result = pipeline.specialize_template({"batch": 2})
    assert dump_lir(result.lir) == dump_lir(module().into_lir(batch=2))
    x = np.ones((2, 8), np.float32)
    model = rlx.compile(module(), {"layers.0.w": W, "layers.1.w": W})
    np.testing.assert_array_equal(run(pipeline.compile_lir(result), x), model(x))


def test_the_first_executable_is_dropped_first() -> None:
    pipeline = rlx.ModelCompilePipeline("cpu", capacity=2)
    for rows in (1, 2, 1, 3):  # the second use of 1 changes no order
        pipeline.get_or_compile(rows, {"batch": rows}, module)
    assert 1 not in pipeline and 2 in pipeline and 3 in pipeline
    with pytest.raises(ProfileError, match="h200"):
        pipeline = rlx.ModelCompilePipeline("cpu")
        pipeline.build_template(module, {"profile": rlx.CompileProfile().replace(fusion={"target": "h200"})})


def test_a_component_on_a_fresh_pipeline() -> None:
    """Q28: the template is built first."""
    pipeline, component = rlx.ModelCompilePipeline("cpu"), rlx.ModelComponent(rlx.ModelVariant.prefill(2, 5))
    executable, manifest = rlx.specialize_entry(pipeline, component, llama)
    assert manifest.outputs[0].shape == (2, 5, 48) and manifest == pipeline.binding_manifest_for_component(component)
    assert manifest == pipeline.binding_manifest_for_binding({"batch": 2, "seq": 5})
    assert pipeline.template_binding_manifest().outputs[0].shape == ("batch", "seq", 48)
    assert pipeline.get_or_compile_component(component, llama)[0] is executable
    with pytest.raises(RequestError, match="with_aot"):
        pipeline.get_or_compile_component(component.with_compilation_mode("aot"), llama)


@pytest.mark.parametrize("options", [None, {"profile": rlx.CompileProfile()}])
def test_a_configuration_brings_its_profile(options: Any) -> None:
    """What its component changes stays beside options."""
    config = rlx.ModelExecutionConfig.prefill(1, 5).with_quant("int8")
    pipeline = rlx.ModelCompilePipeline("cpu")
    executable, _ = pipeline.get_or_compile_component(config, llama, options)
    assert executable.lir.plan.packed
    assert pipeline.template_result is not None and pipeline.template_result.settings is not None
    assert pipeline.template_result.settings.profile.precision.weights == "int8"


def test_a_reload_runs_no_pass_and_compiles_nothing(tmp_path: Path, counts: dict[str, int]) -> None:
    component = rlx.ModelComponent(rlx.ModelVariant.prefill(1, 5))
    flow = llama()
    params = rlx.compile(flow).init(0)
    before = rlx.compile_cache()
    try:
        rlx.compile_cache(tmp_path / "programs")
        results = []
        for _ in range(2):
            counts.update(dict.fromkeys(counts, 0))
            pipeline = rlx.Qwen35CompileCache(tmp_path / "planned", "cpu").with_aot()
            executable, _ = pipeline.get_or_compile_component(component, lambda: flow)
            tokens = {"input_ids": np.arange(5, dtype=np.int32)[None]}
            results.append((pipeline.has_template, executable.from_cache, executable.run(params, {}, tokens)[0][0]))
    finally:
        rlx.compile_cache(before.directory or "off")
    (first, second), logits = results, rlx.compile(flow).apply(params, tokens["input_ids"])
    assert first[:2] == (True, False) and second[:2] == (False, True)
    for _, _, values in results:
        np.testing.assert_array_equal(values, logits)


def test_planned_programs_on_disk(tmp_path: Path) -> None:
    cache, lir = rlx.AotCache(tmp_path), module().into_lir(batch=2)
    assert cache.get_lir("a") is None and not cache.contains("a")
    cache.put_lir("a", lir, "source")
    assert cache.contains("a") and cache.get_lir("a", "other") is None
    found = cache.get_lir("a", "source")
    assert found is not None and dump_lir(found) == dump_lir(lir)
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return lir

    for source in ("one", "one", "two"):  # Q29: a program of other blocks is made again
        assert dump_lir(cache.specialize_cached("base", {"b": 1, "a": 2}, source, make)) == dump_lir(lir)
    cache.specialize_cached("base", {"a": 2, "b": 1}, "two", make)
    assert len(made) == 2
    pipeline = steps.CompilePipeline()
    static = module().bind(batch=2)
    first, second = cache.compile_hir_cached("m", static, pipeline), cache.compile_graph_cached("m", static, pipeline)
    assert dump_lir(first) == dump_lir(second)
    with pytest.raises(GraphError, match="batch"):
        cache.compile_hir_cached("m", module(), pipeline)
    for path in tmp_path.glob("*.entry"):
        path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    with pytest.warns(RlxCacheWarning, match="made again"):
        assert cache.get_lir("a", "source") is None
    with pytest.raises(LimitError):
        rlx.AotCache(tmp_path, max_bytes=10).put_lir("a", lir)


def relu(profile: rlx.CompileProfile | None = None) -> rlx.ModelFlow:
    """A flow of its own profile, if there is one."""
    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).custom(lambda emit, x: emit.relu(x))
    return flow if profile is None else flow.with_profile(profile)


BF16 = rlx.CompileProfile().replace(precision={"compute": "bf16"})


@pytest.mark.parametrize("mode", ["eager", "aot"])
def test_the_profile_of_a_flow_is_that_of_its_programs(tmp_path: Path, mode: str) -> None:
    """An entry on disk of the same blocks with another profile is made again."""
    component = rlx.ModelComponent(rlx.ModelVariant.prefill(2, 1)).with_compilation_mode(mode)
    for profile, is_bf16 in ((None, False), (BF16, True), (None, False)):
        pipeline = rlx.ModelCompilePipeline("cpu").with_aot(tmp_path)
        executable, _ = pipeline.get_or_compile_component(component, lambda: relu(profile))  # noqa: B023
        assert ("bf16" in dump_lir(executable.lir)) == is_bf16


def test_another_profile_is_refused(tmp_path: Path) -> None:
    """Neither the executable of a key nor the template is used for it, and nothing else is written to disk."""
    pipeline, component = rlx.ModelCompilePipeline("cpu"), rlx.ModelComponent(rlx.ModelVariant.prefill(2, 1))
    executable, _ = pipeline.get_or_compile_component(component, module)
    assert pipeline.get_or_compile_component(component, module, {"profile": rlx.CompileProfile()})[0] is executable
    bf16: Any = {"profile": BF16}
    for refused in (
        lambda: pipeline.get_or_compile_component(component, module, bf16),
        lambda: pipeline.build_template(module, bf16),
        lambda: pipeline.get_or_compile(1, {"batch": 3}, module, bf16),
        lambda: pipeline.get_or_compile_component(component.with_quant("int8"), module),
        lambda: pipeline.with_aot(tmp_path).get_or_compile_component(
            component.with_quant("int8").with_compilation_mode("aot"), module
        ),
    ):
        with pytest.raises(RequestError, match=r"precision\.(compute|weights)"):
            refused()
    assert not list(tmp_path.iterdir())


def test_entries_are_of_the_graph_of_their_pipeline(tmp_path: Path) -> None:
    """The first model is that of the pipeline: another one neither runs nor reaches the disk."""
    component = rlx.ModelComponent(rlx.ModelVariant.prefill(2, 1)).with_compilation_mode("aot")
    pipeline = rlx.ModelCompilePipeline("cpu").with_aot(tmp_path)
    pipeline.get_or_compile_component(replace(component, variant=rlx.ModelVariant.prefill(3, 1)), module)
    assert pipeline.get_or_compile_component(component, relu)[1].graph_name == "two"
    other, manifest = rlx.ModelCompilePipeline("cpu").with_aot(tmp_path).get_or_compile_component(component, relu)
    assert manifest.graph_name == "f"
    np.testing.assert_array_equal(other.run({}, {}, {"x": -np.ones((2, 8), np.float32)})[0][0], np.zeros((2, 8)))


def test_what_auto_stands_for_is_part_of_the_digest() -> None:
    """`compute = "auto"` is the weights' dtype on an accelerator, and the target is the device that runs."""
    hir = relu().build().hir
    settings = choose_settings(relu().build(), None, False, "forward")
    others = (
        replace(settings, compute=np.dtype("float16")),
        replace(settings, device=named_device("h200")),
        replace(settings, profile=BF16),
    )
    assert len({source_digest(hir, s) for s in (settings, *others)}) == 4
    more_memory = replace(settings, device=replace(settings.device, memory=1))
    assert source_digest(hir, more_memory) == source_digest(hir, settings)


def test_a_python_function_is_not_written(tmp_path: Path) -> None:
    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).custom(lambda emit, x: emit.jax(lambda a: a + 1, x))
    pipeline = rlx.ModelCompilePipeline("cpu").with_aot(tmp_path)
    component = rlx.ModelComponent(rlx.ModelVariant.prefill(2, 1)).with_compilation_mode("aot")
    with pytest.raises(UnsupportedError, match="custom"):
        pipeline.get_or_compile_component(component, lambda: flow)


def test_tables_of_programs() -> None:
    models = rlx.CompileCache(capacity=1)
    assert models.is_empty
    model = models.get_or_compile(1, module)
    assert models.get_or_compile(1, llama) is model and 1 in models and len(models) == 1
    models.get_or_compile(2, module)
    assert not models.contains(1) and models.contains(2)
    programs = rlx.DynamicDimCompileCache(module, device="cpu")
    x = np.ones((3, 8), np.float32)
    np.testing.assert_allclose(run(programs.get_or_specialize(3, {"batch": 3}), x), expected(x), rtol=1e-5)
    assert 3 in programs and programs.contains(3) and len(programs) == 1

    def program(rows: int) -> Callable[[Any], Any]:
        executable = programs.get_or_specialize(rows, {"batch": rows})
        return lambda inputs: (run(executable, inputs["x"]), np.arange(rows))

    buckets = rlx.BucketedCompileCache(rlx.BucketedCompileCache.power_of_two_ladder(3, 7), program)
    assert buckets.extents == (4, 8) and buckets.bucket(5) == 8 and buckets.bucket(9) is None
    outputs = buckets.run_padded(3, {"x": x}, ["x"], sliced=[0])
    assert outputs is not None and outputs[1].shape == (4,)
    np.testing.assert_allclose(outputs[0], expected(x), rtol=1e-5)
    assert buckets.run_padded(9, {"x": x}, ["x"]) is None
    for arguments, fragment in (((2, {"x": x}, ["x"]), "2 rows"), ((3, {"x": x}, ["y"]), "'y'")):
        with pytest.raises(RequestError, match=fragment):
            buckets.run_padded(*arguments)
    with pytest.raises(RequestError, match="output 2"):
        buckets.run_padded(3, {"x": x}, ["x"], sliced=[2])
    with pytest.raises(RequestError, match="ascending"):
        rlx.BucketedCompileCache((8, 4), program)


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
