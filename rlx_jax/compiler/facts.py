"""What the settings of a profile can act on in a model, for the warnings of `rlx_jax.profiles.effects`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax

from rlx_jax.compiler.passes import PIPELINE, Job, Pass
from rlx_jax.compiler.settings import CLEANING, Settings
from rlx_jax.compiler.template import Template
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Hir
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.lir.implementations import has_triton
from rlx_jax.profiles import CompileProfile
from rlx_jax.profiles.effects import Facts


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
