"""A training step: through rlx_jax.train, written by hand in JAX, and transformers under torch.compile.

    python benchmarks/train.py                     the 1B Llama shape, 8 x 2048 tokens, AdamW, bf16, on one GPU
    python benchmarks/train.py --only NAME …       some rows; --list shows all
    python benchmarks/train.py --tiny              a small shape in f32 on the CPU, held to the hand-written step

Rows of JAX run in turn; torch (--torch) runs in a process of its own before them. Prints a JSON line for each row:
milliseconds a step (median over rounds of 4 steps), MFU, what XLA holds beside its arguments, and the ratio to the
hand-written step. FLOPs are 6 N a token, N with the embedding once, and 12 L H S / 2 for causal attention; 790 TFLOP/s,
an 8192³ product in bf16 on an H200, are MFU 1. `--tiny` exits with 1 if XLA's FLOPs or bytes are over 1.02 x,
temporaries or the time over 1.05 x those of the hand-written step, or the losses differ.

What 8 x 2048 tokens of the 1B shape cannot go under on an H200 (790 TFLOP/s, 4.2 TB/s):

| part | work | ms |
|---|---|---|
| products of 16 layers, 6 x 973 M weights a token | 95.6 TFLOP | 121 |
| the head, three products | 25.8 TFLOP | 33 |
| attention, forward and backward, half of the square | 6.6 TFLOP | 8; 27 by cuDNN |
| f32 logits written once and read three times, their gradient in bf16 written once and read twice | 46 GB | 11 |
| pointwise work of layers: about 90 KB forward, 230 KB backward a token and layer | 84 GB | 20 |
| AdamW: parameters, gradients and two moments of bf16 read, three of them written | 17 GB | 4 |

So 162 ms are MFU 1, and about 230 what kernels at their usual speed would take. Memory: what `products` keeps of a
layer is x, q, k, v, attention, its projection, gate and up, 50 KB a token in bf16, 12.5 GiB for all; without it also
what norms, rotations and SwiGLU give, about 95 KB. The head's gradient in f32 takes 1 GiB, a piece of logits 2.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Before jax is imported.
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
os.environ["JAX_PLATFORMS"] = "cpu" if "--tiny" in sys.argv else "cuda,cpu"

import handwritten_train as hand
import jax
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax import losses, train

LARGE = Sizes(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, theta=5e5)
SMALL = Sizes(layers=2, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=352, vocab=1024)
TINY = "--tiny" in sys.argv
PEAK = 790e12
STEPS = 4
PROGRAM_GOAL, RUN_GOAL, LOSS_GOAL = 1.02, 1.05, 1e-5

OURS: dict[str, dict[str, Any]] = {
    f"{roll} {remat} {'merged' if merge else 'apart'}": {"roll": roll, "remat": remat, "merge": merge}
    for roll in ("unroll", "scan")
    for remat in ("none", "products", "dots", "layer")
    for merge in (True, False)
}
"""What is set of a profile, by the row's name."""
BEST = OURS["unroll products apart"]
OURS |= {f"best, pieces of {n}": BEST | {"chunk": n} for n in (128, 256, 1024, 2048)}
OURS |= {"best, f32 leaves": BEST | {"weights": "f32"}, "best, 4 microbatches": BEST | {"microbatches": 4}}
OURS |= {"default": {"roll": "auto", "remat": "auto", "merge": "auto"}}
F32 = {"weights": "f32", "compute": "f32"}
OURS |= {"scan none, f32": OURS["scan none apart"] | F32, "products, f32": OURS["scan products apart"] | F32}
HAND = {"hand none": False, "hand products": True}
DEFAULT = (
    "hand none", "hand products", "unroll none apart", "unroll products apart", "unroll products merged",
    "scan products apart", "best, f32 leaves", "default",
)  # fmt: skip

TINY_ROWS = ("hand none", "hand products", "unroll none merged", "unroll products merged")


