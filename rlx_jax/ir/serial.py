"""Serialization of graphs of all levels to JSON data and back.

    document ::= {format, version, level, policy, plan?, graph}
    graph    ::= {name, inputs, nodes, outputs, output_names, writes}
    node     ::= {op, inputs: [[node, result] …], types: ["f32[2,8]" …], origin}
    op       ::= "Where" | {"Linear": {"bias": true}}       a field at its default is left out; bytes are base64

Decoding trusts nothing in the data. It looks up ops by name in one table, then among the ops of installed plugins, and
checks their attributes against the fields of their dataclass. A value may refer only to earlier nodes. Types are
inferred again and compared. The data cannot name a module to import or a function to call. A user's Python function
cannot be serialized.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import json
import math
import types as builtin_types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from rlx_jax.errors import FormatError, LimitError, RlxError, UnsupportedError, did_you_mean, listing, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Constant, Graph, Hir, Input, Mir, Node, Op, Param, StateRead, TypeCache, Value
from rlx_jax.ir.ops import OPS, custom
from rlx_jax.ir.ops.recurrent import TokenScan
from rlx_jax.ir.param import Program, pad_axis
from rlx_jax.ir.paths import Origin, StateLeaf, path_text
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import TensorType, as_dtype, as_name, as_names, dim_text, short_name, tensor_type
from rlx_jax.ir.user_functions import fingerprint, trace

MAX_NODES = 10**6
MAX_REPEATS = 2**16

# Functions that return further op classes by name: `rlx_jax.plugins` appends one.
OTHER_OPS: list[Callable[[], Mapping[str, type[Op]]]] = []
# Every op of this package that can be serialized, by name.
SERIALIZABLE_OPS: dict[str, type[Op]] = {
    cls.__name__: cls
    for cls in (
        *(Input, Param, Constant, StateRead, BodyInput, Repeat),
        *(block for block in hir.BLOCKS if block.traits.stored),
        *(op for op in OPS if op.traits.stored),
    )
}

Closure = Callable[[Any, tuple[TensorType, ...]], str]


# -- encoding ----------------------------------------------------------------------------------


def encode_graph(graph: Graph, closure: Closure | None = None) -> dict[str, Any]:
    """Return a graph as JSON data.

    Args:
        graph: of any level.
        closure: returns a text for a user's function and its operand types. Digests pass it; data that will be decoded
            cannot contain such functions.

    Raises:
        UnsupportedError: the graph calls a user's function and there is no `closure`; the message names the block.
    """
    return {
        "name": graph.name,
        "inputs": [encode(i) for i in graph.inputs],
        "nodes": [_encode_node(graph, node, closure) for node in graph.nodes],
        "outputs": [_ref(v) for v in graph.outputs],
        "output_names": list(graph.output_names),
        "writes": [[encode(leaf), _ref(v)] for leaf, v in graph.writes],
    }


def _ref(value: Value) -> list[int]:
    return [value.node, value.index]


def _encode_node(graph: Graph, node: Node, closure: Closure | None) -> dict[str, Any]:
    """Return a node as JSON data; see `encode_graph`."""
    op = node.op
    try:
        if isinstance(op, BodyInput):  # its type is left out: the region's operand has it
            op_data: Any = {"BodyInput": {"index": op.index}}
        elif isinstance(op, Repeat):
            fields = {"count": op.count, "carries": op.carries, "body": encode_graph(op.body, closure)}
            op_data = {"Repeat": fields}
        elif isinstance(op, custom.JaxFn) and closure is not None:
            op_data = {"JaxFn": {"fn": closure(op.fn, tuple(graph.type(v) for v in node.inputs)), "label": op.label}}
        elif isinstance(op, TokenScan) and closure is not None:
            # The step is a function too; its digest covers what it computes.
            attributes = {f: getattr(op, f) for f in ("states", "tokens", "ragged", "every", "unroll", "precision")}
            op_data = {"TokenScan": {"step": op.step.digest, **attributes}}
        else:
            op_data = encode(op)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path_text(node.origin.path)}: {op.text()}: {error}") from error
    return {
        "op": op_data,
        "inputs": [_ref(v) for v in node.inputs],
        "types": [str(t) for t in node.types],
        "origin": _fields(node.origin),
    }


def encode(value: Any) -> Any:
    """Return an attribute as JSON data.

    Raises:
        UnsupportedError: it is a function.
    """
    if isinstance(value, float):  # JSON has no infinities and no NaN
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if value is Ellipsis:
        return "..."
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.dtype):
        return short_name(value)
    if isinstance(value, TensorType):
        return {
            "dtype": short_name(value.dtype),
            "shape": [d if isinstance(d, int) else dim_text(d) for d in value.shape],
        }
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value):
            return {k: encode(v) for k, v in sorted(value.items())}
        # Sorted like the other mappings, so that digests do not depend on insertion order.
        return sorted(([encode(k), encode(v)] for k, v in value.items()), key=json.dumps)
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: fields} if (fields := _fields(value)) else type(value).__name__
    raise UnsupportedError(f"{getattr(value, '__name__', type(value).__name__)}: Python functions cannot be stored")


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their default, as JSON data."""
    values = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
    return {f.name: encode(v) for f, v in values if v != _default(f)}


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


