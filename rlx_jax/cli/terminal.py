"""Terminal input and output of `rlx-jax`: Ctrl-C, a progress line, output without control characters, warnings."""

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
from rlx_jax.ir.text import format_bytes

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and new line


# -- Ctrl-C ------------------------------------------------------------------------------------


class Interrupt:
    """A handler that delays Ctrl-C until the work may stop: between weights, programs and parts of the text.

    A second Ctrl-C interrupts at once. The first one does not, as a KeyboardInterrupt at an arbitrary point may be
    raised in a hook of JAX, which swallows it, or during the import of a native module, which then crashes at exit.
    """

    def __init__(self) -> None:
        self._interrupted = self._is_reading = False
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        # Keep a handler that the caller of `main` has installed.
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous_handler = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)

    def _on_sigint(self, number: int, frame: Any) -> None:
        if self._interrupted or self._is_reading:
            raise KeyboardInterrupt
        self._interrupted = True

    def run_interruptible(self, read: Callable[[], bytes]) -> bytes:
        """Return the result of `read`, which reads stdin; Ctrl-C interrupts it at once."""
        self._is_reading = True
        try:
            self.check()
            return read()
        finally:
            self._is_reading = False

    def reset(self) -> None:
        """Discard an earlier Ctrl-C, as the work that it was for has ended."""
        self._interrupted = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._interrupted:
            raise KeyboardInterrupt


# -- input -------------------------------------------------------------------------------------


def read_line(prompt: str) -> bytes:
    """Read a line of stdin; empty at its end.

    In a terminal the prompt is shown. If stdout is a terminal too, the line can be edited: it may be of any length,
    earlier lines can be recalled, and several lines pasted at once are one.
    """
    if is_interactive() and sys.stdout.isatty() and _enable_line_editing():
        try:
            return input(prompt).encode("utf-8", "surrogateescape") + b"\n"
        except EOFError:
            print()  # so that the prompt of the shell starts on a new line
            return b""
    if not is_interactive():
        return b"" if sys.stdin is None else sys.stdin.buffer.readline()
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.buffer.readline()
    print(end="" if line else "\n", file=sys.stderr)
    return line


def read_stdin(expected: str) -> bytes:
    """Read all of stdin. In a terminal, first print what input is `expected`."""
    if is_interactive():
        print(f"rlx-jax: {expected}, and Ctrl-D at the end", file=sys.stderr)
    return b"" if sys.stdin is None else sys.stdin.buffer.read()


def is_interactive() -> bool:
    """Return whether a person uses the command interactively. (After a shell's `<&-`, `sys.stdin` is None.)"""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


@functools.cache
def _enable_line_editing() -> bool:
    """Turn on line editing, and return whether it is available."""
    try:
        import readline
    except ImportError:  # not in every Python
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(
            encoding="utf-8", errors="surrogateescape"
        )  # `decode_stdin` reports bytes that are not UTF-8
    return True


# -- output ------------------------------------------------------------------------------------


class Status:
    """A progress line on stderr for loading and compiling, which is overwritten by each update.

    Once the output on stdout has an unfinished line in the same terminal, the progress line is not shown, as it would
    overwrite that text; see `note_output`.
    """

    def __init__(self, interrupt: Interrupt, enabled: bool) -> None:
        self._interrupt, self.enabled, self._line, self._lock = interrupt, enabled, "", threading.Lock()
        self._line_unfinished = False

    def __call__(self, label: str, done: int, total: int) -> None:
        """See `rlx_jax.compiler.executable.Progress`."""
        self._interrupt.check()
        is_transfer = label == "load" or label.startswith("download ")
        amount = f" {format_bytes(done)} of {format_bytes(total)}" if is_transfer else " …" if done < total else ""
        self._write(f"{label}{amount}" if done < total else "")

    def clear(self) -> None:
        """Remove the line."""
        self._write("")

    def note_output(self, text: str) -> None:
        """Note that `text` was written to stdout: no progress is shown after an unfinished line in a terminal."""
        self._line_unfinished = sys.stdout.isatty() and not text.endswith("\n")

    def _write(self, line: str) -> None:
        with self._lock:
            if self.enabled and not self._line_unfinished and line != self._line:
                self._line = line
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()


def write(piece: str) -> None:
    """Write text to stdout and flush it.

    In a terminal, control characters are replaced, so that the text of a model cannot control the terminal.
    """
    try:
        sys.stdout.write(CONTROLS.sub("\ufffd", piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except UnicodeEncodeError as cause:
        unencodable = cause.object[cause.start : cause.end]
        advice = "set PYTHONIOENCODING=utf-8, or use --json"
        raise StorageError(f"stdout: its encoding, {cause.encoding}, has no {shown(unencodable)}: {advice}") from cause
    except OSError as cause:
        discard_stdout()  # Python's flush at exit would fail again
        raise StorageError(f"stdout: {cause.strerror}") from cause


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_warning(
    message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a warning on one line; a replacement for `warnings.showwarning`."""
    print(f"rlx-jax: {category.__name__}: {message}", file=sys.stderr)
