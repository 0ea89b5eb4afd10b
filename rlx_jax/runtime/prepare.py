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
    """Trace programs; threads compile or load them, and whoever runs one waits for it.

    Args:
        programs: the programs of the model.
        calls: the key of each program and its arguments, as in `Programs.executable`, the first to run first.
        helpers: calls of helper functions.
    """
    pool = ThreadPoolExecutor(COMPILE_THREADS)
    with programs.lock:
        jobs = programs.compiling.items()
        programs.compiling = {key: job for key, job in jobs if not (job.done() and job.exception())}
        for call in calls:
            if call[0] not in programs.executables and call[0] not in programs.compiling:
                programs.compiling[call[0]] = pool.submit(programs.trace_executable(*call))
        for helper in helpers:
            if helper.key not in programs.helpers and helper.key not in programs.compiling:
                programs.compiling[helper.key] = pool.submit(programs.trace_helper(helper))
    pool.shutdown(wait=False)
