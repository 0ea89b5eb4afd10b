"""How good the random graphs are: faults planted in the compiler, and how soon each is found."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

import pytest

from rlx_jax.errors import RlxError
from rlx_jax.ir.graph import TypeCache
from tests.fuzz.blocks import hir_case
from tests.fuzz.check import Mismatch, check_compiled, check_lowering, check_tensor_graph
from tests.fuzz.patterns import mir_case
from tests.fuzz.planted import LOWERING_FAULTS, PASS_FAULTS, RUN_FAULTS, Fault, plant
from tests.fuzz.sketch import Case

WITHIN = 1000
TOGETHER = 8
TYPES = TypeCache()
FAULTS = (*PASS_FAULTS, *LOWERING_FAULTS, *RUN_FAULTS)


@functools.cache
def case_of(where: str, number: int) -> Case:
    """The random graphs are the same for every fault, and made before it is planted."""
    return mir_case(number, 4 + number % 20, TYPES) if where == "tensor" else hir_case(number, 2 + number % 9, TYPES)


def groups(where: str, limit: int, size: int) -> Iterator[tuple[int, list[Case]]]:
    """The random graphs, so many at a time, with how many there were so far."""
    for start in range(0, limit, size):
        yield min(start + size, limit), [case_of(where, n) for n in range(start, min(start + size, limit))]


def caught(fault: Fault | None, where: str, compiled: bool, limit: int) -> tuple[int, str] | None:
    """After how many graphs the fault shows, and how; None if it does not."""
    for count, cases in groups(where, limit, TOGETHER if compiled else 1):
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                plant(fault, patch)
            try:
                checks = check_tensor_graph if where == "tensor" else check_lowering
                programs = [form for case in cases for form in checks(case, Counter())[:2]]
                if compiled:
                    check_compiled(programs)
            except (Mismatch, RlxError, KeyError, IndexError, TypeError, ValueError) as error:
                of_jax = isinstance(error, TypeError | ValueError) and not isinstance(error, RlxError)
                if of_jax and not compiled:  # shapes that do not fit
                    raise
                return count, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return None


@pytest.mark.slow
def test_planted_faults_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """At least 9 in 10, each within 1,000 graphs; prints the kill list."""
    lines, missed = [], []
    for fault in FAULTS:
        found = caught(fault, fault.where, fault.compiled, WITHIN)
        missed += [] if found else [fault.why]
        lines.append(f"  {found[0]:4d}  {fault.why}  [{found[1]}]" if found else f"     –  {fault.why}")
    with capsys.disabled():
        print(f"\n{len(FAULTS) - len(missed)} of {len(FAULTS)} found; after how many graphs:", *lines, sep="\n")
    assert len(missed) <= len(FAULTS) // 10, missed


@pytest.mark.parametrize("where", ["tensor", "block"])
def test_without_a_fault_nothing_is_found(where: str) -> None:
    """So what is found above is the fault: neither no edit nor an edit without effect is found."""
    idle = Fault("nothing", PASS_FAULTS[0].owner, "cse", "known[key] = b.add", "known[key] = b.add")
    assert caught(idle, where, False, 10) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.why)
def test_planted_faults_are_edits_of_what_there_is(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault whose place is gone would be missed for the wrong reason."""
    plant(fault, monkeypatch)
