"""The training step against a loop by hand, and its parts against the whole."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rlx_jax as rlx
from rlx_jax import errors, losses, train
from rlx_jax.blocks import Custom, Embed, Linear
from tests.oracles.comparing import assert_close
from tests.small import profile

V, H, B, S = 32, 8, 4, 6
RNG = np.random.default_rng(0)
BATCH = {"tokens": RNG.integers(0, V, (B, S)).astype(np.int32), "lengths": np.array([6, 2, 5, 3], np.int32)}
STAGES = (Embed("e", (V, H)), Custom(lambda emit, x: emit.tanh(x)), Linear("w", shape=(V, H)))


FLOW = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").stage(*STAGES)


@functools.cache
def small() -> rlx.CompiledModel:
    """An embedding, a function and a head: what compiles quickly."""
    return set_to()


def set_to(**tables: Any) -> rlx.CompiledModel:
    """The same with settings of a profile."""
    return rlx.compile(FLOW, program="train", profile=profile(**tables))


def assert_same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Two trees of parameters."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert_close(np.asarray(got[name], np.float32), np.asarray(array, np.float32), tolerance=tolerance)


def test_steps_are_those_of_a_loop_by_hand() -> None:
    """Loss, norm and parameters of three steps with decay and clipping."""
    model = small()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = train.init(model, optimizer, 0)
    params, memory = model.init(0), optimizer.init(model.init(0))
    step = train.make_step(model, optimizer, functools.partial(losses.cross_entropy, chunk=4))
    real = np.arange(1, S)[None] < BATCH["lengths"][:, None]

    def by_hand(p: Any) -> Any:
        nll = optax.softmax_cross_entropy_with_integer_labels(
            model.apply(p, BATCH["tokens"])[:, :-1], BATCH["tokens"][:, 1:]
        )
        return jnp.where(real, nll, 0.0).sum() / real.sum()

    @jax.jit
    def next_by_hand(params: Any, memory: Any) -> Any:
        loss, gradients = jax.value_and_grad(by_hand)(params)
        updates, memory = optimizer.update(gradients, memory, params)
        return loss, optax.apply_updates(params, updates), memory, gradients

    for number in range(3):
        with jax.numpy_dtype_promotion("standard"):
            loss, params, memory, gradients = next_by_hand(params, memory)
            norm = optax.tree.norm(gradients)
        state, metrics = step(state, BATCH)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
        assert metrics.tokens == float(real.sum()) and state.step == number + 1
        assert_same(state.params, params)
    assert len(step.jitted) == 1 and step.jitted[()]._cache_size() == 1


def test_microbatches_are_the_batch() -> None:
    """Parts have different numbers of targets, and targets weigh differently."""
    model, optimizer = small(), optax.sgd(1.0)
    batch = BATCH | {"weights": RNG.random((B, S)).astype(np.float32)}
    whole, in_parts = (train.make_step(model, optimizer, microbatches=n) for n in (1, 4))
    want, of_want = whole(train.init(model, optimizer, 0), batch)
    got, of_got = in_parts(train.init(model, optimizer, 0), batch)
    assert_same(got.params, want.params)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(getattr(of_got, name), getattr(of_want, name), rtol=1e-5)


@pytest.mark.parametrize(("precision", "leaf"), [
    ({"compute": "bf16"}, "bfloat16"), ({"compute": "bf16", "weights": "f32"}, "float32"),
], ids=str)  # fmt: skip
def test_precision_of_leaves_and_of_the_optimizer(precision: dict[str, str], leaf: str) -> None:
    """Master weights are f32 leaves of a program in bf16, and so are moments and steps; the loss falls either way."""
    model, optimizer = set_to(precision=precision), optax.adamw(1e-1)
    step, state, seen = train.make_step(model, optimizer), train.init(model, optimizer, 0), []
    types = jax.tree.map(lambda a: a.dtype, state)
    for _ in range(4):
        state, metrics = step(state, BATCH)
        seen.append(float(metrics.loss))
    assert {str(a.dtype) for a in state.params.values()} == {leaf} and jax.tree.map(lambda a: a.dtype, state) == types
    assert seen[-1] < seen[0] - 0.1 and state.step == 4
    text = jax.jit(functools.partial(losses.cross_entropy, model)).lower(state.params, BATCH["tokens"]).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("bf16" in line for line in products)


def test_state_and_step_on_a_mesh() -> None:
    """The optimizer's arrays lie as their parameters do; a step keeps that, and compiles once."""
    model, optimizer = small(), optax.adamw(1e-2)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    at = {"e": NamedSharding(mesh, PartitionSpec(None, "model")), "w": NamedSharding(mesh, PartitionSpec("model"))}
    batch = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    state = train.init(model, optimizer, jax.device_put(model.init(0), at))
    alone, want = train.init(model, optimizer, 0), None
    step = train.make_step(model, optimizer, microbatches=2)
    for _ in range(2):
        state, metrics = step(state, batch)
        alone, want = step(alone, BATCH)
        for tree in (state.params, state.optimizer[0].mu, state.optimizer[0].nu):
            assert {k: a.sharding for k, a in tree.items()} == at
    assert want is not None and state.optimizer[0].count.sharding.is_fully_replicated
    assert [f._cache_size() for f in step.jitted.values()] == [1, 1]
    np.testing.assert_allclose(metrics.loss, want.loss, rtol=1e-6)
    assert_same(state.params, alone.params)


