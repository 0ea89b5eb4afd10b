"""Which files a commit of a model has: as the Hub lists them, and as the cache remembers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx_jax.errors import HubUnreachableError, IntegrityError, MissingFileError, did_you_mean, listing, quote
from rlx_jax.io import limits
from rlx_jax.io.files import read_whole
from rlx_jax.io.strict_json import parse_object
from rlx_jax.io.transfer import Remote, Text, Wanted, fill

LISTING_S = 60
"""Seconds that the list of a repository's files may take."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Listed:
    """A file of a commit: its length, and the SHA-256 of its bytes (64 digits) or git's SHA-1 of it (40)."""

    nbytes: int | None
    digest: str | None


def list_files(
    remote: Remote, name: str, revision: str, where: str, waits: Sequence[float]
) -> tuple[str, dict[str, Listed]]:
    """The commit of a revision and its files, from the Hub."""
    url = f"{remote.endpoint}/api/models/{name}/revision/{urllib.parse.quote(revision, safe='')}?blobs=true"
    what = f"{where}revision {quote(revision)}"
    end = time.monotonic() + LISTING_S

    def check(count: int) -> None:  # no longer, and not for longer, than such a list may
        limits.at_most(count, limits.MAX_LISTING_BYTES, "limits.MAX_LISTING_BYTES", f"{what}: its files")
        if time.monotonic() > end:
            raise HubUnreachableError(f"{what}: the list of files took more than {LISTING_S} s")

    raw = Text(check)
    fill(remote, Wanted(url, what), raw, lambda count: None, waits)
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


def listing_path(folder: Path, commit: str) -> Path:
    """Where a model's cache keeps what a commit has."""
    return folder / "rlx_jax" / f"{commit}.json"


def keep_files(folder: Path, revision: str, commit: str, files: Mapping[str, Listed]) -> None:
    """Note in the cache which commit a revision is and what it has."""
    rows = {name: [listed.nbytes, listed.digest] for name, listed in files.items()}
    _write(listing_path(folder, commit), json.dumps({"files": rows}).encode())
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


def cached_files(folder: Path, revision: str) -> tuple[str, dict[str, Listed]] | None:
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
        path = listing_path(folder, commit)
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


def cached_revisions(folder: Path) -> dict[str, str]:
    """The commits that a model's cache has files of, by the branches and tags that were asked for, or by themselves."""
    commits = [entry.name for entry in _entries(folder / "snapshots") if _COMMIT.fullmatch(entry.name)]
    found: dict[str, str] = {}
    for at, _, names in os.walk(folder / "refs"):
        for path in (Path(at, name) for name in names if not name.endswith(".tmp")):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found[path.relative_to(folder / "refs").as_posix()] = path.read_text("ascii").strip()
    named = {revision: commit for revision, commit in sorted(found.items()) if commit in commits}
    return named | {commit: commit for commit in sorted(commits) if commit not in named.values()}


def told_revisions(folder: Path, revision: str) -> str:
    """What a model's cache has in place of a revision, for messages."""
    known = cached_revisions(folder)
    close = did_you_mean(revision, [name for name in known if not _COMMIT.fullmatch(name)])
    commits = dict.fromkeys(known.values())  # several branches may be at one
    close = close or "".join(f"; {quote(commit)} begins so" for commit in commits if commit.startswith(revision))
    return f"the cache has {listing(known, 4)} of it{close}" if known else "the cache has nothing of it"


def commits_with(folder: Path, name: str) -> list[str]:
    """The commits of which a model's cache has a file, the newest there first."""
    snapshots = [entry for entry in _entries(folder / "snapshots") if _COMMIT.fullmatch(entry.name)]
    return [entry.name for entry in sorted(snapshots, key=_time, reverse=True) if (entry / name).is_file()]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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
