"""Search for repeated layers: runs of layers that are the same program, so that each run may become a region.

Two layers are the same program if they have the same ops on corresponding operands. Parameters may differ. Closures are
compared by what they compute. With a period of one layer, a result of layer i that layer i + 1 reads corresponds to the
same result of layer i − 1 that layer i reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import Graph, Leaf, Node, Op, Param, Value
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.user_functions import Fingerprint, fingerprint, trace


@dataclass(frozen=True)
class Ref:
    """An operand: a leaf (`op`), or result `index` of node number `node`.

    That node is op number `position` of layer `layer`; both are −1 if the node precedes all layers.
    """

    op: Leaf | None = None
    node: int = -1
    index: int = 0
    layer: int = -1
    position: int = -1


@dataclass(frozen=True)
class Layer:
    """The nodes of one layer except leaves: their numbers, the nodes, their operands, and the types of the operands."""

    numbers: tuple[int, ...]
    nodes: tuple[Node, ...]
    refs: tuple[tuple[Ref, ...], ...]
    operands: tuple[tuple[TensorType, ...], ...]

    @functools.cached_property
    def lowest_read(self) -> float:
        """The lowest number of a layer that this layer reads; infinity if it reads none."""
        return min((ref.layer for refs in self.refs for ref in refs if ref.layer >= 0), default=math.inf)


@dataclass(frozen=True)
class Run:
    """`count` iterations of `period` layers each, from layer `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The number of the layer after the last."""
        return self.start + self.period * self.count


def layers_of(graph: Graph, bounds: Sequence[int]) -> list[Layer]:
    """Return the layers between consecutive bounds, which are node numbers."""
    positions: dict[int, tuple[int, int]] = {}  # node number -> (layer, position among its nodes)
    layers: list[Layer] = []
    for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        body = [i for i in range(start, end) if not isinstance(graph.nodes[i].op, Leaf)]
        positions.update({i: (number, position) for position, i in enumerate(body)})
        nodes = tuple(graph.nodes[i] for i in body)
        refs = tuple(tuple(_ref(graph, v, positions) for v in node.inputs) for node in nodes)
        operands = tuple(tuple(graph.type(v) for v in node.inputs) for node in nodes)
        layers.append(Layer(tuple(body), nodes, refs, operands))
    return layers


def _ref(graph: Graph, value: Value, positions: dict[int, tuple[int, int]]) -> Ref:
    op = graph.nodes[value.node].op
    if isinstance(op, Leaf):
        return Ref(op)
    return Ref(None, value.node, value.index, *positions.get(value.node, (-1, -1)))


# -- runs of layers ----------------------------------------------------------------------------


def find_runs(layers: Sequence[Layer]) -> tuple[list[Run], str]:
    """Return the runs of layers that are the same program, and a message if they are not a single run (else "").

    If the layers repeat to their end with some period, the result is one run of the smallest such period. Remaining
    layers, fewer than a period, stay plain. Exception: a period that occurs only twice is a coincidence (two layers
    were edited the same way) if other runs need less than half as many bodies.

    Otherwise the result is the runs that need the fewest bodies, where each plain layer counts as one body.
    """
    finder = _RunFinder(layers)
    ends = []
    for period in range(1, len(layers) // 2 + 1):
        run, end = finder.longest_run(0, period)
        if end < len(layers):
            ends.append((end if run.count > 1 else 0, end, period))
        elif run.count > 2 or _bodies([run], end) <= 2 * _bodies(finder.find_fewest_bodies(), end):
            return [run], ""
    if not ends:
        return [], ""
    # The period that extends furthest belongs to the unedited layers, so the layer that ends it explains the refusal.
    _, end, period = max(ends, key=lambda candidate: candidate[0])
    return finder.find_fewest_bodies(), f"layer {end}{finder.end_reason(end, 0, period)}"


def _bodies(runs: Sequence[Run], layers: int) -> int:
    """Return the number of layers in the resulting program: one period for each run, and every plain layer."""
    return layers - sum(run.period * (run.count - 1) for run in runs)


class _RunFinder:
    """The layers of a repeat, with their kinds and a cache of comparisons."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.kinds = layers, _kinds(layers)
        self._read_difference = functools.cache(functools.partial(_read_difference, layers))

    def find_fewest_bodies(self) -> list[Run]:
        """Return the runs that minimize the number of bodies, by dynamic programming from the last layer."""
        end = len(self.layers)
        cost: list[int] = [0] * (end + 1)  # the fewest bodies of the layers from each index on
        first_run: list[Run | None] = [None] * end
        for start in reversed(range(end)):
            cost[start], longest_stop = 1 + cost[start + 1], start
            for period in range(1, (end - start) // 2 + 1):
                if self._longest_by_ops(start, period).stop <= longest_stop:
                    continue  # a smaller period extends at least as far
                run, _ = self.longest_run(start, period)
                if run.count < 2 or run.stop <= longest_stop:
                    continue
                longest_stop = run.stop
                if period + cost[run.stop] < cost[start]:
                    cost[start], first_run[start] = period + cost[run.stop], run
        runs, start = [], 0
        while start < end:
            run_at_start = first_run[start]
            runs += [run_at_start] if run_at_start is not None else []
            start = run_at_start.stop if run_at_start is not None else start + 1
        return runs

    def _longest_by_ops(self, start: int, period: int) -> Run:
        """Return an upper bound of the run from `start`, which compares only ops and so is cheap."""
        end = start + period
        while end < len(self.kinds) and self.kinds[end] == self.kinds[end - period]:
            end += 1
        return Run(start, period, (end - start) // period)

    def longest_run(self, start: int, period: int) -> tuple[Run, int]:
        """Return the longest run from `start` with this period, and the number of the layer that ends it."""
        kinds, end = self.kinds, start + period
        while end < len(kinds) and kinds[end] == kinds[end - period] and not self._read_mismatch(end, start, period):
            # The end of the second iteration: all carries are known now, so their initial values can be checked.
            if end == start + 2 * period - 1 and _entry_conflict(self.layers, start, period):
                break
            end += 1
        return Run(start, period, (end - start) // period), end

    def _read_mismatch(self, number: int, start: int, period: int) -> str:
        """Return why the operands of layer `number` do not correspond to those one period earlier; "" if they do."""
        # If neither layer reads a layer before the run, the result does not depend on `start`. A common value of it
        # then lets the cache answer for all starts.
        earliest = min(number - 2 * period, *(self.layers[i].lowest_read for i in (number, number - period)))
        return self._read_difference(number, max(start, int(earliest)), period)

    def end_reason(self, number: int, start: int, period: int) -> str:
        """Return why layer `number` ends a run from `start`."""
        if self.kinds[number] != self.kinds[number - period]:
            return _op_difference(self.layers[number - period], self.layers[number], {})
        return self._read_mismatch(number, start, period) or _entry_conflict(self.layers, start, period)


# -- the same ops ------------------------------------------------------------------------------


# The jaxpr and the captured arrays of closures, by their id and operand types.
Traces = dict[tuple[int, tuple[TensorType, ...]], Fingerprint]


def _kinds(layers: Sequence[Layer]) -> list[int]:
    """Return the kind of each layer: the number of the first layer with the same ops."""
    kinds: list[int] = []
    traces: Traces = {}
    for layer in layers:
        distinct = dict.fromkeys(kinds)
        kinds.append(next((k for k in distinct if not _op_difference(layers[k], layer, traces)), len(kinds)))
    return kinds


def _op_difference(a: Layer, b: Layer, traces: Traces) -> str:
    """Return why the ops of `b` differ from those of `a`, as text that continues "layer N"; "" if they are the same."""
    if len(a.nodes) != len(b.nodes):
        return f" has {len(b.nodes)} ops, the layer before it {len(a.nodes)}"
    for x, y, operands in zip(a.nodes, b.nodes, b.operands, strict=True):
        if x.types != y.types or not _same_op(x.op, y.op, operands, traces):
            return f", op {y.op.text()}: the layer before it has {x.op.text()}"
        if x.origin.token_wise != y.origin.token_wise:
            return f", op {y.op.text()}: only one of the two is marked token_wise"
    return ""


def _same_op(a: Op, b: Op, operands: tuple[TensorType, ...], traces: Traces) -> bool:
    """Return whether two ops have equal attributes; closures are equal if their jaxprs and captured arrays are."""
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
    """Return whether two regions have the same nodes in the same order."""
    if len(a.nodes) != len(b.nodes) or a.outputs != b.outputs:
        return False
    return all(
        x.inputs == y.inputs and x.types == y.types and _same_op(x.op, y.op, tuple(map(a.type, x.inputs)), traces)
        for x, y in zip(a.nodes, b.nodes, strict=True)
    )


def _same_closure(f: Any, g: Any, operands: tuple[TensorType, ...], traces: Traces) -> bool:
    for fn in (f, g):
        if (id(fn), operands) not in traces:
            traces[id(fn), operands] = fingerprint(trace(fn, operands)[0])
    return traces[id(f), operands] == traces[id(g), operands]


# -- the same operands -------------------------------------------------------------------------


def _read_difference(layers: Sequence[Layer], number: int, start: int, period: int) -> str:
    """Return why the operands of layer `number` do not correspond to those one period earlier; "" if they do.

    `start` is the first layer of the run. The text continues "layer N".
    """
    a, b = layers[number - period], layers[number]
    for node, refs_a, refs_b in zip(b.nodes, a.refs, b.refs, strict=True):
        if len(refs_a) != len(refs_b):
            return f", op {node.op.text()}: another number of operands"
        for p, q in zip(refs_a, refs_b, strict=True):
            # In the first iteration a carry comes from outside the run: it reads the initial value.
            is_entry = number < start + 2 * period and start <= q.layer < start + period
            if not (p.layer < start if is_entry else _same_ref(p, q, start, period)):
                return f", op {node.op.text()}: reads something else than the layer before it"
    return ""


def _same_ref(p: Ref, q: Ref, start: int, period: int) -> bool:
    """Return whether operand `q` corresponds to operand `p` of one period earlier, in a run from layer `start`."""
    if p.op is not None and q.op is not None:
        return p.op.type == q.op.type if isinstance(p.op, Param) and isinstance(q.op, Param) else p.op == q.op
    if p.layer >= start and q.layer >= start:
        return (p.layer + period, p.position, p.index) == (q.layer, q.position, q.index)
    return p == q and p.layer < start


def _entry_conflict(layers: Sequence[Layer], start: int, period: int) -> str:
    """Return why the first iteration does not give every carry a single initial value; "" if it does."""
    initial: dict[Ref, Ref] = {}
    for number in range(start + period, start + 2 * period):
        for refs_a, refs_b in zip(layers[number - period].refs, layers[number].refs, strict=True):
            for p, q in zip(refs_a, refs_b, strict=True):
                if start <= q.layer < start + period and initial.setdefault(q, p) != p:
                    return ": one result of the layer before it has two initial values"
    return ""
