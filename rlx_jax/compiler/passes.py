"""The table of passes: every rewrite of a program from HIR to MIR, in the order that they run.

A row says what a pass is called, at which level its program is, what it does, and when. A new pass is a file in
`lowering/hir/` or `lowering/mir/` and a row here. `run_passes` is the only loop: it verifies, times and counts after
each pass, and stops after any.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rlx_jax.compiler.settings import Settings
from rlx_jax.errors import GraphError, ProfileError, check_known, did_you_mean, quote
from rlx_jax.ir.graph import Graph, GraphStage, TypeCache
from rlx_jax.ir.region import peel_last
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.fusion import Fused, Place
from rlx_jax.lowering.hir.derive import derive
from rlx_jax.lowering.hir.weights import merge_linears, merge_ropes, orient, pad_vocabulary, unpack
from rlx_jax.lowering.lower import expand_composites, lower
from rlx_jax.lowering.mir.head import up_to_head
from rlx_jax.lowering.mir.small import (
    constant_folding,
    cse,
    dce,
    specialise,
    unread_inputs,
    unroll_steps,
    with_outputs,
    without_inputs,
)
from rlx_jax.lowering.precision import compute_in, mixed, pin_matmul, store_in
from rlx_jax.lowering.sharding import divide, undivided

HIR, MIR = GraphStage.HIR, GraphStage.MIR
Kind = Literal["program", "layout", "fusion", "cleaning"]


@dataclass(frozen=True)
class Job:
    """What a pass may know: the resolved settings, the program that is wanted, the optional inputs that calls will
    supply, those inputs that no output of the flow reads, and for the last pass its sizes."""

    settings: Settings
    types: TypeCache = field(repr=False)
    program: str = "forward"
    last_only: bool = False
    given: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    headless: bool = False
    sizes: Mapping[str, int] | None = None
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pass:
    """One rewrite, valid in, valid out. `level` is that of the graph it returns.

    run: `(graph, types)`, or `(graph, value, types)` where `when` returns a value for it.
    when: whether it is part of a job; instead of True it may return what the rewrite goes by, a setting such as a
        dtype, and instead of False None.
    kind: `program` passes make the program what it was asked to be. All others change no number and can be switched
        off by name (`fusion.disable`): those of `layout` choose how weights are stored and layers laid out, those of
        `fusion` have a name and leave their ops to XLA (see `left_to_xla`), those of `cleaning` remove
        (`passes.<name> = false`).
    """

    name: str
    level: GraphStage
    run: Callable[..., Graph | Fused]
    when: Callable[[Job], Any] = lambda job: True
    kind: Kind = "program"

    def runs(self, job: Job) -> bool:
        """Whether it is part of that job."""
        off = self.name in job.settings.off or self.kind in job.settings.without
        value = False if off and self.kind != "program" else self.when(job)
        return value is not None and value is not False

    def __call__(self, graph: Graph, job: Job) -> Fused:
        """The verified result, and the places that the pass speaks of.

        Raises:
            GraphError: the pass left a graph that is wrong; all problems are listed.
        """
        value = self.when(job)
        made = self.run(graph, *([] if isinstance(value, bool) else [value]), job.types)
        made = made if isinstance(made, Fused) else Fused(made)
        if made.graph is not graph:
            verify(made.graph, self.level, self.name, job.types)
        return made


# Passes of the specification whose fused ops exist, and whose rewriting would gain no time: XLA puts what they would
# write as one op into one kernel by itself.
LEFT_TO_XLA = (
    "fuse_matmul_bias_act", "fuse_residual_layer_norm", "fuse_residual_rms_norm", "fuse_swiglu",
    "mark_elementwise_regions", "unfuse_elementwise_regions",
)  # fmt: skip


def left_to_xla(graph: Graph, types: TypeCache) -> Graph:
    """Return the graph as it is."""
    return graph


def over_devices(job: Job) -> Any:
    """For a model that lies over several devices, by its division."""
    return job.settings.division


def unless(value: Any, default: Any) -> Any:
    """A setting that is not its default; for that, the pass does not run."""
    return None if value == default else value


# All passes, in the order that they run.
PIPELINE: tuple[Pass, ...] = (
    Pass("outputs", HIR, with_outputs, lambda job: job.outputs),
    Pass("expand", HIR, expand_composites),
    Pass("precision", HIR, compute_in, lambda job: unless(job.settings.compute, np.float32)),
    # One device has all of every value.
    Pass("undivided", HIR, undivided, lambda job: job.settings.division is None),
    Pass("unpack", HIR, unpack, over_devices),
    Pass(
        "merge_linears",
        HIR,
        lambda graph, settings, types: merge_linears(graph, types, settings.division),
        lambda job: job.settings.merge and job.settings,
        "layout",
    ),
    # A few tokens' kernels are as short as their launch; a prompt's are not.
    Pass(
        "merge_ropes",
        HIR,
        merge_ropes,
        lambda job: job.settings.merge and job.program in ("extend", "verify"),
        "layout",
    ),
    Pass("orient", HIR, orient, lambda job: unless(job.settings.backend.weight_layout, "auto"), "layout"),
    Pass("store", HIR, store_in, lambda job: job.settings.stored),
    Pass(
        "pad_vocabulary", HIR, lambda g, division, types: dce(pad_vocabulary(g, division, types), types), over_devices
    ),
    # Of the last layer, only the last row goes on.
    Pass("peel_last", HIR, peel_last, lambda job: job.last_only and not job.settings.plan.scan, "layout"),
    Pass(
        "derive",
        HIR,
        lambda g, job, types: derive(g, job.program, types, job.last_only, job.settings.kv, job.given),
        lambda job: job,
    ),
    Pass("lower", MIR, lower, lambda job: job.settings.profile.fusion.policy),
    # A derived program may read what the flow does not.
    Pass("unread_inputs", MIR, without_inputs, lambda job: unless(job.unread, frozenset())),
    Pass("pin_matmul", MIR, pin_matmul, lambda job: unless(job.settings.profile.precision.matmul, "default")),
    Pass(
        "mixed",
        MIR,
        lambda graph, settings, types: mixed(graph, settings.mixed, types, dict(settings.classes)),
        lambda job: job.settings.mixed != "none" and job.settings,
    ),
    Pass("unroll_steps", MIR, unroll_steps, lambda job: job.settings.target in ("cuda", "rocm"), "layout"),
    Pass("cse", MIR, cse, kind="cleaning"),
    Pass("constant_folding", MIR, constant_folding, kind="cleaning"),
    *(Pass(name, MIR, left_to_xla, kind="fusion") for name in LEFT_TO_XLA),
    Pass("divide", MIR, divide, over_devices),
    Pass("dce", MIR, dce, kind="cleaning"),  # it takes away what the others left unread
    Pass("up_to_head", MIR, up_to_head, lambda job: job.headless),
    Pass("specialise", MIR, specialise, lambda job: job.sizes),  # for each choice of sizes; a template has symbols
)

NAMES = tuple(p.name for p in PIPELINE)


def pass_named(name: str) -> Pass:
    """The row of that name.

    Raises:
        GraphError: there is none; the message suggests one.
    """
    for p in PIPELINE:
        if p.name == name:
            return p
    raise GraphError(f"unknown pass {quote(name)}; passes are {', '.join(NAMES)}{did_you_mean(str(name), NAMES)}")


def check_switches(settings: Settings) -> None:
    """What the profile switches off are passes, and such as can be.

    Raises:
        ProfileError: with a suggestion.
    """
    optional = [p.name for p in PIPELINE if p.kind != "program"]
    if fixed := sorted(name for name in settings.off if name in NAMES and name not in optional):
        raise ProfileError(
            f"fusion.disable: {quote(fixed[0])} makes the program what it was asked to be and cannot be switched off; "
            f"those that can are {', '.join(optional)}"
        )
    check_known(sorted(settings.off), optional, "fusion.disable: unknown pass", "; expected one of", ProfileError)


@dataclass(frozen=True)
class Ran:
    """What the passes made of a program. `blocks` is what was lowered, `lowered` what the first optional pass at MIR
    was given, `graph` the result."""

    blocks: Graph
    lowered: Graph
    graph: Graph
    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    places: tuple[Place, ...]


def run_passes(graph: Graph, job: Job, stop: str = "") -> Ran:
    """Run the table on a program, to its end or until after the pass `stop`.

    Raises:
        GraphError: there is no such pass, or it is not part of this job. Errors of the passes.
    """
    job = replace(job, unread=unread_inputs(graph))
    rows = [p for p in PIPELINE if p.runs(job)]
    if stop and not pass_named(stop).runs(job):
        raise GraphError(
            f"{graph.name}: pass {quote(stop)} does not run for {job.program} with these settings; "
            f"those that do are {', '.join(p.name for p in rows)}"
        )
    blocks = lowered = graph
    seconds: dict[str, float] = {}
    nodes: dict[str, int] = {}
    places: list[Place] = []
    for p in rows:
        start = time.perf_counter()
        made = p(graph, job)
        graph = made.graph
        places += made.places
        seconds[p.name], nodes[p.name] = time.perf_counter() - start, sum(1 for _ in graph.walk())
        blocks = graph if p.level == HIR else blocks
        lowered = graph if p.kind == "program" else lowered
        if job.settings.profile.passes.verbose:
            line = f"{graph.name} {job.program}: {p.name}: {nodes[p.name]} nodes, {seconds[p.name]:.3f} s"
            print(line, file=sys.stderr)
        if p.name == stop:
            break
    return Ran(blocks, lowered, graph, seconds, nodes, tuple(places))
