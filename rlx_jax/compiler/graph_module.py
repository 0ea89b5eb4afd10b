"""This module defines `GraphModule`, a program at one level (HIR, MIR or LIR), and `BuiltModel`, the result of a build.

A `GraphModule` is built by hand, printed, edited, lowered, saved as JSON, and compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import jax

from rlx_jax.compiler.module_builder import ModuleBuilder
from rlx_jax.compiler.passes import Job, run_passes
from rlx_jax.compiler.pipeline import lir_of
from rlx_jax.compiler.settings import FUSION_POLICIES, choose_profile, lowering_settings
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import FormatError, GraphError, VersionMismatchError, check_names, quote, shown
from rlx_jax.io.files import parse_object
from rlx_jax.ir import queries
from rlx_jax.ir.graph import Builder, Graph, GraphStage, Node, TypeCache, Value
from rlx_jax.ir.packed import PackedSpec, packed_types
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import bind_params
from rlx_jax.ir.serial import decode, decode_graph, encode, encode_graph, object_with, one_of
from rlx_jax.ir.text import block_paths, dump
from rlx_jax.ir.types import as_dim, as_names
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.lowering.lir.plan import Lir, Plan
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.program import Built, InputDecl, Weights
from rlx_jax.weights.source import open_weights

FORMAT, VERSION = "rlx_jax.graph", 1


class GraphModule(ModuleBuilder):
    """A graph under construction, which `rlx_jax.compile` takes like a flow. `len(module)` is its number of nodes.

    >>> m = GraphModule.define("m", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8))))
    >>> str(m.stage), len(m), str(m.lower().stage)
    ('hir', 3, 'mir')
    """

    # -- construction ------------------------------------------------------------------------

    @staticmethod
    def hir(name: str) -> GraphModule:
        """Return an empty HIR module."""
        return GraphModule(name, GraphStage.HIR, Builder(name, TypeCache()))

    @staticmethod
    def mir(name: str) -> GraphModule:
        """Return an empty MIR module."""
        return GraphModule(name, GraphStage.MIR, Builder(name, TypeCache()))

    @staticmethod
    def define(name: str, build: Callable[[GraphModule], Value]) -> GraphModule:
        """Return a HIR module with the value that `build` returns as its only output."""
        module = GraphModule.hir(name)
        return module.finish_hir(build(module))

    @staticmethod
    def from_hir(graph: Graph, policy: str = "direct") -> GraphModule:
        """Return a module that continues a HIR graph."""
        return GraphModule.of(graph, GraphStage.HIR, policy=policy)

    @staticmethod
    def from_graph(graph: Graph) -> GraphModule:
        """Return a module that continues a MIR graph."""
        return GraphModule.of(graph, GraphStage.MIR)

    from_mir = from_graph

    @staticmethod
    def wrap_mir_graph(graph: Graph) -> GraphModule:
        """Return a HIR module with the tensor ops of a MIR graph; inputs and parameters keep their names."""
        return GraphModule.of(graph, GraphStage.HIR)

    @staticmethod
    def from_lir(lir: Lir) -> GraphModule:
        """Return a module of a planned program.

        Raises:
            GraphError: `lir` is no planned program.
        """
        if not isinstance(lir, Lir):
            raise GraphError(f"expected a planned program, as into_lir returns it; got {type(lir).__name__}")
        return GraphModule.of(lir.graph, GraphStage.LIR, plan=lir.plan)

    @staticmethod
    def of(
        graph: Graph, stage: GraphStage, types: TypeCache | None = None, policy: str = "direct",
        plan: Plan | None = None,
    ) -> GraphModule:  # fmt: skip
        """Return a module of a finished graph.

        Args:
            graph: the graph.
            stage: its level.
            types: the cache of types that its values belong to; None for a new one.
            policy: the fusion policy.
            plan: the plan of a graph at LIR.

        Raises:
            GraphError: the graph is not valid at that level; the message lists all problems.
        """
        if not isinstance(graph, Graph):
            raise GraphError(f"expected a graph, as into_hir and into_graph return it; got {type(graph).__name__}")
        builder = Builder.resume(graph, types or TypeCache())
        verify(graph, stage, "opening", builder.types)
        module = GraphModule(graph.name, stage, builder, list(graph.outputs), graph.output_names, policy, plan)
        return replace(module, used_paths=block_paths(graph))

    # -- levels ------------------------------------------------------------------------------

    @property
    def fusion_policy(self) -> str | None:
        """Return the policy by which blocks are lowered to tensor ops, `direct` or `fusable`; None below HIR."""
        return self.policy if self.stage == GraphStage.HIR else None

    def with_fusion_policy(self, policy: str) -> GraphModule:
        """Set the fusion policy, and return the module.

        Raises:
            GraphError: the module is below HIR, or there is no such policy.
        """
        if self.stage != GraphStage.HIR:
            raise GraphError(f"module {self.name!r} is at {self.stage}: a fusion policy is for blocks, at hir")
        if policy not in FUSION_POLICIES:
            raise GraphError(f"unknown fusion policy {quote(policy)}; expected one of {', '.join(FUSION_POLICIES)}")
        self.policy = str(policy)
        return self

    def lower(self) -> GraphModule:
        """Return the module lowered from HIR to MIR; a module at MIR or LIR is returned unchanged."""
        if self.stage != GraphStage.HIR:
            return self
        types = self.builder.types
        result = run_passes(self.finish(), Job(lowering_settings(self.policy), types), stop="lower")
        return GraphModule.of(result.graph, GraphStage.MIR, types)

    lower_to_mir = lower

    def lower_for_autodiff(self) -> GraphModule:
        """Return the module lowered by the policy `fusable`, which expands every block into a chain of tensor ops."""
        return self.lower() if self.stage != GraphStage.HIR else replace(self, policy="fusable").lower()

    def into_hir(self) -> Graph:
        """Return the HIR graph.

        Raises:
            GraphError: the module is below HIR; lowering cannot be undone.
        """
        if self.stage != GraphStage.HIR:
            raise GraphError(f"module {self.name!r} is at {self.stage}; there is no way back to HIR")
        return self.finish()

    def into_graph(self) -> Graph:
        """Return the MIR graph: a module at HIR is lowered, and the plan of a module at LIR is dropped."""
        return self.lower().finish()

    into_mir = into_graph

    def into_lir(self, profile: ProfileLike | None = None, **sizes: int) -> Lir:
        """Return the planned program, lowered, optimized and specialized as by `rlx_jax.compile`.

        Args:
            profile: as for `rlx_jax.compile`.
            sizes: the sizes of the symbolic dimensions.

        Raises:
            GraphError: a symbolic dimension has no size, or a module at LIR gets a profile or sizes.
        """
        if self.plan is not None:
            if profile is not None or sizes:
                raise GraphError(f"module {self.name!r} is at lir: it is planned already; start from its into_mir()")
            return Lir(self.finish(), self.plan)
        symbols = sorted({s for i in self.builder.inputs for s in i.type.symbols})
        check_names(sizes, symbols, f"{self.name}: no input has a dimension", "; there are")
        for name, size in sizes.items():
            as_dim(size, f"{self.name}: {name}")
        return lir_of(self.build(), profile, sizes)

    def as_hir(self) -> Graph | None:
        """Return the unverified graph of a module at HIR, else None."""
        return self._snapshot() if self.stage == GraphStage.HIR else None

    def as_hir_mut(self) -> GraphModule | None:
        """Return the module itself if it is at HIR, so that it can be extended, else None."""
        return self if self.stage == GraphStage.HIR else None

    def as_graph(self) -> Graph | None:
        """Return the unverified graph of a module at MIR or LIR, else None."""
        return self._snapshot() if self.stage != GraphStage.HIR else None

    as_mir = as_graph

    def as_lir(self) -> Lir | None:
        """Return the unverified graph and the plan of a module at LIR, else None."""
        return Lir(self._snapshot(), self.plan) if self.plan is not None else None

    @property
    def graph(self) -> Graph:
        """Return the unverified MIR graph.

        Raises:
            GraphError: the module is at HIR.
        """
        mir = self.as_graph()
        if mir is None:
            raise GraphError(f"module {self.name!r} is at hir, so it has no MIR graph yet: lower() it, or use as_hir()")
        return mir

    # -- inspection --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.builder.nodes)

    def node_label(self, value: Value) -> str:
        """Return a name for a value: the label of its block, else its block path, else its id such as `%3`."""
        origin = self.builder.nodes[self.unwrap(value).node].origin
        return origin.label or path_text(origin.path) or f"%{value.node}"

    def node(self, value: Value) -> Node:
        """Return the node of a value: its op, inputs, types and origin."""
        return self.builder.nodes[self.unwrap(value).node]

    def verify(self) -> tuple[str, ...]:
        """Return the problems of the graph, one text for each, with its node, op and block path; () if it is valid."""
        try:
            self.finish()
        except GraphError as error:
            return error.problems or (str(error),)
        return ()

    verify_shapes = verify_all = verify

    def users(self, value: Value) -> tuple[Value, ...]:
        """Return the first result of each node that reads a result of the value's node, in order."""
        return tuple(self.wrap(Value(n)) for n in queries.users(self._snapshot(), self.unwrap(value).node))

    def use_count(self, value: Value) -> int:
        """Return how often the results of the value's node are used as operands and as outputs."""
        return queries.use_count(self._snapshot(), self.unwrap(value).node)

    def topo_order(self) -> tuple[Value, ...]:
        """Return the first result of every node, operands before users."""
        return tuple(self.wrap(Value(n)) for n in range(len(self._snapshot().nodes)))

    def reverse_topo(self) -> tuple[Value, ...]:
        """Return the first result of every node, users before operands."""
        return self.topo_order()[::-1]

    @property
    def dynamic_symbols(self) -> tuple[str, ...]:
        """Return the names of the symbolic sizes, sorted."""
        return queries.dynamic_symbols(self._snapshot())

    @property
    def has_dynamic_dims(self) -> bool:
        """Return whether any size is symbolic."""
        return bool(self.dynamic_symbols)

    def bind(self, **sizes: int) -> GraphModule:
        """Return a copy of the module, at the same level, with some of its symbols replaced by sizes.

        Raises:
            GraphError: there is no such symbol, a size is invalid, or the module is at LIR, where all sizes are bound.
        """
        if self.plan is not None:
            raise GraphError(f"module {self.name!r} is at lir: its sizes are bound already")
        for name, size in sizes.items():
            as_dim(size, f"{self.name}: {name}")
        types = self.builder.types
        return GraphModule.of(queries.bind(self.finish(), sizes, types), self.stage, types, self.policy)

    # -- composition -------------------------------------------------------------------------

    def inline(
        self, other: GraphModule, inputs: Mapping[str, Value], params: Mapping[str, Value] | None = None
    ) -> tuple[Value, ...]:
        """Append the nodes of another module of the same level, and return its outputs as values of this module.

        Args:
            other: the module.
            inputs: the values for its inputs, by name.
            params: the values for its parameters, by name; None to copy the parameters.

        Raises:
            GraphError: the module is at another level; others as `rlx_jax.ir.queries.inline_into`.
        """
        if not isinstance(other, GraphModule) or other.stage != self.stage:
            got = other.stage if isinstance(other, GraphModule) else shown(other)
            raise GraphError(f"module {self.name!r} is at {self.stage}; expected a module at the same level, got {got}")
        input_values = {name: self.unwrap(value) for name, value in inputs.items()}
        param_values = None if params is None else {name: self.unwrap(value) for name, value in params.items()}
        return tuple(map(self.wrap, queries.inline_into(self.builder, other.finish(), input_values, param_values)))

    def promote_params_to_inputs(self, names: Iterable[str]) -> GraphModule:
        """Return a module with the parameters of these keys as inputs, after its own; see `rlx_jax.ir.queries`."""
        types = self.builder.types
        graph = queries.promote_params_to_inputs(self.finish(), as_names(names, f"{self.name}: promote"), types)
        return GraphModule.of(graph, self.stage, types, self.policy)

    def inspect(self) -> str:
        """Return the dump of the unverified graph; at LIR it includes the plan, the buffers and the fingerprint."""
        lir = self.as_lir()
        if lir is not None:
            return dump_lir(lir)
        return dump(self._snapshot(), self.stage, f", fusion={self.policy}" if self.stage == GraphStage.HIR else "")

    def __str__(self) -> str:
        return f"lir @{self.name}" if self.stage == GraphStage.LIR else self.inspect()

    def to_json(self) -> str:
        """Return the module as JSON: graph, level, policy and plan. Equal modules give equal texts.

        Raises:
            UnsupportedError: the graph calls a custom Python function (`emit.jax`); the message names the block.
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
        """Return the module that `to_json` wrote. The text is untrusted: all of it is checked, and nothing is imported.

        Raises:
            FormatError, GraphError: the text is not a valid module; the message names the field.
            VersionMismatchError: the text has another version of the format.
        """
        if not isinstance(text, str | bytes):
            raise FormatError(f"graph JSON: expected to_json's text, got {type(text).__name__}")
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        data = parse_object(raw, "graph JSON", FormatError)
        one_of("graph JSON: format", data.get("format"), (FORMAT,))
        if data.get("version") != VERSION or isinstance(data["version"], bool):
            got = shown(data.get("version"))
            raise VersionMismatchError(f"graph JSON: version is {got}; this release reads version {VERSION} alone")
        head = object_with({"format", "version", "level", "policy", "plan", "graph"}, data, "graph JSON")
        stage = GraphStage(one_of("graph JSON: level", head["level"], tuple(GraphStage)))
        policy = one_of("graph JSON: policy", head["policy"], FUSION_POLICIES)
        plan = decode(Plan if stage == GraphStage.LIR else NoneType, head["plan"], "plan")
        types = TypeCache()
        return GraphModule.of(decode_graph(head["graph"], types), stage, types, policy, plan)

    # -- as a flow ---------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """Return the declared inputs."""
        return tuple(InputDecl(i.input, i.type) for i in self.builder.inputs)

    _inputs = inputs

    @property
    def _binding(self) -> Mapping[str, int]:
        """Return the sizes to compile in advance: none."""
        return {}

    def build(
        self, weights: Weights = None, given: Iterable[str] = (), captured: CapturedArrays | None = None
    ) -> BuiltModel:
        """Return the graph bound to weights, like `ModelFlow.build`. Only shapes are read.

        Args:
            weights: as for `rlx_jax.compile`.
            given: ignored: a module has no optional inputs.
            captured: the arrays that functions of the user capture.

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
        unread_keys = self.plan.unread if self.plan else ()
        return BuiltModel(
            self.name, graph, source, profile, types, self, tuple(keys), unread_keys, stage=stage, plan=self.plan,
            captured=captured or CapturedArrays(),
        )  # fmt: skip


