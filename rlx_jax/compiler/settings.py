"""This module resolves a `CompileProfile` for one model: `settings_for` replaces every `auto` by a value.

No other module of the compiler interprets a profile.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from rlx_jax.blocks.lora import SCOPES, has_adapters
from rlx_jax.compiler.buckets import DIMENSIONS, MAX_CHUNK, Buckets
from rlx_jax.dataclasses import dataclass, fields, replace
from rlx_jax.device import Device, named_device, running_device
from rlx_jax.errors import GraphError, ProfileError, UnsupportedError, check_names, listing, quote
from rlx_jax.ir.packed import PackedSpec, stored_bytes
from rlx_jax.ir.paths import Path, path_text
from rlx_jax.ir.types import as_dtype, is_float
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.lir import implementations
from rlx_jax.lowering.lir.plan import Plan
from rlx_jax.lowering.sharding import ModelSharding
from rlx_jax.profiles import Backend, Backends, BucketTable, CompileProfile, Precision
from rlx_jax.profiles.check import Options, field_types, iter_settings
from rlx_jax.program import Buildable, Built
from rlx_jax.trace.block_selection import BlockPattern

# How blocks become tensor ops: "direct" uses the better rule of an op if there is one, "fusable" its own expansion.
FUSION_POLICIES = ("direct", "fusable")

# The passes that the table `passes` of a profile switches on and off.
CLEANING = ("cse", "constant_folding", "dce")

# Tokens per row that one call of the generation loop produces, if it is not 16. On an H200, 16 steps hide the cost of a
# call on the host, and 32 gain nothing. On a CPU a step takes longer than a call, and users see tokens sooner with 4.
DEFAULT_STEPS = {"cpu": 4}
# Options of XLA with kernels over a mesh. Sums over devices end a CUDA graph, and by default XLA makes none of fewer
# than 5 kernels. A step of 8B on two H200 takes 3.14 ms in place of 3.26. With 64 rows, where no kernel multiplies bf16
# weights, it took 4.52 in place of 4.47; the other option is for these, where Triton divides sums of products into two
# kernels: 4.23 ms, and 4.29 in a later run with the kernel of attention, where the first option was not measured again.
# Nor were fewer rows than 64, and more than kernels multiply.
MESH_OPTIONS = {"xla_gpu_graph_min_graph_size": 2}
MANY_ROWS, MANY_ROWS_OPTIONS = 64, {"xla_gpu_enable_triton_gemm": False}
# Options of XLA for steps that train in bf16 on an H100 or H200. XLA moves ops into Triton's kernel of a product after
# them, and they stay alone if it then takes cuBLAS, as it mostly does; it joins q, k and v, to split them again. A step
# of Llama 1B on one H200 takes 237.0 ms in place of 238.5, and compiles in 11 s in place of 25; of adapters of
# 8 such layers 143.6 in place of 143.2, in 6 s in place of 26.
TRAIN_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}


@dataclass(frozen=True)
class LoopSettings:
    """The settings of the generation loop.

    Attributes:
        steps: the number of steps in one call.
        stop_early: whether a call ends when every row has ended.
        joined: steps of an iteration that does not end early, of which XLA joins small kernels.
    """

    steps: int
    stop_early: bool
    joined: int = 1

    def __str__(self) -> str:
        return f"{self.steps} steps a dispatch, {'or until every row has ended' if self.stop_early else 'always'}"


@dataclass(frozen=True)
class Settings:
    """A profile, resolved for one flow, one device and one program.

    Attributes:
        device: the device to compile for.
        profile: the profile, which settings without `auto` are read from. The other attributes are resolved from it.
        compute: the dtype of activations.
        mixed: the mixed precision policy, or "none".
        classes: the dtype of each class of ops, for the policy "custom".
        quantized: the schemes by which weights are packed while they are loaded, by a glob of block paths.
        param_dtype: the dtype of floating parameters; None for the dtype that the program computes in.
        disabled_passes: the names of passes that do not run.
        disabled_kinds: the kinds of passes that do not run.
        merge: whether projections of one input are fused.
        plan: how programs run, without the parts that depend on a program: its `choices`, and the inputs that it can
            reuse.
        kv_dtype: the dtype of cached keys and values, or of their codes (int8, float8_e4m3fn); None for the dtype that
            they are computed in.
        buckets: the sizes that requests are padded to.
        loop: the settings of the generation loop.
        model_sharding: the sharding rules of the mesh, which is no part of a profile; None on one device.
        max_positions: the argument of a `CausalLM` or an `Encoder` that overrides the limit of the flow; None without.
    """

    device: Device
    profile: CompileProfile
    compute: np.dtype[Any]
    mixed: str
    classes: tuple[tuple[str, np.dtype[Any]], ...]
    param_dtype: np.dtype[Any] | None
    quantized: tuple[tuple[BlockPattern, str], ...]
    disabled_passes: frozenset[str]
    disabled_kinds: frozenset[str]
    merge: bool
    plan: Plan
    kv_dtype: np.dtype[Any] | None
    buckets: Buckets
    loop: LoopSettings
    model_sharding: ModelSharding | None = None
    max_positions: int | None = None

    @property
    def rounds_cache(self) -> bool:
        """Return whether caches round keys and values: their own chunk reads them unrounded, and later ones rounded."""
        return self.buckets.max_chunk is not None

    @property
    def target(self) -> str:
        """Return the platform to compile for."""
        return self.device.kind

    def scheme_at(self, path: Path) -> str | None:
        """Return the scheme by which the weights of a block are packed, or "keep"; None if no glob selects it.

        Adapters stay as they are.

        Raises:
            ProfileError: two globs select the block.
        """
        if not SCOPES.isdisjoint(path):
            return None
        matches = [(pattern.text, scheme) for pattern, scheme in self.quantized if pattern.matches(path)]
        if len(matches) > 1:
            globs = listing([text for text, _ in matches])
            raise ProfileError(f"precision.weights: block {quote(path_text(path))} matches {globs}; expected one match")
        return matches[0][1] if matches else None

    @property
    def backend(self) -> Backend:
        """Return the profile's table for the platform."""
        backend_table: Backend = getattr(self.profile.backend, self.target)
        return backend_table

    @property
    def check_ids(self) -> bool:
        """Return whether ids in arrays on an accelerator are checked too."""
        return self.profile.checks.ids == "all"

    @property
    def sharding(self) -> dict[str, tuple[str, ...]]:
        """Return the mesh axes of each role."""
        return {f.name: getattr(self.profile.sharding, f.name) for f in fields(self.profile.sharding)}


