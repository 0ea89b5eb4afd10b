"""Boxes of arrays: what a device holds of a tensor that lies on several.

A box has the first and the last but one place along every axis. Where steps move elements about, these functions say
where a box of their value comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
