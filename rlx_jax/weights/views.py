"""The base classes of weight sources: `NamedTensors`, which finds tensors by key, and `SourceView`, a view of a source.

A view forwards every method that it does not override to its source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, Self, TypeGuard, TypeVar

import numpy as np

from rlx_jax.errors import MissingWeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.io.ggml import BlockArrays
from rlx_jax.ir.boxes import Box
from rlx_jax.ir.packed import PackedSpec, WeightSpec
from rlx_jax.ir.weight_reads import WeightSource, is_decoded, shapes_only

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


# What separates the key of a weight from the name of one of its arrays, in the keys of the arrays of packed weights.
PART = " / "
# Where a source may write what it reads.
Destination = HostArray | BlockArrays | None


def read_into(source: WeightSource, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
    """Return a weight or a part of it, in `out` if it fits and the source can read into it."""
    if not reads_into(source):
        return source.read(key, index)
    # A user's source expects an array, and may take other attributes from a source that it wraps.
    fits = not isinstance(out, BlockArrays) or getattr(type(source), "fills_blocks", False)
    return source.read_into(key, index, out if fits else None)


def reads_into(source: object) -> TypeGuard[ReadingSource]:
    """Whether a source can read into an array of the caller, as `ReadingSource` does."""
    return hasattr(source, "read_into")


def close(source: WeightSource) -> None:
    """Close a source that has a `close` method, and so may hold open files."""
    if callable(method := getattr(source, "close", None)):
        method()


class SourceView(Closeable):
    """The weights of `source`. Subclasses override the methods that differ, or `_at`."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def keys(self) -> tuple[str, ...]:
        return self.source.keys()

    def has(self, key: str) -> bool:
        return self.source.has(key)

    def _at(self, key: str) -> tuple[WeightSource, str]:
        """Return the source of a weight, and its key there."""
        return self.source, key

    def where(self, key: str) -> str:
        source, key = self._at(key)
        return source.where(key)

    def spec(self, key: str) -> WeightSpec:
        source, key = self._at(key)
        return source.spec(key)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return a weight or a part of it, read from the source."""
        source, key = self._at(key)
        return source.read(key, index)

    def is_decoded(self, key: str) -> bool:
        """Return whether `read` decodes a weight that is packed in its file."""
        return is_decoded(*self._at(key))

    def close(self) -> None:
        close(self.source)


class ReadingSource(Closeable):
    """A source that reads into arrays of the caller, so that nothing is copied. Subclasses define `read_into`."""

    fills_blocks: ClassVar[bool] = True
    """Whether `read_into` accepts `BlockArrays`."""

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        """Return what `read` returns: in `out`, if it has the shape and dtype and is contiguous, else in an array that
        nothing else refers to. If `out.filled` is true then, the result has no meaning."""
        raise NotImplementedError

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return a weight, or the part that `index` selects as in NumPy, in an array that nothing else refers to."""
        return self.read_into(key, index, None)


class ReadingView(ReadingSource, SourceView):
    """A view that reads into arrays of the caller, as its source can."""

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        return read_into(*self._at(key), index, out)


class RenamedSource(NamedTensors[str], ReadingView):
    """The weights of `source` that `names` lists, under new keys: new key → key in `source`. Others are hidden."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        super().__init__(source)
        self._tensors, self._label = dict(names), "a part of a checkpoint"

    def _at(self, key: str) -> tuple[WeightSource, str]:
        return self.source, self.stored(key)

    def stored(self, key: str) -> str:
        """Return the key in `source` of a weight. Arrays of packed weights have their keys in `source` already."""
        return key if isinstance(key, str) and PART in key else self._find(key)


class MarkedSource(ReadingView):
    """The weights of `source`, marked for how they combine with others.

    `incomplete`: the checkpoint may have fewer weights than its config requires; missing ones are initialized.
    `fallback`: the weights are only used if the other source does not have all of them. An example is the weights in an
    adapter's files: a checkpoint that was saved with the adapter has its own values for them.
    `replace`: as `fallback`, but where they are used they replace weights of the other source with the same keys.
    """

    def __init__(self, source: WeightSource, mark: Literal["incomplete", "fallback", "replace"]) -> None:
        super().__init__(source)
        self.mark = mark


def can_init_missing(source: Any) -> bool:
    """Whether missing weights are to be initialized: the source, or one that it wraps, is marked `incomplete`."""
    is_incomplete = isinstance(source, MarkedSource) and source.mark == "incomplete"
    return is_incomplete or (hasattr(source, "source") and can_init_missing(source.source))


def description(source: WeightSource) -> Hashable:
    """Return what the graph of a flow depends on: keys, types and packing of all weights, and what marks the source."""
    specs = [(key, source.spec(key)) for key in source.keys()]
    weights = tuple(
        (key, spec.shape, spec.dtype.name, spec.scheme, *(spec.arrays or {}).items())
        if isinstance(spec, PackedSpec)
        else (key, spec.shape, spec.dtype.name)
        for key, spec in specs
    )
    return weights, can_init_missing(source), shapes_only(source)
