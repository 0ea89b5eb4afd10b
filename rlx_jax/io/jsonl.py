"""`open_job`: write one line of JSON for each line of an input file, so that a killed process can be resumed.

The output has a complete line for each result, in any order, that begins with the index of its input line. A last line
without an end is computed again. The file `OUTPUT.job` next to it records the input and the settings, which must be the
same to resume; a process holds a lock on it while it writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from rlx_jax.errors import FormatError, MissingFileError, RequestError, StorageError, TargetExistsError, quote, shown
from rlx_jax.io import limits
from rlx_jax.io.atomic import storage_errors, sync
from rlx_jax.io.files import parse_object

# A complete result; a NUL is a hole that a power failure left.
RESULT = re.compile(rb'\{"index": (\d{1,18}), [^\0]*\}\n')
INTACT = "its complete lines are intact"


@dataclass(eq=False)
class LineJob:
    """A job in progress.

    Attributes:
        source, output: the open files.
        target: path of the output.
        done: for each line of the input 1 if its result is written, or if the line is blank.
        total: number of lines that are not blank.
        num_done: number of results.
        seed: a random seed of 32 bits, which is the same when the job is resumed.
    """

    source: BinaryIO
    output: BinaryIO
    target: str
    done: bytearray
    total: int
    num_done: int
    seed: int

    def pending(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of the input without a result, with their indices."""
        self.source.seek(0)
        for index, line in zip(range(len(self.done)), self.source, strict=False):
            if not self.done[index]:
                yield index, line

    def write(self, index: int, fields: str) -> None:
        """Write the result of a line.

        Args:
            index: the line.
            fields: the result as JSON, an object of at least one field with a line end.

        Raises:
            StorageError: the system refused.
        """
        with storage_errors(self.target, INTACT):
            self.output.write(f'{{"index": {index}, {fields[1:]}'.encode())
            self.output.flush()
        self.done[index], self.num_done = 1, self.num_done + 1


@contextmanager
def open_job(
    source: str, target: str, settings: Mapping[str, Any], *, overwrite: bool = False, unit: int = 1
) -> Iterator[LineJob]:
    """Start a job, or resume it if the output exists.

    Args:
        source: path of the input.
        target: path of the output.
        settings: what the results depend on besides the input, as JSON values.
        overwrite: discard an output that exists.
        unit: number of results that are computed together and written in order; an incomplete unit is computed again.

    Raises:
        MissingFileError: there is no input. LimitError: a line is longer than `limits.MAX_LINE_BYTES`.
        RequestError: input or settings are not the ones of the job; another process writes the output; or the input is
            a pipe, or the output or its record.
        TargetExistsError: the output is no output of a job. FormatError: it has a line that is no result.
        StorageError: the system refused an operation.
    """
    if os.path.realpath(source) in (os.path.realpath(target), os.path.realpath(f"{target}.job")):
        raise RequestError(f"input and output are the same file, {quote(source)}")
    with ExitStack() as stack:
        try:
            input_file = stack.enter_context(open(source, "rb"))
            if not input_file.seekable():
                raise RequestError(f"{quote(source)} is a pipe, and the input is read twice; write it to a file first")
            digest, done = _scan_input(input_file, source)
        except OSError as cause:
            error = MissingFileError if isinstance(cause, FileNotFoundError) else StorageError
            raise error(f"{quote(source)}: {cause.strerror}") from cause
        settings, total = {**settings, "input": digest}, done.count(0)
        with storage_errors(target, INTACT):
            resumes = os.path.lexists(target) and not overwrite
            if resumes and not os.path.lexists(f"{target}.job"):
                raise TargetExistsError(f"{quote(target)} exists, and it is no output of a job that can be resumed")
            record = stack.enter_context(_open_locked(f"{target}.job"))
            if resumes:
                seed = _check_record(record.read(limits.MAX_CONFIG_BYTES), settings, target)
            else:
                seed = _start(record, settings, target)
            output = open(target, "r+b" if resumes else "x+b")
            stack.callback(_close, output, target)
            num_done = _scan_output(output, target, done, unit)
        yield LineJob(input_file, output, target, done, total, num_done, seed)
        with storage_errors(target, INTACT):
            os.fsync(output.fileno())


def _scan_input(file: BinaryIO, name: str) -> tuple[str, bytearray]:
    """Return the SHA-256 of a file, and for each line whether it is blank."""
    digest, blank = hashlib.sha256(), bytearray()
    while line := file.readline(limits.MAX_LINE_BYTES + 1):
        if len(line) > limits.MAX_LINE_BYTES:
            where = f"{quote(name)}: line {len(blank) + 1}: the number of bytes"
            limits.check_limit(len(line), limits.bound("MAX_LINE_BYTES"), where)
        digest.update(line)
        blank.append(not line.strip())
    return digest.hexdigest(), blank


def _open_locked(path: str) -> BinaryIO:
    """Open a file, which is created if needed, and lock it until it is closed or the process ends."""
    import fcntl  # not on Windows, where rlx_jax can be imported

    file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        file.close()
        raise RequestError(f"{quote(path)}: another process writes the output of this job") from cause
    return file


def _close(file: BinaryIO, target: str) -> None:
    """Close the output, which writes once more what a full disk refused."""
    with storage_errors(target, INTACT):
        file.close()


def _start(record: BinaryIO, settings: Mapping[str, Any], target: str) -> int:
    """Remove an old output, record the settings, and return the seed.

    Each step is on disk before the next, so that an output never has results of other settings than the record.
    """
    if os.path.lexists(target):
        os.unlink(target)
    seed = secrets.randbits(32)
    record.truncate(0)
    record.write(json.dumps({"seed": seed, "settings": settings}).encode())
    record.flush()
    os.fsync(record.fileno())
    sync(os.path.dirname(target) or ".")
    return seed


def _check_record(content: bytes, settings: Mapping[str, Any], target: str) -> int:
    """Return the seed of a recorded job, after comparing its settings."""
    where = quote(f"{target}.job")
    match parse_object(content, where, FormatError):
        case {"seed": int(seed), "settings": dict(recorded)}:
            pass
        case other:
            raise FormatError(f"{where}: expected seed and settings, got {shown(other)}")
    for name in dict.fromkeys((*recorded, *settings)):
        old, new = recorded.get(name), settings.get(name)
        if old != new:
            raise RequestError(
                f"{quote(target)} was started with another {name}, {shown(old)}, and now it is {shown(new)}; resume it "
                "with the same, choose another output, or overwrite it"
            )
    return seed


def _scan_output(file: BinaryIO, name: str, done: bytearray, unit: int) -> int:
    """Mark the lines that have a result, remove what is incomplete at the end, and return the number of results."""
    num_left, end, offset, incomplete = done.count(0), 0, 0, list[int]()
    total = num_left
    for line in file:
        if not line.endswith(b"\n"):
            break
        match = RESULT.fullmatch(line)
        index = -1 if match is None else int(match[1])
        if not 0 <= index < len(done) or done[index]:
            raise FormatError(f"{quote(name)}: the line at byte {offset} is no result of this job, or a second one")
        done[index], offset, num_left = 1, offset + len(line), num_left - 1
        incomplete.append(index)
        if len(incomplete) == unit or not num_left:
            end, incomplete = offset, []
    for index in incomplete:
        done[index] = 0
    file.truncate(end)
    file.seek(end)
    return total - num_left - len(incomplete)
