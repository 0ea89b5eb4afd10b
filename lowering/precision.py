"""Passes that set dtypes: the compute dtype, mixed precision, stored parameters, and the precision of products.

A flow is always defined in float32. With a compute dtype, floating parameters, inputs and constants are cast to it
first; ops compute reductions and softmax in float32 by their own definition; floating outputs are cast back to float32.
Mixed precision is a MIR pass: each op computes in the dtype of its class. Everything else stays float32: parameters,
inputs, state, operands and results of regions, and outputs, so that gradients are float32 too. Integers and bools never
change.

The nodes that carry a state, between a leaf's value at the beginning of a program and its new value, keep the precision
of the leaf in every profile. A running sum that is rounded at every token would lose its small terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import (
    BodyInput,
    Builder,
    Constant,
    Graph,
    Hir,
    Input,
    Leaf,
    Mir,
    Node,
    Op,
    Param,
    StateRead,
    TypeCache,
    Value,
    constant,
)
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.pointwise import CastTo, FullLike, in_dtype
from rlx_jax.ir.ops.shape import Reshape
from rlx_jax.ir.param import cast
from rlx_jax.ir.region import Rewrite, everywhere, replace_ops, rewrite
from rlx_jax.ir.types import F32, is_float
from rlx_jax.lowering.mir.small import dce

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def compute_in(graph: Graph, dtype: np.dtype[Any], types: TypeCache) -> Graph:
    """Return the program computing in `dtype`; integers and bools do not change.

    Some values always stay float32: logits, rotary tables, masks. If one of them is combined with another value,
    elementwise ops and JAX functions compute in float32 and cast the result to `dtype`; all other ops cast their
    operands to `dtype`. Constants and parameters get the dtype of the other operands. Nodes that carry a state keep the
    dtype of its leaf.
    """

    def enter(old: Graph) -> Rewrite:
        state_dtypes = state_node_dtypes(old)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Leaf):
                return _cast_leaf(b, node.op, dtype)
            if node.op.regions():
                return None
            if keeps_f32(node.op):
                return b.add(node.op, *(_strip_input_cast(b, v) for v in inputs))
            producers = [old.nodes[v.node].op for v in node.inputs]
            if number in state_dtypes:
                return b.add(node.op, *_cast_operands(b, inputs, producers, state_dtypes[number]))
            if isinstance(node.op, CastTo | FullLike) and node.op.dtype == F32:
                return b.add(replace(node.op, dtype=dtype), *inputs)  # the flow's f32 means the compute dtype
            return _add_in_one_dtype(b, node.op, inputs, producers, dtype)

        return fn

    return _outputs_in_f32(cast_state_writes(rewrite(graph, enter, types, "precision"), types), types)


def keeps_f32(op: Op) -> bool:
    """Return whether a block reads its operands without a cast, also inside `Carried`, which adds its state."""
    block = op.block if isinstance(op, hir.Carried) else op
    return isinstance(block, Hir) and block.traits.keeps_f32


def _cast_leaf(b: Builder, op: Leaf, dtype: np.dtype[Any]) -> tuple[Value, ...] | None:
    """Return a floating parameter, constant or input in `dtype`; None for other leaves."""
    if not is_float(op.type.dtype) or isinstance(op, BodyInput):
        return None
    if isinstance(op, Param):
        return (b.leaf(Param(tuple(cast(p, dtype) for p in op.programs), type=op.type.with_dtype(dtype))),)
    if isinstance(op, Constant):
        return (b.leaf(constant(op.array, dtype)),)
    return b.add(CastTo(dtype), b.leaf(op)) if isinstance(op, Input) else None


def _strip_input_cast(b: Builder, value: Value) -> Value:
    """Return an input of the program without its cast, also if rows of it are gathered; any other value unchanged."""
    node = b.nodes[value.node]
    if isinstance(node.op, Reshape | Gather):
        table = _strip_input_cast(b, node.inputs[0])
        return value if table == node.inputs[0] else b(node.op, table, *node.inputs[1:])
    cast_input = isinstance(node.op, CastTo) and isinstance(b.nodes[node.inputs[0].node].op, Input)
    return node.inputs[0] if cast_input else value


def _add_in_one_dtype(
    b: Builder, op: Op, inputs: tuple[Value, ...], producers: list[Op], dtype: np.dtype[Any]
) -> tuple[Value, ...] | None:
    """Add an op with all floating operands in one dtype, and return its results."""
    floats = [is_float(b.type(v).dtype) for v in inputs]
    is_computed = [f and not isinstance(o, Constant | Param) for f, o in zip(floats, producers, strict=True)]
    computed = {b.type(v).dtype for v, is_value in zip(inputs, is_computed, strict=True) if is_value}
    widens = isinstance(op, Mir) and op.traits.widens
    target = F32 if widens and F32 in computed else dtype
    operands = _cast_operands(b, inputs, producers, target)
    if isinstance(op, hir.Linear | FusedMatMulBiasAct) and op.f32_result:  # the bias is added to the f32 product
        operands[2:] = _cast_operands(b, inputs[2:], producers[2:], F32)
    results = b.add(op, *operands)
    if widens and computed != {F32}:  # a JAX function may cast to f32 by itself
        return tuple(b(CastTo(dtype), r) if b.type(r).dtype == F32 else r for r in results)
    return results


def _cast_operands(b: Builder, inputs: tuple[Value, ...], producers: list[Op], dtype: np.dtype[Any]) -> list[Value]:
    """Return the operands with the floating ones cast to `dtype`."""
    pairs = zip(inputs, producers, strict=True)
    return [_cast(b, v, op, dtype) if is_float(b.type(v).dtype) else v for v, op in pairs]


def _cast(b: Builder, value: Value, producer: Op, dtype: np.dtype[Any]) -> Value:
    """Return a value in `dtype`; a constant of the original program is converted without rounding twice."""
    if isinstance(producer, Constant) and b.type(value).dtype != dtype:
        return b.leaf(constant(producer.array, dtype))
    return in_dtype(b, value, dtype)


def store_in(graph: Graph, dtype: np.dtype[Any], types: TypeCache) -> Graph:
    """Store floating parameters in `dtype`, and cast them to the program's dtype after reading."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if isinstance(op, Param) and is_float(op.type.dtype) and op.type.dtype != dtype:
            param = Param(tuple(cast(p, dtype) for p in op.programs), type=op.type.with_dtype(dtype))
            return (b(CastTo(op.type.dtype), b.leaf(param)),)
        table = b.nodes[inputs[0].node] if isinstance(op, hir.Embed) else None
        if table is not None and isinstance(table.op, CastTo):  # cast the rows that are read, not the table
            return (b(table.op, b(op, table.inputs[0], inputs[1])),)
        return None

    return dce(rewrite(graph, everywhere(fn), types, "store"), types)


