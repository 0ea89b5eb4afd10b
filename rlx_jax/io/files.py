"""Open files of untrusted origin safely: `resolve` and `check_name` for names, `open_regular` and readers for files.

A path that the caller passes is trusted. A name from a file or a directory is not, and must stay inside its directory.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import re
import stat
from collections import Counter
from typing import Any, Literal

from rlx_jax.errors import ConfigError, FormatError, MissingFileError, PathEscapeError, RlxError, StorageError, quote
from rlx_jax.io import limits

# Links in a model directory: follow those that stay inside it, or refuse all.
Links = Literal["follow", "refuse"]

_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def list_directory(directory: str) -> list[str]:
    """Return the names in a directory, sorted.

    Raises:
        MissingFileError, StorageError: it does not exist, or the system refuses.
    """
    try:
        return sorted(os.listdir(directory))
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise storage_error(cause, quote(directory)) from cause


def files_below(directory: str) -> list[str]:
    """Return the paths of all files and links below a directory, relative to it and sorted."""
    paths = []
    for folder, inside, names in os.walk(directory):
        # `os.walk` lists links to directories as directories.
        links = [name for name in inside if os.path.islink(os.path.join(folder, name))]
        paths += [os.path.relpath(os.path.join(folder, name), directory) for name in (*names, *links)]
    return sorted(paths)


def open_regular(path: str, where: str, error: type[RlxError]) -> int:
    """Return a descriptor of the regular file `path`, for reading. The caller closes it.

    Raises:
        MissingFileError: no such file.
        error: a directory, a FIFO, a device.
        StorageError: the system refuses; the message has its reason.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        if isinstance(cause, FileNotFoundError) and os.path.islink(path):
            raise MissingFileError(f"{where}: no such file: it is a link to {quote(os.readlink(path))}") from cause
        raise storage_error(cause, where) from cause
    refuse_special(status, where, error)  # before opening: opening a device can act on it
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as cause:
        raise storage_error(cause, where) from cause
    try:
        refuse_special(os.fstat(descriptor), where, error)  # the path may have been replaced since `os.stat`
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_special(status: os.stat_result, where: str, error: type[RlxError]) -> None:
    """Raise `error` unless `status` describes a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise error(f"{where}: expected a regular file, found {kind}")


def storage_error(cause: OSError | ValueError, where: str) -> StorageError:
    """Return an error of the system as an exception of this package."""
    if isinstance(cause, ValueError) or cause.errno in (errno.ENOENT, errno.ENOTDIR):
        return MissingFileError(f"{where}: no such file")
    return StorageError(f"{where}: {cause.strerror or type(cause).__name__}")


def read_at(descriptor: int, buffer: memoryview, start: int, where: str) -> int:
    """Fill `buffer` with the bytes of a file from `start` on; return how many there are before the end of the file."""
    num_read = 0
    while num_read < len(buffer):
        try:  # one call takes less than 2 GiB
            count = os.preadv(descriptor, [buffer[num_read : num_read + 2**30]], start + num_read)
        except OSError as cause:
            raise storage_error(cause, where) from cause
        if count == 0:
            break
        num_read += count
    return num_read


def read_small_file(path: str, where: str, limit: limits.SizeLimit, error: type[FormatError]) -> bytes:
    """Return all bytes of a small file.

    Raises:
        LimitError: more than `limit` bytes.
        MissingFileError, StorageError, error: as `open_regular`.
    """
    descriptor = open_regular(path, where, error)
    try:
        size = os.fstat(descriptor).st_size
        limits.check_limit(size, limit, f"{where}: the size in bytes")
        buffer = bytearray(size)
        return bytes(buffer[: read_at(descriptor, memoryview(buffer), 0, where)])
    finally:
        os.close(descriptor)


def resolve(directory: str, name: str, links: Links = "follow") -> str:
    """Return the real path of the file `name` in `directory`.

    Links that stay inside the directory are followed. So are links of a Hugging Face cache, where
    `models--x/snapshots/<revision>/file` points to `models--x/blobs/<hash>`, which may be a link into the `blobs` that
    all models of the cache share.

    Args:
        directory: the model directory, itself trusted.
        name: a relative path with `/` as separator. A name that was read from a file needs `check_name` first.
        links: `"refuse"` refuses symbolic and hard links, for directories that come from an archive.

    Raises:
        ConfigError: the file is not regular.
        PathEscapeError: it leads out of the directory, or is a refused link.
        MissingFileError: no such file.
    """
    where = quote(name)
    root = os.path.realpath(directory)
    path = os.path.join(root, name)
    if links == "refuse":
        _refuse_links(root, name)
    real = os.path.realpath(path)
    if not any(os.path.commonpath([allowed, real]) == allowed for allowed in _allowed_roots(root)):
        raise PathEscapeError(
            f"{where} leads to {quote(real)}, outside its directory; put the file itself there, or pass its path"
        )
    try:
        status = os.stat(real)
    except OSError as cause:
        raise storage_error(cause, where) from cause
    refuse_special(status, where, ConfigError)
    return real


def check_name(name: str) -> None:
    """Check that `name` is a plain relative file name on Linux, macOS and Windows.

    Raises:
        PathEscapeError: `..`, an absolute path, a drive, a backslash, a device.
        ConfigError: empty, a part that is empty or `.` or ends in a dot or space, a control character.
    """
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ":" in name or ".." in parts:
        raise PathEscapeError(f"{quote(name)} leads out of the directory; expected the name of a file inside it")
    if any(part.split(".")[0].strip().casefold() in _DEVICES for part in parts):
        raise PathEscapeError(f"{quote(name)} is the name of a device on Windows")
    if any(not part or part != part.rstrip(". ") for part in parts) or not name.isprintable():
        raise ConfigError(f"{quote(name)} is not a file name")


def _allowed_roots(root: str) -> list[str]:
    """Return the directories that may contain the files of the model directory `root` (a real path)."""
    parts = root.split(os.sep)
    for i in range(1, len(parts) - 1):
        if parts[i] == "snapshots" and parts[i - 1].startswith("models--"):
            # Caches with shared blobs have this marker file; without it, the directory may belong to anyone.
            shared_blobs = os.sep.join([*parts[: i - 1], "blobs"])
            has_marker = os.path.isfile(os.path.join(shared_blobs, ".huggingface-shared-blobs"))
            return [root, os.sep.join([*parts[:i], "blobs"]), *([shared_blobs] if has_marker else [])]
    return [root]


def _refuse_links(root: str, name: str) -> None:
    """Raise `PathEscapeError` if `name` in `root` passes a symbolic link, or is a file with several hard links."""
    path = root
    for part in name.split("/"):
        path = os.path.join(path, part)
        try:
            status = os.lstat(path)
        except OSError:
            return  # missing: the caller raises the error
        if stat.S_ISLNK(status.st_mode):
            raise PathEscapeError(f"{quote(name)} goes through a symbolic link, and links are refused")
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise PathEscapeError(f"{quote(name)} has {status.st_nlink} hard links, and links are refused")


# `parse`: a strict JSON parser for files of untrusted origin, used for all JSON files.


# Possessive quantifiers, and a string without an end matches up to the end of the text: linear time on any input.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, where: str, error: type[FormatError], infinity: bool = False) -> dict[str, Any]:
    """Return the JSON object in `raw`, of at most `limits.MAX_JSON_VALUES` values; arguments and errors as `parse`."""
    value = parse(raw, where, error, limits.bound("MAX_JSON_VALUES"), infinity=infinity)
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def parse(
    raw: bytes, where: str, error: type[FormatError], max_values: limits.SizeLimit, *, infinity: bool = False,
    repeated_error: type[RlxError] | None = None, start: int = 0,
) -> Any:  # fmt: skip
    """Return the JSON value in `raw`, of any type.

    Numbers become `int` or finite `float`, -0 a float. Names within an object are unique.

    Args:
        raw: the text in UTF-8.
        where: the file, for messages.
        error: the exception to raise.
        max_values: the maximum number of values.
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
    limits.check_limit(values, max_values, f"{where}: the number of JSON values")
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
