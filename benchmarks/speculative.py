"""Drafts from the text against plain decoding: what a step costs, and how much faster a text that is copied comes.

    python benchmarks/speculative.py           the 1B shape in bf16 on one GPU
    python benchmarks/speculative.py --tiny    a small one in f32 on the CPU: checks this script, not a GPU

All goes through `lm.generate`. Layers have random weights, and random weights copy nothing: the head's rows are those
of the embedding in another order, so that the likeliest token follows from the last one, and a text never repeats.
First figure: a step that reads k drafts, none of which hold, against a plain step. Second: prompts that hold the text
to come, one token in ten wrong, as an edit would have them. Third: the module of a Qwen 3.5 checkpoint, in the shape of
the 0.8B model, whose weights are made so that it is right, and so that it never is. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.models.qwen35 import Qwen35Config, Qwen35Flow, Qwen35MtpFlow

EDITED_SHARE = 0.1


@dataclass(frozen=True)
class Shape:
    """A model, and how it runs: prompts of so many tokens, calls of so many new ones. `goal`: times as fast."""

    sizes: Sizes
    dtype: str
    prompt: int
    short: int
    long: int
    goal: float | None


SHAPES = {
    "1b": Shape(
        Sizes(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, theta=5e5),
        "bf16", 384, 33, 289, 1.8,
    ),
    "tiny": Shape(
        Sizes(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512), "f32", 64, 9, 49, None
    ),
}  # fmt: skip


MODULES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Configs of Qwen 3.5 with a module for drafts, for each shape; the first has the published sizes, with a head of its
own."""


def next_tokens(vocab: int) -> np.ndarray[Any, Any]:
    """The token behind each token: all of them one after the other, and around."""
    order = np.random.default_rng(3).permutation(vocab)
    after = np.empty(vocab, np.int64)
    after[order] = np.roll(order, -1)
    return after


def build(shape: Shape) -> rlx.CausalLM:
    """The model. Embeddings are large enough to be heard behind all layers."""
    config = LlamaConfig.from_hf(hf_config(shape.sizes))
    rng, vocab = np.random.default_rng(0), shape.sizes.vocab

    def random_array(size: tuple[int, ...]) -> Any:
        return rng.standard_normal(size, np.float32) * np.float32(0.02) if len(size) > 1 else np.ones(size, np.float32)

    weights = {key: random_array(spec.shape) for key, spec in weight_specs(config).items()}
    table = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = table[np.argsort(next_tokens(vocab))]  # row j: the embedding of the token before j
    weights["model.embed_tokens.weight"] = table * np.float32(100)
    dtype = jnp.dtype("float32" if shape.dtype == "f32" else "bfloat16")
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    cast = {key: w.astype(dtype) for key, w in weights.items()}
    return rlx.CausalLM(Llama32Flow(config), cast, profile=profile, max_positions=4096)


def build_with_module(config: dict[str, Any], dtype: str, right: bool) -> rlx.CausalLM:
    """A Qwen 3.5 that writes such texts. Its module reads the token that it is given, and is `right`, or the hidden
    state alone, and says that token again."""
    c = Qwen35Config.from_hf(config | {"model_type": "qwen3_5_text"})
    rng, kind = np.random.default_rng(0), jnp.dtype("float32" if dtype == "f32" else "bfloat16")

    def random_array(key: str, size: tuple[int, ...]) -> Any:
        norm = "norm" in key  # zero-centred: they multiply with 1 + w
        return np.zeros(size, kind) if norm else (rng.standard_normal(size, np.float32) * np.float32(0.02)).astype(kind)

    shapes = Qwen35Flow(c).shapes() | Qwen35MtpFlow(c).shapes()
    weights = {key: random_array(key, spec.shape) for key, spec in shapes.items()}
    table = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = table[np.argsort(next_tokens(len(table)))]
    weights["model.embed_tokens.weight"] = table * kind.type(100)
    halves = [np.eye(c.hidden_size, dtype=np.float32) * 10, np.zeros((c.hidden_size,) * 2, np.float32)]
    weights["mtp.fc.weight"] = np.concatenate(halves if right else halves[::-1], 1).astype(kind)
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": dtype})
    return rlx.CausalLM(Qwen35Flow(c), weights, profile=profile)


def sample_texts(shape: Shape, rows: int, vocab: int | None = None) -> np.ndarray[Any, Any]:
    """Texts as the model writes them `[rows, n]`, each from a place of its own."""
    vocab = vocab or shape.sizes.vocab
    after = next_tokens(vocab)
    text = np.empty((rows, shape.prompt + shape.long), np.int64)
    text[:, 0] = np.linspace(0, vocab, rows, endpoint=False).astype(int)
    for i in range(1, text.shape[1]):
        text[:, i] = after[text[:, i - 1]]
    return text


def unrelated_prompts(shape: Shape, rows: int) -> list[list[int]]:
    """Prompts that hold nothing of what comes."""
    return [[int(i) for i in row] for row in sample_texts(shape, rows)[:, : shape.prompt]]


def edited_prompts(shape: Shape, rows: int) -> list[list[int]]:
    """Prompts that hold what comes, with a share of tokens wrong, and end where it begins."""
    rng, prompts = np.random.default_rng(4), []
    for row in sample_texts(shape, rows):
        held = row[1 : shape.prompt]
        wrong = rng.random(len(held)) < EDITED_SHARE
        prompts.append([*np.where(wrong, rng.integers(0, shape.sizes.vocab, len(held)), held).tolist(), int(row[0])])
    return prompts


def options(drafts: int, source: str) -> dict[str, Any]:
    return {"speculative": source, "draft_tokens": drafts} if drafts else {}


