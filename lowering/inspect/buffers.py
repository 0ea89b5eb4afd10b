"""Liveness and buffer plan of a MIR program, for reports, dumps and the donation check; and the text dump of LIR.

XLA allocates memory, so programs do not depend on this plan. Inputs, parameters, constants and state are arguments that
live during the full program, so the arena contains computed values only. The nodes of a region share one workspace,
which all iterations reuse.

Values with symbolic sizes have no slot until the program is specialized.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import Graph, Input, Leaf, Mir, Node, Param, StateRead, Value
from rlx_jax.ir.operands import zero
from rlx_jax.ir.param import Stack, printed_name
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.queries import dynamic_symbols
from rlx_jax.ir.serial import closure_digest, encode, encode_graph
from rlx_jax.ir.text import dump_graph, format_bytes, number_runs
from rlx_jax.lowering.lir.plan import XLA_CHOICE, Lir

ALIGNMENT = 64
PHASES = ("prologue", "steady", "epilogue")
Workspace = Callable[[Graph, Node], int]


@dataclass(frozen=True)
class View:
    """A value that shares memory with another: it begins `byte_offset` bytes after the beginning of `root`."""

    root: Value
    byte_offset: int


@dataclass(frozen=True)
class Lifetime:
    """Lifetime of a buffer.

    Attributes:
        value: the value; for a workspace, the first result of its node.
        size: bytes.
        born: the step, a node number, that computes it.
        dies: the last step that reads it.
        workspace: whether the buffer is the workspace of a node's regions.
    """

    value: Value
    size: int
    born: int
    dies: int
    workspace: bool = False

    def overlaps(self, other: Lifetime) -> bool:
        """Return whether two buffers are live at the same step."""
        return self.born <= other.dies and other.born <= self.dies


@dataclass(frozen=True)
class Slot:
    """Position of a buffer in the arena, in bytes."""

    offset: int
    life: Lifetime


@dataclass(frozen=True)
class BufferPlan:
    """Buffer plan of one program.

    Attributes:
        arena_size: bytes of the arena.
        slots: the buffers, sorted by offset.
        views: the values that share memory with another one.
        phases: the phase of each node: `prologue` for leaves, `epilogue` after the last contraction, else `steady`.
        io: the values of inputs, parameters and outputs, each with its name.
        dynamic_symbols: the symbols without a size.
        alignment: alignment of offsets in bytes.
    """

    arena_size: int
    slots: tuple[Slot, ...]
    views: Mapping[Value, View]
    phases: tuple[str, ...]
    io: Mapping[str, tuple[tuple[str, Value], ...]]
    dynamic_symbols: tuple[str, ...]
    alignment: int

    @property
    def total_unshared_bytes(self) -> int:
        """Return the bytes of all buffers without sharing. A view takes none."""
        return sum(slot.life.size for slot in self.slots)

    @property
    def bytes_saved(self) -> int:
        """Return the bytes that sharing saves."""
        return max(0, self.total_unshared_bytes - self.arena_size)

    def slot(self, value: Value) -> Slot | None:
        """Return the slot of a value; None for leaves, views and symbolic sizes."""
        return next((s for s in self.slots if s.life.value == value and not s.life.workspace), None)

    def nodes_in_phase(self, phase: str) -> tuple[int, ...]:
        """Return the numbers of the nodes in a phase: `prologue`, `steady` or `epilogue`."""
        return tuple(number for number, name in enumerate(self.phases) if name == phase)


def plan_buffers(graph: Graph, in_place: bool = True, scan: bool = False, alignment: int = ALIGNMENT) -> BufferPlan:
    """Compute the buffer plan of a MIR graph.

    Args:
        graph: the graph.
        in_place: whether caches are updated in place, as with a donated state.
        scan: whether regions run under `lax.scan`, which copies one layer's parameters from the stacked ones.
        alignment: the multiple of bytes that buffers begin at.
    """
    value_views = views(graph, in_place)
    slots = assign_slots(buffer_lifetimes(graph, value_views, in_place, scan), alignment)
    leaves = [(n.op, Value(i)) for i, n in enumerate(graph.nodes) if isinstance(n.op, Leaf)]
    return BufferPlan(
        arena_size=max((s.offset + s.life.size for s in slots), default=0),
        slots=tuple(sorted(slots, key=lambda s: (s.offset, s.life.born, s.life.value.node, s.life.value.index))),
        views=value_views,
        phases=_phases(graph),
        io={
            "inputs": tuple((op.input, v) for op, v in leaves if isinstance(op, Input)),
            "params": tuple((printed_name(Stack(op.programs)), v) for op, v in leaves if isinstance(op, Param)),
            "outputs": tuple(zip(graph.output_names, graph.outputs, strict=False)),
        },
        dynamic_symbols=dynamic_symbols(graph),
        alignment=alignment,
    )


def views(graph: Graph, in_place: bool = True) -> dict[Value, View]:
    """Return the values that share memory with another value, each with the root of its chain of views."""
    result: dict[Value, View] = {}
    for number, node in enumerate(graph.nodes):
        for index, source, offset in _view(graph, node, in_place):
            base = result.get(source, View(source, 0))
            result[Value(number, index)] = View(base.root, base.byte_offset + offset)
    return result


def _view(graph: Graph, node: Node, in_place: bool) -> list[tuple[int, Value, int]]:
    """Return (result index, operand, byte offset) for those results of a node that are views of an operand."""
    if not isinstance(node.op, Mir):
        return []
    offset = node.op.traits.view(node.op, [graph.type(v) for v in node.inputs], node.types)
    if offset is not None:
        return [(0, node.inputs[0], offset)]
    pairs = node.op.traits.writes if in_place else ()
    in_place_writes = ((result, node.inputs[operand]) for result, operand in pairs if operand < len(node.inputs))
    return [
        (result, value, 0) for result, value in in_place_writes if isinstance(graph.nodes[value.node].op, StateRead)
    ]


def buffer_lifetimes(
    graph: Graph, value_views: Mapping[Value, View], in_place: bool = True, scan: bool = False,
    fused_workspace: Workspace | None = None,
) -> list[Lifetime]:  # fmt: skip
    """Return the lifetimes of computed values with static size. Views extend the lifetime of their root.

    Args:
        graph: the graph.
        value_views: its views.
        in_place, scan: as in `plan_buffers`.
        fused_workspace: None if each op writes its results to memory. If XLA fuses elementwise ops and moves into the
            ops that read their results: the function from a graph and its node to the bytes that the node needs while
            it runs.
    """
    fused, end = fused_workspace is not None, len(graph.nodes)
    readers = [node.inputs for node in graph.nodes if not _fuses(node)]
    read_values = itertools.chain(*readers, graph.roots())
    stored = {value_views[v].root if v in value_views else v for v in read_values}
    sources: dict[Value, frozenset[Value]] = {}  # the values in memory that must be live while a value is read
    last_uses: dict[Value, int] = {}
    lives = []
    for number, node in enumerate(graph.nodes):
        operands = frozenset[Value]().union(*(sources[v] for v in node.inputs))
        last_uses.update(dict.fromkeys(operands, number))
        for index in range(len(node.types)):
            value = Value(number, index)
            if value in value_views:
                sources[value] = sources.get(value_views[value].root, frozenset())
            elif isinstance(node.op, Leaf) or (fused and _fuses(node) and value not in stored):
                sources[value] = operands
            else:
                sources[value] = frozenset({value})
        peaks = (activation_bytes(region, in_place, scan, fused_workspace) for region in node.op.regions())
        inner = sum(peaks) + (sum(map(_sliced_bytes, node.op.regions())) if scan else 0)
        if inner := inner + (0 if fused_workspace is None else fused_workspace(graph, node)):
            lives.append(Lifetime(Value(number), inner, number, number, workspace=True))
    for value in itertools.chain(*(sources[v] for v in graph.roots())):
        last_uses[value] = end
    for value in (value for value, own in sources.items() if own == {value} and graph.type(value).is_static):
        # With fusion the results of a region are live at its end, where its own peak counts them.
        born = value.node + (fused and bool(graph.nodes[value.node].op.regions()))
        lives.append(Lifetime(value, graph.type(value).nbytes, born, max(born, last_uses.get(value, 0))))
    return lives


def _sliced_bytes(region: Graph) -> int:
    """Return the bytes of one layer's parameters that differ between layers."""
    return sum(p.type.nbytes for p in region.params() if len(p.programs) > 1)


