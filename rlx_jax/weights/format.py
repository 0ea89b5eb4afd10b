"""What a weight format is: three methods, and a row in `rlx_jax.weights.formats.FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypedDict, cast, get_args

import jax
import numpy as np

from rlx_jax.errors import WeightError, did_you_mean, quote
from rlx_jax.io.files import Links
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.finite import OnNonfinite
from rlx_jax.weights.manifest import Verify


class CompileOptions(TypedDict, total=False):
    """Options of opening a model that `CausalLM`, `Encoder` and their like take too; see `rlx_jax.compile`."""

    profile: Any
    mesh: Any
    strict: bool
    missing: Literal["error", "init"]
    key: Any
    progress: Any


@dataclass(frozen=True)
class OpenOptions:
    """Every option of opening a checkpoint, handed as one record from `load` to the formats and to the class it opens.

    Attributes:
        strict, on_nonfinite, links, verify, subtree, max_bytes: see `rlx_jax.open_weights`.
        profile, mesh, missing, key: see `rlx_jax.compile`. progress: see `rlx_jax.load`.
    """

    strict: bool = True
    on_nonfinite: OnNonfinite = "error"
    links: Links = "follow"
    verify: Verify = "auto"
    subtree: str = ""
    max_bytes: int | None = None
    profile: Any = None
    mesh: Any = None
    missing: Literal["error", "init"] = "error"
    key: Any = None
    progress: Any = None

    def compiling(self) -> CompileOptions:
        """Return the options that `CausalLM`, `Encoder` and their like take too, by name."""
        return cast(CompileOptions, {name: getattr(self, name) for name in CompileOptions.__annotations__})

    def changed(self) -> list[str]:
        """Return the names of the options that are not the defaults."""
        values = [(f.name, f.default, getattr(self, f.name)) for f in fields(self)]
        # An array, as `key` may be, is no default and compares with nothing.
        return [name for name, default, v in values if v is not default and not (isinstance(v, str) and v == default)]

    def check_weights(self) -> None:
        """The options of reading weights are of their kinds.

        Raises:
            WeightError: names the one that is not.
        """
        if not isinstance(self.strict, bool):
            raise WeightError(f"strict: expected True or False, got {quote(self.strict)}")
        for name, choices in (("on_nonfinite", OnNonfinite), ("links", Links), ("verify", Verify)):
            value, known = getattr(self, name), get_args(choices)
            if value not in known:
                raise WeightError(
                    f"{name}: expected one of {', '.join(known)}, got {quote(value)}{did_you_mean(str(value), known)}"
                )
        most = self.max_bytes
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise WeightError(f"max_bytes: expected a number of bytes, got {quote(most)}")
        if not isinstance(self.subtree, str) or (self.subtree and not all(self.subtree.split("."))):
            raise WeightError(f"subtree: expected a dotted path such as 'params', got {quote(self.subtree)}")


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
