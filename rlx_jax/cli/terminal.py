"""The command's side of a terminal: Ctrl-C, one line of progress, text that must not command it, warnings."""

from __future__ import annotations

import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

from rlx_jax.errors import StorageError, shown

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

    def waits(self, ask: Callable[[], bytes]) -> bytes:
        """What `ask` reads of stdin. Ctrl-C counts at once while it waits."""
        self._waiting = True
        try:
            self.check()
            return ask()
        finally:
            self._waiting = False

    def forget(self) -> None:
        """Ctrl-C was pressed for what has ended by now; the next one counts anew."""
        self._heard = False

    def check(self) -> None:
        """Stop here if Ctrl-C was pressed."""
        if self._heard:
            raise KeyboardInterrupt


# -- what is typed -----------------------------------------------------------------------------


def next_line(prompt: str) -> bytes:
    """A line of stdin; empty at its end. Somebody who sits there sees the prompt. Where stdin and stdout are a terminal
    the line can be edited: it is as long as one likes, earlier ones come back, and lines that are pasted at once are
    one.
    """
    if in_terminal() and sys.stdout.isatty() and _editing():
        try:
            return input(prompt).encode("utf-8", "surrogateescape") + b"\n"
        except EOFError:
            print()  # what the shell writes next begins a line
            return b""
    if not in_terminal():
        return b"" if sys.stdin is None else sys.stdin.buffer.readline()
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.buffer.readline()
    print(end="" if line else "\n", file=sys.stderr)
    return line


def whole_input(what: str) -> bytes:
    """All of stdin. Somebody who sits there is told what is waited for."""
    if in_terminal():
        print(f"rlx-jax: {what}, and Ctrl-D at the end", file=sys.stderr)
    return b"" if sys.stdin is None else sys.stdin.buffer.read()


def in_terminal() -> bool:
    """Whether somebody reads and answers. (A shell's `<&-` leaves no stdin at all.)"""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


@functools.cache
def _editing() -> bool:
    """Whether lines can be edited here, from now on."""
    try:
        import readline
    except ImportError:  # not in every Python
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # who reads says what is no text
    return True


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
    except UnicodeEncodeError as cause:
        lost = cause.object[cause.start : cause.end]
        advice = "set PYTHONIOENCODING=utf-8, or ask for --json"
        raise StorageError(f"stdout: its encoding, {cause.encoding}, has no {shown(lost)}: {advice}") from cause
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
