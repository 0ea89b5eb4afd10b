"""Check that a compiled program takes no more memory than planned, and updates its state in place.

Aliased bytes alone prove little: a scan that copies the full cache aliases it too, and a change of dtype silently
disables donation. So three properties of the compiled program are checked: the number of aliased bytes, copies of a
cache, and the bytes of temporaries against an estimate; of a program without a state only the last one. A program that
fails a check computes correct results with more memory or time, so a failure is a warning; `donation.strict` makes it
an error.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RlxWarning
from rlx_jax.ir.graph import Graph, Mir, Param, StateRead
from rlx_jax.ir.ops.cache import RingStep
from rlx_jax.ir.ops.custom import is_exported
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.lowering.inspect.buffers import activation_bytes, peak_blocks
from rlx_jax.lowering.inspect.outline import cost
from rlx_jax.lowering.lir.lanes import lanes_bytes
from rlx_jax.lowering.lir.packed import decoding_bytes
from rlx_jax.lowering.lir.plan import Lir, state_types
from rlx_jax.lowering.sharding import shard_type

SLACK_BYTES = 2**16  # alignment and small constants
MIN_CACHE_BYTES = 2**16  # size of a cache from which its copies are reported
CUDA_SCRATCH_BYTES = 2**26  # cuBLAS's workspace, and partial sums of products that XLA splits along the contraction


COPIED_ADVICE = (
    "nothing may read the old state once the new one is written, nor change its dtype; where no block of yours does, "
    "it is XLA's choice, and results are the same"
)
TEMPORARIES_ADVICE = "if memory is short, use fewer rows or shorter chunks, or compile with layers.roll = 'unroll'"
UNCHECKED_ADVICE = "; donation.state = false in the profile leaves this unchecked"
# Programs without a state have more ops that XLA gives scratch memory, such as convolutions and sorts.
STATELESS_FACTOR = 2
# The number of blocks of the plan in a message about temporaries.
NUM_BLOCKS = 3


@dataclass(frozen=True)
class DonationProof:
    """Measurements of a compiled program's state updates.

    Attributes:
        state_bytes: bytes of the state.
        aliased_bytes: bytes of outputs that alias donated inputs.
        temp_bytes: bytes of temporaries.
        temp_limit: the estimated maximum of `temp_bytes`.
        copies: HLO instructions that copy a cache.
        changed: descriptions of state leaves that are written in another shape or dtype.
        largest: description of the largest temporary, if there are more temporaries than estimated.
        blocks: the block paths whose values take most of the planned peak, with their bytes.
    """

    state_bytes: int
    aliased_bytes: int
    temp_bytes: int
    temp_limit: int
    copies: tuple[str, ...]
    changed: tuple[str, ...] = ()
    largest: str = ""
    blocks: tuple[tuple[str, int], ...] = ()

    def extra_bytes(self) -> int:
        """Return the bytes beyond the plan: state without an alias, copies, and surplus temporaries."""
        missing = max(0, self.state_bytes - self.aliased_bytes)
        # Copies of a cache are temporaries too, so they are not counted twice.
        return missing + max(sum(map(result_bytes, self.copies)), self.temp_bytes - self.temp_limit)

    def problem(self) -> str:
        """Return what is wrong, its bytes and what a user may do; empty if the state is updated in place."""
        state_problem, temporaries_problem = self.state_problem(), self.temporaries_problem()
        problems = [f"the state is not updated in place: {state_problem}; {COPIED_ADVICE}"] if state_problem else []
        advice = TEMPORARIES_ADVICE + (UNCHECKED_ADVICE if self.state_bytes else "")
        problems += [f"{temporaries_problem}; {advice}"] if temporaries_problem else []
        return f"{self.extra_bytes()} bytes more than planned: {'; '.join(problems)}" if problems else ""

    def state_problem(self) -> str:
        """Return why the state is not updated in place; empty if it is."""
        problems = []
        if self.aliased_bytes < self.state_bytes:
            problems.append(f"{self.aliased_bytes} of {self.state_bytes} bytes of the state are aliased")
            problems += self.changed[:3]
        problems += [f"a whole cache is copied: {line}" for line in self.copies[:3]]
        return "; ".join(problems)

    def temporaries_problem(self) -> str:
        """Return a description of temporaries beyond the estimate; empty if there are none."""
        if self.temp_bytes <= self.temp_limit:
            return ""
        largest = f", the largest of them {self.largest}" if self.largest else ""
        planned = ", ".join(f"{path} ({nbytes})" for path, nbytes in self.blocks)
        planned = f"; at the planned peak most bytes are of {planned}" if planned else ""
        return f"{self.temp_bytes} bytes of temporaries, expected at most {self.temp_limit}{largest}{planned}"


def measure_donation(
    lir: Lir,
    compiled: jax.stages.Compiled,
    new_state: Mapping[str, Any],
    shardings: Mapping[str, NamedSharding],
    gathered_bytes: int = 0,
    companions: Mapping[str, Lir] | None = None,
) -> DonationProof:
    """Measure a compiled program that consumes its state, or that has none.

    Args:
        lir: the program.
        compiled: its compiled form.
        new_state: the state that it returns, or the shapes and dtypes.
        shardings: the sharding of each state leaf; with several devices all sizes are per device. Only the estimate of
            temporaries still assumes the full program on one device.
        gathered_bytes: bytes of sharded parameters that are gathered for computation; temporaries may take them too.
        companions: companion programs in the same compiled loop, by the prefix of their state names.
    """
    programs = {"": lir, **(companions or {})}
    types = {start + n: t for start, p in programs.items() for n, t in state_types(p.graph, p.plan.scan).items()}
    shards = {name: shard_type(t, shardings.get(name)) for name, t in types.items()}
    memory: Any = compiled.memory_analysis()
    computed = {t for p in programs.values() for t in (*computed_types(p.graph), *copied_types(p.graph))}
    temp_limit = sum(map(temporary_bytes, programs.values())) * (1 if types else STATELESS_FACTOR) + gathered_bytes
    exceeds = memory.temp_size_in_bytes > temp_limit
    text = (compiled.as_text() or "") if types or exceeds else ""  # the text of a large program takes a while
    blocks = peak_blocks(lir.graph, False, lir.plan.scan) if exceeds else {}
    return DonationProof(
        state_bytes=sum(t.nbytes for t in shards.values()),
        aliased_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        temp_limit=temp_limit,
        copies=tuple(cache_copies(text, set(shards.values()) - computed)),
        changed=tuple(
            f"{k} is read as {t} and written as {new_type}"
            for k, t in types.items()
            if k in new_state and (new_type := TensorType(tuple(new_state[k].shape), np.dtype(new_state[k].dtype))) != t
        ),
        largest=largest_result(text) if exceeds else "",
        blocks=tuple(sorted(blocks.items(), key=lambda block: -block[1])[:NUM_BLOCKS]),
    )


def temporary_bytes(lir: Lir) -> int:
    """Return the estimated maximum of temporaries, in bytes, of a program and of a loop around it."""
    if is_exported(lir.graph):  # its values inside are not known, so there is no estimate to compare with
        return sys.maxsize
    types, layers = state_types(lir.graph, lir.plan.scan), state_types(lir.graph, False)
    largest = max((t.nbytes for t in layers.values()), default=0)
    # XLA:CPU computes 16-bit values in f32, activations too, and widens a full cache to read it.
    narrow = [t.nbytes for t in types.values() if t.dtype.itemsize == 2] if lir.plan.target == "cpu" else []
    slack = SLACK_BYTES + (CUDA_SCRATCH_BYTES if lir.plan.target == "cuda" else 0)
    outputs = sum(t.nbytes for t in lir.graph.output_types)
    casts = cast_parameter_bytes(lir.graph, lir.plan.target)
    activations = activation_bytes(lir.graph, in_place=False, scan=lir.plan.scan) * (2 if narrow else 1)
    scratch = cost(lir.graph).workspace
    # 2 · largest: a layer's keys and values while they are written, and XLA:CPU's copy of them from a scan's carry.
    # 8 · outputs: values that a loop around the program computes from its outputs, such as sorted logits.
    params = (program for param in lir.graph.params() for program in param.programs if packing_of(program) is not None)
    decoding = 2 * max((decoding_bytes(p, lir.plan.target) for p in params), default=0) if lir.plan.packed else 0
    calls = [(call, choice.implementation) for call, choice in lir.plan.choices.items()]
    sums = 2 * max((lanes_bytes(x, w) for (_, (x, w, *_)), name in calls if name == "lanes"), default=0)
    if lir.plan.target == "cpu":  # XLA writes the products of a row before it sums them, if the row has several readers
        sums += max((4 * w.size for (_, (_, w, *_)), name in calls if name == "row"), default=0)
    return activations + scratch + 2 * largest + 2 * sum(narrow) + 8 * outputs + casts + decoding + sums + slack


def computed_types(graph: Graph) -> set[TensorType]:
    """Return the types of all values except the state. A copy of such a type is not necessarily a copy of a cache."""

    ops = ((node, node.op) for _, node in graph.walk() if not isinstance(node.op, StateRead))
    return {t for node, op in ops if not (isinstance(op, Mir) and op.traits.numeric == "state") for t in node.types}


def copied_types(graph: Graph) -> set[TensorType]:
    """Return the types of ring buffers that are read in their old state while they are written.

    XLA copies these in any order of the two operations.
    """
    steps = ((inner, node) for inner, node in graph.walk() if isinstance(node.op, RingStep))
    rings = ((inner.type(node.inputs[0]), node.types[0]) for inner, node in steps)
    return {ring for ring, keys in rings if ring != keys}


# Names of dtypes in HLO, where they are not those of this package.
HLO_NAMES = {"i8": "s8", "f8_e4m3": "f8e4m3fn"}
_RESULT = re.compile(r"^(?:ROOT )?%\S+ = ([a-z]+?)(\d+)(?:e\w+)?\[([\d,]+)\]\S* ([\w-]+)\(")
# Instructions without a buffer of their own.
_NO_BUFFER = ("parameter", "bitcast", "get-tuple-element", "constant", "while", "conditional", "call", "copy-done")


def result_bytes(line: str) -> int:
    """Return the bytes of the array that a line of HLO computes; 0 if it computes none."""
    match = _RESULT.match(line)
    return int(match[2]) // 8 * math.prod(map(int, match[3].split(","))) if match else 0


def largest_result(hlo: str) -> str:
    """Return the largest array that an HLO text computes, with the path of its stage in the flow."""
    max_size, description, in_fusion = 0, "", False
    for line in map(str.strip, hlo.splitlines()):
        if line.endswith("{"):
            in_fusion = line.startswith(("%fused", "%wrapped"))  # values inside a fusion have no buffer
        match = None if in_fusion else _RESULT.match(line)
        if match is None or match[4] in _NO_BUFFER:
            continue
        size = result_bytes(line)
        if size > max_size:
            place = re.search(r'op_name="[^"/]*/([^"]*)"', line)
            max_size, description = size, f"{match[1]}{match[2]}[{match[3]}]" + (f" at {place[1]}" if place else "")
    return description


def cast_parameter_bytes(graph: Graph, target: str) -> int:
    """Return the bytes of parameters that are cast from their stored dtype; all may be live at once.

    XLA:CPU computes 16-bit values in f32. A tied table is widened for its rows and, in another layout, for its product:
    two arrays of each dtype.
    """
    sizes: dict[tuple[Param, np.dtype[Any]], int] = {}
    for inner, node in graph.walk():
        for value in node.inputs:
            op = inner.nodes[value.node].op
            if isinstance(op, Param):
                dtype = node.op.dtype if isinstance(node.op, CastTo) else op.type.dtype
                size = op.type.size * len(set(op.programs))
                cast = size * dtype.itemsize if dtype != op.type.dtype else 0
                is_widened = target == "cpu" and dtype.itemsize == 2
                sizes[op, dtype] = 2 * (dtype.itemsize + 4) * size if is_widened else cast
    return sum(sizes.values())


def reusable_inputs(graph: Graph, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named inputs that can share memory with an output of the same shape and dtype, one output for each.

    The others are not donated, with a warning, because consuming them would save nothing.
    """
    available = Counter(graph.output_types)
    reusable = []
    for i in graph.inputs:
        if i.input not in names:
            continue
        if available[i.type]:
            available[i.type] -= 1
            reusable.append(i.input)
        else:
            warnings.warn(
                f"{graph.name}: donation.inputs names {i.input!r}, which has no effect: no output is {i.type}",
                RlxWarning,
                stacklevel=2,
            )
    return tuple(reusable)


def cache_copies(hlo: str, types: set[TensorType]) -> list[str]:
    """Return the instructions of an HLO text that copy an array with the shape and dtype of a cache."""
    caches = [t for t in types if t.rank > 2 and t.nbytes > MIN_CACHE_BYTES]
    names = (HLO_NAMES.get(name := short_name(t.dtype), name) for t in caches)
    shapes = {f"{name}[{','.join(map(str, t.shape))}]" for name, t in zip(names, caches, strict=True)}
    lines = (line.strip() for line in hlo.splitlines())
    return [x[:120] for x in lines if (m := re.search(r"= (\w+\[[\d,]*\])\S* copy\(", x)) and m.group(1) in shapes]
