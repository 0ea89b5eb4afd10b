"""The compiler on one page.

    flow ── build ──▶ HIR ── expand, precision, merge, derive ──▶ HIR of one program
         ── lower ──▶ MIR template ── passes ──▶ MIR ── specialise, plan ──▶ LIR ── interpret, jit ──▶ executable

Every rewrite, from HIR to MIR with sizes, is a row of `PIPELINE` (`rlx_jax/compiler/passes.py`); the verifier runs
after each of them. A profile is read in `settings_for` (`rlx_jax/compiler/settings.py`): passes, layout and plan get
values. Which of its fields do nothing, their rows say (`rlx_jax/profiles/effects.py`), by what is in the program.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.passes import LEFT_TO_XLA, PIPELINE, Job, Pass, check_switches, pass_named, run_passes
from rlx_jax.compiler.settings import CLEANING, Settings, choose_profile, choose_settings, plain
from rlx_jax.device import Device, running_device
from rlx_jax.errors import (
    DeriveError,
    FusionError,
    GraphError,
    RlxError,
    RlxWarning,
    UnsupportedError,
    check_known,
    listing,
    quote,
)
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Hir, Input, TypeCache
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.custom import check_captured, check_constants
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import TensorType, as_dim, is_float
from rlx_jax.lowering.fusion import FusionReport, fusion_report
from rlx_jax.lowering.hir import explicit, row_layouts
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.hir.rules import ring_sizes
from rlx_jax.lowering.inspect.bounds import Bounds, behind_cache, bounds_of, packed_rows
from rlx_jax.lowering.inspect.outline import Cost, Outline, cost, outline
from rlx_jax.lowering.lir.donation import reusable_inputs
from rlx_jax.lowering.lir.implementations import choose_all, has_triton, runnable
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.lowering.lir.plan import Call, Choice, Layout, Lir, given_leaves, state_types, taken_back
from rlx_jax.lowering.mir.head import Head, find_head
from rlx_jax.lowering.mir.small import without_inputs
from rlx_jax.lowering.sharding import Division
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.profiles.effects import Facts, warn_of_idle
from rlx_jax.program import Built


@dataclass(frozen=True)
class Template:
    """One program with symbolic sizes, at every level."""

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

    @functools.cached_property
    def state(self) -> Mapping[str, TensorType]:
        """The arrays of its state."""
        return state_types(self.mir, self.scan)

    @functools.cached_property
    def rings(self) -> Mapping[str, int]:
        """The dimensions of its rings; see `ring_sizes`."""
        return ring_sizes(self.hir)

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Names of the sizes that its state and inputs have."""
        types = (*self.state.values(), *(i.type for i in self.mir.inputs))
        return frozenset().union(*(t.symbols for t in types))

    @functools.cached_property
    def unread(self) -> tuple[str, ...]:
        """The inputs of the flow that this program does not have, in order."""
        read = {i.input for i in self.mir.inputs}
        return tuple(i.input for i in self.built.hir.inputs if i.input not in read)

    @functools.cached_property
    def taken_back(self) -> tuple[tuple[str, int], ...]:
        """See `taken_back` of the plan."""
        return taken_back(self.mir, self.scan)

    @functools.cached_property
    def head(self) -> Head:
        """The product with a weight that makes the first output; see `find_head` for what it raises."""
        return find_head(self.mir)

    def headless(self) -> Template:
        """The same up to its head, whose operands are the outputs."""
        job = Job(plain(), self.types, headless=True)
        return replace(self, mir=pass_named("up_to_head")(self.mir, job).graph)

    def cost(self, sizes: Mapping[str, int]) -> Cost:
        """FLOPs, bytes and scratch memory of the program for one choice of sizes. Nothing is compiled.

        Raises:
            GraphError: a size is missing, or is none of the program.
        """
        check_known(sizes, sorted(self.symbols), f"{self.built.name}: the program has no size", "; it has")
        for name, size in sizes.items():
            as_dim(size, f"{self.built.name}: {name}")
        if missing := sorted(self.symbols.difference(sizes)):
            whole = ", ".join(f"{name}={sizes.get(name, '…')}" for name in sorted(self.symbols))
            raise GraphError(f"{self.built.name}: no size of {listing(missing)}; give all of them: {whole}")
        return cost(pass_named("specialise")(self.mir, Job(plain(), self.types, sizes=sizes)).graph)

    def outline(self, known: Mapping[str, int]) -> Outline:
        """The table of its blocks; FLOPs and bytes are those of the sizes that are `known`, and of 1 for others."""
        sizes = {name: known.get(name, 1) for name in self.symbols}
        try:
            mir = pass_named("specialise")(self.mir, Job(plain(), TypeCache(), sizes=sizes)).graph
        except RlxError:  # it has no such sizes, as where a window is wider than 1
            mir = None
        return outline(self.built.name, self.hir, mir, sizes, self.mir.inputs)


