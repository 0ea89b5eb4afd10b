"""This module explains programs: `model.explain()`, and the parts that models of text and images share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlx_jax.inspection.largest_losses import largest_losses
from rlx_jax.inspection.records import Inspection
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.findings import PaddedSizes, findings_of
from rlx_jax.runtime.inspect_program import inspect_program, program_facts
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs


def explain_program(
    programs: Programs,
    key: ProgramKey,
    times: BlockTimes | None = None,
    steps: int = 1,
    padding: PaddedSizes | None = None,
) -> Inspection:
    """Return the full description of a program: its blocks, its largest losses, and what is found about it.

    Args:
        programs, key: the program.
        times: the times of runs of this program; None for estimates.
        steps: the number of steps in a run, for a generation loop.
        padding: the sizes that were requested.
    """
    facts = program_facts(programs, key, ran=times is not None)
    inspection = inspect_program(facts, times, steps)
    return replace(inspection, losses=largest_losses(inspection, facts.rates), findings=findings_of(facts, padding))


def explain_request(
    programs: Programs, run: Callable[[], Any], runs: int, size: int, unit: str = "tokens"
) -> Inspection:
    """Run a request `runs` times in a trace, and return the description of the program that took most of the time.

    Args:
        programs: the programs of the model.
        run: the request.
        runs: the number of traced runs.
        size, unit: the number of tokens or images of the request, for the share of padding in one program.

    Raises:
        RequestError, UnsupportedError: as `profile_run`. Others as `run`.
    """
    times = profile_run([programs], run, runs)
    name = next(name for name in times.programs if name)
    key = next(key for key in programs.executables if key.text == name)
    sizes = dict(key.binding)
    num_computed = sizes.get("batch", 1) * sizes.get("seq", 1)
    one_call = sum(bool(name) for name in times.programs) == 1 and num_computed >= size
    padding = PaddedSizes({unit: (size, num_computed)}) if one_call else None
    return explain_program(programs, key, times, padding=padding)
