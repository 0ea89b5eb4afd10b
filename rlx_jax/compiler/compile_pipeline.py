"""`CompilePipeline`: the compiler's steps on a `GraphModule`, one by one, and `CompileResult`, a planned program.

It runs the same passes and plans as `rlx_jax.compile`; `ModelCompilePipeline` adds the executables of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum

from rlx_jax.compiler.execution import ModelComponent, choice_of
from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.compiler.manifest import ArrayShape, BindingManifest, ManifestDiff, shape_of
from rlx_jax.compiler.passes import Job, pass_named
from rlx_jax.compiler.pipeline import Template, make_lir, make_template
from rlx_jax.compiler.settings import Settings, choose_settings, lowering_settings, with_target
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError, UnsupportedError, check_names, listing, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, GraphStage, Mir, TypeCache
from rlx_jax.ir.ops import OPS
from rlx_jax.ir.param import printed_name
from rlx_jax.ir.queries import dynamic_symbols
from rlx_jax.lowering.fusion import FusionReport, fusion_report
from rlx_jax.lowering.inspect.buffers import ALIGNMENT
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.plugins import active_plugin, apply_hir_extensions
from rlx_jax.profiles import CompileProfile, ProfileLike

__all__ = [
    "BlockSpecialization", "CompilePipeline", "CompileResult", "HirReflection", "MirReflection", "ModelReflection",
    "probe_block_specialization", "symbolic_layout_hint",
]  # fmt: skip


@dataclass(frozen=True)
class CompileResult:
    """A planned program, with symbolic sizes until it is specialised.

    Attributes:
        lir: the program and its plan.
        fusion: the fused and the missed patterns.
        template: the template that it comes from; None for a program that was planned before.
        binding: the size of each symbol, if it is specialised.
    """

    lir: Lir
    fusion: FusionReport
    template: Template | None = field(default=None, repr=False)
    settings: Settings | None = field(default=None, repr=False)
    binding: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(template: Template, settings: Settings) -> CompileResult:
        """Return the result of a template; of one without symbolic sizes, it is specialised."""
        result = CompileResult(Lir(template.mir, settings.plan), template.fusion, template, settings)
        return result if result.has_dynamic_dims else result.specialize({})

    @staticmethod
    def planned(lir: Lir) -> CompileResult:
        """Return the result of a program that was planned before, with an empty report."""
        return CompileResult(lir, fusion_report(lir.graph, lir.graph, ()))

    @property
    def dynamic_symbols(self) -> tuple[str, ...]:
        """Return the symbols without a size, sorted."""
        return dynamic_symbols(self.lir.graph)

    @property
    def has_dynamic_dims(self) -> bool:
        """Return whether any size is symbolic."""
        return bool(self.dynamic_symbols)

    def known_sizes(self, binding: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of symbols that the program has; a variant may have more."""
        return {name: size for name, size in binding.items() if name in self.dynamic_symbols}

    def specialize(self, binding: Mapping[str, int]) -> CompileResult:
        """Return the program with a size for each symbol, planned again.

        Raises:
            GraphError: the program is specialised already; a size is missing or unknown.
        """
        if self.template is None or self.settings is None or self.binding:
            raise GraphError(f"{self.lir.graph.name}: the program has all its sizes: specialise its template instead")
        self.template.check_sizes(binding)
        return replace(self, lir=make_lir(self.template, binding, self.settings), binding=dict(binding))

    def manifest(self, alignment: int = ALIGNMENT) -> BindingManifest:
        """Return the arrays that the program takes and returns."""
        return BindingManifest.from_lir(self.lir, alignment)


