"""What each field of a profile changes: one test a field, visible in the LIR, the jaxpr or the HLO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow

LLAMA = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 31, (2, 5)).astype(np.int32)


def llama(program: str = "forward", **tables: Any) -> Any:
    """A tiny Llama with random parameters, compiled with these settings."""
    profile = rlx.CompileProfile().replace(**tables)
    model = rlx.compile(Llama32Flow.for_prefill(LLAMA), profile=profile, program=program)
    return model.replace(params=model.init(0))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of nested jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: isinstance(p, jex.core.Jaxpr | jex.core.ClosedJaxpr)
        ):
            if isinstance(inner, jex.core.Jaxpr | jex.core.ClosedJaxpr):
                yield from equations(inner.jaxpr if isinstance(inner, jex.core.ClosedJaxpr) else inner)


def primitives(jaxpr: Any) -> list[str]:
    """The names of its primitives."""
    return [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]


def relative(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


# -- layers, and the program for training ------------------------------------------------------


def loss(model: Any) -> Any:
    """A function of the parameters to differentiate."""
    return lambda params: (model.apply(params, IDS) ** 2).sum()


@pytest.fixture(scope="module")
def plain_gradient() -> dict[str, np.ndarray]:
    """By checkpoint key: the gradient of the forward program, layers unrolled, nothing recomputed."""
    model = llama()
    return {k: np.asarray(v) for k, v in model.weights(jax.grad(loss(model))(model.params)).items()}


def test_training_scans_and_other_programs_unroll() -> None:
    """Unless the profile says otherwise; on a TPU everything scans."""
    assert "layers=unroll" in llama().text("lir", IDS)
    assert "layers=scan" in llama("train").text("lir", IDS)
    assert "layers=unroll" in llama("train", layers={"roll": "unroll"}).text("lir", IDS)
    assert llama("train", fusion={"target": "tpu"}).compiler.settings.scan
    assert "model.layers.{0..2}.mlp.up_proj.weight" in llama("train").params


def test_the_program_for_training_is_the_forward_program() -> None:
    train, forward = llama("train"), llama()
    assert [i.name for i in train.inputs] == [i.name for i in forward.inputs]
    assert relative(train(IDS), forward(IDS)) < 2e-6


@pytest.mark.parametrize("remat", ["none", "layer", "dots"])
@pytest.mark.parametrize("roll", ["scan", "unroll"])
def test_what_a_gradient_recomputes(remat: str, roll: str, plain_gradient: dict[str, np.ndarray]) -> None:
    """`layer` keeps nothing of a layer and computes all its products again; `dots` keeps those with weights."""
    model = llama("train", layers={"remat": remat, "roll": roll})
    jaxpr = jax.make_jaxpr(jax.grad(loss(model)))(model.params)
    names = primitives(jaxpr)
    assert ("remat2" in names or "checkpoint" in names) == (remat != "none")
    assert f"remat={remat}" in model.text("lir", IDS)
    # 9 products a layer (7 with weights, 2 of attention) and the head; a gradient has two more for each.
    layers = 1 if roll == "scan" else 3
    again = {"none": 0, "layer": 9 - 1, "dots": 2}[remat]  # the last product of a layer is not needed again
    assert names.count("dot_general") == layers * (27 + again) + 3
    gradient = model.weights(jax.grad(loss(model))(model.params))
    assert {k: g.shape for k, g in gradient.items()} == {k: g.shape for k, g in plain_gradient.items()}
    assert max(relative(gradient[k], g) for k, g in plain_gradient.items()) < 1e-5


def test_only_training_recomputes() -> None:
    """One profile serves all programs of a model."""
    model = llama(layers={"remat": "layer"})
    assert "remat=none" in model.text("lir", IDS)
    assert not {"remat2", "checkpoint"} & set(primitives(jax.make_jaxpr(jax.grad(loss(model)))(model.params)))


def test_training_steps_lower_the_loss() -> None:
    model = llama("train", layers={"remat": "layer"})

    @jax.jit
    def step(params: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(lambda p: jnp.square(model.apply(p, IDS)).mean())(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    params, losses = model.params, []
    for _ in range(3):
        value, params = step(params)
        losses.append(float(value))
    assert losses[0] > losses[1] > losses[2]
