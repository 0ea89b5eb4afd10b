"""Scores of texts of mixed length: how many programs they take, and texts a second.

    python benchmarks/score.py            2,000 texts: a small Llama in f32 on a CPU, Llama's 1B shape in bf16 on a GPU
    python benchmarks/score.py --torch    in turn with transformers, in the same weights
    python benchmarks/score.py --tiny     60 texts: checks this script

`lm.score` is one call; its first one, which compiles, is not counted. transformers has the texts sorted by length, in
batches of `--batch-size` that are padded on the right, and takes the log-softmax of all logits of a batch, as
evaluation loops do. Scores are held against each other. Exits with 1 if there are more than 8 programs, if a second
call compiles, or if scores differ.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory on the same GPU

import jax
import ml_dtypes
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, interleaved, median_ratio, table

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs


@dataclass(frozen=True)
class Shape:
    """A model, how it runs, how many texts there are, rows of a batch of transformers, how much scores may differ."""

    sizes: Sizes
    dtype: str
    texts: int
    batch_size: int
    tolerance: float

    @property
    def weight_dtype(self) -> Any:
        """The dtype of its weights."""
        return np.dtype(np.float32 if self.dtype == "f32" else ml_dtypes.bfloat16)


SHAPES = {
    "tiny": Shape(
        Sizes(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, theta=1e4),
        "f32", 60, 16, 1e-5,
    ),
    "small": Shape(
        Sizes(layers=4, hidden=192, heads=4, kv_heads=4, head_dim=48, ffn=512, vocab=8192, theta=1e4),
        "f32", 2000, 16, 1e-5,
    ),
    "1b": Shape(
        Sizes(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, theta=5e5),
        "bf16", 2000, 32, 5e-3,
    ),
}  # fmt: skip
POSITIONS = 2048


def make_texts(count: int, vocab: int) -> list[list[int]]:
    """Ids of 2 to 900 tokens, half of them under 55: titles, questions with answers, and pages."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(4.0, 1.0, count)), 2, 900).astype(int)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def build(shape: Shape) -> tuple[rlx.CausalLM, dict[str, Any]]:
    """The model and its weights."""
    config = LlamaConfig.from_hf(hf_config(shape.sizes))
    rng = np.random.default_rng(0)
    scale = np.float32(0.05 if shape.dtype == "f32" else 0.02)

    def random_array(size: tuple[int, ...]) -> Any:
        drawn = rng.standard_normal(size, np.float32) * scale
        return (drawn if len(size) > 1 else np.ones(size, np.float32)).astype(shape.weight_dtype)

    weights = {key: random_array(spec.shape) for key, spec in weight_specs(config).items()}
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    return rlx.CausalLM(Llama32Flow(config), weights, profile=profile, max_positions=POSITIONS), weights


def transformers_scorer(
    shape: Shape, weights: dict[str, Any], batch_size: int
) -> Callable[[list[list[int]]], list[float]]:
    """The same by transformers on the same device."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    dtype = torch.float32 if shape.dtype == "f32" else torch.bfloat16
    config = transformers.LlamaConfig(**hf_config(shape.sizes))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)

    def score(texts: list[list[int]]) -> list[float]:
        found = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for at in range(0, len(order), batch_size):
            chosen = order[at : at + batch_size]
            block = np.zeros((len(chosen), len(texts[chosen[0]])), np.int64)
            for row, i in enumerate(chosen):
                block[row, : len(texts[i])] = texts[i]
            ids = torch.as_tensor(block, device=device)
            with torch.inference_mode():
                logits = torch.log_softmax(model(ids[:, :-1], use_cache=False).logits.float(), -1)
            log_probs = logits.gather(-1, ids[:, 1:, None])[..., 0].cpu()
            for row, i in enumerate(chosen):
                found[i] = float(log_probs[row, : len(texts[i]) - 1].double().sum())
        return found

    return score


def main() -> None:
    parser = argparse.ArgumentParser(description="scores of texts of mixed length")
    parser.add_argument("--shape", choices=SHAPES, help="by default 1b on a GPU, else small")
    parser.add_argument("--tiny", action="store_true", help="a few texts, which checks this script")
    parser.add_argument("--torch", action="store_true", help="transformers too")
    parser.add_argument("--batch-size", type=int, help="rows of a batch of transformers")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    gpu = jax.default_backend() == "gpu"
    shape, goals = SHAPES["tiny" if args.tiny else args.shape or ("1b" if gpu else "small")], Goals()
    texts = make_texts(shape.texts, shape.sizes.vocab)
    lm, weights = build(shape)
    scores = lm.score(texts)
    programs = lm.report().compiles
    calls: dict[str, Callable[[], Any]] = {"rlx_jax": lambda: lm.score(texts)}
    if args.torch:
        score = transformers_scorer(shape, weights, args.batch_size or shape.batch_size)
        want = np.array(score(texts))
        error = np.abs(np.array([s.logprob for s in scores]) / want - 1).max()
        goals.at_most("log-likelihoods, relative", float(error), shape.tolerance)
        calls["transformers"] = lambda: score(texts)
    times = interleaved(calls, args.rounds)
    goals.at_most("programs", programs, 8)
    goals.at_most("programs of later calls", lm.report().compiles - programs, 0)
    rows = []
    for name, seconds in times.items():
        best = min(seconds)
        ratio = median_ratio(times["rlx_jax"], seconds)
        rows.append([name, f"{best:.2f}", f"{len(texts) / best:.1f}", f"{1 / ratio:.2f}"])
        emit(name=name, seconds=best, texts=len(texts), texts_per_second=len(texts) / best)
    tokens = sum(map(len, texts))
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: {len(texts)} texts, {tokens} tokens, {programs} programs")
    print(table(["", "s", "texts/s", "time / that of rlx_jax"], rows))
    goals.exit()


if __name__ == "__main__":
    main()
