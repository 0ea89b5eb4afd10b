"""What a flow becomes when it is built: its HIR, bound to its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from rlx_jax.ir.graph import Graph, GraphStage, Param, TypeCache, Value
from rlx_jax.ir.param import WeightSource, keys_of, stored_keys
from rlx_jax.ir.types import TensorType, bind_path, path_text
from rlx_jax.profiles import CompileProfile

if TYPE_CHECKING:
    from rlx_jax.lowering.plan import Plan
    from rlx_jax.module import GraphModule

Weights = Any
"""A mapping of arrays or `jax.ShapeDtypeStruct`, a WeightSource, or a path."""

REQUIRED = "required"
POSITIONS = "positions"


@dataclass(frozen=True)
class InputDecl:
    """A declared input. `default`: REQUIRED, POSITIONS (0, 1, 2 …), a number, or None (absent: stages do without)."""

    name: str
    type: TensorType
    default: float | str | None = REQUIRED

    @property
    def optional(self) -> bool:
        return self.default != REQUIRED


@runtime_checkable
class Buildable(Protocol):
    """What can be compiled: a ModelFlow, a GraphModule or a BuiltModel."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> tuple[InputDecl, ...]: ...

    @property
    def binding(self) -> Mapping[str, int]: ...

    def build(self, weights: Weights = None, given: Iterable[str] = ()) -> BuiltModel: ...


@dataclass(frozen=True)
class BuiltModel:
    """A flow or a module after `build`: its graph and what building it learned. No weight data was read.

    `hir` is a MIR graph where a module at that level was built; `plan` is that of a module at LIR.
    """

    name: str
    hir: Graph
    source: WeightSource | None
    profile: CompileProfile | None
    types: TypeCache = field(repr=False)
    flow: Buildable = field(repr=False)
    keys_read: tuple[str, ...] = ()
    left_keys: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    binding: Mapping[str, int] = field(default_factory=dict)
    stage: GraphStage = GraphStage.HIR
    plan: Plan | None = None

    @staticmethod
    def from_hir(hir: Graph, weights: Weights = None) -> BuiltModel:
        """A HIR graph made by hand (`GraphModule.into_hir`), bound to weights."""
        from rlx_jax.module import GraphModule

        return GraphModule.from_hir(hir).build(weights)

    @staticmethod
    def from_graph(graph: Graph, weights: Weights = None) -> BuiltModel:
        """A MIR graph made by hand (`GraphModule.into_graph`), bound to weights."""
        from rlx_jax.module import GraphModule

        return GraphModule.from_graph(graph).build(weights)

    # -- as a flow ---------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """The declared inputs."""
        return self.flow.inputs

    def build(self, weights: Weights = None, given: Iterable[str] = ()) -> BuiltModel:
        """Built again: with other weights, or with other optional inputs given."""
        return self.flow.build(self.source if weights is None else weights, given)

    # -- looking -----------------------------------------------------------------------------

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.hir.output_names

    @property
    def primary_shape(self) -> tuple[Any, ...]:
        """Shape of the first output."""
        return self.hir.type(self.hir.outputs[0]).shape

    def readers(self) -> dict[str, str]:
        """Checkpoint key → path of the first block that reads it."""
        found: dict[str, str] = {}
        for inner, node in self.hir.walk():
            ops = (inner.nodes[value.node].op for value in node.inputs)
            for i, program in ((i, p) for op in ops if isinstance(op, Param) for i, p in enumerate(op.programs)):
                for key in keys_of(program):
                    found.setdefault(key, path_text(bind_path(node.origin.path, i)))
        return found

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every weight that is read, by checkpoint key."""
        programs = (p for leaf in self.hir.params() for p in leaf.programs)
        return {k.key: k.type.spec for program in programs for k in stored_keys(program)}

    # -- the graph inside --------------------------------------------------------------------

    def into_graph_module(self) -> GraphModule:
        """The graph as a module, to edit, print, lower or save."""
        from rlx_jax.module import GraphModule  # stands above: a module is built into a BuiltModel

        policy = self.profile.fusion.policy if self.profile else "direct"
        return GraphModule.of(self.hir, self.stage, self.types, policy=policy, plan=self.plan)

    def lower(self) -> GraphModule:
        """The module at MIR."""
        return self.into_graph_module().lower()

    def into_hir(self) -> Graph:
        """The HIR graph.

        Raises:
            LevelError: a module at MIR or LIR was built.
        """
        return self.into_graph_module().into_hir()

    def into_graph(self) -> Graph:
        """The MIR graph, lowered by the profile's policy."""
        return self.into_graph_module().into_graph()

    def into_parts(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """The HIR graph and `params`.

        Raises:
            LevelError: a module at MIR or LIR was built.
        """
        return self.into_hir(), self.params

    def into_graph_parts(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """The MIR graph and `params`."""
        return self.into_graph(), self.params

    def with_extra_hir_outputs(self, values: Sequence[Value]) -> BuiltModel:
        """The first output and `values` of the HIR graph, named `extra0`, `extra1` …; earlier extras are dropped.

        Raises:
            LevelError: a module at MIR or LIR was built.
        """
        hir = self.into_hir()
        module = self.into_graph_module()
        module.set_outputs([hir.outputs[0], *values], [hir.output_names[0], *(f"extra{i}" for i in range(len(values)))])
        made = module.build(self.source)
        return replace(made, profile=self.profile, left_keys=self.left_keys, binding=self.binding)
