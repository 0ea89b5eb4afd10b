"""Proof that a program updates its state in place.

Aliased bytes alone prove little: a scan that copies the whole cache aliases it too, and a dtype drift donates
nothing without a word. So three things are checked on the compiled program: bytes that are aliased, copies of a cache,
and bytes of temporaries against an estimate. A program that fails a check gives right results and takes more memory or
time, so that it is a warning; `donation.strict` makes it an error.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlx_jax.errors import RlxWarning
from rlx_jax.ir.graph import Graph, Mir, Param, StateRead
from rlx_jax.ir.ops.attention import RingStep
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.lowering.inspect.outline import cost
from rlx_jax.lowering.lir.plan import Lir, state_types
from rlx_jax.lowering.sharding import on_one

SLACK = 2**16  # bytes: alignment and small constants
LEAST_CACHE = 2**16  # bytes of a cache from which a copy is reported
CUDA_SCRATCH = 2**26  # bytes: cuBLAS's own memory, and partial sums of products that XLA cuts along the contraction


COPIED_ADVICE = (
    "nothing may read the old state once the new one is written, nor change its dtype; where no block of yours does, "
    "it is XLA's choice, and results are the same"
)
TEMPORARIES_ADVICE = (
    "if memory is short, use fewer rows or shorter chunks, or compile with layers.roll = 'unroll'; donation.state = "
    "false in the profile leaves this unchecked"
)


@dataclass(frozen=True)
class DonationProof:
    """What the compiled program does with its state. Sizes in bytes."""

    state_bytes: int
    aliased_bytes: int
    temp_bytes: int
    temp_limit: int
    copies: tuple[str, ...]
    changed: tuple[str, ...] = ()
    largest: str = ""

    def extra_bytes(self) -> int:
        """Return the bytes that the program takes more than its plan: state without an alias, copies, temporaries."""
        missing = max(0, self.state_bytes - self.aliased_bytes)
        # A copy of a cache is one of the temporaries.
        return missing + max(sum(map(result_bytes, self.copies)), self.temp_bytes - self.temp_limit)

    def problem(self) -> str:
        """Return what is wrong, its bytes and what a user may do; empty if the state is updated in place."""
        broken, surplus = self.broken(), self.surplus()
        problems = [f"the state is not updated in place: {broken}; {COPIED_ADVICE}"] if broken else []
        problems += [f"{surplus}; {TEMPORARIES_ADVICE}"] if surplus else []
        return f"{self.extra_bytes()} bytes more than planned: {'; '.join(problems)}" if problems else ""

    def broken(self) -> str:
        """Why the state is not updated in place; empty if it is."""
        found = []
        if self.aliased_bytes < self.state_bytes:
            found.append(f"{self.aliased_bytes} of {self.state_bytes} bytes of the state are aliased")
            found += self.changed[:3]
        found += [f"a whole cache is copied: {line}" for line in self.copies[:3]]
        return "; ".join(found)

    def surplus(self) -> str:
        """What XLA needs beside the state that was not expected; empty if nothing."""
        if self.temp_bytes <= self.temp_limit:
            return ""
        largest = f", the largest of them {self.largest}" if self.largest else ""
        return f"{self.temp_bytes} bytes of temporaries, expected at most {self.temp_limit}{largest}"


def examine(
    lir: Lir,
    compiled: jax.stages.Compiled,
    after: Mapping[str, Any],
    shardings: Mapping[str, NamedSharding],
    gathered: int = 0,
    beside: Mapping[str, Lir] | None = None,
) -> DonationProof:
    """Measure a compiled program that was given its state to consume; `after` has the state that it returns, or its
    shapes and dtypes. On several devices `shardings` say which part of the state is on each, and sizes are of one;
    beside the state it is allowed what the whole program would be on one device, and `gathered`, the bytes of
    parameters that devices have parts of and bring together where they are used. `beside` are programs that run inside
    of a loop around it, by what the names of their states begin with."""
    programs = {"": lir, **(beside or {})}
    types = {start + n: t for start, one in programs.items() for n, t in state_types(one.graph, one.plan.scan).items()}
    held = {name: on_one(t, shardings.get(name)) for name, t in types.items()}
    memory: Any = compiled.memory_analysis()
    computed = {t for one in programs.values() for t in (*computed_types(one.graph), *copied_types(one.graph))}
    text = compiled.as_text() or ""
    return DonationProof(
        state_bytes=sum(t.nbytes for t in held.values()),
        aliased_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        temp_limit=sum(map(temporaries, programs.values())) + gathered,
        copies=tuple(cache_copies(text, set(held.values()) - computed)),
        changed=tuple(
            f"{k} is read as {t} and written as {got}"
            for k, t in types.items()
            if k in after and (got := TensorType(tuple(after[k].shape), np.dtype(after[k].dtype))) != t
        ),
        largest=largest_result(text),
    )


def temporaries(lir: Lir) -> int:
    """Bytes that a program may take beside its state, and a loop around it."""
    types, layers = state_types(lir.graph, lir.plan.scan), state_types(lir.graph, False)
    largest = max((t.nbytes for t in layers.values()), default=0)
    # XLA:CPU computes 16-bit values in f32, activations too, and widens a cache whole to read it.
    narrow = [t.nbytes for t in types.values() if t.dtype.itemsize == 2] if lir.plan.target == "cpu" else []
    slack = SLACK + (CUDA_SCRATCH if lir.plan.target == "cuda" else 0)
    outputs = sum(lir.graph.type(v).nbytes for v in lir.graph.outputs)
    casts = cast_parameters(lir.graph, lir.plan.target)
    activations = activation_bytes(lir.graph, in_place=False, scan=lir.plan.scan) * (2 if narrow else 1)
    scratch = cost(lir.graph).workspace
    # A layer's keys and values as they are written, and once more as XLA:CPU takes them out of a scan's carry; and
    # what a loop around the program makes of its outputs, such as sorted logits.
    return activations + scratch + 2 * largest + 2 * sum(narrow) + 8 * outputs + casts + slack


def computed_types(graph: Graph) -> set[TensorType]:
    """The types of what is computed beside the state: a copy of one of these may be none of a cache."""

    ops = ((node, node.op) for _, node in graph.walk() if not isinstance(node.op, StateRead))
    return {t for node, op in ops if not (isinstance(op, Mir) and op.traits.numeric == "state") for t in node.types}


def copied_types(graph: Graph) -> set[TensorType]:
    """The types of rings that are read as they were while they are written: XLA copies them, whatever comes first."""
    steps = ((inner, node) for inner, node in graph.walk() if isinstance(node.op, RingStep))
    rings = ((inner.type(node.inputs[0]), node.types[0]) for inner, node in steps)
    return {ring for ring, keys in rings if ring != keys}


_RESULT = re.compile(r"^(?:ROOT )?%\S+ = (\w+?)(\d+)\[([\d,]+)\]\S* ([\w-]+)\(")
_NO_ROOM = ("parameter", "bitcast", "get-tuple-element", "constant", "while", "conditional", "call", "copy-done")


def result_bytes(line: str) -> int:
    """Return the bytes of the array that a line of HLO computes; 0 if it computes none."""
    match = _RESULT.match(line)
    return int(match[2]) // 8 * math.prod(map(int, match[3].split(","))) if match else 0


def largest_result(hlo: str) -> str:
    """The largest array that an HLO text computes, with the place in the flow that asks for it."""
    best, told, fused = 0, "", False
    for line in map(str.strip, hlo.splitlines()):
        if line.endswith("{"):
            fused = line.startswith(("%fused", "%wrapped"))  # no room of its own
        found = None if fused else _RESULT.match(line)
        if found is None or found[4] in _NO_ROOM:
            continue
        size = result_bytes(line)
        if size > best:
            place = re.search(r'op_name="[^"/]*/([^"]*)"', line)
            best, told = size, f"{found[1]}{found[2]}[{found[3]}]" + (f" at {place[1]}" if place else "")
    return told


def cast_parameters(graph: Graph, target: str) -> int:
    """Bytes of parameters in another dtype than the stored one: as the program casts them, all at once at worst.

    XLA:CPU computes 16-bit values in f32. A tied table is widened for its rows and, in another layout, for its product:
    two arrays of each dtype.
    """
    found: dict[tuple[Param, np.dtype[Any]], int] = {}
    for inner, node in graph.walk():
        for value in node.inputs:
            op = inner.nodes[value.node].op
            if isinstance(op, Param):
                dtype = node.op.dtype if isinstance(node.op, CastTo) else op.type.dtype
                size = op.type.size * len(set(op.programs))
                cast = size * dtype.itemsize if dtype != op.type.dtype else 0
                widened = target == "cpu" and dtype.itemsize == 2
                found[op, dtype] = 2 * (dtype.itemsize + 4) * size if widened else cast
    return sum(found.values())


def reusable_inputs(graph: Graph, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the named inputs whose memory an output can take: of the same shape and dtype, one output each.

    The others are not donated, which is a warning: to consume them would save nothing.
    """
    free = Counter(graph.type(v) for v in graph.outputs)
    found = []
    for i in graph.inputs:
        if i.input not in names:
            continue
        if free[i.type]:
            free[i.type] -= 1
            found.append(i.input)
        else:
            warnings.warn(
                f"{graph.name}: donation.inputs names {i.input!r}, which has no effect: no output is {i.type}",
                RlxWarning,
                stacklevel=2,
            )
    return tuple(found)


def cache_copies(hlo: str, types: set[TensorType]) -> list[str]:
    """Instructions of an HLO text that copy an array of a cache's own shape and dtype."""
    caches = [t for t in types if t.rank > 2 and t.nbytes > LEAST_CACHE]
    shapes = {f"{short_name(t.dtype)}[{','.join(map(str, t.shape))}]" for t in caches}
    lines = (line.strip() for line in hlo.splitlines())
    return [x[:120] for x in lines if (m := re.search(r"= (\w+\[[\d,]*\])\S* copy\(", x)) and m.group(1) in shapes]
