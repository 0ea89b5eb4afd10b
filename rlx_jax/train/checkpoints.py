"""`rlx_jax.train.Checkpoints`: the steps of a training run in a directory, each complete or absent.

A step is written to a temporary directory, which process 0 then renames (see `rlx_jax.io.atomic`). Every process writes
its shards of the arrays, with orbax. A step can be restored with any other sharding over devices.
"""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self, TypeVar

import jax

from rlx_jax.errors import (
    MissingFileError,
    RequestError,
    RlxError,
    RlxWarning,
    SessionStateError,
    StorageError,
    TargetExistsError,
    listing,
    quote,
    shown,
)
from rlx_jax.io import atomic
from rlx_jax.io.files import is_text, list_directory
from rlx_jax.train import step_files
from rlx_jax.train.processes import Processes, Stop, preemption
from rlx_jax.train.step_files import StoredLeaf, check_same_leaves, named_leaves
from rlx_jax.weights.manifest import MANIFEST_NAME

Tree = TypeVar("Tree")


class Checkpoints:
    """The checkpoints of a training run: one directory for each step, named by its number.

        with Checkpoints("run", keep=3) as checkpoints:
            state = checkpoints.restore(state) if checkpoints.newest() is not None else state
            for step in range(...):
                state = train(state)
                checkpoints.save(step, state)

    A step is complete or absent, however the process ends, and older steps stay until a newer one is complete. With
    `jax.distributed` every process makes one object for the same directory, on a file system that all of them share,
    and calls the same methods in the same order.

    Args:
        directory: directory of the run, created by the first save; its parent has to exist.
        keep: number of steps to keep; None keeps all. An old step is removed after a newer one is complete.
        timeout_s: how long a process waits for another before it gives up, in seconds.

    Raises:
        RequestError: an argument is invalid. TargetExistsError: `directory` is a file.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3, *, timeout_s: float = 600.0) -> None:
        if not isinstance(directory, str | os.PathLike) or not is_text(path := os.fsdecode(directory)) or "\0" in path:
            raise RequestError(f"Checkpoints: directory is {shown(directory)}; expected a path of UTF-8, as orbax does")
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise RequestError(f"Checkpoints: keep is {shown(keep)}; expected a number from 1 on, or None to keep all")
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise RequestError(f"Checkpoints: timeout_s is {shown(timeout_s)}; expected seconds, more than 0")
        self._directory, self._keep = os.path.realpath(path), keep
        if os.path.lexists(self._directory) and not os.path.isdir(self._directory):
            raise TargetExistsError(f"Checkpoints: {quote(path)} is a file; expected a directory, or none yet")
        self._processes, self._operations = Processes(timeout_s), 0
        self._worker = ThreadPoolExecutor(1, "rlx-checkpoints")
        self._pending: list[Future[None]] = []
        self._closed = False
        weakref.finalize(self, _warn_of_unreported_failures, self._pending)

    # -- inspection ----------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the complete steps, the oldest first, without a save that runs in the background."""
        try:
            # A step that is being replaced has its old directory under another name for a moment.
            names = {*list_directory(self._directory), *atomic.targets_being_saved(self._directory)}
        except MissingFileError:
            return ()
        numbers = [int(name) for name in names if name.isdecimal() and name.isascii() and len(name) <= _DIGITS]
        return tuple(sorted(n for n in numbers if str(n) in names and self._is_complete(n)))

    def newest(self) -> int | None:
        """Return the highest number of a complete step; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    # -- saving --------------------------------------------------------------------------------

    def save(self, step: int, state: Any, *, overwrite: bool = False) -> None:
        """Save a pytree as a step. The current values are copied now, and written in the background.

        The call returns when the values are on the host: `state` may then be donated or changed. The step is complete
        when `wait`, `close` or the next `save` returns; if that raises, the save has failed.

        Args:
            step: its number, from 0 on.
            state: any pytree of arrays and numbers. Each process writes its shards of arrays over several processes. An
                array local to one process is assumed to be the same in all, and process 0 writes it.
            overwrite: replace the step of this number, which stays until the new one is complete.

        Raises:
            TargetExistsError: the step exists, and `overwrite` is false or something else wrote it.
            NoSpaceError, SaveFailedError: this save, or the previous one, failed; names the newest complete step.
            RequestError, UnsupportedError: a leaf is no array, has no values, or cannot be stored.
            SessionStateError: this object was closed.
        """
        self.wait()
        step_number, leaves = _step_number(step), named_leaves(state, "save: state")
        arrays = {leaf.name: leaf.snapshot() for leaf in leaves}
        topic = self._topic("save")
        with ExitStack() as stack:
            new = self._processes.run_first(
                f"{topic}/place", lambda: self._begin(stack, step_number, leaves, overwrite)
            )
            writing = self._worker.submit(step_files.start_writing, new, arrays)
            wait([writing])  # without `result()`: `_finish` reports a failure to the other processes
            finish_args = (topic, step_number, leaves, new, writing, stack.pop_all())
            self._pending.append(self._worker.submit(self._finish, *finish_args))
        if writing.exception() is not None:  # raise it now, not at the next call
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            NoSpaceError, SaveFailedError: the save failed; names the newest complete step. It is raised only once.
            SessionStateError: this object was closed.
        """
        if self._closed:
            raise SessionStateError(f"Checkpoints of {quote(self._directory)} are closed; make new ones")
        while self._pending:
            future = self._pending.pop()
            future.result()

    def close(self) -> None:
        """Wait for the save in the background, and end its thread. A second call does nothing.

        Raises:
            NoSpaceError, SaveFailedError: as `wait`.
        """
        if not self._closed:
            try:
                self.wait()
            finally:
                self._closed = True
                self._worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RlxError as failure:
            if error is None:
                raise
            error.add_note(f"and the save in the background failed: {failure}")

    def _begin(self, stack: ExitStack, step: int, leaves: tuple[StoredLeaf, ...], overwrite: bool) -> str:
        """Create a temporary directory for a step and return its path.

        When `stack` closes, the directory is renamed to the step, or removed if there was an exception.
        """
        target, remaining = self._target(step), self._newest_step_text()
        with atomic.storage_errors(target, remaining):
            os.makedirs(self._directory, exist_ok=True)
            for name in atomic.targets_being_saved(self._directory):  # left over from a process that was killed
                if name.isdecimal():
                    atomic.remove_abandoned(self._directory, name)
            if overwrite and os.path.lexists(target) and not self._is_complete(step):
                raise TargetExistsError(f"{quote(target)} is no step that was saved here; remove it, or save elsewhere")
            nbytes = sum(leaf.type.nbytes for leaf in leaves)
            new = stack.enter_context(atomic.atomic_directory(target, overwrite, nbytes, remaining))
            os.mkdir(new)
        return new

    def _finish(
        self, topic: str, step: int, leaves: tuple[StoredLeaf, ...], new: str, writing: Future[Callable[[], None]],
        stack: ExitStack,
    ) -> None:  # fmt: skip
        """Finish a save in the background: all processes write, and then process 0 completes the step."""
        target, remaining = self._target(step), self._newest_step_text()

        def write() -> dict[str, dict[str, Any]]:
            with atomic.storage_errors(target, remaining):
                writing.result()()
                return step_files.sync_own_files(new, self._processes.index)

        def commit() -> None:
            with atomic.storage_errors(target, remaining):
                step_files.finish_step(new, leaves, written)
            stack.close()
            self._remove_old_steps(step)

        with stack:
            written = self._processes.run_all(f"{topic}/written", write)
            self._processes.run_first(f"{topic}/whole", commit)

    def _remove_old_steps(self, saved: int) -> None:
        """Remove the oldest steps over the limit `keep`, but never the step that was just saved."""
        other_steps = [step for step in self.steps() if step != saved]
        surplus = 0 if self._keep is None else max(0, len(other_steps) + 1 - self._keep)
        for old in other_steps[:surplus]:
            atomic.remove(self._target(old), f"step {saved} is complete, and this old one could not be removed")

    # -- restoring -----------------------------------------------------------------------------

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """Restore the state of a step: the saved values, with the shardings of `like`.

        Names, shapes and dtypes of the leaves are checked against `like` first. Then the lengths and SHA-256 digests of
        all files are checked; several processes share the files.

        Args:
            like: the pytree to restore into, of arrays, or of `jax.ShapeDtypeStruct`s with shardings. A struct without
                sharding and an uncommitted array are restored as an uncommitted array; NumPy arrays and numbers, and
                Python numbers, as the same types.
            step: its number; None for the newest complete step.

        Returns:
            a pytree with the structure of `like`.

        Raises:
            MissingFileError: there is no complete step. StorageError: none has this number; lists the others.
            WeightError: leaves differ from `like`; lists them.
            IntegrityError, CheckpointFormatError, PathEscapeError: the step is damaged.
            LimitError: it does not fit in memory.
            SaveFailedError: the save in the background failed, see `wait`.
        """
        self.wait()
        leaves, topic = named_leaves(like, "restore: like"), self._topic("restore")
        step_number = self._processes.run_first(f"{topic}/step", lambda: self._choose_step(step))
        directory, values = self._step_directory(step_number), list[Any]()
        step_manifest = step_files.read_step_manifest(directory)
        stored_types = {name: entry.type for name, entry in step_manifest.weights.items()}
        check_same_leaves(stored_types, leaves, f"step {step_number} in {quote(self._directory)}")
        own_share = sorted(step_manifest.files)[self._processes.index :: self._processes.count]
        self._processes.run_all(f"{topic}/verified", lambda: step_files.check_step(directory, step_manifest, own_share))
        self._processes.run_all(f"{topic}/restored", lambda: values.extend(step_files.read_arrays(directory, leaves)))
        state: Tree = jax.tree.unflatten(jax.tree.structure(like), values)
        return state

    def preemption(self) -> AbstractContextManager[Stop]:
        """Turn SIGTERM into a flag while the block runs: it makes the `Stop` of the block true, and ends nothing
        itself.

            with checkpoints.preemption() as stop:
                while not stop.wanted: ...

        Read `wanted` once in every step. With several processes it becomes true in the same step of all, soon after any
        of them gets the signal. The current step, its save and the end of the program have to finish before SIGKILL; if
        they do not, the previous step is the newest complete one.

        Raises:
            RequestError: not in the main thread.
        """
        return preemption()

    # -- names ---------------------------------------------------------------------------------

    def _topic(self, operation: str) -> str:
        """Return a new topic for messages, the same in every process, as all call the same methods in order."""
        self._operations += 1
        return f"{operation}-{self._operations}"

    def _target(self, step: int) -> str:
        """Return the final path of a step."""
        return os.path.join(self._directory, str(step))

    def _step_directory(self, step: int) -> str:
        """Return the directory of a step.

        While a step is replaced it has another name, on file systems that cannot exchange two directories atomically.
        """
        return atomic.find_old_content(self._target(step)) or self._target(step)

    def _is_complete(self, step: int) -> bool:
        """Return whether a step is complete: it has the manifest, which is written last."""
        directory = self._step_directory(step)
        return os.path.isfile(os.path.join(directory, MANIFEST_NAME)) and not os.path.islink(directory)

    def _choose_step(self, step: int | None) -> int:
        """Return the number of the step to restore."""
        step_number, steps = None if step is None else _step_number(step), self.steps()
        if step_number is None:
            if not steps:
                raise MissingFileError(f"{quote(self._directory)}: no complete step in it; newest() is None then")
            return steps[-1]
        if step_number not in steps:
            available = f"complete steps are {listing(steps)}" if steps else "there are no complete steps"
            raise StorageError(f"{quote(self._target(step_number))}: not a complete step; {available}")
        return step_number

    def _newest_step_text(self) -> str:
        """Return in words which step remains if a save fails, for error messages."""
        newest = self.newest()
        return "there is no complete step yet" if newest is None else f"the newest complete step is {newest}"


_DIGITS = 18  # the most digits of a step number, which then fits an int64


def _step_number(step: Any) -> int:
    """Check the number of a step, and return it as int."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**_DIGITS:
        raise RequestError(f"step is {shown(step)}; expected a whole number from 0 on, of at most {_DIGITS} digits")
    return number


def _warn_of_unreported_failures(pending: list[Future[None]]) -> None:
    """Warn, at the end of the program, of failed saves that neither `wait` nor `close` has reported."""
    for future in pending:
        error = future.exception() if future.done() else None
        if error is not None:
            message = f"a save in the background failed; close() would have raised: {error}"
            warnings.warn(message, RlxWarning, stacklevel=1)
