"""A checkpoint's directory: the small files beside its weights, each opened and parsed once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx_jax.errors import ConfigError, FormatError, MissingFileError, RequestError, UnsupportedError, quote, shown
from rlx_jax.io import files, limits
from rlx_jax.io.strict_json import parse_object

CONFIG = "config.json"
"""The file of a model's sizes. Transformers writes it with Python's json, and Mamba-2's most time as a bare Infinity,
which is taken here; whoever reads a field says whether it may be so large."""


@dataclass(frozen=True)
class Folder:
    """A model directory. It keeps what was parsed, so that all who are handed the same record share it."""

    path: Path
    _parsed: dict[Path, dict[str, Any] | None] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def at(place: str | os.PathLike[str] | Folder) -> Folder:
        """The record of a path; one that is a record already stays."""
        return place if isinstance(place, Folder) else Folder(Path(place))

    def below(self, name: str) -> Folder:
        """A directory in this one, `""` for itself. It shares what was parsed."""
        return replace(self, path=self.path / name)

    def where(self, name: str) -> str:
        """A file's path for messages."""
        return quote(self.path / name)

    def read(self, name: str, limit: int, limit_name: str, error: type[FormatError]) -> bytes | None:
        """The bytes of a file; None if there is none.

        Raises:
            PathEscapeError: it is a link that leads out of the directory.
            LimitError, error, StorageError: as `files.read_whole`.
        """
        try:
            path = files.resolve(os.fspath(self.path), name)
            return files.read_whole(path, self.where(name), limit, limit_name, error)
        except MissingFileError:
            return None

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
            raise MissingFileError(f"{self.where(name)}: no such file")
        return found

    def _object(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        if path not in self._parsed:
            raw = self.read(name, limits.MAX_CONFIG_BYTES, "limits.MAX_CONFIG_BYTES", ConfigError)
            infinity = name == CONFIG
            self._parsed[path] = None if raw is None else parse_object(raw, self.where(name), ConfigError, infinity)
        return self._parsed[path]


def open_folder(path: str | os.PathLike[str] | Folder) -> Folder:
    """The directory of a checkpoint.

    Raises:
        MissingFileError: it is no directory; the message says what is taken. UnsupportedError: it is a GGUF file.
    """
    if isinstance(path, Folder):
        return path
    if not isinstance(path, str | os.PathLike):
        raise RequestError(f"expected the path of a checkpoint directory, got {shown(path)}")
    directory = Path(path)
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
    raise MissingFileError(
        f"{quote(path)}: no such directory; nothing is downloaded: `huggingface_hub.snapshot_download` fetches a "
        "checkpoint and returns its path"
    )
