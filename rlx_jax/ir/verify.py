"""The verifier checks structure, legality per level, and types, which it infers again. It runs after every pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rlx_jax.errors import GraphError, RlxError, ShapeError, UnboundInputError
from rlx_jax.ir.graph import BodyInput, Graph, Hir, Input, Leaf, Mir, Node, Op, Param, StateRead, TypeCache, Value
from rlx_jax.ir.param import stored_keys
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import TensorType

# The kinds of op that are legal at each level.
LEGAL_OPS: dict[str, tuple[type, ...]] = {
    "hir": (Leaf, Hir, Mir, Repeat), **dict.fromkeys(("mir", "lir"), (Leaf, Mir, Repeat)),
}  # fmt: skip


# The class of the error, and its message.
Problem = tuple[type[GraphError], str]


def verify(graph: Graph, level: str, stage: str, types: TypeCache) -> Graph:
    """Check `graph` and return it.

    Args:
        graph: of any level.
        level: "hir", "mir" or "lir".
        stage: the name of the pass that returned the graph, for the message.
        types: infers the types again.

    Raises:
        GraphError: lists the first problems, each with the node, its op and its block path; its `problems` has all. If
            all problems have one class, the error has that class.
    """
    problems = list(_problems(graph, level, types))
    if problems:
        texts = tuple(text for _, text in problems)
        kinds = {error_class for error_class, _ in problems}
        problem_lines = "\n  ".join(texts[:10]) + (f"\n  and {len(texts) - 10} more" if len(texts) > 10 else "")
        error_class = kinds.pop() if len(kinds) == 1 else GraphError
        error = error_class(f"{level} graph {graph.name!r} is wrong after {stage}:\n  {problem_lines}")
        error.problems = texts
        raise error
    return graph


def _exists(graph: Graph, value: Value) -> bool:
    return 0 <= value.node < len(graph.nodes) and 0 <= value.index < len(graph.nodes[value.node].types)


def _problems(graph: Graph, level: str, types: TypeCache, is_program: bool = True, count: int = 1) -> Iterator[Problem]:
    """Return all problems of a program (`is_program`), or of a region that runs `count` times."""
    for number, node in enumerate(graph.nodes):
        for kind, problem in _node_problems(graph, number, node, level, types, count):
            yield kind, f"%{number} {node.op.text()} ({path_text(node.origin.path) or '—'}): {problem}"
    yield from _state_problems(graph)
    for value in graph.roots():
        if not _exists(graph, value):
            yield GraphError, f"output {value} does not exist"
    if is_program:
        yield from _signature_problems(graph, types)
    elif len(graph.output_names) not in (0, len(graph.outputs)):
        yield GraphError, f"{len(graph.outputs)} outputs have {len(graph.output_names)} output names"


def _node_problems(
    graph: Graph, number: int, node: Node, level: str, types: TypeCache, count: int
) -> Iterator[Problem]:
    """Return the problems of one node. `count` is the number of iterations of the enclosing region."""
    invalid_inputs = [v for v in node.inputs if v.node >= number or not _exists(graph, v)]
    yield from (_reference_problem(graph, number, v) for v in invalid_inputs)
    if not node.origin.path:
        yield GraphError, "has no block path"
    if not isinstance(node.op, LEGAL_OPS[level]):
        yield GraphError, f"not legal at the {level} level"
    if isinstance(node.op, Param) and len(node.op.programs) not in (1, count):
        yield GraphError, f"{len(node.op.programs)} programs where the region runs {count} times"
    if invalid_inputs:  # types cannot be inferred from missing operands
        return
    yield from _type_problems(graph, node, types)
    for region in node.op.regions():
        operand_types = tuple(graph.type(v) for v in node.inputs)
        yield from _region_problems(region, operand_types)
        inner = _problems(region, level, types, is_program=False, count=node.op.iterations())
        yield from ((kind, f"> {problem}") for kind, problem in inner)


def _reference_problem(graph: Graph, number: int, value: Value) -> Problem:
    """Return why node `number` may not read `value`: it does not exist, closes a cycle, or comes later."""
    if not _exists(graph, value):
        return GraphError, f"refers to {value}, which does not exist"
    if value.node == number or _reaches(graph, value.node, number):
        return GraphError, f"depends on itself through %{value.node}"
    return GraphError, f"refers to %{value.node}, which is not before it"


def _reaches(graph: Graph, start: int, goal: int) -> bool:
    """Return whether node `start` depends on node `goal`, directly or through other nodes."""
    visited, pending = {start}, [start]
    while pending:
        new_nodes = {v.node for v in graph.nodes[pending.pop()].inputs if 0 <= v.node < len(graph.nodes)} - visited
        if goal in new_nodes:
            return True
        visited |= new_nodes
        pending += new_nodes
    return False


def _signature_problems(graph: Graph, types: TypeCache) -> Iterator[Problem]:
    """Return the problems of the signature: outputs and their names, declared and read inputs, types of weight keys."""
    if not graph.outputs:
        yield GraphError, "there are no outputs"
    if len(graph.output_names) != len(graph.outputs):
        yield GraphError, f"{len(graph.outputs)} outputs have {len(graph.output_names)} output names"
    yield from ((GraphError, f"two outputs are called {n!r}") for n in _duplicates(graph.output_names))
    declared = {i.input: i for i in graph.inputs}
    yield from ((GraphError, f"input {n!r} is declared twice") for n in _duplicates(i.input for i in graph.inputs))
    for op in dict.fromkeys(n.op for _, n in graph.walk() if isinstance(n.op, Input)):
        if op.input not in declared:
            yield UnboundInputError, f"input {op.input!r} is read and not declared"
        elif op.type != declared[op.input].type:
            yield ShapeError, f"input {op.input!r} is read as {op.type} and declared as {declared[op.input].type}"
    stored: dict[str, TensorType] = {}
    for key, type in (pair for param in graph.params() for pair in types.cached(_stored_types, param, ())):
        if stored.setdefault(key, type) != type:
            yield GraphError, f"parameter {key!r} is {stored[key]} and {type}"


def _stored_types(types: TypeCache, param: Op, operands: tuple[TensorType, ...]) -> tuple[tuple[str, TensorType], ...]:
    """Return the stored tensors of a parameter, by key, for all layers; cached: the verifier runs after every pass."""
    assert isinstance(param, Param)
    return tuple((key.key, key.type) for program in param.programs for key in stored_keys(program))


def _duplicates(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _state_problems(graph: Graph) -> Iterator[Problem]:
    """Return the problems of state writes: a leaf must keep its type, because its buffer is donated."""
    read_types = {n.op.leaf: n.op.type for n in graph.nodes if isinstance(n.op, StateRead)}
    for leaf, value in graph.writes:
        name = f"state {path_text(leaf.path)}.{leaf}"
        if leaf not in read_types and not leaf.every:
            yield GraphError, f"{name} is written and never read"
        elif leaf.every:
            continue
        elif _exists(graph, value) and graph.type(value) != read_types[leaf]:
            yield ShapeError, f"{name} is read as {read_types[leaf]} and written as {graph.type(value)}"


def _type_problems(graph: Graph, node: Node, types: TypeCache) -> Iterator[Problem]:
    try:
        inferred_types = types.infer(node.op, tuple(graph.type(v) for v in node.inputs))
    except RlxError as error:
        yield type(error) if isinstance(error, GraphError) else GraphError, str(error)
        return
    if inferred_types != node.types:
        yield ShapeError, f"declared {', '.join(map(str, node.types))}, inferred {', '.join(map(str, inferred_types))}"


def _region_problems(region: Graph, operand_types: tuple[object, ...]) -> Iterator[Problem]:
    """Return the problems of a region's body inputs, for the operand types `operand_types`."""
    for node in region.nodes:
        if isinstance(node.op, BodyInput):
            if node.op.index >= len(operand_types):
                yield GraphError, f"{node.op.text()}: the region has {len(operand_types)} operands"
            elif node.op.type != operand_types[node.op.index]:
                yield ShapeError, f"{node.op.text()} is {node.op.type}, the operand is {operand_types[node.op.index]}"
