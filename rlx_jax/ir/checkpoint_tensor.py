"""The first steps of a parameter program: a checkpoint tensor, a slice of one, or the decoded values of a packed one.

`UnaryStep` documents the members of every step. A box is a rectangular part of a tensor, such as the shard of one
device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import UnsupportedError, WeightShapeError
from rlx_jax.io.ggml import BLOCKS, split_blocks
from rlx_jax.ir.boxes import Box, Index, axis_box, axis_index, box_index, full_box, index_text, indexed_shape, shift_box
from rlx_jax.ir.packed import SCHEMES, scheme_of
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class Parts:
    """The role of an axis that concatenates several parts: the size and the role of each part.

    The axis itself is never sharded. If a mesh shards one of the parts, a pass separates them
    (`rlx_jax.lowering.hir.weights`).
    """

    of: tuple[tuple[int, str | None], ...]

    def within(self, start: int, stop: int) -> Role:
        """Return the role of `start` to `stop` of the axis: the role of one part, or the `Parts` in this range."""
        parts: list[tuple[int, str | None]] = []
        offset = 0
        for size, role in self.of:
            overlap = min(stop, offset + size) - max(start, offset)
            parts += [(overlap, role)] if overlap > 0 else []
            offset += size
        return parts[0][1] if len(parts) == 1 else Parts(tuple(parts))

    def __str__(self) -> str:
        return " ‖ ".join(f"{size} {role or 'whole'}" for size, role in self.of)


@dataclass(frozen=True)
class Conflict:
    """The role of an axis to which several uses of one weight give different roles.

    A mesh that shards one of these roles is refused.
    """

    of: tuple[str | Parts, ...]

    @property
    def names(self) -> Iterator[str]:
        """The names of the roles, including the role of each part."""
        for role in self.of:
            yield from (role,) if isinstance(role, str) else (name for _, name in role.of if name is not None)

    def __str__(self) -> str:
        return " and ".join(
            f"{str(role)!r} in {ordinal} place"
            for role, ordinal in zip(self.of, ("one", "another", "a third"), strict=False)
        )


Role = str | Parts | Conflict | None
# The role of each axis (`rlx_jax.ir.roles`); None if it is unknown.
Roles = tuple[Role, ...]


class UnaryStep:
    """Base of steps over one program `of`: they keep its roles and name, are exact, and fill a new array.

    Every step has the members of this class and two more: `type`, the shape and dtype of the value, and `box`, which
    returns the program of a box of the value that reads no more than necessary. Call it through `select_box`, which
    handles the full box.
    """

    # Whether `split` returns views of a NumPy array, so that writing to the views fills the array.
    splits_to_views: ClassVar[bool] = False
    # Why values cannot be split into those of the parts, or joined from them; empty if they can.
    no_split: ClassVar[str] = ""
    no_join: ClassVar[str] = ""

    @property
    def lossy(self) -> bool:
        """Whether this step may lose bits of a float. (Loading checks integers against their range.)"""
        return False

    @property
    def parts(self: Any) -> tuple[Any, ...]:
        """The programs that this step combines, in order."""
        return (self.of,)

    def with_parts(self: Any, *parts: Any) -> Any:
        """Return the same step over other parts."""
        return replace(self, of=parts[0])

    def join(self, *values: Any) -> Any:
        """Return the value, given the values of the parts: NumPy or JAX arrays."""
        raise UnsupportedError(f"{self}: {self.no_join}")

    def split(self, value: Any) -> tuple[Any, ...]:
        """Return the value of each part, given the joined value: the inverse of `join`.

        Results keep the dtype of `value` and are views where possible.
        """
        if self.no_split:
            raise UnsupportedError(f"{self}: {self.no_split}")
        return (value,)

    def name(self, *names: str) -> str:
        """Return the name for messages, given the names of the parts."""
        return names[0]

    def roles(self, *parts: Roles) -> Roles:
        """Return the roles of the axes, given the roles of the parts."""
        return parts[0]


class LeafStep:
    """Base of steps that begin a program and so have no parts."""

    type: TensorType
    parts: ClassVar[tuple[Any, ...]] = ()
    lossy: ClassVar[bool] = False

    def with_parts(self, *parts: Any) -> Any:
        return self

    def split(self, value: Any) -> tuple[Any, ...]:
        return ()

    def roles(self, *parts: Roles) -> Roles:
        return (None,) * self.type.rank


class IndexStep(UnaryStep):
    """Base of steps that select `index` of `of`."""

    of: Any
    index: Any

    @property
    def type(self) -> TensorType:
        return TensorType(indexed_shape(self.of.type.shape, self.index), self.of.type.dtype)

    def __str__(self) -> str:
        return f"{self.of}{index_text(self.index)}"

    def join(self, *values: Any) -> Any:
        return values[0][self.index]

    def name(self, *names: str) -> str:
        return f"{names[0]}{index_text(self.index)}"


@dataclass(frozen=True)
class Key(LeafStep):
    """The checkpoint tensor under a key, unchanged."""

    key: str
    type: TensorType
    splits_to_views: ClassVar[bool] = True

    def __hash__(self) -> int:  # the generated one would hash the type too, and builds hash keys by the thousand
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    @property
    def source_key(self) -> Key:
        """The key itself, as `Sliced.source_key`."""
        return self

    @property
    def source_box(self) -> Box:
        """The box that this program selects of the checkpoint tensor: all of it."""
        return full_box(self.type.shape)

    def box(self, box: Box) -> Key | Sliced:
        part: Key | Sliced = self
        for axis, (edges, size) in enumerate(zip(box, self.type.shape, strict=True)):
            part = part if edges == (0, size) else Sliced(part, axis, *edges)
        return part

    def join(self, *values: Any) -> Any:
        return values[0]  # the value is the checkpoint tensor itself

    def name(self, *names: str) -> str:
        return self.key


@dataclass(frozen=True)
class Sliced(IndexStep):
    """`start` to `stop` along an axis of a checkpoint tensor or of another slice: one of several fused projections.

    Loading reads only this slice. Saving writes it as a part of its key.
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
    def source_key(self) -> Key:
        """The checkpoint key that contains the slice."""
        return self.of.source_key

    @property
    def source_box(self) -> Box:
        """The box that the slice selects of the checkpoint tensor."""
        outer = self.of.source_box
        axis_start = outer[self.axis][0]
        return (*outer[: self.axis], (axis_start + self.start, axis_start + self.stop), *outer[self.axis + 1 :])

    @property
    def index(self) -> Index:
        """The slice as an index of `of`."""
        return axis_index(self.axis, self.start, self.stop)

    def with_parts(self, *parts: Any) -> Any:
        (part,) = parts
        if isinstance(part, Key | Sliced):
            return super().with_parts(part)
        # Over any other step, the slice moves inward to the checkpoint tensors, so that loading reads only the slice.
        return slice_axis(part, self.axis, self.start, self.stop)

    def box(self, box: Box) -> Key | Sliced:
        return self.source_key.box(shift_box(box, [start for start, _ in self.source_box]))

    def roles(self, *parts: Roles) -> Roles:
        (of,) = parts
        role = of[self.axis]
        if not isinstance(role, Parts):  # a slice of "heads" is still "heads"
            return of
        return (*of[: self.axis], role.within(self.start, self.stop), *of[self.axis + 1 :])


