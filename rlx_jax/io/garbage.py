"""`paused_gc`, for steps that create many objects that all stay alive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection.

    Imports and the build of a deep model allocate hundreds of thousands of small objects; scanning them repeatedly
    takes a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
