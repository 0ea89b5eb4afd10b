"""Where programs meet a source: what it stores under their keys, which may be of another dtype."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from rlx_jax.errors import WeightDTypeError, WeightShapeError, quote
from rlx_jax.ir.param import Cast, Key, Program, Sliced, cast
from rlx_jax.ir.types import TensorType


@runtime_checkable
class WeightSource(Protocol):
    """Where weights come from. `spec` reads headers only; `read` never removes, and several threads call it at once."""

    def keys(self) -> tuple[str, ...]: ...

    def spec(self, key: str) -> jax.ShapeDtypeStruct: ...

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]: ...

    def has(self, key: str) -> bool: ...

    def where(self, key: str) -> str: ...


def read_from(program: Program, source: WeightSource) -> Program:
    """The same program over what `source` stores under its keys, which may have other dtypes.

    Raises:
        MissingWeightError: the source has no such key. WeightShapeError: it has another shape.
    """
    if isinstance(program, Key | Sliced):
        return cast(_over_stored(program, source), program.type.dtype)
    if isinstance(program, Cast) and isinstance(program.of, Key | Sliced):  # what it was cast to before does not matter
        return cast(_over_stored(program.of, source), program.dtype)
    return program.over(*(read_from(part, source) for part in program.parts))


def _over_stored(program: Key | Sliced, source: WeightSource) -> Program:
    """The same over what the source has, without a cast to what was declared."""
    return _stored(program, source) if isinstance(program, Key) else program.over(_stored(program.of, source))


def _stored(declared: Key, source: WeightSource) -> Key:
    """A key as the source has it."""
    key, spec = declared.key, source.spec(declared.key)
    stored = TensorType(tuple(spec.shape), np.dtype(spec.dtype))
    if stored.shape != declared.type.shape:
        raise WeightShapeError(f"weight {quote(key)} ({source.where(key)}): expected {declared.type}, got {stored}")
    if (stored.dtype.kind == "c") != (declared.type.dtype.kind == "c"):
        raise WeightDTypeError(f"weight {quote(key)} ({source.where(key)}): expected {declared.type}, got {stored}")
    return Key(key, stored)
