"""Layers that repeat: one region instead of many copies.

`roll` looks at the node ranges that `Repeat` stages recorded while the flow was traced. If the layers
are the same but for their parameters, they become one `Repeat` node whose body is the smallest period.
Everything after treats that node through `regions` / `with_regions`; how it runs (a Python loop over the
body, or `lax.scan`) is the plan's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import (
    BodyInput,
    Builder,
    Graph,
    Leaf,
    Node,
    Op,
    Origin,
    Param,
    TypeCache,
    Value,
    everywhere,
    rewrite,
)
from rlx_jax.ir.ops.pointwise import captured_arrays
from rlx_jax.ir.types import LayerIndex, Path, TensorType, bind_path


@dataclass(frozen=True, eq=False)
class Repeat(Op):
    """Run `body` `count` times.

    Operands: the initial carries, then values shared by all iterations.
    Body outputs: the next carries, then side outputs.
    Results: the final carries, then every side output of every iteration (output-major).
    """

    count: int
    carries: int
    body: Graph

    def regions(self) -> tuple[Graph, ...]:
        return (self.body,)

    def with_regions(self, regions: tuple[Graph, ...]) -> Repeat:
        return replace(self, body=regions[0])

    def iterations(self) -> int:
        return self.count

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        out = [self.body.type(v) for v in self.body.outputs]
        for i, (before, after) in enumerate(zip(operands[: self.carries], out, strict=False)):
            if before != after:
                raise GraphError(f"repeat: carry {i} enters a layer as {before} and leaves it as {after}")
        return (*out[: self.carries], *(t for t in out[self.carries :] for _ in range(self.count)))

    def text(self) -> str:
        return f"repeat(count={self.count}, body={len(self.body.nodes)} nodes)"


@dataclass(frozen=True)
class Rolled:
    """The graph after `roll`, and why any repeat stayed as it was."""

    graph: Graph
    refusals: tuple[str, ...]


@dataclass(frozen=True)
class Ref:
    """An operand as seen from inside one layer."""

    kind: str  # "leaf", "local", "back" (an earlier layer) or "outer"
    op: Leaf | None = None
    back: int = 0
    at: int = 0
    index: int = 0


@dataclass(frozen=True)
class Layer:
    """One copy of the body: its non-leaf nodes and their operands seen from inside."""

    nodes: tuple[Node, ...]
    refs: tuple[tuple[Ref, ...], ...]
    operands: tuple[tuple[TensorType, ...], ...]


def roll(graph: Graph, repeats: Sequence[Sequence[int]], types: TypeCache) -> Rolled:
    """Turn each recorded repeat (the node number at which each layer starts, and the end) into a region."""
    refusals: list[str] = []
    for bounds in sorted(repeats, key=lambda r: r[0], reverse=True):  # from the back: earlier numbers stay valid
        layers = _layers(graph, bounds)
        period, refusal = _period(layers)
        if period is None:
            if refusal:
                refusals.append(refusal)
            continue
        graph = _build(graph, bounds, layers, period, types)
    return Rolled(graph, tuple(refusals))


# -- are the layers the same? ------------------------------------------------------------------


def _layers(graph: Graph, bounds: Sequence[int]) -> list[Layer]:
    """The layers between consecutive bounds, leaves aside."""
    home: dict[int, tuple[int, int]] = {}  # node number -> (layer, position among its non-leaf nodes)
    layers: list[Layer] = []
    for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        body = [i for i in range(start, end) if not isinstance(graph.nodes[i].op, Leaf)]
        home.update({i: (number, position) for position, i in enumerate(body)})
        refs = tuple(tuple(_ref(graph, v, number, home) for v in graph.nodes[i].inputs) for i in body)
        operands = tuple(tuple(graph.type(v) for v in graph.nodes[i].inputs) for i in body)
        layers.append(Layer(tuple(graph.nodes[i] for i in body), refs, operands))
    return layers


def _ref(graph: Graph, value: Value, layer: int, home: dict[int, tuple[int, int]]) -> Ref:
    op = graph.nodes[value.node].op
    if isinstance(op, Leaf):
        return Ref("leaf", op=op)
    if value.node not in home:
        return Ref("outer", at=value.node, index=value.index)
    owner, position = home[value.node]
    kind = "local" if owner == layer else "back"
    return Ref(kind, back=layer - owner, at=position, index=value.index)


def _period(layers: list[Layer]) -> tuple[int | None, str]:
    """The smallest period with at least two iterations, or why there is none."""
    first = ""
    for period in range(1, len(layers) // 2 + 1):
        rest = len(layers) // period * period
        pairs = ((layers[i - period], layers[i], i) for i in range(period, rest))
        difference = next((d for a, b, i in pairs if (d := _difference(a, b, i, period))), "")
        difference = difference or _entry_conflict(layers, period)
        if not difference:
            return period, ""
        first = first or difference
    return None, first


def _difference(a: Layer, b: Layer, number: int, period: int) -> str:
    """Why layer `b` (the one called `number`) is not the same program as `a`, one period before it; empty if it is."""
    if len(a.nodes) != len(b.nodes):
        return f"layer {number} has {len(b.nodes)} ops, the layer before it {len(a.nodes)}"
    for x, y, refs_x, refs_y, operands in zip(a.nodes, b.nodes, a.refs, b.refs, b.operands, strict=True):
        if x.types != y.types or not same_op(x.op, y.op, operands):
            return f"layer {number}, op {y.op.text()}: the layer before it has {x.op.text()}"
        if len(refs_x) != len(refs_y):
            return f"layer {number}, op {y.op.text()}: another number of operands"
        for p, q in zip(refs_x, refs_y, strict=True):
            # In the first iteration a carry comes from outside the repeat.
            enters = number < 2 * period and q.kind == "back" and number - q.back < period
            if not (p.kind in ("outer", "leaf") if enters else _same_ref(p, q)):
                return f"layer {number}, op {y.op.text()}: reads something else than the layer before it"
    return ""


def _entry_conflict(layers: list[Layer], period: int) -> str:
    """Why the first iteration's operands are not the initial values of carries; empty if they are."""
    initial: dict[tuple[int, int, int], Ref] = {}
    for j in range(period, 2 * period):
        for refs_0, refs_1 in zip(layers[j - period].refs, layers[j].refs, strict=True):
            for p, q in zip(refs_0, refs_1, strict=True):
                if q.kind == "back" and j - q.back < period:
                    source = (j - q.back, q.at, q.index)
                    if initial.setdefault(source, p) != p:
                        return f"layer {j}: one result of the layer before it has two initial values"
    return ""