@dataclass(frozen=True)
class BlockArray(UnaryStep):
    """One array of a packed tensor (codes, scales, …), copied from the blocks of bytes in which a file stores it.

    `of` has the type of the blocks, uint8 `[..., n · bytes]`.
    """

    of: Key | Sliced
    scheme: str
    array: str
    no_split: ClassVar[str] = "arrays are not made blocks again"

    @functools.cached_property
    def type(self) -> TensorType:  # loading reads it many times
        *rows, num_bytes = self.of.type.shape
        layout = BLOCKS[self.scheme]
        return SCHEMES[self.scheme].array_types((*rows, num_bytes // layout.bytes * layout.elements))[self.array]

    def __str__(self) -> str:
        return f"{self.array}({self.of})"

    def with_parts(self, *parts: Any) -> BlockArray:
        (part,) = parts
        return BlockArray(part, self.scheme, self.array)

    def box(self, box: Box) -> BlockArray:
        num_bytes = BLOCKS[self.scheme].bytes
        *row_box, edges = box
        per_block = self.type.shape[-1] * num_bytes // self.of.type.shape[-1]
        if any(edge % per_block for edge in edges):
            raise WeightShapeError(f"{self}: {edges} cuts a block of {per_block} entries")
        start, stop = (edge // per_block * num_bytes for edge in edges)
        return self.with_parts(self.of.box((*row_box, (start, stop))))

    def join(self, *values: Any) -> Any:
        return split_blocks(values[0], BLOCKS[self.scheme], self.array, self.type.dtype)


@dataclass(frozen=True)
class Dequantized(UnaryStep):
    """The values of a packed tensor, decoded and rounded to the floating dtype of `of`.

    `of` is the tensor as blocks of a model see it, or a slice of it, and `arrays` has the program of each array of the
    tensor, or of the slice. The step is lossy: saving writes the decoded values under the key, in the logical type, and
    does not pack them again.
    """

    of: Key | Sliced
    scheme: str
    arrays: tuple[tuple[str, BlockArray | Key | Sliced], ...]
    lossy: ClassVar[bool] = True
    no_split: ClassVar[str] = "decoded values are not packed again"
    no_join: ClassVar[str] = "the values are decoded from several arrays"

    def __post_init__(self) -> None:
        expected = scheme_of(self.scheme, f"dequantize({self.of})").array_types(self.type.shape)
        types_by_name = {name: program.type for name, program in self.arrays}
        if types_by_name != expected:
            texts = (", ".join(f"{name} {t}" for name, t in types.items()) for types in (expected, types_by_name))
            raise WeightShapeError("{}: expected the arrays {}, got {}".format(self, *texts))

    def __hash__(self) -> int:  # the arrays follow from the key
        return hash((self.of, self.scheme))

    @property
    def type(self) -> TensorType:
        return self.of.type

    def __str__(self) -> str:
        return f"dequantize({self.of}, {self.scheme})"

    def with_parts(self, *parts: Any) -> Dequantized:
        if parts != (self.of,):
            raise WeightShapeError(f"{self}: only this tensor can be decoded, got {parts[0]}")
        return self

    def box(self, box: Box) -> Dequantized | DecodedBox:
        """Return the program of a box: decode all groups that it touches, then cut off the values outside it."""
        scheme, shape = SCHEMES[self.scheme], self.type.shape
        stored_shape, stored_box = scheme.stored_axes(shape), list(scheme.stored_axes(box))
        columns = int(stored_shape[-1]) if scheme.ordered else scheme.elements
        for axis, unit in ((-1, columns), (-2, scheme.rows))[: len(shape)]:
            start, stop = stored_box[axis]
            stored_box[axis] = (start // unit * unit, min(-(-stop // unit) * unit, stored_shape[axis]))
        outer = scheme.stored_axes(stored_box)
        arrays = ((name, select_box(program, scheme.array_box(name, shape, outer))) for name, program in self.arrays)
        groups = Dequantized(self.of.box(outer), self.scheme, tuple(arrays))
        inner_box = shift_box(box, [-start for start, _ in outer])
        return groups if inner_box == full_box(groups.type.shape) else DecodedBox(groups, inner_box)

    def name(self, *names: str) -> str:
        return str(self.of)


@dataclass(frozen=True)
class Strided(IndexStep):
    """Every `step`-th row of a program along an axis, from `start` on: one of `step` interleaved projections.

    `start` is less than `step`, and `step` divides the axis. Saving interleaves all `step` projections into the key
    again, so it needs all of them.
    """

    of: Any
    axis: int
    start: int
    step: int
    no_split: ClassVar[str] = "it is one of the interleaved parts of a stored tensor; `pieces` joins the parts"

    def __post_init__(self) -> None:
        shape = self.of.type.shape
        is_valid = 0 <= self.axis < len(shape) and 0 <= self.start < self.step and shape[self.axis] % self.step == 0
        if not is_valid:
            raise WeightShapeError(f"{self}: {self.of.type} has no such part along axis {self.axis}")

    @property
    def index(self) -> Index:
        """The slice as an index of `of`."""
        return axis_index(self.axis, self.start, None, self.step)

    def box(self, box: Box) -> Strided:
        box_start, stop = box[self.axis]
        outer = (*box[: self.axis], (box_start * self.step, stop * self.step), *box[self.axis + 1 :])
        selected: Strided = self.with_parts(self.of if outer == full_box(self.of.type.shape) else self.of.box(outer))
        return selected


@dataclass(frozen=True)
class DecodedBox(IndexStep):
    """A box of decoded values that begins or ends inside a packed block, although only full blocks can be decoded.

    Only `box` creates this step, for loading. A parameter is never one, because it cannot be saved.
    """

    of: Dequantized
    bounds: Box
    no_split: ClassVar[str] = "the values outside of the box are unknown, so it cannot be written"

    @property
    def index(self) -> Index:
        """The slice as an index of `of`."""
        return box_index(self.bounds)

    def box(self, box: Box) -> DecodedBox:
        return DecodedBox(self.of, shift_box(box, [start for start, _ in self.bounds]))


def slice_axis(program: Any, axis: int, start: int, stop: int) -> Any:
    """Return `start` to `stop` of a program along an axis, as a program that a parameter may have.

    Saving it writes parts of the keys that `program` reads. For the full axis, return `program` itself.

    >>> from rlx_jax.ir.types import tensor_type
    >>> str(slice_axis(Key("q", tensor_type((8, 4), "bf16", "doc")), 1, 0, 2))
    'q[:, 0:2]'

    Raises:
        WeightShapeError: the range is outside the axis, cuts a packed block, or is a part of interleaved projections.
    """
    shape, description = program.type.shape, f"{program}: {start}:{stop} of {program.type} along axis {axis}"
    if not (0 <= axis < len(shape) and 0 <= start < stop <= shape[axis]):
        raise WeightShapeError(f"{description}: there is no such part")
    if (start, stop) == (0, shape[axis]):
        return program
    part = program.box(axis_box(shape, axis, start, stop))
    partial_block = next((step for step in steps(part) if isinstance(step, DecodedBox)), None)
    if partial_block is not None:
        size = SCHEMES[partial_block.of.scheme].elements
        raise WeightShapeError(f"{description} cuts a block of {size}; take multiples of {size}, or rows")
    strided_steps = [step for step in steps(part) if isinstance(step, Strided)]
    if any(isinstance(inner, Sliced) for step in strided_steps for inner in steps(step)):
        raise WeightShapeError(f"{description} is a part of one of several interleaved tensors; take all of it")
    return part


def select_box(program: Any, box: Box) -> Any:
    """Return the program of a box of the value of `program`, such as the shard of a parameter on one device.

    It computes the same values and reads nothing else, except that it reads packed tensors in full blocks. `box` must
    lie inside the shape.
    """
    return program if box == full_box(program.type.shape) else program.box(box)


def steps(program: Any) -> Iterator[Any]:
    """Return a program and all programs inside it, the outermost step first."""
    yield program
    for part in program.parts:
        yield from steps(part)
