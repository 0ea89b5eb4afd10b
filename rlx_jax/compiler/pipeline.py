"""This module is the compiler, from a built flow to a pure JAX function.

    flow ── build ──▶ HIR ── expand, precision, merge, derive ──▶ HIR of one program
         ── lower ──▶ MIR template ── passes ──▶ MIR ── specialise, plan ──▶ LIR ── interpret, jit ──▶ executable

Every rewrite, from HIR to MIR with sizes, is a row of `PIPELINE` (`rlx_jax/compiler/passes.py`), and the verifier runs
after each. Only `settings_for` (`rlx_jax/compiler/settings.py`) reads a profile; passes, layout and plan get resolved
values. The rows of the schema decide which settings have no effect on a program (`rlx_jax/profiles/effects.py`).
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlx_jax import errors
from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.passes import LEFT_TO_XLA, PIPELINE, Job, check_constants, check_switches, pass_named, run_passes
from rlx_jax.compiler.settings import (
    CLEANING,
    Settings,
    check_kernels,
    choose_profile,
    choose_settings,
    kernel_refusal,
    lowering_settings,
    mesh_options,
    step_refusal,
)
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import Device, running_device
from rlx_jax.errors import check_names, listing, shown
from rlx_jax.ir import hir
from rlx_jax.ir.checkpoint_tensor import steps
from rlx_jax.ir.graph import Graph, Hir, Input, TypeCache
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.custom import check_captured, is_exported
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.param import Quantized, packing_of
from rlx_jax.ir.text import dump_graph
from rlx_jax.ir.types import TensorType, as_dim, is_float
from rlx_jax.lowering.fusion import FusionReport, fusion_report
from rlx_jax.lowering.hir import explicit, row_layouts
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.hir.rules import ring_sizes
from rlx_jax.lowering.inspect.bounds import Bounds, bounds_of, packed_bounds, with_past_tokens
from rlx_jax.lowering.inspect.outline import Cost, Outline, cost, outline
from rlx_jax.lowering.lir.donation import reusable_inputs
from rlx_jax.lowering.lir.implementations import choose_implementations, runnable_choices
from rlx_jax.lowering.lir.interpret import Env, interpret, interpret_shards
from rlx_jax.lowering.lir.packed import PackedWeight, decoded, packed_implementation
from rlx_jax.lowering.lir.per_shard import UndividedError, shard_program
from rlx_jax.lowering.lir.plan import Call, Choice, Layout, Lir, returned_leaves, rollback_arrays, state_types
from rlx_jax.lowering.mir.head import Head, find_head
from rlx_jax.lowering.mir.small import remove_unread_inputs
from rlx_jax.lowering.sharding import ModelSharding
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.profiles.effects import ModelFacts, warn_without_effect
from rlx_jax.program import Built


@dataclass(frozen=True)
class Template:
    """A program with symbolic sizes, at every level.

    Attributes:
        built: the built flow.
        hir: the HIR graph of the program before it is lowered.
        mir: the MIR graph after all passes.
        bounds: the limits of ids and sequence lengths that calls are checked against.
        scan: whether repeated layers run as one `lax.scan`.
        optional: the optional inputs that the derived program adds.
        types: the cache of types of the graphs.
        seconds, nodes: the time of each pass, and the number of nodes after it.
        fusion: the fused and the missed patterns.
        job: the job of the passes that made it.
    """

    built: Built
    hir: Graph
    mir: Graph
    bounds: Bounds
    scan: bool
    optional: tuple[Input, ...]
    types: TypeCache
    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    fusion: FusionReport
    job: Job

    @functools.cached_property
    def state(self) -> Mapping[str, TensorType]:
        """Return the types of the arrays of the state, by name."""
        return state_types(self.mir, self.scan)

    @functools.cached_property
    def rings(self) -> Mapping[str, int]:
        """Return the window of each ring buffer, by the symbol of its size; see `ring_sizes`."""
        return ring_sizes(self.hir)

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Return the symbols in the types of the state and the inputs."""
        types = (*self.state.values(), *(i.type for i in self.mir.inputs))
        return frozenset().union(*(t.symbols for t in types))

    @functools.cached_property
    def unread(self) -> tuple[str, ...]:
        """Return the inputs of the flow that this program does not have, in order."""
        input_names = {i.input for i in self.mir.inputs}
        return tuple(i.input for i in self.built.hir.inputs if i.input not in input_names)

    @functools.cached_property
    def rollback_arrays(self) -> tuple[tuple[str, int], ...]:
        """Return the state arrays that the program gives after each token; see `rollback_arrays` of the plan."""
        return rollback_arrays(self.mir, self.scan)

    @functools.cached_property
    def head(self) -> Head:
        """Return the head, the product with a weight that computes the first output; raises as `find_head`."""
        return find_head(self.mir)

    @functools.cached_property
    def has_head(self) -> bool:
        """Return whether the first output is the product of a head."""
        try:
            return self.head is not None
        except errors.GraphError:
            return False

    def headless(self) -> Template:
        """Return the template of the program up to its head; the operands of the head are the outputs."""
        job = Job(lowering_settings(), self.types, headless=True)
        mir = pass_named("up_to_head")(self.mir, job).graph
        return replace(self, mir=mir, job=replace(self.job, headless=True))

    def cost(self, sizes: Mapping[str, int]) -> Cost:
        """Return the FLOPs, bytes and scratch memory for the sizes that a user asks a report of, without compiling.

        Scratch memory is the temporary bytes of the op that needs most. `sizes` has a number for each symbol.

        Raises:
            GraphError: a size is missing, or the program has no such symbol. ShapeError: a size is not a number.
        """
        self.check_sizes(sizes)
        return cost(pass_named("specialise")(self.mir, Job(lowering_settings(), self.types, sizes=sizes)).graph)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check that there is a number for each symbol, and for nothing else; raises as `cost`."""
        check_names(sizes, sorted(self.symbols), f"{self.built.name}: the program has no size", "; it has")
        for name, size in sizes.items():
            if not isinstance(as_dim(size, f"{self.built.name}: {name}"), int):
                raise errors.ShapeError(f"{self.built.name}: {name}: expected a whole number, got {shown(size)}")
        if missing := sorted(self.symbols.difference(sizes)):
            sizes_text = ", ".join(f"{name}={sizes.get(name, '…')}" for name in sorted(self.symbols))
            raise errors.GraphError(f"{self.built.name}: no size of {listing(missing)}; give all of them: {sizes_text}")

    def outline(self, binding: Mapping[str, int]) -> Outline:
        """Return the table of blocks, with FLOPs and bytes for the sizes in `binding`, and 1 for other sizes."""
        sizes = {name: binding.get(name, 1) for name in self.symbols}
        if is_exported(self.mir):  # it has no ops to count
            return outline(self.built.name, self.hir, None, sizes, self.mir.inputs)
        try:
            mir = pass_named("specialise")(self.mir, Job(lowering_settings(), TypeCache(), sizes=sizes)).graph
        except errors.RlxError:  # the program cannot have these sizes, such as a context of 1 with a wider window
            mir = None
        return outline(self.built.name, self.hir, mir, sizes, self.mir.inputs)


def derived_program(built: Built, program: str) -> str:
    """Return the name of the program to derive from a flow for `program`.

    It differs for a flow that is built for explicit decode: its `forward` and `train` derive `explicit`.

    Raises:
        DeriveError: such a flow has no other programs.
    """
    if built.program == "forward" or program not in ("forward", "train", "packed", "padded", *CACHED_PROGRAMS):
        return program
    if program not in ("forward", "train"):
        raise errors.DeriveError(
            f"{built.name} is explicit decode (for_decode, explicit() or BindDecodeInputs): it has no {program}; "
            "derive that from the flow without explicit decode"
        )
    return built.program


def make_template(
    built: Built, settings: Settings, program: str, last_only: bool = False,
    optional_inputs: frozenset[str] = frozenset(), outputs: tuple[str, ...] | None = None,
) -> Template:  # fmt: skip
    """Lower a built flow to the template of a program, HIR → MIR, by the table of passes; once for equal arguments.

    Args:
        built: the built flow.
        settings: the resolved profile.
        program: the program to derive.
        last_only: compute the outputs for each row's last token only.
        optional_inputs: the optional inputs that calls will pass.
        outputs: the names of the outputs to compute; None for all.

    Returns:
        The template, with the time and the node count of each pass.

    Raises:
        FusionError: the profile sets `fusion.assert_clean`, and a pattern is not fused.
        Others as the passes.
    """
    options = program, last_only, optional_inputs, outputs
    finished, *facts = built.once(_lower, built, settings, *options)
    template = Template(built, *facts)
    if finished < built.since:  # for an earlier load of the config
        template = replace(template, seconds=dict.fromkeys(template.seconds, 0.0))
    return template


def _lower(
    built: Built, settings: Settings, program: str, last_only: bool, optional_inputs: frozenset[str],
    outputs: tuple[str, ...] | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the time, and the fields of `Template` after the first; arguments and errors as for `make_template`."""
    check_switches(settings)
    job = Job(settings, built.types, derived_program(built, program), last_only, optional_inputs, outputs)
    result = run_passes(built.hir, job)
    check_constants(result.graph, built.types)
    left_passes = [name for name in LEFT_TO_XLA if name in result.nodes]
    fusion = fusion_report(result.lowered, result.graph, result.fusion_sites, left_passes)
    if settings.profile.fusion.assert_clean and not fusion.clean:
        raise errors.FusionError(
            f"{built.name}: fusion contract violated: {len(fusion.missed)} missed\n{fusion}", fusion
        )
    if prints_fusion():
        print(f"{built.name} {program}: {fusion}", file=sys.stderr)
    seconds = {"build": built.seconds, **result.seconds}
    read_graph = remove_unread_inputs(built.hir, [i.input for i in built.hir.inputs], built.types)
    bounds = bounds_of(read_graph, settings.max_positions or built.max_positions)
    # The limits of the flow assume one sequence per row that starts at position 0; these programs differ.
    if job.program == "explicit":
        bounds = with_past_tokens(bounds, optional_inputs)
    elif job.program == "packed":
        bounds = packed_bounds(bounds)
    adds = {"explicit": explicit.optional_inputs, "padded": row_layouts.optional_inputs}.get(job.program)
    optional = () if adds is None else adds(built.hir)
    facts = built.types, seconds, result.nodes, fusion, job
    return time.perf_counter(), result.blocks, result.graph, bounds, settings.plan.scan, optional, *facts


