"""Views of a weight source: what a view does not change it hands on to the source that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rlx_jax.ir.packed import WeightSpec
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.named import Closing, NamedTensors


def close(source: WeightSource) -> None:
    """Close the files that a source holds open, if it does."""
    if callable(method := getattr(source, "close", None)):
        method()


class SourceView(Closing):
    """The weights of `source`; a view overrides what it sees otherwise."""

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

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """As the source's, which knows the weight by its own name."""
        return self.source.read(key, index)

    def close(self) -> None:
        close(self.source)


class RenamedSource(NamedTensors[str], SourceView):
    """The weights of `source` that `names` lists: new key → key in `source`. The others are not seen."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        super().__init__(source)
        self._tensors, self._place = dict(names), "a part of a checkpoint"

    def where(self, key: str) -> str:
        return self.source.where(self.stored(key))

    def spec(self, key: str) -> WeightSpec:
        return self.source.spec(self.stored(key))

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        return self.source.read(self.stored(key), index)

    def stored(self, key: str) -> str:
        """The key of a weight in `source`."""
        return self._find(key)


class MarkedSource(SourceView):
    """The weights of `source`, and how they count. `lacking`: a checkpoint that may have less than its config asks for,
    and what it has not is to be drawn. `spare`: only beside a source that has none of them, as those of an adapter's
    files, which a checkpoint that was saved with the adapter has in numbers of its own."""

    def __init__(self, source: WeightSource, mark: Literal["lacking", "spare"]) -> None:
        super().__init__(source)
        self.mark = mark
