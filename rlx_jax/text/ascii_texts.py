"""`AsciiTexts`: encode many ASCII texts by looking up their words in a table of words that were encoded before.

The native library encodes the words of a text one by one, which takes a core 2 to 4 microseconds a token. Here NumPy
finds all words of many texts at once, and only words that are not in the table are encoded natively. Pairs of texts,
such as a question and a document, are joined and truncated here too.
"""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import ConfigError, quote
from rlx_jax.models.config import Fields
from rlx_jax.text.request_checks import Ids

HostArray = np.ndarray[Any, Any]

# Normalizers that change no ASCII character but capitals, and control characters.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
_SPACE = "\t\n\r "
# Kinds of characters: white space between words, two kinds whose adjacent characters form a word, and characters that
# are words by themselves.
_SPLIT, _WORD, _OTHER_WORD, _SINGLE = range(4)
# The kind of punctuation for pre-tokenizers that split a text at white space, to which BertNormalizer converts a tab
# and the end of a line, and the punctuation that is of the kind of letters.
_PUNCTUATION = {"BertPreTokenizer": (_SINGLE, ""), "Whitespace": (_OTHER_WORD, "_"), "WhitespaceSplit": (_WORD, "")}
_PLAIN = string.printable.encode().translate(None, b"\v\f")  # white space and characters that NumPy finds the words of
# Added tokens that the normalizer changes in nothing but capitals, and that it makes of no other text.
_PLAIN_TOKEN = re.compile("[!-~]*")
# With more added tokens, the search for them takes as long as the normalizer.
_MAX_ADDED_TOKENS = 16

# Longer words, in bytes, are encoded natively each time.
_MAX_WORD = 16
# For each length of a word a mask of its bytes in two integers, which are the key of the word.
_MASKS = np.where(np.arange(_MAX_WORD) < np.arange(_MAX_WORD + 1)[:, None], 255, 0).astype(np.uint8).view("<u8")
_SLOT_BITS = 18
# The table is emptied when its words have more token ids than this.
_MAX_IDS = 2**20
# Number of words that are encoded natively as one text: all cores encode these texts.
_WORDS_PER_TEXT = 512


