"""Pairs of texts, such as a question and a document: their tokens, and how a pair that is too long is truncated."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ConfigError, quote
from rlx_jax.models.config import Fields
from rlx_jax.text.ascii_texts import take_ranges
from rlx_jax.text.request_checks import Ids

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
