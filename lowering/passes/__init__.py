"""MIR passes: valid in, valid out. `PASSES` is the list, in the order they run."""

from __future__ import annotations

from collections.abc import Callable

from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.lowering.passes.cse import cse
from rlx_jax.lowering.passes.dce import dce
from rlx_jax.lowering.passes.fold import constant_folding

Pass = Callable[[Graph, TypeCache], Graph]

PASSES: dict[str, Pass] = {"dce": dce, "cse": cse, "constant_folding": constant_folding}
"""By the names that a profile's `passes` table uses."""
