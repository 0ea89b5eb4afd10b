"""Directories that appear whole or not at all.

A save writes into a work directory beside its target, `.name.rlx-save-….`, and holds a lock on it. When
all data is on disk, one rename makes it the target; an existing target is exchanged in the same step. So
whatever ends the process, the target is the old one or the new one. A work directory whose lock is free
belongs to nobody any more, and the next save beside it removes it.
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
_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def replacing(target: str, overwrite: bool, nbytes: int, kept: str | None = None) -> Iterator[str]:
    """Where to make a directory that becomes `target` when the block ends without an exception.

    Args:
        target: the directory to make. Those around it are made where they are missing.
        overwrite: replace what is there; the caller has made sure that it may.
        nbytes: about how much will be written, in bytes.
        kept: what errors say is still good; without it, that `target` is as it was.

    Raises:
        TargetExistsError: `target` exists and `overwrite` is false.
        NoSpaceError: less than 1.1 × `nbytes` are free, or the disk filled up.
        SaveFailedError: the system refused something. What was at `target` is still there.
    """
    parent, name = os.path.split(target)
    kept = kept or f"{quote(target)} is as it was"
    with storage_errors(target, kept):
        _make_folders(parent)
        remove_abandoned(parent, name)
        if not overwrite and os.path.lexists(target):
            raise _exists(target)
        free = shutil.disk_usage(parent).free
        if free < nbytes * 1.1:
            raise NoSpaceError(f"{quote(target)}: about {nbytes} bytes to write, {free} are free; {kept}")
        with _work_directory(target) as work:
            new = os.path.join(work, NEW)
            yield new
            sync_tree(new)
            _commit(work, target, overwrite)
            with storage_errors(target, "the new content is there, but a power failure may still undo it"):
                sync(work)
                sync(parent)


def abandoned_old(target: str) -> str | None:
    """Where the content of `target` is, if a save died between its two renames; else None.

    Only file systems that cannot exchange two directories need two.
    """
    if os.path.lexists(target):
        return None
    try:
        works = _works(*os.path.split(os.path.realpath(target)))
    except (OSError, ValueError):  # no such parent, or not a path
        return None
    return next((old for work in works if os.path.isdir(old := os.path.join(work, OLD))), None)


def being_saved(parent: str) -> set[str]:
    """The names of targets in a directory that have work directories, of the living and of the dead."""
    return {work[1] for entry in os.listdir(parent) if (work := _WORK.fullmatch(entry))}


def write_synced(path: str, content: bytes) -> None:
    """A new file with this content, on disk when the call returns."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def remove(target: str, kept: str) -> None:
    """Remove a directory that others read: gone in one step, whatever ends the process.

    Raises:
        SaveFailedError: the system refused; the message says that `kept` is still good.
    """
    with storage_errors(target, kept), _work_directory(target) as work:
        os.rename(target, os.path.join(work, NEW))
        sync(os.path.dirname(target))


def sync_tree(directory: str) -> None:
    """Everything below a directory is on disk when the call returns."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(os.path.join(folder, name))
        sync(folder)


@contextmanager
def storage_errors(target: str, kept: str) -> Iterator[None]:
    """System errors as ours, which say that `kept` is still good; interrupts and our own errors pass."""
    try:
        yield
    except RlxError:
        raise
    except Exception as cause:
        told = _system_error(cause)
        number = told.errno if isinstance(told, OSError) else None
        text, shown = str(told), (told.strerror if isinstance(told, OSError) else None) or str(told)
        full = number in _NO_SPACE or "No space left" in text or "quota exceeded" in text
        error = NoSpaceError if full else SaveFailedError
        raise error(f"saving to {quote(target)} failed; {kept}: {_end(shown)}") from cause


def _system_error(error: BaseException) -> BaseException:
    """The error of a chain that has the system's words: libraries raise another one, or a group, because of it."""
    chain: list[BaseException] = [error]
    for link in chain:
        if (isinstance(link, OSError) and link.errno is not None) or "os_error_code" in str(link):
            return link
        causes = (*getattr(link, "exceptions", ()), link.__cause__, link.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]
    return error