def _outputs_in_f32(graph: Graph, types: TypeCache) -> Graph:
    """Return the program with floating outputs cast to float32."""
    b = Builder.resume(graph, types)
    outputs = [in_dtype(b, v, F32) if is_float(graph.type(v).dtype) else v for v in graph.outputs]
    return b.finish(outputs, graph.output_names)


def pin_matmul(graph: Graph, precision: str, types: TypeCache) -> Graph:
    """Set the precision of every product, independently of JAX's global configuration."""

    def pin(op: Any) -> Any:  # ops with the trait `pinned` have a field `precision`
        return replace(op, precision=precision) if op.traits.pinned else op

    return replace_ops(graph, Mir, pin, types, "pin_matmul")


# The dtype of each class of ops. Norms and softmax take their statistics in f32 by their own definition, so
# `always_f16` and `auto_mixed` are the same program here.
POLICIES: dict[str, Mapping[str, np.dtype[Any]]] = {
    "always_f16": {"compute": F16, "reduction": F16, "elementwise": F16, "movement": F16},
    "auto_mixed_conservative": {"compute": F16, "reduction": F32, "elementwise": F16, "movement": F16},
    "auto_mixed": {"compute": F16, "reduction": F16, "elementwise": F16, "movement": F16},
    "auto_mixed_bf16": {"compute": BF16, "reduction": BF16, "elementwise": BF16, "movement": BF16},
}


