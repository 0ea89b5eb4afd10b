"""`profile`: run something under `jax.profiler`, and give each kernel to the block that it is of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import jax

from rlx_jax.compiler.executable import Executable, RunsOthers
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError
from rlx_jax.lowering.inspect.hlo import DRAFTING, Instruction, block_paths, instructions, kernel_name, module_id
from rlx_jax.runtime.block_times import BlockTimes, block_times, trace_of
from rlx_jax.runtime.programs import ProgramKey, Programs
from rlx_jax.runtime.state import State


def profile_run(models: Sequence[Programs], run: Callable[[], Any], runs: int = 1) -> BlockTimes:
    """Time by block of `run`, which runs once before, so that everything is compiled, and then `runs` times traced.
    `models`: the one that is asked, and others whose programs it runs: those that draft.

    Raises:
        RequestError: nothing was asked of `run`. RequestError, UnsupportedError: as `trace_of`. Others as `run`.
    """
    made = jax.block_until_ready(run())
    if isinstance(made, Sized) and len(made) == 0:
        raise RequestError("profile: there is nothing to time: pass one prompt, text or image at least")

    def repeated() -> None:
        for _ in range(runs):
            jax.block_until_ready(run())

    trace = trace_of(repeated)
    ran: dict[tuple[int, str], set[str]] = defaultdict(set)
    for kernel in trace.kernels:
        ran[kernel.program, kernel.module].add(kernel.instruction)
    compiled = list(_compiled(models))
    found = {
        place: (one.text, one.instructions())
        for place, names in ran.items() if (one := _which(compiled, place, names))
    }  # fmt: skip
    return block_times(trace, found, runs, running_device().name)


@dataclass(frozen=True)
class _Compiled:
    """A program as a trace may name it: XLA's number and name of it, and what we call it."""

    number: int
    module: str
    text: str
    key: ProgramKey
    executable: Executable

    def instructions(self) -> dict[str, Instruction]:
        """Its instructions, under the names of their kernels too."""
        others = self.key.around.beside().values() if isinstance(self.key.around, RunsOthers) else ()
        paths = frozenset().union(*(block_paths(lir.graph) for lir in (self.executable.lir, *others)))
        made = instructions(self.executable.call.as_text() or "", paths)
        return {kernel_name(name): instruction for name, instruction in made.items()} | made


def _compiled(models: Sequence[Programs]) -> Iterator[_Compiled]:
    """The programs of models: of the one that is asked, and of those that draft."""
    beside = [found.programs for model in models for found in model.beside.values()]
    for place, programs in enumerate(dict.fromkeys((*models, *beside))):
        for key, executable in programs.executables.items():
            for module in executable.call.runtime_executable().hlo_modules():  # type: ignore[union-attr]
                number = module_id(module.as_serialized_hlo_module_proto())
                yield _Compiled(number, module.name, f"{DRAFTING}: " * (place > 0) + key.text, key, executable)


def _which(compiled: Sequence[_Compiled], place: tuple[int, str], names: set[str]) -> _Compiled | None:
    """The program of a trace's number and name, whose kernels are `names`. A GPU's trace has numbers of its own: there
    it is the one of that name; of several, such as that of a model and of one that drafts, whose kernels they are."""
    of_name = [one for one in compiled if one.module == place[1]]
    fitting = [one for one in of_name if one.number == place[0]] or of_name
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return max(fitting, key=lambda one: len(names & one.instructions().keys()))


def profile_calls(
    programs: Programs, call: Callable[..., Any], given: Mapping[str, Any], state: State | None, runs: int
) -> BlockTimes:
    """Time by block of `call(**given)`, with `state=` where there is one. Each of the calls gets copies of its own of
    what it consumes.

    Raises:
        RequestError, UnsupportedError: as `trace_of`. Others as a call.
    """
    consumed = programs.settings.plan.donate_inputs

    def fresh(name: str, value: Any) -> Any:
        return jax.numpy.copy(value) if name in consumed and isinstance(value, jax.Array) else value

    copies = [
        {name: fresh(name, value) for name, value in given.items()} | ({} if state is None else {"state": state.copy()})
        for _ in range(runs + 1)
    ]
    return profile_run([programs], lambda: call(**copies.pop()), runs)
