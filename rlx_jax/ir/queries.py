"""Queries of a graph (users of a value, symbolic sizes), and transformations that bind sizes, inline or add inputs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rlx_jax.errors import GraphError, ShapeError, check_names, listing, quote
from rlx_jax.ir.graph import Builder, Graph, Input, Leaf, Mir, Node, Op, Param, StateRead, TypeCache, Value
from rlx_jax.ir.operands import check_declared
from rlx_jax.ir.param import Key, keys_of
from rlx_jax.ir.region import Rewrite, replace_ops, rewrite
from rlx_jax.ir.types import TensorType, check_elements


def is_builtin(cls: type) -> bool:
    """Return whether a class belongs to rlx_jax itself, so that no plugin can have a rule for it."""
    return cls.__module__.partition(".")[0] == "rlx_jax"


def users(graph: Graph, node: int) -> tuple[int, ...]:
    """Return the numbers of the nodes that read a result of node number `node`, in order and without repetition."""
    return tuple(i for i, other in enumerate(graph.nodes) if any(v.node == node for v in other.inputs))


def find_readers(graph: Graph) -> dict[Value, list[int]]:
    """Return the numbers of the nodes that read each value; -1 for an output or a written state."""
    readers: dict[Value, list[int]] = defaultdict(list)
    reads = [(v, number) for number, node in enumerate(graph.nodes) for v in node.inputs]
    for value, number in [*reads, *((v, -1) for v in graph.roots())]:
        readers[value].append(number)
    return readers


def use_count(graph: Graph, node: int) -> int:
    """Return how many times results of a node are read: as operands, as outputs of the graph and by state writes."""
    return sum(len(numbers) for value, numbers in find_readers(graph).items() if value.node == node)


def dynamic_symbols(graph: Graph) -> tuple[str, ...]:
    """Return the names of all symbols in the graph's types, including regions, sorted."""
    return tuple(sorted({s for _, node in graph.walk() for t in node.types for s in t.symbols}))


def bind(graph: Graph, sizes: Mapping[str, int], types: TypeCache) -> Graph:
    """Return the graph with sizes for some of its symbols: leaves get them, and all other types are inferred again.

    Raises:
        GraphError: the graph has no such symbol.
    """
    check_names(sizes, dynamic_symbols(graph), f"{graph.name}: no dimension is called", "; open are")
    return bind_leaves(graph, sizes, types)


def bind_leaves(graph: Graph, sizes: Mapping[str, int], types: TypeCache) -> Graph:
    """Return the graph with sizes for some of its symbols, as `bind`, without an error for unknown symbols.

    JAX infers symbolic shapes that hold for all sizes, so the result types of an op with plain values as attributes are
    its symbolic ones with the sizes. Tracing each op again would take most of the time. The checks of ops run, because
    they may depend on sizes. Other ops are traced: functions of users and plugins may compare a size with a number.
    """
    bound_types: Callable[[TensorType], TensorType] = functools.cache(lambda t: t.bind(sizes))

    def enter(inner: Graph) -> Rewrite:
        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Input | StateRead):
                return (b.leaf(replace(node.op, type=node.op.type.bind(sizes))),)
            if binds_types(node.op):
                operands, results = tuple(map(b.type, inputs)), tuple(map(bound_types, node.types))
                same_operands = operands == tuple(bound_types(inner.type(v)) for v in node.inputs)
                if same_operands and all(t.is_static for t in (*operands, *results)):
                    check_declared(node.op, operands)
                    node.op.check(*operands)
                    for result in results:
                        check_elements(result.shape, node.op.text())
                    types.store_types(node.op, operands, results)
            return None

        return fn

    rewritten = rewrite(graph, enter, types)
    return replace(rewritten, inputs=tuple(replace(i, type=i.type.bind(sizes)) for i in graph.inputs))


def binds_types(op: Op) -> bool:
    """Return whether the result types of an op are its symbolic ones with sizes in place of symbols."""
    if not isinstance(op, Mir) or op.regions() or not is_builtin(type(op)):
        return False
    return op.traits.stored and not op.traits.size_dependent


