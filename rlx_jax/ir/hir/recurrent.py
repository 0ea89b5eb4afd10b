"""Blocks that carry a state along the sequence: one protocol for all of them, and a user's own step as one.

A block that follows it says which slots its state has, and how it runs from a start. Its forward program, `prefill`,
`extend` and ragged rows are made of these two; `derive` has one rule for all such blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Constant, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.ops.index import TailRows, TokenWindows
from rlx_jax.ir.ops.pointwise import Compare, Where, in_dtype
from rlx_jax.ir.ops.recurrent import TokenScan
from rlx_jax.ir.ops.shape import Concat, Narrow, Pad, Reshape, Slice
from rlx_jax.ir.param import Roles
from rlx_jax.ir.token_step import TokenStep
from rlx_jax.ir.traits import BLOCK, BlockTraits
from rlx_jax.ir.types import DimLike, TensorType, is_float

F32 = np.dtype(np.float32)
Values = Sequence[Value]
Start = Values | None
"""The state that a block runs behind, by slot; None: the initial values."""


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

    @property
    def leaf_roles(self) -> Roles:
        """Of all axes."""
        return ("batch", *(self.roles or (None,) * self.type.rank))


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

    width: int

    def check(self, *operands: TensorType) -> None:
        check_arity("causal_window", len(operands), 1)
        if self.width < 1 or operands[0].rank < 2:
            raise ShapeError(f"causal_window: x is [B, S, …], got {operands[0]}; the width {self.width}")

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
