"""A bias by the positions of queries and keys: ALiBi's, T5's, every third key; T5's with a sink of each head."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from tests.oracles.comparing import assert_close

RNG = np.random.default_rng(5)
HEADS, WIDTH, VOCAB, LAYERS = 3, 6, 17, 2
WEIGHTS = {
    "e": RNG.standard_normal((VOCAB, WIDTH)), "near": RNG.standard_normal((5, HEADS)),
    **{f"{i}.{n}": RNG.standard_normal((WIDTH, WIDTH)) / 3 for i in range(LAYERS) for n in "qkvo"},
    **{f"{i}.near": RNG.standard_normal((5, HEADS)) for i in range(LAYERS)},
    **{f"{i}.sinks": 1 + RNG.standard_normal(HEADS) for i in range(LAYERS)},
}  # fmt: skip
WEIGHTS = {name: w.astype(np.float32) for name, w in WEIGHTS.items()}
SLOPES = np.float32(2.0) ** -np.arange(1, HEADS + 1, dtype=np.float32)
Bias = Callable[[Any, str], Callable[[Any, Any], Any]]
PLACES = np.arange(40)
APART = PLACES[None, :] - PLACES[:, None]


def alibi(emit: Any, layer: str) -> Any:
    return lambda q, k: emit.constant(SLOPES[:, None, None]) * emit.cast(k - q, "f32")


def learned(emit: Any, layer: str) -> Any:
    """One number for each head and distance up to 4, as T5's, from a weight of the layer."""
    table = emit.param(f"{layer}.near")
    return lambda q, k: emit.transpose(emit.gather(table, emit.clip(q - k, 0, 4)), (2, 0, 1))


def every_third(emit: Any, layer: str) -> Any:
    """Keys at a distance that 3 divides alone: what is minus infinity is not read."""
    return lambda q, k: emit.jax(lambda q, k: jnp.where((q - k) % 3 == 0, 0.0, -jnp.inf), q, k)


BIASES: dict[str, tuple[Bias, Callable[[int], Any]]] = {
    "alibi": (alibi, lambda i: SLOPES[:, None, None] * APART),
    "learned": (learned, lambda i: WEIGHTS[f"{i}.near"][np.clip(-APART, 0, 4)].transpose(2, 0, 1)),
    "every third": (every_third, lambda i: np.where(APART % 3 == 0, 0.0, -np.inf)[None]),
}  # fmt: skip
"""What each adds, by layer, and what that is for positions up to 40."""


def flow(bias: Bias, **options: Any) -> rlx.ModelFlow:
    def layer(emit: Any, x: Any, i: int) -> Any:
        q, k, v = (emit.linear(x, f"{i}.{n}") for n in "qkv")
        sinks = f"{i}.sinks" if bias is learned else None
        context = emit.attention(q, k, v, heads=HEADS, bias=bias(emit, str(i)), sinks=sinks, **options)
        return x + emit.linear(context, f"{i}.o")

    made = rlx.ModelFlow("biased").input("tokens", ("batch", "seq"), dtype="int32").embed("e")
    made = made.repeat_layers(LAYERS, lambda i: rlx.blocks.Custom(lambda emit, x: layer(emit, x, i), f"layer{i}"))
    return made if not options.get("causal") else made.linear("e").output("logits")


def held(bias: Bias) -> dict[str, Any]:
    own = ("near", "sinks")
    return {n: w for n, w in WEIGHTS.items() if n != "near" and (bias is learned or not n.endswith(own))}


def alone(ids: Any, added: Callable[[int], Any], causal: bool, window: int = 40) -> Any:
    """The hidden states of one text, in float64; with the sinks of each layer where the bias is the learned one."""
    x, n = WEIGHTS["e"].astype(np.float64)[ids], len(ids)
    keep = (APART[:n, :n] <= 0) & (APART[:n, :n] > -window) if causal else np.ones((n, n), bool)
    for i in range(LAYERS):
        q, k, v = ((x @ WEIGHTS[f"{i}.{m}"].T).reshape(n, HEADS, -1) for m in "qkv")
        scores = np.einsum("shd,thd->hst", q, k) / np.sqrt(q.shape[-1]) + added(i)[:, :n, :n]
        weights = np.exp(np.where(keep, scores, -np.inf))
        total = weights.sum(-1, keepdims=True)
        total = total + np.exp(WEIGHTS[f"{i}.sinks"])[:, None, None] if added is BIASES["learned"][1] else total
        context = np.einsum("hst,thd->shd", weights / total, v).reshape(n, -1)
        x = x + context @ WEIGHTS[f"{i}.o"].T
    return x


@pytest.mark.parametrize(
    ("kind", "window"), [("learned", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("alibi", 4), ("every third", None),
    ))],
)  # fmt: skip
def test_a_model_that_generates(kind: str, window: int | None) -> None:
    """Forward is the formula, and prefill and extend are forward, for rows of several lengths, in a ring too."""
    bias, added = BIASES[kind]
    lm = rlx.CausalLM(flow(bias, causal=True, window=window), held(bias))
    ids = RNG.integers(0, VOCAB, (2, 9))
    want = [alone(row, added, True, window or 40) @ WEIGHTS["e"].T for row in ids]
    assert_close(np.asarray(lm.logits(ids)), np.stack(want))
    logits, state = lm.prefill(ids[:, :4], lengths=[4, 2], max_len=12)
    assert_close(np.asarray(logits)[0], want[0][:4])
    assert_close(np.asarray(logits)[1, :2], want[1][:2])
    more, state = lm.extend(state, [ids[0, 4:7], ids[1, 2:5]], lengths=[2, 3])
    assert_close(np.asarray(more)[0, :2], want[0][4:6])
    assert_close(np.asarray(more)[1], want[1][2:5])
    last, _ = lm.extend(state, [[ids[0, 6]], [ids[1, 5]]], logits="last")
    assert_close(np.asarray(last), np.stack([want[0][6], want[1][5]]))


def test_explicit_counts_kept_keys() -> None:
    """With a mask a key's position is its place among the keys that are kept: rows padded on the left."""
    bias, added = BIASES["learned"]
    ids = RNG.integers(0, VOCAB, (1, 6))
    want = alone(ids[0], added, True) @ WEIGHTS["e"].T
    read = rlx.compile(flow(bias, causal=True).export_kv(), held(bias))(ids[:, :4])
    step = rlx.compile(flow(bias, causal=True), held(bias), program="explicit")
    caches = {f"past_{n}_{i}": read[f"kv.{i}.{n}"] for i in range(LAYERS) for n in "kv"}
    assert_close(np.asarray(step(ids[:, 4:], **caches)["logits"])[0], want[4:])
    padded: dict[str, Any] = {
        name: np.pad(np.asarray(c), ((0, 0), (2, 0), (0, 0)), constant_values=9.0) for name, c in caches.items()
    }
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert_close(np.asarray(step(ids[:, 4:], mask=mask, **padded)["logits"])[0], want[4:])


def test_an_encoder_packs_and_pads(kind: str = "learned") -> None:
    """Texts in one row, and rows that are padded: positions are those in a text."""
    bias, added = BIASES[kind]
    texts = [RNG.integers(0, VOCAB, n).tolist() for n in (3, 7, 1, 5)]
    want = np.stack([alone(t, added, False).mean(0) for t in texts])
    for profile in (None, rlx.CompileProfile().replace(buckets={"prompt": [8], "batch": [4]})):
        encoder = rlx.Encoder(flow(bias), held(bias), profile=profile)
        assert not encoder.own_lengths and bool(encoder.packing) == (profile is not None)
        assert_close(encoder.embed(texts), want)
