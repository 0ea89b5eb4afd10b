"""The plan: how a MIR program runs on one target. Together they are the LIR.

Nothing at run time depends on offsets: XLA allocates. `buffers.py` computes liveness for reports and proofs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlx_jax.ir.graph import Graph, Mir, Node, StateRead, every_key
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, RingStep
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.param import Roles
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import TensorType

PRODUCTS = (MatMul, FusedMatMulBiasAct)
RECURRENCES = (GatedDeltaOp, SelectiveScanOp)
CACHE_WRITES = (CacheUpdate, RingStep)
CHOSEN = (AttentionOp, ExpertFfn, *PRODUCTS, *RECURRENCES, *CACHE_WRITES)
"""The ops that may have a choice."""


@dataclass(frozen=True)
class Choice:
    """An implementation by its name in `IMPLEMENTATIONS`; `xla` is the op's own `eval`."""

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation} ({self.reason})"


XLA = Choice("xla", "as any other")
"""What is not chosen for a node of its own."""

Call = tuple[Mir, tuple[TensorType, ...]]
"""A node as the choice sees it: the op and the types of its operands."""


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
    found: dict[str, tuple[TensorType, Roles]] = {}

    def visit(graph: Graph, iterations: int) -> None:
        for node in graph.nodes:
            for region in node.op.regions():
                visit(region, node.op.iterations())
            if not isinstance(node.op, StateRead):
                continue
            leaf, t = node.op.leaf, node.op.type
            roles = node.op.roles or (None,) * t.rank
            if leaf.key(0) == leaf.key(1):
                found[leaf.key(None)] = t, roles
            elif stacked:
                found[leaf.key(None)] = TensorType((iterations, *t.shape), t.dtype), (None, *roles)
            else:
                found.update({leaf.key(i): (t, roles) for i in range(iterations)})

    visit(graph, 1)
    return found


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

    def visit(graph: Graph, iterations: int) -> Iterator[tuple[str, int, TensorType]]:
        for node in graph.nodes:
            for region in node.op.regions():
                yield from visit(region, node.op.iterations())
        for leaf, value in graph.writes:
            t = graph.type(value)
            state = replace(leaf, every=False)
            if leaf.every and leaf.key(0) == leaf.key(1):
                yield state.key(None), 0, t
            elif leaf.every and stacked:
                yield state.key(None), 1, TensorType((iterations, *t.shape), t.dtype)
            elif leaf.every:
                yield from ((state.key(i), 0, t) for i in range(iterations))

    return visit(graph, 1)
