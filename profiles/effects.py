"""When a setting has nothing to act on: the conditions that rows of the schema refer to, and the warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx_jax.errors import RlxWarning, listing
from rlx_jax.profiles.check import Options, rows

# Why a setting that needs something has no effect in a program without it.
REASONS = {
    "floats": "nothing is computed in floating point",
    "float parameters": "there is no floating parameter",
    "products": "there is no matrix product",
    "ids": "no op reads a table by ids",
    "experts": "there is no mixture of experts",
    "attention": "there is no attention",
    "linears": "there is no Linear",
    "layers": "no layers repeat",
    "blocks": "no block has a better rule than its own expansion",
    "merged": "no two projections of one input can be merged",
}


@dataclass(frozen=True)
class Facts:
    """What the settings of one flow of a model can act on; `rlx_jax.compiler.pipeline` collects it.

    Attributes:
        has: what the program that was built first contains, names of `REASONS` and "recurrence", "window", "state".
        programs: those that calls of the model run. caches: whether one of them has cached keys and values.
        serves: requests of every size come in from the host, and are padded.
        passes: the passes that run for some program of the model, but for `fusion.disable`.
        axes: the names of the mesh's axes, None without a mesh.
        refusals: why layers that look alike are no region. no_kernels: why the package's kernels do not run here.
    """

    name: str
    profile: Any  # a CompileProfile, whose rows refer to this module
    target: str
    has: frozenset[str]
    programs: tuple[str, ...]
    caches: bool
    serves: bool
    passes: frozenset[str]
    axes: tuple[str, ...] | None
    refusals: tuple[str, ...]
    no_kernels: str

    def runs(self) -> str:
        """The programs, as a reason names them."""
        return f"this model runs {', '.join(self.programs)}"


# Why a value of a setting has nothing to act on; empty if it has.
Idle = Callable[[Any, Facts], str]


def always(value: Any, facts: Facts) -> str:
    """It changes every program, or how every program is made."""
    return ""


def needs(what: str) -> Idle:
    """Idle in a program that does not contain `what`, a name of `REASONS`."""
    reason = REASONS[what]
    return lambda value, facts: "" if what in facts.has else reason


def disabled(value: Any, facts: Facts) -> str:
    """Switching off a pass that does not run changes nothing: named one by one, as the others may."""
    idle = [name for name in value if name not in facts.passes]
    return f"{listing(idle)} would not run here" if idle else ""


def narrowed(value: Any, facts: Facts) -> str:
    """A policy narrows floating numbers, and `custom` narrows what `precision.classes` says."""
    if "floats" not in facts.has:
        return REASONS["floats"]
    classes = facts.profile.precision.classes
    return "precision.classes is f32 for all" if value == "custom" and classes == type(classes)() else ""


def custom_alone(value: Any, facts: Facts) -> str:
    """Dtypes of classes are those of the policy `custom`."""
    return "" if facts.profile.precision.mixed == "custom" else "precision.mixed is not 'custom'"


def cached(value: Any, facts: Facts) -> str:
    """The dtype of cached keys and values needs a cache, and attention that fills it."""
    if not facts.caches and "explicit" not in facts.programs:  # whose cache is inputs and outputs
        return f"only prefill, extend and explicit have cached keys and values, and {facts.runs()}"
    return "" if "attention" in facts.has else REASONS["attention"]


def stateful(value: Any, facts: Facts) -> str:
    """What is donated is the state."""
    return "" if facts.caches or "state" in facts.has else f"there is no state, and {facts.runs()}"


def donated(value: Any, facts: Facts) -> str:
    """Only a program that donates its state is checked."""
    return stateful(value, facts) or ("" if facts.profile.donation.state else "donation.state is false")


def consumed(value: Any, facts: Facts) -> str:
    """Donated inputs lend their memory on the device to outputs; requests are on the host."""
    # Whether an output can take an input's memory depends on sizes, and is reported where they are known.
    return "requests come from the host, and nothing of theirs is on the device" if facts.serves and value else ""


def scanned(value: Any, facts: Facts) -> str:
    """A loop over layers needs a region; `unroll` and `auto` mean something without one. With the first reason why
    layers that look alike are none."""
    if value != "scan" or "layers" in facts.has:
        return ""
    return "; ".join((REASONS["layers"], *facts.refusals[:1]))


def remat(value: Any, facts: Facts) -> str:
    """Activations are recomputed for gradients, a layer at a time."""
    if "train" not in facts.programs:
        return f"only the program train recomputes anything, and {facts.runs()}"
    return "" if "layers" in facts.has else REASONS["layers"]


def padded(value: Any, facts: Facts) -> str:
    """Sizes of requests are padded to; a compiled model pads nothing, but its `on_recompile` may refuse other sizes."""
    if not facts.serves and facts.profile.buckets.on_recompile == "allow":
        return "this model pads nothing, and buckets.on_recompile allows every size"
    return ""


def padded_cache(value: Any, facts: Facts) -> str:
    """`buckets.context` are slots of a cache."""
    if facts.caches or "state" in facts.has:
        return padded(value, facts)
    return f"only prefill and extend have a cache, and {facts.runs()}"


def spared(value: Any, facts: Facts) -> str:
    """`buckets.spare` are slots of a ring beside its window, and only layers with a window have rings."""
    if not facts.caches:
        return f"only prefill and extend have rings, and {facts.runs()}"
    return "" if "window" in facts.has else "no layer attends in a window"


def recompiled(value: Any, facts: Facts) -> str:
    """Refused is what is in no list, or compiles after warm-up, which only models that serve requests have."""
    buckets = facts.profile.buckets
    lists = buckets.prompt or buckets.batch or buckets.context
    return "" if facts.serves or lists else "no list of buckets says what is foreign"


def divided(value: Any, facts: Facts) -> str:
    """Roles are divided over the axes of a mesh; a role that is divided over none stays whole."""
    if facts.axes is None:
        return "there is no mesh"
    return f"the mesh has the axes {listing(facts.axes)}" if value and not set(value) & set(facts.axes) else ""


def merged(value: Any, facts: Facts) -> str:
    """Merging needs projections that fit together; without it every projection stays separate."""
    return REASONS["merged"] if value and "merged" not in facts.has else ""


def left(value: Any, facts: Facts) -> str:
    """The fusion passes rewrite nothing, on any backend."""
    return "the fusion passes leave their ops to XLA, which fuses them itself"


def kernels(value: Any, facts: Facts) -> str:
    """The package's kernels run experts and recurrences, where they were measured, on one device."""
    return facts.no_kernels if facts.has & {"experts", "recurrence"} else "there are no experts and no recurrence"


