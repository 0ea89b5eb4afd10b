"""The command's side of a terminal: Ctrl-C, one line of progress, text that must not command it, warnings."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import Any, Self

from rlx_jax.errors import StorageError

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and new line


# -- Ctrl-C ------------------------------------------------------------------------------------


class Interrupt:
    """Ctrl-C, heard where the work may stop: between weights, programs and pieces of text. A second one counts at once.

    A KeyboardInterrupt at any place may come within a hook of JAX, which drops it, or cut the import of a native module
    short, which crashes when Python ends.
    """

    def __init__(self) -> None:
        self._heard = self._waiting = False
        self._before: Any = None

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else someone wants it otherwise
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: Any) -> None:
        if self._heard or self._waiting:
            raise KeyboardInterrupt
        self._heard = True

    def line(self) -> bytes:
        """The next line of stdin; empty at its end. Ctrl-C counts at once while there is none."""
        self._waiting = True
        try:
            self.check()
            return sys.stdin.buffer.readline()
        finally:
            self._waiting = False

    def check(self) -> None:
        """Stop here if Ctrl-C was pressed."""
        if self._heard:
            raise KeyboardInterrupt


# -- what is written ---------------------------------------------------------------------------


class Status:
    """One line on stderr that is written over: how far loading and compiling are.

    Text in the same terminal stands on that line once it has begun, and is not to be written over: it is `shared` then.
    """

    def __init__(self, interrupt: Interrupt, shown: bool) -> None:
        self._interrupt, self.shown, self._line, self._lock = interrupt, shown, "", threading.Lock()
        self._shared = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """See `rlx_jax.compiler.executable.Progress`."""
        self._interrupt.check()
        moves = what == "load" or what.startswith("download ")
        amount = f" {in_bytes(done)} of {in_bytes(total)}" if moves else " …" if done < total else ""
        self._write(f"{what}{amount}" if done < total else "")

    def clear(self) -> None:
        """Take the line away."""
        self._write("")

    def share(self, text: str) -> None:
        """The terminal's line begins with what `text` ends with: nothing is shown until it is ended."""
        self._shared = sys.stdout.isatty() and not text.endswith("\n")

    def _write(self, line: str) -> None:
        with self._lock:
            if self.shown and not self._shared and line != self._line:
                self._line = line
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()


def write(piece: str) -> None:
    """A piece of text, at once. What a model writes must not command a terminal."""
    try:
        sys.stdout.write(CONTROLS.sub("\ufffd", piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as cause:
        leave_stdout()
        raise StorageError(f"stdout: {cause.strerror}") from cause


def leave_stdout() -> None:
    """What Python flushes at its end goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """A warning in one line."""
    print(f"rlx-jax: {category.__name__}: {message}", file=sys.stderr)


def in_bytes(count: int) -> str:
    """A size to read.

    >>> in_bytes(999), in_bytes(2_471_645_608)
    ('999 B', '2.47 GB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
