"""Requests to the Hub: its endpoint and token, the file list of a commit, and errors for its HTTP answers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import did_you_mean, listing, one_line, quote, shown
from rlx_jax.io import limits
from rlx_jax.io.files import parse_object, read_small_file

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TOKEN = re.compile(r"[!-~]+")
# Values of environment variables that huggingface_hub reads as true.
_TRUE = {"1", "ON", "YES", "TRUE"}


def is_offline() -> bool:
    """Whether environment variables forbid downloads."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


@dataclass(frozen=True)
class Remote:
    """The endpoint, the cache directory and the token for downloads."""

    endpoint: str = field(repr=False)
    cache: str
    token: str | bool | None = field(repr=False)

    @property
    def server(self) -> str:
        """Return the endpoint for messages, without user name and password."""
        scheme, slashes, rest = self.endpoint.rpartition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"

    @staticmethod
    def from_environment(token: str | bool | None) -> Remote:
        """Return the remote that `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME` and `XDG_CACHE_HOME` set, read now.

        Raises:
            RequestError: `token` is not a valid token.
        """
        if not isinstance(token, str | bool | None):
            raise errors.RequestError(f"token: expected a string, True, False or None, got {type(token).__name__}")
        if isinstance(token, str) and not _TOKEN.fullmatch(token):  # the message must not contain the token
            raise errors.RequestError("token: expected printable ASCII without spaces; it is neither shown nor sent")
        getenv = os.environ.get
        home = getenv("HF_HOME") or os.path.join(getenv("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        cache = getenv("HF_HUB_CACHE") or getenv("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
        endpoint = (getenv("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        return Remote(endpoint, os.path.realpath(os.path.expandvars(os.path.expanduser(cache))), token)


@dataclass(frozen=True)
class HubFile:
    """A file of a commit: its length in bytes, and its SHA-256 (64 digits) or git's SHA-1 of it (40 digits)."""

    nbytes: int | None
    digest: str | None


# -- the list of a commit ----------------------------------------------------------------------


def fetch_file_list(remote: Remote, name: str, revision: str, where: str) -> tuple[str, dict[str, HubFile]]:
    """Return the commit of a revision and its files, fetched from the Hub.

    Raises:
        MissingFileError, HubError: as `open_snapshot`. IntegrityError: the answer is malformed.
    """
    with hub_errors(where, remote):
        from huggingface_hub import HfApi, constants

        api = HfApi(remote.endpoint, token_to_send(remote.token, where), library_name="rlx_jax")
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        try:
            info = api.model_info(name, revision=revision, timeout=timeout, files_metadata=True)
            rows = {f.rfilename: (f.lfs or f, f.lfs.sha256 if f.lfs else f.blob_id) for f in info.siblings or ()}
            files = {path: _checked_hub_file(entry.size, digest, where) for path, (entry, digest) in rows.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as cause:
            if isinstance(cause, errors.RlxError):
                raise
            raise errors.IntegrityError(
                f"{where}: the response is not a list of a commit's files; is this a Hub?"
            ) from cause
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise errors.IntegrityError(f"{where}: expected a commit of 40 digits, got {shown(info.sha)}; is this a Hub?")
    if _COMMIT.fullmatch(revision) and info.sha != revision:
        raise errors.IntegrityError(f"{where}: the Hub gives the commit {info.sha} for this revision")
    return info.sha, files


def _checked_hub_file(nbytes: Any, digest: Any, where: str) -> HubFile:
    """Return one entry of a file list, checked."""
    if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
        raise errors.IntegrityError(f"{where}: size is {quote(nbytes)}; expected a number of bytes")
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise errors.IntegrityError(f"{where}: digest is {quote(digest)}; expected SHA-256, or git's SHA-1")
    if nbytes is None and digest is not None and len(digest) == 40:  # git's digest includes the length
        digest = None
    return HubFile(nbytes, digest)


def file_list_path(folder: Path, commit: str) -> Path:
    """Return the path of the file list of a commit in a model's cache."""
    return folder / "rlx_jax" / f"{commit}.json"


def store_file_list(folder: Path, revision: str, commit: str, files: Mapping[str, HubFile]) -> None:
    """Store in the cache the commit of a revision and the file list of the commit."""
    rows = {name: [entry.nbytes, entry.digest] for name, entry in files.items()}
    _write(file_list_path(folder, commit), json.dumps({"files": rows}))
    if revision != commit:
        _write(folder / "refs" / revision, commit)


def _write(path: Path, content: str) -> None:
    """Write a file atomically: readers see the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(content, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def cached_file_list(folder: Path, revision: str) -> tuple[str, dict[str, HubFile]] | None:
    """Return the commit of a revision and its files according to the cache; None if the cache has no such commit.

    If this package has stored no list, huggingface_hub's list counts; without that, the files in the snapshot.

    Raises:
        IntegrityError: the stored list is damaged.
    """
    commit = revision
    if not _COMMIT.fullmatch(commit):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = (folder / "refs" / revision).read_text("ascii").strip()
    if not _COMMIT.fullmatch(commit):
        return None
    path, where = file_list_path(folder, commit), quote(file_list_path(folder, commit))
    with contextlib.suppress(errors.MissingFileError):
        raw = read_small_file(str(path), where, limits.bound("MAX_LISTING_BYTES"), errors.IntegrityError)
        rows = parse_object(raw, where, errors.IntegrityError).get("files")
        if not isinstance(rows, dict) or not all(isinstance(row, list) and len(row) == 2 for row in rows.values()):
            raise errors.IntegrityError(f"{where}: expected the files of a commit; delete it")
        return commit, {
            name: _checked_hub_file(row[0], row[1], f"{where}: {quote(name)}") for name, row in rows.items()
        }
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    name = folder.name.removeprefix("models--").replace("--", "/")
    with contextlib.suppress(CachedRepoTreeNotFoundError):
        tree = get_cached_repo_tree(name, revision=commit, cache_dir=folder.parent)
        return commit, {file.path: HubFile(None, None) for file in tree}
    root = folder / "snapshots" / commit
    cached = [Path(folder_path, name) for folder_path, _, names in os.walk(root) for name in names]
    return (commit, {p.relative_to(root).as_posix(): HubFile(None, None) for p in cached}) if cached else None


def revisions_text(folder: Path, revision: str) -> str:
    """Return a text that lists the revisions in a model's cache, for the message that one is missing."""
    commits = [path.name for path in (folder / "snapshots").glob("*") if _COMMIT.fullmatch(path.name)]
    refs: dict[str, str] = {}
    for path in sorted(p for p in (folder / "refs").rglob("*") if p.is_file() and p.suffix != ".tmp"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            refs[path.relative_to(folder / "refs").as_posix()] = path.read_text("ascii").strip()
    refs = {name: commit for name, commit in refs.items() if commit in commits}
    names = [*refs, *(commit for commit in sorted(commits) if commit not in refs.values())]
    hint = did_you_mean(revision, list(refs))
    hint = hint or "".join(f"; {quote(commit)} starts with it" for commit in commits if commit.startswith(revision))
    return f"the cache has {listing(names, 4)} of it{hint}" if names else "the cache has no revision of it"


def commits_with(folder: Path, name: str) -> list[str]:
    """Return the commits for which a model's cache has a file, the most recently cached one first."""
    snapshots = [path for path in (folder / "snapshots").glob("*") if (path / name).is_file()]
    return [path.name for path in sorted(snapshots, key=lambda p: p.stat().st_mtime, reverse=True)]


# -- errors ------------------------------------------------------------------------------------


def token_to_send(token: str | bool | None, where: str) -> str | Literal[False]:
    """Return the token to send: by default the one that huggingface_hub has stored; False for none.

    Raises:
        HubError: `token=True` and none is stored, or it is malformed; the message does not contain it.
    """
    import huggingface_hub

    try:
        implicit = not huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN
        if token is True or (token is None and implicit):
            token = huggingface_hub.get_token() or token
    except Exception as cause:  # for example, a login that cannot be renewed
        raise errors.HubError(
            f"{where}: the stored token: {type(cause).__name__}; pass token=, or token=False"
        ) from cause
    if token is True:
        raise errors.HubError(f"{where}: token=True, and no token is stored: pass token=, or set HF_TOKEN")
    if token and not _TOKEN.fullmatch(token):
        raise errors.HubError(
            f"{where}: the token of HF_TOKEN, or of its file, is not printable ASCII; it was not sent"
        )
    return token or False


@contextlib.contextmanager
def hub_errors(where: str, remote: Remote) -> Iterator[None]:
    """Convert exceptions of huggingface_hub, its HTTP client and the system to exceptions of this package."""
    try:
        yield
    except errors.RlxError:
        raise
    except Exception as cause:
        raise _to_rlx_error(cause, where, remote) from cause


def _to_rlx_error(cause: Exception, where: str, remote: Remote) -> errors.RlxError:
    """Return the error of this package for one of huggingface_hub, its HTTP client or the system."""
    # Compared by name: huggingface_hub and its HTTP client are imported only where they are used.
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if "LocalEntryNotFoundError" in kinds and isinstance(cause.__cause__, Exception):
        return _to_rlx_error(cause.__cause__, where, remote)  # "not in the cache, because …"
    if (response := getattr(cause, "response", None)) is not None:
        return http_error(response, where, remote.server)
    if "OfflineModeIsEnabled" in kinds:
        return errors.HubUnreachableError(f"{where}: HF_HUB_OFFLINE was set when huggingface_hub was imported")
    number = cause.errno if isinstance(cause, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return errors.NoSpaceError(f"{where}: the cache {quote(remote.cache)}: {os.strerror(number or 0)}")
    if number is not None and not isinstance(cause, ConnectionError):
        return errors.StorageError(f"{where}: the cache {quote(remote.cache)}: {os.strerror(number)}")
    text = one_line(str(cause).partition("\n")[0]).replace(remote.endpoint, remote.server)[:200] or type(cause).__name__
    if text.startswith("Consistency check failed"):
        return errors.IntegrityError(f"{where}: {text}; nothing is kept: try again")
    if isinstance(cause, ValueError):
        return errors.HubError(f"{where}: huggingface_hub: {text}")
    if "TimeoutException" in kinds:
        text = "no answer within HF_HUB_DOWNLOAD_TIMEOUT"
    return errors.HubUnreachableError(f"{where}: {remote.server} cannot be reached: {text}")


def http_error(response: Any, where: str, host: str) -> errors.RlxError:
    """Return the error for an HTTP status of 400 or over; its message explains the status and gives advice."""
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    with_token = "authorization" in response.request.headers
    if status in (408, 429) or status >= 500:
        return errors.HubUnreachableError(f"{where}: {host} answers {status}")
    if code == "RevisionNotFound":
        advice = "write a commit with all 40 digits, a pull request as refs/pr/1"
        return errors.MissingFileError(f"{where}: {host} has no such branch, tag or commit of it; {advice}")
    if code == "EntryNotFound":
        return errors.MissingFileError(f"{where}: {host} lists the file but does not have it; try again")
    if code == "GatedRepo":
        advice = "with the account of this token" if with_token else "and pass token=, or set HF_TOKEN"
        return errors.HubError(
            f"{where}: access on {host} is gated ({status}): request access on the model page, {advice}"
        )
    if status in (401, 403) and with_token:
        return errors.HubError(f"{where}: {host} refuses it to this token ({status}): use one with read access")
    if status == 401:
        return errors.MissingFileError(
            f"{where}: {host} has no such public model ({status}): check the name; if it is private, pass token=, or "
            "set HF_TOKEN"
        )
    if status == 403:
        return errors.HubError(f"{where}: {host} refuses it ({status}): pass token=, or set HF_TOKEN")
    if status == 404:
        return errors.MissingFileError(f"{where}: {host} has no such model ({status}): check the name")
    return errors.HubError(f"{where}: {host} answers {status}")
