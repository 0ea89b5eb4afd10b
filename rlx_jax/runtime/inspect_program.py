"""This module describes one compiled or planned program as an `Inspection`: its blocks with their work and time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlx_jax.compiler.executable import Executable
from rlx_jax.compiler.pipeline import Template
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import running_device
from rlx_jax.inspection.rates import Rates, rates_of
from rlx_jax.inspection.records import BlockEntry, Inspection, KernelEntry, OpEntry, PassStep
from rlx_jax.inspection.work import Work, block_work, program_bytes
from rlx_jax.ir.graph import Graph, Leaf, Param, Value
from rlx_jax.ir.param import packing_of, printed_name
from rlx_jax.ir.paths import Path, path_text
from rlx_jax.ir.text import block_rows
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.inspect.hlo import Instruction, without_layer_numbers
from rlx_jax.lowering.inspect.outline import OpCost, op_costs
from rlx_jax.lowering.lir.plan import CHOICE_OPS, XLA_CHOICE, Choice, Lir
from rlx_jax.runtime.block_times import HELPERS, IDLE, NOT_ATTRIBUTED, BlockTime, BlockTimes, program_instructions
from rlx_jax.runtime.estimate import block_seconds
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.report import state_bytes

# This module collects what is known of one program with sizes, for its description and for findings about it.


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


# The path of time that other programs of the same run take.
OTHERS = "(other programs)"


def inspect_program(facts: ProgramFacts, times: BlockTimes | None = None, steps: int = 1) -> Inspection:
    """Return the description of a program, without losses and findings.

    Args:
        facts: the program.
        times: the times of runs that only exist to run this program; None to estimate them by the roofline.
        steps: the number of steps of a generation loop in a run; the inspection describes one of them.
    """
    key, executable = facts.key, facts.executable
    blocks = planned_blocks(facts)
    if times is None:
        kernels = _compiled_kernels(facts.instructions)
        blocks = [replace(block, kernels=tuple(kernels.get(block.path, ()))) for block in blocks]
    else:
        blocks = measured_blocks(facts, blocks, times, steps)
    return Inspection(
        name=key.flow, program=key.program, sizes=dict(key.binding),
        device=facts.programs.settings.device.name if times is None else times.device,
        seconds=sum(block.seconds for block in blocks) if times is None else times.seconds / steps,
        measured=times is not None, roofline_seconds=sum(block.roofline_seconds for block in blocks),
        flops=sum(block.flops for block in blocks), bytes=sum(block.bytes for block in blocks),
        param_bytes=sum(t.nbytes for t in facts.programs.layout.types().values()),
        cache_bytes=state_bytes(facts.template, key),
        peak_bytes=None if executable is None else executable.peak_bytes,
        blocks=tuple(blocks), passes=tuple(pass_steps(facts.template)),
    )  # fmt: skip


def pass_steps(template: Template) -> list[PassStep]:
    """Return the passes that made a program, in order."""
    counts = [*template.nodes.values()]
    pairs = zip(template.nodes, counts[:1] + counts, counts, strict=False)
    return [PassStep(name, before, after, template.seconds.get(name, 0.0)) for name, before, after in pairs]


# -- blocks of the plan ------------------------------------------------------------------------


def planned_blocks(facts: ProgramFacts) -> list[BlockEntry]:
    """Return the blocks of a program in order, with estimated times; repeated layers are one block."""
    graph, nodes = facts.lir.graph, defaultdict[Path, list[OpCost]](list)
    for op_cost in op_costs(graph):
        if not op_cost.node.op.regions():
            nodes[op_cost.node.origin.path].append(op_cost)
    members: dict[str, list[Path]] = defaultdict(list)
    for path in nodes:
        if path_text(path) not in ("", graph.name):  # nodes outside of blocks
            members[without_layer_numbers(path_text(path))].append(path)
    texts = _hir_texts(facts.template.hir)
    choices: dict[Path, list[Choice]] = defaultdict(list)
    for path, choice in facts.lir.choices(*CHOICE_OPS):
        if choice != XLA_CHOICE:
            choices[path].append(choice)
    rows, sharding = block_rows(graph, facts.lir.param_of), facts.programs.model_sharding
    seconds = defaultdict[Path, float](float) if facts.rates is None else block_seconds(facts.lir, facts.rates)
    packed = {p for param in graph.params() if facts.lir.stays_packed(param) for p in param.programs}
    entries = []
    for name, paths in members.items():
        params = [program for path in paths for program in rows[path].new]
        schemes = ((packing_of(p) if p in packed else None) or short_name(p.type.dtype) for p in params)
        shardings = () if sharding is None else (sharding.describe_storage(p)[0] for p in params)
        layers, ops = sum(rows[path].iterations for path in paths), tuple(map(_op_entry, nodes[paths[0]]))
        chosen = {
            choice: sum(rows[path].iterations for path in paths if choice in choices[path])
            for choice in dict.fromkeys(choice for path in paths for choice in choices[path])
        }
        entry = BlockEntry(
            path=name, op=next((texts[path] for path in paths if path in texts), ""), output=rows[paths[0]].output,
            params=sum(rows[path].count for path in paths),
            param_bytes=sum(program_bytes(p, p in packed) for p in params), scheme="/".join(dict.fromkeys(schemes)),
            dtype=ops[-1].dtype, sharding=", ".join(dict.fromkeys(shardings)),
            implementation=", ".join(choice.implementation for choice in chosen),
            reason="; ".join(
                choice.reason + f", in {count} of {layers} layers" * (count < layers)
                for choice, count in chosen.items()
            ),
            layers=layers, ops=ops,
        )  # fmt: skip
        works = [work for path in paths for work in facts.work.get(path, ())]
        entries.append(replace(_with_work(entry, works, facts.rates), seconds=sum(seconds[path] for path in paths)))
    return entries


def _hir_texts(hir: Graph) -> dict[Path, str]:
    """Return each block as text: its op that reads parameters, or else its last op."""
    texts: dict[Path, str] = {}
    reads_params: set[Path] = set()
    for graph, node in hir.walk():
        path = node.origin.path
        if isinstance(node.op, Leaf) or path in reads_params:
            continue
        texts[path] = node.op.text()
        if any(isinstance(graph.nodes[value.node].op, Param) for value in node.inputs):
            reads_params.add(path)
    return texts


def _with_work(entry: BlockEntry, works: Sequence[Work], rates: Rates | None) -> BlockEntry:
    """Return the entry with its operations, bytes, and the limits that follow from the rates; 0 without rates."""
    flops, nbytes, weights = (sum(getattr(w, name) for w in works) for name in ("flops", "bytes", "param_bytes"))
    entry = replace(entry, flops=flops, bytes=nbytes, weight_bytes=weights)
    if rates is None or not works:
        return entry
    compute, memory = (sum(part) for part in zip(*(work.limits(rates) for work in works), strict=True))
    limit = max(compute, memory)
    limited_by = "" if not limit else "compute" if compute > memory else "memory"
    return replace(entry, roofline_seconds=limit, limited_by=limited_by)


def _op_entry(op_cost: OpCost) -> OpEntry:
    """Return the description of an op."""
    node, cost = op_cost.node, op_cost.cost
    inputs = tuple(_operand(op_cost.graph, value) for value in node.inputs)
    result, dtype = ", ".join(map(str, node.types)), short_name(node.types[0].dtype)
    name = f"%{op_cost.number}"
    return OpEntry(name, node.op.text(), inputs, result, dtype, cost.flops, cost.bytes, node.origin.by)


def _operand(graph: Graph, value: Value) -> str:
    node = graph.nodes[value.node]
    if isinstance(node.op, Param):
        return printed_name(node.op.programs[0])
    return f"%{value.node}" + (f".{value.index}" if len(node.types) > 1 else "")


# -- measured times ----------------------------------------------------------------------------


def measured_blocks(
    facts: ProgramFacts, blocks: Sequence[BlockEntry], times: BlockTimes, steps: int
) -> list[BlockEntry]:
    """Return the blocks with their measured times, followed by entries for time that belongs to no block."""
    rows: dict[str, list[BlockTime]] = defaultdict(list)
    for row in times.rows:
        path = row.path
        if row.program:
            in_program = NOT_ATTRIBUTED if row.path == facts.lir.graph.name else without_layer_numbers(row.path)
            path = in_program if row.program == facts.key.text else OTHERS
        rows[path].append(row)
    names = [block.path for block in blocks]
    no_block = [path for path in rows if path not in names]
    no_block.sort(key=lambda path: (path in (NOT_ATTRIBUTED, HELPERS, OTHERS, IDLE), path))
    blocks = [*blocks, *map(BlockEntry, no_block)]
    return [_with_times(block, rows.get(block.path, []), steps) for block in blocks]


def _with_times(block: BlockEntry, rows: Sequence[BlockTime], steps: int) -> BlockEntry:
    """Return a block with the times of its layers' rows."""
    kernels = [
        replace(kernel, seconds=(kernel.seconds or 0.0) / steps, calls=round(kernel.calls / steps))
        for kernel in sorted((k for row in rows for k in row.kernels), key=lambda k: -(k.seconds or 0.0))
    ]
    layers = sorted(rows, key=lambda row: [int(n) for n in re.findall(r"\d+", row.path)])
    one_by_one = block.layers > 1 and len(layers) == block.layers
    return replace(
        block, seconds=sum(row.seconds for row in rows) / steps, measured=True, kernels=tuple(kernels),
        layer_seconds=tuple(row.seconds / steps for row in layers) if one_by_one else (),
    )  # fmt: skip


def _compiled_kernels(instructions: Mapping[str, Instruction]) -> dict[str, list[KernelEntry]]:
    """Return the kernels of each block of a compiled program that did not run."""
    kernels: dict[str, list[KernelEntry]] = defaultdict(list)
    for name, instruction in instructions.items():
        if instruction.has_kernel:
            entry = KernelEntry(name, instruction.opcode, instruction.primitive)
            kernels[without_layer_numbers(instruction.path)].append(entry)
    return kernels
