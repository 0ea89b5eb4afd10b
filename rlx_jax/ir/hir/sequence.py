"""Blocks that know the sequence: positions, rotations, attention, over a cache too; the first, last and end token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Graph, Hir, Value, constant
from rlx_jax.ir.hir.masks import MaskKind, check_arity
from rlx_jax.ir.ops.attention import (
    AttentionOp,
    CacheUpdate,
    RingStep,
    RopeOp,
    RopeTable,
    SinusoidTable,
    check_heads,
    check_scores,
)
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.index import Gather, Iota, RelativeBuckets, TakeRow
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Where, in_dtype
from rlx_jax.ir.ops.reduce import Cumsum, Reduce
from rlx_jax.ir.ops.shape import (
    AxisOf,
    Bound,
    Concat,
    CutAxis,
    Narrow,
    RepeatHeads,
    Reshape,
    SizeOf,
    Slice,
    Transpose,
    merge_axes,
    split_axis,
)
from rlx_jax.ir.traits import BLOCK, TABLES, Initial
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class Positions(Hir):
    """The absolute position of each token of `x` `[B, S, …]`: int32 `[1, S]`, 0 … S−1 in the forward program."""

    traits = TABLES
    operands = "x"

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Reshape((1, -1)), b(Iota(1), *operands))


@dataclass(frozen=True)
class RopeAngles(Hir):
    """cos and sin for positions `[B|1, S]`, or with `axes` `[B|1, S, A]`: two f32 `[B|1, S, R/2]`. See `RopeTable`."""

    traits = TABLES

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    axes: tuple[int, ...] = ()

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        return b.add(RopeTable(self.inv_freq, self.factor, self.axes), *operands)

    def text(self) -> str:
        return f"rope_angles(n_rot={2 * len(self.inv_freq)}{f', axes={1 + max(self.axes)}' if self.axes else ''})"


@dataclass(frozen=True)
class RopeRows(Hir):
    """Rows of given f32 tables `[T, W]` at positions `[B|1, S]`: cos and sin `[B|1, S, W]`."""

    traits = TABLES

    width: int
    cos: bytes
    sin: bytes

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        tables = (np.frombuffer(data, np.float32).reshape(-1, self.width) for data in (self.cos, self.sin))
        cos, sin = (b(Gather(), b.leaf(constant(table, np.float32)), *operands) for table in tables)
        return cos, sin

    @property
    def rows(self) -> int:
        """Positions the tables know."""
        return len(self.cos) // (4 * self.width)

    def text(self) -> str:
        return f"rope_rows({self.rows} positions, width={self.width})"


@dataclass(frozen=True)
class Sinusoids(Hir):
    """Cosines and sines of times `[B]`: f32 `[B, channels]`, whatever the program computes in. See `SinusoidTable`."""

    traits = TABLES

    channels: int
    scale: float = 1.0
    max_period: float = 10000.0

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(SinusoidTable(self.channels, self.scale, self.max_period), *operands)

    def text(self) -> str:
        return f"sinusoids({self.channels}, scale={self.scale:g})"


@dataclass(frozen=True)
class Rope(Hir):
    """Rotary embedding of packed heads. x `[B,S,N·D]`, cos and sin `[B|1,S,R/2]`; `style` half or interleaved.
    See `RopeOp`."""

    traits = TABLES
    operands = "x cos sin"

    head_dim: int
    n_rot: int
    style: str = "half"

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RopeOp(self.head_dim, self.n_rot, self.style), *operands)


@dataclass(frozen=True)
class Attention(Hir):
    """Attention over packed heads: q `[B,S,N·D]`, k `[B,T,K·D]`, v `[B,T,K·E]`, then `keep` and `bias` as in `extra`,
    then with `sinks` those `[N]`, then what `bias_of` reads. See `AttentionOp`.

    `expand` repeats each key/value head N/K times; the `direct` rule groups the queries instead.
    With `last` q is `[B,1,N·D]`, the query of the last token, whose row alone is wanted (written by `derive`).
    `by_distance` says that the bias is one number for each head and distance of a query and a key. `bias_of` is a bias
    by the positions of a query and a key, and holds in every program (see `PairBias`).
    """

    traits = BLOCK

    heads: int
    kv_heads: int
    causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    extra: tuple[str, ...] = ()
    last: bool = False
    ahead: int = 0
    by_distance: bool = False
    bias_of: Graph | None = None
    sinks: bool = False

    def packed(self, place: int | None) -> int | None:
        return {None: self.heads, 0: self.heads, 1: self.kv_heads, 2: self.kv_heads}.get(place)

    def check(self, *operands: TensorType) -> None:
        if self.bias_of is None:
            check_arity("attention", len(operands), 3 + len(self.extra) + self.sinks)
        check_heads(self.heads, self.kv_heads)
        check_scores(self.scale, self.softcap)

    def op(self, kv_heads: int) -> AttentionOp:
        """The MIR op over `kv_heads` heads."""
        return AttentionOp(
            self.heads, kv_heads, self.causal, self.window, self.scale, self.softcap, self.extra, ahead=self.ahead
        )

    def expand(self, b: Builder, *operands: Value) -> Value:
        return self.over(b, self.heads // self.kv_heads, *operands)

    def over(
        self, b: Builder, times: int, q: Value, k: Value, v: Value, *given: Value, at: Mapping[str, Value] | None = None
    ) -> Value:
        """The block with keys and values repeated `times` times, and operands of `AttentionOp` that say where queries
        and keys stand."""
        at = at or {}
        own, read = dict(zip(self.extra, given, strict=False)), given[len(self.extra) :]
        if self.bias_of is not None:
            rows, slots = self._places(b, q, k, {**own, **at})
            own["bias"] = b(PairBias(self.bias_of), rows, slots, *read[self.sinks :])
        if self.sinks:
            own["sinks"] = read[0]
        if times > 1:
            k, v = (b(RepeatHeads(self.kv_heads, times), x) for x in (k, v))
        op = self.op(self.kv_heads * times)
        return b(replace(op, extra=(*own, *at)), q, k, v, *own.values(), *at.values())

    def initial(self, place: int, weight: TensorType) -> Initial:
        """Sinks start at 0."""
        return 0.0 if self.sinks and place == 3 + len(self.extra) else super().initial(place, weight)

    def _places(self, b: Builder, q: Value, k: Value, at: Mapping[str, Value]) -> tuple[Value, Value]:
        """Positions of queries `[B|1, S]`, by default the last of the keys', and of keys `[B|1, T]`, from 0 on."""
        slots = at.get("key_positions") or b(Reshape((1, -1)), b(Iota(1), k))
        rows = at.get("positions") or b(CutAxis(1, Bound((SizeOf(1, 1),), from_end=True)), slots, q)
        return rows, slots

    def text(self) -> str:
        return replace(self, bias_of=None).text()[:-1] + ", bias by positions)" if self.bias_of else super().text()


