"""LIR, which is a MIR program and the plan of how it runs on one target; and the Layout of a model's parameters.

The Layout lists the stored parameters. All programs of a model share one Layout, chosen before any of them is lowered.

A plan has no buffer offsets, as XLA allocates memory. `buffers.py` computes liveness for reports and checks.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import jax

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Graph, Mir, Node, Param, StateRead, Value
from rlx_jax.ir.kernel_group import AttentionGroup, DeltaGroup, ExpertGroup, HeadGroup, KernelGroup
from rlx_jax.ir.operands import zero
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.cache import CacheUpdate, RingStep
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.ops.reduce import RmsNormOp
from rlx_jax.ir.param import (
    PackedArray,
    Program,
    Roles,
    Stack,
    keys_of,
    packed_arrays,
    packed_keys,
    packed_parameter,
    packing_of,
    printed_name,
    stored_keys,
)
from rlx_jax.ir.paths import Path, StateLeaf, bind_path, path_text, per_token_key
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.ir.weight_reads import WeightSource, is_decoded
from rlx_jax.lowering.lir.attention_groups import attention_refusal
from rlx_jax.lowering.lir.packed import choose_dequant_matmul, multiplies_tiles
from rlx_jax.lowering.lir.per_shard import ShardProgram
from rlx_jax.lowering.lir.product_groups import refusal

PRODUCTS = (MatMul, FusedMatMulBiasAct)
RECURRENCES = (GatedDeltaOp, SelectiveScanOp)
CACHE_WRITES = (CacheUpdate, RingStep)
GROUPS = (AttentionGroup, DeltaGroup, ExpertGroup, HeadGroup, KernelGroup)
# The ops that may have a choice.
CHOICE_OPS = (AttentionOp, CausalConvOp, ExpertFfn, RmsNormOp, TopK, *GROUPS, *PRODUCTS, *RECURRENCES, *CACHE_WRITES)


@dataclass(frozen=True)
class Choice:
    """An implementation by its name in `IMPLEMENTATIONS`; `xla` is the op's own `eval`."""

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation} ({self.reason})"


# The choice of nodes that have none in the plan.
XLA_CHOICE = Choice("xla", "as any other")

# Key of a choice: the op and the types of its operands. Equal calls have the same choice.
Call = tuple[Mir, tuple[TensorType, ...]]


def call_of(graph: Graph, node: Node) -> Call:
    """Return the key of a node's choice."""
    assert isinstance(node.op, Mir)
    return node.op, tuple(graph.type(v) for v in node.inputs)


@dataclass(frozen=True)
class Plan:
    """How one program runs.

    Attributes:
        target: the kind of device.
        scan: whether repeated layers run under `lax.scan` instead of being unrolled.
        donate_state: whether calls consume the state.
        donate_inputs: names of the inputs that calls consume.
        remat: what a gradient recomputes of each layer: `none` or a name in `interpret.REMAT_POLICIES`.
        implementation: the requested implementation of attention.
        choices: the implementation of each attention, product, mixture of experts, recurrence and cache write.
        compiler_options: options of XLA.
        unread: keys of the program's weights that the plan does not use.
        products: the requested implementation of products.
        experts: the requested implementation of mixtures of experts.
        kernels: whether custom kernels were requested.
        strict: whether it is an error if the state is not updated in place.
        packed: whether packed weights stay packed on the device.
    """

    target: str
    scan: bool
    donate_state: bool
    donate_inputs: tuple[str, ...] = ()
    remat: str = "none"
    implementation: str = "auto"
    choices: Mapping[Call, Choice] = field(default_factory=dict, hash=False)
    compiler_options: Mapping[str, str | bool | int | float] = field(default_factory=dict, hash=False)
    unread: tuple[str, ...] = ()
    products: str = "auto"
    experts: str = "auto"
    kernels: bool = False
    strict: bool = False
    packed: bool = False

    def text(self) -> str:
        """Return the plan in one line, for dumps."""
        options = ", ".join(f"{k}={v}" for k, v in sorted(self.compiler_options.items())) or "none"
        return (
            f"plan: target={self.target}, layers={'scan' if self.scan else 'unroll'}, remat={self.remat}, "
            f"donate_state={str(self.donate_state).lower()}, donate_inputs=[{', '.join(self.donate_inputs)}], "
            f"compiler_options={options}"
        )


