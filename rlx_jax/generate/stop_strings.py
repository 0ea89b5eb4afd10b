"""Stop strings: find them in growing text, and the part of a text that later tokens cannot change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

INVISIBLE_TOKENS = 32  # allowance, in tokens, for tokens without visible text within a stop string
REDECODE_TOKENS = 128  # new tokens after which the text of all tokens is decoded again
# Tokenizers decode an incomplete UTF-8 character to the replacement character.
INCOMPLETE_CHAR = "\ufffd"


@dataclass
class GrowingText:
    """The text of ids that grow. Each update decodes the last tokens, as decoding all of them would be quadratic.

    Attributes:
        decode: the tokenizer's function.
        text: the text of the first `count` ids, which are decoded together.
    """

    decode: Callable[[list[int]], str]
    text: str = ""
    count: int = 0

    def update(self, ids: list[int]) -> str:
        """Return the text of all ids; the ids of the last call come first."""
        if len(ids) - self.count < REDECODE_TOKENS:
            # Both texts begin at one token, as a tokenizer may decode the first token of a text differently.
            start = max(0, self.count - INVISIBLE_TOKENS)
            return self.text + self.decode(ids[start:])[len(self.decode(ids[start : self.count])) :]
        text = self.decode(ids)
        if not text.endswith(INCOMPLETE_CHAR):
            self.text, self.count = text, len(ids)
        return text


def stop_length(
    decode: Callable[[list[int]], str], ids: list[int], num_new: int, stop_strings: tuple[str, ...], min_tokens: int = 0
) -> int | None:
    """Return the length of the shortest prefix of `ids` with a stop string in its text, or None.

    Only the last `num_new` ids are new: earlier prefixes have been checked before. A stop string that ends in the text
    of the first `min_tokens` ids does not count.
    """
    if not stop_strings:
        return None
    # Decode only the last tokens, as decoding all of them in every step would be quadratic. A character has at most
    # four bytes, and so four tokens.
    text = decode(ids[-(num_new + INVISIBLE_TOKENS + max(map(len, stop_strings)) * 4) :])
    if not any(word in text for word in stop_strings):
        return None
    start = min_length(decode, ids, min_tokens)
    # Confirm on the full text: the text of the last tokens may begin with an incomplete character.
    for count in range(max(len(ids) - num_new, min_tokens) + 1, len(ids) + 1):
        full_text = decode(ids[:count]).rstrip(INCOMPLETE_CHAR)
        if len(truncate_at_stop(full_text, stop_strings, start)) < len(full_text):
            return count
    return None


def min_length(decode: Callable[[list[int]], str], ids: list[int], min_tokens: int) -> int:
    """Return the length of the text in which no stop string counts: the text of the first `min_tokens` ids."""
    return len(decode(ids[:min_tokens]).rstrip(INCOMPLETE_CHAR)) if min_tokens else 0


def truncate_at_stop(text: str, stop_strings: tuple[str, ...], start: int = 0) -> str:
    """Return `text` up to the first stop string that ends after `start` characters."""
    finds = (text.find(word, max(0, start + 1 - len(word))) for word in stop_strings)
    positions = [position for position in finds if position >= 0]
    return text[: min(positions)] if positions else text


def stable_prefix(text: str, stop_strings: tuple[str, ...], start: int = 0) -> str:
    """Return the part of a growing text that later tokens cannot change; `start` as in `truncate_at_stop`."""
    text = text.rstrip(INCOMPLETE_CHAR)
    answer = truncate_at_stop(text, stop_strings, start)
    if len(answer) < len(text):
        return answer
    # Withhold an end of the text that may become a stop string.
    num_withheld = max((n for w in stop_strings for n in range(1, len(w)) if text.endswith(w[:n])), default=0)
    return text[: len(text) - num_withheld]
