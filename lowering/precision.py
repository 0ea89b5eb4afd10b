"""Rewrite an f32 program to another compute dtype, and pin the precision of its products.

A flow is always written in f32. Floating parameters, inputs and constants enter in the compute dtype; ops take
reductions and softmax in f32 by their own definition; floating outputs leave as f32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.ir.graph import (
    Builder,
    Constant,
    Graph,
    Input,
    Node,
    Param,
    TypeCache,
    Value,
    constant,
    everywhere,
    rewrite,
)
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.contract import BatchMatMul, FusedMatMulBiasAct, MatMul
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.param import cast
from rlx_jax.ir.types import is_float

F32 = np.dtype(np.float32)
PRODUCTS = (MatMul, BatchMatMul, FusedMatMulBiasAct, AttentionOp)


def compute_in(graph: Graph, dtype: np.dtype[Any], types: TypeCache) -> Graph:
    """The program computing in `dtype`; integers and bools are left alone."""
    if dtype == F32:
        return graph

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if isinstance(op, Param) and is_float(op.type.dtype):
            programs = tuple(cast(p, dtype) for p in op.programs)
            return (b.leaf(Param(programs, type=op.type.with_dtype(dtype))),)
        if isinstance(op, Constant) and is_float(op.type.dtype):
            return (b.leaf(constant(op.array, dtype)),)
        if isinstance(op, Input) and is_float(op.type.dtype):
            return b.add(CastTo(dtype), b.leaf(op))
        if isinstance(op, CastTo) and op.dtype == F32:  # written while everything floating was f32
            return b.add(CastTo(dtype), *inputs)
        return None

    return _outputs_in_f32(rewrite(graph, everywhere(fn), types, "precision"), types)


def _outputs_in_f32(graph: Graph, types: TypeCache) -> Graph:
    b = Builder(graph.name, types)
    b.nodes, b.inputs, b.writes = list(graph.nodes), list(graph.inputs), list(graph.writes)
    outputs = [
        b(CastTo(F32), v) if is_float(graph.type(v).dtype) and graph.type(v).dtype != F32 else v for v in graph.outputs
    ]
    return b.finish(outputs, graph.output_names)


def pin_matmul(graph: Graph, precision: str, types: TypeCache) -> Graph:
    """Set the precision of every product, whatever jax's global configuration says."""
    if precision == "default":
        return graph

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return b.add(replace(node.op, precision=precision), *inputs) if isinstance(node.op, PRODUCTS) else None

    return rewrite(graph, everywhere(fn), types, "pin_matmul")
