"""Asking the Hub for bytes: the one file that goes to the network, and what may go wrong there.

The session and the token are huggingface_hub's. The server is a stranger: times, lengths and waits are limited here.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Protocol

from rlx_jax.errors import (
    HubError,
    HubUnreachableError,
    IntegrityError,
    MissingFileError,
    RequestError,
    RlxError,
    one_line,
    shown,
)

WAITS_S = (1, 2, 4, 8)
"""Seconds before each new try of a transfer that stopped; after `SLOW_BYTES` that came the count begins again."""
MAX_WAIT_S = 60
"""A server that asks for a longer wait is given up."""
SLOW_S, SLOW_BYTES = 60, 2**16
"""A file of which fewer bytes arrive in so many seconds is given up."""

AT_ONCE = 4
"""Files that are fetched side by side."""

_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True)
class Remote:
    """Where models come from and are kept, as the environment says when it is made."""

    endpoint: str = field(repr=False)
    cache: str
    token: str | bool | None = field(repr=False)

    @property
    def server(self) -> str:
        """The endpoint for messages: a user and a password that stand in it do not."""
        scheme, slashes, rest = self.endpoint.rpartition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"

    @staticmethod
    def here(token: str | bool | None) -> Remote:
        """By `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`.

        Raises:
            RequestError: `token` is none. HubError: `HF_HUB_DOWNLOAD_TIMEOUT` is no number of seconds.
        """
        if not isinstance(token, str | bool | None):
            raise RequestError(f"token: expected a string, True, False or None, got {type(token).__name__}")
        if isinstance(token, str) and not re.fullmatch(r"[!-~]+", token):  # what it is stays out of the message
            raise RequestError("token: expected printable ASCII without spaces; it is neither shown nor sent")
        _patience()  # huggingface_hub's import would end in a bare error
        given = os.environ.get
        home = given("HF_HOME") or os.path.join(given("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        cache = given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
        endpoint = (given("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        return Remote(endpoint, os.path.realpath(os.path.expandvars(os.path.expanduser(cache))), token)


def is_offline() -> bool:
    """Whether the environment says that nothing is to be fetched."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


class GivenUp(Exception):
    """A transfer that nobody waits for any more: another one of the same call failed."""


class Sink(Protocol):
    """Where a body goes."""

    @property
    def count(self) -> int:
        """Bytes so far."""

    @property
    def keeps(self) -> bool:
        """Whether a transfer that stops now leaves what came to the next call."""

    def write(self, chunk: bytes) -> None: ...


class Text:
    """What comes, in memory; `check` is told how many bytes there are."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self.text, self._check = bytearray(), check

    @property
    def count(self) -> int:
        return len(self.text)

    @property
    def keeps(self) -> bool:
        return False

    def write(self, chunk: bytes) -> None:
        self.text += chunk
        self._check(self.count)


@dataclass(frozen=True)
class Wanted:
    """What is asked for: all that is at `url`, which has `nbytes` if that is known; with `first`, `nbytes` from that
    byte on. Messages begin with `where`; once `stop` is set nothing more is asked for."""

    url: str
    where: str
    nbytes: int | None = None
    first: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def range_from(self, count: int) -> str:
        """The header of a request for what is missing behind `count` bytes; empty: all of it."""
        if self.first is None:
            return f"bytes={count}-" if count else ""
        return f"bytes={self.first + count}-{self.first + (self.nbytes or 0) - 1}"


def fill(
    remote: Remote, wanted: Wanted, sink: Sink, told: Callable[[int], None], waits: Sequence[float] | None = None
) -> None:
    """Write what is wanted. What stops is asked for again from there on.

    Raises:
        GivenUp: `wanted.stop` was set.
    """
    waits, tries = WAITS_S if waits is None else waits, 0
    while True:
        before = sink.count
        try:
            _receive(remote, wanted, sink, told)
            return
        except _Stopped as stopped:
            tries = 0 if sink.count - before >= SLOW_BYTES else tries
            wait = stopped.wait if stopped.wait is not None or tries >= len(waits) else waits[tries]
            if tries >= len(waits) or wait is None or wait > MAX_WAIT_S:
                kept = "the next call goes on from there" if sink.keeps else "nothing is kept"
                came = f"; {sink.count} bytes came, and {kept}" if sink.count else ""
                raise HubUnreachableError(f"{stopped}{came}") from stopped
        tries += 1
        if wanted.stop.wait(wait):
            raise GivenUp


def _receive(remote: Remote, wanted: Wanted, sink: Sink, told: Callable[[int], None]) -> None:
    """One transfer: what is still missing in `sink`."""
    where, nbytes = wanted.where, wanted.nbytes
    since, at = time.monotonic(), sink.count
    for chunk in _body(remote, wanted, sink.count):
        if wanted.stop.is_set():
            raise GivenUp
        if nbytes is not None and sink.count + len(chunk) > nbytes:
            if wanted.first is None:
                raise IntegrityError(f"{where}: more came than the {nbytes} bytes that it has; nothing is kept")
            chunk = chunk[: nbytes - sink.count]  # of a server without ranges, which sends all that is behind them
        sink.write(chunk)
        told(len(chunk))
        if (now := time.monotonic()) - since > SLOW_S:
            if sink.count - at < SLOW_BYTES:
                raise HubUnreachableError(f"{where}: {sink.count - at} bytes came in {SLOW_S} s; given up")
            since, at = now, sink.count
        if wanted.first is not None and sink.count == nbytes:
            return
    if nbytes is not None and sink.count < nbytes:
        raise _Stopped(f"{where}: the transfer ended at byte {sink.count} of {nbytes}")


class _Stopped(HubUnreachableError):
    """A transfer that may go on after `wait` seconds; None: the server does not say."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