def mixed_precision(
    graph: Graph, policy: str, types: TypeCache, classes: Mapping[str, np.dtype[Any]] | None = None
) -> Graph:
    """Rewrite `op(x)` → `cast_f32(op(cast(x)))`. Casts are shared, and a cast that undoes another is removed.

    Args:
        graph: the MIR program in float32.
        policy: one of `POLICIES`, or `custom`.
        types: the cache of inferred types.
        classes: the dtype of each class of ops, for `custom`.
    """
    dtypes = (classes or {}) if policy == "custom" else POLICIES[policy]

    def enter(old: Graph) -> Rewrite:
        state_dtypes = state_node_dtypes(old)
        casts: dict[tuple[Value, np.dtype[Any]], Value] = {}

        def cast_to(b: Builder, value: Value, dtype: np.dtype[Any]) -> Value:
            producer = b.nodes[value.node]
            if isinstance(producer.op, CastTo) and b.type(producer.inputs[0]).dtype == dtype:
                return producer.inputs[0]
            if b.type(value).dtype == dtype or not is_float(b.type(value).dtype):
                return value
            if (value, dtype) not in casts:
                casts[value, dtype] = b(CastTo(dtype), value)
            return casts[value, dtype]

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            op = node.op
            if not isinstance(op, Mir) or number in state_dtypes or op.traits.numeric == "state":
                return None  # a cache is written in place, as it is
            if isinstance(op, CastTo) and op.dtype != F32:
                return None  # a cast to the dtype of a cache
            dtype = dtypes[op.traits.numeric]
            num_narrowed = len(inputs) if op.traits.narrows is None else op.traits.narrows
            results = b.add(op, *(cast_to(b, v, dtype) if i < num_narrowed else v for i, v in enumerate(inputs)))
            return tuple(cast_to(b, r, F32) for r in results)

        return fn

    # A cast back to f32 is dead if all readers take the narrow value.
    return dce(cast_state_writes(rewrite(graph, enter, types, f"mixed_{policy}"), types), types)


T = TypeVar("T")


def state_node_dtypes(graph: Graph) -> dict[int, np.dtype[Any]]:
    """Return the nodes that carry a state, by number, each with the dtype of its state leaf.

    A node carries a leaf if it is on a path from the leaf's old value to its new value, or on a cycle of such paths
    through several leaves. The state of an earlier layer influences later layers but not the reverse, so nodes between
    layers carry nothing, and a cache that is written in place has one such node, the write. A node that carries several
    leaves gets their widest dtype.
    """
    reads = ((number, node.op) for number, node in enumerate(graph.nodes) if isinstance(node.op, StateRead))
    floats = {op.leaf: number for number, op in reads if is_float(op.type.dtype)}
    writes = {leaf: value.node for leaf, value in graph.writes if leaf in floats}
    readers: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        for value in node.inputs:
            readers[value.node].append(number)
    reached_nodes = {leaf: reachable([floats[leaf]], readers.__getitem__) for leaf in writes}
    successors = {
        leaf: {reached_leaf for reached_leaf, number in writes.items() if number in reached_nodes[leaf]}
        for leaf in writes
    }
    dtypes: dict[int, np.dtype[Any]] = {}
    for leaf, reached_leaves in successors.items():
        for reached_leaf in reached_leaves:
            if leaf not in reachable(successors[reached_leaf], successors.__getitem__):
                continue  # no way back from the other leaf to this one
            dtype = graph.nodes[floats[reached_leaf]].types[0].dtype
            ancestors = reachable([writes[reached_leaf]], lambda number: [v.node for v in graph.nodes[number].inputs])
            for number in ancestors & reached_nodes[leaf] - {floats[leaf]}:
                dtypes[number] = max(dtypes.get(number, dtype), dtype, key=lambda d: d.itemsize)
    return dtypes


def reachable(first: Iterable[T], step: Callable[[T], Iterable[T]]) -> set[T]:
    """Return everything that is reachable from `first` in any number of steps, including `first`."""
    visited: set[T] = set()
    pending = list(first)
    while pending:
        item = pending.pop()
        if item not in visited:
            visited.add(item)
            pending += step(item)
    return visited


def cast_state_writes(graph: Graph, types: TypeCache) -> Graph:
    """Cast the new values of floating state leaves to the dtype in which the leaves are read."""
    read_types = {node.op.leaf: node.types[0] for node in graph.nodes if isinstance(node.op, StateRead)}
    b = Builder.resume(graph, types)
    b.writes = [
        (leaf, in_dtype(b, v, read_types[leaf].dtype) if leaf in read_types and is_float(graph.type(v).dtype) else v)
        for leaf, v in graph.writes
    ]
    return b.finish(graph.outputs, graph.output_names)
