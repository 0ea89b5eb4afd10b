"""`rlx_jax.nnx.FlowModule` as nnx users use a module: optax, jit, split and merge, orbax, inside other modules."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rlx_jax as rlx
from rlx_jax.errors import UnexpectedWeightError

V, H, B, S = 11, 6, 2, 5


def layer(i: int) -> Any:
    return rlx.LayerStack().residual_save().rms_norm(f"layers.{i}.norm").linear(f"layers.{i}.w").residual_add().build()


SHAPES: dict[str, tuple[int, ...]] = {"e": (V, H)}
for index in range(2):
    SHAPES |= {f"layers.{index}.norm": (H,), f"layers.{index}.w": (H, H)}
FLOW = (
    rlx.ModelFlow("lm")
    .input("ids", ("batch", "seq"), dtype="int32")
    .embed("e")
    .repeat_layers(2, layer)
    .lm_head(V, H, tied=True)
    .with_weights({key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in SHAPES.items()})
)
IDS = np.random.default_rng(0).integers(0, V, (B, S)).astype(np.int32)


def cross_entropy(logits: jax.Array, ids: Any) -> jax.Array:
    """Mean loss of the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


@pytest.fixture(autouse=True)
def plain_promotion() -> Iterator[None]:
    """optax mixes dtypes; only code of ours is held to strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@nnx.jit
def train_step(module: Any, optimizer: Any, ids: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(ids), ids))(module)
    optimizer.update(module, grads)
    return loss


def make(seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """A module and its optimizer."""
    module = rlx.nnx.FlowModule(FLOW, rngs=nnx.Rngs(seed), **options)
    return module, nnx.Optimizer(module, optax.adamw(1e-2), wrt=nnx.Param)


def batches(count: int, start: int = 0) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, V, (B, S)).astype(np.int32) for i in range(start, start + count)]


@pytest.fixture(scope="module")
def weights() -> Any:
    """Parameters of the flow under its checkpoint keys."""
    rng = np.random.default_rng(1)
    return {key: jnp.asarray(rng.standard_normal(shape).astype(np.float32) / 2) for key, shape in SHAPES.items()}


def test_training_is_that_of_apply(weights: Any) -> None:
    """Leaves and results are those of `rlx.compile` with the same weights; so are, of five steps of adamw, losses and
    parameters of `nnx.jit` against `jax.jit` over `.apply`."""
    module, model = rlx.nnx.FlowModule(FLOW, weights), rlx.compile(FLOW, weights)
    assert list(module.params) == list(model.params or {}) and {type(v) for v in module.params.values()} == {nnx.Param}
    assert ("params", "layers.0.norm") in dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    np.testing.assert_array_equal(module(ids=IDS), model.apply(weights, IDS))
    tx = optax.adamw(1e-2)
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    params, state = weights, tx.init(weights)

    @jax.jit
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(model.apply(p, ids), ids))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for ids in batches(5):
        params, state, want = step(params, state, ids)
        losses.append(float(want))
        assert abs(float(train_step(module, optimizer, ids)) - losses[-1]) <= 1e-6
    for name, array in module.arrays().items():
        np.testing.assert_allclose(array, params[name], atol=1e-6)
    np.testing.assert_array_equal(module.to_model()(IDS), module(IDS))


def test_the_training_program(weights: Any) -> None:
    """`program="train"` stacks equal layers."""
    profile = rlx.CompileProfile().replace(layers={"remat": "layer"})
    module = rlx.nnx.FlowModule(FLOW, weights, profile=profile, program="train")
    assert len(module.params) < len(weights) == len(module.to_model().weights())
    np.testing.assert_array_equal(module.to_model().weights()["layers.1.w"], weights["layers.1.w"])


def test_split_merge_clone(weights: Any) -> None:
    """The functional API: one graph definition for every set of numbers."""
    module = rlx.nnx.FlowModule(FLOW, weights)
    graphdef, state = nnx.split(module)
    assert nnx.graphdef(nnx.merge(graphdef, state)) == graphdef
    doubled = nnx.merge(graphdef, jax.tree.map(lambda x: 2 * x, state))
    np.testing.assert_array_equal(doubled.arrays()["layers.1.w"], 2 * weights["layers.1.w"])
    twin = nnx.clone(module)
    nnx.update(twin, jax.tree.map(jnp.zeros_like, nnx.state(twin)))
    assert not np.asarray(twin(IDS)).any() and np.asarray(module(IDS)).any()
    logits = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids))(state, IDS)
    np.testing.assert_allclose(logits, module(IDS), atol=1e-6)
    _, abstract = nnx.split(nnx.eval_shape(make))  # what one restores into, with its optimizer
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, nnx.split(make())[1])


def integer_flow() -> rlx.ModelFlow:
    """`E[permutation[ids]] · scale`, with a table of integers among the weights."""

    def permuted(emit: Any, ids: Any) -> Any:
        return emit.jax(lambda table, ids: table[ids], emit.param("permutation"), ids)

    return rlx.ModelFlow("permuted").input("ids", ("batch", "seq"), dtype="int32").custom(permuted).embed("e")


def test_integers_have_no_gradient() -> None:
    """A leaf of integers is part of the state, and neither differentiated nor updated."""
    table = np.random.default_rng(0).permutation(V).astype(np.int32)
    values = np.random.default_rng(1).standard_normal((V, 4)).astype(np.float32)
    module = rlx.nnx.FlowModule(integer_flow(), {"permutation": table, "e": values})
    assert type(module.params["permutation"]) is nnx.Variable
    optimizer = nnx.Optimizer(module, optax.sgd(1.0), wrt=nnx.Param)
    grads = nnx.grad(lambda m: m(IDS).sum())(module)
    assert list(nnx.to_pure_dict(grads)["params"]) == ["e"]
    optimizer.update(module, grads)
    np.testing.assert_array_equal(module.params["permutation"][...], table)
    count = np.bincount(table[IDS].ravel(), minlength=V)[:, None]
    np.testing.assert_allclose(module.params["e"][...], values - count, atol=1e-6)


def test_where_parameters_come_from(weights: Any) -> None:
    """`Rngs`, a key and a seed draw the same; weights win; without any of them it is an error that names both."""
    key, model = nnx.Rngs(7).params(), rlx.compile(FLOW)
    for rngs, seed in ((nnx.Rngs(7), key), (key, key), (7, 7)):
        drawn = rlx.nnx.FlowModule(FLOW, rngs=rngs).arrays()
        np.testing.assert_array_equal(drawn["layers.1.w"], model.init(seed)["layers.1.w"])
    given = rlx.nnx.FlowModule(FLOW, weights, rngs=nnx.Rngs(7)).arrays()
    np.testing.assert_array_equal(given["layers.1.w"], weights["layers.1.w"])
    with pytest.raises(UnexpectedWeightError):
        rlx.nnx.FlowModule(FLOW, {**weights, "extra": np.zeros(3, np.float32)})
