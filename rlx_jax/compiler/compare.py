"""What changes in a program with other settings: both are made, up to the plan, and laid beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from rlx_jax.compiler.passes import NAMES
from rlx_jax.compiler.pipeline import Template, make_lir, make_template
from rlx_jax.compiler.settings import Buckets, Settings
from rlx_jax.ir.graph import Leaf
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.lir.plan import layout_of
from rlx_jax.profiles import Change
from rlx_jax.profiles.check import rows
from rlx_jax.program import Built

# What the names of counts begin with: what is not there is 0 of them.
COUNTS = ("ops", "values")


def program_changes(
    built: Built, ours: Settings, theirs: Settings, program: str, serves: bool, sizes: Mapping[str, int] | None
) -> tuple[Change, ...]:
    """The differences between the program of one choice of settings and that of another; with `sizes` also in how its
    ops run, and where the model `serves` requests in how these run. Nothing is compiled.

    Raises:
        ProfileError: settings that the program cannot have.
    """
    before, after = (dict(_facts(built, settings, program, serves, sizes)) for settings in (ours, theirs))
    names = list(dict.fromkeys((*before, *after)))
    groups = list(dict.fromkeys(name.split()[0] for name in names))
    changed = [name for name in names if before.get(name) != after.get(name)]

    def told(facts: Mapping[str, str], name: str) -> str:
        return facts.get(name, "0" if name.startswith(COUNTS) else "none")

    return tuple(
        Change(name, told(before, name), told(after, name))
        for name in sorted(changed, key=lambda name: groups.index(name.split()[0]))
    )


def _facts(
    built: Built, settings: Settings, program: str, serves: bool, sizes: Mapping[str, int] | None
) -> Iterator[tuple[str, str]]:
    """What can be said of a program, in the order in which it is told."""
    template = make_template(built, 0.0, settings, program)
    yield from ((f"pass {name}", "runs" if name in template.nodes else "does not run") for name in NAMES)
    yield from _counted(template)
    types = layout_of([template.hir], settings.plan.scan).types()
    yield "parameters", f"{len(types)} arrays, {sum(t.nbytes for t in types.values()):,} bytes"
    yield "parameters in", ", ".join(sorted({short_name(t.dtype) for t in types.values()}))
    yield "layers", "one loop" if settings.plan.scan else "one after the other"
    of = {"", *(["train"] if program == "train" else []), *(["state"] if template.state else [])}
    for place, row, _ in rows(settings.profile):
        here = not place.startswith("backend.") or place.split(".")[1] == settings.target
        if here and row.label and row.of in (of | {"serves"} if serves else of):
            yield row.label, _written(attrgetter(row.resolved or f"profile.{place}")(settings))
    if serves:
        yield from ((f"buckets.{f.name}", _written(getattr(settings.buckets, f.name))) for f in fields(Buckets))
    if sizes is not None:
        lir = make_lir(template, sizes, settings)
        for what in ("attention", "products", "experts", "recurrences"):
            yield f"runs {what}", "; ".join(getattr(lir, what)())


def _counted(template: Template) -> Iterator[tuple[str, str]]:
    """Ops, those of each kind, values of each dtype, and fusions."""
    nodes = [node for _, node in template.mir.walk() if not isinstance(node.op, Leaf)]
    yield "ops", str(len(nodes))
    kinds = Counter(node.op.name() for node in nodes)
    yield from ((f"ops {kind}", str(kinds[kind])) for kind in sorted(kinds))
    dtypes = Counter(short_name(t.dtype) for node in nodes for t in node.types)
    yield from ((f"values in {dtype}", str(dtypes[dtype])) for dtype in sorted(dtypes))
    yield "fused", str(len(template.fusion.fused))
    yield "missed", str(len(template.fusion.missed))


def _written(value: Any) -> str:
    if isinstance(value, np.dtype):
        return short_name(value)
    if isinstance(value, tuple):
        return ", ".join(map(_written, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_written(v)}" for k, v in value.items()) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
