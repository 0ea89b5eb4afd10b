"""This module compares two programs: by facts about each (`profile.diff`), and block by block (`model.diff`).

Nothing is compiled.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.compiler.passes import PASS_NAMES
from rlx_jax.compiler.pipeline import Template
from rlx_jax.compiler.settings import Settings
from rlx_jax.dataclasses import dataclass, field, fields
from rlx_jax.inspection.work import block_work
from rlx_jax.ir.graph import Graph, Leaf, Param
from rlx_jax.ir.param import Program, packed_arrays, packing_of, size_without_padding
from rlx_jax.ir.paths import Path, bind_path, path_text
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.serial import node_digest
from rlx_jax.ir.text import TextTable, number_runs
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.inspect.hlo import without_layer_numbers
from rlx_jax.lowering.lir.plan import Lir, layout_of
from rlx_jax.profiles import Change
from rlx_jax.profiles.check import iter_settings
from rlx_jax.profiles.profile import change_lines

# The facts of a block as text, by name; the names are those of the changes.
Facts = dict[str, str]

# The name of the fact that covers what the text of ops leaves out, such as the frequencies of rotary embeddings.
HASH = "hash of ops"

SIGNS = {"equal": "=", "changed": "~", "removed": "-", "added": "+"}


@dataclass(frozen=True)
class BlockDiff:
    """A block of two models, or the same block of several layers that differ in the same way.

    Attributes:
        path: the block path, with the numbers of layers: `layers.0-3,5.mlp`; `layers.*.mlp` for all layers.
        kind: "equal", "changed", "removed" (only the first model has it) or "added" (only the second one).
        layers: the number of blocks.
        changes: the facts that differ; of a block that one model has, all its facts.
    """

    path: str
    kind: str
    layers: int
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class ModelDiff:
    """The differences between two models, in one program.

    Attributes:
        ours, theirs: the names of the models.
        program: the program that is compared.
        sizes: the sizes that FLOPs, bytes and implementations are for; empty to leave these out.
        totals: sums of the models, equal or not.
        settings: the settings of the profiles that differ.
        facts: the differences of the programs: passes, ops, dtypes, how layers and ops run.
        blocks: the blocks, in the order of the first model; then those of the second one alone.
        times: the milliseconds of a run of each block, if both were measured; the largest difference first.
    """

    ours: str
    theirs: str
    program: str
    sizes: Mapping[str, int]
    totals: tuple[Change, ...]
    settings: tuple[Change, ...]
    facts: tuple[Change, ...]
    blocks: tuple[BlockDiff, ...]
    times: tuple[Change, ...] = field(default=())

    def __bool__(self) -> bool:
        """Return whether anything but the measured times differs."""
        differs = any(change.ours != change.theirs for change in self.totals)
        return differs or bool(self.settings or self.facts) or any(block.kind != "equal" for block in self.blocks)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in sorted(self.sizes.items()))
        lines = [f"{self.ours} → {self.theirs}: {self.program}{f' of {sizes}' if sizes else ''}", ""]
        lines.append(str(TextTable([(c.name, c.ours, c.theirs) for c in self.totals], indent="  ")))
        for title, changes in (("settings", self.settings), ("program", self.facts)):
            lines += ["", title, *change_lines(changes)] if changes else []
        counts = {kind: sum(block.layers for block in self.blocks if block.kind == kind) for kind in SIGNS}
        lines += ["", f"blocks: {', '.join(f'{count} {kind}' for kind, count in counts.items() if count)}"]
        for block in self.blocks:
            if block.kind != "equal":
                times = f" × {block.layers}" if block.layers > 1 else ""
                lines += [f"{SIGNS[block.kind]} {block.path}{times}", *change_lines(block.changes, "    ")]
        if self.times:
            rows = [(change.name, change.ours, change.theirs) for change in self.times]
            lines += ["", str(TextTable(rows, ("ms per run", self.ours, self.theirs)))]
        return "\n".join(lines)


def block_diffs(ours: Mapping[str, Facts], theirs: Mapping[str, Facts]) -> tuple[BlockDiff, ...]:
    """Return the differences of blocks by path; layers that differ in the same way are one."""
    groups: dict[tuple[str, str, tuple[Change, ...]], list[str]] = defaultdict(list)
    num_layers: dict[str, int] = defaultdict(int)
    for path in dict.fromkeys((*ours, *theirs)):
        changes = fact_changes(ours.get(path, {}), theirs.get(path, {}))
        names = {change.name for change in changes}
        # Hashes only tell that ops differ in what their text leaves out.
        changes = tuple(change for change in changes if change.name != HASH or "ops" not in names)
        both = path in ours and path in theirs
        kind = ("changed" if changes else "equal") if both else "removed" if path in ours else "added"
        star = without_layer_numbers(path)
        groups[star, kind, changes].append(path)
        num_layers[star] += 1
    return tuple(
        BlockDiff(_label(star, paths, num_layers[star]), kind, len(paths), changes)
        for (star, kind, changes), paths in groups.items()
    )


def _label(star: str, paths: Sequence[str], num_layers: int) -> str:
    """Return the path of blocks of several layers: `layers.0-3,5.mlp`, or `star` for all layers."""
    if len(paths) == 1 or star.count("*") != 1:
        return paths[0] if len(paths) == 1 else star
    if len(paths) == num_layers:
        return star
    before, after = map(re.escape, star.split("*"))
    numbers = sorted(int(match[1]) for path in paths if (match := re.fullmatch(f"{before}(\\d+){after}", path)))
    runs = (str(first) if first == last else f"{first}-{last}" for first, last in number_runs(numbers))
    return star.replace("*", ",".join(runs))


# -- facts of blocks ---------------------------------------------------------------------------


@dataclass
class _Block:
    """The nodes of a block in one layer: ops and their hashes, the types of the last one's results, parameters, and the
    path and number of all layers in the program."""

    ops: list[str] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    output: str = ""
    params: dict[Program, None] = field(default_factory=dict)
    path: Path = ()
    layers: int = 1


def block_facts(template: Template, lir: Lir | None) -> dict[str, Facts]:
    """Return the facts of each block of a program, of each layer by itself.

    Args:
        template: the program.
        lir: its plan, for FLOPs, bytes and implementations; None to leave these out.
    """
    blocks: dict[Path, _Block] = {}
    _collect(template.hir, blocks, (None,))
    work = {} if lir is None else block_work(lir)
    lines = () if lir is None else (*lir.attention(), *lir.experts(), *lir.recurrences())
    choices = dict(line.split(": ", 1) for line in lines)
    facts: dict[str, Facts] = {}
    for path, block in blocks.items():
        name = "(outside of blocks)" if path == (template.hir.name,) else path_text(path)
        facts[name] = dict(_facts(block, template.job.settings))
        if lir is not None:
            works = work.get(block.path, ())
            flops, nbytes = (sum(getattr(w, what) for w in works) // block.layers for what in ("flops", "bytes"))
            runs = choices.get(path_text(block.path))
            facts[name] |= {"FLOPs": f"{flops:,}", "bytes": f"{nbytes:,}"} | ({"runs": runs} if runs else {})
    return facts


def _collect(graph: Graph, blocks: dict[Path, _Block], layers: Sequence[int | None]) -> None:
    """Add the nodes of a graph to `blocks`, once for each of `layers`."""
    for node in graph.nodes:
        if isinstance(node.op, Repeat):
            _collect(node.op.body, blocks, range(node.op.count))
        elif not isinstance(node.op, Leaf):
            text, digest, path = node.op.text(), node_digest(graph, node), node.origin.path
            params = [op for v in node.inputs if isinstance(op := graph.nodes[v.node].op, Param)]
            for layer in layers:
                block = blocks.setdefault(bind_path(path, layer), _Block(path=path, layers=len(layers)))
                block.ops.append(text)
                block.hashes.append(digest)
                block.output = ", ".join(map(str, node.types))
                block.params.update(dict.fromkeys(param.program_at(layer) for param in params))


def _facts(block: _Block, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the facts of a block that do not depend on sizes."""
    yield "ops", "; ".join(block.ops)
    yield HASH, " ".join(block.hashes)
    yield "output", block.output
    if block.params:
        schemes = {p: packing_of(p) if settings.plan.packed else None for p in block.params}
        arrays = [packed_arrays(p).values() if scheme else (p,) for p, scheme in schemes.items()]
        sizes = [size_without_padding(p) for p in block.params]
        yield "weights", ", ".join(f"{scheme or ''} {p.type}".strip() for p, scheme in schemes.items())
        yield "parameters", f"{sum(sizes):,}"
        yield "parameter bytes", f"{sum(array.type.nbytes for each in arrays for array in each):,}"
        if sharding := settings.model_sharding:
            yield "sharding", ", ".join(dict.fromkeys(sharding.describe_storage(p)[0] for p in block.params))


# -- facts of programs -------------------------------------------------------------------------

# Prefixes of the names of counts: a count that only one program has is 0 in the other.
COUNT_PREFIXES = ("ops", "values")


def fact_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Return a change for each fact that differs, by the first word of their names in the order of the facts.

    A fact that only one side has is "none" on the other, or "0" if it is a count.
    """
    names = list(dict.fromkeys((*before, *after)))
    groups = list(dict.fromkeys(name.split()[0] for name in names))
    changed = [name for name in names if before.get(name) != after.get(name)]

    def fact_text(facts: Mapping[str, str], other: Mapping[str, str], name: str) -> str:
        is_count = name.startswith(COUNT_PREFIXES) and other.get(name, "").isdigit()  # the ops of a block are a text
        return facts.get(name, "0" if is_count else "none")

    return tuple(
        Change(name, fact_text(before, after, name), fact_text(after, before, name))
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
