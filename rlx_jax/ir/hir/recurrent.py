"""Recurrent blocks: a protocol for blocks with a state along the sequence, Gated DeltaNet, Mamba-2, and custom steps.

The states of Gated DeltaNet and Mamba-2, and of the causal convolution that precedes both, have a fixed size.

A block of the protocol `CarriesState` declares the slots of its state, and how it runs from an initial state. `derive`
builds the forward program, `prefill`, `extend` and ragged rows from these two, with one rule for all such blocks. Heads
are packed: head h of width D is columns h·D … h·D+D−1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Constant, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.operands import BLOCK, TABLES, BlockTraits, Initial
from rlx_jax.ir.ops.index import Iota, TailRows, TokenWindows
from rlx_jax.ir.ops.pointwise import Binary, Compare, Unary, Where, in_dtype
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp, TokenScan
from rlx_jax.ir.ops.reduce import Standardize
from rlx_jax.ir.ops.shape import Concat, Narrow, Pad, Reshape, Slice, merge_axes, split_axis
from rlx_jax.ir.param import Roles
from rlx_jax.ir.types import F32, DimLike, TensorType, is_float, is_static
from rlx_jax.ir.user_functions import TokenStep

Values = Sequence[Value]
# The state that a block starts from, by slot; None: the initial values.
Start = Values | None


@dataclass(frozen=True)
class StateSlot:
    """One array of a block's state.

    Attributes:
        name: the last segment of the leaf's key, after the path of the block.
        type: the shape without the batch axis, and the dtype: f32 whatever dtype the program computes in, or a dtype
            without fractions.
        roles: the roles of the axes without the batch axis.
        initial: the value before the first token, without the batch axis: the number of an operand of the block, or an
            array; None means zeros.
    """

    name: str
    type: TensorType
    roles: Roles = ()
    initial: int | Constant | None = None

    def leaf(self, batch: DimLike) -> TensorType:
        """Return the type of the state leaf, with the batch axis."""
        return TensorType((batch, *self.type.shape), self.type.dtype)


@dataclass(frozen=True)
class BlockRun:
    """The result of running a block from a state.

    Attributes:
        results: the results of the block.
        final_state: the state after the last valid token of each row, by slot.
        all_states: the state after every token, `[B, S, …]`, by slot; empty unless requested.
    """

    results: tuple[Value, ...]
    final_state: tuple[Value, ...]
    all_states: tuple[Value, ...] = ()


@runtime_checkable
class CarriesState(Protocol):
    """A block `[B, S, …] → [B, S, …]` in which a token depends on the earlier tokens only through a state.

    Its first operand is `[B, S, …]`. `expand` equals `expand_from` without a state.
    """

    def text(self) -> str:
        """Return the block as dumps print it."""
        ...

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """Return the arrays of the state, given the types of the block's operands."""
        ...

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """Append the ops of the block, run from a state, and return their results.

        Args:
            start: the state, `[B, …]` by slot; None means the initial values.
            lengths: the number of valid tokens of each row, `[B]` int32. A later token is an identity step: it leaves
                the state unchanged, and the block's result there is meaningless.
            every: whether to return the state after each token too.
        """
        ...


class StatefulForward:
    """Defines `expand`, the forward program of a block with a state, as a run from the initial state."""

    def expand(self: Any, b: Builder, *operands: Value) -> tuple[Value, ...]:
        run: BlockRun = self.expand_from(b, operands)
        return run.results


@dataclass(frozen=True)
class Carried(Hir):
    """A block with a state, run from the state of an earlier call (written by `derive`, never by a stage).

    Operands: the block's operands, the state leaves `[B, …]` by slot, `state.length` `[B]` and `lengths` `[B]`.
    Results: the block's results; the new leaves; with `every`, the leaves after each token `[B, S, …]`.
    With `fresh` no row has processed a token yet. Otherwise a row starts from its leaf, or from the initial value if it
    has processed no token. Without `ragged` every token is valid and every row starts from its leaf: the operands then
    contain no lengths, and with `fresh` no leaves either.
    """

    traits = BLOCK

    block: Hir  # also a `CarriesState`; deserialization needs the annotation `Hir`
    states: int
    fresh: bool = False
    every: bool = False
    ragged: bool = True

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        block = cast(CarriesState, self.block)
        if not self.ragged:
            num_operands = len(operands) - self.states * (not self.fresh)
            run = block.expand_from(b, operands[:num_operands], operands[num_operands:] or None, None, self.every)
            return (*run.results, *run.final_state, *run.all_states)
        num_operands = len(operands) - self.states - 2
        block_operands, leaves, (length, lengths) = operands[:num_operands], operands[num_operands:-2], operands[-2:]
        slots = block.slots(*(b.type(v) for v in block_operands))
        start = None
        if not self.fresh:
            start = [_start_state(b, s, v, length, block_operands) for s, v in zip(slots, leaves, strict=True)]
        run = block.expand_from(b, block_operands, start, lengths, self.every)
        # A state leaf is donated, so its type must stay the same.
        for slot, leaf, new_state in zip(slots, leaves, run.final_state, strict=True):
            if b.type(new_state) != b.type(leaf):
                raise GraphError(
                    f"{self.block.text()}: slot {slot.name} is {b.type(leaf)}, and {b.type(new_state)} after"
                )
        return (*run.results, *run.final_state, *run.all_states)

    def text(self) -> str:
        notes = [", fresh"] * self.fresh + [", every"] * self.every + [", all valid"] * (not self.ragged)
        return f"carried({self.block.text()}{''.join(notes)})"