# -- decoding ----------------------------------------------------------------------------------


def decode_graph(data: Any, types: TypeCache, where: str = "graph", input_types: tuple[TensorType, ...] = ()) -> Graph:
    """Return the graph that JSON data describes.

    Args:
        data: the output of `encode_graph`.
        types: infers the types again.
        where: the path of `data` in its document, for messages.
        input_types: the operand types of the region, if the graph is one.

    Raises:
        FormatError: the data is malformed; the message has the place, what was expected and what was found.
        LimitError: there are more than `MAX_NODES` nodes.
        GraphError: an op does not fit its operands.
    """
    fields = object_with({"name", "inputs", "nodes", "outputs", "output_names", "writes"}, data, where)
    rows = _array(fields["nodes"], f"{where}.nodes")
    if len(rows) > MAX_NODES:
        raise LimitError(f"{where}.nodes has {len(rows)} entries, over the limit MAX_NODES = {MAX_NODES}")
    nodes: list[Node] = []
    for number, row in enumerate(rows):
        nodes.append(_decode_node(row, nodes, types, f"{where}.nodes[{number}]", input_types))
    writes = []
    for i, pair in enumerate(_array(fields["writes"], f"{where}.writes")):
        leaf, value = _array(pair, f"{where}.writes[{i}]", 2)
        writes.append((decode(StateLeaf, leaf, f"{where}.writes[{i}]"), _value(value, nodes, f"{where}.writes[{i}]")))
    return Graph(
        as_name(decode(str, fields["name"], f"{where}.name"), f"{where}.name"),
        tuple(nodes),
        tuple(_value(v, nodes, f"{where}.outputs") for v in _array(fields["outputs"], f"{where}.outputs")),
        decode(tuple[Input, ...], fields["inputs"], f"{where}.inputs"),
        as_names(decode(tuple[str, ...], fields["output_names"], f"{where}.output_names"), f"{where}.output_names"),
        tuple(writes),
    )


def _decode_node(
    data: Any, nodes: list[Node], types: TypeCache, where: str, input_types: tuple[TensorType, ...]
) -> Node:
    """Return the node that JSON data describes; `nodes` are the nodes decoded before it. See `decode_graph`."""
    fields = object_with({"op", "inputs", "types", "origin"}, data, where)
    inputs = tuple(_value(v, nodes, f"{where}.inputs") for v in _array(fields["inputs"], f"{where}.inputs"))
    operands = tuple(nodes[v.node].types[v.index] for v in inputs)
    op = _decode_op(fields["op"], types, f"{where}.op", operands, input_types)
    try:
        inferred_types = types.infer(op, operands)
    except RlxError as error:
        error.args = (f"{where}: {error}",)  # keeps the class of the error
        raise
    declared_types = decode(tuple[str, ...], fields["types"], f"{where}.types")
    if declared_types != tuple(map(str, inferred_types)):
        inferred_text = listing(map(str, inferred_types))
        raise FormatError(f"{where}.types is {listing(declared_types)}; {quote(op.text())} gives {inferred_text}")
    return Node(op, inputs, inferred_types, _record(Origin, fields["origin"], f"{where}.origin"))


def _decode_op(
    data: Any, types: TypeCache, where: str, operands: tuple[TensorType, ...], input_types: tuple[TensorType, ...]
) -> Op:
    """Return the op that JSON data describes.

    `operands` are the operand types of the op, `input_types` the operand types of the enclosing region.
    """
    tag, fields = _tagged(data, where)
    if tag == "BodyInput":
        index = decode(int, object_with({"index"}, fields, where)["index"], f"{where}.index")
        if not 0 <= index < len(input_types):
            raise FormatError(f"{where}: body input {index} of a region with {len(input_types)} operands")
        return BodyInput(index, type=input_types[index])
    if tag == "Repeat":
        repeat_fields = object_with({"count", "carries", "body"}, fields, where)
        count, carries = (decode(int, repeat_fields[name], f"{where}.{name}") for name in ("count", "carries"))
        if not (1 <= count <= MAX_REPEATS and 0 <= carries <= len(operands)):
            raise FormatError(f"{where}: count {count} of at most {MAX_REPEATS}, {carries} carries")
        return Repeat(count, carries, decode_graph(repeat_fields["body"], types, f"{where}.body", operands))
    op: Op = decode(Op, data, where)
    return op


