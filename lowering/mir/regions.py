"""Chains of pointwise ops as one node, and back."""

from __future__ import annotations

from collections.abc import Iterator

from rlx_jax.ir.graph import Builder, Graph, Mir, Node, TypeCache, Value
from rlx_jax.ir.ops.fused import ElementwiseRegion, Step
from rlx_jax.ir.ops.pointwise import Binary, Compare, Unary, Where
from rlx_jax.ir.rewrite import Rewrite, everywhere, rewrite
from rlx_jax.ir.types import DimLike, is_static
from rlx_jax.lowering.mir.dce import live, read_once
from rlx_jax.lowering.places import Fused, Pattern, Place

POINTWISE = (Unary, Binary, Compare, Where)
MAX_STEPS, MAX_INPUTS = 32, 16
"""Of one region."""

Part = tuple[Mir, tuple[Value | int, ...]]
"""An op over values and the results of earlier parts."""


PATTERN = Pattern("elementwise_region", "mark_elementwise_regions")


def mark_elementwise_regions(graph: Graph, types: TypeCache) -> Fused:
    """tanh(mul(x, y)) → ew_region(x, y: mul, tanh)

    Steps have the shape of the result and stand in one block; operands may be scalars or broadcast over leading
    axes, nothing else. What is read twice, an output or written to the state ends a region.
    """

    def enter(graph: Graph) -> Rewrite:
        once = read_once(graph)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if not isinstance(node.op, POINTWISE):
                return None
            parts: list[Part] = []
            last: list[Value | int] = []
            for old, value in zip(node.inputs, inputs, strict=True):
                if old in once and _joins(b, b.nodes[value.node], node):
                    parts += [(op, _shifted(refs, len(parts))) for op, refs in _parts(b.nodes[value.node])]
                    last.append(len(parts) - 1)
                elif _broadcasts(b.type(value).shape, node.types[0].shape):
                    last.append(value)
                else:
                    return None
            return _region(b, [*parts, (node.op, tuple(last))]) if parts else None

        return fn

    marked = rewrite(graph, enter, types, PATTERN.by)
    return Fused(marked, tuple(_places(marked)))


def _places(graph: Graph) -> Iterator[Place]:
    """The regions that something needs: one that grew is another, and what it was stays behind unread."""
    needed = live(graph)
    for number, node in enumerate(graph.nodes):
        if isinstance(node.op, ElementwiseRegion) and number in needed:
            yield PATTERN.fused(number, node)
        for inner in node.op.regions():
            yield from _places(inner)


def unfuse_elementwise_regions(graph: Graph, types: TypeCache) -> Graph:
    """ew_region(x, y: mul, tanh) → tanh(mul(x, y))"""
    if not any(isinstance(node.op, ElementwiseRegion) for _, node in graph.walk()):
        return graph

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(node.op, ElementwiseRegion):
            return None
        values = list(inputs)
        for step in node.op.steps:
            values += b.add(step.op, *(values[i] for i in step.operands))
        return (values[-1],)

    return rewrite(graph, everywhere(fn), types, "unfuse_elementwise_regions")


def _joins(b: Builder, made: Node, reader: Node) -> bool:
    """Whether what makes an operand of `reader` can be a step, or several, of the same region."""
    shape = reader.types[0].shape
    return (
        isinstance(made.op, (*POINTWISE, ElementwiseRegion))
        and made.types[0].shape == shape
        and made.origin.path == reader.origin.path
        and all(_broadcasts(b.type(v).shape, shape) for v in made.inputs)
    )


def _broadcasts(shape: tuple[DimLike, ...], whole: tuple[DimLike, ...]) -> bool:
    """Whether an operand is repeated over leading axes only."""
    while shape and is_static(shape[0]) and shape[0] == 1:
        shape = shape[1:]
    return not shape or shape == whole[-len(shape) :]


def _parts(made: Node) -> list[Part]:
    if not isinstance(made.op, ElementwiseRegion):
        assert isinstance(made.op, Mir)
        return [(made.op, made.inputs)]
    n = made.op.inputs
    return [(s.op, tuple(made.inputs[i] if i < n else i - n for i in s.operands)) for s in made.op.steps]


def _shifted(refs: tuple[Value | int, ...], by: int) -> tuple[Value | int, ...]:
    return tuple(ref if isinstance(ref, Value) else ref + by for ref in refs)


def _region(b: Builder, parts: list[Part]) -> tuple[Value, ...] | None:
    """The region of these parts, if it is not too large."""
    operands = list(dict.fromkeys(ref for _, refs in parts for ref in refs if isinstance(ref, Value)))
    n = len(operands)
    if len(parts) > MAX_STEPS or n > MAX_INPUTS:
        return None
    steps = tuple(
        Step(op, tuple(operands.index(ref) if isinstance(ref, Value) else n + ref for ref in refs))
        for op, refs in parts
    )
    return b.add(ElementwiseRegion(n, steps), *operands)
