"""`tokenizer_files`: the tokenizer in the metadata of a GGUF file, as the files of a Hugging Face directory.

Four kinds are supported: `gpt2`, byte-level BPE with a list of merges and the name of a pre-tokenizer; `llama`,
SentencePiece BPE, in which the scores of the pieces define the merges; `t5`, a Unigram model; and `bert`, WordPiece.
`MODELS` has a function for each kind that builds its normalizer, pre-tokenizer, decoder and model.
"""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import RlxWarning, TokenizerError, UnsupportedError, did_you_mean, listing, quote, shown
from rlx_jax.text.gguf_pretokenizers import DEFAULT, PRE_TOKENIZERS
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.weights.gguf_header import is_equal

# The metadata that are read here, by key.
Metadata = Mapping[str, Any]

PREFIX = "tokenizer.ggml."
# Kinds of tokens: llama.cpp's enumeration.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # spaces in the tokens of SentencePiece


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, their kinds and the special ids, with the other metadata."""

    metadata: Metadata
    tokens: tuple[str, ...]
    kinds: np.ndarray[Any, Any]
    roles: Mapping[str, int]
    where: str

    def flag(self, key: str, default: bool) -> bool:
        """Return a setting.

        Raises:
            TokenizerError: it is not a bool.
        """
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise TokenizerError(f"{self.where}: {PREFIX}{key}: expected a bool, got {shown(value)}")
        return value

    def unknown(self, default: str | None = None) -> str | None:
        """Return the unknown token."""
        by_kind = (self.tokens[i] for i, kind in enumerate(self.kinds) if kind == UNKNOWN)
        role = self.roles.get("unknown_token_id")
        return next(by_kind, default if role is None else self.tokens[role])


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the parts of a byte-level BPE tokenizer."""
    metadata, where = vocabulary.metadata, vocabulary.where
    name = metadata.get(f"{PREFIX}pre", DEFAULT)
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{where}: {PREFIX}pre is {shown(name)}{did_you_mean(str(name), PRE_TOKENIZERS)}; supported are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    if name == DEFAULT:
        warnings.warn(
            f"{where}: {PREFIX}pre does not name a pre-tokenizer, so texts are split by llama.cpp's default, which "
            "may not be that of the model; convert the model again",
            RlxWarning,
            stacklevel=2,
        )
    pre = PRE_TOKENIZERS[name]
    merges = [text.split(" ") for text in read_texts(metadata, "merges", where)]
    if wrong := [i for i, merge in enumerate(merges) if len(merge) != 2]:
        raise TokenizerError(f"{where}: {PREFIX}merges: expected two texts and a space, not so in {listing(wrong)}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps()},
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=pre.takes_words),
    }


def _sentence_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the parts of a SentencePiece BPE tokenizer; spaces are the character U+2581 in its tokens."""
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    scores = read_numbers(vocabulary.metadata, "scores", len(tokens), vocabulary.where)
    has_prefix = vocabulary.flag("add_space_prefix", True)
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = {"type": "Prepend", "prepend": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = _merges_of_scores(tokens, kinds, scores)
    falls_back = bool((kinds == BYTE).any())
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepends, replaces] if has_prefix else [replaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, unk_token=vocabulary.unknown(), fuse_unk=True, byte_fallback=falls_back),
    }


def _unigram(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the parts of a SentencePiece Unigram tokenizer."""
    metadata, tokens, where = vocabulary.metadata, vocabulary.tokens, vocabulary.where
    scores = read_numbers(metadata, "scores", len(tokens), where)
    unknown = vocabulary.unknown()
    if unknown is None or not np.isfinite(scores).all():
        raise TokenizerError(f"{where}: a t5 tokenizer has an unknown token and finite scores, this one has not")
    normalizers: list[dict[str, Any]] = []
    charsmap = metadata.get(f"{PREFIX}precompiled_charsmap", ())
    if isinstance(charsmap, np.ndarray) and charsmap.dtype.itemsize == 1:
        encoded = base64.b64encode(charsmap.tobytes()).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    elif isinstance(charsmap, np.ndarray) or charsmap != ():
        raise TokenizerError(f"{where}: {PREFIX}precompiled_charsmap: expected bytes, got {shown(charsmap)}")
    if vocabulary.flag("remove_extra_whitespaces", False):
        normalizers += [
            {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
            for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " "))
        ]
    scheme = "always" if vocabulary.flag("add_space_prefix", False) else "never"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    _check_unique(vocabulary)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {
            "type": "Unigram", "unk_id": tokens.index(unknown),
            "byte_fallback": bool((vocabulary.kinds == BYTE).any()),
            "vocab": [[token, float(score)] for token, score in zip(tokens, scores, strict=True)],
        },
    }  # fmt: skip


