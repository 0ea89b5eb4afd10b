"""Write a loaded tokenizer as the files that `load_tokenizer` reads."""

from __future__ import annotations

import json
from typing import Any

from rlx_jax.text.chat_template import DEFAULT
from rlx_jax.text.tokenizer import TOKENIZER, Tokenizer


def tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, as it is in use: with the normalizer and ids that other files of its
    checkpoint gave it. None has no files."""
    if tokenizer is None:
        return {}
    native = tokenizer._native
    config: dict[str, Any] = {
        **tokenizer.special_tokens,
        "truncation_side": tokenizer.truncation_side,
        "split_special_tokens": bool(native.encode_special_tokens),
        "model_input_names": ["input_ids", *(["token_type_ids"] if tokenizer.gives_types else []), "attention_mask"],
    }
    if tokenizer.model_max_length is not None:
        config["model_max_length"] = tokenizer.model_max_length
    if tokenizer.chat_templates:
        config["chat_template"] = [{"name": name, "template": t} for name, t in tokenizer.chat_templates.items()]
        if set(tokenizer.chat_templates) == {DEFAULT}:
            config["chat_template"] = tokenizer.chat_templates[DEFAULT]
    ids = {"eos": [*tokenizer.eos_ids], "bos": tokenizer.bos_id, "pad": tokenizer.pad_id}
    generation = {f"{role}_token_id": value for role, value in ids.items() if value not in (None, [])}
    documents = {"tokenizer_config.json": config, "generation_config.json": generation}
    return {TOKENIZER: native.to_str().encode()} | {
        name: json.dumps(document, ensure_ascii=False).encode() for name, document in documents.items()
    }