def choose_settings(built: Built, profile: CompileProfile | None, merge: bool, program: str) -> Settings:
    """Return the settings for a built flow: from its profile (see `choose_profile`), or for a module at LIR its plan.

    Args:
        built: the built flow.
        profile: the profile that the caller passes, if any.
        merge: whether projections are fused if the profile leaves it open.
        program: the program that the model is compiled for.

    Raises:
        GraphError: a profile for a module at LIR.
    """
    if built.plan is None:
        return settings_for(choose_profile(built, profile), built.source, built.keys_read, merge, program)
    if profile is not None:
        raise GraphError(f"{built.name}: a module at lir is planned and takes no profile; compile its into_mir()")
    # A planned module leaves nothing to choose.
    return replace(lowering_settings(target=built.plan.target), plan=replace(built.plan, choices={}, unread=()))


def choose_profile(built: Built, profile: CompileProfile | None) -> CompileProfile:
    """Return the profile that the caller passes, else the profile of the flow, else `auto`."""
    return profile or built.profile or CompileProfile.auto()


def with_target(profile: CompileProfile, target: str, where: str, kind: str = "") -> CompileProfile:
    """Return a profile for a target, the platform or device; "auto" is the target of the profile.

    Args:
        profile: the profile.
        target: the target.
        where: the argument that has the target, for messages.
        kind: the platform of a target that is a device; a profile for it fits.

    Raises:
        ProfileError: the profile is for another target.
    """
    own = profile.fusion.target
    if "auto" not in (own, target) and own not in (target, kind):
        raise ProfileError(
            f"profile: its fusion.target is {quote(own)}, and {where} is {quote(target)}; use that, or leave the "
            "target 'auto'"
        )
    return profile.replace(fusion={"target": own if target == "auto" else target})