def _end(text: str) -> str:
    """The end of a message: there, after its paths, the system says what was wrong.

    After that tensorstore may write how the array was to be stored, and where in its sources it failed.
    """
    if told := re.search(r"\[os_error_code=[^\]]*\]", text):
        text = text[: told.end()]
    return quote(text if len(text) <= 100 else f"…{text[-100:]}")


def _exists(target: str) -> TargetExistsError:
    return TargetExistsError(f"{quote(target)} exists; pass overwrite=True to replace what rlx_jax.save wrote there")


def sync(path: str) -> None:
    """What a file holds, or which names a directory has, is on disk when the call returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders(directory: str) -> None:
    """A directory, and those around it, if they are missing: on disk when the call returns."""
    missing, around = [], directory
    while not os.path.lexists(around):
        missing.append(around)
        around = os.path.dirname(around)
    os.makedirs(directory, exist_ok=True)
    for made in missing:
        sync(os.path.dirname(made))


# -- work directories --------------------------------------------------------------------------


@contextmanager
def _work_directory(target: str) -> Iterator[str]:
    """A locked work directory for a target, which is removed at the end."""
    parent, name = os.path.split(target)
    while True:
        work = os.path.join(parent, f".{name}.rlx-save-{os.getpid()}-{secrets.token_hex(4)}")
        os.mkdir(work)
        descriptor, lock = _lock(work)
        if descriptor is not None and lock != "taken" and os.path.isdir(work):
            break
        if descriptor is not None:  # another save has just removed it, as it was not locked yet
            os.close(descriptor)
    try:
        yield work
    finally:
        try:
            _discard(work, target)
        finally:
            os.close(descriptor)


def _lock(work: str) -> tuple[int | None, Literal["held", "taken", "unknown"]]:
    """A descriptor that holds the lock if it is free. The lock ends with its process.

    It is unknown on file systems without locks; there, nothing that others left is removed.
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
    return descriptor, "held"


def _works(parent: str, name: str) -> list[str]:
    found = [(entry, _WORK.fullmatch(entry)) for entry in sorted(os.listdir(parent))]
    return [os.path.join(parent, entry) for entry, work in found if work and work[1] == name]


def remove_abandoned(parent: str, name: str) -> None:
    """Remove the work directories of saves to the same target that have ended without removing them."""
    target = os.path.join(parent, name)
    for work in _works(parent, name):
        descriptor, lock = _lock(work)
        if descriptor is None:
            continue
        try:
            if lock == "held":
                _discard(work, target)
        finally:
            os.close(descriptor)


def _discard(work: str, target: str) -> None:
    """Remove a work directory that we hold, after what it took from the target is back in its place."""
    old = os.path.join(work, OLD)
    if os.path.isdir(old) and not os.path.lexists(target):
        os.rename(old, target)
        sync(os.path.dirname(target))
    for _ in range(20):  # threads of a save that failed may still be writing
        shutil.rmtree(work, ignore_errors=True)
        if not os.path.lexists(work):
            return
        time.sleep(0.01)
    # What cannot be removed now is tried again by the next save.


# -- renames -----------------------------------------------------------------------------------


def _commit(work: str, target: str, overwrite: bool) -> None:
    """Make the new directory the target."""
    new = os.path.join(work, NEW)
    if overwrite and os.path.lexists(target):
        if not _rename2(new, target, _EXCHANGE):
            os.rename(target, os.path.join(work, OLD))
            os.rename(new, target)
    else:
        try:
            if not _rename2(new, target, _NOREPLACE):
                os.rename(new, target)
        except OSError as cause:
            if cause.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _exists(target) from cause  # another save was faster
            raise


def _rename2(source: str, target: str, flags: int) -> bool:
    """Linux's renameat2; whether the system and the file system know it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source, None, target)