def _same_ref(p: Ref, q: Ref) -> bool:
    if p.kind == q.kind == "leaf":
        assert p.op is not None and q.op is not None
        if isinstance(p.op, Param) and isinstance(q.op, Param):
            return p.op.type == q.op.type
        return p.op == q.op
    return p == q


def same_op(a: Op, b: Op, operands: tuple[TensorType, ...]) -> bool:
    """Equal attributes; closures are equal if their jaxprs and captured constants are."""
    if a == b:
        return True
    if type(a) is not type(b) or not hasattr(a, "__dataclass_fields__"):
        return False
    for name in a.__dataclass_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if callable(left) and callable(right):
            if not _same_closure(left, right, operands):
                return False
        elif left != right:
            return False
    return True


def _same_closure(f: Any, g: Any, operands: tuple[TensorType, ...]) -> bool:
    left, right = (jax.make_jaxpr(fn)(*(t.spec for t in operands)) for fn in (f, g))
    if str(left.jaxpr) != str(right.jaxpr):
        return False
    pairs = list(zip(captured_arrays(left), captured_arrays(right), strict=False))
    return all(np.array_equal(p, q) for p, q in pairs)


# -- building the region -----------------------------------------------------------------------


def _build(graph: Graph, bounds: Sequence[int], layers: list[Layer], period: int, types: TypeCache) -> Graph:
    """Replace the rolled layers by one Repeat node; what follows them stays plain."""
    count = len(layers) // period
    region = _Region(graph, bounds, layers, period, count, types)
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)
    mapped: dict[Value, Value] = {}

    def copy(number: int) -> None:
        node = graph.nodes[number]
        with b.at(node.origin):
            inputs = [mapped[v] for v in node.inputs]
            new = (b.leaf(node.op),) if isinstance(node.op, Leaf) else b.add(node.op, *inputs)
        mapped.update({Value(number, i): v for i, v in enumerate(new)})

    end = bounds[count * period]
    for number in range(bounds[0]):
        copy(number)
    for number in range(bounds[0], end):  # leaves made inside the layers may be used after them
        if isinstance(graph.nodes[number].op, Leaf) and region.used_outside(Value(number)):
            copy(number)
    operands = []
    for ref in (*region.initial, *region.shared):
        operands.append(b.leaf(ref.op) if ref.op is not None else mapped[Value(ref.at, ref.index)])
    with b.at(Origin(region.body_path, label="repeat")):
        results = b.add(Repeat(count, len(region.initial), region.body), *operands)
    mapped.update({value: results[i] for value, i in region.results.items()})
    for number in range(end, len(graph.nodes)):
        copy(number)
    b.writes.extend((leaf, mapped[v]) for leaf, v in graph.writes)
    return b.finish([mapped[v] for v in graph.outputs], graph.output_names)


