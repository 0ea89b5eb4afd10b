"""Where stop strings end a text that grows token by token."""

from __future__ import annotations

from collections.abc import Callable

TAIL = 32  # tokens without text of their own that may stand in a stop string
# What stands for the bytes of a character of which some are still to come.
PART = "\ufffd"


def stopped_at(decode: Callable[[list[int]], str], ids: list[int], new: int, words: tuple[str, ...]) -> int | None:
    """How many of `ids` it takes for their text to hold a stop string; one of the last `new` completes it, or None."""
    if not words:
        return None
    text = decode(ids[-(new + TAIL + max(map(len, words)) * 4) :])  # of some, which does not take longer and longer
    if not any(word in text for word in words):
        return None
    # The text of some may begin with half of a character, and both may end with one.
    for count in range(len(ids) - new + 1, len(ids) + 1):
        whole = decode(ids[:count]).rstrip(PART)
        if any(word in whole for word in words):
            return count
    return None


def cut(text: str, words: tuple[str, ...]) -> str:
    """`text` up to the first stop string."""
    ends = [at for word in words if (at := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text


def settled(text: str, words: tuple[str, ...]) -> str:
    """The part of a growing text that later tokens cannot take back."""
    text = text.rstrip(PART)
    before = cut(text, words)
    if len(before) < len(text):
        return before
    held = max((n for w in words for n in range(1, len(w)) if text.endswith(w[:n])), default=0)
    return text[: len(text) - held]
