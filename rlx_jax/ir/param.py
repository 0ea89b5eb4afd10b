"""Parameters are references: a small program over checkpoint keys, and no data.

The compiler sees programs and shapes only. `rlx_jax.weights.execute` runs a program on a
`WeightSource`; read backwards, the same program writes the checkpoint keys again.
A program is *exact* when that round trip loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np

from rlx_jax.errors import WeightDTypeError, WeightShapeError, quote
from rlx_jax.ir.types import TensorType, is_float, short_name


@runtime_checkable
class WeightSource(Protocol):
    """Where weights come from. `spec` reads headers only; `read` never removes, and several threads call it at once."""

    def keys(self) -> tuple[str, ...]: ...

    def spec(self, key: str) -> jax.ShapeDtypeStruct: ...

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]: ...

    def has(self, key: str) -> bool: ...

    def where(self, key: str) -> str: ...


@dataclass(frozen=True)
class Key:
    """The tensor stored under a checkpoint key, as it is."""

    key: str
    type: TensorType

    def __hash__(self) -> int:  # the generated one would hash the type too, and builds hash keys by the thousand
        return hash(self.key)

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True)
class Transposed:
    """A rank-2 program with its axes swapped."""

    of: Program

    @property
    def type(self) -> TensorType:
        return TensorType(self.of.type.shape[::-1], self.of.type.dtype)

    def __str__(self) -> str:
        return f"transpose({self.of})"


@dataclass(frozen=True)
class Cast:
    """Another dtype. Widening is exact; narrowing is lossy."""

    of: Program
    dtype: np.dtype[Any]

    @property
    def type(self) -> TensorType:
        return self.of.type.with_dtype(self.dtype)

    def __str__(self) -> str:
        return f"cast({self.of}, {short_name(self.dtype)})"


@dataclass(frozen=True)
class Concat:
    """Several programs side by side along `axis`: merged projections."""

    parts: tuple[Program, ...]
    axis: int

    @property
    def type(self) -> TensorType:
        first = self.parts[0].type
        shape = list(first.shape)
        shape[self.axis] = sum(p.type.shape[self.axis] for p in self.parts)
        return TensorType(tuple(shape), first.dtype)

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, self.parts))}; axis={self.axis})"


@dataclass(frozen=True)
class Stack:
    """Equal programs stacked along a new leading axis: one leaf for all layers of a scan."""

    parts: tuple[Program, ...]

    @property
    def type(self) -> TensorType:
        first = self.parts[0].type
        return TensorType((len(self.parts), *first.shape), first.dtype)

    def __str__(self) -> str:
        return f"stack({', '.join(map(str, self.parts))})"


Program = Key | Transposed | Cast | Concat | Stack


def stored_keys(program: Program) -> Iterator[Key]:
    """The stored tensors a program reads, in order."""
    match program:
        case Key():
            yield program
        case Transposed(of=of) | Cast(of=of):
            yield from stored_keys(of)
        case Concat(parts=parts) | Stack(parts=parts):
            for part in parts:
                yield from stored_keys(part)


def keys_of(program: Program) -> Iterator[str]:
    """The checkpoint keys a program reads, in order."""
    return (stored.key for stored in stored_keys(program))


def read_from(program: Program, source: WeightSource) -> Program:
    """The same program over what `source` stores under its keys, which may have other dtypes.

    Raises:
        MissingWeightError: the source has no such key. WeightShapeError: it has another shape.
    """
    match program:
        case Key(key=key, type=declared):
            spec = source.spec(key)
            stored = TensorType(tuple(spec.shape), np.dtype(spec.dtype))
            if stored.shape != declared.shape:
                raise WeightShapeError(f"weight {quote(key)} ({source.where(key)}): expected {declared}, got {stored}")
            if (stored.dtype.kind == "c") != (declared.dtype.kind == "c"):
                raise WeightDTypeError(f"weight {quote(key)} ({source.where(key)}): expected {declared}, got {stored}")
            return cast(Key(key, stored), declared.dtype)
        case Cast(of=Key() as stored_key, dtype=dtype):
            read = read_from(stored_key, source)
            return cast(read.of if isinstance(read, Cast) else read, dtype)
        case Cast(of=of, dtype=dtype):
            return cast(read_from(of, source), dtype)
        case Transposed(of=of):
            return Transposed(read_from(of, source))
        case Concat(parts=parts, axis=axis):
            return Concat(tuple(read_from(p, source) for p in parts), axis)
        case Stack(parts=parts):
            return Stack(tuple(read_from(p, source) for p in parts))


def cast(program: Program, dtype: np.dtype[Any]) -> Program:
    """`program` in `dtype`; casts that undo each other's widening collapse.

    A cast is applied to the parts of a merge, so that merging and casting commute.
    """
    if program.type.dtype == dtype:
        return program
    match program:
        case Cast(of=of) if widens(of.type.dtype, program.type.dtype):
            return cast(of, dtype)
        case Concat(parts=parts, axis=axis):
            return Concat(tuple(cast(p, dtype) for p in parts), axis)
        case Stack(parts=parts):
            return Stack(tuple(cast(p, dtype) for p in parts))
    return Cast(program, dtype)


def concat(parts: tuple[Program, ...], axis: int) -> Program:
    """Merge programs along `axis`.

    Raises:
        WeightShapeError: the other axes or the dtypes differ.
    """
    first = parts[0].type
    for part in parts[1:]:
        rest = [(a, b) for i, (a, b) in enumerate(zip(first.shape, part.type.shape, strict=True)) if i != axis]
        if part.type.dtype != first.dtype or any(a != b for a, b in rest):
            raise WeightShapeError(f"cannot merge {parts[0]} {first} with {part} {part.type} along axis {axis}")
    return Concat(parts, axis)


def widens(narrow: np.dtype[Any], wide: np.dtype[Any]) -> bool:
    """Whether every value of `narrow` is a value of `wide`.

    >>> widens(np.dtype("float16"), np.dtype("float32"))
    True
    >>> widens(np.dtype("float32"), np.dtype("float16"))
    False
    """
    if narrow == wide:
        return True
    if is_float(narrow) and is_float(wide):
        # numpy.finfo knows bf16 and f8 only through ml_dtypes.
        a, b = ml_dtypes.finfo(narrow), ml_dtypes.finfo(wide)
        return bool(
            a.nmant <= b.nmant
            and float(a.max) <= float(b.max)
            and float(a.smallest_subnormal) >= float(b.smallest_subnormal)
        )
    return bool(np.can_cast(narrow, wide, casting="safe"))


def leaf_name(program: Program) -> str:
    """The printed name of a leaf: `model.layers.{0..3}.self_attn.{q,k,v}_proj.weight`. Never parsed.

    >>> from rlx_jax.ir.types import tensor_type
    >>> t = tensor_type((2, 2), "f32", "doc")
    >>> leaf_name(Concat((Key("a.q_proj.weight", t), Key("a.k_proj.weight", t)), 0))
    'a.{q,k}_proj.weight'
    """
    match program:
        case Key(key=key):
            return key
        case Transposed(of=of):
            return f"{leaf_name(of)}.T"
        case Cast(of=of):
            return leaf_name(of)
        case Concat(parts=parts) | Stack(parts=parts):
            return _braced([leaf_name(p) for p in parts])


def _braced(names: list[str]) -> str:
    """Fold names that differ in one place into `prefix{a,b}suffix`; whole runs of numbers become `{0..3}`."""
    if len(set(names)) == 1:
        return names[0]
    tokens = [re.findall(r"\w+|\W", name.replace("_", " _ ").replace(" ", "\0")) for name in names]
    if len({len(t) for t in tokens}) != 1:
        return "{" + ",".join(names) + "}"
    columns = list(zip(*tokens, strict=True))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1:
        return "{" + ",".join(names) + "}"
    values = list(columns[varying[0]])
    run = all(v.isdigit() for v in values) and [int(v) for v in values] == list(
        range(int(values[0]), int(values[0]) + len(values))
    )
    inner = f"{values[0]}..{values[-1]}" if run else ",".join(values)
    parts = [f"{{{inner}}}" if i == varying[0] else column[0] for i, column in enumerate(columns)]
    return "".join(parts).replace("\0", "")
