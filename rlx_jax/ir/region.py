"""Repeated layers: one `Repeat` node with a region instead of many copies of a layer.

`roll` reads the node ranges that `Repeat` stages recorded while the flow was traced. If the layers
are the same except for their parameters, they become one `Repeat` node with the smallest period as its body.
Later passes treat that node through `regions` / `with_regions`. The plan chooses how it runs (a Python loop over the
body, or `lax.scan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Node, Op, Param, TypeCache, Value, locate_errors
from rlx_jax.ir.paths import LayerIndex, Origin, Path, bind_path
from rlx_jax.ir.repeated_layers import Layer, Ref, Run, find_runs, layers_of
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.weight_reads import WeightSource, with_source

OpType = TypeVar("OpType", bound=Op)

# Rewrites of graphs: `rewrite` rebuilds a graph node by node, including regions, with a function for each node.


# A function of the builder, a node's number, the node and its already rewritten operands. It returns the values that
# replace the node's results, None to keep the node, or () to drop a node that nothing reads.
Rewrite = Callable[[Builder, int, Node, tuple[Value, ...]], tuple[Value, ...] | None]


def rewrite(
    graph: Graph, enter: Callable[[Graph], Rewrite], types: TypeCache, by: str = "",
    input_types: tuple[TensorType, ...] = (),
) -> Graph:  # fmt: skip
    """Return `graph` rebuilt node by node, regions first; `graph` itself if nothing changed.

    All types are inferred again, so that a new type of a leaf propagates through the program.

    Args:
        graph: a program or a region.
        enter: called for the graph and every region; returns the rewrite of its nodes.
        types: infers the types.
        by: the name of the pass, recorded on new nodes.
        input_types: the operand types of the region, if the graph is one.
    """
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)  # inputs remain in the signature even if nothing reads them
    fn = enter(graph)
    value_map: dict[Value, Value] = {}
    for number, node in enumerate(graph.nodes):
        inputs = tuple(value_map[v] for v in node.inputs if v in value_map)
        op = node.op
        if isinstance(op, BodyInput) and input_types:
            op = BodyInput(op.index, type=input_types[op.index])
        # If an operand was dropped, `fn` drops this node too.
        if op.regions() and len(inputs) == len(node.inputs):
            operand_types = tuple(b.type(v) for v in inputs)
            regions = tuple(rewrite(r, enter, types, by, operand_types) for r in op.regions())
            op = op if regions == op.regions() else op.with_regions(regions)
        start = len(b.nodes)
        with b.origin_scope(node.origin), locate_errors(node.origin):
            results = fn(b, number, node if op is node.op else replace(node, op=op), inputs)
            if results is None:
                results = b.append(op, *inputs)
        _stamp(b, start, node, by)
        if results and len(results) != len(node.types):
            raise GraphError(f"{by or 'rewrite'}: {node.op.text()} has {len(node.types)} results, got {len(results)}")
        value_map.update({Value(number, i): v for i, v in enumerate(results)})
    b.writes.extend((leaf, value_map[v]) for leaf, v in graph.writes)
    new = b.finish([value_map[v] for v in graph.outputs], graph.output_names)
    is_same = new.nodes == graph.nodes and new.outputs == graph.outputs and new.writes == graph.writes
    return graph if is_same else new


def everywhere(fn: Rewrite) -> Callable[[Graph], Rewrite]:
    """Return an `enter` function for `rewrite` that applies `fn` in the graph and in every region."""
    return lambda graph: fn


def replace_ops(
    graph: Graph, kind: type[OpType], change: Callable[[OpType], Op], types: TypeCache, by: str = ""
) -> Graph:
    """Return the graph with `change(op)` in place of each op of class `kind`, over the same operands; see `rewrite`."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return b.append(change(node.op), *inputs) if isinstance(node.op, kind) else None

    return rewrite(graph, everywhere(fn), types, by)


@dataclass(frozen=True)
class Group:
    """Nodes that become one node.

    Attributes:
        op: the op of that node.
        operands: the values that it reads.
        results: by the values of the nodes that others read, the number of the result.
        origin: the origin of the node.
    """

    op: Op
    operands: Sequence[Value]
    results: Mapping[Value, int]
    origin: Origin