class WordTable:
    """The token ids of words, in an open hash table: a word replaces another one in its slot.

    Rows of the table are the key of a word (two integers), and its place among `ids` and number of ids, `place << 16 |
    number`. Only the ids from `used` on change, and `clear` makes a new array, so that places stay valid for the array
    that was read with them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear()

    def __reduce__(self) -> tuple[type[WordTable], tuple[()]]:
        """A copy, as for another process, has no words: they are encoded there once more."""
        return WordTable, ()

    def clear(self) -> None:
        """Remove all words."""
        self.rows = np.zeros((2**_SLOT_BITS, 3), np.uint64)
        self.ids: Ids = np.empty(_MAX_IDS, np.int32)
        self.used = 0


@dataclass(frozen=True, eq=False)
class AsciiTexts:
    """The form of a native tokenizer for ASCII texts.

    Attributes:
        native: the tokenizer without its normalizer, which splits texts at white space alone.
        lowercase: whether texts are converted to lower case.
        added_tokens: matches texts in lower case that contain an added token, which are not encoded here.
        kinds: the kind of each character.
        words: the words that were encoded before.
    """

    native: Any
    lowercase: bool
    added_tokens: re.Pattern[str]
    kinds: HostArray
    words: WordTable = field(default_factory=WordTable)

    @staticmethod
    def of(native: Any, added_tokens: Collection[str]) -> AsciiTexts | None:
        """Return the form of a native tokenizer for ASCII texts; None if it would encode them differently."""
        from tokenizers import Tokenizer as Native
        from tokenizers import pre_tokenizers

        normalizer, pre_tokenizer = native.normalizer, native.pre_tokenizer
        if normalizer is None or pre_tokenizer is None or len(added_tokens) > _MAX_ADDED_TOKENS:
            return None
        state = json.loads(normalizer.__getstate__())
        steps = state.get("normalizers", [state])
        is_known = all(step["type"] in _NORMALIZERS for step in steps) and all(
            map(_PLAIN_TOKEN.fullmatch, added_tokens)
        )
        kind = json.loads(pre_tokenizer.__getstate__())["type"]
        if not is_known or kind not in _PUNCTUATION:
            return None
        punctuation, letters = _PUNCTUATION[kind]
        kinds = np.full(256, punctuation, np.uint8)
        kinds[[*(string.ascii_letters + string.digits + letters).encode()]] = _WORD
        kinds[[0, *_SPACE.encode()]] = _SPLIT  # zeros are after the end of the texts
        bare = Native(native.model)  # the vocabulary is shared
        bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        lowercase = any(step["type"] == "Lowercase" or step.get("lowercase") is True for step in steps)
        pattern = re.compile("|".join(re.escape(token.lower()) for token in added_tokens) or "(?!)")
        return AsciiTexts(bare, lowercase, pattern, kinds)

    def accepts(self, text: str) -> bool:
        """Return whether a text, or several joined by white space, is encoded here."""
        is_plain = text.isascii() and not text.encode().translate(None, _PLAIN)
        return is_plain and not self.added_tokens.search(text.lower())

    def token_ids(self, texts: Sequence[str]) -> tuple[Ids, HostArray]:
        """Return the ids of accepted texts, without special tokens, one text after another, and the number of each."""
        text = "\n".join(texts)
        codes = np.frombuffer((text.lower() if self.lowercase else text).encode() + bytes(_MAX_WORD), np.uint8)
        kinds = self.kinds.take(codes)
        changes, is_single = kinds[1:] != kinds[:-1], kinds == _SINGLE
        starts = np.flatnonzero((kinds != _SPLIT) & (is_single | np.append(True, changes)))
        ends = np.flatnonzero((kinds != _SPLIT) & (is_single | np.append(changes, True))) + 1
        ids, begins, counts = self._look_up(codes, starts, ends)
        begins_of_texts = np.cumsum([0, *map(len, texts)]) + np.arange(len(texts) + 1)
        token_ends = np.append(0, np.cumsum(counts))
        return take_ranges(ids, begins, counts), np.diff(token_ends[np.searchsorted(starts, begins_of_texts)])

    def _look_up(self, codes: HostArray, starts: HostArray, ends: HostArray) -> tuple[Ids, HostArray, HostArray]:
        """Return an array of ids, and where in it the ids of each word begin, and how many they are.

        Args:
            codes: the characters, with `_MAX_WORD` zeros at the end.
            starts, ends: of each word among the characters.
        """
        lengths, table = ends - starts, self.words
        # 16 bytes are copied as one item, and rows by `take`: indexing of two dimensions takes several times as long.
        windows = np.ndarray(len(codes) - _MAX_WORD + 1, f"V{_MAX_WORD}", codes.data, 0, 1)
        keys = windows[starts].view("<u8").reshape(-1, 2) & _MASKS.take(np.minimum(lengths, _MAX_WORD), axis=0)
        mixed = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ keys[:, 1] * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        slots = (mixed >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)
        with table.lock:
            rows, ids = table.rows.take(slots, axis=0), table.ids
            # A word whose first slot has another word may be in its second slot.
            others = np.flatnonzero((rows[:, 0] != keys[:, 0]) | (rows[:, 1] != keys[:, 1]))
            second_slots = mixed[others] >> np.uint64(64 - 2 * _SLOT_BITS) & np.uint64(2**_SLOT_BITS - 1)
            slots[others] = np.where(rows[others, 0] == 0, slots[others], second_slots)
            rows[others] = table.rows.take(slots[others], axis=0)
        places = rows[:, 2].astype(np.int64)
        begins, counts = places >> 16, places & 0xFFFF
        fits = lengths <= _MAX_WORD
        missing = np.flatnonzero(~fits | (rows[:, 0] != keys[:, 0]) | (rows[:, 1] != keys[:, 1]))
        if not len(missing):
            return ids, begins, counts
        new_ids, counts[missing] = self._encode_words(codes, starts[missing], ends[missing])
        with table.lock:
            first, end = table.used, table.used + len(new_ids)
            has_room = table.ids is ids and end <= _MAX_IDS  # else another thread has removed the words
            begins[missing] = (first if has_room else len(ids)) + np.cumsum(counts[missing]) - counts[missing]
            if has_room:
                ids[first:end], table.used = new_ids, end
                new_words = missing[fits[missing] & (counts[missing] <= 0xFFFF)]
                table.rows[slots[new_words], :2] = keys[new_words]
                table.rows[slots[new_words], 2] = begins[new_words] << 16 | counts[new_words]
                return ids, begins, counts
            if table.ids is ids:
                table.clear()
        return np.concatenate([ids, new_ids]), begins, counts

    def _encode_words(self, codes: HostArray, starts: HostArray, ends: HostArray) -> tuple[Ids, HostArray]:
        """Return the ids of words, one word after another, and the number of each; all cores encode them."""
        text = codes.tobytes().decode()
        words = [text[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        groups = [words[i : i + _WORDS_PER_TEXT] for i in range(0, len(words), _WORDS_PER_TEXT)]
        # `encode_batch_fast` does not number the words.
        encodings = self.native.encode_batch([*map(" ".join, groups)], add_special_tokens=False)
        ids = np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])
        numbers = [np.array(encoding.word_ids, np.int64) for encoding in encodings]
        counts = [np.bincount(n, minlength=len(group)) for n, group in zip(numbers, groups, strict=True)]
        return ids, np.concatenate(counts)


def take_ranges(values: HostArray, begins: HostArray, counts: HostArray) -> HostArray:
    """Return ranges of values, one after another, by where each begins and its number of values."""
    ends = np.cumsum(counts)
    result: HostArray = values[np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - ends + counts, counts)]
    return result


# Classes whose pairs transformers gives no token types, although tokenizer.json has them.
_UNTYPED_CLASSES = ("DistilBertTokenizer", "DistilBertTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens around one text or around a pair of texts.

    Attributes:
        ids: for each part of a row its ids, or the number of the text in its place.
        types: the token type of each part.
    """

    ids: tuple[tuple[int, ...] | int, ...]
    types: tuple[int, ...]

    @staticmethod
    def of(native: Any, is_pair: bool, add_special_tokens: bool = True) -> SpecialTokens | None:
        """Return the special tokens of a native tokenizer; None if they are no fixed ones around texts in order."""
        (row,) = native.encode_batch_fast([("a", "a") if is_pair else "a"], add_special_tokens=add_special_tokens)
        tokens = zip(row.sequence_ids, row.type_ids, row.ids, strict=True)
        parts = [(text, kind, tuple(i for *_, i in part)) for (text, kind), part in groupby(tokens, lambda t: t[:2])]
        if [text for text, *_ in parts if text is not None] != [0, 1][: 1 + is_pair]:
            return None
        ids = tuple(ids if text is None else text for text, _, ids in parts)
        return SpecialTokens(ids, tuple(kind for _, kind, _ in parts))

    def rows(self, ids: Ids, begins: Any, counts: Any) -> tuple[list[Ids], list[Ids]]:
        """Return the ids and the types of rows.

        Args:
            ids: the ids of the texts.
            begins, counts: the place of the first id and the number of ids of each text of each row, `[rows, 1|2]`.
        """
        places, sizes = np.zeros((2, len(begins), len(self.ids)), np.int64)
        for column, part in enumerate(self.ids):
            if isinstance(part, tuple):
                places[:, column], sizes[:, column] = len(ids), len(part)
                ids = np.append(ids, np.array(part, np.int32))
            else:
                places[:, column], sizes[:, column] = begins[:, part], counts[:, part]
        flat = take_ranges(ids, places.ravel(), sizes.ravel())
        types = np.repeat(np.tile(np.array(self.types, np.int32), len(begins)), sizes.ravel())
        ends = np.cumsum(sizes.sum(axis=1)).tolist()
        flat_rows, flat_types = ([x[a:b] for a, b in pairwise([0, *ends])] for x in (flat, types))
        return flat_rows, flat_types


