"""The plan, how a MIR program runs on one target, which together are the LIR; and the Layout of a model's parameters.

The Layout says how they are stored: one for all of its programs, chosen before any is lowered.

Nothing at run time depends on offsets: XLA allocates. `buffers.py` computes liveness for reports and proofs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Graph, Mir, Node, Param, StateLeaf, StateRead, every_key
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, RingStep
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.param import Program, Roles, Stack, leaf_name, stored_keys
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import TensorType, short_name

PRODUCTS = (MatMul, FusedMatMulBiasAct)
RECURRENCES = (GatedDeltaOp, SelectiveScanOp)
CACHE_WRITES = (CacheUpdate, RingStep)
# The ops that may have a choice.
CHOSEN = (AttentionOp, ExpertFfn, *PRODUCTS, *RECURRENCES, *CACHE_WRITES)


@dataclass(frozen=True)
class Choice:
    """An implementation by its name in `IMPLEMENTATIONS`; `xla` is the op's own `eval`."""

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation} ({self.reason})"


# What is not chosen for a node of its own.
XLA = Choice("xla", "as any other")

# A node as the choice sees it: the op and the types of its operands.
Call = tuple[Mir, tuple[TensorType, ...]]


def call_of(graph: Graph, node: Node) -> Call:
    """The key of a node's choice."""
    assert isinstance(node.op, Mir)
    return node.op, tuple(graph.type(v) for v in node.inputs)


@dataclass(frozen=True)
class Plan:
    """Choices for one program: `scan` the layers or unroll them, donate the state and some inputs, what a gradient
    recomputes of each layer (`remat`: none or a name in `interpret.REMAT`), the `implementation` of attention that was
    asked for, how attentions, products and experts run (`choices`), what was asked of products, experts and kernels,
    options for XLA, and whether a state that is not updated in place is an error (`strict`). `unread` are keys of
    weights of the program that was planned for which the plan has no use."""

    target: str
    scan: bool
    donate_state: bool
    donate_inputs: tuple[str, ...] = ()
    remat: str = "none"
    implementation: str = "auto"
    choices: Mapping[Call, Choice] = field(default_factory=dict)
    compiler_options: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    products: str = "auto"
    experts: str = "auto"
    kernels: bool = False
    strict: bool = False

    def text(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in sorted(self.compiler_options.items())) or "none"
        return (
            f"plan: target={self.target}, layers={'scan' if self.scan else 'unroll'}, remat={self.remat}, "
            f"donate_state={str(self.donate_state).lower()}, donate_inputs=[{', '.join(self.donate_inputs)}], "
            f"compiler_options={options}"
        )


@dataclass(frozen=True)
class Lir:
    """A specialised MIR program with its plan."""

    graph: Graph
    plan: Plan

    def attention(self) -> tuple[str, ...]:
        """One line for each attention: its block path, the implementation and the reason."""
        return self._lines(AttentionOp)

    def products(self) -> tuple[str, ...]:
        """How products with weights run: how many, by what and why. A layer that repeats counts once."""
        choices = Counter(choice for _, choice in self._choices(*PRODUCTS))
        return tuple(f"{count} by {choice}" for choice, count in choices.items())

    def experts(self) -> tuple[str, ...]:
        """As `attention`, of mixtures of experts."""
        return self._lines(ExpertFfn)

    def recurrences(self) -> tuple[str, ...]:
        """As `attention`, of recurrences."""
        return self._lines(*RECURRENCES)

    def _lines(self, *kinds: type[Mir]) -> tuple[str, ...]:
        return tuple(f"{path}: {choice}" for path, choice in self._choices(*kinds))

    def _choices(self, *kinds: type[Mir]) -> Iterator[tuple[str, str]]:
        """Block path and choice of each node of these ops."""
        for inner, node in self.graph.walk():
            if isinstance(node.op, kinds):
                yield path_text(node.origin.path), str(self.plan.choices.get(call_of(inner, node), XLA))


def state_types(graph: Graph, stacked: bool) -> dict[str, TensorType]:
    """The arrays of the state: one for each layer, or one for all layers of a scanned region."""
    return {name: t for name, (t, _) in state_leaves(graph, stacked).items()}


def state_leaves(graph: Graph, stacked: bool) -> dict[str, tuple[TensorType, Roles]]:
    """`state_types`, each with what its axes are."""
    reads = ((n.op, count) for inner, count in _repeated(graph) for n in inner.nodes if isinstance(n.op, StateRead))
    return {
        name: (t, (None,) * axis + (op.roles or (None,) * op.type.rank))
        for op, count in reads
        for name, axis, t in _arrays(op.leaf, op.type, count, stacked)
    }


def _repeated(graph: Graph, iterations: int = 1) -> Iterator[tuple[Graph, int]]:
    """The regions of a graph and itself, and how often each runs."""
    for node in graph.nodes:
        for region in node.op.regions():
            yield from _repeated(region, node.op.iterations())
    yield graph, iterations


