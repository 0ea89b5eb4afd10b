"""Random parameters for a flow without a checkpoint. What a weight is follows from the op that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Node, Param
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.param import Key, Program, keys_of
from rlx_jax.ir.types import TensorType
from rlx_jax.weights.execute import load_leaf
from rlx_jax.weights.source import MappingSource


def initial_params(graph: Graph, leaves: Mapping[str, Program], key: jax.Array) -> dict[str, jax.Array]:
    """Leaves by name: matrices normal with deviation 1/√fan_in, norms 1, biases 0.

    `graph` is the flow's HIR with its composites expanded; `leaves` is the Layout's.
    """
    readers: dict[str, tuple[Node, int]] = {}
    for inner, node in graph.walk():
        for place, value in enumerate(node.inputs):
            op = inner.nodes[value.node].op
            if isinstance(op, Param):
                for name in (k for program in op.programs for k in keys_of(program)):
                    readers.setdefault(name, (node, place))
    stored = {k: t for program in leaves.values() for k, t in _stored(program)}
    keys = dict(zip(stored, jax.random.split(key, max(len(stored), 1)), strict=False))
    drawn = {name: _draw(*readers[name], t, keys[name]) for name, t in stored.items()}
    source = MappingSource(drawn)
    return {name: load_leaf(program, source) for name, program in leaves.items()}


def _stored(program: Program) -> list[tuple[str, TensorType]]:
    """Keys of a program with the type they are stored in."""
    if isinstance(program, Key):
        return [(program.key, program.type)]
    parts = program.parts if hasattr(program, "parts") else (program.of,)
    return [found for part in parts for found in _stored(part)]


def _draw(node: Node, place: int, t: TensorType, key: jax.Array) -> np.ndarray[Any, Any]:
    """One weight, by the op that reads it as operand number `place`."""
    op = node.op
    if isinstance(op, hir.Linear | hir.RmsNorm | hir.LayerNorm) and place == 2:
        return np.zeros(t.shape, t.dtype)
    if t.rank < 2:
        adds = isinstance(op, Binary) and op.kind in ("add", "sub")
        return np.zeros(t.shape, t.dtype) if adds else np.ones(t.shape, t.dtype)
    fan_in = t.shape[op.contract] if isinstance(op, hir.Linear) else t.shape[-1]
    normal = jax.random.normal(key, t.shape, jnp.float32) * float(fan_in) ** -0.5
    return np.asarray(normal).astype(t.dtype)
