"""This module compares one program of two models, for `model.diff()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlx_jax.compiler.compare import fact_changes, facts_of_program
from rlx_jax.errors import GraphError, check_names
from rlx_jax.inspection.diff import ModelDiff, block_diffs, block_facts
from rlx_jax.inspection.work import block_work
from rlx_jax.profiles import Change
from rlx_jax.profiles.profile import field_changes
from rlx_jax.runtime.block_times import BlockTimes
from rlx_jax.runtime.levels import key_with_sizes
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.report import state_bytes


def diff_programs(
    ours: tuple[Programs, ProgramKey], theirs: tuple[Programs, ProgramKey], sizes: Mapping[str, int],
    times: tuple[BlockTimes, BlockTimes] | None,
) -> ModelDiff:  # fmt: skip
    """Return the differences between two programs; see `ModelProgram.diff`.

    Args:
        ours, theirs: the programs of each model, and the key of the one to compare, without sizes.
        sizes: the sizes, each of at least one of the programs; empty to leave out what depends on them.
        times: the measured times of both.
    """
    models = (ours, theirs)
    templates = [programs.template(key) for programs, key in models]
    symbols = templates[0].symbols | templates[1].symbols
    check_names(sizes, sorted(symbols), f"diff: the program {ours[1].program} has no size", "; it has", GraphError)
    program_facts, facts, totals = [], [], []
    for (programs, key), template in zip(models, templates, strict=True):
        types, lir = programs.layout.types().values(), None
        total = {"parameters": programs.layout.num_parameters(), "parameter bytes": sum(t.nbytes for t in types)}
        if sizes or not symbols:
            sized = key_with_sizes(programs, key, {n: size for n, size in sizes.items() if n in template.symbols})
            lir = programs.function(sized).lir
            works = [work for each in block_work(lir).values() for work in each]
            total |= {"FLOPs": sum(w.flops for w in works), "bytes": sum(w.bytes for w in works)}
            total |= {"state bytes": state_bytes(template, sized)} if template.state else {}
        totals.append(total)
        settings, serves = programs.settings, programs.fuses_by_default
        program_facts.append(dict(facts_of_program(template, settings, key.program, serves, lir)))
        facts.append(block_facts(template, lir))
    return ModelDiff(
        ours[1].flow, theirs[1].flow, ours[1].program, dict(sizes),
        tuple(Change(name, *(f"{total.get(name, 0):,}" for total in totals)) for name in {**totals[0], **totals[1]}),
        tuple(field_changes(*(programs.settings.profile for programs, _ in models))),
        fact_changes(*program_facts), block_diffs(*facts), () if times is None else _time_changes(*times),
    )  # fmt: skip


def _time_changes(ours: BlockTimes, theirs: BlockTimes) -> tuple[Change, ...]:
    """Return the milliseconds of a run and of its blocks, layers together; the largest difference first."""
    seconds = []
    for times in (ours, theirs):
        by_path: Counter[str] = Counter()
        for row in times.folded().rows:
            by_path[row.path] += row.seconds  # type: ignore[assignment]  # a counter of seconds
        seconds.append(by_path)
    paths = sorted({*seconds[0], *seconds[1]}, key=lambda path: -abs(seconds[1][path] - seconds[0][path]))
    rows = [("a run", ours.seconds, theirs.seconds), *((path, seconds[0][path], seconds[1][path]) for path in paths)]
    return tuple(Change(name, f"{1000 * a:,.3f}", f"{1000 * b:,.3f}") for name, a, b in rows)