def settings_for(
    profile: CompileProfile, source: WeightSource | None, keys: Iterable[str], merge: bool, program: str = "forward"
) -> Settings:
    """Return the settings of a profile, with every `auto` resolved.

    Args:
        profile: the profile.
        source: the weights; None if there are none.
        keys: the keys of the weights that the flow reads.
        merge: whether projections are fused if the profile leaves it open.
        program: the program that the model is compiled for. `train` may scan its layers and recompute them.

    Raises:
        ProfileError: settings that contradict each other.
    """
    device = running_device() if profile.fusion.target == "auto" else named_device(profile.fusion.target)
    target = supported_platform(device)
    backend, precision, train = getattr(profile.backend, target), profile.precision, program == "train"
    quantized = quantized_blocks(precision.weights)
    if train and quantized and not has_adapters(keys):
        raise ProfileError(
            f"precision.weights = {precision.weights!r}: packed weights have no gradient; train floating ones ('keep', "
            "'f32', 'bf16'), or adapters over packed ones (rlx_jax.lora)"
        )
    kv_dtype = None if precision.kv == "auto" else as_dtype({"fp8": "f8_e4m3"}.get(precision.kv, precision.kv))
    table = {f.name: getattr(profile.buckets, f.name) for f in fields(BucketTable)}
    table |= {name: tuple(sorted({*table[name]})) for name in DIMENSIONS}
    compute = compute_dtype(precision, target, source, keys)
    # Packed weights have no gradient: without adapters they are decoded, so that all weights are trained.
    packed = precision.weights not in ("f32", "bf16") and (
        not train or has_adapters(keys) and (bool(quantized) or has_packed(source, keys))
    )
    rounds = kv_dtype is not None and kv_dtype.itemsize < compute.itemsize
    return Settings(
        device=device,
        profile=profile,
        compute=compute,
        mixed=mixed_policy(precision, target),
        classes=tuple((f.name, as_dtype(getattr(precision.classes, f.name))) for f in fields(precision.classes)),
        param_dtype=as_dtype(precision.weights) if precision.weights in ("f32", "bf16") else None,
        quantized=quantized,
        disabled_passes=frozenset((*profile.fusion.disable, *(n for n in CLEANING if not getattr(profile.passes, n)))),
        disabled_kinds=frozenset({"fusion"} if profile.fusion.skip or backend.skip_fusion else ()),
        merge=merge if backend.merge == "auto" else bool(backend.merge),
        plan=_plan(profile, device, train, packed, compute),
        kv_dtype=kv_dtype,
        buckets=Buckets(**table, max_chunk=MAX_CHUNK if rounds else None),
        loop=LoopSettings(
            DEFAULT_STEPS.get(target, 16) if backend.steps_per_dispatch == "auto" else backend.steps_per_dispatch,
            target == "cpu" if backend.stop_early == "auto" else bool(backend.stop_early),
            # Without kernels XLA compiles each layer twice.
            2 if device.has_kernels and implementations.has_mosaic() and backend.kernels != "off" else 1,
        ),
    )


def has_packed(source: WeightSource | None, keys: Iterable[str]) -> bool:
    """Return whether a file has any of the weights in packed blocks."""
    return source is not None and any(isinstance(source.spec(key), PackedSpec) for key in keys if source.has(key))


