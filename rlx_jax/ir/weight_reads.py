"""Where programs meet a source: what it stores under their keys, which may be packed or of another dtype."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx_jax.errors import WeightError, WeightShapeError, quote
from rlx_jax.ir.packed import PackedSpec, WeightSpec, decoder_of, packed_types
from rlx_jax.ir.param import Cast, Dequantized, Key, Program, Sliced, Strided, cast
from rlx_jax.ir.types import TensorType


@runtime_checkable
class WeightSource(Protocol):
    """Where weights come from. `spec` reads headers only; `read` never removes, and several threads call it at once.

    `index` is a slice for each axis, or for the first few; where devices share a tensor, parts of it are read.
    Of a packed tensor `spec` gives a `PackedSpec`, whose shape and dtype are the logical ones, and `read` the bytes.
    """

    def keys(self) -> tuple[str, ...]: ...

    def spec(self, key: str) -> WeightSpec: ...

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]: ...

    def has(self, key: str) -> bool: ...

    def where(self, key: str) -> str: ...


def shapes_only(source: WeightSource) -> bool:
    """Whether a source holds shapes alone, enough to compile and not to run, and says so by an attribute `shapes_only`;
    of a view, which has what it is of as `source`, whether that does."""
    viewed = getattr(source, "source", None)
    return bool(getattr(source, "shapes_only", viewed is not None and shapes_only(viewed)))


def as_stored(key: str, spec: WeightSpec, where: str) -> Key | Dequantized:
    """What a source has under a key, in the dtype it is stored in; a packed tensor in its logical one.

    Messages begin with `where`.

    Raises:
        UnsupportedError: packed by a scheme that is not decoded yet. Others: as `packed_types`.
    """
    if not isinstance(spec, PackedSpec):
        return Key(key, TensorType(tuple(spec.shape), np.dtype(spec.dtype)))
    decoder_of(spec.scheme, where)
    logical, stored = packed_types(spec.shape, spec.dtype, spec.scheme, where)
    return Dequantized(Key(key, stored), spec.scheme, logical.dtype)


def read_from(program: Program, source: WeightSource) -> Program:
    """The same program over what `source` stores under its keys, which may be packed otherwise or have other dtypes.

    Raises:
        MissingWeightError: the source has no such key. WeightShapeError: it has another shape.
        UnsupportedError: it is packed by a scheme that is not decoded yet.
    """
    if isinstance(program, Key | Sliced | Strided | Dequantized):
        return cast(_over_stored(program, source), program.type.dtype)
    if isinstance(program, Cast) and isinstance(program.of, Key | Sliced | Strided | Dequantized):
        return cast(_over_stored(program.of, source), program.dtype)  # what it was cast to before does not matter
    return program.over(*(read_from(part, source) for part in program.parts))


def _over_stored(program: Any, source: WeightSource) -> Program:
    """The same over what the source has, without a cast to what was declared."""
    declared = program.logical if isinstance(program, Dequantized) else program
    return _stored(declared, source) if isinstance(declared, Key) else declared.over(_over_stored(declared.of, source))


def _stored(declared: Key, source: WeightSource) -> Key | Dequantized:
    """A key as the source has it."""
    where = f"weight {quote(declared.key)} ({source.where(declared.key)})"
    stored = as_stored(declared.key, source.spec(declared.key), where)
    if stored.type.shape != declared.type.shape:
        raise WeightShapeError(f"{where}: expected {declared.type}, got {stored.type}")
    if (stored.type.dtype.kind == "c") != (declared.type.dtype.kind == "c"):
        raise WeightError(f"{where}: expected {declared.type}, got {stored.type}")
    return stored
