"""This module compares two programs, for `CompileProfile.diff` and `model.diff`: it lists facts about each program, up
to the plan, and reports the facts that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from rlx_jax.compiler.passes import PASS_NAMES
from rlx_jax.compiler.pipeline import Template, make_lir, make_template
from rlx_jax.compiler.settings import Buckets, Settings
from rlx_jax.ir.graph import Leaf
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.lir.plan import Lir, layout_of
from rlx_jax.profiles import Change
from rlx_jax.profiles.check import iter_settings
from rlx_jax.program import Built

# Prefixes of the names of counts: a count that only one program has is 0 in the other.
COUNT_PREFIXES = ("ops", "values")


def program_changes(
    built: Built, ours: Settings, theirs: Settings, program: str, serves: bool, sizes: Mapping[str, int] | None
) -> tuple[Change, ...]:
    """Return the differences between the programs of a flow that two choices of settings give. Nothing is compiled.

    Args:
        built: the built flow.
        ours, theirs: the settings.
        program: the name of the program.
        serves: whether the model serves requests; settings of the request loop are compared too.
        sizes: sizes to compare the implementations of ops for; None to leave them out.

    Returns:
        A `Change` for each fact that differs, in groups.

    Raises:
        ProfileError: the settings do not apply to the program.
    """
    facts = []
    for settings in (ours, theirs):
        template = make_template(built, 0.0, settings, program)
        lir = None if sizes is None else make_lir(template, sizes, settings)
        facts.append(dict(facts_of_program(template, settings, program, serves, lir)))
    return fact_changes(*facts)


def fact_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Return a change for each fact that differs, by the first word of their names in the order of the facts.

    A fact that only one side has is "none" on the other, or "0" if it is a count.
    """
    names = list(dict.fromkeys((*before, *after)))
    groups = list(dict.fromkeys(name.split()[0] for name in names))
    changed = [name for name in names if before.get(name) != after.get(name)]

    def fact_text(facts: Mapping[str, str], name: str) -> str:
        return facts.get(name, "0" if name.startswith(COUNT_PREFIXES) else "none")

    return tuple(
        Change(name, fact_text(before, name), fact_text(after, name))
        for name in sorted(changed, key=lambda name: groups.index(name.split()[0]))
    )


def facts_of_program(
    template: Template, settings: Settings, program: str, serves: bool, lir: Lir | None
) -> Iterator[tuple[str, str]]:
    """List facts about a program, as pairs of a name and a value, in the order of the report.

    Args:
        template: the program.
        settings: the settings that it was made with.
        program: its name.
        serves: whether the model serves requests; settings of the request loop are listed too.
        lir: its plan, for the implementations of ops; None to leave them out.
    """
    yield from ((f"pass {name}", "runs" if name in template.nodes else "does not run") for name in PASS_NAMES)
    yield from _op_counts(template)
    types = layout_of([template.hir], settings.plan.scan, settings.plan.packed).types()
    yield "parameters", f"{len(types)} arrays, {sum(t.nbytes for t in types.values()):,} bytes"
    yield "parameters in", ", ".join(sorted({short_name(t.dtype) for t in types.values()}))
    yield "layers", "one loop" if settings.plan.scan else "one after the other"
    scopes = {"", *(["train"] if program == "train" else []), *(["state"] if template.state else [])}
    for place, row, _ in iter_settings(settings.profile):
        applies = not place.startswith("backend.") or place.split(".")[1] == settings.target
        if applies and row.label and row.applies_to in (scopes | {"serves"} if serves else scopes):
            yield row.label, _to_text(attrgetter(row.resolved_as or f"profile.{place}")(settings))
    if serves:
        yield from ((f"buckets.{f.name}", _to_text(getattr(settings.buckets, f.name))) for f in fields(Buckets))
    if lir is not None:
        for what in ("attention", "products", "experts", "recurrences"):
            yield f"runs {what}", "; ".join(getattr(lir, what)())


def _op_counts(template: Template) -> Iterator[tuple[str, str]]:
    """Count the ops, the ops of each kind, the values of each dtype, and the fusions."""
    nodes = [node for _, node in template.mir.walk() if not isinstance(node.op, Leaf)]
    yield "ops", str(len(nodes))
    kinds = Counter(node.op.name() for node in nodes)
    yield from ((f"ops {kind}", str(kinds[kind])) for kind in sorted(kinds))
    dtypes = Counter(short_name(t.dtype) for node in nodes for t in node.types)
    yield from ((f"values in {dtype}", str(dtypes[dtype])) for dtype in sorted(dtypes))
    yield "fused", str(len(template.fusion.fused))
    yield "missed", str(len(template.fusion.missed))


def _to_text(value: Any) -> str:
    """Return the value of a setting as text."""
    if isinstance(value, np.dtype):
        return short_name(value)
    if isinstance(value, tuple):
        return ", ".join(map(_to_text, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_to_text(v)}" for k, v in value.items()) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
