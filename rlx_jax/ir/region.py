"""Layers that repeat: one region instead of many copies.

`roll` looks at the node ranges that `Repeat` stages recorded while the flow was traced. If the layers
are the same but for their parameters, they become one `Repeat` node whose body is the smallest period.
Everything after treats that node through `regions` / `with_regions`; how it runs (a Python loop over the
body, or `lax.scan`) is the plan's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Leaf, Node, Op, Param, TypeCache, Value
from rlx_jax.ir.paths import LayerIndex, Origin, Path, bind_path
from rlx_jax.ir.repeated_layers import Layer, Ref, Run, find_runs, layers_of
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.types import TensorType


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

    def carried(self) -> int:
        return self.carries

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        out = [self.body.type(v) for v in self.body.outputs]
        for i, (before, after) in enumerate(zip(operands[: self.carries], out, strict=False)):
            if before != after:
                raise GraphError(f"repeat: carry {i} enters a layer as {before} and leaves it as {after}")
        return (*out[: self.carries], *(t for t in out[self.carries :] for _ in range(self.count)))

    def text(self) -> str:
        return f"repeat(count={self.count}, body={len(self.body.nodes)} nodes)"


def roll(graph: Graph, repeats: Sequence[Sequence[int]], types: TypeCache) -> tuple[Graph, tuple[str, ...]]:
    """Turn each recorded repeat (the node number at which each layer starts, and the end) into regions.

    Return the graph, and why any repeat stayed as it was.

    Layers that are the same program become one region; where some are not, those around them become several.
    """
    refusals: list[str] = []
    for bounds in sorted(repeats, key=lambda r: r[0], reverse=True):  # from the back: earlier numbers stay valid
        layers = layers_of(graph, bounds)
        runs, refusal = find_runs(layers)
        refusals += [refusal] if refusal else []
        for run in reversed(runs):
            graph = _build(graph, bounds, layers, run, types)
    return graph, tuple(refusals)


def _build(graph: Graph, bounds: Sequence[int], layers: list[Layer], run: Run, types: TypeCache) -> Graph:
    """Replace the layers of a run by one Repeat node."""
    start, end = bounds[run.start], bounds[run.stop]
    region = _Region(graph, layers, run, end, types)
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)
    mapped: dict[Value, Value] = {}

    def copy(number: int) -> None:
        node = graph.nodes[number]
        with b.at(node.origin):
            new = b.append(node.op, *(mapped[v] for v in node.inputs))
        mapped.update({Value(number, i): v for i, v in enumerate(new)})

    for number in range(start):
        copy(number)
    for number in range(start, end):  # leaves made inside the layers may be used after them
        if isinstance(graph.nodes[number].op, Leaf) and Value(number) in region.outside:
            copy(number)
    operands = []
    for ref in (*region.initial, *region.shared):
        operands.append(b.leaf(ref.op) if ref.op is not None else mapped[Value(ref.node, ref.index)])
    with b.at(Origin(region.body_path, label="repeat")):
        results = b.add(Repeat(run.count, len(region.initial), region.body), *operands)
    mapped.update({value: results[i] for value, i in region.results.items()})
    for number in range(end, len(graph.nodes)):
        copy(number)
    b.writes.extend((leaf, mapped[v]) for leaf, v in graph.writes)
    return b.finish([mapped[v] for v in graph.outputs], graph.output_names)


# Where a value comes from: layer within the period, position among its nodes, result.
Source = tuple[int, int, int]


class _Region:
    """Works out carries, shared operands, side outputs and the body of one Repeat. Layers count from its first."""

    def __init__(self, graph: Graph, layers: list[Layer], run: Run, end: int, types: TypeCache) -> None:
        self.graph, self.start, self.period, self.count = graph, run.start, run.period, run.count
        self.layers = layers[run.start : run.stop]
        self.outside = {v for n in graph.nodes[end:] for v in n.inputs} | set(graph.roots())
        self.carries: dict[Source, int] = {}  # by what they are in the iteration before
        self.initial: list[Ref] = []
        self.shared: list[Ref] = []
        self._shared_at: dict[Ref, int] = {}
        self._find_operands()
        self.body, self.body_path = self._make_body(types)
        self.results = self._find_results()

    def _source(self, ref: Ref) -> Source | None:
        """The carry that a reference of the second iteration means, if it leaves its iteration."""
        layer = ref.layer - self.start
        return (layer, ref.at, ref.index) if 0 <= layer < self.period else None

    def _find_operands(self) -> None:
        for first, second in zip(self.layers[: self.period], self.layers[self.period :], strict=False):
            for refs_0, refs_1 in zip(first.refs, second.refs, strict=True):
                for ref_0, ref_1 in zip(refs_0, refs_1, strict=True):
                    source = self._source(ref_1)
                    if source is not None and source not in self.carries:
                        self.carries[source] = len(self.initial)
                        self.initial.append(ref_0)
                    elif self._is_outer(ref_1) and ref_1 not in self._shared_at:
                        self._shared_at[ref_1] = len(self.shared)
                        self.shared.append(ref_1)

    def _is_outer(self, ref: Ref) -> bool:
        return ref.op is None and ref.layer < self.start

    def _type(self, ref: Ref) -> TensorType:
        return ref.op.type if ref.op is not None else self.graph.nodes[ref.node].types[ref.index]

    def _make_body(self, types: TypeCache) -> tuple[Graph, Path]:
        b = Builder("body", types)
        n = len(self.initial)
        carried = [b.leaf(BodyInput(i, type=self._type(r))) for i, r in enumerate(self.initial)]
        shared = [b.leaf(BodyInput(n + i, type=self._type(r))) for i, r in enumerate(self.shared)]
        made: dict[tuple[int, int], tuple[Value, ...]] = {}

        def operand(layer: int, ref: Ref, position: int, slot: int) -> Value:
            source = self._source(ref)
            if ref.op is not None:
                return b.leaf(self._leaf(layer, position, slot))
            if source is not None:
                return carried[self.carries[source]]
            if self._is_outer(ref):
                return shared[self._shared_at[ref]]
            return made[(ref.layer - self.start, ref.at)][ref.index]

        for j in range(self.period, 2 * self.period):
            layer = self.layers[j]
            for position, (node, refs) in enumerate(zip(layer.nodes, layer.refs, strict=True)):
                paths = [other.nodes[position].origin.path for other in self.layers[j - self.period :: self.period]]
                with b.at(replace(node.origin, path=indexed(paths))):
                    inputs = [operand(j, ref, position, slot) for slot, ref in enumerate(refs)]
                    made[(j, position)] = b.add(node.op, *inputs)
        outputs = [made[(self.period + j, at)][i] for j, at, i in self.carries]
        read = self._read_outside()  # and is not the final value of a carry
        self.sides = list(dict.fromkeys(source for i, source, _ in read if not self._is_final(i, source)))
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

    def _read_outside(self) -> Iterator[tuple[int, Source, Value]]:
        """Every result of a layer that is read after the repeat: its iteration, where it comes from, the value."""
        for layer in range(self.count * self.period):
            for position, number in enumerate(self.layers[layer].numbers):
                for i in range(len(self.graph.nodes[number].types)):
                    if (value := Value(number, i)) in self.outside:
                        yield layer // self.period, (layer % self.period, position, i), value

    def _is_final(self, iteration: int, source: Source) -> bool:
        """Whether a result is what a carry is in the end."""
        return iteration == self.count - 1 and source in self.carries

    def _find_results(self) -> dict[Value, int]:
        """Where each value that is read outside stands among the results of the Repeat node."""
        return {
            value: self.carries[source]
            if self._is_final(iteration, source)
            else len(self.carries) + self.sides.index(source) * self.count + iteration
            for iteration, source, value in self._read_outside()
        }


def indexed(paths: Sequence[Path]) -> Path:
    """One path for all iterations: `layers.3.attn`, `layers.4.attn` … become `layers.{i+3}.attn`."""
    return tuple(_segment(segments) for segments in zip(*paths, strict=False))


def _segment(segments: Sequence[str | int | LayerIndex]) -> str | int | LayerIndex:
    first, second = segments[:2]
    if first == second:
        return first
    for prefix, start, after in ((p, m, n) for p, m in _numbered(first) for q, n in _numbered(second) if p == q):
        index = LayerIndex(after - start, start, prefix)
        if all(index.at(i) == segment for i, segment in enumerate(segments)):
            return index
    return first


def _numbered(segment: str | int | LayerIndex) -> Iterator[tuple[str, int]]:
    """`("", 3)` of 3, `("ffn", 3)` of "ffn3"; nothing of a segment without a number."""
    if isinstance(segment, int):
        yield "", segment
    elif isinstance(segment, str) and (prefix := segment.rstrip("0123456789")) not in ("", segment):
        yield prefix, int(segment.removeprefix(prefix))


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


def unroll(graph: Graph, types: TypeCache) -> Graph:
    """The same program without regions: every iteration as plain nodes. For programs without state, as `peel_last`."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if not isinstance(op, Repeat):
            return None
        carries, shared, sides = inputs[: op.carries], inputs[op.carries :], []
        for i in range(op.count):
            results = _iteration(b, op.body, (*carries, *shared), i)
            carries = results[: op.carries]
            sides.append(results[op.carries :])
        return (*carries, *(side for column in zip(*sides, strict=True) for side in column))

    return rewrite(graph, everywhere(fn), types)


def _iteration(b: Builder, body: Graph, operands: Sequence[Value], number: int) -> tuple[Value, ...]:
    """The nodes of one iteration; its outputs."""
    mapped: dict[Value, Value] = {}
    for i, node in enumerate(body.nodes):
        with b.at(replace(node.origin, path=bind_path(node.origin.path, number))):
            op = node.op
            if isinstance(op, Param):
                op = replace(op, programs=(op.at(number),))
            inputs = (mapped[v] for v in node.inputs)
            new = (operands[op.index],) if isinstance(op, BodyInput) else b.append(op, *inputs)
        mapped.update({Value(i, index): v for index, v in enumerate(new)})
    return tuple(mapped[v] for v in body.outputs)


def _first_programs(body: Graph, count: int, types: TypeCache) -> Graph:
    """The body of the first `count` iterations."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, Param) or len(node.op.programs) == 1:
            return None
        return (b.leaf(replace(node.op, programs=node.op.programs[:count])),)

    return rewrite(body, everywhere(fn), types)
