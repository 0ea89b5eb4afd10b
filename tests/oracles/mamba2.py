"""Mamba-2 in plain NumPy, float64: one row, one head, one token at a time.

Sources: Dao, Gu, *Transformers are SSMs* (arXiv 2405.21060), section 6 and listing 1; `Mamba2Mixer` of transformers for
the layer around the recurrence. `tests/test_transcripts.py` compares with it.

Shapes: B rows, S tokens, H heads of width P, G groups, states of N numbers; G divides H, and H / G heads beside each
other share the B and C of a group. A state is `[B, H, P, N]`, the tail of the convolution `[B, K − 1, H P + 2 G N]`.
Both start as zeros, and what is returned may be handed in again: tokens in two calls give what one call gives.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.oracles.gated_delta import causal_conv, softplus
from tests.oracles.numpy_reference import ACTIVATIONS, Array, rms_norm

Weights = Mapping[str, Array]


def time_step(dt: Array, dt_bias: Array, limit: tuple[float, float] = (0.0, math.inf)) -> Array:
    """`softplus(dt + dt_bias)`, and then no less and no more than the limits: `[..., H]`."""
    return np.clip(softplus(dt + dt_bias), *limit)


def ssd(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None = None, state: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Outputs `[B, S, H, P]` and the last state `[B, H, P, N]`.

    x is `[B, S, H, P]`, dt `[B, S, H]` (what `time_step` returns), a `[H]` (negative: `−exp(A_log)`), b and c
    `[B, S, G, N]`, d `[H]`. For each row, head, and token in turn:

        h ← e^(dt a) h + dt x bᵀ;   y = h c + d x
    """
    rows, tokens, heads, width = x.shape
    groups, size = b.shape[2:]
    last = np.zeros((rows, heads, width, size)) if state is None else np.array(state, np.float64)
    out = np.zeros(x.shape)
    for r in range(rows):
        for h in range(heads):
            group, s = h // (heads // groups), last[r, h]
            for t in range(tokens):
                step = dt[r, t, h]
                s = math.exp(step * a[h]) * s + step * np.outer(x[r, t, h], b[r, t, group])
                out[r, t, h] = s @ c[r, t, group]
            last[r, h] = s
    return out if d is None else out + d[:, None] * x, last


def gated_rms_norm(x: Array, gate: Array, weight: Array, groups: int, eps: float) -> Array:
    """`weight · y / sqrt(mean y² + ε)` with `y = x · silu(gate)`: the gate first, then the norm, group by group.

    x, gate `[..., H P]`, weight `[H P]`; the mean is that of H P / groups neighbours.
    """
    parts = np.split(x * ACTIVATIONS["silu"](gate), groups, axis=-1)
    return np.asarray(np.concatenate([rms_norm(part, np.ones(()), eps) for part in parts], axis=-1) * weight)


def mixer(
    config: Mapping[str, Any], w: Weights, name: str, x: Array, tail: Array | None = None, state: Array | None = None,
    keep: Array | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`mixer` of Mamba-2 for `x [B, S, E]`: outputs `[B, S, E]`, the new tail and the new state.

    Keys under `name`, with I = H P = expand · E and C = I + 2 G N: `in_proj.weight [I + C + H, E]` (its rows are gate,
    what is convolved, dt), `conv1d.weight [C, 1, K]`, `conv1d.bias [C]` with `use_conv_bias`, `dt_bias`, `A_log`,
    `D [H]`, `norm.weight [I]`, `out_proj.weight [E, I]`; `in_proj.bias` and `out_proj.bias` with `use_bias`. What is
    convolved is x, B and C beside each other. `keep [B, S]` is 0 for padding: its input, and what the convolution makes
    of it, are set to zeros; its dt is not, so padding *behind* a row still fades its state.

    When transformers decodes one token from a cache it leaves `time_step_limit` out; here it counts, as in a prefill.
    """
    heads, width, groups, size = (config[key] for key in ("num_heads", "head_dim", "n_groups", "state_size"))
    inner = heads * width
    rows, tokens = x.shape[:2]
    x = x if keep is None else x * keep[:, :, None]
    projected = x @ w[f"{name}.in_proj.weight"].T + w.get(f"{name}.in_proj.bias", 0.0)
    gate, mixed, dt = np.split(projected, [inner, 2 * inner + 2 * groups * size], axis=-1)
    mixed, tail = causal_conv(mixed, w[f"{name}.conv1d.weight"][:, 0], w.get(f"{name}.conv1d.bias"), tail)
    mixed = ACTIVATIONS[config["hidden_act"]](mixed)
    mixed = mixed if keep is None else mixed * keep[:, :, None]
    values, b, c = np.split(mixed, [inner, inner + groups * size], axis=-1)
    out, state = ssd(
        values.reshape(rows, tokens, heads, width),
        time_step(dt, w[f"{name}.dt_bias"], tuple(config["time_step_limit"])),
        -np.exp(w[f"{name}.A_log"]),
        b.reshape(rows, tokens, groups, size),
        c.reshape(rows, tokens, groups, size),
        w[f"{name}.D"],
        state,
    )
    out = out.reshape(rows, tokens, inner)
    normed = gated_rms_norm(out, gate, w[f"{name}.norm.weight"], groups, config["layer_norm_epsilon"])
    return normed @ w[f"{name}.out_proj.weight"].T + w.get(f"{name}.out_proj.bias", 0.0), tail, state
