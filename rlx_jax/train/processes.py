"""`Processes`: messages between the processes of a run, such as results, failures, and choices of process 0.

Messages use the key-value store of `jax.distributed` rather than collectives on the devices: a background thread can
wait for one while the run computes, and waiting has a timeout.

`preemption` turns SIGTERM into a flag, so that a run ends between two steps, with all processes at the same step.
"""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import multihost_utils

import rlx_jax.errors as errors
from rlx_jax.errors import RequestError, RlxError, SaveFailedError, StorageError, UnsupportedError, quote

_PREFIX_COUNTER = itertools.count()


class Processes:
    """The processes of `jax.distributed`, or a single process.

    All processes have to create their `Processes` objects in the same order, and call their methods with the same
    topics. A topic identifies one exchange of messages, and is used once.

    Args:
        timeout_s: how long a process waits for a message of another, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._prefix, self._timeout_s, self._sent_keys = f"rlx_jax/{next(_PREFIX_COUNTER)}", timeout_s, list[str]()

    @property
    def index(self) -> int:
        """Return the index of this process."""
        return int(jax.process_index())

    @property
    def count(self) -> int:
        """Return the number of processes."""
        return int(jax.process_count())

    def run_first(self, topic: str, work: Callable[[], Any]) -> Any:
        """Run `work` in process 0, and return its result in all processes.

        The other processes wait, and get the result as JSON preserves it.

        Raises:
            RlxError: `work` failed; every process raises an error of the same class.
            SaveFailedError: process 0 did not answer in time.
        """
        if self.index:
            return _result_of(self._receive(topic, 0), 0)
        return self._run(topic, work)

    def run_all(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """Run `work` in every process, and return all results, by process index.

        Raises:
            RlxError: `work` failed in one of them; every process raises an error of the same class.
            SaveFailedError: a process did not answer in time.
        """
        own_result = self._run(topic, work)
        messages = {other: self._receive(topic, other) for other in range(self.count) if other != self.index}
        self._delete_old_messages(topic)
        return [own_result if n == self.index else _result_of(messages[n], n) for n in range(self.count)]

    def _run(self, topic: str, work: Callable[[], Any]) -> Any:
        """Run `work`, send its result or its failure to the other processes, and return the result."""
        try:
            result = work()
        except BaseException as error:
            self._send(topic, {"error": type(error).__name__, "message": str(error) or type(error).__name__})
            raise
        self._send(topic, {"result": result})
        return result

    def _send(self, topic: str, message: dict[str, Any]) -> None:
        """Send a message of this process to all others."""
        if self.count > 1:
            key = f"{self._prefix}/{topic}/{self.index}"
            _key_value_store().key_value_set(key, json.dumps(message))
            self._sent_keys.append(key)

    def _receive(self, topic: str, process: int) -> dict[str, Any]:
        """Wait for the message of another process.

        Raises:
            SaveFailedError: it does not come before the timeout.
        """
        try:
            key = f"{self._prefix}/{topic}/{process}"
            text = _key_value_store().blocking_key_value_get(key, int(self._timeout_s * 1000))
        except Exception as cause:  # jaxlib's error classes are not public
            problem = f"process {process} of {self.count} did not answer within {self._timeout_s:g} s"
            raise SaveFailedError(f"{problem} to {topic!r}; has it died? {quote(cause)}") from cause
        message: dict[str, Any] = json.loads(text)
        return message

    def _delete_old_messages(self, topic: str) -> None:
        """Delete this process's messages of topics before `topic`.

        Every process has answered `topic`, so each has read all earlier messages.
        """
        old = [key for key in self._sent_keys if not key.startswith(f"{self._prefix}/{topic}/")]
        for key in old:
            _key_value_store().key_value_delete(key)
        self._sent_keys = [key for key in self._sent_keys if key not in old]


def _key_value_store() -> Any:
    """Return the key-value store. It comes from orbax, as jax has no public function for it."""
    from orbax.checkpoint import multihost

    return multihost.get_jax_distributed_client()


def _result_of(message: dict[str, Any], process: int) -> Any:
    """Return the result in a message of another process.

    Raises:
        RlxError: the message reports a failure. It has the same class, if that is a class of `rlx_jax.errors`.
    """
    if "error" not in message:
        return message["result"]
    candidate = vars(errors).get(message["error"])
    error_class = candidate if isinstance(candidate, type) and issubclass(candidate, RlxError) else StorageError
    raise error_class(f"in process {process}: {message['message']}")


class Stop:
    """A flag that requests the end of the run. Read it once in every step of every process; true stays true."""

    def __init__(self) -> None:
        self._num_reads, self._is_signalled, self._is_wanted = 0, False, False

    @property
    def wanted(self) -> bool:
        """Return whether to save and end now. In several processes it becomes true in the same step of all.

        Raises:
            UnsupportedError: there are several processes, and `jax_enable_preemption_service` is off.
        """
        if not self._is_wanted:
            self._num_reads += 1
            self._is_wanted = self._is_signalled if jax.process_count() == 1 else _is_stop_step(self._num_reads)
        return self._is_wanted

    def __bool__(self) -> bool:
        return self.wanted

    def signal(self) -> None:
        """Record that this process got SIGTERM."""
        self._is_signalled = True


def _is_stop_step(step: int) -> bool:
    """Return whether jax has chosen this step as the common one to stop at."""
    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError as cause:
        raise UnsupportedError(f"preemption in several processes: {quote(cause)}") from cause


@contextmanager
def preemption() -> Iterator[Stop]:
    """Yield a `Stop` that SIGTERM sets while the block runs; afterwards the previous signal handler is restored.

    In several processes `jax.distributed` handles the signal, from its `initialize` on, and no handler is set here.

    Raises:
        RequestError: this is not the main thread, and Python handles signals only there.
    """
    stop = Stop()
    if jax.process_count() > 1:
        yield stop
        return
    if threading.current_thread() is not threading.main_thread():
        raise RequestError("preemption(): Python handles signals in the main thread only; call it there")
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: stop.signal())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous_handler if previous_handler is not None else signal.SIG_DFL)
