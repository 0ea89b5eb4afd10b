"""This module decides which settings of a profile have no effect on a model, and warns of them.

The rows of the schema refer to the conditions here. A condition takes the value of a setting and the `ModelFacts` of
a model, and returns the reason why the value has no effect, or "" if it has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RlxWarning, listing
from rlx_jax.profiles.check import Options, iter_settings

# The reason why a setting has no effect, by the feature that the program does not have.
REASONS = {
    "floats": "nothing is computed in floating point",
    "float parameters": "there is no floating parameter",
    "packable": "no matrix of a product consists of complete groups",
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
class ModelFacts:
    """The facts about one flow of a model that decide which settings have an effect.

    `facts_of` of `rlx_jax.compiler.pipeline` collects them.

    Attributes:
        name: the name of the flow.
        profile: its profile.
        target: the platform to compile for.
        features: the features of the first template, names of `REASONS` and "recurrence", "packed", "window", "state".
        programs: the programs that calls of the model run.
        has_cache: whether one of them has cached keys and values.
        serves_requests: whether the model serves requests, which come from the host and are padded.
        passes: the passes that run for some program of the model, whatever the profile switches off; without those
            that are switched off and would change nothing.
        mesh_axes: the names of the mesh's axes; None without a mesh.
        refusals: why layers that look equal are not repeated layers.
        no_kernels: why the package's kernels do not run; "" if they do.
    """

    name: str
    profile: Any  # a CompileProfile; its type would be a circular import
    target: str
    features: frozenset[str]
    programs: tuple[str, ...]
    has_cache: bool
    serves_requests: bool
    passes: frozenset[str]
    mesh_axes: tuple[str, ...] | None
    refusals: tuple[str, ...]
    no_kernels: str

    def programs_text(self) -> str:
        """Return the list of programs, as text for a reason."""
        return f"this model runs {', '.join(self.programs)}"


# A condition: a function that returns why a value of a setting has no effect; "" if it has one.
EffectCheck = Callable[[Any, ModelFacts], str]


def always(value: Any, facts: ModelFacts) -> str:
    """Return "": the setting affects every program, or how every program is compiled."""
    return ""


def needs(feature: str) -> EffectCheck:
    """Return the condition of a setting that needs a feature, a name of `REASONS`."""
    reason = REASONS[feature]
    return lambda value, facts: "" if feature in facts.features else reason


def needs_weights(value: Any, facts: ModelFacts) -> str:
    """Return why the storage of weights has no effect: there are none, or none that can be packed."""
    feature = "packable" if isinstance(value, str) and value.startswith("int") else "float parameters"
    return needs(feature)(value, facts)


def needs_running_passes(value: Any, facts: ModelFacts) -> str:
    """Return the disabled passes that would not run, or change nothing: switching them off has no effect."""
    idle = [name for name in value if name not in facts.passes]
    return f"{listing(idle)} would change nothing here" if idle else ""


def needs_pass(name: str) -> EffectCheck:
    """Return the condition of the switch of a pass: the pass changes some program."""
    return lambda value, facts: needs_running_passes((name,), facts)


def needs_narrow_class(value: Any, facts: ModelFacts) -> str:
    """Return why a mixed precision policy narrows nothing.

    There are no floating values, or the policy is `custom` and `precision.classes` is f32 for all.
    """
    if "floats" not in facts.features:
        return REASONS["floats"]
    classes = facts.profile.precision.classes
    return "precision.classes is f32 for all" if value == "custom" and classes == type(classes)() else ""


def needs_custom_policy(value: Any, facts: ModelFacts) -> str:
    """Return why dtypes of classes have no effect: only the policy `custom` reads them."""
    return "" if facts.profile.precision.mixed == "custom" else "precision.mixed is not 'custom'"


def needs_kv_cache(value: Any, facts: ModelFacts) -> str:
    """Return why the dtype of cached keys and values has no effect: there is no cache, or no attention."""
    if not facts.has_cache and "explicit" not in facts.programs:  # the cache of explicit is inputs and outputs
        return f"only prefill, extend and explicit have cached keys and values, and {facts.programs_text()}"
    return "" if "attention" in facts.features else REASONS["attention"]


def needs_state(value: Any, facts: ModelFacts) -> str:
    """Return why donating the state has no effect: there is no state."""
    return "" if facts.has_cache or "state" in facts.features else f"there is no state, and {facts.programs_text()}"


def needs_checked_memory(value: Any, facts: ModelFacts) -> str:
    """Return why `donation.strict` has no effect: a program with a state that it does not donate is not checked."""
    has_checked = needs_state(value, facts) or "forward" in facts.programs or facts.profile.donation.state
    return "" if has_checked else "donation.state is false"


def needs_device_inputs(value: Any, facts: ModelFacts) -> str:
    """Return why donating inputs has no effect: requests come from the host, with no memory on the device to reuse."""
    # Whether an output can reuse the memory of an input depends on sizes; it is reported when they are known.
    return "requests come from the host, so no input is on the device" if facts.serves_requests and value else ""


def needs_repeated_layers(value: Any, facts: ModelFacts) -> str:
    """Return why `scan` has no effect: no layers repeat, with the first reason why layers that look equal do not.

    `unroll` and `auto` never warn: they describe a program without repeated layers too.
    """
    if value != "scan" or "layers" in facts.features:
        return ""
    return "; ".join((REASONS["layers"], *facts.refusals[:1]))


def needs_gradients(value: Any, facts: ModelFacts) -> str:
    """Return why rematerialization has no effect: only `train` has gradients, and it recomputes repeated layers."""
    if "train" not in facts.programs:
        return f"only the program train recomputes anything, and {facts.programs_text()}"
    return "" if "layers" in facts.features else REASONS["layers"]


def needs_padding(value: Any, facts: ModelFacts) -> str:
    """Return why a list of buckets has no effect.

    Only models that serve requests pad. Other models use the list only if `on_recompile` refuses sizes outside of it.
    """
    if not facts.serves_requests and facts.profile.buckets.on_recompile == "allow":
        return "this model pads nothing, and buckets.on_recompile allows every size"
    return ""


def needs_padded_cache(value: Any, facts: ModelFacts) -> str:
    """Return why `buckets.context` has no effect: there is no cache, or as `needs_padding`."""
    if facts.has_cache or "state" in facts.features:
        return needs_padding(value, facts)
    return f"only prefill and extend have a cache, and {facts.programs_text()}"


def needs_ring_buffers(value: Any, facts: ModelFacts) -> str:
    """Return why `buckets.spare` has no effect: only cached layers with an attention window have ring buffers."""
    if not facts.has_cache:
        return f"only prefill and extend have rings, and {facts.programs_text()}"
    return "" if "window" in facts.features else "no layer attends in a window"


def needs_buckets(value: Any, facts: ModelFacts) -> str:
    """Return why `buckets.on_recompile` has no effect.

    It applies to sizes outside of the lists, and to compiles after warm-up, which only models that serve requests have.
    """
    buckets = facts.profile.buckets
    lists = buckets.prompt or buckets.batch or buckets.context
    return "" if facts.serves_requests or lists else "no list of buckets limits the sizes"


def needs_mesh_axes(value: Any, facts: ModelFacts) -> str:
    """Return why the axes of a role have no effect: there is no mesh, or it has none of them."""
    if facts.mesh_axes is None:
        return "there is no mesh"
    has_none = value and not set(value) & set(facts.mesh_axes)
    return f"the mesh has the axes {listing(facts.mesh_axes)}" if has_none else ""


def needs_shared_projections(value: Any, facts: ModelFacts) -> str:
    """Return why fusing projections has no effect: there are none with a common input."""
    return REASONS["merged"] if value and "merged" not in facts.features else ""


def never(value: Any, facts: ModelFacts) -> str:
    """Return why switching off fusion has no effect: the fusion passes rewrite nothing, on any backend."""
    return "the fusion passes leave their ops to XLA, which fuses them itself"


def needs_kernels(value: Any, facts: ModelFacts) -> str:
    """Return why `kernels` has no effect: they run experts, recurrences, packed weights and decoded rows."""
    has_use = facts.has_cache or facts.features & {"experts", "recurrence", "packed"}
    return facts.no_kernels if has_use else "there are no experts, recurrences and packed weights, nothing is decoded"


def needs_generation(value: Any, facts: ModelFacts) -> str:
    """Return why settings of the generation loop have no effect: only a `CausalLM` generates."""
    generates = facts.serves_requests and facts.has_cache
    return "" if generates else f"only a CausalLM generates, and {facts.programs_text()}"


def settings_without_effect(facts: ModelFacts) -> Mapping[str, tuple[Any, str]]:
    """Return the settings that differ from their default and have no effect: the value and the reason, by path."""
    reasons = {}
    for path, row, value in iter_settings(facts.profile):
        if value == row.default or path == "name":  # a name changes nothing
            continue
        backend = path.split(".")[1] if path.startswith("backend.") else facts.target
        if backend != facts.target:
            reasons[path] = value, f"it is for {backend}, and the target is {facts.target}"
        elif reason := row.no_effect(value, facts):
            reasons[path] = value, reason
    return reasons


def warn_without_effect(flows: Sequence[ModelFacts], stacklevel: int) -> None:
    """Warn of each setting that has no effect on any program of any flow of the model."""
    first, *rest = map(settings_without_effect, flows)
    names = ", ".join(facts.name for facts in flows)
    for path, (value, reason) in first.items():
        if all(path in idle for idle in rest):
            shown = dict(value) if isinstance(value, Options) else list(value) if isinstance(value, tuple) else value
            message = f"{names}: {path} = {shown!r} has no effect: {reason}"
            warnings.warn(message, RlxWarning, stacklevel=stacklevel + 1)