def pair_lengths(first: int, second: int, total: int) -> tuple[int, int]:
    """Return the lengths of two texts after truncation to `total` tokens, the longer text first (`longest_first`).

    If both are longer than half, the first gets total // 2 of them, or, if it is the longer one, the rest.

    >>> pair_lengths(3, 20, 11), pair_lengths(20, 3, 11), pair_lengths(20, 30, 11), pair_lengths(30, 20, 11)
    ((3, 8), (8, 3), (5, 6), (6, 5))
    """
    short, long = sorted((first, second))
    if short + long > total:
        short = min(short, total // 2)
        long = total - short
    return (short, long) if first <= second else (long, short)


def fitting_lengths(lengths: list[int], total: int) -> list[int]:
    """Return the lengths of a text that is too long, or of a pair, after truncation to `total` tokens."""
    return [*pair_lengths(lengths[0], lengths[1], total)] if len(lengths) > 1 else [total]


def gives_types(config: Fields) -> bool:
    """Return whether transformers passes token types of pairs: by `model_input_names`, or else by the class."""
    names = config.raw("model_input_names")
    if names is None:
        return config.raw("tokenizer_class") not in _UNTYPED_CLASSES
    if not isinstance(names, list):
        raise ConfigError(f"{config.where}: field 'model_input_names' is {quote(names)}; expected a list of names")
    return "token_type_ids" in names
