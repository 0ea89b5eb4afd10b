"""The loss in pieces against optax over whole logits, with its gradients; what it makes, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rlx_jax as rlx
from rlx_jax import losses
from rlx_jax.blocks import Custom, Embed, Linear, LmHead, LogitSoftcap
from tests.oracles.comparing import assert_close
from tests.small import profile

V, B, S = 77, 4, 13

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, V, (B, S)).astype(np.int32)
LENGTHS = np.array([13, 2, 7, 1], np.int32)


def noisy(model: rlx.CompiledModel) -> dict[str, Any]:
    """Random parameters, of which no vector is all ones or zeros."""
    rng = np.random.default_rng(1)
    drawn = model.init(0)
    return {k: a + jnp.asarray(0.1 * rng.standard_normal(a.shape), a.dtype) for k, a in drawn.items()}


def whole(model: Any, params: Any, ids: Any, real: Any, **inputs: Any) -> Any:
    """optax over all logits, in f32; the mean over real targets."""
    logits = model.apply(params, ids, **inputs)[:, :-1].astype(jnp.float32)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    return (nll * real).sum() / real.sum()


def check(ours: Any, theirs: Any, params: Any, loss: float = 1e-6, gradient: float = 1e-5) -> None:
    """Values and gradients of two functions of the parameters, each gradient relative to its largest."""
    (a, of_a), (b, of_b) = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=loss)
    assert a.dtype == jnp.float32 and a.shape == ()
    for name, want in of_b.items():
        assert of_a[name].dtype == want.dtype and float(jnp.abs(want).max()) > 0
        assert_close(np.asarray(of_a[name], np.float32), np.asarray(want, np.float32), tolerance=gradient)


REAL = (np.arange(1, S)[None] < LENGTHS[:, None]).astype(np.float32)


def test_it_is_the_loss_over_whole_logits() -> None:
    """Of a tied head and bent logits: ragged rows, one without any target, and pieces of 5 tokens, which 13 are not
    divided by."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").stage(Embed("e", (V, 8)))
    flow = flow.custom(lambda emit, x: emit.tanh(x)).stage(LmHead.tied(V, 8), LogitSoftcap(0.7))
    model = rlx.compile(flow, program="train")
    params = noisy(model)

    def ours(p: Any) -> Any:
        return losses.cross_entropy(model, p, IDS, lengths=LENGTHS, chunk=5)

    check(ours, lambda p: whole(model, p, IDS, REAL), params)
    got, want = (jax.jit(f)(params) for f in (ours, lambda p: whole(model, p, IDS, REAL)))
    np.testing.assert_allclose(got, want, rtol=1e-6)  # not differentiated


H = 8
FLOW = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").stage(Embed("e", (80, H)))


@functools.cache
def small(words: int = V) -> tuple[rlx.CompiledModel, dict[str, Any]]:
    """An embedding, a function and a head: what compiles quickly."""
    stages = Custom(lambda emit, x: emit.tanh(x)), Linear("w", shape=(words, H))
    model = rlx.compile(FLOW.stage(*stages), program="train")
    return model, noisy(model)


@pytest.mark.parametrize("chunk", [1, 100, None])
def test_pieces_change_nothing(chunk: int | None) -> None:
    """One token at a time, one short of all, more than there are, and what is chosen."""
    model, params = small()
    loss = jax.jit(lambda p: losses.cross_entropy(model, p, IDS, chunk=chunk))(params)
    np.testing.assert_allclose(loss, whole(model, params, IDS, np.ones((B, S - 1), np.float32)), rtol=1e-6)


def test_labels_weights_and_the_normaliser() -> None:
    """Targets that are given, some of which count more and some not; and `z_loss`."""
    model, params = small()
    labels = np.where(RNG.random((B, S)) < 0.3, -100, RNG.integers(0, 70, (B, S)))
    weights = RNG.random((B, S)).astype(np.float32)

    def theirs(p: Any) -> Any:
        logits = model.apply(p, IDS)[..., :70]
        lse = jax.nn.logsumexp(logits, -1)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(labels, 0)) + 0.01 * lse**2
        real = weights * (labels >= 0)
        return (nll * real).sum() / real.sum()

    def ours(p: Any) -> Any:
        options: Any = {"labels": labels, "weights": weights, "chunk": 4, "z_loss": 0.01, "vocab": 70}
        return losses.cross_entropy(model, p, IDS, **options)

    check(ours, theirs, params)


