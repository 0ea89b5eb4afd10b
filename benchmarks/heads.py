"""Texts a second of the heads for tokens and masks, and of the encoder without a head, on random weights of BERT-base.

    python benchmarks/heads.py           600 texts on a CPU, 8,000 on a GPU
    python benchmarks/heads.py --tiny    a few texts on a small model: checks this script

Texts are random words, of 3 to 200 tokens, with a mask in the middle. Requests take strings: `embed`, `tag`, and `fill`
with its five tokens and texts for a mask. `logits` returns those of every token, for a twentieth of the texts. The
first call of each, which compiles, is not counted. Exits with 1 if tags take more than 1.2 times the encoder without a
head, or fillings more than 1.5 times.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from report import Goals, emit, interleaved, median_ratio, table
from rerank import SPECIAL, make_words, write_tokenizer

import rlx_jax as rlx
from rlx_jax.encode.masked import MaskedLM
from rlx_jax.encode.tagging import TokenClassifier
from rlx_jax.models.bert import BertConfig, BertFlow
from rlx_jax.models.encoder import BERT_HEADS, MASKED, TOKEN, TaskHead
from rlx_jax.text.tokenizer import load_tokenizer


def make_texts(count: int, words: list[str]) -> list[str]:
    """Random words, with a mask in the middle of each text."""
    rng = np.random.default_rng(0)
    texts = []
    for length in np.clip(np.exp(rng.normal(3.4, 0.9, count)), 3, 200).astype(int):
        text = [words[i] for i in rng.integers(0, len(words), length)]
        text[length // 2] = "[MASK]"
        texts.append(" ".join(text).replace(" ##", ""))
    return texts


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    is_gpu = jax.default_backend() == "gpu"
    config = BertConfig(1024, 32, 64, 2, 4) if args.tiny else BertConfig(30522, 768, 3072, 12, 12)
    words = make_words(config.vocab_size - len(SPECIAL))
    texts = make_texts(20 if args.tiny else 8000 if is_gpu else 600, words)
    options: Any = {"missing": "init", "key": jax.random.key(0)}
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), words)
        options["tokenizer"] = load_tokenizer(directory)
    if is_gpu:
        options["profile"] = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    recipe = BertFlow(config)
    tagger = TokenClassifier(
        BertFlow(config, head=TaskHead(TOKEN, BERT_HEADS[TOKEN], tuple("abcdefghi"))), {}, **options
    )
    masked = MaskedLM(BertFlow(config, head=TaskHead(MASKED, BERT_HEADS[MASKED], (), is_tied=True)), {}, **options)
    encoder = rlx.Encoder(recipe, {}, **options)
    calls = {
        "encoder": lambda: encoder.embed(texts),
        "tags": lambda: tagger.tag(texts),
        "fill": lambda: masked.fill(texts),
        "logits": lambda: masked.logits(texts[::20]),
    }
    for call in calls.values():
        call()
    times, goals, rows = interleaved(calls, args.rounds), Goals(), []
    for name, limit in (("encoder", 1.0), ("tags", 1.2), ("fill", 1.5), ("logits", float("inf"))):
        ratio = median_ratio(times[name], times["encoder"])
        count = len(texts[::20]) if name == "logits" else len(texts)
        result = "" if args.tiny else goals.at_most(name, ratio, limit)
        rows.append((name, f"{count / min(times[name]):,.0f}", f"{ratio:.2f}", result))
        emit(name=name, texts=count, seconds=min(times[name]), ratio=ratio)
    print(table(("request", "texts/s", "× encoder", "goal"), rows))
    goals.exit()


if __name__ == "__main__":
    main()
