"""`WeightSource`, and the binding of parameter programs to it: its tensors may be packed or have other dtypes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx_jax.errors import WeightError, WeightShapeError, quote
from rlx_jax.ir.packed import SCHEMES, PackedSpec, WeightSpec, packed_types
from rlx_jax.ir.param import BlockArray, Cast, Dequantized, Key, Program, Sliced, Strided, cast
from rlx_jax.ir.types import TensorType


@runtime_checkable
class WeightSource(Protocol):
    """The protocol of a source of weights, such as a checkpoint.

    `spec` reads headers only. `read` does not consume the tensor, and several threads call it at once. Its `index` is a
    slice for each axis, or for the first axes; devices that shard a tensor read parts of it. For a packed tensor `spec`
    returns a `PackedSpec` with the logical shape and dtype, and `read` returns the bytes. `where` returns the location
    of a key, such as its file, for messages.
    """

    def keys(self) -> tuple[str, ...]: ...

    def spec(self, key: str) -> WeightSpec: ...

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]: ...

    def has(self, key: str) -> bool: ...

    def where(self, key: str) -> str: ...


def shapes_only(source: WeightSource) -> bool:
    """Return whether a source has shapes but no data, which is enough to compile but not to run.

    Such a source has a true attribute `shapes_only`. For a view without that attribute, the result is
    the underlying source's (its attribute `source`).
    """
    underlying = getattr(source, "source", None)
    return bool(getattr(source, "shapes_only", underlying is not None and shapes_only(underlying)))


def has_any_values(source: WeightSource | None) -> bool:
    """Return whether a source has the values of any weight."""
    return source is not None and not shapes_only(source) and bool(source.keys())


def is_decoded(source: WeightSource | None, key: str) -> bool:
    """Return whether `read` decodes a weight that is packed in its file: what the source's `is_decoded` returns."""
    method = getattr(source, "is_decoded", None)
    return source is not None and method is not None and source.has(key) and bool(method(key))


def source_program(key: str, spec: WeightSpec, where: str) -> Key | Dequantized:
    """Return the program of a tensor of a source in its dtype there; for a packed tensor, in its logical dtype.

    Messages begin with `where`.

    Raises:
        WeightError, WeightShapeError: as `packed_types`.
    """
    if not isinstance(spec, PackedSpec):
        return Key(key, TensorType(tuple(spec.shape), np.dtype(spec.dtype)))
    if spec.arrays is not None:
        return Dequantized(Key(key, TensorType(spec.shape, spec.dtype)), spec.scheme, tuple(spec.arrays.items()))
    logical_type, byte_type = packed_types(spec.shape, spec.dtype, spec.scheme, where)
    names, blocks = SCHEMES[spec.scheme].array_types(spec.shape), Key(key, byte_type)
    arrays = tuple((name, BlockArray(blocks, spec.scheme, name)) for name in names)
    return Dequantized(Key(key, logical_type), spec.scheme, arrays)


def with_source(program: Program, source: WeightSource) -> Program:
    """Return the same program over the tensors of `source`, which may have other dtypes or another packing.

    Raises:
        MissingWeightError: the source does not have a key.
        WeightShapeError: the source's tensor has another shape.
        WeightError: exactly one of the declared and the source's dtype is complex.
        UnsupportedError: decoding of the tensor's scheme is not implemented.
    """
    if isinstance(program, Key | Sliced | Strided | Dequantized):
        return cast(_with_source_tensor(program, source), program.type.dtype)
    if isinstance(program, Cast) and isinstance(program.of, Key | Sliced | Strided | Dequantized):
        # The cast starts from the source's dtype now.
        return cast(_with_source_tensor(program.of, source), program.dtype)
    return program.with_parts(*(with_source(part, source) for part in program.parts))


def _with_source_tensor(program: Any, source: WeightSource) -> Program:
    """Return the same steps over the tensor of the source, without a cast to the declared dtype."""
    declared = program.of if isinstance(program, Dequantized) else program
    if isinstance(declared, Key):
        return _source_program(declared, source)
    program_over_source: Program = declared.with_parts(_with_source_tensor(declared.of, source))
    return program_over_source


def _source_program(declared: Key, source: WeightSource) -> Key | Dequantized:
    """Return the program of a key in the source, after a check of its shape and dtype."""
    where = f"weight {quote(declared.key)} ({source.where(declared.key)})"
    program = source_program(declared.key, source.spec(declared.key), where)
    if program.type.shape != declared.type.shape:
        raise WeightShapeError(f"{where}: expected {declared.type}, got {program.type}")
    if (program.type.dtype.kind == "c") != (declared.type.dtype.kind == "c"):
        raise WeightError(f"{where}: expected {declared.type}, got {program.type}")
    return program
