"""A step over the tokens of a sequence: `lax.scan` where there are several, the step alone where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.errors import GraphError, ShapeError, wrong_arity
from rlx_jax.ir.captured import MAX_CAPTURED
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.ops.custom import jaxpr_flops
from rlx_jax.ir.token_step import TokenStep
from rlx_jax.ir.traits import ELEMENTWISE, Traits, Types
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array


def _flops(op: Any, operands: Types, results: Types) -> int:
    """Of the products of the step, for each token of each row."""
    batch, tokens = operands[op.states].shape[:2]
    rows: int = int(batch) * int(tokens)
    return rows * jaxpr_flops(op.step.jaxpr)


def _workspace(op: Any, operands: Types, results: Types) -> int:
    """Tokens in front of rows, as the loop cuts and stacks them; and all that one step computes, for each row."""
    batch, tokens = operands[op.states].shape[:2]
    turned = sum(t.nbytes for t in (*operands[op.states : op.states + op.tokens], *results))
    inside = _computed(op.step.jaxpr)
    wide = sum(4 * t.size for t in operands if is_float(t.dtype) and t.dtype.itemsize < 4)  # as the step takes them
    return (turned if int(tokens) > 1 else 0) + 2 * int(batch) * inside + wide


def _computed(jaxpr: Any) -> int:
    """Bytes of all that a jaxpr computes; what its calls and loops do inside counts once."""
    total = 0
    for eqn in jaxpr.eqns:
        items = (item for v in eqn.params.values() for item in (v if isinstance(v, tuple | list) else (v,)))
        inner = (getattr(item, "jaxpr", item) for item in items)  # closed or open
        total += sum(int(v.aval.size) * int(v.aval.dtype.itemsize) for v in eqn.outvars)
        total += sum(_computed(j) for j in inner if hasattr(j, "eqns"))
    return total


@dataclass(frozen=True)
class TokenScan(Mir):
    """`state, y_t = step(state, x_t, *params)` for each token of each row.

    Operands: the state, as `[B, …]` or, where all rows start with the same, as `[…]` or one number; `tokens` values
    `[B, S, …]`; the parameters; where `ragged`, lengths `[B]`: at or behind it the state of a row stays as it is.
    Results: y `[B, S, …]`; the state after the last token `[B, …]`; with `every`, the state after each token
    `[B, S, …]`. The loop takes `unroll` tokens in a turn; where None, as the compiler chooses. The step is given f32
    for narrower floats; floating y come in the dtype of the first floating x.
    """

    traits = Traits(
        "compute", narrows=0, widens=False, pinned=True, flops=_flops, bytes=ELEMENTWISE.bytes, workspace=_workspace,
        view=ELEMENTWISE.view, writes=(), stored=False,
    )  # fmt: skip

    step: TokenStep
    states: int
    tokens: int
    ragged: bool = False
    every: bool = False
    unroll: int | None = None
    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        wanted = len(self.step.given) + self.ragged
        if len(operands) != wanted:
            raise wrong_arity("token_scan", str(wanted), len(operands))
        xs = operands[self.states : self.states + self.tokens]
        if any(x.rank < 2 or x.shape[:2] != xs[0].shape[:2] for x in xs):
            raise ShapeError(f"token_scan: what is read is [B, S, …], got {', '.join(map(str, xs))}")
        for place, (have, want) in enumerate(zip(operands, self.step.given, strict=False)):
            lead = 2 if self.states <= place < self.states + self.tokens else 0
            found = have.shape[lead:]
            state = place < self.states and (found == () or found[1:] == want.shape)
            if not (state or found == want.shape):
                raise ShapeError(f"token_scan: the step takes {want} as argument {place}, got {have}")

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        types.captured[self] = self.step.arrays
        captured = sum(a.nbytes for a in self.step.arrays)
        if captured > MAX_CAPTURED:
            raise GraphError(
                f"{self.text()} captures {captured} bytes of constants, the limit is {MAX_CAPTURED}: name the array as "
                "a weight and give it as a parameter of the step"
            )
        return super().infer(types, *operands)

    def eval(self, *arrays: Array) -> tuple[Array, ...]:
        first, behind = self.states, self.states + self.tokens
        batch, count = arrays[first].shape[:2]
        floats = [x.dtype for x in arrays[first:behind] if is_float(x.dtype)]
        given = [a.astype(t.dtype) for a, t in zip(arrays, self.step.given, strict=False)]
        shapes = [(batch, *t.shape) for t in self.step.given[:first]]
        state = [a if a.ndim == len(s) else jnp.broadcast_to(a, s) for a, s in zip(given[:first], shapes, strict=True)]
        xs, params = given[first:behind], given[behind:]
        axes = (0,) * behind + (None,) * len(params)
        rows = jax.vmap(self.step.function(self.precision), in_axes=axes)
        ends = arrays[-1] if self.ragged else None

        def one(state: Sequence[Array], entry: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
            at, x = entry
            out = rows(*state, *x, *params)
            after = [a.astype(s.dtype) for a, s in zip(out, state, strict=False)]
            if ends is not None:
                after = [_where(at < ends, a, s) for a, s in zip(after, state, strict=True)]
            ys = [y.astype(floats[0]) if floats and is_float(y.dtype) else y for y in out[first:]]
            return after, ys + after * self.every

        if isinstance(count, int) and count == 1:
            last, made = one(state, (jnp.int32(0), [x[:, 0] for x in xs]))
            made = [m[:, None] for m in made]
        else:
            turned = [jnp.moveaxis(x, 1, 0) for x in xs]
            entries = (jnp.arange(count, dtype=jnp.int32), turned)
            last, made = lax.scan(one, state, entries, unroll=self.unroll or 1)
            made = [jnp.moveaxis(m, 0, 1) for m in made]
        ys = len(made) - first * self.every
        return (*made[:ys], *last, *made[ys:])

    def text(self) -> str:
        notes = [", ragged"] * self.ragged + [", every"] * self.every
        return f"token_scan({self.step.label}{''.join(notes)})"


def _where(rows: Array, new: Array, old: Array) -> Array:
    return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - 1)), new, old)