def inline_into(
    b: Builder, graph: Graph, inputs: Mapping[str, Value], params: Mapping[str, Value] | None = None
) -> tuple[Value, ...]:
    """Append the nodes of `graph` to `b` and return the values of its outputs in `b`.

    Regions are copied unchanged.

    Args:
        b: the builder of the other graph.
        graph: a graph without state.
        inputs: a value of `b` for each input of the graph.
        params: a value of `b` for each parameter of the graph, by key. If it is None, parameters keep their keys, and
            one that `b` has under the same key is the same parameter.

    Raises:
        GraphError: an input or a parameter is not bound, a bound name does not exist, the graph has a state, or a
            parameter to bind is inside a region.
        ShapeError: a value has another type than its input or parameter.
    """
    if graph.state_reads() or graph.writes:
        raise GraphError(f"{graph.name}: a graph with a state cannot be put into another one")
    keys = {p: _key(graph, p) for p in graph.params()} if params is not None else {}
    _check_bound(graph, "inputs", [i.input for i in graph.inputs], inputs)
    _check_bound(graph, "params", list(keys.values()), params or {})
    region_leaves = {node.op for region, node in graph.walk() if region is not graph and isinstance(node.op, Leaf)}
    if params is not None and (region_keys := [k for p, k in keys.items() if p in region_leaves]):
        raise GraphError(
            f"{graph.name}: parameter {quote(region_keys[0])} is read inside of a region: leave out params"
        )
    value_map: dict[Value, Value] = {}
    for number, node in enumerate(graph.nodes):
        op = node.op
        new_values: tuple[Value, ...]
        if isinstance(op, Input):
            new_values = (_checked_value(b, graph, op.input, op.type, inputs[op.input]),)
        elif isinstance(op, Param) and params is not None:
            new_values = (_checked_value(b, graph, keys[op], op.type, params[keys[op]]),)
        elif isinstance(op, Leaf):
            new_values = (b.leaf(op),)
        else:
            with b.origin_scope(replace(node.origin, path=(*b.origin.path, *node.origin.path))):
                new_values = b.add(op, *(value_map[v] for v in node.inputs))
        value_map.update({Value(number, i): v for i, v in enumerate(new_values)})
    return tuple(value_map[v] for v in graph.outputs)


def _check_bound(graph: Graph, kind: str, names: list[str], values: Mapping[str, Value]) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        raise GraphError(
            f"{graph.name}: {kind} {listing(missing)} are not bound; bound are {listing(values) or 'none'}"
        )
    check_names(values, names, f"{graph.name}:", f" is none of its {kind}, which are")


def _checked_value(b: Builder, graph: Graph, name: str, expected: TensorType, value: Value) -> Value:
    if b.type(value) != expected:
        raise ShapeError(f"{graph.name}: {quote(name)} is {expected}, and bound to {b.type(value)}")
    return value


def _key(graph: Graph, param: Param) -> str:
    """Return the key of a parameter that is an unchanged checkpoint tensor.

    Raises:
        GraphError: the parameter is anything else.
    """
    keys = list(keys_of(param.programs[0]))
    if len(param.programs) > 1 or len(keys) != 1 or not isinstance(param.programs[0], Key):
        raise GraphError(f"{graph.name}: parameter {param.programs[0]} is not one unchanged checkpoint tensor")
    return keys[0]


def promote_params_to_inputs(graph: Graph, names: Iterable[str], types: TypeCache) -> Graph:
    """Return the graph with some parameters as inputs of the same type, so that calls provide these weights.

    The new inputs follow the graph's other inputs. The name of an input is the parameter's key with `_` in place of
    every character that is not alphanumeric: `mlp.up.weight` becomes `mlp_up_weight`.

    Raises:
        GraphError: no parameter has such a key, it is not an unchanged checkpoint tensor, or an input of that name
            exists.
    """
    keys = list(names)
    param_by_key = {key: p for p in graph.params() for key in keys_of(p.programs[0])}
    new_inputs: dict[Param, Input] = {}
    input_names = {i.input for i in graph.inputs}
    check_names(keys, param_by_key, f"{graph.name}: no parameter is called", "; there are")
    for name in keys:
        input_name = "".join(c if c.isalnum() else "_" for c in _key(graph, param_by_key[name]))
        if input_name in input_names or not input_name.isidentifier():
            raise GraphError(f"{graph.name}: parameter {quote(name)} cannot become the input {quote(input_name)}")
        input_names.add(input_name)
        new_inputs[param_by_key[name]] = Input(input_name, type=param_by_key[name].type)

    rewritten = replace_ops(graph, Param, lambda op: new_inputs.get(op, op), types)
    return replace(rewritten, inputs=(*graph.inputs, *new_inputs.values()))
