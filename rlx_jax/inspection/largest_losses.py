"""The largest differences between the measured time of blocks and the roofline, with what would reduce each."""

from __future__ import annotations

from rlx_jax.inspection.rates import Rates
from rlx_jax.inspection.records import BlockEntry, Finding, Inspection
from rlx_jax.inspection.work import rated_dtype
from rlx_jax.ir.text import format_bytes, scaled_text

NUM_LOSSES = 5
# A block loses its time to the fixed time of its kernels if that is more than this share of the loss.
FIXED_SHARE = 0.5
# Losses below this share of a run are not worth reading.
MIN_LOSS = 0.01
# Advice for time that belongs to no block, by path.
NO_BLOCK = {
    "(no kernel runs)": "the device waits for the host: a larger batch does more work per call",
    "(helper functions)": "functions outside of the program, such as the choice of a token; larger batches share them",
    "(other programs)": "other programs of the same request",
    "(not attributed)": "loop control, and kernels that XLA added between blocks; fewer and larger kernels have less",
    "sampler": "the choice of a token takes this time for each row; greedy decoding takes least",
}


def largest_losses(inspection: Inspection, rates: Rates | None) -> tuple[Finding, ...]:
    """Return the largest losses of a measured program, largest first; none for estimated times or unknown rates."""
    if not inspection.measured or rates is None:
        return ()
    blocks = sorted(inspection.blocks, key=lambda block: -block.lost_seconds)
    blocks = [block for block in blocks if block.lost_seconds > MIN_LOSS * inspection.seconds]
    return tuple(_loss(block, rates) for block in blocks[:NUM_LOSSES])


def _loss(block: BlockEntry, rates: Rates) -> Finding:
    duration = f"takes {scaled_text(block.seconds, 's')}"
    if not block.limited_by:
        advice = NO_BLOCK.get(block.path, "it computes nothing that the roofline counts")
        return Finding("loss", block.path, duration, advice, block.lost_seconds)
    amount = f"{format_bytes(block.bytes)} at {rates.bandwidth / 1e9:,.0f} GB/s"
    if block.limited_by == "compute":
        speed = rates.flops[rated_dtype(block.dtype)]
        amount = f"{scaled_text(block.flops, 'FLOP')} at {speed / 1e9:,.0f} GFLOP/s in {block.dtype}"
    limit = f"{block.limited_by} allows {scaled_text(block.roofline_seconds, 's')}: {amount}"
    return Finding("loss", block.path, f"{duration}; {limit}", _advice(block, rates), block.lost_seconds)


def _advice(block: BlockEntry, rates: Rates) -> str:
    """Return what would reduce the time of a block."""
    calls = sum(kernel.calls for kernel in block.kernels)
    fixed = calls * rates.kernels["product"].seconds
    if fixed > FIXED_SHARE * block.lost_seconds:
        mean = scaled_text(block.seconds / calls, "s")
        fixed = min(fixed, block.lost_seconds)  # the rate is a mean: starts of small kernels may overlap
        started = f"starting {calls} kernels of {mean} each takes about {scaled_text(fixed, 's')}"
        return f"{started}: more rows per step do more work in each"
    # An implementation of a few layers alone, such as the last one of a prompt, does not explain the time of all.
    if block.implementation and block.reason and f" of {block.layers} layers" not in block.reason:
        return f"it runs by {block.implementation} ({block.reason})"
    dtype = rated_dtype(block.dtype)
    compute, memory = rates.limits(block.flops, block.bytes, dtype)
    if block.limited_by == "memory":
        if block.weight_bytes < block.bytes / 2 or not compute:
            return "it only reads and writes values of other blocks: XLA could fuse it into one of them"
        times = f"{memory / compute:,.0f} times as many rows take no longer"
        return f"it reads its weights once for all rows: by the roofline, {times}"
    # XLA:CPU computes 16-bit products in f32.
    if rates.device.kind != "cpu" and dtype == "f32" and rates.flops["bf16"] > 1.2 * rates.flops["f32"]:
        factor = rates.flops["bf16"] / rates.flops["f32"]
        return f"products in bf16 have a limit {factor:.1f} times as high here: precision.compute = 'bf16'"
    reached = f"{scaled_text(block.flops / block.seconds, 'FLOP/s')} reached"
    return f"{reached}: larger products, by a larger batch or merged projections, come closer to the limit"
