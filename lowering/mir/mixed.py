"""Mixed precision: a MIR pass that gives every op the dtype of its class, and leaves everything around it in f32.

Parameters, inputs, state, what enters and leaves a region, and outputs stay f32, so gradients do too. Integers and
bools are left alone. `precision.compute` is another thing: it rewrites the blocks, and parameters are stored in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from rlx_jax.ir.graph import Builder, Graph, Mir, Node, TypeCache, Value
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.carried import carried, written_as_read
from rlx_jax.lowering.mir.dce import dce

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)

POLICIES: dict[str, Mapping[str, np.dtype[Any]]] = {
    "always_f16": {"compute": F16, "reduction": F16, "elementwise": F16, "movement": F16},
    "auto_mixed_conservative": {"compute": F16, "reduction": F32, "elementwise": F16, "movement": F16},
    "auto_mixed": {"compute": F16, "reduction": F16, "elementwise": F16, "movement": F16},
    "auto_mixed_bf16": {"compute": BF16, "reduction": BF16, "elementwise": BF16, "movement": BF16},
}
"""The dtype of each class of ops. Norms and softmax take their statistics in f32 by their own definition, so
`always_f16` and `auto_mixed` are the same program here."""


def mixed(graph: Graph, policy: str, types: TypeCache, classes: Mapping[str, np.dtype[Any]] | None = None) -> Graph:
    """`op(x)` → `cast_f32(op(cast(x)))`, where a cast of a cast back is the value itself. Casts are shared.

    `policy` is one of `POLICIES`, or `custom`: then `classes` has the dtype of each class.
    """
    dtypes = (classes or {}) if policy == "custom" else POLICIES[policy]

    def enter(old: Graph) -> Rewrite:
        kept = carried(old)
        known: dict[tuple[Value, np.dtype[Any]], Value] = {}

        def to(b: Builder, value: Value, dtype: np.dtype[Any]) -> Value:
            made = b.nodes[value.node]
            if isinstance(made.op, CastTo) and b.type(made.inputs[0]).dtype == dtype:
                return made.inputs[0]
            if b.type(value).dtype == dtype or not is_float(b.type(value).dtype):
                return value
            if (value, dtype) not in known:
                known[value, dtype] = b(CastTo(dtype), value)
            return known[value, dtype]

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            op = node.op
            if not isinstance(op, Mir) or number in kept or op.traits.numeric == "state":
                return None  # a cache is written in place, as it is
            if isinstance(op, CastTo) and op.dtype != F32:
                return None  # to the dtype of a cache
            dtype = dtypes[op.traits.numeric]
            first = len(inputs) if op.traits.narrows is None else op.traits.narrows
            results = b.add(op, *(to(b, v, dtype) if i < first else v for i, v in enumerate(inputs)))
            return tuple(to(b, r, F32) for r in results)

        return fn

    # Where every reader takes the narrow value, the cast back is dead.
    return dce(written_as_read(rewrite(graph, enter, types, f"mixed_{policy}"), types), types)
