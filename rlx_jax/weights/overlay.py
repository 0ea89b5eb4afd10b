"""`OverlaySource`: combine two sources, the weights of a checkpoint and weights that a flow adds to them."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from rlx_jax.errors import WeightError, listing
from rlx_jax.ir.weight_reads import WeightSource, shapes_only
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.views import MarkedSource, ReadingView, RenamedSource, close


class OverlaySource(ReadingView):
    """The union of the weights of `source` and `extra`.

    Raises:
        WeightError: a key is in both.
    """

    def __init__(self, source: WeightSource, extra: WeightSource) -> None:
        super().__init__(source)
        self.extra = extra
        if clashes := [key for key in extra.keys() if source.has(key)]:
            raise WeightError(
                f"added weights have keys that the checkpoint already has: {listing(clashes)}; a checkpoint that "
                "was saved with them needs the recipe without them (no adapter=, no add_weights)"
            )

    @property
    def shapes_only(self) -> bool:
        """Whether neither source has values."""
        return shapes_only(self.source) and shapes_only(self.extra)

    def keys(self) -> tuple[str, ...]:
        return (*self.source.keys(), *self.extra.keys())

    def has(self, key: str) -> bool:
        return self.source.has(key) or self.extra.has(key)

    def close(self) -> None:
        super().close()
        close(self.extra)

    def _at(self, key: str) -> tuple[WeightSource, str]:
        """Return the source that has the key; `source` if neither does, which then raises the error."""
        return self.extra if self.extra.has(key) else self.source, key


def combine_sources(source: WeightSource | None, extra: WeightSource | None) -> WeightSource | None:
    """Return the union of two sources, either of which may be None; `source` itself if it contains `extra` already."""
    if source is None or extra is None or source is extra:
        return extra if source is None else source
    if _contains(source, extra):
        return source
    if isinstance(extra, OverlaySource):
        return combine_sources(combine_sources(source, extra.source), extra.extra)
    mark = extra.mark if isinstance(extra, MarkedSource) else ""
    if mark in ("fallback", "replace") and all(map(source.has, extra.keys())):
        return source
    if mark == "replace":
        source = RenamedSource(source, {key: key for key in source.keys() if not extra.has(key)})
    return OverlaySource(source, extra)


def _contains(source: WeightSource, extra: WeightSource) -> bool:
    """Whether `extra` is already a part of a source."""
    parts: tuple[WeightSource, ...] = (source.source, source.extra) if isinstance(source, OverlaySource) else ()
    parts = (source.source,) if isinstance(source, RenamedSource) else parts
    return source is extra or any(_contains(part, extra) for part in parts)


def has_values(source: WeightSource | None, key: str) -> bool:
    """Whether a source has the values of a weight, and not only its shape."""
    if isinstance(source, OverlaySource):
        return has_values(source.source, key) or has_values(source.extra, key)
    if isinstance(source, MappingSource):
        return source.has_values(key)
    return source is not None and not shapes_only(source) and source.has(key)


def with_initialized(source: WeightSource | None, initialized: Mapping[str, jax.Array]) -> WeightSource:
    """Return the weights of a source, with those in `initialized` (newly initialized) added or replaced."""
    if source is None:
        return MappingSource(initialized)
    other_keys = {key: key for key in source.keys() if key not in initialized}
    return OverlaySource(RenamedSource(source, other_keys), MappingSource(initialized))
