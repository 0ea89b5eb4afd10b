"""What a profile means for one model: every `auto` resolved. The only place that reads a `CompileProfile`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rlx_jax.device import Device, named_device, running_device
from rlx_jax.errors import GraphError, ProfileError, UnsupportedError, check_known, quote
from rlx_jax.ir.types import as_dtype, is_float
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.lir.plan import Plan
from rlx_jax.lowering.sharding import Division
from rlx_jax.profiles import Backend, Backends, BucketTable, CompileProfile, Precision
from rlx_jax.profiles.check import field_types, rows
from rlx_jax.program import Buildable, Built

# How blocks become tensor ops: by the better rule of an op where there is one, or by its own expansion.
FUSION_POLICIES = ("direct", "fusable")

# The passes that the profile's table `passes` switches.
CLEANING = ("cse", "constant_folding", "dce")

# Tokens of a row that a call of the generating loop gives, where it is not 16: what a call costs the host hides behind
# 16 steps of an H200, and 32 gained nothing. On a CPU a step is longer than a call, and who waits sees tokens sooner.
STEPS = {"cpu": 4}


# The dimension of a program that each list holds the sizes of.
DIMENSIONS = {"prompt": "seq", "batch": "batch", "context": "context"}


@dataclass(frozen=True)
class Buckets:
    """Sizes, which are put in rising order; an empty list allows every size.

    `on_recompile` is allow, warn or error; `programs` are the compiled programs that are kept, `spare` the slots of a
    ring beside its window. Over a mesh `share` is how many parts the rows are divided into.

    `prompt` counts tokens of a prompt, `batch` rows, `context` slots of a cache.
    """

    prompt: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    on_recompile: str = "allow"
    programs: int = 256
    spare: int = 0
    share: int = 1

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))

    @property
    def largest_chunk(self) -> int | None:
        """The largest bucket for prompts that a cache holds; None without buckets."""
        return max((p for p in self.prompt if not self.context or p <= self.context[-1]), default=None)

    def rows(self, needed: int) -> int:
        """Rows of the program for so many: those of the list, else as many as devices have equal parts of."""
        return smallest(self.batch, needed) or -(-needed // self.share) * self.share

    def ring(self, window: int, context: int | None, spare: int = 0) -> int:
        """Slots of a ring of a layer that attends in a window, in a state of `context` slots, from which `spare` tokens
        may be taken back if that is more than the profile says."""
        return min(context or window, window + max(self.spare, spare))

    def foreign(self, binding: Mapping[str, int]) -> list[str]:
        """The lists that a program's sizes are not in. One token a row is a decoding step, whatever `prompt` says."""
        found = []
        for name, dim in DIMENSIONS.items():
            sizes, size = getattr(self, name), binding.get(dim)
            if sizes and size is not None and size not in sizes and not (dim == "seq" and size == 1):
                found.append(name)
        return found

    def text(self) -> str:
        """The lists, as a message shows them."""
        lists = ((name, getattr(self, name)) for name in DIMENSIONS)
        return ", ".join(f"buckets.{name} = {list(sizes)}" for name, sizes in lists if sizes)


def smallest(sizes: Iterable[int], needed: int) -> int | None:
    """The smallest of `sizes` that holds `needed`; None if none does."""
    return min((size for size in sizes if size >= needed), default=None)


def bucket(size: int, step: int, limit: int | None) -> int:
    """`size` rounded up so that few different sizes are compiled: to a power of two, from `step` on."""
    rounded = step
    while rounded < size:
        rounded *= 2
    return rounded if limit is None else max(size, min(rounded, limit))


@dataclass(frozen=True)
class Loop:
    """How tokens are generated: so many `steps` a call of the loop, which may end before them with its last row."""

    steps: int
    early: bool

    def __str__(self) -> str:
        return f"{self.steps} steps a dispatch, {'or until every row has ended' if self.early else 'always'}"


