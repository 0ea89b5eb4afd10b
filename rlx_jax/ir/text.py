"""Dumps: every level prints the same way, and the text is stable between runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlx_jax.ir.graph import Graph, Hir, Leaf, Node, Param, Value
from rlx_jax.ir.param import Stack, leaf_name
from rlx_jax.ir.types import TensorType, path_text

MARK = {"hir": "h", "mir": "%", "lir": "%"}


def dump(graph: Graph, level: str, note: str = "") -> str:
    """The text of a HIR or MIR graph.

    hir @name (n nodes, m outputs, …)
      block ops: Kind=count, …

      h0 [input "x"] = input("x") : f32[batch,8]
      …
      return h7
    """
    mark = MARK[level]
    counts = Counter(type(n.op).__name__.removesuffix("Op") for n in graph.nodes if not isinstance(n.op, Leaf))
    kinds = ", ".join(f"{kind}={count}" for kind, count in sorted(counts.items()))
    head = f"{level} @{graph.name} ({len(graph.nodes)} nodes, {len(graph.outputs)} outputs{note})"
    lines = [head, f"  {'block ops' if level == 'hir' else 'op kinds'}: {kinds}", ""]
    lines += _lines(graph, mark, "  ")
    lines.append(f"  return {', '.join(_ref(graph, v, mark) for v in graph.outputs)}")
    return "\n".join(lines)


def _lines(graph: Graph, mark: str, indent: str) -> Iterator[str]:
    outputs = {v.node for v in graph.outputs}
    tags = [_tag(n, i, mark) for i, n in enumerate(graph.nodes)]
    width = max(map(len, tags), default=0)
    for number, (node, tag) in enumerate(zip(graph.nodes, tags, strict=True)):
        text = node.op.text()
        if mark == "h" and not isinstance(node.op, Leaf | Hir) and not node.op.regions():
            text = f"mir({text})"
        operands = f"({', '.join(_ref(graph, v, mark) for v in node.inputs)})" if node.inputs else ""
        types = ", ".join(map(str, node.types))
        origin = "" if isinstance(node.op, Leaf) else f"  // {node.origin}"
        output = "  ← output" if number in outputs else ""
        yield f"{indent}{tag:<{width}} = {text}{operands} : {types}{origin}{output}"
        for region in node.op.regions():
            yield f"{indent}{{"
            yield from _lines(region, mark, indent + "    ")
            yield f"{indent}    yield {', '.join(_ref(region, v, mark) for v in region.outputs)}"
            yield f"{indent}}}"
    for leaf, value in graph.writes:
        yield f'{indent}write state("{path_text(leaf.path)}", {leaf.slot}) := {_ref(graph, value, mark)}'


def _tag(node: Node, number: int, mark: str) -> str:
    return (
        f'{mark}{number} [param "{leaf_name(node.op.programs[0])}"]'
        if isinstance(node.op, Param)
        else f"{mark}{number}"
    )


def _ref(graph: Graph, value: Value, mark: str) -> str:
    several = len(graph.nodes[value.node].types) > 1
    return f"{mark}{value.node}" + (f".{value.index}" if several else "")


def summary(graph: Graph) -> str:
    """One row for each block path: what leaves it, and the weights it reads."""
    rows: dict[str, tuple[str, list[str], int]] = {}
    _collect(graph, rows, set(), 1)
    table = [("block", "output", "parameters", "weights")]
    total = 0
    for path, (shape, weights, count) in rows.items():
        total += count
        table.append((path, shape, f"{count:,}" if count else "", ", ".join(weights)))
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = [f"{graph.name}: {', '.join(f'{i.input} {i.type}' for i in graph.inputs)}"]
    lines += [
        "  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in table
    ]
    return "\n".join([*lines, f"  {total:,} parameters"])


def _collect(graph: Graph, rows: dict[str, tuple[str, list[str], int]], counted: set[Param], iterations: int) -> None:
    """A weight that two blocks share is named by both and counted once."""
    for node in graph.nodes:
        for region in node.op.regions():
            _collect(region, rows, counted, node.op.iterations())
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        path = path_text(node.origin.path) or node.op.name()
        shape, weights, count = rows.get(path, ("", [], 0))
        for value in node.inputs:
            op = graph.nodes[value.node].op
            if isinstance(op, Param) and (name := leaf_name(Stack(op.programs))) not in weights:
                weights = [*weights, name]
                count += 0 if op in counted else op.type.size * len(op.programs)
                counted.add(op)
        times = f" × {iterations}" if iterations > 1 else ""
        rows[path] = (f"{_types(node.types)}{times}", weights, count)


def _types(types: tuple[TensorType, ...]) -> str:
    return ", ".join(map(str, types))