@dataclass(frozen=True)
class Lir:
    """A MIR program with static sizes, and its plan.

    Attributes:
        graph: the program.
        plan: its plan; of `shard`, if there is one.
        groupings: the passes that grouped its ops for kernels, so that the others have a reason.
        refusal: why a step of decoding has no kernels; "" if it may have some, or they are switched off.
        shard: the program of one device that runs instead on each.
    """

    graph: Graph
    plan: Plan
    groupings: tuple[str, ...] = ()
    refusal: str = ""
    shard: ShardProgram | None = None

    @property
    def planned_graph(self) -> Graph:
        """Return the graph that the plan is of."""
        return self.graph if self.shard is None else self.shard.graph

    @functools.cached_property
    def _group_params(self) -> Mapping[int, Mapping[int, Param]]:
        """Return the parameters that groups read, by the identity of the body and the index of its input."""
        groups = ((graph, node) for graph, node in self.graph.walk() if isinstance(node.op, GROUPS))
        return {
            id(node.op.body): {i: op for i, v in enumerate(node.inputs) if isinstance(op := g.nodes[v.node].op, Param)}
            for g, node in groups
            if isinstance(node.op, GROUPS)
        }

    def param_of(self, graph: Graph, value: Value) -> Param | None:
        """Return the parameter that a value of the program, or of a region or a group in it, is; None for others."""
        op = graph.nodes[value.node].op
        if isinstance(op, BodyInput):
            return self._group_params.get(id(graph), {}).get(op.index)
        return op if isinstance(op, Param) else None

    def attention(self) -> tuple[str, ...]:
        """Return one line for each attention, and rotation by a kernel: block path, implementation and reason."""
        return self._lines(AttentionGroup, HeadGroup, AttentionOp)

    def products(self) -> tuple[str, ...]:
        """Return one line for each implementation of products: the count, its name, the reason.

        Repeated layers count once.
        """
        choices = Counter(choice for _, choice in self.choices(KernelGroup, *PRODUCTS))
        return tuple(f"{count} by {choice}" for choice, count in choices.items())

    def experts(self) -> tuple[str, ...]:
        """Return the same lines as `attention` for mixtures of experts."""
        return self._lines(ExpertGroup, ExpertFfn)

    def recurrences(self) -> tuple[str, ...]:
        """Return the same lines as `attention` for recurrences."""
        return self._lines(DeltaGroup, *RECURRENCES)

    def _lines(self, *kinds: type[Mir]) -> tuple[str, ...]:
        return tuple(f"{path_text(path)}: {choice}" for path, choice in self.choices(*kinds))

    def choices(self, *kinds: type[Mir]) -> Iterator[tuple[Path, Choice]]:
        """Yield block path and choice of each node with one of these ops."""
        grouped = {id(node.op.body) for _, node in self.planned_graph.walk() if isinstance(node.op, GROUPS)}
        for inner, node in self.planned_graph.walk():
            if isinstance(node.op, kinds) and id(inner) not in grouped:
                choice = self.plan.choices.get(call_of(inner, node), XLA_CHOICE)
                if (packed := self._packed_choice(inner, node)) is not None:
                    choice = packed
                elif choice.implementation == "packed_tiles":  # chosen for packed weights of this type
                    choice = XLA_CHOICE
                if isinstance(node.op, KernelGroup) and choice != XLA_CHOICE:
                    choice = replace(choice, reason=node.op.reason())
                has_kernel = choice.implementation == "packed_tiles"
                if not has_kernel and (reason := self._why_no_kernel(inner, node)):
                    choice = replace(choice, reason=f"{choice.reason}; no kernel: {reason}")
                yield node.origin.path, choice

    def _why_no_kernel(self, graph: Graph, node: Node) -> str:
        """Return why an op of a step of decoding is in no group; "" for other ops and programs."""
        rows = (PRODUCTS, self.plan.products, "group_products", refusal), (
            AttentionOp, self.plan.implementation, "group_attention", attention_refusal,
        )  # fmt: skip
        for kind, preference, grouping, why in rows:
            if isinstance(node.op, kind) and preference == "auto":
                return self.refusal or (why(graph, node) if grouping in self.groupings else "")
        return ""

    def stays_packed(self, param: Param) -> bool:
        """Return whether a parameter is packed on the device; scanned layers are only if all have one scheme."""
        if not self.plan.packed:
            return False
        return bool(array_programs(param.programs)) if self.plan.scan else any(map(packing_of, param.programs))

    def _packed_choice(self, graph: Graph, node: Node) -> Choice | None:
        """Return how a product with a weight that stays packed runs; None for other nodes."""
        weight = graph.nodes[node.inputs[1].node].op
        if not isinstance(node.op, PRODUCTS) or not isinstance(weight, Param) or not self.stays_packed(weight):
            return None
        op, (x, *_) = call_of(graph, node)
        assert isinstance(op, PRODUCTS)
        chosen = self.plan.choices.get(call_of(graph, node), XLA_CHOICE)
        if chosen.implementation == "packed_tiles" and multiplies_tiles(call_of(graph, node), weight.programs):
            return chosen
        scheme = next(scheme for scheme in map(packing_of, weight.programs) if scheme is not None)
        return Choice(*choose_dequant_matmul(op, x.shape, scheme, self.plan.target))


