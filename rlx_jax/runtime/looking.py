"""What is looked at of compiled programs: their text, and the report on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlx_jax.compiler.pipeline import Template
from rlx_jax.compiler.settings import Settings
from rlx_jax.errors import GraphError
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.lowering.inspect.collectives import collectives
from rlx_jax.lowering.inspect.costs import cost
from rlx_jax.lowering.inspect.text import dump_lir
from rlx_jax.runtime.programs import ProgramKey, Programs
from rlx_jax.runtime.report import Report, mesh_facts


def text_of(programs: Programs, key: ProgramKey, level: str) -> str:
    """A program with its sizes at "lir", "stablehlo" or "hlo".

    Raises:
        GraphError: it was not compiled, or is not kept any more.
    """
    if level == "lir":
        return dump_lir(programs.function(key).lir)
    executable = programs.executables.get(key)
    if executable is None:
        raise GraphError(
            f"text({level!r}): this size was only traced through apply, or its program is not kept any more; give "
            f"inputs: text({level!r}, x)"
        )
    return str(executable.lowered.as_text()) if level == "stablehlo" else str(executable.call.as_text())


def report_of(
    programs: Programs,
    template: Template,
    settings: Settings,
    last: ProgramKey | None,
    seconds: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Report:
    """The report on `template`, and on the program that ran `last`, or with `sizes` on that of those."""
    executable = programs.executables.get(last) if last and not sizes else None
    every = [programs, *(other.programs for other in programs.beside.values())]
    common: dict[str, Any] = {
        "nodes": template.nodes,
        "parameter_bytes": sum(t.nbytes for t in programs.layout.types().values()),
        "compiles": sum(one.executables.made for one in every),
        "evicted": sum(one.executables.evicted for one in every),
        "recompiles": sum(one.recompiles for one in every),
        "initialised": programs.initialised,
        "refusals": template.built.refusals,
        "fusion": template.fusion,
        "device": settings.device,
        "loop": settings.loop if any(key.program == "extend" for key in programs.templates) else None,
        **mesh_facts(settings.division, programs.layout),
    }
    if sizes:
        return Report(seconds, **common, **asdict(template.cost(sizes)))
    if executable is None:
        return Report(seconds, **common)
    memory: Any = executable.call.memory_analysis()
    graph, plan = executable.lir.graph, executable.lir.plan
    return Report(
        {**seconds, **executable.seconds},
        **common,
        program=last.text if last else "",
        attention=executable.lir.attention(),
        products=executable.lir.products(),
        experts=executable.lir.experts(),
        recurrences=executable.lir.recurrences(),
        **asdict(cost(graph)),
        collectives={} if settings.division is None else collectives(executable.call.as_text() or ""),
        donated_bytes=memory.alias_size_in_bytes,
        peak_bytes=executable.peak_bytes,
        estimated_activation_bytes=activation_bytes(graph, plan.donate_state, plan.scan),
    )
