"""Tensor ops as methods, written once for `Emit` and `GraphModule`. Each topic adds its methods to the one before it:

`writer` (appending, constants, any JAX function) → `pointwise` → `along` (reductions) → `shapes` → `indexing` →
`products` → `images` → `rounding` →
`control`.
"""

from __future__ import annotations

from rlx_jax.trace.control import Control
from rlx_jax.trace.writer import V


class Ops(Control[V]):
    """All tensor ops, over the values `V` of whoever writes. `rlx_jax.trace.writer` has the rules."""