class Row:
    """One step that can be repeated; it waits for its last loss."""

    def __init__(self, compiled: Any, run: Callable[[], Any], seconds: float) -> None:
        self.compiled, self.run, self.seconds, self.loss = compiled, run, seconds, 0.0

    def __call__(self) -> None:
        for _ in range(STEPS):
            value = self.run()
        self.loss = float(value)


def ours(
    roll: str,
    remat: str,
    merge: bool,
    c: Sizes,
    weights_by_key: Any,
    tokens: jax.Array,
    chunk: int | None = None,
    weights: str = "keep",
    microbatches: int = 1,
    compute: str = "bf16",
) -> Row:
    """Through the public API."""
    profile = rlx.CompileProfile().replace(
        layers={"roll": roll, "remat": remat},
        precision={"compute": "f32" if TINY else compute, "weights": weights},
        backend={"cpu" if TINY else "cuda": {"merge": merge}},
    )
    start = time.perf_counter()
    recipe = rlx.Llama32Flow.for_prefill(config(c))
    model = rlx.compile(recipe, weights_by_key, program="train", profile=profile)
    optimizer = hand.adamw(1e-4)
    state = train.init(model, optimizer)
    step = train.make_step(model, optimizer, functools.partial(losses.cross_entropy, chunk=chunk), microbatches)
    compiled = step.lower(state, tokens).compile()
    carry = [state]
    model.params = None

    def run() -> Any:
        carry[0], metrics = compiled(carry[0], {"tokens": tokens})
        return metrics.loss

    return Row(compiled, run, time.perf_counter() - start)


def by_hand(remat: bool, c: Sizes, weights: Any, tokens: jax.Array, pieces: int) -> Row:
    """The yardstick."""
    start = time.perf_counter()
    optimizer = hand.adamw(1e-4)
    params = hand.fuse_projections(weights, c)
    carry = [params, jax.jit(optimizer.init)(params)]
    compiled = hand.make_step(c, optimizer, pieces, not TINY, remat).lower(*carry, tokens).compile()

    def run() -> Any:
        carry[0], carry[1], loss, _ = compiled(*carry, tokens)
        return loss

    return Row(compiled, run, time.perf_counter() - start)


def config(c: Sizes) -> dict[str, Any]:
    """A `config.json`: tied, as the hand-written step is."""
    return hf_config(c) | {"tie_word_embeddings": True, "max_position_embeddings": 8192}


def flops(c: Sizes, batch: int, seq: int) -> float:
    """Of one step."""
    width = c.heads * c.head_dim
    layer = c.hidden * (c.heads + 2 * c.kv_heads) * c.head_dim + width * c.hidden + 3 * c.hidden * c.ffn
    return 6 * (c.layers * layer + c.vocab * c.hidden) * batch * seq + 12 * c.layers * width * seq * batch * seq / 2


def torch_row(batch: int, seq: int) -> None:
    """transformers, sdpa, bf16, fused AdamW, compiled."""
    import torch
    import transformers

    c = LARGE
    settings = transformers.LlamaConfig(**{k: v for k, v in config(c).items() if k != "model_type"})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(settings).train()
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, c.vocab, (batch, seq), device="cuda")
    compiled = torch.compile(model)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss

    start = time.perf_counter()
    for _ in range(3):
        loss = step()
    torch.cuda.synchronize()
    first, times = time.perf_counter() - start, []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / STEPS)
    ms = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30
    emit(row="transformers compiled", ms=ms * 1e3, mfu=flops(c, batch, seq) / ms / PEAK, all_gib=peak, first_s=first,
         loss=float(loss), torch=torch.__version__, transformers=transformers.__version__)  # fmt: skip


