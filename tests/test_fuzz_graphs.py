"""Random graphs: each pass, each lowering and rolling leave their numbers alone.

The numbers are those of NumPy in float64 (`tests.ops`). How good this is at finding faults is measured by planting
some.
"""

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlx_jax.ir.graph import BodyInput, Builder, Node, StateRead, TypeCache
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.paths import StateLeaf
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import tensor_type
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.mir.small import dce
from tests.fuzz.blocks import hir_case
from tests.fuzz.check import check_lowering, check_tensor_graph
from tests.fuzz.hunt import FIRST, WITHIN, caught
from tests.fuzz.planted import FAULTS, PASS_FAULTS, Fault, plant
from tests.fuzz.tensor_ops import mir_case

TYPES = TypeCache()
SEEDS = st.integers(0, 2**32 - 1)


def fuzz(tensor_graphs: int, block_graphs: int, same: bool) -> None:
    """Check random graphs of both levels. `same`: the same graphs in every run."""
    options: dict[str, Any] = {"derandomize": same, "suppress_health_check": list(HealthCheck), "deadline": None}

    @settings(max_examples=tensor_graphs, **options)
    @given(SEEDS, st.integers(4, 20))
    def tensors(seed: int, size: int) -> None:
        check_tensor_graph(mir_case(seed, size, TYPES))

    @settings(max_examples=block_graphs, **options)
    @given(SEEDS, st.integers(2, 10))
    def blocks(seed: int, size: int) -> None:
        check_lowering(hir_case(seed, size, TYPES))

    tensors()
    blocks()


@pytest.mark.parametrize(("tensor_graphs", "block_graphs"), [(6, 2), pytest.param(12, 6, marks=pytest.mark.slow)])
def test_random_graphs(tensor_graphs: int, block_graphs: int) -> None:
    """The first of them in the default suite."""
    fuzz(tensor_graphs, block_graphs, same=True)


@pytest.mark.soak
def test_many_random_graphs() -> None:
    """1,920 graphs. Others with RLX_FUZZ_SEED=new."""
    fuzz(1200, 720, same=os.environ.get("RLX_FUZZ_SEED") != "new")


T = tensor_type((2, 3), "f32", "test")


def test_dce_keeps_the_read_of_a_state_leaf_that_is_only_written() -> None:
    """What it held is not needed, but its type is: it says what the state is."""
    b, leaf = Builder("test", TYPES), StateLeaf(("cache",), "s")
    x = b.input("x", T)
    b.leaf(StateRead(leaf, type=T))
    b.writes.append((leaf, x))
    graph = verify(dce(b.finish([x], ["o"]), TYPES), "mir", "dce", TYPES)
    assert [type(node.op) for node in graph.nodes][1:] == [StateRead]


def test_dce_drops_a_region_with_its_operands() -> None:
    """Neither is needed."""
    body = Builder("body", TYPES)
    inner = body.leaf(BodyInput(0, type=T))
    region = Repeat(2, 1, body.finish([body(Unary("tanh"), inner)]))
    b = Builder("test", TYPES)
    x = b.input("x", T)
    b(region, b(Unary("sin"), x))
    nodes: tuple[Node, ...] = dce(b.finish([x], ["o"]), TYPES).nodes
    assert len(nodes) == 1


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
