"""The verifier: structure, legality per level, and types inferred again. It runs after every pass, always."""

from __future__ import annotations

from collections.abc import Iterator

from rlx_jax.errors import GraphError, RlxError
from rlx_jax.ir.graph import BodyInput, Graph, Hir, Input, Leaf, Mir, Node, StateRead, TypeCache, Value
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import path_text

LEGAL: dict[str, tuple[type, ...]] = {
    "hir": (Leaf, Hir, Mir, Repeat),
    "mir": (Leaf, Mir, Repeat),
    "lir": (Leaf, Mir, Repeat),
}
"""Which kinds of op may stand at which level."""


def verify(graph: Graph, level: str, stage: str, types: TypeCache) -> Graph:
    """Check `graph` and return it.

    Raises:
        GraphError: all problems found, each with the node, its op and its block path; `stage` names the pass.
    """
    problems = list(_problems(graph, level, types))
    if problems:
        shown = "\n  ".join(problems[:10]) + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise GraphError(f"{level} graph {graph.name!r} is wrong after {stage}:\n  {shown}")
    return graph


def _exists(graph: Graph, value: Value) -> bool:
    return 0 <= value.node < len(graph.nodes) and 0 <= value.index < len(graph.nodes[value.node].types)


def _problems(graph: Graph, level: str, types: TypeCache, top: bool = True) -> Iterator[str]:
    for number, node in enumerate(graph.nodes):
        where = f"%{number} {node.op.text()} ({path_text(node.origin.path) or '—'})"
        broken = [v for v in node.inputs if v.node >= number or not _exists(graph, v)]
        if broken:
            yield f"{where}: refers to values that are not before it: {broken}"
            continue
        if not node.origin.path:
            yield f"{where}: has no block path"
        if not isinstance(node.op, LEGAL[level]):
            yield f"{where}: not legal at the {level} level"
        yield from (f"{where}: {p}" for p in _type_problems(graph, node, types))
        for region in node.op.regions():
            given = tuple(graph.type(v) for v in node.inputs)
            yield from (f"{where}: {p}" for p in _region_problems(region, given))
            yield from (f"{where} > {p}" for p in _problems(region, level, types, top=False))
    yield from _state_problems(graph)
    for value in graph.roots():
        if not _exists(graph, value):
            yield f"output {value} does not exist"
    if top and not graph.outputs:
        yield "there are no outputs"
    if len(graph.output_names) not in (0, len(graph.outputs)) or (top and graph.outputs and not graph.output_names):
        yield f"{len(graph.outputs)} outputs have {len(graph.output_names)} output names"
    names = [i.input for i in graph.inputs]
    read = {n.op.input for _, n in graph.walk() if isinstance(n.op, Input)} if top else set()
    yield from (f"input {n!r} is read and not declared" for n in sorted(read - set(names)))
    yield from (f"input {n!r} is declared twice" for n in sorted({n for n in names if names.count(n) > 1}))


def _state_problems(graph: Graph) -> Iterator[str]:
    """A state leaf leaves a program with the type it had: anything else cannot be donated."""
    read = {n.op.leaf: n.op.type for n in graph.nodes if isinstance(n.op, StateRead)}
    for leaf, value in graph.writes:
        name = f"state {path_text(leaf.path)}.{leaf.slot}"
        if leaf not in read:
            yield f"{name} is written and never read"
        elif graph.type(value) != read[leaf]:
            yield f"{name} is read as {read[leaf]} and written as {graph.type(value)}"


def _type_problems(graph: Graph, node: Node, types: TypeCache) -> Iterator[str]:
    try:
        inferred = types.infer(node.op, tuple(graph.type(v) for v in node.inputs))
    except RlxError as error:
        yield str(error)
        return
    if inferred != node.types:
        yield f"declared {', '.join(map(str, node.types))}, inferred {', '.join(map(str, inferred))}"


def _region_problems(region: Graph, given: tuple[object, ...]) -> Iterator[str]:
    for node in region.nodes:
        if isinstance(node.op, BodyInput):
            if node.op.index >= len(given):
                yield f"{node.op.text()}: the region has {len(given)} operands"
            elif node.op.type != given[node.op.index]:
                yield f"{node.op.text()} is {node.op.type}, the operand is {given[node.op.index]}"
