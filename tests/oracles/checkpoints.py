"""Checkpoint directories for tests: copies with something changed."""

import enum
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which the safetensors reader needs)
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


class Removed(enum.Enum):
    """One value, which prints alike in every process: test names hold it."""

    KEY = "removed"


REMOVED = Removed.KEY
"""As a value in `edit_json`: the key is taken out."""


def copy(source: Path, target: Path) -> Path:
    """A writable copy of the checkpoint directory `source` at `target`."""
    shutil.copytree(source, target)
    return target


def write_archive(archive: Path, root: Path) -> None:
    """Write all files below `root` but README.md to an archive, which is the same for the same files."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file in sorted(p for p in root.rglob("*") if p.is_file() and p.name != "README.md"):
            target.writestr(zipfile.ZipInfo(str(file.relative_to(root))), file.read_bytes(), zipfile.ZIP_DEFLATED)


def edit_json(file: Path, changes: Mapping[str, Any]) -> None:
    """Set (or, with `REMOVED`, take out) keys of a JSON object; the file is made if it is not there."""
    data: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for key, value in changes.items():
        if value is REMOVED:
            data.pop(key, None)
        else:
            data[key] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


def edited(source: Path, target: Path, changes: Mapping[str, Any]) -> Path:
    """A copy of `source` whose `config.json` is changed."""
    copy(source, target)
    edit_json(target / "config.json", changes)
    return target


def edit_tensors(
    directory: Path, edit: Callable[[dict[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]] | None]
) -> None:
    """Rewrite the single `model.safetensors` of `directory` through `edit` (in place, or a new mapping)."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    new = edit(tensors) or tensors
    save_file({key: np.ascontiguousarray(value) for key, value in new.items()}, file, {"format": "pt"})


OLD_MODULES = {name: f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")}
NEW_MODULES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
_OLD_FLAGS = {
    "cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens", "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}  # fmt: skip
_NEW_TRANSFORMER = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


def sentence_directory(
    source: Path, target: Path, *, modes: list[str], normalise: bool, spelling: str = "old",
    transformer: Mapping[str, Any] | None = None, tokenizer: Mapping[str, Any] | None = None,
    sentence: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A copy of the encoder `source` with the files that sentence-transformers adds, as version 2 or 6 writes them.

    `transformer`, `tokenizer` and `sentence` are changes to `sentence_bert_config.json`, `tokenizer_config.json` and
    `config_sentence_transformers.json`.
    """
    copy(source, target)
    config = json.loads((source / "config.json").read_text("utf-8"))
    hidden = config["n_embd" if config["model_type"] == "gpt2" else "hidden_size"]
    types = OLD_MODULES if spelling == "old" else NEW_MODULES
    names = [("Transformer", ""), ("Pooling", "1_Pooling")] + ([("Normalize", "2_Normalize")] if normalise else [])
    modules = [{"idx": i, "name": str(i), "path": p, "type": types[n]} for i, (n, p) in enumerate(names)]
    (target / "modules.json").write_text(json.dumps(modules, indent=2), "utf-8")
    if spelling == "old":
        pooling: dict[str, Any] = {"word_embedding_dimension": hidden}
        pooling |= {flag: mode in modes for mode, flag in _OLD_FLAGS.items()}
        edit_json(target / "sentence_bert_config.json", {"do_lower_case": False} | dict(transformer or {}))
        versions = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}
        about: dict[str, Any] = {"__version__": versions}
    else:
        pooling = {"embedding_dimension": hidden, "pooling_mode": modes[0] if len(modes) == 1 else modes}
        pooling["include_prompt"] = True
        edit_json(target / "sentence_bert_config.json", _NEW_TRANSFORMER | dict(transformer or {}))
        if normalise:
            keys = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
            edit_json(target / "2_Normalize" / "config.json", keys)
        versions = {"sentence_transformers": "6.2.0", "transformers": "5.23.0", "pytorch": "2.13.0"}
        about = {"__version__": versions, "model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
        about |= {"default_prompt_name": None, "prompts": {"query": "", "document": ""}}
    edit_json(target / "1_Pooling" / "config.json", pooling)
    edit_json(target / "config_sentence_transformers.json", about | dict(sentence or {}))
    if tokenizer:
        edit_json(target / "tokenizer_config.json", tokenizer)
    return target


SIXTEEN: dict[str, Any] = {"transformer": {"max_seq_length": 16}}
SENTENCE_VARIANTS: dict[str, dict[str, Any]] = {
    "mean": SIXTEEN | {"modes": ["mean"], "normalise": True},
    "mean_plain": SIXTEEN | {"modes": ["mean"], "normalise": False},
    "cls": {"modes": ["cls"], "normalise": False, "transformer": {"max_seq_length": 9}},
    "max": SIXTEEN | {"modes": ["max"], "normalise": True},
    "sqrt": SIXTEEN | {"modes": ["mean_sqrt_len_tokens"], "normalise": False},
    "cls_mean": SIXTEEN | {"modes": ["cls", "mean"], "normalise": True},
    "uncapped": {"modes": ["mean"], "normalise": True},
    "new_mean": {"modes": ["mean"], "normalise": True, "spelling": "new", "tokenizer": {"model_max_length": 12}},
    "new_max_mean": {"modes": ["max", "mean"], "normalise": False, "spelling": "new"}
    | {"tokenizer": {"model_max_length": 16}},
}

"""What every encoder must honour: pooling modes, normalisation and truncation, as old and new versions write them."""
SENTENCE_EXTRAS: dict[str, dict[str, Any]] = {
    "weighted": SIXTEEN | {"modes": ["weightedmean"], "normalise": True},
    "last": SIXTEEN | {"modes": ["lasttoken"], "normalise": False},
    "lower": {"modes": ["mean"], "normalise": True, "transformer": {"max_seq_length": 16, "do_lower_case": True}},
    "prompt": SIXTEEN
    | {"modes": ["mean"], "normalise": True}
    | {"sentence": {"prompts": {"query": "query: "}, "default_prompt_name": "query"}},
}
"""What may be refused, but not ignored."""


def inside(source: Path, target: Path, architecture: str, prefix: str) -> Path:
    """A copy of a text model inside a checkpoint that reads images: its config is nested, its keys begin with
    `prefix`."""
    text = json.loads((copy(source, target) / "config.json").read_text("utf-8"))
    del text["architectures"]
    kind = {"Gemma3ForConditionalGeneration": "gemma3", "Qwen3_5ForConditionalGeneration": "qwen3_5"}[architecture]
    outer = {"architectures": [architecture], "model_type": kind, "text_config": text}
    outer |= {"tie_word_embeddings": text.get("tie_word_embeddings", True)}
    (target / "config.json").write_text(json.dumps(outer), "utf-8")
    edit_tensors(target, lambda t: {k if k.startswith(("mtp.", "lm_head.")) else prefix + k.removeprefix("model."): v
                                    for k, v in t.items()})  # fmt: skip
    return target
