"""Ops of recurrences along the sequence: gated delta rule, selective scan, causal convolution, and custom steps.

Axis letters: B batch, S tokens, H heads, K key width, V value width, P head width, N state width, C channels. A state
is f32 for every dtype of the operands, because rounding at every token would accumulate. `eval` computes token by
token; `rlx_jax.lowering.lir.recurrent` has faster forms for one token and for many.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ShapeError, wrong_arity
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.operands import Initial, Normal, Types, product_traits
from rlx_jax.ir.ops.custom import jaxpr_flops
from rlx_jax.ir.types import TensorType, is_float, is_static
from rlx_jax.ir.user_functions import TokenStep, inner_jaxprs

# Number of tokens in a chunk of the chunked forms.
CHUNK = 64


def check_grouped(op: str, many: Any, few: Any, label: str) -> None:
    """Check that `many` heads are a multiple of `few` groups; `label` names the heads in the message.

    Raises:
        ShapeError: they are not, or a number is symbolic.
    """
    if not (is_static(many) and is_static(few)) or int(few) < 1 or int(many) % int(few):
        raise ShapeError(f"{op}: {many} {label} do not divide into {few} groups")


def _exact(subscripts: str, *arrays: Array) -> Array:
    """Return an einsum with full f32 precision on every device.

    XLA:CPU runs it forty times as fast as an elementwise product followed by a sum.
    """
    return jnp.einsum(subscripts, *arrays, precision=lax.Precision.HIGHEST)


def _over_tokens(step: Any, state: Array, operands: Sequence[Array], every: bool, dtype: Any) -> tuple[Array, ...]:
    """Scan `step(state, *tokens) → (state, result)` over operands `[B, S, …]`, as f32.

    Returns:
        The results `[B, S, …]` in `dtype`, the last state, and with `every` the state after each token `[B, S, …]`.
    """

    def scan_step(state: Array, tokens: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        new_state, out = step(state, *tokens)
        return new_state, (out.astype(dtype), new_state) if every else (out.astype(dtype),)

    last_state, stacked = lax.scan(scan_step, state, tuple(jnp.moveaxis(x, 1, 0).astype(jnp.float32) for x in operands))
    # The scan has time first, as it stacks its results.
    out, *states = (jnp.moveaxis(x, 0, 1) for x in stacked)
    return (out, last_state, *states)


# -- the gated delta rule ----------------------------------------------------------------------


def _delta_flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of three products of the state with a vector for each token: read, write, query."""
    _, k, v, *_ = operands
    return 6 * v.size * int(k.shape[3])


