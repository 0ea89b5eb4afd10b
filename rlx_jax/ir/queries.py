"""Questions to a graph, and graphs put into each other: who reads a value, in what order, which sizes are open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlx_jax.errors import GraphError, ShapeError, check_known, listing, quote
from rlx_jax.ir.graph import Builder, Graph, Input, Leaf, Node, Param, StateRead, TypeCache, Value
from rlx_jax.ir.param import Key, keys_of
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.types import TensorType

# -- looking -------------------------------------------------------------------------------------


def users(graph: Graph, node: int) -> tuple[int, ...]:
    """The numbers of the nodes that read a result of node number `node`, in order, each once."""
    return tuple(i for i, other in enumerate(graph.nodes) if any(v.node == node for v in other.inputs))


def use_count(graph: Graph, node: int) -> int:
    """How often results of a node are read: as operands, as outputs of the graph and by writes of its state."""
    reads = [v for other in graph.nodes for v in other.inputs] + list(graph.roots())
    return sum(v.node == node for v in reads)


def dynamic_symbols(graph: Graph) -> tuple[str, ...]:
    """The names of all sizes that are no numbers yet, sorted; those inside of regions included."""
    return tuple(sorted({s for _, node in graph.walk() for t in node.types for s in t.symbols}))


def bind(graph: Graph, sizes: Mapping[str, int], types: TypeCache) -> Graph:
    """The graph with sizes for some of its symbols: leaves get them, everything else is inferred again.

    Raises:
        GraphError: the graph has no such symbol.
    """
    check_known(sizes, dynamic_symbols(graph), f"{graph.name}: no dimension is called", "; open are")
    return bind_leaves(graph, sizes, types)


def bind_leaves(graph: Graph, sizes: Mapping[str, int], types: TypeCache) -> Graph:
    """The graph whose leaves have these sizes for some of their symbols; everything else is inferred again."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(node.op, Input | StateRead):
            return (b.leaf(replace(node.op, type=node.op.type.bind(sizes))),)
        return None

    out = rewrite(graph, everywhere(fn), types)
    return replace(out, inputs=tuple(replace(i, type=i.type.bind(sizes)) for i in graph.inputs))


# -- putting together ----------------------------------------------------------------------------


def inline_into(
    b: Builder, graph: Graph, inputs: Mapping[str, Value], params: Mapping[str, Value] | None = None
) -> tuple[Value, ...]:
    """Append the nodes of `graph` to what `b` builds, its inputs bound to values of `b`; returns its outputs there.

    Parameters keep their keys, so those that `b` has under the same key are the same; with `params` each is bound to a
    value instead. Regions come along whole.

    Raises:
        GraphError: an input or a parameter is not bound, a name is none of the graph's, or it has a state.
        ShapeError: a value has another type than the input.
    """
    if graph.state_reads() or graph.writes:
        raise GraphError(f"{graph.name}: a graph with a state cannot be put into another one")
    keys = {p: _key(graph, p) for p in graph.params()} if params is not None else {}
    _check_bound(graph, "inputs", [i.input for i in graph.inputs], inputs)
    _check_bound(graph, "params", list(keys.values()), params or {})
    inner = {node.op for region, node in graph.walk() if region is not graph and isinstance(node.op, Leaf)}
    if params is not None and (inside := [k for p, k in keys.items() if p in inner]):
        raise GraphError(f"{graph.name}: parameter {quote(inside[0])} is read inside of a region: leave out params")
    mapped: dict[Value, Value] = {}
    for number, node in enumerate(graph.nodes):
        op = node.op
        new: tuple[Value, ...]
        if isinstance(op, Input):
            new = (_fits(b, graph, op.input, op.type, inputs[op.input]),)
        elif isinstance(op, Param) and params is not None:
            new = (_fits(b, graph, keys[op], op.type, params[keys[op]]),)
        elif isinstance(op, Leaf):
            new = (b.leaf(op),)
        else:
            with b.at(replace(node.origin, path=(*b.origin.path, *node.origin.path))):
                new = b.add(op, *(mapped[v] for v in node.inputs))
        mapped.update({Value(number, i): v for i, v in enumerate(new)})
    return tuple(mapped[v] for v in graph.outputs)


def _check_bound(graph: Graph, what: str, names: list[str], given: Mapping[str, Value]) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise GraphError(f"{graph.name}: {what} {listing(missing)} are not bound; bound are {listing(given) or 'none'}")
    check_known(given, names, f"{graph.name}:", f" is none of its {what}, which are")


def _fits(b: Builder, graph: Graph, name: str, want: TensorType, value: Value) -> Value:
    if b.type(value) != want:
        raise ShapeError(f"{graph.name}: {quote(name)} is {want}, and bound to {b.type(value)}")
    return value


def _key(graph: Graph, param: Param) -> str:
    """The one key of a parameter that is a stored tensor as it is."""
    keys = list(keys_of(param.programs[0]))
    if len(param.programs) > 1 or len(keys) != 1 or not isinstance(param.programs[0], Key):
        raise GraphError(f"{graph.name}: parameter {param.programs[0]} is not one stored tensor as it is")
    return keys[0]


def promote_params_to_inputs(graph: Graph, names: Iterable[str], types: TypeCache) -> Graph:
    """Parameters become inputs of the same name and type, behind the graph's own: for weights that calls give.

    A key that is no identifier gives its name with `_` for every other character: `mlp.up.weight` is `mlp_up_weight`.

    Raises:
        GraphError: no parameter has that key, or it is not a stored tensor as it is.
        GraphError: there is an input of that name.
    """
    wanted = list(names)
    found = {key: p for p in graph.params() for key in keys_of(p.programs[0])}
    added: dict[Param, Input] = {}
    taken = {i.input for i in graph.inputs}
    check_known(wanted, found, f"{graph.name}: no parameter is called", "; there are")
    for name in wanted:
        given = "".join(c if c.isalnum() else "_" for c in _key(graph, found[name]))
        if given in taken or not given.isidentifier():
            raise GraphError(f"{graph.name}: parameter {quote(name)} cannot become the input {quote(given)}")
        taken.add(given)
        added[found[name]] = Input(given, type=found[name].type)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        new = added.get(node.op) if isinstance(node.op, Param) else None
        return None if new is None else (b.leaf(new),)

    out = rewrite(graph, everywhere(fn), types)
    return replace(out, inputs=(*graph.inputs, *added.values()))