def _plan(profile: CompileProfile, device: Device, train: bool, packed: bool, compute: np.dtype[Any]) -> Plan:
    """Return how programs run by a profile; arguments as in `settings_for`, `Settings` and `Plan`."""
    target, layers = device.kind, profile.layers
    backend = getattr(profile.backend, target)
    # A scan compiles faster, and unrolled layers run faster: the presets have figures. On a GPU a gradient that
    # computes everything but products again is faster too, and takes a third of the memory.
    scan = target == "tpu" or (train and target != "cuda") if layers.roll == "auto" else layers.roll == "scan"
    remat = ("products" if target == "cuda" else "none") if layers.remat == "auto" else layers.remat
    is_measured = train and device.has_kernels and not packed and compute == as_dtype("bf16")
    default_options = _unnamed(TRAIN_OPTIONS) if is_measured else {}
    return Plan(
        target=target,
        scan=scan,
        remat=remat if train else "none",
        implementation=profile.attention.implementation,
        donate_state=profile.donation.state,
        donate_inputs=profile.donation.inputs,
        strict=profile.donation.strict,
        packed=packed,
        products=backend.products,
        experts=backend.experts,
        kernels=backend.kernels != "off" and not train,  # under a gradient their ops run
        compiler_options=dict(sorted((default_options | dict(backend.compiler_options.entries)).items())),
    )


def _unnamed(options: Mapping[str, int | bool]) -> dict[str, int | bool]:
    """Return the options that `XLA_FLAGS` does not name; options of a program would precede it."""
    named = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if name not in named}


def quantized_blocks(weights: str | Options) -> tuple[tuple[BlockPattern, str], ...]:
    """Return the schemes, or "keep", of the setting `precision.weights` for blocks, each with a glob of their paths."""
    if isinstance(weights, str):
        table: Mapping[str, Any] = {} if weights in ("keep", "f32", "bf16") else {"**": weights}
    else:
        table = weights
    schemes = {"int8": "int8/32", "int4": "int4/32"}
    return tuple((BlockPattern(glob, "at"), schemes.get(scheme, scheme)) for glob, scheme in table.items())


def with_model_sharding(settings: Settings, model_sharding: ModelSharding) -> Settings:
    """Return the settings of a sharded model, in which all devices get an equal number of rows."""
    buckets, plan = replace(settings.buckets, row_multiple=model_sharding.num_shards("batch")), settings.plan
    if settings.device.has_kernels and plan.kernels:
        plan = replace(plan, compiler_options={**_unnamed(MESH_OPTIONS), **plan.compiler_options})
    return replace(settings, model_sharding=model_sharding, buckets=buckets, plan=plan)


def mesh_options(settings: Settings, rows: int, implementations: Collection[str]) -> Mapping[str, Any]:
    """Return the options of XLA for a step over a mesh, as the program of one device.

    Args:
        settings: the settings, with the options of programs over a mesh.
        rows: the rows of the step.
        implementations: the chosen implementations of its ops.
    """
    options, backend = settings.plan.compiler_options, getattr(settings.profile.backend, settings.target)
    # A kernel multiplies packed weights, which Triton would not divide.
    if rows < MANY_ROWS or "packed_tiles" in implementations:
        return options
    defaults = MESH_OPTIONS.keys() - backend.compiler_options
    return {**_unnamed(MANY_ROWS_OPTIONS), **{n: value for n, value in options.items() if n not in defaults}}


def differences(first: Settings, other: Settings) -> list[str]:
    """Return the names of the settings that differ: paths in the profile, or attributes of `Settings`.

    Tables for other backends are ignored.
    """
    row_pairs = zip(iter_settings(first.profile), iter_settings(other.profile), strict=True)
    ignored = ("name", *(f"backend.{name}." for name in field_types(Backends) if name != first.target))
    places = [p for (p, row, a), (_, _, b) in row_pairs if not row.resolved_as and a != b and not p.startswith(ignored)]
    names = (f.name for f in fields(Settings) if f.name != "profile")
    return [*places, *(name for name in names if getattr(first, name) != getattr(other, name))]