def prints_fusion() -> bool:
    """Return whether the environment variable `RLX_FUSION_REPORT` asks for the fusion report of each program."""
    return os.environ.get("RLX_FUSION_REPORT", "").lower() not in ("", "0", "false")


def make_lir(template: Template, binding: Mapping[str, int], settings: Settings) -> Lir:
    """Specialize a template to sizes and plan it: MIR template → MIR with sizes → LIR."""
    # A new cache of types: the template's cache would retain the types of every size ever requested.
    job = Job(settings, TypeCache(), program=template.job.program, sizes=binding)
    global_graph = pass_named("specialise")(template.mir, job).graph
    shard, refusal, model_sharding = None, "", settings.model_sharding
    if model_sharding is not None and pass_named("per_shard").runs(replace(job, headless=template.job.headless)):
        try:
            shard = shard_program(global_graph, model_sharding, job.types)
        except UndividedError as reason:
            refusal = f"over a mesh, {reason}"
    check_kernels(settings, global_graph.name, refusal)
    graph, model_sharding = (global_graph, model_sharding) if shard is None else (shard.graph, None)
    names = "divide_last", "group_deltas", "group_heads", "group_attention", "group_experts", "group_products"
    groupings = tuple(map(pass_named, names if model_sharding is None else ()))
    for grouping in groupings:
        graph = grouping(graph, job).graph if grouping.runs(job) else graph
    choices = choose_implementations(graph, settings.device, settings.plan, model_sharding)
    donated = reusable_inputs(global_graph, settings.plan.donate_inputs)
    plan = replace(settings.plan, donate_inputs=donated, choices=choices)
    grouped = tuple(p.name for p in groupings if p.runs(job))
    if shard is None:
        return Lir(graph, plan, grouped, refusal or step_refusal(settings, job.program))
    used = {choice.implementation for choice in choices.values()}
    plan = replace(plan, compiler_options=mesh_options(settings, binding.get("batch", 1), used))
    return Lir(global_graph, plan, grouped, shard=replace(shard, graph=graph))


