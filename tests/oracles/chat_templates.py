"""Checkpoints that chat, in the public formats of Llama 3, ChatML (Qwen), Gemma and Mistral: `tests/fixtures/chat`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.oracles.checkpoints import FIXTURES, copy, edit_json

TEMPLATES = {
    name: (FIXTURES / "chat" / f"{name}.jinja").read_text("utf-8") for name in ("llama3", "qwen", "gemma", "mistral")
}
CONTROL = {
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "mistral": ["[INST]", "[/INST]"],
}
"""Special tokens of each format beside the begin and the end of a text."""
NOT_SPECIAL = {"qwen": ["<think>", "</think>"]}
BASE = FIXTURES / "llama" / "gqa_tied_llama3_v5"  # its embedding has more rows than its tokenizer has tokens


def checkpoint(
    target: Path, special: Sequence[str], not_special: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Path:
    """A tiny Llama with a byte-level tokenizer, a few control tokens, and `settings` in its tokenizer_config.json."""
    copy(BASE, target)
    file = target / "tokenizer.json"
    document = json.loads(file.read_text("utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [(t, True) for t in special] + [(t, False) for t in not_special]
    for i, (content, is_special) in enumerate(tokens, start=len(document["model"]["vocab"])):
        document["added_tokens"].append({"id": i, "content": content, **flags, "special": is_special})
    file.write_text(json.dumps(document), "utf-8")
    edit_json(target / "tokenizer_config.json", settings or {})
    return target


def format_checkpoint(target: Path, name: str) -> Path:
    """A checkpoint that chats in one of the formats."""
    return checkpoint(target, CONTROL[name], NOT_SPECIAL.get(name, ()), {"chat_template": TEMPLATES[name]})
