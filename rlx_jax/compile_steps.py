"""The steps of a compile by name, for hosts that keep their own tables of programs; see docs/compile-steps.md."""

from rlx_jax.compiler.compile_pipeline import (
    BlockSpecialization,
    CompilePipeline,
    CompileResult,
    HirReflection,
    MirReflection,
    ModelReflection,
    probe_block_specialization,
    symbolic_layout_hint,
)
from rlx_jax.compiler.execution import (
    CompilationMode,
    ExecutionPreset,
    KernelDispatch,
    ModelComponent,
    ModelExecutionConfig,
    ModelVariant,
    Phase,
    compile_options_for,
)
from rlx_jax.compiler.manifest import BindingManifest, BoundArray, ManifestDiff, WeightBlock
from rlx_jax.runtime.aot_cache import AotCache
from rlx_jax.runtime.compile_caches import BucketedCompileCache, CompileCache, DynamicDimCompileCache
from rlx_jax.runtime.model_compile_pipeline import ModelCompilePipeline, Qwen35CompileCache, specialize_entry

__all__ = [
    "AotCache", "BindingManifest", "BlockSpecialization", "BoundArray", "BucketedCompileCache", "CompilationMode",
    "CompileCache", "CompilePipeline", "CompileResult", "DynamicDimCompileCache", "ExecutionPreset", "HirReflection",
    "KernelDispatch", "ManifestDiff", "MirReflection", "ModelCompilePipeline", "ModelComponent",
    "ModelExecutionConfig", "ModelReflection", "ModelVariant", "Phase", "Qwen35CompileCache", "WeightBlock",
    "compile_options_for", "layout_from_lir", "probe_block_specialization", "specialize_entry",
    "symbolic_layout_hint",
]  # fmt: skip

layout_from_lir = BindingManifest.from_lir
