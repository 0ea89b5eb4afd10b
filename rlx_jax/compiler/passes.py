"""This module defines `PIPELINE`, the table of all rewrites of a program from HIR to MIR, in the order that they run.

A row has the name of a pass, the level of its result, the rewrite, and the condition for it to run. A new pass is a
file in `lowering/hir/` or `lowering/mir/` and a row here. `run_passes` is the only loop over the table. It verifies the
graph, measures the time and counts the nodes after each pass, and can stop after any.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from rlx_jax.compiler.settings import Settings
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError, ProfileError, check_names, did_you_mean, quote
from rlx_jax.ir.graph import Constant, Graph, GraphStage, TypeCache
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import peel_last
from rlx_jax.ir.user_functions import CAPTURED_LIMIT, MAX_CAPTURED
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.fusion import Fused, FusionSite
from rlx_jax.lowering.hir.derive import derive
from rlx_jax.lowering.hir.rules import quantize_weights
from rlx_jax.lowering.hir.weights import merge_linears, merge_ropes, orient, pad_vocabulary, unpack
from rlx_jax.lowering.lir.attention_groups import group_attention
from rlx_jax.lowering.lir.delta_groups import group_deltas
from rlx_jax.lowering.lir.expert_groups import group_experts
from rlx_jax.lowering.lir.head_groups import group_heads
from rlx_jax.lowering.lir.implementations import has_kernels
from rlx_jax.lowering.lir.per_shard import shard_program
from rlx_jax.lowering.lir.product_groups import group_products
from rlx_jax.lowering.lower import expand_composites, lower
from rlx_jax.lowering.mir import small
from rlx_jax.lowering.mir.head import up_to_head
from rlx_jax.lowering.mir.patterns import FINDERS, find_sites
from rlx_jax.lowering.precision import compute_in, mixed_precision, pin_matmul, store_in
from rlx_jax.lowering.sharding import add_sharding_constraints

HIR, MIR = GraphStage.HIR, GraphStage.MIR
Kind = Literal["program", "layout", "fusion", "cleaning"]


@dataclass(frozen=True)
class Job:
    """The information that passes may use.

    Attributes:
        settings: the resolved profile.
        types: the cache of types that values of the graph belong to.
        program: the program to derive.
        last_only: compute the outputs for each row's last token only.
        optional_inputs: the optional inputs that calls will pass.
        outputs: the names of the outputs to compute; None for all.
        headless: end before the head; its operands are the outputs.
        sizes: the sizes for the last pass, `specialise`; None for a template.
        unread: the inputs that no output of the flow reads.
    """

    settings: Settings
    types: TypeCache = field(repr=False)
    program: str = "forward"
    last_only: bool = False
    optional_inputs: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    headless: bool = False
    sizes: Mapping[str, int] | None = None
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pass:
    """One rewrite from a valid graph to a valid graph.

    Attributes:
        name: the name of the pass, also in profiles.
        level: the level of the graph that it returns.
        run: a function of `(graph, types)`, or of `(graph, value, types)` if `when` returns a value.
        when: a function that returns whether the pass is part of a job. Instead of True it may return the value that
            the rewrite needs, such as a dtype, and None instead of False.
        kind: `program` passes are required for correctness. The others do not change results, and can be switched off
            by name (`fusion.disable`): `layout` passes choose how weights are stored and how layers run, `fusion`
            passes leave their ops to XLA (see `left_to_xla`), and `cleaning` passes simplify the graph (they are
            switched off by `passes.<name> = false` too).
    """

    name: str
    level: GraphStage
    run: Callable[..., Graph | Fused]
    when: Callable[[Job], Any] = lambda job: True
    kind: Kind = "program"

    def runs(self, job: Job) -> bool:
        """Return whether the pass is part of a job."""
        off = self.name in job.settings.disabled_passes or self.kind in job.settings.disabled_kinds
        value = False if off and self.kind != "program" else self.when(job)
        return value is not None and value is not False

    def __call__(self, graph: Graph, job: Job) -> Fused:
        """Run the pass, and return the verified graph with the fusion sites that the pass reports.

        Raises:
            GraphError: the pass returned an invalid graph; the message lists all problems.
        """
        value = self.when(job)
        result = self.run(graph, *([] if isinstance(value, bool) else [value]), job.types)
        result = result if isinstance(result, Fused) else Fused(result)
        if result.graph is not graph:  # a pass that changes nothing returns the same graph, which is verified already
            verify(result.graph, self.level, self.name, job.types)
        return result


# Passes of the specification that are rows but rewrite nothing. The fused ops exist, but rewriting to them saves no
# time: XLA fuses the same ops into one kernel by itself.
LEFT_TO_XLA = (*FINDERS, "unfuse_elementwise_regions")


def left_to_xla(name: str) -> Callable[[Graph, TypeCache], Fused]:
    """Return the pass `name`, which reports the sites of its pattern and returns the graph unchanged."""
    return lambda graph, types: Fused(graph, tuple(find_sites(name, graph)) if name in FINDERS else ())


def sharding_if_any(job: Job) -> Any:
    """Return the sharding rules of a model on several devices; None on one, where the pass does not run."""
    return job.settings.model_sharding


def none_if_default(value: Any, default: Any) -> Any:
    """Return the value of a setting, or None, so that the pass does not run, if it is the default."""
    return None if value == default else value


def uses_kernels(job: Job, choice: str = "") -> bool:
    """Return whether products and attention of decoded rows run as one kernel each, with the ops around them.

    It was measured on one Hopper GPU. A scan would copy each layer's weights before the kernel reads them.

    Args:
        job: the job.
        choice: a field of the plan, which must leave the implementation to the compiler; "" for none.
    """
    plan = job.settings.plan
    return is_for_kernels(job, "extend") and not plan.scan and (not choice or getattr(plan, choice) == "auto")


def uses_prompt_kernels(job: Job) -> bool:
    """Return whether kernels for many tokens may run, which they do on one device."""
    return is_for_kernels(job, "prefill") and job.settings.model_sharding is None


def is_for_kernels(job: Job, program: str) -> bool:
    """Return whether a job is a program of this name, with sizes, in which custom kernels may run."""
    settings = job.settings
    return job.sizes is not None and job.program == program and settings.plan.kernels and has_kernels(settings.device)


# All passes, in the order that they run.
PIPELINE: tuple[Pass, ...] = (
    Pass("outputs", HIR, small.select_outputs, lambda job: job.outputs),
    Pass("expand", HIR, expand_composites),
    Pass("quantize", HIR, quantize_weights, lambda job: job.settings.scheme_at if job.settings.quantized else None),
    Pass("precision", HIR, compute_in, lambda job: none_if_default(job.settings.compute, np.float32)),
    # On one device, ops that only matter for sharding are removed.
    Pass("undivided", HIR, small.remove_sharding_constraints, lambda job: job.settings.model_sharding is None),
    Pass("unpack", HIR, unpack, sharding_if_any),
    Pass(
        "merge_linears",
        HIR,
        lambda graph, settings, types: merge_linears(graph, types, settings.model_sharding, settings.plan.packed),
        lambda job: job.settings.merge and job.settings,
        "layout",
    ),
    # For a few tokens a kernel takes as little time as its launch, so fewer kernels help; for a prompt it takes longer.
    Pass(
        "merge_ropes",
        HIR,
        merge_ropes,
        lambda job: job.settings.merge and job.program in ("extend", "verify"),
        "layout",
    ),
    Pass(
        "orient",
        HIR,
        lambda graph, settings, types: orient(graph, settings.backend.weight_layout, settings.plan.packed, types),
        lambda job: job.settings.backend.weight_layout != "auto" and job.settings,
        "layout",
    ),
    Pass("store", HIR, store_in, lambda job: job.settings.param_dtype),
    Pass(
        "pad_vocabulary",
        HIR,
        lambda g, model_sharding, types: small.dce(pad_vocabulary(g, model_sharding, types), types),
        sharding_if_any,
    ),
    # Outside of the scanned loop, the last layer can compute its output for the last token alone.
    Pass("peel_last", HIR, peel_last, lambda job: job.last_only and not job.settings.plan.scan, "layout"),
    Pass(
        "derive",
        HIR,
        lambda g, job, types: derive(g, job.program, types, job.last_only, job.settings.kv_dtype, job.optional_inputs),
        lambda job: job,
    ),
    Pass("lower", MIR, lower, lambda job: job.settings.profile.fusion.policy),
    # This runs after `derive`: a derived program may read inputs that the flow does not.
    Pass("unread_inputs", MIR, small.remove_unread_inputs, lambda job: none_if_default(job.unread, frozenset())),
    Pass("pin_matmul", MIR, pin_matmul, lambda job: none_if_default(job.settings.profile.precision.matmul, "default")),
    Pass(
        "mixed",
        MIR,
        lambda graph, settings, types: mixed_precision(graph, settings.mixed, types, dict(settings.classes)),
        lambda job: job.settings.mixed != "none" and job.settings,
    ),
    Pass("unroll_steps", MIR, small.unroll_steps, lambda job: job.settings.target in ("cuda", "rocm"), "layout"),
    Pass("cse", MIR, small.cse, kind="cleaning"),
    Pass("constant_folding", MIR, small.constant_folding, kind="cleaning"),
    *(Pass(name, MIR, left_to_xla(name), kind="fusion") for name in LEFT_TO_XLA),
    Pass("divide", MIR, add_sharding_constraints, sharding_if_any),
    Pass("dce", MIR, small.dce, kind="cleaning"),  # late, because the passes before it leave unread nodes
    Pass("up_to_head", MIR, up_to_head, lambda job: job.headless),
    Pass("specialise", MIR, small.specialise, lambda job: job.sizes),  # runs once per choice of sizes, on the template
    # The next ones run after it, on programs with sizes. What the first returns has a plan of its own.
    Pass(
        "per_shard",
        MIR,
        lambda graph, model_sharding, types: shard_program(graph, model_sharding, types).graph,
        lambda job: sharding_if_any(job) if uses_kernels(job) and not job.headless else None,
        "layout",
    ),
    Pass(
        "divide_last",
        MIR,
        small.divide_last,
        lambda job: job.sizes is not None and job.program == "prefill" and job.settings.model_sharding is None,
        "layout",
    ),
    Pass("group_deltas", MIR, group_deltas, uses_prompt_kernels, "layout"),
    Pass("group_heads", MIR, group_heads, uses_prompt_kernels, "layout"),
    Pass("group_attention", MIR, group_attention, lambda job: uses_kernels(job, "implementation"), "layout"),
    Pass("group_experts", MIR, group_experts, lambda job: uses_kernels(job, "experts"), "layout"),
    Pass("group_products", MIR, group_products, lambda job: uses_kernels(job, "products"), "layout"),
)

PASS_NAMES = tuple(p.name for p in PIPELINE)


def pass_named(name: str) -> Pass:
    """Return the pass with a name.

    Raises:
        GraphError: there is none; the message suggests one.
    """
    if name not in PASS_NAMES:
        hint = did_you_mean(name, PASS_NAMES)
        raise GraphError(f"unknown pass {quote(name)}; passes are {', '.join(PASS_NAMES)}{hint}")
    return next(p for p in PIPELINE if p.name == name)


def check_switches(settings: Settings) -> None:
    """Check that every name that the profile switches off is a pass, and one that is optional.

    Raises:
        ProfileError: it is not; the message has a suggestion.
    """
    optional = [p.name for p in PIPELINE if p.kind != "program"]
    if fixed := sorted(name for name in settings.disabled_passes if name in PASS_NAMES and name not in optional):
        raise ProfileError(
            f"fusion.disable: {quote(fixed[0])} is required for a correct program and cannot be switched off; "
            f"optional passes are {', '.join(optional)}"
        )
    check_names(
        sorted(settings.disabled_passes), optional, "fusion.disable: unknown pass", "; expected one of", ProfileError
    )


@dataclass(frozen=True)
class PassesResult:
    """The result of running the passes on a program.

    Attributes:
        blocks: the HIR graph before it is lowered.
        lowered: the graph after the last `program` pass, which the fusion report compares the final graph with.
        graph: the final graph.
        graphs: the graph after each pass, by name; a pass that changes nothing returns the same graph.
        seconds: the time of each pass, by name.
        nodes: the number of nodes after each pass, by name.
        fusion_sites: the fusion sites that passes report.
    """

    blocks: Graph
    lowered: Graph
    graph: Graph
    graphs: Mapping[str, Graph]
    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    fusion_sites: tuple[FusionSite, ...]


def run_passes(graph: Graph, job: Job, stop: str = "") -> PassesResult:
    """Run the passes of `PIPELINE` on a program.

    Args:
        graph: the HIR graph of the flow.
        job: the program and the settings.
        stop: the name of the pass to stop after; "" for all.

    Raises:
        GraphError: there is no pass `stop`, or it is not part of this job. Others as the passes.
    """
    job = replace(job, unread=small.unread_inputs(graph))
    rows = [p for p in PIPELINE if p.runs(job)]
    if stop and not pass_named(stop).runs(job):
        raise GraphError(
            f"{graph.name}: pass {quote(stop)} does not run for {job.program} with these settings; "
            f"the passes that run are {', '.join(p.name for p in rows)}"
        )
    blocks = lowered = graph
    graphs: dict[str, Graph] = {}
    seconds: dict[str, float] = {}
    nodes: dict[str, int] = {}
    fusion_sites: list[FusionSite] = []
    for p in rows:
        start = time.perf_counter()
        result = p(graph, job)
        graphs[p.name] = graph = result.graph
        fusion_sites += result.sites
        seconds[p.name], nodes[p.name] = time.perf_counter() - start, sum(1 for _ in graph.walk())
        blocks = graph if p.level == HIR else blocks
        lowered = graph if p.kind == "program" else lowered
        if job.settings.profile.passes.verbose:
            line = f"{graph.name} {job.program}: {p.name}: {nodes[p.name]} nodes, {seconds[p.name]:.3f} s"
            print(line, file=sys.stderr)
        if p.name == stop:
            break
    return PassesResult(blocks, lowered, graph, graphs, seconds, nodes, tuple(fusion_sites))


def check_constants(graph: Graph, types: TypeCache) -> None:
    """Check that constants and arrays captured by functions are small in total; equal arrays count once.

    Raises:
        GraphError: together they exceed `MAX_CAPTURED` bytes; the message names the largest.
    """
    sizes: dict[Any, tuple[int, str]] = {}
    for _, node in graph.walk():
        location = f"{path_text(node.origin.path)} {node.op.text()}"
        if isinstance(node.op, Constant):
            sizes.setdefault(node.op.data, (len(node.op.data), location))
        for array in types.captured_arrays.get(node.op, ()):
            is_tracer = isinstance(array, jax.core.Tracer)  # a tracer has no bytes to compare
            sizes.setdefault(id(array) if is_tracer else np.asarray(array).tobytes(), (array.nbytes, location))
    total = sum(size for size, _ in sizes.values())
    if total > MAX_CAPTURED:
        largest = sorted(sizes.values(), reverse=True)[:4]
        largest_text = f"The largest: {'; '.join(f'{location}: {size} bytes' for size, location in largest)}"
        constants = f"{total} bytes of constants in one program"
        raise GraphError(f"{graph.name}: {constants}, {CAPTURED_LIMIT}. {largest_text}")
