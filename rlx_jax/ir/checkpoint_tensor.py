"""What parameter programs begin with: stored tensors, parts of them, and their numbers where they are packed.

A box is what a device holds of a tensor that lies on several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from rlx_jax.errors import UnsupportedError, WeightShapeError
from rlx_jax.ir.packed import SCHEMES, decoded, decoder_of, packed_types
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class Parts:
    """An axis that is several side by side: the size of each, and its role. Whole it is divided over nothing; a pass
    takes it apart where devices divide a part (`rlx_jax.lowering.hir.weights`)."""

    of: tuple[tuple[int, str | None], ...]

    def within(self, start: int, stop: int) -> Role:
        """Of `start` to `stop` of the axis."""
        found: list[tuple[int, str | None]] = []
        at = 0
        for size, role in self.of:
            kept = min(stop, at + size) - max(start, at)
            found += [(kept, role)] if kept > 0 else []
            at += size
        return found[0][1] if len(found) == 1 else Parts(tuple(found))

    def __str__(self) -> str:
        return " ‖ ".join(f"{size} {role or 'whole'}" for size, role in self.of)


@dataclass(frozen=True)
class Conflict:
    """An axis to which several uses of one weight give different roles. A mesh that divides one of them is refused."""

    of: tuple[str | Parts, ...]

    @property
    def names(self) -> Iterator[str]:
        """The roles, those of parts one by one."""
        for role in self.of:
            yield from (role,) if isinstance(role, str) else (name for _, name in role.of if name is not None)

    def __str__(self) -> str:
        return " and ".join(
            f"{str(role)!r} in {place} place"
            for role, place in zip(self.of, ("one", "another", "a third"), strict=False)
        )


Role = str | Parts | Conflict | None
# What each axis is (`rlx_jax.ir.roles`); None where nobody said.
Roles = tuple[Role, ...]


class ProgramStep(Protocol):
    """What every program is: one step over the programs in `parts`. One more is a class with these members."""

    @property
    def type(self) -> TensorType:
        """Shape and dtype of the value."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """The programs that it is made of, in order."""

    @property
    def lossy(self) -> bool:
        """Whether this step may lose bits of a float. (Integers are checked against their range when loaded.)"""

    @property
    def in_place(self) -> bool:
        """Whether `cut` gives views of a NumPy array, so that who fills them fills it."""

    def over(self, *parts: Any) -> Any:
        """The same step over other parts."""

    def box(self, box: Box) -> Any:
        """The program of a box of the value, which reads no more than it has to. `rlx_jax.ir.param.boxed` asks."""

    def join(self, *values: Any) -> Any:
        """The value, of those of the parts: arrays of NumPy or JAX."""

    def cut(self, value: Any) -> tuple[Any, ...]:
        """`join` backwards: what of a value each part has, in the value's dtype; views where possible."""

    def name(self, *names: str) -> str:
        """What messages call it, of the names of its parts."""

    def roles(self, *parts: Roles) -> Roles:
        """What its axes are, of what those of its parts are."""


class OverOne:
    """What most steps have in common: one program `of`, whose roles and name they have; they are exact, and what fills
    them fills an array of their own."""

    in_place: ClassVar[bool] = False

    @property
    def lossy(self) -> bool:
        return False

    @property
    def parts(self: Any) -> tuple[Any, ...]:
        return (self.of,)

    def over(self, *parts: Any) -> Any:
        step: Any = self
        return replace(step, of=parts[0])

    def cut(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def name(self, *names: str) -> str:
        return names[0]

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]


class NoParts:
    """What steps have in common that begin a program."""

    type: TensorType
    parts: ClassVar[tuple[Any, ...]] = ()
    lossy: ClassVar[bool] = False

    def over(self, *parts: Any) -> Any:
        return self

    def cut(self, value: Any) -> tuple[Any, ...]:
        return ()

    def roles(self, *parts: Roles) -> Roles:
        return (None,) * self.type.rank


