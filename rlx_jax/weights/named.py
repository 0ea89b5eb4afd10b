"""`NamedTensors`, the base class of weight sources, and checks of keys and indices with their errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Self, TypeVar

import numpy as np

from rlx_jax.errors import MissingWeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.ir.boxes import Box

T = TypeVar("T")
HostArray = np.ndarray[Any, Any]


class Closeable:
    """A context manager that calls `close` at the end."""

    def close(self) -> None:
        """Close the files, if any are open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NamedTensors(Generic[T]):
    """A source with one entry of `_tensors` for each key, in the order of the data. `_label` names it in messages."""

    _tensors: Mapping[str, T]
    _label: str

    def keys(self) -> tuple[str, ...]:
        """Return the keys, in the order of the data."""
        return tuple(self._tensors)

    def has(self, key: str) -> bool:
        """Return whether there is a tensor under `key`."""
        return isinstance(key, str) and key in self._tensors

    def _find(self, key: str) -> T:
        """Return the entry under `key`, or raise `MissingWeightError`."""
        return find_tensor(self._tensors, key, self._label)


def find_tensor(tensors: Mapping[str, T], key: object, label: str) -> T:
    """Return the entry of `tensors` under `key`. `label` names `tensors` in messages.

    Raises:
        MissingWeightError: there is none; the message suggests similar keys.
    """
    if not isinstance(key, str):
        raise MissingWeightError(f"the key of a weight is a string, got {shown(key)} for {label} of {len(tensors)}")
    if key not in tensors:
        count = len(tensors)
        has_rolled_keys = any("{" in name for name in tensors)
        hint = "; for parameters of rolled layers, model.weights(params) returns them by key" if has_rolled_keys else ""
        raise MissingWeightError(
            f"no weight {quote(key)} in {label} of {count} weight{'s' * (count != 1)}{suggest_key(key, tensors)}{hint}"
        )
    return tensors[key]


def suggest_key(name: str, keys: Iterable[str]) -> str:
    """Return a suggestion for a misspelled name, or an empty string.

    Only likely names are compared: to compare 200,000 would take minutes.
    """
    candidates = list(keys)
    prefixed = [k for k in candidates if k.endswith(f".{name}") or name.endswith(f".{k}")]
    if prefixed:  # usually all keys have the prefix or none has: one example shows which
        return f"; did you mean {quote(prefixed[0])}?"
    last_part = name.rpartition(".")[2]
    likely = [k for k in candidates if k.rpartition(".")[2] == last_part or abs(len(k) - len(name)) < 3]
    return did_you_mean(name, likely[:1000])


def check_index(index: tuple[slice, ...] | None, shape: tuple[int, ...], name: str) -> tuple[slice, ...]:
    """Return `index` as a tuple of slices, after checking that it fits `shape`; trailing axes may be left out.

    Raises:
        WeightShapeError: more slices than axes, or an entry that is not a slice of whole numbers.
    """
    slices = () if index is None else index
    if not isinstance(slices, tuple) or len(slices) > len(shape):
        raise WeightShapeError(
            f"{quote(name)}: expected at most {len(shape)} slices for shape {shape}, got {quote(index)}"
        )
    for part, dim in zip(slices, shape, strict=False):
        try:
            slice.indices(part, dim)
        except (TypeError, ValueError) as cause:
            raise WeightShapeError(f"{quote(name)}: {quote(part)} is not a slice of {dim} rows") from cause
    return slices


def index_box(index: tuple[slice, ...] | None, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[slice, ...]]:
    """Return the box that contains all that `index` selects, and the index that selects it in the box.

    Raises:
        WeightShapeError: as `check_index`.
    """
    slices = (*check_index(index, shape, name), *(slice(None),) * len(shape))[: len(shape)]
    spans = [row_span(part, dim) for part, dim in zip(slices, shape, strict=True)]
    return tuple((start, start + count) for start, count, _ in spans), tuple(rest for _, _, rest in spans)


def row_span(part: slice, dim: int) -> tuple[int, int, slice]:
    """Return the contiguous range of rows that contains all of `part`, and the slice that selects `part` in it.

    The result is the first row, the number of rows, and the slice.

    >>> row_span(slice(8, 2, -3), 10)
    (5, 4, slice(None, None, -3))
    """
    rows = range(dim)[part]
    if not rows:
        return 0, 0, slice(None)
    first_row = min(rows[0], rows[-1])
    return first_row, abs(rows[-1] - rows[0]) + 1, slice(None, None, rows.step)