def _start_state(b: Builder, slot: StateSlot, leaf: Value, length: Value, operands: Values) -> Value:
    """Return the state that a call starts from: the leaf, or the initial value in rows that have no token yet."""
    if slot.initial is None:  # a new leaf is zeros already
        return leaf
    rank = slot.type.rank
    start = initial_value(b, slot, operands)
    start = b(Slice((None, Ellipsis)), start)
    is_empty = b(Compare("eq"), length, b.scalar(0, length))
    return b(Where(), b(Reshape((-1, *(1,) * rank)), is_empty), start, leaf)


def initial_value(b: Builder, slot: StateSlot, operands: Sequence[Value]) -> Value:
    """Return the value of a slot before the first token, without the batch axis; a scalar 0 if it is zeros."""
    if isinstance(slot.initial, int):
        value = operands[slot.initial]
        return in_dtype(b, value, slot.type.dtype)
    if slot.initial is not None:
        return b.leaf(slot.initial)
    zero = np.zeros((), slot.type.dtype)
    return b.leaf(Constant(zero.tobytes(), type=TensorType((), slot.type.dtype)))


@dataclass(frozen=True)
class Recurrent(StatefulForward, Hir):
    """A custom `state, y_t = step(state, x_t, *params)`, scanned along the tokens: see `TokenScan`.

    Operands: `tokens` values `[B, S, …]`, the parameters of the step, then the initial values that are operands. The
    step computes in f32, and so is the state. Floating y have the dtype of the first floating x.
    """

    traits = BlockTraits(composite=False, keeps_f32=False, stored=False)
    notation = "recurrent({step.label})"

    step: TokenStep
    state: tuple[StateSlot, ...]
    tokens: int
    unroll: int | None = None

    def check(self, *operands: TensorType) -> None:
        num_learned = sum(isinstance(slot.initial, int) for slot in self.state)
        check_arity("recurrent", len(operands), len(self.step.operand_types) - len(self.state) + num_learned)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """Return the slots that the user declared with the initial state."""
        return self.state

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """Append the ops of the block, run from a state: see `CarriesState`."""
        num_states = len(self.state)
        step_operands = operands[: len(self.step.operand_types) - num_states]
        initial = start or [initial_value(b, slot, operands) for slot in self.state]
        op = TokenScan(self.step, num_states, self.tokens, lengths is not None, every, self.unroll)
        results = b.add(op, *initial, *step_operands, *([] if lengths is None else [lengths]))
        num_results = len(self.step.results) - num_states
        return BlockRun(
            results[:num_results], results[num_results : num_results + num_states], results[num_results + num_states :]
        )


@dataclass(frozen=True)
class CausalWindow(StatefulForward, Hir):
    """The last `width` tokens up to each token, with zeros before the first: x `[B, S, …]` → `[B, S, width, …]`.

    The state is the last `width − 1` tokens.
    """

    traits = BLOCK
    operands = "x[_,_,…]"

    width: int

    def check(self, *operands: TensorType) -> None:
        if self.width < 1:
            raise ShapeError(f"causal_window: a width is at least 1, got {self.width}")

    def slots(self, x: TensorType) -> tuple[StateSlot, ...]:
        """Return the slot of the preceding tokens, if a window has more than one token."""
        window_type = TensorType((self.width - 1, *x.shape[2:]), F32 if is_float(x.dtype) else x.dtype)
        return (StateSlot("window", window_type),) if self.width > 1 else ()

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """Append the ops of the block, run from a state: see `CarriesState`."""
        (x,) = operands
        return run_over_windows(b, x, self.width, start, lengths, every, lambda rows: b(TokenWindows(self.width), rows))


