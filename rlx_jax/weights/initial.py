"""Random parameters for a flow without a checkpoint. What a weight is follows from the op that reads it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Node, Param
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.param import Cast, Concat, Key, Program, Stack, Transposed, keys_of
from rlx_jax.ir.types import TensorType


def initial_params(graph: Graph, leaves: Mapping[str, Program], key: jax.Array) -> dict[str, jax.Array]:
    """Leaves by name: matrices normal with deviation 1/√fan_in, norms 1 (with their offset), biases 0.

    `graph` is the flow's HIR with its composites expanded; `leaves` is the Layout's. Pure JAX: `jax.eval_shape`
    gives the shapes alone, `jax.jit` with `out_shardings` draws every leaf where it will live.
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
    return {name: _assemble(program, drawn) for name, program in leaves.items()}


def _assemble(program: Program, drawn: Mapping[str, jax.Array]) -> jax.Array:
    """The leaf of a program over drawn keys."""
    match program:
        case Key(key=key):
            return drawn[key]
        case Transposed(of=of):
            return _assemble(of, drawn).T
        case Cast(of=of, dtype=dtype):
            return _assemble(of, drawn).astype(dtype)
        case Concat(parts=parts, axis=axis):
            return jnp.concatenate([_assemble(part, drawn) for part in parts], axis)
        case Stack(parts=parts):
            return jnp.stack([_assemble(part, drawn) for part in parts])


def _stored(program: Program) -> list[tuple[str, TensorType]]:
    """Keys of a program with the type they are stored in."""
    if isinstance(program, Key):
        return [(program.key, program.type)]
    parts = program.parts if hasattr(program, "parts") else (program.of,)
    return [found for part in parts for found in _stored(part)]


def _draw(node: Node, place: int, t: TensorType, key: jax.Array) -> jax.Array:
    """One weight, by the op that reads it as operand number `place`. Stored 64-bit types are drawn in 32 bits."""
    op, dtype = node.op, jax.dtypes.canonicalize_dtype(t.dtype)
    if isinstance(op, hir.Linear | hir.RmsNorm | hir.LayerNorm) and place == 2:
        return jnp.zeros(t.shape, dtype)
    if isinstance(op, hir.RmsNorm):
        return jnp.full(t.shape, 1.0 - op.offset, dtype)
    if t.rank < 2:
        adds = isinstance(op, Binary) and op.kind in ("add", "sub")
        return jnp.zeros(t.shape, dtype) if adds else jnp.ones(t.shape, dtype)
    fan_in = t.shape[op.contract] if isinstance(op, hir.Linear) else t.shape[-1]
    normal: jax.Array = jax.random.normal(key, t.shape, jnp.float32) * float(fan_in) ** -0.5
    return normal.astype(dtype)
