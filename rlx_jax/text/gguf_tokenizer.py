"""`tokenizer_files`: the tokenizer in the metadata of a GGUF file, as the files of a Hugging Face directory.

Four kinds are supported: `gpt2`, byte-level BPE with a list of merges and the name of a pre-tokenizer; `llama`,
SentencePiece BPE, in which the scores of the pieces define the merges; `t5`, a Unigram model; and `bert`, WordPiece.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import RlxWarning, TokenizerError, UnsupportedError, listing, shown
from rlx_jax.text.gguf_pretokenizers import DEFAULT, PRE_TOKENIZERS
from rlx_jax.text.gguf_vocabulary import (
    BYTE,
    CONTROL,
    MODELS,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Metadata,
    Vocabulary,
    read_numbers,
    read_texts,
    without_spaces,
)
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.weights.gguf_header import is_equal

_TEMPLATE = "tokenizer.chat_template"
# Roles of token ids: metadata key → name in tokenizer_config.json.
_ROLES = {
    "bos_token_id": "bos_token", "eos_token_id": "eos_token", "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token", "seperator_token_id": "sep_token", "cls_token_id": "cls_token",
    "mask_token_id": "mask_token",
}  # fmt: skip
# Ids that may be out of range: some files have such ids, and texts do not depend on them.
_OPTIONAL = ("padding_token_id", "seperator_token_id", "cls_token_id", "mask_token_id")
# More ids that end a generated row: the end of a turn or of a message.
_ENDS = ("eot_token_id", "eom_token_id")
# Control tokens of these texts end a row too, as in llama.cpp: converters do not write the id of every one.
_END_TEXTS = frozenset(
    """
    <|eot_id|> <|eom_id|> <|im_end|> <end_of_turn> <|end|> <|return|> <|call|> <|endoftext|> <|end_of_text|> <EOT>
    """.split()
)
# In the messages of gpt-oss, which have the first two, the third ends a message and not the row.
_RETURN, _CALL, _MESSAGE_END = "<|return|>", "<|call|>", "<|end|>"


@dataclass(frozen=True)
class _Kind:
    """What llama.cpp assumes of a kind of tokenizer where the file does not say it.

    Attributes:
        adds: the tokens around a text: `bos_token_id` before it, others after it.
        ids: special ids.
    """

    adds: tuple[str, ...] = ()
    ids: Mapping[str, int] = field(default_factory=dict)


_BERT_IDS = {
    "bos_token_id": 101, "unknown_token_id": 100, "seperator_token_id": 102, "padding_token_id": 0,
    "mask_token_id": 103,
}  # fmt: skip
_KINDS = {
    "gpt2": _Kind(),
    "llama": _Kind(("bos_token_id",), {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}),
    "t5": _Kind(("eos_token_id",), {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0}),
    "bert": _Kind(("bos_token_id", "seperator_token_id"), _BERT_IDS),
}


def tokenizer_files(metadata: Metadata, where: str) -> dict[str, dict[str, Any]]:
    """Return the tokenizer of a GGUF file as JSON files by name; nothing if the file has none.

    `config.json` has the ids of the special tokens alone.

    Raises:
        TokenizerError: the metadata are malformed or contradict each other.
        UnsupportedError: another kind of tokenizer or pre-tokenizer.
    """
    kind, pre = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}pre", "default")
    if not isinstance(kind, str | None) or not isinstance(pre, str):
        raise TokenizerError(f"{where}: {PREFIX}model and {PREFIX}pre: expected texts, got {shown(kind)}, {shown(pre)}")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in _KINDS:
        raise UnsupportedError(f"{where}: {PREFIX}model is {shown(kind)}; supported are {', '.join(_KINDS)}")
    tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(read_texts(metadata, "tokens", where)))
    kinds = np.full(len(tokens), NORMAL)
    if f"{PREFIX}token_type" in metadata:
        kinds = read_numbers(metadata, "token_type", len(tokens), where)
    if kinds.dtype.kind not in "iu":
        raise TokenizerError(f"{where}: {PREFIX}token_type: expected whole numbers, got {kinds.dtype}")
    roles = _special_ids(metadata, kind, len(tokens), where)
    if kind == "bert":
        tokens = without_spaces(tokens, kinds)
    model = MODELS[kind](Vocabulary(metadata, tokens, kinds, roles, where))
    special = set(roles.values())
    added = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": int(kinds[i]) in (CONTROL, UNKNOWN) or i in special,
        }
        for i in range(len(tokens)) if int(kinds[i]) in (CONTROL, UNKNOWN, USER_DEFINED) or i in special
    ]  # fmt: skip
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **model,
        "post_processor": _template(metadata, tokens, roles, kind, where),
    }  # fmt: skip
    ids = {
        "eos_token_id": _end_ids(tokens, kinds, roles) or None, "bos_token_id": roles.get("bos_token_id"),
        "pad_token_id": roles.get("padding_token_id"),
    }  # fmt: skip
    settings: dict[str, Any] = {name: tokens[roles[key]] for key, name in _ROLES.items() if key in roles}
    if kind == "bert":
        # transformers builds this normalizer from the settings.
        normalizer = model["normalizer"]
        settings |= {"do_lower_case": normalizer["lowercase"], "strip_accents": normalizer["strip_accents"]}
    return {
        "config.json": {name: value for name, value in ids.items() if value is not None},
        "tokenizer.json": document,
        "tokenizer_config.json": {**settings, **_templates(metadata, where)},
    }


def _end_ids(tokens: Sequence[str], kinds: np.ndarray[Any, Any], roles: Mapping[str, int]) -> list[int]:
    """Return the ids that end a generated row."""
    by_text = {text: i for i, text in enumerate(tokens) if text in _END_TEXTS and int(kinds[i]) == CONTROL}
    ends = [roles[key] for key in ("eos_token_id", *_ENDS) if key in roles]
    if _RETURN in by_text and _CALL in by_text:
        end = by_text.pop(_MESSAGE_END, None)
        ends = [i for i in ends if i != end]
    return list(dict.fromkeys([*ends, *by_text.values()]))


def _special_ids(metadata: Metadata, kind: str, count: int, where: str) -> dict[str, int]:
    """Return the special ids by metadata key, with llama.cpp's where the file has none."""
    roles: dict[str, int] = {}
    for key in (key for key in (*_ROLES, *_ENDS) if PREFIX + key in metadata):
        value = metadata[PREFIX + key]
        if type(value) is int and 0 <= value < count:
            roles[key] = value
        elif type(value) is int and key in _OPTIONAL:
            text = f"{where}: {PREFIX}{key} is {value}, but there are {count} tokens; it is ignored, as llama.cpp does"
            warnings.warn(text, RlxWarning, stacklevel=2)
        else:
            raise TokenizerError(f"{where}: {PREFIX}{key}: expected a token id below {count}, got {shown(value)}")
    if kind == "bert":  # the same token under two names
        begin = roles.get("bos_token_id", roles.get("cls_token_id", _BERT_IDS["bos_token_id"]))
        roles |= {"bos_token_id": begin, "cls_token_id": begin} if begin < count else {}
    return {key: i for key, i in _KINDS[kind].ids.items() if i < count} | roles


