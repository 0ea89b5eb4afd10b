"""Boxes of arrays: what a device holds of a tensor that lies on several.

A box has the first and the last but one place along every axis. Where steps move elements about, these functions say
where a box of their value comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""(start, stop) for every axis."""
Index = tuple[slice, ...]
"""What NumPy takes between brackets; of axes behind it all."""


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


# -- reshapes ----------------------------------------------------------------------------------


def before_reshape(inner: Sequence[int], outer: Sequence[int], box: Box) -> tuple[Box, Box]:
    """Where a box of an array comes from that is `inner` reshaped to `outer`.

    The first result is a box of `inner`, the second the box of `outer` that its elements make. That one holds `box`,
    and is larger where elements of `box` do not stand together: axes are taken apart in groups of one product, and of
    each group whole rows are taken.

    >>> before_reshape((6, 4), (3, 2, 4), ((1, 2), (0, 2), (0, 4)))  # the heads of a projection
    (((2, 4), (0, 4)), ((1, 2), (0, 2), (0, 4)))
    >>> before_reshape((6, 4), (3, 2, 4), ((0, 3), (0, 1), (0, 4)))  # every other row
    (((0, 6), (0, 4)), ((0, 3), (0, 2), (0, 4)))
    """
    source, covers = list(full(inner)), list(full(outer))
    if 0 in outer:
        return tuple(source), tuple(covers)
    for from_axes, to_axes in _groups(inner, outer):
        wide = [axis for axis in to_axes if outer[axis] > 1]
        rows = [axis for axis in from_axes if inner[axis] > 1]
        if not wide or all(box[axis] == (0, outer[axis]) for axis in wide):
            continue
        # Elements to a row, of the first axis of either side; both sides are cut where rows of both begin.
        to_row = math.prod(outer[axis] for axis in wide[1:])
        from_row = math.prod(inner[axis] for axis in rows[1:])
        step = from_row // math.gcd(from_row, to_row)
        start, stop = box[wide[0]]
        start, stop = start // step * step, -(-stop // step) * step
        covers[wide[0]] = (start, stop)
        source[rows[0]] = (start * to_row // from_row, stop * to_row // from_row)
    return tuple(source), tuple(covers)


def _groups(inner: Sequence[int], outer: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The axes of two shapes of one size in the smallest groups of the same product."""
    i = j = 0
    while i < len(inner) or j < len(outer):
        first_i, first_j = i, j
        i, j = min(i + 1, len(inner)), min(j + 1, len(outer))
        while (left := math.prod(inner[first_i:i])) != (right := math.prod(outer[first_j:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield range(first_i, i), range(first_j, j)