def assign_slots(lives: list[Lifetime], alignment: int = ALIGNMENT) -> list[Slot]:
    """Assign offsets greedily: largest buffer first, each at the lowest aligned offset that is free in its lifetime."""
    slots: list[Slot] = []
    for life in sorted(lives, key=lambda life: (-life.size, life.born, life.value.node, life.value.index)):
        occupied = sorted((s.offset, s.offset + s.life.size) for s in slots if s.life.overlaps(life))
        offset = 0
        for start, stop in occupied:
            if offset + life.size <= start:
                break
            offset = max(offset, math.ceil(stop / alignment) * alignment)
        slots.append(Slot(offset, life))
    return slots


def activation_bytes(
    graph: Graph, in_place: bool = True, scan: bool = False, fused_workspace: Workspace | None = None
) -> int:
    """Return the peak bytes of computed values that are live at the same step; arguments as in `buffer_lifetimes`."""
    change = [0] * (len(graph.nodes) + 2)
    for life in buffer_lifetimes(graph, views(graph, in_place), in_place, scan, fused_workspace):
        change[life.born] += life.size
        change[life.dies + 1] -= life.size
    return max(itertools.accumulate(change))


def peak_blocks(graph: Graph, in_place: bool = True, scan: bool = False) -> dict[str, int]:
    """Return the bytes of computed values that are live at the peak, by block path; for a region at its peak.

    Arguments are as in `plan_buffers`.
    """
    lives = buffer_lifetimes(graph, views(graph, in_place), in_place, scan)
    bytes_at = Counter({s: sum(x.size for x in lives if x.born <= s <= x.dies) for s in {x.born for x in lives}})
    sizes: Counter[str] = Counter()
    for step, _ in bytes_at.most_common(1):
        for life in (life for life in lives if life.born <= step <= life.dies):
            node = graph.nodes[life.value.node]
            if life.workspace:
                for region in node.op.regions():
                    sizes.update(peak_blocks(region, in_place, scan))
            else:
                sizes[path_text(node.origin.path) or node.op.text()] += life.size
    return sizes


