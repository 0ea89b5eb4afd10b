"""Parser of the HLO text of compiled programs: the block of each instruction, and the collectives between devices.

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

# Instructions that run other instructions: their time is the sum over these.
CONTAINERS = frozenset({"while", "conditional", "call"})

# Scopes of a generation loop outside of its program: the sampler, and the proposal of draft tokens, which may run
# another program.
SAMPLER, DRAFTING = "sampler", "draft"

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"(?:calls|called_computations)=\{?%?([^\s,}]+)")
_NUMBER = re.compile(r"(?<![^.])(?:\d+|\{i\})(?![^.])")


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction.

    Attributes:
        opcode: the HLO opcode.
        primitive: the JAX primitive that it belongs to; empty if XLA added it.
        path: the path of its block, with `layers.*` for layers in a loop; empty if it has none.
    """

    opcode: str
    primitive: str = ""
    path: str = ""


def without_layer_numbers(path: str) -> str:
    """Return a path with layer numbers replaced by `*`: `layers.*.mlp`."""
    return _NUMBER.sub("*", path)


def block_paths(graph: Graph) -> frozenset[str]:
    """Return the scopes of a program's blocks.

    Repeated layers are included as a loop, `layers.{i}.up`, and one by one. The scope of nodes without a block is the
    program's name.
    """
    return frozenset({graph.name, *_paths(graph, (None,))})


def _paths(graph: Graph, iterations: Iterable[int | None]) -> Iterator[str]:
    for node in graph.nodes:
        if node.origin.path and not isinstance(node.op, Leaf):  # nothing runs for a leaf
            yield from (path_text(bind_path(node.origin.path, i)) for i in iterations)
        for region in node.op.regions():
            yield from _paths(region, (None, *range(node.op.iterations())))


def parse_instructions(hlo: str, paths: frozenset[str]) -> dict[str, Instruction]:
    """Return every instruction of an HLO text by name, with its block: the innermost scope that is one of `paths`.

    A fusion has the metadata of its root instruction; without a block there, it belongs to the last block inside.
    """
    parsed: dict[str, Instruction] = {}
    members: dict[str, list[str]] = {}
    calls: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            name, opcode = match.groups()
            *scopes, primitive = op_name[1].split("/") if (op_name := _OP_NAME.search(line)) else [""]
            parsed[name] = Instruction(opcode, primitive, _path(scopes, paths))
            if callee := _CALLS.search(line):
                calls[name] = callee[1]
            members.setdefault(computation, []).append(name)
    return {name: _with_block(name, parsed, members, calls) for name in parsed}


def _path(scopes: list[str], paths: frozenset[str]) -> str:
    """Return the innermost block among the scopes of an instruction, prefixed by `draft.` in the proposal of drafts."""
    block_scopes = [scope for scope in scopes if scope in paths or scope == SAMPLER]
    inner = block_scopes[-1:] if DRAFTING not in scopes else [DRAFTING, *block_scopes[-1:]]
    return ".".join(inner).replace("{i}", "*")


def _with_block(
    name: str, instructions: Mapping[str, Instruction], members: Mapping[str, list[str]], calls: Mapping[str, str]
) -> Instruction:
    """Return an instruction with its block; without one, with the block of the computation that it calls."""
    call = instructions[name]
    if call.path or name not in calls:
        return call
    called = (instructions[member] for member in reversed(members.get(calls[name], [])))
    return next((Instruction(call.opcode, inner.primitive, inner.path) for inner in called if inner.path), call)


def kernel_name(instruction: str) -> str:
    """Return XLA's name for the kernel of an instruction."""
    return re.sub(r"\W", "_", instruction)


def module_id(proto: bytes) -> int:
    """Return the module id of a compiled program, which identifies it in traces.

    It is field 5 of the serialized `HloModuleProto`, 0 if the field is missing. JAX has no Python attribute for it.
    """
    return next((value for field, value in _numbers(proto) if field == 5), 0)


def _numbers(message: bytes) -> Iterator[tuple[int, int]]:
    """Yield number and value of the integer fields of a protobuf message; see protobuf.dev, "Encoding"."""
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        kind = tag & 7  # wire type: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes
        if kind == 0:
            value, offset = _varint(message, offset)
            yield tag >> 3, value
        elif kind == 2:
            length, offset = _varint(message, offset)
            offset += length
        else:
            offset += 8 if kind == 1 else 4


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset after it."""
    value = shift = 0
    while True:
        byte = message[offset]
        value, shift, offset = value | (byte & 127) << shift, shift + 7, offset + 1
        if byte < 128:
            return value, offset


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_LINE = re.compile(rf"^\s*(?:ROOT )?%?\S+ = .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(")


def count_collectives(hlo: str) -> dict[str, int]:
    """Return the number of collectives in an HLO text by kind.

    A collective of several arrays counts once, and so does one in a loop, however often it runs.
    """
    return dict(Counter(match[1] for line in hlo.splitlines() if (match := _LINE.match(line))))
