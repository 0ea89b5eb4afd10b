"""Settings that have nothing to act on: a row for each field of a profile, and a warning for each that is idle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from rlx_jax.compiler.passes import PIPELINE, Job, Pass
from rlx_jax.compiler.settings import CLEANING, Settings
from rlx_jax.errors import RlxWarning, listing
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Node
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.text import dump_graph
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.hir.merge import merge_linears
from rlx_jax.lowering.lir.implementations import has_triton
from rlx_jax.lowering.lower import expand_composites, lower
from rlx_jax.profiles import CompileProfile, NumericClasses, Options, Sharding, Table
from rlx_jax.program import Built


@dataclass(frozen=True)
class Facts:
    """What the settings of a model can act on.

    Attributes:
        hir, mir: of the program that was built first. What the others add to it is known from their names.
        state: whether that program has one.
        programs: those that calls of the model run.
        serves: requests of every size come in from the host, and are padded.
    """

    profile: CompileProfile
    settings: Settings
    built: Built
    hir: Graph
    mir: Graph
    state: bool
    programs: tuple[str, ...]
    serves: bool = False

    def nodes(self) -> Iterator[Node]:
        """Every node of the tensor graph, those of regions included."""
        return (node for _, node in self.mir.walk())

    def passes(self, off: Collection[str] = ()) -> Iterator[Pass]:
        """The passes that run for some program of the model, with these in `fusion.disable` alone."""
        cleaned = {name for name in CLEANING if not getattr(self.profile.passes, name)}
        settings = replace(self.settings, off=frozenset((*off, *cleaned)))
        jobs = [Job(settings, self.built.types, p, last) for p in self.programs for last in (False, True)]
        return (p for p in PIPELINE if any(p.runs(job) for job in jobs))

    def runs(self) -> str:
        """The programs, as a reason names them."""
        return f"this model runs {', '.join(self.programs)}"


Idle = Callable[[Any, Facts], str]
"""Why a value of a setting has nothing to act on; empty if it has."""


def always(value: Any, facts: Facts) -> str:
    """It changes every program, or how every program is made."""
    return ""


def without(found: Callable[[Facts], bool], reason: str) -> Idle:
    """Idle where nothing is `found`."""
    return lambda value, facts: "" if found(facts) else reason


# -- what a setting may act on -----------------------------------------------------------------


def has_floats(facts: Facts) -> bool:
    """Something is computed in floating point: `precision.compute` and `.mixed` say in which."""
    return any(is_float(t.dtype) for node in facts.nodes() for t in node.types)


def has_float_parameters(facts: Facts) -> bool:
    """A weight is floating: `precision.weights` says how it is stored."""
    return any(is_float(param.type.dtype) for param in facts.hir.params())


def has_products(facts: Facts) -> bool:
    """An op has a precision of its own: a matrix product, attention, a function of the user that may hold one."""
    return any(hasattr(node.op, "precision") for node in facts.nodes())


def has_ids(facts: Facts) -> bool:
    """An op reads a table by ids."""
    return any(node.op.ids is not None for node in facts.nodes())


def has_experts(facts: Facts) -> bool:
    """There is a mixture of experts, for which an implementation is chosen."""
    return any(isinstance(node.op, ExpertFfn) for node in facts.nodes())


def kernels(value: Any, facts: Facts) -> str:
    """Kernels of our own run experts and recurrences, where they were measured, on one device."""
    if not any(isinstance(node.op, ExpertFfn | GatedDeltaOp | SelectiveScanOp) for node in facts.nodes()):
        return "there are no experts and no recurrence"
    device = facts.settings.device
    if facts.settings.division is not None or not device.has_kernels:
        return f"kernels run on one H100 or H200, not on {'a mesh' if facts.settings.division else device.name}"
    if not has_triton():
        return f"kernels are written for Pallas' Triton backend, which jax {jax.__version__} does not have"
    return "a program that is trained has none" if set(facts.programs) == {"train"} else ""


def has_attention(facts: Facts) -> bool:
    """There is attention, for which an implementation is chosen."""
    return any(isinstance(node.op, AttentionOp) for node in facts.nodes())


def has_linears(facts: Facts) -> bool:
    """A stage multiplies with a weight, which is stored one way or the other. Asked of HIR: in MIR a Linear is a
    product like any other."""
    return any(isinstance(node.op, hir.Linear) for _, node in facts.hir.walk())


def caches(facts: Facts) -> bool:
    """Calls run prefill or extend, whose state holds keys and values. They need not be the program that was built."""
    return not set(CACHED_PROGRAMS).isdisjoint(facts.programs)


def repeats(facts: Facts) -> bool:
    """Layers became a region, which can be scanned, and recomputed as a whole."""
    return any(node.op.regions() for node in facts.nodes())


def keeps_state(facts: Facts) -> bool:
    """A program takes state and returns it: prefill, extend, or one whose stages carry something themselves."""
    return facts.state or caches(facts)


def fuses(facts: Facts) -> bool:
    """A fusion pass is left, whose misses `assert_clean` makes an error."""
    return any(p.kind == "fusion" for p in facts.passes(facts.profile.fusion.disable))


def same(first: Graph, second: Graph) -> bool:
    """Two graphs of one program, made in two ways."""
    return dump_graph(first) == dump_graph(second)


# -- settings that take more than a look -------------------------------------------------------


def policy(value: Any, facts: Facts) -> str:
    """The policy chooses between two rules for a block, so both ways down are taken and compared."""
    types = facts.built.types
    if same(lower(facts.hir, "direct", types), lower(facts.hir, "fusable", types)):
        return "no block has a better rule than its own expansion"
    return ""


def disabled(value: Any, facts: Facts) -> str:
    """Switching off a pass that does not run changes nothing: named one by one, as the others may."""
    running = {p.name for p in facts.passes()}
    idle = [name for name in value if name not in running]
    return f"{listing(idle)} would not run here" if idle else ""


def scanned(value: Any, facts: Facts) -> str:
    """A loop over layers needs a region; `unroll` and `auto` mean something without one. Told with the first reason why
    layers that look alike are none."""
    if value != "scan" or repeats(facts):
        return ""
    return "; ".join(("no layers repeat", *facts.built.refusals[:1]))


def remat(value: Any, facts: Facts) -> str:
    """Activations are recomputed for gradients, a layer at a time."""
    if "train" not in facts.programs:
        return f"only the program train recomputes anything, and {facts.runs()}"
    return "" if repeats(facts) else "no layers repeat"


def cached(value: Any, facts: Facts) -> str:
    """The dtype of cached keys and values wants a cache, and attention that fills it."""
    if not caches(facts) and "explicit" not in facts.programs:  # whose cache is inputs and outputs
        return f"only prefill, extend and explicit have cached keys and values, and {facts.runs()}"
    return "" if has_attention(facts) else "there is no attention"


def stateful(value: Any, facts: Facts) -> str:
    """What is donated is the state."""
    return "" if keeps_state(facts) else f"there is no state, and {facts.runs()}"


def donated(value: Any, facts: Facts) -> str:
    """Only a program that donates its state is checked."""
    return stateful(value, facts) or ("" if facts.profile.donation.state else "donation.state is false")


def consumed(value: Any, facts: Facts) -> str:
    """Donated inputs lend their memory on the device to outputs; requests are on the host."""
    # Whether an output can take an input's memory depends on sizes, and is told where they are known.
    return "requests come from the host, and nothing of theirs is on the device" if facts.serves and value else ""


def padded(value: Any, facts: Facts) -> str:
    """Sizes of requests are padded to; a compiled model pads nothing, but its `on_recompile` may refuse other sizes."""
    if not facts.serves and facts.settings.buckets.on_recompile == "allow":
        return "this model pads nothing, and buckets.on_recompile allows every size"
    return ""


def padded_cache(value: Any, facts: Facts) -> str:
    """`buckets.context` are slots of a cache."""
    return padded(value, facts) if keeps_state(facts) else f"only prefill and extend have a cache, and {facts.runs()}"


def spared(value: Any, facts: Facts) -> str:
    """`buckets.spare` are slots of a ring beside its window, and only layers with a window have rings."""
    windows = (node.op.window for node in facts.nodes() if isinstance(node.op, AttentionOp))
    if caches(facts) and all(window is None for window in windows):
        return "no layer attends in a window"
    return "" if caches(facts) else f"only prefill and extend have rings, and {facts.runs()}"


def recompiled(value: Any, facts: Facts) -> str:
    """Refused is what is in no list, or compiles after warm-up, which only models that serve requests have."""
    return "" if facts.serves or facts.settings.buckets.text() else "no list of buckets says what is foreign"


def merged(value: Any, facts: Facts) -> str:
    """Merging is tried: whether two projections fit together is decided there, place by place."""
    if not value:  # what cannot be merged is kept apart
        return ""
    places = merge_linears(expand_composites(facts.built.hir, facts.built.types), facts.built.types).places
    return "" if any(not place.reason for place in places) else "no two projections of one input can be merged"


def unfused(value: Any, facts: Facts) -> str:
    """Regions are taken apart that a pass has found."""
    regions = {"mark_elementwise_regions", "unfuse_elementwise_regions"}
    running = {p.name for p in facts.passes(facts.profile.fusion.disable)}
    return "" if regions & running else "no pass looks for regions"


def generated(value: Any, facts: Facts) -> str:
    """The loop on the device is that of `generate`."""
    generates = facts.serves and caches(facts)
    return "" if generates else f"only a CausalLM generates, and {facts.runs()}"


def skipped(value: Any, facts: Facts) -> str:
    """`skip_fusion` and `fusion.skip` switch off the same passes: one of them is enough."""
    return "fusion.skip is set as well" if facts.profile.fusion.skip else ""


def divided(value: Any, facts: Facts) -> str:
    """Roles are divided over the axes of a mesh; a role that is divided over none stays whole."""
    if facts.settings.division is None:
        return "there is no mesh"
    known = facts.settings.division.mesh.axis_names
    return f"the mesh has the axes {listing(known)}" if value and not set(value) & set(known) else ""


def narrowed(value: Any, facts: Facts) -> str:
    """A policy narrows floating numbers, and `custom` narrows what `precision.classes` says."""
    if not has_floats(facts):
        return "nothing is computed in floating point"
    wide = value == "custom" and facts.profile.precision.classes == NumericClasses()
    return "precision.classes is f32 for all" if wide else ""


def custom_alone(value: Any, facts: Facts) -> str:
    """Dtypes of classes are those of the policy `custom`."""
    return "" if facts.profile.precision.mixed == "custom" else "precision.mixed is not 'custom'"


EFFECTS: Mapping[str, Idle] = {
    "fusion.policy": policy,
    "fusion.target": always,
    "fusion.assert_clean": without(fuses, "no fusion pass runs"),
    "fusion.skip": always,
    "fusion.disable": disabled,
    "passes.dce": always,
    "passes.cse": always,
    "passes.constant_folding": always,
    "passes.verbose": always,
    "precision.compute": without(has_floats, "nothing is computed in floating point"),
    "precision.matmul": without(has_products, "there is no matrix product"),
    "precision.mixed": narrowed,
    **{f"precision.classes.{f.name}": custom_alone for f in fields(NumericClasses)},
    "precision.weights": without(has_float_parameters, "there is no floating parameter"),
    "precision.kv": cached,
    "donation.state": stateful,
    "donation.strict": donated,
    "donation.inputs": consumed,
    "layers.roll": scanned,
    "layers.remat": remat,
    "attention.implementation": without(has_attention, "there is no attention"),
    "buckets.prompt": padded,
    "buckets.batch": padded,
    "buckets.context": padded_cache,
    "buckets.on_recompile": recompiled,
    "buckets.programs": always,
    "buckets.spare": spared,
    "checks.ids": without(has_ids, "no op reads a table by ids"),
    **{f"sharding.{f.name}": divided for f in fields(Sharding)},
    "backend.*.weight_layout": without(has_linears, "there is no Linear"),
    "backend.*.merge": merged,
    "backend.*.skip_fusion": skipped,
    "backend.*.unfuse_regions": unfused,
    "backend.*.products": without(has_products, "there is no matrix product"),
    "backend.*.experts": without(has_experts, "there is no mixture of experts"),
    "backend.*.kernels": kernels,
    "backend.*.steps_per_dispatch": generated,
    "backend.*.stop_early": generated,
    "backend.*.compiler_options": always,
}
"""Why a setting is idle, by its place in a profile; `*` stands for the backend that is compiled for."""


def idle_settings(facts: Facts) -> Iterator[tuple[str, Any, str]]:
    """The settings that were set and have nothing to act on: (place, value, reason)."""
    for place, value in changed(facts.profile):
        table, _, key = place.rpartition(".")
        backend = table.partition("backend.")[2]
        if backend and backend != facts.settings.target:
            reason = f"it is for {backend}, and the target is {facts.settings.target}"
        else:
            reason = EFFECTS[f"backend.*.{key}" if backend else place](value, facts)
        if reason:
            yield place, value, reason


def changed(table: Table, default: Table | None = None, at: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that are not at their default, by their place; a name changes nothing."""
    default = CompileProfile() if default is None else default
    for f in fields(table):  # type: ignore[arg-type]  # every Table is a dataclass
        value, usual = getattr(table, f.name), getattr(default, f.name)
        if isinstance(value, Table):
            yield from changed(value, usual, f"{at}{f.name}.")
        elif value != usual and f.compare:
            yield f"{at}{f.name}", value


def warn_without_effect(flows: Sequence[Facts]) -> None:
    """A warning for each setting that has nothing to act on in any program of any flow of the model."""
    idle = [{place: (value, reason) for place, value, reason in idle_settings(facts)} for facts in flows]
    name = ", ".join(facts.built.name for facts in flows)
    for place, (value, reason) in idle[0].items() if idle else ():
        if not all(place in others for others in idle):
            continue
        shown = dict(value) if isinstance(value, Options) else list(value) if isinstance(value, tuple) else value
        message = f"{name}: {place} = {shown!r} has no effect: {reason}"
        warnings.warn(message, RlxWarning, stacklevel=4)
