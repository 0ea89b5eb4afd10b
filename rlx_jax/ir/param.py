"""Parameters are references: a small program over checkpoint keys, and no data.

The compiler sees programs and shapes only. `rlx_jax.weights.execute` runs a program on a
`WeightSource`; read backwards, the same program writes the checkpoint keys again.
A program is *exact* when that round trip loses nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import WeightShapeError
from rlx_jax.ir.checkpoint_tensor import Box, NoParts, OverOne, crossed, full, part_of, rows, side_by_side, sizes, steps
from rlx_jax.ir.checkpoint_tensor import Conflict as Conflict
from rlx_jax.ir.checkpoint_tensor import Cut as Cut
from rlx_jax.ir.checkpoint_tensor import Dequantized as Dequantized
from rlx_jax.ir.checkpoint_tensor import Key as Key
from rlx_jax.ir.checkpoint_tensor import Parts as Parts
from rlx_jax.ir.checkpoint_tensor import Role as Role
from rlx_jax.ir.checkpoint_tensor import Roles as Roles
from rlx_jax.ir.checkpoint_tensor import Sliced as Sliced
from rlx_jax.ir.checkpoint_tensor import Strided as Strided
from rlx_jax.ir.types import TensorType, is_float, short_name, widens


@dataclass(frozen=True)
class Transposed(OverOne):
    """A rank-2 program with its axes swapped."""

    of: Program
    in_place: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        return TensorType(self.of.type.shape[::-1], self.of.type.dtype)

    def __str__(self) -> str:
        return f"transpose({self.of})"

    def box(self, box: Box) -> Program:
        return Transposed(boxed(self.of, box[::-1]))

    def join(self, *values: Any) -> Any:
        return values[0].T

    def cut(self, value: Any) -> tuple[Any, ...]:
        return (value.T,)

    def name(self, *names: str) -> str:
        return f"{names[0]}.T"

    def roles(self, *parts: Roles) -> Roles:
        return parts[0][::-1]


@dataclass(frozen=True)
class Cast(OverOne):
    """Another dtype. Widening is exact; narrowing is lossy."""

    of: Program
    dtype: np.dtype[Any]

    @property
    def type(self) -> TensorType:
        return self.of.type.with_dtype(self.dtype)

    @property
    def lossy(self) -> bool:
        return is_float(self.of.type.dtype) and not widens(self.of.type.dtype, self.dtype)

    def __str__(self) -> str:
        return f"cast({self.of}, {short_name(self.dtype)})"

    def over(self, *parts: Program) -> Program:
        return cast(parts[0], self.dtype)

    def box(self, box: Box) -> Program:
        return cast(boxed(self.of, box), self.dtype)

    def join(self, *values: Any) -> Any:
        return values[0].astype(self.dtype)


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

    def box(self, box: Box) -> Program:
        lengths = [part.type.shape[self.axis] for part in self.parts]
        found = tuple(boxed(self.parts[number], inside) for number, inside in crossed(box, self.axis, lengths))
        return found[0] if len(found) == 1 else Joined(found, self.axis)

    def join(self, *values: Any) -> Any:
        return jnp.concatenate(values, self.axis)

    def cut(self, value: Any) -> tuple[Any, ...]:
        ends = itertools.accumulate(part.type.shape[self.axis] for part in self.parts)
        cuts = itertools.pairwise((0, *ends))
        return tuple(value[rows(self.axis, start, end)] for start, end in cuts)

    def name(self, *names: str) -> str:
        """Where all of every sliced key is there, in whatever order, the names of the keys."""
        cuts = list(itertools.chain.from_iterable(map(_slices, self.parts)))
        if not cuts or not all(_is_whole(key, cuts) for key in {cut.stored for cut in cuts}):
            return braced(list(names))
        wholes = []
        for part, name in zip(self.parts, names, strict=True):
            for cut in _slices(part):
                name = name.replace(str(cut), cut.stored.key, 1)
            wholes.append(name)
        return braced(list(dict.fromkeys(wholes)))

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]  # what is divided in another way is not merged


@dataclass(frozen=True)
class Stack:
    """Equal programs stacked along a new leading axis, which has the `role`: all layers of a scan, which are divided
    over no devices, or the experts of a mixture."""

    parts: tuple[Program, ...]
    role: Role = None
    lossy: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        first = self.parts[0].type
        return TensorType((len(self.parts), *first.shape), first.dtype)

    def __str__(self) -> str:
        return f"stack({', '.join(map(str, self.parts))})"

    def over(self, *parts: Program) -> Program:
        return Stack(parts, self.role)

    def box(self, box: Box) -> Program:
        first, stop = box[0]
        return Stack(tuple(boxed(part, box[1:]) for part in self.parts[first:stop]), self.role)

    def join(self, *values: Any) -> Any:
        return jnp.stack(values)

    def cut(self, value: Any) -> tuple[Any, ...]:
        return tuple(value[i, ...] for i in range(len(self.parts)))

    def name(self, *names: str) -> str:
        return braced(list(names))

    def roles(self, *parts: Roles) -> Roles:
        return (self.role, *parts[0])


@dataclass(frozen=True)
class Zeros(NoParts):
    """Zeros that stand in no checkpoint."""

    type: TensorType
    in_place: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"zeros({self.type})"

    def box(self, box: Box) -> Program:
        return Zeros(TensorType(sizes(box), self.type.dtype))

    def join(self, *values: Any) -> Any:
        return np.zeros(self.type.shape, self.type.dtype)

    def name(self, *names: str) -> str:
        return str(self)


@dataclass(frozen=True)
class Padded(OverOne):
    """A program with zeros behind it along an axis, up to `size`: a vocabulary that devices share evenly.

    Read backwards the padding is dropped, whatever it holds by then, so that what is stored keeps its shape.
    """

    of: Program
    axis: int
    size: int
    in_place: ClassVar[bool] = True

    def __post_init__(self) -> None:
        inner = self.of.type
        if not (0 <= self.axis < inner.rank and self.size > inner.shape[self.axis]):
            raise WeightShapeError(f"{self}: {inner} cannot be padded to {self.size} along axis {self.axis}")

    def _with(self, size: int) -> TensorType:
        """The type of `of` with another size along the axis."""
        inner = self.of.type
        return TensorType((*inner.shape[: self.axis], size, *inner.shape[self.axis + 1 :]), inner.dtype)

    @property
    def type(self) -> TensorType:
        return self._with(self.size)

    @property
    def parts(self) -> tuple[Program, ...]:
        return self.of, Zeros(self._with(self.size - self.of.type.shape[self.axis]))

    def __str__(self) -> str:
        return f"pad({self.of}; axis={self.axis}, {self.size})"

    def box(self, box: Box) -> Program:
        lengths = [part.type.shape[self.axis] for part in self.parts]
        found = [boxed(self.parts[number], inside) for number, inside in crossed(box, self.axis, lengths)]
        return found[0] if len(found) == 1 else Padded(found[0], self.axis, sizes(box)[self.axis])

    def join(self, *values: Any) -> Any:
        return jnp.concatenate(values, self.axis)

    def cut(self, value: Any) -> tuple[Any, ...]:
        real = self.of.type.shape[self.axis]
        return value[rows(self.axis, 0, real)], value[rows(self.axis, real, None)]


Stored = Key | Sliced | Strided | Dequantized | Cut
Program = Stored | Transposed | Cast | Joined | Stack | Zeros | Padded


def cast(program: Program, dtype: np.dtype[Any]) -> Program:
    """`program` in `dtype`; casts that undo each other's widening collapse.

    A cast is applied to the parts of a merge, so that merging and casting commute.
    """
    if program.type.dtype == dtype:
        return program
    if isinstance(program, Cast) and widens(program.of.type.dtype, program.type.dtype):
        return cast(program.of, dtype)
    if isinstance(program, Zeros):
        return Zeros(program.type.with_dtype(dtype))
    if isinstance(program, Joined | Stack | Padded):
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


def boxed(program: Program, box: Box) -> Program:
    """The program of a box of the value of `program`: what one device of several holds of a leaf.

    Run, it gives the same numbers, and reads what they are made of alone, of a packed tensor whole blocks. `box` lies
    inside of the shape.
    """
    return program if box == full(program.type.shape) else program.box(box)


def sliced(program: Program, axis: int, start: int, stop: int) -> Program:
    """`start` to `stop` of a program along an axis, as a program that can stand in a leaf: read backwards, it is a part
    of the keys that `program` is made of. All of an axis is `program` itself.

    >>> from rlx_jax.ir.types import tensor_type
    >>> q = Key("q", tensor_type((8, 4), "bf16", "doc"))
    >>> str(sliced(Transposed(Cast(q, np.dtype(np.float32))), 1, 0, 2))
    'transpose(cast(q[0:2], f32))'

    Raises:
        WeightShapeError: there is no such part, or it cuts a packed block.
    """
    found: Program = part_of(program, axis, start, stop)
    return found


def strided(program: Program, axis: int, start: int, step: int) -> Program:
    """Every `step`-th row along an axis, from `start` on, of a stored tensor; a cast comes behind.

    Raises:
        WeightShapeError: there is no such part.
    """
    if isinstance(program, Cast):
        return cast(strided(program.of, axis, start, step), program.dtype)
    return Strided(program, axis, start, step)


def padded(program: Program, axis: int, size: int) -> Program:
    """`program` with zeros behind it along an axis, up to `size`; itself where it has that size.

    Raises:
        WeightShapeError: it is larger, or has no such axis.
    """
    shape = program.type.shape
    return program if 0 <= axis < len(shape) and shape[axis] == size else Padded(program, axis, size)


def _slices(program: Program) -> Iterator[Sliced]:
    """The parts of keys that a program reads, in order; of packed ones the logical parts."""
    if isinstance(program, Dequantized):
        program = program.logical
    if isinstance(program, Sliced):
        yield program
    else:
        for part in program.parts:
            yield from _slices(part)


def _is_whole(key: Key, cuts: Sequence[Sliced]) -> bool:
    """Whether parts of keys have all of `key` among them, none of it twice."""
    return side_by_side(key.type.shape, [cut.place for cut in cuts if cut.stored == key]) is not None


# -- what is asked of programs -------------------------------------------------------------------


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
    packed = (step for step in steps(program) if isinstance(step, Dequantized))
    return ((key, step.scheme) for step in packed for key in keys_of(step))


def key_kinds(program: Program) -> Iterator[tuple[str, str]]:
    """The keys that a program reads, and in words what each is: `f32[8,4]`, and how it is packed."""
    packed = dict(packed_keys(program))
    for stored in stored_keys(program):
        yield stored.key, f"{stored.type} packed as {packed[stored.key]}" if stored.key in packed else str(stored.type)


def narrows(program: Program) -> bool:
    """Whether running `program` may lose bits of a float."""
    return any(step.lossy for step in steps(program))


def leaf_name(program: Program) -> str:
    """The printed name of a leaf: `model.layers.{0..3}.self_attn.{q,k,v}_proj.weight`. Never parsed.

    >>> from rlx_jax.ir.types import tensor_type
    >>> t = tensor_type((2, 2), "f32", "doc")
    >>> leaf_name(Joined((Key("a.q_proj.weight", t), Key("a.k_proj.weight", t)), 0))
    'a.{q,k}_proj.weight'
    """
    return program.name(*map(leaf_name, program.parts))


def braced(names: list[str]) -> str:
    """Fold names that differ in one place into `prefix{a,b}suffix`; whole runs of numbers become `{0..3}`.

    >>> braced(["layers.0.q_proj", "layers.1.q_proj"]), braced(["a.q_proj", "a.k_proj"])
    ('layers.{0..1}.q_proj', 'a.{q,k}_proj')
    """
    if len(set(names)) == 1:
        return names[0]
    tokens = [re.findall(r"\w+|\W", name.replace("_", " _ ").replace(" ", "\0")) for name in names]
    columns = list(zip(*tokens, strict=False))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1 or len({len(t) for t in tokens}) != 1:
        return "{" + ",".join(names) + "}"
    values = list(columns[varying[0]])
    run = all(v.isdigit() for v in values) and all(int(b) == int(a) + 1 for a, b in itertools.pairwise(values))
    inner = f"{values[0]}..{values[-1]}" if run else ",".join(values)
    parts = [f"{{{inner}}}" if i == varying[0] else column[0] for i, column in enumerate(columns)]
    return "".join(parts).replace("\0", "")
