"""A ring of the window's size gives what the full cache gives under a window mask."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax.blocks import LlamaDecoderSpec, RopeTables, llama_prefill_layer_fused
from rlx_jax.ir.ops.attention import AttentionOp, RingStep
from rlx_jax.models.llama import LlamaConfig, weight_specs

HEADS, KV, DIM, VOCAB = 4, 2, 4, 19
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "hidden_act": "silu",
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=5)
@given(
    window=st.sampled_from([1, 3]),  # few shapes: each compiles
    spare=st.integers(0, 2),  # 2: chunks of three tokens are read in place
    chunks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_steps_of_a_ring_read_what_the_window_allows(
    window: int, spare: int, chunks: list[tuple[int, int]], seed: int
) -> None:
    """Every valid query of every chunk, against attention over the whole history."""
    rng = np.random.default_rng(seed)
    op = AttentionOp(HEADS, KV, window=window, extra=("positions", "key_positions"))
    step: Any = RingStep(window).eval
    ring = jnp.zeros((2, window + spare, KV, DIM), jnp.float32)
    ring_k = ring_v = ring
    start = np.zeros(2, np.int32)
    history: list[list[tuple[Any, Any]]] = [[], []]
    for lengths in chunks:
        width = 1 if max(lengths) < 2 else 3
        q, k, v = (rng.standard_normal((2, width, n * DIM)).astype(np.float32) for n in (HEADS, KV, KV))
        new = np.array(lengths, np.int32)
        keys, at, ring_k = step(ring_k, k.reshape(2, width, KV, DIM), start, new)
        values, _, ring_v = step(ring_v, v.reshape(2, width, KV, DIM), start, new)
        rows = start[:, None] + np.arange(width, dtype=np.int32)[None]
        packed = (np.asarray(x).reshape(2, -1, KV * DIM) for x in (keys, values))
        got = np.asarray(op.eval(*map(jnp.asarray, (q, *packed, rows, at))))
        for b in range(2):
            for i in range(lengths[b]):
                history[b].append((k[b, i], v[b, i]))
                seen = history[b][-window:]
                want = attend(q[b, i], np.stack([x for x, _ in seen]), np.stack([x for _, x in seen]))
                np.testing.assert_allclose(got[b, i], want, atol=2e-6)
        start = start + new


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One query `[N·D]` over keys `[T, K·D]`, in float64."""
    out = []
    for head in range(HEADS):
        kv = slice(head // (HEADS // KV) * DIM, (head // (HEADS // KV) + 1) * DIM)
        scores = keys[:, kv].astype(np.float64) @ q[head * DIM : (head + 1) * DIM] * DIM**-0.5
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ values[:, kv])
    return np.concatenate(out)


def windowed(window: int, everywhere: bool = False) -> tuple[rlx.ModelFlow, dict[str, np.ndarray]]:
    """Llama layers with a window, in all but the last or `everywhere`, and random weights."""
    sliding = f"sliding:{window}"
    masks = (sliding, sliding, sliding if everywhere else "causal")
    specs = [LlamaDecoderSpec(num_heads=HEADS, head_dim=DIM, num_kv_heads=KV, mask=m) for m in masks]
    flow = (
        rlx.ModelFlow("windows").input("input_ids", ("batch", "seq"), dtype="int32")
        .rope_tables(RopeTables.theta(DIM)).token_embed()
        .repeat_layers(3, lambda i: llama_prefill_layer_fused(i, specs[i]))
        .final_norm(1e-6).lm_head(VOCAB, 12, tied=False)
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = weight_specs(LlamaConfig.from_hf(CONFIG))
    normal = {k: rng.normal(0, 0.4 * len(s.shape) - 0.4, s.shape) for k, s in shapes.items()}
    return flow, {k: (v + (v.ndim == 1)).astype("f4") for k, v in normal.items()}


@pytest.mark.slow
def test_rings_of_many_rows() -> None:
    """A chunk may copy a ring that it reads as it was."""
    flow, weights = windowed(3)
    lm: Any = rlx.CausalLM(flow, weights, profile=rlx.CompileProfile().replace(buckets={"prompt": [4]}))
    prompt, rows = [3, 1, 4, 1, 5, 9, 2], 800  # 75 KB of each ring, which are seen
    want = lm.generate([prompt], max_new_tokens=6)
    assert lm.generate([prompt] * rows, max_new_tokens=6) == want * rows


def test_a_ring_has_the_size_of_its_window() -> None:
    """And never more slots than the context."""
    flow, weights = windowed(5)
    extend: Any = rlx.compile(flow, weights, program="extend")
    for context, ring in ((24, 5), (4, 4)):
        shapes = {name: a.shape for name, a in extend.init_state(2, context).leaves.items()}
        assert {s[1] for name, s in shapes.items() if name.startswith("layers.2")} == {context}
        assert {s[1] for name, s in shapes.items() if not name.startswith("layers.2")} == {ring}
