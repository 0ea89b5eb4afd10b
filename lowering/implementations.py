"""The implementations of ops that have more than their `eval`, and which of them a program takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.contract import MatMul
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.lowering.attention import choose_attention, cudnn
from rlx_jax.lowering.choices import Call, Choice
from rlx_jax.lowering.products import choose_products, row

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": lambda op, *arrays: op.eval(*arrays),
    "cudnn": cudnn,
    "row": row,
}
"""How to run an op, by the name of the implementation; each equals `eval`."""

CHOSEN = (AttentionOp, MatMul, FusedMatMulBiasAct)
"""The ops that may have a choice."""


def choose_all(graph: Graph, target: str, attention: str, differentiable: bool = True) -> dict[Call, Choice]:
    """The implementation of every attention of a program with static sizes, and of products where `eval` loses.

    Raises:
        UnsupportedError: see `choose_attention`.
    """
    return choose_attention(graph, target, attention, differentiable) | choose_products(graph, target)
