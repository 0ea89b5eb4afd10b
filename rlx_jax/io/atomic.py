"""Atomic replacement of directories (`atomic_directory`): a save appears completely or not at all.

A save writes into a work directory next to its target, `.name.rlx-save-…`, and holds a lock on it. When all data is on
disk, one rename makes it the target; an existing target is exchanged in the same step. So the target is the old or the
new one, however the process ends. A work directory with a free lock is abandoned, and the next save to the same target
removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlx_jax.errors import NoSpaceError, RlxError, SaveFailedError, TargetExistsError, quote

NEW, OLD = "new", "old"
_WORK = re.compile(r"\.(.+)\.rlx-save-\d+-[0-9a-f]{8}", re.DOTALL)
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2  # constants of Linux for renameat2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def atomic_directory(target: str, overwrite: bool, nbytes: int, intact_text: str | None = None) -> Iterator[str]:
    """Yield the path at which to create a directory or file, `target` once the block ends without an exception.

    Args:
        target: the directory to create. Missing parent directories are created too.
        overwrite: replace an existing `target`; the caller has checked that it may be replaced.
        nbytes: approximate number of bytes to be written.
        intact_text: for error messages, what is still intact after a failure; by default, that `target` is unchanged.

    Raises:
        TargetExistsError: `target` exists and `overwrite` is false.
        NoSpaceError: less than 1.1 × `nbytes` are free, or the disk filled up.
        SaveFailedError: the system refused an operation. An existing `target` is intact.
    """
    parent, name = os.path.split(target)
    intact_text = intact_text or f"{quote(target)} is as it was"
    with storage_errors(target, intact_text):
        _make_directories(parent)
        remove_abandoned(parent, name)
        if not overwrite and os.path.lexists(target):
            raise _exists_error(target)
        free = shutil.disk_usage(parent).free
        if free < nbytes * 1.1:
            raise NoSpaceError(f"{quote(target)}: about {nbytes} bytes to write, {free} are free; {intact_text}")
        with _work_directory(target) as work:
            new = os.path.join(work, NEW)
            yield new
            sync_tree(new)
            _commit(work, target, overwrite)
            with storage_errors(target, "the new content is there, but a power failure may still undo it"):
                sync(work)
                sync(parent)


def find_old_content(target: str) -> str | None:
    """Return the path of the old content of `target` if a save was interrupted between its two renames; else None.

    Two renames are only needed on file systems that cannot exchange two directories.
    """
    if os.path.lexists(target):
        return None
    try:
        works = _work_directories(*os.path.split(os.path.realpath(target)))
    except (OSError, ValueError):  # no such parent, or not a path
        return None
    return next((old for work in works if os.path.isdir(old := os.path.join(work, OLD))), None)


def targets_being_saved(parent: str) -> set[str]:
    """Return the names of targets in a directory with work directories, whether of running or of abandoned saves."""
    return {work[1] for entry in os.listdir(parent) if (work := _WORK.fullmatch(entry))}


def write_synced(path: str, content: bytes) -> None:
    """Write a new file with this content; it is on disk when the call returns."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def remove(target: str, intact_text: str) -> None:
    """Remove a directory that others may be reading, in one step, however the process ends.

    Raises:
        SaveFailedError: the system refused; the message has `intact_text`, which describes what is still intact.
    """
    with storage_errors(target, intact_text), _work_directory(target) as work:
        os.rename(target, os.path.join(work, NEW))
        sync(os.path.dirname(target))


def sync_tree(directory: str) -> None:
    """Flush everything below a directory to disk, or a file."""
    if os.path.isfile(directory):
        sync(directory)
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(os.path.join(folder, name))
        sync(folder)


