"""Reranking, classification and embedding of many texts, in turn with sentence-transformers or transformers.

    python benchmarks/rerank.py                  200 pairs, 400 and 600 texts in f32 on a CPU;
                                                 2,000, 4,000 and 20,000 in bf16 on a GPU
    python benchmarks/rerank.py --full           the numbers of the GPU on a CPU
    python benchmarks/rerank.py --task embed     one task
    python benchmarks/rerank.py --tiny           a few texts on a small model, without torch: checks this script

Checkpoints of MiniLM's shape (6 layers, hidden 384) with random weights, and a WordPiece tokenizer of 30,522 random
words, are written first. Texts have a median of 60 tokens, log-normal, of a pair those of the document. References are
`CrossEncoder.predict`, the pipeline `text-classification` and `SentenceTransformer.encode`, each at the fastest of
several batch sizes, in the same dtype. Without sentence-transformers, transformers' model runs in their loop: texts
sorted by their characters, longest first, tokenized and padded batch by batch.

All cores tokenize for both: transformers' pipeline would turn that off for the whole process, unless it is set before.

Results are held against each other. Exits with 1 if ours is not 1.3 x as fast on a CPU; on a GPU 4 x, embeddings 6 x,
and the first call of a new process with a warm compile cache within 5 s.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from embed import first_calls
from report import Goals, emit, interleaved, median_ratio, seconds, table

BATCH_SIZES = {"cpu": (8, 16, 32, 64), "gpu": (64, 128, 256, 512)}
COUNTS = {"rerank": (200, 2000), "classify": (400, 4000), "embed": (600, 20_000)}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12, vocab_size=30522)
TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000)
# (class, labels) of each task's checkpoint
MODELS = {
    "rerank": ("BertForSequenceClassification", 1),
    "classify": ("BertForSequenceClassification", 4),
    "embed": ("BertModel", 0),
}


# -- checkpoints and texts ---------------------------------------------------------------------


def make_words(count: int) -> list[str]:
    """`count` different words of 2 to 9 letters; a tenth of them continue a word."""
    rng = np.random.default_rng(0)
    letters, words = np.array(list("etaoinshrdlucmfwypvbgkjqxz")), dict[str, None]()
    while len(words) < count:
        word = "".join(letters[np.minimum(rng.geometric(0.12, rng.integers(2, 10)) - 1, 25)])
        words["##" + word if len(words) % 10 == 9 else word] = None
    return [*words]


def make_texts(count: int, words: Sequence[str], longest: int, seed: int = 0) -> list[str]:
    """Texts with a median of 60 tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(58), 0.8, count)), 3, longest).astype(int)
    return [" ".join(words[i] for i in rng.integers(0, len(words), length)).replace(" ##", "") for length in lengths]