def _patience() -> float:
    """Seconds without a byte after which a transfer has stopped: whole ones, as huggingface_hub reads no others.

    Raises:
        HubError: `HF_HUB_DOWNLOAD_TIMEOUT` is no such number.
    """
    given = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "").strip()
    if not given:
        return 10.0
    if not re.fullmatch(r"\d{1,9}", given) or not int(given):
        raise HubError(f"HF_HUB_DOWNLOAD_TIMEOUT is {shown(given)}; expected whole seconds above 0, such as 10")
    return float(given)


def _body(remote: Remote, wanted: Wanted, count: int) -> Iterator[bytes]:
    """What is wanted, without the first `count` bytes of it.

    Raises:
        _Stopped: no connection, too slow, cut, or a server in trouble. HubError, MissingFileError: it refuses.
        IntegrityError: another part came than was asked for.
    """
    from huggingface_hub import get_session

    seconds = _patience()
    where, asked, start = wanted.where, wanted.range_from(count), (wanted.first or 0) + count
    headers = _headers(remote, where) | ({"Range": asked} if asked else {})
    try:
        # Redirects are followed; to another host they go without the token, and what comes is checked.
        with get_session().stream(
            "GET", wanted.url, headers=headers, timeout=seconds, follow_redirects=True
        ) as response:
            if response.status_code not in (200, 206):
                raise _refusal(response.status_code, response.headers, where, remote, "Authorization" in headers)
            part = response.headers.get("Content-Range", "")
            if wanted.first is not None and response.status_code == 206 and not part.startswith(f"bytes {start}-"):
                raise IntegrityError(
                    f"{where}: asked for the bytes from {start} on, got {shown(part)}"
                )  # no digest tells
            skipped = start if response.status_code == 200 else 0  # a server without ranges begins again
            for chunk in response.iter_bytes():
                rest, skipped = chunk[skipped:], max(0, skipped - len(chunk))
                if rest:
                    yield rest
    except (RlxError, GeneratorExit):
        raise
    except Exception as cause:
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        if "OfflineModeIsEnabled" in kinds:
            raise HubUnreachableError(f"{where}: HF_HUB_OFFLINE was set when huggingface_hub was imported") from cause
        said = one_line(str(cause))[:200] or type(cause).__name__
        if "TimeoutException" in kinds:
            said = f"no answer for {seconds:g} s (HF_HUB_DOWNLOAD_TIMEOUT)"
        raise _Stopped(f"{where}: {remote.server} cannot be reached: {said}") from cause


def _headers(remote: Remote, where: str) -> dict[str, str]:
    """Who asks, with the token if there is one.

    Raises:
        HubError: `token=True` and there is none, or it is no token; what it is stays out of the message.
    """
    import huggingface_hub

    token, implicit = remote.token, os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() not in _TRUE
    try:
        if token is True or (token is None and implicit):
            token = huggingface_hub.get_token() or token
    except Exception as cause:  # a login that cannot be renewed, for one
        raise HubError(f"{where}: the stored token: {type(cause).__name__}; pass token=, or token=False") from cause
    if token is True:
        raise HubError(f"{where}: token=True, and none is stored: pass token=, or set HF_TOKEN")
    if token and not re.fullmatch(r"[!-~]+", token):
        raise HubError(f"{where}: the token of HF_TOKEN, or of its file, is not printable ASCII; it was not sent")
    headers = {"User-Agent": f"rlx_jax; huggingface_hub/{huggingface_hub.__version__}", "Accept-Encoding": "identity"}
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def _refusal(status: int, headers: Mapping[str, str], where: str, remote: Remote, with_token: bool) -> RlxError:
    """What a status of 400 and over means, and what to do."""
    code, host = headers.get("X-Error-Code", ""), remote.server
    if status in (408, 429) or status >= 500:
        asked = headers.get("Retry-After", "")
        return _Stopped(f"{where}: {host} answers {status}", int(asked) if re.fullmatch(r"\d{1,9}", asked) else None)
    if code == "RevisionNotFound":
        how = "a commit is given by its 40 digits, a pull request as refs/pr/1"
        return MissingFileError(f"{where}: {host} has no such branch, tag or commit of it; {how}")
    if code == "EntryNotFound":
        return MissingFileError(f"{where}: {host} lists the file and does not have it; try again")
    if code == "GatedRepo":
        how = "with the account of this token" if with_token else "and pass token=, or set HF_TOKEN"
        return HubError(f"{where}: {host} gives it only to those who asked for it ({status}): ask on its page, {how}")
    if status in (401, 403) and with_token:
        return HubError(f"{where}: {host} refuses it to this token ({status}): use one that may read it")
    if status == 401:
        return MissingFileError(
            f"{where}: {host} has no such model for all to see ({status}): look at the name; if it is private, pass "
            "token=, or set HF_TOKEN"
        )
    if status == 403:
        return HubError(f"{where}: {host} refuses it ({status}): pass token=, or set HF_TOKEN")
    if status == 404:
        return MissingFileError(f"{where}: {host} has no such model ({status}): look at the name")
    return HubError(f"{where}: {host} answers {status}")


def run_together(fetch: Callable[[str, threading.Event], None], names: Sequence[str]) -> None:
    """`fetch(name, stop)` of each, `AT_ONCE` at a time. Where one raises, `stop` is set and the others are waited for.

    Raises:
        What the first one that failed raised.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(AT_ONCE, "rlx-download") as pool:
        running = [pool.submit(fetch, name, stop) for name in names]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
