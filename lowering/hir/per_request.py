"""What a request brings beside its tokens, such as an image: what is computed of it alone is computed once.

A value *moves* if it depends on the tokens; it is *of the request* if it depends on other inputs and on no token. Where
a node that moves reads a value of the request, `prefill` keeps that value in the state and `extend` reads it there. So
keys and values of cross-attention are computed with the prompt, and `extend` has no input for what they are made of.

Kept values are named after who reads them, `layers.3.cross.kept1`, so that layers that are rolled, scanned or taken out
of a region keep the same leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx_jax.errors import DeriveError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import (
    BodyInput,
    Builder,
    Graph,
    Input,
    Node,
    Op,
    StateLeaf,
    StateRead,
    TypeCache,
    Value,
    constant,
)
from rlx_jax.ir.ops.attention import Overwrite
from rlx_jax.ir.param import Roles
from rlx_jax.ir.paths import Path
from rlx_jax.ir.rewrite import rewrite
from rlx_jax.ir.types import TensorType, is_static, terms_of

# How a leaf of the state is made: `Derivation.state`.
Keep = Callable[[Builder, Path, str, TensorType, Roles], tuple[StateLeaf, Value]]

# What a value depends on: weights alone, inputs without tokens too, tokens.
WEIGHTS, REQUEST, MOVES = range(3)

# Of each node of a graph, by number.
Levels = Mapping[int, int]


@dataclass(frozen=True)
class Brought:
    """The levels of a graph and of its regions, by the graphs themselves."""

    graphs: Mapping[int, Levels] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()  # regions that do not move: nothing in them is cut

    def levels(self, graph: Graph) -> Levels:
        """Empty where nothing is of the request."""
        return self.graphs.get(id(graph), {})

    def cuts(self, graph: Graph) -> bool:
        """Whether values of this graph are kept."""
        return id(graph) not in self.whole and REQUEST in self.levels(graph).values()


def request_of(graph: Graph) -> Brought:
    """What each node depends on. Inputs that have the dimension `seq` are tokens, all others of the request."""
    graphs: dict[int, Levels] = {}
    whole: set[int] = set()
    if any("seq" not in i.type.symbols for i in graph.inputs):
        _levels(graph, (), graphs, whole)
    return Brought(graphs, frozenset(whole))


def _levels(graph: Graph, given: Sequence[int], graphs: dict[int, Levels], whole: set[int]) -> int:
    """The levels of a graph whose operands are `given`; the highest of them."""
    found: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        op, operands = node.op, [found[v.node] for v in node.inputs]
        if isinstance(op, Input):
            level = MOVES if "seq" in op.type.symbols else REQUEST
        elif isinstance(op, StateRead):
            level = MOVES
        elif isinstance(op, BodyInput):
            level = given[op.index]
        else:
            inner = (_region(region, op.carried(), operands, graphs, whole) for region in op.regions())
            level = max((*operands, *inner), default=WEIGHTS)
        found[number] = level
    graphs[id(graph)] = found
    return max(found.values(), default=WEIGHTS)


def _region(region: Graph, carried: int, operands: list[int], graphs: dict[int, Levels], whole: set[int]) -> int:
    """The level of a region. One that moves carries only what moves."""
    level = _levels(region, operands, graphs, whole)
    if level < MOVES:
        whole.add(id(region))
        return level
    return _levels(region, [MOVES] * carried + operands[carried:], graphs, whole)


def reads_fixed(levels: Levels, node: Node) -> bool:
    """Whether attention that moves reads keys and values, and what says which of them, that do not."""
    return isinstance(node.op, hir.Attention) and all(levels.get(v.node, MOVES) < MOVES for v in node.inputs[1:])


# -- the cut -----------------------------------------------------------------------------------


@dataclass
class Cutting:
    """One graph while it is rewritten: its levels, and which program becomes of it."""

    graph: Graph
    levels: Levels
    program: str

    @property
    def handed_on(self) -> set[int]:
        """Nodes of the request that regions read."""
        return {v.node for n in self.graph.nodes if n.op.regions() for v in n.inputs if self._kept(v)}

    def _kept(self, v: Value) -> bool:
        return self.levels[v.node] == REQUEST

    def dropped(self, b: Builder, number: int, node: Node) -> tuple[Value, ...]:
        """What stands for a node of the request in `extend`: what regions are handed is never read there."""
        for v in (*self.graph.outputs, *(value for _, value in self.graph.writes)):
            if v.node == number:
                raise DeriveError("it depends on no token, and is an output of the flow: choose others with outputs()")
        return (b.leaf(constant(0, np.float32)),) * len(node.types) if number in self.handed_on else ()

    def operands(self, b: Builder, node: Node, inputs: tuple[Value, ...], keep: Keep) -> tuple[Value, ...]:
        """The operands of a node that moves. Those of the request are kept by `prefill` and read by `extend`."""
        if node.op.regions():
            return inputs
        found, handed = iter(inputs), self.handed_on
        made = []
        for place, v in enumerate(node.inputs):
            there = self.program == "prefill" or not self._kept(v) or v.node in handed
            value = next(found) if there else None
            if self._kept(v):
                t = self.graph.type(v)
                leaf, read = keep(b, node.origin.path, f"kept{place}", _checked(t), _roles(node, place, t))
                if self.program == "prefill" and value is not None:
                    b.writes.append((leaf, b(Overwrite(), read, value)))
                else:
                    b.writes.append((leaf, read))
                    value = read
            assert value is not None
            made.append(value)
        return tuple(made)


def _checked(t: TensorType) -> TensorType:
    """A type that a state can have: its sizes are found again from its arrays.

    Raises:
        DeriveError: a size that is no sum of symbols.
    """
    for dim in t.shape:
        if not is_static(dim) and not terms_of(dim):
            raise DeriveError(f"it reads {t}, which depends on no token; a state has no size {dim}, only sums")
    return t


def _roles(node: Node, place: int, t: TensorType) -> Roles:
    """What the axes of a kept value are: rows of the batch, and heads where attention reads it."""
    rows = tuple("batch" if str(dim) == "batch" else None for dim in t.shape)
    return (*rows[:-1], "kv_heads") if isinstance(node.op, hir.Attention) and place in (1, 2) else rows


def pruned(op: Op, operands: tuple[Value, ...], types: TypeCache) -> tuple[Op, tuple[Value, ...]]:
    """An op without the operands that nothing in its regions reads; what they carry stays."""
    regions = op.regions()
    read = {n.op.index for region in regions for n in region.nodes if isinstance(n.op, BodyInput)}
    stay = [i for i in range(len(operands)) if i < op.carried() or i in read]
    if len(stay) == len(operands):
        return op, operands
    numbers = {old: new for new, old in enumerate(stay)}

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, BodyInput):
            return None
        return (b.leaf(BodyInput(numbers[node.op.index], type=node.op.type)),)

    bodies = (rewrite(region, lambda graph: fn if graph in regions else lambda *_: None, types) for region in regions)
    return op.with_regions(tuple(bodies)), tuple(operands[i] for i in stay)


def inputs_read(graph: Graph) -> Iterator[Input]:
    """The inputs of a graph that a node reads, or that have tokens."""
    read = {node.op.input for _, node in graph.walk() if isinstance(node.op, Input)}
    yield from (i for i in graph.inputs if i.input in read or "seq" in i.type.symbols)
