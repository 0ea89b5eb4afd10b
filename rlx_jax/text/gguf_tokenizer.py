"""`tokenizer_files`: the tokenizer in the metadata of a GGUF file, as the files of a Hugging Face directory.

Two kinds are supported: `gpt2`, byte-level BPE with a list of merges and the name of a pre-tokenizer, and `llama`,
SentencePiece BPE, in which the scores of the pieces define the merges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_jax.errors import TokenizerError, UnsupportedError, did_you_mean, listing, quote, shown
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.weights.gguf_header import is_equal

# The metadata that are read here, by key.
Metadata = Mapping[str, Any]

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# Kinds of tokens: llama.cpp's enumeration.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Roles of token ids: metadata key → name in tokenizer_config.json.
_ROLES = {
    "bos_token_id": "bos_token", "eos_token_id": "eos_token", "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}  # fmt: skip
# More ids that end a generated row: the end of a turn or of a message.
_ENDS = ("eot_token_id", "eom_token_id")
# Control tokens of these texts end a row too, as in llama.cpp: converters do not write the id of every one.
_END_TEXTS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level tokenizer splits a text before BPE.

    Attributes:
        pattern: regular expression of the pieces; None for that of GPT-2.
        splits_digits: each digit is a piece.
        composes: characters are composed first (Unicode NFC).
        takes_words: a piece that is a token itself is not merged from its bytes.
        adds_bos: a text starts with the begin token, unless the file says otherwise.
    """

    pattern: str | None = None
    splits_digits: bool = False
    composes: bool = False
    takes_words: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer(rf"{_ENGLISH}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", takes_words=True, adds_bos=True)