@functools.cache
def lowering_settings(policy: str = "direct", target: str = "cpu") -> Settings:
    """Return settings with which only `program` passes run, so that a graph is lowered without optimization."""
    profile = CompileProfile().replace(fusion={"policy": policy, "target": target})
    return replace(
        settings_for(profile, None, (), merge=False),
        disabled_kinds=frozenset({"layout", "fusion", "cleaning"}),
        plan=Plan(target, scan=False, donate_state=False),
    )


def supported_platform(device: Device) -> str:
    """Return the platform of a device, by its name in profiles.

    Raises:
        UnsupportedError: profiles have no table for the platform that JAX runs on.
    """
    platforms = field_types(Backends)
    if device.kind not in platforms:
        raise UnsupportedError(f"JAX runs on {quote(device.kind)}; programs are compiled for {', '.join(platforms)}")
    return device.kind


def mixed_policy(precision: Precision, target: str) -> str:
    """Return the name of the mixed precision policy, or "none".

    Raises:
        ProfileError: a narrow compute dtype too: that would narrow the full program, and the policy only parts of it.
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
    """Return the dtype of activations.

    `auto` is f32 on the CPU and with a mixed policy. Otherwise it is the 16-bit dtype that most bytes of the floating
    weights have, or f32. Packed weights count as bf16, as they have less precision than that.
    """
    f32, bf16 = np.dtype(np.float32), as_dtype("bf16")
    if precision.compute != "auto":
        return as_dtype(precision.compute)
    if target == "cpu" or source is None or precision.mixed != "none":
        return f32
    bytes_by_dtype: dict[np.dtype[Any], int] = {}
    for spec in (source.spec(key) for key in keys):
        dtype = bf16 if isinstance(spec, PackedSpec) and spec.dtype == f32 else spec.dtype
        if is_float(dtype):
            bytes_by_dtype[dtype] = bytes_by_dtype.get(dtype, 0) + stored_bytes(spec)
    most = max(bytes_by_dtype, key=lambda d: bytes_by_dtype[d], default=f32)
    return most if most.itemsize == 2 else f32


def check_inputs(names: tuple[str, ...], flow: Buildable) -> None:
    """Check that the inputs that a profile names (`donation.inputs`) are inputs of the flow.

    Raises:
        ProfileError: one is not; the message has a suggestion.
    """
    input_names = [i.name for i in flow._inputs]
    check_names(names, input_names, f"donation.inputs: {flow.name} has no input", "; it has", ProfileError)


def kernel_refusal(settings: Settings, programs: tuple[str, ...]) -> str:
    """Return why the package's Pallas kernels do not run, "" if they do.

    They run on the devices that they were measured on, over a mesh in steps of decoding, and have no gradient.
    """
    if not settings.device.has_kernels:
        return f"kernels run on H100 and H200, not on {settings.device.name}"
    if settings.model_sharding is not None and "extend" not in programs:
        return "over a mesh only steps of decoding have kernels"
    if not implementations.has_mosaic():
        return f"kernels need jax 0.11, not {jax.__version__}"
    return "training programs have no kernels" if set(programs) == {"train"} else ""


def step_refusal(settings: Settings, program: str) -> str:
    """Return why a step of decoding has no kernels on a GPU; "" if it may have, or the profile switches them off."""
    if program not in ("extend", "verify") or settings.target != "cuda" or not settings.plan.kernels:
        return ""
    if reason := kernel_refusal(settings, ("extend",)):
        return reason
    if program == "verify":
        return "steps that verify drafts have none"
    return "layers run in a scan" if settings.plan.scan else ""


def check_kernels(settings: Settings, name: str, refusal: str) -> None:
    """Check that the profile does not require kernels where none can run, for this reason.

    Raises:
        UnsupportedError: it does; the message begins with the name of the program.
    """
    if refusal and getattr(settings.profile.backend, settings.target).kernels == "on":
        setting = f"backend.{settings.target}.kernels = 'on'"
        raise UnsupportedError(f"{name}: {setting} is not available: {refusal}; with 'auto' XLA's form runs instead")
