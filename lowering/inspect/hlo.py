"""Parser of the HLO text of compiled programs: the block of each instruction, and the collectives between devices.

The interpreter runs every op inside `jax.named_scope(block path)`, and XLA keeps the scopes of an instruction in its
`op_name`: `jit(function)/layers.3.mlp/layers.3.mlp.up_proj/dot_general`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.ir.graph import Graph, Leaf
from rlx_jax.ir.paths import bind_path, path_text

# Instructions that run other instructions: their time is the sum over these.
CONTAINERS = frozenset({"while", "conditional", "call"})

# Scopes of a generation loop outside of its program: the sampler, and the proposal of draft tokens, which may run
# another program.
SAMPLER, DRAFTING = "sampler", "draft"

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"(?:calls|called_computations)=\{?%?([^\s,}]+)")
_BODY = re.compile(r" while\(%?([^\s)]+)\), .*body=%?([^\s,]+)")
_OPERAND = re.compile(r"%([\w.-]+)")
_INDEX = re.compile(r"\), index=(\d+)")
_PARAMETER = re.compile(r"^params\[\\?'(.*?)\\?'\]$")
# Instructions that move a parameter without computing with it, and the names of fusions of such.
_MOVES = ("bitcast", "copy", "transpose", "convert", "reshape", "dynamic-slice", "slice")
_MOVING_FUSION = re.compile(rf"^(?:wrapped_)?(?:(?:{'|'.join(_MOVES)})_)+(?:fusion|computation)?(?:\.|$)")
# Instructions that run no kernel.
NO_KERNEL = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", *CONTAINERS})
_NUMBER = re.compile(r"(?<![^.])(?:\d+|\{[^}]*\})(?![^.])")


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction.

    Attributes:
        opcode: the HLO opcode.
        primitive: the JAX primitive that it belongs to; empty if XLA added it.
        path: the path of its block, with `layers.*` for layers in a loop; empty if it has none.
        result: the type of its result in HLO, such as `f32[8,16]{1,0}`; empty for a tuple.
        fused: whether it is part of a fusion, so that its result is not in memory.
        parameter: the name of the model's parameter that it reads or moves; empty if there is none or more than one.
        moves: whether it only moves, slices or casts its first operand.
        computation: the name of the computation that it is in.
        body: the computation that a loop runs; empty for other instructions.
    """

    opcode: str
    primitive: str = ""
    path: str = ""
    result: str = ""
    fused: bool = False
    parameter: str = ""
    moves: bool = False
    computation: str = ""
    body: str = ""

    @property
    def has_kernel(self) -> bool:
        """Return whether a kernel runs for the instruction alone."""
        return not self.fused and self.opcode not in NO_KERNEL


def without_layer_numbers(path: str) -> str:
    """Return a path with layer numbers replaced by `*`.

    >>> without_layer_numbers("layers.{2i+1}.mlp"), without_layer_numbers("layers.3.mlp")
    ('layers.*.mlp', 'layers.*.mlp')
    """
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


@dataclass(frozen=True)
class _Line:
    """A line of HLO: an instruction with its operands, as text."""

    computation: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    op_name: str
    index: int


@dataclass(frozen=True)
class _Module:
    """The lines of an HLO text by name.

    Attributes:
        lines: the instructions.
        members: the names of the instructions of each computation.
        calls: the computation that an instruction calls.
        carries: for the body of a loop, the name of its initial tuple.
    """

    lines: dict[str, _Line]
    members: dict[str, list[str]]
    calls: dict[str, str]
    carries: dict[str, str]

    def parameter(self, name: str) -> str:
        """Return the model's parameter that a value is, possibly moved or carried by a loop; empty for other values."""
        for _ in range(len(self.lines)):
            line = self.lines.get(name)
            if line is None or line.opcode == "parameter":
                match = _PARAMETER.match(line.op_name) if line is not None else None
                return match[1] if match else ""
            if line.opcode == "get-tuple-element" and line.operands:
                name = self._element(line.operands[0], line.index)
            elif line.operands and (line.opcode in _MOVES or _moves_one(name, line)):
                name = line.operands[0]
            else:
                return ""
        return ""

    def _element(self, name: str, index: int) -> str:
        """Return the name of an element of a tuple; of one that a loop carries, of its initial value."""
        line = self.lines.get(name)
        if line is not None and line.opcode == "parameter":
            line = self.lines.get(self.carries.get(line.computation, ""))
        elif line is not None and line.opcode == "while" and line.operands:
            line = self.lines.get(line.operands[0])
        is_tuple = line is not None and line.opcode == "tuple" and index < len(line.operands)
        return line.operands[index] if line is not None and is_tuple else ""