_QWEN2 = PreTokenizer(rf"{_ENGLISH}|{_WORDS}|\p{{N}}|{_REST}", composes=True)
# Pre-tokenizers by `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(), "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2, "smollm": PreTokenizer(splits_digits=True),
}  # fmt: skip


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer by name, as JSON values, and the ids of the special tokens by field of `config.json`."""

    documents: dict[str, dict[str, Any]]
    ids: dict[str, int | list[int]]


def tokenizer_files(metadata: Metadata, where: str) -> TokenizerFiles:
    """Return the tokenizer of a GGUF file; no documents if the file has none.

    Raises:
        TokenizerError: the metadata are malformed or contradict each other.
        UnsupportedError: another kind of tokenizer or pre-tokenizer.
    """
    kind, pre = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre", "default")
    if not isinstance(kind, str | None) or not isinstance(pre, str):
        raise TokenizerError(
            f"{where}: {_PREFIX}model and {_PREFIX}pre: expected texts, got {shown(kind)}, {shown(pre)}"
        )
    if kind in (None, "none", "no_vocab"):
        return TokenizerFiles({}, {})
    tokens = _texts(metadata, "tokens", where)
    kinds = _numbers(metadata, "token_type", len(tokens), where)
    roles = {key: _id(metadata, key, len(tokens), where) for key in (*_ROLES, *_ENDS) if _PREFIX + key in metadata}
    if kind == "gpt2":
        model = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        model = _sentence_piece(metadata, tokens, kinds, where)
    else:
        raise UnsupportedError(f"{where}: {_PREFIX}model is {shown(kind)}; supported are gpt2 and llama")
    special = set(roles.values())
    added = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": int(kinds[i]) in (_CONTROL, _UNKNOWN) or i in special,
        }
        for i in range(len(tokens)) if int(kinds[i]) in (_CONTROL, _UNKNOWN, _USER_DEFINED) or i in special
    ]  # fmt: skip
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **model,
        "post_processor": _template(metadata, tokens, roles, _adds_bos_by_default(metadata, kind), where),
    }  # fmt: skip
    by_text = (i for i, text in enumerate(tokens) if text in _END_TEXTS and int(kinds[i]) == _CONTROL)
    ends = list(dict.fromkeys([*(roles[key] for key in ("eos_token_id", *_ENDS) if key in roles), *by_text]))
    ids: dict[str, int | list[int]] = {"eos_token_id": ends} if ends else {}
    ids |= {
        name: roles[key]
        for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id"))
        if key in roles
    }
    settings = {name: tokens[roles[key]] for key, name in _ROLES.items() if key in roles}
    return TokenizerFiles(
        {"tokenizer.json": document, "tokenizer_config.json": {**settings, **_templates(metadata, where)}}, ids
    )


# -- kinds of tokenizers -----------------------------------------------------------------------


def _byte_level(metadata: Metadata, tokens: Sequence[str], where: str) -> dict[str, Any]:
    """Return the parts of a byte-level BPE tokenizer."""
    name = metadata.get(f"{_PREFIX}pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{where}: {_PREFIX}pre is {shown(name)}{did_you_mean(str(name), PRE_TOKENIZERS)}; supported are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [text.split(" ") for text in _texts(metadata, "merges", where)]
    if wrong := [i for i, merge in enumerate(merges) if len(merge) != 2]:
        raise TokenizerError(f"{where}: {_PREFIX}merges: expected two texts and a space, not so in {listing(wrong)}")
    steps: list[dict[str, Any]] = []
    if pre.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    if pre.splits_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": pre.pattern is None})
    return {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(tokens, merges, where, ignore_merges=pre.takes_words),
    }


def _sentence_piece(
    metadata: Metadata, tokens: Sequence[str], kinds: np.ndarray[Any, Any], where: str
) -> dict[str, Any]:
    """Return the parts of a SentencePiece BPE tokenizer; spaces are the character U+2581 in its tokens."""
    scores = _numbers(metadata, "scores", len(tokens), where)
    has_prefix = metadata.get(f"{_PREFIX}add_space_prefix", True) is not False
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepends = {"type": "Prepend", "prepend": "\u2581"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    merges = _merges_of_scores(tokens, kinds, scores)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepends, replaces] if has_prefix else [replaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens, merges, where, unk_token=unknown, fuse_unk=True, byte_fallback=bool((kinds == _BYTE).any())
        ),
    }


def _merges_of_scores(
    tokens: Sequence[str], kinds: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, in the order in which SentencePiece merges them.

    It merges the pair with the best score first. All pairs of one token have its score; the order among them is the one
    of the converters of Hugging Face.
    """
    ids = {token: i for i, token in enumerate(tokens) if int(kinds[i]) not in (_CONTROL, _UNKNOWN, _BYTE)}
    pairs = [
        (float(scores[i]), cut, len(token) - cut, i, ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids
    ]  # fmt: skip
    pairs.sort(key=lambda pair: (-pair[0], -pair[1], -pair[2], pair[3], pair[4], pair[5]))
    return [(tokens[left], tokens[right]) for *_, left, right in pairs]


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], where: str, **options: Any) -> dict[str, Any]:
    """Return a BPE model with these options; the others have the defaults of the library."""
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        repeated = [token for i, token in enumerate(tokens) if vocab[token] != i]
        raise TokenizerError(f"{where}: {_PREFIX}tokens: {len(repeated)} occur twice: {listing(map(quote, repeated))}")
    defaults = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {**defaults, **options, "vocab": vocab, "merges": [list(merge) for merge in merges]}


# -- special tokens and templates --------------------------------------------------------------


def _adds_bos_by_default(metadata: Metadata, kind: str) -> bool:
    """Return whether texts start with the begin token in a file that does not say so, as in llama.cpp."""
    return kind == "llama" or PRE_TOKENIZERS[metadata[f"{_PREFIX}pre"]].adds_bos


