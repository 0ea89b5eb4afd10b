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
import json
import os
import re
import secrets
import shutil
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
    MissingFileError,
    NoSpaceError,
    RequestError,
    RlxError,
    RlxWarning,
    StorageError,
    quote,
    shown,
)
from rlx_jax.io import limits
from rlx_jax.io.files import check_name, read_whole
from rlx_jax.io.strict_json import parse_object
from rlx_jax.io.transfer import WAITS_S, Remote, fill, is_offline

Told = Callable[[str, int, int], None]
"""See `rlx_jax.compiler.executable.Progress`."""

ABANDONED_S = 86_400
"""A transfer to which nothing was added for so many seconds is nobody's."""
LISTING_S = 60
"""Seconds that the list of a repository's files may take."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def is_name(path: object) -> bool:
    """Whether a string may name a model of the Hub.

    >>> [is_name(p) for p in ("org/name", "name", "./org/name", "a/b/c", "org/name.git")]
    [True, False, False, False, False]
    """
    if not isinstance(path, str) or not _NAME.fullmatch(path):
        return False
    return not ("--" in path or ".." in path or path.endswith((".", "-", ".git")))


@dataclass(frozen=True)
class Listed:
    """A file of a commit: its length, and the SHA-256 of its bytes (64 digits) or git's SHA-1 of it (40)."""

    nbytes: int | None
    digest: str | None


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
        listed, path, where = self.files[name], self.path / name, quote(f"{self.name}/{name}")
        if limit is not None and listed.nbytes is not None:
            limits.at_most(listed.nbytes, limit, limit_name, f"{where}: the size in bytes")
        size = _size(path)
        if size is not None and listed.nbytes in (None, size):
            return
        if self.offline:
            found = "is not in the cache" if size is None else f"has {size} bytes in the cache, not {listed.nbytes}"
            raise HubUnreachableError(f"{where} {found}, and {self.offline}: load it once with a connection")
        url = f"{self.remote.endpoint}/{self.name}/resolve/{self.commit}/{urllib.parse.quote(name)}"
        try:
            blobs = self.path.parent.parent / "blobs"
            blobs.mkdir(parents=True, exist_ok=True)
            known = None if listed.digest is None else blobs / listed.digest
            if known is None or _size(known) is None or _size(known) != listed.nbytes:
                _remove_abandoned(blobs)
                known = _download(self, url, where, name, listed, blobs, limit, limit_name)
            _link(known, path)
        except RlxError:
            raise
        except OSError as cause:
            full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            error = NoSpaceError if full else StorageError
            raise error(f"{where}: the cache {quote(self.remote.cache)}: {cause.strerror or cause}") from cause


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
        kept = _kept(folder, wanted)
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
    if kept is not None and kept[0] == wanted and _listing(folder, wanted).is_file():  # a commit does not change
        return snapshot(*kept)
    try:
        commit, files = _list(remote, name, wanted, where, WAITS_S[:1] if kept is None else ())
    except HubUnreachableError as cause:
        if kept is None:
            raise
        warnings.warn(f"{cause}; opening what the cache has, commit {kept[0]}", RlxWarning, stacklevel=2)
        return snapshot(*kept, f"{remote.endpoint} cannot be reached")
    with contextlib.suppress(OSError):  # a cache that cannot be written to still serves what it has
        _keep(folder, wanted, commit, files)
    return snapshot(commit, files)


def _is_revision(revision: object) -> bool:
    if not isinstance(revision, str) or not 0 < len(revision) <= 255:
        return False
    parts = revision.split("/")
    return revision.isprintable() and "\\" not in revision and all(p and not p.startswith(".") for p in parts)


# -- which files there are ---------------------------------------------------------------------


class _Text:
    """A list of files as it comes: no longer, and not for longer, than such a list may."""

    def __init__(self, what: str, end: float) -> None:
        self.text, self._what, self._end = bytearray(), what, end

    @property
    def count(self) -> int:
        return len(self.text)

    def write(self, chunk: bytes) -> None:
        self.text += chunk
        limits.at_most(self.count, limits.MAX_LISTING_BYTES, "limits.MAX_LISTING_BYTES", f"{self._what}: its files")
        if time.monotonic() > self._end:
            raise HubUnreachableError(f"{self._what}: the list of files took more than {LISTING_S} s")


def _list(
    remote: Remote, name: str, revision: str, where: str, waits: Sequence[float]
) -> tuple[str, dict[str, Listed]]:
    """The commit of a revision and its files, from the Hub."""
    url = f"{remote.endpoint}/api/models/{name}/revision/{urllib.parse.quote(revision, safe='')}?blobs=true"
    what = f"{where}revision {quote(revision)}"
    raw = _Text(what, time.monotonic() + LISTING_S)
    fill(remote, url, what, raw, None, lambda count: None, waits)
    content = parse_object(bytes(raw.text), f"{what}: the list of files", IntegrityError)
    commit, siblings = content.get("sha"), content.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
        raise IntegrityError(f"{what}: expected a commit ('sha') and its files ('siblings'); is this a Hub?")
    if _COMMIT.fullmatch(revision) and commit != revision:
        raise IntegrityError(f"{what}: the Hub gives the commit {commit} for it")
    return commit, dict(_listed(entry, what) for entry in siblings)


