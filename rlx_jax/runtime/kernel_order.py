"""This module finds the HLO instructions of the kernels of CUDA graphs, by the order in which they ran.

For a kernel of a CUDA graph a trace has the kernel's name only. Kernels of libraries have names of their own, and equal
fusions, such as those of equal layers, share one kernel, which has the name of one of them. A stream runs the
instructions of a program in the order of its schedule, so a kernel belongs to the next instruction that it fits. A call
of a library may run several kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlx_jax.dataclasses import dataclass
from rlx_jax.lowering.inspect.hlo import Instruction, kernel_name

# Operations of the driver: the first kind prepares the next kernel.
MEMSET, MEMORY = "Memset", ("Memset", "Memcpy")


@dataclass(frozen=True)
class Schedule:
    """The instructions of a program that run a kernel, in order, with the bodies of loops once.

    Attributes:
        names: the names of the instructions.
        loops: the first position in each loop, and the one after its last.
    """

    names: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    def after(self, position: int) -> Iterator[int]:
        """Yield all positions in the order in which they may run after a position.

        At the end of a loop its next iteration may follow; at the end of the program its next run.
        """
        inner = min(
            (loop for loop in self.loops if loop[0] <= position < loop[1]), key=lambda p: p[1] - p[0], default=None
        )
        start, end = inner or (0, len(self.names))
        yield from range(position + 1, end)
        yield from range(start, position + 1)
        yield from range(end, len(self.names))
        yield from range(start)


def schedule_of(instructions: Mapping[str, Instruction]) -> Schedule:
    """Return the schedule of a program from its instructions in the order of the HLO text."""
    members: dict[str, list[str]] = {}
    for name, instruction in instructions.items():
        members.setdefault(instruction.computation, []).append(name)
    names: list[str] = []
    loops: list[tuple[int, int]] = []

    def add(computation: str) -> None:
        for name in members.get(computation, ()):
            instruction = instructions[name]
            if instruction.opcode == "while":
                start = len(names)
                add(instruction.body)
                loops.append((start, len(names)))
            elif instruction.has_kernel:
                names.append(name)

    add(next(reversed(members), ""))  # the entry is the last computation
    return Schedule(tuple(names), tuple(loops))


def instructions_of_kernels(kernels: Sequence[str], instructions: Mapping[str, Instruction]) -> list[str]:
    """Return the name of the instruction of each kernel of a stream; a kernel that fits none keeps its name.

    Args:
        kernels: the names of the kernels, in the order in which they ran.
        instructions: the instructions of the program, in the order of the HLO text.
    """
    schedule = schedule_of(instructions)
    scheduled = [instructions[name] for name in schedule.names]
    first_of_kernel = {kernel_name(name): number for number, name in enumerate(schedule.names)}
    instruction_names, position, library = list(kernels), -1, -1
    for number, kernel in enumerate(kernels):
        if kernel.startswith(MEMORY):
            continue
        following = schedule.after(position)
        if (first := first_of_kernel.get(kernel)) is None:  # a kernel of a library
            ahead = next((p for p in following if scheduled[p].opcode != "copy"), -1)
            library = ahead if ahead >= 0 and scheduled[ahead].opcode == "custom-call" else library
            if library >= 0:
                position, instruction_names[number] = library, schedule.names[library]
        else:
            work = scheduled[first].opcode, scheduled[first].result
            # The kernel has the name of the first of several equal instructions.
            equal = (p for p in following if p >= first and (scheduled[p].opcode, scheduled[p].result) == work)
            position, library = next(equal, first), -1
            instruction_names[number] = schedule.names[position]
    for number in reversed(range(len(instruction_names) - 1)):  # memory is set for the kernel that follows
        if instruction_names[number].startswith(MEMSET):
            instruction_names[number] = instruction_names[number + 1]
    return instruction_names
