"""A part of a checkpoint under other names: the text model inside a larger one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx_jax.ir.packed import WeightSpec
from rlx_jax.ir.reading import WeightSource
from rlx_jax.weights.manifest import close
from rlx_jax.weights.safetensors import find


class RenamedSource:
    """The weights of `source` that `names` lists: new key → key in `source`. The others are not seen."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        self.source = source
        self._names = dict(names)

    def keys(self) -> tuple[str, ...]:
        return tuple(self._names)

    def has(self, key: str) -> bool:
        return isinstance(key, str) and key in self._names

    def where(self, key: str) -> str:
        return self.source.where(self._name(key))

    def spec(self, key: str) -> WeightSpec:
        return self.source.spec(self._name(key))

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """As the source's, which knows the weight by its own name."""
        return self.source.read(self._name(key), index)

    def close(self) -> None:
        """Close the files, if the source holds any open."""
        close(self.source)

    def stored(self, key: str) -> str:
        """The key of a weight in `source`."""
        return self._name(key)

    def _name(self, key: str) -> str:
        return find(self._names, key, "a part of a checkpoint")