def _value(data: Any, nodes: list[Node], where: str) -> Value:
    """Return a reference to a result of an earlier node.

    Raises:
        FormatError: there is no such result among `nodes`, the nodes decoded so far.
    """
    node, index = (decode(int, i, where) for i in _array(data, where, 2))
    if not (0 <= node < len(nodes) and 0 <= index < len(nodes[node].types)):
        raise FormatError(f"{where}: [{node}, {index}] is no result of the {len(nodes)} nodes before it")
    return Value(node, index)


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return the attribute that JSON data describes.

    Args:
        hint: the annotated type of the attribute.
        data: the output of `encode`.
        where: the path of `data` in its document, for messages.

    Raises:
        FormatError: the data does not describe a value of this type.
    """
    origin = get_origin(hint)
    if origin in (Union, builtin_types.UnionType):
        return _decode_union(get_args(hint), data, where)
    if origin is tuple:
        return _decode_tuple(get_args(hint), data, where)
    if origin is Mapping:
        key, kind = get_args(hint)
        if key is str:
            return {name: decode(kind, v, f"{where}.{name}") for name, v in _object(data, where).items()}
        pairs = [_array(pair, where, 2) for pair in _array(data, where)]
        return {decode(key, k, where): decode(kind, v, where) for k, v in pairs}
    if hint is TensorType:
        fields = object_with({"dtype", "shape"}, data, where)
        return tensor_type(_array(fields["shape"], f"{where}.shape"), decode(str, fields["dtype"], where), where)
    if origin is np.dtype:
        return as_dtype(_plain(str, data, where))
    if hint is bytes:
        return _decode_bytes(data, where)
    if hint is float and isinstance(data, str) and data in ("inf", "-inf", "nan"):
        return float(data)
    if hint is builtin_types.EllipsisType and data == "...":
        return Ellipsis
    if hint in (int, float, str, bool, builtin_types.NoneType):
        return _plain(hint, data, where)
    return _decode_record(hint, data, where)


def _plain(hint: type, data: Any, where: str) -> Any:
    allowed = (int, float) if hint is float else (hint,)  # JSON writers may print 1.0 as 1
    if isinstance(data, bool) != (hint is bool) or not isinstance(data, allowed):
        raise _expected(hint.__name__, data, where)
    return data


def _decode_union(hints: tuple[Any, ...], data: Any, where: str) -> Any:
    """Return the value by the first of the types `hints` that fits the data."""
    if isinstance(data, dict) and data.keys() == {"Padded"} and hints == get_args(Program):  # of earlier versions
        fields = object_with({"of", "axis", "size"}, data["Padded"], where)
        axis, size = (decode(int, fields[name], f"{where}.{name}") for name in ("axis", "size"))
        return pad_axis(decode(Program, fields["of"], f"{where}.of"), axis, size)
    for hint in hints:
        try:
            return decode(hint, data, where)
        except FormatError:
            continue
    # No alternative fits. The message comes from the alternative that the tag names, if there is one.
    tagged = [h for h in hints if isinstance(data, dict) and getattr(h, "__name__", "") in data]
    return decode(tagged[0] if tagged else hints[0], data, where)


def _decode_tuple(hints: tuple[Any, ...], data: Any, where: str) -> Any:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(decode(hints[0], v, f"{where}[{i}]") for i, v in enumerate(_array(data, where)))
    items = _array(data, where, len(hints))
    return tuple(decode(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, items, strict=True)))


def _decode_bytes(data: Any, where: str) -> bytes:
    try:
        return base64.b64decode(_plain(str, data, where), validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"{where}: not base64") from error


def _decode_record(hint: Any, data: Any, where: str) -> Any:
    """Return an instance of the annotated dataclass; for `Op`, `Mir` and `Hir`, of the op class that the tag names."""
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint) or hint in (Op, Mir, Hir)):
        raise FormatError(f"{where}: values of {hint} cannot be stored")
    tag, fields = _tagged(data, where)
    classes = SERIALIZABLE_OPS if issubclass(hint, Op) else {hint.__name__: hint}
    # Plugins are imported only for a tag that this package does not have.
    if issubclass(hint, Op) and tag not in classes:
        others = {name: cls for find in OTHER_OPS for name, cls in find().items()}
        storable = {name: cls for name, cls in others.items() if cls.traits.stored}  # type: ignore[attr-defined]
        classes = SERIALIZABLE_OPS | storable
    if tag not in classes or not issubclass(classes[tag], hint):
        raise FormatError(f"{where}: unknown {hint.__name__} {quote(tag)}{did_you_mean(tag, classes)}")
    return _record(classes[tag], fields, where)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the annotated types of a dataclass's fields."""
    hints = get_type_hints(cls)
    return {name: h for name, h in hints.items() if h is not ClassVar and get_origin(h) is not ClassVar}


