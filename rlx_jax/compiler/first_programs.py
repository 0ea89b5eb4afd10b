"""`FirstPrograms`: what a process runs first with a model, which the next process loads while it reads the weights."""

from __future__ import annotations

import contextlib
import pickle
from concurrent.futures import Executor, Future
from typing import Any

import jax

from rlx_jax.compiler.compile_cache import load_recorded, open_store, read_record, trace_key

# Programs that a process loads ahead: those of the first tokens.
MAX_FIRST_PROGRAMS = 3


class FirstPrograms:
    """The programs that a process runs first with a model, which the next process loads while it reads the weights.

    Args:
        content: all data of the model that its programs are traced from.
        pool: the threads that load.

    Attributes:
        templates: the argument `template` of `take` in the last process, for each program that is loaded ahead.
    """

    def __init__(self, content: Any, pool: Executor) -> None:
        self._key, self._used = trace_key(("first programs", content), (), None), list[tuple[str, Any]]()
        self._listed: list[tuple[str, Any]] = []
        if (store := open_store()) is not None and self._key is not None:
            with contextlib.suppress(Exception):  # damaged; written again when programs run
                self._listed = pickle.loads(store.read(self._key) or pickle.dumps([]))
        records = {key: read_record(key) for key, _ in self._listed}
        self._loading = {key: pool.submit(load_recorded, each) for key, each in records.items() if each is not None}
        self.templates = [template for key, template in self._listed if key in self._loading]

    def take(self, template: Any, key: str) -> Future[jax.stages.Compiled | None] | None:
        """Return the program of a record, if it is loaded ahead, and note for the next process that it runs.

        Args:
            template: what the program is made from; it can be pickled.
            key: the key of the record.
        """
        if len(self._used) == MAX_FIRST_PROGRAMS:
            self._loading.clear()  # those of the last process that this one has not run take memory of the device
            return None
        self._used.append((key, template))
        if self._used != self._listed[: len(self._used)]:
            self._listed = [*self._used]
            if (store := open_store()) is not None and self._key is not None:
                with contextlib.suppress(Exception):
                    store.write(self._key, pickle.dumps(self._listed))
        return self._loading.pop(key, None)
