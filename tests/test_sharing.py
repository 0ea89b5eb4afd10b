"""Weights that layers share: one leaf each, the same numbers and gradients scanned as written out."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import BlockStage, Custom, Linear, LlamaDecoderSpec
from rlx_jax.ir.param import stored_keys
from tests.small import llama_weights

H = 4
X = np.random.default_rng(0).standard_normal((2, 3, H)).astype(np.float32)
Keys = list[tuple[str, str, str]]
"""Of each layer: the weights that its first two products read, side by side, and the one that its last reads."""


def matrix(key: str) -> np.ndarray:
    """A weight that keeps the size of what it multiplies."""
    return (np.random.default_rng(sum(map(ord, key))).standard_normal((H, H)) / H**0.5).astype(np.float32)


def flow_of(keys: Keys, head: str = "") -> rlx.ModelFlow:
    """`x = tanh(x Aᵀ + x Bᵀ) C + x` for each layer, then the head, `x Wᵀ`."""

    def layer(i: int) -> BlockStage:
        a, b, c = keys[i]

        def run(emit: Any, x: Any) -> Any:
            h = emit.tanh(emit.linear(x, a) + emit.linear(x, b))
            return emit.linear(h, c, transpose=False) + x

        return Custom(run, "mix")

    flow = rlx.ModelFlow("m").input("x", ("b", "s", H)).repeat_layers(len(keys), layer)
    return flow.linear(head) if head else flow


def by_hand(weights: Any, keys: Keys, head: str) -> Any:
    """The same in plain JAX, every weight an entry of one dict."""
    x = jnp.asarray(X)
    for a, b, c in keys:
        x = jnp.tanh(x @ weights[a].T + x @ weights[b].T) @ weights[c] + x
    return x @ weights[head].T if head else x


def check(keys: Keys, head: str = "", program: str = "train", **tables: Any) -> Any:
    """Outputs, gradients, leaves and a step against plain JAX; returns the model."""
    weights = {k: matrix(k) for k in dict.fromkeys((*(k for layer in keys for k in layer), *([head] if head else [])))}
    profile = rlx.CompileProfile().replace(**tables)
    model: Any = rlx.compile(flow_of(keys, head), weights, program=program, profile=profile)

    held = Counter(key.key for leaf in model.programs.layout.params.values() for key in stored_keys(leaf))
    assert held == dict.fromkeys(weights, 1), "each weight is in one place"
    assert sum(a.size for a in model.params.values()) == sum(w.size for w in weights.values())
    for key, array in model.weights().items():
        np.testing.assert_array_equal(array, weights[key])

    np.testing.assert_allclose(model(X), by_hand(weights, keys, head), rtol=2e-5, atol=2e-5)
    slopes = jax.jit(jax.grad(lambda p: (model.apply(p, X) ** 2).sum()))(model.params)
    want = jax.jit(jax.grad(lambda w: (by_hand(w, keys, head) ** 2).sum()))(weights)
    scale = max(float(np.abs(g).max()) for g in want.values())
    for key, slope in model.weights(slopes).items():
        np.testing.assert_allclose(slope, want[key], rtol=2e-4, atol=2e-5 * scale, err_msg=key)
    return model


A, B, C = ([f"{name}.{i}" for i in range(6)] for name in "abc")
SHARED: dict[str, tuple[Keys, str]] = {
    "blocks of layers": ([(A[i // 2], B[i // 2], C[i // 2]) for i in range(4)], ""),
    "a chain": ([(A[i], B[i], A[i + 1]) for i in range(3)], ""),
    "in other places": ([(A[i], A[2 - i], C[i]) for i in range(3)], ""),
    "by a layer that is left over": ([(A[i % 2], B[i], C[i]) for i in range(5)], B[4]),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param("a chain", marks=pytest.mark.slow), "in other places", "by a layer that is left over"]
)
def test_shared_weights_are_one_leaf(name: str) -> None:
    """`program="train"` scans its layers by default."""
    check(*SHARED[name])


STORED: dict[str, dict[str, Any]] = {
    "merged, in_out": {"backend": {"cpu": {"merge": True, "weight_layout": "in_out"}}},
    "unrolled": {"layers": {"roll": "unroll"}, "backend": {"cpu": {"merge": True, "weight_layout": "in_out"}}},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize(("name", "how"), [("blocks of layers", "merged, in_out"), ("in other places", "unrolled")])
def test_however_they_are_stored(name: str, how: str) -> None:
    """Merging and turning keep what is shared in one place."""
    check(*SHARED[name], **STORED[how])


def test_layers_that_share_all_of_it_merge() -> None:
    """Side by side in every layer: one merged leaf."""
    model = check(*SHARED["blocks of layers"], backend={"cpu": {"merge": True}})
    assert [a.shape for a in model.params.values()] == [(2, 2 * H, H), (2, H, H)]


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@settings(max_examples=2, deadline=None)
@given(data=st.data(), count=st.integers(2, 6), pool=st.integers(1, 7), how=st.sampled_from([{}, *STORED.values()]))
def test_any_sharing(data: Any, count: int, pool: int, how: dict[str, Any]) -> None:
    """Weights drawn at random for every place in every layer, and for the head."""
    one = st.sampled_from([f"w.{i}" for i in range(pool)])
    keys = data.draw(st.lists(st.tuples(one, one, one), min_size=count, max_size=count))
    check(keys, data.draw(st.sampled_from(["", *sorted({k for layer in keys for k in layer})])), **how)


@pytest.mark.slow
def test_a_trained_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """Each weight once, with the values of the step; and it comes back in any mode."""
    keys, head = SHARED["by a layer that is left over"]
    model = check(keys, head)
    slopes = jax.jit(jax.grad(lambda p: model.apply(p, X).sum()))(model.params)
    stepped = model.replace({name: w - 0.1 * slopes[name] for name, w in model.params.items()})
    rlx.save(stepped, tmp_path / "saved")
    for roll in ("unroll", "scan"):
        again: Any = rlx.compile(
            flow_of(keys, head), tmp_path / "saved", profile=rlx.CompileProfile().replace(layers={"roll": roll})
        )
        np.testing.assert_allclose(again(X), stepped(X), rtol=1e-6, atol=1e-6)
    for key, value in stepped.weights().items():
        np.testing.assert_array_equal(again.weights()[key], value)


def test_two_stacks_on_the_same_weights() -> None:
    """A stack that runs twice over: both read one leaf."""
    flow = rlx.ModelFlow("m").input("x", ("b", "s", H)).repeat_layers(3, lambda i: Linear(A[i]))
    flow = flow.custom(lambda e, x: e.tanh(x)).repeat_layers(3, lambda i: Linear(A[i]))
    weights = {key: matrix(key) for key in A[:3]}
    model: Any = rlx.compile(flow, weights, program="train")
    assert {name: a.shape for name, a in model.params.items()} == {"a.{0..2}": (3, H, H)}
    want = X
    for key in (*A[:3], "", *A[:3]):
        want = want @ weights[key].T if key else np.tanh(want)
    np.testing.assert_allclose(model(X), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_generation_with_shared_layers() -> None:
    """Decoding with the layers scanned: the caches are each layer's own, the weights are shared."""
    spec = LlamaDecoderSpec(num_heads=2, head_dim=4, num_kv_heads=1)
    arrays = llama_weights(2, H, 8, 4, 6)
    layer: Callable[[int], BlockStage] = lambda i: blocks.llama_prefill_layer_composed(i % 2, spec)  # noqa: E731
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).repeat_layers(4, layer)
    profile = rlx.CompileProfile().replace(layers={"roll": "scan"}, backend={"cpu": {"merge": True}})
    model: Any = rlx.compile(flow, arrays, program="extend", profile=profile)
    state, steps = model.init_state(2, context=8), []
    for at in range(3):
        out, state = model(X[:, at : at + 1], lengths=np.ones(2, np.int32), state=state)
        steps.append(np.asarray(out))
    assert sum(a.size for a in model.params.values()) == sum(a.size for a in arrays.values())
    whole: Any = rlx.compile(flow, arrays)
    np.testing.assert_allclose(whole(X), np.concatenate(steps, 1), rtol=1e-4, atol=1e-5)
