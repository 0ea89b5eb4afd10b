"""`rlx_jax.train.Checkpoints`: the steps of a training run in a directory, each whole or absent.

A step is written beside its place and renamed, as `rlx_jax.io.atomic` says, by process 0; arrays are written by the
processes that hold them, with orbax. Restoring takes any other division over devices.
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
from rlx_jax.io.files import list_directory
from rlx_jax.io.strict_json import is_text
from rlx_jax.train import step_files
from rlx_jax.train.processes import Processes, Stop, preemption
from rlx_jax.train.step_files import StoredLeaf, check_same, named_leaves
from rlx_jax.weights import manifest

Tree = TypeVar("Tree")


class Checkpoints:
    """The checkpoints of a training run: one directory for each step, named by its number.

        with Checkpoints("run", keep=3) as checkpoints:
            state = checkpoints.restore(state) if checkpoints.newest() is not None else state
            for step in range(...):
                state = train(state)
                checkpoints.save(step, state)

    A step is whole or absent, whatever ends the process, and a newer one takes nothing from an older one until it is
    whole itself. With `jax.distributed` every process makes one for the same directory, which all of them see, and
    calls the same methods in the same order.

    Args:
        directory: of the run; made by the first save. Its parent exists.
        keep: how many steps stay; None keeps all. An old one goes after a newer one is whole.
        timeout_s: how long a process waits for another before it gives up, in seconds.

    Raises:
        RequestError: an argument is not what it should be.
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
        weakref.finalize(self, _last_words, self._pending)

    # -- looking -------------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that are whole, the oldest first. A save in the background is not among them."""
        try:
            names = {*list_directory(self._directory), *atomic.being_saved(self._directory)}
        except MissingFileError:
            return ()
        numbers = [int(name) for name in names if name.isdecimal() and name.isascii() and len(name) <= _DIGITS]
        return tuple(sorted(n for n in numbers if str(n) in names and self._is_whole(n)))

    def newest(self) -> int | None:
        """The highest number of a whole step; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    # -- saving --------------------------------------------------------------------------------

    def save(self, step: int, state: Any, *, overwrite: bool = False) -> None:
        """Save a pytree as a step: values as they are now, written in the background.

        It returns when the values are copied to the host: `state` may then be donated or changed. The step is there
        when `wait`, `close` or the next `save` has returned. If that raises, the save has failed.

        Args:
            step: its number, from 0 on.
            state: any pytree of arrays and numbers. Arrays over several processes are written by those that hold them;
                what lies in one process alone is taken for the same in all, and process 0 writes it.
            overwrite: replace the step of this number, which stays until the new one is whole.

        Raises:
            TargetExistsError: the step exists, and `overwrite` is false or something else wrote it.
            NoSpaceError, SaveFailedError: this save, or the one before it, failed; names the newest whole step.
            RequestError, UnsupportedError: a leaf is no array, has no values, or cannot be stored.
            SessionStateError: it was closed.
        """
        self.wait()
        number, leaves = _step_number(step), named_leaves(state, "save: state")
        arrays = {leaf.name: leaf.snapshot() for leaf in leaves}
        topic = self._topic("save")
        with ExitStack() as stack:
            new = self._processes.first(f"{topic}/place", lambda: self._begin(stack, number, leaves, overwrite))
            writing = self._worker.submit(step_files.start_writing, new, arrays)
            wait([writing])  # a failure is told to the other processes below
            work = (topic, number, leaves, new, writing, stack.pop_all())
            self._pending.append(self._worker.submit(self._finish, *work))
        if writing.exception() is not None:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            NoSpaceError, SaveFailedError: it failed; names the newest whole step. Said once.
            SessionStateError: it was closed.
        """
        if self._closed:
            raise SessionStateError(f"Checkpoints of {quote(self._directory)} are closed; make new ones")
        while self._pending:
            done = self._pending.pop()
            done.result()

    def close(self) -> None:
        """Wait for the save in the background, and end its thread. A second time it does nothing.

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
        """The directory to write into. When `stack` closes it becomes the step, or goes if there was an exception."""
        target, kept = self._target(step), self._kept()
        with atomic.storage_errors(target, kept):
            os.makedirs(self._directory, exist_ok=True)
            for name in atomic.being_saved(self._directory):
                if name.isdecimal():
                    atomic.remove_abandoned(self._directory, name)
            if overwrite and os.path.lexists(target) and not self._is_whole(step):
                raise TargetExistsError(f"{quote(target)} is no step that was saved here; remove it, or save elsewhere")
            nbytes = sum(leaf.type.nbytes for leaf in leaves)
            new = stack.enter_context(atomic.replacing(target, overwrite, nbytes, kept))
            os.mkdir(new)
        return new

    def _finish(
        self, topic: str, step: int, leaves: tuple[StoredLeaf, ...], new: str, writing: Future[Callable[[], None]],
        stack: ExitStack,
    ) -> None:  # fmt: skip
        """In the background: all processes write, and then process 0 makes the step of it."""
        target, kept = self._target(step), self._kept()

        def write() -> dict[str, dict[str, Any]]:
            with atomic.storage_errors(target, kept):
                writing.result()()
                return step_files.own_files(new, self._processes.index)

        def commit() -> None:
            with atomic.storage_errors(target, kept):
                step_files.finish(new, leaves, written)
            stack.close()
            self._trim(step)

        with stack:
            written = self._processes.all(f"{topic}/written", write)
            self._processes.first(f"{topic}/whole", commit)

    def _trim(self, saved: int) -> None:
        """Remove the oldest steps, as many as are too many beside the one that was just saved."""
        others = [step for step in self.steps() if step != saved]
        surplus = 0 if self._keep is None else max(0, len(others) + 1 - self._keep)
        for old in others[:surplus]:
            atomic.remove(self._target(old), f"step {saved} is whole, and this old one could not be removed")

    # -- restoring -----------------------------------------------------------------------------

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """The state of a step: the values that were saved, divided over devices as `like` is.

        Names, shapes and dtypes of the leaves are compared with `like` first, then lengths and digests of all files,
        which are read for that; several processes share them.

        Args:
            like: the pytree to restore into: of arrays, or of `jax.ShapeDtypeStruct`s with shardings. A leaf without
                one, and an array that was not put on a device on purpose, comes back as such an array; NumPy's arrays
                and numbers, and Python's, as themselves.
            step: its number; None for the newest whole one.

        Returns:
            a pytree of the structure of `like`.

        Raises:
            MissingFileError: there is no whole step. StorageError: none of this number; lists the others.
            WeightError: leaves are not those of `like`; lists them.
            IntegrityError, CheckpointFormatError, PathEscapeError: the step is damaged.
            LimitError: it does not fit in memory.
            SaveFailedError: the save in the background failed, see `wait`.
        """
        self.wait()
        leaves, topic = named_leaves(like, "restore: like"), self._topic("restore")
        number = self._processes.first(f"{topic}/step", lambda: self._choose(step))
        place, restored = self._place(number), list[Any]()
        found = step_files.read_leaves(place)
        stored = {name: entry.type for name, entry in found.weights.items()}
        check_same(stored, leaves, f"step {number} in {quote(self._directory)}")
        share = sorted(found.files)[self._processes.index :: self._processes.count]
        self._processes.all(f"{topic}/verified", lambda: step_files.check_step(place, found, share))
        self._processes.all(f"{topic}/restored", lambda: restored.extend(step_files.read_arrays(place, leaves)))
        back: Tree = jax.tree.unflatten(jax.tree.structure(like), restored)
        return back

    def preemption(self) -> AbstractContextManager[Stop]:
        """While the block runs, SIGTERM ends nothing by itself; it makes the `Stop` true that the block is given.

            with checkpoints.preemption() as stop:
                while not stop.wanted: ...

        Ask once in every step. With several processes it becomes true in the same step of all, soon after any of them
        got the signal. The step in hand, its save and the end of the program must fit into what is left until SIGKILL;
        if they do not, the step before is whole.

        Raises:
            RequestError: not in the main thread.
        """
        return preemption()

    # -- names ---------------------------------------------------------------------------------

    def _topic(self, what: str) -> str:
        self._operations += 1
        return f"{what}-{self._operations}"

    def _target(self, step: int) -> str:
        return os.path.join(self._directory, str(step))

    def _place(self, step: int) -> str:
        """Where a step lies: while it is replaced, on file systems that cannot exchange, elsewhere."""
        return atomic.abandoned_old(self._target(step)) or self._target(step)

    def _is_whole(self, step: int) -> bool:
        place = self._place(step)
        return os.path.isfile(os.path.join(place, manifest.NAME)) and not os.path.islink(place)

    def _choose(self, step: int | None) -> int:
        number, steps = None if step is None else _step_number(step), self.steps()
        if number is None:
            if not steps:
                raise MissingFileError(f"{quote(self._directory)}: no whole step in it; newest() is None then")
            return steps[-1]
        if number not in steps:
            whole = f"whole steps are {listing(steps)}" if steps else "there are no whole steps"
            raise StorageError(f"{quote(self._target(number))}: not a step that was saved whole; {whole}")
        return number

    def _kept(self) -> str:
        newest = self.newest()
        return "there is no whole step yet" if newest is None else f"the newest whole step is {newest}"


_DIGITS = 18


def _step_number(step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**_DIGITS:
        raise RequestError(f"step is {shown(step)}; expected a whole number from 0 on, of at most {_DIGITS} digits")
    return number


def _last_words(pending: list[Future[None]]) -> None:
    """At the end of the program, say what nobody has asked about."""
    for future in pending:
        error = future.exception() if future.done() else None
        if error is not None:
            told = f"a save in the background failed; close() would have raised: {error}"
            warnings.warn(told, RlxWarning, stacklevel=1)
