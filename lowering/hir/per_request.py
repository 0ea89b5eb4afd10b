"""Compute values that depend on a request but on no token, such as image features, once per request.

A value *moves* if it depends on tokens. It is *of the request* if it depends on other inputs and on no token. If a node
that moves reads a value of the request, `prefill` stores that value in the state and `extend` reads it from there. So
keys and values of cross-attention are computed with the prompt, and `extend` does not have the inputs that they depend
on.

Stored values are named after their reader, `layers.3.cross.kept1`, so that the state has the same leaves if layers are
rolled, scanned or taken out of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx_jax.errors import DeriveError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Input, Node, Op, StateRead, TypeCache, Value, constant
from rlx_jax.ir.ops.cache import Overwrite
from rlx_jax.ir.param import Roles
from rlx_jax.ir.paths import Path
from rlx_jax.ir.rewrite import rewrite
from rlx_jax.ir.state_leaf import StateLeaf
from rlx_jax.ir.types import TensorType, is_static, terms_of

# Adds a leaf to the state: `Derivation.state`.
Keep = Callable[[Builder, Path, str, TensorType, Roles], tuple[StateLeaf, Value]]

# Levels of dependence: on weights only, on inputs without tokens too, on tokens. A node has its operands' maximum.
WEIGHTS, REQUEST, MOVES = range(3)

# The level of each node of a graph, by number.
Levels = Mapping[int, int]


@dataclass(frozen=True)
class Brought:
    """Levels of the nodes of a graph and of its regions.

    Attributes:
        graphs: the levels by the `id` of each graph; empty if nothing is of the request.
        whole: ids of the regions that do not move, so that all of a region is computed once.
    """

    graphs: Mapping[int, Levels] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()

    def levels(self, graph: Graph) -> Levels:
        """Return the levels of one graph or region; empty if nothing is of the request."""
        return self.graphs.get(id(graph), {})

    def cuts(self, graph: Graph) -> bool:
        """Return whether values of this graph are stored in the state."""
        return id(graph) not in self.whole and REQUEST in self.levels(graph).values()


def request_of(graph: Graph) -> Brought:
    """Return the level of each node. Inputs with the dimension `seq` are tokens, all others are of the request."""
    graphs: dict[int, Levels] = {}
    fixed_regions: set[int] = set()
    if any("seq" not in i.type.symbols for i in graph.inputs):
        _levels(graph, (), graphs, fixed_regions)
    return Brought(graphs, frozenset(fixed_regions))


def _levels(graph: Graph, given: Sequence[int], graphs: dict[int, Levels], whole: set[int]) -> int:
    """Compute the levels of a graph and its regions.

    Args:
        graph: the graph or region.
        given: the levels of a region's operands.
        graphs: the result by graph id, extended in place.
        whole: ids of regions that do not move, extended in place.

    Returns:
        The highest level in the graph.
    """
    levels: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        op, operands = node.op, [levels[v.node] for v in node.inputs]
        if isinstance(op, Input):
            level = MOVES if "seq" in op.type.symbols else REQUEST
        elif isinstance(op, StateRead):
            level = MOVES
        elif isinstance(op, BodyInput):
            level = given[op.index]
        else:
            inner = (_region(region, op.carried(), operands, graphs, whole) for region in op.regions())
            level = max((*operands, *inner), default=WEIGHTS)
        levels[number] = level
    graphs[id(graph)] = levels
    return max(levels.values(), default=WEIGHTS)


def _region(region: Graph, carried: int, operands: list[int], graphs: dict[int, Levels], whole: set[int]) -> int:
    """Compute the levels of a region, and return the highest. In a region that moves, all carried values move."""
    level = _levels(region, operands, graphs, whole)
    if level < MOVES:
        whole.add(id(region))
        return level
    return _levels(region, [MOVES] * carried + operands[carried:], graphs, whole)


def reads_fixed(levels: Levels, node: Node) -> bool:
    """Return whether a node is attention with keys, values and masks that do not depend on tokens."""
    return isinstance(node.op, hir.Attention) and all(levels.get(v.node, MOVES) < MOVES for v in node.inputs[1:])


# -- separation of request values --------------------------------------------------------------


@dataclass
class Cutting:
    """Separates the values of the request from those that move while one graph is rewritten into `program`."""

    graph: Graph
    levels: Levels
    program: str

    @property
    def handed_on(self) -> set[int]:
        """Return the nodes of the request that regions read."""
        return {v.node for n in self.graph.nodes if n.op.regions() for v in n.inputs if self._kept(v)}

    def _kept(self, v: Value) -> bool:
        return self.levels[v.node] == REQUEST

    def dropped(self, b: Builder, number: int, node: Node) -> tuple[Value, ...]:
        """Return the replacement of a node of the request in `extend`.

        Regions get a constant as an operand, which is pruned later, since they read the state instead.

        Raises:
            DeriveError: the node is an output or is written to the state.
        """
        for v in (*self.graph.outputs, *(value for _, value in self.graph.writes)):
            if v.node == number:
                raise DeriveError("it depends on no token, and is an output of the flow: choose others with outputs()")
        return (b.leaf(constant(0, np.float32)),) * len(node.types) if number in self.handed_on else ()

    def operands(self, b: Builder, node: Node, inputs: tuple[Value, ...], keep: Keep) -> tuple[Value, ...]:
        """Return the operands of a node that moves; `prefill` stores values of the request, `extend` reads them."""
        if node.op.regions():
            return inputs
        values, region_operands = iter(inputs), self.handed_on
        operands = []
        for place, v in enumerate(node.inputs):
            # `extend` has no value for nodes that it dropped without a replacement.
            is_available = self.program == "prefill" or not self._kept(v) or v.node in region_operands
            value = next(values) if is_available else None
            if self._kept(v):
                t = self.graph.type(v)
                leaf, state_value = keep(b, node.origin.path, f"kept{place}", _checked(t), _roles(node, place, t))
                if self.program == "prefill" and value is not None:
                    b.writes.append((leaf, b(Overwrite(), state_value, value)))
                else:
                    b.writes.append((leaf, state_value))
                    value = state_value
            assert value is not None
            operands.append(value)
        return tuple(operands)


def _checked(t: TensorType) -> TensorType:
    """Check that a state leaf can have a type, and return the type.

    Sizes of symbols are inferred from the shapes of state arrays, so each has to be a number or a sum of symbols.

    Raises:
        DeriveError: a size is neither.
    """
    for dim in t.shape:
        if not is_static(dim) and not terms_of(dim):
            raise DeriveError(f"it reads {t}, which depends on no token; a state has no size {dim}, only sums")
    return t


def _roles(node: Node, place: int, t: TensorType) -> Roles:
    """Return the roles of a stored value's axes: the batch, and key heads for keys and values of attention."""
    rows = tuple("batch" if str(dim) == "batch" else None for dim in t.shape)
    return (*rows[:-1], "kv_heads") if isinstance(node.op, hir.Attention) and place in (1, 2) else rows


def pruned(op: Op, operands: tuple[Value, ...], types: TypeCache) -> tuple[Op, tuple[Value, ...]]:
    """Return an op without the operands that its regions do not read, and the remaining operands.

    Carried operands always remain.
    """
    regions = op.regions()
    read_indices = {n.op.index for region in regions for n in region.nodes if isinstance(n.op, BodyInput)}
    kept_indices = [i for i in range(len(operands)) if i < op.carried() or i in read_indices]
    if len(kept_indices) == len(operands):
        return op, operands
    numbers = {old: new for new, old in enumerate(kept_indices)}

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, BodyInput):
            return None
        return (b.leaf(BodyInput(numbers[node.op.index], type=node.op.type)),)

    bodies = (rewrite(region, lambda graph: fn if graph in regions else lambda *_: None, types) for region in regions)
    return op.with_regions(tuple(bodies)), tuple(operands[i] for i in kept_indices)


def inputs_read(graph: Graph) -> Iterator[Input]:
    """Yield the inputs of a graph that a node reads, and those with tokens."""
    names = {node.op.input for _, node in graph.walk() if isinstance(node.op, Input)}
    yield from (i for i in graph.inputs if i.input in names or "seq" in i.type.symbols)
