"""Blocks that carry a state along the sequence: one protocol for all of them, and a user's own step as one.

Of fixed size are the states of Gated DeltaNet, of Mamba-2, and of the causal convolution before both.

A block that follows it says which slots its state has, and how it runs from a start. Its forward program, `prefill`,
`extend` and ragged rows are made of these two; `derive` has one rule for all such blocks. Heads are packed: head h of
width D is columns h·D … h·D+D−1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Constant, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.ops.index import Iota, TailRows, TokenWindows
from rlx_jax.ir.ops.norm import Standardize
from rlx_jax.ir.ops.pointwise import Binary, Compare, Unary, Where, in_dtype
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp, TokenScan
from rlx_jax.ir.ops.shape import Concat, Narrow, Pad, Reshape, Slice, merge_axes, split_axis
from rlx_jax.ir.param import Roles
from rlx_jax.ir.traits import BLOCK, TABLES, BlockTraits, Initial
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static
from rlx_jax.ir.user_functions import TokenStep

F32 = np.dtype(np.float32)
Values = Sequence[Value]
# The state that a block runs behind, by slot; None: the initial values.
Start = Values | None


@dataclass(frozen=True)
class StateSlot:
    """One array of a block's state.

    Attributes:
        name: of the leaf, behind the block's path.
        type: shape behind the batch, and dtype: f32 whatever the program computes in, or what holds no fractions.
        roles: of the axes behind the batch.
        initial: what it holds before the first token, without batch: the number of an operand of the block, or an
            array; zeros where None.
    """

    name: str
    type: TensorType
    roles: Roles = ()
    initial: int | Constant | None = None

    def leaf(self, batch: DimLike) -> TensorType:
        """With its rows."""
        return TensorType((batch, *self.type.shape), self.type.dtype)


@dataclass(frozen=True)
class BlockRun:
    """What a block gives: its results; the state after the last valid token of each row, by slot; where asked for, the
    state after every token, `[B, S, …]`, by slot."""

    results: tuple[Value, ...]
    after: tuple[Value, ...]
    every: tuple[Value, ...] = ()


@runtime_checkable
class CarriesState(Protocol):
    """A block `[B, S, …] → [B, S, …]` that reads the tokens up to each through a state.

    Its first operand is `[B, S, …]`. `expand` is `expand_from` of nothing.
    """

    def text(self) -> str:
        """As dumps print it."""
        ...

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """The arrays of its state, from the types of its operands."""
        ...

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """The ops of the block, behind a state.

        Args:
            start: the state, `[B, …]` by slot; None: the initial values.
            lengths: `[B]` int32. A token at or behind it is an identity step: the state stays as it is, and what the
                block gives there means nothing.
            every: whether the state after each token is wanted.
        """
        ...


class FromNothing:
    """The forward program of a block that carries a state."""

    def expand(self: Any, b: Builder, *operands: Value) -> tuple[Value, ...]:
        ran: BlockRun = self.expand_from(b, operands)
        return ran.results


@dataclass(frozen=True)
class Carried(Hir):
    """A block that carries a state, run behind what an earlier call left (written by `derive`, never by a stage).

    Operands: those of the block, the state leaves `[B, …]` by slot, `state.length` `[B]` and `lengths` `[B]`.
    Results: those of the block; the new leaves; with `every`, the leaves after each token `[B, S, …]`.
    With `fresh` no token was read before. Else a row starts from its leaf, or where it has read nothing from the
    initial value. Without `ragged` every token is valid and every row starts from its leaf: there are no lengths, and
    with `fresh` no leaves either, among the operands.
    """

    traits = BLOCK

    block: Hir  # which is a `CarriesState`
    states: int
    fresh: bool = False
    every: bool = False
    ragged: bool = True

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        block = cast(CarriesState, self.block)
        if not self.ragged:
            own = len(operands) - self.states * (not self.fresh)
            ran = block.expand_from(b, operands[:own], operands[own:] or None, None, self.every)
            return (*ran.results, *ran.after, *ran.every)
        own = len(operands) - self.states - 2
        given, leaves, (length, lengths) = operands[:own], operands[own:-2], operands[-2:]
        slots = block.slots(*(b.type(v) for v in given))
        start = None
        if not self.fresh:
            start = [_entered(b, s, v, length, given) for s, v in zip(slots, leaves, strict=True)]
        ran = block.expand_from(b, given, start, lengths, self.every)
        for slot, leaf, after in zip(slots, leaves, ran.after, strict=True):
            if b.type(after) != b.type(leaf):
                raise GraphError(f"{self.block.text()}: slot {slot.name} is {b.type(leaf)}, and {b.type(after)} after")
        return (*ran.results, *ran.after, *ran.every)

    def text(self) -> str:
        notes = [", fresh"] * self.fresh + [", every"] * self.every + [", all valid"] * (not self.ragged)
        return f"carried({self.block.text()}{''.join(notes)})"


def _entered(b: Builder, slot: StateSlot, leaf: Value, length: Value, given: Sequence[Value]) -> Value:
    """The state that a call starts from."""
    if slot.initial is None:
        return leaf
    rank = slot.type.rank
    start = initial_value(b, slot, given)
    start = b(Slice((None, Ellipsis)), start)
    none = b(Compare("eq"), length, b.scalar(0, length))
    return b(Where(), b(Reshape((-1, *(1,) * rank)), none), start, leaf)


def initial_value(b: Builder, slot: StateSlot, operands: Sequence[Value]) -> Value:
    """What a slot holds before the first token, without batch; of zeros, one number."""
    if isinstance(slot.initial, int):
        value = operands[slot.initial]
        return in_dtype(b, value, slot.type.dtype)
    if slot.initial is not None:
        return b.leaf(slot.initial)
    zero = np.zeros((), slot.type.dtype)
    return b.leaf(Constant(zero.tobytes(), type=TensorType((), slot.type.dtype)))


@dataclass(frozen=True)
class Recurrent(FromNothing, Hir):
    """A user's `state, y_t = step(state, x_t, *params)` along the tokens: see `TokenScan`.

    Operands: `tokens` values `[B, S, …]`, the parameters of the step, then the initial values that are values. The step
    computes in f32, as does the state; floating y come in the dtype of the first floating x.
    """

    traits = BlockTraits(composite=False, keeps_f32=False, stored=False)

    step: TokenStep
    state: tuple[StateSlot, ...]
    tokens: int
    unroll: int | None = None

    def check(self, *operands: TensorType) -> None:
        learned = sum(isinstance(slot.initial, int) for slot in self.state)
        check_arity("recurrent", len(operands), len(self.step.given) - len(self.state) + learned)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """Those of the initial state."""
        return self.state

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """See `CarriesState`."""
        n = len(self.state)
        given = operands[: len(self.step.given) - n]
        begin = start or [initial_value(b, slot, operands) for slot in self.state]
        op = TokenScan(self.step, n, self.tokens, lengths is not None, every, self.unroll)
        made = b.add(op, *begin, *given, *([] if lengths is None else [lengths]))
        ys = len(self.step.results) - n
        return BlockRun(made[:ys], made[ys : ys + n], made[ys + n :])

    def text(self) -> str:
        return f"recurrent({self.step.label})"


@dataclass(frozen=True)
class CausalWindow(FromNothing, Hir):
    """The last `width` tokens up to each, zeros before the first: x `[B, S, …]` → `[B, S, width, …]`.

    Its state are the last `width − 1` tokens.
    """

    traits = BLOCK
    operands = "x[_,_,…]"

    width: int

    def check(self, *operands: TensorType) -> None:
        if self.width < 1:
            raise ShapeError(f"causal_window: a width is at least 1, got {self.width}")

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """The tokens before, if a window has more than one."""
        (x,) = operands
        held = TensorType((self.width - 1, *x.shape[2:]), F32 if is_float(x.dtype) else x.dtype)
        return (StateSlot("window", held),) if self.width > 1 else ()

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """See `CarriesState`."""
        (x,) = operands
        if self.width == 1:
            return BlockRun((b(TokenWindows(1), x),), ())
        read = rows_behind(b, x, self.width, start, lengths)
        windows = b(TokenWindows(self.width), read.rows)
        return BlockRun((windows,), (read.tail,), (read.tails(b, windows),) if every else ())


@dataclass(frozen=True)
class RowsBehind:
    """Tokens with the `past` before them, which are the state of whatever looks back so far: `rows` `[B, past + S, …]`,
    and the last valid `past` of them, `tail`."""

    rows: Value
    tail: Value
    past: int

    def tails(self, b: Builder, windows: Value) -> Value:
        """The state after each token `[B, S, past, …]`, out of the windows of `past + 1` rows."""
        return in_dtype(b, b(Narrow(2, 1, self.past), windows), b.type(self.tail).dtype)


def rows_behind(b: Builder, x: Value, width: int, start: Sequence[Value] | None, lengths: Value | None) -> RowsBehind:
    """Tokens x `[B, S, …]` behind the state, or behind zeros, for windows of `width` of at least 2; see `CarriesState`.

    The state is f32 where tokens are floats.
    """
    past, kind = width - 1, b.type(x)
    if start is None:
        rows = b(Pad(((0, 0), (past, 0), *((0, 0),) * (kind.rank - 2))), x)
    else:
        rows = b(Concat(1), in_dtype(b, start[0], kind.dtype), x)
    tail = b(Narrow(1, -past, past), rows) if lengths is None else b(TailRows(past), rows, lengths)
    return RowsBehind(rows, in_dtype(b, tail, F32 if is_float(kind.dtype) else kind.dtype), past)


@dataclass(frozen=True)
class TimeSteps(Hir):
    """How far a recurrence goes at each token, and how fast each head forgets: t `[B,S,H]`, bias `[H]`, A_log `[H]` →
    `Δ = clip(softplus(t + bias), low, high)` `[B,S,H]` and `A = −exp(A_log)` `[H]`, both f32 whatever a program
    computes in."""

    traits = TABLES
    operands = "t[B,S,H] bias[H] a_log[H]"

    low: float = 0.0
    high: float | None = None

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
    operands = "x[B,S,C] w[C,…,J!] bias?bias"

    bias: bool = False
    role: str | None = None

    def check(self, *operands: TensorType) -> None:
        x, w, *_ = operands
        if w.shape[1:-1] not in ((), (1,)):
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
    operands = "q k v g beta"

    key_heads: int
    value_heads: int
    scale: float | None = None
    unit: float | None = None

    def packed(self, place: int | None) -> int | None:
        return self.key_heads if place in (0, 1) else self.value_heads

    def check(self, *operands: TensorType) -> None:
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
    operands = "x dt a b c"

    heads: int
    groups: int = 1

    def packed(self, place: int | None) -> int | None:
        return {None: self.heads, 0: self.heads, 1: self.heads, 3: self.groups, 4: self.groups}.get(place)

    def check(self, *operands: TensorType) -> None:
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
