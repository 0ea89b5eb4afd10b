"""Dumps of a program: at HIR or MIR, after a pass, what a pass changed, the full pipeline, and drawings of a graph.

The environment variable `RLX_IR_DUMP=PATH` writes all levels of each program that is compiled to a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlx_jax.compiler.passes import Job, pass_named, run_passes
from rlx_jax.compiler.pipeline import Template
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, SaveFailedError, quote
from rlx_jax.ir.graph import BodyInput, Graph, Leaf, Node, TypeCache, Value
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.queries import bind_leaves
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.text import diff_text, dump, stats
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.lowering.lir.plan import Lir

DUMP_VARIABLE = "RLX_IR_DUMP"


def graph_text(template: Template, sizes: Mapping[str, int], level: str, after: str, diff: bool, format: str) -> str:
    """Return the dump of a program at HIR or MIR.

    Args:
        template: the program.
        sizes: numbers for symbols of the program.
        level: "hir" or "mir".
        after: the pass to show the program after; "" for the end of the level.
        diff: whether to show the difference that the pass made, or without a pass, all passes of the level.
        format: one of `FORMATS`; "text" for a difference.

    Raises:
        GraphError: there is no such pass, it does not run for this program, or its result is at another level.
    """
    job = replace(template.job, sizes=sizes or None)
    before, graph, note = _graphs(template, job, level, after, diff)
    if sizes and after != "specialise":
        types = TypeCache()
        before, graph = (bind_leaves(each, sizes, types) for each in (before, graph))
    if diff:
        return diff_text(before, graph, ("hir" if after == "lower" else level, level), note)
    return FORMATS[format](graph, level, note)


def _graphs(template: Template, job: Job, level: str, after: str, diff: bool) -> tuple[Graph, Graph, str]:
    """Return the graph before the passes that a difference is about, the graph to show, and a note."""
    blocks = template.built.hir
    if after:
        check_pass(after, level)
        result = run_passes(blocks, job, stop=after)
        before, graph = [blocks, *result.graphs.values()][-2:]
        return before, graph, f", after={after}"
    if level == "hir":
        # Nothing is derived for these programs: show the blocks that the user wrote, before any pass.
        as_built = job.program in ("forward", "train") and not diff
        return blocks, blocks if as_built else template.hir, f", fusion={job.settings.profile.fusion.policy}"
    return run_passes(blocks, job, stop="lower").graph if diff else template.mir, template.mir, ""


def pass_diffs(template: Template) -> dict[str, str]:
    """Return the difference that each pass made to a program, by the pass's name; nothing for those that made none."""
    diffs, before = {}, template.built.hir
    for name, graph in run_passes(before, template.job).graphs.items():
        if graph is not before:
            level = pass_named(name).level
            levels = "hir" if name == "lower" else level, level
            diffs[name] = diff_text(before, graph, levels, f", after={name}")
        before = graph
    return diffs


def check_pass(name: str, level: str) -> None:
    """Check that there is a pass with this name, and that its result is at `level`.

    Raises:
        GraphError: it is not.
    """
    last_pass = pass_named(name)
    if last_pass.level != level:
        raise GraphError(
            f"pass {quote(name)} returns a program at {last_pass.level}: text({str(last_pass.level)!r}, after=…)"
        )


def pipeline_text(template: Template, lir: Lir) -> str:
    """Return the dump of a program at all levels, in six sections with banners."""
    lowered = run_passes(template.built.hir, template.job, stop="lower").graph
    statistics = f"{stats(template.hir, 'hir')}\n{stats(template.mir, 'mir')}"
    sections = {
        "HIR": dump(template.hir, "hir", f", fusion={template.job.settings.profile.fusion.policy}"),
        "MIR (lowered)": dump(lowered, "mir"),
        "MIR (fusion diff)": diff_text(lowered, template.mir, ("mir", "mir")),
        "MIR (optimized)": dump(template.mir, "mir"),
        "FUSION": f"{template.fusion}\n\n{statistics}",
        "LIR": dump_lir(lir),
    }
    banner = "═" * 80
    return "\n\n".join(f"{banner}\n{title}\n{banner}\n{text}" for title, text in sections.items()) + "\n"


def write_dump(template: Template, lir: Lir) -> None:
    """Write the dump of a program that is compiled to the path of `RLX_IR_DUMP`, if it is set.

    A path that ends in a slash, or a directory, gets `name.ir.txt`, or for another program than `forward`
    `name.program.ir.txt`. A later program replaces the dump of an earlier one in the same file.

    Raises:
        SaveFailedError: the file cannot be written.
    """
    text = os.environ.get(DUMP_VARIABLE, "")
    if not text:
        return
    path = Path(text)
    if text.endswith("/") or path.is_dir():
        program = template.job.program
        name = template.built.name if program == "forward" else f"{template.built.name}.{program}"
        path /= re.sub(r"[^\w.-]", "_", name) + ".ir.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pipeline_text(template, lir), encoding="utf-8")
    except OSError as error:
        raise SaveFailedError(f"{DUMP_VARIABLE}: {quote(str(path))}: not written: {error.strerror}") from error


# -- drawings ----------------------------------------------------------------------------------


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


# How a graph is printed: functions of the graph, its level, and a note for the first line.
FORMATS: Mapping[str, Callable[[Graph, str, str], str]] = {
    "text": dump, "stats": stats, "dot": dot, "mermaid": mermaid,
}  # fmt: skip
