"""MIR passes: valid in, valid out. `PASSES` is the list, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.lowering.passes.cse import cse
from rlx_jax.lowering.passes.dce import dce
from rlx_jax.lowering.passes.fold import constant_folding
from rlx_jax.lowering.passes.fuse_matmul import fuse_matmul_bias_act
from rlx_jax.lowering.passes.fuse_residual import fuse_residual_layer_norm, fuse_residual_rms_norm
from rlx_jax.lowering.passes.fuse_swiglu import fuse_swiglu
from rlx_jax.lowering.passes.regions import mark_elementwise_regions, unfuse_elementwise_regions

Pass = Callable[[Graph, TypeCache], Graph]

PASSES: dict[str, Pass] = {
    "cse": cse,
    "constant_folding": constant_folding,
    "fuse_matmul_bias_act": fuse_matmul_bias_act,
    "fuse_residual_layer_norm": fuse_residual_layer_norm,
    "fuse_residual_rms_norm": fuse_residual_rms_norm,
    "fuse_swiglu": fuse_swiglu,
    "mark_elementwise_regions": mark_elementwise_regions,
    "unfuse_elementwise_regions": unfuse_elementwise_regions,
    "dce": dce,  # last: it takes away what the others left unread
}
"""By the names that a profile uses: its `passes` table for cleaning up, `fusion.disable` for the others."""

CLEANING = ("cse", "constant_folding", "dce")

FUSION = tuple(name for name in PASSES if name not in CLEANING)

UNWANTED: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("fuse_swiglu",),
    "rocm": ("fuse_swiglu",),
    "tpu": ("fuse_swiglu", "fuse_residual_rms_norm"),
}
"""The fusion passes that a target does without."""


def fusion_passes(target: str, unfuse: bool, disable: Collection[str]) -> tuple[str, ...]:
    """Those for `target`, less what to `disable`. Where regions are to be unfused, none are marked."""
    idle = "mark_elementwise_regions" if unfuse else "unfuse_elementwise_regions"
    return tuple(name for name in FUSION if name not in (idle, *UNWANTED[target], *disable))
