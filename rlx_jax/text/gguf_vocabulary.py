"""`Vocabulary`: the tokens in the metadata of a GGUF file; and for each kind of tokenizer, its parts of
`tokenizer.json`.

`MODELS` has a function for each kind that builds its normalizer, pre-tokenizer, decoder and model.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RlxWarning, TokenizerError, UnsupportedError, did_you_mean, listing, quote, shown
from rlx_jax.text.gguf_pretokenizers import DEFAULT, PRE_TOKENIZERS

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
