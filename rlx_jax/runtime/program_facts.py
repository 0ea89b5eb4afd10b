"""This module collects what is known of one program with sizes, for its description and for findings about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlx_jax.compiler.executable import Executable
from rlx_jax.compiler.pipeline import Template
from rlx_jax.device import running_device
from rlx_jax.inspection.rates import Rates, rates_of
from rlx_jax.inspection.work import Work, block_work
from rlx_jax.ir.paths import Path
from rlx_jax.lowering.inspect.hlo import Instruction
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.block_times import program_instructions
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs


@dataclass(frozen=True)
class ProgramFacts:
    """What is known of one program with sizes.

    Attributes:
        programs, key: the program among all programs of the model.
        lir: its plan.
        template: its form with symbolic sizes.
        executable: its compiled form; None if it is not compiled.
        instructions: the HLO instructions by name; empty if it is not compiled.
        rates: the rates of the device, for all devices of a mesh together; None if they are unknown.
        work: the work of each block.
    """

    programs: Programs
    key: ProgramKey
    lir: Lir
    template: Template
    executable: Executable | None
    instructions: Mapping[str, Instruction]
    rates: Rates | None
    work: Mapping[Path, tuple[Work, ...]]


def program_facts(programs: Programs, key: ProgramKey, ran: bool = False) -> ProgramFacts:
    """Return the facts of a program; it is not compiled for them.

    Args:
        programs, key: the program.
        ran: whether it ran, so that the rates are of the device that runs, and not of the one that it is planned for.
    """
    executable = programs.executables.get(key)
    lir = programs.function(key).lir if executable is None else executable.lir
    instructions = {} if executable is None else program_instructions(programs, key, executable)
    sharding = programs.model_sharding
    rates = rates_of(running_device() if ran else programs.settings.device)
    if rates is not None and sharding is not None:
        count = sharding.mesh.size
        flops = {dtype: count * rate for dtype, rate in rates.flops.items()}
        rates = replace(rates, bandwidth=count * rates.bandwidth, flops=flops)
    template = programs.template(key.symbolic)
    return ProgramFacts(programs, key, lir, template, executable, instructions, rates, block_work(lir))
