"""The dump of LIR: a MIR program with its plan, its buffers and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from rlx_jax.ir.graph import Value
from rlx_jax.ir.serial import closure_digest, encode, encode_graph
from rlx_jax.ir.text import bytes_text, dump_graph
from rlx_jax.lowering.inspect.buffers import PHASES, BufferPlan, plan_buffers
from rlx_jax.lowering.lir.plan import XLA, Lir


def fingerprint(lir: Lir) -> str:
    """16 hex digits of a hash over everything that the program is: ops, attributes, constants, types, plan."""
    content = {"plan": encode(lir.plan), "graph": encode_graph(lir.graph, closure_digest)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def dump_lir(lir: Lir) -> str:
    """The text of a planned program.

    lir @name {
      fingerprint: 16 hex digits
      arena: … (… saved, … naive, align 64)
      …
    --- mir ---
    graph @name …
    }
    """
    buffers = plan_buffers(lir.graph, lir.plan.donate_state, lir.plan.scan)
    saved, naive = bytes_text(buffers.bytes_saved), bytes_text(buffers.total_unshared_bytes)
    lines = [
        f"lir @{lir.graph.name} {{",
        f"  fingerprint: {fingerprint(lir)}",
        f"  {lir.plan.text()}",
        *(f"  attention {line}" for line in lir.attention()),
        *(f"  products {line}" for line in lir.products() if str(XLA) not in line),
        *(f"  experts {line}" for line in lir.experts()),
        *(f"  recurrence {line}" for line in lir.recurrences()),
        f"  arena: {bytes_text(buffers.arena_size)} ({saved} saved, {naive} naive, align {buffers.alignment})",
        f"  schedule: {len(lir.graph.nodes)} nodes, {len(buffers.views)} views",
        f"  dynamic symbols: {', '.join(buffers.dynamic_symbols) or 'none'}",
        *_table(buffers),
        *(f"  {phase}: {_numbers(buffers.nodes_in_phase(phase))}" for phase in PHASES),
        *(f"  {name}: {_named(pairs)}" for name, pairs in _io(buffers).items()),
        "--- mir ---",
        dump_graph(lir.graph),
        "}",
    ]
    return "\n".join(lines)


def _table(buffers: BufferPlan) -> Iterator[str]:
    """Slots by offset, then views by what they are part of."""
    yield f"  {'# offset':>10} {'size':>10}  node"
    for slot in buffers.slots:
        life = slot.life
        what = f"{_name(life.value)}{' workspace' if life.workspace else ''}"
        steps = f"steps {life.born}–{life.dies}, {buffers.phases[life.value.node]}"
        yield f"  {slot.offset:>10} {life.size:>10}  {what}  ({steps})"
    for value, view in buffers.views.items():
        yield f"  {'view':>10} {'':>10}  {_name(value)} = {_name(view.root)} + {view.byte_offset}"


def _io(buffers: BufferPlan) -> dict[str, tuple[tuple[str, Value], ...]]:
    return {"inputs": buffers.inputs, "params": buffers.params, "outputs": buffers.outputs}


def _named(pairs: tuple[tuple[str, Value], ...]) -> str:
    return ", ".join(f"{name} = {_name(value)}" for name, value in pairs) or "none"


def _name(value: Value) -> str:
    return f"%{value.node}" + (f".{value.index}" if value.index else "")


def _numbers(numbers: tuple[int, ...]) -> str:
    """`%0–%3, %7`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"%{a}" if a == b else f"%{a}–%{b}" for a, b in runs) or "none"
