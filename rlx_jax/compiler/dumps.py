"""Dumps of a program: at HIR or MIR, after a pass, what a pass changed, and the full pipeline.

The environment variable `RLX_IR_DUMP=PATH` writes all levels of each program that is compiled to a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rlx_jax.compiler.drawing import dot, mermaid
from rlx_jax.compiler.passes import Job, pass_named, run_passes
from rlx_jax.compiler.pipeline import Template
from rlx_jax.errors import GraphError, SaveFailedError, quote
from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.ir.queries import bind_leaves
from rlx_jax.ir.text import diff_text, dump, stats
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.lowering.lir.plan import Lir

DUMP_VARIABLE = "RLX_IR_DUMP"

# How a graph is printed: functions of the graph, its level, and a note for the first line.
FORMATS: Mapping[str, Callable[[Graph, str, str], str]] = {
    "text": dump, "stats": stats, "dot": dot, "mermaid": mermaid,
}  # fmt: skip


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
