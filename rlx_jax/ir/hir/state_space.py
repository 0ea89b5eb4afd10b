"""Blocks with a state of fixed size: Gated DeltaNet's, Mamba-2's, and the causal convolution before both.

Each follows the protocol of `rlx_jax.ir.hir.recurrent`. Heads are packed: head h of width D is columns h·D … h·D+D−1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.hir.recurrent import BlockRun, FromNothing, Start, StateSlot, Values, rows_behind
from rlx_jax.ir.ops.index import Iota, TokenWindows
from rlx_jax.ir.ops.norm import Standardize
from rlx_jax.ir.ops.pointwise import Binary, Compare, Unary, Where, in_dtype
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.ops.shape import Reshape, merge_axes, split_axis
from rlx_jax.ir.traits import TABLES, Initial
from rlx_jax.ir.types import TensorType, is_static

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class TimeSteps(Hir):
    """How far a recurrence goes at each token, and how fast each head forgets: t `[B,S,H]`, bias `[H]`, A_log `[H]` →
    `Δ = clip(softplus(t + bias), low, high)` `[B,S,H]` and `A = −exp(A_log)` `[H]`, both f32 whatever a program
    computes in."""

    traits = TABLES

    low: float = 0.0
    high: float | None = None

    def check(self, *operands: TensorType) -> None:
        check_arity("time_steps", len(operands), 3)
        t, bias, a_log = operands
        if t.rank != 3 or bias.shape != t.shape[2:] or a_log.shape != t.shape[2:]:
            raise ShapeError(f"time_steps: t is [B, S, H], bias and A_log [H]; got {t}, {bias} and {a_log}")

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        t, bias, a_log = (in_dtype(b, v, F32) for v in operands)
        step = b(Unary("softplus"), b(Binary("add"), t, b(Reshape((1, 1, -1)), bias)))
        if self.low > 0:
            step = b(Binary("max"), step, b.scalar(self.low, step))
        if self.high is not None:
            step = b(Binary("min"), step, b.scalar(self.high, step))
        return step, b(Unary("neg"), b(Unary("exp"), a_log))

    def initial(self, place: int, weight: TensorType) -> Initial:
        return 1.0 if place == 1 else 0.0


@dataclass(frozen=True)
class CausalConv(FromNothing, Hir):
    """Each channel convolved with its own window over the last J tokens: x `[B,S,C]`, w `[C,J]` or as checkpoints have
    it `[C,1,J]`, with `bias` that `[C]` → `[B,S,C]`. See `CausalConvOp`. State: the last J−1 rows of x. `role`: what
    its channels are (`rlx_jax.ir.roles`)."""

    traits = TABLES

    bias: bool = False
    role: str | None = None

    def check(self, *operands: TensorType) -> None:
        check_arity("causal_conv", len(operands), 3 if self.bias else 2)
        x, w, *_ = operands
        fits = w.rank in (2, 3) and is_static(w.shape[-1]) and (w.rank == 2 or w.shape[1] == 1)
        if x.rank != 3 or not fits or w.shape[0] != x.shape[2]:
            raise ShapeError(f"causal_conv: x is [B, S, C], w [C, J] or [C, 1, J]; got {x} and {w}").of(0, 1)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """The rows before x; of a window of one token there are none."""
        x, w = operands[:2]
        width = int(w.shape[-1]) - 1
        return (StateSlot("conv", TensorType((width, x.shape[2]), F32), (None, self.role)),) if width else ()

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """See `CarriesState`."""
        x, w, *bias = operands
        taps = int(b.type(w).shape[-1])
        if b.type(w).rank == 3:
            w = b(merge_axes(3, 1), w)
        if taps == 1:
            return BlockRun((b(CausalConvOp(self.bias), x, w, *bias),), ())
        read = rows_behind(b, x, taps, start, lengths)
        each = (read.tails(b, b(TokenWindows(taps), read.rows)),) if every else ()
        return BlockRun((b(CausalConvOp(self.bias), read.rows, w, *bias),), (read.tail,), each)


@dataclass(frozen=True)
class GatedDelta(FromNothing, Hir):
    """The gated delta rule over packed heads: q, k `[B,S,Hk·K]`, v `[B,S,Hv·V]`, g and beta `[B,S,Hv]` → `[B,S,Hv·V]`.
    See `GatedDeltaOp`. State: `[Hv,K,V]`.

    `key_heads` Hk divides `value_heads` Hv. With `unit` each head of q and k is first made `x (Σ x² + unit)^(−½)`.
    """

    traits = TABLES

    key_heads: int
    value_heads: int
    scale: float | None = None
    unit: float | None = None

    def packed(self, place: int | None) -> int | None:
        return self.key_heads if place in (0, 1) else self.value_heads

    def check(self, *operands: TensorType) -> None:
        check_arity("gated_delta", len(operands), 5)
        q, k, v, *_ = operands
        if min(self.key_heads, self.value_heads) < 1 or self.value_heads % self.key_heads:
            raise GraphError(f"gated_delta: {self.value_heads} value heads on {self.key_heads} key heads: no multiple")
        for t, heads in ((q, self.key_heads), (k, self.key_heads), (v, self.value_heads)):
            check_packed("gated_delta", t, heads)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """A matrix for each value head."""
        keys, width = (int(operands[i].shape[2]) // heads for i, heads in ((1, self.key_heads), (2, self.value_heads)))
        return (StateSlot("delta", TensorType((self.value_heads, keys, width), F32), ("heads", None, None)),)

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """See `CarriesState`."""
        q, k, v, g, beta = operands
        q, k = (self._unit(b, b(split_axis(3, 2, (self.key_heads, -1)), x)) for x in (q, k))
        v = b(split_axis(3, 2, (self.value_heads, -1)), v)
        g, beta = (_valid(b, x, lengths) for x in (g, beta))
        op = GatedDeltaOp(self.scale, bool(start), every)
        out, *states = b.add(op, q, k, v, g, beta, *(start or ()))
        return BlockRun((b(merge_axes(4, 2), out),), tuple(states[:1]), tuple(states[1:]))

    def _unit(self, b: Builder, x: Value) -> Value:
        """Each head at length 1; in f32, as the length is a sum."""
        if self.unit is None:
            return x
        dtype, width = b.type(x).dtype, int(b.type(x).shape[3])
        wide = b(Standardize((-1,), self.unit / width, centre=False), in_dtype(b, x, F32))
        short = b(Binary("mul"), wide, b.scalar(width**-0.5, wide))
        return in_dtype(b, short, dtype)


@dataclass(frozen=True)
class SelectiveScan(FromNothing, Hir):
    """A selective scan over packed heads: x `[B,S,H·P]`, Δ `[B,S,H]`, A `[H]` or `[H,N]`, B and C `[B,S,G·N]` →
    `[B,S,H·P]`. See `SelectiveScanOp`. State: `[H,P,N]`. `groups` G divides `heads` H."""

    traits = TABLES

    heads: int
    groups: int = 1

    def packed(self, place: int | None) -> int | None:
        return {None: self.heads, 0: self.heads, 1: self.heads, 3: self.groups, 4: self.groups}.get(place)

    def check(self, *operands: TensorType) -> None:
        check_arity("selective_scan", len(operands), 5)
        if min(self.heads, self.groups) < 1 or self.heads % self.groups:
            raise GraphError(f"selective_scan: {self.heads} heads in {self.groups} groups: no multiple")
        x, _, _, *gates = operands
        for t, heads in ((x, self.heads), *((t, self.groups) for t in gates)):
            check_packed("selective_scan", t, heads)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """A matrix for each head."""
        width, size = (int(operands[i].shape[2]) // n for i, n in ((0, self.heads), (3, self.groups)))
        return (StateSlot("ssm", TensorType((self.heads, width, size), F32), ("heads", None, None)),)

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """See `CarriesState`."""
        x, dt, a, gate, query = operands
        x = b(split_axis(3, 2, (self.heads, -1)), x)
        gate, query = (b(split_axis(3, 2, (self.groups, -1)), t) for t in (gate, query))
        op = SelectiveScanOp(bool(start), every)
        out, *states = b.add(op, x, _valid(b, dt, lengths), a, gate, query, *(start or ()))
        return BlockRun((b(merge_axes(4, 2), out),), tuple(states[:1]), tuple(states[1:]))


# -- parts -------------------------------------------------------------------------------------


def check_packed(op: str, t: TensorType, heads: int) -> None:
    """`[B, S, heads · width]` of known width."""
    if t.rank != 3 or not is_static(t.shape[2]) or int(t.shape[2]) % heads:
        raise ShapeError(f"{op}: expected [B, S, {heads} · width], got {t}")


def _valid(b: Builder, x: Value, lengths: Value | None) -> Value:
    """`[B, S, H]` with zeros at and behind the length of each row: identity steps."""
    if lengths is None:
        return x
    at: Any = b(Reshape((1, -1, 1)), b(Iota(1), x))
    counts = b(Compare("lt"), at, b(Reshape((-1, 1, 1)), lengths))
    return b(Where(), counts, x, b.scalar(0.0, x))