def run_over_windows(
    b: Builder, x: Value, width: int, start: Start, lengths: Value | None, every: bool, fn: Callable[[Value], Value]
) -> BlockRun:
    """Run a block over windows of `width` tokens, the state of which is the `width − 1` tokens before a token.

    `fn` returns the result for the tokens x `[B, S, …]` after the rows of the state, or after zeros if there is none:
    `[B, width − 1 + S, …]`. For `start`, `lengths` and `every` see `CarriesState.expand_from`. The state is f32 if the
    tokens are floats.
    """
    past, x_type = width - 1, b.type(x)
    if not past:
        return BlockRun((fn(x),), ())
    if start is None:
        rows = b(Pad(((0, 0), (past, 0), *((0, 0),) * (x_type.rank - 2))), x)
    else:
        rows = b(Concat(1), in_dtype(b, start[0], x_type.dtype), x)
    dtype = F32 if is_float(x_type.dtype) else x_type.dtype
    tail = in_dtype(b, b(Narrow(1, -past, past), rows) if lengths is None else b(TailRows(past), rows, lengths), dtype)
    states = (in_dtype(b, b(Narrow(2, 1, past), b(TokenWindows(width), rows)), dtype),) if every else ()
    return BlockRun((fn(rows),), (tail,), states)


@dataclass(frozen=True)
class TimeSteps(Hir):
    """The time step of a recurrence at each token, and the decay rate of each head.

    t `[B,S,H]`, bias `[H]`, A_log `[H]` → `Δ = clip(softplus(t + bias), low, high)` `[B,S,H]` and `A = −exp(A_log)`
    `[H]`, both f32 whatever dtype the program computes in.
    """

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

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 1 for the bias and 0 for A_log, so that A starts at −1."""
        return 1.0 if operand_index == 1 else 0.0


@dataclass(frozen=True)
class CausalConv(StatefulForward, Hir):
    """A depthwise causal convolution over the last J tokens: see `CausalConvOp`.

    Operands: x `[B,S,C]`, w `[C,J]` or as in checkpoints `[C,1,J]`, with `bias` also the bias `[C]`. Result: `[B,S,C]`.
    State: the last J−1 rows of x. `role` is the role of the channels (`rlx_jax.ir.roles`).
    """

    traits = TABLES
    operands = "x[B,S,C] w[C,…,J!] bias?bias"

    bias: bool = False
    role: str | None = None

    def check(self, x: TensorType, w: TensorType, *_: TensorType) -> None:
        if w.shape[1:-1] not in ((), (1,)):
            raise ShapeError(f"causal_conv: x is [B, S, C], w [C, J] or [C, 1, J]; got {x} and {w}").at_operands(0, 1)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """Return the slot of the rows that precede x, if a window has more than one token."""
        x, w = operands[:2]
        width = int(w.shape[-1]) - 1
        return (StateSlot("conv", TensorType((width, x.shape[2]), F32), (None, self.role)),) if width else ()

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """Append the ops of the block, run from a state: see `CarriesState`."""
        x, w, *bias = operands
        taps = int(b.type(w).shape[-1])
        if b.type(w).rank == 3:
            w = b(merge_axes(3, 1), w)
        convolve = CausalConvOp(self.bias)
        return run_over_windows(b, x, taps, start, lengths, every, lambda rows: b(convolve, rows, w, *bias))


@dataclass(frozen=True)
class GatedDelta(StatefulForward, Hir):
    """The gated delta rule over packed heads: q, k `[B,S,Hk·K]`, v `[B,S,Hv·V]`, g and beta `[B,S,Hv]` → `[B,S,Hv·V]`.

    See `GatedDeltaOp`. State: `[Hv,K,V]`. `key_heads` Hk divides `value_heads` Hv. With `unit` each head of q and k is
    first normalized to `x (Σ x² + unit)^(−½)`.
    """

    traits = TABLES
    operands = "q k v g beta"

    key_heads: int
    value_heads: int
    scale: float | None = None
    unit: float | None = None

    def packed_heads(self, operand_index: int | None) -> int | None:
        return self.key_heads if operand_index in (0, 1) else self.value_heads

    def check(self, q: TensorType, k: TensorType, v: TensorType, *_: TensorType) -> None:
        if min(self.key_heads, self.value_heads) < 1 or self.value_heads % self.key_heads:
            raise GraphError(
                f"gated_delta: {self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )
        for t, heads in ((q, self.key_heads), (k, self.key_heads), (v, self.value_heads)):
            check_packed("gated_delta", t, heads)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """Return the slot of the state, a matrix for each value head."""
        keys, width = (int(operands[i].shape[2]) // heads for i, heads in ((1, self.key_heads), (2, self.value_heads)))
        return (StateSlot("delta", TensorType((self.value_heads, keys, width), F32), ("heads", None, None)),)

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """Append the ops of the block, run from a state: see `CarriesState`."""
        q, k, v, g, beta = operands
        q, k = (self._normalize_heads(b, b(split_axis(3, 2, (self.key_heads, -1)), x)) for x in (q, k))
        v = b(split_axis(3, 2, (self.value_heads, -1)), v)
        g, beta = (_mask_padding(b, x, lengths) for x in (g, beta))  # no decay and no update: an identity step
        op = GatedDeltaOp(self.scale, bool(start), every)
        out, *states = b.add(op, q, k, v, g, beta, *(start or ()))
        return BlockRun((b(merge_axes(4, 2), out),), tuple(states[:1]), tuple(states[1:]))

    def _normalize_heads(self, b: Builder, x: Value) -> Value:
        """Return x `[B,S,Hk,K]` with each head normalized to length 1; in f32, because the length is a sum."""
        if self.unit is None:
            return x
        dtype, width = b.type(x).dtype, int(b.type(x).shape[3])
        standardized = b(Standardize((-1,), self.unit / width, centre=False), in_dtype(b, x, F32))
        # Standardize divides by the root mean square, which gives each head the length √width.
        normalized = b(Binary("mul"), standardized, b.scalar(width**-0.5, standardized))
        return in_dtype(b, normalized, dtype)


@dataclass(frozen=True)
class SelectiveScan(StatefulForward, Hir):
    """A selective scan over packed heads: see `SelectiveScanOp`.

    x `[B,S,H·P]`, Δ `[B,S,H]`, A `[H]` or `[H,N]`, B and C `[B,S,G·N]` → `[B,S,H·P]`. State: `[H,P,N]`. `groups` G
    divides `heads` H.
    """

    traits = TABLES
    operands = "x dt a b c"

    heads: int
    groups: int = 1

    def packed_heads(self, operand_index: int | None) -> int | None:
        return {None: self.heads, 0: self.heads, 1: self.heads, 3: self.groups, 4: self.groups}.get(operand_index)

    def check(self, *operands: TensorType) -> None:
        if min(self.heads, self.groups) < 1 or self.heads % self.groups:
            raise GraphError(f"selective_scan: {self.heads} heads are not a multiple of {self.groups} groups")
        x, _, _, *gates = operands
        for t, heads in ((x, self.heads), *((t, self.groups) for t in gates)):
            check_packed("selective_scan", t, heads)

    def slots(self, *operands: TensorType) -> tuple[StateSlot, ...]:
        """Return the slot of the state, a matrix for each head."""
        width, size = (int(operands[i].shape[2]) // n for i, n in ((0, self.heads), (3, self.groups)))
        return (StateSlot("ssm", TensorType((self.heads, width, size), F32), ("heads", None, None)),)

    def expand_from(
        self, b: Builder, operands: Values, start: Start = None, lengths: Value | None = None, every: bool = False
    ) -> BlockRun:
        """Append the ops of the block, run from a state: see `CarriesState`."""
        x, dt, a, gate, query = operands
        x = b(split_axis(3, 2, (self.heads, -1)), x)
        gate, query = (b(split_axis(3, 2, (self.groups, -1)), t) for t in (gate, query))
        op = SelectiveScanOp(bool(start), every)
        out, *states = b.add(op, x, _mask_padding(b, dt, lengths), a, gate, query, *(start or ()))
        return BlockRun((b(merge_axes(4, 2), out),), tuple(states[:1]), tuple(states[1:]))


def check_packed(op: str, t: TensorType, heads: int) -> None:
    """Check that `t` is `[B, S, heads · width]` with a static width.

    Raises:
        ShapeError: it is not; the message begins with `op`.
    """
    if t.rank != 3 or not is_static(t.shape[2]) or int(t.shape[2]) % heads:
        raise ShapeError(f"{op}: expected [B, S, {heads} · width], got {t}")


def _mask_padding(b: Builder, x: Value, lengths: Value | None) -> Value:
    """Return x `[B, S, H]` with zeros at the tokens past the length of each row, which makes them identity steps."""
    if lengths is None:
        return x
    token_index: Any = b(Reshape((1, -1, 1)), b(Iota(1), x))
    is_valid = b(Compare("lt"), token_index, b(Reshape((-1, 1, 1)), lengths))
    return b(Where(), is_valid, x, b.scalar(0.0, x))
