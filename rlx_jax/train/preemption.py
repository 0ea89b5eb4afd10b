"""SIGTERM as a wish: the run ends between two steps, all of its processes at the same one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils

from rlx_jax.errors import RequestError, UnsupportedError, quote


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
