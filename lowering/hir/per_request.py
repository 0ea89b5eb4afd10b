"""Compute values that depend on a request but on no token, such as image features, once per request.

A value is *of the request* if it depends on an input other than tokens, and on no token. If a node that depends on
tokens reads a value of the request, `prefill` stores that value in the state and `extend` reads it from there. So
keys and values of cross-attention are computed with the prompt, and `extend` does not have the inputs that they depend
on.

Stored values are named after their reader, `layers.3.cross.kept1`, so that the state has the same leaves if layers are
rolled, scanned or taken out of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import DeriveError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Input, Node, Op, StateRead, TypeCache, Value, constant
from rlx_jax.ir.ops.cache import Overwrite
from rlx_jax.ir.param import Roles
from rlx_jax.ir.paths import Path, StateLeaf
from rlx_jax.ir.region import rewrite
from rlx_jax.ir.types import TensorType, is_static, terms_of

# Adds a leaf to the state: `Derivation.state`.
AddLeaf = Callable[[Builder, Path, str, TensorType, Roles], tuple[StateLeaf, Value]]

# Levels of dependence: on weights only, on inputs without tokens too, on tokens. A node has its operands' maximum.
WEIGHTS, REQUEST, TOKENS = range(3)

# The level of each node of a graph, by number.
Levels = Mapping[int, int]


@dataclass(frozen=True)
class RequestLevels:
    """Levels of the nodes of a graph and of its regions.

    Attributes:
        by_graph: the levels by the `id` of each graph; empty if nothing is of the request.
        fixed_regions: ids of the regions that depend on no token, so that all of a region is computed once.
    """

    by_graph: Mapping[int, Levels] = field(default_factory=dict)
    fixed_regions: frozenset[int] = frozenset()

    def levels_of(self, graph: Graph) -> Levels:
        """Return the levels of one graph or region; empty if nothing is of the request."""
        return self.by_graph.get(id(graph), {})

    def has_stored_values(self, graph: Graph) -> bool:
        """Return whether values of this graph are stored in the state."""
        return id(graph) not in self.fixed_regions and REQUEST in self.levels_of(graph).values()


def find_request_levels(graph: Graph) -> RequestLevels:
    """Return the level of each node. Inputs with the dimension `seq` are tokens, all others are of the request."""
    by_graph: dict[int, Levels] = {}
    fixed_regions: set[int] = set()
    if any("seq" not in i.type.symbols for i in graph.inputs):
        _compute_levels(graph, (), by_graph, fixed_regions)
    return RequestLevels(by_graph, frozenset(fixed_regions))


def _compute_levels(
    graph: Graph, operand_levels: Sequence[int], by_graph: dict[int, Levels], fixed_regions: set[int]
) -> int:
    """Compute the levels of a graph and its regions.

    Args:
        graph: the graph or region.
        operand_levels: the levels of a region's operands.
        by_graph: the result by graph id, extended in place.
        fixed_regions: ids of regions that depend on no token, extended in place.

    Returns:
        The highest level in the graph.
    """
    levels: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        op, operands = node.op, [levels[v.node] for v in node.inputs]
        if isinstance(op, Input):
            level = TOKENS if "seq" in op.type.symbols else REQUEST
        elif isinstance(op, StateRead):
            level = TOKENS
        elif isinstance(op, BodyInput):
            level = operand_levels[op.index]
        else:
            inner = (
                _region_level(region, op.num_carries(), operands, by_graph, fixed_regions) for region in op.regions()
            )
            level = max((*operands, *inner), default=WEIGHTS)
        levels[number] = level
    by_graph[id(graph)] = levels
    return max(levels.values(), default=WEIGHTS)


def _region_level(
    region: Graph, carried: int, operand_levels: list[int], by_graph: dict[int, Levels], fixed_regions: set[int]
) -> int:
    """Compute the levels of a region, and return the highest.

    In a region that depends on tokens, all carried values depend on them.
    """
    level = _compute_levels(region, operand_levels, by_graph, fixed_regions)
    if level < TOKENS:
        fixed_regions.add(id(region))
        return level
    return _compute_levels(region, [TOKENS] * carried + operand_levels[carried:], by_graph, fixed_regions)


def reads_fixed_keys(levels: Levels, node: Node) -> bool:
    """Return whether a node is attention with keys, values and masks that do not depend on tokens."""
    return isinstance(node.op, hir.Attention) and all(levels.get(v.node, TOKENS) < TOKENS for v in node.inputs[1:])


@dataclass
class RequestSplitter:
    """Separates values of the request from values that depend on tokens while a graph is rewritten into `program`."""

    graph: Graph
    levels: Levels
    program: str

    @property
    def region_operands(self) -> set[int]:
        """Return the nodes of the request that regions read."""
        return {v.node for n in self.graph.nodes if n.op.regions() for v in n.inputs if self._is_stored(v)}

    def _is_stored(self, v: Value) -> bool:
        return self.levels[v.node] == REQUEST

    def drop(self, b: Builder, number: int, node: Node) -> tuple[Value, ...]:
        """Return the replacement of a node of the request in `extend`.

        Regions get a constant as an operand, which is pruned later, since they read the state instead.

        Raises:
            DeriveError: the node is an output or is written to the state.
        """
        for v in (*self.graph.outputs, *(value for _, value in self.graph.writes)):
            if v.node == number:
                raise DeriveError("it depends on no token and is an output of the flow: select others with outputs()")
        return (b.leaf(constant(0, np.float32)),) * len(node.types) if number in self.region_operands else ()

    def operands(self, b: Builder, node: Node, inputs: tuple[Value, ...], add_leaf: AddLeaf) -> tuple[Value, ...]:
        """Return the operands of a node that depends on tokens.

        `prefill` stores values of the request in the state, and `extend` reads them from it.
        """
        if node.op.regions():
            return inputs
        values, region_operands = iter(inputs), self.region_operands
        operands = []
        for index, v in enumerate(node.inputs):
            # `extend` has no value for nodes that it dropped without a replacement.
            is_available = self.program == "prefill" or not self._is_stored(v) or v.node in region_operands
            value = next(values) if is_available else None
            if self._is_stored(v):
                t = self.graph.type(v)
                _check_leaf_type(t)
                leaf, state_value = add_leaf(b, node.origin.path, f"kept{index}", t, _roles(node, index, t))
                if self.program == "prefill" and value is not None:
                    b.writes.append((leaf, b(Overwrite(), state_value, value)))
                else:
                    b.writes.append((leaf, state_value))
                    value = state_value
            assert value is not None
            operands.append(value)
        return tuple(operands)


def _check_leaf_type(t: TensorType) -> None:
    """Check that a state leaf can have a type.

    Sizes of symbols are inferred from the shapes of state arrays, so each has to be a number or a sum of symbols.

    Raises:
        DeriveError: a size is neither.
    """
    for dim in t.shape:
        if not is_static(dim) and not terms_of(dim):
            raise DeriveError(f"it reads {t}, which depends on no token; a state has no size {dim}, only sums")


def _roles(node: Node, index: int, t: TensorType) -> Roles:
    """Return the roles of a stored value's axes: the batch, and key heads for keys and values of attention."""
    rows = tuple("batch" if str(dim) == "batch" else None for dim in t.shape)
    return (*rows[:-1], "kv_heads") if isinstance(node.op, hir.Attention) and index in (1, 2) else rows


def prune_operands(op: Op, operands: tuple[Value, ...], types: TypeCache) -> tuple[Op, tuple[Value, ...]]:
    """Return an op without the operands that its regions do not read, and the remaining operands.

    Carried operands always remain.
    """
    regions = op.regions()
    read_indices = {n.op.index for region in regions for n in region.nodes if isinstance(n.op, BodyInput)}
    kept_indices = [i for i in range(len(operands)) if i < op.num_carries() or i in read_indices]
    if len(kept_indices) == len(operands):
        return op, operands
    numbers = {old: new for new, old in enumerate(kept_indices)}

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, BodyInput):
            return None
        return (b.leaf(BodyInput(numbers[node.op.index], type=node.op.type)),)

    bodies = (rewrite(region, lambda graph: fn if graph in regions else lambda *_: None, types) for region in regions)
    return op.with_regions(tuple(bodies)), tuple(operands[i] for i in kept_indices)


def used_inputs(graph: Graph) -> Iterator[Input]:
    """Yield the inputs of a graph that a node reads, and those with tokens."""
    names = {node.op.input for _, node in graph.walk() if isinstance(node.op, Input)}
    yield from (i for i in graph.inputs if i.input in names or "seq" in i.type.symbols)
