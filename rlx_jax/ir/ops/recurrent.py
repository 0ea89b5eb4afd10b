"""Recurrences along the sequence: the gated delta rule, the selective scan, and the causal convolution before them.

Axis letters: B batch, S tokens, H heads, K key width, V value width, P head width, N state width, C channels.
A state is f32 whatever the operands are: rounded at every token, it would forget what it is made of. `eval` goes token
by token; `rlx_jax.lowering.lir.recurrent` has the forms that a plan takes for one token and for many.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.errors import ShapeError, wrong_arity
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.ops.custom import jaxpr_flops
from rlx_jax.ir.traits import Initial, Normal, Types, product_traits
from rlx_jax.ir.types import TensorType, is_float, is_static
from rlx_jax.ir.user_functions import TokenStep, inner_jaxprs

F32 = np.dtype(np.float32)
# Tokens that are taken together where there are many.
CHUNK = 64


def check_grouped(op: str, many: Any, few: Any, what: str) -> None:
    """Of two counts of heads the larger is a multiple of the other."""
    if not (is_static(many) and is_static(few)) or int(few) < 1 or int(many) % int(few):
        raise ShapeError(f"{op}: {many} {what} do not divide into {few} groups")


def _exact(subscripts: str, *arrays: Array) -> Array:
    """A product in f32 on any device. XLA:CPU runs it forty times as fast as the same sum of a multiplication."""
    return jnp.einsum(subscripts, *arrays, precision=lax.Precision.HIGHEST)


def _over_tokens(step: Any, state: Array, operands: Sequence[Array], every: bool, dtype: Any) -> tuple[Array, ...]:
    """`step(state, *tokens) → (state, result)` over `[B, S, …]`: results, the state after, with `every` all of them."""

    def one(held: Array, tokens: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        after, out = step(held, *tokens)
        return after, (out.astype(dtype), after) if every else (out.astype(dtype),)

    last, kept = lax.scan(one, state, tuple(jnp.moveaxis(x, 1, 0).astype(jnp.float32) for x in operands))
    out, *states = (jnp.moveaxis(x, 0, 1) for x in kept)
    return (out, last, *states)


# -- the gated delta rule ----------------------------------------------------------------------


def _delta_flops(op: Any, operands: Types, results: Types) -> int:
    """Three products of the state with a vector at each token: read, write, query."""
    _, k, v, *_ = operands
    return 6 * v.size * int(k.shape[3])


def _chunked(v: TensorType, inner: int, state: TensorType, kept: int, states: int) -> int:
    """Scratch bytes of a scan in chunks of `CHUNK`, f32: of each head `kept` matrices between tokens and `kept` rows of
    `inner` and of the width of v for each token, and the state before each chunk `states` times. One token needs
    the operands with time first, and of each a copy."""
    batch, tokens, heads, width = map(int, v.shape)
    if tokens == 1:
        return 2 * state.nbytes
    chunks = -(-tokens // CHUNK)
    rows = kept * (CHUNK + inner + width)
    return 4 * batch * heads * (chunks * CHUNK * rows + states * (chunks + 1) * inner * width)


def _delta_workspace(op: Any, operands: Types, results: Types) -> int:
    return _chunked(operands[2], int(operands[1].shape[3]), results[1], kept=4, states=2)


@dataclass(frozen=True)
class GatedDeltaOp(Mir):
    """The gated delta rule. For each token t and value head, with a state S `[K, V]`:
    `S ← e^{g_t} S`, `S ← S + k_t ⊗ β_t (v_t − Sᵀ k_t)`, `o_t = scale · Sᵀ q_t`.

    Operands: q, k `[B,S,Hk,K]`, v `[B,S,Hv,V]`, g (the logarithm of the decay, ≤ 0) and beta `[B,S,Hv]` in any floating
    dtype, and where `held` the state at the start `[B,Hv,K,V]` f32, else zeros. Value head h reads key head
    h // (Hv/Hk). Results: o `[B,S,Hv,V]` in the dtype of v, the state after the last token, and with `every` those
    after each token `[B,S,Hv,K,V]`. `scale` is K^−½ unless given. A token with g = 0 and β = 0 leaves the state as it
    is. Sums are in f32.

    Source: Yang et al., Gated Delta Networks, arXiv:2412.06464, equation 10.
    """

    traits = replace(product_traits(_delta_flops), narrows=3, pinned=False, workspace=_delta_workspace)
    operands = "q:float[B,S,G,K] k:q[B,S,G,K] v:q[B,S,H,V] g:float[B,S,H] beta:float[B,S,H] state?held:f32[B,H,K,V]"

    scale: float | None = None
    held: bool = False
    every: bool = False

    def check(self, *operands: TensorType) -> None:
        check_grouped("gated_delta", operands[2].shape[2], operands[1].shape[2], "value heads")

    def factor(self, width: int) -> float:
        """What the result is multiplied by."""
        return width**-0.5 if self.scale is None else self.scale

    def begin(self, q: Array, k: Array, v: Array, g: Array, beta: Array, *start: Array) -> Array:
        """The state at the start."""
        return start[0] if start else jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        return _over_tokens(self.step, self.begin(*operands), operands[:5], self.every, operands[2].dtype)

    def step(self, state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
        """One token, all operands f32 without the axis S: the state after, and o.

        The result is written with the state before, so that both are read from it at once.
        """
        batch, heads, width = v.shape
        groups = k.shape[1]
        held = state.reshape(batch, groups, heads // groups, k.shape[2], width)
        v, g, beta = (x.reshape(batch, groups, heads // groups, *x.shape[2:]) for x in (v, g, beta))
        decay = jnp.exp(g)[..., None]
        seen = decay[..., None] * _exact("bgrkv,bgnk->bgrnv", held, jnp.stack([q, k], axis=2))
        delta = beta[..., None] * (v - seen[:, :, :, 1])
        along = jnp.sum(q * k, axis=-1)[:, :, None, None]
        out = self.factor(k.shape[2]) * (seen[:, :, :, 0] + along * delta)
        after = decay[..., None] * held + k[:, :, None, :, None] * delta[..., None, :]
        return after.reshape(state.shape), out.reshape(batch, heads, width)


# -- the selective scan ------------------------------------------------------------------------


def _scan_flops(op: Any, operands: Types, results: Types) -> int:
    """Two products of the state with a vector at each token: write, query."""
    x, _, _, b, *_ = operands
    return 4 * x.size * int(b.shape[3])


def _scan_workspace(op: Any, operands: Types, results: Types) -> int:
    return _chunked(operands[0], int(operands[3].shape[3]), results[1], kept=3, states=3)


@dataclass(frozen=True)
class SelectiveScanOp(Mir):
    """A linear recurrence whose steps hang on the token. For each token t and head, with a state h `[P, N]`:
    `h ← e^{Δ_t A} h + Δ_t x_t ⊗ B_t`, `y_t = h C_t`.

    Operands: x `[B,S,H,P]`, Δ `[B,S,H]` (> 0, any floating dtype), A `[H]` or `[H,N]` (< 0: `−exp(A_log)`), B and C
    `[B,S,G,N]`, and where `held` the state at the start `[B,H,P,N]` f32, else zeros. Head h reads group h // (H/G).
    Results: y `[B,S,H,P]` in the dtype of x, the state after the last token, and with `every` those after each token
    `[B,S,H,P,N]`. A token with Δ = 0 leaves the state as it is. Sums are in f32.

    A `[H]` is Mamba-2's (Dao and Gu, arXiv:2405.21060, section 6); A `[H,N]` with P = 1 is Mamba's (arXiv:2312.00752).
    """

    traits = replace(product_traits(_scan_flops), narrows=1, pinned=False, workspace=_scan_workspace)
    operands = "x:float[B,S,H,P] dt:float[B,S,H] a:float[H,…] b:float[B,S,G,N] c:float[B,S,G,N] state?held:f32[B,H,P,N]"

    held: bool = False
    every: bool = False

    def check(self, *operands: TensorType) -> None:
        x, _, a, b, *_ = operands
        check_grouped("selective_scan", x.shape[2], b.shape[2], "heads")
        if a.shape[1:] not in ((), b.shape[3:]):
            raise ShapeError(f"selective_scan: A is [H], or [H, N] beside B {b}, got {a}").of(2)

    def begin(self, x: Array, dt: Array, a: Array, b: Array, c: Array, *start: Array) -> Array:
        """The state at the start."""
        return start[0] if start else jnp.zeros((x.shape[0], *x.shape[2:], b.shape[3]), jnp.float32)

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        x, dt, a, b, c, *_ = operands

        def step(held: Array, x: Array, dt: Array, b: Array, c: Array) -> tuple[Array, Array]:
            return self.step(held, x, dt, a.astype(jnp.float32), b, c)

        return _over_tokens(step, self.begin(*operands), (x, dt, b, c), self.every, x.dtype)

    def step(self, state: Array, x: Array, dt: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        """One token, all operands f32 without the axis S: the state after, and y."""
        batch, heads, width = x.shape
        groups = b.shape[1]
        held = state.reshape(batch, groups, heads // groups, width, b.shape[2])
        decay = jnp.exp(dt[:, :, None] * a.reshape(1, heads, -1)).reshape(batch, groups, heads // groups, 1, -1)
        moved = (dt[:, :, None] * x).reshape(batch, groups, heads // groups, width)
        after = decay * held + moved[..., None] * b[:, :, None, None]
        out = _exact("bgrpn,bgn->bgrp", after, c)
        return after.reshape(state.shape), out.reshape(x.shape)


# -- the causal convolution --------------------------------------------------------------------


@dataclass(frozen=True)
class CausalConvOp(Mir):
    """A convolution of each channel with its own window: `y[b,t,c] = Σⱼ w[c,j] · z[b,t+j,c] + bias[c]`.

    Operands: z `[B,S+J−1,C]`, J−1 rows of the past and S new ones, w `[C,J]`, and with `bias` that `[C]`. Result
    `[B,S,C]` in the dtype of z. The last entry of a window is the token's own. Sums are in f32.
    """

    traits = replace(product_traits(lambda op, x, out: 2 * out[0].size * int(x[1].shape[1])), pinned=False)
    operands = "z:float[B,_,C] w:z[C,J!] bias?bias:z[C]"

    bias: bool = False

    def check(self, *operands: TensorType) -> None:
        z, w = operands[:2]
        if is_static(z.shape[1]) and z.shape[1] < w.shape[1]:
            raise ShapeError(f"causal_conv: windows of {w.shape[1]} do not fit {z}").of(0, 1)

    def eval(self, z: Array, w: Array, *bias: Array) -> Array:
        wide, rows, taps = w.astype(jnp.float32), z.astype(jnp.float32), w.shape[1]
        tokens = z.shape[1] - taps + 1
        parts = (lax.slice_in_dim(rows, j, j + tokens, axis=1) * wide[None, None, :, j] for j in range(taps))
        total = functools.reduce(jnp.add, parts)
        return (total + bias[0].astype(jnp.float32)[None, None] if bias else total).astype(z.dtype)

    def initial(self, place: int, weight: TensorType) -> Initial:
        return Normal(int(weight.shape[1])) if place == 1 else 0.0


# -- a step over the tokens of a sequence ------------------------------------------------------


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
        total += sum(int(v.aval.size) * int(v.aval.dtype.itemsize) for v in eqn.outvars)
        total += sum(map(_computed, inner_jaxprs(eqn)))
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

    traits = replace(product_traits(_flops), narrows=0, workspace=_workspace, stored=False)

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