def _record(cls: Any, data: Any, where: str) -> Any:
    """Return a dataclass instance from its fields; missing fields have their default."""
    defaults = {f.name: _default(f) for f in dataclasses.fields(cls)}
    data = _object(data, where)
    for name in data:
        if name not in defaults:
            raise FormatError(f"{where}: {cls.__name__} has no field {quote(name)}{did_you_mean(name, defaults)}")
    missing = [n for n, default in defaults.items() if default is dataclasses.MISSING and n not in data]
    if missing:
        raise FormatError(f"{where}: {cls.__name__} needs {', '.join(missing)}")
    record = cls(**{name: decode(_hints(cls)[name], v, f"{where}.{name}") for name, v in data.items()})
    # Types alone do not guarantee what the rest of the compiler relies on for these leaves.
    if isinstance(record, Constant) and not (record.type.is_static and len(record.data) == record.type.nbytes):
        raise FormatError(f"{where}: {len(record.data)} bytes for a constant of {record.type}")
    if isinstance(record, Input):
        as_name(record.input, where)
    if isinstance(record, Param) and not record.programs:
        raise FormatError(f"{where}: a parameter without a program")
    return record


def _tagged(data: Any, where: str) -> tuple[str, Any]:
    """Return the tag and the fields of an encoded dataclass: `"Where"` or `{"Linear": {…}}`."""
    if isinstance(data, str):
        return data, {}
    if isinstance(data, dict) and len(data) == 1:
        ((tag, fields),) = data.items()
        return tag, fields
    raise _expected("a name, or an object with one", data, where)


def _object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _expected("an object", data, where)
    return data


def object_with(names: set[str], data: Any, where: str) -> dict[str, Any]:
    """Return `data` if it is an object with exactly these names.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(data, dict) or set(data) != names:
        raise _expected(f"an object with {', '.join(sorted(names))}", data, where)
    return data


def one_of(where: str, data: Any, choices: tuple[str, ...]) -> str:
    """Return `data` if it is one of the `choices` strings.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(data, str) or data not in choices:
        raise _expected(f"one of {', '.join(choices)}", data, where)
    return data


def _array(data: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(data, list) or (length is not None and len(data) != length):
        raise _expected("an array" if length is None else f"an array of {length}", data, where)
    return data


def _expected(expected: str, data: Any, where: str) -> FormatError:
    keys = ", ".join(map(quote, list(data)[:8])) or "nothing" if isinstance(data, dict) else ""
    description = f"an object with {keys}" if keys else quote(data)
    return FormatError(f"{where}: expected {expected}, found {description}")


# -- digests -----------------------------------------------------------------------------------


def closure_digest(fn: Any, operands: tuple[TensorType, ...]) -> str:
    """Return a text that identifies what a user's function computes: its jaxpr and hashes of the arrays it captures."""
    text, arrays = fingerprint(trace(fn, operands)[0])
    return text + " ".join(hashlib.sha256(array).hexdigest() for array in arrays)


def node_digest(graph: Graph, node: Node) -> str:
    """Return 8 hex digits of a hash over a node without its position: all attributes, functions, and constants read."""
    constants = [encode(op) for v in node.inputs if isinstance(op := graph.nodes[v.node].op, Constant)]
    try:
        op_data = _encode_node(graph, node, closure_digest)["op"]
    except UnsupportedError:  # a function inside a region
        op_data = [node.op.text(), [node_digest(region, n) for region in node.op.regions() for n in region.nodes]]
    return hashlib.sha256(json.dumps([op_data, constants], sort_keys=True).encode()).hexdigest()[:8]
