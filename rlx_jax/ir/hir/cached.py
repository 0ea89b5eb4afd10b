"""Attention over keys and values that an earlier call left: by `derive` and the decode stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.hir.sequence import Attention
from rlx_jax.ir.ops.attention import CacheUpdate, RingStep
from rlx_jax.ir.ops.index import Iota
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, in_dtype
from rlx_jax.ir.ops.reduce import Cumsum
from rlx_jax.ir.ops.shape import Concat, Reshape, merge_axes, split_axis
from rlx_jax.ir.traits import BLOCK
from rlx_jax.ir.types import DimLike, TensorType, symbol

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
Masks = tuple[Value, ...]


def cache_slots(window: int | None) -> DimLike:
    """The dimension that counts the slots of a cache: `context`, or that of a ring for a window."""
    return symbol("context" if window is None else f"context_{window}")


@dataclass(frozen=True)
class CachedAttention(Hir):
    """Attention over a cache that this call extends (written by `derive`, never by a stage).

    Operands: q `[B,S,N·D]`, k and v `[B,S,K·D]`, the key and value caches `[B,T,K,D]`, start `[B]`
    (tokens already in the cache) and lengths `[B]` (new valid tokens); where the attention has a keep mask that of the
    new keys `[B,S]` and that of the cache `[B,T]`, both bool; then its sinks, and what its `bias_of` reads. The key and
    value caches may have a dtype of their own.
    Results: the context, and the caches with the new rows written at `start`, that of the mask last.
    With `block_only` the cache is empty before the call, so attention stays inside the block.
    With `ring` the cache holds the last T tokens only, T at least the window (see `RingStep`).
    Where `attend.last`, q is `[B,1,N·D]`, the query of each row's last valid token.
    """

    traits = BLOCK

    attend: Attention
    block_only: bool = False
    ring: bool = False

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        return self.grouped(b, self.attend.heads // self.attend.kv_heads, *operands)

    def grouped(self, b: Builder, times: int, *operands: Value) -> tuple[Value, ...]:
        """The block with keys and values repeated `times` times before attention."""
        q, k, v, cache_k, cache_v, start, lengths, *more = operands
        masks, read = more[: 2 * len(self.attend.extra)], more[2 * len(self.attend.extra) :]
        kv_heads = self.attend.kv_heads
        split = split_axis(3, 2, (kv_heads, -1))
        new_k, new_v = (in_dtype(b, b(split, x), b.type(cache_k).dtype) for x in (k, v))
        at: dict[str, Value] = {}
        if self.ring:
            step = RingStep(self.attend.window)
            keys, slots, cache_k = b.add(step, cache_k, new_k, start, lengths)
            values, _, cache_v = b.add(step, cache_v, new_v, start, lengths)
            at = {"key_positions": slots}
        else:
            update = CacheUpdate(fresh=self.block_only)
            keys = cache_k = b(update, cache_k, new_k, start, lengths)
            values = cache_v = b(update, cache_v, new_v, start, lengths)
        if self.block_only:
            at = {}
        else:
            k, v = (in_dtype(b, b(merge_axes(4, 2), x), b.type(q).dtype) for x in (keys, values))
        if self.attend.last or not self.block_only:
            at = {"positions": self._positions(b, q, start, lengths), **at}
        keep, caches = self._kept(b, start, lengths, *masks) if masks else ((), ())
        return self.attend.over(b, times, q, k, v, *keep, *read, at=at), cache_k, cache_v, *caches

    def _kept(self, b: Builder, start: Value, lengths: Value, new: Value, cache: Value) -> tuple[Masks, Masks]:
        """The mask over the keys that are read, and its cache after the call."""
        if self.ring:
            keep, _, cache = b.add(RingStep(self.attend.window), cache, new, start, lengths)
        else:
            keep = cache = b(CacheUpdate(fresh=self.block_only), cache, new, start, lengths)
        return (new if self.block_only else keep,), (cache,)

    def _positions(self, b: Builder, q: Value, start: Value, lengths: Value) -> Value:
        """Where the queries stand among the keys, `[B,S]`. That of a row without new tokens reads something all the
        same."""
        if not self.attend.last:
            return b(Binary("add"), b(Reshape((-1, 1)), start), b(Reshape((1, -1)), b(Iota(1), q)))
        one = b.scalar(1, lengths)
        behind = b(Binary("sub"), b(Binary("max"), lengths, one), one)
        return b(Reshape((-1, 1)), behind if self.block_only else b(Binary("add"), start, behind))

    def text(self) -> str:
        notes = [", block_only"] * self.block_only + [", ring"] * self.ring
        return f"cached_{self.attend.text()}{''.join(notes)}"


@dataclass(frozen=True)
class GrowingAttention(Hir):
    """Attention behind cached keys and values that grow by concatenation (written by `derive` and by SelfAttnDecode).

    Operands: q `[B,S,N·D]`, k and v `[B,S,K·D]`, the cached keys and values `[B,P,K·D]`, whose dtype may be one of its
    own, and with `keep` a mask `[B,P+S]` over both: 1 keeps a key, less than ½ drops it, and causality holds besides;
    then the attention's sinks, and what its `bias_of` reads, for which a key's position is its place among those that
    are kept.
    Results: the context, and the longer keys and values `[B,P+S,K·D]`. Query i of S reads the keys up to P + i, or the
    last w of those in a window, in which keys that the mask drops take no place.
    """

    traits = BLOCK

    attend: Attention
    keep: bool = False

    def check(self, *operands: TensorType) -> None:
        if self.attend.bias_of is None:
            check_arity("growing_attention", len(operands), 5 + self.keep + self.attend.sinks)
        if self.attend.extra:
            raise GraphError(f"growing_attention: its attention reads {', '.join(self.attend.extra)}; expected no mask")

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        q, k, v, *past = operands[:5]
        grown = [b(Concat(1), old, in_dtype(b, new, b.type(old).dtype)) for old, new in zip(past, (k, v), strict=True)]
        extra, rows = self._kept(b, *operands[5 : 5 + self.keep])
        keys, values = (in_dtype(b, x, b.type(q).dtype) for x in grown)
        return b(replace(self.attend, extra=extra), q, keys, values, *rows, *operands[5 + self.keep :]), *grown

    def _kept(self, b: Builder, *keep: Value) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        """The mask, and where distances have a say the position of each key among those that it keeps."""
        if not keep or self.attend.window is None and self.attend.bias_of is None:
            return ("keep",) * len(keep), keep
        wide = b(CastTo(F32), *keep)
        kept = b(CastTo(I32), b(Compare("ge"), wide, b.scalar(0.5, wide)))
        count = b(Cumsum(1), kept)
        return ("keep", "key_positions"), (*keep, b(Binary("sub"), count, b.scalar(1, count)))

    def text(self) -> str:
        return f"growing_{self.attend.text()}{', keep' * self.keep}"
