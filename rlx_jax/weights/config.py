"""Reading `config.json` and the other small JSON files of a model directory."""

from __future__ import annotations

import os
from typing import Any

from rlx_jax.errors import ConfigError, quote
from rlx_jax.weights import limits
from rlx_jax.weights.files import read_whole
from rlx_jax.weights.strict_json import parse_object


def read_json(path: str | os.PathLike[str], *, limit_bytes: int | None = None, what: str = "config") -> dict[str, Any]:
    """The JSON object in a file, as plain Python values.

    Args:
        path: the file; a link is followed (`files.resolve` checks names that come from a file).
        limit_bytes: refuse larger files; 4 MiB (`limits.MAX_CONFIG_BYTES`) unless given.
        what: what the file is, for messages: `"config"`, `"tokenizer config"`.

    Raises:
        MissingFileError: no such file.
        LimitError: larger than `limit_bytes`, or more than `limits.MAX_JSON_VALUES` values.
        ConfigError: not a regular file, not UTF-8, not a JSON object, nested too deep, a name given twice,
            NaN, Infinity, a number too long or too large. The message has the byte.
        StorageError: the system cannot read it.
    """
    name = os.fsdecode(path)
    where = f"{what} {quote(name)}"
    if limit_bytes is None:
        raw = read_whole(name, where, limits.MAX_CONFIG_BYTES, "limits.MAX_CONFIG_BYTES", ConfigError)
    else:
        raw = read_whole(name, where, limit_bytes, "limit_bytes", ConfigError)
    return parse_object(raw, where, ConfigError)
