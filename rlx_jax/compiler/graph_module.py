"""`GraphModule`: a program at one level (HIR, MIR or LIR) that is built by hand, printed, lowered and compiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import jax

from rlx_jax.compiler.module_builder import ModuleBuilder
from rlx_jax.compiler.passes import Job, run_passes
from rlx_jax.compiler.pipeline import lir_of
from rlx_jax.compiler.settings import FUSION_POLICIES, choose_profile, plain
from rlx_jax.errors import FormatError, GraphError, VersionMismatchError, check_known, quote, shown
from rlx_jax.io.strict_json import parse_object
from rlx_jax.ir import queries
from rlx_jax.ir.graph import Builder, Graph, GraphStage, Node, TypeCache, Value
from rlx_jax.ir.packed import PackedSpec, packed_types
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.rewrite import bind_params
from rlx_jax.ir.serial import decode, decode_graph, encode, encode_graph, object_with, one_of
from rlx_jax.ir.text import block_paths, dump
from rlx_jax.ir.types import as_dim, as_names
from rlx_jax.ir.user_functions import Captured
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.lowering.lir.plan import Lir, Plan
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.program import Built, InputDecl, Weights
from rlx_jax.weights.source import open_weights

FORMAT, VERSION = "rlx_jax.graph", 1


class GraphModule(ModuleBuilder):
    """A graph that is being built. `len(module)` is its number of nodes. `rlx_jax.compile` takes it like a flow.

    >>> m = GraphModule.define("m", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8))))
    >>> str(m.stage), len(m), str(m.lower().stage)
    ('hir', 3, 'mir')
    """

    # -- opening -----------------------------------------------------------------------------

    @staticmethod
    def hir(name: str) -> GraphModule:
        """An empty HIR module."""
        return GraphModule(name, GraphStage.HIR, Builder(name, TypeCache()))

    @staticmethod
    def mir(name: str) -> GraphModule:
        """An empty MIR module."""
        return GraphModule(name, GraphStage.MIR, Builder(name, TypeCache()))

    @staticmethod
    def define(name: str, build: Callable[[GraphModule], Value]) -> GraphModule:
        """A HIR module whose only output is what `build` returns."""
        module = GraphModule.hir(name)
        return module.finish_hir(build(module))

    @staticmethod
    def from_hir(graph: Graph, policy: str = "direct") -> GraphModule:
        """A module that goes on from a HIR graph."""
        return GraphModule.of(graph, GraphStage.HIR, policy=policy)

    @staticmethod
    def from_graph(graph: Graph) -> GraphModule:
        """A module that goes on from a MIR graph."""
        return GraphModule.of(graph, GraphStage.MIR)

    from_mir = from_graph

    @staticmethod
    def wrap_mir_graph(graph: Graph) -> GraphModule:
        """Return a HIR module of the tensor ops of a MIR graph; its inputs and parameters keep their names."""
        return GraphModule.of(graph, GraphStage.HIR)

    @staticmethod
    def from_lir(lir: Lir) -> GraphModule:
        """A module around a planned program."""
        if not isinstance(lir, Lir):
            raise GraphError(f"expected a planned program, as into_lir gives it; got {type(lir).__name__}")
        return GraphModule.of(lir.graph, GraphStage.LIR, plan=lir.plan)

    @staticmethod
    def of(
        graph: Graph,
        stage: GraphStage,
        types: TypeCache | None = None,
        policy: str = "direct",
        plan: Plan | None = None,
    ) -> GraphModule:
        """A module around a finished graph.

        Raises:
            GraphError: the graph is not a valid one of that level; all problems are listed.
        """
        if not isinstance(graph, Graph):
            raise GraphError(f"expected a graph, as into_hir and into_graph give it; got {type(graph).__name__}")
        builder = Builder.resume(graph, types or TypeCache())
        verify(graph, stage, "opening", builder.types)
        opened = GraphModule(graph.name, stage, builder, list(graph.outputs), graph.output_names, policy, plan)
        return replace(opened, taken=block_paths(graph))

    # -- levels ------------------------------------------------------------------------------

    @property
    def fusion_policy(self) -> str | None:
        """How blocks will become tensor ops: `direct` or `fusable`. None below HIR."""
        return self.policy if self.stage == GraphStage.HIR else None

    def with_fusion_policy(self, policy: str) -> GraphModule:
        """Set the policy; the module.

        Raises:
            GraphError: the module is below HIR.
        """
        if self.stage != GraphStage.HIR:
            raise GraphError(f"module {self.name!r} is at {self.stage}: a fusion policy is for blocks, at hir")
        if policy not in FUSION_POLICIES:
            raise GraphError(f"unknown fusion policy {quote(policy)}; expected one of {', '.join(FUSION_POLICIES)}")
        self.policy = str(policy)
        return self

    def lower(self) -> GraphModule:
        """HIR → MIR; MIR and LIR as they are."""
        if self.stage != GraphStage.HIR:
            return self
        types = self.builder.types
        ran = run_passes(self.finish(), Job(plain(self.policy), types), stop="lower")
        return GraphModule.of(ran.graph, GraphStage.MIR, types)

    lower_to_mir = lower

    def lower_for_autodiff(self) -> GraphModule:
        """Return the module lowered by the policy `fusable`: every block as its own chain of tensor ops."""
        return self.lower() if self.stage != GraphStage.HIR else replace(self, policy="fusable").lower()

    def into_hir(self) -> Graph:
        """The HIR graph.

        Raises:
            GraphError: the module is below HIR; there is no way back up.
        """
        if self.stage != GraphStage.HIR:
            raise GraphError(f"module {self.name!r} is at {self.stage}; there is no way back to HIR")
        return self.finish()

    def into_graph(self) -> Graph:
        """The MIR graph: HIR is lowered, the plan of LIR is dropped."""
        return self.lower().finish()

    into_mir = into_graph

    def into_lir(self, profile: ProfileLike | None = None, **sizes: int) -> Lir:
        """The planned program: lowered, optimised and specialised as `rlx_jax.compile` does it.

        `sizes` are those of the symbolic dimensions.

        Raises:
            GraphError: a symbolic dimension has no size, or it is LIR already and given a profile or sizes.
        """
        if self.plan is not None:
            if profile is not None or sizes:
                raise GraphError(f"module {self.name!r} is at lir: it is planned already; start from its into_mir()")
            return Lir(self.finish(), self.plan)
        known = sorted({s for i in self.builder.inputs for s in i.type.symbols})
        check_known(sizes, known, f"{self.name}: no input has a dimension", "; there are")
        for name, size in sizes.items():
            as_dim(size, f"{self.name}: {name}")
        return lir_of(self.build(), profile, sizes)

    def as_hir(self) -> Graph | None:
        """The graph as it is, at HIR; else None."""
        return self._snapshot() if self.stage == GraphStage.HIR else None

    def as_hir_mut(self) -> GraphModule | None:
        """Return the module itself, to go on building, at HIR; else None."""
        return self if self.stage == GraphStage.HIR else None

    def as_graph(self) -> Graph | None:
        """The graph as it is, at MIR and LIR; else None."""
        return self._snapshot() if self.stage != GraphStage.HIR else None

    as_mir = as_graph

    def as_lir(self) -> Lir | None:
        """The graph as it is and its plan, at LIR; else None."""
        return Lir(self._snapshot(), self.plan) if self.plan is not None else None

    @property
    def graph(self) -> Graph:
        """The MIR graph as it is.

        Raises:
            GraphError: the module is at HIR.
        """
        found = self.as_graph()
        if found is None:
            raise GraphError(f"module {self.name!r} is at hir, so it has no MIR graph yet: lower() it, or use as_hir()")
        return found

    # -- looking -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.builder.nodes)

    def node_label(self, value: Value) -> str:
        """What a value is called: the label of the block it comes from, else its block path, else its id."""
        origin = self.builder.nodes[self.own(value).node].origin
        return origin.label or path_text(origin.path) or f"%{value.node}"

    def node(self, value: Value) -> Node:
        """Return the node of a value: its op, inputs, types and origin."""
        return self.builder.nodes[self.own(value).node]

    def verify(self) -> tuple[str, ...]:
        """Return what is wrong with the graph, one text for each problem, with node, op and block path."""
        try:
            self.finish()
        except GraphError as error:
            return error.problems or (str(error),)
        return ()

    verify_shapes = verify_all = verify

    def users(self, value: Value) -> tuple[Value, ...]:
        """The first results of the nodes that read the node of a value, in order."""
        return tuple(self.wrap(Value(n)) for n in queries.users(self._snapshot(), self.own(value).node))

    def use_count(self, value: Value) -> int:
        """How often results of the node of a value are read, as operands and as outputs."""
        return queries.use_count(self._snapshot(), self.own(value).node)

    def topo_order(self) -> tuple[Value, ...]:
        """The first result of every node, operands before those that read them."""
        return tuple(self.wrap(Value(n)) for n in range(len(self._snapshot().nodes)))

    def reverse_topo(self) -> tuple[Value, ...]:
        """The same, readers first."""
        return self.topo_order()[::-1]

    @property
    def dynamic_symbols(self) -> tuple[str, ...]:
        """The names of the sizes that are open, sorted."""
        return queries.dynamic_symbols(self._snapshot())

    @property
    def has_dynamic_dims(self) -> bool:
        """Whether any size is open."""
        return bool(self.dynamic_symbols)

    def bind(self, **sizes: int) -> GraphModule:
        """The module with sizes for some of its symbols, at its level; this one stays as it is.

        Raises:
            GraphError: it has no such symbol, a size is no size, or it is at LIR, which has sizes.
        """
        if self.plan is not None:
            raise GraphError(f"module {self.name!r} is at lir: its sizes are bound already")
        for name, size in sizes.items():
            as_dim(size, f"{self.name}: {name}")
        types = self.builder.types
        return GraphModule.of(queries.bind(self.finish(), sizes, types), self.stage, types, self.policy)

    # -- putting together --------------------------------------------------------------------

    def inline(
        self, other: GraphModule, inputs: Mapping[str, Value], params: Mapping[str, Value] | None = None
    ) -> tuple[Value, ...]:
        """Append another module of this level, its inputs (and `params`, if given) bound by name; its outputs here.

        Raises:
            GraphError: it is at another level; or as `rlx_jax.ir.queries.inline_into`.
        """
        if not isinstance(other, GraphModule) or other.stage != self.stage:
            found = other.stage if isinstance(other, GraphModule) else shown(other)
            raise GraphError(f"module {self.name!r} is at {self.stage}; expected another one there, got {found}")
        given = {name: self.own(value) for name, value in inputs.items()}
        bound = None if params is None else {name: self.own(value) for name, value in params.items()}
        return tuple(map(self.wrap, queries.inline_into(self.builder, other.finish(), given, bound)))

    def promote_params_to_inputs(self, names: Iterable[str]) -> GraphModule:
        """A module whose parameters of these keys are inputs, behind its own; see `rlx_jax.ir.queries`."""
        types = self.builder.types
        graph = queries.promote_params_to_inputs(self.finish(), as_names(names, f"{self.name}: promote"), types)
        return GraphModule.of(graph, self.stage, types, self.policy)

    def inspect(self) -> str:
        """The dump of the graph as it is; at LIR with plan, buffers and fingerprint."""
        lir = self.as_lir()
        if lir is not None:
            return dump_lir(lir)
        return dump(self._snapshot(), self.stage, f", fusion={self.policy}" if self.stage == GraphStage.HIR else "")

    def __str__(self) -> str:
        return f"lir @{self.name}" if self.stage == GraphStage.LIR else self.inspect()

    def to_json(self) -> str:
        """The module as JSON, whole: graph, level, policy and plan. The same module gives the same text.

        Raises:
            UnsupportedError: it calls a Python function of the user (`emit.jax`); the message names the block.
        """
        head = {
            "format": FORMAT,
            "version": VERSION,
            "level": str(self.stage),
            "policy": self.policy,
            "plan": None if self.plan is None else encode(self.plan),
            "graph": encode_graph(self.finish()),
        }
        return json.dumps(head, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> GraphModule:
        """A module from `to_json`'s text. Nothing in it is trusted and nothing is imported.

        Raises:
            FormatError, GraphError: the text is not a valid module; the message names the place.
            VersionMismatchError: written by another version of the format.
        """
        if not isinstance(text, str | bytes):
            raise FormatError(f"graph JSON: expected to_json's text, got {type(text).__name__}")
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        data = parse_object(raw, "graph JSON", FormatError)
        one_of("graph JSON: format", data.get("format"), (FORMAT,))
        if data.get("version") != VERSION or isinstance(data["version"], bool):
            found = shown(data.get("version"))
            raise VersionMismatchError(f"graph JSON: version is {found}; this release reads version {VERSION} alone")
        head = object_with({"format", "version", "level", "policy", "plan", "graph"}, data, "graph JSON")
        stage = GraphStage(one_of("graph JSON: level", head["level"], tuple(GraphStage)))
        policy = one_of("graph JSON: policy", head["policy"], FUSION_POLICIES)
        plan = decode(Plan if stage == GraphStage.LIR else NoneType, head["plan"], "plan")
        types = TypeCache()
        return GraphModule.of(decode_graph(head["graph"], types), stage, types, policy, plan)

    # -- as a flow ---------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """The declared inputs."""
        return tuple(InputDecl(i.input, i.type) for i in self.builder.inputs)

    _inputs = inputs

    @property
    def _binding(self) -> Mapping[str, int]:
        """No sizes are chosen ahead."""
        return {}

    def build(self, weights: Weights = None, given: Iterable[str] = (), captured: Captured | None = None) -> BuiltModel:
        """The graph bound to weights, as `ModelFlow.build` gives it. Shapes are read, data is not.

        Raises:
            MissingWeightError, WeightShapeError: a parameter is not in the source, or has another shape there.
        """
        source = None if weights is None else open_weights(weights)
        graph = self.finish()
        if source is not None:
            graph = bind_params(graph, source, self.builder.types)
        keys = dict.fromkeys(k for leaf in graph.params() for p in leaf.programs for k in keys_of(p))
        profile = CompileProfile().replace(fusion={"policy": self.policy})
        types, stage = self.builder.types, self.stage
        left = self.plan.unread if self.plan else ()
        return BuiltModel(
            self.name, graph, source, profile, types, self, tuple(keys), left, stage=stage, plan=self.plan,
            captured=captured or Captured(),
        )  # fmt: skip


@dataclass(frozen=True)
class BuiltModel(Built):
    """What `build` returns: the record that the compiler reads, and its graph as a module to edit.

    `contracts` is what the stages of a flow promised; see `ModelFlow.contracts`.
    """

    contracts: tuple[Any, ...] = ()

    @staticmethod
    def from_hir(hir: Graph, weights: Weights = None) -> BuiltModel:
        """A HIR graph made by hand (`GraphModule.into_hir`), bound to weights."""
        return GraphModule.from_hir(hir).build(weights)

    @staticmethod
    def from_graph(graph: Graph, weights: Weights = None) -> BuiltModel:
        """A MIR graph made by hand (`GraphModule.into_graph`), bound to weights."""
        return GraphModule.from_graph(graph).build(weights)

    @property
    def typed_params(self) -> tuple[tuple[str, int, str], ...]:
        """Return the packed weights that are read: key, number of bytes, and the dtype of these bytes, `u8`."""
        specs = ((key, self.source.spec(key)) for key in self.keys_read if self.source and self.source.has(key))
        packed = ((key, spec) for key, spec in specs if isinstance(spec, PackedSpec))
        return tuple((key, packed_types(s.shape, s.dtype, s.scheme, key)[1].nbytes, "u8") for key, s in packed)

    def with_execution_config(self, config: Any) -> BuiltModel:
        """Return the same program with the profile of `config`: what its `compile_profile()` returns, or a profile.

        Raises:
            ProfileError: it is neither.
        """
        get_profile = getattr(config, "compile_profile", None)
        profile = get_profile() if callable(get_profile) else get_profile or config
        return replace(self, profile=CompileProfile.of(profile, f"{self.name}: "))

    def into_graph_module(self) -> GraphModule:
        """The graph as a module, to edit, print, lower or save: that of the program that the flow asks for.

        Raises:
            DeriveError: it asks to be `explicit` and cannot.
        """
        policy, graph = choose_profile(self, None).fusion.policy, self.hir
        if self.program != "forward":
            graph = run_passes(graph, Job(plain(policy), self.types, self.program), stop="derive").graph
        return GraphModule.of(graph, self.stage, self.types, policy=policy, plan=self.plan)

    def lower(self) -> GraphModule:
        """The module at MIR."""
        return self.into_graph_module().lower()

    def into_hir(self) -> Graph:
        """The HIR graph.

        Raises:
            GraphError: a module at MIR or LIR was built.
        """
        return self.into_graph_module().into_hir()

    def into_graph(self) -> Graph:
        """The MIR graph, lowered by the profile's policy."""
        return self.into_graph_module().into_graph()

    def into_parts(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """The HIR graph and `params`.

        Raises:
            GraphError: a module at MIR or LIR was built.
        """
        return self.into_hir(), self.params

    def into_graph_parts(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """The MIR graph and `params`."""
        return self.into_graph(), self.params

    def with_extra_hir_outputs(self, values: Sequence[Value]) -> BuiltModel:
        """The first output and `values` of the HIR graph, named `extra0`, `extra1` …; earlier extras are dropped.

        Raises:
            GraphError: a module at MIR or LIR was built.
        """
        if self.program != "forward":
            raise GraphError(f"{self.name}: {self.program} has a graph of its own: into_graph_module().set_outputs(…)")
        hir = self.into_hir()
        module = self.into_graph_module()
        module.set_outputs([hir.outputs[0], *values], [hir.output_names[0], *(f"extra{i}" for i in range(len(values)))])
        made = module.build(self.source)
        return replace(made, profile=self.profile, left_keys=self.left_keys, binding=self.binding)
