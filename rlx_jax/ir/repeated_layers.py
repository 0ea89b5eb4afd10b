"""Which layers of a stack are the same program, so that they may become regions.

Layers are alike if their ops are, and what these read: parameters may differ, closures are compared by what they
compute, and a result of the layer before stands where the layer before read one from the layer before it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx_jax.ir.graph import Graph, Leaf, Node, Op, Param, Value
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.user_functions import Meaning, meaning, trace


@dataclass(frozen=True)
class Ref:
    """An operand: a leaf (`op`), or result `index` of node number `node`.

    That node is op number `at` of layer `layer`; both are −1 where it stands before all layers.
    """

    op: Leaf | None = None
    node: int = -1
    index: int = 0
    layer: int = -1
    at: int = -1


@dataclass(frozen=True)
class Layer:
    """The nodes of one layer that are no leaves, by their numbers, with their operands and the types of those."""

    numbers: tuple[int, ...]
    nodes: tuple[Node, ...]
    refs: tuple[tuple[Ref, ...], ...]
    operands: tuple[tuple[TensorType, ...], ...]

    @functools.cached_property
    def reach(self) -> float:
        """The first layer that it reads."""
        return min((ref.layer for refs in self.refs for ref in refs if ref.layer >= 0), default=math.inf)


@dataclass(frozen=True)
class Run:
    """`count` iterations of `period` layers each, from layer `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The layer behind the last."""
        return self.start + self.period * self.count


def layers_of(graph: Graph, bounds: Sequence[int]) -> list[Layer]:
    """The layers between consecutive bounds, which are node numbers."""
    home: dict[int, tuple[int, int]] = {}  # node number -> (layer, position among its nodes)
    layers: list[Layer] = []
    for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        body = [i for i in range(start, end) if not isinstance(graph.nodes[i].op, Leaf)]
        home.update({i: (number, at) for at, i in enumerate(body)})
        nodes = tuple(graph.nodes[i] for i in body)
        refs = tuple(tuple(_ref(graph, v, home) for v in node.inputs) for node in nodes)
        operands = tuple(tuple(graph.type(v) for v in node.inputs) for node in nodes)
        layers.append(Layer(tuple(body), nodes, refs, operands))
    return layers


def _ref(graph: Graph, value: Value, home: dict[int, tuple[int, int]]) -> Ref:
    op = graph.nodes[value.node].op
    if isinstance(op, Leaf):
        return Ref(op)
    return Ref(None, value.node, value.index, *home.get(value.node, (-1, -1)))


# -- runs of layers ----------------------------------------------------------------------------


def find_runs(layers: Sequence[Layer]) -> tuple[list[Run], str]:
    """The runs of layers that are the same program, and why they are not one; empty if they are.

    One run of the smallest period with which the layers repeat to their end, where there is one; layers that are left
    over, fewer than a period, stay plain. A period that comes twice only is an accident (two layers were edited) if
    other runs leave less than half as many bodies. Else the runs that leave the fewest, plain layers counted as such.
    """
    stack = _Stack(layers)
    ends = []
    for period in range(1, len(layers) // 2 + 1):
        run, end = stack.longest(0, period)
        if end < len(layers):
            ends.append((end if run.count > 1 else 0, end, period))
        elif run.count > 2 or _bodies([run], end) <= 2 * _bodies(stack.fewest_bodies(), end):
            return [run], ""
    if not ends:
        return [], ""
    # The period that goes furthest is the one that the layers have, but for those that were edited.
    _, end, period = max(ends, key=lambda found: found[0])
    return stack.fewest_bodies(), f"layer {end}{stack.difference(end, 0, period)}"


def _bodies(runs: Sequence[Run], layers: int) -> int:
    """Layers that are written out: those of a period once, plain ones each."""
    return layers - sum(run.period * (run.count - 1) for run in runs)


class _Stack:
    """Layers, with what is known of them."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.kinds = layers, _kinds(layers)
        self._other_reads = functools.cache(functools.partial(_other_reads, layers))

    def fewest_bodies(self) -> list[Run]:
        """The runs between plain layers, so that there are as few plain layers and layers of periods as can be."""
        end = len(self.layers)
        cost: list[int] = [0] * (end + 1)  # of the layers from here on
        first: list[Run | None] = [None] * end
        for start in reversed(range(end)):
            cost[start], reached = 1 + cost[start + 1], start
            for period in range(1, (end - start) // 2 + 1):
                if self._longest_by_ops(start, period).stop <= reached:
                    continue  # a smaller period goes as far
                run, _ = self.longest(start, period)
                if run.count < 2 or run.stop <= reached:
                    continue
                reached = run.stop
                if period + cost[run.stop] < cost[start]:
                    cost[start], first[start] = period + cost[run.stop], run
        runs, start = [], 0
        while start < end:
            here = first[start]
            runs += [here] if here is not None else []
            start = here.stop if here is not None else start + 1
        return runs

    def _longest_by_ops(self, start: int, period: int) -> Run:
        """At most so long is a run from `start`."""
        end = start + period
        while end < len(self.kinds) and self.kinds[end] == self.kinds[end - period]:
            end += 1
        return Run(start, period, (end - start) // period)

    def longest(self, start: int, period: int) -> tuple[Run, int]:
        """The longest run from `start`, and the layer that ends it."""
        kinds, end = self.kinds, start + period
        while end < len(kinds) and kinds[end] == kinds[end - period] and not self._misread(end, start, period):
            if end == start + 2 * period - 1 and _entry_conflict(self.layers, start, period):
                break
            end += 1
        return Run(start, period, (end - start) // period), end

    def _misread(self, number: int, start: int, period: int) -> str:
        """Why layer `number` does not read what the one a period before reads; empty if it does."""
        # Where neither reads a layer before the run, where that starts makes no difference.
        steady = min(number - 2 * period, *(self.layers[i].reach for i in (number, number - period)))
        return self._other_reads(number, max(start, int(steady)), period)

    def difference(self, number: int, start: int, period: int) -> str:
        """Why layer `number` ends a run from `start`."""
        if self.kinds[number] != self.kinds[number - period]:
            return _other_ops(self.layers[number - period], self.layers[number], {})
        return self._misread(number, start, period) or _entry_conflict(self.layers, start, period)


# -- the same ops ------------------------------------------------------------------------------


# What closures compute, by their id and operand types: jaxprs and captured arrays.
Traces = dict[tuple[int, tuple[TensorType, ...]], Meaning]


def _kinds(layers: Sequence[Layer]) -> list[int]:
    """A number for each layer: that of the first one with the same ops."""
    found: list[int] = []
    traces: Traces = {}
    for layer in layers:
        known = dict.fromkeys(found)
        found.append(next((k for k in known if not _other_ops(layers[k], layer, traces)), len(found)))
    return found


def _other_ops(a: Layer, b: Layer, traces: Traces) -> str:
    """Why the ops of `b` are not those of `a`; empty if they are."""
    if len(a.nodes) != len(b.nodes):
        return f" has {len(b.nodes)} ops, the layer before it {len(a.nodes)}"
    for x, y, operands in zip(a.nodes, b.nodes, b.operands, strict=True):
        if x.types != y.types or not _same_op(x.op, y.op, operands, traces):
            return f", op {y.op.text()}: the layer before it has {x.op.text()}"
        if x.origin.token_wise != y.origin.token_wise:
            return f", op {y.op.text()}: one of both is said to be token_wise"
    return ""


def _same_op(a: Op, b: Op, operands: tuple[TensorType, ...], traces: Traces) -> bool:
    """Equal attributes; closures are equal if their jaxprs and captured constants are."""
    if a == b:
        return True
    if type(a) is not type(b) or not hasattr(a, "__dataclass_fields__"):
        return False
    for name in (name for name, f in a.__dataclass_fields__.items() if f.compare):
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, Graph) and isinstance(right, Graph):
            if not _same_body(left, right, traces):
                return False
        elif callable(left) and callable(right):
            if not _same_closure(left, right, operands, traces):
                return False
        elif left != right:
            return False
    return True


def _same_body(a: Graph, b: Graph, traces: Traces) -> bool:
    """The same nodes in the same order, of ops that are the same."""
    if len(a.nodes) != len(b.nodes) or a.outputs != b.outputs:
        return False
    return all(
        x.inputs == y.inputs and x.types == y.types and _same_op(x.op, y.op, tuple(map(a.type, x.inputs)), traces)
        for x, y in zip(a.nodes, b.nodes, strict=True)
    )


def _same_closure(f: Any, g: Any, operands: tuple[TensorType, ...], traces: Traces) -> bool:
    for fn in (f, g):
        if (id(fn), operands) not in traces:
            traces[id(fn), operands] = meaning(trace(fn, operands)[0])
    return traces[id(f), operands] == traces[id(g), operands]


# -- the same operands -------------------------------------------------------------------------


def _other_reads(layers: Sequence[Layer], number: int, start: int, period: int) -> str:
    """Why layer `number` of a run does not read what the one a period before reads; empty if it does."""
    a, b = layers[number - period], layers[number]
    for node, refs_a, refs_b in zip(b.nodes, a.refs, b.refs, strict=True):
        if len(refs_a) != len(refs_b):
            return f", op {node.op.text()}: another number of operands"
        for p, q in zip(refs_a, refs_b, strict=True):
            # In the first iteration a carry comes from outside of the run.
            enters = number < start + 2 * period and start <= q.layer < start + period
            if not (p.layer < start if enters else _same_ref(p, q, start, period)):
                return f", op {node.op.text()}: reads something else than the layer before it"
    return ""


def _same_ref(p: Ref, q: Ref, start: int, period: int) -> bool:
    if p.op is not None and q.op is not None:
        return p.op.type == q.op.type if isinstance(p.op, Param) and isinstance(q.op, Param) else p.op == q.op
    if p.layer >= start and q.layer >= start:
        return (p.layer + period, p.at, p.index) == (q.layer, q.at, q.index)
    return p == q and p.layer < start


def _entry_conflict(layers: Sequence[Layer], start: int, period: int) -> str:
    """Why the first iteration's operands are not the initial values of carries; empty if they are."""
    initial: dict[Ref, Ref] = {}
    for number in range(start + period, start + 2 * period):
        for refs_a, refs_b in zip(layers[number - period].refs, layers[number].refs, strict=True):
            for p, q in zip(refs_a, refs_b, strict=True):
                if start <= q.layer < start + period and initial.setdefault(q, p) != p:
                    return ": one result of the layer before it has two initial values"
    return ""
