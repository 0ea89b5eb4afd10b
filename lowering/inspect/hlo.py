"""What XLA's text of a compiled program says: the block of each instruction, and what is sent between devices.

The interpreter runs every op inside `jax.named_scope(block path)`, and XLA keeps the scopes of an instruction in its
`op_name`: `jit(function)/layers.3.mlp/layers.3.mlp.up_proj/dot_general`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlx_jax.ir.graph import Graph, Leaf
from rlx_jax.ir.paths import bind_path, path_text

# Instructions that run others: their time is that of the ones inside.
CONTAINERS = frozenset({"while", "conditional", "call"})

# Scopes around what a loop that generates does beside its program: choose tokens, and propose drafts, which may run a
# program of its own.
SAMPLER, DRAFTING = "sampler", "draft"

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"(?:calls|called_computations)=\{?%?([^\s,}]+)")
_NUMBER = re.compile(r"(?<![^.])(?:\d+|\{i\})(?![^.])")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its `opcode`, the JAX primitive that it is of (empty if XLA added it), and the path of its block
    (empty if it has none; `layers.*` for layers that are one loop)."""

    opcode: str
    primitive: str = ""
    path: str = ""


def together(path: str) -> str:
    """A path with `*` in place of the numbers of layers: `layers.*.mlp`."""
    return _NUMBER.sub("*", path)


def block_paths(graph: Graph) -> frozenset[str]:
    """The scopes of a program's blocks, of layers both as one loop, `layers.{i}.up`, and one by one. What has no block
    has the program's name."""
    return frozenset({graph.name, *_paths(graph, (None,))})


def _paths(graph: Graph, iterations: Iterable[int | None]) -> Iterator[str]:
    for node in graph.nodes:
        if node.origin.path and not isinstance(node.op, Leaf):  # nothing runs for a leaf
            yield from (path_text(bind_path(node.origin.path, i)) for i in iterations)
        for region in node.op.regions():
            yield from _paths(region, (None, *range(node.op.iterations())))


def instructions(hlo: str, paths: frozenset[str]) -> dict[str, Instruction]:
    """Every instruction of an HLO text by its name, each with its block: one of `paths`, by the innermost scope.

    A fusion is of the block that its last op is of; where that has none, of the first block inside.
    """
    made: dict[str, Instruction] = {}
    inside: dict[str, list[str]] = {}
    calls: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif found := _INSTRUCTION.match(line):
            name, opcode = found.groups()
            *scopes, primitive = named[1].split("/") if (named := _OP_NAME.search(line)) else [""]
            made[name] = Instruction(opcode, primitive, _path(scopes, paths))
            if called := _CALLS.search(line):
                calls[name] = called[1]
            inside.setdefault(computation, []).append(name)
    return {name: _placed(name, made, inside, calls) for name in made}


def _path(scopes: list[str], paths: frozenset[str]) -> str:
    """The innermost block among the scopes of an instruction, `draft.` before it if it is of a draft's program."""
    known = [scope for scope in scopes if scope in paths or scope == SAMPLER]
    inner = known[-1:] if DRAFTING not in scopes else [DRAFTING, *known[-1:]]
    return ".".join(inner).replace("{i}", "*")


def _placed(
    name: str, made: Mapping[str, Instruction], inside: Mapping[str, list[str]], calls: Mapping[str, str]
) -> Instruction:
    """An instruction with the block of what it calls, if it has none of its own."""
    own = made[name]
    if own.path or name not in calls:
        return own
    last_first = reversed(inside.get(calls[name], []))
    return next((Instruction(own.opcode, made[n].primitive, made[n].path) for n in last_first if made[n].path), own)


def kernel_name(instruction: str) -> str:
    """What XLA calls the kernel of an instruction."""
    return re.sub(r"\W", "_", instruction)


def module_id(proto: bytes) -> int:
    """The number of a compiled program in traces, from its serialised `HloModuleProto`: field 5, 0 where it is left
    out. No Python name gives it."""
    return next((value for field, value in _numbers(proto) if field == 5), 0)


def _numbers(message: bytes) -> Iterator[tuple[int, int]]:
    """The whole numbers among a protobuf message's fields; see protobuf.dev, "Encoding"."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif kind == 2:
            length, at = _varint(message, at)
            at += length
        else:
            at += 8 if kind == 1 else 4


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_LINE = re.compile(rf"^\s*(?:ROOT )?%?\S+ = .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(")


def collectives(hlo: str) -> dict[str, int]:
    """How many of each kind stand in an HLO text. One that sends several arrays counts once; one in a loop does, too,
    however often it runs."""
    return dict(Counter(found[1] for line in hlo.splitlines() if (found := _LINE.match(line))))