def state_types(graph: Graph, stacked: bool) -> dict[str, TensorType]:
    """Return the types of state arrays by name: one for each layer, or one for all layers if they are stacked."""
    return {name: t for name, (t, _) in state_leaves(graph, stacked).items()}


def state_leaves(graph: Graph, stacked: bool) -> dict[str, tuple[TensorType, Roles]]:
    """Return the types of state arrays by name, each with the roles of its axes."""
    reads = ((n.op, count) for inner, count in _repeated(graph) for n in inner.nodes if isinstance(n.op, StateRead))
    return {
        name: (t, (None,) * axis + (op.roles or (None,) * op.type.rank))
        for op, count in reads
        for name, axis, t in _arrays(op.leaf, op.type, count, stacked)
    }


def _repeated(graph: Graph, iterations: int = 1) -> Iterator[tuple[Graph, int]]:
    """Yield the regions of a graph and the graph itself, each with its number of iterations."""
    for node in graph.nodes:
        for region in node.op.regions():
            yield from _repeated(region, node.op.iterations())
    yield graph, iterations


def _arrays(leaf: StateLeaf, t: TensorType, iterations: int, stacked: bool) -> Iterator[tuple[str, int, TensorType]]:
    """Yield the arrays of a state leaf in a graph with so many iterations: name, number of layer axes (0, 1), type."""
    if leaf.key(0) == leaf.key(1):  # the leaf does not depend on the layer
        yield leaf.key(None), 0, t
    elif stacked:
        yield leaf.key(None), 1, TensorType((iterations, *t.shape), t.dtype)
    else:
        yield from ((leaf.key(i), 0, t) for i in range(iterations))


def rollback_arrays(graph: Graph, stacked: bool) -> tuple[tuple[str, int], ...]:
    """Return the state arrays that a program also returns after each token, by name, with their batch axis.

    A `verify` program returns them so that rejected tokens can be removed from the state.
    """
    return tuple((name, axis) for name, axis, _ in _per_token_arrays(graph, stacked))


def returned_leaves(graph: Graph, stacked: bool) -> dict[str, tuple[TensorType, Roles]]:
    """Return `state_leaves` of the state that a program returns, with the companion arrays after each token."""
    leaves = state_leaves(graph, stacked)
    for name, axis, t in _per_token_arrays(graph, stacked):
        _, roles = leaves[name]
        leaves[per_token_key(name)] = t, (*roles[: axis + 1], "sequence", *roles[axis + 1 :])
    return leaves


