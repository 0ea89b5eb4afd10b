"""Fixtures whose numbers are recorded: a checkpoint directory, the model that the library loads, its reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import rlx_jax as rlx


@dataclass(frozen=True)
class Case:
    """A recorded checkpoint, loaded."""

    directory: Path
    lm: Any
    record: Mapping[str, npt.NDArray[Any]]

    @property
    def prompts(self) -> list[list[int]]:
        """The ragged rows as lists."""
        rows = zip(self.record["ragged_tokens"], self.record["ragged_lengths"], strict=True)
        return [row[:n].tolist() for row, n in rows]

    @property
    def greedy(self) -> list[list[int]]:
        """24 greedy tokens for each row, no end token."""
        tokens: list[list[int]] = self.record["greedy"].tolist()
        return tokens


def load_record(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """The recorded numbers of a fixture."""
    with np.load(directory.with_suffix(".npz")) as file:
        return dict(file)


def load_case(directory: Path) -> Case:
    """The checkpoint in `directory` with its recorded numbers."""
    return Case(directory, rlx.load(directory), load_record(directory))
