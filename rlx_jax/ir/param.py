"""Parameters are references: a small program over checkpoint keys, and no data.

The compiler sees programs and shapes only. `rlx_jax.weights.execute` runs a program on a
`WeightSource`; read backwards, the same program writes the checkpoint keys again.
A program is *exact* when that round trip loses nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import UnsupportedError, WeightShapeError
from rlx_jax.ir.braces import braced
from rlx_jax.ir.packed import SCHEMES, decoded, decoder_of, packed_types
from rlx_jax.ir.types import TensorType, is_float, short_name, widens


Roles = tuple[str | None, ...]
"""What each axis is (`rlx_jax.ir.roles`); None where nobody said."""


class ProgramStep(Protocol):
    """What every program is: one step over the programs in `parts`. One more is a class with these members."""

    @property
    def type(self) -> TensorType:
        """Shape and dtype of the value."""

    @property
    def parts(self) -> tuple[Program, ...]:
        """What it is made of, in order."""

    @property
    def lossy(self) -> bool:
        """Whether this step may lose bits of a float. (Integers are checked against their range when loaded.)"""

    @property
    def in_place(self) -> bool:
        """Whether `cut` gives views of a NumPy array, so that who fills them fills it."""

    def over(self, *parts: Program) -> Program:
        """The same step over other parts."""

    def join(self, *values: Any) -> Any:
        """The value, of those of the parts: arrays of NumPy or JAX."""

    def cut(self, value: Any) -> tuple[Any, ...]:
        """`join` backwards: what of a value each part has, in the value's dtype; views where possible."""

    def name(self, *names: str) -> str:
        """What messages call it, of the names of its parts."""

    def roles(self, *parts: Roles) -> Roles:
        """What its axes are, of what those of its parts are."""


@dataclass(frozen=True)
class Key:
    """The tensor stored under a checkpoint key, as it is."""

    key: str
    type: TensorType
    parts: ClassVar[tuple[Program, ...]] = ()
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def __hash__(self) -> int:  # the generated one would hash the type too, and builds hash keys by the thousand
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    def over(self, *parts: Program) -> Program:
        return self

    def join(self, *values: Any) -> Any:
        return values[0]  # what is stored is the value

    def cut(self, value: Any) -> tuple[Any, ...]:
        return ()

    def name(self, *names: str) -> str:
        return self.key

    def roles(self, *parts: Roles) -> Roles:
        return (None,) * self.type.rank


