"""Rewrite an f32 program to another compute dtype, and pin the precision of its products.

A flow is always written in f32. Floating parameters, inputs and constants enter in the compute dtype; ops take
reductions and softmax in f32 by their own definition; floating outputs leave as f32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    TypeCache,
    Value,
    constant,
)
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.pointwise import CastTo, FullLike
from rlx_jax.ir.ops.shape import Reshape
from rlx_jax.ir.param import cast
from rlx_jax.ir.rewrite import Rewrite, everywhere, rewrite
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.carried import carried, written_as_read
from rlx_jax.lowering.mir.dce import dce

F32 = np.dtype(np.float32)


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
    computed = {b.type(v).dtype for v, f, o in zip(inputs, floats, before, strict=True) if f and not _follows(o)}
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


def _follows(op: Op) -> bool:
    return isinstance(op, Constant | Param)


def _cast(b: Builder, value: Value, before: Op, dtype: np.dtype[Any]) -> Value:
    if b.type(value).dtype == dtype:
        return value
    if isinstance(before, Constant):
        return b.leaf(constant(before.array, dtype))
    return b(CastTo(dtype), value)


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
    outputs = [
        b(CastTo(F32), v) if is_float(graph.type(v).dtype) and graph.type(v).dtype != F32 else v for v in graph.outputs
    ]
    return b.finish(outputs, graph.output_names)


def pin_matmul(graph: Graph, precision: str, types: TypeCache) -> Graph:
    """Set the precision of every product, whatever jax's global configuration says."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op: Any = node.op  # one of those that have a field `precision`
        pinned = isinstance(op, Mir) and op.traits.pinned
        return b.add(replace(op, precision=precision), *inputs) if pinned else None

    return rewrite(graph, everywhere(fn), types, "pin_matmul")
