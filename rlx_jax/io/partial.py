"""What came of a file before a transfer stopped, kept beside the cache's files so that the next call goes on from it.

Its name is the digest that the whole file is to have, and nothing in it is trusted: it is hashed again, and where the
whole has another digest all of it is asked for anew. Who writes to it holds a lock on it; another one that wants the
same file writes to one of its own, which nobody takes up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rlx_jax.errors import StorageError, quote

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KEPT_BYTES = 2**20
"""Of a transfer that fails with fewer bytes nothing is kept."""
ABANDONED_S = 86_400
"""A transfer to which nothing was added for so many seconds, of a file that nobody wants now, is nobody's."""

_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
_ENDING = ".rlx_jax.incomplete"


@dataclass(frozen=True)
class PartialFile:
    """A file that is being written. `shared`: another call may go on from it, and it begins with what one left."""

    path: Path
    file: BinaryIO
    shared: bool

    def nbytes(self) -> int:
        """Bytes that it has, those of an earlier call and those not written out yet among them."""
        with contextlib.suppress(OSError):  # of a full disk; it has what is there
            self.file.flush()
        return os.fstat(self.file.fileno()).st_size

    def move_to(self, target: Path) -> None:
        """Put it in its place, whole.

        Raises:
            StorageError: another file is where it was, or none. OSError: the disk is full or refuses.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        if self.shared and not _is_at(self.file, self.path):
            raise StorageError(
                f"{quote(self.path)}: expected the file that was being written, found that another process removed or "
                "replaced it; nothing was put in its place: try again"
            )
        if not self.shared:
            self.file.close()  # Windows, which has none that are shared, moves no open file
        os.replace(self.path, target)

    def close(self, keep: bool) -> None:
        """Done with it; without `keep` it is removed. What was moved to its place is not touched."""
        gone = self.file.closed or not _is_at(self.file, self.path)
        removed = not (keep or gone)
        if removed and self.shared:
            self.path.unlink(missing_ok=True)  # while the lock is held: afterwards it may be another's
        self.file.close()
        if removed and not self.shared:
            self.path.unlink(missing_ok=True)  # once it is closed: Windows removes no open file


def partial_path(blobs: Path, digest: str) -> Path:
    """Where what came of the file of a digest is kept."""
    return blobs / f"{digest}{_ENDING}"


def open_partial(blobs: Path, digest: str | None) -> PartialFile:
    """The file to write one of a digest to: what an earlier call left of it, unless somebody writes to that now; or,
    where there is no digest to check it with or no lock to hold it by, an empty one.

    Raises:
        OSError: the disk is full or refuses.
    """
    if digest is not None and fcntl is not None:
        path = partial_path(blobs, digest)
        file = open(os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666), "r+b")
        held = _lock(file)
        if held and _is_at(file, path):
            return PartialFile(path, file, True)
        with file:
            if held is None and os.fstat(file.fileno()).st_size == 0:  # nobody will ever write to it
                path.unlink(missing_ok=True)
    path = blobs / f"{secrets.token_hex(8)}.incomplete"
    return PartialFile(path, open(path, "xb"), False)


def remove_abandoned(blobs: Path, wanted: Collection[str]) -> None:
    """Remove what nobody has written to for a day and nobody holds, but for parts of files whose digests are
    `wanted`."""
    for path in blobs.glob("*.incomplete"):
        if path.name.removesuffix(_ENDING) in wanted:
            continue
        with contextlib.suppress(OSError):
            if _is_old(path.stat()):
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    """Remove an old file, unless somebody holds it, for one who hashes it again writes nothing, or has just had it."""
    if fcntl is None:  # nobody holds any, and Windows removes no open file
        path.unlink()
        return
    with open(os.open(path, os.O_RDWR | _FLAGS), "r+b") as file:
        if _lock(file) is not False and _is_at(file, path) and _is_old(os.fstat(file.fileno())):
            path.unlink()


def _is_old(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > ABANDONED_S


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether a path still leads to an open file: who held it before may have moved it to its place, or removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _lock(file: BinaryIO) -> bool | None:
    """Whether the file is held from now on; False: somebody else holds it; None: its file system has no such locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
