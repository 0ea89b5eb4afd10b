"""The sizes that requests are padded to, so that few programs serve all requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from rlx_jax.dataclasses import dataclass

# The most tokens of a prompt that one program prefills in slots, or anywhere if the cache rounds.
MAX_CHUNK = 1024
# The dimension of a program that each list of `Buckets` has sizes for.
DIMENSIONS = {"prompt": "seq", "batch": "batch", "context": "context"}


@dataclass(frozen=True)
class SlotSizes:
    """The sizes of a context class of slots.

    Attributes:
        num_slots: rows of the state.
        fill_rows: rows of a fill.
        widths: widths of the prefill programs, ascending.
        cache_len: length of the cache.
        extends: whether all prefill programs are `extend`, from an empty state, as only prompts that are longer than
            the caches of other classes are prefilled here, in chunks of one width.
    """

    num_slots: int
    fill_rows: int
    widths: tuple[int, ...]
    cache_len: int
    extends: bool = False

    def chunk_widths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the widths of the programs that prefill a prompt: the smallest that fits, or chunks of the largest."""
        width = fit_bucket(self.widths, num_tokens)
        return (width,) if width is not None else (self.widths[-1],) * -(-num_tokens // self.widths[-1])


@dataclass(frozen=True)
class Buckets:
    """The sizes that requests are padded to. The lists are sorted; an empty list allows every size.

    Attributes:
        prompt: tokens of a prompt.
        batch: rows.
        context: slots of a cache.
        on_recompile: "allow", "warn" or "error".
        programs: the number of compiled programs that the cache retains.
        spare: slots of a ring buffer in addition to its window.
        row_multiple: the number of shards of the rows on a mesh; 1 without one.
        num_slots: the number of slots that warm-up covers.
        slots: their context classes.
        max_chunk: the most tokens of a chunk without buckets for prompts; None for no limit.
    """

    prompt: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    on_recompile: str = "allow"
    programs: int = 256
    spare: int = 0
    row_multiple: int = 1
    num_slots: int = 0
    slots: tuple[SlotSizes, ...] = ()
    max_chunk: int | None = None

    @cached_property
    def largest_chunk(self) -> int | None:
        """Return the largest bucket for prompts that fits the largest cache, or `max_chunk` if no bucket fits."""
        return max((p for p in self.prompt if not self.context or p <= self.context[-1]), default=self.max_chunk)

    def rows(self, needed: int) -> int:
        """Return the rows of the program for `needed` rows: a bucket that fits, else a multiple of `row_multiple`."""
        return fit_bucket(self.batch, needed) or -(-needed // self.row_multiple) * self.row_multiple

    def ring(self, window: int, context: int | None, spare: int = 0) -> int:
        """Return the slots of the ring buffer of a layer with an attention window.

        Args:
            window: the number of keys that the layer attends to.
            context: the slots of the state; None if it has none.
            spare: the tokens that may be rolled back; the profile's `buckets.spare` applies if it is more.
        """
        return min(context or window, window + max(self.spare, spare))

    def size_violations(self, binding: Mapping[str, int]) -> list[str]:
        """Return the names of the lists that do not contain the sizes of a program.

        One token per row is always allowed, as a decoding step, whatever is in `prompt`.
        """
        violated = []
        for name, dim in DIMENSIONS.items():
            sizes, size = getattr(self, name), binding.get(dim)
            if sizes and size is not None and size not in sizes and not (dim == "seq" and size == 1):
                violated.append(name)
        return violated

    def text(self) -> str:
        """Return the lists that are not empty, as text for a message."""
        lists = ((name, getattr(self, name)) for name in DIMENSIONS)
        return ", ".join(f"buckets.{name} = {list(sizes)}" for name, sizes in lists if sizes)


def fit_bucket(sizes: Iterable[int], needed: int) -> int | None:
    """Return the smallest of `sizes` that is at least `needed`; None if there is none."""
    return min((size for size in sizes if size >= needed), default=None)


def bucket_size(size: int, step: int, limit: int | None) -> int:
    """Return a size rounded up to `step` times a power of two, so that few different sizes are compiled.

    The result is at most `limit`, unless `size` itself is larger.
    """
    padded = step
    while padded < size:
        padded *= 2
    return padded if limit is None else max(size, min(padded, limit))
