"""Pairs of texts, such as a question and a document: their tokens, and how a pair that is too long is truncated."""

from __future__ import annotations

from typing import NamedTuple

from rlx_jax.errors import ConfigError, quote
from rlx_jax.models.config import Fields

# Classes whose pairs transformers gives no token types, although tokenizer.json has them.
_UNTYPED_CLASSES = ("DistilBertTokenizer", "DistilBertTokenizerFast", "TokenizersBackend")


class PairTokens(NamedTuple):
    """The token ids of a pair of texts, and for each its type: 0 in the first text, 1 in the second if they differ."""

    ids: list[int]
    types: list[int]


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


def gives_types(config: Fields) -> bool:
    """Return whether transformers passes token types of pairs: by `model_input_names`, or else by the class."""
    names = config.raw("model_input_names")
    if names is None:
        return config.raw("tokenizer_class") not in _UNTYPED_CLASSES
    if not isinstance(names, list):
        raise ConfigError(f"{config.where}: field 'model_input_names' is {quote(names)}; expected a list of names")
    return "token_type_ids" in names
