"""In which random graphs the planted faults show.

A fault of a pass or a lowering is found if one of the first thousand random graphs shows it. `planted.json` has the
number of the first that does, for each fault that has one, so that a test looks at that graph alone. After a change of
what the graphs are grown from, or of the faults,

    python -m tests.fuzz.hunt

looks through the graphs again, writes the file, and prints the kill list: some minutes.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from rlx_jax.errors import RlxError
from rlx_jax.ir.graph import TypeCache
from tests.fuzz.blocks import hir_case
from tests.fuzz.check import check_lowering, check_tensor_graph
from tests.fuzz.planted import FAULTS, Fault, plant
from tests.fuzz.sketch import Case
from tests.fuzz.tensor_ops import mir_case

WITHIN = 1000
TYPES = TypeCache()
FIRST = Path(__file__).with_name("planted.json")
"""The first graph that shows a fault, by what the fault does."""


@functools.cache
def case_of(where: str, number: int) -> Case:
    """The random graphs are the same for every fault, and made before it is planted."""
    return mir_case(number, 4 + number % 20, TYPES) if where == "tensor" else hir_case(number, 2 + number % 9, TYPES)


def caught(fault: Fault | None, where: str, number: int) -> str | None:
    """How the fault shows in a random graph; None if it does not."""
    case = case_of(where, number)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            plant(fault, patch)
        try:
            CHECKS[where](case)
        except (AssertionError, RlxError, KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, TypeError | ValueError) and not isinstance(error, RlxError):  # shapes that do not fit
                raise
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return None


CHECKS: dict[str, Callable[[Case], None]] = {"tensor": check_tensor_graph, "block": check_lowering}


def first(fault: Fault, limit: int = WITHIN) -> tuple[int, str] | None:
    """The first random graph that shows the fault and is right without it, and how; None if none of so many does."""
    for number in range(limit):
        if (how := caught(fault, fault.where, number)) and not caught(None, fault.where, number):
            return number, how
    return None


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")  # as tests/conftest.py has it
    jax.config.update("jax_numpy_rank_promotion", "raise")
    numbers: dict[str, int] = {}
    for fault in FAULTS:
        found = first(fault)
        if found:
            numbers[fault.why] = found[0]
        print(f"  {found[0]:4d}  {fault.why}  [{found[1]}]" if found else f"     –  {fault.why}", flush=True)
    print(f"{len(numbers)} of {len(FAULTS)} found in the first {WITHIN} graphs")
    FIRST.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
