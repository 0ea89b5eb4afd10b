"""The block `Qwen35MtpHead` in plain NumPy, float64: one row and one head at a time.

Source: its definition, 29 inputs in the order of the arguments below; DeepSeek-V3 (arXiv 2412.19437, section 2.2), for
the merge before one layer. The layer is the full-attention layer of Qwen3.5, and `tests/test_transcripts.py` compares
with that of transformers.
"""

import math

import numpy as np

from tests.oracles.gated_delta import sigmoid
from tests.oracles.numpy_reference import ACTIVATIONS, Array, Ids, softmax


def rms(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """`x / sqrt(mean x² + ε) · weight + bias` over the last axis. The weight is used as it is: callers add the 1."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight + bias)


def turned(x: Array, cos: Array, sin: Array, n_rot: int) -> Array:
    """One head `[S, D]`, its first `n_rot` columns turned: column i with column i + n_rot / 2, the others as they are.

    cos and sin are `[S, n_rot / 2]` or wider; the first n_rot / 2 columns count.
    """
    half = n_rot // 2
    c, s = cos[:, :half], sin[:, :half]
    a, b, rest = x[:, :half], x[:, half:n_rot], x[:, n_rot:]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def mtp_head(
    h_pre_norm: Array, input_ids: Ids, cos: Array, sin: Array, last_token_idx: Ids, embed_w: Array, hnorm_w: Array,
    hnorm_b: Array, enorm_w: Array, enorm_b: Array, eh_w: Array, attn_norm_w: Array, attn_norm_b: Array,
    q_gate_w: Array, k_w: Array, v_w: Array, q_norm_w: Array, q_norm_b: Array, k_norm_w: Array, k_norm_b: Array,
    o_w: Array, post_norm_w: Array, post_norm_b: Array, gate_w: Array, up_w: Array, down_w: Array, head_norm_w: Array,
    head_norm_b: Array, lm_head_w: Array, *, heads: int, kv_heads: int, head_dim: int, n_rot: int, eps: float,
) -> Array:  # fmt: skip
    """Logits `[B, 1, mtp_vocab]` of the token at `last_token_idx [B]` of each row.

    `h_pre_norm [B, S, E]`; `input_ids [B, S]`, each position's *next* token; `cos`, `sin [S, …]` or `[B, S, …]`;
    `embed_w [V, E]`; `eh_w [2E, E]`, whose first E rows meet the embedding; `q_gate_w [E, 2 · heads · D]`, for each
    head D columns of the query and then D of its gate; `k_w`, `v_w [E, kv_heads · D]`; norms of heads `[D]`, others
    `[E]`; `o_w [heads · D, E]`; `gate_w`, `up_w [E, F]`, `down_w [F, E]`; `lm_head_w [E, mtp_vocab]`.

        c = [rms(embed(ids)) ‖ rms(h)] eh;   c ← c + (causal attention · σ(gate)) o;   c ← c + swiglu(rms(c))
        logits = rms(c[last]) lm_head
    """
    out = []
    for b in range(len(h_pre_norm)):
        row_cos, row_sin = (t[b] if t.ndim == 3 else t for t in (cos, sin))
        h = rms(h_pre_norm[b], hnorm_w, hnorm_b, eps)
        e = rms(embed_w[input_ids[b]], enorm_w, enorm_b, eps)
        x = np.concatenate([e, h], axis=-1) @ eh_w
        a = rms(x, attn_norm_w, attn_norm_b, eps)
        query_gate = (a @ q_gate_w).reshape(len(a), heads, 2 * head_dim)
        keys, values = ((a @ m).reshape(len(a), kv_heads, head_dim) for m in (k_w, v_w))
        later = np.subtract.outer(np.arange(len(a)), np.arange(len(a))) < 0
        context = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            q = turned(rms(query_gate[:, head, :head_dim], q_norm_w, q_norm_b, eps), row_cos, row_sin, n_rot)
            k = turned(rms(keys[:, shared], k_norm_w, k_norm_b, eps), row_cos, row_sin, n_rot)
            seen = softmax(np.where(later, -np.inf, q @ k.T / math.sqrt(head_dim))) @ values[:, shared]
            context.append(seen * sigmoid(query_gate[:, head, head_dim:]))
        x = x + np.concatenate(context, axis=-1) @ o_w
        m = rms(x, post_norm_w, post_norm_b, eps)
        x = x + (ACTIVATIONS["silu"](m @ gate_w) * (m @ up_w)) @ down_w
        out.append(rms(x[last_token_idx[b]], head_norm_w, head_norm_b, eps) @ lm_head_w)
    return np.stack(out)[:, None]
