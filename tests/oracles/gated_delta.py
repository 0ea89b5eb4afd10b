"""Gated DeltaNet in plain NumPy, float64: one row, one head, one token at a time.

Sources: Yang, Kautz, Hatamizadeh, *Gated Delta Networks* (arXiv 2412.06464); `Qwen3_5GatedDeltaNet` of transformers for
the layer around the recurrence. `tests/test_transcripts.py` compares with it.

Shapes: B rows, S tokens; Hk heads of width dk for queries and keys, Hv heads of width dv for values; Hk divides Hv.
A key head serves Hv / Hk value heads that stand beside each other. A state is `[B, Hv, dk, dv]`, the tail of the
convolution `[B, K − 1, C]`: its last K − 1 inputs. Both start as zeros, and what is returned may be handed in again:
tokens in two calls give what one call gives.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.oracles.numpy_reference import ACTIVATIONS, Array, rms_norm

Weights = Mapping[str, Array]


def l2_norm(x: Array, eps: float = 1e-6) -> Array:
    """`x / sqrt(Σ x² + ε)` over the last axis: ε is added to the sum, and a vector of zeros stays one."""
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps))


def softplus(x: Array) -> Array:
    """`log(1 + eˣ)`."""
    return np.logaddexp(0.0, x)


def sigmoid(x: Array) -> Array:
    """`1 / (1 + e⁻ˣ)`."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def log_decay(a: Array, a_log: Array, dt_bias: Array) -> Array:
    """`g = −exp(A_log) · softplus(a + dt_bias)`: `[..., Hv]`, never above 0."""
    return np.asarray(-np.exp(a_log) * softplus(a + dt_bias))


def gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None = None, scale: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Outputs `[B, S, Hv, dv]` and the last state `[B, Hv, dk, dv]`.

    q and k are `[B, S, Hk, dk]` (their own head counts may differ, each divides Hv), v `[B, S, Hv, dv]`, g and β
    `[B, S, Hv]`; `scale` is `dk^(−1/2)`. q and k are used as they come: callers normalise them. For each row, head, and
    token in turn:

        S ← e^g S;   u = Sᵀ k;   d = β (v − u);   S ← S + k dᵀ;   o = scale · Sᵀ q
    """
    (rows, tokens, heads, dv), dk = v.shape, k.shape[-1]
    scale = dk**-0.5 if scale is None else scale
    last = np.zeros((rows, heads, dk, dv)) if state is None else np.array(state, np.float64)
    out = np.zeros(v.shape)
    for b in range(rows):
        for h in range(heads):
            hq, hk = (h // (heads // x.shape[2]) for x in (q, k))
            s = last[b, h]
            for t in range(tokens):
                key, query = k[b, t, hk], q[b, t, hq]
                s = math.exp(g[b, t, h]) * s
                read = s.T @ key
                s = s + np.outer(key, beta[b, t, h] * (v[b, t, h] - read))
                out[b, t, h] = scale * (s.T @ query)
            last[b, h] = s
    return out, last


def causal_conv(x: Array, w: Array, bias: Array | None = None, tail: Array | None = None) -> tuple[Array, Array]:
    """Each channel of `x [B, S, C]` by itself with `w [C, K]`: outputs `[B, S, C]` and the new tail `[B, K − 1, C]`.

    `y[b, t, c] = Σⱼ w[c, j] · padded[b, t + j, c] + bias[c]`, where `padded` is the tail, or zeros, and then x:
    `w[:, K − 1]` multiplies the token itself. Nothing is applied behind.
    """
    rows, tokens, channels = x.shape
    width = w.shape[1]
    padded = np.concatenate([np.zeros((rows, width - 1, channels)) if tail is None else tail, x], axis=1)
    out = np.zeros(x.shape)
    for t in range(tokens):
        for j in range(width):
            out[:, t] += w[:, j] * padded[:, t + j]
    return out if bias is None else out + bias, padded[:, tokens:]


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """`weight · x / sqrt(mean x² + ε) · silu(gate)` over the last axis: the norm first, then the gate.

    The weight is used as it is, unlike those of Qwen3.5's other norms, to which 1 is added.
    """
    return np.asarray(rms_norm(x, weight, eps) * ACTIVATIONS["silu"](gate))


def gdn_layer(
    config: Mapping[str, Any], w: Weights, name: str, x: Array, tail: Array | None = None, state: Array | None = None,
    keep: Array | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`linear_attn` of Qwen3.5 for `x [B, S, E]`: outputs `[B, S, E]`, the new tail and the new state.

    Keys under `name`: `in_proj_qkv.weight [2 Hk dk + Hv dv, E]`, `in_proj_z.weight [Hv dv, E]`, `in_proj_b.weight`,
    `in_proj_a.weight [Hv, E]`, `conv1d.weight [2 Hk dk + Hv dv, 1, K]`, `A_log`, `dt_bias [Hv]`, `norm.weight [dv]`,
    `out_proj.weight [E, Hv dv]`. `keep [B, S]` is 0 for padding, whose input is set to zeros; β is then 1/2 and the key
    what the convolution makes of the tokens before, so padding *behind* a row still changes its tail and its state.
    """
    hk, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
    rows, tokens = x.shape[:2]
    x = x if keep is None else x * keep[:, :, None]
    z, b, a = (x @ w[f"{name}.in_proj_{part}.weight"].T for part in "zba")
    mixed, tail = causal_conv(x @ w[f"{name}.in_proj_qkv.weight"].T, w[f"{name}.conv1d.weight"][:, 0], None, tail)
    q, k, v = np.split(ACTIVATIONS[config["hidden_act"]](mixed), [hk * dk, 2 * hk * dk], axis=-1)
    out, state = gated_delta(
        l2_norm(q.reshape(rows, tokens, hk, dk)),
        l2_norm(k.reshape(rows, tokens, hk, dk)),
        v.reshape(rows, tokens, hv, dv),
        log_decay(a, w[f"{name}.A_log"], w[f"{name}.dt_bias"]),
        sigmoid(b),
        state,
    )
    gate = z.reshape(rows, tokens, hv, dv)
    normed = gated_rms_norm(out, gate, w[f"{name}.norm.weight"], config["rms_norm_eps"])
    return normed.reshape(rows, tokens, hv * dv) @ w[f"{name}.out_proj.weight"].T, tail, state
