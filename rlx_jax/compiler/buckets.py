"""Sizes that requests are padded to, so that few programs serve all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DIMENSIONS = {"prompt": "seq", "batch": "batch", "context": "context"}
"""The dimension of a program that each list holds the sizes of."""


@dataclass(frozen=True)
class Buckets:
    """Sizes in rising order; an empty list allows every size. `on_recompile` is allow, warn or error; `programs` are
    the compiled programs that are kept, `spare` the slots of a ring beside its window. Over a mesh `share` is how many
    parts the rows are divided into.

    `prompt` counts tokens of a prompt, `batch` rows, `context` slots of a cache.
    """

    prompt: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    on_recompile: str = "allow"
    programs: int = 256
    spare: int = 0
    share: int = 1

    @classmethod
    def ordered(
        cls, prompt: Iterable[int], batch: Iterable[int], context: Iterable[int], on_recompile: str, **others: int
    ) -> Buckets:
        """Each list in order, without repetitions."""
        first, second, third = (tuple(sorted(set(sizes))) for sizes in (prompt, batch, context))
        return cls(first, second, third, on_recompile, **others)

    @property
    def largest_chunk(self) -> int | None:
        """The largest bucket for prompts that a cache holds; None without buckets."""
        return max((p for p in self.prompt if not self.context or p <= self.context[-1]), default=None)

    def rows(self, needed: int) -> int:
        """Rows of the program for so many: those of the list, else as many as devices have equal parts of."""
        return smallest(self.batch, needed) or -(-needed // self.share) * self.share

    def ring(self, window: int, context: int | None, spare: int = 0) -> int:
        """Slots of a ring of a layer that attends in a window, in a state of `context` slots, from which `spare` tokens
        may be taken back if that is more than the profile says."""
        return min(context or window, window + max(self.spare, spare))

    def foreign(self, binding: Mapping[str, int]) -> list[str]:
        """The lists that a program's sizes are not in. One token a row is a decoding step, whatever `prompt` says."""
        found = []
        for name, dim in DIMENSIONS.items():
            sizes, size = getattr(self, name), binding.get(dim)
            if sizes and size is not None and size not in sizes and not (dim == "seq" and size == 1):
                found.append(name)
        return found

    def text(self) -> str:
        """The lists, as a message shows them."""
        lists = ((name, getattr(self, name)) for name in DIMENSIONS)
        return ", ".join(f"buckets.{name} = {list(sizes)}" for name, sizes in lists if sizes)


def smallest(sizes: Iterable[int], needed: int) -> int | None:
    """The smallest of `sizes` that holds `needed`; None if none does."""
    return min((size for size in sizes if size >= needed), default=None)


def bucket(size: int, step: int, limit: int | None) -> int:
    """`size` rounded up so that few different sizes are compiled: to a power of two, from `step` on."""
    rounded = step
    while rounded < size:
        rounded *= 2
    return rounded if limit is None else max(size, min(rounded, limit))