class Indexed(OverOne):
    """What steps have in common that take `index` of `of`."""

    of: Any
    index: Any

    @property
    def type(self) -> TensorType:
        return TensorType(indexed(self.of.type.shape, self.index), self.of.type.dtype)

    def __str__(self) -> str:
        return f"{self.of}{index_text(self.index)}"

    def join(self, *values: Any) -> Any:
        return values[0][self.index]

    def name(self, *names: str) -> str:
        return f"{names[0]}{index_text(self.index)}"


@dataclass(frozen=True)
class Key(NoParts):
    """The tensor stored under a checkpoint key, as it is."""

    key: str
    type: TensorType
    in_place: ClassVar[bool] = True

    def __hash__(self) -> int:  # the generated one would hash the type too, and builds hash keys by the thousand
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    @property
    def stored(self) -> Key:
        return self

    @property
    def place(self) -> Box:
        """Where it stands in the stored tensor: all of it."""
        return full(self.type.shape)

    def box(self, box: Box) -> Key | Sliced:
        found: Key | Sliced = self
        for axis, (edges, size) in enumerate(zip(box, self.type.shape, strict=True)):
            found = found if edges == (0, size) else Sliced(found, axis, *edges)
        return found

    def join(self, *values: Any) -> Any:
        return values[0]  # what is stored is the value

    def name(self, *names: str) -> str:
        return self.key


@dataclass(frozen=True)
class Sliced(Indexed):
    """`start` to `stop` along an axis of a stored tensor, or of such a part: one projection of several that are stored
    as one.

    Only what it holds is read. Read backwards, it is a piece of its key.
    """

    of: Key | Sliced
    axis: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        shape = self.of.type.shape
        if not (0 <= self.axis < len(shape) and 0 <= self.start < self.stop <= shape[self.axis]):
            raise WeightShapeError(f"{self}: {self.of.type} has no such part along axis {self.axis}")

    @property
    def stored(self) -> Key:
        """The key that it is a part of."""
        return self.of.stored

    @property
    def place(self) -> Box:
        """Where it stands in the stored tensor."""
        around = self.of.place
        first = around[self.axis][0]
        return (*around[: self.axis], (first + self.start, first + self.stop), *around[self.axis + 1 :])

    @property
    def index(self) -> Index:
        """Where it stands in what it is a part of."""
        return rows(self.axis, self.start, self.stop)

    def over(self, *parts: Any) -> Any:
        (part,) = parts
        if isinstance(part, Key | Sliced):
            return super().over(part)
        return part_of(part, self.axis, self.start, self.stop)

    def box(self, box: Box) -> Key | Sliced:
        return self.stored.box(moved(box, [start for start, _ in self.place]))

    def roles(self, *parts: Roles) -> Roles:
        (of,) = parts
        role = of[self.axis]
        if not isinstance(role, Parts):
            return of
        return (*of[: self.axis], role.within(self.start, self.stop), *of[self.axis + 1 :])


