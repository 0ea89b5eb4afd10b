"""Which implementation runs each product with a weight. `MatMul.eval` is the meaning, and XLA runs it as it is.

One row against a matrix reads the matrix once and computes next to nothing. Measured on one H200, bf16, µs, cuBLAS and
a multiplication summed up by XLA, weights `[out, in]`: 16384 x 2048 19.2 and 16.8, 2048 x 8192 10.1 and 9.3,
128256 x 2048 131 and 117.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.contract import MatMul
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.lowering.choices import Call, Choice, call_of

Array = Any


def choose_products(graph: Graph, target: str) -> dict[Call, Choice]:
    """Products of one row with a weight `[out, in]`, on cuda."""
    found: dict[Call, Choice] = {}
    for inner, node in graph.walk():
        if target == "cuda" and isinstance(node.op, MatMul | FusedMatMulBiasAct) and node.op.contract == 1:
            call = call_of(inner, node)
            if math.prod(int(n) for n in call[1][0].shape[:-1]) == 1:
                found[call] = Choice("row", "one row: cuBLAS is slower")
    return found


def row(op: MatMul | FusedMatMulBiasAct, x: Array, w: Array, *bias: Array) -> Array:
    """The op for one row: x `[1, …, K]`, w `[N, K]`, products and their sum in f32."""
    if isinstance(op, FusedMatMulBiasAct):
        return op.finish(row(op.product, x, w), *bias)
    y = (w.astype(jnp.float32) * x.astype(jnp.float32).reshape(1, -1)).sum(axis=1)
    return y.reshape(*x.shape[:-1], -1).astype(jnp.float32 if op.f32_result else x.dtype)