def _per_token_arrays(graph: Graph, stacked: bool) -> Iterator[tuple[str, int, TensorType]]:
    """Yield the state arrays that are returned after each token: name, batch axis, type of the returned array."""
    for inner, iterations in _repeated(graph):
        for leaf, value in (write for write in inner.writes if write[0].every):
            yield from _arrays(replace(leaf, every=False), inner.type(value), iterations, stacked)


@dataclass(frozen=True)
class Layout:
    """The stored parameters of a model by name.

    A parameter is identified by its program, which computes it from checkpoint weights. Names are for display.
    """

    params: Mapping[str, Program]

    def types(self) -> dict[str, TensorType]:
        """Return the type of every parameter by name."""
        return {name: program.type for name, program in self.params.items()}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every parameter by name."""
        return {name: program.type.spec for name, program in self.params.items()}

    def packed(self) -> dict[str, tuple[str, int]]:
        """Return the scheme, and the bytes of all arrays, of each packed parameter by name."""
        parameters: dict[str, tuple[str, int]] = {}
        for program in self.params.values():
            parameter = packed_parameter(program)
            scheme = None if parameter is None else packing_of(parameter)
            if parameter is not None and scheme is not None:
                name = printed_name(parameter)
                parameters[name] = scheme, parameters.get(name, ("", 0))[1] + program.type.nbytes
        return parameters

    def reading(self, keys: Collection[str]) -> dict[str, Program]:
        """Return the parameters that read one of these checkpoint keys."""
        return {name: program for name, program in self.params.items() if not set(keys).isdisjoint(keys_of(program))}

    def readers(self, lir: Lir) -> dict[str, str]:
        """Return the path of the block that multiplies with a parameter, by name; layers in a loop are `layers.*`."""
        names, paths = self.by_program(), dict[str, str]()
        products = ((g, n) for g, n in lir.graph.walk() if isinstance(n.op, Mir) and n.op.traits.flops is not zero)
        for graph, node in products:
            for param in (op for value in node.inputs if isinstance(op := graph.nodes[value.node].op, Param)):
                stack = find_stack(self.params.values(), param.programs) if param.varies else None
                if stack is not None:
                    paths[names[stack[0]]] = path_text(node.origin.path).replace("{i}", "*")
                for i, program in enumerate(param.programs):
                    if program in names:
                        paths[names[program]] = path_text(bind_path(node.origin.path, i))
        return paths

    def decoded(self, source: WeightSource | None) -> tuple[str, ...]:
        """Return the names of parameters that are packed in the checkpoint and decoded while they are loaded."""
        leaves = ((n, p) for n, p in self.params.items() if packed_parameter(p) is None)
        return tuple(
            name
            for name, program in leaves
            if any(packed_keys(program)) or any(is_decoded(source, key) for key in keys_of(program))
        )

    def packed_keys(self) -> list[str]:
        """Return the checkpoint keys of weights that are packed, in the checkpoint or on the device."""
        keys = [key for program in self.params.values() for key, _ in packed_keys(program)]
        arrays = (program for program in self.params.values() if packed_parameter(program) is not None)
        return list(dict.fromkeys([*keys, *(key for program in arrays for key in keys_of(program))]))

    def num_parameters(self) -> int:
        """Return the number of elements of all parameters; of packed ones, of values, not of codes."""
        parameters = {packed_parameter(program) or program for program in self.params.values()}
        return sum(program.type.size for program in parameters)

    def by_program(self) -> dict[Program, str]:
        """Return the name of every parameter by program."""
        return {program: name for name, program in self.params.items()}

    def duplicated_keys(self) -> list[str]:
        """Return the checkpoint keys that are stored in more than one parameter."""
        counts = Counter(name for program in self.params.values() for name in {k.key for k in stored_keys(program)})
        return [name for name, count in counts.items() if count > 1]

    def check(self, graph: Graph, scan: bool) -> None:
        """Check that the layout has every parameter that a program reads.

        Raises:
            GraphError: a parameter is missing.
        """
        for program in self._missing(graph, scan):
            raise GraphError(f"the program reads {program}, which is not in the model's layout")

    def has_all_params(self, graph: Graph, scan: bool) -> bool:
        """Return whether the layout has every parameter that a program reads."""
        return next(self._missing(graph, scan), None) is None

    def _missing(self, graph: Graph, scan: bool) -> Iterator[Program]:
        names = self.by_program()

        def has(programs: tuple[Program, ...]) -> bool:
            stored = (programs[0] if len(programs) == 1 else Stack(programs)) in names
            return stored or find_stack(names, programs) is not None

        for param in graph.params():
            reads = [param.programs] if scan and param.varies else [(p,) for p in param.programs]
            for p in reads:
                arrays = array_programs(p)
                if not has(p) and not (arrays and all(map(has, arrays.values()))):
                    yield p[0]


def array_programs(programs: Sequence[Program]) -> dict[str, tuple[PackedArray, ...]]:
    """Return the programs of the arrays in which parameters are stored packed, by the name of the array.

    Each entry has one program for each parameter. The result is empty unless all of them have one scheme.
    """
    if len({packing_of(program) for program in programs}) > 1:
        return {}
    first, *rest = (packed_arrays(program) for program in programs)
    return {name: (array, *(other[name] for other in rest)) for name, array in first.items()}


def find_stack(params: Iterable[Program], programs: tuple[Program, ...]) -> tuple[Stack, tuple[int, ...]] | None:
    """Return the stacked parameter that has `programs` as rows, and their row numbers; None if there is none."""
    for param in params:
        if isinstance(param, Stack) and set(programs) <= set(param.parts):
            return param, tuple(param.parts.index(p) for p in programs)
    return None


def tied_groups(params: Iterable[Param]) -> list[tuple[Program, ...]]:
    """Return all programs in groups, each in order of first use; the programs of one parameter are in one group.

    If layers share weights, two parameters have a program in common, and their groups are joined.
    """
    group_of: dict[Program, dict[Program, None]] = {}
    for param in params:
        representative = param.programs[0]
        group = group_of.setdefault(representative, {representative: None})
        for program in param.programs[1:]:
            other = group_of.get(program, {program: None})
            if other is not group:
                group.update(other)
                group_of.update(dict.fromkeys(other, group))
    return [tuple(group) for group in {id(group): group for group in group_of.values()}.values()]


def programs_of(graphs: Iterable[Graph], scan: bool, packed: bool = False) -> tuple[Program, ...]:
    """Return the programs of the stored parameters that graphs read, in order of first use.

    For scanned layers, the programs of one parameter are stacked, together with those tied to them. No program is part
    of two stored parameters. With `packed`, packed tensors are stored as their arrays where that is possible.
    """
    params = [param for graph in graphs for param in graph.params()]
    programs = dict.fromkeys(p for param in params for p in param.programs)
    groups = tied_groups(params) if scan else [(p,) for p in programs]
    stored: dict[Program, None] = {}
    for group in groups:
        arrays = array_programs(group) if packed else {}
        for rows in arrays.values() or (group,):
            stored[Stack(tuple(rows)) if len(rows) > 1 else rows[0]] = None
    return tuple(stored)


def layout_of(graphs: Iterable[Graph], scan: bool, packed: bool) -> Layout:
    """Return the layout for the forward programs of a model's flows; `packed` as in `programs_of`."""
    leaves: dict[str, Program] = {}
    for program in programs_of(graphs, scan, packed):
        leaves[_free_name(program, leaves)] = program
    return Layout(leaves)


def _free_name(program: Program, used_names: Collection[str]) -> str:
    """Return an unused name for a parameter: its own, with its dtype, or with a number."""
    name = printed_name(program)
    if name not in used_names:
        return name
    typed = f"{name} ({short_name(program.type.dtype)})"
    numbered = (f"{name} ({n})" for n in itertools.count(2))
    return next(candidate for candidate in itertools.chain([typed], numbered) if candidate not in used_names)