def derived_program(built: Built, program: str) -> str:
    """What is derived from a flow for `program`: one that asks to be `explicit` is that in `forward` and `train`.

    Raises:
        DeriveError: such a flow has no other programs.
    """
    if built.program == "forward" or program not in ("forward", "train", "packed", "padded", *CACHED_PROGRAMS):
        return program
    if program not in ("forward", "train"):
        raise DeriveError(
            f"{built.name} is explicit decode (for_decode, explicit() or BindDecodeInputs): it has no {program}; "
            "derive that from the flow without"
        )
    return built.program


def make_template(
    built: Built,
    build_s: float,
    settings: Settings,
    program: str,
    last_only: bool = False,
    given: frozenset[str] = frozenset(),
    outputs: tuple[str, ...] | None = None,
) -> Template:
    """HIR → MIR: the table of passes.

    Args:
        given: the optional inputs that calls will supply.
        outputs: those that are wanted, by name; None for all.
    """
    check_switches(settings)
    job = Job(settings, built.types, derived_program(built, program), last_only, given, outputs)
    ran = run_passes(built.hir, job)
    check_constants(ran.graph, built.types)
    left = [name for name in LEFT_TO_XLA if name in ran.nodes]
    fusion = fusion_report(ran.lowered, ran.graph, ran.places, left)
    if settings.profile.fusion.assert_clean and not fusion.clean:
        raise FusionError(f"{built.name}: fusion contract violated: {len(fusion.missed)} missed\n{fusion}", fusion)
    seconds = {"build": build_s, **ran.seconds}
    read = without_inputs(built.hir, [i.input for i in built.hir.inputs], built.types)
    bounds = bounds_of(read, settings.max_positions or built.max_positions)
    if job.program == "explicit":
        bounds = behind_cache(bounds, given)
    elif job.program == "packed":
        bounds = packed_rows(bounds)
    adds = {"explicit": explicit.optional_inputs, "padded": row_layouts.optional_inputs}.get(job.program)
    optional = () if adds is None else adds(built.hir)
    times = built.types, seconds, ran.nodes, fusion
    return Template(built, ran.blocks, ran.graph, bounds, settings.plan.scan, optional, *times)


def text_after(built: Built, settings: Settings, program: str, level: str, after: str) -> str:
    """The dump of a program as pass `after` leaves it.

    Raises:
        GraphError: there is no such pass, it does not run for this program, or its program is at another level.
    """
    found = pass_named(after)
    if found.level != level:
        raise GraphError(f"pass {quote(after)} leaves a program at {found.level}: text({str(found.level)!r}, after=…)")
    ran = run_passes(built.hir, Job(settings, built.types, derived_program(built, program)), stop=after)
    return dump(ran.graph, level, f", after={after}")


def make_lir(template: Template, binding: Mapping[str, int], settings: Settings) -> Lir:
    """MIR template → MIR with sizes → LIR."""
    # Types of these sizes: the template's own cache would keep those of every size that was ever asked for.
    graph = pass_named("specialise")(template.mir, Job(settings, TypeCache(), sizes=binding)).graph
    plan = settings.plan
    asked = plan.implementation, plan.products, plan.experts, settings.division, plan.kernels
    choices = choose_all(graph, settings.device, *asked)
    return Lir(graph, replace(plan, donate_inputs=reusable_inputs(graph, plan.donate_inputs), choices=choices))


def lir_of(built: Built, profile: ProfileLike | None, sizes: Mapping[str, int]) -> Lir:
    """The forward program of `built` for one choice of sizes."""
    profile = None if profile is None else CompileProfile.of(profile)
    settings = choose_settings(built, profile, merge=False, program="forward")
    template = make_template(built, 0.0, settings, "forward")
    used = choose_profile(built, profile)
    if built.plan is None and used != CompileProfile.auto():
        warn_of_idle([facts_of(template, used, settings, ("forward",), False)], 3)
    lir = make_lir(template, sizes, settings)
    read = replace(built, hir=lir.graph).params
    unread = tuple(key for key in built.keys_read if key not in read)
    return replace(lir, plan=replace(lir.plan, unread=unread))


def make_function(lir: Lir, layout: Layout, division: Division | None = None) -> Function:
    """LIR → a pure JAX function `(params, state, inputs) → (outputs, state)`, divided over devices as `division` says.

    Raises:
        UnsupportedError: when it is traced, and the profile asks for what only another device runs.
        GraphError: when it is traced, and an array that a function captures has changed.
    """
    names = layout.by_program()
    layout.check(lir.graph, lir.plan.scan)

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> tuple[tuple[Any, ...], StateArrays]:
        check_captured(lir.graph)
        leaves = {program: params[name] for program, name in names.items()}
        choices = choices_here(lir, running_device())
        env = Env(leaves, inputs, dict(state), lir.plan.scan, lir.plan.remat, choices, division)
        outputs = interpret(lir.graph, env)
        return outputs, env.state if division is None else placed_state(lir, env.state, division)

    return function


