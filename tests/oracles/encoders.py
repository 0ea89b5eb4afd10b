"""BERT, RoBERTa, MPNet and NomicBERT: tiny checkpoints, and what `transformers` computes from them."""

import importlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles import hugging_face
from tests.oracles.hugging_face import Checkpoint

SIZES = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}


def tiny(architecture: str, seed: int, config: dict[str, Any], **storage: Any) -> Checkpoint:
    """A checkpoint with SIZES but for what its config says."""
    return Checkpoint(architecture, SIZES | config, seed=seed, **storage)


def bert(architecture: str, seed: int, *sizes: Any, **storage: Any) -> Checkpoint:
    """A BERT: its words, sizes, heads, positions, types and epsilon."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
    )  # fmt: skip
    config = dict(zip(names, sizes, strict=True))
    config |= {"num_labels": storage.pop("labels")} if "labels" in storage else {}
    return Checkpoint(architecture, config, seed=seed, **storage)


CHECKPOINTS: dict[str, dict[str, Checkpoint]] = {
    "bert": {
        # the bare encoder, with its pooler
        "bare_v5": bert("BertModel", 11, 97, 40, 56, 2, 5, 40, 2, 1e-12),
        # keys under `bert.`, an MLM head beside them, three types, shards, transformers 4 spelling
        "masked_lm_v4": bert("BertForMaskedLM", 12, 89, 36, 50, 3, 3, 33, 3, 1e-5, spelling="v4", shard="50kB"),
        # a classifier with one token type, an eps that shows, and the position buffer of old files
        "classifier_v4": bert(
            "BertForSequenceClassification", 13, 71, 42, 45, 2, 7, 24, 1, 1e-2, labels=3, spelling="v4",
            buffers={"bert.embeddings.position_ids": list(range(24))},
        ),
        # stored in bfloat16, one head, two heads to leave aside
        "bf16_pretraining_v5": bert("BertForPreTraining", 14, 101, 30, 64, 2, 1, 30, 2, 1e-7, dtype="bfloat16"),
    },
    "roberta": {
        # the bare encoder, one token type, an eps that shows
        "bare_v5": tiny(
            "RobertaModel", 71,
            {"vocab_size": 89, "max_position_embeddings": 45, "type_vocab_size": 1, "layer_norm_eps": 1e-2},
        ),
        # the multilingual one in a task checkpoint, another padding, the position buffer of old files
        "xlm_v4": tiny(
            "XLMRobertaForMaskedLM", 72, {"vocab_size": 77, "max_position_embeddings": 47, "pad_token_id": 3},
            spelling="v4", buffers={"roberta.embeddings.position_ids": list(range(47))},
        ),
    },
    "mpnet": {
        "bare_v5": tiny("MPNetModel", 73, {"vocab_size": 83, "max_position_embeddings": 44}),
        # a table with rows that no bucket reads, in a task checkpoint, another activation
        "masked_lm_v4": tiny(
            "MPNetForMaskedLM", 74,
            {"vocab_size": 91, "max_position_embeddings": 48, "relative_attention_num_buckets": 34,
             "hidden_act": "relu"},
            spelling="v4",
        ),
    },
    "nomic_bert": {
        # heads of their own width, another base and activation
        "bare_v5": tiny(
            "NomicBertModel", 75,
            {"vocab_size": 79, "max_position_embeddings": 44, "head_dim": 6, "type_vocab_size": 3, "hidden_act": "gelu",
             "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        ),
        # the first spelling, whose vocabulary is rounded up to a multiple of 4
        "first_v1": tiny(
            "NomicBertForMaskedLM", 76, {"vocab_size": 88, "max_position_embeddings": 64}, spelling="v4"
        ),
    },
}  # fmt: skip
"""The recorded checkpoints by directory."""


def record(checkpoint: Checkpoint, directory: Path, file: Path) -> None:
    """Write the checkpoint; record last hidden states of three rows, one of which has padding among its tokens.

    `tokens` `[3, S]` with `lengths`, and `types` where there are any; `plain`: no optional input; `ragged`: a mask from
    the lengths; `given`: a mask with holes, `holes`, types, and `positions`.
    """
    model = written(checkpoint, directory)
    inputs = drawn_inputs(model.config, np.random.default_rng(checkpoint.seed + 100), 40)
    tokens, lengths = inputs.pop("tokens"), inputs.pop("lengths")
    mask = (np.arange(tokens.shape[1])[None] < lengths[:, None]).astype(np.int32)
    found: dict[str, Any] = {"tokens": tokens, "lengths": lengths} | inputs
    found["plain"] = hugging_face.bert_hidden(model, tokens)
    found["ragged"] = hugging_face.bert_hidden(model, tokens, attention_mask=mask)
    found["given"] = hugging_face.bert_hidden(model, tokens, **inputs)
    np.savez_compressed(file, **found)


def written(checkpoint: Checkpoint, directory: Path) -> Any:
    """Write the checkpoint; the model of `transformers`, which does not know the first spelling of NomicBERT."""
    hugging_face.write(replace(checkpoint, spelling="v5"), directory)
    model = hugging_face.load(directory, "AutoModel")
    if checkpoint.spelling != "v5":
        hugging_face.respell(checkpoint, directory)
    return model


def drawn_inputs(config: Any, rng: np.random.Generator, size: int) -> dict[str, npt.NDArray[np.int32]]:
    """Three rows of `size` tokens, or of as many as there are positions, with padding among them, their `lengths`, and
    every optional input."""
    size = min(size, config.max_position_embeddings)
    tokens = rng.integers(0, config.vocab_size, (3, size)).astype(np.int32)
    tokens[1, [2, size // 2]] = config.pad_token_id
    found = {"tokens": tokens, "lengths": np.array([size, 1, size - 7], np.int32)}
    holes = (rng.random((3, size)) < 0.6).astype(np.int32)
    holes[:, 5] = 1
    found |= {"attention_mask": holes}
    if hasattr(config, "type_vocab_size"):
        found["token_type_ids"] = rng.integers(0, config.type_vocab_size, (3, size)).astype(np.int32)
    found["position_ids"] = rng.integers(0, config.max_position_embeddings, (3, size)).astype(np.int32)
    return found


TASKS = ("Model", "Model", "ForMaskedLM", "ForTokenClassification")
CLASSES = {"roberta": ("Roberta", "XLMRoberta", "Camembert"), "mpnet": ("MPNet",), "nomic_bert": ("NomicBert",)}


def random_encoder(family: str, seed: int) -> Checkpoint:
    """A configuration of a family drawn from `seed`."""
    if family == "bert":
        return hugging_face.random_bert(seed)
    draw = random.Random(seed)
    heads = draw.choice([1, 3, 4])
    config: dict[str, Any] = {
        "vocab_size": 4 * draw.randint(13, 50), "hidden_size": heads * 2 * draw.randint(2, 6),
        "intermediate_size": draw.randint(20, 90), "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads, "max_position_embeddings": draw.choice([160, 200]),
        "layer_norm_eps": draw.choice([1e-12, 1e-7, 1e-3]),
    }  # fmt: skip
    spelling = draw.choice(["v4", "v5"])
    if family != "mpnet":
        config["type_vocab_size"] = draw.choice([1, 2, 4])
    if family == "roberta":
        config |= {"pad_token_id": draw.choice([0, 1, 5]), "hidden_act": draw.choice(["gelu", "gelu_new", "relu"])}
    elif family == "mpnet":
        config |= {"relative_attention_num_buckets": draw.choice([32, 32, 40])}
    else:
        theta = draw.choice([1000.0, 10000.0, 50.0])
        config |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        config |= {} if spelling == "v4" else {"head_dim": 2 * draw.randint(2, 7)}
    dtype, shard = draw.choice(["float32", "float32", "bfloat16"]), draw.choice([None, "60kB"])
    name = draw.choice(CLASSES[family]) + draw.choice(TASKS)
    return Checkpoint(name, config, seed=seed, spelling=spelling, dtype=dtype, shard=shard)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of whole words with the special tokens of RoBERTa and MPNet, and their ids."""
    tk = importlib.import_module("tokenizers")
    words = "<s> <pad> </s> <unk> a river of stone the lantern and window garden one two three".split()
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = tk.Tokenizer(tk.models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = tk.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tk.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 40, "pad_token": "<pad>"}
    about |= {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
