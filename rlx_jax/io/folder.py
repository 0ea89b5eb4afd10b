"""`Folder`: a checkpoint's directory, local or on the Hub. Each of its JSON files is read and parsed only once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import (
    ConfigError,
    FormatError,
    MissingFileError,
    RequestError,
    RlxError,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.io import files, limits
from rlx_jax.io.files import parse_object
from rlx_jax.io.hub import ProgressCallback, Snapshot, open_snapshot
from rlx_jax.io.hub_remote import HubFile

# The model's configuration. Transformers writes it with Python's json module, which writes the upper limit of Mamba-2's
# time step as a bare Infinity. So Infinity is allowed in this file; readers of a field check its range.
CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


def is_model_name(path: object) -> bool:
    """Whether a value is a string that may name a model of the Hub: `org/name`.

    >>> [is_model_name(p) for p in ("org/name", "name", "./org/name", "a/b/c", "org/name.git")]
    [True, False, False, False, False]
    """
    if not isinstance(path, str) or not _NAME.fullmatch(path):
        return False
    return not ("--" in path or ".." in path or path.endswith((".", "-", ".git")))


def refuse_hub_options(revision: str | None, token: str | bool | None, reason: str, error: type[RlxError]) -> None:
    """Refuse options that only apply to models of the Hub. The message never contains the token.

    Raises:
        error: a revision, or a token other than False.
    """
    option = f"revision={shown(revision)}" if revision is not None else "token=" if token not in (None, False) else ""
    if option:
        raise error(f"{option}: {reason}; it only applies to a model of the Hub, 'org/name'")


@dataclass(frozen=True)
class Folder:
    """A model directory. It caches parsed files, so that all users of the same record share them.

    For a model of the Hub it is the directory in the cache, and `snapshot` fetches each file when it is read. A model
    in a single file, such as GGUF, has no directory: `path` is that file, and `contents` are the files that a directory
    of the same model would have next to its weights, by name, and `header` what was read of it, which is not read again
    as long as the folder is in use. `files_read` has the existing files that were read, by this record or by one that
    shares its parsed files, in order.
    """

    path: Path
    snapshot: Snapshot | None = field(default=None, repr=False, compare=False)
    contents: Mapping[str, bytes] | None = field(default=None, repr=False, compare=False)
    header: object = field(default=None, repr=False, compare=False)
    _parsed: dict[Path, dict[str, Any] | None] = field(default_factory=dict, repr=False, compare=False)
    files_read: dict[Path, None] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def from_path(path: str | os.PathLike[str] | Folder) -> Folder:
        """Return the folder of a path; a `Folder` is returned unchanged.

        If no path `org/name` exists, this name is a model of the Hub.
        """
        if isinstance(path, Folder):
            return path
        return open_folder(path) if is_model_name(path) and not os.path.lexists(path) else Folder(Path(path))

    def subfolder(self, name: str) -> Folder:
        """Return a directory in this one (`""`: itself). Both share their parsed files."""
        return replace(self, path=self.path / name)

    def where(self, name: str) -> str:
        """Return a file's path for messages; it starts with the model's name for a model of the Hub."""
        if self.snapshot is None:
            return quote(self.path / name)
        return quote(f"{self.snapshot.name}/{self._snapshot_name(name)}".rstrip("/"))

    def names(self, subfolder: str = "") -> list[str]:
        """Return the names in this directory, or in a subfolder; an empty list if there is no such directory.

        Raises:
            StorageError: the system refuses.
        """
        if self.contents is not None:
            return [] if subfolder else sorted(self.contents)
        if self.snapshot is not None:
            prefix = f"{self._snapshot_name(subfolder)}/" if self._snapshot_name(subfolder) else ""
            relative_paths = (path.removeprefix(prefix) for path in self.snapshot.files if path.startswith(prefix))
            return sorted({path.partition("/")[0] for path in relative_paths})
        directory = self.path / subfolder
        return files.list_directory(os.fspath(directory)) if directory.is_dir() else []

    def fetch(self, *names: str, bounds: Mapping[str, limits.SizeLimit] | None = None) -> None:
        """Fetch several files of a Hub model in parallel. Names that the model does not have are ignored.

        Nothing happens for a local directory.

        Args:
            bounds: for some of the files, by name, the maximum bytes.

        Raises:
            As `Snapshot.fetch`.
        """
        if self.snapshot is not None:
            paths = {self._snapshot_name(name): (bounds or {}).get(name) for name in names}
            self.snapshot.fetch({path: bound for path, bound in paths.items() if path in self.snapshot.files})

    def hub_file(self, name: str) -> HubFile | None:
        """Return the Hub's list entry for a file in this directory; None without one, or for a local directory."""
        return None if self.snapshot is None else self.snapshot.files.get(self._snapshot_name(name))

    def read_range(self, name: str, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of a file on the Hub from `start` on, without fetching the rest of it.

        Raises:
            As `Snapshot.read_range`.
        """
        assert self.snapshot is not None
        return self.snapshot.read_range(self._snapshot_name(name), start, nbytes)

    def _snapshot_name(self, name: str) -> str:
        """Return the path of a file or directory relative to the snapshot; "" for the snapshot itself."""
        assert self.snapshot is not None
        path = (self.path / name).relative_to(self.snapshot.path).as_posix()
        return "" if path == "." else path

    def read(self, name: str, limit: limits.SizeLimit, error: type[FormatError]) -> bytes | None:
        """Return the bytes of a file of at most `limit` bytes, fetched if necessary; None if there is none.

        Raises:
            PathEscapeError: it is a link that leads out of the directory.
            LimitError, error, StorageError: as `files.read_small_file`. HubError and others: as `Snapshot.fetch`.
        """
        if self.contents is not None:
            if (raw := self.contents.get(name)) is None:
                return None
            limits.check_limit(len(raw), limit, f"{self.where(name)}: the size in bytes")
        else:
            self.fetch(name, bounds={name: limit})
            if not os.path.lexists(self.path / name):
                return None
            try:
                path = files.resolve(os.fspath(self.path), name)
                raw = files.read_small_file(path, self.where(name), limit, error)
            except MissingFileError:
                return None
        self.files_read[self.path / name] = None
        return raw

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; an empty one if there is no such file.

        Raises:
            ConfigError: it is malformed; the message has the byte offset. Others as `read`.
        """
        return self._json_object(name) or {}

    def required_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a required file.

        Raises:
            MissingFileError: there is no such file. Others as `json`.
        """
        content = self._json_object(name)
        if content is None:
            alternatives = [] if self.snapshot is None else [p for p in self.snapshot.files if p.endswith(f"/{name}")]
            hint = f"; there is {listing(alternatives, 4)}: pass subfolder=" if alternatives else ""
            if not hint and name == "config.json":
                hint = "; a checkpoint's directory has one next to its weights, which defines the model"
            raise MissingFileError(f"{self.where(name)}: no such file{hint}")
        return content

    def _json_object(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file, from the cache of parsed files if possible; None if there is none."""
        path = self.path / name
        if path not in self._parsed:
            raw = self.read(name, limits.bound("MAX_CONFIG_BYTES"), ConfigError)
            infinity = name == CONFIG
            self._parsed[path] = None if raw is None else parse_object(raw, self.where(name), ConfigError, infinity)
        return self._parsed[path]


def open_folder(
    path: str | os.PathLike[str] | Folder, revision: str | None = None, token: str | bool | None = None,
    progress: ProgressCallback | None = None, subfolder: str = "",
) -> Folder:  # fmt: skip
    """Return the directory of a checkpoint. If there is no directory `org/name`, it is the model of the Hub.

    Args:
        path: a directory, the name of a model of the Hub, or an open `Folder`.
        revision: for a model of the Hub: a branch, a tag or a commit.
        token: the token for the Hub. None: the token of huggingface_hub, from `HF_TOKEN` or a login; False: no token.
        progress: callback for downloads; see `rlx_jax.load`.
        subfolder: a directory in the checkpoint to use instead, such as the one of a model in a diffusers pipeline.

    Raises:
        MissingFileError: no such directory or model; the message has advice.
        RequestError: a revision or a token for a local directory. PathEscapeError, ConfigError: `subfolder` is not a
            plain relative name.
        HubError: as `open_snapshot`.
    """
    if subfolder != "":
        if not isinstance(subfolder, str):
            raise RequestError(f"subfolder: expected the name of a directory in the checkpoint, got {shown(subfolder)}")
        files.check_name(subfolder)
        return open_folder(path, revision, token, progress).subfolder(subfolder)
    if isinstance(path, Folder):
        refuse_hub_options(revision, token, f"{quote(path.path)} is open already", RequestError)
        return path
    if not isinstance(path, str | os.PathLike) or path == "":
        raise RequestError(f"expected the path of a checkpoint directory, got {shown(path)}")
    directory = Path(path)
    if is_model_name(path) and not os.path.lexists(directory):
        prefix = f"no such directory here{_similar_names_text(directory)}, and "
        snapshot = open_snapshot(os.fspath(path), revision, token, progress, prefix)
        return Folder(snapshot.path, snapshot)
    refuse_hub_options(revision, token, f"{quote(path)} is a path on this machine", RequestError)
    if directory.is_dir():
        return Folder(directory)
    if directory.is_file():
        raise MissingFileError(
            f"{quote(path)} is a file; expected the directory of a model, with its config.json. "
            "To read only weights, use rlx_jax.open_weights"
        )
    kind = "file" if directory.suffix.lower() in (".gguf", ".rlxa") else "directory"
    raise MissingFileError(f"{quote(path)}: no such {kind}{_similar_names_text(directory)}; {_path_advice(path)}")


def _path_advice(path: str | os.PathLike[str]) -> str:
    """Return advice for a path that does not exist: how to name a model of the Hub, and about `~`."""
    text = os.fspath(path)
    linked = re.match(r"https://(?:www\.)?huggingface\.co/([^/?#]+/[^/?#]+)", text)
    home = "'~' is not expanded, use os.path.expanduser; " if text.startswith("~") else ""
    return f"{home}a model of the Hub is a string {quote(linked[1] if linked else 'org/name')}"


def _similar_names_text(directory: Path) -> str:
    """Return a text for the message about a missing directory: similar names in its parent, else a few names."""
    try:
        names = sorted(os.listdir(directory.parent))[:1000]  # comparing more would take too long
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return ""
    if suggestion := did_you_mean(directory.name, names):
        return f" ({suggestion.removeprefix('; ')})"
    return f" (there is {listing(names, 4)})" if names and directory.parent != Path(".") else ""