def generated(value: Any, facts: Facts) -> str:
    """The loop on the device is that of `generate`."""
    return "" if facts.serves and facts.caches else f"only a CausalLM generates, and {facts.runs()}"


# -- the warning -------------------------------------------------------------------------------


def idle_settings(facts: Facts) -> Mapping[str, tuple[Any, str]]:
    """The settings that were set and have nothing to act on: value and reason by place."""
    found = {}
    for place, row, value in rows(facts.profile):
        if value == row.default or place == "name":  # a name changes nothing
            continue
        backend = place.split(".")[1] if place.startswith("backend.") else facts.target
        if backend != facts.target:
            found[place] = value, f"it is for {backend}, and the target is {facts.target}"
        elif reason := row.idle(value, facts):
            found[place] = value, reason
    return found


def warn_of_idle(flows: Sequence[Facts], stacklevel: int) -> None:
    """Warn of each setting that has nothing to act on in any program of any flow of the model."""
    first, *others = map(idle_settings, flows)
    names = ", ".join(facts.name for facts in flows)
    for place, (value, reason) in first.items():
        if all(place in idle for idle in others):
            shown = dict(value) if isinstance(value, Options) else list(value) if isinstance(value, tuple) else value
            message = f"{names}: {place} = {shown!r} has no effect: {reason}"
            warnings.warn(message, RlxWarning, stacklevel=stacklevel + 1)
