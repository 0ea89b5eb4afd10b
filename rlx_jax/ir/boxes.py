"""Boxes, the rectangular parts of arrays, and indices of NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# (start, stop) for every axis.
Box = tuple[tuple[int, int], ...]
# An index of NumPy; it selects all of the axes after its last entry.
Index = tuple[slice, ...]


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full array."""
    return tuple((0, size) for size in shape)


def axis_box(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
    """Return the box from `start` to `stop` along one axis, and over all of the others."""
    return tuple((start, stop) if i == axis else (0, size) for i, size in enumerate(shape))


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def box_index(box: Box) -> Index:
    """Return a box as an index of NumPy."""
    return tuple(slice(start, stop) for start, stop in box)


def axis_index(axis: int, start: int, stop: int | None, step: int | None = None) -> Index:
    """Return the index `start:stop:step` along one axis, and all of the axes before it."""
    return (*(slice(None),) * axis, slice(start, stop, step))


def indexed_shape(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """Return the shape of the elements that an index selects from an array.

    >>> indexed_shape((2, 6, 4), axis_index(1, 1, None, 3))
    (2, 2, 4)
    """
    selected = (len(range(*part.indices(size))) for part, size in zip(index, shape, strict=False))
    return (*selected, *shape[len(index) :])


def index_text(index: Index) -> str:
    """Return an index as Python source text.

    >>> index_text(axis_index(1, 0, 2)), index_text(axis_index(2, 1, None, 3))
    ('[:, 0:2]', '[:, :, 1::3]')
    """
    edges = ((part.start, part.stop, part.step)[: 2 if part.step is None else 3] for part in index)
    return f"[{', '.join(':'.join('' if edge is None else str(edge) for edge in part) for part in edges)}]"


def shift_box(box: Box, offsets: Sequence[int]) -> Box:
    """Return a box shifted by `offsets` along each axis."""
    return tuple((start + offset, stop + offset) for (start, stop), offset in zip(box, offsets, strict=True))


def overlaps(box: Box, axis: int, lengths: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Return the arrays that a box overlaps, among arrays concatenated along `axis`.

    Args:
        box: a box of the concatenation.
        axis: the axis of the concatenation.
        lengths: the size of each array along it.

    Returns:
        The number of each such array, and the overlap as a box of that array.
    """
    offset, (start, stop) = 0, box[axis]
    for number, length in enumerate(lengths):
        overlap_start, overlap_stop = max(start, offset), min(stop, offset + length)
        if overlap_start < overlap_stop:
            yield number, (*box[:axis], (overlap_start - offset, overlap_stop - offset), *box[axis + 1 :])
        offset += length


def concat_axis(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """Return the axis along which `boxes` cover an array of `shape` exactly once; None if there is no such axis."""
    for axis, size in enumerate(shape):
        edges = sorted(box[axis] for box in boxes)
        contiguous = [start for start, _ in edges] + [size] == [0, *(stop for _, stop in edges)]
        if contiguous and all(box == axis_box(shape, axis, *box[axis]) for box in boxes):
            return axis
    return None
