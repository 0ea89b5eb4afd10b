"""What a profile means for one model: every `auto` resolved. The only place that reads a `CompileProfile`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.ir.param import WeightSource
from rlx_jax.ir.types import as_dtype, is_float
from rlx_jax.lowering.passes import CLEANING, PASSES, fusion_passes
from rlx_jax.lowering.plan import Plan
from rlx_jax.profiles import CompileProfile


@dataclass(frozen=True)
class Settings:
    """A profile, resolved for one flow, one target and one program: plain values for passes, Layout and plan."""

    target: str
    policy: str
    compute: np.dtype[Any]
    matmul: str
    passes: tuple[str, ...]
    merge: bool
    scan: bool
    remat: str
    donate_state: bool
    compiler_options: tuple[tuple[str, str | bool | int | float], ...]


def settings_for(
    profile: CompileProfile, source: WeightSource | None, keys: Iterable[str], merge: bool, program: str = "forward"
) -> Settings:
    """Resolve every `auto`.

    Args:
        merge: what the caller wants where the profile leaves it open.
        program: the program that the model is opened for. Training scans its layers and may recompute them.
    """
    target = profile.fusion.target if profile.fusion.target != "auto" else default_target()
    backend = getattr(profile.backend, target)
    compute = profile.precision.compute
    dtype = as_dtype(compute) if compute != "auto" else auto_compute(target, source, keys)
    roll, train = profile.layers.roll, program == "train"
    return Settings(
        target=target,
        policy=profile.fusion.policy,
        compute=dtype,
        matmul=profile.precision.matmul,
        passes=passes_for(profile, target),
        merge=merge if backend.merge == "auto" else bool(backend.merge),
        scan=(train or target == "tpu") if roll == "auto" else roll == "scan",
        remat=profile.layers.remat if train else "none",
        donate_state=profile.donation.state,
        compiler_options=tuple(sorted(backend.compiler_options.items())),
    )


def passes_for(profile: CompileProfile, target: str) -> tuple[str, ...]:
    """The passes that run, in order."""
    backend = getattr(profile.backend, target)
    skip = profile.fusion.skip or backend.skip_fusion
    names = {name for name in CLEANING if getattr(profile.passes, name)}
    names.update(() if skip else fusion_passes(target, target == "cpu", profile.fusion.disable))
    return tuple(name for name in PASSES if name in names)


def settings_of(plan: Plan) -> Settings:
    """What is left to choose for a program at LIR: nothing. It runs as its plan says."""
    return Settings(
        target=plan.target,
        policy="direct",
        compute=np.dtype(np.float32),  # the dtype of flows: nothing is rewritten
        matmul="default",
        passes=(),
        merge=False,
        scan=plan.scan,
        remat=plan.remat,
        donate_state=plan.donate_state,
        compiler_options=tuple(sorted(plan.compiler_options.items())),
    )


def default_target() -> str:
    """The platform JAX runs on: `cpu`, `cuda`, `rocm` or `tpu`."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def auto_compute(target: str, source: WeightSource | None, keys: Iterable[str]) -> np.dtype[Any]:
    """f32 on the CPU; elsewhere the dtype that most of the weights' bytes have."""
    f32 = np.dtype(np.float32)
    if target == "cpu" or source is None:
        return f32
    held: dict[np.dtype[Any], int] = {}
    for spec in (source.spec(key) for key in keys):
        if is_float(spec.dtype):
            held[spec.dtype] = held.get(spec.dtype, 0) + spec.size * spec.dtype.itemsize
    most = max(held, key=lambda d: held[d], default=f32)
    return most if most.itemsize == 2 else f32
