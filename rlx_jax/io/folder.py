"""A checkpoint's directory: the small files beside its weights, each opened and parsed once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx_jax.errors import (
    ConfigError,
    FormatError,
    MissingFileError,
    RequestError,
    RlxError,
    UnsupportedError,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.io import files, limits
from rlx_jax.io.hub import UNBOUND, SizeBound, Snapshot, Told, is_name, open_snapshot
from rlx_jax.io.hub_remote import Listed
from rlx_jax.io.strict_json import parse_object

# The file of a model's sizes. Transformers writes it with Python's json, and Mamba-2's most time as a bare Infinity,
# which is taken here; whoever reads a field says whether it may be so large.
CONFIG = "config.json"


def json_bound() -> tuple[int, str]:
    """Bytes that a file of JSON may have."""
    return limits.MAX_CONFIG_BYTES, "limits.MAX_CONFIG_BYTES"


def refuse_asked(revision: str | None, token: str | bool | None, what: str, error: type[RlxError]) -> None:
    """Refuse what only the Hub is asked of. No token is shown, neither to a directory nor in the message.

    Raises:
        error: a revision, or a token to be shown.
    """
    given = f"revision={shown(revision)}" if revision is not None else "token=" if token not in (None, False) else ""
    if given:
        raise error(f"{given}: {what}; it is for a model of the Hub, 'org/name'")


@dataclass(frozen=True)
class Folder:
    """A model directory. It keeps what was parsed, so that all who are handed the same record share it.

    Of a model of the Hub it is the directory in the cache, and `snapshot` brings each file when it is asked for.
    """

    path: Path
    snapshot: Snapshot | None = field(default=None, repr=False, compare=False)
    _parsed: dict[Path, dict[str, Any] | None] = field(default_factory=dict, repr=False, compare=False)
    _found: dict[Path, None] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def at(place: str | os.PathLike[str] | Folder) -> Folder:
        """The record of a path; one that is a record already stays. A name of the Hub counts where nothing is there."""
        if isinstance(place, Folder):
            return place
        return open_folder(place) if is_name(place) and not os.path.lexists(place) else Folder(Path(place))

    def below(self, name: str) -> Folder:
        """A directory in this one, `""` for itself. It shares what was parsed."""
        return replace(self, path=self.path / name)

    def where(self, name: str) -> str:
        """A file's path for messages; of a model of the Hub, beginning with its name."""
        if self.snapshot is None:
            return quote(self.path / name)
        return quote(f"{self.snapshot.name}/{self._inside(name)}".rstrip("/"))

    def names(self, below: str = "") -> list[str]:
        """The names in this directory, or in one below it; none if there is no such directory.

        Raises:
            StorageError: the system refuses.
        """
        if self.snapshot is not None:
            start = f"{self._inside(below)}/" if self._inside(below) else ""
            inside = (name.removeprefix(start) for name in self.snapshot.files if name.startswith(start))
            return sorted({name.partition("/")[0] for name in inside})
        return files.list_directory(os.fspath(self.path / below)) if (self.path / below).is_dir() else []

    def found(self) -> list[Path]:
        """The files that were asked for and are there, of this record and of those that share with it."""
        return list(self._found)

    def bring(self, *names: str, bounds: Mapping[str, SizeBound] | None = None) -> None:
        """Have those of some files in the directory that there are: fetched together, where this is a model of the Hub.

        Args:
            bounds: bytes that some of them may have, by name, and what messages call this limit.

        Raises:
            As `Snapshot.fetch`.
        """
        if self.snapshot is not None:
            inside = {self._inside(name): (bounds or {}).get(name, UNBOUND) for name in names}
            self.snapshot.fetch({name: bound for name, bound in inside.items() if name in self.snapshot.files})

    def listed(self, name: str) -> Listed | None:
        """What the Hub lists of a file in this directory; None: it has none."""
        return None if self.snapshot is None else self.snapshot.files.get(self._inside(name))

    def part(self, name: str, first: int, count: int) -> bytes:
        """Bytes of a file that the Hub lists, without fetching the rest of it.

        Raises:
            As `Snapshot.part`.
        """
        assert self.snapshot is not None
        return self.snapshot.part(self._inside(name), first, count)

    def _inside(self, name: str) -> str:
        """A path in the snapshot."""
        assert self.snapshot is not None
        below = (self.path / name).relative_to(self.snapshot.path).as_posix()
        return "" if below == "." else below

    def read(self, name: str, limit: int, limit_name: str, error: type[FormatError]) -> bytes | None:
        """The bytes of a file; None if there is none.

        Raises:
            PathEscapeError: it is a link that leads out of the directory.
            LimitError, error, StorageError: as `files.read_whole`. HubError and others: as `Snapshot.fetch`.
        """
        self.bring(name, bounds={name: (limit, limit_name)})
        try:
            path = files.resolve(os.fspath(self.path), name)
            raw = files.read_whole(path, self.where(name), limit, limit_name, error)
        except MissingFileError:
            return None
        self._found[self.path / name] = None
        return raw

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; empty if there is no such file.

        Raises:
            ConfigError: it is malformed; the message has the byte. Others as `read`.
        """
        return self._object(name) or {}

    def needed(self, name: str) -> dict[str, Any]:
        """As `json`, of a file that has to be there.

        Raises:
            MissingFileError: it is not.
        """
        found = self._object(name)
        if found is None:
            others = [] if self.snapshot is None else [p for p in self.snapshot.files if p.endswith(f"/{name}")]
            there = f"; there is {listing(others, 4)}, which subfolder= may name" if others else ""
            if not there and name == "config.json":
                there = "; a checkpoint's directory has one beside its weights, which says what model they are"
            raise MissingFileError(f"{self.where(name)}: no such file{there}")
        return found

    def _object(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        if path not in self._parsed:
            raw = self.read(name, *json_bound(), ConfigError)
            infinity = name == CONFIG
            self._parsed[path] = None if raw is None else parse_object(raw, self.where(name), ConfigError, infinity)
        return self._parsed[path]


def open_folder(
    path: str | os.PathLike[str] | Folder,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: Told | None = None,
    subfolder: str = "",
) -> Folder:
    """The directory of a checkpoint; where there is none of that name, `org/name` is a model of the Hub.

    Args:
        revision: of a model of the Hub: a branch, a tag or a commit.
        token: what the Hub is shown; None: huggingface_hub's own, which `HF_TOKEN` or a login set. False: none.
        progress: told of downloads, as `rlx_jax.load` has it.
        subfolder: the directory in it that is meant, as a pipeline of diffusers has one for each of its models.

    Raises:
        MissingFileError: neither is there; the message says what is taken. UnsupportedError: it is a GGUF file.
        RequestError: a revision of a local directory, or a token for one. PathEscapeError, ConfigError: `subfolder` is
        no name of one.
        HubError: as `open_snapshot`.
    """
    if subfolder != "":
        if not isinstance(subfolder, str):
            raise RequestError(f"subfolder: expected the name of a directory in the checkpoint, got {shown(subfolder)}")
        files.check_name(subfolder)
        return open_folder(path, revision, token, progress).below(subfolder)
    if isinstance(path, Folder):
        refuse_asked(revision, token, f"{quote(path.path)} is open already", RequestError)
        return path
    if not isinstance(path, str | os.PathLike) or path == "":
        raise RequestError(f"expected the path of a checkpoint directory, got {shown(path)}")
    directory = Path(path)
    if is_name(path) and not os.path.lexists(directory):
        tried = f"no such directory here{_near(directory)}, and "
        snapshot = open_snapshot(os.fspath(path), revision, token, progress, tried)
        return Folder(snapshot.path, snapshot)
    refuse_asked(revision, token, f"{quote(path)} is a path on this machine", RequestError)
    if directory.is_dir():
        return Folder(directory)
    if directory.suffix == ".gguf":
        raise UnsupportedError(
            f"{quote(path)}: GGUF files are not read yet; give the Hugging Face directory of the same model"
        )
    if directory.is_file():
        raise MissingFileError(
            f"{quote(path)} is one file, and a model is more: give the directory with its config.json. "
            "rlx_jax.open_weights reads weights alone"
        )
    raise MissingFileError(f"{quote(path)}: no such directory{_near(directory)}; {_instead(path)}")


def _instead(path: str | os.PathLike[str]) -> str:
    """What to give in place of a path that is none."""
    text = os.fspath(path)
    linked = re.match(r"https://(?:www\.)?huggingface\.co/([^/?#]+/[^/?#]+)", text)
    home = "'~' is not expanded, os.path.expanduser does so; " if text.startswith("~") else ""
    return f"{home}a model of the Hub is a string {quote(linked[1] if linked else 'org/name')}"


def _near(directory: Path) -> str:
    """What there is in place of a directory that is not there: names close to its own, else a few."""
    try:
        names = sorted(os.listdir(directory.parent))[:1000]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return ""
    if close := did_you_mean(directory.name, names):
        return f" ({close.removeprefix('; ')})"
    return f" (there is {listing(names, 4)})" if names and directory.parent != Path(".") else ""