# -- special tokens and templates --------------------------------------------------------------


def _template(
    metadata: Metadata, tokens: Sequence[str], roles: Mapping[str, int], kind: str, where: str
) -> dict[str, Any] | None:
    """Return the post-processor that adds special tokens around a text; None if it adds none.

    Raises:
        TokenizerError: one of them is missing.
    """
    defaults = _KINDS[kind].adds
    if kind == "gpt2" and PRE_TOKENIZERS[metadata.get(f"{PREFIX}pre", DEFAULT)].adds_bos:
        defaults = ("bos_token_id",)
    ends = list(defaults)
    if kind != "bert":  # BERT's tokens are always added
        settings = {"bos_token_id": "add_bos_token", "eos_token_id": "add_eos_token"}
        ends = [key for key, name in settings.items() if is_equal(metadata.get(PREFIX + name, key in defaults), True)]
    if missing := [key for key in ends if key not in roles]:
        raise TokenizerError(f"{where}: {PREFIX}{missing[0]} is missing, and texts are to have that token")
    if not ends:
        return None

    def pieces(name: str, type_id: int) -> list[dict[str, Any]]:
        """Return the template of a text."""
        around = [{"SpecialToken": {"id": tokens[roles[key]], "type_id": type_id}} for key in ends]
        num_before = int(ends[0] == "bos_token_id")
        # BERT has one begin token for two texts.
        first = [] if kind == "bert" and name == "B" else around[:num_before]
        return [*first, {"Sequence": {"id": name, "type_id": type_id}}, *around[num_before:]]

    special = {
        tokens[roles[key]]: {"id": tokens[roles[key]], "ids": [roles[key]], "tokens": [tokens[roles[key]]]}
        for key in ends
    }
    return {
        "type": "TemplateProcessing", "single": pieces("A", 0),
        "pair": [*pieces("A", 0), *pieces("B", int(kind == "bert"))], "special_tokens": special,
    }  # fmt: skip


