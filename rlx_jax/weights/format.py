"""What a weight format is: three methods, and a row in `rlx_jax.weights.formats.FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from rlx_jax.io.files import Links
from rlx_jax.ir.reading import WeightSource
from rlx_jax.ir.types import TensorType
from rlx_jax.weights.finite import OnNonfinite
from rlx_jax.weights.manifest import Verify


@dataclass(frozen=True)
class OpenOptions:
    """How to open weights; see `rlx_jax.open_weights`."""

    strict: bool = True
    on_nonfinite: OnNonfinite = "error"
    links: Links = "follow"
    verify: Verify = "auto"
    subtree: str = ""


@dataclass(frozen=True)
class Entry:
    """One weight to write: its key, type, and a function that gives the array, on the host or on devices."""

    key: str
    type: TensorType
    values: Callable[[], Any]

    @staticmethod
    def of(key: str, array: np.ndarray[Any, Any]) -> Entry:
        """An array that is there."""
        return Entry(key, TensorType(array.shape, array.dtype), lambda: array)


class Format(Protocol):
    """How weights are stored: in files, or as objects of Python."""

    @property
    def name(self) -> str:
        """What users call it: `format=` of `rlx_jax.save`."""

    @property
    def writes(self) -> bool:
        """Whether `write` is built."""

    def detect(self, weights: Any) -> bool:
        """Whether `weights`, a path or an object, are of this format. Names are looked at, no content."""

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        """Names, shapes and dtypes of what `detect` takes. Nothing that the options ask for is left out in silence."""

    def write(self, directory: str, entries: Sequence[Entry]) -> None:
        """Make the directory and the files of a checkpoint in it; `values` of each entry are asked for once.

        Raises:
            UnsupportedError: the format has no such dtype or shape.
        """


def stored_spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a stored tensor, in the byte order of this machine."""
    return TensorType(shape, np.dtype(dtype).newbyteorder("=")).spec
