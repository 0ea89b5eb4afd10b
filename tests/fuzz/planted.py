"""Faults as compilers have them, each one edit of one function's source. The fuzzer has to find them."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rlx_jax.compiler import passes
from rlx_jax.ir import hir, region
from rlx_jax.ir.ops import attention, fused, linalg, pointwise, reduce
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.lowering import lower
from rlx_jax.lowering.hir import weights
from rlx_jax.lowering.lir import interpret
from rlx_jax.lowering.mir import small
from tests.fuzz import check


@dataclass(frozen=True)
class Fault:
    """`old` in the source of `function` becomes `new`; `why` says what is wrong with that.

    `owner` is the class of a method, or the module of a function. `where` is what can show it: a random graph of tensor
    ops or of blocks, samples of the op, or a region that runs.
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
    Fault("merged biases come in reverse order", weights, "_merge_linear",
        "_param(graph, n.inputs[2]) for n in nodes]", "_param(graph, n.inputs[2]) for n in nodes[::-1]]", "block"),
    Fault("Linears with and without a bias merge", weights, "_linear_groups", "(node.inputs[0], node.op,",
        "(node.inputs[0], node.op.contract,", "block"),
    Fault("Linears of different values merge", weights, "_linear_groups", "(node.inputs[0], node.op,", "(node.op,",
        "block"),
    Fault("k and v change places", lower, "attention", "*inputs)", "inputs[0], inputs[2], inputs[1], *inputs[3:])",
        "block"),
    Fault("zero β takes the offset along", lower, "rms_norm", "op.eps, op.offset", "op.eps", "block"),
    Fault("any β is zero", lower, "rms_norm", "isinstance(beta, Constant) and not np.any(beta.array)", "True", "block"),
    Fault("the activation of a Linear with bias is dropped", lower, "linear", "op.activation,", '"",', "block"),
    Fault("all key heads are repeated as one", hir.Attention, "expand_repeated", "RepeatHeads(self.kv_heads, times)",
        "RepeatHeads(1, times)", "block"),
    Fault("a window keeps one key more", hir.Attention, "op", "self.window,", "self.window and self.window + 1,",
        "block"),
    Fault("the scale is dropped", hir.Attention, "op", "self.scale,", "None,", "block"),
    Fault("new tokens stand before the cache", hir.CachedAttention, "_positions",
        'Binary("add"), b(shape.Reshape((-1, 1)), start)', 'Binary("sub"), b(shape.Reshape((-1, 1)), start)', "block"),
    Fault("the last token's query stands one behind", hir.CachedAttention, "_positions",
        'b(Binary("max"), lengths, one), one)', 'b(Binary("max"), lengths, one), b.scalar(0, lengths))', "block"),
    Fault("new keys stand before the cached ones", hir.GrowingAttention, "expand",
        "cached_rows, in_dtype(b, new_rows, b.type(cached_rows).dtype))",
        "in_dtype(b, new_rows, b.type(cached_rows).dtype), cached_rows)", "block"),
    Fault("a window counts the keys that the mask drops", hir.GrowingAttention, "_mask_operands",
        "b(Cumsum(1), is_kept)", 'b(Cumsum(1), b(CastTo(I32), b(Compare("ge"), mask, mask)))', "block"),
    Fault("pieces of these sizes come from elsewhere", SplitLast, "eval", "self.sizes, axis=x.ndim - 1))",
        "self.sizes[::-1], axis=x.ndim - 1))[::-1]", "op"),
    Fault("gate and up change places", hir.GatedFfn, "expand", "gate: Value, up: Value",
        "up: Value, gate: Value", "block"),
    Fault("cosines and sines change places", hir.LlamaDecoderBlock, "expand", 'values["cos"], values["sin"]',
        'values["sin"], values["cos"]', "block"),
)  # fmt: skip
"""From blocks to tensor ops."""

RUN_FAULTS = (
    Fault("layer i runs with the weights of layer i − 1", interpret, "_unroll", "iteration=i,",
        "iteration=max(i - 1, 0),", "run"),
    Fault("carries change places in every layer", interpret, "_unroll", "carries = out[: op.carries]",
        "carries = out[: op.carries][::-1]", "run"),
    Fault("side outputs come layer by layer", interpret, "_scan", "for y in ys for i in range(op.count)",
        "for i in range(op.count) for y in ys", "run"),
    Fault("every layer writes the first layer's state", interpret, "_scan", "inner.state[k], i, 0)",
        "inner.state[k], 0, 0)", "run"),
    Fault("rotation by −angle in one half", attention.RopeOp, "eval", "second * c + first * s",
        "second * c - first * s", "op"),
    Fault("a query does not read its own key", attention.AttentionOp, "_allowed", "allowed = distance >= -self.ahead",
        "allowed = distance > -self.ahead", "op"),
    Fault("ε is dropped", reduce.RmsNormOp, "eval", " + self.eps)", ")", "op"),
    Fault("weights of either orientation are [in, out]", linalg.MatMul, "eval", "(self.contract,)",
        "(0 if w.shape[0] == w.shape[1] else self.contract,)", "op"),
    Fault("a cast to an integer rounds", pointwise.CastTo, "eval", "x.astype",
        "(jnp.round(x) if is_float(x.dtype) and self.dtype.kind in 'iu' else x).astype", "op"),
    Fault("softmax over the last axis whatever the attribute", reduce.Softmax, "eval", "axis=self.axis", "axis=-1",
        "op"),
    Fault("the second half is always up", fused.FusedSwiGLU, "eval", "if self.gate_first else (high, low)",
        "if True else (high, low)", "op"),
)  # fmt: skip
"""Where a program runs: the interpreter and the ops."""

FAULTS = (*PASS_FAULTS, *LOWERING_FAULTS, *RUN_FAULTS)