def _templates(metadata: Metadata, where: str) -> dict[str, Any]:
    """Return the chat templates of a file as the field of `tokenizer_config.json`, or nothing."""
    named = {
        key.removeprefix(f"{_TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{_TEMPLATE}.")
    }
    if _TEMPLATE in metadata:
        named["default"] = metadata[_TEMPLATE]
    if wrong := [name for name, text in named.items() if not isinstance(text, str)]:
        raise TokenizerError(f"{where}: {_TEMPLATE}: expected a text, not so in {listing(wrong)}")
    templates = [{"name": name, "template": text} for name, text in named.items()]
    return {"chat_template": templates} if templates else {}


# -- writing -----------------------------------------------------------------------------------


def tokenizer_metadata(document: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yield metadata for a tokenizer, one for each way to split a text that files can name.

    At most one of them encodes texts as the tokenizer does; the caller compares.

    Args:
        document: the content of `tokenizer.json`.
        tokenizer: the tokenizer that it defines.
        vocab_size: rows of the model's embedding; ids without a token get one that no text has.

    Raises:
        UnsupportedError: the tokenizer is no BPE, or ids are over `vocab_size`.
    """
    model, added = document["model"], document.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise UnsupportedError(f"save: a tokenizer of type {shown(model.get('type'))} is not written as GGUF; BPE is")
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    if max(ids.values()) >= vocab_size:
        raise UnsupportedError(f"save: the tokenizer has the id {max(ids.values())}, the model {vocab_size} rows")
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab_size)], np.full(vocab_size, UNUSED, np.int32)
    for token, i in ids.items():
        tokens[i], kinds[i] = token, NORMAL
        if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[i] = BYTE
    for token in added:
        kinds[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    fields = {"tokens": tuple(tokens), "token_type": kinds, **_special_fields(tokenizer, ids)}
    merges = [tuple(text.split(" ") if isinstance(text, str) else text) for text in model.get("merges", ())]
    if model.get("byte_fallback"):
        kinds[[i for i in [ids.get(model.get("unk_token"))] if i is not None]] = UNKNOWN
        # The best pair is merged first, so the scores of tokens fall in the order of their merges.
        scores = np.full(vocab_size, -len(merges), np.float32)
        for rank, merge in reversed(list(enumerate(merges))):
            scores[ids["".join(merge)]] = -rank
        fields |= {"model": "llama", "scores": scores}
        options: list[dict[str, Any]] = [{"add_space_prefix": True}, {"add_space_prefix": False}]
    else:
        fields |= {"model": "gpt2", "merges": tuple(map(" ".join, merges))}
        # One name for each way, the likely one first.
        names = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items()) if name != DEFAULT}
        patterns = json.dumps(document.get("pre_tokenizer"))
        unlikely = {pre: any(json.dumps(pattern)[1:-1] not in patterns for pattern in pre.patterns) for pre in names}
        options = [{"pre": names[pre]} for pre in sorted(reversed(names), key=lambda pre: unlikely[pre])]
    templates = {
        _TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}": text
        for name, text in tokenizer.chat_templates.items()
    }
    for option in options:
        yield {PREFIX + key: value for key, value in (fields | option).items()} | templates


def _special_fields(tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the ids of special tokens, and which of them are added to a text; `ids` are those of all tokens."""
    fields: dict[str, Any] = {
        key: ids[text] for key, role in _ROLES.items() if (text := tokenizer.special_tokens.get(role, "")) in ids
    }
    others = {"bos_token_id": tokenizer.bos_id, "padding_token_id": tokenizer.pad_id}
    fields |= {key: i for key, i in others.items() if i is not None}
    if tokenizer.eos_ids and fields.get("eos_token_id") not in tokenizer.eos_ids:
        fields["eos_token_id"] = tokenizer.eos_ids[0]
    eos = fields.get("eos_token_id")
    fields |= dict(zip(_ENDS, (i for i in tokenizer.eos_ids if i != eos), strict=False))
    plain, full = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    adds_bos = len(full) > len(plain) and full[0] == tokenizer.bos_id
    return fields | {"add_bos_token": adds_bos, "add_eos_token": len(full) > len(plain) + adds_bos}