def _moves_one(name: str, line: _Line) -> bool:
    """Return whether a fusion only moves its first operand; a slice of it has an index as second operand."""
    is_fusion = line.opcode == "fusion" and _MOVING_FUSION.match(name) is not None
    return is_fusion and len(line.operands) <= (2 if "slice" in name else 1)


def parse_instructions(
    hlo: str, paths: frozenset[str], readers: Mapping[str, str] | None = None
) -> dict[str, Instruction]:
    """Return every instruction of an HLO text by name, with its block: the innermost scope that is one of `paths`.

    A fusion has the metadata of its root instruction; without a block there, it belongs to the last block inside. XLA
    drops the metadata of some products: they belong to the block that reads their parameter.

    Args:
        hlo: the text.
        paths: the block paths of the program.
        readers: the path of the block that multiplies with a parameter, by the parameter's name.
    """
    module, parsed = _parse(hlo), dict[str, Instruction]()
    fused = {
        module.calls[name] for name, line in module.lines.items() if line.opcode == "fusion" and name in module.calls
    }
    bodies = {loop: body for body, loop in module.carries.items()}
    for name, line in module.lines.items():
        *scopes, primitive = line.op_name.split("/")
        moved = {parameter for operand in line.operands if (parameter := module.parameter(operand))}
        parameter = moved.pop() if len(moved) == 1 and line.opcode not in NO_KERNEL else ""
        path = _path(scopes, paths)
        if not path and line.opcode in ("dot", "custom-call"):
            path = (readers or {}).get(parameter, "")
        moves, is_fused = line.opcode in _MOVES or _moves_one(name, line), line.computation in fused
        parsed[name] = Instruction(
            line.opcode, primitive, path, line.result, is_fused, parameter, moves, line.computation,
            bodies.get(line.operands[0], "") if line.opcode == "while" else "",
        )  # fmt: skip
    return {name: _with_block(name, parsed, module.members, module.calls) for name in parsed}


def _parse(hlo: str) -> _Module:
    module, computation = _Module({}, {}, {}, {}), ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            name, result, opcode = match.groups()
            op_name, index, callee, loop = (regex.search(line) for regex in (_OP_NAME, _INDEX, _CALLS, _BODY))
            operands = tuple(_OPERAND.findall(line[match.end() :].partition(")")[0]))
            module.lines[name] = _Line(
                computation, opcode, "" if result.startswith("(") else result, operands,
                op_name[1] if op_name else "", int(index[1]) if index else 0,
            )  # fmt: skip
            if callee:
                module.calls[name] = callee[1]
            if loop:
                module.carries[loop[2]] = loop[1]
            module.members.setdefault(computation, []).append(name)
    return module


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
    return next((replace(call, primitive=inner.primitive, path=inner.path) for inner in called if inner.path), call)


_DOT = re.compile(
    r"stablehlo\.dot_general .*contracting_dims = \[([\d, ]*)\] x .* : \(tensor<([^>]*)>, tensor<([^>]*)>\) -> "
    r"tensor<([^>]*)> loc\((#\w+)\)"
)
_LOCATION = re.compile(r'^(#\w+) = loc\("([^"]*)"', re.MULTILINE)


def traced_products(stablehlo: str, paths: frozenset[str]) -> list[tuple[str, tuple[str, str], int]]:
    """Return the products of a StableHLO text with debug information; the body of a loop counts once.

    Each has the path of its block, the dtypes of its operands in StableHLO, and its operations.
    """
    scopes = {name: text.split("/") for name, text in _LOCATION.findall(stablehlo)}
    products = []
    for contracted, lhs, rhs, result, location in _DOT.findall(stablehlo):
        (*sizes, left), (*_, right), (*outer, _) = (text.split("x") for text in (lhs, rhs, result))
        inner = [int(sizes[int(axis)]) for axis in contracted.split(",") if axis.strip()]
        flops = 2 * math.prod(map(int, outer)) * math.prod(inner)
        products.append((_path(scopes.get(location, []), paths), (left, right), flops))
    return products


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