@dataclass(frozen=True)
class CompilePipeline:
    """The steps of the compiler for one target.

    Attributes:
        target: the platform or device, as `fusion.target` of a profile.
        profile: the other options; by default the defaults, with the module's fusion policy.
        arena_alignment: the multiple of bytes that computed values begin at in `manifest`.
        assert_fusion_clean: whether a pattern that a pass matches and cannot fuse is an error.
        supported_ops: the kinds of ops that a planned program may have, such as "MatMul"; None for all.
    """

    target: str = "cpu"
    profile: ProfileLike | None = None
    arena_alignment: int = ALIGNMENT
    assert_fusion_clean: bool = False
    supported_ops: Collection[str] | None = None

    def lower_hir(self, module: GraphModule) -> GraphModule:
        """Return a module at HIR lowered to MIR and verified; another one unchanged."""
        return module.lower()

    def preprocess_mir(self, module: GraphModule) -> GraphModule:
        """Return a module at MIR without dead code. Control flow stays: JAX runs it natively.

        Raises:
            GraphError: the module is at another level.
        """
        graph, types = _mir(module), TypeCache()
        return GraphModule.from_graph(pass_named("dce")(graph, Job(lowering_settings(), types)).graph)

    def optimize_with_report(self, module: GraphModule) -> tuple[GraphModule, FusionReport]:
        """Return a module at MIR after all passes, with the fused and the missed patterns.

        Raises:
            GraphError: the module is at another level. FusionError, UnsupportedError: as `compile_module`.
        """
        _mir(module)
        result = self.compile_module(module)
        assert result.template is not None
        return GraphModule.from_graph(result.template.mir), result.fusion

    def plan_lir(self, module: GraphModule) -> Lir:
        """Return the plan of a module at MIR, without further passes.

        Raises:
            GraphError: the module is at another level.
        """
        built = replace(module.build(), hir=_mir(module))
        settings = replace(lowering_settings(target=self.target), plan=self._settings(module).plan)
        return CompileResult.of(make_template(built, settings, "forward"), settings).lir

    def specialize_lir(self, result: CompileResult, binding: Mapping[str, int]) -> Lir:
        """Return the planned program with a size for each symbol; raises as `CompileResult.specialize`."""
        return result.specialize(binding).lir

    def compile_hir(self, hir: Graph) -> CompileResult:
        """Return the planned program of a HIR graph; raises as `compile_module`."""
        return self.compile_module(GraphModule.from_hir(hir))

    def compile_mir(self, graph: Graph) -> CompileResult:
        """Return the planned program of a MIR graph; raises as `compile_module`."""
        return self.compile_module(GraphModule.from_graph(graph))

    def compile_module(self, module: GraphModule) -> CompileResult:
        """Return the planned program of a module at any level; a module at LIR passes through with an empty report.

        Raises:
            GraphError: the module is not valid; or it is at LIR, and there is a profile.
            ProfileError: the profile does not fit the target.
            FusionError: `assert_fusion_clean`, and a pattern is not fused.
            UnsupportedError: the program has an op that is not in `supported_ops`.
        """
        if (lir := module.as_lir()) is not None:
            if self.profile is not None:
                raise GraphError(f"module {module.name!r} is at lir: it is planned already, and takes no profile")
            result = CompileResult.planned(lir)
        else:
            settings = self._settings(module)
            result = CompileResult.of(make_template(module.build(), settings, "forward"), settings)
        self._check_ops(result.lir.graph)
        return result

    def manifest(self, result: CompileResult) -> BindingManifest:
        """Return the arrays that a planned program takes and returns, at this alignment."""
        return result.manifest(self.arena_alignment)

    def _settings(self, module: GraphModule) -> Settings:
        """Return the settings for a module: the profile, on this target.

        Raises:
            ProfileError: the profile is for another target.
        """
        built = module.build()
        profile = CompileProfile.of(self.profile) if self.profile is not None else built.profile or CompileProfile()
        profile = with_target(profile, self.target, "the target of the pipeline")
        changes = {"assert_clean": self.assert_fusion_clean or profile.fusion.assert_clean}
        return choose_settings(built, profile.replace(fusion=changes), False, "forward")

    def _check_ops(self, graph: Graph) -> None:
        """Check that a program has supported ops alone.

        Raises:
            UnsupportedError: it has others. GraphError: there is no op of a name in `supported_ops`.
        """
        if self.supported_ops is None:
            return
        if isinstance(self.supported_ops, str):
            raise GraphError(f"supported_ops: expected a list of names, got the text {quote(self.supported_ops)}")
        existing = [*(op.__name__ for op in OPS), *(op.__name__ for op in active_plugin().op_classes().values())]
        check_names(self.supported_ops, existing, "supported_ops: there is no op", "; there are")
        kinds = dict.fromkeys(type(node.op).__name__ for _, node in graph.walk() if isinstance(node.op, Mir))
        if missing := [kind for kind in kinds if kind not in self.supported_ops]:
            allowed = listing(sorted(self.supported_ops)) or "none"
            raise UnsupportedError(f"{graph.name}: it has ops {listing(missing)}; supported_ops are {allowed}")


