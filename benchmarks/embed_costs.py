"""What calls of `embed` cost on this device: the numbers of `COSTS` in rlx_jax/encode/packing.py.

    python benchmarks/embed_costs.py          MiniLM's shape, random weights: f32 on a CPU, bf16 on a GPU
    python benchmarks/embed_costs.py --tiny   a small shape and few calls: checks the script

A call of R rows of W tokens takes `token · (call + R·W·(1 + attention·W))`: `token` is the time of a token that sees no
other, `call` what a call costs by itself and `attention` what it costs a token to see one more, both in that time. The
three are fitted to the medians of calls of many sizes, each in its own proportion, and the row of the table is printed.
`tokens` is the smallest call whose tokens cost at most 3 % more than in the cheapest. It has no goal.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import jax
import numpy as np
from report import emit, seconds, table

import rlx_jax as rlx
from rlx_jax.encode.embedding import PackedBatcher
from rlx_jax.encode.packing import Block, costs_on, sizes_for
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.models.bert import BertConfig, BertFlow
from rlx_jax.text.request_checks import TokenRows

MINILM = BertConfig(30522, 384, 1536, 6, 12)
TINY = BertConfig(100, 16, 32, 2, 2)
WIDTHS = (64, 128, 256, 512)
TOKENS = {"cpu": (64, 128, 256, 512, 1024, 2048)}
GPU_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Tokens of a call, on a CPU and elsewhere."""


def make_batcher(config: BertConfig) -> PackedBatcher:
    """Rows of several texts, of a model with random weights."""
    precision = {} if jax.default_backend() == "cpu" else {"compute": "bf16", "weights": "bf16"}
    model = rlx.Encoder(BertFlow(config), profile=rlx.CompileProfile().replace(precision=precision)).model
    model = replace(model.replace(model.init(0)), program="packed", last_key=None)
    return PackedBatcher(model, SentencePipeline(), sizes_for(costs_on(model.settings.target), 512), None)


def time_call(form: PackedBatcher, rows: int, width: int, rounds: int) -> float:
    """Seconds of a call whose rows are full of texts of a quarter of their width; the first call is not counted."""
    length = width // 4
    block = Block(rows, width, form.sizes.slots(width), (tuple(range(4)),) * rows)
    texts = TokenRows([np.ones(length, np.int32)] * 4)

    def call() -> None:
        jax.block_until_ready(form.run(block, texts))

    call()
    return float(statistics.median(seconds(call) for _ in range(rounds)))


def fit_costs(times: dict[tuple[int, int], float]) -> tuple[float, float, float]:
    """`token`, `call` and `attention`, by least squares of the relative errors."""
    sizes, took = np.array(list(times)), np.array(list(times.values()))
    tokens = sizes.prod(axis=1)
    parts = np.stack([np.ones(len(sizes)), tokens, tokens * sizes[:, 1]], axis=1) / took[:, None]
    (call, token, attention), *_ = np.linalg.lstsq(parts, np.ones(len(sizes)), rcond=None)
    return float(token), float(call / token), float(attention / token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small shape and few calls")
    parser.add_argument("--rounds", type=int, default=20, help="calls of each size")
    args = parser.parse_args()
    kind = jax.default_backend()
    form = make_batcher(TINY if args.tiny else MINILM)
    wanted = (128, 256) if args.tiny else TOKENS.get(kind, GPU_TOKENS)
    sizes = [(tokens // width, width) for tokens in wanted for width in WIDTHS if width <= tokens]
    times = {size: time_call(form, *size, 3 if args.tiny else args.rounds) for size in sizes}
    token, call, attention = fit_costs(times)

    def predicted_seconds(rows: int, width: int) -> float:
        return token * (call + rows * width * (1 + attention * width))

    print(table(
        ["rows x width", "ms", "µs a token", "fit / measured"],
        [
            [f"{r} x {w}", f"{1e3 * t:.3f}", f"{1e6 * t / (r * w):.3f}", f"{predicted_seconds(r, w) / t:.2f}"]
            for (r, w), t in times.items()
        ],
    ))  # fmt: skip
    narrow = {rows * width: t / (rows * width) for (rows, width), t in times.items() if width == WIDTHS[1]}
    enough = min(tokens for tokens, each in narrow.items() if each <= 1.03 * min(narrow.values()))
    current_costs = costs_on(kind)
    measured_costs = replace(current_costs, tokens=enough, call=round(call, 1), attention=round(attention, 5))
    print(f"one token: {1e9 * token:.1f} ns\nin the table: {current_costs}\nmeasured:     {measured_costs}")
    emit(benchmark="embed_costs", device=kind, token_ns=1e9 * token, call=call, attention=attention, tokens=enough)


if __name__ == "__main__":
    main()