class _Region:
    """Works out carries, shared operands, side outputs and the body of one Repeat."""

    def __init__(
        self, graph: Graph, bounds: Sequence[int], layers: list[Layer], period: int, count: int, types: TypeCache
    ) -> None:
        self.graph, self.layers, self.period, self.count = graph, layers, period, count
        self.numbers = [
            [i for i in range(s, e) if not isinstance(graph.nodes[i].op, Leaf)]
            for s, e in zip(bounds, bounds[1:], strict=False)
        ]
        end = bounds[count * period]
        self._outside = {v for n in graph.nodes[end:] for v in n.inputs} | set(graph.roots())
        # A carry is (layer within the period, position, result) of the iteration before.
        self.carries: dict[tuple[int, int, int], int] = {}
        self.initial: list[Ref] = []
        self.shared: list[Ref] = []
        self._shared_at: dict[Ref, int] = {}
        self._find_operands()
        self.body, self.body_path = self._make_body(types)
        self.results = self._find_results()

    def used_outside(self, value: Value) -> bool:
        return value in self._outside

    def _source(self, layer: int, ref: Ref) -> tuple[int, int, int] | None:
        """The carry that a reference of the second iteration means, if it leaves its iteration."""
        if ref.kind != "back" or layer - ref.back >= self.period:
            return None
        return (layer - ref.back, ref.at, ref.index)

    def _find_operands(self) -> None:
        for j in range(self.period):
            first, second = self.layers[j], self.layers[self.period + j]
            for refs_0, refs_1 in zip(first.refs, second.refs, strict=True):
                for ref_0, ref_1 in zip(refs_0, refs_1, strict=True):
                    source = self._source(self.period + j, ref_1)
                    if source is not None and source not in self.carries:
                        self.carries[source] = len(self.initial)
                        self.initial.append(ref_0)
                    elif ref_1.kind == "outer" and ref_1 not in self._shared_at:
                        self._shared_at[ref_1] = len(self.shared)
                        self.shared.append(ref_1)

    def _type(self, ref: Ref) -> TensorType:
        return ref.op.type if ref.op is not None else self.graph.nodes[ref.at].types[ref.index]

    def _make_body(self, types: TypeCache) -> tuple[Graph, Path]:
        b = Builder("body", types)
        n = len(self.initial)
        carried = [b.leaf(BodyInput(i, type=self._type(r))) for i, r in enumerate(self.initial)]
        shared = [b.leaf(BodyInput(n + i, type=self._type(r))) for i, r in enumerate(self.shared)]
        made: dict[tuple[int, int], tuple[Value, ...]] = {}

        def operand(layer: int, ref: Ref, position: int, slot: int) -> Value:
            source = self._source(layer, ref)
            if ref.op is not None:
                return b.leaf(self._leaf(layer, position, slot))
            if source is not None:
                return carried[self.carries[source]]
            if ref.kind == "outer":
                return shared[self._shared_at[ref]]
            return made[(layer - ref.back, ref.at)][ref.index]

        for j in range(self.period, 2 * self.period):
            layer = self.layers[j]
            for position, (node, refs) in enumerate(zip(layer.nodes, layer.refs, strict=True)):
                before = self.layers[j - self.period].nodes[position].origin
                with b.at(Origin(indexed(before.path, node.origin.path, self.period, j), node.origin.label)):
                    inputs = [operand(j, ref, position, slot) for slot, ref in enumerate(refs)]
                    made[(j, position)] = b.add(node.op, *inputs)
        self._made = made
        outputs = [made[(self.period + j, at)][i] for j, at, i in self.carries]
        self.sides = self._find_sides()
        outputs += [made[(self.period + j, at)][i] for j, at, i in self.sides]
        path = next((n.origin.path for n in b.nodes if not isinstance(n.op, Leaf)), ())
        return b.finish(outputs), path[: next((i for i, s in enumerate(path) if isinstance(s, LayerIndex)), 0)]

    def _leaf(self, layer: int, position: int, slot: int) -> Leaf:
        """The leaf at one operand place, with the programs of all iterations."""
        ops = [self.layers[k * self.period + layer - self.period].refs[position][slot].op for k in range(self.count)]
        first = ops[0]
        assert first is not None
        if not isinstance(first, Param):
            return first
        programs = tuple(op.programs[0] for op in ops if isinstance(op, Param))
        return first if len(set(programs)) == 1 else replace(first, programs=programs)

    def _find_sides(self) -> list[tuple[int, int, int]]:
        """What is read after the repeat and is not a final carry."""
        sides: dict[tuple[int, int, int], None] = {}
        for layer in range(self.count * self.period):
            last = layer >= (self.count - 1) * self.period
            for position, number in enumerate(self.numbers[layer]):
                for i in range(len(self.graph.nodes[number].types)):
                    source = (layer % self.period, position, i)
                    if self.used_outside(Value(number, i)) and not (last and source in self.carries):
                        sides[source] = None
        return list(sides)

    def _find_results(self) -> dict[Value, int]:
        """Where each value that is read outside stands among the results of the Repeat node."""
        found: dict[Value, int] = {}
        for layer in range(self.count * self.period):
            iteration = layer // self.period
            for position, number in enumerate(self.numbers[layer]):
                for i in range(len(self.graph.nodes[number].types)):
                    source = (layer % self.period, position, i)
                    if source in self.carries and iteration == self.count - 1:
                        found[Value(number, i)] = self.carries[source]
                    elif source in self.sides:
                        base = len(self.carries) + self.sides.index(source) * self.count
                        found[Value(number, i)] = base + iteration
        return found


