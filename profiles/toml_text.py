"""This module reads the TOML of profiles, with limits for untrusted files, and writes it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from rlx_jax.errors import MissingFileError, ProfileError, StorageError, quote
from rlx_jax.io.files import open_regular
from rlx_jax.profiles.check import Scalar

# The largest size of a profile, in bytes.
MAX_BYTES = 64 * 1024

# The limit of nested brackets. The parser recurses, so this is checked before it runs.
MAX_DEPTH = 32

# The limit of dots in one key. The parser takes quadratic time in them, so this is checked before it runs.
MAX_DOTS = 16

# The tokens for counting nesting and dots: strings and comments (skipped), brackets, dots, and the ends of keys.
# Possessive quantifiers keep the scan linear. In TOML three to five quotes close a string; up to two of them belong to
# it. The parser itself refuses malformed text, at the same position.
_TOKEN = re.compile(
    r'''"""(?:[^"\\]|\\.|""?(?!"))*+(?:"{3,5})?'''
    r"""|'''(?:[^']|''?(?!'))*+(?:'{3,5})?"""
    r"""|"(?:[^"\\\n]|\\[^\n])*+"?"""
    r"""|'[^'\n]*+'?"""
    r"""|\#[^\n]*+"""
    r"""|[\[\]{}.,=\n]""",
    re.DOTALL,
)
_CURLY_QUOTES = "“”„‟«»‘’"
_POSITION_SUFFIX = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a profile file, at most one more than `MAX_BYTES`, so that `parse` detects a larger file.

    Raises:
        MissingFileError: there is no such file.
        StorageError: it is a directory, a pipe or a device, or cannot be read.
    """
    name = os.fspath(path)
    try:
        descriptor = open_regular(name, f"compile profile {quote(name)}", StorageError)
    except MissingFileError as error:
        raise MissingFileError(f"{error}; for a preset use CompileProfile.preset(name)") from error
    with open(descriptor, "rb") as file:
        return file.read(MAX_BYTES + 1)


def parse(data: bytes, source: str) -> dict[str, Any]:
    """Return the tables of a profile's text as nested dicts.

    Args:
        data: the bytes of the text.
        source: its name, for messages.

    Raises:
        ProfileError: the text exceeds a limit, is not UTF-8, or is not TOML; the message has the line and the column,
            both counted from 1.
    """
    if len(data) > MAX_BYTES:
        where = _position(data, MAX_BYTES, source)
        raise ProfileError(f"{where}: a profile has at most {MAX_BYTES} bytes; this has more")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ProfileError(f"{source}, line 1, column 1: a byte order mark; save the file as UTF-8 without it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{_position(data, error.start, source)}: not UTF-8: {error.reason}") from error
    _check_nesting(text, source)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib also raises ValueError for integers of thousands of digits
        raise ProfileError(_syntax_message(str(error), text, source)) from error


def _check_nesting(text: str, source: str) -> None:
    """Raise a `ProfileError` if the text has too many nested brackets, or too many dots in a key."""
    depth = dots = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth, dots = depth + 1, 0
            case "]" | "}":
                depth, dots = max(depth - 1, 0), 0
            case ".":
                dots += 1
            case "," | "=" | "\n":
                dots = 0
        if depth > MAX_DEPTH or dots > MAX_DOTS:
            limit = f"{MAX_DEPTH} nested brackets" if depth > MAX_DEPTH else f"{MAX_DOTS} dots in a key"
            raise ProfileError(f"{_position(text, token.start(), source)}: a profile has at most {limit}")


def _position(text: str | bytes, offset: int, source: str) -> str:
    """Return `source` with the line and the column of `text[offset]`.

    A column counts characters, with one replacement character for each undecodable sequence.
    """
    before = text[:offset]
    lines = before.decode("utf-8", "replace").split("\n") if isinstance(before, bytes) else before.split("\n")
    return f"{source}, line {len(lines)}, column {len(lines[-1]) + 1}"


def _syntax_message(message: str, text: str, source: str) -> str:
    """Return the message of the TOML parser with our form of the position, and a hint for typographic quotes."""
    match = _POSITION_SUFFIX.fullmatch(message)
    problem = match[1] if match else message
    if match and match[2]:
        position = f"{source}, line {match[2]}, column {match[3]}"
    else:
        position = _position(text, len(text), source) if match else source
    after = text.split("\n")[int(match[2]) - 1][int(match[3]) - 1 :] if match and match[2] else ""
    is_curly = after and after[0] in _CURLY_QUOTES
    hint = f' at {quote(after[:1])}; write strings in straight quotes, "…"' if is_curly else ""
    return f"{position}: {problem if len(problem) <= 120 else problem[:119] + '…'}{hint}"


def dump(tables: Mapping[str, Any]) -> str:
    """Return nested mappings of scalars and arrays as TOML; empty tables are left out."""
    return "\n".join(_table_blocks(tables, ""))


def _table_blocks(table: Mapping[str, Any], path: str) -> list[str]:
    """Return the TOML of a table and its nested tables, one text for each header."""
    # Scalars come first: after the header of a nested table they would belong to that table.
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    blocks = []
    if scalars:
        header = [f"[{path}]"] if path else []
        lines = [*header, *(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in scalars.items())]
        blocks.append("".join(f"{line}\n" for line in lines))
    for key, value in table.items():
        if isinstance(value, Mapping):
            blocks += _table_blocks(value, f"{path}.{key}" if path else key)
    return blocks


def _toml_key(key: str) -> str:
    """Return a key as TOML, in quotes unless it is a plain word."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Scalar | tuple[Scalar, ...]) -> str:
    """Return a scalar or an array as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # the schema allows printable text only, so that no other character needs an escape
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
