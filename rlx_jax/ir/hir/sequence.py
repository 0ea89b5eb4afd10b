"""Blocks that depend on the sequence axis: positions, rotary embedding, attention, and the selection of one token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Builder, Graph, Hir, Value, constant
from rlx_jax.ir.hir.masks import MaskKind, check_arity
from rlx_jax.ir.operands import BLOCK, TABLES, Initial
from rlx_jax.ir.ops import shape
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp, RopeTable, SinusoidTable, check_heads, check_score_options
from rlx_jax.ir.ops.cache import After, CacheUpdate, DequantizeVectors, QuantizeVectors, RingStep
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.index import Gather, Iota, TakeRow
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Where, in_dtype
from rlx_jax.ir.ops.reduce import Cumsum, Reduce
from rlx_jax.ir.types import F32, I32, TensorType


@dataclass(frozen=True)
class Positions(Hir):
    """The absolute position of each token of `x` `[B, S, …]`: int32 `[1, S]`, 0 … S−1 in the forward program."""

    traits = TABLES
    operands = "x"

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(shape.Reshape((1, -1)), b(Iota(1), *operands))


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
    """Rows of constant f32 tables `[T, W]` at positions `[B|1, S]`: cos and sin `[B|1, S, W]`."""

    traits = TABLES
    notation = "rope_rows({rows} positions, width={width})"

    width: int
    cos: bytes
    sin: bytes

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        tables = (np.frombuffer(data, np.float32).reshape(-1, self.width) for data in (self.cos, self.sin))
        cos, sin = (b(Gather(), b.leaf(constant(table, np.float32)), *operands) for table in tables)
        return cos, sin

    @property
    def rows(self) -> int:
        """Number of positions in the tables."""
        return len(self.cos) // (4 * self.width)  # 4 bytes for each f32


@dataclass(frozen=True)
class Sinusoids(Hir):
    """Cosines and sines of times `[B]`: f32 `[B, channels]` whatever dtype the program computes in.

    See `SinusoidTable`.
    """

    traits = TABLES
    notation = "sinusoids({channels}, scale={scale})"

    channels: int
    scale: float = 1.0
    max_period: float = 10000.0

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(SinusoidTable(self.channels, self.scale, self.max_period), *operands)


@dataclass(frozen=True)
class Rope(Hir):
    """Rotary embedding of packed heads: x `[B,S,N·D]`, cos and sin `[B|1,S,R/2]` → `[B,S,N·D]`. See `RopeOp`.

    `style` is "half" or "interleaved".
    """

    traits = TABLES
    operands = "x cos sin"

    head_dim: int
    n_rot: int
    style: str = "half"

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RopeOp(self.head_dim, self.n_rot, self.style), *operands)


@dataclass(frozen=True)
class Attention(Hir):
    """Attention over packed heads. See `AttentionOp`.

    Operands: q `[B,S,N·D]`, k `[B,T,K·D]`, v `[B,T,K·E]`; then `keep` and `bias` as listed in `extra`; with `sinks` the
    sinks `[N]`; then the operands of `bias_of`.

    `expand` repeats each key/value head N/K times; the `direct` rule groups the queries instead.
    With `last` q is `[B,1,N·D]`, the query of the last token, because only its row is needed (written by `derive`).
    With `by_distance` the bias of a query and a key depends only on the head, on these two tokens and on the distance
    between them. `bias_of` computes a bias from the positions of query and key, and applies in every derived program
    (see `PairBias`).
    `returns` other than "context" is written by captures, beside the attention itself (see `AttentionOp`).
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
    returns: str = "context"

    def packed_heads(self, operand_index: int | None) -> int | None:
        return {None: self.heads, 0: self.heads, 1: self.kv_heads, 2: self.kv_heads}.get(operand_index)

    def check(self, *operands: TensorType) -> None:
        if self.bias_of is None:
            check_arity("attention", len(operands), 3 + len(self.extra) + self.sinks)
        check_heads(self.heads, self.kv_heads)
        check_score_options(self.scale, self.softcap)

    def op(self, kv_heads: int) -> AttentionOp:
        """Return the MIR op over `kv_heads` key/value heads."""
        return AttentionOp(
            self.heads, kv_heads, self.causal, self.window, self.scale, self.softcap, self.extra, ahead=self.ahead,
            returns=self.returns,
        )  # fmt: skip

    def expand(self, b: Builder, *operands: Value) -> Value:
        return self.expand_repeated(b, self.heads // self.kv_heads, *operands)

    def expand_repeated(
        self, b: Builder, times: int, q: Value, k: Value, v: Value, *extra_values: Value,
        positions: Mapping[str, Value] | None = None,
    ) -> Value:  # fmt: skip
        """Append the attention with key/value heads repeated `times` times, and return its result.

        `positions` has further operands of `AttentionOp`, the positions of queries and keys, by name.
        """
        positions = positions or {}
        extra_operands = dict(zip(self.extra, extra_values, strict=False))
        other_operands = extra_values[len(self.extra) :]
        if self.bias_of is not None:
            pair = self._pair_positions(b, q, k, {**extra_operands, **positions})
            extra_operands["bias"] = b(PairBias(self.bias_of), *pair, *other_operands[self.sinks :])
        if self.sinks:
            extra_operands["sinks"] = other_operands[0]
        if times > 1:
            k, v = (b(shape.RepeatHeads(self.kv_heads, times), x) for x in (k, v))
        extra_operands |= positions
        op = replace(self.op(self.kv_heads * times), extra=tuple(extra_operands))
        return b(op, q, k, v, *extra_operands.values())

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 0 for sinks, and the default for any other weight."""
        return 0.0 if self.sinks and operand_index == 3 + len(self.extra) else super().initial(operand_index, weight)

    def _pair_positions(self, b: Builder, q: Value, k: Value, positions: Mapping[str, Value]) -> tuple[Value, Value]:
        """Return the positions of queries `[B|1, S]` and of keys `[B|1, T]`.

        By default keys have positions 0 … T−1, and queries have the last S of them.
        """
        key_positions = positions.get("key_positions") or b(shape.Reshape((1, -1)), b(Iota(1), k))
        last_queries = shape.CutAxis(1, shape.Bound((shape.SizeOf(1, 1),), from_end=True))
        return positions.get("positions") or b(last_queries, key_positions, q), key_positions

    def text(self) -> str:
        return replace(self, bias_of=None).text()[:-1] + ", bias by positions)" if self.bias_of else super().text()


def attention(
    heads: int, kv_heads: int, mask: MaskKind, scale: float | None = None, softcap: float | None = None,
    sinks: bool = False,
) -> Attention:  # fmt: skip
    """Return the `Attention` block for a mask kind."""
    extra = (mask.operand,) if mask.operand else ()
    return Attention(heads, kv_heads, mask.causal, mask.window, scale, softcap, extra, ahead=mask.ahead, sinks=sinks)


@dataclass(frozen=True)
class LastToken(Hir):
    """The last token of each row: x `[B,S,…]` → `[B,1,…]`; with an index operand `[B]`, token `index[b]` of row b."""

    traits = BLOCK
    ids = (1, 0, 1)

    def expand(self, b: Builder, *operands: Value) -> Value:
        if len(operands) == 2:
            return b(TakeRow(), *operands)
        return b(shape.Narrow(1, -1, 1), operands[0])


@dataclass(frozen=True)
class FirstToken(Hir):
    """The first token, without the position axis: x `[B,S,H]` → `[B,H]`."""

    traits = BLOCK

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(shape.Slice(((None, None, None), 0)), operands[0])


@dataclass(frozen=True)
class EndToken(Hir):
    """The token at the end of each text, without the position axis: x `[B,S,H]`, ids `[B,S]` → `[B,H]`.

    This is the first token with id `end_id`; if `end_id` is None, the first token with the row's largest id. If there
    is no such token, it is the first token of the row. CLIP (Radford et al. 2021).
    """

    traits = BLOCK
    operands = "x[B,S,H] ids:int[B,S]"

    end_id: int | None

    def expand(self, b: Builder, x: Value, ids: Value) -> Value:
        end = b(Reduce("max", (1,), keepdims=True), ids) if self.end_id is None else b.scalar(self.end_id, ids)
        indices = b(shape.Reshape((1, -1)), b(Iota(1), ids))
        # Larger than every index: the minimum over a row without an end token, which then becomes 0.
        sentinel = b.scalar(np.iinfo(np.int32).max, indices)
        first_index = b(Reduce("min", (1,)), b(Where(), b(Compare("eq"), ids, end), indices, sentinel))
        end_index = b(Where(), b(Compare("eq"), first_index, sentinel), b.scalar(0, first_index), first_index)
        return b(shape.Slice(((None, None, None), 0)), b(TakeRow(), x, end_index))


@dataclass(frozen=True)
class CountedPositions(Hir):
    """Positions counted over the ids `[B, S]` that are not `padding`, starting at `padding` + 1: int32 `[B, S]`.

    Padding tokens themselves have position `padding` (RoBERTa, Liu et al. 2019, after fairseq).
    """

    traits = TABLES
    operands = "ids:int[B,S]"

    padding: int

    def check(self, *operands: TensorType) -> None:
        if self.padding < 0:
            raise GraphError(f"counted_positions: padding is an id, at least 0; got {self.padding}")

    def expand(self, b: Builder, ids: Value) -> Value:
        is_token = b(CastTo(np.dtype(np.int32)), b(Compare("ne"), ids, b.scalar(self.padding, ids)))
        count = b(Binary("mul"), b(Cumsum(1), is_token), is_token)
        return b(Binary("add"), count, b.scalar(self.padding, count))


Masks = tuple[Value, ...]


@dataclass(frozen=True)
class CachedAttention(Hir):
    """Attention over a cache that this call extends (written by `derive`, never by a stage).

    Operands: q `[B,S,N·D]`, k and v `[B,S,K·D]`, the key and value caches `[B,T,K,D]`, start `[B]`
    (tokens already in the cache) and lengths `[B]` (new valid tokens); if `quantized`, the scales of the caches
    `[B,T,K]`, see `QuantizeVectors`; if the attention has a keep mask, the mask of the new keys `[B,S]` and the cached
    mask `[B,T]`, both bool; then its sinks, and the operands of its `bias_of`. The key and value caches may have
    another dtype than k and v.
    Results: the context, and the caches with the new rows written at `start`, in the order of the operands.
    With `block_only` the cache is empty before the call, so that attention reads only the new keys.
    With `ring` the cache is a ring buffer of the last T tokens, T at least the window (see `RingStep`).
    With `attend.last`, q is `[B,1,N·D]`, the query of each row's last valid token.
    """

    traits = BLOCK
    notation = "cached_{attend}{block_only?, block_only}{ring?, ring}{quantized?, quantized}"

    attend: Attention
    block_only: bool = False
    ring: bool = False
    quantized: bool = False

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        return self.expand_repeated(b, self.attend.heads // self.attend.kv_heads, *operands)

    def expand_repeated(self, b: Builder, times: int, *operands: Value) -> tuple[Value, ...]:
        """Append the block with key/value heads repeated `times` times before attention, and return its results."""
        q, k, v, cache_k, cache_v, start, lengths, *optional = operands
        num_scales = 2 * self.quantized
        scales, optional = optional[:num_scales], optional[num_scales:]
        masks, other_operands = optional[: 2 * len(self.attend.extra)], optional[2 * len(self.attend.extra) :]
        split = shape.split_axis(3, 2, (self.attend.kv_heads, -1))
        # For keys and for values: the arrays of their cache, the new rows of each, and its update.
        caches = [(cache_k, *scales[:1]), (cache_v, *scales[1:])]
        new_rows = [self._encode(b, b(split, x), cache) for x, (cache, *_) in zip((k, v), caches, strict=True)]
        updates = [
            [self._update(b, *pair, start, lengths) for pair in zip(*arrays, strict=True)]
            for arrays in zip(caches, new_rows, strict=True)
        ]
        positions: dict[str, Value] = {}
        if not self.block_only:  # in a block, attention reads the new keys; unused rows would only be masked
            k, v = (self._decode(b, [rows for rows, *_ in arrays], b.type(q).dtype) for arrays in updates)
            positions = {"key_positions": updates[0][0][1]} if self.ring else {}
        if self.attend.last or not self.block_only:
            positions = {"positions": self._positions(b, operands[1], start, lengths), **positions}
        keep, mask_caches = self._update_masks(b, start, lengths, *masks) if masks else ((), ())
        context = self.attend.expand_repeated(b, times, q, k, v, *keep, *other_operands, positions=positions)
        new_caches = [cache for arrays in zip(*updates, strict=True) for *_, cache in arrays]
        if self.block_only:  # nothing else reads the caches before the end of the program
            context = b(After(), context, *new_caches)
        return context, *new_caches, *mask_caches

    def _encode(self, b: Builder, rows: Value, cache: Value) -> tuple[Value, ...]:
        """Return rows `[B,S,K,D]` as the cache stores them: in its dtype, or as codes and scales."""
        dtype = b.type(cache).dtype
        return b.add(QuantizeVectors(dtype), rows) if self.quantized else (in_dtype(b, rows, dtype),)

    def _decode(self, b: Builder, rows: list[Value], dtype: np.dtype[np.generic]) -> Value:
        """Return rows of the cache, with their scales if there are any, as `[B,T,K·D]` of a dtype."""
        values = b(DequantizeVectors(dtype), *rows) if self.quantized else rows[0]
        return in_dtype(b, b(shape.merge_axes(4, 2), values), dtype)

    def _update(self, b: Builder, cache: Value, new: Value, start: Value, lengths: Value) -> tuple[Value, ...]:
        """Return the rows that attention reads, for a ring their positions, and last the cache after the call."""
        if self.ring:
            return b.add(RingStep(self.attend.window), cache, new, start, lengths)
        cache = b(CacheUpdate(fresh=self.block_only), cache, new, start, lengths)
        return cache, cache

    def _update_masks(self, b: Builder, start: Value, lengths: Value, new: Value, cache: Value) -> tuple[Masks, Masks]:
        """Return the mask over the keys that attention reads, and the cached mask after the call; each as a 1-tuple."""
        keep, *_, cache = self._update(b, cache, new, start, lengths)
        return (new if self.block_only else keep,), (cache,)

    def _positions(self, b: Builder, new: Value, start: Value, lengths: Value) -> Value:
        """Return the positions of the queries among the keys, `[B,S]`, or `[B,1]` with `attend.last`.

        A row without new tokens gets a valid position too, although its result is not used.
        """
        indices = b(shape.Reshape((1, -1)), b(Iota(1), new))
        positions = indices if self.block_only else b(Binary("add"), b(shape.Reshape((-1, 1)), start), indices)
        if not self.attend.last:
            return positions
        one = b.scalar(1, lengths)
        return b(TakeRow(), positions, b(Binary("sub"), b(Binary("max"), lengths, one), one))


@dataclass(frozen=True)
class GrowingAttention(Hir):
    """Attention over cached keys and values that grow by concatenation (written by `derive` and by SelfAttnDecode).

    Operands: q `[B,S,N·D]`, k and v `[B,S,K·D]`, the cached keys and values `[B,P,K·D]`, which may have another dtype;
    with `keep` a mask `[B,P+S]` over cached and new keys, in addition to causality: 1 keeps a key, less than ½ drops
    it; then the attention's sinks, and the operands of its `bias_of`, for which a key's position is its index among the
    keys that the mask keeps.
    Results: the context, and the longer keys and values `[B,P+S,K·D]`. Query i of S reads the keys up to P + i, or with
    a window the last w of those. Keys that the mask drops do not count towards the window.
    """

    traits = BLOCK
    notation = "growing_{attend}{keep?, keep}"

    attend: Attention
    keep: bool = False

    def check(self, *operands: TensorType) -> None:
        if self.attend.bias_of is None:
            check_arity("growing_attention", len(operands), 5 + self.keep + self.attend.sinks)
        if self.attend.extra:
            raise GraphError(f"growing_attention: its attention reads {', '.join(self.attend.extra)}; expected no mask")

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        q, k, v, *past_kv = operands[:5]
        new_kv = [
            b(shape.Concat(1), cached_rows, in_dtype(b, new_rows, b.type(cached_rows).dtype))
            for cached_rows, new_rows in zip(past_kv, (k, v), strict=True)
        ]
        extra, masks = self._mask_operands(b, *operands[5 : 5 + self.keep])
        keys, values = (in_dtype(b, x, b.type(q).dtype) for x in new_kv)
        return b(replace(self.attend, extra=extra), q, keys, values, *masks, *operands[5 + self.keep :]), *new_kv

    def _mask_operands(self, b: Builder, *keep: Value) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        """Return the names and values of the mask operands of attention.

        If distances matter (a window or `bias_of`), these include the position of each key among the kept keys.
        """
        if not keep or self.attend.window is None and self.attend.bias_of is None:
            return ("keep",) * len(keep), keep
        mask = b(CastTo(F32), *keep)
        is_kept = b(CastTo(I32), b(Compare("ge"), mask, b.scalar(0.5, mask)))
        count = b(Cumsum(1), is_kept)
        return ("keep", "key_positions"), (*keep, b(Binary("sub"), count, b.scalar(1, count)))