def indexed(before: Path, path: Path, period: int, layer: int) -> Path:
    """Replace the segment that counts layers: `layers.3.attn` with period 1 becomes `layers.{i}.attn`."""
    out: list[str | int | LayerIndex] = []
    for p, q in zip(before, path, strict=False):
        counts = isinstance(p, int) and isinstance(q, int) and q - p == period
        out.append(LayerIndex(period, layer - period) if counts else p)
    return tuple(out)


# -- taking an iteration out ---------------------------------------------------------------------


def peel_last(graph: Graph, types: TypeCache) -> Graph:
    """The same program with the last iteration of each region behind it as plain nodes.

    For programs without state: what is written inside a region stays there.
    """

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if not isinstance(op, Repeat) or op.count < 2 or op.body.writes or any(n.op.regions() for n in op.body.nodes):
            return None
        count, shared = op.count - 1, inputs[op.carries :]
        if count > 1:
            first = b.add(replace(op, count=count, body=_first_programs(op.body, count, types)), *inputs)
        else:
            first = _iteration(b, op.body, inputs, 0)
        carries, sides = first[: op.carries], first[op.carries :]
        last = _iteration(b, op.body, (*carries, *shared), count)
        columns = zip(range(0, len(sides), count), last[op.carries :], strict=True)
        return (*last[: op.carries], *(v for at, side in columns for v in (*sides[at : at + count], side)))

    return rewrite(graph, everywhere(fn), types)


def _iteration(b: Builder, body: Graph, operands: Sequence[Value], number: int) -> tuple[Value, ...]:
    """The nodes of one iteration; its outputs."""
    mapped: dict[Value, Value] = {}
    for i, node in enumerate(body.nodes):
        with b.at(replace(node.origin, path=bind_path(node.origin.path, number))):
            match node.op:
                case BodyInput(index=index):
                    new: tuple[Value, ...] = (operands[index],)
                case Param() as param:
                    new = (b.leaf(replace(param, programs=(param.at(number),))),)
                case Leaf() as leaf:
                    new = (b.leaf(leaf),)
                case op:
                    new = b.add(op, *(mapped[v] for v in node.inputs))
        mapped.update({Value(i, index): v for index, v in enumerate(new)})
    return tuple(mapped[v] for v in body.outputs)


def _first_programs(body: Graph, count: int, types: TypeCache) -> Graph:
    """The body of the first `count` iterations."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, Param) or len(node.op.programs) == 1:
            return None
        return (b.leaf(replace(node.op, programs=node.op.programs[:count])),)

    return rewrite(body, everywhere(fn), types)