GroupFinder = Callable[[Graph, TypeCache], tuple[Sequence[int], Mapping[int, Group]]]


def join_nodes(graph: Graph, types: TypeCache, find: GroupFinder) -> Graph:
    """Return the graph, and its regions, with groups of nodes joined.

    Args:
        graph: a program or a region.
        types: infers the types.
        find: returns the numbers of the nodes to copy, in order, and the groups by the number of the node in place of
            which they are.
    """
    builder, values = Builder(graph.name, types), dict[Value, Value]()
    builder.inputs = list(graph.inputs)
    order, groups = find(graph, types)
    for number in order:
        node, group = graph.nodes[number], groups.get(number)
        if group is None:
            regions = tuple(join_nodes(region, types, find) for region in node.op.regions())
            builder.copy(node, number, values, node.op.with_regions(regions) if regions else None)
        else:
            with builder.origin_scope(group.origin):
                results = builder.add(group.op, *(values[v] for v in group.operands))
            values.update({v: results[i] for v, i in group.results.items()})
    builder.writes.extend((leaf, values[v]) for leaf, v in graph.writes)
    return builder.finish([values[v] for v in graph.outputs], graph.output_names)


def group_body(
    graph: Graph, types: TypeCache, members: Sequence[int], operands: Sequence[Value], outputs: Sequence[Value],
    origin: Origin,
) -> Graph:  # fmt: skip
    """Return the nodes of a group, with the constants that they read, as a region.

    Args:
        graph: the graph of the nodes.
        types: infers the types.
        members: the numbers of the nodes, in order.
        operands: the values that become inputs of the body.
        outputs: the values that become its outputs.
        origin: the origin of the inputs.
    """
    body = Builder(f"{graph.name}.group", types, origin)
    inner = {v: body(BodyInput(i, type=graph.type(v))) for i, v in enumerate(operands)}
    for member in members:
        for value in graph.nodes[member].inputs:
            if value not in inner and isinstance(constant := graph.nodes[value.node].op, Constant):
                inner[value] = body.leaf(constant)
        body.copy(graph.nodes[member], member, inner)
    return body.finish([inner[v] for v in outputs])


def _stamp(b: Builder, start: int, node: Node, by: str) -> None:
    """Record the pass `by` on the nodes from `start` on that differ from `node`."""
    for i in range(start, len(b.nodes)):
        new_node = b.nodes[i]
        if new_node.op != node.op and by and not isinstance(new_node.op, Leaf):
            b.nodes[i] = replace(new_node, origin=replace(new_node.origin, by=by))


def bind_params(graph: Graph, source: WeightSource, types: TypeCache) -> Graph:
    """Return the graph with parameters that read the tensors of `source`, cast to their declared dtypes."""
    return replace_ops(
        graph, Param, lambda op: replace(op, programs=tuple(with_source(p, source) for p in op.programs)), types
    )


