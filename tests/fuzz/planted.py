"""Faults as compilers have them, each one edit of one function's source. The fuzzer has to find them."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rlx_jax.compiler import passes
from rlx_jax.ir import hir, region
from rlx_jax.lowering import lower
from rlx_jax.lowering.hir import weights
from rlx_jax.lowering.mir import small
from tests.fuzz import check


@dataclass(frozen=True)
class Fault:
    """`old` in the source of `function` becomes `new`; `why` says what is wrong with that.

    `owner` is the class of a method, or the module of a function. `where` is what can show it: a random graph of tensor
    ops or of blocks.
    """

    why: str
    owner: Any
    function: str
    old: str
    new: str
    where: str = "tensor"


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Put the faulty function in the place of the right one, wherever that is kept."""
    right = getattr(fault.owner, fault.function)
    wrong = edited(fault, right)
    patch.setattr(fault.owner, fault.function, wrong)
    table: dict[Any, Any] = lower.DIRECT
    for key in [key for key, value in table.items() if value is right]:
        patch.setitem(table, key, wrong)
    for name, module in list(sys.modules.items()):  # where it is imported by its name
        if name.startswith(("rlx_jax.", "tests.fuzz.")) and vars(module).get(fault.function) is right:
            patch.setattr(module, fault.function, wrong)
    for module in (check, passes):
        rows = tuple(replace(row, run=wrong) if row.run is right else row for row in module.PIPELINE)
        patch.setattr(module, "PIPELINE", rows)


def edited(fault: Fault, right: Callable[..., Any]) -> Callable[..., Any]:
    """The function with one edit, in the module it comes from."""
    source = textwrap.dedent(inspect.getsource(right))
    assert source.count(fault.old) == 1, (
        f"{fault.why}: {fault.function} has {fault.old!r} {source.count(fault.old)} times"
    )
    code = "from __future__ import annotations\n" + source.replace(fault.old, fault.new)
    made: dict[str, Any] = {}
    exec(compile(code, f"<{fault.why}>", "exec"), vars(sys.modules[right.__module__]), made)
    found: Callable[..., Any] = made[fault.function]
    return found


PASS_FAULTS = (
    Fault("a − b and b − a are one expression", small, "cse", "(node.op, inputs)", "(node.op, frozenset(inputs))"),
    Fault("ops of one class are equal whatever their attributes", small, "cse", "(node.op, inputs)",
        "(type(node.op), inputs)"),
    Fault("only the first operand counts", small, "cse", "(node.op, inputs)", "(node.op, inputs[:1])"),
    Fault("every operand is the first constant", small, "constant_folding", "for op in operands if",
        "for op in operands[:1] * len(operands) if"),
    Fault("folded numbers pass through f16", small, "constant_folding", "constant(np.asarray(r), r.dtype)",
        "constant(np.asarray(r).astype(np.float16), r.dtype)"),
    Fault("a region is dead if nothing reads its results, though it writes state", small, "live_nodes",
        "any(region.writes for region in node.op.regions())", "False"),
    Fault("what a state write needs is dead", small, "live_nodes", "for v in graph.roots()", "for v in graph.outputs"),
    Fault("an output that is there twice is there once", region, "rewrite", "[value_map[v] for v in graph.outputs]",
        "list(dict.fromkeys(value_map[v] for v in graph.outputs))"),
    Fault("the results of one node change places", region, "rewrite", "for i, v in enumerate(results)",
        "for i, v in enumerate(results[::-1])"),
    Fault("what a rewrite does inside a region is lost", region, "rewrite",
        "b.writes.extend((leaf, value_map[v]) for leaf, v in graph.writes)",
            "b.writes.extend((leaf, value_map[v]) for leaf, v in graph.writes[:1])"),
    Fault("layer i reads the weights of layer i + 1", region._Region, "_leaf", "for k in range(self.count)",
        "for k in (*range(1, self.count), 0)"),
    Fault("final carries change places", region._Region, "_find_results",
        "self.carries[source] if", "len(self.carries) - 1 - self.carries[source] if"),
    Fault("side outputs come in reverse order of layers", region._Region, "_find_results", "* self.count + i",
        "* self.count + self.count - 1 - i"),
)  # fmt: skip
"""In passes, in the rewriting that they share, and in rolling."""

LOWERING_FAULTS = (
    Fault("pieces of a merged Linear come in reverse order", weights, "_merge_linear", "hir.Split(sizes, shards)",
        "hir.Split(sizes[::-1], shards)", "block"),
    Fault("Linears of different values merge", weights, "_linear_groups", "(node.inputs[0], node.op,", "(node.op,",
        "block"),
    Fault("k and v change places", lower, "attention", "*inputs)", "inputs[0], inputs[2], inputs[1], *inputs[3:])",
        "block"),
    Fault("zero β takes the offset along", lower, "rms_norm", "op.eps, op.offset", "op.eps", "block"),
    Fault("the activation of a Linear with bias is dropped", lower, "linear", "op.activation,", '"",', "block"),
    Fault("all key heads are repeated as one", hir.Attention, "expand_repeated", "RepeatHeads(self.kv_heads, times)",
        "RepeatHeads(1, times)", "block"),
    Fault("a window keeps one key more", hir.Attention, "op", "self.window,", "self.window and self.window + 1,",
        "block"),
    Fault("the last token's query stands one behind", hir.CachedAttention, "_positions",
        'b(Binary("max"), lengths, one), one)', 'b(Binary("max"), lengths, one), b.scalar(0, lengths))', "block"),
    Fault("a window counts the keys that the mask drops", hir.GrowingAttention, "_mask_operands",
        "b(Cumsum(1), is_kept)", 'b(Cumsum(1), b(CastTo(I32), b(Compare("ge"), mask, mask)))', "block"),
)  # fmt: skip
"""From blocks to tensor ops."""

FAULTS = (*PASS_FAULTS, *LOWERING_FAULTS)
