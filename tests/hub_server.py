"""A hub on this machine's loopback that speaks what huggingface_hub's clients ask for, and misbehaves on request.

    GET  /api/models/<org>/<name>/revision/<revision>?blobs=true     the commit and its files
    GET  /<org>/<name>/resolve/<commit>/<path>                       a file; HEAD: what it is

A file under `LARGE` is one of git's, whose digest is git's; others, and safetensors, are stored apart, by SHA-256.
"""

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save

from tests.oracles.checkpoints import FIXTURES

LARGE = 50_000
COMMIT = "0123456789abcdef0123456789abcdef01234567"

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
INDEX = "model.safetensors.index.json"

Fault = Callable[["Handler", bytes], None]
"""Answers in place of the hub, which would have sent these bytes."""


def large(path: str, content: bytes) -> bool:
    return path.endswith(".safetensors") or len(content) >= LARGE


def digest(path: str, content: bytes) -> str:
    """What the hub calls the content of a file."""
    if large(path, content):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def listed(path: str, content: bytes) -> dict[str, Any]:
    """A file as the list of a repository has it."""
    row: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "0" * 40}
    if large(path, content):
        return row | {"lfs": {"sha256": digest(path, content), "size": len(content), "pointerSize": 129}}
    return row | {"blobId": digest(path, content)}


@dataclass
class Hub:
    """Repositories by name, each with its files; `revisions` of all lead to `COMMIT`.

    `faults` answer a GET whose path ends so, `token` is what private repositories want, `asked` what was asked for:
    method, path and the header of authorization. `ranges` and `sent`: by path, what parts were asked for, and how many
    bytes went out.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    faults: dict[str, Fault] = field(default_factory=dict)
    token: str | None = None
    endpoint: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    ranges: dict[str, list[str]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, directory: Path) -> None:
        """A repository with the files of a directory."""
        paths = [p for p in directory.rglob("*") if p.is_file()]
        self.files[name] = {p.relative_to(directory).as_posix(): p.read_bytes() for p in paths}

    def fetched(self) -> list[str]:
        """The paths of the files that were asked for, in order."""
        asked = [path.partition("/resolve/")[2] for method, path, _ in self.asked if method == "GET"]
        return [path.partition("/")[2] for path in asked if path]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        token = self.headers.get("authorization")
        self.hub.asked.append((self.command, path, token))
        inside = path.partition("/resolve/")[2].partition("/")[2]
        content, headers, refusal = self.look_up(path)
        if self.command == "GET":
            self.hub.ranges.setdefault(inside, []).append(self.headers.get("Range", ""))
            for ending, fault in self.hub.faults.items():
                if path.endswith(ending):
                    return fault(self, content)
        if refusal is None and self.hub.token is not None and token != f"Bearer {self.hub.token}":
            refusal = (401, "RepoNotFound")
        if refusal is not None:
            return self.refuse(*refusal)
        self.send(content, headers)

    def look_up(self, path: str) -> tuple[bytes, dict[str, str], tuple[int, str] | None]:
        """What is there: bytes and headers, or why not: status and code."""
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            (org, name), revision = parts[2:4], "/".join(parts[5:])
            if (files := self.hub.files.get(f"{org}/{name}")) is None:
                return b"", {}, (401, "RepoNotFound")  # as the Hub does for whoever shows no token
            if revision not in self.hub.revisions:
                return b"", {}, (404, "RevisionNotFound")
            model = {"id": f"{org}/{name}", "sha": COMMIT, "siblings": [listed(p, c) for p, c in files.items()]}
            return json.dumps(model).encode(), {"Content-Type": "application/json"}, None
        if parts[2:3] != ["resolve"]:
            return b"", {}, (404, "")
        org, name, _, revision, *rest = parts
        inside = "/".join(rest)
        files = self.hub.files.get(f"{org}/{name}", {})
        if revision not in self.hub.revisions or inside not in files:
            return b"", {}, (404, "EntryNotFound")
        content = files[inside]
        tag = "X-Linked-Etag" if large(inside, content) else "ETag"
        headers = {tag: f'"{digest(inside, content)}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content))}
        return content, headers, None

    def refuse(self, status: int, code: str = "") -> None:
        self.send(b'{"error": "no"}', {"X-Error-Code": code} if code else {}, status)

    def send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        """The bytes, or the rest of them from where a range begins."""
        asked = self.headers.get("Range", "")
        if status == 200 and asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last or len(content) - 1)
            headers = headers | {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
            content, status = content[start : end + 1], 206
        inside = urllib.parse.unquote(self.path).partition("/resolve/")[2].partition("/")[2]
        self.begin(status, headers | {"Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.hub.sent[inside] = self.hub.sent.get(inside, 0) + len(content)
            self.wfile.write(content)

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at work; `endpoint` says where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has heard enough
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refusing(status: int, code: str = "") -> Callable[[Handler, bytes], None]:
    return lambda handler, _: handler.refuse(status, code)


def sharded(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint, its weights in two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {key: names[i % 2] for i, key in enumerate(tensors)}
    parts = {n: save({k: tensors[k] for k in where if where[k] == n}, {"format": "pt"}) for n in names}
    rest = {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "model.safetensors" and p.is_file()}
    return rest | parts | {INDEX: json.dumps({"metadata": {}, "weight_map": where}).encode()}
