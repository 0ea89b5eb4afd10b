"""Dtypes of a program: another compute dtype, classes of ops in narrow dtypes, stored parameters, pinned products.

A flow is always written in f32. With a compute dtype, floating parameters, inputs and constants enter in it; ops take
reductions and softmax in f32 by their own definition; floating outputs leave as f32. Mixed precision is a MIR pass: it
gives every op the dtype of its class, and leaves everything around it in f32: parameters, inputs, state, what enters
and leaves a region, and outputs, so that gradients are f32 too. Integers and bools are left alone.

What carries a state, the nodes between the value that a leaf has when a program starts and the one that it gets, keeps
the precision of the leaf, whatever the profile computes in: rounded at every token, a sum would forget what it is made
of.
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
from rlx_jax.ir.rewrite import Rewrite, everywhere, rewrite
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.mir.small import dce

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def compute_in(graph: Graph, dtype: np.dtype[Any], types: TypeCache) -> Graph:
    """The program computing in `dtype`; integers and bools are left alone.

    Some values stay f32 whatever the dtype: logits, rotary tables, masks. Where one of them meets another value,
    elementwise ops and JAX functions run in f32 and return to `dtype`; all other ops take their operands in `dtype`.
    Constants and parameters follow what they meet. What carries a state keeps the dtype of its leaf.
    """

    def enter(old: Graph) -> Rewrite:
        kept = carried(old)

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if isinstance(node.op, Leaf):
                return _leaf(b, node.op, dtype)
            if node.op.regions():
                return None
            if keeps_f32(node.op):
                return b.add(node.op, *(_as_given(b, v) for v in inputs))
            before = [old.nodes[v.node].op for v in node.inputs]
            if number in kept:
                return b.add(node.op, *_all_in(b, inputs, before, kept[number]))
            if isinstance(node.op, CastTo | FullLike) and node.op.dtype == F32:
                return b.add(replace(node.op, dtype=dtype), *inputs)  # written while everything floating was f32
            return _agree(b, node.op, inputs, before, dtype)

        return fn

    return _outputs_in_f32(written_as_read(rewrite(graph, enter, types, "precision"), types), types)


def keeps_f32(op: Op) -> bool:
    """Whether a block takes its operands as they are; one that carries a state does so behind an earlier call too."""
    block = op.block if isinstance(op, hir.Carried) else op
    return isinstance(block, Hir) and block.traits.keeps_f32


def _leaf(b: Builder, op: Leaf, dtype: np.dtype[Any]) -> tuple[Value, ...] | None:
    """A floating parameter, constant or input in `dtype`."""
    if not is_float(op.type.dtype) or isinstance(op, BodyInput):
        return None
    if isinstance(op, Param):
        return (b.leaf(Param(tuple(cast(p, dtype) for p in op.programs), type=op.type.with_dtype(dtype))),)
    if isinstance(op, Constant):
        return (b.leaf(constant(op.array, dtype)),)
    return b.add(CastTo(dtype), b.leaf(op)) if isinstance(op, Input) else None


def _as_given(b: Builder, value: Value) -> Value:
    """An input of the program before it was cast, also where rows of it are read; any other value as it is."""
    node = b.nodes[value.node]
    if isinstance(node.op, Reshape | Gather):
        table = _as_given(b, node.inputs[0])
        return value if table == node.inputs[0] else b(node.op, table, *node.inputs[1:])
    cast_input = isinstance(node.op, CastTo) and isinstance(b.nodes[node.inputs[0].node].op, Input)
    return node.inputs[0] if cast_input else value


def _agree(
    b: Builder, op: Op, inputs: tuple[Value, ...], before: list[Op], dtype: np.dtype[Any]
) -> tuple[Value, ...] | None:
    """Bring floating operands to one dtype."""
    floats = [is_float(b.type(v).dtype) for v in inputs]
    own = [f and not isinstance(o, Constant | Param) for f, o in zip(floats, before, strict=True)]
    computed = {b.type(v).dtype for v, is_own in zip(inputs, own, strict=True) if is_own}
    widens = isinstance(op, Mir) and op.traits.widens
    target = F32 if widens and F32 in computed else dtype
    operands = _all_in(b, inputs, before, target)
    if isinstance(op, hir.Linear | FusedMatMulBiasAct) and op.f32_result:  # a bias is added to the product as it is
        operands[2:] = _all_in(b, inputs[2:], before[2:], F32)
    results = b.add(op, *operands)
    if widens and computed != {F32}:  # a JAX function may cast to f32 by itself
        return tuple(b(CastTo(dtype), r) if b.type(r).dtype == F32 else r for r in results)
    return results


def _all_in(b: Builder, inputs: tuple[Value, ...], before: list[Op], dtype: np.dtype[Any]) -> list[Value]:
    """The operands, the floating ones in `dtype`."""
    pairs = zip(inputs, before, strict=True)
    return [_cast(b, v, op, dtype) if is_float(b.type(v).dtype) else v for v, op in pairs]


def _cast(b: Builder, value: Value, before: Op, dtype: np.dtype[Any]) -> Value:
    if isinstance(before, Constant) and b.type(value).dtype != dtype:
        return b.leaf(constant(before.array, dtype))
    return in_dtype(b, value, dtype)


def store_in(graph: Graph, dtype: np.dtype[Any], types: TypeCache) -> Graph:
    """Keep floating parameters in `dtype` and cast them where they are read, to what the program had."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if isinstance(op, Param) and is_float(op.type.dtype) and op.type.dtype != dtype:
            stored = Param(tuple(cast(p, dtype) for p in op.programs), type=op.type.with_dtype(dtype))
            return (b(CastTo(op.type.dtype), b.leaf(stored)),)
        table = b.nodes[inputs[0].node] if isinstance(op, hir.Embed) else None
        if table is not None and isinstance(table.op, CastTo):  # cast the rows that are read, not the table
            return (b(table.op, b(op, table.inputs[0], inputs[1])),)
        return None

    return dce(rewrite(graph, everywhere(fn), types, "store"), types)


