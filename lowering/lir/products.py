"""Which implementation runs each product with a weight. `MatMul.eval` is the meaning, and XLA runs it as it is.

One row against a matrix reads the matrix once and computes next to nothing. Measured on one H200, bf16, µs, cuBLAS and
a multiplication summed up by XLA, weights `[out, in]`: 16384 x 2048 19.2 and 16.8, 2048 x 8192 10.1 and 9.3,
128256 x 2048 131 and 117.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from rlx_jax.device import Device
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.lowering.lir.plan import Call, Choice

AnyArray = Any


def choose_product(call: Call, device: Device, wanted: str) -> Choice | None:
    """`row` for a product of one row with a weight `[out, in]`. `wanted` is auto, xla or row; the others XLA runs as it
    does."""
    op, (x, *_) = call
    assert isinstance(op, MatMul | FusedMatMulBiasAct)
    if wanted == "xla" or (wanted == "auto" and device.kind != "cuda"):
        return None
    if op.contract == 0 or math.prod(int(n) for n in x.shape[:-1]) > 1:
        return None
    return Choice("row", "asked for" if wanted == "row" else "one row: cuBLAS is slower")


def row(op: MatMul | FusedMatMulBiasAct, x: AnyArray, w: AnyArray, *bias: AnyArray) -> AnyArray:
    """The op for one row: x `[1, …, K]`, w `[N, K]`, products and their sum in f32."""
    if isinstance(op, FusedMatMulBiasAct):
        return op.finish(row(op.product, x, w), *bias)
    y = (w.astype(jnp.float32) * x.astype(jnp.float32).reshape(1, -1)).sum(axis=1)
    return y.reshape(*x.shape[:-1], -1).astype(jnp.float32 if op.f32_result else x.dtype)
