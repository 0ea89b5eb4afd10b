"""What a profile means for one model: every `auto` resolved. The only place that reads a `CompileProfile`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from rlx_jax.buckets import Buckets
from rlx_jax.built import Buildable, BuiltModel
from rlx_jax.errors import LevelError, ProfileError, RlxWarning, did_you_mean, listing, quote
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.param import WeightSource
from rlx_jax.ir.types import as_dtype, is_float
from rlx_jax.lowering.passes import CLEANING, PASSES, fusion_passes
from rlx_jax.lowering.plan import Plan
from rlx_jax.profiles import CompileProfile, Precision


@dataclass(frozen=True)
class Settings:
    """A profile, resolved for one flow, one target and one program: plain values for passes, Layout and plan."""

    target: str
    policy: str
    compute: np.dtype[Any]
    mixed: str
    stored: np.dtype[Any] | None
    matmul: str
    passes: tuple[str, ...]
    verbose: bool
    assert_clean: bool
    merge: bool
    weight_layout: str
    scan: bool
    remat: str
    attention: str
    kv: np.dtype[Any] | None
    buckets: Buckets
    donate_state: bool
    donate_inputs: tuple[str, ...]
    compiler_options: tuple[tuple[str, str | bool | int | float], ...]


def choose_settings(built: BuiltModel, profile: CompileProfile | None, merge: bool, program: str) -> Settings:
    """By the given profile, else the flow's own, else `auto`; by its plan for a module at LIR.

    Raises:
        LevelError: a profile for a module at LIR.
    """
    if built.plan is None:
        profile = profile or built.profile or CompileProfile()
        return settings_for(profile, built.source, built.keys_read, merge, program)
    if profile is not None:
        raise LevelError(f"{built.name}: a module at lir is planned and takes no profile; compile its into_mir()")
    return settings_of(built.plan)


def settings_for(
    profile: CompileProfile, source: WeightSource | None, keys: Iterable[str], merge: bool, program: str = "forward"
) -> Settings:
    """Resolve every `auto`.

    Args:
        merge: what the caller wants where the profile leaves it open.
        program: the program that the model is opened for. Training scans its layers and may recompute them.

    Raises:
        ProfileError: settings that contradict each other.
    """
    target = profile.fusion.target if profile.fusion.target != "auto" else default_target()
    backend = getattr(profile.backend, target)
    precision = profile.precision
    roll, train = profile.layers.roll, program == "train"
    return Settings(
        target=target,
        policy=profile.fusion.policy,
        compute=compute_dtype(precision, target, source, keys),
        mixed=mixed_policy(precision, target),
        stored=None if precision.weights == "keep" else as_dtype(precision.weights),
        matmul=precision.matmul,
        passes=passes_for(profile, target),
        verbose=profile.passes.verbose,
        assert_clean=profile.fusion.assert_clean,
        merge=merge if backend.merge == "auto" else bool(backend.merge),
        weight_layout=backend.weight_layout,
        scan=(train or target == "tpu") if roll == "auto" else roll == "scan",
        remat=profile.layers.remat if train else "none",
        attention=profile.attention.implementation,
        kv=None if precision.kv == "auto" else as_dtype(precision.kv),
        buckets=Buckets.ordered(**{f.name: getattr(profile.buckets, f.name) for f in fields(Buckets)}),
        donate_state=profile.donation.state,
        donate_inputs=profile.donation.inputs,
        compiler_options=tuple(sorted(backend.compiler_options.items())),
    )


def passes_for(profile: CompileProfile, target: str) -> tuple[str, ...]:
    """The passes that run, in order."""
    backend = getattr(profile.backend, target)
    skip = profile.fusion.skip or backend.skip_fusion
    names = {name for name in CLEANING if getattr(profile.passes, name)}
    unfuse = target == "cpu" if backend.unfuse_regions == "auto" else bool(backend.unfuse_regions)
    names.update(() if skip else fusion_passes(target, unfuse, profile.fusion.disable))
    return tuple(name for name in PASSES if name in names)


def settings_of(plan: Plan) -> Settings:
    """What is left to choose for a program at LIR: nothing. It runs as its plan says."""
    return Settings(
        target=plan.target,
        policy="direct",
        compute=np.dtype(np.float32),  # the dtype of flows: nothing is rewritten
        mixed="none",
        stored=None,
        matmul="default",
        passes=(),
        verbose=False,
        assert_clean=False,
        merge=False,
        weight_layout="auto",
        scan=plan.scan,
        remat=plan.remat,
        attention=plan.implementation,
        kv=None,
        buckets=Buckets(),
        donate_state=plan.donate_state,
        donate_inputs=plan.donate_inputs,
        compiler_options=tuple(sorted(plan.compiler_options.items())),
    )


def default_target() -> str:
    """The platform JAX runs on: `cpu`, `cuda`, `rocm` or `tpu`."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def mixed_policy(precision: Precision, target: str) -> str:
    """The mixed policy by name, or `none`.

    Raises:
        ProfileError: a compute dtype other than f32 beside it: one rewrites the whole program, the other parts.
    """
    if precision.mixed == "none":
        return "none"
    if precision.compute in ("bf16", "f16"):
        raise ProfileError(
            f"precision.mixed = '{precision.mixed}' narrows some ops of a program in f32, and precision.compute = "
            f"'{precision.compute}' all of it; set one of them"
        )
    if precision.mixed != "auto":
        return precision.mixed
    return "auto_mixed_bf16" if target == "tpu" else "auto_mixed"


def compute_dtype(precision: Precision, target: str, source: WeightSource | None, keys: Iterable[str]) -> np.dtype[Any]:
    """The dtype of activations. `auto`: f32 on the CPU and with a mixed policy; elsewhere the dtype that most of
    the weights' bytes have."""
    f32 = np.dtype(np.float32)
    if precision.compute != "auto":
        return as_dtype(precision.compute)
    if target == "cpu" or source is None or precision.mixed != "none":
        return f32
    held: dict[np.dtype[Any], int] = {}
    for spec in (source.spec(key) for key in keys):
        if is_float(spec.dtype):
            held[spec.dtype] = held.get(spec.dtype, 0) + spec.size * spec.dtype.itemsize
    most = max(held, key=lambda d: held[d], default=f32)
    return most if most.itemsize == 2 else f32


# -- settings that do not fit the program ------------------------------------------------------


def check_inputs(names: tuple[str, ...], flow: Buildable) -> None:
    """Inputs that the profile names are inputs of the flow.

    Raises:
        ProfileError: with a suggestion.
    """
    known = [i.name for i in flow.inputs]
    for name in names:
        if name not in known:
            raise ProfileError(
                f"donation.inputs: {flow.name} has no input {quote(name)}; it has {listing(known)}"
                f"{did_you_mean(name, known)}"
            )


def warn_without_effect(settings: Settings, name: str, mir: Graph) -> None:
    """A warning for each setting that has nothing to act on in this program."""
    nodes = [node for _, node in mir.walk()]
    if settings.remat != "none" and not any(node.op.regions() for node in nodes):
        warnings.warn(
            f"{name}: layers.remat = {settings.remat!r} has no effect: no layers repeat", RlxWarning, stacklevel=4
        )
    if settings.attention == "cudnn" and not any(isinstance(node.op, AttentionOp) for node in nodes):
        warnings.warn(
            f"{name}: attention.implementation = 'cudnn' has no effect: there is no attention", RlxWarning, stacklevel=4
        )
