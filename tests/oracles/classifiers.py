"""Tiny classifiers of texts, and what transformers and sentence-transformers compute from them.

`python -m tests.oracles.classifiers` writes tests/fixtures/classifiers.zip: for each of `RECORDED` a checkpoint with a
tokenizer, and `recorded.json` with the logits of `TEXTS` and of the pairs with `SECOND`. `rerank` was written by a
CrossEncoder, and its record has the scores of the pairs. torch and transformers are imported when needed.
"""

import importlib
import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, hugging_face

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "classifiers.zip"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
MAX_LENGTH = 24  # some texts and pairs are longer


def _texts(seed: int, lengths: tuple[int, ...]) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, 40, n)) for n in lengths]


TEXTS, SECOND = _texts(0, (3, 9, 1, 17, 30, 5)), _texts(1, (8, 2, 1, 30, 40, 6))

ENCODER: dict[str, Any] = {
    "vocab_size": 45, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 40,
}  # fmt: skip
SHIFTED = ENCODER | {"pad_token_id": 0, "type_vocab_size": 1}
DISTILBERT = {
    "vocab_size": 45, "dim": 20, "hidden_dim": 28, "n_layers": 3, "n_heads": 2, "max_position_embeddings": 40,
    "activation": "relu",
}  # fmt: skip
DECODER = ENCODER | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
GPT2 = {"vocab_size": 45, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 40, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MULTI = {"problem_type": "multi_label_classification"}
NAMES = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}}

CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("Bert", ENCODER | NAMES),
    "bert_one_label": ("Bert", ENCODER | {"num_labels": 1, "problem_type": "regression"}),
    "bert_rerank": ("Bert", ENCODER | {"num_labels": 1}), "roberta": ("Roberta", SHIFTED | {"num_labels": 4}),
    "xlm_roberta": ("XLMRoberta", SHIFTED | {"num_labels": 1}), "camembert": ("Camembert", SHIFTED | {"num_labels": 2}),
    "mpnet": ("MPNet", ENCODER | {"num_labels": 2}), "nomic_bert": ("NomicBert", ENCODER | {"num_labels": 2}),
    "distilbert": ("DistilBert", DISTILBERT | MULTI | {"num_labels": 3}),
    "electra": ("Electra", ENCODER | {"embedding_size": 12, "num_labels": 3}),
    "electra_wide": ("Electra", ENCODER | {"embedding_size": 20}),
    "albert": ("Albert", ENCODER | {"embedding_size": 12, "num_hidden_layers": 4, "num_hidden_groups": 2}),
    "llama": ("Llama", DECODER | {"num_labels": 3}), "mistral": ("Mistral", DECODER | {"sliding_window": 5}),
    "mixtral": ("Mixtral", DECODER | {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {k: v for k, v in DECODER.items() if k != "head_dim"} | {"num_attention_heads": 2}),
    "qwen3": ("Qwen3", DECODER | MULTI | {"num_labels": 3}), "qwen3_moe": ("Qwen3Moe", DECODER | EXPERTS),
    "gemma": ("Gemma", DECODER), "gemma2": ("Gemma2", DECODER | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3Text", DECODER | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2", GPT2 | {"num_labels": 3}),
}  # fmt: skip
"""A tiny config for each class of transformers that classifies texts and is built: its prefix and its fields."""

RECORDED = ("bert", "distilbert", "albert", "qwen3")


def write(name: str, directory: Path) -> Any:
    """Write a checkpoint of `CASES` with a tokenizer; its model."""
    prefix, fields = CASES[name]
    write_base(f"{prefix}ForSequenceClassification", fields, directory)
    return hugging_face.load(directory, "AutoModelForSequenceClassification")


def write_base(architecture: str, fields: Mapping[str, Any], directory: Path | str, seed: int = 5) -> None:
    """Write a random model of transformers with the tokenizer."""
    hugging_face.write(hugging_face.Checkpoint(architecture, dict(fields), seed=seed), Path(directory))
    tokenizer().save_pretrained(directory)


def tokenizer(words: list[str] = WORDS) -> Any:
    """A WordPiece tokenizer of these words with BERT's special tokens."""
    with tempfile.TemporaryDirectory() as directory:
        vocabulary = Path(directory) / "vocab.txt"
        vocabulary.write_text("\n".join(words), "utf-8")
        return importlib.import_module("transformers").BertTokenizerFast(str(vocabulary), model_max_length=MAX_LENGTH)


def logits(model: Any, second: list[str] | None = None) -> list[list[float]]:
    """The logits of each text, or of each pair, alone."""
    torch, encode = importlib.import_module("torch"), tokenizer()
    reads_types = "token_type_ids" in inspect.signature(model.forward).parameters
    reads_types &= getattr(model.config, "type_vocab_size", 1) > 1 and model.config.model_type != "mpnet"
    found = []
    with torch.no_grad():
        for i, text in enumerate(TEXTS):
            inputs = encode(text, second[i] if second else None, truncation=True, return_tensors="pt")
            if not reads_types:
                inputs.pop("token_type_ids")
            found.append(model(**inputs).logits[0].tolist())
    return found


def main() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as root:
        for name in RECORDED:
            model = write(name, Path(root, name))
            record = {"texts": logits(model), "pairs": logits(model, SECOND)}
            Path(root, name, "recorded.json").write_text(json.dumps(record), "utf-8")
        with tempfile.TemporaryDirectory() as base:
            write("bert_rerank", Path(base))
            encoder = importlib.import_module("sentence_transformers").CrossEncoder(base, device="cpu")
        encoder.save_pretrained(str(Path(root, "rerank")))
        scores = encoder.predict([*zip(TEXTS, SECOND, strict=True)]).tolist()
        Path(root, "rerank", "recorded.json").write_text(json.dumps({"scores": scores}), "utf-8")
        checkpoints.write_archive(ARCHIVE, Path(root))


if __name__ == "__main__":
    main()
