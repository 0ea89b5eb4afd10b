"""How good the random graphs are: faults planted in the compiler, and how soon each is found."""

import json

import pytest

from tests.fuzz.hunt import FIRST, WITHIN, caught
from tests.fuzz.planted import FAULTS, PASS_FAULTS, Fault, plant

IDLE = Fault("nothing", PASS_FAULTS[0].owner, "cse", "nodes[key] = b.add", "nodes[key] = b.add")


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    """At least 9 in 10, each in the graph that is known to show it, one of 1,000, which is right without it."""
    graphs: dict[str, int] = json.loads(FIRST.read_text("utf-8"))
    renew = f"renew {FIRST.name}: python -m tests.fuzz.hunt"
    assert set(graphs) <= {fault.why for fault in FAULTS} and max(graphs.values()) < WITHIN, renew
    missed = []
    for fault in FAULTS:
        number = graphs.get(fault.why)
        if number is None:
            missed.append(fault.why)
            continue
        assert caught(fault, fault.where, number), f"{fault.why}: not in graph {number}; {renew}"
        assert not caught(IDLE, fault.where, number), f"graph {number} is wrong without a fault"
    assert len(missed) <= len(FAULTS) // 10, missed


@pytest.mark.parametrize("where", ["tensor", "block"])
def test_without_a_fault_nothing_is_found(where: str) -> None:
    """So what is found above is the fault: neither no edit nor an edit without effect is found."""
    assert not any(caught(IDLE, where, number) for number in range(10))


def test_planted_faults_are_edits_of_what_there_is() -> None:
    """A fault whose place is gone would be missed for the wrong reason."""
    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            plant(fault, patch)
