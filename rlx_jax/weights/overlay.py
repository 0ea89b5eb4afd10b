"""`OverlaySource`: combine two sources, the weights of a checkpoint and weights that a flow adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import WeightError, listing
from rlx_jax.ir.packed import WeightSpec
from rlx_jax.ir.weight_reads import WeightSource, shapes_only
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.views import MarkedSource, RenamedSource, SourceView, close


class OverlaySource(SourceView):
    """The union of the weights of `source` and `more`.

    Raises:
        WeightError: a key is in both.
    """

    def __init__(self, source: WeightSource, more: WeightSource) -> None:
        super().__init__(source)
        self.more = more
        if clashes := [key for key in more.keys() if source.has(key)]:
            raise WeightError(
                f"weights that are added have keys that the others have already: {listing(clashes)}; a checkpoint that "
                "was saved with them needs the recipe without (no adapter=, no add_weights)"
            )

    @property
    def shapes_only(self) -> bool:
        """Whether neither source has values."""
        return shapes_only(self.source) and shapes_only(self.more)

    def keys(self) -> tuple[str, ...]:
        return (*self.source.keys(), *self.more.keys())

    def has(self, key: str) -> bool:
        return self.source.has(key) or self.more.has(key)

    def where(self, key: str) -> str:
        return self._of(key).where(key)

    def spec(self, key: str) -> WeightSpec:
        return self._of(key).spec(key)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        return self._of(key).read(key, index)

    def close(self) -> None:
        super().close()
        close(self.more)

    def _of(self, key: str) -> WeightSource:
        """Return the source that has the key; `source` if neither does, which then raises the error."""
        return self.more if self.more.has(key) else self.source


def may_lack(source: Any) -> bool:
    """Whether missing weights are to be initialized: the source, or one that it wraps, is marked `lacking`."""
    is_lacking = isinstance(source, MarkedSource) and source.mark == "lacking"
    return is_lacking or (hasattr(source, "source") and may_lack(source.source))


def beside(source: WeightSource | None, more: WeightSource | None) -> WeightSource | None:
    """Return the union of two sources, either of which may be None; `source` itself if it contains `more` already."""
    if source is None or more is None or source is more:
        return more if source is None else source
    if _holds(source, more):
        return source
    if isinstance(more, OverlaySource):
        return beside(beside(source, more.source), more.more)
    is_spare = isinstance(more, MarkedSource) and more.mark == "spare" and all(map(source.has, more.keys()))
    return source if is_spare else OverlaySource(source, more)


def _holds(source: WeightSource, more: WeightSource) -> bool:
    """Whether `more` is already a part of a source."""
    parts: tuple[WeightSource, ...] = (source.source, source.more) if isinstance(source, OverlaySource) else ()
    parts = (source.source,) if isinstance(source, RenamedSource) else parts
    return source is more or any(_holds(part, more) for part in parts)


def has_numbers(source: WeightSource | None, key: str) -> bool:
    """Whether a source has the values of a weight, and not only its shape."""
    if isinstance(source, OverlaySource):
        return has_numbers(source.source, key) or has_numbers(source.more, key)
    if isinstance(source, MappingSource):
        return source.has_numbers(key)
    return source is not None and not shapes_only(source) and source.has(key)


def with_drawn(source: WeightSource | None, drawn: Mapping[str, jax.Array]) -> WeightSource:
    """Return the weights of a source, with those in `drawn` (newly initialized) added or replaced."""
    if source is None:
        return MappingSource(drawn)
    other_keys = {key: key for key in source.keys() if key not in drawn}
    return OverlaySource(RenamedSource(source, other_keys), MappingSource(drawn))