def _chunked_scan_bytes(
    op: Any, operands: Types, results: Types, v: int, inner: int, num_matrices: int, states: int
) -> int:
    """Return the scratch bytes of a scan in chunks of `CHUNK` tokens, all f32.

    Args:
        op, operands, results: the op, whose second result is the state.
        v: index of the values `[B,S,H,V]` among the operands.
        inner: index of the operand whose last axis is the state's other axis.
        num_matrices: number of token-by-token matrices per head and chunk, and of rows of both widths per token.
        states: number of copies of the state before each chunk.

    Returns:
        The bytes; for a single token, which needs no chunks, the bytes of two states.
    """
    batch, tokens, heads, width = map(int, operands[v].shape)
    if tokens == 1:  # one step without chunks
        return 2 * results[1].nbytes
    chunks, size = -(-tokens // CHUNK), int(operands[inner].shape[3])
    rows = num_matrices * (CHUNK + size + width)
    return 4 * batch * heads * (chunks * CHUNK * rows + states * (chunks + 1) * size * width)


_delta_workspace = functools.partial(_chunked_scan_bytes, v=2, inner=1, num_matrices=5, states=2)
_scan_workspace = functools.partial(_chunked_scan_bytes, v=0, inner=3, num_matrices=3, states=3)


@dataclass(frozen=True)
class GatedDeltaOp(Mir):
    """Gated delta rule, a linear recurrence with a state S `[K, V]` for each value head. For each token t:

        S ← e^{g_t} S        S ← S + k_t ⊗ β_t (v_t − Sᵀ k_t)        o_t = scale · Sᵀ q_t

    Operands: q, k `[B,S,Hk,K]`; v `[B,S,Hv,V]`; g (logarithm of the decay, ≤ 0) and beta `[B,S,Hv]` in any floating
    dtype; with `from_state` the initial state `[B,Hv,K,V]` f32, which is zeros otherwise. Value head h reads key head
    h // (Hv/Hk).

    Results: o `[B,S,Hv,V]` in the dtype of v; the state after the last token; with `every` the state after each token
    `[B,S,Hv,K,V]`. `scale` is K^−½ by default. A token with g = 0 and β = 0 leaves the state unchanged, which padding
    relies on. Sums are in f32.

    Source: Yang et al., Gated Delta Networks, arXiv:2412.06464, equation 10.
    """

    traits = replace(product_traits(_delta_flops), narrows=3, pinned=False, workspace=_delta_workspace)
    operands = (
        "q:float[B,S,G,K] k:q[B,S,G,K] v:q[B,S,H,V] g:float[B,S,H] beta:float[B,S,H] state?from_state:f32[B,H,K,V]"
    )

    scale: float | None = None
    from_state: bool = False
    every: bool = False

    def check(self, *operands: TensorType) -> None:
        check_grouped("gated_delta", operands[2].shape[2], operands[1].shape[2], "value heads")

    def factor(self, width: int) -> float:
        """Return the factor of the result for keys of this `width`: `scale`, by default width^−½."""
        return width**-0.5 if self.scale is None else self.scale

    def initial_state(self, q: Array, k: Array, v: Array, g: Array, beta: Array, *start: Array) -> Array:
        """Return the initial state: the operand `start` if there is one, else zeros."""
        return start[0] if start else jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        return _over_tokens(self.step, self.initial_state(*operands), operands[:5], self.every, operands[2].dtype)

    def step(self, state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
        """Compute one token and return the new state and o; all operands are f32 without the axis S.

        o is computed from the old state, so that one product reads the state for both q and k.
        """
        batch, heads, width = v.shape
        groups = k.shape[1]
        grouped = state.reshape(batch, groups, heads // groups, k.shape[2], width)
        v, g, beta = (x.reshape(batch, groups, heads // groups, *x.shape[2:]) for x in (v, g, beta))
        decay = jnp.exp(g)[..., None]
        readout = decay[..., None] * _exact("bgrkv,bgnk->bgrnv", grouped, jnp.stack([q, k], axis=2))
        delta = beta[..., None] * (v - readout[:, :, :, 1])
        qk = jnp.sum(q * k, axis=-1)[:, :, None, None]
        out = self.factor(k.shape[2]) * (readout[:, :, :, 0] + qk * delta)
        new_state = decay[..., None] * grouped + k[:, :, None, :, None] * delta[..., None, :]
        return new_state.reshape(state.shape), out.reshape(batch, heads, width)


# -- the selective scan ------------------------------------------------------------------------


def _scan_flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of two products of the state with a vector for each token: write, query."""
    x, _, _, b, *_ = operands
    return 4 * x.size * int(b.shape[3])


@dataclass(frozen=True)
class SelectiveScanOp(Mir):
    """Selective scan, a linear recurrence with a time step per token and a state h `[P, N]` per head. For each token t:

        h ← e^{Δ_t A} h + Δ_t x_t ⊗ B_t        y_t = h C_t

    Operands: x `[B,S,H,P]`; Δ `[B,S,H]` (> 0, any floating dtype); A `[H]` or `[H,N]` (< 0: `−exp(A_log)`); B and C
    `[B,S,G,N]`; with `from_state` the initial state `[B,H,P,N]` f32, which is zeros otherwise. Head h reads group
    h // (H/G).

    Results: y `[B,S,H,P]` in the dtype of x; the state after the last token; with `every` the state after each token
    `[B,S,H,P,N]`. A token with Δ = 0 leaves the state unchanged, which padding relies on. Sums are in f32.

    A `[H]` is the form of Mamba-2 (Dao and Gu, arXiv:2405.21060, section 6); A `[H,N]` with P = 1 the form of Mamba
    (arXiv:2312.00752).
    """

    traits = replace(product_traits(_scan_flops), narrows=1, pinned=False, workspace=_scan_workspace)
    operands = (
        "x:float[B,S,H,P] dt:float[B,S,H] a:float[H,…] b:float[B,S,G,N] c:float[B,S,G,N] state?from_state:f32[B,H,P,N]"
    )

    from_state: bool = False
    every: bool = False

    def check(self, x: TensorType, dt: TensorType, a: TensorType, b: TensorType, *_: TensorType) -> None:
        check_grouped("selective_scan", x.shape[2], b.shape[2], "heads")
        if a.shape[1:] not in ((), b.shape[3:]):
            raise ShapeError(f"selective_scan: A is [H], or [H, N] with B {b}, got {a}").at_operands(2)

    def initial_state(self, x: Array, dt: Array, a: Array, b: Array, c: Array, *start: Array) -> Array:
        """Return the initial state: the operand `start` if there is one, else zeros."""
        return start[0] if start else jnp.zeros((x.shape[0], *x.shape[2:], b.shape[3]), jnp.float32)

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        x, dt, a, b, c, *_ = operands

        def step(state: Array, x: Array, dt: Array, b: Array, c: Array) -> tuple[Array, Array]:
            return self.step(state, x, dt, a.astype(jnp.float32), b, c)

        return _over_tokens(step, self.initial_state(*operands), (x, dt, b, c), self.every, x.dtype)

    def step(self, state: Array, x: Array, dt: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        """Compute one token and return the new state and y; all operands are f32 without the axis S."""
        batch, heads, width = x.shape
        groups = b.shape[1]
        grouped = state.reshape(batch, groups, heads // groups, width, b.shape[2])
        decay = jnp.exp(dt[:, :, None] * a.reshape(1, heads, -1)).reshape(batch, groups, heads // groups, 1, -1)
        inputs = (dt[:, :, None] * x).reshape(batch, groups, heads // groups, width)
        new_state = decay * grouped + inputs[..., None] * b[:, :, None, None]
        out = _exact("bgrpn,bgn->bgrp", new_state, c)
        return new_state.reshape(state.shape), out.reshape(x.shape)


# -- the causal convolution --------------------------------------------------------------------


@dataclass(frozen=True)
class CausalConvOp(Mir):
    """Causal depthwise convolution: `y[b,t,c] = Σⱼ w[c,j] · z[b,t+j,c] + bias[c]`.

    Operands: z `[B,S+J−1,C]`, which has J−1 rows of preceding context and S new rows; w `[C,J]`; with `bias` a bias
    `[C]`. Result: `[B,S,C]` in the dtype of z. The last entry of a window multiplies the token itself. Sums are in f32.
    """

    traits = replace(product_traits(lambda op, x, out: 2 * out[0].size * int(x[1].shape[1])), pinned=False)
    operands = "z:float[B,_,C] w:z[C,J!] bias?bias:z[C]"

    bias: bool = False

    def check(self, z: TensorType, w: TensorType, *bias: TensorType) -> None:
        if is_static(z.shape[1]) and z.shape[1] < w.shape[1]:
            raise ShapeError(f"causal_conv: windows of {w.shape[1]} do not fit {z}").at_operands(0, 1)

    def eval(self, z: Array, w: Array, *bias: Array) -> Array:
        weights, rows, num_taps = w.astype(jnp.float32), z.astype(jnp.float32), w.shape[1]
        tokens = z.shape[1] - num_taps + 1
        parts = (lax.slice_in_dim(rows, j, j + tokens, axis=1) * weights[None, None, :, j] for j in range(num_taps))
        total = functools.reduce(jnp.add, parts)
        return (total + bias[0].astype(jnp.float32)[None, None] if bias else total).astype(z.dtype)

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        return Normal(int(weight.shape[1])) if operand_index == 1 else 0.0


# -- custom steps over the tokens of a sequence ------------------------------------------------


def _flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of the step's products, for every token of every row."""
    batch, tokens = operands[op.states].shape[:2]
    rows: int = int(batch) * int(tokens)
    return rows * jaxpr_flops(op.step.jaxpr)


def _workspace(op: Any, operands: Types, results: Types) -> int:
    """Return the scratch bytes of a scan.

    They are the operands and results with time as the first axis, as the loop slices and stacks them; everything that
    one step computes, for each row, twice; and f32 copies of narrower operands.
    """
    batch, tokens = operands[op.states].shape[:2]
    time_first = sum(t.nbytes for t in (*operands[op.states : op.states + op.tokens], *results))
    step_bytes = _computed_bytes(op.step.jaxpr)
    f32_copies = sum(4 * t.size for t in operands if is_float(t.dtype) and t.dtype.itemsize < 4)
    return (time_first if int(tokens) > 1 else 0) + 2 * int(batch) * step_bytes + f32_copies


def _computed_bytes(jaxpr: Any) -> int:
    """Return the bytes of all values that a jaxpr computes; the body of a call or loop counts once."""
    total = 0
    for eqn in jaxpr.eqns:
        total += sum(int(v.aval.size) * int(v.aval.dtype.itemsize) for v in eqn.outvars)
        total += sum(map(_computed_bytes, inner_jaxprs(eqn)))
    return total


@dataclass(frozen=True)
class TokenScan(Mir):
    """Run a custom step for each token of each row: `state, y_t = step(state, x_t, *params)`.

    Operands: `states` arrays of the initial state, `[B, …]`, or `[…]` or one number if all rows start with the same;
    `tokens` values `[B, S, …]`; the parameters; with `ragged`, lengths `[B]`, from which on the state of a row does not
    change.

    Results: y `[B, S, …]`; the state after the last token `[B, …]`; with `every`, the state after each token
    `[B, S, …]`. The loop runs `unroll` tokens per iteration; None lets the compiler choose. The step receives f32 for
    narrower floats; a floating y has the dtype of the first floating x.
    """

    traits = replace(product_traits(_flops), narrows=0, workspace=_workspace, stored=False)
    notation = "token_scan({step.label}{ragged?, ragged}{every?, every})"

    step: TokenStep
    states: int
    tokens: int
    ragged: bool = False
    every: bool = False
    unroll: int | None = None
    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        num_operands = len(self.step.operand_types) + self.ragged
        if len(operands) != num_operands:
            raise wrong_arity("token_scan", str(num_operands), len(operands))
        xs = operands[self.states : self.states + self.tokens]
        if any(x.rank < 2 or x.shape[:2] != xs[0].shape[:2] for x in xs):
            raise ShapeError(f"token_scan: token operands are [B, S, …], got {', '.join(map(str, xs))}")
        for number, (operand, expected) in enumerate(zip(operands, self.step.operand_types, strict=False)):
            num_leading = 2 if self.states <= number < self.states + self.tokens else 0
            shape = operand.shape[num_leading:]
            is_state = number < self.states and (shape == () or shape[1:] == expected.shape)
            if not (is_state or shape == expected.shape):
                raise ShapeError(f"token_scan: the step takes {expected} as argument {number}, got {operand}")

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        types.captured_arrays[self] = self.step.arrays  # they count towards the limit of constants in a program
        return super().infer(types, *operands)

    def eval(self, *arrays: Array) -> tuple[Array, ...]:
        num_states, num_batched = self.states, self.states + self.tokens
        batch, count = arrays[num_states].shape[:2]
        floats = [x.dtype for x in arrays[num_states:num_batched] if is_float(x.dtype)]
        args = [a.astype(t.dtype) for a, t in zip(arrays, self.step.operand_types, strict=False)]
        shapes = [(batch, *t.shape) for t in self.step.operand_types[:num_states]]
        state = [
            a if a.ndim == len(s) else jnp.broadcast_to(a, s) for a, s in zip(args[:num_states], shapes, strict=True)
        ]
        xs, params = args[num_states:num_batched], args[num_batched:]
        axes = (0,) * num_batched + (None,) * len(params)
        rows = jax.vmap(self.step.function(self.precision), in_axes=axes)
        lengths = arrays[-1] if self.ragged else None

        def scan_step(state: Sequence[Array], entry: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
            at, x = entry
            out = rows(*state, *x, *params)
            new_state = [a.astype(s.dtype) for a, s in zip(out, state, strict=False)]
            if lengths is not None:
                new_state = [_where(at < lengths, a, s) for a, s in zip(new_state, state, strict=True)]
            ys = [y.astype(floats[0]) if floats and is_float(y.dtype) else y for y in out[num_states:]]
            return new_state, ys + new_state * self.every

        if isinstance(count, int) and count == 1:  # decoding: one step needs no loop
            last_state, outputs = scan_step(state, (jnp.int32(0), [x[:, 0] for x in xs]))
            outputs = [m[:, None] for m in outputs]
        else:
            time_first = [jnp.moveaxis(x, 1, 0) for x in xs]
            entries = (jnp.arange(count, dtype=jnp.int32), time_first)
            last_state, outputs = lax.scan(scan_step, state, entries, unroll=self.unroll or 1)
            outputs = [jnp.moveaxis(m, 0, 1) for m in outputs]
        ys = len(outputs) - num_states * self.every
        return (*outputs[:ys], *last_state, *outputs[ys:])


def _where(rows: Array, new: Array, old: Array) -> Array:
    """Select `new` in the rows where the bools `rows` `[B]` are True, else `old`; both are `[B, …]`."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - 1)), new, old)
