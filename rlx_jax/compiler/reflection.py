"""What a program contains, as records: `HirReflection`, `MirReflection`, `ModelReflection`; see also `manifest.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlx_jax.compiler.compile_pipeline import CompilePipeline, CompileResult
from rlx_jax.compiler.execution import ModelComponent, choice_of
from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.compiler.manifest import ArrayShape, BindingManifest, ManifestDiff, shape_of
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.extensions import apply_hir_extensions
from rlx_jax.ir.graph import Graph, GraphStage
from rlx_jax.ir.param import printed_name
from rlx_jax.profiles import ProfileLike

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
            tuple(shape_of(graph.type(value)) for value in graph.outputs),
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
    chosen = choice_of(BlockSpecialization, choice, "choice")
    graph = hir_module(module).into_hir()
    found = ((number, label) for number, label in _composites(graph) if label in SPECIALIZED)
    return tuple((number, label, chosen) for number, label in found)


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
    found = GraphModule.from_hir(module) if isinstance(module, Graph) else module
    if not isinstance(found, GraphModule) or found.stage != GraphStage.HIR:
        raise GraphError(f"expected a program at hir, got {getattr(found, 'stage', type(found).__name__)}")
    return found


def _composites(graph: Graph) -> Iterator[tuple[int, str]]:
    """Yield the number, in its graph or region, and the kind of each composite block."""
    for number, node in enumerate(graph.nodes):
        label = COMPOSITES.get(type(node.op))
        if label is not None:
            yield number, label
        for region in node.op.regions():
            yield from _composites(region)