def test_shapes_alone_are_lowered() -> None:
    """A state without arrays, as one restores into, is one of the same types."""
    model, optimizer = small(), optax.adamw(1e-2)
    shapes = jax.eval_shape(lambda: train.init(model, optimizer, 0))
    made = train.init(model, optimizer, 0)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    out = train.make_step(model, optimizer).lower(shapes, jax.ShapeDtypeStruct((B, S), jnp.int32)).out_info
    assert jax.tree.map(jnp.shape, out[0]) == jax.tree.map(jnp.shape, made) and out[1].loss.shape == ()


@pytest.mark.slow
def test_a_loss_gets_the_rest_of_the_batch_by_name() -> None:
    """What it needs beside tokens is no argument too many. A step consumes the state and not what it was made of."""
    model, optimizer = small().replace(small().init(0)), optax.sgd(0.0)

    def scaled(model: Any, params: Any, tokens: Any, scale: Any) -> Any:
        return losses.cross_entropy(model, params, tokens) * scale.mean()

    step, state = train.make_step(model, optimizer, scaled), train.init(model, optimizer)
    want = float(scaled(model, state.params, BATCH["tokens"], np.full(B, 3.0, np.float32)))
    _, metrics = step(state, {"tokens": BATCH["tokens"], "scale": np.full(B, 3.0, np.float32)})
    assert want > 3 and abs(float(metrics.loss) - want) < 1e-4
    assert model.params is not None and np.isfinite(model.params["w"]).all()


@pytest.mark.slow
def test_options_of_xla_reach_the_step() -> None:
    """One that it does not know is an error, as for every other program."""
    model = set_to(backend={"cpu": {"compiler_options": {"xla_no_such_option": 1}}})
    step = train.make_step(model, optax.sgd(0.1))
    with pytest.raises(Exception, match="xla_no_such_option"):
        step(train.init(model, optax.sgd(0.1), 0), np.ones((2, 4), np.int32))


@pytest.mark.parametrize("code", ["NOT_FOUND: All configs failed during profiling", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_out_of_memory_of_a_step(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way in which XLA reports a full device is one error, with what needs less memory and is not set yet."""

    def fail(*_: Any) -> Any:
        cause = "a bug" if code == "INTERNAL" else "Out of memory while trying to allocate 64.02GiB."
        raise jax.errors.JaxRuntimeError(f"{code}: {cause}")

    step = train.make_step(small(), optax.sgd(0.1))
    state = train.init(small(), optax.sgd(0.1), 0)
    monkeypatch.setattr(train.TrainStep, "_function", lambda *_: fail)
    expected = jax.errors.JaxRuntimeError if code == "INTERNAL" else errors.DeviceOutOfMemoryError
    with pytest.raises(expected) as error:
        step(state, BATCH)
    advice = ("64.02GiB", "step of 4 x 6 tokens", "microbatches=2", "layers.remat", "precision.compute", "mesh=")
    assert all(part in str(error.value) for part in advice) == (code != "INTERNAL")


@pytest.mark.parametrize(("hidden", "parts", "devices"), [
    ({"lengths": np.ones(B, np.int32)}, 1, 1),
    pytest.param({"weights": np.zeros((B, S), "f4")}, 2, 2, marks=pytest.mark.slow),
], ids=["lengths", "weights in parts over devices"])  # fmt: skip
def test_a_batch_without_targets_changes_nothing(hidden: dict[str, Any], parts: int, devices: int) -> None:
    """Neither decay nor momentum moves a parameter, in one piece, in parts, over devices; and the step counts."""
    model = small() if devices == 1 else rlx.compile(small().flow, program="train", mesh=devices)
    optimizer = optax.chain(optax.adamw(1e-2, weight_decay=0.1), optax.add_noise(0.1, 0.5, 3))
    step = train.make_step(model, optimizer, microbatches=parts)
    state, before = step(train.init(model, optimizer, 0), BATCH)
    first = numbers((state.params, state.optimizer))
    state, metrics = step(state, BATCH | hidden)
    jax.tree.map(np.testing.assert_array_equal, numbers((state.params, state.optimizer)), first)
    assert (int(state.step), float(metrics.tokens), float(metrics.loss), float(metrics.grad_norm)) == (2, 0, 0, 0)
    resumed, after = step(state, BATCH)
    assert after.tokens == before.tokens > 0 and int(resumed.step) == 3


def test_an_optimizer_may_widen_its_state() -> None:
    """A moment that is bf16 at first and f32 after a step, without targets too."""
    optimizer = optax.GradientTransformation(
        lambda p: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.bfloat16), p),
        lambda g, m, p: (jax.tree.map(jnp.negative, g), jax.tree.map(lambda a, b: a.astype("f4") + b, m, g)),
    )
    step = train.make_step(small(), optimizer)
    state, _ = step(train.init(small(), optimizer, 0), {"tokens": BATCH["tokens"], "labels": np.full((B, S), -100)})
    assert {a.dtype for a in state.optimizer.values()} == {np.dtype("float32")}


def numbers(tree: Any) -> Any:
    """The arrays of a tree on the host, random keys as their words."""
    return jax.tree.map(
        lambda a: np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a), tree
    )


def test_weights_that_cancel_are_targets() -> None:
    """Weights of both signs, as of advantages, may sum to 0: there are targets all the same."""
    model, optimizer = small(), optax.sgd(1.0)
    weights = np.tile(np.array([1, -1, 0, 0, 0, 0], np.float32), (B, 1))
    start = model.init(0)
    state, metrics = train.make_step(model, optimizer)(
        train.init(model, optimizer, start), {"tokens": BATCH["tokens"], "weights": weights}
    )
    assert float(metrics.tokens) == 0 and float(metrics.grad_norm) > 0
    assert any((state.params[name] != a).any() for name, a in start.items())
