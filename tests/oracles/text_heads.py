"""Tiny models with heads for tokens, answers and masks, and what the pipelines of transformers compute from them.

`python -m tests.oracles.text_heads` writes tests/fixtures/text_heads.zip: for each of `RECORDED` a checkpoint with a
tokenizer and what `record` returns. Version 5 of transformers has no pipeline for answers; the same command with
version 4 adds those. torch and transformers are imported when needed.
"""

import importlib
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, classifiers, hugging_face
from tests.oracles.classifiers import ENCODER

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "text_heads.zip"
ROOTS = "abcdefghijklmno"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ",", *ROOTS, *(f"##{letter}" for letter in ROOTS), *"01234567"]
AGGREGATIONS = ("none", "simple", "first", "average", "max")
TAGS = {"id2label": dict(enumerate(("O", "B-A", "I-A", "B-B", "I-B")))}
TOKEN, ANSWER, MASKED = "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM"


def _texts(seed: int, lengths: tuple[int, ...]) -> list[str]:
    """Texts of words of several tokens, some after a comma, one unknown, and without a space after a comma."""
    rng = np.random.default_rng(seed)
    texts = []
    for n in lengths:
        words = ["".join(rng.choice([*ROOTS], rng.integers(1, 4))) + "," * int(rng.random() < 0.2) for _ in range(n)]
        texts.append(" ".join(words).replace(", ", ",", 1) + " zz" * (n == 5))
    return texts


TEXTS, QUESTIONS, CONTEXTS = _texts(0, (3, 5, 1, 7, 30)), _texts(1, (2, 3, 1)), _texts(2, (5, 60, 2))
MASKS = ["a [MASK] bc", "[MASK] k, [MASK] f [MASK]", "[MASK]"]
# Arguments of `answer`, and of the pipeline.
SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": 3}, {"top_k": 3}),
    ({"top_k": 2, "allow_none": True}, {"top_k": 2, "handle_impossible_answer": True}),
    ({"top_k": 4, "whole_words": False, "max_answer_tokens": 3},
     {"top_k": 4, "align_to_words": False, "max_answer_len": 3}),
    ({"top_k": 3, "max_length": 17, "overlap": 5}, {"top_k": 3, "max_seq_len": 17, "doc_stride": 5}),
]  # fmt: skip
RECORDED = {
    "tags": ("Bert" + TOKEN, ENCODER | TAGS),
    "answers": ("Bert" + ANSWER, ENCODER),
    "masks": ("Bert" + MASKED, ENCODER),
}
# The tasks that transformers has classes for, by the prefix of the class; the fields are those of classifiers.CASES.
ENCODERS = ("bert", "roberta", "xlm_roberta", "camembert", "mpnet", "distilbert", "electra", "electra_wide", "albert")
DECODERS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2")
TASKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ENCODERS, (TOKEN, ANSWER, MASKED)), "nomic_bert": (TOKEN, MASKED),
    **dict.fromkeys(DECODERS, (TOKEN, ANSWER)), "gemma": (TOKEN,), "gemma2": (TOKEN,),
}  # fmt: skip
UNREAD = ("problem_type", "num_labels", "id2label")


def live_case(name: str, task: str) -> tuple[str, dict[str, Any]]:
    """The architecture and the fields of a tiny model."""
    prefix, fields = classifiers.CASES[name]
    labels = TAGS if task == TOKEN else {}
    return prefix + task, {key: value for key, value in fields.items() if key not in UNREAD} | labels


def tokenizer() -> Any:
    """A WordPiece tokenizer of `WORDS`."""
    return classifiers.tokenizer(WORDS)


def write(architecture: str, fields: Mapping[str, Any], directory: Path) -> Any:
    """Write a checkpoint with a tokenizer; its model."""
    hugging_face.write(hugging_face.Checkpoint(architecture, dict(fields), seed=6), directory)
    tokenizer().save_pretrained(directory)
    return hugging_face.load(directory, architecture)


def logits(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """The logits of the tokens of one row, `[tokens, labels]`; for answers of both ends."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        outputs = model(torch.tensor([ids]))
    parts = (
        [outputs.start_logits, outputs.end_logits] if hasattr(outputs, "start_logits") else [*outputs.logits.unbind(-1)]
    )
    return np.array(torch.stack(parts, -1)[0].numpy())


def pipeline(task: str, model: Any, **options: Any) -> Any:
    return importlib.import_module("transformers").pipeline(task, model, tokenizer=tokenizer(), **options)


def tags(model: Any, aggregation: str, stride: int | None = None) -> list[list[tuple[str, float, int, int]]]:
    """The (label, score, start, end) that the pipeline finds in each of `TEXTS`."""
    run = pipeline("token-classification", model, aggregation_strategy=aggregation, stride=stride)
    names = "entity" if aggregation == "none" else "entity_group", "score", "start", "end"
    return [[(r[names[0]], float(r["score"]), r["start"], r["end"]) for r in run(text)] for text in TEXTS]


def fillings(model: Any, **options: Any) -> list[list[list[tuple[int, str, str, float]]]]:
    """The (id, token, text, score) of the pipeline for each mask of each of `MASKS`."""
    run = pipeline("fill-mask", model)
    results = []
    for text in MASKS:
        masks = run(text, **options)
        masks = [masks] if isinstance(masks[0], dict) else masks
        results.append([[(r["token"], r["token_str"], r["sequence"], r["score"]) for r in rows] for rows in masks])
    return results


def answers(model: Any) -> list[list[list[tuple[str, float, int, int]]]]:
    """The (text, score, start, end) of the pipeline of version 4 for each of `SEARCHES` and each question."""
    run = pipeline("question-answering", model)
    results = []
    for _, options in SEARCHES:
        rows = [run(question=q, context=c, **options) for q, c in zip(QUESTIONS, CONTEXTS, strict=True)]
        rows = [[row] if isinstance(row, dict) else row for row in rows]
        results.append([[(r["answer"], r["score"], r["start"], r["end"]) for r in row] for row in rows])
    return results


def record(name: str, model: Any) -> dict[str, Any]:
    """What transformers computes with a model of `RECORDED`."""
    encode = tokenizer()
    rows = [encode(text, truncation=True)["input_ids"] for text in TEXTS[: 2 if name == "masks" else None]]
    found: dict[str, Any] = {"ids": rows, "logits": [logits(model, row).tolist() for row in rows]}
    if name == "tags":
        found |= {aggregation: tags(model, aggregation) for aggregation in AGGREGATIONS}
        found["overlap"] = tags(model, "simple", 4)
    if name == "masks":
        found |= {"fill": fillings(model), "targets": fillings(model, targets=["a", "k"], top_k=2)}
    return found


def main() -> None:
    """Write the archive; with version 4 of transformers, add the answers to it."""
    with tempfile.TemporaryDirectory() as root:
        transformers = importlib.import_module("transformers")
        if transformers.__version__ < "5":
            with zipfile.ZipFile(ARCHIVE) as archive:
                archive.extractall(root)
            model = getattr(transformers, RECORDED["answers"][0]).from_pretrained(Path(root, "answers")).eval()
            Path(root, "answers", "answers.json").write_text(json.dumps(answers(model)), "utf-8")
        else:
            for name, case in RECORDED.items():
                model = write(*case, Path(root, name))
                Path(root, name, "recorded.json").write_text(json.dumps(record(name, model)), "utf-8")
        checkpoints.write_archive(ARCHIVE, Path(root))


if __name__ == "__main__":
    main()
