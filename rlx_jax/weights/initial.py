"""`initial_params`: random parameters for a flow without a checkpoint. The op that reads a weight defines them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import quote
from rlx_jax.ir.graph import Graph, Node, Param
from rlx_jax.ir.operands import Normal
from rlx_jax.ir.param import Dequantized, Key, Program, keys_of, stored_keys
from rlx_jax.ir.types import Init, TensorType, init_weight

# Number of random values that are generated for each smaller weight; see `_is_small`.
SMALL_SIZE = 2**15


def initial_params(
    graph: Graph, leaves: Mapping[str, Program], key: jax.Array, inits: Mapping[str, Init] | None = None
) -> dict[str, jax.Array]:
    """Return initialized parameters by name.

    Matrices are normal with standard deviation 1/√fan_in, norms 1 (minus their offset), biases 0. Pure JAX:
    `jax.eval_shape` gives the shapes alone, and `jax.jit` with `out_shardings` initializes every leaf on its devices.

    Args:
        graph: the flow's HIR with its composites expanded.
        leaves: the programs of the parameters, from the Layout.
        key: the PRNG key.
        inits: initializers by checkpoint key, which replace the defaults.
    """
    readers: dict[str, tuple[Node, int]] = {}
    for inner, node in graph.walk():
        for operand_index, value in enumerate(node.inputs):
            op = inner.nodes[value.node].op
            if isinstance(op, Param):
                for name in (k for program in op.programs for k in keys_of(program)):
                    readers.setdefault(name, (node, operand_index))
    in_layout = {k.key: k.type for program in leaves.values() for k in stored_keys(program)}
    # In the graph's order, so that values do not depend on which weights the layout fuses.
    stored = {name: in_layout[name] for name in _stored_names(graph) if name in in_layout}
    keys = dict(zip(stored, _split(key, max(len(stored), 1)), strict=False))
    custom_inits = inits or {}
    values = {
        name: init_weight(custom_inits[name], keys[name], t, f"weight {quote(name)}")
        if name in custom_inits
        else _init_weight(*readers[name], t, keys[name])
        for name, t in stored.items()
    }
    return {name: _assemble(program, values) for name, program in leaves.items()}


def initial_weights(
    graph: Graph, weight_keys: Collection[str], key: jax.Array, inits: Mapping[str, Init]
) -> dict[str, jax.Array]:
    """Return the weights of a flow with the checkpoint keys `weight_keys`, initialized as in `initial_params`."""
    stored = _stored_names(graph)
    return initial_params(graph, {name: stored[name] for name in stored if name in weight_keys}, key, inits)


def _stored_names(graph: Graph) -> dict[str, Key]:
    """Return what a graph's parameters read of a checkpoint by key, in the graph's order."""
    return {k.key: k for leaf in graph.params() for program in leaf.programs for k in stored_keys(program)}


def _assemble(program: Program, values: Mapping[str, jax.Array]) -> jax.Array:
    """Return the leaf that a program assembles from initialized checkpoint tensors."""
    if isinstance(program, Dequantized):
        return _assemble(program.of, values)
    if isinstance(program, Key):
        return values[program.key]
    value: jax.Array = program.join(*(_assemble(part, values) for part in program.parts))
    return value


def _init_weight(node: Node, operand_index: int, t: TensorType, key: jax.Array) -> jax.Array:
    """Initialize one weight as required by `node`, which reads it as operand number `operand_index`.

    Stored 64-bit types are initialized in 32 bits.
    """
    dtype = jax.dtypes.canonicalize_dtype(t.dtype)
    initial = node.op.initial(operand_index, t)
    small = _is_small(t.size, key)
    if not isinstance(initial, Normal):
        return _put_with_key(np.full(t.shape, initial, dtype), key) if small else jnp.full(t.shape, initial, dtype)
    scale = float(initial.fan_in) ** -0.5
    if small:
        flat = jax.device_get(jax.random.normal(key, (SMALL_SIZE,), jnp.float32))[: t.size]
        return _put_with_key((flat.reshape(t.shape) * scale).astype(dtype), key)
    normal: jax.Array = jax.random.normal(key, t.shape, jnp.float32) * scale
    return normal.astype(dtype)


def _is_small(size: int, key: jax.Array) -> bool:
    """Whether a weight is sliced from `SMALL_SIZE` random values instead of being generated in its own shape.

    One program for all small shapes saves compile time: a program for each shape of a small model takes longer to
    compile than the model. The result is the same, as with partitionable threefry the first values do not depend on the
    number of values.
    """
    partitionable: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return size <= SMALL_SIZE and partitionable and not isinstance(key, jax.core.Tracer)


def _put_with_key(value: np.ndarray[Any, Any], key: jax.Array) -> jax.Array:
    """Return an array on the devices of the key if the key is committed to some, else on the default device."""
    placed: jax.Array = jax.device_put(value, key.sharding if key.committed else None)
    return placed


def _split(key: jax.Array, count: int) -> list[jax.Array]:
    """Return the keys of `jax.random.split` as a list."""
    keys = jax.random.split(key, count)
    if isinstance(keys, jax.core.Tracer):
        return list(keys)
    # The keys are separated on the host, which saves a device operation for each.
    kind = str(jax.random.key_impl(key))
    return [
        jax.random.wrap_key_data(_put_with_key(w, key), impl=kind) for w in jax.device_get(jax.random.key_data(keys))
    ]
