"""Seconds of attention, mixtures of experts and recurrences on the CPU that runs, measured once on a sample of each.

On a CPU what these ops reach depends on heads, widths, dtype and implementation more than on the machine's limits: XLA
transposes caches, loops over experts and updates states in loops. So `estimate.py` runs the op itself for few rows and
tokens, and scales its time with its operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.compiler.pipeline import Template, make_lir
from rlx_jax.compiler.settings import Settings
from rlx_jax.inspection.rates import typical_seconds
from rlx_jax.inspection.work import kernel_kind
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.ops.recurrent import CausalConvOp
from rlx_jax.ir.types import TensorType, is_float
from rlx_jax.lowering.inspect.outline import OpCost, op_costs
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.plan import XLA_CHOICE, Lir, call_of

SAMPLED_KINDS = ("attention", "experts", "recurrence")
SAMPLED_OPS = (Unary, CausalConvOp)
# Sizes of samples of one and of more tokens: enough for the rate to be that of larger ones, and milliseconds of work.
SAMPLE_ROWS, SAMPLE_PROMPTS, SAMPLE_TOKENS = 32, 4, 256
# Samples with more operands, such as all experts of a large mixture, are not run.
MAX_SAMPLE_BYTES = 2**28

# For an op of a program, the seconds of a run; None if it is not sampled.
SampledSeconds = Callable[[int, OpCost], float | None]


def op_samples(lir: Lir, template: Template, sizes: Mapping[str, int], settings: Settings) -> SampledSeconds:
    """Return the function that estimates the n-th op of a program from a sample of it.

    Args:
        lir: the program.
        template: its template.
        sizes: the sizes of its symbols.
        settings: the settings of the model, for the CPU that runs.
    """
    rows = SAMPLE_ROWS if sizes.get("seq") == 1 else SAMPLE_PROMPTS
    limits = {"batch": rows, "seq": SAMPLE_TOKENS, "context": SAMPLE_TOKENS}
    capped = {name: min(size, limits.get(name, size)) for name, size in sizes.items()}
    sample_lir = make_lir(template, capped, settings)
    samples = list(op_costs(sample_lir.graph))

    def seconds(index: int, entry: OpCost) -> float | None:
        op = entry.node.op
        is_sampled = isinstance(op, Mir) and (kernel_kind(op) in SAMPLED_KINDS or isinstance(op, SAMPLED_OPS))
        if not is_sampled or index >= len(samples):
            return None
        graph, node, cost, _ = samples[index]
        if isinstance(op, ExpertFfn) and entry.graph.type(entry.node.inputs[5]).size <= SAMPLE_TOKENS:
            graph, node, cost, _ = entry  # few tokens are padded to blocks, and their time is not in proportion
        types = tuple(graph.type(value) for value in node.inputs)
        if node.op != op or sum(t.nbytes for t in types) > MAX_SAMPLE_BYTES:
            return None
        implementation = lir.plan.choices.get(call_of(entry.graph, entry.node), XLA_CHOICE).implementation
        scale = entry.cost.flops / cost.flops if cost.flops else entry.cost.bytes / cost.bytes
        return sample_seconds(op, implementation, types) * scale

    return seconds


@functools.lru_cache(maxsize=256)
def sample_seconds(op: Mir, implementation: str, types: tuple[TensorType, ...]) -> float:
    """Return the seconds of a run of an op on this CPU, without the start of its program."""
    with jax.default_device("cpu"):
        # Experts are chosen evenly: an implementation may skip those without tokens.
        experts = int(types[1].shape[0]) if kernel_kind(op) == "experts" else 1
        arrays = [
            jnp.zeros(t.shape, t.dtype)
            if is_float(t.dtype)
            else (jnp.arange(t.size) % experts).astype(t.dtype).reshape(t.shape)  # bools have no arange
            for t in types
        ]
        run: Any = jax.jit(functools.partial(IMPLEMENTATIONS[implementation], op))
        start = jax.jit(lambda x: x + 1)
        scalar = jnp.zeros(())
        seconds = typical_seconds(lambda: jax.block_until_ready(run(*arrays)))
        return max(1e-7, seconds - typical_seconds(lambda: start(scalar).block_until_ready()))