@dataclass(frozen=True)
class Settings:
    """A profile, resolved for one flow, one device and one program: plain values for passes, Layout, plan and loop.

    profile: the profile itself: a setting without `auto` is read of it. The other fields are settings whose `auto` is
        resolved, or that hang together.
    off: passes that do not run, by name. without: nor those of these kinds.
    classes: the dtypes of the mixed policy `custom`. loop: see the profile's `backend` table.
    plan: how programs run, without what hangs on a program: its `choices`, and which inputs it can reuse.
    """

    device: Device
    profile: CompileProfile
    compute: np.dtype[Any]
    mixed: str
    classes: tuple[tuple[str, np.dtype[Any]], ...]
    stored: np.dtype[Any] | None
    off: frozenset[str]
    without: frozenset[str]
    merge: bool
    plan: Plan
    kv: np.dtype[Any] | None
    buckets: Buckets
    loop: Loop
    division: Division | None = None  # of a mesh, which no profile knows
    max_positions: int | None = None  # an argument of CausalLM and Encoder, which counts before the flow's own

    @property
    def target(self) -> str:
        """The platform that is compiled for."""
        return self.device.kind

    @property
    def backend(self) -> Backend:
        """The profile's table of that platform."""
        found: Backend = getattr(self.profile.backend, self.target)
        return found

    @property
    def check_ids(self) -> bool:
        """Whether ids in arrays on an accelerator are checked, too."""
        return self.profile.checks.ids == "all"

    @property
    def sharding(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each role."""
        return {f.name: getattr(self.profile.sharding, f.name) for f in fields(self.profile.sharding)}


def choose_settings(built: Built, profile: CompileProfile | None, merge: bool, program: str) -> Settings:
    """By the profile that counts; by its plan for a module at LIR.

    Raises:
        GraphError: a profile for a module at LIR.
    """
    if built.plan is None:
        return settings_for(choose_profile(built, profile), built.source, built.keys_read, merge, program)
    if profile is not None:
        raise GraphError(f"{built.name}: a module at lir is planned and takes no profile; compile its into_mir()")
    # Nothing is left to choose: it runs as its plan says.
    return replace(plain(target=built.plan.target), plan=replace(built.plan, choices={}, unread=()))


def choose_profile(built: Built, profile: CompileProfile | None) -> CompileProfile:
    """The given profile, else the flow's own, else `auto`."""
    return profile or built.profile or CompileProfile.auto()


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
    device = running_device() if profile.fusion.target == "auto" else named_device(profile.fusion.target)
    target = supported(device)
    backend = getattr(profile.backend, target)
    precision = profile.precision
    roll, train = profile.layers.roll, program == "train"
    return Settings(
        device=device,
        profile=profile,
        compute=compute_dtype(precision, target, source, keys),
        mixed=mixed_policy(precision, target),
        classes=tuple((f.name, as_dtype(getattr(precision.classes, f.name))) for f in fields(precision.classes)),
        stored=None if precision.weights == "keep" else as_dtype(precision.weights),
        off=frozenset((*profile.fusion.disable, *(n for n in CLEANING if not getattr(profile.passes, n)))),
        without=frozenset({"fusion"} if profile.fusion.skip or backend.skip_fusion else ()),
        merge=merge if backend.merge == "auto" else bool(backend.merge),
        plan=Plan(
            target=device.kind,
            scan=(train or target == "tpu") if roll == "auto" else roll == "scan",
            remat=profile.layers.remat if train else "none",
            implementation=profile.attention.implementation,
            donate_state=profile.donation.state,
            donate_inputs=profile.donation.inputs,
            strict=profile.donation.strict,
            products=backend.products,
            experts=backend.experts,
            kernels=backend.kernels == "auto" and not train,  # a gradient would compute their op again
            compiler_options=dict(sorted(backend.compiler_options.items())),
        ),
        kv=None if precision.kv == "auto" else as_dtype(precision.kv),
        buckets=Buckets(**{f.name: getattr(profile.buckets, f.name) for f in fields(BucketTable)}),
        loop=Loop(
            STEPS.get(target, 16) if backend.steps_per_dispatch == "auto" else backend.steps_per_dispatch,
            target == "cpu" if backend.stop_early == "auto" else bool(backend.stop_early),
        ),
    )


def divided(settings: Settings, division: Division) -> Settings:
    """The settings of a model that is divided over devices, which have equal rows of requests each."""
    return replace(settings, division=division, buckets=replace(settings.buckets, share=division.parts("batch")))


def differences(first: Settings, other: Settings) -> list[str]:
    """The names of what two settings differ in: fields, or places in the profile of what is read of it as it is."""
    both = zip(rows(first.profile), rows(other.profile), strict=True)
    idle = ("name", *(f"backend.{name}." for name in field_types(Backends) if name != first.target))
    places = [p for (p, row, a), (_, _, b) in both if not row.resolved and a != b and not p.startswith(idle)]
    names = (f.name for f in fields(Settings) if f.name != "profile")
    return [*places, *(name for name in names if getattr(first, name) != getattr(other, name))]


@functools.cache
def plain(policy: str = "direct", target: str = "cpu") -> Settings:
    """Settings that change nothing: no pass runs but those that make a program what it is."""
    profile = CompileProfile().replace(fusion={"policy": policy, "target": target})
    return replace(
        settings_for(profile, None, (), merge=False),
        without=frozenset({"layout", "fusion", "cleaning"}),
        plan=Plan(target, scan=False, donate_state=False),
    )


def supported(device: Device) -> str:
    """The platform of a device, as profiles name it.

    Raises:
        UnsupportedError: JAX runs on one that profiles have no table for.
    """
    known = field_types(Backends)
    if device.kind not in known:
        raise UnsupportedError(f"JAX runs on {quote(device.kind)}; programs are compiled for {', '.join(known)}")
    return device.kind


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
    known = [i.name for i in flow._inputs]
    check_known(names, known, f"donation.inputs: {flow.name} has no input", "; it has", ProfileError)
