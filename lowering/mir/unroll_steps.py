"""How many tokens a user's step takes in one turn of its loop, where the flow does not say."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir.graph import Builder, Graph, Node, TypeCache, Value
from rlx_jax.ir.ops.recurrent import TokenScan
from rlx_jax.ir.rewrite import everywhere, rewrite

SMALL = 64  # equations of a step that is written out
TURNS = 8
"""On a GPU each turn of a loop is launched by itself. One H200, 8 rows of 512 tokens, 1 against 8 tokens a turn: an
Elman cell of width 1024 4.1 and 2.8 ms, a mean 5.2 and 1.7 ms, fast weights of 128 × 128 10.4 and 1.9 ms. On CPU it is
no gain: 12.0 and 11.8, 0.4 and 1.0, 1.2 and 1.4 ms for smaller ones."""


def unroll_steps(graph: Graph, types: TypeCache) -> Graph:
    """token_scan(…) → token_scan(…, unroll=8), for steps of few equations"""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if not isinstance(op, TokenScan) or op.unroll is not None or len(op.step.jaxpr.eqns) > SMALL:
            return None
        return b.add(replace(op, unroll=TURNS), *inputs)

    return rewrite(graph, everywhere(fn), types, "unroll_steps")