def make(name: str, c: Sizes, weights: Any, tokens: jax.Array, chunk: int | None) -> Row:
    """A row by its name."""
    if name in HAND:
        return by_hand(HAND[name], c, weights, tokens, max(1, tokens.shape[1] // (chunk or 512)))
    return ours(**{"chunk": chunk, **OURS[name]}, c=c, weights_by_key=weights, tokens=tokens)


def figures(row: Row, times: list[float], flop: float) -> dict[str, float]:
    """What a row's line says."""
    memory, ms = row.compiled.memory_analysis(), statistics.median(times) / STEPS
    cost = row.compiled.cost_analysis()
    return {
        "ms": ms * 1e3,
        "mfu": flop / ms / PEAK,
        "temp_gib": memory.temp_size_in_bytes / 2**30,
        "args_gib": memory.argument_size_in_bytes / 2**30,
        "compile_s": row.seconds,
        "loss": row.loss,
        "flops": float(cost["flops"]),
        "bytes": float(cost["bytes accessed"]),
    }


def compare(figures_by_row: dict[str, dict[str, float]], goals: Goals) -> None:
    """`--tiny`: each of ours against the hand-written step that recomputes as much."""
    for name, got in figures_by_row.items():
        if name in HAND:
            continue
        want = figures_by_row["hand products" if OURS[name]["remat"] == "products" else "hand none"]
        for key in ("flops", "bytes", "temp_gib", "ms"):
            limit = PROGRAM_GOAL if key in ("flops", "bytes") else RUN_GOAL
            goals.at_most(f"{name}: {key} / by hand", got[key] / want[key], limit)
        goals.at_most(f"{name}: loss", abs(got["loss"] / want["loss"] - 1), LOSS_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description="a training step: rlx_jax, by hand, transformers")
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    parser.add_argument("--only", nargs="+", choices=[*HAND, *OURS], help="these rows")
    parser.add_argument("--list", action="store_true", help="names of rows")
    parser.add_argument("--torch", action="store_true", help="transformers too, first")
    parser.add_argument("--torch-alone", action="store_true", help="nothing else")
    parser.add_argument("--chunk", type=int, help="tokens of a piece of the loss; 512 by hand")
    parser.add_argument("--hlo", help="a directory for what XLA made of each row, gzip")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    c, (batch, seq) = (SMALL, (2, 128)) if TINY else (LARGE, (8, 2048))
    if args.list:
        print("\n".join([*HAND, *OURS]))
        return
    if args.torch_alone:
        torch_row(batch, seq)
        return
    if args.torch:
        subprocess.run([sys.executable, __file__, "--torch-alone"], check=False)
    emit(jax=jax.__version__, device=str(jax.devices()[0].device_kind), batch=batch, seq=seq)
    names = args.only or (TINY_ROWS if TINY else DEFAULT)
    tokens = jax.device_put(np.random.default_rng(0).integers(0, c.vocab, (batch, seq)).astype(np.int32))
    base = rlx.compile(rlx.Llama32Flow.for_prefill(config(c)))
    drawn = base.init(0)
    weights = {k: np.asarray(a if TINY else a.astype("bfloat16")) for k, a in drawn.items()}
    del drawn
    rows = {}
    for name in names:
        try:
            rows[name] = make(name, c, weights, tokens, args.chunk)
            rows[name]()
            if args.hlo:
                with gzip.open(os.path.join(args.hlo, f"{name.replace(' ', '-')}.hlo.gz"), "wt") as file:
                    file.write(rows[name].compiled.as_text())
        except Exception as error:  # one that does not fit leaves the others
            emit(row=name, error=repr(error)[:300])
            rows.pop(name, None)
        gc.collect()
    times = interleaved(rows, args.rounds if not TINY else 40)
    figures_by_row = {name: figures(row, times[name], flops(c, batch, seq)) for name, row in rows.items()}
    for name, got in figures_by_row.items():
        emit(row=name, **{k: float(f"{v:.5g}") for k, v in got.items()})
    ratio = {n: got["ms"] / figures_by_row.get("hand none", got)["ms"] for n, got in figures_by_row.items()}
    print(table(["row", "ms", "MFU", "temporaries, GiB", "/ by hand"], [
        [n, f"{g['ms']:.1f}", f"{g['mfu']:.3f}", f"{g['temp_gib']:.2f}", f"{ratio[n]:.3f}"]
        for n, g in figures_by_row.items()
    ]))  # fmt: skip
    goals = Goals()
    if TINY:
        compare(figures_by_row, goals)
    goals.exit()


if __name__ == "__main__":
    main()