@pytest.mark.parametrize(("transpose", "tail"), [
    (False, lambda emit, x: emit.tanh(x * 0.5) + x), (True, lambda emit, x: emit.gelu(x)),
])  # fmt: skip
def test_a_head_with_a_bias_in_either_orientation(transpose: bool, tail: Any) -> None:
    """And logits that are scaled and bent afterwards, by functions of a stage of one's own."""
    flow = FLOW.stage(Linear("w", transpose, "b")).custom(tail)
    shapes = {"e": (80, H), "w": (V, H) if transpose else (H, V), "b": (V,)}
    weights = {k: RNG.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    model = rlx.compile(flow, weights, program="train")
    real = np.ones((B, S - 1), np.float32)
    check(lambda p: losses.cross_entropy(model, p, IDS, chunk=3), lambda p: whole(model, p, IDS, real), model.params)


def test_narrow_products() -> None:
    """The head's products are of bf16 and summed in f32; a gradient has the dtype of its leaf."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").stage(Embed("e", (V, H)))
    flow = flow.custom(lambda emit, x: emit.tanh(x)).stage(LmHead.tied(V, H))
    precise = profile(precision={"compute": "bf16", "weights": "f32"})
    model = rlx.compile(flow, program="train", profile=precise)
    params = noisy(model)
    real = np.ones((B, S - 1), np.float32)
    ours = functools.partial(losses.cross_entropy, model, tokens=IDS, chunk=5)
    check(ours, lambda p: whole(model, p, IDS, real), params, 1e-5, 2e-2)
    text = jax.jit(jax.grad(ours)).lower(params).as_text()
    head = [
        line for line in text.splitlines() if "dot_general" in line and f"x{V}x" in line.replace(f"<{V}x", f"x{V}x")
    ]
    assert len(head) == 3 and all("bf16" in line and line.endswith("f32>") for line in head)


def test_nothing_of_the_size_of_all_logits() -> None:
    """Neither for the loss nor for its gradient, which has three products with the head and no fourth."""
    model, params = small()
    ours = functools.partial(losses.cross_entropy, model, tokens=IDS, chunk=4)
    plain, both = (jax.jit(f).lower(params).as_text() for f in (ours, jax.grad(ours)))
    for text, products in ((plain, 1), (both, 3)):
        assert f"{B}x{S}x{V}x" not in text and f"{B}x4x{V}xf32" in text
        lines = [line for line in text.splitlines() if "dot_general" in line]
        assert sum(f"{B}x4x{V}x" in line for line in lines) == products


@pytest.mark.parametrize(("words", "spec"), [(77, (None, "model")), (78, ("model",))], ids=str)
def test_divided_over_devices(words: int, spec: tuple[str | None, ...]) -> None:
    """The batch over one axis of a mesh; the head divided along either of its axes."""
    model, params = small(words)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    ours = jax.jit(jax.value_and_grad(lambda p, ids: losses.cross_entropy(model, p, ids, chunk=5)))
    want, of_want = ours(params, jnp.asarray(IDS))
    at = {k: NamedSharding(mesh, PartitionSpec(*spec if k == "w" else ())) for k in params}
    ids = jax.device_put(IDS, NamedSharding(mesh, PartitionSpec("data")))
    got, of_got = ours(jax.device_put(params, at), ids)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for name, gradient in of_got.items():
        assert_close(np.asarray(gradient), np.asarray(of_want[name]), tolerance=1e-5)


def test_of_several_parameters_at_once_and_of_targets_that_are_none() -> None:
    """`jax.vmap` goes through; a word that there is not, which only traced tokens can have, is no number."""
    model, params = small()
    ours = functools.partial(losses.cross_entropy, model, tokens=IDS, chunk=5)
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    both = jax.value_and_grad(ours)
    loss, gradient = jax.jit(jax.vmap(both))(stacked)
    alone = jax.jit(both)
    for i in range(2):
        want, of_want = alone(jax.tree.map(lambda a, i=i: a[i], stacked))
        np.testing.assert_allclose(loss[i], want, rtol=1e-6)
        assert_close(np.asarray(gradient["w"][i]), np.asarray(of_want["w"]), tolerance=1e-5)
    wrong = np.where(np.indices(IDS.shape).sum(0) == 3, 79, IDS)
    assert jnp.isnan(jax.jit(lambda ids: losses.cross_entropy(model, params, ids))(wrong))