def attention(
    heads: int,
    kv_heads: int,
    mask: MaskKind,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Attention:
    """`Attention` for a mask kind."""
    extra = (mask.operand,) if mask.operand else ()
    return Attention(heads, kv_heads, mask.causal, mask.window, scale, softcap, extra, sinks=sinks)


@dataclass(frozen=True)
class LastToken(Hir):
    """The last token of each row: x `[B,S,…]` → `[B,1,…]`; with an index operand `[B]`, row `index[b]`."""

    traits = BLOCK
    ids = (1, 0, 1)

    def expand(self, b: Builder, *operands: Value) -> Value:
        if len(operands) == 2:
            return b(TakeRow(), *operands)
        return b(Narrow(1, -1, 1), operands[0])


@dataclass(frozen=True)
class FirstToken(Hir):
    """The first token, position axis dropped: x `[B,S,H]` → `[B,H]`."""

    traits = BLOCK

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Slice(((None, None, None), 0)), operands[0])


@dataclass(frozen=True)
class EndToken(Hir):
    """The token at the end of each text, position axis dropped: x `[B,S,H]`, ids `[B,S]` → `[B,H]`.

    It stands at the first place that holds `end_id`, with None at the first of the row's largest id; without any, at
    the beginning. CLIP (Radford et al. 2021).
    """

    traits = BLOCK
    operands = "x[B,S,H] ids:int[B,S]"

    end_id: int | None

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, ids = operands
        end = b(Reduce("max", (1,), keepdims=True), ids) if self.end_id is None else b.scalar(self.end_id, ids)
        places = b(Reshape((1, -1)), b(Iota(1), ids))
        behind = b.scalar(np.iinfo(np.int32).max, places)
        found = b(Reduce("min", (1,)), b(Where(), b(Compare("eq"), ids, end), places, behind))
        at = b(Where(), b(Compare("eq"), found, behind), b.scalar(0, found), found)
        return b(Slice(((None, None, None), 0)), b(TakeRow(), x, at))


@dataclass(frozen=True)
class CountedPositions(Hir):
    """Positions counted over the ids `[B, S]` that are not `padding`, from `padding` + 1 on: int32 `[B, S]`.

    Padding itself stands at `padding` (RoBERTa, Liu et al. 2019, after fairseq).
    """

    traits = TABLES
    operands = "ids:int[B,S]"

    padding: int

    def check(self, *operands: TensorType) -> None:
        if self.padding < 0:
            raise GraphError(f"counted_positions: padding is an id, at least 0; got {self.padding}")

    def expand(self, b: Builder, *operands: Value) -> Value:
        (ids,) = operands
        counts = b(CastTo(np.dtype(np.int32)), b(Compare("ne"), ids, b.scalar(self.padding, ids)))
        place = b(Binary("mul"), b(Cumsum(1), counts), counts)
        return b(Binary("add"), place, b.scalar(self.padding, place))


@dataclass(frozen=True)
class RelativeBias(Hir):
    """What each head adds to the scores by the distance of query and key: table `[R, N]` and x `[B, S, …]` →
    `[1, N, S, S]`, for the `buckets` ≤ R of `RelativeBuckets`."""

    traits = TABLES
    operands = "table[R!,N] x[_,_,…]"

    buckets: int = 32
    max_distance: int = 128

    def check(self, *operands: TensorType) -> None:
        table, x = operands
        if int(table.shape[0]) < self.buckets:
            raise ShapeError(
                f"relative_bias: a table of {self.buckets} rows or more, one for each bucket, and [B, S, …]; got "
                f"{table} and {x}"
            )

    def expand(self, b: Builder, *operands: Value) -> Value:
        table, x = operands
        rows = b(Gather(), table, b(RelativeBuckets(1, self.buckets, self.max_distance), x))
        heads = b(Transpose((2, 0, 1)), rows)
        return b(Reshape((1, *(AxisOf(axis) for axis in range(3)))), heads)


F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
Masks = tuple[Value, ...]


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
