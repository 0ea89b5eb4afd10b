"""Random graphs: each pass, each lowering, rolling, scanning and compiling leave their numbers alone.

The numbers are those of NumPy in float64 (`tests.fuzz.meaning`). How good this is at finding faults is measured by
planting some: `test_planted_bugs.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlx_jax.ir.graph import BodyInput, Builder, Graph, Node, StateLeaf, StateRead, TypeCache
from rlx_jax.ir.hir import BLOCKS
from rlx_jax.ir.ops import OPS
from rlx_jax.ir.ops.pointwise import COMPARE, Binary, Compare, Unary
from rlx_jax.ir.ops.reduce import Reduce
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import tensor_type
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.mir.small import dce
from tests.fuzz import blocks as grown_blocks
from tests.fuzz import meaning, tensor_ops
from tests.fuzz.blocks import hir_case
from tests.fuzz.check import OPTIONAL, Program, check_compiled, check_lowering, check_tensor_graph
from tests.fuzz.tensor_ops import BINARY_GROWN, REDUCE_GROWN, UNARY_GROWN, mir_case

TYPES = TypeCache()
MIR, HIR = ({cls.__name__ for cls in classes} for classes in (OPS, BLOCKS))
NOT_GROWN = (*tensor_ops.NOT_GROWN, *grown_blocks.NOT_GROWN)
TOGETHER = 8  # graphs compiled as one program, which takes half the time
IDLE = {"unroll_steps": "it unrolls loops over tokens, which are not grown: see tests/test_recurrent_programs.py"}
"""Passes that change no random graph, and why."""


def test_every_op_and_block_has_a_meaning() -> None:
    """A new one is fuzzed from its first day, or says why not."""
    where = "what each computes, in NumPy, stands in tests/fuzz/meaning.py"
    assert MIR == {cls.__name__ for cls in meaning.MIR}, where
    assert HIR == {cls.__name__ for cls in meaning.HIR}, where
    assert set(NOT_GROWN) <= {*OPS, *BLOCKS}


SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Seen:
    """How often each op was there, by class and by function, and how often each pass changed something."""

    ops: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)

    def count(self, graph: Graph) -> None:
        for _, node in graph.walk():
            self.ops[type(node.op).__name__] += 1
            if isinstance(node.op, Unary | Binary | Compare | Reduce):
                self.ops[f"{type(node.op).__name__} {node.op.kind}"] += 1

    def rare(self, least: int, least_of_a_kind: int) -> dict[str, int]:
        """Ops, functions and passes that were there less often than wanted."""
        tables: dict[type[Any], Any] = {
            Unary: UNARY_GROWN, Binary: BINARY_GROWN, Compare: COMPARE, Reduce: REDUCE_GROWN,
        }  # fmt: skip
        kinds = {f"{cls.__name__} {kind}" for cls, table in tables.items() for kind in table}
        classes = (MIR | HIR | {"Repeat"}) - {cls.__name__ for cls in NOT_GROWN}
        found = {name: self.ops[name] for name in classes if self.ops[name] < least}
        found |= {name: self.ops[name] for name in kinds if self.ops[name] < least_of_a_kind}
        passes = {*OPTIONAL, "merge_linears", "merge_ropes"} - set(IDLE)
        return found | {name: n for name in sorted(passes) if (n := self.fired[name]) < least}


def fuzz(tensor_graphs: int, block_graphs: int, forms: int, same: bool) -> Seen:
    """Check random graphs of both levels. Of the forms that each of them takes, compile so many, in turn.

    `same`: the same graphs in every run.
    """
    seen = Seen()
    programs: list[Program] = []

    def keep(all_forms: Sequence[Program]) -> None:
        programs.extend(all_forms[(len(programs) + i) % len(all_forms)] for i in range(forms))

    @settings(max_examples=tensor_graphs, derandomize=same, suppress_health_check=list(HealthCheck))
    @given(SEEDS, st.integers(4, 20))
    def tensors(seed: int, size: int) -> None:
        case = mir_case(seed, size, TYPES)
        seen.count(case.graph)
        keep(check_tensor_graph(case, seen.fired))

    @settings(max_examples=block_graphs, derandomize=same, suppress_health_check=list(HealthCheck))
    @given(SEEDS, st.integers(2, 10))
    def blocks(seed: int, size: int) -> None:
        case = hir_case(seed, size, TYPES)
        seen.count(case.graph)
        keep(check_lowering(case, seen.fired))

    tensors()
    blocks()
    for start in range(0, len(programs), TOGETHER):
        check_compiled(programs[start : start + TOGETHER])
    return seen


def test_random_graphs() -> None:
    """36 graphs."""
    fuzz(24, 12, forms=1, same=True)


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.soak)])
def test_many_random_graphs(capsys: pytest.CaptureFixture[str], times: int) -> None:
    """160 graphs, or twelve times as many, and no op, function or pass is left out. Others with RLX_FUZZ_SEED=new."""
    seen = fuzz(100 * times, 60 * times, forms=1, same=os.environ.get("RLX_FUZZ_SEED") != "new")
    with capsys.disabled():
        print("\nops:", dict(seen.ops.most_common()), "\npasses:", dict(seen.fired))
    assert not seen.rare(1, times // 4)


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
