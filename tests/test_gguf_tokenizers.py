"""Tokenizers in the metadata of GGUF files, against the `tokenizer.json` of the same vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx_jax.errors import TokenizerError, UnsupportedError
from rlx_jax.text.gguf_tokenizer import tokenizer_files
from rlx_jax.text.tokenizer import load_tokenizer
from tests.oracles.checkpoints import FIXTURES

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["", " ", "Hello, world's 12345 end.\n\n  x", "it's ein Test: é \U0001f600 \u0301", "a<|user|>b", "ab  ab\tab"]


def vocabulary(document: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens in the order of their ids, and their kinds: 3 special ones, 6 bytes."""
    added = {entry["content"]: entry["id"] for entry in document["added_tokens"]}
    ids = document["model"]["vocab"] | added
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    kinds = [2 if t == "<unk>" else 3 if t in added else 6 if t.startswith("<0x") else 1 for t in tokens]
    return tokens, kinds


def both(tmp_path: Path, document: dict[str, Any], metadata: dict[str, Any]) -> tuple[Any, Any]:
    """The tokenizer of a document, and the one of metadata."""
    files = tokenizer_files(metadata, "m.gguf").documents
    for name, contents in (("theirs", {"tokenizer.json": document}), ("ours", files)):
        (tmp_path / name).mkdir()
        for file, content in contents.items():
            (tmp_path / name / file).write_text(json.dumps(content))
    return load_tokenizer(tmp_path / "theirs"), load_tokenizer(tmp_path / "ours")


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    document = json.loads((FIXTURES / "tokenizers/byte_level.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA3
    tokens, kinds = vocabulary(document)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.merges": tuple(merges),
        "tokenizer.ggml.bos_token_id": 264, "tokenizer.ggml.eos_token_id": 265, "tokenizer.chat_template": "{{ x }}",
    }  # fmt: skip
    theirs, ours = both(tmp_path, document, metadata)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert ours.encode_plain(text) == theirs.encode_plain(text)
    assert ours.chat_templates == {"default": "{{ x }}"} and ours.bos_id == 264 and ours.eos_ids == (265,)
    ends = tokenizer_files(metadata | {"tokenizer.ggml.tokens": (*tokens[:-1], "<end_of_turn>")}, "m.gguf").ids
    assert ends["eos_token_id"] == [265, 266]  # the control token of that text ends a turn
    silent = tokenizer_files(metadata | {"tokenizer.ggml.add_bos_token": False}, "m.gguf").documents
    assert silent["tokenizer.json"]["post_processor"] is None
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre is 'llama-bp'; did you mean 'llama-bpe'"):
        tokenizer_files(metadata | {"tokenizer.ggml.pre": "llama-bp"}, "m.gguf")
    with pytest.raises(TokenizerError, match="expected a token id below"):
        tokenizer_files(metadata | {"tokenizer.ggml.eos_token_id": 10**6}, "m.gguf")
    with pytest.raises(TokenizerError, match="token_type"):
        tokenizer_files(metadata | {"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "m.gguf")


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """The scores define the merges, which a file does not have."""
    document = json.loads((FIXTURES / "tokenizers/sentencepiece_bpe.json").read_text())
    tokens, kinds = vocabulary(document)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in document["model"]["merges"]]
    scores = np.full(len(tokens), -1000.0, np.float32)
    for rank, (left, right) in enumerate(merges):
        scores[tokens.index(left + right)] = -rank
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tuple(tokens), "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    theirs, ours = both(tmp_path, document, metadata)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
