"""Models of the Hugging Face Hub by name, fetched file by file into the cache that huggingface_hub keeps.

What one of the two has fetched the other finds. Names in the cache come from checked digests and never from what a
server says beside them, and a file is not in its place before all of it is there and its digest is right.

    models--org--name/refs/main                   the commit of a branch or tag
    models--org--name/snapshots/<commit>/…        links
    models--org--name/blobs/<digest>              the files
    models--org--name/blobs/….rlx_jax.incomplete   what came of one before the line broke
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
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx_jax.errors import (
    HubUnreachableError,
    IntegrityError,
    LimitError,
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
from rlx_jax.io.hub_listing import (
    Listed,
    cached_files,
    commits_with,
    keep_files,
    list_files,
    listing_path,
    told_revisions,
)
from rlx_jax.io.partial import KEPT_BYTES, PartialFile, open_partial, partial_path, remove_abandoned
from rlx_jax.io.transfer import WAITS_S, GivenUp, Remote, Text, Wanted, fill, is_offline, run_together

Told = Callable[[str, int, int], None]
"""See `rlx_jax.compiler.executable.Progress`."""

SizeBound = tuple[int | None, str]
"""Bytes that a file may have, and what messages call that limit."""
UNBOUND: SizeBound = (None, "")

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
        self._check(name, limit, limit_name)
        if self.is_here(name):
            return
        self._check_online(name)
        self._check_room([name])
        with _shown(self.progress, name, self.files[name].nbytes) as told:
            self._fetch(name, limit, limit_name, told, threading.Event())

    def fetch_all(self, names: Sequence[str], bounds: Mapping[str, SizeBound]) -> None:
        """As `fetch` of each, several at a time. What goes wrong with one of them ends the others.

        Raises:
            NoSpaceError: there is no room for all of them; nothing was fetched. Others: as `fetch`.
        """
        for name in names:
            self._check(name, *bounds.get(name, UNBOUND))
        lacking = [name for name in dict.fromkeys(names) if not self.is_here(name)]
        if len(lacking) < 2:
            for name in lacking:
                self.fetch(name, *bounds.get(name, UNBOUND))
            return
        self._check_online(lacking[0])
        self._check_room(lacking)
        sizes = [self.files[name].nbytes for name in lacking if self._blob(name) is None]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        with _shown(self.progress, f"{len(lacking)} files", total) as told:
            run_together(lambda name, stop: self._fetch(name, *bounds.get(name, UNBOUND), told, stop), lacking)

    def _check(self, name: str, limit: int | None, limit_name: str) -> None:
        """The name is one of the commit, and the file no longer than it may be."""
        check_name(name)
        nbytes = self.files[name].nbytes
        if limit is not None and nbytes is not None:
            limits.at_most(nbytes, limit, limit_name, f"{self._where(name)}: the size in bytes")

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

    def _lacking(self, name: str) -> int:
        """Bytes of a file that are still to come, as far as the list says."""
        listed = self.files[name]
        if listed.nbytes is None or listed.digest is None:
            return listed.nbytes or 0
        left = _size(partial_path(self.path.parent.parent / "blobs", listed.digest)) or 0
        return listed.nbytes - (left if left <= listed.nbytes else 0)

    def _check_online(self, name: str) -> None:
        """Something can be fetched."""
        if self.offline:
            size = _size(self.path / name)
            found = (
                "is not in the cache"
                if size is None
                else f"has {size} bytes in the cache, not {self.files[name].nbytes}"
            )
            others = [c for c in commits_with(self.path.parent.parent, name) if c != self.commit]
            older = f", or take revision={others[0]!r}, of which the cache has it" if others else ""
            raise HubUnreachableError(
                f"{self._where(name)} {found} (commit {self.commit}), and {self.offline}: load it once with a "
                f"connection{older}"
            )

    def _check_room(self, names: Sequence[str]) -> None:
        """The disk of the cache has room for files."""
        with self._cache_errors(names[0]):
            free = shutil.disk_usage(next(p for p in self.path.parents if p.is_dir())).free
        needed = sum(self._lacking(name) for name in names if self._blob(name) is None)
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
                remove_abandoned(blobs, {listed.digest for listed in self.files.values() if listed.digest is not None})
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
                f"set: load it once without, or name a local directory; {told_revisions(folder, wanted)}"
            )
        return snapshot(*kept, "HF_HUB_OFFLINE is set")
    if kept is not None and kept[0] == wanted and listing_path(folder, wanted).is_file():  # a commit does not change
        return snapshot(*kept)
    try:
        commit, files = list_files(remote, name, wanted, where, WAITS_S[:1] if kept is None else ())
    except HubUnreachableError as cause:
        if kept is None:
            raise HubUnreachableError(f"{cause}; {told_revisions(folder, wanted)}") from cause
        warnings.warn(f"{cause}; opening what the cache has, commit {kept[0]}", RlxWarning, stacklevel=2)
        return snapshot(*kept, f"{remote.server} cannot be reached")
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


def _download(
    snapshot: Snapshot, wanted: Wanted, listed: Listed, blobs: Path, limit: int | None, limit_name: str,
    told: Callable[[int], None],
) -> Path:  # fmt: skip
    """The file of a digest, complete and checked. A transfer that stops goes on where it was, in this call or in the
    next one: what came is kept whatever ends the call, but for what speaks against the bytes or the disk."""
    known = listed.digest if listed.nbytes is not None else None
    part, useless = open_partial(blobs, known), False
    hashed = _Hashed(part, listed, limit, f"{wanted.where}: the size in bytes", limit_name)
    try:
        before = hashed.take_up(wanted.stop)
        if before:
            told(before)
        if before == 0 or before != listed.nbytes:
            fill(snapshot.remote, wanted, hashed, told)
        if before and hashed.digest() != known:  # what was left may have been the wrong part
            told(-hashed.count)
            hashed.begin_again()
            fill(snapshot.remote, wanted, hashed, told)
        digest = hashed.digest()
        if listed.digest not in (None, digest):
            raise IntegrityError(
                f"{wanted.where}: what came has the digest {digest}, the commit says {listed.digest}: nothing was "
                f"kept; try again, and if it stays so do not trust {snapshot.remote.server}"
            )
        part.move_to(blobs / digest)
        return blobs / digest
    except (IntegrityError, LimitError):
        useless = True
        raise
    except OSError as error:  # a refusal of the Hub is one too, and says nothing of what came
        useless = not isinstance(error, RlxError)
        raise
    finally:
        part.close(keep=not useless and hashed.keeps)


class _Hashed:
    """A file that is being written, its length so far and its digest."""

    def __init__(self, part: PartialFile, listed: Listed, limit: int | None, what: str, limit_name: str) -> None:
        self.part, self.listed, self.count = part, listed, 0
        self._limit, self._what, self._limit_name = limit, what, limit_name
        self._hash = self._empty()

    def _empty(self) -> Any:
        nbytes, digest = self.listed.nbytes, self.listed.digest
        git = digest is not None and len(digest) == 40 and nbytes is not None
        return hashlib.sha1(b"blob %d\0" % (nbytes or 0)) if git else hashlib.sha256()

    def take_up(self, stop: threading.Event) -> int:
        """Go on from what an earlier call left, of which there are so many bytes.

        Raises:
            GivenUp: `stop` was set.
        """
        left = os.fstat(self.part.file.fileno()).st_size
        if left > (self.listed.nbytes or 0):
            self.begin_again()
            left = 0
        while self.count < left and (chunk := self.part.file.read(min(2**20, left - self.count))):
            if stop.is_set():
                raise GivenUp
            self.count += len(chunk)
            self._hash.update(chunk)
        return self.count

    def begin_again(self) -> None:
        """Nothing of it is there."""
        self.part.file.seek(0)
        self.part.file.truncate()
        self.count, self._hash = 0, self._empty()

    @property
    def keeps(self) -> bool:
        """Whether a transfer that stops here leaves what came to the next call."""
        return self.part.shared and self.part.nbytes() >= KEPT_BYTES

    def write(self, chunk: bytes) -> None:
        self.count += len(chunk)
        if self._limit is not None:  # the list may not have said how long it is
            limits.at_most(self.count, self._limit, self._limit_name, self._what)
        self.part.file.write(chunk)
        self._hash.update(chunk)

    def digest(self) -> str:
        found: str = self._hash.hexdigest()
        return found


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