@contextmanager
def storage_errors(target: str, intact_text: str) -> Iterator[None]:
    """Convert errors in the block to errors of a save to `target`; interrupts and `RlxError` pass unchanged.

    The messages contain `intact_text`, which describes what is still intact.
    """
    try:
        yield
    except RlxError:
        raise
    except Exception as cause:
        reason = _system_error(cause)
        number = reason.errno if isinstance(reason, OSError) else None
        text, description = str(reason), (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        full = number in _NO_SPACE or "No space left" in text or "quota exceeded" in text
        error = NoSpaceError if full else SaveFailedError
        raise error(f"saving to {quote(target)} failed; {intact_text}: {_message_tail(description)}") from cause


def _system_error(error: BaseException) -> BaseException:
    """Return the system's error in a chain of exceptions: libraries raise others, or groups, because of it."""
    chain: list[BaseException] = [error]
    for link in chain:
        if (isinstance(link, OSError) and link.errno is not None) or "os_error_code" in str(link):
            return link
        causes = (*getattr(link, "exceptions", ()), link.__cause__, link.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]
    return error


def _message_tail(text: str) -> str:
    """Return the end of a message, quoted: the system writes the reason there, after long paths.

    After the reason, tensorstore may append its spec of the array and a location in its sources; both are cut off.
    """
    if code := re.search(r"\[os_error_code=[^\]]*\]", text):
        text = text[: code.end()]
    return quote(text if len(text) <= 100 else f"…{text[-100:]}")


def _exists_error(target: str) -> TargetExistsError:
    """Return the error for an existing target."""
    return TargetExistsError(f"{quote(target)} exists; pass overwrite=True to replace what rlx_jax.save wrote there")


def sync(path: str) -> None:
    """Flush the content of a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directories(directory: str) -> None:
    """Create a directory and its missing parents; they are on disk when the call returns."""
    missing_dirs, parent = [], directory
    while not os.path.lexists(parent):
        missing_dirs.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(directory, exist_ok=True)
    for created in missing_dirs:
        sync(os.path.dirname(created))


# -- work directories --------------------------------------------------------------------------


@contextmanager
def _work_directory(target: str) -> Iterator[str]:
    """Yield a locked work directory for a target; it is removed at the end."""
    parent, name = os.path.split(target)
    while True:
        work = os.path.join(parent, f".{name}.rlx-save-{os.getpid()}-{secrets.token_hex(4)}")
        os.mkdir(work)
        descriptor, lock = _lock(work)
        if descriptor is not None and lock != "taken" and os.path.isdir(work):
            break
        if descriptor is not None:  # another save has removed the directory between its creation and the lock
            os.close(descriptor)
    try:
        yield work
    finally:
        try:
            _discard(work, target)
        finally:
            os.close(descriptor)


def _lock(work: str) -> tuple[int | None, Literal["acquired", "taken", "unknown"]]:
    """Try to lock a work directory, without waiting.

    Returns:
        A descriptor of the directory, which the caller closes, and the state of the lock: `"acquired"`; `"taken"`
        through another descriptor, mostly of another process; or `"unknown"` on file systems without locks, where
        abandoned work directories are never removed. None and `"unknown"` if the directory does not exist any more.
        The lock ends when the descriptor is closed or the process ends.
    """
    import fcntl  # not on Windows, where rlx_jax can be imported

    try:
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, "unknown"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, "taken"
    except OSError:
        return descriptor, "unknown"
    return descriptor, "acquired"


def _work_directories(parent: str, name: str) -> list[str]:
    """Return the paths of all work directories for the target `name` in `parent`."""
    entries = [(entry, _WORK.fullmatch(entry)) for entry in sorted(os.listdir(parent))]
    return [os.path.join(parent, entry) for entry, work in entries if work and work[1] == name]


def remove_abandoned(parent: str, name: str) -> None:
    """Remove abandoned work directories: those for the same target that no running save has locked."""
    target = os.path.join(parent, name)
    for work in _work_directories(parent, name):
        descriptor, lock = _lock(work)
        if descriptor is None:
            continue
        try:
            if lock == "acquired":
                _discard(work, target)
        finally:
            os.close(descriptor)


def _discard(work: str, target: str) -> None:
    """Remove a locked work directory, after moving an old target in it back to its path."""
    old = os.path.join(work, OLD)
    if os.path.isdir(old) and not os.path.lexists(target):
        os.rename(old, target)
        sync(os.path.dirname(target))
    for _ in range(20):  # threads of a save that failed may still be writing
        shutil.rmtree(work, ignore_errors=True)
        if not os.path.lexists(work):
            return
        time.sleep(0.01)
    # The next save tries again to remove the rest.


# -- renames -----------------------------------------------------------------------------------


def _commit(work: str, target: str, overwrite: bool) -> None:
    """Rename the new directory in a work directory to the target."""
    new = os.path.join(work, NEW)
    if overwrite and os.path.isfile(new):
        os.replace(new, target)
    elif overwrite and os.path.lexists(target):
        if not _renameat2(new, target, _EXCHANGE):
            # Between these two renames there is no target: `find_old_content` finds the old one.
            os.rename(target, os.path.join(work, OLD))
            os.rename(new, target)
    else:
        try:
            if not _renameat2(new, target, _NOREPLACE):
                os.rename(new, target)
        except OSError as cause:
            if cause.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _exists_error(target) from cause  # another save has created it since the check
            raise


def _renameat2(source: str, target: str, flags: int) -> bool:
    """Call Linux's renameat2; return False if the system or the file system does not support it.

    Raises:
        OSError: it failed for another reason.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source, None, target)
