"""Blocks by their paths: the patterns that `at` takes, and what they match."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlx_jax.errors import GraphError, did_you_mean, listing, shown
from rlx_jax.ir.types import Path, path_text


@dataclass(frozen=True)
class BlockPattern:
    """A glob over block paths: `*` and `?` stay inside one segment, `**` is any number of segments, `{q,v}` one of
    several, `[0-3]` one character.

    >>> pattern = BlockPattern("layers.*.self_attn.{q,v}_proj")
    >>> pattern.matches(("layers", 3, "self_attn", "q_proj")), pattern.matches(("layers", 3, "self_attn"))
    (True, False)

    Raises:
        GraphError: it is no string, an empty one, or its brackets do not close.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not all(self.text.split(".")):
            raise GraphError(
                f"at: a pattern is the dotted path of a block, such as 'layers.*.self_attn.o_proj'; got "
                f"{shown(self.text)}"
            )
        _compiled(self.text)

    def matches(self, path: Path) -> bool:
        """Whether it is the whole of a block path."""
        return _compiled(self.text).fullmatch(path_text(path)) is not None

    def nothing(self, where: str, paths: Iterable[Path]) -> GraphError:
        """The error that it matches none of the blocks of a flow, with those that are near it."""
        layers = re.compile(r"(?<=\.)\d+(?=\.|$)")
        known = list(dict.fromkeys(layers.sub("*", path_text(path)) for path in paths))
        near = did_you_mean(layers.sub("*", self.text), known, alike=0.7)
        return GraphError(f"{where}: at({self.text!r}) matches no block{near or f'; blocks are {listing(known)}'}")


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> re.Pattern[str]:
    """The pattern as a regular expression."""
    parts: list[str] = []
    at, depth = 0, 0
    while at < len(text):
        rest, char = text[at:], text[at]
        closed = re.match(r"\[[^\[\].]+\]", rest)
        if rest.startswith("**"):
            parts.append(".+")
            at += 1
        elif char == "[" and closed is not None:
            inner = closed.group()[1:-1]
            parts.append(
                f"[{'^' if inner[0] == '!' else ''}{re.escape(inner.lstrip('!')).replace(chr(92) + '-', '-')}]"
            )
            at += len(closed.group()) - 1
        elif char in "*?":
            parts.append("[^.]*" if char == "*" else "[^.]")
        elif char == "{" or (char in ",}" and depth):
            depth += {"{": 1, "}": -1}.get(char, 0)
            parts.append({"{": "(?:", "}": ")", ",": "|"}[char])
        elif char in "[]}":
            raise GraphError(f"at: {text!r}: the {char!r} has no partner")
        else:
            parts.append(re.escape(char))
        at += 1
    if depth:
        raise GraphError(f"at: {text!r}: a '{{' has no partner")
    return re.compile("".join(parts))
