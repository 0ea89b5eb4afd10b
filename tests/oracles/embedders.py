"""Tiny embedders and rerankers as sentence-transformers writes them, and what it computes from them.

`python -m tests.oracles.embedders` writes tests/fixtures/embedders.zip: for each of `RECORDED` the directory that the
library saved, and `recorded.json` with its numbers for `TEXTS`. torch and sentence-transformers are imported when
needed.
"""

import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, classifiers, hugging_face
from tests.oracles.classifiers import DECODER, ENCODER, SECOND, TEXTS

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "embedders.zip"
PROMPTS = {"query": "w1 w2 ", "document": ""}
# A layer after pooling: a class and its arguments, where an activation is the name of a class of torch.nn.
Layer = tuple[str, dict[str, Any]]
PROJECTION: list[Layer] = [
    ("Dense", {"in_features": 20, "out_features": 33, "bias": False, "activation_function": "Identity"}),
    ("Dense", {"in_features": 33, "out_features": 24, "activation_function": "Tanh"}),
    ("Normalize", {}),
]  # fmt: skip
MIXED: list[Layer] = [
    ("Normalize", {}),
    ("Dense", {"in_features": 40, "out_features": 33, "activation_function": "GELU", "use_residual": True}),
    ("LayerNorm", {"dimension": 33}),
    ("Dropout", {"dropout": 0.5}),
    ("Dense", {"in_features": 33, "out_features": 33, "activation_function": "ReLU", "use_residual": True}),
]  # fmt: skip
GEMMA = DECODER | {"sliding_window": 6, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

Case = tuple[str, dict[str, Any], tuple[str, ...], list[Layer], bool]
CASES: dict[str, Case] = {
    **{mode: ("BertModel", ENCODER, (mode,), PROJECTION, mode != "cls")
       for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")},
    "mixed": ("BertModel", ENCODER, ("max", "mean"), MIXED, True),
    "embedding_gemma": ("Gemma3TextModel", GEMMA, ("mean",), PROJECTION, True),
    "llama_bidirectional": ("LlamaModel", DECODER | {"is_causal": False}, ("mean",), [("Normalize", {})], False),
    "qwen3_bidirectional": ("Qwen3Model", DECODER | WINDOWS | {"is_causal": False}, ("mean",), [], True),
    "mistral_bidirectional": ("MistralModel", DECODER | {"is_causal": False, "sliding_window": 4}, ("cls",), [], True),
    "e5_mistral": ("MistralModel", DECODER | {"sliding_window": 4}, ("lasttoken",), [("Normalize", {})], True),
    "qwen3_embedding": ("Qwen3Model", DECODER, ("lasttoken",), [("Normalize", {})], True),
}  # fmt: skip
"""A model, its fields, its pooling, the layers after it, and whether pooling reads prompts."""

RECORDED = ("mixed", "embedding_gemma")

TEMPLATE = (
    '{% for m in messages if m.role == "system" %}w1 w2 {{ m.content }} {% endfor %}[CLS] '
    '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }} [SEP] '
    '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }} w8 w9'
)
RERANKERS: dict[str, tuple[str, dict[str, Any], str | None, tuple[int, ...], str | None]] = {
    "plain": ("Qwen3ForCausalLM", DECODER, None, (7, 9), None),
    "template": ("Qwen3ForCausalLM", DECODER | {"tie_word_embeddings": True}, TEMPLATE, (7, 9), "web"),
    "one_token": ("LlamaForCausalLM", DECODER, TEMPLATE, (7,), None),
}
"""A causal model, its fields, the chat template, the token ids of the score, and the default prompt."""

COLBERTS: dict[str, tuple[dict[str, Any] | None, int | None, int | None, list[str] | None]] = {
    "colbert": ({"strategy": "fixed", "attend": False, "length": 16}, None, 20, None),
    "attended": ({"strategy": "min", "attend": True, "length": 7, "token": "w9"}, 12, None, ["query", "document"]),
    "short": (None, 9, None, None),
    "at_least": ({"strategy": "min", "attend": False, "length": 9}, None, None, None),
}
"""The expansion of queries, the lengths of queries and documents, and the tasks that leave out words."""


def write(name: str, directory: Path) -> Any:
    """Write a directory of `CASES` as sentence-transformers saves it; its model."""
    architecture, fields, modes, layers, include_prompt = CASES[name]
    torch, library = importlib.import_module("torch"), importlib.import_module("sentence_transformers")
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    with tempfile.TemporaryDirectory() as base:
        classifiers.write_base(architecture, fields, base)
        modules = [parts.Transformer(base, model_kwargs={"attn_implementation": "eager"})]
    modules.append(parts.Pooling(20, pooling_mode=modes, include_prompt=include_prompt))
    torch.manual_seed(7)
    for kind, arguments in layers:
        if "activation_function" in arguments:
            arguments = arguments | {"activation_function": getattr(torch.nn, arguments["activation_function"])()}
        modules.append(getattr(parts, kind)(**arguments))
    for weight in (weight for module in modules[2:] for weight in module.parameters()):
        torch.nn.init.normal_(weight, std=0.4)
    model = library.SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS)
    model.save_pretrained(str(directory), create_model_card=False)
    return model


def write_reranker(name: str, directory: Path) -> Any:
    """Write a directory of `RERANKERS` as sentence-transformers saves it; its model."""
    architecture, fields, template, token_ids, default = RERANKERS[name]
    library = importlib.import_module("sentence_transformers")
    parts = importlib.import_module("sentence_transformers.cross_encoder.modules")
    with tempfile.TemporaryDirectory() as base:
        hugging_face.write(hugging_face.Checkpoint(architecture, dict(fields), seed=5), Path(base))
        tokenizer = classifiers.tokenizer()
        tokenizer.padding_side, tokenizer.chat_template = "left", template
        tokenizer.save_pretrained(base)
        eager = {"attn_implementation": "eager"}
        modules = [parts.Transformer(base, transformer_task="text-generation", model_kwargs=eager)]
    modules.append(parts.LogitScore(*token_ids))
    prompts = {"web": "w5 w6", "none": ""}
    model = library.CrossEncoder(modules=modules, device="cpu", prompts=prompts, default_prompt_name=default)
    model.save_pretrained(str(directory))
    return model


def scores(model: Any, **arguments: Any) -> list[float]:
    """Its scores of the pairs of `TEXTS` and `SECOND`, each alone."""
    return [float(model.predict([pair], **arguments)[0]) for pair in zip(TEXTS, SECOND, strict=True)]


def write_colbert(name: str, directory: Path) -> Any:
    """Write a directory of `COLBERTS` as sentence-transformers saves it; its model."""
    expansion, query_length, document_length, tasks = COLBERTS[name]
    torch, library = importlib.import_module("torch"), importlib.import_module("sentence_transformers")
    parts = importlib.import_module("sentence_transformers.base.modules")
    mask = importlib.import_module("sentence_transformers.multi_vector_encoder.modules").MultiVectorMask
    lengths = {"query_length": query_length, "document_length": document_length, "query_expansion": expansion}
    with tempfile.TemporaryDirectory() as base:
        classifiers.write_base("BertModel", ENCODER, base)
        transformer = parts.Transformer(base, model_kwargs={"attn_implementation": "eager"}, **lengths)
    torch.manual_seed(7)
    dense = parts.Dense(20, 12, bias=False, activation_function=None, module_input_name="token_embeddings")
    modules = [transformer, dense, mask(["w3", "zz"], skiplist_tasks=tasks), parts.Normalize("token_embeddings")]
    prompts = {"query": "w1 ", "document": "w2 "}
    model = library.MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts)
    model.save_pretrained(str(directory))
    return model


