"""`SourceView`: views of a weight source, which forward every method that they do not override to the source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeGuard

from rlx_jax.ir.ggml import BlockArrays
from rlx_jax.ir.packed import WeightSpec
from rlx_jax.ir.weight_reads import WeightSource, is_decoded
from rlx_jax.weights.named import Closeable, NamedTensors
from rlx_jax.weights.named import HostArray as HostArray

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
    """The weights of `source`. Subclasses override the methods that differ."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def keys(self) -> tuple[str, ...]:
        return self.source.keys()

    def has(self, key: str) -> bool:
        return self.source.has(key)

    def where(self, key: str) -> str:
        return self.source.where(key)

    def spec(self, key: str) -> WeightSpec:
        return self.source.spec(key)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return a weight or a part of it, read from the source."""
        return self.source.read(key, index)

    def is_decoded(self, key: str) -> bool:
        """Return whether `read` decodes a weight that is packed in its file."""
        return is_decoded(self.source, key)

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
        return read_into(self.source, key, index, out)


class RenamedSource(NamedTensors[str], ReadingView):
    """The weights of `source` that `names` lists, under new keys: new key → key in `source`. Others are hidden."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        super().__init__(source)
        self._tensors, self._label = dict(names), "a part of a checkpoint"

    def where(self, key: str) -> str:
        return self.source.where(self.stored(key))

    def spec(self, key: str) -> WeightSpec:
        return self.source.spec(self.stored(key))

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        return read_into(self.source, self.stored(key), index, out)

    def is_decoded(self, key: str) -> bool:
        return is_decoded(self.source, self.stored(key))

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
