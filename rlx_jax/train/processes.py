"""Messages between the processes of a run: who failed, who is done, what process 0 chose.

They go through the key-value store of `jax.distributed`, not through the devices: a thread in the background may
wait for one while the run computes, and waiting ends after a stated time.

`preemption`: SIGTERM as a wish: the run ends between two steps, all of its processes at the same one.
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

from rlx_jax import errors
from rlx_jax.errors import RequestError, RlxError, SaveFailedError, StorageError, UnsupportedError, quote

_OPENED = itertools.count()


class Processes:
    """The processes of `jax.distributed`, or this one alone.

    All of them make their `Processes` in the same order, and call its methods with the same topics: a topic is one
    question, and is used once.

    Args:
        timeout_s: how long one waits for another's answer, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._prefix, self._timeout_s, self._told = f"rlx_jax/{next(_OPENED)}", timeout_s, list[str]()

    @property
    def index(self) -> int:
        """The number of this process."""
        return int(jax.process_index())

    @property
    def count(self) -> int:
        """How many there are."""
        return int(jax.process_count())

    def first(self, topic: str, work: Callable[[], Any]) -> Any:
        """What `work` gives in process 0, as JSON has it. The others only wait for it.

        Raises:
            RlxError: `work` failed; every process raises an error of the same class.
            SaveFailedError: process 0 did not answer in time.
        """
        if self.index:
            return _opened(self._hear(topic, 0), 0)
        return self._try(topic, work)

    def all(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """What `work` gives in every process, in their order.

        Raises:
            RlxError: `work` failed in one of them; every process raises an error of the same class.
            SaveFailedError: one did not answer in time.
        """
        mine = self._try(topic, work)
        heard = {other: self._hear(topic, other) for other in range(self.count) if other != self.index}
        self._forget(topic)
        return [mine if n == self.index else _opened(heard[n], n) for n in range(self.count)]

    def _try(self, topic: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, after the others have been told of it, or of its failure."""
        try:
            result = work()
        except BaseException as error:
            self._tell(topic, {"error": type(error).__name__, "message": str(error) or type(error).__name__})
            raise
        self._tell(topic, {"result": result})
        return result

    def _tell(self, topic: str, message: dict[str, Any]) -> None:
        if self.count > 1:
            key = f"{self._prefix}/{topic}/{self.index}"
            _store().key_value_set(key, json.dumps(message))
            self._told.append(key)

    def _hear(self, topic: str, process: int) -> dict[str, Any]:
        try:
            text = _store().blocking_key_value_get(f"{self._prefix}/{topic}/{process}", int(self._timeout_s * 1000))
        except Exception as cause:  # the library's own classes are not public
            problem = f"process {process} of {self.count} did not answer within {self._timeout_s:g} s"
            raise SaveFailedError(f"{problem}, asked about {topic!r}; has it died? {quote(cause)}") from cause
        message: dict[str, Any] = json.loads(text)
        return message

    def _forget(self, topic: str) -> None:
        """Remove what this process told before `topic`: whoever has answered that has heard all that was before."""
        old = [key for key in self._told if not key.startswith(f"{self._prefix}/{topic}/")]
        for key in old:
            _store().key_value_delete(key)
        self._told = [key for key in self._told if key not in old]


def _store() -> Any:
    """The key-value store, by the name that orbax has for it: jax has no public one."""
    from orbax.checkpoint import multihost

    return multihost.get_jax_distributed_client()


def _opened(message: dict[str, Any], process: int) -> Any:
    """The result in another process's message.

    Raises:
        RlxError: the message tells of a failure; of the same class, if it is one of ours.
    """
    if "error" not in message:
        return message["result"]
    found = vars(errors).get(message["error"])
    ours = found if isinstance(found, type) and issubclass(found, RlxError) else StorageError
    raise ours(f"in process {process}: {message['message']}")


class Stop:
    """Whether the run is to end. Ask it once in every step, in every process; what was true stays true."""

    def __init__(self) -> None:
        self._asked, self._signalled, self._wanted = 0, False, False

    @property
    def wanted(self) -> bool:
        """Whether to save and end now. In several processes it becomes true in the same step of all.

        Raises:
            UnsupportedError: there are several processes, and `jax_enable_preemption_service` is off.
        """
        if not self._wanted:
            self._asked += 1
            self._wanted = self._signalled if jax.process_count() == 1 else _agreed(self._asked)
        return self._wanted

    def __bool__(self) -> bool:
        return self.wanted

    def signal(self) -> None:
        """SIGTERM has come to this process."""
        self._signalled = True


def _agreed(step: int) -> bool:
    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError as cause:
        raise UnsupportedError(f"preemption in several processes: {quote(cause)}") from cause


@contextmanager
def preemption() -> Iterator[Stop]:
    """A `Stop` that SIGTERM sets while the block runs; afterwards SIGTERM does what it did before.

    In several processes `jax.distributed` listens for the signal, from its `initialize` on, and no handler is set here.

    Raises:
        RequestError: not in the main thread, where alone Python takes signals.
    """
    stop = Stop()
    if jax.process_count() > 1:
        yield stop
        return
    if threading.current_thread() is not threading.main_thread():
        raise RequestError("preemption(): Python takes signals in its main thread alone; call it there")
    before = signal.signal(signal.SIGTERM, lambda *_: stop.signal())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