def _template(
    metadata: Metadata, tokens: Sequence[str], roles: Mapping[str, int], adds_bos: bool, where: str
) -> dict[str, Any] | None:
    """Return the post-processor that adds the begin and end tokens around a text; None if it adds none."""
    settings = {"bos_token_id": ("add_bos_token", adds_bos), "eos_token_id": ("add_eos_token", False)}
    ends = [key for key, (field, default) in settings.items() if is_equal(metadata.get(_PREFIX + field, default), True)]
    if missing := [key for key in ends if key not in roles]:
        raise TokenizerError(f"{where}: {_PREFIX}{missing[0]} is missing, and texts are to have that token")
    if not ends:
        return None

    def pieces(name: str) -> list[dict[str, Any]]:
        """Return the template of a text."""
        token = {key: {"SpecialToken": {"id": tokens[roles[key]], "type_id": 0}} for key in ends}
        text = {"Sequence": {"id": name, "type_id": 0}}
        return [*(token[key] for key in ends[:1] if key == "bos_token_id"), text,
                *(token[key] for key in ends if key == "eos_token_id")]  # fmt: skip

    special = {
        tokens[roles[key]]: {"id": tokens[roles[key]], "ids": [roles[key]], "tokens": [tokens[roles[key]]]}
        for key in ends
    }
    return {
        "type": "TemplateProcessing", "single": pieces("A"), "pair": [*pieces("A"), *pieces("B")],
        "special_tokens": special,
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
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab_size)], np.full(vocab_size, _UNUSED, np.int32)
    for token, i in ids.items():
        tokens[i], kinds[i] = token, _NORMAL
        if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[i] = _BYTE
    for token in added:
        kinds[token["id"]] = _CONTROL if token.get("special") else _USER_DEFINED
    fields = {"tokens": tuple(tokens), "token_type": kinds, **_special_fields(tokenizer, ids)}
    merges = [text if isinstance(text, str) else " ".join(text) for text in model.get("merges", ())]
    if model.get("byte_fallback"):
        kinds[[i for i in [ids.get(model.get("unk_token"))] if i is not None]] = _UNKNOWN
        # The best pair is merged first, so the scores of tokens fall in the order of their merges.
        scores = np.full(vocab_size, -len(merges), np.float32)
        for rank, merge in reversed(list(enumerate(merges))):
            scores[ids[merge.replace(" ", "")]] = -rank
        fields |= {"model": "llama", "scores": scores}
        options: list[dict[str, Any]] = [{"add_space_prefix": True}, {"add_space_prefix": False}]
    else:
        fields |= {"model": "gpt2", "merges": tuple(merges)}
        names = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items())}  # one name for each way
        patterns = json.dumps(document.get("pre_tokenizer"))  # the likely one first
        options = [
            {"pre": name}
            for pre, name in sorted(names.items(), key=lambda item: json.dumps(item[0].pattern)[1:-1] not in patterns)
        ]
    templates = {
        _TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}": text
        for name, text in tokenizer.chat_templates.items()
    }
    for option in options:
        yield {_PREFIX + key: value for key, value in (fields | option).items()} | templates


def _special_fields(tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the ids of special tokens, and which of them are added to a text; `ids` are those of all tokens."""
    fields: dict[str, Any] = {
        key: ids[tokenizer.special_tokens[role]] for key, role in _ROLES.items() if role in tokenizer.special_tokens
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


# -- metadata ----------------------------------------------------------------------------------


def _texts(metadata: Metadata, key: str, where: str) -> tuple[str, ...]:
    """Return a list of texts in UTF-8."""
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, tuple):
        raise TokenizerError(f"{where}: {_PREFIX}{key}: expected a list of texts, got {shown(values)}")
    # Bytes that are not UTF-8 were read as surrogates, which no text has.
    if wrong := [
        i for i, text in enumerate(values) if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
    ]:
        raise TokenizerError(f"{where}: {_PREFIX}{key}: not UTF-8 in {len(wrong)} of {len(values)}: {listing(wrong)}")
    return values


def _numbers(metadata: Metadata, key: str, count: int, where: str) -> np.ndarray[Any, Any]:
    """Return a list of one number for each token."""
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, np.ndarray) or values.shape != (count,):
        found = f"{values.size} of them" if isinstance(values, np.ndarray) else shown(values)
        raise TokenizerError(f"{where}: {_PREFIX}{key}: expected {count} numbers, one for each token, got {found}")
    return values


def _id(metadata: Metadata, key: str, count: int, where: str) -> int:
    """Return the id of a special token."""
    value = metadata[_PREFIX + key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise TokenizerError(f"{where}: {_PREFIX}{key}: expected a token id below {count}, got {shown(value)}")
    return value
