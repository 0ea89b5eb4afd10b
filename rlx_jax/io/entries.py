"""`EntryStore`: a directory of checksummed entries, bounded in size, for concurrent use by several processes.

An entry is one file: a magic line, the SHA-256 digest of the payload, the payload. A write goes to a temporary file,
which is renamed over the entry. So a reader sees an old entry, a new one or none, and no lock is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import time

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import IntegrityError, LimitError, StorageError, quote
from rlx_jax.io.atomic import write_synced

MAGIC = b"rlx_jax entry 1\n"
_HEADER = len(MAGIC) + hashlib.sha256().digest_size
_ENTRY = re.compile(r"[0-9a-f]{64}\.entry")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.entry\.\d+-[0-9a-f]{8}")
# A temporary file of this age belongs to a process that was killed: no write takes that long.
_ABANDONED_SECONDS = 3600


@dataclass(frozen=True)
class EntryStore:
    """Entries of a directory under keys of 64 hexadecimal digits.

    Attributes:
        directory: an absolute path. A missing directory is created, accessible to its owner alone.
        max_bytes: the limit for all entries together; the least recently used ones are removed first.
    """

    directory: str
    max_bytes: int

    def read(self, key: str) -> bytes | None:
        """Return the payload of an entry and mark it as used; return None if there is no such entry.

        Raises:
            IntegrityError: the entry is damaged, or others may have written it.
            StorageError: the directory cannot be made, or others can write it. Other OSError: the system refuses to
                read the entry.
        """
        self._check_directory()
        path = self._path(key)
        try:
            # Without O_NONBLOCK, opening a FIFO waits for its writer.
            flags = (
                os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
            )
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise IntegrityError(f"{quote(path)}: not a regular file")
            if reason := _privacy_problem(status):
                raise IntegrityError(f"{quote(path)}: {reason}")
            if status.st_size > _HEADER + self.max_bytes:
                raise IntegrityError(
                    f"{quote(path)}: {status.st_size} bytes, over the cache's limit of {self.max_bytes}"
                )
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read()
        finally:
            os.close(descriptor)
        payload = content[_HEADER:]
        if content[:_HEADER] != _header(payload):
            raise IntegrityError(f"{quote(path)}: {len(content)} bytes that do not match the digest in the header")
        with contextlib.suppress(OSError):  # another process has replaced or removed it
            os.utime(path)
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Write an entry, replacing any under its key; then remove entries until all are within the limit.

        Raises:
            LimitError: the payload alone is over the limit.
            OSError: the system refuses (`StorageError`: as `read`).
        """
        if len(payload) > self.max_bytes:
            raise LimitError(f"{len(payload)} bytes to cache, the limit is {self.max_bytes}")
        self._check_directory()
        path = self._path(key)
        temporary = os.path.join(self.directory, f".{os.path.basename(path)}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            write_synced(temporary, _header(payload) + payload)
            os.chmod(temporary, 0o600)  # the umask may let a group write
            if os.path.isdir(path) and not os.path.islink(path):  # a rename cannot replace it
                shutil.rmtree(path)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._prune()

    def has(self, key: str) -> bool:
        """Return whether there is an entry, sound or not."""
        return os.path.exists(self._path(key))

    def _path(self, key: str) -> str:
        """Return the path of the entry under a key."""
        return os.path.join(self.directory, f"{key}.entry")

    def _check_directory(self) -> None:
        """Create the directory if it is missing, and refuse one that other users can write to.

        Raises:
            StorageError: it cannot be created, it belongs to another user, or others can write it.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            reason = _privacy_problem(os.stat(self.directory))
        except OSError as error:
            raise StorageError(f"{quote(self.directory)}: {error.strerror}") from error
        if reason:
            raise StorageError(f"{quote(self.directory)}: {reason}")

    def _prune(self) -> None:
        """Remove the entries used least recently until the others fit, and temporary files of killed processes."""
        entries, now = [], time.time()
        with os.scandir(self.directory) as files:
            for file in files:
                with contextlib.suppress(OSError):  # removed by another process
                    status = file.stat(follow_symlinks=False)
                    if _ENTRY.fullmatch(file.name):
                        entries.append((status.st_mtime_ns, status.st_size, file.path))
                    elif _TEMPORARY.fullmatch(file.name) and now - status.st_mtime > _ABANDONED_SECONDS:
                        os.unlink(file.path)
        surplus = sum(size for _, size, _ in entries) - self.max_bytes
        for _, size, path in sorted(entries):
            if surplus <= 0:
                return
            with contextlib.suppress(OSError):  # skip an entry that cannot be removed
                os.unlink(path)
                surplus -= size


def _header(payload: bytes) -> bytes:
    """Return the magic line and the digest that precede a payload in its file."""
    return MAGIC + hashlib.sha256(payload).digest()


def _privacy_problem(status: os.stat_result) -> str:
    """Return why others may have written a file or a directory, or the empty string if only this user can."""
    if not hasattr(os, "geteuid"):  # Windows: the user's profile is private by its access control list
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, this process is of user {os.geteuid()}"
    return "others can write it" if status.st_mode & 0o022 else ""