@dataclass(frozen=True, eq=False)
class Repeat(Op):
    """A loop that runs `body` `count` times: repeated layers.

    Operands: the initial carries, then values shared by all iterations.
    Body outputs: the next carries, then side outputs.
    Results: the final carries, then every side output of every iteration (output-major).
    """

    notation = "repeat(count={count}, body={body})"

    count: int
    carries: int
    body: Graph

    def regions(self) -> tuple[Graph, ...]:
        return (self.body,)

    def with_regions(self, regions: tuple[Graph, ...]) -> Repeat:
        return replace(self, body=regions[0])

    def iterations(self) -> int:
        return self.count

    def num_carries(self) -> int:
        return self.carries

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the types of the final carries, then the type of every side output of every iteration.

        Raises:
            GraphError: the type of a carry changes in the body.
        """
        results = self.body.output_types
        for i, (operand, result) in enumerate(zip(operands[: self.carries], results, strict=False)):
            if operand != result:
                raise GraphError(f"repeat: carry {i} enters a layer as {operand} and leaves it as {result}")
        return (*results[: self.carries], *(t for t in results[self.carries :] for _ in range(self.count)))


def roll(graph: Graph, repeats: Sequence[Sequence[int]], types: TypeCache) -> tuple[Graph, tuple[str, ...]]:
    """Turn the layers of each recorded repeat into regions.

    Layers that are the same program become one region. Layers that differ stay plain, and the others become several
    regions around them.

    Args:
        graph: the traced program.
        repeats: for each repeat, the node number at which each layer starts, and the number after its last node.
        types: infers the types of the new graph.

    Returns:
        The graph, and a message for each repeat that did not become a single region.
    """
    refusals: list[str] = []
    # From the end, because a new region changes all later node numbers.
    for bounds in sorted(repeats, key=lambda r: r[0], reverse=True):
        layers = layers_of(graph, bounds)
        runs, refusal = find_runs(layers)
        refusals += [refusal] if refusal else []
        for run in reversed(runs):
            graph = _build(graph, bounds, layers, run, types)
    return graph, tuple(refusals)


def _build(graph: Graph, bounds: Sequence[int], layers: list[Layer], run: Run, types: TypeCache) -> Graph:
    """Return the graph with one Repeat node in place of the layers of a run."""
    start, end = bounds[run.start], bounds[run.stop]
    region = _Region(graph, layers, run, end, types)
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)
    value_map: dict[Value, Value] = {}

    for number in range(start):
        b.copy(graph.nodes[number], number, value_map)
    for number in range(start, end):  # nodes after the layers may read leaves that were created inside them
        if isinstance(graph.nodes[number].op, Leaf) and Value(number) in region.outside:
            b.copy(graph.nodes[number], number, value_map)
    operands = []
    for ref in (*region.initial, *region.shared):
        operands.append(b.leaf(ref.op) if ref.op is not None else value_map[Value(ref.node, ref.index)])
    with b.origin_scope(Origin(region.body_path, label="repeat")):
        results = b.add(Repeat(run.count, len(region.initial), region.body), *operands)
    value_map.update({value: results[i] for value, i in region.results.items()})
    for number in range(end, len(graph.nodes)):
        b.copy(graph.nodes[number], number, value_map)
    b.writes.extend((leaf, value_map[v]) for leaf, v in graph.writes)
    return b.finish([value_map[v] for v in graph.outputs], graph.output_names)


# The origin of a value: the layer within the period, the position among that layer's nodes, the result.
Source = tuple[int, int, int]


class _Region:
    """Determines the carries, shared operands, side outputs and body of one Repeat.

    `self.layers` has the layers of the run only, so its indices start at the first of them. A carry is a value that one
    iteration reads from the iteration before it. A shared operand is computed before the run.
    """

    def __init__(self, graph: Graph, layers: list[Layer], run: Run, end: int, types: TypeCache) -> None:
        """Analyze a run of layers. `end` is the number of the first node after it."""
        self.graph, self.start, self.period, self.count = graph, run.start, run.period, run.count
        self.layers = layers[run.start : run.stop]
        self.outside = {v for n in graph.nodes[end:] for v in n.inputs} | set(graph.roots())
        self.carries: dict[Source, int] = {}  # the number of a carry, by its origin in the previous iteration
        self.initial: list[Ref] = []
        self.shared: list[Ref] = []
        self._shared_at: dict[Ref, int] = {}
        self._find_operands()
        self.body, self.body_path = self._make_body(types)
        self.results = self._find_results()

    def _source(self, ref: Ref) -> Source | None:
        """Return the origin of a value that the second iteration reads from the first; None for any other value."""
        layer = ref.layer - self.start
        return (layer, ref.position, ref.index) if 0 <= layer < self.period else None

    def _find_operands(self) -> None:
        """Find the carries, their initial values and the shared operands, from the first two iterations.

        An operand that the second iteration reads from the first is a carry, and the corresponding operand of the first
        iteration is its initial value.
        """
        for layer_0, layer_1 in zip(self.layers[: self.period], self.layers[self.period :], strict=False):
            for refs_0, refs_1 in zip(layer_0.refs, layer_1.refs, strict=True):
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
        """Return the body, made from the second iteration, and the path of the block around the layers.

        Unlike the first iteration, the second shows which operands are carries.
        """
        b = Builder("body", types)
        n = len(self.initial)
        carry_inputs = [b.leaf(BodyInput(i, type=self._type(r))) for i, r in enumerate(self.initial)]
        shared_inputs = [b.leaf(BodyInput(n + i, type=self._type(r))) for i, r in enumerate(self.shared)]
        results: dict[tuple[int, int], tuple[Value, ...]] = {}

        def operand(layer: int, ref: Ref, position: int, slot: int) -> Value:
            """Return the value in the body of operand number `slot` of the node at `position` of `layer`."""
            source = self._source(ref)
            if ref.op is not None:
                return b.leaf(self._leaf(layer, position, slot))
            if source is not None:
                return carry_inputs[self.carries[source]]
            if self._is_outer(ref):
                return shared_inputs[self._shared_at[ref]]
            return results[(ref.layer - self.start, ref.position)][ref.index]

        for j in range(self.period, 2 * self.period):
            layer = self.layers[j]
            for position, (node, refs) in enumerate(zip(layer.nodes, layer.refs, strict=True)):
                paths = [other.nodes[position].origin.path for other in self.layers[j - self.period :: self.period]]
                with b.origin_scope(replace(node.origin, path=tuple(map(_segment, zip(*paths, strict=False))))):
                    inputs = [operand(j, ref, position, slot) for slot, ref in enumerate(refs)]
                    results[(j, position)] = b.add(node.op, *inputs)
        outputs = [results[(self.period + j, at)][i] for j, at, i in self.carries]
        outside_reads = self._outside_reads()  # the final value of a carry is a result already, so no side output
        self.sides = list(dict.fromkeys(source for i, source, _ in outside_reads if not self._is_final(i, source)))
        outputs += [results[(self.period + j, at)][i] for j, at, i in self.sides]
        path = next((n.origin.path for n in b.nodes if not isinstance(n.op, Leaf)), ())
        return b.finish(outputs), path[: next((i for i, s in enumerate(path) if isinstance(s, LayerIndex)), 0)]

    def _leaf(self, layer: int, position: int, slot: int) -> Leaf:
        """Return the leaf at one operand of the body, with the programs of all iterations if it is a parameter."""
        ops = [self.layers[k * self.period + layer - self.period].refs[position][slot].op for k in range(self.count)]
        first_leaf = ops[0]
        assert first_leaf is not None
        if not isinstance(first_leaf, Param):
            return first_leaf
        programs = tuple(op.programs[0] for op in ops if isinstance(op, Param))
        # A parameter that all iterations share keeps one program.
        return first_leaf if len(set(programs)) == 1 else replace(first_leaf, programs=programs)

    def _outside_reads(self) -> Iterator[tuple[int, Source, Value]]:
        """Return every result of a layer that is read after the repeat: its iteration, its origin, the value."""
        for layer in range(self.count * self.period):
            for position, number in enumerate(self.layers[layer].numbers):
                for i in range(len(self.graph.nodes[number].types)):
                    if (value := Value(number, i)) in self.outside:
                        yield layer // self.period, (layer % self.period, position, i), value

    def _is_final(self, iteration: int, source: Source) -> bool:
        """Return whether a result is the final value of a carry."""
        return iteration == self.count - 1 and source in self.carries

    def _find_results(self) -> dict[Value, int]:
        """Return the result index at the Repeat node of each value that is read after the repeat."""
        results = {}
        for i, source, value in self._outside_reads():
            side = None if self._is_final(i, source) else self.sides.index(source) * self.count + i
            results[value] = self.carries[source] if side is None else len(self.carries) + side
        return results


def _segment(segments: Sequence[str | int | LayerIndex]) -> str | int | LayerIndex:
    """Return one segment for the segments of all iterations: a `LayerIndex` if they count, else the first of them."""
    segment_0, segment_1 = segments[:2]
    if segment_0 == segment_1:
        return segment_0
    for prefix, number_0, number_1 in (
        (p, m, n) for p, m in _split_number(segment_0) for q, n in _split_number(segment_1) if p == q
    ):
        index = LayerIndex(number_1 - number_0, number_0, prefix)
        if all(index.segment_at(i) == segment for i, segment in enumerate(segments)):
            return index
    return segment_0


def _split_number(segment: str | int | LayerIndex) -> Iterator[tuple[str, int]]:
    """Return the prefix and number of a segment: `("", 3)` for 3, `("ffn", 3)` for "ffn3", nothing without a number."""
    if isinstance(segment, int):
        yield "", segment
    elif isinstance(segment, str) and (prefix := segment.rstrip("0123456789")) not in ("", segment):
        yield prefix, int(segment.removeprefix(prefix))


def peel_last(graph: Graph, types: TypeCache) -> Graph:
    """Return the same program with the last iteration of each region as plain nodes after it.

    Regions that write state, or contain other regions, stay as they are.
    """

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if not isinstance(op, Repeat) or op.count < 2 or op.body.writes or any(n.op.regions() for n in op.body.nodes):
            return None
        count, shared_inputs = op.count - 1, inputs[op.carries :]
        # A single remaining iteration needs no region.
        if count > 1:
            leading_results = b.add(replace(op, count=count, body=first_programs(op.body, count, types)), *inputs)
        else:
            leading_results = _iteration(b, op.body, inputs, 0)
        carries, sides = leading_results[: op.carries], leading_results[op.carries :]
        final_results = _iteration(b, op.body, (*carries, *shared_inputs), count)
        columns = zip(range(0, len(sides), count), final_results[op.carries :], strict=True)
        return (*final_results[: op.carries], *(v for at, side in columns for v in (*sides[at : at + count], side)))

    return rewrite(graph, everywhere(fn), types)


def drop_unread_sides(graph: Graph, types: TypeCache) -> Graph:
    """Return the program with regions that have only the side outputs that something reads."""
    read = {*graph.roots(), *(value for node in graph.nodes for value in node.inputs)}

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(op := node.op, Repeat):
            return None
        sides = range(op.carries, len(op.body.outputs))
        results = {side: [op.carries + (side - op.carries) * op.count + i for i in range(op.count)] for side in sides}
        read_sides = [side for side in sides if any(Value(number, index) in read for index in results[side])]
        if len(read_sides) == len(sides):
            return None
        indices = [*range(op.carries), *read_sides]
        outputs = tuple(op.body.outputs[i] for i in indices)
        names = tuple(op.body.output_names[i] for i in indices) if op.body.output_names else ()
        new = b.append(replace(op, body=replace(op.body, outputs=outputs, output_names=names)), *inputs)
        values = dict(enumerate(new[: op.carries]))
        values |= zip((index for side in read_sides for index in results[side]), new[op.carries :], strict=True)
        return tuple(values.get(index, new[0]) for index in range(len(node.types)))  # nothing reads the others

    return rewrite(graph, lambda part: fn if part is graph else lambda *_: None, types, "outputs")


def unroll(graph: Graph, types: TypeCache) -> Graph:
    """Return the same program without regions: every iteration becomes plain nodes.

    Regions must not write state.
    """

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if not isinstance(op, Repeat):
            return None
        carries, shared_inputs, sides = inputs[: op.carries], inputs[op.carries :], []
        for i in range(op.count):
            results = _iteration(b, op.body, (*carries, *shared_inputs), i)
            carries = results[: op.carries]
            sides.append(results[op.carries :])
        return (*carries, *(side for column in zip(*sides, strict=True) for side in column))

    return rewrite(graph, everywhere(fn), types)


def _iteration(b: Builder, body: Graph, operands: Sequence[Value], number: int) -> tuple[Value, ...]:
    """Append the nodes of one iteration and return its outputs: the next carries, then the side outputs."""
    value_map: dict[Value, Value] = {}
    for i, node in enumerate(body.nodes):
        with b.origin_scope(replace(node.origin, path=bind_path(node.origin.path, number))):
            op = node.op
            if isinstance(op, Param):
                op = replace(op, programs=(op.program_at(number),))
            inputs = (value_map[v] for v in node.inputs)
            results = (operands[op.index],) if isinstance(op, BodyInput) else b.append(op, *inputs)
        value_map.update({Value(i, index): v for index, v in enumerate(results)})
    return tuple(value_map[v] for v in body.outputs)


def first_programs(body: Graph, count: int, types: TypeCache) -> Graph:
    """Return the body with the programs of the first `count` iterations only."""
    return replace_ops(body, Param, lambda op: replace(op, programs=op.programs[:count]), types)
