"""JSON without surprises.

The parser of the standard library recurses as deep as the text says, keeps the last of two equal
names, takes NaN, and raises a bare ValueError for a long number. For files that come from elsewhere
each of these is an error here, with the byte where it happened.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlx_jax.errors import FormatError, quote
from rlx_jax.io import limits

# Possessive, and an open string runs to the end of the text: linear on any input.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]|-?(?:NaN|Infinity)|-?[0-9][0-9.eE+-]*+', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, where: str, error: type[FormatError], infinity: bool = False) -> dict[str, Any]:
    """The JSON object that `raw` holds.

    Numbers are `int` or finite `float`; names within an object differ.

    Args:
        raw: the whole file.
        where: the file, for messages.
        error: what to raise.
        infinity: whether `Infinity` is a number too, as Python's json writes it.

    Raises:
        error: not UTF-8, not JSON, not an object, nested deeper than `MAX_JSON_DEPTH`, a name given twice,
            NaN, Infinity, or a number that is too long or too large.
        LimitError: more than `MAX_JSON_VALUES` values.
    """
    text = decode_text(raw, where, error)
    _scan(text, where, error, infinity)
    repeated: list[_Repeated] = []
    try:
        value = json.loads(text, object_pairs_hook=functools.partial(_members, repeated))
    except json.JSONDecodeError as cause:
        problem = cause.msg.removesuffix(" at")
        raise error(f"{where}: not JSON: {problem} at byte {offset(text, cause.pos)}") from cause
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    if repeated:
        twice = next(_path((trail, f".{v.name}")) for trail, v in _walk(value) if isinstance(v, _Repeated))
        raise error(f"{where}: {quote(twice)} is given twice")
    if _SURROGATE.search(text):
        _refuse_surrogates(value, where, error)
    return value


def parse(raw: bytes, where: str, error: type[FormatError], max_values: int, limit_name: str) -> Any:
    """The JSON value in `raw`, of any type: strict, and quick enough for a file of many megabytes.

    Raises:
        error: not UTF-8, not JSON, nested deeper than `limits.MAX_JSON_DEPTH`, a name given twice, NaN, Infinity.
        LimitError: it may hold more than `max_values` values.
    """
    separators = sum(raw.count(c) for c in b",[{")  # hardly more than there are values
    limits.at_most(separators, max_values, limit_name, f"{where}: the number of JSON values")

    def refuse(constant: str) -> None:
        raise error(f"{where}: {constant} is not a JSON number")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise error(f"{where}: {quote(name)} is given twice in one object")
        return found

    text = decode_text(raw, where, error)
    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=members)
    except RecursionError as cause:
        raise error(f"{where}: nested deeper than {limits.MAX_JSON_DEPTH}") from cause
    except FormatError:
        raise
    except ValueError as cause:  # JSONDecodeError, and a number of thousands of digits
        raise error(f"{where}: not JSON: {cause}") from cause
    level = [value]
    for _ in range(limits.MAX_JSON_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return value
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    raise error(f"{where}: nested deeper than {limits.MAX_JSON_DEPTH}")


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


def offset(text: str, position: int) -> int:
    """The byte at which character `position` of `text` starts.

    >>> offset("é!", 1)
    2
    """
    return len(text[:position].encode())


def whole_number(digits: str) -> int | float:
    """What the digits of a whole number stand for. -0 is a float: no size is written like that.

    >>> whole_number("12"), whole_number("-0")
    (12, -0.0)
    """
    return -0.0 if digits == "-0" else int(digits)


def is_text(value: str) -> bool:
    """Whether `value` is Unicode text, free of the lone surrogates that JSON can spell."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scan(text: str, where: str, error: type[FormatError], infinity: bool) -> None:
    """Refuse what the standard parser would accept, or fail on in its own way, before it runs."""
    depth, values = 0, 1
    for token in _TOKEN.finditer(text):
        first, problem = text[token.start()], ""
        if first == '"':
            continue
        if first in ",[{":
            values += 1
            depth += first != ","
            if depth > limits.MAX_JSON_DEPTH:
                problem = f"nested deeper than limits.MAX_JSON_DEPTH = {limits.MAX_JSON_DEPTH}"
        elif first in "]}":
            depth -= 1
        elif not (infinity and token[0] == "Infinity"):
            problem = _number_problem(token[0])
        if problem:
            raise error(f"{where}: {problem} at byte {offset(text, token.start())}")
    limits.at_most(values, limits.MAX_JSON_VALUES, "limits.MAX_JSON_VALUES", f"{where}: the number of JSON values")


def _number_problem(token: str) -> str:
    if token.endswith(("NaN", "Infinity")):
        return f"{token} is not a JSON number"
    unsigned = token.lstrip("-")
    digits = len(unsigned) - len(unsigned.lstrip("0123456789"))
    if digits > limits.MAX_JSON_DIGITS:  # the parser's int() refuses thousands, and takes quadratic time before
        return f"a number of {digits} digits"
    try:
        return "" if math.isfinite(float(token)) else f"{quote(token)} is too large a number"
    except ValueError:
        return ""  # not a number at all: the parser says so


class _Repeated(dict[str, Any]):
    """An object in which `name` is given twice. Its place in the file is known only later."""

    name: str


def _members(repeated: list[_Repeated], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    twice = _Repeated(members)
    twice.name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    repeated.append(twice)
    return twice


_Trail = tuple[Any, str] | None
"""Where a value stands: (trail of the parent, own segment). Joined on error only, so long names cost nothing."""


def _walk(value: Any) -> Iterator[tuple[_Trail, Any]]:
    """Each value inside `value` with its trail, without recursion."""
    stack: list[tuple[_Trail, Any]] = [(None, value)]
    while stack:
        trail, value = stack.pop()
        yield trail, value
        if isinstance(value, dict):
            stack += [((trail, f".{name}"), item) for name, item in value.items()]
        elif isinstance(value, list):
            stack += [((trail, f"[{i}]"), item) for i, item in enumerate(value)]


def _path(trail: _Trail) -> str:
    segments = []
    while trail:
        trail, segment = trail
        segments.append(segment)
    return "".join(reversed(segments)).removeprefix(".")


def _refuse_surrogates(value: dict[str, Any], where: str, error: type[FormatError]) -> None:
    for trail, item in _walk(value):
        texts = [item] if isinstance(item, str) else item if isinstance(item, dict) else []
        if not all(is_text(text) for text in texts):
            raise error(f"{where}: half of a surrogate pair in {quote(_path(trail)) if trail else 'a name'}")
