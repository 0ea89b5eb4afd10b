"""Models of the Hugging Face Hub by name, fetched file by file into the cache that huggingface_hub keeps.

What one of the two has fetched the other finds. Names in the cache come from checked digests and never from what a
server says beside them, and a file is not in its place before all of it is there and its digest is right.

    models--org--name/refs/main                   the commit of a branch or tag
    models--org--name/snapshots/<commit>/…        links
    models--org--name/blobs/<digest>              the files
    models--org--name/rlx_jax/<commit>.json       which files the commit has: what a cache without network lacks
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rlx_jax.errors import (
    HubUnreachableError,
    IntegrityError,
    NoSpaceError,
    RequestError,
    RlxError,
    RlxWarning,
    StorageError,
    quote,
    shown,
)
from rlx_jax.io import limits
from rlx_jax.io.files import check_name, resolve
from rlx_jax.io.hub_listing import Listed, cached_files, keep_files, list_files, listing_path
from rlx_jax.io.transfer import WAITS_S, Remote, Text, Wanted, fill, is_offline, run_together

Told = Callable[[str, int, int], None]
"""See `rlx_jax.compiler.executable.Progress`."""

ABANDONED_S = 86_400
"""A transfer to which nothing was added for so many seconds is nobody's."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


def is_name(path: object) -> bool:
    """Whether a string may name a model of the Hub.

    >>> [is_name(p) for p in ("org/name", "name", "./org/name", "a/b/c", "org/name.git")]
    [True, False, False, False, False]
    """
    if not isinstance(path, str) or not _NAME.fullmatch(path):
        return False
    return not ("--" in path or ".." in path or path.endswith((".", "-", ".git")))


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model. Its files are fetched when they are asked for.

    Attributes:
        path: the directory in the cache that holds what was fetched.
        files: every file of the commit by its path.
        offline: nothing is fetched, for a reason that messages give.
    """

    name: str
    commit: str
    path: Path
    files: Mapping[str, Listed] = field(repr=False)
    offline: str
    remote: Remote
    progress: Told | None = field(default=None, repr=False)

    def has(self, name: str) -> bool:
        """Whether the commit has such a file."""
        return name in self.files

    def fetch(self, name: str, limit: int | None = None, limit_name: str = "") -> None:
        """Have a file of the commit in `path`, whole and checked.

        Args:
            limit: bytes that it may have, which messages call `limit_name`.

        Raises:
            LimitError: it is larger. IntegrityError: other bytes came than the commit has, or lie in the cache.
            HubError: the Hub refuses or cannot be reached. NoSpaceError, StorageError: the disk is full or refuses.
        """
        check_name(name)
        listed, where = self.files[name], self._where(name)
        if limit is not None and listed.nbytes is not None:
            limits.at_most(listed.nbytes, limit, limit_name, f"{where}: the size in bytes")
        if self.is_here(name):
            return
        self._check_online(name)
        self._check_room([name])
        with _shown(self.progress, name, listed.nbytes) as told:
            self._fetch(name, limit, limit_name, told, threading.Event())

    def fetch_all(self, names: Sequence[str]) -> None:
        """As `fetch` of each, several at a time. What goes wrong with one of them ends the others.

        Raises:
            NoSpaceError: there is no room for all of them; nothing was fetched. Others: as `fetch`.
        """
        for name in names:
            check_name(name)
        lacking = [name for name in dict.fromkeys(names) if not self.is_here(name)]
        if len(lacking) < 2:
            for name in lacking:
                self.fetch(name)
            return
        self._check_online(lacking[0])
        self._check_room(lacking)
        sizes = [self.files[name].nbytes for name in lacking if self._blob(name) is None]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        with _shown(self.progress, f"{len(lacking)} files", total) as told:
            run_together(lambda name, stop: self._fetch(name, None, "", told, stop), lacking)

    def part(self, name: str, first: int, nbytes: int) -> bytes:
        """Bytes of a file, from `first` on, without the rest of it. No digest vouches for them; they are to look at.

        Raises:
            HubError: as `fetch`. IntegrityError: others came than were asked for.
        """
        check_name(name)
        if self.is_here(name):
            with self._cache_errors(name), open(resolve(os.fspath(self.path), name), "rb") as file:
                file.seek(first)
                return file.read(nbytes)
        self._check_online(name)
        sink = Text(lambda count: None)
        fill(self.remote, Wanted(self._url(name), self._where(name), nbytes, first), sink, lambda count: None)
        return bytes(sink.text)

    def is_here(self, name: str) -> bool:
        """Whether a file of the commit is in `path`, by its length."""
        size, listed = _size(self.path / name), self.files[name]
        return size is not None and listed.nbytes in (None, size)

    def _where(self, name: str) -> str:
        return quote(f"{self.name}/{name}")

    def _url(self, name: str) -> str:
        return f"{self.remote.endpoint}/{self.name}/resolve/{self.commit}/{urllib.parse.quote(name)}"

    def _blob(self, name: str) -> Path | None:
        """The file in the cache that a file of the commit leads to, if it is whole."""
        listed = self.files[name]
        if listed.digest is None or listed.nbytes is None:
            return None
        known = self.path.parent.parent / "blobs" / listed.digest
        return known if _size(known) == listed.nbytes else None

    def _check_online(self, name: str) -> None:
        """Something can be fetched."""
        if self.offline:
            size = _size(self.path / name)
            found = (
                "is not in the cache"
                if size is None
                else f"has {size} bytes in the cache, not {self.files[name].nbytes}"
            )
            raise HubUnreachableError(
                f"{self._where(name)} {found}, and {self.offline}: load it once with a connection"
            )

    def _check_room(self, names: Sequence[str]) -> None:
        """The disk of the cache has room for files."""
        with self._cache_errors(names[0]):
            free = shutil.disk_usage(next(p for p in self.path.parents if p.is_dir())).free
        needed = sum(self.files[name].nbytes or 0 for name in names if self._blob(name) is None)
        if needed > free:
            what = self._where(names[0]) if len(names) == 1 else f"{quote(self.name)}: {len(names)} files"
            raise NoSpaceError(f"{what}: {needed} bytes to fetch, {free} are free in {quote(self.remote.cache)}")

    def _fetch(
        self, name: str, limit: int | None, limit_name: str, told: Callable[[int], None], stop: threading.Event
    ) -> None:
        """Have a file, which is not there yet."""
        with self._cache_errors(name):
            blobs = self.path.parent.parent / "blobs"
            blobs.mkdir(parents=True, exist_ok=True)
            known = self._blob(name)
            if known is None:
                _remove_abandoned(blobs)
                wanted = Wanted(self._url(name), self._where(name), self.files[name].nbytes, stop=stop)
                known = _download(self, wanted, self.files[name], blobs, limit, limit_name, told)
            _link(known, self.path / name)

    @contextlib.contextmanager
    def _cache_errors(self, name: str) -> Iterator[None]:
        """What the system says of a file of the cache, as one of our errors."""
        try:
            yield
        except RlxError:
            raise
        except OSError as cause:
            full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            error = NoSpaceError if full else StorageError
            where = f"{self._where(name)}: the cache {quote(self.remote.cache)}"
            raise error(f"{where}: {cause.strerror or cause}") from cause


def open_snapshot(
    name: str, revision: str | None, token: str | bool | None, progress: Told | None, beside: str = ""
) -> Snapshot:
    """The commit that `revision` of the model `name` is: a branch, a tag or a commit; `main` by default.

    Without a connection it is what the cache has: with `HF_HUB_OFFLINE` set, else with a warning.

    Args:
        beside: what else was tried, for messages.

    Raises:
        MissingFileError: the Hub has no such model or revision. HubError: it refuses, or cannot be reached.
    """
    if revision is not None and not _is_revision(revision):
        raise RequestError(f"revision: expected a branch, a tag or a commit, got {shown(revision)}")
    remote, wanted = Remote.here(token), revision or "main"
    folder = Path(remote.cache) / f"models--{name.replace('/', '--')}"
    where = f"{quote(name)}: {beside}"
    try:
        kept = cached_files(folder, wanted)
    except IntegrityError:
        if is_offline():
            raise
        kept = None

    def snapshot(commit: str, files: Mapping[str, Listed], offline: str = "") -> Snapshot:
        return Snapshot(name, commit, folder / "snapshots" / commit, files, offline, remote, progress)

    if is_offline():
        if kept is None:
            raise HubUnreachableError(
                f"{where}revision {quote(wanted)} is not in the cache {quote(remote.cache)}, and HF_HUB_OFFLINE is "
                "set: load it once without, or name a local directory"
            )
        return snapshot(*kept, "HF_HUB_OFFLINE is set")
    if kept is not None and kept[0] == wanted and listing_path(folder, wanted).is_file():  # a commit does not change
        return snapshot(*kept)
    try:
        commit, files = list_files(remote, name, wanted, where, WAITS_S[:1] if kept is None else ())
    except HubUnreachableError as cause:
        if kept is None:
            raise
        warnings.warn(f"{cause}; opening what the cache has, commit {kept[0]}", RlxWarning, stacklevel=2)
        return snapshot(*kept, f"{remote.endpoint} cannot be reached")
    with contextlib.suppress(OSError):  # a cache that cannot be written to still serves what it has
        keep_files(folder, wanted, commit, files)
    return snapshot(commit, files)


def _is_revision(revision: object) -> bool:
    if not isinstance(revision, str) or not 0 < len(revision) <= 255:
        return False
    parts = revision.split("/")
    return revision.isprintable() and "\\" not in revision and all(p and not p.startswith(".") for p in parts)


# -- files -------------------------------------------------------------------------------------


def _size(path: Path) -> int | None:
    """Bytes of the file at `path`; None if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _remove_abandoned(blobs: Path) -> None:
    """Remove what processes that were killed left: files that nobody has written to for a day."""
    for path in blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