def _outputs_in_f32(graph: Graph, types: TypeCache) -> Graph:
    b = Builder.resume(graph, types)
    outputs = [in_dtype(b, v, F32) if is_float(graph.type(v).dtype) else v for v in graph.outputs]
    return b.finish(outputs, graph.output_names)


def pin_matmul(graph: Graph, precision: str, types: TypeCache) -> Graph:
    """Set the precision of every product, whatever jax's global configuration says."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op: Any = node.op  # one of those that have a field `precision`
        pinned = isinstance(op, Mir) and op.traits.pinned
        return b.add(replace(op, precision=precision), *inputs) if pinned else None

    return rewrite(graph, everywhere(fn), types, "pin_matmul")


# The dtype of each class of ops. Norms and softmax take their statistics in f32 by their own definition, so
# `always_f16` and `auto_mixed` are the same program here.
POLICIES: dict[str, Mapping[str, np.dtype[Any]]] = {
    "always_f16": {"compute": F16, "reduction": F16, "elementwise": F16, "movement": F16},
    "auto_mixed_conservative": {"compute": F16, "reduction": F32, "elementwise": F16, "movement": F16},
    "auto_mixed": {"compute": F16, "reduction": F16, "elementwise": F16, "movement": F16},
    "auto_mixed_bf16": {"compute": BF16, "reduction": BF16, "elementwise": BF16, "movement": BF16},
}


def mixed(graph: Graph, policy: str, types: TypeCache, classes: Mapping[str, np.dtype[Any]] | None = None) -> Graph:
    """`op(x)` → `cast_f32(op(cast(x)))`, where a cast of a cast back is the value itself. Casts are shared.

    `policy` is one of `POLICIES`, or `custom`: then `classes` has the dtype of each class.
    """
    dtypes = (classes or {}) if policy == "custom" else POLICIES[policy]

    def enter(old: Graph) -> Rewrite:
        kept = carried(old)
        known: dict[tuple[Value, np.dtype[Any]], Value] = {}

        def to(b: Builder, value: Value, dtype: np.dtype[Any]) -> Value:
            made = b.nodes[value.node]
            if isinstance(made.op, CastTo) and b.type(made.inputs[0]).dtype == dtype:
                return made.inputs[0]
            if b.type(value).dtype == dtype or not is_float(b.type(value).dtype):
                return value
            if (value, dtype) not in known:
                known[value, dtype] = b(CastTo(dtype), value)
            return known[value, dtype]

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            op = node.op
            if not isinstance(op, Mir) or number in kept or op.traits.numeric == "state":
                return None  # a cache is written in place, as it is
            if isinstance(op, CastTo) and op.dtype != F32:
                return None  # to the dtype of a cache
            dtype = dtypes[op.traits.numeric]
            first = len(inputs) if op.traits.narrows is None else op.traits.narrows
            results = b.add(op, *(to(b, v, dtype) if i < first else v for i, v in enumerate(inputs)))
            return tuple(to(b, r, F32) for r in results)

        return fn

    # Where every reader takes the narrow value, the cast back is dead.
    return dce(written_as_read(rewrite(graph, enter, types, f"mixed_{policy}"), types), types)


T = TypeVar("T")


def carried(graph: Graph) -> dict[int, np.dtype[Any]]:
    """The numbers of those nodes, without the leaves themselves, with the dtype of what they carry.

    A leaf carries on itself, or leaves carry on each other: from one of them to the next, and around. Of layers that
    stand on each other, what an earlier one keeps reaches a later one and never comes back, so that a cache that is
    written in place has one such node. Where one node carries several leaves, it has the widest dtype.
    """
    reads = ((number, node.op) for number, node in enumerate(graph.nodes) if isinstance(node.op, StateRead))
    floats = {op.leaf: number for number, op in reads if is_float(op.type.dtype)}
    writes = {leaf: value.node for leaf, value in graph.writes if leaf in floats}
    readers: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        for value in node.inputs:
            readers[value.node].append(number)
    behind = {leaf: reachable([floats[leaf]], readers.__getitem__) for leaf in writes}
    reached = {leaf: {other for other, number in writes.items() if number in behind[leaf]} for leaf in writes}
    found: dict[int, np.dtype[Any]] = {}
    for leaf, others in reached.items():
        for other in others:
            if leaf not in reachable(reached[other], reached.__getitem__):
                continue
            dtype = graph.nodes[floats[other]].types[0].dtype
            before = reachable([writes[other]], lambda number: [v.node for v in graph.nodes[number].inputs])
            for number in before & behind[leaf] - {floats[leaf]}:
                found[number] = max(found.get(number, dtype), dtype, key=lambda d: d.itemsize)
    return found


def reachable(first: Iterable[T], step: Callable[[T], Iterable[T]]) -> set[T]:
    """All that some reach in any number of steps, themselves included."""
    found: set[T] = set()
    asked = list(first)
    while asked:
        one = asked.pop()
        if one not in found:
            found.add(one)
            asked += step(one)
    return found


def written_as_read(graph: Graph, types: TypeCache) -> Graph:
    """A floating leaf gets the dtype back that it was read in."""
    read = {node.op.leaf: node.types[0] for node in graph.nodes if isinstance(node.op, StateRead)}
    b = Builder.resume(graph, types)
    b.writes = [
        (leaf, in_dtype(b, v, read[leaf].dtype) if leaf in read and is_float(graph.type(v).dtype) else v)
        for leaf, v in graph.writes
    ]
    return b.finish(graph.outputs, graph.output_names)