@dataclass(frozen=True)
class Sliced:
    """`start` to `stop` along an axis of a stored tensor: one projection of several that are stored as one.

    Only what it holds is read. Read backwards, it is a piece of its key.
    """

    of: Key
    axis: int
    start: int
    stop: int
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    def __post_init__(self) -> None:
        shape = self.of.type.shape
        if not (0 <= self.axis < len(shape) and 0 <= self.start < self.stop <= shape[self.axis]):
            raise WeightShapeError(f"{self}: {self.of.type} has no such part along axis {self.axis}")

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it stands in the stored tensor."""
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))

    @property
    def type(self) -> TensorType:
        shape = list(self.of.type.shape)
        shape[self.axis] = self.stop - self.start
        return TensorType(tuple(shape), self.of.type.dtype)

    @property
    def parts(self) -> tuple[Program, ...]:
        return (self.of,)

    def __str__(self) -> str:
        return f"{self.of}[{':, ' * self.axis}{self.start}:{self.stop}]"

    def over(self, *parts: Program) -> Program:
        (part,) = parts
        if isinstance(part, Cast):  # a part of a cast is the cast of a part
            return cast(self.over(part.of), part.dtype)
        if isinstance(part, Dequantized):
            return part.sliced(self.axis, self.start, self.stop)
        if not isinstance(part, Key):
            raise WeightShapeError(f"{self}: a part of a stored tensor is taken, not of {part}")
        return Sliced(part, self.axis, self.start, self.stop)

    def join(self, *values: Any) -> Any:
        return values[0][self.index]

    def cut(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def name(self, *names: str) -> str:
        return str(self)

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]


@dataclass(frozen=True)
class Dequantized:
    """The numbers of a packed tensor, decoded row by row and rounded to `dtype`, a floating one.

    The type of `of` is that of the bytes, uint8 `[..., k / elements · bytes]`; the type of this is the logical one,
    `[..., k]`. Lossy: read backwards it is numbers, under the key and in the logical type; they are not packed again.
    """

    of: Key | Sliced
    scheme: str
    dtype: np.dtype[Any]
    lossy: ClassVar[bool] = True
    in_place: ClassVar[bool] = False

    def __post_init__(self) -> None:
        decoder_of(self.scheme, f"dequantize({self.of})")
        logical, stored = packed_types(self.type.shape, self.dtype, self.scheme, str(self))
        begins = self.of.start if isinstance(self.of, Sliced) and self.of.axis == logical.rank - 1 else 0
        if self.of.type != stored or begins % SCHEMES[self.scheme].bytes:
            raise WeightShapeError(f"{self}: expected whole blocks, {stored} for {logical}, got {self.of.type}")

    @property
    def type(self) -> TensorType:
        *rows, last = self.of.type.shape or (0,)
        scheme = SCHEMES[self.scheme]
        return TensorType((*rows, last // scheme.bytes * scheme.elements), self.dtype)

    @property
    def logical(self) -> Key | Sliced:
        """What is decoded, as blocks see it: the key or the part of it, with the logical type."""
        if isinstance(self.of, Key):
            return Key(self.of.key, self.type)
        whole, part, scheme = self.over(self.of.of), self.of, SCHEMES[self.scheme]
        per_byte = scheme.elements if part.axis == part.of.type.rank - 1 else scheme.bytes
        start, stop = (edge * per_byte // scheme.bytes for edge in (part.start, part.stop))
        return Sliced(Key(part.of.key, whole.type), part.axis, start, stop)

    @property
    def parts(self) -> tuple[Program, ...]:
        return (self.of,)

    def __str__(self) -> str:
        return f"dequantize({self.of}, {self.scheme})"

    def over(self, *parts: Program) -> Dequantized:
        (part,) = parts
        if not isinstance(part, Key | Sliced):
            raise WeightShapeError(f"{self}: a stored tensor is decoded, or a part of one, not {part}")
        return Dequantized(part, self.scheme, self.dtype)

    def sliced(self, axis: int, start: int, stop: int) -> Dequantized:
        """`start` to `stop` along a logical axis: whole blocks of a key. Only their bytes are read."""
        if not isinstance(self.of, Key):
            raise WeightShapeError(f"{self}: a part of a stored tensor is taken, not of a part")
        if axis == self.of.type.rank - 1:
            scheme, size = SCHEMES[self.scheme], SCHEMES[self.scheme].elements
            if start % size or stop % size:
                what = f"{self}: {start}:{stop} of {self.type} along axis {axis}"
                raise WeightShapeError(f"{what} cuts a block of {size}; take multiples of {size}, or rows")
            start, stop = start // size * scheme.bytes, stop // size * scheme.bytes
        return self.over(Sliced(self.of, axis, start, stop))

    def join(self, *values: Any) -> Any:
        return decoded(values[0], self.scheme).astype(self.dtype)

    def cut(self, value: Any) -> tuple[Any, ...]:
        raise UnsupportedError(f"{self}: numbers are not packed again")

    def name(self, *names: str) -> str:
        return str(self.logical)

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]


@dataclass(frozen=True)
class Transposed:
    """A rank-2 program with its axes swapped."""

    of: Program
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        return TensorType(self.of.type.shape[::-1], self.of.type.dtype)

    @property
    def parts(self) -> tuple[Program, ...]:
        return (self.of,)

    def __str__(self) -> str:
        return f"transpose({self.of})"

    def over(self, *parts: Program) -> Program:
        return Transposed(parts[0])

    def join(self, *values: Any) -> Any:
        return values[0].T

    def cut(self, value: Any) -> tuple[Any, ...]:
        return (value.T,)

    def name(self, *names: str) -> str:
        return f"{names[0]}.T"

    def roles(self, *parts: Roles) -> Roles:
        return parts[0][::-1]


@dataclass(frozen=True)
class Permuted:
    """A program with its axes in another order: axis i is axis `axes[i]` of what it is made of."""

    of: Program
    axes: tuple[int, ...]
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sorted(self.axes) != list(range(self.of.type.rank)):
            raise WeightShapeError(f"permute({self.of}): {self.axes} are not the axes of {self.of.type}")

    @property
    def type(self) -> TensorType:
        return TensorType(tuple(self.of.type.shape[axis] for axis in self.axes), self.of.type.dtype)

    @property
    def parts(self) -> tuple[Program, ...]:
        return (self.of,)

    def __str__(self) -> str:
        return f"permute({self.of}; {', '.join(map(str, self.axes))})"

    def over(self, *parts: Program) -> Program:
        return Permuted(parts[0], self.axes)

    def join(self, *values: Any) -> Any:
        return values[0].transpose(self.axes)

    def cut(self, value: Any) -> tuple[Any, ...]:
        back = tuple(self.axes.index(axis) for axis in range(len(self.axes)))
        return (value.transpose(back),)

    def name(self, *names: str) -> str:
        return f"{names[0]}.permute({','.join(map(str, self.axes))})"

    def roles(self, *parts: Roles) -> Roles:
        return tuple(parts[0][axis] for axis in self.axes)


@dataclass(frozen=True)
class Reshaped:
    """The elements of a program, in their order, in another shape."""

    of: Program
    shape: tuple[int, ...]
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = False  # what is to be filled may be a part of something larger, which reshape copies

    def __post_init__(self) -> None:
        if math.prod(self.shape) != self.of.type.size:
            raise WeightShapeError(f"reshape({self.of}): {self.of.type} has not the elements of {list(self.shape)}")

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.of.type.dtype)

    @property
    def parts(self) -> tuple[Program, ...]:
        return (self.of,)

    def __str__(self) -> str:
        return f"reshape({self.of}; {', '.join(map(str, self.shape))})"

    def over(self, *parts: Program) -> Program:
        return Reshaped(parts[0], self.shape)

    def join(self, *values: Any) -> Any:
        return values[0].reshape(self.shape)

    def cut(self, value: Any) -> tuple[Any, ...]:
        return (value.reshape(self.of.type.shape),)

    def name(self, *names: str) -> str:
        return f"{names[0]}.reshape({','.join(map(str, self.shape))})"

    def roles(self, *parts: Roles) -> Roles:
        return (None,) * len(self.shape)


@dataclass(frozen=True)
class Cast:
    """Another dtype. Widening is exact; narrowing is lossy."""

    of: Program
    dtype: np.dtype[Any]
    in_place: ClassVar[bool] = False

    @property
    def type(self) -> TensorType:
        return self.of.type.with_dtype(self.dtype)

    @property
    def parts(self) -> tuple[Program, ...]:
        return (self.of,)

    @property
    def lossy(self) -> bool:
        return is_float(self.of.type.dtype) and not widens(self.of.type.dtype, self.dtype)

    def __str__(self) -> str:
        return f"cast({self.of}, {short_name(self.dtype)})"

    def over(self, *parts: Program) -> Program:
        return cast(parts[0], self.dtype)

    def join(self, *values: Any) -> Any:
        return values[0].astype(self.dtype)

    def cut(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def name(self, *names: str) -> str:
        return names[0]

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]


@dataclass(frozen=True)
class Joined:
    """Several programs side by side along `axis`: merged projections."""

    parts: tuple[Program, ...]
    axis: int
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        first = self.parts[0].type
        shape = list(first.shape)
        shape[self.axis] = sum(p.type.shape[self.axis] for p in self.parts)
        return TensorType(tuple(shape), first.dtype)

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, self.parts))}; axis={self.axis})"

    def over(self, *parts: Program) -> Program:
        return Joined(parts, self.axis)

    def join(self, *values: Any) -> Any:
        return jnp.concatenate(values, self.axis)

    def cut(self, value: Any) -> tuple[Any, ...]:
        ends = itertools.accumulate(part.type.shape[self.axis] for part in self.parts)
        cuts = itertools.pairwise((0, *ends))
        return tuple(value[(slice(None),) * self.axis + (slice(start, end),)] for start, end in cuts)

    def name(self, *names: str) -> str:
        return braced(list(names))

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]  # what is divided in another way is not merged


@dataclass(frozen=True)
class Stack:
    """Equal programs stacked along a new leading axis: one leaf for all layers of a scan."""

    parts: tuple[Program, ...]
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @staticmethod
    def of_keys(template: str, count: int, type: TensorType) -> Stack:
        """The keys that a template makes of 0, 1 … `count` − 1, each of this type.

        >>> from rlx_jax.ir.types import tensor_type
        >>> str(Stack.of_keys("experts.{}.w", 2, tensor_type((2, 2), "f32", "doc")))
        'stack(experts.0.w, experts.1.w)'
        """
        return Stack(tuple(Key(template.format(i), type) for i in range(count)))

    @property
    def type(self) -> TensorType:
        first = self.parts[0].type
        return TensorType((len(self.parts), *first.shape), first.dtype)

    def __str__(self) -> str:
        return f"stack({', '.join(map(str, self.parts))})"

    def over(self, *parts: Program) -> Program:
        return Stack(parts)

    def join(self, *values: Any) -> Any:
        return jnp.stack(values)

    def cut(self, value: Any) -> tuple[Any, ...]:
        return tuple(value[i, ...] for i in range(len(self.parts)))

    def name(self, *names: str) -> str:
        return braced(list(names))

    def roles(self, *parts: Roles) -> Roles:
        return (None, *parts[0])


Program = Key | Sliced | Dequantized | Transposed | Permuted | Reshaped | Cast | Joined | Stack


def stored_keys(program: Program) -> Iterator[Key]:
    """The stored tensors a program reads, in order. Of a packed one the type is the logical one."""
    if isinstance(program, Dequantized):
        program = program.logical
    if isinstance(program, Key):
        yield program
    for part in program.parts:
        yield from stored_keys(part)


def keys_of(program: Program) -> Iterator[str]:
    """The checkpoint keys a program reads, in order."""
    return (stored.key for stored in stored_keys(program))


def packed_keys(program: Program) -> Iterator[tuple[str, str]]:
    """The packed tensors a program reads, in order: the key and the scheme of each."""
    if isinstance(program, Dequantized):
        yield from ((key, program.scheme) for key in keys_of(program))
    for part in program.parts:
        yield from packed_keys(part)


def narrows(program: Program) -> bool:
    """Whether running `program` may lose bits of a float."""
    return program.lossy or any(narrows(part) for part in program.parts)


def cast(program: Program, dtype: np.dtype[Any]) -> Program:
    """`program` in `dtype`; casts that undo each other's widening collapse.

    A cast is applied to the parts of a merge, so that merging and casting commute.
    """
    if program.type.dtype == dtype:
        return program
    if isinstance(program, Cast) and widens(program.of.type.dtype, program.type.dtype):
        return cast(program.of, dtype)
    if isinstance(program, Joined | Stack):
        return program.over(*(cast(part, dtype) for part in program.parts))
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
    return Joined(parts, axis)


def leaf_name(program: Program) -> str:
    """The printed name of a leaf: `model.layers.{0..3}.self_attn.{q,k,v}_proj.weight`. Never parsed.

    >>> from rlx_jax.ir.types import tensor_type
    >>> t = tensor_type((2, 2), "f32", "doc")
    >>> leaf_name(Joined((Key("a.q_proj.weight", t), Key("a.k_proj.weight", t)), 0))
    'a.{q,k}_proj.weight'
    """
    return program.name(*map(leaf_name, program.parts))
