"""`Snapshot`: one commit of a model of the Hugging Face Hub, fetched file by file.

huggingface_hub downloads, resumes, locks and manages the cache. This module adds three things: it compares the digest
of every fetched file with the file list of the commit, refuses a file by its listed size before the download, and
stores the list in the cache, so that an offline call knows which files are missing.

    models--org--name/refs/main                   the commit of a branch or tag
    models--org--name/snapshots/<commit>/…        links
    models--org--name/blobs/<digest>              the files
    models--org--name/rlx_jax/<commit>.json       the file list of the commit: length and digest of each
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import (
    HubError,
    HubUnreachableError,
    IntegrityError,
    NoSpaceError,
    RequestError,
    RlxWarning,
    quote,
    shown,
)
from rlx_jax.io import hub_remote, limits
from rlx_jax.io.files import check_name, resolve

# Progress callback: see `rlx_jax.compiler.executable.Progress`.
ProgressCallback = Callable[[str, int, int], None]

MAX_PARALLEL_DOWNLOADS = 4


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model. Its files are fetched when they are read.

    Attributes:
        path: the directory in the cache that holds the fetched files.
        files: every file of the commit by its path.
        offline_reason: the reason why nothing can be fetched, for messages; "" if files can be fetched.
    """

    name: str
    commit: str
    path: Path
    files: Mapping[str, hub_remote.HubFile] = field(repr=False)
    offline_reason: str
    remote: hub_remote.Remote
    progress: ProgressCallback | None = field(default=None, repr=False)

    def fetch(self, bounds: Mapping[str, limits.SizeLimit | None]) -> None:
        """Fetch files of the commit into `path` and check them, several at a time. If one fails, the others stop.

        Args:
            bounds: for each file to fetch, by its name, the maximum bytes; None for no limit.

        Raises:
            LimitError: a file is over its limit. NoSpaceError: the disk has no room for all of them; nothing is
                fetched then. IntegrityError: the fetched bytes differ from the commit's.
            HubError: the Hub refuses or cannot be reached. StorageError: the disk refuses.
        """
        for name, limit in bounds.items():
            check_name(name)
            nbytes = self.files[name].nbytes
            if limit is not None and nbytes is not None:
                limits.check_limit(nbytes, limit, f"{self._where(name)}: the size in bytes")
        missing_names = [name for name in bounds if not self.is_cached(name)]
        if not missing_names:
            return
        self._check_online(missing_names[0])
        self._check_disk_space(missing_names)
        sizes = [self.files[name].nbytes for name in missing_names]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        description = missing_names[0] if len(missing_names) == 1 else f"{len(missing_names)} files"
        with _download_progress(self.progress, description, total) as report:
            run_in_parallel(lambda name, stop: self._download(name, bounds[name], report, stop), missing_names)

    def read_range(self, name: str, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of a file from `start` on, without fetching the rest. They are not digest-checked.

        Raises:
            HubError: as `fetch`. IntegrityError: the server returned another range.
        """
        check_name(name)
        where = self._where(name)
        if self.is_cached(name):
            with hub_remote.hub_errors(where, self.remote), open(resolve(os.fspath(self.path), name), "rb") as file:
                file.seek(start)
                return file.read(nbytes)
        self._check_online(name)
        with hub_remote.hub_errors(where, self.remote):
            from huggingface_hub import constants, get_session, hf_hub_url

            url = hf_hub_url(self.name, name, revision=self.commit, endpoint=self.remote.endpoint)
            headers = {"range": f"bytes={start}-{start + nbytes - 1}", "accept-encoding": "identity"}
            if token := hub_remote.token_to_send(self.remote.token, where):
                headers["authorization"] = f"Bearer {token}"
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
                if response.status_code >= 400:
                    raise hub_remote.http_error(response, where, self.remote.server)
                content_range = response.headers.get("Content-Range", "")
                if response.status_code == 206 and not content_range.startswith(f"bytes {start}-"):
                    raise IntegrityError(f"{where}: requested the bytes from {start} on, got {shown(content_range)}")
                skipped = 0 if response.status_code == 206 else start  # a server without ranges begins at 0
                content = b""
                for chunk in response.iter_bytes():
                    content += chunk[skipped:][: nbytes - len(content)]
                    skipped = max(0, skipped - len(chunk))
                    if len(content) == nbytes:
                        return content
        raise HubUnreachableError(f"{where}: the transfer ended after {len(content)} of {nbytes} bytes; try again")

    def is_cached(self, name: str) -> bool:
        """Whether a file of the commit is in `path` with its listed length."""
        size, entry = _size(self.path / name), self.files[name]
        return size is not None and entry.nbytes in (None, size)

    def _where(self, name: str) -> str:
        """Return the name of a file in messages, with the model's name."""
        return quote(f"{self.name}/{name}")

    def _check_online(self, name: str) -> None:
        """Raise `HubUnreachableError` if nothing can be fetched; `name` is the missing file."""
        if not self.offline_reason:
            return
        size = _size(self.path / name)
        problem = (
            "is not in the cache" if size is None else f"has {size} bytes in the cache, not {self.files[name].nbytes}"
        )
        other_commits = [c for c in hub_remote.commits_with(self.path.parent.parent, name) if c != self.commit]
        alternative = f", or pass revision={other_commits[0]!r}, which is in the cache" if other_commits else ""
        raise HubUnreachableError(
            f"{self._where(name)} {problem} (commit {self.commit}), and {self.offline_reason}: load it once with a "
            f"connection{alternative}"
        )

    def _check_disk_space(self, names: Sequence[str]) -> None:
        """Check that the disk of the cache has room for files. A file with the same digest in the cache needs none."""
        blobs = self.path.parent.parent / "blobs"
        entries = [self.files[name] for name in names]
        needed = sum(f.nbytes or 0 for f in entries if not (f.digest and _size(blobs / f.digest) == f.nbytes))
        with hub_remote.hub_errors(self._where(names[0]), self.remote):
            free = shutil.disk_usage(next(p for p in self.path.parents if p.is_dir())).free
        if needed > free:
            description = self._where(names[0]) if len(names) == 1 else f"{quote(self.name)}: {len(names)} files"
            raise NoSpaceError(f"{description}: {needed} bytes to fetch, {free} are free in {quote(self.remote.cache)}")

    def _download(
        self, name: str, limit: limits.SizeLimit | None, report: Callable[[int], None], stop: threading.Event
    ) -> None:
        """Fetch a missing file and compare it with its digest."""
        where, entry, path = self._where(name), self.files[name], self.path / name
        with hub_remote.hub_errors(where, self.remote):
            from huggingface_hub import hf_hub_download

            # Remove a file that was truncated after its download: huggingface_hub would use it unchecked. A file that
            # is complete by now came from another thread or process, which may be reading it.
            if os.path.lexists(path) and not self.is_cached(name):
                _remove(path)
            hf_hub_download(
                self.name, name, revision=self.commit, cache_dir=self.remote.cache, endpoint=self.remote.endpoint,
                token=hub_remote.token_to_send(self.remote.token, where), library_name="rlx_jax",
                tqdm_class=_progress_class(where, entry, limit, report, stop),
            )  # fmt: skip
            if not path.is_file():
                raise IntegrityError(f"{where}: expected a file of the commit {self.commit}; got another one")
            digest = _file_digest(path, entry)
            if entry.digest not in (None, digest) or not self.is_cached(name):
                _remove(path)
                raise IntegrityError(
                    f"{where}: the download has the digest {digest}, the commit's is {entry.digest}: nothing was kept; "
                    f"try again, and if this happens again do not trust {self.remote.server}"
                )


def open_snapshot(
    name: str, revision: str | None, token: str | bool | None, progress: ProgressCallback | None,
    message_prefix: str = "",
) -> Snapshot:  # fmt: skip
    """Return the snapshot of a revision (a branch, a tag or a commit; default `main`) of the model `name`.

    Without a connection it is the commit in the cache: silently with `HF_HUB_OFFLINE` set, else with a warning.

    Args:
        token, progress: see `open_folder`.
        message_prefix: text about other attempts to find the model, for messages.

    Raises:
        RequestError: `revision` is not a possible name of one.
        MissingFileError: the Hub has no such model or revision. HubError: it refuses, or cannot be reached.
    """
    if revision is not None and not _is_revision(revision):
        raise RequestError(f"revision: expected a branch, a tag or a commit, got {shown(revision)}")
    remote, target = hub_remote.Remote.from_environment(token), revision or "main"
    folder = Path(remote.cache) / f"models--{name.replace('/', '--')}"
    where = f"{quote(name)}: {message_prefix}revision {quote(target)}"
    try:
        cached = hub_remote.cached_file_list(folder, target)
    except IntegrityError:  # a damaged list in the cache is fetched again
        if hub_remote.is_offline():
            raise
        cached = None

    def snapshot(commit: str, files: Mapping[str, hub_remote.HubFile], offline_reason: str = "") -> Snapshot:
        return Snapshot(name, commit, folder / "snapshots" / commit, files, offline_reason, remote, progress)

    if hub_remote.is_offline():
        if cached is None:
            raise HubUnreachableError(
                f"{where} is not in the cache {quote(remote.cache)}, and HF_HUB_OFFLINE is set: load it once without, "
                f"or pass a local directory; {hub_remote.revisions_text(folder, target)}"
            )
        return snapshot(*cached, "HF_HUB_OFFLINE is set")
    # The list of a commit never changes.
    if cached is not None and cached[0] == target and hub_remote.file_list_path(folder, target).is_file():
        return snapshot(*cached)
    try:
        commit, files = hub_remote.fetch_file_list(remote, name, target, where)
    except HubUnreachableError as cause:
        if cached is None:
            raise HubUnreachableError(f"{cause}; {hub_remote.revisions_text(folder, target)}") from cause
        warnings.warn(f"{cause}; opening what the cache has, commit {cached[0]}", RlxWarning, stacklevel=2)
        return snapshot(*cached, f"{remote.server} cannot be reached")
    with contextlib.suppress(OSError):  # a cache that cannot be written to still serves what it has
        hub_remote.store_file_list(folder, target, commit, files)
    return snapshot(commit, files)


def run_in_parallel(fetch: Callable[[str, threading.Event], None], names: Sequence[str]) -> None:
    """Run `fetch(name, stop)` for each name, `MAX_PARALLEL_DOWNLOADS` at a time. If one raises, set `stop`.

    Raises:
        The exception of the first call that failed.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(MAX_PARALLEL_DOWNLOADS, "rlx-download") as pool:
        running = [pool.submit(fetch, name, stop) for name in names]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _is_revision(revision: object) -> bool:
    """Whether a value can name a revision; a name with `..` could lead out of the cache directory."""
    if not isinstance(revision, str) or not 0 < len(revision) <= 255:
        return False
    parts = revision.split("/")
    return revision.isprintable() and "\\" not in revision and all(p and not p.startswith(".") for p in parts)


# -- files -------------------------------------------------------------------------------------


def _size(path: Path) -> int | None:
    """Return the length in bytes of the file at `path`; None if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _file_digest(path: Path, hub_file: hub_remote.HubFile) -> str:
    """Return the digest of a file, of the same kind (SHA-256 or git's SHA-1) as in the commit's list."""
    with open(path, "rb") as file:
        if hub_file.digest is None or len(hub_file.digest) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        git = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while chunk := file.read(2**20):
            git.update(chunk)
        return git.hexdigest()


def _remove(path: Path) -> None:
    """Remove a file of a snapshot and the blob in the cache that it links to."""
    Path(os.path.realpath(path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _progress_class(
    where: str, hub_file: hub_remote.HubFile, limit: limits.SizeLimit | None, report: Callable[[int], None],
    stop: threading.Event,
) -> type[Any]:  # fmt: skip
    """Return a class to pass to huggingface_hub as progress bar, which can abort a download.

    It aborts when more bytes arrive than the file has or may have, and when `stop` is set because another download of
    the same call failed.
    """

    class Counter:
        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any) -> None:
            self.n, self.total, self.format_dict = initial, total, dict[str, Any]()

        def update(self, count: float | None = 1) -> None:
            """Count downloaded bytes, and raise an error to abort the download."""
            if stop.is_set():
                raise HubError(f"{where}: another file of the same call failed")
            self.n += int(count or 0)
            if hub_file.nbytes is not None and self.n > hub_file.nbytes:
                raise IntegrityError(f"{where}: more bytes than its listed size {hub_file.nbytes}; nothing is kept")
            if limit is not None:  # the list may not have the length
                limits.check_limit(self.n, limit, f"{where}: the size in bytes")
            report(int(count or 0))

        def close(self, *_: Any, **__: Any) -> None:
            """Do nothing: the bar is shared by all files of a call."""

        refresh = set_postfix_str = set_description = set_description_str = __exit__ = close
        update_transfer = set_transfer_postfix_str = close  # Xet reports network bytes in addition to file bytes

        def __enter__(self) -> Any:
            return self

    return Counter


@contextlib.contextmanager
def _download_progress(
    progress: ProgressCallback | None, label: str, nbytes: int | None
) -> Iterator[Callable[[int], None]]:
    """Yield a thread-safe callback for downloaded bytes.

    It calls the caller's `progress`, or without one updates a progress bar of huggingface_hub on a terminal. `label`
    describes the download: a file name, or the number of files.
    """
    done, lock = 0, threading.Lock()
    if progress is not None:

        def report(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress(f"download {label}", done, max(nbytes or 0, done))

        yield report
        return
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any
    bar = tqdm(total=nbytes, desc=label, unit="B", unit_scale=True, disable=None)  # type: ignore[no-untyped-call]
    with bar:

        def update_bar(count: int) -> None:
            with lock:
                bar.update(count)

        yield update_bar
