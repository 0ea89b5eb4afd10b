"""`parse`: a strict JSON parser for files of untrusted origin, used for all JSON files.

The parser of the standard library recurses as deeply as the text is nested, keeps the last of two equal names, accepts
NaN, and raises a bare ValueError for a long number. Here each of these is an error of a documented type, and nesting
and the number of values are bounded before the text is parsed.
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

# Possessive quantifiers, and a string without an end matches up to the end of the text: linear time on any input.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, where: str, error: type[FormatError], infinity: bool = False) -> dict[str, Any]:
    """Return the JSON object in `raw`, of at most `limits.MAX_JSON_VALUES` values; arguments and errors as `parse`."""
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
    repeated_error: type[RlxError] | None = None,
    start: int = 0,
) -> Any:
    """Return the JSON value in `raw`, of any type.

    Numbers become `int` or finite `float`, -0 a float. Names within an object are unique.

    Args:
        raw: the text in UTF-8.
        where: the file, for messages.
        error: the exception to raise.
        max_values: the maximum number of values.
        limit_name: the name of this limit in messages.
        infinity: accept `Infinity` as a number too, as Python's json module writes it.
        repeated_error: the exception for a name that occurs twice in an object; `error` by default.
        start: the byte offset of `raw` in the file.

    Raises:
        error: not UTF-8, not JSON, nested deeper than `limits.MAX_JSON_DEPTH`, a repeated name, NaN, Infinity, or a
            number that is too long or too large.
        LimitError: more than `max_values` values.
    """
    text = decode_text(raw, where, error, start)
    # Without its strings, brackets and commas give the depth and the number of values of a text.
    bare = _STRING.sub("", text)
    steps = (1 if bracket in "[{" else -1 for bracket in _NO_BRACKETS.sub("", bare))
    if max(itertools.accumulate(steps), default=0) > limits.MAX_JSON_DEPTH:
        raise error(f"{where}: nested deeper than limits.MAX_JSON_DEPTH = {limits.MAX_JSON_DEPTH}")
    values = 1 + sum(map(bare.count, ",[{"))
    limits.check_limit(values, max_values, limit_name, f"{where}: the number of JSON values")
    hooks = _Hooks(where, error, repeated_error or error, infinity)
    try:
        value = json.loads(
            text, object_pairs_hook=hooks.unique_members, parse_int=hooks.parse_int, parse_float=hooks.parse_float,
            parse_constant=hooks.parse_constant,
        )  # fmt: skip
    except json.JSONDecodeError as cause:
        offset = start + len(text[: cause.pos].encode())
        raise error(f"{where}: not JSON: {cause.msg.removesuffix(' at')} at byte {offset}") from cause
    if _SURROGATE.search(text) and not is_text(json.dumps(value, ensure_ascii=False)):
        raise error(f"{where}: half of a surrogate pair in a name or a string")
    return value


def decode_text(raw: bytes, where: str, error: type[FormatError], start: int = 0) -> str:
    """Return `raw` as text. `start` is its byte offset in the file, for messages.

    Raises:
        error: not UTF-8, or with a byte-order mark or a NUL.
    """
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
    """Whether `value` is Unicode text without lone surrogates, which JSON can express as escapes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Hooks:
    """Callbacks of the standard parser; each refuses values that a strict parser does not accept."""

    def __init__(self, where: str, error: type[FormatError], repeated_error: type[RlxError], infinity: bool) -> None:
        self.where, self.error, self.repeated_error, self.infinity = where, error, repeated_error, infinity
        # Large files repeat small numbers: ids, sizes, offsets.
        self.parse_int = functools.lru_cache(2**12)(self._parse_int)

    def unique_members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object's members, unless a name is repeated."""
        members = dict(pairs)
        if len(members) < len(pairs):
            name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise self.repeated_error(f"{self.where}: {quote(name)} is given twice in one object")
        return members

    def _parse_int(self, digits: str) -> int | float:
        """Return a whole number, unless it has too many digits."""
        if len(digits.lstrip("-")) > limits.MAX_JSON_DIGITS:  # int() of so many takes quadratic time
            raise self.error(f"{self.where}: a number of {len(digits.lstrip('-'))} digits")
        return -0.0 if digits == "-0" else int(digits)

    def parse_float(self, digits: str) -> float:
        """Return a float, unless it overflows."""
        value = float(digits)
        if not math.isfinite(value):
            raise self.error(f"{self.where}: {quote(digits)} is too large a number")
        return value

    def parse_constant(self, name: str) -> float:
        """Return infinity where it is allowed; refuse NaN and -Infinity."""
        if self.infinity and name == "Infinity":
            return math.inf
        raise self.error(f"{self.where}: {name} is not a JSON number")
