"""Profiles as text: reading `*.rlx.toml` within limits, and writing it."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from typing import Any

from rlx_jax.errors import MissingFileError, ProfileError, StorageError, quote
from rlx_jax.profiles.check import Scalar

# Bytes of one profile.
MAX_BYTES = 64 * 1024

# Nested brackets of a profile. The parser recurses, so this is checked before it runs.
MAX_DEPTH = 32

# Dots in one key of a profile. The parser takes quadratic time in them, so this is checked before it runs.
MAX_DOTS = 16

# What decides about nesting and dots: strings and comments (skipped), brackets, dots, and what ends a key.
# Possessive quantifiers keep this linear. A closing run of three to five quotes is TOML's rule: up to two of
# them belong to the string. Whatever is malformed here is refused by the parser at that very place.
_TOKEN = re.compile(
    r'''"""(?:[^"\\]|\\.|""?(?!"))*+(?:"{3,5})?'''
    r"""|'''(?:[^']|''?(?!'))*+(?:'{3,5})?"""
    r"""|"(?:[^"\\\n]|\\[^\n])*+"?"""
    r"""|'[^'\n]*+'?"""
    r"""|\#[^\n]*+"""
    r"""|[\[\]{}.,=\n]""",
    re.DOTALL,
)
_CURLY = "“”„‟«»‘’"
_WHERE = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a profile file, at most one more than `MAX_BYTES`.

    Raises:
        MissingFileError: there is no such file.
        StorageError: it is a directory, a pipe or a device, or cannot be read.
    """
    name = os.fspath(path)
    source = f"compile profile {quote(name)}"
    try:
        if stat.S_ISREG(os.stat(name).st_mode):  # looked at first, because opening a pipe would block
            with open(name, "rb") as file:
                return file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise MissingFileError(f"{source}: no such file; for a preset use CompileProfile.preset(name)") from error
    except OSError as error:
        raise StorageError(f"{source}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StorageError(f"{source}: no path of a file: {error}") from error  # a NUL in it
    raise StorageError(f"{source}: expected a regular file, found a directory, a pipe or a device")


def parse(data: bytes, source: str) -> dict[str, Any]:
    """The tables of a profile's text; `source` names it in messages.

    Raises:
        ProfileError: over a limit, not UTF-8, or not TOML; with the line and the column, both from 1.
    """
    if len(data) > MAX_BYTES:
        raise ProfileError(f"{_place(data, MAX_BYTES, source)}: a profile has at most {MAX_BYTES} bytes; this has more")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ProfileError(f"{source}, line 1, column 1: a byte order mark; save the file as UTF-8 without it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{_place(data, error.start, source)}: not UTF-8: {error.reason}") from error
    _check_nesting(text, source)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise ProfileError(_syntax_message(str(error), text, source)) from error


def _check_nesting(text: str, source: str) -> None:
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
            raise ProfileError(f"{_place(text, token.start(), source)}: a profile has at most {limit}")


def _place(text: str | bytes, offset: int, source: str) -> str:
    """`source` with the line and the column of `text[offset]`; a column counts bytes in undecodable text."""
    before = text[:offset]
    lines = before.decode("utf-8", "replace").split("\n") if isinstance(before, bytes) else before.split("\n")
    return f"{source}, line {len(lines)}, column {len(lines[-1]) + 1}"


def _syntax_message(message: str, text: str, source: str) -> str:
    found = _WHERE.fullmatch(message)
    what = found[1] if found else message
    if found and found[2]:
        place = f"{source}, line {found[2]}, column {found[3]}"
    else:
        place = _place(text, len(text), source) if found else source
    after = text.split("\n")[int(found[2]) - 1][int(found[3]) - 1 :] if found and found[2] else ""
    hint = f' at {quote(after[:1])}; strings stand in straight quotes, "…"' if after[:1] in _CURLY and after else ""
    return f"{place}: {what if len(what) <= 120 else what[:119] + '…'}{hint}"


def dump(tables: Mapping[str, Any]) -> str:
    """TOML of nested mappings of scalars and arrays; an empty table is left out."""
    return "\n".join(_blocks(tables, ""))


def _blocks(table: Mapping[str, Any], path: str) -> list[str]:
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    blocks = []
    if scalars:
        header = [f"[{path}]"] if path else []
        blocks.append("".join(f"{line}\n" for line in (*header, *(f"{k} = {_toml(v)}" for k, v in scalars.items()))))
    for key, value in table.items():
        if isinstance(value, Mapping):
            blocks += _blocks(value, f"{path}.{key}" if path else key)
    return blocks


def _toml(value: Scalar | tuple[Scalar, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # printable by the schema, so that these two are all there is to escape
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
