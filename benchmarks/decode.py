"""Decoding and prefill, ours and the peers' in turn, beside the limits of the machine.

    python benchmarks/decode.py                  the 135M shape in f32 on the CPU, the 1B shape in bf16 on a GPU
    python benchmarks/decode.py --torch          transformers too, in the same process
    python benchmarks/decode.py --alone --only "prefill 8x2048"      one job, ours

Ours goes through `lm.generate` and `lm.prefill`, as a user's call does. Peers: Llama written by hand in jax.numpy
(`handwritten_decode.py`, every layout; ratios are to the fastest), and transformers' eager `generate` where asked for.
Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import handwritten_decode as hand
import jax
import jax.numpy as jnp
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, RandomSource, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs

SHORT, LONG = 33, 97
"""New tokens of two calls whose difference is the time of a step: what a call costs once drops out."""


@dataclass(frozen=True)
class Shape:
    """A model, how it runs, and what has to be reached: ratios to the best hand-written JAX, or milliseconds.

    `queued`: so many prompts are started one after the other before the last is waited for, as the published figures
    of GPUs were taken; each alone is measured too.
    """

    sizes: Sizes
    dtype: str
    prompt: int
    cache_len: int
    batches: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    layouts: tuple[hand.Layout, ...]
    ratio: float | None = None
    ms: tuple[tuple[str, float], ...] = ()
    queued: int = 1


SHAPES = {
    "135m": Shape(
        Sizes(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152),
        "f32", 128, 512, (1,), ((1, 128), (1, 512)),
        tuple(hand.Layout(out_in, merged) for out_in in (False, True) for merged in (False, True)), ratio=1.03,
    ),
    "1b": Shape(
        Sizes(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, theta=5e5),
        "bf16", 128, 1024, (1, 8, 64), ((1, 512), (1, 2048), (8, 2048)),
        (hand.Layout(True, True, True), hand.Layout(False, False, True)),
        ms=(("decode 1", 0.95), ("decode 8", 1.0), ("decode 64", 1.4),
            ("prefill 1x512", 3.0), ("prefill 1x2048", 8.5), ("prefill 8x2048", 58.0)), queued=5,
    ),
    "tiny": Shape(
        Sizes(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512),
        "f32", 16, 128, (1, 2), ((1, 16), (2, 32)), (hand.Layout(True, True), hand.Layout(False, False)),
    ),
}  # fmt: skip


Call = Callable[[], Any]


def build(shape: Shape) -> rlx.CausalLM:
    """Our model with random weights."""
    config = LlamaConfig.from_hf({**hf_config(shape.sizes), "tie_word_embeddings": True})
    specs = {key: jax.ShapeDtypeStruct(s.shape, hand_dtype(shape)) for key, s in weight_specs(config).items()}
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype}, donation={"strict": True})
    return rlx.CausalLM(Llama32Flow(config), RandomSource(specs), profile=profile, max_positions=4096)


def hand_dtype(shape: Shape) -> Any:
    return jnp.dtype("float32" if shape.dtype == "f32" else "bfloat16")


# -- decoding ------------------------------------------------------------------------------------


def prompts(shape: Shape, batch: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, shape.sizes.vocab, (batch, shape.prompt)).astype(np.int32)


def our_decode(lm: rlx.CausalLM, shape: Shape, batch: int, new: int) -> Call:
    """A whole call of `lm.generate`."""
    rows = prompts(shape, batch).tolist()
    return lambda: lm.generate(rows, max_new_tokens=new)


def hand_decode(shape: Shape, layout: hand.Layout, params: Any, batch: int, new: int) -> Call:
    """`new` steps called from the host, each fed with the token of the last."""
    dtype, c = hand_dtype(shape), shape.sizes
    step = hand.compiled(c, layout, params, batch, 1, shape.cache_len, dtype)
    carry = [jnp.zeros((batch,), jnp.int32), hand.empty_cache(c, batch, shape.cache_len, dtype)]

    def call() -> None:
        for i in range(new):
            carry[0], carry[1] = step(params, carry[0][:, None], np.int32(shape.prompt + i), carry[1])
        jax.block_until_ready(carry[0])

    return call


# -- prefill -------------------------------------------------------------------------------------


def our_prefill(lm: rlx.CausalLM, shape: Shape, batch: int, seq: int, queued: int = 1) -> Call:
    """Logits of the last token, and the cache."""
    tokens = np.random.default_rng(2).integers(0, shape.sizes.vocab, (batch, seq)).astype(np.int32)

    def call() -> None:
        for _ in range(queued):
            logits, state = lm.prefill(tokens, max_len=max(seq, shape.cache_len), logits="last")
        jax.block_until_ready(logits)

    return call


def hand_prefill(shape: Shape, layout: hand.Layout, params: Any, batch: int, seq: int, queued: int = 1) -> Call:
    """The same, from an empty cache."""
    dtype, c, cache_len = hand_dtype(shape), shape.sizes, max(seq, shape.cache_len)
    step = hand.compiled(c, layout, params, batch, seq, cache_len, dtype)
    new_cache = jax.jit(lambda: hand.empty_cache(c, batch, cache_len, dtype))
    tokens = np.random.default_rng(2).integers(0, c.vocab, (batch, seq)).astype(np.int32)

    def call() -> None:
        for _ in range(queued):
            token, cache = step(params, tokens, np.int32(0), new_cache())
        jax.block_until_ready(token)

    return call


# -- transformers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    """transformers' eager model of the same shape on the same device."""

    model: Any
    device: str

    @staticmethod
    def build(shape: Shape, device: str) -> Torch:
        import torch
        import transformers

        config = transformers.LlamaConfig(**{**hf_config(shape.sizes), "tie_word_embeddings": True})
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        return Torch(model.to(device, torch.float32 if shape.dtype == "f32" else torch.bfloat16), device)

    def ids(self, tokens: Any) -> Any:
        import torch

        return torch.as_tensor(np.asarray(tokens), dtype=torch.int64, device=self.device)

    def decode(self, shape: Shape, batch: int, new: int) -> Call:
        """A whole call of `generate`, greedy, never ended."""
        import torch

        rows = self.ids(prompts(shape, batch))
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

        def call() -> None:
            with torch.inference_mode():
                self.model.generate(rows, **options).cpu()

        return call

    def prefill(self, shape: Shape, batch: int, seq: int, queued: int = 1) -> Call:
        """Logits of the last token, and the cache."""
        import torch

        tokens = self.ids(np.random.default_rng(2).integers(0, shape.sizes.vocab, (batch, seq)))

        def call() -> None:
            with torch.inference_mode():
                for _ in range(queued):
                    logits = self.model(tokens, logits_to_keep=1).logits
                logits.cpu()

        return call