def write_checkpoint(directory: Path, task: str, sizes: dict[str, int], words: Sequence[str]) -> Path:
    """The checkpoint of a task: config, weights, tokenizer, and for embeddings the pooling."""
    from safetensors.numpy import save_file

    rng, (architecture, labels) = np.random.default_rng(1), MODELS[task]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    prefix, weights = "bert." if labels else "", dict[str, Any]()

    def add_linear(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = rng.normal(0, 0.05, (rows, columns)).astype(np.float32)
        weights[f"{name}.bias"] = rng.normal(0, 0.05, rows).astype(np.float32)

    def add_norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = np.ones(hidden, np.float32), np.zeros(hidden, np.float32)

    for name, rows in (("word", sizes["vocab_size"]), ("position", 512), ("token_type", 2)):
        table_name = f"{prefix}embeddings.{name}_embeddings.weight"
        weights[table_name] = rng.normal(0, 0.05, (rows, hidden)).astype(np.float32)
    add_norm(f"{prefix}embeddings.LayerNorm")
    for i in range(sizes["num_hidden_layers"]):
        layer = f"{prefix}encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            add_linear(f"{layer}.attention.{name}", hidden, hidden)
        add_linear(f"{layer}.intermediate.dense", inner, hidden)
        add_linear(f"{layer}.output.dense", hidden, inner)
        add_norm(f"{layer}.attention.output.LayerNorm")
        add_norm(f"{layer}.output.LayerNorm")
    add_linear(f"{prefix}pooler.dense", hidden, hidden)
    if labels:
        add_linear("classifier", labels, hidden)
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = {"model_type": "bert", "architectures": [architecture], "pad_token_id": 0, **sizes}
    if labels:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(labels)}
    else:
        modules = [("", "transformers.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
        types = ("sentence_transformers.models.Transformer", modules[1][1])
        entries = [{"idx": i, "name": str(i), "path": modules[i][0], "type": types[i]} for i in range(2)]
        (directory / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, words)
    return directory


def write_tokenizer(directory: Path, words: Sequence[str]) -> None:
    """The tokenizer, whose vocabulary is the special tokens and `words`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    settings = {"tokenizer_class": "BertTokenizerFast", "model_max_length": 512, **roles}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


# -- references --------------------------------------------------------------------------------


def reference(task: str, directory: Path, device: str, dtype: str) -> tuple[str, Callable[[Any, int], Any]]:
    """The name of the reference, and a function of inputs and a batch size."""
    import torch

    options = {"dtype": {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    if task == "classify":
        from transformers import pipeline

        run = pipeline("text-classification", str(directory), device=device, top_k=None, **options)
        return "transformers' pipeline", lambda texts, size: [
            [row["score"] for row in sorted(rows, key=lambda row: row["label"])]
            for rows in run(texts, batch_size=size, truncation=True)
        ]
    try:
        import sentence_transformers as st
    except ImportError:
        return "transformers, sorted", sorted_loop(task, directory, device, options)
    if task == "rerank":
        ranker = st.CrossEncoder(str(directory), device=device, model_kwargs=options)
        return "CrossEncoder", lambda pairs, size: ranker.predict(pairs, batch_size=size, show_progress_bar=False)
    encoder = st.SentenceTransformer(str(directory), device=device, model_kwargs=options)
    return "SentenceTransformer", lambda texts, size: encoder.encode(texts, batch_size=size, show_progress_bar=False)


def sorted_loop(task: str, directory: Path, device: str, options: dict[str, Any]) -> Callable[[Any, int], Any]:
    """The loop of sentence-transformers with transformers' model."""
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    kind = AutoModelForSequenceClassification if task == "rerank" else AutoModel
    model = kind.from_pretrained(directory, **options).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(directory)

    @torch.inference_mode()
    def run(items: Any, size: int) -> Any:
        lengths = [-len(item) if isinstance(item, str) else -sum(map(len, item)) for item in items]
        order, results = np.argsort(lengths, kind="stable"), []
        for at in range(0, len(items), size):
            batch = [items[i] for i in order[at : at + size]]
            inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt").to(device)
            outputs = model(**inputs)
            if task == "rerank":
                results.append(outputs.logits[:, 0].sigmoid())
            else:
                mask = inputs["attention_mask"].unsqueeze(-1).to(outputs.last_hidden_state.dtype)
                results.append((outputs.last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.cat(results).float().cpu().numpy()[np.argsort(order)]

    return run


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few texts on a small model, without torch")
    parser.add_argument("--full", action="store_true", help="the numbers of the GPU")
    parser.add_argument("--task", choices=tuple(COUNTS), action="append")
    parser.add_argument("--dtype", choices=("f32", "bf16"), help="by default f32 on a CPU, bf16 on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true", help="ours alone")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    import jax

    import rlx_jax as rlx

    is_gpu = jax.default_backend() == "gpu"
    dtype = args.dtype or ("bf16" if is_gpu else "f32")
    sizes = TINY if args.tiny else SIZES
    words = make_words(sizes["vocab_size"] - len(SPECIAL))
    profile = rlx.CompileProfile().replace(precision={"compute": dtype})
    goals, rows = Goals(), []
    with tempfile.TemporaryDirectory() as work:
        for task in args.task or COUNTS:
            directory = write_checkpoint(Path(work) / task, task, sizes, words)
            count = 12 if args.tiny else COUNTS[task][is_gpu or args.full]
            texts: Any = make_texts(count, words, 480)
            if task == "rerank":
                queries = make_texts(-(-count // 100), words, 20, seed=1)
                texts = [(queries[i // 100], text) for i, text in enumerate(texts)]
            if task == "embed" and is_gpu:
                cold, warm = first_calls(directory, texts, {"compute": dtype})
                emit(cold=cold, warm=warm)
                goals.at_most("first call with a warm compile cache, s", warm["load"] + warm["first embed"], 5.0)
            model = rlx.load(directory, profile=profile)
            requests = {"rerank": "score", "classify": "classify", "embed": "embed"}
            request = getattr(model, requests[task])
            calls = {"ours": functools.partial(request, texts)}
            result = request(texts)
            if task == "classify":
                result = [[row.scores[label] for label in model.labels] for row in result]
            error, size, name = 0.0, 0, "ours alone"
            if not (args.tiny or args.no_reference):
                name, run = reference(task, directory, "cuda" if is_gpu else "cpu", dtype)
                run(texts[:64], 64)
                batch_sizes = BATCH_SIZES["gpu" if is_gpu else "cpu"]
                tries = {n: seconds(functools.partial(run, texts, n)) for n in batch_sizes}
                size = min(tries, key=lambda n: tries[n])
                emit(task=task, reference=name, seconds_by_batch_size=tries)
                theirs = np.asarray(run(texts, size), np.float32)
                error = float(np.abs(np.asarray(result) - theirs).max() / np.abs(theirs).max())
                calls["theirs"] = functools.partial(run, texts, size)
            times = interleaved(calls, args.rounds)
            ratio = median_ratio(times["theirs"], times["ours"]) if "theirs" in times else float("nan")
            goal = (6.0 if task == "embed" else 4.0) if is_gpu else 1.3
            met = goals.at_most(f"{task}: {goal} x as fast; inverse", 1 / ratio, 1 / goal) if "theirs" in times else ""
            goals.at_most(f"{task}: difference", error, 3e-5 if dtype == "f32" and not is_gpu else 5e-2)
            best = {name: f"{count / min(values):,.0f}" for name, values in times.items()}
            rows.append((task, count, best["ours"], best.get("theirs", "-"), size, f"{ratio:.2f}", f"{error:.1e}", met))
            emit(task=task, count=count, reference=name, batch_size=size, times=times, ratio=ratio, error=error)
    print(table(("task", "texts", "ours /s", "theirs /s", "batch size", "times as fast", "difference", "goal"), rows))
    goals.exit()


if __name__ == "__main__":
    main()
