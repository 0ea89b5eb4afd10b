"""What is looked at of compiled programs: their text, and the report on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import jax

from rlx_jax.compiler.executable import Arrays
from rlx_jax.compiler.pipeline import make_function
from rlx_jax.compiler.settings import Settings
from rlx_jax.compiler.template import Template
from rlx_jax.errors import GraphError
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.lowering.inspect.collectives import collectives
from rlx_jax.lowering.inspect.text import dump_lir
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.inputs import check_counted
from rlx_jax.runtime.programs import ProgramKey, Programs
from rlx_jax.runtime.report import ProgramReport, Report, over_mesh


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


def jaxpr_of(programs: Programs, template: Template, params: Arrays) -> Any:
    """A program with symbolic sizes as JAX traces it; `params` are shapes."""
    mir = template.mir
    lir = Lir(mir, programs.settings.plan)
    state = {name: t.spec for name, t in template.state.items()}
    inputs = {i.input: i.type.spec for i in mir.inputs}
    return jax.make_jaxpr(make_function(lir, programs.layout))(params, state, inputs)


def programs_of(programs: Programs) -> tuple[ProgramReport, ...]:
    """Every program that is kept, of flows beside the model's too, what took longest to compile first."""
    found = _own_programs(programs, len(programs.flows) > 1)
    for other in programs.beside.values():
        found += _own_programs(other.programs, True)
    return tuple(sorted(found, key=lambda r: (-r.seconds, r.program)))


def _own_programs(programs: Programs, named: bool) -> list[ProgramReport]:
    """Those of its own flows, with the flow's name where they are `named`."""
    reports: list[ProgramReport] = []
    counted: set[ProgramKey] = set()  # programs of other sizes share what is made before there are sizes
    for key, made in programs.executables.items():
        template, seconds = programs.template(key.symbolic), made.seconds
        shared = {} if key.symbolic in counted else template.seconds
        counted.add(key.symbolic)
        needs, memory = made.needs, cast(Any, made.call.memory_analysis())
        reports.append(
            ProgramReport(
                f"{key.flow}: {key.text}" if named else key.text,
                prove=shared.get("derive", 0.0) + seconds["prove"],
                lower=sum(s for name, s in shared.items() if name != "derive") + seconds["plan"],
                trace=seconds["trace"],
                compile=seconds["compile"],
                flops=needs.flops,
                bytes=needs.bytes,
                peak_bytes=made.peak_bytes,
                donated_bytes=memory.alias_size_in_bytes,
                cache_bytes=state_bytes(template, key),
            )
        )
    return reports


def state_bytes(template: Template, key: ProgramKey | None) -> int:
    """What the state of a program takes, of all devices together; 0 without one."""
    sizes = dict(key.binding) if key else {}
    return sum(t.bind(sizes).nbytes for t in template.state.values())


def report_of(
    programs: Programs,
    template: Template,
    settings: Settings,
    last: ProgramKey | None,
    seconds: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Report:
    """The report on `template`, and on the program that ran `last`, or with `sizes` on that of those."""
    found = model_report(programs, template, settings, seconds)
    if sizes:
        cost = template.cost(sizes)
        check_counted(sizes, template.bounds, template.built.name)
        return replace(found, **asdict(cost))
    executable = programs.executables.get(last) if last else None
    if executable is None:
        return found
    lir, memory = executable.lir, cast(Any, executable.call.memory_analysis())
    return replace(
        found,
        seconds={**seconds, **executable.seconds},
        program=last.text if last else "",
        attention=lir.attention(),
        products=lir.products(),
        experts=lir.experts(),
        recurrences=lir.recurrences(),
        **asdict(executable.needs),
        collectives={} if settings.division is None else collectives(executable.call.as_text() or ""),
        donated_bytes=memory.alias_size_in_bytes,
        cache_bytes=state_bytes(template, last),
        peak_bytes=executable.peak_bytes,
        estimated_activation_bytes=activation_bytes(lir.graph, lir.plan.donate_state, lir.plan.scan),
    )


def model_report(programs: Programs, template: Template, settings: Settings, seconds: Mapping[str, float]) -> Report:
    """What the report says that depends on no sizes."""
    every = [programs, *(other.programs for other in programs.beside.values())]
    found = Report(
        seconds,
        nodes=template.nodes,
        parameter_bytes=sum(t.nbytes for t in programs.layout.types().values()),
        compiles=sum(one.executables.made - one.loaded for one in every),
        loaded=sum(one.loaded for one in every),
        evicted=sum(one.executables.evicted for one in every),
        recompiles=sum(one.recompiles for one in every),
        initialised=programs.initialised,
        ignored_fields=tuple(
            dict.fromkeys(name for flow in programs.flows.values() for name in getattr(flow, "_ignored_fields", ()))
        ),
        recompiled=tuple(programs.surprises),
        programs=programs_of(programs),
        refusals=template.built.refusals,
        fusion=template.fusion,
        device=settings.device,
        loop=settings.loop if any(key.program == "extend" for key in programs.templates) else None,
    )
    return found if settings.division is None else over_mesh(found, settings.division, programs.layout)