@dataclass(frozen=True)
class Dequantized(OverOne):
    """The numbers of a packed tensor, decoded row by row and rounded to `dtype`, a floating one.

    The type of `of` is that of the bytes, uint8 `[..., k / elements · bytes]`; the type of this is the logical one,
    `[..., k]`. Lossy: read backwards it is numbers, under the key and in the logical type; they are not packed again.
    """

    of: Key | Sliced
    scheme: str
    dtype: np.dtype[Any]
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        decoder_of(self.scheme, f"dequantize({self.of})")
        _, stored = packed_types(self.type.shape, self.dtype, self.scheme, str(self))
        if self.of.type != stored or self.of.place[-1][0] % SCHEMES[self.scheme].bytes:
            raise WeightShapeError(f"{self}: expected whole blocks, {stored} for {self.type}, got {self.of.type}")

    @property
    def type(self) -> TensorType:
        *before, last = self.of.type.shape or (0,)
        scheme = SCHEMES[self.scheme]
        return TensorType((*before, last // scheme.bytes * scheme.elements), self.dtype)

    @property
    def logical(self) -> Key | Sliced:
        """What is decoded, as blocks see it: the key or the part of it, with the logical type."""
        if isinstance(self.of, Key):
            return Key(self.of.key, self.type)
        part, scheme = self.of, SCHEMES[self.scheme]
        per_byte = scheme.elements if part.axis == part.of.type.rank - 1 else scheme.bytes
        start, stop = (edge * per_byte // scheme.bytes for edge in (part.start, part.stop))
        return Sliced(self.over(part.of).logical, part.axis, start, stop)

    def __str__(self) -> str:
        return f"dequantize({self.of}, {self.scheme})"

    def over(self, *parts: Any) -> Dequantized:
        (part,) = parts
        if not isinstance(part, Key | Sliced):
            raise WeightShapeError(f"{self}: a stored tensor is decoded, or a part of one, not {part}")
        return Dequantized(part, self.scheme, self.dtype)

    def box(self, box: Box) -> Dequantized | Cut:
        """Of the blocks that it begins or ends inside of, the rest is cut off the numbers."""
        scheme, (*before, (start, stop)) = SCHEMES[self.scheme], box
        first, last = start // scheme.elements, -(-stop // scheme.elements)
        blocks = self.over(self.of.box((*before, (first * scheme.bytes, last * scheme.bytes))))
        begins = first * scheme.elements
        inside = (*full(sizes(tuple(before))), (start - begins, stop - begins))
        return blocks if inside == full(blocks.type.shape) else Cut(blocks, inside)

    def join(self, *values: Any) -> Any:
        return decoded(values[0], self.scheme).astype(self.dtype)

    def cut(self, value: Any) -> tuple[Any, ...]:
        raise UnsupportedError(f"{self}: numbers are not packed again")

    def name(self, *names: str) -> str:
        return str(self.logical)


@dataclass(frozen=True)
class Strided(Indexed):
    """Every `step`-th row of a program along an axis, from `start` on: one of `step` projections that are stored
    interleaved. `start` lies before `step`, which divides the axis.

    Read backwards, it is a part of its key, which is whole once all `step` are there.
    """

    of: ProgramStep
    axis: int
    start: int
    step: int

    def __post_init__(self) -> None:
        shape = self.of.type.shape
        fits = 0 <= self.axis < len(shape) and 0 <= self.start < self.step and shape[self.axis] % self.step == 0
        if not fits:
            raise WeightShapeError(f"{self}: {self.of.type} has no such part along axis {self.axis}")

    @property
    def index(self) -> Index:
        """Where it stands in what it is a part of."""
        return rows(self.axis, self.start, None, self.step)

    def box(self, box: Box) -> Strided:
        first, stop = box[self.axis]
        around = (*box[: self.axis], (first * self.step, stop * self.step), *box[self.axis + 1 :])
        found: Strided = self.over(self.of if around == full(self.of.type.shape) else self.of.box(around))
        return found

    def cut(self, value: Any) -> tuple[Any, ...]:
        raise UnsupportedError(f"{self}: it is a part of what is stored; `pieces` joins the parts")


@dataclass(frozen=True)
class Cut(Indexed):
    """A box of numbers that are decoded as whole blocks: it begins or ends inside of one.

    Only `box` makes one, for reading. No leaf is one, as nothing reads it backwards.
    """

    of: Dequantized
    inside: Box

    @property
    def index(self) -> Index:
        """Where it stands in what it is a part of."""
        return slices(self.inside)

    def box(self, box: Box) -> Cut:
        return Cut(self.of, moved(box, [start for start, _ in self.inside]))

    def cut(self, value: Any) -> tuple[Any, ...]:
        raise UnsupportedError(f"{self}: what was cut off is not known, so it cannot be written")


def part_of(program: ProgramStep, axis: int, start: int, stop: int) -> Any:
    """`start` to `stop` of a program along an axis, as `rlx_jax.ir.param.sliced` says."""
    shape, what = program.type.shape, f"{program}: {start}:{stop} of {program.type} along axis {axis}"
    if not (0 <= axis < len(shape) and 0 <= start < stop <= shape[axis]):
        raise WeightShapeError(f"{what}: there is no such part")
    if (start, stop) == (0, shape[axis]):
        return program
    found = program.box(along(shape, axis, start, stop))
    cut = next((step for step in steps(found) if isinstance(step, Cut)), None)
    if cut is not None:
        size = SCHEMES[cut.of.scheme].elements
        raise WeightShapeError(f"{what} cuts a block of {size}; take multiples of {size}, or rows")
    interleaved = [step for step in steps(found) if isinstance(step, Strided)]
    if any(isinstance(inner, Sliced) for step in interleaved for inner in steps(step)):
        raise WeightShapeError(f"{what} is a part of one of several that are stored interleaved; take all of that")
    return found


def steps(program: ProgramStep) -> Iterator[ProgramStep]:
    """A program and all that it is made of, the last step first."""
    yield program
    for part in program.parts:
        yield from steps(part)


# (start, stop) for every axis.
Box = tuple[tuple[int, int], ...]
# What NumPy takes between brackets; of axes behind it all.
Index = tuple[slice, ...]


def full(shape: Sequence[int]) -> Box:
    """All of an array."""
    return tuple((0, size) for size in shape)


def along(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
    """`start` to `stop` along one axis, and all of the others."""
    return tuple((start, stop) if i == axis else (0, size) for i, size in enumerate(shape))


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of what a box holds."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> Index:
    """A box as an index of NumPy."""
    return tuple(slice(start, stop) for start, stop in box)


def rows(axis: int, start: int, stop: int | None, step: int | None = None) -> Index:
    """Those along one axis, and all of the axes before it."""
    return (*(slice(None),) * axis, slice(start, stop, step))


def indexed(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """The shape of what an index takes of an array.

    >>> indexed((2, 6, 4), rows(1, 1, None, 3))
    (2, 2, 4)
    """
    taken = (len(range(*part.indices(size))) for part, size in zip(index, shape, strict=False))
    return (*taken, *shape[len(index) :])


def index_text(index: Index) -> str:
    """An index as it is written.

    >>> index_text(rows(1, 0, 2)), index_text(rows(2, 1, None, 3))
    ('[:, 0:2]', '[:, :, 1::3]')
    """
    edges = ((part.start, part.stop, part.step)[: 2 if part.step is None else 3] for part in index)
    return f"[{', '.join(':'.join('' if edge is None else str(edge) for edge in part) for part in edges)}]"


def moved(box: Box, by: Sequence[int]) -> Box:
    """A box that begins `by` further along each axis."""
    return tuple((start + far, stop + far) for (start, stop), far in zip(box, by, strict=True))


def crossed(box: Box, axis: int, lengths: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Of arrays side by side along `axis`, those that a box crosses: each with its number and its own box."""
    begins, (start, stop) = 0, box[axis]
    for number, length in enumerate(lengths):
        first, last = max(start, begins), min(stop, begins + length)
        if first < last:
            yield number, (*box[:axis], (first - begins, last - begins), *box[axis + 1 :])
        begins += length


def side_by_side(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """The axis along which boxes are all of an array of that shape, no place of it twice; None if they are not."""
    for axis, size in enumerate(shape):
        edges = sorted(box[axis] for box in boxes)
        lined_up = [start for start, _ in edges] + [size] == [0, *(stop for _, stop in edges)]
        if lined_up and all(box == along(shape, axis, *box[axis]) for box in boxes):
            return axis
    return None
