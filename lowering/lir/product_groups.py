"""The pass `group_products`: it joins each product of a few rows with the ops around it to a `KernelGroup`.

A decode step of one row reads each weight once, and the small kernels between the products take about as long as the
launch of a kernel, each. A group runs as one kernel (`matvec.py`) that computes the ops before the product in each
program, and the ops after it on the entries that a program has computed; so does one of several rows
(`row_products.py`).

An op joins a group if its `eval` can run there: before the product, elementwise ops and reductions of a whole row (a
norm, a residual sum); after it, elementwise ops (a bias, the activation of gate and up, a residual).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Mir, Node, Param, TypeCache, Value
from rlx_jax.ir.kernel_group import KernelGroup, body_inputs, op_name, run_nodes
from rlx_jax.ir.ops.collective import AllGather, AllReduce
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.queries import find_readers
from rlx_jax.ir.region import Group, join_nodes
from rlx_jax.ir.types import TensorType, is_float, short_name
from rlx_jax.lowering.lir.kernel_trace import KernelTrace, is_same_by_rows, unsupported_primitive
from rlx_jax.lowering.lir.matvec import Matvec, find_tiling, matvec
from rlx_jax.lowering.lir.packed import PackedWeight
from rlx_jax.lowering.lir.packed_matvec import find_packed_tiling
from rlx_jax.lowering.lir.row_products import MAX_ROWS, VECTORS, RowsTiling, find_rows_tiling, multiply_rows

# Ops before the product of a group, and after it, at most; and columns of several rows, as a lane has so many of a row
# divided by 32.
MAX_OPS, MAX_COLUMNS = 12, 2048

# The numbers of a group's nodes before the product, and from the product on; and why it has no more of both.
Members = tuple[list[int], list[int], tuple[str, str]]

# Why an op is in no group of several rows.
NOT_BY_ROWS = "not an op on each row by itself"


def group_products(graph: Graph, types: TypeCache) -> Graph:
    """Return the graph with a `KernelGroup` for each product of a few rows with a weight that a kernel divides."""
    return join_nodes(graph, types, order_groups)


def order_groups(graph: Graph, types: TypeCache) -> tuple[list[int], dict[int, Group]]:
    """Return the nodes in an order in which each group is one unit, and the groups by the product."""
    groups = find_groups(graph, readers := find_readers(graph))
    while not isinstance(order := order_units(graph, groups), list):
        before, after, (_, limit) = groups[order]
        first = f"not {op_name(graph.nodes[before[-1]].op)} before it: ops between read it"
        groups[order] = [], after, (first, limit)
    live = {product: results_of(graph, [*before, *after], readers) for product, (before, after, _) in groups.items()}
    return order, {product: group_of(graph, types, product, groups[product], live[product]) for product in groups}


def find_groups(graph: Graph, readers: Mapping[Value, Sequence[int]]) -> dict[int, Members]:
    """Return the groups of a graph by the number of the product: first all ops after products, then the ops before."""
    products = [i for i, node in enumerate(graph.nodes) if isinstance(node.op, MatMul) and not refusal(graph, node)]
    others, after = dict[int, str](), dict[int, tuple[list[int], str]]()
    for product in products:
        after[product] = ops_after(graph, product, readers, others)
        others |= dict.fromkeys(after[product][0], "in the group of another product")
    groups: dict[int, Members] = {}
    for product in products:
        members, last = after[product]
        entries = dict.fromkeys((v.node for v in reads_of(graph, members[1:])), "read by the ops after the product")
        before, first = ops_before(graph, product, readers, entries | others)
        others |= dict.fromkeys(before, "in the group of another product")
        groups[product] = before, members, (first, last)
    return groups


def refusal(graph: Graph, node: Node) -> str:
    """Return why no kernel runs a product, or "" if it is of up to 8 rows and a weight that a kernel divides.

    The weight is bf16, or packed by a scheme that the kernel has and decoded as bf16.
    """
    (x, weight), leaf = map(graph.type, node.inputs[:2]), graph.nodes[node.inputs[1].node].op
    if not isinstance(node.op, MatMul) or node.op.contract != 1 or node.op.precision != "default":
        return "not a plain product with a weight [out, in]"
    if not isinstance(leaf, Param) or weight.rank != 2 or weight.symbols or x.symbols:
        return "not a product with one matrix"
    if (count := row_count(graph, node)) not in range(1, MAX_ROWS + 1):
        return f"{count} rows, more than {MAX_ROWS}"
    if not x.dtype == weight.dtype == jnp.bfloat16:
        return f"{short_name(x.dtype)} and {short_name(weight.dtype)}, not bf16"
    if (scheme := refused_scheme(graph, node, 1)) is None:
        return ""
    is_known = scheme in VECTORS
    return f"no tiles of {weight.shape[0]} x {weight.shape[1]}" if is_known else f"none decodes {scheme}"


def row_count(graph: Graph, product: Node) -> int:
    """Return the number of rows that a product multiplies."""
    x = graph.type(product.inputs[0])
    return math.prod(map(int, x.shape[:-1]))


def refused_scheme(graph: Graph, product: Node, parts: int) -> str | None:
    """Return the scheme for which the kernel does not divide the weight of a product, "" for none; or None.

    The weight is packed or not, as it may be decoded when loaded.
    """
    leaf, weight = graph.nodes[product.inputs[1].node].op, graph.type(product.inputs[1])
    assert isinstance(leaf, Param)
    schemes = dict.fromkeys((*(packing_of(program) or "" for program in leaf.programs), ""))
    count = row_count(graph, product)
    return next((scheme for scheme in schemes if tiling(weight, parts, scheme, count) is None), None)


def tiling(weight: TensorType, parts: int, scheme: str, count: int) -> Any:
    """Return the tiling of a weight that is packed by a scheme, or not packed, for so many rows; see `find_tiling`."""
    rows, columns = map(int, weight.shape)
    if count > 1:
        return find_rows_tiling(rows, columns, parts, scheme, count)
    return find_packed_tiling(rows, columns, parts, scheme) if scheme else find_tiling(rows, columns, parts)


def ops_after(
    graph: Graph, product: int, readers: Mapping[Value, Sequence[int]], others: Mapping[int, str]
) -> tuple[list[int], str]:
    """Return the product and the ops after it that join its group, the most with one result; and why not the next op.

    Args:
        graph: the graph.
        product: the number of the product.
        readers: the nodes that read a value.
        others: why some nodes cannot join.
    """
    nodes, best, reason = graph.nodes, [product], ""
    size, width = nodes[product].types[0].size, int(nodes[product].types[0].shape[-1])
    first = readers[Value(product)]
    split = nodes[number := first[0]].op if len(first) == 1 and first[0] >= 0 else None
    members = best
    if isinstance(split, SplitLast) and split.sizes == (width // 2,) * 2:
        if refused_scheme(graph, nodes[product], 2) is not None:
            return best, "not split_last after it: no tiles of half the weight"
        members, size = [product, number], size // 2
    for number in range(members[-1] + 1, len(nodes)):
        if any(v.node in members for v in nodes[number].inputs):
            reason = others.get(number) or kernel_refusal(graph, nodes[number], size, reductions=False)
            reason = f"more than {MAX_OPS} ops" if len(members) > MAX_OPS else reason
            if reason:
                break
            members = [*members, number]
            if len(results_of(graph, members, readers)) == 1:
                best = members
    if len(best) < len(members):
        blocked, number = nodes[number].op, members[len(best)]
        has_halves = bool(reason) and isinstance(nodes[number].op, SplitLast)
        reason = f"one result needs {op_name(blocked)}: {reason}" if has_halves else "other ops read its operands"
    return best, f"not {op_name(nodes[number].op)} after it: {reason}" if reason else ""


def ops_before(
    graph: Graph, product: int, readers: Mapping[Value, Sequence[int]], others: Mapping[int, str]
) -> tuple[list[int], str]:
    """Return the ops before a product that join its group, in order, and why not the next; arguments as in `ops_after`.

    A group of several rows has only ops with results that no other node reads.
    """
    x, weight = graph.nodes[product].inputs[:2]
    size, count = int(graph.type(weight).shape[1]), row_count(graph, graph.nodes[product])
    limit = f"{size} columns of several rows, more than {MAX_COLUMNS}" if count > 1 and size > MAX_COLUMNS else ""
    members, pending, reason = set[int](), [x.node], ""
    while pending:
        number = pending.pop(0)
        if number in members or not isinstance(op := graph.nodes[number].op, Mir):
            continue
        refused = limit or others.get(number) or (f"more than {MAX_OPS} ops" if len(members) == MAX_OPS else "")
        if count > 1 and not members.union([product]).issuperset(readers[Value(number)]):
            refused = refused or "other ops read it"
        if refused := refused or kernel_refusal(graph, graph.nodes[number], size, True, count):
            reason = reason or f"not {op_name(op)} before it: {refused}"
            continue
        members.add(number)
        pending += [v.node for v in graph.nodes[number].inputs]
    return sorted(members), reason


def kernel_refusal(graph: Graph, node: Node, size: int, reductions: bool, count: int = 1) -> str:
    """Return why a node does not run in the kernel, or "" if it is an op of rows of `size` entries and single numbers.

    Args:
        graph: the graph.
        node: the node.
        size: the entries of a row.
        reductions: whether the kernel has whole rows, which it can reduce.
        count: how many rows the kernel has, for an op on each.
    """
    if not isinstance(node.op, Mir) or len(node.types) != 1:
        return "not one op with one result"
    types = tuple(one_row(graph.type(v), count) for v in node.inputs)
    if any(t.symbols for t in types):
        return "a size that is not known"
    if count > 1 and node.types[0].shape not in [graph.type(v).shape for v in node.inputs]:
        return NOT_BY_ROWS
    if not all(t.size == size or is_constant(graph, v) for t, v in zip(types, node.inputs, strict=True)):
        return f"operands of other sizes than {size}"
    whole_types = tuple(graph.type(v) for v in node.inputs)
    if not is_by_rows(node.op, whole_types, types, count):
        return NOT_BY_ROWS
    return op_refusal(node.op, types, size, reductions)


@functools.lru_cache(maxsize=4096)
def is_by_rows(op: Mir, whole: tuple[TensorType, ...], one: tuple[TensorType, ...], count: int) -> bool:
    """Return whether an op on operands of the types `whole` is the op on each of `count` rows, of the types `one`."""
    if count == 1:
        return True
    try:
        of_all, of_one = (jax.make_jaxpr(op.eval)(*map(struct, types)) for types in (whole, one))
    except Exception:  # its function is of another number of rows
        return False
    return is_same_by_rows(of_all, of_one, count)


def one_row(t: TensorType, count: int) -> TensorType:
    """Return the type of one row of an array of so many rows, or the type itself of one that all rows have."""
    is_rows = t.rank > 1 and not t.symbols and math.prod(map(int, t.shape[:-1])) == count
    return TensorType((*(1 for _ in t.shape[:-1]), t.shape[-1]), t.dtype) if is_rows else t


def is_constant(graph: Graph, value: Value) -> bool:
    """Return whether a value is one constant number, which becomes part of a group."""
    return isinstance(graph.nodes[value.node].op, Constant) and graph.type(value).size == 1


@functools.lru_cache(maxsize=4096)
def op_refusal(op: Mir, types: tuple[TensorType, ...], size: int, reductions: bool) -> str:
    """Return `kernel_refusal` for an op with operands of these types."""
    if isinstance(op, AllReduce | AllGather):
        return "it joins devices"
    if not types or not all(is_float(t.dtype) for t in types):
        return "no floats"
    jaxpr = jax.make_jaxpr(op.eval)(*map(struct, types))
    if [math.prod(a.shape) for a in jaxpr.out_avals] != [size] or any(np.size(c) != 1 for c in jaxpr.consts):
        return f"a result or constants of other sizes than {size}"
    name = unsupported_primitive(jaxpr.jaxpr, size, reductions)
    return f"the kernel has no {name}" if name else ""


def struct(t: TensorType) -> jax.ShapeDtypeStruct:
    """Return the shape and the dtype of a static type."""
    return jax.ShapeDtypeStruct(tuple(map(int, t.shape)), t.dtype)


def results_of(graph: Graph, members: Sequence[int], readers: Mapping[Value, Sequence[int]]) -> list[Value]:
    """Return the values of some nodes that other nodes read, in order."""
    values = (Value(number, i) for number in members for i in range(len(graph.nodes[number].types)))
    return [v for v in values if any(reader not in members for reader in readers[v])]


def order_units(graph: Graph, groups: Mapping[int, Members]) -> list[int] | int:
    """Return the nodes in an order in which groups are one unit each, named by its product, after all it reads.

    If there is none, return the product of a group with ops before it that is part of a cycle.
    """
    unit_of = {number: product for product, group in groups.items() for part in group[:2] for number in part}
    order, started, ended = list[int](), set[int](), set[int]()
    for root in range(len(graph.nodes)):
        stack = [unit_of.get(root, root)]
        while stack:
            unit = stack[-1]
            if unit in ended:
                stack.pop()
                continue
            members = [number for part in groups[unit][:2] for number in part] if unit in groups else [unit]
            reads = {unit_of.get(v.node, v.node) for number in members for v in graph.nodes[number].inputs}
            missing = sorted(reads - ended - {unit})
            cyclic = next((u for u in missing if u in started), None)
            if cyclic is not None:
                return next(u for u in (cyclic, unit, *reversed(stack)) if u in groups and groups[u][0])
            if missing:
                started.add(unit)
                stack.append(missing[0])
            else:
                ended.add(unit)
                order.append(unit)
    return order


def group_of(graph: Graph, types: TypeCache, product: int, members: Members, live: Sequence[Value]) -> Group:
    """Return the group of a product; `live` are the results that other nodes read."""
    before, after, limits = members
    nodes, origin = graph.nodes, graph.nodes[product].origin
    weight = nodes[product].inputs[1]
    rows = reads_of(graph, before) if before else [nodes[product].inputs[0]]
    entries = [v for v in reads_of(graph, after[1:]) if v.node not in after]
    operands = [*rows, weight, *entries]
    body = Builder(f"{graph.name}.group", types, origin)
    inputs = [body(BodyInput(i, type=graph.type(v))) for i, v in enumerate(operands)]
    inner = dict(zip([*rows, weight], inputs, strict=False))
    for value in (v for number in (*before, *after) for v in nodes[number].inputs):
        if isinstance(constant := nodes[value.node].op, Constant) and is_constant(graph, value):
            inner[value] = body.leaf(constant)
    for number in (*before, *after):
        body.copy(nodes[number], number, inner)
        if number == product:  # a value that ops on both sides of the product read is two operands
            inner.update(zip(entries, inputs[len(rows) + 1 :], strict=True))
    outputs = [v for v in live if v.node not in before] + [v for v in live if v.node in before]
    op = KernelGroup(body.finish([inner[v] for v in outputs]), len(rows), limits)
    return Group(op, operands, {v: i for i, v in enumerate(outputs)}, origin)


def reads_of(graph: Graph, members: Sequence[int]) -> list[Value]:
    """Return the distinct values that some nodes read and do not compute, in order."""
    reads = dict.fromkeys(v for number in members for v in graph.nodes[number].inputs)
    return [v for v in reads if v.node not in members and not is_constant(graph, v)]


# -- the kernel of a group ---------------------------------------------------------------------


def run_group(op: KernelGroup, *arrays: Any, interpret: Any = None) -> tuple[Any, ...]:
    """Compute a group by its kernel; `interpret` as in `matvec`."""
    body, rows = op.body, op.num_rows
    packed_weight = arrays[rows] if isinstance(arrays[rows], PackedWeight) else None
    weight, scheme = (arrays[rows], "") if packed_weight is None else (packed_weight.arrays, packed_weight.scheme)
    spec = kernel_of(GroupKey(tuple((n.op, n.inputs, n.types) for n in body.nodes), body.outputs, rows, scheme))
    if isinstance(spec.tiling, RowsTiling):
        count = row_count(body, body.nodes[op.product])
        entries = [a.reshape(count, -1) for a in arrays[rows + 1 :]]
        operands = [a.reshape(count, -1) if math.prod(a.shape[:-1]) == count else a.ravel() for a in arrays[:rows]]
        results = multiply_rows(spec, weight, operands, entries, interpret)
    else:
        results = matvec(spec, weight, arrays[:rows], arrays[rows + 1 :], interpret)
    return tuple(r.reshape(tuple(map(int, t.shape))) for r, t in zip(results, body.output_types, strict=True))


@dataclass(frozen=True)
class GroupKey:
    """What a group computes: equal groups, of different layers, have one kernel.

    Attributes:
        nodes: op, operands and types of each node of the body.
        outputs: the outputs of the body.
        num_rows: as in `KernelGroup`.
        scheme: the scheme of the weight, "" if it is not packed.
    """

    nodes: tuple[tuple[Any, tuple[Value, ...], tuple[TensorType, ...]], ...]
    outputs: tuple[Value, ...]
    num_rows: int
    scheme: str = ""


@functools.lru_cache(maxsize=256)
def kernel_of(key: GroupKey) -> Matvec:
    """Return the kernel of a group, with its two functions traced."""
    nodes = tuple(Node(op, inputs, types) for op, inputs, types in key.nodes)
    body = Graph("group", nodes, key.outputs)
    product = KernelGroup(body, key.num_rows).product
    operands = body_inputs(body)
    rows, entries = operands[: key.num_rows], operands[key.num_rows + 1 :]
    kept_values = [v for v in key.outputs if v.node < product]
    results = [v for v in key.outputs if v.node >= product]
    is_split = product + 1 < len(nodes) and isinstance(nodes[product + 1].op, SplitLast) and len(results) == 1
    is_split = is_split and results[0].node > product + 1
    parts = [Value(product + 1, i) for i in range(2)] if is_split else [Value(product)]

    def prologue(*arrays: Any) -> tuple[Any, ...]:
        values = dict(zip(rows, arrays, strict=True))
        run_nodes(nodes[:product], values)
        return tuple(values[v] for v in (nodes[product].inputs[0], *kept_values))

    def epilogue(*arrays: Any) -> tuple[Any, ...]:
        values = {Value(i): jnp.asarray(n.op.array) for i, n in enumerate(nodes) if isinstance(n.op, Constant)}
        values.update(zip((*parts, *entries), arrays, strict=True))
        run_nodes(nodes[parts[0].node + 1 :], values, parts[0].node + 1)
        return tuple(values[v] for v in results)

    count = row_count(body, nodes[product])
    before = jax.make_jaxpr(prologue)(*(struct(one_row(body.type(v), count)) for v in rows))
    after = jax.make_jaxpr(epilogue)(*(struct(body.type(v)) for v in (*parts, *entries)))
    weight_tiling = tiling(body.type(operands[key.num_rows]), len(parts), key.scheme, count)
    return Matvec(weight_tiling, KernelTrace(before), KernelTrace(after))