# -- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Times of one job in ms a step, by who did it; `limit` is what the machine cannot go below, where known."""

    name: str
    ms: dict[str, float]

    def best_peer(self) -> float:
        return min((v for k, v in self.ms.items() if k.startswith("hand")), default=float("nan"))


def measure(name: str, calls: dict[str, tuple[Call, Call | None]], steps: int, rounds: int) -> Row:
    """Medians of interleaved calls; where a shorter call is given, of the difference to it."""
    flat: dict[str, Call] = {}
    for who, (call, shorter) in calls.items():
        flat[who] = call
        if shorter is not None:
            flat[f"{who}, shorter"] = shorter
    for call in flat.values():
        call()
        call()
    times = interleaved(flat, rounds)
    readings: dict[str, list[float]] = {}
    for who, (_, shorter) in calls.items():
        less = times[f"{who}, shorter"] if shorter is not None else [0.0] * len(times[who])
        readings[who] = [round((a - b) / steps * 1e3, 4) for a, b in zip(times[who], less, strict=True)]
    row = Row(name, {who: statistics.median(ms) for who, ms in readings.items()})
    emit(job=name, ms=row.ms, readings=readings)
    return row


def rows_of(shape: Shape, torch_peer: Torch | None, rounds: int, only: str) -> list[Row]:
    lm = build(shape)
    params = {str(lay): hand.parameters(shape.sizes, lay, hand_dtype(shape), tied=True) for lay in shape.layouts}
    steps, rows = LONG - SHORT, []
    for batch in shape.batches:
        if only not in f"decode {batch}":
            continue
        calls: dict[str, tuple[Call, Call | None]] = {
            "ours": (our_decode(lm, shape, batch, LONG), our_decode(lm, shape, batch, SHORT))
        }
        for lay in shape.layouts:
            calls[f"hand {lay}"] = (hand_decode(shape, lay, params[str(lay)], batch, steps), None)
        if torch_peer:
            calls["torch"] = (torch_peer.decode(shape, batch, LONG), torch_peer.decode(shape, batch, SHORT))
        rows.append(measure(f"decode {batch}", calls, steps, rounds))
    for (batch, seq), queued in itertools.product(shape.prompts, dict.fromkeys((shape.queued, 1))):
        alone = ", alone" if queued < shape.queued else ""
        if only not in (name := f"prefill {batch}x{seq}{alone}"):
            continue
        calls = {"ours": (our_prefill(lm, shape, batch, seq, queued), None)}
        for lay in shape.layouts:
            calls[f"hand {lay}"] = (hand_prefill(shape, lay, params[str(lay)], batch, seq, queued), None)
        if torch_peer:
            calls["torch"] = (torch_peer.prefill(shape, batch, seq, queued), None)
        rows.append(measure(name, calls, queued, rounds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding and prefill, ours and the peers' in turn")
    parser.add_argument("--shape", choices=SHAPES, help="by default 1b on a GPU, else 135m")
    parser.add_argument("--torch", action="store_true", help="transformers too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="jobs that contain this text, such as 'decode 1'")
    parser.add_argument("--alone", action="store_true", help="nothing by hand")
    args = parser.parse_args()
    gpu = jax.default_backend() == "gpu"
    shape = SHAPES[args.shape or ("1b" if gpu else "135m")]
    if args.alone:
        shape = replace(shape, layouts=())
    peer = Torch.build(shape, "cuda" if gpu else "cpu") if args.torch else None
    goals, lines, goals_by_row = Goals(), [], dict(shape.ms)
    for row in rows_of(shape, peer, args.rounds, args.only):
        ours, best = row.ms["ours"], row.best_peer()
        verdict = ""
        if shape.ratio is not None and not args.alone:
            verdict = goals.at_most(f"{row.name}, ours / best hand-written", ours / best, shape.ratio)
        if row.name in goals_by_row:
            verdict = f"{goals.at_most(f'{row.name}, ms', ours, goals_by_row[row.name])} ({goals_by_row[row.name]:g})"
        line = [row.name, f"{ours:.2f}", f"{best:.2f}", f"{ours / best:.3f}"]
        if peer:
            line += [f"{row.ms['torch']:.2f}", f"{ours / row.ms['torch']:.3f}"]
        lines.append([*line, verdict])
    head = ["ms a step or prompt", "ours", "best by hand", "ratio", *["torch", "ratio"] * bool(peer), "goal"]
    print(table(head, lines))
    goals.exit()


if __name__ == "__main__":
    main()
