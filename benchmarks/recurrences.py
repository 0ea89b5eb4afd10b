"""What a token of a long sequence costs in a gated delta rule and in a selective scan, beside one of a short sequence.

    python benchmarks/recurrences.py          16 heads of 128 (GPU), 4 heads of 64 (CPU), f32
    python benchmarks/recurrences.py --tiny   small, and few calls: checks the script

One layer by itself, in each form that a program may take. The goal: a token of 4096 takes at most 1.1 times what one of
1024 does, as both have a state of one size.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from report import Goals, emit, interleaved, table

from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS

FORMS = ("chunks_at_once", "chunk_by_chunk")
GOAL = 1.1


def delta_inputs(tokens: int, heads: int, width: int) -> list[np.ndarray[Any, Any]]:
    """q, k `[1, S, H, K]` of length 1, v `[1, S, H, V]`, g and β `[1, S, H]`, the state `[1, H, K, V]`."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, tokens, heads, width)).astype(np.float32)
    g = -np.exp(rng.normal(size=(1, tokens, heads)) - 2).astype(np.float32)
    beta = rng.random((1, tokens, heads), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [q, k, v, g, beta, np.zeros((1, heads, width, width), np.float32)]


def scan_inputs(tokens: int, heads: int, width: int) -> list[np.ndarray[Any, Any]]:
    """x `[1, S, H, P]`, steps `[1, S, H]`, A `[H]`, B and C `[1, S, G, N]`, the state `[1, H, P, N]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, tokens, heads, width)).astype(np.float32)
    dt = np.exp(rng.normal(size=(1, tokens, heads)) - 2).astype(np.float32)
    a = -np.exp(rng.normal(size=heads)).astype(np.float32)
    b, c = rng.normal(size=(2, 1, tokens, 1, width)).astype(np.float32)
    return [x, dt, a, b, c, np.zeros((1, heads, width, width), np.float32)]


LAYERS: dict[str, tuple[Any, Callable[[int, int, int], list[np.ndarray[Any, Any]]]]] = {
    "gated delta": (GatedDeltaOp(from_state=True), delta_inputs),
    "selective scan": (SelectiveScanOp(from_state=True), scan_inputs),
}
"""The op and its inputs."""


def call(op: Any, form: str, inputs: list[np.ndarray[Any, Any]]) -> Callable[[], Any]:
    """One call of the compiled layer, on inputs that are on the device."""
    run = jax.jit(functools.partial(IMPLEMENTATIONS[form], op))
    operands = jax.device_put(inputs)
    return lambda: jax.block_until_ready(run(*operands))


def main() -> None:
    """Measure, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small shape, which checks this script")
    tiny = parser.parse_args().tiny
    device = jax.devices()[0]
    heads, width = (2, 8) if tiny else (4, 64) if device.platform == "cpu" else (16, 128)
    lengths = (64, 128) if tiny else (1024, 2048, 4096, 8192)
    calls = {
        (name, form, tokens): call(op, form, inputs(tokens, heads, width))
        for name, (op, inputs) in LAYERS.items()
        for form in FORMS
        for tokens in lengths
    }
    names = {" ".join(map(str, key)): key for key in calls}
    times = interleaved({name: calls[key] for name, key in names.items()}, 3 if tiny else 30)
    each = {key: min(times[name]) / key[2] * 1e6 for name, key in names.items()}
    goals, rows = Goals(), []
    for name, form in dict.fromkeys(key[:2] for key in calls):
        took = [each[name, form, tokens] for tokens in lengths]
        ratio = took[-1 if tiny else 2] / took[0]
        verdict = "" if tiny else goals.at_most(f"{name} {form}: a token of 4096 / one of 1024", ratio, GOAL)
        rows.append([f"{name} {form}", *(f"{t:.3f}" for t in took), f"{ratio:.2f}", verdict])
    print(f"{device.device_kind}, jax {jax.__version__}, {heads} heads of {width}; microseconds a token")
    print(table(["layer", *(f"of {n}" for n in lengths), "ratio", ""], rows))
    emit(benchmark="recurrences", rows=[row[:-1] for row in rows])
    goals.exit()


if __name__ == "__main__":
    main()
