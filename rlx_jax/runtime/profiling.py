"""`profile`: run something under `jax.profiler`, and give each kernel to the block that it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rlx_jax.compiler.executable import RunsOthers
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, shown
from rlx_jax.lowering.inspect.scopes import DRAFTING, Instruction, block_paths, instructions, module_id
from rlx_jax.runtime.block_times import BlockTimes, block_times
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.state import State
from rlx_jax.runtime.tracing import trace_of


def profile_run(models: Sequence[Programs], run: Callable[[], Any], runs: int = 1) -> BlockTimes:
    """Time by block of `run`, which runs once before, so that everything is compiled, and then `runs` times traced.
    `models`: the one that is asked, and others whose programs it runs: those that draft.

    Raises:
        RequestError, UnsupportedError: as `trace_of`. Others as `run`.
    """
    jax.block_until_ready(run())

    def repeated() -> None:
        for _ in range(runs):
            jax.block_until_ready(run())

    trace = trace_of(repeated)
    seen = {(kernel.program, kernel.module) for kernel in trace.kernels}
    found: dict[tuple[int, str], tuple[str, Mapping[str, Instruction]]] = {}
    beside = [found.programs for model in models for found in model.beside.values()]
    own, *drafting = dict.fromkeys((*models, *beside))
    entries = [("", *entry) for entry in own.executables.items()]
    entries += [(f"{DRAFTING}: ", *entry) for programs in drafting for entry in programs.executables.items()]
    for role, key, executable in entries:
        for module in executable.call.runtime_executable().hlo_modules():  # type: ignore[union-attr]
            name = (module_id(module.as_serialized_hlo_module_proto()), module.name)
            if name in seen:
                others = key.around.beside().values() if isinstance(key.around, RunsOthers) else ()
                paths = frozenset().union(*(block_paths(lir.graph) for lir in (executable.lir, *others)))
                found[name] = role + key.text, instructions(executable.call.as_text() or "", paths)
    return block_times(trace, found, runs, running_device().name)


def profile_calls(
    programs: Programs, call: Callable[..., Any], given: Mapping[str, Any], state: State | None, runs: int
) -> BlockTimes:
    """Time by block of `call(**given)`, with `state=` where there is one. Each of the calls gets copies of its own of
    what it consumes.

    Raises:
        RequestError, UnsupportedError: as `trace_of`. Others as a call.
    """
    consumed = programs.settings.donate_inputs

    def fresh(name: str, value: Any) -> Any:
        return jax.numpy.copy(value) if name in consumed and isinstance(value, jax.Array) else value

    copies = [
        ({name: fresh(name, value) for name, value in given.items()}, None if state is None else state.copy())
        for _ in range(runs + 1)
    ]

    def run() -> Any:
        values, held = copies.pop()
        return call(**values) if held is None else call(**values, state=held)

    return profile_run([programs], run, runs)


def check_runs(runs: Any) -> int:
    """How often to run it.

    Raises:
        RequestError: no number over 0.
    """
    if not isinstance(runs, int) or isinstance(runs, bool) or runs < 1:
        raise RequestError(f"runs is {shown(runs)}; expected how often to run it, at least 1")
    return runs