def _fuses(node: Node) -> bool:
    """Return whether XLA fuses an op into those that read its results."""
    return isinstance(node.op, Leaf) or (
        isinstance(node.op, Mir) and node.op.traits.numeric in ("elementwise", "movement") and not node.op.regions()
    )


def _phases(graph: Graph) -> tuple[str, ...]:
    """Return the phase of each node."""
    heavy = [i for i, n in enumerate(graph.nodes) if n.op.regions() or _contracts(n)]
    last_heavy = heavy[-1] if heavy else len(graph.nodes)
    return tuple(
        "prologue" if isinstance(n.op, Leaf) else "epilogue" if i > last_heavy else "steady"
        for i, n in enumerate(graph.nodes)
    )


def _contracts(node: Node) -> bool:
    """Return whether a node is a contraction, the only kind of op with a count of FLOPs."""
    return isinstance(node.op, Mir) and node.op.traits.flops is not zero


def fingerprint(lir: Lir) -> str:
    """Return 16 hex digits of a hash over the program: ops, attributes, constants, types and plan."""
    content = {"plan": encode(lir.plan), "graph": encode_graph(lir.planned_graph, closure_digest)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def dump_lir(lir: Lir) -> str:
    """Return the text of a planned program, in this form:

    lir @name {
      fingerprint: 16 hex digits
      arena: … (… saved, … naive, align 64)
      …
    --- mir ---
    graph @name …
    }
    """
    buffers = plan_buffers(lir.planned_graph, lir.plan.donate_state, lir.plan.scan)
    saved, naive = format_bytes(buffers.bytes_saved), format_bytes(buffers.total_unshared_bytes)
    lines = [
        f"lir @{lir.graph.name} {{",
        f"  fingerprint: {fingerprint(lir)}",
        f"  {lir.plan.text()}",
        *(f"  attention {line}" for line in lir.attention()),
        *(f"  products {line}" for line in lir.products() if str(XLA_CHOICE) not in line),
        *(f"  experts {line}" for line in lir.experts()),
        *(f"  recurrence {line}" for line in lir.recurrences()),
        f"  arena: {format_bytes(buffers.arena_size)} ({saved} saved, {naive} naive, align {buffers.alignment})",
        f"  schedule: {len(lir.planned_graph.nodes)} nodes, {len(buffers.views)} views",
        f"  dynamic symbols: {', '.join(buffers.dynamic_symbols) or 'none'}",
        *_table(buffers),
        *(f"  {phase}: {_numbers(buffers.nodes_in_phase(phase))}" for phase in PHASES),
        *(f"  {name}: {_named(pairs)}" for name, pairs in buffers.io.items()),
        "--- mir ---",
        dump_graph(lir.planned_graph),
        "}",
    ]
    return "\n".join(lines)


def _table(buffers: BufferPlan) -> Iterator[str]:
    """Yield a line for each slot by offset, then for each view."""
    yield f"  {'# offset':>10} {'size':>10}  node"
    for slot in buffers.slots:
        life = slot.life
        label = f"{_name(life.value)}{' workspace' if life.workspace else ''}"
        steps = f"steps {life.born}–{life.dies}, {buffers.phases[life.value.node]}"
        yield f"  {slot.offset:>10} {life.size:>10}  {label}  ({steps})"
    for value, view in buffers.views.items():
        yield f"  {'view':>10} {'':>10}  {_name(value)} = {_name(view.root)} + {view.byte_offset}"


def _named(pairs: tuple[tuple[str, Value], ...]) -> str:
    return ", ".join(f"{name} = {_name(value)}" for name, value in pairs) or "none"


def _name(value: Value) -> str:
    return f"%{value.node}" + (f".{value.index}" if value.index else "")


def _numbers(numbers: tuple[int, ...]) -> str:
    """Return node numbers as ranges, such as `%0–%3, %7`."""
    return ", ".join(f"%{a}" if a == b else f"%{a}–%{b}" for a, b in number_runs(numbers)) or "none"