def _download(
    snapshot: Snapshot, wanted: Wanted, listed: Listed, blobs: Path, limit: int | None, limit_name: str,
    told: Callable[[int], None],
) -> Path:  # fmt: skip
    """The file of a digest, complete and checked. A transfer that stops goes on where it was."""
    where, new = wanted.where, blobs / f"{secrets.token_hex(8)}.incomplete"
    try:
        with open(new, "xb") as file:
            hashed = _Hashed(file, listed, limit, f"{where}: the size in bytes", limit_name)
            fill(snapshot.remote, wanted, hashed, told)
            file.flush()
            os.fsync(file.fileno())
        digest = hashed.digest()
        if listed.digest not in (None, digest):
            raise IntegrityError(
                f"{where}: what came has the digest {digest}, the commit says {listed.digest}: nothing was kept; try "
                f"again, and if it stays so do not trust {snapshot.remote.endpoint}"
            )
        os.replace(new, blobs / digest)
        return blobs / digest
    finally:
        new.unlink(missing_ok=True)


class _Hashed:
    """A file that is being written, its length so far and its digest."""

    def __init__(self, file: BinaryIO, listed: Listed, limit: int | None, what: str, limit_name: str) -> None:
        self.file, self.count = file, 0
        self._limit, self._what, self._limit_name = limit, what, limit_name
        git = listed.digest is not None and len(listed.digest) == 40 and listed.nbytes is not None
        self._hash = hashlib.sha1(b"blob %d\0" % (listed.nbytes or 0)) if git else hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        self.count += len(chunk)
        if self._limit is not None:  # the list may not have said how long it is
            limits.at_most(self.count, self._limit, self._limit_name, self._what)
        self.file.write(chunk)
        self._hash.update(chunk)

    def digest(self) -> str:
        return self._hash.hexdigest()


@contextlib.contextmanager
def _shown(progress: Told | None, what: str, nbytes: int | None) -> Iterator[Callable[[int], None]]:
    """Who is told of bytes as they come, from several threads one after the other: the caller's progress, or a bar of
    huggingface_hub on a terminal. `what`: a file, or how many."""
    done, one_by_one = 0, threading.Lock()
    if progress is not None:

        def told(count: int) -> None:
            nonlocal done
            with one_by_one:
                done += count
                progress(f"download {what}", done, max(nbytes or 0, done))

        yield told
        return
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any
    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, disable=None) as bar:  # type: ignore[no-untyped-call]

        def drawn(count: int) -> None:
            with one_by_one:
                bar.update(count)

        yield drawn


def _link(blob: Path, path: Path) -> None:
    """Have `path` lead to `blob`, as huggingface_hub does; where a file system knows no links, the file itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            new.symlink_to(os.path.relpath(blob, path.parent))
        except (OSError, NotImplementedError):
            os.replace(blob, path)
        else:
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
