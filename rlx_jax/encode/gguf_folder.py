"""`open_model_folder`: open a checkpoint's directory, a model of the Hub, or a GGUF file as a `Folder`.

A GGUF file has the config, the tokenizer and the chat template in its metadata. They become the files that a Hugging
Face directory of the same model has, so that everything after this reads one kind of checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx_jax.errors import MissingFileError, RequestError, did_you_mean, listing, quote, shown
from rlx_jax.io.files import check_name
from rlx_jax.io.folder import Folder, open_folder, refuse_hub_options
from rlx_jax.io.hub import ProgressCallback
from rlx_jax.text.gguf_tokenizer import tokenizer_files
from rlx_jax.weights.gguf import SUFFIX, Gguf, open_gguf, part_names
from rlx_jax.weights.gguf_config import ARCHITECTURE, POOLING
from rlx_jax.weights.gguf_header import MetadataValue


def open_model_folder(
    path: str | os.PathLike[str] | Folder, revision: str | None = None, token: str | bool | None = None,
    progress: ProgressCallback | None = None, subfolder: str = "", file: str | None = None,
) -> Folder:  # fmt: skip
    """Return the folder of a checkpoint; see `open_folder`, and `rlx_jax.load` for `file`.

    Raises:
        MissingFileError: the directory or the model has no such `file`.
        RequestError: `file` is not the name of a GGUF file, or `path` is itself a file.
        Others: as `open_folder` and `open_gguf`.
    """
    is_file = isinstance(path, str | os.PathLike) and Gguf().detect(os.fspath(path))
    if not is_file and file is None:
        return open_folder(path, revision, token, progress, subfolder)
    if is_file:
        if file is not None or subfolder:
            raise RequestError(f"{quote(path)} is a file; file= and subfolder= are for directories and the Hub")
        refuse_hub_options(revision, token, f"{quote(path)} is a file on this machine", RequestError)
        return _gguf_folder(Path(os.fspath(path)))  # type: ignore[arg-type]
    if not isinstance(file, str) or not file.lower().endswith(SUFFIX):
        raise RequestError(f"file: expected the name of a {SUFFIX} file, got {shown(file)}")
    check_name(file)
    folder = open_folder(path, revision, token, progress, subfolder)
    directory, name = os.path.split(file)
    names = folder.names(directory)
    if name not in names:
        candidates = [n for n in names if n.lower().endswith(SUFFIX)]
        hint = f"{did_you_mean(name, candidates)}; there is {listing(candidates, 8) or 'none'}"
        raise MissingFileError(f"{folder.where(file)}: no such file{hint}")
    folder.fetch(*(os.path.join(directory, part) for part in part_names(name)))
    return _gguf_folder(folder.path / file)


def _gguf_folder(path: Path) -> Folder:
    """Return the folder of a GGUF file, with the files that its metadata describe."""
    with open_gguf(os.fspath(path)) as source:
        folder = described_folder(path, source.config, source.header.metadata)
        return replace(folder, header=tuple(part.header for part in source.files))


def described_folder(path: Path, config: Mapping[str, Any], metadata: Mapping[str, MetadataValue]) -> Folder:
    """Return the folder of a file with this metadata, of which `config` is the part about the model."""
    contents: dict[str, Any] = {**tokenizer_files(metadata, quote(path)), **_pooling_files(metadata)}
    contents["config.json"] = {**config, **contents.get("config.json", {})}
    return Folder(path, contents={name: json.dumps(content).encode() for name, content in contents.items()})


def _pooling_files(metadata: Mapping[str, MetadataValue]) -> dict[str, Any]:
    """Return the files of sentence-transformers for a model that pools its hidden states; none for any other."""
    pooling_type = metadata.get(f"{metadata[ARCHITECTURE]}.pooling_type")
    if not isinstance(pooling_type, int) or pooling_type not in POOLING:
        return {}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))
    ]
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": POOLING[pooling_type]}}