def placed_state(lir: Lir, state: StateArrays, division: Division) -> StateArrays:
    """The state where the next call wants it."""
    leaves = given_leaves(lir.graph, lir.plan.scan)
    return {
        name: lax.with_sharding_constraint(a, division.value(leaves[name][1], a.shape)) if name in leaves else a
        for name, a in state.items()
    }


def choices_here(lir: Lir, here: Device) -> Mapping[Call, Choice]:
    """How its ops run on this device, which need not be the one that it was planned for.

    Raises:
        UnsupportedError: an implementation was asked for by name, and this device has none.
    """
    choices = runnable(lir.plan.choices, here)
    idle = {c.implementation for call, c in lir.plan.choices.items() if call not in choices}
    if lir.plan.implementation in idle:
        raise UnsupportedError(
            f"{lir.graph.name}: attention.implementation = '{lir.plan.implementation}' is planned for "
            f"{lir.plan.target}, and JAX runs on {here.kind}: only the plan can be looked at here"
        )
    if idle:
        message = f"planned for {lir.plan.target} with {', '.join(sorted(idle))}, and JAX runs on {here.kind}"
        warnings.warn(f"{lir.graph.name}: {message}: XLA takes its place", RlxWarning, stacklevel=2)
    return choices


AnyArray = Any


def head_operands(head: Head, kernel: AnyArray, bias: AnyArray = None) -> list[AnyArray]:
    """The weights as the product takes them."""
    wide = jnp.float32 if head.product.f32_result else head.dtype
    return [kernel.astype(head.dtype)] + ([] if bias is None else [bias.astype(wide)])


def behind_product(head: Head, product: AnyArray) -> AnyArray:
    """The first output of a program from its head's product."""
    (made,) = interpret(head.tail, Env({}, {}, {}, operands=(product,)))
    return made


def with_hidden(run: Function, head: Head, last_only: bool) -> Function:
    """Around a program up to its head: outputs (logits, hidden states `[B, S, H]` f32), the former of each row's last
    token alone, `[B, 1, V]`, where `last_only`; a row's tokens are those before `lengths`."""

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        (hidden, *weights), state = run(params, state, inputs)
        read = last_rows(hidden, inputs["lengths"]) if last_only else hidden
        logits = behind_product(head, head.product.eval(read, *head_operands(head, *weights)))
        return (logits, hidden.astype(jnp.float32)), state

    return function


def last_rows(hidden: AnyArray, lengths: AnyArray) -> AnyArray:
    """`[B, S, H]` → that of the last token `[B, 1, H]`, of the first one where a row has none."""
    at = jnp.maximum(lengths - 1, 0).reshape(-1, 1, 1)
    return jnp.take_along_axis(hidden, at, axis=1, mode="clip")


def facts_of(
    template: Template, profile: CompileProfile, settings: Settings, programs: tuple[str, ...], serves: bool
) -> Facts:
    """What the settings of a flow can act on, by its first template. What the other programs add to that one is known
    from their names."""
    passes = list(_passes(template, profile, settings, programs))
    return Facts(
        template.built.name,
        profile,
        settings.target,
        frozenset(_contents(template)),
        programs,
        not set(CACHED_PROGRAMS).isdisjoint(programs),
        serves,
        frozenset(p.name for p in passes if p.kind != "fusion"),  # which rewrite nothing
        None if settings.division is None else tuple(map(str, settings.division.mesh.axis_names)),
        template.built.refusals,
        _no_kernels(settings, programs),
    )


def _passes(
    template: Template, profile: CompileProfile, settings: Settings, programs: tuple[str, ...]
) -> Iterator[Pass]:
    """The passes that run for some program of the model, but for `fusion.disable`."""
    off = frozenset(name for name in CLEANING if not getattr(profile.passes, name))
    free = replace(settings, off=off)
    jobs = [Job(free, template.built.types, program, last) for program in programs for last in (False, True)]
    return (p for p in PIPELINE if any(p.runs(job) for job in jobs))


def _contents(template: Template) -> Iterator[str]:
    """What is in a program, by the names that `REASONS` has for it."""
    ops = [(node.op, node.types) for _, node in template.mir.walk()]
    found = {
        "floats": any(is_float(t.dtype) for _, types in ops for t in types),
        "float parameters": any(is_float(param.type.dtype) for param in template.hir.params()),
        "products": any(hasattr(op, "precision") for op, _ in ops),
        "ids": any(op.ids is not None for op, _ in ops),
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
    return (name for name, there in found.items() if there)


def _no_kernels(settings: Settings, programs: tuple[str, ...]) -> str:
    """Why the package's kernels do not run: they were measured on one device, and have no gradient."""
    if settings.division is not None or not settings.device.has_kernels:
        where = "a mesh" if settings.division else settings.device.name
        return f"kernels run on one H100 or H200, not on {where}"
    if not has_triton():
        return f"kernels are written for Pallas' Triton backend, which jax {jax.__version__} does not have"
    return "a program that is trained has none" if set(programs) == {"train"} else ""
