"""Blocks that know the sequence: positions, rotations, attention, the first, the last and the end token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Graph, Hir, Value, constant
from rlx_jax.ir.hir.masks import MaskKind, check_arity
from rlx_jax.ir.ops.attention import (
    AttentionOp,
    RopeOp,
    RopeTable,
    SinusoidTable,
    check_heads,
    check_scores,
    check_window,
)
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.index import Gather, Iota, RelativeBuckets, TakeRow
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Where
from rlx_jax.ir.ops.reduce import Cumsum, Reduce
from rlx_jax.ir.ops.shape import AxisOf, Bound, CutAxis, Narrow, RepeatHeads, Reshape, SizeOf, Slice, Transpose
from rlx_jax.ir.traits import BLOCK, TABLES, Initial
from rlx_jax.ir.types import TensorType, is_static


@dataclass(frozen=True)
class Positions(Hir):
    """The absolute position of each token of `x` `[B, S, …]`: int32 `[1, S]`, 0 … S−1 in the forward program."""

    traits = TABLES

    def check(self, *operands: TensorType) -> None:
        check_arity("positions", len(operands), 1)

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

    head_dim: int
    n_rot: int
    style: str = "half"

    def check(self, *operands: TensorType) -> None:
        check_arity("rope", len(operands), 3)

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
        check_window(self.causal, self.window, self.ahead)

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

    end_id: int | None

    def check(self, *operands: TensorType) -> None:
        check_arity("end_token", len(operands), 2)
        x, ids = operands
        if ids.rank != 2 or ids.dtype.kind not in "iu" or x.rank != 3 or x.shape[:2] != ids.shape:
            raise ShapeError(f"end_token: x is [B, S, H] and ids are integers [B, S], got {x} and {ids}")

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

    padding: int

    def check(self, *operands: TensorType) -> None:
        check_arity("counted_positions", len(operands), 1)
        (ids,) = operands
        if ids.rank != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ShapeError(f"counted_positions: ids are integers [B, S], got {ids}")
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

    buckets: int = 32
    max_distance: int = 128

    def check(self, *operands: TensorType) -> None:
        check_arity("relative_bias", len(operands), 2)
        table, x = operands
        if table.rank != 2 or not is_static(table.shape[0]) or int(table.shape[0]) < self.buckets or x.rank < 2:
            raise ShapeError(
                f"relative_bias: a table of {self.buckets} rows or more, one for each bucket, and [B, S, …]; got "
                f"{table} and {x}"
            )

    def expand(self, b: Builder, *operands: Value) -> Value:
        table, x = operands
        rows = b(Gather(), table, b(RelativeBuckets(1, self.buckets, self.max_distance), x))
        heads = b(Transpose((2, 0, 1)), rows)
        return b(Reshape((1, *(AxisOf(axis) for axis in range(3)))), heads)
