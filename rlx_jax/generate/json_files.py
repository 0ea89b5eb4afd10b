"""The JSON files beside a checkpoint's weights: settings of tokenizers and of generation, vocabularies."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx_jax.errors import ConfigError, FormatError, MissingFileError, quote
from rlx_jax.weights import files, limits
from rlx_jax.weights.config import read_json
from rlx_jax.weights.strict_json import decode as decode_text

# A model_max_length this large is transformers' way to write "none" (it writes 10^30).
_NO_MAX_LENGTH = 2**31


def read_optional(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of a model directory; empty if there is no such file.

    Raises:
        ConfigError: the file is malformed.
        PathEscapeError: it is a link that leads out of the directory.
    """
    try:
        files.resolve(os.fspath(directory), name)
        return read_json(directory / name, what="file")
    except MissingFileError:
        return {}


def parse_json(raw: bytes, where: str, error: type[FormatError], max_values: int, limit_name: str) -> Any:
    """The JSON value in `raw`, of any type: strict, and quick enough for a file of many megabytes.

    Raises:
        error: not UTF-8, not JSON, nested deeper than `limits.MAX_JSON_DEPTH`, a name given twice, NaN, Infinity.
        LimitError: it may hold more than `max_values` values.
    """
    separators = sum(raw.count(c) for c in b",[{")  # hardly more than there are values
    limits.at_most(separators, max_values, limit_name, f"{where}: the number of JSON values")

    def refuse(constant: str) -> None:
        raise error(f"{where}: {constant} is not a JSON number")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise error(f"{where}: {quote(name)} is given twice in one object")
        return found

    text = decode_text(raw, where, error)
    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=members)
    except RecursionError as cause:
        raise error(f"{where}: nested deeper than {limits.MAX_JSON_DEPTH}") from cause
    except FormatError:
        raise
    except ValueError as cause:  # JSONDecodeError, and a number of thousands of digits
        raise error(f"{where}: not JSON: {cause}") from cause
    level = [value]
    for _ in range(limits.MAX_JSON_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return value
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    raise error(f"{where}: nested deeper than {limits.MAX_JSON_DEPTH}")


def model_max_length(settings: Mapping[str, Any], where: str) -> int | None:
    """`model_max_length` of a `tokenizer_config.json`: tokens, or None if it names no real length.

    Raises:
        ConfigError: not a positive whole number.
    """
    value = settings.get("model_max_length")
    if value is None or (isinstance(value, int | float) and value >= _NO_MAX_LENGTH):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: model_max_length: expected a positive int, found {quote(value)}")
    return value
