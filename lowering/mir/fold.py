"""Constant folding."""

from __future__ import annotations

import jax
import numpy as np

from rlx_jax.ir.graph import Builder, Constant, Graph, Mir, Node, TypeCache, Value, constant
from rlx_jax.ir.rewrite import everywhere, rewrite

MAX_FOLDED = 4096  # bytes: a larger result is cheaper to compute than to carry


def constant_folding(graph: Graph, types: TypeCache) -> Graph:
    """Evaluate ops whose operands are all constants, with the evaluator that runs the program."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        operands = [b.nodes[v.node].op for v in inputs]
        if not inputs or not isinstance(node.op, Mir) or not all(isinstance(op, Constant) for op in operands):
            return None
        if not all(t.is_static and t.nbytes <= MAX_FOLDED for t in node.types):
            return None
        with jax.ensure_compile_time_eval():
            out = node.op.eval(*(np.asarray(op.array) for op in operands if isinstance(op, Constant)))
        results = out if isinstance(out, tuple) else (out,)
        return tuple(b.leaf(constant(np.asarray(r), r.dtype)) for r in results)

    return rewrite(graph, everywhere(fn), types, "constant_folding")