def lir_of(built: Built, profile: ProfileLike | None, sizes: Mapping[str, int]) -> Lir:
    """Return the planned forward program of a built flow for one choice of sizes."""
    profile = None if profile is None else CompileProfile.of(profile)
    settings = choose_settings(built, profile, merge=False, program="forward")
    template = make_template(built, settings, "forward")
    used_profile = choose_profile(built, profile)
    if built.plan is None and used_profile != CompileProfile.auto():
        warn_without_effect([facts_of(template, used_profile, settings, ("forward",), False)], 3)
    lir = make_lir(template, sizes, settings)
    read_keys = replace(built, hir=lir.graph).params
    unread = tuple(key for key in built.keys_read if key not in read_keys)
    return replace(lir, plan=replace(lir.plan, unread=unread))


def make_function(
    lir: Lir, layout: Layout, model_sharding: ModelSharding | None = None, *, ends_at_head: bool = False
) -> Function:
    """Return a planned program as a pure JAX function `(params, state, inputs) → (outputs, state)`.

    Args:
        lir: the planned program.
        layout: the parameters that hold its weights.
        model_sharding: the sharding rules; None on one device.
        ends_at_head: whether the outputs are the operands of a head, whose weight then stays packed.

    Raises:
        UnsupportedError: while tracing, if the profile requires an implementation that this device cannot run.
        GraphError: while tracing, if an array that a function captures has changed.
    """
    names = layout.by_program()
    layout.check(lir.graph, lir.plan.scan)

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> tuple[tuple[Any, ...], StateArrays]:
        check_captured(lir.graph)
        leaves = {program: params[name] for program, name in names.items()}
        choices = runnable_on_device(lir, running_device())
        scan, remat, target = lir.plan.scan, lir.plan.remat, lir.plan.target
        env = Env(leaves, inputs, dict(state), scan, remat, choices, model_sharding, target)
        outputs = interpret(lir.graph, env) if lir.shard is None else interpret_shards(lir.shard, env)
        if not ends_at_head:
            outputs = tuple(map(decoded, outputs))
        return outputs, env.state if model_sharding is None else shard_state(lir, env.state, model_sharding)

    return function


