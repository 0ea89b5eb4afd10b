"""Tiny SPLADE models, bge-m3, and ColBERT models of older libraries, and what is computed from them.

`python -m tests.oracles.sparse_embedders` writes tests/fixtures/sparse.zip: a SPLADE model and one like bge-m3, each
with `recorded.json`, its numbers for `TEXTS`. torch and sentence-transformers are imported when needed.
"""

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, classifiers, embedders
from tests.oracles.classifiers import ENCODER, TEXTS

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "sparse.zip"
LIBRARY = "sentence_transformers"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int | None]] = {
    "splade": ("BertForMaskedLM", ENCODER, {}, None),
    "summed": ("DistilBertForMaskedLM", classifiers.DISTILBERT, {"pooling_strategy": "sum"}, 7),
    "opensearch": ("BertForMaskedLM", ENCODER, {"activation_function": "log1p_relu"}, None),
}
"""A model, its fields, arguments of `SpladePooling`, and the number of weights to keep."""
OLD_COLBERTS = ("stanford", "pylate", "attending", "not_expanding")
Rows = list[np.ndarray[Any, Any]]


def write(name: str, directory: Path) -> Any:
    """Write a directory of `CASES` as sentence-transformers saves it; its model."""
    architecture, fields, arguments, active = CASES[name]
    torch, library = importlib.import_module("torch"), importlib.import_module(LIBRARY)
    parts = importlib.import_module(f"{LIBRARY}.sparse_encoder.modules")
    with tempfile.TemporaryDirectory() as base:
        classifiers.write_base(architecture, fields, base)
        options = {"attn_implementation": "eager"}
        modules = [parts.Transformer(base, transformer_task="fill-mask", model_kwargs=options)]
    modules.append(parts.SpladePooling(**arguments))
    torch.manual_seed(7)
    for weight in modules[-1].parameters():
        torch.nn.init.normal_(weight, std=0.4)
    model = library.SparseEncoder(modules=modules, device="cpu", prompts=embedders.PROMPTS, max_active_dims=active)
    model.save_pretrained(str(directory), create_model_card=False)
    return model


def dense_rows(model: Any, **arguments: Any) -> np.ndarray[Any, Any]:
    """Its sparse vectors of `TEXTS` as dense rows, each text alone."""
    return np.stack([model.encode([text], **arguments).to_dense()[0].numpy() for text in TEXTS])


def write_m3(directory: Path) -> tuple[np.ndarray[Any, Any], Rows]:
    """Write a directory like bge-m3's; the weights of token ids and the vectors of tokens of `TEXTS`, as in
    FlagEmbedding."""
    torch, library = importlib.import_module("torch"), importlib.import_module(LIBRARY)
    parts = importlib.import_module(f"{LIBRARY}.sentence_transformer.modules")
    with tempfile.TemporaryDirectory() as base:
        classifiers.write_base("XLMRobertaModel", classifiers.SHIFTED, base)
        modules = [parts.Transformer(base), parts.Pooling(20, pooling_mode="cls"), parts.Normalize()]
    model = library.SentenceTransformer(modules=modules, device="cpu")
    model.save_pretrained(str(directory), create_model_card=False)
    torch.manual_seed(7)
    sparse, colbert = torch.nn.Linear(20, 1), torch.nn.Linear(20, 12)
    torch.save(sparse.half().state_dict(), directory / "sparse_linear.pt")
    torch.save(colbert.half().state_dict(), directory / "colbert_linear.pt")
    weights, vectors = np.zeros((len(TEXTS), 45)), Rows()
    with torch.no_grad():
        for text, row in zip(TEXTS, weights, strict=True):
            hidden = model.encode([text], output_value="token_embeddings", convert_to_numpy=False)[0]
            ids = model.preprocess([text])["input_ids"][0].tolist()
            for i, weight in zip(ids, torch.relu(sparse.float()(hidden))[:, 0].tolist(), strict=True):
                row[i] = max(weight, row[i]) if i > 2 else 0  # not of padding, unknown and first token
            vectors.append(torch.nn.functional.normalize(colbert.float()(hidden[1:]), dim=-1).numpy())
    return weights, vectors


def write_old_colbert(name: str, directory: Path) -> Any:
    """Write a ColBERT directory as PyLate or the original code saves it; what sentence-transformers makes of it."""
    torch, library = importlib.import_module("torch"), importlib.import_module(LIBRARY)
    tensors = importlib.import_module("safetensors.torch")
    classifiers.write_base("BertModel", ENCODER, directory)
    projection = {"linear.weight": torch.randn(12, 20, generator=torch.Generator().manual_seed(7))}
    files: dict[str, Any]
    if name == "stanford":
        weights = tensors.load_file(directory / "model.safetensors")
        weights = {f"bert.{key}": value for key, value in weights.items()}
        tensors.save_file(weights | projection, directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
        metadata = {"query_token_id": "w1", "doc_token_id": "w2", "query_maxlen": 16, "doc_maxlen": 20, "dim": 12}
        files = {"config.json": config, "artifact.metadata": metadata}
    else:
        (directory / "1_Dense").mkdir()
        tensors.save_file(projection, directory / "1_Dense" / "model.safetensors")
        identity = "torch.nn.modules.linear.Identity"
        dense = {"in_features": 20, "out_features": 12, "bias": False, "activation_function": identity}
        files = pylate_files(name) | {"1_Dense/config.json": dense}
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    return library.MultiVectorEncoder(str(directory), device="cpu")


def pylate_files(name: str) -> dict[str, Any]:
    """The files of PyLate with its settings and modules."""
    types = {"": f"{LIBRARY}.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": types[path]} for i, path in enumerate(types)]
    settings: dict[str, Any] = {"model_type": "ColBERT", "similarity_fn_name": "MaxSim", "skiplist_words": ["w3"]}
    settings |= {"query_prefix": "w1 ", "document_prefix": "w2 ", "query_length": 16, "document_length": 20}
    settings |= {"attend_to_expansion_tokens": name == "attending", "do_query_expansion": name != "not_expanding"}
    return {"modules.json": modules, "config_sentence_transformers.json": settings}


def main() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as root:
        rows = dense_rows(write("splade", Path(root, "splade"))).tolist()
        Path(root, "splade", "recorded.json").write_text(json.dumps(rows), "utf-8")
        weights, vectors = write_m3(Path(root, "m3"))
        record = {"weights": weights.tolist(), "vectors": [v.tolist() for v in vectors]}
        Path(root, "m3", "recorded.json").write_text(json.dumps(record), "utf-8")
        checkpoints.write_archive(ARCHIVE, Path(root))


if __name__ == "__main__":
    main()
