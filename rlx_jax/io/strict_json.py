"""JSON without surprises: the one reader of JSON files.

The parser of the standard library recurses as deep as the text says, keeps the last of two equal names, takes NaN, and
raises a bare ValueError for a long number. For files that come from elsewhere each of these is an error here, and what
the text would take is bounded before it is parsed.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import Counter
from typing import Any

from rlx_jax.errors import FormatError, RlxError, quote
from rlx_jax.io import limits

# Possessive, and an open string runs to the end of the text: linear on any input.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, where: str, error: type[FormatError], infinity: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`, of at most `limits.MAX_JSON_VALUES` values; arguments and errors as `parse`."""
    value = parse(raw, where, error, limits.MAX_JSON_VALUES, "limits.MAX_JSON_VALUES", infinity=infinity)
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def parse(
    raw: bytes,
    where: str,
    error: type[FormatError],
    max_values: int,
    limit_name: str,
    *,
    infinity: bool = False,
    repeated: type[RlxError] | None = None,
    start: int = 0,
) -> Any:
    """The JSON value in `raw`, of any type.

    Numbers are `int` or finite `float`, -0 a float; names within an object differ.

    Args:
        raw: the text.
        where: the file, for messages.
        error: what to raise.
        infinity: whether `Infinity` is a number too, as Python's json writes it.
        repeated: what to raise of a name that is given twice; `error` by default.
        start: the byte of the file at which `raw` begins.

    Raises:
        error: not UTF-8, not JSON, nested deeper than `limits.MAX_JSON_DEPTH`, a name given twice, NaN, Infinity, or a
            number that is too long or too large.
        LimitError: more than `max_values` values; messages call that limit `limit_name`.
    """
    text = decode_text(raw, where, error, start)
    bare = _STRING.sub("", text)
    steps = (1 if bracket in "[{" else -1 for bracket in _NO_BRACKETS.sub("", bare))
    if max(itertools.accumulate(steps), default=0) > limits.MAX_JSON_DEPTH:
        raise error(f"{where}: nested deeper than limits.MAX_JSON_DEPTH = {limits.MAX_JSON_DEPTH}")
    values = 1 + sum(map(bare.count, ",[{"))
    limits.at_most(values, max_values, limit_name, f"{where}: the number of JSON values")
    hooks = _Hooks(where, error, repeated or error, infinity)
    try:
        value = json.loads(
            text, object_pairs_hook=hooks.members, parse_int=hooks.whole, parse_float=hooks.real,
            parse_constant=hooks.constant,
        )  # fmt: skip
    except json.JSONDecodeError as cause:
        at = start + len(text[: cause.pos].encode())
        raise error(f"{where}: not JSON: {cause.msg.removesuffix(' at')} at byte {at}") from cause
    if _SURROGATE.search(text) and not is_text(json.dumps(value, ensure_ascii=False)):
        raise error(f"{where}: half of a surrogate pair in a name or a text")
    return value


def decode_text(raw: bytes, where: str, error: type[FormatError], start: int = 0) -> str:
    """`raw` as text, if it is UTF-8 without byte-order mark and NUL. `start` is its place in the file."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raise error(f"{where}: starts with a byte-order mark at byte {start}; save it as UTF-8 without one")
    nul = raw.find(0)
    if nul >= 0:
        raise error(f"{where}: a NUL at byte {start + nul}, where JSON is expected")
    try:
        return raw.decode()
    except UnicodeDecodeError as cause:
        raise error(f"{where}: not UTF-8 at byte {start + cause.start}") from cause


def is_text(value: str) -> bool:
    """Whether `value` is Unicode text, free of the lone surrogates that JSON can spell."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Hooks:
    """What the standard parser calls: each refuses what a strict reader does not take."""

    def __init__(self, where: str, error: type[FormatError], repeated: type[RlxError], infinity: bool) -> None:
        self.where, self.error, self.repeated, self.infinity = where, error, repeated, infinity
        # Large files repeat small numbers: ids, sizes, offsets.
        self.whole = functools.lru_cache(2**12)(self._whole)

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise self.repeated(f"{self.where}: {quote(name)} is given twice in one object")
        return found

    def _whole(self, digits: str) -> int | float:
        if len(digits.lstrip("-")) > limits.MAX_JSON_DIGITS:  # int() of so many takes quadratic time
            raise self.error(f"{self.where}: a number of {len(digits.lstrip('-'))} digits")
        return -0.0 if digits == "-0" else int(digits)

    def real(self, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise self.error(f"{self.where}: {quote(digits)} is too large a number")
        return value

    def constant(self, name: str) -> float:
        if self.infinity and name == "Infinity":
            return math.inf
        raise self.error(f"{self.where}: {name} is not a JSON number")
