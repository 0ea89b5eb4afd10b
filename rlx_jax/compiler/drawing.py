"""This module draws a graph as text for Graphviz (`dot`) and Mermaid (`mermaid`). Repeated layers are one cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import BodyInput, Graph, Leaf, Node, Value
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import Repeat

BoxShape = Literal["op", "leaf", "output"]


@dataclass(frozen=True)
class Syntax:
    """The language of a drawing, as functions that return a line.

    Attributes:
        box: a node, from its id, the lines of its label, and its shape.
        cluster: the beginning of a cluster, from its id and its label.
        end: the end of a cluster.
        edge: an arrow between two ids, with a label, which may be empty.
    """

    box: Callable[[str, tuple[str, ...], BoxShape], str]
    cluster: Callable[[str, str], str]
    end: str
    edge: Callable[[str, str, str], str]


def dot(graph: Graph, level: str, note: str = "") -> str:
    """Return the graph in the language of Graphviz: `dot -Tsvg` draws it."""
    head = f"digraph {_dot_text(graph.name)} {{\n  label={_dot_text(f'{level} @{graph.name}{note}')}; labelloc=t"
    return "\n".join([head, '  node [shape=box, fontname="Courier", fontsize=10]', *_lines(graph, DOT), "}"])


def _dot_text(*lines: str) -> str:
    """Return lines as a quoted string. Backslashes are doubled, because labels interpret them."""
    return '"' + "\n".join(lines).translate(_DOT_ESCAPES) + '"'


_DOT_ESCAPES = str.maketrans({"&": "&amp;", "\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "", "\0": ""})
_DOT_SHAPES = {"op": "", "leaf": ", style=rounded", "output": ", shape=plaintext"}
DOT = Syntax(
    lambda id, lines, shape: f"{id} [label={_dot_text(*lines)}{_DOT_SHAPES[shape]}]",
    lambda id, label: f"subgraph cluster_{id} {{ label={_dot_text(label)}",
    "}",
    lambda source, target, label: f"{source} -> {target}" + (f" [label={_dot_text(label)}]" if label else ""),
)


def mermaid(graph: Graph, level: str, note: str = "") -> str:
    """Return the graph as a Mermaid flowchart, which GitHub draws in a code block `mermaid` of Markdown."""
    title = _mermaid_text(f"{level} @{graph.name}{note}")
    return "\n".join([f"%% {title}", "flowchart TD", *_lines(graph, MERMAID)])


def _mermaid_text(*lines: str) -> str:
    """Return lines as the text of a label, with every character that Mermaid may interpret as an entity code."""
    plain = " _.,:=+-@×…→"
    return "<br/>".join("".join(c if c.isalnum() or c in plain else f"#{ord(c)};" for c in line) for line in lines)


_MERMAID_SHAPES = {"op": '["{}"]', "leaf": '(["{}"])', "output": '[/"{}"/]'}
MERMAID = Syntax(
    lambda id, lines, shape: id + _MERMAID_SHAPES[shape].format(_mermaid_text(*lines)),
    lambda id, label: f'subgraph c{id}["{_mermaid_text(label)}"]',
    "end",
    lambda source, target, label: f"{source} -->{f'|{label}|' if label else ''} {target}",
)


def _lines(graph: Graph, syntax: Syntax) -> Iterator[str]:
    """Yield the lines of a graph: boxes and clusters in order, then the edges."""
    edges: list[str] = []
    yield from _boxes(graph, syntax, "n", "  ", edges)
    for number, (name, value) in enumerate(zip(graph.output_names, graph.outputs, strict=False)):
        yield f"  {syntax.box(f'out{number}', (name, str(graph.type(value))), 'output')}"
        edges.append(_edge(graph, syntax, "n", value, f"out{number}"))
    yield from edges


def _boxes(graph: Graph, syntax: Syntax, prefix: str, indent: str, edges: list[str]) -> Iterator[str]:
    """Yield the boxes of a graph or region, with ids that begin with `prefix`, and add its edges to `edges`."""
    for number, node in enumerate(graph.nodes):
        id = f"{prefix}{number}"
        targets = dict.fromkeys(range(len(node.inputs)), id)
        for index, region in enumerate(node.op.regions()):
            inner = f"{id}_{index}_"
            yield f"{indent}{syntax.cluster(f'{id}_{index}', _cluster_label(node))}"
            yield from _boxes(region, syntax, inner, indent + "  ", edges)
            yield f"{indent}{syntax.end}"
            edges += [_edge(region, syntax, inner, v, id) for v in region.outputs]
            if isinstance(node.op, Repeat):  # operand i of other ops is not always input i of their regions
                entries = ((i, n.op) for i, n in enumerate(region.nodes))
                targets |= {op.index: f"{inner}{i}" for i, op in entries if isinstance(op, BodyInput)}
        yield f"{indent}{syntax.box(id, _label(node), 'leaf' if isinstance(node.op, Leaf) else 'op')}"
        edges += [_edge(graph, syntax, prefix, v, targets[i]) for i, v in enumerate(node.inputs)]
    for number, (leaf, value) in enumerate(graph.writes):
        label = f'write state("{path_text(leaf.path)}", {leaf})'
        yield f"{indent}{syntax.box(f'{prefix}w{number}', (label,), 'output')}"
        edges.append(_edge(graph, syntax, prefix, value, f"{prefix}w{number}"))


def _edge(graph: Graph, syntax: Syntax, prefix: str, value: Value, target: str) -> str:
    """Return the line of an arrow from a value, labelled with the number of the result if its node has several."""
    has_several = len(graph.nodes[value.node].types) > 1
    return f"  {syntax.edge(f'{prefix}{value.node}', target, str(value.index) if has_several else '')}"


def _label(node: Node) -> tuple[str, ...]:
    path = () if isinstance(node.op, Leaf) else (path_text(node.origin.path),)
    return (node.op.text(), *path, ", ".join(map(str, node.types)))


def _cluster_label(node: Node) -> str:
    times = f" × {node.op.iterations()}" if node.op.iterations() > 1 else ""
    return f"{path_text(node.origin.path) or node.op.name()}{times}"