def _mir(module: GraphModule) -> Graph:
    """Return the graph of a module at MIR.

    Raises:
        GraphError: the module is at another level.
    """
    if module.stage != GraphStage.MIR:
        raise GraphError(f"module {module.name!r} is at {module.stage}; expected one at mir: lower_hir(module)")
    return module.into_graph()


# What a program contains, as records: `HirReflection`, `MirReflection`, `ModelReflection`; see also `manifest.py`.


# The blocks of several ops, by the name that reflections give them.
COMPOSITES = {
    hir.LlamaDecoderBlock: "LlamaDecoderBlock", hir.SwiGLU: "SwiGLU", hir.Attention: "Attention",
    hir.GatedDelta: "GatedDeltaNet", hir.Qwen35MtpHead: "Qwen35MtpHead",
}  # fmt: skip
# Those of them that `probe_block_specialization` lists.
SPECIALIZED = ("LlamaDecoderBlock", "SwiGLU", "GatedDeltaNet")


@dataclass(frozen=True)
class HirReflection:
    """A program at HIR.

    Attributes:
        name, node_count, fusion_policy: of the module.
        inputs, params: names and shapes; symbolic sizes are names.
        outputs: the shapes of the outputs.
        composites: the kind of each composite block, in order; a repeated layer counts once.
    """

    name: str
    node_count: int
    fusion_policy: str
    inputs: tuple[tuple[str, ArrayShape], ...]
    params: tuple[tuple[str, ArrayShape], ...]
    outputs: tuple[ArrayShape, ...]
    composites: tuple[str, ...]

    @staticmethod
    def from_hir(module: GraphModule | Graph) -> HirReflection:
        """Return the reflection of a module at HIR, or of a HIR graph, which has the policy `direct`.

        Raises:
            GraphError: it is at another level.
        """
        module = hir_module(module)
        graph = module.into_hir()
        programs = dict.fromkeys(program for param in graph.params() for program in param.programs)
        return HirReflection(
            graph.name,
            len(graph.nodes),
            module.policy,
            tuple((i.input, shape_of(i.type)) for i in graph.inputs),
            tuple((printed_name(program), shape_of(program.type)) for program in programs),
            tuple(map(shape_of, graph.output_types)),
            tuple(label for _, label in _composites(graph)),
        )


@dataclass(frozen=True)
class MirReflection:
    """A program at MIR: its name, its number of nodes, and how often each kind of op occurs, by name."""

    name: str
    node_count: int
    op_kinds: tuple[tuple[str, int], ...]

    @staticmethod
    def from_mir(module: GraphModule | Graph) -> MirReflection:
        """Return the reflection of a MIR graph, or of a module at MIR or LIR.

        Raises:
            GraphError: a module at HIR.
        """
        graph = module.graph if isinstance(module, GraphModule) else module
        kinds = Counter(type(node.op).__name__ for _, node in graph.walk())
        return MirReflection(graph.name, len(graph.nodes), tuple(sorted(kinds.items())))


class BlockSpecialization(StrEnum):
    """How a composite block would run."""

    DEFAULT = "default"
    FUSED_TRANSFORMER_LAYER = "fused_transformer_layer"
    UNFUSED_PRIMITIVES = "unfused_primitives"


