"""A program in a terminal of its own: what is typed there, and what it shows."""

import contextlib
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self


class Terminal:
    """The program is gone at the end: one that waits for what nobody types would stay for ever."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        self._here, there = pty.openpty()
        self.process = subprocess.Popen(
            words, stdin=there, stdout=there, stderr=there, cwd=folder, env=environment, start_new_session=True
        )
        os.close(there)

    def write(self, text: str) -> None:
        os.write(self._here, text.encode())

    def until(self, pattern: str, seconds: float = 120) -> str:
        """What is shown up to a pattern, without what moves the cursor; it fails where that does not come."""
        seen, end = "", time.monotonic() + seconds
        while re.search(pattern, seen, re.DOTALL) is None:
            ready, _, _ = select.select([self._here], [], [], max(0.0, end - time.monotonic()))
            assert ready, (pattern, seen)
            seen += os.read(self._here, 4096).decode("utf-8", "replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r", "")

    def rest(self) -> str:
        """What is shown until the program ends."""
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that the other side is closed
            while part := os.read(self._here, 4096):
                shown += part
        return shown.decode("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._here)
        self.process.kill()
        self.process.wait()
