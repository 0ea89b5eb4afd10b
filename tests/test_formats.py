"""Weight formats: a file and a row. A format that only this test knows opens, loads and is written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import UnsupportedError
from rlx_jax.weights import formats
from rlx_jax.weights.format import Entry, OpenOptions
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.source import WeightSource
from tests.oracles.checkpoints import FIXTURES, copy

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
NAME = "weights.numbers"


@dataclass(frozen=True)
class Numbers:
    """A JSON file of lists of float32 numbers."""

    name: str = "numbers"
    writes: bool = True

    def detect(self, weights: Any) -> bool:
        return isinstance(weights, str) and (
            weights.endswith(".numbers") or os.path.exists(os.path.join(weights, NAME))
        )

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        path = os.path.join(weights, NAME) if os.path.isdir(weights) else weights
        stored = json.loads(Path(path).read_text("utf-8"))
        return MappingSource({key: np.array(value, np.float32) for key, value in stored.items()})

    def write(self, directory: str, entries: Sequence[Entry]) -> None:
        os.mkdir(directory)
        stored = {entry.key: np.asarray(entry.values()).tolist() for entry in entries}
        Path(directory, NAME).write_text(json.dumps(stored), "utf-8")


def test_a_format_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing else has to know of it: `load`, `open_weights` and `save` find it in the table."""
    lm = rlx.load(LLAMA)
    directory = copy(LLAMA, tmp_path / "m")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="format 'numbers': expected orbax or safetensors"):
        rlx.save(lm, tmp_path / "saved", "numbers")
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, Numbers()))
    rlx.save(lm, tmp_path / "saved", "numbers")
    (tmp_path / "saved" / NAME).rename(directory / NAME)
    jax.tree.map(np.testing.assert_array_equal, rlx.load(directory).model.params, lm.model.params)
    assert rlx.open_weights(directory / NAME).keys() == rlx.open_weights(directory).keys()