def _arrays(leaf: StateLeaf, t: TensorType, iterations: int, stacked: bool) -> Iterator[tuple[str, int, TensorType]]:
    """The arrays of a leaf in a graph that runs so often: name, how many axes stand before its own, and type."""
    if leaf.key(0) == leaf.key(1):
        yield leaf.key(None), 0, t
    elif stacked:
        yield leaf.key(None), 1, TensorType((iterations, *t.shape), t.dtype)
    else:
        yield from ((leaf.key(i), 0, t) for i in range(iterations))


def taken_back(graph: Graph, stacked: bool) -> tuple[tuple[str, int], ...]:
    """The arrays of the state that a program gives after each token, beside it, with the axis of their rows."""
    return tuple((name, axis) for name, axis, _ in _every(graph, stacked))


def given_leaves(graph: Graph, stacked: bool) -> dict[str, tuple[TensorType, Roles]]:
    """`state_leaves` of the state that a program gives: with those that it gives after each token."""
    found = state_leaves(graph, stacked)
    for name, axis, t in _every(graph, stacked):
        _, roles = found[name]
        found[every_key(name)] = t, (*roles[: axis + 1], "sequence", *roles[axis + 1 :])
    return found


def _every(graph: Graph, stacked: bool) -> Iterator[tuple[str, int, TensorType]]:
    """Arrays of the state that are given after each token: their names, the axis of their rows, and what is given."""
    for inner, iterations in _repeated(graph):
        for leaf, value in (write for write in inner.writes if write[0].every):
            yield from _arrays(replace(leaf, every=False), inner.type(value), iterations, stacked)


@dataclass(frozen=True)
class Layout:
    """The leaves by name. A leaf's identity is its program; names are for people."""

    leaves: Mapping[str, Program]

    def types(self) -> dict[str, TensorType]:
        """The type of every leaf."""
        return {name: program.type for name, program in self.leaves.items()}

    def by_program(self) -> dict[Program, str]:
        return {program: name for name, program in self.leaves.items()}

    def repeated(self) -> list[str]:
        """Checkpoint keys that more than one leaf holds."""
        held = Counter(name for program in self.leaves.values() for name in {k.key for k in stored_keys(program)})
        return [name for name, count in held.items() if count > 1]

    def check(self, graph: Graph, scan: bool) -> None:
        """Refuse a program that reads a leaf the layout does not have."""
        for program in self._missing(graph, scan):
            raise GraphError(f"the program reads {program}, which is not in the model's layout")

    def has(self, graph: Graph, scan: bool) -> bool:
        """Whether it has every leaf that a program reads."""
        return next(self._missing(graph, scan), None) is None

    def _missing(self, graph: Graph, scan: bool) -> Iterator[Program]:
        known = self.by_program()
        for param in graph.params():
            reads = [param.programs] if scan and param.varies else [(p,) for p in param.programs]
            for p in reads:
                if (p[0] if len(p) == 1 else Stack(p)) not in known and not rows(known, p):
                    yield p[0]


def rows(leaves: Iterable[Program], programs: tuple[Program, ...]) -> tuple[Stack, tuple[int, ...]] | None:
    """The leaf that `programs` are rows of, and which rows."""
    for leaf in leaves:
        if isinstance(leaf, Stack) and set(programs) <= set(leaf.parts):
            return leaf, tuple(leaf.parts.index(p) for p in programs)
    return None


def tied(params: Iterable[Param]) -> list[tuple[Program, ...]]:
    """All programs in groups, both in order of first use: those of one parameter are of one group.

    Where layers share weights, two parameters have a program in common, and their groups are one.
    """
    group_of: dict[Program, dict[Program, None]] = {}
    for param in params:
        first = param.programs[0]
        group = group_of.setdefault(first, {first: None})
        for program in param.programs[1:]:
            other = group_of.get(program, {program: None})
            if other is not group:
                group.update(other)
                group_of.update(dict.fromkeys(other, group))
    return [tuple(group) for group in {id(group): group for group in group_of.values()}.values()]


def programs_of(graphs: Iterable[Graph], scan: bool) -> tuple[Program, ...]:
    """The leaves that graphs read, in order of first use. No program is in two of them.

    Of layers that are scanned, the programs of one parameter are the rows of one leaf, those that are tied to them too.
    """
    params = [param for graph in graphs for param in graph.params()]
    if not scan:
        return tuple(dict.fromkeys(p for param in params for p in param.programs))
    return tuple(Stack(group) if len(group) > 1 else group[0] for group in tied(params))


def layout_of(graphs: Iterable[Graph], scan: bool) -> Layout:
    """The layout that the forward programs of a model's flows ask for."""
    leaves: dict[str, Program] = {}
    for program in programs_of(graphs, scan):
        leaves[_free_name(program, leaves)] = program
    return Layout(leaves)


def _free_name(program: Program, taken: Collection[str]) -> str:
    """The name of a leaf; beside another of that name with its dtype, and with a number where that is no difference."""
    name = leaf_name(program)
    if name not in taken:
        return name
    typed = f"{name} ({short_name(program.type.dtype)})"
    numbered = (f"{name} ({n})" for n in itertools.count(2))
    return next(free for free in itertools.chain([typed], numbered) if free not in taken)