def step_times(lm: rlx.CausalLM, shape: Shape, rows: int, counts: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Milliseconds of a step by how many drafts it reads: the difference of a long call and a short one."""
    prompts, calls, steps = unrelated_prompts(shape, rows), {}, {}
    for drafts, new in itertools.product(counts, (shape.long, shape.short)):
        calls[f"{drafts} {new}"] = caller(lm, prompts, new, drafts)
        for _ in range(2):
            calls[f"{drafts} {new}"]()
        found = lm.report().speculative
        steps[drafts, new] = found.steps if drafts and found else new - 1
    times = interleaved(calls, rounds)
    ms = {
        drafts: statistics.median(
            a - b for a, b in zip(times[f"{drafts} {shape.long}"], times[f"{drafts} {shape.short}"], strict=True)
        ) / (steps[drafts, shape.long] - steps[drafts, shape.short]) * 1e3
        for drafts in counts
    }  # fmt: skip
    emit(job=f"step, {rows} rows", ms={str(k): round(v, 3) for k, v in ms.items()})
    return ms


def caller(
    lm: rlx.CausalLM, prompts: list[list[int]], new: int, drafts: int, source: str = "prompt"
) -> Callable[[], Any]:
    return lambda: lm.generate(prompts, max_new_tokens=new, **options(drafts, source))


def measure_drafts(
    lm: rlx.CausalLM, prompts: list[list[int]], new: int, counts: tuple[int, ...], rounds: int, source: str
) -> dict[int, tuple[float, ...]]:
    """By how many drafts a step reads: tokens a second of whole calls, times as fast as plain, share of drafts that
    held, tokens a row and step, and the share of tokens that are those of plain decoding."""
    calls = {str(drafts): caller(lm, prompts, new, drafts, source) for drafts in counts}
    texts, held = {}, {}
    for drafts in counts:
        for _ in range(2):
            texts[drafts] = np.array(calls[str(drafts)]())
        found = lm.report().speculative if drafts else None
        held[drafts] = (found.accepted / found.drafted, (new - 1) / found.steps) if found else (1.0, 1.0)
    times = interleaved(calls, rounds)
    return {
        drafts: (
            len(prompts) * new / statistics.median(times[str(drafts)]),
            statistics.median(a / b for a, b in zip(times["0"], times[str(drafts)], strict=True)),
            *held[drafts],
            float((texts[drafts] == texts[0]).mean()),
        )
        for drafts in counts
    }


def measure_copies(lm: rlx.CausalLM, shape: Shape, rows: int, counts: tuple[int, ...], rounds: int) -> dict[int, Any]:
    """`measure_drafts`, of drafts from the prompts."""
    figures = measure_drafts(lm, edited_prompts(shape, rows), shape.long, counts, rounds, "prompt")
    emit(job=f"copy, {rows} rows", figures={str(k): [round(x, 3) for x in v] for k, v in figures.items()})
    return figures


def measure_modules(
    shape: Shape, config: dict[str, Any], rows: int, counts: tuple[int, ...], rounds: int
) -> list[list[str]]:
    """Lines of a table: `measure_drafts` of a module that is right and of one that is not."""
    lines = []
    for right in (True, False):
        lm = build_with_module(config, shape.dtype, right)
        prompts = sample_texts(shape, rows, config["vocab_size"])[:, : shape.prompt].tolist()
        for drafts, found in measure_drafts(lm, prompts, shape.long, counts, rounds, "mtp").items():
            emit(job=f"module, {rows} rows", right=right, drafts=drafts, figures=[round(x, 3) for x in found])
            rate, faster, held, tokens, same = found
            name = f"{rows} rows, {drafts} drafts, {'right' if right else 'wrong'}"
            lines.append([name, f"{rate:,.0f}", f"{faster:.2f}", f"{held:.2f}", f"{tokens:.2f}", f"{same:.3f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="drafts from the text against plain decoding")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, which checks this script")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    shape, counts, goals = SHAPES["tiny" if args.tiny else "1b"], (0, 4, 8), Goals()
    rounds = 3 if args.tiny else args.rounds
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {shape.dtype}")
    config, modelled = MODULES["tiny" if args.tiny else "1b"], list[list[str]]()
    for rows in (1, 8):
        modelled += measure_modules(shape, config, rows, (0, 1, 2, 4), rounds)
    lm = build(shape)
    costs, copies = [], []
    for rows in (1, 8):
        ms = step_times(lm, shape, rows, counts, rounds)
        costs += [[f"{rows} rows, {k} drafts", f"{t:.3f}", f"{t / ms[0]:.2f}"] for k, t in ms.items()]
        for k, (rate, faster, share, each, same) in measure_copies(lm, shape, rows, counts, rounds).items():
            verdict = ""
            if rows == 1 and k == max(counts) and shape.goal is not None:
                verdict = goals.at_most("plain / speculative time, 1 row", 1 / faster, 1 / shape.goal)
            line = [f"{rate:,.0f}", f"{faster:.2f}", f"{share:.2f}", f"{each:.2f}", f"{same:.3f}", verdict]
            copies.append([f"{rows} rows, {k} drafts", *line])
    print(table(["a step, nothing holds", "ms", "of a plain one"], costs), end="\n\n")
    head = ["a copied text, 1 in 10 edited", "tokens/s", "times plain", "drafts held", "tokens a step", "same", "goal"]
    print(table(head, copies), end="\n\n")
    print(table(["a module that drafts", *head[1:-1]], modelled))
    goals.exit()


if __name__ == "__main__":
    main()
