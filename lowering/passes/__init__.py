"""MIR passes: valid in, valid out. `PASSES` is the list, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.lowering.passes.cse import cse
from rlx_jax.lowering.passes.dce import dce
from rlx_jax.lowering.passes.fold import constant_folding
from rlx_jax.lowering.passes.fuse_matmul import fuse_matmul_bias_act

Pass = Callable[[Graph, TypeCache], Graph]

PASSES: dict[str, Pass] = {
    "cse": cse,
    "constant_folding": constant_folding,
    "fuse_matmul_bias_act": fuse_matmul_bias_act,
    "dce": dce,  # last: it takes away what the others left unread
}
"""By the names that a profile uses: its `passes` table for cleaning up, `fusion.disable` for the others."""

CLEANING = ("cse", "constant_folding", "dce")

FUSION = {
    "cpu": ("fuse_matmul_bias_act",),
    "cuda": ("fuse_matmul_bias_act",),
    "rocm": ("fuse_matmul_bias_act",),
    "tpu": ("fuse_matmul_bias_act",),
}
"""The fusion passes that each target wants."""


def fusion_passes(target: str, unfuse: bool, disable: Collection[str]) -> tuple[str, ...]:
    """The fusion passes for `target`, less those to `disable`. Where regions are to be unfused, none are marked."""
    idle = "mark_elementwise_regions" if unfuse else "unfuse_elementwise_regions"
    return tuple(name for name in FUSION[target] if name != idle and name not in disable)