def _listed(entry: Any, what: str) -> tuple[str, Listed]:
    """A file as the Hub lists it."""
    name = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise IntegrityError(f"{what}: an entry of 'siblings' has no 'rfilename'")
    large = entry.get("lfs")
    nbytes, digest = entry.get("size"), entry.get("blobId")
    if isinstance(large, dict):
        nbytes, digest = large.get("size", nbytes), large.get("sha256")
    return name, _checked(nbytes, digest, f"{what}: {quote(name)}")


def _checked(nbytes: Any, digest: Any, what: str) -> Listed:
    if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
        raise IntegrityError(f"{what}: size is {quote(nbytes)}; expected a number of bytes")
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise IntegrityError(f"{what}: digest is {quote(digest)}; expected SHA-256, or git's SHA-1")
    if nbytes is None and digest is not None and len(digest) == 40:  # git's digest takes the length in
        digest = None
    return Listed(nbytes, digest)


def _listing(folder: Path, commit: str) -> Path:
    return folder / "rlx_jax" / f"{commit}.json"


def _keep(folder: Path, revision: str, commit: str, files: Mapping[str, Listed]) -> None:
    """Note in the cache which commit a revision is and what it has."""
    rows = {name: [listed.nbytes, listed.digest] for name, listed in files.items()}
    _write(_listing(folder, commit), json.dumps({"files": rows}).encode())
    if revision != commit:
        _write(folder / "refs" / revision, commit.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        new.write_bytes(content)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _kept(folder: Path, revision: str) -> tuple[str, dict[str, Listed]] | None:
    """The commit and the files that the cache knows of a revision; None if there is no such commit.

    Where only others filled the cache it is huggingface_hub's list; without one, the files that are there count as all.

    Raises:
        IntegrityError: our list in it is damaged.
    """
    commit = revision
    if not _COMMIT.fullmatch(commit):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = (folder / "refs" / revision).read_text("ascii").strip()
    if not _COMMIT.fullmatch(commit):
        return None
    try:
        path = _listing(folder, commit)
        raw = read_whole(str(path), quote(path), limits.MAX_LISTING_BYTES, "limits.MAX_LISTING_BYTES", IntegrityError)
        rows = parse_object(raw, quote(path), IntegrityError).get("files")
        if not isinstance(rows, dict) or not all(isinstance(row, list) and len(row) == 2 for row in rows.values()):
            raise IntegrityError(f"{quote(path)}: expected the files of a commit; delete it")
        return commit, {n: _checked(row[0], row[1], f"{quote(path)}: {quote(n)}") for n, row in rows.items()}
    except MissingFileError:
        pass
    if theirs := _listed_by_others(folder, commit):
        return commit, theirs
    root = folder / "snapshots" / commit
    there = [Path(at, name) for at, _, names in os.walk(root) for name in names]
    return (commit, {p.relative_to(root).as_posix(): Listed(None, None) for p in there}) if there else None


def _listed_by_others(folder: Path, commit: str) -> dict[str, Listed]:
    """The names of a commit's files that huggingface_hub noted when it fetched all or some; none if it did not."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    name = folder.name.removeprefix("models--").replace("--", "/")
    try:
        tree = get_cached_repo_tree(name, revision=commit, cache_dir=folder.parent)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: Listed(None, None) for file in tree}


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
    snapshot: Snapshot, url: str, where: str, name: str, listed: Listed, blobs: Path, limit: int | None, limit_name: str
) -> Path:
    """The file of a digest, complete and checked. A transfer that stops goes on where it was."""
    free = shutil.disk_usage(blobs).free
    if listed.nbytes is not None and listed.nbytes > free:
        raise NoSpaceError(
            f"{where}: {listed.nbytes} bytes to fetch, {free} are free in {quote(snapshot.remote.cache)}"
        )
    new = blobs / f"{secrets.token_hex(8)}.incomplete"
    try:
        with open(new, "xb") as file, _shown(snapshot.progress, name, listed.nbytes) as told:
            hashed = _Hashed(file, listed, limit, f"{where}: the size in bytes", limit_name)
            fill(snapshot.remote, url, where, hashed, listed.nbytes, told)
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
def _shown(progress: Told | None, name: str, nbytes: int | None) -> Iterator[Callable[[int], None]]:
    """Who is told of bytes as they come: the caller's progress, or a bar of huggingface_hub on a terminal."""
    if progress is not None:
        done = 0

        def told(count: int) -> None:
            nonlocal done
            done += count
            progress(f"download {name}", done, max(nbytes or 0, done))

        yield told
        return
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any
    with tqdm(total=nbytes, desc=name, unit="B", unit_scale=True, disable=None) as bar:  # type: ignore[no-untyped-call]
        yield lambda count: bar.update(count) and None


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