def _word_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the parts of BERT's WordPiece tokenizer."""
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    # Files rarely have the setting. The vocabulary of a model that lowers its texts has no capitals.
    words = "".join(text for text, kind in zip(tokens, kinds, strict=True) if kind == NORMAL)
    has_capitals = any(capital in words for capital in ascii_uppercase)
    lowercase = vocabulary.flag("normalizer.lowercase", not has_capitals)
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": vocabulary.flag("normalizer.strip_accents", lowercase), "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": vocabulary.unknown("[UNK]"), "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": _check_unique(vocabulary),
        },
    }  # fmt: skip


def without_spaces(tokens: Sequence[str], kinds: np.ndarray[Any, Any]) -> tuple[str, ...]:
    """Return the tokens of WordPiece as BERT has them: converters mark the begin of a word, BERT its continuation."""
    return tuple(
        text if kind == CONTROL else text[1:] if text.startswith(SPACE) else f"##{text}"
        for text, kind in zip(tokens, kinds, strict=True)
    )


MODELS = {"gpt2": _byte_level, "llama": _sentence_piece, "t5": _unigram, "bert": _word_piece}


def _merges_of_scores(
    tokens: Sequence[str], kinds: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, in the order in which SentencePiece merges them.

    It merges the pair with the best score first. All pairs of one token have its score; the order among them is the one
    of the converters of Hugging Face.
    """
    ids = {token: i for i, token in enumerate(tokens) if int(kinds[i]) not in (CONTROL, UNKNOWN, BYTE)}
    pairs = [
        (float(scores[i]), cut, len(token) - cut, i, ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids
    ]  # fmt: skip
    pairs.sort(key=lambda pair: (-pair[0], -pair[1], -pair[2], pair[3], pair[4], pair[5]))
    return [(tokens[left], tokens[right]) for *_, left, right in pairs]


def _check_unique(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids of the tokens by text.

    Raises:
        TokenizerError: a text occurs twice.
    """
    tokens = vocabulary.tokens
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        repeated = [token for i, token in enumerate(tokens) if ids[token] != i]
        raise TokenizerError(
            f"{vocabulary.where}: {PREFIX}tokens: {len(repeated)} occur twice: {listing(map(quote, repeated))}"
        )
    return ids


def _bpe(vocabulary: Vocabulary, merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    """Return a BPE model with these options; the others have the defaults of the library."""
    vocab = _check_unique(vocabulary)
    return {"type": "BPE", **options, "vocab": vocab, "merges": [list(merge) for merge in merges]}


def read_texts(metadata: Metadata, key: str, where: str) -> tuple[str, ...]:
    """Return a list of texts in UTF-8."""
    values = metadata.get(PREFIX + key)
    if not isinstance(values, tuple):
        raise TokenizerError(f"{where}: {PREFIX}{key}: expected a list of texts, got {shown(values)}")
    # Bytes that are not UTF-8 were read as surrogates, which no text has.
    if wrong := [
        i for i, text in enumerate(values) if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
    ]:
        raise TokenizerError(f"{where}: {PREFIX}{key}: not UTF-8 in {len(wrong)} of {len(values)}: {listing(wrong)}")
    return values


def read_numbers(metadata: Metadata, key: str, count: int, where: str) -> np.ndarray[Any, Any]:
    """Return a list of one number for each token."""
    values = metadata.get(PREFIX + key)
    if not isinstance(values, np.ndarray) or values.shape != (count,):
        text = f"{values.size} of them" if isinstance(values, np.ndarray) else shown(values)
        raise TokenizerError(f"{where}: {PREFIX}{key}: expected {count} numbers, one for each token, got {text}")
    return values


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