def probe_block_specialization(
    module: GraphModule | Graph, choice: BlockSpecialization | str = BlockSpecialization.DEFAULT
) -> tuple[tuple[int, str, BlockSpecialization], ...]:
    """Return node number, kind and `choice` of each decoder layer, SwiGLU and gated delta net; nothing is changed.

    Raises:
        GraphError: it is no program at HIR. ProfileError: there is no such choice.
    """
    specialization = choice_of(BlockSpecialization, choice, "choice")
    composites = _composites(hir_module(module).into_hir())
    return tuple((number, label, specialization) for number, label in composites if label in SPECIALIZED)


def symbolic_layout_hint(binding: Mapping[str, int]) -> str:
    """Return a binding as text, such as `batch=2, seq=16`, in order of the symbols."""
    return ", ".join(f"{name}={size}" for name, size in sorted(binding.items())) or "no symbols"


@dataclass(frozen=True)
class ModelReflection:
    """A program at HIR and, after `load_hir_template`, its template.

    Attributes:
        hir: what it contains at HIR.
        template: the planned program with symbolic sizes; None without one.
    """

    hir: HirReflection
    template: CompileResult | None = None

    @staticmethod
    def from_hir(module: GraphModule | Graph) -> ModelReflection:
        """Return the reflection at HIR alone."""
        return ModelReflection(HirReflection.from_hir(module))

    @staticmethod
    def load_hir_template(
        device: str, module: GraphModule | Graph, profile: ProfileLike | None = None
    ) -> ModelReflection:
        """Return the reflection with the template for a device; raises as `CompilePipeline.compile_module`."""
        module = hir_module(module)
        return ModelReflection(HirReflection.from_hir(module), CompilePipeline(device, profile).compile_module(module))

    @staticmethod
    def load_hir_template_with_extensions(
        device: str, module: GraphModule | Graph, profile: ProfileLike | None = None
    ) -> ModelReflection:
        """Return `load_hir_template` after all registered extensions of HIR."""
        module = hir_module(module)
        extended = GraphModule.from_hir(apply_hir_extensions(module.into_hir()), module.policy)
        return ModelReflection.load_hir_template(device, extended, profile)

    @property
    def has_template(self) -> bool:
        """Return whether there is a template."""
        return self.template is not None

    def mir_summary(self) -> MirReflection | None:
        """Return what the template contains at MIR; None without one."""
        return None if self.template is None else MirReflection.from_mir(self.template.lir.graph)

    def template_layout(self) -> BindingManifest | None:
        """Return the manifest of the template; None without one."""
        return None if self.template is None else self.template.manifest()

    def layout_for_component(self, component: ModelComponent) -> BindingManifest | None:
        """Return the manifest with the sizes of a component; None without a template.

        Raises:
            GraphError, ShapeError: a symbol of the program has no size.
        """
        if self.template is None or not self.template.has_dynamic_dims:
            return self.template_layout()
        return self.template.specialize(self.template.known_sizes(component.dim_binding())).manifest()

    def manifest_diff_for_component(self, component: ModelComponent) -> ManifestDiff | None:
        """Return what the sizes of a component change in the manifest; None without a template."""
        template, specialised = self.template_layout(), self.layout_for_component(component)
        return None if template is None or specialised is None else ManifestDiff.compare(template, specialised)


def hir_module(module: GraphModule | Graph) -> GraphModule:
    """Return a module at HIR, of a HIR graph with the policy `direct`.

    Raises:
        GraphError: it is at another level, or no program.
    """
    module = GraphModule.from_hir(module) if isinstance(module, Graph) else module
    if not isinstance(module, GraphModule) or module.stage != GraphStage.HIR:
        raise GraphError(f"expected a program at hir, got {getattr(module, 'stage', type(module).__name__)}")
    return module


def _composites(graph: Graph) -> Iterator[tuple[int, str]]:
    """Yield the number, in its graph or region, and the kind of each composite block."""
    for number, node in enumerate(graph.nodes):
        label = COMPOSITES.get(type(node.op))
        if label is not None:
            yield number, label
        for region in node.op.regions():
            yield from _composites(region)