def shard_state(lir: Lir, state: StateArrays, model_sharding: ModelSharding) -> StateArrays:
    """Return the state, constrained to the sharding that the next call expects."""
    leaves = returned_leaves(lir.graph, lir.plan.scan)
    roles = {name: role for name, (_, role) in leaves.items() if name in state}
    shardings = {name: model_sharding.value_sharding(roles[name], state[name].shape) for name in roles}
    return {**state, **{name: lax.with_sharding_constraint(state[name], s) for name, s in shardings.items()}}


def runnable_on_device(lir: Lir, device: Device) -> Mapping[Call, Choice]:
    """Return the implementations of the ops on this device, which may differ from the planned one.

    Raises:
        UnsupportedError: the profile names an implementation that this device cannot run.
    """
    choices = runnable_choices(lir.plan.choices, device)
    idle = {c.implementation for call, c in lir.plan.choices.items() if call not in choices}
    if lir.plan.implementation in idle:
        raise errors.UnsupportedError(
            f"{lir.graph.name}: attention.implementation = '{lir.plan.implementation}' is planned for "
            f"{lir.plan.target}, and JAX runs on {device.kind}: here the plan can be inspected, but not run"
        )
    if idle:
        plan = f"planned for {lir.plan.target} with {', '.join(sorted(idle))}, and JAX runs on {device.kind}"
        message = f"{lir.graph.name}: {plan}: XLA's implementation runs instead"
        warnings.warn(message, errors.RlxWarning, stacklevel=2)
    return choices


AnyArray = Any


def head_operands(head: Head, kernel: AnyArray, bias: AnyArray = None) -> list[AnyArray]:
    """Return the weights of a head in the dtypes that its product takes: the kernel, and the bias if there is one.

    A packed kernel stays packed, unless it is rounded to another dtype before the product.
    """
    wide = jnp.float32 if head.product.f32_result else head.dtype
    stays_packed = isinstance(kernel, PackedWeight) and kernel.dtype == head.dtype
    kernel = kernel if stays_packed else decoded(kernel).astype(head.dtype)
    return [kernel] + ([] if bias is None else [bias.astype(wide)])


def head_product(head: Head, target: str, hidden: AnyArray, operands: Sequence[AnyArray]) -> AnyArray:
    """Compute the product of a head on a platform, with operands as `head_operands` returns them."""
    packed_run = packed_implementation(head.product, (hidden, *operands), target)
    if packed_run is not None:
        return packed_run(head.product, hidden, *operands)
    return head.product.eval(hidden, *map(decoded, operands))


def apply_tail(head: Head, product: AnyArray) -> AnyArray:
    """Compute the first output of a program from the product of its head."""
    (output,) = interpret(head.tail, Env({}, {}, {}, operands=(product,)))
    return output


def with_hidden(run: Function, head: Head, target: str, last_only: bool) -> Function:
    """Return a function with the outputs (logits, hidden states `[B, S, H]` f32).

    Args:
        run: the program up to its head.
        head: the head.
        target: the platform that the program runs on.
        last_only: compute the logits for each row's last token only, at `lengths - 1`: `[B, 1, V]`.
    """

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        (hidden, *weights), state = run(params, state, inputs)
        rows = last_rows(hidden, inputs["lengths"]) if last_only else hidden
        logits = apply_tail(head, head_product(head, target, rows, head_operands(head, *weights)))
        return (logits, hidden.astype(jnp.float32)), state

    return function