@dataclass(frozen=True)
class BuiltModel(Built):
    """The result of `build`: the record that the compiler reads, with methods that give its graph as a module.

    Attributes:
        contracts: the contracts that the stages of a flow declare; see `ModelFlow.contracts`.
    """

    contracts: tuple[Any, ...] = ()

    @staticmethod
    def from_hir(hir: Graph, weights: Weights = None) -> BuiltModel:
        """Return a HIR graph, such as the result of `GraphModule.into_hir`, bound to weights."""
        return GraphModule.from_hir(hir).build(weights)

    @staticmethod
    def from_graph(graph: Graph, weights: Weights = None) -> BuiltModel:
        """Return a MIR graph, such as the result of `GraphModule.into_graph`, bound to weights."""
        return GraphModule.from_graph(graph).build(weights)

    @property
    def typed_params(self) -> tuple[tuple[str, int, str], ...]:
        """Return the packed weights that the graph reads: key, number of bytes, and the dtype of the bytes, `u8`."""
        specs = ((key, self.source.spec(key)) for key in self.keys_read if self.source and self.source.has(key))
        packed = ((key, spec) for key, spec in specs if isinstance(spec, PackedSpec))
        return tuple((key, packed_types(s.shape, s.dtype, s.scheme, key)[1].nbytes, "u8") for key, s in packed)

    def with_execution_config(self, config: Any) -> BuiltModel:
        """Return the same program with another profile.

        Args:
            config: a profile, or an object with an attribute or a method `compile_profile`.

        Raises:
            ProfileError: it has no profile.
        """
        get_profile = getattr(config, "compile_profile", None)
        profile = get_profile() if callable(get_profile) else get_profile or config
        return replace(self, profile=CompileProfile.of(profile, f"{self.name}: "))

    def into_graph_module(self) -> GraphModule:
        """Return the graph of the flow's program as a module, which can be edited, printed, lowered or saved.

        Raises:
            DeriveError: the flow requests the program `explicit`, which cannot be derived from it.
        """
        policy, graph = choose_profile(self, None).fusion.policy, self.hir
        if self.program != "forward":
            graph = run_passes(graph, Job(lowering_settings(policy), self.types, self.program), stop="derive").graph
        return GraphModule.of(graph, self.stage, self.types, policy=policy, plan=self.plan)

    def lower(self) -> GraphModule:
        """Return the module at MIR."""
        return self.into_graph_module().lower()

    def into_hir(self) -> Graph:
        """Return the HIR graph.

        Raises:
            GraphError: this was built from a module at MIR or LIR.
        """
        return self.into_graph_module().into_hir()

    def into_graph(self) -> Graph:
        """Return the MIR graph, lowered by the profile's policy."""
        return self.into_graph_module().into_graph()

    def into_parts(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """Return the HIR graph and the shapes of its parameters.

        Raises:
            GraphError: this was built from a module at MIR or LIR.
        """
        return self.into_hir(), self.params

    def into_graph_parts(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """Return the MIR graph and the shapes of its parameters."""
        return self.into_graph(), self.params

    def with_extra_hir_outputs(self, values: Sequence[Value]) -> BuiltModel:
        """Return a build with two kinds of outputs: the first one, and `values` of the HIR graph.

        The values are named `extra0`, `extra1` …; other outputs, such as earlier extras, are dropped.

        Raises:
            GraphError: this was built from a module at MIR or LIR.
        """
        if self.program != "forward":
            raise GraphError(f"{self.name}: {self.program} has a separate graph: into_graph_module().set_outputs(…)")
        hir = self.into_hir()
        module = self.into_graph_module()
        module.set_outputs([hir.outputs[0], *values], [hir.output_names[0], *(f"extra{i}" for i in range(len(values)))])
        extended = module.build(self.source)
        return replace(extended, profile=self.profile, unused_keys=self.unused_keys, binding=self.binding)
