"""This module compiles several programs of a model at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlx_jax.compiler.executable import Arrays, StateArrays
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import HelperCall, Programs

# Programs that compile at the same time; XLA itself uses several threads for one.
COMPILE_THREADS = 8


def prepare_programs(
    programs: Programs, calls: Sequence[tuple[ProgramKey, Arrays, StateArrays, Arrays]], helpers: Sequence[HelperCall]
) -> None:
    """Compile programs, or load them: while one is traced, threads compile the ones before.

    Args:
        programs: the programs of the model.
        calls: the key of each program and its arguments, as in `Programs.executable`.
        helpers: calls of helper functions.
    """
    missing = {call[0]: call for call in calls if call[0] not in programs.executables}
    with programs.lock, ThreadPoolExecutor(COMPILE_THREADS) as pool:
        jobs = {key: pool.submit(programs.trace_executable(*call)) for key, call in missing.items()}
        missing_helpers = {call.key: call for call in helpers if call.key not in programs.helpers}
        others = {key: pool.submit(programs.compile_helper, call) for key, call in missing_helpers.items()}
        for key, job in jobs.items():
            programs.executables.insert(key, job.result())
        for helper_key, helper in others.items():
            programs.helpers.insert(helper_key, helper.result())