def token_vectors(model: Any) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Its vectors of the tokens of `TEXTS` by kind of text, each text alone."""
    kinds = {"query": model.encode_query, "document": model.encode_document}
    return {kind: [encode([text])[0].numpy() for text in TEXTS] for kind, encode in kinds.items()}


def alone(model: Any, texts: Sequence[str] = TEXTS, **arguments: Any) -> np.ndarray[Any, Any]:
    """Its vectors of texts, each alone."""
    return np.concatenate([model.encode([text], show_progress_bar=False, **arguments) for text in texts])


def main() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as root:
        for name in RECORDED:
            model = write(name, Path(root, name))
            record = {"plain": alone(model).tolist(), "query": alone(model, prompt_name="query").tolist()}
            Path(root, name, "recorded.json").write_text(json.dumps(record), "utf-8")
        model = write_reranker("template", Path(root, "reranker"))
        record = {"plain": scores(model, prompt=""), "web": scores(model)}
        Path(root, "reranker", "recorded.json").write_text(json.dumps(record), "utf-8")
        vectors = token_vectors(write_colbert("colbert", Path(root, "colbert")))
        record = {kind: [rows.tolist() for rows in found] for kind, found in vectors.items()}
        Path(root, "colbert", "recorded.json").write_text(json.dumps(record), "utf-8")
        checkpoints.write_archive(ARCHIVE, Path(root))


if __name__ == "__main__":
    main()