def last_rows(hidden: AnyArray, lengths: AnyArray) -> AnyArray:
    """Return the hidden state of each row's last token, `[B, S, H]` → `[B, 1, H]`; the first for an empty row."""
    index = jnp.maximum(lengths - 1, 0).reshape(-1, 1, 1)
    return jnp.take_along_axis(hidden, index, axis=1, mode="clip")


def facts_of(
    template: Template, profile: CompileProfile, settings: Settings, programs: tuple[str, ...], serves: bool
) -> ModelFacts:
    """Return the facts about a flow that decide which settings have an effect.

    They come from the flow's first template; what other programs add follows from their names.

    Args:
        template: the first template of the flow.
        profile: the profile of the flow.
        settings: the resolved profile.
        programs: the programs that calls run.
        serves: whether the model serves requests.

    Raises:
        UnsupportedError: the profile requires kernels, and none can run; names the reason.
    """
    # Passes that run for some program of the model, whatever the profile switches off; fusion passes rewrite nothing.
    base = replace(settings, disabled_passes=frozenset())
    variants: Any = itertools.product(programs, (False, True), (None, {}))
    jobs = [Job(base, template.built.types, program, last, sizes=sizes) for program, last, sizes in variants]
    passes = {p.name for p in PIPELINE if p.kind != "fusion" and any(p.runs(job) for job in jobs)}
    no_kernels = kernel_refusal(settings, programs)
    check_kernels(settings, template.built.name, no_kernels)
    return ModelFacts(
        template.built.name,
        profile,
        settings.target,
        frozenset(_contents(template)),
        programs,
        not set(CACHED_PROGRAMS).isdisjoint(programs),
        serves,
        frozenset(passes) - _idle_passes(template, settings, programs),
        None if settings.model_sharding is None else tuple(map(str, settings.model_sharding.mesh.axis_names)),
        template.built.refusals,
        no_kernels,
    )


def _idle_passes(template: Template, settings: Settings, programs: tuple[str, ...]) -> frozenset[str]:
    """Return the names of cleaning passes that the profile switches off and that would change no program."""
    built, switched_off = template.built, settings.disabled_passes.intersection(CLEANING)

    def dump_without(names: frozenset[str], program: str, last_only: bool) -> str:
        disabled = settings.disabled_passes.difference(CLEANING) | names
        job = Job(replace(settings, disabled_passes=disabled), built.types, derived_program(built, program), last_only)
        try:
            return dump_graph(run_passes(built.hir, job).graph)
        except errors.DeriveError:  # a program that the flow does not have
            return ""

    idle = set(switched_off)
    for variant in itertools.product(programs if idle else (), (False, True)):
        cleaned = dump_without(frozenset(), *variant)
        idle -= {name for name in idle if dump_without(frozenset({name}), *variant) != cleaned}
    return frozenset(idle)


def _contents(template: Template) -> Iterator[str]:
    """List the features that a program contains, by the names in `REASONS`."""
    ops = [(node.op, node.types) for _, node in template.mir.walk()]
    contains = {
        "floats": any(is_float(t.dtype) for _, types in ops for t in types),
        "float parameters": any(is_float(param.type.dtype) for param in template.hir.params()),
        "packable": any(isinstance(s, Quantized) for p in template.hir.params() for q in p.programs for s in steps(q)),
        "products": any(hasattr(op, "precision") for op, _ in ops),
        "ids": any(op.ids is not None for op, _ in ops),
        "packed": any(packing_of(p) is not None for param in template.hir.params() for p in param.programs),
        "experts": any(isinstance(op, ExpertFfn) for op, _ in ops),
        "recurrence": any(isinstance(op, GatedDeltaOp | SelectiveScanOp) for op, _ in ops),
        "attention": any(isinstance(op, AttentionOp) for op, _ in ops),
        "window": any(isinstance(op, AttentionOp) and op.window is not None for op, _ in ops),
        "linears": any(isinstance(node.op, hir.Linear) for _, node in template.hir.walk()),
        "layers": any(op.regions() for op, _ in ops),
        "blocks": any(isinstance(node.op, Hir) for _, node in template.hir.walk()),
        "merged": any(place.by == "merge_linears" for place in template.fusion.fused),
        "state": bool(template.state),
    }
    return (name for name, is_present in contains.items() if is_present)
